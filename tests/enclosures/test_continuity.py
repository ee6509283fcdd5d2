"""Programs with jumps are refused with their line; kinks, guards and stable formulas are not."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.scipy.special import betaln, gammaln, log_ndtr, logsumexp, ndtr, xlogy
from tests import zoo

import fedpdmc as fp
from fedpdmc.enclosures import check_continuity, smoothed
from fedpdmc.errors import Discontinuous, InputError
from fedpdmc.members.run_coordinates import Opening, choose_clock, open_site
from fedpdmc.potentials import Program

Y = np.random.default_rng(0).normal(size=7)
T = np.arange(7.0)
SMALL: Any = np.asarray(0.1)
CASE = np.array([0, 1, 2])


@jax.custom_jvp
def by_hand(x):
    return x**2


by_hand.defjvp(lambda primals, tangents: (primals[0] ** 2, 0.0 * tangents[0]))


flat_tanh = jax.custom_jvp(jnp.tanh)
flat_tanh.defjvp(lambda primals, tangents: (jnp.tanh(primals[0]), 0.0 * tangents[0]))


def step(t):
    return jnp.where(t**3 > 0.2, 3.0, 0.0)


def count(t):
    return jnp.where(t**3 > 0.2, 3, 2)


def huber(x, gap=0.0):
    r = Y - x[0]
    return jnp.sum(jnp.where(jnp.abs(r) <= 1.3, 0.5 * r**2, 1.3 * (jnp.abs(r) - 0.65) + gap))


def double_where(x, outside=0.0):
    return jnp.sum(jnp.where(x > 0, jnp.sqrt(jnp.where(x > 0, x, 1.0)), outside))


def log_or_not(t):
    p = jax.nn.sigmoid(t)
    return jnp.where(p > 0, jnp.log(jnp.where(p > 0, p, 1.0)), -jnp.inf)


CONTINUOUS = {
    "abs": lambda x: jnp.sum(jnp.abs(Y - x[0])),
    "maximum": lambda x: jnp.sum(jnp.maximum(Y - x[0], 0.0)),
    "clip by data": lambda x: jnp.sum(jnp.clip(Y * x[0], -np.abs(Y), 2.0 + np.abs(Y))),
    "huber": huber,
    "logsumexp": lambda x: jnp.sum(logsumexp(jnp.outer(Y, x), axis=1)),
    "weighted logsumexp": lambda x: jnp.sum(logsumexp(jnp.outer(Y, x), axis=1, b=jnp.array([1.0, 2.0, 0.5]))),
    "log_softmax": lambda x: jnp.sum(jax.nn.log_softmax(jnp.outer(Y, x), axis=1)[:, 0]),
    "softmax": lambda x: jnp.sum(jax.nn.softmax(jnp.outer(Y, x), axis=-1)[:, 0]),
    "double where": double_where,
    "activations": lambda x: jnp.sum(jax.nn.elu(x) + jax.nn.relu(x) + jax.nn.leaky_relu(x) + jax.nn.hard_tanh(x)),
    "xlogy": lambda x: jnp.sum(xlogy(jnp.exp(x), jnp.exp(x))),
    "normal": lambda x: jnp.sum(log_ndtr(Y * x[0])) + jnp.sum(ndtr(x)),
    "gamma": lambda x: jnp.sum(gammaln(jnp.exp(x)) + betaln(jnp.exp(x), 2.0)),
    "a comparison as a factor": lambda x: jnp.sum((x > 0) * x) + jnp.sum(jnp.sign(x) * x),
    "a choice by data": lambda x: jnp.sum(jnp.where(Y > 0, x[0] * Y, x[1])),
    "two parameters": lambda x: jnp.where(x[0] < x[1], (x[1] - x[0]) ** 2, 0.0),
    "a square": lambda x: jnp.sum(jnp.where(x**2 > 4.0, x**2 - 4.0, 0.0)),
    "loop": lambda x: jax.lax.scan(lambda c, s: (jnp.abs(c * x[0] + s), None), SMALL, jnp.asarray(Y))[0],
    "forward algorithm": lambda x: jnp.sum(
        jax.lax.scan(lambda c, s: (logsumexp(c[:, None] + x * s, axis=0), None), jnp.zeros(3), jnp.asarray(Y))[0]
    ),
    "sorted": lambda x: jnp.sum(jnp.sort(Y * x[0]) * T),
    "norm": lambda x: jnp.linalg.norm(x - 1.0) + jnp.linalg.norm(x, 1),
    # The gradient contains the derivative of what may be no number, which has no bound at the edge.
    "a guard of a value by itself": lambda x: jnp.where(jnp.isfinite(jnp.log(x[0])), jnp.log(x[0]), 1e10),
    "no NaN": lambda x: jnp.sum(jnp.nan_to_num(jnp.sqrt(x), nan=1e3)),
    "logsumexp of logarithms": lambda x: logsumexp(jnp.log(x)),
    "logsumexp of positive numbers": lambda x: logsumexp(jnp.log(x**2 + 0.1)),
    "zeros of data": lambda x: jnp.sum(np.zeros(7) * jnp.log(T * x[0] + x[1])),
    "entr": lambda x: jnp.sum(xlogy(jnp.maximum(x, 0.0), jnp.maximum(x, 0.0))),
    "three cases by data": lambda x: jnp.sum(jax.lax.select_n(CASE, x, jnp.abs(x), x**2)),
    "a guard at zero": lambda x: jnp.sum(jnp.where(x == 0, 1.0, jnp.sin(x) / jnp.where(x == 0, 1.0, x))),
    "never at a limit": lambda x: jnp.sum(
        jnp.where(jnp.clip(jax.nn.sigmoid(x), 1e-300, 1 - 1e-15) == 1, 3.0, jax.nn.sigmoid(x))
    ),
    "an infinite case": lambda x: jnp.where(jnp.isneginf(log_or_not(x[0])), -jnp.inf, log_or_not(x[0])),
    "a broken line": lambda x: jnp.sum((Y - jnp.where(T < x[0], x[1] * (T - x[0]), x[2] * (T - x[0]))) ** 2),
    "a biweight": lambda x: jnp.sum(jnp.where((Y - x[0]) ** 2 <= 1.69, 1 - (1 - (Y - x[0]) ** 2 / 1.69) ** 3, 1.0)),
    "residuals of a scale": lambda x: jnp.sum(
        jnp.where(jnp.abs(Y / jnp.exp(x[0])) < 1, (Y / jnp.exp(x[0])) ** 2, 2 * jnp.abs(Y / jnp.exp(x[0])) - 1)
    ),
    "a logarithm times its argument": lambda x: jnp.sum(jnp.where(x > 0, x * jnp.log(jnp.where(x > 0, x, 1.0)), 0.0)),
    "a power": lambda x: jnp.sum(jnp.power(T, jnp.exp(x[0])) + jnp.power(1.0 + T, x[1]) + jnp.exp(x[0]) ** x[1]),
}  # fmt: skip
# Continuous, but their cases are equal in a way that is not looked for: the user vouches for them.
NOT_SHOWN = {
    "a formula undone": lambda x: jnp.sum(jnp.where(jnp.exp(x) > 2.0, jnp.exp(x) - 2.0, 3 * (x - np.log(2.0)))),
    "sums that differ by rounding": lambda x: jnp.where(x[0] > 0, 0.1 * x[1] + 0.2 * x[1] + x[0], 0.3 * x[1]),
    "whole numbers that meet": lambda x: jnp.sum(jnp.where(jax.lax.div(jnp.where(x > 0, 3, 2), 2) == 1, x, 0.0)),
    "a sum that cancels but for rounding": lambda x: jnp.where(
        x[0] > 0, 0.1 * x[1] + 0.2 * x[1] - 0.3 * x[1] + x[0], -x[0]
    ),
    "products written out": lambda x: jnp.sum(jnp.where(T < x[0], x[1] * T, x[1] * x[0] + x[2] * T - x[2] * x[0])),
}  # fmt: skip
JUMPS = {
    "a wall": lambda x: jnp.where(jnp.all(Y > x[0]), jnp.sum(Y - x[0]), jnp.inf),
    "a wall of many": lambda x: jnp.sum(jnp.where(jnp.all(Y > x[0]), Y - x[0], jnp.inf)),
    "a pole at the edge": lambda x: jnp.sum(jnp.where(x > 0, x * (1 / jnp.where(x > 0, x, 1.0)), 0.0)),
    "a change point": lambda x: jnp.sum(jnp.where(T < x[0], (Y - x[1]) ** 2, (Y - x[2]) ** 2)),
    "order": lambda x: jnp.where(x[0] < x[1], 0.0, jnp.inf),
    "floor": lambda x: jnp.sum(jnp.floor(x)),
    "round": lambda x: jnp.sum(jnp.round(x) * x),
    "remainder": lambda x: jnp.sum(x % 1.0),
    "sign": lambda x: jnp.sum(jnp.sign(x)),
    "a comparison as a number": lambda x: jnp.sum((x > 0) * 1.0),
    "a comparison times a number": lambda x: (x[0] > 0.3) * 1.3,
    "argmax": lambda x: jnp.asarray(Y)[jnp.argmax(x)],
    "whole numbers": lambda x: jnp.asarray(Y)[x[0].astype(int)],
    "cond": lambda x: jax.lax.cond(x[0] > 0, lambda: x[0], lambda: 1.0),
    "huber with a gap": lambda x: huber(x, 1e-8),
    "double where with a gap": lambda x: double_where(x, 1.0),
    "a softplus by halves": lambda x: jnp.sum(jnp.where(x > 20.0, x, jnp.log(1.001 + jnp.exp(x)))),
    "a plateau": lambda x: jnp.where(jnp.maximum(x[0], 0.0) == 0, 1.0, 2.0),
    "loop": lambda x: jax.lax.scan(
        lambda c, s: (jnp.where(c > 0, c * x[0] + s, 0.0), None), jnp.asarray(0.1), jnp.asarray(Y)
    )[0],
    "interpolation by search": lambda x: jnp.interp(x[0], T, Y),
    "ranks": lambda x: jnp.sum(jnp.argsort(Y * x[0]) * T),
    "heaviside": lambda x: jnp.sum(jnp.heaviside(x, 0.5)),
    "angle": lambda x: jnp.arctan2(x[0], x[1]),
    "not differentiated": lambda x: jnp.sum(jax.lax.stop_gradient(x) * x),
    "differentiated by hand": lambda x: jnp.sum(by_hand(x[0])),
    "a solver by hand": lambda x: jax.lax.custom_root(
        lambda s: s**3 + s - x[0], 0.5 * x[0], lambda f, s: s - f(s) / jax.grad(f)(s), lambda g, y: y / g(1.0)
    ),
    "a linear solver by hand": lambda x: jnp.sum(
        jax.lax.custom_linear_solve(lambda v: 2 * v, x, lambda f, b: b + jnp.sin(b), symmetric=True)
    ),
    # Of three cases that data choose, the middle one.
    "the second of three cases": lambda x: jnp.sum(jax.lax.select_n(CASE, x, jnp.where(x**3 > 0.2, 1.0, 0.0), x)),
    "the second of three cases, at planes": lambda x: jnp.sum(
        jax.lax.select_n(CASE, x, jnp.where(x > 0.2, 1.0, 0.0), x)
    ),
    # What is no number is not seen by a gradient where it only decides.
    "not a number": lambda x: jnp.where(jnp.isnan(jnp.sqrt(x[0])), 3.0, 0.0),
    "a wall of what is not a number": lambda x: jnp.where(jnp.isnan(jnp.log(x[0])), jnp.inf, 0.0),
    "not a number, as a factor": lambda x: jnp.isnan(jnp.sqrt(x[0])) * x[1],
    "not a number, of many": lambda x: jnp.sum(jnp.where(jnp.isnan(jnp.sqrt(x[0])), x + 3.0, x)),
    "not a number, and more": lambda x: jnp.where(jnp.isnan(jnp.sqrt(x[0])) & (x[1] < 9.0), x[1] + 3.0, x[1]),
    "compared with itself": lambda x: jnp.where(jnp.log(x[0]) == jnp.log(x[0]), 0.0, 3.0),
    "finite": lambda x: jnp.where(jnp.isfinite(jnp.log(x[0])), 0.0, 3.0),
    "below infinity": lambda x: jnp.where(jnp.log(x[0]) < jnp.inf, 0.0, 3.0),
    "an overflow": lambda x: jnp.where(jnp.isinf(jnp.exp(700 + 20 * x[0])), 3.0, 0.0),
    "an overflow that a limit hides": lambda x: jnp.where(
        jnp.isinf(jnp.exp(700 + 20 * x[0])), 3.0, jnp.minimum(jnp.exp(700 + 20 * x[0]), 5.0)
    ),
    "a root that is not negative": lambda x: jnp.where(jnp.sqrt(x[0]) >= 0, 0.0, 3.0),
    "the sign of a root": lambda x: jnp.sign(jnp.sqrt(x[0]) + 1.0),
    "not positive definite": lambda x: jnp.where(jnp.isnan(jnp.linalg.cholesky(jnp.diag(x))[0, 0]), 3.0, 0.0),
    "zero over zero": lambda x: jnp.where(jnp.maximum(x[0], 0.0) / jnp.maximum(x[0], 0.0) > 0.5, 0.0, 3.0),
    "not a number, in a loop": lambda x: jnp.sum(
        jax.lax.map(lambda t: jnp.where(jnp.isnan(jnp.sqrt(t)), 3.0, 0.0), x)
    ),
    "not a number, of a loop": lambda x: jnp.where(
        jax.lax.scan(lambda c, _: (jnp.sqrt(c), None), x[0], T)[0] >= 0, 0.0, 3.0
    ),
    "a root of a sign": lambda x: jnp.where(jnp.sqrt(jnp.sign(x[0] ** 3 - 0.1) + 0.5) >= 0, 0.3, 1.0),
    "a root of a sign, at planes": lambda x: jnp.sum(jnp.where(jnp.sqrt(jnp.sign(x) + 0.5) >= 0, 0.3, 1.0)),
    "a maximum with a root of a sign": lambda x: jnp.where(
        jnp.maximum(jnp.sqrt(jnp.sign(x[0]) + 0.5), 0.0) > -1, 0.3, 1.0
    ),
    "a finite logarithm of a sign": lambda x: jnp.where(jnp.isfinite(jnp.log(jnp.sign(x[0]) + 0.5)), 0.3, 1.0),
    "beside large numbers": lambda x: jnp.sqrt(
        (1e6 * jnp.sin(x[0])) ** 2 + jnp.where(x[1] > 0.2, x[2], 0.0) ** 2 + 0.01
    ),
    "the sign of rounding": lambda x: jnp.sign(x[0] - ((1e3 + x[0]) - 1e3)),
    "a comparison of rounding": lambda x: jnp.where((x[0] + x[1]) - x[1] > x[0], 1.0, 0.0),
    "zero times a root": lambda x: 0 * jnp.sqrt(x[0]),
    "limits that cross": lambda x: jax.lax.clamp(x[1], x[0], -x[1]),
    "sixteen bits": lambda x: jnp.sum(x.astype(jnp.bfloat16)).astype(float),
    "a comparison in 32 bits": lambda x: jnp.where(
        jnp.dot(x, np.ones(3), preferred_element_type=jnp.float32) > 0.3, 1.0, 0.0
    ),
    # A case in which all of a record may be: zeros of data, and formulas that are zero for some entries.
    "where data are zero": lambda x: jnp.sum(jnp.where(T == 0, step(x[0]), x[0])),
    "where data are zero, at planes": lambda x: jnp.sum(jnp.where(T == 0, jnp.where(x[0] > 0.2, 3.0, 0.0), x[0])),
    "where zero times a parameter is zero": lambda x: jnp.sum(jnp.where(T * x[0] == 0, step(x[1]), 1.0)),
    "not differentiated where it is zero": lambda x: jnp.sum(
        jnp.where(T * x[0] == 0, jax.lax.stop_gradient(x[1]), 1.0)
    ),
    "the middle, reversed": lambda x: jnp.sum(jnp.where(x[::-1] - x == 0, step(x), 1.0)),
    # Functions that reach by rounding what they only approach, or that are equal on a part of space.
    "an underflow": lambda x: jnp.where(jnp.exp(20 * x[0] - 745) > 0, 3.0, 0.0),
    "at a limit": lambda x: jnp.sum(jnp.where(jnp.clip(jax.nn.sigmoid(x), 1e-300, 1.0) == 1, 3.0, jax.nn.sigmoid(x))),
    "a probability of one": lambda x: jnp.where(jax.nn.sigmoid(37 + x[0]) < 1, 3.0, 0.0),
    "a hyperbolic tangent of one": lambda x: jnp.where(jnp.tanh(19 + x[0]) < 1, 3.0, 0.0),
    "an exponential that is not there": lambda x: jnp.where(jnp.expm1(x[0] - 37) > -1, 3.0, 0.0),
    "beside one": lambda x: jnp.where(1 + jnp.exp(40 * x[0] - 40) > 1, 3.0, 0.0),
    "a logarithm of a sum": lambda x: jnp.where(jnp.logaddexp(100 * x[0], 0.0) == 100 * x[0], 3.0, 0.0),
    "the root of a square": lambda x: jnp.where(jnp.sqrt(x[0] ** 2) == x[0], 3.0, 0.0),
    "a gap beside an offset": lambda x: jnp.where(x[0] ** 3 > 0.2, (x[1] + 1e10 + 0.01) - 1e10, x[1]),
    "rounded to 32 bits": lambda x: jnp.where(x[0].astype(jnp.float32).astype(float) < x[0], 0.0, 3.0),
    "equal in 32 bits": lambda x: jnp.where(x[0].astype(jnp.float32).astype(float) == x[0], 0.0, step(x[0])),
    # Infinities and what is not a number, of values that do not contain them any more.
    "infinite by choice": lambda x: jnp.where(jnp.isinf(jnp.where(x[0] ** 3 > 0.2, jnp.inf, 0.0)), 3.0, 0.0),
    "infinite data": lambda x: jnp.sum(jnp.where(jnp.isfinite(jnp.where(Y > 0, jnp.inf, x[0])), 0.0, step(x[0]))),
    "below infinite data": lambda x: jnp.sum(jnp.where(jnp.where(Y > 0, jnp.inf, x[0]) < jnp.inf, 0.0, step(x[0]))),
    "a root less itself": lambda x: jnp.where(jnp.sqrt(x[0]) - jnp.sqrt(x[0]) == 0, 0.0, 3.0),
    "the smaller of a root": lambda x: jnp.where(jnp.minimum(jnp.sqrt(x[0]), -1.0) > -2, 0.0, 3.0),
    "zero times a root, not differentiated": lambda x: 0 * jax.lax.stop_gradient(jnp.sqrt(x[0])),
    "another root that is no number": lambda x: jnp.where(jnp.isnan(jnp.sqrt(x))[::-1], 3.0, jnp.sqrt(x))[0],
    "a part of a root that is no number": lambda x: jnp.where(jnp.isnan(jnp.sqrt(x))[:1], 3.0, jnp.sqrt(x))[1],
    "a root in a part of a case": lambda x: jnp.where(
        jnp.isnan(jnp.sqrt(x[0])), 3.0, jnp.where(x[1] > 0, x[1] * jnp.sqrt(x[0]), 0.0)
    ),
    # Whole numbers.
    "bits": lambda x: (jnp.where(x[0] ** 3 > 0.2, 1, 2) & 1) * 1.0,
    "all bits": lambda x: jnp.where(~jnp.where(x[0] ** 3 > 0.2, 1, 2) == -2, 0.0, 3.0),
    "a whole quotient": lambda x: jnp.where(jax.lax.div(count(x[0]), 2) * 2 == count(x[0]), 0.0, 3.0),
    "below zero without a sign": lambda x: jnp.where(count(x[0]).astype(jnp.uint8) - jnp.uint8(3) > 3, 0.0, 3.0),
    "whole data": lambda x: jnp.sum(jnp.where(Y.astype(int) == Y, 0.0, step(x[0]))),
    "numbers of data": lambda x: jnp.where(jnp.sum(T > 0) > jnp.sum(Y > 0), step(x[0]), 0.0),
    "any of data": lambda x: jnp.where(jnp.any(Y > 9) == jnp.any(T > 2), 0.0, step(x[0])),
    # Zero to a power.
    "zero to a power": lambda x: jnp.power(0.0, jnp.maximum(x[0], 0.0)),
    "data to a power": lambda x: jnp.sum(jnp.power(T, jnp.maximum(x[0], 0.0))),
    "a plateau to a power": lambda x: jnp.power(jnp.maximum(x[0], 0.0), jnp.maximum(x[1], 0.0)),
    # Derivatives by hand of what looks like functions of JAX.
    "a gradient by hand": lambda x: jax.custom_gradient(lambda t: (t**2, lambda g: 0.0 * g))(x[0]),
    "a function of JAX differentiated by hand": lambda x: flat_tanh(x[0]),
    # One program that compares affine values and others.
    "a step twice": lambda x: jnp.heaviside(x[0], 0.5) + jnp.heaviside(x[1] ** 3 - 0.2, 0.5),
    "infinitely steep": lambda x: jnp.where(jnp.inf * x[0] > 0, 3.0, 0.0),
    "divided by zero": lambda x: jnp.sum(jnp.where((x[0] - 0.3) / T > 1, 3.0, 0.0)),
    "too steep": lambda x: jnp.where(1e300 * (x[0] - 0.2) > 0, 3.0, 0.0),
}  # fmt: skip


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", CONTINUOUS)
def test_values_that_meet_are_shown_to_meet(name):
    check_continuity(smoothed(CONTINUOUS[name]), 3)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", NOT_SHOWN)
def test_what_is_not_shown_to_meet_needs_an_assertion(name):
    with pytest.raises(Discontinuous, match="test_continuity.py:"):
        check_continuity(smoothed(NOT_SHOWN[name]), 3)
    check_continuity(smoothed(fp.models.continuous(NOT_SHOWN[name])), 3)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", JUMPS)
def test_what_is_not_shown_to_meet_is_refused_with_its_line(name):
    with pytest.raises(Discontinuous, match="test_continuity.py:"):
        check_continuity(smoothed(JUMPS[name]), 3)


@pytest.mark.usefixtures("double")
def test_a_helper_that_also_runs_in_a_loop_is_refused():
    """One compiled helper compares an affine value here and one that is not in the loop."""
    helper = jax.jit(lambda z: jnp.where(z > 0.3, 1.0, 0.0))

    def potential(x):
        return helper(x[0]) + jax.lax.scan(lambda c, s: (c + helper(jnp.sin(x[1]) * s), None), 0.0, jnp.asarray(Y))[0]

    with pytest.raises(Discontinuous):
        check_continuity(potential, 2)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", zoo.CASES)
def test_models_of_practice_are_not_refused(name):
    case = zoo.CASES[name]
    data = case.data()
    check_continuity(lambda x: smoothed(case.likelihood)(x, data), case.dim)
    check_continuity(smoothed(case.prior), case.dim)


@pytest.mark.usefixtures("double")
def test_what_is_shown_of_some_data_is_not_taken_for_others():
    def potential(level):
        # Continuous only if both data are equal.
        return lambda x: jnp.where(x[0] > level[0], x[0] - level[0], x[0] - level[1])

    check_continuity(potential(np.array([1.0, 1.0])), 1)
    with pytest.raises(Discontinuous):
        check_continuity(potential(np.array([1.0, 1.5])), 1)


def test_a_run_is_refused_before_it_begins():
    def shifted(x, y):
        return jnp.where(jnp.all(y > jnp.exp(x[0])), jnp.sum(y - jnp.exp(x[0])), jnp.inf)

    site = fp.Site(shifted, name="a", data=1.0 + np.abs(Y))
    for reference in (None, "laplace"):
        with pytest.raises(Discontinuous, match="change of variables"):
            fp.sample([site], fp.models.normal_prior(1), dynamics=fp.ZigZag(), reference=reference, duration=1.0)


def opened(function, adaptive=True):
    """A site of a function of one parameter, opened as a run does it."""
    told = Opening(fp.Reference(jnp.zeros(1), jnp.ones(1)), fp.ZigZag(), adaptive=adaptive)
    return choose_clock(fp.Site(Program(function, jnp.asarray(T), 1), name="a"), told)


@pytest.mark.usefixtures("double")
def test_bounds_that_are_not_proved_warn_of_a_jump():
    with pytest.warns(UserWarning, match=r"'adaptive'.*may jump.*constraints=\(A, b\)"):
        opened(lambda x, t: jnp.sum(jnp.where(t < x[0] ** 3, 1.0, 2.0)))


@pytest.mark.usefixtures("double")
def test_bounds_that_are_not_proved_take_a_primitive_without_a_rule():
    program = Program(lambda x, t: jnp.max(jnp.linalg.eigvalsh(x[0] * jnp.outer(t, t))), jnp.asarray(T), 1)
    program.check_continuity(lenient=True)
    with pytest.raises(Discontinuous, match="eigh"):
        program.check_continuity()


def rounded_down(x, y):
    return jnp.sum((y - 0.5 * fp.models.continuous(jnp.floor)(x[0] + y)) ** 2)


def vouched_site():
    return fp.Site(rounded_down, name="a", data=Y)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(
    "name", ["floor", "a change point", "not differentiated", "differentiated by hand", "not a number"]
)
def test_what_a_user_vouches_for_is_taken_and_what_is_beside_it_is_not(name):
    vouched = fp.models.continuous(JUMPS[name])
    check_continuity(smoothed(lambda x: jnp.sum(jax.nn.softplus(x)) + vouched(x)), 3)
    with pytest.raises(Discontinuous):
        check_continuity(smoothed(lambda x: JUMPS[name](x) + vouched(x)), 3)
    with pytest.raises(Discontinuous):
        check_continuity(smoothed(lambda x: jnp.sum(jnp.where(x > 0.3, vouched(x), 0.0))), 3)


def test_an_assertion_is_no_certificate(tmp_path):
    post = fp.sample(
        vouched_site(), fp.models.normal_prior(1), dynamics=fp.ZigZag(), reference="identity", chains=2, duration=4.0,
        seed=1, progress=False,
    )  # fmt: skip
    assert not post.certified
    assert "ASSERTED BY THE USER and not shown, at" in str(post.certificate)
    assert "test_continuity.py" in post.certificate[0]["continuity"]
    assert "exact if the continuity that the user asserts holds" in " ".join(str(post.summary()).split())
    post.save(tmp_path / "post")
    again = fp.load(tmp_path / "post")
    assert not again.certified and again.certificate.asserted


@pytest.mark.usefixtures("double")
def test_sites_on_a_network_and_model_files_take_no_assertion():
    opening = Opening(fp.Reference(jnp.zeros(1), jnp.ones(1)), fp.ZigZag())
    with pytest.raises(InputError, match="asserted and not shown"):
        open_site(vouched_site().sized(1), opening)
    with pytest.raises(InputError, match="takes no assertion"):
        fp.Model(lambda x, row: fp.models.continuous(jnp.tanh)(x["a"]), parameters=["a"], columns={"t": "real"})
