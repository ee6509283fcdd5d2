"""A clock finds the first event of a potential along a path, in steps over all chains at once.

A clock's ``step`` does a bounded amount of work for every chain, so that one caller can walk many sites and chains
together. The randomness of a step is keyed by (chain, plan number, draws so far): it does not depend on the caller or on
the order of calls.
"""

import abc
from typing import Generic, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from equinox import AbstractVar
from jaxtyping import Array, Bool, Float, Int, Shaped

from fedpdmc._jax.random_streams import ChainKeys
from fedpdmc.clocks.path import Path, Walk, reached
from fedpdmc.dynamics import Dynamics
from fedpdmc.potentials import Potential

W = TypeVar("W")


class Clock(eqx.Module, Generic[W]):
    """Finds the first arrival of one potential along plans."""

    potential: AbstractVar[Potential]
    dynamics: AbstractVar[Dynamics]

    @property
    def dim(self) -> int:
        """Number of whitened coordinates that the potential sees."""
        return self.potential.dim

    @property
    def name(self) -> str:
        """What reports call it: its envelope, if it has one."""
        envelope = getattr(self, "envelope", None)
        return type(self if envelope is None else envelope).__name__

    @property
    def domain(self) -> str:
        """How event times are drawn, in words."""
        envelope = getattr(self, "envelope", None)
        return "bounds on cells of the path" if envelope is None else envelope.domain

    @property
    def marks(self) -> int:
        """Kinds of events: one for each coordinate's flip, or one reflection."""
        return self.dim if self.dynamics.flips else 1

    @abc.abstractmethod
    def idle(self, chains: int) -> W:
        """The state of a walk that waits for its first plan."""

    @abc.abstractmethod
    def restart(self, state: W, new: Bool[Array, " C"], path: Path) -> W:
        """Start on the chains that have a new plan."""

    @abc.abstractmethod
    def step(self, state: W, path: Path, keys: ChainKeys) -> W:
        """Walk on, on every chain that is not done."""

    def walk(self, state: W) -> Walk:
        """The walk within the state."""
        return state.walk  # type: ignore[attr-defined]

    def reached(self, state: W, path: Path) -> Float[Array, " C"]:
        """The time of a plan before which there is no event: that of the event, once it is known; infinite if none is."""
        return reached(path, self.walk(state))

    def violations(self, state: W) -> Int[Array, "*sites C"]:
        """How often a rate was above a bound that is not certified. A rate above a certified bound is a fault."""
        return jnp.zeros_like(self.walk(state).fault)


def unit(g: Float[Array, "C d"]) -> Float[Array, "C d"]:
    """``g/|g|``, zero for zero."""
    length = jnp.linalg.norm(g, axis=-1, keepdims=True)
    return g / jnp.where(length > 0, length, 1.0)


def keep_done(done: Bool[Array, " C"], old, new):
    """The old state on the chains that are done, the new one elsewhere."""

    def pick(before, after):
        if before is after:
            return before
        return jnp.where(done.reshape(done.shape + (1,) * (before.ndim - 1)), before, after)

    return jax.tree.map(pick, old, new)


def pick_mark(rates: Shaped[Array, "C k"], mark: Int[Array, " C"]) -> Shaped[Array, " C"]:
    """Each chain's entry for its mark."""
    return jnp.take_along_axis(rates, mark[:, None], -1)[:, 0]
