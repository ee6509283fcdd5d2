"""``connect``: a connection to a study's sites, on a network or in this process; runs over it, stored and resumed."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from fedpdmc.console.interrupts import Interrupted
from fedpdmc.console.progress import show_prior, showing
from fedpdmc.errors import InputError
from fedpdmc.federation.coordinator_store import Checkpoint, OpeningJournal
from fedpdmc.federation.derivative_plausibility import Plausible, doubts
from fedpdmc.federation.derivative_rounding import TOLERANCE
from fedpdmc.federation.joint_plans import JointRandomness, joint_seed
from fedpdmc.federation.messages import MEANING, READABLE, RUN_BYTES, VERSION, Welcome, encode
from fedpdmc.federation.remote import AGREEMENT, SUM, RemoteFederation, RemoteSite
from fedpdmc.federation.transport import DirectTransport, Transport
from fedpdmc.members.private_site import account_report
from fedpdmc.members.run_coordinates import local_columns
from fedpdmc.models.mixture_prior import MixturePrior
from fedpdmc.privacy.accountant import AccountStatus
from fedpdmc.privacy.gaussian_mechanism import shared_words
from fedpdmc.results.manifest import RESTORE
from fedpdmc.results.path_store import RunState
from fedpdmc.results.posterior import Posterior
from fedpdmc.results.skeleton import Block, Skeleton
from fedpdmc.sampling.api import StudyConnection
from fedpdmc.sampling.arguments import Settings
from fedpdmc.sampling.coordinator import PublicKeys
from fedpdmc.sampling.defaults import Method, choose, other_modes
from fedpdmc.sampling.driver import Goal, Sampler
from fedpdmc.sampling.engines import one_round
from fedpdmc.sampling.factory import coordinator, coordinator_key, opening
from fedpdmc.sampling.laplace_reference import search_laplace
from fedpdmc.sampling.one_shot import exact_cost, exact_words, private_laplace
from fedpdmc.sampling.run_state_arrays import pack_position, pack_reference, unpack_position, unpack_reference
from fedpdmc.sampling.vb_reference import reference_at, search_vb
from fedpdmc.validation import has_fields, optional_seed, require_posix
from fedpdmc.version import __version__
from fedpdmc.whitening import VB, Reference

INTERRUPTED = (
    "before the first block of samples was complete. With a store, connect and sample again to resume; without one a new "
    "run begins."
)
SEAL_SECONDS = 60.0  # between two exchanges of seals
FIRST_STORED = 9  # the wire version of stores that do not name theirs

if TYPE_CHECKING:
    import pandas as pd

    from fedpdmc.certificates import Credentials
    from fedpdmc.console.progress import Display
    from fedpdmc.federation.audit_seals import Witness
    from fedpdmc.study.contract import Study


@dataclass(eq=False)
class Connection(StudyConnection):
    """The sites of a study and the run that they take part in; `fedpdmc.sample` draws from it."""

    study: Study
    transport: Transport
    run: bytes
    seed: int  # the coordinator's randomness
    checkpoint: Checkpoint | None = None  # where the run is stored: every block, and the state between blocks
    saved: RunState | None = None  # the state that an earlier process has stored

    def __post_init__(self):
        study, transport, checkpoint = self.study, self.transport, self.checkpoint
        self.federation = RemoteFederation(transport, self.run, study.digest)
        self.federation.plausible = Plausible(study)
        self.federation.version = _wire_version(self.saved)
        # What every stored state says of the run.
        run = {"run": self.run.hex(), "seed": self.seed, "wire": self.federation.version}
        self.identity = {"study": study.digest.hex()} | run
        self._sampled = False
        # What each site does to the posterior, and the bits that its answers have carried.
        self.weights: dict[str, dict[str, Any]] = {}
        self.information: dict[str, float] = {}
        if checkpoint is not None:
            self.federation.journal = OpeningJournal(
                lambda facts, arrays: checkpoint.write(self.identity | facts, arrays)
            )
        if self.saved is not None:
            self.federation.journal.read(self.saved)
        # Called with the display of every run, so that a status page can follow it.
        self.shown_to: Callable[[Display], None] | None = None
        self._witness: Witness | None = None
        self._sealed = time.monotonic()
        if transport.credentials is not None:
            from fedpdmc.federation.audit_seals import Witness

            folder = None if checkpoint is None else checkpoint.folder
            self._witness = Witness(study, self.run, transport.credentials, folder)

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def sample(self, *, ess: float | None, duration: float | None, keep: str, progress: bool) -> Posterior:
        """Sample the study's posterior, from the start or from the stored state."""
        from fedpdmc.study.description import prior_lines

        if self._sampled and self.checkpoint is not None:
            # An earlier call was interrupted.
            self.saved = self.checkpoint.read()
        self._sampled, self.weights, self.information = True, {}, {}
        show_prior(progress, prior_lines(self.study))
        with showing(progress, self.transport.status) as this:
            if self.shown_to is not None:
                self.shown_to(this)
            try:
                return _sample(self, ess=ess, duration=duration, keep=keep, progress=progress)
            except KeyboardInterrupt:
                raise Interrupted(INTERRUPTED) from None

    @property
    def address(self) -> str | None:
        """The address on which the coordinator listens, if it does."""
        return getattr(self.transport, "address", None)

    def block(self, block: Block | Skeleton) -> None:
        """Store a block's knots."""
        if self.checkpoint is not None:
            self.checkpoint.append(block)

    def between_blocks(self, sampler: Sampler) -> None:
        """Have the sites' logs sealed, at most once in `SEAL_SECONDS`, and replace the stored state."""
        if self._witness is not None and time.monotonic() - self._sealed > SEAL_SECONDS:
            self._exchange_seals(self._witness)
            self._sealed = time.monotonic()
        if self.checkpoint is None or sampler.goal is None:
            return
        federation, (reference, arrays) = self.federation, pack_reference(sampler.method.reference)
        joint, accounts = federation.joint, federation.account
        facts = {
            **self.identity,
            "sequence": federation.sequence.tolist(),
            "keep": sampler.keep,
            "accounts": {name: [a.dim, a.remaining, a.numbers(), a.observed] for name, a in accounts.items()},
            "burn_in": sampler.burn_in_time,
            "goal": list(sampler.goal),
            "reference": reference,
            "weights": self.weights,
            "joint": joint and [[x.hex() for x in part] for part in (joint.seeds, joint.evidence, joint.publics)],
        }
        position = pack_position(sampler.position()) | {"bytes": np.asarray(federation.bytes)}
        self.checkpoint.write(facts, arrays | position)

    def status(self) -> str:
        """The state of the sites' connections and privacy budgets."""
        spent = [f"{one.site} {100 * one.spent:.3g} %" for one in self.federation.accounts]
        words = [self.transport.status(), *(["privacy spent: " + ", ".join(spent)] if spent else [])]
        return "; ".join(word for word in words if word)

    def privacy(self) -> dict[str, Any] | None:
        """The privacy account of every site, from its answers; None without a budget."""
        study, account = self.study, self.federation.account
        budgets = {name: study.budget(site=name) for name in account}
        # Only the site knows the data set's name in its ledger.
        where = {"dataset": None, "study": study.name, "run": self.run.hex()}
        reports = {
            name: account_report(account[name], budget, study.dynamics()) | where
            for name, budget in budgets.items()
            if budget is not None
        }
        return reports or None

    def facts(self) -> dict[str, Any]:
        """Which study and run this is, and what its sites do to the posterior."""
        from fedpdmc.study.description import effect_scale, prior_lines

        study = self.study
        known = {"study": study.name, "contract": study.digest.hex(), "run": self.run.hex()}
        known |= {"prior": prior_lines(study), "effect_scale": effect_scale(study), "information": self.information}
        return known | {"influence": self.weights, "doubts": doubts(self.weights)}

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
    sources = {name: data[name] if isinstance(data[name], tuple) else (data[name], None) for name in study.sites}
    return records_of_sites(study, sources)


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


# A run -----------------------------------------------------------------------------------------------------------------


def _sample(
    connection: Connection, *, ess: float | None, duration: float | None, keep: str, progress: bool
) -> Posterior:
    """``ess`` or ``duration`` replace those of the contract. Its limits still apply."""
    study, saved, federation = connection.study, connection.saved, connection.federation
    federation.rewind()
    if study.one_shot:
        return _one_shot(connection, ess, duration)
    if ess is None and duration is None:
        ess, duration = study.ess, study.duration
    if saved is not None and "goal" not in saved.facts:
        # Killed in its opening, which the journal has.
        saved = None
    if saved is not None:
        check_state(study, saved)
        if saved.facts["keep"] != keep:
            remedy = f"The run in this store was started with keep={saved.facts['keep']!r}."
            raise InputError("keep", repr(keep), remedy)
    method = _method(connection, saved, keep)
    if federation.plausible is not None:
        connection.weights = federation.plausible.weigh_sites() if saved is None else saved.facts.get("weights", {})
    federation.flips, federation.private = study.dynamics().flips, study.epsilon is not None
    elsewhere = method.sites[: len(federation.names)]
    federation.columns = [local_columns(site, opening(method, site)) for site in elsewhere]
    federation.needs_time = study.effects is not None
    burn_in = method.burn_in(study.burn_in, duration) if saved is None else saved.facts["burn_in"]
    if study.sites_plan:
        federation.joint = JointRandomness(study, connection.seed)
        method = _without_starts(method, study)
    if saved is None:
        summed = study.derivatives == "summed"
        control = [method.control.get(SUM if summed else name) for name in federation.names]
        # A site that is not in every round also gets the last velocity, for the time after the plan.
        segments = method.segments + one_round.applies(federation.columns, coordinator(method))
        federation.open(method.reference, control, method.chains, segments, summed, _turn_key(study, method), -burn_in)
    else:
        federation.turning = method.dynamics.turns
        if federation.joint is not None:
            federation.joint.seeds, federation.joint.evidence, *publics = _unpack_joint(saved)
            federation.joint.publics = publics[0] if publics else ()
        # The sites' budgets as they were last reported.
        accounts = saved.facts["accounts"].items()
        federation.account = {name: AccountStatus.from_numbers(name, *one) for name, one in accounts}
    if federation.joint is not None:
        method = method.replace(seed=joint_seed(federation.joint.seeds))
    sampler = Sampler(method, burn_in, keep, connection)
    if saved is not None:
        _restore(sampler, connection, saved)
        if not sampler.resume(progress):
            return sampler.posterior()
    else:
        sampler.check_budget(burn_in + (duration or 0.0))
        if burn_in > 0:
            sampler.burn_in(progress, duration, ess)
    connection.saved = None
    post = sampler.to_length(duration, ess, progress)
    asked = 0 if saved is None else np.asarray(saved.facts["sequence"])
    if study.epsilon is None and (federation.sequence > asked).any():
        connection.information = post.settings["information"] = federation.information()
    if federation.plausible is not None:
        federation.plausible.check_posterior(post.mean(), np.sqrt(np.diag(post.cov())))
    return post


def _without_starts(method: Method, study: Study) -> Method:
    """The method of a run whose plans sites make: they know the reference, and its chains start from it."""
    if study.control == "quadratic" and method.dynamics.flow.rotating and method.public is not None:
        remedy = "The sites cannot make the plans of such a run: use kind = 'ZigZag' with reference = 'none'."
        raise InputError("study.toml: dynamics", "rotations, and a posterior whose curvature is not positive", remedy)
    return method.replace(reference=dataclasses.replace(method.reference, starts=None))


def _unpack_joint(saved: RunState) -> list[tuple[bytes, ...]]:
    return [tuple(bytes.fromhex(x) for x in part) for part in saved.facts["joint"]]


def _turn_key(study: Study, method: Method) -> np.ndarray | None:
    """The public key of the turns; empty if it follows from the seeds of all parties."""
    if not method.dynamics.turns:
        return None
    if study.sites_plan:
        return np.zeros(0, np.uint32)
    return np.asarray(jax.random.key_data(PublicKeys.turn_key(coordinator_key(method))), np.uint32)


def _one_shot(connection: Connection, ess: float | None, duration: float | None) -> Posterior:
    """Draws from noisy derivatives at four points. Repeated requests get the same answers at no charge."""
    if ess is not None or duration is not None:
        remedy = "The contract's method is 'private-laplace', which has neither: omit them."
        raise InputError("ess or duration", "a number", remedy)
    study, federation = connection.study, connection.federation
    post = private_laplace(_members(connection), study.prior(), study.names, connection.seed)
    post.privacy, post.settings = connection.privacy(), post.settings | connection.facts()
    post.settings["sites"] = list(federation.names)
    costs, scale = [], np.linalg.cholesky(post.cov())
    for site in study.sites:
        own = study.coordinates(site)
        rows = scale if own is None else scale[own]
        if (facts := study.model.facts(len(rows))) is not None:
            costs.append(exact_cost(facts, study.budget(site=site), rows, len(study.sites)))
    if costs:
        post.settings["chosen"] += exact_words(min(costs))
    if study.derivatives == "noisy-summed":
        post.settings["chosen"] += f" {shared_words(len(study.sites), study.colluding or 0)}"
        post.rounds += AGREEMENT
    post.bytes, post.messages = np.array(federation.bytes), 2 * np.array(federation.sequence)
    return post


def _members(connection: Connection) -> list[RemoteSite]:
    study, federation = connection.study, connection.federation
    budget = study.budget() if study.noisy else None
    bounds = None if budget is None else budget.bounds
    if study.derivatives == "noisy-summed":
        # Only the sum of all sites is known.
        together = RemoteSite(federation, None, len(study.names), bounds)
        together.naming, together.several_modes = study.naming, _may_have_several_modes(study)
        return [together]
    own = [study.coordinates(name) for name in federation.names]
    federation.coordinates = [None if one is None else np.asarray(one) for one in own]
    members = [
        RemoteSite(federation, index, len(study.names), bounds, study.coordinates(name))
        for index, name in enumerate(federation.names)
    ]
    for site in members:
        site.guess, site.naming = study.guess, study.naming
        site.latents, site.spreads = int(study.effects is not None), _spreads(study)
        site.several_modes = _may_have_several_modes(study)
    return members


def _may_have_several_modes(study: Study) -> bool:
    """Whether other modes are worth a search: regressions of the other families have one."""
    return study.family in ("file", "student_t")


def _spreads(study: Study) -> tuple[int, ...]:
    """The places of log spreads among the parameters."""
    return () if study.effects is None else study.effects.spreads(len(study.names))


def _method(connection: Connection, saved: RunState | None, keep: str) -> Method:
    study, federation, members = connection.study, connection.federation, _members(connection)
    reference: Any = "identity" if study.reference == "none" else study.reference
    if saved is not None:
        reference = unpack_reference(saved.facts["reference"], saved.arrays)
    elif study.reference != "none" and study.derivatives == "summed":
        together: Any = [RemoteSite(federation, None, len(study.names))]
        together[0].guess, together[0].spreads = study.guess, _spreads(study)
        together[0].several_modes = _may_have_several_modes(study)
        found = _mode(federation, together, study)
        asked = dict.fromkeys(federation.names, 0)
        reference = dataclasses.replace(found, rounds=found.rounds + AGREEMENT, bytes=asked)
    elif study.reference != "none" and study.derivatives == "own":
        reference = _mode(federation, members, study)
    settings = Settings(
        sites=members, prior=study.prior(), dynamics=study.dynamics(), reference=reference, control=study.control,
        chains=study.chains, seed=connection.seed, keep=keep, names=study.names,
    )  # fmt: skip
    return choose(settings)


def _mode(federation: RemoteFederation, members: Any, study: Study) -> Reference:
    """The reference, of derivatives on the grid of releases."""
    words = members, study.prior(), TOLERANCE, None, study.reach, study.names
    found, x, spread = (
        search_vb(*words, bend=True, points=study.most_derivatives) if study.reference == VB else search_laplace(*words)
    )
    before = int(federation.sequence.max())
    modes = None
    if study.derivatives == "own":
        # With secure sums a site that declines a point leaves masks that do not cancel.
        with federation.explore():
            modes, _ = other_modes(members, study.prior(), found, points=study.most_derivatives - before)
    made = reference_at(members, study.prior(), x, spread, study.names, found)
    if federation.plausible is not None and len(members) > 1:
        for doubt in doubts(federation.plausible.weigh_sites()):
            warnings.warn(doubt, stacklevel=2)
    traffic = {name: size + (made.bytes or {}).get(name, 0) for name, size in (found.bytes or {}).items()}
    # Sites are not asked again for what they have answered last.
    again = int(federation.sequence.max()) - before
    return dataclasses.replace(made, rounds=found.rounds + again, bytes=traffic, modes=modes)


def check_state(study: Study, saved: RunState) -> None:
    """Refuse a stored state that is not one of this study, before anything is done with it."""
    chains, dim = study.chains, len(study.names)
    facts = saved.facts
    try:
        reference, position = unpack_reference(facts["reference"], saved.arrays), unpack_position(saved.arrays)
        state, goal, begun = position.chains, Goal(*facts["goal"]), facts["burn_in"]
        good = facts["keep"] in ("skeleton", "draws") and all(np.isfinite([*goal, begun]))
        good = good and reference.center.shape == (dim,) and reference.scale_tril.shape in ((dim,), (dim, dim))
        good = good and all(one.shape == (chains, dim) for one in (state.a, state.v)) and position.rounds >= 0
        good = good and all(one.shape == (chains,) for one in (state.t, state.number, state.events))
        prior = study.prior()
        held = prior.law.start(chains).shape if isinstance(prior, MixturePrior) else ()
        good = good and (() if state.scales is None else state.scales.shape) == held
        if study.sites_plan:
            good = good and len(_unpack_joint(saved)[0]) == len(study.sites) + 1
        good = good and np.shape(facts["sequence"]) == np.shape(saved.arrays["bytes"]) == (len(study.sites),)
        for name, one in facts["accounts"].items():
            AccountStatus.from_numbers(name, *one)
    except Exception as error:
        # The state was written by someone else: arrays and facts may be anything.
        raise InputError("store", f"a state that cannot be read ({type(error).__name__})", RESTORE) from error
    if not good:
        raise InputError("store", "a state that is not one of this study", RESTORE)


def _restore(sampler: Sampler, connection: Connection, saved: RunState) -> None:
    """Restore a sampler from the stored state."""
    assert connection.checkpoint is not None
    sampler.restore(unpack_position(saved.arrays))
    sampler.goal = Goal(*saved.facts["goal"])
    connection.checkpoint.fill(sampler.store)
    connection.federation.sequence = np.asarray(saved.facts["sequence"], dtype=np.int64)
    connection.federation.bytes = saved.arrays["bytes"]
    # A prior that the coordinator walks with comes after the sites.
    connection.federation.passes = saved.arrays["passes"][: len(connection.federation.names)]
