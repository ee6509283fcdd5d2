"""Poisson thinning: under affine bounds on cells, constants of segments, polynomials of time, and guessed bounds."""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from fedpdmc._jax.by_numpy import once
from fedpdmc._jax.compilation import computed_first, on_device
from fedpdmc._jax.random_streams import exponentials, uniforms
from fedpdmc.clocks.base import (
    FINE,
    NOT_FINITE,
    VIOLATED,
    CandidateWalk,
    Clock,
    Path,
    Walk,
    accept,
    advance,
    holding,
    in_lanes,
    keep_done,
    pick,
    pick_mark,
    served,
    unit,
)
from fedpdmc.clocks.closed_form import affine_clock, affine_clocks, earliest
from fedpdmc.clocks.envelopes import (
    DRAW_WORK,
    RELATIVE_SLACK,
    RateBound,
    cell_length,
    evaluate,
    gradient_work,
    reach_of,
    signed_rates,
    usual_states,
)
from fedpdmc.dynamics import QUARTER, Dynamics
from fedpdmc.enclosures import Curve, TimeInterval
from fedpdmc.potentials import CubicRemainder, Potential, Program, Quadratic, records_of
from fedpdmc.potentials.chebyshev import RateCurve, chebyshev_nodes, interpolant
from fedpdmc.potentials.dense_rates import RecordCurves, cosine_and_sine
from fedpdmc.potentials.linear_predictor import ROOM, ULPS


class ThinnedWalk(CandidateWalk):
    """A walk at an anchor (rates bounded from there on), at a candidate, or where the records are due.

    Attributes
    ----------
    anchored : (C,)
        Whether ``bound`` holds from ``(anchor_a, anchor_v)``, the present position.
    """

    anchored: Bool[Array, " C"]
    bound: RateBound
    anchor_a: Float[Array, "C d"]
    anchor_v: Float[Array, "C d"]


class ThinnedClock(Clock[ThinnedWalk]):
    """Any potential that encloses its field.

    On a cell of length h the bound ``b + c s + ½ k s²`` lies below its chord, so ``(b + (c + ½ k h) s)_+`` dominates the
    rate and is inverted in closed form. A candidate of mark i is accepted with probability rate over bound; a rate above
    its bound is a fault. One pass over the records at a candidate serves to accept it and to start the next cell.

    For flips the pass uses the velocity after the flip, so that if the flip is accepted and the next plan starts there, no
    pass is needed to start. The events are the same either way.
    """

    potential: Potential
    dynamics: Dynamics

    def idle(self, chains):
        wide, nowhere = jnp.zeros((chains, self.marks)), jnp.full((chains, self.dim), jnp.nan)
        return ThinnedWalk.idle(
            self.dynamics, chains, self.dim, squeezed=False, anchored=jnp.zeros(chains, bool),
            bound=RateBound(wide, wide, wide, jnp.zeros(chains)), anchor_a=nowhere, anchor_v=nowhere,
        )  # fmt: skip

    def restart(self, state, new, path):
        a, v = path.start[:, 0], path.velocity[:, 0]
        at_anchor = jnp.all((a == state.anchor_a) & (v == state.anchor_v), -1)
        anchored = jnp.where(new, at_anchor, state.anchored)
        return dataclasses.replace(state.restart(new, path), anchored=anchored)

    def step(self, state, path, keys):
        state = draw(state, path, keys)
        return keep_done(state.walk.done | state.anchored, state, self._passed(state, path))

    def _passed(self, state: ThinnedWalk, path: Path) -> ThinnedWalk:
        """One pass: the rates at the present position, to accept or reject a candidate and to start a cell."""
        walk, flips = state.walk, self.dynamics.flips
        a, v = path.state(self.dynamics, walk.segment, walk.offset)
        ahead = self.dynamics.jump(v, jnp.where(state.waiting, walk.mark, -1)) if flips else v
        gradient, rates, bound = evaluate(self.dynamics, self.potential, a, v, ahead)
        # A bound that is not a number has no candidates: the walk would go on as if the rate were zero.
        finite = jnp.all(jnp.isfinite(gradient), -1) & jnp.all(
            jnp.isfinite(bound.value + bound.slope + bound.curve), -1
        )
        rate = pick_mark(rates, walk.mark)
        accepted, fault = accept(state.threshold, rate, state.ceiling, finite, candidate=state.waiting)
        decided = walk.decided(path, accepted, fault, None if flips else unit(gradient))
        anchored = ~state.waiting if flips else ~accepted
        return dataclasses.replace(
            state,
            walk=decided,
            waiting=jnp.zeros_like(accepted),
            anchored=anchored,
            bound=bound,
            anchor_a=a,
            anchor_v=ahead,
        )


def draw(state: ThinnedWalk, path: Path, keys) -> ThinnedWalk:
    """From an anchor: the first candidate of the chord bounds, or the end of the cell."""
    walk, bound = state.walk, state.bound
    remaining = path.at(path.duration, walk.segment) - walk.offset
    cell = jnp.minimum(remaining, jnp.minimum(bound.reach, cell_length(bound)))
    slope = bound.slope + 0.5 * bound.curve * cell[:, None]
    u = uniforms(keys, path.number, walk.draws, slope.shape[-1] + 1)
    wait, mark = earliest(affine_clocks(bound.value.T, slope.T, u[:-1], path.number))
    hit = wait < cell
    ceiling = pick_mark(bound.value + slope * wait[:, None], mark)
    step = jnp.where(hit, wait, cell)
    segment, offset, over = advance(path, walk.segment, walk.offset, step, ~hit & (cell >= remaining))
    drawn = dataclasses.replace(
        state, walk=walk.moved(path, segment, offset, over, mark), anchored=jnp.zeros_like(hit), waiting=hit,
        ceiling=ceiling, threshold=u[-1] * ceiling,
    )  # fmt: skip
    return keep_done(walk.done | ~state.anchored, state, drawn)


# Thinning in stages ----------------------------------------------------------------------------------------------------


# The most candidates of one step: far out in the tails the constants are large and candidates many.
MOST_EVALUATIONS = 256
# Numbers in the design above which a pass costs so much that it waits for the whole batch.
LARGE = 2**16


class SegmentClock(Clock[CandidateWalk]):
    """Potentials that are small after their quadratic control variate.

    A candidate comes from constants: on a rotation ``|a|² + |v|²`` is conserved, so that one number bounds the rate on a
    whole segment, and the candidates of a whole plan are found by inverting their integral; on a line constants hold on a
    cell. A candidate is kept with probability envelope over constant, without the records, and then accepted with
    probability rate over envelope, in one pass over the records for all chains that wait for it.
    """

    potential: Potential
    dynamics: Dynamics
    envelope: ThirdOrder

    def idle(self, chains):
        return CandidateWalk.idle(self.dynamics, chains, self.dim, squeezed=False)

    def restart(self, state, new, path):
        return state.restart(new, path)

    def step(self, state, path, keys):
        """Search for candidates on some chains until most of them have one or are done; then one pass over the records.

        Chains are served in batches, so that finished ones cost nothing.
        """
        return in_lanes(self._search, state, path, keys)

    def _search(self, state: CandidateWalk, path: Path, keys) -> CandidateWalk:
        """Search until no chain of the batch searches or, if a pass is cheap, until three in four of them wait for it."""
        records = records_of(self.potential)
        cheap = records is None or records.design.size <= LARGE
        plan = None
        if self.dynamics.flow.rotating:
            # A constant bound for every segment.
            rates, _ = self.envelope.constants(self.dynamics, path.start, path.velocity, path.duration)
            plan = rates, Ceilings.of(jnp.sum(rates, -1).T[:, None], path.duration.T)

        def searching(carry):
            evaluations, now = carry
            without, waiting = jnp.sum(~(now.walk.done | now.waiting)), jnp.sum(now.waiting)
            return (evaluations < MOST_EVALUATIONS) & (without > 0) & (not cheap or 3 * without >= waiting)

        def evaluate(carry):
            evaluations, now = carry
            return evaluations + 1, self._evaluate(now, path, plan, keys)

        _, state = jax.lax.while_loop(searching, evaluate, evaluate((jnp.array(0), state)))
        return self.decide(state, path)

    def _evaluate(self, state: CandidateWalk, path: Path, plan: tuple[Any, Ceilings] | None, keys) -> CandidateWalk:
        """To the next candidate of the constants, which the bound there may reject, or to where they end."""
        walk, u = state.walk, uniforms(keys, path.number, state.walk.draws, 4)
        level = exponentials(u[0])
        if plan is None:
            a, v = path.state(self.dynamics, walk.segment, walk.offset)
            remaining = path.at(path.duration, walk.segment) - walk.offset
            rates, cell = self.envelope.constants(self.dynamics, a, v, remaining)
            wait = level / jnp.maximum(jnp.sum(rates, -1), 1e-300)
            hit = wait < cell
            step, ends = jnp.where(hit, wait, cell), ~hit & (cell >= remaining)
            segment, offset, over = advance(path, walk.segment, walk.offset, step, ends)
            hit &= ~over
        else:
            found = plan[1].point(plan[1].passed(walk.segment, walk.offset) + level, u[1])
            segment, offset, over, rates = found.cell, found.offset, found.over, pick(plan[0], found.cell)
            if path.cap is not None:
                over |= pick(path.begin, segment) + offset > path.cap
            hit = ~over
        total = jnp.cumsum(rates, -1)
        mark = jnp.minimum(jnp.sum(total <= (u[1] * total[:, -1])[:, None], -1), total.shape[-1] - 1)
        there = path.state(self.dynamics, jnp.minimum(segment, path.last), offset)
        bound, constant = pick_mark(self.envelope.bound(self.dynamics, *there), mark), pick_mark(rates, mark)
        fault = jnp.where(hit & ~(bound <= constant), jnp.where(jnp.isfinite(bound), VIOLATED, NOT_FINITE), FINE)
        fault = jnp.where(jnp.isfinite(total[:, -1]) | over, fault, NOT_FINITE)
        waiting = hit & (u[2] * constant < bound) & (fault == FINE)
        moved = walk.moved(path, segment, offset, over, mark, fault)
        new = CandidateWalk(moved, waiting, bound, u[3] * bound, None, None)
        return keep_done(walk.done | state.waiting, state, new)


# The remainder of third order ------------------------------------------------------------------------------------------


# On a line the constants hold on a cell on which the distance grows by at most this much (posterior standard deviations).
CELL = 1.5
# States at which the envelope is tried out.
TRIALS = 256
# Chebyshev nodes on a quarter turn: the interpolant errs by 2·10⁻⁴ of the largest rate of third order.
CUBIC_NODES = 8


class QuadraticPart(eqx.Module):
    """``∇Q = g + B b``: the quadratic part of a site's potential, apart from the remainder, such as its share of the prior.

    Attributes
    ----------
    matrix, slope : (d, d), (d,)
        ``B`` and ``g``.
    norm, norms : (), (d,)
        Bounds of ``|B b|`` and of its coordinates over unit vectors.
    rounding : ()
        Bound of the rounding of ``∇Q``, per unit of ``1 + |b|``.
    """

    matrix: Float[Array, "d d"]
    slope: Float[Array, " d"]
    norm: Float[Array, ""]
    norms: Float[Array, " d"]
    rounding: Float[Array, ""]

    @classmethod
    def of(cls, quadratic: Quadratic, center: Float[Array, " d"]) -> QuadraticPart:
        """About a centre."""
        matrix, linear, at = (np.asarray(x) for x in (quadratic.precision, quadratic.linear, center))
        size = np.abs(matrix).sum() * (1 + np.abs(at).sum()) + np.abs(linear).sum()
        norms = np.linalg.norm(matrix, axis=1)
        numbers = (
            matrix,
            matrix @ at + linear,
            ROOM * np.linalg.norm(matrix, 2),
            ROOM * norms,
            ULPS * size,
        )
        return cls(*(jnp.asarray(x) for x in numbers))

    def gradient(self, b: Float[Array, "C d"]) -> Float[Array, "C d"]:
        """``g + B b``."""
        return self.slope + b @ self.matrix

    def largest(self, size: Float[Array, "*C"], flips: bool) -> Float[Array, "*C k"]:
        """Bound of ``|e·∇Q|`` for ``|b| ≤ size``: by coordinate, or for any unit vector e."""
        if flips:
            return size[..., None] * self.norms + jnp.abs(self.slope)
        return (size * self.norm + ROOM * jnp.linalg.norm(self.slope))[..., None]


class ThirdOrder(eqx.Module):
    """The third-order remainder of records (`CubicRemainder`), and a quadratic where the control variate leaves one."""

    name: ClassVar[str] = "ThirdOrder"
    domain: ClassVar[str] = "a third-order remainder with a proved error, then the records"
    wide: ClassVar[bool] = False
    passes: ClassVar[int] = 0

    remainder: CubicRemainder
    quadratic: QuadraticPart | None = None

    def constants(
        self, dynamics: Dynamics, a: Float[Array, "*C d"], v: Float[Array, "*C d"], remaining: Float[Array, "*C"]
    ) -> tuple[Float[Array, "*C k"], Float[Array, "*C"]]:
        """Bounds of the rates by mark that hold for a while, at most ``remaining``, and for how long.

        From the energy on a rotation, and from the distance on a cell of a line.
        """
        flips, rotating, remainder = dynamics.flips, dynamics.flow.rotating, self.remainder
        if rotating:
            distance = jnp.linalg.norm(remainder.center)
            size, cell = jnp.sqrt(jnp.sum(a**2 + v**2, -1)) + distance, remaining
            speed = jnp.hypot(a, v)
        else:
            pace = jnp.linalg.norm(v, axis=-1)
            cell = jnp.minimum(remaining, CELL / jnp.maximum(pace, 1e-300))
            size = jnp.linalg.norm(a - remainder.center, axis=-1) + pace * cell
            speed = jnp.abs(v)
        if rotating and not flips:
            cubic, beyond, square = self._largest_reflections(size)
            rates = cubic[..., None] + beyond
            if square is not None:
                rates = rates + square
        else:
            faster = speed if flips else jnp.linalg.norm(v, axis=-1, keepdims=True)
            rates = faster * remainder.largest(size, flips)
            if self.quadratic is not None:
                rates = rates + faster * self.quadratic.largest(size, flips)
        return rates * (1 + 2 * RELATIVE_SLACK) + self._slack(size, speed), cell

    def along(
        self,
        potential: Any,
        dynamics: Dynamics,
        a: Float[Array, "d C"],
        v: Float[Array, "d C"],
        length: Float[Array, " C"],
    ) -> RateCurve:
        """The signed rates of reflections on pieces of a rotation, of stacked sites.

        With ``b = a cos t + v sin t − c`` the rate ``½ T[b, b, b'] + (g + B b)·b'`` is a trigonometric polynomial of degree
        three, made from products of T with a, v and c. What follows the third order is bounded on the whole segment, as in
        `constants`.

        *Interpolation.* By Bernstein's inequality the K-th derivative of such a polynomial is at most ``3^K`` times its
        largest value m. So the interpolant at K Chebyshev nodes errs by at most ``2 (L/4)^K/K! 3^K m``.

        *Rounding.* The terms before they cancel are sums of ``d³`` products, by the inequality of Cauchy and Schwarz at most
        ``4 ‖T‖ ρ³`` together, in the Frobenius norm. `_slack` has room for the records and for the quadratic.
        """
        if self.remainder.center.shape[0] == 1:
            alone = jax.tree.map(lambda x: x[0], self)
            values, error = (x[None] for x in alone._along(a, v, length))
        else:
            values, error = jax.lax.map(lambda site: site._along(a, v, length), self)
        return RateCurve(values, error, length)

    def _along(self, a, v, length) -> tuple[Float[Array, "K C"], Float[Array, " C"]]:
        """The rates of one site at the nodes, and the error."""
        remainder, dim = self.remainder, a.shape[0]
        center, tensor = remainder.center, remainder.tensor
        angle = 0.5 * length * (chebyshev_nodes(CUBIC_NODES)[:, None] + 1)
        cos, sin = cosine_and_sine(angle)

        def twice(x, y):
            """``T[x, y, ·]``."""
            return tensor.reshape(dim * dim, dim).T @ (x[:, None] * y[None]).reshape(dim * dim, -1)

        def dot(x, y):
            return jnp.sum(x * y, 0)

        aa, av, vv = twice(a, a), twice(a, v), twice(v, v)
        once_center = jnp.tensordot(center, tensor, 1)
        ca, cv, cc = once_center @ a, once_center @ v, once_center @ center
        # T[b, b, ·] and its product with b' = v cos − a sin.
        along_v = cos**2 * dot(aa, v) + 2 * cos * sin * dot(av, v) + sin**2 * dot(vv, v)
        along_v = along_v - 2 * (cos * dot(ca, v) + sin * dot(cv, v)) + cc @ v
        along_a = cos**2 * dot(aa, a) + 2 * cos * sin * dot(av, a) + sin**2 * dot(vv, a)
        along_a = along_a - 2 * (cos * dot(ca, a) + sin * dot(cv, a)) + cc @ a
        values = 0.5 * (cos * along_v - sin * along_a)
        size = jnp.sqrt(dot(a, a) + dot(v, v)) + jnp.linalg.norm(center)
        largest, beyond, square = self._largest_reflections(size)
        if self.quadratic is not None and square is not None:
            largest = largest + square[..., 0]
            matrix, start = self.quadratic.matrix, self.quadratic.gradient(-center[None])[0]
            slope = start[:, None, None] + (matrix @ a)[:, None] * cos + (matrix @ v)[:, None] * sin
            values = values + cos * dot(slope, v[:, None]) - sin * dot(slope, a[:, None])
        grid = 2 * (length / 4) ** CUBIC_NODES / math.factorial(CUBIC_NODES) * 3.0**CUBIC_NODES
        rounding = RELATIVE_SLACK * (4 * jnp.linalg.norm(tensor.reshape(-1)) * size**3 + largest)
        error = beyond[..., 0] * (1 + RELATIVE_SLACK) + ROOM * grid * largest + rounding
        return values, error + self._slack(size, jnp.hypot(a, v).T)[:, 0]

    def _largest_reflections(self, size: Float[Array, "*C"]):
        """On a rotation, where ``|b|² + |v|² ≤ ρ²``, bounds of the third order, of what follows it and of the quadratic.

        ``|b|²|v| ≤ 2ρ³/(3√3)``, ``|b|³|v| ≤ 3√3ρ⁴/16`` and ``|b||v| ≤ ½ρ²``.
        """
        cubic = 0.5 * self.remainder.norm * 2 * size**3 / (3 * jnp.sqrt(3.0))
        beyond = size[..., None] * (3 * jnp.sqrt(3.0) / 16) * self.remainder.beyond(size, False)
        square = None if self.quadratic is None else size[..., None] * self.quadratic.largest(0.5 * size, False)
        return cubic, beyond, square

    def bound(self, dynamics: Dynamics, a: Float[Array, "C d"], v: Float[Array, "C d"]) -> Float[Array, "C k"]:
        """A bound of the rate of every mark at ``(a, v)``: the third order and its error.

        It is never above the constants of a cell that ``(a, v)`` lies in.
        """
        b, remainder, flips = a - self.remainder.center, self.remainder, dynamics.flips
        size = jnp.linalg.norm(b, axis=-1)
        speed = jnp.abs(v) if flips else jnp.linalg.norm(v, axis=-1, keepdims=True)
        signed = signed_rates(dynamics, remainder.gradient(b), v)
        terms = jnp.abs(signed)
        if self.quadratic is not None:
            second = signed_rates(dynamics, self.quadratic.gradient(b), v)
            signed, terms = signed + second, terms + jnp.abs(second)
        beyond = speed * remainder.beyond(size, flips)
        bound = jnp.maximum(signed, 0.0) + RELATIVE_SLACK * terms + (1 + RELATIVE_SLACK) * beyond
        return bound + 0.5 * self._slack(size, v)

    def _slack(self, size, v):
        """Room for the rounding of sums over records, in units of the whitened rates."""
        rounding = self.remainder.rounding + (0.0 if self.quadratic is None else self.quadratic.rounding)
        return rounding * jnp.sum(jnp.abs(v), -1, keepdims=True) * (1 + size[..., None])

    def cost(self, potential: Potential, dynamics: Dynamics) -> float:
        """Gradients per unit of process time, if the posterior is like the reference.

        One for each candidate of the mean bound, plus a bound at a point for each candidate of the constants.
        """
        return self._cost(_usual_constants, potential, dynamics)

    def cost_in_lockstep(self, potential: Potential, dynamics: Dynamics) -> float:
        """The same with the candidates of the polynomial of a segment in place of those of its constant."""
        return self._cost(_usual_curves, potential, dynamics)

    def _cost(self, usual: Callable, potential: Potential, dynamics: Dynamics) -> float:
        price = (DRAW_WORK + 2 * self.remainder.tensor.size) / gradient_work(potential)
        passes, points = usual(self, dynamics, *usual_states(dynamics, potential.dim, TRIALS))
        return float(passes) + price * float(points)


@once
def _usual_constants(envelope: ThirdOrder, dynamics: Dynamics, a: Float[Array, "n d"], v: Float[Array, "n d"]):
    constants, _ = envelope.constants(dynamics, a, v, jnp.full(a.shape[0], jnp.inf))
    return jnp.mean(jnp.sum(envelope.bound(dynamics, a, v), -1)), jnp.mean(jnp.sum(constants, -1))


@once
def _usual_curves(envelope: ThirdOrder, dynamics: Dynamics, a: Float[Array, "n d"], v: Float[Array, "n d"]):
    values, error = envelope._along(a.T, v.T, jnp.full(a.shape[0], QUARTER))
    return jnp.mean(envelope.bound(dynamics, a, v)), jnp.mean(jnp.maximum(values + error, 0.0))


# Thinning under curves ---------------------------------------------------------------------------------------------------


# If the error adds too many candidates to a piece of a program's path, the piece is shortened, at most and at least by these
# factors, so that the error would add the first number. At a kink the error is the range of both sides, so it adds few on a
# short piece. If no piece above a part of the usual length suffices, the rates are not finite.
AIM, LEAST_CUT, MOST_CUT, SHORTEST = 0.1, 0.7, 0.1, 1e-12
# Candidates that the error may add to a piece of a program's path; and of records, which have another bound.
MOST_ADDED, MOST_ADDED_TO_RECORDS = 0.5, 4.0


class CurveWalk(CandidateWalk):
    """A walk on pieces, with the length of the piece to try next."""

    length: Float[Array, " C"]


class CurveClock(Clock[CurveWalk]):
    """Rates that are known as ``p(s) ± e`` on pieces of the path.

    A candidate at s is accepted if its threshold is below ``p(s) − e``, rejected if above ``p(s) + e``, and decided by the
    exact rate in between. The events are those of thinning by the exact rate alone under the same bounds. Where the error
    is too large, a program gets a shorter piece, and records a cell with a bound of second order.

    Attributes
    ----------
    curves : RecordCurves, ThirdOrder or TimePolynomial
        What makes the curves: all records by one product with their design, the tensor of their third order, or the Taylor
        models of a program.
    length : ()
        The longest piece.
    """

    potential: Potential
    dynamics: Dynamics
    curves: RecordCurves | ThirdOrder | TimePolynomial
    length: Float[Array, ""]

    @property
    def name(self) -> str:
        return self.curves.name

    @property
    def domain(self) -> str:
        return self.curves.domain

    def idle(self, chains):
        return CurveWalk.idle(self.dynamics, chains, self.dim, length=jnp.zeros(chains))

    def restart(self, state, new, path):
        return dataclasses.replace(state.restart(new, path), length=jnp.where(new, self.length, state.length))

    def step(self, state, path, keys):
        """One piece on every chain that does not wait; then the exact rates where enough chains wait for them."""
        state = self._walked(state, path, keys)
        return served(self._decide_some, state, (path, self.potential.shares))

    def _decide_some(self, state: CurveWalk, rows: tuple[Path, Float[Array, " C"] | None]) -> CurveWalk:
        """The exact rates on some chains, with their own shares of the prior."""
        path, shares = rows
        return holding(self, shares).decide(state, path)

    def _walked(self, state: CurveWalk, path: Path, keys) -> CurveWalk:
        """To a candidate or to the end of the piece."""
        walk = state.walk
        a, v = path.state(self.dynamics, jnp.minimum(walk.segment, path.last), walk.offset)
        remaining = path.at(path.duration, walk.segment) - walk.offset
        h = jnp.minimum(state.length, remaining)
        curve = jax.tree.map(lambda x: x[None], self.curves).along(self.potential, self.dynamics, a.T, v.T, h)
        u = uniforms(keys, path.number, walk.draws, CANDIDATES * DRAWN)
        found = first_candidate(curve, u)
        if isinstance(self.curves, TimePolynomial):
            new = self._shortened(state, path, remaining, curve, found, self.curves.order)
        else:
            new = self._in_cells(state, path, a, v, remaining, u, curve, found)
        return keep_done(walk.done | state.waiting, state, new)

    def _in_cells(self, state: CurveWalk, path: Path, a, v, remaining, u, curve: RateCurve, found: Found) -> CurveWalk:
        """At the candidate, or at that of a cell with a bound of second order where the curve is poor."""
        poor, walk = is_poor(curve), state.walk
        found = jax.lax.cond(
            jnp.any(poor & ~walk.done),
            lambda: chosen(poor, second_order_candidate(self.dynamics, self.potential, a, v, remaining, u), found),
            lambda: found,
        )
        walk = dataclasses.replace(walk, passes=walk.passes + self.curves.passes)
        return at_candidate(dataclasses.replace(state, walk=walk), path, found, remaining)

    def _shortened(
        self, state: CurveWalk, path: Path, remaining, curve: RateCurve, found: Found, order: int
    ) -> CurveWalk:
        """At the candidate; where the error is too large, before it with a shorter piece to try."""
        moved = at_candidate(state, path, found, remaining, self.dynamics.flips)
        added = curve.candidates_of_error
        good = added <= MOST_ADDED
        cut = jnp.clip((AIM / added) ** (1 / (order + 2)), MOST_CUT, LEAST_CUT)
        length = jnp.where(good, self.length, curve.length * jnp.where(jnp.isfinite(added), cut, MOST_CUT))
        lost = ~good & (length < SHORTEST * self.length)
        stopped = dataclasses.replace(state.walk, done=lost, fault=jnp.where(lost, NOT_FINITE, FINE))
        new = keep_done(~good, dataclasses.replace(state, walk=stopped), moved)
        return dataclasses.replace(new, length=length)


def is_poor(curve: RateCurve) -> Bool[Array, " C"]:
    """Where the errors add so many candidates that a bound from the records is better, or are not finite."""
    return ~(curve.candidates_of_error <= MOST_ADDED_TO_RECORDS)


def second_order_candidate(
    dynamics: Dynamics, potential: Potential, a: Float[Array, "C d"], v: Float[Array, "C d"], remaining, u
) -> Found:
    """The candidate of a cell that is bounded by a pass over the records in 64 bits; they decide it."""
    bound = evaluate(dynamics, potential, a, v, v).bound
    cell = jnp.minimum(remaining, jnp.minimum(bound.reach, cell_length(bound)))
    value, slope = bound.value[:, 0], bound.slope[:, 0] + 0.5 * bound.curve[:, 0] * cell
    wait = affine_clock(value, slope, exponentials(u[0]))
    hit = wait < cell
    time, ceiling, infinite = jnp.where(hit, wait, cell), value + slope * wait, jnp.full_like(cell, jnp.inf)
    # What is not finite goes to the records, where it is a fault.
    hit = hit | ~jnp.isfinite(value + slope)
    site = jnp.zeros(cell.shape, int)
    return Found(time, hit, ~hit & (cell < remaining), site, ceiling, u[1] * ceiling, -infinite, infinite)


def chosen(which: Bool[Array, " C"], one: Found, other: Found) -> Found:
    """``one`` on the chains where ``which`` is true, else ``other``."""
    return Found(*(jnp.where(which, x, y) for x, y in zip(one, other, strict=True)))


# Polynomials of time ---------------------------------------------------------------------------------------------------


# Points at which the envelope is tried out, the lengths that are tried, the first of them, and the order. With order three
# softmax, eight schools and hierarchical logistic took 9 to 19 % more processor time to 1,000 effective samples.
INTERVAL_TRIALS, LENGTHS, FIRST, ORDER = 32, 2.0 ** np.arange(2, -14, -0.5), 6, 2
# Rough price of an interval, in gradients of the program.
INTERVAL_PRICE = 4.0
# Where the error allows no intervals longer than this, polynomials of a higher order are tried, and used if their intervals
# are longer by the ratio of the prices. Recursions and factors of matrices are of this kind: with 12 places of a Gaussian
# process intervals are 10 times as long and take 3.5 times the work, with 30 Euler steps 8 and 2 times.
SHORT, HIGH_ORDER, PRICE_OF_ORDER = 0.1, 6, 2.5
# How far from the centre the points are, in units of the reference.
SPREADS = (1.0, 2.0)


class TimePolynomial(eqx.Module):
    """Any program that Taylor models can follow (`fedpdmc.enclosures.taylor_models`).

    Attributes
    ----------
    order : int
        Degree of the polynomials.
    """

    name: ClassVar[str] = "TimePolynomial"
    domain: ClassVar[str] = "polynomials of time with a proved error (Taylor models)"
    wide: ClassVar[bool] = False
    passes: ClassVar[int] = 0

    order: int = eqx.field(static=True, default=ORDER)

    def along(
        self,
        potential: Any,
        dynamics: Dynamics,
        a: Float[Array, "d C"],
        v: Float[Array, "d C"],
        length: Float[Array, " C"],
    ) -> RateCurve:
        """The rates of all marks from there on; where there is no bound, errors are not finite."""
        h = length
        curve = potential.curves(dynamics.flow.rotating, dynamics.flips, a, v, h, self.order)
        curve = TimeInterval(self.order).full(curve, Curve((), jnp.zeros_like(h)))
        # Many numbers of a walk depend on these few, and each would repeat all operations of the program.
        parts, error = computed_first((curve.parts, curve.error), number=h)
        nodes = jnp.asarray(chebyshev_nodes(self.order + 1))[:, None]
        values = jnp.zeros((error.shape[0], 1, h.shape[0]))
        for part in parts[::-1]:
            values = part[:, None] + nodes * values
        error = error + RELATIVE_SLACK * sum(map(jnp.abs, parts)) + 0.0 * jnp.sum(values, 1)
        return RateCurve(values, error, h)

    def cost(self, potential: Potential, dynamics: Dynamics, length: Float[Array, ""]) -> float:
        """Gradients per unit of process time, if the posterior is like the reference: the rates once for each piece."""
        tried = _tried(potential, dynamics, *usual_states(dynamics, potential.dim, INTERVAL_TRIALS), self, length)
        price = INTERVAL_PRICE * (PRICE_OF_ORDER if self.order > ORDER else 1.0)
        return price / max(float(np.mean(np.asarray(tried.reach))), 1e-300)


class Tried(NamedTuple):
    """At each point: how far an interval reaches, and error and rate per unit of velocity and ``1 + |a|``."""

    reach: Float[Array, " n"]
    error: Float[Array, " n"]
    rate: Float[Array, " n"]


def time_polynomial(program: Program, dynamics: Dynamics) -> tuple[TimePolynomial, Float[Array, ""], float]:
    """The order and the length of pieces of least cost, and the rounding of the program's rates.

    The rounding is the error of an interval of length zero, in units of the usual rate, or of one if that is less.

    Raises
    ------
    NoEnclosure
        At a primitive without a rule.
    """
    points = _trials(dynamics, program.dim)

    def tried(length: float, order: int = ORDER) -> Tried:
        return _tried(program, dynamics, *points, TimePolynomial(order), on_device(length))

    def reach(length: float, order: int = ORDER) -> float:
        return float(np.mean(np.asarray(tried(length, order).reach)))

    still = tried(0.0)
    error, rate = (np.asarray(x)[: INTERVAL_TRIALS // len(SPREADS)] for x in (still.error, still.rate))
    (length, far), order = _best_length(reach), ORDER
    if length < SHORT:
        longer, farther = _best_length(functools.partial(reach, order=HIGH_ORDER))
        if farther > PRICE_OF_ORDER * far:
            length, order = longer, HIGH_ORDER
    with warnings.catch_warnings():
        # NumPy warns if all entries are NaN.
        warnings.simplefilter("ignore", RuntimeWarning)
        rounding = np.nanmedian(error) / max(1.0, np.nan_to_num(np.nanmedian(rate)))
    return TimePolynomial(order), on_device(length), float(rounding)


def _best_length(reach: Callable[[float], float]) -> tuple[float, float]:
    """The length of `LENGTHS` with the longest reach, with that reach: by steps to better neighbours, first by two."""
    known: dict[int, float] = {}

    def reach_at(place: int) -> float:
        if place not in known:
            known[place] = reach(float(LENGTHS[place])) if 0 <= place < len(LENGTHS) else -np.inf
        return known[place]

    best = FIRST
    for stride in (2, 1):
        while reach_at(best) <= 0 and best + stride < len(LENGTHS):
            best += stride
        better = best
        while better is not None:
            best, better = (
                better,
                next((p for p in (best + stride, best - stride) if reach_at(p) > reach_at(best)), None),
            )
    return float(LENGTHS[best]), reach_at(best)


def _trials(dynamics: Dynamics, dim: int) -> tuple[Float[Array, "n d"], Float[Array, "n d"]]:
    # An unusual seed: points that equal simulated data may lie on kinks, where the error says nothing about rounding.
    rng = np.random.default_rng(0x74726961)
    spread = np.repeat(SPREADS, -(-INTERVAL_TRIALS // len(SPREADS)))[:INTERVAL_TRIALS, None]
    a, v = spread * rng.standard_normal((INTERVAL_TRIALS, dim)), rng.standard_normal((INTERVAL_TRIALS, dim))
    return on_device(a), on_device(np.sign(v) if dynamics.unit_speed else v)


@once
def _tried(program: Potential, dynamics: Dynamics, a, v, curves: TimePolynomial, length) -> Tried:
    """Reach to the end of a piece or to the first candidate, zero if it must be cut; with its error and rate."""
    size = jnp.linalg.norm(v, axis=-1) * (1 + jnp.linalg.norm(a, axis=-1))
    h = jnp.broadcast_to(length, a.shape[:1])
    curve = curves.along(program, dynamics, a.T, v.T, h)
    load = jnp.sum(curve.ceilings(CELLS), (0, 1)) * h / CELLS
    reach = jnp.where(curve.candidates_of_error <= MOST_ADDED, reach_of(load, h), 0.0)
    return Tried(reach, jnp.max(curve.error, 0) / size, jnp.max(jnp.abs(curve.values), (0, 1)) / size)


# Superposed candidates -------------------------------------------------------------------------------------------------


# Cells of a piece, candidates that are examined on a piece, and uniforms for each of them.
CELLS, CANDIDATES, DRAWN = 6, 3, 3


class Found(NamedTuple):
    """Where each chain's piece ends.

    Attributes
    ----------
    time : (C,)
        At the candidate that the piece ends with, or its length.
    hit : (C,)
        Whether the candidate was accepted or is to be decided by the records.
    cut : (C,)
        Whether the piece ends before its length at a candidate that was rejected.
    site : (C,)
        The site whose candidate it is.
    ceiling, threshold, least, most : (C,)
        The bound at the candidate, the level that the rate must exceed, and the squeeze of the rate.
    """

    time: Float[Array, " C"]
    hit: Bool[Array, " C"]
    cut: Bool[Array, " C"]
    site: Int[Array, " C"]
    ceiling: Float[Array, " C"]
    threshold: Float[Array, " C"]
    least: Float[Array, " C"]
    most: Float[Array, " C"]


class Ceilings(NamedTuple):
    """Bounds of rates, of sites or of marks, on cells of a piece or a plan, and their integral up to the end of each."""

    bounds: Float[Array, "J M C"]
    integral: Float[Array, "J C"]
    width: Float[Array, "J C"]

    @classmethod
    def of(cls, bounds: Float[Array, "J M C"], width: Float[Array, "*J C"]) -> Ceilings:
        """On cells of these widths. Cells of no width add nothing, whatever their bounds are."""
        width = jnp.broadcast_to(width, (bounds.shape[0], bounds.shape[2]))
        return cls(bounds, jnp.cumsum(jnp.where(width > 0, jnp.sum(bounds, 1) * width, 0.0), 0), width)

    def passed(self, cell: Int[Array, " C"], offset: Float[Array, " C"]) -> Float[Array, " C"]:
        """The integral up to a point of a cell."""
        cell = jnp.minimum(cell, self.bounds.shape[0] - 1)
        return self._before(cell) + offset * jnp.sum(of_cell(self.bounds, cell), 0)

    def _before(self, cell):
        return jnp.where(cell > 0, of_cell(self.integral, jnp.maximum(cell - 1, 0)), 0.0)

    def point(self, level: Float[Array, " C"], chance: Float[Array, " C"]) -> HazardPoint:
        """Where the integral is ``level``, and which of the bounds it belongs to."""
        cells, marks = self.bounds.shape[:2]
        passed = jnp.sum(self.integral <= level, 0)
        cell = jnp.minimum(passed, cells - 1)
        here, before = of_cell(self.bounds, cell), self._before(cell)
        total = jnp.sum(here, 0)
        offset = jnp.minimum((level - before) / jnp.where(total > 0, total, 1.0), of_cell(self.width, cell))
        if marks == 1:
            return HazardPoint(cell, offset, jnp.zeros(level.shape, int), here[0], passed >= cells)
        mark = jnp.minimum(jnp.sum(jnp.cumsum(here, 0) <= chance * total, 0), marks - 1)
        return HazardPoint(cell, offset, mark, jnp.take_along_axis(here, mark[None], 0)[0], passed >= cells)


def of_cell(table: Float[Array, "J *M C"], cell: Int[Array, " C"]) -> Float[Array, "*M C"]:
    """Each chain's entry of a table; of few cells without a lookup, which the compiler does not vectorise."""
    if table.shape[0] > CELLS:
        return jnp.take_along_axis(table, cell.reshape(1, *(1,) * (table.ndim - 2), -1), 0)[0]
    found = table[0]
    for j in range(1, table.shape[0]):
        found = jnp.where(cell == j, table[j], found)
    return found


class HazardPoint(NamedTuple):
    """A point below `Ceilings`: its cell, its place in it, whose bound it is below and that bound, or that the cells end."""

    cell: Int[Array, " C"]
    offset: Float[Array, " C"]
    mark: Int[Array, " C"]
    ceiling: Float[Array, " C"]
    over: Bool[Array, " C"]


def first_candidate(curve: RateCurve, u: Float[Array, "n C"]) -> Found:
    """The first candidate that the curves do not reject, of the first few; ``u``: ``CANDIDATES * DRAWN`` uniforms."""
    length, width = curve.length, curve.length / CELLS
    ceilings = Ceilings.of(curve.ceilings(CELLS), width)
    none = jnp.zeros(length.shape, bool)
    zero = jnp.zeros_like(length)
    found = Found(length, none, none, jnp.zeros(length.shape, int), zero, zero, zero, zero)
    active, level = ~none, zero
    for k in range(CANDIDATES):
        chance = u[k * DRAWN : (k + 1) * DRAWN]
        level = level + exponentials(chance[0])
        cell, offset, site, ceiling, over = ceilings.point(level, chance[1])
        time = cell * width + offset
        values, error = curve.of(site)
        rate, threshold = interpolant(values, time / (CELLS * width)), chance[2] * ceiling
        undecided = active & ~over & ~(threshold >= rate + error)
        here = Found(time, ~none, none, site, ceiling, threshold, rate - error, rate + error)
        found = Found(*(jnp.where(undecided, new, old) for new, old in zip(here, found, strict=True)))
        active = active & ~over & ~undecided
    return found._replace(time=jnp.where(active, time, found.time), cut=active)


def at_candidate(
    state: CurveWalk, path: Path, found: Found, remaining: Float[Array, " C"], sure: bool = False
) -> CurveWalk:
    """The walk at the end of a piece; where ``sure``, a candidate that the curve accepts needs no exact rate."""
    walk = state.walk
    ends = ~found.hit & ~found.cut & (found.time >= remaining)
    segment, offset, over = advance(path, walk.segment, walk.offset, found.time, ends)
    moved, hit = walk.moved(path, segment, offset, over, found.site), found.hit & ~over
    if sure:
        accepted = hit & (found.threshold < found.least)
        moved, hit = moved.decided(path, accepted, moved.fault, passes=0), hit & ~accepted
    return dataclasses.replace(
        state, walk=moved, waiting=hit, ceiling=found.ceiling, threshold=found.threshold, least=found.least,
        most=found.most,
    )  # fmt: skip


# Bounds that are guessed ----------------------------------------------------------------------------------------------


# Pieces of a cell, and the part of its range on a piece by which the guess is raised.
PIECES = 4
MARGIN = 0.1
# The longest cell on a line (in whitened units of length at speed one) and on a rotation (radians).
LONGEST_LINE, LONGEST_TURN = 1.0, 0.5


class AdaptiveWalk(eqx.Module):
    """A walk, and how often a rate was seen above its bound, over all plans."""

    walk: Walk
    violations: Int[Array, " C"]


class AdaptiveClock(Clock[AdaptiveWalk]):
    """Any potential with a gradient; not certified.

    The length of a cell follows the slope of the rates where it starts. Rates and slopes are evaluated on a grid of the
    cell. On each piece the bound is the larger end, or where the tangents of both ends meet if the rate rises at the left
    and falls at the right, and a margin: valid for rates that are monotone, convex or concave on a piece, otherwise a guess.
    Where a rate at a candidate exceeds its bound the candidate is accepted and counted; the law of the time is then wrong.
    """

    potential: Potential
    dynamics: Dynamics

    @property
    def domain(self) -> str:
        return "bounds guessed on a grid: nothing is proved"

    def idle(self, chains):
        return AdaptiveWalk(Walk.idle(self.dynamics, chains, self.dim), jnp.zeros(chains, int))

    def restart(self, state, new, path):
        return AdaptiveWalk(state.walk.restart(new, path), state.violations)

    def violations(self, state):
        return state.violations

    def step(self, state, path, keys):
        walk = state.walk
        a, v = path.state(self.dynamics, walk.segment, walk.offset)
        remaining = path.at(path.duration, walk.segment) - walk.offset
        tops, cell = self._guess(a, v, remaining)
        u = uniforms(keys, path.number, walk.draws, 3)
        piece, offset, mark, ceiling, over = Ceilings.of(jnp.swapaxes(tops, 1, 2), cell / PIECES).point(
            exponentials(u[0]), u[1]
        )
        wait, hit = piece * (cell / PIECES) + offset, ~over
        there, velocity = self.dynamics.flow.move(a, v, jnp.where(hit, wait, 0.0))
        gradient = self.potential.gradients(there)
        rate = jnp.take_along_axis(signed_rates(self.dynamics, gradient, velocity), mark[:, None], -1)[:, 0]
        broken = ~jnp.isfinite(jnp.sum(tops, (0, 2))) | ~jnp.isfinite(rate)
        accepted = hit & (u[2] * ceiling < rate) & ~broken
        normal = None if self.dynamics.flips else unit(gradient)
        step, ends = jnp.where(hit, wait, cell), ~hit & (cell >= remaining)
        moved = walk.drawn(path, step, ends, accepted, mark, broken, normal, PIECES + 2)
        new = AdaptiveWalk(moved, state.violations + (hit & (rate > ceiling)))
        return keep_done(walk.done, state, new)

    def _guess(
        self, a: Float[Array, "C d"], v: Float[Array, "C d"], remaining: Float[Array, " C"]
    ) -> tuple[Float[Array, "pieces C k"], Float[Array, " C"]]:
        """A bound for each piece of a cell, and the cell's length."""

        def rates(s):
            there, velocity = self.dynamics.flow.move(a, v, s)
            return signed_rates(self.dynamics, self.potential.gradients(there), velocity)

        def rates_at(s):
            return jax.jvp(rates, (s,), (jnp.ones_like(s),))

        first = rates_at(jnp.zeros_like(remaining))
        longest = LONGEST_TURN if self.dynamics.flow.rotating else LONGEST_LINE
        steepest = jnp.sum(jnp.abs(first[1]), -1)
        cell = jnp.minimum(remaining, jnp.minimum(longest, 1 / jnp.sqrt(jnp.maximum(steepest, 1e-300))))
        times = cell * (jnp.arange(1, PIECES + 1) / PIECES)[:, None]
        rest = jax.vmap(rates_at)(times)
        value, slope = (jnp.concatenate([one[None], more]) for one, more in zip(first, rest, strict=True))
        return piece_tops(value, slope, (cell / PIECES)[:, None]), cell


def piece_tops(
    value: Float[Array, "nodes C k"], slope: Float[Array, "nodes C k"], width: Float[Array, "C 1"]
) -> Float[Array, "pieces C k"]:
    """A guess of the largest positive part on each piece between nodes, from values and slopes at its ends."""
    left, right, rise, fall = value[:-1], value[1:], slope[:-1], slope[1:]
    hump = (rise > 0) & (fall < 0)
    meet = jnp.clip((right - left - fall * width) / jnp.where(hump, rise - fall, 1.0), 0.0, width)
    top = jnp.maximum(jnp.maximum(left, right), jnp.where(hump, left + rise * meet, -jnp.inf))
    return jnp.maximum(top + MARGIN * (top - jnp.minimum(left, right)), 0.0)
