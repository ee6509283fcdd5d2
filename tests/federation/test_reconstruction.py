"""An integer programme against the transcript of an honest run: what was revealed before, and what is revealed now.

The attacker is the coordinator. It follows the contract, knows the number of records, every value that a record can have and
how often each occurs in the population, and has all that one site has answered. It looks for the records that agree with
the answers: the counts of the possible rows, which are integers.
"""

import itertools

import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from scipy.optimize import Bounds, LinearConstraint, milp

import fedpdmc as fp
from fedpdmc._jax.precision import double_precision
from fedpdmc.clocks import follow
from fedpdmc.federation import messages
from fedpdmc.federation.derivative_rounding import Release, digits_of
from fedpdmc.federation.site_agent import computation
from fedpdmc.plan import Plan
from fedpdmc.study import Study, parse_study

RECORDS, SECONDS = 60, 15.0
AGES = np.arange(30, 95, 5)
ROWS = np.array(list(itertools.product([0.0, 1.0], (AGES - 50) / 10, [0.0, 1.0])))
DESIGN, OUTCOME = np.c_[np.ones(len(ROWS)), ROWS[:, :2]], ROWS[:, 2]
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


def population():
    """The chance of each row."""
    weight = np.exp(-0.5 * ((ROWS[:, 1] - 1.2) / 1.2) ** 2)
    ill = sigmoid(-0.5 + 0.6 * ROWS[:, 0] + 0.4 * ROWS[:, 1])
    chance = weight * np.where(OUTCOME > 0, ill, 1 - ill)
    return chance / chance.sum()


class Transcript:
    """All that the coordinator gets from a site: releases, and states and marks at arrivals in the run's coordinates."""

    def __init__(self, path, counts):
        rows = np.repeat(ROWS, counts, 0)
        table = pd.DataFrame({
            "drug": np.where(rows[:, 0] > 0, "verum", "placebo"), "age": (50 + 10 * rows[:, 1]).astype(int),
            "ill": np.where(rows[:, 2] > 0, "yes", "no"),
        })  # fmt: skip
        table.to_csv(path / "north.csv", index=False)
        self.opened, self.events = None, []
        with fp.connect(parse_study(CONTRACT.encode()), data={"north": path / "north.csv"}, seed=1) as connection:
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
        """Whitened gradients (3, rows) of each possible row at a position, and that of the control variate."""
        x = self.opened.center + self.opened.scale @ a
        each = (sigmoid(DESIGN @ x) - OUTCOME)[:, None] * DESIGN
        control = self.opened.precision @ x + self.opened.linear
        return self.opened.scale.T @ each.T, self.opened.scale.T @ control


def averaged(x, spread):
    """Gradient (rows, 3) and Hessian (rows, 6) of each possible row at a point, or their means over a Gaussian."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(40)
    width = np.zeros(len(DESIGN)) if spread is None else np.linalg.norm(DESIGN @ spread, axis=1)
    p = sigmoid((DESIGN @ x)[:, None] + width[:, None] * nodes)
    weights = weights / weights.sum()
    slope, curve = p @ weights - OUTCOME, (p * (1 - p)) @ weights
    upper = np.triu_indices(3)
    outer = (DESIGN[:, :, None] * DESIGN[:, None, :])[:, upper[0], upper[1]]
    return slope[:, None] * DESIGN, curve[:, None] * outer


def constraints(transcript, exact):
    """Linear constraints on the counts from releases and, if they were reflections, from arrivals."""
    upper, kept = np.triu_indices(3), [LinearConstraint(np.ones((1, len(ROWS))), RECORDS, RECORDS)]
    for k, (told, spread) in enumerate(transcript.released):
        slope, curve = averaged(told.x, spread)
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
            unit = 2.0 ** -digits_of(3, k == 0)
            slack = unit * np.outer(size, size)[upper]
            wide = unit * np.abs(size).max() * 2
        kept.append(LinearConstraint(curve.T, told.hessian[upper] - slack, told.hessian[upper] + slack))
        kept.append(LinearConstraint(slope.T, told.gradient - wide, told.gradient + wide))
    if exact:
        for a, normal in transcript.events[:150]:
            each, control = transcript.gradients(a)
            across = 1e3 * np.linalg.svd(normal[None])[2][1:]
            kept.append(LinearConstraint(across @ each, across @ control - 1e-6, across @ control + 1e-6))
    return kept


def reconstructed(transcript, exact, weight=0.0):
    """The most likely records that agree with the transcript, or None if none was found in time."""
    cost = -np.log(population())
    for a, velocity in transcript.events if weight else ():
        # A velocity that was drawn points against the gradient.
        each, _ = transcript.gradients(a)
        cost = cost + weight * (velocity / np.linalg.norm(velocity)) @ each
    found = milp(
        cost, integrality=np.ones(len(ROWS)), bounds=Bounds(0, RECORDS), constraints=constraints(transcript, exact),
        options={"time_limit": SECONDS},
    )  # fmt: skip
    return None if found.x is None else np.round(found.x)


def agreement(counts, guess):
    """The share of the records whose treatment and age a guess has right. Answers have only three sums of outcomes."""
    if guess is None:
        return 0.0
    one, other = (np.reshape(x, (-1, 2)).sum(1) for x in (counts, guess))
    return float(np.minimum(one, other).sum()) / RECORDS


@pytest.mark.long
def test_an_integer_programme_finds_all_records_of_reflections_and_no_more_than_a_guess_of_draws(tmp_path, monkeypatch):
    shares, guesses = [], []
    for seed in range(3):
        counts = np.random.default_rng(seed).multinomial(RECORDS, population())
        guesses += [
            agreement(counts, np.random.default_rng(100 + k).multinomial(RECORDS, population())) for k in range(20)
        ]
        (tmp_path / str(seed)).mkdir()
        transcript = Transcript(tmp_path / str(seed), counts)
        assert len(transcript.events) > 100 and transcript.information.bits > 100
        shares.append(max(agreement(counts, reconstructed(transcript, False, weight)) for weight in (0.0, 0.01, 0.1)))
    assert max(shares) < np.quantile(guesses, 0.95) + 0.05, (shares, np.mean(guesses))

    monkeypatch.setattr(Study, "dynamics", lambda study: fp.Boomerang())
    monkeypatch.setattr(computation, "release", lambda x, g, h, *_: Release(np.array(x), g, h, 0.0))
    for seed in range(2):
        counts = np.random.default_rng(seed).multinomial(RECORDS, population())
        (tmp_path / f"exact {seed}").mkdir()
        assert agreement(counts, reconstructed(Transcript(tmp_path / f"exact {seed}", counts), exact=True)) == 1.0
