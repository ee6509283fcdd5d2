"""BlackJAX NUTS on one logistic regression of the grid: prints one JSON object.

In 32 bits, with the Laplace covariance as a dense metric, started in the Laplace approximation, all chains vectorised; each
number of chains with each step size, and the best is what counts. Compilation is timed apart.
"""

from __future__ import annotations

import argparse
import json
import time
from importlib.metadata import version

import numpy as np

from grid_problem import JUDGED, data, judged, laplace, use_device

STEP_SIZES = (0.8, 1.1)
LEAST, PROBE = 60, 8
# Seconds of a draw of all chains from which on fewer are made.
SLOW, LEAST_SLOW = 0.1, 16
MOST_BYTES = 4e9


def measure(X: np.ndarray, y: np.ndarray, chains: int, size: float, options: argparse.Namespace) -> dict:
    """One number of chains and one step size."""
    import blackjax
    import jax
    import jax.numpy as jnp

    mode, cov = laplace(X, y)
    rng = np.random.default_rng(options.seed)
    starts = jnp.asarray(mode + rng.normal(size=(chains, len(mode))) @ np.linalg.cholesky(cov).T, jnp.float32)
    records, responses, metric = (jnp.asarray(x, jnp.float32) for x in (X, y, cov))
    kernel = blackjax.nuts.build_kernel()

    def run(state, key, records, responses, metric, count):
        def log_density(x):
            z = records @ x
            return jnp.sum(responses * z - jax.nn.softplus(z)) - 0.5 * jnp.sum(x**2)

        def body(state, key):
            step = jax.vmap(lambda key, state: kernel(key, state, log_density, size, metric))
            state, _ = step(jax.random.split(key, chains), state)
            return state, state.position[:JUDGED]

        return jax.lax.scan(body, state, jax.random.split(key, count))

    def first(x, records, responses):
        def log_density(x):
            z = records @ x
            return jnp.sum(responses * z - jax.nn.softplus(z)) - 0.5 * jnp.sum(x**2)

        return blackjax.nuts.init(x, log_density)

    clock = time.perf_counter()
    compiled = jax.jit(run, static_argnums=5)
    state = jax.jit(jax.vmap(first, (0, None, None)))(starts, records, responses)
    args = (records, responses, metric)
    state, _ = jax.block_until_ready(compiled(state, jax.random.key(1), *args, PROBE))
    ready = time.perf_counter() - clock
    clock = time.perf_counter()
    jax.block_until_ready(compiled(state, jax.random.key(2), *args, PROBE))
    each = (time.perf_counter() - clock) / PROBE
    least = LEAST if each < SLOW else LEAST_SLOW
    count = int(np.clip(options.seconds / each, least, MOST_BYTES / (4 * JUDGED * X.shape[1])))
    state, _ = jax.block_until_ready(compiled(state, jax.random.key(3), *args, count))
    runs = []
    for repeat in range(options.repeats if each < SLOW else 1):
        wall, cpu = time.perf_counter(), time.process_time()
        state, draws = jax.block_until_ready(compiled(state, jax.random.key(4 + repeat), *args, count))
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        sizes = judged(np.asarray(draws, np.float64).swapaxes(0, 1), chains)
        runs.append({
            "ess_per_second": sizes["worst"] / wall, "ess_per_cpu_second": sizes["worst"] / cpu, "run_seconds": wall,
            "cpu_seconds": cpu, "draws": count * chains, "ess": sizes,
        })  # fmt: skip
    return {"chains": chains, "step_size": size, "ready_seconds": ready, "runs": runs}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=1000)
    parser.add_argument("--dim", type=int, default=6)
    parser.add_argument("--chains", type=int, nargs="+", default=[64])
    parser.add_argument("--sizes", type=float, nargs="+", default=list(STEP_SIZES))
    parser.add_argument("--seconds", type=float, default=2.0, help="of a timed run")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--core", type=int)
    options = parser.parse_args()
    core = use_device(options.device, options.core)
    X, y = data(options.records, options.dim)
    report = {"contestant": "blackjax", "records": options.records, "dim": options.dim, "sites": 1, "bits": 32}
    report |= {"device": options.device, "core": core, "rows": []}
    report["versions"] = {name: version(name) for name in ("blackjax", "jax", "jaxlib", "arviz", "numpy")}
    for chains in options.chains:
        for size in options.sizes:
            try:
                report["rows"].append(measure(X, y, chains, size, options))
            except Exception as error:  # a size that does not fit the device
                failed = f"{type(error).__name__}: {error}"[:300]
                report["rows"].append({"chains": chains, "step_size": size, "failed": failed, "runs": []})
    print(json.dumps(report))


if __name__ == "__main__":
    main()
