"""Dense clocks of unequal sites are stacked, and know the rates that each of them has alone."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.support import LOSS_NAMES, predictor

import fedpdmc as fp
from fedpdmc.clocks import dense
from fedpdmc.clocks.dense import SMALL_BLOCK, Setting, dense_clocks

pytestmark = pytest.mark.usefixtures("double")
SIZES, DIM, CHAINS = (150, 3, 70), 3, 5
SETTING = Setting(6, 6, 1, 0.0)


def sites(name, weighted=True):
    made = [predictor(name, seed=k, n=n, d=DIM, scale=0.25) for k, n in enumerate(SIZES)]
    made = made if weighted else [dataclasses.replace(one, weight=None) for one in made]
    return [site.expanded_at(jnp.asarray([0.1, -0.2, 0.05]), 2) for site in made]


def curves_of(clocks):
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *(clock.curves for clock in clocks))
    rng = np.random.default_rng(7)
    a, v = (jnp.asarray(rng.standard_normal((DIM, CHAINS))) for _ in range(2))
    return stacked.along(None, None, a, v, jnp.full(CHAINS, np.pi / 2))


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "poisson" else pytest.mark.long) for n in LOSS_NAMES]
)
def test_stacked_sites_have_the_curves_that_each_has_alone(name):
    potentials = sites(name)
    together = dense_clocks(potentials, fp.Boomerang(), SETTING, 1024)
    assert len({jax.tree.structure(clock) for clock in together}) == 1
    assert [int(clock.curves.filled) for clock in together] == [-(-n // SMALL_BLOCK) for n in SIZES]
    found = curves_of(together)
    for k, potential in enumerate(potentials):
        alone = curves_of(dense_clocks([potential], fp.Boomerang(), SETTING, 1024))
        assert np.all(np.abs(found.values[k] - alone.values[0]) <= found.error[k] + alone.error[0])
        np.testing.assert_allclose(found.error[k], alone.error[0], rtol=0.2)
        size = np.abs(found.values[k]).max()
        assert size > 1e-5 and np.abs(found.values[k] - alone.values[0]).max() < 1e-3 * size
        x = jnp.asarray(np.random.default_rng(k).standard_normal((4, DIM)))
        np.testing.assert_allclose(together[k].potential.gradients(x), potential.gradients(x), rtol=1e-9, atol=1e-12)


def test_a_block_that_is_not_counted_is_missed():
    clocks = dense_clocks(sites("logistic", weighted=False), fp.Boomerang(), SETTING, 1024)
    right = curves_of(clocks)
    first = dataclasses.replace(clocks[0].curves, filled=clocks[0].curves.filled - 1)
    wrong = curves_of([dataclasses.replace(clocks[0], curves=first), *clocks[1:]])
    assert np.any(np.abs(right.values[0] - wrong.values[0]) > right.error[0])
    np.testing.assert_array_equal(right.values[1:], wrong.values[1:])


def test_sites_that_padding_would_make_too_large_keep_their_shapes(monkeypatch):
    monkeypatch.setattr(dense, "FEW_STACKED", 100)
    monkeypatch.setattr(dense, "MOST_STACKED", 2)
    clocks = dense_clocks(sites("logistic"), fp.Boomerang(), SETTING, 1024)
    assert [clock.potential.design.shape[0] for clock in clocks] == [150, 3, 70]
    monkeypatch.setattr(dense, "MOST_STACKED", 3)
    clocks = dense_clocks(sites("logistic"), fp.Boomerang(), SETTING, 1024)
    assert [clock.potential.design.shape[0] for clock in clocks] == [150] * 3
