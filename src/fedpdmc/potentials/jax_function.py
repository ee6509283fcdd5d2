"""Any model: a potential given as a JAX program, with certified bounds of its rates."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fedpdmc._jax.compilation import calls_library, mapped
from fedpdmc.enclosures import Curve, TimeInterval, assertions, check_continuity, enclose, smoothed
from fedpdmc.potentials.base import Potential, Sum
from fedpdmc.potentials.quadratic import Quadratic

# Rounding error of positions and velocities along a plan, relative to the largest entry.
POSITION_SLACK = 1e-13
# Relative room for the rounding of the curve itself.
ROOM = 1 + 1e-9


class Program(Potential):
    """``U(x) = f(x, data)`` for any JAX function, less a public quadratic where there is a control variate.

    The signed rate of an event along a path is itself a program of time. On an interval every value of the program is a
    polynomial with a proved error (`fedpdmc.enclosures.taylor_models`). Value and slope in the middle are exact however the
    formula is written; interval arithmetic widens only what is beyond. Rates of reflections are bounded as
    ``d/ds U(a(s))``, by forward differentiation of the program, so that no gradient is enclosed and then contracted with
    the velocity.

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

    @property
    def calls_library(self) -> bool:
        """Whether the function factorises matrices or solves with them."""
        arguments = self.size if self.center is None else self.center.shape[0]
        return calls_library(self.function, jax.ShapeDtypeStruct((arguments,), jnp.result_type(float)), self.data)

    def _argument(self, a):
        if self.center is None or self.scale is None:
            return a
        return self.center + (self.scale * a if self.scale.ndim == 1 else self.scale @ a)

    def _likelihood(self, a):
        return jnp.asarray(smoothed(self.function)(self._argument(a), self.data))

    def value(self, x):
        """``f(x, data) − q(x)``."""
        value = self._likelihood(x)
        return value if self.control is None else value - self.control.value(x)

    def less(self, quadratic: Quadratic) -> Program:
        """The same less a quadratic, before whitening."""
        whole = quadratic if self.control is None else self.control.plus(quadratic)
        return dataclasses.replace(self, control=whole)

    def whiten(self, reference, columns):
        """The potential as a function of ``a`` with ``x = c + S a``."""
        rows, center = reference.scale_tril if reference.diagonal else reference.matrix, reference.center
        if columns is not None:
            rows, center = reference.matrix[columns], center[columns]
        control = None if self.control is None else self.control.whiten(reference, columns)
        return dataclasses.replace(self, size=reference.dim, center=center, scale=rows, control=control)

    def _gradient(self, a):
        """``∇U(a)``, the quadratic taken off last."""
        gradient = jax.grad(self._likelihood)(a)
        return gradient if self.control is None else gradient - self.control.gradient(a)

    def derivatives(self, x: Float[Array, " d"]) -> tuple[Float[Array, ""], Float[Array, " d"], Float[Array, "d d"]]:
        """``U``, ``∇U`` and ``∇²U`` in one program, which compiles three times faster than three programs."""

        def along(way):
            return jax.jvp(jax.value_and_grad(self.value), (x,), (way,))

        (value, gradient), (_, hessian) = jax.vmap(along, out_axes=(None, 0))(jnp.eye(self.dim))
        return value, gradient, hessian

    def _forward(self, a, v):
        """``v·∇U(a)``, forward through the program."""
        rate = jax.jvp(self._likelihood, (a,), (v,))[1]
        return rate if self.control is None else rate - v @ self.control.gradient(a)

    def gradient(self, x):
        """``∇U(x)``."""
        return self._gradient(x)

    def gradients(self, a: Float[Array, "C d"]) -> Float[Array, "C d"]:
        """``∇U`` at many points."""
        return mapped(self._gradient, self.calls_library)(a)

    def speeds(self, a: Float[Array, "C d"], v: Float[Array, "C d"]) -> Float[Array, "C 1"]:
        """``v·∇U`` at many points, forward through the program as `curves` has it."""
        return mapped(self._forward, self.calls_library)(a, v)[:, None]

    def _program(self, flips: bool) -> Callable:
        """The signed rates as a function of position and velocity."""
        if flips:
            return lambda a, v: v * self._gradient(a)
        return lambda a, v: self._forward(a, v)[None]

    def curves(self, rotating, flips, a, v, h, order):
        return enclosed_rates(self._program(flips), rotating, a, v, h, order)

    @property
    def assertions(self) -> tuple[str, ...]:
        """Where the user vouches for the continuity of a part of the function, which is then not shown."""
        return assertions(self._likelihood, self.dim)

    def check_continuity(self, lenient: bool = False) -> None:
        """Show that the function has no jumps for these data, and that its gradient is its own; the rest is a quadratic.

        Where ``lenient``, primitives without rules are taken for continuous.

        Raises
        ------
        Discontinuous
            Where that is not shown.
        """
        check_continuity(self._likelihood, self.dim, lenient)

    def check(self, rotating: bool, flips: bool) -> None:
        """Walk through the program once, without computing anything.

        Raises
        ------
        NoEnclosure
            At a primitive without a rule.
        """
        one = jax.ShapeDtypeStruct((self.dim, 1), jnp.float64)
        jax.eval_shape(lambda a, v: self.curves(rotating, flips, a, v, jnp.ones(1), 1), one, one)


def program_of(potential: Potential | None) -> Program | None:
    """The program that a potential is, or has among its terms."""
    terms = potential.terms if isinstance(potential, Sum) else (potential,)
    return next((term for term in terms if isinstance(term, Program)), None)


def enclosed_rates(
    rates: Callable,
    rotating: bool,
    a: Float[Array, "d C"],
    v: Float[Array, "d C"],
    h: Float[Array, " C"],
    order: int,
    *still: Float[Array, "... C"],
) -> Curve:
    """``rates(a, v, *still)`` along paths as a curve on intervals of these lengths; the other arguments do not move."""
    path = curved_path(rotating, a, v, h, order)
    found = enclose(rates, TimeInterval(order))(*path, *(Curve((x,), jnp.zeros_like(x)) for x in still))
    return found if isinstance(found, Curve) else Curve((found[..., None],), jnp.zeros((*found.shape, 1)))


def curved_path(rotating: bool, a, v, length, order: int) -> tuple[Curve, Curve]:
    """Position and velocity on intervals as curves, from columns; on a rotation high powers of the angle are left out."""
    half = 0.5 * length
    largest = 1 + jnp.max(jnp.abs(a), 0, initial=0.0) + (1 + length) * jnp.max(jnp.abs(v), 0, initial=0.0)
    slack = jnp.broadcast_to(POSITION_SLACK * largest, a.shape)
    if not rotating:
        return Curve((a + half * v, half * v), slack), Curve((v,), slack)
    ends = (a * jnp.cos(half) + v * jnp.sin(half), v * jnp.cos(half) - a * jnp.sin(half))
    turns = [ends[0], ends[1], -ends[0], -ends[1]]
    parts = [turns[k % 4] * (half**k / math.factorial(k)) for k in range(order + 1)]
    slack = slack + jnp.hypot(a, v) * (ROOM * half ** (order + 1) / math.factorial(order + 1))
    faster = [turns[(k + 1) % 4] * (half**k / math.factorial(k)) for k in range(order + 1)]
    return Curve(tuple(parts), slack), Curve(tuple(faster), slack)
