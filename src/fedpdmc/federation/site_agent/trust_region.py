"""The trust region of a site without a privacy budget: it answers plans near the posterior only.

An arrival reveals where the site's gradient changed a path and, for reflections, its direction. A coordinator that could
choose coordinates and control variates freely could read the gradient at points of its choice, far from where many records
contribute. So the control variate must be the site's own Taylor polynomial at the point whose derivatives were released
last, with a part κ of its curvature that is close to one. The reference may be at most as wide as that allows,
``κ Sᵀ H_m S ≤ 1`` up to a margin; in a few directions W, in which tails are wide, ``Sᵀ (H_m − W Wᵀ) S ≤ 1`` with
``Sᵀ W Wᵀ S ≤ 8``: there standard deviations are up to three times as large. Plans must begin within a number of its standard
deviations. The same holds for the Gaussians over which derivatives are averaged: a wide one has a small mean Hessian, which
would allow a wide reference. In such coordinates ``Σ ℓ''_i (ξ_i·S a)² ≤ |a|²/κ``: with n records predictors move by about
``2 |a|/√n``, and along W by up to three times that, so that no record stands out.

Where log spreads are bent (`fedpdmc.whitening`), all of this is in coordinates before the bend, which must be that
of the last release. A bend leaves the other parameters as they are. It may take a log spread far within few standard
deviations: upwards that is limited like the distance of plans. Downwards it is not: as a spread tends to zero the effects
vanish, and arrivals tend to those of a model without effects, whose other parameters are limited as before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fedpdmc.dynamics import Rotation
from fedpdmc.errors import RequestRefused
from fedpdmc.federation import messages
from fedpdmc.federation.derivative_rounding import Release
from fedpdmc.federation.site_agent.derivative_disclosure import ReleasePlace, prior_distance
from fedpdmc.whitening import Bend

if TYPE_CHECKING:
    from fedpdmc.study.contract import Study
    from fedpdmc.study.policy import Policy

WIDEST = 1.2  # the largest eigenvalue of SᵀHS: one, up to the grid of releases
WIDEST_NOT_CONVEX = 100.0  # the same if other sites' curvature may be negative
# The same for a spread, which was made from derivatives at another point. Searches reach up to 1.1 on usual records.
WIDEST_SPREAD = 4.0
# The least part κ of the released curvature that a control variate may have: variances are at most 10 % larger.
LEAST_KEPT = 0.909
MOST_WIDE = 8  # directions in which a reference may be as wide as the tails
# The largest eigenvalue of SᵀWWᵀS: variances are at most nine times as large as the released curvature says.
WIDEST_TAIL = 8.0 * (1 + 1e-6)
SAME = 1e-9  # relative difference of two quadratics that are equal up to rounding
LAST_STEP = 3.0  # the centre may differ from the last point by the remaining step of the search for the mode
REACH = 10.0  # largest distance of plans in standard deviations, a constant part
REACH_PER_ROOT = 3.0  # the part for each root of the dimension
BEYOND = 2.0  # largest distance of plans, as a factor of the policy's ``farthest``


class TrustRegion:
    """The coordinates in which a site answers plans, and how far out."""

    def __init__(self, study: Study, site: str, policy: Policy):
        self._study, self._farthest = study, BEYOND * policy.farthest
        self._coordinates = study.coordinates(site)
        self.reference: tuple[np.ndarray, np.ndarray, Bend | None] | None = None

    @property
    def _convex(self) -> bool:
        return self._study.convex

    def check_spread(self, spread: np.ndarray, hessian: np.ndarray, bend: Bend | None) -> None:
        """Raise `RequestRefused` for a Gaussian wider than the site's records allow, given their mean Hessian over it."""
        widest = _widest(spread, hessian, bend)
        if not widest <= (WIDEST_SPREAD if self._convex else WIDEST_NOT_CONVEX):
            words = f"a spread {np.sqrt(max(widest, 0)):.3g} times as wide as this site's records allow"
            raise RequestRefused("TOO_WIDE", words)

    def check_opening(self, message: messages.Open, place: ReleasePlace | None, release: Release | None) -> None:
        """Raise `RequestRefused` unless the reference belongs to the last release, at this place."""
        if place is None or release is None or (message.order and not np.array_equal(message.point, place.x)):
            raise RequestRefused("NOT_TOLD", "a control variate at a point other than the last release")
        gradient, hessian = release.gradient, release.hessian
        point, bend = place.x, np.zeros((0, 0)) if place.bend is None else np.asarray(place.bend.numbers)
        if not np.array_equal(message.bend, bend):
            raise RequestRefused("NOT_TOLD", "a bend other than that of the last release")
        if not LEAST_KEPT <= message.kept <= 1.0:
            raise RequestRefused("NOT_TOLD", f"a control variate with {message.kept:.3g} of the released curvature")
        scale = message.scale if message.scale.ndim == 2 else np.diag(message.scale)
        wide = message.wide @ message.wide.T if message.wide.size else np.zeros_like(hessian)
        if message.wide.size and not (
            message.wide.shape[1] <= MOST_WIDE and _curvature(scale, wide) <= WIDEST_TAIL and place.bend is None
        ):
            raise RequestRefused("TOO_WIDE", "a reference that is widened in more directions, or by more, than allowed")
        if message.order and message.linear.size:
            own = message.kept * hessian if message.order == 2 else np.zeros_like(hessian)
            less = wide / len(self._study.sites)
            linear = gradient - own @ point + less @ message.center
            size = np.abs(gradient).max() + np.abs(hessian).max() * (1 + np.abs(point).max())
            off = max(np.abs(message.precision - own + less).max(), np.abs(message.linear - linear).max())
            if not off <= SAME * size:
                raise RequestRefused("NOT_TOLD", "a control variate that differs from the released derivatives")
        widest = _widest(scale, message.kept * hessian - wide, place.bend)
        most = WIDEST if self._convex else WIDEST_NOT_CONVEX
        step = np.linalg.solve(scale, message.center - point)
        if not widest <= most or not float(np.sqrt(step @ step)) <= LAST_STEP:
            words = f"a reference {np.sqrt(max(widest, 0)):.3g} times as wide as this site's records allow"
            raise RequestRefused("TOO_WIDE", words)

    def opened(self, message: messages.Open, bend: Bend | None) -> None:
        """Store the reference of the run."""
        self.reference = message.center, message.scale, bend

    def check_plans(self, message: messages.Plans) -> None:
        """Raise `RequestRefused` for plans that begin too far out."""
        assert self.reference is not None
        center, scale, bend = self.reference
        start, dim = message.start, len(center)
        if self._study.reference != "none":
            square = np.sum(start**2, -1)
            if self._study.dynamics().flow.rotating:
                square = square + np.max(np.sum(message.velocity**2, -1), -1, initial=0.0)
            if not np.all(square <= (REACH + REACH_PER_ROOT * np.sqrt(dim)) ** 2):
                words = f"a plan {np.sqrt(square.max()):.3g} standard deviations from the reference"
                raise RequestRefused("TOO_FAR", words)
        place = self._study.prior_place
        if place is None:
            return
        own = slice(None) if start.shape[1] == dim else self._coordinates
        x = start if start.shape[1] != dim else center + (start @ scale.T if scale.ndim == 2 else start * scale)
        mean, sd = (part[own] for part in place)
        if bend is not None:
            # The only coordinates that grow faster than the path: limited all along it. A low spread discloses nothing.
            index = list(bend.index)
            x[:, index] = np.maximum(_highest(message, center, scale, bend), mean[index])
        distance = prior_distance(x, mean, sd, self._study.guess)
        if not distance <= self._farthest:
            raise RequestRefused(
                "TOO_FAR",
                f"a plan {distance:.3g} of the prior's standard deviations from its mean; the policy has farthest = "
                f"{self._farthest / BEYOND:g}, which plans may exceed {BEYOND:g} times",
            )


def _highest(message: messages.Plans, center: np.ndarray, scale: np.ndarray, bend: Bend) -> np.ndarray:
    """The largest value of every bent parameter along rotating plans.

    ``u(t) = c + S a cos t + S v sin t`` is at most ``c + √((S a)² + (S v)²)`` in each coordinate, and T increases.
    """
    rows = scale if scale.ndim == 2 else np.diag(scale)
    a, highest = message.start, np.full(message.start.shape, -np.inf)
    for velocity, duration in zip(np.moveaxis(message.velocity, 1, 0), message.duration.T, strict=True):
        highest = np.maximum(highest, center + np.hypot(a @ rows.T, velocity @ rows.T))
        a, _ = Rotation().move(a, velocity, duration)
    with np.errstate(over="ignore"):
        return bend(highest)[:, list(bend.index)]


def _widest(root: np.ndarray, hessian: np.ndarray, bend: Bend | None) -> float:
    """The largest eigenvalue of ``Sᵀ H S``; with a bend, also that of the parameters that are not bent.

    A bend adds ``T'' ∂U/∂s`` to the curvature of its own coordinate, and could make it as negative as it likes: beside it a
    wide reference of the others would not be seen.
    """
    found = _curvature(root, hessian)
    if bend is None:
        return found
    others = np.delete(np.arange(len(hessian)), bend.index)
    return max(found, _curvature(root[others], hessian[np.ix_(others, others)]))


def _curvature(root: np.ndarray, hessian: np.ndarray) -> float:
    """The largest eigenvalue of ``Sᵀ H S``; infinite if it overflows."""
    with np.errstate(over="ignore", invalid="ignore"):
        matrix = root.T @ hessian @ root
    return float(np.linalg.eigvalsh(matrix)[-1]) if np.isfinite(matrix).all() else np.inf
