"""Private effects of a model of one record: joint moments of Weibull survival against quadrature."""

import functools

import jax
import numpy as np
import pytest

import fedpdmc as fp
from fedpdmc.models import effects_prior, with_effects
from fedpdmc.potentials.latent_program import GroupedRemainder

CHAINS, LENGTH = 256, 30.0
SCALE = 1.0


@functools.cache
def records():
    """Times of five small groups at two sites, a fifth of them censored: the log spread is skewed and hardly informed.

    With more information its lower tail, ``P(s < −c) ∝ e^{−c}``, is many standard deviations away and visited too rarely.
    """
    rng, out = np.random.default_rng(3), []
    for site, sizes in enumerate(([1, 2], [2, 2, 1])):
        group = np.repeat(np.arange(len(sizes)), sizes)
        time = np.exp(0.5) * rng.weibull(1.6, len(group))
        out.append((time, (rng.random(len(group)) < 0.8).astype(float), np.array([f"{site}{g}" for g in group])))
    return out


def sites():
    models = [with_effects(fp.models.weibull(np.ones((len(t), 1)), t, d), g) for t, d, g in records()]
    return [fp.Site(model, name=f"s{m}") for m, model in enumerate(models)]


@functools.cache
def moments():
    """By quadrature over mean, log shape and log spread, and over each effect given them.

    Of a group, ``Σ (t e^{−η})^k − d (log k + k(log t − η))`` has ``Σ t^k`` and ``Σ d log t`` as sufficient statistics.
    """
    grids = np.linspace(-3, 4, 51), np.linspace(-2.5, 2.2, 48), np.linspace(-16, 2.2, 141)
    mean, shape, spread = np.meshgrid(*grids, indexing="ij")
    k = np.exp(shape)
    log_density = -0.5 * (mean**2 + shape**2) / SCALE**2 - (0.5 * np.exp(2 * spread) - spread)
    unit = np.linspace(-6.5, 6.5, 81)
    given = {}
    for time, died, group in records():
        for label in np.unique(group):
            t, d = time[group == label], died[group == label]
            power = np.sum(t ** k[..., None], -1)
            told = d.sum() * shape + k * np.sum(d * np.log(t))
            found = []
            for u in unit:
                eta = mean + np.exp(spread) * u
                found.append(told - k * eta * d.sum() - power * np.exp(-k * eta) - 0.5 * u * u)
            log_like = np.stack(found, -1)
            top = log_like.max(-1, keepdims=True)
            like = np.exp(log_like - top)
            log_density = log_density + np.log(like.sum(-1)) + top[..., 0]
            effect = (like @ unit) / like.sum(-1) * np.exp(spread)
            square = (like @ unit**2) / like.sum(-1) * np.exp(2 * spread)
            given[label] = (effect, square)
    p = np.exp(log_density - log_density.max())
    p /= p.sum()
    out = _functions(mean, shape, spread)
    for label, (one, two) in given.items():
        out |= {f"z{label}": one, f"zz{label}": two, f"zm{label}": one * mean, f"zt{label}": one * np.exp(spread)}
    return {name: float((p * value).sum()) for name, value in out.items()}


def _functions(m, k, s):
    """Moments, with the spread and a bounded function of its logarithm: powers of s would be made in its far lower tail."""
    t, low = np.exp(s), np.maximum(s, -2.0)
    return {
        "m": m, "k": k, "t": t, "low": low, "mm": m**2, "kk": k**2, "tt": t**2, "mk": m * k, "kt": k * t, "mt": m * t,
        "mmm": m**3, "ttt": t**3,
    }  # fmt: skip


def worst_deviation(seed):
    """The largest deviation of any moment from quadrature, in standard errors over chains."""
    owners = sites()
    prior = effects_prior(owners[0].potential, scale=SCALE)  # type: ignore[arg-type]
    post = fp.sample(owners, prior, chains=CHAINS, duration=LENGTH, burn_in=20.0, seed=seed, progress=False)
    assert post.certified
    found = _functions(*np.moveaxis(post.draws(50), -1, 0))
    for site in owners:
        own = site.latent_posterior()
        m, _, s = np.moveaxis(own.theta, -1, 0)
        for j, label in enumerate(own.names):
            z = own.z[..., j]
            found |= {f"z{label}": z, f"zz{label}": z * z, f"zm{label}": z * m, f"zt{label}": z * np.exp(s)}
    exact, worst = moments(), 0.0
    for name, values in found.items():
        means = values.reshape(CHAINS, -1).mean(1)
        worst = max(worst, abs(means.mean() - exact[name]) / (means.std(ddof=1) / np.sqrt(CHAINS)))
    return worst


@pytest.mark.long
def test_joint_moments_of_parameters_and_effects():
    assert worst_deviation(5) < 4


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The posterior is far from its reference")
def test_a_map_without_its_volume_is_caught(monkeypatch):
    right = GroupedRemainder._own

    def wrong(self, a, zeta):
        u = self._mapped(a, zeta)[-1]
        return right(self, a, zeta) - 0.5 * (self.model.present @ jax.nn.softplus(-u).sum(-1))

    monkeypatch.setattr(GroupedRemainder, "_own", wrong)
    jax.clear_caches()
    assert worst_deviation(5) > 6
    monkeypatch.undo()
    jax.clear_caches()
