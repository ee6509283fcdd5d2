"""Disclosure control of exact derivatives: how many records contribute to a release, and what is new in it.

A release is a sum over records, on a grid (`fedpdmc.federation.derivative_rounding`): of gradients ``ℓ'_i ξ_i``, of Hessians
``ℓ''_i ξ_i ξ_iᵀ``. Far from the mode most terms vanish, and the sum may be that of a few records, or of one. Two measures of
the contributions ``w_i ≥ 0`` are limited:

- the *effective number* ``(Σ w)²/Σ w²``, with norms in units of each column's root mean square;
- the largest *share* of one record in any direction. For curvature that is the leverage,
  ``sup_u ℓ''_i (ξ_i·u)² / Σ_j ℓ''_j (ξ_j·u)² = ℓ''_i ξ_iᵀ H⁻¹ ξ_i``. A gradient's terms have signs, so the leverage λ is
  that of the squares; the share of the absolute terms is then at most ``1/(1 + √((1 − λ)/λ))``.

Both apply to the requested release and to its differences from all earlier releases. The share also applies to every
linear combination of releases at several points.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pandas as pd

from fedpdmc.bent_coordinates import Bend
from fedpdmc.errors import InputError
from fedpdmc.federation.derivative_rounding import FINE
from fedpdmc.potentials import LinearPredictor, LinearUnknownScale, Potential, Quadratic
from fedpdmc.study.contract import Study
from fedpdmc.study.policy import Policy
from fedpdmc.study.record_shares import effective_number, largest_leverage, share_of_leverage

# Differences and combinations of releases that cancel all but this share of the contributions are not checked: releases are
# on a grid, and three bits are left of them.
RESOLVED = 8 * 2.0**-FINE


class DisclosureRefused(Exception):
    """A release would disclose too much: a code for the coordinator, and a text for the site's own log."""

    def __init__(self, code: str, words: str):
        self.code = code
        super().__init__(words)


class Place(NamedTuple):
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

    def same(self, other: Place) -> bool:
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
    study : Study
    site : str
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
        self._precision = study.options.get("scale", 1.0) ** -2.0
        size = np.sqrt(np.mean(self._design**2, axis=0))
        self._units = np.where(size > 0, size, 1.0)
        self._norm = np.sqrt(np.sum((self._design / self._units) ** 2, axis=1))

    def _take(self, study: Study, policy: Policy) -> None:
        self._policy = policy
        place = study.prior_place
        self._mean, self._scale = (np.asarray(study.prior_mean), None) if place is None else place
        self._guess = study.guess

    def check(self, place: Place, own: Place, released: list[Place]) -> None:
        """Raise `DisclosureRefused` for a point at which too few records contribute.

        Parameters
        ----------
        place : Place
            In all parameters of the study.
        own : Place
            The same in the site's own parameters.
        released : list of Place
            Where derivatives were released before, in the site's own parameters.
        """
        self._check_distance(place)
        now = self._terms(own.x, own.spread)
        if not all(np.isfinite(part).all() for part in now):
            raise DisclosureRefused("NOT_FINITE", "contributions that are not finite")
        self._check_release("", now)
        if self._gaussian:
            # Derivatives reveal the second moments of the records only, and one point reveals all of them.
            return
        before = [self._terms(place.x, place.spread) for place in released]
        for k, past in enumerate(before):
            change = Terms(*(a - b for a, b in zip(now, past, strict=True)))
            self._check_release(f"the difference to point {k + 1}, ", _without_rounding(change, now))
        if before:
            for what, power in (("slope", 1), ("curvature", 2)):
                told = np.stack([getattr(terms, what) for terms in [*before, now]], 1)
                self._check_share(
                    f"combinations of {what}s of {len(before) + 1} points", _span(told, self._norm**power)
                )

    def _check_distance(self, place: Place) -> None:
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
            raise DisclosureRefused(
                "TOO_FAR",
                f"a point {distance:.3g} of the prior's standard deviations from its mean; the policy has "
                f"farthest = {self._policy.farthest:g}",
            )

    def _terms(self, x: np.ndarray, spread: np.ndarray | None) -> Terms:
        potential, size = self._potential, self._design.shape[1]
        width = None if spread is None else np.sqrt(np.sum((self._design @ spread[:size]) ** 2, 1))
        if isinstance(potential, LinearPredictor):
            z = jnp.asarray(self._design @ x[:size]) + potential.offset
            loss, y = potential.loss, potential.response
            if width is not None:
                return Terms(*(np.asarray(part) for part in loss.averaged(z, jnp.asarray(width), y)))
            return Terms(*(np.asarray(f(z, y)) for f in (loss.value, loss.first, loss.second)))
        unknown = isinstance(potential, LinearUnknownScale)
        with np.errstate(over="ignore", invalid="ignore"):
            log_scale = x[-1] if unknown else 0.0
            if spread is not None and unknown:
                # As `LinearUnknownScale.averaged` has it: the mean of e^{−2s} tilts the coefficients.
                x, log_scale = x - 2 * spread @ spread[-1], log_scale - spread[-1] @ spread[-1]
            weight = np.exp(-2 * log_scale) if unknown else self._precision
            rest = self._design @ x[:size] - self._response
            square = rest**2 if width is None else rest**2 + width**2
            return Terms(0.5 * weight * square, weight * rest, np.full(len(rest), weight))

    def _check_release(self, which: str, terms: Terms) -> None:
        """Check one release, or one difference of two."""
        slope, curvature = np.abs(terms.slope), np.abs(terms.curvature)
        self._check_number(f"{which}gradient", slope * self._norm)
        self._check_number(f"{which}Hessian", curvature * self._norm**2)
        rows = self._design / self._units
        self._check_share(f"{which}gradient", rows * slope[:, None])
        self._check_share(f"{which}Hessian", rows * np.sqrt(curvature)[:, None], squares=True)

    def _check_number(self, what: str, weight: np.ndarray) -> None:
        """Check the effective number of records. A release that is zero reveals nothing."""
        found, least = float(effective_number(weight)), self._policy.least_records
        if not found >= least:
            raise DisclosureRefused(
                "FEW_RECORDS",
                f"{what}: {found:.3g} effective records contribute; the policy has least_records = {least}",
            )

    def _check_share(self, what: str, rows: np.ndarray, squares: bool = False) -> None:
        """Check the largest share of one record in any direction of the rows' span."""
        self._check_leverage(what, largest_leverage(rows), squares)

    def _check_leverage(self, what: str, found: float, squares: bool = False) -> None:
        """Check the largest leverage of one record: its share of a sum of squares, or of a sum."""
        most, share = self._policy.largest_share, found if squares else share_of_leverage(found)
        if not share <= most:
            raise DisclosureRefused(
                "FEW_RECORDS",
                f"{what}: one record has a share of {share:.3g} in some direction; the policy has largest_share = {most:g}",
            )


def _without_rounding(change: Terms, now: Terms) -> Terms:
    """The differences, with those below the grid of releases replaced by zero."""
    pairs = zip(change, now, strict=True)
    return Terms(*(d if np.abs(d).sum() > RESOLVED * np.abs(w).sum() else np.zeros_like(d) for d, w in pairs))


def _span(told: np.ndarray, norm: np.ndarray) -> np.ndarray:
    """An orthonormal basis of the weights of records in linear combinations of releases at several points."""
    rows = told * norm[:, None]
    size = np.sqrt(np.sum(rows**2, axis=0))
    rows = rows[:, size > 0] / size[size > 0]
    if not rows.size:
        return np.zeros((len(told), 0))
    left, values, _ = np.linalg.svd(rows, full_matrices=False)
    return left[:, values > RESOLVED * values[0]]
