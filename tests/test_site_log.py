"""A site's log holds what passes between it and the coordinator, and changes nothing."""

import numpy as np
import pytest

import fedpdmc as fp
from fedpdmc.errors import InputError

CHAINS, SITES, DIM = 6, 3, 2
y = np.random.default_rng(3).normal(0.7, 1.0, (12, DIM))


def members(log=None):
    parts = np.split(y, SITES)
    return [
        fp.Site(fp.models.gaussian_mean(part), name=f"site{k}", log=log if k == 1 else None)
        for k, part in enumerate(parts)
    ]


def sample(sites, prior, **options):
    return fp.sample(
        sites, prior, dynamics=fp.ZigZag(), chains=CHAINS, duration=1.5, burn_in=0.0, seed=5, progress=False, **options
    )


@pytest.mark.parametrize("redistributed", [False, True])
def test_a_log_hears_every_round_and_changes_no_bit(redistributed):
    heard = []
    prior = fp.models.normal_prior(DIM)
    prior = fp.Redistributed(prior, 0.5) if redistributed else prior
    quiet, loud = sample(members(), prior), sample(members(lambda *both: heard.append(both)), prior)
    np.testing.assert_array_equal(loud.skeleton.numbers, quiet.skeleton.numbers)
    assert len(heard) == loud.rounds > 10 and loud.privacy is None
    for plan, arrival in heard:
        assert plan.start.shape == (CHAINS, DIM) and isinstance(plan.start, np.ndarray)
        assert np.all(arrival.mark[~arrival.rang] == -1) and set(arrival.mark[arrival.rang]) <= {0, 1}
        assert np.all(arrival.time <= plan.horizon)
        if redistributed:
            assert plan.share.shape == (CHAINS,) and np.all((0 < plan.share) & (plan.share < 1))
        else:
            assert plan.share is None


def test_a_log_of_some_coordinates_holds_only_them():
    heard = []
    sites = [
        fp.Site(fp.models.gaussian_mean(y[:6, :1]), name="first", coordinates=[0]),
        fp.Site(
            fp.models.gaussian_mean(y[:, 1:]), name="second", coordinates=[1], log=lambda *both: heard.append(both)
        ),
    ]
    sample(sites, None)
    assert {plan.start.shape for plan, _ in heard} == {(CHAINS, 1)}
    # Its marks are among its own coordinates.
    assert {int(mark) for _, arrival in heard for mark in arrival.mark[arrival.rang]} == {0}


def test_a_log_must_be_a_function():
    with pytest.raises(InputError, match="log"):
        fp.Site(fp.models.gaussian_mean(y), name="one", log="log.txt")
