"""Ctrl-C typed on a real terminal, at every kind of moment: a clean end that says what is kept and how to go on."""

import re
import sys

import pytest
from tests.console.pseudo import Terminal
from tests.federation.processes import COMMAND, free_port
from tests.federation.studies import Folder

CTRL_C = b"\x03"
UNCLEAN = ("Traceback", "Fatal Python error", "Segmentation", "Exception ignored")


def words(text):
    """What was written, without colours and movements of the cursor."""
    return re.sub(r"\s+", " ", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text))


def interrupt(terminal, sign, presses=1):
    """Press Ctrl-C when a sign has appeared; the exit status and what was said from then on."""
    assert terminal.read_until(lambda text: sign in words(text)), terminal.text
    before = len(terminal.text)
    for press in range(presses):
        if press:
            terminal.read_until(lambda text: "Interrupt" in text[before:])
        terminal.press(CTRL_C)
    status = terminal.finish()
    said = words(terminal.text[before:])
    assert not any(word in said for word in UNCLEAN), terminal.text[before:]
    return status, said


# A run that would take for ever, with little to compile, and what Python sees of its interrupt.
ENDLESS = """
import sys, warnings
from tests.support import ZIGZAG, hospitals, prior
import fedpdmc as fp

warnings.simplefilter("always")
burn_in, duration = map(float, sys.argv[1:])
try:
    post = fp.sample(hospitals(), prior(), dynamics=ZIGZAG, chains=4, seed=3, burn_in=burn_in, duration=duration)
    print("KEPT", post.duration)
except KeyboardInterrupt as stop:
    print("STOPPED", stop)
"""


def test_a_command_that_compiles_ends_at_once(tmp_path):
    env = {"FEDPDMC_COMPILATION_CACHE": "off"}
    with Terminal([*COMMAND, "demo", "--out", str(tmp_path)], env=env) as terminal:
        status, said = interrupt(terminal, "compiling")
    assert status == 130 and "Interrupted. Nothing was saved; run `fedpdmc demo` again." in said
    assert "\x1b[?25h" in terminal.text


def test_python_code_gets_an_interrupt_of_the_burn_in():
    with Terminal([sys.executable, "-c", ENDLESS, "1e7", "1"]) as terminal:
        status, said = interrupt(terminal, "rounds, about")
    assert status == 0 and "STOPPED before the first block of samples was complete: nothing is kept." in said


@pytest.mark.long
def test_python_code_keeps_whole_blocks():
    with Terminal([sys.executable, "-c", ENDLESS, "1", "1e5"]) as terminal:
        status, said = interrupt(terminal, "worst ESS")
    assert status == 0 and "Interrupted: the unfinished block is dropped" in said and "post.extend(...)" in said
    assert 0 < float(re.search(r"KEPT (\S+)", said)[1]) < 1e5


def test_parties_that_wait_for_each_other(tmp_path):
    folder = Folder(tmp_path)
    address = f"127.0.0.1:{free_port()}"
    common = ["--plain-on-loopback", "--store"]
    listening = [*COMMAND, "coordinator", "study.toml", "--listen", address, *common, "stores/coordinator"]
    dialling = [*COMMAND, "site", "study.toml", "--name", "north", "--data", "north.csv", "--policy", "policy.toml"]
    dialling += ["--coordinator", address, *common, "stores/north"]
    with Terminal(dialling, folder=folder.path) as site:
        status, said = interrupt(site, "dialling again")
        assert status == 130 and "log is in stores/north" in said and "the same command to take part again" in said
    with Terminal(listening, folder=folder.path) as coordinator:
        status, said = interrupt(coordinator, "waiting for the sites")
    # Nothing else is said to be done while no site has joined.
    assert said.rindex("waiting for the sites") > said.rfind("finding the mode")
    assert status == 130 and "The samples so far are in stores/coordinator" in said and "same command to resume" in said


@pytest.mark.long
@pytest.mark.parametrize("sign", ["checking the tails", "compiling (site", "burn-in (compiling)", "ESS", "done in"])
@pytest.mark.parametrize("presses", [1, 2])
def test_the_demonstration_at_any_moment(tmp_path, sign, presses):
    # Without what earlier runs have compiled.
    env = {"FEDPDMC_COMPILATION_CACHE": "off"}
    with Terminal([*COMMAND, "demo", "--out", str(tmp_path)], env=env) as terminal:
        status, said = interrupt(terminal, sign, presses)
    assert status == 130 and "Interrupted. Nothing was saved; run `fedpdmc demo` again." in said


@pytest.mark.long
def test_the_compiler_is_waited_for_and_a_second_ctrl_c_is_not():
    script = ENDLESS.replace("dynamics=ZIGZAG, ", "")
    env = {"FEDPDMC_COMPILATION_CACHE": "off", "XLA_FLAGS": None}
    for presses in (1, 2):
        with Terminal([sys.executable, "-c", script, "5", "50"], env=env) as terminal:
            status, said = interrupt(terminal, "burn-in (compiling)", presses)
        assert "Interrupt" in said
        assert status == (0 if presses == 1 else 130) and ("STOPPED" in said) == (presses == 1)


@pytest.mark.long
def test_a_run_that_was_interrupted_goes_on(tmp_path):
    folder = Folder(tmp_path)
    command = [*COMMAND, "run", "study.toml", "--seed", "3", "--store", "kept", "--out", "post.zarr"]
    command += [word for name in folder.study.sites for word in ("--data", f"{name}={name}.csv")]
    with Terminal(command, folder=folder.path) as terminal:
        status, said = interrupt(terminal, "rounds")
    assert status == 130 and "The samples so far are in kept. Run the same command to resume." in said
    with Terminal(command, folder=folder.path) as terminal:
        assert terminal.finish() == 0, terminal.text
    assert "Saved: post.zarr" in terminal.text
