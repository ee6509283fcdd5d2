"""Checks of a site's derivatives: values that no records within the declared columns can produce are rejected.

Bounds on one record's gradient and Hessian follow from the contract; with the largest number of records, those of a
site. Between points, ``g(x') − g(x) = ∫ H``: if ``|ℓ'''| ≤ ℓ''`` (logistic and Poisson losses) the curvature along a
step Δ changes by at most a factor ``e^D`` with ``D = Σ_j sup|ξ_j| |Δ_j|``, so that

``ΔᵀHΔ (1 − e^{−D})/D ≤ Δ·(g' − g) ≤ ΔᵀHΔ (e^D − 1)/D``

with the Hessian at either end. Both hold for means over ``N(x, S Sᵀ)`` with one S, where ``E|ℓ'''| ≤ E ℓ''``. For two
S, with standard deviations of predictors up to s and s', only Hessians are compared: by
``e^{−|u|} ≤ ℓ''(z + u)/ℓ''(z) ≤ e^{|u|}`` one is at most ``e^D E e^{s|ε|} / E e^{−s'|ε|}`` times the other, with
``E e^{±s|ε|} = 2 e^{s²/2} Φ(±s)``. For a model of one record the bounds are enclosures over all values of the declared
columns. Derivatives of invented records pass: they cannot be distinguished from those of unusual records.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import log_ndtr

from fedpdmc._jax.precision import double_precision
from fedpdmc.enclosures import Interval, enclose, smoothed
from fedpdmc.errors import BadAnswer, NoEnclosure
from fedpdmc.federation.derivative_rounding import FEWER, LEAST, digits_in, digits_of
from fedpdmc.models.model_file.records import CONSTANTS, DESIGN, WEIGHTS, RecordSum
from fedpdmc.potentials.base import public_points
from fedpdmc.privacy.sensitivity import Bounds, slopes

if TYPE_CHECKING:
    from fedpdmc.study.contract import Study

SLACK = 1.05  # factor of the bounds, for rounding
NOISE = 10.0  # factor of the bounds, for noise
LONGEST = 20.0  # steps that may change a predictor by more than this are not checked
MOST_OF_ALL = 0.99  # share of the information from which one site is warned about
LIKE_PRIOR = 0.02  # relative difference of posterior and prior standard deviations below which the run is warned about
FAR_BELOW = 0.5  # the same of a standard deviation relative to the smallest possible one
# Standard errors by which a site may differ from the others: chance gives as much once in a million sites.
CONTRADICTS = 5.0
LARGEST = 1e24  # a curvature beyond this is a standard deviation below 1e-12, which no double precision run can sample


class DerivedAt(NamedTuple):
    """The derivatives of a site at a point, or their means over a Gaussian about it.

    With the predictors' deviation, and the error of entries of the Hessian relative to the roots of its diagonal.
    """

    x: np.ndarray
    spread: np.ndarray | None
    deviation: float
    gradient: np.ndarray
    hessian: np.ndarray
    grid: float


class Plausible:
    """Checks derivatives against the contract, and against each other."""

    def __init__(self, study: Study):
        self._study = study
        # The records of a site, each counted with the largest weight.
        self._most = study.most_records * study.largest_weight
        self._derived: dict[str, list[DerivedAt]] = {}
        if not study.model.loss and study.effects is None:
            self._model, self._largest = DerivativeBounds(study), np.zeros(0)
            return
        self._largest, self._declared = study.design.largest, study.model.declared(study.columns)
        self._facts = study.model.facts(len(self._largest))

    def check(
        self,
        name: str,
        x: np.ndarray,
        gradient: np.ndarray,
        hessian: np.ndarray,
        sites: int = 1,
        spread: np.ndarray | None = None,
    ) -> None:
        """Raise `BadAnswer` for derivatives, or means over a Gaussian, that no records of ``sites`` sites can have."""
        study, noisy = self._study, self._study.noisy
        most = SLACK * (NOISE if noisy else 1.0) * self._most * sites
        slope, curvature = self._of_one_record(x, spread)
        # A coarse release may be off by this much where all records have the largest curvature.
        size, step = np.sqrt(np.abs(np.diag(hessian))), 0.0 if noisy else _grid(x, hessian, sites)
        off = step * 2.0**FEWER * size, step * np.outer(size, size)
        found = ("gradient", gradient, slope, off[0]), ("Hessian", hessian, curvature, off[1])
        for what, value, bound, rounding in found:
            if not (np.abs(value) <= most * bound + rounding + 1e-6).all():
                words = f"a {what} that {study.most_records:,} records within the declared bounds cannot have"
                raise BadAnswer(name, words)
        if noisy:
            return
        before = self._derived.setdefault(name, [])
        now = DerivedAt(np.array(x), spread, self._deviation(spread), gradient, hessian, _grid(x, hessian, sites))
        if study.convex:
            self._convex(name, now)
            for past in before:
                self._between(name, past, now)
        before.append(now)

    def _deviation(self, spread: np.ndarray | None) -> float:
        """The largest standard deviation of a predictor."""
        largest = self._largest
        return 0.0 if spread is None else float(largest @ np.sqrt(np.sum(spread[: len(largest)] ** 2, 1)))

    def _of_one_record(self, x: np.ndarray, spread: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Bounds on the gradient and on the Hessian of one record at a point, or of their means."""
        if self._study.effects is not None:
            return self._with_effects()
        if not self._study.model.loss:
            return self._model.at(x, spread)
        largest, deviation = self._largest, self._deviation(spread)
        outer = np.outer(largest, largest)
        if not self._study.unknown_scale:
            slope, curvature = self._slopes(x, deviation)
            return slope * largest, curvature * outer
        tilt = np.zeros(len(x)) if spread is None else spread[-1]
        if spread is not None:
            # As `LinearUnknownScale.averaged` has it: the mean of e^{−2s} tilts the coefficients.
            x = np.append((x - 2 * spread @ tilt)[:-1], x[-1])
        rest = math.hypot(float(largest @ np.abs(x[:-1])) + max(map(abs, self._declared["outcome"])), deviation)
        with np.errstate(over="ignore"):
            weight = float(np.exp(-2 * x[-1] + 2 * tilt @ tilt))
            cross = 2 * weight * rest * largest
            corner = np.full((1, 1), 2 * weight * rest**2)
            slope = np.append(weight * rest * largest, 1 + weight * rest**2)
            return slope, np.block([[weight * outer, cross[:, None]], [cross[None], corner]])

    def _slopes(self, x: np.ndarray | None = None, deviation: float = 0.0) -> tuple[float, float]:
        """Bounds of ``|ℓ'|`` and ``|ℓ''|``, or of their means over a Gaussian, at a point or everywhere."""
        if self._facts is None:
            return math.inf, math.inf
        region = None if x is None else np.maximum(np.abs(x), 1e-300)
        # The mean of e^{ξ·x} over a Gaussian is that of a predictor that is larger by half its variance.
        low, high = self._declared["offset"] or (0.0, 0.0)
        wider = {"offset": (low, high + 0.5 * deviation**2), "region": region}
        found = slopes(self._facts, Bounds(**self._declared | wider), "replace")
        return found.first, found.second

    def _with_effects(self) -> tuple[np.ndarray, np.ndarray]:
        """If effects are integrated out, a gradient is a mean of losses' slopes, ``H = E Σ ℓ'' ξξᵀ − Cov(Σ ℓ' ξ)``.

        With ``|ℓ'| ≤ s`` and ``|ℓ''| ≤ c`` n records have entries of at most ``(n c + n² s²) sup|ξ_j ξ_k|``. Spreads, and
        families without such bounds, have the limit beyond which double precision cannot sample.
        """
        dim, largest = len(self._study.names), self._largest
        gradient, hessian = np.full(dim, LARGEST / self._most), np.full((dim, dim), LARGEST / self._most)
        slope, curvature = self._slopes()
        if math.isfinite(slope):
            own = slice(0, len(largest))
            gradient[own] = slope * largest
            hessian[own, own] = (curvature + self._most * slope**2) * np.outer(largest, largest)
        return gradient, hessian

    @staticmethod
    def _convex(name: str, now: DerivedAt) -> None:
        none = now._replace(hessian=np.zeros_like(now.hessian))
        if np.diag(now.hessian).min() < 0 or not _below(none, now, 1.0):
            raise BadAnswer(name, "a Hessian with negative curvature, which is impossible for this family")

    def _between(self, name: str, past: DerivedAt, now: DerivedAt) -> None:
        """The change of the gradient against the curvature at both ends of the step."""
        step = now.x - past.x
        reach = 0.0 if self._study.family == "linear" else float(self._largest @ np.abs(step))
        # Means of a quadratic's derivatives are its derivatives.
        same = self._study.family == "linear" or _same_spread(past, now)
        growth = reach + (0.0 if same else _log_growth(past, now))
        if growth > LONGEST:
            return
        factor = math.exp(growth)
        fits = _below(past, now, factor) and _below(now, past, factor)
        if same:
            fits = fits and self._rises(past, now, step, reach)
        if not fits:
            raise BadAnswer(name, "gradients and Hessians at two points that contradict each other")

    @staticmethod
    def _rises(past: DerivedAt, now: DerivedAt, step: np.ndarray, reach: float) -> bool:
        """Whether the gradient changes along a step as the curvature at its ends allows, up to rounding."""
        rise, least, most, off = float(step @ (now.gradient - past.gradient)), -math.inf, math.inf, 0.0
        for one in (past, now):
            curve, size = float(step @ one.hessian @ step), np.sqrt(np.abs(np.diag(one.hessian)))
            off += 2.0**FEWER * one.grid * math.sqrt(abs(curve) + LEAST * float(np.sum((step * size) ** 2)))
            error = (one.grid + 1e-9) * float(np.sum(np.abs(step) * size)) ** 2
            least, most = max(least, curve - error), min(most, curve + error)
        low, high = (-math.expm1(-reach) / reach, math.expm1(reach) / reach) if reach > 0 else (1.0, 1.0)
        return low * least - off <= rise <= high * most + off

    def weigh_sites(self) -> dict[str, dict[str, Any]]:
        """What each site does to the posterior, by gradients ``g_m`` and Hessians ``H_m`` of all sites at the last point.

        Without site m the precision is ``P``, of the other sites and the prior, and the optimum moves by ``P⁻¹ g_m``. If
        all records have the same parameters, this has mean zero and covariance ``P⁻¹ − (P + H_m)⁻¹``. ``contradicts`` is
        the largest of these moves in standard deviations, in ``parameter``; ``share`` the site's part of the information,
        and ``least_records`` the smallest number of records within the declared columns with these derivatives.
        """
        last, prior = {name: one[-1] for name, one in self._derived.items()}, self._study.prior_place
        total = sum((one.hessian for one in last.values()), np.zeros(2 * (len(self._study.names),)))
        total = total if prior is None else total + np.diag(prior[1] ** -2.0)
        if len(last) < 2 or np.linalg.eigvalsh(total)[0] <= 0:
            return {}
        covariance, found = np.linalg.inv(total), {}
        shares = {name: float(np.trace(covariance @ one.hessian)) for name, one in last.items()}
        for name, (x, spread, _, gradient, hessian, _) in last.items():
            slope, curvature = self._of_one_record(x, spread)
            records = max((np.diag(hessian) / np.diag(curvature)).max(), (np.abs(gradient) / slope).max())
            found[name] = {"share": shares[name] / sum(shares.values()), "least_records": int(np.ceil(records))}
            others = total - hessian
            if np.linalg.eigvalsh(others)[0] > 0:
                without = np.linalg.inv(others)
                variance = np.diag(without - covariance)
                moves = np.abs(without @ gradient) / np.sqrt(np.where(variance > 0, variance, np.inf))
                worst = int(np.argmax(moves))
                found[name] |= {"contradicts": float(moves[worst]), "parameter": self._study.names[worst]}
        return found

    def check_posterior(self, mean: np.ndarray, sd: np.ndarray) -> None:
        """Warn if no records of this study could give this posterior, or if it equals the prior."""
        study, dim = self._study, len(self._study.names)
        center, scale = study.prior_place or (np.zeros(dim), np.full(dim, np.inf))
        _, curvature = self._of_one_record(mean)
        most = scale**-2.0 + len(study.sites) * self._most * np.diag(curvature)
        thin = np.flatnonzero(sd < FAR_BELOW / np.sqrt(most))
        if thin.size:
            names = ", ".join(study.names[k] for k in thin)
            warnings.warn(
                f"The posterior's standard deviation of {names} is far below what {study.most_records:,} records per site "
                "could give: the answers of a site are wrong.",
                stacklevel=2,
            )
        same = np.abs(sd / scale - 1) < LIKE_PRIOR
        if study.prior_scale is not None and (same & (np.abs(mean - center) < 0.1 * scale)).all():
            warnings.warn(
                "The posterior equals the prior: the records contributed nothing. Check that every site has read the right "
                "records.",
                stacklevel=2,
            )


def doubts(weights: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Which site has nearly all information, and which contradicts the others most, if one does."""
    words = [
        f"Site {name!r} contributes {100 * own['share']:.4g} % of the information about the parameters. If it does not have "
        "this share of the records, its answers are wrong."
        for name, own in weights.items()
        if own["share"] > MOST_OF_ALL
    ]
    name = max(weights, key=lambda one: weights[one].get("contradicts", 0.0), default="")
    if name and (own := weights[name]).get("contradicts", 0.0) > CONTRADICTS:
        words.append(
            f"Site {name!r} contradicts the other sites: {own['parameter']} differs by {own['contradicts']:.3g} standard "
            f"errors. {100 * own['share']:.3g} % of the information is from this site, of at least "
            f"{own['least_records']:,} records. Check them; if sites do differ, let them in the model."
        )
    return words


def _same_spread(one: DerivedAt, other: DerivedAt) -> bool:
    if one.spread is None or other.spread is None:
        return one.spread is other.spread
    return np.array_equal(one.spread, other.spread)


def _log_growth(one: DerivedAt, other: DerivedAt) -> float:
    """The logarithm of the factor between two mean Hessians that their spreads alone can explain."""

    def mean(one: DerivedAt, sign: float) -> float:
        """``log E e^{±s|ε|}``."""
        return math.log(2) + 0.5 * one.deviation**2 + float(log_ndtr(sign * one.deviation))

    return max(mean(one, 1.0) - mean(other, -1.0), mean(other, 1.0) - mean(one, -1.0))


def _below(one: DerivedAt, other: DerivedAt, factor: float) -> bool:
    """Whether a Hessian is, up to rounding, at most ``factor`` times another.

    An entry of the difference is off by at most ``w_i w_j``, and ``uᵀDu`` by ``(Σ|u_i| w_i)²``: for all axes and
    eigenvectors u it may be that much below zero.
    """
    parts = one.grid * np.abs(np.diag(one.hessian)), factor * other.grid * np.abs(np.diag(other.hessian))
    size = np.sqrt(sum(parts))
    size = np.where(size > 0, size, 1.0)
    scaled = (factor * other.hessian - one.hessian) / np.outer(size, size)
    ways = np.hstack([np.eye(len(size)), np.linalg.eigh(scaled)[1]])
    return bool(np.all(np.sum(ways * (scaled @ ways), 0) >= -(np.sum(np.abs(ways), 0) ** 2)))


def _grid(x: np.ndarray, hessian: np.ndarray, sites: int) -> float:
    """The error of a release relative to its diagonal, whose scale is a power of two and may be half of it.

    It is that of a fine release if some entry is on no coarser grid. Sums are of several grids, and taken to be coarse.
    """
    return 3 * 2.0 ** -digits_of(len(x), sites > 1 or digits_in(hessian) < digits_of(len(x), False))


class DerivativeBounds:
    """Enclosures of gradient and Hessian of a record whose columns are anywhere within their declared bounds."""

    @double_precision
    def __init__(self, study: Study):
        model = study.model
        alike = not any(isinstance(value, dict) for value in model.constants.values())
        self._dim = len(study.names)
        self._boxes = [_box(study, site) for site in (study.sites[:1] if alike else study.sites)]
        function = RecordSum(model.model, model.layout.width)

        def derivatives(x, data):
            def total(x):
                return smoothed(function)(x, data)

            return jax.grad(total)(x), jax.hessian(total)(x)

        self._enclosed = jax.jit(enclose(derivatives))

    @double_precision
    def at(self, x: np.ndarray, spread: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """The largest absolute gradient and Hessian, or means as `Potential.averaged` has them; infinite if unknown."""
        if spread is None:
            return self._at_point(x)
        points, weights = public_points(len(x))
        found = [self._at_point(x + spread @ point) for point in points]
        gradient, hessian = (np.tensordot(np.abs(weights), np.stack(part), 1) for part in zip(*found, strict=True))
        return gradient, hessian

    def _at_point(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        worst = np.zeros(self._dim), np.zeros((self._dim, self._dim))
        for box in self._boxes:
            try:
                found = self._enclosed(jnp.asarray(x), box)
            except NoEnclosure:
                return np.full(self._dim, np.inf), np.full((self._dim, self._dim), np.inf)
            worst = tuple(np.maximum(one, _size(other)) for one, other in zip(worst, found, strict=True))
        return worst  # type: ignore[return-value]


def _size(form: Any) -> np.ndarray:
    """The largest absolute value; infinite where it is not known."""
    size = np.maximum(np.abs(form.lo), np.abs(form.hi)) if isinstance(form, Interval) else np.abs(np.asarray(form))
    return np.where(np.isnan(size), np.inf, size)


def _box(study: Study, site: str) -> dict[str, Any]:
    """Data of one record, with intervals for its columns."""
    bound, box = study.model, {}
    for column in bound.model.source.columns:
        declared = study.columns[bound.columns[column.name]] if column.name in bound.columns else None
        if declared is None:
            low, high = 1.0, 1.0
        else:
            low, high = (0.0, len(declared.levels) - 1.0) if declared.type == "level" else declared.range
        box[column.name] = _interval(low, high, (1, *column.type.shape), column.type.dtype)
    if bound.model.source.group is not None:
        group = bound.model.source.group
        box[group.mask] = _interval(0.0, 1.0, (1, group.length), np.dtype(float))
    if bound.design is not None:
        largest = bound.design.largest[None]
        low = np.where([name == "Intercept" for name in bound.design.names], 1.0, -largest)
        box[DESIGN] = Interval(jnp.asarray(low), jnp.asarray(largest))
    box[CONSTANTS] = {name: jnp.asarray(value) for name, value in bound.constants_of(site).items()}
    box[WEIGHTS] = jnp.ones(1)
    return box


def _interval(low: float, high: float, shape: tuple[int, ...], dtype: np.dtype) -> Interval:
    return Interval(jnp.full(shape, low, dtype), jnp.full(shape, high, dtype))
