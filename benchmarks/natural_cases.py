"""Models that statisticians write, as NumPyro programs with made-up records: what `natural_models` runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax.scipy import special


class Case(NamedTuple):
    """A model, and a function of a random generator that makes its records."""

    title: str
    model: Callable
    records: Callable[[np.random.Generator], dict]


def ordinal(X, y):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([2]).to_event(1))
    cuts = numpyro.sample("cuts", dist.TransformedDistribution(
        dist.Normal(0, 2).expand([3]).to_event(1), dist.transforms.OrderedTransform()))  # fmt: skip
    numpyro.sample("y", dist.OrderedLogistic(X @ beta, cuts), obs=y)


def zero_inflated_negative_binomial(x, y):
    a, b = numpyro.sample("a", dist.Normal(0, 2)), numpyro.sample("b", dist.Normal(0, 1))
    zero = numpyro.sample("zero", dist.Beta(1, 3))
    phi = numpyro.sample("phi", dist.LogNormal(0, 1))
    numpyro.sample("y", dist.ZeroInflatedNegativeBinomial2(jnp.exp(a + b * x), phi, gate=zero), obs=y)


def beta_regression(x, y):
    a, b = numpyro.sample("a", dist.Normal(0, 1.5)), numpyro.sample("b", dist.Normal(0, 1))
    k = numpyro.sample("k", dist.LogNormal(2, 1))
    mean = jax.nn.sigmoid(a + b * x)
    numpyro.sample("y", dist.Beta(mean * k, (1 - mean) * k), obs=y)


def censored_log_normal(x, t, died):
    a, b = numpyro.sample("a", dist.Normal(0, 2)), numpyro.sample("b", dist.Normal(0, 1))
    s = numpyro.sample("s", dist.HalfNormal(1))
    u = (jnp.log(t) - a - b * x) / s
    numpyro.factor("t", jnp.sum(jnp.where(died, -0.5 * u**2 - jnp.log(s), special.log_ndtr(-u))))


def gompertz(x, t, died):
    a, b = numpyro.sample("a", dist.Normal(-2, 2)), numpyro.sample("b", dist.Normal(0, 1))
    c = numpyro.sample("c", dist.LogNormal(-1, 0.5))
    log_hazard = a + b * x + c * t
    numpyro.factor("t", jnp.sum(died * log_hazard - jnp.exp(a + b * x) * jnp.expm1(c * t) / c))


def hierarchical_poisson(group, x, y):
    mu, tau = numpyro.sample("mu", dist.Normal(0, 2)), numpyro.sample("tau", dist.HalfNormal(1))
    z = numpyro.sample("z", dist.Normal(0, 1).expand([6]).to_event(1))
    b = numpyro.sample("b", dist.Normal(0, 1))
    numpyro.sample("y", dist.Poisson(jnp.exp(mu + tau * z[group] + b * x)), obs=y)


def horseshoe(X, y):
    tau = numpyro.sample("tau", dist.HalfCauchy(1))
    local = numpyro.sample("local", dist.HalfCauchy(1).expand([5]).to_event(1))
    z = numpyro.sample("z", dist.Normal(0, 1).expand([5]).to_event(1))
    s = numpyro.sample("s", dist.HalfNormal(1))
    numpyro.sample("y", dist.Normal(X @ (z * local * tau), s), obs=y)


def gp_classification(place, y):
    """A squared-exponential kernel with the small noise on its diagonal that makes its factor exist."""
    length = numpyro.sample("length", dist.LogNormal(0, 0.5))
    scale = numpyro.sample("scale", dist.HalfNormal(2))
    z = numpyro.sample("z", dist.Normal(0, 1).expand([len(place)]).to_event(1))
    square = (place[:, None] - place) ** 2
    factor = jnp.linalg.cholesky(jnp.exp(-0.5 * square / length**2) + 1e-4 * jnp.eye(len(place)))
    numpyro.sample("y", dist.Bernoulli(logits=scale * factor @ z), obs=y)


def hidden_markov(y):
    """Two states, summed out from left to right."""
    stay = numpyro.sample("stay", dist.Beta(8, 2).expand([2]).to_event(1))
    low, gap = numpyro.sample("low", dist.Normal(0, 2)), numpyro.sample("gap", dist.HalfNormal(3))
    moves = jnp.log(jnp.array([[stay[0], 1 - stay[0]], [1 - stay[1], stay[1]]]))
    seen = dist.Normal(jnp.stack([low, low + gap]), 1.0).log_prob(y[:, None])

    def step(forward, here):
        return special.logsumexp(forward[:, None] + moves, axis=0) + here, None

    last, _ = jax.lax.scan(step, seen[0] - jnp.log(2.0), seen[1:])
    numpyro.factor("y", special.logsumexp(last))


def epidemic(cases):
    """Susceptible, infected and recovered shares by Euler steps of a day; counts of new cases."""
    beta, gamma = numpyro.sample("beta", dist.LogNormal(-0.7, 0.5)), numpyro.sample("gamma", dist.LogNormal(-1.5, 0.5))
    first = numpyro.sample("first", dist.Beta(2, 100))

    def step(state, _):
        s, i = state
        new = beta * s * i
        return (s - new, i + new - gamma * i), new

    _, new = jax.lax.scan(step, (1 - first, first), None, len(cases))
    numpyro.sample("cases", dist.Poisson(1000 * new, validate_args=False), obs=cases)


def bradley_terry(winner, loser):
    skill = numpyro.sample("skill", dist.Normal(0, 1).expand([6]).to_event(1))
    numpyro.sample("won", dist.Bernoulli(logits=skill[winner] - skill[loser]), obs=jnp.ones(len(winner)))


def item_response(person, item, y):
    ability = numpyro.sample("ability", dist.Normal(0, 1).expand([15]).to_event(1))
    hard = numpyro.sample("hard", dist.Normal(0, 1).expand([5]).to_event(1))
    sharp = numpyro.sample("sharp", dist.LogNormal(0, 0.5).expand([5]).to_event(1))
    numpyro.sample("y", dist.Bernoulli(logits=sharp[item] * (ability[person] - hard[item])), obs=y)


def ordered_mixture(y):
    low, gap = numpyro.sample("low", dist.Normal(0, 3)), numpyro.sample("gap", dist.HalfNormal(3))
    share = numpyro.sample("share", dist.Beta(2, 2))
    s = numpyro.sample("s", dist.LogNormal(0, 0.5))
    parts = dist.Normal(jnp.stack([low, low + gap]), s).log_prob(y[:, None])
    numpyro.factor("y", jnp.sum(special.logsumexp(parts + jnp.log(jnp.stack([share, 1 - share])), axis=1)))


def truncated_normal(y):
    """Only what is above zero was recorded. With `log_ndtr`: the density of `TruncatedNormal` is not finite in the tails."""
    mu, s = numpyro.sample("mu", dist.Normal(0, 2)), numpyro.sample("s", dist.HalfNormal(2))
    numpyro.factor("y", jnp.sum(dist.Normal(mu, s).log_prob(y) - special.log_ndtr(mu / s)))


def emax(dose, y):
    base, top = numpyro.sample("base", dist.Normal(0, 2)), numpyro.sample("top", dist.Normal(0, 4))
    half = numpyro.sample("half", dist.LogNormal(1, 0.7))
    s = numpyro.sample("s", dist.HalfNormal(1))
    numpyro.sample("y", dist.Normal(base + top * dose / (half + dose), s), obs=y)


def random_walk(y):
    s, tau = numpyro.sample("s", dist.HalfNormal(1)), numpyro.sample("tau", dist.HalfNormal(1))
    steps = numpyro.sample("steps", dist.Normal(0, 1).expand([len(y)]).to_event(1))
    numpyro.sample("y", dist.Normal(jnp.cumsum(tau * steps), s), obs=y)


def dirichlet_multinomial(counts):
    strength = numpyro.sample("strength", dist.LogNormal(1, 1))
    share = numpyro.sample("share", dist.Dirichlet(jnp.ones(3)))
    numpyro.sample("counts", dist.DirichletMultinomial(strength * share, counts.sum(1)), obs=counts)


def correlated_effects(group, x, y):
    """Intercepts and slopes of groups, correlated."""
    mean = numpyro.sample("mean", dist.Normal(0, 2).expand([2]).to_event(1))
    tau = numpyro.sample("tau", dist.HalfNormal(1).expand([2]).to_event(1))
    factor = numpyro.sample("factor", dist.LKJCholesky(2, 2.0))
    z = numpyro.sample("z", dist.Normal(0, 1).expand([5, 2]).to_event(2))
    s = numpyro.sample("s", dist.HalfNormal(1))
    effect = mean + z @ (tau[:, None] * factor).T
    numpyro.sample("y", dist.Normal(effect[group, 0] + effect[group, 1] * x, s), obs=y)


def _survival(rng, times):
    limit = rng.uniform(1.0, 5.0, len(times))
    return {"t": np.minimum(times, limit), "died": (times <= limit).astype(float)}


def _ordinal(rng):
    X = rng.normal(size=(60, 2))
    return {"X": X, "y": np.digitize(X @ [1.0, -0.5] + rng.logistic(size=60), [-1.0, 0.3, 1.5])}


def _zero_inflated(rng):
    x = rng.normal(size=80)
    y = rng.negative_binomial(2, 2 / (2 + np.exp(0.8 + 0.4 * x)))
    return {"x": x, "y": np.where(rng.random(80) < 0.25, 0, y)}


def _beta(rng):
    x = rng.normal(size=50)
    mean = 1 / (1 + np.exp(-0.3 - 0.7 * x))
    return {"x": x, "y": np.clip(rng.beta(8 * mean, 8 * (1 - mean)), 1e-4, 1 - 1e-4)}


def _log_normal(rng):
    x = rng.normal(size=60)
    found = _survival(rng, np.exp(0.5 + 0.6 * x + 0.8 * rng.normal(size=60)))
    return {"x": x, "t": found["t"], "died": found["died"] > 0}


def _gompertz(rng):
    x = rng.normal(size=60)
    return {"x": x} | _survival(rng, np.log1p(0.5 * rng.exponential(size=60) / np.exp(-1.5 + 0.5 * x)) / 0.5)


def _hierarchical(rng):
    group, x = np.repeat(np.arange(6), 8), rng.normal(size=48)
    effect = 1.0 + 0.5 * rng.normal(size=6)
    return {"group": group, "x": x, "y": rng.poisson(np.exp(effect[group] + 0.3 * x))}


def _horseshoe(rng):
    X = rng.normal(size=(40, 5))
    return {"X": X, "y": X @ [2.0, 0, 0, 0, -0.5] + 0.7 * rng.normal(size=40)}


def _gp(rng):
    place = np.linspace(0.0, 4.0, 12)
    return {"place": place, "y": (rng.random(12) < 1 / (1 + np.exp(-2 * np.sin(2 * place)))).astype(int)}


def _markov(rng):
    state = np.cumsum(rng.random(40) < 0.15) % 2
    return {"y": 3.0 * state + rng.normal(size=40)}


def _epidemic(rng):
    s, i, new = 0.98, 0.02, []
    for _ in range(20):
        new.append(0.5 * s * i)
        s, i = s - new[-1], i + new[-1] - 0.2 * i
    return {"cases": rng.poisson(1000 * np.asarray(new))}


def _pairs(rng):
    skill, pairs = rng.normal(size=6), np.array([rng.permutation(6)[:2] for _ in range(60)])
    first = rng.random(60) < 1 / (1 + np.exp(skill[pairs[:, 1]] - skill[pairs[:, 0]]))
    return {"winner": np.where(first, *pairs.T), "loser": np.where(first, *pairs.T[::-1])}


def _answers(rng):
    person, item = np.repeat(np.arange(15), 5), np.tile(np.arange(5), 15)
    logit = rng.normal(size=15)[person] - np.linspace(-1, 1, 5)[item]
    return {"person": person, "item": item, "y": (rng.random(75) < 1 / (1 + np.exp(-logit))).astype(int)}


def _mixture(rng):
    return {"y": np.where(rng.random(60) < 0.4, -1.0, 2.0) + 0.8 * rng.normal(size=60)}


def _truncated(rng):
    y = 0.5 + 1.2 * rng.normal(size=120)
    return {"y": y[y > 0]}


def _doses(rng):
    dose = np.tile([0.0, 1.0, 2.0, 5.0, 10.0, 20.0], 6)
    return {"dose": dose, "y": 1.0 + 3.0 * dose / (4 + dose) + 0.6 * rng.normal(size=36)}


def _walk(rng):
    return {"y": np.cumsum(0.4 * rng.normal(size=20)) + 0.5 * rng.normal(size=20)}


def _counts(rng):
    return {"counts": np.array([rng.multinomial(20, rng.dirichlet([2.0, 3.0, 1.0])) for _ in range(15)])}


def _effects(rng):
    group, x = np.repeat(np.arange(5), 8), rng.normal(size=40)
    effect = rng.multivariate_normal([1.0, -0.5], [[0.5, 0.3], [0.3, 0.4]], 5)
    return {"group": group, "x": x, "y": effect[group, 0] + effect[group, 1] * x + 0.6 * rng.normal(size=40)}


CASES = {
    "ordinal": Case("ordinal regression", ordinal, _ordinal),
    "zinb": Case("zero-inflated negative binomial", zero_inflated_negative_binomial, _zero_inflated),
    "beta": Case("beta regression", beta_regression, _beta),
    "lognormal": Case("censored log-normal", censored_log_normal, _log_normal),
    "gompertz": Case("Gompertz, censored", gompertz, _gompertz),
    "poisson": Case("hierarchical Poisson", hierarchical_poisson, _hierarchical),
    "horseshoe": Case("horseshoe", horseshoe, _horseshoe),
    "gp": Case("Gaussian-process classification, learned length scale", gp_classification, _gp),
    "hmm": Case("hidden Markov model by `scan`", hidden_markov, _markov),
    "sir": Case("SIR epidemic by Euler steps", epidemic, _epidemic),
    "bradley": Case("Bradley–Terry", bradley_terry, _pairs),
    "irt": Case("two-parameter item response", item_response, _answers),
    "mixture": Case("ordered mixture", ordered_mixture, _mixture),
    "truncated": Case("truncated normal", truncated_normal, _truncated),
    "emax": Case("Emax dose response", emax, _doses),
    "walk": Case("random-walk state space", random_walk, _walk),
    "dirichlet": Case("Dirichlet–multinomial", dirichlet_multinomial, _counts),
    "lkj": Case("LKJ-correlated effects", correlated_effects, _effects),
}
