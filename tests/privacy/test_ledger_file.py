"""A ledger's file: damaged, changed, copied, moved, linked or put back."""

import os
import shutil
import sqlite3
import time

import pytest
from tests.privacy.ledgers import ACCOUNT, reopened, reply, request

from fedpdmc.errors import InputError, LedgerError
from fedpdmc.privacy.ledger import Ledger, adopt_ledger, create_ledger, read


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
    with pytest.raises(LedgerError, match="does not follow"):
        Ledger.open(ledger.path)


def test_a_file_that_is_changed_while_in_use_is_not_trusted(ledger, tmp_path):
    ledger.answer(request(0), 0.1, reply())
    older = ledger.path.read_bytes()
    ledger.answer(request(1), 0.1, reply())
    ledger.path.write_bytes(older)
    with pytest.raises(LedgerError):
        ledger.answer(request(2), 0.1, reply())
    with pytest.raises(LedgerError, match="is closed"):
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
