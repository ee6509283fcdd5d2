"""Compiled programs on disk: found again with the same bits, and never taken from a folder that others can write."""

import json
import os
import subprocess
import sys

RUN = """
import json
import jax, jax.monitoring
hits = []
jax.monitoring.register_event_listener(lambda name, **_: hits.append(name) if name.endswith("/cache_hits") else None)
import numpy as np, fedpdmc.members.site
import jax.numpy as jnp
from fedpdmc._jax.compilation import compiled
from fedpdmc._jax.precision import double_precision

def f(x, y):
    return jnp.sum(jax.lax.lgamma(y + jnp.exp(x[0])) - y * jnp.log1p(jnp.exp(x[1] - x[0])) + jnp.exp(jnp.tanh(x)) @ x)

found = double_precision(compiled(jax.value_and_grad(f)))(np.array([0.3, -0.2]), np.linspace(0.3, 9.0, 40))
bits = np.concatenate([np.ravel(part) for part in found]).tobytes().hex()
print(json.dumps([bits, len(hits), jax.config.jax_compilation_cache_dir]))
"""


def _run(code=RUN, **variables):
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("FEDPDMC", "JAX_"))}
    done = subprocess.run(
        [sys.executable, "-W", "error:Error:UserWarning", "-c", code],
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_second_process_finds_the_programs_and_computes_the_same_bits(tmp_path):
    bits, hits, folder = _run(XDG_CACHE_HOME=str(tmp_path))
    assert hits == 0 and folder.startswith(str(tmp_path / "fedpdmc" / "compiled"))
    entries = [name for name in os.listdir(folder) if name.endswith("-cache")]
    assert entries
    again, hits, _ = _run(XDG_CACHE_HOME=str(tmp_path))
    assert hits > 0
    assert again == bits
    # Damaged entries: the same bits, and no word.
    for name in entries:
        with open(os.path.join(folder, name), "r+b") as file:
            file.truncate(20)
    damaged, _, _ = _run(XDG_CACHE_HOME=str(tmp_path))
    assert damaged == bits


# The folder under each of several environments, as a new process would choose it.
WHERE = """
import json, os, sys, jax
from fedpdmc._jax.compilation_cache import use_compilation_cache
found = []
for variables in json.loads({!r}):
    os.environ.update(variables)
    own = variables.get("JAX_COMPILATION_CACHE_DIR")
    jax.config.update("jax_compilation_cache_dir", own)
    use_compilation_cache()
    found.append(jax.config.jax_compilation_cache_dir)
    for name in variables:
        del os.environ[name]
print(json.dumps(found))
"""


def _folders(*environments):
    return _run(WHERE.format(json.dumps(environments)))


def test_which_folder_is_used(tmp_path):
    off, here, mine, usual, blocked = (tmp_path / name for name in ("off", "here", "mine", "usual", "blocked"))
    for folder in (off, usual, blocked):
        folder.mkdir()
    (blocked / "fedpdmc").write_text("a file where the folder should be")
    found = _folders(
        {"FEDPDMC_COMPILATION_CACHE": "off", "XDG_CACHE_HOME": str(off)},
        {"FEDPDMC_COMPILATION_CACHE": str(here)},
        {"JAX_COMPILATION_CACHE_DIR": str(mine)},
        {"XDG_CACHE_HOME": str(blocked)},
        {"XDG_CACHE_HOME": str(usual)},
    )
    assert found[0] is None and not os.listdir(off)
    assert found[1].startswith(str(here)) and found[2] == str(mine) and found[3] is None
    folder = found[4]
    assert folder.startswith(str(usual)) and os.stat(folder).st_mode & 0o077 == 0
    for mode in (0o770, 0o707):
        os.chmod(folder, mode)
        assert _folders({"XDG_CACHE_HOME": str(usual)}) == [None]


def test_oldest_entries_go_first(tmp_path, monkeypatch):
    from fedpdmc._jax import compilation_cache

    for age, name in enumerate(("old-cache", "middle-cache", "new-cache")):
        (tmp_path / name).write_bytes(bytes(100))
        os.utime(tmp_path / name, (age, age))
    monkeypatch.setattr(compilation_cache, "MOST_BYTES", 250)
    compilation_cache._prune(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["middle-cache", "new-cache"]
