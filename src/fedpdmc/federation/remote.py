"""The coordinator's view of a study's sites: requests to every site and their answers, over any engine."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from fedpdmc.console.progress import report
from fedpdmc.errors import BadAnswer, LimitReached, PointDeclined, WireError
from fedpdmc.federation import masking, messages
from fedpdmc.federation.answer_checks import (
    ImmediateArrivals,
    check_answer,
    check_derivatives,
    read_account,
    read_arrival,
)
from fedpdmc.federation.coordinator_store import OpeningJournal
from fedpdmc.federation.derivative_plausibility import Plausible
from fedpdmc.federation.derivative_rounding import Heights, digits_in, digits_of
from fedpdmc.federation.joint_plans import JointRandomness, abbreviated, announced
from fedpdmc.federation.messages import VERSION
from fedpdmc.federation.transport import Request, Transport
from fedpdmc.members.private_site import Noisy, release_point
from fedpdmc.members.site import Member, NotBent, own_part
from fedpdmc.plan import Arrival, Plan
from fedpdmc.potentials import ControlVariate
from fedpdmc.privacy.accountant import AccountStatus
from fedpdmc.privacy.gaussian_mechanism import ShareTerms, from_sum
from fedpdmc.privacy.sensitivity import Bounds
from fedpdmc.sampling.engines.base import Federation
from fedpdmc.whitening import Bend, Reference

if TYPE_CHECKING:
    from fedpdmc.federation.audit_seals import Witness

SUM = "/sum"  # the name of the sum of all sites, if only sums are known. No site can have it
AGREEMENT = 2  # rounds in which the sites agree on their masks


class RemoteFederation(Federation):
    """Sites that answer messages, wherever they are.

    ``run`` is the run's id, and ``contract`` the contract's SHA-256, which sites sign with their keys of secure sums.
    """

    def __init__(self, transport: Transport, run: bytes, contract: bytes = b""):
        self.transport, self.run, self.contract, self.names = transport, run, contract, transport.names
        sites = len(self.names)
        self.version = VERSION  # of the run's requests
        self.journal = OpeningJournal()  # the rounds of the opening, which are not asked twice
        self.plausible: Plausible | None = None  # checks derivatives against the contract; None: no check
        # Set before the first plan: the coordinates that each site is sent, None for all; whether marks are coordinates, not
        # velocities; whether sites must have privacy budgets; whether they have the key of the turns.
        self.columns = [None] * sites
        self.flips: bool | None = None
        self.private: bool | None = None
        self.turning = False
        # Set before the first derivatives: the parameters that each site's records depend on, None for all.
        self.coordinates: list[np.ndarray | None] = [None] * sites
        self.joint: JointRandomness | None = None  # where sites make the plans; set before the opening
        self.exploring = False  # whether a run goes on if a site declines to release derivatives at a point
        self._derived: list[tuple[float, np.ndarray, np.ndarray]] = []
        # What sites with a budget report about the noise of these, and the account of each from its last answer.
        self.noise: list[np.ndarray] = []
        self.account: dict[str, AccountStatus] = {}
        self._early = ImmediateArrivals(self.names)
        self._reset()

    def rewind(self) -> None:
        """Begin the opening again: rounds that were answered are taken from the journal."""
        self._reset()
        self.journal.rewind()

    @contextlib.contextmanager
    def explore(self) -> Iterator[None]:
        """A site may decline to release derivatives at a point, and the run goes on."""
        self.exploring = True
        try:
            yield
        finally:
            self.exploring = False

    def _reset(self) -> None:
        self._point: tuple[np.ndarray, ...] | None = None
        self._agreed = False
        self._noisy_sums: dict[bytes, Noisy] = {}
        self._heights = [Heights() for _ in self.names]
        # The number of the last request that each site has answered; a resumed run continues from there.
        self.sequence, self.bytes, self.passes = np.zeros((3, len(self.names)), dtype=np.int64)

    @property
    def accounts(self) -> list[AccountStatus]:
        """The account of each private site, from its last answer."""
        return list(self.account.values())

    @property
    def evaluations(self) -> np.ndarray:
        """Passes over each site's records so far, if the contract allows sites to report them."""
        return self.passes

    def derivatives(
        self, x: np.ndarray, spread: np.ndarray | None = None, bend: Bend | None = None
    ) -> list[tuple[float, np.ndarray, np.ndarray]]:
        """``U_m``, ``∇U_m`` and ``∇²U_m`` of all sites at one point, or their means, in one round. The last is cached."""
        asked = _derive(x, spread, bend)
        if self._point is None or not all(map(np.array_equal, self._point, asked)):
            # If a site declines, others have answered: control variates are made where they were asked last.
            self._point = None
            found = self._ask_opening(self._all(messages.Derive, *asked), messages.Derivatives)
            for name, message, own in zip(self.names, found, self.coordinates, strict=True):
                index = np.arange(len(x)) if own is None else own
                check_derivatives(name, message, len(index))
                if self.plausible is not None:
                    gradient, hessian = np.zeros(len(x)), np.zeros((len(x), len(x)))
                    gradient[index], hessian[np.ix_(index, index)] = message.gradient, message.hessian
                    self.plausible.check(name, x, gradient, hessian, spread=spread)
            self._derived = [
                (self._height(place, x, spread, bend, m.gradient, m.hessian), np.array(m.gradient), np.array(m.hessian))
                for place, m in enumerate(found)
            ]
            self.noise = [np.array(m.noise) for m in found]
            self._point = asked
        return self._derived

    def sums(
        self, x: np.ndarray, spread: np.ndarray | None = None, bend: Bend | None = None
    ) -> tuple[float, np.ndarray, np.ndarray]:
        """``ΣU_m``, ``Σ∇U_m`` and ``Σ∇²U_m`` at one point, or their means. The coordinator learns nothing but these sums.

        The first call makes the sites agree on their masks, in two rounds.
        """
        found = self._words(self._masked(x, spread, bend), masking.size(len(x)))
        gradient, hessian = masking.unpacked(masking.total(found), len(x))
        if self.plausible is not None:
            self.plausible.check(", ".join(self.names), x, gradient, hessian, sites=len(self.names), spread=spread)
        return self._height(0, x, spread, bend, gradient, hessian), gradient, hessian

    def _height(self, place: int, x, spread: np.ndarray | None, bend: Bend | None, gradient, hessian) -> float:
        """The height of a site's potential at a point of its own parameters, from its releases."""
        own = self.coordinates[place] if len(gradient) < len(x) else None
        x, spread = own_part(x, spread, own)
        return self._heights[place].at(x, spread, _numbers(bend).tobytes(), np.array(gradient), np.array(hessian))

    def noisy_sums(self, x: np.ndarray) -> Noisy:
        """``Σ∇U_m`` and ``Σ∇²U_m`` at one point with shared noise. A repeated request gets the same answer."""
        if (known := self._noisy_sums.get(x.tobytes())) is not None:
            return known
        found = self._masked(x)
        for name, message in zip(self.names, found, strict=True):
            report = message.noise.tolist()
            if len(report) == 0:
                raise BadAnswer(name, "derivatives without noise, unlike the contract")
            if report[:2] != found[0].noise.tolist()[:2]:
                raise BadAnswer(name, "a share of the noise that is not that of other sites: the sum is void")
            self.account[name] = read_account(name, len(x), 0.0, report[2:])
        numbers = masking.total_integers(self._words(found, masking.size(len(x))))
        terms = ShareTerms(len(self.names), 0, len(self._noisy_sums), *found[0].noise.tolist()[:2])
        gradient, hessian = from_sum(numbers, terms, len(x))
        if self.plausible is not None:
            self.plausible.check(", ".join(self.names), x, gradient, hessian, sites=len(self.names))
        self._noisy_sums[x.tobytes()] = Noisy(gradient, hessian, x, *terms.total_sd)
        return self._noisy_sums[x.tobytes()]

    def _masked(
        self, x: np.ndarray, spread: np.ndarray | None = None, bend: Bend | None = None
    ) -> list[messages.Masked]:
        """Masked derivatives of all sites, which have agreed on their masks before."""
        if not self._agreed:
            statement = partial(masking.statement, self.run, self.contract)
            self._ask_opening(
                self._all(messages.Offer), messages.Offered, lambda site, own: statement(site, own.public)
            )
            offered = tuple(self.journal.rounds[0][1])
            self._ask_opening(self._all(messages.Agree, offered), messages.Opened)
            self._agreed = True
        return self._ask_opening(self._all(messages.Derive, *_derive(x, spread, bend)), messages.Masked)

    def _words(self, found: Sequence[messages.Masked], size: int) -> list[np.ndarray]:
        """The masked numbers of all sites, ``size`` from each."""
        for name, message in zip(self.names, found, strict=True):
            if message.words.shape != (2 * size,):
                raise BadAnswer(name, "derivatives of another number of parameters")
        return [message.words for message in found]

    def open(
        self,
        reference: Reference,
        control: Sequence[ControlVariate | None],
        chains: int,
        segments: int,
        own_control: bool = False,
        turns: np.ndarray | None = None,
        begin: float = 0.0,
    ) -> None:
        """Send every site the whitened coordinates and its control variate, for the rest of the run.

        With ``own_control`` only the point is sent: the site uses its own Taylor polynomial at this point. ``turns`` is the
        public key of the turns, if there are any; empty if it is joint. ``begin`` is the process time of the starts.
        """
        requests = []
        self.turning, key = turns is not None, np.zeros(0, np.uint32) if turns is None else turns
        for own, sequence in zip(control, self.sequence, strict=True):
            parts = (np.zeros((0, 0)), np.zeros(0), np.zeros(0))
            if own is not None and own_control:
                parts = (*parts[:2], np.asarray(own.point))
            elif own is not None:
                parts = tuple(np.asarray(x) for x in (own.quadratic.precision, own.quadratic.linear, own.point))
            order, kept = (0, 1.0) if own is None else (own.order, own.kept)
            shape = (chains, segments, np.asarray(reference.center), np.asarray(reference.scale_tril), order)
            extra: dict[str, Any] = {"bend": _numbers(reference.bend)}
            if self.joint is not None:
                extra |= {"commitment": self.joint.commitment, "begin": begin}
            if reference.wide is not None and order == 2:
                extra["wide"] = reference.wide
            message = messages.Open(self.run, int(sequence) + 1, *shape, *parts, turns=key, kept=kept, **extra)
            requests.append(Request.of(message, self.version))
        statement = None if self.joint is None else partial(announced, self.run, self.contract)
        found = self._ask_opening(requests, messages.Opened, statement)
        self.account = {}
        for name, message in zip(self.names, found, strict=True):
            if self.private is not None and self.private != (message.remaining >= 0):
                raise BadAnswer(name, f"{'no' if self.private else 'a'} privacy budget, contrary to the contract")
            if message.remaining >= 0:
                account = message.remaining, message.account.tolist()
                self.account[name] = read_account(name, reference.dim, *account)
        if self.joint is not None:
            openings = tuple(messages.encode(message) for message in found)
            self.joint.begin(found, self._ask(self._all(messages.Reveal, openings), messages.Revealed))

    def ask(self, plans: Sequence[Plan | None]) -> list[Arrival | None]:
        """One round: each site gets the plans of the chains that it is asked about, or no message if there are none."""
        made: dict[tuple[int, int], Request] = {}
        requests: list[Request | None] = []
        joint, message = None if self.joint is None else (self.until, self.joint.evidence), None
        for plan, sequence in zip(plans, self.sequence, strict=True):
            requests.append(None)
            if plan is not None:
                # Sites with the same plan share one message.
                key = id(plan), int(sequence) + 1
                if key not in made:
                    message = _plans_message(self.run, key[1], plan, self.turning, joint)
                    made[key] = Request.of(message, self.version)
                requests[-1] = made[key]
        try:
            found = self._ask(requests, messages.Arrivals)
        except LimitReached as error:
            # The site whose limit it is need not be the one that has used it up.
            raise LimitReached(error.site, error.code, self._early.words()) from error
        if self.joint is not None and message is not None:
            self.joint.add(message, found)
        for place, (name, message) in enumerate(zip(self.names, found, strict=True)):
            if message is None:
                continue
            self.passes[place] = message.passes
            if name in self.account:
                self.account[name] = self.account[name]._replace(
                    remaining=max(message.remaining, 0.0), observed=message.observed, spent=message.spent
                )
        arrivals = [
            None if plan is None else read_arrival(name, message, plan, self.flips)
            for name, message, plan in zip(self.names, found, plans, strict=True)
        ]
        longest = [np.asarray(plan.duration).sum(-1) for plan in plans if plan is not None]
        if longest:
            self._early.add(arrivals, np.max(longest, axis=0))
        return arrivals

    def end_run(self) -> None:
        """Tell every site that the run has ended. This is not a round and not part of the sequence."""
        requests = self._all(messages.Farewell)
        self._check(self.transport.ask_last(requests), requests, messages.Opened, counted=False)

    def information(self) -> dict[str, float]:
        """Bits that the answers of each site have carried, as it reports them. Not part of the sequence."""
        requests = self._all(messages.AskAccount)
        found = self._check(self.transport.ask(requests), requests, messages.Accounted, counted=False)
        return {name: message.bits for name, message in zip(self.names, found, strict=True)}

    def exchange_seals(self, witness: Witness, last: bool = False) -> bool:
        """Exchange seals of the sites' logs. This is not part of the sequence either.

        The ``last`` exchange does not wait for sites that are gone. Returns whether all have answered.
        """
        pairs = zip(self.names, self.sequence, strict=True)
        requests = [Request.of(witness.request(name, int(sequence) + 1)) for name, sequence in pairs]
        answers = (self.transport.ask_last if last else self.transport.ask)(requests)
        found = self._check(answers, requests, messages.Attested, counted=False)
        for name, message in zip(self.names, found, strict=True):
            if message is not None:
                witness.add(name, message)
        return all(message is not None for message in found)

    def _all(self, kind: type, *content: Any) -> list[Request]:
        """The same request to every site, each with its own number."""
        numbers = map(int, np.unique(self.sequence))
        made = {n: Request.of(kind(self.run, n + 1, *content), self.version) for n in numbers}
        return [made[int(n)] for n in self.sequence]

    def _ask_opening(
        self, requests: Sequence[Request], kind: type, statement: Callable[..., bytes] | None = None
    ) -> list:
        """A round of the opening, asked once. What a site has not signed, other sites would refuse, and be blamed for it.

        Raises `PointDeclined` while exploring, if a site declines. The other sites have answered this request then.
        """

        def checked(answers, sent) -> list:
            found = self._check(answers, sent, kind)
            if statement is not None and (own := self.transport.credentials) is not None:
                from fedpdmc.certificates import signer

                for name, one in zip(self.names, found, strict=True):
                    if signer(own, one.certificate, one.signature, statement(name, one)) != name:
                        raise BadAnswer(name, "a key that is not signed with a valid certificate of this site")
            return found

        if not self.transport.complete():
            report("waiting for the sites")
        found = self.journal.ask(requests, self._answers, checked)
        if declined := next((one for one in found if isinstance(one, PointDeclined)), None):
            raise declined
        return found

    def _answers(self, requests: Sequence[Request]) -> list[bytes | None]:
        """The answers to a round of the opening. A transport need not wait for those that come after a refusal."""
        answers = self.transport.ask(requests)
        while self.exploring and None in answers and not any(map(_is_fatal, answers, requests)):
            missing = [request if answer is None else None for request, answer in zip(requests, answers, strict=True)]
            answers = [one or other for one, other in zip(answers, self.transport.ask(missing), strict=True)]
        return answers

    def _ask(self, requests: Sequence[Request | None], kind: type) -> list:
        return self._check(self.transport.ask(requests), requests, kind)

    def _check(
        self, answers: Sequence[bytes | None], requests: Sequence[Request | None], kind: type, counted: bool = True
    ) -> list:
        """The decoded answers of the sites that were asked. Counts them, if all are valid, unless not ``counted``."""
        out, size = [], []
        for name, data, request, sequence in zip(self.names, answers, requests, self.sequence, strict=True):
            if data is None or request is None:
                out.append(None)
                size.append(0)
                continue
            size.append(len(request.data) + len(data))
            if self.exploring and _refusal_code(data, request) in DECLINED:
                out.append(PointDeclined(f"site {name!r} declined a point"))
            else:
                out.append(check_answer(name, data, kind, (self.run, int(sequence) + 1, request.digest)))
        answered = [one is not None and not isinstance(one, PointDeclined) for one in out]
        self.sequence += counted & np.asarray(answered)
        self.bytes += np.asarray(size)
        return out


def _refusal_code(answer: bytes | None, request: Request) -> str:
    """The code of a refusal of this request; empty for any other answer."""
    if answer is None or messages.claimed_kind(answer) != messages.Refusal.__name__:
        return ""
    with contextlib.suppress(WireError):
        message = messages.decode(answer)
        if isinstance(message, messages.Refusal):
            return message.code if message.request == request.digest else "OTHER_REQUEST"
    return "MALFORMED"


def _is_fatal(answer: bytes | None, request: Request) -> bool:
    return _refusal_code(answer, request) not in ("", *DECLINED)


def _derive(x: np.ndarray, spread: np.ndarray | None, bend: Bend | None) -> tuple[np.ndarray, ...]:
    """The content of a request for derivatives."""
    return np.array(x), np.zeros((0, 0)) if spread is None else np.array(spread), _numbers(bend)


def _numbers(bend: Bend | None) -> np.ndarray:
    """A bend as it is sent: sites know which parameters are log spreads."""
    return np.zeros((0, 0)) if bend is None else np.asarray(bend.numbers)


def _plans_message(run: bytes, sequence: int, plan: Plan, turning: bool, joint) -> messages.Plans | messages.TurnPlans:
    """The plans of the chains that are asked about, with as many segments as the longest needs; or their short form."""
    number, start, duration, velocity = (np.asarray(x) for x in (plan.number, plan.start, plan.duration, plan.velocity))
    used = duration > 0
    chain, longest = np.flatnonzero(used.any(1)), max(int(np.max(used * (1 + np.arange(used.shape[1])))), 1)
    rows = number[chain], start[chain], duration[chain, :longest], velocity[chain, :longest]
    time = np.zeros(0) if plan.time is None else np.asarray(plan.time)[chain]
    plans = messages.Plans(run, sequence, *rows, chain, time, *(joint or ()))
    return abbreviated(run, sequence, plans, plan) if turning and plan.turns is not None else plans


# Binary digits that a sum over sites can have beyond those of one site, whose entries are a part of it.
MORE_OF_SUM = 10
# Codes of refusals of a single point, without which a search for modes goes on.
DECLINED = ("FEW_RECORDS", "TOO_FAR", "TOO_WIDE", "NARROW_PART", "NOT_FINITE", "TOO_MANY_DERIVATIVES")


class RemoteSite(Member):
    """The coordinator's stand-in for a site, for `fedpdmc.laplace` and `fedpdmc.sample`.

    Parameters
    ----------
    index : int or None
        The site's index in the federation; None: the sum of all sites, if only sums are known.
    dim : int
        Number of parameters of the study.
    bounds : Bounds, optional
        Declared bounds of its records, if its derivatives are noisy.
    coordinates : array, optional
        Which parameters its records depend on; None for all.
    """

    budget = None
    # The coordinator does not know how many records a site has.
    records = 0
    # A start for the search for the mode, and the places of log spreads, from the contract.
    guess: np.ndarray | None = None
    spreads: tuple[int, ...] = ()
    # The bend of the coordinates that it is a function of.
    _bend: Bend | None = None

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
        self.grid = 0.0 if bounds is not None else 2.0 ** -digits_of(self.dim, False)
        if index is None:
            # Independent errors of all sites, each relative to a part of the whole.
            self.grid /= np.sqrt(len(federation.names))

    @property
    def noisy(self) -> bool:
        """Whether its derivatives have noise and are charged to its budget."""
        return self.bounds is not None

    def derivatives(self, x: np.ndarray, spread: np.ndarray | None = None) -> tuple[float, np.ndarray, np.ndarray]:
        """``U_m``, ``∇U_m`` and ``∇²U_m`` at a point, or their means. The first site asked queries all in one round."""
        if self.index is None:
            value, gradient, hessian = self.federation.sums(x, spread, self._bend)
            if spread is None and not self.noisy:
                self.grid = 2.0 ** -digits_in(hessian, MORE_OF_SUM) * np.sqrt(len(self.federation.names))
            return value, gradient, hessian
        value, gradient, hessian = self.federation.derivatives(x, spread, self._bend)[self.index]
        if spread is None and not self.noisy:
            self.grid = 2.0 ** -digits_in(hessian)
        return value, gradient, hessian

    def bent(self, bend: Bend | None) -> RemoteSite:
        """The same site as a function of coordinates in which its log spreads are bent."""
        if bend is None:
            return self
        if self.spreads != bend.index:
            raise NotBent
        site = copy.copy(self)
        site._bend = bend
        return site

    def released(self, x: np.ndarray) -> Noisy:
        """Noisy derivatives with the standard deviations of their noise, as the site reports them, with its account."""
        assert self.bounds is not None
        if self.index is None:
            return self.federation.noisy_sums(release_point(x, self.bounds))
        own = x if self.coordinates is None else x[self.coordinates]
        _, gradient, hessian = self.derivatives(x)
        noise = self.federation.noise[self.index].tolist()
        if len(noise) == 0:
            raise BadAnswer(self.name, "derivatives without noise, unlike the contract")
        self.federation.account[self.name] = read_account(self.name, self.dim, 0.0, noise[2:])
        return Noisy(gradient, hessian, release_point(own, self.bounds), noise[0], noise[1])
