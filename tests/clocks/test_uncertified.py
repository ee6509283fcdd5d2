"""Bounds that are guessed on a grid: right where they should be, and seen to fail where they must."""

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import fedpdmc as fp
from fedpdmc.clocks.thinning import Ceilings, piece_tops


def test_on_pieces_that_are_monotone_or_concave_the_guess_is_above_the_rate(double):
    s = np.linspace(0, 1, 2001)
    for f, slope in (
        (lambda s: np.sin(6 * s), lambda s: 6 * np.cos(6 * s)),
        (lambda s: np.exp(3 * s) - 5, lambda s: 3 * np.exp(3 * s)),
        (lambda s: -((s - 0.4) ** 2), lambda s: -2 * (s - 0.4)),
    ):
        nodes = np.linspace(0, 1, 9)
        value, rise = (jnp.asarray(g(nodes))[:, None, None] for g in (f, slope))
        tops = piece_tops(value, rise, jnp.full((1, 1), 0.125))[:, 0, 0]
        assert np.all(np.maximum(f(s), 0) <= np.asarray(tops)[np.minimum((s * 8).astype(int), 7)] + 1e-15)


def test_candidates_follow_the_piecewise_constant_rates(double):
    rng, n = np.random.default_rng(1), 20_000
    tops = np.broadcast_to(np.array([[0.5, 0.0], [0.0, 0.0], [1.0, 2.0]])[..., None], (3, 2, n))
    ceilings = Ceilings.of(jnp.asarray(tops), jnp.full(n, 0.5))
    point = ceilings.point(jnp.asarray(rng.exponential(size=n)), jnp.asarray(rng.random(n)))
    cell, offset, mark, ceiling, over = map(np.asarray, point)
    hit, wait = ~over, np.where(over, np.inf, 0.5 * cell + offset)
    level = np.where(wait < 0.5, 0.5 * wait, 0.25 + 3 * (wait - 1.0))
    truncated = (1 - np.exp(-level[hit])) / (1 - np.exp(-1.75))
    assert stats.kstest(truncated, "uniform").pvalue > 1e-4
    assert abs(hit.mean() - (1 - np.exp(-1.75))) < 5 * np.sqrt(0.15 / n)
    late = hit & (wait > 1.0)
    assert not np.any(hit & (wait > 0.5) & (wait < 1.0)) and np.all(mark[wait < 0.5] == 0)
    assert abs((mark[late] == 1).mean() - 2 / 3) < 5 * np.sqrt(0.25 / late.sum())
    assert np.all(ceiling[late] == np.where(mark[late] == 1, 2.0, 1.0))


def hidden(x, data):
    """A standard normal with a spike of energy that is narrower than the grid sees."""
    return 0.5 * jnp.sum(x**2) + 4.0 * jnp.exp(-0.5 * ((x[0] - 0.3) / data["width"]) ** 2)


@pytest.mark.parametrize(("width", "seen"), [(0.004, True), (1.0, False)])
def test_violations_are_counted_and_the_result_says_so(width, seen, tmp_path):
    site = fp.Site(hidden, data={"width": np.array(width)}, name="own")
    post = fp.sample(
        site, reference="identity", init=np.zeros(2), bounds="adaptive", dynamics=fp.ZigZag(), chains=16, duration=100.0,
        burn_in=2.0, seed=1, progress=False,
    )  # fmt: skip
    assert not post.certified and post.settings["bounds"] == "adaptive"
    assert (post.violations[0] > 0) == seen
    assert f"NOT certified: not exact; {post.violations[0]} violations seen" in post.summary().notes[-1]
    post.save(tmp_path / "run.zarr")
    again = fp.load(tmp_path / "run.zarr")
    assert not again.certified and again.violations[0] == post.violations[0]
    assert post.extend(duration=20.0, progress=False).violations[0] >= post.violations[0]
    if not seen:
        assert np.all(np.abs(post.mean()[1]) < 5 / np.sqrt(post.ess()["x1"]))


def test_built_in_models_stay_certified():
    site = fp.Site(fp.models.gaussian_mean(np.ones((3, 2))), name="own")
    post = fp.sample(
        site,
        bounds="adaptive",
        dynamics=fp.ZigZag(),
        reference="identity",
        chains=4,
        duration=5.0,
        seed=1,
        progress=False,
    )
    assert post.certified and post.violations[0] == 0
