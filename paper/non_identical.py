"""Sites that are not alike (paper, claim iii): the same records spread in unequal ways have one posterior."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure
from numpy import ndarray

from paper.distances import bias, by, measure, range_of, ratio
from paper.logistic import paper_problem, size, zigzag
from paper.problems import Regression
from paper.result_folder import COLOURS, GREY, Study, Verdict, axes_of

SITES, TINY = 5, 3


def splits(problem: Regression) -> dict[str, list[ndarray]]:
    """The records of each site, by scenario."""
    rows, ones = np.arange(len(problem.y)), int(problem.y.sum())
    # As many sites of each class as its share of the records, at least one: no site has records of both.
    of_ones = int(np.clip(round(SITES * ones / len(rows)), 1, SITES - 1))
    tiny = [rows[:TINY], *np.array_split(rows[TINY:], SITES - 1)]
    return {
        "identical": np.array_split(rows, SITES),
        "covariate shift": np.array_split(np.argsort(problem.X[:, 1], kind="stable"), SITES),
        "one class each": [
            *np.array_split(rows[problem.y == 0], SITES - of_ones),
            *np.array_split(rows[problem.y == 1], of_ones),
        ],
        "one tiny site": tiny,
        "unequal priors": tiny,
    }


def run(study: Study) -> Verdict:
    """Distances to HMC by scenario; in the last one every site holds a part of the prior of its own."""
    want = size(study)
    problem, exact = paper_problem(want)
    scenarios, rows = splits(problem), []
    for seed, scenario in enumerate(study.track(scenarios, "non-identical:")):
        at = "sites" if scenario == "unequal priors" else "coordinator"
        post = zigzag(problem.sites(scenarios[scenario]), problem.prior, exact, want, seed, prior_at=at)
        rate = float(post.events.mean() / post.duration)
        rows += measure(post, exact, 1000 * seed, scenario=scenario, rate=rate, rounds=post.rounds)
    study.table("non-identical", rows)
    ratios = {name: ratio(part) for name, part in by(rows, "scenario").items()}
    figure = Figure(figsize=(7.0, 3.6), layout="constrained")
    axes = axes_of(figure, title="Sites that are not alike", x="distance to HMC / floor", y="")
    axes.axvline(1.0, color=GREY, linestyle=(0, (2, 2)))
    for place, (name, found) in enumerate(reversed(ratios.items())):
        axes.errorbar(found.value, place, xerr=2 * found.error, fmt="o", color=COLOURS[0], capsize=3)
        rate = by(rows, "scenario")[name][0]["rate"]
        axes.annotate(f"{rate:.0f} switches a unit of time", (0.99, place), xycoords=("axes fraction", "data"),
                      ha="right", va="center", fontsize=8)  # fmt: skip
    axes.set_yticks(range(len(ratios)), list(reversed(ratios)))
    axes.set_xlim(0.0, 2.0)
    study.figure("non-identical", figure)
    off = bias(rows, "scenario")
    return Verdict(
        "non-identical",
        all(found.on_the_floor for found in ratios.values()) and off.none_seen,
        f"{SITES} sites, {len(ratios)} ways to spread the same records and the prior: mean marginal 1-Wasserstein distance "
        f"to HMC over that of exact samples of the same effective size {range_of(list(ratios.values()))}; pooled means "
        f"within {off}.",
    )
