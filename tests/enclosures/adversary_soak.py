"""Many random programs on all cores: ``python -m tests.enclosures.adversary_soak --programs 10000 --seed 1``.

One program in so many (``--compiled-every``) is compiled by XLA, as runs do it; the rest are computed by NumPy. Prints what
was checked, what was refused, and every violation with the smallest program that has it. Exits with 1 if there was any.
"""

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections import Counter

# Programs that one process takes at a time, and seconds that they have after the deadline.
CHUNK, GRACE = 10, 30.0


def main() -> int:
    """Run the soak."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="stop beginning new programs after this long"
    )
    parser.add_argument("--compiled-every", type=int, default=100)
    parser.add_argument("--out", help="a JSON file for the result")
    options = parser.parse_args()
    # Many processes on few cores: no threads within one.
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false --xla_backend_optimization_level=1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    began, seen, broken = time.monotonic(), Counter(), []
    deadline = time.time() + options.seconds
    chunks = [(options, first, deadline) for first in range(0, options.programs, CHUNK)]
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        found = pool.imap_unordered(_chunk, chunks)
        for _ in chunks:
            try:
                # Programs that were begun may end.
                part, violations = found.next(max(1.0, min(deadline + GRACE - time.time(), 1e6)))
            except multiprocessing.TimeoutError:
                print("some programs were not ended", file=sys.stderr)
                break
            seen.update(part)
            broken += violations
            _write(options.out, began, seen, broken)
    print(json.dumps(_report(began, seen, broken), indent=1))
    return int(bool(broken))


def _report(began: float, seen: Counter, broken: list[dict]) -> dict:
    """What was checked so far."""
    return {
        "programs": seen["programs"],
        "violations": broken,
        "seconds": round(time.monotonic() - began, 1),
        "seen": dict(sorted(seen.items())),
    }


def _write(path: str | None, began: float, seen: Counter, broken: list[dict]) -> None:
    """The report after each chunk, so that a run that is killed leaves what it has checked."""
    if path:
        with open(path + ".part", "w") as file:
            json.dump(_report(began, seen, broken), file, indent=1)
        os.replace(path + ".part", path)


def _chunk(task) -> tuple[Counter, list[dict]]:
    """Some programs, one after the other."""
    options, first, deadline = task
    import jax

    with jax.enable_x64(True):
        from tests.enclosures.adversary import soak

        numbers = range(first, min(first + CHUNK, options.programs))
        return soak(options.seed, numbers, time.monotonic() + deadline - time.time(), options.compiled_every)


if __name__ == "__main__":
    sys.exit(main())
