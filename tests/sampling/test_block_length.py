"""How long the blocks of a run are."""

from types import SimpleNamespace

from fedpdmc.results.verdict import STOP_ESS_PER_CHAIN
from fedpdmc.sampling.driver import DEFAULT_ESS, ess_to_reach


def test_open_chains_go_on_until_they_can_be_judged():
    """A number of chains that was given is kept to; one that was chosen does not end in a verdict of too few draws."""

    def method(open_chains, chains):
        return SimpleNamespace(open_chains=open_chains, chains=chains)

    assert ess_to_reach(method(True, 128), 200) == STOP_ESS_PER_CHAIN * 128
    assert ess_to_reach(method(True, 16), 200) == 200
    assert ess_to_reach(method(False, 128), 200) == 200
    assert ess_to_reach(method(True, 128), None) == DEFAULT_ESS
