"""A function that reads a global or closes over an array."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedpdmc as fp
from fedpdmc.errors import InputError
from fedpdmc.models.user_function import check_unchanged, user_model

LEVEL = 1.0
CENTRE = np.zeros(2)


def reads_a_global(x, data):
    return 0.5 * LEVEL * jnp.sum((data - x) ** 2)


def closes_over(x, data):
    return 0.5 * jnp.sum((data - x - CENTRE) ** 2)


class Model:
    """Reads its own attribute."""

    level = 1.0

    def potential(self, x, data):
        return 0.5 * self.level * jnp.sum((data - x) ** 2)

    __call__ = potential


BOX = {"level": 1.0}


def by_default(x, data, box=BOX):
    return 0.5 * box["level"] * jnp.sum((data - x) ** 2)


def of_a_box(box, x, data):
    return 0.5 * box[0] * jnp.sum((data - x) ** 2)


compiled = jax.jit(reads_a_global)


def reads_a_compiled(x, data):
    return compiled(x, data) + jnp.sum(x**2)


def changed_by_a_method(monkeypatch):
    model = Model()
    first = model.potential
    yield first
    model.level = 2.0
    # Another object, which is equal to the first; compiled work keeps that alive.
    yield model.potential


def changed_in_an_object(monkeypatch):
    model = Model()
    yield model
    model.level = 2.0
    yield model


@dataclasses.dataclass(frozen=True)
class Named:
    """Equal to others of its name, whatever its level."""

    name: str
    level: float = dataclasses.field(compare=False)

    def __call__(self, x, data):
        return 0.5 * self.level * jnp.sum((data - x) ** 2)


def changed_in_an_equal_object(monkeypatch):
    first = Named("a", 1.0)
    yield first
    yield Named("a", 2.0)


def changed_as_a_default(monkeypatch):
    yield by_default
    monkeypatch.setitem(BOX, "level", 2.0)
    yield by_default


def changed_in_a_partial(monkeypatch):
    box = [1.0]
    function = functools.partial(of_a_box, box)
    yield function
    box[0] = 2.0
    yield function


def changed_under_jit(monkeypatch):
    """JAX would go on with the program that it has."""
    yield reads_a_compiled
    monkeypatch.setattr("tests.models.test_captured_values.LEVEL", 2.0)
    yield reads_a_compiled


@pytest.mark.parametrize(
    "change",
    [
        changed_by_a_method,
        changed_in_an_object,
        changed_in_an_equal_object,
        changed_as_a_default,
        changed_in_a_partial,
        changed_under_jit,
    ],
)
def test_whatever_a_function_reads_is_noticed_when_it_changes(change, monkeypatch):
    functions, data = change(monkeypatch), np.ones((3, 2))
    check_unchanged(user_model(next(functions), data), 2, "a")
    with pytest.raises(InputError, match="give what changes|Give what changes"):
        check_unchanged(user_model(next(functions), data), 2, "a")


def test_a_function_that_draws_random_numbers_is_refused():
    """Its bounds would be of one draw and its rates of another."""
    rng = np.random.default_rng(0)
    with pytest.raises(InputError, match="draws random numbers"):
        check_unchanged(user_model(lambda x, data: jnp.sum((data + rng.normal() - x) ** 2), np.ones((3, 2))), 2, "a")


def test_a_function_that_cannot_be_hashed_is_refused():
    class Unhashable(Model):
        __hash__ = None  # type: ignore[assignment]

    with pytest.raises(InputError, match="Unhashable that cannot be hashed"):
        fp.Site(Unhashable(), name="a", data=np.ones((3, 2)))


def test_data_are_copied():
    """What is done to the user's array afterwards does not reach the site."""
    data = np.ones((3, 2))
    model = user_model(closes_over, data)
    data += 5.0
    np.testing.assert_array_equal(model.data, np.ones((3, 2)))


def test_going_on_with_a_run_whose_function_has_changed_is_refused(monkeypatch):
    site = fp.Site(lambda x, data: reads_a_global(x, data), name="a", data=np.ones((4, 1)))
    settings = {"reference": fp.Reference(jnp.zeros(1), jnp.ones(1)), "chains": 2, "duration": 1.0, "seed": 0}
    post = fp.sample(site, fp.models.normal_prior(1), dynamics=fp.ZigZag(), progress=False, **settings)
    monkeypatch.setattr("tests.models.test_captured_values.LEVEL", 9.0)
    with pytest.raises(InputError, match="has changed since it was first used"):
        post.extend(duration=1.0, progress=False)


def test_a_global_that_changes_is_noticed(monkeypatch):
    data = np.ones((3, 2))
    check_unchanged(user_model(reads_a_global, data), 2, "a")
    check_unchanged(user_model(reads_a_global, 2 * data), 2, "a")
    monkeypatch.setattr("tests.models.test_captured_values.LEVEL", 4.0)
    with pytest.raises(InputError, match=r"'reads_a_global', which reads a value that has changed.*as data"):
        check_unchanged(user_model(reads_a_global, data), 2, "a")
    # A function that is defined again is another one.
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


def test_data_that_are_changed_in_place_later_are_not_read():
    """The site has what it was given: JAX may keep the memory of a NumPy array."""
    values = np.ones(4096)
    model = user_model(lambda x, y: jnp.sum((x[0] - y) ** 2), values)
    values[:] = 4.0
    assert np.all(np.asarray(model.data) == 1.0)
