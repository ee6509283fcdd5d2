"""The private answer in one shot, through real sites and ledgers."""

import numpy as np
import pytest
from scipy.optimize import brentq

import fedpdmc as fp
from fedpdmc.errors import BudgetSpent, InputError
from fedpdmc.privacy.accountant import gaussian_delta

TRUTH = np.array([0.8, -0.5])


def hospitals(tmp_path, records=20_000, epsilon=4.0, sites=2, seed=0, **terms):
    """Sites with ledgers of their own, and all of their records."""
    rng, found, everything = np.random.default_rng(seed), [], []
    for m in range(sites):
        X = rng.normal(size=(records, 2))
        X /= np.maximum(1.0, np.linalg.norm(X, axis=1, keepdims=True))
        y = rng.random(records) < 1 / (1 + np.exp(-X @ TRUTH))
        ledger = fp.create_ledger(tmp_path / f"{m}.db")
        budget = fp.Budget(epsilon, 1e-5, bounds=fp.Bounds(norm=1.0), ledger=ledger, seeded_for_tests=True, **terms)
        found.append(fp.Site(fp.models.logistic(X, y), name=f"site {m}", budget=budget, seed=seed + m))
        everything.append((X, y))
    return found, tuple(np.concatenate(part) for part in zip(*everything, strict=True))


def laplace(X, y, scale):
    """Mean and covariance of the Laplace approximation of the pooled records."""
    x = np.zeros(X.shape[1])
    for _ in range(30):
        p = 1 / (1 + np.exp(-X @ x))
        precision = (X.T * (p * (1 - p))) @ X + np.eye(len(x)) / scale**2
        x = x - np.linalg.solve(precision, X.T @ (p - y) + x / scale**2)
    return x, np.linalg.inv(precision)


def gaussian_mu(epsilon, delta):
    return brentq(lambda mu: gaussian_delta(epsilon, mu) - delta, 1e-6, 50.0, xtol=1e-12)


def test_it_is_the_default_under_budgets_and_says_what_it_is(tmp_path):
    sites, (X, y) = hospitals(tmp_path)
    post = fp.sample(sites, fp.models.normal_prior(2), seed=1)
    mean, cov = laplace(X, y, 1.0)
    off = (post.mean() - mean) / np.sqrt(np.diag(cov))
    assert np.all(np.abs(off) < 1.0) and np.all(np.diag(post.cov()) > 0.98 * np.diag(cov))
    assert post.settings["method"] == "private-laplace" and post.settings["exact"] is False and not post.certified
    assert "NOT exact" in " ".join(post.summary().notes) and post.rounds == 4
    for report in post.privacy.values():
        assert report["spent"] == pytest.approx(1.0, abs=1e-6) and report["spent"] <= 1.0 and report["releases"] == 4
        # The curve of a Gaussian mechanism of k times the size: more than k times ε.
        mu, several = gaussian_mu(report["running_epsilon"], report["delta"]), report["epsilon_of_several_records"]
        for k, epsilon in several.items():
            assert epsilon > int(k) * report["running_epsilon"]
            assert gaussian_delta(epsilon, int(k) * mu) == pytest.approx(report["delta"], rel=1e-3)
    assert "a person with several records at" in " ".join(post.summary().notes)
    again = fp.sample(sites, fp.models.normal_prior(2), seed=1)
    np.testing.assert_array_equal(again.draws(100), post.draws(100))
    post.save(tmp_path / "one.zarr")
    np.testing.assert_array_equal(fp.load(tmp_path / "one.zarr").draws(100), post.draws(100))


def test_another_question_is_refused_when_the_budget_is_spent(tmp_path):
    sites, _ = hospitals(tmp_path, records=2000)
    fp.sample(sites, fp.models.normal_prior(2), seed=1)
    with pytest.raises(BudgetSpent):
        fp.sample(sites, fp.models.normal_prior(2, mean=0.5), seed=1)


def test_what_a_named_share_leaves_is_there_for_the_exact_chain(tmp_path):
    sites, _ = hospitals(tmp_path, records=2000, release=0.5)
    post = fp.sample(sites, fp.models.normal_prior(2), method="private-laplace")
    assert all(report["spent"] == pytest.approx(0.5, abs=1e-6) for report in post.privacy.values())


def test_bad_input_charges_nothing(tmp_path):
    sites, _ = hospitals(tmp_path, records=100)
    with pytest.raises(InputError, match="proper Gaussian"):
        fp.sample(sites, None, method="private-laplace")
    with pytest.raises(InputError, match="duration"):
        fp.sample(sites, fp.models.normal_prior(2), duration=3.0)
    with pytest.raises(InputError, match="method"):
        fp.sample(sites, fp.models.normal_prior(2), method="private")
    ledger, _ = sites[0].budget.open()
    assert ledger.spent(sites[0].budget.account_name) == 0.0


def test_noise_that_swamps_the_records_is_said(tmp_path):
    sites, _ = hospitals(tmp_path, records=30, epsilon=0.2)
    with pytest.warns(UserWarning, match="leaves little of the records"):
        fp.sample(sites, fp.models.normal_prior(2), seed=2)


@pytest.mark.long
@pytest.mark.parametrize(("records", "epsilon"), [(1000, 1.0), (5000, 0.5), (5000, 8.0)])
def test_intervals_cover(tmp_path, records, epsilon):
    """Of 95 % intervals of studies whose truth is drawn from the prior, 95 % cover it; without the noise they do not."""
    covered, ignored, studies = [], [], 150
    for study in range(studies):
        rng = np.random.default_rng([study, records])
        truth, folder = rng.normal(size=2), tmp_path / str(study)
        folder.mkdir()
        found = []
        for m in range(2):
            X = rng.normal(size=(records, 2))
            X /= np.maximum(1.0, np.linalg.norm(X, axis=1, keepdims=True))
            y = rng.random(records) < 1 / (1 + np.exp(-X @ truth))
            budget = fp.Budget(
                epsilon, 1e-5, bounds=fp.Bounds(norm=1.0), ledger=fp.create_ledger(folder / f"{m}.db"),
                seeded_for_tests=True,
            )  # fmt: skip
            site = fp.Site(fp.models.logistic(X, y), name=f"{m}", budget=budget, seed=2 * study + m)
            found.append(site)
        post = fp.sample(found, fp.models.normal_prior(2), seed=study)
        draws = post.draws(1000).reshape(-1, 2)
        low, high = np.quantile(draws, [0.025, 0.975], axis=0)
        covered.append((low < truth) & (truth < high))
        narrow = 1.96 / np.sqrt(2 * records * 0.11)
        ignored.append(np.abs(post.mean() - truth) < narrow)
    error = np.sqrt(0.95 * 0.05 / np.size(covered))
    assert abs(np.mean(covered) - 0.95) < 3.5 * error
    if epsilon < 8:
        assert np.mean(ignored) < 0.95 - 5 * error
