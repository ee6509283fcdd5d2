"""Logistic regression over M sites (paper, 6.2): distances to HMC do not depend on how the records are spread."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from matplotlib.figure import Figure

import fedpdmc as fp
from paper.distances import Exact, bias, by, draw_distances, measure, range_of, ratio
from paper.hmc import hmc
from paper.problems import Regression, regression
from paper.result_folder import Study, Verdict, line_of

SEED = 62


class Size(NamedTuple):
    """How much to do."""

    records: int
    dim: int
    sites: tuple[int, ...]
    runs: int
    duration: float
    hmc_draws: int


FULL = Size(1000, 6, (1, 2, 5, 10, 20, 50), 20, 100.0, 3000)
QUICK = Size(100, 3, (1, 5), 16, 60.0, 1000)


def size(study: Study) -> Size:
    """The sizes of this experiment."""
    return QUICK if study.quick else FULL


@functools.cache
def paper_problem(size: Size) -> tuple[Regression, Exact]:
    """The records, and a large HMC sample of the posterior that they have together."""
    problem = regression(size.records, size.dim, SEED)
    draws = hmc(problem, problem.reference(), seed=SEED, chains=16, draws=size.hmc_draws)
    return problem, Exact(draws)


def zigzag(sites: list[fp.Site], prior: Any, exact: Exact, size: Size, seed: int, **options: Any) -> fp.Posterior:
    """The paper's runs: Zig-Zag without reference or control variates, one chain a run, started in the posterior."""
    return fp.sample(
        sites, prior, dynamics=fp.ZigZag(), reference="identity", chains=size.runs, duration=size.duration, burn_in=0.0,
        init=exact.starts(size.runs), seed=seed, progress=False, **options,
    )  # fmt: skip


def run(study: Study) -> Verdict:
    """Figure 3 and its numbers."""
    want = size(study)
    problem, exact = paper_problem(want)
    rows = []
    for m in study.track(want.sites, "logistic, M ="):
        post = zigzag(problem.sites(m), problem.prior, exact, want, seed=m)
        rows += measure(post, exact, seed=1000 * m, sites=m, events=float(post.events.mean()), rounds=post.rounds)
    study.table("logistic", rows)
    figure = Figure(figsize=(7.0, 4.2), layout="constrained")
    draw_distances(figure, rows, "Logistic regression: distance to HMC")
    study.figure("logistic", figure)
    ratios, off = [ratio(part) for part in by(rows, "sites").values()], bias(rows, "sites")
    return Verdict(
        "logistic",
        all(found.on_the_floor for found in ratios) and off.none_seen,
        f"{want.runs} Zig-Zag runs to T = {want.duration:g} against HMC, M = {line_of(want.sites)}: mean marginal "
        f"1-Wasserstein distance over that of exact samples of the same effective size {range_of(ratios)}; pooled means "
        f"within {off}.",
    )
