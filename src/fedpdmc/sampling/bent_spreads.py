"""How log spreads are bent: from the profile of their posterior, asked for before anything is drawn."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from scipy.special import log_ndtr

from fedpdmc.bent_coordinates import NUMBERS, RATES, Bend, bent, steepness, straight
from fedpdmc.errors import InputError
from fedpdmc.members.member import Member, NotBent
from fedpdmc.members.site import Site
from fedpdmc.potentials import Quadratic, RandomEffects
from fedpdmc.sampling.laplace_reference import Search
from fedpdmc.sampling.mode_search import Mode, Point, positive_definite

# Distances of the profile's points, in standard deviations: in a first exchange with the sites, and in a second one. And the
# least slope at the first, relative to a Gaussian's, of a coordinate that stays straight: with 0.75 one in a thousand of a
# log spread has twice the Gaussian's density, with 0.6 nine times, with 0.5 a hundred times.
FIRST, SECOND, GAUSSIAN = (-3.0, 3.0), (-12.0, -6.0, -1.5, 0.0, 1.5, 6.0), 0.7
# A slope per unit of the log spread below which a tail is no tail.
LEAST_SLOPE = 0.1
# The range of u in which T is fitted, how much its ends count, and the least straight part of T'(0).
RANGE, POINTS, WEIGHT, LEAST_STRAIGHT = 4.0, 161, 0.25, 0.1


class Bending(NamedTuple):
    """A search that goes on in bent coordinates.

    Attributes
    ----------
    rounds : int
        Exchanges with the sites that the profile took. The points of one are known beforehand.
    bend : Bend or None
        None where nothing needs to be bent.
    search : Search
        Of the same sites as functions of bent coordinates.
    start : Mode
        Where it goes on.
    """

    rounds: int
    bend: Bend | None
    search: Search
    start: Mode


class Profile:
    """Minus the log posterior of one coordinate t about a centre, the others integrated out by Laplace's method.

    Along ``x = c + w t``, with w the regression of all coordinates on this one, sites are asked for gradient g and
    Hessian H. With o the others, ``g_t − H_to H_oo⁻¹ g_o`` is the slope of the profile, ``H_tt − H_to H_oo⁻¹ H_ot`` its
    curvature, and ``½ log det H_oo`` is added to it.
    """

    def __init__(self, search: Search, center: np.ndarray, covariance: np.ndarray, which: int):
        self.search, self.center, self.which = search, center, which
        self.sd = float(np.sqrt(covariance[which, which]))
        self.way = covariance[:, which] / covariance[which, which]
        self.known: dict[float, tuple[float, float, float]] = {}

    def ask(self, distance: float) -> None:
        """Derivatives at so many standard deviations; nothing is kept of what is not finite."""
        t = distance * self.sd
        found = self.search.ask(self.center + self.way * t)
        if not (np.all(np.isfinite(found.gradient)) and np.all(np.isfinite(found.hessian))):
            return
        others = np.delete(np.arange(len(self.center)), self.which)
        inner, cross = positive_definite(found.hessian[np.ix_(others, others)]), found.hessian[self.which, others]
        along = np.linalg.solve(inner, cross)
        slope = float(found.gradient[self.which] - along @ found.gradient[others])
        curvature = float(found.hessian[self.which, self.which] - along @ cross)
        self.known[t] = (slope, curvature, 0.5 * float(np.linalg.slogdet(inner)[1]))

    def gaussian(self) -> bool:
        """Whether tails on both sides are about as steep as those of a Gaussian, or steeper."""
        ratios = np.asarray([slope * self.sd**2 / t for t, (slope, _, _) in self.known.items()])
        return len(ratios) == len(FIRST) and bool(np.all(ratios > GAUSSIAN))

    def energy(self) -> tuple[np.ndarray, np.ndarray]:
        """t, and minus the log density there up to a constant; tails go on with the last slopes.

        Raises
        ------
        ValueError
            If a tail does not fall.
        """
        # Slow to import, and needed for effects of groups only.
        from scipy.interpolate import CubicHermiteSpline, PchipInterpolator

        t = np.asarray(sorted(self.known))
        slope, curvature, volume = (np.asarray([self.known[x][k] for x in t]) for k in range(3))
        if len(t) < len(FIRST) or not (slope[0] < -LEAST_SLOPE and slope[-1] > LEAST_SLOPE):
            raise ValueError("a profile without tails")
        inside = np.linspace(t[0], t[-1], 2001)
        rise = CubicHermiteSpline(t, slope, curvature).antiderivative()
        energy = rise(inside) + PchipInterpolator(t, volume)(inside)
        lower, upper = (np.linspace(0, 30 / abs(x), 301)[1:] for x in (slope[0], slope[-1]))
        every = np.concatenate([t[0] - lower[::-1], inside, t[-1] + upper])
        energy = np.concatenate([energy[0] - slope[0] * lower[::-1], energy, energy[-1] + slope[-1] * upper])
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
        numbers[1] = max(found[0], LEAST_STRAIGHT * float(steepness(np.zeros(()), numbers)))
        numbers[0] = self.center[self.which] + wanted[POINTS // 2] - float(bent(np.zeros(()), numbers))
        if not np.all(np.isfinite(numbers)):
            raise ValueError("no map")
        return numbers


def bendable(sites: Sequence[Member], prior: Quadratic | None) -> tuple[int, ...]:
    """The log spreads that can be bent: of grouped effects, of sites in this process, under a prior of `effects_prior`."""
    models = [site.potential for site in sites if isinstance(site, Site) and site.latents]
    index = models[0].spreads if models and isinstance(models[0], RandomEffects) else ()
    try:
        for site in sites:
            site.bent(Bend(index, jnp.asarray(straight(len(index)))))
    except NotBent:
        return ()
    return () if prior is not None and np.any(np.asarray(prior.precision)[list(index)]) else index


def check_bend(sites: Sequence[Member], prior: Quadratic | None, bend: Bend | None) -> None:
    """Refuse a reference whose bent coordinates are not the log spreads of these sites."""
    if bend is not None and bend.index != bendable(sites, prior):
        raise InputError(
            "reference", "one with bent log spreads, made for other sites or another prior", "Leave it out."
        )


def bending(search: Search, mode: Mode, index: tuple[int, ...]) -> Bending:
    """Bend these log spreads where their posterior is far from Gaussian."""
    center, covariance = mode.point.x + mode.step, np.linalg.inv(positive_definite(mode.point.hessian))
    profiles = [Profile(search, center, covariance, which) for which in index]
    for profile, distance in itertools.product(profiles, FIRST):
        profile.ask(distance)
    left = [profile for profile in profiles if not profile.gaussian()]
    for profile, distance in itertools.product(left, SECOND):
        profile.ask(distance)
    numbers = straight(len(index))
    for profile in left:
        try:
            numbers[:, index.index(profile.which)] = profile.numbers()
        except ValueError:
            continue
    rounds = 1 + bool(left)
    if np.array_equal(numbers, straight(len(index))):
        return Bending(rounds, None, search, mode)
    bend = Bend(index, jnp.asarray(numbers))
    bent_search = search._replace(sites=tuple(site.bent(bend) for site in search.sites))
    return Bending(rounds, bend, bent_search, _start(mode, bend))


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
