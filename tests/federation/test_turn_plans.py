"""Plans that sites make for themselves: the same bits as whole plans, and a fraction of the bytes."""

import dataclasses
import os
import subprocess
import sys

import numpy as np
import pytest
from tests.federation.requests import CHAINS, DIM, RUN, ask, joined, opening
from tests.federation.studies import SEED, SITE_SEED, same_bits

import fedpdmc as fp
from fedpdmc.federation import messages
from fedpdmc.federation.remote import RemoteFederation
from fedpdmc.federation.site_agent.audit_replay import replay


@pytest.fixture(scope="module")
def run(few_rounds, tmp_path_factory):
    """A run with stores of the sites, and what was sent to the first site."""
    store, sent = tmp_path_factory.mktemp("run"), []
    with connected(few_rounds, store, sent) as connection:
        return fp.sample(connection, progress=False), sent, store


def connected(folder, store, sent, fails_at=None):
    seeds = dict.fromkeys(folder.study.sites, SITE_SEED)
    connection = fp.connect(folder.study, data=folder.data, seed=SEED, site_seeds=seeds, store=store)
    ask = connection.transport.ask

    def kept(requests):
        if len(sent) == fails_at:
            raise KeyboardInterrupt
        sent.append(requests[0].data)
        return ask(requests)

    connection.transport.ask = kept
    return connection


def test_every_plan_is_a_few_numbers_and_whole_plans_have_the_same_bits(run, few_rounds, tmp_path, monkeypatch):
    post, sent, _ = run
    made = [messages.decode(data) for data in sent]
    plans = [message for message in made if isinstance(message, messages.TurnPlans)]
    assert len(plans) > 2 and not any(isinstance(message, messages.Plans) for message in made)
    # A round is an exchange: all that is sent but the opening and the seeds.
    assert post.rounds == len(sent) - 3
    (opening,) = (message for message in made if isinstance(message, messages.Open))
    assert not len(opening.turns)
    # A row: the state, five numbers, of which three have four bytes; and the arrivals of two sites along the last plans.
    most = 4 * (16 * plans[0].start.shape[1] + 2 * 8 + 3 * 4) + 200
    assert max(len(messages.encode(dataclasses.replace(message, evidence=()))) for message in plans) < most
    assert max(sum(map(len, message.evidence)) for message in plans) < 2 * (4 * 8 * (1 + plans[0].start.shape[1]) + 300)
    never = property(lambda self: False, lambda self, value: None)
    monkeypatch.setattr(RemoteFederation, "turning", never, raising=False)
    whole = []
    with connected(few_rounds, tmp_path, whole) as connection:
        other = fp.sample(connection, progress=False)
    assert any(isinstance(messages.decode(data), messages.Plans) for data in whole)
    assert same_bits(post, other) and post.rounds == other.rounds
    assert np.all(post.bytes < other.bytes)


def test_a_run_that_stopped_in_the_middle_goes_on_with_the_same_bytes(run, few_rounds, tmp_path):
    post, sent, _ = run
    before, after = [], []
    with connected(few_rounds, tmp_path, before, fails_at=len(sent) - 3) as connection:
        with pytest.raises(KeyboardInterrupt):
            fp.sample(connection, progress=False)
    with connected(few_rounds, tmp_path, after) as connection:
        other = fp.sample(connection, progress=False)
    assert same_bits(post, other)
    plans = {messages.decode(data).sequence: data for data in before}
    again = {messages.decode(data).sequence: data for data in after}
    assert set(plans) & set(again) and all(again[k] == plans[k] for k in set(plans) & set(again))


def test_a_sites_log_can_be_replayed(run, few_rounds):
    _, _, store = run
    found = replay(few_rounds.study, "north", few_rounds.data["north"], store=store / "sites" / "north")
    assert not found.different and found.same > 5


def test_other_velocities_are_refused_by_name_and_nothing_is_answered(run, few_rounds, tmp_path):
    """A coordinator whose hash is not that of the site's plans, and plans that no site can make."""
    _, sent, _ = run
    agent = few_rounds.agent("north", tmp_path / "north")
    # The sites of that run were in this process, without certificates.
    agent.computation.own.credentials = None
    agent.join(messages.encode(messages.Welcome(messages.decode(sent[0]).run, few_rounds.study.digest)))
    for data in sent:
        message = messages.decode(data)
        if isinstance(message, messages.TurnPlans):
            break
        assert not isinstance(messages.decode(agent.answer(data)), messages.Refusal)

    def told(**changes):
        answer = messages.decode(agent.answer(messages.encode(dataclasses.replace(message, **changes))))
        return answer.code if isinstance(answer, messages.Refusal) else answer

    assert told(derived=bytes(32)) == "OTHER_VELOCITIES"
    assert told(turn=message.turn + 1) == "OTHER_VELOCITIES"
    assert told(left=message.left * 0.5) == "OTHER_VELOCITIES"
    assert told(chain=message.chain + 4) == "WRONG_SHAPE"
    assert isinstance(told(), messages.Arrivals)
    agent.log.close()


def test_dynamics_without_turns_take_no_key_and_no_such_plans(zigzag, tmp_path):
    agent = joined(zigzag, tmp_path / "store")
    assert ask(agent, opening(turns=np.arange(2))).code == "NOT_IN_CONTRACT"
    rows, vectors = (np.arange(CHAINS),) * 3, (np.full(CHAINS, 0.5),) * 2
    plans = messages.TurnPlans(RUN, 2, *rows, *(np.zeros((CHAINS, DIM)),) * 2, *vectors, bytes(32))
    assert ask(agent, messages.encode(dataclasses.replace(plans, sequence=1))).code == "NOT_OPEN"
    assert isinstance(ask(agent, opening()), messages.Opened)
    assert ask(agent, messages.encode(plans)).code == "NOT_IN_CONTRACT"
    agent.log.close()


PROGRAM = """
import hashlib, jax, jax.numpy as jnp, numpy as np
jax.config.update("jax_enable_x64", True)
from fedpdmc._jax.random_streams import chain_keys
from fedpdmc.dynamics import turn_velocities
keys = chain_keys(jax.random.key(7), 64)
made = jax.jit(lambda k, n: turn_velocities(k, n, 50, 6))(keys, jnp.arange(64))
print(hashlib.sha256(np.asarray(made).tobytes()).hexdigest())
"""


@pytest.mark.long
def test_processes_with_other_processors_features_make_the_same_velocities():
    """With and without fused operations and wide vectors, as another machine would have them."""
    found = set()
    for flags in ("", "--xla_cpu_max_isa=SSE4_2", "--xla_cpu_max_isa=AVX2", "--xla_backend_optimization_level=0"):
        environment = os.environ | {"XLA_FLAGS": flags, "FEDPDMC_CACHE": "0"}
        made = subprocess.run(
            [sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment, check=True, timeout=300
        )
        found.add(made.stdout.strip())
    assert len(found) == 1
