"""A run made of single rounds: plan, exchange, settle. For federations whose sites are asked one message at a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from fedpdmc.compilation import compiled
from fedpdmc.coordinator import Coordinator, Itinerary, PublicKeys, State
from fedpdmc.errors import InputError, NotFinite
from fedpdmc.federation.base import Federation
from fedpdmc.precision import double_precision
from fedpdmc.run import Tick
from fedpdmc.skeleton import Block, Chunk, side_by_side

# How far each chain may be planned from its present state, given the end of the block.
Reach = Callable[[State, float], Float[Array, " C"]]


class _Unfinished(NamedTuple):
    """A block under way: where it ends, its knots so far, and how far the chains have come."""

    until: float
    chunks: list[Chunk]
    state: State
    rounds: int


class _Line:
    """Shared by all copies of a run: the state from which the sites may be asked next, and the block under way."""

    def __init__(self, tip: State):
        self.tip = tip
        self.unfinished: _Unfinished | None = None


class Rounds:
    """The state of a federation's chains, moved on in whole blocks, one exchange after the other.

    It has the interface of `fedpdmc.run.Run` and makes the same bits. Two things differ, because a site keeps what it has
    answered: a round that was sent is never planned anew, so a block that was interrupted is finished as it was meant
    before anything else, and of several copies only the one that went on last can go on.

    Parameters
    ----------
    federation : Federation
    coordinator : Coordinator
    state : State
        Where the chains start; their process time is minus the burn-in.
    key : key
        The coordinator's randomness.
    reach : callable, optional
        ``reach(state, until)``: how far ahead each chain is planned at most, a function of what is known so far.
    """

    @double_precision
    def __init__(
        self,
        federation: Federation,
        coordinator: Coordinator,
        state: State,
        key: Key[Array, ""],
        reach: Reach | None = None,
    ):
        self.federation, self.coordinator, self.reach = federation, coordinator, reach
        self.keys = PublicKeys.of(key, state.a.shape[0])
        self.restore(state, 0)

    @double_precision
    def restore(self, state: State, rounds: int) -> None:
        """Stand where a run stood between two blocks, after so many rounds."""
        # Strong types, as the compiled steps return them: they are then compiled once.
        self.state: State = jax.tree.map(lambda x: jax.lax.convert_element_type(x, x.dtype), state)
        self.rounds = rounds
        self._line = _Line(self.state)

    @property
    def time(self) -> float:
        """Process time that all chains have reached."""
        return float(np.min(np.asarray(self.state.t)))

    @property
    def plans(self) -> np.ndarray:
        """Number of the next plan of each chain."""
        return np.asarray(self.state.number)

    @property
    def events(self) -> np.ndarray:
        """Jumps of each chain so far."""
        return np.asarray(self.state.events)

    @property
    def passes(self) -> np.ndarray:
        """Passes over each site's records so far, zero for sites that do not tell."""
        return self.federation.evaluations

    @double_precision
    def advance(self, until: float, keep: Callable[[Block], None], tick: Callable[[Tick], None]) -> None:
        """Run every chain to process time ``until``: one block, all of it or nothing.

        ``keep`` receives the block once it is complete. After an interrupt or an error the run is where it was before the
        block, and the next call finishes that block, to the end that it was given then, before it goes on to ``until``.
        """
        line = self._line
        if self.state is not line.tip:
            raise InputError(
                "extend",
                "a posterior whose run has gone on since",
                "The sites have answered later plans: extend the last posterior of this run.",
            )
        if line.unfinished is None and self.time < until:
            line.unfinished = _Unfinished(float(until), [], self.state, 0)
        while line.unfinished is not None:
            block = self._finish(line, tick)
            keep(block)
            self.state, self.rounds = line.unfinished.state, self.rounds + line.unfinished.rounds
            line.tip, line.unfinished = self.state, None
            if self.time < until:
                line.unfinished = _Unfinished(float(until), [], self.state, 0)

    def _finish(self, line: _Line, tick: Callable[[Tick], None]) -> Block:
        began = self.time
        now = line.unfinished
        assert now is not None
        while float(np.min(np.asarray(now.state.t))) < now.until:
            clock = time.perf_counter()
            state, knots = self._round(now.state, now.until)
            # An interrupt may have left the knots of this round behind those that count.
            del now.chunks[now.rounds :]
            now.chunks.append(knots)
            now = line.unfinished = _Unfinished(now.until, now.chunks, state, now.rounds + 1)
            reached, events = float(np.min(np.asarray(state.t))), int(np.asarray(state.events).sum())
            rounds = self.rounds + now.rounds
            tick(Tick(began, reached, now.until, events, rounds, time.perf_counter() - clock))
        return Block((np.asarray(self.state.a), np.asarray(self.state.v)), now.chunks, began, now.until)

    def _round(self, state: State, until: float) -> tuple[State, Chunk]:
        """One exchange; chains that are finished send a plan of no length and stay where they are."""
        end = jnp.full(state.t.shape, until)
        if self.reach is not None:
            end = jnp.minimum(end, state.t + self.reach(state, until))
        itinerary = _intend(self.coordinator, state, self.keys, end)
        if not np.all(np.isfinite(np.asarray(itinerary.path.horizon))):
            raise NotFinite("coordinator", 0)
        arrivals = jax.tree.map(lambda *x: np.stack(x), *self.federation.exchange(itinerary.plan))
        state, knots = _settle(self.coordinator, state, itinerary, arrivals, end)
        numbers = side_by_side(*(np.asarray(x) for x in (knots.t, knots.a, knots.v)))
        return state, Chunk(numbers, np.asarray(knots.valid))


@compiled
def _intend(coordinator: Coordinator, state: State, keys: PublicKeys, end: Float[Array, " C"]) -> Itinerary:
    return coordinator.intend(state, keys, end)


@compiled
def _settle(coordinator: Coordinator, state: State, itinerary: Itinerary, arrivals, end: Float[Array, " C"]):
    going = state.t < end
    settled, knots, _ = coordinator.settle(state, itinerary, arrivals, end)

    def pick(new, old):
        return jnp.where(going.reshape(going.shape + (1,) * (new.ndim - 1)), new, old)

    kept = eqx.tree_at(lambda k: k.valid, knots, knots.valid & going[:, None])
    return jax.tree.map(pick, settled, state), kept
