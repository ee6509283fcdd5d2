"""The engine for sites with dense clocks in this process: blocks made of compiled chunks of lockstep iterations."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedpdmc._jax.by_numpy import once
from fedpdmc._jax.compilation import compiled
from fedpdmc._jax.garbage_collection import Uncollected
from fedpdmc._jax.precision import double_precision
from fedpdmc.results.skeleton import Chunk
from fedpdmc.sampling.coordinator import State
from fedpdmc.sampling.engines import lockstep
from fedpdmc.sampling.engines.accelerator_memory import knots_in_memory
from fedpdmc.sampling.engines.chunked import CompiledEngine
from fedpdmc.sampling.engines.event_buffer import Record
from fedpdmc.sampling.engines.faults import raise_faults

_begin_block = compiled(lockstep.begin_block)


@once
def _at_rest(*args):
    # Strong types, as the compiled chunk returns them: it is then compiled once.
    return jax.tree.map(lambda x: jax.lax.convert_element_type(x, x.dtype), lockstep.at_rest(*args))


class Reached(NamedTuple):
    """What the host must know after a chunk: iterations, the least time, events, most plans of a chain, any fault.

    The chunk's own program makes these numbers. One that came after it would wait on an accelerator for the chunk that is
    already under way behind it.
    """

    used: Any
    time: Any
    events: Any
    plans: Any
    faulty: Any


@functools.partial(compiled, graphs=True)
def _run_chunk(groups, coordinator, keys, step: lockstep.Step, first, until, limit, rows: int):
    step, record, used = lockstep.run_chunk(groups, coordinator, keys, step, until, limit, rows)
    events, plans = jnp.sum(step.site_events), jnp.max(step.number + 1 - first)
    return step, record, Reached(used, jnp.min(step.t), events, plans, jnp.any(step.fault))


class LockstepEngine(CompiledEngine):
    """Sites with dense clocks in this process (`lockstep`).

    On an accelerator the next chunk is under way while the host processes the last one; one that begins after the end of the
    block does nothing. Knots stay on the accelerator until they are read, as long as there is room: copying them takes many
    times longer than making them.
    """

    _ahead: tuple[lockstep.Step, Record, Reached] | None = None

    @property
    def _runs_ahead(self) -> bool:
        return jax.default_backend() != "cpu"

    @property
    def _knots_per_row(self) -> int:
        return 1

    def _start(self, state: State) -> None:
        chains, sites = state.t.shape[0], len(self.federation.names)
        self._first_requests, self.selective = None, False
        passes = jnp.zeros((sites, chains), int)
        self.progress = _at_rest(self.federation.groups, self.coordinator, self.keys, state, passes)

    def _start_block(self, until: float) -> None:
        self._ahead = None
        self.progress = _begin_block(self.coordinator, self.keys, self.progress, jnp.asarray(float(until)))
        self._first = self.progress.number

    @Uncollected()
    def _run_chunk(self, until, limit):
        self.progress, record, reached = self._ahead or self._dispatched(until, limit)
        if self._runs_ahead:
            self._ahead = self._dispatched(until, limit)
        self._last = Reached(*jax.device_get(tuple(reached)))
        return record, self._last.used

    def _knots(self, record: Record, used: int) -> Chunk:
        if not self._runs_ahead:
            return record.chunk(used)
        return knots_in_memory(record.on_device(used))

    def _dispatched(self, until, limit):
        return _run_chunk(
            self.federation.groups, self.coordinator, self.keys, self.progress, self._first, until, limit, self.rows
        )  # fmt: skip

    def _reached(self, first: np.ndarray) -> tuple[float, int, int]:
        return float(self._last.time), int(self._last.events), int(self._last.plans)

    def _check_faults(self) -> None:
        if not self._last.faulty:
            return
        raise_faults([self.federation.names[i] for i in self.federation.order], np.asarray(self.progress.fault))

    @property
    @double_precision
    def state(self) -> State:
        """Where every chain is."""
        return lockstep.state_of(self.progress)

    # On an accelerator every array operation outside of a compiled program takes longer than many iterations.
    @property
    def time(self) -> float:
        """Process time that all chains have reached."""
        return float(np.min(np.asarray(self.progress.t)))

    @property
    def plans(self) -> np.ndarray:
        """Number of the next plan of each chain."""
        return np.asarray(self.progress.number) + 1

    @property
    def passes(self) -> np.ndarray:
        """Passes over each site's records so far."""
        counts = np.zeros(len(self.federation.names), np.int64)
        counts[self.federation.order] = np.asarray(self.progress.passes).sum(1)
        return self._before[0] + counts

    @property
    def violations(self) -> np.ndarray:
        """None: every bound is proved."""
        return self._before[1]
