"""Noisy derivatives released by private sites."""

from __future__ import annotations

import hashlib
import logging
from typing import NamedTuple

import numpy as np

from fedpdmc._jax.precision import double_precision
from fedpdmc.errors import BudgetSpent, InputError, NotFinite, PlanRefused
from fedpdmc.members.clipped_record_derivatives import file_derivatives, file_sensitivity
from fedpdmc.members.clipping import fingerprint, model_of
from fedpdmc.members.site import Site, derivatives, own_part
from fedpdmc.models.model_file.records import RecordModel
from fedpdmc.privacy.account_status import AccountStatus
from fedpdmc.privacy.accountant import Sensitivity, up
from fedpdmc.privacy.budget import Budget
from fedpdmc.privacy.declared_bounds import Bounds
from fedpdmc.privacy.gaussian_mechanism import noise_multiplier, noise_scale, release, release_symmetric
from fedpdmc.privacy.ledger_entries import FAULT, Reply, Request
from fedpdmc.privacy.rounding_error_bound import COX_REGION, LARGEST_SHARE, gradient_rounding, hessian_rounding
from fedpdmc.privacy.schedule import REFERENCE, Schedule
from fedpdmc.privacy.sensitivity import Model, averaged_sensitivity, derivative_sensitivity

logger = logging.getLogger("fedpdmc.site")
# A share counts as spent if less than this fraction of it is left.
LEAST_LEFT = 1e-6
# The last quadrature node of averages over predictors is nearer than this many standard deviations.
LAST_NODE = 8.0
# Parameters beyond which numbers might overflow.
FARTHEST = 1e15


class Noisy(NamedTuple):
    """Released derivatives of one site: at ``point``, with the standard deviations of their noise.

    Entries of the Hessian off the diagonal have ``1/√2`` of the noise of those on it.
    """

    gradient: np.ndarray
    hessian: np.ndarray
    point: np.ndarray
    gradient_sd: float
    hessian_sd: float


class Prepared(NamedTuple):
    """A release that has not been made yet: its inputs, all public except for the account.

    Attributes
    ----------
    point : array of shape (d,)
        In the site's own parameters, within the declared region.
    model : Model or str
        The public facts about it, or the digest of its file.
    sensitivity, rounding : (float, float)
        Of gradient and Hessian.
    spread : array of shape (d, d) or None
        The root of the covariance over which they are averaged, if any.
    """

    point: np.ndarray
    model: Model | str
    sensitivity: tuple[float, float]
    rounding: tuple[float, float]
    spread: np.ndarray | None = None

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


def prepared(site: Site, x: np.ndarray, schedule: Schedule, spread: np.ndarray | None = None) -> Prepared:
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
    if isinstance(site.model, RecordModel):
        if about is not None:
            raise InputError("reference", "'vb' with a model file under a privacy budget", "Use reference='laplace'.")
        return Prepared(own, site.model.function.model.digest, *file_sensitivity(site.model, budget))
    model = model_of(site.potential)
    sensitivity = derivative_sensitivity(model, budget.bounds, budget.neighbours)
    # Numbers large enough to overflow are refused.
    with np.errstate(over="ignore", invalid="ignore"):
        if about is not None:
            factor = averaged_sensitivity(model, budget.bounds, about)
            # Derivatives that no record can change need no noise, averaged or not: zero stays zero.
            sensitivity = (up(factor * sensitivity[0]), up(factor * sensitivity[1]) if sensitivity[1] else 0.0)
        rounding = _rounding(site, model, own, sensitivity, about)
    return Prepared(own, model, sensitivity, rounding, about)


def release_key(site: Site, key: bytes, ready: Prepared) -> bytes:
    """The secret of one release; derived from the site's seed if it has one, for tests only."""
    if site.seed is None:
        return key
    return hashlib.sha256(repr((site.name, site.seed, *ready.where)).encode()).digest()


def release_spent(site: Site) -> BudgetSpent:
    """The error when nothing is left for releases."""
    assert site.budget is not None
    return BudgetSpent(
        f"site {site.name!r}: the share of its privacy budget that study {site.budget.study!r} may spend on releases is "
        "spent (code RELEASE_SPENT). Use the reference that was made with it, or grant a larger release."
    )


def true_derivatives(site: Site, own: np.ndarray, about: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Gradient and Hessian before noise is added; for a model file each record is clipped to its bound."""
    if isinstance(site.model, RecordModel):
        assert site.budget is not None
        return file_derivatives(site.model, site.budget, own)
    return derivatives(site, own, about)[1:]


def gradient_change(site: Site) -> float:
    """How much one record can change the gradient."""
    budget = site.budget
    assert budget is not None
    if isinstance(site.model, RecordModel):
        return file_sensitivity(site.model, budget)[0][0]
    return derivative_sensitivity(model_of(site.potential), budget.bounds, budget.neighbours)[0]


def release_limit(site: Site, alone: bool) -> float:
    """The part of the account that the study may spend; ``alone``: on releases alone, which are accounted for exactly.

    The study's first answer decides which of the two applies: neither bound covers a choice that depends on answers.
    """
    budget = site.budget
    assert budget is not None
    ledger, account = budget.open(releases_only=alone)
    if alone and budget.granted is not None and ledger.rounds(budget.account_name, budget.study):
        raise BudgetSpent(
            f"site {site.name!r}: study {budget.study!r} has spent part of its grant on arrivals, so releases need a share "
            "of their own (code BUDGET_SPENT). Give the study another name, or set the share of releases: "
            "Budget(release=0.5)."
        )
    return budget.study_limit(account, releases_only=alone)


@double_precision
def noisy_derivatives(
    site: Site, x: np.ndarray, step: int, schedule: Schedule = REFERENCE, spread: np.ndarray | None = None
) -> Noisy:
    """``∇U_m`` and ``∇²U_m`` with Gaussian noise, at x within the declared region. Charged before it returns.

    With a spread, their averages over ``N(x, S Sᵀ)``: sums of averages of ``ℓ'`` and ``ℓ''``, which have the same bounds.

    A release that was made before at the same point is repeated at no charge. A new one costs the scheduled part of what is
    left of the study's share, and is refused if nothing is left. The sampler stays exact: a control variate may be any
    symmetric quadratic, provided both sides use the same.

    Raises
    ------
    BudgetSpent
        The share is spent.
    """
    ready, budget = prepared(site, x, schedule, spread), site.budget
    assert budget is not None
    own, about = ready.point, ready.spread
    alone = bool(schedule.usual) and not budget.release
    ledger, account = budget.open(releases_only=alone)
    dataset, study = budget.account_name, budget.study
    records = fingerprint(site.potential)
    ledger.begin(dataset, study, f"release {records[:32]}", bytes.fromhex(fingerprint(site.raw)), "{}")
    asked = hashlib.sha256(repr((records, ready.model, ready.sensitivity, *ready.where)).encode()).digest()
    request = Request(dataset, study, f"release {asked.hex()[:32]}", "release", 0, asked)
    limit = release_limit(site, alone)
    share = (budget.release or schedule.usual) * limit
    left = max(share - ledger.released(dataset, study, asked), 0.0)
    cost = left * schedule.steps[step] / sum(schedule.steps[step:]) if step < len(schedule.steps) else left
    if (step >= len(schedule.steps) or left <= LEAST_LEFT * share) and not ledger.answered(request):
        raise release_spent(site)

    def work(key: bytes) -> Reply:
        key = release_key(site, key, ready)
        try:
            gradient, hessian = true_derivatives(site, own, about)
            sigmas = ready.noise(schedule, account.alpha, cost)
            noisy = release(gradient, sigmas[0], key + b"gradient")
            noisier = release_symmetric(hessian, sigmas[1], key + b"hessian")
        except Exception:
            # The failure may depend on the records: it is charged, and reported by its code alone.
            logger.exception("site %r: a release has failed", site.name)
            return Reply(FAULT, 0.0, cost)
        return Reply(np.concatenate([noisy, noisier.ravel(), sigmas]).astype("<f8").tobytes(), 0.0, cost)

    content = checked_content(site, ledger.answer(request, cost, work, granted=limit))
    values, d = np.frombuffer(content, dtype="<f8"), len(own)
    return Noisy(values[:d], values[d:-2].reshape(d, d), own, float(values[-2]), float(values[-1]))


def checked_content(site: Site, content: bytes) -> bytes:
    """The ledger's reply; raises if it is a fault."""
    if content == FAULT:
        raise NotFinite(site.name, 0, f"site {site.name!r}: its derivatives are not finite there (code FAULT).")
    return content


def release_status(site: Site) -> AccountStatus:
    """The account of a site that releases noisy derivatives alone."""
    budget = site.budget
    assert isinstance(budget, Budget)
    ledger, account = budget.open(releases_only=True)
    dataset = budget.account_name
    change = gradient_change(site)
    return AccountStatus(
        site=site.name,
        dim=site.potential.dim,
        epsilon=account.epsilon,
        delta=account.delta,
        alpha=account.alpha,
        granted=budget.granted,
        cap=0.0,
        excess=0.0,
        sensitivity=Sensitivity(change, change, change),
        releases=ledger.releases(dataset),
        seeded=site.seed is not None,
        remaining=0.0,
        observed=0.0,
        spent=ledger.spent(dataset) / account.limit,
        bound=account.bound,
    )


def _rounding(
    site: Site, model: Model, own: np.ndarray, sensitivity: tuple[float, float], spread: np.ndarray | None
) -> tuple[float, float]:
    """Bounds on the rounding errors of gradient and Hessian at a point; refused if they are not negligible."""
    assert site.budget is not None
    far = own if spread is None else np.abs(own) + 0.5 * np.sum(spread**2, 1)
    if not np.max(np.abs(far), initial=0.0) <= (COX_REGION if model.loss == "cox" else FARTHEST):
        raise PlanRefused(
            f"site {site.name!r}: a point where numbers might overflow, or a count be lost in rounding (code BAD_POINT)."
        )
    bounds, neighbours, size = site.budget.bounds, site.budget.neighbours, float(np.linalg.norm(own))
    factor = 1.0
    if spread is not None:
        # Predictors reach to the last node. The factor two covers the sum over nodes and the deviations.
        size = up(size + LAST_NODE * float(np.linalg.norm(spread)))
        factor = 2 * averaged_sensitivity(model, bounds, spread)
    first = up(factor * gradient_rounding(model, bounds, neighbours, np.eye(model.dim), np.zeros(model.dim), size))
    second = up(factor * hessian_rounding(model, bounds, neighbours, size))
    if any(
        known > 0 and not 2 * off <= LARGEST_SHARE * known
        for known, off in zip(sensitivity, (first, second), strict=True)
    ):
        raise PlanRefused(
            f"site {site.name!r}: a point so far away that rounding is not small against the effect of one record (code "
            "BAD_POINT)."
        )
    return first, second


def release_point(own: np.ndarray, bounds: Bounds) -> np.ndarray:
    """The point at which a site evaluates derivatives requested at ``own``: clipped to the declared region."""
    region = bounds.sizes("region", len(own))
    return own if region is None else np.clip(own, -region, region)
