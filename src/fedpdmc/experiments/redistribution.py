"""A prior that is dealt to the sites in random parts (paper, Algorithm 4 and appendix), and what it hides."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.figure import Figure

import fedpdmc as fp
from fedpdmc.experiments.distances import Exact, by, draw_distances, measure, range_of, ratio
from fedpdmc.experiments.eavesdropper import Overheard, Profile, average, error, estimate, listen
from fedpdmc.experiments.logistic import paper_problem, size, zigzag
from fedpdmc.experiments.problems import Regression
from fedpdmc.experiments.study import COLOURS, DARK, Study, Verdict, axes_of

RATE = 0.1
# The site that is listened to has this many records, in a federation of so many sites.
RECORDS, SITES = 20, 5
# Bins of the coordinate that is shown: the one with the largest posterior mean, where the prior pulls.
BINS = 8


def overhear(problem: Regression, exact: Exact, deals: int, each: int) -> dict[str, Overheard]:
    """Arrivals of one site from states in stationarity: with no share of the prior, and with shares as they are dealt."""
    site = fp.Site(fp.models.logistic(problem.X[:RECORDS], problem.y[:RECORDS]), name="overheard")
    rng = np.random.default_rng(64)
    horizon = float(0.5 * exact.sd.mean())
    starts = [exact.pool[rng.integers(len(exact.pool), size=each)] for _ in range(deals)]
    shares = rng.dirichlet(np.ones(SITES), deals)[:, 0]
    return {
        "plain": Overheard.joined([listen(site, start, horizon, 0.0, seed) for seed, start in enumerate(starts)]),
        "redistributed": Overheard.joined(
            [
                listen(site, start, horizon, float(w), seed)
                for seed, (start, w) in enumerate(zip(starts, shares, strict=True))
            ]
        ),
    }


def site_gradient(problem: Regression, x: np.ndarray) -> np.ndarray:
    """The gradient that the site would hide, at many points."""
    X, y = problem.X[:RECORDS], problem.y[:RECORDS]
    return (1 / (1 + np.exp(-x @ X.T)) - y) @ X


def profiles(
    problem: Regression, exact: Exact, heard: dict[str, Overheard]
) -> tuple[int, np.ndarray, dict[str, Profile]]:
    """The coordinate shown, the truth in bins, and what the listener makes of it.

    The weights are uniform on the simplex, so their mean is 1/M: the listener who knows the public prior takes its mean
    part off, ``E(g_i + α x_i | x_i) − x_i/M``.
    """
    draws = exact.reference
    i = int(np.argmax(np.abs(draws.mean(0))))
    edges = np.quantile(draws[:, i], np.linspace(0.01, 0.99, BINS + 1))
    truth = average(site_gradient(problem, draws)[:, i], draws[:, i], edges)
    plain, mixed = (estimate(heard[key], i, edges) for key in ("plain", "redistributed"))
    corrected = Profile(mixed.centers, mixed.slope - mixed.centers / SITES, mixed.weight)
    return i, truth, {"plain": plain, "redistributed": mixed, "redistributed, mean part taken off": corrected}


def draw_listener(i: int, truth: np.ndarray, found: dict[str, Profile], learning: list[dict[str, Any]]) -> Figure:
    """The gradient as it is and as it was overheard; and how well, by the number of plans."""
    figure = Figure(figsize=(9.6, 4.2), layout="constrained")
    axes = axes_of(
        figure, 1, 2, 1, title="What a listener reconstructs", x=f"x{i}", y=f"∂U/∂x{i} of one site, on average"
    )
    axes.plot(found["plain"].centers, truth, color=DARK, label="the site's own")
    for colour, (name, profile) in zip(COLOURS, found.items(), strict=False):
        axes.plot(profile.centers, profile.slope, "o", color=colour, markersize=5, label=name)
    axes.legend(frameon=False, fontsize=8)
    axes = axes_of(figure, 1, 2, 2, title="How well", x="plans overheard", y="relative error")
    for colour, (name, rows) in zip(COLOURS, by(learning, "prior").items(), strict=False):
        axes.plot([row["plans"] for row in rows], [row["error"] for row in rows], marker="o", color=colour, label=name)
    axes.set_xscale("log")
    axes.set_yscale("log")
    return figure


def eavesdrop(study: Study, problem: Regression, exact: Exact) -> list[dict[str, Any]]:
    """The second figure, and the listener's error by the number of plans."""
    deals, each = (10, 200) if study.quick else (50, 4000)
    heard, learning = overhear(problem, exact, deals, each), []
    rng = np.random.default_rng(65)
    order = rng.permutation(deals * each)
    heard = {key: Overheard(*(column[order] for column in value)) for key, value in heard.items()}
    for count in np.unique(np.geomspace(deals * each / 100, deals * each, 7).astype(int)):
        i, truth, found = profiles(problem, exact, {key: value.first(count) for key, value in heard.items()})
        for name, profile in found.items():
            learning.append({"prior": name, "plans": int(count), "error": error(profile, truth)})
    study.table("redistribution-listener", learning)
    study.figure("redistribution-listener", draw_listener(i, truth, found, learning))
    return learning


def run(study: Study) -> Verdict:
    """The appendix's figure, and what a listener learns."""
    want = size(study)
    problem, exact = paper_problem(want)
    rows = []
    for m in study.track(want.sites[1:] if study.quick else want.sites, "redistribution, M ="):
        post = zigzag(problem.sites(m), fp.Redistributed(problem.prior, RATE), exact, want, seed=m)
        rows += measure(post, exact, seed=1000 * m, sites=m, events=float(post.events.mean()), rounds=post.rounds)
    study.table("redistribution", rows)
    figure = Figure(figsize=(7.0, 4.2), layout="constrained")
    draw_distances(figure, rows, f"Prior redistributed at rate {RATE}: distance to HMC")
    study.figure("redistribution", figure)
    last = {row["prior"]: row["error"] for row in eavesdrop(study, problem, exact)}
    ratios = [ratio(part) for part in by(rows, "sites").values()]
    return Verdict(
        "redistribution",
        all(found.on_the_floor for found in ratios),
        f"{want.runs} Zig-Zag runs with the prior dealt anew at rate {RATE}: mean marginal 1-Wasserstein distance to HMC "
        f"over that of exact samples of the same effective size {range_of(ratios)}. A listener finds the site's gradient up "
        f"to {100 * last['plain']:.0f} % without and {100 * last['redistributed']:.0f} % with redistribution, "
        f"{100 * last['redistributed, mean part taken off']:.0f} % once the public mean part is taken off.",
    )
