"""A copy of a ledger as it was before a run, to make the run's replies again from the same secrets."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from fedpdmc.errors import InputError
from fedpdmc.privacy.ledger import read


def rewound(ledger: str | Path, copy: str | Path, dataset: str, run: str) -> Path:
    """Copy a ledger, checked, without the first entry of a run on a data set and all that follow.

    Parameters
    ----------
    ledger : path
    copy : path
        Where the copy goes; it is not there yet.
    dataset, run : str
    """
    entries = [entry.seq for entry in read(ledger) if entry.dataset == dataset and entry.run == run]
    if not entries:
        raise InputError(
            "ledger", f"{ledger} without this run of {dataset!r}", "Give the ledger that the site ran with."
        )
    source, target = sqlite3.connect(f"{Path(ledger).resolve().as_uri()}?mode=ro", uri=True), sqlite3.connect(copy)
    try:
        source.backup(target)
        (trigger,) = target.execute("SELECT sql FROM sqlite_master WHERE name = 'no_delete'").fetchone()
        target.execute("DROP TRIGGER no_delete")
        target.execute("DELETE FROM entries WHERE seq >= ?", (min(entries),))
        target.execute(trigger)
        target.commit()
    finally:
        source.close()
        target.close()
    return Path(copy)
