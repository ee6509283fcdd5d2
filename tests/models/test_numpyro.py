"""NumPyro models: parts that sum to NumPyro's own potential, names, and variables that come back constrained."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer.util import potential_energy
from scipy import stats
from tests.zoo import CASES
from tests.zoo_numpyro import MODELS

import fedpdmc as fp
from fedpdmc.enclosures import check_continuity
from fedpdmc.errors import InputError
from fedpdmc.models.user_function import coordinate_names, variables

QUICK = ("weibull",)
SLOW = pytest.mark.long


@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=SLOW) for name in CASES])
def test_prior_and_likelihoods_sum_to_the_potential_of_numpyro_and_of_plain_jax(name, double):
    case, model = CASES[name], MODELS[name]
    prior = fp.models.from_numpyro(model, case.data(), part="prior")
    joint = fp.models.from_numpyro(model, case.data(), part="joint")
    parts = [prior, *(fp.models.from_numpyro(model, data) for data in case.sites())]
    assert list(prior.names) == case.names

    def loose(x):
        shapes, begin, out = [(s.name, s.shape, s.size) for s in prior.constrain.latents], 0, {}
        for name, shape, size in shapes:
            out[name], begin = x[begin : begin + size].reshape(shape), begin + size
        return out

    @jax.jit
    def all_four(x):
        split = sum(case.likelihood(x, jax.tree.map(jnp.asarray, data)) for data in case.sites())
        return jnp.stack(
            [
                potential_energy(model, (), case.data(), loose(x)),
                joint.function(x, joint.data),
                sum(part.function(x, part.data) for part in parts),
                case.prior(x) + split,
            ]
        )

    x = case.start + 0.3 * np.random.default_rng(0).normal(size=(3, case.dim))
    values = np.array([all_four(point) for point in x])
    np.testing.assert_allclose(values[:, 1:3], values[:, [0, 0]], rtol=1e-12)
    # Plain JAX leaves constants out; NumPyro computes some terms in another way.
    assert np.ptp(values[:, 3] - values[:, 0]) < 1e-5


def scale_model(y, groups, label=None):
    tau = numpyro.sample("tau", dist.HalfNormal(2.0))
    share = numpyro.sample("share", dist.Dirichlet(jnp.ones(groups)))
    numpyro.deterministic("double", 2 * tau)
    numpyro.sample("y", dist.Normal(share @ jnp.arange(groups), tau), obs=y)


@pytest.fixture(scope="module")
def run():
    y = np.random.default_rng(3).normal(0.8, 1.5, 12)
    model = fp.models.from_numpyro(scale_model, {"y": y, "groups": 3, "label": "a"}, part="joint")
    return fp.sample(
        fp.Site(model, name="own"), bounds="adaptive", dynamics=fp.ZigZag(), reference="identity", chains=4, duration=10.0,
        burn_in=1.0, seed=1, progress=False,
    )  # fmt: skip


def test_coordinates_have_names_and_variables_their_own_shapes(run, tmp_path):
    assert run.names == ["tau_unconstrained", "share_unconstrained[0]", "share_unconstrained[1]"]
    found = run.variables(20)
    assert found["tau"].shape == (4, 20) and found["share"].shape == (4, 20, 3)
    np.testing.assert_allclose(np.log(found["tau"]), run.draws(20)[..., 0], rtol=1e-12)
    np.testing.assert_allclose(found["share"].sum(-1), 1.0)
    data = run.to_arviz(20)
    assert set(data.posterior.data_vars) == {"tau", "share"}
    assert set(data["unconstrained_posterior"].data_vars) == set(run.names)
    rows = list(run.summary().index)
    assert rows == ["tau", "share[0]", "share[1]", "share[2]"]
    run.save(tmp_path / "run.zarr")
    again = fp.load(tmp_path / "run.zarr")
    assert again.names == run.names and again.variables(30)["share"].shape == (4, 30, 3)
    assert list(again.summary().index) == rows


def test_other_coordinates_are_variables_themselves():
    y = np.random.default_rng(3).normal(size=5)

    def location(y):
        numpyro.sample("y", dist.Normal(numpyro.sample("mu", dist.Normal(0, 3)), 1.0), obs=y)

    sites = [
        fp.Site(fp.models.from_numpyro(location, y, part="joint"), name="own", coordinates=[1]),
        fp.Site(fp.models.gaussian_mean(np.ones((3, 2))), name="other"),
    ]
    names = coordinate_names(sites, 2)
    assert names == ["x0", "mu"]
    draws = np.arange(12.0).reshape(2, 3, 2)
    found = variables(sites, names).of(draws)
    assert list(found) == ["mu", "x0"] and np.array_equal(found["mu"], draws[..., 1])
    assert np.array_equal(found["x0"], draws[..., 0])


def discrete(y):
    z = numpyro.sample("z", dist.Bernoulli(0.5))
    numpyro.sample("y", dist.Normal(z, 1.0), obs=y)


def subsampled(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("rows", 4, subsample_size=2) as rows:
        numpyro.sample("y", dist.Normal(mu, 1.0), obs=y[rows])


def learned(y):
    numpyro.sample("y", dist.Normal(numpyro.sample("mu", dist.Normal(numpyro.param("m", 0.0), 1)), 1.0), obs=y)


def unobserved(y):
    numpyro.sample("mu", dist.Normal(0, 1))


def known(y):
    numpyro.sample("y", dist.Normal(0, 1), obs=y)


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (discrete, {}, "discrete latent variable 'z'.*Sum it out"),
        (subsampled, {}, "plate 'rows'.*subsample"),
        (learned, {}, "param 'm'.*prior"),
        (unobserved, {}, "without observations.*prior"),
        (known, {}, "without latent variables"),
        (lambda x, y: None, {}, "raises TypeError when called with the data"),
        (None, {}, "NumPyro model"),
        (known, {"part": "posterior"}, "'likelihood', 'prior', 'joint'"),
    ],
)
def test_what_cannot_be_sampled_is_refused(model, options, message):
    with pytest.raises(InputError, match=message):
        fp.models.from_numpyro(model, np.zeros(4), **options)


def test_sites_that_disagree_on_names_are_refused():
    def other(y):
        numpyro.sample("y", dist.Normal(numpyro.sample("nu", dist.Normal(0, 3)), 1.0), obs=y)

    def one(y):
        numpyro.sample("y", dist.Normal(numpyro.sample("mu", dist.Normal(0, 3)), 1.0), obs=y)

    sites = [fp.Site(fp.models.from_numpyro(model, np.zeros(3)), name=model.__name__) for model in (one, other)]
    with pytest.raises(InputError, match="another site calls 'mu'"):
        fp.sample(sites, fp.models.normal_prior(1))


def _wards(group, y, wards):
    mean = numpyro.sample("mean", dist.Normal(0, 1))
    spread = numpyro.sample("spread", dist.HalfNormal(1.0))
    with numpyro.plate("wards", wards):
        effect = numpyro.sample("effect", dist.Normal(0, spread))
    numpyro.sample("y", dist.Poisson(jnp.exp(mean + effect[group])), obs=y)


def test_local_variables_belong_to_the_likelihood(double):
    data = (np.array([0, 1, 1]), np.array([2.0, 0.0, 1.0]), 2)
    likelihood = fp.models.from_numpyro(_wards, data, local=["effect"])
    prior = fp.models.from_numpyro(_wards, data, part="prior", local=["effect"])
    assert likelihood.names == prior.names == ("mean", "spread_unconstrained")
    assert likelihood.latent_names == ("effect[0]", "effect[1]") and prior.latent_names == ()
    x, z = np.array([0.3, -0.2]), np.array([0.5, -0.4])
    exact = -stats.poisson.logpmf(data[1], np.exp(0.3 + z[data[0]])).sum() - stats.norm.logpdf(z, 0, np.exp(-0.2)).sum()
    np.testing.assert_allclose(likelihood.function(jnp.asarray([*x, *z]), likelihood.data), exact, rtol=1e-12)
    exact = -stats.norm.logpdf(0.3) - stats.halfnorm.logpdf(np.exp(-0.2)) + 0.2
    np.testing.assert_allclose(prior.function(jnp.asarray(x), prior.data), exact, rtol=1e-12)
    assert list(likelihood.constrain(jnp.asarray(x))) == ["mean", "spread"]
    assert fp.Site(likelihood, name="s").latents == 2
    with pytest.raises(InputError, match="The variables are mean, spread, effect"):
        fp.models.from_numpyro(_wards, data, local=["ward"])


def test_a_horseshoe_is_told_of_its_own_prior():
    def horseshoe(y):
        tau = numpyro.sample("tau", dist.HalfCauchy(1))
        local = numpyro.sample("local", dist.HalfCauchy(1).expand([3]).to_event(1))
        z = numpyro.sample("z", dist.Normal(0, 1).expand([3]).to_event(1))
        numpyro.sample("y", dist.Normal(tau * local * z, 1), obs=y)

    with pytest.warns(UserWarning, match="horseshoe_prior"):
        fp.models.from_numpyro(horseshoe, np.zeros(3), part="prior")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fp.models.from_numpyro(horseshoe, np.zeros(3))
        fp.models.from_numpyro(scale_model, {"y": np.zeros(4), "groups": 3}, part="prior")


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(
    ("prior", "size"), [(lambda: dist.Beta(2.0, 3.0), ()), (lambda: dist.Dirichlet(np.ones(3)), (2,))]
)
def test_priors_that_choose_at_their_limits_are_shown_to_be_continuous(prior, size):
    """What is clipped to less than one is never one."""
    transform = dist.transforms.biject_to(prior().support)
    check_continuity(lambda x: -prior().log_prob(transform(x.reshape(size))), max(size, default=1))
