"""Averages of functions: along the paths of a skeleton, by quadrature on every segment, or over draws."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedpdmc._jax.mapped import mapped
from fedpdmc.dynamics.flows import Flow
from fedpdmc.results.path_store import Store
from fedpdmc.results.skeleton import Skeleton
from fedpdmc.whitening import Reference

# Gauss–Legendre nodes on each piece of path, the longest piece of a rotation that they cover, and pieces at a time.
NODES, LONGEST_PIECE, BATCH = 4, 0.5, 2**14


def expectation(f: Callable[[Any], Any], skeleton: Skeleton, flow: Flow, reference: Reference) -> np.ndarray:
    """``(1/T) ∫ f(x(t)) dt`` over all chains, with Gauss–Legendre nodes on every segment."""
    nodes, weights = np.polynomial.legendre.leggauss(NODES)
    average = jax.jit(lambda x, w: jnp.tensordot(w, mapped(f)(reference.to_x(x)), 1))
    total, durations = None, skeleton.durations
    pieces = np.ones(len(durations), int)
    if flow.rotating:
        pieces = np.maximum(np.ceil(durations / LONGEST_PIECE), 1).astype(int)
    knot = np.repeat(np.arange(len(durations)), pieces)
    piece = np.arange(len(knot)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    length = durations[knot] / pieces[knot]
    for rows in np.array_split(np.arange(len(knot)), max(1, len(knot) // BATCH)):
        times = (piece[rows, None] + (nodes + 1) / 2) * length[rows, None]
        p, q = (np.asarray(w)[..., None] for w in flow.weights(jnp.asarray(times)))
        a = p * skeleton.a[knot[rows], None] + q * skeleton.v[knot[rows], None]
        w = length[rows, None] * weights / 2
        part = np.asarray(average(jnp.asarray(a.reshape(-1, a.shape[-1])), jnp.asarray(w.ravel())))
        total = part if total is None else total + part
    return np.asarray(total) / durations.sum()


def average(f: Callable[[Any], Any], draws: np.ndarray) -> np.ndarray:
    """The mean of ``f`` over draws (n, d)."""
    total = jax.jit(lambda x: jnp.sum(mapped(f)(x), 0))
    parts = np.array_split(draws, max(1, len(draws) // BATCH))
    return np.asarray(sum(np.asarray(total(jnp.asarray(part))) for part in parts)) / len(draws)


def moments_of(store: Store, reference: Reference, draws: int) -> tuple[np.ndarray, np.ndarray]:
    """Mean and covariance of x: of the whitened ones, or over so many draws where coordinates are bent."""
    if reference.bend is not None:
        x = reference.to_x(store.draws(draws)).reshape(-1, reference.dim)
        return x.mean(0), np.cov(x.T, bias=True).reshape(2 * (reference.dim,))
    moments, scale = store.moments(), np.asarray(reference.matrix)
    cov = scale @ moments.cov() @ scale.T
    return reference.to_x(moments.mean()), (cov + cov.T) / 2
