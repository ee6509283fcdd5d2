"""Coordinator and sites as processes of their own, to be killed and started again."""

import os
import signal
import socket
import subprocess
import sys
import time

COMMAND = [sys.executable, "-m", "fedpdmc"]


def free_port():
    """A port of loopback that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


class Parties:
    """The parties of a study on this machine, each in a process with its own store.

    Parameters
    ----------
    folder : Folder
    seeds : (int, int)
        Of the coordinator and of every site.
    """

    def __init__(self, folder, seeds, wrap=lambda name, command: command, host="127.0.0.1"):
        self.folder, self.seeds, self.wrap = folder, seeds, wrap
        self.address = f"{host}:{free_port()}"
        self.running = {}
        # What one process has compiled the next one loads: the same program, so the same bits.
        self.environment = os.environ | {
            "JAX_COMPILATION_CACHE_DIR": str(folder.path / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
        }

    def store(self, name):
        """A party's folder."""
        return self.folder.path / "stores" / name

    def start(self, name):
        """Start a party, or start it again."""
        path, keys = self.folder.path, str(self.folder.keys(name))
        if name == "coordinator":
            words = ["coordinator", "study.toml", "--listen", self.address, "--seed", str(self.seeds[0])]
        else:
            words = ["site", "study.toml", "--name", name, "--data", f"{name}.csv", "--policy", "policy.toml"]
            words += ["--coordinator", self.address, "--seed", str(self.seeds[1])]
        words += ["--keys", keys, "--store", str(self.store(name))]
        log = open(path / f"{name}.log", "ab")
        self.running[name] = subprocess.Popen(
            self.wrap(name, COMMAND + words), cwd=path, env=self.environment, stdout=log, stderr=log
        )
        log.close()

    def start_all(self):
        """Start everyone."""
        for name in ("coordinator", *self.folder.study.sites):
            self.start(name)

    def kill(self, name):
        """SIGKILL, which nothing can catch."""
        self.running[name].send_signal(signal.SIGKILL)
        self.running[name].wait()

    def logged(self, name):
        """Bytes in a site's audit log."""
        path = self.store(name) / "audit.log"
        return path.stat().st_size if path.exists() else 0

    def wait_for(self, ready, seconds=400):
        """Wait until something is so; an end of any party before that is an error."""
        end = time.monotonic() + seconds
        while not ready():
            assert time.monotonic() < end, self.words()
            over = [name for name, process in self.running.items() if process.poll() not in (None, 0)]
            assert not over, self.words()
            time.sleep(0.01)

    def finish(self, seconds=600):
        """Wait until everyone has ended well."""
        for process in self.running.values():
            assert process.wait(seconds) == 0, self.words()

    def words(self):
        """What everyone has said."""
        return "\n".join(
            f"--- {name}\n{(self.folder.path / f'{name}.log').read_text()[-2000:]}" for name in self.running
        )

    def stop(self):
        """Kill what still runs."""
        for process in self.running.values():
            if process.poll() is None:
                process.kill()
                process.wait()
