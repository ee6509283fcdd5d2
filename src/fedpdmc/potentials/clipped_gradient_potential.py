"""Records of any model under a privacy budget: a sum of clipped gradients, and a bound of rates that no record enters."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fedpdmc.potentials.base import Potential, RateBound

# Relative, for the rounding of products with the scale, and of the bound itself.
ROOM = 1 + 1e-9


class ClippedRecords(Potential):
    """``∇U = Sᵀ Σ_n c(∇f_n)`` in whitened coordinates ``x = center + S a``; c clips each record's gradient.

    The sum has at most so many terms, none longer than the clipping bound: ``|∂_i U| ≤ N b |S_{·i}|`` for any records, and
    this is the bound of its rates.

    Parameters
    ----------
    sums : callable
        ``(x, data)`` to ``Σ_n c(∇f_n)(x)``.
    data : pytree of arrays
    largest : array of shape ()
        ``N b``, public.
    size : int
        Number of parameters before whitening.
    center, scale : arrays of shape (k,) and (k, d), optional
    """

    sums: Callable[..., Any] = eqx.field(static=True)
    data: Any
    largest: Float[Array, ""]
    size: int = eqx.field(static=True)
    center: Float[Array, " k"] | None = None
    scale: Float[Array, "k d"] | None = None

    @property
    def dim(self) -> int:
        return self.size if self.scale is None else self.scale.shape[1]

    def whiten(self, reference, columns):
        rows, center = reference.rows_of(columns)
        return dataclasses.replace(self, center=center, scale=rows)

    def gradients(self, a: Float[Array, "C d"]) -> Float[Array, "C d"]:
        assert self.center is not None
        assert self.scale is not None
        return jax.vmap(lambda x: self.sums(x, self.data))(self.center + a @ self.scale.T) @ self.scale

    def bound(self, rotating: bool, a: Float[Array, "C d"], v: Float[Array, "C d"]) -> RateBound:
        """``|v_i| N b |S_{·i}|``, with the largest speed of a rotation: for all times, and any records."""
        assert self.scale is not None
        top = self.largest * jnp.linalg.norm(self.scale, axis=0) * ROOM
        value = (jnp.hypot(a, v) if rotating else jnp.abs(v)) * top
        zero = jnp.zeros_like(value)
        return RateBound(value, zero, zero, jnp.full(a.shape[0], jnp.inf))
