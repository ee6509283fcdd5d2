"""Compiled with the package's options, also where the compiler does not have all of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedpdmc._jax import compilation
from fedpdmc._jax.compilation import LITTLE, compiled, once


def double_exponential(x, times: int):
    return jnp.exp(times * x), times


def test_quickly_compiled_functions_have_the_same_values():
    x = jnp.linspace(-1.0, 1.0, 9)
    slow, quick = (compiled(double_exponential, quickly=quickly)(x, 2) for quickly in (False, True))
    assert slow[1] == quick[1] == 2
    np.testing.assert_allclose(slow[0], quick[0], rtol=1e-6)


@pytest.mark.parametrize("size", [9, LITTLE + 1])
def test_functions_that_run_once_have_the_same_values(size):
    x = jnp.linspace(-1.0, 1.0, size)
    found, times = once(double_exponential)(x, 2)
    assert times == 2 and found.dtype == x.dtype
    np.testing.assert_allclose(found, np.exp(2 * x), rtol=1e-6)


def test_within_another_program_a_function_that_runs_once_is_a_part_of_it():
    assert jax.jit(once(lambda x: x + 1))(jnp.ones(())) == 2
    assert "pjit" not in str(jax.make_jaxpr(once(lambda x: x + 1))(1.0))


def test_an_option_that_the_compiler_does_not_have_is_left_out(monkeypatch):
    monkeypatch.setattr(compilation, "QUICK", {"xla_cpu_an_option_of_another_version": True})
    found, _ = compiled(double_exponential, quickly=True)(jnp.ones(3), 3)
    np.testing.assert_allclose(found, np.exp(3.0), rtol=1e-6)
    np.testing.assert_allclose(once(lambda x: jnp.exp(3 * x))(jnp.ones(3)), np.exp(3.0), rtol=1e-6)
