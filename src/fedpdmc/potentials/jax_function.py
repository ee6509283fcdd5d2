"""Any model: a potential given as a JAX program, with certified bounds of its rates."""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from fedpdmc._jax.mapped import calls_library, mapped
from fedpdmc.enclosures import Curve, TimeInterval, check_continuity, enclose, jump_surfaces, smoothed
from fedpdmc.enclosures.continuity.jump_surfaces import JumpSurfaces
from fedpdmc.errors import NoEnclosure
from fedpdmc.potentials.affine_rate_cells import best_lines, fitted_line, speed
from fedpdmc.potentials.base import Field, Potential, RateBound
from fedpdmc.potentials.quadratic import Quadratic
from fedpdmc.potentials.quadratic_rate_cells import POSITION_SLACK, ROOM, best_cell, fitted_cell, series_rates

# Points at which the usual length of a cell is measured, and how much larger the rounding of a rate may be than at the worst
# of them.
SAMPLES, NOISE = 16, 16.0


class Program(Potential):
    """``U(x) = f(x, data)`` for any JAX function, less a public quadratic where there is a control variate.

    The signed rate of an event along a path is itself a program of time. It is evaluated on series
    ``w(s) ∈ w_0 + w_1 s + [lo, hi] s²`` (`fedpdmc.enclosures`), which gives ``r(s) ≤ r_0 + r_1 s + hi s²`` on a cell with
    ``r_0`` and ``r_1`` exact. Intervals of the second derivative of the rate would give the same order, but widen with every
    value that a formula uses twice, the path above all. Here linear operations keep the path exact, and interval arithmetic
    widens only terms of third order in the cell. Rates of reflections are bounded as ``d/ds U(a(s))``, by forward
    differentiation of the program, so that no gradient is enclosed and then contracted with the velocity.

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
    pace : array, optional
        From `paced`: the usual length of a cell at unit speed, the first guess everywhere.
    noise : array, optional
        From `paced`: the rounding of a rate, per unit of velocity and of ``1 + |a|``.
    typical_noise : array, optional
        The same at the middle one of its points, and without room.
    usual : array, optional
        From `paced`: the size of a rate, in the same units.
    records : int
        Number of records, for the report.
    """

    function: Callable[..., Any] = eqx.field(static=True)
    data: Any
    size: int = eqx.field(static=True)
    center: Float[Array, " k"] | None = None
    scale: Float[Array, "k d"] | Float[Array, " d"] | None = None
    control: Quadratic | None = None
    pace: Float[Array, ""] | None = None
    noise: Float[Array, ""] | None = None
    typical_noise: Float[Array, ""] | None = None
    usual: Float[Array, ""] | None = None
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
        """``v·∇U`` at many points, forward through the program as `bound` has it."""
        return mapped(self._forward, self.calls_library)(a, v)[:, None]

    def _program(self, flips: bool) -> Callable:
        """The signed rates as a function of position and velocity."""
        if flips:
            return lambda a, v: v * self._gradient(a)
        return lambda a, v: self._forward(a, v)[None]

    def bound(self, rotating: bool, flips: bool, a: Float[Array, "C d"], v: Float[Array, "C d"]) -> RateBound:
        """A certified bound of the signed rates on a cell whose length depends on the anchor alone.

        From polynomials of time of degree one where all primitives have rules for them: their programs are several times
        smaller than those of series, and compile in a fraction of the time.
        """
        usual = jnp.ones(()) if self.pace is None else self.pace
        try:
            return fitted_line(functools.partial(self.line, rotating, flips), rotating, usual, a, v)
        except NoEnclosure:
            program = self._program(flips)
            return jax.vmap(lambda one, other: fitted_cell(program, rotating, usual, one, other))(a, v)

    def line(self, rotating: bool, flips: bool, a: Float[Array, "C d"], v: Float[Array, "C d"], h: Float[Array, " C"]):
        """The signed rates on cells of these lengths as a line through their middle, its slope there, and their error."""
        (middle, lean), error = self.curves(rotating, flips, a.T, v.T, h, 1)
        return middle.T, lean.T, error.T

    def curves(self, rotating: bool, flips: bool, a: Float[Array, "d C"], v: Float[Array, "d C"], h, order: int):
        """The signed rates on intervals of these lengths as polynomials, lowest power first, and their error; by columns."""
        found = enclose(self._program(flips), TimeInterval(order))(*curved_path(rotating, a, v, h, order))
        found = found if isinstance(found, Curve) else Curve((found[:, None],), jnp.zeros((*found.shape, 1)))
        shape = (found.shape[0], a.shape[1])
        parts = (*found.parts, *[None] * (order + 1 - len(found.parts)))
        error = jnp.broadcast_to(found.error, shape)
        return tuple(jnp.zeros(shape) if part is None else jnp.broadcast_to(part, shape) for part in parts), error

    def check_continuity(self, lenient: bool = False) -> None:
        """Show that the function has no jumps for these data, and that its gradient is its own; the rest is a quadratic.

        Where ``lenient``, primitives without rules are taken for continuous.

        Raises
        ------
        Discontinuous
            Where that is not shown.
        """
        check_continuity(self._likelihood, self.dim, lenient)

    def jump_surfaces(self, lenient: bool = False) -> JumpSurfaces | None:
        """The hyperplanes at which the function may jump, of its own argument; None where it has no jumps.

        Raises
        ------
        Discontinuous
            Where it may jump elsewhere.
        """
        return jump_surfaces(self._likelihood, self.dim, lenient)

    def check(self, rotating: bool, flips: bool) -> None:
        """Walk through the program once, without computing anything.

        Raises
        ------
        NoEnclosure
            At a primitive without a rule.
        """
        state = jax.ShapeDtypeStruct((self.dim,), jnp.float64)
        one = jax.ShapeDtypeStruct((1, self.dim), jnp.float64)
        try:
            jax.eval_shape(lambda a, v: self.line(rotating, flips, a, v, jnp.ones(1)), one, one)
        except NoEnclosure:
            jax.eval_shape(lambda a, v: series_rates(self._program(flips), rotating, a, v, jnp.ones(())), state, state)

    def paced(self, rotating: bool, flips: bool) -> Program:
        """The same with its usual cell length, and the rounding of its rates.

        The length is the median of the best at points spread about the origin. Every cell starts from this guess: it changes
        the work, never the law of the events.
        """
        u = jax.random.normal(jax.random.key(0), (2, SAMPLES, self.dim))
        a, v = u[0], u[1] if not flips or rotating else jnp.sign(u[1])
        try:
            lengths, errors, rates = best_lines(functools.partial(self.line, rotating, flips), rotating, a, v)
        except NoEnclosure:
            lengths, errors, rates = jax.vmap(functools.partial(best_cell, self._program(flips), rotating))(a, v)
        size = jnp.linalg.norm(v, axis=-1) * (1 + jnp.linalg.norm(a, axis=-1))
        lengths, errors, rates = (
            lengths * jax.vmap(functools.partial(speed, rotating))(a, v),
            errors / size,
            rates / size,
        )
        pace = jnp.nan_to_num(jnp.nanmedian(lengths), nan=1.0)
        return dataclasses.replace(self.with_rounding(errors, rates), pace=pace)

    def with_rounding(self, errors: Any, rates: Any) -> Program:
        """The same with rounding and size of rates at points about the reference, per unit of velocity and ``1 + |a|``."""
        xp = np if isinstance(errors, np.ndarray) else jnp
        with warnings.catch_warnings():
            # NumPy warns if all entries are NaN.
            warnings.simplefilter("ignore", RuntimeWarning)
            noise = xp.nan_to_num(NOISE * xp.nanmax(errors), nan=np.inf, posinf=np.inf)
            typical, usual = xp.nanmedian(errors), xp.nan_to_num(xp.nanmedian(rates))
        noise, typical, usual = (jnp.asarray(x) for x in (noise, typical, usual))
        return dataclasses.replace(self, noise=noise, typical_noise=typical, usual=usual)

    def without_rounding(self) -> Program:
        """The same, reduced to its numbers."""
        return dataclasses.replace(self, pace=None, noise=None, typical_noise=None, usual=None)

    def field(self, rotating, flips, a, v):
        """Gradient, slope and a bound of the second derivative, from the same series as `bound`."""
        usual = jnp.ones(()) if self.pace is None else self.pace

        def one(at, velocity):
            def program(x, y):
                return self._gradient(x) if flips else self._forward(x, y)[None]

            reach = fitted_cell(program, rotating, usual, at, velocity).reach
            found = series_rates(program, rotating, at, velocity, reach)
            worst = jnp.maximum(jnp.abs(found.low), jnp.abs(found.high))
            slack = jnp.max(found.error) / jnp.maximum(jnp.max(jnp.abs(velocity)), 1e-300)
            return Field(self._gradient(at), found.slope, 2 * worst, reach, slack)

        return mapped(one, self.calls_library)(a, v)


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
