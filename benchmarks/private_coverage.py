"""``python -m benchmarks.private_coverage``: how often the intervals of private answers in one shot cover the truth.

Every study draws its truth from the prior and simulates the records of all sites. The derivatives of the pooled records get
the noise that `fedpdmc.sample` would add, from the same formulas, and `fedpdmc.sampling.one_shot` makes the answer of them.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import numpy as np

SITES, DELTA, DRAWS, LEVEL = 4, 1e-5, 4000, 0.95
# How many sites may collude, where noise is shared under a secure sum; None: every site adds all of its own noise.
SHARED = (None, 1)


def ball(rng: np.random.Generator, count: int, dim: int) -> np.ndarray:
    """Covariates that lie evenly, of norm one at most."""
    X = rng.standard_normal((count, dim))
    return X / np.maximum(1.0, np.sqrt(np.einsum("ij,ij->i", X, X)))[:, None]


def table(rng: np.random.Generator, count: int, dim: int) -> np.ndarray:
    """An intercept, zeros and ones of which some are rare, and numbers between, of norm one at most."""
    X = np.ones((count, dim))
    for j in range(1, dim):
        X[:, j] = rng.random(count) < (0.5, 0.1, 0.3)[j % 3] if j % 2 else rng.uniform(-1, 1, count)
    return X / math.sqrt(dim)


DESIGNS = {"ball": ball, "table": table}


def records(
    rng: np.random.Generator, count: int, truth: np.ndarray, design: str = "ball"
) -> tuple[np.ndarray, np.ndarray]:
    X = DESIGNS[design](rng, count, len(truth))
    return X, rng.random(count) < 1 / (1 + np.exp(-X @ truth))


def derivatives(X: np.ndarray, y: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    p = 1 / (1 + np.exp(-X @ x))
    return X.T @ (p - y), (X * (p * (1 - p))[:, None]).T @ X


def without_privacy(X: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviations of the Laplace approximation under a standard normal prior."""
    x = np.zeros(X.shape[1])
    for _ in range(8):
        gradient, hessian = derivatives(X, y, x)
        covariance = np.linalg.inv(hessian + np.eye(len(x)))
        step = covariance @ (gradient + x)
        x = x - step
        if np.max(np.abs(step)) < 1e-10:
            break
    return x, np.sqrt(np.diag(covariance))


def noise(dim: int, epsilon: float, share: float, colluding: int | None) -> tuple[float, float]:
    """Standard deviations of the noise of the summed gradient and Hessian in a step of this share of the budget."""
    from fedpdmc.privacy.accountant import best_order, gaussian_limit
    from fedpdmc.privacy.budget_planning import ONE_SHOT
    from fedpdmc.privacy.gaussian_mechanism import noise_multiplier, noise_scale
    from fedpdmc.privacy.sensitivity import Bounds, ModelFacts, derivative_sensitivity

    alpha = best_order(epsilon, DELTA)
    cost = gaussian_limit(alpha, epsilon, DELTA) * share
    changes = derivative_sensitivity(ModelFacts("logistic", dim), Bounds(norm=1.0), "replace")
    parts, counts = (ONE_SHOT.gradient, 1 - ONE_SHOT.gradient), (dim, dim * (dim + 1) // 2)
    one = [
        noise_scale(noise_multiplier(alpha, cost * part), change, 0.0, count)
        for part, change, count in zip(parts, changes, counts, strict=True)
    ]
    factor = math.sqrt(SITES if colluding is None else SITES / (SITES - colluding))
    return factor * one[0], factor * one[1]


def answer(
    X, y, epsilon: float, colluding: int | None, steps: tuple[float, ...], rng: np.random.Generator
) -> np.ndarray:
    """Draws of the noise-aware posterior."""
    from fedpdmc.sampling import one_shot

    dim = X.shape[1]
    known, x = one_shot.Gaussian(np.zeros(dim), np.eye(dim)), np.zeros(dim)
    off_diagonal, releases = np.sqrt((1 + np.eye(dim)) / 2), []
    for step in steps:
        first, second = noise(dim, epsilon, step / sum(steps), colluding)
        gradient, hessian = derivatives(X, y, x)
        error = np.triu(rng.standard_normal((dim, dim)) * second * off_diagonal)
        released = one_shot.NoisyRelease(
            x,
            gradient + first * rng.standard_normal(dim),
            hessian + error + np.triu(error, 1).T,
            np.full(dim, first),
            second * off_diagonal,
        )
        releases.append(released)
        x = one_shot.pooled(releases, known)[1]
    return one_shot.posterior_draws(one_shot.pooled(releases, known)[0], known, DRAWS, rng)


def study(
    number: int, dim: int, count: int, epsilons: tuple[float, ...], steps: tuple[float, ...], design: str
) -> list[tuple]:
    """One simulated study: for each way, which intervals cover, those without privacy, the width, and the error."""
    rng = np.random.default_rng([number, dim, count])
    truth = rng.standard_normal(dim)
    X, y = records(rng, SITES * count, truth, design)
    mean, sd = without_privacy(X, y)
    plain = np.abs(truth - mean) < 1.959964 * sd
    found = []
    for epsilon, colluding in itertools.product(epsilons, SHARED):
        drawn = answer(X, y, epsilon, colluding, steps, rng)
        low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
        covered = (low < truth) & (truth < high)
        found.append((epsilon, colluding, covered, plain, drawn.std(0) / sd, (drawn.mean(0) - mean) / sd))
    return found


def lines(
    dim: int,
    count: int,
    epsilons: tuple[float, ...],
    steps: tuple[float, ...],
    studies: int,
    pool: ProcessPoolExecutor,
    design: str = "ball",
) -> Iterator[str]:
    arguments = ((number, dim, count, epsilons, steps, design) for number in range(studies))
    every = list(pool.map(study, *zip(*arguments, strict=True)))
    for of_one in zip(*every, strict=True):
        epsilon, colluding = of_one[0][:2]
        covered, plain, width, error = (np.array([one[k] for one in of_one]) for k in (2, 3, 4, 5))
        how = "own" if colluding is None else f"shared, {colluding} may collude"
        # Coordinates of one study are not independent: the error of a mean is that over studies.
        spread = covered.mean(1).std() / math.sqrt(studies)
        yield (
            f"| {dim} | {count:,} | {epsilon:g} | {how} | {covered.mean():.3f} ± {spread:.3f} | {plain.mean():.3f} | "
            f"{np.sqrt(np.mean(width**2)):.2f} | {np.sqrt(np.mean(error**2)):.2f} | {studies} |"
        )


def main() -> None:
    from fedpdmc.privacy.budget_planning import ONE_SHOT

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--dims", type=int, nargs="+", default=[3, 6])
    asked.add_argument("--records", type=int, nargs="+", default=[1000, 10_000, 100_000])
    asked.add_argument("--epsilons", type=float, nargs="+", default=[0.5, 1.0, 2.0, 4.0, 8.0])
    asked.add_argument("--studies", type=int, default=200)
    asked.add_argument("--jobs", type=int, default=os.cpu_count())
    asked.add_argument("--steps", type=float, nargs="+", default=list(ONE_SHOT.steps))
    asked.add_argument("--design", choices=list(DESIGNS), default="ball")
    given = asked.parse_args()
    print("| d | records a site | ε | noise | 95 % intervals cover | without privacy | width | error | studies |")
    print("|---|---|---|---|---|---|---|---|---|")
    with ProcessPoolExecutor(given.jobs) as pool:
        for count, dim in itertools.product(given.records, given.dims):
            begun = time.monotonic()
            for line in lines(dim, count, tuple(given.epsilons), tuple(given.steps), given.studies, pool, given.design):
                print(line, flush=True)
            print(f"<!-- {time.monotonic() - begun:.0f} s -->", flush=True)


if __name__ == "__main__":
    main()
