"""Whitened coordinates: the one place where a covariance lives."""

from __future__ import annotations

from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Int

from fedpdmc.bent_coordinates import Bend

# Kinds of references from the sites' derivatives: at the mode, or as averages over the reference itself.
LAPLACE, VB = "laplace", "vb"


class Starts(NamedTuple):
    """Where chains start, about the centre of a reference: a Gaussian that is stretched on some sides.

    Attributes
    ----------
    scale : array of shape (d, d)
        Of the Gaussian.
    forms, moves : array of shape (d, k)
        A point x with ``f·(x − c) > 0`` is moved by ``f·(x − c)`` times its column of ``moves``, one side after the other.
    """

    scale: np.ndarray
    forms: np.ndarray
    moves: np.ndarray

    def about(self, center: np.ndarray, z: np.ndarray) -> np.ndarray:
        """Starts (n, d) from standard normal numbers of that shape."""
        away = z @ self.scale.T
        for form, move in zip(self.forms.T, self.moves.T, strict=True):
            away = away + np.maximum(away @ form, 0.0)[:, None] * move
        return center + away


class Reference(eqx.Module):
    """Public coordinates ``x = T(c + S a)`` in which all dynamics run; T is the identity where nothing is bent.

    Parameters
    ----------
    center : array of shape (d,)
        The point ``c``.
    scale_tril : array of shape (d, d), or (d,) for a diagonal one
        The matrix ``S``; ``S Sᵀ`` plays the part of a covariance.
    control : dict, optional
        The sites' public quadratics by name, as `fedpdmc.laplace` and `fedpdmc.sampling.vb_reference` make them.
    rounds : int
        Serial exchanges with the sites that its making took.
    bytes : dict, optional
        Bytes exchanged with each site to make it.
    name : str
        How it was made: "laplace", "vb", or nothing if it was given.
    why : str
        The reason for this kind.
    bend : Bend, optional
        T, of log spreads (`fedpdmc.bent_coordinates`). ``c``, ``S`` and the control variates are in coordinates before it.
    wide : array of shape (d, k), optional
        W, if ``W Wᵀ`` was taken off the precision so that the reference is as wide as the posterior's tails.
    starts : Starts, optional
        Where chains start; if None, from the reference.
    narrow : pair of int and float, optional
        The parameter whose tail is wider than the reference by the largest factor, and that factor of its variance.
    modes : tuple of dict
        Other modes of the posterior: where, and with which share of its mass.
    """

    center: Float[Array, " d"]
    scale_tril: Float[Array, "d d"] | Float[Array, " d"]
    control: dict[str, Any] | None = None
    rounds: int = eqx.field(default=0, static=True)
    bytes: dict[str, int] | None = eqx.field(default=None, static=True)
    name: str = eqx.field(default="", static=True)
    why: str = eqx.field(default="", static=True)
    bend: Bend | None = None
    wide: np.ndarray | None = None
    starts: Starts | None = None
    narrow: tuple[int, float] | None = eqx.field(default=None, static=True)
    modes: tuple[dict[str, Any], ...] = eqx.field(default=(), static=True)

    @property
    def dim(self) -> int:
        """Number of parameters."""
        return self.center.shape[0]

    @property
    def diagonal(self) -> bool:
        """Whether ``S`` is stored as its diagonal, so that a flip moves one coordinate of x only."""
        return self.scale_tril.ndim == 1

    @property
    def matrix(self) -> Float[Array, "d d"]:
        """``S`` as a full matrix."""
        return jnp.diag(self.scale_tril) if self.diagonal else self.scale_tril

    def to_x(self, a: Any) -> Any:
        """``x = T(c + S a)`` of arrays (…, d); of NumPy's by NumPy, so that nothing is compiled outside of a run."""
        center, scale = _beside(a, self.center, self.scale_tril)
        straight = center + (a * scale if self.diagonal else a @ scale.T)
        return straight if self.bend is None else self.bend(straight)

    def to_a(self, x: Any) -> Any:
        """``a = S⁻¹ (T⁻¹(x) − c)``; as `to_x`."""
        return self.whiten(x if self.bend is None else self.bend.inverse(x))

    def whiten(self, x: Any) -> Any:
        """``a = S⁻¹ (x − c)`` of a point before the bend."""
        center, scale = _beside(x, self.center, self.scale_tril)
        shifted = x - center
        if self.diagonal:
            return shifted / scale
        solve = np.linalg.solve if isinstance(scale, np.ndarray) else jnp.linalg.solve
        return solve(scale, shifted.reshape(-1, self.dim).T).T.reshape(shifted.shape)

    def restricted(self, index: Int[Array, " k"]) -> Reference:
        """Reference of the coordinates ``index`` alone; only a diagonal one has it."""
        return Reference(self.center[index], self.scale_tril[index])


def _beside(x: Any, *arrays: Any) -> tuple[Any, ...]:
    """The arrays as NumPy's where x is one of those and they are known."""
    if not isinstance(x, np.ndarray) or any(isinstance(array, Tracer) for array in arrays):
        return arrays
    return tuple(np.asarray(array) for array in arrays)
