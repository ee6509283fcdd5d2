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
from fedpdmc.enclosures import Cell, Curve, Interval, Series, TimeInterval, enclose, smoothed
from fedpdmc.errors import NoEnclosure

pytestmark = pytest.mark.usefixtures("double")


NUMBER = np.asarray(1.0)


def box():
    return Interval(jnp.array([0.1, 0.2]), jnp.array([0.3, 0.9]))


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
    monkeypatch.setitem(Cell.rules, "tan", Cell.rules.get("tan"))

    @enclosures.register("tan")
    def tan(x, **params):
        return Interval(jnp.tan(x.lo), jnp.tan(x.hi)).widened()

    found = enclose(lambda x: 2 * jnp.tan(x))(box())
    np.testing.assert_allclose(found.hi, 2 * np.tan([0.3, 0.9]), rtol=1e-9)
    moving = enclose(jnp.tan, Cell(0.1))(Series(jnp.zeros(2), jnp.zeros(2), jnp.ones(2)))
    assert np.all(moving.value + moving.error >= np.tan(0.1))


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


@pytest.mark.parametrize("domain", [Cell(0.1), TimeInterval(2)])
def test_zeros_of_an_array_do_not_hide_what_is_not_a_number(domain):
    """Zero times NaN is NaN; the zeros of autodiff are left out, and those that a user multiplies with are not."""
    nothing = np.zeros(2)
    if isinstance(domain, Cell):
        path = Series(jnp.array([-0.2, 0.3]), jnp.zeros(2), jnp.ones(2))
        found = enclose(lambda x: nothing * jnp.sqrt(x), domain)(path).error
    else:
        path = Curve((jnp.array([[-0.2], [0.3]]), 0.05 * jnp.ones((2, 1))), jnp.zeros((2, 1)))
        found = enclose(lambda x: nothing * jnp.sqrt(x), domain)(path).error[:, 0]
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
    found = enclose(clumsy, Cell(0.2))(Series(a, jnp.zeros(2), v))
    value, slope = jax.jvp(clumsy, (a,), (v,))
    np.testing.assert_allclose(found.value, value, rtol=1e-12)
    np.testing.assert_allclose(found.slope, slope, rtol=1e-12)
    assert np.all(found.error < 1e-11)


@pytest.mark.parametrize("forward", [True, False])
def test_derivatives_of_clip_max_and_min_are_exact_away_from_their_kinks(forward):
    """JAX asks ``x == max(x, y)``: of enclosures that overlap it would never be answered, and the slope be lost."""

    def kinked(x):
        return jnp.sum(jnp.clip(x, 0.0, 1.0) ** 2 + jnp.maximum(x, x[::-1]) * jnp.minimum(0.35, x))

    a, v = jnp.array([0.3, 0.7]), jnp.array([1.0, 2.0])
    slope = jax.grad(kinked) if not forward else lambda x: jax.jvp(kinked, (x,), (v,))[1][None]
    found = enclose(slope, Cell(0.01))(Series(a, jnp.zeros(2), v))
    np.testing.assert_allclose(found.value, slope(a), rtol=1e-12)
    assert np.all(found.error < 1e-11) and np.all(found.high - found.low < 1e-8)
    # Across a kink both slopes are held.
    wide = enclose(slope, Cell(0.1))(Series(a, jnp.zeros(2), v))
    for s in np.linspace(0.0, 0.1, 21):
        rest = slope(a + s * v) - wide.value - (0.0 if wide.slope is None else wide.slope * s)
        assert np.all(wide.low * s**2 - wide.error - 1e-12 <= rest) and np.all(
            rest <= wide.high * s**2 + wide.error + 1e-12
        )


def test_a_number_of_the_data_that_a_maximum_returns_compares_as_that_number():
    """As in the logarithm of the beta function, which has another formula from 8 on."""

    def branched(x):
        larger = jnp.maximum(x, 8.0)
        return jnp.where(larger < 8.0, jnp.sin(x), 2 * x)

    a, v = jnp.array([0.3, -0.4]), jnp.array([1.0, 2.0])
    cell = enclose(branched, Cell(0.1))(Series(a, jnp.zeros(2), v))
    curve = enclose(branched, TimeInterval(2))(Curve((a[:, None], 0.05 * v[:, None]), jnp.zeros((2, 1))))
    assert np.all(cell.error < 1e-12) and np.all(curve.error < 1e-12)
    np.testing.assert_allclose(cell.value, 2 * a)
    np.testing.assert_allclose(curve.parts[0][:, 0], 2 * a)


def test_the_logarithm_of_the_beta_function_is_enclosed_as_three_of_the_gamma_function():
    """JAX changes the formula at 8, and is off by 1e-7 there; a number of the data may stand first or last."""
    count = np.array([1.0, 3.0, 7.9, 8.0, 40.0, 1e4])

    def function(x):
        return betaln(x, count) + betaln(count, x)

    found = jax.vmap(smoothed(function))(jnp.array([2.3, 9.0]))
    np.testing.assert_allclose(found, 2 * scipy.special.betaln(np.array([[2.3], [9.0]]), count), rtol=1e-11)
    series = enclose(jax.grad(lambda x: jnp.sum(smoothed(function)(x))), Cell(0.01))(Series(2.3, 0.0, 1.0))
    assert series.error < 1e-8 and series.high - series.low < 0.1


def test_the_remainder_shrinks_to_the_second_derivative():
    a, v = jnp.array([0.3, -0.4]), jnp.array([1.0, 2.0])

    def function(x):
        return jax.nn.logsumexp(jnp.stack([x, x[::-1] ** 2, jnp.sin(x)]), 0)

    curve = jax.jvp(lambda y: jax.jvp(function, (y,), (v,))[1], (a,), (v,))[1]
    widths = []
    for h in (0.0, 1e-3, 1e-2):
        found = enclose(function, Cell(h))(Series(a, jnp.zeros(2), v))
        assert np.all((found.low <= curve / 2 + 1e-9) & (curve / 2 - 1e-9 <= found.high))
        widths.append(float(jnp.max(found.high - found.low)))
    assert widths[0] < 1e-9 and widths[2] < 20 * widths[1]


def test_a_value_that_may_be_infinite_has_no_finite_bound():
    found = enclose(lambda x: jnp.where(jnp.isfinite(1 / x), 1.0, 0.0))(Interval(-jnp.ones(2), jnp.ones(2)))
    assert not np.any(np.isfinite(found.hi))


def test_a_function_that_jumps_where_its_formula_changes_is_held_on_both_sides():
    """JAX's ``log Φ`` is off by 4e-9 below −20, and its slope by 8e-8."""
    slope, h = jax.grad(jax.scipy.special.log_ndtr), 0.1
    start, s = jnp.linspace(-20.1, -19.9, 101), h * jnp.linspace(0.0, 1.0, 65)[:, None]

    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def held(v):
        found = jax.vmap(lambda a: enclose(slope, Cell(h))(Series(a, jnp.zeros(()), v)))(start)
        rest = jax.vmap(jax.vmap(slope))(start + v * s) - found.value - found.slope * s
        inside = (found.low * s * s - found.error <= rest) & (rest <= found.high * s * s + found.error)
        return jnp.all(inside) & jnp.all(found.error < 1e-5)

    assert held(1.0) and held(-1.0)


def test_a_scan_that_starts_from_zero_carries_what_follows():
    """Horner's rule: the first product is with zero, which alone would say that nothing varies."""

    def polynomial(x):
        return lax.scan(lambda total, c: (total * x + c, None), jnp.zeros(2), jnp.array([1.0, -2.0, 0.5]))[0]

    a, v = jnp.array([0.3, -0.4]), jnp.array([1.0, 2.0])
    series = enclose(polynomial, Cell(0.1))(Series(a, jnp.zeros(2), v))
    curve = enclose(polynomial, TimeInterval(2))(Curve((a[:, None], 0.05 * v[:, None]), jnp.zeros((2, 1))))
    np.testing.assert_allclose(series.value, a**2 - 2 * a + 0.5)
    np.testing.assert_allclose(series.slope, (2 * a - 2) * v)
    np.testing.assert_allclose(curve.parts[0][:, 0], a**2 - 2 * a + 0.5)


def test_a_scan_is_walked_with_what_it_closes_over_carries_and_reads():
    data = jnp.array([1.0, -2.0, 0.5])

    def walk(x):
        last, steps = lax.scan(lambda c, y: (0.5 * c + jnp.sin(x[1]) * y, c * y), x[0], data, reverse=True)
        return jnp.append(steps, last)

    a, v, s = jnp.array([0.3, -0.4]), jnp.array([1.0, 2.0]), jnp.linspace(0.0, 0.2, 9)[:, None]
    found = enclose(walk, Cell(0.2))(Series(a, jnp.zeros(2), v))
    value, slope = jax.jvp(walk, (a,), (v,))
    np.testing.assert_allclose(found.value, value, rtol=1e-12)
    np.testing.assert_allclose(found.slope, slope, rtol=1e-12)
    rest = jax.vmap(walk)(a + v * s) - value - slope * s
    assert np.all((found.low * s * s - found.error <= rest) & (rest <= found.high * s * s + found.error))
    assert np.all(found.high - found.low < 20)
