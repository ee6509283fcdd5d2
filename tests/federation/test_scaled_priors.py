"""Student-t and horseshoe priors in contracts: the coordinator holds their scales, and a run that died goes on with them."""

import numpy as np
import pytest
from tests.federation.studies import FEW_ROUNDS, Folder, same_bits

import fedpdmc as fp
from fedpdmc.errors import InputError
from fedpdmc.models.mixture_prior import MixturePrior
from fedpdmc.study import parse_study
from fedpdmc.study.description import modelled

SCALED = FEW_ROUNDS.replace(
    "mean = 0.1\nscale = 1.5",
    'mean = 0.0\nscale = 1.5\nstudent_t = { Intercept = 4 }\nhorseshoe = { on = ["age", "drug[T.verum]"], scale = 0.2 }',
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return Folder(tmp_path_factory.mktemp("scaled"), SCALED)


def test_a_run_that_died_goes_on_with_the_scales_and_sites_are_sent_nothing_of_them(folder, tmp_path):
    whole = folder.in_process()
    resumed, _ = folder.crashed_and_resumed(tmp_path / "store", 9)
    assert same_bits(whole, resumed) and whole.rounds == resumed.rounds
    agents = {name: folder.agent(name, tmp_path / name) for name in folder.study.sites}
    with folder.listening() as connection, folder.sites(connection, agents):
        assert same_bits(whole, fp.sample(connection, progress=False))


def test_the_contract_is_the_prior_and_says_it(folder):
    prior = folder.study.prior()
    assert isinstance(prior, MixturePrior) and prior.index == (0, 1, 2) and prior.law.df == (4,)
    assert float(prior.law.global_scale) == 0.2
    np.testing.assert_array_equal(np.diag(prior.normal.precision), [0.0, 1.5**-2.0, 1.5**-2.0])
    words = modelled(folder.study)[2]
    assert "student_t(4, 0, 1.5)" in words and "horseshoe(0.2, 1.5)" in words and "age" in words


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("Intercept = 4", "Intercept = 2.5", "student_t: found"),
        ("Intercept = 4", "weight = 4", "student_t or horseshoe of weight"),
        ("Intercept = 4", "age = 4", "Name each once"),
        ("scale = 0.2 }", "scale = 0.0 }", "horseshoe: scale"),
        ("scale = 0.2 }", "scale = 0.2, slab = 1.0 }", "unknown key"),
        ("mean = 0.0", "mean = 1.0", "not zero of a parameter of the horseshoe"),
        ("mean = 0.0\nscale = 1.5", "flat = true", "flat, with student_t or horseshoe"),
    ],
)
def test_contracts_that_say_no_prior_are_refused(old, new, words):
    assert old in SCALED
    with pytest.raises(InputError, match=words):
        parse_study(SCALED.replace(old, new).encode())
