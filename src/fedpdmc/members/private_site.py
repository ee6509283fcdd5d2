"""A privacy budget as a wrapper around a site: what it answers is bounded, noisy or drawn from a law, and charged.

`PrivateSite` answers plans: it checks a plan, charges it, walks it at its own rates plus the excess, and answers.
`noisy_derivatives` releases derivatives with noise, and `shared_derivatives` parts of a sum in which the noise of all sites
protects each.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import json
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from fedpdmc._jax.precision import double_precision
from fedpdmc._jax.random_streams import CHACHA_WORDS, ChainKeys
from fedpdmc.clocks import FINE, follow
from fedpdmc.clocks.private_arrivals import Grid, first_below, time_grid
from fedpdmc.dynamics import Dynamics
from fedpdmc.errors import BudgetSpent, InputError, NotFinite, PlanRefused
from fedpdmc.members.bounded_records import LARGEST_POINT, LossFacts, ProgramFacts, fingerprint, padded_potential
from fedpdmc.members.run_coordinates import Opening, in_coordinates, local_columns, whitened_control
from fedpdmc.members.site import Site, own_part
from fedpdmc.models.model_file.records import RecordModel
from fedpdmc.plan import Arrival, Plan
from fedpdmc.potentials import Potential, Sum
from fedpdmc.privacy.accountant import (
    AccountStatus,
    Sensitivity,
    account_limit,
    arrival_cost,
    gaussian_limit,
    inaccuracy_cost,
    spent_epsilon,
    up,
    usual_ratio,
)
from fedpdmc.privacy.budget import Budget
from fedpdmc.privacy.budget_planning import MOST_CELLS, ONE_SHOT, REFERENCE, Schedule, cells, most_passes
from fedpdmc.privacy.gaussian_mechanism import (
    ShareTerms,
    check_honest,
    from_sum,
    noise_multiplier,
    noise_scale,
    noisy_share,
    release,
    release_symmetric,
    share,
    total_integers,
    words,
)
from fedpdmc.privacy.ledger import FAULT, Account, Ledger, LedgerRequest, Reply
from fedpdmc.privacy.sensitivity import (
    NEIGHBOURS,
    Bounds,
    ModelFacts,
)

logger = logging.getLogger("fedpdmc.site")
FASTEST = 1e6  # whitened units per unit of process time, in a plan
LONGEST = 1e300  # process time, the largest that is reported
# Charged for each chain of a plan and pass of its walk in addition to its exposure, in units of `inaccuracy_cost`: the
# law of the first accepted point is that of real arithmetic up to a factor 1 ± 2⁻⁵⁴ for each tile, and a pass has at
# most 33 tiles.
SLACK = 33 * 2.0**-54
CELL = 1 / 16  # radians, the longest cell of a rotation on which max_i |v_i| is bounded
MOST_PARTS = 4096  # cells of a segment
LEAST_LEFT = 1e-6  # fraction of a share below which it counts as spent


class PlanArrays(NamedTuple):
    """A plan of the coordinates that the site is sent, as NumPy arrays."""

    number: np.ndarray
    start: np.ndarray
    duration: np.ndarray
    velocity: np.ndarray


def check_dynamics(dynamics: Dynamics) -> None:
    """Refuse dynamics other than coordinate flips."""
    if not dynamics.flips:
        raise InputError(
            "dynamics",
            f"{type(dynamics).__name__} with a site that has a privacy budget",
            "A reflection reveals the direction of the site's gradient, a function of the records without "
            "noise: no budget covers it. Use fedpdmc.ZigZag() or fedpdmc.FactorisedBoomerang().",
        )


class PrivateSite:
    """A site opened for one run under its budget.

    ``run`` is the run's name, unique among the runs of the study. ``limits`` has the largest distance of plans and the
    sensitivity including rounding; ``excess`` is the rate ρ that the site adds to each coordinate.
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
        self._set_limits()
        self.dataset = budget.account_name
        self.ledger, self.account = budget.open()
        self.granted = budget.study_limit(self.account)
        self._check_bound()
        self.cost_rate = arrival_cost(self.account.bound, self.account.alpha, self.sensitivity, self.excess)
        detail = {"excess": self.excess, "sensitivity": self.sensitivity._asdict(), "dynamics": repr(opening.dynamics)}
        records = bytes.fromhex(fingerprint(site.raw))
        self.ledger.begin(self.dataset, budget.study, self.run, records, json.dumps(detail))
        self._opening_hash = _opening_hash(opening, self.excess)
        self._failed = self.ledger.has_replied(self.dataset, budget.study, self.run, FAULT)
        # Observed time of the continued process that was charged under another name.
        self.observed_before = 0.0
        # The records in the run's coordinates: computed after the first plan has been charged.
        self._potential: Potential | None = None

    def _check_opening(self) -> None:
        """Refuse coordinates and control variates of unusable size, before the records are touched."""
        control, reference = self.opening.control, self.opening.reference
        numbers = [reference.center, reference.scale_tril]
        if control is not None:
            numbers += [control.quadratic.precision, control.quadratic.linear]
        if not all(np.max(np.abs(np.asarray(x)), initial=0.0) <= LARGEST_POINT for x in numbers):
            raise InputError(
                "reference",
                f"a number that is not below {LARGEST_POINT:g}",
                "Give a reference that fits the posterior.",
            )

    def _set_limits(self) -> None:
        site, opening, budget = self.site, self.opening, self.budget
        # The rows of S, and the centre, of the site's own parameters, over the coordinates that it is sent.
        rows, center = np.asarray(opening.reference.matrix), np.asarray(opening.reference.center)
        if site.coordinates is not None:
            rows, center = rows[site.coordinates], center[site.coordinates]
        rows = rows if self.columns is None else rows[:, self.columns]
        # Rounding makes the sensitivity, and hence the excess rate, at most a tenth larger.
        self.facts = record_facts(site)
        known = self.facts.change(rows)
        excess = 1.1 * budget.excess_for(known, opening.private_sites)
        self.limits = self.facts.limits(rows, center, known, excess)
        self._rows, self._center, self.sensitivity = rows, center, self.limits.sensitivity
        self.excess = budget.excess_for(self.sensitivity, opening.private_sites)
        # Norms of the control variate's whitened Hessian and of its slope at the centre.
        control = whitened_control(site, opening)
        parts = () if control is None else (control.precision, control.linear)
        self._control = tuple(float(np.linalg.norm(np.asarray(x))) for x in parts) or (0.0, 0.0)

    def _check_bound(self) -> None:
        """Refuse arrivals that the account does not cover: its bound was fixed when it was opened."""
        account, ratio, study = self.account, self.sensitivity.k_2 / self.excess, self.budget.study
        most = self.budget.release * self.granted * (1 + 1e-6)
        alone = self.budget.granted is not None and self.ledger.released(self.dataset, study) > most
        if account.bound == "gaussian" or alone:
            whose = f"The grant to study {study!r}" if alone else f"The account of data set {self.dataset!r}"
            raise BudgetSpent(
                f"{whose} was opened for releases alone, which may spend "
                "all of the budget: it covers no arrivals (code BUDGET_SPENT). To use both methods, set the share of "
                "releases from the start: Budget(release=0.5)."
            )
        if account.bound == "tail" and ratio > usual_ratio(account.alpha):
            least = self.sensitivity.k_2 / usual_ratio(account.alpha)
            raise InputError(
                "Budget(excess)",
                f"{self.excess:g}, with an account that was opened without it",
                f"The account of data set {self.dataset!r} covers rates of at least {up(least):.6g} here: give that, or "
                "leave it out.",
            )

    @property
    def dim(self) -> int:
        """Whitened coordinates that the site is sent."""
        return self._rows.shape[1]

    @property
    def region(self) -> np.ndarray | None:
        """The region of the site's own parameters."""
        return self.facts.region(self._rows.shape[0])

    @property
    def status(self) -> AccountStatus:
        """The account, as the coordinator may know it."""
        of_study = self.granted - self.ledger.spent(self.dataset, self.budget.study)
        left = max(min(self.ledger.remaining(self.dataset), of_study), 0.0)
        return _account_status(self.site, self.dim, self.ledger, self.account, self.sensitivity)._replace(
            cap=min(self.account.limit / self.cost_rate, LONGEST),
            excess=self.excess,
            remaining=min(left / self.cost_rate, LONGEST),
            observed=self.ledger.observed(self.dataset, self.budget.study, self.run),
        )

    @double_precision
    def answer(self, plan: Plan, round: int | None = None) -> Arrival:
        """The site's arrival along a plan of the coordinates it is sent, charged and stored before it is returned.

        ``round`` is the message's number within the run; None: the number of plans before it, over all chains.
        """
        own = _arrays(plan)
        exposure, passes = self._check_plan(own)
        number = int(own[0].sum()) if round is None else int(round)
        asked = _hash(self._opening_hash, *own)
        request = LedgerRequest(self.dataset, self.budget.study, self.run, "round", number, asked)

        def work(key: bytes) -> Reply:
            try:
                number, start, duration, velocity = (jnp.asarray(x) for x in own)
                walked = Plan(number, start, duration, velocity)
                time, rang, mark = self._walk(walked, self._key(key, request), passes)
            except Exception:
                # Whether a walk fails may depend on the records, and no charge bounds what that reveals: it is reported as
                # one code, charged as a whole plan, and ends the run.
                logger.exception("site %r: a walk has failed", self.site.name)
                return Reply(FAULT, *self._charge(exposure, passes))
            return Reply(_pack(time, rang, mark), *self._charge(exposure, passes, time))

        if self._failed and not self.ledger.answered(request):
            raise self._refuse("an earlier walk failed, so the run has ended (code FAULT).")
        answered = self.ledger.answer(request, self._charge(exposure, passes)[1], work, granted=self.granted)
        if answered == FAULT:
            self._failed = True
            why = f"site {self.site.name!r}: its walk failed (code FAULT); the site's own log says why."
            raise NotFinite(self.site.name, 0, why)
        time, rang, mark = _unpack(answered, len(exposure.horizon))
        return Arrival(jnp.asarray(time), jnp.asarray(rang), jnp.asarray(mark))

    def _refuse(self, what: str) -> PlanRefused:
        return PlanRefused(f"site {self.site.name!r}: {what}")

    def _check_plan(self, plan: PlanArrays) -> tuple[Exposure, int]:
        """The exposure of a plan, and a limit on the passes of its walk; refused if the guarantee does not cover it."""
        dynamics, limits = self.opening.dynamics, self.limits
        numbers = (plan.start, plan.duration, plan.velocity)
        finite = all(np.max(np.abs(x), initial=0.0) <= LARGEST_POINT for x in numbers)
        if not finite or np.any(plan.duration < 0) or np.any(plan.number < 0) or plan.start.shape[1] != self.dim:
            raise self._refuse("not a valid plan (code BAD_PLAN).")
        if dynamics.unit_speed and np.any(np.abs(plan.velocity[plan.duration > 0]) != 1.0):
            raise self._refuse("a velocity is neither −1 nor 1 (code BAD_SPEED).")
        exposure = Exposure(dynamics, *plan[1:], time_grid(plan.duration.sum(1), self.dim).unit)
        where = self._parameters(plan, exposure.starts)
        if (region := self.region) is not None and not np.all(where <= region):
            raise self._refuse(
                "the path leaves the region for which its sensitivity was declared (code REGION). Declare a wider one, or "
                "start nearer to the posterior."
            )
        walked, rotating = (plan.duration > 0)[..., None], dynamics.flow.rotating
        a, v = np.where(walked, exposure.starts, 0.0), np.where(walked, plan.velocity, 0.0)
        reached = np.abs(a) + np.abs(v) * plan.duration[..., None]
        reached = np.minimum(reached, np.hypot(a, v)) if rotating else reached
        farthest = np.linalg.norm(reached, axis=-1).max(1, initial=0.0)
        speed = np.linalg.norm(v, axis=-1).max(1, initial=0.0)
        curvature, slope = self._control
        steepest = curvature * farthest + slope
        near = np.all(farthest <= limits.distance) and np.all(steepest <= limits.slope)
        if not (near and np.all(speed <= FASTEST)):
            raise self._refuse(
                "the plan goes further from the centre than 64-bit arithmetic allows (code PLAN_TOO_FAR: at most "
                f"{limits.distance:g} whitened units). Start nearer to the posterior."
            )
        steep, more = self.facts.rates(self._rows, where)
        control = (curvature, float(np.max(steepest, initial=0.0)))
        of_plan = (farthest, speed, plan.duration.sum(1))
        work = cells(steep, self.dim, rotating, (self.excess + more, limits.rounding), control, *of_plan)
        if not np.all(work <= MOST_CELLS):
            raise self._refuse(
                f"the plan may take {np.max(work):.3g} steps to walk (code TOO_MUCH_WORK: at most {MOST_CELLS:g}). Plan "
                "less far ahead, start nearer to the posterior, or declare tighter bounds and fewer most_records."
            )
        return exposure, most_passes(float(np.max(work, initial=0.0)), self.dim, plan.duration.shape[1])

    def _parameters(self, plan: PlanArrays, starts: np.ndarray) -> np.ndarray:
        """A bound on the size of each of the site's own parameters along the plan, whose segments begin at ``starts``."""
        duration, center = plan.duration[..., None], self._center
        x, speed = starts @ self._rows.T, plan.velocity @ self._rows.T
        if self.opening.dynamics.flow.rotating:
            size = np.hypot(x, speed)
            farthest = np.minimum(np.abs(center) + size, np.abs(center + x) + size * duration)
        else:
            farthest = np.maximum(np.abs(center + x), np.abs(center + x + speed * duration))
        return farthest[plan.duration > 0].max(0, initial=0.0)

    def _charge(self, exposure: Exposure, passes: int, time: np.ndarray | float = np.inf) -> tuple[float, float]:
        """Observed time up to ``time`` over all chains, and its cost: Rényi divergence and inaccuracy of the points."""
        observed, alpha = float(exposure.until(time).sum()), self.account.alpha
        if observed <= 0:
            return observed, 0.0
        slack = np.count_nonzero(exposure.horizon > 0) * passes * SLACK * inaccuracy_cost(self.account.bound, alpha)
        return observed, up(observed * self.cost_rate + slack)

    def _key(self, key: bytes, request: LedgerRequest) -> bytes:
        """The ledger's secret for this request; derived from the site's seed if it has one, for tests only."""
        if self.site.seed is None:
            return key
        text = json.dumps([self.site.name, self.site.seed, request.round, request.hash.hex()]).encode()
        return hashlib.sha256(text).digest()

    def _walk(self, plan: Plan, key: bytes, passes: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Times on the public grid, whether each chain has an arrival, and marks."""
        if self._potential is None:
            self._potential = less_public(self.site, self.opening)
        horizon, chains = np.asarray(plan.duration).sum(1), plan.start.shape[0]
        grid = time_grid(horizon, self.dim)
        place, rang, mark, fault = _first(
            self._potential, self.opening.dynamics, jnp.asarray(self.excess), jnp.asarray(self.limits.rounding), grid,
            chain_secrets(key, b"points", chains), jnp.asarray(passes), plan,
        )  # fmt: skip
        faults = np.asarray(fault)
        if np.any(faults != FINE):
            raise RuntimeError(f"chain {np.flatnonzero(faults)[0]}: fault {faults[faults != FINE][0]}")
        rang = np.asarray(rang)
        # The mark of a chain without an arrival depends on the end of the walk: it is not revealed.
        return np.where(rang, np.asarray(place) * grid.unit, horizon), rang, np.where(rang, np.asarray(mark), 0)

    def report(self) -> dict[str, Any]:
        """The report for `Posterior.privacy`: grants, what this run has used, and what they guarantee."""
        where = {"dataset": self.dataset, "study": self.budget.study, "run": self.run}
        status = self.status
        status = status._replace(observed=self.observed_before + status.observed)
        return account_report(status, self.budget, self.opening.dynamics) | where


def chain_secrets(key: bytes, purpose: bytes, chains: int) -> ChainKeys:
    """Keys of ChaCha20 for each chain, from the secret of one request."""
    digests = [hmac.new(key, purpose + chain.to_bytes(4, "little"), hashlib.sha256).digest() for chain in range(chains)]
    return jnp.asarray(np.frombuffer(b"".join(digests), dtype="<u4").reshape(chains, CHACHA_WORDS))


@eqx.filter_jit
def _first(
    potential: Potential, dynamics: Dynamics, excess: Float[Array, ""], slack: Float[Array, ""], grid: Grid,
    keys: ChainKeys, passes: Int[Array, ""], plan: Plan,
):  # fmt: skip
    """Place on the grid, whether there is an arrival, coordinate and fault of the first flip on each chain."""
    grid = Grid(*(jnp.asarray(x) for x in grid))
    found = first_below(potential, dynamics, excess, slack, grid, follow(dynamics, plan), keys, passes)
    return found.anchor, found.rang, found.mark, found.fault


def _arrays(plan: Plan) -> PlanArrays:
    types = ("<i8", "<f8", "<f8", "<f8")
    fields = (plan.number, plan.start, plan.duration, plan.velocity)
    return PlanArrays(*(np.asarray(x, dtype=kind) for x, kind in zip(fields, types, strict=True)))


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


COVERED = (
    "everything this site has revealed to anyone in all runs on this data set: times and coordinates of its arrivals on "
    "every chain, including discarded ones, and released derivatives; therefore also the published posterior"
)
ALONE = ", and other sites that collude with the coordinator"
NOT_COVERED = (
    "how long the site takes to answer, that it fails or does not take part, anything "
    "released outside this ledger, starting points and references that someone computed from the records, anyone who can "
    "read the ledger itself, and a person with records at several sites"
)
SEEDED = "a seed, for tests only: NOT private"


SEVERAL = (2, 3, 5, 10, 20)  # records of one person


def of_several_records(status: AccountStatus, cost: float) -> dict[str, float] | None:
    """ε for a person with so many records at the site, at the same δ; None for draws of a chain, for which it is not known.

    Noise hides k records as it would hide one of k times the size.
    """
    if status.bound != "gaussian":
        return None
    return {str(k): spent_epsilon(status.bound, status.alpha, k**2 * cost, status.delta) for k in SEVERAL}


def account_report(status: AccountStatus, budget: Budget, dynamics: Dynamics) -> dict[str, Any]:
    """The grants and spending of a private site, for `Posterior.privacy`."""
    terms = (status.bound, status.alpha)
    cost = status.spent * account_limit(*terms, status.epsilon, status.delta)
    alone = f"; for derivatives with shared noise, if at most {budget.colluding} of the other sites collude"
    keys = ("epsilon", "delta", "alpha", "bound", "spent", "observed", "cap", "releases", "excess")
    return {key: getattr(status, key) for key in keys} | {
        "neighbours": budget.neighbours,
        "relation": NEIGHBOURS[budget.neighbours],
        "granted": None if status.granted is None else list(status.granted),
        "running_epsilon": spent_epsilon(*terms, cost, status.delta),
        "epsilon_of_several_records": of_several_records(status, cost),
        "observed_unit": "process time" if dynamics.unit_speed else "path length",
        "sensitivity": status.sensitivity._asdict(),
        "bounds": budget.bounds.describe(),
        "records": "clipped to the declared bounds: the posterior is that of the clipped records"
        if budget.on_violation == "clip"
        else "refused if outside the declared bounds",
        "randomness": SEEDED if status.seeded else "operating system",
        "colluding": budget.colluding,
        "covered": COVERED + (ALONE if budget.colluding is None else alone),
        "not_covered": NOT_COVERED,
    }


class Exposure:
    """The observed time of a plan as a function of time, computed once per plan.

    On lines of unit speed the time itself; on rotations an upper bound on ``∫ max_i |v_i| dt``. With a grid of times,
    the rates at a grid point count for a whole cell: a segment of length t has at most ``t/h + 1`` points, so one cell
    at its largest speed is added for every segment, however short.

    The plan has ``start`` (C, d), ``duration`` (C, S) and ``velocity`` (C, S, d), ``unit`` (C,) is the grid's cell length h.
    Its segments begin at ``starts`` (C, S, d), and it ends at ``horizon`` (C,).
    """

    def __init__(
        self,
        dynamics: Dynamics,
        start: np.ndarray,
        duration: np.ndarray,
        velocity: np.ndarray,
        unit: np.ndarray | float = 0.0,
    ):
        self.duration, self.unit, self.horizon = duration, unit, duration.sum(1)
        self._begin = np.cumsum(duration, 1) - duration
        self.starts, a = np.empty_like(velocity), start
        for s in range(duration.shape[1]):
            self.starts[:, s] = a
            a, _ = dynamics.flow.move(a, velocity[:, s], duration[:, s])
        # The largest speed by segment, chain and cell; None if it is one.
        self._speeds: list[np.ndarray] | None = None
        if not dynamics.unit_speed:
            segments = range(duration.shape[1])
            self._speeds = [_largest_speeds(self.starts[:, s], velocity[:, s], duration[:, s]) for s in segments]
            self._peak = np.hypot(self.starts, velocity).max(-1)

    def until(self, time: np.ndarray | float) -> np.ndarray:
        """The exposure of each chain up to this time since the plan's start; it never decreases with time."""
        time = np.where(time >= self.horizon, np.inf, time)
        if self._speeds is None:
            begun = (self._begin < time[:, None]) & (self.duration > 0)
            return np.minimum(time, self.horizon) + self.unit * np.count_nonzero(begun, 1)
        total = np.zeros(len(time))
        for s, speeds in enumerate(self._speeds):
            seen = np.clip(time - self._begin[:, s], 0.0, self.duration[:, s])
            width = self.duration[:, s, None] / speeds.shape[1]
            inside = np.clip(seen[:, None] - width * np.arange(speeds.shape[1]), 0.0, width)
            total += (speeds * inside).sum(1) * (1 + 1e-12)
            total += np.where(seen > 0, self.unit * self._peak[:, s], 0.0)
        return total


def _largest_speeds(a: np.ndarray, v: np.ndarray, duration: np.ndarray) -> np.ndarray:
    """``max_i sup |v_i|`` on equal cells of a segment: v_i = A cos(t + φ) is largest at an end or at its peak."""
    cells = min(max(1, math.ceil(float(np.max(duration, initial=0.0)) / CELL)), MOST_PARTS)
    size, phase = np.hypot(a, v), np.arctan2(a, v)
    ends = phase[:, None, :] + (duration[:, None] * np.linspace(0.0, 1.0, cells + 1))[..., None]
    speed = np.abs(np.cos(ends))
    # A peak of |cos| lies between two ends if a multiple of π does.
    peak = np.floor(ends[:, 1:] / np.pi) > np.floor(ends[:, :-1] / np.pi)
    return (size[:, None] * np.where(peak, 1.0, np.maximum(speed[:, 1:], speed[:, :-1]))).max(-1)


@functools.cache
def usual_speed(dynamics: Dynamics, dim: int) -> float:
    """Expected exposure per unit of process time: one on lines, ``E max_i |v_i|`` with ``v ~ N(0, I)`` on rotations."""
    if dynamics.unit_speed:
        return 1.0
    z = np.linspace(0.0, 12.0, 4001)
    inside = np.array([math.erf(x / math.sqrt(2)) for x in z])
    return float(np.trapezoid(1 - inside**dim, z))


# Derivatives with noise -------------------------------------------------------------------------------------------------


def _budget(site: Site) -> Budget:
    assert site.budget is not None
    return site.budget


def record_facts(site: Site) -> LossFacts | ProgramFacts:
    """What the site's budget knows of its records."""
    own, budget = site.model, _budget(site)
    return ProgramFacts(own, budget) if isinstance(own, RecordModel) else LossFacts(site.potential, budget)


class Noisy(NamedTuple):
    """Released derivatives of one site: at ``point``, with the standard deviations of their noise.

    Entries of the Hessian off the diagonal have ``1/√2`` of the noise of those on it.
    """

    gradient: np.ndarray
    hessian: np.ndarray
    point: np.ndarray
    gradient_sd: float
    hessian_sd: float


class PlannedRelease(NamedTuple):
    """A release that has not been made yet: its inputs, all public except for the account."""

    point: np.ndarray  # (d,): in the site's own parameters, within the declared region
    model: ModelFacts | str  # the public facts about it, or the digest of its file
    sensitivity: tuple[float, float]  # of gradient and Hessian, as is the rounding
    rounding: tuple[float, float]
    spread: np.ndarray | None = None  # (d, d): the root of the covariance over which they are averaged, if any

    @property
    def where(self) -> tuple[list, ...]:
        """The point, and the spread about it if there is one."""
        return tuple(x.tolist() for x in (self.point, self.spread) if x is not None)

    def noise(self, schedule: Schedule, alpha: float, cost: float) -> list[float]:
        """Standard deviations of the noise of gradient and Hessian in a release that costs ``cost`` at order α."""
        dim = len(self.point)
        parts = (schedule.gradient, 1 - schedule.gradient) if self.sensitivity[1] > 0 else (1.0, 1.0)
        counts = (dim, dim * (dim + 1) // 2)
        return [
            noise_scale(noise_multiplier(alpha, cost * part), change, off, count)
            for part, change, off, count in zip(parts, self.sensitivity, self.rounding, counts, strict=True)
        ]


def plan_release(site: Site, x: np.ndarray, schedule: Schedule, spread: np.ndarray | None = None) -> PlannedRelease:
    """The inputs of a release at x, or an error if none is granted there. Nothing is charged."""
    budget = site.budget
    if budget is None or not (budget.release or schedule.usual):
        raise InputError(
            "reference",
            f"'laplace' with site {site.name!r}, whose budget grants no release",
            "Use Budget(release=0.1) to spend that share of it on a noisy reference, or give a fedpdmc.Reference that was "
            "made without the data.",
        )
    own, about = own_part(x, spread, site.coordinates)
    own = release_point(own, budget.bounds)
    facts = record_facts(site)
    return PlannedRelease(own, facts.public, *facts.release(own, about, site.name), about)


def _release_spent(site: Site) -> BudgetSpent:
    return BudgetSpent(
        f"site {site.name!r}: the share of its privacy budget that study {_budget(site).study!r} may spend on releases is "
        "spent (code RELEASE_SPENT). Use the reference that was made with it, or grant a larger release."
    )


def gradient_change(site: Site) -> float:
    """How much one record can change the gradient."""
    return record_facts(site).release_change[0]


def _open_releases(site: Site, run: str, alone: bool) -> tuple[Ledger, Account, float]:
    """The ledger, in which the run begins, the account, and the part of it that the study may spend.

    ``alone``: on releases alone, which are accounted for exactly. The study's first answer decides which of the two
    applies: neither bound covers a choice that depends on answers.
    """
    budget = _budget(site)
    ledger, account = budget.open(releases_only=alone)
    if alone and budget.granted is not None and ledger.rounds(budget.account_name, budget.study):
        raise BudgetSpent(
            f"site {site.name!r}: study {budget.study!r} has spent part of its grant on arrivals, so releases need a share "
            "of their own (code BUDGET_SPENT). Give the study another name, or set the share of releases: "
            "Budget(release=0.5)."
        )
    ledger.begin(budget.account_name, budget.study, run, bytes.fromhex(fingerprint(site.raw)), "{}")
    return ledger, account, budget.study_limit(account, releases_only=alone)


# Rounds a Hessian that may have no noise, by a secret dither.
Rounding = Callable[[np.ndarray, bytes], np.ndarray]


@double_precision
def noisy_derivatives(
    site: Site, x: np.ndarray, step: int, schedule: Schedule = REFERENCE, spread: np.ndarray | None = None,
    coarse: Rounding | None = None,
) -> Noisy:  # fmt: skip
    """``∇U_m`` and ``∇²U_m`` with Gaussian noise, at x within the declared region. Charged before it returns.

    With a spread, their averages over ``N(x, S Sᵀ)``: sums of averages of ``ℓ'`` and ``ℓ''``, which have the same bounds.

    ``coarse`` rounds the Hessian, after its noise if it has any.

    A release that was made before at the same point is repeated at no charge. A new one costs the scheduled part of what is
    left of the study's share, and is refused if nothing is left. The sampler stays exact: a control variate may be any
    symmetric quadratic, provided both sides use the same.

    Raises
    ------
    BudgetSpent
        The share is spent.
    """
    ready, budget, records = plan_release(site, x, schedule, spread), _budget(site), fingerprint(site.potential)
    alone = bool(schedule.usual) and not budget.release
    ledger, account, limit = _open_releases(site, f"release {records[:32]}", alone)
    dataset, study = budget.account_name, budget.study
    asked = hashlib.sha256(repr((records, ready.model, ready.sensitivity, *ready.where)).encode()).digest()
    request = LedgerRequest(dataset, study, f"release {asked.hex()[:32]}", "release", 0, asked)
    share = (budget.release or schedule.usual) * limit
    left = max(share - ledger.released(dataset, study, asked), 0.0)
    cost = left * schedule.steps[step] / sum(schedule.steps[step:]) if step < len(schedule.steps) else left
    if (step >= len(schedule.steps) or left <= LEAST_LEFT * share) and not ledger.answered(request):
        raise _release_spent(site)

    def noisy(gradient: np.ndarray, hessian: np.ndarray, key: bytes) -> bytes:
        sigmas = ready.noise(schedule, account.alpha, cost)
        gradient = release(gradient, sigmas[0], key + b"gradient")
        hessian = release_symmetric(hessian, sigmas[1], key + b"hessian")
        hessian = hessian if coarse is None else coarse(hessian, key)
        return np.concatenate([gradient, hessian.ravel(), sigmas]).astype("<f8").tobytes()

    content = _charge_release(site, ready, ledger, request, cost, limit, noisy)
    values, d = np.frombuffer(content, dtype="<f8"), len(ready.point)
    return Noisy(values[:d], values[d:-2].reshape(d, d), ready.point, float(values[-2]), float(values[-1]))


def _charge_release(
    site: Site, ready: PlannedRelease, ledger: Ledger, request: LedgerRequest, cost: float, limit: float,
    content: Callable[[np.ndarray, np.ndarray, bytes], bytes], detail: str = "{}", run: str = "",
) -> bytes:  # fmt: skip
    """The content of a release, made from the true derivatives and a secret, charged and stored; or the stored one.

    Whether it fails may depend on the records: a failure is charged too, and reported by its code alone. With a seed of
    the site, which is for tests only, the secret follows from it.
    """

    def work(key: bytes) -> Reply:
        try:
            key += run.encode()
            if site.seed is not None:
                key = hashlib.sha256(repr((site.name, site.seed, *ready.where)).encode()).digest()
            found = record_facts(site).derivatives(ready.point, ready.spread)
            return Reply(content(*found, key), 0.0, cost)
        except Exception:
            logger.exception("site %r: a release has failed", site.name)
            return Reply(FAULT, 0.0, cost)

    answer = ledger.answer(request, cost, work, detail, granted=limit)
    if answer == FAULT:
        raise NotFinite(site.name, 0, f"site {site.name!r}: its derivatives are not finite there (code FAULT).")
    return answer


def release_status(site: Site) -> AccountStatus:
    """The account of a site that releases noisy derivatives alone."""
    known = Sensitivity(*[gradient_change(site)] * 3)
    return _account_status(site, site.potential.dim, *_budget(site).open(releases_only=True), known)


def _account_status(site: Site, dim: int, ledger: Ledger, account: Account, known: Sensitivity) -> AccountStatus:
    budget, seeded = _budget(site), site.seed is not None
    spent, releases = ledger.spent(budget.account_name) / account.limit, ledger.releases(budget.account_name)
    terms = (account.epsilon, account.delta, account.alpha, budget.granted)
    return AccountStatus(site.name, dim, *terms, 0.0, 0.0, known, releases, seeded, 0.0, 0.0, spent, account.bound)


def release_point(own: np.ndarray, bounds: Bounds) -> np.ndarray:
    """The point at which a site evaluates derivatives requested at ``own``: clipped to the declared region."""
    region = bounds.sizes("region", len(own))
    return own if region is None else np.clip(own, -region, region)


Seal = Callable[[Sequence[int]], bytes]


class NoiseGroup(NamedTuple):
    """The sites whose noise is shared, in one run, and their number.

    The run's name is the same at all sites and new for every run: noise must never be used in two sums, because another
    site's part may have changed in between.
    """

    run: str
    parties: int


def share_terms(site: Site, x: np.ndarray, step: int, parties: int) -> ShareTerms:
    """The terms of a release at x, from the (ε, δ) that the study was granted and other public facts.

    Raises
    ------
    BudgetSpent
        All steps were made.
    """
    budget = site.budget
    if budget is None or budget.colluding is None:
        raise InputError("sites", f"site {site.name!r} without shared noise", "Give it a Budget(colluding=...).")
    check_honest("Budget(colluding)", parties, budget.colluding)
    if site.coordinates is not None:
        raise InputError(
            "Site(coordinates)",
            f"{site.name!r} with shared noise",
            "All sites of a sum need the same parameters: omit coordinates, or Budget(colluding=...).",
        )
    if step >= len(ONE_SHOT.steps):
        raise _release_spent(site)
    sigmas = plan_release(site, x, ONE_SHOT).noise(ONE_SHOT, 2.0, _squared_mu(site, step))
    first, second = (share(sigma, parties, budget.colluding) for sigma in sigmas)
    return ShareTerms(parties, budget.colluding, step, first, second)


def _squared_mu(site: Site, step: int) -> float:
    """``μ² = Δ²/σ²`` of a step, its cost at order 2."""
    budget = _budget(site)
    epsilon, delta = budget.granted or (budget.epsilon, budget.delta)
    total = (budget.release or ONE_SHOT.usual) * gaussian_limit(2.0, epsilon, delta)
    return total * ONE_SHOT.steps[step] / sum(ONE_SHOT.steps)


@double_precision
def shared_derivatives(
    site: Site, x: np.ndarray, group: NoiseGroup, terms: ShareTerms, seal: Seal, coarse: Rounding | None = None
) -> bytes:
    """The site's part of the sum of all gradients and Hessians at x, charged before it returns.

    The charge is that of the full noise, to which the shares of the honest sites add up. Noise is new in every run.

    ``terms`` are those of `share_terms`. ``seal`` encodes the integers, under masks if they leave the process; ``coarse``
    rounds a Hessian that has no noise.
    """
    ready, budget, run = plan_release(site, x, ONE_SHOT), _budget(site), f"{group.run}/{site.name}"
    ledger, account, limit = _open_releases(site, run, not budget.release)
    dataset, study, cost = budget.account_name, budget.study, up(account.alpha / 2 * _squared_mu(site, terms.step))
    public = (group.run, terms, ready.model, ready.sensitivity, ready.point.tolist())
    asked = hashlib.sha256(repr((fingerprint(site.potential), *public)).encode()).digest()
    request = LedgerRequest(dataset, study, run, "release", terms.step, asked)
    # All steps or none: an incomplete answer would be charged without use.
    rest = cost * sum(ONE_SHOT.steps[terms.step :]) / ONE_SHOT.steps[terms.step]
    left = (budget.release or ONE_SHOT.usual) * limit * (1 + 1e-9) - ledger.released(dataset, study, asked)
    if rest > min(left, ledger.remaining(dataset)) and not ledger.answered(request):
        raise _release_spent(site)

    def noisy(gradient: np.ndarray, hessian: np.ndarray, key: bytes) -> bytes:
        # Rounded before noise is added, a Hessian could change by more than its sensitivity.
        hessian = hessian if coarse is None or terms.hessian > 0 else coarse(hessian, key)
        return seal(noisy_share(gradient, hessian, terms, key))

    detail = json.dumps({"noise": "shared", "sites": terms.parties, "colluding": terms.colluding})
    return _charge_release(site, ready, ledger, request, cost, limit, noisy, detail, group.run)


def summed_derivatives(sites: Sequence[Site], x: np.ndarray, step: int, question: bytes) -> Noisy:
    """The sum over sites of this process that share their noise, as a coordinator would get it, charged at each.

    ``question`` identifies the run: with other records, ledgers or questions the noise is new.
    """
    terms = {site.name: share_terms(site, x, step, len(sites)) for site in sites}
    first = terms[sites[0].name]
    if other := next((name for name, own in terms.items() if own != first), None):
        raise InputError(
            f"sites ({sites[0].name!r}, {other!r})",
            "noise shares of different sizes",
            "Give all sites that share noise the same epsilon, delta, neighbours, bounds, release and colluding.",
        )
    group = NoiseGroup(run_name(sites, question), len(sites))

    # Without masks: the sites are in one process.
    parts = [shared_derivatives(site, x, group, first, lambda own: words(own).tobytes()) for site in sites]
    total = total_integers([np.frombuffer(part, "<u8") for part in parts])
    gradient, hessian = from_sum(total, first, len(x))
    return Noisy(gradient, hessian, x, *first.total_sd)


def run_name(sites: Sequence[Site], question: bytes) -> str:
    """The name of a run of sites in one process: the same only for the same question, records and ledgers."""
    digest = hashlib.sha256(question)
    for site in sites:
        budget, records = _budget(site), bytes.fromhex(fingerprint(site.potential))
        request = LedgerRequest(budget.account_name, budget.study, site.name, "sum", 0, records)
        digest.update(budget.find().key(request))
    return f"sum {digest.hexdigest()[:32]}"


def less_public(site: Site, opening: Opening) -> Potential:
    """The records and the public control variate in whitened coordinates; no branch depends on the records."""
    own = padded_potential(site.potential) if site.budget is None else record_facts(site).walked()
    records, control = in_coordinates(own, site, opening), whitened_control(site, opening)
    return records if control is None else Sum((records, control.scaled(-1.0)))
