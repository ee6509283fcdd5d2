"""The coordinator plans, the sites answer with arrivals: Algorithm 2 of the paper, with plans.

``plan_ahead`` simulates everything public up to a horizon; ``apply_arrivals`` keeps the path up to the earliest arrival and
applies the winner's jump. Between the two, the sites answer. Nothing else happens in a round.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from fedpdmc._jax.compilation import apart
from fedpdmc._jax.random_streams import ChainKeys, chain_keys, exponentials, uniforms
from fedpdmc.clocks import Clock, Path, clock_for, follow, pick
from fedpdmc.dynamics import LEAST_WAIT, QUARTER, Dynamics, Turn, Walls, turn_velocities
from fedpdmc.plan import Arrival, Plan, TurnSchedule
from fedpdmc.potentials import Potential, ScaleMixture

NOTHING, REFRESHED, JUMPED, REJECTED, RENEWED = range(5)

# Of the scales of a prior per unit of process time, by dynamics without refreshment at random times.
RENEWAL_RATE = 10.0
MARGIN = 4.0  # length of a plan over the mean time between site events so far: e⁻⁴ of plans end without one
USUAL_EVENTS = 1.0  # of sites in `USUAL_TIME`: the pace of the paper's logistic regression, from which a run starts
USUAL_TIME = 20.0


class State(eqx.Module):
    """The state of every chain: position, velocity, process time, number of its next plan, number of jumps.

    ``site_events`` are the jumps of sites among them, and ``planned`` the segments of all plans so far. ``share`` is the
    sites' parts of a prior that is redistributed, and None for any other; ``scales`` those of a prior that is normal given
    them. ``turn`` is the next turn of dynamics that have them.
    """

    a: Float[Array, "C d"]
    v: Float[Array, "C d"]
    t: Float[Array, " C"]
    number: Int[Array, " C"]
    events: Int[Array, " C"]
    site_events: Int[Array, " C"]
    planned: Int[Array, " C"]
    share: Float[Array, "C M"] | None = None
    turn: Turn | None = None
    scales: Float[Array, "C m"] | None = None


class PublicKeys(NamedTuple):
    """The coordinator's randomness by chain: its events, the public potential's clock, the prior's shares, the turns."""

    events: ChainKeys
    clock: ChainKeys
    share: ChainKeys
    turns: ChainKeys

    @classmethod
    def of(cls, key: Key[Array, ""], chains: int) -> PublicKeys:
        """All from one key."""
        events, clock, share = (chain_keys(jax.random.fold_in(key, use), chains) for use in range(3))
        return cls(events, clock, share, chain_keys(cls.turn_key(key), chains))

    @staticmethod
    def turn_key(key: Key[Array, ""]) -> Key[Array, ""]:
        """The key of the turns, which sites may have too."""
        return jax.random.fold_in(key, 3)


class Itinerary(eqx.Module):
    """A planned path: the plan that is sent, and what stays with the coordinator."""

    path: Path  # the plan with positions and times at the start of every segment
    ending: Int[Array, "C S"]  # of each segment: NOTHING, or the kind of event
    end_a: Float[Array, "C d"]  # the state at the horizon, the coordinator's last event included
    end_v: Float[Array, "C d"]
    final: Bool[Array, " C"]  # the horizon is the end of the block
    share: Float[Array, "C M"] | None = None  # the sites' parts of the prior from the horizon on
    wait: Float[Array, "C S_and_1"] | None = None  # to the next turn, at the start of every segment and at the horizon
    turns: TurnSchedule | None = None  # as `Plan` has it
    scales: Float[Array, "C S_and_1 m"] | None = None  # of the prior, where `wait` is

    @property
    def plan(self) -> Plan:
        """What is sent."""
        path = self.path
        return Plan(path.number, path.start[:, 0], path.duration, path.velocity, path.share, self.turns)


class RoundKnots(eqx.Module):
    """Points of the skeleton: states right after events, with those that are void marked.

    The state at the end of a block is void: it is the next block's first.
    """

    t: Float[Array, "C S"]
    a: Float[Array, "C S d"]
    v: Float[Array, "C S d"]
    valid: Bool[Array, "C S"]


class Coordinator(eqx.Module):
    """Everything public, in whitened coordinates."""

    dynamics: Dynamics
    clock: Clock | None  # of the public potential (prior, control variates, −½|a|² for rotations); None if it is zero
    segments: int = eqx.field(static=True)  # of a plan, at most
    redistribution: float = eqx.field(
        default=0.0, static=True
    )  # rate at which shares of a prior that sites hold are renewed
    begin: float | Float[Array, ""] = 0.0  # the process time at which the chains start
    walls: Walls | None = None  # limits of the support, at which the path turns

    @classmethod
    def of(
        cls,
        dynamics: Dynamics,
        potential: Potential | None,
        segments: int,
        redistribution: float = 0.0,
        begin: float = 0.0,
        walls: Walls | None = None,
    ) -> Coordinator:
        """A coordinator for a public potential in whitened coordinates."""
        clock = None if potential is None else clock_for(potential, dynamics)
        return cls(dynamics, clock, segments, redistribution, jnp.asarray(float(begin)), walls)

    @property
    def mixture(self) -> ScaleMixture | None:
        """The public potential if its prior has scales, which are renewed whenever the velocity is refreshed."""
        potential = None if self.clock is None else self.clock.potential
        return potential if isinstance(potential, ScaleMixture) else None

    def reach(self, state: State) -> Float[Array, " C"]:
        """The horizon of a plan of several segments: long enough that most plans end in an event of a site.

        ``H = 4 (t + 20)/(n + 1)`` after n events of sites in t units of the chain's own time: beyond that a site walks, and
        is sent, what will hardly be used. It depends on the chain's own past alone, so it is exact, and it does not depend
        on the other chains of the run.
        """
        return MARGIN * (state.t - self.begin + USUAL_TIME) / (state.site_events + USUAL_EVENTS)

    def plan_ahead(self, state: State, keys: PublicKeys, until: Float[Array, "*C"]) -> Itinerary:
        """Simulate the public events from the present state, up to ``until`` or to the last segment that fits.

        ``until`` is one process time, or one for each chain. Plans of several segments reach no further than `reach`.
        """
        remaining, share, fresh = jnp.maximum(until - state.t, 0.0), state.share, None
        due, short = jnp.zeros_like(remaining, bool), jnp.zeros_like(remaining, bool)
        if self.segments > 1:
            reach = self.reach(state)
            short, remaining = reach < remaining, jnp.minimum(remaining, reach)
        if share is not None:
            redistributed, fresh = self._redistribution(keys, state, share.shape[1])
            due, remaining = redistributed < remaining, jnp.minimum(remaining, redistributed)
            short &= ~due

        turns = None if state.turn is None else (state.turn.wait, jnp.zeros_like(state.turn.number))
        velocities = None if state.turn is None else self._turn_velocities(keys, state)

        def segment(carry, chance):
            (a, v, left, turns, scales), (k, u, level, fresh) = carry, chance
            number = state.number * self.segments + k
            public = functools.partial(self._public_arrival, a, v, keys.clock, number, scales)
            refresh = level[0] / self.dynamics.refresh_rate if self.dynamics.refresh_rate > 0 else None
            renewal = None if scales is None or refresh is not None else level[0] / RENEWAL_RATE
            if turns is not None and velocities is not None:
                refresh, fresh = turns[0], pick(velocities, turns[1])
            before = self._speeds(scales)
            wait, ending, next_a, next_v = self._public_event(
                a, v, left, u, level, (refresh, None if fresh is None else fresh * before, renewal), public
            )
            left_then = jnp.where(ending != NOTHING, left - wait, 0.0)
            after = None
            if turns is not None:
                turned = ending == REFRESHED
                after = jnp.where(turned, QUARTER, jnp.maximum(turns[0] - wait, LEAST_WAIT)), turns[1] + turned
            then = None
            if scales is not None:
                renewed = (ending == REFRESHED) | (ending == RENEWED)
                then = self._renew(scales, next_a, renewed, keys, number)
                next_v = jnp.where(renewed[:, None], next_v * (self._speeds(then) / before), next_v)
            passed = v, wait, ending, None if turns is None else turns[0], scales
            return (next_a, next_v, left_then, after, then), passed

        first, chances = (state.a, state.v, remaining, turns, state.scales), self._chances(keys, state)
        if self.segments == 1:
            last, out = segment(first, jax.tree.map(lambda x: x[0], chances))
            out = jax.tree.map(lambda x: x[:, None], out)
        else:
            last, out = jax.lax.scan(segment, first, chances)
            out = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), out)
        (end_a, end_v, left, turns, scales), (velocity, duration, ending, waits, held) = last, out
        if turns is not None:
            waits = jnp.concatenate([waits, turns[0][:, None]], 1)
        if scales is not None:
            held = jnp.concatenate([held, scales[:, None]], 1)
        path = follow(self.dynamics, Plan(state.number, state.a, duration, velocity, share))
        if share is not None and fresh is not None:
            share = jnp.where((due & (left <= 0))[:, None], fresh, share)
        final = (left <= 0) & ~(due | short)
        return Itinerary(path, ending, end_a, end_v, final, share, waits, self.schedule(state, remaining), held)

    def _speeds(self, scales: Float[Array, "C m"] | None) -> Float[Array, "*C"]:
        """``1/√λ`` of every chain: by how much velocities are larger than those of the dynamics (`ScaleMixture`)."""
        mixture = self.mixture
        return jnp.ones(()) if mixture is None or scales is None else (mixture.pace(scales) ** -0.5)[:, None]

    def _renew(self, scales, a, refreshed, keys: PublicKeys, number) -> Float[Array, "C m"]:
        """Scales of the prior after a segment: drawn given the position if it ended in a refreshment.

        A refreshment comes at a time that does not depend on the state, and the draw leaves the joint law of position and
        scales as it is. A plan that is cut before it uses nothing of the draw, so the next plan may make it again.
        """
        assert (mixture := self.mixture) is not None

        def draw():
            u = uniforms(keys.share, number, jnp.zeros_like(number), mixture.law.draws)
            return where_chains(refreshed, mixture.renewed(scales, a, u), scales)

        return jax.lax.cond(jnp.any(refreshed), draw, lambda: scales)

    def schedule(self, state: State, left: Float[Array, " C"]) -> TurnSchedule | None:
        """The short form of a plan if the coordinator's only events are turns."""
        other = self.clock is not None or self.walls is not None or self.dynamics.excess > 0 or self.redistribution > 0
        return None if state.turn is None or other else TurnSchedule(state.turn.wait, state.turn.number, left)

    def _turn_velocities(self, keys: PublicKeys, state: State) -> Float[Array, "C S d"]:
        """The velocities at the next turns of every chain.

        They depend on the number of the turn alone. A plan that is cut before a turn keeps its velocity for the next plan,
        which is exact: given the sequence of all of them, the path is that of clocks along a path with these jumps at
        these times. The law of an arrival before a turn does not depend on what follows the turn.
        """
        assert state.turn is not None
        made = functools.partial(turn_velocities, count=self.segments, dim=state.a.shape[1])
        return jnp.swapaxes(apart(made, keys.turns, state.turn.number, number=state.turn.number), 0, 1)

    def _chances(self, keys: PublicKeys, state: State):
        """All that is random in the segments of a plan: their numbers, uniforms, exponentials and new velocities."""
        dim, count = state.a.shape[1] if self.dynamics.refresh_rate > 0 else 0, self.segments
        if state.turn is not None and self.dynamics.excess == 0 and state.scales is None:
            # Turns have velocities of their own, and nothing else is random.
            nothing = jnp.zeros((count, 2, state.a.shape[0]))
            return jnp.arange(count), nothing, nothing, jnp.zeros((count, state.a.shape[0], 0))
        drawn = uniforms(keys.events, state.number, jnp.zeros_like(state.number), count * (4 + dim))
        drawn = drawn.reshape(count, 4 + dim, -1)
        level = apart(exponentials, drawn[:, :2], number=state.number)
        fresh = jnp.swapaxes(apart(self.dynamics.velocity, drawn[:, 4:], number=state.number), 1, 2)
        return jnp.arange(count), drawn[:, 2:4], level, fresh

    def _redistribution(
        self, keys: PublicKeys, state: State, sites: int
    ) -> tuple[Float[Array, " C"], Float[Array, "C M"]]:
        """When and how the prior's shares are renewed: independent of state and past, so a cut plan may draw them again."""
        u = uniforms(keys.share, state.number, jnp.zeros_like(state.number), 1 + sites)
        return exponentials(u[0]) / self.redistribution, shares(u[1:])

    def _public_event(self, a, v, left, u, level, refreshment, public_arrival):
        """The first of the coordinator's own clocks within ``left``: its time, its kind, and the state after it.

        ``refreshment`` is when the velocity would be refreshed, None for never, the velocity after it, and when scales of a
        prior are renewed besides. A turn at the very end of ``left`` is carried out.
        """
        dynamics, (refresh, fresh, renewal) = self.dynamics, refreshment
        # The excess rates: constant on lines; on rotations the largest value of ``excess |v_i|`` on the circle.
        flip_rates = dynamics.excess * (jnp.ones_like(a) if dynamics.unit_speed else jnp.hypot(a, v))
        flip = level[1] / jnp.sum(flip_rates, -1) if dynamics.excess > 0 else None
        wall, which = (None, None) if self.walls is None else self.walls.first(dynamics, a, v)
        times = [time for time in (refresh, flip, wall, renewal) if time is not None]
        own = functools.reduce(jnp.minimum, times, jnp.full(left.shape, jnp.inf))
        public = public_arrival(jnp.minimum(left, own))
        wait = jnp.minimum(own, public.time)
        end_a, end_v = dynamics.flow.move(a, v, jnp.minimum(wait, left))
        changes = []
        if flip is not None:
            # The coordinate that flips, or −1 where the candidate is thinned away.
            total = jnp.cumsum(flip_rates, -1)
            mark = jnp.argmax(total > (u[0] * total[:, -1])[:, None], -1)
            actual, bound = (jnp.take_along_axis(x, mark[:, None], -1)[:, 0] for x in (end_v, flip_rates))
            mark = jnp.where(u[1] * bound <= dynamics.excess * jnp.abs(actual), mark, -1)
            changes.append((flip, dynamics.jump(end_v, mark), jnp.where(mark < 0, REJECTED, JUMPED)))
        changes += [] if renewal is None else [(renewal, end_v, RENEWED)]
        changes += [] if refresh is None else [(refresh, fresh, REFRESHED)]
        if self.walls is not None and which is not None:
            changes.append((wall, self.walls.bounced(dynamics, end_v, which), JUMPED))
        jumped = end_v if self.clock is None else dynamics.jump(end_v, public.mark)
        ending = jnp.full(left.shape, JUMPED)
        for time, after, kind in changes:
            jumped, ending = jnp.where((time <= wait)[:, None], after, jumped), jnp.where(time <= wait, kind, ending)
        struck = wait < left
        if dynamics.turns and refresh is not None:
            struck |= (refresh <= wait) & (wait <= left)
        next_v = jnp.where(struck[:, None], jumped, end_v)
        return jnp.minimum(wait, left), jnp.where(struck, ending, NOTHING), end_a, next_v

    def _public_arrival(self, a, v, keys: ChainKeys, number, scales, left) -> Arrival:
        chains = a.shape[0]
        if self.clock is None:
            return Arrival(jnp.full(chains, jnp.inf), jnp.zeros(chains, bool), jnp.zeros(chains, int))
        clock, mixture = self.clock, self.mixture
        if mixture is not None and scales is not None:
            clock = eqx.tree_at(lambda c: c.potential, clock, mixture.holding(scales))
        left = jnp.where(jnp.isfinite(left), left, 0.0)
        path = Path(number, a[:, None], v[:, None], jnp.zeros((chains, 1)), left[:, None])
        state = clock.restart(clock.idle(chains), jnp.ones(chains, bool), path)
        state = jax.lax.while_loop(lambda s: jnp.any(~clock.walk(s).done), lambda s: clock.step(s, path, keys), state)
        walk = clock.walk(state)
        arrival = walk.arrival(self.dynamics)
        # A fault of the public clock must not be taken for no event: it makes the path NaN, and the run stops.
        time = jnp.where(walk.fault == 0, jnp.where(walk.rang, arrival.time, jnp.inf), jnp.nan)
        return Arrival(time, walk.rang, arrival.mark)

    def apply_arrivals(
        self, state: State, itinerary: Itinerary, arrivals: Arrival, until: Float[Array, "*C"], ready: Bool[Array, " C"]
    ) -> tuple[State, RoundKnots]:
        """Keep the path up to the earliest arrival (stacked over sites) and apply the winner's jump.

        Returns the new state and the knots of the path that is kept. Chains that are not ``ready`` stay where they are.
        """
        times = jnp.where(arrivals.rang, arrivals.time, jnp.inf)
        winner = jnp.argmin(times, 0)
        time = jnp.min(times, 0)
        rang = jnp.isfinite(time)
        mark = pick(jnp.swapaxes(arrivals.mark, 0, 1), winner)
        cut, path = jnp.where(rang, time, jnp.inf), itinerary.path
        segment = jnp.sum(path.begin <= cut[:, None], -1) - 1
        offset = jnp.where(rang, time - pick(path.begin, segment), 0.0)
        a, v = path.state(self.dynamics, segment, offset)
        held = None if itinerary.scales is None else pick(itinerary.scales, segment)
        drawn = mark * self._speeds(held) if self.dynamics.draws else self.dynamics.jump(v, mark)
        begun = (itinerary.ending[:, :-1] != NOTHING) & (path.begin[:, 1:] < jnp.minimum(cut, path.horizon)[:, None])
        passed = path.begin + path.duration <= cut[:, None]
        own = jnp.sum((itinerary.ending == JUMPED) & passed, -1)
        turn = end_turn = state.turn
        if turn is not None and itinerary.wait is not None:
            refreshed = itinerary.ending == REFRESHED
            wait = jnp.maximum(pick(itinerary.wait, segment) - offset, LEAST_WAIT)
            before = jnp.sum(refreshed & (jnp.arange(self.segments) < segment[:, None]), -1)
            end_turn = Turn(itinerary.wait[:, -1], turn.number + jnp.sum(refreshed, -1))
            turn = Turn(wait, turn.number + before)
        counts = state.number + 1, state.events + own + rang, state.site_events + rang
        counts = *counts, state.planned + jnp.sum(path.duration > 0, -1)
        share = state.share if itinerary.share is None else itinerary.share
        scales = None if itinerary.scales is None else itinerary.scales[:, -1]
        end = jnp.where(itinerary.final, until, state.t + path.horizon)
        end = State(itinerary.end_a, itinerary.end_v, end, *counts, share, end_turn, scales)
        new = where_chains(rang, State(a, drawn, state.t + time, *counts, state.share, turn, held), end)
        knots = RoundKnots(
            jnp.concatenate([state.t[:, None] + path.begin[:, 1:], new.t[:, None]], 1),
            jnp.concatenate([path.start[:, 1:], new.a[:, None]], 1),
            jnp.concatenate([path.velocity[:, 1:], new.v[:, None]], 1),
            jnp.concatenate([begun, (new.t < until)[:, None]], 1) & ready[:, None],
        )
        return where_chains(ready, new, state), knots


def where_chains(chains: Bool[Array, " C"], new, old):
    """A tree of arrays that are ``new`` on some chains and ``old`` on the others."""

    def choose(x, y):
        return jnp.where(chains.reshape(chains.shape + (1,) * (x.ndim - 1)), x, y)

    return jax.tree.map(choose, new, old)


def shares(u: Float[Array, "M C"]) -> Float[Array, "C M"]:
    """Weights uniform on the simplex, from uniforms: exponentials over their sum."""
    parts = exponentials(u).T
    return parts / jnp.sum(parts, -1, keepdims=True)
