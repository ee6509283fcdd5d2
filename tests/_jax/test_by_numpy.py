"""Programs computed by NumPy have the values of compiled ones, and are compiled where they are much work."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.scipy.special import polygamma

from fedpdmc._jax import by_numpy
from fedpdmc._jax.by_numpy import once
from fedpdmc._jax.random_streams import chain_keys

pytestmark = pytest.mark.usefixtures("double")


class Scaled(eqx.Module):
    """Numbers with a name."""

    numbers: jax.Array
    name: str = eqx.field(static=True)


def _arithmetic(x):
    y = jnp.stack([jnp.tanh(x), jnp.log1p(jnp.abs(x)), polygamma(1, jnp.abs(x) + 0.3)])
    total, steps = lax.scan(lambda c, row: (c + row @ row, jnp.cumsum(row)), 0.0, y)
    return total, lax.dynamic_update_slice(steps, y[:1, :2], (2, 5)), jnp.argmax(y, 1), jax.nn.logsumexp(y, 0)


def _indexed(x):
    return jax.grad(lambda z: jnp.sum(z[jnp.array([0, 2, 2])] ** 3) + jnp.sum(z[1:4][::-1] ** 2))(x)


def _padded(x):
    config = ((1, -2, 1), (-1, 2, 0))
    return lax.pad(x.reshape(2, 3), 7.0, config), lax.pad(x[:0], 1.0, ((2, 1, 0),))


def _branches(x):
    low = lax.cond(x[0] > 0, jnp.sin, jnp.cos, x)
    return lax.while_loop(lambda z: jnp.sum(z) < 9, lambda z: 1.5 * jnp.abs(z) + 0.1, low)


def _along_axes(x):
    """Gathers and scatters along the last, a middle and several axes, with places that repeat."""
    cube, place = jnp.outer(x, x).reshape(3, 4, 3), jnp.asarray([2, 0, 2])
    sums = jax.vmap(lambda rows: jax.ops.segment_sum(rows, jnp.asarray([1, 0, 1, 1]), 2))(cube)
    both = cube.at[place, :, jnp.asarray([0, 1, 0])].add(cube[:, :, 0])
    return cube[:, :, place], cube[place, :, place], sums, both, cube.at[:, 1, 2].set(0.1), jnp.diagonal(cube[:, :3])


def _bits(x):
    bits = lax.bitcast_convert_type(x, jnp.uint64)
    return bits >> 12, (bits << 3) ^ bits, lax.bitcast_convert_type(bits | np.uint64(1), jnp.float64)


def _grouped(x):
    """Rows by their groups, one of which is outside."""
    index, table = jnp.asarray([0, 2, 2, 1, 0, 5]), jnp.outer(x, x)[:, :2]
    inside = jnp.minimum(index, 2)
    sums = (
        jax.ops.segment_sum(table, index, 3),
        jax.ops.segment_sum(table, inside, 4),
        jax.ops.segment_max(x, inside, 3),
    )
    return *sums, sums[1][inside], table[index], jnp.take(table, index, axis=1, mode="clip"), table[:, inside % 2]


@pytest.mark.parametrize("function", [_arithmetic, _indexed, _padded, _branches, _bits, _grouped, _along_axes])
def test_values_are_those_of_the_compiled_program(function):
    x = jnp.asarray(np.random.default_rng(1).normal(size=6))
    for found, right in zip(jax.tree.leaves(once(function)(x)), jax.tree.leaves(jax.jit(function)(x)), strict=True):
        assert found.dtype == right.dtype and found.shape == right.shape
        np.testing.assert_allclose(found, right, rtol=1e-13)


def test_results_keep_what_is_not_computed_and_programs_are_read_once(monkeypatch):
    read, seen = by_numpy._read, []
    monkeypatch.setattr(by_numpy, "_read", lambda *args: seen.append(args) or read(*args))
    double = once(lambda x, factor: Scaled(factor * x.numbers, x.name))
    one = double(Scaled(jnp.arange(3.0), "a"), 2.0)
    assert one.name == "a" and isinstance(one.numbers, jax.Array) and one.numbers.tolist() == [0.0, 2.0, 4.0]
    assert double(Scaled(jnp.ones(3), "a"), 2.0).numbers.tolist() == [2.0] * 3 and len(seen) == 1
    assert double(Scaled(jnp.ones(3), "a"), 3.0).numbers.tolist() == [3.0] * 3 and len(seen) == 2
    assert double(Scaled(jnp.ones(4), "b"), 3.0).name == "b" and len(seen) == 3


def test_a_program_of_much_work_is_compiled(monkeypatch):
    monkeypatch.setattr(by_numpy, "_called", lambda *_: pytest.fail("computed by NumPy"))
    assert once(lambda x: jnp.sum(jnp.exp(x)))(jnp.zeros(10**7)) == 10**7


def test_inside_of_a_traced_function_it_is_the_function():
    assert jax.jit(once(lambda x: x + 1))(jnp.ones(())) == 2


def test_chains_have_the_keys_of_fold_in():
    key = jax.random.key(5)
    right = [jax.random.key_data(jax.random.fold_in(key, c)) for c in range(7)]
    assert np.array_equal(chain_keys(key, 7), right)
