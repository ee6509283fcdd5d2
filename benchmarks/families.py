"""Families of the standard library at three unequal sites beside NUTS: ``python -m benchmarks.families``.

Each family runs in two processes of its own, one for this package with its defaults and one for NumPyro's NUTS on the pooled
records (four vectorised chains, 500 steps of warm-up). Nothing compiled before is used. *Wall* is the time of the whole
process's sampling, compilation included, until 1,000 effective samples of the worst coordinate; ``z`` is the largest
difference of means and standard deviations in standard errors of both.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
WANTED, WARM_UP, CHAINS, DRAWS = 1000, 500, 4, 1000


def main() -> None:
    """Run all families, or one contestant of one family, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--limit", type=float, default=900.0, help="seconds for one process")
    parser.add_argument("--out", help="a JSON file for the reports")
    parser.add_argument("--one", nargs=2, metavar=("CONTESTANT", "FAMILY"), help="one process: ours or nuts")
    options = parser.parse_args()
    if options.one:
        sys.path[:0] = [str(ROOT)]
        print(json.dumps((ours if options.one[0] == "ours" else nuts)(options.one[1])))
        return
    from tests.family_cases import CASES

    tasks = [(who, make.__name__) for make in CASES for who in ("ours", "nuts")]
    with ThreadPoolExecutor(options.processes) as pool:
        found = list(pool.map(lambda task: child(*task, options.limit), tasks))
    if options.out:
        Path(options.out).write_text(json.dumps(found, indent=1))
    print("\n".join(table(found)))


def child(contestant: str, family: str, limit: float) -> dict:
    """A process of its own, without programs compiled before."""
    command = [sys.executable, "-m", "benchmarks.families", "--one", contestant, family]
    settings = {"FEDPDMC_COMPILATION_CACHE": "off", "JAX_PLATFORMS": "cpu"}
    done = None
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=os.environ | settings, capture_output=True, text=True, timeout=limit, check=False
        )
        report = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        report = {"error": f"not complete after {limit:g} s"}
    except (IndexError, json.JSONDecodeError):
        report = {"error": "" if done is None else done.stderr[-2000:]}
    return {"family": family, "contestant": contestant} | report


def ours(family: str) -> dict:
    """Three sites with all defaults."""
    from tests.family_cases import case

    import fedpdmc as fp

    sites, _ = case(family)
    wall = time.perf_counter()
    post = fp.sample(sites, fp.models.normal_prior(sites[0].dim, scale=2.0), ess=WANTED, seed=1, progress=False)
    waited = time.perf_counter() - wall
    clocks = [str(row["clock"]) for row in post.settings["clocks"]]
    return {
        "wall": waited, "rounds": int(post.rounds), "ess": min(post.ess().values()), "certified": bool(post.certified),
        "clocks": clocks, "moments": moments(post.draws(500)), "events": float(np.mean(post.events)),
    }  # fmt: skip


def nuts(family: str) -> dict:
    """NumPyro's NUTS on the pooled records, in 64 bits."""
    import jax
    import jax.numpy as jnp
    import numpyro
    from numpyro.infer import MCMC, NUTS
    from tests.family_cases import case

    numpyro.enable_x64()
    sites, log_likelihood = case(family)
    dim = sites[0].dim
    kernel = NUTS(potential_fn=lambda x: jnp.sum(x**2) / 8 - log_likelihood(x))
    run = MCMC(
        kernel, num_warmup=WARM_UP, num_samples=DRAWS, num_chains=CHAINS, chain_method="vectorized", progress_bar=False
    )
    wall = time.perf_counter()
    run.run(jax.random.key(1), init_params=0.1 * jax.random.normal(jax.random.key(2), (CHAINS, dim)))
    draws = np.asarray(run.get_samples(group_by_chain=True))
    return {"wall": time.perf_counter() - wall, "ess": float(np.min(_ess(draws))), "moments": moments(draws)}


def _ess(draws: np.ndarray) -> np.ndarray:
    from numpyro.diagnostics import effective_sample_size

    return np.asarray([effective_sample_size(draws[..., i]) for i in range(draws.shape[-1])])


def moments(draws: np.ndarray) -> list[list[float]]:
    """For each coordinate mean, standard deviation, and the standard errors of both."""
    ess = np.minimum(_ess(draws), draws.shape[0] * draws.shape[1])
    flat = draws.reshape(-1, draws.shape[-1])
    mean, sd = flat.mean(0), flat.std(0)
    square = np.sqrt(np.maximum(((flat - mean) ** 4).mean(0) - sd**4, 0)) / (2 * sd)
    return np.stack([mean, sd, sd / np.sqrt(ess), square / np.sqrt(ess)], -1).tolist()


def table(found: list[dict]) -> list[str]:
    """One line for each family."""
    by = {(one["family"], one["contestant"]): one for one in found}
    lines = ["family                   rounds  certified   wall   NUTS  ratio    z  clocks"]
    for name in dict.fromkeys(one["family"] for one in found):
        us, them = by[name, "ours"], by[name, "nuts"]
        if "error" in us or "error" in them:
            lines.append(f"{name:24} {us.get('error', '')[-300:]} {them.get('error', '')[-300:]}")
            continue
        a, b = np.array(us["moments"]), np.array(them["moments"])
        z = np.max(np.abs(a[:, :2] - b[:, :2]) / np.sqrt(a[:, 2:] ** 2 + b[:, 2:] ** 2))
        lines.append(
            f"{name:24} {us['rounds']:6} {us['certified']!s:>10} {us['wall']:6.1f} {them['wall']:6.1f} "
            f"{us['wall'] / them['wall']:6.2f} {z:4.1f}  {', '.join(dict.fromkeys(us['clocks']))}"
        )
    return lines


if __name__ == "__main__":
    main()
