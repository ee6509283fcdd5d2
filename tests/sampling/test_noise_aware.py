"""The posterior given noisy derivatives against quadrature, and its coverage over simulated studies."""

import numpy as np
import pytest

from fedpdmc.sampling import one_shot
from fedpdmc.sampling.one_shot import Gaussian, NoisyRelease

DRAWS = 20_000


def one_dimension(sd_g, sd_h):
    """A noisy gradient and curvature whose posterior of θ is skewed: the curvature is hardly above its noise."""
    release = NoisyRelease(np.array([0.3]), np.array([-9.0]), np.array([[6.0]]), np.array([sd_g]), np.array([[sd_h]]))
    return release, Gaussian(np.array([0.2]), np.array([[0.5]]))


def by_quadrature(release, prior):
    """Mean, variance and third central moment of θ by a sum over a fine grid of θ and h > 0."""
    theta, h = np.linspace(-9, 9, 2001)[:, None], np.linspace(1e-4, 60, 4001)[None, :]
    spread = h + release.gradient_sd[0] ** 2
    log = -0.5 * (release.gradient[0] + h * (theta - release.x[0])) ** 2 / spread - 0.5 * np.log(spread)
    log = log - 0.5 * ((release.hessian[0, 0] - h) / release.hessian_sd[0, 0]) ** 2
    log = log - 0.5 * prior.precision[0, 0] * (theta - prior.mean[0]) ** 2
    weight = np.exp(log - log.max()).sum(1)
    weight /= weight.sum()
    mean = float(weight @ theta[:, 0])
    return mean, float(weight @ (theta[:, 0] - mean) ** 2), float(weight @ (theta[:, 0] - mean) ** 3)


@pytest.mark.parametrize(("sd_g", "sd_h"), [(2.0, 4.0), (3.0, 3.0)])
def test_draws_have_the_moments_of_quadrature(sd_g, sd_h):
    release, prior = one_dimension(sd_g, sd_h)
    found = one_shot.posterior_draws(release, prior, DRAWS, np.random.default_rng(3))[:, 0]
    mean, variance, third = by_quadrature(release, prior)
    # The Hessians that draws share are 256: their part of the variance has that many effective draws.
    few = one_shot.HESSIANS
    off = found - found.mean()
    assert abs(found.mean() - mean) < 4.5 * np.sqrt(variance / few)
    assert abs(off.var() - variance) < 4.5 * np.sqrt(np.var(off**2) / few)
    assert abs(np.mean(off**3) - third) < 4.5 * np.sqrt(np.var(off**3) / few)
    assert abs(third) > 0.2 * variance**1.5, "the target must be skewed for this to be a test"


def test_noise_left_out_is_seen():
    release, prior = one_dimension(6.0, 9.0)
    _, variance, _ = by_quadrature(release, prior)
    ignored = release._replace(gradient_sd=np.zeros(1), hessian_sd=np.zeros((1, 1)))
    found = one_shot.posterior_draws(ignored, prior, DRAWS, np.random.default_rng(3))[:, 0]
    assert found.var() < 0.5 * variance


def test_without_noise_it_is_the_laplace_approximation():
    hessian = np.array([[5.0, 1.0], [1.0, 3.0]])
    release = NoisyRelease(np.array([1.0, -1.0]), np.array([0.5, 2.0]), hessian, np.zeros(2), np.zeros((2, 2)))
    prior = Gaussian(np.zeros(2), np.eye(2))
    mean, cov = one_shot.given_hessian(release, hessian, prior)
    assert np.allclose(cov, np.linalg.inv(hessian + np.eye(2)))
    assert np.allclose(mean, np.linalg.solve(hessian + np.eye(2), hessian @ release.x - release.gradient))


def test_with_noise_without_bound_it_is_the_prior():
    hessian = np.array([[5.0, 1.0], [1.0, 3.0]])
    release = NoisyRelease(np.array([1.0, -1.0]), np.array([0.5, 2.0]), hessian, np.full(2, 1e6), np.full((2, 2), 1.0))
    mean, cov = one_shot.given_hessian(release, hessian, Gaussian(np.array([0.3, 0.1]), np.eye(2)))
    assert np.allclose(mean, [0.3, 0.1], atol=1e-4) and np.allclose(cov, np.eye(2), atol=1e-4)


def test_releases_of_a_quadratic_are_pooled_without_loss():
    """θ from the prior, one score, several noisy gradients: z = (θ − mean)/sd has variance one, sd is smaller."""
    rng, hessian, prior = np.random.default_rng(4), np.array([[9.0, 2.0], [2.0, 5.0]]), Gaussian(np.zeros(2), np.eye(2))
    z, narrower = [], []
    for _ in range(1500):
        theta = rng.standard_normal(2)
        score, releases, x = np.linalg.cholesky(hessian) @ rng.standard_normal(2), [], prior.mean
        for sd in (8.0, 6.0, 5.0, 4.0):
            gradient = score - hessian @ (theta - x) + sd * rng.standard_normal(2)
            releases.append(NoisyRelease(x, gradient, hessian, np.full(2, sd), np.zeros((2, 2))))
            one, x = one_shot.pooled(releases, prior)
        mean, cov = one_shot.given_hessian(one, hessian, prior)
        z.append((theta - mean) / np.sqrt(np.diag(cov)))
        alone = one_shot.given_hessian(releases[-1], hessian, prior)[1]
        narrower.append(np.sqrt(np.diag(cov) / np.diag(alone)))
    # What is added for a change of the curvature, which a quadratic does not have, makes it a little wider.
    square, error = np.mean(np.square(z)), np.std(np.mean(np.square(z), 1)) / np.sqrt(len(z))
    assert 0.9 - 4 * error < square < 1 + 4 * error
    assert np.mean(narrower) < 0.95


@pytest.mark.parametrize(("change", "right"), [(one_shot.CURVATURE_CHANGE, True), (0.0, False)])
def test_where_there_is_little_noise_the_points_far_away_have_no_say(monkeypatch, change, right):
    """A logistic likelihood of 10⁵ records: Newton's first steps are off by more than the noise."""
    monkeypatch.setattr(one_shot, "CURVATURE_CHANGE", change)
    n, p, prior, x, releases = 1e5, 0.9, Gaussian(np.zeros(1), np.eye(1)), np.zeros(1), []
    for sd in (200.0, 120.0, 100.0, 80.0):
        mean = 1 / (1 + np.exp(-x))
        releases.append(
            NoisyRelease(x, n * (mean - p), np.diag(n * mean * (1 - mean)), np.full(1, sd), np.zeros((1, 1)))
        )
        x = one_shot.pooled(releases, prior)[1]
    deviation = np.sqrt(1 / (n * p * (1 - p)))
    assert (abs(x[0] - np.log(p / (1 - p))) < 0.15 * deviation) == right
