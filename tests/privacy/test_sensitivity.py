import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import fedpdmc as fp
from fedpdmc._jax.precision import double_precision
from fedpdmc.clocks.private_arrivals import SLOWEST, time_grid
from fedpdmc.errors import InputError
from fedpdmc.members.bounded_records import model_of
from fedpdmc.privacy.sensitivity import ModelFacts, derivative_sensitivity, limits, sensitivity

D, BOX, RANGE, REGION = 3, np.array([1.0, 0.5, 2.0]), (-1.0, 3.0), np.array([2.0, 1.0, 1.5])
BOUNDS = fp.Bounds(box=BOX, outcome=RANGE, region=REGION, offset=(0.0, 0.7))
COUNTS = fp.Bounds(box=BOX, outcome=(0, 6), region=REGION, offset=(0.0, 0.7))
MODELS = {
    "logistic": (lambda X, y: fp.models.logistic(X, y > 1), BOUNDS),
    "student_t": (lambda X, y: fp.models.student_t(X, y, 3.5, 0.6), BOUNDS),
    "linear": (lambda X, y: fp.models.linear(X, y, 0.7), BOUNDS),
    "poisson": (lambda X, y: fp.models.poisson(X, np.round(y + 1), np.full(len(y), 0.7)), COUNTS),
    "gaussian_mean": (lambda X, y: fp.models.gaussian_mean(X, [0.5, 1.0, 2.0]), BOUNDS),
}
# Weights of at most 2.5, which are public where labels alone change; four trials.
WEIGHED, COUNTED = (dataclasses.replace(bounds, weight=2.5) for bounds in (BOUNDS, COUNTS))
MODELS |= {
    "logistic of weights": (lambda X, y: fp.models.logistic(X, y > 1, weights=weights(X)), WEIGHED),
    "student_t of weights": (lambda X, y: fp.models.student_t(X, y, 3.5, 0.6, weights=weights(X)), WEIGHED),
    "linear of weights": (lambda X, y: fp.models.linear(X, y, 0.7, weights=weights(X)), WEIGHED),
    "poisson of weights": (
        lambda X, y: fp.models.poisson(X, np.round(y + 1), np.full(len(y), 0.7), weights=weights(X)), COUNTED
    ),
    "logistic of trials": (
        lambda X, y: fp.models.logistic(X, np.round(y + 1), trials=np.full(len(y), 4), weights=weights(X)),
        dataclasses.replace(BOUNDS, weight=10.0),
    ),
}  # fmt: skip


def weights(X):
    return np.where(X[:, 0] < 0, 0.3, 2.5)


def record(rng, extreme):
    """Covariates and outcome within the bounds, often on their border."""
    u = rng.uniform(-1, 1, D)
    X = BOX * (np.sign(u) if extreme else u)
    return X[None], np.array([RANGE[rng.integers(2)] if extreme else rng.uniform(*RANGE)])


def neighbours_of(relation, build, rng, extreme):
    """Potentials of one record in two neighbouring data sets; None for no record."""
    one, other = record(rng, extreme), record(rng, extreme)
    if relation == "label":
        other = (one[0], other[1])
    return build(*one), None if relation == "add-remove" else build(*other)


@double_precision
def largest_change(name, relation, scale, trials=120):
    """Over random neighbours and points: the largest change of gradient (whitened, three norms) and of Hessian."""
    build, _ = MODELS[name]
    rng = np.random.default_rng(sum(name.encode()) + len(relation))
    largest = np.zeros(5)
    for trial in range(trials):
        one, other = neighbours_of(relation, build, rng, extreme=trial % 2 == 0)
        x = jnp.asarray(REGION * (np.sign(rng.normal(size=D)) if trial % 4 < 2 else rng.uniform(-1, 1, D)))
        g = np.asarray(one.gradient(x)) - (0 if other is None else np.asarray(other.gradient(x)))
        h = np.asarray(one.hessian(x)) - (0 if other is None else np.asarray(other.hessian(x)))
        a = scale.T @ g
        norms = [np.abs(a).max(), np.abs(a).sum(), np.linalg.norm(a), np.linalg.norm(g), np.linalg.norm(h)]
        largest = np.maximum(largest, norms)
    return largest


# A record of a mean has no covariates: all of it is the label.
CASES = [
    (name, relation)
    for name in MODELS
    for relation in ("replace", "add-remove", "label")
    if (name, relation) != ("gaussian_mean", "label")
]


def test_the_label_of_a_mean_is_the_whole_record():
    build, bounds = MODELS["gaussian_mean"]
    model = model_of(build(*record(np.random.default_rng(0), False)))
    assert sensitivity(model, bounds, "label", np.eye(D)) == sensitivity(model, bounds, "replace", np.eye(D))


@pytest.mark.parametrize(("name", "relation"), CASES)
def test_no_record_changes_a_gradient_by_more_than_declared(name, relation):
    scale = np.array([[0.4, 0.0, 0.0], [0.1, 1.2, 0.0], [-0.3, 0.2, 0.7]])
    build, bounds = MODELS[name]
    model = model_of(build(*record(np.random.default_rng(0), False)))
    claimed = sensitivity(model, bounds, relation, scale)
    found = largest_change(name, relation, scale)
    assert np.all(found[:3] <= np.array(claimed) * (1 + 1e-9))
    # The bound is of use: some record comes within a factor of it.
    assert found[2] >= 0.3 * claimed.k_2
    gradient, hessian = derivative_sensitivity(model, bounds, relation)
    assert found[3] <= gradient * (1 + 1e-9) and found[4] <= hessian * (1 + 1e-9) + 1e-12


def test_corners_of_a_box_and_the_bound_beyond_them_agree(monkeypatch):
    rng = np.random.default_rng(3)
    scale, box = rng.normal(size=(6, 6)), fp.Bounds(box=rng.uniform(0.5, 2, 6))
    exact = sensitivity(ModelFacts("logistic", 6), box, "add-remove", scale)
    monkeypatch.setattr("fedpdmc.privacy.sensitivity.MOST_CORNERS", 2)
    bound = sensitivity(ModelFacts("logistic", 6), box, "add-remove", scale)
    assert np.all(np.array(exact) <= np.array(bound)) and bound.k_2 < 2.5 * exact.k_2


def test_a_norm_bounds_all_three_norms():
    scale = np.diag([0.5, 2.0])
    k = sensitivity(ModelFacts("logistic", 2), fp.Bounds(norm=3.0), "replace", scale)
    np.testing.assert_allclose(k, [2 * 3 * 2, 2 * 3 * 2.5, 2 * 3 * 2], rtol=1e-8)


@double_precision
def test_a_series_counts_with_all_its_transitions():
    series = np.array([[2.0, -2.0, 2.0, -2.0], [-2.0, 2.0, -2.0, 2.0]])
    one, other = (fp.models.ar1_student_t(s[None], 3.0, 0.5) for s in series)
    bounds = fp.Bounds(outcome=(-2.0, 2.0))
    k = sensitivity(model_of(one), bounds, "replace", np.eye(2))
    worst = 0.0
    for x in np.random.default_rng(0).normal(size=(300, 2)):
        worst = max(worst, np.linalg.norm(one.gradient(jnp.asarray(x)) - other.gradient(jnp.asarray(x))))
    assert 3 * 0.2 * k.k_2 / 6 < worst <= k.k_2
    assert model_of(one).rows == 3
    with pytest.raises(InputError, match="covariates too"):
        sensitivity(model_of(one), bounds, "label", np.eye(2))


@double_precision
def test_a_point_of_a_cox_process_needs_no_declared_bounds():
    scale = np.diag([0.5, 2.0, 1.0])
    before, more, moved = (fp.models.log_gaussian_cox(c) for c in ([3, 0, 1], [3, 1, 1], [2, 1, 1]))
    x = jnp.asarray([0.3, -0.2, 1.0])
    for relation, other in (("add-remove", more), ("replace", moved)):
        k = sensitivity(model_of(before), fp.Bounds(), relation, scale)
        change = scale.T @ np.asarray(before.gradient(x) - other.gradient(x))
        assert np.linalg.norm(change) <= k.k_2 and np.abs(change).sum() <= k.k_1
    with pytest.raises(InputError, match="no label"):
        sensitivity(model_of(before), fp.Bounds(), "label", scale)


@pytest.mark.parametrize(
    ("name", "relation", "bounds", "needs"),
    [
        ("logistic", "replace", fp.Bounds(), "norm"),
        ("linear", "replace", fp.Bounds(norm=1.0, outcome=(0, 1)), "region"),
        ("linear", "label", fp.Bounds(norm=1.0), "outcome"),
        ("poisson", "add-remove", fp.Bounds(norm=1.0, region=1.0), "outcome"),
        ("poisson", "replace", fp.Bounds(norm=1.0, outcome=(0, 9)), "region"),
        ("gaussian_mean", "add-remove", fp.Bounds(norm=1.0), "region"),
        ("gaussian_mean", "replace", fp.Bounds(), "norm"),
    ],
)
def test_losses_without_a_bound_are_refused(name, relation, bounds, needs):
    with pytest.raises(InputError, match=needs):
        sensitivity(ModelFacts(name, 2), bounds, relation, np.eye(2))


@pytest.mark.parametrize("wrong", [
    {"norm": -1.0}, {"box": [1.0, 0.0]}, {"outcome": (2, 1)}, {"outcome": 3}, {"region": np.inf}, {"norm": "one"},
])  # fmt: skip
def test_bounds_that_are_none_are_refused(wrong):
    with pytest.raises(InputError, match="Bounds"):
        fp.Bounds(**wrong)


def test_records_outside_the_bounds_are_refused_or_clipped(tmp_path):
    X, y = np.array([[3.0, 4.0], [0.3, 0.1]]), np.array([1.0, 9.0])
    bounds = fp.Bounds(norm=1.0, outcome=(0.0, 5.0), region=3.0)
    options = {"epsilon": 1.0, "delta": 1e-5, "bounds": bounds, "ledger": tmp_path / "ledger.db"}
    with pytest.raises(InputError, match="unknown scale.*scale="):
        fp.Site(fp.models.linear(X, y), name="a", budget=fp.Budget(**options))
    with pytest.raises(InputError, match="outside the declared bounds"):
        fp.Site(fp.models.linear(X, y, scale=1.0), name="a", budget=fp.Budget(**options))
    site = fp.Site(fp.models.linear(X, y, scale=1.0), name="a", budget=fp.Budget(**options, on_violation="clip"))
    inside = fp.models.linear([[0.6, 0.8], [0.3, 0.1]], [1.0, 5.0], scale=1.0)
    np.testing.assert_allclose(site.potential.precision, inside.precision, rtol=1e-12)
    np.testing.assert_allclose(site.potential.linear, inside.linear, rtol=1e-12)
    assert site.potential.precision.dtype == np.float64
    fine = fp.Site(fp.models.linear([[0.6, 0.8]], [1.0], scale=1.0), name="b", budget=fp.Budget(**options))
    assert fine.records == 1


def test_series_are_clipped_value_by_value():
    series = np.array([[0.0, 5.0, -5.0, 1.0]])
    budget = fp.Budget(1.0, 1e-5, bounds=fp.Bounds(outcome=(-2.0, 2.0)), on_violation="clip")
    clipped = fp.Site(fp.models.ar1_student_t(series, 3.0), name="a", budget=budget).potential
    expected = fp.models.ar1_student_t(np.clip(series, -2, 2), 3.0)
    np.testing.assert_array_equal(clipped.design, expected.design)
    np.testing.assert_array_equal(clipped.response, expected.response)
    assert clipped.series == 3


def test_more_records_than_rounding_allows_are_refused_by_name():
    assert fp.Bounds(most_records=1 << 24).most_records == 1 << 24
    with pytest.raises(InputError, match=r"most_records.*16,777,217.*at most 16,777,216"):
        fp.Bounds(most_records=(1 << 24) + 1)
    # At the maximum rounding is still within what a run may have, for every relation.
    model, scale = ModelFacts("logistic", 3), 0.01 * np.eye(3)
    for relation in ("replace", "add-remove", "label"):
        bounds = fp.Bounds(norm=1.0, most_records=1 << 24)
        exact = sensitivity(model, bounds, relation, scale)
        found = limits(model, bounds, relation, scale, np.zeros(3), exact)
        assert 2 * found.rounding <= 0.1 * exact.k_2


@pytest.mark.parametrize("dim", [1, 4, 64])
def test_the_grid_of_levels_counts_in_every_coordinate(dim):
    """A rate may be off by one level in each of d coordinates: by √d of them in Euclidean norm, beside a tiny K_2."""
    bounds = fp.Bounds(norm=4e-8, most_records=10)
    model, scale = ModelFacts("logistic", dim), np.eye(dim)
    exact = sensitivity(model, bounds, "replace", scale)
    found = limits(model, bounds, "replace", scale, np.zeros(dim), exact)
    assert found.rounding >= np.sqrt(dim) * 2.0**-35
    assert found.sensitivity.k_2 - exact.k_2 >= 2 * np.sqrt(dim) * 2.0**-35 * (1 - 1e-6)
    # Low levels are multiples of 2⁻⁵⁵ or finer for plans of any length; the least speed of a flip is 2⁻²⁰.
    horizons = 2.0 ** np.arange(-40, 20)
    assert np.all(time_grid(horizons, dim).base * 2.0**-64 <= 2.0**-55) and SLOWEST == 2.0**-20


def test_a_sensitivity_that_the_grid_of_levels_would_hide_is_refused():
    bounds = fp.Bounds(norm=1e-9, most_records=10)
    exact = sensitivity(ModelFacts("logistic", 64), bounds, "replace", np.eye(64))
    with pytest.raises(InputError, match="rounding"):
        limits(ModelFacts("logistic", 64), bounds, "replace", np.eye(64), np.zeros(64), exact)
