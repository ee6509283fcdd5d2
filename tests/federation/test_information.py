"""The account of bits: against direct computations, with predictors that cheat as negative controls, and its goals."""

import contextlib
import math
import re

import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from scipy.integrate import quad
from tests.federation.requests import CHAINS, opening, plans
from tests.federation.studies import FEW_ROUNDS, ZIGZAG, Folder
from tests.federation.test_derivative_disclosure import CAREFUL, OWN, RECORDS, Guarded
from tests.federation.test_joint_plans import agent_of, connected
from tests.study.contracts import POLICY, rows, write_csv
from tests.study.test_model_contracts import TREND, trend_contract
from typer.testing import CliRunner

import fedpdmc as fp
from fedpdmc._jax.precision import double_precision
from fedpdmc.cli import app
from fedpdmc.clocks import AffineClock
from fedpdmc.errors import LimitReached
from fedpdmc.federation import derivative_rounding, messages
from fedpdmc.federation.derivative_rounding import FINE, _rounded, release, surprise
from fedpdmc.federation.site_agent import computation, start
from fedpdmc.federation.site_agent.audit_log import Kind
from fedpdmc.federation.site_agent.computation import DECISION
from fedpdmc.federation.site_agent.information import (
    REFUSED,
    ArrivalPredictor,
    Information,
    bit_limits,
    table_bits,
)
from fedpdmc.operations.status import SiteBoard
from fedpdmc.potentials import Quadratic
from fedpdmc.privacy.data_sets import DataSets
from fedpdmc.study import parse_study
from fedpdmc.study.policy import read_policy
from fedpdmc.study.read_data import site_records

HORIZON, C = 1.5, 0.4
# Nats of a drawn velocity, for who expects N(0, I).
KAPPA = 0.5 * (math.log(2) - np.euler_gamma) + 0.5 * math.log(2 * math.pi)


def clock_of(linear, precision=0.0):
    """A site whose gradient is ``precision a + linear`` on straight paths."""
    dim = len(linear)
    return AffineClock(
        Quadratic(precision * jnp.eye(dim), jnp.asarray(linear, float)), fp.BouncyParticle(refresh=1.0, bounce="draw")
    )


class Fixed(ArrivalPredictor):
    """A rate ``C |u|`` and standard normal velocities, which never learns."""

    def rates(self, a, u):
        return C * np.linalg.norm(u, axis=-1)

    def velocity_density(self, a, u, velocity, chance):
        return np.ones(velocity.shape[:2])

    def learn(self, *_):
        pass


class Transcript:
    """Arrivals of a site along straight paths of C chains from the origin, drawn by inversion."""

    def __init__(self, linear, chains, rng):
        dim, linear = len(linear), np.asarray(linear, float)
        self.velocity = rng.standard_normal((chains, dim))
        rate = np.maximum(self.velocity @ linear, 1e-300)
        self.time = rng.standard_exponential(chains) / rate
        self.rang = self.time < HORIZON
        normal, z = linear / np.linalg.norm(linear), rng.standard_normal((chains, dim))
        speed = np.sqrt(2 * rng.standard_exponential(chains))
        self.mark = z - (z @ normal + speed)[:, None] * normal

    @property
    def plan(self):
        chains, dim = self.velocity.shape
        return np.zeros(chains, int), np.zeros((chains, dim)), np.full((chains, 1), HORIZON), self.velocity[:, None]

    @double_precision
    def charge(self, linear, predictor):
        account = Information(100)
        account.predictor = predictor
        account.add_arrivals(clock_of(linear), self.plan, self.time, self.rang, self.mark, None)
        return account.bits


def test_bits_of_arrivals_are_those_of_their_densities():
    rng, linear = np.random.default_rng(0), [0.7, -0.3]
    transcripts = [Transcript(linear, 200, rng) for _ in range(20)]
    charged = np.array([each.charge(linear, Fixed(2)) for each in transcripts])
    direct = []
    for each in transcripts:
        # The divergence of the laws of the first event, for each velocity.
        total = 0.0
        for v in each.velocity[:40]:
            rate, q = max(v @ linear, 0.0), C * np.linalg.norm(v)
            if rate > 0:
                density = lambda t, rate=rate, q=q: rate * math.exp(-rate * t) * (math.log(rate / q) - (rate - q) * t)  # noqa: E731
                total += quad(density, 0, HORIZON)[0] + (1 - math.exp(-rate * HORIZON)) * KAPPA
            total -= math.exp(-rate * HORIZON) * (rate - q) * HORIZON
        direct.append(total / math.log(2) * 5)
    error = np.hypot(charged.std(), np.std(direct)) / math.sqrt(len(charged))
    assert abs(charged.mean() - np.mean(direct)) < 4 * error
    assert error < 0.1 * charged.mean()


def realised(transcript, linear, predictor, chance):
    """log₂ of the true chance of a transcript over that which the predictor gave it, learning after every 16 chains."""
    total, v = 0.0, transcript.velocity
    for part in np.array_split(np.arange(len(v)), math.ceil(len(v) / 16)):
        rang, length = transcript.rang[part], np.minimum(transcript.time[part], HORIZON)
        times = (np.arange(40) + 0.5) / 40 * length[:, None]
        points, along = (times[..., None] * v[part][:, None]).reshape(-1, v.shape[1]), np.repeat(v[part], 40, 0)
        weight, at, before = np.repeat(length / 40, 40), (length[:, None] * v[part])[rang], v[part][rang]
        mark = transcript.mark[part][rang]
        normal = np.asarray(linear) / np.linalg.norm(linear)
        total += weight @ (predictor.rates(points, along) - np.maximum(along @ linear, 0.0))
        total += np.log(before @ linear / predictor.rates(at, before)).sum()
        density = predictor.velocity_density(at, before, mark[:, None], chance)[:, 0]
        total += np.log(-math.sqrt(2 * math.pi) * (mark @ normal) / density).sum()
        predictor.learn(points, along, weight, at, before, mark, chance)
    return total / math.log(2)


class Peeking(ArrivalPredictor):
    """Has learned from the whole transcript before it predicts."""

    def __init__(self, transcript, chance):
        super().__init__(transcript.velocity.shape[1])
        with np.errstate(invalid="ignore"):
            realised(transcript, np.ones(transcript.velocity.shape[1]), self, chance)


def test_bits_with_a_predictor_that_learns_are_right_on_average_and_bound_the_information():
    """The site's records are one of many tables, ``linear`` from a normal law: what arrivals say about it is known."""
    rng, charged, true, known, peeked, knowing = np.random.default_rng(1), [], [], [], [], []
    chance = np.random.default_rng(2)
    for _ in range(60):
        linear = 0.5 * rng.standard_normal(2)
        each = Transcript(linear, 48, rng)
        charged.append(each.charge(linear, ArrivalPredictor(2)))
        true.append(realised(each, linear, ArrivalPredictor(2), chance))
        peeked.append(each.charge(linear, Peeking(each, chance)))
        knowing.append(each.charge(linear, ArrivalPredictor(2, (linear, np.zeros((2, 2))))))
        # The information: log of the true chance over the mean over other tables.
        others = np.vstack([linear, 0.5 * rng.standard_normal((20_000, 2))])
        rate = np.maximum(each.velocity @ others.T, 0.0)
        logs = -(np.minimum(each.time, HORIZON)[:, None] * rate).sum(0)
        with np.errstate(divide="ignore"):
            logs += np.log(rate[each.rang]).sum(0)
            towards = np.maximum(-each.mark[each.rang] @ (others / np.linalg.norm(others, axis=1)[:, None]).T, 0.0)
            logs += np.log(towards).sum(0)
        known.append((logs[0] - np.log(np.mean(np.exp(logs[1:] - logs.max()))) - logs.max()) / math.log(2))
    charged, true, known, peeked, knowing = map(np.array, (charged, true, known, peeked, knowing))
    error = (charged - true).std() / math.sqrt(len(true))
    assert abs((charged - true).mean()) < 4 * error and error < 0.15 * charged.mean()
    assert (charged - known).mean() > -4 * (charged - known).std() / math.sqrt(len(true))
    # Predictors that look ahead, or know the table, find too few.
    assert (charged - peeked).mean() > 4 * (charged - peeked).std() / math.sqrt(len(true))
    assert (known - knowing).mean() > 4 * (known - knowing).std() / math.sqrt(len(true))


class Spied(ArrivalPredictor):
    """Writes down what it predicts. ``knows``: the gradient, as only the site does."""

    def __init__(self, dim, knows=None):
        super().__init__(dim, None if knows is None else (np.asarray(knows, float), np.zeros((dim, dim))))
        self.predicted = []

    def rates(self, a, u):
        found = super().rates(a, u)
        self.predicted.append(found)
        return found


@pytest.mark.parametrize("cheats", [False, True])
def test_predictions_do_not_depend_on_the_records_or_on_later_answers(cheats):
    """The same transcript with other records, and one that differs after 32 chains, have the same predictions so far."""
    rng, tables = np.random.default_rng(3), ([0.5, 0.1], [-0.2, 0.4])
    first, other = Transcript(tables[0], 64, rng), Transcript(tables[0], 64, np.random.default_rng(4))
    for name in ("velocity", "time", "rang", "mark"):
        getattr(other, name)[:32] = getattr(first, name)[:32]
    made = []
    for transcript, table in ((first, tables[0]), (first, tables[1]), (other, tables[0])):
        account = Information(100)
        account._chance = np.random.default_rng(5)
        account.predictor = Spied(2, table if cheats else None)
        points = double_precision(account.add_arrivals)
        points(clock_of(table), transcript.plan, transcript.time, transcript.rang, transcript.mark, None)
        made.append(account.predictor.predicted)
    same = all(np.allclose(one, two) for one, two in zip(made[0], made[1], strict=True))
    assert same != cheats
    assert np.allclose(made[0][:2], made[2][:2]) and not np.allclose(made[0][3], made[2][3])


def test_the_public_law_of_a_release_is_one_and_the_dither_is_not_information(monkeypatch):
    with monkeypatch.context() as narrow:
        # The mass of the widest laws is on too many integers for a sum.
        narrow.setattr(derivative_rounding, "WIDTHS", 2.0 ** np.arange(-1, 5))
        for means in (np.array([0.3]), np.array([[0.3], [5.0]])):
            total = sum(2.0 ** -surprise(np.array([float(n)]), means) for n in range(-2000, 2000))
            assert 0.999 < total <= 1 + 1e-9
    rng = np.random.default_rng(0)
    bits = [_rounded(np.array([0.25, 7.0]), rng) for _ in range(2000)]
    entropy = -0.25 * math.log2(0.25) - 0.75 * math.log2(0.75)
    assert abs(np.mean([b for _, b in bits]) - entropy) < 0.08 and {n[1] for n, _ in bits} == {7.0}
    # On average at least the information that releases have about which of two tables it is, and far less than 64 bits.
    x, tables = np.zeros(1), [(np.array([3.0]), np.array([[10.0]])), (np.array([-2.0]), np.array([[13.0]]))]
    made = [[release(x, *table, None, rng.bytes(8)) for _ in range(400)] for table in tables]
    seen = [{(float(r.gradient[0]), float(r.hessian[0, 0])) for r in each} for each in made]
    assert not seen[0] & seen[1], "one release tells the tables apart: one bit"
    assert 1 < np.mean([r.bits for each in made for r in each]) < 25


@pytest.mark.parametrize("dim", [3, 20])
def test_a_dither_that_serves_again_hides_nothing_more(dim):
    """At places that differ by less than the dither sees the numbers are the same, and asking again gave bits back."""
    rng, x = np.random.default_rng(0), np.full(dim, 0.1)
    rows = np.c_[np.ones(500), rng.normal(size=(500, dim - 1))]
    gradient, hessian = rows.T @ rng.normal(size=500) / 2, rows.T @ rows / 4
    totals = []
    for repeated in (True, False):
        made, bits = None, []
        for k in range(12):
            made = release(x + 1e-13 * k, gradient, hessian, made, b"one", repeated=repeated and k > 0)
            bits.append(made.bits)
        totals.append(np.diff(np.cumsum(bits))[1:])
    # What is known already costs a little in each number. As before, it was credited with the dither from 15 parameters on.
    assert (totals[0] > 10).all() and (totals[0] > totals[1] + 3).all() and (dim < 15 or (totals[1] < 0).all())


def test_a_site_knows_which_dithers_have_served(few_rounds, tmp_path):
    def ask(agent, k):
        message = messages.Derive(bytes(16), agent.log.answers + 1, np.full(3, 0.1 + 1e-13 * k))
        assert isinstance(messages.decode(agent.answer(messages.encode(message))), messages.Derivatives)
        return [(one.secret, one.bits) for _, one in agent.computation._released]

    agent = agent_of(few_rounds, "north", tmp_path)
    agent.join(messages.encode(messages.Welcome(bytes(16), few_rounds.study.digest)))
    for k in range(3):
        before = ask(agent, k)
    agent.log.close()
    # The same after a restart.
    agent = agent_of(few_rounds, "north", tmp_path)
    found = ask(agent, 3)
    agent.log.close()
    assert found[:3] == before and len({secret for secret, _ in found}) == 1
    # The last two have the same numbers, and neither has the dither once more.
    assert found[2][1] == pytest.approx(found[3][1]) and found[3][1] > 10


def test_digits_on_the_way_are_fewer_and_close_points_and_averages_have_all():
    hessian = np.eye(10) * 100 + 3.0
    first = release(np.zeros(10), np.ones(10), hessian, None, b"1")
    far = release(np.full(10, 0.1), np.ones(10), hessian, first, b"2")
    farther = release(np.full(10, 0.5), np.ones(10), hessian, first, b"5")
    near = release(np.full(10, 0.001), np.ones(10), hessian, first, b"3")
    mean = release(np.full(10, 0.5), np.ones(10), hessian, first, b"4", averaged=True)
    off = [np.abs(r.hessian - hessian).max() / 64 for r in (first, far, near, mean, farther)]
    assert max(off[2:4]) < 2.0**-6 * 1.01 < off[1] < 2.0**-4 * 1.01 < min(off[0], off[4]) < 2.0**-3 * 1.01
    assert first.bits > far.bits > farther.bits


def test_who_knows_all_other_records_recognises_any_one():
    """What the account does not say, and its document does: the release would have been impossible without this record."""
    rng, x = np.random.default_rng(2), np.array([-0.5, 0.6, 0.4])
    rows = np.c_[np.ones(1000), rng.integers(2, size=1000), rng.standard_normal(1000)]
    chance = 1 / (1 + np.exp(-rows @ x))
    gradients = (chance - (rng.random(1000) < chance))[:, None] * rows
    hessians = (chance * (1 - chance))[:, None, None] * rows[:, :, None] * rows[:, None]
    found = []
    # As many records, and a thousand times as many.
    for times in (1, 1000):
        whole = times * gradients.sum(0), times * hessians.sum(0)
        told = release(x, *whole, None, b"secret", FINE, averaged=True)
        size = np.ldexp(1.0, told.exponents)
        unit, factor = 2.0**-FINE * np.outer(size, size), derivative_rounding._factor(told.hessian, size)

        def possible(gradient, hessian, told=told, unit=unit, factor=factor):
            steps = np.linalg.solve(factor, gradient - told.gradient) * 2.0**FINE * math.sqrt(3)
            return bool((np.abs(hessian - told.hessian) / unit < 1).all() and (np.abs(steps) < 1).all())

        assert possible(*whole)
        found.append(np.mean([possible(whole[0] - g, whole[1] - h) for g, h in zip(gradients, hessians, strict=True)]))
    assert found[0] < 0.02 and found[1] > 0.9


def test_numbers_far_from_all_that_was_expected_have_a_finite_charge():
    assert 50 < surprise(np.array([7.0, -3.0]), np.array([[1e16, 2.0], [-1e20, 0.5]])) < 200


def test_passes_are_charged_by_their_surprise():
    account = Information(100)
    for passes in (200, 205):
        account.add_passes(passes)
    first, second = surprise(np.array([200]), np.array([0])), surprise(np.array([205]), np.array([200]))
    assert account.bits == first + second and second < first


def test_default_limits_follow_from_the_table(tmp_path):
    """A table with 280 possible rows has fewer bits for each record than the rows have, and half of them may be told."""

    def policy(more):
        (tmp_path / "policy.toml").write_text(POLICY.partition("most_bits")[0] + more)
        return read_policy(tmp_path / "policy.toml")

    assert table_bits(2, 2) == pytest.approx(math.log2(3)) and table_bits(60, 1e30) / 60 > 90
    study, every = bit_limits(policy(""), 60, [2, 2, 70])
    assert study == pytest.approx(0.5 * table_bits(60, 280) / 60) and 1.5 < study < 2 < every < 4
    assert bit_limits(policy(""), 60, [60] * 8) == (4.0, 8.0)
    assert bit_limits(policy("most_bits = 20.0"), 60, [2, 2, 70]) == (20.0, every)


def test_a_group_of_rows_is_one_record_in_the_account(tmp_path, monkeypatch):
    """With the visits of a patient as records of their own she had the bits of three; with the key as a column, more."""
    monkeypatch.setattr(start, "try_model_file", lambda *given: None)
    (tmp_path / "policy.toml").write_text(POLICY.partition("most_bits")[0].replace("= 0.5", "= 9"))
    rows = [(f"p{k // 3}", k % 2, k % 3) for k in range(180)]
    (tmp_path / "n.csv").write_text("\n".join(["patient,y,at", *(",".join(map(str, row)) for row in rows)]) + "\n")
    study, policy = (
        parse_study(trend_contract().encode(), lambda name: TREND.encode()),
        read_policy(tmp_path / "policy.toml"),
    )
    given = study, "north", site_records(study, "north", tmp_path / "n.csv"), policy, tmp_path / "ledger.db"
    account = start.admit(*given)[1]
    assert account.records == 60 and account.left == pytest.approx(0.5 * table_bits(180, 6))
    policy.most_bits = 4.0
    policy.most_bits_in_all = 4.0
    assert start.admit(*given)[1].left == pytest.approx(4.0 * 60)


CONTRACT = """
format = 1
name = "one hospital"
sites = [{sites}]

[model]
family = "logistic"
formula = "ill ~ drug{terms}"

[columns]
ill = {{ type = "level", levels = ["no", "yes"] }}
drug = {{ type = "level", levels = ["placebo", "verum"] }}
{columns}

[prior]
scale = 2.5

[dynamics]
chains = 128

[run]
ess = 1000

[releases]
derivatives = "own"

[limits]
rounds = 20000
observed_time = 1e6
"""


def bits_of_a_run(path, records, dim, sites, seed):
    """Bits for each record, and the run, of an ordinary logistic regression."""
    rng, names = np.random.default_rng(seed), [f"x{k}" for k in range(dim - 2)]
    x, drug = rng.standard_normal((records * sites, dim - 2)), rng.integers(2, size=records * sites)
    score = -0.5 + 0.6 * drug + x @ np.r_[0.4, 0.3 * rng.standard_normal(dim - 3)]
    ill = rng.random(len(drug)) < 1 / (1 + np.exp(-score))
    table = pd.DataFrame({
        "drug": np.where(drug > 0, "verum", "placebo"), "ill": np.where(ill, "yes", "no"),
        **{name: np.round(50 + 10 * x[:, k]).clip(10, 90) for k, name in enumerate(names)},
    })  # fmt: skip
    who = [f"s{k}" for k in range(sites)]
    for k, name in enumerate(who):
        table.iloc[k * records : (k + 1) * records].to_csv(path / f"{name}.csv", index=False)
    columns = "\n".join(f'{n} = {{ type = "number", bounds = [10, 90], center = 50, scale = 10 }}' for n in names)
    text = CONTRACT.format(
        sites=", ".join(f'"{w}"' for w in who), terms="".join(f" + {n}" for n in names), columns=columns
    )
    with fp.connect(parse_study(text.encode()), data={w: path / f"{w}.csv" for w in who}, seed=seed) as connection:
        post = fp.sample(connection, progress=False)
        accounts = [agent.computation.information for agent in connection.transport.agents]  # type: ignore
    return max(account.bits / account.records for account in accounts), post


def test_a_run_of_300_records_carries_less_than_a_bit_for_each(tmp_path):
    bits, post = bits_of_a_run(tmp_path, 300, 3, 1, seed=1)
    assert 0.1 < bits < 1 and post.rounds < 20


@pytest.mark.long
@pytest.mark.parametrize(
    ("records", "dim", "sites", "most"), [(300, 3, 1, 1), (1000, 3, 1, 0.25), (1000, 10, 1, 1), (300, 3, 4, 0.6)]
)
def test_bits_of_ordinary_regressions(tmp_path, records, dim, sites, most):
    found = [bits_of_a_run(tmp_path, records, dim, sites, seed)[0] for seed in (1, 2, 3)]
    assert max(found) < most, found


def limited(path, bits=1e9, in_all=1e9, contract=OWN, dataset=None):
    """A study whose sites have limits of so many bits in all, about 100 records."""
    limits = (
        f"most_bits = {bits / RECORDS}\nmost_bits_in_all = {in_all / RECORDS}\ndataset = '{dataset or path.name}'\n"
    )
    return Guarded(path, contract, CAREFUL.partition("most_bits")[0] + limits)


def of_site(connection):
    return connection.transport.agents[0].computation.information


def test_a_site_stops_where_its_bits_end(tmp_path):
    """At a release, at the opening of a run that is expected not to fit, and at plans."""
    many = OWN.replace("chains = 4", "chains = 64")
    with connected(limited(tmp_path / "all", contract=many), tmp_path / "stores") as connection:
        fp.sample(connection, progress=False)
        whole = of_site(connection)
    assert whole.releases > 30 and whole.arrivals > 4
    for name, bits in (("release", 20.0), ("opening", whole.releases + 1.0)):
        with connected(limited(tmp_path / name, bits, contract=many), tmp_path / f"stores {name}") as connection:
            with pytest.raises(LimitReached, match="site '.*' refused .code INFORMATION_SPENT.*raise most_bits"):
                fp.sample(connection, progress=False)
            own, progress = of_site(connection), connection.transport.agents[0].computation.progress
        assert own.bits <= bits and own.arrivals == 0 and (own.releases > 30) == (name == "opening")
        assert progress.shape is None

    with connected(limited(tmp_path / "flips", contract=ZIGZAG), tmp_path / "stores flips") as connection:
        fp.sample(connection, progress=False)
        whole = of_site(connection).bits
    folder = limited(tmp_path / "plans", 0.7 * whole, contract=ZIGZAG)
    with connected(folder, tmp_path / "stores plans") as connection:
        # If a block was complete it is kept, and a warning says so.
        with pytest.raises((LimitReached, UserWarning), match="INFORMATION_SPENT.*most_bits"):
            fp.sample(connection, progress=False)
        assert 0.3 * whole < of_site(connection).bits < 0.8 * whole


def ask_plans(agent, number, horizon):
    made = plans(number + 2, number=number, duration=np.full((CHAINS, 1), horizon))
    answer = messages.decode(agent.answer(made))
    return answer.code if isinstance(answer, messages.Refusal) else int(np.sum(answer.rang))


def test_one_long_plan_does_not_pass_the_limit(tmp_path):
    """The first plans, of which nothing is known that could be expected of them. The control: they are worth more."""
    told = []
    for name, bits in (("free", 1e9), ("limited", 5.0)):
        agent = limited(tmp_path / name, bits, contract=ZIGZAG).agent("north", tmp_path / f"store {name}")
        assert isinstance(messages.decode(agent.answer(opening())), messages.Opened)
        told.append((ask_plans(agent, 0, 5.0), agent.computation.information.bits))
        if name == "limited":
            # Neither is what was refused computed again until it seems cheap.
            assert ask_plans(agent, 0, 5.0) == ask_plans(agent, 0, 1e-3) == "INFORMATION_SPENT"
        agent.log.close()
    assert told[0][0] == CHAINS and told[1][0] == "INFORMATION_SPENT" and min(bits for _, bits in told) > 5


def test_the_log_has_the_bits_of_every_answer(tmp_path, caplog):
    with (
        caplog.at_level("DEBUG", "fedpdmc.site"),
        connected(limited(tmp_path / "study", contract=ZIGZAG), tmp_path / "stores") as connection,
    ):
        fp.sample(connection, progress=False)
        accounts = [agent.computation.information for agent in connection.transport.agents]
    lines = [line.getMessage() for line in caplog.records]
    bits = [float(found[1]) for line in lines if (found := re.fullmatch(r"[^:]+: (-?[0-9.]+) bits", line))]
    assert len(bits) > 20 and sum(bits) == pytest.approx(sum(one.bits for one in accounts), abs=0.05 * len(bits))


@pytest.mark.parametrize("dataset", ["both", "another"])
def test_studies_that_go_on_together_share_what_is_left(tmp_path, dataset):
    """Both were opened before the other's first answer. The control: studies of other data do not."""
    contracts = ZIGZAG, ZIGZAG.replace('name = "', 'name = "another ')
    one, other = (
        limited(tmp_path / str(k), 1e9, 500.0, contract, which).agent("north", tmp_path / f"store {k}")
        for k, (contract, which) in enumerate(zip(contracts, ("both", dataset), strict=True))
    )
    for agent in (one, other):
        assert isinstance(messages.decode(agent.answer(opening())), messages.Opened)
    assert isinstance(ask_plans(other, 0, 0.5), int)
    while (found := ask_plans(one, one.log.answers - 1, 0.5)) != "INFORMATION_SPENT":
        assert isinstance(found, int) and one.log.answers < 500
    assert ("INFORMATION_SPENT" in [ask_plans(other, k, 0.5) for k in range(1, 5)]) == (dataset == "both")
    for agent in (one, other):
        agent.log.close()


def test_restarts_do_not_reset_the_account_and_studies_of_the_same_records_add_up(tmp_path):
    folder = limited(tmp_path / "first", contract=ZIGZAG)
    with connected(folder, tmp_path / "stores") as connection:
        post = fp.sample(connection, progress=False)
        bits = of_site(connection).bits
    assert bits > 5
    again = folder.agent("north", tmp_path / "stores" / "north")
    assert again.computation.information.bits == pytest.approx(bits)
    again.log.close()
    second = ZIGZAG.replace('name = "', 'name = "another ')
    for name, code in (("first", "INFORMATION_SPENT"), ("other", None)):
        agent = limited(tmp_path / f"of {name}", 1e9, bits, second, name).agent("north", tmp_path / f"store {name}")
        assert isinstance(messages.decode(agent.answer(opening())), messages.Opened)
        found = ask_plans(agent, 0, 1e-3)
        assert found == code if code else isinstance(found, int)
        agent.log.close()

    # Who is told: the coordinator with less precision, the site's operator in its log, on its page and in the register.
    site = agent_of(folder, "north", tmp_path / "stores")
    assert post.information["north"] >= bits > post.information["north"] - 16 and post.information["north"] % 16 == 0
    assert f"in bits, on average at most: north {post.information['north']:,.0f}" in " ".join(
        str(post.summary()).split()
    )
    post.report(tmp_path / "report.html")
    assert "answers carry about its records, in bits" in (tmp_path / "report.html").read_text()
    assert f"{bits:,.0f} bits about 100 records, {bits / 100:.2g} for each" in site.progress()
    assert SiteBoard(site, "nowhere").facts()["bits"] == [pytest.approx(bits / 100), 1e7]
    site.log.close()
    shown = CliRunner().invoke(app, ["ledger", "data-sets"]).output
    assert f" {bits:.4g} " in shown


def fed(path, contract, policy, records):
    """A study whose sites have this policy and so many records."""
    folder = Folder(path / "study", contract)
    (folder.path / "policy.toml").write_text(policy)
    for name in folder.study.sites:
        write_csv(folder.path / f"{name}.csv", rows(name, records))
    return folder


def test_refusals_and_reports_are_charged(tmp_path):
    """Both depend on the records. Without a charge there may be as many as a run has rounds, or any number."""
    folder = fed(tmp_path, FEW_ROUNDS, POLICY.replace("least_records = 2", "least_records = 20"), 100)
    agent = agent_of(folder, "north", tmp_path)
    agent.join(messages.encode(messages.Welcome(bytes(16), folder.study.digest)))
    account = agent.computation.information

    def ask(kind, *content):
        return messages.decode(agent.answer(messages.encode(kind(bytes(16), agent.log.answers + 1, *content))))

    assert ask(messages.AskAccount).bits == account.bits == 0.0
    assert ask(messages.Derive, np.array([0.0, 0.0, 1e3])).code == "TOO_FAR"
    assert account.bits == DECISION + REFUSED
    ask(messages.Derive, np.zeros(3))
    before = account.bits
    reported = ask(messages.AskAccount).bits
    # So many times 16 bits more than nothing: the length of the code of that number.
    assert account.bits == before + 2 * math.floor(math.log2(reported / 16 + 1)) + 1
    assert reported == 16 * math.ceil(account.bits / 16)
    after = account.bits
    assert ask(messages.AskAccount).bits == reported and account.bits == after
    agent.log.close()


class Killed(BaseException):
    """The plug was pulled."""


@pytest.mark.parametrize("refunded", [True, False], ids=["refunded", "as before"])
@pytest.mark.parametrize(("place", "kind"), [(0.0, Kind.ANSWER), (1e3, Kind.REFUSAL)], ids=["answer", "refusal"])
def test_kills_between_the_charge_and_the_answer_cost_nothing(tmp_path, monkeypatch, place, kind, refunded):
    """Nothing has left the site. Twenty such kills used up the limit of a study, and of all others with it."""
    if not refunded:
        monkeypatch.setattr(DataSets, "refund", lambda self, use, digest, request: self.bits(use))
    folder = fed(tmp_path, FEW_ROUNDS, POLICY.replace("least_records = 2", "least_records = 20"), 100)
    data = messages.encode(messages.Derive(bytes(16), 1, np.array([0.0, 0.0, place])))

    def bits(killed):
        agent = agent_of(folder, "north", tmp_path)
        agent.join(messages.encode(messages.Welcome(bytes(16), folder.study.digest)))
        append = agent.log.append

        def pulled(entry, content):
            if entry is kind and killed:
                raise Killed
            append(entry, content)

        agent.log.append = pulled
        with pytest.raises(Killed) if killed else contextlib.nullcontext():
            agent.answer(data)
        agent.log.close()
        return agent.computation.information.bits

    killed = [bits(True) for _ in range(20)]
    once, whole = killed[0], bits(False)
    assert once > 6 and whole == pytest.approx(once if refunded else 21 * once)
    # A refusal that has left stays charged, and so is the next one.
    if kind is Kind.REFUSAL:
        assert bits(False) == pytest.approx(whole + once)


@pytest.mark.parametrize("scaled", [True, False], ids=["scaled", "as before"])
def test_places_that_differ_have_dithers_of_their_own_in_any_unit(tmp_path, monkeypatch, scaled):
    """With one dither for many places its bits would be counted for each of them, as what hides the records."""
    small = FEW_ROUNDS.replace("scale = 10", "scale = 1e-11").replace("scale = 1.5", "scale = [2.5, 2.5, 2.5e-12]")
    small = small.replace("mean = 0.1", "mean = 0.0")
    folder = fed(tmp_path, small, POLICY, 100)
    agent, used = agent_of(folder, "north", tmp_path), []
    if not scaled:
        monkeypatch.setattr(computation, "scale_exponents", lambda hessian: np.zeros(len(hessian), int))
    agent.join(messages.encode(messages.Welcome(bytes(16), folder.study.digest)))
    monkeypatch.setattr(computation, "release", lambda *a, **k: used.append(a[4]) or release(*a, **k))
    for k in range(6):
        message = messages.Derive(bytes(16), k + 1, np.array([0.0, 0.0, k * 1e-13]))
        assert isinstance(messages.decode(agent.answer(messages.encode(message))), messages.Derivatives)
    assert len(set(used)) == (6 if scaled else 1)
    agent.log.close()
