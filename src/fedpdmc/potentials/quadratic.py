"""Quadratic potentials: Gaussian priors, Gaussian likelihoods, control variates."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, TypeVar

import equinox as eqx
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from fedpdmc.potentials.base import Field, Potential


@dataclasses.dataclass(frozen=True, eq=False)
class GaussianRecords:
    """The records behind a Gaussian likelihood: ``y ~ N(ξ·x, 1/weight)``, or ``y ~ N(x, 1/weight)`` with no design.

    ``share`` are the records' own weights, by which their losses are multiplied; None: all are one.
    """

    design: Any
    response: Any
    weight: Any
    share: Any = None


class Quadratic(Potential):
    """``U(x) = ½ xᵀ P x + hᵀ x`` with any symmetric ``P``.

    Parameters
    ----------
    precision : array of shape (d, d)
    linear : array of shape (d,)
    records : int
        How many records these sufficient statistics sum up; zero for priors and control variates.
    source : GaussianRecords, optional
        Those records, as long as they are available.
    """

    precision: Float[Array, "d d"]
    linear: Float[Array, " d"]
    records: int = eqx.field(default=0, static=True)
    source: GaussianRecords | None = eqx.field(default=None, static=True, repr=False)

    @classmethod
    def of_records(cls, source: GaussianRecords) -> Quadratic:
        """The likelihood of Gaussian records."""
        y, n, total, rows = source.response, source.response.shape[0], source.response.shape[0], source.design
        if source.share is not None:
            rows = None if rows is None else source.share[:, None] * rows
            y, total = y if rows is not None else source.share[:, None] * y, source.share.sum()
        if rows is None:
            return cls(jnp.asarray(jnp.diag(total * source.weight)), jnp.asarray(-source.weight * y.sum(0)), n, source)
        precision = source.weight * rows.T @ source.design
        return cls(jnp.asarray(precision), jnp.asarray(-source.weight * rows.T @ y), n, source)

    @property
    def dim(self) -> int:
        return self.linear.shape[-1]

    def value(self, x):
        return 0.5 * x @ self.precision @ x + self.linear @ x

    def gradient(self, x):
        return self.precision @ x + self.linear

    def hessian(self, x):
        return self.precision

    def averaged(self, x, spread):
        """``U(x) + ½ tr(Sᵀ P S)``; gradient and Hessian as at the mean."""
        return self.value(x) + 0.5 * jnp.sum(spread * (self.precision @ spread)), self.gradient(x), self.precision

    def stripped(self):
        return dataclasses.replace(self, source=None, records=0)

    def scaled(self, factor: float) -> Quadratic:
        """``factor · U``."""
        return Quadratic(factor * self.precision, factor * self.linear)

    def plus(self, other: Quadratic, factor: float = 1.0) -> Quadratic:
        """``U + factor · other``."""
        return Quadratic(self.precision + factor * other.precision, self.linear + factor * other.linear)

    def embedded(self, dim: int, columns: Int[ArrayLike, " k"] | None) -> Quadratic:
        """The same function of ``x[columns]``, written over all ``dim`` coordinates."""
        if columns is None:
            return self
        precision = jnp.zeros((dim, dim)).at[jnp.ix_(columns, columns)].set(self.precision)
        return Quadratic(precision, jnp.zeros(dim).at[columns].set(self.linear))

    def whiten(self, reference, columns):
        """``B = SᵀPS`` and ``Sᵀ(Pc + h)``, with the rows of ``S`` that this potential sees."""
        return self.along(*reference.rows_of(columns))

    def along(self, rows: Float[Array, "d e"], center: Float[Array, " d"]) -> Quadratic:
        """The same as a function of ``a`` with ``x = center + rows a``, up to a constant."""
        return Quadratic(rows.T @ self.precision @ rows, rows.T @ (self.precision @ center + self.linear))

    def field(self, rotating, flips, a, v):
        """Exact on lines. On rotations ``G'' = −B a(s)`` and ``f''' = −4 v·Ba − v·h``, both sinusoids."""
        largest = jnp.hypot(a, v) @ jnp.abs(self.precision) if flips and rotating else None
        return quadratic_field(
            rotating, flips, a, v, a @ self.precision, v @ self.precision, self.linear, largest
        )  # fmt: skip

    def affine(self, rotating):
        return not rotating


def quadratic_field(rotating: bool, flips: bool, a, v, ba, bv, linear, largest) -> Field:
    """The field of a quadratic from its products with position and velocity.

    ``linear`` may differ between chains. ``largest`` bounds ``|B| √(a² + v²)``, which flips on rotations need.
    """
    gradient, chains = ba + linear, a.shape[:-1]
    reach, slack = jnp.full(chains, jnp.inf), jnp.zeros(chains)
    if flips:
        return Field(gradient, bv, jnp.zeros_like(a) if largest is None else largest, reach, slack)
    vbv = jnp.sum(v * bv, -1, keepdims=True)
    if not rotating:
        return Field(gradient, vbv, jnp.zeros_like(vbv), reach, slack)
    aba, abv = jnp.sum(a * ba, -1, keepdims=True), jnp.sum(v * ba, -1, keepdims=True)
    ah, vh = (((x @ linear) if linear.ndim == 1 else jnp.sum(x * linear, -1))[..., None] for x in (a, v))
    curve = 4 * jnp.hypot((aba - vbv) / 2, abv) + jnp.hypot(ah, vh)
    return Field(gradient, vbv - aba - ah, curve, reach, slack)


P = TypeVar("P", bound=Potential)


def bare(potential: P) -> P:
    """The potential reduced to its numbers: anything else would make the compiler start again."""
    return potential.stripped()


class ControlVariate(NamedTuple):
    """A public quadratic ``q`` of a site's own parameters, made at ``point`` from derivatives up to ``order``.

    With a spread S, from their means over ``N(point, S Sᵀ)``. ``kept`` is the part of their curvature that q has, and
    ``slope`` the gradient where that of q differs from it. These fields describe how q was made; q itself may be noisy or
    rounded.
    """

    quadratic: Quadratic
    point: Float[Array, " k"]
    order: int
    spread: Float[Array, "k k"] | None = None
    kept: float = 1.0
    slope: Float[Array, " k"] | None = None

    @property
    def gradient(self) -> Float[Array, " k"]:
        """The site's gradient at the point, or its mean about it."""
        return self.quadratic.gradient(self.point) if self.slope is None else self.slope


def local_quadratic(
    potential: Potential, x: Float[Array, " k"], order: int, spread: Float[Array, "k k"] | None = None
) -> Quadratic:
    """``g·(x − x*) + ½ (x − x*)ᵀH(x − x*)``, the second term for order 2 only.

    Here g and H are the gradient and Hessian at ``x*``: the Taylor polynomial. With a spread they are their means about it.
    """
    if spread is None:
        gradient, hessian = potential.gradient(x), potential.hessian(x) if order == 2 else None
    else:
        _, gradient, hessian = potential.averaged(x, spread)
    hessian = hessian if hessian is not None and order == 2 else jnp.zeros((x.shape[0], x.shape[0]))
    return Quadratic(hessian, gradient - hessian @ x)
