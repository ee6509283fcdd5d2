"""Compiled programs kept on disk from one process to the next: JAX's persistent cache, on by default.

The cache holds machine code, which is loaded as it was compiled, so the bits of a run do not depend on whether it came from
the cache. The folder's name contains everything that the machine code depends on and that JAX does not check itself.
"""

from __future__ import annotations

import hashlib
import os
import platform
import stat
import sys
import warnings
from importlib import metadata
from pathlib import Path

import jax

# "off", or the folder to use.
VARIABLE = "FEDPDMC_COMPILATION_CACHE"
OFF = ("off", "0", "no", "false")
# Seconds of compilation below which reading from disk saves nothing, and JAX's own default.
WORTH_KEEPING, USUAL = 0.05, 1.0
# The oldest entries are removed beyond this many bytes.
MOST_BYTES = 2**30


def usual_folder() -> Path:
    """The user's cache folder by the rules of the operating system."""
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "fedpdmc" / "compiled"


def machine() -> str:
    """Equal on machines that compile to the same instructions: the processor, its features and the cores in use."""
    features = platform.processor()
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
        features = "\n".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))
    except OSError:
        pass
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    text = f"{platform.machine()}/{cores}/{features}"
    return f"jaxlib-{metadata.version('jaxlib')}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def use_compilation_cache() -> Path | None:
    """Let JAX keep compiled programs, where the user has not chosen a place for them; returns the folder, or None.

    Nothing happens if the folder cannot be written, or if somebody else could put programs into it.
    """
    wanted = os.environ.get(VARIABLE, "")
    if wanted.lower() in OFF or jax.config.values["jax_compilation_cache_dir"] is not None:
        return None
    try:
        folder = (Path(wanted).expanduser() if wanted else usual_folder()) / machine()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _own(folder):
            return None
        _prune(folder)
    except (OSError, RuntimeError):
        return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    if jax.config.values["jax_persistent_cache_min_compile_time_secs"] == USUAL:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", WORTH_KEEPING)
    # An entry that another process is writing, or a full disk: the program is compiled as if there were no cache.
    warnings.filterwarnings("ignore", r"Error (reading|writing) persistent compilation cache", UserWarning)
    return folder


def _own(folder: Path) -> bool:
    """Whether only the user can write there: the files in the folder are executed."""
    found = folder.stat()
    if hasattr(os, "getuid") and (found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)):
        return False
    return os.access(folder, os.W_OK | os.X_OK)


def _prune(folder: Path) -> None:
    """Remove the oldest entries of a folder that has grown too large."""
    entries = [(file.stat(), file) for file in folder.iterdir() if file.is_file()]
    total = sum(found.st_size for found, _ in entries)
    for found, file in sorted(entries, key=lambda entry: entry[0].st_mtime):
        if total <= MOST_BYTES:
            return
        file.unlink(missing_ok=True)
        total -= found.st_size
