import jax.numpy as jnp
import numpy as np
import pytest
from tests.privacy.support import a_ledger, a_plan, opened, private_site, records

import fedpdmc as fp
from fedpdmc._jax.random_streams import chacha20
from fedpdmc.clocks.private_arrivals import time_grid
from fedpdmc.errors import BoundViolation, BudgetSpent, InputError, NotFinite, PlanRefused, PrivacyError
from fedpdmc.members.private_site import SLACK, Exposure, _arrays, noisy_derivatives, usual_speed
from fedpdmc.privacy.ledger import FAULT, read


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger.db"


def test_chacha20_is_that_of_the_rfc():
    # RFC 8439, section 2.3.2.
    key = tuple(jnp.uint32(int.from_bytes(bytes(range(4 * i, 4 * i + 4)), "little")) for i in range(8))
    nonce = tuple(jnp.uint32(w) for w in (0x09000000, 0x4A000000, 0x00000000))
    words = [int(w) for w in chacha20(key, jnp.uint32(1), nonce)]
    assert words[:4] == [0xE4E7F110, 0x15593BD1, 0x1FDD0F50, 0xC47120A3]
    assert words[12:] == [0xD19C12B5, 0xB94E16DE, 0xE883D0CB, 0x4E3C50A2]


def test_the_same_plan_gets_the_stored_arrival_and_no_second_charge(path):
    guard = opened(private_site(path, seed=None))
    plan = a_plan(np.zeros((4, 2)), 1.0, 0.5)
    first = guard.answer(plan)
    spent = guard.ledger.spent("north")
    again = guard.answer(plan)
    for one, two in zip((first.time, first.rang, first.mark), (again.time, again.rang, again.mark), strict=True):
        np.testing.assert_array_equal(one, two)
    assert guard.ledger.spent("north") == spent > 0
    with pytest.raises(PlanRefused, match="OTHER_PLAN"):
        guard.answer(a_plan(np.zeros((4, 2)), 1.0, 0.6))


def test_all_that_was_watched_is_charged_on_every_chain(path):
    guard = opened(private_site(path, excess=2.0))
    plan = a_plan(np.zeros((4, 2)), 1.0, [0.5, 0.01, 0.0, 3.0])
    arrival, passes = guard.answer(plan), guard._check_plan(_arrays(plan))[1]
    seen = np.where(np.asarray(arrival.rang), np.asarray(arrival.time), [0.5, 0.01, 0.0, 3.0])
    entry = read(path)[-1]
    # A cell of the grid more for every segment.
    assert seen.sum() < entry.exposure < seen.sum() * (1 + 1e-7)
    alpha = guard.account.alpha
    slack = 3 * passes * SLACK * alpha / (alpha - 1)
    assert entry.cost == pytest.approx(entry.exposure * guard.cost_rate + slack, rel=1e-12)
    assert guard.report()["observed"] == pytest.approx(seen.sum())
    assert np.asarray(arrival.rang).any()


def test_randomness_is_new_in_every_run_unless_a_test_keys_it(path):
    plan = a_plan(np.zeros((4, 2)), 1.0, 5.0)
    keyed = [np.asarray(opened(private_site(path), run=run).answer(plan).time) for run in ("a", "b")]
    np.testing.assert_array_equal(*keyed)
    secret = [np.asarray(opened(private_site(path, seed=None), run=run).answer(plan).time) for run in ("c", "d")]
    assert not np.any(secret[0] == secret[1])
    assert "NOT private" in opened(private_site(path)).report()["randomness"]


def test_a_plan_beyond_the_budget_is_refused_whole(path):
    guard = opened(private_site(path, epsilon=0.5, delta=1e-5, excess=2.0))
    longest = guard.status.remaining
    with pytest.raises(BudgetSpent):
        guard.answer(a_plan(np.zeros((4, 2)), 1.0, 0.26 * longest))
    assert guard.ledger.spent("north") == 0
    guard.answer(a_plan(np.zeros((4, 2)), 1.0, 0.24 * longest))
    assert guard.ledger.spent("north") > 0


@pytest.mark.parametrize(
    ("plan", "code"),
    [
        (a_plan(np.zeros((1, 2)), 2.0, 0.5), "BAD_SPEED"),
        (a_plan(np.zeros((1, 2)), 0.0, 0.5), "BAD_SPEED"),
        (a_plan(np.full((1, 2), np.nan), 1.0, 0.5), "BAD_PLAN"),
        (a_plan(np.zeros((1, 2)), 1.0, -0.5), "BAD_PLAN"),
        (a_plan(np.zeros((1, 3)), 1.0, 0.5), "BAD_PLAN"),
        (a_plan(np.full((1, 2), 1e40), 1.0, 0.5), "BAD_PLAN"),
        (a_plan(np.full((1, 2), 1e7), 1.0, 0.5), "REGION"),
        (a_plan(np.full((1, 2), 2.9), 1.0, 0.5), "REGION"),
    ],
)
def test_plans_that_the_guarantee_does_not_cover_are_refused(path, plan, code):
    guard = opened(private_site(path, bounds=fp.Bounds(norm=1.0, region=3.0)))
    with pytest.raises(PlanRefused, match=code):
        guard.answer(plan)
    assert len([e for e in read(path) if e.kind == "round"]) == 0


@pytest.mark.parametrize("dynamics", [fp.Boomerang(), fp.BouncyParticle()])
def test_reflections_are_refused_with_the_reason(path, dynamics):
    with pytest.raises(InputError, match="ZigZag.*FactorisedBoomerang"):
        fp.sample([private_site(path)], dynamics=dynamics, chains=2, duration=1.0, progress=False)
    assert read(path) == []


def test_the_prior_stays_with_the_coordinator(path):
    with pytest.raises(InputError, match="prior_at"):
        fp.sample(
            [private_site(path)], fp.models.normal_prior(2), prior_at="sites", dynamics=fp.ZigZag(), duration=1.0,
            progress=False,
        )  # fmt: skip


def test_exact_derivatives_and_references_are_refused(path):
    site = private_site(path)
    with pytest.raises(PrivacyError, match="NO_RELEASE"):
        site.derivatives(np.zeros(2))
    with pytest.raises(InputError, match="Budget\\(release"):
        fp.sample([site], dynamics=fp.ZigZag(), reference="laplace", chains=2, duration=1.0, progress=False)


@pytest.mark.parametrize("wrong", [
    {"epsilon": 0.0}, {"delta": 1.0}, {"neighbours": "swap"}, {"on_violation": "ignore"}, {"bounds": 3.0}, {"excess": -1.0},
    {"release": 1.0}, {"study": ""}, {"dataset": ""},
])  # fmt: skip
def test_budgets_that_are_none_are_refused(wrong):
    with pytest.raises(InputError, match="Budget"):
        fp.Budget(**{"epsilon": 1.0, "delta": 1e-5} | wrong)


def test_a_budget_needs_a_model_with_records_and_bounds(path):
    budget = fp.Budget(1.0, 1e-5, ledger=path)
    with pytest.raises(InputError, match="known sensitivity"):
        fp.Site(fp.models.normal_prior(2), name="a", budget=budget)
    with pytest.raises(InputError, match="norm"):
        opened(fp.Site(fp.models.logistic(*records()), name="a", budget=budget))
    with pytest.raises(InputError, match="fedpdmc.Budget"):
        fp.Site(fp.models.logistic(*records()), name="a", budget=1.0)


def test_path_length_is_bounded_from_above_and_closely():
    rng, dynamics = np.random.default_rng(2), fp.FactorisedBoomerang()
    a, v = rng.normal(size=(2, 30, 3))
    duration, velocity = rng.uniform(0, 2, (30, 2)), np.stack([v, rng.normal(size=(30, 3))], 1)
    until = rng.uniform(0, 1, 30) * duration.sum(1)
    bound = Exposure(dynamics, a, duration, velocity).until(until)
    for c in range(30):
        s = np.linspace(0, until[c], 20001)
        first = s < duration[c, 0]
        turned = a[c] * np.cos(duration[c, 0]) + velocity[c, 0] * np.sin(duration[c, 0])
        base = np.where(first[:, None], a[c], turned)
        speed = np.where(first[:, None], velocity[c, 0], velocity[c, 1])
        angle = np.where(first, s, s - duration[c, 0])[:, None]
        exact = np.trapezoid(np.abs(speed * np.cos(angle) - base * np.sin(angle)).max(1), s)
        assert exact <= bound[c] * (1 + 1e-3) + 1e-3 and bound[c] <= 1.08 * exact + 0.05
    np.testing.assert_array_equal(Exposure(fp.ZigZag(), a, duration, velocity).until(until), until)
    draws = np.abs(rng.normal(size=(200000, 3))).max(1)
    assert usual_speed(dynamics, 3) == pytest.approx(draws.mean(), rel=0.01)


def test_a_chain_that_did_not_ring_tells_no_mark(path):
    guard = opened(private_site(path, seed=None))
    arrival = guard.answer(a_plan(np.random.default_rng(0).normal(size=(64, 2)), 1.0, 1e-9))
    assert not np.any(np.asarray(arrival.rang))
    np.testing.assert_array_equal(arrival.mark, 0)


@pytest.mark.parametrize("fault", [BoundViolation, NotFinite])
def test_a_walk_that_fails_is_charged_as_a_whole_plan_and_told_in_one_way(path, fault, monkeypatch):
    guard = opened(private_site(path, excess=2.0))

    def fails(plan, key, passes):
        raise fault("north", 3)

    monkeypatch.setattr(guard, "_walk", fails)
    plan = a_plan(np.zeros((4, 2)), 1.0, 0.25)
    for _ in range(2):
        with pytest.raises(NotFinite, match="code FAULT") as caught:
            guard.answer(plan)
        assert caught.value.chain == 0
        assert guard.ledger.spent("north") == pytest.approx(4 * 0.25 * guard.cost_rate)


@pytest.mark.parametrize("dynamics", [fp.ZigZag(), fp.FactorisedBoomerang()])
def test_the_charge_rises_with_time_up_to_that_of_the_whole_plan(path, dynamics):
    guard, rng = opened(private_site(path), dynamics), np.random.default_rng(1)
    duration = rng.uniform(0, 0.3, (300, 3)) * (rng.random((300, 3)) < 0.7)
    velocity = rng.normal(size=(300, 3, 2)) if dynamics.flow.rotating else rng.choice([-1.0, 1.0], (300, 3, 2))
    exposure = Exposure(dynamics, rng.normal(size=(300, 2)), duration, velocity, 1e-3)
    # Times on both sides of the ends of cells and segments.
    times = np.sort(np.concatenate([k / 16 + np.array([-1e-9, 0.0, 1e-9]) for k in range(1, 16)]))
    seen = np.array([exposure.until(np.full(300, t)) for t in times])
    assert np.all(np.diff(seen, axis=0) >= 0) and np.all(seen <= exposure.until(np.inf))
    assert guard._charge(exposure, 1000, times[3])[1] <= guard._charge(exposure, 1000)[1]


def test_a_tiny_change_under_a_large_excess_is_charged(path):
    tiny = (np.full((40, 2), 1e-9), np.zeros(40))
    guard = opened(private_site(path, excess=1e2, bounds=fp.Bounds(box=1e-9), data=tiny))
    for number in range(3):
        guard.answer(a_plan(np.zeros((4, 2)), 1.0, 1e-12, number))
    costs = [(entry.cost, entry.spent) for entry in read(path) if entry.kind == "round"]
    assert all(cost > 0 for cost, _ in costs) and costs[0][1] < costs[1][1] < costs[2][1]
    assert np.isfinite(guard.status.remaining)


def test_a_run_is_over_when_a_walk_has_failed(path, monkeypatch):
    guard = opened(private_site(path, excess=2.0))
    plans = [a_plan(np.zeros((4, 2)), 1.0, 0.25, number) for number in range(2)]
    with monkeypatch.context() as broken:
        broken.setattr(guard, "_walk", lambda plan, key, passes: (_ for _ in ()).throw(NotFinite("north", 0)))
        with pytest.raises(NotFinite):
            guard.answer(plans[0])
    for site in (guard, opened(private_site(path, excess=2.0))):
        with pytest.raises(PlanRefused, match="FAULT"):
            site.answer(plans[1])
    # Another run is another matter: a person has begun it.
    opened(private_site(path, excess=2.0), run="other").answer(plans[1])


def test_a_seed_under_a_budget_is_warned_of(path):
    with pytest.warns(UserWarning, match="nothing is private"):
        private_site(path, seeded_for_tests=False)
    private_site(path, seed=None, seeded_for_tests=False)


def test_speed_that_is_high_only_at_the_points_of_the_grid_is_charged(path):
    """A plan whose segments are fast for a moment around points of the grid: rates there count for a whole cell each."""
    guard, fast, spikes = opened(private_site(path), fp.FactorisedBoomerang()), 1e5, 20
    unit = time_grid(np.ones(1), 2).unit[0]
    duration, velocity = [], []
    for _ in range(spikes):
        duration += [unit - 1e-14, 1e-14]
        velocity += [[0.0, 0.0], [fast, fast]]
    duration.append(1 - sum(duration))
    velocity.append([0.0, 0.0])
    exposure = Exposure(guard.opening.dynamics, np.zeros((1, 2)), np.array([duration]), np.array([velocity]), unit)
    seen, _ = guard._charge(exposure, 1000)
    assert seen >= spikes * fast * unit > 100 * spikes * fast * 1e-14


def test_outcomes_of_any_size_break_no_walk(path):
    """A Student-t record needs no declared range: one that cannot be squared must not be seen by its fault."""
    X = np.full((3, 2), 0.3)
    budget = fp.Budget(
        100.0, 1e-3, bounds=fp.Bounds(norm=1.0), ledger=a_ledger(path), on_violation="clip", seeded_for_tests=True
    )
    site = fp.Site(fp.models.student_t(X, [0.0, 1e300, -1e200], 3.0, 1e-3), name="north", seed=1, budget=budget)
    opened(site).answer(a_plan(np.zeros((4, 2)), 1.0, 0.01))
    assert FAULT not in [entry.reply for entry in read(path)]


def test_counts_of_a_cox_model_are_not_told_where_rounding_would_show_them(tmp_path):
    """At e^44 the spacing of numbers is 2048: a count of 1024 or 1025 would change the gradient by 0 or by 2048."""
    budget = fp.Budget(
        4.0, 1e-6, "add-remove", fp.Bounds(region=50.0), release=0.5, ledger=a_ledger(tmp_path / "ledger.db")
    )
    site = fp.Site(fp.models.log_gaussian_cox([1024.0, 3.0]), name="s", budget=budget)
    with pytest.raises(PlanRefused, match="BAD_POINT"):
        noisy_derivatives(site, np.array([44.0, 0.0]), 0)
    assert budget.open()[0].spent("records") == 0
    guard = opened(site)
    assert np.all(guard.region == 20.0)
