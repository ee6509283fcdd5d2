"""Disclosure control of exact derivatives if the model is a program of one record.

A release is a sum over records of gradients ``g_i`` and Hessians ``H_i``, which are computed record by record. The
measures are those of `fedpdmc.federation.site_agent.derivative_disclosure`. Hessians need not be positive: ``|H_i|``, with
the absolute eigenvalues, takes the place of ``ℓ''_i ξ_i ξ_iᵀ``. The share of one record in any direction, and in any
combination of releases, is the largest eigenvalue of ``B^{−½} T_iᵀ T_i B^{−½}`` with ``B = Σ_j T_jᵀ T_j``.

If effects of groups are integrated out, a record's contribution is what the release loses without it. Releases in bent
coordinates ``s = T(u)`` are compared with others in units of s, that is after division by ``T'`` at their point.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from fedpdmc.errors import InputError, RequestRefused
from fedpdmc.federation.site_agent.derivative_disclosure import (
    NO_NOISE,
    DisclosureControl,
    ReleasePlace,
    rounding,
)
from fedpdmc.models.model_file.records import RecordModel
from fedpdmc.potentials import Potential, RandomEffects
from fedpdmc.potentials.base import public_points
from fedpdmc.study.contract import Study
from fedpdmc.study.policy import Policy
from fedpdmc.study.record_shares import leverages, share_of_leverage


def disclosure_control(
    study: Study, site: str, records: pd.DataFrame, potential: Potential | RecordModel, policy: Policy
) -> DisclosureControl:
    """The disclosure control for a site's model."""
    if isinstance(potential, RandomEffects):
        return ModelDisclosure(study, GroupedRecords(GroupedTerms(), potential.stripped(), potential.dim), policy)
    if isinstance(potential, RecordModel):
        return ModelDisclosure(study, potential, policy)
    return DisclosureControl(study, site, records, potential, policy)


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


class ModelDisclosure(DisclosureControl):
    """Decides whether a site may release its derivatives at a point, from the contributions of single records.

    Parameters
    ----------
    model : RecordModel or GroupedRecords
        With the site's records.
    """

    def __init__(self, study: Study, model: RecordModel | GroupedRecords, policy: Policy):
        self._model = model
        self._take(study, policy)

    def check(self, place: ReleasePlace, own: ReleasePlace, released: list[ReleasePlace]) -> None:
        """Raise `RequestRefused` for a point at which too few records contribute."""
        self._check_distance(place)
        now = self._of(own)
        if not all(np.isfinite(part).all() for part in now):
            raise RequestRefused("NOT_FINITE", "contributions that are not finite")
        units = _units(now)
        now = _in_units(now, units)
        self._check_one("", now)
        every = [*(_in_units(self._of(past), units) for past in released), now]
        noise = np.array([self._rounding(one) for one in every])
        for k, past in enumerate(every[:-1]):
            change = Contributions(*(a - b for a, b in zip(now, past, strict=True)))
            self._check_one(f"the difference to point {k + 1}, ", change, noise[k] + noise[-1])
        if released:
            for order, part in enumerate(Contributions._fields):
                told = np.stack([getattr(one, part).reshape(len(one.gradient), -1) for one in every], -1)
                found = float(np.max(leverages(told, noise[:, order])))
                self._refuse_share(f"combinations of {part}s of {len(every)} points", share_of_leverage(found))

    def check_start(self) -> None:
        """Refuse a model to which few records contribute at the prior's mean, for studies that release no derivatives.

        Raises
        ------
        InputError
        """
        dim = self._model.dim
        assert dim is not None
        told = self._of(ReleasePlace(np.broadcast_to(self._mean, (dim,))))
        try:
            self._check_one("at the prior's mean, ", _in_units(told, _units(told)))
        except RequestRefused as refused:
            raise InputError(
                "policy",
                str(refused),
                "Read the model (fedpdmc model show). If it is right, lower least_records or raise largest_share.",
            ) from refused

    def _of(self, place: ReleasePlace) -> Contributions:
        about, data = None if place.spread is None else jnp.asarray(place.spread), self._model.data
        if place.bend is not None:
            data = dataclasses.replace(data, bend=place.bend.numbers)
        found = _contributions(self._model.function, jnp.asarray(place.x), about, data)
        told = Contributions(*map(np.asarray, found))
        return told if place.bend is None else _in_units(told, place.bend.slopes(place.x))

    def _rounding(self, told: Contributions) -> np.ndarray:
        return rounding(np.diagonal(told.hessian, axis1=1, axis2=2), told.gradient.shape[1])

    def _check_one(self, which: str, told: Contributions, noise: np.ndarray = NO_NOISE) -> None:
        """Check one release, or one difference of two with its rounding."""
        all_directions = 2 * told.gradient.shape[1] ** np.array([0.5, 1.0]) * noise
        self._check_number(f"{which}gradient", np.sqrt(np.sum(told.gradient**2, -1)), all_directions[0])
        self._check_number(f"{which}Hessian", np.sqrt(np.sum(told.hessian**2, (-2, -1))), all_directions[1])
        share = share_of_leverage(float(np.max(leverages(told.gradient[:, None], noise[0]))))
        self._refuse_share(f"{which}gradient", share)
        values, vectors = np.linalg.eigh(told.hessian)
        roots = np.sqrt(np.abs(values))[:, :, None] * np.swapaxes(vectors, -1, -2)
        self._refuse_share(f"{which}Hessian", float(np.max(leverages(roots, np.sqrt(noise[1])))))


@eqx.filter_jit
def _contributions(function: Any, x, spread, data):
    """Gradients and Hessians of all records, or means as `Potential.averaged` has them; of a `RecordSum`."""

    def terms(x):
        return function.terms(x, data)

    def told(x):
        return jax.jacfwd(terms)(x), jax.jacfwd(jax.jacfwd(terms))(x)

    if spread is None:
        return told(x)

    def add(total, node):
        return tuple(a + node[1] * b for a, b in zip(total, told(x + spread @ node[0]), strict=True)), None

    start = tuple(jnp.zeros(part.shape) for part in jax.eval_shape(told, x))
    return jax.lax.scan(add, start, tuple(jnp.asarray(part) for part in public_points(x.shape[0])))[0]


def _units(told: Contributions) -> np.ndarray:
    """The unit of each coordinate, by the curvature of a record."""
    units = np.sqrt(np.mean(np.abs(np.diagonal(told.hessian, axis1=1, axis2=2)), axis=0))
    return np.where(units > 0, units, 1.0)


def _in_units(told: Contributions, units: np.ndarray) -> Contributions:
    return Contributions(told.gradient / units, told.hessian / np.outer(units, units))
