import subprocess
import sys
from pathlib import Path

import pytest

import paper
from paper.__main__ import run
from paper.result_folder import Verdict

ROOT = Path(__file__).parents[2]


def test_help_names_the_experiments_and_imports_nothing_heavy():
    code = """
import sys
from paper.__main__ import run
try:
    run(["--help"])
finally:
    print("HEAVY", *sorted({"jax", "numpy", "matplotlib", "arviz"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    *text, heavy = done.stdout.strip().splitlines()
    assert heavy == "HEAVY"
    assert all(word in "\n".join(text) for word in ("--quick", "--out", *paper.NAMES))


def test_an_unknown_experiment_is_refused_with_the_names(capsys):
    with pytest.raises(SystemExit) as caught:
        run(["gauss"])
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert "'gauss'" in said and all(name in said for name in paper.NAMES)


@pytest.mark.parametrize("holds, status", [(True, 0), (False, 1)])
def test_every_verdict_is_printed_and_the_command_fails_if_one_does_not_hold(
    holds, status, tmp_path, monkeypatch, capsys
):
    def verdicts(name, out, quick):
        assert (name, out, quick) == ("all", tmp_path, True)
        yield Verdict("gaussian", holds, "as measured")
        yield Verdict("cox", True, "as it should be")

    monkeypatch.setattr(paper, "reproduce", verdicts)
    assert run(["all", "--quick", "--out", str(tmp_path)]) == status
    said = capsys.readouterr().out
    assert f"gaussian: {'holds' if holds else 'DOES NOT HOLD'}: as measured" in said
    assert "cox: holds: as it should be" in said and f"in {tmp_path}" in said.replace("\n  ", " ")


def test_a_missing_extra_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("paper.__main__.find_spec", lambda name: None)
    assert run(["gaussian", "--out", str(tmp_path / "out")]) == 2
    assert "[reference]" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_modules_need_no_extra():
    code = "import sys; sys.modules['blackjax'] = None; import paper.redistribution, paper.cox, paper.dynamics"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
