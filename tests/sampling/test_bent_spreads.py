"""Bends of log spreads: made from a profile, nearly Gaussian after it, and only where they are needed and possible."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import fedpdmc as fp
from fedpdmc.errors import InputError
from fedpdmc.sampling.bent_spreads import AWAY, Profile, bendable, check_bend
from fedpdmc.sampling.defaults import walls_of
from fedpdmc.sampling.mode_search import Point
from fedpdmc.whitening import Bend, Reference, bent, steepness, straight

WIDE = np.linspace(-40, 12, 52001)


def spread_energy(s, groups=8, noise=0.5, square=4.8):
    """Minus the log posterior of a log spread: groups with known errors, under a half-normal prior."""
    variance = np.exp(2 * s) + noise**2
    return (groups - 1) / 2 * np.log(variance) + square / (2 * variance) + 0.5 * np.exp(2 * s) - s


class Search:
    """Derivatives of an energy of the second coordinate, and of the first about a line in it."""

    def __init__(self, energy):
        self.energy = energy

    def ask(self, x):
        h = 1e-4
        at = self.energy(x[1] + h * np.arange(-1, 2))
        slope, curvature = (at[2] - at[0]) / (2 * h), (at[2] - 2 * at[1] + at[0]) / h**2
        rest = 3 * (x[0] - 0.5 * x[1])
        gradient = np.array([rest, slope - 0.5 * rest])
        return Point(x, 0.0, gradient, np.array([[3.0, -1.5], [-1.5, curvature + 0.75]]), [])


def profile(energy):
    """Its profile about the mode, as a run makes it."""
    mode = WIDE[np.argmin(energy(WIDE))]
    curvature = Search(energy).ask(np.array([0.5 * mode, mode])).hessian
    search: Any = Search(energy)
    found = Profile(search, np.array([0.5 * mode, mode]), curvature, 1)
    for distance in AWAY:
        found.ask(distance)
    return found


def excess(energy, numbers):
    """The largest log ratio of the density of u to that of the Gaussian with its mean and variance, within a range of u."""
    u = np.linspace(-6, 6, 2401)
    if np.array_equal(numbers, straight(1)[:, 0]):
        u = WIDE
    log = -energy(bent(u, numbers)) + np.log(steepness(u, numbers))
    p = np.exp(log - log.max())
    p /= p.sum()
    mean = np.sum(p * u)
    sd = np.sqrt(np.sum(p * (u - mean) ** 2))
    share, ratio = np.cumsum(p), log + 0.5 * ((u - mean) / sd) ** 2
    inside = (share > 1e-4) & (share < 1 - 1e-4)
    return float(np.max(ratio[inside]) - ratio[np.searchsorted(share, 0.5)])


@pytest.mark.parametrize(("groups", "noise", "square"), [(8, 0.5, 4.8), (4, 0.5, 2.0), (15, 0.5, 7.5), (30, 0.5, 9.0)])
def test_a_bent_log_spread_is_nearly_gaussian(groups, noise, square):
    def energy(s):
        return spread_energy(s, groups, noise, square)

    found = profile(energy)
    assert not found.gaussian()
    assert excess(energy, found.numbers()) < 1.5
    if groups > 4:
        assert excess(energy, straight(1)[:, 0]) > 5


def test_a_gaussian_stays_straight():
    assert profile(lambda s: 0.5 * ((s + 0.3) / 0.2) ** 2).gaussian()


def test_a_profile_without_a_tail_is_no_profile():
    found = profile(lambda s: 0.5 * np.maximum(s, -1.0) ** 2)
    with pytest.raises(ValueError, match="tails"):
        found.numbers()


def test_what_can_be_bent():
    model = fp.models.random_effects(np.ones((4, 1)), [0.0, 1.0, 1.0, 0.0], ["a", "a", "b", "b"])
    sites, bend = [fp.Site(model, name="s")], Bend((1,), jnp.asarray(straight(1)))
    plain = fp.Site(fp.models.logistic(np.ones((2, 2)), [0.0, 1.0]), name="t")
    flat = fp.models.effects_prior(model).normal
    assert bendable(sites, flat) == (1,)
    assert bendable([*sites, plain], flat) == ()
    assert bendable(sites, fp.models.normal_prior(2)) == ()
    check_bend(sites, flat, bend)
    with pytest.raises(InputError, match="made for other sites or another prior"):
        check_bend(sites, fp.models.normal_prior(2), bend)
    reference = Reference(jnp.zeros(2), jnp.ones(2), bend=bend)
    with pytest.raises(InputError, match="constrained"):
        walls_of((np.array([[0.0, 1.0]]), np.ones(1)), reference)
