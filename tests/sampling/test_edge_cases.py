"""Data at the edge of what makes sense: they work, or are refused with a clear message."""

import numpy as np
import pytest
from tests.support import SHORT, ZIGZAG, on_grid, short_run

import fedpdmc as fp
from fedpdmc.errors import FedPDMCError, ImproperPosterior, NotFinite, RunTooLong

X = np.array([[1.0, -2.0], [1.0, -1.0], [1.0, 1.0], [1.0, 2.0]])
SEPARATED, MIXED = np.array([0.0, 0.0, 1.0, 1.0]), np.array([0.0, 1.0, 0.0, 1.0])
NONE = np.zeros((0, 2))
UNIT = fp.models.normal_prior(2)


def two(potential):
    """A site with the case in question, and one with no records at all."""
    return [fp.Site(potential, name="case"), fp.Site(type_of(potential), name="empty")]


def type_of(potential):
    kind = type(potential.loss).__name__
    return fp.models.poisson(NONE, []) if kind == "Poisson" else fp.models.logistic(NONE, [])


def logistic_energy(design, y):
    return lambda x: np.sum(np.logaddexp(0, x @ design.T) - y * (x @ design.T), 1)


def assert_plausible(post, center, sd):
    """Within what few effective samples can say; the sharp tests are statistical."""
    assert np.all(np.abs(post.mean() - center) < sd)
    assert np.all(np.sqrt(np.diag(post.cov())) < 2 * sd)
    assert np.all(np.sqrt(np.diag(post.cov())) > 0.5 * sd)


RECORDS = {
    "no records": (NONE, np.zeros(0)),
    "one record": (X[:1], MIXED[:1]),
    "separable": (X, SEPARATED),
    "not separable": (X, MIXED),
}
# What the default does with separable records is in `test_reference_warning` too.
RARE = {("default", "separable"), ("default", "not separable"), ("zigzag", "not separable"), ("zigzag", "one record")}


@pytest.mark.parametrize(
    ("dynamics", "design", "y"),
    [
        pytest.param(dynamics, *records, id=f"{name}-{case}", marks=pytest.mark.long if (name, case) in RARE else ())
        for name, dynamics in (("default", None), ("zigzag", ZIGZAG))
        for case, records in RECORDS.items()
    ],
)
def test_few_or_separable_records_under_a_proper_prior(design, y, dynamics):
    post = short_run(two(fp.models.logistic(design, y)), UNIT, dynamics=dynamics, duration=60.0)
    assert_plausible(post, *on_grid(logistic_energy(design, y)))


@pytest.mark.long
def test_covariates_of_a_million_by_default():
    post = short_run(two(fp.models.logistic(1e6 * X, MIXED)), UNIT, duration=60.0)
    center, sd = on_grid(logistic_energy(X, MIXED), precision=1e-12, half=12.0)
    assert_plausible(post, 1e-6 * center, 1e-6 * sd)


def test_covariates_of_a_million_in_the_parameters_own_coordinates_are_too_long_a_run():
    with pytest.raises(RunTooLong, match="reference='laplace'"):
        short_run(two(fp.models.logistic(1e6 * X, MIXED)), UNIT, dynamics=ZIGZAG)


@pytest.mark.parametrize("dynamics", [None, ZIGZAG], ids=["default", "zigzag"])
def test_cells_with_no_counts(dynamics):
    cells = fp.Site(fp.models.log_gaussian_cox([0, 0]), name="cells")
    post = short_run(cells, UNIT, dynamics=dynamics, duration=60.0)
    assert_plausible(post, *on_grid(lambda x: np.sum(np.exp(x), 1)))


def test_offsets_that_move_the_mode_far_away():
    offset = np.full(4, 40.0)
    post = short_run(two(fp.models.poisson(X, MIXED, offset=offset)), fp.models.normal_prior(2, scale=100.0))
    assert np.all(np.isfinite(post.cov())) and -45 < post.mean()[0] < -38


@pytest.mark.parametrize(
    "offset, dynamics", [(800.0, None), (800.0, ZIGZAG), (50.0, ZIGZAG)], ids=["default", "zigzag", "50"]
)
def test_offsets_beyond_floating_point_are_refused(offset, dynamics):
    with pytest.raises((ImproperPosterior, NotFinite, RunTooLong)):
        short_run(two(fp.models.poisson(X, MIXED, offset=np.full(4, offset))), UNIT, dynamics=dynamics)


def test_offsets_beyond_floating_point_are_called_what_they_are():
    with pytest.raises(FedPDMCError, match="finite|offset|init"):
        short_run(two(fp.models.poisson(X, MIXED, offset=np.full(4, 800.0))), UNIT)


FAR = np.column_stack([np.ones(4), [1.0, 2.0, 3.0, 4.0]])
IMPROPER = {
    "separable": lambda: [fp.Site(fp.models.logistic(X, SEPARATED), name="a")],
    "separable far from zero": lambda: [fp.Site(fp.models.logistic(FAR, [0, 0, 1, 1]), name="a")],
    "separable but for a tie": lambda: [fp.Site(fp.models.logistic(FAR[[0, 1, 1, 2, 3]], [0, 0, 1, 1, 1]), name="a")],
    "collinear": lambda: [fp.Site(fp.models.logistic(X[:, [1, 1]], MIXED), name="a")],
    "no records": lambda: [fp.Site(fp.models.logistic(NONE, []), name="a")],
    "no counts": lambda: [fp.Site(fp.models.log_gaussian_cox([0, 3]), name="a")],
}


@pytest.mark.parametrize("case", IMPROPER)
def test_laplace_sees_that_a_flat_prior_leaves_no_posterior(case):
    with pytest.raises(ImproperPosterior, match="prior"):
        fp.laplace(IMPROPER[case]())


@pytest.mark.long
def test_a_flat_prior_is_fine_where_the_data_decide():
    post = fp.sample(two(fp.models.logistic(X, MIXED)), duration=60.0, **SHORT)
    assert_plausible(post, *on_grid(logistic_energy(X, MIXED), precision=0.0, half=12.0))


def test_cov_survives_a_mean_far_from_the_centre_of_the_reference():
    y = np.full((4, 2), 1e8)
    post = short_run(
        fp.Site(fp.models.gaussian_mean(y), name="far"),
        fp.models.normal_prior(2, mean=1e8),
        dynamics=ZIGZAG,
        init=[1e8, 1e8],
    )
    assert np.all(np.linalg.eigvalsh(post.cov()) > 0)
    np.testing.assert_allclose(np.sqrt(np.diag(post.cov())), np.sqrt(1 / 5), rtol=0.5)
