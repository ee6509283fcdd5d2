"""Models that users write as JAX functions: what is accepted, how their size is found, what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.support import hospitals, on_grid, prior

import fedpdmc as fp
from fedpdmc.errors import InputError, NoEnclosure
from fedpdmc.sampling import defaults
from fedpdmc.sampling.arguments import resolve_members

RNG = np.random.default_rng(0)
DATA = {"X": RNG.normal(size=(9, 2)), "y": RNG.normal(1.0, 1.0, 9)}
SHORT = {"chains": 4, "duration": 3.0, "seed": 1, "progress": False}


def robust(x, data):
    """Student-t noise of one degree of freedom."""
    return jnp.sum(jnp.log1p((data["y"] - data["X"] @ x) ** 2))


def log_robust(x, data):
    return -robust(x, data)


def site(function=robust, name="own", **options):
    return fp.Site(function, **{"data": DATA, **options}, name=name)


def test_the_number_of_parameters_comes_from_whoever_knows_it():
    assert site().known_dim is None
    assert site(coordinates=[1, 0]).dim == 2
    for sites, prior_, options in (
        ([site()], prior(), {}),
        ([site(), *hospitals()], None, {}),
        ([site()], None, {"init": np.zeros((5, 2))}),
        ([site()], None, {"names": ["a", "b"]}),
        ([site(), site(name="other", coordinates=[1, 0])], None, {}),
    ):
        members, _, dim = resolve_members(sites, prior_, **options)
        assert dim == 2 and members[0].dim == 2 and members[0].records == 9
    with pytest.raises(InputError, match="number of parameters is not known.*coordinates="):
        fp.sample(site(), **SHORT)


def test_arrays_are_taken_to_64_bits_and_the_rest_reaches_the_function_as_it_is():
    def model(x, data):
        assert data["floats"].dtype == jnp.float64 and data["index"].dtype in (jnp.int32, jnp.int64)
        assert data["size"] == 2 and isinstance(data["size"], int) and data["nothing"] is None
        return jnp.sum(x[: data["size"]] ** 2) + data["floats"].sum() * data["scale"]

    data = {
        "floats": np.ones(3, np.float32),
        "index": np.arange(3, dtype=np.int32),
        "size": 2,
        "nothing": None,
        "scale": 0.5,
    }
    potential = fp.Site(model, data=data, name="own", coordinates=[0, 1]).potential
    with jax.enable_x64(True):
        assert float(potential.value(jnp.array([1.0, 2.0]))) == 6.5


def test_a_log_density_is_the_function_with_its_sign_turned(double):
    x = np.array([0.3, -0.2])
    own, turned = (
        site(coordinates=[0, 1]),
        fp.Site(fp.models.from_logdensity(log_robust, DATA), name="l", coordinates=[0, 1]),
    )
    assert own.derivatives(x)[0] == pytest.approx(turned.derivatives(x)[0], rel=1e-12)
    np.testing.assert_allclose(own.derivatives(x)[2], turned.derivatives(x)[2], rtol=1e-10)
    alone = fp.Site(fp.models.from_logdensity(lambda x: log_robust(x, DATA)), name="a", coordinates=[0, 1])
    assert alone.derivatives(x)[0] == pytest.approx(own.derivatives(x)[0], rel=1e-12)


@pytest.mark.parametrize(
    ("potential", "options", "message"),
    [
        (3.0, {}, "Site.potential.: found float.*JAX function"),
        (lambda x, data: data["y"] - data["X"] @ x, {}, r"values of shape \(9,\).*sum over the records"),
        (lambda x, data: jnp.sum(x > 0), {}, "type int.*floating"),
        (lambda x, data: jnp.sum(data["z"]), {}, r"raises KeyError.*shape \(2,\)"),
        (lambda x, data: float(x[0]), {}, "raises ConcretizationTypeError"),
        (lambda x, data: jnp.sum(jnp.log(x)), {}, "not finite at the start.*init="),
        (lambda x, data: jnp.sqrt(x[0] - 0.5), {}, "gradient is not finite"),
        (lambda x, data: (x, x), {}, "values of tuple"),
        (lambda x, data: jnp.sum(x) * jax.random.normal(jax.random.key(0)), {}, "draws random numbers.*as data"),
        (robust, {"data": {"y": np.array(["a"])}}, "not an array of numbers"),
        (robust, {"coordinates": [0, 0]}, "distinct"),
        (robust, {"budget": fp.Budget(epsilon=1.0, delta=1e-5, bounds=fp.Bounds(norm=1.0))}, "no known sensitivity"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_refused_with_a_remedy(potential, options, message):
    with pytest.raises(InputError, match=message):
        fp.sample(site(potential, **options), prior(), **SHORT)


def test_a_function_that_callbacks_hide_from_the_gradient_is_refused():
    def opaque(x, data):
        return jax.pure_callback(lambda y: np.sum(y), jax.ShapeDtypeStruct((), x.dtype), x)

    with pytest.raises(InputError, match="without a gradient"):
        fp.sample(site(opaque), prior(), **SHORT)


def test_a_site_named_prior_stands_in_the_way_of_a_prior_that_is_a_function():
    with pytest.raises(InputError, match="Rename it"):
        fp.sample(site(name="prior"), lambda x: 0.5 * jnp.sum(x**2), init=np.zeros(2), **SHORT)


def test_models_hold_their_data():
    with pytest.raises(InputError, match="leave data out"):
        fp.Site(fp.models.from_logdensity(log_robust, DATA), data=DATA, name="own")
    with pytest.raises(InputError, match="from_logdensity"):
        fp.models.from_logdensity(None, DATA)


def test_adaptive_bounds_need_sites_in_process_without_a_budget():
    budget = fp.Budget(epsilon=1.0, delta=1e-5, bounds=fp.Bounds(norm=3.0, outcome=(0, 1)))
    X = np.ones((4, 2))
    private = fp.Site(fp.models.logistic(X, np.ones(4)), name="ward", budget=budget)
    with pytest.raises(InputError, match="adaptive.*privacy budget"):
        fp.sample([site(), private], prior(), dynamics=fp.ZigZag(), bounds="adaptive", **SHORT)


@pytest.mark.long
def test_functions_priors_and_families_mix_in_one_federation():
    """A function at two sites, one with its coordinates swapped, a logistic site, and a prior that is a function."""
    first = {name: array[:4] for name, array in DATA.items()}
    second = {"X": DATA["X"][4:8, ::-1], "y": DATA["y"][4:8]}

    def prior_(x):
        return jnp.sum(jnp.logaddexp(x, -2 * x))

    north = hospitals()[0]
    sites = [
        fp.Site(robust, data=first, name="own", coordinates=[0, 1]),
        fp.Site(robust, data=second, name="turned", coordinates=[1, 0]),
        north,
    ]
    post = fp.sample(
        sites, prior_, dynamics=fp.ZigZag(), reference="laplace", chains=32, duration=120.0, seed=2, progress=False
    )
    X, y = np.asarray(north.potential.design), np.asarray(north.potential.response)

    def energy(x, weight=1.0):
        z, r = x @ X.T, DATA["y"][:8] - x @ DATA["X"][:8].T
        noise = weight * np.sum(np.log1p(r[:, :4] ** 2), 1) + np.sum(np.log1p(r[:, 4:] ** 2), 1)
        return np.sum(np.logaddexp(0, z) - y * z, 1) + noise + np.sum(np.logaddexp(x, -2 * x), 1)

    def errors(weight):
        """Of both means and both standard deviations, in standard errors."""
        mean, sd = on_grid(lambda x: energy(x, weight), precision=0.0)
        root = np.sqrt([post.ess()[name] for name in post.names])
        return np.concatenate([(post.mean() - mean) / sd * root, (np.sqrt(np.diag(post.cov())) / sd - 1) * root / 2])

    assert post.certified and post.settings["prior_at"] == "extra" and len(post.messages) == 4
    assert min(post.ess().values()) > 250
    assert np.all(np.abs(errors(1.0)) < 5)
    # Four records that count twice would be seen.
    assert np.any(np.abs(errors(2.0)) > 5)


def test_a_function_without_bounds_is_refused_before_the_sites_are_asked(monkeypatch):
    def never(*args, **kwargs):
        raise AssertionError("asked")

    monkeypatch.setattr(defaults, "vb", never)
    site = fp.Site(lambda x, data: jnp.sum(jnp.sort(x) * data), data=np.ones(2), name="sorted")
    with pytest.raises(NoEnclosure, match="'sort' at .*test_user_function.py"):
        fp.sample(site, fp.models.normal_prior(2), progress=False)
    with pytest.raises(AssertionError, match="asked"):
        fp.sample(site, fp.models.normal_prior(2), bounds="adaptive", progress=False)
