"""The federated mode, and the control variates made there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize
from tests.support import LOSS_NAMES, hospitals, predictor, prior

import fedpdmc as fp
from fedpdmc.potentials import Potential
from fedpdmc.sampling.mode_search import MOST_ROUNDS


def energy(x):
    total = 0.5 * np.sum(((x - [0.5, -0.3]) / 2.0) ** 2)
    for site in hospitals():
        design, labels = np.asarray(site.potential.design), np.asarray(site.potential.response)
        total += np.sum(np.logaddexp(0, design @ x) - labels * (design @ x))
    return total


def test_laplace_finds_the_mode_and_the_curvature_there():
    made = fp.laplace(hospitals(), prior(), tolerance=1e-9)
    mode = optimize.minimize(energy, np.zeros(2), tol=1e-12).x
    np.testing.assert_allclose(made.center, mode, atol=1e-6)
    weights = [np.asarray(s.potential.design) for s in hospitals()]
    hessian = np.eye(2) / 4
    for design in weights:
        p = 1 / (1 + np.exp(-design @ np.asarray(made.center)))
        hessian = hessian + (design * (p * (1 - p))[:, None]).T @ design
    scale = np.asarray(made.scale_tril)
    np.testing.assert_allclose(scale @ scale.T, np.linalg.inv(hessian), rtol=1e-8)


def test_laplace_counts_its_rounds_and_bytes():
    made = fp.laplace(hospitals(), prior())
    assert 2 <= made.rounds <= 10
    # A point out; a value, a gradient and a Hessian back.
    assert made.bytes == {"north": made.rounds * 8 * (2 + 1 + 2 + 4), "south": made.rounds * 8 * (2 + 1 + 2 + 4)}


def test_the_sum_of_prior_and_controls_is_the_quadratic_of_the_reference():
    made = fp.laplace(hospitals(), prior())
    precision = np.asarray(prior().precision) + sum(np.asarray(c.quadratic.precision) for c in made.control.values())
    linear = np.asarray(prior().linear) + sum(np.asarray(c.quadratic.linear) for c in made.control.values())
    scale = np.asarray(made.scale_tril)
    np.testing.assert_allclose(scale.T @ precision @ scale, np.eye(2), atol=1e-9)
    np.testing.assert_allclose(precision @ np.asarray(made.center) + linear, 0.0, atol=1e-9)


def test_a_gaussian_posterior_takes_two_rounds():
    rng = np.random.default_rng(0)
    y = rng.normal(3.0, 1.0, (6, 2))
    made = fp.laplace([fp.Site(fp.models.gaussian_mean(y), name="a")])
    np.testing.assert_allclose(made.center, y.mean(0), rtol=1e-9)
    np.testing.assert_allclose(made.scale_tril, np.eye(2) / np.sqrt(6), atol=1e-9)
    assert made.rounds <= 2


def test_sites_of_some_coordinates_are_put_in_their_place():
    y = np.array([[1.0], [3.0]])
    sites = [fp.Site(fp.models.gaussian_mean(y), name="first", coordinates=[2]),
             fp.Site(fp.models.gaussian_mean(-y), name="second", coordinates=[0])]  # fmt: skip
    made = fp.laplace(sites, fp.models.normal_prior(3))
    np.testing.assert_allclose(made.center, [-4 / 3, 0.0, 4 / 3], atol=1e-9)


@pytest.mark.parametrize("start", [20.0, -20.0])
def test_newton_is_damped_where_the_first_step_would_overshoot(start):
    design, counts = np.ones((3, 1)), [2, 3, 4]
    made = fp.laplace([fp.Site(fp.models.poisson(design, counts), name="a")], fp.models.normal_prior(1, start, 50.0))
    assert float(made.center[0]) == pytest.approx(np.log(3), abs=0.05)


class Quartic(Potential):
    """A potential that says nothing but its value: ``Σ (x_i − i)⁴ + (x_0 − x_1)²/2``."""

    size: int

    @property
    def dim(self):
        return self.size

    def value(self, x):
        return jnp.sum((x - jnp.arange(self.size)) ** 4) + 0.5 * (x[0] - x[1]) ** 2

    def whiten(self, reference, columns):
        raise NotImplementedError

    def field(self, rotating, flips, a, v):
        raise NotImplementedError


def test_any_potential_is_differentiated_by_jax():
    made = fp.laplace([fp.Site(Quartic(3), name="a")], fp.models.normal_prior(3, scale=2.0), tolerance=1e-8)

    def energy(x):
        return np.sum((x - np.arange(3)) ** 4) + 0.5 * (x[0] - x[1]) ** 2 + np.sum(x**2) / 8

    mode = optimize.minimize(energy, np.zeros(3), tol=1e-14).x
    np.testing.assert_allclose(made.center, mode, atol=1e-6)
    hessian = np.diag(12 * (mode - np.arange(3)) ** 2 + 0.25)
    hessian[:2, :2] += [[1, -1], [-1, 1]]
    scale = np.asarray(made.scale_tril)
    np.testing.assert_allclose(scale @ scale.T, np.linalg.inv(hessian), rtol=1e-5)


@pytest.mark.parametrize("diagonal", [False, True])
@pytest.mark.parametrize("name", LOSS_NAMES)
def test_the_closed_forms_of_sums_over_records_are_those_of_jax(name, diagonal, double):
    potential, x = predictor(name, diagonal=diagonal), jnp.asarray([0.4, -0.7, 0.2])
    assert type(potential).gradient is not Potential.gradient and type(potential).hessian is not Potential.hessian
    np.testing.assert_allclose(potential.gradient(x), jax.grad(potential.value)(x), rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(potential.hessian(x), jax.hessian(potential.value)(x), rtol=1e-10, atol=1e-12)


X = np.array([[1.0, -2.0], [1.0, -1.0], [1.0, 1.0], [1.0, 2.0]])
HARD = {
    "separable": (X, [0.0, 0.0, 1.0, 1.0]),
    "separable and far": (1e4 * X, [0.0, 0.0, 1.0, 1.0]),
    "collinear": (X[:, [1, 1]], [0.0, 1.0, 0.0, 1.0]),
    "one record": (X[:1], [1.0]),
    "no records": (X[:0], []),
}


@pytest.mark.parametrize("scale", [1.0, 1e3])
@pytest.mark.parametrize("case", HARD)
def test_hard_likelihoods_have_a_reference_under_a_proper_prior(case, scale):
    design, labels = HARD[case]
    sites = [
        fp.Site(fp.models.logistic(design, labels), name="hard"),
        fp.Site(fp.models.logistic(X[:0], []), name="empty"),
    ]
    wide = fp.models.normal_prior(2, scale=scale)
    made = fp.laplace(sites, wide)
    assert made.rounds <= MOST_ROUNDS and set(made.bytes.values()) == {made.rounds * 8 * 9}
    center, factor = np.asarray(made.center), np.asarray(made.scale_tril)
    cov = factor @ factor.T
    # A minimum: the gradient there is small against the curvature, and nowhere near is lower.
    p = 1 / (1 + np.exp(-np.clip(design @ center, -700, 700)))
    gradient = design.T @ (p - np.asarray(labels)) + center / scale**2
    assert gradient @ cov @ gradient < 1e-3
    assert np.all(np.linalg.eigvalsh(cov) > 0) and np.all(np.linalg.eigvalsh(cov) <= scale**2 * (1 + 1e-9))
