"""A site's audit log: what it holds, that it cannot fill the disk, and its replay."""

import errno
import os
import re
import resource
import subprocess
import sys

import jax
import numpy as np
import pytest
from tests.federation.requests import CHAINS, DIM, RUN, ask, joined, opening, plans
from tests.federation.studies import ZIGZAG, Folder

import fedpdmc
from fedpdmc.errors import InputError, Refused
from fedpdmc.federation import messages
from fedpdmc.federation.site_agent import audit_log
from fedpdmc.federation.site_agent.agent import MOST_REFUSALS
from fedpdmc.federation.site_agent.audit_log import AuditLog, Kind, read_log
from fedpdmc.federation.site_agent.audit_replay import replay, show

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
    data, path = request_(), agent.log.path
    answer, size = agent.answer(plans(3)), path.stat().st_size
    for _ in range(3):
        assert ask(agent, data).code == code
    assert len(data) > 500_000 and path.stat().st_size - size < 3 * 4096
    assert messages.decode(answer).code == "OUT_OF_ORDER"
    note = list(agent.log.entries())[-2].note
    assert note["sha256"] == messages.digest(data).hex() and note["bytes"] == len(data)
    assert note["code"] == code and note["kind"] == kind and bytes.fromhex(note["begins"]) == data[:1024]
    line = list(show(agent.log.folder))[-3]
    assert "refused request" in line and note["sha256"] in line and len(line) < 300
    arrivals = agent.answer(plans())
    store = agent.log.folder
    agent.log.close()
    again = zigzag.agent("north", store)
    assert again.answer(plans()) == arrivals and again.refusals == 0
    found = replay(zigzag.study, "north", zigzag.data["north"], store=store)
    assert (found.same, found.different) == (3, []) and list(found.unchecked.values()) == [3]
    agent.log = again.log


def test_a_refusal_of_another_long_request_than_the_log_tells_of_is_found(zigzag, agent):
    agent.answer(b"x" * 5000)
    other = messages.Refusal(RUN, 0, messages.digest(b"y" * 5000), "MALFORMED", 0)
    agent.log.note("refused request", sha256=messages.digest(b"x" * 5000).hex())
    agent.log.append(Kind.REFUSAL, messages.encode(other))
    found = replay(zigzag.study, "north", zigzag.data["north"], store=agent.log.folder)
    assert len(found.different) == 1 and list(found.unchecked.values()) == [1]


def test_a_coordinator_that_is_refused_again_and_again_does_not_fill_the_disk(zigzag, agent):
    """The site stops and writes nothing more, started again too; a coordinator that was fixed is answered."""
    for _ in range(MOST_REFUSALS - 1):
        agent.answer(plans(3))
    # A new answer shows that it can do what is right: only refusals in a row count.
    assert isinstance(ask(agent, plans()), messages.Arrivals)
    for _ in range(MOST_REFUSALS):
        assert ask(agent, b"x").code == "MALFORMED"
    size, store = agent.log.path.stat().st_size, agent.log.folder
    with pytest.raises(Refused, match=r"TOO_MANY_REFUSALS.*20 times.*MALFORMED.*audit show .*Restart the"):
        agent.answer(b"x")
    agent.log.close()
    for _ in range(2):
        again = zigzag.agent("north", store)
        with pytest.raises(Refused, match="TOO_MANY_REFUSALS"):
            again.answer(bytes(2**20))
        again.log.close()
    assert (store / "audit.log").stat().st_size == size
    found = replay(zigzag.study, "north", zigzag.data["north"], store=store)
    assert (found.same, found.different) == (2 * MOST_REFUSALS + 1, [])
    again = zigzag.agent("north", store)
    assert isinstance(ask(again, plans(3, 1)), messages.Arrivals)
    assert ask(again, b"x").code == "MALFORMED"
    agent.log = again.log


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
    size = agent.log.path.stat().st_size
    for seed in range(3):
        with pytest.raises(Refused, match="TOO_MANY_REFUSALS"):
            tell(3, 0.12, seed)
    assert agent.log.path.stat().st_size == size
    assert isinstance(tell(3, 1e-3, 0), messages.Arrivals)
    agent.log.close()
    found = replay(folder.study, "north", folder.data["north"], store=tmp_path / "store")
    assert (found.same, found.different) == (MOST_REFUSALS + 3, [])


def test_who_asks_the_same_for_ever_does_not_fill_the_disk(agent):
    first = agent.answer(plans())
    size = agent.log.path.stat().st_size
    assert all(agent.answer(plans()) == first for _ in range(100))
    times = [e.note["times"] for e in agent.log.entries() if e.kind is Kind.NOTE and e.note["event"] == "again"]
    assert times == [1, 2, 4, 8, 16, 32, 64] and agent.log.path.stat().st_size - size < 1000


def test_the_log_leaves_room_on_its_disk(agent, monkeypatch):
    """However much a contract lets be asked: what else is on the disk goes on."""
    disk = os.statvfs(agent.log.folder)
    monkeypatch.setattr("fedpdmc.federation.site_agent.audit_log.LEAST_FREE", disk.f_blocks * disk.f_frsize)
    monkeypatch.setattr("fedpdmc.federation.site_agent.audit_log.STRIDE", 0)
    with pytest.raises(OSError, match="not answered.*MiB would be left"):
        ask(agent, plans())
    monkeypatch.undo()
    assert isinstance(ask(agent, plans()), messages.Arrivals)


def test_a_full_disk_stops_the_answer_and_nothing_is_lost(agent):
    size = (agent.log.folder / "audit.log").stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, hard))
    try:
        with pytest.raises(OSError, match="not answered"):
            ask(agent, plans())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert agent.observed_time == 0.0
    assert isinstance(ask(agent, plans()), messages.Arrivals)
    assert len(list(agent.log.entries())) == 6


def test_a_request_is_in_the_log_before_it_is_worked_on(zigzag, agent, monkeypatch):
    """One during which the site ends is there to be looked at, and is answered when it is asked again."""
    undisturbed = joined(zigzag, agent.log.folder.parent / "other")
    expected = [undisturbed.answer(data) for data in (opening(), plans())][1]
    undisturbed.log.close()

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("fedpdmc.federation.site_agent.computation._first_steps", interrupted)
    with pytest.raises(KeyboardInterrupt):
        agent.answer(plans())
    monkeypatch.undo()
    store = agent.log.folder
    agent.log.close()
    last = list(read_log(store))[-1]
    assert last.kind is Kind.REQUEST and last.payload == plans()
    again = zigzag.agent("north", store)
    assert again.answer(plans()) == expected
    again.log.close()
    # Once only: one that breaks the site whenever it is started does not fill the disk.
    assert [entry.kind for entry in read_log(store)][-2:] == [Kind.REQUEST, Kind.ANSWER]
    assert sum(entry.kind is Kind.REQUEST for entry in read_log(store)) == 2
    found = replay(zigzag.study, "north", zigzag.data["north"], store=store)
    assert (found.same, found.different) == (2, [])
    agent.log = AuditLog(store)


def test_a_torn_entry_is_cut_off_and_an_altered_one_is_found(zigzag, agent):
    answer = agent.answer(plans())
    path = agent.log.folder / "audit.log"
    agent.log.close()
    whole = path.read_bytes()
    for lost in (1, 40, len(answer)):
        path.write_bytes(whole[:-lost])
        again = zigzag.agent("north", path.parent)
        assert any(entry.kind is Kind.NOTE and entry.note["event"] == "torn" for entry in again.log.entries())
        assert again.answer(plans()) == answer
        again.log.close()
    altered = bytearray(whole)
    altered[200] ^= 1
    path.write_bytes(bytes(altered))
    with pytest.raises(InputError, match="altered at byte"):
        zigzag.agent("north", path.parent)
    with pytest.raises(InputError, match="altered at byte"):
        list(read_log(path.parent))
    path.write_bytes(whole)
    agent.log = AuditLog(path.parent)


def test_a_log_replays_to_the_same_answers(zigzag, agent):
    for k in range(3):
        agent.answer(plans(k + 2, k, seed=k))
        agent.answer(plans(k + 2, k, seed=k))
    agent.answer(b"garbage")
    found = replay(zigzag.study, "north", zigzag.data["north"], store=agent.log.folder)
    assert (found.same, found.different) == (5, [])
    other = replay(zigzag.study, "north", zigzag.data["south"], store=agent.log.folder)
    assert other.different


def test_the_log_says_with_what_it_was_written_and_a_replay_with_something_else_says_so(zigzag, agent, monkeypatch):
    store = agent.log.folder
    agent.answer(plans())
    agent.log.close()
    first = next(read_log(store)).note
    assert first["event"] == "software" and first["jax"] == jax.__version__ and first["numpy"] == np.__version__
    lines = list(show(store))
    assert f"software fedpdmc={fedpdmc.__version__}" in lines[0]
    assert lines[-1] == f"{len(lines) - 1} entries, seal {agent.log._seal.hex()}"
    found = replay(zigzag.study, "north", zigzag.data["north"], store=store)
    assert (found.same, found.different, found.software) == (2, [], [])
    here = audit_log.software_here()
    monkeypatch.setattr(audit_log, "software_here", lambda: here | {"jax": "99.0"})
    found = replay(zigzag.study, "north", zigzag.data["north"], store=store)
    assert found.same == 2 and found.software == [f"jax {here['jax']} (here 99.0)"]
    # A site that goes on with other software writes that down, once.
    for _ in range(2):
        zigzag.agent("north", store).log.close()
    notes = [entry.note["jax"] for entry in read_log(store) if audit_log.software_of(entry)]
    assert notes == [here["jax"], "99.0"]
    agent.log = AuditLog(store)


def test_a_log_of_another_version_is_named(zigzag, agent, monkeypatch):
    store = agent.log.folder
    agent.log.close()
    # The control: software that reads the log's version goes on with it.
    zigzag.agent("north", store).log.close()
    layouts = {(messages.VERSION + 1, kind): layout for (_, kind), layout in messages.LAYOUTS.items()}
    for name, value in (
        ("READABLE", (messages.VERSION + 1,)),
        ("LAYOUTS", layouts),
        ("VERSION", messages.VERSION + 1),
    ):
        monkeypatch.setattr(messages, name, value)
    with pytest.raises(InputError, match=rf"a log of fedpdmc {re.escape(fedpdmc.__version__)}: wire version"):
        zigzag.agent("north", store)
    with pytest.raises(InputError, match="Replay it with the version that wrote it"):
        replay(zigzag.study, "north", zigzag.data["north"], store=store)
    agent.log = AuditLog(store)


def test_the_rest_of_a_torn_entry_is_not_left_behind_a_shorter_one(tmp_path, monkeypatch):
    """The disk failed to take the entry back as well: it is truncated before the next one is written."""
    log, real = AuditLog(tmp_path), os.ftruncate
    log.note("first")

    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(log, "_index_answer", fail)
    monkeypatch.setattr(os, "ftruncate", fail)
    for _ in range(2):
        with pytest.raises(OSError, match="Input/output"):
            log.append(Kind.ANSWER, b"long" * 100)
    monkeypatch.setattr(os, "ftruncate", real)
    log.note("second")
    log.close()
    assert [entry.note["event"] for entry in read_log(tmp_path)] == ["first", "second"]


@pytest.fixture
def short_files(monkeypatch):
    monkeypatch.setattr(audit_log, "MOST_SEGMENT", 2000)


def written(folder, rounds=40):
    """A log of several files, its answers, and its seals."""
    log = AuditLog(folder)
    for number in range(rounds):
        log.append(Kind.REQUEST, b"request %d " % number * 10)
        log.append(Kind.ANSWER, b"answer %d " % number * 10)
    return log


def test_a_log_goes_on_in_a_new_file_and_is_one_log(tmp_path, short_files):
    log = written(tmp_path)
    closed = audit_log.closed_files(tmp_path)
    assert len(closed) > 3 and all(os.stat(path).st_mode & 0o777 == 0o400 for path in closed)
    assert [log.read_answer(k) for k in range(40)] == [b"answer %d " % k * 10 for k in range(40)]
    # While another process writes, and after it was closed and opened again.
    assert sum(entry.kind is Kind.ANSWER for entry in read_log(tmp_path)) == 40
    head = log.head
    log.close()
    again = AuditLog(tmp_path)
    assert again.head == head and again.answers == 40 and again.read_answer(3) == b"answer 3 " * 10
    again.close()


def test_each_file_of_a_log_is_missed_and_any_change_of_it_found(tmp_path, short_files):
    written(tmp_path).close()
    for path in (*audit_log.closed_files(tmp_path), tmp_path / "audit.log"):
        content = path.read_bytes()
        path.unlink()
        with pytest.raises(InputError, match=f"{path.name}"):
            list(read_log(tmp_path))
        with pytest.raises(InputError, match=f"{path.name} missing"):
            AuditLog(tmp_path)
        for wrong in (content[:-1], content[:60] + b"?" + content[61:], content + b"?" * 80):
            path.write_bytes(wrong)
            # The last file may end in an entry that was cut off.
            if path.name != "audit.log" or wrong[60:61] == b"?":
                with pytest.raises(InputError, match=f"{path.name}, altered"):
                    list(read_log(tmp_path))
        path.write_bytes(content)
    first, second = audit_log.closed_files(tmp_path)[:2]
    one, two = first.read_bytes(), second.read_bytes()
    first.write_bytes(two), second.write_bytes(one)
    with pytest.raises(InputError, match="altered"):
        list(read_log(tmp_path))


CALLS = ("fsync", "open", "pwrite", "link", "replace", "chmod")
CHANGE = """
import errno, os, sys
from fedpdmc.federation.site_agent import audit_log
from fedpdmc.federation.site_agent.audit_log import AuditLog, Kind

def answer(folder, call, how, told):
    log = AuditLog(folder)
    right, begin = getattr(os, call), log._begin_file

    def broken(*args, **options):
        setattr(os, call, right)
        if how == "killed":
            os._exit(9)
        raise OSError(errno.EIO, "the disk fails")

    def begun():
        setattr(os, call, broken)
        begin()
        setattr(os, call, right)

    log._begin_file = begun
    for number in range(log.answers, 60):
        log.append(Kind.ANSWER, b"answer %d " % number * 10)
        print(number, file=told, flush=True)
    log.close()

audit_log.MOST_SEGMENT = 2000
folder, how, *calls = sys.argv[1:]
for call in calls:
    for _ in range(2):
        if os.fork() == 0:
            answer(f"{folder}/{call}", call, how, open(f"{folder}/{call}.told", "a"))
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.wait()[1]) == (9 if how == "killed" else 0)
"""


@pytest.mark.parametrize("how", ["killed", "failing"])
def test_a_kill_or_a_failing_disk_while_a_new_file_is_begun_loses_nothing(tmp_path, how, short_files):
    """Processes that end, or whose disk fails, at each call with which the files are changed; each is started twice."""
    subprocess.run([sys.executable, "-c", CHANGE, tmp_path, how, *CALLS], check=True)
    for call in CALLS:
        log = AuditLog(tmp_path / call)
        told = [int(line) for line in (tmp_path / f"{call}.told").read_text().split()]
        assert told == list(range(len(told))) and len(told) >= (60 if how == "failing" else 10)
        # What was told is there; one that was not told may be.
        assert log.answers in (len(told), len(told) + 1)
        assert [log.read_answer(k) for k in range(log.answers)] == [b"answer %d " % k * 10 for k in range(log.answers)]
        assert sum(entry.kind is Kind.ANSWER for entry in read_log(tmp_path / call)) == log.answers
        log.close()


def test_on_windows_it_is_said_that_a_site_cannot_work_there(tmp_path, monkeypatch):
    monkeypatch.setattr("fedpdmc.validation.sys.platform", "win32")
    with pytest.raises(InputError, match="Windows.*WSL 2"):
        AuditLog(tmp_path)
    with pytest.raises(InputError, match="Windows.*WSL 2"):
        fedpdmc.connect("study.toml", listen="127.0.0.1:0")
