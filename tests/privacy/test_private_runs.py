import numpy as np
import pytest
from tests.privacy.support import private_site, records

import fedpdmc as fp
from fedpdmc.errors import BudgetSpent, InputError
from fedpdmc.members.bounded_records import LossFacts
from fedpdmc.privacy.ledger import read
from fedpdmc.sampling.vb_reference import vb

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
        assert facts["spent"] == pytest.approx(facts["observed"] / facts["cap"], rel=1e-4)
        assert 0 < facts["running_epsilon"] <= 40.0
        assert any(name in note for note in post.summary().notes)
    text = " ".join(post.summary().notes)
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
    assert all(site.budget.open()[0].spent(site.name) == 0 for site in sites)


def test_a_run_that_just_fits_never_runs_out(tmp_path):
    # The horizon shrinks as what is left does: the run ends within its cap, whatever the sites do.
    sites = two_sites(tmp_path, epsilon=9.0, excess=1.0)
    fits = covered(sites)
    post = fp.sample(sites, prior(), duration=0.99 * fits - 0.5, **SHORT)
    assert all(0.9 < facts["spent"] <= 1.0 for facts in post.privacy.values())
    with pytest.raises((InputError, BudgetSpent)):
        post.extend(duration=0.2 * fits, progress=False)


def test_a_site_that_is_not_asked_is_not_charged(tmp_path):
    ledger = tmp_path / "ledger.db"
    sites = [
        fp.Site(site.potential, name=site.name, coordinates=own, seed=5, budget=site.budget)
        for own, site in (
            ([0], private_site(ledger, "north", d=1, excess=0.5)),
            ([1], private_site(ledger, "south", d=1, excess=0.5)),
        )
    ]
    tied = fp.models.normal_prior(2, precision=[[4.0, -2.0], [-2.0, 4.0]])
    post = fp.sample(sites, tied, duration=16.0, **SHORT | {"chains": 1})
    entries = [entry for entry in read(ledger) if entry.kind == "round"]
    for place, name in enumerate(("north", "south")):
        own = [entry for entry in entries if entry.dataset == name]
        # One charge for each message; many rounds concern the other site alone.
        assert 2 * len(own) == post.messages[place] < 2 * 0.9 * post.rounds
        observed = post.privacy[name]["observed"]
        assert observed == pytest.approx(sum(entry.exposure for entry in own))
        # Watched for the whole run at least, and not for long beyond: what is known of a site is not asked again.
        assert 16.5 <= observed * (1 + 1e-9) < 2 * 16.5


def test_effective_samples_end_with_the_budget(tmp_path):
    sites = two_sites(tmp_path, epsilon=9.0, excess=1.0)
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
    ledger, account = sites[0].budget.open()
    assert ledger.spent("north") == pytest.approx(0.4 * account.limit)
    assert ledger.releases("north") == noisy.rounds == 4
    # The same again: what was told before, and no second charge.
    again = fp.laplace(sites, prior())
    for name in ("center", "scale_tril"):
        np.testing.assert_array_equal(getattr(again, name), getattr(noisy, name))
    assert ledger.spent("north") <= 0.4 * account.limit and ledger.releases("north") == 4
    # Another one is not covered by the share, though the budget would cover it.
    with pytest.raises(BudgetSpent, match="RELEASE_SPENT"):
        fp.laplace(sites, fp.models.normal_prior(2, scale=1.0))
    assert ledger.spent("north") <= 0.4 * account.limit and ledger.releases("north") == 4
    # A larger share buys one with what it adds.
    more = two_sites(tmp_path, release=0.6, n=400, epsilon=20.0)
    fp.laplace(more, fp.models.normal_prior(2, scale=1.0))
    assert ledger.spent("north") == pytest.approx(0.6 * account.limit) and ledger.releases("north") == 8


def test_the_last_noisy_step_can_be_an_average_at_the_same_price(tmp_path):
    spent = {}
    for name, make in (("laplace", fp.laplace), ("vb", vb)):
        sites = two_sites(tmp_path / name, release=0.4, n=400, epsilon=20.0)
        found = make(sites, prior())
        assert found.name == name and found.rounds == 4
        ledger, _ = sites[0].budget.open()
        spent[name] = ledger.spent("north"), ledger.releases("north"), found
    assert spent["vb"][:2] == pytest.approx(spent["laplace"][:2])
    assert spent["vb"][2].control["north"].spread is not None and spent["laplace"][2].control["north"].spread is None
    # Asked again it is told again, at no charge.
    again = vb(sites, prior())
    np.testing.assert_array_equal(again.center, spent["vb"][2].center)
    assert ledger.releases("north") == 4


def test_a_release_that_was_cut_short_goes_on_where_it_was(tmp_path, monkeypatch):
    sites = two_sites(tmp_path, release=0.4, n=400, epsilon=20.0)
    real, asked = LossFacts.derivatives, []

    def power_cut(records, x, spread=None):
        asked.append(x)
        if len(asked) == 6:
            raise KeyboardInterrupt
        return real(records, x, spread)

    monkeypatch.setattr(LossFacts, "derivatives", power_cut)
    with pytest.raises(KeyboardInterrupt):
        fp.laplace(sites, prior())
    fp.laplace(sites, prior())
    # Five answers before the cut and three after it: eight in all, none of them made twice.
    assert len(asked) == 9
    ledger, account = sites[0].budget.open()
    for name in ("north", "south"):
        assert ledger.releases(name) == 4 and ledger.spent(name) == pytest.approx(0.4 * account.limit)


def test_other_columns_under_another_name_are_charged_to_the_same_account(tmp_path):
    """One ledger is one data set, unless its owner names several."""
    X, y = records("north")
    spent = []
    for name, columns in (("north", X), ("nord", X[:, ::-1] ** 2), ("new name", 0.5 * X)):
        site = private_site(tmp_path / "ledger.db", name, data=(columns, y), epsilon=40.0, excess=1.0, dataset=None)
        post = fp.sample([site], prior(), duration=0.5, **SHORT)
        spent.append(post.privacy[name]["spent"])
        assert post.privacy[name]["dataset"] == "records"
    assert spent[1] > 1.5 * spent[0] and spent[2] > 1.2 * spent[1]
    with pytest.raises(InputError, match="terms cannot be changed"):
        fp.sample([private_site(tmp_path / "ledger.db", "x", epsilon=41.0, dataset=None)], duration=0.5, **SHORT)
    # Nor does a name that was left out, or comes later, open a second account.
    with pytest.raises(InputError, match="one unnamed data set"):
        private_site(tmp_path / "ledger.db", "x", dataset="x").budget.open()
    private_site(tmp_path / "named.db", "x", dataset="x").budget.open()
    private_site(tmp_path / "named.db", "y", dataset="y").budget.open()
    with pytest.raises(InputError, match="which holds 'x', 'y'"):
        private_site(tmp_path / "named.db", "x", dataset=None).budget.open()


def covered(sites):
    """The process time that fits into the sites' budgets, as the refusal of a long run says."""
    with pytest.raises(InputError, match="covers") as refused:
        fp.sample(sites, prior(), duration=1e6, **SHORT)
    return float(refused.value.remedy.split("covers ")[1].split(":")[0])


def test_sites_that_share_an_account_share_what_it_covers(tmp_path):
    apart = two_sites(tmp_path, excess=1.0)
    sharing = two_sites(tmp_path, excess=1.0, dataset="both", ledger=tmp_path / "shared.db")
    assert covered(sharing) == pytest.approx(covered(apart) / 2, rel=1e-3)
    facts = fp.sample(sharing, prior(), duration=0.5, **SHORT).privacy
    together = sum(one["observed"] / one["cap"] for one in facts.values())
    assert facts["north"]["spent"] == facts["south"]["spent"] == pytest.approx(together, rel=1e-4)


def test_a_study_spends_no_more_than_it_was_granted(tmp_path):
    options = {"epsilon": 40.0, "excess": 1.0, "dataset": "cohort"}
    site = private_site(tmp_path / "ledger.db", study="small", granted=(20.0, 1e-3), **options)
    fits = covered([site])
    post = fp.sample([site], prior(), duration=0.99 * fits - 0.5, **SHORT)
    assert 0.2 < post.privacy["north"]["spent"] < 0.5 and post.privacy["north"]["granted"] == [20.0, 1e-3]
    with pytest.raises((InputError, BudgetSpent)):
        fp.sample([site], prior(), duration=0.2 * fits, **SHORT)
    # The rest is another study's.
    other = private_site(tmp_path / "ledger.db", study="large", **options)
    assert fp.sample([other], prior(), duration=0.5, **SHORT).privacy["north"]["spent"] > post.privacy["north"]["spent"]
    with pytest.raises(InputError, match="granted"):
        fp.sample([private_site(tmp_path / "ledger.db", granted=(1e-3, 1e-9), **options)], duration=0.5, **SHORT)
