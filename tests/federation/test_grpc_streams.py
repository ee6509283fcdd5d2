"""gRPC with real TLS: the same bits as in process, whatever the network does."""

import base64
import contextlib
import queue
import socket
import threading
import time

import grpc
import numpy as np
import pytest
from tests.federation.proxy import Proxy
from tests.federation.studies import SEED, SITE_SEED, Folder, same_bits

import fedpdmc as fp
import fedpdmc.certificates
from fedpdmc.certificates import read_credentials
from fedpdmc.errors import InputError
from fedpdmc.federation.grpc import server
from fedpdmc.federation.grpc.client import serve
from fedpdmc.federation.grpc.tls import JOIN, SERVICE


def test_over_tls_as_in_process_to_the_bit(folder, expected, fresh):
    with folder.listening() as connection, folder.sites(connection, fresh()) as agents:
        post = fp.sample(connection, progress=False)
        assert "ms" in connection.transport.status()
        connection.finish()
        assert all(agent.finished for agent in agents.values())
    assert same_bits(post, expected)
    assert post.settings["sites"] == ["north", "south"]
    assert post.rounds > 20 and np.all(post.bytes > 1000)
    np.testing.assert_array_equal(post.messages, 2 * post.rounds)
    np.testing.assert_array_equal(post.gradient_evaluations, expected.gradient_evaluations)
    assert np.all(post.gradient_evaluations > 0)


def test_bits_do_not_depend_on_a_network_that_delays_and_cuts(folder, expected, fresh, caplog):
    with folder.listening() as connection, Proxy(connection.address, delay=0.002, cut_after=6000) as proxy:
        with folder.sites(connection, fresh(), proxy.address):
            post = fp.sample(connection, progress=False)
    assert proxy.cuts > 2
    assert same_bits(post, expected)
    assert any("is lost; the run waits for it" in record.message for record in caplog.records)


def test_a_site_that_stalls_is_named_in_a_line(folder, fresh, caplog, monkeypatch):
    monkeypatch.setattr(server, "STALLED", 0.2)
    agents, slow = fresh(), []
    answer = agents["south"].answer

    def late(data):
        slow.append(data)
        if len(slow) == 9:
            time.sleep(1.0)
        return answer(data)

    agents["south"].answer = late
    with folder.listening() as connection, folder.sites(connection, agents):
        fp.sample(connection, progress=False)
    lines = [record.message for record in caplog.records if "has not answered" in record.message]
    assert any("site south has not answered for 0 s; it is connected" in line for line in lines), lines


@pytest.mark.parametrize("returns", [True, False])
def test_when_the_answer_to_the_farewell_is_lost_both_sides_end(folder, fresh, caplog, monkeypatch, returns):
    """A site that knows that the run is over dials again to say so; one that does not come back is not waited for."""
    monkeypatch.setattr(server, "LAST_WAIT", 30.0 if returns else 0.5)
    agents, cuts = fresh(), []
    south = agents.pop("south")
    answer = south.answer

    def lost(data):
        said = answer(data)
        if not cuts:
            cuts.append(data)
            proxy.cut()
        return said

    south.answer = lost
    with folder.listening() as connection, Proxy(connection.address) as proxy, folder.sites(connection, agents):
        own, wait = read_credentials(folder.keys("south")), (lambda _: False) if returns else (lambda _: True)
        worker = threading.Thread(target=serve, args=(south, proxy.address, own, wait), daemon=True)
        worker.start()
        connection.finish()
        connection.close()
        worker.join(20)
        assert cuts and south.finished and not worker.is_alive()
    south.log.close()
    silent = any("south has not confirmed the end of the run" in record.message for record in caplog.records)
    assert silent is not returns


class Connector(Proxy):
    """An HTTP proxy that knows one word, CONNECT."""

    def __init__(self):
        super().__init__("127.0.0.1:0")
        self.asked, self.credentials = [], []

    def _connected(self, site):
        head = b""
        while b"\r\n\r\n" not in head:
            head += site.recv(4096)
        self.asked.append(head.split()[0].decode())
        self.credentials += [line for line in head.split(b"\r\n") if line.lower().startswith(b"proxy-authorization")]
        host, port = head.split()[1].decode().rsplit(":", 1)
        coordinator = socket.create_connection((host, int(port)))
        site.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        self._join(site, coordinator)


def test_through_an_http_proxy(folder, expected, fresh, monkeypatch):
    with Connector() as proxy, folder.listening() as connection:
        monkeypatch.setenv("grpc_proxy", f"http://north:hunter2@{proxy.address}")
        for name in ("no_proxy", "no_grpc_proxy"):
            monkeypatch.delenv(name, raising=False)
        with folder.sites(connection, fresh()):
            post = fp.sample(connection, progress=False)
    assert proxy.asked[:2] == ["CONNECT", "CONNECT"]
    assert base64.b64decode(proxy.credentials[0].split()[-1]) == b"north:hunter2"
    assert same_bits(post, expected)


def test_a_run_goes_on_and_is_extended_after_the_coordinator_is_gone(folder, expected, fresh, tmp_path):
    agents = fresh()
    with folder.listening(store=tmp_path / "run") as connection:
        address = connection.address
        with folder.sites(connection, agents):
            first = fp.sample(connection, duration=2.0, progress=False)
    agents = fresh()
    with folder.listening(store=tmp_path / "run", listen=address, seed=None) as connection:
        with folder.sites(connection, agents):
            longer = fp.sample(connection, duration=5.0, progress=False)
            longest = longer.extend(duration=1.0, progress=False)
    assert first.duration == 2.0 and longer.duration == 5.0 and longest.duration == 6.0
    cut = first.skeleton
    np.testing.assert_array_equal(cut.t[: cut.offsets[1]], longest.skeleton.t[: cut.offsets[1]])
    np.testing.assert_allclose(longest.mean(), expected.mean(), atol=4 * np.sqrt(np.diag(expected.cov())).max())


def test_with_draws_only_a_run_goes_on_too(folder, tmp_path):
    seeds = dict.fromkeys(folder.study.sites, SITE_SEED)

    def draw(store, *durations):
        for duration in durations:
            with fp.connect(folder.study, data=folder.data, seed=SEED, site_seeds=seeds, store=store) as connection:
                post = fp.sample(connection, duration=duration, keep="draws", progress=False)
        return post

    twice, once = draw(tmp_path / "a", 1.0, 3.0), draw(tmp_path / "b", 1.0)
    assert twice.duration == 3.0 and twice.most_draws > 100
    with fp.connect(folder.study, data=folder.data, site_seeds=seeds, store=tmp_path / "b") as connection:
        longer = once_more = fp.sample(connection, duration=1.0, keep="draws", progress=False)
        np.testing.assert_array_equal(once_more.mean(), once.mean())
        longer = once_more.extend(duration=2.0, progress=False)
    np.testing.assert_array_equal(longer.mean(), twice.mean())
    with fp.connect(folder.study, data=folder.data, store=tmp_path / "b") as connection:
        with pytest.raises(InputError, match="started with keep='draws'"):
            fp.sample(connection, duration=5.0, progress=False)


def test_duplicates_and_echoes_of_earlier_rounds_change_nothing(folder, expected, tmp_path, caplog):
    """A site that sends every answer twice, and the one before again, out of order."""
    with (
        folder.listening() as connection,
        folder.sites(connection, {"north": folder.agent("north", tmp_path / "n")}),
    ):
        south = folder.agent("south", tmp_path / "s")
        worker = threading.Thread(target=_stutter, args=(folder, connection.address, south), daemon=True)
        worker.start()
        post = fp.sample(connection, progress=False)
        connection.finish()
        worker.join(10)
        south.log.close()
    assert same_bits(post, expected)
    assert sum("answer to another request" in record.message for record in caplog.records) > 10


def _stutter(folder, address, agent):
    own = read_credentials(folder.keys("south"))
    secret = grpc.ssl_channel_credentials(own.authority, own.key, own.certificate)
    outgoing, last = queue.SimpleQueue(), None
    with grpc.secure_channel(address, secret, options=[("grpc.ssl_target_name_override", "coordinator")]) as channel:
        call = channel.stream_stream(f"/{SERVICE}/{JOIN}")(iter(outgoing.get, None))
        outgoing.put(agent.hello())
        agent.join(next(call))
        with contextlib.suppress(grpc.RpcError):
            for request in call:
                answer = agent.answer(request)
                for message in (last, answer, answer):
                    if message is not None:
                        outgoing.put(message)
                last = answer
                if agent.finished:
                    time.sleep(0.05)
                    break
        outgoing.put(None)


# On a slow machine.
@pytest.mark.filterwarnings("ignore:This will take about")
def test_at_a_limit_of_the_contract_the_posterior_ends_with_the_last_whole_block(folder, tmp_path):
    """What has been drawn is not lost."""
    contract = folder.contract.replace("observed_time = 1000.0", "observed_time = 200.0").replace(
        "duration = 6.0", "ess = 2000"
    )
    small, ends = Folder(tmp_path, contract), "A limit of the contract is reached: the unfinished block is dropped"
    with pytest.warns(UserWarning, match=ends), fp.connect(
        small.study, data=small.data, seed=SEED, store=tmp_path / "store"
    ) as connection:  # fmt: skip
        post = fp.sample(connection, progress=False)
    assert post.duration >= 10.0 - 1e-9
    # Nor when the run is taken up again, whatever is asked of it.
    with pytest.warns(UserWarning, match=ends), fp.connect(
        small.study, data=small.data, store=tmp_path / "store"
    ) as connection:  # fmt: skip
        assert same_bits(fp.sample(connection, ess=20, progress=False), post)
