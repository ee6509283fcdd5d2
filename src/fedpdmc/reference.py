"""The federated mode, the Laplace reference and the sites' control variates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from fedpdmc.coordinates import Reference
from fedpdmc.errors import ImproperPosterior, NotFinite
from fedpdmc.membership import settle
from fedpdmc.potentials import ControlVariate, Quadratic
from fedpdmc.precision import double_precision
from fedpdmc.release import noisy_laplace
from fedpdmc.site import Site

MOST_ROUNDS = 60
# Under a flat prior: relative eigenvalue of a flat direction; loss of curvature that calls for a closer look; and the least
# rise of the potential one standard deviation from a mode (½ for a Gaussian).
SINGULAR, LEVELLED, LEAST_RISE = 1e-10, 1e-2, 0.05
REMEDY = (
    ": the posterior is improper under a flat prior (separable or collinear data, or none). Give a proper prior, such as "
    "fedpdmc.models.normal_prior(dim, scale=...)."
)


@double_precision
def laplace(sites: Sequence[Site], prior: Any = None, *, tolerance: float = 1e-3, start: Any = None) -> Reference:
    """Laplace reference at the federated mode, by damped Newton on summed gradients and Hessians.

    One round asks every site for ``U_m, ∇U_m, ∇²U_m`` at one point. With ``x*`` the last point and ``P`` the summed
    Hessian there, made positive definite, the reference has ``c = x* − P⁻¹∇U(x*)``, the stationary point of the summed
    quadratics, and ``S Sᵀ = P⁻¹``: it need not be exact for the sampler to be. Sites with a privacy budget release
    noisy derivatives in a few steps fixed beforehand, charged to the share of the budget that they grant.

    Parameters
    ----------
    sites : sequence of Site
    prior : Quadratic or callable, optional
    tolerance : float
        Stop when the next step is shorter than this many posterior standard deviations.
    start : array of shape (d,), optional
        Where the search begins; the prior's mean, or zero, if None.
    """
    sites, prior, dim = settle(sites, prior, start)
    x = np.zeros(dim) if prior is None else prior_mean(prior)
    x = x if start is None else np.asarray(start, float)
    if any(site.noisy for site in sites):
        return noisy_laplace(sites, prior, x)
    traffic = {site.name: 0 for site in sites}
    value, gradient, hessian, parts = _ask(sites, prior, x, traffic)
    if not (np.isfinite(value) and np.all(np.isfinite(hessian))):
        raise NotFinite(
            "laplace",
            0,
            f"laplace: the sites' likelihood is not finite at the starting point {x[:4]} (the prior's mean, or zero). Check "
            "offsets and covariates for values that overflow, or centre the prior where the likelihood is finite.",
        )
    rounds, damping, first = 1, 0.0, hessian
    while True:
        precision = _positive_definite(hessian, damping)
        step = -np.linalg.solve(precision, gradient)
        if damping == 0.0 and float(step @ precision @ step) <= tolerance**2:
            break
        if rounds >= MOST_ROUNDS or not np.all(np.isfinite(step)):
            raise ImproperPosterior(f"laplace: found no mode after {rounds} rounds{REMEDY}")
        trial = _ask(sites, prior, x + step, traffic)
        rounds += 1
        if np.isfinite(trial[0]) and trial[0] <= value + 1e-12 * abs(value):
            x, (value, gradient, hessian, parts) = x + step, trial
            damping = 0.0 if damping < 1e-6 else damping / 10
        else:
            damping = max(10 * damping, 1e-2)
    if prior is None:
        rounds += _check_proper(sites, x, value, first, hessian, traffic)
    precision = _positive_definite(hessian, 0.0)
    covariance = np.linalg.inv(precision)
    control = {
        site.name: ControlVariate(
            Quadratic(jnp.asarray(h), jnp.asarray(g - h @ _own(site, x))), jnp.asarray(_own(site, x)), 2
        )
        for site, (g, h) in zip(sites, parts, strict=True)
    }
    scale = np.linalg.cholesky((covariance + covariance.T) / 2)
    return Reference(jnp.asarray(x + step), jnp.asarray(scale), control, rounds, traffic)


def _check_proper(sites, x, value, first, hessian, traffic) -> int:
    """Under a flat prior: refuse a posterior that is flat in some direction; returns the rounds this took.

    A potential that only levels off, as with separable data, seems to have a mode once its slope is small. Then its
    curvature has fallen far below where it started, and one standard deviation further out it has hardly risen.
    """
    size = np.sqrt(np.abs(np.diag(hessian)))
    if not np.all(size > 0) or np.linalg.eigvalsh(hessian / np.outer(size, size))[0] < SINGULAR:
        raise ImproperPosterior(f"laplace: the likelihood is flat in some direction{REMEDY}")
    lost = np.flatnonzero(np.diag(hessian) < LEVELLED * np.diag(first))
    rounds = 0
    for i in lost:
        for sign in (-1.0, 1.0):
            step = np.zeros_like(x)
            step[i] = sign / size[i]
            rise = _ask(sites, None, x + step, traffic)[0] - value
            rounds += 1
            if not rise > LEAST_RISE:
                raise ImproperPosterior(f"laplace: the likelihood levels off in parameter {i}{REMEDY}")
    return rounds


def linear_control(reference: Reference) -> dict[str, ControlVariate]:
    """The first-order part of a reference's control variates: ``∇U_m(x*)·x`` alone."""
    control = {}
    for name, (quadratic, point, _) in (reference.control or {}).items():
        gradient = quadratic.gradient(point)
        control[name] = ControlVariate(Quadratic(jnp.zeros_like(quadratic.precision), gradient), point, 1)
    return control


def prior_mean(prior: Quadratic) -> np.ndarray:
    """``−P⁻¹ h``."""
    return -np.linalg.solve(np.asarray(prior.precision), np.asarray(prior.linear))


def _own(site: Site, x: np.ndarray) -> np.ndarray:
    return x if site.coordinates is None else x[site.coordinates]


def _ask(sites, prior, x, traffic):
    """One round: the sums over sites and prior, and each site's own gradient and Hessian."""
    value, gradient, hessian, parts = 0.0, np.zeros(x.shape[0]), np.zeros((x.shape[0], x.shape[0])), []
    for site in sites:
        u, g, h = site.derivatives(x)
        index = np.arange(x.shape[0]) if site.coordinates is None else site.coordinates
        value += u
        gradient[index] += g
        hessian[np.ix_(index, index)] += h
        parts.append((g, h))
        traffic[site.name] += 8 * (g.size + 1 + g.size + h.size)
    if prior is not None:
        precision, linear = np.asarray(prior.precision), np.asarray(prior.linear)
        value += 0.5 * x @ precision @ x + linear @ x
        gradient = gradient + precision @ x + linear
        hessian = hessian + precision
    return value, gradient, hessian, parts


def _positive_definite(hessian: np.ndarray, damping: float) -> np.ndarray:
    """The matrix with its eigenvalues made positive, and a multiple of its diagonal added."""
    values, vectors = np.linalg.eigh((hessian + hessian.T) / 2)
    floor = 1e-10 * max(float(np.abs(values).max()), 1e-300)
    fixed = (vectors * np.maximum(np.abs(values), floor)) @ vectors.T
    return fixed + damping * np.diag(np.diag(fixed))
