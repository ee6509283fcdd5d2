"""A coordinator that cannot choose: sites make the plans themselves and refuse any other."""

import dataclasses
import shutil

import numpy as np
import pytest
from tests.federation.studies import FEW_ROUNDS, MODEL_FEW_ROUNDS, SEED, SITE_SEED, SUMMED, ZIGZAG, Folder, same_bits
from tests.study.contracts import CONTRACT

import fedpdmc as fp
from fedpdmc._jax.precision import double_precision
from fedpdmc.certificates import make_keys, read_credentials
from fedpdmc.errors import BadAnswer, Refused, RequestRefused
from fedpdmc.federation import joint_plans, messages
from fedpdmc.federation.joint_plans import _compare, fingerprint, whole
from fedpdmc.federation.session import join
from fedpdmc.federation.site_agent import start
from fedpdmc.federation.site_agent.audit_log import site_seed
from fedpdmc.federation.site_agent.audit_replay import replay
from fedpdmc.federation.site_agent.start import open_agent
from fedpdmc.federation.transport import DirectTransport
from fedpdmc.study import read_policy

KINDS = {
    "turns": FEW_ROUNDS,
    "summed": SUMMED,
    "flips": ZIGZAG,
    "lines": CONTRACT.replace("[dynamics]", '[dynamics]\nkind = "BouncyParticle"'),
    "file": MODEL_FEW_ROUNDS,
    "refreshed": CONTRACT.replace("[dynamics]", "[dynamics]\nrefresh = 1.2"),
}


def agent_of(folder, name, store, enforced=True, seed=SITE_SEED):
    """A site with a policy and a certificate, as on a network."""
    agent = open_agent(
        folder.study, name, folder.data[name], store=store / name, policy=read_policy(folder.path / "policy.toml"),
        seed=seed, credentials=read_credentials(folder.keys(name)),
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


WITHOUT_REFERENCE = {
    "flips": ZIGZAG,
    "lines": KINDS["lines"]
    .replace('derivatives = "own"', 'derivatives = "none"')
    .replace("scale = 1.5", "scale = 1000.0"),
}


@pytest.mark.parametrize("kind", WITHOUT_REFERENCE)
def test_so_it_is_where_no_reference_limits_plans(kind, tmp_path):
    """Starts and velocities of its choice, far out under a wide prior. Sites that do not make the plans answer them."""
    folder = Folder(tmp_path / "study", WITHOUT_REFERENCE[kind])
    with pytest.raises(InterruptedError), connected(folder, tmp_path, sent := [], stop=3) as connection:
        fp.sample(connection, progress=False)
    message = messages.decode(sent[-1])
    assert isinstance(message, messages.Plans)
    far = np.array([3.0, 0.0, -2.0]) if kind == "flips" else np.array([300.0, 0.0, -100.0])
    chosen = [{"start": message.start + far}, {"start": message.start + 1e-6}, {"velocity": -message.velocity}]
    for enforced, codes in ((True, ["NOT_MY_PLAN"] * 3), (False, ["Arrivals"] * 3)):
        found = []
        for changes in chosen:
            shutil.copytree(tmp_path / "north", store := tmp_path / f"{enforced} {len(found)}" / "north")
            agent = agent_of(folder, "north", store.parent, enforced)
            found.append(told(agent, messages.encode(dataclasses.replace(message, **changes))))
            agent.log.close()
        assert found == codes


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


@pytest.fixture
def asked(few_rounds, tmp_path):
    """Answers of north to requests, from a store, by a process that ends then; its seed is its own."""

    def ask(store, *requests):
        site_seed(store / "north", SITE_SEED)
        agent = agent_of(few_rounds, "north", store, seed=None)
        try:
            agent.join(messages.encode(messages.Welcome(messages.decode(requests[0]).run, few_rounds.study.digest)))
            return [messages.decode(agent.answer(data)) for data in requests]
        finally:
            agent.log.close()

    return ask


@pytest.mark.parametrize("fresh", [True, False], ids=["fresh", "as before"])
def test_a_site_restored_from_before_its_opening_announces_another_seed(
    few_rounds, stopped, asked, tmp_path, monkeypatch, fresh
):
    """As before it was the same: who had seen it revealed could choose the coordinator's own, and with it the stream."""
    if not fresh:
        monkeypatch.setattr(start, "opening_secret", lambda folder, new, asked: b"")
    sent, revealed = stopped[1], []
    at = sequence_of(sent, messages.Open)
    asked(tmp_path / "backup", *sent[:at])
    for place in range(2):
        shutil.copytree(tmp_path / "backup", store := tmp_path / str(place))
        seed = bytes([place]) * 32
        commitment = joint_plans._hash("commitment", seed)
        opening = messages.encode(dataclasses.replace(messages.decode(sent[at]), commitment=commitment))
        (first,), (again,) = asked(store, opening), asked(store, opening)
        # Killed before the answer was in the log: the same opening has the same answer.
        shutil.copytree(tmp_path / "backup", killed := tmp_path / f"killed {place}")
        if fresh:
            shutil.copy(store / "north" / "opening.key", killed / "north" / "opening.key")
        (killed_once,) = asked(killed, opening)
        assert first.commitment == again.commitment == killed_once.commitment != messages.NOTHING_ASKED
        south = messages.decode(sent[at + 1]).openings[1]
        openings = messages.decode(sent[at + 1])
        reveal = messages.encode(dataclasses.replace(openings, openings=(messages.encode(first), south)))
        revealed += [one.seed for one in asked(store, reveal)]
        assert joint_plans._hash("commitment", revealed[-1]) == first.commitment
        found = replay(few_rounds.study, "north", few_rounds.data["north"], store=store / "north")
        assert not found.different and found.same == at + 2
    assert (revealed[0] != revealed[1]) is fresh


def test_a_site_that_lost_the_seed_of_its_opening_does_not_reveal_another(stopped, asked, tmp_path):
    sent = stopped[1]
    at = sequence_of(sent, messages.Open)
    (*_, first) = asked(tmp_path, *sent[: at + 1])
    (tmp_path / "north" / "opening.key").unlink()
    openings = messages.decode(sent[at + 1])
    reveal = dataclasses.replace(openings, openings=(messages.encode(first), openings.openings[1]))
    assert asked(tmp_path, messages.encode(reveal))[0].code == "NOT_JOINT"


def test_every_seed_moves_the_stream(few_rounds):
    def first(seed, site):
        seeds = dict.fromkeys(few_rounds.study.sites, SITE_SEED) | site
        with fp.connect(few_rounds.study, data=few_rounds.data, seed=seed, site_seeds=seeds) as connection:
            return fp.sample(connection, progress=False).settings["seed"]

    assert len({first(SEED, {}), first(SEED, {}), first(SEED + 1, {}), first(SEED, {"south": SITE_SEED + 1})}) == 3


LINEAR = ZIGZAG.replace('"none"', '"own"').replace(
    "[dynamics]", '[dynamics]\nreference = "laplace"\ncontrol = "linear"'
)


def test_a_site_refuses_a_contract_whose_plans_the_coordinator_chooses_unless_its_policy_allows_it(tmp_path, caplog):
    """Allowed, starts and velocities of the coordinator's choice are answered."""
    folder = Folder(tmp_path / "study", LINEAR)
    path, options = folder.path / "policy.toml", {"store": tmp_path / "refused", "seed": SITE_SEED}
    with pytest.raises(Refused, match="POLICY_CHOICE.*control = .linear.*where your records are asked") as refused:
        open_agent(folder.study, "north", folder.data["north"], policy=read_policy(path), **options)
    assert "or with [privacy]; or" in str(refused.value) and "coordinator_may_choose = true" in str(refused.value)
    path.write_text(path.read_text() + "coordinator_may_choose = true\n")
    agents = [
        open_agent(
            folder.study, name, folder.data[name], store=tmp_path / name, policy=read_policy(path), seed=SITE_SEED
        )
        for name in folder.study.sites
    ]
    assert "the coordinator chooses the plans of this contract" in caplog.text

    def transport(study, run, seed):
        for agent in agents:
            agent.join(messages.encode(messages.Welcome(run, study.digest)))
        return DirectTransport(agents)

    with join(folder.study, transport, store=None, seed=SEED) as connection:
        ask, chosen = connection.transport.ask, []

        def meddled(requests):
            for agent, request in zip(agents, requests, strict=True):
                if isinstance(message := messages.decode(request.data), messages.Plans):
                    other = {"start": message.start + 0.1, "velocity": -message.velocity}
                    chosen.append(told(agent, messages.encode(dataclasses.replace(message, **other))))
            if chosen:
                raise InterruptedError
            return ask(requests)

        connection.transport.ask = meddled
        with pytest.raises(InterruptedError):
            fp.sample(connection, progress=False)
    assert chosen == ["Arrivals"] * 2


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("kind", ["turns", "summed"])
def test_a_site_whose_key_its_certificate_has_not_signed_is_named(kind, checked, tmp_path):
    """If the coordinator does not look, honest sites refuse, and the first of them is named."""
    make_keys(tmp_path / "foreign", ["south"])
    folder, false = Folder(tmp_path / "study", KINDS[kind]), read_credentials(tmp_path / "foreign" / "sites" / "south")
    agents = {name: folder.agent(name, tmp_path / name) for name in folder.study.sites}
    if kind == "summed":
        agents["south"].computation.party.credentials = false
    else:
        agents["south"].computation.own.credentials = false
    error, words = (BadAnswer, "'south': a key that") if checked else (Refused, "KEY_NOT_PROVED")
    with folder.listening() as connection:
        ask = connection.federation._ask_opening
        if not checked:
            connection.federation._ask_opening = lambda requests, kind, said=None: ask(requests, kind)
        with folder.sites(connection, agents), pytest.raises(error, match=words):
            fp.sample(connection, progress=False)
    assert (agents["north"].refusals > 0) != checked


def test_plans_without_segments_do_not_stop_a_site(few_rounds, stopped, restarted):
    """Nor do numbers that are not finite pass as equal to those of a request, which are."""
    message, agent = messages.decode(stopped[1][-1]), restarted()
    chains, dim = message.start.shape
    rest = message.time, message.until, message.evidence
    none = messages.Plans(
        message.run, message.sequence, message.number.astype(int), message.start, np.zeros((chains, 0)),
        np.zeros((chains, 0, dim)), message.chain.astype(int), *rest,
    )  # fmt: skip
    assert told(agent, messages.encode(none)) == "WRONG_SHAPE"
    assert told(agent, stopped[1][-1]) == "Arrivals"
    for mine, other in ((np.nan, 0.0), (np.inf, 0.0), (1.0, 1.1)):
        with pytest.raises(RequestRefused):
            _compare(np.arange(1), (np.full((1, 1), mine), np.full((1, 1), other)))


@pytest.mark.parametrize("resumed", [False, True])
def test_a_site_that_signs_others_arrivals_than_it_sends_is_named(few_rounds, tmp_path, resumed):
    """Another site would refuse them, and would be named in its place."""
    folder, store = few_rounds, tmp_path / "run"

    def lying(connection, after):
        ask, left = connection.transport.ask, iter(range(after))

        def changed(requests):
            answers = ask(requests)
            south = messages.decode(answers[1])
            if not isinstance(south, messages.Arrivals) or next(left, None) is not None:
                return answers
            if resumed and connection.saved is None and not connection.lies:
                raise RuntimeError("pulled the plug")
            return [answers[0], messages.encode(dataclasses.replace(south, signature=bytes(64)))]

        connection.transport.ask = changed

    with folder.connected(store) as connection:
        connection.lies = not resumed
        lying(connection, 4)
        with pytest.raises(RuntimeError if resumed else BadAnswer, match="plug" if resumed else "south.*not signed"):
            fp.sample(connection, progress=False)
    if resumed:
        with folder.connected(store) as connection:
            connection.lies = True
            lying(connection, 0)
            with pytest.raises(BadAnswer, match="south.*not signed"):
                fp.sample(connection, progress=False)
