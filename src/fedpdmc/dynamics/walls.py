"""Walls: linear limits of the support, met by a path at a time in closed form."""

from __future__ import annotations

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from fedpdmc.dynamics.base import Dynamics


class Walls(eqx.Module):
    """The half spaces ``⟨n_k, a⟩ ≤ c_k`` in whitened coordinates; the density is zero beyond.

    At a wall the process must come back. It keeps its law π(a) ψ(v) if the velocity is mapped by an involution that keeps ψ
    and changes the sign of ``⟨n, v⟩``: what flows in is then what flows out, ``|⟨n, v⟩| ψ(v)``. For ψ = N(0, I) that is the
    reflection ``v − 2⟨n, v⟩n``; for flips, where ``v_i`` is symmetric whatever the others are, all coordinates with
    ``n_i ≠ 0`` change sign.

    Attributes
    ----------
    normal : (m, d)
        Of unit length, pointing out.
    limit : (m,)
    """

    normal: Float[Array, "m d"]
    limit: Float[Array, " m"]

    @property
    def dim(self) -> int:
        """Number of parameters."""
        return self.normal.shape[1]

    def first(self, dynamics: Dynamics, a: Float[Array, "C d"], v: Float[Array, "C d"]):
        """When the path meets a wall, from inside and moving out; infinite if never. And which.

        On a line ``p + q s = c``. On a rotation ``p cos s + q sin s = r cos(s − φ)`` with ``r = |(p, q)|``; it grows where
        ``s = φ − arccos(c/r)``, up to whole turns.
        """
        p, q = a @ self.normal.T, v @ self.normal.T
        outward = q > 0
        if dynamics.flow.rotating:
            radius = jnp.hypot(p, q)
            meets = radius > self.limit
            angle = jnp.arctan2(q, p) - jnp.arccos(jnp.clip(self.limit / jnp.where(meets, radius, 1.0), -1.0, 1.0))
            wait = jnp.where(meets, jnp.mod(angle, 2 * np.pi), jnp.inf)
        else:
            wait = jnp.where(outward, (self.limit - p) / jnp.where(outward, q, 1.0), jnp.inf)
        # Rounding may have put a chain on the wall or a hair beyond it.
        wait = jnp.where(outward & (p >= self.limit), 0.0, jnp.maximum(wait, 0.0))
        return jnp.min(wait, -1), jnp.argmin(wait, -1)

    def bounced(self, dynamics: Dynamics, v: Float[Array, "C d"], wall: Int[Array, " C"]) -> Float[Array, "C d"]:
        """The velocity after a wall; one that leads inwards already stays."""
        normal = self.normal[wall]
        speed = jnp.sum(v * normal, -1, keepdims=True)
        back = jnp.where(normal != 0, -v, v) if dynamics.flips else v - 2 * speed * normal
        return jnp.where(speed > 0, back, v)

    def inside(self, a: Float[Array, "C d"]) -> Bool[Array, " C"]:
        """Which points are within all limits."""
        return jnp.all(a @ self.normal.T <= self.limit, -1)

    def reachable(self, a: Float[Array, "C d"], step: Float[Array, "C d"]) -> Float[Array, "C d"]:
        """Points reached by a step from inside, cut at nine tenths of the way to a wall."""
        p, q = a @ self.normal.T, step @ self.normal.T
        most = jnp.min(jnp.where(q > 0, (self.limit - p) / jnp.where(q > 0, q, 1.0), jnp.inf), -1)
        return a + jnp.minimum(1.0, 0.9 * most)[:, None] * step
