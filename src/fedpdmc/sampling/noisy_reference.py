"""The reference of private sites: a few Newton steps on sums of their noisy derivatives."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from fedpdmc.members.noisy_derivatives import noisy_derivatives, release_point
from fedpdmc.members.site import own_part
from fedpdmc.potentials import ControlVariate, Quadratic
from fedpdmc.privacy.schedule import REFERENCE
from fedpdmc.whitening import LAPLACE, VB, Reference

# Under a flat prior: lower limit on the eigenvalues of the summed noisy Hessian, relative to the largest.
LEAST_CURVATURE = 1e-3
# The mode is searched for within this many prior standard deviations, times the root of the dimension.
REACH = 3.0


def noisy_laplace(sites: tuple[Any, ...], prior: Quadratic | None, x: np.ndarray, averaged: bool = False) -> Reference:
    """The Laplace reference by a few Newton steps on noisy sums; all of it comes from charged releases.

    With ``averaged``, the last step uses averages over the reference found by the others.
    """
    traffic, start, last = {site.name: 0 for site in sites}, x, len(REFERENCE.steps) - 1
    spread, precision = None, np.zeros((0, 0))
    for step in range(len(REFERENCE.steps)):
        if averaged and step == last:
            spread = _root(precision)
        hessian, gradient = np.zeros((len(x), len(x))), np.zeros(len(x))
        parts = {}
        for site in sites:
            index = np.arange(len(x)) if site.coordinates is None else site.coordinates
            if site.budget is not None:
                g, h, point, *_ = noisy_derivatives(site, x, step, spread=spread)
            else:
                (_, g, h), point = site.derivatives(x, spread), x[index]
                # A remote site evaluates noisy derivatives within the region that the contract declares.
                point = release_point(point, site.bounds) if site.noisy else point
            gradient[index] += g
            hessian[np.ix_(index, index)] += h
            about = own_part(x, spread, site.coordinates)[1]
            parts[site.name] = (g, h, point, None if about is None else jnp.asarray(about))
            traffic[site.name] += 8 * (2 * g.size + h.size + (0 if spread is None else spread.size))
        precision = _believed(hessian, prior)
        if prior is not None:
            gradient = gradient + np.asarray(prior.precision) @ x + np.asarray(prior.linear)
        x = _within_reach(x - np.linalg.solve(precision, gradient), start, prior)
    control = {
        name: ControlVariate(Quadratic(jnp.asarray(h), jnp.asarray(g - h @ point)), jnp.asarray(point), 2, about)
        for name, (g, h, point, about) in parts.items()
    }
    name, why = (VB, "its last step is an average") if averaged else (LAPLACE, "")
    return Reference(jnp.asarray(x), jnp.asarray(_root(precision)), control, len(REFERENCE.steps), traffic, name, why)


def _root(precision: np.ndarray) -> np.ndarray:
    covariance = np.linalg.inv(precision)
    return np.linalg.cholesky((covariance + covariance.T) / 2)


def _believed(hessian: np.ndarray, prior: Quadratic | None) -> np.ndarray:
    """The prior's precision plus the positive part of the noisy Hessian: noise can make the Hessian indefinite."""
    values, vectors = np.linalg.eigh((hessian + hessian.T) / 2)
    floor = 0.0 if prior is not None else LEAST_CURVATURE * max(float(values.max()), 1e-300)
    curvature = (vectors * np.maximum(values, floor)) @ vectors.T
    return curvature if prior is None else curvature + np.asarray(prior.precision)


def _within_reach(x: np.ndarray, mean: np.ndarray, prior: Quadratic | None) -> np.ndarray:
    """Clip a step to the range of the prior, so that a step due to noise cannot lead far away."""
    if prior is None:
        return x
    off = x - mean
    length = float(np.sqrt(off @ np.asarray(prior.precision) @ off))
    return mean + off * min(1.0, REACH * np.sqrt(len(x)) / max(length, 1e-300))
