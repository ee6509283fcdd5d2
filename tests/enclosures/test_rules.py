"""Every rule holds every value: on random boxes, and as a line along random lines and rotations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tests.enclosures.cases import ARRAYS, ELEMENTWISE

from fedpdmc.enclosures import Interval, TimeInterval, enclose
from fedpdmc.enclosures.special_functions import FUNCTIONS, falling
from fedpdmc.potentials.jax_function import curved_path

pytestmark = pytest.mark.usefixtures("double")

BOXES, POINTS = 300, 6
# Rounding that a wider box may have less of.
ROUNDING = 1e-9
# Of arrays, those that most models need; the others take long to trace.
USUAL = ("dot_general", "reduce_sum", "reduce_max", "softmax", "gather", "scatter-add", "triangular_solve")
# Of functions of single numbers, those that most models need; the others have their intervals checked every day.
COMMON = (
    "exp", "log", "logistic", "softplus", "logaddexp", "sqrt", "sin", "log_ndtr", "lgamma", "integer_pow", "pow", "mul",
    "div", "abs, sign", "max, min", "where",
)  # fmt: skip
TABLES = {
    "elementwise": ELEMENTWISE,
    "common": {name: ELEMENTWISE[name] for name in COMMON},
    "usual": {name: ARRAYS[name] for name in USUAL},
    "arrays": ARRAYS,
}


def inside(lo, y, hi):
    """Where a value is held; a bound that is not finite claims nothing."""
    return ((lo <= y) & (y <= hi)) | ~(jnp.isfinite(lo) & jnp.isfinite(hi))


def boxes(table):
    """Whether intervals hold the values of points within and the intervals of smaller boxes, and whether they are finite."""

    def one(function, lo, hi, shares, inner):
        wide = enclose(function)(Interval(lo, hi))
        narrow = enclose(function)(Interval(lo + inner[0] * (hi - lo), hi - inner[1] * (hi - lo)))
        values = jax.vmap(lambda u: function(lo + u * (hi - lo)))(shares)
        room = ROUNDING * (1 + jnp.abs(wide.lo) + jnp.abs(wide.hi))
        nested = inside(wide.lo - room, narrow.lo, wide.hi + room) & inside(wide.lo - room, narrow.hi, wide.hi + room)
        return jnp.all(inside(wide.lo, values, wide.hi)), jnp.all(nested), jnp.all(jnp.isfinite(wide.lo + wide.hi))

    def everything(ends, shares, inner):
        found = {}
        for name, (function, least, most) in TABLES[table].items():
            lo, hi = (least + (most - least) * x for x in ends)
            found[name] = jax.vmap(functools.partial(one, function))(lo, hi, shares, inner)
        return found

    return everything


def paths(table, rotating):
    """Whether lines of time hold the values along a path, and how many are finite."""

    def one(function, a, v, h, shares):
        found = enclose(function, TimeInterval(1))(curved_path(rotating, a.T, v.T, h, 1)[0])
        s = (h[:, None] * shares)[..., None]
        a, v = a[:, None], v[:, None]
        at = a * jnp.cos(s) + v * jnp.sin(s) if rotating else a + v * s
        values = jax.vmap(jax.vmap(function))(at)
        tau = (2 * shares - 1).reshape(*shares.shape, *(1,) * (values.ndim - 2))
        *parts, error = (
            jnp.moveaxis(jnp.asarray(x), -1, 0)[:, None] for x in (*found.parts, found.error) if x is not None
        )
        middle = sum(part * tau**k for k, part in enumerate(parts))
        lo, hi = middle - error, middle + error
        axes = tuple(range(1, values.ndim))
        return jnp.all(inside(lo, values, hi), axes), jnp.all(jnp.isfinite(lo + hi), axes)

    def everything(start, velocity, h, shares):
        found = {}
        for name, (function, least, most) in TABLES[table].items():
            scale = most - least
            a = least + scale * (0.3 + 0.4 * start)
            v = velocity * jnp.minimum(scale, jnp.min(jnp.abs(a), -1, keepdims=True) if least > 0 else scale) * 0.25
            found[name] = one(function, a, v, h, shares)
        return found

    return everything


@pytest.mark.parametrize("table", ["elementwise", pytest.param("arrays", marks=pytest.mark.long)])
@settings(max_examples=1, phases=[Phase.generate])
@given(seed=st.integers(0, 2**31))
def test_intervals_hold_their_values_and_smaller_intervals(table, seed):
    rng = np.random.default_rng(seed)
    width = rng.choice([1e-9, 1e-3, 0.1, 0.5, 1.0], (BOXES, 1))
    start = (1 - width) * rng.random((BOXES, 4))
    ends = start, start + width * rng.random((BOXES, 4))
    held = boxes(table)(ends, rng.random((BOXES, POINTS, 4)), 0.5 * rng.random((BOXES, 2, 4)))
    for name, (values, nested, finite) in held.items():
        assert np.all(values), name
        assert np.all(nested), name
        assert np.mean(finite[width[:, 0] < 0.2]) > 0.7, name


@pytest.mark.parametrize(
    ("table", "rotating"),
    [
        pytest.param("common", True, id="common-rotation"),
        pytest.param("elementwise", True, id="elementwise-rotation", marks=pytest.mark.long),
        pytest.param("usual", False, id="usual-line", marks=pytest.mark.long),
        pytest.param("arrays", False, id="arrays-line", marks=pytest.mark.long),
        pytest.param("elementwise", False, id="elementwise-line", marks=pytest.mark.long),
        pytest.param("arrays", True, id="arrays-rotation", marks=pytest.mark.long),
    ],
)
@settings(max_examples=1, phases=[Phase.generate])
@given(seed=st.integers(0, 2**31))
def test_lines_hold_the_values_along_a_path(table, rotating, seed):
    rng = np.random.default_rng(seed)
    length = rng.choice([0.0, 1e-7, 1e-3, 0.1, 0.7], BOXES)
    h = length * (0.5 + rng.random(BOXES))
    held = paths(table, rotating)(rng.random((BOXES, 4)), rng.normal(size=(BOXES, 4)), h, rng.random((BOXES, POINTS)))
    for name, (values, finite) in held.items():
        assert np.all(values), name
        assert np.mean(finite[length < 0.01]) > 0.8, name


@pytest.mark.parametrize("wrong", ["range", "local"])
def test_a_rule_that_is_too_narrow_is_caught(wrong, monkeypatch):
    right = FUNCTIONS["exp"]

    def narrow(x, far, order):
        known = right.local(x, far, order)
        return known._replace(beyond=0.9 * known.values[0] / 2)

    monkeypatch.setitem(FUNCTIONS, "exp", right._replace(**{wrong: falling(jnp.exp) if wrong == "range" else narrow}))
    a, v, s = jnp.zeros(4), jnp.ones(4), jnp.linspace(0.0, 0.5, 9)[:, None]
    if wrong == "range":
        found = enclose(jnp.exp)(Interval(a, v))
        assert not np.all(inside(found.lo, jnp.exp(a + s), found.hi))
    else:
        path = curved_path(False, a[:, None], v[:, None], jnp.array([0.5]), 1)[0]
        found = enclose(jnp.exp, TimeInterval(1))(path)
        assert not np.all(
            jnp.exp(a + s) <= (found.parts[0] + found.error + found.parts[1] * (4 * s[:, None] - 1))[..., 0]
        )
