"""A site's computations in a run: the answers to requests that the contract allows, and the state that they leave."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from fedpdmc._jax.compilation import compiled
from fedpdmc._jax.random_streams import ChainKeys, chain_keys
from fedpdmc.clocks import VIOLATED, Clock, LatentClock, Walk, begin_walk, follow, walk_on
from fedpdmc.clocks.base import reveal
from fedpdmc.errors import LedgerError, RequestRefused
from fedpdmc.federation import messages
from fedpdmc.federation.derivative_rounding import FINE, Release, release, scale_exponents
from fedpdmc.federation.joint_plans import OwnPlans, Request, fingerprint, whole
from fedpdmc.federation.masking import SecureSumParty
from fedpdmc.federation.site_agent.derivative_disclosure import DisclosureControl, ReleasePlace
from fedpdmc.federation.site_agent.information import ArrivalPredictor, Information
from fedpdmc.federation.site_agent.model_trial import RangeShares
from fedpdmc.federation.site_agent.request_checks import DECLINED, ROUNDING, Progress, check, refusing_privacy_errors
from fedpdmc.federation.site_agent.trust_region import TrustRegion
from fedpdmc.members.private_site import (
    NoiseGroup,
    PrivateSite,
    Rounding,
    noisy_derivatives,
    release_point,
    release_status,
    share_terms,
    shared_derivatives,
)
from fedpdmc.members.run_coordinates import Opening, open_site
from fedpdmc.members.site import LatentPosterior, Site, own_part
from fedpdmc.plan import Arrival, Plan
from fedpdmc.potentials import ControlVariate, Quadratic
from fedpdmc.privacy.budget_planning import ONE_SHOT, REFERENCE
from fedpdmc.study import Study
from fedpdmc.whitening import Bend, Reference

MOST_SECONDS = 600.0  # default time limit for one plan, in seconds. Usual plans take a fraction of a second
MOST_STEPS = 1 << 14  # steps between two checks of the time
LEAST_STEPS = 1 << 6  # the same if each passes over many records
RECORDS_AT_ONCE = 1 << 26  # passed over between two checks


@compiled
def _first_steps(clock, keys, steps, latents, *plan):
    """The first steps. Passing NumPy arrays is faster than converting them to JAX arrays one by one."""
    state = begin_walk(clock, Plan(*plan))
    if latents is not None:
        state = eqx.tree_at(lambda s: s.settled, state, latents)
    return _outcome(clock, keys, Plan(*plan), *walk_on(clock, keys, state, Plan(*plan), steps))


@compiled
def _more_steps(clock, keys, steps, state, *plan):
    """More steps, for the few plans that need them."""
    return _outcome(clock, keys, Plan(*plan), *walk_on(clock, keys, state, Plan(*plan), steps))


def _outcome(clock: Clock, keys: ChainKeys, plan: Plan, state, done: Array):
    walk = clock.walk(state)
    arrival = walk.arrival(clock.dynamics)
    revealed = jax.lax.cond(done, lambda: reveal(clock, keys, plan.number, arrival), lambda: arrival)
    return revealed, walk, state, done


def arrivals_along(
    clock: Clock,
    keys: ChainKeys,
    plan: tuple[np.ndarray, ...],
    records: int,
    seconds: float,
    latents: Array | None = None,
) -> tuple[Arrival, Walk]:
    """The site's arrivals along the arrays of a plan, within this many seconds; with private latents, from these on."""
    steps = np.int64(min(MOST_STEPS, max(LEAST_STEPS, RECORDS_AT_ONCE // max(records, 1))))
    arrival, walk, state, done = _first_steps(clock, keys, steps, latents, *plan)
    begun = time.monotonic()
    while not done:
        if time.monotonic() - begun > seconds:
            raise RequestRefused("TOO_MUCH_WORK", f"a plan took more than {seconds:g} seconds")
        arrival, walk, state, done = _more_steps(clock, keys, jnp.asarray(steps), state, *plan)
    return arrival, walk


DECISION = 1.0  # bits of whether a request is refused, if that depends on the records
SAME_PLACE = 9  # decimal digits of a point, in standard deviations, that its dither depends on


def _once(make: Callable) -> Callable:
    """A method that makes something of a message, and remembers it until another one comes."""

    @functools.wraps(make)
    def remembered(self, message):
        known = self._made.get(make.__name__)
        if known is None or known[0] is not message:
            known = self._made[make.__name__] = message, make(self, message)
        return known[1]

    return remembered


@dataclass(eq=False)
class Computation:
    """Computes a site's answers. The state depends on the answered requests only, so that a log restores it."""

    study: Study
    site: Site
    information: Information  # the account of what the answers carry, without a budget
    run_seed: int = 0  # for a site without its own seed, in the coordinator's process
    party: SecureSumParty | None = None  # the site's part in secure sums, if the contract requires them
    # Decides at which points derivatives are released without noise; None: at any, as in the coordinator's own process.
    control: DisclosureControl | None = None
    region: TrustRegion | None = None  # in which coordinates plans are answered, and how far out; None: no limits
    own: OwnPlans | None = None  # makes the plans, if sites can; None: the coordinator's are answered
    shares: RangeShares | None = None  # finds narrow parts of declared ranges that carry the answers of a model file
    most_seconds: float = MOST_SECONDS  # for one plan

    def __post_init__(self):
        self._clock, self._keys = None, None
        self._made: dict[str, tuple[messages.Message, Any]] = {}
        self._turn_keys = None
        self.private: PrivateSite | None = None
        self.latents: LatentMemory | None = None
        self.reference: Reference | None = None
        self.progress = Progress(self.party is not None, self.study.dynamics().unit_speed)
        # Where derivatives were released, in the site's own parameters.
        self._points: list[ReleasePlace] = []
        # What was released there, without a budget; all answers, at the places of the requests; and where disclosure control
        # has declined.
        self._released: list[tuple[ReleasePlace, Release]] = []
        self._answers: list[tuple[ReleasePlace, messages.SiteAnswer]] = []
        self._declined: list[ReleasePlace] = []
        self.passes, self._rounds = 0, 0
        self._handlers: dict[type, Callable[..., messages.SiteAnswer]] = {
            messages.Derive: self._derive,
            messages.Open: self._open,
            messages.Plans: self._plans,
            messages.TurnPlans: self._plans,
        }
        if self.party is not None:
            self._handlers |= {messages.Offer: self.party.offer, messages.Agree: self.party.agree}
        if self.own is not None:
            self._handlers[messages.Reveal] = self.own.reveal

    def check(self, message: messages.SiteRequest) -> None:
        """Raise `RequestRefused` for a request that the contract does not allow, or not now."""
        again = isinstance(message, messages.Derive) and self._stored_release(message) is not None
        whole = self._whole(message)
        check(self.study, whole, self.progress, again)
        if self.own is not None and isinstance(message, Request) and isinstance(whole, messages.Plans):
            self.own.check(message, whole)

    def compute(self, message: messages.SiteRequest, asked: bytes) -> messages.SiteAnswer:
        """The answer to a checked request, whose hash is ``asked``; or raises `RequestRefused`."""
        try:
            answer = self._handlers[type(message)](self._whole(message), asked)
        except Exception as error:
            # The coordinator is told, and may ask for something a little different. A failed disk ends the site.
            if self.site.budget is None and not isinstance(error, OSError):
                self.information.add_refusal(self.study.chains if getattr(error, "chain", 0) else 1)
            raise
        if self.own is not None and isinstance(message, Request) and isinstance(answer, messages.Arrivals):
            return self.own.sign(message, answer)
        return answer

    def _whole(self, message: messages.Message) -> messages.Message:
        """The request itself; for `TurnPlans` the plans that they stand for, with the coordinator's hash."""
        if not isinstance(message, messages.TurnPlans):
            return message
        return self._plans_of(message)

    @_once
    def _plans_of(self, message: messages.TurnPlans) -> messages.Plans:
        shape = self.progress.shape
        if shape is None:
            raise RequestRefused("NOT_OPEN")
        if self._turn_keys is None and self.own is not None and self.study.dynamics().turns:
            self._turn_keys = self.own.turn_keys(message)
        if self._turn_keys is None:
            raise RequestRefused("NOT_IN_CONTRACT")
        chains, segments, dim = shape
        if not len(message.chain) or message.chain[-1] >= chains or message.start.shape[1] != dim:
            raise RequestRefused("WRONG_SHAPE")
        made = whole(message, self._turn_keys, segments)
        if fingerprint(made.duration, made.velocity) != message.derived:
            raise RequestRefused("OTHER_VELOCITIES", "the velocities at turns are not those that the coordinator has")
        return made

    def record(self, message: messages.Message, given: messages.Message) -> None:
        """Update the state after a request was answered. The same live and from the log."""
        progress, request, message = self.progress, message, self._whole(message)
        if self.own is not None:
            self.own.record(request, message, given)  # type: ignore[arg-type]
        if isinstance(message, messages.Open):
            progress.next = np.zeros(message.chains, dtype=np.int64)
            if len(message.turns):
                self._turn_keys = chain_keys(jax.random.wrap_key_data(jnp.asarray(message.turns)), message.chains)
            if self.site.budget is not None:
                # The records are used after a plan has been charged, and not before.
                progress.shape = (message.chains, message.segments, self._private_site(message).dim)
                return
            if self.region is not None:
                self.region.opened(message, self._bend(message))
            self._clock, self.reference = self._opened_clock(message), self._reference(message)
            self.information.predictor = self._predictor(message)
            progress.shape = (message.chains, message.segments, self._clock.dim)
            self._keys = self.site.keys(self.run_seed, message.chains, self.study.dynamics().draws)
            if isinstance(self._clock, LatentClock):
                self.latents = LatentMemory(self._clock, self._keys, progress.shape)
        elif isinstance(message, messages.Agree) and self.party is not None:
            self.party.record(message)
            progress.agreed = True
        elif isinstance(message, messages.Derive) and isinstance(given, messages.SiteAnswer):
            place = self._place(message)
            known = next((k for k, (other, _) in enumerate(self._answers) if other.same(place)), None)
            if known is None:
                self._answers.append((place, given))
                if self.site.budget is None:
                    self._released.append((self._own(message), self._release(message)))
                progress.points += 1
                self._points.append(self._own(message))
            else:
                # A control variate belongs to the place that was requested last.
                places: list
                for places in (self._answers, self._released, self._points):
                    places[known:] = [*places[known + 1 :], *places[known : known + 1]]
        elif isinstance(message, messages.Plans) and isinstance(given, messages.Arrivals):
            if self.latents is not None:
                self.latents.answered(message, self._arrays(message), given)
            self.passes, self._rounds = given.passes, self._rounds + 1
            horizon = message.duration.sum(-1)
            progress.next[message.chain] = np.where(horizon > 0, message.number + 1, progress.next[message.chain])
            progress.observed_time += float(given.observed_times(horizon).sum())

    def record_refusal(self, code: str, message: messages.Message | None) -> None:
        """Count a point that disclosure control has declined, once however often it is requested; and a refused opening."""
        if code not in DECLINED and not isinstance(message, messages.Open):
            return
        if isinstance(message, messages.Derive):
            place = self._place(message)
            if any(place.same(other) for other in self._declined):
                return
            self._declined.append(place)
        self.progress.points += 1

    def check_ledger(self, run: bytes, folder: Path) -> None:
        """Raise `LedgerError` if the ledger lacks answers that the log in ``folder`` has: it is new, or an old copy."""
        budget = self.site.budget
        if budget is None:
            return
        ledger, _ = budget.open()
        rounds = ledger.answers(budget.account_name, budget.study, f"{run.hex()}/{self.site.name}")
        released = ledger.releases(budget.account_name)
        if rounds < self._rounds or released < len(self._points):
            raise LedgerError(
                f"{ledger.path} has {rounds} answers and {released} releases of this run, but {folder} has {self._rounds} "
                f"and {len(self._points)}: it is not the ledger that was charged, or an old copy. Restore that ledger."
            )

    def _check_covariates(self, message: messages.Derive) -> None:
        """Disclosure control of a Hessian without noise under a budget, where it is evaluated."""
        if (budget := self.site.budget) is None or self.control is None:
            return
        places = (self._own(message), *self._points)
        own, *released = (place._replace(x=release_point(place.x, budget.bounds)) for place in places)
        self.control.check(ReleasePlace(message.x, message.about), own, released)

    def _derive(self, message: messages.Derive, asked: bytes) -> messages.SiteAnswer:
        if (stored := self._stored_release(message)) is not None:
            return dataclasses.replace(stored, sequence=message.sequence, request=asked)
        self._check_covariates(message)
        if self.shares is not None:
            self.shares.check_release(self._place(message))
        if self.site.budget is not None and self.party is not None:
            return self._derive_shared(self.party, message, asked)
        if self.site.budget is not None:
            # The value is not released: it is not needed, and would cost more noise.
            with refusing_privacy_errors():
                schedule = ONE_SHOT if self.study.one_shot else REFERENCE
                place = message.x, len(self._points), schedule, message.about
                noisy = noisy_derivatives(self.site, *place, self._rounding)
                numbers = release_status(self.site).numbers()
            noise = np.asarray([noisy.gradient_sd, noisy.hessian_sd, *numbers])
            return messages.Derivatives(message.run, message.sequence, asked, 0.0, noisy.gradient, noisy.hessian, noise)
        if self.control is not None:
            self.information.add_release(DECISION)
            self.control.check(self._place(message), self._own(message), self._points)
        released, spread = self._release(message), self._own(message).spread
        self.information.add_release(released.bits)
        if self.region is not None and spread is not None:
            self.region.check_spread(spread, released.hessian, self._bend(message))
        if self.party is None:
            return messages.Derivatives(message.run, message.sequence, asked, 0.0, released.gradient, released.hessian)
        return self.party.masked(message, asked, released.gradient, released.hessian)

    @_once
    def _release(self, message: messages.Derive) -> Release:
        """The derivatives on the grid. The same request has the same release."""
        value, gradient, hessian = self.site.bent(self._bend(message)).derivatives(message.x, message.about)
        if not (np.isfinite(value) and np.isfinite(gradient).all() and np.isfinite(hessian).all()):
            raise RequestRefused("NOT_FINITE")
        place, before = self._own(message), self._released[-1] if self._released else None
        if before is not None and before[0].bend_bytes != place.bend_bytes:
            before = None
        last, averaged = None if before is None else before[1], place.spread is not None
        secret = self._dither(place, hessian)
        repeated = any(secret == earlier.secret for _, earlier in self._released)
        return release(place.x, gradient, hessian, last, secret, averaged=averaged, repeated=repeated)

    @property
    def _rounding(self) -> Rounding | None:
        """Puts the Hessians of covariates that a budget does not protect on the grid."""
        return _coarse if self.study.label else None

    def _dither(self, place: ReleasePlace, hessian: np.ndarray) -> bytes:
        """The secret of a release's dither: the same for places that differ by rounding alone, whatever the units."""
        key = f"grid/{self.site.seed}/{self.run_seed}/{self.site.name}".encode()
        size = np.ldexp(1.0, scale_exponents(hessian))
        parts = place.x, np.zeros((len(size), 0)) if place.spread is None else place.spread
        near = (np.round(part.T * size, SAME_PLACE) + 0.0 for part in parts)
        return b"/".join([key, *(part.tobytes() for part in near), place.bend_bytes])

    def _derive_shared(self, party: SecureSumParty, message: messages.Derive, asked: bytes) -> messages.Masked:
        """The site's part of the sum, with its share of the noise, masked and charged."""
        group = NoiseGroup(message.run.hex(), len(self.study.sites))
        with refusing_privacy_errors():
            terms = share_terms(self.site, message.x, len(self._points), group.parties)
            seal = functools.partial(party.seal, asked=asked, terms=terms)
            words = np.frombuffer(shared_derivatives(self.site, message.x, group, terms, seal, self._rounding), "<u8")
            numbers = release_status(self.site).numbers()
        noise = np.asarray([terms.gradient, terms.hessian, *numbers])
        return messages.Masked(message.run, message.sequence, asked, words, noise)

    def _stored_release(self, message: messages.Derive) -> messages.SiteAnswer | None:
        """The release at the place of a request: released once, it is neither computed, counted nor charged again."""
        place = self._place(message)
        return next((given for other, given in reversed(self._answers) if other.same(place)), None)

    def _place(self, message: messages.Derive) -> ReleasePlace:
        return ReleasePlace(message.x, message.about, self._bend(message))

    def _own(self, message: messages.Derive) -> ReleasePlace:
        x, spread = own_part(message.x, message.about, self.site.coordinates)
        return ReleasePlace(np.array(x), None if spread is None else np.array(spread), self._bend(message))

    def _bend(self, message: messages.Derive | messages.Open) -> Bend | None:
        """The bend of a request, whose numbers were checked."""
        if not message.bend.size or self.study.effects is None:
            return None
        return Bend(self.study.effects.spreads(len(self.study.names)), jnp.array(message.bend))

    @_once
    def _opened_clock(self, message: messages.Open) -> Clock:
        """The clock of a run, on request, so that one that cannot be made is refused."""
        return open_site(self.site, self._opening(message))

    def _open(self, message: messages.Open, asked: bytes) -> messages.Opened:
        if self.site.budget is None:
            if self.region is not None and self.study.reference != "none":
                self.region.check_opening(message, *(self._released[-1] if self._released else (None, None)))
            self.information.check_run(self._opened_clock(message), self.study, self._predictor(message))
            if self.own is not None:
                return self.own.announce(message, asked)
            return messages.Opened(message.run, message.sequence, asked)
        with refusing_privacy_errors():
            status = self._private_site(message).status
        return messages.Opened(message.run, message.sequence, asked, status.remaining, np.asarray(status.numbers()))

    def _private_site(self, message: messages.Open) -> PrivateSite:
        """The site under its budget, charged to this run; built once."""
        if self.private is None:
            self.private = PrivateSite(self.site, self._opening(message), message.run.hex())
        return self.private

    def _opening(self, message: messages.Open) -> Opening:
        """Coordinates, dynamics and control variate: the site's own if only the sum of all sites is public."""
        reference = self._reference(message)
        # The control variate belongs to the last release, with its spread.
        control, spread = None, self._points[-1].spread if self._points else None
        if message.order and self.party is not None:
            control = self.party.control(message, *self._at_point(message))
        elif message.order:
            quadratic = Quadratic(jnp.asarray(message.precision), jnp.asarray(message.linear))
            control = ControlVariate(quadratic, jnp.asarray(message.point), message.order)
        if control is not None and spread is not None:
            control = control._replace(spread=jnp.asarray(spread))
        private = 0 if self.site.budget is None else len(self.study.sites)
        return Opening(reference, self.study.dynamics(), control, private_sites=private)

    def _predictor(self, message: messages.Open) -> ArrivalPredictor:
        """What is expected of arrivals before the first: the released gradient, less that of the control variate."""
        clock = self._opened_clock(message)
        nothing = ArrivalPredictor(clock.dim)
        if not self._released or isinstance(clock, LatentClock):
            return nothing
        place, released = self._released[-1]
        if place.bend_bytes != ReleasePlace(place.x, None, self._bend(message)).bend_bytes:
            return nothing
        own = slice(None) if self.site.coordinates is None else self.site.coordinates
        center, scale, control = message.center[own], message.scale[own], self._opening(message).control
        if clock.dim < scale.shape[1]:
            # With a diagonal reference and flips the site is sent its own coordinates only.
            scale = scale[:, own]
        hessian, linear = released.hessian, released.gradient - released.hessian @ released.x
        if control is not None:
            hessian, linear = hessian - control.quadratic.precision, linear - control.quadratic.linear
        back = np.linalg.pinv(scale)
        spread = np.zeros_like(released.hessian) if place.spread is None else place.spread
        slope = scale.T @ np.asarray(hessian @ center + linear), scale.T @ np.asarray(hessian) @ scale
        return ArrivalPredictor(clock.dim, slope, (back @ (place.x - center), back @ spread @ spread.T @ back.T))

    def _at_point(self, message: messages.Open) -> tuple[np.ndarray, np.ndarray]:
        """The derivatives that were released at the point of an opening; the last ones if it is another point."""
        released = self._released[-1][1]
        if not np.array_equal(released.x, message.point):
            raise RequestRefused("NOT_TOLD")
        return released.gradient, released.hessian

    def _reference(self, message: messages.Open) -> Reference:
        return Reference(jnp.asarray(message.center), jnp.asarray(message.scale), bend=self._bend(message))

    def _plans(self, message: messages.Plans, asked: bytes) -> messages.Arrivals:
        clock, keys, chain = self._clock, self._keys, message.chain
        plan = self._arrays(message)
        if self.private is not None:
            return self._private_plans(self.private, message, plan, asked)
        assert clock is not None and keys is not None
        horizon, region = message.duration.sum(-1), self.region
        if region is not None:
            region.check_plans(message)
        if self.shares is not None and region is not None and region.reference is not None:
            self.shares.check_plans(message, *region.reference[:2], clock.dynamics.flow.rotating)
        self.information.check_plans(horizon)
        latents = None if self.latents is None else self.latents.before(message, plan)
        arrival, walk = arrivals_along(clock, keys, plan, self.site.records, self.most_seconds, latents)
        faults = np.flatnonzero(np.asarray(walk.fault))
        if faults.size:
            first = int(faults[0])
            code = "BOUND_VIOLATED" if int(walk.fault[first]) == VIOLATED else "NOT_FINITE"
            raise RequestRefused(code, chain=first + 1)
        time, rang, mark = (np.asarray(x)[chain] for x in (arrival.time, arrival.rang, arrival.mark))
        if self.progress.observed_time + np.minimum(time, horizon).sum() > self.study.observed_time * (1 + ROUNDING):
            raise RequestRefused("OBSERVED_TIME_SPENT")
        passes = self.passes + int(np.asarray(walk.passes).sum()) if self.study.passes else 0
        if self.study.passes:
            self.information.add_passes(passes - self.passes)
        every = np.asarray(arrival.time), np.asarray(arrival.rang), np.asarray(arrival.mark)
        self.information.add_arrivals(clock, plan, *every, latents)
        return messages.Arrivals.of_chains(message.run, message.sequence, asked, time, rang, mark, passes=passes)

    def _arrays(self, message: messages.Plans) -> tuple[np.ndarray, ...]:
        """The arrays of a `Plan` of all chains, in the shapes of the opening; empty for chains that are not asked about."""
        assert self.progress.shape is not None
        chains, segments, _ = self.progress.shape
        _, longest, dim = message.velocity.shape
        number, start = np.zeros(chains, dtype=np.int64), np.zeros((chains, dim))
        duration, velocity = np.zeros((chains, segments)), np.zeros((chains, segments, dim))
        number[message.chain], start[message.chain] = message.number, message.start
        duration[message.chain, :longest], velocity[message.chain, :longest] = message.duration, message.velocity
        return number, start, duration, velocity

    def _private_plans(
        self, private: PrivateSite, message: messages.Plans, plan: Arrays, asked: bytes
    ) -> messages.Arrivals:
        """Arrivals that were charged to the ledger, and what the budget still covers."""
        with refusing_privacy_errors():
            number, start, duration, velocity = map(jnp.asarray, plan)
            arrival = private.answer(Plan(number, start, duration, velocity), message.sequence)
        found = (np.asarray(x) for x in (arrival.time, arrival.rang, arrival.mark))
        time, rang, mark = (x[message.chain] for x in found)
        status, none = private.status, np.zeros((0, plan[1].shape[1]))
        account = (status.remaining, status.observed, status.spent)
        return messages.Arrivals(message.run, message.sequence, asked, time, rang, mark, none, *account)


def _coarse(hessian: np.ndarray, secret: bytes) -> np.ndarray:
    nothing = np.zeros(len(hessian))
    return release(nothing, nothing, hessian, None, secret + b"grid", FINE).hessian


# A site's private latents between plans: their state when the last plan of each chain was cut, and draws of them.
#
# The site answers a plan with its first arrival and keeps the plan. The next plan of the chain says at which process time it
# begins, and hence when the last one was cut: the latents return to their state at that time (`clocks.private_latents`).
# Everything follows from the site's seed, its records and the plans in its log, so that a restarted site has the same bits.

# Process times differ from sums of durations by rounding; positions by that of the coordinator's own arithmetic.
TIME_ROUNDING = 1e-8
SPACING = 1.0  # process time between two draws of a site's latents

Arrays = tuple[np.ndarray, ...]


class _Last(NamedTuple):
    """The last plan of every chain: its arrays, when it began, how far the site walked, and whether it had an arrival."""

    plan: Arrays
    time: np.ndarray
    walked: np.ndarray
    rang: np.ndarray
    known: np.ndarray


class LatentMemory:
    """The latents of all chains, and the plans along which they moved last.

    ``keys``: the site's own. ``shape`` (int, int, int): chains, segments and coordinates of plans.
    """

    def __init__(self, clock: LatentClock, keys: ChainKeys, shape: tuple[int, int, int]):
        chains, segments, dim = shape
        self._clock, self._keys = clock, keys
        self.settled: Float[Array, "C k"] = jnp.full((chains, clock.potential.latents), jnp.nan)
        empty = np.zeros(chains, np.int64), np.zeros((chains, dim)), np.zeros((chains, segments))
        plan = (*empty, np.zeros((chains, segments, dim)))
        zeros, no = np.zeros(chains), np.zeros(chains, bool)
        self._last = _Last(plan, zeros, zeros, no, no)
        self.draws: list[tuple[np.ndarray, ...]] | None = None

    def before(self, message: messages.Plans, plan: Arrays) -> Float[Array, "C k"]:
        """The latents at the start of new plans, ``plan`` being their arrays of all chains.

        Raises `RequestRefused`: the plans do not continue the last ones: time goes back, or beyond the site's own
        arrival, or the path jumps.
        """
        last, chain = self._last, message.chain
        if len(message.time) != len(chain):
            raise RequestRefused("NOT_CONTINUED")
        going = last.known[chain]
        elapsed = np.zeros(len(last.time))
        elapsed[chain[going]] = message.time[going] - last.time[chain[going]]
        slack = TIME_ROUNDING * (1 + np.abs(last.time) + last.walked)
        wrong = (elapsed < -slack) | (elapsed > last.walked + slack)
        elapsed = np.clip(elapsed, 0.0, last.walked)
        which = np.zeros(len(elapsed), bool)
        which[chain[going]] = True
        settled, a = _carried(self._clock, self._keys, self.settled, elapsed, which, plan[0], *last.plan)
        off = np.max(np.abs(np.asarray(a)[chain] - message.start), axis=1, initial=0.0)
        size = 1 + np.max(np.abs(message.start), axis=1, initial=0.0)
        wrong[chain] |= going & ~(off <= 1e3 * slack[chain] * size)
        if wrong[which].any():
            raise RequestRefused("NOT_CONTINUED", chain=int(np.flatnonzero(wrong & which)[0]) + 1)
        return settled

    def answered(self, message: messages.Plans, plan: Arrays, given: messages.Arrivals) -> None:
        """Store answered plans."""
        settled = self.before(message, plan)
        if self.draws is not None:
            self._draw(message.chain, message.time)
        self.settled, last, chain = settled, self._last, message.chain
        parts = tuple(np.array(part) for part in last.plan)
        for part, new in zip(parts, plan, strict=True):
            part[chain] = new[chain]
        time, walked, rang, known = (np.array(x) for x in last[1:])
        time[chain], rang[chain], known[chain] = message.time, given.rang.astype(bool), True
        walked[chain] = given.observed_times(message.duration.sum(-1))
        self._last = _Last(parts, time, walked, rang, known)

    def keep_draws(self) -> None:
        """Keep draws of the latents from here on."""
        self.draws = []

    def finish(self) -> None:
        """The run has ended: every chain is at the end of its last plan."""
        last = self._last
        if self.draws is not None and last.known.all() and not last.rang.any():
            self._draw(np.arange(len(last.time)), last.time + last.walked)

    def _draw(self, chain: np.ndarray, time: np.ndarray) -> None:
        """Latents at multiples of `SPACING` from where the last plans of these chains began to where they were cut."""
        assert self.draws is not None
        last = self._last
        first = np.maximum(np.ceil(last.time / SPACING), 0.0)
        until = np.full(len(last.time), -np.inf)
        until[chain] = np.where(last.known[chain], time, -np.inf)
        while (due := (at := first * SPACING) < until).any():
            since = np.clip(np.where(due, at - last.time, 0.0), 0.0, last.walked)
            a, z = _latents(self._clock, self._keys, self.settled, since, due, *last.plan)
            self.draws.append((np.flatnonzero(due), first[due].astype(int), np.asarray(a)[due], np.asarray(z)[due]))
            first = np.where(due, first + 1, first)

    def posterior(self, reference: Reference, names: tuple[str, ...]) -> LatentPosterior:
        """The draws at all times that every chain has reached."""
        chains, dim = self._last.plan[1].shape
        drawn = self.draws or []
        counts = np.zeros(chains, int)
        for rows, number, _, _ in drawn:
            counts[rows] = np.maximum(counts[rows], number + 1)
        n = int(counts.min())
        a, z = np.zeros((chains, n, dim)), np.zeros((chains, n, self.settled.shape[1]))
        for rows, number, place, latents in drawn:
            held = number < n
            a[rows[held], number[held]], z[rows[held], number[held]] = place[held], latents[held]
        theta = np.asarray(reference.to_x(jnp.asarray(a)))
        return LatentPosterior(SPACING * np.arange(n), theta, z[..., : len(names)], names)


def _settled(clock: LatentClock, keys: ChainKeys, settled, elapsed, which, plan: Plan):
    """Latents and positions at times of plans."""
    path = follow(clock.dynamics, plan)
    state = eqx.tree_at(lambda s: s.settled, clock.idle(plan.start.shape[0]), settled)
    return clock.settle(state, path, elapsed, which, keys).settled, clock.position(path, elapsed)


@compiled
def _carried(clock: LatentClock, keys: ChainKeys, settled, elapsed, which: Bool[Array, " C"], number, *plan):
    """Latents at the start of new plans, newly drawn on chains that have none yet, and the positions there."""
    found, a = _settled(clock, keys, settled, jnp.asarray(elapsed), jnp.asarray(which), Plan(*plan))
    return jnp.where(jnp.isnan(found[:, :1]), clock.first(jnp.asarray(number), keys), found), a


@compiled
def _latents(clock: LatentClock, keys: ChainKeys, settled, elapsed, which: Bool[Array, " C"], *plan):
    """Positions and latents at times of plans, in the site's own units."""
    found, a = _settled(clock, keys, settled, jnp.asarray(elapsed), jnp.asarray(which), Plan(*plan))
    return a, clock.potential.to_z(a, found)
