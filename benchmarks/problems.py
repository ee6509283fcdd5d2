"""The paper's two test problems, made with NumPy alone so that every environment builds the same data.

A `Problem` carries the data, a Gaussian approximation of the posterior (exact for the Gaussian problem) from which
all contestants start, and the spacing in process time of the draws on which all contestants are judged.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

TRUE_COEFFICIENTS = np.array([0.5, -1.0, 0.8, 1.3, -0.4, 0.2])


@dataclass(frozen=True)
class Problem:
    """Data of a benchmark problem, where to start and how to judge.

    Attributes
    ----------
    name : str
        "paper_gaussian" or "paper_logistic".
    arrays : dict of str to ndarray
        "y" of shape (N, d) for the Gaussian problem; "X" of shape (N, d) and "y" of shape (N,) for the logistic one.
    mean, cov : ndarray of shape (d,), (d, d)
        The posterior's mean and covariance, of its Laplace approximation for the logistic problem.
    spacing : float
        Process time between draws at unit speed: half the smallest posterior standard deviation.
    """

    name: str
    arrays: dict[str, np.ndarray]
    mean: np.ndarray
    cov: np.ndarray

    @property
    def spacing(self) -> float:
        """Process time between draws: half the smallest standard deviation, at speed one per coordinate."""
        return 0.5 * float(np.sqrt(np.diag(self.cov).min()))

    @property
    def size(self) -> tuple[int, int]:
        """Number of records and of parameters."""
        return len(self.arrays["y"]), len(self.mean)

    def starts(self, chains: int, seed: int = 0) -> np.ndarray:
        """Draw start points from the Gaussian approximation, of shape (chains, d): no contestant needs burn-in."""
        rng = np.random.default_rng([seed, 1])
        noise = rng.standard_normal((chains, len(self.mean)))
        return self.mean + noise @ np.linalg.cholesky(self.cov).T

    def velocities(self, chains: int, seed: int = 0) -> np.ndarray:
        """Draw Zig-Zag velocities, signs of shape (chains, d)."""
        rng = np.random.default_rng([seed, 2])
        return rng.choice([-1.0, 1.0], size=(chains, len(self.mean)))

    def save(self, path: str | Path) -> None:
        """Write the problem to an npz file."""
        data = {f"data_{key}": value for key, value in self.arrays.items()}
        np.savez(path, name=self.name, mean=self.mean, cov=self.cov, **data)


def load(path: str | Path) -> Problem:
    """Read a problem that `Problem.save` wrote."""
    with np.load(path, allow_pickle=False) as file:
        arrays = {key.removeprefix("data_"): file[key] for key in file.files if key.startswith("data_")}
        return Problem(str(file["name"]), arrays, file["mean"], file["cov"])


def paper_gaussian(seed: int = 0, records: int = 50, dim: int = 10) -> Problem:
    """Unknown mean of a Gaussian: y_i ~ N(0.5, I), flat prior, so that the posterior is N(mean of y, I / N)."""
    y = np.random.default_rng([seed, 0]).normal(0.5, 1.0, (records, dim))
    return Problem("paper_gaussian", {"y": y}, y.mean(axis=0), np.eye(dim) / records)


def paper_logistic(seed: int = 0, records: int = 1000, dim: int = 6) -> Problem:
    """Logistic regression with an intercept, standard normal covariates and a standard normal prior.

    The coefficients keep their norm whatever ``dim`` is, and so do the predictors their spread.
    """
    rng = np.random.default_rng([seed, 0])
    X = rng.standard_normal((records, dim))
    X[:, 0] = 1.0
    truth = np.resize(TRUE_COEFFICIENTS, dim)
    truth *= np.linalg.norm(TRUE_COEFFICIENTS) / np.linalg.norm(truth)
    y = (rng.random(records) < sigmoid(X @ truth)).astype(float)
    return Problem("paper_logistic", {"X": X, "y": y}, *laplace_logistic(X, y))


def laplace_logistic(X: np.ndarray, y: np.ndarray, steps: int = 25) -> tuple[np.ndarray, np.ndarray]:
    """Find the mode and inverse Hessian of the logistic posterior with standard normal prior by Newton's method."""
    x = np.zeros(X.shape[1])
    for _ in range(steps):
        p = sigmoid(X @ x)
        hessian = (X.T * (p * (1.0 - p))) @ X + np.eye(len(x))
        x = x - np.linalg.solve(hessian, X.T @ (p - y) + x)
    return x, np.linalg.inv(hessian)


def reference_moments(problem: Problem, draws: int = 200_000, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Compute the posterior's means and standard deviations without any Markov chain.

    Exact for the Gaussian problem; for the logistic one by importance sampling from the Laplace approximation with
    its covariance inflated by 1.2 (effective share above one half, so that the error is below 0.004 sd).
    """
    if problem.name == "paper_gaussian":
        return problem.mean, np.sqrt(np.diag(problem.cov))
    X, y = problem.arrays["X"], problem.arrays["y"]
    factor = np.linalg.cholesky(1.2 * problem.cov)
    rng = np.random.default_rng([seed, 3])
    points, logs = [], []
    for _ in range(draws // 2000):
        noise = rng.standard_normal((2000, len(problem.mean)))
        x = problem.mean + noise @ factor.T
        z = x @ X.T
        minus_log_posterior = np.logaddexp(0.0, z).sum(axis=1) - z @ y + 0.5 * (x**2).sum(axis=1)
        points.append(x)
        logs.append(0.5 * (noise**2).sum(axis=1) - minus_log_posterior)
    x, log = np.concatenate(points), np.concatenate(logs)
    weight = np.exp(log - log.max())
    weight /= weight.sum()
    mean = weight @ x
    return mean, np.sqrt(weight @ (x - mean) ** 2)


def check_moments(problem: Problem, draws: np.ndarray, ess: float) -> dict:
    """Compare the draws' means (in Monte Carlo standard errors) and standard deviations (ratios) with the truth."""
    mean, sd = reference_moments(problem)
    ratio = draws.std(axis=0) / sd
    return {
        "mean_max_abs_z": float(np.max(np.abs(draws.mean(axis=0) - mean) / sd) * np.sqrt(ess)),
        "sd_ratio_min": float(ratio.min()),
        "sd_ratio_max": float(ratio.max()),
    }


def sigmoid(z: np.ndarray) -> np.ndarray:
    """Evaluate 1 / (1 + exp(-z)) without overflow."""
    return 0.5 * (1.0 + np.tanh(0.5 * z))


PROBLEMS = {"paper_gaussian": paper_gaussian, "paper_logistic": paper_logistic}
