"""Disclosure control of exact derivatives: how many records contribute to a release, and what is new in it.

A release is a sum over records, on a grid (`fedpdmc.federation.derivative_rounding`): of gradients ``ℓ'_i ξ_i``, of Hessians
``ℓ''_i ξ_i ξ_iᵀ``. Far from the mode most terms vanish, and the sum may be that of a few records, or of one. Two measures of
the contributions ``w_i ≥ 0`` are limited:

- the *effective number* ``(Σ w)²/Σ w²``, with norms in units of each column's root mean square;
- the largest *share* of one record in any direction. For curvature that is the leverage,
  ``sup_u ℓ''_i (ξ_i·u)² / Σ_j ℓ''_j (ξ_j·u)² = ℓ''_i ξ_iᵀ H⁻¹ ξ_i``. A gradient's terms have signs, so the leverage λ is
  that of the squares; the share of the absolute terms is then at most ``1/(1 + √((1 − λ)/λ))``.

Both apply to the requested release and to its differences from all earlier releases. The share also applies to every
linear combination of releases at several points. What rounding hides counts like contributions of many other records: along
one direction ``½ 2⁻ᵏ √C/d`` of a gradient and ``½ 2⁻ᵏ C/d`` of a Hessian, where C is the sum of all curvatures in these
units; in all directions together ``2√d`` and ``2d`` times as much.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pandas as pd

from fedpdmc.errors import InputError, RequestRefused
from fedpdmc.federation.derivative_rounding import grid
from fedpdmc.potentials import LinearPredictor, LinearUnknownScale, Potential, Quadratic
from fedpdmc.study.contract import Study
from fedpdmc.study.policy import Policy
from fedpdmc.study.record_shares import (
    effective_number,
    largest_combined_share,
    largest_leverage,
    share_of_leverage,
)
from fedpdmc.whitening import Bend

NO_NOISE = np.zeros(2)


class ReleasePlace(NamedTuple):
    """Where derivatives are released.

    Attributes
    ----------
    x : array
        The point.
    spread : array or None
        The root of the covariance over which they are averaged, if they are.
    bend : Bend or None
        If log spreads are bent: point and spread are in coordinates before the bend.
    """

    x: np.ndarray
    spread: np.ndarray | None = None
    bend: Bend | None = None

    @property
    def bend_bytes(self) -> bytes:
        """The numbers of the bend, empty if there is none."""
        return b"" if self.bend is None else np.asarray(self.bend.numbers).tobytes()

    def same(self, other: ReleasePlace) -> bool:
        """Whether two places are equal in every number."""
        bends = [None if place.bend is None else np.asarray(place.bend.numbers) for place in (self, other)]
        pairs = ((self.x, other.x), (self.spread, other.spread), bends)
        return all(
            (a is None and b is None) or (a is not None and b is not None and np.array_equal(a, b)) for a, b in pairs
        )


class Terms(NamedTuple):
    """The contributions of all records at a point: loss, ``ℓ'`` and ``ℓ''``, or their means."""

    value: np.ndarray
    slope: np.ndarray
    curvature: np.ndarray


class DisclosureControl:
    """Decides whether a site may release its derivatives at a point.

    Parameters
    ----------
    records : DataFrame
        As `fedpdmc.study.read_records` gives them.
    potential : Potential
        Of these records.
    policy : Policy
        ``least_records`` is the smallest effective number, ``largest_share`` the largest share, and ``farthest`` the
        largest distance of a parameter from the prior's mean, in the prior's standard deviations.

    Raises
    ------
    InputError
        The contributions of single records are not known for this model.
    """

    def __init__(self, study: Study, site: str, records: pd.DataFrame, potential: Potential, policy: Policy):
        self._take(study, policy)
        self._potential = potential
        self._gaussian = isinstance(potential, (Quadratic, LinearUnknownScale))
        if not self._gaussian and (not isinstance(potential, LinearPredictor) or potential.diagonal):
            raise InputError(
                "policy",
                f"a model ({type(potential).__name__}) whose contributions of single records are not known",
                "Set derivatives = 'none' in contract and policy, or use a privacy budget.",
            )
        self._response, design = study.design.response(records), study.design.matrix(records)
        own = study.coordinates(site)
        self._design = design if own is None else design[:, [k for k in own if k < design.shape[1]]]
        self._weights = study.record_weights(records)
        self._precision = study.options.get("scale", 1.0) ** -2.0
        size = np.sqrt(np.mean(self._design**2, axis=0))
        self._units = np.where(size > 0, size, 1.0)
        self._norm = np.sqrt(np.sum((self._design / self._units) ** 2, axis=1))

    def _take(self, study: Study, policy: Policy) -> None:
        self._policy = policy
        place = study.prior_place
        self._mean, self._scale = (np.asarray(study.prior_mean), None) if place is None else place
        self._guess = study.guess

    def check(self, place: ReleasePlace, own: ReleasePlace, released: list[ReleasePlace]) -> None:
        """Raise `RequestRefused` for a point at which too few records contribute.

        Parameters
        ----------
        place : ReleasePlace
            In all parameters of the study.
        own : ReleasePlace
            The same in the site's own parameters.
        released : list of ReleasePlace
            Where derivatives were released before, in the site's own parameters.
        """
        self._check_distance(place)
        now = self._terms(own.x, own.spread)
        if not all(np.isfinite(part).all() for part in now):
            raise RequestRefused("NOT_FINITE", "contributions that are not finite")
        self._check_release("", now)
        if self._gaussian:
            # Derivatives reveal the second moments of the records only, and one point reveals all of them.
            return
        every = [*(self._terms(place.x, place.spread) for place in released), now]
        noise = np.array([rounding(terms.curvature * self._norm**2, self._design.shape[1]) for terms in every])
        for k, past in enumerate(every[:-1]):
            change = Terms(*(a - b for a, b in zip(now, past, strict=True)))
            self._check_release(f"the difference to point {k + 1}, ", change, noise[k] + noise[-1])
        if released:
            for power, what in enumerate(("slope", "curvature")):
                told = np.stack([getattr(terms, what) for terms in every], 1) * self._norm[:, None] ** (power + 1)
                share = largest_combined_share(told, noise[:, power], self._policy.largest_share)
                self._refuse_share(f"combinations of {what}s of {len(every)} points", share)

    def _check_distance(self, place: ReleasePlace) -> None:
        """Check the point, or one standard deviation about it."""
        if self._scale is None:
            return
        wide = np.zeros_like(place.x) if place.spread is None else np.sqrt(np.sum(place.spread**2, 1))
        ends = np.stack([place.x - wide, place.x + wide])
        ends = ends if place.bend is None else place.bend(ends)
        centers = [self._mean] if self._guess is None else [self._mean, self._guess]
        distance = min(
            float(np.max(np.abs(ends - center) / np.asarray(self._scale), initial=0.0)) for center in centers
        )
        if not distance <= self._policy.farthest:
            raise RequestRefused(
                "TOO_FAR",
                f"a point {distance:.3g} of the prior's standard deviations from its mean; the policy has "
                f"farthest = {self._policy.farthest:g}",
            )

    def _terms(self, x: np.ndarray, spread: np.ndarray | None) -> Terms:
        potential, size = self._potential, self._design.shape[1]
        width = None if spread is None else np.sqrt(np.sum((self._design @ spread[:size]) ** 2, 1))
        if isinstance(potential, LinearPredictor):
            z = jnp.asarray(self._design @ x[:size]) + potential.offset
            loss = potential.loss
            if width is not None:
                found = potential.each(lambda z, y: loss.averaged(z, jnp.asarray(width), y), z)
            else:
                found = [potential.each(f, z) for f in (loss.value, loss.first, loss.second)]
            return Terms(*map(np.asarray, found))
        unknown = isinstance(potential, LinearUnknownScale)
        with np.errstate(over="ignore", invalid="ignore"):
            log_scale = x[-1] if unknown else 0.0
            if spread is not None and unknown:
                # As `LinearUnknownScale.averaged` has it: the mean of e^{−2s} tilts the coefficients.
                x, log_scale = x - 2 * spread @ spread[-1], log_scale - spread[-1] @ spread[-1]
            weight = np.exp(-2 * log_scale) if unknown else self._precision
            rest = self._design @ x[:size] - self._response
            square = rest**2 if width is None else rest**2 + width**2
            return Terms(*(self._weights * part for part in (0.5 * weight * square, weight * rest, weight)))

    def _check_release(self, which: str, terms: Terms, noise: np.ndarray = NO_NOISE) -> None:
        """Check one release, or one difference of two with its rounding."""
        slope, curvature = np.abs(terms.slope), np.abs(terms.curvature)
        rows, all_directions = self._design / self._units, 2 * self._design.shape[1] ** np.array([0.5, 1.0]) * noise
        self._check_number(f"{which}gradient", slope * self._norm, all_directions[0])
        self._check_number(f"{which}Hessian", curvature * self._norm**2, all_directions[1])
        share = share_of_leverage(largest_leverage(rows * slope[:, None], noise[0]))
        self._refuse_share(f"{which}gradient", share)
        share = largest_leverage(rows * np.sqrt(curvature)[:, None], np.sqrt(noise[1]))
        self._refuse_share(f"{which}Hessian", share)

    def _check_number(self, what: str, weight: np.ndarray, noise: float = 0.0) -> None:
        """Check the effective number of records. A release that is zero reveals nothing."""
        found, least = float(effective_number(weight)), self._policy.least_records
        if noise:
            found *= (1 + noise / max(float(weight.sum()), 1e-300)) ** 2
        if not found >= least:
            raise RequestRefused(
                "FEW_RECORDS",
                f"{what}: {found:.3g} effective records contribute; the policy has least_records = {least}",
            )

    def _refuse_share(self, what: str, share: float) -> None:
        most = self._policy.largest_share
        if not share <= most:
            raise RequestRefused(
                "FEW_RECORDS",
                f"{what}: one record has a share of {share:.3g} in some direction; the policy has largest_share = {most:g}",
            )


def rounding(curvature: np.ndarray, dim: int) -> np.ndarray:
    """The size of the rounding of a release along one direction, of gradient and Hessian, from all curvatures."""
    total = float(np.abs(curvature).sum())
    return 0.5 * grid(dim) / dim * np.array([np.sqrt(total), total])
