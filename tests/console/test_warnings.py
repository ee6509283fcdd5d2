"""What other packages would tell a user, and what does not reach him."""

import os
import subprocess
import sys

# Folding this maximum takes XLA seconds: it sounds the alarm that it also sounds over a slow compilation.
ALARM = """
import contextlib, sys
from fedpdmc.console.warnings import quiet_compiler
import jax, jax.numpy as jnp, numpy as np

def slow():
    return jax.lax.reduce_window(jnp.asarray(np.ones((50, 50))), -jnp.inf, jax.lax.max, (41, 41), (1, 1), "SAME")

jax.block_until_ready(jnp.ones(3))
with quiet_compiler() if sys.argv[1] == "quiet" else contextlib.nullcontext():
    jax.block_until_ready(jax.jit(slow)())
jax.block_until_ready(jnp.ones(4))
"""
ARVIZ = """
import sys
from fedpdmc.console.warnings import import_arviz
import_arviz() if sys.argv[1] == "quiet" else __import__("arviz")
"""


def errors(script, how, **env):
    """Standard error of a script in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", script, how], env={**os.environ, **env}, capture_output=True, text=True, check=True
    )
    return done.stderr


def test_the_alarm_of_the_compiler_does_not_reach_the_user():
    # What an earlier run has compiled would be compiled without an alarm.
    anew = {"FEDPDMC_COMPILATION_CACHE": "off"}
    assert "Constant folding" in errors(ALARM, "loud", **anew)
    assert errors(ALARM, "quiet", **anew) == ""


def test_the_daily_word_of_arviz_does_not_reach_the_user(tmp_path):
    # Its stamp of the day is in the user's cache.
    assert "ArviZ is undergoing" in errors(ARVIZ, "loud", XDG_CACHE_HOME=str(tmp_path / "loud"))
    assert errors(ARVIZ, "quiet", XDG_CACHE_HOME=str(tmp_path / "quiet")) == ""
