"""Certified bounds of twelve models lie above their rates at random points of random paths."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.support import DYNAMICS
from tests.zoo import CASES

import fedpdmc as fp
from fedpdmc.clocks.envelopes import signed_rates
from fedpdmc.clocks.thinning import CELLS, time_polynomial
from fedpdmc.potentials import local_quadratic

ANCHORS, TIMES = 500, 20


@functools.cache
def whitened(name, controlled):
    """The records of the first site in coordinates of about the posterior's scale, less a quadratic or whole."""
    case = CASES[name]
    potential = fp.Site(case.likelihood, data=case.sites()[0], name="own", coordinates=range(case.dim)).potential
    hessian = np.asarray(jax.hessian(case.potential)(jnp.asarray(case.start)))
    values, vectors = np.linalg.eigh(hessian)
    scale = vectors / np.sqrt(np.maximum(np.abs(values), 0.05))
    if controlled:
        potential = potential.less(local_quadratic(potential, jnp.asarray(case.start), 2))
    return potential.whiten(fp.Reference(jnp.asarray(case.start), jnp.asarray(scale)), None)


def anchors(rng, count, dim, unit_speed):
    """In the bulk and far out, slow and fast."""
    a = rng.choice([0.3, 1.0, 2.5], (count, 1)) * rng.normal(size=(count, dim))
    v = rng.choice([0.3, 1.0, 2.0], (count, 1)) * rng.normal(size=(count, dim))
    return jnp.asarray(a), jnp.asarray(np.where(v < 0, -1.0, 1.0) if unit_speed else v)


def excess_function(potential, dynamics):
    """Of anchors and parts of an interval: rates less their bounds and less their tangents, and which are bounded."""
    curves, usual, _ = time_polynomial(potential, dynamics)

    @jax.jit
    def excess(a, v, part):
        length = jnp.broadcast_to(usual, a.shape[:1])
        curve = curves.along(potential, dynamics, a.T, v.T, length)
        tops, known = curve.ceilings(CELLS), jnp.isfinite(curve.candidates_of_error)
        s = part * length

        def rates(s):
            there, velocity = dynamics.flow.move(a, v, s)
            if dynamics.flips:
                return signed_rates(dynamics, potential.gradients(there), velocity)
            return potential.speeds(there, velocity)

        value, slope = jax.jvp(rates, (jnp.zeros(a.shape[0]),), (jnp.ones(a.shape[0]),))

        def at(s):
            here, time = rates(s), s[:, None]
            cell = jnp.minimum(s / length * CELLS, CELLS - 1).astype(int)
            top = jnp.take_along_axis(tops, cell[None, None], 0)[0].T
            return here - top, here - value - slope * time, known

        return jax.lax.map(at, s)

    return excess


def check(name, kind, batches):
    """So many batches of ten thousand points."""
    dynamics, case = DYNAMICS[kind], CASES[name]
    excess = excess_function(whitened(name, dynamics.flow.rotating), dynamics)
    rng, bent, worst = np.random.default_rng(1), 0, -np.inf
    for _ in range(batches):
        a, v = anchors(rng, ANCHORS, case.dim, dynamics.unit_speed)
        above, above_tangent, known = (np.asarray(x) for x in excess(a, v, jnp.asarray(rng.random((TIMES, ANCHORS)))))
        assert np.mean(known) > 0.5
        worst = max(worst, float(np.max(above[known])))
        bent += int(np.sum(np.asarray(above_tangent) > 0))
    assert worst <= 0, f"a rate lies {worst:.3g} above its bound"
    # Tangents are no bounds: else the points were too tame to tell.
    assert bent > 0.02 * batches * ANCHORS * TIMES


@pytest.mark.long
def test_bounds_lie_above_rates_at_ten_thousand_points(double):
    check("banana", "boomerang", 1)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["zigzag", "boomerang"])
@pytest.mark.parametrize("name", CASES)
def test_bounds_lie_above_rates_at_a_million_points(name, kind, double):
    check(name, kind, 100)
