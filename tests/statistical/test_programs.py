"""Arrivals of a model in plain JAX: the compensator at each is Exp(1), the marks in proportion to the rates."""

import jax.numpy as jnp
import pytest
from tests.statistical.targets import target, truth
from tests.statistical.test_arrivals import DYNAMICS, IDENTITY, check, outing

import fedpdmc as fp
from fedpdmc._jax.precision import double_precision
from fedpdmc.members.run_coordinates import Opening
from fedpdmc.potentials import Program


def poisson(x, data):
    z = data["X"] @ x + data["offset"]
    return jnp.sum(jnp.exp(z) - data["y"] * z)


@double_precision
def site(built):
    """The same records as a program."""
    data = {"X": jnp.asarray(built.design), "offset": jnp.asarray(built.offset), "y": jnp.asarray(built.response)}
    return fp.Site(Program(poisson, data, built.dim), name="site0")


@pytest.mark.long
@pytest.mark.parametrize("dynamics", DYNAMICS.values(), ids=list(DYNAMICS))
def test_arrivals_of_a_program_have_its_rate(dynamics):
    federation = target("poisson", 3)
    journey = outing(truth("poisson", 3), IDENTITY, dynamics, seed=41)
    gradient = federation.members[0].records.gradient
    check(site(federation.sites()[0].potential), Opening(IDENTITY, dynamics), gradient, journey)
