"""The choices that are made where a user leaves them open."""

import dataclasses

import numpy as np
import pytest
from tests.federation.rounds import method
from tests.support import ZIGZAG, hospitals, logistic_site, prior

import fedpdmc as fp
from fedpdmc.clocks import CurveClock, SegmentClock
from fedpdmc.errors import InputError
from fedpdmc.members.run_coordinates import choose_clock
from fedpdmc.sampling import factory
from fedpdmc.sampling.arguments import Settings
from fedpdmc.sampling.defaults import SECOND_RUN, choose, on_lines, usual_chains, usual_segments
from fedpdmc.sampling.engines.compiled_loop import CompiledEngine
from fedpdmc.sampling.engines.rounds import RoundsEngine
from fedpdmc.sampling.vb_reference import Tails

pytestmark = pytest.mark.usefixtures("double")


def partial():
    return [logistic_site("north", coordinates=[0, 1]), logistic_site("south", coordinates=[1, 2])]


@pytest.fixture
def default():
    return method()


def test_the_default_is_the_few_rounds_method(default):
    assert isinstance(default.dynamics, fp.Boomerang) and default.dynamics.turns
    assert (default.reference_name, default.control_name) == ("vb", "quadratic")
    assert default.few_rounds and default.whitened and default.open_dynamics and default.certified
    assert default.segments == 64 and default.names == ["x0", "x1"]
    # A few records: the reference is as wide as the tails. Of many, chains need two turns.
    assert default.burn_in(None, None) == default.burn_in(None, 1000.0) == 2 * np.pi and default.burn_in(2, None) == 2.0
    usual = default.replace(reference=dataclasses.replace(default.reference, starts=None))
    assert usual.burn_in(None, None) == np.pi
    assert usual.replace(dynamics=fp.Boomerang(1.2)).burn_in(None, None) == 5.0
    narrow = dataclasses.replace(usual.reference, narrow=(0, 3.0))
    assert usual.replace(reference=narrow).burn_in(None, None) == 8 * np.pi
    far = np.asarray(default.reference.to_x(np.array([8.0, 0.0])))
    assert usual.replace(init=far).burn_in(None, None) == 8 * np.pi
    assert usual.replace(init=np.asarray(default.reference.center)).burn_in(None, None) == np.pi
    unsettled = dataclasses.replace(default.reference, name="laplace", why="averages did not settle")
    assert default.replace(reference=unsettled).burn_in(None, None) == 8 * np.pi


@pytest.mark.parametrize(
    ("dynamics", "sites", "reference", "control"),
    [
        (ZIGZAG, hospitals, "laplace", "linear"),
        (fp.BouncyParticle(), hospitals, "laplace", "linear"),
        (fp.FactorisedBoomerang(), hospitals, "vb", "quadratic"),
        (ZIGZAG, partial, "diagonal", "linear"),
        (fp.BouncyParticle(), partial, "laplace", "linear"),
    ],
)
def test_reference_and_control_follow_the_dynamics_and_the_sites(dynamics, sites, reference, control):
    flat = fp.models.normal_prior(3 if sites is partial else 2)
    chosen = choose(Settings(sites=sites(), prior=flat, dynamics=dynamics, seed=1))
    assert (chosen.reference_name, chosen.control_name) == (reference, control)
    assert not chosen.open_dynamics and chosen.chains == 64
    assert chosen.segments == (64 if control == "quadratic" else 1)


def test_the_identity_has_no_control_variates_and_a_longer_burn_in():
    chosen = method(ZIGZAG)
    assert (chosen.reference_name, chosen.control_name, chosen.control) == ("identity", "none", {})
    assert not chosen.whitened and chosen.burn_in(None, None) == 10.0 and chosen.burn_in(None, 30.0) == 3.0


def test_chains_follow_the_effective_sample_size_of_the_few_rounds_method():
    assert [usual_chains(True, ess) for ess in (1.0, 1000.0, 1e9, None)] == [16, 128, 2048, 64]
    assert usual_chains(False, 1e9) == 64
    assert usual_chains(True, 1000.0, private=True) == 64


def test_segments_follow_the_records_and_are_most_where_those_are_unknown(tmp_path):
    sites = [logistic_site(str(n), n) for n in (400, 500)]
    assert usual_segments(sites, 4) == 64 and usual_segments([logistic_site("big", 20_000)], 4) == 256
    assert usual_segments([logistic_site("big", 20_000)], 64) == 64
    bounds = fp.Bounds(norm=10.0, region=10.0)
    hidden = logistic_site("hidden", budget=fp.Budget(1.0, 1e-6, bounds=bounds, ledger=tmp_path / "ledger"))
    assert usual_segments([hidden], 4) == 512


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (
            {"sites": partial(), "prior": fp.models.normal_prior(3), "prior_at": "sites"},
            "^prior_at: found 'sites' with",
        ),
        ({"sites": [logistic_site("prior")], "prior_at": "extra"}, "^sites: found a site named 'prior'"),
        ({"sites": [logistic_site("a", log=print)], "bounds": "adaptive"}, "^bounds: found 'adaptive' with"),
    ],
)
def test_settings_that_do_not_suit_the_sites_are_refused(options, match):
    with pytest.raises(InputError, match=match):
        method(ZIGZAG, **options)


def test_zigzag_in_place_of_the_default_shares_its_reference_and_none_of_its_randomness(default):
    other = on_lines(default, "it was slow", "in a test")
    assert other is not None and other.reference is default.reference and other.control_name == "linear"
    assert other.segments == 1 and other.first_plan == SECOND_RUN and not other.open_dynamics
    assert other.chosen == "Zig-Zag was chosen in a test, in place of the Boomerang: it was slow"
    # Rounds are those of the slowest chain: as many chains again where their number was left open.
    assert other.chains == default.chains
    assert getattr(on_lines(default.replace(open_chains=True), "", ""), "chains", 0) == 2 * default.chains
    one, two = factory.start_state(default), factory.start_state(other)
    assert np.all(np.asarray(two.number) == SECOND_RUN)
    assert not np.any(np.asarray(one.a) == np.asarray(two.a))


def test_chains_set_out_at_init_or_about_the_centre(default):
    given = factory.start_state(method(ZIGZAG, init=[1.0, 2.0]), burn_in=3.0)
    np.testing.assert_array_equal(given.a, [[1.0, 2.0]] * 4)
    np.testing.assert_array_equal(given.t, [-3.0] * 4)
    assert np.all(np.abs(np.asarray(given.v)) == 1)
    plain = np.asarray(factory.start_state(method(ZIGZAG, chains=64)).a)
    assert np.all(np.abs(plain.mean(0) - [0.5, -0.3]) < 0.1) and np.all(plain.std(0) < 0.2)


def test_sites_without_budget_or_log_are_compiled_and_all_others_asked_one_by_one():
    assert isinstance(factory.open_engine(method(ZIGZAG), 0.0)[0], CompiledEngine)
    engine, pace = factory.open_engine(method(ZIGZAG, sites=[logistic_site("a", log=lambda *_: None)]), 0.0)
    assert isinstance(engine, RoundsEngine) and pace is None


def test_the_prior_is_shared_in_proportion_to_the_records():
    chosen = method(ZIGZAG, prior_at="sites")
    parts = [factory.opening(chosen, site).prior_share for site in chosen.sites]
    for part, records in zip(parts, (12, 7), strict=True):
        np.testing.assert_allclose(part.precision, np.asarray(prior().precision) * records / 19)
        np.testing.assert_allclose(part.linear, np.asarray(prior().linear) * records / 19)
    assert chosen.public is None


def test_sites_with_a_share_of_the_prior_walk_with_fast_clocks(monkeypatch):
    monkeypatch.setattr(Tails, "widens", False)
    methods = method(), method(prior_at="sites")
    walked = [[choose_clock(site, factory.opening(one, site)).clock for site in one.sites] for one in methods]
    # Which of the fast clocks it is may change with the share: their costs are nearly the same.
    assert all(isinstance(clock, (CurveClock, SegmentClock)) for clocks in walked for clock in clocks)
