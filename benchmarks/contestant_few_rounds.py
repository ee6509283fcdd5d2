"""The few-rounds default of fedpdmc on the paper's logistic regression, by its public interface: prints one JSON object.

Runs in a process of its own, pinned to one core. ``--measure rounds`` counts every exchange with the sites of one run, the
making of the reference and the burn-in included. ``--measure speed`` times extensions of a run that has been compiled: up
to the return of ``extend``, and up to the draws that are judged. ``--method zigzag`` is the paper's Algorithm 2.
"""

from __future__ import annotations

import argparse
import json
import time
from importlib.metadata import version

import numpy as np

import problems
from effective import effective_sizes
from pinning import pin_to_one_core

# Process time between the draws that are judged, in whitened coordinates, where there are no turns.
SPACING = 0.5
FIRST_BLOCK = 5.0


def federation(problem: problems.Problem, count: int) -> tuple[list, object]:
    """The records spread evenly over ``count`` sites, and the prior."""
    import fedpdmc as fp

    parts = zip(*(np.array_split(problem.arrays[name], count) for name in ("X", "y")), strict=True)
    sites = [fp.Site(fp.models.logistic(*part), name=f"site {number}") for number, part in enumerate(parts)]
    return sites, fp.models.normal_prior(problem.size[1])


def method(problem: problems.Problem, options: argparse.Namespace) -> dict:
    """Nothing for the default; for Algorithm 2 the prior with the sites, which saves it rounds, and a stationary start."""
    if options.method == "default":
        return {}
    import fedpdmc as fp

    start = problem.starts(options.chains, options.seed)
    return {"dynamics": fp.ZigZag(), "reference": "identity", "prior_at": "sites", "init": start, "burn_in": 0.0}


def count_rounds(problem: problems.Problem, options: argparse.Namespace) -> dict:
    """One run from nothing: its rounds, its effective samples, and how its plans ended."""
    import fedpdmc as fp

    sites, prior = federation(problem, options.sites)
    length = {"ess": options.ess} if options.ess else {"duration": options.duration}
    chains = options.chains or None
    clock, cpu = time.perf_counter(), time.process_time()
    post = fp.sample(
        sites, prior, chains=chains, seed=options.seed, progress=False, **length, **method(problem, options)
    )
    seconds, cpu = time.perf_counter() - clock, time.process_time() - cpu
    spacing = SPACING if options.method == "default" else problem.spacing
    sizes = effective_sizes(post.draws(post.store.turns or int(np.ceil(post.duration / spacing))))
    report = {
        "chains": post.chains,
        "process_time": post.duration,
        "rounds": post.rounds,
        "reference_rounds": post.reference.rounds,
        "bytes": int(np.sum(post.bytes)),
        "ess_coordinate": sizes["coordinate"],
        "ess_energy": sizes["energy"],
        "ess_worst": sizes["worst"],
        "rounds_per_ess": post.rounds / sizes["worst"],
        "events_per_time": float(post.events.mean() / post.duration),
        "passes_per_time": float(post.gradient_evaluations.sum() / options.sites / post.chains / post.duration),
        "seconds_with_compilation": seconds,
        "cpu_seconds_with_compilation": cpu,
    }
    if post.chains == 1:
        # One chain sends one plan in a round, so that its rounds are its plans. Those of the burn-in are among them.
        plans = post.rounds - post.reference.rounds
        report["ended_by_arrival"] = min(float(post.events.sum()) / plans, 1.0)
    return report | {"settings": _plain(post.settings)}


def time_runs(problem: problems.Problem, options: argparse.Namespace) -> dict:
    """Compile, then time extensions with different seeds, each by wall clock and by processor time."""
    import fedpdmc as fp

    sites, prior = federation(problem, options.sites)
    runs, starts = [], []
    for repeat in range(options.repeats):
        clock = time.perf_counter()
        first = fp.sample(
            sites, prior, chains=options.chains, duration=FIRST_BLOCK, seed=options.seed + repeat, progress=False
        )
        if repeat == 0:
            # Also compiles what makes the draws, in the shapes of the timed runs.
            _time_once(first, options.duration)
        starts.append(time.perf_counter() - clock)
        runs.append(_time_once(first, options.duration))
    return {
        "chains": options.chains,
        "process_time": options.duration,
        "compile_seconds": starts[0],
        "later_starts_seconds": starts[1:],
        "runs": runs,
    }


def _time_once(first, duration: float) -> dict:
    clocks = [(time.perf_counter(), time.process_time())]
    post = first.extend(duration=duration, progress=False)
    clocks.append((time.perf_counter(), time.process_time()))
    # Draws at turns, where there are turns; those of the first block are not counted.
    count = post.store.turns or int(round(post.duration / SPACING))
    draws = post.draws(count)[:, int(np.ceil(count * first.duration / post.duration)) :]
    clocks.append((time.perf_counter(), time.process_time()))
    sizes = effective_sizes(draws)
    made, judged = (tuple(b - a for a, b in zip(clocks[0], clocks[k], strict=True)) for k in (1, 2))
    return {
        "ess_coordinate": sizes["coordinate"],
        "ess_energy": sizes["energy"],
        "ess_worst": sizes["worst"],
        "run_seconds": judged[0],
        "cpu_seconds": judged[1],
        "extend_seconds": made[0],
        "extend_cpu_seconds": made[1],
        "ess_per_second": sizes["worst"] / judged[0],
        "ess_per_cpu_second": sizes["worst"] / judged[1],
        "rounds": post.rounds - first.rounds,
        "passes_per_time": float(
            (post.gradient_evaluations - first.gradient_evaluations).mean() / post.chains / duration
        ),
    }


def _plain(settings: dict) -> dict:
    return {name: value for name, value in settings.items() if isinstance(value, (str, int, float))}


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Benchmark the few-rounds default of fedpdmc.")
    parser.add_argument("--measure", choices=("rounds", "speed"), default="rounds")
    parser.add_argument("--method", choices=("default", "zigzag"), default="default")
    parser.add_argument("--records", type=int, default=1000)
    parser.add_argument("--dim", type=int, default=6)
    parser.add_argument("--sites", type=int, default=10)
    parser.add_argument("--chains", type=int, default=0, help="0: as many as the package chooses")
    parser.add_argument("--ess", type=float, default=0.0, help="run until this many effective samples")
    parser.add_argument("--duration", type=float, default=100.0, help="or for this process time")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--core", type=int, help="core to run on; the last allowed one if not given")
    return parser.parse_args()


def main() -> None:
    """Run the benchmark and print its report."""
    options = parse()
    core = pin_to_one_core(options.core, "")
    problem = problems.paper_logistic(records=options.records, dim=options.dim)
    report = {
        "contestant": "fedpdmc",
        "measure": options.measure,
        "method": options.method,
        "records": options.records,
        "dim": options.dim,
        "sites": options.sites,
        "seed": options.seed,
        "core": core,
        "versions": {name: version(name) for name in ("fedpdmc", "jax", "jaxlib", "arviz", "numpy")},
    }
    measured = count_rounds(problem, options) if options.measure == "rounds" else time_runs(problem, options)
    print(json.dumps(report | measured))


if __name__ == "__main__":
    main()
