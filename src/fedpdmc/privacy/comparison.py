"""Comparison of the ways to obtain a private answer, by the error of its mean in posterior standard deviations.

In whitened coordinates the information of all records is the identity. Gradient noise of standard deviation σ at each of M
sites moves the mean by noise of variance ``M σ²`` in every coordinate, with ``σ = K/μ`` for the ``μ²`` that the account
grants the gradients of all steps but the first; with noise in shares the variance is ``σ² M/(M − t)``. A chain of n
effective samples has a mean with error ``1/√n``.
"""

from __future__ import annotations

import math
from pathlib import Path
from textwrap import fill
from typing import NamedTuple

from fedpdmc.privacy.account_bounds import account_limit, arrival_cost, best_bound
from fedpdmc.privacy.accountant import Sensitivity, best_order
from fedpdmc.privacy.budget import Budget
from fedpdmc.privacy.budget_planning import FACTORS, HONEST, MIXING, Question, waste
from fedpdmc.privacy.gaussian_epsilon_delta import gaussian_limit
from fedpdmc.privacy.gaussian_mechanism import noise_multiplier
from fedpdmc.privacy.noise_shares import LEAST_HONEST
from fedpdmc.privacy.schedule import ONE_SHOT

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
    found = [
        Way(
            "one shot",
            one_shot_error(question),
            'method="private-laplace": four rounds of noisy derivatives. Not exact; its intervals allow for the noise.',
        ),
        Way(
            "exact chain",
            math.inf if samples <= 0 else 1 / math.sqrt(samples),
            f"dynamics=fedpdmc.FactorisedBoomerang(): exact draws, about {samples:.2g} effective samples.",
        ),
    ]
    if question.sites - colluding >= LEAST_HONEST:
        found.append(
            Way(
                "secure sum",
                one_shot_error(question, colluding),
                f"one shot with Budget(colluding={colluding}): sites share the noise of their sum, and at most {colluding} "
                f"of {question.sites} may collude with the coordinator.",
            )
        )
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


def plot(question: Question, path: Path, colluding: int = COLLUDING) -> None:
    """Plot the errors of all ways against ε."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4))
    epsilons = [question.epsilon * 2.0**k for k in range(-3, 4)]
    for name in sorted(way.name for way in ways(question, colluding)):
        errors = [
            next(w.error for w in ways(question._replace(epsilon=epsilon), colluding) if w.name == name)
            for epsilon in epsilons
        ]
        axes.loglog(epsilons, errors, marker="o", label=name)
    axes.axhline(1.0, linestyle=":", color="grey")
    axes.set_xlabel("ε")
    axes.set_ylabel("error of the mean, posterior sd")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
