"""What the interpreter does with a program as a whole."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from jax import lax
from jax.scipy.special import betaln

from fedpdmc import enclosures
from fedpdmc.enclosures import Curve, Interval, TimeInterval, enclose, smoothed
from fedpdmc.enclosures.intervals import Box
from fedpdmc.errors import NoEnclosure

pytestmark = pytest.mark.usefixtures("double")


NUMBER = np.asarray(1.0)


def box():
    return Interval(jnp.array([0.1, 0.2]), jnp.array([0.3, 0.9]))


def line(function, a, v, h, order=1):
    """A function on the path ``a + v s`` until h, as a polynomial of ``s/h`` in [−1, 1]."""
    a, half = jnp.asarray(a)[..., None], 0.5 * h * jnp.asarray(v)[..., None]
    return enclose(function, TimeInterval(order))(Curve((a + half, half), jnp.zeros(a.shape)))


def off(found, function, a, v, h):
    """By how much values on the path are outside of it; negative if none is."""
    s = jnp.linspace(0.0, h, 21)
    values = jax.vmap(lambda t: function(a + v * t))(s)
    tau = (2 * s / h - 1).reshape(-1, *(1,) * (values.ndim - 1))
    middle = sum(part[..., 0] * tau**k for k, part in enumerate(found.parts) if part is not None)
    return jnp.abs(values - middle) - found.error[..., 0]


def sorted_sum(x):
    return jnp.sum(jnp.sort(x) * jnp.arange(2.0))


def test_an_unknown_primitive_is_named_with_its_place_and_the_remedy():
    with pytest.raises(
        NoEnclosure, match=r"'sort' at .*test_interpreter.py:\d+.*sorted_sum.*register\('sort'\)"
    ) as error:
        enclose(sorted_sum)(box())
    assert error.value.primitive == "sort" and error.value.reason is None


@pytest.mark.parametrize(
    "loop", [lambda f, x: lax.fori_loop(0, 3, lambda i, c: f(c), x), lambda f, x: lax.cond(True, f, f, x)]
)
def test_an_unknown_primitive_within_a_loop_or_a_branch_is_named(loop):
    with pytest.raises(NoEnclosure, match=r"'sort' at .*test_interpreter.py:\d+") as error:
        enclose(lambda x: loop(jnp.sort, x))(box())
    assert error.value.primitive == "sort" and error.value.reason is None


def test_a_registered_rule_is_used(monkeypatch):
    monkeypatch.setitem(Box.rules, "tan", Box.rules.get("tan"))

    @enclosures.register("tan")
    def tan(x, **params):
        return Interval(jnp.tan(x.lo), jnp.tan(x.hi)).widened()

    found = enclose(lambda x: 2 * jnp.tan(x))(box())
    np.testing.assert_allclose(found.hi, 2 * np.tan([0.3, 0.9]), rtol=1e-9)
    moving = line(jnp.tan, jnp.zeros(2), jnp.ones(2), 0.1)
    assert np.all(off(moving, jnp.tan, jnp.zeros(2), jnp.ones(2), 0.1) <= 0) and np.all(moving.error < 0.06)


def test_a_registered_rule_of_whole_arrays_is_used_along_a_path(monkeypatch):
    monkeypatch.setitem(Box.rules, "sort", None)

    @enclosures.register("sort")
    def sort(x, dimension, **params):
        return (Interval(jnp.sort(x.lo, dimension), jnp.sort(x.hi, dimension)).widened(),)

    a, v = jnp.array([0.3, 0.1, 0.2]), jnp.array([0.0, 1.0, -1.0])
    assert np.all(off(line(jnp.sort, a, v, 0.05), jnp.sort, a, v, 0.05) <= 0)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: lax.while_loop(lambda c: c[0] < 1, lambda c: c + 0.1, x), "length is not fixed"),
        (lambda x: lax.cond(x[0] > 0.2, jnp.sin, jnp.cos, x), "condition depends"),
        (lambda x: jnp.arange(3.0)[x.astype(int)], "place that depends"),
        (lambda x: jnp.linalg.solve(jnp.diag(x), x), "."),
    ],
    ids=["while", "cond", "gather", "solve"],
)
def test_what_cannot_be_bounded_is_refused(function, reason):
    with pytest.raises(NoEnclosure, match=reason):
        enclose(function)(box())


@jax.jit
def log_ndtr(x):
    return 2 * x


def test_a_function_that_is_called_like_one_of_jax_is_not_taken_for_it():
    found = enclose(log_ndtr)(box())
    np.testing.assert_allclose(found.hi, [0.6, 1.8], rtol=1e-9)
    known = enclose(jax.scipy.special.log_ndtr)(box())
    np.testing.assert_allclose(known.hi, jax.scipy.special.log_ndtr(box().hi), rtol=1e-9)


@pytest.mark.parametrize("order", [1, 2])
def test_zeros_of_an_array_do_not_hide_what_is_not_a_number(order):
    """Zero times NaN is NaN; the zeros of autodiff are left out, and those that a user multiplies with are not."""
    nothing = np.zeros(2)
    found = line(lambda x: nothing * jnp.sqrt(x), [-0.2, 0.3], jnp.ones(2), 0.1, order).error[:, 0]
    assert np.isnan(found[0]) and found[1] < 1e-9


def test_comparisons_of_a_branch_are_kept_for_its_gradient():
    def kink(x):
        return lax.cond(NUMBER > 0, lambda t: jnp.sum(jnp.abs(t)), lambda t: 2 * t[0], x)

    path = Curve((jnp.array([[-0.2], [0.3]]), 0.05 * jnp.ones((2, 1))), jnp.zeros((2, 1)))
    found = enclose(jax.grad(kink), TimeInterval(2))(path)
    np.testing.assert_allclose(found.parts[0][:, 0], [-1.0, 1.0])
    assert np.all(found.error < 1e-9)


def test_points_stay_points():
    found = enclose(lambda x, y: (jnp.exp(y), x + y))(box(), jnp.ones(2))
    assert isinstance(found[0], jax.Array) and isinstance(found[1], Interval)


def test_value_and_slope_are_exact_however_the_formula_is_written():
    def clumsy(x):
        return jnp.exp(x) / (1 + jnp.exp(x)) - x * (1 - x) / (x + 2)

    a, v = jnp.array([0.3, -0.4]), jnp.array([1.0, 2.0])
    found = line(clumsy, a, v, 0.2)
    value, slope = jax.jvp(clumsy, (a + 0.1 * v,), (0.1 * v,))
    np.testing.assert_allclose(found.parts[0][:, 0], value, rtol=1e-12)
    np.testing.assert_allclose(found.parts[1][:, 0], slope, rtol=1e-12)
    assert np.all(found.error < 0.15)
    assert np.all(line(clumsy, a, v, 1e-6).error < 1e-10)


@pytest.mark.parametrize("forward", [True, False])
def test_derivatives_of_clip_max_and_min_are_exact_away_from_their_kinks(forward):
    """JAX asks ``x == max(x, y)``: of enclosures that overlap it would never be answered, and the slope be lost."""

    def kinked(x):
        return jnp.sum(jnp.clip(x, 0.0, 1.0) ** 2 + jnp.maximum(x, x[::-1]) * jnp.minimum(0.35, x))

    a, v = jnp.array([0.3, 0.7]), jnp.array([1.0, 2.0])
    slope = jax.grad(kinked) if not forward else lambda x: jax.jvp(kinked, (x,), (v,))[1][None]
    found = line(slope, a, v, 0.01)
    np.testing.assert_allclose(found.parts[0][:, 0], slope(a + 0.005 * v), rtol=1e-12)
    assert np.all(found.error < 1e-11)
    # Across a kink both slopes are held.
    assert np.all(off(line(slope, a, v, 0.1), slope, a, v, 0.1) <= 0)


def test_a_number_of_the_data_that_a_maximum_returns_compares_as_that_number():
    """As in the logarithm of the beta function, which has another formula from 8 on."""

    def branched(x):
        larger = jnp.maximum(x, 8.0)
        return jnp.where(larger < 8.0, jnp.sin(x), 2 * x)

    a, v = jnp.array([0.3, -0.4]), jnp.array([1.0, 2.0])
    curve = enclose(branched, TimeInterval(2))(Curve((a[:, None], 0.05 * v[:, None]), jnp.zeros((2, 1))))
    assert np.all(curve.error < 1e-12)
    np.testing.assert_allclose(curve.parts[0][:, 0], 2 * a)


def test_the_logarithm_of_the_beta_function_is_enclosed_as_three_of_the_gamma_function():
    """JAX changes the formula at 8, and is off by 1e-7 there; a number of the data may stand first or last."""
    count = np.array([1.0, 3.0, 7.9, 8.0, 40.0, 1e4])

    def function(x):
        return betaln(x, count) + betaln(count, x)

    found = jax.vmap(smoothed(function))(jnp.array([2.3, 9.0]))
    np.testing.assert_allclose(found, 2 * scipy.special.betaln(np.array([[2.3], [9.0]]), count), rtol=1e-11)
    found = line(jax.grad(lambda x: jnp.sum(smoothed(function)(x))), 2.3, 1.0, 0.01, 3)
    assert found.error[0] < 1e-6


def test_the_error_of_a_line_shrinks_to_the_second_derivative():
    a, v = jnp.array([0.3, -0.4]), jnp.array([1.0, 2.0])

    def function(x):
        return jax.nn.logsumexp(jnp.stack([x, x[::-1] ** 2, jnp.sin(x)]), 0)

    for h in (1e-3, 1e-2):
        error = line(function, a, v, h).error[:, 0]
        assert np.all(off(line(function, a, v, h), function, a, v, h) <= 0)
        # No more than a few times the curvature of the terms of which the function is made.
        assert np.all(error < 10 * (0.5 * h) ** 2 * 4)


def test_a_value_that_may_be_infinite_has_no_finite_bound():
    found = enclose(lambda x: jnp.where(jnp.isfinite(1 / x), 1.0, 0.0))(Interval(-jnp.ones(2), jnp.ones(2)))
    assert not np.any(np.isfinite(found.hi))


def test_a_function_that_jumps_where_its_formula_changes_is_held_on_both_sides():
    """JAX's ``log Φ`` is off by 4e-9 below −20, and its slope by 8e-8."""
    slope, h = jax.grad(jax.scipy.special.log_ndtr), 0.1
    start, s = jnp.linspace(-20.1, -19.9, 101), jnp.linspace(0.0, 1.0, 65)[:, None]

    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def held(v):
        found = enclose(slope, TimeInterval(3))(
            Curve((start + 0.5 * h * v, jnp.full(101, 0.5 * h * v)), jnp.zeros(101))
        )
        middle = sum(part * (2 * s - 1) ** k for k, part in enumerate(found.parts))
        rest = jax.vmap(jax.vmap(slope))(start + v * h * s) - middle
        return jnp.all(jnp.abs(rest) <= found.error) & jnp.all(found.error < 1e-4)

    assert held(1.0) and held(-1.0)


def test_a_scan_that_starts_from_zero_carries_what_follows():
    """Horner's rule: the first product is with zero, which alone would say that nothing varies."""

    def polynomial(x):
        return lax.scan(lambda total, c: (total * x + c, None), jnp.zeros(2), jnp.array([1.0, -2.0, 0.5]))[0]

    a, v = jnp.array([0.3, -0.4]), jnp.array([1.0, 2.0])
    curve = enclose(polynomial, TimeInterval(2))(Curve((a[:, None], 0.05 * v[:, None]), jnp.zeros((2, 1))))
    np.testing.assert_allclose(curve.parts[0][:, 0], a**2 - 2 * a + 0.5)
    np.testing.assert_allclose(curve.parts[1][:, 0], (2 * a - 2) * 0.05 * v)
    box = enclose(polynomial)(Interval(a, a + 0.1))
    assert np.all(box.lo <= polynomial(a)) and np.all(polynomial(a) <= box.hi) and np.all(box.hi - box.lo < 0.5)


def test_a_scan_is_walked_with_what_it_closes_over_carries_and_reads():
    data = jnp.array([1.0, -2.0, 0.5])

    def walk(x):
        last, steps = lax.scan(lambda c, y: (0.5 * c + jnp.sin(x[1]) * y, c * y), x[0], data, reverse=True)
        return jnp.append(steps, last)

    a, v = jnp.array([0.3, -0.4]), jnp.array([1.0, 2.0])
    found = line(walk, a, v, 0.2)
    value, slope = jax.jvp(walk, (a + 0.1 * v,), (0.1 * v,))
    np.testing.assert_allclose(found.parts[0][:, 0], value, rtol=1e-12)
    np.testing.assert_allclose(found.parts[1][:, 0], slope, rtol=1e-12)
    assert np.all(off(found, walk, a, v, 0.2) <= 0) and np.all(found.error < 0.3)
