"""Disclosure control of derivatives without noise: how many records carry a release, and what is new in it.

Such a release is a sum over records: of losses, of gradients ``ℓ'_i ξ_i``, of Hessians ``ℓ''_i ξ_i ξ_iᵀ``. Far from the mode
most terms vanish, and the sum is that of a few records, or of one. With contributions ``w_i ≥ 0`` two measures are taken:

- the *effective number* ``(Σ w)²/Σ w²``, with norms in units of each column's root mean square;
- the largest *share* of one record in any direction. Of curvature that is the leverage,
  ``sup_u ℓ''_i (ξ_i·u)² / Σ_j ℓ''_j (ξ_j·u)² = ℓ''_i ξ_iᵀ H⁻¹ ξ_i``. A gradient's terms have signs, so the leverage λ is
  that of the squares; the share of the absolute terms is then at most ``1/(1 + √((1 − λ)/λ))``.

Both are taken of what is asked, of its differences to all that was released before, and the share also of every linear
combination of releases at several points.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pandas as pd

from fedpdmc.errors import InputError
from fedpdmc.potentials import LinearPredictor, LinearUnknownScale, Potential, Quadratic
from fedpdmc.study.contract import Study
from fedpdmc.study.policy import Policy

# Relative eigenvalue of a Gram matrix below which a direction is rounding.
ROUNDING = 1e-12
# A difference of two releases that is smaller, relatively, is rounding: nothing is new.
NOTHING_NEW = 1e-13
# Of contributions at several points: a combination that cancels all but this much of them is not looked at.
CANCELLED = 1e-3


class Disclosing(Exception):
    """A point at which too much would be told, with the code for the coordinator and words for the site."""

    def __init__(self, code: str, words: str):
        self.code = code
        super().__init__(words)


class Terms(NamedTuple):
    """What each record contributes at a point: its loss, ``ℓ'`` and ``ℓ''``."""

    value: np.ndarray
    slope: np.ndarray
    curvature: np.ndarray


class Control:
    """Decides whether a site may tell its derivatives at a point.

    Parameters
    ----------
    study : Study
    site : str
    records : DataFrame
        As `fedpdmc.study.read_records` gives them.
    potential : Potential
        Of these records.
    policy : Policy
        ``least_records`` is the least effective number, ``largest_share`` the largest share, and ``farthest`` the largest
        distance of a parameter from the prior's mean, in the prior's standard deviations.

    Raises
    ------
    InputError
        What single records contribute is not known of this model.
    """

    def __init__(self, study: Study, site: str, records: pd.DataFrame, potential: Potential, policy: Policy):
        self._potential, self._policy = potential, policy
        self._mean, self._scale, self._guess = np.asarray(study.prior_mean), study.prior_scale, study.guess
        self._gaussian = isinstance(potential, (Quadratic, LinearUnknownScale))
        if not self._gaussian and (not isinstance(potential, LinearPredictor) or potential.diagonal):
            raise InputError(
                "policy",
                f"a model ({type(potential).__name__}) of which it is not known what single records contribute",
                "Set derivatives = 'none' in contract and policy, or use a privacy budget.",
            )
        self._response, design = study.design.response(records), study.design.matrix(records)
        own = study.coordinates(site)
        self._design = design if own is None else design[:, [k for k in own if k < design.shape[1]]]
        self._precision = study.options.get("scale", 1.0) ** -2.0
        size = np.sqrt(np.mean(self._design**2, axis=0))
        self._units = np.where(size > 0, size, 1.0)
        self._norm = np.sqrt(np.sum((self._design / self._units) ** 2, axis=1))

    def check(self, x: np.ndarray, own: np.ndarray, released: list[np.ndarray]) -> None:
        """Raise `Disclosing` for a point at which too few records carry the weight.

        Parameters
        ----------
        x : array
            The point, in all parameters of the study.
        own : array
            The point in the site's own parameters.
        released : list of array
            The points, in the site's own parameters, at which derivatives were told before.
        """
        self._near(x)
        now = self._terms(own)
        if not all(np.isfinite(part).all() for part in now):
            raise Disclosing("NOT_FINITE", "contributions that are not finite")
        self._alone("", now)
        if self._gaussian:
            # All that can be told are the second moments of the records, and one point tells them: nothing is new.
            return
        before = [self._terms(point) for point in released]
        for k, past in enumerate(before):
            change = Terms(*(a - b for a, b in zip(now, past, strict=True)))
            self._alone(f"the difference to point {k + 1}, ", _what_is_new(change, now))
        if before:
            for what, power in (("value", 0), ("slope", 1), ("curvature", 2)):
                told = np.stack([getattr(terms, what) for terms in [*before, now]], 1)
                self._share(f"combinations of {what}s of {len(before) + 1} points", _span(told, self._norm**power))

    def _near(self, x: np.ndarray) -> None:
        if self._scale is None:
            return
        centers = [self._mean] if self._guess is None else [self._mean, self._guess]
        distance = min(float(np.max(np.abs(x - center) / np.asarray(self._scale), initial=0.0)) for center in centers)
        if not distance <= self._policy.farthest:
            raise Disclosing(
                "TOO_FAR",
                f"a point {distance:.3g} of the prior's standard deviations from its mean; the policy has "
                f"farthest = {self._policy.farthest:g}",
            )

    def _terms(self, x: np.ndarray) -> Terms:
        potential, coefficients = self._potential, x[: self._design.shape[1]]
        if isinstance(potential, LinearPredictor):
            z = jnp.asarray(self._design @ coefficients) + potential.offset
            loss = potential.loss
            return Terms(*(np.asarray(f(z, potential.response)) for f in (loss.value, loss.first, loss.second)))
        unknown = isinstance(potential, LinearUnknownScale)
        with np.errstate(over="ignore", invalid="ignore"):
            weight = np.exp(-2 * x[-1]) if unknown else self._precision
            rest = self._design @ coefficients - self._response
            return Terms(0.5 * weight * rest**2, weight * rest, np.full(len(rest), weight))

    def _alone(self, which: str, terms: Terms) -> None:
        """Look at one release, or one difference of two."""
        value, slope, curvature = (np.abs(part) for part in terms)
        self._number(f"{which}value", value)
        self._number(f"{which}gradient", slope * self._norm)
        self._number(f"{which}Hessian", curvature * self._norm**2)
        rows = self._design / self._units
        self._share(f"{which}gradient", rows * slope[:, None])
        self._share(f"{which}Hessian", rows * np.sqrt(curvature)[:, None], squares=True)

    def _number(self, what: str, weight: np.ndarray) -> None:
        """The effective number of records, or none at all where nothing is told."""
        largest = weight.max(initial=0.0)
        if largest == 0:
            return
        weight = weight / largest
        found, least = float(weight.sum() ** 2 / np.sum(weight**2)), self._policy.least_records
        if not found >= least:
            raise Disclosing(
                "FEW_RECORDS",
                f"{what}: {found:.3g} effective records carry it; the policy has least_records = {least}",
            )

    def _share(self, what: str, rows: np.ndarray, squares: bool = False) -> None:
        """The largest share of one record in any direction of the rows' span."""
        most = self._policy.largest_share
        found = largest_leverage(rows)
        share = found if squares else 1 / (1 + math.sqrt((1 - found) / found)) if found > 0 else 0.0
        if not share <= most:
            raise Disclosing(
                "FEW_RECORDS",
                f"{what}: one record carries {share:.3g} of it in some direction; the policy has largest_share = {most:g}",
            )


def largest_leverage(rows: np.ndarray) -> float:
    """``max_i a_iᵀ (Σ a_j a_jᵀ)⁺ a_i``: the largest share of one row in the sum of squares in any direction."""
    size = np.sqrt(np.sum(rows**2, axis=0))
    rows = rows[:, size > 0] / size[size > 0]
    if not rows.size:
        return 0.0
    values, vectors = np.linalg.eigh(rows.T @ rows)
    kept = values > ROUNDING * values[-1]
    whitened = rows @ (vectors[:, kept] / np.sqrt(values[kept]))
    return min(float(np.sum(whitened**2, axis=1).max()), 1.0)


def _what_is_new(change: Terms, now: Terms) -> Terms:
    """The differences, zero where they are rounding."""
    pairs = zip(change, now, strict=True)
    return Terms(*(d if np.abs(d).sum() > NOTHING_NEW * np.abs(w).sum() else np.zeros_like(d) for d, w in pairs))


def _span(told: np.ndarray, norm: np.ndarray) -> np.ndarray:
    """An orthonormal basis of what combinations of releases at several points can weigh the records with."""
    rows = told * norm[:, None]
    size = np.sqrt(np.sum(rows**2, axis=0))
    rows = rows[:, size > 0] / size[size > 0]
    if not rows.size:
        return np.zeros((len(told), 0))
    left, values, _ = np.linalg.svd(rows, full_matrices=False)
    return left[:, values > CANCELLED * values[0]]
