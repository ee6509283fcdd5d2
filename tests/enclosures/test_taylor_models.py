"""Curves hold the values along lines and rotations, gradients too, and shrink as their order says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from jax.scipy import special
from tests.enclosures.cases import ARRAYS, ELEMENTWISE

from fedpdmc.enclosures import Curve, TimeInterval, enclose
from fedpdmc.enclosures.special_functions import FUNCTIONS
from fedpdmc.potentials.jax_function import curved_path

pytestmark = pytest.mark.usefixtures("double")

PATHS, POINTS = 200, 7
GROUP, WEIGHTS = np.array([2, 0, 1, 1, 2, 0]), np.random.default_rng(1).normal(size=(6, 4))


def grouped(x):
    """Effects of groups on a scale that is a parameter, slices, sums and a stable formula."""
    effect = x[0] + jnp.exp(x[1]) * jnp.concatenate([x[2:], x[:1]])
    eta = effect[GROUP] + WEIGHTS @ x
    return jnp.sum(jnp.logaddexp(0.0, eta) - 0.3 * eta) + jnp.log1p((jnp.exp(x[1]) / 5.0) ** 2) + special.logsumexp(x)


GRADIENTS = {
    "gradient of groups": (jax.grad(grouped), -1.5, 1.5),
    "gradient of two indices": (jax.grad(lambda x: jnp.sum(jnp.exp(x.reshape(2, 2)[GROUP % 2, 1]) * x[3])), -2, 2),
    "gradient of a large table": (jax.grad(lambda x: jnp.sum(jnp.tile(x, 10)[GROUP] ** 3)), -2, 2),
    "gradient of a contraction": (jax.grad(lambda x: jnp.sum(x.reshape(2, 2) @ x.reshape(2, 2))), -2, 2),
    "gradient of counts": (jax.grad(lambda x: jnp.sum(special.gammaln(jnp.exp(x) + 2.0) + jnp.cumsum(x, 0) ** 2)), -1, 1),
    "matrices on either side": (lambda x: WEIGHTS[:2] @ jnp.outer(x, x)[:, :3] @ WEIGHTS[:3], -2, 2),
    "powers": (lambda x: x**-3 + x**5 + jnp.sqrt(x) ** 3 + x ** jnp.asarray([0.5, 2.0, 3.3, -1.0]), 0.3, 3),
}  # fmt: skip
TABLES = {"elementwise": ELEMENTWISE, "arrays": ARRAYS, "gradients": GRADIENTS}


def on_paths(function, least, most, rotating, order, seed):
    """Whether curves hold the values at random times of random paths, and how many of them are finite, by length."""
    rng = np.random.default_rng(seed)
    scale = most - least
    a = least + scale * (0.3 + 0.4 * rng.random((4, PATHS)))
    room = np.minimum(scale, np.abs(a).min(0)) if least > 0 else scale
    v = rng.normal(size=(4, PATHS)) * room * 0.25
    length = rng.choice([1e-7, 1e-3, 0.1, 0.7], PATHS)
    h = length * (0.5 + rng.random(PATHS))

    @jax.jit
    def found(a, v, h, shares):
        curve = enclose(function, TimeInterval(order))(curved_path(rotating, a, v, h, order)[0])
        s = shares * h
        at = a * jnp.cos(s) + v * jnp.sin(s) if rotating else a + v * s
        values = jax.vmap(jax.vmap(function, -1, -1))(at)
        tau = (2 * shares - 1)[:, 0]
        tau = tau.reshape(len(shares), *(1,) * (values.ndim - 2), -1)
        middle = sum(part * tau**k for k, part in enumerate(curve.parts) if part is not None)
        off = jnp.abs(values - middle) - curve.error
        return jnp.max(off.reshape(len(shares), -1, PATHS), (0, 1)), jnp.max(curve.error.reshape(-1, PATHS), 0)

    off, error = found(a, v, h, rng.random((POINTS, 1, PATHS)))
    return np.asarray(off), np.asarray(error), length


@pytest.mark.parametrize(
    ("table", "rotating", "order"),
    [
        ("gradients", False, 3),
        pytest.param("elementwise", False, 3, marks=pytest.mark.long),
        pytest.param("elementwise", True, 3, marks=pytest.mark.long),
        pytest.param("arrays", False, 2, marks=pytest.mark.long),
        pytest.param("arrays", True, 3, marks=pytest.mark.long),
        pytest.param("gradients", True, 4, marks=pytest.mark.long),
    ],
)
@settings(max_examples=1, phases=[Phase.generate], deadline=None)
@given(seed=st.integers(0, 2**31))
def test_curves_hold_the_values_along_a_path(table, rotating, order, seed):
    for name, (function, least, most) in TABLES[table].items():
        off, error, length = on_paths(function, least, most, rotating, order, seed)
        finite = np.isfinite(error)
        assert np.all(off[finite] <= 0), name
        assert np.mean(finite[length < 0.01]) > 0.8, name


@pytest.mark.parametrize("order", [3, *(pytest.param(n, marks=pytest.mark.long) for n in (2, 5))])
def test_the_error_shrinks_with_the_power_that_the_order_says(order):
    function, a, v = jax.grad(grouped), jnp.full((4, 2), 0.3), jnp.ones((4, 2))
    h = jnp.asarray([0.1, 0.05])
    error = enclose(function, TimeInterval(order))(curved_path(False, a, v, h, order)[0]).error
    ratio = np.log2(error[:, 0] / error[:, 1])
    assert np.all(np.abs(ratio - (order + 1)) < 0.4)


@pytest.mark.parametrize("part", ["values", "beyond"])
def test_a_function_that_is_known_wrongly_is_caught(part, monkeypatch):
    def wrong(x, far, order):
        known = right.local(x, far, order)
        share = 0.5 if part == "beyond" else 1.0
        return known._replace(
            beyond=share * known.beyond, values=known.values if share < 1 else [1.01 * c for c in known.values]
        )

    right = FUNCTIONS["exp"]
    assert np.all(on_paths(jnp.exp, 0, 1, False, 3, 0)[0] <= 0)
    monkeypatch.setitem(FUNCTIONS, "exp", right._replace(local=wrong))
    assert np.any(on_paths(jnp.exp, 0, 1, False, 3, 0)[0] > 0)


def test_a_value_that_may_be_infinite_has_no_finite_bound():
    a, v = jnp.full((1, 2), 0.1), -jnp.ones((1, 2))
    found = enclose(lambda x: jnp.log(x) + 1 / x, TimeInterval(3))(
        curved_path(False, a, v, jnp.asarray([0.3, 0.01]), 3)[0]
    )
    assert not np.isfinite(found.error[0, 0]) and np.isfinite(found.error[0, 1])


def test_at_a_kink_the_range_of_both_sides_is_known():
    curve = Curve((jnp.asarray([[0.1, 1.0]]), jnp.asarray([[0.4, 0.4]])), jnp.zeros((1, 2)))
    found = enclose(jnp.abs, TimeInterval(3))(curve)
    low, high = found.range.lo[0, 0], found.range.hi[0, 0]
    assert -1e-6 < low <= 0.0 and 0.5 <= high < 0.5 + 1e-6 and found.error[0, 1] < 1e-12


@pytest.mark.parametrize("name", ["scan", "gradient of a Gaussian process"])
def test_loops_and_factors_of_matrices_are_followed(name):
    off, error, length = on_paths(*ARRAYS[name], True, 3, 0)
    assert np.all(off <= 0) and np.all(np.isfinite(error))
    # The fourth power of the length, where rounding is not all of it.
    assert np.median(error[length == 0.1]) < 1e-2 * np.median(error[length == 0.7])
