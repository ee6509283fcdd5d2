"""Multi-indices of some variables up to a degree, by degree, and how they are joined."""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import numpy as np


class Monomials(NamedTuple):
    """The multi-indices of ``dim`` variables up to a degree, by degree, and how they are joined."""

    exponents: np.ndarray
    degree: np.ndarray
    following: np.ndarray
    factor: np.ndarray

    @property
    def order(self) -> int:
        """The largest degree."""
        return int(self.degree[-1])

    def pairs(self, least: int, other: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Indices α, β of at least these degrees, by their sum: where each sum starts among them, and its place."""
        return _pairs(self.exponents.shape[1], self.order, least, other)


@functools.cache
def monomials(dim: int, order: int) -> Monomials:
    """All multi-indices; ``following[k, i]`` is the place of ``α_k + e_i``, or one beyond the last."""
    found = [
        tuple(np.bincount(np.asarray(places, int), minlength=dim))
        for degree in range(order + 1)
        for places in itertools.combinations_with_replacement(range(dim), degree)
    ]
    place = {alpha: k for k, alpha in enumerate(found)}
    exponents, steps = np.asarray(found), np.eye(dim, dtype=int)
    following = np.asarray([[place.get(tuple(row), len(found)) for row in alpha + steps] for alpha in exponents])
    return Monomials(exponents, exponents.sum(1), following, exponents + 1.0)


@functools.cache
def _pairs(dim: int, order: int, least: int, other: int):
    table = monomials(dim, order)
    place = {tuple(alpha): k for k, alpha in enumerate(table.exponents)}
    one, two = np.nonzero(
        (table.degree[:, None] >= least)
        & (table.degree[None] >= other)
        & (table.degree[:, None] + table.degree[None] <= order)
    )
    total = np.asarray([place[tuple(row)] for row in table.exponents[one] + table.exponents[two]], int)
    by_sum = np.argsort(total, kind="stable")
    places, starts = np.unique(total[by_sum], return_index=True)
    return one[by_sum], two[by_sum], starts, places
