"""The stop button of a notebook: a short word, the kernel lives on, and the next cell is none the worse for it."""

import contextlib
import os
import re
import time

import numpy as np
import pytest
from jupyter_client.manager import KernelManager
from tests.support import ZIGZAG, hospitals, prior

import fedpdmc as fp

SETUP = """
import warnings
from tests.support import ZIGZAG, hospitals, prior
import fedpdmc as fp
"""
SAMPLE = "post = fp.sample(hospitals(), prior(), {}chains=4, seed=3, burn_in={}, duration={})"
ENDLESS_BURN_IN = SAMPLE.format("dynamics=ZIGZAG, ", "1e7", "1")
ENDLESS = SAMPLE.format("dynamics=ZIGZAG, ", "1", "1e5")
SHORT = SAMPLE.format("dynamics=ZIGZAG, ", "1.0", "10.0") + "\nprint(post.mean().tobytes().hex())"
NOTHING_KEPT = "Interrupted before the first block of samples was complete: nothing is kept. The same call starts again"
SECONDS = 300


class Kernel:
    """A real kernel, as a notebook starts it."""

    def __init__(self, manager):
        self.manager, self.client = manager, manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=SECONDS)

    def run(self, code, stop_at=None, presses=1):
        """Run a cell, press the stop button once a text has been shown; what its outputs said, by their kinds."""
        number, said, end = self.client.execute(code), {"shown": "", "stderr": "", "stdout": "", "error": ""}, None
        while end != "idle":
            message = self.client.get_iopub_msg(timeout=SECONDS)
            if message["parent_header"].get("msg_id") != number:
                continue
            content, kind = message["content"], message["msg_type"]
            end = content.get("execution_state")
            if kind == "stream":
                said[content["name"]] += content["text"]
            elif kind == "error":
                said["error"] += "\n".join(content["traceback"])
            elif kind in ("display_data", "update_display_data"):
                said["shown"] = content["data"]["text/plain"]
                if stop_at is not None and stop_at in said["shown"]:
                    stop_at = None
                    for _ in range(presses):
                        self.manager.interrupt_kernel()
                        time.sleep(0.1)
        assert stop_at is None, said
        return said


@contextlib.contextmanager
def kernel(**env):
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(env=os.environ | env)
    running = Kernel(manager)
    try:
        assert not running.run(SETUP)["error"]
        yield running
    finally:
        running.client.stop_channels()
        manager.shutdown_kernel(now=True)


def undisturbed():
    """The bits that the short run has where nothing was ever interrupted."""
    post = fp.sample(
        hospitals(), prior(), dynamics=ZIGZAG, chains=4, seed=3, burn_in=1.0, duration=10.0, progress=False
    )
    return np.asarray(post.mean()).tobytes().hex()


# What the kernel's own libraries deprecate among themselves, and that the short run has not converged.
@pytest.mark.filterwarnings("ignore")
def test_a_cell_is_stopped_at_any_moment_and_the_next_one_works():
    with kernel() as one:
        for moment in ("burn-in (compiling)", "rounds, about"):
            said = one.run(ENDLESS_BURN_IN, moment)
            assert said["error"].startswith(NOTHING_KEPT) and "\n" not in said["error"]
            assert said["shown"].startswith("stopped: burn-in")
        said = one.run(ENDLESS + "\nprint('KEPT', post.duration)", "worst ESS")
        assert not said["error"] and 0 < float(re.search(r"KEPT (\S+)", said["stdout"])[1]) < 1e5
        assert "the unfinished block is dropped" in said["stderr"] and "post.extend(...)" in said["stderr"]
        said = one.run("post.extend(duration=1e7)", "rounds, about")
        assert said["error"].startswith("Interrupted before another block of samples was complete.")
        said = one.run(SHORT)
        assert not said["error"] and said["stdout"].strip() == undisturbed()


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("presses", [1, 2, 5])
@pytest.mark.parametrize("moment", ["finding the mode", "compiling (site", "burn-in (compiling)"])
def test_the_compiler_is_waited_for_and_that_is_said_while_it_works(moment, presses):
    """The default method, whose compilation takes seconds."""
    long = SAMPLE.format("", "1e7", "1")
    short = SAMPLE.format("", "5.0", "50.0") + "\nprint(post.mean().tobytes().hex())"
    with kernel(FEDPDMC_COMPILATION_CACHE="off", XLA_FLAGS="") as one:
        said = one.run(long, moment, presses)
        assert said["error"].startswith(NOTHING_KEPT)
        if moment == "burn-in (compiling)":
            assert "Interrupt received: the compiler cannot be interrupted." in said["stderr"]
            assert said["stderr"].count("Interrupt received") == 1
        first, second = one.run(short), one.run(short)
        assert not first["error"] and len(first["stdout"]) > 10 and first["stdout"] == second["stdout"]
