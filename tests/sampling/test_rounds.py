import copy

import numpy as np
import pytest
from tests.federation.rounds import KINDS, method, plain, start

from fedpdmc.errors import InputError
from fedpdmc.results.skeleton import join
from fedpdmc.sampling.engines.rounds import RoundsEngine


class Breaks:
    """A federation that is interrupted at one of its rounds."""

    needs_time = False

    def __init__(self, federation, at):
        self.federation, self.left = federation, at
        self.names, self.evaluations, self.plans = federation.names, federation.evaluations, []

    def exchange(self, plan):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        self.plans.append(np.asarray(plan.number).tolist())
        return self.federation.exchange(plan)


def broken_run(at):
    run = start(method(KINDS["zigzag"]), RoundsEngine)
    run.federation = Breaks(run.federation, at)
    return run


def test_an_interrupted_block_is_dropped_and_then_finished_as_it_was_planned():
    whole, _ = plain(method(KINDS["zigzag"]), (3.0, 8.0))
    run, blocks = broken_run(at=6), []
    with pytest.raises(KeyboardInterrupt):
        run.advance(3.0, blocks.append, lambda tick: None)
    assert blocks == [] and run.time == 0.0 and run.rounds == 0 and not run.events.any()
    # Asked for another end, it first finishes the block that the sites have answered plans of.
    run.advance(8.0, blocks.append, lambda tick: None)
    assert [(block.begin, block.end) for block in blocks] == [(0.0, 3.0), (3.0, 8.0)]
    np.testing.assert_array_equal(join(blocks).t, whole.t)
    assert run.rounds == len(run.federation.plans)
    assert len({tuple(numbers) for numbers in run.federation.plans}) == run.rounds


def test_a_run_that_has_gone_on_is_not_planned_again_from_an_older_state():
    run = start(method(KINDS["zigzag"]), RoundsEngine)
    older = copy.copy(run)
    run.advance(1.0, lambda block: None, lambda tick: None)
    with pytest.raises(InputError, match="extend the last posterior"):
        older.advance(2.0, lambda block: None, lambda tick: None)


def test_plans_reach_no_further_than_they_are_told():
    horizons = []

    class Watched(Breaks):
        def exchange(self, plan):
            horizons.append(np.asarray(plan.horizon))
            return super().exchange(plan)

    run = start(method(KINDS["zigzag"]), RoundsEngine, reach=lambda state, until: 0.25 + 0 * state.t)
    run.federation = Watched(run.federation, at=-1)
    run.advance(3.0, lambda block: None, lambda tick: None)
    assert run.time == 3.0 and np.max(horizons) <= 0.25 + 1e-12
    assert run.rounds >= 12
