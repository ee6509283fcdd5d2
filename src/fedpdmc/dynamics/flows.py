"""The two deterministic flows: straight lines and rotations, both linear in the state.

Every flow has the form ``a(s) = p(s) a + q(s) v``, ``v(s) = p'(s) a + q'(s) v``, so five integrals of ``p`` and ``q`` give
the exact time integrals of ``a`` and ``a aᵀ`` on a segment.
"""

import abc
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np

# Arrays of shapes (…,) and (…, d), of JAX or of NumPy.
Times = Any
States = Any


def _numpy_or_jax(t: Times) -> Any:
    """NumPy for NumPy arrays: paths that are evaluated after a run need no compilation."""
    return np if isinstance(t, np.ndarray) else jnp


class SegmentIntegrals(NamedTuple):
    """``∫p, ∫q, ∫p², ∫pq, ∫q²`` over ``[0, t]``."""

    p: Times
    q: Times
    pp: Times
    pq: Times
    qq: Times


class Flow(eqx.Module):
    """A deterministic motion of position and velocity."""

    rotating: ClassVar[bool]

    @abc.abstractmethod
    def weights(self, t: Times) -> tuple[Times, Times]:
        """``p(t), q(t)``."""

    @abc.abstractmethod
    def move(self, a: States, v: States, t: Times) -> tuple[States, States]:
        """State after time ``t``."""

    @abc.abstractmethod
    def integrals(self, t: Times) -> SegmentIntegrals:
        """Integrals of the weights and of their products over ``[0, t]``."""


class Line(Flow):
    """``a(s) = a + v s``."""

    rotating = False

    def weights(self, t):
        """``1, t``."""
        return _numpy_or_jax(t).ones_like(t), t

    def move(self, a, v, t):
        """``a + v t, v``."""
        return a + v * t[..., None], v

    def integrals(self, t):
        """Powers of t."""
        return SegmentIntegrals(t, t**2 / 2, t, t**2 / 2, t**3 / 3)


class Rotation(Flow):
    """``a(s) = a cos s + v sin s``, ``v(s) = −a sin s + v cos s``."""

    rotating = True

    def weights(self, t):
        """``cos t, sin t``."""
        xp = _numpy_or_jax(t)
        return xp.cos(t), xp.sin(t)

    def move(self, a, v, t):
        """Rotate by the angle t."""
        xp = _numpy_or_jax(t)
        c, s = xp.cos(t)[..., None], xp.sin(t)[..., None]
        return a * c + v * s, v * c - a * s

    def integrals(self, t):
        """Integrals of cos, sin, cos², sin cos, sin²."""
        xp = _numpy_or_jax(t)
        double = xp.sin(2 * t) / 4
        return SegmentIntegrals(xp.sin(t), 2 * xp.sin(t / 2) ** 2, t / 2 + double, xp.sin(t) ** 2 / 2, t / 2 - double)
