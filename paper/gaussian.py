"""Means of a Gaussian over M sites (paper, 6.1): how the switching rate and the effective samples depend on M."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

import fedpdmc as fp
from paper.result_folder import COLOURS, DARK, GREY, Study, Verdict, axes_of, log_sites, log_values

SEED, TRUTH = 61, 0.5
# Standard errors within which the mean rate must lie of its expectation.
Z_LIMIT = 4.0


class Size(NamedTuple):
    """How much to do."""

    records: int
    dim: int
    sites: tuple[int, ...]
    runs: int
    chains: int
    duration: float


FULL = Size(50, 10, (1, 2, 5, 10, 25, 50), 20, 4, 20.0)
QUICK = Size(10, 3, (1, 10), 8, 4, 20.0)


def expected_rate(size: Size, sites: int) -> float:
    """``d √(NM/(2π))``: over data and posterior, ``U_m'`` has mean zero and variance ``N/M² + (N/M)(1 − 1/M) = N/M``.

    Each site and coordinate then flips at rate ``E(U_m')_+ = √(N/M)/√(2π)``, and there are ``M d`` of them.
    """
    return size.dim * float(np.sqrt(size.records * sites / (2 * np.pi)))


def one_run(size: Size, sites: int, run: int) -> dict[str, Any]:
    """A new data set, with chains that start in its posterior."""
    rng = np.random.default_rng([SEED, run])
    y = rng.normal(TRUTH, 1.0, (size.records, size.dim))
    start = y.mean(0) + rng.normal(size=(size.chains, size.dim)) / np.sqrt(size.records)
    parts = [fp.Site(fp.models.gaussian_mean(part), name=f"site{k}") for k, part in enumerate(np.split(y, sites))]
    post = fp.sample(
        parts, dynamics=fp.ZigZag(), reference="identity", chains=size.chains, duration=size.duration, burn_in=0.0,
        init=start, seed=run, progress=False,
    )  # fmt: skip
    ess = float(np.mean([value for name, value in post.ess().items() if name != "energy"]))
    # One pass of a site is 1/M of a full gradient.
    passes = post.gradient_evaluations / sites
    return {
        "sites": sites,
        "run": run,
        "rate": float(post.events.mean() / post.duration),
        "ess": ess,
        "ess_per_full_gradient": ess / float(passes.sum()),
        "ess_per_full_gradient_parallel": ess / float(passes.max()),
        "mean_error": float(np.sqrt(size.records) * np.abs(post.mean() - y.mean(0)).mean()),
    }


def summary(size: Size, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means over runs with standard errors, next to the theoretical values."""
    table = []
    for m in size.sites:
        own = [row for row in rows if row["sites"] == m]
        line = {"sites": m, "theory": expected_rate(size, m), "paper_order": size.dim * np.sqrt(size.records * m)}
        for key in ("rate", "ess_per_full_gradient", "ess_per_full_gradient_parallel"):
            values = np.array([row[key] for row in own])
            line |= {key: float(values.mean()), f"{key}_error": float(values.std(ddof=1) / np.sqrt(len(values)))}
        table.append(line | {"z": (line["rate"] - line["theory"]) / line["rate_error"]})
    return table


def draw_rates(table: list[dict[str, Any]]) -> Figure:
    """Figure 1."""
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = axes_of(figure, title="Gaussian: switching rate", x="sites M", y="switches per unit of process time")
    m = np.geomspace(table[0]["sites"], table[-1]["sites"], 60)
    scale = table[0]["theory"] / np.sqrt(table[0]["sites"])
    order = table[0]["paper_order"] / np.sqrt(table[0]["sites"])
    axes.plot(m, order * np.sqrt(m), color=GREY, linestyle=(0, (4, 3)), label="paper's order: $\\sigma_0\\sqrt{NM}$")
    axes.plot(m, scale * np.sqrt(m), color=DARK, label="exact: $d\\,\\sqrt{NM/(2\\pi)}$")
    axes.errorbar(
        [row["sites"] for row in table], [row["rate"] for row in table], [2 * row["rate_error"] for row in table],
        fmt="o", color=COLOURS[0], capsize=3, label="runs: mean ± 2 standard errors",
    )  # fmt: skip
    log_sites(axes, [row["sites"] for row in table])
    log_values(axes)
    axes.legend(frameon=False, fontsize=9)
    return figure


def draw_efficiency(table: list[dict[str, Any]]) -> Figure:
    """Figure 2."""
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = axes_of(figure, title="Gaussian: effective samples", x="sites M", y="ESS per full gradient evaluation")
    m = [row["sites"] for row in table]
    for key, label, colour in (
        ("ess_per_full_gradient", "one after the other", COLOURS[1]),
        ("ess_per_full_gradient_parallel", "sites in parallel", COLOURS[0]),
    ):
        error = [2 * row[f"{key}_error"] for row in table]
        axes.errorbar(m, [row[key] for row in table], error, marker="o", color=colour, capsize=3, label=label)
    log_sites(axes, m)
    log_values(axes)
    axes.legend(frameon=False, fontsize=9)
    return figure


def run(study: Study) -> Verdict:
    """Figures 1 and 2 and their numbers."""
    size = QUICK if study.quick else FULL
    rows = []
    for m in study.track(size.sites, "gaussian, M ="):
        rows += [one_run(size, m, run) for run in range(size.runs)]
    table = summary(size, rows)
    study.table("gaussian-runs", rows)
    study.table("gaussian", table)
    study.figure("gaussian-rate", draw_rates(table))
    study.figure("gaussian-ess", draw_efficiency(table))
    worst = max(abs(row["z"]) for row in table)
    first, last = table[0], table[-1]
    slower = last["ess_per_full_gradient"] / first["ess_per_full_gradient"]
    faster = last["ess_per_full_gradient_parallel"] / first["ess_per_full_gradient_parallel"]
    return Verdict(
        "gaussian",
        worst <= Z_LIMIT and slower < 1 < faster,
        f"mean switching rate of {size.runs} data sets within {worst:.1f} standard errors of d√(NM/2π) for every M; from "
        f"M = {first['sites']} to {last['sites']} the ESS per full gradient changes by a factor {slower:.2f} in sequence "
        f"and {faster:.1f} in parallel.",
    )
