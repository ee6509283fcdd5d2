"""Linear regression with an unknown scale: a potential whose cost does not grow with the records."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from fedpdmc.potentials.base import ROTATION_REACH, Field, Potential

# On a piece of path log σ changes by at most this.
MOST_CHANGE = 0.25
# Rounding error of a gradient, relative to its largest terms.
ROUNDING = 64 * float(np.finfo(np.float64).eps)
LOG = "log_"


class LinearUnknownScale(Potential):
    """``U(a) = n σ(a) + ½ e^{−2σ(a)} |r(a)|²`` with ``r = offset + root a`` and ``σ = level + slope·a``.

    Before whitening ``a = (x, s)``: with ``[X y] = QT``, T triangular, ``r = T (x, −1)`` has the length of ``X x − y``, and
    ``σ = s``, so that U is the minus log likelihood of ``y ~ N(X x, e^{2s})``. Sites of any size have the same shapes.

    Along a path put ``w = e^{−2σ}``, ``ρ = |r|²``, ``m = r·r'`` and ``k = rootᵀr``. The gradient is
    ``G = n g + w (k − ρ g)`` with ``g = slope``, and

    ``G'  = w [−2σ'(k − ρg) + k' − 2m g]``,
    ``G'' = w [(4σ'² − 2σ'')(k − ρg) − 4σ'(k' − 2m g) + k'' − ρ''g]``,
    ``f''' = σ'''(n − wρ) + w [(−4σ'³ + 6σ'σ'')ρ + 6(2σ'² − σ'')m − 3σ'ρ'' + ½ρ''']`` for ``f(s) = U(a(s))``.

    Every factor is bounded on the piece from its value at the start; on rotations ``σ'' = −slope·a``, ``r'' = −root a``,
    ``r''' = −r'``.

    Parameters
    ----------
    root : array of shape (k, d)
    offset : array of shape (k,)
    slope : array of shape (d,)
    level : array of shape ()
    count : array of shape ()
        n, the number of records, or the sum of their weights.
    """

    root: Float[Array, "k d"]
    offset: Float[Array, " k"]
    slope: Float[Array, " d"]
    level: Float[Array, ""]
    count: Float[Array, ""]

    @classmethod
    def of_records(cls, X: np.ndarray, y: np.ndarray, weights: np.ndarray | None = None) -> LinearUnknownScale:
        """The likelihood of n records, in d coefficients and log σ; weights multiply rows by their roots, and sum to n."""
        n, d = X.shape
        triangle = np.zeros((d + 1, d + 1))
        rows = np.column_stack([X, y])
        if weights is not None:
            rows, n = np.sqrt(weights)[:, None] * rows, weights.sum()
        found = np.asarray(np.linalg.qr(rows, mode="r"))
        triangle[: found.shape[0]] = found
        root = np.column_stack([triangle[:, :-1], np.zeros(d + 1)])
        slope, parts = np.eye(d + 1)[-1], (-triangle[:, -1], np.zeros(()), float(n))
        offset, level, count = (jnp.asarray(part) for part in parts)
        return cls(jnp.asarray(root), offset, jnp.asarray(slope), level, count)

    @property
    def dim(self) -> int:
        return self.slope.shape[-1]

    @property
    def records(self) -> int:
        """Number of records."""
        return int(self.count)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the coordinates."""
        return (*(f"beta[{i}]" for i in range(self.dim - 1)), f"{LOG}sigma")

    @property
    def constrain(self) -> Coefficients:
        """From the coordinates to the variables."""
        return Coefficients()

    @property
    def guess(self) -> np.ndarray | None:
        """About where the site's own likelihood is largest; None without a residual to tell σ from."""
        root, offset, n = np.asarray(self.root)[:, :-1], np.asarray(self.offset), self.records
        x = np.linalg.lstsq(root, -offset, rcond=None)[0]
        rest = float(np.sum((root @ x + offset) ** 2))
        left = n - np.linalg.matrix_rank(root)
        if left <= 0 or rest <= 0:
            return None
        return np.append(x, 0.5 * np.log(rest / left))

    def value(self, x):
        change, r = self.slope @ x, self.offset + self.root @ x
        return self.count * (self.level + change) + 0.5 * jnp.exp(-2 * (self.level + change)) * jnp.sum(r * r)

    def averaged(self, x, spread):
        """``E U = n σ(x) + ½ e^{−2σ(x) + 2|Sᵀg|²} (|r(x')|² + |root S|²)`` with ``g = slope`` and ``x' = x − 2 S Sᵀ g``.

        The factor ``e^{−2σ}`` tilts ``N(x, S Sᵀ)`` to ``N(x', S Sᵀ)``. Means of derivatives are derivatives of the mean.
        """
        tilt = spread.T @ self.slope
        noise = jnp.sum((self.root @ spread) ** 2)

        def mean(at):
            level, r = self.level + self.slope @ at, self.offset + self.root @ (at - 2 * spread @ tilt)
            return self.count * level + 0.5 * jnp.exp(-2 * level + 2 * tilt @ tilt) * (r @ r + noise)

        return mean(x), jax.grad(mean)(x), jax.hessian(mean)(x)

    def whiten(self, reference, columns):
        rows, center = reference.rows_of(columns)
        return dataclasses.replace(
            self,
            root=self.root @ rows,
            offset=self.offset + self.root @ center,
            slope=self.slope @ rows,
            level=self.level + self.slope @ center,
        )

    def field(self, rotating, flips, a, v):
        """Gradient and slope at the start, and the bounds of the class's docstring."""
        here = self._start(a, v)
        gradient = self.count * self.slope + here.pull - here.square[:, None] * self.slope
        slope = -2 * here.pace[:, None] * (here.pull - here.square[:, None] * self.slope) + here.pulled
        slope = slope - 2 * here.product[:, None] * self.slope
        curve, reach = self._on_rotation(here, flips) if rotating else self._on_line(here, flips, v)
        if not flips:
            slope = jnp.sum(v * slope, -1, keepdims=True)
            slope = slope - jnp.sum(a * gradient, -1, keepdims=True) if rotating else slope
        largest = (self.count + here.square) * jnp.max(jnp.abs(self.slope)) + here.mass
        return Field(gradient, slope, curve, reach, ROUNDING * largest)

    def _start(self, a, v) -> Start:
        change, pace = a @ self.slope, v @ self.slope
        scale = jnp.exp(-(self.level + change))[:, None]
        position, speed = scale * (a @ self.root.T), scale * (v @ self.root.T)
        r = scale * self.offset + position
        return Start(
            change, pace, jnp.sum(r * r, -1), jnp.sum(r * speed, -1), jnp.sum(r * position, -1),
            jnp.linalg.norm(position, axis=-1), jnp.linalg.norm(speed, axis=-1), scale * (r @ self.root),
            scale * (speed @ self.root), scale * (position @ self.root),
            jnp.max(scale * (jnp.abs(r) @ jnp.abs(self.root)), -1),
        )  # fmt: skip

    def _on_line(self, here: Start, flips: bool, v):
        weight = jnp.abs(v) if flips else jnp.ones_like(v[:, :1])
        first = jnp.sum(weight * self._line_curve(here, flips, jnp.zeros_like(here.pace)), -1)
        most = MOST_CHANGE / jnp.maximum(jnp.abs(here.pace), 1e-300)
        reach = jnp.minimum(most, 2 * jnp.cbrt(2 / jnp.maximum(first, 1e-300)))
        return self._line_curve(here, flips, reach), reach

    def _line_curve(self, here: Start, flips: bool, h):
        speed2, product = here.speed**2, jnp.abs(here.product)
        square = here.square + 2 * h * product + h**2 * speed2
        return self._curve(here, flips, h, jnp.abs(here.pace), 0.0, speed2, 0.0, product + h * speed2, square)

    def _on_rotation(self, here: Start, flips: bool):
        """Bounds on ``[0, reach]``.

        ``|root a|² + |root v|² = A²`` is conserved. With ``p = r·root a``: ``m' = |r'|² − p`` and ``p' = r'·root a + m``, so
        that ``M = sup|m|`` and ``P = sup|p|`` satisfy ``M ≤ |m| + h(A² + P)`` and ``P ≤ |p| + h(½A² + M)``.
        """
        swing = jnp.hypot(here.change, here.pace)
        h = jnp.minimum(ROTATION_REACH, MOST_CHANGE / jnp.maximum(swing, 1e-300))
        pace = jnp.minimum(swing, jnp.abs(here.pace) + h * jnp.abs(here.change))
        bend = jnp.minimum(swing, jnp.abs(here.change) + h * jnp.abs(here.pace))
        whole = here.position**2 + here.speed**2
        speed2 = jnp.minimum(whole, (here.speed + h * jnp.sqrt(whole)) ** 2)
        across = (jnp.abs(here.across) + h * (whole / 2 + jnp.abs(here.product) + h * speed2)) / (1 - h**2)
        product = jnp.abs(here.product) + h * (speed2 + across)
        square = here.square + 2 * h * product
        return self._curve(here, flips, h, pace, bend, speed2, across, product, square, whole), h

    def _curve(self, here: Start, flips: bool, h, pace, bend, speed2, across, product, square, whole=None):
        """A bound of the second derivative from those of the factors; ``whole`` is A² on a rotation, None on a line."""
        growth, second = jnp.exp(2 * h * pace), 2 * (speed2 + across)
        if not flips:
            curve = (4 * pace**3 + 6 * pace * bend) * square + 6 * (2 * pace**2 + bend) * product + 3 * pace * second
            if whole is None:
                return (growth * curve)[:, None]
            excess = jnp.abs(self.count - here.square) + h * growth * (2 * pace * square + 2 * product)
            return (pace * excess + growth * (curve + 1.5 * whole + product))[:, None]
        g = jnp.abs(self.slope)
        h, growth, pace, product, square, second = (x[:, None] for x in (h, growth, pace, product, square, second))
        pulled = jnp.abs(here.pulled) if whole is None else jnp.hypot(here.pulled, here.drawn)
        pull = jnp.abs(here.pull) + h * pulled + square * g
        bends = 4 * pace**2 + (0.0 if whole is None else 2 * bend[:, None])
        curve = bends * pull + 4 * pace * (pulled + 2 * product * g)
        return growth * (curve + second * g + (0.0 if whole is None else pulled))


class Start(NamedTuple):
    """What is known where a piece of path begins; lengths and products in units of σ there.

    ``change`` and ``pace`` are ``slope·a`` and ``slope·v``; with ``R`` the root and ``r`` the residual, ``square = |r|²``,
    ``product = r·Rv``, ``across = r·Ra``, ``position = |Ra|``, ``speed = |Rv|``, ``pull = Rᵀr``, ``pulled = RᵀRv``,
    ``drawn = RᵀRa``, and ``mass`` the largest entry of ``|R|ᵀ|r|``.
    """

    change: Float[Array, " C"]
    pace: Float[Array, " C"]
    square: Float[Array, " C"]
    product: Float[Array, " C"]
    across: Float[Array, " C"]
    position: Float[Array, " C"]
    speed: Float[Array, " C"]
    pull: Float[Array, "C d"]
    pulled: Float[Array, "C d"]
    drawn: Float[Array, "C d"]
    mass: Float[Array, " C"]


@dataclasses.dataclass(frozen=True)
class Coefficients:
    """The variables of a linear regression: its coefficients and σ.

    Parameters
    ----------
    names : tuple of str, optional
        The user's names of the coordinates, the last of which is ``log σ``; without them the coefficients are one variable.
    """

    names: tuple[str, ...] | None = None

    def named(self, names: tuple[str, ...]) -> Coefficients:
        """The same with the user's names."""
        return Coefficients(names)

    def __call__(self, x) -> dict[str, Any]:
        """Variables by name at coordinates of shape (d,)."""
        sigma = jnp.exp(x[-1])
        if self.names is None:
            return {"beta": x[:-1], "sigma": sigma}
        return dict(zip(self.names[:-1], x[:-1], strict=True)) | {self.names[-1].removeprefix(LOG): sigma}
