"""A linear model with private effects of few groups, whose log spread is bent: joint moments against quadrature."""

import functools

import numpy as np
import pytest

import fedpdmc as fp

CHAINS, LENGTH = 512, 12.0


@functools.cache
def records():
    """Two sites of three and two groups with two to five records each, shifted up."""
    rng, found = np.random.default_rng(12), []
    for site, sizes in enumerate([(4, 2, 5), (3, 4)]):
        group = np.repeat(np.arange(len(sizes)), sizes)
        y = 0.8 + 0.7 * rng.normal(size=len(sizes))[group] + 0.6 * rng.normal(size=len(group))
        found.append((y, np.array([f"{site}{g}" for g in group])))
    return found


def of_parameters(mean, noise, spread):
    """Moments up to the third, and products."""
    found = {"m": mean, "n": noise, "s": spread, "ms": mean * spread, "ns": noise * spread}
    found |= {"mm": mean**2, "nn": noise**2, "ss": spread**2, "sss": spread**3, "nnn": noise**3}
    return found | {"low": 1.0 * (spread < -2.025)}


@functools.cache
def moments(volume=True):
    """By quadrature over mean, log standard deviation of the noise and log spread; the effects are Gaussian given them.

    Without ``volume``, of the density in which the log spread has no factor ``e^s``.
    """
    grids = np.linspace(-2.5, 3.5, 61), np.linspace(-2.2, 1.6, 61), np.linspace(-7.0, 2.4, 189)
    mean, noise, spread = np.meshgrid(*grids, indexing="ij")
    within, between = np.exp(2 * noise), np.exp(2 * spread)
    log_density = -0.5 * mean**2 - 0.5 * within + noise - 0.5 * between + volume * spread
    effects = {}
    for y, group in records():
        for label in np.unique(group):
            own = y[group == label]
            n, off = len(own), own.sum() - len(own) * mean
            square = np.sum(own**2) - 2 * mean * own.sum() + n * mean**2
            whole = within + n * between
            shrunk = between * off / whole
            log_density += -(n - 1) * noise - 0.5 * np.log(whole) - 0.5 * (square - shrunk * off) / within
            effects[label] = shrunk, shrunk**2 + between * within / whole
    weight = np.exp(log_density - log_density.max())
    weight /= weight.sum()
    found = of_parameters(mean, noise, spread)
    for label, (one, two) in effects.items():
        found |= {f"z{label}": one, f"zz{label}": two, f"zm{label}": one * mean}
    return {name: float((weight * value).sum()) for name, value in found.items()}


@functools.cache
def run(bounce="reflect"):
    """The posterior, and all moments of each chain."""
    sites = []
    for m, (y, group) in enumerate(records()):
        model = fp.models.random_effects(np.ones((len(y), 1)), y, group, family="linear")
        sites.append(fp.Site(model, name=f"s{m}"))
    prior = fp.models.effects_prior(sites[0].potential, scale=1.0)
    post = fp.sample(sites, prior, chains=CHAINS, duration=LENGTH, seed=3, progress=False, bounce=bounce)
    found = of_parameters(*np.moveaxis(post.draws(24), -1, 0))
    for site in sites:
        own = site.latent_posterior()
        for k, label in enumerate(own.names):
            z, mean = own.z[..., k], own.theta[..., 0]
            found |= {f"z{label}": z, f"zz{label}": z**2, f"zm{label}": z * mean}
    return post, {name: np.mean(values, 1) for name, values in found.items()}


def deviations(exact, bounce="reflect"):
    """In standard errors over chains."""
    found = run(bounce)[1]
    return {
        name: abs(value.mean() - exact[name]) / (value.std(ddof=1) / np.sqrt(CHAINS)) for name, value in found.items()
    }


@pytest.mark.filterwarnings("ignore:The posterior is far from its reference")
@pytest.mark.parametrize("bounce", ["reflect", "draw"])
def test_joint_moments_with_a_bent_log_spread(bounce):
    post, _ = run(bounce)
    assert post.run.method.reference.bend is not None
    assert post.names == ["x0", "log_sigma", "log_sd"]
    assert post.certified
    off = deviations(moments(), bounce)
    assert max(off.values()) < 4, off


def test_the_density_of_the_spread_itself_is_told_apart():
    assert deviations(moments(volume=False))["s"] > 8
