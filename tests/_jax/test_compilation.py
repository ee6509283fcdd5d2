"""Compiled with the package's options, also where the compiler does not have all of them."""

import jax.numpy as jnp
import numpy as np

from fedpdmc._jax import compilation
from fedpdmc._jax.compilation import compiled


def double_exponential(x, times: int):
    return jnp.exp(times * x), times


def test_quickly_compiled_functions_have_the_same_values():
    x = jnp.linspace(-1.0, 1.0, 9)
    slow, quick = (compiled(double_exponential, quickly=quickly)(x, 2) for quickly in (False, True))
    assert slow[1] == quick[1] == 2
    np.testing.assert_allclose(slow[0], quick[0], rtol=1e-6)


def test_an_option_that_the_compiler_does_not_have_is_left_out(monkeypatch):
    monkeypatch.setattr(compilation, "QUICK", {"xla_cpu_an_option_of_another_version": True})
    found, _ = compiled(double_exponential, quickly=True)(jnp.ones(3), 3)
    np.testing.assert_allclose(found, np.exp(3.0), rtol=1e-6)
