"""The checks of single values: what passes, and what is refused with the argument's name."""

import jax.numpy as jnp
import numpy as np
import pytest

from fedpdmc import validation
from fedpdmc.errors import InputError

NOT_NUMBERS = [None, "1.0", b"1", True, np.True_, [1.0, 2.0], object(), float("nan")]


@pytest.mark.parametrize("value", [2, 2.0, np.float32(2), np.int64(2), np.array(2.0), jnp.array(2.0)])
def test_a_number_of_any_type_is_a_float(value):
    for check in (validation.positive, validation.non_negative):
        assert type(check("x", value)) is float and check("x", value) == 2.0


@pytest.mark.parametrize("value", [*NOT_NUMBERS, 0.0, -1.0, float("inf"), 10**400])
def test_positive_refuses(value):
    with pytest.raises(InputError, match=r"^rate: found .*\. Give a positive finite number\.$"):
        validation.positive("rate", value)


@pytest.mark.parametrize("value", [*NOT_NUMBERS, -1e-300, float("inf")])
def test_non_negative_refuses(value):
    assert validation.non_negative("rate", 0) == 0.0
    with pytest.raises(InputError, match="rate: found"):
        validation.non_negative("rate", value)


@pytest.mark.parametrize("value", [*NOT_NUMBERS, 0, 1, 1.5, -0.5])
def test_probability_refuses(value):
    assert validation.probability("level", 0.5) == 0.5
    with pytest.raises(InputError, match="level: found"):
        validation.probability("level", value)


@pytest.mark.parametrize("value", [*NOT_NUMBERS, 2.0, -1, 11, 2**80])
def test_integer_refuses(value):
    assert [validation.integer("n", n, 0, 10) for n in (0, np.int32(7), 10)] == [0, 7, 10]
    with pytest.raises(InputError, match="n: found .* Give an integer from 0 to 10"):
        validation.integer("n", value, 0, 10)


def test_a_seed_has_63_bits_or_is_none():
    assert validation.optional_seed("seed", None) is None
    assert validation.optional_seed("seed", 2**63 - 1) == 2**63 - 1
    for value in (2**63, -1, 1.0, True, "1"):
        with pytest.raises(InputError, match="seed: found"):
            validation.optional_seed("seed", value)


@pytest.mark.parametrize("value", [None, "c", ["a"], 1])
def test_one_of_refuses(value):
    assert validation.one_of("kind", "a", ("a", "b")) == "a"
    with pytest.raises(InputError, match="kind: found .* Give one of 'a', 'b'"):
        validation.one_of("kind", value, ("a", "b"))
