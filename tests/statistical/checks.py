"""Tests of exactness, with tolerances that follow from Monte Carlo error alone.

Every test in this folder rejects a statistic whose two-sided p-value under exactness is below `ALPHA`. The folder makes
fewer than 2,000 comparisons every day and 10,000 with its long part, so the chance that an exact sampler fails anywhere,
under fresh seeds, is below 10,000 × 1e−7 = 0.001 (Bonferroni). With the seeds fixed here the outcome does not vary. One
test alone is less patient: the paper's switching rate is asked for within three standard errors.

Posteriors are compared chain by chain: chains that start in stationarity are independent and their time averages unbiased,
so ``(mean over chains − truth)/(spread of chains/√C)`` follows Student's t with C − 1 degrees of freedom, whatever the
correlation along each path. The effective sample size ``posterior variance/squared error`` is asserted as well: a test
without power is no test.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy import stats

ALPHA = 1e-7
CHAINS = 64


class Comparison(NamedTuple):
    """What was compared, by how many standard errors it is off, and the p-value."""

    names: list[str]
    scores: np.ndarray
    p: np.ndarray
    ess: np.ndarray

    @property
    def exact(self) -> bool:
        """Whether nothing is off by more than chance allows."""
        return bool(np.all(self.p > ALPHA))

    def __str__(self) -> str:
        rows = zip(self.names, self.scores, self.p, strict=True)
        return ", ".join(f"{name}: {score:+.1f} (p={p:.1e})" for name, score, p in rows)


def features(draws: np.ndarray, truth) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Names, values (..., k) and true expectations of what is compared: moments up to the third, and both tails."""
    u = (draws - truth.mean) / truth.sd
    columns = [("mean0", u[..., 0], 0.0), ("mean1", u[..., 1], 0.0)]
    columns += [(f"square{i}", u[..., i] ** 2, 1.0) for i in range(2)]
    columns += [("product", u[..., 0] * u[..., 1], truth.correlation)]
    columns += [(f"cube{i}", u[..., i] ** 3, truth.skew[i]) for i in range(2)]
    columns += [(f"low{i}", draws[..., i] < truth.low[i], 0.05) for i in range(2)]
    columns += [(f"high{i}", draws[..., i] > truth.high[i], 0.05) for i in range(2)]
    names, values, expected = zip(*columns, strict=True)
    return list(names), np.stack([v.astype(float) for v in values], -1), np.array(expected)


def t_test(names: list[str], averages: np.ndarray, expected: np.ndarray) -> Comparison:
    """Averages of independent chains (C, k) against their expectations."""
    chains = len(averages)
    error = averages.std(0, ddof=1) / np.sqrt(chains)
    scores = (averages.mean(0) - expected) / error
    return Comparison(names, scores, 2 * stats.t.sf(np.abs(scores), chains - 1), 1 / error**2)


def compare(post, truth) -> Comparison:
    """A posterior of chains that started in stationarity against the truth, draws and exact path integrals alike."""
    names, values, expected = features(post.draws(int(np.clip(2 * post.duration, 8, 5000))), truth)
    drawn = t_test(names, values.mean(1), expected)
    # The integrals along the paths estimate the same five moments with no more error than the draws.
    mean = (post.mean() - truth.mean) / truth.sd
    second = (post.cov() + np.outer(post.mean() - truth.mean, post.mean() - truth.mean)) / np.outer(truth.sd, truth.sd)
    integrals = np.array([*mean, second[0, 0], second[1, 1], second[0, 1]])
    scores = (integrals - expected[:5]) * np.sqrt(drawn.ess[:5])
    p = 2 * stats.t.sf(np.abs(scores), post.chains - 1)
    return Comparison(
        names + [f"integral of {name}" for name in names[:5]],
        np.concatenate([drawn.scores, scores]),
        np.concatenate([drawn.p, p]),
        drawn.ess,
    )


def assert_exact(post, truth, least_ess: float = 1000) -> None:
    """The posterior is the truth up to Monte Carlo error, and that error is small.

    A run that is too short for it goes on to up to sixteen times its length: averages of few effective samples are not
    normal yet.
    """
    comparison = compare(post, truth)
    for _ in range(4):
        if comparison.ess[:2].min() > least_ess:
            break
        post = post.extend(duration=post.duration, progress=False)
        comparison = compare(post, truth)
    assert comparison.exact, str(comparison)
    assert comparison.ess[:2].min() > least_ess, f"effective sample sizes {comparison.ess[:2]}: no power"


def welch_test(names: list[str], one: np.ndarray, other: np.ndarray) -> Comparison:
    """Averages of independent chains of two samplers, (C, k) and (C', k), that should agree."""
    result = stats.ttest_ind(one, other, axis=0, equal_var=False)
    error = np.sqrt(one.var(0, ddof=1) / len(one) + other.var(0, ddof=1) / len(other))
    return Comparison(names, result.statistic, result.pvalue, 1 / error**2)


def exponential_test(levels: np.ndarray) -> Comparison:
    """Whether compensators at events are Exp(1): Kolmogorov–Smirnov, and the mean, which sees a wrong scale sooner."""
    ks = stats.kstest(levels, "expon")
    score = (levels.mean() - 1) * np.sqrt(len(levels))
    p = np.array([ks.pvalue, 2 * stats.norm.sf(abs(score))])
    scores = np.array([ks.statistic * np.sqrt(len(levels)), score])
    return Comparison(["Kolmogorov-Smirnov", "mean"], scores, p, np.full(2, len(levels)))


def mark_test(marks: np.ndarray, rates: np.ndarray) -> Comparison:
    """Whether mark i came with probability ``rates_i/Σ rates``; a mark that is certain or impossible allows no miss."""
    chance = rates / rates.sum(-1, keepdims=True)
    hits = marks[:, None] == np.arange(rates.shape[-1])
    spread = np.sqrt((chance * (1 - chance)).sum(0))
    scores = (hits - chance).sum(0) / np.maximum(spread, 1e-12)
    return Comparison([f"mark{i}" for i in range(len(scores))], scores, 2 * stats.norm.sf(np.abs(scores)), spread**2)
