"""The standing adversary: random programs of statistical flavour, in every domain, against their true rates.

`adversary` says what is attacked, `random_programs` what with. Hypothesis shrinks a program that breaks a bound to the
smallest that does; ``python -m tests.enclosures.adversary_soak`` runs many on all cores.
"""

from collections import Counter

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.enclosures import exact
from tests.enclosures.adversary import (
    Violation,
    attack,
    check_no_jump,
    computed,
    exact_rates,
    held_exactly,
    is_steep,
    paths,
    shrunk,
    soak,
)
from tests.enclosures.random_programs import BINARY, LEAVES, UNARY, program_of, records, smaller

from fedpdmc.enclosures import check_continuity
from fedpdmc.errors import Discontinuous

pytestmark = pytest.mark.usefixtures("double")

# Steep, or not finite, where a parameter is zero; each jumps elsewhere.
STEEP_PRODUCT = ("mix", ("effect",), ("mul", ("scale",), ("exp", ("order",))))
OVERFLOW = ("erfc", ("scaled", ("change point",), ("quadratic", ("eta",))))
TREES = st.recursive(
    st.tuples(st.sampled_from(sorted(LEAVES))),
    lambda inner: (
        st.tuples(st.sampled_from(sorted(UNARY)), inner) | st.tuples(st.sampled_from(sorted(BINARY)), inner, inner)
    ),
    max_leaves=4,
)  # fmt: skip


@settings(max_examples=8)
@given(TREES, st.integers(0, 2**31))
def test_no_bound_is_broken(tree, seed):
    attack(tree, seed)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(10))
def test_no_bound_is_broken_by_many(seed):
    """Of 500 programs some 300 are shown to have no jumps; the others would need the user's assertion."""
    seen, broken = soak(seed, range(500))
    assert not broken
    assert seen["programs"] > 250


@pytest.mark.long
def test_no_bound_is_broken_once_compiled():
    assert not soak(20, range(25), compiled_every=1)[1]


@pytest.mark.parametrize("tree", [("three kinks", ("effect",)), ("erfc", ("three kinks", ("effect",)))])
def test_choices_of_three_cases_are_followed(tree):
    # Beside softplus, so that the program is searched for the ways in which JAX writes its functions.
    assert attack(("softplus", tree), 5)["programs"] == 1


def test_a_choice_with_many_cases_is_one_value_if_it_is_continuous_and_else_refused():
    tree = ("residual",)
    for _ in range(6):
        tree = ("offset", ("guard", ("huber", tree)))
    check_continuity(program_of(tree, records(0))._likelihood, 3)
    for _ in range(6):
        tree = ("offset", ("step", ("guard", tree)))
    with pytest.raises(Discontinuous):
        check_continuity(program_of(tree, records(0))._likelihood, 3)


def test_the_adversary_notices_a_bound_that_is_too_small_and_shrinks_the_program(monkeypatch):
    """With the remainder of the exponential left out."""
    from fedpdmc.enclosures.special_functions import FUNCTIONS

    right = FUNCTIONS["exp"]

    def wrong(x, far, order):
        return right.local(x, far, order)._replace(beyond=0.0 * x)

    monkeypatch.setitem(FUNCTIONS, "exp", right._replace(local=wrong))
    tree = ("add", ("square", ("exp", ("eta",))), ("scale",))
    with pytest.raises(Violation) as found:
        attack(tree, 1)
    least, _ = shrunk(tree, 1, False, str(found.value))
    assert least in (("exp", ("eta",)), ("square", ("exp", ("eta",))))


@pytest.mark.parametrize(
    ("tree", "seed"),
    [
        (("phase", ("scaled", ("eta",), ("residual",))), 196687333),
        (("inverse square", ("scaled", ("scale",), ("residual",))), 422123121),
        (STEEP_PRODUCT, 550859833),
        (OVERFLOW, 465636488),
    ],
)
def test_a_steep_value_is_no_jump(tree, seed):
    """With slopes of 1e9, of 1e12 and of 1e20, and with one of 1e397, which overflows."""
    attack(tree, seed)


@pytest.mark.parametrize(
    ("tree", "seed", "point"),
    [(STEEP_PRODUCT, 550859833, [0.3, 0.3, 1.0]), (OVERFLOW, 465636488, [0.5, -0.5, -0.47889540359976457])],
)
def test_a_jump_of_a_program_that_is_steep_elsewhere_is_a_jump(tree, seed, point):
    function, v, length = program_of(tree, records(seed))._likelihood, np.array([1.0, 0.2, 0.5]), 1e-13
    one, other = (np.array(point) + side * 0.5 * length * v for side in (-1.0, 1.0))
    assert abs(function(other) - function(one)) > 1e-3
    assert not is_steep(function, one, other, v)


@pytest.mark.parametrize(
    ("tree", "seed"),
    [
        (("no root", ("sign", ("eta",))), 2097689225),
        (("hypot", ("large", ("eta",)), ("change point",)), 1416461091),
        (("signed root", ("sub", ("residual",), ("offset", ("residual",)))), 1114047106),
        pytest.param(
            ("hinge", ("pairs", ("log ndtr", ("either", ("reference",))))), 1408399065, marks=pytest.mark.long
        ),
        (("first", ("softplus", ("largest", ("heaviside", ("scale",))))), 1187633200),
    ],
)
def test_programs_whose_jumps_are_hard_to_see(tree, seed):
    attack(tree, seed)


def test_a_jump_is_noticed():
    def function(x):
        return jnp.where(x @ x > 1.0, 1.0, 0.0) + 0.1 * jnp.sum(x)

    with pytest.raises(Violation, match="the value jumps"):
        for seed in range(4):
            check_no_jump(function, np.random.default_rng(seed), Counter())


def test_a_jump_at_the_foot_of_a_steep_slope_is_noticed():
    def function(x):
        return jnp.where(x @ x > 1.0, jnp.tanh(1e6 * (x @ x - 1.0)), -1.0)

    with pytest.raises(Violation, match="the value jumps"):
        for seed in range(4):
            check_no_jump(function, np.random.default_rng(seed), Counter())


def test_smaller_programs_have_one_operation_less():
    assert set(smaller(("add", ("exp", ("eta",)), ("scale",)))) == {
        ("exp", ("eta",)),
        ("scale",),
        ("add", ("eta",), ("scale",)),
    }


def test_the_second_implementation_is_another_one():
    """Cancellation that 64 bits lose is seen by forty digits."""
    (value,) = exact.evaluate(lambda x: (1e17 + x) - 1e17, 1.5)
    assert exact.ends(value) == (1.5, 1.5)


@pytest.mark.parametrize("rotating", [False, True])
def test_the_second_implementation_has_the_rates_along_lines_and_rotations(rotating):
    """Gradients, cumulated sums and indices included; a bound that leaves them out is noticed."""
    program = program_of(("cumsum", ("mul", ("softplus", ("eta",)), ("reference",))), records(4))
    rate = program._program(True)
    a, v, _, times = paths(np.random.default_rng(3), program.data, rotating, True)
    rates, exactly = computed(False, rate, rotating, a, v, times), exact_rates(rate, rotating, a, v, times)
    assert sorted(map(len, exactly.values())) == [3, 3]
    held_exactly(rates - 1e-8 * (1 + abs(rates)), exactly, rates + 1e-8 * (1 + abs(rates)), ("here",), times)
    with pytest.raises(Violation, match="in exact arithmetic"):
        held_exactly(rates - 1.0, exactly, rates - 1e-3 * (1 + abs(rates)), ("here",), times)
