"""The demo's check: NUTS (BlackJAX) on the pooled records, which a real federation could not run."""

# BlackJAX declares its states and its adaptation as bare protocols, without the fields they have.
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false

import blackjax
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float
from numpy import ndarray


def pooled_nuts(
    X: Float[ndarray, "n d"],
    y: Float[ndarray, " n"],
    prior_scale: float,
    *,
    seed: int,
    chains: int = 8,
    warm_up: int = 400,
    draws: int = 1000,
) -> Float[ndarray, "chains draws d"]:
    """Draws of a logistic regression with independent ``N(0, prior_scale²)`` priors, in 64 bits.

    Every chain starts at its own point, adapts its own step size and metric, and is then run with both frozen.
    """
    with jax.enable_x64(True):
        design, outcome = jnp.asarray(X), jnp.asarray(y)

        def log_density(x):
            z = design @ x
            return jnp.sum(outcome * z - jax.nn.softplus(z)) - 0.5 * jnp.sum((x / prior_scale) ** 2)

        def run_chain(key):
            start_key, adapt_key, draw_key = jax.random.split(key, 3)
            start = 0.5 * jax.random.normal(start_key, (design.shape[1],))
            adaptation = blackjax.window_adaptation(blackjax.nuts, log_density)
            (state, parameters), _ = adaptation.run(adapt_key, start, num_steps=warm_up)
            step = blackjax.nuts(log_density, **parameters).step

            def body(state, key):
                after, _ = step(key, state)
                return after, after

            _, states = jax.lax.scan(body, state, jax.random.split(draw_key, draws))
            return states.position

        return np.asarray(jax.jit(jax.vmap(run_chain))(jax.random.split(jax.random.key(seed), chains)))
