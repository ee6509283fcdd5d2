"""Sentences are broken to fit where they are read: a terminal of any width, or 80 columns."""

import re
import subprocess
import sys

import pytest
from tests.console.pseudo import Terminal

from fedpdmc.console.wrapping import wrapped

CALL, PATH = "post.extend(duration=130)", "/srv/" + "study/" * 20 + "posterior.zarr"
VERDICT = (
    "NOT converged: R-hat 1.31 of slope (a perfect sampler: 1.02); the chains drift: slope moves by 0.4 sd from the first "
    f"fifth to the second half. To do: continue: {CALL}."
)
NOTE = "event bounds: certified (every event time is exact; this says nothing about convergence)"
REPORT = "data: found 2 faults at 2 of 2 sites. Correct them:\n" + "\n".join(
    f"    line {k}, column 'age': a value out of bounds ('10'). The declared bounds are 18 to 100." for k in (2, 3)
)
SCRIPT = f"""
from fedpdmc.cli import runner
from fedpdmc.errors import FedPDMCError
from fedpdmc.results.summary import Summary

row = dict(mean=0.123, sd=0.456, mcse=0.01, median=0.1, low=-1.0, high=1.0, ess=400.0, rhat=1.3)
table = Summary([row], index=["slope"])
table.verdict, table.notes = {VERDICT!r}, [{NOTE!r}]
print(table)
runner.say({f"Saved: {PATH} (read it with fedpdmc.load)."!r})

def refused():
    raise FedPDMCError({REPORT!r})

raise SystemExit(runner.exit_status(refused))
"""


def test_lines_that_fit_stay_and_words_are_never_broken():
    table = "a     b\n1     2"
    assert wrapped(table, 80) == table
    lines = wrapped(f"Saved: {PATH} (read it with fedpdmc.load).", 80).split("\n")
    assert lines == ["Saved:", f"  {PATH}", "  (read it with fedpdmc.load)."]
    assert wrapped("    " + "word " * 20, 40).split("\n")[1].startswith("      word")


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_what_is_printed_fits_a_terminal(columns):
    with Terminal([sys.executable, "-c", SCRIPT], columns=columns) as terminal:
        assert terminal.finish() == 2, terminal.text
    lines = terminal.text.replace("\r", "").split("\n")
    assert max(len(line) for line in lines if PATH not in line) < columns
    # A call and a path can be copied, and a line that goes on is indented.
    assert any(CALL in line for line in lines) and any(PATH in line for line in lines)
    assert re.search(r"^To do: continue:", terminal.text, flags=re.M)
    assert ("\n  convergence)" in "\n".join(lines)) == (columns == 80)
    assert re.search(r"^\d\d:\d\d:\d\d data: found 2 faults", terminal.text, flags=re.M)
    assert re.search(r"^    line 3, column 'age'", terminal.text, flags=re.M)


def test_without_a_terminal_it_is_80_columns_and_a_log_has_whole_lines():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and max(len(line) for line in done.stdout.split("\n") if PATH not in line) < 80
    assert REPORT in done.stderr
