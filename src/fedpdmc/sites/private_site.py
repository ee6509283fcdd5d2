"""A site with a privacy budget: it checks a plan, walks it at its own rates plus the excess, charges, and then answers."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from fedpdmc._jax.precision import double_precision
from fedpdmc._jax.random_streams import CHACHA_WORDS, ChainKeys
from fedpdmc.clocks import FINE, follow
from fedpdmc.clocks.public_proposals import Grid, first_below, time_grid
from fedpdmc.dynamics import Dynamics
from fedpdmc.errors import InputError, NotFinite, PlanRefused
from fedpdmc.plan import Arrival, Plan
from fedpdmc.potentials import Potential
from fedpdmc.privacy.accountant import up
from fedpdmc.privacy.budget import Budget
from fedpdmc.privacy.ledger_entries import FAULT, Reply, Request
from fedpdmc.privacy.rounding import COX_REGION, Limits, limits
from fedpdmc.privacy.sensitivity import sensitivity
from fedpdmc.privacy.work_limit import MOST_CELLS, cells, steepness
from fedpdmc.sites.account_report import Standing, account_report
from fedpdmc.sites.clipping import fingerprint, model_of
from fedpdmc.sites.exposure import exposure
from fedpdmc.sites.site import Opening, Site, less_public, local_columns, whitened_control

logger = logging.getLogger("fedpdmc.site")
# Observed time that stands for all time, and a number beyond which nothing is computed.
LONGEST, LARGEST = 1e300, 1e15
# The largest speed of a plan.
FASTEST = 1e6
# What is charged for each chain of a plan beyond its exposure, in units of α/(α − 1): the law of the points is that of real
# arithmetic up to a factor 1 ± 2⁻⁵⁴ for each tile, and a walk looks at no more than 2²⁷ tiles.
SLACK = 2.0**-26


class Terms(NamedTuple):
    """What a private site tells the coordinator before a run: its excess rate, and how long it can be watched.

    Attributes
    ----------
    name : str
    dim : int
        Coordinates that it may flip.
    excess : float
        The rate ρ that it adds to each of them.
    remaining : float
        Observed time (path length on rotations) that its budget still covers, over all chains.
    """

    name: str
    dim: int
    excess: float
    remaining: float


def check_dynamics(dynamics: Dynamics) -> None:
    """Only coordinate flips can be private."""
    if not dynamics.flips:
        raise InputError(
            "dynamics",
            f"{type(dynamics).__name__} with a site that has a privacy budget",
            "A reflection reveals the direction of the site's gradient, which is a function of the records without any "
            "noise: no budget covers it. Use fedpdmc.ZigZag() or fedpdmc.FactorisedBoomerang().",
        )


class PrivateSite:
    """A site opened for one run under its budget.

    Parameters
    ----------
    site : Site
        With a budget.
    opening : Opening
        What the coordinator said of the run.
    run : str
        The run's name, unique among the runs of the study.
    """

    @double_precision
    def __init__(self, site: Site, opening: Opening, run: str):
        budget = site.budget
        if budget is None:
            raise InputError("sites", f"site {site.name!r} without a budget", "Give it a fedpdmc.Budget.")
        check_dynamics(opening.dynamics)
        if opening.prior_share is not None:
            raise InputError(
                "prior_at", "'sites' with a privacy budget", "A share of the prior would depend on the number of records: "
                "use prior_at='coordinator'.",
            )  # fmt: skip
        # Sites of one run may share an account: each has rounds of its own.
        self.site, self.opening, self.run, self.budget = site, opening, f"{run}/{site.name}", budget
        self.columns = local_columns(site, opening)
        self._check_opening()
        self.limits = site_limits(site, opening)
        self.sensitivity = self.limits.sensitivity
        self.excess = budget.excess_for(self.sensitivity)
        self.dataset = budget.account_name
        self.ledger, self.account = budget.open()
        self.granted = budget.study_limit(self.account)
        self.cost_rate = budget.cost_rate(self.sensitivity, self.account.alpha)
        detail = {"excess": self.excess, "sensitivity": self.sensitivity._asdict(), "dynamics": repr(opening.dynamics)}
        records = bytes.fromhex(fingerprint(site.raw))
        self.ledger.begin(self.dataset, budget.study, self.run, records, json.dumps(detail))
        self._opening_hash = _opening_hash(opening, self.excess)
        self._failed = self.ledger.told(self.dataset, budget.study, self.run, FAULT)
        # Norms of the control variate's whitened Hessian and of its slope at the centre.
        control = whitened_control(site, opening)
        parts = () if control is None else (control.precision, control.linear)
        self._control = tuple(float(np.linalg.norm(np.asarray(x))) for x in parts) or (0.0, 0.0)
        # Of the process that was taken up by this run: observed time that was charged under another name.
        self.observed_before = 0.0
        # The records in the run's coordinates: made when a plan has been charged.
        self._potential: Potential | None = None

    def _check_opening(self) -> None:
        """Refuse coordinates and control variates with which nothing can be computed, before the records are touched."""
        control, reference = self.opening.control, self.opening.reference
        numbers = [reference.center, reference.scale_tril]
        if control is not None:
            numbers += [control.quadratic.precision, control.quadratic.linear]
        if not all(np.max(np.abs(np.asarray(x)), initial=0.0) <= LARGEST for x in numbers):
            raise InputError(
                "reference", f"a number that is not below {LARGEST:g}", "Give a reference that fits the posterior."
            )

    @property
    def dim(self) -> int:
        """Whitened coordinates that the site is sent."""
        return self.opening.reference.dim if self.columns is None else len(self.columns)

    @property
    def terms(self) -> Terms:
        """What the coordinator may know."""
        of_study = self.granted - self.ledger.spent(self.dataset, self.budget.study)
        left = max(min(self.ledger.remaining(self.dataset), of_study), 0.0)
        return Terms(self.site.name, self.dim, self.excess, min(left / self.cost_rate, LONGEST))

    @double_precision
    def answer(self, plan: Plan, round: int | None = None) -> Arrival:
        """The site's arrival along a plan of the coordinates it is sent, charged and stored before it is returned.

        Parameters
        ----------
        plan : Plan
        round : int, optional
            The message's number within the run; None: the number of plans before it, over all chains.
        """
        own = _arrays(plan)
        self._check(own)
        number, start, duration, velocity = own
        horizon = duration.sum(1)
        most = self._charge(own, horizon)[1]
        request = Request(
            self.dataset,
            self.budget.study,
            self.run,
            "round",
            int(number.sum()) if round is None else int(round),
            _hash(self._opening_hash, *own),
        )

        def work(key: bytes) -> Reply:
            try:
                arrival = self._walk(Plan(*(jnp.asarray(x) for x in own)), self._key(key, request))
            except Exception:
                # Whether a walk fails may depend on the records, and no charge bounds what that tells: it is told in one way
                # only, charged as a whole plan, and once in a run.
                logger.exception("site %r: a walk has failed", self.site.name)
                return Reply(FAULT, *self._charge(own, horizon))
            return Reply(_pack(*arrival), *self._charge(own, np.minimum(arrival[0], horizon)))

        if self._failed and not self.ledger.answered(request):
            raise PlanRefused(f"site {self.site.name!r}: a walk of this run has failed: it is over (code FAULT).")
        answered = self.ledger.answer(request, most, work, granted=self.granted)
        if answered == FAULT:
            self._failed = True
            raise NotFinite(
                self.site.name,
                0,
                f"site {self.site.name!r}: its walk failed (code FAULT); the site's own log says why.",
            )
        time, rang, mark = _unpack(answered, len(number))
        return Arrival(jnp.asarray(time), jnp.asarray(rang), jnp.asarray(mark))

    def _charge(self, own, until: np.ndarray) -> tuple[float, float]:
        """Observed time over all chains, and what it costs."""
        _, start, duration, velocity = own
        dynamics, horizon = self.opening.dynamics, duration.sum(1)
        unit = time_grid(horizon, self.dim).unit
        watched = exposure(dynamics, start, duration, velocity, until, unit)
        # Both bound what was watched up to ``until``; by cells of its own length the first may be the looser one.
        seen = float(np.minimum(watched, exposure(dynamics, start, duration, velocity, horizon, unit)).sum())
        alpha, plans = self.account.alpha, int(np.count_nonzero(horizon > 0))
        return seen, up(seen * self.cost_rate + plans * SLACK * alpha / (alpha - 1)) if seen > 0 else 0.0

    def _key(self, key: bytes, request: Request) -> bytes:
        """The ledger's secret for this request; a site with a seed of its own, for tests only, is keyed by that."""
        if self.site.seed is None:
            return key
        text = json.dumps([self.site.name, self.site.seed, request.round, request.hash.hex()]).encode()
        return hashlib.sha256(text).digest()

    def _walk(self, plan: Plan, key: bytes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Times on the public grid, whether each chain rang, and marks."""
        if self._potential is None:
            self._potential = less_public(self.site, self.opening)
        horizon, chains = np.asarray(plan.duration).sum(1), plan.start.shape[0]
        grid = time_grid(horizon, self.dim)
        place, rang, mark, fault = _first(
            self._potential, self.opening.dynamics, jnp.asarray(self.excess), jnp.asarray(self.limits.rounding), grid,
            chain_secrets(key, b"points", chains), plan,
        )  # fmt: skip
        faults = np.asarray(fault)
        if np.any(faults != FINE):
            raise RuntimeError(f"chain {np.flatnonzero(faults)[0]}: fault {faults[faults != FINE][0]}")
        rang = np.asarray(rang)
        # The mark of a chain that did not ring is where the walk had come to: it is not told.
        return np.where(rang, np.asarray(place) * grid.unit, horizon), rang, np.where(rang, np.asarray(mark), 0)

    def _check(self, own) -> None:
        """Refuse what the guarantee does not cover, from the plan and public facts alone."""
        number, start, duration, velocity = own
        finite = all(np.max(np.abs(x), initial=0.0) <= LARGEST for x in (start, duration, velocity))
        if not finite or np.any(duration < 0) or np.any(number < 0) or start.shape[1] != self.dim:
            raise PlanRefused(f"site {self.site.name!r}: the plan is not one (code BAD_PLAN).")
        walked = duration > 0
        if self.opening.dynamics.unit_speed and np.any(np.abs(velocity[walked]) != 1.0):
            raise PlanRefused(f"site {self.site.name!r}: a velocity is not one of −1 and 1 (code BAD_SPEED).")
        starts = _starts(self.opening.dynamics, start, duration, velocity)
        where = self._parameters(own, starts)
        if (region := self._region) is not None and not np.all(where <= region):
            raise PlanRefused(
                f"site {self.site.name!r}: the path leaves the region for which its sensitivity was declared (code REGION). "
                "Declare a wider one, or start nearer to the posterior."
            )
        self._check_distance(own, starts, where)

    def _check_distance(self, own, starts: np.ndarray, where: np.ndarray) -> None:
        """Refuse plans that go so far that rounding would matter, and those that would take for ever to walk."""
        _, _, duration, velocity = own
        walked = (duration > 0)[..., None]
        rotating, limits = self.opening.dynamics.flow.rotating, self.limits
        a, v = np.where(walked, starts, 0.0), np.where(walked, velocity, 0.0)
        reached = np.abs(a) + np.abs(v) * duration[..., None]
        reached = np.minimum(reached, np.hypot(a, v)) if rotating else reached
        farthest = np.linalg.norm(reached, axis=-1).max(1, initial=0.0)
        speed = np.linalg.norm(v, axis=-1).max(1, initial=0.0)
        curved, slope = self._control
        steepest = curved * farthest + slope
        if not (np.all(farthest <= limits.distance) and np.all(steepest <= limits.slope) and np.all(speed <= FASTEST)):
            raise PlanRefused(
                f"site {self.site.name!r}: the plan goes further from the centre than numbers of 64 bits can follow it "
                f"(code PLAN_TOO_FAR: at most {limits.distance:g} whitened units). Start nearer to the posterior."
            )
        model, rows = model_of(self.site.potential), _own_rows(self.site, self.opening, self.columns)[0]
        steep = steepness(model, self.budget.bounds, self.budget.neighbours, rows, where)
        known = (curved, float(np.max(steepest, initial=0.0)))
        least = self.excess + limits.rounding
        work = cells(steep, self.dim, rotating, least, known, farthest, speed, duration.sum(1))
        if not np.all(work <= MOST_CELLS):
            raise PlanRefused(
                f"site {self.site.name!r}: the plan may take {np.max(work):.3g} steps to walk (code TOO_MUCH_WORK: at most "
                f"{MOST_CELLS:g}). Plan less far ahead, or start nearer to the posterior."
            )

    @property
    def _region(self) -> np.ndarray | None:
        """Where the site's own parameters must stay."""
        dim = self.site.potential.dim
        declared = self.budget.bounds.sizes("region", dim)
        if model_of(self.site.potential).loss == "cox":
            return np.minimum(COX_REGION, np.full(dim, COX_REGION) if declared is None else declared)
        return declared

    def _parameters(self, own, starts: np.ndarray) -> np.ndarray:
        """A bound, for each of the site's own parameters, of its size on all of a plan."""
        _, _, duration, velocity = own
        dynamics, (rows, center) = self.opening.dynamics, _own_rows(self.site, self.opening, self.columns)
        x, speed = starts @ rows.T, velocity @ rows.T
        if dynamics.flow.rotating:
            size = np.hypot(x, speed)
            farthest = np.minimum(np.abs(center) + size, np.abs(center + x) + size * duration[..., None])
        else:
            farthest = np.maximum(np.abs(center + x), np.abs(center + x + speed * duration[..., None]))
        return farthest[duration > 0].max(0, initial=0.0)

    @property
    def standing(self) -> Standing:
        """The account of this site, as it may be told."""
        return Standing(
            self.account.epsilon, self.account.delta, self.account.alpha, self.budget.granted,
            min(self.account.limit / self.cost_rate, LONGEST), self.excess, self.sensitivity,
            self.ledger.releases(self.dataset), self.site.seed is not None,
        )  # fmt: skip

    def seen(self, plan: Plan, time: np.ndarray) -> float:
        """Observed time, over all chains, of a plan that was answered with these times."""
        own = _arrays(plan)
        return self._charge(own, np.minimum(time, own[2].sum(1)))[0]

    @property
    def observed(self) -> float:
        """Observed time of this run so far."""
        return self.ledger.exposure(self.dataset, self.budget.study, self.run)

    @property
    def spent(self) -> float:
        """The share of the account that is spent, by all studies."""
        return self.ledger.spent(self.dataset) / self.account.limit

    def report(self) -> dict[str, Any]:
        """For `Posterior.privacy`: what was granted, what this run used, and what that means."""
        where = {"dataset": self.dataset, "study": self.budget.study, "run": self.run}
        observed = self.observed_before + self.observed
        return account_report(self.standing, self.budget, self.opening.dynamics, observed, self.spent) | where


def site_limits(site: Site, opening: Opening) -> Limits:
    """``K`` of the site's potential in the run's coordinates with room for rounding, and how far plans may go."""
    assert isinstance(site.budget, Budget)
    rows, center = _own_rows(site, opening, local_columns(site, opening))
    terms = (model_of(site.potential), site.budget.bounds, site.budget.neighbours)
    return limits(*terms, rows, center, sensitivity(*terms, rows), site.budget.excess or 0.0)


def _own_rows(site: Site, opening: Opening, columns) -> tuple[np.ndarray, np.ndarray]:
    """The rows of S, and the centre, of the site's own parameters, over the coordinates that it is sent."""
    rows, center = np.asarray(opening.reference.matrix), np.asarray(opening.reference.center)
    if site.coordinates is not None:
        rows, center = rows[site.coordinates], center[site.coordinates]
    return (rows if columns is None else rows[:, columns]), center


def chain_secrets(key: bytes, purpose: bytes, chains: int) -> ChainKeys:
    """Keys of ChaCha20 for each chain, from the secret of one request."""
    digests = [hmac.new(key, purpose + chain.to_bytes(4, "little"), hashlib.sha256).digest() for chain in range(chains)]
    return jnp.asarray(np.frombuffer(b"".join(digests), dtype="<u4").reshape(chains, CHACHA_WORDS))


@eqx.filter_jit
def _first(
    potential: Potential, dynamics: Dynamics, excess: Float[Array, ""], slack: Float[Array, ""], grid: Grid,
    keys: ChainKeys, plan: Plan,
):  # fmt: skip
    """Place on the grid, whether it rang, coordinate and fault of the first flip on each chain."""
    grid = Grid(*(jnp.asarray(x) for x in grid))
    found = first_below(potential, dynamics, excess, slack, grid, follow(dynamics, plan), keys)
    return found.anchor, found.rang, found.mark, found.fault


def _starts(dynamics: Dynamics, start: np.ndarray, duration: np.ndarray, velocity: np.ndarray) -> np.ndarray:
    """Where each segment of a plan starts, nearly."""
    starts, a = np.empty_like(velocity), start
    for s in range(duration.shape[1]):
        starts[:, s], t, v = a, duration[:, s, None], velocity[:, s]
        a = a * np.cos(t) + v * np.sin(t) if dynamics.flow.rotating else a + v * t
    return starts


def _arrays(plan: Plan) -> tuple[np.ndarray, ...]:
    types = ("<i8", "<f8", "<f8", "<f8")
    fields = (plan.number, plan.start, plan.duration, plan.velocity)
    return tuple(np.asarray(x, dtype=kind) for x, kind in zip(fields, types, strict=True))


def _pack(time: np.ndarray, rang: np.ndarray, mark: np.ndarray) -> bytes:
    return b"".join(np.asarray(x, dtype=kind).tobytes() for x, kind in ((time, "<f8"), (rang, "u1"), (mark, "<i4")))


def _unpack(content: bytes, chains: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    time = np.frombuffer(content, "<f8", chains)
    rang = np.frombuffer(content, "u1", chains, 8 * chains).astype(bool)
    return time, rang, np.frombuffer(content, "<i4", chains, 9 * chains).astype(np.int64)


def _hash(prefix: bytes, *arrays: np.ndarray) -> bytes:
    digest = hashlib.sha256(prefix)
    for array in arrays:
        digest.update(repr((array.shape, array.dtype.str)).encode() + np.ascontiguousarray(array).tobytes())
    return digest.digest()


def _opening_hash(opening: Opening, excess: float) -> bytes:
    parts = [opening.reference.center, opening.reference.matrix]
    if opening.control is not None:
        parts += [opening.control.quadratic.precision, opening.control.quadratic.linear, opening.control.point]
    arrays = [np.asarray(x, dtype="<f8") for x in parts]
    return _hash(f"{opening.dynamics!r} {excess!r}".encode(), *arrays)
