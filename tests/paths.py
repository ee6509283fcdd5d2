"""Skeletons made by hand, and what brute force says of them."""

import dataclasses

import numpy as np

from fedpdmc.results.skeleton import Block, Chunk, Skeleton, side_by_side, signs


def skeleton(seed=0, chains=3, dim=2, begin=0.0, end=10.0, knots=(7, 1, 12)):
    """Chains with different numbers of knots, one of them with no event at all."""
    rng = np.random.default_rng(seed)
    times = [np.concatenate([[begin], np.sort(rng.uniform(begin, end, n - 1))]) for n in knots[:chains]]
    total = sum(len(t) for t in times)
    return Skeleton(
        np.cumsum([0, *(len(t) for t in times)]),
        side_by_side(np.concatenate(times), 3.0 + rng.normal(size=(total, dim))),
        rng.normal(size=(total, dim)),
        begin,
        end,
    )


def zigzag(seed=0, dim=2, packed=True, **options):
    """The same with velocities of 1 and −1, of which the signs may be all that is kept."""
    path = skeleton(seed, dim=dim, **options)
    v = np.where(np.random.default_rng(seed).random(path.a.shape) < 0.5, -1.0, 1.0)
    return dataclasses.replace(path, velocities=signs(v) if packed else v)


def block(path):
    """The same paths as a run hands them over: where the chains were, and the knots as they came, in two chunks."""
    first, most = path.offsets[:-1], max(path.counts())
    index = np.minimum(first[:, None] + np.arange(1, most), len(path.t) - 1)
    valid = np.arange(1, most) < path.counts()[:, None]
    chunks = [Chunk(path.numbers[i], path.velocities[i], ok) for i, ok in zip(*_halves(index, valid), strict=True)]
    return Block((path.a[first], path.v[first]), chunks, path.begin, path.end)


def _halves(*tables):
    return [np.array_split(table, 2, axis=1) for table in tables]


def position(path, rotating, chain, time):
    """Where a chain is at a time: the flow from its last knot."""
    own = slice(path.offsets[chain], path.offsets[chain + 1])
    k = int(np.searchsorted(path.t[own], time, side="right")) - 1
    a, v, s = path.a[own][k], path.v[own][k], time - path.t[own][k]
    return a * np.cos(s) + v * np.sin(s) if rotating else a + v * s


def integrals(path, rotating):
    """``∫ a`` and ``∫ a aᵀ`` over all chains by Gauss quadrature on every interval between knots."""
    nodes, weights = np.polynomial.legendre.leggauss(60)
    first, second = 0.0, 0.0
    for chain in range(path.chains):
        edges = np.append(path.t[path.offsets[chain] : path.offsets[chain + 1]], path.end)
        for left, right in zip(edges[:-1], edges[1:], strict=True):
            for node, weight in zip(nodes, weights, strict=True):
                x = position(path, rotating, chain, left + (node + 1) / 2 * (right - left))
                first = first + weight * (right - left) / 2 * x
                second = second + weight * (right - left) / 2 * np.outer(x, x)
    return first, second
