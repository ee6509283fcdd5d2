"""Records with a part of the prior that differs between chains."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.support import predictor

import fedpdmc as fp
from fedpdmc.potentials import PriorShare, Sum

pytestmark = pytest.mark.usefixtures("double")

WEIGHTS = jnp.array([0.0, 0.3, 1.0])


def test_value_and_field_belong_to_each_chains_weight():
    records, prior = predictor("logistic", n=12, d=3), fp.models.normal_prior(3, mean=0.5, scale=2.0)
    shared = Sum((records, PriorShare(prior))).with_share(WEIGHTS)
    x = jnp.array([0.4, -1.2, 0.7])
    np.testing.assert_allclose(shared.value(x), records.value(x) + WEIGHTS * prior.value(x))
    a, v = jnp.tile(x, (3, 1)), jnp.ones((3, 3))
    field = shared.field(False, True, a, v)
    gradients = jax.jacobian(shared.value)(x)
    np.testing.assert_allclose(field.gradient, gradients, rtol=1e-12)
    slopes = jax.jvp(jax.jacobian(shared.value), (x,), (jnp.ones(3),))[1]
    np.testing.assert_allclose(field.slope, slopes, rtol=1e-10, atol=1e-12)


def test_without_a_plan_it_has_no_weights():
    shared = Sum((predictor("logistic", n=12, d=3), PriorShare(fp.models.normal_prior(3))))
    with pytest.raises(ValueError, match="weights of a plan"):
        shared.value(jnp.zeros(3))
