"""The search for a mode: damped Newton steps that do not depend on the parameters' units, and the reasons of a failure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from fedpdmc._jax.by_numpy import once
from fedpdmc._jax.compilation import mapped
from fedpdmc._jax.precision import double_precision
from fedpdmc.errors import FedPDMCError, ImproperPosterior, InputError, ModeNotFound, NoMode
from fedpdmc.members.site import Site
from fedpdmc.models.user_function import Minus
from fedpdmc.sampling.arguments import PRIOR_SITE

MOST_ROUNDS = 60
SINGULAR = 1e-10  # relative eigenvalue of a flat direction
LEVELLED = 1e-2  # part of its curvature that is left to a potential that levels off
FALLING = 1e-2  # fall of the potential in one step that is more than rounding
STEEPER = 1e6  # growth of curvature down a funnel
PART = 0.5  # of the largest component of a direction, from which messages name a parameter
MOST_NAMED = 3  # parameters of a direction
FIRST_REACH = 1.0  # the largest change of a predictor in the first step, where predictors are kept from changing more
IMPROPER = (
    ": the posterior is improper under a flat prior (separable or collinear data, or none). Give a proper prior, such as "
    "fedpdmc.models.normal_prior(dim, scale=...)."
)
NONE = (
    ": the posterior density grows without bound, so it has no mode. A hierarchy that is written centred is of this kind: "
    "write it non-centred, theta = mu + tau * z with z ~ N(0, 1). Otherwise give dynamics= and a reference of your own, "
    "reference=fedpdmc.Reference(center, scale)."
)
LIMIT = (
    ": the search for the mode did not converge. Begin nearer to it, reference=fedpdmc.laplace(sites, prior, start=...), "
    "give a tighter prior, or a reference of your own, reference=fedpdmc.Reference(center, scale)."
)


class Point(NamedTuple):
    """Sums over all sites and the prior, and each site's own gradient and Hessian, or their means with a spread."""

    x: np.ndarray
    value: float
    gradient: np.ndarray
    hessian: np.ndarray
    parts: list[tuple[np.ndarray, np.ndarray]]
    spread: np.ndarray | None = None


class Mode(NamedTuple):
    """Where the search ended: the last point, the step that is left, and the rounds it took."""

    point: Point
    step: np.ndarray
    rounds: int


def find_mode(
    ask: Callable[[np.ndarray], Point],
    start: Point,
    tolerance: float,
    flat: bool,
    reach: np.ndarray | None = None,
    names: Sequence[str] | None = None,
    most: int | None = None,
) -> Mode:
    """Damped Newton from ``start`` until the next step is shorter than ``tolerance`` standard deviations.

    With ``reach``, the largest covariates, the first step changes no predictor by more than `FIRST_REACH`, and one after a
    step that was cut so at most twice as much: under an exponential, a step that is too long costs many rounds.

    Raises
    ------
    ImproperPosterior, NoMode, ModeNotFound
        Judged from the last points; ``flat``: there is no prior. Messages use the parameters' ``names``.
    """
    here, rounds, damping, falls = start, 1, 0.0, [0.0]
    radius = np.inf if reach is None else FIRST_REACH
    while True:
        precision = positive_definite(here.hessian)
        step = -np.linalg.solve(precision, here.gradient)
        length = float(step @ precision @ step)
        if length <= tolerance**2:
            return Mode(here, step, rounds)
        if damping > 0:
            step = -np.linalg.solve(positive_definite(here.hessian, damping), here.gradient)
        if rounds >= (most or MOST_ROUNDS) or not np.isfinite(length):
            raise _no_mode(start, here, step, rounds, falls, flat, names)
        size = 0.0 if reach is None else float(reach @ np.abs(step))
        step = step * min(1.0, radius / max(size, 1e-300))
        trial = ask(here.x + step)
        rounds += 1
        usable = np.isfinite(trial.value) and np.all(np.isfinite(trial.hessian)) and np.all(np.isfinite(trial.gradient))
        if usable and trial.value <= here.value + 1e-12 * abs(here.value):
            falls.append(here.value - trial.value)
            here, damping = trial, 0.0 if damping < 1e-6 else damping / 10
            radius = 2 * radius if size > radius else radius
        else:
            damping, radius = max(10 * damping, 1e-2), radius / 4


def _no_mode(
    start: Point, last: Point, step: np.ndarray, rounds: int, falls: list[float], flat: bool, names: Sequence[str] | None
) -> FedPDMCError:  # fmt: skip
    """The error for a search that did not converge.

    Down a funnel the potential keeps falling while its curvature grows; a potential that levels off loses its curvature; in
    any other case the search only needs more steps.
    """
    at = f"laplace: no mode after {rounds} rounds"
    before, after = np.abs(np.diag(start.hessian)), np.abs(np.diag(last.hessian))
    growth = after / np.maximum(before, np.finfo(float).tiny)
    if np.any(growth > STEEPER) and falls[-1] > FALLING:
        return NoMode(f"{at}; the curvature keeps growing in {label_of(growth, names)}{NONE}")
    if flat and singular(last.hessian):
        return ImproperPosterior(f"{at}; the likelihood is flat in {label_of(flattest(last.hessian), names)}{IMPROPER}")
    if flat and np.any(after < LEVELLED * before):
        lost = before / np.maximum(after, np.finfo(float).tiny)
        return ImproperPosterior(f"{at}; the likelihood levels off in {label_of(lost, names)}{IMPROPER}")
    return ModeNotFound(f"{at}; the last step is longest in {label_of(step * sizes(last.hessian), names)}{LIMIT}")


def label_of(parts: np.ndarray, names: Sequence[str] | None) -> str:
    """The parameters with the largest parts in a direction, by name, or by their place if they have none."""
    size = np.nan_to_num(np.abs(parts), nan=np.inf)
    order = [int(i) for i in np.argsort(-size, kind="stable") if size[i] >= PART * size.max()]
    shown = ", ".join(f"{i}" if names is None else repr(names[i]) for i in order[:MOST_NAMED])
    more = f" and {len(order) - MOST_NAMED} more" if len(order) > MOST_NAMED else ""
    return f"parameter{'s' * (len(order) > 1)} {shown}{more}{' (counted from 0)' if names is None else ''}"


def flattest(hessian: np.ndarray) -> np.ndarray:
    """The direction with the least curvature, in units in which the Hessian has a unit diagonal."""
    diagonal = np.abs(np.diag(hessian))
    if not np.all(diagonal > 0):
        return (diagonal == 0).astype(float)
    size = sizes(hessian)
    return np.linalg.eigh(hessian / np.outer(size, size))[1][:, 0]


def sizes(hessian: np.ndarray) -> np.ndarray:
    """The units in which the diagonal of the Hessian is one, up to sign; one where there is no curvature."""
    size = np.sqrt(np.abs(np.diag(hessian)))
    return np.where(size > 0, size, 1.0)


def singular(hessian: np.ndarray) -> bool:
    """Whether some direction is flat."""
    size = np.sqrt(np.abs(np.diag(hessian)))
    return not np.all(size > 0) or bool(np.linalg.eigvalsh(hessian / np.outer(size, size))[0] < SINGULAR)


def positive_definite(hessian: np.ndarray, damping: float = 0.0) -> np.ndarray:
    """The matrix with its eigenvalues made positive, and a multiple of its diagonal added.

    Eigenvalues are those of the matrix with unit diagonal, so that parameters may have any units.
    """
    size = sizes(hessian)
    values, vectors = np.linalg.eigh((hessian + hessian.T) / 2 / np.outer(size, size))
    floor = SINGULAR * max(float(np.abs(values).max()), 1e-300)
    fixed = (vectors * np.maximum(np.abs(values), floor)) @ vectors.T
    return (fixed + damping * np.diag(np.diag(fixed))) * np.outer(size, size)


def root_of_inverse(precision: np.ndarray) -> np.ndarray:
    """Lower triangular S with ``S Sᵀ = P⁻¹``, in units in which P has a unit diagonal."""
    size = sizes(precision)
    covariance = np.linalg.inv(precision / np.outer(size, size))
    return np.linalg.cholesky((covariance + covariance.T) / 2) / size[:, None]


RAYS = 12  # from a point
DISTANCES = (4.0, 64.0, 2.0**10, 2.0**14)  # on each, in standard deviations
LEAST_FALL = 1.0  # at their end
LITTLE = 0.01  # mean curvature in units of posterior standard deviations below which a function is checked


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
    """Refuse the function of some sites, where their sum falls along rays as a log likelihood does."""
    if not _falls(own, x, scale):
        return
    names, model = [site.name for site in own], own[0].model
    shown = ", ".join(map(repr, names[:4])) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    prior = names == [PRIOR_SITE]
    what = "prior" if prior else "likelihood"
    if model is not None and isinstance(model.function, Minus):
        remedy = "from_logdensity takes the log density itself: leave the minus sign out, or give the function to Site."
    elif prior:
        remedy = "Return minus the log of the prior density."
    else:
        remedy = "Return MINUS the log likelihood, or wrap the function: fedpdmc.models.from_logdensity(f, data)."
    where = "prior" if prior else f"sites ({shown})"
    found = f"a function that falls in every direction, as a log {what} does, not minus one"
    raise InputError(where, found, remedy) from None


def _falls(sites: list[Site], x: np.ndarray, scale: np.ndarray) -> bool:
    """Whether the sum over the sites falls, on the mean of both sides, along every ray and at every distance."""
    rays = np.random.default_rng(0).standard_normal((RAYS, scale.shape[1]))
    steps = np.multiply.outer(DISTANCES, rays / np.linalg.norm(rays, axis=1, keepdims=True)) @ scale.T
    points = np.concatenate([x[None], (x + steps).reshape(-1, len(x)), (x - steps).reshape(-1, len(x))])
    total = np.zeros(len(points))
    with np.errstate(invalid="ignore"):
        for site in sites:
            own = points if site.coordinates is None else points[:, site.coordinates]
            total = total + np.asarray(potential_values(site.potential, jnp.asarray(own)))
        forth, back = total[1:].reshape(2, len(DISTANCES), RAYS)
        change = forth + back - 2 * total[0]
    known = ~np.isnan(change)
    falling = np.all(~known | (change < 0)) and np.all(known.any(0))
    if not falling:
        return False
    last = np.array([change[:, k][known[:, k]][-1] for k in range(RAYS)])
    first = np.array([change[:, k][known[:, k]][0] for k in range(RAYS)])
    # What has fallen to a level, as a bounded loss does far out, falls no further.
    return bool(np.all(last < -LEAST_FALL) and np.any((last < first - LEAST_FALL) | (known.sum(0) == 1)))


@once
def potential_values(potential, points):
    """A potential at points (n, d)."""
    return mapped(potential.value)(points)
