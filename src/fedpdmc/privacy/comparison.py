"""Ways to a private answer, compared by the error of its mean in posterior standard deviations.

In whitened coordinates the information of all records is the identity. Gradient noise of standard deviation σ at each of M
sites moves the mean by noise of variance ``M σ²`` in every coordinate, with ``σ = K √(α/(2c))`` for the cost c that the
step's gradient has. A chain of n effective samples has a mean with error ``1/√n``.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

from fedpdmc.privacy.accountant import Sensitivity, best_order, cost_rate, renyi_limit
from fedpdmc.privacy.budget import Budget
from fedpdmc.privacy.gaussian_account import gaussian_limit
from fedpdmc.privacy.gaussian_mechanism import noise_multiplier
from fedpdmc.privacy.planning import MIXING, Question, waste
from fedpdmc.privacy.schedule import ONE_SHOT

# The share of the samples of its observed time that a documented run of the exact chain reaches. The reference, burn-in and
# a reserve for path length take their parts, and a noisy control variate leaves arrivals of the records. Measured: 15.4
# effective samples of 47 (0.33), in the mean of three runs of 2 sites of 30,000 records, d = 3, ε = 4 and δ = 1e-5, until
# the budget was spent.
HONEST = 0.35
# Errors of the mean, in posterior standard deviations, up to which an answer is worth having.
WORTH_HAVING = 1.0


class Way(NamedTuple):
    """One way to an answer: its error of the mean in posterior standard deviations, its rounds, and what it is."""

    name: str
    error: float
    rounds: float
    what: str


def exact_samples(question: Question) -> float:
    """Effective samples of the exact chain that the budget buys in practice, at the excess rate that sites choose."""
    alpha = best_order(question.epsilon, question.delta)
    limit = renyi_limit(alpha, question.epsilon, question.delta)
    k, sites = question.sensitivity, question.sites
    excess = Budget(question.epsilon, question.delta).excess_for(Sensitivity(k, k, k), sites)
    cap = limit / cost_rate(alpha, Sensitivity(k, k * math.sqrt(question.dim), k), excess)
    flips = question.dim * sites * excess
    process = cap / waste(flips, 1 / flips, sites)
    return HONEST * process / (MIXING[0] + MIXING[1] * sites * excess)


def one_shot_error(question: Question) -> float:
    """Root mean square error of the mean, by coordinate, beyond that of the posterior itself."""
    alpha = best_order(question.epsilon, question.delta)
    limits = [rule(alpha, question.epsilon, question.delta) for rule in (renyi_limit, gaussian_limit)]
    share = ONE_SHOT.usual * ONE_SHOT.steps[-1] / sum(ONE_SHOT.steps) * ONE_SHOT.gradient
    return noise_multiplier(alpha, max(limits) * share) * question.sensitivity * math.sqrt(question.sites)


def ways(question: Question) -> list[Way]:
    """All ways, best first."""
    samples = exact_samples(question)
    found = [
        Way(
            "one shot",
            one_shot_error(question),
            len(ONE_SHOT.steps),
            "method='private-laplace': noisy derivatives; not exact, its intervals allow for the noise",
        ),
        Way(
            "exact chain",
            math.inf if samples <= 0 else 1 / math.sqrt(samples),
            math.inf,
            f"dynamics=fedpdmc.FactorisedBoomerang(): exact, about {samples:.2g} effective samples",
        ),
    ]
    return sorted(found, key=lambda way: way.error)


def text(question: Question) -> str:
    """The comparison as lines, with a recommendation first."""
    found = ways(question)
    best = found[0]
    lines = [f"{'way':<12} {'error of the mean (posterior sd)':>34} {'as effective samples':>22}"]
    lines += [f"{way.name:<12} {way.error:>34.3g} {way.error**-2:>22,.3g}   {way.what}" for way in found]
    if best.error > WORTH_HAVING:
        first = "None is worth having: the noise is wider than the posterior. Use more records or a larger epsilon."
    else:
        first = f"Recommended: {best.name}."
    return "\n".join([first, *lines])


def plot(question: Question, path: Path) -> None:
    """Errors of all ways against ε, as a picture."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4))
    epsilons = [question.epsilon * 2.0**k for k in range(-3, 4)]
    for name in sorted(way.name for way in ways(question)):
        errors = [
            next(w.error for w in ways(question._replace(epsilon=epsilon)) if w.name == name) for epsilon in epsilons
        ]
        axes.loglog(epsilons, errors, marker="o", label=name)
    axes.axhline(1.0, linestyle=":", color="grey")
    axes.set_xlabel("ε")
    axes.set_ylabel("error of the mean, posterior sd")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
