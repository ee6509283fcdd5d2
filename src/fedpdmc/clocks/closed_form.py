"""Event times that are inverted in closed form: affine rates, and exponential ones."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fedpdmc._jax.compilation import apart
from fedpdmc._jax.random_streams import exponentials, uniforms
from fedpdmc.clocks.base import Clock, Walk, keep_done, pick_mark, unit
from fedpdmc.clocks.envelopes import taylor
from fedpdmc.dynamics import Dynamics
from fedpdmc.potentials import LinearPredictor, Poisson, Potential

LOWEST_EXPONENT = -600.0


def affine_clock(
    value: Float[Array, "*batch"], slope: Float[Array, "*batch"], level: Float[Array, "*batch"]
) -> Float[Array, "*batch"]:
    """The time τ with ``∫_0^τ (value + slope s)_+ ds = level``, infinite if the integral stays below.

    With ``r = √(b_+² + 2ce)``: for a positive value ``τ = 2e/(b + r)``, which does not cancel; otherwise, for a positive
    slope, ``τ = (r − b)/c``. Both take one root and one division.
    """
    positive = value > 0
    square = jnp.where(positive, value * value, 0.0) + 2 * slope * level
    root = jnp.sqrt(jnp.maximum(square, 0.0))
    reached = jnp.where(positive, square >= 0, slope > 0)
    below = jnp.where(positive, value + root, slope)
    time = jnp.where(positive, 2 * level, root - value) / jnp.where(reached, below, 1.0)
    return jnp.where(reached, time, jnp.inf)


def exponential_clock(
    x: Float[Array, "*batch"], speed: Float[Array, "*batch"], level: Float[Array, "*batch"]
) -> Float[Array, "*batch"]:
    """The time τ with ``∫_0^τ speed e^{x + speed s} ds = level`` for a positive speed: ``log1p(level e^{−x})/speed``.

    Paper, appendix F.4, step 2. Where ``e^{−x}`` would overflow, ``log(e^x + level) − x`` does not cancel.
    """
    plain = jnp.log1p(level * jnp.exp(-jnp.maximum(x, LOWEST_EXPONENT)))
    return jnp.where(x > LOWEST_EXPONENT, plain, jnp.logaddexp(x, jnp.log(level)) - x) / speed


def earliest(times: Float[Array, "k C"]) -> tuple[Float[Array, " C"], Int[Array, " C"]]:
    """The least time and its index, for each chain."""
    return jnp.min(times, 0), jnp.argmin(times, 0)


def affine_clocks(
    value: Float[Array, "k C"], slope: Float[Array, "k C"], u: Float[Array, "k C"], number: Int[Array, " C"]
) -> Float[Array, "k C"]:
    """The time at which each affine clock rings, from uniforms."""
    return apart(lambda b, c, u: affine_clock(b, c, exponentials(u)), value, slope, u, number=number)


class ClosedForm(Clock[Walk]):
    """A clock whose state is the walk itself: nothing is kept from one draw to the next."""

    potential: eqx.AbstractVar[Potential]
    dynamics: eqx.AbstractVar[Dynamics]

    @property
    def domain(self) -> str:
        return "rates in closed form"

    def idle(self, chains):
        return Walk.idle(self.dynamics, chains, self.dim)

    def restart(self, state, new, path):
        return state.restart(new, path)

    def walk(self, state):
        return state


class AffineClock(ClosedForm):
    """Rates ``(b + c s)_+`` on every segment (quadratic potentials on lines): inverted, never thinned."""

    potential: Potential
    dynamics: Dynamics

    def step(self, state, path, keys):
        a, v = path.state(self.dynamics, state.segment, state.offset)
        u = uniforms(keys, path.number, state.draws, self.marks)
        bound = taylor(self.dynamics, self.potential.field(False, self.dynamics.flips, a, v), a, v)
        value, slope = bound.value.T, bound.slope.T
        wait, mark = earliest(affine_clocks(value, slope, u, path.number))
        broken = ~jnp.isfinite(jnp.sum(value + slope, 0))
        hit = wait < path.at(path.duration, state.segment) - state.offset
        normal = None
        if not self.dynamics.flips:
            there, _ = self.dynamics.flow.move(a, v, jnp.where(hit, wait, 0.0))
            normal = unit(self.potential.field(False, False, there, v).gradient)
        return keep_done(state.done, state, state.drawn(path, wait, ~hit, hit, mark, broken, normal))


class ExponentialClock(ClosedForm):
    """Cells of a grid: ``U = Σ e^{x_k} − y_k x_k`` with one coordinate a record, on lines with flips.

    With ``w = v_k S_k`` the speed of ``x_k``, the rate is ``(w (e^{x_k} − y_k))_+``. Going up it is at most
    ``w e^{x_k + w s}``, inverted in closed form from where it turns positive; going down at most ``|w| y_k``, a constant
    (paper, appendix F.4, with one index).
    """

    potential: LinearPredictor
    dynamics: Dynamics

    def step(self, state, path, keys):
        a, v = path.state(self.dynamics, state.segment, state.offset)
        counts, scale = self.potential.response, self.potential.design
        x, speed = a * scale + self.potential.offset, v * scale
        rising, pace = speed > 0, jnp.where(speed == 0, 1.0, jnp.abs(speed))
        u = uniforms(keys, path.number, state.draws, x.shape[-1] + 1)
        level = exponentials(u[:-1]).T
        silent = jnp.maximum(jnp.log(counts) - x, 0.0)
        up = silent / pace + exponential_clock(x + silent, pace, level)
        down = level / (pace * counts)
        wait, mark = earliest(jnp.where(speed == 0, jnp.inf, jnp.where(rising, up, down)).T)
        hit = wait < path.at(path.duration, state.segment) - state.offset
        at = pick_mark(x + speed * jnp.where(hit, wait, 0.0)[:, None], mark)
        expected, climbing = counts[mark], pick_mark(rising, mark)
        chance = jnp.where(climbing, 1 - expected * jnp.exp(-at), 1 - jnp.exp(at) / expected)
        broken = jnp.any(~jnp.isfinite(jnp.exp(x)), -1)
        new = state.drawn(path, wait, ~hit, hit & (u[-1] < chance), mark, broken)
        return keep_done(state.done, state, new)


def is_exponential(potential: Potential, dynamics: Dynamics) -> bool:
    """Whether `ExponentialClock` applies."""
    return (
        isinstance(potential, LinearPredictor)
        and potential.diagonal
        and isinstance(potential.loss, Poisson)
        and potential.control is None
        and potential.weight is None
        and dynamics.flips
        and not dynamics.flow.rotating
    )
