"""The paper's data, simulated: it gives sizes and distributions, no files."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float
from numpy import ndarray

import fedpdmc as fp


class Regression(NamedTuple):
    """Records of a logistic regression (paper, 6.2), and its standard normal prior."""

    X: Float[ndarray, "n d"]
    y: Float[ndarray, " n"]

    @property
    def prior(self):
        """Independent standard normals."""
        return fp.models.normal_prior(self.X.shape[1])

    def sites(self, parts: list[ndarray] | int) -> list[fp.Site]:
        """One site for each part of the records: lists of rows, or a number of equal parts."""
        rows = np.array_split(np.arange(len(self.y)), parts) if isinstance(parts, int) else parts
        return [fp.Site(fp.models.logistic(self.X[i], self.y[i]), name=f"site{k}") for k, i in enumerate(rows)]

    def log_density(self, x):
        """Of the posterior, up to a constant."""
        z = jnp.asarray(self.X) @ x
        return jnp.sum(jnp.asarray(self.y) * z - jnp.logaddexp(0.0, z)) - 0.5 * jnp.sum(x**2)

    def reference(self) -> fp.Reference:
        """Laplace, of the pooled records."""
        return fp.laplace(self.sites(1), self.prior)


def regression(records: int, dim: int, seed: int) -> Regression:
    """An intercept and standard normal covariates; the truth is a draw of the prior."""
    rng = np.random.default_rng(seed)
    X = np.concatenate([np.ones((records, 1)), rng.normal(size=(records, dim - 1))], 1)
    truth = rng.normal(size=dim)
    return Regression(X, (rng.random(records) < 1 / (1 + np.exp(-X @ truth))).astype(float))


class Series(NamedTuple):
    """Trajectories of an AR(1) model with Student-t noise (paper, 6.3), each with its start first; the prior is flat."""

    y: Float[ndarray, "n k1"]
    df: float

    def sites(self, count: int) -> list[fp.Site]:
        """Whole trajectories, in equal parts."""
        parts = np.split(self.y, count)
        return [fp.Site(fp.models.ar1_student_t(part, df=self.df), name=f"site{k}") for k, part in enumerate(parts)]

    def log_density(self, x):
        """Of the posterior, up to a constant."""
        before, after = jnp.asarray(self.y[:, :-1]), jnp.asarray(self.y[:, 1:])
        residual = after - x[0] * before - x[1]
        return -(self.df + 1) / 2 * jnp.sum(jnp.log1p(residual**2 / self.df))

    def reference(self) -> fp.Reference:
        """Laplace, of the pooled records."""
        return fp.laplace(self.sites(1))


def series(count: int, length: int, df: float, seed: int, slope: float = 0.5, constant: float = 1.0) -> Series:
    """Trajectories that start at zero."""
    rng = np.random.default_rng([seed, int(10 * df)])
    y = np.zeros((count, length + 1))
    for k in range(1, length + 1):
        y[:, k] = constant + slope * y[:, k - 1] + rng.standard_t(df, count)
    return Series(y, df)
