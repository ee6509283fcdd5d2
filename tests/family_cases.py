"""The families of the standard library with records at three unequal sites, and NumPyro's log likelihood of all of them."""

import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist

import fedpdmc as fp

N = 90
RNG = np.random.default_rng(11)
X = np.concatenate([np.ones((N, 1)), RNG.normal(0.1, 0.8, (N, 2))], 1)
ETA = X @ [0.4, 0.5, -0.4]


def _sites(make, *columns):
    cuts = np.split(np.arange(N), [45, 75])
    return [fp.Site(make(*(column[rows] for column in columns)), name=f"site {i}") for i, rows in enumerate(cuts)]


def _survival(law, t, died):
    return jnp.sum(jnp.where(died == 1, law.log_prob(t), jnp.log1p(-law.cdf(t))))


def negative_binomial():
    y = RNG.negative_binomial(2.0, 2.0 / (2.0 + np.exp(ETA)))
    return _sites(fp.models.negative_binomial, X, y), lambda x: jnp.sum(
        dist.NegativeBinomial2(jnp.exp(X @ x[:3]), jnp.exp(x[3])).log_prob(y)
    )


def gamma():
    y = RNG.gamma(2.0, np.exp(ETA) / 2.0)
    return _sites(fp.models.gamma, X, y), lambda x: jnp.sum(
        dist.Gamma(jnp.exp(x[3]), jnp.exp(x[3] - X @ x[:3])).log_prob(y)
    )


def beta():
    mean = 1 / (1 + np.exp(-ETA))
    y = RNG.beta(4 * mean, 4 * (1 - mean))

    def log_likelihood(x):
        mean, phi = 1 / (1 + jnp.exp(-X @ x[:3])), jnp.exp(x[3])
        return jnp.sum(dist.Beta(mean * phi, (1 - mean) * phi).log_prob(y))

    return _sites(fp.models.beta, X, y), log_likelihood


def _times(noise):
    t, limit = np.exp(ETA) * noise, RNG.uniform(0.8, 4.0, N)
    return np.minimum(t, limit), (t <= limit).astype(float)


def weibull():
    t, died = _times(RNG.weibull(1.4, N))
    return _sites(fp.models.weibull, X, t, died), lambda x: _survival(
        dist.Weibull(jnp.exp(X @ x[:3]), jnp.exp(x[3])), t, died
    )


def log_normal():
    t, died = _times(np.exp(0.7 * RNG.normal(size=N)))
    return _sites(fp.models.log_normal, X, t, died), lambda x: _survival(
        dist.LogNormal(X @ x[:3], jnp.exp(x[3])), t, died
    )


def piecewise_exponential():
    t, died = _times(RNG.weibull(1.2, N))
    cuts, edges = np.array([0.6, 1.4]), np.array([0.0, 0.6, 1.4, 100.0])
    spent = np.clip(t[:, None] - edges[:-1], 0.0, np.diff(edges))
    here = died[:, None] * ((t[:, None] > edges[:-1]) & (t[:, None] <= edges[1:]))

    def log_likelihood(x):
        # As Poisson counts with an exposure.
        rate = jnp.exp(x[2:] + (X[:, 1:] @ x[:2])[:, None])
        return jnp.sum(jnp.where(spent > 0, here * jnp.log(rate) - rate * spent, 0.0))

    make = lambda X, t, died: fp.models.piecewise_exponential(X, t, died, cuts)  # noqa: E731
    return _sites(make, X[:, 1:], t, died), log_likelihood


def _ordered(law):
    latent = X[:, 1:] @ [0.8, -0.5] + (RNG.logistic(size=N) if law is dist.OrderedLogistic else RNG.normal(size=N))
    y = np.searchsorted([-0.7, 0.2, 1.1], latent)

    def log_likelihood(x):
        cuts = x[2] + jnp.concatenate([jnp.zeros(1), jnp.cumsum(jnp.exp(x[3:]))])
        return jnp.sum(law(X[:, 1:] @ x[:2], cuts).log_prob(y))

    make = fp.models.ordered_logit if law is dist.OrderedLogistic else fp.models.ordered_probit
    return _sites(lambda X, y: make(X, y, 4), X[:, 1:], y), log_likelihood


class OrderedNormal:
    """Not among NumPyro's distributions."""

    def __init__(self, eta, cuts):
        self.eta, self.cuts = eta, cuts

    def log_prob(self, y):
        below = dist.Normal().cdf(self.cuts[None] - self.eta[:, None])
        ends = jnp.zeros((len(below), 1))
        steps = jnp.diff(jnp.concatenate([ends, below, ends + 1], 1), axis=1)
        return jnp.log(jnp.take_along_axis(steps, y[:, None], 1)[:, 0])


def ordered_logit():
    return _ordered(dist.OrderedLogistic)


def ordered_probit():
    return _ordered(OrderedNormal)


def multinomial_logit():
    logits = np.concatenate([np.zeros((N, 1)), X @ RNG.normal(0, 0.7, (3, 2))], 1)
    y = np.argmax(logits + RNG.gumbel(size=(N, 3)), 1)

    def log_likelihood(x):
        eta = jnp.concatenate([jnp.zeros((N, 1)), X @ x.reshape(2, 3).T], 1)
        return jnp.sum(dist.CategoricalLogits(eta).log_prob(y))

    return _sites(lambda X, y: fp.models.multinomial_logit(X, y, 3), X, y), log_likelihood


def zero_inflated_poisson():
    y = np.where(RNG.random(N) < 0.3, 0, RNG.poisson(np.exp(ETA)))
    return _sites(fp.models.zero_inflated_poisson, X, y), lambda x: jnp.sum(
        dist.ZeroInflatedPoisson(1 / (1 + jnp.exp(-x[3])), jnp.exp(X @ x[:3])).log_prob(y)
    )


def beta_binomial():
    mean, trials = 1 / (1 + np.exp(-ETA)), RNG.integers(1, 12, N)
    good = RNG.binomial(trials, RNG.beta(3 * mean, 3 * (1 - mean)))

    def log_likelihood(x):
        mean, phi = 1 / (1 + jnp.exp(-X @ x[:3])), jnp.exp(x[3])
        return jnp.sum(dist.BetaBinomial(mean * phi, (1 - mean) * phi, total_count=trials).log_prob(good))

    return _sites(fp.models.beta_binomial, X, good, trials - good), log_likelihood


CASES = [
    negative_binomial, gamma, beta, weibull, log_normal, piecewise_exponential, ordered_logit, ordered_probit,
    multinomial_logit, zero_inflated_poisson, beta_binomial,
]  # fmt: skip


def case(name):
    """Sites and pooled log likelihood of a family; the prior is N(0, 2²) for every coordinate."""
    return {make.__name__: make for make in CASES}[name]()
