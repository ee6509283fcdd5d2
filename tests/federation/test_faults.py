"""Parties killed with SIGKILL: the run goes on from where it was, to the same bits."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.federation.processes import Parties
from tests.federation.studies import FEW_ROUNDS, SEED, SITE_SEED, ZIGZAG, Folder, same_bits
from tests.study.contracts import with_model_file

import fedpdmc as fp

pytestmark = pytest.mark.filterwarnings("ignore:This will take")
# Several blocks, each as long as the ESS so far suggests: what comes next depends on what was kept.
LONGER = (
    ZIGZAG.replace("duration = 6.0", "ess = 60")
    .replace("rounds = 2000", "rounds = 1000000")
    .replace("observed_time = 1000.0", "observed_time = 1e5")
)


# The default dynamics: sites make the plans from turns.
TURNS = (
    FEW_ROUNDS.replace("duration = 6.0", "ess = 400")
    .replace("rounds = 2000", "rounds = 1000000")
    .replace("observed_time = 1000.0", "observed_time = 1e5")
)


@pytest.fixture(
    params=[
        pytest.param(LONGER, id="family"),
        pytest.param(TURNS, id="turns"),
        pytest.param(with_model_file(LONGER.replace("ess = 60", "ess = 40")), id="file", marks=pytest.mark.long),
    ]
)
def folder(tmp_path, request):
    return Folder(tmp_path, request.param)


@pytest.fixture
def parties(folder):
    parties = Parties(folder, (SEED, SITE_SEED))
    yield parties
    parties.stop()


def resumes(folder, parties, kills):
    """Kill parties when the log of north has grown to a share of what it will be; compare with an undisturbed run."""
    expected = folder.in_process()
    parties.start_all()
    for share, name in kills:
        parties.wait_for(lambda share=share: parties.logged("north") > share * 560 * expected.rounds)
        parties.kill(name)
        parties.start(name)
    parties.finish()
    post = fp.load(parties.store("coordinator") / "posterior.zarr")
    assert same_bits(post, expected)
    assert post.rounds == expected.rounds
    np.testing.assert_array_equal(post.events, expected.events)


def test_killed_parties_resume_to_the_same_bits(folder, parties):
    resumes(folder, parties, [(0.3, "north"), (0.6, "coordinator")])
    assert "is lost; the run waits for it" in (folder.path / "coordinator.log").read_text()
    assert "dialling again" in (folder.path / "north.log").read_text()


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_killed_at_any_moment(folder, parties, seed):
    rng = np.random.default_rng(seed)
    names = rng.choice(["coordinator", "north", "south"], 8)
    resumes(folder, parties, list(zip(np.sort(rng.random(8)) * 0.95, names, strict=True)))


@pytest.mark.long
@pytest.mark.parametrize("private", [[], ["--private"]], ids=["plain", "private"])
def test_random_kills_and_failing_disks(private, tmp_path):
    """Needs a C compiler, for the library with which the disk fails."""
    script = [sys.executable, "-W", "ignore", "-m", "tests.federation.kill_soak", str(tmp_path / "soak"), "40", "7"]
    done = subprocess.run(
        [*script, *private], capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=1200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    facts = json.loads(done.stdout.splitlines()[-1])
    assert sum(facts["faults"].values()) >= 40 and facts["studies"] > 0
