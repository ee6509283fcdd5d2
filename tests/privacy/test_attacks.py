"""The attacks that broke the promise in the bytes: each distinguishes two neighbouring data sets unless it is stopped."""

import math

import jax
import numpy as np
import pytest
from scipy import stats
from tests.privacy.agents import RUN, Attacked, attacked, contract, neighbours
from tests.privacy.audit import PASSES, labels, lower_bound, pair
from tests.privacy.support import a_ledger, a_plan

import fedpdmc as fp
from fedpdmc._jax.precision import double_precision
from fedpdmc.clocks.private_arrivals import time_grid
from fedpdmc.errors import InputError, LedgerError, PlanRefused
from fedpdmc.federation import messages
from fedpdmc.federation.site_agent import computation
from fedpdmc.members.private_site import less_public, noisy_derivatives
from fedpdmc.privacy.accountant import run_epsilon
from fedpdmc.privacy.budget_planning import ONE_SHOT
from fedpdmc.privacy.ledger import FAULT, head_path, read
from fedpdmc.study import parse_study

FAMILIES = ("logistic", "poisson", "linear", "student_t")
KINDS = ("ZigZag", "FactorisedBoomerang")
RELATIONS = ("replace", "add-remove", "label")
ALL = [(family, kind, relation) for family in FAMILIES for kind in KINDS for relation in RELATIONS]
DAILY = [("logistic", "ZigZag", "replace")]
EVERY = [pytest.param(*case, marks=() if case in DAILY else pytest.mark.long, id=", ".join(case)) for case in ALL]


def lattice_images(time, rate):
    """Which times are, to the bit, what ``−log(1 − u)/rate`` gives for a uniform u on a grid of 2⁻⁵³: Mironov's attack.

    Of times much shorter than 1/rate a small part is so by chance.
    """
    found = np.zeros(len(time), bool)
    nearest = np.round(-np.expm1(-time * rate) * 2.0**53)
    for shift in (-1, 0, 1):
        found |= np.isclose(-np.log1p(-(nearest + shift) * 2.0**-53) / rate, time, rtol=2.0**-51, atol=0)
    return found


def test_the_bits_of_a_time_do_not_tell_where_it_came_from(double, tmp_path):
    """Under one data set all flips are excess flips, under the other a third comes from the records."""
    rho, horizon, chains = 40.0, 2.0**-12, 20_000
    case, tests = labels([20.0]), []
    for k, site in enumerate(pair(tmp_path, case, rho)):
        time, rang, _ = site._walk(a_plan(np.zeros((chains, 1)), 1.0, horizon), b"key %d" % k, PASSES)
        found = lattice_images(time[rang], rho)
        # Flips that are recognised, and those that are told to be something else.
        assert found.mean() < 0.2, "excess flips are recognised by their bits"
        tests.append(np.where(rang, 0.0, -1.0))
        tests[-1][rang] = np.where(found, 1.0, 2.0)
        # At most 32 significant bits, on a grid that the plan alone decides.
        cells = time[rang] / time_grid(np.array([horizon]), 1).unit
        np.testing.assert_array_equal(cells, np.round(cells))
        assert np.all(cells < 2.0**31)
        assert stats.chisquare(np.bincount(cells.astype(np.int64) & 7, minlength=8)).pvalue > 1e-3
    claimed = run_epsilon(site.sensitivity, rho, horizon, 1e-5)
    assert max(lower_bound(*tests, 1e-5), lower_bound(*tests[::-1], 1e-5)) <= claimed


def far_plans(kind):
    """Starts and speeds at which rounding was larger than K, or a walk without end."""
    speed = (1.0, 1.0) if kind == "ZigZag" else (0.5, -1.0)
    return [((size, -size), speed) for size in (1e7, 1e8, 1e14, 1e20, 1e29, 1e200)]


@pytest.mark.parametrize(("family", "kind", "relation"), EVERY)
def test_far_away_both_are_refused_in_the_same_bytes_and_nothing_is_charged(tmp_path, family, kind, relation):
    sites = attacked(tmp_path, family, relation, kind=kind)
    opened = [site.open(precision=30.0 * np.eye(2))[1] for site in sites]
    np.testing.assert_array_equal(opened[0].account, opened[1].account)
    for number, (start, velocity) in enumerate(far_plans(kind)):
        answers = [site.plans(start, velocity, 0.5, number) for site in sites]
        assert answers[0][0] == answers[1][0] and answers[0][1].code in ("PLAN_REFUSED", "PLAN_TOO_FAR")
    assert [site.spent for site in sites] == [0.0, 0.0]
    # Where it is not refused, what is told is within the account: the same rings but for a few.
    rings = [site.plans((0.1, -0.1), far_plans(kind)[0][1], 0.5, 9)[1].rang.sum() for site in sites]
    assert all(site.spent > 0 for site in sites) and abs(int(rings[0]) - int(rings[1])) < 40
    for site in sites:
        site.close()


@pytest.mark.parametrize(("family", "kind", "relation"), EVERY)
def test_no_fault_can_be_provoked_within_the_limits(tmp_path, family, kind, relation):
    """As far as the site lets a plan go, and with a control variate that is as steep as it lets it be."""
    sites = attacked(tmp_path, family, relation, kind=kind, chains=8)
    for site in sites:
        site.open(precision=1e3 * np.eye(2), linear=(1e6, -1e6))
        distance = site.agent.computation.private.limits.distance
        for number, share in enumerate((0.4, 0.01, 1e-3, 1e-5)):
            start = np.array([1.0, -1.0]) * share * distance
            for velocity in ((1.0, 1.0), (-1.0, 1.0)):
                answer = site.plans(start, velocity, 1e-4, 2 * number + (velocity[0] < 0))[1]
                if isinstance(answer, messages.Refusal):
                    assert answer.code == "PLAN_REFUSED"
        assert FAULT not in [entry.reply for entry in read(site.ledger)]
        site.close()


OPENINGS = {
    "scale": {"scale": (1.4e61, 1.4e61)},
    "large scale": {"scale": (1e12, 1e12)},
    "centre": {"center": (5e17, 5e17)},
    "far centre": {"center": (1e14, -1e14)},
    "control": {"precision": np.diag([1e200, 1e200])},
    "linear": {"linear": (1e300, 0.0)},
}


@pytest.mark.parametrize("name", OPENINGS)
@pytest.mark.parametrize(
    ("family", "kind", "relation"),
    [("logistic", "ZigZag", "replace"), pytest.param("poisson", "ZigZag", "replace", marks=pytest.mark.long)],
)
def test_an_opening_is_no_oracle(tmp_path, monkeypatch, family, kind, relation, name):
    """Whatever is opened, the records are not touched before a plan is charged, and both say the same."""
    sites = attacked(tmp_path, family, relation, kind=kind)

    def touched(*arguments):
        raise AssertionError("the records were touched")

    with monkeypatch.context() as guarded:
        guarded.setattr("fedpdmc.members.private_site.less_public", touched)
        answers = [site.open(**OPENINGS[name]) for site in sites]
    assert answers[0][0] == answers[1][0]
    if not isinstance(answers[0][1], messages.Refusal):
        plans = [site.plans((0.0, 0.0), (1.0, 1.0), 0.1) for site in sites]
        assert plans[0][0] == plans[1][0] and plans[0][1].code == "PLAN_REFUSED"
    assert [site.spent for site in sites] == [0.0, 0.0]
    for site in sites:
        site.close()


def test_any_exception_of_a_walk_is_one_charged_fault(tmp_path, monkeypatch):
    site = attacked(tmp_path)[0]
    site.open()

    def broken(*arguments):
        raise np.linalg.LinAlgError("eigenvalues did not converge")

    monkeypatch.setattr("fedpdmc.members.private_site.less_public", broken)
    answer = site.plans((0.0, 0.0), (1.0, 1.0), 0.1)[1]
    assert answer.code == "NOT_FINITE" and site.spent > 0
    assert [entry.reply for entry in read(site.ledger)][-1] == FAULT
    spent = site.spent
    assert isinstance(site.plans((0.0, 0.0), (1.0, 1.0), 0.2, 1)[1], messages.Refusal) and site.spent == spent
    site.close()


def test_a_plan_that_would_take_for_ever_is_refused_by_name(tmp_path):
    """Legal in all else: within the distance, of finite length."""
    site = attacked(tmp_path, kind="FactorisedBoomerang", chains=2)[0]
    site.open()
    far = 0.5 * site.agent.computation.private.limits.distance
    with pytest.raises(PlanRefused, match="TOO_MUCH_WORK"):
        site.agent.computation.private.answer(a_plan(np.full((2, 2), far), 1.0, 1e3))
    assert site.spent == 0.0
    site.close()


def test_a_control_variate_that_fits_one_of_them_opens_no_shortcut(tmp_path):
    """What is computed has the same shape for both, whether or not the control variate is the records' own."""
    sites = attacked(tmp_path)
    shapes = []
    for site in sites:
        own = fp.Site(site.agent.site.potential, name="own")
        _, gradient, hessian = double_precision(own.derivatives)(np.zeros(2))
        for other in sites:
            computation = other.agent.computation
            computation.private, computation.progress.shape = None, None
            guard = computation._private_site(
                messages.Open(RUN, 1, 64, 1, np.zeros(2), np.ones(2), 2, hessian, gradient, np.zeros(2))
            )
            made = double_precision(less_public)(guard.site, guard.opening)
            shapes.append(jax.tree.map(lambda x: (x.shape, x.dtype), made))
    assert all(jax.tree.structure(one) == jax.tree.structure(shapes[0]) for one in shapes)
    assert all(jax.tree.leaves(one) == jax.tree.leaves(shapes[0]) for one in shapes)


@pytest.mark.parametrize(("family", "kind", "relation"), EVERY)
def test_answers_have_one_size_and_times_few_bits(tmp_path, family, kind, relation):
    """Sizes, and all that is not an arrival, are the same for both."""
    sites = attacked(tmp_path, family, relation, kind=kind)
    sizes, horizon = [], 0.37
    for site in sites:
        opened = site.open()
        answers = [site.plans((0.1, -0.2), (1.0, -1.0), horizon, number) for number in range(3)]
        sizes.append([len(opened[0]), *(len(data) for data, _ in answers)])
        for _, answer in answers:
            rang = answer.rang.astype(bool)
            cells = answer.time[rang] * 2.0 ** (31 - math.frexp(horizon)[1])
            assert np.all(cells < 2.0**31)
            np.testing.assert_array_equal(cells, np.round(cells))
            np.testing.assert_array_equal(answer.time[~rang], horizon)
            assert answer.passes == 0 and not answer.coordinate[~rang].any()
        site.close()
    assert sizes[0] == sizes[1]


def test_the_size_of_noise_is_the_same_to_the_last_bit_for_all_records(tmp_path):
    """It depends on what was spent: were costs added in the order of hashes of the records, rounding would tell them."""
    seen = set()
    for k in range(8):
        y = (np.arange(12) % 2).astype(float)
        y[k] = 1 - y[k]
        budget = fp.Budget(0.5, 1e-5, bounds=fp.Bounds(norm=1.0), ledger=a_ledger(tmp_path / f"{k}.db"))
        site = fp.Site(fp.models.logistic(np.linspace(-1, 1, 12)[:, None], y), name="site", budget=budget)
        told = [noisy_derivatives(site, np.array([0.1 * step]), step, ONE_SHOT) for step in range(4)]
        seen.add(tuple((one.gradient_sd, one.hessian_sd) for one in told))
    assert len(seen) == 1


def test_which_records_are_complete_is_not_told_where_covariates_are_public():
    """A record whose outcome is missing would be gone from sums that have no noise."""
    text = contract(neighbours="label").text.replace(b"format = 1", b'format = 1\nmissing = "drop"')
    with pytest.raises(InputError, match="'drop' with neighbours = 'label'"):
        parse_study(text)
    assert parse_study(text.replace(b'"label"', b'"replace"')).missing == "drop"


# Points and spreads at which numbers are large, small or none.
ODD_POINTS = [(a, b) for a in (0.0, 1e-300, 1e3, 1e14, 9.9e14, 1.1e15, 1e200) for b in (0.3, -a)]
ODD_SPREADS = [
    None,
    *(k * np.eye(2) for k in (0.0, 1.0, -1.0, 5.0, 3e7, 1e9, 1e160)),
    np.array([[1.0, 0.0], [1.0, 1e-12]]),
]


@pytest.mark.parametrize(
    ("family", "relation"),
    [
        pytest.param(family, relation, marks=() if (family, relation) == ("poisson", "label") else pytest.mark.long)
        for family in FAMILIES
        for relation in RELATIONS
    ],
)
def test_releases_at_odd_points_tell_no_more_than_noise_hides(tmp_path, monkeypatch, family, relation):
    """Refusals, sizes of noise and accounts are the same bytes, nothing fails, and what has no noise is the same."""
    made = computation._coarse
    # What has no noise is on a grid, with a dither from each ledger's secret: here both have the same.
    monkeypatch.setattr(computation, "_coarse", lambda hessian, secret: made(hessian, bytes(32)))
    every, answered = [(x, spread) for x in ODD_POINTS for spread in ODD_SPREADS], 0
    for at in range(0, len(every), 40):
        sites = attacked(tmp_path / str(at), family, relation, reference="vb", epsilon=1e5, chains=2)
        for x, spread in every[at : at + 40]:
            told = [site.derive(x, spread) for site in sites]
            if isinstance(told[0], messages.Refusal):
                assert told[0].code == told[1].code
                continue
            answered += 1
            assert told[0].noise.tobytes() == told[1].noise.tobytes()
            if told[0].noise[1] == 0:
                np.testing.assert_array_equal(told[0].hessian, told[1].hessian)
        for site in sites:
            assert FAULT not in [entry.reply for entry in read(site.ledger)]
            site.close()
    assert answered > 20


@pytest.mark.parametrize("trouble", ["a new ledger", "an older copy"])
def test_a_store_with_private_answers_refuses_another_ledger(tmp_path, trouble):
    """Even if the note beside the ledger is gone with it."""
    study, rows = contract(chains=4), neighbours("logistic", "replace")[0]
    site = Attacked(study, rows, tmp_path, "site")
    site.open()
    site.plans((0.0, 0.0), (1.0, 1.0), 0.1)
    older = site.ledger.read_bytes()
    site.plans((0.0, 0.0), (1.0, 1.0), 0.1, 1)
    site.close()
    Attacked(study, rows, tmp_path, "site").close()
    note = head_path(site.ledger)
    if trouble == "an older copy":
        site.ledger.write_bytes(older)
        with pytest.raises(LedgerError, match="older copy"):
            site.agent.site.budget.open()
        note.unlink()
    else:
        site.ledger.unlink()
        with pytest.raises(InputError, match="second budget"):
            site.agent.site.budget.open()
        note.unlink()
        a_ledger(site.ledger)
    with pytest.raises(LedgerError, match="not the ledger that was charged"):
        Attacked(study, rows, tmp_path, "site")
    site.agent.site.budget.open()[0].close()
