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
        sites, prior, dynamics=fp.ZigZag(), reference="identity", chains=CHAINS, duration=1.5, burn_in=0.0, seed=5,
        progress=False, **options,
    )  # fmt: skip


def test_a_log_hears_every_round():
    heard = []
    post = sample(members(lambda *both: heard.append(both)), fp.Redistributed(fp.models.normal_prior(DIM), 0.5))
    assert len(heard) == post.rounds > 10 and post.privacy is None
    for plan, arrival in heard:
        assert plan.start.shape == (CHAINS, DIM) and isinstance(plan.start, np.ndarray)
        assert plan.share.shape == (CHAINS,) and np.all((0 < plan.share) & (plan.share < 1))
        assert np.all(arrival.mark[~arrival.rang] == -1) and set(arrival.mark[arrival.rang]) <= {0, 1}
        assert np.all(arrival.time <= plan.horizon)
    # The path of a chain starts its pieces where the site was asked from.
    path = post.skeleton
    starts = np.array([plan.start[0] for plan, _ in heard if plan.horizon[0] > 0])
    for knot in path.a[path.offsets[0] : path.offsets[1]]:
        assert np.abs(starts - knot).max(1).min() < 1e-12


@pytest.mark.long
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
