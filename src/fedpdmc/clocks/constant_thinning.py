"""Thinning of few records on rotations under a constant bound on each piece of the path."""

from __future__ import annotations

from typing import TypeGuard

import equinox as eqx
import jax.numpy as jnp

from fedpdmc._jax.random_streams import exponentials, uniforms
from fedpdmc.clocks.base import keep_done, unit
from fedpdmc.clocks.closed_form import ClosedForm
from fedpdmc.clocks.path import FINE, NOT_FINITE, advance, judged, pick
from fedpdmc.dynamics import Dynamics
from fedpdmc.potentials import BentSpreadPrior, LinearPredictor, Logistic, Poisson, Potential

# Up to this many records it is best: priors of spreads have one or two.
FEW_RECORDS = 3
# Relative room for the rounding of a bound.
ROOM = 1 + 1e-9


class ConstantClock(ClosedForm):
    """``U(a) = Σ_j G_j(l_j·a)`` of few records, on rotations with reflections.

    On a segment ``l_j·a(t) = p_j cos t + q_j sin t``, whose slope is at most ``A_j = √(p_j² + q_j²)``. So on a piece of
    length h from where it is x_j, it stays within ``w_j = h A_j`` of it, and

    ``v·∇U = Σ_j G_j'(l_j·a) (l_j·v) ≤ Σ_j A_j sup {|G_j'(x)| : |x − x_j| ≤ w_j}``,

    a constant. A candidate is accepted with probability rate over constant. Nothing is kept between candidates: where other
    clocks need fewer of them, this one is less to compile.
    """

    potential: LinearPredictor | BentSpreadPrior
    dynamics: Dynamics

    @property
    def domain(self) -> str:
        """How event times are drawn."""
        return "constant bounds on pieces of the path"

    def step(self, state, path, keys):
        """One candidate, or the end of a piece."""
        start, velocity = pick(path.start, state.segment), pick(path.velocity, state.segment)
        p, q = self.potential.forms(start), self.potential.forms(velocity)
        amplitude, remaining = jnp.sqrt(p * p + q * q), path.at(path.duration, state.segment) - state.offset

        def at(time):
            c, s = jnp.cos(time)[:, None], jnp.sin(time)[:, None]
            return p * c + q * s, q * c - p * s

        here, _ = at(state.offset)
        piece = jnp.min(self.potential.widths(here) / jnp.maximum(amplitude, 1e-300), -1)
        piece = jnp.minimum(piece, remaining)
        tops = self.potential.largest_slopes(here, piece[:, None] * amplitude)
        ceiling = ROOM * jnp.sum(amplitude * tops, -1)
        u = uniforms(keys, path.number, state.draws, 2)
        wait = exponentials(u[0]) / jnp.maximum(ceiling, 1e-300)
        hit = wait < piece
        step = jnp.where(hit, wait, piece)
        there, speed = at(state.offset + step)
        slopes = self.potential.slopes(there)
        rate = jnp.sum(slopes * speed, -1)
        segment, offset, over = advance(path, state.segment, state.offset, step, ~hit & (piece >= remaining))
        candidate = hit & ~over
        accepted, fault = judged(u[1] * ceiling, rate, ceiling, jnp.isfinite(rate), candidate=candidate)
        fault = jnp.where(jnp.isfinite(ceiling), fault, NOT_FINITE)
        moved = state.moved(path, segment, offset, over, state.mark, fault)
        time = jnp.where(accepted, path.at(path.begin, state.segment) + offset, path.horizon)
        normal = jnp.where(accepted[:, None], unit(self.potential.gathered(slopes)), state.normal)
        done = over | accepted | (fault != FINE)
        new = eqx.tree_at(
            lambda w: (w.done, w.rang, w.time, w.normal, w.passes), moved,
            (done, accepted, time, normal, state.passes + 1),
        )  # fmt: skip
        return keep_done(state.done, state, new)


def suits(potential: Potential, records: int, dynamics: Dynamics) -> TypeGuard[LinearPredictor | BentSpreadPrior]:
    """Whether `ConstantClock` applies, and is best."""
    if records > FEW_RECORDS or dynamics.flips or not dynamics.flow.rotating:
        return False
    if not isinstance(potential, LinearPredictor):
        return isinstance(potential, BentSpreadPrior)
    # Bounds of the Student-t loss are loose where its scale is small.
    return isinstance(potential.loss, (Logistic, Poisson)) and not potential.diagonal
