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
from jaxtyping import Array, Bool, Float, Int

from fedpdmc._jax.by_numpy import once
from fedpdmc._jax.mapped import mapped
from fedpdmc._jax.random_streams import exponentials, uniforms
from fedpdmc.clocks.base import Clock, keep_done
from fedpdmc.clocks.path import FINE, NOT_FINITE, Path, Walk, advance, reached, time_of
from fedpdmc.dynamics import Dynamics
from fedpdmc.enclosures import Cell, Series, enclose
from fedpdmc.enclosures.continuity.jump_surfaces import JumpSurfaces
from fedpdmc.errors import InputError, NoEnclosure
from fedpdmc.potentials import Potential
from fedpdmc.potentials.quadratic_rate_cells import path as path_of_program

# How far before a surface the crossing is decided, and how far beyond it the potential is evaluated: relative to the
# position, and to the terms of the comparison, whose rounding error is below the second.
NEAR, ROUNDING = 1e-12, 2.0**-44
# The least speed towards a surface that is assumed when the time to it is computed.
SLOW = 1e-6
# Surfaces must be distinguishable at positions up to the first, and known to the accuracy of the second.
USUAL, COARSE = 10.0, 1e-3
# Points at which the rounding of values is found.
POINTS = 16
# Unit normals that agree to this accuracy are the same direction.
SAME = 1e-11
# The key of a random stream that is separate from that of the clock between the jumps.
STREAM = np.uint32(0x6A756D70)


class JumpWalk(eqx.Module):
    """The walk between the jumps, and the one from surface to surface.

    ``last`` is the surface that the second has reached, -1 for none.
    """

    between: Any
    crossing: Walk
    last: Int[Array, " C"]


class JumpClock(Clock[JumpWalk]):
    """A clock for what a potential does between its jumps, with the jumps at hyperplanes ``⟨n_k, a⟩ = c_k``.

    Attributes
    ----------
    between : Clock
    normal : (K, d)
        Of unit length, in whitened coordinates.
    level : (K,)
    size, sizes : (K,), (K, d)
        ``size + sizes @ |a|`` bounds what is added up in the comparison, in the same units.
    spread : (K,)
        Surfaces that are nearer to each other than can be told apart are one: up to this on both sides of the level.
    lines : tuple of str
        Where the program compares.
    """

    potential: Potential
    dynamics: Dynamics
    between: Clock
    normal: Float[Array, "K d"]
    level: Float[Array, " K"]
    size: Float[Array, " K"]
    sizes: Float[Array, "K d"]
    spread: Float[Array, " K"]
    lines: tuple[str, ...] = eqx.field(static=True)

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
        walk = Walk.idle(self.dynamics, chains, self.dim)
        return JumpWalk(self.between.idle(chains), walk, jnp.full(chains, -1))

    def restart(self, state, new, path):
        """Start on new plans."""
        between, crossing = self.between.restart(state.between, new, path), state.crossing.restart(new, path)
        return JumpWalk(between, crossing, jnp.where(new, -1, state.last))

    def step(self, state, path, keys):
        """The next surface on every chain, and a step between the jumps as far as surfaces are decided.

        Beyond a surface at which the path is reflected the potential need not be finite, so that the other walk waits
        before surfaces that are not decided, and ends where it has drawn a candidate beyond a reflection.
        """
        crossing, last = self._crossed(state, _capped(path, self.between.walk(state.between)), keys)
        walk = self.between.walk(state.between)
        ahead = time_of(path, walk) > time_of(path, crossing)
        done = walk.done | (ahead & crossing.done & crossing.rang)
        waits = ahead & ~crossing.done & ~done
        held = self._with_done(state.between, done | waits)
        between = self.between.step(held, _capped(path, crossing), keys)
        return JumpWalk(self._with_done(between, self.between.walk(between).done & ~waits), crossing, last)

    def _with_done(self, state: Any, done: Bool[Array, " C"]) -> Any:
        """A state of the clock between the jumps on which these chains are done."""
        return eqx.tree_at(lambda s: self.between.walk(s).done, state, done)

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

    def reached(self, state, path):
        """The earlier of both."""
        return jnp.minimum(self.between.reached(state.between, path), reached(path, state.crossing))

    def violations(self, state):
        """Violations seen by the clock between the jumps."""
        return self.between.violations(state.between)

    def _crossed(self, state: JumpWalk, path: Path, keys) -> tuple[Walk, Int[Array, " C"]]:
        """Go on to the next surface, or to the end of the segment, and cross it or not."""
        walk = state.crossing
        a, v = path.state(self.dynamics, jnp.minimum(walk.segment, path.last), walk.offset)
        remaining = path.at(path.duration, walk.segment) - walk.offset
        wait, surface = self._next(a, v, state.last)
        meets = wait < remaining
        segment, offset, over = advance(
            path, walk.segment, walk.offset, jnp.where(meets, wait, remaining), ~meets
        )  # fmt: skip
        here, speed = path.state(self.dynamics, jnp.minimum(segment, path.last), offset)
        normal = self.normal[surface]
        height = exponentials(uniforms(keys ^ STREAM, path.number, walk.draws, 1)[0])
        last = jnp.where(meets, surface, -1)
        meets = meets & ~over & ~walk.done
        toward = normal * jnp.sign(jnp.sum(normal * speed, -1, keepdims=True))
        rise, finite = jax.lax.cond(
            jnp.any(meets),
            lambda: self._rise(here, toward, jnp.abs(self.level[surface] - jnp.sum(normal * here, -1))),
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
        return keep_done(walk.done, (walk, state.last), (new, last))

    def _next(self, a: Float[Array, "C d"], v: Float[Array, "C d"], last) -> tuple[Float[Array, " C"], Any]:
        """Time to just before the next surface, and which; the last one was decided.

        Before, and not on it: what is reflected there is on the side that it came from, and a corner is asked for each of
        its surfaces. On a line ``p + q s = c``. On a rotation ``r cos(s − φ) = c`` at ``s = φ ± arccos(c/r)``, up to whole
        turns.
        """
        p, q = a @ self.normal.T, v @ self.normal.T
        asked = last[:, None] == jnp.arange(self.level.shape[0])
        if self.dynamics.flow.rotating:
            radius, turn = jnp.hypot(p, q), 2 * np.pi
            meets = radius > jnp.abs(self.level)
            half = jnp.arccos(jnp.clip(self.level / jnp.where(meets, radius, 1.0), -1.0, 1.0))
            roots = jnp.mod(jnp.arctan2(q, p) + jnp.stack([-half, half]), turn)
            # The root that was asked is the one next to zero.
            apart = jnp.minimum(roots, turn - roots)
            asked &= apart == jnp.min(apart, 0)
            waits, speed = jnp.min(jnp.where(asked | ~meets, jnp.inf, roots), 0), radius * jnp.sin(half)
            near = self._near(a, v, jnp.ones_like(p))
        else:
            root = (self.level - p) / jnp.where(q == 0, 1.0, q)
            waits, speed = jnp.where((q == 0) | asked | (root < 0), jnp.inf, root), jnp.abs(q)
            near = self._near(a, v, jnp.maximum(root, 0.0))
        waits = jnp.maximum(waits - near / jnp.maximum(speed, SLOW), 0.0)
        return jnp.min(waits, -1), jnp.argmin(waits, -1)

    def _near(self, a: Float[Array, "C d"], v: Float[Array, "C d"], times: Float[Array, "C K"]) -> Float[Array, "C K"]:
        """Distance from surfaces beyond which comparisons are certain, if no entry exceeds ``|a| + |v| times``."""
        a, v = jnp.abs(a), jnp.abs(v)
        largest = jnp.max(a, -1, keepdims=True) + jnp.max(v, -1, keepdims=True) * times
        added = self.size + a @ self.sizes.T + (v @ self.sizes.T) * times
        return NEAR * (1 + largest) + ROUNDING * added + self.spread

    def _rise(self, a: Float[Array, "C d"], normal: Float[Array, "C d"], gap: Float[Array, " C"]):
        """The rise of the potential across a surface in the direction of a normal, and whether it is a number.

        ``U(a + 2δn) − U(a)`` at a distance δ before the surface, less the contribution of the slopes on both sides.
        """

        def along(x, n):
            return jax.jvp(self.potential.value, (x,), (n,))

        (before, slope), (after, other) = (mapped(along)(x, normal) for x in (a, a + 2 * gap[:, None] * normal))
        tilt = gap * (slope + other)
        rise = after - before - jnp.where(jnp.isfinite(tilt), tilt, 0.0)
        return rise, ~jnp.isnan(rise)


def _capped(path: Path, walk: Walk) -> Path:
    """The path up to the event of another walk, where it has one."""
    cap = jnp.where(walk.done & walk.rang, walk.time, jnp.inf)
    return eqx.tree_at(
        lambda p: p.cap, path, cap if path.cap is None else jnp.minimum(path.cap, cap), is_leaf=lambda x: x is None
    )


def with_jumps(clock: Clock, surfaces: JumpSurfaces, center: Any, scale: Any, site: str) -> JumpClock:
    """A clock of a potential of ``x = c + S a`` that jumps where surfaces are met.

    Raises
    ------
    InputError
        Where coordinates flip and a surface is not at a value of one coordinate; where rounding hides a surface.
    """
    center, scale = np.asarray(center, float), np.asarray(scale, float)
    scale = np.diag(scale) if scale.ndim == 1 else scale
    normal, level = surfaces.normal @ scale, surfaces.level - surfaces.normal @ center
    size = surfaces.size + surfaces.sizes @ np.abs(center)
    sizes = surfaces.sizes @ np.abs(scale)
    length = np.linalg.norm(normal, axis=1)
    level, size, normal, sizes = level / length, size / length, normal / length[:, None], sizes / length[:, None]
    if clock.dynamics.flips and np.any(np.sum(np.abs(normal) > NEAR, 1) > 1):
        raise InputError(
            f"sites ({site!r})",
            f"a model that jumps where a combination of parameters has a value, with dynamics={clock.dynamics!r}",
            "Use dynamics that reflect, fedpdmc.BouncyParticle() or fedpdmc.Boomerang(), or a diagonal reference for a jump "
            "at a value of one parameter.",
        )
    _check_values(clock.potential, site)
    parts = _merged(normal, level, size, sizes)
    if not np.all(_usually_near(*parts[2:4]) + parts[4] <= COARSE):
        raise InputError(
            f"sites ({site!r})",
            f"a model that jumps where values are equal that rounding hides, at {', '.join(surfaces.lines)}",
            "Take a common offset off both sides of the comparison: centre the data and the parameter.",
        )
    return JumpClock(clock.potential, clock.dynamics, clock, *map(jnp.asarray, parts), lines=surfaces.lines)


def _check_values(potential: Potential, site: str) -> None:
    """Refuse a function whose values, of which the rise across a surface is made, are lost in rounding.

    Its gradient need not be: that of ``sin² + cos²`` is zero, whatever the factor.
    """
    points = np.random.default_rng(0).normal(size=(POINTS, potential.dim))
    try:
        errors = np.asarray(_rounding(potential, jnp.asarray(points)))
    except NoEnclosure:
        return
    known = errors[np.isfinite(errors)]
    if known.size and np.median(known) > COARSE:
        raise InputError(
            f"sites ({site!r})",
            f"a model that jumps, whose values are lost in rounding: their error may be {np.median(known):.1g}",
            "Look for large terms that cancel, and take them off by hand: centre the data, and leave constants out.",
        )


@once
def _rounding(potential: Potential, points: Float[Array, "n d"]) -> Float[Array, " n"]:
    """The error of values at points; not finite where they are not."""

    def one(a):
        found = enclose(potential.value, Cell(0.0))(path_of_program(False, a, jnp.zeros_like(a))[0])
        return found.error if isinstance(found, Series) else jnp.zeros(())

    return jax.vmap(one)(points)


def _usually_near(size: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    return NEAR * (1 + USUAL) + ROUNDING * (size + USUAL * sizes.sum(1))


def _merged(normal, level, size, sizes) -> tuple[np.ndarray, ...]:
    """Surfaces that are parallel and too near to each other to be told apart are one, with its middle and half its width."""
    found, left, near = [], np.arange(len(level)), _usually_near(size, sizes)
    while left.size:
        own = normal[left[0]]
        side = np.sign(normal[left] @ own)
        alike = np.max(np.abs(side[:, None] * normal[left] - own), 1) <= SAME
        group, height, left = left[alike], (side * level[left])[alike], left[~alike]
        order = np.argsort(height, kind="stable")
        group, height = group[order], height[order]
        starts = np.flatnonzero(np.diff(height, prepend=-np.inf) > 2 * near[group])
        for part in np.split(np.arange(len(group)), starts[1:]):
            low, high, those = height[part[0]], height[part[-1]], group[part]
            found.append((own, 0.5 * (low + high), size[those].max(), sizes[those].max(0), 0.5 * (high - low)))
    return tuple(np.asarray(column) for column in zip(*found, strict=True))
