"""A site's audit log: printed, replayed from the records, and read for the site's own effects, written to files."""

from __future__ import annotations

import dataclasses
import datetime
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedpdmc._jax.precision import double_precision
from fedpdmc.certificates import Credentials
from fedpdmc.errors import InputError, WireError
from fedpdmc.federation import messages
from fedpdmc.federation.audit_seals import compare as compare_seals
from fedpdmc.federation.site_agent.agent import REFUSED_REQUEST, Agent
from fedpdmc.federation.site_agent.audit_log import (
    OPENING,
    SEED,
    SUM_KEY,
    Kind,
    LogEntry,
    read_log,
    site_seed,
    software_differences,
)
from fedpdmc.federation.site_agent.request_checks import DECLINED
from fedpdmc.federation.site_agent.start import open_agent
from fedpdmc.members.site import LatentPosterior, latent_names
from fedpdmc.privacy.budget import default_path
from fedpdmc.privacy.ledger import create_ledger, rewound
from fedpdmc.study import Study


class Replay(NamedTuple):
    """The result of a replay."""

    same: int  # answers that are the same
    different: list[int]  # sequence numbers of answers that differ, or that do not belong to their request
    unchecked: dict[str, int]  # how many answers could not be recomputed, by reason
    # Differences between the software or machine that wrote the log and the current one: answers may then differ in
    # the last bits.
    software: list[str]


NO_SECRET = "their randomness is not available: the seed in the store or, under a privacy budget, the ledger"
KEYS = "they exchange the keys of secure sums, which do not depend on the records"
# Hexadecimal digits shown of long values.
SHOWN = 32
POLICY = "they were refused under the site's policy, which is not part of the log"
BY_POLICY = (*DECLINED, "NARROW_PART", "NOT_TOLD", "TOO_MANY_DERIVATIVES")
EXCERPT = "they were refused, and the log has only the hash and the beginning of the long request"


def replay(
    study: Study,
    name: str,
    source: str | Path,
    *,
    store: str | Path,
    query: str | None = None,
    ledger: str | Path | None = None,
) -> Replay:
    """Recompute every answer of an audit log from the records, and compare.

    All entries are checked for their seals, and for the request's hash in every answer. Arrivals are recomputed if their
    randomness is available: the site's seed in the store or, under a privacy budget, the secret of its ledger; a copy
    of the ledger is reset to its state before the run. The parameters are those with which the site ran.
    """
    found = Replay(0, [], {}, software_differences(read_log(store)))
    with tempfile.TemporaryDirectory(prefix="fedpdmc-replay-") as folder:
        agent, secret = agent_before_run(study, name, source, Path(store), query, ledger, Path(folder))
        # A long refused request is not in the log, only its hash.
        request, asked = None, b""
        try:
            for entry in read_log(store):
                if entry.kind is Kind.NOTE and entry.note["event"] == "joined":
                    agent.join(messages.encode(messages.Welcome(bytes.fromhex(entry.note["run"]), study.digest)))
                elif entry.kind is Kind.NOTE and entry.note["event"] == REFUSED_REQUEST:
                    request, asked = None, bytes.fromhex(entry.note["sha256"])
                elif entry.kind is Kind.REQUEST:
                    request, asked = entry.payload, messages.digest(entry.payload)
                elif entry.kind in (Kind.ANSWER, Kind.REFUSAL):
                    found = _compare(agent, request, asked, entry, secret, found)
        finally:
            agent.log.close()
    return found


def agent_before_run(study, name, source, store: Path, query, ledger, folder: Path) -> tuple[Agent, bool]:
    """The site as it was before the run, and whether its randomness is available."""
    options: dict[str, Any] = {"query": query, "store": folder}
    secret = (store / SEED).exists()
    if study.epsilon is not None:
        path = Path(default_path() if ledger is None else ledger)
        secret = path.exists()
        options["ledger"] = folder / "ledger.db"
        notes = (entry.note for entry in read_log(store) if entry.kind is Kind.NOTE)
        run = next((note["run"] for note in notes if note["event"] == "joined"), None) if secret else None
        if run is not None:
            options["dataset"] = rewound(path, options["ledger"], f"{run}/{name}", study.name)
        else:
            create_ledger(options["ledger"])
    else:
        options["seed"] = site_seed(store, None) if secret else 0
    for secret_file in (SUM_KEY, OPENING):
        if (store / secret_file).exists():
            shutil.copy(store / secret_file, folder / secret_file)
    return open_agent(study, name, source, **options), secret


def _compare(agent: Agent, request: bytes | None, asked: bytes, entry: LogEntry, secret: bool, found: Replay) -> Replay:
    """Check one more answer: recompute it, or count it with the reason why it cannot be recomputed."""
    given: Any = _read(entry.payload, found)
    different = found._replace(different=[*found.different, given.sequence])
    if given.request != asked or request is None and entry.kind is Kind.ANSWER:
        return different
    if request is None:
        why = EXCERPT
    elif (why := _unrepeatable(request, given, secret)) is None:
        # The limit of refusals in a row is for live coordinators.
        agent.refusals = 0
        return found._replace(same=found.same + 1) if _alike(agent.answer(request), given) else different
    elif entry.kind is Kind.ANSWER:
        agent.adopt(request, entry.payload)
    return found._replace(unchecked=found.unchecked | {why: found.unchecked.get(why, 0) + 1})


def _read(data: bytes, found: Replay) -> messages.Message:
    """Decode an answer of the log."""
    try:
        return messages.decode(data)
    except WireError as error:
        by = ", ".join(found.software) or "this software"
        remedy = "Replay it with the version that wrote it."
        raise InputError("store", f"a log of {by}: {error.found}", remedy) from error


def _unrepeatable(request: bytes, given: Any, secret: bool) -> str | None:
    """Why an answer cannot be recomputed; None if it can."""
    if isinstance(given, messages.Refusal) and given.code in BY_POLICY:
        return POLICY
    try:
        asked = messages.decode(request)
    except WireError:
        return None
    if isinstance(asked, (messages.Offer, messages.Agree)):
        return KEYS
    drawn = (messages.Open, messages.Reveal, messages.Plans, messages.TurnPlans)
    return NO_SECRET if isinstance(asked, drawn) and not secret else None


def _alike(data: bytes, given: Any) -> bool:
    """Whether two answers are the same, except for what other runs may have spent of the same budget."""
    made: Any = messages.decode(data)
    if type(made) is type(given) is messages.Opened:
        # Signatures with the key of a certificate are random.
        made = dataclasses.replace(made, certificate=given.certificate, signature=given.signature)
    if type(made) is type(given) and isinstance(made, (messages.Arrivals, messages.Opened)) and given.remaining >= 0:
        account = {"spent": given.spent} if isinstance(given, messages.Arrivals) else {"account": given.account}
        made = dataclasses.replace(made, remaining=given.remaining, **account)
    releases = (messages.Derivatives, messages.Masked)
    if isinstance(made, releases) and isinstance(given, releases) and made.noise.size and given.noise.size:
        made = dataclasses.replace(made, noise=np.concatenate([made.noise[:2], given.noise[2:]]))
    return messages.encode(made) == messages.encode(given)


def compare(store: str | Path, seals: str | Path, authority: str | Path) -> list[str]:
    """The differences between a site's store and its coordinator's ``seals.jsonl``, as sentences.

    ``authority`` is the certificate of the study's authority.
    """
    try:
        root = Path(authority).read_bytes()
    except OSError as error:
        raise InputError("authority", f"{error.strerror}: {authority}", "Give the study's authority.pem.") from error
    return compare_seals(Path(store), Path(seals), Credentials(b"", b"", root))


def show(store: str | Path) -> Iterator[str]:
    """An audit log, one line for each entry. The last line has the last seal, which a shorter log would not match."""
    count, last = 0, b""
    for entry in read_log(store):
        count, last = count + 1, entry.seal
        when = datetime.datetime.fromtimestamp(entry.when, datetime.UTC).isoformat(timespec="milliseconds")
        yield f"{when}  {entry.kind.name.lower():<8}{_describe(entry)}"
    yield f"{count} entries, seal {last.hex()}"


def _describe(entry: LogEntry) -> str:
    if entry.kind is Kind.NOTE:
        note = entry.note
        note.pop("certificate", None)
        for long in ("begins", "signature"):
            if long in note:
                note[long] = f"{note[long][:SHOWN]}..."
        return " ".join([note.pop("event"), *(f"{key}={value}" for key, value in note.items())])
    try:
        message = messages.decode(entry.payload)
    except WireError as error:
        return f"{len(entry.payload)} bytes that are not a message ({error.found})"
    words = f"{getattr(message, 'sequence', 0)} {type(message).__name__}, {len(entry.payload)} bytes"
    if isinstance(message, messages.Refusal):
        return f"{words}: {message.code}"
    if isinstance(message, messages.Arrivals):
        return f"{words}: arrivals on {int(message.rang.sum())} of {len(message.rang)} chains"
    if isinstance(message, messages.Plans):
        return f"{words}: process time {message.duration.sum():.6g}"
    return words


@double_precision
def own_effects(
    study: Study, name: str, source: str | Path, *, store: str | Path, query: str | None = None
) -> LatentPosterior:
    """The effects of a site's groups, drawn together with the shared parameters.

    The parameters are those with which the site ran. Raises `InputError` for a contract without effects, and for a store
    without its seed or without answered plans.
    """
    if study.effects is None:
        remedy = "Give a contract whose formula has effects of groups."
        raise InputError("study", "a contract without effects of groups", remedy)
    ended = False
    with tempfile.TemporaryDirectory(prefix="fedpdmc-effects-") as folder:
        agent, secret = agent_before_run(study, name, source, Path(store), query, None, Path(folder))
        agent.log.close()
    if not secret:
        raise InputError("store", "no seed of the site", "Give the store that the site ran with.")
    computation, request, reference = agent.computation, b"", None
    for entry in read_log(store):
        if entry.kind is Kind.REQUEST:
            request = entry.payload
        elif entry.kind is Kind.ANSWER:
            asked = messages.decode(request)
            computation.record(asked, messages.decode(entry.payload))
            ended = False
            if isinstance(asked, messages.Open) and computation.latents is not None:
                reference = computation.reference
                computation.latents.keep_draws()
        elif entry.kind is Kind.NOTE and entry.note["event"] == "farewell":
            ended = True
    if reference is None or computation.latents is None:
        raise InputError("store", "a log without an opened run", "Let the site take part in a run first.")
    if ended:
        computation.latents.finish()
    found = computation.latents.posterior(reference, latent_names(computation.site))
    if not len(found.times):
        raise InputError("store", "a run without draws yet", "Wait until the burn-in is over.")
    return found


def write_effects(found: LatentPosterior, names: tuple[str, ...], out: str | Path) -> tuple[Path, Path]:
    """Write the summary as CSV and the draws as NPZ, readable by their owner only; returns both paths.

    The arrays: ``effects`` (chains, n, k) and ``parameters`` (chains, n, d), draws that belong together; ``time`` (n,), the
    process times at which they were taken; ``effect_names`` and ``parameter_names``.
    """
    out = Path(out)
    if not out.parent.is_dir():
        raise InputError("out", str(out), "Make the folder first.")
    table, draws = out.with_suffix(".csv"), out.with_suffix(".npz")
    for path in (table, draws):
        path.unlink(missing_ok=True)
    with open(os.open(table, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        found.summary().to_csv(file)
    with open(os.open(draws, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        np.savez_compressed(
            file, time=found.times, effects=found.z, parameters=found.theta, effect_names=np.array(found.names),
            parameter_names=np.array(names),
        )  # fmt: skip
    return table, draws
