"""What a privacy budget buys: feasible combinations of excess rate, observed time, horizon, rounds and effective samples.

All in units of posterior standard deviations, for the Zig-Zag. With M sites every coordinate flips at the excess rate
``R = M ρ``; a Gaussian coordinate then needs ``1.6 + 4 R`` units of process time for an effective sample (for large R the
path is a diffusion with constant ``1/(2R)``). A site is observed for longer than the process runs: it answers up to its own
arrival or the horizon H, even if another site's arrival is earlier. Arrivals due to the records come in addition; they are
few with control variates. Reference, burn-in and reserve take what the share `HONEST` leaves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fedpdmc.errors import InputError
from fedpdmc.privacy.accountant import Sensitivity, run_cap
from fedpdmc.validation import positive, probability

FACTORS = {"replace": 2.0, "add-remove": 1.0, "label": 1.0}
# Excess rates of the search, in units of the sensitivity.
EXCESSES = tuple(10 ** (k / 10) for k in range(-10, 41))
# Horizons of the search, in units of the mean time between arrivals.
HORIZONS = (2.0, 1.0, 0.5, 0.25, 0.1)
# Process time for an effective sample: without excess flips, and per unit of their rate.
MIXING = (1.6, 4.0)
# A documented run of the exact chain reaches this share of the samples that its observed time allows: the reference,
# burn-in and a reserve for path length use some of that time, and a noisy control variate leaves arrivals due to the
# records. Measured until the budget was spent (`python -m benchmarks.private_chain`): 0.45 ± 0.02 in six runs with 2
# sites of 30,000 records, d = 3, ε = 4 and δ = 1e-5; from 0.45 to 0.79 in one run each of six other settings (d from 2
# to 6, 30,000 and 100,000 records, ε from 1 to 8).
HONEST = 0.45
# Fewest effective samples that are reported.
LEAST_SAMPLES = 1.0


class Question(NamedTuple):
    """A question to the planner.

    Attributes
    ----------
    records : int
        Records of the smallest site.
    sites, dim : int
    epsilon, delta : float
    sensitivity : float
        ``K_2`` of one record in posterior standard deviations.
    samples : float
        Effective samples wanted.
    """

    records: int
    sites: int
    dim: int
    epsilon: float
    delta: float
    sensitivity: float
    samples: float


class Choice(NamedTuple):
    """One way to spend a budget.

    Attributes
    ----------
    excess : float
        ρ of every site.
    cap : float
        T: observed time that the budget covers, over all chains.
    horizon : float
        H of a plan.
    process_time : float
        Process time over all chains that this leaves.
    rounds : float
        Rounds with a single chain; C chains need 1/C of them.
    samples : float
        Effective samples.
    """

    excess: float
    cap: float
    horizon: float
    process_time: float
    rounds: float
    samples: float


def usual_sensitivity(
    records: int, sites: int, dim: int, neighbours: str = "replace", curvature: float = 0.15
) -> float:
    """``K_2`` in posterior standard deviations for covariates of unit norm, ``f √(d/(N M w))`` with w the mean curvature.

    The information of N M records of norm one is about ``N M w/d`` in every direction, and a record points in one of them.
    This assumes records spread evenly over directions; it is an estimate for planning. For logistic regression ``w ≤ ¼``.
    """
    if neighbours not in FACTORS:
        raise InputError("neighbours", repr(neighbours), f"Give one of {', '.join(map(repr, FACTORS))}.")
    return FACTORS[neighbours] * math.sqrt(dim / (positive("records", records) * sites * curvature))


def waste(arrivals: float, horizon: float, sites: int) -> float:
    """The ratio of a site's observed time to process time.

    With Λ arrivals per unit of time in all, the process runs for ``(1 − e^{−ΛH})/Λ`` in a round, and each of M equal
    sites is observed for ``(1 − e^{−ΛH/M})/(Λ/M)``: at most M times as long, and equally long with one site.
    """
    own = arrivals / sites
    seen = -math.expm1(-own * horizon) / own
    ran = -math.expm1(-arrivals * horizon) / arrivals
    return seen / ran


def choices(question: Question) -> list[Choice]:
    """Ways to spend the budget: the outcome for every excess rate and horizon."""
    k = positive("sensitivity", question.sensitivity)
    probability("delta", question.delta)
    one = Sensitivity(k, k * math.sqrt(question.dim), k)
    found = []
    for multiple in EXCESSES:
        rho = multiple * k
        cap = run_cap(one, rho, question.epsilon, question.delta)
        total = question.sites * rho
        arrivals = question.dim * total
        for share in HORIZONS:
            horizon = share / arrivals
            process = cap / waste(arrivals, horizon, question.sites)
            rounds = process * arrivals / -math.expm1(-share)
            samples = HONEST * process / (MIXING[0] + MIXING[1] * total)
            found.append(Choice(rho, cap, horizon, process, rounds, samples))
    return found


def frontier(question: Question) -> list[Choice]:
    """The Pareto front in rounds and samples of the choices with at least one effective sample, fewest rounds first."""
    best, kept = 0.0, []
    for choice in sorted(choices(question), key=lambda c: (c.rounds, -c.samples)):
        if choice.samples > best and choice.samples >= LEAST_SAMPLES:
            best = choice.samples
            kept.append(choice)
    return kept


def answer(question: Question) -> Choice | None:
    """The choice with the fewest rounds that reaches the effective samples wanted, or None."""
    return next((c for c in frontier(question) if c.samples >= question.samples), None)


def most_samples(question: Question) -> float:
    """The largest number of effective samples that the budget can buy, for any number of rounds."""
    return max(c.samples for c in choices(question))


def advice(question: Question) -> str:
    """The answer as text."""
    found, most = answer(question), most_samples(question)
    asked = (
        f"{question.sites} sites of {question.records:,} records, d = {question.dim}, epsilon = {question.epsilon:g} at "
        f"delta = {question.delta:g}, K = {question.sensitivity:.4g} posterior standard deviations"
    )
    if found is not None:
        return (
            f"Possible: {asked}: excess rate {found.excess:.4g} at every site, observed time {found.cap:.4g}, horizon "
            f"{found.horizon:.4g}, process time {found.process_time:.4g} over all chains, {found.rounds:,.0f} rounds "
            f"divided by the number of chains, {found.samples:,.1f} effective samples."
        )
    if most < LEAST_SAMPLES:
        return f"None: {asked}: not even one effective sample is possible, at any excess rate and any number of rounds."
    return (
        f"None: {asked}: {question.samples:g} effective samples are not possible; at most {most:,.1f} are, at any "
        "number of rounds."
    )


def table(question: Question, rows: int = 12) -> str:
    """The Pareto front as lines of text."""
    found = frontier(question)
    lines = [
        f"{'excess':>10} {'observed':>10} {'horizon':>10} {'process':>10} {'rounds x chains':>16} {'effective':>10}"
    ]
    step = max(1, len(found) // rows)
    for c in [*found[::step], *([] if (len(found) - 1) % step == 0 else found[-1:])]:
        lines.append(
            f"{c.excess:>10.4g} {c.cap:>10.4g} {c.horizon:>10.4g} {c.process_time:>10.4g} {c.rounds:>16,.0f} "
            f"{c.samples:>10.4g}"
        )
    return "\n".join(lines)


def plot(questions: Sequence[Question], path: Path) -> None:
    """Plot the fronts of several questions, rounds against effective samples."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4))
    for question in questions:
        found = frontier(question)
        axes.loglog(
            [c.rounds for c in found],
            [c.samples for c in found],
            label=f"{question.records:,} records, ε = {question.epsilon:g}",
        )
    axes.axhline(questions[0].samples, linestyle=":", color="grey")
    axes.set_xlabel("rounds × chains")
    axes.set_ylabel("effective samples")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
