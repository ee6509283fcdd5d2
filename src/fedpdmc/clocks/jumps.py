"""Potentials that jump at hyperplanes: a jump is an event of the path at a known time.

Let U jump by ``ΔU`` where the path crosses a hyperplane in the direction of its velocity. The path crosses with probability
``min(1, e^{−ΔU})``, and is otherwise reflected: ``v − 2⟨n, v⟩n``, or the flip of ``v_i`` where ``n = ±e_i``. What flows
through the surface, ``π(a−) ψ(v) |⟨n, v⟩| min(1, e^{−ΔU})``, is the same in both directions, because ``π(a+) = π(a−)
e^{−ΔU}``; what is reflected leaves with as much flow as it came with, because the reflection keeps ψ and ``|⟨n, v⟩|``. So
the law stays. Where several sites jump at one surface each decides by its own ``ΔU_m``, and the path crosses if all agree:
every factor balances by itself. Beyond the support ``ΔU`` is infinite, and the surface a wall.

Between its jumps the potential has the rates that its clock knows: bounds on a piece of path across a surface hold on both
sides, since a comparison that is not decided there gives the range of both branches.
"""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from fedpdmc._jax.random_streams import exponentials, uniforms
from fedpdmc.clocks.base import Clock, keep_done
from fedpdmc.clocks.path import FINE, NOT_FINITE, Path, Walk, advance
from fedpdmc.dynamics import Dynamics
from fedpdmc.errors import InputError
from fedpdmc.potentials import Potential

# Relative: how near to a surface a chain stands on it, and how far on both sides of it the potential is evaluated.
STANDING, ASIDE = 1e-12, 1e-11
# A stream of its own beside that of the clock between the jumps.
STREAM = jnp.uint32(0x6A756D70)


class JumpWalk(eqx.Module):
    """The walk between the jumps, and the one from surface to surface."""

    between: Any
    crossing: Walk


class JumpClock(Clock[JumpWalk]):
    """A clock for what a potential does between its jumps, with the jumps at hyperplanes ``⟨n_k, a⟩ = c_k``.

    Attributes
    ----------
    between : Clock
    normal : (K, d)
        Of unit length, in whitened coordinates.
    level : (K,)
    """

    potential: Potential
    dynamics: Dynamics
    between: Clock
    normal: Float[Array, "K d"]
    level: Float[Array, " K"]

    @property
    def name(self) -> str:
        """What reports call it: the clock between the jumps."""
        return self.between.name

    @property
    def domain(self) -> str:
        """How event times are drawn, in words."""
        return f"{self.between.domain}; jumps at {self.level.shape[-1]} surfaces, at the times at which the path meets them"

    def idle(self, chains):
        """A walk that waits."""
        return JumpWalk(self.between.idle(chains), Walk.idle(self.dynamics, chains, self.dim))

    def restart(self, state, new, path):
        """Start on new plans."""
        return JumpWalk(self.between.restart(state.between, new, path), state.crossing.restart(new, path))

    def step(self, state, path, keys):
        """The next surface on every chain, and a step between the jumps up to a reflection that is known already."""
        walked = self.between.walk(state.between)
        crossing = self._crossed(state.crossing, _capped(path, walked), keys)
        between = self.between.step(state.between, _capped(path, crossing), keys)
        return JumpWalk(between, crossing)

    def walk(self, state):
        """The earlier of both answers, once both are known."""
        one, other = self.between.walk(state.between), state.crossing
        first = other.rang & (~one.rang | (other.time <= one.time))
        time, mark = jnp.where(first, other.time, one.time), jnp.where(first, other.mark, one.mark)
        normal = jnp.where(first[..., None], other.normal, one.normal)
        return eqx.tree_at(
            lambda w: (w.done, w.rang, w.time, w.mark, w.normal, w.passes, w.fault),
            one,
            (
                one.done & other.done,
                one.rang | other.rang,
                time,
                mark,
                normal,
                one.passes + other.passes,
                jnp.maximum(one.fault, other.fault),
            ),
        )

    def violations(self, state):
        """Of the clock between the jumps."""
        return self.between.violations(state.between)

    def _crossed(self, walk: Walk, path: Path, keys) -> Walk:
        """Go on to the next surface, or to the end of the segment, and cross it or not."""
        a, v = path.state(self.dynamics, jnp.minimum(walk.segment, path.last), walk.offset)
        remaining = path.at(path.duration, walk.segment) - walk.offset
        wait, surface = self._next(a, v)
        meets = wait < remaining
        segment, offset, over = advance(
            path, walk.segment, walk.offset, jnp.where(meets, wait, remaining), ~meets
        )  # fmt: skip
        here, speed = path.state(self.dynamics, jnp.minimum(segment, path.last), offset)
        normal = self.normal[surface]
        height = exponentials(uniforms(keys ^ STREAM, path.number, walk.draws, 1)[0])
        meets = meets & ~over & ~walk.done
        rise, finite = jax.lax.cond(
            jnp.any(meets),
            lambda: self._rise(here, normal * jnp.sign(jnp.sum(normal * speed, -1, keepdims=True))),
            lambda: (jnp.zeros_like(height), jnp.ones_like(meets)),
        )
        fault = jnp.where(meets & ~finite, NOT_FINITE, FINE)
        reflected = meets & finite & (rise > height)
        mark = jnp.argmax(jnp.abs(normal), -1) if self.dynamics.flips else jnp.zeros_like(walk.mark)
        moved = walk.moved(path, segment, offset, over, mark, fault)
        time = jnp.where(reflected, path.at(path.begin, segment) + offset, moved.time)
        new = eqx.tree_at(
            lambda w: (w.done, w.rang, w.time, w.normal, w.passes),
            moved,
            (
                moved.done | reflected,
                reflected,
                time,
                moved.normal if self.dynamics.flips else jnp.where(reflected[:, None], normal, moved.normal),
                moved.passes + 2 * meets,
            ),
        )
        return keep_done(walk.done, walk, new)

    def _next(self, a: Float[Array, "C d"], v: Float[Array, "C d"]) -> tuple[Float[Array, " C"], Int[Array, " C"]]:
        """Time to the next surface, and which; the one that a chain stands on was decided before.

        On a line ``p + q s = c``. On a rotation ``r cos(s − φ) = c`` at ``s = φ ± arccos(c/r)``, up to whole turns.
        """
        p, q = a @ self.normal.T, v @ self.normal.T
        stands = jnp.abs(p - self.level) <= STANDING * (1 + jnp.abs(self.level))
        if self.dynamics.flow.rotating:
            radius, turn = jnp.hypot(p, q), 2 * np.pi
            meets = radius > jnp.abs(self.level)
            half = jnp.arccos(jnp.clip(self.level / jnp.where(meets, radius, 1.0), -1.0, 1.0))
            roots = jnp.mod(jnp.arctan2(q, p) + jnp.stack([-half, half]), turn)
            # The root at which it stands is the one next to zero.
            apart = jnp.minimum(roots, turn - roots)
            own = stands & (apart == jnp.min(apart, 0))
            waits = jnp.min(jnp.where(own | ~meets, jnp.inf, roots), 0)
        else:
            root = (self.level - p) / jnp.where(q == 0, 1.0, q)
            waits = jnp.where((q == 0) | stands | (root < 0), jnp.inf, root)
        return jnp.min(waits, -1), jnp.argmin(waits, -1)

    def _rise(self, a: Float[Array, "C d"], normal: Float[Array, "C d"]):
        """What the potential rises by across a surface in the direction of a normal; and whether it was finite before."""
        aside = normal * (ASIDE * (1 + jnp.max(jnp.abs(a), -1, keepdims=True)))
        before, after = (jax.vmap(self.potential.value)(x) for x in (a - aside, a + aside))
        return jnp.where(jnp.isfinite(before), after - before, jnp.inf), jnp.isfinite(before) & ~jnp.isnan(after)


def _capped(path: Path, walk: Walk) -> Path:
    """The path up to the event of another walk, where it has one."""
    cap = jnp.where(walk.done & walk.rang, walk.time, jnp.inf)
    return eqx.tree_at(
        lambda p: p.cap, path, cap if path.cap is None else jnp.minimum(path.cap, cap), is_leaf=lambda x: x is None
    )


def with_jumps(clock: Clock, normal: np.ndarray, level: np.ndarray, site: str) -> JumpClock:
    """A clock with jumps at ``⟨n_k, a⟩ = c_k``, the normals of any length.

    Raises
    ------
    InputError
        Where coordinates flip and a surface is not at a value of one coordinate.
    """
    size = np.linalg.norm(normal, axis=1)
    normal, level = normal / size[:, None], level / size
    if clock.dynamics.flips and np.any(np.sum(np.abs(normal) > STANDING, 1) > 1):
        raise InputError(
            f"sites ({site!r})",
            f"a model that jumps where a combination of parameters has a value, with dynamics={clock.dynamics!r}",
            "Use dynamics that reflect, fedpdmc.BouncyParticle() or fedpdmc.Boomerang(), or a diagonal reference for a jump "
            "at a value of one parameter.",
        )
    return JumpClock(clock.potential, clock.dynamics, clock, jnp.asarray(normal), jnp.asarray(level))
