"""In one process silent events are remembered, and undone beyond a cut; sites on a network repeat them instead."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from tests.statistical.test_private_latents import NonCentred, prior, sites

import fedpdmc as fp
from fedpdmc.clocks import LatentClock
from fedpdmc.members import run_coordinates


class Repeats(LatentClock):
    """As on a network."""

    history = 0


class RemembersOne(LatentClock):
    """Waits as often as possible."""

    history = 1


class NeverWaits(RemembersOne):
    """Wrong: forgets events that may have to be undone."""

    def step(self, state, path, keys):
        """As if no site could have an event any more."""
        return super().step(state, dataclasses.replace(path, floor=jnp.full_like(path.floor, jnp.inf)), keys)


class NeverUndone(LatentClock):
    """Wrong: what was walked beyond the cut counts."""

    def cut(self, state, elapsed, which):
        """The latents at the end of the walk."""
        return jnp.where(which[:, None], state.zeta, state.settled)


class LosesTheLast(LatentClock):
    """Wrong: the last event is undone even if it is before the cut."""

    def cut(self, state, elapsed, which):
        """One event too few."""
        return super().cut(state, jnp.minimum(elapsed, state.times[:, 0]), which)


def drawn(monkeypatch, clock):
    """Draws of the parameters and of all effects, of sites that cut each other's plans most of the time."""
    monkeypatch.setattr(run_coordinates, "LatentClock", clock)
    owners = sites(NonCentred, crowded=True)
    post = fp.sample(owners, prior(), chains=32, duration=6.0, burn_in=1.0, seed=4, progress=False)
    return post.draws(20), np.concatenate([site.latent_posterior().z for site in owners], -1)


@pytest.mark.filterwarnings("ignore:The posterior is far from its reference", "ignore:NOT converged")
@pytest.mark.parametrize(
    ("clock", "same"),
    [
        (RemembersOne, True),
        pytest.param(LatentClock, True, marks=pytest.mark.long),
        pytest.param(NeverWaits, False, marks=pytest.mark.long),
        pytest.param(NeverUndone, False, marks=pytest.mark.long),
        pytest.param(LosesTheLast, False, marks=pytest.mark.long),
    ],
)
def test_remembered_events_are_those_that_are_repeated(monkeypatch, clock, same):
    right, found = drawn(monkeypatch, Repeats), drawn(monkeypatch, clock)
    equal = all(np.allclose(one, other, rtol=1e-7, atol=1e-9) for one, other in zip(right, found, strict=True))
    assert equal == same
