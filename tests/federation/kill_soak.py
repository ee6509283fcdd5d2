"""Short studies whose parties are killed, and whose disks fail, at random moments; run as a script.

``python -m tests.federation.kill_soak FOLDER FAULTS SEED [--private]`` runs one study after the other over mutual TLS until
FAULTS faults have been made: SIGKILL after a random time, sudden death at a random change of the party's files, and changes
that fail with ENOSPC or EIO. A party that has died is started again. At the end of every study nothing may be lost and
nothing uncharged: the posterior has the bits of an undisturbed run, the sites' logs are whole, and with a budget the ledger
holds at least what the site has told.
"""

import collections
import contextlib
import ctypes
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import numpy as np
from tests.federation.processes import Parties
from tests.federation.studies import SEED, SITE_SEED, ZIGZAG, Folder, same_bits
from tests.federation.test_private_studies import PRIVATE, in_process

SHORT = (
    ZIGZAG.replace("duration = 6.0", "ess = 60")
    .replace("rounds = 2000", "rounds = 1000000")
    .replace("observed_time = 1000.0", "observed_time = 1e5")
)
KINDS = ("signal", "death", "enospc", "eio")
# Of parties that are started: how many without a fault.
SOUND = 0.1
MOST_SECONDS, MOST_CHANGES = 3.0, 250
# A study must end within this time, whatever happens to its parties.
PATIENCE = 600.0


def build(folder: Path) -> Path:
    """The library with which a disk fails."""
    library = folder / "faulty_disk.so"
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    source = Path(__file__).with_name("faulty_disk.c")
    words = [shutil.which(compiler) or "cc", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl", "-lpthread"]
    subprocess.run(words, check=True)
    return library


def zygote() -> None:
    """Import everything once; then, for each line that comes in, fork a process that runs a command of the package."""
    import jax  # noqa: F401

    import fedpdmc.federation.grpc.client
    import fedpdmc.federation.grpc.server
    import fedpdmc.federation.session
    import fedpdmc.operations.serve  # noqa: F401
    from fedpdmc.__main__ import main
    from fedpdmc.federation.site_agent import audit_log

    # So that logs of short runs are of several files.
    audit_log.MOST_SEGMENT = 20_000
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for line in sys.stdin:
        order = json.loads(line)
        if "reap" in order:
            pid, status = os.waitpid(order["reap"], os.WNOHANG)
            print(json.dumps(None if pid == 0 else os.waitstatus_to_exitcode(status)), flush=True)
            continue
        pid = os.fork()
        if pid:
            print(pid, flush=True)
            continue
        log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        null = os.open(os.devnull, os.O_RDONLY)
        for target, source in ((0, null), (1, log), (2, log)):
            os.dup2(source, target)
        os.chdir(order["cwd"])
        os.environ.update(order["env"])
        ctypes.CDLL(None).faulty_settings()
        sys.argv = ["fedpdmc", *order["words"]]
        code = 1
        try:
            main()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


class Zygote:
    """A process that starts others without importing anything again."""

    def __init__(self, library: Path, environment: dict[str, str]):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.federation.kill_soak", "--zygote"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=environment | {"LD_PRELOAD": str(library), "OPENBLAS_NUM_THREADS": "1"},
        )  # fmt: skip

    def order(self, **order):
        """Say something and hear the answer."""
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


class Soak:
    """Studies under faults, one after the other."""

    def __init__(self, path: Path, seed: int, private: bool):
        self.path, self.private, self.rng = path, private, np.random.default_rng(seed)
        self.faults, self.ends, self.studies = collections.Counter(), collections.Counter(), 0
        self.template = Folder(path / "template", PRIVATE if private else SHORT)
        self.parties = Parties(self.template, (SEED, SITE_SEED))
        self.zygote = Zygote(build(path), self.parties.environment)
        self.expected = in_process(self.template, path / "undisturbed") if private else self.template.in_process()

    def words(self, name: str, study: Path, address: str) -> list[str]:
        keys, store = str(self.template.keys(name)), str(study / name)
        shared = ["--keys", keys, "--store", store]
        if name == "coordinator":
            return ["coordinator", "study.toml", "--listen", address, "--seed", str(SEED), *shared]
        own = ["--seed", str(SITE_SEED)]
        if self.private:
            own += ["--seeded-for-tests", "--ledger", str(study / f"{name}-ledger.db")]
        return ["site", "study.toml", "--name", name, "--data", f"{name}.csv", "--policy", "policy.toml",
                "--coordinator", address, *own, *shared]  # fmt: skip

    def log(self, study: Path, name: str) -> str:
        """What a party says, where its disk does not fail."""
        return f"{study}.{name}.log"

    def start(self, name: str, study: Path, address: str):
        """Start a party, with a fault in its future or without; returns its process, and when it is killed by whom."""
        kind = "none" if self.rng.random() < SOUND else str(self.rng.choice(KINDS))
        settings = {"FAULTY_FOLDER": str(study), "FAULTY_AFTER": "-1", "FAULTY_KIND": "kill", "FAULTY_COUNT": "1"}
        end = None
        if kind == "signal":
            end = time.monotonic() + MOST_SECONDS * self.rng.random()
        elif kind != "none":
            settings["FAULTY_AFTER"] = str(int(MOST_CHANGES * self.rng.random() ** 2))
            settings["FAULTY_KIND"] = "kill" if kind == "death" else kind
            settings["FAULTY_COUNT"] = str(int(self.rng.choice([1, 1, 3, 10])))
        pid = self.zygote.order(
            words=self.words(name, study, address), cwd=str(self.template.path), env=settings, log=self.log(study, name)
        )
        return pid, kind, end

    def study(self) -> None:
        """One study to its end, and what is left of it looked at."""
        study = self.path / f"study-{self.studies}"
        study.mkdir()
        names, address = ("coordinator", *self.template.study.sites), Parties(self.template, (0, 0)).address
        if self.private:
            from fedpdmc import create_ledger

            for name in self.template.study.sites:
                create_ledger(study / f"{name}-ledger.db")
        running = {name: self.start(name, study, address) for name in names}
        began = time.monotonic()
        while "coordinator" in running:
            assert time.monotonic() < began + PATIENCE, f"{study}: no end"
            time.sleep(0.02)
            for name, (pid, kind, end) in list(running.items()):
                if end is not None and time.monotonic() > end:
                    os.kill(pid, signal.SIGKILL)
                status = self.zygote.order(reap=pid)
                if status is None:
                    continue
                del running[name]
                if status == 0:
                    continue
                said = Path(self.log(study, name)).read_text()[-400:].strip().splitlines()[-1:]
                assert kind != "none", f"{self.log(study, name)}: ended by itself with {status}: {said}"
                self.faults[kind] += 1
                self.ends[f"{kind}: {status}"] += 1
                running[name] = self.start(name, study, address)
        time.sleep(0.2)
        for pid, _, _ in running.values():
            if self.zygote.order(reap=pid) is None:
                os.kill(pid, signal.SIGKILL)
                while self.zygote.order(reap=pid) is None:
                    time.sleep(0.01)
        self.look(study)
        self.studies += 1
        shutil.rmtree(study)
        for name in names:
            os.unlink(self.log(study, name))

    def look(self, study: Path) -> None:
        """Nothing lost, nothing changed, nothing uncharged."""
        import fedpdmc as fp
        from fedpdmc.federation import messages
        from fedpdmc.federation.site_agent.audit_log import Kind, read_log

        post = fp.load(study / "coordinator" / "posterior.zarr")
        assert same_bits(post, self.expected), f"{study}: other bits"
        assert post.rounds == self.expected.rounds
        for name in self.template.study.sites:
            told, answered, request = 0.0, 0, None
            for entry in read_log(study / name):
                if entry.kind is Kind.REQUEST:
                    request = messages.decode(entry.payload)
                elif entry.kind is Kind.ANSWER and isinstance(request, messages.Plans):
                    answer = messages.decode(entry.payload)
                    if isinstance(answer, messages.Arrivals):
                        told, answered = told + float(answer.time.sum()), answered + 1
            assert answered > 5, f"{study}/{name}: {answered} answers"
            if self.private:
                with contextlib.closing(sqlite3.connect(study / f"{name}-ledger.db")) as ledger:
                    (charged,) = ledger.execute("SELECT total(exposure) FROM entries WHERE kind = 'round'").fetchone()
                assert charged >= told * (1 - 1e-9), f"{study}/{name}: told {told}, charged {charged}"


def main() -> None:
    """The script."""
    if sys.argv[1:] == ["--zygote"]:
        return zygote()
    path, faults, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    path.mkdir(parents=True)
    soak, began = Soak(path, seed, "--private" in sys.argv), time.monotonic()
    while soak.faults.total() < faults:
        soak.study()
        facts = {"studies": soak.studies, "faults": dict(soak.faults), "ends": dict(sorted(soak.ends.items()))}
        (path / "facts.json").write_text(json.dumps(facts | {"seconds": time.monotonic() - began}))
    print(json.dumps(facts | {"seconds": time.monotonic() - began}))


if __name__ == "__main__":
    main()
