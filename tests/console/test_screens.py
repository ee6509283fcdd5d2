"""The progress display on real terminals of every kind, with ticks made up so that nothing is compiled."""

import re
import subprocess
import sys

import pyte
import pytest
from tests.console.pseudo import Terminal

from fedpdmc.console import progress

# Every condition in one process: Rich reads these variables when a display is opened.
SCRIPT = '''
import fcntl, os, signal, struct, sys, termios, time
from fedpdmc.console import progress
from fedpdmc.console import progress
from fedpdmc.console.progress import Tick

progress.FIRST_LINE = 0.05
CONDITIONS = {
    "plain80": (80, {}), "plain200": (200, {}), "dumb": (80, {"TERM": "dumb"}), "nocolor": (80, {"NO_COLOR": "1"}),
    "forced": (80, {"FORCE_COLOR": "1"}), "narrow": (30, {}), "resized": (200, {}),
}

def resize(columns):
    if os.isatty(2):
        fcntl.ioctl(2, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        os.kill(os.getpid(), signal.SIGWINCH)

looks, view = [0], progress.Display.view

def counted(self):
    found = view(self)
    looks[0] += 1
    return found

progress.Display.view = counted

def seen(this, seconds):
    """Time for a reader to see it: on a screen that is drawn by itself, however slow, until it has been."""
    before, end = looks[0], time.monotonic() + (60.0 if this.screen.lively else 0.0)
    time.sleep(seconds)
    while looks[0] == before and time.monotonic() < end:
        time.sleep(0.01)

def show(name):
    with progress.showing(True, lambda: "north 1.2 ms, south away for 3 s") as this:
        progress.report("compiling", 3, 18)
        seen(this, 0.15)
        with progress.showing(True, phase="burn-in") as display:
            seen(this, 0.15)
            display.aim(0.0)
            for k in range(3):
                display.tick(Tick(-5.0, -5.0 + 2 * k, 0.0, 100 * k, 4 * k, 0.1))
                time.sleep(0.05)
        with progress.showing(True, phase="sampling") as display:
            display.aim(20.0, 1000.0)
            for k in range(1, 8):
                display.tick(Tick(0.0, 2.0 * k, 10.0, 1000 * k, 8 + 4 * k, 0.1))
                if k == 4:
                    display.quality(123.0, 1.0312)
                    seen(this, 0.0)
                    if name == "resized":
                        resize(60)
                time.sleep(0.05)
            if name not in ("narrow", "resized"):
                display.tick(Tick(0.0, 20.0, 20.0, 9000, 36, 0.1))
                seen(this, 0.15)

for name in sys.argv[1:] or CONDITIONS:
    columns, variables = CONDITIONS[name]
    before = dict(os.environ)
    os.environ.update(variables)
    resize(columns)
    sys.stdout.write(f"<{name}>\\r\\n"); sys.stdout.flush()
    show(name)
    sys.stdout.write(f"</{name}>\\r\\n"); sys.stdout.flush()
    os.environ.clear(); os.environ.update(before)
'''
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def sections(text):
    """What was written under each condition."""
    return {name: body for name, body in re.findall(r"<(\w+)>\r*\n(.*?)</\1>", text, flags=re.S)}


def lines(text):
    """Every line that was drawn, without colours and movements of the cursor."""
    return [line for line in re.split(r"[\r\n]+", CONTROL.sub("", text)) if line.strip()]


@pytest.fixture(scope="module")
def shown():
    with Terminal([sys.executable, "-c", SCRIPT]) as terminal:
        assert terminal.finish() == 0, terminal.text
    assert "Traceback" not in terminal.text
    return sections(terminal.text)


@pytest.mark.parametrize("name", ["plain80", "plain200", "nocolor", "forced"])
def test_a_terminal_shows_phase_estimates_and_quality_within_its_width(shown, name):
    text, width = shown[name], 200 if name == "plain200" else 80
    drawn = lines(text)
    assert max(map(len, drawn)) <= width
    for words in (
        "compiling (site 3 of 18)",
        "0:00 in this phase",
        "burn-in (compiling)",
        "sampling",
        "left",
        "worst ESS 123 of 1,000",
        "R-hat 1.031",
        "measuring the ESS",
    ):
        assert any(words in line for line in drawn), words
    assert any(re.search(r"\d+ rounds, about \d+ left", line) for line in drawn)
    assert any(re.search(r"R-hat.*process time \d+ of 20", line) for line in drawn) == (width == 200)
    assert any(re.match(r"done in 0:\d\d: 36 rounds, worst ESS 123$", line) for line in drawn)
    assert bool(re.search(r"\x1b\[[0-9;]*3[0-9]", text)) == (name != "nocolor")


def test_after_the_end_one_line_is_left_on_the_screen(shown):
    screen = pyte.Screen(80, 24)
    pyte.Stream(screen).feed(shown["plain80"])
    assert [line.split(":")[0] for line in map(str.rstrip, screen.display) if line] == ["done in 0"]
    assert not screen.cursor.hidden


def test_a_narrow_window_and_one_that_shrinks(shown):
    drawn = lines(shown["narrow"])
    assert max(map(len, drawn)) <= 38 and any("sampling" in line for line in drawn)
    drawn = lines(shown["resized"])
    assert max(map(len, drawn[:9])) > 60
    assert max(map(len, drawn[-4:])) <= 60 and any("sampling" in line for line in drawn[-4:])


def test_a_dumb_terminal_gets_whole_lines(shown):
    assert "\x1b" not in shown["dumb"]
    said = lines(shown["dumb"])
    assert said[0].startswith("fedpdmc: compiling (site 3 of 18), 0:00; 0:00 in this phase") and said[-1].startswith(
        "fedpdmc: done in"
    )


def test_a_pipe_gets_whole_lines_whatever_its_colours_or_none():
    words = [sys.executable, "-c", SCRIPT, "plain80", "forced"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert "\x1b" not in done.stderr
    assert "fedpdmc: compiling (site 3 of 18)" in done.stderr and "about" in done.stderr
    words[2] = SCRIPT.replace("showing(True", "showing(False")
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stderr == ""


def test_first_draws_are_not_called_burn_in():
    """They are made together with it, from process time zero on."""
    with progress.showing(False) as this:
        this.begin("burn-in")
        for time, phase in ((-3.0, "burn-in"), (2.0, "sampling")):
            this.tick(progress.Tick(-5.0, time, 20.0, 1, 1, 0.1))
            assert this.view().phase == phase
