"""The excess flips of a private site: a clock that knows nothing of the records."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from fedpdmc.arrivals.walk import Path, advance
from fedpdmc.dynamics import Dynamics
from fedpdmc.randomness import ChainKeys, exponentials, uniforms


def first_excess(
    dynamics: Dynamics, rate: Float[Array, ""], path: Path, keys: ChainKeys
) -> tuple[Float[Array, " C"], Int[Array, " C"]]:
    """Time and coordinate of the first excess flip along a path, at rate ``ρ`` (lines) or ``ρ |v_i|`` each; or infinity."""
    if not dynamics.unit_speed:
        return _on_rotations(dynamics, rate, path, keys)
    dim = path.velocity.shape[-1]
    u = uniforms(keys, path.number, jnp.zeros_like(path.number), 2)
    wait = exponentials(u[0]) / (rate * dim)
    mark = jnp.minimum((u[1] * dim).astype(int), dim - 1)
    return jnp.where(wait < path.horizon, wait, jnp.inf), mark


class _Search(NamedTuple):
    segment: Int[Array, " C"]
    offset: Float[Array, " C"]
    draws: Int[Array, " C"]
    done: Bool[Array, " C"]
    time: Float[Array, " C"]
    mark: Int[Array, " C"]


def _on_rotations(dynamics: Dynamics, rate, path: Path, keys: ChainKeys):
    """Thinned under ``ρ Σ_i √(a_i² + v_i²)``, which is conserved on a segment."""
    chains = path.number.shape[0]
    count = jnp.zeros(chains, int)
    start = _Search(
        count, jnp.zeros(chains), count, path.horizon <= 0, jnp.full(chains, jnp.inf), count
    )  # fmt: skip

    def step(now: _Search) -> _Search:
        a, v = path.state(dynamics, now.segment, now.offset)
        total = jnp.cumsum(rate * jnp.hypot(a, v), -1)
        u = uniforms(keys, path.number, now.draws, 3)
        wait = exponentials(u[0]) / jnp.maximum(total[:, -1], 1e-300)
        mark = jnp.minimum(jnp.sum(total < (u[1] * total[:, -1])[:, None], -1), a.shape[-1] - 1)
        remaining = path.at(path.duration, now.segment) - now.offset
        hit = wait < remaining
        _, there = dynamics.flow.move(a, v, jnp.where(hit, wait, 0.0))
        speed, most = (jnp.take_along_axis(x, mark[:, None], -1)[:, 0] for x in (jnp.abs(there), jnp.hypot(a, v)))
        accepted = hit & (u[2] * most < speed)
        segment, offset, over = advance(path, now.segment, now.offset, wait, ~hit)
        time = jnp.where(accepted, path.at(path.begin, now.segment) + offset, jnp.inf)
        new = _Search(segment, offset, now.draws + 1, accepted | over, time, mark)
        return jax.tree.map(lambda old, fresh: jnp.where(now.done, old, fresh), now, new)

    found = jax.lax.while_loop(lambda now: jnp.any(~now.done), step, start)
    return found.time, found.mark
