"""Families of records with a grouped effect, and the law of the effects.

A family is a loss of the predictor. Rates of those that are written here are bounded through complex times: such a family
says in which strip ``|Im η| ≤ strip`` its loss is analytic, and bounds ``|∂ℓ/∂η|`` and ``|∂ℓ/∂s|`` there
(`fedpdmc.potentials.random_effects_strips`). Of a program of one record the rates are enclosed
(`fedpdmc.potentials.grouped_program`).
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fedpdmc._jax.random_streams import logarithm

# For ``|Im η| ≤ STRIP < π``: ``|1 + e^{−x−iy}|``, the distance of a point at the angle ``π − y`` from 1, is at least
# ``sin STRIP``, and so is ``|e^{x} + e^{−iy}|``. So ``|σ(η)| ≤ SIGMOID min(1, e^{Re η})``.
STRIP = 2.6
SIGMOID = 1 / math.sin(STRIP)

Records = Float[Array, "*batch"]


class Family(eqx.Module):
    """The loss ``ℓ(η; y, s)`` of one record; ``s`` are the parameters of the family beside the predictor."""

    @property
    def scaled(self) -> int:
        """How many of these parameters there are."""
        return 0

    def scales(self, x: Float[Array, " q"]) -> Array:
        """The parameters as `value` takes them: one of them, or zero, as a number."""
        return x[0] if self.scaled else jnp.zeros(())

    @property
    def stride(self) -> float:
        """The longest step towards a mode."""
        return 1.5

    @abc.abstractmethod
    def value(self, eta: Records, y: Any, s: Records) -> Records:
        """``ℓ``."""

    @abc.abstractmethod
    def slope(self, eta: Records, y: Any, s: Records) -> Records:
        """``∂ℓ/∂η``."""


class ProgramFamily(Family):
    """Any loss of one record, such as that of a model file: ``ℓ = function(η, row, s, constants)``.

    Parameters
    ----------
    function : callable
    constants : pytree of arrays
        The same for all records of a site.
    count : int
        Number of parameters s.
    """

    function: Callable[..., Any] = eqx.field(static=True)
    constants: Any
    count: int = eqx.field(static=True)

    @property
    def scaled(self) -> int:
        """All parameters of the program."""
        return self.count

    def scales(self, x):
        """All of them."""
        return x

    def value(self, eta, y, s):
        """Record by record."""
        return jax.vmap(lambda e, row: self.function(e, row, s, self.constants))(eta, y)

    def slope(self, eta, y, s):
        """By automatic differentiation."""
        return jax.vmap(jax.grad(lambda e, row: self.function(e, row, s, self.constants)))(eta, y)


class AnalyticFamily(Family):
    """A loss that is analytic in a strip about the real line; s is a log scale, if there is one."""

    @property
    def strip(self) -> float:
        """The loss is analytic, and the bounds hold, for ``|Im η|`` up to this."""
        return math.inf

    def scale_slope(self, eta: Records, y: Records, s: Records) -> Records:
        """``∂ℓ/∂s``."""
        return jnp.zeros_like(eta)

    def change(self, eta: Records, before: Records, y: Any, s: Any) -> Records:
        """``ℓ(eta) − ℓ(before)``; not to be differentiated."""
        return self.value(eta, y, s) - self.value(before, y, s)

    @abc.abstractmethod
    def largest(
        self, stats: Float[Array, "3 G"], reach: Float[Array, "G C"], low: Float[Array, " C"]
    ) -> tuple[Float[Array, "G C"], Float[Array, "G C"]]:
        """Bounds of ``|∂ℓ/∂η|`` and ``|∂ℓ/∂s|`` over the records of a group.

        Parameters
        ----------
        stats : (3, G)
            Of each group the largest ``|y − o|``, ``o`` and ``|y|``, with ``o`` the predictor at the reference.
        reach : (G, C)
            A bound of ``|η − o|``.
        low : (C,)
            A lower bound of ``Re s``.
        """


def softplus(x: Records) -> Records:
    """``log(1 + e^x)`` as straight-line arithmetic, to be fast and not to be differentiated."""
    return jnp.maximum(x, 0.0) + logarithm(1 + jnp.exp(-jnp.abs(x)))


def _softplus_change(x: Records, before: Records) -> Records:
    """``log(1 + e^x) − log(1 + e^before)`` by one logarithm."""
    ratio = (1 + jnp.exp(-jnp.abs(x))) / (1 + jnp.exp(-jnp.abs(before)))
    return jnp.maximum(x, 0.0) - jnp.maximum(before, 0.0) + logarithm(ratio)


def _flat(reach, value):
    return jnp.broadcast_to(jnp.asarray(value), reach.shape)


class LogisticFamily(AnalyticFamily):
    """``log(1 + e^η) − yη``; ``|σ(η)|`` and ``|σ(−η)|`` are at most `SIGMOID` for ``|Im η| ≤ STRIP``."""

    @property
    def strip(self) -> float:
        """Somewhat less than the distance π of the nearest pole."""
        return STRIP

    def value(self, eta, y, s):
        """``softplus(η) − yη``."""
        return jax.nn.softplus(eta) - y * eta

    def change(self, eta, before, y, s):
        """Of softplus, less that of yη."""
        return _softplus_change(eta, before) - y * (eta - before)

    def slope(self, eta, y, s):
        """``σ(η) − y``."""
        return 1 / (1 + jnp.exp(-eta)) - y

    def largest(self, stats, reach, low):
        """``|σ(η)|`` or ``|σ(−η)|``: y is 0 or 1."""
        return _flat(reach, SIGMOID), _flat(reach, 0.0)


class PoissonFamily(AnalyticFamily):
    """``e^η − yη``, entire: ``|e^η − y| ≤ e^{Re η} + y``."""

    def value(self, eta, y, s):
        """``e^η − yη``."""
        return jnp.exp(eta) - y * eta

    def slope(self, eta, y, s):
        """``e^η − y``."""
        return jnp.exp(eta) - y

    def largest(self, stats, reach, low):
        """``e^{o + reach} + y``."""
        return jnp.exp(stats[1][:, None] + reach) + stats[2][:, None], _flat(reach, 0.0)


class NegativeBinomialFamily(AnalyticFamily):
    """Counts of mean ``μ = e^η`` and variance ``μ + μ²/size``: ``(y + size) log(1 + e^{η − log size}) − yη``."""

    size: Float[Array, ""]

    @property
    def strip(self) -> float:
        """As for the logistic loss."""
        return STRIP

    def value(self, eta, y, s):
        """The loss up to a constant."""
        return (y + self.size) * jax.nn.softplus(eta - jnp.log(self.size)) - y * eta

    def change(self, eta, before, y, s):
        """Likewise."""
        shift = jnp.log(self.size)
        return (y + self.size) * _softplus_change(eta - shift, before - shift) - y * (eta - before)

    def slope(self, eta, y, s):
        """``(y + size) σ(η − log size) − y``."""
        return (y + self.size) / (1 + self.size * jnp.exp(-eta)) - y

    def largest(self, stats, reach, low):
        """``(y + size) |σ| + y``."""
        most = SIGMOID * (stats[2] + self.size) + stats[2]
        return jnp.broadcast_to(most[:, None], reach.shape), _flat(reach, 0.0)


class GaussianFamily(AnalyticFamily):
    """``½ e^{−2s}(η − y)² + s``, entire."""

    @property
    def scaled(self) -> int:
        """``log σ``."""
        return 1

    @property
    def stride(self) -> float:
        """Newton needs one step."""
        return math.inf

    def value(self, eta, y, s):
        """``½ e^{−2s}(η − y)² + s``."""
        return 0.5 * jnp.exp(-2 * s) * (eta - y) ** 2 + s

    def slope(self, eta, y, s):
        """``e^{−2s}(η − y)``."""
        return jnp.exp(-2 * s) * (eta - y)

    def scale_slope(self, eta, y, s):
        """``1 − e^{−2s}(η − y)²``."""
        return 1 - jnp.exp(-2 * s) * (eta - y) ** 2

    def largest(self, stats, reach, low):
        """``|η − y| ≤ |y − o| + reach``."""
        far, weight = stats[0][:, None] + reach, jnp.exp(-2 * low)
        return weight * far, 1 + weight * far**2


class StudentTFamily(AnalyticFamily):
    """``½(ν + 1) log(1 + ((y − η)/scale)²/ν)`` with both known.

    With ``q = √ν scale`` and ``w = η − y``, ``|Im w| ≤ q/2``: ``|q² + w²| ≥ ¾q² + (Re w)²`` and ``|w| ≤ |Re w| + q/2``, so
    ``|w/(q² + w²)| ≤ 1/(√3 q) + 2/(3q)``.
    """

    df: float = eqx.field(static=True)
    scale: float = eqx.field(static=True)

    @property
    def strip(self) -> float:
        """Half way to the poles at ``y ± i√ν scale``."""
        return 0.5 * math.sqrt(self.df) * self.scale

    @property
    def stride(self) -> float:
        """About where the loss turns concave."""
        return self.scale

    def value(self, eta, y, s):
        """The loss up to a constant."""
        return 0.5 * (self.df + 1) * jnp.log1p(((eta - y) / self.scale) ** 2 / self.df)

    def change(self, eta, before, y, s):
        """By one logarithm."""
        far, near = (1 + ((x - y) / self.scale) ** 2 / self.df for x in (eta, before))
        return 0.5 * (self.df + 1) * logarithm(far / near)

    def slope(self, eta, y, s):
        """``(ν + 1) w/(q² + w²)``."""
        w = eta - y
        return (self.df + 1) * w / (self.df * self.scale**2 + w * w)

    def largest(self, stats, reach, low):
        """The bound above."""
        q = math.sqrt(self.df) * self.scale
        return _flat(reach, (self.df + 1) * (1 / (math.sqrt(3) * q) + 2 / (3 * q))), _flat(reach, 0.0)


def gaussian_energy(e: Float[Array, "*G r J"], rho: Float[Array, "r 1"], phi) -> Float[Array, "*G J"]:
    """``−log N(z; 0, Σ)`` of effects up to a constant, of ``e = z/τ``, ``ρ = log τ`` and ``φ = atanh(correlation)``."""
    energy = 0.5 * jnp.sum(e * e, -2) + jnp.sum(rho, 0)
    if e.shape[-2] != 2:
        return energy
    # With exponentials, of which there are curves: cosh²φ − 1 = ½(cosh 2φ − 1), sinh φ cosh φ = ½ sinh 2φ.
    one, other = jnp.exp(2 * phi), jnp.exp(-2 * phi)
    square, product, volume = 0.25 * (one + other) - 0.5, 0.25 * (one - other), jax.nn.softplus(2 * phi) - phi
    return energy + 0.5 * square * jnp.sum(e * e, -2) - product * e[..., 0, :] * e[..., 1, :] - volume
