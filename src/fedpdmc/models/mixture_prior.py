"""Priors that are normal given scales: Student-t and horseshoe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from scipy.special import exp1, logsumexp

from fedpdmc._jax.precision import double_precision
from fedpdmc.errors import InputError
from fedpdmc.potentials import Quadratic, ScaleLaw, ScaleMixture
from fedpdmc.potentials.bent_spread_prior import FLOOR
from fedpdmc.validation import finite_array, integer, positive
from fedpdmc.whitening import Reference

MOST_DF = 200
# Nodes in log τ above its least, and where ``e^u E₁(u)`` is replaced by its asymptotic series.
NODES, WIDTH, LARGE = 400, 14.0, 50.0


class StandIn(Quadratic):
    """A normal prior in place of one with longer tails."""


class MixturePrior(eqx.Module):
    """A normal prior in which some coefficients have scales of their own. The coordinator renews them; no site sees them.

    Attributes
    ----------
    normal : Quadratic
        Of all other parameters, and the slab of a horseshoe.
    index : tuple of int
        Which parameters have scales: Student-t ones first, those of the horseshoe last.
    mean : array of shape (k,)
    law : ScaleLaw
    """

    normal: Quadratic
    index: tuple[int, ...] = eqx.field(static=True)
    mean: Float[Array, " k"]
    law: ScaleLaw

    @property
    def stand_in(self) -> StandIn:
        """The normal prior that a reference is made with: wider than Student-t ones, and the slab of a horseshoe.

        A prior that turns out narrower or elsewhere is made up for by the coordinator's own events, which take no rounds.
        """
        precision = np.zeros(self.normal.dim)
        precision[list(self.index[: len(self.law.df)])] = np.asarray(self.law.stand_in)
        mean = np.zeros(self.normal.dim)
        mean[list(self.index)] = np.asarray(self.mean)
        made = self.normal.plus(Quadratic(jnp.asarray(np.diag(precision)), jnp.asarray(-precision * mean)))
        return StandIn(made.precision, made.linear)

    def whitened(self, base: Quadratic, reference: Reference, rotating: bool) -> ScaleMixture:
        """The coordinator's potential, together with other quadratics, in whitened coordinates."""
        rows = reference.matrix[np.asarray(self.index)]
        return ScaleMixture(base, rows, reference.center[np.asarray(self.index)] - self.mean, self.law, rotating)

    def minus_log_density(self, x: np.ndarray) -> np.ndarray:
        """Minus the log density at positions of shape (n, d), with the scales integrated out; up to a constant.

        Given τ, a coefficient of a horseshoe has with ``u = z²/(2τ²)`` and ``t = 1/λ²`` up to the end T of its law a density
        proportional to ``τ⁻¹ ∫₀ᵀ e^{−ut}/(1 + t) dt = τ⁻¹ e^u (E₁(u) − E₁(u + uT))``. The integral over τ is a sum over
        nodes in log τ.
        """
        normal = self.normal
        value = 0.5 * np.sum(x @ np.asarray(normal.precision) * x, 1) + x @ np.asarray(normal.linear)
        z, t = x[:, list(self.index)] - np.asarray(self.mean), len(self.law.df)
        df, scale = np.asarray(self.law.df, float), np.asarray(self.law.scale)
        value += np.sum(0.5 * (df + 1) * np.log1p((z[:, :t] / scale) ** 2 / np.maximum(df, 1)), 1)
        if not self.law.members:
            return value
        log_ratio = np.linspace(np.log(FLOOR), WIDTH, NODES)
        log_tau = np.log(float(self.law.global_scale)) + log_ratio
        u = 0.5 * z[:, None, t:] ** 2 * np.exp(-2 * log_tau)[:, None]
        log_density = np.sum(_log_local(u) - log_tau[:, None], 2)
        # dτ = τ d log τ, under the half-Cauchy law of τ.
        log_density += log_tau - np.log1p(np.exp(2 * log_ratio))
        return value - logsumexp(log_density, axis=1)


def _log_local(u: np.ndarray) -> np.ndarray:
    """``log ∫₀ᵀ e^{−ut}/(1 + t) dt``, T = `FLOOR`⁻²; for large u by the asymptotic series of ``e^u E₁(u)``."""
    least, most = 1e-12, np.log1p(FLOOR**-2.0)
    small = np.clip(u, least, LARGE)
    closed = small + np.log(exp1(small) - exp1(small * (1 + FLOOR**-2.0)))
    large = np.maximum(u, LARGE)
    series = -np.log(large) + np.log1p(-1 / large + 2 / large**2)
    return np.where(u < least, np.log(most), np.where(u < LARGE, closed, series))


@double_precision
def mixture_prior(
    mean: Any, scale: Any, student_t: Mapping[int, int] = {}, horseshoe: Sequence[int] = (), global_scale: float = 1.0
) -> MixturePrior:
    """Independent priors of all parameters, some of them with scales.

    Parameters
    ----------
    mean, scale : array of shape (d,)
        Of normal and Student-t parameters; infinite scales are flat. The ``scale`` of a horseshoe's parameter is its slab.
    student_t : mapping
        Degrees of freedom by index.
    horseshoe : sequence of int
        Indices of its parameters.
    global_scale : float
    """
    mean, scale = np.asarray(mean, float), np.asarray(scale, float)
    heavy, shrunk = sorted(student_t), sorted(horseshoe)
    precision = scale**-2.0
    precision[heavy] = 0.0
    index = (*heavy, *shrunk)
    df = tuple(int(student_t[i]) for i in heavy)
    law = ScaleLaw(df, jnp.asarray(scale[heavy]), len(shrunk), jnp.asarray(float(global_scale)))
    center = mean.copy()
    center[shrunk] = 0.0
    normal = Quadratic(jnp.asarray(np.diag(precision)), jnp.asarray(-precision * mean))
    return MixturePrior(normal, index, jnp.asarray(center[list(index)]), law)


def student_t_prior(dim: int, df: int, mean: Any = 0.0, scale: Any = 1.0) -> MixturePrior:
    """Independent Student-t priors; with one degree of freedom, Cauchy.

    Parameters
    ----------
    dim : int
        Number of parameters.
    df : int
        Whole degrees of freedom, so that scales are drawn exactly from few numbers.
    mean, scale : float or array of shape (dim,)
    """
    dim, df = integer("student_t_prior(dim)", dim, 1), integer("student_t_prior(df)", df, 1, MOST_DF)
    mean, scale = of_each("student_t_prior(mean)", mean, dim), of_each("student_t_prior(scale)", scale, dim, True)
    return mixture_prior(mean, scale, dict.fromkeys(range(dim), df))


def horseshoe_prior(
    dim: int, scale: float, on: Sequence[int] | None = None, *, slab: Any = 2.5, others: Any = 2.5
) -> MixturePrior:
    """A regularised horseshoe on some parameters, and normal priors of the others.

    ``p(x, λ, τ) ∝ Π_j N(x_j; 0, τ²λ_j²) N(x_j; 0, c²) C⁺(λ_j; 1) · C⁺(τ; τ₀)``: small coefficients are shrunk to nothing,
    and large ones by the slab of width c alone. This is the regularised horseshoe without the normaliser of its slab
    (Nishimura and Suchard, 2023), so that all conditional laws of the scales are known; with a wide slab it is the plain
    horseshoe. The half-Cauchy laws begin at 1 % of their scale, above which they have 99.4 % of their mass.

    Parameters
    ----------
    dim : int
    scale : float
        ``τ₀``, the global scale. For about p₀ of p coefficients that are not zero: ``p₀/(p − p₀) · σ/√n``.
    on : sequence of int, optional
        Which parameters; all if None.
    slab : float or array of shape (dim,)
        c.
    others : float or array of shape (dim,)
        Standard deviations of the other parameters.
    """
    dim, scale = integer("horseshoe_prior(dim)", dim, 1), positive("horseshoe_prior(scale)", scale)
    chosen = list(range(dim)) if on is None else [integer("horseshoe_prior(on)", i, 0, dim - 1) for i in on]
    if not chosen or len(set(chosen)) != len(chosen):
        raise InputError("horseshoe_prior(on)", repr(on), "Give different indices of parameters, at least one.")
    wide = of_each("horseshoe_prior(others)", others, dim, True)
    wide[chosen] = of_each("horseshoe_prior(slab)", slab, dim, True)[chosen]
    return mixture_prior(np.zeros(dim), wide, {}, chosen, scale)


def of_each(name: str, value: Any, dim: int, above: bool = False) -> np.ndarray:
    """A finite number for each of ``dim`` coordinates, from an array or a number for all; ``above`` zero."""
    found = finite_array(name, value, (0, 1), f"() or ({dim},)")
    if found.ndim and found.shape != (dim,):
        raise InputError(name, f"shape {found.shape}", f"Give a number or an array of shape ({dim},).")
    if above and np.any(found <= 0):
        raise InputError(name, repr(value), "Give positive numbers.")
    return np.array(np.broadcast_to(found, (dim,)))
