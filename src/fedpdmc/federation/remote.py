"""The coordinator's side of a study: requests to every site and their answers, over any engine that carries bytes."""

from __future__ import annotations

import abc
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedpdmc.errors import BadAnswer, BoundViolation, BudgetSpent, LimitReached, NotFinite, Refused, WireError
from fedpdmc.federation import masking, messages
from fedpdmc.federation.early_arrivals import Haste
from fedpdmc.federation.plausibility import Plausible
from fedpdmc.plan import Arrival, Plan
from fedpdmc.potentials import ControlVariate
from fedpdmc.privacy.account_status import AccountStatus
from fedpdmc.privacy.bounds import Bounds
from fedpdmc.sampling.engines.base import Federation
from fedpdmc.sites.member import Member
from fedpdmc.whitening import Reference

if TYPE_CHECKING:
    from fedpdmc.certificates.keys import Credentials
    from fedpdmc.federation.seals import Witness

# Times are sums of durations and normals are divided by their length: both round.
ROUNDING = 1e-9
# Of a Hessian: its entries, and how far it may be from symmetric by rounding.
LARGEST, SYMMETRIC = 1e150, 1e-6
LIMITS = ("TOO_MANY_ROUNDS", "OBSERVED_TIME_SPENT")
# What those who run the site can do about it, where its policy decides.
REMEDIES = {
    "FEW_RECORDS": (
        "Too few of its records carry what was asked: it has too few for its policy's least_records and largest_share. "
        "Its own log names the key.",
    ),
    "TOO_FAR": ("What was asked lies further from the prior's mean than its policy's farthest: is the prior right?",),
    "TOO_MANY_DERIVATIVES": ("The search for the mode takes more points than the contract's [limits] derivatives.",),
}
# The name under which all sites together go where only sums are known; no site can have it.
SUM = "/sum"
# Rounds in which the sites agree on their masks.
AGREEMENT = 2


class Request:
    """A message to a site; its hash, under which the answer is stored, is made once, when it is first asked for."""

    def __init__(self, data: bytes):
        self.data = data

    @classmethod
    def of(cls, message: messages.Message) -> Request:
        """A message as it is sent."""
        return cls(messages.encode(message))

    @functools.cached_property
    def digest(self) -> bytes:
        """The hash."""
        return messages.digest(self.data)


class SiteState(NamedTuple):
    """How a site stands with its coordinator: times in seconds, None where there is nothing yet."""

    name: str
    connected: bool
    since_seconds: float
    round_trip_seconds: float | None
    waited_seconds: float | None


class Transport(abc.ABC):
    """An engine that brings one message to each site and one answer back from each.

    A site that is lost is waited for; the identical message is then sent again. Neither side ever gives up on a round:
    how long a site takes depends on its answer, so that doing something else instead would bias the run.
    """

    @property
    @abc.abstractmethod
    def names(self) -> tuple[str, ...]:
        """The sites' names, in the order of messages and answers."""

    @abc.abstractmethod
    def ask(self, requests: Sequence[Request | None]) -> list[bytes | None]:
        """Send ``requests[m].data`` to site m and wait for all answers; a site whose request is None is not asked."""

    def part(self, requests: Sequence[Request]) -> list[bytes | None]:
        """Send every site its farewell; an engine that keeps streams open need not wait for ever for those that are gone."""
        return self.ask(requests)

    @property
    def credentials(self) -> Credentials | None:
        """The coordinator's keys, where this engine has them."""
        return None

    def status(self) -> str:
        """A few words on the sites; none where there is nothing to say."""
        return ""

    def states(self) -> list[SiteState]:
        """How each site stands, where the engine knows."""
        return []

    @abc.abstractmethod
    def close(self) -> None:
        """Let go of the sites."""


class RemoteFederation(Federation):
    """Sites that answer messages, wherever they are.

    Parameters
    ----------
    transport : Transport
    run : bytes
        The run's id, 16 bytes.

    Attributes
    ----------
    sequence : (sites,)
        Number of the last request that each site has answered; a run that is resumed goes on from there.
    columns : list
        The coordinates that each site is sent, None for all; set before the first plan.
    plausible : Plausible or None
        What derivatives can be, by the contract; None: they are not looked at.
    flips : bool or None
        Whether arrivals name coordinates, and not normals; None: either is taken.
    private : bool or None
        Whether sites have privacy budgets; None: as they say.
    """

    def __init__(self, transport: Transport, run: bytes):
        self.transport, self.run = transport, run
        self.sequence, self.bytes = np.zeros((2, len(transport.names)), dtype=np.int64)
        self._columns: list[np.ndarray | None] = [None] * len(transport.names)
        self._point: np.ndarray | None = None
        self._derived: list[tuple[float, np.ndarray, np.ndarray]] = []
        self._agreed = False
        # The account of each private site, as it was told last.
        self.account: dict[str, AccountStatus] = {}
        self.passes = np.zeros(len(transport.names), dtype=np.int64)
        self.flips: bool | None = None
        self.private: bool | None = None
        self._haste = Haste(transport.names)
        self.plausible: Plausible | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The sites' names."""
        return self.transport.names

    @property
    def accounts(self) -> list[AccountStatus]:
        """The account of each private site, as it was told last."""
        return list(self.account.values())

    @property
    def evaluations(self) -> np.ndarray:
        """Passes over each site's records so far, where the contract has them told."""
        return self.passes

    def derivatives(self, x: np.ndarray) -> list[tuple[float, np.ndarray, np.ndarray]]:
        """``U_m``, ``∇U_m`` and ``∇²U_m`` of all sites at one point, in one round; asked again, the same answers."""
        if self._point is None or not np.array_equal(self._point, x):
            found = self._ask(self._all(messages.Derive, x), messages.Derivatives)
            for name, message in zip(self.names, found, strict=True):
                if message.gradient.shape != x.shape:
                    raise BadAnswer(name, "derivatives of another number of parameters")
                skew, size = (float(np.abs(a).max()) for a in (message.hessian - message.hessian.T, message.hessian))
                if size > LARGEST or skew > SYMMETRIC * size:
                    raise BadAnswer(name, "a Hessian that is not symmetric, or too large to be added to others")
                if self.plausible is not None:
                    self.plausible.check(name, x, message.value, message.gradient, message.hessian)
            self._derived = [(m.value, np.array(m.gradient), np.array(m.hessian)) for m in found]
            self._point = np.array(x)
        return self._derived

    def ask_again(self) -> None:
        """Have derivatives at the last point asked for once more: the sites then tell them exactly."""
        self._point = None

    def sums(self, x: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
        """``ΣU_m``, ``Σ∇U_m`` and ``Σ∇²U_m`` at one point: all that can be read from what the sites answer.

        The first time the sites agree on their masks, in two rounds. No sum is taken before every site has answered.
        """
        if not self._agreed:
            requests = self._all(messages.Offer)
            offered = self.transport.ask(requests)
            self._take(offered, requests, messages.Offered)
            self._ask(self._all(messages.Agree, tuple(offered)), messages.Opened)
            self._agreed = True
        found = self._ask(self._all(messages.Derive, x), messages.Masked)
        for name, message in zip(self.names, found, strict=True):
            if message.words.shape != (2 * masking.size(len(x)),):
                raise BadAnswer(name, "derivatives of another number of parameters")
        total = masking.unpacked(masking.total([message.words for message in found]), len(x))
        if self.plausible is not None:
            self.plausible.check(", ".join(self.names), x, *total, sites=len(self.names))
        return total

    def open(
        self,
        reference: Reference,
        control: Sequence[ControlVariate | None],
        chains: int,
        segments: int,
        own_control: bool = False,
    ) -> None:
        """Tell every site the public coordinates and its control variate, for the rest of the run.

        With ``own_control`` only the point is told: the site's control variate is its own Taylor polynomial there.
        """
        requests = []
        for own, sequence in zip(control, self.sequence, strict=True):
            parts = (np.zeros((0, 0)), np.zeros(0), np.zeros(0))
            if own is not None and own_control:
                parts = (*parts[:2], np.asarray(own.point))
            elif own is not None:
                parts = tuple(np.asarray(x) for x in (own.quadratic.precision, own.quadratic.linear, own.point))
            order = 0 if own is None else own.order
            center, scale = np.asarray(reference.center), np.asarray(reference.scale_tril)
            message = messages.Open(self.run, int(sequence) + 1, chains, segments, center, scale, order, *parts)
            requests.append(Request.of(message))
        found = self._ask(requests, messages.Opened)
        for name, message in zip(self.names, found, strict=True):
            if self.private is not None and self.private != (message.remaining >= 0):
                raise BadAnswer(name, f"{'no' if self.private else 'a'} privacy budget, unlike the contract")
        told = {name: message for name, message in zip(self.names, found, strict=True) if message.remaining >= 0}
        self.account = {name: _account(name, reference.dim, message) for name, message in told.items()}

    @property
    def columns(self) -> list[np.ndarray | None]:
        """The coordinates that each site is sent."""
        return self._columns

    @columns.setter
    def columns(self, columns: Sequence[np.ndarray | None]) -> None:
        self._columns = list(columns)

    def ask(self, plans: Sequence[Plan | None]) -> list[Arrival | None]:
        """One round: to each site the plans of the chains that it is asked about, and no message if there are none."""
        made: dict[tuple[int, int], Request] = {}
        requests: list[Request | None] = []
        for plan, sequence in zip(plans, self.sequence, strict=True):
            requests.append(None)
            if plan is not None:
                # Sites that are sent the same share the message.
                key = id(plan), int(sequence) + 1
                made[key] = made.get(key) or Request.of(_message(self.run, key[1], plan))
                requests[-1] = made[key]
        try:
            found = self._ask(requests, messages.Arrivals)
        except LimitReached as error:
            # Whose limit it is says nothing of who has used it up.
            raise LimitReached(error.site, error.code, self._haste.words()) from error
        for place, (name, message) in enumerate(zip(self.names, found, strict=True)):
            if message is None:
                continue
            self.passes[place] = message.passes
            if name in self.account:
                self.account[name] = self.account[name]._replace(
                    remaining=max(message.remaining, 0.0), observed=message.observed, spent=message.spent
                )
        answers = zip(self.names, found, plans, strict=True)
        arrivals = [
            None if plan is None else _arrival(name, message, plan, self.flips) for name, message, plan in answers
        ]
        longest = [np.asarray(plan.duration).sum(-1) for plan in plans if plan is not None]
        if longest:
            self._haste.see(arrivals, np.max(longest, axis=0))
        return arrivals

    def farewell(self) -> None:
        """Tell every site that the run is over; this is no round, and has no place in the sequence."""
        requests, sequence = self._all(messages.Farewell), self.sequence.copy()
        self._take(self.transport.part(requests), requests, messages.Opened)
        self.sequence = sequence

    def attest(self, witness: Witness, last: bool = False) -> bool:
        """Exchange seals of the sites' logs; like a farewell this has no place in the sequence.

        At the ``last`` exchange a site that is gone is not waited for; returns whether all have answered.
        """
        pairs = zip(self.names, self.sequence, strict=True)
        requests = [Request.of(witness.request(name, int(sequence) + 1)) for name, sequence in pairs]
        sequence, answers = self.sequence.copy(), (self.transport.part if last else self.transport.ask)(requests)
        found = self._take(answers, requests, messages.Attested)
        self.sequence = sequence
        for name, message in zip(self.names, found, strict=True):
            if message is not None:
                witness.take(name, message)
        return all(message is not None for message in found)

    def _all(self, kind: type, *content: Any) -> list[Request]:
        """The same request to every site, each with its own number."""
        made = {int(n): Request.of(kind(self.run, int(n) + 1, *content)) for n in np.unique(self.sequence)}
        return [made[int(n)] for n in self.sequence]

    def _ask(self, requests: Sequence[Request | None], kind: type) -> list:
        return self._take(self.transport.ask(requests), requests, kind)

    def _take(self, answers: Sequence[bytes | None], requests: Sequence[Request | None], kind: type) -> list:
        """The answers of the sites that were asked, checked; nothing is counted unless all are good."""
        out, size = [], []
        for name, data, request, sequence in zip(self.names, answers, requests, self.sequence, strict=True):
            if data is None or request is None:
                out.append(None)
                size.append(0)
                continue
            out.append(_checked(name, data, kind, (self.run, int(sequence) + 1, request.digest)))
            size.append(len(request.data) + len(data))
        self.sequence += np.asarray(size) > 0
        self.bytes += np.asarray(size)
        return out


def _message(run: bytes, sequence: int, plan: Plan) -> messages.Plans:
    """The plans of the chains that are asked about, as long as the longest of them."""
    number, start, duration, velocity = (np.asarray(x) for x in (plan.number, plan.start, plan.duration, plan.velocity))
    used = duration > 0
    chain, longest = np.flatnonzero(used.any(1)), max(int(np.max(used * (1 + np.arange(used.shape[1])))), 1)
    rows = number[chain], start[chain], duration[chain, :longest], velocity[chain, :longest]
    return messages.Plans(run, sequence, *rows, chain)


def _checked(name: str, data: bytes, kind: type, asked: tuple[bytes, int, bytes]):
    """The message that a site answered, if it is the answer to this request."""
    try:
        message = messages.decode(data)
    except WireError as error:
        raise BadAnswer(name, str(error)) from error
    if isinstance(message, messages.Refusal):
        if message.code == "BOUND_VIOLATED":
            raise BoundViolation(name, message.chain - 1)
        if message.code == "NOT_FINITE":
            raise NotFinite(name, max(message.chain - 1, 0))
        if message.code == "BUDGET_SPENT":
            raise BudgetSpent(
                f"site {name!r}: the plan costs more than is left of its privacy budget (code BUDGET_SPENT)."
            )
        if message.code in LIMITS:
            raise LimitReached(name, message.code)
        raise Refused(name, message.code, *REMEDIES.get(message.code, ()))
    if not isinstance(message, kind):
        raise BadAnswer(name, f"{type(message).__name__} where {kind.__name__} was asked for")
    if (message.run, message.sequence, message.request) != asked:  # type: ignore[attr-defined]
        raise BadAnswer(name, "the answer to another request")
    return message


def _account(name: str, dim: int, message: messages.Opened) -> AccountStatus:
    """The account that a site tells of."""
    try:
        return AccountStatus.from_numbers(name, dim, message.remaining, message.account.tolist())
    except ValueError as error:
        raise BadAnswer(name, str(error)) from error


def _arrival(name: str, message: messages.Arrivals, plan: Plan, flips: bool | None = None) -> Arrival:
    """An arrival whose times lie within the plan and whose marks are coordinates or unit normals."""
    horizon, dim = np.asarray(plan.duration).sum(-1), plan.start.shape[1]
    chain = np.flatnonzero(horizon > 0)
    rang = message.rang.astype(bool)
    if rang.shape != chain.shape:
        raise BadAnswer(name, "arrivals of another number of chains")
    if flips is not None and flips != (message.coordinate.shape == chain.shape):
        raise BadAnswer(name, f"{'normals' if flips else 'coordinates'} where the dynamics have the other kind of mark")
    if (message.time > horizon[chain] * (1 + ROUNDING)).any():
        raise BadAnswer(name, "an arrival after the end of the plan")
    if message.normal.shape[0]:
        if message.normal.shape[1] != dim:
            raise BadAnswer(name, "a normal of another dimension")
        length = np.linalg.norm(message.normal[rang], axis=1)
        if (np.abs(length - 1) > ROUNDING).any():
            raise BadAnswer(name, "a normal that is not of unit length")
        mark = message.normal
    else:
        if ((message.coordinate[rang] < 0) | (message.coordinate[rang] >= dim)).any():
            raise BadAnswer(name, "a mark that is no coordinate")
        mark = message.coordinate
    # As they came, silence where nothing was asked: they are stacked with those of other sites before JAX sees them.
    return Arrival(*(_spread(x, chain, len(horizon)) for x in (message.time, rang, mark)))  # type: ignore[arg-type]


def _spread(rows: np.ndarray, chain: np.ndarray, chains: int) -> np.ndarray:
    """Rows of some chains among zeros for the others."""
    out = np.zeros((chains, *rows.shape[1:]), rows.dtype)
    out[chain] = rows
    return out


class RemoteSite(Member):
    """What the coordinator knows of a site: its name and its number of parameters.

    It stands for the site where `fedpdmc.laplace` and `fedpdmc.sample` ask for one.

    Parameters
    ----------
    federation : RemoteFederation
    index : int or None
        The site's place in the federation; None: it stands for all sites, of which only the sum is known.
    dim : int
        Number of parameters of the study.
    bounds : Bounds, optional
        Declared for its records, where its derivatives are noisy.
    coordinates : array, optional
        Which parameters its records depend on; None for all.
    """

    budget = None
    # How many records a site has is its own affair.
    records = 0
    # Where its part of the search for a mode could begin; the contract may say.
    guess: np.ndarray | None = None

    def __init__(
        self,
        federation: RemoteFederation,
        index: int | None,
        dim: int,
        bounds: Bounds | None = None,
        coordinates: Sequence[int] | None = None,
    ):
        self.federation, self.index, self.bounds = federation, index, bounds
        self.coordinates = None if coordinates is None else np.asarray(coordinates)
        self.dim = dim if coordinates is None else len(coordinates)
        self.name = SUM if index is None else federation.names[index]

    @property
    def noisy(self) -> bool:
        """Whether its derivatives have noise and a price."""
        return self.bounds is not None

    def derivatives(self, x: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
        """``U_m``, ``∇U_m`` and ``∇²U_m`` at a point; the first site that is asked asks all of them."""
        if self.index is None:
            return self.federation.sums(x)
        return self.federation.derivatives(x)[self.index]
