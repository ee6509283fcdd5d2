"""Control variates may be anything: wrong, stale and noisy ones change the work, never the posterior."""

import jax.numpy as jnp
import numpy as np
import pytest
from tests.federation.rounds import method
from tests.statistical.checks import CHAINS, assert_exact, compare
from tests.statistical.targets import target, truth
from tests.statistical.test_posteriors import DURATION, DYNAMICS, sampled

import fedpdmc as fp
from fedpdmc._jax.precision import double_precision
from fedpdmc.potentials import ControlVariate, Quadratic
from fedpdmc.sampling.driver import Sampler
from fedpdmc.sampling.laplace_reference import laplace

SITES = 3
POINT = np.array([0.8, -0.7])


def elsewhere(model, reference):
    """Taylor polynomials of the right records at a point far from the mode."""
    return {
        site.name: at_point(site, truth(model, SITES).mean + POINT * truth(model, SITES).sd)
        for site in target(model, SITES).sites()
    }


def at_point(site, x):
    _, gradient, hessian = site.derivatives(x)
    return ControlVariate(Quadratic(jnp.asarray(hessian), jnp.asarray(gradient - hessian @ x)), jnp.asarray(x), 2)


def other_data(model, reference):
    """Those of another federation's records at its own mode: sites whose data have changed since."""
    stale = laplace(target(model, 1).sites(), target(model, 1).prior()).control["site0"]
    return {name: stale for name in reference.control}


def noisy(model, reference):
    """The right ones plus symmetric noise as large as they are themselves: indefinite, and so is their sum."""
    rng = np.random.default_rng(71)
    found = {}
    for name, (quadratic, point, order, *_) in reference.control.items():
        size = float(np.linalg.norm(quadratic.precision, 2)) + 1.0
        noise = size * rng.normal(size=(2, 2)) - 0.5 * size * np.eye(2)
        found[name] = ControlVariate(
            Quadratic(quadratic.precision + (noise + noise.T) / 2, quadratic.linear + size * rng.normal(size=2)),
            point, order,
        )  # fmt: skip
    return found


KINDS = {"elsewhere": elsewhere, "other data": other_data, "noisy": noisy}


@double_precision
def with_controls(model, kind):
    """The Laplace reference with other control variates than its own."""
    made = laplace(target(model, SITES).sites(), target(model, SITES).prior())
    return fp.Reference(made.center, made.scale_tril, KINDS[kind](model, made), made.rounds, made.bytes)


EVERYDAY = {
    ("noisy", "zigzag", "poisson", "quadratic"),
    ("other data", "bouncy", "poisson", "linear"),
}
LONG = {
    (kind, dynamics, model, control)
    for kind in KINDS
    for dynamics in DYNAMICS
    for model in ("logistic", "poisson", "student_t")
    for control in ("linear", "quadratic")
}
CASES = [pytest.param(*case) for case in sorted(EVERYDAY)]
CASES += [pytest.param(*case, marks=pytest.mark.long) for case in sorted(LONG - EVERYDAY)]


# Such controls are as far from the posterior as the warning says.
@pytest.mark.filterwarnings("ignore:The posterior is far")
@pytest.mark.parametrize(("kind", "dynamics", "model", "control"), CASES)
def test_any_control_variate_is_exact(kind, dynamics, model, control):
    reference = with_controls(model, kind)
    post = sampled(model, SITES, dynamics, DURATION[dynamics] / 2, reference=reference, control=control)
    assert_exact(post, truth(model, SITES), least_ess=500)


def test_noisy_controls_are_indefinite_alone_and_together():
    precision = [np.asarray(c.quadratic.precision) for c in with_controls("logistic", "noisy").control.values()]
    for matrix in (*precision, sum(precision) + target("logistic", SITES).prior_precision):
        np.testing.assert_allclose(matrix, matrix.T, rtol=1e-13, atol=1e-15)
    assert min(np.linalg.eigvalsh(matrix)[0] for matrix in precision) < 0
    assert np.linalg.eigvalsh(sum(precision) + target("logistic", SITES).prior_precision)[0] < 0


@double_precision
def posterior(shift):
    """The sites subtract ``shift`` more than the coordinator adds."""
    federation, found = target("poisson", SITES), truth("poisson", SITES)
    chosen = method(
        DYNAMICS["bouncy"], sites=federation.sites(), prior=federation.prior(), chains=CHAINS, seed=29,
        reference="laplace", control="linear", init=found.draws(CHAINS, seed=17),
    )  # fmt: skip
    theirs = {
        name: ControlVariate(Quadratic(c.quadratic.precision, c.quadratic.linear + shift), c.point, c.order)
        for name, c in chosen.control.items()
    }
    run = Sampler(chosen.replace(control=theirs), 0.0, "skeleton")
    return run.extend(duration=DURATION["bouncy"], progress=False)


def test_control_variates_that_differ_between_site_and_coordinator_are_caught():
    assert compare(posterior(0.0), truth("poisson", SITES)).exact
    assert not compare(posterior(0.3), truth("poisson", SITES)).exact
