"""Multi-indices of some variables up to a degree, in the order of degrees; their sums, and their monomials."""

from __future__ import annotations

import functools
import itertools
import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float


class Monomials(NamedTuple):
    """The multi-indices of ``dim`` variables up to a degree, in the order of degrees, and their sums."""

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
    alphas, steps = exponents(dim, order), np.eye(dim, dtype=int)
    place = {tuple(alpha): k for k, alpha in enumerate(alphas)}
    following = np.asarray([[place.get(tuple(row), len(alphas)) for row in alpha + steps] for alpha in alphas])
    return Monomials(alphas, alphas.sum(1), following, alphas + 1.0)


@functools.cache
def exponents(dim: int, degree: int, least: int = 0) -> np.ndarray:
    """All multi-indices of these degrees."""
    found = [
        np.bincount(np.asarray(places, int), minlength=dim)
        for k in range(least, degree + 1)
        for places in itertools.combinations_with_replacement(range(dim), k)
    ]
    return np.asarray(found)


def factorials(alphas: np.ndarray) -> np.ndarray:
    """``α!``."""
    return np.asarray([math.prod(map(math.factorial, alpha)) for alpha in alphas.tolist()], float)


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


def powers(b: Float[Array, "d C"], degree: int, least: int = 0) -> Float[Array, "K C"]:
    """All monomials of b of these degrees, in the order of `exponents`: products of rows of a small table."""
    alphas = exponents(len(b), degree, least)
    if degree > len(b):
        table = [jnp.ones_like(b)]
        for _ in range(degree):
            table.append(table[-1] * b)
        found = jnp.stack(table)
        return math.prod(found[column, i] for i, column in enumerate(alphas.T))  # type: ignore[return-value]
    rows = jnp.concatenate([jnp.ones_like(b[:1]), b])
    places = np.zeros((len(alphas), max(degree, 1)), int)
    for place, alpha in zip(places, alphas, strict=True):
        factors = np.repeat(np.arange(1, len(alpha) + 1), alpha)
        place[: len(factors)] = factors
    return math.prod(rows[column] for column in places.T)  # type: ignore[return-value]


def products(b: Float[Array, "*C d"], degree: int) -> list[Float[Array, "*C"]]:
    """All monomials of b up to a degree, in the same order, one by one: a coordinate times one that came before."""
    found: dict[tuple[int, ...], Array] = {}
    for alpha in map(tuple, exponents(b.shape[-1], degree).tolist()):
        first = next((i for i, power in enumerate(alpha) if power), None)
        if first is None:
            found[alpha] = jnp.ones(b.shape[:-1], b.dtype)
        else:
            before = tuple(power - (i == first) for i, power in enumerate(alpha))
            found[alpha] = b[..., first] * found[before]
    return list(found.values())
