"""Released summaries of private sites, and the Laplace reference that is made of them."""

from __future__ import annotations

import hashlib
import secrets

import jax.numpy as jnp
import numpy as np

from fedpdmc.coordinates import Reference
from fedpdmc.errors import InputError
from fedpdmc.potentials import ControlVariate, Quadratic
from fedpdmc.privacy.ledger import Reply, Request
from fedpdmc.privacy.mechanism import noise_multiplier, release, release_symmetric
from fedpdmc.privacy.sensitivity import derivative_sensitivity
from fedpdmc.records import fingerprint, model_of
from fedpdmc.site import Site, derivatives

# Newton steps of a private reference: fixed beforehand, each a release of every site.
STEPS = 4
# Under a flat prior: the least eigenvalue of the summed noisy Hessian, relative to its largest, that is believed.
LEAST_CURVATURE = 1e-3
# The prior's standard deviations, per root of the dimension, within which the mode is looked for.
FARTHEST = 3.0


def noisy_derivatives(site: Site, x: np.ndarray, run: str, step: int) -> tuple[np.ndarray, ...]:
    """``∇U_m`` and ``∇²U_m`` with Gaussian noise, and where: at x, within the declared region. Charged before it returns.

    The sampler stays exact with it: a control variate may be any symmetric quadratic, as long as both sides use the same.
    """
    budget = site.budget
    if budget is None or not budget.release:
        raise InputError(
            "reference",
            f"'laplace' with site {site.name!r}, whose budget grants no release",
            "Use Budget(release=0.1) to spend that share of it on a noisy reference, or give a fedpdmc.Reference that is "
            "known without the data.",
        )
    ledger, account = budget.open(site.dataset)
    cost = budget.release * account.limit / STEPS
    ledger.begin(site.dataset, budget.study, run, bytes.fromhex(fingerprint(site.raw)), "{}")
    own = x if site.coordinates is None else x[site.coordinates]
    region = budget.bounds.sizes("region", len(own))
    if region is not None:
        own = np.clip(own, -region, region)
    sensitivity = derivative_sensitivity(model_of(site.potential), budget.bounds, budget.neighbours)
    multiplier = noise_multiplier(account.alpha, cost, sum(s > 0 for s in sensitivity))
    dim = len(own)

    def work(key: bytes) -> Reply:
        if site.seed is not None:
            key = hashlib.sha256(repr((site.name, site.seed, step, own.tolist())).encode()).digest()
        _, gradient, hessian = derivatives(site, own)
        noisy = release(gradient, multiplier * sensitivity[0], key + b"gradient")
        noisier = release_symmetric(hessian, multiplier * sensitivity[1], key + b"hessian")
        return Reply(np.concatenate([noisy, noisier.ravel()]).astype("<f8").tobytes(), 0.0, cost)

    asked = hashlib.sha256(np.asarray(own, dtype="<f8").tobytes() + repr(cost).encode()).digest()
    content = ledger.answer(Request(site.dataset, budget.study, run, "release", step, asked), cost, work)
    values = np.frombuffer(content, dtype="<f8")
    return values[:dim], values[dim:].reshape(dim, dim), own


def noisy_laplace(sites: tuple[Site, ...], prior: Quadratic | None, x: np.ndarray) -> Reference:
    """The Laplace reference from `STEPS` Newton steps on noisy sums; everything in it comes from charged releases."""
    run = f"laplace-{secrets.token_hex(8)}"
    traffic, start = {site.name: 0 for site in sites}, x
    for step in range(STEPS):
        hessian, gradient = np.zeros((len(x), len(x))), np.zeros(len(x))
        parts = {}
        for site in sites:
            index = np.arange(len(x)) if site.coordinates is None else site.coordinates
            if site.budget is None:
                (_, g, h), point = site.derivatives(x), x[index]
            else:
                g, h, point = noisy_derivatives(site, x, run, step)
            gradient[index] += g
            hessian[np.ix_(index, index)] += h
            parts[site.name] = (g, h, point)
            traffic[site.name] += 8 * (2 * g.size + h.size)
        precision = _believed(hessian, prior)
        if prior is not None:
            gradient = gradient + np.asarray(prior.precision) @ x + np.asarray(prior.linear)
        x = _within_reach(x - np.linalg.solve(precision, gradient), start, prior)
    control = {
        name: ControlVariate(Quadratic(jnp.asarray(h), jnp.asarray(g - h @ point)), jnp.asarray(point), 2)
        for name, (g, h, point) in parts.items()
    }
    covariance = np.linalg.inv(precision)
    scale = np.linalg.cholesky((covariance + covariance.T) / 2)
    return Reference(jnp.asarray(x), jnp.asarray(scale), control, STEPS, traffic)


def _believed(hessian: np.ndarray, prior: Quadratic | None) -> np.ndarray:
    """The prior's precision and what the noisy Hessian adds: noise can make it indefinite, the likelihood does not."""
    values, vectors = np.linalg.eigh((hessian + hessian.T) / 2)
    floor = 0.0 if prior is not None else LEAST_CURVATURE * max(float(values.max()), 1e-300)
    curvature = (vectors * np.maximum(values, floor)) @ vectors.T
    return curvature if prior is None else curvature + np.asarray(prior.precision)


def _within_reach(x: np.ndarray, mean: np.ndarray, prior: Quadratic | None) -> np.ndarray:
    """Not further from the prior's mean than the prior allows: a step that noise has made is not followed there."""
    if prior is None:
        return x
    off = x - mean
    length = float(np.sqrt(off @ np.asarray(prior.precision) @ off))
    return mean + off * min(1.0, FARTHEST * np.sqrt(len(x)) / max(length, 1e-300))
