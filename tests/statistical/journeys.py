"""Random plans, a site's arrivals along them, and the integrated rate in plain NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import fedpdmc as fp
from fedpdmc._jax.precision import double_precision
from fedpdmc._jax.random_streams import chain_keys
from fedpdmc.members.run_coordinates import Opening, local_columns, open_site
from fedpdmc.plan import Plan
from fedpdmc.sampling.engines.compiled_loop import LocalFederation

CHAINS = 16_384
PIECES, NODES = 16, 3

Gradient = Callable[[np.ndarray], np.ndarray]


class Journey(NamedTuple):
    """Plans of all chains as NumPy arrays: start (C, d), duration (C, S), velocity (C, S, d)."""

    rotating: bool
    start: np.ndarray
    duration: np.ndarray
    velocity: np.ndarray

    def move(self, a, v, s):
        """State at time s (C,) after ``(a, v)``."""
        s = s[:, None]
        if self.rotating:
            return a * np.cos(s) + v * np.sin(s), v * np.cos(s) - a * np.sin(s)
        return a + v * s, v

    def segments(self):
        """Start, velocity, begin and duration of each segment in turn."""
        a, begin = self.start, np.zeros(len(self.start))
        for k in range(self.duration.shape[1]):
            yield a, self.velocity[:, k], begin, self.duration[:, k]
            a, begin = self.move(a, self.velocity[:, k], self.duration[:, k])[0], begin + self.duration[:, k]

    def at(self, t: np.ndarray):
        """State at times t (C,) since the start."""
        here, speed = self.start, self.velocity[:, 0]
        for a, v, begin, _ in self.segments():
            inside = (t >= begin)[:, None]
            moved, turned = self.move(a, v, np.maximum(t - begin, 0.0))
            here, speed = np.where(inside, moved, here), np.where(inside, turned, speed)
        return here, speed

    def integral(self, rate: Callable[[np.ndarray, np.ndarray], np.ndarray], until: np.ndarray) -> np.ndarray:
        """``∫_0^until rate(a(s), v(s)) ds`` for each chain, by composite Gauss–Legendre."""
        nodes, weights = np.polynomial.legendre.leggauss(NODES)
        fractions = ((np.arange(PIECES)[:, None] + (nodes + 1) / 2) / PIECES).ravel()
        total = np.zeros(len(self.start))
        for a, v, begin, duration in self.segments():
            length = np.clip(until - begin, 0.0, duration)
            for fraction, weight in zip(fractions, np.tile(weights / (2 * PIECES), PIECES), strict=True):
                total += weight * length * rate(*self.move(a, v, fraction * length))
        return total


def wander(dynamics, center, spread, seed: int, *, reach: float = 1.0, segments: int = 2) -> Journey:
    """Random plans that start about ``center`` and whose segments last up to ``reach``; some use one segment only."""
    rng = np.random.default_rng(seed)
    dim = len(center)
    start = center + spread * rng.normal(size=(CHAINS, dim))
    velocity = rng.normal(size=(CHAINS, segments, dim))
    velocity = np.sign(velocity) if dynamics.unit_speed else velocity
    duration = reach * rng.uniform(0.3, 1.0, (CHAINS, segments))
    duration[: CHAINS // 8, 1:] = 0.0
    return Journey(dynamics.flow.rotating, start, duration, velocity)


def whitened(gradient: Gradient, reference) -> Gradient:
    """``Sᵀ ∇U(c + S a)``."""
    center, scale = np.asarray(reference.center), np.asarray(reference.matrix)
    return lambda a: gradient(center + a @ scale.T) @ scale


def rates_of(dynamics, gradient: Gradient):
    """The rate of every mark: of each coordinate's flip, or of the reflection."""
    if dynamics.flips:
        return lambda a, v: np.maximum(v * gradient(a), 0.0)
    return lambda a, v: np.maximum(np.sum(v * gradient(a), -1, keepdims=True), 0.0)


class Heard(NamedTuple):
    """A site's arrivals."""

    time: np.ndarray
    rang: np.ndarray
    mark: np.ndarray


@double_precision
def listen(site: fp.Site, opening: Opening, journey: Journey, seed: int, number: int = 3) -> Heard:
    """One round with one site; every chain sends its plan of this number."""
    federation = LocalFederation(
        [site.name],
        [open_site(site, opening)],
        [local_columns(site, opening)],
        [chain_keys(jax.random.key(seed), CHAINS)],
        CHAINS,
    )
    plan = Plan(
        jnp.full(CHAINS, number), *(jnp.asarray(x) for x in (journey.start, journey.duration, journey.velocity))
    )
    (arrival,) = federation.exchange(plan)
    return Heard(*(np.asarray(x) for x in (arrival.time, arrival.rang, arrival.mark)))


def levels(journey: Journey, rates, heard: Heard, seed: int) -> np.ndarray:
    """The compensator at each arrival, Exp(1) if the site is right.

    A clock that has not rung by the horizon has a remaining level that is Exp(1) again, which is drawn here.
    """
    passed = journey.integral(lambda a, v: rates(a, v).sum(-1), heard.time)
    rest = np.random.default_rng(seed).exponential(size=len(passed))
    return np.where(heard.rang, passed, passed + rest)
