"""The commands of a federated study, as they are called from the command line."""

from __future__ import annotations

import contextlib
import errno
import logging
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

import fedpdmc as fp
from fedpdmc.certificates.keys import fingerprint, make_keys, revoke
from fedpdmc.certificates.requests import request_certificate, sign_request
from fedpdmc.console.interrupts import INTERRUPTED, happened, remains
from fedpdmc.console.wrapping import say, terminal_width, wrapped
from fedpdmc.errors import FedPDMCError, InputError
from fedpdmc.federation.dry_run import try_study
from fedpdmc.federation.session import Connection
from fedpdmc.federation.site_agent.audit_replay import compare, replay, show
from fedpdmc.operations.serve import serve_site, write_flower_app
from fedpdmc.operations.status import CoordinatorBoard, Watching, watched
from fedpdmc.results.verdict import ConvergenceWarning
from fedpdmc.study import read_policy, read_study

# Exit status of a run that was refused or given something it cannot use.
REFUSED = 2
# Of one that had no descriptor left: started again it may have.
LATER = 75


def guarded(work: Callable[[], int]) -> int:
    """Run a command; an error that has a remedy is printed as a sentence, not as a traceback."""
    if not logging.getLogger().handlers:
        logging.getLogger().addHandler(_log_handler())
    logging.getLogger("fedpdmc").setLevel(logging.INFO)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _said
            return work()
    except FedPDMCError as error:
        logging.getLogger("fedpdmc").error("%s", error)
        return REFUSED
    except OSError as error:
        logging.getLogger("fedpdmc").error(
            "%s. What was kept in the store stands: mend this (a full disk: make room) and start again.", error
        )
        return LATER if error.errno in (errno.EMFILE, errno.ENFILE) else REFUSED


class _ToStandardError(logging.StreamHandler):
    """Writes to standard error as it is at the moment: above a progress display, while there is one."""

    @property
    def stream(self):
        """The present standard error."""
        return sys.stderr

    @stream.setter
    def stream(self, _) -> None:
        pass


class _Wrapping(logging.Formatter):
    """In lines that fit on the terminal."""

    def format(self, record: logging.LogRecord) -> str:
        """The record's text."""
        return wrapped(super().format(record), terminal_width(sys.stderr))


def _log_handler() -> logging.Handler:
    """Short lines on a terminal; in a service's log all that its reader needs."""
    handler = _ToStandardError()
    if sys.stderr.isatty():
        handler.setFormatter(_Wrapping("%(asctime)s %(message)s", "%H:%M:%S"))
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    return handler


def _said(message, category, *place) -> None:
    """A warning as a line of the log: where in the program it arose tells an operator nothing."""
    logging.getLogger("fedpdmc").warning("%s", message)


def keys(folder: Path, study: Path | None, sites: Sequence[str], days: int, hosts: Sequence[str]) -> int:
    """Make a study's certificates."""
    names = list(sites) + (list(read_study(study).sites) if study is not None else [])
    if not names:
        raise InputError("keys", "no sites", "Give --study, or --site for each of them.")
    make_keys(folder, list(dict.fromkeys(names)), days=days, hosts=hosts)
    say(f"{folder}/coordinator goes to the coordinator, {folder}/sites/NAME to each site.")
    say(f"{folder}/authority makes further certificates: keep it apart and safe.")
    return 0


def keys_request(folder: Path, name: str) -> int:
    """Make a party's key and a request."""
    path, fingerprint = request_certificate(folder, name)
    say(f"{path} goes to the study's authority; {folder}/key.pem stays here.")
    say(f"SHA-256 of the key, to be compared with what the authority reads: {fingerprint}")
    return 0


def keys_sign(authority: Path, request: Path, name: str, out: Path, days: int, hosts: Sequence[str]) -> int:
    """Sign a party's request."""
    fingerprint = sign_request(authority, request, name, out, days=days, hosts=hosts)
    say(f"SHA-256 of the key: {fingerprint}")
    say(f"If {name} reads the same from its own request, send it {out}: both files go beside its key.pem.")
    return 0


def revoke_certificates(folder: Path, certificates: Sequence[Path], fingerprints: Sequence[str]) -> int:
    """Shut certificates out at one party."""
    try:
        found = [fingerprint(path.read_bytes()) for path in certificates]
    except (OSError, ValueError) as error:
        raise InputError("certificate", str(error), "Give a certificate.pem, or --fingerprint.") from error
    if not [*found, *fingerprints]:
        raise InputError("revoke", "nothing", "Give --certificate or --fingerprint.")
    path = revoke(folder, [*found, *fingerprints])
    say(f"{path}: no longer taken, in all: {len(path.read_text().splitlines())}.")
    return 0


def check(path: Path, records: int) -> int:
    """Read a contract, run it on made-up records, and say what it will cost."""
    study = read_study(path)
    say(f"{study.name}: {study.family}, {study.formula}; sites {', '.join(study.sites)}")
    say(f"parameters: {', '.join(study.names)}")
    say(f"contract hash (sha256sum {path.name}): {study.digest.hex()}")
    say(f"released: {_released(study)}; {_budget_words(study)}")
    trial = try_study(study, records=records)
    say(f"dry run on {records} made-up records a site: {trial.posterior!r}")
    say(
        f"expected of the whole run: {trial.rounds:,} requests (limit {study.rounds:,}), observed process time up to "
        f"{trial.observed_time:,.4g} (limit {study.observed_time:,.4g}), {trial.bytes_per_round:,} bytes a round and site"
    )
    if trial.rounds > study.rounds or trial.observed_time > study.observed_time:
        Console(highlight=False).print("The limits are likely too small for what [run] asks for.", style="red")
        return 1
    return 0


def _released(study) -> str:
    told = {"none": [], "summed": ["derivatives summed over the sites"], "own": ["own derivatives"]}[study.derivatives]
    return ", ".join(["arrivals", *told, *(["passes over the records"] if study.passes else [])])


def _budget_words(study) -> str:
    if study.epsilon is None:
        return "no privacy budget"
    return f"privacy budget epsilon = {study.epsilon:g}, delta = {study.delta:g}, {study.neighbours}"


def coordinator(
    path: Path,
    listen: str,
    key_folder: Path | None,
    store: Path,
    seed: int | None,
    ess: float | None,
    duration: float | None,
    keep: str,
    out: Path | None,
    watching: Watching | None = None,
) -> int:
    """Wait for the sites, run the study, save the posterior."""
    with fp.connect(
        path, listen=listen, keys=key_folder, store=store, seed=seed, plain_on_loopback=key_folder is None
    ) as connection:
        if not sys.stderr.isatty():
            # On a terminal the log says so, line by line with the sites that join.
            say(f"listening on {connection.address}")
        with _watched(connection, watching), _verdict_is_printed():
            post = fp.sample(connection, ess=ess, duration=duration, keep=keep)
        if happened():
            return INTERRUPTED
        target = store / "posterior.zarr" if out is None else out
        post.save(target)
        connection.finish()
    print(post.summary())
    say(f"Saved: {target} (read it with fedpdmc.load).")
    return 0


def site(
    path: Path,
    name: str,
    data: str,
    query: str | None,
    policy: Path,
    address: str,
    key_folder: Path | None,
    store: Path,
    seed: int | None,
    ledger: Path | None,
    seeded_for_tests: bool,
    server_name: str,
    watching: Watching | None = None,
) -> int:
    """Answer the coordinator until the run is over."""
    serve_site(
        read_study(path),
        name,
        data if ":" in data else Path(data),
        query=query,
        policy=read_policy(policy),
        coordinator=address,
        keys=key_folder,
        store=store,
        seed=seed,
        ledger=ledger,
        seeded_for_tests=seeded_for_tests,
        server_name=server_name,
        watching=watching,
    )
    say(f"The run is over. What was asked and answered: fedpdmc audit show {store}")
    return 0


def run(
    path: Path,
    data: Sequence[str],
    queries: Sequence[str],
    seed: int | None,
    site_seeds: Sequence[str],
    store: Path | None,
    out: Path | None,
) -> int:
    """All sites in this process."""
    sources, asked = _pairs(data, "data"), _pairs(queries, "query")
    stray = sorted(set(asked) - set(sources))
    if stray:
        raise InputError("query", f"one for {stray[0]!r}, which has no data", "Give --data for it too.")
    told = {name: (source, asked.get(name)) for name, source in sources.items()}
    own = {name: _whole(value, "site-seed") for name, value in _pairs(site_seeds, "site-seed").items()}
    with fp.connect(path, data=told, seed=seed, site_seeds=own, store=store) as connection, _verdict_is_printed():
        post = fp.sample(connection)
    if happened() and store is not None:
        return INTERRUPTED
    if happened():
        remains("Interrupted: this is what was drawn so far. With --store FOLDER an interrupted run can go on.", True)
    print(post.summary())
    if out is not None:
        post.save(out)
        say(f"Saved: {out} (read it with fedpdmc.load).")
    else:
        say("The posterior was not saved: give --out FOLDER to keep it.")
    return 0


def flower_app(folder: Path) -> int:
    """Write the Flower app."""
    write_flower_app(folder)
    say(f"{folder}: set the paths in pyproject.toml, then `flwr run {folder}`. See docs/deploy.md.")
    return 0


def audit_show(store: Path) -> int:
    """Print a site's log."""
    for line in show(store):
        print(line)
    return 0


def audit_replay(path: Path, name: str, data: str, query: str | None, store: Path, ledger: Path | None) -> int:
    """Answer a log's requests again and compare."""
    source = data if ":" in data else Path(data)
    same, different, unchecked, software = replay(
        read_study(path), name, source, store=store, query=query, ledger=ledger
    )
    say("The log is whole: every entry carries the hash of all before it.")
    if software:
        say(f"It was written with {', '.join(software)}: answers may differ in their last bits for that alone.")
    say(f"{same} answers came out the same, {len(different)} did not.")
    for why, count in unchecked.items():
        say(f"{count} answers bear the hash of their request but were not made again: {why}.")
    for sequence in different[:10]:
        say(f"request {sequence}: another answer than the log has")
    return 1 if different else 0


def watching(status: str | None, on_stall: str | None, stall_after: float) -> Watching | None:
    """How a run is to be watched; None if nobody asked."""
    if status is None and on_stall is None:
        return None
    found = Watching(status, on_stall, stall_after)
    _ = found.command
    return found


def _watched(connection: Connection, watching: Watching | None) -> contextlib.AbstractContextManager:
    """With a status page, if one is wanted."""
    return contextlib.nullcontext() if watching is None else watched(CoordinatorBoard(connection), watching)


@contextlib.contextmanager
def _verdict_is_printed():
    """The summary begins with it: no warning beside."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        yield


def audit_compare(store: Path, seals: Path, authority: Path) -> int:
    """Compare a site's log with the seals that its coordinator has kept."""
    faults = compare(store, seals, authority)
    for fault in faults:
        say(fault)
    if not faults:
        say("Every seal that the coordinator has kept is one of this log, signed by the site.")
    return 1 if faults else 0


def _pairs(words: Sequence[str], option: str) -> dict[str, str]:
    out = {}
    for word in words:
        name, mark, value = word.partition("=")
        if not mark or not name or not value or name in out:
            raise InputError(option, repr(word), "Give NAME=VALUE, once for each site.")
        out[name] = value
    return out


def _whole(text: str, option: str) -> int:
    if not text.isdigit():
        raise InputError(option, repr(text), "Give a whole number.")
    return int(text)
