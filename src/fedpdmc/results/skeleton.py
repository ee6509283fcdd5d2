"""Events and the flow between them: exact integrals along the paths, and draws from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from fedpdmc.dynamics import Flow

Arrays = np.ndarray

SMALL_CHANGE = 1e-9  # relative, of a velocity, above which it is a jump
SPEEDS = np.array([1.0, -1.0])  # by sign bit


class Moments(NamedTuple):
    """``∫ dt``, ``∫ (a − pivot) dt`` and ``∫ (a − pivot)(a − pivot)ᵀ dt`` over all chains.

    A pivot near the mean keeps the covariance from cancelling.
    """

    time: float
    first: Arrays
    second: Arrays
    pivot: Arrays

    def plus(self, other: Moments) -> Moments:
        """The integrals over both intervals together, about the same pivot."""
        return Moments(self.time + other.time, self.first + other.first, self.second + other.second, self.pivot)

    def mean(self) -> Arrays:
        """Time average of a."""
        return self.pivot + self.first / self.time

    def cov(self) -> Arrays:
        """Time average of ``(a − mean)(a − mean)ᵀ``."""
        return self.second / self.time - np.outer(self.first, self.first) / self.time**2


class Knots:
    """Time, position and velocity right after events, along the last axes of two arrays.

    Attributes
    ----------
    numbers : (…, 1 + d)
        Process time and position side by side.
    velocities : (…, d), or (…, ⌈d/8⌉) bytes
        Velocities, or one bit for each if all are 1 or −1, as `signs` gives them: a third of the memory, and of the
        time that fresh memory takes.
    """

    numbers: Arrays
    velocities: Arrays

    @property
    def t(self) -> Arrays:
        """Process times."""
        return self.numbers[..., 0]

    @property
    def a(self) -> Arrays:
        """Positions."""
        return self.numbers[..., 1:]

    @cached_property
    def v(self) -> Arrays:
        """Velocities."""
        return self.velocity(...)

    def velocity(self, index: Any) -> Arrays:
        """``v[index]``, of knots alone: the others are not unpacked."""
        kept = self.velocities[index]
        return SPEEDS[np.unpackbits(kept, -1, self.dim, "little")] if self.packed else kept

    @property
    def packed(self) -> bool:
        """Whether only the signs of the velocities are kept."""
        return self.velocities.dtype == np.uint8

    @property
    def dim(self) -> int:
        """Number of coordinates."""
        return self.numbers.shape[-1] - 1


def side_by_side(t: Arrays, a: Arrays) -> Arrays:
    """The numbers of knots."""
    return np.concatenate([t[..., None], a], -1)


def signs(v: Arrays) -> Arrays:
    """Velocities of 1 and −1 as bits along the last axis, the first coordinate the lowest; set where negative."""
    return np.packbits(v < 0, axis=-1, bitorder="little")


@dataclasses.dataclass(frozen=True)
class Skeleton(Knots):
    """The knots of all chains, chain after chain, in whitened coordinates.

    Attributes
    ----------
    offsets : (C + 1,)
        Chain c owns the knots ``offsets[c]`` to ``offsets[c + 1] − 1``; its first is at ``begin``.
    numbers, velocities : (n, 1 + d), (n, d) or (n, ⌈d/8⌉)
        Process time ``t`` and position ``a`` right after each event; the velocity ``v`` as `Knots` has it.
    begin, end : float
        The span of process time, the same for all chains.
    """

    offsets: Arrays
    numbers: Arrays
    velocities: Arrays
    begin: float
    end: float

    def __iter__(self) -> Iterator[Any]:
        """``offsets, t, a, v, begin, end``."""
        return iter((self.offsets, self.t, self.a, self.v, self.begin, self.end))

    @property
    def chains(self) -> int:
        """Number of chains."""
        return len(self.offsets) - 1

    @classmethod
    def read(cls, offsets: Arrays, numbers: Arrays, velocities: Arrays, begin: float, end: float) -> Skeleton:
        """A skeleton from arrays that were stored; ValueError if they are not those of one."""
        good = numbers.ndim == velocities.ndim == 2 and offsets.ndim == 1 and numbers.shape[1] > 1 and len(offsets) > 1
        good = good and numbers.dtype == np.float64 and offsets.dtype.kind == "i" and begin <= end
        good = (
            good and offsets[0] == 0 and offsets[-1] == len(numbers) == len(velocities) and (np.diff(offsets) > 0).all()
        )
        dim = numbers.shape[-1] - 1
        packed = velocities.dtype == np.uint8
        if (
            not good
            or velocities.shape[1] != (-(-dim // 8) if packed else dim)
            or not (packed or velocities.dtype == np.float64)
        ):
            raise ValueError("arrays that are not the knots of chains")
        return cls(offsets, numbers, velocities, begin, end)

    @property
    def durations(self) -> Arrays:
        """How long the flow continues after each knot."""
        after = np.append(self.t[1:], self.end)
        after[self.offsets[1:-1] - 1] = self.end
        return after - self.t

    def pieces(self) -> list[Skeleton]:
        """Itself, as `join` takes it."""
        return [self]

    def counts(self) -> Arrays:
        """Knots of each chain."""
        return np.diff(self.offsets)

    def flat(self) -> tuple[Arrays, Arrays]:
        """Numbers and velocities, chain after chain."""
        return self.numbers, self.velocities

    def owners(self) -> Arrays:
        """The chain of each knot."""
        return np.repeat(np.arange(self.chains), np.diff(self.offsets))

    def since(self, flow: Flow, time: float) -> Skeleton:
        """The paths from a process time within the span on; only for velocities that are not packed as signs."""
        owners, kept = self.owners(), self.t > time
        last = self.offsets[:-1] + np.bincount(owners[~kept], minlength=self.chains) - 1
        a, v = flow.move(*(x[last] for x in (self.a, self.v, time - self.t)))
        offsets = np.concatenate([[0], np.cumsum(np.bincount(owners[kept], minlength=self.chains))])
        rest = Skeleton(offsets, self.numbers[kept], self.velocities[kept], time, self.end)
        return join([Block((a, v), [], time, self.end), rest])

    def jumps(self, flow: Flow, until: float) -> Arrays:
        """Number of jumps of each chain's velocity up to a time: (C,). With a change of pace alone, none."""
        moved = flow.move(self.a, self.v, self.durations)[1]
        before, after = moved[:-1], self.v[1:]
        if after.shape[1] > 1:
            before, after = (v / np.linalg.norm(v, axis=1, keepdims=True) for v in (before, after))
        changed = np.abs(before - after).max(1) > SMALL_CHANGE * (1 + np.abs(after).max(1))
        changed = np.concatenate([[False], changed])
        changed[self.offsets[:-1]] = False
        return np.bincount(self.owners()[changed & (self.t <= until)], minlength=self.chains)

    def moments(self, flow: Flow, pivot: Arrays | None = None) -> Moments:
        """Exact time integrals of position and its outer product over all segments, about a pivot (lines only) or zero."""
        pivot = np.zeros(self.a.shape[1]) if pivot is None or flow.rotating else pivot
        a, v = self.a - pivot, self.v
        w = [x[:, None] for x in flow.integrals(self.durations)]
        p, q, pp, pq, qq = w
        first = (p * a + q * v).sum(0)
        cross = (a * pq).T @ v
        second = (a * pp).T @ a + cross + cross.T + (v * qq).T @ v
        return Moments(self.chains * (self.end - self.begin), first, second, pivot)

    def at(self, flow: Flow, times: Arrays) -> Arrays:
        """Positions of every chain at the given times, (n,) for all of them or (chains, n): shape (chains, n, d)."""
        times = np.broadcast_to(times, (self.chains, times.shape[-1]))
        # One sorted sequence for all chains: each chain's times are shifted beyond the previous chain's.
        stride = 2 * (self.end - self.begin) + 1
        shifted = (self.t - self.begin) + stride * self.owners()
        wanted = (times - self.begin) + stride * np.arange(self.chains)[:, None]
        index = np.searchsorted(shifted, wanted.ravel(), side="right") - 1
        index = np.maximum(index, np.repeat(self.offsets[:-1], times.shape[1]))
        since = np.maximum(times.ravel() - self.t[index], 0.0)
        p, q = (x[:, None] for x in flow.weights(since))
        return (p * self.a[index] + q * self.velocity(index)).reshape(*times.shape, self.dim)


@dataclasses.dataclass(frozen=True)
class Chunk(Knots):
    """Some successive knots of every chain, with void ones marked: shapes (C, n, …), and (C, n) of ``valid``.

    The arrays may be on an accelerator.
    """

    numbers: Arrays
    velocities: Arrays
    valid: Arrays

    def on_host(self) -> Chunk:
        """In the host's memory."""
        return Chunk(*(np.asarray(x) for x in (self.numbers, self.velocities, self.valid)))

    def counts(self) -> Arrays:
        """Valid knots of each chain."""
        return np.count_nonzero(self.valid, 1)

    def flat(self) -> tuple[Arrays, Arrays]:
        """Numbers and velocities of the valid knots, chain after chain."""
        return self.numbers[self.valid], self.velocities[self.valid]


class Block(NamedTuple):
    """A completed block as it came: the state at its beginning and the knots of its chunks."""

    start: tuple[Arrays, Arrays]
    chunks: list[Chunk]
    begin: float
    end: float

    def skeleton(self) -> Skeleton:
        """The block's knots, chain after chain."""
        return join([self])

    def pieces(self) -> list[Chunk]:
        """The first knots, then the chunks, in the host's memory."""
        a, v = (x[:, None] for x in self.start)
        first = np.full(a.shape[:2], float(self.begin))
        kept = signs(v) if self.chunks and self.chunks[0].packed else v
        return [
            Chunk(side_by_side(first, a), kept, np.ones_like(first, bool)),
            *(chunk.on_host() for chunk in self.chunks),
        ]


def join(parts: Sequence[Skeleton | Block]) -> Skeleton:
    """Successive intervals of the same chains as one skeleton, written once into its place."""
    pieces = [piece for part in parts for piece in part.pieces()]
    counts = [piece.counts() for piece in pieces]
    offsets = np.concatenate([[0], np.cumsum(np.sum(counts, axis=0))])
    numbers, velocities = (
        np.empty((offsets[-1], kept.shape[-1]), kept.dtype) for kept in (pieces[0].numbers, pieces[0].velocities)
    )
    place = offsets[:-1].copy()
    for piece, count in zip(pieces, counts, strict=True):
        rows = np.arange(count.sum()) + np.repeat(place - (np.cumsum(count) - count), count)
        numbers[rows], velocities[rows] = piece.flat()
        place += count
    return Skeleton(offsets, numbers, velocities, float(parts[0].begin), float(parts[-1].end))
