"""The reference that matches mean and covariance."""

import jax.numpy as jnp
import numpy as np
import pytest
from tests.statistical.targets import target, truth
from tests.support import hospitals, logistic_site, prior, short_run

import fedpdmc as fp
from fedpdmc._jax.precision import double_precision
from fedpdmc.errors import ImproperPosterior
from fedpdmc.members.run_coordinates import Opening, choose_clock
from fedpdmc.members.site import own_part
from fedpdmc.potentials import LinearPredictor
from fedpdmc.sampling import vb_reference
from fedpdmc.sampling.run_cost import site_event_rate
from fedpdmc.sampling.run_state_arrays import pack_reference, unpack_reference
from fedpdmc.sampling.vb_reference import SETTLED, Tails, vb


def distance(reference, found):
    """From the posterior's mean, in its standard deviations."""
    root = np.linalg.cholesky(np.linalg.inv(found.cov))
    return np.linalg.norm(root.T @ (np.asarray(reference.center) - found.mean))


@pytest.mark.parametrize("model", ["logistic", "poisson"])
def test_its_centre_is_nearer_to_the_mean_than_the_mode_is(model):
    federation, found = target(model, 3), truth(model, 3)
    assert distance(fp.laplace(federation.sites(), federation.prior()), found) > 0.2
    assert distance(vb(federation.sites(), federation.prior()), found) < 0.1


@pytest.fixture(autouse=True)
def not_as_wide_as_tails(monkeypatch):
    """These tests are of the averages alone; `test_tails.py` has the tails."""
    monkeypatch.setattr(Tails, "widens", False)


@pytest.fixture
def narrow(monkeypatch):
    """Variances that are not made larger."""
    monkeypatch.setattr(vb_reference, "MOST_WIDER", 0.0)


@double_precision
@pytest.mark.parametrize("model", ["logistic", "poisson", "student_t"])
def test_over_it_the_mean_gradient_is_zero_and_the_mean_hessian_its_precision(narrow, model):
    federation = target(model, 3)
    found, prior = vb(federation.sites(), federation.prior()), federation.prior()
    mean, spread = np.asarray(found.center), np.asarray(found.scale_tril)
    parts = [site.derivatives(mean, spread) for site in federation.sites()]
    gradient = np.asarray(prior.gradient(jnp.asarray(mean))) + sum(part[1] for part in parts)
    precision = np.asarray(prior.precision) + sum(part[2] for part in parts)
    assert np.linalg.norm(spread.T @ gradient) < 0.1
    np.testing.assert_allclose(spread.T @ precision @ spread, np.eye(2), atol=0.1)


def records(n, d, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, d))
    return X, (rng.random(n) < 1 / (1 + np.exp(-X @ rng.normal(size=d)))).astype(float)


def test_it_takes_events_off_the_sites_and_no_more_rounds():
    X, y = records(200, 6)
    sites = [fp.Site(fp.models.logistic(X[k::2], y[k::2]), name=f"site{k}") for k in range(2)]
    normal, rates = fp.models.normal_prior(6), {}
    for make in (fp.laplace, vb):
        found = make(sites, normal)
        rates[found.name] = site_event_rate(tuple(sites), normal, found.control, found), found.rounds
    assert rates["vb"][0] < 0.8 * rates["laplace"][0]
    # One or two of them look at the tails.
    assert rates["vb"][1] <= rates["laplace"][1] + 2


def test_the_control_variates_are_the_means_of_the_last_round():
    sites, found = hospitals(), vb(hospitals(), prior())
    asked = []
    for site in sites:
        site.derivatives = lambda x, spread=None, ask=site.derivatives: asked.append((x, spread)) or ask(x, spread)
    vb(sites, prior())
    # Later questions are about the tails, at points.
    x, spread = [one for one in asked if one[1] is not None][-1]
    for site in hospitals():
        _, gradient, hessian = double_precision(site.derivatives)(x, spread)
        control = found.control[site.name]
        np.testing.assert_allclose(control.point, x, rtol=1e-12)
        assert 1 / (1 + vb_reference.MOST_WIDER) <= control.kept < 1
        part = control.kept * hessian
        np.testing.assert_allclose(control.quadratic.precision, part, rtol=1e-12)
        np.testing.assert_allclose(control.quadratic.linear, gradient - part @ x, rtol=1e-9, atol=1e-12)


def test_what_is_left_of_the_summed_quadratics_and_the_prior_is_the_reference():
    found, normal = vb(hospitals(), prior()), prior()
    precision = np.asarray(normal.precision) + sum(np.asarray(c.quadratic.precision) for c in found.control.values())
    linear = np.asarray(normal.linear) + sum(np.asarray(c.quadratic.linear) for c in found.control.values())
    scale = np.asarray(found.scale_tril)
    np.testing.assert_allclose(scale.T @ precision @ scale, np.eye(2), atol=1e-10)
    np.testing.assert_allclose(precision @ np.asarray(found.center) + linear, 0, atol=1e-9)


def test_of_a_gaussian_it_is_the_posterior():
    rng = np.random.default_rng(3)
    X = rng.normal(size=(20, 2))
    sites = [fp.Site(fp.models.linear(X, X @ [1.0, 2.0] + rng.normal(size=20), scale=1.5), name="one")]
    mean, mode = vb(sites, prior()), fp.laplace(sites, prior())
    np.testing.assert_allclose(mean.center, mode.center, rtol=1e-9)
    np.testing.assert_allclose(mean.scale_tril, mode.scale_tril, rtol=1e-9, atol=1e-12)


def test_functions_are_averaged_over_points_that_every_site_has():
    X, y = records(30, 2)

    def loss(x, data):
        z = data[0] @ x
        return jnp.sum(jnp.logaddexp(0.0, z) - data[1] * z)

    written = [fp.Site(loss, data=(X[k::2], y[k::2]), name=f"site{k}") for k in range(2)]
    built_in = [fp.Site(fp.models.logistic(X[k::2], y[k::2]), name=f"site{k}") for k in range(2)]
    one, other = vb(written, prior()), vb(built_in, prior())
    assert one.name == other.name == "vb"
    np.testing.assert_allclose(one.center, other.center, atol=1e-4)
    np.testing.assert_allclose(one.scale_tril, other.scale_tril, atol=3e-4)


def test_a_site_with_some_coordinates_averages_over_their_covariance():
    rng = np.random.default_rng(0)
    spread = np.tril(rng.normal(size=(4, 4)))
    x, root = own_part(np.arange(4.0), spread, np.array([2, 0]))
    np.testing.assert_array_equal(x, [2.0, 0.0])
    np.testing.assert_allclose(root @ root.T, (spread @ spread.T)[np.ix_([2, 0], [2, 0])], rtol=1e-12)
    X, y = records(25, 3)
    part = fp.Site(fp.models.logistic(X[:, [1]], y), name="part", coordinates=[1])
    sites = [part, fp.Site(fp.models.logistic(X, y), name="all")]
    found = vb(sites, fp.models.normal_prior(3))
    assert found.name == "vb" and found.control["part"].point.shape == (1,)


def test_where_averages_cannot_be_used_it_is_the_laplace_reference():
    site = fp.Site(lambda x: -0.1 * jnp.log(1 - x[0] ** 2), name="bounded")
    normal = fp.models.normal_prior(1, mean=0.2, scale=5.0)
    found, mode = vb([site], normal), fp.laplace([site], normal)
    assert found.name == "laplace" and "could not be used" in found.why
    np.testing.assert_allclose(found.center, mode.center, atol=1e-4)
    np.testing.assert_allclose(found.scale_tril, mode.scale_tril, rtol=1e-3)


def test_a_flat_prior_is_checked_as_before():
    X = np.linspace(-1, 1, 20)[:, None]
    separable = fp.Site(fp.models.logistic(X, (X[:, 0] > 0).astype(float)), name="one")
    with pytest.raises(ImproperPosterior):
        vb([separable])
    assert vb([logistic_site("one", 40)]).name == "vb"


def test_the_result_says_which_reference_and_why():
    settings = short_run(chains=4).settings
    assert settings["reference"] == "vb"
    assert "average" in settings["reference_why"]
    assert short_run(reference="laplace", chains=4).settings["reference"] == "laplace"


def test_many_parameters_take_a_few_averages():
    X, y = records(150, 30, seed=2)
    found = vb([fp.Site(fp.models.logistic(X, y), name="one")], fp.models.normal_prior(30))
    moved = float(found.why.split(" by ")[1].split()[0])
    assert found.name == "vb" and moved <= 2 * SETTLED


def skewed(n, dim, count=2):
    """A logistic regression in which one in five has the response."""
    rng = np.random.default_rng(1)
    X = np.c_[np.ones(n), rng.normal(size=(n, dim - 1))]
    y = (rng.random(n) < 1 / (1 + np.exp(1.5 - 0.5 * X[:, 1]))).astype(float)
    return [fp.Site(fp.models.logistic(X[k::count], y[k::count]), name=f"site{k}") for k in range(count)]


@double_precision
@pytest.mark.parametrize(("n", "dim"), [(200, 3), (1000, 6), (1000, 30), (20_000, 6)])
def test_variances_are_larger_as_the_slopes_of_what_the_sites_keep_are(monkeypatch, n, dim):
    sites, normal = skewed(n, dim), fp.models.normal_prior(dim)
    found = vb(sites, normal)
    monkeypatch.setattr(vb_reference, "MOST_WIDER", 0.0)
    narrow = vb(sites, normal)
    rest = []
    for a in np.random.default_rng(2).normal(size=(40, dim)):
        x = narrow.to_x(a)
        slope = np.asarray(normal.gradient(jnp.asarray(x))) + sum(site.derivatives(x)[1] for site in sites)
        rest.append(np.asarray(narrow.scale_tril).T @ slope - a)
    more, slopes = 1 / found.control["site0"].kept - 1, np.sqrt(np.mean(np.square(rest)))
    right = min(vb_reference.WIDER * slopes, vb_reference.WIDER_SQUARED * slopes**2)
    assert 0.5 * right < more < 2 * right or (n == 20_000 and more < 2e-3)
    assert found.rounds == narrow.rounds and f"{100 * more:.2g} % larger" in found.why and "larger" not in narrow.why


def test_a_gaussian_posterior_keeps_its_variances():
    X, _ = records(40, 3)
    found = vb([fp.Site(fp.models.linear(X, X @ [1.0, 2.0, 3.0], scale=1.5), name="one")], fp.models.normal_prior(3))
    assert found.control["one"].kept == 1.0 and "larger" not in found.why


@double_precision
def test_it_is_wider_and_still_the_sum_of_prior_and_control_variates(monkeypatch):
    dim = 12
    sites, normal = skewed(240, dim), fp.models.normal_prior(dim)
    found = vb(sites, normal)
    with monkeypatch.context() as patch:
        patch.setattr(vb_reference, "MOST_WIDER", 0.0)
        narrow = vb(sites, normal)
    ratio = np.diag(found.scale_tril @ found.scale_tril.T) / np.diag(narrow.scale_tril @ narrow.scale_tril.T)
    assert np.all(ratio > 1.01) and np.all(ratio < 1 + vb_reference.MOST_WIDER)
    # Records, minus the control variates, plus half the squared length: the potential up to a constant.
    opened = [choose_clock(site, Opening(found, fp.Boomerang(), found.control[site.name])) for site in sites]
    assert all(isinstance(choice.clock.potential, LinearPredictor) for choice in opened)
    states = np.random.default_rng(5).normal(size=(6, dim))
    rest = [sum(float(c.clock.potential.value(jnp.asarray(a))) for c in opened) + 0.5 * a @ a for a in states]
    whole = [sum(s.derivatives(x)[0] for s in sites) + float(normal.value(jnp.asarray(x))) for x in found.to_x(states)]
    np.testing.assert_allclose(np.diff(rest), np.diff(whole), rtol=1e-9, atol=1e-8)


def test_what_is_kept_of_the_curvature_is_saved(tmp_path):
    sites = skewed(240, 3)
    found = vb(sites, fp.models.normal_prior(3))
    again = unpack_reference(*pack_reference(found))
    kept = [{name: own.kept for name, own in reference.control.items()} for reference in (found, again)]
    assert kept[0] == kept[1] and all(0.9 < part < 1 for part in kept[0].values())
    mode = fp.laplace(skewed(240, 3), fp.models.normal_prior(3))
    assert all(own.kept == 1.0 for own in unpack_reference(*pack_reference(mode)).control.values())
    post = fp.sample(sites, fp.models.normal_prior(3), chains=4, duration=8.0, seed=1, progress=False)
    post.save(tmp_path / "run.zarr")
    extended = fp.load(tmp_path / "run.zarr").extend(
        duration=3.0, sites=sites, prior=fp.models.normal_prior(3), progress=False
    )  # fmt: skip
    np.testing.assert_array_equal(extended.skeleton.t, post.extend(duration=3.0, progress=False).skeleton.t)
