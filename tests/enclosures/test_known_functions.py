"""What is known of functions of JAX is not taken for known of a user's that look like them."""

import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
import pytest
from jax._src.lax.other import logaddexp
from jax.scipy.special import log_ndtr, ndtr

from fedpdmc._jax.programs import INNER, equations
from fedpdmc.enclosures import check_continuity
from fedpdmc.enclosures.known_functions import is_of_jax, name_of_call
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
        check_continuity(lambda x: function(x[0]), 1)


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


def called(function):
    """Names of JAX's functions that a function of three numbers calls, as far as they are known."""
    calls = equations(jax.make_jaxpr(function)(jnp.ones(3)).jaxpr, lambda equation: equation.primitive.name in INNER)
    return {name_of_call(equation) for equation in calls if equation.primitive.name in INNER}


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("log_ndtr", log_ndtr), ("log_ndtr", jax.vmap(log_ndtr)),
        ("logaddexp", jax.nn.softplus), ("logaddexp", lambda x: jax.vmap(jnp.logaddexp)(x, 2 * x)),
        ("logaddexp", lambda x: jnp.logaddexp(x[:1], x)),
    ],
)  # fmt: skip
def test_functions_of_jax_are_known_however_they_are_called(name, function):
    """Tight bounds depend on it: also within other functions, mapped, and in derivatives."""
    assert name in called(function)
    assert name in called(lambda x: jax.jvp(function, (x,), (x,)))
    assert name in called(jax.grad(lambda x: jnp.sum(function(x))))


@pytest.mark.usefixtures("double")
def test_another_text_under_a_known_name_is_another_function():
    @jax.custom_jvp
    @functools.wraps(log_ndtr)
    def fake(t, series_order=3):
        return jnp.where(t > 0.2, 1.0, 0.0)

    fake.defjvps(lambda g, value, t: 0.0 * g, None)
    for function in (lambda x: fake(x, 3), jax.vmap(lambda x: fake(x, 3))):
        assert "log_ndtr" not in called(function)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(
    ("name", "fake"),
    [
        ("logaddexp", jax.jit(functools.wraps(logaddexp.fun)(lambda t: jax.nn.softplus(t)))),
        ("ndtr", jax.jit(functools.wraps(ndtr)(lambda t: jax.nn.softplus(t)))),
        ("ndtr", jax.jit(functools.wraps(ndtr)(lambda t: ndtr(ndtr(t))))),
    ],
)
def test_compositions_of_known_functions_have_no_known_name(name, fake):
    """A rule for the name would enclose another function."""
    for function in (fake, jax.vmap(fake), lambda x: jax.jvp(fake, (x,), (x,)), jax.grad(lambda x: jnp.sum(fake(x)))):
        calls = [x for x in jax.make_jaxpr(function)(jnp.ones(3)).jaxpr.eqns if x.primitive.name in INNER]
        assert name not in map(name_of_call, calls)
