"""Everything that a user starts, on a real terminal."""

import re
import sys
from pathlib import Path

import pyte
import pytest
from tests.console.pseudo import Terminal
from tests.federation.processes import COMMAND, free_port
from tests.federation.studies import Folder

README = Path(__file__).parents[2] / "README.md"
SAMPLE = """
from tests.support import ZIGZAG, hospitals, prior
import fedpdmc as fp

post = fp.sample(hospitals(), prior(), dynamics=ZIGZAG, reference="laplace", chains=4, ess=30, seed=3)
post = post.extend(duration=5.0)
print("rounds:", post.rounds)
"""
CONDITIONS = {
    "80": (80, {}),
    "200": (200, {}),
    "dumb": (80, {"TERM": "dumb"}),
    "NO_COLOR": (80, {"NO_COLOR": "1"}),
    "FORCE_COLOR": (80, {"FORCE_COLOR": "1"}),
}
conditions = pytest.mark.parametrize("condition", CONDITIONS)
NOISE = ("Traceback", "FutureWarning", "slow_operation_alarm", "pjrt_client", "Exception ignored")


def clean(terminal):
    """What is left on a screen as wide as the terminal; nothing on the way was an error."""
    assert not any(word in terminal.text for word in NOISE), terminal.text
    screen = pyte.Screen(terminal.columns, 200)
    pyte.Stream(screen).feed(terminal.text)
    assert not screen.cursor.hidden
    return [line.rstrip() for line in screen.display if line.strip()]


def test_sample_and_extend_in_a_window_that_shrinks():
    with Terminal([sys.executable, "-c", SAMPLE], columns=120) as terminal:
        terminal.read_until(lambda text: "finding the mode" in text)
        terminal.resize(80)
        assert terminal.finish() == 0, terminal.text
    assert any(re.match(r"rounds: \d+$", line) for line in clean(terminal))
    assert terminal.text.count("done in") == 2


@pytest.mark.long
@conditions
def test_the_demonstration(condition, tmp_path):
    columns, env = CONDITIONS[condition]
    with Terminal([*COMMAND, "demo", "--out", str(tmp_path)], columns, env=env) as terminal:
        assert terminal.finish(900) == 0, terminal.text
    assert any("The two agree" in line for line in clean(terminal))
    assert ("\x1b" in terminal.text) == (condition != "dumb")


@pytest.mark.long
def test_the_example_of_the_readme(tmp_path):
    example = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.S)[0]
    with Terminal([sys.executable, "-c", example], folder=tmp_path) as terminal:
        assert terminal.finish(900) == 0, terminal.text
    assert any(line.startswith("done in") for line in clean(terminal))


@pytest.mark.long
@conditions
def test_a_study_in_one_process_and_on_a_network(condition, tmp_path):
    columns, env = CONDITIONS[condition]
    folder, address = Folder(tmp_path), f"127.0.0.1:{free_port()}"
    names, common = folder.study.sites, ["--plain-on-loopback", "--seed", "3", "--store"]
    run = [*COMMAND, "run", "study.toml", *(word for name in names for word in ("--data", f"{name}={name}.csv"))]
    with Terminal(run, columns, env=env, folder=tmp_path) as terminal:
        assert terminal.finish(600) == 0, terminal.text
    assert clean(terminal)[-1].startswith("The posterior was not saved")
    listening = [*COMMAND, "coordinator", "study.toml", "--listen", address, *common, "kept"]
    with Terminal(listening, columns, env=env, folder=tmp_path) as coordinator:
        coordinator.read_until(lambda text: "listening on" in text)
        sites = []
        for name in names:
            dialling = [*COMMAND, "site", "study.toml", "--name", name, "--data", f"{name}.csv", "--policy"]
            dialling += ["policy.toml", "--coordinator", address, *common, f"kept-{name}"]
            sites.append(Terminal(dialling, columns, env=env, folder=tmp_path).__enter__())
        assert coordinator.finish(600) == 0, coordinator.text
        for site in sites:
            assert site.finish(600) == 0, site.text
            assert "The run has ended" in "\n".join(clean(site))
            site.__exit__()
    assert clean(coordinator)[-1].startswith("Saved: kept/posterior.zarr")
