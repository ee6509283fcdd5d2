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

from fedpdmc._jax.compilation import calls_library, mapped
from fedpdmc.enclosures import Curve, TimeInterval, assertions, check_continuity, enclose, smoothed
from fedpdmc.errors import InputError
from fedpdmc.potentials.base import Potential, RateBound
from fedpdmc.potentials.quadratic import Quadratic

# On a rotation a cell is at most this long (radians).
LONGEST = 1.0
# Candidates that the error of a cell should add, and the maximum. With an error of ``k h²`` the work ``(1 + k h³)/h`` is
# least if they are one half.
AIM, MOST = 0.5, 1.0
# A cell is tried again if it could be longer by this factor; its length changes by at most LINE_STRIDE, at most
# LINE_ATTEMPTS times.
LINE_MISJUDGED, LINE_STRIDE, LINE_ATTEMPTS = 8.0, 64.0, 24
# Relative, for the rounding of the line.
SLACK = 1e-9
# Lengths that are tried at unit speed.
LINE_LENGTHS = 2.0 ** np.arange(3, -13, -1)

# ``(a, v, h)`` to the values in the middle of cells, the slopes there in units of half a cell, and the errors.
Line = Callable[..., tuple[Float[Array, "C k"], Float[Array, "C k"], Float[Array, "C k"]]]


def speed(rotating: bool, a: Float[Array, " d"], v: Float[Array, " d"]) -> Float[Array, ""]:
    """The usual size of a coordinate's velocity on the path."""
    square = jnp.mean(v * v) + (jnp.mean(a * a) if rotating else 0.0)
    return jnp.sqrt(jnp.maximum(square / (2 if rotating else 1), 1e-300))


def _bounded(line: Line, a, v, h: Float[Array, " C"]) -> tuple[RateBound, Float[Array, " C"]]:
    """The lines above the rates on cells of these lengths, and how many candidates their errors add; not finite if unknown.

    With ``τ = 2s/h − 1`` a rate is at most ``m + l τ + e``, which is ``m − l + e`` at the start and has the slope ``2 l/h``.
    """
    middle, lean, error = line(a, v, h)
    error = error + SLACK * (jnp.abs(middle) + jnp.abs(lean))
    value, slope = middle - lean + error, 2 * lean / h[:, None]
    added = h * jnp.sum(error + 0.0 * (value + slope), -1)
    return RateBound(value, slope, jnp.zeros_like(value), h), added


def fitted_line(line: Line, rotating: bool, usual, a: Float[Array, "C d"], v: Float[Array, "C d"]) -> RateBound:
    """Bound the rates on cells whose lengths are found by trial: first the usual length, then a corrected one if needed.

    The length depends on the anchor alone. After a length without a finite bound only shorter ones are tried.
    """
    chains, longest = a.shape[0], LONGEST if rotating else jnp.inf
    first = jnp.minimum(usual / jax.vmap(lambda one, other: speed(rotating, one, other))(a, v), longest)

    def examine(bound: RateBound, added, limit):
        """Where the length suffices, and the length to try elsewhere."""
        finite = jnp.isfinite(added)
        ratio = jnp.where(finite, jnp.cbrt(AIM / jnp.maximum(added, 1e-300)), 1 / LINE_STRIDE)
        following = jnp.minimum(bound.reach * jnp.clip(ratio, 1 / LINE_STRIDE, LINE_STRIDE), limit)
        good = finite & (added <= MOST) & (following < LINE_MISJUDGED * bound.reach)
        return good, following

    def unfinished(state):
        count, _, _, good, _ = state
        return (count < LINE_ATTEMPTS) & ~jnp.all(good)

    def again(state):
        count, length, limit, good, old = state
        new, added = _bounded(line, a, v, length)
        bound = jax.tree.map(lambda x, y: jnp.where(good if x.ndim == 1 else good[:, None], x, y), old, new)
        limit = jnp.where(jnp.isfinite(added), limit, jnp.minimum(limit, length / LINE_STRIDE))
        well, following = examine(new, added, limit)
        return count + 1, jnp.where(good | well, length, following), limit, good | well, bound

    # The first trial is part of the loop, so that the program is enclosed in one place only.
    marks = jax.eval_shape(line, a, v, first)[0].shape[1]
    zero, no = jnp.zeros((chains, marks)), jnp.zeros(chains, bool)
    blank = RateBound(zero, zero, zero, first)
    start = (jnp.asarray(0), first, jnp.full(chains, longest), no, blank)
    return jax.lax.while_loop(unfinished, again, start)[-1]


def best_lines(line: Line, rotating: bool, a: Float[Array, "n d"], v: Float[Array, "n d"]):
    """At some points: the length of a cell that needs the least work, the rounding of the rates, and their size.

    The rounding is the error of a cell of length zero.
    """
    pace = jax.vmap(lambda one, other: speed(rotating, one, other))(a, v)
    longest = LONGEST if rotating else jnp.inf

    def attempt(rung):
        h = jnp.minimum(rung / pace, longest)
        middle, _, error = line(a, v, h)
        work = (1 + h * jnp.sum(error, -1)) / h
        return h, jnp.where(jnp.isfinite(work), work, jnp.inf), jnp.max(error, -1), jnp.max(jnp.abs(middle), -1)

    lengths, works, errors, rates = jax.lax.map(attempt, jnp.asarray([0.0, *LINE_LENGTHS]))
    best = jnp.argmin(works[1:], 0)
    return jnp.take_along_axis(lengths[1:], best[None], 0)[0], errors[0], rates[0]


# Rounding error of positions and velocities along a plan, relative to the largest entry.
POSITION_SLACK = 1e-13
# Relative room for the rounding of the curve itself.
ROOM = 1 + 1e-9


# Points at which the usual length of a cell is measured, and how much larger the rounding of a rate may be than at the worst
# of them.
SAMPLES, NOISE = 16, 16.0


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
        """A certified bound of the signed rates on a cell whose length depends on the anchor alone, from degree one."""
        usual = jnp.ones(()) if self.pace is None else self.pace
        return fitted_line(functools.partial(self.line, rotating, flips), rotating, usual, a, v)

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
        one = jax.ShapeDtypeStruct((1, self.dim), jnp.float64)
        jax.eval_shape(lambda a, v: self.line(rotating, flips, a, v, jnp.ones(1)), one, one)

    def paced(self, rotating: bool, flips: bool) -> Program:
        """The same with its usual cell length, and the rounding of its rates.

        The length is the median of the best at points spread about the origin. Every cell starts from this guess: it changes
        the work, never the law of the events.
        """
        u = jax.random.normal(jax.random.key(0), (2, SAMPLES, self.dim))
        a, v = u[0], u[1] if not flips or rotating else jnp.sign(u[1])
        lengths, errors, rates = best_lines(functools.partial(self.line, rotating, flips), rotating, a, v)
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
        """Refused: `bound` has all that is known of the rates."""
        raise InputError("sites", "a field of a function", "Use its bound.")


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
