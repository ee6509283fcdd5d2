import pytest
from typer.testing import CliRunner

from fedpdmc.cli import app
from fedpdmc.privacy.accountant import Sensitivity, one_arrival_delta, one_arrival_excess, run_cap
from fedpdmc.privacy.budget_planning import usual_sensitivity
from fedpdmc.privacy.ledger import Account, Ledger, LedgerRequest, Reply


def run(*arguments, code=0):
    done = CliRunner().invoke(app, [str(a) for a in arguments])
    assert done.exit_code == code, done.output
    return done.output


def test_theorem_both_ways():
    assert f"{one_arrival_delta(1, 0.1, 2):.6g}" in run(
        "privacy", "arrival", "--epsilon", 1, "--sensitivity", 0.1, "--excess", 2
    )
    said = run("privacy", "arrival", "--epsilon", 1, "--sensitivity", 0.1, "--delta", 1e-5)
    assert f"{one_arrival_excess(1, 1e-5, 0.1):.6g}" in said and "ONE switch" in said
    run("privacy", "arrival", "--epsilon", 1, "--sensitivity", 0.1, code=2)


def test_censored_arrivals_both_ways():
    options = ("privacy", "horizon", "--epsilon", 1, "--k-inf", 0.2, "--k-1", 0.5)
    assert "horizon <= " in run(*options, "--excess", 2)
    assert "excess rate >= " in run(*options, "--horizon", 1.0)
    assert run(*options, "--horizon", 3.0).startswith("None")
    assert run(*options, "--excess", 0.01).startswith("None")


def test_whole_runs_both_ways():
    cap = run_cap(Sensitivity(0.02, 0.02, 0.02), 0.5, 1.0, 1e-6)
    options = ("privacy", "run", "--k-2", 0.02, "--excess", 0.5, "--delta", 1e-6)
    assert f"{cap:.6g}" in run(*options, "--epsilon", 1)
    assert "epsilon = 1 at" in run(*options, "--observed", cap)


def test_the_planner_answers_and_says_when_nothing_is_possible(tmp_path):
    options = ("privacy", "plan", "--sites", 5, "--dim", 6, "--epsilon", 1, "--delta", 1e-6)
    picture = tmp_path / "frontier.png"
    said = run(*options, "--records", 10**6, "--ess", 20, "--plot", picture)
    assert (
        said.startswith("Recommended") and "Possible" in said and "effective" in said and picture.stat().st_size > 1000
    )
    assert "at most" in " ".join(run(*options, "--records", 10**5, "--ess", 10**4).split())
    assert "not even one effective sample" in " ".join(run(*options, "--records", 500).split())


def test_a_ledger_is_shown_with_its_running_total(tmp_path, monkeypatch, caplog):
    path = tmp_path / "ledger.db"
    assert str(path) in run("ledger", "create", path)
    run("ledger", "create", path, code=2)
    assert "created once" in caplog.text
    ledger = Ledger.open(path)
    ledger.account(Account("patients", 1.0, 1e-6, "replace", 28.0, 0.5))
    for number in range(3):
        ledger.answer(
            LedgerRequest("patients", "trial", "r", "round", number, b"p"), 0.1, lambda key: Reply(b"", 2.0, 0.1)
        )
    # While a run goes on, too.
    said = run("ledger", "show", path)
    assert "60 % spent of epsilon = 1 at delta = 1e-06" in said and "3 rounds, 0 releases" in said
    figures = [float(line.split()[-1]) for line in said.splitlines() if "trial" in line]
    assert figures == sorted(figures) and figures[-1] == pytest.approx(0.3 + 13.8155 / 27, rel=1e-3)
    monkeypatch.setenv("FEDPDMC_LEDGER", str(path))
    assert run("ledger", "show", "--dataset", "patients") == said
    run("ledger", "show", path, "--dataset", "others", code=2)
    assert "The ledger has 'patients'" in caplog.text
    ledger.close()
    path.write_bytes(b"")
    run("ledger", "show", path, code=2)


def test_the_usual_sensitivity_falls_with_the_records():
    assert usual_sensitivity(40000, 1, 6) == pytest.approx(usual_sensitivity(10000, 1, 6) / 2)
