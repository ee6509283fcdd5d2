"""Rounds per second over gRPC with mutual TLS, beside a bare gRPC echo of the same sizes.

``python -m benchmarks.federation_rounds [--rounds N]``. The sites are threads of one other process, in the echo and in
ours. "carried" is a round through the package's transport, with sites that decode the plan and say that nothing rang;
"answered" is a whole round: plan encoded, checked against the contract, walked on the site's records, logged, and the
arrivals checked.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import queue
import tempfile
import threading
import time
from concurrent import futures
from pathlib import Path
from typing import Any

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
    from fedpdmc.federation import wire

    rng = np.random.default_rng(sequence)
    velocity = np.where(rng.random((chains, 1, 2)) < 0.5, -1.0, 1.0)
    start = 0.3 * rng.normal(size=(chains, 2))
    plan = wire.encode(
        wire.Plans(run, sequence, np.full(chains, sequence), start, np.full((chains, 1), 0.05), velocity)
    )
    rang = np.zeros(chains, bool)
    answer = wire.Arrivals(
        run, sequence, wire.digest(plan), np.full(chains, 0.05), rang, np.zeros(chains), np.zeros((0, 2))
    )
    return plan, wire.encode(answer)


def echo_sites(address: str, keys: Path, names, size: int):
    """Bare gRPC: every message is answered with ``size`` bytes."""
    import grpc

    from fedpdmc.keys import read_credentials

    def one(name):
        own = read_credentials(keys / "sites" / name)
        secret = grpc.ssl_channel_credentials(own.authority, own.key, own.certificate)
        options = [("grpc.ssl_target_name_override", "coordinator")]
        with grpc.secure_channel(address, secret, options=options) as channel:
            outgoing: queue.SimpleQueue = queue.SimpleQueue()
            call = channel.stream_stream("/echo/Echo")(iter(outgoing.get, None))
            answer = bytes(size)
            outgoing.put(answer)
            try:
                for _ in call:
                    outgoing.put(answer)
            except grpc.RpcError:
                pass
            outgoing.put(None)

    _threads(one, names)


def our_sites(address: str, keys: Path, folder: Path, sites: int, chains: int, answer: bool):
    """Agents of the package; without ``answer`` they are `Silent`."""
    from fedpdmc.federation.opening import open_agent
    from fedpdmc.federation.streams import serve
    from fedpdmc.keys import read_credentials

    logging.disable(logging.WARNING)
    contract = study(sites, chains)
    folder.mkdir()
    records = folder / "records.csv"
    records.write_text("y,x\n" + "".join(f"{k % 2},{k % 5 - 2}\n" for k in range(16)))

    def one(name):
        agent = open_agent(contract, name, records, store=folder / "sites" / name, seed=1)
        if not answer:
            agent.answer = Silent(chains).answer  # type: ignore[method-assign]
        serve(agent, address, read_credentials(keys / "sites" / name), lambda _: True)

    _threads(one, contract.sites)


class Silent:
    """Answers every plan: nothing rang."""

    def __init__(self, chains: int):
        rang, none = np.zeros(chains, bool), np.zeros((0, 2))
        self.arrivals = (np.full(chains, 0.05), rang, rang, none)

    def answer(self, data: bytes) -> bytes:
        """Arrivals with the request's hash."""
        from fedpdmc.federation import wire

        plan: Any = wire.decode(data)
        return wire.encode(wire.Arrivals(plan.run, plan.sequence, wire.digest(data), *self.arrivals))


def _threads(one, names):
    threads = [threading.Thread(target=one, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def bare(sites: int, plan: bytes, answer: bytes, keys: Path, rounds: int) -> tuple[float, float, float]:
    """A round of an echo: to all sites, and back from all of them."""
    import grpc

    from fedpdmc.keys import read_credentials

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
    names = [f"site{k}" for k in range(sites)]
    process = multiprocessing.get_context("spawn").Process(
        target=echo_sites, args=(f"127.0.0.1:{port}", keys, names, len(answer))
    )
    process.start()
    while len(inboxes) < sites:
        time.sleep(0.01)

    def round_():
        for inbox in inboxes:
            inbox.put(plan)
        for _ in inboxes:
            ready.get()

    speed = _timed(round_, rounds, process.pid)
    for inbox in inboxes:
        inbox.put(None)
    server.stop(0.5).wait()
    process.join(10)
    return speed


def ours(sites: int, chains: int, keys: Path, folder: Path, rounds: int, answer: bool) -> tuple[float, float, float]:
    """A round of the package's transport, or of whole rounds."""
    import jax

    from fedpdmc.coordinates import Reference
    from fedpdmc.federation import wire
    from fedpdmc.federation.remote import RemoteFederation, Request
    from fedpdmc.federation.streams import StreamTransport
    from fedpdmc.keys import read_credentials
    from fedpdmc.plan import Plan

    run = os.urandom(16)
    transport = StreamTransport(study(sites, chains), run, "127.0.0.1:0", read_credentials(keys / "coordinator"))
    process = multiprocessing.get_context("spawn").Process(
        target=our_sites, args=(transport.address, keys, folder, sites, chains, answer)
    )
    process.start()
    with jax.enable_x64(True):
        federation = RemoteFederation(transport, run)
        if answer:
            import jax.numpy as jnp

            federation.open(Reference(jnp.zeros(2), jnp.ones(2)), [None] * sites, chains, 1)

        data = messages(chains, 1, run)[0]
        drawn: Any = wire.decode(data)

        def carry():
            transport.ask([Request.of(drawn)] * sites)

        def whole():
            number = np.full(chains, federation.sequence)
            federation.exchange(Plan(number, drawn.start, drawn.duration, drawn.velocity))  # type: ignore[arg-type]

        round_ = whole if answer else carry

        speed = _timed(round_, rounds, process.pid)
    transport.close()
    process.join(20)
    if process.is_alive():
        process.terminate()
    return speed


def _processor(pid: int) -> float:
    """Processor seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _timed(round_, rounds: int, pid: int) -> tuple[float, float, float]:
    """Seconds of a round on the clock, and of the coordinator's and the sites' processors."""
    for _ in range(max(rounds // 10, 3)):
        round_()
    clock, own, others = time.perf_counter(), time.process_time(), _processor(pid)
    for _ in range(rounds):
        round_()
    ended = time.perf_counter() - clock, time.process_time() - own, _processor(pid) - others
    return ended[0] / rounds, ended[1] / rounds, ended[2] / rounds


def main() -> None:
    """Print a table."""
    from fedpdmc.keys import make_keys

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--sites", type=int, nargs="*", default=[2, 4, 20])
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; milliseconds of a round")
    print(
        f"{'sites':>5} {'plan B':>8}  {'':<9} {'clock':>8} {'coordinator CPU':>16} {'all sites CPU':>14} {'rounds/s':>9}"
    )
    for size, chains in CHAINS.items():
        for sites in options.sites:
            plan, answer = messages(chains, 1, bytes(16))
            rounds = options.rounds if size < 10_000 else max(options.rounds // 5, 10)
            with tempfile.TemporaryDirectory() as name:
                keys = make_keys(Path(name) / "keys", [f"site{k}" for k in range(sites)])
                found = {
                    "echo": bare(sites, plan, answer, keys, rounds),
                    "carried": ours(sites, chains, keys, Path(name) / "carried", rounds, False),
                    "answered": ours(sites, chains, keys, Path(name) / "answered", rounds, True),
                }
            for kind, (clock, own, others) in found.items():
                figures = f"{1e3 * clock:>8.2f} {1e3 * own:>16.2f} {1e3 * others:>14.2f} {1 / clock:>9.0f}"
                print(f"{sites:>5} {len(plan):>8,}  {kind:<9} {figures}", flush=True)


if __name__ == "__main__":
    main()
