"""A model that is written to ask about one record, and measures of what each record adds to a release of any model."""

import hashlib

import numpy as np
import pandas as pd
import pytest
from tests.federation.test_derivative_disclosure import CAREFUL, OWN, Guarded, code, derive
from tests.study.contracts import DIGEST, MODEL_FILE, with_model_file
from tests.study.test_model_contracts import TREND, trend_contract

from fedpdmc._jax.precision import double_precision
from fedpdmc.federation.derivative_plausibility import Plausible
from fedpdmc.federation.site_agent import start
from fedpdmc.federation.site_agent.derivative_disclosure import (
    ReleasePlace,
    contributing_records,
    tried_points,
)
from fedpdmc.study import parse_study, read_records
from fedpdmc.study.record_shares import largest_combined_share, largest_leverage, leverages

# Whether someone of a given age is ill moves a parameter of its own.
SNOOP = """fedpdmc model 1
title Binary regression with an effect of one age
parameter other f64[]
predictor eta f64[]
column y f64[] binary
column age f64[] real
minus_log_likelihood
%1 = sub age 1.5 : f64[]
%2 = abs %1 : f64[]
%3 = lt %2 0.04 : bool[]
%4 = convert %3 : f64[]
%5 = mul other %4 : f64[]
%6 = add eta %5 : f64[]
%7 = logaddexp %6 0.0 : f64[]
%8 = mul y %6 : f64[]
%9 = sub %7 %8 : f64[]
return %9
end
"""


class Study(Guarded):
    """A guarded study with a model file."""

    def __init__(self, path, text, contract=OWN, policy=CAREFUL):
        super().__init__(path)
        digest = hashlib.sha256(text.encode()).hexdigest()
        contract = with_model_file(contract).replace(DIGEST, digest)
        self.study = parse_study(contract.encode(), lambda name: text.encode())
        (path / "policy.toml").write_text(policy)


def test_a_release_that_singles_out_a_record_is_refused_and_an_honest_one_is_not(tmp_path, caplog, monkeypatch):
    """Of a model that was not tried before (`test_model_trial`)."""
    monkeypatch.setattr(start, "try_model_file", lambda *given: None)
    drug = OWN.replace("ill ~ drug + age", "ill ~ drug")
    folder = Study(tmp_path / "snoop", SNOOP, drug, CAREFUL.replace("least_records = 20", "least_records = 2"))
    # One person of 65 among many of other ages.
    lines = [f"{'yes' if k % 3 else 'no'},{'verum' if k % 2 else 'placebo'},{40 + k % 20},A" for k in range(99)]
    (folder.path / "north.csv").write_text("\n".join(["ill,drug,age,ward", *lines, "yes,verum,65,A"]) + "\n")
    agent = folder.agent("north", tmp_path / "store")
    assert code(derive(agent, np.zeros(3))) == "NARROW_PART"
    agent.computation.shares = None
    assert code(derive(agent, np.zeros(3))) == "FEW_RECORDS"
    assert "one record has a share of 1 in some direction" in caplog.text
    agent.log.close()
    honest = Study(tmp_path / "honest", MODEL_FILE)
    agent = honest.agent("north", tmp_path / "other")
    assert code(derive(agent, np.zeros(3))) is None
    # A second point so close to the first that only rounding is new, and one far out.
    assert code(derive(agent, [0.0, 0.0, 15.1])) in ("TOO_FAR", "NARROW_PART")
    agent.log.close()


def test_blocks_of_one_row_have_the_leverage_of_rows():
    rows = np.random.default_rng(0).normal(size=(30, 3))
    assert np.isclose(leverages(rows[:, None]).max(), largest_leverage(rows))
    # A record that is alone in a direction has all of it, by whatever basis.
    rows[0] = 0
    alone = np.concatenate([rows, np.eye(30, 1)], 1)[:, None]
    assert np.isclose(leverages(alone).max(), 1.0)


def test_the_largest_share_of_a_combination_is_found_and_rounding_hides_what_is_below_it():
    """Against a search over combinations; a record that is alone in a small one stands out of exact numbers."""
    rng = np.random.default_rng(3)
    rows, noise = rng.normal(size=(40, 2)), np.array([0.5, 0.1])
    angle = np.linspace(0, np.pi, 20001)
    c = np.stack([np.cos(angle), np.sin(angle)])
    shares = np.abs(rows @ c) / (np.abs(rows @ c).sum(0) + noise @ np.abs(c))
    assert np.isclose(largest_combined_share(rows, noise, 0.0), shares.max(), rtol=1e-3)
    alike = np.repeat(rng.normal(size=(200, 1)), 2, axis=1)
    alike[0, 1] += 0.01
    assert largest_combined_share(alike, np.zeros(2), 0.75) > 0.99
    assert largest_combined_share(alike, np.full(2, 0.1), 0.75) < 0.2


@pytest.mark.parametrize("x", [np.zeros(3), np.array([0.3, -0.8, 0.4])])
@double_precision
def test_no_record_has_more_than_the_bound_that_the_contract_gives(x, tmp_path):
    """Gradient and Hessian of each record are below what the coordinator allows for one, but not far."""
    folder = Study(tmp_path, MODEL_FILE)
    slope, curvature = Plausible(folder.study)._of_one_record(x)
    control = folder.agent("north", tmp_path / "store").computation.control
    told = control._at(ReleasePlace(x))
    assert np.all(np.abs(told.gradient) <= slope) and np.all(np.abs(told.hessian) <= curvature)
    assert np.all(np.isfinite(slope)) and np.all(np.isfinite(curvature))
    assert np.all(slope < 1000 * np.abs(told.gradient).max(0))


def test_rows_of_a_group_are_in_a_study_if_its_gradient_needs_them():
    """A line through zero: visits at zero add nothing, and nor does a patient who has no others."""
    study = parse_study(trend_contract().encode(), lambda name: TREND.encode())
    frame = pd.DataFrame({"patient": [f"p{k // 3}" for k in range(90)], "y": np.arange(90.0) % 7})
    frame["at"] = np.where(np.arange(90) < 3, 0.0, np.arange(90) % 3.0)
    adding, number = contributing_records(study, "north", frame, b"secret")
    assert adding.tolist() == [bool(at) for at in frame["at"]] and 20 < number <= 60
    # The same points for the same secret, and others for another.
    points = [tried_points(study, secret) for secret in (b"secret", b"secret", b"other")]
    assert (points[0] == points[1]).all() and not (points[0] == points[2]).any()


def test_records_far_from_the_usual_ones_are_in_a_study(tmp_path):
    """One stay of 116 days among days: no ordinary record adds less than a thousandth of the usual."""
    study = Study(tmp_path, MODEL_FILE).study
    frame = read_records(study, tmp_path / "north.csv")
    frame.loc[0, "age"] = 40.0
    adding, number = contributing_records(study, "north", frame, b"secret")
    assert adding.all() and number > 20
