"""Natural models compared with NUTS: ``python -m benchmarks.natural_models``.

Each model runs in two processes of its own, one for this package with its defaults and one for NumPyro's NUTS (four
vectorised chains, a dense metric after 500 steps of warm-up). Nothing compiled before is used. *First* is the processor time
of the process, imports and compilation included, until 1,000 effective samples of the worst coordinate and of the energy;
*steady* the effective samples per second of processor time of what follows. Means and standard deviations of all variables
are compared (``z``: the largest difference in standard errors of both). A refusal is reported with its reason.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import numpy as np

from benchmarks import child as child_process

ROOT = Path(__file__).resolve().parents[1]
WANTED, WARM_UP, CHAINS, DRAWS = 1000, 500, 4, 1000
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def main() -> None:
    """Run all models, or one contestant of one model, and print the reports."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", help="names; all by default")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--limit", type=float, default=900.0, help="seconds for one process")
    parser.add_argument("--out", help="a JSON file for the reports")
    parser.add_argument("--one", nargs=2, metavar=("CONTESTANT", "MODEL"), help="one process: ours or nuts")
    options = parser.parse_args()
    if options.one:
        sys.path[:0] = [str(ROOT)]
        print(json.dumps(alone(*options.one)))
        return
    found = []
    chosen = options.models or names()
    with ThreadPoolExecutor(options.processes) as pool:
        # The package's runs are the longest: they begin first.
        waiting = [pool.submit(child, who, name, options.limit) for who in ("ours", "nuts") for name in chosen]
        for done in as_completed(waiting):
            found.append(done.result())
            print({key: value for key, value in found[-1].items() if key != "moments"}, flush=True)
            if options.out:
                Path(options.out).write_text(json.dumps(found, indent=1))
    print(table(found))


def names() -> list[str]:
    """Of all models."""
    from benchmarks.natural_cases import CASES

    return list(CASES)


def child(contestant: str, model: str, limit: float) -> dict:
    """A process of its own, on one thread, without programs compiled before."""
    settings = {name: "1" for name in THREADS} | {"FEDPDMC_COMPILATION_CACHE": "off"}
    settings["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    report = child_process.report("natural_models", ["--one", contestant, model], limit, settings)
    return {"model": model, "contestant": contestant} | report


def alone(contestant: str, model: str) -> dict:
    """Measure one contestant on one model."""
    from benchmarks.natural_cases import CASES

    case = CASES[model]
    records = case.records(np.random.default_rng(1))
    return (ours if contestant == "ours" else nuts)(case.model, records)


def ours(model, records: dict) -> dict:
    """The package with its defaults: prior and likelihood as NumPyro splits them."""
    import fedpdmc as fp
    from fedpdmc.errors import FedPDMCError

    site = fp.Site(fp.models.from_numpyro(model, records), name="all")
    prior = fp.models.from_numpyro(model, records, part="prior")
    wall = time.perf_counter()
    try:
        post = fp.sample(site, prior, ess=WANTED, seed=1, progress=False)
    except FedPDMCError as error:
        return {"error": str(error), "first": time.process_time()}
    first, waited = time.process_time(), time.perf_counter() - wall
    reached = min(post.ess().values())
    longer = post.extend(ess=3 * reached, progress=False)
    steady = (min(longer.ess().values()) - reached) / (time.process_time() - first)
    return {
        "first": first, "wall": waited, "steady": steady, "certified": longer.certified, "rounds": post.rounds,
        "chosen": str(longer.settings.get("chosen")), "clocks": [str(row["clock"]) for row in longer.certificate],
        "moments": moments(longer.variables(500)), "rhat": max(longer.rhat().values()),
    }  # fmt: skip


def nuts(model, records: dict) -> dict:
    """NumPyro's NUTS in 64 bits."""
    import jax
    import numpyro
    from numpyro.infer import MCMC, NUTS

    numpyro.enable_x64()
    run = MCMC(
        NUTS(model, dense_mass=True), num_warmup=WARM_UP, num_samples=DRAWS, num_chains=CHAINS,
        chain_method="vectorized", progress_bar=False,
    )  # fmt: skip
    wall = time.perf_counter()
    run.run(jax.random.key(1), **records, extra_fields=("diverging",))
    draws = _variables(run)
    reached, first, more = worst(draws), 0.0, [draws]
    while reached < WANTED and len(more) < 10:
        run.post_warmup_state = run.last_state
        run.run(run.last_state.rng_key, **records)
        more.append(_variables(run))
        reached = worst({name: np.concatenate([part[name] for part in more], 1) for name in draws})
    first, waited = time.process_time(), time.perf_counter() - wall
    run.post_warmup_state = run.last_state
    run.run(run.last_state.rng_key, **records)
    last, spent = _variables(run), time.process_time() - first
    more.append(last)
    draws = {name: np.concatenate([part[name] for part in more], 1) for name in draws}
    return {
        "first": first, "wall": waited, "steady": worst(last) / spent, "moments": moments(draws),
        "divergences": int(np.sum(run.get_extra_fields().get("diverging", 0))),
    }  # fmt: skip


def _variables(run) -> dict:
    """Without deterministic ones."""
    return {
        name: np.asarray(x) for name, x in run.get_samples(group_by_chain=True).items() if not name.endswith("_base")
    }


def worst(draws: dict) -> float:
    """Bulk ESS of the worst variable and of the energy, as the package counts it."""
    from fedpdmc.results.diagnostics import effective_sizes, energy

    flat = varying(draws)
    mean, cov = flat.mean((0, 1)), np.atleast_2d(np.cov(flat.reshape(-1, flat.shape[-1]), rowvar=False))
    return float(np.min(effective_sizes(np.concatenate([flat, energy(flat, mean, cov)[..., None]], -1))))


def varying(draws: dict) -> np.ndarray:
    """All numbers that are not constant, of shape (chains, draws, numbers), by the names of the variables."""
    flat = np.concatenate([draws[name].reshape(*draws[name].shape[:2], -1) for name in sorted(draws)], -1)
    return flat[..., flat.std((0, 1)) > 1e-12]


def moments(draws: dict) -> dict:
    """Mean and standard deviation of every number, each with its standard error."""
    from fedpdmc.results.diagnostics import effective_sizes

    flat = varying(draws)
    sizes = np.maximum(effective_sizes(flat), 1.0)
    mean, sd = flat.mean((0, 1)), flat.std((0, 1))
    fourth = np.mean(((flat - mean) / sd) ** 4, (0, 1))
    found = {
        "mean": mean, "sd": sd, "error": sd / np.sqrt(sizes),
        "sd error": sd * np.sqrt(np.maximum(fourth - 1, 0.1) / (4 * sizes)),
    }  # fmt: skip
    return {name: values.tolist() for name, values in found.items()}


def agreement(one: dict, other: dict) -> float:
    """The largest difference of a mean or a standard deviation, in standard errors."""
    here, there = ({name: np.asarray(x) for name, x in report["moments"].items()} for report in (one, other))
    return max(
        float(np.max(np.abs(here[what] - there[what]) / np.hypot(here[error], there[error])))
        for what, error in (("mean", "error"), ("sd", "sd error"))
    )


def table(reports: list[dict]) -> str:
    """In Markdown."""
    from benchmarks.natural_cases import CASES

    lines = [
        "| model | parameters | first answer: ours, NUTS (s) | steady: ours, NUTS (ESS/s) | agrees (z) | certified |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    by_model: dict[str, dict] = {}
    for report in reports:
        by_model.setdefault(report["model"], {})[report["contestant"]] = report
    for name in (name for name in CASES if name in by_model):
        mine, rival = (by_model[name].get(who, {"error": "not run"}) for who in ("ours", "nuts"))
        size = len(rival.get("moments", {}).get("mean", ()))
        theirs = f"{rival['first']:.0f}, {rival['steady']:.0f}" if "moments" in rival else rival["error"][-60:]
        if "moments" not in mine or "moments" not in rival:
            reason = mine.get("error", "").replace("\n", " ")
            lines.append(f"| {CASES[name].title} | {size} | NUTS {theirs} | | | {reason} |")
            continue
        lines.append(
            f"| {CASES[name].title} | {size} | {mine['first']:.0f}, {rival['first']:.0f} | {mine['steady']:.0f}, "
            f"{rival['steady']:.0f} | {agreement(mine, rival):.1f} | {'yes' if mine['certified'] else 'no'} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
