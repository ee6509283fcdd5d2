"""The default says plainly when the posterior is too far from its reference, and names what to use."""

import re
import warnings

import numpy as np
import pytest

import fedpdmc as fp
from fedpdmc.console.progress import Tick
from fedpdmc.sampling.defaults import SECOND_RUN
from fedpdmc.sampling.run_cost import LATENT_REMEDY, Distance, Unsuitable

FAR = "The posterior is far from its reference: .*ZigZag"
WIDE = fp.models.normal_prior(1, scale=100.0)


def cauchy():
    """Three records with Cauchy errors: a posterior with tails like x⁻⁶."""
    return fp.Site(fp.models.student_t(np.ones((3, 1)), [-1.0, 0.0, 4.0], df=1.0), name="cauchy")


def separable():
    """Two records that leave the odds ratio open above."""
    return fp.Site(fp.models.logistic(np.array([[-1.0], [1.0]]), [0.0, 1.0]), name="separable")


SITES = pytest.mark.parametrize("site", [cauchy, pytest.param(separable, marks=pytest.mark.long)])


@pytest.mark.long
def test_rotations_say_when_the_reference_is_far_off():
    """As soon as it shows; here the word ends the run, which could go on."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match=FAR):
            fp.sample([cauchy()], WIDE, dynamics=fp.Boomerang(refresh=1.2), reference="laplace", seed=1, progress=False)


def truth_of_separable(scale=100.0):
    """Mean, standard deviation and median of the odds ratio's logarithm by quadrature."""
    x = np.linspace(-10.0, 8 * scale, 400_001)
    weight = np.exp(-2 * np.logaddexp(0.0, -x) - 0.5 * (x / scale) ** 2)
    weight /= weight.sum()
    mean = weight @ x
    return mean, np.sqrt(weight @ (x - mean) ** 2), x[np.searchsorted(np.cumsum(weight), 0.5)]


@pytest.mark.filterwarnings("ignore:This will take about")
def test_the_burn_in_decides_for_lines_where_rotations_are_unsuitable(monkeypatch):
    """Nothing that the decision saw is kept, nor any of its random numbers: the draws are exact."""
    # As where rays tell nothing beforehand.
    monkeypatch.setattr("fedpdmc.sampling.run_cost.site_event_rate", lambda *_: None)
    monkeypatch.setattr("fedpdmc.sampling.run_cost.flattest_tail", lambda *_: ("", np.inf))
    monkeypatch.setattr("fedpdmc.sampling.run_cost.LINES_EVENTS", 0.45)
    post = fp.sample([separable()], WIDE, seed=1, progress=False)
    assert isinstance(post.dynamics, fp.ZigZag) and "Zig-Zag was chosen in the burn-in" in post.settings["chosen"]
    assert post.settings["chosen"] in post.summary().notes and post.verdict.converged
    sampler = post.run
    assert sampler.given_up.rounds > 0 and sampler.given_up.plans < SECOND_RUN <= sampler.engine.plans.min()
    # What was given up has been paid for.
    assert post.rounds == sampler.engine.rounds + sampler.given_up.rounds + sampler.method.reference.rounds
    np.testing.assert_array_equal(post.messages, 2 * post.rounds)
    assert 0.2 < post.settings["ended_by_arrival"] <= 1.0
    mean, sd, median = truth_of_separable()
    error = sd / np.sqrt(post.ess()["x0"])
    assert abs(post.mean()[0] - mean) < 4 * error
    below = (post.draws(200) < median).mean()
    assert abs(below - 0.5) < 4 * 0.5 / np.sqrt(post.ess()["x0"])
    # The test can fail: the reference's own law is elsewhere.
    assert abs(float(post.reference.center[0]) - mean) > 10 * error
    again = fp.sample([separable()], WIDE, seed=1, progress=False)
    np.testing.assert_array_equal(again.mean(), post.mean())


def test_who_says_which_dynamics_gets_them():
    post = fp.sample([separable()], WIDE, dynamics=fp.Boomerang(), duration=1.0, seed=1, progress=False)
    assert isinstance(post.dynamics, fp.Boomerang) and post.settings["chosen"] == ""


@pytest.mark.long
def test_a_poor_yield_in_a_given_time_is_said_when_it_shows():
    """A run to a process time does not look at the effective sample size; whoever asks for it is told."""
    options = {"dynamics": fp.Boomerang(refresh=1.2), "chains": 4, "duration": 10.0, "seed": 1, "progress": False}
    post = fp.sample([cauchy()], fp.models.normal_prior(1, scale=3.0), **options)
    sampler = post.run
    assert sampler.distance.active and not sampler.distance.warned
    sampler.check_distance(4 * 10 * 0.03)
    with pytest.warns(UserWarning, match="a chain makes 0.01 effective samples per unit of process time"):
        sampler.check_distance(4 * 10 * 0.01)
    assert post.ess() and sampler.distance.warned


@SITES
def test_what_it_names_does_better(site):
    post = fp.sample([site()], WIDE, dynamics=fp.ZigZag(), reference="laplace", seed=1, progress=False)
    assert min(post.ess().values()) > 1000
    assert post.rounds < 1000


def ticks(distance, *found, until=10.0):
    """Events of all chains and rounds, told chunk by chunk."""
    for events, rounds in found:
        distance.tick(Tick(0.0, 1.0, until, events, rounds, 0.1))


def test_a_block_that_costs_too_much_is_noticed_while_it_runs():
    with pytest.warns(UserWarning, match="the sites have 2.5 events"):
        ticks(Distance(4), (0, 0), (100, 250))
    with pytest.warns(UserWarning, match="took 250 rounds for at most 10 units"):
        ticks(Distance(4), (0, 0), (60, 250))
    ticks(Distance(4), (0, 0), (100, 150))
    ticks(Distance(4), (0, 0), (60, 250), until=100.0)


def test_as_long_as_there_is_a_choice_less_is_too_much_and_more_with_more_parameters():
    for dim, events, unsuitable in (
        (1, 26.0, True),
        (1, 22.0, False),
        (3, 20.0, False),
        (20, 400.0, False),
        (20, 500.0, True),
    ):
        distance = Distance(4, dim)
        distance.deciding = True
        if unsuitable:
            with pytest.raises(Unsuitable, match="the sites have"):
                distance.judge_burn_in(events, 40.0)
        else:
            distance.judge_burn_in(events, 40.0)


def test_a_burn_in_that_cannot_choose_warns_where_one_that_can_would():
    with pytest.warns(UserWarning, match="the sites have 0.65 events"):
        Distance(4).judge_burn_in(26.0, 40.0)
    Distance(4).judge_burn_in(22.0, 40.0)
    # Too few in all to mean anything.
    Distance(4).judge_burn_in(4.0, 1.0)


def test_slow_mixing_is_noticed_and_told_once():
    distance = Distance(10)
    distance.judge(events=3.0, ess=300.0, span=100.0)
    distance.judge(events=3.0, ess=None, span=100.0)
    with pytest.warns(UserWarning, match=re.escape("makes 0.01 effective samples per unit of process time")) as told:
        distance.judge(events=3.0, ess=10.0, span=100.0)
        distance.judge(events=3.0, ess=10.0, span=100.0)
    assert len(told) == 1


def test_private_effects_are_not_told_to_use_what_they_are_refused():
    with pytest.warns(UserWarning, match="spread_scale") as told:
        Distance(64, 3, LATENT_REMEDY).judge(events=1e4, ess=None, span=10.0)
    assert "ZigZag" not in str(told[0].message)
