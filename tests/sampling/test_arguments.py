"""What a user may ask for, checked before anything runs."""

import dataclasses
import inspect

import numpy as np
import pytest
from tests.support import ZIGZAG, hospitals, prior

import fedpdmc as fp
from fedpdmc.errors import InputError
from fedpdmc.sampling.arguments import Settings, check_init, check_length, check_names, check_reference

BAD = {
    "prior_at": "nowhere",
    "bounds": "loose",
    "keep": "everything",
    "seed": -1,
    "burn_in": float("inf"),
    "chains": 0,
    "control": "cubic",
    "dynamics": "ZigZag",
    "reference": "laplacian",
    "duration": 0.0,
    "ess": "many",
}


def test_the_settings_are_the_arguments_of_sample_with_its_defaults():
    defaults = {name: given.default for name, given in inspect.signature(fp.sample).parameters.items()}
    for field in dataclasses.fields(Settings):
        if field.name != "sites":
            assert defaults[field.name] == field.default, field.name
    assert set(defaults) - {field.name for field in dataclasses.fields(Settings)} == {"progress", "method"}


@pytest.mark.parametrize(("argument", "value"), BAD.items(), ids=BAD)
def test_bad_values_are_refused_with_the_name_of_their_argument(argument, value):
    with pytest.raises(InputError) as error:
        Settings(sites=hospitals(), **{argument: value})
    assert error.value.argument == argument and error.value.found == repr(value) and error.value.remedy


def test_settings_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings(sites=hospitals()).chains = 3  # type: ignore[misc]


def test_settings_that_exclude_each_other_are_refused():
    with pytest.raises(InputError, match="duration, ess: found both"):
        Settings(sites=hospitals(), duration=1.0, ess=10.0)
    with pytest.raises(InputError, match="prior_at: found 'sites' with a Redistributed prior"):
        Settings(sites=hospitals(), prior=fp.Redistributed(prior()), prior_at="sites", dynamics=ZIGZAG)
    with pytest.raises(InputError, match="reference: found ndarray"):
        Settings(sites=hospitals(), reference=np.eye(2))  # type: ignore[arg-type]


def test_a_length_is_one_positive_number():
    check_length(None, None)
    check_length(2, None)
    for duration, ess in ((-1.0, None), (None, float("nan")), (None, True)):
        with pytest.raises(InputError, match="Give a positive finite number"):
            check_length(duration, ess)


def test_names_are_distinct_and_one_for_each_parameter():
    assert check_names(None, 2) == ["x0", "x1"] and check_names(("a", 1), 2) == ["a", "1"]
    for names, match in (
        (["a"], "found 1 names. Give 2, one for each parameter. The models call them u, v"),
        (["a", "a"], "Give distinct names"),
        (["a", "energy"], "none of them 'energy'"),
        (3, "Give 2 names"),
    ):
        with pytest.raises(InputError, match=match):
            check_names(names, 2, ["u", "v"])


def test_starting_points_fit_the_chains():
    assert check_init(None, 3, 2) is None
    assert check_init([1, 2], 3, 2).shape == (2,) and check_init(np.ones((3, 2)), 3, 2).shape == (3, 2)
    for init in (np.ones(3), np.ones((2, 2)), "here", [np.nan, 1.0]):
        with pytest.raises(InputError, match="^init: found"):
            check_init(init, 3, 2)


def test_a_reference_has_a_scale_that_can_be_inverted():
    assert check_reference(fp.Reference(np.zeros(2), np.ones(2)), 2).dim == 2
    for center, scale in (
        (np.zeros(3), np.ones(3)),
        (np.zeros(2), np.array([1.0, 0.0])),
        (np.zeros(2), np.ones((2, 2))),
        (np.array([0.0, np.inf]), np.ones(2)),
    ):
        with pytest.raises(InputError, match="^reference: found"):
            check_reference(fp.Reference(center, scale), 2)
