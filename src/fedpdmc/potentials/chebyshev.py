"""Polynomials on a piece of path by their values at Chebyshev nodes: evaluation, and bounds by Bernstein coefficients."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


@functools.cache
def chebyshev_nodes(count: int) -> np.ndarray:
    """The zeros of ``T_count``, on [−1, 1]."""
    return np.cos(np.pi * (np.arange(count) + 0.5) / count)


def bernstein_basis(nodes: np.ndarray, degree: int) -> np.ndarray:
    """The Bernstein polynomials of a degree (columns) at nodes on [0, 1] (rows)."""
    k = np.arange(degree + 1)
    choose = np.array([math.comb(degree, i) for i in k])
    return choose * nodes[:, None] ** k * (1 - nodes[:, None]) ** (degree - k)


@functools.cache
def to_coefficients(count: int) -> np.ndarray:
    """The matrix (K, K) from values at K nodes to Chebyshev coefficients."""
    return np.linalg.inv(np.polynomial.chebyshev.chebvander(chebyshev_nodes(count), count - 1))


@functools.cache
def to_bernstein(count: int, parts: int) -> np.ndarray:
    """The matrices (J, K, K) from values at K nodes to the Bernstein coefficients on each of J equal parts of the piece.

    On its part the polynomial is at most the largest of them.
    """
    u, degree = 0.5 * (chebyshev_nodes(count) + 1), count - 1
    basis = bernstein_basis(u, degree)
    inside = [np.polynomial.chebyshev.chebvander(2 * (j + u) / parts - 1, degree) for j in range(parts)]
    return np.stack([np.linalg.solve(basis, values @ to_coefficients(count)) for values in inside])


class RateCurve(NamedTuple):
    """The signed rate ``r(s)`` on a piece ``[0, length]`` of the path as a polynomial: ``|r − p| ≤ error``, proved.

    Attributes
    ----------
    values : (K, C), or (M, K, C) for M sites
        ``p``, of degree K − 1, at the Chebyshev nodes of the piece.
    error : (C,), or (M, C)
    length : (C,)
    """

    values: Float[Array, "*M K C"]
    error: Float[Array, "*M C"]
    length: Float[Array, " C"]

    def of(self, site: Int[Array, " C"]) -> tuple[Float[Array, "K C"], Float[Array, " C"]]:
        """``p`` at the nodes and its error, of each chain's site."""
        if self.error.shape[0] == 1:
            return self.values[0], self.error[0]
        error = jnp.take_along_axis(self.error, site[None], 0)[0]
        return jnp.take_along_axis(self.values, site[None, None], 0)[0], error

    @property
    def candidates_of_error(self) -> Float[Array, " C"]:
        """How many candidates the errors add on the piece."""
        return jnp.sum(self.error, 0) * self.length

    def ceilings(self, parts: int) -> Float[Array, "J *M C"]:
        """Upper bounds of the rates on equal parts of the piece: the largest Bernstein coefficient plus the error, or 0."""
        values = jnp.moveaxis(self.values, -2, 0)
        nodes = values.shape[0]
        corners = jnp.asarray(to_bernstein(nodes, parts).reshape(-1, nodes)) @ values.reshape(nodes, -1)
        return jnp.maximum(jnp.max(corners.reshape(parts, *values.shape), 1) + self.error, 0.0)


def interpolant(values: Float[Array, "K C"], part: Float[Array, " C"] | float) -> Float[Array, " C"]:
    """The polynomial at a share of the piece, in [0, 1], by Clenshaw's recurrence."""
    x = 2 * part - 1
    coefficients = jnp.asarray(to_coefficients(values.shape[0])) @ values
    first, second = jnp.zeros_like(x), jnp.zeros_like(x)
    for k in range(values.shape[0] - 1, 0, -1):
        first, second = 2 * x * first - second + coefficients[k], first
    return x * first - second + coefficients[0]
