"""Scalar losses ``ℓ(z; y)`` of a linear predictor, with a certified bound of the third derivative."""

import abc
import math
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fedpdmc.potentials.base import hermite

Values = Float[Array, "..."]


class Loss(eqx.Module):
    """A minus log likelihood of one record as a function of its predictor ``z``.

    A loss supplies its first two derivatives and ``third(z, y) ≥ sup |ℓ'''(z')|`` over ``|z' − z| ≤ reach``: with these
    ``LinearPredictor`` bounds every rate on a piece of path. With ``uniform``, ``third`` is one number for all z and y, and
    ``|ℓ'|`` at most ``steepest``. ``growth`` belongs to ``beyond``.
    """

    reach: ClassVar[float]
    uniform: ClassVar[bool]
    growth: ClassVar[float]

    @property
    def steepest(self) -> Float[Array, ""]:
        """The largest ``|ℓ'|``, infinite if it has no bound."""
        return jnp.asarray(jnp.inf)

    @abc.abstractmethod
    def value(self, z: Values, y: Values) -> Values:
        """``ℓ(z; y)`` up to a constant in z."""

    @abc.abstractmethod
    def first(self, z: Values, y: Values) -> Values:
        """``ℓ'(z; y)``."""

    @abc.abstractmethod
    def second(self, z: Values, y: Values) -> Values:
        """``ℓ''(z; y)``."""

    @abc.abstractmethod
    def third(self, z: Values, y: Values) -> Values:
        """A bound of ``|ℓ'''|`` on ``[z − reach, z + reach]``."""

    @abc.abstractmethod
    def beyond(self, order: int, z: Values, y: Values) -> Values:
        """A number w with ``|ℓ⁽ᵏ⁾(z + u)| ≤ w e^{growth |u|}`` for all u, for any order k from three on."""

    def averaged(self, z: Values, deviation: Values, y: Values) -> tuple[Values, Values, Values]:
        """``E ℓ``, ``E ℓ'`` and ``E ℓ''`` over ``N(z, deviation²)``, by Gauss–Hermite quadrature.

        The weights are positive and sum to one: bounds of ``ℓ'`` and ``ℓ''`` hold for their means.
        """
        nodes, weights = (jnp.asarray(part) for part in hermite())

        def add(total, node):
            at, weight = z + node[0] * deviation, node[1]
            found = self.value(at, y), self.first(at, y), self.second(at, y)
            return tuple(one + weight * other for one, other in zip(total, found, strict=True)), None

        zero = jnp.zeros_like(z)
        value, first, second = jax.lax.scan(add, (zero, zero, zero), (nodes, weights))[0]
        return value, first, second


class Logistic(Loss):
    """``ℓ = log(1 + e^z) − y z``; ``ℓ'' = p(1−p) = 1/(4 cosh²(z/2)) ≤ ¼``; ``|ℓ'''| = p(1−p)|1−2p| ≤ 1/(6√3)``."""

    reach = math.inf
    uniform = True
    growth = 0.0

    @property
    def steepest(self):
        return jnp.asarray(1.0)

    def value(self, z, y):
        return jnp.logaddexp(0.0, z) - y * z

    def first(self, z, y):
        return 0.5 + 0.5 * jnp.tanh(0.5 * z) - y

    def second(self, z, y):
        return 0.25 - 0.25 * jnp.tanh(0.5 * z) ** 2

    def third(self, z, y):
        """``1/(6√3)``, attained at ``p = (1 ± 1/√3)/2``."""
        return jnp.full_like(z, 1 / (6 * math.sqrt(3)))

    def beyond(self, order, z, y):
        """For any order ``2 n! λ(n+1)/π^{n+1}`` with ``n = order − 1`` and ``λ(s) = Σ (2k−1)^{−s}``, and sharper ones.

        ``p(z)`` is ½ less the sum of ``1/(z − x)`` over its poles, ``x = ±(2k−1)πi``; a term's n-th derivative is at most
        ``n!/|x|^{n+1}`` on the real line. The fourth is ``|p(1−p)(1 − 6p(1−p))| ≤ ⅛``, attained at ``p = ½``; the fifth
        ``¼ q (1−q²)(2−3q²)`` with ``q = 1−2p``, largest where ``2 − 15q² + 15q⁴ = 0``: below 0.1277.
        """
        return jnp.full_like(z, {4: 0.125, 5: 0.1277}.get(order, self.highest(order)))

    @staticmethod
    def highest(order: int) -> float:
        """The number of `beyond`."""
        n = order - 1
        # The terms left out of λ(n + 1) are less than the integral from the last one on.
        some = sum((2 * k - 1.0) ** -(n + 1) for k in range(1, 100)) + 197.0**-n
        return 2 * math.factorial(n) * some / math.pi ** (n + 1)


class Poisson(Loss):
    """``ℓ = e^z − y z``: all higher derivatives are ``e^z``, at most ``e^{z+1}`` within distance one."""

    reach = 1.0
    uniform = False
    growth = 1.0

    def value(self, z, y):
        return jnp.exp(z) - y * z

    def first(self, z, y):
        return jnp.exp(z) - y

    def second(self, z, y):
        return jnp.exp(z)

    def averaged(self, z, deviation, y):
        """``E e^z = e^{z + ½ deviation²}``."""
        mean = jnp.exp(z + 0.5 * deviation**2)
        return mean - y * z, mean - y, mean

    def third(self, z, y):
        """``e^{z+1}``."""
        return math.e * jnp.exp(z)

    def beyond(self, order, z, y):
        """``e^{z+u} ≤ e^z e^{|u|}``."""
        return jnp.exp(z)


class StudentT(Loss):
    """``ℓ = (ν+1)/2 · log(1 + r²/ν)`` with ``r = (z − y)/scale``.

    With ``r = √ν tan θ``, ``ℓ''' = −2 (ν+1) ν^{-3/2} sin 3θ cos³θ / scale³``, largest at ``θ = π/8``:
    ``|ℓ'''| ≤ 2 cos⁴(π/8) (ν+1) ν^{-3/2} / scale³``.
    """

    df: Float[Array, ""]
    scale: Float[Array, ""]
    reach = math.inf
    uniform = True
    growth = 0.0

    @property
    def steepest(self):
        """``(ν+1)/(2√ν scale)``, attained at ``r = √ν``."""
        return (self.df + 1) / (2 * jnp.sqrt(self.df) * self.scale)

    def value(self, z, y):
        r = (z - y) / self.scale
        return 0.5 * (self.df + 1) * jnp.log1p(r * r / self.df)

    def first(self, z, y):
        r = (z - y) / self.scale
        return (self.df + 1) * r / (self.df + r * r) / self.scale

    def second(self, z, y):
        r2 = ((z - y) / self.scale) ** 2
        return (self.df + 1) * (self.df - r2) / (self.df + r2) ** 2 / self.scale**2

    def third(self, z, y):
        """``2 cos⁴(π/8) (ν+1) ν^{-3/2} / scale³``."""
        peak = 2 * math.cos(math.pi / 8) ** 4
        return jnp.broadcast_to(peak * (self.df + 1) * self.df**-1.5 / self.scale**3, z.shape)

    def beyond(self, order, z, y):
        """``(ν+1) (order−1)! / (√ν scale)^order``: the k-th derivative of ``log(1 + w²)`` is at most ``2 (k−1)!``."""
        size = (self.df + 1) * math.factorial(order - 1) / (jnp.sqrt(self.df) * self.scale) ** order
        return jnp.broadcast_to(size, z.shape)
