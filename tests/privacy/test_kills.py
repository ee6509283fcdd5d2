import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("kills.py")


def killed(folder, kills, kind, seed=1):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder), str(kills), str(seed), kind], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    facts, heavy = done.stdout.splitlines()
    words = facts.split()
    return dict(zip(words[::2], words[1::2], strict=True)), heavy.split()[1:]


@pytest.mark.parametrize("kills", [220, pytest.param(3000, marks=pytest.mark.long)])
def test_no_reply_that_was_sent_is_missing_from_the_ledger(tmp_path, kills):
    found, heavy = killed(tmp_path, kills, "honest")
    assert heavy == []
    assert int(found["died"]) == kills
    # Kills fell before, within and after replies.
    assert int(found["sent"]) > 20 and int(found["charged"]) > 10
    assert found["lost"] == "0" and found["other"] == "0" and found["exact"] == "True"


def test_a_ledger_that_replies_before_it_charges_is_caught(tmp_path):
    found, _ = killed(tmp_path, 150, "early")
    assert int(found["lost"]) + int(found["other"]) > 0
