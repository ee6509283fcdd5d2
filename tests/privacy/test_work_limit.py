"""The public bound of a walk's work, against the ceilings and the passes of walks."""

import jax.numpy as jnp
import numpy as np
import pytest
from tests.privacy.support import a_ledger

import fedpdmc as fp
from fedpdmc._jax.precision import double_precision
from fedpdmc.clocks import envelopes, follow, private_arrivals
from fedpdmc.errors import InputError
from fedpdmc.members.bounded_records import hold_to_bounds, model_of
from fedpdmc.members.private_site import chain_secrets
from fedpdmc.plan import Plan
from fedpdmc.potentials import Quadratic, Sum
from fedpdmc.privacy import budget_planning
from fedpdmc.privacy.budget_planning import cells, most_passes, steepness

N, DIM, RHO, CHAINS = 50, 3, 0.4, 64
FAMILIES = {
    "logistic": (lambda X, y: fp.models.logistic(X, y > 0), {}),
    "poisson": (lambda X, y: fp.models.poisson(X, np.floor(np.abs(y))), {"outcome": (0.0, 9.0), "region": 30.0}),
    "student_t": (lambda X, y: fp.models.student_t(X, y, 3.0, 0.5), {}),
    "linear": (lambda X, y: fp.models.linear(X, y, scale=0.7), {"outcome": (-9.0, 9.0), "region": 30.0}),
    "gaussian_mean": (lambda X, y: fp.models.gaussian_mean(X), {}),
}


def case(tmp_path, family, dynamics, far, seed=0):
    """Records of one sign at the border of their bounds, which attain the public bounds; and plans of one segment."""
    rng = np.random.default_rng(seed)
    make, extra = FAMILIES[family]
    X = np.ones((N, DIM)) / np.sqrt(DIM) + 1e-3 * rng.normal(size=(N, DIM))
    bounds = fp.Bounds(norm=1.0, most_records=N, **extra)
    budget = fp.Budget(4.0, 1e-6, bounds=bounds, on_violation="clip", ledger=a_ledger(tmp_path / "ledger.db"))
    records = hold_to_bounds(make(X, rng.normal(size=N)), budget)
    potential = Sum((records, Quadratic(-20.0 * jnp.eye(DIM), jnp.asarray([3.0, -1.0, 0.5]))))
    a, v = rng.normal(size=(2, CHAINS, DIM))
    a, v = far * a, np.sign(v) if dynamics.unit_speed else v
    horizon = np.full(CHAINS, 0.5)
    reached = np.hypot(a, v) if dynamics.flow.rotating else np.abs(a) + 0.5 * np.abs(v)
    farthest, speed = np.linalg.norm(reached, axis=1), np.linalg.norm(v, axis=1)
    where = reached.max(0)
    steep = steepness(model_of(records), bounds, "replace", np.eye(DIM), where)
    curvature = 20.0 * np.sqrt(DIM)
    control = (curvature, float(np.max(curvature * farthest + np.sqrt(10.25))))
    count = cells(steep, DIM, dynamics.flow.rotating, (RHO, 0.0), control, farthest, speed, horizon)
    return potential, a, v, horizon, count


@double_precision
@pytest.mark.parametrize("dynamics", [fp.ZigZag(), fp.FactorisedBoomerang()])
@pytest.mark.parametrize("family", FAMILIES)
def test_ceilings_rise_by_no_more_than_the_public_bound_says(tmp_path, family, dynamics):
    """``d c (W + E) ≤ ½`` with the very ceilings of a walk, which hold for c; and it is attained within a factor."""
    closest = 0.0
    for far in (0.0, 0.3, 3.0):
        potential, a, v, horizon, count = case(tmp_path / str(far), family, dynamics, far)
        bound = envelopes.evaluate(dynamics, potential, jnp.asarray(a), jnp.asarray(v), jnp.asarray(v)).bound
        c = (horizon / count)[:, None]
        rise = np.maximum(np.asarray(bound.slope), 0.0) * c + 0.5 * np.asarray(bound.curve) * c * c
        size = np.hypot(a, v) if dynamics.flow.rotating else np.abs(v)
        found = DIM * c * (rise + RHO * size)
        assert np.all(found <= 0.5) and np.all(c[:, 0] <= np.asarray(bound.reach))
        closest = max(closest, float(found.max()))
    # Intensities are far below their bound on the whole plan.
    assert closest > (1e-5 if family == "poisson" else 0.005)


@double_precision
@pytest.mark.parametrize("dynamics", [fp.ZigZag(), fp.FactorisedBoomerang()])
@pytest.mark.parametrize("family", ["logistic", "gaussian_mean"])
def test_walks_end_long_before_their_limit(tmp_path, family, dynamics):
    potential, a, v, horizon, count = case(tmp_path, family, dynamics, 3.0)
    plan = Plan(jnp.zeros(CHAINS, int), jnp.asarray(a), jnp.asarray(horizon[:, None]), jnp.asarray(v[:, None]))
    grid = private_arrivals.Grid(*(jnp.asarray(x) for x in private_arrivals.time_grid(horizon, DIM)))
    limit = most_passes(float(count.max()), DIM, 1)
    keys = chain_secrets(b"key", b"points", CHAINS)
    path, excess, slack = follow(dynamics, plan), jnp.asarray(RHO), jnp.asarray(0.0)
    found = private_arrivals.first_below(potential, dynamics, excess, slack, grid, path, keys, jnp.asarray(limit))
    assert np.all(np.asarray(found.fault) == 0) and int(found.passes) < 4 * (8 * float(count.max()) + 40 * DIM)
    # One pass is too few, and is a fault.
    short = private_arrivals.first_below(potential, dynamics, excess, slack, grid, path, keys, jnp.asarray(1))
    assert np.any(np.asarray(short.fault) == private_arrivals.TOO_LONG)


def test_constants_are_those_of_the_walk():
    assert budget_planning.SLOWEST == private_arrivals.SLOWEST
    assert budget_planning.POSITION_SLACK == envelopes.POSITION_SLACK


def test_a_probability_below_that_of_a_walk_that_is_cut_short_is_no_delta():
    with pytest.raises(InputError, match="delta"):
        fp.Budget(1.0, 1e-60)
