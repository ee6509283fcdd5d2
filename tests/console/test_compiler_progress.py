"""What is said while XLA compiles: how long one program takes, and whether the next run will find it."""

import subprocess
import sys

# The compiler's own events, with a cache that keeps the smallest programs; looked at while a program is being compiled.
SCRIPT = """
import sys
import jax, jax.numpy as jnp
from fedpdmc.console import progress
from fedpdmc.console import progress

if sys.argv[1] != "off":
    jax.config.update("jax_compilation_cache_dir", sys.argv[1])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
progress.REPORTED_AFTER = 0.0
x = jnp.arange(3.0)

with progress.showing(False) as this:
    def look(event, seconds, **_):
        if event == progress.LOWERED:
            print("meanwhile:", "; ".join(this.view().facts))

    jax.monitoring.register_event_duration_secs_listener(look)
    for _ in range(2):
        jax.clear_caches()
        jax.jit(lambda x: jnp.sin(x) + 1)(x)
        print("then:", "; ".join(this.view().facts))
jax.clear_caches()
jax.jit(jnp.cos)(x)
print("read:", this.compilations.read)
"""


def said(*words):
    done = subprocess.run([sys.executable, "-c", SCRIPT, *words], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_a_program_that_is_new_and_one_that_is_in_the_cache(tmp_path):
    lines = said(str(tmp_path))
    assert lines[0] == "meanwhile: 0:00 in this phase; one program: 0 s so far, kept for the next run"
    assert lines[1] == "then: 0:00 in this phase"
    assert "then: 0:00 in this phase; 1 compiled before, read from the cache" in lines
    # What others compile later is not counted.
    assert lines[-1] == "read: 1"


def test_without_a_cache_nothing_is_promised():
    lines = said("off")
    assert lines[0] == "meanwhile: 0:00 in this phase; one program: 0 s so far, the compilation cache is off"
    assert lines[-1] == "read: 0" and "then: 0:00 in this phase" in lines
