"""Simulation-based calibration of default calls: ``python -m benchmarks.simulated_calibration --help``.

Parameters are drawn from the prior, data from the model, and the rank of each parameter among draws of the posterior must be
uniform (Talts and others, 2018). Printed for each parameter: the p-value of a χ² test on twenty bins, the largest distance
of the ranks' distribution function from the uniform one in units of its simultaneous 95 % limit (Kolmogorov), and how many
runs said "converged". Two thirds of the data sets of the logistic model have fewer than 15 events.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from benchmarks.calibration_cases import _own_weibull
from scipy.stats import chisquare

import fedpdmc as fp
from benchmarks import child

DRAWS = 99  # of each posterior, among which the truth is ranked
BINS = 20
KOLMOGOROV = 1.358  # the 95 % limit of √n times the largest distance
SITES = 2
LIMIT = 36_000.0  # seconds for a process
ONE_CORE = {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1", "OMP_NUM_THREADS": "1"}


def logistic(rng: np.random.Generator):
    """Sixty records, an intercept that makes events rare, an exposure and a covariate."""
    theta = rng.normal(size=3) * [1.0, 2.0, 1.0] - [1.5, 0.0, 0.0]
    X = np.c_[np.ones(60), np.arange(60) % 3 == 0, rng.normal(size=60)].astype(float)
    y = (rng.random(60) < 1 / (1 + np.exp(-X @ theta))).astype(float)
    sites = [fp.Site(fp.models.logistic(X[k::SITES], y[k::SITES]), name=f"site{k}") for k in range(SITES)]
    return theta, sites, fp.models.normal_prior(3, mean=[-1.5, 0.0, 0.0], scale=[1.0, 2.0, 1.0])


def weibull(rng: np.random.Generator):
    """Forty times, about half of them censored; a user's own function."""
    theta = rng.normal(size=3) * [1.0, 1.0, 0.5]
    X = np.c_[np.ones(40), np.arange(40) % 2].astype(float)
    time = np.exp(X @ theta[:2] + np.exp(theta[2]) * np.log(rng.exponential(size=40)))
    limit = np.exp(theta[0]) * rng.exponential(1.5, 40)
    records = X, np.minimum(time, limit), (time <= limit).astype(float)
    sites = [fp.Site(_own_weibull, name=f"site{k}", data=tuple(a[k::SITES] for a in records)) for k in range(SITES)]
    return theta, sites, fp.models.normal_prior(3, scale=[1.0, 1.0, 0.5])


def hierarchical(rng: np.random.Generator):
    """Eight groups of ten with an intercept each; private effects of two sites."""
    theta = np.r_[rng.normal(size=2), np.log(abs(rng.normal()))]
    group = np.repeat(np.arange(8), 10)
    X = np.c_[np.ones(80), np.arange(80) % 2].astype(float)
    eta = X @ theta[:2] + np.exp(theta[2]) * rng.normal(size=8)[group]
    y = (rng.random(80) < 1 / (1 + np.exp(-eta))).astype(float)
    sites = [
        fp.Site(fp.models.random_effects(X[here], y[here], group[here]), name=f"site{k}")
        for k in range(SITES)
        for here in [group % SITES == k]
    ]
    return theta, sites, fp.models.effects_prior(sites[0].potential, scale=1.0, spread="half-normal")


MODELS: dict[str, Callable] = {"logistic": logistic, "weibull": weibull, "hierarchical": hierarchical}


def ranks(model: str, sets: Sequence[int], seconds: float) -> tuple[np.ndarray, int]:
    """Ranks (sets, d) of the true parameters, and how many runs said "converged"; no set is begun after ``seconds``."""
    found, converged, began = [], 0, time.monotonic()
    for number in sets:
        if time.monotonic() - began > seconds:
            break
        rng = np.random.default_rng([number, len(model)])
        theta, sites, prior = MODELS[model](rng)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            post = fp.sample(sites, prior, seed=number, progress=False)
        draws = post.draws(post.diagnostic_draws()).reshape(-1, len(theta))
        chosen = draws[rng.choice(len(draws), DRAWS, replace=False)]
        found.append(np.sum(chosen < theta, 0))
        converged += bool(post.verdict)
    return np.array(found), converged


def judge(found: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each parameter the p-value of χ², and the largest distance relative to its limit."""
    size, columns = len(found), found.T
    counts = [np.histogram(column, BINS, (0, DRAWS + 1))[0] for column in columns]
    steps = (np.arange(DRAWS + 1) + 1) / (DRAWS + 1)
    distance = [np.abs(np.mean(column[:, None] <= np.arange(DRAWS + 1), 0) - steps).max() for column in columns]
    return np.array([chisquare(c).pvalue for c in counts]), np.array(distance) * np.sqrt(size) / KOLMOGOROV


def main() -> None:
    """Run the chosen models and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--sets", type=int, default=500)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--step", type=int, default=1, help="every so many data sets from the first")
    parser.add_argument("--processes", type=int, default=1, help="which share the data sets of every model")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no further data set after so long")
    parser.add_argument("--json", action="store_true", help="the ranks, in place of the table")
    options = parser.parse_args()
    end = options.first + options.sets
    if options.json:
        sets = list(range(options.first, end, options.step))
        found = {model: ranks(model, sets, options.seconds / len(options.models)) for model in options.models}
        print(json.dumps({model: [each[0].tolist(), each[1]] for model, each in found.items()}))
        return
    words = ["--json", "--step", str(options.processes), "--seconds", str(options.seconds), "--models", *options.models]
    with tempfile.TemporaryDirectory() as compiled, ThreadPoolExecutor(options.processes) as pool:
        settings = {"JAX_COMPILATION_CACHE_DIR": compiled} | (ONE_CORE if options.processes > 1 else {})

        def run(k: int) -> dict:
            first = options.first + k
            return child.report(
                "simulated_calibration", [*words, "--first", str(first), "--sets", str(end - first)], LIMIT, settings
            )

        reports = list(pool.map(run, range(options.processes)))
    print("| model | data sets | converged | p of χ² | ECDF over its limit |\n|---|---|---|---|---|")
    for model in options.models:
        parts = [report[model] for report in reports if model in report]
        p, distance = judge(found := np.array([row for rows, _ in parts for row in rows]))
        words = [" ".join(f"{x:.2f}" for x in part) for part in (p, distance)]
        print(f"| {model} | {len(found)} | {sum(n for _, n in parts)} | {words[0]} | {words[1]} |", flush=True)
    for report in reports:
        if "error" in report:
            print(report["error"].strip()[-500:])


if __name__ == "__main__":
    main()
