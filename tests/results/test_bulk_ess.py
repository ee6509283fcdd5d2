"""The bulk effective sample size is ArviZ's."""

import numpy as np
import pytest

from fedpdmc.console.warnings import import_arviz
from fedpdmc.results.diagnostics import bulk_ess


def draws(chains, n, kind):
    """Autocorrelated, skewed draws of chains that do not quite agree; with ties, or alternating."""
    rng = np.random.default_rng(chains + n)
    noise, x = rng.normal(size=(chains, n)), np.zeros((chains, n))
    phi = -0.6 if kind == "alternating" else 0.8
    for t in range(1, n):
        x[:, t] = phi * x[:, t - 1] + noise[:, t]
    x = np.exp(0.5 * x) + 0.3 * rng.normal(size=(chains, 1))
    return np.round(x, 1) if kind == "ties" else x


@pytest.mark.parametrize("kind", ["smooth", "ties", "alternating"])
@pytest.mark.parametrize(("chains", "n"), [(4, 500), (64, 21), (1, 64), (3, 7), (2, 4)])
def test_it_is_that_of_arviz(chains, n, kind):
    values = draws(chains, n, kind)
    wanted = float(import_arviz().ess(values))
    np.testing.assert_allclose(bulk_ess(values), wanted, rtol=1e-9)
    if n >= 64:
        # Draws in another order have another size.
        shuffled = values[:, np.random.default_rng(0).permutation(n)]
        assert abs(bulk_ess(shuffled) - wanted) > 0.01 * wanted


def test_nothing_is_said_of_draws_that_cannot_be_judged():
    assert np.isnan(bulk_ess(np.zeros((4, 3)))) and np.isnan(bulk_ess(np.array([[1.0, np.inf, 2.0, 3.0]])))
    assert bulk_ess(np.ones((4, 10))) == 40
