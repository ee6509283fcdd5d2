"""Fuzz every parser of the package for a while; run as a script.

``python -m tests.fuzz.soak FOLDER --seconds 240 --workers 14 --seed 1`` divides the targets among processes, each of which
fuzzes one target after the other for its share of the time. It prints the executions of every target and everything that was
raised and is not an error of the package; FOLDER has the inputs. The exit status is the number of such places, at most 100.
"""

import argparse
import collections
import json
import logging
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.fuzz.engine import Findings, Target, fuzz, keep


def makers() -> dict:
    """The functions that make the targets, by name."""
    from tests.fuzz import stores, texts, wire

    return {make.__name__: make for module in (texts, stores, wire) for make in module.TARGETS}


def make(name: str, folder: Path) -> Target:
    """A target with its files in a folder of its own."""
    own = folder / name
    own.mkdir(parents=True)
    return makers()[name](own)


def work(names: list[str], seconds: float, seed: int, folder: Path) -> list[Findings]:
    """Fuzz some targets, each for the same time."""
    logging.disable(logging.CRITICAL)
    # Little is left of a disk that is in memory, and none of it is worth a sync.
    scratch = Path(tempfile.mkdtemp(prefix="fuzz-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    found = []
    try:
        for name in names:
            found.append(fuzz(make(name, scratch), seconds / len(names), seed))
            keep(found[-1], folder)
            (folder / f"{name}-{seed}-{os.getpid()}.json").write_text(
                json.dumps(
                    {"target": found[-1].target, "executions": found[-1].executions, "seconds": found[-1].seconds}
                )
            )
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
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
        row = rows[one.target]
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
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    began, names = time.monotonic(), options.only or list(makers())
    jobs = [
        (own, options.seconds, options.seed + place, options.folder)
        for place, own in enumerate(shares(names, options.workers))
    ]
    if options.workers == 1:
        return min(report(work(*jobs[0]), began), 100)
    context = multiprocessing.get_context("spawn")
    with context.Pool(options.workers) as pool:
        found = [one for some in pool.starmap(work, jobs, chunksize=1) for one in some]
    return min(report(found, began), 100)


if __name__ == "__main__":
    sys.exit(main())
