"""What a run will cost is said before it is drawn, and warned of where that is much."""

import warnings

import numpy as np
import pytest
from tests.support import hospitals, prior

import fedpdmc as fp
from fedpdmc.console.progress import PlainScreen, View
from fedpdmc.sampling.run_cost import CostEstimate, rounds_ahead
from fedpdmc.study import parse_study


@pytest.mark.parametrize(("rate", "shape"), [(0.3, None), (3.0, None), (2.0, 1.0)])
def test_the_slowest_of_many_chains_counts(rate, shape):
    """Poisson counts, and counts that vary more, over times as long as those that are foreseen."""
    rng = np.random.default_rng(0)

    def counts(length):
        each = (
            np.full(64, rate)
            if shape is None
            else rng.gamma(shape, rate / shape, (round(length / 5), 64)).sum(0) * 5 / length
        )
        return rng.poisson(each * length)

    foreseen = np.mean([rounds_ahead(counts(20.0), 20.0, 80.0) for _ in range(50)])
    met = np.mean([1 + counts(80.0).max() for _ in range(50)])
    assert 0.8 * met < foreseen < 1.3 * met


def test_what_is_known_beforehand_counts_before_anything_is_seen():
    assert rounds_ahead(np.zeros(64), 0.0, 100.0, least=2.0) > 200
    assert rounds_ahead(np.zeros(64), 5.0, 100.0) == 1


def test_much_is_warned_of_once_and_again_when_it_has_grown():
    estimate = CostEstimate("Do this.")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert estimate.tell(499.0, None, "an ESS of 10") == "about 499 rounds to an ESS of 10"
        CostEstimate("Do this.", usual_chains=True).tell(59.0, None, "an ESS of 10")
    with pytest.warns(UserWarning, match="about 61 rounds"):
        CostEstimate("Do this.", usual_chains=True).tell(61.0, None, "an ESS of 10")
    with pytest.warns(
        UserWarning, match=r"will take about 600 rounds and 1:10 more, to an ESS of 10\. .* Do this\."
    ) as told:
        for rounds in (600.0, 700.0, 2000.0):
            estimate.tell(rounds, 70.0, "an ESS of 10")
    assert len(told) == 1
    with pytest.warns(UserWarning, match="about 3,000 rounds"):
        estimate.tell(3000.0, None, "an ESS of 10")
    slow = CostEstimate("Do this.", usual_chains=True)
    slow.burn_in = 50
    with pytest.warns(UserWarning, match=r"about 20 rounds more, to an ESS of 10, after 50 for the burn-in\."):
        slow.tell(20.0, None, "an ESS of 10")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        CostEstimate(None).tell(1e6, 1e6, "an ESS of 10")


def test_a_default_run_of_many_rounds_is_announced():
    cauchy = fp.Site(fp.models.student_t(np.ones((3, 1)), [-1.0, 0.0, 4.0], df=1.0), name="cauchy")
    options = {"duration": 1500.0, "seed": 1, "progress": False}
    with pytest.warns(
        UserWarning, match=r"This will take about [\d,]+ rounds .*to process time 1500.*more chains"
    ) as told:
        post = fp.sample([cauchy], fp.models.normal_prior(1, scale=100.0), **options)
    foreseen = float(str(told[0].message).split()[4].replace(",", ""))
    assert 0.5 * post.rounds < foreseen < 2 * post.rounds


STUDY = """
format = 1
name = "three records"
sites = ["north"]
[model]
family = "student_t"
df = 1.0
scale = 1.0
formula = "y ~ 1"
[columns]
y = { type = "number", bounds = [-100, 100] }
[prior]
scale = 100.0
[dynamics]
chains = 64
[run]
duration = 5.0
[releases]
derivatives = "own"
[limits]
rounds = 20000
observed_time = 1e6
"""


@pytest.mark.long
@pytest.mark.parametrize(("heavy", "y"), [(True, [-1.0, 0.0, 4.0]), (False, np.linspace(-2.0, 2.0, 40))])
def test_a_study_cannot_choose_and_warns_with_what_it_will_cost(tmp_path, heavy, y):
    (tmp_path / "north.csv").write_text("\n".join(["y", *map(str, y)]) + "\n")
    long = STUDY.replace("duration = 5.0", "duration = 3000.0") if heavy else STUDY
    with fp.connect(parse_study(long.encode()), data={"north": tmp_path / "north.csv"}, seed=1) as connection:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            fp.sample(connection, progress=False)
    said = [str(one.message) for one in told if "converged" not in str(one.message)]
    if heavy:
        assert "The posterior is far from its reference: the sites have" in said[0]
        assert "at least about" in said[1] and 'kind = "ZigZag" in the contract' in said[1]
    else:
        assert said == []


def test_who_has_chosen_is_not_warned(recwarn):
    fp.sample(hospitals(), prior(), dynamics=fp.ZigZag(excess=0.1), chains=4, seed=3, duration=1000.0, progress=False)
    assert not [one for one in recwarn if "This will take" in str(one.message)]


def test_off_a_terminal_only_what_takes_long_is_said(capsys):
    screen = PlainScreen(lambda: View("sampling", None, 0.0, None, [], ""))
    with screen:
        screen.foresee("sampling, about 30 rounds", 2.0)
        screen.foresee("sampling, about 40 rounds", None)
        assert capsys.readouterr().err == ""
        screen.foresee("sampling, about 900 rounds and 0:50 to an ESS of 10", 50.0)
    assert capsys.readouterr().err == "fedpdmc: sampling, about 900 rounds and 0:50 to an ESS of 10\n"
