"""A site's agent: what it answers, what it refuses, and what it remembers."""

import dataclasses
import os
import re
import resource

import jax
import numpy as np
import pytest
from tests.federation.studies import FEW_ROUNDS, ZIGZAG, Folder

import fedpdmc
from fedpdmc.errors import InputError, Refused
from fedpdmc.federation import messages
from fedpdmc.federation.site_agent import versions
from fedpdmc.federation.site_agent.agent import MOST_REFUSALS
from fedpdmc.federation.site_agent.audit_log import Journal, Kind, read_log
from fedpdmc.federation.site_agent.audit_replay import replay, show

RUN = b"r" * 16
CHAINS, DIM = 4, 3


@pytest.fixture(scope="module")
def zigzag(tmp_path_factory):
    return Folder(tmp_path_factory.mktemp("zigzag"))


@pytest.fixture(scope="module")
def few_rounds(tmp_path_factory):
    return Folder(tmp_path_factory.mktemp("few"), FEW_ROUNDS)


def joined(folder, store, name="north"):
    agent = folder.agent(name, store)
    agent.join(messages.encode(messages.Welcome(RUN, folder.study.digest)))
    return agent


def opening(sequence=1, **changes):
    empty = (np.zeros((0, 0)), np.zeros(0), np.zeros(0))
    message = messages.Open(RUN, sequence, CHAINS, 1, np.zeros(DIM), np.ones(DIM), 0, *empty)
    return messages.encode(dataclasses.replace(message, **changes))


def plans(sequence=2, number=0, seed=0, **changes):
    rng = np.random.default_rng(seed)
    velocity = np.where(rng.random((CHAINS, 1, DIM)) < 0.5, -1.0, 1.0)
    message = messages.Plans(
        RUN, sequence, np.full(CHAINS, number), rng.normal(size=(CHAINS, DIM)), np.full((CHAINS, 1), 0.5), velocity,
        np.arange(CHAINS),
    )  # fmt: skip
    return messages.encode(dataclasses.replace(message, **changes))


def ask(agent, data):
    return messages.decode(agent.answer(data))


@pytest.fixture
def agent(zigzag, tmp_path):
    agent = joined(zigzag, tmp_path / "store")
    assert isinstance(ask(agent, opening()), messages.Opened)
    yield agent
    agent.journal.close()


def test_a_plan_is_answered_once_and_then_from_the_log(agent):
    first = agent.answer(plans())
    arrivals = messages.decode(first)
    assert isinstance(arrivals, messages.Arrivals) and arrivals.request == messages.digest(plans())
    spent = agent.observed_time
    assert spent == pytest.approx(np.minimum(arrivals.time, 0.5).sum())
    assert agent.answer(plans()) == first
    assert agent.observed_time == spent
    assert ask(agent, plans(seed=1)).code == "SAME_ROUND_OTHER_PLAN"
    assert agent.answer(plans()) == first


def test_the_log_is_the_memory(agent, zigzag):
    answers = [agent.answer(plans(k + 2, k, seed=k)) for k in range(3)]
    store, spent = agent.journal.folder, agent.observed_time
    agent.journal.close()
    again = zigzag.agent("north", store)
    assert again.run == RUN and again.observed_time == spent
    assert [again.answer(plans(k + 2, k, seed=k)) for k in range(3)] == answers
    assert ask(again, plans(2, 0, seed=9)).code == "SAME_ROUND_OTHER_PLAN"
    assert isinstance(ask(again, plans(5, 3)), messages.Arrivals)
    agent.journal = again.journal


REFUSALS = {
    "not finite": (lambda: plans(velocity=np.full((CHAINS, 1, DIM), np.nan)), "MALFORMED"),
    "garbage": (lambda: b"\x80\x04garbage", "MALFORMED"),
    "another run": (lambda: plans(run=b"x" * 16), "OTHER_RUN"),
    "later round first": (lambda: plans(3), "OUT_OF_ORDER"),
    "more rounds": (lambda: plans(0), "OUT_OF_ORDER"),
    "not a request": (lambda: messages.encode(messages.Opened(RUN, 2, bytes(32))), "NOT_A_REQUEST"),
    "other shape": (lambda: plans(start=np.zeros((CHAINS, 2)), velocity=np.ones((CHAINS, 1, 2))), "WRONG_SHAPE"),
    "other speed": (lambda: plans(velocity=np.full((CHAINS, 1, DIM), 2.0)), "NOT_UNIT_SPEED"),
    "longer horizon": (lambda: plans(duration=np.full((CHAINS, 1), 1e3)), "HORIZON_TOO_LONG"),
    "another reference": (lambda: opening(2), "ALREADY_OPEN"),
    "derivatives": (lambda: messages.encode(messages.Derive(RUN, 2, np.zeros(DIM))), "DERIVATIVES_NOT_ALLOWED"),
}


@pytest.mark.parametrize(("request_", "code"), REFUSALS.values(), ids=REFUSALS)
def test_what_is_beyond_the_contract_is_refused_and_logged(agent, request_, code):
    data = request_()
    refusal = ask(agent, data)
    assert isinstance(refusal, messages.Refusal) and refusal.code == code
    last = list(agent.journal.entries())[-2:]
    assert [entry.kind for entry in last] == [Kind.REQUEST, Kind.REFUSAL]
    assert last[0].payload == data
    assert any(code in line for line in show(agent.journal.folder))
    # Refusing changes nothing: the round goes on.
    assert isinstance(ask(agent, plans()), messages.Arrivals)


def test_a_number_is_used_once(agent):
    ask(agent, plans(2, 0))
    assert ask(agent, plans(3, 0, seed=1)).code == "PLAN_NUMBER_USED"
    done = plans(3, 1, duration=np.zeros((CHAINS, 1)))
    assert isinstance(ask(agent, done), messages.Arrivals)
    assert isinstance(ask(agent, plans(4, 1)), messages.Arrivals)


def test_rounds_and_observed_time_end(tmp_path):
    contract = ZIGZAG.replace("rounds = 2000", "rounds = 4").replace("observed_time = 1000.0", "observed_time = 0.5")
    agent = joined(Folder(tmp_path / "study", contract), tmp_path / "store")

    def tell(sequence, length):
        return ask(agent, plans(sequence, sequence - 2, duration=np.full((CHAINS, 1), length)))

    ask(agent, opening())
    assert tell(2, 0.2).code == "HORIZON_TOO_LONG"
    # So short that hardly anything can ring: what is observed is the whole horizon, 0.1 each time.
    first, second = tell(2, 0.025), tell(3, 0.025)
    assert agent.observed_time == pytest.approx(first.time.sum() + second.time.sum()) and agent.observed_time > 0.1
    assert tell(4, 0.12).code == "OBSERVED_TIME_SPENT"
    assert isinstance(tell(4, 1e-3), messages.Arrivals)
    assert tell(5, 1e-3).code == "TOO_MANY_ROUNDS"
    agent.journal.close()


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"chains": 5}, "WRONG_SHAPE"),
        ({"center": np.ones(DIM)}, "NOT_IN_CONTRACT"),
        ({"scale": np.full(DIM, 0.5)}, "NOT_IN_CONTRACT"),
        ({"segments": 10**6}, "NOT_IN_CONTRACT"),
        ({"scale": np.full((DIM, DIM), 1e308)}, "NOT_IN_CONTRACT"),
        ({"order": 2, "precision": np.eye(DIM), "linear": np.ones(DIM), "point": np.ones(DIM)}, "NOT_IN_CONTRACT"),
    ],
)
def test_an_opening_beyond_the_contract_is_refused(zigzag, tmp_path, changes, code):
    agent = joined(zigzag, tmp_path)
    assert ask(agent, opening(**changes)).code == code
    assert ask(agent, plans(1)).code == "NOT_OPEN"
    agent.journal.close()


@pytest.mark.parametrize("scale", [[1.0, 0.0, 1.0], [1.0, 1e-300, 1.0], [0.0, 0.0, 0.0]])
def test_a_reference_without_width_in_some_direction_is_refused(few_rounds, tmp_path, scale):
    agent, own = joined(few_rounds, tmp_path), (np.eye(DIM), np.zeros(DIM), np.zeros(DIM))
    changes = dict(zip(("precision", "linear", "point"), own, strict=True))
    assert ask(agent, opening(scale=np.asarray(scale), order=2, **changes)).code == "SINGULAR_REFERENCE"
    agent.journal.close()


def test_derivatives_are_rounded_then_exact_and_end_with_the_opening(few_rounds, tmp_path):
    agent = joined(few_rounds, tmp_path)
    x = np.array([0.1, -0.2, 0.3])
    with jax.enable_x64(True):
        value, gradient, hessian = agent.site.derivatives(x)
    rough = ask(agent, messages.encode(messages.Derive(RUN, 1, x)))
    off = rough.gradient - gradient
    assert 0 < off @ np.linalg.solve(hessian, off) < 2.0**-11 and 0 < abs(rough.value - value) <= 2.0**-21
    assert 0 < np.abs(rough.hessian / hessian - 1).max() < 1e-3
    found = ask(agent, messages.encode(messages.Derive(RUN, 2, x)))
    assert found.value == value
    np.testing.assert_array_equal(found.gradient, gradient)
    np.testing.assert_array_equal(found.hessian, hessian)
    assert ask(agent, messages.encode(messages.Derive(RUN, 3, x + 0.1))).code == "TOO_MANY_DERIVATIVES"
    assert ask(agent, opening(3)).code == "NOT_IN_CONTRACT"
    control = {"order": 2, "precision": found.hessian, "linear": found.gradient - found.hessian @ x, "point": x}
    for scale in (np.zeros((DIM, DIM)), np.full((DIM, DIM), 1e308)):
        assert ask(agent, opening(3, scale=scale, **control)).code == "SINGULAR_REFERENCE"
    assert isinstance(ask(agent, opening(3, scale=np.eye(DIM), **control)), messages.Opened)
    assert ask(agent, messages.encode(messages.Derive(RUN, 4, x))).code == "ALREADY_OPEN"
    agent.journal.close()


def test_another_contract_run_or_site_is_refused_at_the_door(zigzag, few_rounds, tmp_path):
    agent = joined(zigzag, tmp_path)
    for run, study, code in ((RUN, few_rounds.study, "OTHER_CONTRACT"), (b"x" * 16, zigzag.study, "OTHER_RUN")):
        with pytest.raises(Refused, match=code):
            agent.join(messages.encode(messages.Welcome(run, study.digest)))
    with pytest.raises(InputError, match="in use"):
        zigzag.agent("north", tmp_path)
    agent.journal.close()
    with pytest.raises(InputError, match="another contract"):
        few_rounds.agent("north", tmp_path)
    with pytest.raises(InputError, match="log of site 'north'"):
        zigzag.agent("south", tmp_path)
    with pytest.raises(InputError, match="seed"):
        zigzag.agent("north", tmp_path, seed=6)


LONG = {
    "no message": (lambda: b"x" * 2**20, "MALFORMED", "unknown"),
    "another run": (lambda: plans(run=b"x" * 16, **wide()), "OTHER_RUN", "Plans"),
    "other shape": (lambda: plans(**wide()), "WRONG_SHAPE", "Plans"),
    "more rounds": (
        lambda: messages.encode(messages.Agree(RUN, 2, (b"x" * 2**16,) * 9)),
        "DERIVATIVES_NOT_ALLOWED",
        "Agree",
    ),
}


def wide(segments=2**13):
    return {"duration": np.zeros((CHAINS, segments)), "velocity": np.ones((CHAINS, segments, DIM))}


@pytest.mark.parametrize(("request_", "code", "kind"), LONG.values(), ids=LONG)
def test_of_a_long_request_that_is_refused_the_log_has_what_it_was(zigzag, agent, request_, code, kind):
    """Its hash and its beginning; the log stays whole, is the site's memory still, and replays."""
    data, path = request_(), agent.journal.path
    answer, size = agent.answer(plans(3)), path.stat().st_size
    for _ in range(3):
        assert ask(agent, data).code == code
    assert len(data) > 500_000 and path.stat().st_size - size < 3 * 4096
    assert messages.decode(answer).code == "OUT_OF_ORDER"
    note = list(agent.journal.entries())[-2].note
    assert note["sha256"] == messages.digest(data).hex() and note["bytes"] == len(data)
    assert note["code"] == code and note["kind"] == kind and bytes.fromhex(note["begins"]) == data[:1024]
    line = list(show(agent.journal.folder))[-3]
    assert "refused request" in line and note["sha256"] in line and len(line) < 300
    arrivals = agent.answer(plans())
    store = agent.journal.folder
    agent.journal.close()
    again = zigzag.agent("north", store)
    assert again.answer(plans()) == arrivals and again.refusals == 0
    found = replay(zigzag.study, "north", zigzag.data["north"], store=store)
    assert (found.same, found.different) == (3, []) and list(found.unchecked.values()) == [3]
    agent.journal = again.journal


def test_a_refusal_of_another_long_request_than_the_log_tells_of_is_found(zigzag, agent):
    agent.answer(b"x" * 5000)
    other = messages.Refusal(RUN, 0, messages.digest(b"y" * 5000), "MALFORMED", 0)
    agent.journal.note("refused request", sha256=messages.digest(b"x" * 5000).hex())
    agent.journal.append(Kind.REFUSAL, messages.encode(other))
    found = replay(zigzag.study, "north", zigzag.data["north"], store=agent.journal.folder)
    assert len(found.different) == 1 and list(found.unchecked.values()) == [1]


def test_a_coordinator_that_is_refused_again_and_again_does_not_fill_the_disk(zigzag, agent):
    """The site stops and writes nothing more, started again too; a coordinator that was mended is answered."""
    for _ in range(MOST_REFUSALS - 1):
        agent.answer(plans(3))
    # A new answer shows that it can do what is right: only refusals in a row count.
    assert isinstance(ask(agent, plans()), messages.Arrivals)
    for _ in range(MOST_REFUSALS):
        assert ask(agent, b"x").code == "MALFORMED"
    size, store = agent.journal.path.stat().st_size, agent.journal.folder
    with pytest.raises(Refused, match=r"TOO_MANY_REFUSALS.*20 times.*MALFORMED.*audit show .*start the site again"):
        agent.answer(b"x")
    agent.journal.close()
    for _ in range(2):
        again = zigzag.agent("north", store)
        with pytest.raises(Refused, match="TOO_MANY_REFUSALS"):
            again.answer(bytes(2**20))
        again.journal.close()
    assert (store / "audit.log").stat().st_size == size
    found = replay(zigzag.study, "north", zigzag.data["north"], store=store)
    assert (found.same, found.different) == (2 * MOST_REFUSALS + 1, [])
    again = zigzag.agent("north", store)
    assert isinstance(ask(again, plans(3, 1)), messages.Arrivals)
    assert ask(again, b"x").code == "MALFORMED"
    agent.journal = again.journal


def test_nor_with_requests_that_are_refused_when_they_have_been_worked_on(tmp_path):
    """They are in the log whole, until there are too many of them."""
    contract = ZIGZAG.replace("observed_time = 1000.0", "observed_time = 0.5")
    folder = Folder(tmp_path / "study", contract)
    agent = joined(folder, tmp_path / "store")

    def tell(sequence, length, seed):
        return ask(agent, plans(sequence, sequence - 2, seed, duration=np.full((CHAINS, 1), length)))

    ask(agent, opening())
    assert isinstance(tell(2, 0.1, 0), messages.Arrivals) and agent.observed_time > 0.1
    for seed in range(MOST_REFUSALS):
        assert tell(3, 0.12, seed).code == "OBSERVED_TIME_SPENT"
    size = agent.journal.path.stat().st_size
    for seed in range(3):
        with pytest.raises(Refused, match="TOO_MANY_REFUSALS"):
            tell(3, 0.12, seed)
    assert agent.journal.path.stat().st_size == size
    assert isinstance(tell(3, 1e-3, 0), messages.Arrivals)
    agent.journal.close()
    found = replay(folder.study, "north", folder.data["north"], store=tmp_path / "store")
    assert (found.same, found.different) == (MOST_REFUSALS + 3, [])


def test_who_asks_the_same_for_ever_does_not_fill_the_disk(agent):
    first = agent.answer(plans())
    size = agent.journal.path.stat().st_size
    assert all(agent.answer(plans()) == first for _ in range(100))
    times = [e.note["times"] for e in agent.journal.entries() if e.kind is Kind.NOTE and e.note["event"] == "again"]
    assert times == [1, 2, 4, 8, 16, 32, 64] and agent.journal.path.stat().st_size - size < 1000


def test_the_log_leaves_room_on_its_disk(agent, monkeypatch):
    """However much a contract lets be asked: what else is on the disk goes on."""
    disk = os.statvfs(agent.journal.folder)
    monkeypatch.setattr("fedpdmc.federation.site_agent.audit_log.LEAST_FREE", disk.f_blocks * disk.f_frsize)
    monkeypatch.setattr("fedpdmc.federation.site_agent.audit_log.STRIDE", 0)
    assert ask(agent, plans()).code == "STORAGE"
    monkeypatch.undo()
    assert isinstance(ask(agent, plans()), messages.Arrivals)


def test_a_full_disk_stops_the_answer_and_nothing_is_lost(agent):
    size = (agent.journal.folder / "audit.log").stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, hard))
    try:
        assert ask(agent, plans()).code == "STORAGE"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert agent.observed_time == 0.0
    assert isinstance(ask(agent, plans()), messages.Arrivals)
    assert len(list(agent.journal.entries())) == 6


def test_a_request_is_in_the_log_before_it_is_worked_on(zigzag, agent, monkeypatch):
    """One that breaks the site is there to be looked at, and is answered when it is asked again."""
    undisturbed = joined(zigzag, agent.journal.folder.parent / "other")
    expected = [undisturbed.answer(data) for data in (opening(), plans())][1]
    undisturbed.journal.close()
    monkeypatch.setattr("fedpdmc.federation.site_agent.walks._answer", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        agent.answer(plans())
    monkeypatch.undo()
    store = agent.journal.folder
    agent.journal.close()
    last = list(read_log(store))[-1]
    assert last.kind is Kind.REQUEST and last.payload == plans()
    again = zigzag.agent("north", store)
    assert again.answer(plans()) == expected
    again.journal.close()
    # Once only: one that breaks the site whenever it is started does not fill the disk.
    assert [entry.kind for entry in read_log(store)][-2:] == [Kind.REQUEST, Kind.ANSWER]
    assert sum(entry.kind is Kind.REQUEST for entry in read_log(store)) == 2
    found = replay(zigzag.study, "north", zigzag.data["north"], store=store)
    assert (found.same, found.different) == (2, [])
    agent.journal = Journal(store)


def test_a_torn_entry_is_cut_off_and_an_altered_one_is_found(zigzag, agent):
    answer = agent.answer(plans())
    path = agent.journal.folder / "audit.log"
    agent.journal.close()
    whole = path.read_bytes()
    for lost in (1, 40, len(answer)):
        path.write_bytes(whole[:-lost])
        again = zigzag.agent("north", path.parent)
        assert any(entry.kind is Kind.NOTE and entry.note["event"] == "torn" for entry in again.journal.entries())
        assert again.answer(plans()) == answer
        again.journal.close()
    altered = bytearray(whole)
    altered[200] ^= 1
    path.write_bytes(bytes(altered))
    with pytest.raises(InputError, match="altered at byte"):
        zigzag.agent("north", path.parent)
    with pytest.raises(InputError, match="altered at byte"):
        list(read_log(path.parent))
    path.write_bytes(whole)
    agent.journal = Journal(path.parent)


def test_a_log_replays_to_the_same_answers(zigzag, agent):
    for k in range(3):
        agent.answer(plans(k + 2, k, seed=k))
        agent.answer(plans(k + 2, k, seed=k))
    agent.answer(b"garbage")
    found = replay(zigzag.study, "north", zigzag.data["north"], store=agent.journal.folder)
    assert (found.same, found.different) == (5, [])
    other = replay(zigzag.study, "north", zigzag.data["south"], store=agent.journal.folder)
    assert other.different


def test_the_log_says_with_what_it_was_written_and_a_replay_with_something_else_says_so(zigzag, agent, monkeypatch):
    store = agent.journal.folder
    agent.answer(plans())
    agent.journal.close()
    first = next(read_log(store)).note
    assert first["event"] == "software" and first["jax"] == jax.__version__ and first["numpy"] == np.__version__
    lines = list(show(store))
    assert f"software fedpdmc={fedpdmc.__version__}" in lines[0]
    assert lines[-1] == f"{len(lines) - 1} entries, seal {agent.journal._seal.hex()}"
    found = replay(zigzag.study, "north", zigzag.data["north"], store=store)
    assert (found.same, found.different, found.software) == (2, [], [])
    here = versions.present()
    monkeypatch.setattr(versions, "present", lambda: here | {"jax": "99.0"})
    found = replay(zigzag.study, "north", zigzag.data["north"], store=store)
    assert found.same == 2 and found.software == [f"jax {here['jax']} (here 99.0)"]
    # A site that goes on with other software writes that down, once.
    for _ in range(2):
        zigzag.agent("north", store).journal.close()
    notes = [entry.note["jax"] for entry in read_log(store) if versions.written(entry)]
    assert notes == [here["jax"], "99.0"]
    agent.journal = Journal(store)


def test_a_log_of_another_version_is_named(zigzag, agent, monkeypatch):
    store = agent.journal.folder
    agent.journal.close()
    monkeypatch.setattr(messages, "VERSION", messages.VERSION + 1)
    with pytest.raises(InputError, match=rf"a log of fedpdmc {re.escape(fedpdmc.__version__)}: version"):
        zigzag.agent("north", store)
    with pytest.raises(InputError, match="Replay it with the version that wrote it"):
        replay(zigzag.study, "north", zigzag.data["north"], store=store)
    agent.journal = Journal(store)


def test_the_secret_seed_is_the_sites_alone(zigzag, tmp_path):
    agent = zigzag.agent("north", tmp_path / "a", seed=None)
    kept = (tmp_path / "a" / "seed").read_text()
    assert os.stat(tmp_path / "a" / "seed").st_mode & 0o077 == 0
    agent.journal.close()
    again = zigzag.agent("north", tmp_path / "a", seed=None)
    assert str(again.site.seed) == kept
    other = zigzag.agent("north", tmp_path / "b", seed=None)
    assert other.site.seed != again.site.seed
    for one in (again, other):
        one.journal.close()


@pytest.mark.parametrize("name", ["audit.log", "audit.index", "seed", "anything"])
def test_a_store_with_links_is_refused(zigzag, tmp_path, name):
    """A log that is a link could be anyone's file; a seed that is one, anyone's seed."""
    joined(zigzag, tmp_path / "store").journal.close()
    path = tmp_path / "store" / name
    if path.exists():
        path.rename(tmp_path / name)
    path.symlink_to(tmp_path / name)
    with pytest.raises(InputError, match=f"{name}, a symbolic link"):
        zigzag.agent("north", tmp_path / "store")


def test_a_plan_that_would_take_for_ever_is_refused_by_name(tmp_path):
    """Far out on a rotation cells are so short that no number of them ends a plan: the watchdog does."""
    contract = FEW_ROUNDS.replace("[dynamics]", '[dynamics]\nkind = "FactorisedBoomerang"\ncontrol = "none"')
    agent = joined(Folder(tmp_path, contract), tmp_path / "store")
    assert isinstance(ask(agent, opening()), messages.Opened)
    agent.most_seconds = 1.0
    far = plans(start=np.full((CHAINS, DIM), 1e11), duration=np.full((CHAINS, 1), 30.0))
    refusal = ask(agent, far)
    assert refusal.code == "TOO_MUCH_WORK"
    assert ask(agent, plans(start=np.full((CHAINS, DIM), 1e200))).code == "PLAN_TOO_FAR"
    # It goes on with one that ends.
    assert isinstance(ask(agent, plans()), messages.Arrivals)
    agent.journal.close()
