"""Zig-Zag of the PyPI package pdmp-jax on a benchmark problem: prints one JSON object.

Runs in an environment of its own (pdmp-jax-requirements.txt) and in a process of its own, pinned to one core.

How the rival was put at its best. About 100 settings were timed on one core, on these same data, mostly with short runs
of 64 chains; the moments were then checked (`--check`) for the settings kept, not for each one tried. Differences
of less than 5 % between settings are noise.

- 32 bits and `--xla_cpu_use_thunk_runtime=false`, the flag its README asks for: 13 times faster on the Gaussian and
  3 times on the logistic, at the settings below.
- Many chains one after the other in one compiled `lax.map` over its own `sample_skeleton`, not side by side under
  `vmap`: its loops are nested `while` and `cond`, of which `vmap` runs every branch until the slowest chain is done.
  With 64 chains that is 2 to 5 times faster. Batches of 4 (Gaussian) or 8 (logistic) chains lay in between.
  `--execution vmap` measures the other way, with settings of its own but fewer of them tried.
- A fixed horizon: 3 grid points over 0.085 with the plain bound for the Gaussian, 4 over 0.12 with the vectorised
  signed bound for the logistic (flat from 0.12 to 0.18). Its defaults (10 points, adaptive from 2.0) are 2 to 3 times
  slower; `--tuning default` measures them. Its Brent bound (grid size 0, one short run on the logistic at the default
  horizon) was slower by a factor of several hundred and found itself violated once in three events.
- The gradient in its cheapest form: sufficient statistics for the Gaussian; for the logistic the records by columns
  and the linear predictor as a fused sum over columns, up to 4 times faster than `X @ x`.
- The default generator, threefry: rbg and unsafe_rbg were slower on the Gaussian.
- At most 50,000 events a chain, because its compile time grows with their number (100 s for a million).

What counts: an event is one accepted flip, which is one entry of its skeleton (proposals rejected, horizons reached
and bound violations are not entries). It accumulates process time in 32 bits, so durations are taken from the
positions instead (speed one in every coordinate). All chains make the same number of events; draws are taken over
the common span, and the clock is credited for the share of process time beyond it. Making draws is not timed.
Its bounds are uncertified: where a rate exceeds one it redraws and goes on. The count is reported as `violations`.
The figures are those of the fastest of a few runs, the one least disturbed by others on the machine; `cpu_seconds`
beside `run_seconds` shows how much it was disturbed (one thread: undisturbed they agree), `runs` holds them all.
"""

from __future__ import annotations

import argparse
import json
import time
from importlib.metadata import version

import numpy as np

import problems
from effective import effective_sizes, rates
from pinning import pin_to_one_core

XLA_FLAGS = "--xla_cpu_use_thunk_runtime=false --xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
BEST = {
    ("paper_gaussian", "sequential"): {"grid_size": 3, "tmax": 0.085, "vectorized_bound": False, "signed_bound": False},
    ("paper_logistic", "sequential"): {"grid_size": 4, "tmax": 0.12},
    ("paper_gaussian", "vmap"): {"grid_size": 5, "tmax": 0.15},
    ("paper_logistic", "vmap"): {"grid_size": 4, "tmax": 0.2},
}
DEFAULT = {"grid_size": 10, "tmax": 2.0, "adaptive": True}
MAX_EVENTS_PER_CHAIN = 50_000
TOTAL_EVENTS = {"paper_gaussian": 1_280_000, "paper_logistic": 128_000}


def gradient(problem: problems.Problem):
    """Return the gradient of the potential as a JAX function, in the form that is cheapest for the rival."""
    import jax
    import jax.numpy as jnp

    if problem.name == "paper_gaussian":
        mean, records = jnp.asarray(problem.mean, jnp.float32), float(problem.size[0])
        return lambda x: records * (x - mean)
    columns = jnp.asarray(problem.arrays["X"].T, jnp.float32)
    moment = jnp.asarray(problem.arrays["X"].T @ problem.arrays["y"], jnp.float32)

    def logistic(x):
        predictor = sum(columns[j] * x[j] for j in range(columns.shape[0]))
        return columns @ jax.nn.sigmoid(predictor) - moment + x

    return logistic


def skeleton_function(problem: problems.Problem, settings: dict, events: int, execution: str):
    """Return a function (x, v, seeds) -> (positions, velocities, violations, rejections, horizons) of all chains."""
    import jax
    from pdmp_jax import ZigZag

    sampler = ZigZag(problem.size[1], gradient(problem), **settings)

    def one_chain(x, v, seed):
        out = sampler.sample_skeleton(events, x, v, seed, verbose=False)
        return out.x, out.v, out.error_bound.sum(), out.rejected.sum(), out.hitting_horizon.sum()

    if execution == "vmap":
        return jax.vmap(one_chain)
    return lambda *inputs: jax.lax.map(lambda chain: one_chain(*chain), inputs)


def start_inputs(problem: problems.Problem, chains: int, seed: int) -> tuple:
    """Return the rival's starts, velocities and seeds in 32 bits."""
    starts = np.float32(problem.starts(chains, seed))
    velocities = np.float32(problem.velocities(chains, seed))
    return starts, velocities, np.arange(seed * chains, (seed + 1) * chains, dtype=np.int32)


def equally_spaced(x: np.ndarray, v: np.ndarray, spacing: float) -> tuple[np.ndarray, float, float]:
    """Read draws off the skeletons at multiples of `spacing` over the common span.

    Parameters
    ----------
    x, v : ndarray of shape (chains, events + 1, d)
        Positions and velocities just after each event, the start first.
    spacing : float
        Process time between draws.

    Returns
    -------
    draws : ndarray of shape (chains, n, d)
    span : float
        Process time that a chain makes on average.
    share : float
        Share of all simulated process time that lies in the common span.
    """
    x = x.astype(float)
    clock = np.zeros(x.shape[:2])
    clock[:, 1:] = np.cumsum(np.abs(np.diff(x, axis=1)).mean(axis=-1), axis=1)
    span = clock[:, -1].min()
    times = spacing * np.arange(1, int(span / spacing) + 1)
    draws = np.empty((len(x), len(times), x.shape[-1]))
    for chain, ticks in enumerate(clock):
        index = np.searchsorted(ticks, times, side="right") - 1
        draws[chain] = x[chain, index] + v[chain, index] * (times - ticks[index])[:, None]
    mean = float(clock[:, -1].mean())
    return draws, mean, float(span / mean)


def measure_once(run, problem: problems.Problem, chains: int, seed: int) -> tuple[dict, np.ndarray]:
    """Time one run of the compiled sampler and judge its draws."""
    import jax

    inputs = start_inputs(problem, chains, seed)
    begin, cpu_begin = time.perf_counter(), time.process_time()
    x, v, *counts = jax.block_until_ready(run(*inputs))
    seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - cpu_begin
    draws, span, share = equally_spaced(np.asarray(x), np.asarray(v), problem.spacing)
    sizes = effective_sizes(draws)
    events = chains * (x.shape[1] - 1)
    names = ("violations", "rejections", "horizons_reached")
    result = rates(seconds, cpu_seconds, events, sizes["worst"], share) | {
        "draws": draws.shape[0] * draws.shape[1],
        "ess_coordinate": sizes["coordinate"],
        "ess_energy": sizes["energy"],
        "ess_worst": sizes["worst"],
        "span_share": share,
        "process_time": span,
    }
    return result | {name: int(count.sum()) for name, count in zip(names, counts, strict=True)}, draws


def benchmark(problem: problems.Problem, options: argparse.Namespace) -> dict:
    """Compile once, run `options.repeats` times with different seeds, and report the fastest."""
    import jax

    settings = DEFAULT
    if options.tuning == "best":
        settings = BEST[problem.name, options.execution] | {"adaptive": False}
    events = options.events or min(TOTAL_EVENTS[problem.name] // options.chains, MAX_EVENTS_PER_CHAIN)
    function = skeleton_function(problem, settings, events, options.execution)
    begin = time.perf_counter()
    run = jax.jit(function).lower(*start_inputs(problem, options.chains, options.seed)).compile()
    compile_seconds = time.perf_counter() - begin
    runs, pooled = [], []
    for repeat in range(options.repeats):
        result, draws = measure_once(run, problem, options.chains, options.seed + repeat)
        runs.append(result)
        pooled.append(draws.reshape(-1, draws.shape[-1]))
    fastest = min(runs, key=lambda result: result["run_seconds"])
    report = fastest | {"compile_seconds": compile_seconds, "runs": runs}
    if options.check:
        report |= problems.check_moments(
            problem, np.concatenate(pooled), sum(result["ess_coordinate"] for result in runs)
        )
    return report | {"settings": settings, "events_per_chain": events}


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Benchmark the Zig-Zag of pdmp-jax; prints one JSON object.")
    parser.add_argument("--problem", choices=sorted(problems.PROBLEMS), default="paper_gaussian")
    parser.add_argument("--data", help="npz file of Problem.save, instead of a problem by name")
    parser.add_argument("--chains", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--events", type=int, help="events per chain")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--execution", choices=("sequential", "vmap"), default="sequential")
    parser.add_argument("--tuning", choices=("best", "default"), default="best")
    parser.add_argument("--core", type=int, help="core to run on; the last allowed one if not given")
    parser.add_argument("--check", action="store_true", help="compare moments with the truth")
    return parser.parse_args()


def main() -> None:
    """Run the benchmark and print its report."""
    options = parse()
    core = pin_to_one_core(options.core, XLA_FLAGS)
    problem = problems.load(options.data) if options.data else problems.PROBLEMS[options.problem]()
    report = {
        "contestant": "pdmp-jax",
        "problem": problem.name,
        "records": problem.size[0],
        "dim": problem.size[1],
        "chains": options.chains,
        "seed": options.seed,
        "execution": options.execution,
        "tuning": options.tuning,
        "core": core,
        "versions": {name: version(name) for name in ("pdmp-jax", "jax", "arviz", "numpy")},
    }
    print(json.dumps(report | benchmark(problem, options)))


if __name__ == "__main__":
    main()
