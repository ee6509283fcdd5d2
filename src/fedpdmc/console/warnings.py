"""Warnings: this package's at the user's own line, and none of other packages that say nothing to a user of this one."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import jax  # noqa: F401  # It sets how much jaxlib logs, which is read when that is loaded: it comes first.
from jaxlib import utils  # pyright: ignore[reportAttributeAccessIssue]

# Severities of absl, in which XLA logs: all, and those that end the process. Errors are raised in Python besides.
ALL, FATAL = 0, 3

_lock, _depth = threading.Lock(), 0


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line of the user's program that called this package."""
    frame, level = sys._getframe(), 1
    # The outermost function of this package may be wrapped by a context manager that serves as its decorator.
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in ("fedpdmc", "contextlib"):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def import_arviz() -> Any:
    """ArviZ, without its daily word on its own future."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"\s*ArviZ is undergoing a major refactor", FutureWarning)
        import arviz

    return arviz


@contextlib.contextmanager
def quiet_compiler() -> Iterator[None]:
    """Keep XLA from writing "Very slow compile?" to standard error; with ``TF_CPP_MIN_LOG_LEVEL=0`` one sees it all.

    Only what is printed changes: an error of the compiler is raised as ever.
    """
    global _depth
    if os.environ.get("TF_CPP_MIN_LOG_LEVEL") == "0":
        yield
        return
    with _lock:
        _depth += 1
        utils.absl_set_stderr_threshold(FATAL)
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if not _depth:
                utils.absl_set_stderr_threshold(ALL)
