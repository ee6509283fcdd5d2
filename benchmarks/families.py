"""Families of the standard library, or the twelve models of the tests, at three unequal sites, compared with NUTS.

``python -m benchmarks.families``, with ``--of zoo`` for the latter and ``--of demo`` for the trial of ``fedpdmc demo``. Each
model runs in processes of its own: this package with its defaults, without programs compiled before (*cold*) and again with
those that this left in the persistent cache (*warm*); and NumPyro's NUTS on the pooled records (four vectorised chains, 500
steps of warm-up), cold. *Wall* is the time of the call that samples, compilation included, until 1,000 effective samples of
the worst coordinate; *opening* is the part of it until the chains move, all compilation included; *cpu* is the time of all
cores. ``z`` is the largest difference of means and standard deviations in standard errors of both.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue

import numpy as np
from benchmarks.tables import markdown
from rich.table import Table

from benchmarks import child as child_process

ROOT = Path(__file__).resolve().parents[1]
WANTED, WARM_UP, CHAINS, DRAWS = 1000, 500, 4, 1000


def main() -> None:
    """Run all families, or one contestant of one family, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--limit", type=float, default=900.0, help="seconds for one process")
    parser.add_argument("--out", help="a JSON file for the reports")
    parser.add_argument("--cores", type=int, help="processor cores of each process; all if not given")
    parser.add_argument("--of", choices=("families", "zoo", "demo"), default="families")
    parser.add_argument("--models", nargs="*", help="some of them only")
    parser.add_argument("--one", nargs=2, metavar=("CONTESTANT", "MODEL"), help="one process: ours or nuts")
    options = parser.parse_args()
    sys.path[:0] = [str(ROOT)]
    if options.one:
        print(json.dumps((ours if options.one[0] == "ours" else nuts)(options.of, options.one[1])))
        return
    found = compare(options.of, options.models, options.processes, options.limit, options.cores)
    if options.out:
        Path(options.out).write_text(json.dumps(found, indent=1))
    print(markdown(table(found)))


def compare(
    of: str, names: list[str] | None = None, processes: int = 1, limit: float = 900.0, cores: int | None = None
) -> list[dict]:
    """The reports of some models, or of all of a kind; each process on so many cores of its own."""
    sys.path[:0] = [str(ROOT)]
    free: Queue[list[int] | None] = Queue()
    for i in range(processes):
        free.put(None if cores is None else sorted(os.sched_getaffinity(0))[i * cores : (i + 1) * cores])

    def one(name: str) -> list[dict]:
        own = free.get()
        try:
            return contest(of, name, limit, own)
        finally:
            free.put(own)

    with ThreadPoolExecutor(processes) as pool:
        return [report for part in pool.map(one, names or model_names(of)) for report in part]


def model_names(of: str) -> list[str]:
    """All of a kind."""
    if of == "zoo":
        from tests.zoo import CASES as ZOO

        return list(ZOO)
    if of == "demo":
        return ["four_hospitals"]
    from tests.family_cases import CASES as FAMILIES

    return [make.__name__ for make in FAMILIES]


def contest(of: str, name: str, limit: float, cores: list[int] | None = None) -> list[dict]:
    """Cold, warm, and NUTS, one after the other."""

    def run(who: str, contestant: str, cache: str) -> dict:
        words = ["--of", of, "--one", contestant, name]
        report = child_process.report("families", words, limit, {"FEDPDMC_COMPILATION_CACHE": cache}, cores)
        return {"family": name, "contestant": who} | report

    with tempfile.TemporaryDirectory() as folder:
        return [run("ours", "ours", folder), run("warm", "ours", folder), run("nuts", "nuts", "off")]


def problem(of: str, name: str):
    """Sites, prior, and minus the log posterior of the pooled records."""
    import jax.numpy as jnp

    import fedpdmc as fp

    if of == "families":
        from tests.family_cases import case

        sites, log_likelihood = case(name)
        return sites, fp.models.normal_prior(sites[0].dim, scale=2.0), lambda x: jnp.sum(x**2) / 8 - log_likelihood(x)
    if of == "demo":
        return demo()
    from tests.zoo import CASES

    case = CASES[name]
    sites = [fp.Site(case.likelihood, data=data, name=f"site {i}") for i, data in enumerate(case.sites())]
    if case.precision is None:
        return sites, case.prior, case.potential
    return sites, fp.models.normal_prior(case.dim, mean=case.mean, precision=case.precision), case.potential


def demo():
    """The trial of ``fedpdmc demo``."""
    import jax.numpy as jnp
    from jax.nn import softplus

    import fedpdmc as fp
    from fedpdmc.datasets import indomethacin

    hospitals = indomethacin().hospitals
    X, y = (np.concatenate([getattr(h, part) for h in hospitals]) for part in ("X", "y"))
    sites = [fp.Site(fp.models.logistic(h.X, h.y), name=h.name) for h in hospitals]

    def potential(x):
        z = jnp.asarray(X) @ x
        return jnp.sum(x**2) / (2 * 2.5**2) + jnp.sum(softplus(z) - y * z)

    return sites, fp.models.normal_prior(X.shape[1], scale=2.5), potential


def dimension(of: str, name: str, sites) -> int:
    """Number of parameters."""
    if of != "zoo":
        return sites[0].dim
    from tests.zoo import CASES

    return CASES[name].dim


def middle(name: str) -> np.ndarray:
    """A point of a posterior's bulk, where NUTS begins."""
    from tests.zoo import CASES

    return CASES[name].start


def ours(of: str, name: str) -> dict:
    """Three sites with all defaults."""
    import fedpdmc as fp
    from fedpdmc.sampling.engines.compiled_loop import CompiledEngine

    sites, prior, _ = problem(of, name)
    # A prior that is a function does not say how many parameters there are.
    names = None if of != "zoo" else [f"x{i}" for i in range(dimension(of, name, sites))]
    opened: list[float] = []
    pace = CompiledEngine._pace

    def timed(self, *args):
        # Called after each chunk of rounds: the first has waited for the compiler.
        opened.append(time.perf_counter())
        return pace(self, *args)

    CompiledEngine._pace = timed  # type: ignore[method-assign]
    wall, cpu = time.perf_counter(), time.process_time()
    post = fp.sample(sites, prior, ess=None if of == "demo" else WANTED, names=names, seed=1, progress=False)
    waited = time.perf_counter() - wall
    clocks = [str(row["clock"]) for row in post.settings["clocks"]]
    return {
        "wall": waited, "processor": time.process_time() - cpu, "opening": opened[0] - wall if opened else 0.0,
        "rounds": int(post.rounds), "ess": min(post.ess().values()), "certified": bool(post.certified), "clocks": clocks,
        "chosen": post.settings.get("chosen", ""), "chains": len(post.events), "duration": float(post.duration),
        "moments": moments(post.draws(500)), "events": float(np.mean(post.events)),
    }  # fmt: skip


def nuts(of: str, name: str) -> dict:
    """NumPyro's NUTS on the pooled records, in 64 bits."""
    import jax
    import numpyro
    from numpyro.infer import MCMC, NUTS

    numpyro.enable_x64()
    sites, _, potential = problem(of, name)
    dim = dimension(of, name, sites)
    kernel = NUTS(potential_fn=potential)
    run = MCMC(
        kernel, num_warmup=WARM_UP, num_samples=DRAWS, num_chains=CHAINS, chain_method="vectorized", progress_bar=False
    )
    wall, cpu = time.perf_counter(), time.process_time()
    first = np.zeros(dim) if of != "zoo" else middle(name)
    run.run(jax.random.key(1), init_params=first + 0.1 * jax.random.normal(jax.random.key(2), (CHAINS, dim)))
    draws = np.asarray(run.get_samples(group_by_chain=True))
    waited = time.perf_counter() - wall
    return {
        "wall": waited,
        "processor": time.process_time() - cpu,
        "ess": float(np.min(_ess(draws))),
        "moments": moments(draws),
    }


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


def table(found: list[dict]) -> Table:
    """One line for each model; times in seconds."""
    by = {(one["family"], one["contestant"]): one for one in found}
    shown = Table(title="Defaults at three unequal sites, cold and warm, against NUTS on the pooled records")
    names = (
        "model",
        "rounds",
        "certified",
        "cold wall",
        "cpu",
        "opening",
        "warm wall",
        "cpu",
        "opening",
        "NUTS wall",
        "cpu",
    )
    for name in names:
        shown.add_column(name)
    for name in ("cold/NUTS", "cpu/cpu", "z", "clocks"):
        shown.add_column(name)
    for name in dict.fromkeys(one["family"] for one in found):
        us, again, them = (by[name, who] for who in ("ours", "warm", "nuts"))
        if any("error" in one for one in (us, again, them)):
            shown.add_row(name, *(one.get("error", "").strip().replace("\n", " ")[-100:] for one in (us, again, them)))
            continue
        a, b = np.array(us["moments"]), np.array(them["moments"])
        z = np.max(np.abs(a[:, :2] - b[:, :2]) / np.sqrt(a[:, 2:] ** 2 + b[:, 2:] ** 2))
        times = ("wall", "processor", "opening")
        spent = [f"{one[what]:.1f}" for one in (us, again, them) for what in times if what in one]
        ratios = [f"{us[what] / them[what]:.2f}" for what in ("wall", "processor")]
        clocks = ", ".join(dict.fromkeys(us["clocks"]))
        shown.add_row(name, str(us["rounds"]), str(us["certified"]), *spent, *ratios, f"{z:.1f}", clocks)
    return shown


if __name__ == "__main__":
    main()
