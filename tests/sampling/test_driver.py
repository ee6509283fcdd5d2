"""Blocks, goals and limits of a run."""

from types import SimpleNamespace

import numpy as np
import pytest
from tests.federation.rounds import method
from tests.support import ZIGZAG, logistic_site, short_run

from fedpdmc.console.progress import showing
from fedpdmc.dynamics import QUARTER
from fedpdmc.errors import InputError, LimitReached
from fedpdmc.results.path_store import RunState
from fedpdmc.sampling.driver import Goal, Sampler, first_block, next_length, pieces
from fedpdmc.sampling.engines.base import BlockMemory

pytestmark = pytest.mark.usefixtures("double")
ROOMY = BlockMemory(most=2**26)


class Log:
    """Follows a run and notes what it is told."""

    def __init__(self):
        self.blocks, self.times = [], []

    def block(self, block):
        self.blocks.append((block.begin, block.end))

    def between_blocks(self, sampler):
        self.times.append(sampler.engine.time)

    def status(self):
        return "well"

    def facts(self):
        return {"study": "test"}

    def privacy(self):
        return None


def sampler(burn_in=0.0, **options):
    watch = Log()
    return Sampler(method(ZIGZAG, **options), burn_in, "skeleton", watch), watch


@pytest.mark.parametrize("turns", range(1, 40))
@pytest.mark.parametrize("pieces", [1, 3])
def test_rounding_adds_no_block_after_the_last(turns, pieces):
    begin, until = -2 * QUARTER, turns * QUARTER
    goal, now, count = Goal.to(until, begin, pieces, ROOMY), begin, 0
    while now < until:
        now, count = goal.next_stop(now, "skeleton"), count + 1
    assert (now, count) == (until, pieces)


def test_a_goal_is_reached_in_blocks_of_one_length_where_all_is_kept():
    goal, now, stops = Goal.to(10.0, 0.0, 4, ROOMY), 0.0, []
    while now < goal.until:
        now = goal.next_stop(now, "skeleton")
        stops.append(now)
    assert stops == [2.5, 5.0, 7.5, 10.0]


def test_blocks_follow_the_rate_of_events_where_memory_is_bounded():
    goal = Goal.to(64.0, 0.0, 1, ROOMY)
    assert goal.next_stop(0.0, "draws") == 1.0
    assert goal.after(plans=1.0, rounds=1, dim=2, memory=ROOMY).step == 4.0
    full = goal.after(plans=2**26 / 48, rounds=0, dim=2, memory=ROOMY)
    assert full.step == pytest.approx(1.0, rel=1e-6)
    assert goal.after(plans=1e12, rounds=0, dim=2, memory=ROOMY).step == 0.25
    # The end is not left over as a sliver.
    assert goal.next_stop(62.6, "draws") == 64.0
    slow = BlockMemory(most=2**23, per_round=4096, first=0.5)
    assert Goal.to(64.0, 0.0, 1, slow).step == 0.5
    assert goal.after(plans=1.0, rounds=2**13, dim=2, memory=slow).step == pytest.approx(0.25, rel=1e-3)


def test_the_next_block_is_as_long_as_the_effective_samples_so_far_suggest():
    assert next_length(1000.0, 500.0, 10.0) == pytest.approx((11.0, 11.0))
    assert next_length(1000.0, 10.0, 10.0) == pytest.approx((1040.0, 30.0))
    assert next_length(1000.0, 1000.0, 10.0)[1] == pytest.approx(1.0)
    lines = SimpleNamespace(dynamics=SimpleNamespace(turns=False), chains=64, whitened=True, sites=[])
    plain = SimpleNamespace(dynamics=lines.dynamics, chains=4, whitened=False, sites=[])
    assert first_block(plain, None, 1000.0) == 10.0 and first_block(lines, None, 1000.0) == pytest.approx(78.125)
    assert first_block(lines, None, 1e9) == 1000.0
    assert [pieces(rate, 10.0) for rate in (1.0, 1500.0, 1e9)] == [1, 3, 20]


def test_a_watch_sees_every_block_that_is_kept_and_none_of_the_burn_in():
    run, watch = sampler(burn_in=1.0)
    run.burn_in(False)
    assert watch.blocks == [] and watch.times[0] == -1.0 and watch.times[-1] == 0.0
    post = run.extend(duration=2.0, progress=False)
    assert watch.blocks == [(0.0, 2.0)] and watch.times[-1] == 2.0
    assert post.settings["study"] == "test" and post.settings["burn_in"] == 1.0
    assert np.all(run.burn_in_events == run.engine.events) and np.all(post.events < post.run.engine.events)


def test_an_unfinished_block_is_dropped_and_what_was_kept_is_returned(monkeypatch):
    run, watch = sampler()
    first = run.extend(duration=1.0, progress=False)
    later = first.run
    advance, calls = type(later.engine).advance, []

    def stops(self, until, keep, tick):
        calls.append(until)
        if len(calls) == 2:
            raise LimitReached("north", "ROUNDS")
        advance(self, until, keep, tick)

    monkeypatch.setattr(type(later.engine), "advance", stops)
    monkeypatch.setattr("fedpdmc.sampling.driver.pieces", lambda rate, length: 2)
    with pytest.warns(UserWarning, match="A limit of the contract is reached: the unfinished block is dropped"):
        post = later.extend(duration=4.0, progress=False)
    assert calls == [3.0, 5.0] and post.duration == 3.0 and first.duration == 1.0
    assert watch.blocks[-1] == (1.0, 3.0)


def test_a_run_that_is_stopped_before_anything_is_kept_raises(monkeypatch):
    run, _ = sampler()

    def stops(self, until, keep, tick):
        raise LimitReached("north", "ROUNDS")

    monkeypatch.setattr(type(run.engine), "advance", stops)
    with pytest.raises(LimitReached):
        run.extend(duration=4.0, progress=False)


def test_extending_leaves_the_sampler_and_its_posterior_as_they_are():
    run, _ = sampler()
    first = run.extend(duration=1.0, progress=False)
    again = first.extend(duration=1.0, progress=False)
    assert run.engine.time == 0.0 and first.duration == 1.0 and again.duration == 2.0
    np.testing.assert_array_equal(first.extend(duration=1.0, progress=False).mean(), again.mean())


def test_the_state_of_a_run_is_data_but_not_where_sites_are_elsewhere():
    run, _ = sampler()
    state = run.state()
    assert isinstance(state, RunState) and state.facts["keep"] == "skeleton"
    assert {"state_a", "state_site_events", "rounds"} <= set(state.arrays)
    run.method.sites[0].federation = object()
    assert run.state() is None


def test_draws_that_cannot_hold_the_effective_sample_size_are_refused_before_anything_runs():
    with pytest.raises(InputError, match="ess: found 1e.06 with keep='draws'"):
        short_run(dynamics=ZIGZAG, reference="identity", ess=1e6, keep="draws", burn_in=0.0)


def test_a_log_is_written_in_rounds_and_its_blocks_are_finished_first():
    asked = []
    run, _ = sampler(1.0, sites=[logistic_site("north", log=lambda plan, arrival: asked.append(plan))])
    assert run.engine.sites_remember and run.engine.memory.first == 10.0
    with showing(False, phase="sampling") as display:
        run._set_goal(-0.5, 1)
        run._reach_goal(display)
    assert run.engine.time == -0.5 and len(asked) == run.engine.rounds > 0
