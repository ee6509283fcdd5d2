"""The lockstep engine keeps the promises of every engine: whole blocks, the same bits after a pause, counts that add up."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.support import hospitals, logistic_site, prior

import fedpdmc as fp
from fedpdmc._jax.random_streams import chain_keys
from fedpdmc.clocks import CurveClock, choose, dense
from fedpdmc.dynamics import Walls, turn_velocities
from fedpdmc.sampling.coordinator import Coordinator
from fedpdmc.sampling.engines import lockstep
from fedpdmc.sampling.engines.compiled_loop import CompiledEngine
from fedpdmc.sampling.engines.lockstep import LockstepEngine

CHAINS = 32
RUN = {"chains": CHAINS, "burn_in": 1.0, "seed": 5, "progress": False, "reference": "laplace", "control": "quadratic"}


@pytest.fixture(autouse=True)
def only_dense(monkeypatch):
    """Every other clock is too dear."""
    monkeypatch.setattr(choose, "best_setting", lambda *args: dense.best_setting(*args)._replace(cost=0.0))


def run(duration=6.0, sites=None, **options):
    return fp.sample(sites or hospitals(), prior(), dynamics=fp.Boomerang(), duration=duration, **RUN | options)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_run_says_what_it_did():
    post = run()
    engine = post.run.engine
    assert (
        isinstance(engine, LockstepEngine) and post.certified and all(entry["certified"] for entry in post.certificate)
    )
    assert all(entry["clock"] == "DenseClock" for entry in post.settings["clocks"])
    assert np.all(post.violations == 0) and np.all(np.asarray(engine.state.t) == 6.0)
    # Every chain turns four times at least in seven units of time, and every piece is a pass of both sites.
    assert np.all(post.gradient_evaluations >= 4 * CHAINS) and post.rounds >= 1
    knots = post.skeleton.offsets[1:] - post.skeleton.offsets[:-1]
    assert np.all(knots >= 4) and np.sum(knots) >= np.sum(post.events)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_run_that_was_kept_on_disk_goes_on_to_the_same_bits(tmp_path):
    first = run()
    first.save(tmp_path / "run.zarr")
    here = first.extend(duration=4.0, progress=False)
    there = fp.load(tmp_path / "run.zarr").extend(duration=4.0, sites=hospitals(), prior=prior(), progress=False)
    np.testing.assert_array_equal(here.skeleton.a, there.skeleton.a)
    np.testing.assert_array_equal(here.gradient_evaluations, there.gradient_evaluations)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_how_chunks_are_cut_changes_no_bit(monkeypatch):
    whole = run()
    monkeypatch.setattr(CompiledEngine, "_pace", lambda self, seconds, used: setattr(self, "limit", 3))
    np.testing.assert_array_equal(whole.skeleton.a, run().skeleton.a)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("filled", [0.1, 0.9])
def test_chunks_that_run_ahead_change_no_bit(monkeypatch, filled):
    whole = run()
    monkeypatch.setattr(LockstepEngine, "_runs_ahead", True)
    monkeypatch.setattr("fedpdmc.sampling.engines.lockstep.filled_share", lambda: filled)
    monkeypatch.setattr(CompiledEngine, "_pace", lambda self, seconds, used: setattr(self, "limit", 3))
    ahead = run()
    assert ahead.run.engine._ahead is not None
    blocks = []
    ahead.run.engine.advance(ahead.run.engine.time + 2.0, blocks.append, lambda tick: None)
    assert isinstance(blocks[0].chunks[0].numbers, jax.Array) is (filled < 0.5)
    np.testing.assert_array_equal(whole.skeleton.a, ahead.skeleton.a)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_an_error_leaves_the_run_where_it_was(monkeypatch):
    post = run()
    engine, before = post.run.engine, np.asarray(post.run.engine.state.a)

    def stop(tick):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.advance(engine.time + 5.0, lambda block: None, stop)
    np.testing.assert_array_equal(engine.state.a, before)
    assert engine.time == 6.0


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_sites_with_seeds_of_their_own_draw_by_themselves():
    sites = [logistic_site("north", 12, seed=3)]
    seeded = fp.Site(sites[0].potential, name="north", seed=7)
    assert isinstance(run(sites=sites, duration=2.0).run.engine, LockstepEngine)
    assert type(run(sites=[seeded], duration=2.0).run.engine) is CompiledEngine
    few = run(sites=sites, duration=2.0, chains=4)
    assert type(few.run.engine) is CompiledEngine


def test_a_coordinator_with_events_of_its_own_does_not_suit():
    boomerang = fp.Boomerang()
    walls = Walls(jnp.eye(2), jnp.ones(2))
    assert lockstep.suits(Coordinator(boomerang, None, 4))
    assert not lockstep.suits(Coordinator(boomerang, None, 4, walls=walls))
    assert not lockstep.suits(Coordinator(boomerang, None, 4, redistribution=1.0))
    assert not lockstep.suits(Coordinator(fp.Boomerang(refresh=0.0), None, 4))


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("count", [0, 1, 7, 33, 40])
def test_velocities_made_for_single_chains_are_those_made_for_all(count):
    chains, dim = 40, 3
    keys, turns = chain_keys(jax.random.key(2), chains), jnp.arange(chains) + 5
    who = np.zeros(chains, bool)
    who[np.random.default_rng(count).choice(chains, count, replace=False)] = True
    made = functools.partial(turn_velocities, count=1, dim=dim)
    before, every = jnp.zeros((dim, chains)), made(keys, turns)[0].T
    found = jax.jit(functools.partial(lockstep._turn_some, made))(keys, turns, before, jnp.asarray(who))
    np.testing.assert_array_equal(found, np.where(who, every, before))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_chains_far_out_are_walked_by_second_order_bounds():
    post = run(sites=[logistic_site("north", 12, seed=3)], duration=3.0, burn_in=0.0, init=np.full((CHAINS, 2), 40.0))
    clock = next(iter(post.run.engine.federation.clocks.values()))
    assert isinstance(clock, CurveClock) and clock.name == "DenseClock" and np.all(post.events > 0)
    assert np.all(np.isfinite(post.skeleton.a))


def test_lanes_are_few_on_a_processor():
    curves = type("Curves", (), {"wide": False})
    group = type("Group", (), {"clock": type("Clock", (), {"curves": curves, "dim": 6})})
    assert lockstep.lane_count((group,), 4096) == lockstep.LANES
    group.clock.dim = lockstep.MANY_COLUMNS
    assert lockstep.lane_count((group,), 4096) == lockstep.MORE_LANES
    group.clock.curves.wide = True
    assert lockstep.lane_count((group,), 4096) == 1024
