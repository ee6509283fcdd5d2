"""``connect``: a connection to a study's sites, on a network or in this process, for ``sample``."""

from __future__ import annotations

import contextlib
import secrets
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedpdmc.console.interrupts import Interrupted
from fedpdmc.console.progress import report, show_prior, showing
from fedpdmc.errors import InputError
from fedpdmc.federation.checkpoint import Checkpoint, OpeningJournal
from fedpdmc.federation.derivative_plausibility import Plausible
from fedpdmc.federation.messages import MEANING, READABLE, RUN_BYTES, VERSION, Welcome, encode
from fedpdmc.federation.remote import RemoteFederation
from fedpdmc.federation.transport import DirectTransport, Transport
from fedpdmc.results.manifest import RESTORE
from fedpdmc.results.path_store import RunState
from fedpdmc.sampling.api import StudyConnection
from fedpdmc.validation import has_fields, optional_seed, require_posix
from fedpdmc.version import __version__

INTERRUPTED = (
    "before the first block of samples was complete. With a store, connect and sample again to resume; without one a new "
    "run begins."
)
# Seconds between two exchanges of seals.
SEAL_SECONDS = 60.0
# The wire version of stores that do not name theirs.
FIRST_STORED = 9

if TYPE_CHECKING:
    import pandas as pd

    from fedpdmc.certificates import Credentials
    from fedpdmc.console.progress import Showing
    from fedpdmc.federation.audit_seals import Witness
    from fedpdmc.results.posterior import Posterior
    from fedpdmc.study.contract import Study


class Connection(StudyConnection):
    """The sites of a study and the run that they take part in; `fedpdmc.sample` draws from it.

    Parameters
    ----------
    study : Study
    transport : Transport
    run : bytes
    seed : int
        The coordinator's randomness.
    checkpoint : Checkpoint, optional
        Where the run is stored.
    saved : RunState, optional
        The state that an earlier process has stored.
    """

    def __init__(
        self,
        study: Study,
        transport: Transport,
        run: bytes,
        seed: int,
        checkpoint: Checkpoint | None = None,
        saved: RunState | None = None,
    ):
        self.study, self.transport, self.run, self.seed = study, transport, run, seed
        self.checkpoint, self.saved = checkpoint, saved
        self.federation = RemoteFederation(transport, run, study.digest)
        self.federation.plausible = Plausible(study)
        self.federation.version = _wire_version(saved)
        # What every stored state says of the run.
        self.facts = {"study": study.digest.hex(), "run": run.hex(), "seed": seed, "wire": self.federation.version}
        self._sampled = False
        if checkpoint is not None:
            self.federation.journal = OpeningJournal(lambda facts, arrays: checkpoint.write(self.facts | facts, arrays))
        if saved is not None:
            self.federation.journal.read(saved)
        # Called with the display of every run, so that a status page can follow it.
        self.shown_to: Callable[[Showing], None] | None = None
        self._witness: Witness | None = None
        self._sealed = time.monotonic()
        if transport.credentials is not None:
            from fedpdmc.federation.audit_seals import Witness

            folder = None if checkpoint is None else checkpoint.folder
            self._witness = Witness(study, run, transport.credentials, folder)

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def sample(self, *, ess: float | None, duration: float | None, keep: str, progress: bool) -> Posterior:
        """Sample the study's posterior, from the start or from the stored state."""
        from fedpdmc.federation.resume import sample_study
        from fedpdmc.study.description import prior_lines

        if self._sampled and self.checkpoint is not None:
            # An earlier call was interrupted.
            self.saved = self.checkpoint.read()
        self._sampled = True
        show_prior(progress, prior_lines(self.study))
        with showing(progress, self.transport.status) as this:
            if self.shown_to is not None:
                self.shown_to(this)
            report("waiting for the sites")
            try:
                return sample_study(self, ess=ess, duration=duration, keep=keep, progress=progress)
            except KeyboardInterrupt:
                raise Interrupted(INTERRUPTED) from None

    @property
    def address(self) -> str | None:
        """The address on which the coordinator listens, if it does."""
        return getattr(self.transport, "address", None)

    def seal_logs(self) -> None:
        """Exchange seals of the sites' logs, at most once in `SEAL_SECONDS`."""
        if self._witness is not None and time.monotonic() - self._sealed > SEAL_SECONDS:
            self._exchange_seals(self._witness)
            self._sealed = time.monotonic()

    def finish(self) -> None:
        """Tell the sites that the run has ended."""
        if self._witness is not None and self.federation.sequence.any():
            # The second exchange brings the sites the signatures of the first.
            if self._exchange_seals(self._witness, last=True):
                self._exchange_seals(self._witness, last=True)
        self.federation.end_run()

    def _exchange_seals(self, witness: Witness, last: bool = False) -> bool:
        # The keys may have been renewed.
        witness.credentials = self.transport.credentials or witness.credentials
        return self.federation.exchange_seals(witness, last)

    def close(self) -> None:
        """Close the connection. The sites keep their logs and wait for the coordinator to return."""
        self.transport.close()


def connect(
    study: Study | str | Path,
    *,
    listen: str | None = None,
    keys: str | Path | None = None,
    data: Mapping[str, Any] | None = None,
    store: str | Path | None = None,
    seed: int | None = None,
    site_seeds: Mapping[str, int] | None = None,
    ledger: str | Path | None = None,
    seeded_for_tests: bool = False,
    plain_on_loopback: bool = False,
) -> Connection:
    """Connect to the sites of a study: listen for them on a network address, or run them in this process.

    Parameters
    ----------
    study : Study or path
        The contract.
    listen : str, optional
        ``host:port`` to listen on for the sites, which dial in.
    keys : path, optional
        The coordinator's folder of keys, as made by ``fedpdmc keys``.
    data : mapping, optional
        Instead of ``listen``: for each site its records' source, as `fedpdmc.study.read_records` takes it, or a pair of
        source and query. All sites are then in this process, to try out a study.
    store : path, optional
        Folder for checkpoints. A run that was killed resumes from there, with bit-identical results.
    seed : int, optional
        The coordinator's randomness; in process the sites' too.
    site_seeds : mapping, optional
        With ``data``: the sites' own seeds, as they would have them on a network.
    ledger : path, optional
        With ``data`` and a contract that has a privacy budget: the sites' ledger, in which each is a data set of its own;
        the user's own by default.
    seeded_for_tests : bool
        Accept ``site_seeds`` despite a privacy budget. Nothing is private then, and the result says so.
    plain_on_loopback : bool
        Connect without TLS; only for a loopback address.

    Returns
    -------
    Connection
        For `fedpdmc.sample`. All other settings of ``sample`` are in the contract.
    """
    if (listen is None) == (data is None):
        raise InputError("connect", "both or neither of listen and data", "Give one of them.")
    if listen is not None:
        require_posix("A coordinator")
    study = _contract(study)
    records = None if data is None else _records(study, data)

    def transport(study: Study, run: bytes, seed: int) -> Transport:
        if records is not None:
            return _in_process(study, records, site_seeds or {}, store, seed, run, ledger, seeded_for_tests)
        from fedpdmc.certificates import read_credentials
        from fedpdmc.federation.grpc.server import StreamTransport

        if plain_on_loopback == (keys is not None):
            raise InputError("keys", repr(keys), "Give the coordinator's folder of keys, or plain_on_loopback=True.")
        return StreamTransport(study, run, str(listen), None if keys is None else read_credentials(keys))

    return join(study, transport, store=store, seed=seed)


def join(
    study: Study | str | Path,
    transport: Callable[[Study, bytes, int], Transport],
    *,
    store: str | Path | None,
    seed: int | None,
) -> Connection:
    """A connection over any engine: ``transport(study, run, seed)`` connects to the sites of the run with this id."""
    study = _contract(study)
    seed = optional_seed("seed", seed)
    checkpoint = None if store is None else Checkpoint(store)
    saved = None if checkpoint is None else checkpoint.read()
    run, seed = _identity(study, checkpoint, saved, seed)
    # Before the sites are called.
    _wire_version(saved)
    return Connection(study, transport(study, run, seed), run, seed, checkpoint, saved)


def _wire_version(saved: RunState | None) -> int:
    """The wire version of a run: that of its first block. One that cannot go on here is refused, with how to finish it."""
    wire = VERSION if saved is None or "goal" not in saved.facts else saved.facts.get("wire", FIRST_STORED)
    if wire not in READABLE or wire < MEANING:
        raise InputError(
            "store",
            f"a run in wire version {wire!r}; fedpdmc {__version__} continues runs in version {MEANING} to {VERSION}",
            "Finish it with the version of fedpdmc that began it, at all parties. Upgrade between two studies.",
        )
    return wire


def _contract(study: Study | str | Path) -> Study:
    try:
        from fedpdmc.study import read_study
    except ModuleNotFoundError as error:
        raise InputError("connect", f"no module {error.name}", "Install fedpdmc[federation].") from error
    return read_study(study) if isinstance(study, (str, Path)) else study


def _records(study: Study, data: Mapping[str, Any]) -> dict[str, pd.DataFrame]:
    """The records of all sites, read before anything is written or started."""
    from fedpdmc.study.read_data import records_of_sites

    if set(data) != set(study.sites):
        raise InputError("data", f"sites {sorted(data)}", f"Give the records of {', '.join(study.sites)}.")
    told = {name: data[name] if isinstance(data[name], tuple) else (data[name], None) for name in study.sites}
    return records_of_sites(study, told)


def _identity(study, checkpoint, saved: RunState | None, seed: int | None) -> tuple[bytes, int]:
    """The run's id and seed: from the store, or new and stored before any site is asked."""
    if saved is not None:
        if not has_fields(saved.facts, {"study": bytes, "run": bytes, "seed": int}):
            raise InputError("store", "a state without study, run or seed", RESTORE)
        if saved.facts["study"] != study.digest.hex():
            raise InputError("store", "the run of another contract", "Give every study its own store.")
        if seed is not None and seed != saved.facts["seed"]:
            raise InputError("seed", repr(seed), f"The run in this store has seed {saved.facts['seed']}: leave it out.")
        return bytes.fromhex(saved.facts["run"]), int(saved.facts["seed"])
    run, seed = secrets.token_bytes(RUN_BYTES), secrets.randbits(31) if seed is None else int(seed)
    if checkpoint is not None:
        checkpoint.write({"study": study.digest.hex(), "run": run.hex(), "seed": seed, "wire": VERSION}, {})
    return run, seed


def _in_process(
    study: Study, records: Mapping[str, pd.DataFrame], seeds: Mapping[str, int], store, seed: int, run: bytes, ledger,
    seeded: bool,
) -> DirectTransport:  # fmt: skip
    from fedpdmc.federation.site_agent.start import open_agent

    keys = _trial_keys(study, store) if study.summed else {}
    agents = []
    for name in study.sites:
        folder = Path(tempfile.mkdtemp(prefix="fedpdmc-")) if store is None else Path(store) / "sites" / name
        derived = None if name in seeds else seed
        agent = open_agent(
            study, name, records[name], store=folder, seed=seeds.get(name), run_seed=derived, ledger=ledger,
            dataset=name, seeded_for_tests=seeded, credentials=keys.get(name),
        )  # fmt: skip
        agent.join(encode(Welcome(run, study.digest)))
        agents.append(agent)
    return DirectTransport(agents, temporary=store is None)


def _trial_keys(study: Study, store) -> dict[str, Credentials]:
    """Keys for sites in this process, so that secure sums work as on a network."""
    from fedpdmc.certificates import make_keys, read_credentials

    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory()) if store is None else Path(store) / "keys"
        make_keys(folder, study.sites)
        return {name: read_credentials(Path(folder) / "sites" / name) for name in study.sites}
