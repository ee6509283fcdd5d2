"""One core and one thread for a contestant: to be called before JAX is imported."""

from __future__ import annotations

import os


def pin_to_one_core(core: int | None, xla_flags: str) -> int | None:
    """Restrict this process to one core (default: the last allowed one) and give XLA its flags.

    Returns
    -------
    int or None
        The core; None where the operating system cannot pin a process.
    """
    os.environ["XLA_FLAGS"] = xla_flags
    os.environ["JAX_PLATFORMS"] = "cpu"
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = "1"
    if not hasattr(os, "sched_setaffinity"):
        return None
    core = max(os.sched_getaffinity(0)) if core is None else core
    os.sched_setaffinity(0, {core})
    return core
