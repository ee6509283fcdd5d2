"""Events and the flow between them: exact integrals along the paths, and draws from them."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from fedpdmc.dynamics import Flow
from fedpdmc.precision import double_precision

Arrays = np.ndarray


class Moments(NamedTuple):
    """``∫ dt``, ``∫ (a − pivot) dt`` and ``∫ (a − pivot)(a − pivot)ᵀ dt`` over all chains.

    A pivot near the mean keeps the covariance from cancelling.
    """

    time: float
    first: Arrays
    second: Arrays
    pivot: Arrays

    def plus(self, other: Moments) -> Moments:
        """Of both stretches together, about the same pivot."""
        return Moments(self.time + other.time, self.first + other.first, self.second + other.second, self.pivot)

    def mean(self) -> Arrays:
        """Time average of a."""
        return self.pivot + self.first / self.time

    def cov(self) -> Arrays:
        """Time average of ``(a − mean)(a − mean)ᵀ``."""
        return self.second / self.time - np.outer(self.first, self.first) / self.time**2


class Skeleton(NamedTuple):
    """The knots of all chains, chain after chain, in whitened coordinates.

    Attributes
    ----------
    offsets : (C + 1,)
        Chain c owns the knots ``offsets[c]`` to ``offsets[c + 1] − 1``; its first is at ``begin``.
    t, a, v
        Process time, position and velocity right after each event.
    begin, end : float
        The span of process time, the same for all chains.
    """

    offsets: Arrays
    t: Arrays
    a: Arrays
    v: Arrays
    begin: float
    end: float

    @property
    def chains(self) -> int:
        """Number of chains."""
        return len(self.offsets) - 1

    @property
    def durations(self) -> Arrays:
        """How long the flow goes on after each knot."""
        after = np.append(self.t[1:], self.end)
        after[self.offsets[1:-1] - 1] = self.end
        return after - self.t

    def then(self, other: Skeleton) -> Skeleton:
        """Both stretches of the same chains, the other after this one."""
        return join([self, other])

    def owners(self) -> Arrays:
        """The chain of each knot."""
        return np.repeat(np.arange(self.chains), np.diff(self.offsets))

    @double_precision
    def moments(self, flow: Flow, pivot: Arrays | None = None) -> Moments:
        """Exact time integrals of position and its outer product over all segments, about a pivot (lines only) or zero."""
        pivot = np.zeros(self.a.shape[1]) if pivot is None or flow.rotating else pivot
        a = self.a - pivot
        w = [np.asarray(x)[:, None] for x in flow.integrals(jnp.asarray(self.durations))]
        p, q, pp, pq, qq = w
        first = (p * a + q * self.v).sum(0)
        cross = (a * pq).T @ self.v
        second = (a * pp).T @ a + cross + cross.T + (self.v * qq).T @ self.v
        return Moments(self.chains * (self.end - self.begin), first, second, pivot)

    @double_precision
    def at(self, flow: Flow, times: Arrays) -> Arrays:
        """Positions of every chain at the given times: shape (chains, n, d)."""
        # One sorted sequence for all chains: each chain's times are shifted beyond the previous chain's.
        stride = 2 * (self.end - self.begin) + 1
        shifted = (self.t - self.begin) + stride * self.owners()
        wanted = (times - self.begin)[None] + stride * np.arange(self.chains)[:, None]
        index = np.searchsorted(shifted, wanted.ravel(), side="right") - 1
        index = np.maximum(index, np.repeat(self.offsets[:-1], len(times)))
        since = np.maximum(np.tile(times, self.chains) - self.t[index], 0.0)
        p, q = (np.asarray(x)[:, None] for x in flow.weights(jnp.asarray(since)))
        return (p * self.a[index] + q * self.v[index]).reshape(self.chains, len(times), self.a.shape[1])


def join(parts: list[Skeleton]) -> Skeleton:
    """Successive stretches of the same chains as one."""
    if len(parts) == 1:
        return parts[0]
    order = np.argsort(np.concatenate([part.owners() for part in parts]), kind="stable")
    t, a, v = (np.concatenate([getattr(part, name) for part in parts])[order] for name in ("t", "a", "v"))
    offsets = np.sum([part.offsets for part in parts], axis=0)
    return Skeleton(offsets, t, a, v, parts[0].begin, parts[-1].end)


class FlatKnots(NamedTuple):
    """The valid knots of a chunk, each with its chain; in order of time for every chain."""

    owner: Arrays
    t: Arrays
    a: Arrays
    v: Arrays


def flatten_knots(t: Arrays, a: Arrays, v: Arrays, valid: Arrays) -> FlatKnots:
    """The valid entries of knot arrays of shape (rows, C, S, …)."""
    rows, chains, segments = t.shape
    dim = a.shape[-1]
    if valid.all():
        owner = np.tile(np.repeat(np.arange(chains), segments), rows)
        return FlatKnots(owner, t.ravel(), a.reshape(-1, dim), v.reshape(-1, dim))
    index = np.flatnonzero(valid)
    return FlatKnots(
        (index // segments) % chains, t.ravel()[index], a.reshape(-1, dim)[index], v.reshape(-1, dim)[index]
    )


class Block(NamedTuple):
    """A completed block as it came: the state at its beginning and the knots of its chunks."""

    start: tuple[Arrays, Arrays]
    chunks: list[FlatKnots]
    begin: float
    end: float

    def skeleton(self) -> Skeleton:
        """The block's knots, chain after chain (a knot at the end is the next block's first)."""
        chains = self.start[0].shape[0]
        first = FlatKnots(np.arange(chains), np.full(chains, self.begin), *self.start)
        owner, t, a, v = (np.concatenate(parts) for parts in zip(first, *self.chunks, strict=True))
        order = np.argsort(owner, kind="stable")
        order = order[t[order] < self.end]
        offsets = np.concatenate([[0], np.cumsum(np.bincount(owner[order], minlength=chains))])
        return Skeleton(offsets, t[order], a[order], v[order], float(self.begin), float(self.end))
