import numpy as np
import pytest
from tests.privacy.support import private_site, records

import fedpdmc as fp
from fedpdmc.errors import BudgetSpent, InputError

# In coordinates of scale 0.3 one record changes a rate by at most 0.6.
SCALE = fp.Reference(np.zeros(2), np.full(2, 0.3))
SHORT = {"dynamics": fp.ZigZag(), "reference": SCALE, "chains": 4, "burn_in": 0.5, "seed": 3, "progress": False}


def two_sites(folder, **options):
    return [private_site(folder / "ledger.db", name, **options) for name in ("north", "south")]


def prior():
    return fp.models.normal_prior(2, mean=[0.5, -0.3], scale=2.0)


def test_a_posterior_says_what_was_spent(tmp_path):
    sites = [
        *two_sites(tmp_path, epsilon=40.0, excess=1.0),
        fp.Site(fp.models.logistic(*records("plain")), name="plain"),
    ]
    post = fp.sample(sites, prior(), duration=1.0, **SHORT)
    assert set(post.privacy) == {"north", "south"}
    for name, facts in post.privacy.items():
        assert (facts["epsilon"], facts["delta"], facts["neighbours"]) == (40.0, 1e-3, "replace")
        # Every chain was watched for at least its process time, burn-in included, and not beyond the cap.
        assert 4 * 1.5 <= facts["observed"] <= facts["cap"]
        assert facts["spent"] == pytest.approx(facts["observed"] / facts["cap"])
        assert 0 < facts["running_epsilon"] <= 40.0
        assert name in post.summary()
    text = post.summary()
    assert "in total" in text and "per round" not in text
    assert "covered: everything" in text and "not covered: how long" in text and "NOT private" in text
    post.save(tmp_path / "run.zarr")
    assert fp.load(tmp_path / "run.zarr").privacy == post.privacy
    # Going on is charged to the same run; an older posterior cannot go on.
    more = post.extend(duration=0.5, progress=False)
    assert more.privacy["north"]["observed"] > post.privacy["north"]["observed"]
    with pytest.raises(InputError, match="extend the last posterior"):
        post.extend(duration=0.5, progress=False)


def test_a_run_that_does_not_fit_is_refused_before_it_starts(tmp_path):
    sites = two_sites(tmp_path, epsilon=1.0, delta=1e-5)
    with pytest.raises(InputError, match=r"privacy budget of site .* covers .* fewer chains"):
        fp.sample(sites, prior(), duration=50.0, **SHORT)
    assert all(site.budget.open(site.dataset)[0].spent(site.dataset) == 0 for site in sites)


def test_a_run_that_just_fits_never_runs_out(tmp_path):
    # The horizon shrinks as what is left does: the run ends within its cap, whatever the sites do.
    sites = two_sites(tmp_path, epsilon=15.0, excess=1.0)
    with pytest.raises(InputError, match="covers") as refused:
        fp.sample(sites, prior(), duration=1e6, **SHORT)
    fits = float(refused.value.remedy.split("covers ")[1].split(":")[0])
    post = fp.sample(sites, prior(), duration=0.99 * fits - 0.5, **SHORT)
    assert all(0.9 < facts["spent"] <= 1.0 for facts in post.privacy.values())
    with pytest.raises((InputError, BudgetSpent)):
        post.extend(duration=0.2 * fits, progress=False)


def test_effective_samples_end_with_the_budget(tmp_path):
    sites = two_sites(tmp_path, epsilon=15.0, excess=1.0)
    with pytest.warns(UserWarning, match="the run ends with it"):
        post = fp.sample(sites, prior(), ess=100000, **SHORT)
    assert post.duration > 0.5 and max(facts["spent"] for facts in post.privacy.values()) > 0.8


def test_budgets_are_shared_by_studies_on_one_data_set(tmp_path):
    for study in ("first", "second"):
        site = private_site(tmp_path / "ledger.db", "north", epsilon=40.0, excess=1.0, study=study, dataset="cohort")
        post = fp.sample([site], prior(), duration=0.5, **SHORT)
    facts = post.privacy["north"]
    assert facts["dataset"] == "cohort" and facts["spent"] > 1.5 * facts["observed"] / facts["cap"]


def test_released_references_are_noisy_charged_and_refused_when_spent(tmp_path):
    sites = two_sites(tmp_path, release=0.4, n=400, epsilon=20.0)
    plain = [fp.Site(site.raw, name=site.name) for site in sites]
    exact, noisy = fp.laplace(plain, prior()), fp.laplace(sites, prior())
    difference = np.abs(np.asarray(exact.center) - np.asarray(noisy.center))
    assert 0 < difference.max() < 3 * np.linalg.norm(np.asarray(exact.scale_tril), axis=1).max()
    ledger, account = sites[0].budget.open("north")
    assert ledger.spent("north") == pytest.approx(0.4 * account.limit)
    assert ledger.releases("north") == noisy.rounds == 4
    fp.laplace(sites, prior())
    with pytest.raises(BudgetSpent):
        fp.laplace(sites, prior())
