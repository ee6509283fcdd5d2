"""An integer programme against the transcript of an honest run: what was revealed before, and what is revealed now.

The attacker is the coordinator. It follows the contract, knows the number of records, every value that a record can have and
how often each occurs in the population, and has all that one site has answered. It looks for the records that agree with
the answers: the counts of the possible rows, which are integers.
"""

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from scipy.optimize import Bounds, LinearConstraint, milp, minimize, nnls
from tests.federation.requests import RUN
from tests.federation.studies import SITE_SEED

import fedpdmc as fp
from fedpdmc._jax.precision import double_precision
from fedpdmc.clocks import follow
from fedpdmc.federation import messages
from fedpdmc.federation.derivative_rounding import FEWER, Release, digits_of
from fedpdmc.federation.site_agent import computation
from fedpdmc.federation.site_agent.start import open_agent
from fedpdmc.plan import Plan
from fedpdmc.study import Study, parse_study

RECORDS, SECONDS = 60, 15.0
CHAINS, REQUESTS, HORIZON = 1000, 10, 0.15


class Table:
    """The possible rows of a table, of zeros and ones, an age and the outcome, and their chances in the population."""

    def __init__(self, covariates, ages, contract):
        self.contract, self.names = contract, ["drug", "age", *covariates]
        values = [(0.0, 1.0), (np.asarray(ages) - 50) / 10, *[(0.0, 1.0)] * len(covariates), (0.0, 1.0)]
        self.rows = np.array(list(itertools.product(*values)))
        self.design, self.outcome = np.c_[np.ones(len(self.rows)), self.rows[:, :-1]], self.rows[:, -1]
        self.upper = np.triu_indices(self.design.shape[1])

    def population(self):
        """The chance of each row."""
        weight = np.exp(-0.5 * ((self.rows[:, 1] - 1.2) / 1.2) ** 2)
        more = [0.4, -0.3][: self.rows.shape[1] - 3]
        ill = sigmoid(-0.5 + 0.6 * self.rows[:, 0] + 0.4 * self.rows[:, 1] + self.rows[:, 2:-1] @ more)
        chance = weight * np.where(self.outcome > 0, ill, 1 - ill)
        return chance / chance.sum()

    def sample(self, seed, records):
        """How often each row occurs in a sample."""
        return np.random.default_rng(seed).multinomial(records, self.population())

    def write(self, path, counts):
        """The records as a file."""
        rows = np.repeat(self.rows, counts, 0)
        frame = pd.DataFrame(dict(zip(self.names, rows[:, :-1].astype(int).T, strict=True)))
        frame["drug"] = np.where(rows[:, 0] > 0, "verum", "placebo")
        frame["age"] = np.round(50 + 10 * rows[:, 1]).astype(int)
        frame["ill"] = np.where(rows[:, -1] > 0, "yes", "no")
        frame.to_csv(path, index=False)


CONTRACT = """
format = 1
name = "one hospital"
sites = ["north"]

[model]
family = "logistic"
formula = "ill ~ drug + age"

[columns]
ill = { type = "level", levels = ["no", "yes"] }
drug = { type = "level", levels = ["placebo", "verum"] }
age = { type = "number", bounds = [18, 100], center = 50, scale = 10 }

[prior]
scale = 2.5

[dynamics]
chains = 64

[run]
ess = 1000

[releases]
derivatives = "own"

[limits]
rounds = 20000
observed_time = 1e6
"""


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


FEW_VALUES = Table([], range(30, 95, 5), CONTRACT)
DESIGN = FEW_VALUES.design
WIDE = Table(
    ["sex", "smoker"], range(30, 95),
    CONTRACT.replace("drug + age", "drug + age + sex + smoker").replace(
        "\n[prior]", 'sex = { type = "count", bounds = [0, 1] }\nsmoker = { type = "count", bounds = [0, 1] }\n\n[prior]'
    ),
)  # fmt: skip


class Transcript:
    """All that the coordinator gets from a site: releases, and states and marks at arrivals in the run's coordinates."""

    def __init__(self, path, counts, table=FEW_VALUES):
        self.table, self.records = table, int(np.sum(counts))
        table.write(path / "north.csv", counts)
        self.opened, self.events = None, []
        with fp.connect(parse_study(table.contract.encode()), data={"north": path / "north.csv"}, seed=1) as connection:
            found = connection.transport.agents[0].computation
            opens, answers = found._handlers[messages.Open], found._handlers[messages.TurnPlans]

            def opening(message, asked):
                self.opened = message
                return opens(message, asked)

            def planned(message, asked):
                given = answers(message, asked)
                self._keep(found.study.dynamics(), found._arrays(message), message.chain, given)
                return given

            found._handlers |= {messages.Open: opening, messages.TurnPlans: planned}
            self.post = fp.sample(connection, progress=False)
            self.released = [(told, place.spread) for place, told in found._released]
            self.information = found.information

    @double_precision
    def _keep(self, dynamics, plan, chain, given):
        rows = chain[given.rang.astype(bool)]
        if not len(rows):
            return
        time, _, mark = given.arrivals()
        path = follow(dynamics, Plan(*(jnp.asarray(x[rows]) for x in plan)))
        segment = jnp.sum(path.begin <= time[:, None], -1) - 1
        a, _ = path.state(dynamics, segment, time - path.at(path.begin, segment))
        self.events += list(zip(np.asarray(a), mark, strict=True))

    def gradients(self, a):
        """Whitened gradients (d, rows) of each possible row at a position, and that of the control variate."""
        x, design = self.opened.center + self.opened.scale @ a, self.table.design
        each = (sigmoid(design @ x) - self.table.outcome)[:, None] * design
        control = self.opened.precision @ x + self.opened.linear
        return self.opened.scale.T @ each.T, self.opened.scale.T @ control


def averaged(table, x, spread):
    """Gradient (rows, d) and Hessian (rows, d(d + 1)/2) of each possible row at a point, or their means over a Gaussian."""
    design, (i, j) = table.design, table.upper
    nodes, weights = np.polynomial.hermite_e.hermegauss(40)
    width = np.zeros(len(design)) if spread is None else np.linalg.norm(design @ spread, axis=1)
    p = sigmoid((design @ x)[:, None] + width[:, None] * nodes)
    weights = weights / weights.sum()
    slope, curve = p @ weights - table.outcome, (p * (1 - p)) @ weights
    return slope[:, None] * design, curve[:, None] * design[:, i] * design[:, j]


def constraints(transcript, exact):
    """Linear constraints on the counts from releases and, if they were reflections, from arrivals."""
    table, records = transcript.table, transcript.records
    upper, kept = table.upper, [LinearConstraint(np.ones((1, len(table.rows))), records, records)]
    for k, (told, spread) in enumerate(transcript.released):
        slope, curve = averaged(table, told.x, spread)
        size = np.ldexp(1.0, told.exponents)
        if exact:
            # The solver is content with errors of 1e-6: a thousandth of that is left.
            slope, curve, told = (
                1e3 * slope,
                1e3 * curve,
                told._replace(gradient=1e3 * told.gradient, hessian=1e3 * told.hessian),
            )
            slack, wide = 1e-6, 1e-6
        else:
            unit = 2.0 ** -digits_of(len(told.x), k == 0)
            slack = unit * np.outer(size, size)[upper]
            wide = unit * np.abs(size).max() * 2 * (2**FEWER if spread is None else 1)
        kept.append(LinearConstraint(curve.T, told.hessian[upper] - slack, told.hessian[upper] + slack))
        kept.append(LinearConstraint(slope.T, told.gradient - wide, told.gradient + wide))
    if exact:
        for a, normal in transcript.events[:150]:
            each, control = transcript.gradients(a)
            across = 1e3 * np.linalg.svd(normal[None])[2][1:]
            kept.append(LinearConstraint(across @ each, across @ control - 1e-6, across @ control + 1e-6))
    return kept


def reconstructed(transcript, exact, weight=0.0, seconds=SECONDS):
    """The most likely records that agree with the transcript, or None if none was found in time."""
    cost = -np.log(transcript.table.population())
    for a, velocity in transcript.events if weight else ():
        # A velocity that was drawn points against the gradient.
        each, _ = transcript.gradients(a)
        cost = cost + weight * (velocity / np.linalg.norm(velocity)) @ each
    found = milp(
        cost, integrality=np.ones(len(cost)), bounds=Bounds(0, transcript.records),
        constraints=constraints(transcript, exact), options={"time_limit": seconds},
    )  # fmt: skip
    return None if found.x is None else np.round(found.x)


def agreement(counts, guess):
    """The share of the records whose covariates a guess has right. Answers have few sums of outcomes."""
    if guess is None:
        return 0.0
    one, other = (np.reshape(x, (-1, 2)).sum(1) for x in (counts, guess))
    return float(np.minimum(one, other).sum() / np.sum(counts))


@pytest.mark.long
def test_an_integer_programme_finds_all_records_of_reflections_and_no_more_than_a_guess_of_draws(tmp_path, monkeypatch):
    shares, guesses = [], []
    for seed in range(3):
        counts = FEW_VALUES.sample(seed, RECORDS)
        guesses += [agreement(counts, FEW_VALUES.sample(100 + k, RECORDS)) for k in range(20)]
        (tmp_path / str(seed)).mkdir()
        transcript = Transcript(tmp_path / str(seed), counts)
        assert len(transcript.events) > 50 and transcript.information.bits > 100
        shares.append(max(agreement(counts, reconstructed(transcript, False, weight)) for weight in (0.0, 0.01, 0.1)))
    assert max(shares) < np.quantile(guesses, 0.95) + 0.05, (shares, np.mean(guesses))

    monkeypatch.setattr(Study, "dynamics", lambda study: fp.Boomerang())
    monkeypatch.setattr(computation, "release", lambda x, g, h, *_, **__: Release(np.array(x), g, h, 0.0))
    for seed in range(2):
        counts = FEW_VALUES.sample(seed, RECORDS)
        (tmp_path / f"exact {seed}").mkdir()
        assert agreement(counts, reconstructed(Transcript(tmp_path / f"exact {seed}", counts), exact=True)) == 1.0


@pytest.mark.long
@pytest.mark.parametrize("records", [100, 200, 500])
def test_nor_of_larger_tables_with_ages_in_years_and_two_more_columns(tmp_path, records, capsys):
    """The best of the attacker's settings is compared with the best of as many guesses from the population."""
    counts = WIDE.sample(records, records)
    guesses = [agreement(counts, WIDE.sample(1000 + k, records)) for k in range(60)]
    transcript = Transcript(tmp_path, counts, WIDE)
    weights = (0.0, 1e-3, 0.01, 0.03, 0.1, 0.3)
    shares = [agreement(counts, reconstructed(transcript, False, weight, seconds=30.0)) for weight in weights]
    with capsys.disabled():
        bits = transcript.information.bits / records
        print(
            f"{records} records: {100 * max(shares):.0f} %, guesses {100 * np.mean(guesses):.0f} %, {bits:.1f} bits each"
        )
    assert len(transcript.events) > 50
    assert max(shares) < max(guesses) + 0.03, (shares, np.mean(guesses))


def quiet(kind):
    """A contract with arrivals only, and many chains."""
    changed = CONTRACT.replace("chains = 64", f'chains = {CHAINS}\nkind = "{kind}"').replace(
        "ess = 1000", "duration = 5.0"
    )
    return parse_study(changed.replace('derivatives = "own"', 'derivatives = "none"').encode())


class Site:
    """A site that answers plans of the coordinator's choice, as contracts do whose plans sites cannot make."""

    def __init__(self, path, counts, study):
        path.mkdir()
        FEW_VALUES.write(path / "north.csv", counts)
        self.agent = open_agent(study, "north", path / "north.csv", store=path / "store", seed=SITE_SEED)
        self.agent.computation.own.enforced = False
        self.agent.join(messages.encode(messages.Welcome(RUN, study.digest)))
        nothing = np.zeros((0, 0)), np.zeros(0), np.zeros(0)
        self.ask(messages.Open(RUN, 1, CHAINS, 1, np.zeros(3), np.ones(3), 0, *nothing))

    def ask(self, message):
        return messages.decode(self.agent.answer(messages.encode(message)))

    def plans(self, x, v, horizon, number):
        """The arrivals of all chains along one plan: of those that had one the rows, the times and the marks."""
        start, velocity = (np.tile(u, (CHAINS, 1)) for u in (x, v))
        one = np.full(CHAINS, number), start, np.full((CHAINS, 1), horizon), velocity[:, None], np.arange(CHAINS)
        answer = self.ask(messages.Plans(RUN, number + 2, *one))
        time, coordinate, velocity = answer.arrivals()
        return np.flatnonzero(answer.rang), time, coordinate if len(coordinate) else velocity


def slopes(counts, x):
    """The gradient of a site with these records at points (k, d), with shape (k, d)."""
    return ((sigmoid(x @ DESIGN.T) - FEW_VALUES.outcome) * counts) @ DESIGN


class Aimed:
    """A straight path that tells whether one person is there, who knows all others: these have no slope where it begins."""

    def __init__(self, others, person):
        self.worlds = [others + np.eye(len(others), dtype=int)[person], others]
        v = np.sign(DESIGN[person]) * np.sign(0.5 - FEW_VALUES.outcome[person])
        self.v = np.where(v == 0, 1.0, v)
        self.x = minimize(lambda x: np.sum(slopes(others, x[None]) ** 2), np.zeros(3)).x
        self.grid = np.linspace(0, HORIZON, 301)
        self.rates = [
            np.maximum(self.v * slopes(world, self.x + self.grid[:, None] * self.v), 0) for world in self.worlds
        ]
        sums = [(r.sum(1)[1:] + r.sum(1)[:-1]) / 2 * self.grid[1] for r in self.rates]
        self.whole = [np.concatenate([[0], np.cumsum(each)]) for each in sums]

    def log_ratios(self, rows, time, mark):
        """The logarithm of the likelihoods' ratio, that she is there over that she is not, by the arrivals of each chain."""
        each = np.full(CHAINS, self.whole[1][-1] - self.whole[0][-1])
        at = [np.array([np.interp(t, self.grid, r[:, j]) for t, j in zip(time, mark, strict=True)]) for r in self.rates]
        passed = [np.interp(time, self.grid, w) for w in self.whole]
        each[rows] = np.log(np.maximum(at[0], 1e-12) / np.maximum(at[1], 1e-12)) + passed[1] - passed[0]
        return each


@pytest.mark.parametrize("enforced", [True, False], ids=["sites plan", "as before"])
def test_flips_along_chosen_plans_tell_of_ten_who_is_there_and_chosen_plans_are_refused(tmp_path, enforced):
    """Zig-Zag, nothing released but arrivals. The control: sites that answer any plan tell it ten times of ten."""
    study, right, codes = quiet("ZigZag"), 0, set()
    for k in range(10):
        counts = FEW_VALUES.sample(k, RECORDS)
        person = int(np.flatnonzero(counts * (FEW_VALUES.rows[:, 1] > 2))[k % 3])
        aimed = Aimed(counts - np.eye(len(counts), dtype=int)[person], person)
        FEW_VALUES.write(tmp_path / "north.csv", aimed.worlds[k % 2])
        with fp.connect(study, data={"north": tmp_path / "north.csv"}, seed=k) as connection:
            agent, ask = connection.transport.agents[0], connection.transport.ask
            agent.computation.own.enforced = enforced

            def asked(requests, ask=ask):
                if isinstance(messages.decode(requests[0].data), messages.Plans):
                    raise InterruptedError(requests[0].data)
                return ask(requests)

            connection.transport.ask = asked
            with pytest.raises(InterruptedError) as stopped:
                fp.sample(connection, progress=False)
            message = messages.decode(stopped.value.args[0])
            start, velocity = (np.tile(u, (CHAINS, 1)) for u in (aimed.x, aimed.v))
            chosen = {"start": start, "velocity": velocity[:, None], "duration": np.full((CHAINS, 1), HORIZON)}
            answer = messages.decode(agent.answer(messages.encode(dataclasses.replace(message, **chosen))))
        if isinstance(answer, messages.Refusal):
            codes.add(answer.code)
        else:
            ratios = aimed.log_ratios(np.flatnonzero(answer.rang), *answer.arrivals()[:2])
            right += (ratios.sum() > 0) == (k % 2 == 0)
    assert (right, codes) == ((0, {"NOT_MY_PLAN"}) if enforced else (10, set()))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_membership_by_ten_thousand_repeated_plans_is_within_the_account(tmp_path, capsys):
    """Zig-Zag, a plan that the attacker has chosen for one person, and likelihood ratios of all that it returns.

    If the answers carry I bits about the records, the advantage in telling whether one is there is at most √(2 I log 2).
    """
    counts = FEW_VALUES.sample(5, RECORDS)
    person = int(np.flatnonzero(counts * (FEW_VALUES.rows[:, 1] > 2))[0])
    aimed = Aimed(counts - np.eye(len(counts), dtype=int)[person], person)
    worlds = aimed.worlds
    study, ratios, bits = quiet("ZigZag"), [], []
    for k, world in enumerate(worlds):
        site, ratio = Site(tmp_path / str(k), world, study), []
        for number in range(REQUESTS):
            ratio.append(aimed.log_ratios(*site.plans(aimed.x, aimed.v, HORIZON, number)))
        ratios.append(np.concatenate(ratio))
        bits.append(site.agent.computation.information.arrivals)
        site.agent.log.close()
    for m in (1, 10, 100, 1000):
        sums = [r.reshape(-1, m).sum(1) for r in ratios]
        advantage = np.mean(sums[0] > 0) - np.mean(sums[1] > 0)
        bound = np.sqrt(2 * np.log(2) * min(bits) * m / len(ratios[0]))
        with capsys.disabled():
            print(f"{m} plans: advantage {advantage:.3f}, at most {bound:.3f}")
        assert advantage <= bound + 2 / np.sqrt(len(sums[0]))
    # The attack works: ten thousand plans tell.
    assert ratios[0].sum() > 0 > ratios[1].sum()


def test_one_reflection_tells_whether_somebody_is_there_and_a_draw_does_not(tmp_path, monkeypatch):
    """The control of the account: a normal is that of one set of records and of no other."""
    counts = FEW_VALUES.sample(5, RECORDS)
    worlds = [counts, counts - np.eye(len(counts), dtype=int)[np.flatnonzero(counts)[0]]]
    study, x, v = quiet("BouncyParticle"), np.array([0.1, 0.2, 0.3]), np.array([1.0, 1.0, 1.0])
    for bounce in ("draw", "reflect"):
        monkeypatch.setattr(Study, "dynamics", lambda study, b=bounce: fp.BouncyParticle(bounce=b))
        site = Site(tmp_path / bounce, counts, study)
        _, time, mark = site.plans(x, v, 2.0, 0)
        site.agent.log.close()
        along = [slopes(world, x + time[:, None] * v) for world in worlds]
        off = [
            1 - np.abs(np.sum(g * mark, 1)) / np.linalg.norm(g, axis=1) / np.linalg.norm(mark, axis=1) for g in along
        ]
        assert len(time) == CHAINS
        assert (off[0].max() < 1e-12 and off[1].min() > 1e-9) == (bounce == "reflect")


FAR, FAR_RECORDS, FAR_REQUESTS = 300.0, 400, 20


def far_plans(rng):
    """Places at which each age has a slope of its own, and directions there: every outcome that is not expected counts."""
    between, drug = rng.choice(np.arange(-2.25, 4.5, 0.5), CHAINS), rng.choice([0.0, 10.0, -10.0], CHAINS)
    way = np.c_[-between, drug, np.ones(CHAINS)] * rng.choice([-1.0, 1.0], CHAINS)[:, None]
    v = rng.standard_normal((CHAINS, 3))
    return FAR * way, v / np.linalg.norm(v, axis=1)[:, None]


def most_likely(each, rang, v, time, mark):
    """The counts by the chances of all times and drawn velocities, and the population's; each is smoothed less and less."""
    along, chance = np.einsum("prk,pk->pr", each, v), FEW_VALUES.population()
    own, towards = each[rang], -np.einsum("prk,pk->pr", each[rang], mark[rang])
    counts = FAR_RECORDS * chance
    for width in (30.0, 10.0, 3.0, 1.0):

        def surprise(c, width=width):
            rate, to, slope = along @ c, towards @ c, np.einsum("prk,r->pk", own, c)
            (rate, of_rate), (to, of_to) = (
                (width * np.logaddexp(0, r / width), sigmoid(r / width)) for r in (rate, to)
            )
            size, ratio = np.linalg.norm(slope, axis=1), np.log(np.maximum(c, 1e-9) / (FAR_RECORDS * chance))
            value = time @ rate - np.log(rate[rang]).sum() - np.log(to / size).sum() + np.sum(c * ratio - c)
            gradient = along.T @ (time * of_rate) - along[rang].T @ (of_rate / rate)[rang] - towards.T @ (of_to / to)
            return value, gradient + np.einsum("prk,pk->r", own, slope / size[:, None] ** 2) + ratio

        found = minimize(surprise, counts, jac=True, bounds=[(1e-6, None)] * len(counts), options={"maxiter": 500})
        counts = found.x
    return counts


@pytest.mark.long
@pytest.mark.parametrize("bounce", ["draw", "reflect"])
def test_chosen_plans_far_out_under_a_wide_prior_give_all_rows_of_reflections_and_few_of_draws(
    tmp_path, monkeypatch, capsys, bounce
):
    """Bouncy Particle, arrivals only, a prior of scale 1,000, and a site that answers any plan: 20,000 plans."""
    monkeypatch.setattr(Study, "dynamics", lambda study: fp.BouncyParticle(bounce=bounce))
    study = parse_study(quiet("BouncyParticle").text.replace(b"scale = 2.5", b"scale = 1000.0"))
    counts, rng = FEW_VALUES.sample(11, FAR_RECORDS), np.random.default_rng(12)
    site, horizon = Site(tmp_path / bounce, counts, study), 0.2
    seen = []
    for number in range(FAR_REQUESTS):
        x, v = far_plans(rng)
        one = np.full(CHAINS, number), x, np.full((CHAINS, 1), horizon), v[:, None], np.arange(CHAINS)
        answer = site.ask(messages.Plans(RUN, number + 2, *one))
        time, _, mark = answer.arrivals()
        every, place = np.full(CHAINS, horizon), np.full((CHAINS, 3), np.nan)
        every[np.flatnonzero(answer.rang)], place[np.flatnonzero(answer.rang)] = time, mark
        seen.append((x, v, every, place))
    bits = site.agent.computation.information.bits / FAR_RECORDS
    site.agent.log.close()
    x, v, time, mark = (np.concatenate(each) for each in zip(*seen, strict=True))
    each = (sigmoid(np.clip(x @ DESIGN.T, -50, 50)) - FEW_VALUES.outcome)[:, :, None] * DESIGN  # (plans, rows, 3)
    rang = np.isfinite(mark[:, 0])
    if bounce == "reflect":
        # A normal is a multiple of the gradient: a linear equation for the counts.
        normal, own = mark[rang][:500], each[rang][:500]
        across = np.concatenate(
            [normal[:, None, k] * own[:, :, k - 1] - normal[:, None, k - 1] * own[:, :, k] for k in range(3)]
        )
        whole = np.r_[np.zeros(len(across)), FAR_RECORDS]
        guess = np.round(nnls(np.r_[across, np.ones((1, len(counts)))], whole)[0])
    else:
        guess = most_likely(each, rang, v, time, mark)
    share = agreement(counts, guess)
    usual = agreement(counts, FAR_RECORDS * FEW_VALUES.population())
    with capsys.disabled():
        words = f"{bounce}: {100 * share:.1f} % of {FAR_RECORDS}, the population's table {100 * usual:.1f} %"
        print(f"{words}, {rang.sum()} arrivals, {bits:.2f} bits each")
    assert share > 0.99 if bounce == "reflect" else usual < share < 0.99
