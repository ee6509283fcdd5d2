"""The models of `tests.zoo` as NumPyro users write them; each is called with the records of a site."""

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax.scipy.stats import norm
from numpyro import handlers


def probit(X, y):
    beta = numpyro.sample("beta", dist.Normal(0, 1.5).expand([3]).to_event(1))
    numpyro.sample("y", dist.Bernoulli(probs=norm.cdf(X @ beta)), obs=y)


def negative_binomial(X, y):
    beta = numpyro.sample("beta", dist.Normal(0, 2).expand([2]).to_event(1))
    phi = numpyro.sample("phi", dist.LogNormal(0, 1))
    numpyro.sample("y", dist.NegativeBinomial2(jnp.exp(X @ beta), phi), obs=y)


def weibull(X, t, event):
    beta = numpyro.sample("beta", dist.Normal(0, 2).expand([2]).to_event(1))
    k = numpyro.sample("k", dist.LogNormal(0, 0.5))
    scale = jnp.exp(X @ beta)
    with handlers.mask(mask=event == 1):
        numpyro.sample("died", dist.Weibull(scale, k), obs=t)
    numpyro.factor("censored", jnp.where(event == 1, 0.0, -((t / scale) ** k)))


def piecewise_exponential(z, exposure, event):
    log_hazard = numpyro.sample("log_hazard", dist.GaussianRandomWalk(1.0, num_steps=4))
    beta = numpyro.sample("beta", dist.Normal(0, 1))
    mean = exposure * jnp.exp(log_hazard + beta * z[:, None])
    with handlers.mask(mask=exposure > 0):
        numpyro.sample("event", dist.Poisson(jnp.where(exposure > 0, mean, 1.0)), obs=event)


def eight_schools(y, sigma, school):
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    tau = numpyro.sample("tau", dist.HalfCauchy(5))
    with numpyro.plate("schools", 8):
        z = numpyro.sample("z", dist.Normal(0, 1))
    numpyro.sample("y", dist.Normal(mu + tau * z[school], sigma), obs=y)


def hierarchical_logistic(y, w, group):
    mu = numpyro.sample("mu", dist.Normal(0, 1.5))
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    z = numpyro.sample("z", dist.Normal(0, 1).expand([4]))
    beta = numpyro.sample("beta", dist.Normal(0, 1))
    numpyro.sample("y", dist.Bernoulli(logits=(mu + tau * z)[group] + beta * w), obs=y)


def softmax(X, label):
    beta = numpyro.sample("beta", dist.Normal(0, 1.5).expand([2, 3]).to_event(2))
    logits = jnp.concatenate([X @ beta.T, jnp.zeros((X.shape[0], 1))], 1)
    numpyro.sample("label", dist.Categorical(logits=logits), obs=label)


def gaussian_process(y, place, grid):
    z = numpyro.sample("z", dist.Normal(0, 1).expand([8]))
    kernel = jnp.exp(-0.5 * ((grid[:, None] - grid) / 0.25) ** 2) + 1e-3 * jnp.eye(8)
    f = numpyro.deterministic("f", jnp.linalg.cholesky(kernel) @ z)
    numpyro.sample("y", dist.Poisson(jnp.exp(f[place])), obs=y)


def mixture(y):
    mu = numpyro.sample("mu", dist.Normal(jnp.array([-1.5, 1.5]), 1.0))
    w = numpyro.sample("w", dist.Beta(2, 2))
    parts = dist.Categorical(probs=jnp.stack([w, 1 - w]))
    numpyro.sample("y", dist.MixtureSameFamily(parts, dist.Normal(mu, 1.0)), obs=y)


def michaelis_menten(s, v):
    top = numpyro.sample("V", dist.LogNormal(0.5, 1))
    half = numpyro.sample("K", dist.LogNormal(0, 1))
    sigma = numpyro.sample("sigma", dist.LogNormal(-1.5, 1))
    numpyro.sample("v", dist.StudentT(4, top * s / (half + s), sigma), obs=v)


def banana(y):
    first = numpyro.sample("x0", dist.Normal(0, 1))
    second = numpyro.sample("x1", dist.Normal(0, 1))
    numpyro.sample("y", dist.Normal(first + second**2, 1), obs=y)


def zero_inflated_poisson(X, y):
    beta = numpyro.sample("beta", dist.Normal(0, 2).expand([2]).to_event(1))
    gate = numpyro.sample("gate", dist.Normal(0, 1.5))
    numpyro.sample("y", dist.ZeroInflatedPoisson(1 / (1 + jnp.exp(-gate)), jnp.exp(X @ beta)), obs=y)


MODELS = {
    model.__name__: model
    for model in (
        probit, negative_binomial, weibull, piecewise_exponential, eight_schools, hierarchical_logistic, softmax,
        gaussian_process, mixture, michaelis_menten, banana, zero_inflated_poisson,
    )
}  # fmt: skip
