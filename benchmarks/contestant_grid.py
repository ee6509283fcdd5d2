"""The package as a user has it, on one logistic regression of the grid: prints one JSON object.

For each number of chains: the seconds that a first short run takes (`ready_seconds`: the reference, the choice of the clock,
compilation), and the rate of the timed blocks that follow. A clock stops when a block is complete. On a GPU its knots are
there, as the rival's draws are, and `copy_seconds` is the time that all of them take to the host. Making draws and
diagnostics is not timed on either side.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import time
from importlib.metadata import version

import numpy as np

from grid_problem import JUDGED, data, judged, use_device

FIRST, BURN_IN, TRIAL = 2.0, 5.0, 12.0
# Of the knots of a block.
MOST_BYTES = {"cpu": 4e9, "gpu": 1.6e10}


def sites_of(X: np.ndarray, y: np.ndarray, count: int) -> list:
    """The records spread evenly over sites."""
    import fedpdmc as fp

    return [fp.Site(fp.models.logistic(X[i::count], y[i::count]), name=f"site {i}") for i in range(count)]


def timed(sampler, length: float) -> tuple[float, float, list]:
    """A block of every chain: wall and processor seconds, and the block."""
    blocks: list = []
    engine = sampler.engine
    wall, cpu = time.perf_counter(), time.process_time()
    engine.advance(engine.time + length, blocks.append, lambda tick: None)
    return time.perf_counter() - wall, time.process_time() - cpu, blocks


def drawn(sampler, blocks: list) -> np.ndarray:
    """Draws of some of the chains, in the parameters' coordinates."""
    from fedpdmc.results.skeleton import Block, Chunk

    def some(x):
        return np.asarray(x[:JUDGED])

    store = type(sampler.store)(sampler.store.flow, origin=sampler.store.origin)
    for block in blocks:
        chunks = [Chunk(*(some(x) for x in (c.numbers, c.velocities, c.valid))) for c in block.chunks]
        store.append(Block(tuple(some(x) for x in block.start), chunks, block.begin, block.end))
    count = store.turns or int(block.end - block.begin)
    return np.asarray(sampler.method.reference.to_x(store.draws(count)))


def measure(X: np.ndarray, y: np.ndarray, chains: int, options: argparse.Namespace) -> dict:
    """One number of chains."""
    import fedpdmc as fp
    from fedpdmc._jax.precision import double_precision

    clock = time.perf_counter()
    prior, sites = fp.models.normal_prior(X.shape[1]), sites_of(X, y, options.sites)
    first = fp.sample(
        sites, prior=prior, chains=chains, duration=FIRST, burn_in=BURN_IN, seed=options.seed, progress=False
    )  # fmt: skip
    ready = time.perf_counter() - clock
    sampler = copy.copy(first.run)
    sampler.engine = copy.copy(sampler.engine)
    timed(sampler, TRIAL)
    length, most = TRIAL, MOST_BYTES[options.device] / (chains * (16 * X.shape[1] + 17))
    # Twice, because a part of the time does not depend on the length.
    for _ in range(2):
        wall, cpu = timed(sampler, length)[:2]
        length = max(min(options.seconds * length / (cpu if options.device == "cpu" else wall), most), TRIAL)
    runs = []
    for _ in range(options.repeats):
        passes, events = sampler.engine.passes.sum(), sampler.engine.events.sum()
        gc.collect()
        wall, cpu, blocks = timed(sampler, length)
        sizes = judged(double_precision(drawn)(sampler, blocks), chains)
        clock = time.perf_counter()
        size = sum(x.nbytes for block in blocks for chunk in block.pieces() for x in (chunk.numbers, chunk.velocities))
        copied = time.perf_counter() - clock
        runs.append({
            "ess_per_second": sizes["worst"] / wall, "ess_per_cpu_second": sizes["worst"] / cpu, "run_seconds": wall,
            "cpu_seconds": cpu, "process_time": length, "ess": sizes,
            "copy_seconds": copied, "copied_bytes": size,
            "passes": int(sampler.engine.passes.sum() - passes), "events": int(sampler.engine.events.sum() - events),
        })  # fmt: skip
        del blocks
    return {"chains": chains, "ready_seconds": ready, "clock": first.settings["clocks"][0], "runs": runs}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=1000)
    parser.add_argument("--dim", type=int, default=6)
    parser.add_argument("--sites", type=int, default=1)
    parser.add_argument("--chains", type=int, nargs="+", default=[512])
    parser.add_argument("--seconds", type=float, default=2.0, help="of a timed block")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--core", type=int)
    options = parser.parse_args()
    core = use_device(options.device, options.core)
    import warnings

    warnings.simplefilter("ignore")
    X, y = data(options.records, options.dim)
    report = {"contestant": "fedpdmc", "records": options.records, "dim": options.dim, "sites": options.sites}
    report |= {"device": options.device, "core": core, "rows": []}
    report["versions"] = {name: version(name) for name in ("fedpdmc", "jax", "jaxlib", "arviz", "numpy")}
    for chains in options.chains:
        try:
            report["rows"].append(measure(X, y, chains, options))
        except Exception as error:  # a size that does not fit the device
            report["rows"].append({"chains": chains, "failed": f"{type(error).__name__}: {error}"[:300], "runs": []})
    print(json.dumps(report))


if __name__ == "__main__":
    main()
