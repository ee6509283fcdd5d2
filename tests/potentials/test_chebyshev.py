"""Polynomials by their values at Chebyshev nodes."""

import jax.numpy as jnp
import numpy as np
import pytest

from fedpdmc.potentials.chebyshev import bernstein_basis, chebyshev_nodes, interpolant, to_bernstein, to_coefficients

pytestmark = pytest.mark.usefixtures("double")


@pytest.mark.parametrize("count", [1, 2, 8, 12])
def test_polynomials_are_recovered_and_lie_below_their_bernstein_coefficients(count):
    rng = np.random.default_rng(count)
    polynomials = [np.polynomial.Polynomial(rng.normal(size=count)) for _ in range(5)]
    values = np.stack([p(0.5 * (chebyshev_nodes(count) + 1)) for p in polynomials], 1)
    u, parts = np.linspace(0, 1, 61), 6
    corners = to_bernstein(count, parts) @ values
    for column, p in enumerate(polynomials):
        found = interpolant(jnp.asarray(np.repeat(values[:, [column]], len(u), 1)), jnp.asarray(u))
        np.testing.assert_allclose(found, p(u), atol=1e-12)
        for part in range(parts):
            inside = bernstein_basis(u, count - 1) @ corners[part, :, column]
            np.testing.assert_allclose(inside, p((part + u) / parts), atol=1e-11)
            assert np.all(inside <= corners[part, :, column].max() + 1e-12)


def test_coefficients_are_those_of_numpy():
    nodes = chebyshev_nodes(7)
    expected = np.polynomial.chebyshev.chebfit(nodes, np.exp(nodes), 6)
    np.testing.assert_allclose(to_coefficients(7) @ np.exp(nodes), expected, atol=1e-13)
