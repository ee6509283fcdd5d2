"""What breaks exactness quietly: every wrong way to conduct the rounds is caught, and the right way beside it passes.

The rounds are conducted here in plain steps of plan, exchange and move, with a place for each mistake. All chains
start in stationarity and are looked at when they reach process times fixed beforehand, so that they are independent draws
from the posterior if the rounds are right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.federation.rounds import method
from tests.statistical.checks import ALPHA, features, t_test
from tests.statistical.targets import target, truth

import fedpdmc as fp
from fedpdmc._jax.precision import double_precision
from fedpdmc.sampling import factory
from fedpdmc.sampling.coordinator import Coordinator, PublicKeys, State
from fedpdmc.sampling.engines.compiled_loop import LocalFederation

CHAINS, MODEL, SITES = 2048, "poisson", 3
OFTEN = fp.BouncyParticle(refresh=4.0)
LINES, ROTATIONS, TURNS = fp.BouncyParticle(refresh=0.8), fp.Boomerang(refresh=0.8), fp.Boomerang()


@eqx.filter_jit
def _plan_ahead(coordinator, state, keys, until):
    return coordinator.plan_ahead(state, keys, until)


@eqx.filter_jit
def _move(coordinator, state, itinerary, arrivals, until):
    return coordinator.apply_arrivals(state, itinerary, arrivals, until, jnp.ones_like(state.t, bool))[0]


class Party(NamedTuple):
    """All who take part in the rounds of a run, and where its chains start."""

    coordinator: Coordinator
    federation: LocalFederation
    keys: PublicKeys
    state: State
    reference: fp.Reference

    def plan_ahead(self, state, until):
        return _plan_ahead(self.coordinator, state, self.keys, until)

    def exchange(self, itinerary):
        """Arrivals of all sites along what was intended."""
        return jax.tree.map(lambda *x: jnp.stack(x), *self.federation.exchange(itinerary.plan))

    def move(self, state, itinerary, arrivals, until):
        return _move(self.coordinator, state, itinerary, arrivals, until)


@double_precision
def party(dynamics, seed=61, **options) -> Party:
    """Chains in stationarity on a skewed posterior of three sites."""
    federation = target(MODEL, SITES)
    chosen = method(
        dynamics, sites=federation.sites(), prior=federation.prior(), chains=CHAINS, seed=seed,
        init=truth(MODEL, SITES).draws(CHAINS, seed), **options,
    )  # fmt: skip
    keys = PublicKeys.of(jax.random.fold_in(jax.random.key(seed), 1), CHAINS)
    parts = factory.coordinator(chosen), factory.local_federation(chosen), keys, factory.start_state(chosen)
    return Party(*parts, chosen.reference)


def choose(where, new, old):
    """``new`` for the chains at which ``where`` holds."""
    return jax.tree.map(lambda x, y: jnp.where(where.reshape(where.shape + (1,) * (x.ndim - 1)), x, y), new, old)


def honest(party: Party, state, until):
    """One round as it should be."""
    itinerary = party.plan_ahead(state, until)
    return party.move(state, itinerary, party.exchange(itinerary), until)


@double_precision
def looked_at(party: Party, round_: Callable = honest, ends: tuple[float, ...] = (2.0, 4.0)) -> np.ndarray:
    """Positions (C, k, 2) of all chains at the process times ``ends``."""
    state, seen = party.state, []
    for end in ends:
        until = jnp.asarray(end)
        while bool(jnp.any(state.t < until)):
            state = choose(state.t < until, round_(party, state, until), state)
        seen.append(party.reference.to_x(state.a))
    return np.stack(seen, 1)


def against_truth(positions):
    names, values, expected = features(positions, truth(MODEL, SITES))
    return t_test(names, values.mean(1), expected)


def impatient(party: Party, state, until):
    """Wrong: plan anew when the sites are slow, and the further they walk the slower they are."""
    itinerary = party.plan_ahead(state, until)
    arrivals = party.exchange(itinerary)
    slow = jnp.min(arrivals.time, 0) > 0.5
    again = eqx.tree_at(lambda s: s.number, state, state.number + 1)
    return choose(slow, again, party.move(state, itinerary, arrivals, until))


def patient(party: Party, state, until):
    """Right: send the identical plan again; what was drawn for it is what comes back."""
    itinerary = party.plan_ahead(state, until)
    first, again = party.exchange(itinerary), party.exchange(itinerary)
    for one, other in zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(one, other)
    return party.move(state, itinerary, again, until)


def confused(party: Party, state, until):
    """Wrong: the same round with another plan is answered with the arrival stored for the first one."""
    stored = party.exchange(party.plan_ahead(state, until))
    other = party.plan_ahead(eqx.tree_at(lambda s: s.number, state, state.number + 1_000_000), until)
    arrivals = eqx.tree_at(lambda a: a.rang, stored, stored.rang & (stored.time < other.path.horizon))
    moved = party.move(state, other, arrivals, until)
    return eqx.tree_at(lambda s: s.number, moved, state.number + 1)


@pytest.mark.long
def test_sending_the_same_plan_again_passes():
    comparison = against_truth(looked_at(party(LINES), patient))
    assert comparison.exact, str(comparison)
    assert comparison.ess[:2].min() > 2000


@pytest.mark.parametrize("wrong", [pytest.param(impatient, marks=pytest.mark.long), confused])
def test_planning_anew_within_a_round_is_caught(wrong):
    comparison = against_truth(looked_at(party(LINES), wrong))
    assert np.min(comparison.p) < ALPHA, str(comparison)


def nervous(party: Party, state, until):
    """Wrong: refresh more often where the chain is far out when it plans."""
    far = jnp.linalg.norm(state.a - jnp.asarray(truth(MODEL, SITES).mean), axis=-1) > 1.0
    often = party._replace(coordinator=Coordinator(OFTEN, party.coordinator.clock, party.coordinator.segments))
    itinerary = choose(far, often.plan_ahead(state, until), party.plan_ahead(state, until))
    return party.move(state, itinerary, party.exchange(itinerary), until)


def test_refreshment_that_depends_on_the_state_is_caught():
    comparison = against_truth(looked_at(party(LINES), nervous, ends=(4.0, 8.0)))
    assert np.min(comparison.p) < ALPHA, str(comparison)


def hasty(party: Party, state, until):
    """Wrong: turn at once where the chain is far out when it plans."""
    far = jnp.linalg.norm(state.a, axis=-1) > 1.2
    soon = jnp.where(far, jnp.minimum(state.turn.wait, 0.1), state.turn.wait)
    return honest(party, eqx.tree_at(lambda s: s.turn.wait, state, soon), until)


def test_turns_at_fixed_times_pass_and_turns_that_look_at_the_state_are_caught():
    one = centred(0.7, TURNS)
    comparison = against_truth(looked_at(one, ends=(3.0, 6.0)))
    assert comparison.exact, str(comparison)
    comparison = against_truth(looked_at(one, hasty, ends=(3.0, 6.0)))
    assert np.min(comparison.p) < ALPHA, str(comparison)


def centred(shift, dynamics=ROTATIONS):
    """Rotations about a point that is ``shift`` standard deviations from the posterior's mean."""
    found = truth(MODEL, SITES)
    return party(dynamics, reference=fp.Reference(found.mean + shift * found.sd, np.linalg.cholesky(found.cov)))


def fickle(other: Party):
    """Wrong: rotate about the nearer of two centres, chosen for each plan."""

    def round_(party: Party, state, until):
        x = party.reference.to_x(state.a)
        there = eqx.tree_at(lambda s: s.a, state, other.reference.to_a(x))
        moved = honest(other, there, until)
        moved = eqx.tree_at(lambda s: s.a, moved, party.reference.to_a(other.reference.to_x(moved.a)))
        near = jnp.linalg.norm(there.a, axis=-1) < jnp.linalg.norm(state.a, axis=-1)
        return choose(near, moved, honest(party, state, until))

    return round_


@pytest.mark.long
def test_a_reference_that_depends_on_the_state_is_caught():
    one, other = centred(-1.5), centred(1.5)
    comparison = against_truth(looked_at(one))
    assert comparison.exact, str(comparison)
    comparison = against_truth(looked_at(one, fickle(other), ends=(6.0, 12.0)))
    assert np.min(comparison.p) < ALPHA, str(comparison)


@double_precision
def path_integrals(party: Party, going: Callable, until: float) -> np.ndarray:
    """``∫ (f(x(t)) − E f) dt`` of each chain for position and square, along what it kept of its path: (C, 4).

    ``going(t, rounds)`` says which chains go on.
    """
    found, move = truth(MODEL, SITES), party.coordinator.dynamics.flow.move
    state, total, rounds, end = party.state, 0.0, 0, jnp.asarray(until)
    nodes, weights = np.polynomial.legendre.leggauss(8)
    while bool(jnp.any(on := going(state.t, rounds))):
        before, state = state, choose(on, honest(party, state, end), state)
        rounds += 1
        # Plans of one segment: it starts where the chain was, and is kept up to where the chain is.
        length = state.t - before.t
        for node, weight in zip((nodes + 1) / 2, weights / 2, strict=True):
            x = np.asarray(party.reference.to_x(move(before.a, before.v, node * length)[0]))
            u = (x - found.mean) / found.sd
            total = total + weight * np.asarray(length)[:, None] * np.concatenate([u, u**2 - 1], -1)
    return total


def test_stopping_by_rounds_is_caught():
    """Far out the sites object often, and a chain there does not come far in eight rounds."""
    found = truth(MODEL, SITES)
    narrow = fp.Reference(found.mean, 0.6 * np.linalg.cholesky(found.cov))
    start = party(fp.Boomerang(refresh=0.1), reference=narrow)
    names, expected = ["position0", "position1", "square0", "square1"], np.zeros(4)
    by_time = path_integrals(start, lambda t, rounds: t < 4.0, 4.0)
    comparison = t_test(names, by_time, expected)
    assert comparison.exact, str(comparison)
    by_rounds = path_integrals(start, lambda t, rounds: jnp.full(t.shape, rounds < 8), 1e6)
    comparison = t_test(names, by_rounds, expected)
    assert np.min(comparison.p) < ALPHA, str(comparison)
