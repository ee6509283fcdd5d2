"""A site's agent: what it answers, what it refuses, and what it remembers."""

import os

import jax
import numpy as np
import pytest
from tests.federation.requests import CHAINS, DIM, RUN, ask, joined, opening, plans
from tests.federation.studies import FEW_ROUNDS, SITE_SEED, ZIGZAG, Folder

from fedpdmc.errors import InputError, Refused
from fedpdmc.federation import messages
from fedpdmc.federation.derivative_rounding import COARSE, FEWER, FINE
from fedpdmc.federation.site_agent import computation
from fedpdmc.federation.site_agent.audit_log import Kind
from fedpdmc.federation.site_agent.audit_replay import show


def test_a_plan_is_answered_once_and_then_from_the_log(agent):
    first = agent.answer(plans())
    arrivals = messages.decode(first)
    assert isinstance(arrivals, messages.Arrivals) and arrivals.request == messages.digest(plans())
    spent = agent.observed_time
    assert spent == pytest.approx(arrivals.observed_times(np.full(CHAINS, 0.5)).sum())
    assert agent.answer(plans()) == first
    assert agent.observed_time == spent
    assert ask(agent, plans(seed=1)).code == "SAME_ROUND_OTHER_PLAN"
    assert agent.answer(plans()) == first


def test_the_clock_of_a_run_is_made_once(zigzag, tmp_path, monkeypatch):
    made, make = [], computation.open_site
    monkeypatch.setattr(computation, "open_site", lambda *told: made.append(make(*told)) or made[-1])
    agent = joined(zigzag, tmp_path / "store")
    assert isinstance(ask(agent, opening()), messages.Opened)
    assert isinstance(ask(agent, plans()), messages.Arrivals)
    assert len(made) == 1
    agent.log.close()


def test_the_log_is_the_memory(agent, zigzag):
    answers = [agent.answer(plans(k + 2, k, seed=k)) for k in range(3)]
    store, spent = agent.log.folder, agent.observed_time
    agent.log.close()
    again = zigzag.agent("north", store)
    assert again.run == RUN and again.observed_time == spent
    assert [again.answer(plans(k + 2, k, seed=k)) for k in range(3)] == answers
    assert ask(again, plans(2, 0, seed=9)).code == "SAME_ROUND_OTHER_PLAN"
    assert isinstance(ask(again, plans(5, 3)), messages.Arrivals)
    agent.log = again.log


REFUSALS = {
    "not finite": (lambda: plans(velocity=np.full((CHAINS, 1, DIM), np.nan)), "MALFORMED"),
    "garbage": (lambda: b"\x80\x04garbage", "MALFORMED"),
    "another run": (lambda: plans(run=b"x" * 16), "OTHER_RUN"),
    "later round first": (lambda: plans(3), "OUT_OF_ORDER"),
    "more rounds": (lambda: plans(0), "OUT_OF_ORDER"),
    "not a request": (lambda: messages.encode(messages.Opened(RUN, 2, bytes(32))), "NOT_A_REQUEST"),
    "other shape": (lambda: plans(start=np.zeros((CHAINS, 2)), velocity=np.ones((CHAINS, 1, 2))), "WRONG_SHAPE"),
    "other speed": (lambda: plans(velocity=np.full((CHAINS, 1, DIM), 2.0)), "NOT_UNIT_SPEED"),
    "longer horizon": (lambda: plans(duration=np.full((CHAINS, 1), 1e3)), "HORIZON_TOO_LONG"),
    "another reference": (lambda: opening(2), "ALREADY_OPEN"),
    "derivatives": (lambda: messages.encode(messages.Derive(RUN, 2, np.zeros(DIM))), "DERIVATIVES_NOT_ALLOWED"),
}


@pytest.mark.parametrize(("request_", "code"), REFUSALS.values(), ids=REFUSALS)
def test_what_is_beyond_the_contract_is_refused_and_logged(agent, request_, code):
    data = request_()
    refusal = ask(agent, data)
    assert isinstance(refusal, messages.Refusal) and refusal.code == code
    last = list(agent.log.entries())[-2:]
    assert [entry.kind for entry in last] == [Kind.REQUEST, Kind.REFUSAL]
    assert last[0].payload == data
    assert any(code in line for line in show(agent.log.folder))
    # Refusing changes nothing: the round goes on.
    assert isinstance(ask(agent, plans()), messages.Arrivals)


def test_a_number_is_used_once(agent):
    ask(agent, plans(2, 0))
    assert ask(agent, plans(3, 0, seed=1)).code == "PLAN_NUMBER_USED"
    done = plans(3, 1, duration=np.zeros((CHAINS, 1)))
    assert isinstance(ask(agent, done), messages.Arrivals)
    assert isinstance(ask(agent, plans(4, 1)), messages.Arrivals)


def test_rounds_and_observed_time_end(tmp_path):
    contract = ZIGZAG.replace("rounds = 2000", "rounds = 4").replace("observed_time = 1000.0", "observed_time = 0.5")
    agent = joined(Folder(tmp_path / "study", contract), tmp_path / "store")

    def tell(sequence, length):
        return ask(agent, plans(sequence, sequence - 2, duration=np.full((CHAINS, 1), length)))

    ask(agent, opening())
    assert tell(2, 0.2).code == "HORIZON_TOO_LONG"
    # So short that hardly anything can ring: what is observed is the whole horizon, 0.1 each time.
    first, second = tell(2, 0.025), tell(3, 0.025)
    each = np.full(CHAINS, 0.025)
    told = first.observed_times(each).sum() + second.observed_times(each).sum()
    assert agent.observed_time == pytest.approx(told) and agent.observed_time > 0.1
    assert tell(4, 0.12).code == "OBSERVED_TIME_SPENT"
    assert isinstance(tell(4, 1e-3), messages.Arrivals)
    assert tell(5, 1e-3).code == "TOO_MANY_ROUNDS"
    agent.log.close()


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"chains": 5}, "WRONG_SHAPE"),
        ({"center": np.ones(DIM)}, "NOT_IN_CONTRACT"),
        ({"scale": np.full(DIM, 0.5)}, "NOT_IN_CONTRACT"),
        ({"segments": 10**6}, "NOT_IN_CONTRACT"),
        ({"scale": np.full((DIM, DIM), 1e308)}, "NOT_IN_CONTRACT"),
        ({"order": 2, "precision": np.eye(DIM), "linear": np.ones(DIM), "point": np.ones(DIM)}, "NOT_IN_CONTRACT"),
    ],
)
def test_an_opening_beyond_the_contract_is_refused(zigzag, tmp_path, changes, code):
    agent = joined(zigzag, tmp_path)
    assert ask(agent, opening(**changes)).code == code
    assert ask(agent, plans(1)).code == "NOT_OPEN"
    agent.log.close()


@pytest.mark.parametrize("scale", [[1.0, 0.0, 1.0], [1.0, 1e-300, 1.0], [0.0, 0.0, 0.0]])
def test_a_reference_without_width_in_some_direction_is_refused(few_rounds, tmp_path, scale):
    agent, own = joined(few_rounds, tmp_path), (np.eye(DIM), np.zeros(DIM), np.zeros(DIM))
    changes = dict(zip(("precision", "linear", "point"), own, strict=True))
    assert ask(agent, opening(scale=np.asarray(scale), order=2, **changes)).code == "SINGULAR_REFERENCE"
    agent.log.close()


def test_derivatives_are_on_the_grid_and_end_with_the_opening(few_rounds, tmp_path):
    agent = joined(few_rounds, tmp_path)
    x, told = np.array([0.1, -0.2, 0.3]), []
    # Few binary digits at first, more later; no value of the potential.
    for sequence, (point, digits, fewer) in enumerate(((x, COARSE, FEWER), (x + 0.1, FINE, 0)), 1):
        with jax.enable_x64(True):
            _, gradient, hessian = agent.site.derivatives(point)
        found = ask(agent, messages.encode(messages.Derive(RUN, sequence, point)))
        size = 2.0 ** np.round(np.log2(np.diag(hessian)) / 2)
        steps = found.hessian / np.outer(size, size) * 2.0**digits
        np.testing.assert_array_equal(steps, np.round(steps))
        assert 0 < np.abs(steps - hessian / np.outer(size, size) * 2.0**digits).max() < 1
        # A Newton step is off by so much, in standard deviations.
        off = found.gradient - gradient
        assert 0 < off @ np.linalg.solve(found.hessian, off) < 4.0 ** (fewer - digits)
        assert found.value == 0
        told.append(found)
    # The same place again: the same numbers, which are no further release.
    for sequence, point, before in ((3, x, told[0]), (4, x + 0.1, told[1])):
        again = ask(agent, messages.encode(messages.Derive(RUN, sequence, point)))
        np.testing.assert_array_equal(again.gradient, before.gradient)
        np.testing.assert_array_equal(again.hessian, before.hessian)
    assert agent.computation.progress.points == 2
    assert ask(agent, opening(5)).code == "NOT_IN_CONTRACT"
    control = {"order": 2, "precision": again.hessian, "linear": again.gradient - again.hessian @ point, "point": point}
    for scale in (np.zeros((DIM, DIM)), np.full((DIM, DIM), 1e308)):
        assert ask(agent, opening(5, scale=scale, **control)).code == "SINGULAR_REFERENCE"
    assert isinstance(ask(agent, opening(5, scale=np.eye(DIM), **control)), messages.Opened)
    assert ask(agent, messages.encode(messages.Derive(RUN, 6, x))).code == "ALREADY_OPEN"
    agent.log.close()


@pytest.mark.parametrize("seed", [6, 7, 8])
def test_the_dither_of_a_release_is_the_sites_secret(few_rounds, tmp_path, seed):
    """Known, it would say where between two points of the grid a number is."""
    x, told = np.array([0.1, -0.2, 0.3]), []
    for store, own in (("one", SITE_SEED), ("same", SITE_SEED), ("other", seed)):
        agent = few_rounds.agent("north", tmp_path / store, seed=own)
        agent.join(messages.encode(messages.Welcome(RUN, few_rounds.study.digest)))
        told.append(ask(agent, messages.encode(messages.Derive(RUN, 1, x))))
        agent.log.close()
    np.testing.assert_array_equal(told[0].hessian, told[1].hessian)
    np.testing.assert_array_equal(told[0].gradient, told[1].gradient)
    assert not np.array_equal(told[0].hessian, told[2].hessian)
    assert not np.array_equal(told[0].gradient, told[2].gradient)


def test_another_contract_run_or_site_is_refused_at_the_door(zigzag, few_rounds, tmp_path):
    agent = joined(zigzag, tmp_path)
    for run, study, code in ((RUN, few_rounds.study, "OTHER_CONTRACT"), (b"x" * 16, zigzag.study, "OTHER_RUN")):
        with pytest.raises(Refused, match=code):
            agent.join(messages.encode(messages.Welcome(run, study.digest)))
    with pytest.raises(InputError, match="in use"):
        zigzag.agent("north", tmp_path)
    agent.log.close()
    with pytest.raises(InputError, match="another contract"):
        few_rounds.agent("north", tmp_path)
    with pytest.raises(InputError, match="log of site 'north'"):
        zigzag.agent("south", tmp_path)
    with pytest.raises(InputError, match="seed"):
        zigzag.agent("north", tmp_path, seed=6)


def test_the_secret_seed_is_the_sites_alone(zigzag, tmp_path):
    agent = zigzag.agent("north", tmp_path / "a", seed=None)
    kept = (tmp_path / "a" / "seed").read_text()
    assert os.stat(tmp_path / "a" / "seed").st_mode & 0o077 == 0
    agent.log.close()
    again = zigzag.agent("north", tmp_path / "a", seed=None)
    assert str(again.site.seed) == kept
    other = zigzag.agent("north", tmp_path / "b", seed=None)
    assert other.site.seed != again.site.seed
    for one in (again, other):
        one.log.close()


@pytest.mark.parametrize("name", ["audit.log", "audit.index", "seed", "anything"])
def test_a_store_with_links_is_refused(zigzag, tmp_path, name):
    """A log that is a link could be anyone's file; a seed that is one, anyone's seed."""
    joined(zigzag, tmp_path / "store").log.close()
    path = tmp_path / "store" / name
    if path.exists():
        path.rename(tmp_path / name)
    path.symlink_to(tmp_path / name)
    with pytest.raises(InputError, match=f"{name}, a symbolic link"):
        zigzag.agent("north", tmp_path / "store")


def test_a_plan_that_would_take_for_ever_is_refused_by_name(tmp_path):
    """Far out on a rotation cells are so short that no number of them ends a plan: the watchdog does."""
    contract = FEW_ROUNDS.replace("[dynamics]", '[dynamics]\nkind = "FactorisedBoomerang"\ncontrol = "none"')
    agent = joined(Folder(tmp_path, contract), tmp_path / "store")
    assert isinstance(ask(agent, opening()), messages.Opened)
    agent.computation.most_seconds = 1.0
    far = plans(start=np.full((CHAINS, DIM), 1e11), duration=np.full((CHAINS, 1), 30.0))
    refusal = ask(agent, far)
    assert refusal.code == "TOO_MUCH_WORK"
    assert ask(agent, plans(start=np.full((CHAINS, DIM), 1e200))).code == "PLAN_TOO_FAR"
    # It goes on with one that ends.
    assert isinstance(ask(agent, plans()), messages.Arrivals)
    agent.log.close()


def test_a_request_that_fails_within_is_refused_and_the_site_goes_on(zigzag, tmp_path, monkeypatch, caplog):
    agent = joined(zigzag, tmp_path / "store")
    with monkeypatch.context() as patch:
        patch.setattr(computation, "open_site", lambda site, opening: np.linalg.inv(np.zeros((2, 2))))
        assert ask(agent, opening()).code == "NOT_ANSWERED"
    assert any("could not be answered" in record.message for record in caplog.records)
    assert isinstance(ask(agent, opening()), messages.Opened)
    assert isinstance(ask(agent, plans()), messages.Arrivals)
    agent.log.close()
