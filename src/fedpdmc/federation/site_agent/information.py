"""The information account of a site without a privacy budget: how many bits its answers carry about its records.

Let T be all that a site has answered and D its records. Whatever is known before the run, ``I(D; T)`` is at most
``Σ E KL(P_D(· | past) ‖ Q(· | past))`` for every predictor Q that does not know D (chain rule). Plans may depend on the
past, so this covers a coordinator that chooses them. Q may learn from the past of T.

- *Releases* are lists of integers in a public prefix code (`fedpdmc.federation.derivative_rounding`): their length.
- *Arrivals* of a plan with horizon H, rate λ and a predictor with rate q and velocities from ν = N(0, I):

  ``E ∫_0^{τ∧H} [λ log(λ/q) − λ + q] dt + P(event) κ``,  ``κ = ½ (log 2 − γ) + ½ log 2π``

  κ is the divergence of the law of a drawn velocity, ``ν(dv) (−⟨v, n⟩)_+ √(2π)``, from ν, in every dimension. A flip has a
  rate for each coordinate, and no κ.

The integral is estimated at random times of each chain, without bias. The predictor's rate is ``c |a| |v|`` on reflecting
dynamics and ``c |v_i|`` for a flip, c from the events and the exposure of all chains before. It is an average, over what the
records may be and over the run's randomness: it says how much, not about whom. With private effects the rate at the effects
of the plan's start stands for that along the plan.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from fedpdmc._jax.compilation import compiled
from fedpdmc.clocks import Clock, LatentClock, follow
from fedpdmc.clocks.envelopes.quadratic_rate_bound import signed_rates
from fedpdmc.plan import Plan

logger = logging.getLogger("fedpdmc.site")
KAPPA = 0.5 * (math.log(2) - np.euler_gamma) + 0.5 * math.log(2 * math.pi)  # nats of a drawn velocity
TIMES = 4  # of each chain and plan at which the rate is evaluated
MOST_WORK = 2**27  # records times points in one answer, above which only some chains are evaluated
EVENTS, EXPOSURE = 1.0, 20.0  # the predictor's rate before anything is known: 1/20 in its units
REPORTED = 16.0  # bits: what is reported to the coordinator is rounded up to a multiple
MARGIN = 1.5  # a plan is refused if so many times its expected bits do not fit
ARRIVALS_PER_SAMPLE = 2.0  # process time of all chains for an effective sample, about
POINTS = 256  # of the reference at which the cost of a run is estimated


class InformationSpent(Exception):
    """An answer would carry more information than the site's policy allows."""


class Information:
    """What the answers of a site carry, in bits, in this study and in others with the same records.

    Parameters
    ----------
    records : int
    limits : (float, float)
        The most bits for each record, in this study and in all.
    before : (float, float)
        Bits of earlier answers, in this study and in others.
    keep : callable, optional
        Stores the bits of an answer durably.
    """

    def __init__(
        self,
        records: int,
        limits: tuple[float, float] = (math.inf, math.inf),
        before: tuple[float, float] = (0.0, 0.0),
        keep: Callable[[float], None] | None = None,
    ):
        self.records, self._limits, self._keep = max(records, 1), limits, keep
        self.bits, self._others = before
        self.releases, self.arrivals, self.events = 0.0, 0.0, 0
        self._seen, self._exposure, self._time = EVENTS, EXPOSURE, 0.0
        self._chance = np.random.default_rng()

    @property
    def left(self) -> float:
        """Bits that the site may still give away."""
        study, every = (limit * self.records for limit in self._limits)
        return min(study - self.bits, every - self.bits - self._others)

    @property
    def reported(self) -> float:
        """What the coordinator may know of `bits`."""
        return REPORTED * math.ceil(self.bits / REPORTED)

    def add_release(self, bits: float) -> None:
        """Charge a release before it leaves."""
        if bits > self.left:
            raise InformationSpent(f"a release of {bits:.0f} bits, and {max(self.left, 0.0):.0f} are left")
        self.releases += bits
        self._add(bits)

    def check_run(self, clock: Clock, study) -> None:
        """Refuse a run whose expected cost does not fit, before its first plan."""
        if self.left == math.inf or clock.dynamics.unit_speed:
            return
        a, v = (jnp.asarray(self._chance.standard_normal((POINTS, clock.dim))) for _ in range(2))
        zeta = _latents(clock, np.zeros(POINTS, int))
        rate, shape = (np.asarray(x) for x in _rates_at(clock, zeta, a, v))
        scale = rate.sum() / shape.sum()
        each = (_divergence(rate, scale * shape).sum() + KAPPA * rate.sum()) / POINTS
        if study.duration is not None:
            time = study.chains * study.duration
        else:
            time = ARRIVALS_PER_SAMPLE * study.ess
        needed = time * each / math.log(2)
        logger.info("the run is expected to carry %.0f bits, %.2g for each record", needed, needed / self.records)
        if needed > self.left:
            raise InformationSpent(
                f"the run is expected to carry {needed:.0f} bits, {needed / self.records:.2g} for each record, and "
                f"{max(self.left, 0.0):.0f} are left"
            )

    def check_plans(self, horizon: np.ndarray) -> None:
        """Refuse plans that are likely to cost more than is left."""
        expected = self.arrivals / self._time * float(horizon.sum()) if self._time > 0 else 0.0
        if MARGIN * expected > self.left or self.left <= 0:
            raise InformationSpent(f"plans of about {expected:.0f} bits, and {max(self.left, 0.0):.0f} are left")

    def add_arrivals(
        self, clock: Clock, plan: tuple[np.ndarray, ...], time: np.ndarray, rang: np.ndarray, latents
    ) -> None:
        """Charge the arrivals along plans before they leave."""
        _, start, duration, velocity = plan
        horizon = duration.sum(1)
        length = np.where(rang, np.minimum(time, horizon), horizon)
        chains = np.flatnonzero(horizon > 0)
        work = max(1, math.ceil(len(chains) * TIMES * self.records / MOST_WORK))
        some = chains[self._chance.integers(work) :: work]
        if not len(chains):
            return
        fraction = (np.arange(TIMES) + self._chance.random((len(start), TIMES))) / TIMES
        zeta = _latents(clock, plan[0]) if latents is None else np.asarray(latents)
        rate, shape = (
            np.asarray(x) for x in _rates_along(clock, zeta, fraction * length[:, None], start, duration, velocity)
        )
        # The chains are revealed one after the other: what is known of the first predicts the next.
        weight = length[:, None, None] / TIMES
        exposure = (shape * weight).sum((1, 2))[some] * work
        events = rang[some] * float(work)
        known = (self._seen + np.cumsum(events) - events) / (self._exposure + np.cumsum(exposure) - exposure)
        nats = (_divergence(rate[some], known[:, None, None] * shape[some]) * weight[some]).sum() * work
        nats += 0.0 if clock.dynamics.flips else KAPPA * rang[chains].sum()
        self._seen += events.sum()
        self._exposure += exposure.sum()
        self._time += float(length[chains].sum())
        self.events += int(rang[chains].sum())
        bits = float(nats) / math.log(2)
        self.arrivals += bits
        self._add(bits)

    def _add(self, bits: float) -> None:
        self.bits += bits
        if self._keep is not None:
            self._keep(bits)

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


def _rates(clock: Clock, zeta, a, v):
    """Rates (n, k) of a site at states, and the shape of the predictor's rates."""
    gradient = clock.potential.gradients(a) if zeta is None else clock.potential.gradients(a, zeta)  # type: ignore[call-arg]
    if clock.dynamics.flips:
        return jnp.maximum(signed_rates(clock.dynamics, gradient, v), 0.0), jnp.abs(v)
    shape = jnp.linalg.norm(a, axis=-1) * jnp.linalg.norm(v, axis=-1)
    return jnp.maximum(jnp.sum(gradient * v, -1), 0.0)[:, None], shape[:, None]


_rates_at = compiled(_rates)


@compiled
def _rates_along(clock: Clock, zeta, times, start, duration, velocity):
    """The same at times (C, n) of plans: of shape (C, n, k)."""
    path = follow(clock.dynamics, Plan(jnp.zeros(start.shape[0], int), start, duration, velocity))
    rates, shapes = [], []
    for k in range(times.shape[1]):
        segment = jnp.sum(path.begin <= times[:, k, None], -1) - 1
        a, v = path.state(clock.dynamics, segment, times[:, k] - path.at(path.begin, segment))
        rate, shape = _rates(clock, zeta, a, v)
        rates.append(rate)
        shapes.append(shape)
    return jnp.stack(rates, 1), jnp.stack(shapes, 1)
