"""NUTS and HMC on the pooled records of the paper's logistic regression: prints one JSON object.

``--measure rounds``: BlackJAX HMC or NUTS as a federation would run it, one round for each gradient, with the Laplace
covariance as a dense metric and step size and trajectory length from a grid; what is reported is the best of the grid.
``--measure speed``: BlackJAX or NumPyro NUTS with a dense metric, adapted and compiled before the clock starts, with each
number of vectorised chains that is asked for.
"""

from __future__ import annotations

import argparse
import json
import time
from functools import partial
from importlib.metadata import version

import numpy as np

import problems
from effective import effective_sizes
from pinning import pin_to_one_core

STEP_SIZES = {"hmc": (0.5, 0.7, 0.9, 1.1, 1.3), "nuts": (0.4, 0.6, 0.8, 1.0, 1.2)}
LEAPFROGS = (1, 2, 3, 4)
WARM_UP = {"blackjax": 1000, "numpyro": 500}
BURN_IN = 20


def potential(problem: problems.Problem):
    """Minus the log posterior on all records."""
    import jax
    import jax.numpy as jnp

    X, y = jnp.asarray(problem.arrays["X"]), jnp.asarray(problem.arrays["y"])

    def minus_log_density(x):
        z = X @ x
        return jnp.sum(jax.nn.softplus(z) - y * z) + 0.5 * jnp.sum(x**2)

    return minus_log_density


def chains_of(step, state, chains: int, draws: int):
    """A function of a key that runs ``draws`` vectorised steps and returns positions and gradients per draw."""
    import jax

    def run(key):
        def body(state, key):
            state, info = jax.vmap(step)(jax.random.split(key, chains), state)
            return state, (state.position, info.num_integration_steps)

        positions, gradients = jax.lax.scan(body, state, jax.random.split(key, draws))[1]
        return positions.swapaxes(0, 1), gradients.swapaxes(0, 1)

    return run


def count_rounds(problem: problems.Problem, options: argparse.Namespace) -> dict:
    """Gradients per effective sample for every setting of the grid."""
    import blackjax
    import jax
    import jax.numpy as jnp

    minus = potential(problem)
    kernel = getattr(blackjax, options.sampler).build_kernel()
    chains, metric = max(options.chains), jnp.asarray(problem.cov)
    starts = jnp.asarray(problem.starts(chains, options.seed))
    state = jax.vmap(lambda x: blackjax.hmc.init(x, lambda x: -minus(x)))(starts)

    @jax.jit
    def run(key, size, leapfrogs):
        extra = (leapfrogs,) if options.sampler == "hmc" else ()

        def step(key, state):
            return kernel(key, state, lambda x: -minus(x), size, metric, *extra)

        return chains_of(step, state, chains, options.draws + BURN_IN)(key)

    grid = []
    for size in STEP_SIZES[options.sampler]:
        for leapfrogs in LEAPFROGS if options.sampler == "hmc" else (0,):
            positions, gradients = run(jax.random.key(options.seed), size, leapfrogs)
            sizes = effective_sizes(np.asarray(positions)[:, BURN_IN:])
            per_ess = float(np.sum(np.asarray(gradients)[:, BURN_IN:])) / sizes["worst"]
            grid.append({"step_size": size, "leapfrogs": leapfrogs, "rounds_per_ess": per_ess} | sizes)
    return {"chains": chains, "grid": grid} | min(grid, key=lambda row: row["rounds_per_ess"])


def blackjax_runs(problem: problems.Problem, options: argparse.Namespace):
    """For a number of chains and draws, a compiled run after adaptation of one chain."""
    import blackjax
    import jax
    import jax.numpy as jnp

    minus = potential(problem)
    adaptation = blackjax.window_adaptation(
        blackjax.nuts, lambda x: -minus(x), is_mass_matrix_diagonal=False, target_acceptance_rate=0.8
    )
    start = jnp.asarray(problem.starts(1, options.seed))[0]
    (_, parameters), _ = adaptation.run(jax.random.key(options.seed), start, num_steps=WARM_UP["blackjax"])
    sampler = blackjax.nuts(lambda x: -minus(x), **parameters)

    def prepare(chains, draws):
        state = jax.vmap(sampler.init)(jnp.asarray(problem.starts(chains, options.seed)))
        run = jax.jit(chains_of(sampler.step, state, chains, draws))
        return lambda seed: tuple(np.asarray(x) for x in run(jax.random.key(seed)))

    return prepare


def numpyro_runs(problem: problems.Problem, options: argparse.Namespace):
    """The same with NumPyro, which adapts every chain."""
    import jax
    import jax.numpy as jnp
    from numpyro.infer import MCMC, NUTS

    minus = potential(problem)

    def prepare(chains, draws):
        starts = jnp.asarray(problem.starts(chains, options.seed))
        kernel = NUTS(potential_fn=minus, dense_mass=True)
        mcmc = MCMC(
            kernel, num_warmup=WARM_UP["numpyro"], num_samples=draws, num_chains=chains, chain_method="vectorized",
            progress_bar=False,
        )  # fmt: skip
        init = starts if chains > 1 else starts[0]
        mcmc.warmup(jax.random.key(options.seed), init_params=init, extra_fields=("num_steps",))
        mcmc.post_warmup_state = mcmc.last_state

        def run(seed):
            mcmc.run(jax.random.key(seed), extra_fields=("num_steps",))
            extra = mcmc.get_extra_fields(group_by_chain=True)["num_steps"]
            return np.asarray(mcmc.get_samples(group_by_chain=True)), np.asarray(extra)

        return run

    return prepare


def time_runs(problem: problems.Problem, options: argparse.Namespace) -> dict:
    """Time every number of chains: adaptation and compilation apart."""
    clock = time.perf_counter()
    prepare = {"blackjax": blackjax_runs, "numpyro": numpyro_runs}[options.library](problem, options)
    rows = []
    for chains in options.chains:
        run = prepare(chains, max(options.draws // chains, 25))
        run(options.seed)
        ready, runs = time.perf_counter() - clock, []
        for repeat in range(options.repeats):
            wall, cpu = time.perf_counter(), time.process_time()
            draws, gradients = run(options.seed + 1 + repeat)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            runs.append(_rates(draws, gradients, wall, cpu))
        rows.append({"chains": chains, "before_seconds": ready, "runs": runs})
        clock = time.perf_counter()
    return {"rows": rows}


def _rates(draws: np.ndarray, gradients: np.ndarray, wall: float, cpu: float) -> dict:
    sizes = effective_sizes(draws)
    return {
        "draws": draws.shape[0] * draws.shape[1],
        "gradients_per_draw": float(np.mean(gradients)),
        "ess_coordinate": sizes["coordinate"],
        "ess_energy": sizes["energy"],
        "ess_worst": sizes["worst"],
        "run_seconds": wall,
        "cpu_seconds": cpu,
        "ess_per_second": sizes["worst"] / wall,
        "ess_per_cpu_second": sizes["worst"] / cpu,
    }


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Benchmark HMC and NUTS on the pooled records.")
    parser.add_argument("--measure", choices=("rounds", "speed"), default="speed")
    parser.add_argument("--library", choices=("blackjax", "numpyro"), default="blackjax")
    parser.add_argument("--sampler", choices=("hmc", "nuts"), default="nuts")
    parser.add_argument("--records", type=int, default=1000)
    parser.add_argument("--dim", type=int, default=6)
    parser.add_argument("--chains", type=int, nargs="+", default=[64])
    parser.add_argument("--draws", type=int, default=16_000, help="of each chain for rounds, of all chains for speed")
    parser.add_argument("--bits", type=int, choices=(32, 64), default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--core", type=int, help="core to run on; the last allowed one if not given")
    return parser.parse_args()


def main() -> None:
    """Run the benchmark and print its report."""
    options = parse()
    core = pin_to_one_core(options.core, "")
    import jax

    jax.config.update("jax_enable_x64", options.bits == 64)
    problem = problems.paper_logistic(records=options.records, dim=options.dim)
    report = {
        "contestant": options.library,
        "measure": options.measure,
        "sampler": options.sampler,
        "records": options.records,
        "dim": options.dim,
        "bits": options.bits,
        "seed": options.seed,
        "core": core,
        "versions": {name: version(name) for name in (options.library, "jax", "jaxlib", "arviz", "numpy")},
    }
    measured = partial(count_rounds if options.measure == "rounds" else time_runs, problem, options)()
    print(json.dumps(report | measured))


if __name__ == "__main__":
    main()
