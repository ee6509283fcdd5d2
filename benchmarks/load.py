"""Many sites on one machine: memory and time of a round over gRPC with mutual TLS, by the number of sites.

``python -m benchmarks.load [--sites 25 50 100 200] [--rounds 40]``. The coordinator is one process. The sites are agents of
the package, each with its own records, store, keys, certificate and connection, as threads of further processes, 25 in
each. A round is a whole one: the plan is encoded, sent, checked against the contract, walked on the site's records and
logged, and the arrivals are checked. The last lines say whether time and memory grow linearly: what a site adds among many
is compared with what it adds among few.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from benchmarks.federation_rounds import _processor, messages, study

CHAINS, PER_PROCESS = 4, 25
# Growth from one number of sites to the next counts as linear up to this factor of what the first ones had.
TOLERANCE = 1.5


class Load(NamedTuple):
    """What so many sites take.

    Seconds until all have joined; seconds of a round by the clock, and of the processors of coordinator and agents; MB of
    the coordinator and of all agents.
    """

    sites: int
    joined: float
    round: float
    own_work: float
    work: float
    coordinator: float
    agents: float


def resident(pid: int | str = "self") -> float:
    """The resident size of a process in MB."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def agents(address: str, keys: Path, folder: Path, contract: bytes, first: int) -> None:
    """Some sites of a study, each in a thread; the process ends when the coordinator hangs up."""
    from fedpdmc.certificates import read_credentials
    from fedpdmc.federation.grpc.client import serve
    from fedpdmc.federation.site_agent.start import open_agent
    from fedpdmc.study import parse_study

    logging.disable(logging.WARNING)
    own = parse_study(contract)

    def one(name: str, place: int) -> None:
        path = folder / f"{name}.csv"
        path.write_text("y,x\n" + "".join(f"{(k + place) % 2},{(k * place) % 5 - 2}\n" for k in range(16)))
        credentials = read_credentials(keys / "sites" / name)
        agent = open_agent(own, name, path, store=folder / name, seed=place, credentials=credentials)
        serve(agent, address, credentials, lambda _: True)

    names = list(enumerate(own.sites))[first : first + PER_PROCESS]
    threads = [threading.Thread(target=one, args=(name, place)) for place, name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def measured(sites: int, rounds: int, folder: Path) -> Load:
    """A study of so many sites, its coordinator in this process."""
    from fedpdmc.certificates import make_keys, read_credentials
    from fedpdmc.federation import messages as wire
    from fedpdmc.federation.grpc.server import StreamTransport
    from fedpdmc.federation.remote import RemoteFederation
    from fedpdmc.plan import Plan
    from fedpdmc.whitening import Reference

    logging.disable(logging.WARNING)
    run, contract = os.urandom(16), study(sites, CHAINS)
    keys = make_keys(folder / "keys", contract.sites)
    transport = StreamTransport(contract, run, "127.0.0.1:0", read_credentials(keys / "coordinator"))
    processes = [
        multiprocessing.get_context("spawn").Process(
            target=agents, args=(transport.address, keys, folder, contract.text, first), daemon=True
        )
        for first in range(0, sites, PER_PROCESS)
    ]
    for process in processes:
        process.start()
    begin = time.perf_counter()
    while "lost" in transport.status():
        time.sleep(0.05)
    joined = time.perf_counter() - begin
    federation = RemoteFederation(transport, run)
    federation.open(Reference(np.zeros(2), np.ones(2)), [None] * sites, CHAINS, 1)  # type: ignore[arg-type]
    drawn: Any = wire.decode(messages(CHAINS, 1, run)[0])

    def exchange() -> float:
        begin = time.perf_counter()
        number = np.full(CHAINS, federation.sequence[0])
        federation.exchange(Plan(number, drawn.start, drawn.duration, drawn.velocity))  # type: ignore[arg-type]
        return time.perf_counter() - begin

    # The first rounds compile.
    for _ in range(3):
        exchange()
    pids = [process.pid or os.getpid() for process in processes]
    before = np.asarray([time.process_time(), sum(map(_processor, pids))])
    took = statistics.median(exchange() for _ in range(rounds))
    own, others = (np.asarray([time.process_time(), sum(map(_processor, pids))]) - before) / rounds
    found = Load(sites, joined, took, own, others, resident(), sum(map(resident, pids)))
    transport.close()
    for process in processes:
        process.join(20)
        process.kill()
    return found


def growth(found: list[Load], key: str) -> list[float]:
    """What each site adds, from one number of sites to the next."""
    pairs = zip(found, found[1:], strict=False)
    return [(getattr(b, key) - getattr(a, key)) / (b.sites - a.sites) for a, b in pairs]


def report(found: list[Load]) -> bool:
    """Print the table and whether growth is linear."""
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; {CHAINS} chains")
    print(f"{'':>5} {'all':>9} {'round':>10} {'processor time per site, ms':>28} {'memory, MB':>24}")
    print(
        f"{'sites':>5} {'joined':>9} {'':>10} {'coordinator':>14} {'agents':>13} {'coordinator':>13} {'all agents':>10}"
    )
    for one in found:
        times = f"{one.joined:>7.1f} s {1e3 * one.round:>7.1f} ms"
        work = f"{1e3 * one.own_work / one.sites:>14.2f} {1e3 * one.work / one.sites:>13.2f}"
        print(f"{one.sites:>5} {times} {work} {one.coordinator:>13.0f} {one.agents:>10.0f}")
    good = True
    for key, unit, scale in (("round", "ms", 1e3), ("coordinator", "MB", 1.0), ("agents", "MB", 1.0)):
        added = [scale * x for x in growth(found, key)]
        few = max(added[0], scale * getattr(found[0], key) / found[0].sites) if added else 0.0
        linear = max(added[1:], default=0.0) <= TOLERANCE * few
        good = good and linear
        words = ", ".join(f"{x:.3f}" for x in added)
        what = "round" if key == "round" else f"memory of {key}"
        print(f"{what}: {words} {unit} for each further site: {'linear' if linear else 'NOT linear'}")
    return good


def main() -> int:
    """Measure each number of sites in processes of their own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sites", type=int, nargs="*", default=[25, 50, 100, 200])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        with tempfile.TemporaryDirectory() as name:
            print(json.dumps(measured(options.one, options.rounds, Path(name))))
        return 0
    found = []
    for sites in options.sites:
        command = [sys.executable, "-m", "benchmarks.load", "--one", str(sites), "--rounds", str(options.rounds)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found.append(Load(*json.loads(done.stdout.splitlines()[-1])))
    return int(not report(found))


if __name__ == "__main__":
    sys.exit(main())
