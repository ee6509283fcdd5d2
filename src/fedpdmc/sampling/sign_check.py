"""A log likelihood given where minus the log likelihood is wanted, found by how it falls in every direction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from fedpdmc._jax.by_numpy import once
from fedpdmc._jax.mapped import mapped
from fedpdmc._jax.precision import double_precision
from fedpdmc.errors import InputError
from fedpdmc.members.site import Site
from fedpdmc.models.user_function import Minus
from fedpdmc.sampling.mode_search import Point, positive_definite, root_of_inverse
from fedpdmc.sampling.sites_and_prior import PRIOR_SITE

# Rays from a point, how far they go in standard deviations, and the least fall at their end.
RAYS, DISTANCES, LEAST_FALL = 12, (4.0, 64.0, 2.0**10, 2.0**14), 1.0
# Mean curvature in units of posterior standard deviations below which a function is checked.
LITTLE = 0.01


def check_signs(sites: Sequence[Any], start: Point, mode: Point | None) -> None:
    """Refuse functions that have the wrong sign.

    Minus a log likelihood need not be convex, but far out it rises along most rays; a log likelihood falls along all. Sites
    of one function are checked together. Their mean curvature at the mode, in units of posterior standard deviations, is
    known from the search; values along rays are computed only where it is negative or next to none, or if there is no mode.

    Parameters
    ----------
    sites : sequence of Site
    start, mode : Point
        The start and the result of the search for the mode.
    """
    points = [start] if mode is None else [mode, start]
    scales = [root_of_inverse(positive_definite(point.hessian)) for point in points]
    bends = {}
    for site, (_, hessian) in zip(sites, points[0].parts, strict=True):
        rows = scales[0] if site.coordinates is None else scales[0][site.coordinates]
        bends[site.name] = float(np.sum(rows * (hessian @ rows)))
    for own in _by_function(sites):
        if mode is None or sum(bends[site.name] for site in own) <= LITTLE * len(start.x):
            for point, scale in zip(points, scales, strict=True):
                _refuse_falling(own, point.x, scale)


@double_precision
def check_rays(sites: Sequence[Any], x: np.ndarray, scale: np.ndarray) -> None:
    """The same where no mode is searched for: along rays from ``x``, in units of ``scale``."""
    for own in _by_function(sites):
        _refuse_falling(own, x, scale)


def _by_function(sites: Sequence[Any]) -> list[list[Site]]:
    """The sites whose models are functions, those of one function together."""
    groups: dict[Any, list[Site]] = {}
    for site in sites:
        if isinstance(site, Site) and site.model is not None and site.budget is None:
            groups.setdefault(site.model.function, []).append(site)
    return list(groups.values())


def _refuse_falling(own: list[Site], x: np.ndarray, scale: np.ndarray) -> None:
    if _falls(own, x, scale):
        model = own[0].model
        raise _wrong_sign(
            [site.name for site in own], model is not None and isinstance(model.function, Minus)
        ) from None


def _falls(sites: list[Site], x: np.ndarray, scale: np.ndarray) -> bool:
    """Whether the sum over the sites falls, on the mean of both sides, along every ray and at every distance."""
    rays = np.random.default_rng(0).standard_normal((RAYS, scale.shape[1]))
    steps = np.multiply.outer(DISTANCES, rays / np.linalg.norm(rays, axis=1, keepdims=True)) @ scale.T
    points = np.concatenate([x[None], (x + steps).reshape(-1, len(x)), (x - steps).reshape(-1, len(x))])
    total = np.zeros(len(points))
    with np.errstate(invalid="ignore"):
        for site in sites:
            own = points if site.coordinates is None else points[:, site.coordinates]
            total = total + np.asarray(_values(site.potential, jnp.asarray(own)))
        forth, back = total[1:].reshape(2, len(DISTANCES), RAYS)
        change = forth + back - 2 * total[0]
    known = ~np.isnan(change)
    falling = np.all(~known | (change < 0)) and np.all(known.any(0))
    if not falling:
        return False
    last = np.array([change[:, k][known[:, k]][-1] for k in range(RAYS)])
    first = np.array([change[:, k][known[:, k]][0] for k in range(RAYS)])
    # What has fallen to a level, as beyond all places of a change point, falls no further.
    return bool(np.all(last < -LEAST_FALL) and np.any((last < first - LEAST_FALL) | (known.sum(0) == 1)))


@once
def _values(potential, points):
    return mapped(potential.value)(points)


def _wrong_sign(names: list[str], minus: bool) -> InputError:
    shown = ", ".join(map(repr, names[:4])) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    prior = names == [PRIOR_SITE]
    what = "prior" if prior else "likelihood"
    if minus:
        remedy = "from_logdensity takes the log density itself: leave the minus sign out, or give the function to Site."
    elif prior:
        remedy = "Return minus the log of the prior density."
    else:
        remedy = "Return MINUS the log likelihood, or wrap the function: fedpdmc.models.from_logdensity(f, data)."
    where = "prior" if prior else f"sites ({shown})"
    return InputError(where, f"a function that falls in every direction, as a log {what} does, not minus one", remedy)
