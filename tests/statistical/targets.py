"""Posteriors of two parameters with a known answer: the package's sites next to a plain-NumPy likelihood and a grid.

Nothing here asks the package for a value or a derivative: every model is written a second time, as records of a scalar loss.
All targets have 16 records or fewer at every site, two parameters and one kind of prior, so that the package compiles
once for each dynamics, loss and number of sites.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np

import fedpdmc as fp

SIZES = {1: (16,), 3: (10, 5, 1), 10: (4, 3, 2, 1, 1, 1, 1, 1, 1, 1)}
PRIOR_MEAN = np.array([0.4, -0.6])
PRIOR_PRECISION = np.array([[0.9, 0.3], [0.3, 0.7]])
DF, T_SCALE = 3.0, 0.6
LINEAR_SCALE = 1.5
MEAN_SCALE = np.array([2.0, 1.2])
CENTER = np.array([0.3, -0.2])
DENSE = np.array([[0.7, 0.0], [-0.3, 0.5]])


class Records(NamedTuple):
    """``U(x) = Σ_i w_i ℓ(ξ_i·x + o_i; y_i)`` in plain NumPy."""

    loss: str
    design: np.ndarray
    response: np.ndarray
    offset: np.ndarray
    scale: np.ndarray
    weight: np.ndarray | float = 1.0

    def potential(self, x: np.ndarray) -> np.ndarray:
        """``U`` at points of shape (..., d)."""
        z = x @ self.design.T + self.offset
        y, s = self.response, self.scale
        match self.loss:
            case "gaussian":
                terms = (z - y) ** 2 / (2 * s**2)
            case "logistic":
                terms = np.logaddexp(0, z) - y * z
            case "poisson":
                terms = np.exp(z) - y * z
            case _:
                terms = (DF + 1) / 2 * np.log(1 + ((z - y) / s) ** 2 / DF)
        return (self.weight * terms).sum(-1)

    def gradient(self, x: np.ndarray) -> np.ndarray:
        """``∇U`` at points of shape (..., d)."""
        z = x @ self.design.T + self.offset
        y, s = self.response, self.scale
        match self.loss:
            case "gaussian":
                slope = (z - y) / s**2
            case "logistic":
                slope = 1 / (1 + np.exp(-z)) - y
            case "poisson":
                slope = np.exp(z) - y
            case _:
                slope = (DF + 1) * (z - y) / (DF * s**2 + (z - y) ** 2)
        return (self.weight * slope) @ self.design


def records(loss: str, design, response, offset=0.0, scale=1.0) -> Records:
    """Records with offset and scale written out for each."""
    n = len(response)
    return Records(loss, design, response, np.broadcast_to(offset, n), np.broadcast_to(scale, n))


class Member(NamedTuple):
    """One site twice: for NumPy (over all parameters) and for the package."""

    records: Records
    potential: Any
    coordinates: tuple[int, ...] | None = None


class Target(NamedTuple):
    """A federation and its prior."""

    members: tuple[Member, ...]
    prior_mean: np.ndarray = PRIOR_MEAN
    prior_precision: np.ndarray = PRIOR_PRECISION

    def sites(self) -> list[fp.Site]:
        return [fp.Site(m.potential, name=f"site{i}", coordinates=m.coordinates) for i, m in enumerate(self.members)]

    def prior(self):
        return fp.models.normal_prior(len(self.prior_mean), self.prior_mean, precision=self.prior_precision)

    def potential(self, x: np.ndarray) -> np.ndarray:
        shift = x - self.prior_mean
        prior = 0.5 * np.einsum("...i,ij,...j", shift, self.prior_precision, shift)
        return prior + sum(member.records.potential(x) for member in self.members)


class Truth:
    """A density on a fine grid of the plane: the trapezoidal rule, which converges fast for smooth peaks."""

    def __init__(self, axes: tuple[np.ndarray, np.ndarray], weights: np.ndarray):
        self.axes, self.weights = axes, weights
        marginals = (weights.sum(1), weights.sum(0))
        self.mean = np.array([w @ x for w, x in zip(marginals, axes, strict=True)])
        self.sd = np.array([np.sqrt(w @ (x - m) ** 2) for w, x, m in zip(marginals, axes, self.mean, strict=True)])
        u = [(x - m) / s for x, m, s in zip(axes, self.mean, self.sd, strict=True)]
        self.correlation = float(u[0] @ weights @ u[1])
        self.skew = np.array([w @ v**3 for w, v in zip(marginals, u, strict=True)])
        self.low, self.high = (
            np.array([_quantile(x, w, level) for w, x in zip(marginals, axes, strict=True)]) for level in (0.05, 0.95)
        )

    @property
    def cov(self) -> np.ndarray:
        return np.outer(self.sd, self.sd) * (np.eye(2) + self.correlation * (1 - np.eye(2)))

    def draws(self, n: int, seed: int) -> np.ndarray:
        """Independent draws, from which chains start in stationarity."""
        rng = np.random.default_rng(seed)
        cell = rng.choice(self.weights.size, n, p=self.weights.ravel())
        at = np.stack([x[i] for x, i in zip(self.axes, np.unravel_index(cell, self.weights.shape), strict=True)], 1)
        return at + (rng.random((n, 2)) - 0.5) * [x[1] - x[0] for x in self.axes]


def _quantile(x: np.ndarray, weight: np.ndarray, level: float) -> float:
    return float(np.interp(level, np.cumsum(weight) - weight / 2, x))


def on_grid(target: Target, points: int = 300, width: float = 9.0) -> Truth:
    """The posterior on a grid that is centred and scaled in three passes."""
    center, half = target.prior_mean, 6 / np.sqrt(np.linalg.eigvalsh(target.prior_precision)[0]) * np.ones(2)
    for n in (points // 2, points // 2, points):
        axes = tuple(np.linspace(c - h, c + h, n) for c, h in zip(center, half, strict=True))
        energy = np.stack(
            [target.potential(np.stack(np.meshgrid([x], axes[1], indexing="ij"), -1))[0] for x in axes[0]]
        )
        weights = np.exp(energy.min() - energy)
        truth = Truth(axes, weights / weights.sum())
        center, half = truth.mean, width * truth.sd
    return truth


def gaussian_mean(rng, sizes):
    y = [rng.normal([1.5, -1.0], MEAN_SCALE, (n, 2)) for n in sizes]
    return [
        Member(
            records("gaussian", np.tile(np.eye(2), (len(v), 1)), v.ravel(), scale=np.tile(MEAN_SCALE, len(v))),
            fp.models.gaussian_mean(v, scale=MEAN_SCALE),
        )
        for v in y
    ]


def linear(rng, sizes):
    def member(n):
        X = _design(rng, n)
        y = X @ [1.0, 0.5] + LINEAR_SCALE * rng.normal(size=n)
        return Member(records("gaussian", X, y, scale=LINEAR_SCALE), fp.models.linear(X, y, LINEAR_SCALE))

    return [member(n) for n in sizes]


def logistic(rng, sizes):
    def member(n):
        X = _design(rng, n)
        y = (rng.random(n) < 1 / (1 + np.exp(-X @ [1.5, 2.5]))).astype(float)
        return Member(records("logistic", X, y), fp.models.logistic(X, y))

    return [member(n) for n in sizes]


def poisson(rng, sizes):
    def member(n):
        X, offset = _design(rng, n), rng.uniform(-2.5, -0.5, n)
        y = rng.poisson(np.exp(X @ [0.2, -0.5] + offset)).astype(float)
        return Member(records("poisson", X, y, offset), fp.models.poisson(X, y, offset=offset))

    return [member(n) for n in sizes]


def student_t(rng, sizes):
    def member(n):
        X = _design(rng, n)
        y = X @ [0.5, 0.7] + T_SCALE * rng.standard_t(DF, n) + 1.5 * (rng.random(n) < 0.3)
        return Member(records("student", X, y, scale=T_SCALE), fp.models.student_t(X, y, df=DF, scale=T_SCALE))

    return [member(n) for n in sizes]


def ar1_student_t(rng, sizes):
    def member(n):
        count = 2 if n % 2 == 0 else 1
        series = np.empty((count, n // count + 1))
        series[:, 0] = -1.0
        for k in range(1, series.shape[1]):
            series[:, k] = 0.3 + 0.5 * series[:, k - 1] + T_SCALE * rng.standard_t(DF, count)
        before, after = series[:, :-1].ravel(), series[:, 1:].ravel()
        X = np.stack([before, np.ones(n)], 1)
        return Member(
            records("student", X, after, scale=T_SCALE), fp.models.ar1_student_t(series, df=DF, scale=T_SCALE)
        )

    return [member(n) for n in sizes]


def log_gaussian_cox(rng, sizes):
    """Sites own both cells; the last one, and in a large federation some others, own one cell: a single record."""

    def member(index, n):
        cells = (index % 2,) if n == 1 and index % 3 else None
        own = np.arange(2) if cells is None else np.array(cells)
        counts = rng.poisson(np.exp([-0.9, 0.4])[own] / len(sizes) ** 0.5).astype(float)
        return Member(records("poisson", np.eye(2)[own], counts), fp.models.log_gaussian_cox(counts), cells)

    return [member(i, n) for i, n in enumerate(sizes)]


def _design(rng, n):
    return np.stack([np.ones(n), rng.normal(0.4, 1.0, n)], 1)


# Each with the seed of its data.
MODELS = {
    "gaussian_mean": (gaussian_mean, 1),
    "linear": (linear, 2),
    "logistic": (logistic, 3),
    "poisson": (poisson, 4),
    "student_t": (student_t, 5),
    "ar1_student_t": (ar1_student_t, 6),
    "log_gaussian_cox": (log_gaussian_cox, 7),
}


@cache
def target(model: str, sites: int) -> Target:
    """The federation of ``sites`` sites for a model."""
    make, seed = MODELS[model]
    members = tuple(make(np.random.default_rng([seed, sites]), SIZES[sites]))
    if model != "log_gaussian_cox":
        return Target(members)
    alpha, beta = 0.4, 0.8
    return Target(members, np.zeros(2), beta * np.array([[1.0, -alpha], [-alpha, 1.0]]))


@cache
def truth(model: str, sites: int) -> Truth:
    """Its posterior on a grid."""
    return on_grid(target(model, sites))


def weighted() -> Target:
    """Records with weights, some of them zero: events among trials, counts, Student-t and Gaussian noise."""
    rng, members = np.random.default_rng(9), []
    for kind, n in (("logistic", 9), ("poisson", 6), ("student", 4), ("gaussian", 7)):
        X, w = _design(rng, n), np.round(rng.exponential(1.2, n), 2) * (np.arange(n) != 2)
        y = rng.poisson(1.5, n).astype(float) if kind == "poisson" else X @ [0.5, 0.9] + rng.normal(size=n)
        if kind == "logistic":
            trials = rng.integers(0, 6, n)
            y = rng.binomial(trials, 1 / (1 + np.exp(-X @ [0.8, 1.5]))).astype(float)
            own = records(kind, X, y / np.maximum(trials, 1))._replace(weight=w * trials)
            members.append(Member(own, fp.models.logistic(X, y, trials=trials, weights=w)))
            continue
        scale = {"poisson": 1.0, "student": T_SCALE, "gaussian": LINEAR_SCALE}[kind]
        build = {
            "poisson": fp.models.poisson,
            "student": lambda X, y, weights: fp.models.student_t(X, y, df=DF, scale=T_SCALE, weights=weights),
            "gaussian": lambda X, y, weights: fp.models.linear(X, y, LINEAR_SCALE, weights=weights),
        }[kind]
        members.append(Member(records(kind, X, y, scale=scale)._replace(weight=w), build(X, y, weights=w)))
    return Target(tuple(members))


def mixed() -> Target:
    """One site logistic, one Poisson, one Student-t with a single record, and one that sees the second parameter only."""
    rng = np.random.default_rng(8)
    X = rng.normal(0.5, 1.0, (6, 1))
    y = rng.poisson(np.exp(-0.5 * X[:, 0])).astype(float)
    part = Member(records("poisson", np.concatenate([np.zeros((6, 1)), X], 1), y), fp.models.poisson(X, y), (1,))
    return Target((*logistic(rng, (7,)), *poisson(rng, (4,)), *student_t(rng, (1,)), part))
