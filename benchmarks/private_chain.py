"""``python -m benchmarks.private_chain``: effective samples of the exact private chain against what the planner expects.

Every run is the documented one: a tenth of the budget for a noisy reference, eight chains, until the budget is spent.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import warnings
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

import numpy as np

DELTA = 1e-5
# Parameters, sites, records of a site, epsilon.
SETTINGS = (
    (3, 2, 30_000, 4.0),
    (3, 4, 30_000, 4.0),
    (3, 8, 30_000, 4.0),
    (6, 4, 30_000, 4.0),
    (10, 4, 30_000, 4.0),
    (3, 4, 100_000, 1.0),
    (3, 4, 30_000, 8.0),
    (6, 4, 30_000, 8.0),
    (6, 4, 100_000, 2.0),
    (2, 3, 100_000, 4.0),
)


def run(dim: int, sites: int, records: int, epsilon: float, seed: int) -> tuple[float, float, int]:
    """Mean effective samples of a run until its budgets are spent, what is expected without losses, and rounds."""
    import fedpdmc as fp
    from fedpdmc.privacy.budget_planning import HONEST, Question, exact_samples

    warnings.simplefilter("ignore")
    rng, members = np.random.default_rng([dim, sites, seed]), []
    truth = 0.7 * rng.normal(size=dim)
    with tempfile.TemporaryDirectory() as folder:
        for m in range(sites):
            X = rng.normal(size=(records, dim))
            X /= np.maximum(1, np.linalg.norm(X, axis=1, keepdims=True))
            y = rng.random(records) < 1 / (1 + np.exp(-X @ truth))
            ledger = fp.create_ledger(Path(folder) / f"{m}.db")
            bounds = fp.Bounds(norm=1.0)
            budget = fp.Budget(epsilon, DELTA, bounds=bounds, release=0.1, ledger=ledger, seeded_for_tests=True)
            members.append(fp.Site(fp.models.logistic(X, y), name=f"s{m}", budget=budget, seed=100 * seed + m))
        prior = fp.models.normal_prior(dim)
        post = fp.sample(
            members, prior, dynamics=fp.FactorisedBoomerang(), reference=fp.laplace(members, prior),
            control="quadratic", chains=8, burn_in=1.0, ess=1e6, seed=seed, progress=False,
        )  # fmt: skip
    assert post.privacy is not None
    known = post.privacy["s0"]["sensitivity"]["k_2"]
    planned = exact_samples(Question(records, sites, dim, epsilon, DELTA, known, 1.0)) / HONEST
    return float(np.mean(list(post.ess().values()))), planned, post.rounds


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--seeds", type=int, default=6)
    asked.add_argument("--jobs", type=int, default=os.cpu_count())
    asked.add_argument("--settings", type=int, nargs="+", default=list(range(len(SETTINGS))))
    given = asked.parse_args()
    print("| d | sites | records a site | ε | effective samples | without losses | share | rounds | runs |")
    print("|---|---|---|---|---|---|---|---|---|")
    # Processes of their own: JAX does not survive a fork.
    with ProcessPoolExecutor(given.jobs, get_context("spawn")) as pool:
        # All settings once before any a second time: what is complete when time is up says something of each.
        begun = {
            pool.submit(run, *SETTINGS[which], seed=seed): which
            for seed in range(given.seeds)
            for which in given.settings
        }
        found: dict[int, list[tuple[float, float, int]]] = {}
        for one in as_completed(begun):
            found.setdefault(begun[one], []).append(one.result())
            print(line(begun[one], found[begun[one]]), flush=True)


def line(which: int, runs: list[tuple[float, float, int]]) -> str:
    """The mean over the runs of a setting so far."""
    ess, planned, rounds = np.array(runs).T
    share = ess / planned
    dim, sites, records, epsilon = SETTINGS[which]
    error = f" ± {share.std(ddof=1) / np.sqrt(len(share)):.2f}" if len(share) > 1 else ""
    return (
        f"| {dim} | {sites} | {records:,} | {epsilon:g} | {ess.mean():.1f} | {planned.mean():.1f} | "
        f"{share.mean():.2f}{error} | {rounds.mean():.0f} | {len(runs)} |"
    )


if __name__ == "__main__":
    main()
