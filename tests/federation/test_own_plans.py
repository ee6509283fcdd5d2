"""A coordinator that cannot choose: sites make the plans themselves and refuse any other."""

import dataclasses

import numpy as np
import pytest
from tests.federation.studies import FEW_ROUNDS, SEED, SITE_SEED, ZIGZAG, Folder, same_bits
from tests.study.contracts import CONTRACT

import fedpdmc as fp
from fedpdmc.certificates.keys import read_credentials
from fedpdmc.errors import Refused
from fedpdmc.federation import messages
from fedpdmc.federation.in_process import DirectTransport
from fedpdmc.federation.session import join
from fedpdmc.federation.site_agent.start import open_agent
from fedpdmc.study import read_policy

KINDS = {
    "turns": FEW_ROUNDS,
    "flips": ZIGZAG,
    "lines": CONTRACT.replace("[dynamics]", '[dynamics]\nkind = "BouncyParticle"'),
    "refreshed": CONTRACT.replace("[dynamics]", "[dynamics]\nrefresh = 1.2"),
}


def agents_of(folder, stores, enforced=True):
    """Agents with a policy and certificates, as on a network."""
    policy = read_policy(folder.path / "policy.toml")
    made = []
    for name in folder.study.sites:
        agent = open_agent(
            folder.study, name, folder.data[name], store=stores / name, policy=policy, seed=SITE_SEED,
            credentials=read_credentials(folder.keys(name)),
        )  # fmt: skip
        agent.computation.own.enforced = enforced
        made.append(agent)
    return made


def connected(folder, stores, change=None, store=None, enforced=True):
    """A connection to such agents; ``change`` is a hostile coordinator's of its requests, by their number."""
    agents = agents_of(folder, stores, enforced)

    def transport(study, run, seed):
        for agent in agents:
            agent.join(messages.encode(messages.Welcome(run, study.digest)))
        return DirectTransport(agents)

    connection = join(folder.study, transport, store=store, seed=SEED)
    return connection


@pytest.mark.parametrize("kind", KINDS)
def test_an_honest_run_is_answered_and_has_the_bits_of_one_that_is_not_checked(kind, tmp_path):
    folder = Folder(tmp_path / "study", KINDS[kind])
    with connected(folder, tmp_path) as connection:
        post = fp.sample(connection, progress=False)
    assert same_bits(post, folder.in_process())
