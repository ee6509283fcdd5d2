"""The site's side of a study: checks every request against contract, policy and log, and answers it once.

An agent turns one message into another and knows nothing of how messages travel: every engine carries the same bytes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import jax.numpy as jnp
import numpy as np

from fedpdmc._jax.precision import double_precision
from fedpdmc._jax.random_streams import chain_keys
from fedpdmc.certificates.keys import Credentials
from fedpdmc.clocks import VIOLATED
from fedpdmc.errors import InputError, LedgerError, Refused, WireError
from fedpdmc.federation import messages
from fedpdmc.federation.derivative_rounding import rounded
from fedpdmc.federation.masking import OutOfRange
from fedpdmc.federation.seals import Sealing
from fedpdmc.federation.site_agent import versions
from fedpdmc.federation.site_agent.audit_log import Journal, Kind
from fedpdmc.federation.site_agent.disclosure import Control
from fedpdmc.federation.site_agent.request_checks import DECLINED, ROUNDING, No, Progress, charging, check, declining
from fedpdmc.federation.site_agent.secure_sum import Party, Unproved
from fedpdmc.federation.site_agent.trust_region import Region
from fedpdmc.federation.site_agent.walks import MOST_SECONDS, TooMuchWork, walked
from fedpdmc.plan import Plan
from fedpdmc.potentials import ControlVariate, Quadratic
from fedpdmc.sites.noisy_derivatives import noisy_derivatives
from fedpdmc.sites.private_site import PrivateSite
from fedpdmc.sites.site import Opening, Site, open_site
from fedpdmc.study import Study
from fedpdmc.version import __version__
from fedpdmc.whitening import Reference

logger = logging.getLogger("fedpdmc.site")
SOFTWARE = f"fedpdmc {__version__}"
# A coordinator stops when it is refused. One that is refused so often, with no new answer in between, is broken or hostile.
MOST_REFUSALS = 20
# Of a longer request that is refused unseen, the log has no more than its hash and how it begins.
MOST_KEPT, BEGINNING = 4096, 1024
REFUSED_REQUEST = "refused request"

REQUESTS = (messages.Derive, messages.Open, messages.Plans, messages.Offer, messages.Agree)


@dataclass
class Contact:
    """A site's coordinator: connected or not, asking or not, when it was last heard, what the last answer took."""

    connected: bool = False
    working: bool = False
    heard: float = field(default_factory=time.monotonic)
    seconds: float | None = None


class Agent:
    """A site's records behind a contract.

    Parameters
    ----------
    study : Study
    site : Site
        With its own seed.
    journal : Journal
        The log, with whatever was answered before.
    run_seed : int
        For a site without a seed of its own, in the coordinator's process.
    party : Party, optional
        Its part in secure sums, where the contract has derivatives summed.
    credentials : Credentials, optional
        Its keys, with which it signs what its log has come to.
    control : Control, optional
        Decides at which points derivatives without noise are told; None: at all, as in the coordinator's own process.
    region : Region, optional
        Decides in which coordinates plans are answered, and how far out; likewise.
    most_seconds : float
        How long it works on one plan.
    """

    def __init__(
        self,
        study: Study,
        site: Site,
        journal: Journal,
        run_seed: int = 0,
        party: Party | None = None,
        credentials: Credentials | None = None,
        control: Control | None = None,
        most_seconds: float = MOST_SECONDS,
        region: Region | None = None,
    ):
        self.study, self.site, self.journal, self._run_seed, self.party = study, site, journal, run_seed, party
        self._control, self.most_seconds = control, most_seconds
        self._region = region
        self.run: bytes | None = None
        self._clock, self._keys = None, None
        self._private: PrivateSite | None = None
        self._shape = (0, 0, len(study.names))
        self._next = np.zeros(0, dtype=np.int64)
        self.observed_time, self.finished, self.contact = 0.0, False, Contact()
        # Since the last new answer: refusals, and answers given again.
        self.refusals, self._again = 0, 0
        self.passes, self._rounds = 0, 0
        # The points at which derivatives were told, and how many were declined.
        self._points: list[np.ndarray] = []
        self._declined, self._told_exactly = 0, False
        # The hash of a request that is in the log while its answer is not.
        self._working_on: bytes | None = None
        self.sealing = Sealing(journal, study, site.name, credentials)
        self._recall()

    @double_precision
    def _recall(self) -> None:
        """Come back to where the log ends, and write down with what it goes on if that is new."""
        request, last = None, None
        for entry in self.journal.entries():
            last = versions.written(entry) or last
            if entry.kind is Kind.NOTE:
                self.sealing.recall(entry.note)
            if entry.kind is Kind.NOTE and entry.note["event"] == "joined":
                if entry.note["study"] != self.study.digest.hex():
                    raise InputError("store", "the log of another contract", "Give every study a store of its own.")
                if entry.note["site"] != self.site.name:
                    raise InputError(
                        "store", f"the log of site {entry.note['site']!r}", "Give every site its own store."
                    )
                self.run = bytes.fromhex(entry.note["run"])
            elif entry.kind is Kind.REQUEST:
                request = entry.payload
            elif entry.kind is Kind.REFUSAL:
                self.refusals += 1
                self._declined += getattr(versions.logged(entry.payload, last), "code", "") in DECLINED
            elif entry.kind is Kind.ANSWER and request is not None:
                self.refusals = 0
                self.absorb(*(versions.logged(data, last) for data in (request, entry.payload)))
            self._working_on = messages.digest(entry.payload) if entry.kind is Kind.REQUEST else None
        self._check_ledger()
        if last != (present := versions.present()):
            self.journal.note(versions.EVENT, **present)

    def _check_ledger(self) -> None:
        """What the log says was answered under a budget must be on the ledger: one that lacks it is new, or an old copy."""
        budget = self.site.budget
        if budget is None or self.run is None:
            return
        ledger, _ = budget.open()
        run = f"{self.run.hex()}/{self.site.name}"
        rounds = ledger.answers(budget.account_name, budget.study, run)
        released = ledger.releases(budget.account_name)
        if rounds < self._rounds or released < len(self._points):
            raise LedgerError(
                f"{ledger.path} has {rounds} answers and {released} releases of a run of which {self.journal.folder} has "
                f"{self._rounds} and {len(self._points)}: it is not the ledger that they were charged to, or an older "
                "copy of it. Put that ledger back."
            )

    @property
    def privacy_spent(self) -> float | None:
        """The share of the account that all studies have spent; None without a budget, or before it is known."""
        return None if self._private is None else float(self._private.status.spent)

    def progress(self) -> str:
        """How much of what the contract allows has been asked."""
        study, spent = self.study, ""
        if self._private is not None:
            spent = f"; {100 * self._private.status.spent:.3g} % of the privacy budget spent"
        return (
            f"answered {self.journal.answers:,} of at most {study.rounds:,} requests; observed process time "
            f"{self.observed_time:,.4g} of at most {study.observed_time:,.4g}{spent}"
        )

    def hello(self, nonce: bytes = messages.NOTHING_ASKED) -> bytes:
        """The first message to the coordinator, with bytes for it to sign."""
        return messages.encode(messages.Hello(self.site.name, self.study.digest, SOFTWARE, nonce))

    def join(self, data: bytes) -> None:
        """Take the coordinator's welcome, or raise `Refused`."""
        try:
            message = messages.decode(data)
        except WireError as error:
            raise self._no_join("MALFORMED") from error
        if isinstance(message, messages.Refusal):
            raise Refused(self.site.name, message.code, "The coordinator refused this site.")
        if not isinstance(message, messages.Welcome):
            raise self._no_join("NOT_WELCOMED")
        if message.study != self.study.digest:
            raise self._no_join("OTHER_CONTRACT")
        if self.run is not None and message.run != self.run:
            raise self._no_join("OTHER_RUN")
        if self.run is None:
            self.run = message.run
            self.journal.note("joined", run=message.run.hex(), study=message.study.hex(), site=self.site.name)

    def _no_join(self, code: str) -> Refused:
        self.journal.note("refused", code=code)
        return Refused(self.site.name, code, "This site does not take part: its log has the details.")

    @double_precision
    def answer(self, data: bytes) -> bytes:
        """The answer to a request, or a refusal; stored before it is returned."""
        asked, sequence = messages.digest(data), 0
        try:
            message = messages.decode(data)
            sequence = getattr(message, "sequence", 0)
            stored = self._stored(message, asked)
            return stored if stored is not None else self._fresh(message, data, asked)
        except WireError as error:
            logger.warning("refused a message of the coordinator: %s", error)
            return self._refuse(data, asked, sequence, No("MALFORMED"))
        except No as no:
            logger.warning("refused request %d of the coordinator: %s", sequence, no.code)
            return self._refuse(data, asked, sequence, no)

    def _refuse(self, data: bytes, asked: bytes, sequence: int, no: No) -> bytes:
        """Log a request that is refused, and the refusal."""
        if self.refusals >= MOST_REFUSALS:
            # What the log ends with is enough to see why: a coordinator that goes on like this cannot fill the disk.
            raise Refused(
                self.site.name,
                "TOO_MANY_REFUSALS",
                f"The coordinator was refused {MOST_REFUSALS} times with no answer in between, the last time for {no.code}: "
                f"this site stops. `fedpdmc audit show {self.journal.folder}` shows what it asked; start the site again, "
                "with the same store, when whoever runs the coordinator has mended it.",
            )
        refusal = messages.encode(
            messages.Refusal(self.run or bytes(messages.RUN_BYTES), sequence, asked, no.code, no.chain)
        )
        try:
            if self._working_on != asked:
                self._keep_refused(data, asked, no.code)
            self.journal.append(Kind.REFUSAL, refusal)
            self.refusals += 1
        except OSError as error:
            logger.error("the audit log cannot be written: %s", error)
        self._working_on = None
        self._declined += no.code in DECLINED
        return refusal

    def _keep_refused(self, data: bytes, asked: bytes, code: str) -> None:
        """A request on which nothing was done: whole if it is short, else what it was and how it begins."""
        if len(data) <= MOST_KEPT:
            self.journal.append(Kind.REQUEST, data)
            return
        claimed = messages.KINDS.get(data[messages.HEADER.size - 1]) if data.startswith(messages.MAGIC) else None
        kind, begins = "unknown" if claimed is None else claimed.__name__, data[:BEGINNING].hex()
        self.journal.note(REFUSED_REQUEST, code=code, kind=kind, bytes=len(data), sha256=asked.hex(), begins=begins)

    def _stored(self, message: messages.Message, asked: bytes) -> bytes | None:
        """The answer given before to this very request; None if it is new."""
        if not isinstance(message, (*REQUESTS, messages.Farewell, messages.Attest)):
            raise No("NOT_A_REQUEST")
        if message.run != self.run:
            raise No("OTHER_RUN")
        if isinstance(message, messages.Farewell):
            return self._part(message, asked)
        if isinstance(message, messages.Attest):
            return self._attest(message, asked)
        if message.sequence < 1 or message.sequence > self.journal.answers + 1:
            raise No("OUT_OF_ORDER")
        if message.sequence == self.journal.answers + 1:
            return None
        stored = self.journal.answer(message.sequence - 1)
        if messages.decode(stored).request != asked:  # type: ignore[attr-defined]
            raise No("SAME_ROUND_OTHER_PLAN")
        self._again += 1
        if not self._again & (self._again - 1):
            # The first, second, fourth, ... since the last new answer: who asks for ever does not fill the disk.
            self.journal.note("again", sequence=message.sequence, times=self._again)
        return stored

    def _fresh(self, message: messages.Message, data: bytes, asked: bytes) -> bytes:
        check(self.study, message, self._progress())
        handlers = (self._derive, self._open, self._plans, self._offer, self._agree)
        work: dict[type, Callable[..., messages.Message]] = dict(zip(REQUESTS, handlers, strict=True))
        # Written down before anything is done about it: a request that breaks the site is in the log too. Of a coordinator
        # that was refused too often only what is answered is written down.
        suspect = self.refusals >= MOST_REFUSALS
        if self._working_on != asked and not suspect:
            self._store(Kind.REQUEST, data)
        self._working_on = asked
        answer = work[type(message)](message, asked)
        out = messages.encode(answer)
        if suspect:
            self._store(Kind.REQUEST, data)
        self._store(Kind.ANSWER, out)
        self._working_on, self.refusals, self._again = None, 0, 0
        self.absorb(message, answer)
        return out

    def _progress(self) -> Progress:
        party = self.party
        shape, unit_speed = (self._shape, self.study.dynamics().unit_speed) if self._shape[0] else (None, False)
        agreed = party is not None and party.agreed
        # After the exact ones there are no more.
        points = self.study.most_derivatives if self._told_exactly else len(self._points) + self._declined
        return Progress(party is not None, agreed, points, shape, unit_speed, self._next, self.observed_time)

    def _store(self, kind: Kind, data: bytes) -> None:
        try:
            self.journal.append(kind, data)
        except OSError as error:
            logger.error("the audit log cannot be written, so no answer is given: %s", error)
            raise No("STORAGE") from error

    def _offer(self, message: messages.Offer, asked: bytes) -> messages.Offered:
        assert self.party is not None
        return self.party.offer(message, asked)

    def _agree(self, message: messages.Agree, asked: bytes) -> messages.Opened:
        assert self.party is not None
        try:
            self.party.check(message)
        except Unproved as error:
            logger.error("secure sums: %s", error)
            raise No("KEY_NOT_PROVED") from error
        return messages.Opened(message.run, message.sequence, asked)

    def _derive(self, message: messages.Derive, asked: bytes) -> messages.Derivatives | messages.Masked:
        if self.site.budget is not None:
            # The value is not released: it is not needed, and would cost more noise.
            with charging():
                gradient, hessian, *_ = noisy_derivatives(self.site, message.x, len(self._points))
            return messages.Derivatives(message.run, message.sequence, asked, 0.0, gradient, hessian)
        if self._control is not None:
            with declining():
                self._control.check(message.x, self._own(message.x), self._points)
        value, gradient, hessian = self.site.derivatives(message.x)
        if not (np.isfinite(value) and np.isfinite(gradient).all() and np.isfinite(hessian).all()):
            raise No("NOT_FINITE")
        if not self._asked_again(message.x):
            value, gradient, hessian = rounded(value, gradient, hessian)
        if self.party is None:
            return messages.Derivatives(message.run, message.sequence, asked, value, gradient, hessian)
        try:
            return self.party.masked(message, asked, value, gradient, hessian)
        except OutOfRange as error:
            logger.error("%s Declare the columns with a center and a scale.", error)
            raise No("OUT_OF_RANGE") from error

    def _asked_again(self, x: np.ndarray) -> bool:
        """Whether this is the last point once more: its derivatives are then told exactly, and none after that."""
        return bool(self._points) and np.array_equal(self._points[-1], self._own(x))

    def _own(self, x: np.ndarray) -> np.ndarray:
        return np.array(x if self.site.coordinates is None else x[self.site.coordinates])

    def _open(self, message: messages.Open, asked: bytes) -> messages.Opened:
        if self.site.budget is None:
            self._check_opening(message)
            return messages.Opened(message.run, message.sequence, asked)
        with charging():
            guard = self._guard(message)
        status = guard.status
        return messages.Opened(message.run, message.sequence, asked, status.remaining, np.asarray(status.numbers()))

    def _check_opening(self, message: messages.Open) -> None:
        if self._region is None or self.study.reference == "none":
            return
        point = self._points[-1] if self._told_exactly else None
        at = np.zeros(len(self.study.names)) if point is None else point
        _, gradient, hessian = self.site.derivatives(at)
        with declining():
            self._region.check_opening(message, point, gradient, hessian)

    def _guard(self, message: messages.Open) -> PrivateSite:
        """The site under its budget, charged to this run."""
        if self._private is None:
            self._private = PrivateSite(self.site, self._opening(message), message.run.hex())
        return self._private

    def _opening(self, message: messages.Open) -> Opening:
        """What the site is told at the start, with its own control variate where only the sum of all is public."""
        reference = Reference(jnp.asarray(message.center), jnp.asarray(message.scale))
        control = None
        if message.order and self.party is not None:
            _, gradient, hessian = self.site.derivatives(message.point)
            control = self.party.control(message.point, message.order, gradient, hessian)
        elif message.order:
            quadratic = Quadratic(jnp.asarray(message.precision), jnp.asarray(message.linear))
            control = ControlVariate(quadratic, jnp.asarray(message.point), message.order)
        return Opening(reference, self.study.dynamics(), control)

    def _plans(self, message: messages.Plans, asked: bytes) -> messages.Arrivals:
        clock, keys, chain = self._clock, self._keys, message.chain
        chains, segments, dim = self._shape
        plan = _whole(message, chains, segments)
        if self._private is not None:
            return self._privately(message, Plan(*(jnp.asarray(x) for x in plan)), asked)
        assert clock is not None and keys is not None
        if self._region is not None:
            with declining():
                self._region.check_plans(message)
        try:
            arrival, walk = walked(clock, keys, plan, self.site.records, self.most_seconds)
        except TooMuchWork as error:
            logger.error("a plan took more than %g seconds to walk: it is refused", self.most_seconds)
            raise No("TOO_MUCH_WORK") from error
        faults = np.flatnonzero(np.asarray(walk.fault))
        if faults.size:
            first = int(faults[0])
            raise No("BOUND_VIOLATED" if int(walk.fault[first]) == VIOLATED else "NOT_FINITE", first + 1)
        horizon = message.duration.sum(-1)
        time, rang, mark = (np.asarray(x)[chain] for x in (arrival.time, arrival.rang, arrival.mark))
        if self.observed_time + np.minimum(time, horizon).sum() > self.study.observed_time * (1 + ROUNDING):
            raise No("OBSERVED_TIME_SPENT")
        flips = clock.dynamics.flips
        coordinate, normal = (mark, np.zeros((0, dim))) if flips else (np.zeros(0, int), mark)
        passes = self.passes + int(np.asarray(walk.passes).sum()) if self.study.passes else 0
        return messages.Arrivals(message.run, message.sequence, asked, time, rang, coordinate, normal, passes=passes)

    def _privately(self, message: messages.Plans, plan: Plan, asked: bytes) -> messages.Arrivals:
        """An arrival that the ledger has charged, and what the budget still covers."""
        assert self._private is not None
        with charging():
            arrival = self._private.answer(plan, message.sequence)
        found = (np.asarray(x) for x in (arrival.time, arrival.rang, arrival.mark))
        time, rang, mark = (x[message.chain] for x in found)
        status, none = self._private.status, np.zeros((0, plan.start.shape[1]))
        account = (status.remaining, status.observed, status.spent)
        return messages.Arrivals(message.run, message.sequence, asked, time, rang, mark, none, *account)

    def _attest(self, message: messages.Attest, asked: bytes) -> bytes:
        """What the log has come to, signed."""
        try:
            return self.sealing.answer(message, asked)
        except OSError as error:
            logger.error("the audit log cannot be written, so nothing is sealed: %s", error)
            raise No("STORAGE") from error

    def _part(self, message: messages.Farewell, asked: bytes) -> bytes:
        """A farewell has no place in the sequence: the run may be taken up again after it."""
        self.finished = True
        self.journal.note("farewell")
        return messages.encode(messages.Opened(message.run, message.sequence, asked))

    @double_precision
    def adopt(self, request: bytes, answer: bytes) -> None:
        """Take a request with its answer as they were once logged."""
        self.journal.append(Kind.REQUEST, request)
        self.journal.append(Kind.ANSWER, answer)
        self.absorb(messages.decode(request), messages.decode(answer))

    def absorb(self, message: messages.Message, given: messages.Message) -> None:
        """What an answered request changes for those after it; the same live and from the log."""
        if isinstance(message, messages.Open):
            self._next = np.zeros(message.chains, dtype=np.int64)
            if self.site.budget is not None:
                # The records are touched when a plan has been charged, and not before.
                self._shape = (message.chains, message.segments, self._guard(message).dim)
                return
            if self._region is not None:
                self._region.opened(message)
            self._clock = open_site(self.site, self._opening(message))
            self._shape = (message.chains, message.segments, self._clock.dim)
            self._keys = chain_keys(self.site.key(self._run_seed), message.chains)
        elif isinstance(message, messages.Agree) and self.party is not None:
            self.party.absorb(message)
        elif isinstance(message, messages.Derive):
            self._told_exactly = self._asked_again(message.x) and self.site.budget is None
            self._points.append(self._own(message.x))
        elif isinstance(message, messages.Plans) and isinstance(given, messages.Arrivals):
            self.passes, self._rounds = given.passes, self._rounds + 1
            horizon = message.duration.sum(-1)
            self._next[message.chain] = np.where(horizon > 0, message.number + 1, self._next[message.chain])
            self.observed_time += float(np.minimum(given.time, horizon).sum())


def _whole(message: messages.Plans, chains: int, segments: int) -> tuple[np.ndarray, ...]:
    """The arrays of a `Plan` with nothing for the chains that are not asked about, in the shapes that were opened."""
    rows, longest, dim = message.velocity.shape
    number, start = np.zeros(chains, dtype=np.int64), np.zeros((chains, dim))
    duration, velocity = np.zeros((chains, segments)), np.zeros((chains, segments, dim))
    number[message.chain], start[message.chain] = message.number, message.start
    duration[message.chain, :longest], velocity[message.chain, :longest] = message.duration, message.velocity
    return number, start, duration, velocity
