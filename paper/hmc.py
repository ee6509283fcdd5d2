"""The reference: Hamiltonian Monte Carlo (BlackJAX) on the pooled records, which a real federation could not run."""

# BlackJAX declares its states as bare protocols, without the fields they have.
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false

from __future__ import annotations

import functools
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float
from numpy import ndarray

import fedpdmc as fp

# In whitened coordinates, whose scales are about one: longest step times d^(1/4), and longest trajectory, half a turn.
STEP, TRAJECTORY = 0.9, np.pi
# Draws of each chain that are thrown away first, from a start that is spread as the reference is.
WARM_UP = 300
# Below this mean acceptance the reference does not fit the density, and the draws are not to be trusted.
LEAST_ACCEPTED = 0.6


class Density(Protocol):
    """Records that know their posterior: a tuple of arrays, so that other records of these shapes need no compilation."""

    def log_density(self, x: Any) -> Any:
        """Log density, up to a constant."""
        ...


def hmc(
    problem: Density, reference: fp.Reference, *, seed: int, chains: int, draws: int
) -> Float[ndarray, "chains draws d"]:
    """Draws of a posterior in 64 bits, made in the whitened coordinates of a reference.

    Every chain starts at a point of its own. The step size of each trajectory is drawn between a half of the longest and
    the longest, which keeps trajectories from closing on themselves.

    Raises
    ------
    RuntimeError
        Too few trajectories were accepted.
    """
    with jax.enable_x64(True):
        center, scale = jnp.asarray(reference.center, float), jnp.asarray(reference.scale_tril, float)
        keys = jax.random.split(jax.random.key(seed), chains)
        x, accepted = _run(problem, fp.Reference(center, scale), keys, draws)
    rate = float(np.asarray(accepted).mean())
    if not rate >= LEAST_ACCEPTED:
        raise RuntimeError(f"HMC accepted {rate:.2f} of its trajectories, less than {LEAST_ACCEPTED}")
    return np.asarray(x)


@functools.partial(jax.jit, static_argnums=3)
def _run(problem: Density, reference: fp.Reference, keys, draws: int):
    import blackjax

    step = STEP * reference.dim**-0.25
    kernel, steps = blackjax.hmc.build_kernel(), int(np.ceil(TRAJECTORY / step))

    def density(a):
        return problem.log_density(reference.to_x(a))

    def run_chain(key):
        start, sample = jax.random.split(key)

        def body(state, key):
            jitter, move = jax.random.split(key)
            size = step * jax.random.uniform(jitter, minval=0.5, maxval=1.0)
            state, info = kernel(move, state, density, size, jnp.ones(reference.dim), steps)
            return state, (state.position, info.acceptance_rate)

        state = blackjax.hmc.init(jax.random.normal(start, (reference.dim,)), density)
        a, accepted = jax.lax.scan(body, state, jax.random.split(sample, WARM_UP + draws))[1]
        return jax.vmap(reference.to_x)(a[WARM_UP:]), accepted[WARM_UP:]

    return jax.vmap(run_chain)(keys)
