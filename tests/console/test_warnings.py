"""Warnings of other packages that do not reach the user."""

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
from fedpdmc.console.warnings import import_arviz
import_arviz() if sys.argv[1] == "quiet" else __import__("arviz")
"""


def errors(how, cache):
    """Standard error of both scripts in a process of their own, whose user has this cache folder."""
    # What an earlier run has compiled would be compiled without an alarm; ArviZ keeps a stamp of the day.
    env = {**os.environ, "FEDPDMC_COMPILATION_CACHE": "off", "XDG_CACHE_HOME": str(cache)}
    done = subprocess.run(
        [sys.executable, "-c", ALARM + ARVIZ, how], env=env, capture_output=True, text=True, check=True
    )
    return done.stderr


def test_warnings_of_the_compiler_and_of_arviz_do_not_reach_the_user(tmp_path):
    loud = errors("loud", tmp_path / "loud")
    assert "Constant folding" in loud and "ArviZ is undergoing" in loud
    assert errors("quiet", tmp_path / "quiet") == ""
