"""Zig-Zag and Boomerang of the PyPI package pdmp-jax on one model of `tests.zoo`: prints one JSON object.

Runs in an environment of its own (pdmp-jax-requirements.txt) and in a process of its own, pinned to one core. The rival
samples the same JAX function of all records in the same Laplace coordinates, in 32 bits with the flag that its README asks
for, its chains one after the other (`rival_pdmp_jax.py` says why). Its adaptive horizon and a few fixed ones are tried in
short runs, for each of its two samplers, and the best by effective samples per second of processor time is then measured.
A first run, not timed, brings the chains from the Laplace approximation to the posterior. Bounds on a grid are not
certified: where a rate exceeds one the package redraws and goes on; `violations` counts that.
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
from rival_pdmp_jax import XLA_FLAGS

sys.path.append(str(Path(__file__).resolve().parents[1]))
REFRESH = 1.2
SETTINGS = {
    "zigzag": (
        {"grid_size": 10, "tmax": 2.0, "adaptive": True},
        {"grid_size": 5, "tmax": 0.5, "adaptive": False},
        {"grid_size": 5, "tmax": 1.0, "adaptive": False},
        {"grid_size": 8, "tmax": 1.5, "adaptive": False},
    ),
    "boomerang": (
        {"grid_size": 10, "tmax": 1.0, "adaptive": True},
        {"grid_size": 5, "tmax": 1.0, "adaptive": False},
        {"grid_size": 8, "tmax": 2.0, "adaptive": False},
    ),
}
TRIAL_SHARE = 4


def sampler(case, reference, kind: str, settings: dict):
    """The rival's sampler of the whitened potential."""
    import jax
    import jax.numpy as jnp
    import pdmp_jax

    center, scale = (jnp.asarray(reference[name], jnp.float32) for name in ("center", "scale"))
    data = {
        name: jnp.asarray(x, jnp.float32) if np.issubdtype(x.dtype, np.floating) else jnp.asarray(x)
        for name, x in case.data().items()
    }

    def potential(a):
        x = center + scale @ a
        return case.prior(x) + case.likelihood(x, data)

    if kind == "zigzag":
        return pdmp_jax.ZigZag(case.dim, jax.grad(potential), **settings)
    return pdmp_jax.Boomerang(case.dim, jax.grad(potential), refresh_rate=REFRESH, **settings)


def compiled(case, reference, kind: str, settings: dict, events: int, inputs):
    """The rival's loop over all chains."""
    import jax

    made = sampler(case, reference, kind, settings)

    def one(x, v, seed):
        out = made.sample_skeleton(events, x, v, seed, verbose=False)
        return out.x, out.v, out.t, out.error_bound.sum()

    return jax.jit(lambda *chains: jax.lax.map(lambda chain: one(*chain), chains)).lower(*inputs).compile()


def start(case, kind: str, chains: int, seed: int) -> tuple:
    """Positions of the Laplace approximation and velocities of the process."""
    rng = np.random.default_rng(seed)
    x, v = rng.normal(size=(2, chains, case.dim))
    v = np.where(v < 0, -1.0, 1.0) if kind == "zigzag" else v
    return np.float32(x), np.float32(v), np.arange(seed * chains, (seed + 1) * chains, dtype=np.int32)


def equally_spaced(kind: str, x, v, t, spacing: float) -> tuple[np.ndarray, float]:
    """Draws at multiples of ``spacing`` over the common span, and its share of all process time."""
    x, v, t = (np.asarray(part, float) for part in (x, v, t))
    t = t - t[:, :1]
    span = t[:, -1].min()
    times = spacing * np.arange(1, int(span / spacing) + 1)
    draws = np.empty((len(x), len(times), x.shape[-1]))
    for chain, ticks in enumerate(t):
        index = np.searchsorted(ticks, times, side="right") - 1
        gap = (times - ticks[index])[:, None]
        one, other = (1.0, gap) if kind == "zigzag" else (np.cos(gap), np.sin(gap))
        draws[chain] = one * x[chain, index] + other * v[chain, index]
    return draws, float(span / t[:, -1].mean())


def measure(run, kind: str, inputs, spacing: float) -> tuple[dict, np.ndarray, tuple]:
    """Time one run and judge its draws."""
    import jax

    wall, cpu = time.perf_counter(), time.process_time()
    x, v, t, violations = jax.block_until_ready(run(*inputs))
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    draws, share = equally_spaced(kind, x, v, t, spacing)
    sizes = effective_sizes(draws)
    result = rates(wall, cpu, x.shape[0] * (x.shape[1] - 1), sizes["worst"], share)
    result |= {"ess_coordinate": sizes["coordinate"], "ess_energy": sizes["energy"], "span_share": share}
    return result | {"violations": int(np.sum(violations))}, draws, (np.asarray(x[:, -1]), np.asarray(v[:, -1]))


def best_settings(case, reference, kind: str, options) -> dict:
    """The fastest of a few settings in short runs."""
    events, found = max(options.events // TRIAL_SHARE, 50), []
    for settings in SETTINGS[kind]:
        inputs = start(case, kind, options.chains, options.seed)
        run = compiled(case, reference, kind, settings, events, inputs)
        result, _, _ = measure(run, kind, inputs, options.spacing)
        found.append((result["ess_per_cpu_second"], settings))
    return max(found, key=lambda pair: pair[0])[1]


def benchmark(options: argparse.Namespace) -> dict:
    """The best settings of the sampler, run ``options.repeats`` times."""
    from tests.zoo import CASES

    case, reference = CASES[options.model], np.load(options.reference)
    settings = best_settings(case, reference, options.kind, options)
    inputs = start(case, options.kind, options.chains, options.seed)
    clock = time.perf_counter()
    run = compiled(case, reference, options.kind, settings, options.events, inputs)
    compile_seconds = time.perf_counter() - clock
    _, _, state = measure(run, options.kind, inputs, options.spacing)
    runs, kept = [], []
    for repeat in range(options.repeats):
        seeds = start(case, options.kind, options.chains, options.seed + 1 + repeat)[2]
        result, draws, state = measure(run, options.kind, (*state, seeds), options.spacing)
        runs.append(result)
        kept.append(draws @ reference["scale"].T + reference["center"])
    averages = np.concatenate([draws.mean(1) for draws in kept])
    flat = np.concatenate([draws.reshape(-1, case.dim) for draws in kept])
    return {
        "settings": settings,
        "compile_seconds": compile_seconds,
        "runs": runs,
        "mean": flat.mean(0).tolist(),
        "sd": flat.std(0).tolist(),
        "error": (averages.std(0, ddof=1) / np.sqrt(len(averages))).tolist(),
    }


def main() -> None:
    """Run the benchmark and print its report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--kind", choices=sorted(SETTINGS), default="zigzag")
    parser.add_argument("--chains", type=int, default=64)
    parser.add_argument("--events", type=int, default=1000, help="events per chain")
    parser.add_argument("--spacing", type=float, default=0.25)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--core", type=int)
    parser.add_argument("--reference", required=True, help="npz file with center and scale")
    options = parser.parse_args()
    core = pin_to_one_core(options.core, XLA_FLAGS)
    report = {name: getattr(options, name) for name in ("model", "kind", "chains", "seed")}
    versions = {name: version(name) for name in ("pdmp-jax", "jax", "numpy")}
    print(json.dumps(report | {"contestant": "pdmp-jax", "core": core, "versions": versions} | benchmark(options)))


if __name__ == "__main__":
    main()
