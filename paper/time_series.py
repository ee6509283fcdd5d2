"""AR(1) with Student-t noise over M sites (paper, 6.3), under bounds that hold for every series."""

from __future__ import annotations

from typing import NamedTuple

from matplotlib.figure import Figure

import fedpdmc as fp
from paper.distances import Exact, bias, by, draw_distances, measure, range_of, ratio
from paper.hmc import hmc
from paper.problems import series
from paper.result_folder import Study, Verdict, line_of

SEED = 63
PARAMETERS = ("x", "c")


class Size(NamedTuple):
    """How much to do."""

    count: int
    length: int
    degrees: tuple[float, ...]
    sites: tuple[int, ...]
    runs: int
    duration: float
    hmc_draws: int


# The paper gives no sizes. Process time is in Laplace coordinates, where a posterior standard deviation is about one.
FULL = Size(20, 50, (1.0, 2.0, 4.0), (1, 2, 4, 5, 10, 20), 20, 1000.0, 3000)
QUICK = Size(4, 20, (1.0, 2.0, 4.0), (4,), 16, 200.0, 1000)


def run(study: Study) -> Verdict:
    """Figure 4 and its numbers."""
    size = QUICK if study.quick else FULL
    rows = []
    figure = Figure(figsize=(4.6 * len(size.degrees), 4.2), layout="constrained")
    for place, df in enumerate(size.degrees):
        problem = series(size.count, size.length, df, SEED)
        reference = problem.reference()
        draws = hmc(problem, reference, seed=SEED, chains=16, draws=size.hmc_draws)
        exact, own = Exact(draws), []
        for m in study.track(size.sites, f"time series, ν = {df:g}, M ="):
            post = fp.sample(
                problem.sites(m), dynamics=fp.ZigZag(), reference=fp.Reference(reference.center, reference.scale_tril),
                chains=size.runs, duration=size.duration, burn_in=0.0, init=exact.starts(size.runs), seed=m,
                names=PARAMETERS, progress=False,
            )  # fmt: skip
            own += measure(post, exact, seed=1000 * m, df=df, sites=m, rounds=post.rounds)
        rows += own
        draw_distances(figure, own, f"AR(1), ν = {df:g}: distance to HMC", 1, len(size.degrees), place + 1)
    study.table("time-series", rows)
    study.figure("time-series", figure)
    ratios = [ratio(part) for own in by(rows, "df").values() for part in by(own, "sites").values()]
    off = bias(rows, "df", "sites")
    return Verdict(
        "time-series",
        all(found.on_the_floor for found in ratios) and off.none_seen,
        f"{size.runs} Zig-Zag runs against HMC, ν = {line_of(size.degrees)}, M = "
        f"{line_of(size.sites)}: mean marginal 1-Wasserstein distance over that of exact samples of the same "
        f"effective size {range_of(ratios)}; pooled means within {off}.",
    )
