"""What an event does to the velocity: a flip of one coordinate, a reflection in a normal, or a fresh draw.

*The draw.* Let ``G`` be the gradient whose rate is ``λ(v) = ⟨v, G⟩_+``, ``n = G/|G|`` and ``ν = N(0, I)``. A jump kernel Q
keeps the target if ``∫ ν(dv) λ(v) Q(v, dv') = λ(−v') ν(dv')`` for every site. The reflection does, and so does the kernel
that forgets v: ``Q(dv') = ν(dv') (−⟨v', n⟩)_+ √(2π)``. The same holds at a jump of the potential, where ``|⟨v, n⟩|`` is the
flow. A transcript then has one draw from a law that depends on the direction of G, and never that direction.

*How it is drawn.* With ``w`` uniform on the sphere and R from the chi law with d + 1 degrees of freedom, ``R w`` has a
density proportional to ``ν(v) |v|``. Accepted with probability ``|⟨w, n⟩|``, with the sign for which ``⟨w, n⟩ < 0``, it
has the law Q. For ``z`` standard normal and ``y`` a standard normal number ``w = z/|z|`` and ``R² = |z|² + y²``. Proposals
come from the site's secret key alone; records decide which one is taken, and its sign. So the set of values that can
appear does not depend on the records.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from fedpdmc._jax.random_streams import ChainKeys, normals, secret_uniforms

REFLECT, DRAW = "reflect", "draw"
BOUNCES = (REFLECT, DRAW)
# Proposals that are made at a time. One is accepted with probability √(2/(πd)), about.
PROPOSALS = 4


def flipped(v: Float[Array, "C d"], mark: Int[Array, " C"]) -> Float[Array, "C d"]:
    """The other sign of one coordinate of each chain; none where the mark is no coordinate."""
    return jnp.where(jnp.arange(v.shape[-1]) == mark[:, None], -v, v)


def reflected(v: Float[Array, "C d"], normal: Float[Array, "C d"]) -> Float[Array, "C d"]:
    """``v − 2 ⟨v, n⟩ n`` with unit normals n; the same velocity where n is zero."""
    return v - 2 * jnp.sum(v * normal, -1, keepdims=True) * normal


def draw_bounce(
    keys: ChainKeys, number: Int[Array, " C"], normal: Float[Array, "C d"], which: Bool[Array, " C"]
) -> Float[Array, "C d"]:
    """Velocities after an event with these unit normals, on some chains; zeros on the others.

    Parameters
    ----------
    keys : (C, 10)
        The site's keys, with those of its secret stream.
    number : (C,)
        The number of the plan: a plan has one event of a site at most.
    """
    chains, dim = normal.shape
    which = which & jnp.any(normal != 0, -1)

    def attempt(carry):
        velocity, left, batch = carry
        u = secret_uniforms(keys, number, batch, PROPOSALS * (dim + 2)).reshape(PROPOSALS, dim + 2, chains)
        z, y = normals(u[:, :dim]), normals(u[:, dim])
        size = jnp.sqrt(jnp.sum(z**2, 1))
        cosine = jnp.einsum("pdc,cd->pc", z, normal) / size
        accepted = u[:, -1] < jnp.abs(cosine)
        stretch = jnp.sqrt(1 + (y / size) ** 2) * jnp.where(cosine > 0, -1.0, 1.0)
        first = jnp.argmax(accepted, 0)[None, None]
        proposed = jnp.take_along_axis(z * stretch[:, None], first, 0)[0].T
        taken = left & jnp.any(accepted, 0)
        return jnp.where(taken[:, None], proposed, velocity), left & ~taken, batch + 1

    start = (jnp.zeros((chains, dim)), which, jnp.zeros((), jnp.uint32))
    return jax.lax.while_loop(lambda carry: jnp.any(carry[1]), attempt, start)[0]
