"""A function whose bounds are loose is refused, or its cost is said, before anything is drawn."""

import jax.numpy as jnp
import pytest
from tests.support import DYNAMICS

from fedpdmc.clocks import ClockChoice
from fedpdmc.clocks.thinning import CurveClock, TimePolynomial
from fedpdmc.errors import InputError
from fedpdmc.members.run_coordinates import _check_cost
from fedpdmc.potentials import Program


def choice(cost):
    program = Program(lambda x, data: jnp.sum(x**2), (), 2)
    clock = CurveClock(program, DYNAMICS["zigzag"], TimePolynomial(), jnp.ones(()))
    return ClockChoice(clock, "the lowest cost", {clock.name: cost})


@pytest.mark.parametrize("cost", [2e4, float("inf"), float("nan")])
def test_bounds_that_are_too_loose_are_refused_with_what_helps(cost):
    with pytest.raises(InputError, match=r"'clinic'.*evaluations of its gradient.*5 to 50 are usual.*fewer steps"):
        _check_cost(choice(cost), "clinic")


def test_loose_bounds_are_said_and_usual_ones_are_not(recwarn):
    with pytest.warns(UserWarning, match="site 'clinic'.*loose.*about 700 evaluations"):
        _check_cost(choice(700.0), "clinic")
    recwarn.clear()
    _check_cost(choice(40.0), "clinic")
    assert not recwarn.list
