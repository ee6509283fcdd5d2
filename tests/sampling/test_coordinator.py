"""What is public is planned; the earliest arrival cuts the plan."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.support import states

from fedpdmc.dynamics import QUARTER, Boomerang, BouncyParticle, FactorisedBoomerang, Turn, ZigZag, first_waits
from fedpdmc.plan import Arrival
from fedpdmc.potentials import Quadratic
from fedpdmc.sampling.coordinator import JUMPED, NOTHING, REFRESHED, Coordinator, PublicKeys, State

pytestmark = pytest.mark.usefixtures("double")

CHAINS, DIM, SEGMENTS = 40, 2, 4
KINDS = {
    "bouncy": BouncyParticle(refresh=0.7),
    "factorised": FactorisedBoomerang(0.7, 0.5),
    "turning": Boomerang(),
}


def coordinator(kind):
    public = Quadratic(jnp.asarray([[1.0, 0.3], [0.3, 2.0]]), jnp.asarray([0.5, -1.0]))
    return Coordinator.of(KINDS[kind], public, SEGMENTS)


def now(kind, t=2.0):
    a, v = states(0, CHAINS, DIM, KINDS[kind])
    count = jnp.full(CHAINS, 7)
    turn = Turn(jnp.asarray(first_waits(CHAINS)), count) if KINDS[kind].turns else None
    return State(a, v, jnp.full(CHAINS, t), count, count, count, count, None, turn)


@eqx.filter_jit
def intended(chief, state, until):
    return chief.plan_ahead(state, PublicKeys.of(jax.random.key(1), CHAINS), until)


@eqx.filter_jit
def moved(chief, state, itinerary, arrivals, until):
    """The state after the earliest arrival, the knots, and the chains that had one."""
    after, knots = chief.apply_arrivals(state, itinerary, arrivals, until, jnp.ones(CHAINS, bool))
    return after, knots, after.site_events - state.site_events


def silent(chief, itinerary):
    """Two sites that do not object."""
    time = jnp.stack([itinerary.plan.horizon] * 2)
    marks = jnp.zeros((2, CHAINS), int) if chief.dynamics.flips else jnp.zeros((2, CHAINS, DIM))
    return Arrival(time, jnp.zeros((2, CHAINS), bool), marks)


def plan(kind, until=5.0):
    chief, state, until = coordinator(kind), now(kind), jnp.asarray(until)
    return chief, state, intended(chief, state, until), until


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_is_a_path_from_the_present_state(kind):
    chief, state, itinerary, until = plan(kind)
    sent, flow = itinerary.plan, chief.dynamics.flow
    np.testing.assert_array_equal(sent.start, state.a)
    np.testing.assert_array_equal(sent.velocity[:, 0], state.v)
    np.testing.assert_array_equal(sent.number, state.number)
    assert np.all(sent.horizon <= until - state.t + 1e-12)
    np.testing.assert_allclose(sent.horizon[itinerary.final], 3.0, rtol=1e-14)
    a = sent.start
    for k in range(SEGMENTS):
        np.testing.assert_allclose(itinerary.path.start[:, k], a, atol=1e-13)
        a, v = flow.move(a, sent.velocity[:, k], sent.duration[:, k])
    np.testing.assert_allclose(itinerary.end_a, a, atol=1e-13)


@pytest.mark.parametrize("kind", KINDS)
def test_segments_are_used_from_the_first_on_and_end_in_events(kind):
    _, _, itinerary, _ = plan(kind)
    ending, duration = np.asarray(itinerary.ending), np.asarray(itinerary.plan.duration)
    over = np.cumsum(ending == NOTHING, 1) > 0
    assert np.all(ending[over] == NOTHING)
    np.testing.assert_array_equal(np.asarray(itinerary.final), over[:, -1])
    assert np.all(duration[~over] > 0)
    used = np.concatenate([np.zeros((CHAINS, 1), bool), over[:, :-1]], 1)
    assert not duration[used].any()
    assert {NOTHING, JUMPED} <= set(np.unique(ending))
    assert REFRESHED in ending


def test_a_jump_of_the_coordinator_flips_one_coordinate():
    chief, _, itinerary, _ = plan("factorised")
    sent = itinerary.plan
    for k in range(SEGMENTS - 1):
        _, before = chief.dynamics.flow.move(itinerary.path.start[:, k], sent.velocity[:, k], sent.duration[:, k])
        jumped = np.asarray(itinerary.ending[:, k] == JUMPED)
        changed = np.abs(np.asarray(sent.velocity[:, k + 1]) - np.asarray(before)) > 1e-9
        np.testing.assert_array_equal(changed[jumped].sum(1), 1)


@pytest.mark.parametrize("kind", KINDS)
def test_without_an_arrival_the_whole_plan_is_kept(kind):
    chief, state, itinerary, until = plan(kind)
    after, knots, events = moved(chief, state, itinerary, silent(chief, itinerary), until)
    assert not np.any(events)
    np.testing.assert_array_equal(after.a, itinerary.end_a)
    np.testing.assert_array_equal(after.v, itinerary.end_v)
    np.testing.assert_array_equal(after.t[itinerary.final], 5.0)
    np.testing.assert_array_equal(after.number, 8)
    np.testing.assert_array_equal(after.events, 7 + np.sum(np.asarray(itinerary.ending) == JUMPED, 1))
    begun = np.sum(np.asarray(itinerary.ending[:, :-1]) != NOTHING, 1)
    np.testing.assert_array_equal(knots.valid.sum(1), begun + ~np.asarray(itinerary.final))


@pytest.mark.parametrize("kind", KINDS)
def test_the_earliest_arrival_cuts_the_plan_and_its_jump_is_applied(kind):
    chief, state, itinerary, until = plan(kind)
    horizon = np.asarray(itinerary.plan.horizon)
    time = np.stack([0.9 * horizon, 0.6 * horizon, 0.1 * horizon])
    rang = np.array([[True], [True], [False]]) & np.ones(CHAINS, bool)
    normals = np.stack([np.tile(n, (CHAINS, 1)) for n in ([1.0, 0.0], [0.6, 0.8], [0.0, 1.0])])
    marks = np.array([[0], [1], [0]]) * np.ones(CHAINS, int) if chief.dynamics.flips else normals
    arrivals = Arrival(jnp.asarray(time), jnp.asarray(rang), jnp.asarray(marks))
    after, knots, events = moved(chief, state, itinerary, arrivals, until)
    assert np.all(events == 1)
    begin = np.asarray(itinerary.path.begin)
    segment = np.sum(begin <= time[1][:, None], 1) - 1
    rows = np.arange(CHAINS)
    offset = jnp.asarray(time[1] - begin[rows, segment])
    a, v = chief.dynamics.flow.move(itinerary.path.start[rows, segment], itinerary.plan.velocity[rows, segment], offset)
    np.testing.assert_allclose(after.a, a, atol=1e-13)
    np.testing.assert_allclose(after.v, chief.dynamics.jump(v, arrivals.mark[1]), atol=1e-13)
    np.testing.assert_allclose(after.t, 2.0 + time[1], rtol=1e-14)
    # Knots: the coordinator's events before the cut, and the cut itself.
    np.testing.assert_array_equal(knots.valid.sum(1), 1 + segment)
    own = [np.sum(np.asarray(itinerary.ending)[c, : segment[c]] == JUMPED) for c in rows]
    np.testing.assert_array_equal(after.events, 8 + np.array(own))


@pytest.mark.parametrize("kind", KINDS)
def test_a_finished_chain_gets_a_plan_of_no_length(kind):
    chief, state = coordinator(kind), now(kind, t=5.0)
    itinerary = intended(chief, state, jnp.asarray(5.0))
    assert not np.any(itinerary.plan.horizon) and np.all(itinerary.final)


def test_with_nothing_public_a_plan_is_one_segment_to_the_end():
    chief = Coordinator.of(ZigZag(), None, 1)
    itinerary = intended(chief, now("factorised"), jnp.asarray(5.0))
    np.testing.assert_allclose(itinerary.plan.duration, 3.0)
    assert np.all(itinerary.final)


def test_a_plan_ends_where_the_shares_of_the_prior_are_renewed_and_only_then_are_the_shares_new():
    before = jnp.tile(jnp.asarray([0.2, 0.3, 0.5]), (CHAINS, 1))
    chief = Coordinator.of(KINDS["bouncy"], None, SEGMENTS, 0.4)
    state = eqx.tree_at(lambda s: s.share, now("bouncy"), before, is_leaf=lambda x: x is None)
    until = jnp.asarray(5.0)
    itinerary = intended(chief, state, until)
    np.testing.assert_array_equal(itinerary.plan.share, before)
    renewed = np.any(np.asarray(itinerary.share) != np.asarray(before), 1)
    full = np.all(np.asarray(itinerary.ending) != NOTHING, 1)
    assert 0 < renewed.sum() < CHAINS
    np.testing.assert_array_equal(renewed, ~np.asarray(itinerary.final) & ~full)
    np.testing.assert_allclose(np.sum(itinerary.share, 1), 1.0)
    after, _, _ = moved(chief, state, itinerary, silent(chief, itinerary), until)
    np.testing.assert_array_equal(after.share, itinerary.share)
    np.testing.assert_allclose(after.t[renewed], 2.0 + itinerary.plan.horizon[renewed])
    assert np.all(np.asarray(after.t)[renewed] < 5.0)
    event = silent(chief, itinerary)
    event = Arrival(0.5 * event.time, ~event.rang, event.mark)
    cut, _, _ = moved(chief, state, itinerary, event, until)
    np.testing.assert_array_equal(cut.share, before)


def test_plans_reach_as_far_as_the_chains_own_events_suggest():
    chief, state, until = coordinator("bouncy"), now("bouncy"), jnp.asarray(1e6)
    state = eqx.tree_at(lambda s: s.site_events, state, jnp.arange(CHAINS) * 50)
    reach = np.asarray(chief.reach(state))
    # Four times the time since the start, with one event in twenty units to begin with, over the events.
    np.testing.assert_allclose(reach, 4 * (2.0 + 20.0) / (50 * np.arange(CHAINS) + 1), rtol=1e-14)
    itinerary = intended(chief, state, until)
    horizon = np.asarray(itinerary.plan.horizon)
    assert np.all(horizon <= reach * (1 + 1e-12)) and not np.any(itinerary.final)
    short = horizon < reach * (1 - 1e-12)
    # The others have no segment left.
    assert np.all(itinerary.ending[short, -1] != NOTHING) and 0 < short.sum() < CHAINS
    new, _, _ = moved(chief, state, itinerary, silent(chief, itinerary), until)
    np.testing.assert_array_equal(new.t, state.t + itinerary.path.horizon)
    np.testing.assert_array_equal(new.site_events, state.site_events)
    np.testing.assert_array_equal(new.planned - state.planned, np.sum(np.asarray(itinerary.plan.duration) > 0, 1))


@pytest.mark.parametrize("public", [True, False])
def test_turns_come_a_quarter_period_apart_whatever_happens_between_them(public):
    chief = coordinator("turning") if public else Coordinator.of(KINDS["turning"], None, SEGMENTS)
    state, until = now("turning"), jnp.asarray(1e6)
    turns, numbers = [[] for _ in range(CHAINS)], [[] for _ in range(CHAINS)]
    wait = np.asarray(state.turn.wait)
    for step in range(6):
        itinerary = intended(chief, state, until)
        arrivals = silent(chief, itinerary)
        # Some plans are cut, where nothing was planned.
        cut = np.arange(CHAINS) % 3 == step % 3
        times = jnp.where(cut, 0.37 * itinerary.plan.horizon, arrivals.time)
        normal = jnp.broadcast_to(jnp.asarray([0.6, 0.8]), arrivals.mark.shape)
        arrivals = Arrival(times, arrivals.rang | cut, normal)
        after, _, _ = moved(chief, state, itinerary, arrivals, until)
        ends = np.asarray(itinerary.path.begin + itinerary.path.duration)
        for c in range(CHAINS):
            kept = (np.asarray(itinerary.ending[c]) == REFRESHED) & (ends[c] <= float(after.t[c] - state.t[c]) + 1e-9)
            turns[c] += list(float(state.t[c]) + ends[c][kept])
            numbers[c].append(int(after.turn.number[c]))
        state = after
        assert np.all((np.asarray(state.turn.wait) > 0) & (np.asarray(state.turn.wait) <= QUARTER))
    for c in range(CHAINS):
        assert len(turns[c]) > 2 and numbers[c][-1] == 7 + len(turns[c])
        np.testing.assert_allclose(turns[c], 2.0 + wait[c] + QUARTER * np.arange(len(turns[c])), atol=1e-11)


def test_a_velocity_belongs_to_its_turn_and_not_to_the_plan():
    chief, state, itinerary, until = plan("turning", until=1e6)
    again = intended(chief, eqx.tree_at(lambda s: s.number, state, state.number + 5), until)
    first = np.asarray(itinerary.ending[:, 0] == REFRESHED) & np.asarray(again.ending[:, 0] == REFRESHED)
    assert first.sum() > 5
    np.testing.assert_array_equal(itinerary.plan.velocity[first, 1], again.plan.velocity[first, 1])


def test_a_turn_at_the_very_end_is_carried_out_and_its_knot_is_the_next_blocks():
    chief, state = Coordinator.of(KINDS["turning"], None, SEGMENTS), now("turning", t=0.0)
    state = eqx.tree_at(lambda s: s.turn.wait, state, jnp.full(CHAINS, QUARTER))
    until = jnp.asarray(2 * QUARTER)
    itinerary = intended(chief, state, until)
    np.testing.assert_array_equal(np.sum(np.asarray(itinerary.ending) == REFRESHED, 1), 2)
    after, knots, _ = moved(chief, state, itinerary, silent(chief, itinerary), until)
    np.testing.assert_array_equal(after.turn.wait, QUARTER)
    np.testing.assert_array_equal(after.t, until)
    np.testing.assert_array_equal(knots.valid.sum(1), 1)
