"""A federated Zig-Zag for logistic regression in plain NumPy, written only to check the package against.

It shares no code and no idea with the package beyond Algorithm 2 of the paper: every site thins its own clock under one
constant bound, the earliest arrival wins, and moments are integrated along straight lines.
"""

from __future__ import annotations

import numpy as np


def zigzag(sites, prior_mean, prior_precision, start, duration: float, seed: int) -> np.ndarray:
    """Time averages of ``x_1, x_2, x_1², x_2², x_1 x_2, x_1³, x_2³`` of every chain.

    Parameters
    ----------
    sites : list of (X, y)
        The records of each site.
    prior_mean, prior_precision
        The Gaussian prior, which is one more site.
    start : array of shape (chains, 2)
    duration : float
        Every chain runs to this process time.
    """
    rng = np.random.default_rng(seed)
    x, v = start.copy(), rng.choice([-1.0, 1.0], start.shape)
    clock, totals = np.zeros(len(x)), np.zeros((len(x), 7))
    while np.any(clock < duration):
        times, marks = zip(*(_logistic_arrival(X, y, x, v, rng) for X, y in sites), strict=True)
        prior = _prior_arrival(prior_mean, prior_precision, x, v, rng)
        times, marks = np.array([*times, prior[0]]), np.array([*marks, prior[1]])
        winner, chains = times.argmin(0), np.arange(len(x))
        wait = np.minimum(times.min(0), duration - clock)
        totals += _integrals(x, v, wait)
        x, clock = x + v * wait[:, None], clock + wait
        mark = marks[winner, chains]
        flips = (mark >= 0) & (clock < duration)
        v[chains[flips], mark[flips]] *= -1
    return totals / duration


def _logistic_arrival(X, y, x, v, rng):
    """First candidate under the bound ``Σ_j |ξ_ji|`` of each coordinate's rate, and its mark: −1 if it is rejected.

    A rejected candidate is a place to start again, which is exact for a constant bound.
    """
    bound = np.abs(X).sum(0)
    time = rng.exponential(1 / bound.sum(), len(x))
    coordinate = rng.choice(len(bound), len(x), p=bound / bound.sum())
    rows = np.arange(len(x))
    there = x + v * time[:, None]
    residual = 1 / (1 + np.exp(-there @ X.T)) - y
    rate = v[rows, coordinate] * (residual * X[:, coordinate].T).sum(1)
    accepted = rng.random(len(x)) * bound[coordinate] < rate
    return time, np.where(accepted, coordinate, -1)


def _prior_arrival(mean, precision, x, v, rng):
    """First flip of a Gaussian prior, whose rates ``(b + c t)_+`` are inverted by hand."""
    b, c = v * ((x - mean) @ precision), v * (v @ precision)
    level = rng.exponential(size=x.shape)
    with np.errstate(divide="ignore", invalid="ignore"):
        rising = -b / c + np.sqrt(np.maximum(b, 0) ** 2 / c**2 + 2 * level / c)
        falling = np.where((b > 0) & (b**2 + 2 * c * level > 0), (-b + np.sqrt(b**2 + 2 * c * level)) / c, np.inf)
    times = np.where(c > 0, rising, falling)
    return times.min(1), times.argmin(1)


def _integrals(x, v, wait):
    """``∫`` of the seven monomials along straight lines."""
    t, t2, t3, t4 = wait, wait**2 / 2, wait**3 / 3, wait**4 / 4
    (x1, x2), (v1, v2) = x.T, v.T

    def cube(a, b):
        return a**3 * t + 3 * a**2 * b * t2 + 3 * a * b**2 * t3 + b**3 * t4

    squares = [a**2 * t + 2 * a * b * t2 + b**2 * t3 for a, b in ((x1, v1), (x2, v2))]
    product = x1 * x2 * t + (x1 * v2 + x2 * v1) * t2 + v1 * v2 * t3
    return np.stack([x1 * t + v1 * t2, x2 * t + v2 * t2, *squares, product, cube(x1, v1), cube(x2, v2)], 1)
