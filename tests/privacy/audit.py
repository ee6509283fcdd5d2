"""A distinguishing attack on everything that a coordinator sees of a private site.

The coordinator is hostile: it plans again and again along the stretch of path on which the two data sets differ most.
They differ in the label of one record. Far out the record's gradient is ``ξ`` under one label and zero under the other, so
the site rings at rate ``ρ + κ_i`` or ``ρ`` on every coordinate, and ``log L = Σ_arrivals log(1 + κ_i/ρ) − (Σκ_i) t``, the
best of all tests, is known in closed form. Many copies of the run are made side by side, each with chains of its own.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from scipy import stats
from tests.privacy.support import a_plan

import fedpdmc as fp
from fedpdmc.precision import double_precision
from fedpdmc.private import PrivateSite
from fedpdmc.site import Opening

FAR = 60.0
CONFIDENCE = 1e-3


@double_precision
def pair(folder, kappa, excess, tag=""):
    """The two sites, opened: one record with gradient ``kappa`` on every coordinate, and its label 0 or 1."""
    kappa = np.asarray(kappa, float)
    reference = fp.Reference(jnp.zeros(len(kappa)), jnp.ones(len(kappa)))
    sites = []
    for label in (0.0, 1.0):
        budget = fp.Budget(
            200.0,
            1e-5,
            neighbours="label",
            bounds=fp.Bounds(box=kappa),
            excess=excess,
            seeded_for_tests=True,
            ledger=folder / f"{tag}{label}.db",
        )
        site = fp.Site(
            fp.models.logistic(kappa[None], [label]), name=f"audit {label}", seed=int(label) + 1, budget=budget
        )
        sites.append(PrivateSite(site, Opening(reference, fp.ZigZag()), "audit"))
    return sites


class Seen(NamedTuple):
    """What a run shows: arrivals by coordinate and observed time, for each copy; and what the ledger charged."""

    counts: np.ndarray
    time: np.ndarray
    charged: np.ndarray


def honest(seen, won, chains):
    """Observed time of one message, added up over chains, whoever won."""
    return seen.reshape(-1, chains).sum(1)


def losers_forgotten(seen, won, chains):
    """A broken ledger: arrivals that lost the round are free."""
    return (seen * won).reshape(-1, chains).sum(1)


def chains_forgotten(seen, won, chains):
    """A broken ledger: the longest chain stands for all."""
    return seen.reshape(-1, chains).max(1)


@double_precision
def run(site, cap, horizon, rule=honest, copies=4000, chains=1, rival=0.0, most_rounds=400, seed=0):
    """Ask the site until the ledger, by its rule, says that ``cap`` is reached; ``rival``: the rate of the other sites.

    Arrivals come from the site's own compiled walk. In each message horizons are cut so that their sum fits what is left.
    """
    rng, dim = np.random.default_rng(seed), site.clock.dim
    width = copies * chains
    counts, time, charged = np.zeros((copies, dim)), np.zeros(copies), np.zeros(copies)
    start = np.full((width, dim), FAR)
    for number in range(most_rounds):
        left = np.maximum(cap - charged, 0.0)
        share = left if rule is chains_forgotten else left / chains
        length = np.repeat(np.minimum(horizon, share), chains)
        if length.max() <= 1e-9:
            break
        plan = a_plan(start, 1.0, length, number)
        moment, rang, mark = site._walk(plan, number.to_bytes(8, "little") + seed.to_bytes(8, "little"))
        seen = np.where(rang, moment, length)
        won = rng.exponential(1 / rival, width) > moment if rival else np.ones(width, bool)
        charged += rule(seen, won & rang if rule is losers_forgotten else won, chains)
        time += seen.reshape(copies, chains).sum(1)
        owner = np.repeat(np.arange(copies), chains)[rang]
        np.add.at(counts, (owner, mark[rang]), 1)
    return Seen(counts, time, charged)


def log_ratio(seen, kappa, rho):
    """``log L`` of label 0 against label 1."""
    kappa = np.asarray(kappa, float)
    return seen.counts @ np.log1p(kappa / rho) - kappa.sum() * seen.time


def lower_bound(one, other, delta=0.0):
    """A lower bound of ε at δ from draws of a statistic under both data sets, by the best threshold of one half.

    Thresholds are chosen on the first half and judged on the second, with Clopper and Pearson's limits.
    """
    best = 0.0
    for p, q in ((one, other), (-other, -one)):
        half = len(p) // 2
        grid = np.quantile(np.concatenate([p[:half], q[:half]]), np.linspace(0.02, 0.998, 80))
        scores = [_bound(np.sum(p[:half] >= s), np.sum(q[:half] >= s), half, delta) for s in grid]
        s = grid[int(np.argmax(scores))]
        best = max(best, _bound(np.sum(p[half:] >= s), np.sum(q[half:] >= s), len(p) - half, delta))
    return best


def _bound(hits, false, n, delta):
    if hits == 0:
        return 0.0
    low = stats.beta.ppf(CONFIDENCE, hits, n - hits + 1)
    high = stats.beta.ppf(1 - CONFIDENCE, false + 1, n - false) if false < n else 1.0
    return math.log((low - delta) / high) if low > delta else 0.0
