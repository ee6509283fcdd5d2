"""Twelve models of practice in plain JAX, each with its records at three unequal sites.

Every likelihood is a function ``f(x, data)``, minus the log likelihood up to a constant, in unconstrained coordinates.
Nothing but NumPy and JAX is imported, so that other packages can sample the same functions; `tests.zoo_numpyro` writes them
anew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import erfc, gammaln, logsumexp

SHARES = (0.5, 0.33, 0.17)


class Case(NamedTuple):
    """A model with its records.

    Attributes
    ----------
    likelihood : f(x, data)
        Minus the log likelihood of a site's records.
    prior : f(x)
        Minus the log prior; ``precision`` says that it is Gaussian with that precision, and ``mean``.
    records : dict
        Arrays with one row for each record.
    shared : dict
        Arrays that every site has.
    start : array of shape (d,)
        A point of the posterior's bulk.
    """

    name: str
    likelihood: Callable[[Any, Any], Any]
    prior: Callable[[Any], Any]
    records: dict[str, np.ndarray]
    names: list[str]
    start: np.ndarray
    shared: dict[str, np.ndarray] = {}
    precision: np.ndarray | None = None
    mean: np.ndarray | None = None

    @property
    def dim(self) -> int:
        """Number of parameters."""
        return len(self.names)

    def data(self, rows=slice(None)) -> dict[str, np.ndarray]:
        """Some of the records, with what every site has."""
        return {**{name: array[rows] for name, array in self.records.items()}, **self.shared}

    def sites(self) -> list[dict[str, np.ndarray]]:
        """The records of three unequal sites."""
        n = len(next(iter(self.records.values())))
        cuts = np.cumsum([max(1, round(n * share)) for share in SHARES[:2]])
        return [self.data(rows) for rows in np.split(np.arange(n), cuts)]

    def potential(self, x):
        """Minus the log posterior of all records."""
        return self.prior(x) + self.likelihood(x, self.data())


def _gaussian(name, likelihood, records, names, start, scale, mean=None, shared=None, precision=None) -> Case:
    """A case with a Gaussian prior."""
    dim = len(names)
    mean = np.zeros(dim) if mean is None else np.asarray(mean, float)
    matrix = np.diag(np.broadcast_to(np.asarray(scale, float), (dim,)) ** -2.0) if precision is None else precision

    def prior(x):
        return 0.5 * (x - mean) @ jnp.asarray(matrix) @ (x - mean)

    return Case(name, likelihood, prior, records, names, np.asarray(start, float), shared or {}, matrix, mean)


def _covariates(rng, n, d):
    return np.concatenate([np.ones((n, 1)), rng.normal(0.1, 0.8, (n, d - 1))], 1)


def _names(name, n):
    return [f"{name}[{i}]" for i in range(n)]


def probit() -> Case:
    """Binary responses, ``P(y = 1) = Φ(ξ·x)``."""
    rng, truth = np.random.default_rng(1), np.array([-0.4, 0.9, -0.6])
    X = _covariates(rng, 90, 3)
    y = (rng.normal(size=90) < X @ truth).astype(float)

    def likelihood(x, data):
        z = (2 * data["y"] - 1) * (data["X"] @ x)
        return -jnp.sum(jnp.log(0.5 * erfc(-z / np.sqrt(2.0))))

    return _gaussian("probit", likelihood, {"X": X, "y": y}, _names("beta", 3), truth, 1.5)


def negative_binomial() -> Case:
    """Counts with mean ``e^{ξ·β}`` and concentration φ, in (β, log φ)."""
    rng, truth = np.random.default_rng(2), np.array([0.8, 0.5])
    X = _covariates(rng, 80, 2)
    mean, phi = np.exp(X @ truth), 2.0
    y = rng.negative_binomial(phi, phi / (phi + mean)).astype(float)

    def likelihood(x, data):
        eta, log_phi = data["X"] @ x[:2], x[2]
        phi, y = jnp.exp(log_phi), data["y"]
        choose = gammaln(y + phi) - gammaln(phi)
        return -jnp.sum(choose + y * eta + phi * log_phi - (y + phi) * jnp.log(phi + jnp.exp(eta)))

    names = [*_names("beta", 2), "phi_unconstrained"]
    return _gaussian("negative_binomial", likelihood, {"X": X, "y": y}, names, [0.8, 0.5, 0.7], [2.0, 2.0, 1.0])


def weibull() -> Case:
    """Survival times with right censoring: shape k, scale ``e^{ξ·β}``, in (β, log k)."""
    rng, truth = np.random.default_rng(3), np.array([0.6, -0.5])
    X = _covariates(rng, 80, 2)
    times = np.exp(X @ truth) * rng.weibull(1.4, 80)
    limit = rng.uniform(0.8, 4.0, 80)
    records = {"X": X, "t": np.minimum(times, limit), "event": (times <= limit).astype(float)}

    def likelihood(x, data):
        log_k = x[2]
        u = jnp.exp(log_k) * (jnp.log(data["t"]) - data["X"] @ x[:2])
        return jnp.sum(jnp.exp(u) - data["event"] * (log_k + u))

    return _gaussian("weibull", likelihood, records, [*_names("beta", 2), "k_unconstrained"], [0.6, -0.5, 0.3],
                     [2.0, 2.0, 0.5])  # fmt: skip


def piecewise_exponential() -> Case:
    """Survival with a hazard that is constant on four intervals: a random walk of log hazards, and one covariate."""
    rng, edges = np.random.default_rng(4), np.array([0.0, 0.3, 0.7, 1.3, 2.5])
    z = rng.normal(size=70)
    times = rng.exponential(np.exp(-0.4 * z)) ** 0.8
    spent = np.clip(times[:, None] - edges[:-1], 0.0, np.diff(edges))
    event = (times[:, None] > edges[:-1]) & (times[:, None] <= edges[1:])
    records = {"z": z, "exposure": spent, "event": event.astype(float)}
    steps = np.eye(4) - np.eye(4, k=-1)
    precision = np.zeros((5, 5))
    precision[:4, :4], precision[4, 4] = steps.T @ steps, 1.0

    def likelihood(x, data):
        log_hazard = x[:4] + x[4] * data["z"][:, None]
        return jnp.sum(data["exposure"] * jnp.exp(log_hazard) - data["event"] * log_hazard)

    names = [*_names("log_hazard", 4), "beta"]
    return _gaussian("piecewise_exponential", likelihood, records, names, [0.0, 0.1, 0.2, 0.3, 0.4], 1.0,
                     precision=precision)  # fmt: skip


def eight_schools() -> Case:
    """Rubin's eight schools, non-centred: ``y_j ~ N(μ + τ z_j, σ_j)``, in (μ, log τ, z)."""
    y = np.array([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
    sigma = np.array([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])

    def likelihood(x, data):
        theta = x[0] + jnp.exp(x[1]) * x[2:][data["school"]]
        return 0.5 * jnp.sum(((data["y"] - theta) / data["sigma"]) ** 2)

    def prior(x):
        ratio = jnp.exp(x[1]) / 5.0
        return 0.5 * (x[0] / 5.0) ** 2 + jnp.log1p(ratio**2) - x[1] + 0.5 * jnp.sum(x[2:] ** 2)

    names = ["mu", "tau_unconstrained", *_names("z", 8)]
    start = np.array([4.0, 1.0, *np.zeros(8)])
    return Case("eight_schools", likelihood, prior, {"y": y, "sigma": sigma, "school": np.arange(8)}, names, start)


def hierarchical_logistic() -> Case:
    """Logistic regression with four group effects ``μ + τ z_g``, in (μ, log τ, z, β)."""
    rng = np.random.default_rng(6)
    w, group = rng.normal(size=100), rng.integers(0, 4, 100)
    effects = np.array([-1.0, 0.0, 0.4, 1.2])
    y = (rng.random(100) < 1 / (1 + np.exp(-effects[group] - 0.7 * w))).astype(float)

    def likelihood(x, data):
        effect = x[0] + jnp.exp(x[1]) * x[2:6]
        eta = effect[data["group"]] + x[6] * data["w"]
        return jnp.sum(jnp.logaddexp(0.0, eta) - data["y"] * eta)

    def prior(x):
        return 0.5 * ((x[0] / 1.5) ** 2 + jnp.sum(x[2:6] ** 2) + x[6] ** 2) + 0.5 * jnp.exp(2 * x[1]) - x[1]

    names = ["mu", "tau_unconstrained", *_names("z", 4), "beta"]
    start = np.array([0.1, -0.2, -0.5, 0.0, 0.2, 0.5, 0.7])
    return Case("hierarchical_logistic", likelihood, prior, {"y": y, "w": w, "group": group}, names, start)


def softmax() -> Case:
    """Three classes, the last one the baseline: coefficients of shape (2, 3)."""
    rng, truth = np.random.default_rng(7), np.array([[0.5, -0.8, 0.3], [-0.4, 0.6, 0.8]])
    X = _covariates(rng, 100, 3)
    logits = np.concatenate([X @ truth.T, np.zeros((100, 1))], 1)
    label = np.argmax(logits + rng.gumbel(size=logits.shape), 1)

    def likelihood(x, data):
        scores = data["X"] @ x.reshape(2, 3).T
        logits = jnp.concatenate([scores, jnp.zeros((scores.shape[0], 1))], 1)
        chosen = jnp.take_along_axis(logits, data["label"][:, None], 1)[:, 0]
        return jnp.sum(logsumexp(logits, axis=1) - chosen)

    names = [f"beta[{i},{j}]" for i in range(2) for j in range(3)]
    return _gaussian("softmax", likelihood, {"X": X, "label": label}, names, truth.ravel(), 1.5)


def gaussian_process() -> Case:
    """Counts with log mean ``f = L z`` at eight points of a line, ``L Lᵀ`` a fixed squared exponential kernel."""
    rng, grid = np.random.default_rng(8), np.linspace(0.0, 1.0, 8)
    place = rng.integers(0, 8, 60)
    y = rng.poisson(np.exp(0.8 * np.sin(6 * grid) + 0.3)[place]).astype(float)

    def likelihood(x, data):
        gap = data["grid"][:, None] - data["grid"]
        kernel = jnp.exp(-0.5 * (gap / 0.25) ** 2) + 1e-3 * jnp.eye(8)
        f = (jnp.linalg.cholesky(kernel) @ x)[data["place"]]
        return jnp.sum(jnp.exp(f) - data["y"] * f)

    return _gaussian("gaussian_process", likelihood, {"y": y, "place": place}, _names("z", 8), np.zeros(8), 1.0,
                     shared={"grid": grid})  # fmt: skip


def mixture() -> Case:
    """Two normals of scale one with unknown means and weight, in (μ_1, μ_2, logit w)."""
    rng = np.random.default_rng(9)
    y = np.where(rng.random(60) < 0.35, rng.normal(-1.6, 1.0, 60), rng.normal(1.3, 1.0, 60))

    def likelihood(x, data):
        first = jax.nn.log_sigmoid(x[2]) - 0.5 * (data["y"] - x[0]) ** 2
        second = jax.nn.log_sigmoid(-x[2]) - 0.5 * (data["y"] - x[1]) ** 2
        return -jnp.sum(jnp.logaddexp(first, second))

    def prior(x):
        weight = -2 * (jax.nn.log_sigmoid(x[2]) + jax.nn.log_sigmoid(-x[2]))
        return 0.5 * (x[0] + 1.5) ** 2 + 0.5 * (x[1] - 1.5) ** 2 + weight

    return Case(
        "mixture", likelihood, prior, {"y": y}, ["mu[0]", "mu[1]", "w_unconstrained"], np.array([-1.5, 1.3, -0.6])
    )


def michaelis_menten() -> Case:
    """Reaction velocities ``V s/(K + s)`` with Student-t noise of four degrees of freedom, in (log V, log K, log σ)."""
    rng = np.random.default_rng(10)
    s = rng.uniform(0.1, 4.0, 60)
    v = 2.0 * s / (0.7 + s) + 0.15 * rng.standard_t(4, 60)

    def likelihood(x, data):
        top, half = jnp.exp(x[0]), jnp.exp(x[1])
        r = (data["v"] - top * data["s"] / (half + data["s"])) * jnp.exp(-x[2])
        return jnp.sum(2.5 * jnp.log1p(r**2 / 4.0) + x[2])

    names = ["V_unconstrained", "K_unconstrained", "sigma_unconstrained"]
    return _gaussian("michaelis_menten", likelihood, {"s": s, "v": v}, names, [0.7, -0.35, -1.9], 1.0,
                     mean=[0.5, 0.0, -1.5])  # fmt: skip


def banana() -> Case:
    """``y ~ N(x_0 + x_1², 1)``: only a curved combination of the parameters is known."""
    y = np.random.default_rng(11).normal(0.9, 1.0, 24)

    def likelihood(x, data):
        return 0.5 * jnp.sum((data["y"] - x[0] - x[1] ** 2) ** 2)

    return _gaussian("banana", likelihood, {"y": y}, ["x0", "x1"], [0.3, 0.7], 1.0)


def zero_inflated_poisson() -> Case:
    """Counts that are zero with probability π beside a Poisson part, in (β, logit π)."""
    rng, truth = np.random.default_rng(12), np.array([0.9, 0.4])
    X = _covariates(rng, 90, 2)
    y = np.where(rng.random(90) < 0.3, 0, rng.poisson(np.exp(X @ truth))).astype(float)

    def likelihood(x, data):
        eta, gate = data["X"] @ x[:2], x[2]
        some = jnp.exp(eta) - data["y"] * eta + jnp.logaddexp(0.0, gate)
        none = jnp.logaddexp(0.0, gate) - jnp.logaddexp(gate, -jnp.exp(eta))
        return jnp.sum(jnp.where(data["y"] == 0, none, some))

    names = [*_names("beta", 2), "gate"]
    return _gaussian("zero_inflated_poisson", likelihood, {"X": X, "y": y}, names, [0.9, 0.4, -0.8], [2.0, 2.0, 1.5])


BUILDERS = (
    probit, negative_binomial, weibull, piecewise_exponential, eight_schools, hierarchical_logistic, softmax,
    gaussian_process, mixture, michaelis_menten, banana, zero_inflated_poisson,
)  # fmt: skip
CASES = {build.__name__: build() for build in BUILDERS}
