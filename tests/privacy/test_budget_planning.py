import numpy as np
import pytest

from fedpdmc.privacy.accountant import Sensitivity, best_order, renyi_limit, run_epsilon
from fedpdmc.privacy.budget_planning import (
    HONEST,
    MIXING,
    Question,
    advice,
    answer,
    choices,
    exact_samples,
    frontier,
    most_samples,
    one_shot_error,
    plot_comparison,
    text,
    usual_sensitivity,
    waste,
    ways,
)

QUESTION = Question(100_000, 5, 6, 1.0, 1e-6, usual_sensitivity(100_000, 5, 6), 2.0)


def test_a_choice_is_within_its_budget():
    for choice in frontier(QUESTION)[:: max(1, len(frontier(QUESTION)) // 5)]:
        k = QUESTION.sensitivity
        spent = run_epsilon(Sensitivity(k, k * 6**0.5, k), choice.excess, choice.cap, QUESTION.delta)
        assert spent <= QUESTION.epsilon * (1 + 1e-9)
        assert choice.process_time <= choice.cap <= QUESTION.sites * choice.process_time * (1 + 1e-9)


def test_the_frontier_trades_rounds_for_samples():
    found = frontier(QUESTION)
    rounds, samples = [c.rounds for c in found], [c.samples for c in found]
    assert rounds == sorted(rounds) and samples == sorted(samples) and len(found) > 5
    assert samples[-1] == most_samples(QUESTION)
    assert answer(QUESTION).samples >= QUESTION.samples
    assert answer(QUESTION._replace(samples=1e9)) is None


def test_the_most_samples_are_what_the_design_says():
    # For Mρ large about η/(2 M K²) effective samples for a run with ε(α) = αη, whatever ρ.
    alpha = best_order(QUESTION.epsilon, QUESTION.delta)
    eta = renyi_limit(alpha, QUESTION.epsilon, QUESTION.delta) / alpha
    expected = HONEST * eta / (2 * QUESTION.sites * QUESTION.sensitivity**2)
    assert most_samples(QUESTION) == pytest.approx(expected, rel=0.1)
    one, more = (most_samples(QUESTION._replace(sensitivity=k)) for k in (0.01, 0.005))
    assert more == pytest.approx(4 * one, rel=0.1)


def test_words_for_what_is_not_possible():
    assert advice(QUESTION).startswith("Possible")
    assert "not even one" in advice(QUESTION._replace(sensitivity=0.5))
    assert "at most" in advice(QUESTION._replace(samples=1e6))
    assert frontier(QUESTION._replace(sensitivity=0.5)) == []
    assert len(choices(QUESTION)) > 100


@pytest.mark.parametrize(("sites", "share"), [(1, 5.0), (5, 1.0), (5, 20.0), (20, 0.1)])
def test_the_waste_of_losing_arrivals(sites, share):
    rng, arrivals = np.random.default_rng(4), 3.0
    horizon = share / arrivals
    times = np.minimum(rng.exponential(sites / arrivals, (100_000, sites)), horizon)
    found = times[:, 0].mean() / times.min(1).mean()
    assert waste(arrivals, horizon, sites) == pytest.approx(found, rel=0.03)
    assert 1 - 1e-12 <= waste(arrivals, horizon, sites) <= sites


def zigzag_time(rng, rate, span=150.0, chains=1500):
    """Process time for an effective sample of a Gaussian coordinate with excess flips, by simulation."""
    x, v = rng.normal(size=chains), rng.choice([-1.0, 1.0], chains)
    t, integral = np.zeros(chains), np.zeros(chains)
    while np.any(t < span):
        ahead, level = v * x, 2 * rng.exponential(size=chains)
        wait = -ahead + np.sqrt(np.maximum(ahead, 0) ** 2 + level)
        wait = np.minimum(np.minimum(wait, rng.exponential(size=chains) / rate), span - t)
        integral += wait * (x + v * wait / 2)
        x, t = x + v * wait, t + wait
        v = np.where(t < span, -v, v)
    return integral.var() / span


@pytest.mark.parametrize("rate", [1e-9, 1.0, 5.0])
def test_the_mixing_time_of_excess_flips(rate):
    found = zigzag_time(np.random.default_rng(6), rate)
    assert MIXING[0] + MIXING[1] * rate == pytest.approx(found, rel=0.15)


STUDY = Question(30_000, 4, 3, 4.0, 1e-5, usual_sensitivity(30_000, 4, 3), 100.0)


def test_the_ways_are_compared_and_one_is_recommended():
    found = {way.name: way.error for way in ways(STUDY)}
    assert list(found) == ["secure sum", "one shot", "exact chain"]
    # Three honest sites share the noise of one: in the sum it is 4/3 of it, where four sites of their own have 4.
    assert found["one shot"] / found["secure sum"] == pytest.approx(3**0.5)
    assert one_shot_error(STUDY) / one_shot_error(STUDY, 0) == pytest.approx(2.0)
    assert found["exact chain"] ** -2 == pytest.approx(exact_samples(STUDY))
    # What such studies were measured to have.
    assert 13 < exact_samples(STUDY._replace(sites=2, sensitivity=0.032)) < 25
    # With two sites there is nobody to share noise with if one may collude.
    assert "secure sum" not in {way.name for way in ways(STUDY._replace(sites=2))}
    assert {way.name for way in ways(STUDY._replace(sites=2), colluding=0)} == set(found)


def test_the_words_of_the_comparison_fit_a_terminal(tmp_path):
    said = text(STUDY, "replace")
    assert said.startswith("Recommended: secure sum") and max(map(len, said.splitlines())) < 80
    rows = {line.split()[0]: line.split()[1:4] for line in said.splitlines() if line[:3] in ("rep", "add", "lab")}
    assert set(rows) == {"replace", "add-remove", "label"} and rows["label"] == rows["add-remove"] != rows["replace"]
    assert "None is useful" in text(STUDY._replace(sensitivity=2.0), "label")
    assert text(STUDY._replace(sites=2), "replace").startswith("Recommended: one shot.")
    plot_comparison(STUDY, tmp_path / "ways.png")
    assert (tmp_path / "ways.png").stat().st_size > 1000
