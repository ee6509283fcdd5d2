"""Runs: whole blocks of process time, continued, interrupted, and stopped by effective sample size."""

import warnings

import numpy as np
import pytest
from tests.federation.rounds import method
from tests.support import ZIGZAG, default_run, hospitals, prior, short_run, zigzag_run

import fedpdmc as fp
from fedpdmc.errors import InputError
from fedpdmc.results import skeleton
from fedpdmc.sampling import driver
from fedpdmc.sampling.engines import compiled_loop
from fedpdmc.sampling.vb_reference import vb

RUN = {"dynamics": ZIGZAG, "burn_in": 1.0}


def assert_same_paths(one, other):
    for left, right in zip(one.skeleton, other.skeleton, strict=True):
        np.testing.assert_array_equal(left, right)


def interrupt(monkeypatch, after):
    """Press Ctrl-C when all chains have passed a process time."""
    real = compiled_loop._run_chunk

    def chunk(groups, coordinator, keys, progress, *rest):
        if float(np.min(np.asarray(progress.state.t))) >= after:
            raise KeyboardInterrupt
        return real(groups, coordinator, keys, progress, *rest)

    monkeypatch.setattr(compiled_loop, "_run_chunk", chunk)


@pytest.mark.parametrize(("make", "end"), [(default_run, 8.0), (zigzag_run, 10.0)])
def test_every_chain_covers_the_same_span(make, end):
    post = make()
    path = post.skeleton
    assert (path.begin, path.end, post.duration) == (0.0, end, end)
    np.testing.assert_array_equal(path.t[path.offsets[:-1]], 0.0)
    assert np.all(path.durations >= 0)
    np.testing.assert_allclose(np.add.reduceat(path.durations, path.offsets[:-1]), end)


def test_the_same_seed_gives_the_same_bits():
    assert_same_paths(short_run(**RUN), zigzag_run())
    assert not np.array_equal(short_run(**RUN | {"seed": 4}).mean(), zigzag_run().mean())


def test_without_a_seed_the_one_drawn_is_told():
    post = short_run(**RUN, seed=None, duration=2.0)
    assert_same_paths(post, short_run(**RUN, seed=post.settings["seed"], duration=2.0))


def test_the_settings_say_which_clock_each_site_walks_with_and_why():
    clocks = short_run(**RUN, duration=2.0).settings["clocks"]
    assert [entry["site"] for entry in clocks] == ["north", "south"]
    assert all(entry["clock"] == "ThinnedClock" and entry["why"] == "no other applies" for entry in clocks)


def test_chains_start_at_init():
    starts = np.arange(8.0).reshape(4, 2)
    post = short_run(**RUN | {"burn_in": 0.0, "duration": 1.0}, init=starts)
    np.testing.assert_allclose(post.skeleton.a[post.skeleton.offsets[:-1]], starts)
    one = short_run(**RUN | {"burn_in": 0.0, "duration": 1.0}, init=[0.5, 2.0])
    np.testing.assert_allclose(one.skeleton.a[one.skeleton.offsets[:-1]], np.tile([0.5, 2.0], (4, 1)))


def test_a_single_site_needs_no_list():
    site = hospitals()[0]
    assert method(sites=site).sites == method(sites=[site]).sites == (site,)


def test_extend_goes_on_where_the_run_stopped():
    first = zigzag_run()
    before, drawn, events = first.mean(), first.draws(20), first.events.copy()
    second = first.extend(duration=5.0, progress=False)
    assert (first.duration, second.duration) == (10.0, 15.0)
    assert second.settings["duration"] == 15.0
    # The earlier posterior is as it was, and the beginning of the later one.
    np.testing.assert_array_equal(first.mean(), before)
    np.testing.assert_array_equal(first.draws(20), drawn)
    np.testing.assert_array_equal(first.events, events)
    np.testing.assert_allclose(second.draws(30)[:, :20], drawn, atol=1e-12)
    assert np.all(second.events >= first.events) and second.rounds > first.rounds
    assert np.all(second.gradient_evaluations > first.gradient_evaluations)


def test_extending_twice_from_one_posterior_gives_the_same_bits():
    one, other = (zigzag_run().extend(duration=3.0, progress=False) for _ in range(2))
    assert_same_paths(one, other)


def test_a_run_in_two_parts_is_the_run_in_one_where_the_blocks_agree():
    # With the default method few plans fill a block, so that each call makes one block.
    whole = default_run().extend(duration=10.0, progress=False)
    again = short_run(duration=8.0).extend(duration=10.0, progress=False)
    for left, right in zip(whole.skeleton, again.skeleton, strict=True):
        np.testing.assert_array_equal(left, right)


def test_an_interrupt_drops_the_unfinished_block(monkeypatch):
    monkeypatch.setattr(driver, "PLANS_PER_BLOCK", 50)
    first = zigzag_run()
    whole = first.extend(duration=200.0, progress=False)
    interrupt(monkeypatch, after=100.0)
    with pytest.warns(UserWarning, match="Interrupted: the unfinished block is dropped"):
        part = first.extend(duration=200.0, progress=False)
    assert first.duration < part.duration < whole.duration
    kept, path = part.skeleton, whole.skeleton
    assert kept.end == part.duration
    for chain in range(4):
        own, other = (slice(p.offsets[chain], p.offsets[chain + 1]) for p in (kept, path))
        n = np.sum(path.t[other] < kept.end)
        np.testing.assert_array_equal(kept.t[own], path.t[other][:n])
        np.testing.assert_array_equal(kept.a[own], path.a[other][:n])


def test_what_is_drawn_is_kept_however_many_effective_samples_were_asked_for(monkeypatch):
    interrupt(monkeypatch, after=120.0)
    with pytest.warns(UserWarning, match="Interrupted: the unfinished block is dropped"):
        part = short_run(**RUN, reference="laplace", duration=None, ess=1e6)
    # A Ctrl-C is seen between two chunks.
    assert part.duration in (100.0, 150.0)
    open_method = method(dynamics=fp.Boomerang(refresh="quarter-turns"), reference="laplace")
    assert driver.joined_block(open_method, None, 1e7) == driver.MOST_BLOCK
    assert driver.first_block(open_method, None, 1e7) > driver.MOST_BLOCK
    assert driver.joined_block(open_method, 7.0, None) == 7.0


def test_an_interrupt_in_the_first_block_leaves_nothing_new(monkeypatch):
    first = zigzag_run()
    mean = first.mean()
    interrupt(monkeypatch, after=10.0)
    with pytest.raises(KeyboardInterrupt):
        first.extend(duration=200.0, progress=False)
    monkeypatch.undo()
    np.testing.assert_array_equal(first.mean(), mean)
    assert_same_paths(*(first.extend(duration=3.0, progress=False) for _ in range(2)))


def test_an_interrupt_in_the_burn_in_is_an_interrupt(monkeypatch):
    interrupt(monkeypatch, after=-np.inf)
    with pytest.raises(KeyboardInterrupt):
        short_run(**RUN)


def test_an_interrupt_while_a_block_is_stored_drops_all_of_it(monkeypatch):
    first, stored, real = zigzag_run("draws"), [], skeleton.Skeleton.at

    def at(self, flow, times):
        stored.append(1)
        if len(stored) == 3:
            raise KeyboardInterrupt
        return real(self, flow, times)

    monkeypatch.setattr(skeleton.Skeleton, "at", at)
    with pytest.warns(UserWarning, match="Interrupted"):
        part = first.extend(duration=64.0, progress=False)
    # Blocks of 1, 4 and 16: the first two are kept.
    assert part.duration == 15.0
    assert part.store.moments().time == pytest.approx(4 * part.duration)


def test_ess_is_reached_at_the_end_of_a_whole_block():
    post = short_run(ess=60.0)
    assert min(post.ess().values()) >= 60.0
    path = post.skeleton
    assert path.end == post.duration == post.settings["duration"]
    # A unit of time yields 2/π effective samples at best.
    assert post.duration >= 60.0 / (0.64 * 4)
    np.testing.assert_allclose(np.add.reduceat(path.durations, path.offsets[:-1]), post.duration)


def test_ess_that_takes_several_blocks():
    post = short_run(dynamics=ZIGZAG, ess=150.0)
    assert min(post.ess().values()) >= 150.0
    assert post.duration > 10.0


def test_ess_of_a_long_chain_can_pass_a_thousand():
    site = fp.Site(fp.models.gaussian_mean(np.ones((2, 2))), name="a")
    post = fp.sample(
        site, prior(), dynamics=fp.ZigZag(), reference="identity", chains=1, duration=4000.0, seed=3, progress=False
    )
    assert min(post.ess().values()) > 1200


def test_more_ess_than_draws_are_kept_is_refused(monkeypatch):
    monkeypatch.setattr(driver, "MOST_BLOCKS", 1)
    with pytest.raises(InputError, match="ess"), warnings.catch_warnings(action="ignore"):
        short_run(dynamics=ZIGZAG, ess=4 * 4096 + 1.0, keep="draws")


def test_keeping_draws_changes_neither_mean_nor_cov_beyond_monte_carlo():
    # Blocks end elsewhere, so that the paths differ after the first; one block gives the same numbers.
    whole, thinned = zigzag_run(), zigzag_run("draws")
    scale = np.sqrt(np.diag(whole.cov()))
    assert np.all(np.abs(whole.mean() - thinned.mean()) < 1.5 * scale)
    np.testing.assert_allclose(thinned.draws(500).mean((0, 1)), thinned.mean(), atol=0.05)
    np.testing.assert_allclose(np.cov(thinned.draws(500).reshape(-1, 2).T), thinned.cov(), rtol=0.1, atol=0.02)


def test_kept_draws_are_bounded_however_long_the_run():
    post = zigzag_run("draws")
    for _ in range(2):
        post = post.extend(duration=post.duration, progress=False)
        assert post.most_draws <= 4096
        assert sum(x.nbytes for x in vars(post.store).values() if isinstance(x, np.ndarray)) <= 4 * 4096 * 2 * 8
    assert post.duration == 40.0


def test_the_prior_can_be_an_extra_site():
    chosen = method(ZIGZAG, prior_at="extra")
    assert [site.name for site in chosen.sites] == ["north", "south", "prior"]
    assert chosen.public is None


def test_a_reference_of_ones_own_can_be_given():
    made = vb(hospitals(), prior())
    by_hand, by_name = short_run(reference=made, duration=8.0), default_run()
    np.testing.assert_array_equal(by_hand.skeleton.t, by_name.skeleton.t)
    assert by_hand.rounds == by_name.rounds
