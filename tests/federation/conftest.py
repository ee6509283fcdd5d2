"""Fixtures of small studies."""

import equinox as eqx
import jax
import numpy as np
import pytest
from tests.federation.requests import ask, joined, opening
from tests.federation.studies import FEW_ROUNDS, MODEL_ZIGZAG, ZIGZAG, Folder

from fedpdmc.federation import messages
from fedpdmc.members import run_coordinates
from fedpdmc.potentials import Program


@pytest.fixture(scope="session", autouse=True)
def clocks_of_programs_are_chosen_once():
    """The bounds of a model file take seconds to prove, and every agent of a study has the same records and coordinates."""
    made, choose = {}, run_coordinates.choose

    def remembered(potential, dynamics, center, name, *more):
        if not isinstance(potential, Program):
            return choose(potential, dynamics, center, name, *more)
        leaves, tree = jax.tree_util.tree_flatten((potential, dynamics, center))
        numbers = (np.asarray(x).tobytes() if eqx.is_array_like(x) else x for x in leaves)
        key = (tree, name, *more, *numbers)
        if key not in made:
            made[key] = choose(potential, dynamics, center, name, *more)
        return made[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_coordinates, "choose", remembered)
        yield


@pytest.fixture(
    scope="session",
    params=[pytest.param(ZIGZAG, id="family"), pytest.param(MODEL_ZIGZAG, id="file", marks=pytest.mark.long)],
)
def folder(tmp_path_factory, request):
    """A study of a family and, in long runs, the same with a model file."""
    return Folder(tmp_path_factory.mktemp("study"), request.param)


@pytest.fixture(scope="session")
def expected(folder):
    return folder.in_process()


@pytest.fixture
def fresh(folder, tmp_path):
    """Agents with new logs."""
    return lambda: {name: folder.agent(name, tmp_path / name) for name in folder.study.sites}


@pytest.fixture(scope="session")
def zigzag(folder):
    return folder


@pytest.fixture(scope="session")
def few_rounds(tmp_path_factory):
    return Folder(tmp_path_factory.mktemp("few"), FEW_ROUNDS)


@pytest.fixture
def agent(folder, tmp_path):
    """An agent whose run is open."""
    agent = joined(folder, tmp_path / "store")
    assert isinstance(ask(agent, opening()), messages.Opened)
    yield agent
    agent.log.close()
