"""What a privacy budget buys: feasible combinations of excess rate, observed time, horizon, rounds and effective samples.

All in units of posterior standard deviations, for the Zig-Zag. With M sites every coordinate flips at the excess rate
``R = M ρ``; a Gaussian coordinate then needs ``1.6 + 4 R`` units of process time for an effective sample (for large R the
path is a diffusion with constant ``1/(2R)``). A site is observed for longer than the process runs: it answers up to its own
arrival or the horizon H, even if another site's arrival is earlier. Arrivals due to the records come in addition; they are
few with control variates. Reference, burn-in and reserve take what the share `HONEST` leaves.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple

import numpy as np

from fedpdmc.privacy.accountant import (
    Sensitivity,
    account_limit,
    arrival_cost,
    best_bound,
    best_order,
    gaussian_limit,
    run_cap,
)
from fedpdmc.privacy.budget import Budget
from fedpdmc.privacy.gaussian_mechanism import LEAST_HONEST, noise_multiplier
from fedpdmc.privacy.sensitivity import Bounds, ModelFacts, largest_row, predictor_reach, row_bounds, slopes
from fedpdmc.validation import one_of, positive, probability

# The method that uses noisy derivatives alone.
PRIVATE_LAPLACE = "private-laplace"


class Schedule(NamedTuple):
    """Costs of the releases of a run, fixed in advance."""

    steps: tuple[float, ...]  # relative costs of the steps
    gradient: float  # the part of a step's cost that goes to the gradient; the rest goes to the Hessian
    # The share of the budget that is used if ``Budget(release=...)`` is zero. Zero: the run is refused.
    usual: float = 0.0


# Newton steps of a private reference.
REFERENCE = Schedule((1.0, 1.0, 1.0, 1.0), 0.5)
# The first step, at the prior's mean, only finds a start; the answer combines the others. Four steps are needed: with
# 4·10⁵ records the error of the answer was 0.13 posterior standard deviations after three steps and 4·10⁻⁴ after four.
# Later points are nearer to the parameters, where the log likelihood is closer to quadratic, so they get a larger share.
ONE_SHOT = Schedule((0.1, 0.2, 0.3, 0.4), 0.8, usual=1 - 2.0**-30)


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
    """A question to the planner."""

    records: int  # records of the smallest site
    sites: int
    dim: int
    epsilon: float
    delta: float
    sensitivity: float  # ``K_2`` of one record in posterior standard deviations
    samples: float  # effective samples wanted


class Choice(NamedTuple):
    """One way to spend a budget."""

    excess: float  # ρ of every site
    cap: float  # T: observed time that the budget covers, over all chains
    horizon: float  # H of a plan
    process_time: float  # process time over all chains that this leaves
    rounds: float  # rounds with a single chain; C chains need 1/C of them
    samples: float  # effective samples


def usual_sensitivity(
    records: int, sites: int, dim: int, neighbours: str = "replace", curvature: float = 0.15
) -> float:
    """``K_2`` in posterior standard deviations for covariates of unit norm, ``f √(d/(N M w))`` with w the mean curvature.

    The information of N M records of norm one is about ``N M w/d`` in every direction, and a record points in one of them.
    This assumes records spread evenly over directions; it is an estimate for planning. For logistic regression ``w ≤ ¼``.
    """
    factor = FACTORS[one_of("neighbours", neighbours, tuple(FACTORS))]
    return factor * math.sqrt(dim / (positive("records", records) * sites * curvature))


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
    return max(choice.samples for choice in choices(question))


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
    step = max(1, len(found) // rows)
    lines = [
        f"{'excess':>10} {'observed':>10} {'horizon':>10} {'process':>10} {'rounds x chains':>16} {'effective':>10}"
    ]
    shown = "{:>10.4g} {:>10.4g} {:>10.4g} {:>10.4g} {:>16,.0f} {:>10.4g}".format
    lines += [shown(*choice) for choice in found[::step] + ([] if (len(found) - 1) % step == 0 else found[-1:])]
    return "\n".join(lines)


def plot(questions: Sequence[Question], path: Path) -> None:
    """Plot the fronts of several questions, rounds against effective samples."""
    curves = {}
    for question in questions:
        found = frontier(question)
        label = f"{question.records:,} records, ε = {question.epsilon:g}"
        curves[label] = [c.rounds for c in found], [c.samples for c in found]
    _plot(curves, questions[0].samples, "rounds × chains", "effective samples", path)


def _plot(curves: dict[str, Any], level: float, across: str, up: str, path: Path, **style: Any) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4), layout="tight")
    for label, (x, y) in curves.items():
        axes.loglog(x, y, label=label, **style)
    axes.axhline(level, linestyle=":", color="grey")
    axes.set(xlabel=across, ylabel=up)
    axes.legend()
    figure.savefig(path)
    plt.close(figure)


# The largest number of cells of a plan, by their public bound.
MOST_CELLS = 2.0**18
# Passes per coordinate within which a walk at high rates ends, except with probability e^{−186}.
STEEP_PASSES = 1 << 14
# Coordinates slower than this do not flip.
SLOWEST = 2.0**-20
# Relative error of a position in `fedpdmc.clocks.envelopes`.
POSITION_SLACK = 1e-13


def steepness(
    model: ModelFacts, bounds: Bounds, neighbours: str, scale: np.ndarray, where: np.ndarray
) -> tuple[float, float, float, float]:
    """``N s_1 k, N s_2 k², N s_3 k³`` and ``k``: bounds on the gradient of all records and on its derivatives.

    ``s_j`` bounds the j-th derivative of the loss, ``k`` a whitened record (zero if no reach depends on it), and
    ``where`` each parameter on the plan. A linear model's gradient is bounded at distance one, and grows like its slope.
    """
    terms = float(bounds.most_records)
    if model.loss == "cox":
        k, top = float(np.linalg.norm(scale, axis=1).max()), math.exp(min(float(np.max(where)) + 1, 700.0))
        return k * (top + terms), k * k * top, k**3 * top, k
    if model.loss == "gaussian_mean":
        weight = np.broadcast_to(model.weight, (model.dim,))
        k = largest_row(bounds, weight[:, None] * scale).k_2
        return terms * k, terms * float(np.max(weight)) * float(np.linalg.norm(scale, 2)) ** 2, 0.0, 0.0
    k = largest_row(row_bounds(model, bounds), scale).k_2
    terms *= bounds.weight
    if model.loss == "linear":
        high = 0.0 if bounds.outcome is None else max(map(abs, bounds.outcome))
        weight = float(np.max(model.weight))
        return terms * k * weight * (high + k), terms * k * k * weight, 0.0, 0.0
    if model.loss == "poisson":
        reach = predictor_reach(model, dataclasses.replace(bounds, region=np.maximum(where, 1e-300)))
        # The loss is bounded within distance one of a predictor.
        top = math.exp(min(reach + max(bounds.offset or (0.0,)) + 1, 700.0))
        high = 0.0 if bounds.outcome is None else bounds.outcome[1]
        return terms * k * (top + high), terms * k * k * top, terms * k**3 * top, k
    slope = slopes(model, dataclasses.replace(bounds, weight=1.0), neighbours)
    third = 0.1 if model.loss == "logistic" else 1.46 * slope.second / (math.sqrt(model.df) * model.scale)
    return terms * slope.first * k, terms * slope.second * k * k, terms * third * k**3, 0.0


def cells(
    steep: tuple[float, float, float, float],
    dim: int,
    rotating: bool,
    excess: tuple[float, float],
    control: tuple[float, float],
    farthest: np.ndarray,
    speed: np.ndarray,
    horizon: np.ndarray,
) -> np.ndarray:
    """``H/c`` for each chain: c is so short that ``d c (W + E) ≤ ½`` and that ceilings hold for a time c.

    On lines signed rates have ``|r'| ≤ v (N s_2 k² + B) v`` and ``|r''| ≤ v N s_3 k³ v²``, with B the control variate's
    Hessian. On rotations, with A the norm of ``(a, v)``, ``G`` a bound of the gradient and t ≤ ¼ the reach of a ceiling,

        |r'| ≤ A (G + T),  |r''| ≤ A ((1+t) G + (3+3t) T + (1+t)(1+2t) N s_3 k³ A²)/(1 − t²/2),  T = (N s_2 k² + B) A,

    where the ceilings' own second-order terms are bounded, not only those of the rates.

    ``steep`` is the result of `steepness`; ``excess`` has ρ and the bound on the rounding of a gradient, ``control`` norms
    of the control variate's whitened Hessian and of its slope on the plan; ``farthest``, ``speed`` and ``horizon`` (C,) are
    Euclidean norms of position and speed on the whole plan, and its length.
    """
    gradient, second, third, reach = steep
    curvature, slope = control
    size = np.hypot(farthest, speed) if rotating else speed
    turn, bend = (second + curvature) * size, third * size**2
    rises, falls = size * turn, size * bend
    least = (excess[0] + (1 + dim) * excess[1]) * size
    if rotating:
        here = gradient + second * farthest + slope
        rises, falls = size * (here + turn), size * (1.3 * here + 3.9 * turn + 2.0 * bend)
        least = least + SLOWEST * here
    least = least + POSITION_SLACK * (1 + farthest) * rises
    # d c (r' c + ½ r'' c²) ≤ ⅛ + ⅛, and d c E ≤ ¼.
    inverse = [4.0 + 0 * size, np.sqrt(8 * dim * rises), np.cbrt(4 * dim * falls), reach * size, 4 * dim * least]
    return horizon * np.max(inverse, 0)


def most_passes(cells: float, dim: int, segments: int) -> int:
    """Maximum number of passes over the records of a walk, except with probability 2⁻²⁶⁷: ``4(5a + 6n + S)``."""
    empty = 8 * cells + 2 + 2 * segments
    return math.ceil(4 * (5 * empty + 6 * STEEP_PASSES * dim + segments))


# Default number of colluding sites if the noise is shared.
COLLUDING = 1
# What each neighbour relation means.
APPLIES = {
    "replace": "one record becomes another",
    "add-remove": "one record more or less",
    "label": "only its outcome changes",
}
# Largest error of the mean, in posterior standard deviations, at which an answer is useful.
WORTH_HAVING = 1.0


class Way(NamedTuple):
    """One way to an answer: its name, the error of its mean in posterior standard deviations, and a description."""

    name: str
    error: float
    what: str


def exact_samples(question: Question) -> float:
    """Effective samples of the exact chain that the budget buys in practice, at the default excess rate."""
    alpha = best_order(question.epsilon, question.delta)
    bound = best_bound(alpha, question.epsilon, question.delta)
    limit = account_limit(bound, alpha, question.epsilon, question.delta)
    k, sites = question.sensitivity, question.sites
    one = Sensitivity(k, k * math.sqrt(question.dim), k)
    excess = Budget(question.epsilon, question.delta).excess_for(one, sites)
    cap = limit / arrival_cost(bound, alpha, one, excess)
    flips = question.dim * sites * excess
    process = cap / waste(flips, 1 / flips, sites)
    return HONEST * process / (MIXING[0] + MIXING[1] * sites * excess)


def one_shot_error(question: Question, colluding: int | None = None) -> float:
    """Root mean square error of the mean, by coordinate, beyond that of the posterior itself.

    ``colluding``: the number of sites that may collude if noise is shared under a secure sum; None: each adds its own.
    """
    # The first step does not enter the answer.
    share = ONE_SHOT.usual * sum(ONE_SHOT.steps[1:]) / sum(ONE_SHOT.steps) * ONE_SHOT.gradient
    squared_mu = gaussian_limit(2.0, question.epsilon, question.delta) * share
    sites = question.sites
    noise = math.sqrt(sites if colluding is None else sites / (sites - colluding))
    return noise_multiplier(2.0, squared_mu) * question.sensitivity * noise


def ways(question: Question, colluding: int = COLLUDING) -> list[Way]:
    """All ways, best first."""
    samples = exact_samples(question)
    shot = 'method="private-laplace": four rounds of noisy derivatives. Not exact; its intervals allow for the noise.'
    chain = f"dynamics=fedpdmc.FactorisedBoomerang(): exact draws, about {samples:.2g} effective samples."
    found = [Way("one shot", one_shot_error(question), shot)]
    found.append(Way("exact chain", math.inf if samples <= 0 else 1 / math.sqrt(samples), chain))
    if question.sites - colluding >= LEAST_HONEST:
        shared = (
            f"one shot with Budget(colluding={colluding}): sites share the noise of their sum, and at most {colluding} "
        )
        shared += f"of {question.sites} may collude with the coordinator."
        found.append(Way("secure sum", one_shot_error(question, colluding), shared))
    return sorted(found, key=lambda way: way.error)


def text(question: Question, neighbours: str, colluding: int = COLLUDING) -> str:
    """The comparison as lines, with a recommendation first, for all relations of neighbours."""
    found = ways(question, colluding)
    best = found[0]
    if best.error > WORTH_HAVING:
        first = "None is useful: the noise is wider than the posterior. Use more records or a larger epsilon."
    elif best.name == "secure sum":
        alone = next(way for way in found if way.name != best.name)
        first = f"Recommended: {best.name}, if the sites trust each other; otherwise {alone.name}."
    else:
        first = f"Recommended: {best.name}."
    lines = [first, "", f"{'':<12} {'error of the mean':>17} {'effective':>10}"]
    lines.append(f"{'way':<12} {'in posterior sd':>17} {'samples':>10}")
    lines += [f"{way.name:<12} {way.error:>17.3g} {way.error**-2:>10,.3g}" for way in found]
    lines += ["", *(fill(f"{way.name}: {way.what}", 79, subsequent_indent="  ") for way in found)]
    return "\n".join([*lines, "", *_relations(question, neighbours, colluding)])


def _relations(question: Question, neighbours: str, colluding: int) -> list[str]:
    """The same errors for the other neighbour relations, which are weaker guarantees."""
    names = sorted(way.name for way in ways(question, colluding))
    lines = [f"{'neighbours':<12} " + " ".join(f"{name:>12}" for name in names)]
    for relation, factor in FACTORS.items():
        other = question._replace(sensitivity=question.sensitivity * factor / FACTORS[neighbours])
        errors = {way.name: way.error for way in ways(other, colluding)}
        chosen = "  <- requested" if relation == neighbours else f"  {APPLIES[relation]}"
        lines.append(f"{relation:<12} " + " ".join(f"{errors[name]:>12.3g}" for name in names) + chosen)
    return lines


def plot_comparison(question: Question, path: Path, colluding: int = COLLUDING) -> None:
    """Plot the errors of all ways against ε."""
    epsilons = [question.epsilon * 2.0**k for k in range(-3, 4)]
    each = [{way.name: way.error for way in ways(question._replace(epsilon=x), colluding)} for x in epsilons]
    curves = {name: (epsilons, [errors[name] for errors in each]) for name in sorted(each[0])}
    _plot(curves, 1.0, "ε", "error of the mean, posterior sd", path, marker="o")
