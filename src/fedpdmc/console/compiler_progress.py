"""Progress of JAX's compiler: the time of the current program, and programs read from the compilation cache."""

from __future__ import annotations

import time
from typing import Any

import jax
from jax import monitoring

# JAX's event names: a program is ready to be compiled; it was in the cache; it has been compiled or read.
LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"
READ = "/jax/compilation_cache/cache_hits"
COMPILED = "/jax/core/compile/backend_compile_duration"
# Seconds after which a program is reported: it is then not in the cache.
REPORTED_AFTER = 2.0


class Compilations:
    """A context manager that follows JAX's compiler."""

    def __init__(self):
        self.read = 0
        self._since: float | None = None

    def __enter__(self) -> Compilations:
        monitoring.register_event_listener(self._event)
        monitoring.register_event_duration_secs_listener(self._duration)
        return self

    def __exit__(self, *_: object) -> None:
        monitoring.unregister_event_listener(self._event)
        monitoring.unregister_event_duration_listener(self._duration)

    def _event(self, event: str, **_: Any) -> None:
        if event == READ:
            self.read += 1

    def _duration(self, event: str, duration_secs: float, **_: Any) -> None:
        if event == LOWERED:
            self._since = time.monotonic()
        elif event == COMPILED:
            self._since = None

    def facts(self) -> list[str]:
        """Short texts, by importance."""
        since, facts = self._since, []
        seconds = -1.0 if since is None else time.monotonic() - since
        if seconds >= REPORTED_AFTER:
            cached = jax.config.values["jax_compilation_cache_dir"] is not None
            then = "kept for the next run" if cached else "the compilation cache is off"
            facts.append(f"one program: {seconds:.0f} s so far, {then}")
        elif self.read:
            facts.append(f"{self.read:,} compiled before, read from the cache")
        return facts
