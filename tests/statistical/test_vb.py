"""Control variates of averaged derivatives: every loss, arrivals and posteriors, and what must not pass."""

import jax.numpy as jnp
import numpy as np
import pytest
from tests.federation.rounds import method
from tests.statistical.checks import CHAINS, assert_exact, compare
from tests.statistical.targets import MODELS, target, truth
from tests.statistical.test_arrivals import check, outing
from tests.statistical.test_posteriors import DURATION, DYNAMICS, sampled

from fedpdmc._jax.precision import double_precision
from fedpdmc.members.run_coordinates import Opening, choose_clock
from fedpdmc.potentials import LinearPredictor
from fedpdmc.sampling.driver import Sampler
from fedpdmc.sampling.vb_reference import Tails, vb

SITES = 3


@pytest.fixture(autouse=True)
def averages_alone(monkeypatch):
    """`tests/statistical/test_tails.py` has references that are as wide as the tails."""
    monkeypatch.setattr(Tails, "widens", False)


def some(everyday):
    """Pairs of a model and dynamics, few of them every day."""
    pairs = [(model, name) for name in ("boomerang", "factorised", "zigzag", "bouncy") for model in MODELS]
    return [pytest.param(*pair, marks=() if pair in everyday else pytest.mark.long) for pair in pairs]


@pytest.mark.parametrize(("model", "name"), some({("poisson", "boomerang")}))
def test_arrivals_have_the_rate_of_what_is_left(model, name):
    """The records are held less the averaged polynomial of each, which is not the Taylor polynomial."""
    federation, dynamics = target(model, SITES), DYNAMICS[name]
    sites, member = federation.sites(), federation.members[0]
    reference = vb(sites, federation.prior())
    assert reference.name == "vb" and reference.control is not None
    control = reference.control["site0"]
    precision, linear = np.asarray(control.quadratic.precision), np.asarray(control.quadratic.linear)

    def gradient(x):
        return member.records.gradient(x) - x @ precision - linear

    if model in ("gaussian_mean", "linear"):
        return
    # Rates of counts grow exponentially: far out there are too many candidates. What is left of others is small nearby.
    spread = {"poisson": 2.8, "ar1_student_t": 5.0}.get(model, 4.0)
    journey = outing(truth(model, SITES), reference, dynamics, seed=23, spread=spread)
    check(sites[0], Opening(reference, dynamics, control), gradient, journey)


def test_what_the_records_hold_is_not_less_their_taylor_polynomial():
    federation = target("logistic", SITES)
    sites = federation.sites()
    reference = vb(sites, federation.prior())
    assert reference.control is not None
    opening = Opening(reference, DYNAMICS["boomerang"], reference.control["site0"])
    clock = double_precision(choose_clock)(sites[0], opening).clock
    assert isinstance(clock.potential, LinearPredictor)
    point, slope, _ = np.asarray(clock.potential.control)
    taylor = 1 / (1 + np.exp(-point)) - np.asarray(clock.potential.response)
    assert np.max(np.abs(taylor - slope)) > 1e-3


@pytest.mark.filterwarnings("ignore:The posterior is far")
@pytest.mark.parametrize(("model", "name"), some({("logistic", "boomerang")}))
def test_the_posterior_is_exact(model, name):
    control = "quadratic" if name in ("boomerang", "factorised") else "linear"
    post = sampled(model, SITES, name, reference="vb", control=control)
    assert post.settings["reference"] == "vb"
    assert_exact(post, truth(model, SITES), least_ess=500)


@double_precision
def posterior(spread):
    """The sites average over a Gaussian ``spread`` times as wide as the coordinator believes."""
    federation, found = target("poisson", SITES), truth("poisson", SITES)
    chosen = method(
        DYNAMICS["boomerang"], sites=federation.sites(), prior=federation.prior(), chains=CHAINS, seed=29,
        reference="vb", control="quadratic", init=found.draws(CHAINS, seed=17),
    )  # fmt: skip
    theirs = {}
    for site in federation.sites():
        own = chosen.control[site.name]
        at, about = np.asarray(own.point), spread * np.asarray(own.spread)
        _, gradient, hessian = site.derivatives(at, about)
        hessian = own.kept * hessian
        quadratic = type(own.quadratic)(jnp.asarray(hessian), jnp.asarray(gradient - hessian @ at))
        theirs[site.name] = own._replace(quadratic=quadratic, spread=jnp.asarray(about))
    run = Sampler(chosen.replace(control=theirs), 0.0, "skeleton")
    return run.extend(duration=DURATION["boomerang"], progress=False)


@pytest.mark.filterwarnings("ignore:The posterior is far")
def test_a_site_that_averages_over_another_gaussian_than_the_coordinator_is_caught():
    assert compare(posterior(1.0), truth("poisson", SITES)).exact
    assert not compare(posterior(1.8), truth("poisson", SITES)).exact
