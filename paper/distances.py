"""Comparison of runs with a reference sample: their distances, the least distances possible, and their means."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float
from matplotlib.figure import Figure
from numpy import ndarray
from scipy.stats import t as student_t

import fedpdmc as fp
from paper.result_folder import COLOURS, GREY, axes_of, log_sites

# Number of positions that represent a path.
DRAWS = 2000
GRID = 8000
# Exact samples drawn for the floor of each run.
REPEATS = 8
# Quantiles at which distribution functions are compared.
LEVELS = np.linspace(0.02, 0.98, 25)
# Relative deviation from the floor that the uncertainty of the effective sizes alone can make.
TOLERANCE = 0.1
# Chance that the means of exact runs are called biased.
FALSE_ALARM = 1e-3


class Exact:
    """Draws of HMC, in two halves by chain: one to measure distances to, one to take exact samples from."""

    def __init__(self, draws: Float[ndarray, "chains n d"]):
        half, dim = len(draws) // 2, draws.shape[-1]
        self.reference, self.pool = draws[:half].reshape(-1, dim), draws[half:].reshape(-1, dim)
        self.sd: Float[ndarray, " d"] = draws.reshape(-1, dim).std(0)
        self.mean: Float[ndarray, " d"] = draws.mean((0, 1))
        # Chains are independent: the spread of their means is the error of the whole.
        self.error: Float[ndarray, " d"] = draws.mean(1).std(0, ddof=1) / np.sqrt(len(draws))
        self._quantiles = [_quantiles(column) for column in self.reference.T]

    def starts(self, count: int) -> Float[ndarray, "count d"]:
        """Draws far apart, from which runs start in stationarity."""
        return self.pool[:: max(len(self.pool) // count, 1)][:count]

    def distances(self, columns: Iterable[Float[ndarray, " m"]]) -> Float[ndarray, " d"]:
        """Distances of a sample of each marginal from the reference, in posterior standard deviations."""
        pairs = zip(columns, self._quantiles, strict=True)
        return np.array([np.mean(np.abs(_quantiles(one) - other)) for one, other in pairs]) / self.sd

    def floor(self, sizes: Float[ndarray, " d"], seed: int) -> Float[ndarray, " d"]:
        """The same for samples of independent draws of these sizes, on average."""
        rng = np.random.default_rng(seed)
        wanted = np.maximum(np.round(sizes).astype(int), 2)

        def one():
            return self.distances(rng.choice(column, n) for column, n in zip(self.pool.T, wanted, strict=True))

        return np.mean([one() for _ in range(REPEATS)], 0)


def _quantiles(sample: Float[ndarray, " m"]) -> Float[ndarray, " g"]:
    """The quantile function on a fine grid; the 1-Wasserstein distance is the mean difference of two of them."""
    return np.sort(sample)[((np.arange(GRID) + 0.5) / GRID * len(sample)).astype(int)]


def effective_size(runs: Float[ndarray, "runs n"], reference: Float[ndarray, " k"]) -> float:
    """How many independent draws estimate the distribution function as well as one run does.

    The expected distance to the truth is about ``√(2/π) ∫ sd(F_run(x)) dx``, and ``sd = √(F(1−F)/n)`` for n independent
    draws: n is chosen so that the integrals agree. The spread between runs gives ``sd``, since runs are independent; with
    few runs it is on average too small, for normal errors by ``c_4 = √(2/(R−1)) Γ(R/2)/Γ((R−1)/2)``. The effective size for
    the mean is another: straight paths overshoot, and estimate some functions better than others.
    """
    points = np.quantile(reference, LEVELS)
    functions = np.stack([np.searchsorted(np.sort(run), points, side="right") / len(run) for run in runs])
    width = np.gradient(points)
    ideal = np.sum(width * np.sqrt(LEVELS * (1 - LEVELS)))
    count = len(runs)
    shrunk = math.sqrt(2 / (count - 1)) * math.exp(math.lgamma(count / 2) - math.lgamma((count - 1) / 2))
    return float((ideal / np.sum(width * functions.std(0, ddof=1) / shrunk)) ** 2)


def measure(post: fp.Posterior, exact: Exact, seed: int, **labels: Any) -> list[dict[str, Any]]:
    """A row for each run (a chain is a run: chains are independent) and parameter: distance, floor, effective size, mean."""
    paths = post.draws(min(DRAWS, post.most_draws))
    size = np.array([effective_size(paths[..., i], exact.reference[:, i]) for i in range(paths.shape[-1])])
    rows = []
    for run, draws in enumerate(paths):
        columns = {
            "distance": exact.distances(draws.T),
            "floor": exact.floor(size, seed + run),
            "ess": size,
            "mean": draws.mean(0),
            "hmc_mean": exact.mean,
            "hmc_error": exact.error,
        }
        for k, name in enumerate(post.names):
            found = {key: float(column[k]) for key, column in columns.items()}
            rows.append(labels | {"run": run, "parameter": name} | found)
    return rows


class Ratio(NamedTuple):
    """Mean distance over mean floor, and its standard error over runs."""

    value: float
    error: float

    @property
    def on_the_floor(self) -> bool:
        """Whether the distance is the floor, up to Monte Carlo error and what the floor itself leaves out."""
        return abs(self.value - 1) <= TOLERANCE + 3 * self.error


def ratio(rows: list[dict[str, Any]]) -> Ratio:
    """Over all parameters of the rows."""
    runs = sorted({row["run"] for row in rows})
    distance = np.array([np.mean([row["distance"] for row in rows if row["run"] == run]) for run in runs])
    floor = np.mean([row["floor"] for row in rows])
    return Ratio(float(distance.mean() / floor), float(distance.std(ddof=1) / np.sqrt(len(runs)) / floor))


class Bias(NamedTuple):
    """The largest deviation of a pooled mean from HMC's, in standard errors, and what chance allows."""

    z: float
    limit: float

    @property
    def none_seen(self) -> bool:
        """Whether chance explains it."""
        return self.z <= self.limit

    def __str__(self) -> str:
        return f"{self.z:.1f} standard errors (chance allows {self.limit:.1f})"


def bias(rows: list[dict[str, Any]], *keys: str) -> Bias:
    """Means pooled over runs against HMC's, for every parameter and group of rows.

    ``z = (mean of the runs' means − HMC mean) / √(s²/R + HMC's error²)`` with s the spread between the R runs. A bias that
    is small compared with the error of one run, and hardly changes its distance, is ``√R`` times as large here.
    """
    groups: dict[Any, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["parameter"], *(row[key] for key in keys)), []).append(row)
    z = []
    for own in groups.values():
        means = np.array([row["mean"] for row in own])
        error = np.hypot(means.std(ddof=1) / np.sqrt(len(means)), own[0]["hmc_error"])
        z.append(abs(means.mean() - own[0]["hmc_mean"]) / error)
    runs = min(len(own) for own in groups.values())
    return Bias(float(max(z)), float(student_t.isf(FALSE_ALARM / 2 / len(z), runs - 1)))


def by(rows: list[dict[str, Any]], key: str) -> dict[Any, list[dict[str, Any]]]:
    """The rows by the value of a column."""
    return {value: [row for row in rows if row[key] == value] for value in dict.fromkeys(row[key] for row in rows)}


def range_of(ratios: list[Ratio]) -> str:
    """The range of the ratios, as text."""
    values = [found.value for found in ratios]
    return f"{min(values):.2f} to {max(values):.2f}"


def draw_distances(figure: Figure, rows: list[dict[str, Any]], title: str, *place: int) -> None:
    """Distances of all runs against the number of sites: a line for each parameter, and the floor beneath."""
    axes = axes_of(figure, *place, title=title, x="sites M", y="1-Wasserstein distance / posterior sd")
    for colour, (name, own) in zip(COLOURS, by(rows, "parameter").items(), strict=False):
        groups = by(own, "sites")
        x = np.array(list(groups), float)
        mean, spread = zip(*(_mean_and_error(part, "distance") for part in groups.values()), strict=True)
        axes.errorbar(x, mean, spread, color=colour, marker="o", markersize=4, linewidth=1.2, capsize=2, label=name)
        floor = [np.mean([row["floor"] for row in part]) for part in groups.values()]
        axes.plot(x, floor, color=colour, linestyle=(0, (2, 2)), linewidth=1.2)
    axes.plot([], [], color=GREY, linestyle=(0, (2, 2)), label="floor: exact samples\nof the same size")
    axes.set_ylim(bottom=0)
    log_sites(axes, dict.fromkeys(row["sites"] for row in rows))
    axes.legend(fontsize=8, frameon=False)


def _mean_and_error(rows: list[dict[str, Any]], column: str) -> tuple[float, float]:
    values = np.array([row[column] for row in rows])
    return float(values.mean()), float(values.std(ddof=1) / np.sqrt(len(values)))
