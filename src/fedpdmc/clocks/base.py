"""When it jumps: three ways to find the first event of a potential along a path, in steps over all chains at once.

A clock's ``step`` does a bounded amount of work for every chain, so that one caller can walk many sites and chains side by
side. The randomness of a step is keyed by (chain, plan number, draws so far): it does not depend on who asks or when.
"""

import abc
from typing import Generic, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from equinox import AbstractVar
from jaxtyping import Array, Bool, Float, Int

from fedpdmc._jax.compilation import apart
from fedpdmc._jax.random_streams import ChainKeys, exponentials, uniforms
from fedpdmc.clocks.envelopes.second_order import affine_clock, exponential_clock, taylor
from fedpdmc.clocks.path import NOT_FINITE, Path, Walk, advance
from fedpdmc.dynamics import Dynamics
from fedpdmc.potentials import LinearPredictor, Poisson, Potential

W = TypeVar("W")


class Clock(eqx.Module, Generic[W]):
    """Finds the first arrival of one potential along plans."""

    potential: AbstractVar[Potential]
    dynamics: AbstractVar[Dynamics]

    @property
    def dim(self) -> int:
        """Number of whitened coordinates that the potential sees."""
        return self.potential.dim

    @abc.abstractmethod
    def idle(self, chains: int) -> W:
        """The state of a walk that waits for its first plan."""

    @abc.abstractmethod
    def restart(self, state: W, new: Bool[Array, " C"], path: Path) -> W:
        """Set out on the chains that have a new plan."""

    @abc.abstractmethod
    def step(self, state: W, path: Path, keys: ChainKeys) -> W:
        """Walk on, on every chain that is not done."""

    @abc.abstractmethod
    def walk(self, state: W) -> Walk:
        """The walk within the state."""

    def violations(self, state: W) -> Int[Array, "*sites C"]:
        """How often a rate was seen above a bound that is not certified; above one that is, it is a fault."""
        return jnp.zeros_like(self.walk(state).fault)


def earliest(times: Float[Array, "k C"]) -> tuple[Float[Array, " C"], Int[Array, " C"]]:
    """The least time and its index, for each chain."""
    return jnp.min(times, 0), jnp.argmin(times, 0)


def affine_clocks(
    value: Float[Array, "k C"], slope: Float[Array, "k C"], u: Float[Array, "k C"], number: Int[Array, " C"]
) -> Float[Array, "k C"]:
    """The time at which each affine clock rings, from uniforms."""
    return apart(lambda b, c, u: affine_clock(b, c, exponentials(u)), value, slope, u, number=number)


class AffineClock(Clock[Walk]):
    """Rates ``(b + c s)_+`` on every segment (quadratic potentials on lines): inverted, never thinned."""

    potential: Potential
    dynamics: Dynamics

    def idle(self, chains):
        """A walk that waits."""
        return Walk.idle(self.dynamics, chains, self.dim)

    def restart(self, state, new, path):
        """Set out."""
        return state.restart(new, path)

    def walk(self, state):
        """The state is the walk."""
        return state

    def first_flip(
        self, a: Float[Array, "d C"], v: Float[Array, "d C"], u: Float[Array, "d C"], number: Int[Array, " C"]
    ) -> tuple[Float[Array, " C"], Int[Array, " C"], Bool[Array, " C"]]:
        """Time and coordinate of the first flip on a line from ``(a, v)``, and where the rates are not finite."""
        value, slope = self.potential.flip_rates(a, v)
        wait, mark = earliest(affine_clocks(value, slope, u, number))
        return wait, mark, ~jnp.isfinite(jnp.sum(value + slope, 0))

    def step(self, state, path, keys):
        """One segment."""
        a, v = path.state(self.dynamics, state.segment, state.offset)
        if self.dynamics.flips:
            u = uniforms(keys, path.number, state.draws, self.dim)
            wait, mark, broken = self.first_flip(a.T, v.T, u, path.number)
        else:
            bound = taylor(self.dynamics, self.potential.field(False, False, a, v), a, v)
            u = uniforms(keys, path.number, state.draws, 1)
            wait, mark = earliest(affine_clocks(bound.value.T, bound.slope.T, u, path.number))
            broken = ~jnp.isfinite(bound.value + bound.slope)[:, 0]
        remaining = path.at(path.duration, state.segment) - state.offset
        hit = wait < remaining
        following, moved, over = advance(path, state.segment, state.offset, wait, ~hit)
        if self.dynamics.flips:
            normal = state.normal
        else:
            there, _ = self.dynamics.flow.move(a, v, jnp.where(hit, wait, 0.0))
            normal = unit(self.potential.field(False, False, there, v).gradient)
        time = jnp.where(hit, path.at(path.begin, state.segment) + moved, path.horizon)
        new = Walk(
            following, moved, state.draws + 1, hit | over, hit, time, mark, normal, state.passes + 1,
            jnp.where(broken, NOT_FINITE, state.fault),
        )  # fmt: skip
        return keep_done(state.done, state, new)


class ExponentialClock(Clock[Walk]):
    """Cells of a grid: ``U = Σ e^{x_k} − y_k x_k`` with one coordinate a record, on lines with flips.

    With ``w = v_k S_k`` the speed of ``x_k``, the rate is ``(w (e^{x_k} − y_k))_+``. Going up it is at most
    ``w e^{x_k + w s}``, inverted in closed form from where it turns positive; going down at most ``|w| y_k``, a constant
    (paper, appendix F.4, with one index).
    """

    potential: LinearPredictor
    dynamics: Dynamics

    def idle(self, chains):
        """A walk that waits."""
        return Walk.idle(self.dynamics, chains, self.dim)

    def restart(self, state, new, path):
        """Set out."""
        return state.restart(new, path)

    def walk(self, state):
        """The state is the walk."""
        return state

    def step(self, state, path, keys):
        """One candidate."""
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
        remaining = path.at(path.duration, state.segment) - state.offset
        hit = wait < remaining
        following, moved, over = advance(path, state.segment, state.offset, wait, ~hit)
        at = jnp.take_along_axis(x + speed * jnp.where(hit, wait, 0.0)[:, None], mark[:, None], -1)[:, 0]
        expected, climbing = counts[mark], jnp.take_along_axis(rising, mark[:, None], -1)[:, 0]
        chance = jnp.where(climbing, 1 - expected * jnp.exp(-at), 1 - jnp.exp(at) / expected)
        accepted = hit & (u[-1] < chance)
        broken = jnp.any(~jnp.isfinite(jnp.exp(x)), -1)
        time = jnp.where(accepted, path.at(path.begin, state.segment) + moved, path.horizon)
        new = Walk(
            following, moved, state.draws + 1, accepted | over, accepted, time, mark, state.normal, state.passes + 1,
            jnp.where(broken, NOT_FINITE, state.fault),
        )  # fmt: skip
        return keep_done(state.done, state, new)


def unit(g: Float[Array, "C d"]) -> Float[Array, "C d"]:
    """``g/|g|``, zero for zero."""
    length = jnp.linalg.norm(g, axis=-1, keepdims=True)
    return g / jnp.where(length > 0, length, 1.0)


def keep_done(done: Bool[Array, " C"], old, new):
    """The old state on the chains that are done, the new one elsewhere."""

    def pick(before, after):
        return jnp.where(done.reshape(done.shape + (1,) * (before.ndim - 1)), before, after)

    return jax.tree.map(pick, old, new)


def is_exponential(potential: Potential, dynamics: Dynamics) -> bool:
    """Whether `ExponentialClock` applies."""
    return (
        isinstance(potential, LinearPredictor)
        and potential.diagonal
        and isinstance(potential.loss, Poisson)
        and potential.control is None
        and dynamics.flips
        and not dynamics.flow.rotating
    )


__all__ = [
    "AffineClock",
    "Clock",
    "ExponentialClock",
    "earliest",
    "is_exponential",
    "keep_done",
    "unit",
]
