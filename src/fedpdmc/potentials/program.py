"""Any model: a potential given as a JAX program, with certified bounds of its rates."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fedpdmc.enclosures import Cell, Series, enclose, span
from fedpdmc.potentials.base import Field, Potential, RateBound
from fedpdmc.potentials.quadratic import Quadratic

# Of positions and velocities along a plan, relative to the largest entry.
POSITION_SLACK = 1e-13
# The first look is at the anchor alone; then the cell is cut as often as its bound is not finite, or too loose.
LOOKS = 12
LONGEST, SHORTER, LOOSE = 1.0, 0.125, 64.0


class Program(Potential):
    """``U(x) = f(x, data)`` for any JAX function, less a public quadratic where there is a control variate.

    The signed rate of an event along a path is itself a program of time. It is evaluated on series
    ``w(s) ∈ w_0 + w_1 s + [lo, hi] s²`` (`fedpdmc.enclosures`), which gives ``r(s) ≤ r_0 + r_1 s + hi s²`` on a cell with
    ``r_0`` and ``r_1`` exact. Intervals of the second derivative of the rate would give the same order, but lose by every
    value that a formula uses twice, the path first of all; here the path stays a path through all linear operations, and
    what intervals lose is of third order in the cell. Rates of reflections are bounded as ``d/ds U(a(s))``, forward
    through the program, so that no gradient is enclosed and then contracted with the velocity.

    Parameters
    ----------
    function : callable
        ``f(x, data)``, a scalar: the minus log likelihood.
    data : pytree of arrays
    size : int
        Number of whitened coordinates.
    center, scale : arrays of shape (k,) and (k, size), or (size,) for a diagonal scale
        The function's argument is ``center + scale a``; None before whitening.
    control : Quadratic, optional
        Of ``a``.
    records : int
        Number of records, for the report.
    """

    function: Callable[..., Any] = eqx.field(static=True)
    data: Any
    size: int = eqx.field(static=True)
    center: Float[Array, " k"] | None = None
    scale: Float[Array, "k d"] | Float[Array, " d"] | None = None
    control: Quadratic | None = None
    records: int = eqx.field(default=0, static=True)

    @property
    def dim(self) -> int:
        """Number of parameters."""
        return self.size

    def _argument(self, a):
        if self.center is None or self.scale is None:
            return a
        return self.center + (self.scale * a if self.scale.ndim == 1 else self.scale @ a)

    def value(self, x):
        """``f(x, data) − q(x)``."""
        value = jnp.asarray(self.function(self._argument(x), self.data))
        return value if self.control is None else value - self.control.value(x)

    def less(self, quadratic: Quadratic) -> Program:
        """The same less a quadratic, before whitening."""
        whole = quadratic if self.control is None else self.control.plus(quadratic)
        return dataclasses.replace(self, control=whole)

    def whiten(self, reference, columns):
        """As a function of ``a`` with ``x = c + S a``."""
        rows, center = reference.scale_tril if reference.diagonal else reference.matrix, reference.center
        if columns is not None:
            rows, center = reference.matrix[columns], center[columns]
        control = None if self.control is None else self.control.whiten(reference, columns)
        return dataclasses.replace(
            self, size=reference.dim, center=center, scale=rows, control=control
        )  # fmt: skip

    def _gradient(self, a):
        """``∇U(a)``, the quadratic taken off last."""
        gradient = jax.grad(lambda b: jnp.asarray(self.function(self._argument(b), self.data)))(a)
        return gradient if self.control is None else gradient - self.control.gradient(a)

    def _forward(self, a, v):
        """``v·∇U(a)``, forward through the program."""
        rate = jax.jvp(lambda b: jnp.asarray(self.function(self._argument(b), self.data)), (a,), (v,))[1]
        return rate if self.control is None else rate - v @ self.control.gradient(a)

    def gradient(self, x):
        """``∇U(x)``."""
        return self._gradient(x)

    def gradients(self, a: Float[Array, "C d"]) -> Float[Array, "C d"]:
        """``∇U`` at many points."""
        return jax.vmap(self._gradient)(a)

    def speeds(self, a: Float[Array, "C d"], v: Float[Array, "C d"]) -> Float[Array, "C 1"]:
        """``v·∇U`` at many points, forward through the program as `bound` has it."""
        return jax.vmap(self._forward)(a, v)[:, None]

    def bound(self, rotating: bool, flips: bool, a: Float[Array, "C d"], v: Float[Array, "C d"]) -> RateBound:
        """A certified bound of the signed rates on a cell whose length depends on the anchor alone."""

        def program(at, velocity):
            return velocity * self._gradient(at) if flips else self._forward(at, velocity)[None]

        return jax.vmap(lambda one, other: _fitted(program, rotating, one, other))(a, v)

    def field(self, rotating, flips, a, v):
        """Gradient, slope and a bound of the second derivative, from the same series as `bound`."""

        def one(at, velocity):
            def program(x, y):
                return self._gradient(x) if flips else self._forward(x, y)[None]

            bound = _fitted(program, rotating, at, velocity)
            found = _rates(program, rotating, at, velocity, bound.reach)
            worst = jnp.maximum(jnp.abs(found.low), jnp.abs(found.high)) + jnp.abs(found.slope) * bound.reach / 6
            slack = jnp.max(found.error) / jnp.maximum(jnp.sum(jnp.abs(velocity)), 1e-300)
            return Field(self._gradient(at), found.slope, 2 * worst, bound.reach, slack)

        return jax.vmap(one)(a, v)


def path(rotating: bool, a: Float[Array, " d"], v: Float[Array, " d"]) -> tuple[Series, Series]:
    """Position and velocity along a line or a rotation, exact but for their rounding."""
    here = jnp.full(a.shape, POSITION_SLACK * (1 + jnp.max(jnp.abs(a), initial=0.0)))
    there = jnp.full(v.shape, POSITION_SLACK * jnp.max(jnp.abs(v), initial=0.0))
    if rotating:
        both = here + there
        return Series(a, both, v, -a), Series(v, both, -a, -v)
    return Series(a, here, v), Series(v, there)


def _rates(program, rotating: bool, a, v, length) -> Series:
    """The signed rates as series on a cell."""
    cell = Cell(length, rotating)
    position, velocity = path(rotating, a, v)
    found = enclose(program, cell)(position, velocity)
    return _flattened(cell, found)


def _flattened(cell: Cell, found: Any) -> Series:
    """With ``σ`` and ``κ`` written in powers of s, and zeros for what is absent."""
    if not isinstance(found, Series):
        found = Series(*_ends(span(cell, found)))
    zero = jnp.zeros(found.shape, found.dtype)
    slope = zero if found.slope is None else found.slope
    turn = zero if found.turn is None else found.turn
    low, high = (zero, zero) if found.low is None else (found.low, found.high)
    if cell.rotating:
        # slope sin s ∈ slope s + slope s² [−h/6, 0], and turn κ ∈ turn s² [least, ½].
        bend = -slope * cell.length / 6
        low, high = low + jnp.minimum(bend, 0.0), high + jnp.maximum(bend, 0.0)
        one, other = cell.least_turn * turn, 0.5 * turn
        low, high = low + jnp.minimum(one, other), high + jnp.maximum(one, other)
    return Series(found.value, found.error, slope, None, low, high)


def _ends(interval):
    middle = 0.5 * (interval.lo + interval.hi)
    return middle, jnp.maximum(interval.hi - middle, middle - interval.lo)


def _fitted(program, rotating: bool, a, v) -> RateBound:
    """Bound the rates on a cell of a length found by looking: first at the anchor, then as far as seems worth it.

    With ``k`` the sum of the curves, ``1/h + ¼ k h²`` is least at ``h = (2/k)^{1/3}``; k at the anchor tells h, and k on the
    cell whether that was too far. Nothing but the anchor decides.
    """

    def look(h) -> RateBound:
        found = _rates(program, rotating, a, v, h)
        return RateBound(
            found.value + found.error, found.slope, 2 * jnp.maximum(found.high, 0.0) * (1 + 1e-9), h
        )  # fmt: skip

    def unfit(state):
        count, bound = state
        finite = jnp.all(jnp.isfinite(bound.value + bound.slope + bound.curve))
        loose = jnp.sum(bound.curve) * bound.reach**3 > 2 * LOOSE
        return (count < LOOKS) & ((count == 1) | ~finite | loose) & ~((count == 1) & ~finite)

    def again(state):
        count, bound = state
        total = jnp.maximum(jnp.sum(bound.curve), 1e-300)
        wanted = jnp.minimum(jnp.cbrt(2 / total), LONGEST if rotating else jnp.inf)
        wanted = jnp.minimum(wanted, LONGEST * 1e3)
        h = jnp.where(count == 1, wanted, SHORTER * bound.reach)
        return count + 1, look(h)

    first = (jnp.asarray(1), look(jnp.zeros(())))
    return jax.lax.while_loop(unfit, again, first)[1]
