"""The log-Gaussian Cox model on a grid in four blocks (paper, appendix): each site is sent its own cells only."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float
from matplotlib.figure import Figure
from numpy import ndarray

import fedpdmc as fp
from paper.distances import Exact, Ratio, bias, by, measure, ratio
from paper.hmc import hmc
from paper.result_folder import COLOURS, DARK, GREY, Study, Verdict, axes_of

ALPHA, BETA, SEED = 0.1, 1.0, 66


class Grid(NamedTuple):
    """Counts of the cells, and the cells of each block."""

    side: int
    counts: Float[ndarray, " n"]
    blocks: list[ndarray]

    @property
    def prior(self):
        """Precision ``β (I − α A)``."""
        return fp.models.grid_prior((self.side, self.side), ALPHA, BETA)

    def sites(self) -> list[fp.Site]:
        """A site for each block."""
        return [
            fp.Site(fp.models.log_gaussian_cox(self.counts[block]), name=f"block{k}", coordinates=block.tolist())
            for k, block in enumerate(self.blocks)
        ]

    def log_density(self, x):
        """Log posterior density, with the neighbours' products written out: ``xᵀAx = 2 Σ x_u x_v`` over neighbours."""
        field = x.reshape(math.isqrt(len(x)), -1)
        pairs = jnp.sum(field[:, 1:] * field[:, :-1]) + jnp.sum(field[1:] * field[:-1])
        return jnp.sum(jnp.asarray(self.counts) * x - jnp.exp(x)) - BETA / 2 * (jnp.sum(x**2) - 2 * ALPHA * pairs)

    def scale(self) -> fp.Reference:
        """The reference of each cell's posterior without its neighbours, by Newton on ``e^x − y + β x = 0``."""
        x = np.zeros(len(self.counts))
        for _ in range(50):
            x = x - (np.exp(x) - self.counts + BETA * x) / (np.exp(x) + BETA)
        return fp.Reference(jnp.asarray(x), jnp.asarray(1 / np.sqrt(np.exp(x) + BETA)))


def grid(side: int) -> Grid:
    """A draw of the model, in four square blocks."""
    rng = np.random.default_rng([SEED, side])
    precision = np.asarray(fp.models.grid_prior((side, side), ALPHA, BETA).precision)
    field = np.linalg.solve(np.linalg.cholesky(precision).T, rng.normal(size=side * side))
    cells, half = np.arange(side * side).reshape(side, side), side // 2
    blocks = [cells[i : i + half, j : j + half].ravel() for i in (0, half) for j in (0, half)]
    return Grid(side, rng.poisson(np.exp(field)).astype(float), blocks)


class Size(NamedTuple):
    """How much to do on one grid."""

    side: int
    runs: int
    duration: float
    hmc_draws: int


FULL = (Size(4, 20, 100.0, 3000), Size(32, 4, 50.0, 1000))
QUICK = (Size(4, 16, 50.0, 1000), Size(6, 4, 50.0, 1000))


def simulate(size: Size, found: Grid) -> tuple[fp.Posterior, Float[ndarray, "chains n d"]]:
    """Federated Zig-Zag with the prior at the coordinator, and HMC on all cells."""
    draws = hmc(found, found.scale(), seed=SEED, chains=8, draws=size.hmc_draws)
    starts = draws[np.arange(size.runs) % 8, -1 - np.arange(size.runs) // 8 * 50]
    post = fp.sample(
        found.sites(), found.prior, dynamics=fp.ZigZag(), reference="identity", chains=size.runs, duration=size.duration,
        burn_in=0.0, init=starts, seed=size.side, keep="draws", progress=False,
    )  # fmt: skip
    return post, draws


def cells_table(post: fp.Posterior, draws: Float[ndarray, "chains n d"], found: Grid) -> list[dict[str, Any]]:
    """Mean and standard deviation of every cell under both, and by how many standard errors the means differ."""
    ess, mean, sd = post.ess(), post.mean(), np.sqrt(np.diag(post.cov()))
    owner = np.empty(len(found.counts), int)
    for k, block in enumerate(found.blocks):
        owner[block] = k
    # HMC's chains are independent: the spread of their means is its error.
    error = draws.mean(1).std(0, ddof=1) / np.sqrt(len(draws))
    rows = []
    for k, name in enumerate(post.names):
        reference, spread = draws[..., k].mean(), draws[..., k].std()
        total = np.hypot(spread / np.sqrt(ess[name]), error[k])
        rows.append(
            {"cell": k, "site": int(owner[k]), "count": int(found.counts[k]), "mean": float(mean[k]), "sd": float(sd[k]),
             "hmc_mean": float(reference), "hmc_sd": float(spread), "z": float((mean[k] - reference) / total),
             "ess": float(ess[name])}
        )  # fmt: skip
    return rows


def draw_graph(found: Grid) -> Figure:
    """The grid, its edges, and who owns which cell."""
    figure = Figure(figsize=(4.2, 4.6), layout="constrained")
    axes = figure.add_subplot()
    index = np.arange(found.side**2).reshape(found.side, found.side)
    rows, columns = np.divmod(index, found.side)
    for one, other in ((index[:, 1:], index[:, :-1]), (index[1:], index[:-1])):
        for u, v in zip(one.ravel(), other.ravel(), strict=True):
            axes.plot([u % found.side, v % found.side], [u // found.side, v // found.side], color=GREY, zorder=1)
    for m, (colour, block) in enumerate(zip(COLOURS, found.blocks, strict=False)):
        axes.scatter(columns.ravel()[block], rows.ravel()[block], s=420, color=colour, zorder=2, label=f"site {m}")
    for cell, count in enumerate(found.counts):
        axes.annotate(f"{count:.0f}", (cell % found.side, cell // found.side), ha="center", va="center", color="white")
    axes.invert_yaxis()
    axes.set_axis_off()
    axes.set_title("Cells by site, with their counts", fontsize=11, fontweight="bold", color=DARK)
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=8, markerscale=0.4)
    return figure


def marginals(post: fp.Posterior, draws: Float[ndarray, "chains n d"], found: Grid) -> list[dict[str, Any]]:
    """Densities of every cell in bins, under both."""
    sample, rows = post.draws(min(2000, post.most_draws)), []
    for k in range(found.side**2):
        least, most = np.quantile(draws[..., k], [0.0005, 0.9995])
        edges = np.linspace(least, most, 41)
        both = [np.histogram(one[..., k], edges, density=True)[0] for one in (sample, draws)]
        owner = next(m for m, block in enumerate(found.blocks) if k in block)
        for low, high, ours, theirs in zip(edges, edges[1:], *both, strict=False):
            rows.append(
                {"cell": k, "site": owner, "from": float(low), "to": float(high), "density": float(ours),
                 "hmc_density": float(theirs)}
            )  # fmt: skip
    return rows


def draw_marginals(rows: list[dict[str, Any]], side: int) -> Figure:
    """Histograms of every cell: HMC filled, the federated run as a line."""
    figure = Figure(figsize=(8.4, 7.2), layout="constrained")
    for k, own in by(rows, "cell").items():
        axes = figure.add_subplot(side, side, k + 1)
        edges = [*(row["from"] for row in own), own[-1]["to"]]
        axes.stairs([row["hmc_density"] for row in own], edges, fill=True, color=GREY)
        axes.stairs([row["density"] for row in own], edges, color=COLOURS[own[0]["site"]], linewidth=1.5)
        axes.set_title(f"cell {k}, site {own[0]['site']}", fontsize=8, color=DARK)
        axes.set_yticks([])
        axes.tick_params(labelsize=7, colors=DARK)
        axes.spines[["top", "right", "left"]].set_visible(False)
    figure.suptitle("Marginals: federated Zig-Zag (lines) and HMC (filled)", fontsize=11, fontweight="bold", color=DARK)
    return figure


def draw_large(rows: list[dict[str, Any]], side: int) -> Figure:
    """Means of all cells under both, and their differences in standard errors."""
    figure = Figure(figsize=(9.0, 4.2), layout="constrained")
    axes = axes_of(figure, 1, 2, 1, title=f"{side} × {side} cells: means", x="HMC", y="federated Zig-Zag")
    means = np.array([[row["hmc_mean"], row["mean"]] for row in rows])
    axes.plot(*[[means.min(), means.max()]] * 2, color=GREY, linewidth=1)
    for m, colour in enumerate(COLOURS[:4]):
        own = np.array([row["site"] == m for row in rows])
        axes.plot(*means[own].T, ".", color=colour, markersize=4, label=f"site {m}")
    axes.legend(frameon=False, fontsize=8, loc="upper left", markerscale=2)
    axes = axes_of(figure, 1, 2, 2, title="Differences", x="standard errors", y="density")
    z = np.array([row["z"] for row in rows])
    axes.hist(z, np.linspace(-5, 5, 41).tolist(), density=True, color=COLOURS[0], zorder=2, label="cells")
    x = np.linspace(-5, 5, 200)
    axes.plot(x, np.exp(-(x**2) / 2) / np.sqrt(2 * np.pi), color=DARK, zorder=3, label="standard normal")
    axes.legend(frameon=False, fontsize=8, loc="upper left")
    return figure


class Outcome(NamedTuple):
    """The results on one grid."""

    cells: list[dict[str, Any]]
    distances: list[dict[str, Any]]
    summary: list[dict[str, Any]]
    floor: Ratio

    @property
    def worst(self) -> float:
        """Largest difference of a mean in standard errors, over the largest that chance allows."""
        return max(abs(row["z"]) for row in self.cells) / z_limit(len(self.cells))


def one_grid(study: Study, size: Size, figures: Callable[[fp.Posterior, Any, Grid, list], None]) -> Outcome:
    """Both samplers, what each cell and each site comes to, and the figures."""
    found = grid(size.side)
    post, draws = simulate(size, found)
    cells = cells_table(post, draws, found)
    study.table(f"cox-{size.side}", cells)
    figures(post, draws, found, cells)
    distances = measure(post, Exact(draws), seed=SEED, side=size.side)
    floor, summary = ratio(distances), []
    for m, block in enumerate(found.blocks):
        # A plan of S segments for k cells and its answer, for one run.
        message = 8 * (1 + len(block) + int(post.settings["segments"]) * (1 + len(block))) + 13
        summary.append(
            {"side": size.side, "site": m, "cells": len(block), "runs": size.runs, "rounds": post.rounds,
             "messages": int(post.messages[m]), "bytes": int(post.bytes[m]),
             "bytes_per_round_and_run": float(post.bytes[m] / post.rounds / size.runs),
             "bytes_if_asked_every_round": post.rounds * size.runs * message,
             "events_per_time": float(post.events.mean() / post.duration), "least_ess": min(row["ess"] for row in cells),
             "distance_over_floor": floor.value, "distance_over_floor_error": floor.error}
        )  # fmt: skip
    return Outcome(cells, distances, summary, floor)


def run(study: Study) -> Verdict:
    """Both grids."""
    small, large = QUICK if study.quick else FULL

    def small_figures(post, draws, found, cells):
        study.figure("cox-graph", draw_graph(found))
        rows = marginals(post, draws, found)
        study.table("cox-marginals", rows)
        study.figure("cox-marginals", draw_marginals(rows, found.side))

    def large_figures(post, draws, found, cells):
        study.figure("cox-large", draw_large(cells, large.side))

    drawn = {small: small_figures, large: large_figures}
    few, many = (one_grid(study, size, drawn[size]) for size in study.track((small, large), "cox:"))
    study.table("cox", few.summary + many.summary)
    study.table("cox-distances", few.distances + many.distances)
    off, worst, last = bias(few.distances), max(few.worst, many.worst), many.summary[-1]
    return Verdict(
        "cox",
        worst <= 1 and few.floor.on_the_floor and many.floor.on_the_floor and off.none_seen,
        f"mean marginal 1-Wasserstein distance to HMC over that of exact samples of the same effective size "
        f"{few.floor.value:.2f} on {small.side}×{small.side} and {many.floor.value:.2f} on {large.side}×{large.side} cells; "
        f"pooled means within {off}, means of {large.side**2} cells within {worst:.2f} of the largest difference that "
        f"chance allows; a site got and sent {last['bytes'] / 1e6:.1f} MB in {last['rounds']} rounds for {large.runs} runs.",
    )


def z_limit(cells: int) -> float:
    """A deviation that the largest of ``n`` standard normals exceeds with probability 1e-4."""
    from scipy.stats import norm

    return float(norm.isf(0.5e-4 / cells))
