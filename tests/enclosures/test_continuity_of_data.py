"""Continuity is shown for the data that there are: missing and infinite ones, whole numbers that wrap, and rounding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedpdmc.enclosures import check_continuity
from fedpdmc.errors import Discontinuous
from fedpdmc.potentials import Program

MISSING, ENDLESS, Y = np.array([np.nan, 1.0, 0.0]), np.array([np.inf, 1.0, -np.inf]), np.array([1.0, 2.0, 3.0])
BYTES = np.array([200, 100, 3], np.uint8)


def step(t):
    return jnp.where(t**3 > 0.2, 3.0, 0.0)


def either(which):
    """A value that jumps where data say so."""
    return lambda x: jnp.sum(jnp.where(which(), x[0], step(x[0])))


def meets(one, other):
    """Continuous if both are equal."""
    return lambda x: jnp.sum(jnp.where(x[0] ** 3 > 0.2, one() * x[1], other() * x[1]))


def over(data, jumps):
    """A loop over data."""
    return lambda x: jax.lax.scan(lambda c, s: (jnp.where(jumps(s), step(c), c), None), x[0], jnp.asarray(data))[0]


JUMPS = {
    "missing": either(lambda: ~jnp.isnan(MISSING)),
    "missing, compared": either(lambda: jnp.maximum(MISSING, 0.0) >= 0),
    "missing, squared": either(lambda: 1 + jnp.square(MISSING) > 0),
    "missing, less itself": either(lambda: jnp.asarray(MISSING) - MISSING == 0),
    "missing, times a parameter": lambda x: jnp.sum(jnp.where(MISSING * x[0] == MISSING * x[0], 0.0, step(x[0]))),
    "missing, its sign": either(lambda: jnp.sign(MISSING) <= 1),
    "infinite": either(lambda: jnp.isfinite(ENDLESS)),
    "infinite, times zero": either(lambda: 0 * jnp.asarray(ENDLESS) == 0),
    "a root of data": either(lambda: jnp.sqrt(-jnp.asarray(Y)) >= 0),
    "an overflow of data": either(lambda: jnp.exp(1000 * jnp.asarray(Y)) - jnp.exp(1000 * jnp.asarray(Y)) == 0),
    "missing, in a loop": over(MISSING, jnp.isnan),
    "infinite, in a loop": over(ENDLESS, lambda s: ~jnp.isfinite(s)),
    "a root of data, in a loop": over(Y, lambda s: ~(jnp.sqrt(-s) >= 0)),
    "a product that wraps": meets(lambda: jnp.asarray(BYTES) * BYTES, lambda: jnp.square(BYTES.astype(float))),
    "a difference that wraps": meets(lambda: jnp.asarray(BYTES) - np.uint8(201), lambda: BYTES.astype(float) - 201),
    "a sum that wraps": meets(lambda: jnp.sum(BYTES, dtype=np.uint8), lambda: jnp.sum(BYTES.astype(float))),
    "whole numbers in 32 bits": meets(
        lambda: jnp.asarray(123456789 * Y.astype(int)).astype(jnp.float32), lambda: jnp.asarray(123456789 * Y.astype(int))
    ),
    "NaN in place of entries that are not there": lambda x: jnp.sum(
        jnp.where(jnp.isnan(x.at[np.array([0, 5])].get(mode="fill")), step(x[0]), 0.0)
    ),
    "zero times an overflow": lambda x: jnp.where(0 * jnp.exp(300 * x[0] ** 2) == 0, x[1], 3.0),
    "sums in another order": lambda x: jnp.where((x[0] + x[1]) + 0.1 == x[0] + (x[1] + 0.1), 3.0, 0.0),
    "a product in parts": lambda x: jnp.where(x[0] * (x[1] + 0.1) >= x[0] * x[1] + 0.1 * x[0], 3.0, 0.0),
    "a tenth times ten": lambda x: jnp.where(0.1 * x[0] * 10 == x[0], 3.0, 0.0),
    "a sum of squares": lambda x: jnp.where(jnp.dot(x, x) == jnp.sum(x * x), 3.0, 0.0),
    "beside one": lambda x: jnp.where(1 + 1e-20 * x[0] == 1, step(x[0]), 0.0),
    "beside another parameter": lambda x: jnp.where(x[0] + 1e-20 * x[1] == x[0], step(x[1]), 0.0),
}  # fmt: skip
CONTINUOUS = {
    "missing left out": lambda x: jnp.sum(jnp.where(jnp.isnan(MISSING), 0.0, x[0] * jnp.nan_to_num(MISSING))),
    "kinks at data in a loop": lambda x: jax.lax.scan(
        lambda c, s: (c + jnp.where(s > x[0], s - x[0], 0.0), None), 0.0, jnp.asarray(Y)
    )[0],
    "kinks at logarithms of data": lambda x: jnp.sum(
        jnp.where(jnp.log(Y) > x[0] ** 3, jnp.log(Y) - x[0] ** 3, 0.0)
    ),
    "entries that are there": lambda x: jnp.sum(jnp.where(x[np.array([0, 1])] > 0, x[np.array([0, 1])], 0.0)),
    "a value less itself": lambda x: jnp.where(jnp.isnan(x[0] * 0.1 + x[1]), 3.0, x[0]),
    "whole numbers": meets(lambda: 2 * jnp.asarray([1, 2, 3]), lambda: jnp.asarray([2.0, 4.0, 6.0])),
    "beside a limit": lambda x: jnp.clip(x[0], -1e300, 1e300),
    "no records": lambda x: jnp.sum(jnp.where(np.zeros(0) < x[0], x[0], step(x[0]))),
}  # fmt: skip


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", JUMPS)
def test_data_for_which_a_program_jumps_are_not_taken_for_others(name):
    with pytest.raises(Discontinuous):
        check_continuity(JUMPS[name], 2)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", CONTINUOUS)
def test_data_for_which_a_program_is_continuous(name):
    check_continuity(CONTINUOUS[name], 2)


@pytest.mark.usefixtures("double")
def test_a_loop_over_no_records_has_bounds():
    program = Program(lambda x, t: jax.lax.scan(lambda c, s: (jnp.abs(c * s), c), x[0], t)[0], jnp.zeros(0), 2)
    program.check_continuity()
    for flips in (False, True):
        program.check(False, flips)


@pytest.mark.usefixtures("double")
def test_what_is_shown_of_finite_data_is_not_taken_for_others():
    def potential(y):
        return lambda x: jnp.sum(jnp.where(jnp.isnan(y), step(x[0]), x[0] * y))

    check_continuity(potential(jnp.asarray(Y)), 1)
    with pytest.raises(Discontinuous):
        check_continuity(potential(jnp.asarray(MISSING)), 1)


def lower_triangle(x):
    """A matrix that depends on a parameter above its diagonal alone."""
    return jnp.array([[2.0, 0.0], [0.5, 3.0]]) + jnp.array([[0.0, 1.0], [0.0, 0.0]]) * jnp.tanh(x[0])


@pytest.mark.usefixtures("double")
def test_factors_of_matrices_that_are_not_symmetric_are_refused():
    """JAX's derivative of a Cholesky factor, which is made of one triangle, contains the other."""
    with pytest.raises(Discontinuous, match="symmetric"):
        check_continuity(lambda x: jnp.sum(jax.lax.linalg.cholesky(lower_triangle(x), symmetrize_input=False)), 1)
    with pytest.raises(Discontinuous, match="symmetric"):
        check_continuity(lambda x: jnp.sum(jax.scipy.linalg.cholesky(lower_triangle(x), lower=True)), 1)
    check_continuity(lambda x: jnp.sum(jnp.linalg.cholesky(lower_triangle(x))), 1)
    kernel = np.exp(-np.abs(Y[:, None] - Y))
    check_continuity(lambda x: jnp.sum(jax.scipy.linalg.cholesky(jnp.exp(x[0]) * kernel + np.eye(3))), 1)
