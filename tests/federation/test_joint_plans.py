"""A coordinator that cannot choose: sites make the plans themselves and refuse any other."""

import dataclasses
import shutil

import numpy as np
import pytest
from tests.federation.studies import FEW_ROUNDS, SEED, SITE_SEED, SUMMED, ZIGZAG, Folder, same_bits
from tests.study.contracts import CONTRACT, EFFECTS

import fedpdmc as fp
from fedpdmc._jax.precision import double_precision
from fedpdmc.certificates.keys import read_credentials
from fedpdmc.errors import Refused
from fedpdmc.federation import messages
from fedpdmc.federation.in_process import DirectTransport
from fedpdmc.federation.session import join
from fedpdmc.federation.site_agent.audit_replay import replay
from fedpdmc.federation.site_agent.start import open_agent
from fedpdmc.federation.turn_plans import fingerprint, whole
from fedpdmc.study import parse_study, read_policy

KINDS = {
    "turns": FEW_ROUNDS,
    "summed": SUMMED,
    "flips": ZIGZAG,
    "lines": CONTRACT.replace("[dynamics]", '[dynamics]\nkind = "BouncyParticle"'),
    "refreshed": CONTRACT.replace("[dynamics]", "[dynamics]\nrefresh = 1.2"),
}


def agent_of(folder, name, store, enforced=True):
    """A site with a policy and a certificate, as on a network."""
    agent = open_agent(
        folder.study, name, folder.data[name], store=store / name, policy=read_policy(folder.path / "policy.toml"),
        seed=SITE_SEED, credentials=read_credentials(folder.keys(name)),
    )  # fmt: skip
    agent.computation.own.enforced = enforced
    return agent


def connected(folder, stores, sent=None, stop=None):
    """A connection to such sites; ``sent`` collects the requests to the first one, and ``stop`` is how many it is sent."""
    agents = [agent_of(folder, name, stores) for name in folder.study.sites]

    def transport(study, run, seed):
        for agent in agents:
            agent.join(messages.encode(messages.Welcome(run, study.digest)))
        return DirectTransport(agents)

    connection = join(folder.study, transport, store=None, seed=SEED)
    ask, sent = connection.transport.ask, [] if sent is None else sent

    def collected(requests):
        sent.append(requests[0].data)
        if len(sent) == stop:
            raise InterruptedError
        return ask(requests)

    connection.transport.ask = collected
    return connection


@pytest.mark.parametrize("kind", KINDS)
def test_an_honest_run_is_answered_with_the_bits_of_one_that_is_not_checked(kind, tmp_path):
    folder = Folder(tmp_path / "study", KINDS[kind])
    with connected(folder, tmp_path, sent := []) as connection:
        post = fp.sample(connection, progress=False)
    assert same_bits(post, folder.in_process())
    # One exchange more than the opening before; the first plans have the seeds, the others the sites' arrivals.
    made = [messages.decode(data) for data in sent]
    plans = [m for m in made if isinstance(m, (messages.Plans, messages.TurnPlans))]
    assert sum(isinstance(m, (messages.Open, messages.Reveal)) for m in made) == 2 and len(plans) > 3
    assert [len(m.evidence) for m in plans[:2]] == [len(folder.study.sites) + 1, len(folder.study.sites)]
    found = replay(folder.study, "north", folder.data["north"], store=tmp_path / "north")
    assert not found.different and found.same >= len(plans)


@pytest.fixture(scope="module")
def stopped(few_rounds, tmp_path_factory):
    """An honest run before its fourth plans: what was sent to north, and the stores of the sites."""
    stores, sent = tmp_path_factory.mktemp("stopped"), []
    with pytest.raises(InterruptedError), connected(few_rounds, stores, sent, stop=10**6) as connection:
        ask = connection.transport.ask

        def fourth(requests):
            kinds = [isinstance(messages.decode(data), messages.TurnPlans) for data in (*sent, requests[0].data)]
            return ask(requests) if sum(kinds) < 4 else stop(requests)

        def stop(requests):
            sent.append(requests[0].data)
            raise InterruptedError

        connection.transport.ask = fourth
        fp.sample(connection, progress=False)
    return stores, sent


@pytest.fixture
def restarted(few_rounds, stopped, tmp_path):
    """North as it was then, from its log; checking plans or not."""
    made = []

    def restart(enforced=True):
        folder = tmp_path / str(len(made))
        shutil.copytree(stopped[0], folder)
        made.append(agent_of(few_rounds, "north", folder, enforced))
        return made[-1]

    yield restart
    for agent in made:
        agent.log.close()


def forged(agent, message, **changes):
    """A request of a hostile coordinator, with the hash of the plans that it stands for."""
    message = dataclasses.replace(message, **changes)
    computation = agent.computation
    plans = double_precision(whole)(message, computation._turn_keys, computation.progress.shape[1])
    return messages.encode(dataclasses.replace(message, derived=fingerprint(plans.duration, plans.velocity)))


def told(agent, data):
    """The code of a refusal, or the kind of the answer."""
    answer = messages.decode(agent.answer(data))
    return answer.code if isinstance(answer, messages.Refusal) else type(answer).__name__


def invented(message):
    """The last arrivals, that of south on the first chain at once."""
    south = messages.decode(message.evidence[1])
    assert south.rang.any()
    time = np.array(south.time)
    time[:1] = 1e-3
    return message.evidence[0], messages.encode(dataclasses.replace(south, time=time))


def skipped(message):
    """The last arrivals, but none of south."""
    south = messages.decode(message.evidence[1])
    assert south.rang.any()
    none = {"time": np.zeros(0), "rang": np.zeros_like(south.rang), "velocity": np.zeros((0, 0))}
    return message.evidence[0], messages.encode(dataclasses.replace(south, **none))


# What a hostile coordinator changes in an honest request, given the one before.
CHOICES = {
    "start": lambda m, before: {"start": m.start + 0.1},
    "start, little": lambda m, before: {"start": m.start + 1e-6},
    "velocity": lambda m, before: {"velocity": m.velocity[::-1]},
    "turn": lambda m, before: {"turn": m.turn + 1},
    "wait": lambda m, before: {"wait": 0.5 * m.wait},
    "horizon": lambda m, before: {"left": 0.5 * m.left},
    "end of the block": lambda m, before: {"left": np.minimum(m.left, 0.01), "until": m.until - 0.01},
    "number": lambda m, before: {"number": m.number + 1},
    "same plans again": lambda m, before: {
        name: getattr(before, name) for name in ("start", "velocity", "turn", "wait", "left", "chain")
    } | {"number": before.number + 1},
    "one chain": lambda m, before: {
        name: getattr(m, name)[:1] for name in ("number", "turn", "chain", "start", "velocity", "wait", "left")
    },
}  # fmt: skip
ARRIVALS = {
    "invented": lambda m, before: {"evidence": invented(m)},
    "skipped": lambda m, before: {"evidence": skipped(m)},
    "none": lambda m, before: {"evidence": ()},
    "of the other site": lambda m, before: {"evidence": (m.evidence[1], m.evidence[0])},
    "earlier": lambda m, before: {"evidence": before.evidence},
}


@pytest.mark.parametrize(
    ("choice", "code"),
    [(choice, "NOT_MY_PLAN") for choice in CHOICES.values()] + [(choice, "NOT_SIGNED") for choice in ARRIVALS.values()],
    ids=[*CHOICES, *ARRIVALS],
)
def test_what_a_coordinator_chooses_is_refused(restarted, stopped, choice, code):
    """The same request is answered by a site that does not make the plans, as sites did before."""
    before, message = (messages.decode(data) for data in stopped[1][-2:])
    changes, agent, other = choice(message, before), restarted(), restarted(enforced=False)
    assert told(agent, forged(agent, message, **changes)) == code
    assert told(other, forged(other, message, **changes)) == "Arrivals"
    assert told(agent, stopped[1][-1]) == "Arrivals"


def test_numbers_of_another_machine_are_answered(restarted, stopped):
    message, agent = messages.decode(stopped[1][-1]), restarted()
    rounding = {name: getattr(message, name) * (1 + 1e-12) for name in ("start", "velocity")}
    assert told(agent, forged(agent, message, **rounding)) == "Arrivals"


def test_arrivals_of_another_run_are_refused(few_rounds, restarted, stopped, tmp_path):
    """The other run has other numbers of the coordinator, and the same keys of the sites."""
    message = messages.decode(stopped[1][-1])
    with connected(few_rounds, tmp_path / "other", sent := []) as connection:
        connection.seed = SEED + 1
        fp.sample(connection, progress=False)
    other = next(m for m in map(messages.decode, sent) if isinstance(m, messages.TurnPlans) and len(m.evidence) == 2)
    agent = restarted()
    assert told(agent, forged(agent, message, evidence=other.evidence)) == "NOT_SIGNED"
    # With the run's id in place of the other's, the signature is no longer valid.
    changed = [messages.encode(dataclasses.replace(messages.decode(x), run=message.run)) for x in other.evidence]
    assert told(agent, forged(agent, message, evidence=tuple(changed))) == "NOT_SIGNED"


def sequence_of(sent, kind):
    return next(k for k, data in enumerate(sent) if isinstance(messages.decode(data), kind))


def test_nobody_chooses_the_seed(few_rounds, stopped, tmp_path):
    """Openings without a hash or with a key, hashes and keys of others, plans before the seeds, another seed."""
    sent = stopped[1]
    agent = agent_of(few_rounds, "north", tmp_path)
    agent.join(messages.encode(messages.Welcome(messages.decode(sent[0]).run, few_rounds.study.digest)))
    at = sequence_of(sent, messages.Open)
    for data in sent[:at]:
        assert told(agent, data) == "Derivatives"

    def changed(data, **changes):
        return messages.encode(dataclasses.replace(messages.decode(data), **changes))

    assert told(agent, changed(sent[at], commitment=bytes(32), turns=np.arange(2))) == "NOT_JOINT"
    assert told(agent, changed(sent[at], turns=np.arange(2))) == "NOT_JOINT"
    assert told(agent, changed(sent[at + 1], sequence=at + 1)) == "NOT_OPEN"
    assert told(agent, sent[at]) == "Opened"
    assert told(agent, changed(sent[at + 2], sequence=at + 2)) == "NOT_JOINT"
    north, south = messages.decode(sent[at + 1]).openings
    for wrong in (
        (changed(north, commitment=bytes(32)), south),
        (north, changed(south, commitment=bytes(32))),
        (north, changed(south, public=messages.decode(north).public)),
        (north, changed(south, certificate=messages.decode(north).certificate)),
        (north,),
        (north, sent[0]),
    ):
        assert told(agent, changed(sent[at + 1], openings=wrong)) == "KEY_NOT_PROVED"
    assert told(agent, sent[at + 1]) == "Revealed"
    assert told(agent, changed(sent[at + 1], sequence=at + 3)) == "ALREADY_REVEALED"
    seeds = messages.decode(sent[at + 2]).evidence
    assert told(agent, changed(sent[at + 2], evidence=(bytes(32), *seeds[1:]))) == "NOT_JOINT"
    assert told(agent, changed(sent[at + 2], evidence=seeds[:-1])) == "NOT_JOINT"
    assert told(agent, sent[at + 2]) == "Arrivals"
    agent.log.close()


def test_every_seed_moves_the_stream(few_rounds):
    def first(seed, site):
        seeds = dict.fromkeys(few_rounds.study.sites, SITE_SEED) | site
        with fp.connect(few_rounds.study, data=few_rounds.data, seed=seed, site_seeds=seeds) as connection:
            return fp.sample(connection, progress=False).settings["seed"]

    assert len({first(SEED, {}), first(SEED, {}), first(SEED + 1, {}), first(SEED, {"south": SITE_SEED + 1})}) == 3


def test_a_policy_may_refuse_contracts_whose_plans_the_coordinator_chooses(tmp_path, caplog):
    folder = Folder(tmp_path, EFFECTS)
    assert not folder.study.sites_plan and parse_study(CONTRACT.encode()).sites_plan
    path = folder.path / "policy.toml"
    policy = read_policy(path)
    options = {"store": tmp_path / "store", "seed": SITE_SEED}
    open_agent(folder.study, "north", folder.data["north"], policy=policy, **options).log.close()
    assert "the coordinator chooses the plans of this contract" in caplog.text
    path.write_text(path.read_text() + "coordinator_may_choose = false\n")
    with pytest.raises(Refused, match="POLICY_CHOICE"):
        open_agent(folder.study, "north", folder.data["north"], policy=read_policy(path), **options)
