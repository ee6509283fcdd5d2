"""Derivatives on balls: ranges of single functions, and jets of whole programs."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedpdmc.enclosures import Interval, enclose, smoothed
from fedpdmc.enclosures.jets.jet import Balls, Jet, contracted, identity
from fedpdmc.enclosures.multi_index import monomials
from fedpdmc.enclosures.series.special_functions import softplus
from fedpdmc.enclosures.taylor_coefficients import TAYLOR, integer_power, real_power
from fedpdmc.errors import NoEnclosure

pytestmark = pytest.mark.usefixtures("double")

ORDER = 4
FAST = {"xla_backend_optimization_level": 0}
POSITIVE = {"log", "sqrt", "rsqrt", "lgamma", "digamma", "power", "pow"}
FUNCTIONS = {
    **{name: getattr(jnp, name) for name in ("exp", "expm1", "log", "log1p", "tanh", "sqrt", "sin", "cos")},
    "logistic": jax.lax.logistic, "softplus": softplus, "rsqrt": jax.lax.rsqrt, "erf": jax.lax.erf,
    "erfc": jax.lax.erfc, "ndtr": jax.scipy.special.ndtr, "log_ndtr": jax.scipy.special.log_ndtr,
    "lgamma": jax.lax.lgamma, "digamma": jax.lax.digamma, "log1p_square": lambda x: jnp.log1p(x * x),
}  # fmt: skip
POWERS = {"power": (lambda x: x**1.7, real_power(1.7)), "cube": (lambda x: x**3, integer_power(3))}
ALL = {name: (f, TAYLOR[name]) for name, f in FUNCTIONS.items() if name in TAYLOR} | POWERS


def test_every_function_of_one_number_is_tested():
    assert set(ALL) >= set(TAYLOR)


def derivatives(f, x):
    """``f^{(k)}(x)/k!`` up to the order."""

    def each(x):
        found, g = [], f
        for k in range(ORDER + 1):
            found.append(g(x) / math.factorial(k))
            g = jax.grad(g)
        return jnp.stack(found)

    return jax.jit(jax.vmap(each), compiler_options=FAST)(x)


NOW = ("logistic", "log_ndtr", "lgamma")


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in NOW else pytest.mark.long) for n in ALL])
def test_ranges_of_derivatives_hold_them_and_are_met(name):
    f, taylor = ALL[name]
    rng = np.random.default_rng(0)
    middle, half = rng.normal(size=200) * 3, 10.0 ** rng.uniform(-3, 0.5, 200)
    if name in POSITIVE or name == "log1p":
        middle = np.exp(0.4 * middle) + half
    share = np.concatenate([[-1.0, 1.0], rng.uniform(-1, 1, 30)])
    x = middle[:, None] + half[:, None] * share
    found = np.asarray(derivatives(f, jnp.asarray(x.ravel()))).reshape(*x.shape, ORDER + 1)
    ranges = taylor(Interval(jnp.asarray(middle - half), jnp.asarray(middle + half)), ORDER)
    for k, interval in enumerate(ranges):
        value, lo, hi = found[..., k], np.asarray(interval.lo), np.asarray(interval.hi)
        room = 1e-8 * (1 + np.abs(value).max(1))
        assert np.all(lo <= value.min(1) + room) and np.all(value.max(1) <= hi + room), k
        # No wider than what is found, where that is more than rounding.
        spread = value.max(1) - value.min(1)
        assert np.median((hi - lo) / (spread + 1e-6)) < 1.3, k


# x and log Φ with its first four derivatives there, from 50 digits.
FAR = {
    -30.0: (-454.3212439563432, 30.033259667433676, -0.9988962284881099, 7.309993015784438e-05, 7.245937210980342e-06),
    -20.5: (-214.0667289632638, 20.548551052435847, -0.9976537796275292, 0.000225711863538964, 3.242094527616975e-05),
    -15.0: (-116.1313848457117, 15.066086827167823, -0.9956698762424401, 0.0005626425236613475, 0.00010874319825105733),
    -9.0: (-43.628149113332114, 9.108523105002869, -0.9884852093452828, 0.0023907474397987585, 0.000728770872712276),
    -3.0: (-6.607726221510349, 3.2830986549304364, -0.9294408132147319, 0.03147067283084249, 0.018930547102077377),
}


def test_far_tails_of_the_normal_distribution_are_held_where_formulas_cancel():
    x = np.asarray([*FAR])
    for half in (0.0, 1e-6, 0.6, 6.0):
        ranges = TAYLOR["log_ndtr"](Interval(jnp.asarray(x - half), jnp.asarray(x + half)), ORDER)
        for k, interval in enumerate(ranges):
            value = np.asarray([row[k] for row in FAR.values()]) / math.factorial(k)
            assert np.all((interval.lo <= value) & (value <= interval.hi)), (half, k)
            if half == 0:
                assert np.all(interval.hi - interval.lo < 1e-6 + 0.35 * np.abs(value + (k == 2) / 2)), k


def models():
    data = jnp.asarray(np.random.default_rng(1).normal(size=(5, 2)))
    triangle = jnp.asarray([[1.5, 0.0], [0.3, 0.8]])
    return {
        "sums": lambda x: jnp.sum(jnp.exp(data @ x) * jnp.cumsum(x)[0]) + jnp.sum(jnp.logaddexp(0.0, data @ x)),
        "quotients": lambda x: jnp.sum((x[0] * data[:, 0] / (jnp.exp(x[1]) + 2.0)) ** 2) + x[0] ** 3 * jnp.tanh(x[1]),
        "gathers": lambda x: (
            jnp.sum(x[jnp.asarray([0, 1, 1])] * jnp.sin(x[::-1])[jnp.asarray([1, 0, 1])])
            + jnp.concatenate([x, x * x]) @ jnp.arange(4.0)
        ),
        "solves": lambda x: jnp.sum(jax.scipy.linalg.solve_triangular(triangle, jnp.sin(x), lower=True) ** 2),
        "choices": lambda x: jnp.sum(jnp.where(data[:, 0] > 0, data @ x, (data @ x) ** 2)) + jnp.maximum(x[0], -9.0),
        "log-sum-exp": lambda x: jnp.sum(jax.scipy.special.logsumexp(data * x, axis=1)) + jax.nn.softplus(x[0]),
        "Student": lambda x: jnp.sum(jnp.log1p((data @ x) ** 2 / 4.0)) + jnp.log(jnp.exp(x[0]) + jnp.exp(x[1])),
        "counts": lambda x: jnp.sum(
            jax.lax.lgamma(jnp.arange(3.0) + jnp.exp(x[0])) - jax.lax.lgamma(jnp.exp(x[1])) * jnp.exp(x[1])
        ),
        "tails": lambda x: jnp.sum(jnp.log(0.5 * jax.lax.erfc(data @ x))) + jnp.dot(jnp.exp(x), jnp.exp(-x * x)),
    }


def taylor_tensors(f, order):
    """All derivatives of one order, as a function."""
    for _ in range(order):
        f = jax.jacfwd(f)
    return f


MODELS = [pytest.param(name, marks=() if name == "counts" else pytest.mark.long) for name in models()]


@pytest.mark.parametrize("name", MODELS)
def test_jets_hold_all_derivatives_on_balls(name):
    f, center, order = models()[name], np.asarray([0.3, -0.4]), 3
    balls = Balls(np.asarray([0.0, 0.2, 0.7]), monomials(2, order))
    jet = enclose(f, balls)(identity(balls, center))
    assert isinstance(jet, Jet) and jet.shape == ()
    rng = np.random.default_rng(2)
    directions = rng.normal(size=(40, 2))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    for k in range(order + 1):
        tensor = jax.jit(jax.vmap(taylor_tensors(f, k)), compiler_options=FAST)
        for j, r in enumerate(balls.radii):
            # Half of the points on the rim.
            y = center + r * directions * np.where(np.arange(40) % 2, 1.0, rng.random(40))[:, None]
            found = np.asarray(tensor(jnp.asarray(y))).reshape(40, *(2,) * k)
            for places in itertools.product(range(2), repeat=k):
                alpha = np.bincount(np.asarray(places, int), minlength=2)
                at = np.flatnonzero((balls.table.exponents == alpha).all(1))[0]
                value = found[(slice(None), *places)] / math.prod(math.factorial(n) for n in alpha)
                room = 1e-9 * (1 + np.abs(value))
                assert np.all((jet.lo[j, at] <= value + room) & (value <= jet.hi[j, at] + room)), (k, r, alpha)
        assert np.all(jet.hi[0] - jet.lo[0] < 1e-9 * (1 + np.abs(jet.hi[0])))


@jax.custom_jvp
def own_softplus(x):
    return jnp.logaddexp(x, 0.0)


own_softplus.defjvp(lambda primals, tangents: (own_softplus(*primals), jax.nn.sigmoid(primals[0]) * tangents[0]))


def by_hand(x, top):
    return top + jnp.log(jnp.sum(jnp.exp(x - top), -1))


def ways():
    """Programs of one function each, the first one written plainly."""
    data = jnp.asarray(np.random.default_rng(1).normal(size=(5, 3)))
    total, pair, stop = jax.scipy.special.logsumexp, jnp.asarray([True, False, True]), jax.lax.stop_gradient
    some, weights, yes = jnp.asarray([0, 2]), jnp.asarray([2.0, 0.0, 0.5]), jnp.asarray(True)
    first, second = jnp.asarray([0, 1, 0]), jnp.asarray([0, 0, 1])
    return {
        "log-sum-exp": [
            lambda x: jnp.sum(jnp.logaddexp(jnp.logaddexp(data[:, 0] * x[0], data[:, 1] * x[1]), data[:, 2] * x[0])),
            lambda x: jnp.sum(total(data * x[first], axis=1)),
            lambda x: jnp.sum(total(data * x[first], axis=1, keepdims=True)),
            lambda x: jnp.sum(jax.vmap(lambda z: by_hand(z, z.max()))(data * x[first])),
            lambda x: jnp.sum(jax.vmap(lambda z: by_hand(z, stop(z.max(initial=-jnp.inf))))(data * x[first])),
            lambda x: jnp.sum((z := data * x[first])[:, 1] - jax.nn.log_softmax(z)[:, 1]),
            lambda x: jnp.sum((z := data * x[first])[:, 1] - jnp.log(jax.nn.softmax(z)[:, 1])),
        ],
        "one log-sum-exp": [
            lambda x: total(data[0] * x[first]),
            lambda x: by_hand(data[0] * x[first], (data[0] * x[first]).max()),
            lambda x: by_hand(data[0] * x[first], stop((data[0] * x[first]).max())),
            lambda x: by_hand(data[0] * x[first], stop((data[0] * x[first]).min())),
            lambda x: -jnp.log((z := jnp.exp(data[0] * x[first] - 3.0)) / jnp.sum(z))[1] + data[0, 1] * x[1],
        ],
        "some of the terms": [
            lambda x: jnp.sum(jnp.logaddexp(data[:, 0] * x[0] + jnp.log(2.0), data[:, 2] * x[1] - jnp.log(2.0))),
            lambda x: jnp.sum(total(data * x[second], b=weights, axis=1)),
            lambda x: jnp.sum(total(data * x[second], b=jnp.where(pair, weights, 9.0), where=pair, axis=1)),
            lambda x: jnp.sum(total((data * x[second] + jnp.log(weights))[:, some], axis=1)),
            lambda x: jnp.sum(total(data * x[second] + jnp.log(weights), axis=1, where=pair)),
            lambda x: jnp.sum(
                (z := data * x[second] + jnp.log(jnp.where(pair, weights, 1.0)))[:, 0]
                - jax.nn.log_softmax(z, where=pair)[:, 0]
            ),
        ],
        "softplus": [
            lambda x: jnp.sum(jnp.logaddexp(data[:, :2] @ x, 0.0)),
            lambda x: jnp.sum(jax.nn.softplus(data[:, :2] @ x)),
            lambda x: jnp.sum(own_softplus(data[:, :2] @ x)),
            lambda x: jnp.sum(jnp.log(1 + jnp.exp(data[:, :2] @ x))),
            lambda x: jnp.sum(jnp.log1p(jnp.exp(data[:, :2] @ x))),
            lambda x: -jnp.sum(jnp.log(1 / (1 + jnp.exp(data[:, :2] @ x)))),
            lambda x: jax.lax.scan(lambda c, row: (c + jax.nn.softplus(row @ x), None), 0.0, data[:, :2])[0],
        ],
        "normal": [
            lambda x: jnp.sum(0.5 * (data[:, 0] - x[0]) ** 2 * jnp.exp(-2 * x[1])) + 5 * x[1],
            lambda x: jnp.sum(0.5 * ((data[:, 0] - x[0]) / jnp.exp(x[1])) ** 2 + jnp.log(jnp.exp(x[1]))),
            lambda x: jnp.sum(0.5 * (data[:, 0] - x[0]) ** 2 / jnp.exp(x[1]) ** 2 + jnp.log(jnp.exp(x[1]) ** 2) / 2),
            lambda x: jnp.sum(
                0.5 * (data[:, 0] - x[0]) ** 2 / jnp.exp(2 * x[1]) + jnp.log(jnp.sqrt(jnp.exp(2 * x[1])))
            ),
            lambda x: (
                -jnp.sum(jax.scipy.stats.norm.logpdf(data[:, 0], x[0], jnp.exp(x[1])) + 0.5 * jnp.log(2 * jnp.pi))
            ),
        ],
        "a probability": [
            lambda x: jnp.sum(jax.scipy.special.log_ndtr(data[:, :2] @ x)),
            lambda x: jnp.sum(jnp.log(0.5 * jax.lax.erfc(-(data[:, :2] @ x) / jnp.sqrt(2.0)))),
            lambda x: jnp.sum(jnp.log(0.5 * (1 + jax.lax.erf((data[:, :2] @ x) / jnp.sqrt(2.0))))),
            smoothed(lambda x: jnp.sum(jnp.log(jax.scipy.stats.norm.cdf(data[:, :2] @ x)))),
            lambda x: jnp.sum(jnp.log((1 - jax.lax.erf(-(data[:, :2] @ x) / jnp.sqrt(2.0))) / 2)),
        ],
        "choices": [
            lambda x: jnp.sum((data[:, :2] @ x) ** 2),
            lambda x: jnp.sum(jnp.where(yes, (data[:, :2] @ x) ** 2, 0.0)),
            lambda x: jnp.sum(jnp.where(x[0] > -9, data[:, :2] @ x, 2 * (data[:, :2] @ x)) ** 2),
            lambda x: jnp.sum(jnp.where((x[0] > -9) & (jnp.arange(5) < 9), data[:, :2] @ x, 1.0) ** 2),
            lambda x: jnp.sum(jnp.sign(x[0] + 9) * (data[:, :2] @ x) ** 2),
            lambda x: jax.lax.cond(yes, lambda z: jnp.sum(z**2), jnp.sum, data[:, :2] @ x),
            lambda x: jnp.sum(jnp.where(jnp.isnan(z := data[:, :2] @ x) | ~jnp.isfinite(z), 0.0, z) ** 2),
        ],
    }


@pytest.mark.parametrize("name", list(ways()))
def test_a_function_has_the_same_jets_however_it_is_written(name):
    """All derivatives at the centre, and ranges of about the same width around it."""
    balls = Balls(np.asarray([0.0, 0.2, 0.7]), monomials(2, 4))
    start = identity(balls, np.asarray([0.3, -0.4]))
    with np.errstate(invalid="ignore"):
        plain, *others = (contracted(balls, enclose(f, balls)(start)) for f in ways()[name])
    assert np.all(np.isfinite(plain.lo + plain.hi))
    width = (plain.hi - plain.lo).max(1)
    for k, jet in enumerate(others):
        assert np.all(np.abs(jet.lo[0] - plain.lo[0]) < 1e-9 * (1 + np.abs(plain.lo[0]))), k
        assert np.all((jet.lo <= plain.hi) & (plain.lo <= jet.hi)), k
        assert np.all((jet.hi - jet.lo).max(1)[1:] < 2 * width[1:] + 1e-9), k


def test_a_value_that_is_not_differentiated_must_cancel():
    balls = Balls(np.asarray([0.0, 0.5]), monomials(2, 4))
    with pytest.raises(NoEnclosure, match="does not cancel"):
        enclose(lambda x: jnp.sum(jax.lax.stop_gradient(x) * x), balls)(identity(balls, np.ones(2)))


def test_a_maximum_that_does_not_cancel_has_a_range_and_no_derivatives():
    balls = Balls(np.asarray([0.0, 0.5]), monomials(2, 4))
    jet = enclose(lambda x: jnp.max(x) + x[0], balls)(identity(balls, np.asarray([0.0, 1.0])))
    assert 1.0 <= jet.hi[0, 0] < 1.0 + 1e-12 and 2.0 <= jet.hi[1, 0] < 2.0 + 1e-12
    assert not np.any(np.isfinite(jet.hi[1, 1:]))


def test_a_kink_inside_a_ball_leaves_nothing_known():
    balls = Balls(np.asarray([0.0, 0.1, 0.5]), monomials(1, 4))
    jet = enclose(lambda x: jnp.abs(x[0] - 0.3), balls)(identity(balls, np.zeros(1)))
    assert np.all(np.isfinite(jet.hi[:2])) and not np.any(np.isfinite(jet.hi[2, 1:]))


def test_what_is_not_a_number_at_one_place_is_poison_for_many():
    """A guard of one number, with an array of cases."""
    balls = Balls(np.asarray([0.0, 0.1]), monomials(2, 1))

    def program(x):
        return jnp.where(jnp.isfinite(jnp.sqrt(x[0])), x + jnp.sqrt(x[0]), 1.0)

    fine, none = (enclose(program, balls)(identity(balls, np.array([a, 0.3]))) for a in (0.5, 0.05))
    assert fine.shape == (2,) and np.all(np.isfinite(fine.hi))
    assert not np.any(np.isfinite(none.hi[1, 0])) and np.all(np.isfinite(none.hi[0]))
