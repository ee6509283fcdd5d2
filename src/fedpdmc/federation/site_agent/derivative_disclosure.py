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

For a linear predictor these are computed from the losses' derivatives. If the model is a program of one record, gradients
``g_i`` and Hessians ``H_i`` are computed record by record. Hessians need not be positive: ``|H_i|``, with the absolute
eigenvalues, takes the place of ``ℓ''_i ξ_i ξ_iᵀ``. The share of one record in any direction, and in any combination of
releases, is the largest eigenvalue of ``B^{−½} T_iᵀ T_i B^{−½}`` with ``B = Σ_j T_jᵀ T_j``. If effects of groups are
integrated out, a record's contribution is what the release loses without it. Releases in bent coordinates ``s = T(u)`` are
compared with others in units of s, that is after division by ``T'`` at their point.
"""

from __future__ import annotations

import abc
import dataclasses
import hashlib
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from fedpdmc._jax.precision import double_precision
from fedpdmc.errors import InputError, RequestRefused
from fedpdmc.federation.derivative_rounding import grid
from fedpdmc.models.model_file.records import RecordModel
from fedpdmc.potentials import LinearPredictor, LinearUnknownScale, Potential, Quadratic, RandomEffects
from fedpdmc.potentials.base import public_points
from fedpdmc.study.contract import Study
from fedpdmc.study.policy import Policy
from fedpdmc.study.record_shares import (
    effective_number,
    largest_combined_share,
    largest_leverage,
    leverages,
    share_of_leverage,
)
from fedpdmc.whitening import Bend

NO_NOISE = np.zeros(2)


class ReleasePlace(NamedTuple):
    """Where derivatives are released."""

    x: np.ndarray  # the point
    spread: np.ndarray | None = None  # the root of the covariance over which they are averaged, if they are
    bend: Bend | None = None  # if log spreads are bent: point and spread are in coordinates before the bend

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


def disclosure_control(
    study: Study, site: str, records: pd.DataFrame, potential: Potential | RecordModel, policy: Policy
) -> DisclosureControl:
    """The disclosure control for a site's model, with its records as `fedpdmc.study.read_records` gives them."""
    if isinstance(potential, RandomEffects):
        return ModelDisclosure(study, GroupedRecords(GroupedTerms(), potential.stripped(), potential.dim), policy)
    if isinstance(potential, RecordModel):
        return ModelDisclosure(study, potential, policy)
    return LinearDisclosure(study, site, records, potential, policy)


class DisclosureControl(abc.ABC):
    """Decides whether a site may release its derivatives at a point, from the contributions of single records.

    Contributions at a place are a tuple of arrays with a row for each record, so that those of two places can be subtracted.

    ``policy``: ``least_records`` is the smallest effective number, ``largest_share`` the largest share, and
    ``farthest`` the largest distance of a parameter from the prior's mean, in the prior's standard deviations.
    """

    # Whether one release reveals all that any release does.
    constant = False

    def __init__(self, study: Study, policy: Policy):
        self._policy = policy
        place = study.prior_place
        self._mean, self._scale = (np.asarray(study.prior_mean), None) if place is None else place
        self._guess = study.guess

    @abc.abstractmethod
    def _at(self, place: ReleasePlace) -> Any:
        """The contributions of all records at a place."""

    @abc.abstractmethod
    def _in_units(self, every: list[Any]) -> list[Any]:
        """Contributions at several places in the units of the last one."""

    @abc.abstractmethod
    def _sizes(self, terms: Any) -> tuple[int, np.ndarray, np.ndarray, np.ndarray]:
        """The number of parameters; the size of each record's gradient, Hessian and curvature."""

    @abc.abstractmethod
    def _shares(self, terms: Any, noise: np.ndarray) -> tuple[float, float]:
        """The largest share of one record in gradient and Hessian."""

    @abc.abstractmethod
    def _combined_shares(self, every: list[Any], noise: np.ndarray) -> dict[str, float]:
        """The largest share of one record in combinations of several releases, by what is combined."""

    def check(self, place: ReleasePlace, own: ReleasePlace, released: list[ReleasePlace]) -> None:
        """Raise `RequestRefused` for a point at which too few records contribute.

        ``place``: in all parameters of the study. ``own``: the same in the site's own parameters. ``released``: where
        derivatives were released before, in the site's own parameters.
        """
        self._check_distance(place)
        now = self._at(own)
        if not all(np.isfinite(part).all() for part in now):
            raise RequestRefused("FEW_RECORDS", "contributions that are not finite, so that their number is not known")
        if self.constant:
            released = []
        every = self._in_units([*map(self._at, released), now])
        now, noise = every[-1], np.array([self._rounding(terms) for terms in every])
        self._check_release("", now)
        for k, past in enumerate(every[:-1]):
            change = type(now)(*(a - b for a, b in zip(now, past, strict=True)))
            self._check_release(f"the difference to point {k + 1}, ", change, noise[k] + noise[-1])
        if released:
            for what, share in self._combined_shares(every, noise).items():
                self._refuse_share(f"combinations of {what}s of {len(every)} points", share)

    def _check_distance(self, place: ReleasePlace) -> None:
        """Check the point, or one standard deviation about it."""
        if self._scale is None:
            return
        wide = np.zeros_like(place.x) if place.spread is None else np.sqrt(np.sum(place.spread**2, 1))
        ends = np.stack([place.x - wide, place.x + wide])
        ends = ends if place.bend is None else place.bend(ends)
        distance = prior_distance(ends, self._mean, np.asarray(self._scale), self._guess)
        if not distance <= self._policy.farthest:
            found = f"a point {distance:.3g} of the prior's standard deviations from its mean"
            raise RequestRefused("TOO_FAR", f"{found}; the policy has farthest = {self._policy.farthest:g}")

    def _rounding(self, terms: Any) -> np.ndarray:
        """The size of the rounding of a release along one direction, of gradient and Hessian, from all curvatures."""
        dim, _, _, curvature = self._sizes(terms)
        total = float(np.abs(curvature).sum())
        return 0.5 * grid(dim) / dim * np.array([np.sqrt(total), total])

    def _check_release(self, which: str, terms: Any, noise: np.ndarray = NO_NOISE) -> None:
        """Check one release, or one difference of two with its rounding."""
        dim, gradient, hessian, _ = self._sizes(terms)
        all_directions = 2 * dim ** np.array([0.5, 1.0]) * noise
        self._check_number(f"{which}gradient", gradient, all_directions[0])
        self._check_number(f"{which}Hessian", hessian, all_directions[1])
        for what, share in zip(("gradient", "Hessian"), self._shares(terms, noise), strict=True):
            self._refuse_share(f"{which}{what}", share)

    def _check_number(self, what: str, weight: np.ndarray, noise: float) -> None:
        """Check the effective number of records. A release that is zero reveals nothing."""
        found, least = float(effective_number(weight)), self._policy.least_records
        if noise:
            found *= (1 + noise / max(float(weight.sum()), 1e-300)) ** 2
        if not found >= least:
            words = f"{what}: {found:.3g} effective records contribute; the policy has least_records = {least}"
            raise RequestRefused("FEW_RECORDS", words)

    def _refuse_share(self, what: str, share: float) -> None:
        most = self._policy.largest_share
        if not share <= most:
            words = f"{what}: one record has a share of {share:.3g} in some direction"
            raise RequestRefused("FEW_RECORDS", f"{words}; the policy has largest_share = {most:g}")


def prior_distance(x: np.ndarray, mean: np.ndarray, sd: np.ndarray, guess: np.ndarray | None) -> float:
    """The largest distance of a parameter from the prior's mean, or from a start in the contract, in standard deviations."""
    centers = [mean] if guess is None else [mean, guess]
    return min(float(np.max(np.abs(x - center) / sd, initial=0.0)) for center in centers)


class Terms(NamedTuple):
    """The contributions of all records at a point: loss, ``ℓ'`` and ``ℓ''``, or their means."""

    value: np.ndarray
    slope: np.ndarray
    curvature: np.ndarray


class LinearDisclosure(DisclosureControl):
    """Disclosure control of records with a linear predictor.

    Raises `InputError`: the contributions of single records are not known for this model.
    """

    def __init__(self, study: Study, site: str, records: pd.DataFrame, potential: Potential, policy: Policy):
        super().__init__(study, policy)
        self._potential = potential
        # Derivatives reveal the second moments of the records only, and one point reveals all of them.
        self.constant = isinstance(potential, (Quadratic, LinearUnknownScale))
        if not self.constant and (not isinstance(potential, LinearPredictor) or potential.diagonal):
            found = f"a model ({type(potential).__name__}) whose contributions of single records are not known"
            remedy = "Set derivatives = 'none' in contract and policy, or use a privacy budget."
            raise InputError("policy", found, remedy)
        self._response, design = study.design.response(records), study.design.matrix(records)
        own = study.coordinates(site)
        self._design = design if own is None else design[:, [k for k in own if k < design.shape[1]]]
        self._weights = study.record_weights(records)
        self._precision = study.options.get("scale", 1.0) ** -2.0
        # In units of each column's root mean square.
        size = np.sqrt(np.mean(self._design**2, axis=0))
        self._rows = self._design / np.where(size > 0, size, 1.0)
        self._norm = np.sqrt(np.sum(self._rows**2, axis=1))

    def _at(self, place: ReleasePlace) -> Terms:
        (x, spread, _), potential, size = place, self._potential, self._design.shape[1]
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

    def _in_units(self, every: list[Terms]) -> list[Terms]:
        return every

    def _sizes(self, terms: Terms):
        slope, curvature = np.abs(terms.slope), np.abs(terms.curvature) * self._norm**2
        return self._design.shape[1], slope * self._norm, curvature, curvature

    def _shares(self, terms: Terms, noise: np.ndarray) -> tuple[float, float]:
        slope, curvature = (np.abs(part)[:, None] for part in terms[1:])
        gradient = share_of_leverage(largest_leverage(self._rows * slope, noise[0]))
        return gradient, largest_leverage(self._rows * np.sqrt(curvature), np.sqrt(noise[1]))

    def _combined_shares(self, every: list[Terms], noise: np.ndarray) -> dict[str, float]:
        most, found = self._policy.largest_share, {}
        for power, what in enumerate(("slope", "curvature")):
            sums = np.stack([getattr(terms, what) for terms in every], 1) * self._norm[:, None] ** (power + 1)
            found[what] = largest_combined_share(sums, noise[:, power], most)
        return found


class GroupedTerms(eqx.Module):
    """Contributions of records whose groups have effects."""

    def terms(self, x, data: RandomEffects):
        """What each record adds to the value."""
        return data.contributions(x)


class GroupedRecords(NamedTuple):
    """Grouped records, as a model of records is read here."""

    function: GroupedTerms
    data: RandomEffects
    dim: int


class Contributions(NamedTuple):
    """What each record adds to a release: gradients (n, d) and Hessians (n, d, d)."""

    gradient: np.ndarray
    hessian: np.ndarray

    def divided(self, units: np.ndarray) -> Contributions:
        """In these units of the coordinates."""
        return Contributions(self.gradient / units, self.hessian / np.outer(units, units))


class ModelDisclosure(DisclosureControl):
    """Disclosure control of records whose model is a program of one record."""

    def __init__(self, study: Study, model: RecordModel | GroupedRecords, policy: Policy):
        super().__init__(study, policy)
        self._model = model

    def check_start(self) -> None:
        """Refuse a model to which few records contribute at the prior's mean, for studies that release no derivatives.

        Raises `InputError`.
        """
        dim = self._model.dim
        assert dim is not None
        start = self._in_units([self._at(ReleasePlace(np.broadcast_to(self._mean, (dim,))))])
        try:
            self._check_release("at the prior's mean, ", start[0])
        except RequestRefused as refused:
            remedy = "Read the model (fedpdmc model show). If it is right, lower least_records or raise largest_share."
            raise InputError("policy", str(refused), remedy) from refused

    def _at(self, place: ReleasePlace) -> Contributions:
        about, data = None if place.spread is None else jnp.asarray(place.spread), self._model.data
        if place.bend is not None:
            data = dataclasses.replace(data, bend=place.bend.numbers)
        found = _contributions(self._model.function, jnp.asarray(place.x), about, data)
        terms = Contributions(*map(np.asarray, found))
        return terms if place.bend is None else terms.divided(place.bend.slopes(place.x))

    def _in_units(self, every: list[Contributions]) -> list[Contributions]:
        """In units of each coordinate by the curvature of a record."""
        units = np.sqrt(np.mean(np.abs(np.diagonal(every[-1].hessian, axis1=1, axis2=2)), axis=0))
        return [terms.divided(np.where(units > 0, units, 1.0)) for terms in every]

    def _sizes(self, terms: Contributions):
        gradient, hessian = np.sqrt(np.sum(terms.gradient**2, -1)), np.sqrt(np.sum(terms.hessian**2, (-2, -1)))
        return terms.gradient.shape[1], gradient, hessian, np.diagonal(terms.hessian, axis1=1, axis2=2)

    def _shares(self, terms: Contributions, noise: np.ndarray) -> tuple[float, float]:
        values, vectors = np.linalg.eigh(terms.hessian)
        roots = np.sqrt(np.abs(values))[:, :, None] * np.swapaxes(vectors, -1, -2)
        gradient = share_of_leverage(float(np.max(leverages(terms.gradient[:, None], noise[0]))))
        return gradient, float(np.max(leverages(roots, np.sqrt(noise[1]))))

    def _combined_shares(self, every: list[Contributions], noise: np.ndarray) -> dict[str, float]:
        found = {}
        for order, what in enumerate(Contributions._fields):
            sums = np.stack([getattr(terms, what).reshape(len(terms.gradient), -1) for terms in every], -1)
            found[what] = share_of_leverage(float(np.max(leverages(sums, noise[:, order]))))
        return found


@eqx.filter_jit
def _contributions(function: Any, x, spread, data):
    """Gradients and Hessians of all records, or means as `Potential.averaged` has them; of a `RecordSum`."""

    def terms(x):
        return function.terms(x, data)

    def both(x):
        return jax.jacfwd(terms)(x), jax.jacfwd(jax.jacfwd(terms))(x)

    if spread is None:
        return both(x)

    def add(total, node):
        return tuple(a + node[1] * b for a, b in zip(total, both(x + spread @ node[0]), strict=True)), None

    start = tuple(jnp.zeros(part.shape) for part in jax.eval_shape(both, x))
    return jax.lax.scan(add, start, tuple(jnp.asarray(part) for part in public_points(x.shape[0])))[0]


# Which records are in a study -----------------------------------------------------------------------------------------

TRIED = 16  # secret points at which contributions are computed
EFFECT = 2.0  # how far they are from the prior's mean, in the effect of a column on a predictor
NEGLIGIBLE = 1e-3  # contribution of a record, relative to the usual one, below which it is not in the study
FEWEST = (
    0.25  # effective number of contributions, relative to that of records, below which it is compared with the policy
)


def tried_points(study: Study, secret: bytes) -> np.ndarray:
    """Points (k, d) about the prior's mean that nobody else knows, the same for all studies with these parameters."""
    dim = len(study.model.names)
    mean, scale = study.prior_place or (np.zeros(dim), np.ones(dim))
    reach = np.ones(dim) if study.reach is None else study.reach[:dim]
    width = np.minimum(scale[:dim], EFFECT / np.maximum(reach, 1e-300))
    seed = int.from_bytes(hashlib.sha256(b"fedpdmc tried points/" + secret).digest(), "little")
    return mean[:dim] + width * np.random.default_rng(seed).uniform(-1, 1, (TRIED, dim))


@double_precision
def contributing_records(study: Study, site: str, records: pd.DataFrame, secret: bytes) -> tuple[np.ndarray, float]:
    """Which rows add to the derivatives of a study's model, and the effective number of these; without weights.

    A formula or a model file can multiply what a record adds by a column: who has 0 there is not in the study, as one of
    weight 0 is not. With a built-in loss the contribution of a record is the size of its row of the design. Of a model file
    it is the largest gradient of its loss at secret points; of a row of a group, what the group's gradient loses without it.
    Families of the standard library take every record.
    """
    count = float(len(records))
    if study.model.loss:
        rows = np.abs(study.design.matrix(records))
        largest = np.max(rows / np.maximum(np.sqrt(np.mean(rows**2, 0)), 1e-300), 1, initial=0.0)
    elif study.model.file:
        sizes = _gradient_sizes(study, site, records, tried_points(study, secret))
        largest, count = np.max(sizes, 0, initial=0.0), float(np.max(effective_number(sizes.T), initial=0.0))
    else:
        return np.ones(len(records), bool), count
    usual = np.median(largest[largest > 0]) if (largest > 0).any() else np.inf
    return largest >= NEGLIGIBLE * usual, count


def _gradient_sizes(study: Study, site: str, records: pd.DataFrame, points: np.ndarray) -> np.ndarray:
    """The sizes of the gradients of each row's loss (k, n), in units of each coordinate's root mean square."""
    X = None if study.model.design is None else study.design.matrix(records)
    model, sizes = study.model.terms(records, site, X), []
    gradients = jax.jit(lambda x, data: jax.jacfwd(lambda x: model.function.terms(x, data))(x))
    places = study.model.group_places(records) if study.model.group else np.zeros((0, 0), int)
    for x in jnp.asarray(points):
        found = np.asarray(gradients(x, model.data))
        if study.model.group:
            mask, whole = model.function.model.source.group.mask, found
            found = np.zeros((len(records), found.shape[1]))
            for place in range(places.shape[1]):
                there = places[:, place] >= 0
                without = model.data | {mask: model.data[mask].at[:, place].set(0.0)}
                found[places[there, place]] = (whole - np.asarray(gradients(x, without)))[there]
        # What is not finite is something.
        found = np.nan_to_num(found, nan=1.0, posinf=1.0, neginf=1.0)
        unit = np.sqrt(np.mean(found**2, axis=0))
        sizes.append(np.linalg.norm(found / np.where(unit > 0, unit, 1.0), axis=1))
    return np.array(sizes)
