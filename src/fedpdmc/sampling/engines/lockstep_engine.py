"""The engine for sites with dense clocks in this process: blocks made of compiled chunks of lockstep iterations."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedpdmc._jax.compilation import compiled
from fedpdmc._jax.precision import double_precision
from fedpdmc.sampling.coordinator import State
from fedpdmc.sampling.engines import lockstep
from fedpdmc.sampling.engines.chunked import CompiledEngine
from fedpdmc.sampling.engines.compiled_loop import raise_faults

_run_chunk = compiled(lockstep.run_chunk)


_begin_block = compiled(lockstep.begin_block)


@compiled
def _at_rest(*args):
    # Strong types, as the compiled chunk returns them: it is then compiled once.
    return jax.tree.map(lambda x: jax.lax.convert_element_type(x, x.dtype), lockstep.at_rest(*args))


class LockstepEngine(CompiledEngine):
    """Sites with dense clocks in this process (`lockstep`).

    On an accelerator the next chunk is under way while the knots of the last one are copied to the host. One that begins
    after the end of the block does nothing.
    """

    _ahead: tuple[Any, ...] | None = None

    @property
    def _runs_ahead(self) -> bool:
        return jax.default_backend() != "cpu"

    @property
    def _knots_per_row(self) -> int:
        return 1

    def _start(self, state: State) -> None:
        chains, sites = state.t.shape[0], len(self.federation.names)
        self._first_requests, self.selective = None, False
        self.progress = self._at_rest(state, jnp.zeros((sites, chains), int))

    def _start_block(self, until: float) -> None:
        self._ahead = None
        rest = self._at_rest(self.state, self.progress.passes)
        self.progress = _begin_block(self.coordinator, rest, jnp.asarray(float(until)))

    def _at_rest(self, state: State, passes) -> lockstep.Step:
        return _at_rest(self.federation.groups, self.coordinator, self.keys, state, passes)

    def _run_chunk(self, until, limit):
        self.progress, record, used = self._ahead or self._dispatched(until, limit)
        if not self._runs_ahead:
            return record, used
        self._ahead = self._dispatched(until, limit)
        return record.trimmed(int(used)), used

    def _dispatched(self, until, limit):
        return _run_chunk(
            self.federation.groups, self.coordinator, self.keys, self.progress, until, limit, self.rows
        )  # fmt: skip

    def _check_faults(self) -> None:
        raise_faults([self.federation.names[i] for i in self.federation.order], np.asarray(self.progress.fault))

    @property
    @double_precision
    def state(self) -> State:
        """Where every chain is."""
        return lockstep.state_of(self.progress)

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
