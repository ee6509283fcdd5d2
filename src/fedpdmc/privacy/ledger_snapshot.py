"""A copy of a ledger as it was before a run, to compute the run's replies again from the same secrets."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

from fedpdmc.errors import InputError
from fedpdmc.privacy.ledger_entries import read


def rewound(ledger: str | Path, copy: str | Path, run: str, study: str) -> str:
    """Copy a ledger, checked, without the first entry of a run and all that follow; returns the run's data set.

    A run with releases alone has no entry of its own and is found by its study.

    Parameters
    ----------
    ledger : path
    copy : path
        The new file; it must not exist.
    run : str
        Its name in the ledger.
    study : str
        Its study.
    """
    entries = read(ledger)
    of_run = [entry for entry in entries if entry.run == run]
    first = next(iter(of_run or [entry for entry in entries if entry.study == study]), None)
    if first is None:
        raise InputError("ledger", f"{ledger} without the run {run}", "Give the ledger that the site ran with.")
    source, target = sqlite3.connect(f"{Path(ledger).resolve().as_uri()}?mode=ro", uri=True), sqlite3.connect(copy)
    try:
        source.backup(target)
        (trigger,) = target.execute("SELECT sql FROM sqlite_master WHERE name = 'no_delete'").fetchone()
        target.execute("DROP TRIGGER no_delete")
        target.execute("DELETE FROM entries WHERE seq >= ?", (first.seq,))
        target.execute(trigger)
        target.execute("UPDATE meta SET file = ?", (os.stat(copy).st_ino,))
        target.commit()
    finally:
        source.close()
        target.close()
    return first.dataset
