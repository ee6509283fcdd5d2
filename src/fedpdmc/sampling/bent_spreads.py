"""How log spreads are bent: from the profile of their posterior, asked for before anything is drawn."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from scipy.special import log_ndtr

from fedpdmc.errors import InputError
from fedpdmc.members.site import Member, NotBent
from fedpdmc.potentials import Quadratic
from fedpdmc.sampling.laplace_reference import Search
from fedpdmc.sampling.mode_search import Mode, Point, positive_definite
from fedpdmc.whitening import LEAST_STRAIGHT, NUMBERS, RATES, Bend, bent, moderate, steepness, straight

# Distances of the profile's points from the mode, in standard deviations: six more, from −12 to 6, made no better maps.
AWAY = (-3.0, 3.0)
# The least slope there, relative to a Gaussian's, of a coordinate that stays straight: with 0.75 one in a thousand of a
# log spread has twice the Gaussian's density, with 0.6 nine times, with 0.5 a hundred times.
GAUSSIAN = 0.7
LEAST_SLOPE = 0.1  # per unit of the log spread, below which a tail is no tail
RANGE = 4.0  # of u, to both sides, in which T is fitted
POINTS = 161  # at which it is fitted
WEIGHT = 0.25  # how fast their weight falls: exp(−WEIGHT u²/2)


class Bending(NamedTuple):
    """A search that goes on in bent coordinates."""

    rounds: int  # that the profile took: one for each of its points
    bend: Bend | None  # None where nothing needs to be bent
    search: Search  # of the same sites as functions of bent coordinates
    start: Mode  # where it goes on


class Profile:
    """Minus the log posterior of one coordinate t about a centre, the others integrated out by Laplace's method.

    Along ``x = c + w t``, with w the regression of all coordinates on this one, sites are asked for gradient g and
    Hessian H. With o the others, ``g_t − H_to H_oo⁻¹ g_o`` is the slope of the profile, ``H_tt − H_to H_oo⁻¹ H_ot`` its
    curvature, and ``½ log det H_oo`` is added to it. At the centre the search for the mode has these.
    """

    def __init__(self, search: Search, center: np.ndarray, hessian: np.ndarray, which: int):
        self.search, self.center, self.which = search, center, which
        covariance = np.linalg.inv(positive_definite(hessian))
        self.sd = float(np.sqrt(covariance[which, which]))
        self.way = covariance[:, which] / covariance[which, which]
        self.known: dict[float, tuple[float, float, float]] = {}
        self._add(0.0, np.zeros_like(center), hessian)

    def ask(self, distance: float) -> None:
        """Derivatives at so many standard deviations; nothing is kept of what is not finite."""
        t = distance * self.sd
        found = self.search.ask(self.center + self.way * t)
        if np.all(np.isfinite(found.gradient)) and np.all(np.isfinite(found.hessian)):
            self._add(t, found.gradient, found.hessian)

    def _add(self, t: float, gradient: np.ndarray, hessian: np.ndarray) -> None:
        others = np.delete(np.arange(len(self.center)), self.which)
        inner, cross = positive_definite(hessian[np.ix_(others, others)]), hessian[self.which, others]
        along = np.linalg.solve(inner, cross)
        slope = float(gradient[self.which] - along @ gradient[others])
        curvature = float(hessian[self.which, self.which] - along @ cross)
        self.known[t] = (slope, curvature, 0.5 * float(np.linalg.slogdet(inner)[1]))

    def gaussian(self) -> bool:
        """Whether tails on both sides are about as steep as those of a Gaussian, or steeper."""
        ratios = np.asarray([slope * self.sd**2 / t for t, (slope, _, _) in self.known.items() if t])
        return len(ratios) == len(AWAY) and bool(np.all(ratios > GAUSSIAN))

    def energy(self) -> tuple[np.ndarray, np.ndarray]:
        """t, and minus the log density there up to a constant.

        The upper tail goes on with the last slope. The likelihood of a small spread τ is ``L_0 + L_1 τ² + …``, and the prior
        density of τ at zero is positive: below the lowest point ``t_0`` the slope is ``−1 + (E'(t_0) + 1) e^{2(t − t_0)}``.

        Raises
        ------
        ValueError
            If a tail does not fall.
        """
        # Slow to import, and needed for effects of groups only.
        from scipy.interpolate import CubicHermiteSpline, PchipInterpolator

        t = np.asarray(sorted(self.known))
        slope, curvature, volume = (np.asarray([self.known[x][k] for x in t]) for k in range(3))
        if len(t) <= len(AWAY) or not (slope[0] < -LEAST_SLOPE and slope[-1] > LEAST_SLOPE):
            raise ValueError("a profile without tails")
        inside = np.linspace(t[0], t[-1], 2001)
        rise = CubicHermiteSpline(t, slope, curvature).antiderivative()
        energy = rise(inside) + PchipInterpolator(t, volume)(inside)
        lower, upper = (np.linspace(0, 30 / x, 601)[1:] for x in (1.0, slope[-1]))
        every = np.concatenate([t[0] - lower[::-1], inside, t[-1] + upper])
        below = lower + (slope[0] + 1) / 2 * np.expm1(-2 * lower)
        energy = np.concatenate([energy[0] + below[::-1], energy, energy[-1] + slope[-1] * upper])
        return every, energy - energy.min()

    def numbers(self) -> np.ndarray:
        """Those of the bend under which this density is nearly a standard Gaussian.

        ``F⁻¹(Φ(u))``, with F the distribution function of s, would make it one. The slope of T is fitted to that of this
        map, by least squares with coefficients that are not negative.
        """
        # Slow to import.
        from scipy.optimize import nnls

        t, energy = self.energy()
        steps = np.diff(t)
        weight = np.exp(-0.5 * (energy[1:] + energy[:-1])) * steps
        below, above = np.cumsum(weight), np.cumsum(weight[::-1])[::-1]
        u, middle = np.linspace(-RANGE, RANGE, POINTS), (t[1:] + t[:-1]) / 2
        with np.errstate(divide="ignore"):
            lower = np.interp(log_ndtr(u), np.log(below / below[-1]), middle)
            upper = np.interp(-log_ndtr(-u), -np.log(above / above[0]), middle)
        wanted = np.where(u < 0, lower, upper)
        slope = np.gradient(wanted, u)
        basis = np.stack([np.ones_like(u), *(np.exp(sign * k * u) for sign in (-1, 1) for k in RATES)], 1)
        importance = np.exp(-0.5 * WEIGHT * u * u) / slope
        found = nnls(basis * importance[:, None], slope * importance)[0]
        numbers = np.zeros(NUMBERS)
        numbers[1:] = found
        numbers[1] = max(found[0], 2 * LEAST_STRAIGHT * float(steepness(np.zeros(()), numbers)))
        numbers[0] = self.center[self.which] + wanted[POINTS // 2] - float(bent(np.zeros(()), numbers))
        if not moderate(numbers[:, None]):
            raise ValueError("no map")
        return numbers


def bendable(sites: Sequence[Member], prior: Quadratic | None) -> tuple[int, ...]:
    """The log spreads that can be bent: of grouped effects, under a prior of `effects_prior`."""
    index = next((site.spreads for site in sites if site.spreads), ())
    if not index or (prior is not None and np.any(np.asarray(prior.precision)[list(index)])):
        return ()
    try:
        for site in sites:
            site.bent(Bend(index, jnp.asarray(straight(len(index)))))
    except NotBent:
        return ()
    return index


def check_bend(sites: Sequence[Member], prior: Quadratic | None, bend: Bend | None) -> None:
    """Refuse a reference whose bent coordinates are not the log spreads of these sites."""
    if bend is not None and bend.index != bendable(sites, prior):
        raise InputError(
            "reference", "one with bent log spreads, made for other sites or another prior", "Leave it out."
        )


def bending(search: Search, mode: Mode, index: tuple[int, ...]) -> Bending:
    """Bend these log spreads where their posterior is far from Gaussian."""
    profiles = [Profile(search, mode.point.x + mode.step, mode.point.hessian, which) for which in index]
    for profile, distance in itertools.product(profiles, AWAY):
        profile.ask(distance)
    numbers, rounds = straight(len(index)), len(index) * len(AWAY)
    for profile in profiles:
        if profile.gaussian():
            continue
        try:
            numbers[:, index.index(profile.which)] = profile.numbers()
        except ValueError:
            continue
    if np.array_equal(numbers, straight(len(index))):
        return Bending(rounds, None, search, mode)
    bend = Bend(index, jnp.asarray(numbers))
    return Bending(rounds, bend, search.bent(bend), _start(mode, bend))


def _start(mode: Mode, bend: Bend) -> Mode:
    """The mode's Gaussian in bent coordinates: about ``u = 0`` where a coordinate is bent, the others following."""
    center, hessian = mode.point.x + mode.step, positive_definite(mode.point.hessian)
    covariance, numbers = np.linalg.inv(hessian), np.asarray(bend.numbers)
    scale, at = np.ones(len(center)), center.copy()
    for k, which in enumerate(bend.index):
        own = numbers[:, k]
        if np.array_equal(own, straight(1)[:, 0]):
            continue
        at += covariance[:, which] / covariance[which, which] * (float(bent(np.zeros(()), own)) - center[which])
        scale[which] = float(steepness(np.zeros(()), own))
    at[scale != 1.0] = 0.0
    point = Point(at, mode.point.value, mode.point.gradient, hessian * np.outer(scale, scale), mode.point.parts, None)
    return Mode(point, np.zeros_like(at), 0)
