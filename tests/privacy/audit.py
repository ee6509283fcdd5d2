"""A distinguishing attack on everything that a coordinator sees of a private site.

The coordinator is hostile: it plans again and again along a piece of path on which two neighbouring data sets differ most,
and chooses a control variate that takes from one of them all that it has. The site then rings at rate ``(ρ + κ_i)|v_i|`` or
``ρ|v_i|``, exactly or nearly, and ``log L = Σ_arrivals log(1 + κ_i/ρ) − (Σκ_i) t``, with t the path length, is the best of
all tests or near to it; any statistic gives a valid lower bound. It is read from the bytes of the replies alone. Many
copies of the run are made side by side, each with chains of its own.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from scipy import stats
from tests.privacy.support import a_ledger, a_plan

import fedpdmc as fp
from fedpdmc._jax.precision import double_precision
from fedpdmc.members.private_site import Exposure, PrivateSite, _pack, _unpack
from fedpdmc.members.run_coordinates import Opening
from fedpdmc.potentials import ControlVariate, Quadratic

# Passes of a walk: more than any here takes.
PASSES = 1 << 24
CONFIDENCE = 1e-3


class Case(NamedTuple):
    """Two neighbouring data sets and where they differ most.

    Attributes
    ----------
    potentials : tuple
        That which rings more often first.
    neighbours : str
    bounds : Bounds
    change : array
        κ: how much more often it rings on each coordinate, per unit of speed.
    center : array
        The reference's, and where all plans start.
    velocity : float
    gradient : array
        Of the public control variate.
    dynamics : Dynamics
    """

    potentials: tuple
    neighbours: str
    bounds: fp.Bounds
    change: np.ndarray
    center: np.ndarray
    velocity: float = 1.0
    gradient: np.ndarray | None = None
    dynamics: fp.ZigZag | fp.FactorisedBoomerang = fp.ZigZag()


def labels(kappa, dynamics=None, velocity=1.0):
    """Logistic: far out a record's gradient is ξ under one label and zero under the other."""
    kappa = np.asarray(kappa, float)
    potentials = tuple(fp.models.logistic(kappa[None], [label]) for label in (0.0, 1.0))
    far = np.full(len(kappa), 60 / kappa.max() / len(kappa))
    return Case(
        potentials, "label", fp.Bounds(box=kappa), kappa, far, velocity, None, dynamics or fp.ZigZag()
    )  # fmt: skip


def replaced(kappa, dynamics=None):
    """Logistic: two records whose gradients far out are opposite in one coordinate, and nearly zero in the other."""
    slight = 0.01 * kappa
    potentials = tuple(fp.models.logistic([[sign * kappa, slight]], [0.0]) for sign in (1.0, -1.0))
    bounds = fp.Bounds(norm=float(np.hypot(kappa, slight)))
    change, far = np.array([2 * kappa, 0.0]), np.array([0.0, 60 / slight])
    return Case(
        potentials, "replace", bounds, change, far, gradient=np.array([-kappa, 0.0]), dynamics=dynamics or fp.ZigZag()
    )  # fmt: skip


def added(kappa):
    """Logistic: one record more, whose gradient far out is ξ, beside one whose gradient is zero there."""
    one, two = ([[kappa]], [1.0]), ([[kappa], [kappa]], [1.0, 0.0])
    potentials = (fp.models.logistic(*two), fp.models.logistic(*one))
    return Case(potentials, "add-remove", fp.Bounds(norm=kappa), np.array([kappa]), np.array([60 / kappa]))


def outliers(kappa):
    """Student-t: an outcome above or below the middle, where the loss is steepest."""
    df = 3.0
    steepest, worst = (df + 1) / (2 * math.sqrt(df)), math.sqrt(df)
    covariate = kappa / (2 * steepest)
    potentials = tuple(fp.models.student_t([[covariate]], [y], df) for y in (-worst, worst))
    return Case(
        potentials, "replace", fp.Bounds(norm=covariate), np.array([kappa]), np.zeros(1), gradient=np.array([-kappa / 2])
    )  # fmt: skip


def counts(kappa):
    """Poisson, counts clipped at 100: one record more with the largest count, where the intensity is small."""
    covariate = kappa / 100
    rows, y = [[covariate], [covariate]], [0, 100]
    potentials = (fp.models.poisson(rows, y), fp.models.poisson(rows[:1], y[:1]))
    bounds = fp.Bounds(norm=covariate, outcome=(0, 100), region=4.6 / covariate)
    return Case(potentials, "add-remove", bounds, np.array([kappa]), np.array([-4.5 / covariate]), velocity=-1.0)


@double_precision
def pair(folder, case, excess, tag=""):
    """The two sites, opened."""
    dim = len(case.center)
    control = None
    if case.gradient is not None:
        control = ControlVariate(
            Quadratic(jnp.zeros((dim, dim)), jnp.asarray(case.gradient)), jnp.asarray(case.center), 1
        )
    opening = Opening(fp.Reference(jnp.asarray(case.center), jnp.ones(dim)), case.dynamics, control)
    sites = []
    for k, potential in enumerate(case.potentials):
        budget = fp.Budget(
            200.0, 1e-5, neighbours=case.neighbours, bounds=case.bounds, on_violation="clip", excess=excess,
            seeded_for_tests=True, ledger=a_ledger(folder / f"{tag}{k}.db"),
        )  # fmt: skip
        site = fp.Site(potential, name=f"audit {k}", seed=k + 1, budget=budget)
        sites.append(PrivateSite(site, opening, "audit"))
    return sites


class Seen(NamedTuple):
    """What a run shows: arrivals by coordinate and path length, for each copy; and what the ledger charged."""

    counts: np.ndarray
    time: np.ndarray
    charged: np.ndarray


def honest(seen, until, won, chains):
    """Path length of one message, added up over chains, whoever won."""
    return seen.reshape(-1, chains).sum(1)


def losers_forgotten(seen, until, won, chains):
    """A broken ledger: arrivals that lost the round are free."""
    return (seen * won).reshape(-1, chains).sum(1)


def chains_forgotten(seen, until, won, chains):
    """A broken ledger: the longest chain stands for all."""
    return seen.reshape(-1, chains).max(1)


def speed_forgotten(seen, until, won, chains):
    """A broken ledger: time in place of path length on rotations."""
    return until.reshape(-1, chains).sum(1)


@double_precision
def run(site, velocity, cap, horizon, rule=honest, copies=4000, chains=1, rival=0.0, most_rounds=400, seed=0):
    """Ask the site until the ledger, by its rule, says that ``cap`` is reached; ``rival``: the rate of the other sites.

    Arrivals come from the site's own compiled walk, as the bytes that it would send. In each message horizons are cut so
    that their sum fits what is left.
    """
    rng, dim = np.random.default_rng(seed), site.dim
    width, dynamics = copies * chains, site.opening.dynamics
    counts, time, charged = np.zeros((copies, dim)), np.zeros(copies), np.zeros(copies)
    start = np.zeros((width, dim))
    fastest = 1.0 if rule is speed_forgotten else abs(velocity)
    for number in range(most_rounds):
        left = np.maximum(cap - charged, 0.0) / fastest
        share = left if rule is chains_forgotten else left / chains
        length = np.repeat(np.minimum(horizon, share), chains)
        if length.max() <= 1e-9:
            break
        plan = a_plan(start, velocity, length, number)
        reply = _pack(*site._walk(plan, number.to_bytes(8, "little") + seed.to_bytes(8, "little"), PASSES))
        moment, rang, mark = _unpack(reply, width)
        until = np.where(rang, moment, length)
        path = (np.asarray(plan.start), np.asarray(plan.duration), np.asarray(plan.velocity))
        seen = Exposure(dynamics, *path).until(until)
        won = rng.exponential(1 / rival, width) > moment if rival else np.ones(width, bool)
        charged += rule(seen, until, won & rang if rule is losers_forgotten else won, chains)
        time += seen.reshape(copies, chains).sum(1)
        owner = np.repeat(np.arange(copies), chains)[rang]
        np.add.at(counts, (owner, mark[rang]), 1)
    return Seen(counts, time, charged)


def log_ratio(seen, change, rho):
    """``log L`` of the first data set against the second."""
    change = np.asarray(change, float)
    return seen.counts @ np.log1p(change / rho) - change.sum() * seen.time


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
