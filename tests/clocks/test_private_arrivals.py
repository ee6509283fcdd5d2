import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import fedpdmc as fp
from fedpdmc.clocks import follow
from fedpdmc.clocks.private_arrivals import BITS, Grid, count_thresholds, first_below, tile_points, time_grid
from fedpdmc.members.private_site import chain_secrets
from fedpdmc.plan import Plan
from fedpdmc.potentials import Quadratic

CHAINS, RHO, DIM = 1500, 0.8, 3
PASSES = np.int64(1 << 20)
# A skewed quadratic: rates of different sizes in each coordinate, some of them decreasing along the path.
PRECISION = np.array([[1.5, 0.4, 0.0], [0.4, 0.7, -0.2], [0.0, -0.2, 3.0]])
LINEAR = np.array([0.5, -1.0, 0.2])


def plans(dynamics, seed, far=1.0):
    """Two segments, long enough for nearly all to ring."""
    rng = np.random.default_rng(seed)
    a, v = far * rng.normal(size=(CHAINS, DIM)), rng.normal(size=(CHAINS, 2, DIM))
    v = np.sign(v) if dynamics.unit_speed else v
    duration = np.stack([rng.uniform(0, 0.5, CHAINS), np.full(CHAINS, 30.0)], 1)
    return Plan(jnp.zeros(CHAINS, int), jnp.asarray(a), jnp.asarray(duration), jnp.asarray(v))


@jax.jit
def _on_lines(grid, path, keys):
    return first_below(
        _potential(), fp.ZigZag(), jnp.asarray(RHO), jnp.asarray(1e-12), grid, path, keys, jnp.asarray(PASSES)
    )


@jax.jit
def _on_rotations(grid, path, keys):
    return first_below(
        _potential(),
        fp.FactorisedBoomerang(),
        jnp.asarray(RHO),
        jnp.asarray(1e-12),
        grid,
        path,
        keys,
        jnp.asarray(PASSES),
    )


def _potential():
    return Quadratic(jnp.asarray(PRECISION), jnp.asarray(LINEAR))


def walked(dynamics, seed, far=1.0, bits=0):
    """Path, times and marks; with a coarser grid by ``bits``."""
    plan = plans(dynamics, seed, far)
    grid = time_grid(np.asarray(plan.horizon), DIM)
    grid = Grid(grid.unit * 2.0**bits, grid.bits - bits, grid.base)
    path = follow(dynamics, plan)
    walk = _on_lines if dynamics.unit_speed else _on_rotations
    found = walk(Grid(*map(jnp.asarray, grid)), path, chain_secrets(b"k%d" % seed, b"p", CHAINS))
    assert np.all(np.asarray(found.fault) == 0) and np.all(np.asarray(found.rang))
    return path, np.asarray(found.anchor) * grid.unit, np.asarray(found.mark)


def compensators(dynamics, path, time, steps=801):
    """``∫ λ_i dt`` up to each time, by coordinate."""
    total = np.zeros((CHAINS, DIM))
    begin, duration = np.asarray(path.begin), np.asarray(path.duration)
    for s in range(2):
        seen = np.clip(time - begin[:, s], 0, duration[:, s])
        t = seen[:, None] * np.linspace(0, 1, steps)
        a, v = (np.asarray(x)[:, s, None, :] for x in (path.start, path.velocity))
        c, n = np.cos(t)[..., None], np.sin(t)[..., None]
        there, speed = (a + v * t[..., None], v + 0 * a) if dynamics.unit_speed else (a * c + v * n, v * c - a * n)
        rate = np.maximum(speed * (there @ PRECISION + LINEAR), 0) + RHO * np.abs(speed)
        total += np.trapezoid(np.broadcast_to(rate, (CHAINS, steps, DIM)), t[..., None], axis=1)
    return total


@pytest.mark.parametrize(
    ("far", "dynamics"),
    [
        pytest.param(1.0, fp.ZigZag(), id="near-lines"),
        pytest.param(10.0, fp.FactorisedBoomerang(), id="far-rotations"),
        pytest.param(10.0, fp.ZigZag(), id="far-lines", marks=pytest.mark.long),
        pytest.param(1.0, fp.FactorisedBoomerang(), id="near-rotations", marks=pytest.mark.long),
    ],
)
def test_arrivals_ring_at_their_rates_and_with_the_right_index(double, dynamics, far):
    """The compensator is exponential at the arrival, near and far: far away many layers of levels are looked at."""
    path, time, mark = walked(dynamics, 3, far)
    by_coordinate = compensators(dynamics, path, time)
    assert stats.kstest(by_coordinate.sum(1), "expon").pvalue > 1e-3
    for i in range(DIM):
        difference = (mark == i) - by_coordinate[:, i]
        assert abs(difference.mean()) < 4 * difference.std() / np.sqrt(CHAINS)
    # A fifth less would be seen.
    assert stats.kstest(0.8 * by_coordinate.sum(1), "expon").pvalue < 1e-3


def test_times_have_few_bits_and_every_one_of_them_is_even_handed(double):
    path, time, _ = walked(fp.ZigZag(), 4)
    unit = time_grid(np.asarray(path.horizon), DIM).unit
    j = time / unit
    np.testing.assert_array_equal(j, np.round(j))
    assert np.all((j >= 1) & (j < 2.0**BITS))
    # The low bits are fair coins: nothing of a rate is in them.
    low = j.astype(np.int64)[:, None] >> np.arange(12) & 1
    assert np.all(np.abs(low.mean(0) - 0.5) < 4 * 0.5 / np.sqrt(CHAINS))


def test_a_coarser_grid_moves_no_arrival_by_more_than_a_cell(double):
    """What is told on a grid is what was found on a finer one, rounded up, but for rates that are taken at its points."""
    fine, coarse = (walked(fp.ZigZag(), 5, bits=bits) for bits in (0, 12))
    unit = coarse[1] * 0 + time_grid(np.asarray(fine[0].horizon), DIM).unit * 2.0**12
    same = np.abs(np.ceil(fine[1] / unit) * unit - coarse[1]) < 1e-12
    # Cells of 2⁻¹⁴ time units, rates that change by about ten a unit of time: one in a few hundred arrivals at most.
    assert same.mean() > 0.985


@pytest.mark.parametrize("dim", [1, 2, 3, 6, 100])
def test_the_number_of_points_of_a_tile_is_poisson(dim):
    halvings = int(2 * dim - 1).bit_length()
    mean = dim / 2**halvings
    assert 0.25 < mean <= 0.5
    exact = stats.poisson.cdf(np.arange(16), mean)
    np.testing.assert_allclose(count_thresholds(dim).astype(float) / 2.0**64, exact, rtol=1e-15)
    # More than there is room for: below what 64 bits can tell from nothing.
    assert stats.poisson.sf(16, mean) < 2.0**-64 * 1.5


@pytest.mark.parametrize("layer", [0, 1, 4])
def test_the_points_of_tiles_are_uniform_in_the_plane(double, layer):
    """Places, levels and coordinates: nothing but the key, the layer and the tile decides them."""
    chains = 6000
    grid = time_grid(np.full(chains, 0.9), DIM)
    points = tile_points(
        Grid(*map(jnp.asarray, grid)), DIM, chain_secrets(b"s", b"p", chains), jnp.zeros(chains, int),
        jnp.asarray(layer), jnp.asarray(np.full(chains, 5 << 20)),
    )  # fmt: skip
    there = np.asarray(points.present)
    assert stats.poisson.pmf(0, 0.375) == pytest.approx((there.sum(0) == 0).mean(), abs=4 * 0.5 / np.sqrt(chains))
    width = 2.0 ** (int(grid.bits[0]) - max(layer - 1, 0))
    place = np.asarray(points.place)[there] / 2.0**32
    tile = np.floor((5 << 20) / width)
    assert stats.kstest(place / width - tile, "uniform").pvalue > 1e-3
    low, high = (0.0, 1.0) if layer == 0 else (2.0 ** (layer - 1), 2.0**layer)
    level = np.asarray(points.level)[there] / grid.base[0]
    assert stats.kstest((level - low) / (high - low), "uniform").pvalue > 1e-3
    counts = np.bincount(np.asarray(points.mark)[there], minlength=DIM)
    assert stats.chisquare(counts).pvalue > 1e-3


def test_a_plan_that_ends_sooner_is_silent(double):
    plan = Plan(jnp.zeros(2, int), jnp.zeros((2, 3)), jnp.asarray([[0.0], [1e-9]]), jnp.ones((2, 1, 3)))
    grid = time_grid(np.asarray(plan.horizon), DIM)
    found = _on_lines(Grid(*map(jnp.asarray, grid)), follow(fp.ZigZag(), plan), chain_secrets(b"k", b"p", 2))
    assert not np.any(np.asarray(found.rang)) and np.all(np.asarray(found.fault) == 0)
