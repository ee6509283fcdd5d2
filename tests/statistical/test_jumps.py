"""Posteriors that jump: a change point and an order, against exact sums and quadrature, and without the jumps."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from tests.statistical.checks import t_test

import fedpdmc as fp
from fedpdmc.members import run_coordinates

T = np.arange(12.0)
Y = np.array([1.0, 3.0, 2.0, 1.0, 2.0, 6.0, 4.0, 7.0, 3.0, 5.0, 6.0, 4.0])
PRIOR = fp.models.normal_prior(3, mean=[1.0, 1.0, 6.0], scale=[1.0, 1.0, 3.0])
REFERENCE = fp.Reference([0.7, 1.5, 5.0], [0.4, 0.2, 1.5])
DYNAMICS = {
    "ZigZag": (fp.ZigZag(), 150.0),
    "BouncyParticle": (fp.BouncyParticle(), 300.0),
    "Boomerang": (fp.Boomerang(), 300.0),
    "Boomerang, draws": (fp.Boomerang(bounce="draw"), 300.0),
    "FactorisedBoomerang": (fp.FactorisedBoomerang(excess=0.2), 300.0),
}


def counts(x, data):
    """Poisson counts with one mean before the time x[2] and another one after."""
    log_mean = jnp.where(data["t"] < x[2], x[0], x[1])
    return jnp.sum(jnp.exp(log_mean) - data["y"] * log_mean)


def truth():
    """Moments of the change point given which counts come before it, and of the means by quadrature."""
    axis = np.linspace(-4.0, 5.0, 4001)

    def piece(total, count):
        weight = np.exp(total * axis - count * np.exp(axis) - 0.5 * (axis - 1.0) ** 2)
        return weight.sum(), np.array([weight @ axis**k for k in (1, 2, 3)]) / weight.sum()

    fine = np.linspace(-14.0, 26.0, 400_001)
    place = np.searchsorted(T, 0.5 * (fine[1:] + fine[:-1]))
    middle = 0.5 * (fine[1:] + fine[:-1])
    density = np.exp(-0.5 * ((middle - 6.0) / 3.0) ** 2)
    total, moments = 0.0, np.zeros(9)
    for before in range(len(T) + 1):
        own = density * (place == before)
        one, first = piece(Y[:before].sum(), before)
        two, second = piece(Y[before:].sum(), len(T) - before)
        mass = own.sum() * one * two
        total += mass
        powers = np.array([own @ middle**k for k in (1, 2, 3)]) / own.sum()
        moments += mass * np.concatenate([first, second, powers])
    return moments / total


def run(dynamics, duration, sites=2, chains=64):
    parts = [fp.Site(counts, data={"t": T[i::sites], "y": Y[i::sites]}, name=f"site {i}") for i in range(sites)]
    return fp.sample(
        parts, PRIOR, dynamics=dynamics, reference=REFERENCE, chains=chains, duration=duration, burn_in=20.0, seed=5,
        progress=False,
    )  # fmt: skip


def compared(post):
    draws = post.draws(int(post.duration))
    values = np.concatenate([draws[..., [k]] ** p for k in range(3) for p in (1, 2, 3)], -1)
    return t_test([f"x{k}^{p}" for k in range(3) for p in (1, 2, 3)], values.mean(1), truth())


@pytest.mark.parametrize("name", ["ZigZag", *(pytest.param(n, marks=pytest.mark.long) for n in list(DYNAMICS)[1:])])
def test_a_change_point_has_its_posterior(name):
    post = run(*DYNAMICS[name])
    found = compared(post)
    assert post.certified and found.exact, str(found)
    assert "surfaces" in str(post.certificate)


def test_without_the_jumps_the_change_point_is_elsewhere(monkeypatch):
    monkeypatch.setattr(run_coordinates, "with_jumps", lambda clock, *_: clock)
    assert not compared(run(*DYNAMICS["ZigZag"])).exact


@pytest.mark.long
def test_a_wall_within_the_function_is_a_wall():
    """Waiting times that begin at the parameter: its posterior ends at the shortest of them."""
    waits = 1.0 + np.random.default_rng(3).exponential(1.0, 30)
    limit = waits.min()

    def shifted(x, data):
        return jnp.where(jnp.all(data["t"] > x[0]), jnp.sum(data["t"] - x[0]), jnp.inf)

    sites = [fp.Site(shifted, data={"t": waits[i::2]}, name=f"clinic {i}") for i in range(2)]
    post = fp.sample(
        sites, fp.models.normal_prior(1, scale=3.0), dynamics=fp.Boomerang(), reference=fp.Reference([limit - 0.03], [0.03]),
        init=[limit - 0.1], chains=64, duration=400.0, seed=1, progress=False,
    )  # fmt: skip
    axis = np.linspace(limit - 2.0, limit, 200_001)
    weight = np.exp(30 * (axis - limit) - 0.5 * (axis / 3) ** 2)
    draws = post.draws(400)
    found = t_test(["mean"], draws.mean(1), np.array([weight @ axis / weight.sum()]))
    assert post.certified and draws.max() <= limit + 1e-9 and found.exact, str(found)


@pytest.mark.long
def test_an_order_of_two_parameters_within_the_function():
    def ordered(x, data):
        return jnp.where(x[0] < x[1], 0.0, 2.0) + 0.5 * jnp.sum((data - x) ** 2) * 0.5

    data = np.array([0.4, -0.3])
    post = fp.sample(
        fp.Site(ordered, data=data, name="a"), fp.models.normal_prior(2), dynamics=fp.Boomerang(),
        reference=fp.Reference([0.0, 0.0], [1.0, 1.0]), chains=64, duration=400.0, burn_in=20.0, seed=2, progress=False,
    )  # fmt: skip
    axis = np.linspace(-6, 6, 1201)
    x = np.stack(np.meshgrid(axis, axis, indexing="ij"), -1).reshape(-1, 2)
    gap = x[:, 0] - x[:, 1]
    step = np.where(np.abs(gap) < 1e-9, 0.5 * (1 + np.exp(-2.0)), np.where(gap < 0, 1.0, np.exp(-2.0)))
    weight = step * np.exp(-0.25 * np.sum((data - x) ** 2, 1) - 0.5 * np.sum(x**2, 1))
    weight /= weight.sum()
    draws = post.draws(400)
    values = np.concatenate([draws, draws**2, draws[..., :1] < draws[..., 1:]], -1)
    expected = np.concatenate([weight @ x, weight @ x**2, [weight @ ((gap < -1e-9) + 0.5 * (np.abs(gap) < 1e-9))]])
    found = t_test([*"abcde"], values.mean(1), expected)
    assert post.certified and found.exact, str(found)


LOW, HIGH = np.array([-0.5, -0.2]), np.array([1.0, 0.8])
RNG = np.random.default_rng(0)
X = RNG.normal(size=(60, 2))
WINS = (RNG.random(60) < 1 / (1 + np.exp(-X @ [1.5, -1.0]))).astype(float)


def logistic(x, data):
    eta = data["X"] @ x
    return jnp.sum(jnp.logaddexp(0.0, eta) - data["y"] * eta)


def boxed(x, data):
    """The same, infinite beyond the box: what holds inside of it is not what holds outside."""
    return jnp.where(jnp.all((x >= LOW) & (x <= HIGH)), logistic(x, data), jnp.inf)


@pytest.mark.parametrize("dynamics, reference, function", [
    (fp.BouncyParticle(), "identity", boxed),
    pytest.param(fp.BouncyParticle(bounce="draw"), "identity", boxed, marks=pytest.mark.long),
    pytest.param(fp.ZigZag(), "identity", boxed, marks=pytest.mark.long),
    pytest.param(fp.Boomerang(), "identity", boxed, marks=pytest.mark.long),
    pytest.param(fp.BouncyParticle(), "identity", logistic, marks=pytest.mark.long),
    pytest.param(fp.ZigZag(), "identity", logistic, marks=pytest.mark.long),
    pytest.param(fp.BouncyParticle(), fp.Reference([0.85, -0.1], [0.13, 0.1]), boxed, marks=pytest.mark.long),
    pytest.param(fp.ZigZag(), fp.Reference([0.85, -0.1], [0.13, 0.1]), boxed, marks=pytest.mark.long),
])  # fmt: skip
def test_a_box_with_the_mode_outside_of_it(dynamics, reference, function):
    limits: Any = (
        {} if function is boxed else {"constraints": (np.concatenate([np.eye(2), -np.eye(2)]), [*HIGH, *-LOW])}
    )
    post = fp.sample(
        fp.Site(function, data={"X": X, "y": WINS}, name="a"), fp.models.normal_prior(2), dynamics=dynamics,
        reference=reference, init=[0.5, 0.3], chains=64, burn_in=10.0, duration=20.0, seed=1, progress=False, **limits,
    )  # fmt: skip
    axes = [np.linspace(low, high, 501)[1::2] for low, high in zip(LOW, HIGH, strict=True)]
    x = np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, 2)
    eta = x @ X.T
    weight = np.exp(-np.sum(np.logaddexp(0, eta) - WINS * eta, 1) - 0.5 * np.sum(x**2, 1))
    weight /= weight.sum()
    draws = post.draws(400)
    values, exact = (np.concatenate([a, a**2, a[..., :1] * a[..., 1:]], -1) for a in (draws, x))
    found = t_test([*"abcde"], values.mean(1), weight @ exact)
    assert post.certified and found.exact and min(found.ess) > 300, str(found)
    assert np.all((draws >= LOW - 1e-9) & (draws <= HIGH + 1e-9))
