"""Posteriors that go on after they were saved: the same bits with the same sites, and nothing with others."""

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import zarr
from tests.privacy.support import private_site, records
from tests.sampling.test_reference_warning import separable
from tests.support import ZIGZAG, default_run, hospitals, logistic_site, prior, short_run, zigzag_run

import fedpdmc as fp
from fedpdmc.errors import InputError
from fedpdmc.results import manifest
from fedpdmc.sampling.run_state_arrays import site_fingerprint

RUNS = {
    "boomerang": default_run,
    "zigzag": zigzag_run,
    "zigzag, draws": lambda: zigzag_run("draws"),
    "bouncy": lambda: short_run(dynamics=fp.BouncyParticle(), duration=3.0, burn_in=1.0),
    "renewed shares": lambda: short_run(
        prior_=fp.Redistributed(prior(), 0.5), dynamics=ZIGZAG, duration=3.0, burn_in=1.0
    ),
    "prior apart": lambda: short_run(prior_at="extra", dynamics=ZIGZAG, duration=3.0, burn_in=1.0),
    "linear control apart": lambda: short_run(control="linear", dynamics=ZIGZAG, duration=3.0, burn_in=1.0),
}


@functools.cache
def longer():
    return zigzag_run().extend(duration=3.0, progress=False)


def saved(post, folder):
    post.save(folder / "run.zarr")
    return fp.load(folder / "run.zarr")


def assert_same(one, other):
    np.testing.assert_array_equal(one.draws(50), other.draws(50))
    np.testing.assert_array_equal(one.mean(), other.mean())
    np.testing.assert_array_equal(one.cov(), other.cov())
    for name in ("events", "messages", "bytes", "gradient_evaluations", "violations", "rounds", "certified", "names"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)
    assert one.settings == other.settings and one.rhat() == other.rhat()


@pytest.mark.parametrize(
    "kind", [kind if k < 3 else pytest.param(kind, marks=pytest.mark.long) for k, kind in enumerate(RUNS)]
)
def test_a_loaded_posterior_goes_on_with_the_same_bits(kind, tmp_path):
    post = RUNS[kind]()
    given = fp.Redistributed(prior(), 0.5) if kind == "renewed shares" else prior()
    loaded = saved(post, tmp_path)
    before = loaded.draws(20)
    # New objects of the same records, and in another order.
    again = loaded.extend(duration=3.0, sites=hospitals()[::-1], prior=given, progress=False)
    assert_same(post.extend(duration=3.0, progress=False), again)
    # The posterior that went on is as it was.
    assert again.duration == loaded.duration + 3.0 == post.duration + 3.0
    np.testing.assert_array_equal(loaded.draws(20), before)


def test_the_archive_of_a_loaded_posterior_goes_on_as_the_first(tmp_path):
    again = saved(saved(zigzag_run(), tmp_path), tmp_path).extend(
        duration=3.0, sites=hospitals(), prior=prior(), progress=False
    )
    assert_same(longer(), again)
    # And what went on is saved with where it stands then.
    twice = saved(again, tmp_path).extend(duration=2.0, sites=hospitals(), prior=prior(), progress=False)
    assert_same(longer().extend(duration=2.0, progress=False), twice)


def test_an_effective_sample_size_is_reached_after_loading(tmp_path):
    options = {"ess": 300.0, "progress": False}
    again = saved(zigzag_run(), tmp_path).extend(sites=hospitals(), prior=prior(), **options)
    assert_same(zigzag_run().extend(**options), again)
    assert min(again.ess().values()) >= 300.0


def test_another_seed_of_a_site_gives_other_draws(tmp_path):
    """The comparison of bits can fail."""
    north, south = hospitals()
    other = fp.Site(north.raw, name="north", seed=8)
    again = saved(zigzag_run(), tmp_path).extend(duration=3.0, sites=[other, south], prior=prior(), progress=False)
    np.testing.assert_array_equal(again.draws(130)[:, :90], longer().draws(130)[:, :90])
    assert not np.array_equal(again.draws(130), longer().draws(130))


def test_a_posterior_in_memory_compares_the_sites_that_it_is_given():
    assert_same(longer(), zigzag_run().extend(duration=3.0, sites=hospitals(), prior=prior(), progress=False))
    with pytest.raises(InputError, match=r"sites \('north'\).*other records"):
        zigzag_run().extend(duration=3.0, sites=others("north", seed=1), prior=prior(), progress=False)


# what is refused -----------------------------------------------------------------------------------------------------


def others(name, **options):
    """The hospitals, one of them with other records."""
    return [logistic_site(name, site.records, **options) if site.name == name else site for site in hospitals()]


def three_parameters():
    return [fp.Site(fp.models.logistic(np.eye(3), [0, 1, 0]), name=name) for name in ("north", "south")]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return saved(zigzag_run(), tmp_path_factory.mktemp("archive"))


@pytest.mark.parametrize(
    ("sites", "given", "match"),
    [
        (None, None, "sites: found None.*read from disk.*sites=sites, prior=prior"),
        (None, prior, "sites: found None with a prior"),
        (hospitals, None, "prior: found None, a flat prior.*sample"),
        (hospitals, lambda: fp.models.normal_prior(2), "prior: found another prior"),
        (hospitals, lambda: fp.Redistributed(prior(), 0.5), "prior: found another prior"),
        (hospitals, lambda: lambda x: jnp.sum(x**2), "prior: found another prior"),
        (lambda: hospitals()[:1], prior, "sites: found 1 named north.*has 2: north, south"),
        (lambda: [*hospitals(), logistic_site("west")], prior, "sites: found 3 named"),
        (lambda: [logistic_site("n"), logistic_site("s")], prior, "sites: found 2 named n, s.*has 2: north, south"),
        (three_parameters, lambda: fp.models.normal_prior(3), "sites: found models of 3 parameters.*has 2: x0, x1"),
        (lambda: others("south", seed=1), prior, r"sites \('south'\): found another model or other records.*sample again"),
        (lambda: others("north", coordinates=[1, 0]), prior, r"sites \('north'\): found coordinates=\[1, 0\]"),
        (lambda: ["north"], prior, "sites: found a str"),
    ],
)  # fmt: skip
def test_other_sites_and_priors_are_refused(loaded, sites, given, match):
    with pytest.raises(InputError, match=match):
        loaded.extend(duration=1.0, sites=sites and sites(), prior=given and given(), progress=False)


def test_the_length_is_checked_first(loaded):
    with pytest.raises(InputError, match="duration, ess"):
        loaded.extend(duration=1.0, ess=10.0)


def remove(folder, *, array):
    """Take the state of the run out of an archive, or one array of it, and seal what is left."""
    if array:
        shutil.rmtree(folder / "run-state_v")
    else:
        group = zarr.open_group(str(folder), mode="a", zarr_format=3)
        attrs = dict(group.attrs)
        del attrs["run"]
        group.attrs.put(attrs)
    manifest.write(folder)


def test_an_archive_can_be_saved_without_what_the_state_tells(tmp_path):
    default_run().save(tmp_path / "run.zarr", state=False)
    assert not [path for path in (tmp_path / "run.zarr").iterdir() if path.name.startswith("run-")]
    assert "fingerprint" not in (tmp_path / "run.zarr" / "zarr.json").read_text()
    with pytest.raises(InputError, match="without the state of its run"):
        fp.load(tmp_path / "run.zarr").extend(duration=1.0, sites=hospitals(), prior=prior())


@pytest.mark.parametrize("array", [True, False])
def test_an_archive_without_the_state_says_so(array, tmp_path):
    zigzag_run().save(tmp_path / "run.zarr")
    remove(tmp_path / "run.zarr", array=array)
    post = fp.load(tmp_path / "run.zarr")
    np.testing.assert_array_equal(post.mean(), zigzag_run().mean())
    with pytest.raises(InputError, match="without the state of its run.*sample again"):
        post.extend(duration=1.0, sites=hospitals(), prior=prior())


def test_a_state_that_was_changed_is_not_read(tmp_path):
    """Whoever does not know of the manifest."""
    zigzag_run().save(tmp_path / "run.zarr")
    shutil.rmtree(tmp_path / "run.zarr" / "run-state_v")
    with pytest.raises(InputError, match=r"run-state_v.* missing"):
        fp.load(tmp_path / "run.zarr")


# another process -----------------------------------------------------------------------------------------------------

DATA = {"X": np.arange(18.0).reshape(9, 2) / 9 - 1, "y": np.linspace(-1.0, 1.5, 9)}
SCALE = 0.8


def robust(x, data):
    """A call with a derivative of its own, and a value from outside."""
    return jnp.sum(jax.nn.softplus(jnp.log1p((data["y"] - data["X"] @ x) ** 2 / SCALE)))


def of_function(function=robust, data=DATA):
    return site_fingerprint(fp.Site(function, data=data, name="own", coordinates=[0, 1]))


def test_a_function_is_known_by_its_program_and_its_data():
    assert of_function() == of_function()
    assert of_function(data=DATA | {"y": DATA["y"] + 1e-12}) != of_function()
    assert of_function(lambda x, data: 2 * robust(x, data)) != of_function()


ELSEWHERE = """
import sys
import fedpdmc as fp
from tests.sampling.test_continue_saved_run import hospitals, of_function, prior
post = fp.load(sys.argv[1]).extend(duration=3.0, sites=hospitals(), prior=prior(), progress=False)
print(post.draws(50).tobytes().hex(), of_function())
"""


def test_another_process_makes_the_same_bits_and_knows_a_function_again(tmp_path):
    zigzag_run().save(tmp_path / "run.zarr")
    root = Path(__file__).parents[2]
    paths = os.pathsep.join([str(root), *sys.path])
    told = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, str(tmp_path / "run.zarr")],
        check=True, capture_output=True, text=True, cwd=root, env=os.environ | {"PYTHONPATH": paths},
    )  # fmt: skip
    draws, fingerprint = told.stdout.split()
    assert draws == longer().draws(50).tobytes().hex() and fingerprint == of_function()


# other kinds of runs -------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_runs_of_functions_and_of_sites_that_are_not_always_asked_go_on(tmp_path):
    """Padded programs with a prior that is a function; plans that concern some sites only."""
    sites = [fp.Site(robust, data={name: part[:n] for name, part in DATA.items()}, name=f"own{n}") for n in (5, 9)]
    options = {"chains": 4, "seed": 3, "progress": False, "duration": 3.0}
    going_on = {"duration": 3.0, "progress": False}

    def gauss(x):
        return jnp.sum((x - 0.3) ** 2)

    post = fp.sample(sites, gauss, init=np.zeros(2), **options)
    again = saved(post, tmp_path).extend(sites=sites[::-1], prior=gauss, **going_on)
    assert_same(post.extend(**going_on), again)
    with pytest.raises(InputError, match="prior: found None"):
        saved(post, tmp_path).extend(sites=sites, **going_on)
    wards = [fp.Site(fp.models.gaussian_mean([[0.3], [1.0]]), name=f"{i}", coordinates=[i]) for i in range(3)]
    tied = fp.models.normal_prior(3, precision=[[2.0, -1.0, 0.0], [-1.0, 3.0, -1.0], [0.0, -1.0, 2.0]])
    post = fp.sample(wards, tied, dynamics=fp.ZigZag(), **options)
    assert post.run.engine.selective
    assert_same(post.extend(**going_on), saved(post, tmp_path).extend(sites=wards, prior=tied, **going_on))


@pytest.mark.long
def test_a_method_that_was_chosen_in_the_burn_in_goes_on(tmp_path):
    site, wide = separable(), fp.models.normal_prior(1, scale=100.0)
    post = fp.sample([site], wide, seed=1, duration=5.0, chains=8, progress=False)
    assert post.settings["chosen"]
    again = saved(post, tmp_path).extend(duration=5.0, sites=site, prior=wide, progress=False)
    assert_same(post.extend(duration=5.0, progress=False), again)


# privacy budgets -----------------------------------------------------------------------------------------------------


def private(folder, ledger="one", **options):
    folder.mkdir(exist_ok=True)
    return private_site(folder / f"{ledger}.db", "north", **{"epsilon": 40.0, "excess": 1.0} | options)


def private_run(folder, ledger):
    return fp.sample(
        private(folder, ledger), prior(), dynamics=fp.ZigZag(), reference=fp.Reference(np.zeros(2), np.full(2, 0.3)),
        chains=4, burn_in=0.5, duration=1.0, seed=3, progress=False,
    )  # fmt: skip


def charged(site):
    """The share of the account that its ledger has spent."""
    ledger, account = site.budget.open()
    return ledger.spent("north") / account.limit


def test_a_private_site_is_charged_for_what_goes_on_as_in_memory(tmp_path):
    """Two ledgers with the same history; the sites have seeds, for tests only."""
    stayed, left = private_run(tmp_path, "one"), private_run(tmp_path, "two")
    loaded = saved(left, tmp_path)
    assert loaded.run.state().facts["sites"][0]["fingerprint"] is None
    longer = stayed.extend(duration=0.5, progress=False)
    again = loaded.extend(duration=0.5, sites=private(tmp_path, "two"), prior=prior(), progress=False)
    assert_same(longer, again)
    facts, others = again.privacy["north"], longer.privacy["north"]
    assert all(
        facts[name] == pytest.approx(others[name], rel=1e-12) for name in ("observed", "spent", "running_epsilon")
    )
    # Every chain was watched for the time that was added.
    assert facts["observed"] >= left.privacy["north"]["observed"] + 4 * 0.5
    assert charged(private(tmp_path, "one")) == pytest.approx(charged(private(tmp_path, "two")), rel=1e-12)
    assert charged(private(tmp_path, "two")) == pytest.approx(facts["spent"], rel=1e-12)


def test_a_private_site_goes_on_with_its_own_records_ledger_and_budget_only(tmp_path):
    loaded = saved(private_run(tmp_path, "one"), tmp_path)
    spent = charged(private(tmp_path, "one"))
    unknown = r"sites \('north'\): found a budget whose ledger does not have run"
    for site, duration, match in (
        (private(tmp_path, "one"), 1e6, "privacy budget of site 'north' covers"),
        (private(tmp_path, "one", data=records("south")), 0.5, unknown),
        (private(tmp_path, "two"), 0.5, unknown),
        (fp.Site(private(tmp_path, "one").raw, name="north"), 0.5, r"sites \('north'\): found no privacy budget"),
    ):
        with pytest.raises(InputError, match=match):
            loaded.extend(duration=duration, sites=site, prior=prior(), progress=False)
    assert charged(private(tmp_path, "one")) == spent
