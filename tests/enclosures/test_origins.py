"""What is known of functions of JAX is not taken for known of a user's that look like them."""

import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
import pytest
from jax.scipy.special import ndtr

from fedpdmc.enclosures import check_continuity, jump_surfaces
from fedpdmc.enclosures.origins import is_of_jax
from fedpdmc.errors import Discontinuous


@jax.jit
@functools.wraps(ndtr)
def like_ndtr(t):
    return jnp.where(t**3 > 0.2, 1.0, 0.0)


@jax.custom_jvp
@functools.wraps(jax.nn.relu)
def like_relu(t):
    return jnp.maximum(t, 0.0)


like_relu.defjvps(lambda g, value, t: 0.0 * g)
through_relu = jax.custom_jvp(jax.nn.relu)
through_relu.defjvps(lambda g, value, t: g)


class Lazy:
    """What JAX turns into an array within its own function."""

    def __init__(self, t):
        self.t = t

    def __jax_array__(self):
        return jnp.where(self.t**3 > 0.2, 3.0, 0.0)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("function", [like_ndtr, like_relu, through_relu, lambda t: ndtr(cast(Any, Lazy(t)))])
def test_what_has_the_name_of_a_function_of_jax_is_not_taken_for_it(function):
    with pytest.raises(Discontinuous):
        jump_surfaces(lambda x: function(x[0]), 1)


@pytest.mark.usefixtures("double")
def test_a_rule_that_a_user_gives_to_a_function_of_jax_is_not_trusted(monkeypatch):
    """Nor is one in a program with the same text as another that was shown to be continuous."""
    check_continuity(lambda x: jax.nn.relu(x[0]), 1)
    monkeypatch.setattr(jax.nn.relu, "jvp", jax.nn.relu.jvp)
    jax.nn.relu.defjvps(lambda g, value, t: g)
    with pytest.raises(Discontinuous, match="by hand"):
        check_continuity(lambda x: jax.nn.relu(x[0]), 1)


def test_packages_whose_names_begin_with_that_of_jax_are_not_jax():
    (folder,) = jax.__path__
    assert is_of_jax(folder + "/_src/lax/lax.py:1")
    assert not is_of_jax(folder + "opt/_src/implicit_diff.py:1")
