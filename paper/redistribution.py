"""A prior divided among the sites in random parts (paper, Algorithm 4 and appendix D), and what it hides."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float
from matplotlib.figure import Figure
from numpy import ndarray

import fedpdmc as fp
from paper.distances import bias, by, draw_distances, measure, range_of, ratio
from paper.eavesdropper import Overheard, Profile, average, estimate, listen, prior_part
from paper.hmc import hmc
from paper.logistic import paper_problem, size, zigzag
from paper.problems import Regression
from paper.result_folder import COLOURS, DARK, Study, Verdict, axes_of, line_of, log_values

RATE = 0.1
# The federation that is eavesdropped on: small sites, whose gradients do not dwarf that of the prior.
RECORDS, SITES = 100, 5
# Bins of the coordinate that is shown: the one with the largest posterior mean, where the prior pulls.
BINS = 8
WITHOUT, IGNORED, MEAN_OFF, READ = (
    "not redistributed",
    "redistributed: prior ignored",
    "redistributed: mean part subtracted",
    "redistributed: parts read in the plans",
)
# Root mean square of a listener's errors, in standard errors, above which chance does not explain it.
MISLED = 2.0


class Listening(NamedTuple):
    """Intercepted messages, and the target of the attack: ``E(∂_i U_m | x_i)`` of the first site in bins."""

    plain: Overheard
    mixed: Overheard
    coordinate: int
    edges: Float[ndarray, " b1"]
    truth: Float[ndarray, " b"]

    def profiles(self, count: int) -> dict[str, Profile]:
        """Estimates of an eavesdropper from given numbers of plans.

        The parts are uniform on the simplex, with mean 1/M. An eavesdropper who knows the public prior subtracts
        ``x_i/M``; one who also reads the parts in the plans subtracts the exact slope of each part.
        """
        mixed, place = self.mixed.first(count), (self.coordinate, self.edges)
        found = estimate(mixed, *place)
        return {
            WITHOUT: estimate(self.plain.first(count), *place),
            IGNORED: found,
            MEAN_OFF: found.less(prior_part(mixed, 1 / SITES, *place)),
            READ: found.less(prior_part(mixed, mixed.share, *place)),
        }


def overhear(problem: Regression, hmc_draws: int, chains: int, duration: float) -> Listening:
    """One site's messages in a federation with and without redistribution, from states in stationarity."""
    small = Regression(problem.X[:RECORDS], problem.y[:RECORDS])
    draws = np.concatenate(hmc(small, small.reference(), seed=64, chains=16, draws=hmc_draws))
    starts = draws[np.random.default_rng(65).integers(len(draws), size=chains)]
    i = int(np.argmax(np.abs(draws.mean(0))))
    edges = np.quantile(draws[:, i], np.linspace(0.01, 0.99, BINS + 1))
    own = Regression(small.X[: RECORDS // SITES], small.y[: RECORDS // SITES])
    slopes = (1 / (1 + np.exp(-draws @ own.X.T)) - own.y) @ own.X[:, i]
    plain, mixed = (
        listen(small, SITES, prior, starts, duration, seed=66)
        for prior in (small.prior, fp.Redistributed(small.prior, RATE))
    )
    return Listening(plain, mixed, i, edges, average(slopes, draws[:, i], edges))


def draw_listener(heard: Listening, found: dict[str, Profile], learning: list[dict[str, Any]]) -> Figure:
    """The gradient as it is and as it was overheard; and how well, by the number of plans."""
    i = heard.coordinate
    figure = Figure(figsize=(9.6, 4.6), layout="constrained")
    axes = axes_of(
        figure, 1, 2, 1, title="What a listener reconstructs", x=f"x{i}", y=f"∂U/∂x{i} of one site, given x{i}"
    )
    axes.plot(found[WITHOUT].centers, heard.truth, color=DARK, label="the site's own")
    for place, (colour, (name, profile)) in enumerate(zip(COLOURS, found.items(), strict=False)):
        # Side by side, so that error bars do not hide each other.
        x = profile.centers + (place - 1.5) * 0.12 * np.diff(heard.edges)
        axes.errorbar(x, profile.slope, 2 * profile.error, fmt="o", color=colour, markersize=4, capsize=2, label=name)
    axes = axes_of(figure, 1, 2, 2, title="How well", x="plans overheard", y="relative error")
    for colour, (name, rows) in zip(COLOURS, by(learning, "listener").items(), strict=False):
        axes.plot([row["plans"] for row in rows], [row["error"] for row in rows], marker="o", color=colour, label=name)
    axes.set_xscale("log")
    log_values(axes)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    return figure


def eavesdrop(study: Study, problem: Regression) -> list[dict[str, Any]]:
    """The second figure, and the listeners' errors by the number of plans."""
    heard = overhear(problem, size(study).hmc_draws, *((4000, 1.0) if study.quick else (4000, 4.0)))
    most, learning, found = min(len(heard.plain.length), len(heard.mixed.length)), [], {}
    for count in np.unique(np.geomspace(most / 100, most, 7).astype(int)):
        found = heard.profiles(int(count))
        for name, profile in found.items():
            learning.append(
                {"listener": name, "plans": int(count), "error": profile.distance(heard.truth),
                 "misfit": profile.misfit(heard.truth)}
            )  # fmt: skip
    study.table("redistribution-listener", learning)
    study.table("redistribution-profile", [
        {"listener": name, "from": float(low), "to": float(high), "truth": float(truth), "slope": float(slope),
         "error": float(error)}
        for name, profile in found.items()
        for low, high, truth, slope, error in zip(
            heard.edges, heard.edges[1:], heard.truth, profile.slope, profile.error, strict=False
        )
    ])  # fmt: skip
    study.figure("redistribution-listener", draw_listener(heard, found, learning))
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
    last = {row["listener"]: row for row in eavesdrop(study, problem)}
    misled = {name: row["misfit"] > MISLED for name, row in last.items()}
    percent = {name: f"{100 * row['error']:.0f} %" for name, row in last.items()}
    ratios, off = [ratio(part) for part in by(rows, "sites").values()], bias(rows, "sites")
    return Verdict(
        "redistribution",
        all(found.on_the_floor for found in ratios)
        and off.none_seen
        and misled == {WITHOUT: False, IGNORED: True, MEAN_OFF: False, READ: False},
        f"{want.runs} Zig-Zag runs with the prior redistributed at rate {RATE}, M = {line_of(by(rows, 'sites'))}: mean "
        f"marginal 1-Wasserstein distance to HMC over that of exact samples of the same effective size {range_of(ratios)}; "
        f"pooled means within {off}. A listener to one of {SITES} sites finds its gradient up to {percent[WITHOUT]} "
        f"without and {percent[IGNORED]} with redistribution, {percent[MEAN_OFF]} once the public mean part is subtracted, "
        f"{percent[READ]} with the parts read in the plans.",
    )
