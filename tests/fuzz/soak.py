"""Fuzz every parser of the package for a while; run as a script.

``python -m tests.fuzz.soak FOLDER --seconds 240 --workers 14 --seed 1`` divides the targets among workers. Each target is
fuzzed in a process of its own, which is started again if an input kills it or hangs it. At the end it prints the executions
of every target and everything that was raised and is not an error of the package; FOLDER has the inputs. The exit status is
the number of such places, at most 100.
"""

import argparse
import collections
import json
import logging
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.fuzz.engine import MOST_BYTES, Findings, Target, Violation, fuzz, keep

# Seconds after its time at which a process counts as hung: starting, and the slowest single input.
PATIENCE = 60.0


def makers() -> dict:
    """The functions that make the targets, by name."""
    from tests.fuzz import stores, texts, wire

    return {make.__name__: make for module in (texts, stores, wire) for make in module.TARGETS}


def make(name: str, folder: Path) -> Target:
    """A target with its files in a folder of its own."""
    own = folder / name
    own.mkdir(parents=True)
    return makers()[name](own)


def work(name: str, seconds: float, seed: int, out: Path) -> None:
    """Fuzz one target in this process; ``out`` is a file for what was found, and ``out.last`` has the last input."""
    logging.disable(logging.CRITICAL)
    # Little is left of a disk that is in memory, and none of it is worth a sync.
    scratch = Path(tempfile.mkdtemp(prefix="fuzz-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    last = Path(f"{out}.last")
    last.write_bytes(bytes(MOST_BYTES + 8))
    try:
        target = make(name, scratch)
        with open(last, "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:

            def noted(data: bytes, read=target.read):
                memory[: 8 + len(data)] = len(data).to_bytes(8, "little") + data
                return read(data)

            target.read = noted
            found = fuzz(target, seconds, seed)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    keep(found, out.parent)
    facts = {key: value for key, value in vars(found).items() if key != "violations"}
    facts["violations"] = {key: [one.data.hex(), one.text] for key, one in found.violations.items()}
    out.write_text(json.dumps(facts))


def supervised(names: list[str], seconds: float, seed: int, folder: Path) -> list[Findings]:
    """Fuzz some targets, each for the same time, in processes that may die."""
    found = []
    for name in names:
        end = time.monotonic() + seconds / len(names)
        while not found or found[-1].target != name:
            out = folder / f"{name}-{seed}.json"
            words = [
                str(folder),
                "--child",
                name,
                "--seconds",
                str(max(end - time.monotonic(), 1.0)),
                "--seed",
                str(seed),
            ]
            command = [sys.executable, "-W", "ignore", "-m", "tests.fuzz.soak", *words]
            with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as child:
                try:
                    said = child.communicate(timeout=max(end - time.monotonic(), 1.0) + PATIENCE)[1]
                    ending = f"the process ended with {child.returncode}"
                except subprocess.TimeoutExpired:
                    child.kill()
                    said, ending = child.communicate()[1], "the process hung"
            if child.returncode == 0:
                facts = json.loads(out.read_text())
                pairs = facts.pop("violations").items()
                facts["violations"] = {key: Violation(name, bytes.fromhex(a), b) for key, (a, b) in pairs}
                found.append(Findings(**facts | {"target": name}))
                continue
            last = Path(f"{out}.last")
            data = last.read_bytes() if last.exists() else bytes(8)
            death = Violation(
                name, data[8:][: int.from_bytes(data[:8], "little")], said.decode(errors="replace")[-1500:]
            )
            found.append(Findings(f"{name} ", violations={ending: death}))
            keep(found[-1], folder)
            seed += 1000
            if time.monotonic() > end:
                break
    return found


def shares(names: list[str], workers: int) -> list[list[str]]:
    """The targets of each worker: every target is fuzzed, and by as many workers as there are to spare."""
    if workers >= len(names):
        return [[names[place % len(names)]] for place in range(workers)]
    return [names[place::workers] for place in range(workers)]


def report(all_found: list[Findings], began: float) -> int:
    """Print a table and the violations; returns their number."""
    rows = collections.defaultdict(lambda: [0, 0, 0, 0.0])
    violations = {}
    for one in all_found:
        row = rows[one.target.strip()]
        row[0], row[1], row[2] = row[0] + one.executions, row[1] + one.refused, max(row[2], one.lines)
        row[3] += one.seconds
        violations |= {f"{one.target}: {key}": value for key, value in one.violations.items()}
    print(f"{'target':<24} {'executions':>12} {'refused':>12} {'lines':>7} {'seconds':>9}")
    for name, (executions, refused, lines, seconds) in sorted(rows.items()):
        print(f"{name:<24} {executions:>12,} {refused:>12,} {lines:>7,} {seconds:>9,.0f}")
    total = sum(row[3] for row in rows.values())
    print(
        f"{sum(row[0] for row in rows.values()):,} executions in {total / 60:.1f} minutes of work, "
        f"{time.monotonic() - began:.0f} s by the clock"
    )
    for key, value in sorted(violations.items()):
        print(f"\n=== {key}\n{value.data[:300]!r}\n{value.text[-1500:]}")
    print(f"{len(violations)} places that raise something else than an error of the package")
    return len(violations)


def main() -> int:
    """The script."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each worker")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.child:
        work(options.child, options.seconds, options.seed, options.folder / f"{options.child}-{options.seed}.json")
        return 0
    began, jobs = time.monotonic(), shares(options.only or list(makers()), options.workers)
    with ThreadPoolExecutor(options.workers) as pool:
        runs = [
            pool.submit(supervised, own, options.seconds, options.seed + place, options.folder)
            for place, own in enumerate(jobs)
        ]
        found = [one for run in runs for one in run.result()]
    return min(report(found, began), 100)


if __name__ == "__main__":
    sys.exit(main())
