"""The information account of a site without a privacy budget: how many bits its answers carry about its records.

Let T be all that a site has answered and D its records. Whatever is known before the run, ``I(D; T)`` is at most
``Σ E KL(P_D(· | past) ‖ Q(· | past))`` for every predictor Q that does not know D (chain rule). Plans may depend on the
past, so this covers a coordinator that chooses them. Q may learn from the past of T.

- *Releases* are integers, rounded with a secret dither; q is a public law of their differences from what is known
  (`fedpdmc.federation.derivative_rounding`): ``log P_D/Q`` at what is released.
- *Arrivals* of a plan with horizon H, rate λ and a predictor with rate q and a law r of new velocities, relative to N(0, I):

  ``E ∫_0^{τ∧H} [λ log(λ/q) − λ + q] dt + P(event) E log((−⟨v', n⟩)_+ √(2π)/r(v'))``

  the second expectation over drawn velocities v' with the gradient's direction n. With r = 1 it is
  ``κ = ½ (log 2 − γ) + ½ log 2π``, in every dimension. A flip has a rate for each coordinate, and no velocity to predict.

Integral and expectation are estimated at random times of each chain and at new velocities, without bias. The predictor
learns from chain to chain. The sum is an average, over what the records may be and over the run's randomness: it says how
much, not about whom. With private effects the rate at the effects of the plan's start stands for that along the plan.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from scipy.special import betaln, ndtr

from fedpdmc._jax.compilation import compiled
from fedpdmc.clocks import Clock, LatentClock, follow
from fedpdmc.errors import RequestRefused
from fedpdmc.federation.derivative_rounding import surprise
from fedpdmc.plan import Plan
from fedpdmc.study.policy import MOST_BITS, PARTS_OF_TABLE, Policy

logger = logging.getLogger("fedpdmc.site")
bits_logger = logging.getLogger("fedpdmc.site.bits")  # of every single answer
TIMES = 4  # of each chain and plan at which the rate is evaluated
VELOCITIES = 8  # drawn anew for each event
TOGETHER = 16  # chains after which the predictor learns
MOST_WORK = 2**27  # records times points in one answer, above which only some chains are evaluated
REPORTED = 16.0  # bits: what is reported to the coordinator is rounded up to a multiple
REFUSED = 6.0  # bits of a refusal, which has one of fewer than 64 codes
ANSWERED = -math.log2(1 - 2**-REFUSED)  # of plans that were not
MARGIN = 1.5  # a plan is refused if so many times its expected bits do not fit
TIME_PER_SAMPLE = 3.0  # process time of all chains for an effective sample, about
LEAST_TIME = 21.0  # of each chain
PARTS = 16  # of a run's time, for which its cost is estimated one after the other
POINTS = 64  # of the reference from which the cost of a part is estimated
NO_LIMITS = math.inf, math.inf
USUAL = 16.0  # bits of a run with 1,000 effective samples, for each number of a gradient and a Hessian
USUAL_AT_LEAST = 70.0  # and in addition, whatever their number
SPENT = "INFORMATION_SPENT"  # the code of a refusal


def table_bits(records: int, rows: float) -> float:
    """The most bits of a table without order: ``log₂ C(n + K − 1, n)`` for n records with K possible rows."""
    return float(-betaln(records + 1, rows) - math.log(records + rows)) / math.log(2)


def bit_limits(policy: Policy, records: int, values: Sequence[int], rows: int | None = None) -> tuple[float, float]:
    """The policy's limits for each record, of one row or several; defaults from the numbers of values in the columns."""
    own = table_bits(rows or records, math.prod(map(float, values))) / max(records, 1)
    defaults = (min(most, part * own) for most, part in zip(MOST_BITS, PARTS_OF_TABLE, strict=True))
    given = policy.most_bits, policy.most_bits_in_all
    return tuple(usual if limit is None else limit for limit, usual in zip(given, defaults, strict=True))  # type: ignore


@dataclass(eq=False)
class Information:
    """What the answers of a site carry, in bits, in this study and in others with the same records."""

    records: int
    limits: tuple[float, float] = NO_LIMITS  # the most bits for each record, in this study and in all
    before: tuple[float, float] = 0.0, 0.0  # bits of earlier answers, in this study and in others
    # Stores the bits of an answer to a request durably, and returns those in this study and in others.
    keep: Callable[[float, str], tuple[float, float]] | None = None
    refund: Callable[[str], tuple[float, float]] | None = None  # takes back those of a request, and returns the same

    def __post_init__(self):
        self.records = max(self.records, 1)
        self.bits, self._others = self.before
        self._request = ""
        self.releases, self.arrivals, self.events = 0.0, 0.0, 0
        self._time, self._answered, self._passes = 0.0, 0, 0
        self._bits_at_report, self._reported = 0.0, 0.0
        self._chance = np.random.default_rng()
        self.predictor: ArrivalPredictor | None = None

    @property
    def left(self) -> float:
        """Bits that the site may still give away."""
        study, every = (limit * self.records for limit in self.limits)
        return min(study - self.bits, every - self.bits - self._others)

    def outlook(self, dim: int) -> str:
        """For the site's operator, before a run: what may leave, and whether that suffices for so many parameters."""
        if self.left == math.inf:
            return ""
        usual = USUAL_AT_LEAST + USUAL * dim * (dim + 3) / 2
        words = f"{max(self.left, 0.0):,.0f} bits about {self.records:,} records may leave"
        if self.left > usual:
            return words
        return (
            f"{words}, and 1,000 effective samples of {dim} parameters take about {usual:,.0f}: the run may end early "
            "(INFORMATION_SPENT). Agree on a privacy budget or fewer parameters, or set most_bits (docs/information.md)"
        )

    def begin(self, request: str, again: bool) -> None:
        """Charge what follows to this request; ``again``: a process that was killed had begun it, and nothing has left."""
        self._request = request
        if again and self.refund is not None:
            self.bits, self._others = self.refund(request)

    def report(self) -> float:
        """What the coordinator may know of `bits`, charged as the code of Elias for how often `REPORTED` was added."""
        if self.bits != self._bits_at_report:
            before, length, needed = self._reported, 0, 1
            while needed > length:
                length, self._reported = needed, max(REPORTED * math.ceil((self.bits + needed) / REPORTED), before)
                needed = 2 * math.floor(math.log2((self._reported - before) / REPORTED + 1)) + 1
            self._add(length, "a report of the account")
            self._bits_at_report = self.bits
        return self._reported

    def add_refusal(self, chains: int) -> None:
        """Charge a refusal of work that was begun, which may depend on the records; ``chains``: of which it names one."""
        self._add(REFUSED + math.log2(max(chains, 1)), "a refusal")

    def add_release(self, bits: float) -> None:
        """Charge a release before it leaves."""
        if bits > self.left:
            raise RequestRefused(SPENT, f"a release of {bits:.0f} bits, and {max(self.left, 0.0):.0f} are left")
        self.releases += bits
        self._add(bits, "derivatives")

    def check_run(self, clock: Clock, study, predictor: ArrivalPredictor) -> None:
        """Refuse a run whose expected cost does not fit, before its first plan: of points of the reference, not of paths."""
        if self.left == math.inf or clock.dynamics.unit_speed:
            return
        a, v = (self._chance.standard_normal((PARTS, POINTS, clock.dim)) for _ in range(2))
        zeta = _latents(clock, np.zeros(PARTS, int))
        g = np.asarray(_gradients(clock, zeta, a))
        if study.duration is not None:
            time = study.chains * study.duration
        else:
            time = max(TIME_PER_SAMPLE * study.ess, LEAST_TIME * study.chains)
        weight, nats = np.full(POINTS, time / (PARTS * POINTS)), 0.0
        for points in zip(a, v, g, strict=True):
            each = _rates(clock, *points[1:])
            number, mark = (
                np.repeat(x.ravel(), self._chance.poisson(each * weight[0]).ravel()) for x in np.indices(each.shape)
            )
            nats += self._charge(clock, predictor, (*points, weight), (*(x[number] for x in points), mark))
        needed = nats / math.log(2)
        logger.info("the run is expected to carry %.0f bits, %.2g for each record", needed, needed / self.records)
        if needed > self.left:
            raise RequestRefused(
                SPENT,
                f"the run is expected to carry {needed:.0f} bits, {needed / self.records:.2g} for each record, and "
                f"{max(self.left, 0.0):.0f} are left",
            )

    def check_plans(self, horizon: np.ndarray) -> None:
        """Refuse plans that are likely to cost more than is left: by their time, or by their number if most end early."""
        each = min(horizon.sum() / self._time, np.count_nonzero(horizon) / self._answered) if self._time > 0 else 0.0
        expected = self.arrivals * each
        if MARGIN * expected > self.left or self.left <= 0:
            raise RequestRefused(SPENT, f"plans of about {expected:.0f} bits, and {max(self.left, 0.0):.0f} are left")

    def add_arrivals(
        self, clock: Clock, plan: tuple[np.ndarray, ...], time: np.ndarray, rang: np.ndarray, mark: np.ndarray, latents
    ) -> None:
        """Charge the arrivals along plans before they leave; refuse those that are charged beyond the limit."""
        assert self.predictor is not None
        _, start, duration, velocity = plan
        horizon = duration.sum(1)
        length = np.where(rang, np.minimum(time, horizon), horizon)
        chains = np.flatnonzero(horizon > 0)
        if not len(chains):
            return
        work = min(max(1, math.ceil(len(start) * TIMES * self.records / MOST_WORK)), len(chains))
        some = chains[self._chance.integers(work) :: work]
        fraction = (np.arange(TIMES) + self._chance.random((len(start), TIMES))) / TIMES
        a, v = (
            np.asarray(x) for x in _states(clock, np.c_[fraction, np.ones(len(start))] * length[:, None], *plan[1:])
        )
        zeta, g = _latents(clock, plan[0]) if latents is None else np.asarray(latents), np.full(a.shape, np.nan)
        # Of the same shape in every round.
        padded = np.resize(some, math.ceil(len(start) / work))
        g[padded] = np.asarray(_gradients(clock, None if zeta is None else zeta[padded], a[padded]))
        # The chains are revealed one after the other: what is known of the first predicts the next.
        nats = 0.0
        for part in np.array_split(chains, math.ceil(len(chains) / TOGETHER)):
            points = (x[part, :TIMES].reshape(-1, clock.dim) for x in (a, v, g))
            weight, ring = np.repeat(length[part] / TIMES, TIMES), part[rang[part]]
            events = (*(x[ring, TIMES] for x in (a, v, g)), mark[ring])
            nats += self._charge(clock, self.predictor, (*points, weight), events) * len(chains) / len(some)
        self._time, self._answered = self._time + float(length[chains].sum()), self._answered + len(chains)
        self.events += int(rang[chains].sum())
        bits = float(nats) / math.log(2) + ANSWERED
        self.arrivals += bits
        # Flips take hundreds of rounds.
        level = logging.DEBUG if clock.dynamics.unit_speed else logging.INFO
        self._add(bits, f"plans of {len(chains)} chains with {int(rang[chains].sum())} arrivals", level)
        if self.left < 0:
            raise RequestRefused(SPENT, f"arrivals of {bits:.0f} bits, {-self.left:.0f} more than were left")

    def add_passes(self, passes: int) -> None:
        """Charge the number of passes over the records that a round took, by its difference from the last."""
        self._add(surprise(np.array([passes]), np.array([self._passes])), "passes over the records")
        self._passes = passes

    def _charge(self, clock: Clock, predictor: ArrivalPredictor, points, events) -> float:
        """The divergence in nats, at points with weights in time and at events; then the predictor learns from these.

        Both have positions, velocities and gradients: only the site knows these, and they are NaN where not evaluated.
        Marks of events are the velocities after them, or else coordinates.
        """
        (a, v, g, weight), (at, before, slope, mark) = points, events
        flips, unit, after = clock.dynamics.flips, np.eye(clock.dim), None
        rate, along = _rates(clock, v, g), before
        if flips:
            a, weight = np.repeat(a, clock.dim, 0), np.repeat(weight, clock.dim)
            v, along = (v[:, :, None] * unit).reshape(-1, clock.dim), before * unit[mark.astype(int).reshape(-1)]
        nats = np.nansum(_divergence(rate.ravel(), predictor.rates(a, v)) * weight)
        if not flips and len(at):
            normal = slope / np.linalg.norm(slope, axis=1, keepdims=True)
            drawn = self._chance.standard_normal((len(at), VELOCITIES, clock.dim))
            speed = np.sqrt(2 * self._chance.standard_exponential(drawn.shape[:2]))
            drawn -= ((drawn @ normal[:, :, None])[..., 0] + speed)[..., None] * normal[:, None]
            density = predictor.velocity_density(at, before, np.nan_to_num(drawn), self._chance)
            nats += np.nansum(np.mean(np.log(math.sqrt(2 * math.pi) * speed / density), 1) + 0 * normal[:, 0])
            after = mark if mark.ndim > 1 else drawn[:, 0]
        after = after if clock.dynamics.draws else None
        predictor.learn(a, v, weight, at, along, after, self._chance)
        return float(nats)

    def _add(self, bits: float, what: str, level: int = logging.INFO) -> None:
        bits_logger.log(level, "%s: %.1f bits", what, bits)
        both = self.bits + bits, self._others
        self.bits, self._others = both if self.keep is None else self.keep(bits, self._request)

    @property
    def for_each(self) -> list[float | None]:
        """Bits for each record, and the most in this study, if they are limited."""
        return [self.bits / self.records, self.limits[0] if self.limits[0] < math.inf else None]

    def words(self) -> str:
        """For the site's operator."""
        return (
            f"{self.bits:,.0f} bits about {self.records:,} records, {self.bits / self.records:.2g} for each "
            f"({self.releases:,.0f} in derivatives, {self.arrivals:,.0f} in {self.events:,} arrivals)"
        )


def _divergence(rate: np.ndarray, predicted: np.ndarray) -> np.ndarray:
    """``λ log(λ/q) − λ + q``."""
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.where(rate > 0, rate * np.log(rate / predicted), 0.0)
    return logs - rate + predicted


def _latents(clock: Clock, number: np.ndarray) -> np.ndarray | None:
    return np.zeros((len(number), clock.potential.latents)) if isinstance(clock, LatentClock) else None


def _rates(clock: Clock, v: np.ndarray, gradient: np.ndarray) -> np.ndarray:
    """True rates (n, k): of each coordinate for flips."""
    return np.maximum(v * gradient if clock.dynamics.flips else np.sum(v * gradient, -1, keepdims=True), 0.0)


@compiled
def _gradients(clock: Clock, zeta, a):
    """Gradients at points (C, n, d); private effects (C, r)."""
    given = () if zeta is None else (zeta,)
    return jnp.stack([clock.potential.gradients(a[:, k], *given) for k in range(a.shape[1])], 1)


@compiled
def _states(clock: Clock, times, start, duration, velocity):
    """Positions and velocities (C, n, d) at times (C, n) of plans."""
    path = follow(clock.dynamics, Plan(jnp.zeros(start.shape[0], int), start, duration, velocity))
    states = []
    for k in range(times.shape[1]):
        segment = jnp.sum(path.begin <= times[:, k, None], -1) - 1
        states.append(path.state(clock.dynamics, segment, times[:, k] - path.at(path.begin, segment)))
    return tuple(jnp.stack(x, 1) for x in zip(*states, strict=True))


# What an observer expects of a site's arrivals: a public function of all that the site has answered before.
#
# In a run's coordinates the gradient of a site is, up to the fourth derivatives of its likelihood,
#
# ``G(a) = b_0 + B_0 a + b + B y + ½ (T[y, y] − T[C])``,  ``y = a − m``
#
# with ``b_0, B_0`` from its last release, made at m as an average over the covariance C. Unknown are the rounding of the
# release, in b and B, and the tensor T of third derivatives. The observer has a normal law of these numbers θ for each of
# several sizes σ of T, and weighs them. It learns from events at rate ``⟨u, G⟩_+``, from their velocities v', of density
# ``(−⟨v', n⟩)_+ √(2π)`` with ``n = G/|G|``, and from paths without events: by Newton steps on the logarithm, with
# ``E ⟨u, G⟩_+`` for ``⟨u, G⟩_+``. One more law has the rate ``c |a| |u|`` and velocities from ``N(0, I)``, in case the
# others are wrong.
#
# Any predictor bounds the information if it depends on earlier answers alone: not on records, true rates or later answers.
# How good it is decides how small the bound is.

SIZES = 0.005 * 2.0 ** np.arange(6)  # σ, standard deviations of third derivatives; those first that expect few events
MOST_UNKNOWNS = 400  # of θ: third derivatives up to 11 parameters, second ones up to 26
ROUNDED = 0.006  # standard deviation of b and B
PART = 0.1  # of σ that is added to it
FOURTH = 0.15  # standard deviation of what θ leaves out, over σ² |y|²
THIRD = 0.35  # the same without third derivatives, over σ |y|²
EVENTS = 1.0  # of c before anything is known
EXPOSURE = 20.0  # of c before anything is known
NEWTON = 2
DIRECTIONS = 32  # drawn from the law of G for the law of a new velocity
UNIFORM = 0.02  # weight of N(0, I) in the law of a new velocity
NEGLIGIBLE = 1e-4  # weight below which a size is given up


class ArrivalPredictor:
    """Expected rates of events along directions, and laws of new velocities.

    ``slope`` (array of shape (d,), array of shape (d, d)), optional: ``b_0`` and ``B_0``; None if nothing was released.
    ``about`` (array of shape (d,), array of shape (d, d)), optional: m and C.
    """

    def __init__(self, dim: int, slope=None, about=None):
        nothing = np.zeros(dim), np.zeros((dim, dim))
        (self._b, self._slope), (self._middle, spread) = slope or nothing, about or nothing
        # The coordinate 0 of ỹ = (1, y) is one: triples of ỹ are all terms up to the third order.
        triples = np.array(list(itertools.combinations_with_replacement(range(dim + 1), 3))[1:])
        order = (triples > 0).sum(1)
        most = next((k for k in (3, 2, 1) if (order <= k).sum() <= MOST_UNKNOWNS), 0)
        triples, order = triples[order <= most], order[order <= most]
        self._triples = i, j, k = triples.T
        self._factor = np.sqrt(np.array([6.0, 3.0, 1.0])[(i == j).astype(int) + (j == k)]) / 6
        c, unit = np.pad(spread, (1, 0)), np.eye(dim + 1)
        self._mean = (self._factor * (unit[:, i] * c[j, k] + unit[:, j] * c[i, k] + unit[:, k] * c[i, j]))[1:]
        low = np.ones(len(SIZES)) if slope is None else ROUNDED + PART * SIZES
        deviation = np.stack([2 * math.sqrt(3) * low, math.sqrt(3) * low, SIZES], 1)[:, order - 1]
        self._precision, self._covariance = (np.stack([np.diag(row**p) for row in deviation]) for p in (-2, 2))
        self._theta = np.zeros_like(deviation)
        self._left = FOURTH * SIZES**2 if most == 3 else THIRD * SIZES
        self._log_weight = -np.log(np.append(SIZES, SIZES[-1]))
        self._seen, self._exposure = EVENTS, EXPOSURE

    @property
    def _weight(self) -> np.ndarray:
        weight = np.exp(self._log_weight - self._log_weight.max())
        return weight / weight.sum()

    def _features(self, a: np.ndarray, u: np.ndarray) -> np.ndarray:
        """The derivatives of ``⟨u, G(a)⟩`` by θ."""
        i, j, k = self._triples
        y, w = np.insert(a - self._middle, 0, 1.0, -1), np.insert(u, 0, 0.0, -1)
        terms = w[..., i] * y[..., j] * y[..., k] + y[..., i] * (w[..., j] * y[..., k] + y[..., j] * w[..., k])
        return self._factor * terms - u @ self._mean

    def _gradients(self, a: np.ndarray) -> np.ndarray:
        unit = np.broadcast_to(np.eye(a.shape[-1]), (*a.shape, a.shape[-1]))
        return self._features(np.repeat(a[:, None], a.shape[-1], 1), unit)

    def _other(self, a: np.ndarray) -> np.ndarray:
        """The standard deviation of what θ leaves out, in any direction."""
        return 1e-4 + self._left[:, None] * np.sum((a - self._middle) ** 2, -1)

    def _moments(self, a: np.ndarray, u: np.ndarray, features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation of ``⟨u, G(a)⟩``, of shape (sizes, n)."""
        mean = np.sum(u * (self._b + a @ self._slope), -1) + self._theta @ features.T
        square = np.stack([np.sum((features @ own) * features, -1) for own in self._covariance])
        return mean, np.sqrt(square + self._other(a) ** 2 * np.sum(u**2, -1))

    def _each_rate(self, a: np.ndarray, u: np.ndarray, mean: np.ndarray, deviation: np.ndarray) -> np.ndarray:
        plain = self._seen / self._exposure * np.linalg.norm(a, axis=-1) * np.linalg.norm(u, axis=-1)
        return np.vstack([_positive_part(mean, deviation), np.maximum(plain, 1e-12)])

    def rates(self, a: np.ndarray, u: np.ndarray) -> np.ndarray:
        """Expected rates of events at positions a along directions u."""
        return self._weight @ self._each_rate(a, u, *self._moments(a, u, self._features(a, u)))

    def velocity_density(self, a, u, velocity: np.ndarray, chance: np.random.Generator) -> np.ndarray:
        """Densities, relative to ``N(0, I)``, of velocities (n, k, d) after events at a along u."""
        share = self._weight[:, None] * self._each_rate(a, u, *self._moments(a, u, self._features(a, u)))
        return np.einsum("sn,snk->nk", share / share.sum(0), self._each_density(a, u, velocity, chance))

    def _each_density(self, a, u, velocity: np.ndarray, chance: np.random.Generator) -> np.ndarray:
        """For each law. That of n is that of directions drawn from the law of G, in proportion to the rate they give."""
        gradient, density = self._gradients(a), []
        mean = self._b + a @ self._slope + np.einsum("sp,ndp->snd", self._theta, gradient)
        for own, center, other in zip(self._covariance, mean, self._other(a), strict=True):
            wide = gradient @ own @ np.swapaxes(gradient, 1, 2)
            root = np.linalg.cholesky(wide + other[:, None, None] ** 2 * np.eye(a.shape[-1]))
            g = chance.standard_normal((len(a), DIRECTIONS, a.shape[-1])) @ np.swapaxes(root, 1, 2) + center[:, None]
            length = np.linalg.norm(g, axis=-1)
            share = np.maximum(np.einsum("nsd,nd->ns", g, u), 1e-9 * length)
            share = share / share.sum(1, keepdims=True) / length
            density.append(np.einsum("ns,nks->nk", share, np.maximum(-velocity @ np.swapaxes(g, 1, 2), 0.0)))
        plain = np.ones((1, *velocity.shape[:2]))
        drawn = math.sqrt(2 * math.pi) * np.array(density)
        return np.concatenate([UNIFORM + (1 - UNIFORM) * drawn, plain])

    def learn(self, a, u, weight, at, along, velocity, chance: np.random.Generator) -> None:
        """Learn from paths, as points a with directions u and weights in time, and from events at ``at`` along ``along``.

        ``velocity``: after the events; None for flips.
        """
        rows, events = self._features(a, u), self._features(at, along)
        mean, deviation = self._moments(a, u, rows)
        kinds, gradient = [(events, *self._moments(at, along, events))], None
        logs = np.log(self._each_rate(at, along, *kinds[0][1:])).sum(1)
        logs = logs - self._each_rate(a, u, mean, deviation) @ weight
        if velocity is not None and len(at):
            logs = logs + np.log(self._each_density(at, along, velocity[:, None], chance)[..., 0]).sum(1)
            turned, gradient = self._features(at, -velocity), self._gradients(at)
            kinds.append((turned, *self._moments(at, -velocity, turned)))
        theta, precision = [], []
        for s, (prior, before) in enumerate(zip(self._precision, self._theta, strict=True)):
            now, curvature = before, prior
            for _ in range(NEWTON):
                t = (mean[s] + rows @ (now - before)) / deviation[s]
                slope = -prior @ (now - before) - rows.T @ (weight * ndtr(t))
                curvature = prior + rows.T @ ((weight * _normal(t) / deviation[s])[:, None] * rows)
                for own, center, wide in kinds:
                    z = center[s] + own @ (now - before)
                    part = _positive_part(z, wide[s])
                    first = ndtr(z / wide[s]) / part
                    second = np.maximum(first**2 - _normal(z / wide[s]) / wide[s] / part, 0.0)
                    slope, curvature = slope + own.T @ first, curvature + own.T @ (second[:, None] * own)
                if gradient is not None:
                    # −log|G|, of the density of a new velocity
                    g = self._b + at @ self._slope + gradient @ now
                    square = np.sum(g**2, -1) + np.sum((gradient @ self._covariance[s]) * gradient, (1, 2))
                    slope = slope - np.einsum("ndp,nd->p", gradient, g / square[:, None])
                now = now + np.linalg.solve(curvature, slope)
            theta.append(now)
            precision.append(curvature)
        self._log_weight = self._log_weight + logs
        kept = (self._weight > NEGLIGIBLE)[:-1]
        kept[np.argmax(self._log_weight[:-1])] = True
        self._theta, self._precision = np.array(theta)[kept], np.array(precision)[kept]
        self._covariance, self._left = np.linalg.inv(self._precision), self._left[kept]
        self._log_weight = self._log_weight[np.append(kept, True)]
        self._seen += len(at)
        self._exposure += weight @ (np.linalg.norm(a, axis=-1) * np.linalg.norm(u, axis=-1))


def _normal(t: np.ndarray) -> np.ndarray:
    return np.exp(-0.5 * t**2) / math.sqrt(2 * math.pi)


def _positive_part(mean: np.ndarray, deviation: np.ndarray) -> np.ndarray:
    """``E z_+`` of a normal variable z, at least a tiny part of its deviation."""
    t = mean / deviation
    return deviation * np.maximum(_normal(t) + t * ndtr(t), 1e-12)
