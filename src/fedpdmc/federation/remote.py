"""The coordinator's side of a study: requests to every site and their answers, over any engine that carries bytes."""

from __future__ import annotations

import abc
import shutil
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fedpdmc.coordinates import Reference
from fedpdmc.errors import BadAnswer, BoundViolation, BudgetSpent, LimitReached, NotFinite, Refused, WireError
from fedpdmc.federation import masking, wire
from fedpdmc.federation.base import Federation
from fedpdmc.plan import Arrival, Plan
from fedpdmc.potentials import ControlVariate
from fedpdmc.privacy.bounds import Bounds
from fedpdmc.private import Terms
from fedpdmc.standing import Standing

# Times are sums of durations and normals are divided by their length: both round.
ROUNDING = 1e-9
LIMITS = ("TOO_MANY_ROUNDS", "OBSERVED_TIME_SPENT")
# The name under which all sites together go where only sums are known; no site can have it.
SUM = "/sum"
# Rounds in which the sites agree on their masks.
AGREEMENT = 2


class Request(NamedTuple):
    """A message to a site, and the hash under which its answer is stored."""

    data: bytes
    digest: bytes

    @classmethod
    def of(cls, message: wire.Message) -> Request:
        """A message as it is sent."""
        data = wire.encode(message)
        return cls(data, wire.digest(data))


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
    def ask(self, requests: Sequence[Request]) -> list[bytes]:
        """Send ``requests[m].data`` to site m and wait for all answers."""

    def status(self) -> str:
        """A few words on the sites."""
        return f"{len(self.names)} sites"

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
    sequence : int
        Number of the last request that was answered; a run that is resumed goes on from there.
    """

    def __init__(self, transport: Transport, run: bytes, sequence: int = 0):
        self.transport, self.run, self.sequence = transport, run, sequence
        self.bytes = np.zeros(len(transport.names), dtype=np.int64)
        self._point: np.ndarray | None = None
        self._derived: list[tuple[float, np.ndarray, np.ndarray]] = []
        self._agreed = False
        self._terms: dict[str, Terms] = {}
        # Of each private site, what stays of its account, and its observed time and the share that is spent.
        self.standings: dict[str, Standing] = {}
        self.used: dict[str, tuple[float, float]] = {}
        self.passes = np.zeros(len(transport.names), dtype=np.int64)

    @property
    def names(self) -> tuple[str, ...]:
        """The sites' names."""
        return self.transport.names

    @property
    def terms(self) -> list[Terms]:
        """What the budget of each private site still covers, as it said last."""
        return list(self._terms.values())

    @property
    def evaluations(self) -> np.ndarray:
        """Passes over each site's records so far, where the contract has them told."""
        return self.passes

    @terms.setter
    def terms(self, terms: Sequence[Terms]) -> None:
        self._terms = {one.name: one for one in terms}

    def derivatives(self, x: np.ndarray) -> list[tuple[float, np.ndarray, np.ndarray]]:
        """``U_m``, ``∇U_m`` and ``∇²U_m`` of all sites at one point, in one round; asked again, the same answers."""
        if self._point is None or not np.array_equal(self._point, x):
            request = Request.of(wire.Derive(self.run, self.sequence + 1, x))
            found = self._ask([request] * len(self.names), wire.Derivatives)
            for name, message in zip(self.names, found, strict=True):
                if message.gradient.shape != x.shape:
                    raise BadAnswer(name, "derivatives of another number of parameters")
            self._derived = [(m.value, np.array(m.gradient), np.array(m.hessian)) for m in found]
            self._point = np.array(x)
        return self._derived

    def sums(self, x: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
        """``ΣU_m``, ``Σ∇U_m`` and ``Σ∇²U_m`` at one point: all that can be read from what the sites answer.

        The first time the sites agree on their masks, in two rounds. No sum is taken before every site has answered.
        """
        if not self._agreed:
            requests = [Request.of(wire.Offer(self.run, self.sequence + 1))] * len(self.names)
            offered = self.transport.ask(requests)
            self._take(offered, requests, wire.Offered)
            request = Request.of(wire.Agree(self.run, self.sequence + 1, tuple(offered)))
            self._ask([request] * len(self.names), wire.Opened)
            self._agreed = True
        request = Request.of(wire.Derive(self.run, self.sequence + 1, x))
        found = self._ask([request] * len(self.names), wire.Masked)
        for name, message in zip(self.names, found, strict=True):
            if message.words.shape != (2 * masking.size(len(x)),):
                raise BadAnswer(name, "derivatives of another number of parameters")
        return masking.unpacked(masking.total([message.words for message in found]), len(x))

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
        for own in control:
            parts = (np.zeros((0, 0)), np.zeros(0), np.zeros(0))
            if own is not None and own_control:
                parts = (*parts[:2], np.asarray(own.point))
            elif own is not None:
                parts = tuple(np.asarray(x) for x in (own.quadratic.precision, own.quadratic.linear, own.point))
            order = 0 if own is None else own.order
            center, scale = np.asarray(reference.center), np.asarray(reference.scale_tril)
            message = wire.Open(self.run, self.sequence + 1, chains, segments, center, scale, order, *parts)
            requests.append(Request.of(message))
        found = self._ask(requests, wire.Opened)
        dim = reference.dim
        told = {name: message for name, message in zip(self.names, found, strict=True) if message.remaining >= 0}
        self.standings = {name: Standing.of(message.account[:-1]) for name, message in told.items()}
        self.used = {name: (0.0, float(message.account[-1])) for name, message in told.items()}
        self.terms = [Terms(name, dim, self.standings[name].excess, m.remaining) for name, m in told.items()]

    @property
    def columns(self) -> list[np.ndarray | None]:
        """Every site is sent all coordinates."""
        return [None] * len(self.names)

    def ask(self, plans: Sequence[Plan | None]) -> list[Arrival | None]:
        """One round, of the same plan for every site."""
        plan = plans[0]
        assert plan is not None
        number, start, duration, velocity = (
            np.asarray(x) for x in (plan.number, plan.start, plan.duration, plan.velocity)
        )
        request = Request.of(wire.Plans(self.run, self.sequence + 1, number, start, duration, velocity))
        found = self._ask([request] * len(self.names), wire.Arrivals)
        for name, message in zip(self.names, found, strict=True):
            if name in self._terms:
                self._terms[name] = self._terms[name]._replace(remaining=max(message.remaining, 0.0))
                self.used[name] = (message.observed, message.spent)
        self.passes = np.asarray([message.passes for message in found], dtype=np.int64)
        horizon, dim = duration.sum(-1), start.shape[1]
        return [_arrival(name, message, horizon, dim) for name, message in zip(self.names, found, strict=True)]

    def farewell(self) -> None:
        """Tell every site that the run is over."""
        self._ask([Request.of(wire.Farewell(self.run, self.sequence + 1))] * len(self.names), wire.Opened)
        self.sequence -= 1

    def _ask(self, requests: list[Request], kind: type) -> list:
        return self._take(self.transport.ask(requests), requests, kind)

    def _take(self, answers: list[bytes], requests: list[Request], kind: type) -> list:
        out = [
            _checked(name, data, kind, (self.run, self.sequence + 1, request.digest))
            for name, data, request in zip(self.names, answers, requests, strict=True)
        ]
        self.sequence += 1
        self.bytes += [len(q.data) + len(a) for q, a in zip(requests, answers, strict=True)]
        return out


def _checked(name: str, data: bytes, kind: type, asked: tuple[bytes, int, bytes]):
    """The message that a site answered, if it is the answer to this request."""
    try:
        message = wire.decode(data)
    except WireError as error:
        raise BadAnswer(name, str(error)) from error
    if isinstance(message, wire.Refusal):
        if message.code == "BOUND_VIOLATED":
            raise BoundViolation(name, message.chain - 1)
        if message.code == "NOT_FINITE":
            raise NotFinite(name, max(message.chain - 1, 0))
        if message.code == "BUDGET_SPENT":
            raise BudgetSpent(
                f"site {name!r}: the plan costs more than is left of its privacy budget (code BUDGET_SPENT)."
            )
        raise (LimitReached if message.code in LIMITS else Refused)(name, message.code)
    if not isinstance(message, kind):
        raise BadAnswer(name, f"{type(message).__name__} where {kind.__name__} was asked for")
    if (message.run, message.sequence, message.request) != asked:  # type: ignore[attr-defined]
        raise BadAnswer(name, "the answer to another request")
    return message


def _arrival(name: str, message: wire.Arrivals, horizon: np.ndarray, dim: int) -> Arrival:
    """An arrival whose times lie within the plan and whose marks are coordinates or unit normals."""
    rang = message.rang.astype(bool)
    if rang.shape != horizon.shape:
        raise BadAnswer(name, "arrivals of another number of chains")
    if (message.time > horizon * (1 + ROUNDING)).any():
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
    # Left as they came: they are stacked with those of the other sites before JAX sees them.
    return Arrival(message.time, rang, mark)  # type: ignore[arg-type]


class RemoteSite:
    """What the coordinator knows of a site: its name and its number of parameters.

    It stands for the site where `fedpdmc.laplace` and `fedpdmc.sample` ask for one.

    Parameters
    ----------
    federation : RemoteFederation
    index : int or None
        The site's place in the federation; None: it stands for all sites, of which only the sum is known.
    dim : int
    bounds : Bounds, optional
        Declared for its records, where its derivatives are noisy.
    """

    coordinates = None
    budget = None
    # How many records a site has is its own affair.
    records = 0

    def __init__(self, federation: RemoteFederation, index: int | None, dim: int, bounds: Bounds | None = None):
        self.federation, self.index, self.dim, self.bounds = federation, index, dim, bounds
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


class DirectTransport(Transport):
    """Agents in this process, asked one after the other: the messages are the same, nothing travels.

    Parameters
    ----------
    agents : sequence of Agent
    temporary : bool
        Whether their logs are thrown away at the end.
    """

    def __init__(self, agents: Sequence, temporary: bool = False):
        self.agents, self._temporary = list(agents), temporary
        self._names = tuple(agent.site.name for agent in self.agents)

    @property
    def names(self):
        """The sites' names."""
        return self._names

    def ask(self, requests):
        """One round, site by site."""
        return [agent.answer(request.data) for agent, request in zip(self.agents, requests, strict=True)]

    def close(self):
        """Close the logs."""
        for agent in self.agents:
            agent.journal.close()
            if self._temporary:
                shutil.rmtree(agent.journal.folder)
        self.agents = []
