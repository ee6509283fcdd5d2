"""The first difference of two paths, the rest of a path, and the rule that decides who is asked."""

import jax.numpy as jnp
import numpy as np
import pytest

import fedpdmc as fp
from fedpdmc.clocks import Path
from fedpdmc.plan import Arrival
from fedpdmc.sampling.engines.one_round import LastRequest, decide, first_difference, path_since

pytestmark = pytest.mark.usefixtures("double")


def line(*legs, start=0.0, number=0):
    """A path of one coordinate from (velocity, duration) pairs, for one chain."""
    velocity, duration = (np.array(x, float) for x in zip(*legs, strict=True))
    begin = np.concatenate([[0.0], np.cumsum(duration)[:-1]])
    at = start + np.concatenate([[0.0], np.cumsum(velocity * duration)[:-1]])
    shape = (1, len(legs), 1)
    return Path(
        jnp.array([number]), jnp.asarray(at.reshape(shape)), jnp.asarray(velocity.reshape(shape)),
        jnp.asarray(begin[None]), jnp.asarray(duration[None]),
    )  # fmt: skip


def chain(*x):
    return jnp.array(x, float)


@pytest.mark.parametrize(
    ("old", "lead", "new", "sigma"),
    [
        (((1, 5),), 0.0, ((1, 3), (1, 2)), np.inf),
        (((1, 5),), 0.0, ((-1, 5),), 0.0),
        (((1, 5),), -2.0, ((1, 1), (-1, 2)), 1.0),
        (((1, 3), (-1, 2)), -1.0, ((1, 4),), 2.0),
        (((1, 3), (-1, 2)), -1.0, ((1, 2), (-1, 2)), np.inf),
        (((1, 3), (-1, 2)), -4.0, ((-1, 1),), np.inf),
        (((1, 1), (-1, 4)), -1.0, ((-1, 4),), np.inf),
    ],
)
def test_first_difference(old, lead, new, sigma):
    np.testing.assert_array_equal(first_difference(line(*old), chain(lead), line(*new)), [sigma])


def test_the_rest_of_a_path_starts_where_it_should():
    rest = path_since(fp.ZigZag(), line((1, 2), (-1, 3), (1, 1), start=0.5), chain(2.5))
    np.testing.assert_array_equal(rest.start[0, :2, 0], [2.0, -0.5])
    np.testing.assert_array_equal(rest.velocity[0, :2, 0], [-1.0, 1.0])
    np.testing.assert_array_equal(rest.duration, [[2.5, 1.0, 0.0]])
    np.testing.assert_array_equal(rest.begin, [[0.0, 2.5, 3.5]])


@pytest.mark.parametrize(
    ("time", "rang", "ask", "since"),
    [
        (1.5, True, False, None),  # before the difference at 2: it stands
        (2.5, True, True, 2.0),  # after it: known to be silent up to 2
        (4.0, False, True, 2.0),
    ],
)
def test_an_arrival_stands_if_it_comes_by_the_first_difference(time, rang, ask, since):
    old, new = line((1, 4)), line((1, 2), (-1, 3))
    request = LastRequest(old, chain(0.0), old, chain(0.0))
    asked, found = decide(request, Arrival(chain(time), jnp.array([rang]), jnp.array([0])), new, chain(5.0))
    assert bool(asked[0]) is ask
    if since is not None:
        np.testing.assert_array_equal(found, [since])


def test_a_site_is_asked_from_where_its_path_ended_and_not_at_all_if_nothing_is_left():
    old, new = line((1, 4)), line((1, 9))
    request = LastRequest(old, chain(-1.0), old, chain(0.0))
    silent = Arrival(chain(4.0), jnp.array([False]), jnp.array([0]))
    ask, since = decide(request, silent, new, chain(9.0))
    assert bool(ask[0]) and float(since[0]) == 3.0
    assert not bool(decide(request, silent, new, chain(3.0))[0][0])


def test_silence_that_was_learnt_before_is_not_forgotten():
    """Asked from 3 on, a site whose path then changes at 1 is asked from 1, and one whose path stays is not asked again."""
    path = line((1, 3), (-1, 2))
    request = LastRequest(path, chain(-0.5), path_since(fp.ZigZag(), path, chain(3.0)), chain(3.0))
    arrival = Arrival(chain(0.7), jnp.array([True]), jnp.array([0]))
    ask, _ = decide(request, arrival, line((1, 2.5), (-1, 2)), chain(4.5))
    assert not bool(ask[0])
    ask, since = decide(request, arrival, line((1, 1), (-1, 3.5)), chain(4.5))
    assert bool(ask[0]) and float(since[0]) == 1.0
