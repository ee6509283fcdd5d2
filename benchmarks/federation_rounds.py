"""Rounds per second over gRPC with mutual TLS, compared with a bare gRPC echo of the same sizes.

``python -m benchmarks.federation_rounds [--rounds N]``. Every site is a process, in the echo and in ours, and the two take
turns in blocks of rounds, so that what else the machine does slows both. "echo" answers in the thread that sends, as the
package's sites do; "handed" hands its answers to that thread through a queue, as gRPC's examples do. "carried" is a round
through the package's transport, with sites that decode the plan and say that nothing rang; "answered" is a whole round: plan
encoded, checked against the contract, walked on the site's records, logged, and the arrivals checked.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import queue
import tempfile
import time
from collections.abc import Callable
from concurrent import futures
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

CONTRACT = """
format = 1
name = "bench"
sites = {sites}
[model]
family = "logistic"
formula = "y ~ x"
[columns]
y = {{ type = "level", levels = ["0", "1"] }}
x = {{ type = "number", bounds = [-9, 9] }}
[prior]
scale = 1.0
[dynamics]
kind = "ZigZag"
excess = 0.1
chains = {chains}
[releases]
[limits]
rounds = 1000000000
observed_time = 1e12
"""
# Chains whose plans, of one segment and two parameters, are about so many bytes; an arrival is about half of it.
CHAINS = {1_000: 21, 200_000: 4166}


def study(sites: int, chains: int):
    """A contract for so many sites."""
    from fedpdmc.study import parse_study

    names = json.dumps([f"site{k}" for k in range(sites)])
    return parse_study(CONTRACT.format(sites=names, chains=chains).encode())


def messages(chains: int, sequence: int, run: bytes):
    """A plan of all chains and the arrivals that answer it."""
    from fedpdmc.federation import messages as wire

    rng = np.random.default_rng(sequence)
    velocity = np.where(rng.random((chains, 1, 2)) < 0.5, -1.0, 1.0)
    start = 0.3 * rng.normal(size=(chains, 2))
    plan = wire.encode(
        wire.Plans(
            run, sequence, np.full(chains, sequence), start, np.full((chains, 1), 0.05), velocity, np.arange(chains)
        )
    )
    rang = np.zeros(chains, bool)
    answer = wire.Arrivals(
        run, sequence, wire.digest(plan), np.full(chains, 0.05), rang, np.zeros(chains), np.zeros((0, 2))
    )
    return plan, wire.encode(answer)


def echo_site(address: str, keys: Path, name: str, size: int, handed: bool):
    """Bare gRPC: every message is answered with ``size`` bytes."""
    import grpc

    from fedpdmc.certificates import read_credentials

    own = read_credentials(keys / "sites" / name)
    secret = grpc.ssl_channel_credentials(own.authority, own.key, own.certificate)
    options = [("grpc.ssl_target_name_override", "coordinator")]
    answer, messages = bytes(size), queue.SimpleQueue()

    def answers():
        yield answer
        for _ in messages.get():
            yield answer

    with grpc.secure_channel(address, secret, options=options) as channel:
        try:
            if handed:
                messages.put(answer)
                for _ in channel.stream_stream("/echo/Echo")(iter(messages.get, None)):
                    messages.put(answer)
            else:
                call = channel.stream_stream("/echo/Echo")(answers())
                messages.put(call)
                call.code()
        except grpc.RpcError:
            pass


def our_site(address: str, keys: Path, folder: Path, name: str, contract: bytes, answer: bool):
    """An agent of the package; without ``answer`` it is `Silent`."""
    from fedpdmc.certificates import read_credentials
    from fedpdmc.federation.grpc.client import serve
    from fedpdmc.federation.site_agent.start import open_agent
    from fedpdmc.study import parse_study

    logging.disable(logging.WARNING)
    study = parse_study(contract)
    agent = open_agent(study, name, folder / "records.csv", store=folder / "sites" / name, seed=1)
    if not answer:
        agent.answer = Silent(study.chains).answer  # type: ignore[method-assign]
    serve(agent, address, read_credentials(keys / "sites" / name), lambda _: True)


class Silent:
    """Answers every plan: nothing rang."""

    def __init__(self, chains: int):
        self.arrivals = (np.full(chains, 0.05), np.zeros(chains, bool), np.zeros(chains, int), np.zeros((0, 2)))

    def answer(self, data: bytes) -> bytes:
        """Arrivals with the request's hash."""
        from fedpdmc.federation import messages as wire

        plan: Any = wire.decode(data)
        return wire.encode(wire.Arrivals(plan.run, plan.sequence, wire.digest(data), *self.arrivals))


class Contestant(NamedTuple):
    """Something that makes rounds, the processes of its sites, and how to end it."""

    round: Callable[[], None]
    processes: list
    end: Callable[[], None]


def _start(target, arguments) -> list:
    """A process for each site; they share what was imported before they were split off."""
    context = multiprocessing.get_context("forkserver")
    processes = [context.Process(target=target, args=own, daemon=True) for own in arguments]
    for process in processes:
        process.start()
    return processes


def echo(sites: int, plan: bytes, answer: bytes, keys: Path, handed: bool = False) -> Contestant:
    """A round of an echo: to all sites, and back from all of them."""
    import grpc

    from fedpdmc.certificates import read_credentials

    ready: queue.SimpleQueue = queue.SimpleQueue()
    inboxes: list[queue.SimpleQueue] = []

    def stream(incoming, context):
        inbox: queue.SimpleQueue = queue.SimpleQueue()
        next(incoming)
        inboxes.append(inbox)
        while (message := inbox.get()) is not None:
            yield message
            next(incoming)
            ready.put(1)

    own = read_credentials(keys / "coordinator")
    server = grpc.server(futures.ThreadPoolExecutor(sites + 4))
    handler = grpc.stream_stream_rpc_method_handler(stream)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("echo", {"Echo": handler}),))
    secret = grpc.ssl_server_credentials([(own.key, own.certificate)], own.authority, require_client_auth=True)
    port = server.add_secure_port("127.0.0.1:0", secret)
    server.start()
    address = f"127.0.0.1:{port}"
    processes = _start(echo_site, [(address, keys, f"site{k}", len(answer), handed) for k in range(sites)])
    while len(inboxes) < sites:
        time.sleep(0.01)

    def round_():
        for inbox in inboxes:
            inbox.put(plan)
        for _ in inboxes:
            ready.get()

    def end():
        for inbox in inboxes:
            inbox.put(None)
        server.stop(0.5).wait()

    return Contestant(round_, processes, end)


def ours(sites: int, chains: int, keys: Path, folder: Path, answer: bool) -> Contestant:
    """A round of the package's transport, or with ``answer`` a whole round."""
    from fedpdmc.certificates import read_credentials
    from fedpdmc.federation import messages as wire
    from fedpdmc.federation.grpc.server import StreamTransport
    from fedpdmc.federation.remote import RemoteFederation
    from fedpdmc.federation.transport import Request
    from fedpdmc.plan import Plan
    from fedpdmc.whitening import Reference

    run, contract = os.urandom(16), study(sites, chains)
    transport = StreamTransport(contract, run, "127.0.0.1:0", read_credentials(keys / "coordinator"))
    folder.mkdir()
    (folder / "records.csv").write_text("y,x\n" + "".join(f"{k % 2},{k % 5 - 2}\n" for k in range(16)))
    processes = _start(
        our_site, [(transport.address, keys, folder, name, contract.text, answer) for name in contract.sites]
    )
    federation = RemoteFederation(transport, run)
    if answer:
        federation.open(Reference(np.zeros(2), np.ones(2)), [None] * sites, chains, 1)  # type: ignore[arg-type]
    drawn: Any = wire.decode(messages(chains, 1, run)[0])

    def carry():
        transport.ask([Request.of(drawn)] * sites)

    def whole():
        number = np.full(chains, federation.sequence[0])
        federation.exchange(Plan(number, drawn.start, drawn.duration, drawn.velocity))  # type: ignore[arg-type]

    return Contestant(whole if answer else carry, processes, transport.close)


def _processor(pid: int) -> float:
    """Processor seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Figures(NamedTuple):
    """Seconds of a round on the clock, of the coordinator's processor, and of all sites' processors together."""

    clock: float
    coordinator: float
    sites: float


def _timed(contestant: Contestant, rounds: int) -> Figures:
    """So many rounds."""

    def now():
        used = sum(_processor(process.pid) for process in contestant.processes)
        return np.asarray([time.perf_counter(), time.process_time(), used])

    before = now()
    for _ in range(rounds):
        contestant.round()
    return Figures(*((now() - before) / rounds))


def contest(
    sites: int, chains: int, rounds: int, blocks: int, answered: bool, folder: Path
) -> dict[str, list[Figures]]:
    """Blocks of rounds of everyone in turn: what else the machine does slows all of them alike."""
    from fedpdmc.certificates import make_keys

    plan, answer = messages(chains, 1, bytes(16))
    keys = make_keys(folder / "keys", [f"site{k}" for k in range(sites)])
    makers = {
        "echo": lambda: echo(sites, plan, answer, keys),
        "handed": lambda: echo(sites, plan, answer, keys, True),
        "carried": lambda: ours(sites, chains, keys, folder / "carried", False),
    }
    if answered:
        makers["answered"] = lambda: ours(sites, chains, keys, folder / "answered", True)
    parties = {name: make() for name, make in makers.items()}
    found: dict[str, list[Figures]] = {name: [] for name in parties}
    for block in range(blocks + 1):
        for name, party in parties.items():
            figures = _timed(party, max(rounds // blocks, 2))
            if block:
                found[name].append(figures)
    for party in parties.values():
        party.end()
        for process in party.processes:
            process.join(20)
            if process.is_alive():
                process.terminate()
    return found


def _ratio(blocks: list[Figures], others: list[Figures]) -> float:
    """By the clock: the median over blocks that were run one after the other."""
    return float(np.median([a.clock / b.clock for a, b in zip(blocks, others, strict=True)]))


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--blocks", type=int, default=10)
    parser.add_argument("--sites", type=int, nargs="*", default=[2, 4, 20])
    parser.add_argument("--most-answered", type=int, default=4, help="whole rounds with at most so many sites")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    multiprocessing.set_forkserver_preload(["fedpdmc.federation.site_agent.start", "fedpdmc.federation.grpc.client"])
    print(
        f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; milliseconds of a round, medians of blocks"
    )
    print(
        f"{'sites':>5} {'plan B':>8}  {'':<9} {'clock':>8} {'coordinator CPU':>16} {'all sites CPU':>14} {'rounds/s':>9}"
        f" {'clock / echo':>13} {'/ handed':>9}"
    )
    for size, chains in CHAINS.items():
        for sites in options.sites:
            plan, _ = messages(chains, 1, bytes(16))
            rounds = options.rounds if size < 10_000 else max(options.rounds // 5, 10)
            with tempfile.TemporaryDirectory() as name:
                found = contest(
                    sites, chains, rounds, options.blocks, sites <= options.most_answered, Path(name)
                )  # fmt: skip
            for kind, blocks in found.items():
                clock, own, others = np.median(blocks, 0)
                one, other = (_ratio(blocks, found[name]) for name in ("echo", "handed"))
                times = f"{1e3 * clock:>8.2f} {1e3 * own:>16.2f} {1e3 * others:>14.2f}"
                figures = f"{times} {1 / clock:>9.0f} {one:>13.2f} {other:>9.2f}"
                print(f"{sites:>5} {len(plan):>8,}  {kind:<9} {figures}", flush=True)


if __name__ == "__main__":
    main()
