"""Zig-Zag of fedpdmc on a benchmark problem, by its public interface alone: prints one JSON object.

Runs in a process of its own, pinned to one core, and is measured as the rival is: every repeat has a seed and starts of
its own, an event is one accepted flip, and the draws that are judged cover exactly the process time that was timed.

Two clocks are reported. `extend` stops when ``extend`` returns, with the knots of the path in the order in which the
compiled chunks made them. `skeleton` also puts them together chain after chain and writes the velocities out in full,
which the package leaves until someone asks; the rival's clock stops when its skeleton is in that form. What ``sample`` does
first (compilation, a Laplace reference, a short block) is `compile_seconds`. Making draws is not timed on either side.
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

# The loops of the Gaussian, and of one chain, are so small that starting kernels is much of the work: this makes each loop
# one kernel. (The rival's flag does the same for it.)
ONE_KERNEL = "--xla_backend_extra_options=xla_cpu_small_while_loop_byte_threshold=1000000000"
METHODS = {"plain": {"prior_at": "sites"}, "whitened": {"reference": "laplace", "control": "quadratic"}}
# In whitened coordinates the standard deviations are about one.
WHITENED_SPACING = 0.5
FIRST_SHARE = 0.02


def xla_flags(problem: str, chains: int) -> str:
    """The flag for small loops where they are small; being pinned already makes XLA use one thread."""
    return ONE_KERNEL if chains == 1 or problem == "paper_gaussian" else ""


def split(problem: problems.Problem, count: int) -> list:
    """Spread the records evenly over ``count`` sites."""
    import fedpdmc as fp

    model = fp.models.gaussian_mean if problem.name == "paper_gaussian" else fp.models.logistic
    names = ("y",) if problem.name == "paper_gaussian" else ("X", "y")
    parts = zip(*(np.array_split(problem.arrays[name], count) for name in names), strict=True)
    return [fp.Site(model(*part), name=f"site {number}") for number, part in enumerate(parts)]


def begin(problem: problems.Problem, options: argparse.Namespace, seed: int):
    """Compile and run a short first block; return the posterior and the seconds that took."""
    import fedpdmc as fp

    prior = None if problem.name == "paper_gaussian" else fp.models.normal_prior(problem.size[1])
    clock = time.perf_counter()
    first = fp.sample(
        split(problem, options.sites),
        prior=prior,
        dynamics=fp.ZigZag(),
        reference="identity",
        chains=options.chains,
        init=problem.starts(options.chains, seed),
        duration=first_steps(options) * spacing(problem, options),
        burn_in=0,
        seed=seed,
        progress=False,
        **METHODS[options.method],
    )
    return first, time.perf_counter() - clock


def first_steps(options: argparse.Namespace) -> int:
    """Draws of the first block, which is not judged."""
    return max(int(FIRST_SHARE * options.steps), 1)


def spacing(problem: problems.Problem, options: argparse.Namespace) -> float:
    """Process time between draws: half the smallest standard deviation, in the coordinates of the process."""
    return WHITENED_SPACING if options.method == "whitened" else problem.spacing


def measure_once(first, problem: problems.Problem, options: argparse.Namespace) -> tuple[dict, np.ndarray]:
    """Time one extension and judge the draws of it."""
    duration = options.steps * spacing(problem, options)
    clocks = [(time.perf_counter(), time.process_time())]
    post = first.extend(duration=duration, progress=False)
    clocks.append((time.perf_counter(), time.process_time()))
    _ = post.skeleton.v
    clocks.append((time.perf_counter(), time.process_time()))
    draws = post.draws(first_steps(options) + options.steps)[:, first_steps(options) :]
    sizes, events = effective_sizes(draws), int((post.events - first.events).sum())
    extend, skeleton = (
        tuple(after - before for after, before in zip(clocks[k], clocks[0], strict=True)) for k in (1, 2)
    )
    result = rates(*extend, events, sizes["worst"]) | {"skeleton": rates(*skeleton, events, sizes["worst"])}
    return result | {
        "draws": draws.shape[0] * draws.shape[1],
        "ess_coordinate": sizes["coordinate"],
        "ess_energy": sizes["energy"],
        "ess_worst": sizes["worst"],
        "process_time": duration,
        "rounds": post.rounds - first.rounds,
        "gradient_evaluations": int((post.gradient_evaluations - first.gradient_evaluations).sum()),
    }, draws


def benchmark(problem: problems.Problem, options: argparse.Namespace) -> dict:
    """Compile once, run `options.repeats` times with different seeds, and report the fastest."""
    runs, pooled, starts = [], [], []
    for repeat in range(options.repeats):
        first, seconds = begin(problem, options, options.seed + repeat)
        starts.append(seconds)
        result, draws = measure_once(first, problem, options)
        runs.append(result)
        pooled.append(draws.reshape(-1, draws.shape[-1]))
    fastest = min(runs, key=lambda result: result["run_seconds"])
    report = fastest | {"compile_seconds": starts[0], "later_starts_seconds": starts[1:], "runs": runs}
    if options.check:
        ess = sum(result["ess_coordinate"] for result in runs)
        report |= problems.check_moments(problem, np.concatenate(pooled), ess)
    return report | {"settings": METHODS[options.method], "certified": first.certified}


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Benchmark the Zig-Zag of fedpdmc; prints one JSON object.")
    parser.add_argument("--problem", choices=sorted(problems.PROBLEMS), default="paper_gaussian")
    parser.add_argument("--chains", type=int, default=64)
    parser.add_argument("--sites", type=int, default=1)
    parser.add_argument("--steps", type=int, default=1000, help="draws of each chain in a timed run")
    parser.add_argument("--method", choices=sorted(METHODS), default="plain")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--core", type=int, help="core to run on; the last allowed one if not given")
    parser.add_argument("--check", action="store_true", help="compare moments with the truth")
    return parser.parse_args()


def main() -> None:
    """Run the benchmark and print its report."""
    options = parse()
    flags = xla_flags(options.problem, options.chains)
    core = pin_to_one_core(options.core, flags)
    problem = problems.PROBLEMS[options.problem]()
    report = {
        "contestant": "fedpdmc",
        "problem": problem.name,
        "records": problem.size[0],
        "dim": problem.size[1],
        "chains": options.chains,
        "sites": options.sites,
        "method": options.method,
        "seed": options.seed,
        "core": core,
        "xla_flags": flags,
        "versions": {name: version(name) for name in ("fedpdmc", "jax", "jaxlib", "arviz", "numpy")},
    }
    print(json.dumps(report | benchmark(problem, options)))


if __name__ == "__main__":
    main()
