"""A site with a privacy budget: it checks a plan, charges it, walks it at its own rates plus the excess, and answers."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
from typing import Any

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
from fedpdmc.members.account_report import account_report
from fedpdmc.members.clipping import fingerprint
from fedpdmc.members.observed_time import Exposure
from fedpdmc.members.plan_limits import LARGEST, PlanArrays, PlanLimits
from fedpdmc.members.run_coordinates import Opening, less_public, local_columns
from fedpdmc.members.site import Site
from fedpdmc.plan import Arrival, Plan
from fedpdmc.potentials import Potential
from fedpdmc.privacy.account_bounds import arrival_cost, inaccuracy_cost, usual_ratio
from fedpdmc.privacy.account_status import AccountStatus
from fedpdmc.privacy.accountant import up
from fedpdmc.privacy.ledger_entries import FAULT, Reply, Request

logger = logging.getLogger("fedpdmc.site")
# The largest observed time that is reported.
LONGEST = 1e300
# Charged for each chain of a plan and pass of its walk in addition to its exposure, in units of `inaccuracy_cost`: the
# law of the first accepted point is that of real arithmetic up to a factor 1 ± 2⁻⁵⁴ for each tile, and a pass has at
# most 33 tiles.
SLACK = 33 * 2.0**-54


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

    Parameters
    ----------
    site : Site
        With a budget.
    opening : Opening
        The public facts of the run.
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
        self.plan_limits = PlanLimits(site, opening)
        self.limits = self.plan_limits.rounding
        self.sensitivity = self.limits.sensitivity
        self.excess = self.plan_limits.excess
        self.dataset = budget.account_name
        self.ledger, self.account = budget.open()
        self.granted = budget.study_limit(self.account)
        self._check_bound()
        self.cost_rate = arrival_cost(self.account.bound, self.account.alpha, self.sensitivity, self.excess)
        detail = {"excess": self.excess, "sensitivity": self.sensitivity._asdict(), "dynamics": repr(opening.dynamics)}
        records = bytes.fromhex(fingerprint(site.raw))
        self.ledger.begin(self.dataset, budget.study, self.run, records, json.dumps(detail))
        self._opening_hash = _opening_hash(opening, self.excess)
        self._failed = self.ledger.told(self.dataset, budget.study, self.run, FAULT)
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
        if not all(np.max(np.abs(np.asarray(x)), initial=0.0) <= LARGEST for x in numbers):
            raise InputError(
                "reference", f"a number that is not below {LARGEST:g}", "Give a reference that fits the posterior."
            )

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
        return self.plan_limits.dim

    @property
    def status(self) -> AccountStatus:
        """The account, as the coordinator may know it."""
        of_study = self.granted - self.ledger.spent(self.dataset, self.budget.study)
        left, account = max(min(self.ledger.remaining(self.dataset), of_study), 0.0), self.account
        return AccountStatus(
            site=self.site.name,
            dim=self.dim,
            epsilon=account.epsilon,
            delta=account.delta,
            alpha=account.alpha,
            granted=self.budget.granted,
            cap=min(account.limit / self.cost_rate, LONGEST),
            excess=self.excess,
            sensitivity=self.sensitivity,
            releases=self.ledger.releases(self.dataset),
            seeded=self.site.seed is not None,
            remaining=min(left / self.cost_rate, LONGEST),
            observed=self.ledger.observed(self.dataset, self.budget.study, self.run),
            spent=self.ledger.spent(self.dataset) / account.limit,
            bound=account.bound,
        )

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
        exposure, passes = self._checked(own)
        number = int(own[0].sum()) if round is None else int(round)
        asked = _hash(self._opening_hash, *own)
        request = Request(self.dataset, self.budget.study, self.run, "round", number, asked)

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
            raise PlanRefused(f"site {self.site.name!r}: an earlier walk failed, so the run has ended (code FAULT).")
        answered = self.ledger.answer(request, self._charge(exposure, passes)[1], work, granted=self.granted)
        if answered == FAULT:
            self._failed = True
            raise NotFinite(
                self.site.name,
                0,
                f"site {self.site.name!r}: its walk failed (code FAULT); the site's own log says why.",
            )
        time, rang, mark = _unpack(answered, len(exposure.horizon))
        return Arrival(jnp.asarray(time), jnp.asarray(rang), jnp.asarray(mark))

    def _checked(self, own: PlanArrays) -> tuple[Exposure, int]:
        """The exposure of a plan, and a limit on the passes of its walk; refused if the guarantee does not cover it."""
        self.plan_limits.check_shape(own)
        exposure = Exposure(self.opening.dynamics, *own[1:], time_grid(own.duration.sum(1), self.dim).unit)
        return exposure, self.plan_limits.check_path(own, exposure.starts)

    def _charge(self, exposure: Exposure, passes: int, time: np.ndarray | float = np.inf) -> tuple[float, float]:
        """Observed time up to ``time`` over all chains, and its cost: Rényi divergence and inaccuracy of the points."""
        observed, alpha = float(exposure.until(time).sum()), self.account.alpha
        if observed <= 0:
            return observed, 0.0
        slack = np.count_nonzero(exposure.horizon > 0) * passes * SLACK * inaccuracy_cost(self.account.bound, alpha)
        return observed, up(observed * self.cost_rate + slack)

    def _key(self, key: bytes, request: Request) -> bytes:
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
