"""Default calls judged over seeds against the truth: ``make calibrate``, ``python -m benchmarks.calibration --help``.

Each case runs `fedpdmc.sample` with its defaults over many seeds. The truth is importance sampling from a Student-t
distribution adapted to the posterior. Printed for the worst coordinate of each case: the mean's error and that of the 2.5 %,
50 % and 97.5 % quantiles, averaged over seeds, in posterior standard deviations, and the error of the standard deviation;
over all coordinates the actual standard deviation of the mean over the reported Monte Carlo error, and how often the mean's
interval of 95 % Monte Carlo probability holds the truth.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from benchmarks.calibration_cases import CASES, Case, pooled

import fedpdmc as fp
from benchmarks import child
from fedpdmc.sampling.vb_reference import Tails

QUANTILES = (0.025, 0.5, 0.975)
SAMPLES = 400_000  # of the last round of importance sampling; a tenth in each round before
ADAPTED = 8  # rounds of adaptation
DEGREES = 4  # of freedom of the proposal
CHUNK = 20_000  # points at a time
NARROW = {
    "burn_in": np.pi,
    "dynamics": fp.Boomerang(),
    "chains": 256,
}  # what defaults were before references were widened


class Truth(NamedTuple):
    """Moments and quantiles of every coordinate, and the effective number of points behind them."""

    mean: np.ndarray
    sd: np.ndarray
    quantiles: np.ndarray
    size: float


def truth(case: Case, dim: int) -> Truth:
    """By importance sampling; the proposal is adapted to the weighted moments, wider than these."""
    with jax.enable_x64(True):
        energy = jax.jit(jax.vmap(pooled(case)))
        rng = np.random.default_rng(77)
        mean, root = begin(pooled(case), dim)
        for step in range(ADAPTED + 1):
            count = SAMPLES if step == ADAPTED else SAMPLES // 10
            z = rng.standard_normal((count, dim)) / np.sqrt(rng.chisquare(DEGREES, (count, 1)) / DEGREES)
            x = mean + z @ root.T
            u = np.concatenate(
                [np.asarray(energy(jnp.asarray(part))) for part in np.array_split(x, -(-count // CHUNK))]
            )
            log_q = -(DEGREES + dim) / 2 * np.log1p(np.sum(z * z, 1) / DEGREES)
            log_w = np.where(np.isnan(u), -np.inf, -u) - log_q
            if case.inside is not None:
                log_w = np.where(case.inside(x), log_w, -np.inf)
            w = np.exp(log_w - log_w.max())
            w = w / w.sum()
            mean = w @ x
            cov = (x - mean).T @ ((x - mean) * w[:, None])
            root = np.linalg.cholesky(cov + 1e-12 * np.eye(dim)) * 1.25
    quantiles = np.empty((len(QUANTILES), dim))
    for k in range(dim):
        order = np.argsort(x[:, k])
        below = np.cumsum(w[order])
        quantiles[:, k] = x[order[np.searchsorted(below, QUANTILES)], k]
    return Truth(mean, np.sqrt(np.diag(cov)), quantiles, float(1 / np.sum(w**2)))


def begin(energy, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """The mode, and a root of the inverse curvature there, made wider."""
    from scipy.optimize import minimize

    found = minimize(jax.jit(jax.value_and_grad(energy)), np.zeros(dim), jac=True, method="BFGS")
    curvature = np.asarray(jax.hessian(energy)(jnp.asarray(found.x)))
    values, vectors = np.linalg.eigh(curvature)
    return found.x, 1.5 * vectors / np.sqrt(np.maximum(np.abs(values), 1e-4))


def one(name: str, seeds: range, options: dict) -> dict:
    """All seeds of a case."""
    case = CASES[name]()
    found, began = [], time.perf_counter()
    for seed in seeds:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if case.run is not None:
                post = case.run(seed)
            else:
                post = fp.sample(case.sites, case.prior, seed=seed, progress=False, **case.options, **options)
        draws = post.draws(400).reshape(-1, len(post.names))
        found.append(
            {
                "mean": post.mean().tolist(), "sd": np.sqrt(np.diag(post.cov())).tolist(),
                "quantiles": np.quantile(draws, QUANTILES, 0).tolist(),
                "mcse": list(post.mcse().values()),
                "rounds": post.rounds, "converged": bool(post.verdict), "reasons": list(post.verdict.reasons),
                "dynamics": type(post.dynamics).__name__,
            }
        )  # fmt: skip
    exact = truth(case, len(found[0]["mean"]))
    return {"case": name, "modes": case.modes, "seconds": time.perf_counter() - began, "runs": found,
            "truth": {"mean": exact.mean.tolist(), "sd": exact.sd.tolist(), "quantiles": exact.quantiles.tolist(),
                      "size": exact.size}}  # fmt: skip


def narrow(blind: bool) -> None:
    """References are not widened from here on; blind: the verdict has to see it from the draws alone."""
    Tails.widens = False
    if blind:
        Tails._note = lambda self, way, ratio, ridge=False: None


def judge(report: dict) -> dict:
    """What is printed of a case."""
    runs, exact = report["runs"], {key: np.asarray(value) for key, value in report["truth"].items()}
    sd = exact["sd"]
    mean = np.array([run["mean"] for run in runs])
    error = np.array([run["mcse"] for run in runs])
    off = (mean.mean(0) - exact["mean"]) / sd
    spread = np.array([run["sd"] for run in runs]).mean(0) / sd - 1
    quantile = (np.array([run["quantiles"] for run in runs]).mean(0) - exact["quantiles"]) / sd
    # Over coordinates too: that of the worst of several would look too small by chance.
    ratio = np.sqrt(np.mean(mean.var(0, ddof=1) / np.mean(error**2, 0))) if len(runs) > 1 else np.nan
    covered = np.mean(np.abs(mean - exact["mean"]) <= 1.96 * error)
    worst = lambda values: float(values.flat[np.argmax(np.abs(values))])  # noqa: E731
    return {
        "case": report["case"], "seeds": len(runs), "converged": sum(run["converged"] for run in runs),
        "ratio": float(ratio), "mean": worst(off), "noise": float(np.max(mean.std(0) / sd) / np.sqrt(len(runs))),
        "sd": worst(spread), "tail": worst(quantile), "covered": float(covered),
        "rounds": float(np.median([run["rounds"] for run in runs])), "most": max(run["rounds"] for run in runs),
        "dynamics": runs[0]["dynamics"], "seconds": report["seconds"] / len(runs), "size": float(exact["size"]),
    }  # fmt: skip


HEAD = "| case | seeds | converged | sd / MCSE | mean off | sd − 1 | tail off | covered | rounds (most) | |"


def line(found: dict) -> str:
    """A line of the table."""
    return (
        f"| {found['case']} | {found['seeds']} | {found['converged']} | {found['ratio']:.2f} | {found['mean']:+.3f} "
        f"| {found['sd']:+.3f} | {found['tail']:+.2f} | {found['covered']:.2f} | {found['rounds']:.0f} ({found['most']}) "
        f"| {found['dynamics']} |"
    )


def main() -> None:
    """Run the chosen cases and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="*", help="parts of names; all by default")
    parser.add_argument("--seeds", type=int, default=24)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds for one case")
    parser.add_argument("--out", help="a JSON file for all runs")
    parser.add_argument(
        "--narrow", action="store_true", help="references that are not widened: the verdict must see it"
    )
    parser.add_argument("--one", help="one case in this process, as JSON")
    parser.add_argument(
        "--blind",
        action="store_true",
        help="with --narrow: the verdict does not know of points in the tails",
    )
    options = parser.parse_args()
    seeds = range(options.first, options.first + options.seeds)
    if options.narrow:
        narrow(options.blind)
    if options.one:
        print(json.dumps(one(options.one, seeds, NARROW if options.narrow else {})))
        return
    chosen = [name for name in CASES if not options.cases or any(part in name for part in options.cases)]
    reports = []
    print(HEAD + "\n" + "|---" * 10 + "|", flush=True)

    def run(name: str) -> dict:
        words = ["--one", name, "--seeds", str(options.seeds), "--first", str(options.first)]
        words += ["--narrow"] * options.narrow + ["--blind"] * options.blind
        return {"case": name} | child.report("calibration", words, options.limit, {})

    with ThreadPoolExecutor(options.processes) as pool:
        for report in pool.map(run, chosen):
            reports.append(report)
            print(
                line(judge(report)) if "runs" in report else f"| {report['case']} | {report['error'].strip()[-200:]} |",
                flush=True,
            )
            if options.out:
                Path(options.out).write_text(json.dumps(reports))
    sys.exit(0)


if __name__ == "__main__":
    main()
