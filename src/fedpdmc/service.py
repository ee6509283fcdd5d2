"""What a site's operator runs: the agent on its network, and its audit log shown and replayed."""

from __future__ import annotations

import datetime
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from fedpdmc.errors import InputError, WireError
from fedpdmc.federation import wire
from fedpdmc.federation.agent import open_agent
from fedpdmc.federation.journal import Entry, Kind, read_log
from fedpdmc.keys import read_credentials
from fedpdmc.study import Policy, Study


def serve_site(
    study: Study,
    name: str,
    source: str | Path,
    *,
    coordinator: str,
    keys: str | Path | None,
    store: str | Path,
    policy: Policy,
    query: str | None = None,
    seed: int | None = None,
    ledger: str | Path | None = None,
    seeded_for_tests: bool = False,
    wait: Callable[[float], bool] | None = None,
) -> None:
    """Take part in a study: read the records, dial the coordinator, answer until the run is over.

    Parameters
    ----------
    study : Study
    name : str
        The site's name, as in the contract and in its certificate.
    source, query
        The records, as `fedpdmc.study.read_records` takes them.
    coordinator : str
        ``host:port``.
    keys : path or None
        The site's folder of keys; None for a plain connection on loopback.
    store : path
        Folder of the audit log and of the site's secret seed.
    policy : Policy
    seed : int, optional
        Only to make a trial repeatable; from the operating system if None.
    ledger : path, optional
        The site's privacy ledger, for a contract with a budget; the user's own by default.
    seeded_for_tests : bool
        Take the seed in spite of a budget: nothing is private then, and log and result say so.
    wait : callable, optional
        As for `fedpdmc.federation.streams.serve`.
    """
    from fedpdmc.federation.streams import serve

    agent = open_agent(
        study, name, source, query=query, policy=policy, store=store, seed=seed, ledger=ledger,
        seeded_for_tests=seeded_for_tests,
    )  # fmt: skip
    try:
        serve(agent, coordinator, None if keys is None else read_credentials(keys), wait)
    finally:
        agent.journal.close()


class Replay(NamedTuple):
    """What a replay found: answers that came out the same, and the sequence numbers of those that did not."""

    same: int
    different: list[int]


def replay(study: Study, name: str, source: str | Path, *, store: str | Path, query: str | None = None) -> Replay:
    """Answer every request of an audit log again, from the records, and compare with what was answered then.

    The log's seals are checked on the way. Refusals for want of disk space are not repeated.
    """
    seed = Path(store) / "seed"
    if not seed.exists():
        raise InputError("store", f"{store} without a seed", "Give the store of a site that ran on its own.")
    same, different = 0, []
    with tempfile.TemporaryDirectory(prefix="fedpdmc-replay-") as folder:
        agent = open_agent(study, name, source, query=query, store=folder, seed=int(seed.read_text()))
        request = b""
        for entry in read_log(store):
            if entry.kind is Kind.NOTE and entry.note["event"] == "joined":
                agent.join(wire.encode(wire.Welcome(bytes.fromhex(entry.note["run"]), study.digest)))
            elif entry.kind is Kind.REQUEST:
                request = entry.payload
            elif entry.kind in (Kind.ANSWER, Kind.REFUSAL) and not _for_storage(entry):
                if agent.answer(request) == entry.payload:
                    same += 1
                else:
                    different.append(getattr(wire.decode(entry.payload), "sequence", 0))
        agent.journal.close()
    return Replay(same, different)


def _for_storage(entry: Entry) -> bool:
    message = wire.decode(entry.payload)
    return isinstance(message, wire.Refusal) and message.code == "STORAGE"


FLOWER_PROJECT = """\
[project]
name = "fedpdmc-study"
version = "1.0.0"
description = "A fedpdmc study on Flower"
license = "Apache-2.0"
dependencies = []

[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[tool.hatch.build.targets.wheel]
packages = ["."]

[tool.flwr.app]
publisher = "fedpdmc"

[tool.flwr.app.components]
serverapp = "fedpdmc_study:server_app"
clientapp = "fedpdmc_study:client_app"

# Paths on the machine of the ServerApp. A site's own are in its SuperNode's --node-config.
[tool.flwr.app.config]
study = "study.toml"
keys = "keys/coordinator"
store = "run"
seed = -1
"""


def write_flower_app(folder: str | Path) -> None:
    """Write a Flower app that only imports the package's ServerApp and ClientApp."""
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()):
        raise InputError("folder", f"{folder}, which is not empty", "Give a new folder.")
    (folder / "fedpdmc_study").mkdir(parents=True)
    (folder / "pyproject.toml").write_text(FLOWER_PROJECT)
    text = '"""A fedpdmc study on Flower."""\n\nfrom fedpdmc.federation.flower import client_app, server_app\n'
    (folder / "fedpdmc_study" / "__init__.py").write_text(text + '\n__all__ = ["client_app", "server_app"]\n')


def show(store: str | Path) -> Iterator[str]:
    """An audit log, a line for each entry."""
    for entry in read_log(store):
        when = datetime.datetime.fromtimestamp(entry.when, datetime.UTC).isoformat(timespec="milliseconds")
        yield f"{when}  {entry.kind.name.lower():<8}{_describe(entry)}"


def _describe(entry: Entry) -> str:
    if entry.kind is Kind.NOTE:
        note = entry.note
        return " ".join([note.pop("event"), *(f"{key}={value}" for key, value in note.items())])
    try:
        message = wire.decode(entry.payload)
    except WireError as error:
        return f"{len(entry.payload)} bytes that are no message ({error.found})"
    words = f"{getattr(message, 'sequence', 0)} {type(message).__name__}, {len(entry.payload)} bytes"
    if isinstance(message, wire.Refusal):
        return f"{words}: {message.code}"
    if isinstance(message, wire.Arrivals):
        return f"{words}: {int(message.rang.sum())} of {len(message.rang)} chains rang"
    if isinstance(message, wire.Plans):
        return f"{words}: process time {message.duration.sum():.6g}"
    return words
