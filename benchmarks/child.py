"""A contestant in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def report(
    module: str, words: Sequence[str], limit: float, settings: dict[str, str], cores: Sequence[int] | None = None
) -> dict:
    """What ``python -m benchmarks.MODULE WORDS`` prints last, as JSON; ``{"error": ...}`` if it fails or takes too long.

    Parameters
    ----------
    module : str
    words : sequence of str
    limit : float
        Seconds.
    settings : dict
        Added to the environment; on the CPU in any case.
    cores : sequence of int, optional
        The processor cores that it may use.
    """
    command = [sys.executable, "-m", f"benchmarks.{module}", *words]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"} | settings
    if cores is not None:
        command = ["taskset", "--cpu-list", ",".join(map(str, cores)), *command]
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return {"error": f"not complete after {limit:g} s"}
    try:
        return json.loads(done.stdout.splitlines()[-1])
    except (IndexError, json.JSONDecodeError):
        return {"error": done.stderr[-2000:]}
