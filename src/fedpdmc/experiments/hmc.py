"""The reference: Hamiltonian Monte Carlo (BlackJAX) on the pooled records, which a real federation could not run."""

# BlackJAX declares its states and its adaptation as bare protocols, without the fields they have.
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float
from numpy import ndarray

import fedpdmc as fp

# Leapfrog steps of a draw: a quarter of a turn to a half at the step sizes that adaptation finds.
STEPS = 12


def hmc(
    log_density: Callable, reference: fp.Reference, *, seed: int, chains: int, warm_up: int, draws: int
) -> Float[ndarray, "chains draws d"]:
    """Draws of a density in 64 bits, made in the whitened coordinates of a reference.

    Every chain starts at a point of its own, adapts its own step size and metric and is then run with both frozen, but for
    a factor of the step size between a half and one, drawn for each trajectory, which keeps trajectories from closing on
    themselves.
    """
    import blackjax

    with jax.enable_x64(True):
        reference = fp.Reference(jnp.asarray(reference.center, float), jnp.asarray(reference.scale_tril, float))

        def whitened(a):
            return log_density(reference.to_x(a))

        adaptation = blackjax.window_adaptation(blackjax.hmc, whitened, num_integration_steps=STEPS)
        kernel = blackjax.hmc.build_kernel()

        def run_chain(key):
            start, adapt, sample = jax.random.split(key, 3)
            (state, found), _ = adaptation.run(adapt, jax.random.normal(start, (reference.dim,)), num_steps=warm_up)

            def body(state, key):
                jitter, move = jax.random.split(key)
                size = found["step_size"] * jax.random.uniform(jitter, minval=0.5, maxval=1.0)
                state, _ = kernel(move, state, whitened, size, found["inverse_mass_matrix"], STEPS)
                return state, state.position

            return jax.lax.scan(body, state, jax.random.split(sample, draws))[1]

        a = jax.jit(jax.vmap(run_chain))(jax.random.split(jax.random.key(seed), chains))
        return np.asarray(reference.to_x(a))
