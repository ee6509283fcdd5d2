"""What an event does to the velocity: a flip of one coordinate, or a reflection in a normal; both undo themselves."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def flipped(v: Float[Array, "C d"], mark: Int[Array, " C"]) -> Float[Array, "C d"]:
    """The other sign of one coordinate of each chain; none where the mark is no coordinate."""
    return jnp.where(jnp.arange(v.shape[-1]) == mark[:, None], -v, v)


def reflected(v: Float[Array, "C d"], normal: Float[Array, "C d"]) -> Float[Array, "C d"]:
    """``v − 2 ⟨v, n⟩ n`` with unit normals n; the same velocity where n is zero."""
    return v - 2 * jnp.sum(v * normal, -1, keepdims=True) * normal
