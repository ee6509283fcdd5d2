"""Twelve models written as plain JAX functions or in NumPyro, at three sites, against NUTS on the pooled records."""

import numpy as np
import pytest
from tests.statistical.checks import CHAINS, welch_test
from tests.statistical.test_pooled_nuts import nuts
from tests.zoo import CASES
from tests.zoo_numpyro import MODELS

import fedpdmc as fp

# Every dynamics and every kind of control variate is used by some model; how far a posterior is from its Laplace
# reference decides which.
WHITENED = {"reference": "laplace"}
METHODS = {
    "probit": {},
    "negative_binomial": {},
    "weibull": {},
    "piecewise_exponential": {"dynamics": fp.FactorisedBoomerang(excess=0.1), **WHITENED, "control": "quadratic"},
    "eight_schools": {"dynamics": fp.BouncyParticle(), **WHITENED},
    "hierarchical_logistic": {"dynamics": fp.BouncyParticle(), **WHITENED},
    "softmax": {"dynamics": fp.ZigZag(), **WHITENED, "control": "linear"},
    "gaussian_process": {},
    "mixture": {"dynamics": fp.ZigZag(), **WHITENED},
    "michaelis_menten": {"dynamics": fp.BouncyParticle(), **WHITENED, "control": "linear"},
    "banana": {"dynamics": fp.BouncyParticle(), "reference": fp.Reference(np.zeros(2), np.full(2, 0.7))},
    "zero_inflated_poisson": {},
}
NUMPYRO = ("weibull", "hierarchical_logistic", "mixture", "michaelis_menten")


def plain(name):
    """Sites of plain JAX functions, and the prior."""
    case = CASES[name]
    sites = [fp.Site(case.likelihood, data=data, name=f"site {i}") for i, data in enumerate(case.sites())]
    if case.precision is None:
        return sites, case.prior
    return sites, fp.models.normal_prior(case.dim, mean=case.mean, precision=case.precision)


def from_numpyro(name):
    """The same in NumPyro."""
    case, model = CASES[name], MODELS[name]
    sites = [fp.Site(fp.models.from_numpyro(model, data), name=f"site {i}") for i, data in enumerate(case.sites())]
    return sites, fp.models.from_numpyro(model, case.sites()[0], part="prior")


def run(sites, prior, name, *, duration, chains=CHAINS, **options):
    """A run from the bulk of the posterior."""
    return fp.sample(
        sites, prior, init=CASES[name].start, chains=chains, duration=duration, burn_in=20.0, seed=5, progress=False,
        **{**METHODS[name], **options},
    )  # fmt: skip


def averages(draws, reference):
    """By chain: first and second moments in units of the posterior, and both tails at its 5 % and 95 % quantiles."""
    flat = reference.reshape(-1, reference.shape[-1])
    mean, sd = flat.mean(0), flat.std(0)
    low, high = np.quantile(flat, [0.05, 0.95], axis=0)
    u = (draws - mean) / sd
    return np.concatenate([u, u**2, draws < low, draws > high], -1).mean(1)


def compare(post, reference):
    """Means, standard deviations and quantiles of the two, chain by chain."""
    names = [f"{kind} of {name}" for kind in ("mean", "square", "low", "high") for name in post.names]
    draws = post.draws(max(8, int(2 * post.duration)))
    return welch_test(names, averages(draws, reference), averages(reference, reference))


def pooled(name, **options):
    """NUTS on all records."""
    case = CASES[name]
    sizes = {"chains": 64, "warm_up": 300, "draws": 1000, **options}
    return nuts(lambda x: -case.potential(x), case.dim, seed=4, start=case.start, **sizes)


@pytest.mark.filterwarnings("ignore:The posterior is far")
@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_three_sites_agree_with_pooled_nuts(name):
    reference = pooled(name)
    # With 100 units eight schools have an effective sample size of 250 on average, for its scale.
    post = run(*plain(name), name, duration=200.0 if name == "eight_schools" else 100.0)
    comparison = compare(post, reference)
    assert post.certified and comparison.exact, str(comparison)
    assert comparison.ess[: len(post.names)].min() > 300, "no power"


@pytest.mark.filterwarnings("ignore:The posterior is far")
@pytest.mark.long
@pytest.mark.parametrize("name", NUMPYRO)
def test_numpyro_models_agree_with_pooled_nuts(name):
    post = run(*from_numpyro(name), name, duration=100.0)
    comparison = compare(post, pooled(name))
    assert post.certified and comparison.exact, str(comparison)
    assert post.names == CASES[name].names


@pytest.mark.long
def test_adaptive_bounds_agree_where_no_violation_is_seen():
    post = run(*plain("weibull"), "weibull", duration=100.0, bounds="adaptive")
    assert not post.certified and post.violations.sum() == 0
    comparison = compare(post, pooled("weibull"))
    assert comparison.exact, str(comparison)


@pytest.mark.long
def test_a_wrong_likelihood_is_seen():
    """A banana whose records are half a unit off is told from NUTS; the right one is not."""
    case = CASES["banana"]
    reference = pooled("banana", chains=32, warm_up=300, draws=400)
    sites, prior = plain("banana")
    right = run(sites, prior, "banana", duration=60.0)
    comparison = compare(right, reference)
    assert comparison.exact, str(comparison)
    assert comparison.ess[:2].min() > 200

    moved = [
        fp.Site(case.likelihood, data={"y": data["y"] + 0.5}, name=f"site {i}") for i, data in enumerate(case.sites())
    ]
    wrong = run(moved, prior, "banana", duration=60.0)
    assert not compare(wrong, reference).exact
