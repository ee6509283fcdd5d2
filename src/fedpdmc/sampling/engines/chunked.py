"""The engine for sites in this process: blocks made of short compiled chunks of many rounds."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from fedpdmc._jax.by_numpy import once
from fedpdmc._jax.compilation import compiled
from fedpdmc._jax.garbage_collection import Uncollected
from fedpdmc._jax.precision import double_precision
from fedpdmc.console.progress import Tick
from fedpdmc.errors import RunTooLong
from fedpdmc.results.skeleton import Block, Chunk
from fedpdmc.sampling.coordinator import Coordinator, PublicKeys, State
from fedpdmc.sampling.engines.base import BlockMemory, Engine
from fedpdmc.sampling.engines.compiled_loop import LocalFederation, Progress, begin, run_chunk
from fedpdmc.sampling.engines.event_buffer import Record
from fedpdmc.sampling.run_state_arrays import Position

CHUNK_SECONDS = 0.25
# Largest size of the knots of a chunk, on a processor and on an accelerator.
KNOT_BYTES, WIDE_KNOT_BYTES = 2**24, 2**28
MOST_ITERATIONS = 1e9

_run_chunk = compiled(run_chunk)
# Programs with private latents are large, and sample as fast if they are compiled quickly.
_run_chunk_of_latents = compiled(run_chunk, quickly=True)


@once
def _begin(groups, coordinator: Coordinator, state: State) -> Progress:
    # Strong types, as the compiled chunk returns them: it is then compiled once.
    return jax.tree.map(lambda x: jax.lax.convert_element_type(x, x.dtype), begin(groups, coordinator, state))


class CompiledEngine(Engine):
    """Sites in this process: many rounds are one compiled call.

    Parameters
    ----------
    federation : LocalFederation
    coordinator : Coordinator
    state : State
        Where the chains start; their process time is minus the burn-in.
    key : key
        The coordinator's randomness.
    """

    federation: LocalFederation
    sites_remember = False
    memory = BlockMemory(most=2**26)

    @double_precision
    def __init__(self, federation: LocalFederation, coordinator: Coordinator, state: State, key: Key[Array, ""]):
        self.federation, self.coordinator = federation, coordinator
        chains, dim = state.a.shape
        self.keys = PublicKeys.of(key, chains)
        self._start(state)
        velocities = -(-dim // 8) if coordinator.dynamics.unit_speed else 8 * dim
        row_bytes = chains * self._knots_per_row * (9 + 8 * dim + velocities)
        room = KNOT_BYTES if jax.default_backend() == "cpu" else WIDE_KNOT_BYTES
        self.rows = int(np.clip(room // row_bytes, 4, 2**15))
        # The first chunk is one iteration, so that progress is shown as soon as the chains move.
        self.limit, self._compiled = 1, False
        # Serial exchanges: in a round every chain that has not reached the end of the block sends one plan.
        self.rounds = 0
        # Of each site: exchanges that it took part in, and plans of single chains that it was sent.
        self.asked = np.zeros((2, len(federation.names)), np.int64)
        # Of each site its private latents at the ends of blocks, with the process time and the chains' positions.
        self.latents: tuple[tuple[float, np.ndarray, dict[str, np.ndarray]], ...] = ()
        # Passes and violations of each site before this process continued the run.
        self._before = np.zeros((2, len(federation.names)), np.int64)

    @property
    def _knots_per_row(self) -> int:
        """Knots of a chain that an iteration may add."""
        return self.coordinator.segments

    def _start(self, state: State) -> None:
        """Start from a state."""
        self.progress: Any = _begin(self.federation.groups, self.coordinator, state)
        self._first_requests = self.progress.requests
        self.selective = self._first_requests is not None

    def _start_block(self, until: float) -> None:
        """No state of the sites is kept from one block to the next, so that a run can be continued between two blocks."""
        self.progress = dataclasses.replace(self.progress, requests=self._first_requests)

    @Uncollected()
    def _run_chunk(self, until: Float[Array, ""], limit: Int[Array, ""]) -> tuple[Record, Int[Array, ""]]:
        """Some iterations."""
        run = _run_chunk_of_latents if self.federation.has_latents else _run_chunk
        self.progress, record, used = run(
            self.federation.groups, self.coordinator, self.keys, self.progress, until, limit, self.rows
        )
        return record, used

    def _knots(self, record: Record, used: int) -> Chunk:
        """What is kept of a record."""
        return record.chunk(used)

    def _reached(self, first: np.ndarray) -> tuple[float, int, int]:
        """Process time of the slowest chain, all events, and the most plans of a chain since its ``first``."""
        return self.time, int(self.events.sum()), int((self.plans - first).max())

    def _check_faults(self) -> None:
        """Raise the first fault of any site."""
        self.federation.faults(self.progress)

    @double_precision
    def restore(self, position: Position) -> None:
        """Continue from where a run was between two blocks."""
        self._start(position.chains)
        self.rounds, self.asked = position.rounds, position.asked
        self._before = np.stack([position.passes, position.violations])

    @property
    def settled(self) -> dict[str, np.ndarray]:
        """Where the latents of the sites are, in their private coordinates."""
        return self.federation.settled(self.progress) if self.federation.has_latents else {}

    @double_precision
    def set_latents(self, settled: dict[str, np.ndarray]) -> None:
        """Put latents to where they were at the end of a run that was saved."""
        super().set_latents(settled)
        if settled:
            self.progress = self.federation.with_latents(self.progress, settled)

    @property
    def state(self) -> State:
        """Where every chain is."""
        return self.progress.state

    @property
    def passes(self) -> np.ndarray:
        """Passes over each site's records so far."""
        return self._before[0] + self.federation.passes(self.progress)

    @property
    def violations(self) -> np.ndarray:
        """How often each site saw a rate above a bound that is not certified."""
        return self._before[1] + self.federation.violations(self.progress)

    @double_precision
    def advance(self, until: float, keep: Callable[[Block], None], tick: Callable[[Tick], None]) -> None:
        """One block, all of it or nothing."""
        before, began, state, plans = self.progress, self.time, self.state, self.plans
        start = np.asarray(state.a), np.asarray(state.v)
        try:
            self._start_block(until)
            chunks, questions = self._chunks(until, began, tick)
            keep(Block(start, chunks, began, until))
        except BaseException:
            self.progress = before
            raise
        if until > 0 and self.federation.has_latents:
            found = self.federation.latents(self.progress)
            self.latents += ((float(until), np.asarray(self.progress.state.a), found),)
        rounds, asked = self._count(questions, self.plans - plans)
        self.rounds, self.asked = self.rounds + rounds, self.asked + asked

    def _count(self, questions: list[list[np.ndarray]], plans: np.ndarray) -> tuple[int, np.ndarray]:
        """Exchanges of a block, and by site its exchanges and plans.

        Chains that ask in the same of their plans share an exchange; a plan about which no site is asked needs none.
        """
        rounds, sites = int(plans.max(initial=0)), len(self.federation.names)
        if not self.selective:
            return rounds, np.full((sites, 2), (rounds, plans.sum())).T
        counts, everyone = np.zeros((2, sites), np.int64), np.zeros(0, np.int64)
        for site, *about in zip(self.federation.order, *questions, strict=True):
            asked = np.concatenate(about)
            counts[:, site] = len(np.unique(asked)), len(asked)
            everyone = np.union1d(everyone, asked)
        return len(everyone), counts

    def _chunks(self, until: float, began: float, tick) -> tuple[list[Chunk], list[list[np.ndarray]]]:
        chunks, questions, iterations, target, first = [], [], 0, jnp.asarray(float(until)), self.plans
        now = began
        while now < until:
            clock = time.perf_counter()
            record, used = self._run_chunk(target, jnp.asarray(self.limit))
            used = int(used)
            chunks.append(self._knots(record, used))
            if (asked := record.questions(used, first)) is not None:
                questions.append(asked)
            seconds = time.perf_counter() - clock
            self._check_faults()
            iterations += used
            self._pace(seconds, used)
            now, events, plans = self._reached(first)
            tick(Tick(began, now, until, events, self.rounds + plans, seconds))
            if iterations * (until - began) > MOST_ITERATIONS * max(now - began, 1e-300) and iterations > 4096:
                raise RunTooLong(
                    f"After {iterations} steps the slowest chain has come from process time {began:.3g} to "
                    f"{now:.3g} of {until:.3g}: the run would take over {MOST_ITERATIONS:.0e} steps. "
                    "Rescale the covariates, use reference='laplace', or ask for a shorter duration."
                )
        return chunks, questions

    def _pace(self, seconds: float, used: int) -> None:
        """Choose the next chunk's length so that it takes about a quarter of a second; the first may have been compiled."""
        if used == self.limit and self._compiled:
            self.limit = int(np.clip(self.limit * np.clip(CHUNK_SECONDS / max(seconds, 1e-9), 0.25, 4), 1, self.rows))
        self._compiled = True
