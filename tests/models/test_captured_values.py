"""A function that reads a global or closes over an array."""

import jax.numpy as jnp
import numpy as np
import pytest

import fedpdmc as fp
from fedpdmc.errors import InputError
from fedpdmc.models.captured_values import check_unchanged
from fedpdmc.models.user_function import user_model

LEVEL = 1.0
CENTRE = np.zeros(2)


def reads_a_global(x, data):
    return 0.5 * LEVEL * jnp.sum((data - x) ** 2)


def closes_over(x, data):
    return 0.5 * jnp.sum((data - x - CENTRE) ** 2)


def test_a_global_that_changes_is_noticed(monkeypatch):
    data = np.ones((3, 2))
    check_unchanged(user_model(reads_a_global, data), 2, "a")
    check_unchanged(user_model(reads_a_global, 2 * data), 2, "a")
    monkeypatch.setattr("tests.models.test_captured_values.LEVEL", 4.0)
    with pytest.raises(InputError, match=r"'reads_a_global', which reads a value that has changed.*as data"):
        check_unchanged(user_model(reads_a_global, data), 2, "a")
    # A function that is defined anew is another one.
    check_unchanged(user_model(lambda x, data: reads_a_global(x, data), data), 2, "a")


def test_an_array_that_is_changed_in_place_is_noticed():
    check_unchanged(user_model(closes_over, np.ones((3, 2))), 2, "a")
    CENTRE[0] = 1.0
    try:
        with pytest.raises(InputError, match="has changed"):
            check_unchanged(user_model(closes_over, np.ones((3, 2))), 2, "a")
    finally:
        CENTRE[0] = 0.0


def test_a_second_run_is_refused_before_it_begins(monkeypatch):
    site = fp.Site(reads_a_global, name="a", data=np.ones((4, 1)))
    check_unchanged(user_model(reads_a_global, np.ones((4, 1))), 1, "a")
    monkeypatch.setattr("tests.models.test_captured_values.LEVEL", 9.0)
    with pytest.raises(InputError, match="has changed since it was first used"):
        fp.sample(site, fp.models.normal_prior(1), dynamics=fp.ZigZag(), duration=1.0)
