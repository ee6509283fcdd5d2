import os
import shutil
import sqlite3
import subprocess
import sys
import threading
import time

import pytest

from fedpdmc.errors import BudgetSpent, InputError, LedgerError, PlanRefused
from fedpdmc.privacy.ledger import Ledger
from fedpdmc.privacy.ledger_entries import Account, Reply, Request, read
from fedpdmc.privacy.ledger_identity import adopt_ledger, create_ledger

ACCOUNT = Account("patients", 1.0, 1e-6, "replace", 20.0, 1.0)


def request(number, plan=b"p" * 32, study="s", run="r"):
    return Request("patients", study, run, "round", number, plan)


def reply(cost=0.1):
    return lambda key: Reply(b"arrival " + key[:4], 2.0, cost)


@pytest.fixture
def ledger(tmp_path):
    found = Ledger.open(create_ledger(tmp_path / "ledger.db"))
    found.account(ACCOUNT)
    yield found
    found.close()


def reopened(ledger):
    ledger.close()
    again = Ledger.open(ledger.path)
    again.account(ACCOUNT)
    return again


def test_a_reply_is_charged_and_stored(ledger):
    content = ledger.answer(request(0), 0.1, reply())
    assert ledger.spent("patients") == pytest.approx(0.1)
    assert ledger.observed("patients", "s", "r") == 2.0
    again = reopened(ledger)
    assert again.spent("patients") == pytest.approx(0.1)
    # The same plan again: the same arrival, made by nobody, and no charge.
    assert again.answer(request(0), 0.1, None) == content
    assert again.spent("patients") == pytest.approx(0.1)
    assert [e.kind for e in read(ledger.path)] == ["account", "round reserved", "round"]


def test_the_same_round_with_another_plan_is_refused(ledger):
    ledger.answer(request(0), 0.1, reply())
    with pytest.raises(PlanRefused, match="OTHER_PLAN"):
        ledger.answer(request(0, b"q" * 32), 0.1, reply())
    assert ledger.spent("patients") == pytest.approx(0.1)
    # Another run, or another study, has rounds of its own.
    ledger.answer(request(0, b"q" * 32, run="other"), 0.1, reply())
    ledger.answer(request(0, b"q" * 32, study="other"), 0.1, reply())
    assert ledger.spent("patients") == pytest.approx(0.3)


def test_what_is_made_again_after_a_crash_is_the_same(ledger):
    seen = []

    def crash(key):
        seen.append(key)
        raise RuntimeError("power cut")

    with pytest.raises(RuntimeError):
        ledger.answer(request(0), 0.1, crash)
    # What was begun is charged, until the same is asked again.
    assert ledger.spent("patients") == pytest.approx(0.1)
    again = reopened(ledger)
    assert again.spent("patients") == pytest.approx(0.1)
    again.answer(request(0), 0.1, lambda key: seen.append(key) or Reply(b"", 0.0, 0.1))
    assert again.spent("patients") == pytest.approx(0.1)
    again.answer(request(1), 0.1, lambda key: seen.append(key) or Reply(b"", 0.0, 0.1))
    assert seen[0] == seen[1] != seen[2] and len(seen[0]) == 32


def test_an_interrupt_leaves_it_usable(ledger):
    def interrupted(key):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ledger.answer(request(0), 0.1, interrupted)
    ledger.answer(request(0), 0.1, reply())
    assert ledger.spent("patients") == pytest.approx(0.1)


def test_a_spent_budget_refuses_across_restarts_and_studies(ledger):
    for number in range(9):
        ledger.answer(request(number), 0.11, reply(0.11))
    with pytest.raises(BudgetSpent, match="all studies"):
        ledger.answer(request(99), 0.11, reply())
    again = reopened(ledger)
    with pytest.raises(BudgetSpent, match="all studies"):
        again.answer(request(99, study="new"), 0.11, reply())
    # Something smaller still fits; what was answered is still told.
    again.answer(request(99), 0.005, reply(0.005))
    assert again.answer(request(0), 0.11, None).startswith(b"arrival")
    assert again.spent("patients") <= ACCOUNT.limit


def test_a_reply_may_cost_less_than_its_plan_but_not_more(ledger):
    ledger.answer(request(0), 0.5, reply(0.2))
    assert ledger.remaining("patients") == pytest.approx(0.8)
    with pytest.raises(LedgerError, match="at most"):
        ledger.answer(request(1), 0.1, reply(0.2))


def test_the_terms_of_an_account_stay(ledger):
    assert ledger.account(ACCOUNT) == ACCOUNT
    with pytest.raises(InputError, match="keeps these terms"):
        ledger.account(ACCOUNT._replace(epsilon=2.0))
    # The order was fixed when it was opened, whatever another version would choose.
    assert ledger.account(ACCOUNT._replace(alpha=3.0, limit=9.0)) == ACCOUNT
    ledger.account(ACCOUNT._replace(dataset="others", epsilon=2.0))
    assert ledger.remaining("others") == 1.0


def test_the_same_records_under_another_name_are_refused(ledger):
    ledger.account(ACCOUNT._replace(dataset="copy"))
    ledger.begin("patients", "s", "r", b"records", "{}")
    ledger.begin("patients", "s", "r", b"records", "{}")
    with pytest.raises(LedgerError, match="one data set has one"):
        ledger.begin("copy", "s", "r", b"records", "{}")


def test_one_process_has_one_ledger(ledger):
    assert Ledger.open(str(ledger.path)) is ledger
    failed = []

    def many(start):
        for number in range(start, start + 5):
            try:
                ledger.answer(request(number), 0.01, reply(0.01))
            except Exception as error:
                failed.append(error)

    threads = [threading.Thread(target=many, args=(10 * k,)) for k in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed and ledger.spent("patients") == pytest.approx(0.15)


SECOND = """
import sys
from fedpdmc.errors import LedgerError
from fedpdmc.privacy.ledger_entries import read
from fedpdmc.privacy.ledger import Ledger
try:
    Ledger.open(sys.argv[1])
except LedgerError as error:
    print("refused:", error)
print("entries", len(read(sys.argv[1])), "jax" in sys.modules, "numpy" in sys.modules)
"""


def in_process(script, *arguments, **options):
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)], capture_output=True, text=True, **options
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_second_process_is_refused_and_may_read(ledger):
    ledger.answer(request(0), 0.1, reply())
    said = in_process(SECOND, ledger.path)
    assert "refused:" in said and "in use by another process" in said
    assert "entries 3 False False" in said
    ledger.close()
    assert "refused" not in in_process(SECOND, ledger.path)


def test_a_forked_process_does_not_write(ledger):
    ledger._pid += 1
    with pytest.raises(LedgerError, match="another process"):
        ledger.answer(request(0), 0.1, reply())
    ledger._pid -= 1


FULL = """
import resource, signal, sys
from fedpdmc.errors import LedgerError
from fedpdmc.privacy.ledger import *
from fedpdmc.privacy.ledger_identity import create_ledger
ledger = Ledger.open(create_ledger(sys.argv[1]))
ledger.account(Account("patients", 1.0, 1e-6, "replace", 20.0, 1.0))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
size = ledger.path.stat().st_size
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20000, size + 20000))
told = 0
try:
    for number in range(1000):
        request = Request("patients", "s", "r", "round", number, b"p")
        ledger.answer(request, 0.0005, lambda key: Reply(b"x" * 900, 1.0, 0.0005))
        told += 1
except LedgerError as error:
    print(error)
try:
    ledger.answer(Request("patients", "s", "r", "round", 5000, b"p"), 0.0005, lambda key: Reply(b"", 1.0, 0.0005))
    print("ANSWERED")
except LedgerError as error:
    print(error)
print("told", told)
"""


def test_a_full_disk_is_refused_and_nothing_is_lost(tmp_path):
    said = in_process(FULL, tmp_path / "ledger.db")
    told = int(said.split()[-1])
    assert "Make room" in said and "not used any more" in said and "ANSWERED" not in said
    assert 0 < told < 1000
    entries = [entry for entry in read(tmp_path / "ledger.db") if entry.kind == "round"]
    reserved = [entry for entry in read(tmp_path / "ledger.db") if entry.kind == "round reserved"]
    assert len(reserved) >= len(entries) >= told
    assert read(tmp_path / "ledger.db")[-1].spent == pytest.approx(0.0005 * len(reserved))


@pytest.mark.parametrize("damage", ["truncated", "emptied", "overwritten", "not a ledger"])
def test_a_damaged_file_is_refused(ledger, damage):
    for number in range(5):
        ledger.answer(request(number), 0.1, reply())
    ledger.close()
    whole = ledger.path.read_bytes()
    entry = whole.index(b"arrival")
    broken = {
        "truncated": whole[: len(whole) // 2],
        "emptied": b"",
        "overwritten": whole[:entry] + os.urandom(200) + whole[entry + 200 :],
        "not a ledger": b"hello" * 1000,
    }[damage]
    ledger.path.write_bytes(broken)
    for attempt in (Ledger.open, read):
        with pytest.raises(LedgerError, match="damaged"):
            attempt(ledger.path)


@pytest.mark.parametrize("change", [
    "UPDATE entries SET cost = 0.0 WHERE seq = 3", "DELETE FROM entries WHERE seq = 4",
    "UPDATE entries SET spent = 0.0 WHERE seq = 6", "UPDATE entries SET reply = 'x' WHERE seq = 2",
    "UPDATE entries SET cost = x'00' WHERE seq = 3", "UPDATE entries SET spent = 'much' WHERE seq = 3",
])  # fmt: skip
def test_entries_that_were_changed_by_hand_are_seen(ledger, change):
    for number in range(5):
        ledger.answer(request(number), 0.1, reply())
    ledger.close()
    db = sqlite3.connect(ledger.path)
    with pytest.raises(sqlite3.IntegrityError, match="never"):
        db.execute(change)
    for trigger in ("no_update", "no_delete"):
        db.execute(f"DROP TRIGGER {trigger}")
    db.execute(change)
    db.commit()
    db.close()
    with pytest.raises(LedgerError, match="does not fit"):
        Ledger.open(ledger.path)


def test_a_file_that_is_changed_while_in_use_is_not_trusted(ledger, tmp_path):
    ledger.answer(request(0), 0.1, reply())
    older = ledger.path.read_bytes()
    ledger.answer(request(1), 0.1, reply())
    ledger.path.write_bytes(older)
    with pytest.raises(LedgerError):
        ledger.answer(request(2), 0.1, reply())
    with pytest.raises(LedgerError, match="not used any more"):
        ledger.answer(request(2), 0.1, reply())


def test_a_clock_set_back_is_refused(ledger, monkeypatch):
    ledger.answer(request(0), 0.1, reply())
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now - 3600)
    with pytest.raises(LedgerError, match="set back"):
        ledger.answer(request(1), 0.1, reply())
    again = reopened(ledger)
    with pytest.raises(LedgerError, match="set back"):
        again.answer(request(1), 0.1, reply())
    assert again.spent("patients") == pytest.approx(0.1)


def test_a_ledger_is_for_its_owner_alone(ledger):
    assert ledger.path.stat().st_mode & 0o077 == 0
    with pytest.raises(InputError, match="Give the file"):
        read(ledger.path.with_name("none.db"))


def test_a_ledger_is_created_once_and_must_be_there(tmp_path):
    path = tmp_path / "new" / "ledger.db"
    with pytest.raises(InputError, match="fedpdmc ledger create"):
        Ledger.open(path)
    assert not path.exists()
    made = Ledger.open(create_ledger(path))
    made.account(ACCOUNT)
    with pytest.raises(InputError, match="created once"):
        create_ledger(path)
    made.close()
    # A volume that was lost is not a new budget.
    path.unlink()
    with pytest.raises(InputError, match="second budget"):
        Ledger.open(path)


@pytest.mark.parametrize("copy", [shutil.copy, shutil.copy2])
def test_a_copy_is_refused_until_a_person_has_moved_there(ledger, tmp_path, copy):
    ledger.answer(request(0), 0.1, reply())
    there = tmp_path / "copy.db"
    copy(ledger.path, there)
    with pytest.raises(LedgerError, match="copy of a ledger"):
        Ledger.open(there)
    adopt_ledger(there)
    moved = Ledger.open(there)
    assert moved.spent("patients") == pytest.approx(0.1)
    moved.close()


def test_an_older_file_put_in_place_is_refused(ledger, tmp_path):
    """Overwritten in place it has the inode of the present one: the note of the last entry tells."""
    ledger.answer(request(0), 0.1, reply())
    ledger.close()
    shutil.copy(ledger.path, tmp_path / "backup.db")
    again = Ledger.open(ledger.path)
    again.answer(request(1), 0.3, reply())
    again.close()
    shutil.copyfile(tmp_path / "backup.db", ledger.path)
    with pytest.raises(LedgerError, match="3 entries where it had"):
        Ledger.open(ledger.path)
    # Only a person can say that the newer one is lost.
    adopt_ledger(ledger.path)
    adopted = Ledger.open(ledger.path)
    assert adopted.spent("patients") == pytest.approx(0.1)
    adopted.close()


def test_another_ledger_put_in_place_is_refused(ledger, tmp_path):
    ledger.answer(request(0), 0.1, reply())
    ledger.close()
    other = create_ledger(tmp_path / "other.db")
    shutil.copyfile(other, ledger.path)
    with pytest.raises(LedgerError, match="another ledger|copy of a ledger"):
        Ledger.open(ledger.path)
    # Nor is a new one created where one was.
    ledger.path.unlink()
    with pytest.raises(InputError, match="second budget"):
        create_ledger(ledger.path)


def test_a_note_that_cannot_be_read_or_is_older_changes_nothing(ledger):
    ledger.answer(request(0), 0.1, reply())
    note = ledger.path.with_name(ledger.path.name + ".head")
    old = note.read_text()
    ledger.answer(request(1), 0.1, reply())
    for text in (old, "", "{"):
        note.write_text(text)
        assert reopened(ledger).spent("patients") == pytest.approx(0.2)


def test_a_move_within_a_disk_is_no_copy(ledger, tmp_path):
    ledger.answer(request(0), 0.1, reply())
    ledger.close()
    moved = ledger.path.rename(tmp_path / "moved.db")
    again = Ledger.open(moved)
    assert again.spent("patients") == pytest.approx(0.1)
    again.close()


def test_hard_links_are_refused(ledger, tmp_path):
    ledger.close()
    os.link(ledger.path, tmp_path / "link.db")
    for name in (ledger.path, tmp_path / "link.db"):
        with pytest.raises(LedgerError, match="hard links"):
            Ledger.open(name)


def test_a_link_made_while_it_is_in_use_gives_no_second_budget(ledger, tmp_path):
    """The lock is beside the other name: the entries themselves are what a second writer trips over."""
    ledger.answer(request(0), 0.1, reply())
    os.link(ledger.path, tmp_path / "link.db")
    with pytest.raises(LedgerError, match="hard links"):
        Ledger.open(tmp_path / "link.db")
    ledger.answer(request(1), 0.1, reply())
    assert ledger.spent("patients") == pytest.approx(0.2)


def test_what_is_reserved_counts_and_gives_way_to_the_cost(ledger):
    inside = []

    def work(key):
        inside.append((ledger.spent("patients"), ledger.remaining("patients")))
        # Another request, from another thread, is neither kept waiting nor given what is reserved.
        other = threading.Thread(target=lambda: ledger.answer(request(1), 0.1, reply()))
        other.start()
        other.join(60)
        assert not other.is_alive()
        with pytest.raises(BudgetSpent):
            ledger.answer(request(2), 0.5, reply())
        return Reply(b"x", 1.0, 0.05)

    ledger.answer(request(0), 0.6, work)
    assert inside == [(pytest.approx(0.6), pytest.approx(0.4))]
    assert ledger.spent("patients") == ledger.spent("patients", "s") == pytest.approx(0.15)
    again = reopened(ledger)
    assert again.spent("patients") == again.spent("patients", "s") == pytest.approx(0.15)
    # The plan of a round that was begun stays its plan.
    with pytest.raises(PlanRefused, match="OTHER_PLAN"):
        again.answer(request(0, b"q" * 32), 0.1, reply())


def test_what_was_cut_short_is_not_made_for_more_than_was_reserved(ledger):
    def cut(key):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ledger.answer(request(0), 0.1, cut)
    ledger.answer(request(1), 0.85, reply(0.85))
    with pytest.raises(PlanRefused, match="reserved"):
        ledger.answer(request(0), 0.5, reply(0.5))
    ledger.answer(request(0), 0.1, reply(0.1))
    assert ledger.spent("patients") == pytest.approx(0.95)
