"""Cyclic garbage is not collected while programs are traced and compiled."""

from __future__ import annotations

import contextlib
import gc
import threading


class Uncollected(contextlib.ContextDecorator):
    """A context, or a decorator, in which Python does not look for cyclic garbage.

    Tracing makes hundreds of thousands of objects that remain in use. They set off collections that walk over everything
    that was ever imported and find nothing: a tenth of the time until the first round. For work of seconds, not for loops.
    Contexts may be nested, in any threads: the last to end restores what the first found.
    """

    _lock = threading.Lock()
    _open = 0
    _before = False

    def __enter__(self) -> None:
        """Stop collecting."""
        with Uncollected._lock:
            if not Uncollected._open:
                Uncollected._before = gc.isenabled()
                gc.disable()
            Uncollected._open += 1

    def __exit__(self, *_: object) -> None:
        """Collect again, if that was so before."""
        with Uncollected._lock:
            Uncollected._open -= 1
            if not Uncollected._open and Uncollected._before:
                gc.enable()
