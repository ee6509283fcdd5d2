"""The automatic certified route on one model of `tests.zoo`, all records at one site: prints one JSON object.

Runs in a process of its own, pinned to one core. The model is a plain JAX function; its bounds are derived by the package.
The Laplace reference is written to ``--reference`` for the rival, which samples the same function in the same coordinates.
What ``sample`` does first (compilation, the reference, a burn-in) is `compile_seconds`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np

from effective import effective_sizes, rates
from pinning import pin_to_one_core

sys.path.append(str(Path(__file__).resolve().parents[1]))
BURN_IN = 100.0


def methods() -> dict:
    """What may be chosen."""
    import fedpdmc as fp

    return {
        "default": {},
        "zigzag": {"dynamics": fp.ZigZag(), "reference": "laplace", "control": "none"},
        "bouncy": {"dynamics": fp.BouncyParticle(), "reference": "laplace", "control": "none"},
    }


def problem(name: str):
    """The case, and one site with the function that the rival samples: minus the log posterior of all records."""
    from tests.zoo import CASES

    import fedpdmc as fp

    case = CASES[name]

    def posterior(x, data):
        return case.prior(x) + case.likelihood(x, data)

    return case, fp.Site(posterior, data=case.data(), name="all")


def measure_once(site, case, options: argparse.Namespace, seed: int, method: dict) -> tuple[dict, np.ndarray, object]:
    """Start a run, then time its extension and judge the draws of it."""
    import fedpdmc as fp

    clock, opened = time.perf_counter(), time.process_time()
    first = fp.sample(
        site, init=case.start, names=case.names, chains=options.chains, duration=1.0, burn_in=BURN_IN, seed=seed,
        progress=False, **method,
    )  # fmt: skip
    compile_seconds, compile_cpu_seconds = time.perf_counter() - clock, time.process_time() - opened
    wall, cpu = time.perf_counter(), time.process_time()
    post = first.extend(duration=options.duration, progress=False)
    _ = post.skeleton.v
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    steps = int(options.duration / options.spacing)
    draws = post.draws(round((1.0 + options.duration) / options.spacing))[:, -steps:]
    sizes, events = effective_sizes(draws), int((post.events - first.events).sum())
    passes = int((post.gradient_evaluations - first.gradient_evaluations).sum())
    result = rates(wall, cpu, events, sizes["worst"]) | {
        "ess_coordinate": sizes["coordinate"],
        "ess_energy": sizes["energy"],
        "process_time": options.duration,
        "looks": passes / (options.chains * options.duration),
        "compile_seconds": compile_seconds,
        "compile_cpu_seconds": compile_cpu_seconds,
    }
    return result, draws, first


def benchmark(options: argparse.Namespace) -> dict:
    """Run ``options.repeats`` times with different seeds."""
    case, site = problem(options.model)
    runs, kept, first = [], [], None
    for repeat in range(options.repeats):
        method = methods()[options.method]
        result, draws, first = measure_once(site, case, options, options.seed + repeat, method)
        runs.append(result)
        kept.append(draws)
    reference = first.reference
    np.savez(options.reference, center=reference.center, scale=reference.scale_tril)
    draws = np.concatenate(kept)
    return {
        "records": len(next(iter(case.records.values()))),
        "dim": case.dim,
        "certified": first.certified,
        "clock": first.certificate[0]["clock"],
        "runs": runs,
        "mean": draws.mean((0, 1)).tolist(),
        "sd": draws.std((0, 1)).tolist(),
        "error": (draws.mean(1).std(0, ddof=1) / np.sqrt(len(draws))).tolist(),
    }


def main() -> None:
    """Run the benchmark and print its report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--method", default="zigzag")
    parser.add_argument("--chains", type=int, default=64)
    parser.add_argument("--duration", type=float, default=100.0)
    parser.add_argument("--spacing", type=float, default=0.25)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--core", type=int)
    parser.add_argument("--reference", required=True, help="npz file for the rival")
    options = parser.parse_args()
    core = pin_to_one_core(options.core, "")
    report = {name: getattr(options, name) for name in ("model", "method", "chains", "seed")}
    versions = {name: version(name) for name in ("fedpdmc", "jax", "numpy")}
    print(json.dumps(report | {"contestant": "fedpdmc", "core": core, "versions": versions} | benchmark(options)))


if __name__ == "__main__":
    main()
