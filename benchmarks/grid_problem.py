"""The logistic regressions of the grid, and what both sides are judged by."""

from __future__ import annotations

import os

import numpy as np

# Chains on which the effective sample size is measured; it is scaled to all of them.
JUDGED = 256


def data(records: int, dim: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """An intercept, normal covariates and coefficients of half a unit; the prior is standard normal."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(records, dim))
    X[:, 0] = 1
    truth = 0.5 * rng.normal(size=dim)
    return X, (rng.random(records) < 1 / (1 + np.exp(-X @ truth))).astype(float)


def laplace(X: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mode and covariance."""
    mode = np.zeros(X.shape[1])
    for _ in range(50):
        p = 0.5 * (1 + np.tanh(0.5 * X @ mode))
        hessian = (X.T * (p * (1 - p))) @ X + np.eye(len(mode))
        step = np.linalg.solve(hessian, X.T @ (p - y) + mode)
        mode = mode - step
        if np.abs(step).max() < 1e-12:
            break
    return mode, np.linalg.inv(hessian)


def use_device(device: str, core: int | None) -> int | None:
    """One core of the processor, or the accelerator; to be called before JAX is imported."""
    if device == "cpu":
        from pinning import pin_to_one_core

        return pin_to_one_core(core, "")
    os.environ["JAX_PLATFORMS"] = "cuda"
    return None


def judged(draws: np.ndarray, chains: int) -> dict[str, float]:
    """Effective sizes of all chains, from the draws of some."""
    from effective import effective_sizes

    scale = chains / draws.shape[0]
    return {name: scale * size for name, size in effective_sizes(draws).items()}
