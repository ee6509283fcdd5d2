"""The error of the curves is proved; here it is attacked with exact arithmetic, far out, and with its parts left out."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest
from tests.support import DYNAMICS, LOSS_NAMES, predictor

from fedpdmc.clocks import thinning
from fedpdmc.clocks.choose import third_order
from fedpdmc.clocks.dense import NODES, PARTS
from fedpdmc.potentials import dense_rates
from fedpdmc.potentials.chebyshev import chebyshev_nodes
from fedpdmc.potentials.dense_rates import (
    FITTED,
    LEBESGUE,
    ROOM,
    _product,
    blocking,
    cosine_and_sine,
    ellipses,
    exponential,
    interpolated_curves,
    logistic_curves,
    majorant,
    summands,
)
from fedpdmc.potentials.losses import Logistic

pytestmark = pytest.mark.usefixtures("double")
QUARTER = math.pi / 2
RECORDS, DIM, CHAINS = 20, 3, 6
# Of a state, and of the length of a piece: usual ones, far ones, tiny ones.
STATES = [(1.0, QUARTER), (6.0, 0.3), (1e-6, QUARTER)]
KINDS = [
    *((name, 6, 6) for name in LOSS_NAMES),
    ("logistic", 5, 5), ("poisson", 7, 6), ("logistic", 10, 8), ("logistic", 0, 8), ("logistic", 0, 12),
]  # fmt: skip


def records(name, offset=0.0, exact=True, weighted=True):
    """Records with a control variate: their Taylor polynomial, or any other quadratic."""
    potential = predictor(name, seed=3, n=RECORDS, d=DIM, scale=0.25)
    weight = potential.weight if weighted else None
    potential = dataclasses.replace(potential, offset=potential.offset + offset, weight=weight)
    controlled = potential.expanded_at(jnp.asarray([0.1, -0.2, 0.05]), 2)
    if exact:
        return controlled
    return dataclasses.replace(controlled, control=controlled.control * jnp.asarray([1.0, 0.97, 1.1])[:, None] + 0.01)


def curves_of(potential, degree, nodes, wide=False, length=QUARTER):
    shape = blocking(RECORDS, wide, CHAINS)
    made = (
        interpolated_curves(potential, degree, nodes, length, shape, wide) if degree
        else logistic_curves(potential, nodes, length, shape, wide)
    )  # fmt: skip
    return jax.tree.map(lambda x: x[None], made)


def true_rate(potential, name, a, v, t):
    """``d/dt R(a(t))`` to 40 digits."""
    with mpmath.workdps(40):
        a, v, t = [mpmath.mpf(float(x)) for x in a], [mpmath.mpf(float(x)) for x in v], mpmath.mpf(float(t))
        total = mpmath.mpf(0)
        weight = np.ones(RECORDS) if potential.weight is None else potential.weight
        columns = zip(potential.design, potential.offset, potential.response, weight, *potential.control, strict=True)
        for xi, o, y, w, point, slope, curvature in columns:
            xi = [mpmath.mpf(float(x)) for x in xi]
            o, y, w, point, slope, curvature = (mpmath.mpf(float(x)) for x in (o, y, w, point, slope, curvature))
            alpha, beta = mpmath.fdot(xi, a), mpmath.fdot(xi, v)
            z = o + alpha * mpmath.cos(t) + beta * mpmath.sin(t)
            if name == "logistic":
                first = 1 / (1 + mpmath.exp(-z)) - y
            elif name == "poisson":
                first = mpmath.exp(z) - y
            else:
                df, scale = mpmath.mpf("3.5"), mpmath.mpf(float(potential.loss.scale))
                r = (z - y) / scale
                first = (df + 1) * r / (df + r * r) / scale
            total += (w * first - slope - curvature * (z - point)) * (beta * mpmath.cos(t) - alpha * mpmath.sin(t))
        return float(total)


def misfit(potential, name, curves, spread, length, seed=5, times=4):
    """The largest ``|f − P|/E`` at random times, and the largest error."""
    rng = np.random.default_rng(seed)
    a, v = spread * rng.normal(size=(2, DIM, CHAINS))
    found = curves.along(potential, DYNAMICS["boomerang"], jnp.asarray(a), jnp.asarray(v), jnp.full(CHAINS, length))
    nodes = found.values.shape[1]
    fit = np.polynomial.chebyshev.chebfit(chebyshev_nodes(nodes), np.asarray(found.values[0]), nodes - 1)
    worst = 0.0
    for t in length * rng.random(times):
        p = np.polynomial.chebyshev.chebval(2 * t / length - 1, fit)
        f = [true_rate(potential, name, a[:, k], v[:, k], t) for k in range(CHAINS)]
        worst = max(worst, float(np.max(np.abs(p - f) / np.asarray(found.error[0]))))
    return worst, float(np.max(found.error))


@pytest.mark.parametrize(("spread", "length"), STATES)
@pytest.mark.parametrize(("name", "degree", "nodes"), KINDS)
def test_the_rate_is_within_the_error(name, degree, nodes, spread, length):
    potential = records(name, exact=nodes != 12, weighted=degree > 0)
    worst, error = misfit(potential, name, curves_of(potential, degree, nodes), spread, length)
    assert worst <= 1.0
    assert error < 0.5 or spread > 1.0 or name != "logistic"


def third_of(potential, **changed):
    made = third_order(potential, jnp.asarray([0.1, -0.2, 0.05]))
    made = dataclasses.replace(made, remainder=dataclasses.replace(made.remainder, **changed))
    return jax.tree.map(lambda x: x[None], made)


@pytest.mark.parametrize(("spread", "length"), STATES)
@pytest.mark.parametrize("name", LOSS_NAMES)
@pytest.mark.parametrize("exact", [True, False])
def test_the_rate_of_third_order_is_within_its_error(name, exact, spread, length):
    potential = records(name, exact=exact)
    worst, error = misfit(potential, name, third_of(potential), spread, length)
    assert worst <= 1.0
    assert error < 5.0 or spread > 1.0 or name != "logistic"


def test_without_what_follows_the_third_order_its_error_is_too_small():
    potential = records("logistic")
    assert misfit(potential, "logistic", third_of(potential, quartic=jnp.zeros(())), 1.0, QUARTER)[0] > 1.0


def test_the_error_of_an_interpolant_through_more_nodes_is_too_small(monkeypatch):
    # Almost nothing follows the third order, and a quadratic is left beside the records.
    potential = records("logistic", exact=False)
    potential = dataclasses.replace(potential, design=1e-3 * potential.design)
    made = third_of(potential)

    class Coarse:
        def along(self, *args):
            fine = made.along(*args)
            with monkeypatch.context() as patched:
                patched.setattr(thinning, "CUBIC_NODES", 4)
                return made.along(*args)._replace(error=fine.error)

    assert misfit(potential, "logistic", made, 1.0, QUARTER)[0] <= 1.0
    assert misfit(potential, "logistic", Coarse(), 1.0, QUARTER)[0] > 1.0


@pytest.mark.parametrize("offset", [-90.0, -20.0, 8.0, 60.0])
@pytest.mark.parametrize("degree", [0, 8])
def test_the_rate_is_within_the_error_where_predictors_are_large(degree, offset):
    potential = records("logistic", offset, weighted=degree > 0)
    worst, _ = misfit(potential, "logistic", curves_of(potential, degree, 8), 1.5, QUARTER)
    assert worst <= 1.0


@pytest.mark.parametrize("columns", [0, dense_rates.FEW_COLUMNS])
@pytest.mark.parametrize(("name", "degree"), [("logistic", 0), ("poisson", 6)])
def test_the_sums_of_a_gpu_are_within_the_error_too(name, degree, columns, monkeypatch):
    monkeypatch.setattr(dense_rates, "FEW_COLUMNS", columns)
    potential = records(name, weighted=degree > 0)
    worst, _ = misfit(potential, name, curves_of(potential, degree, 8, wide=True), 1.0, QUARTER)
    assert worst <= 1.0


@pytest.mark.parametrize("chains", [2, 4])
@pytest.mark.parametrize(("name", "degree"), [("logistic", 0), ("poisson", 6)])
def test_chains_in_parts_have_the_curves_of_all_together(name, degree, chains, monkeypatch):
    potential = records(name, weighted=degree > 0)
    curves = curves_of(potential, degree, 8)
    two_sites = jax.tree.map(lambda x: jnp.concatenate([x, 0.5 * x if x.dtype.kind == "f" else x]), curves)
    a, v = np.random.default_rng(6).normal(size=(2, DIM, CHAINS))
    args = None, None, jnp.asarray(a), jnp.asarray(v), jnp.linspace(0.1, QUARTER, CHAINS)
    together = two_sites.along(*args)
    monkeypatch.setattr(dense_rates, "CHAINS", chains)
    in_parts = two_sites.along(*args)
    np.testing.assert_allclose(in_parts.values, together.values, atol=1e-5)
    np.testing.assert_allclose(in_parts.error, together.error, rtol=1e-5)
    assert misfit(potential, name, curves, 1.0, QUARTER)[0] <= 1.0


@pytest.mark.parametrize(("degree", "nodes", "spread"), [(0, 6, 4.0), (12, 4, 1.5)])
def test_an_error_of_a_shorter_piece_is_too_small(degree, nodes, spread):
    """The error is that of the longest piece."""
    potential = records("logistic", weighted=degree > 0)
    long, short = (curves_of(potential, degree, nodes, length=length) for length in (QUARTER, QUARTER / 4))
    assert misfit(potential, "logistic", long, spread, QUARTER)[0] <= 1.0
    assert misfit(potential, "logistic", short, spread, QUARTER)[0] > 1.0
    assert misfit(potential, "logistic", short, spread, QUARTER / 4)[0] <= 1.0


@pytest.mark.parametrize("dim", [3, 31, 70, 100])
def test_products_in_parts_are_within_their_rounding(dim):
    rng = np.random.default_rng(dim)
    rows, both = (rng.normal(size=shape).astype(np.float32) for shape in ((40, dim), (dim, 64)))
    found = np.asarray(_product(jnp.asarray(rows), jnp.asarray(both)), np.float64)
    size = np.linalg.norm(rows.astype(float), axis=1)[:, None] * np.linalg.norm(both.astype(float), axis=0)
    off = np.max(np.abs(found - rows.astype(float) @ both.astype(float)) / size)
    assert off <= (summands(dim) - 6) * 2.0**-24
    assert summands(dim) <= min(dim, 32 + dim // 32) + 6


def test_the_exponential_is_within_ten_units_of_roundoff():
    x = np.concatenate([np.linspace(-87, 87, 200_001), np.linspace(-1e-3, 1e-3, 2001)]).astype(np.float32)
    found = np.asarray(jax.jit(exponential)(jnp.asarray(x)), np.float64)
    assert np.max(np.abs(found / np.exp(x.astype(np.float64)) - 1)) <= 10 * 2.0**-24


def test_cosine_and_sine_are_exact_to_the_last_places():
    angle = np.linspace(0, QUARTER, 10_001)
    cos, sin = cosine_and_sine(jnp.asarray(angle))
    assert np.max(np.abs(cos - np.cos(angle))) < 4e-16
    assert np.max(np.abs(sin - np.sin(angle))) < 4e-16


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("nodes", NODES)
def test_the_majorant_is_above_the_ellipses_everywhere(nodes, parts):
    r = np.concatenate([np.linspace(0, 2 * FITTED, 9973), np.geomspace(1e-9, 1e4, 997)])
    bound, powers = ellipses(r, nodes, QUARTER / parts), np.asarray(majorant(nodes, QUARTER / parts))
    found = np.polynomial.Polynomial(powers)(r**2)
    assert np.all(powers >= 0) and np.all(found >= bound)
    # Far out, where the ellipses of many nodes are still below half the range of the rate.
    far = np.geomspace(FITTED, 1e6, 997)
    assert np.all(np.polynomial.Polynomial(powers)(far**2) >= ROOM * 0.5 * (1 + LEBESGUE) * far)
    usual = (r > 0.3) & (r < 3)
    assert np.all(found[usual] <= 1.4 * bound[usual] + 1e-8)


@pytest.mark.parametrize(("nodes", "parts"), [(4, 1), (8, 1), (10, 2), (12, 1)])
def test_the_interpolant_of_one_record_is_within_its_ellipse(nodes, parts):
    """Of any amplitude, phase and offset, in exact numbers at the worst of many times; and not ten thousand times within."""
    length, worst = QUARTER / parts, 0.0
    x, rng = chebyshev_nodes(nodes), np.random.default_rng(nodes)
    for r in (0.2, 1.0, 2.5, 6.0, 15.0):
        for z, phase in zip(rng.normal(size=12) * r, rng.uniform(0, 2 * math.pi, 12), strict=True):

            def rate(t, r=r, z=z, phase=phase):
                return -0.5 * np.tanh(0.5 * (z + r * np.cos(t - phase))) * r * np.sin(t - phase)

            fit = np.polynomial.chebyshev.chebfit(x, rate(0.5 * length * (x + 1)), nodes - 1)
            s = np.linspace(-1, 1, 201)
            off = np.abs(np.polynomial.chebyshev.chebval(s, fit) - rate(0.5 * length * (s + 1))).max()
            bound = float(ellipses(np.array([r]), nodes, length)[0])
            assert off <= bound + 1e-13
            worst = max(worst, off / bound)
    assert worst > 0.02


@pytest.mark.parametrize("order", [3, 4, 5, 9])
def test_high_derivatives_of_the_logistic_loss_are_below_their_bound(order):
    z = np.linspace(-8, 8, 81)
    with mpmath.workdps(40):
        largest = max(abs(mpmath.diff(lambda u: 1 / (1 + mpmath.exp(-u)), x, order - 1)) for x in z)
    assert 0.5 * Logistic.highest(order) <= float(largest) <= Logistic.highest(order)
