"""Warnings of this package at the user's own line, and suppression of irrelevant warnings of other packages."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import jax  # noqa: F401  # It sets jaxlib's log level, which is read when jaxlib is loaded: import it first.
from jaxlib import utils  # pyright: ignore[reportAttributeAccessIssue]

ALL = 0  # log level of absl, which XLA uses
FATAL = 3  # log level of fatal errors only: other errors are also raised in Python

_lock, _depth = threading.Lock(), 0


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line of the user's program that called this package."""
    frame, level = sys._getframe(), 1
    # The outermost function of this package may be decorated by a context manager.
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in ("fedpdmc", "contextlib"):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def import_arviz() -> Any:
    """Import ArviZ without its warning about its own refactoring."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"\s*ArviZ is undergoing a major refactor", FutureWarning)
        import arviz

    return arviz


def has_inference_data(arviz: Any) -> bool:
    """Whether this is ArviZ below 1, with ``InferenceData`` where later ones have the ``DataTree`` of xarray."""
    return arviz.__version__.startswith("0.")


@contextlib.contextmanager
def quiet_compiler() -> Iterator[None]:
    """Keep XLA from writing "Very slow compile?" to standard error, unless ``TF_CPP_MIN_LOG_LEVEL=0``.

    Errors of the compiler are still raised.
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
