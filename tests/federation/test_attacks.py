"""A coordinator under attack from its network, with real processes and sockets: it lives, and its sites get in."""

import contextlib
import itertools
import logging
import queue
import shutil
import time

import grpc
import pytest
from tests.federation.attackers import Flood, dial, idle_connections, still_open, wait_until
from tests.federation.callers import hello, says
from tests.federation.processes import Parties
from tests.federation.studies import SEED, SITE_SEED, Folder, same_bits

import fedpdmc as fp
from fedpdmc.certificates import fingerprint, make_keys, read_credentials, revoke
from fedpdmc.federation import messages
from fedpdmc.federation.grpc import server
from fedpdmc.federation.grpc.tls import JOIN, SERVICE


def few_descriptors(name, command):
    """With no more of them than a process usually has."""
    return ["bash", "-c", 'ulimit -n 1024; exec "$@"', "bash", *command] if name == "coordinator" else command


def renew(folder):
    """The coordinator gets a new key and certificate, file by file, as an operator would."""
    for file in ("certificate.pem", "key.pem"):
        (folder.keys("coordinator") / file).unlink()
    make_keys(folder.path / "keys", folder.study.sites)


@contextlib.contextmanager
def coordinator(folder):
    """A coordinator as a process of its own, which must live to the end."""
    parties = Parties(folder, (SEED, SITE_SEED), few_descriptors)
    try:
        parties.start("coordinator")
        log = folder.path / "coordinator.log"
        assert wait_until(lambda: "listening on" in log.read_text()), log.read_text()
        yield parties, log
        assert parties.running["coordinator"].poll() in (None, 0), log.read_text()[-2000:]
    finally:
        parties.stop()


def test_a_coordinator_under_attack_lives_lets_sites_in_and_renews_its_certificate(tmp_path):
    """Handshakes without a certificate and a thousand idle connections, while certificates are renewed."""
    folder = Folder(tmp_path)
    with coordinator(folder) as (parties, log), idle_connections(parties.address, 1000, "127.0.0.3") as idle:
        with Flood(parties.address) as flood:
            for _ in range(3):
                assert wait_until(lambda before=flood.tried: flood.tried > before + 300)
                renew(folder)
                # Renewed certificates are shown at once, and sites that hold their own get in.
                for name in folder.study.sites:
                    answer = says(parties.address, read_credentials(folder.keys(name)), hello(folder, name), wait=30.0)
                    shown = read_credentials(folder.keys("coordinator")).certificate
                    assert isinstance(answer, messages.Welcome) and answer.certificate == shown
        assert wait_until(lambda: still_open(idle) < 50)
        said = log.read_text()
    assert "renewed certificate" in said and "from 127.0.0.2 was shut down: more than" in said
    assert len(said.splitlines()) < 60


@pytest.mark.long
def test_a_coordinator_under_attack_keeps_its_run(tmp_path):
    """A whole run, and its store, between a thousand idle connections."""
    folder = Folder(tmp_path)
    expected = folder.in_process()
    with coordinator(folder) as (parties, _), idle_connections(parties.address, 1000, "127.0.0.3"):
        with Flood(parties.address) as flood:
            for name in folder.study.sites:
                parties.start(name)
            assert wait_until(lambda: flood.tried > 1000)
            renew(folder)
            parties.finish()
    assert same_bits(fp.load(parties.store("coordinator") / "posterior.zarr"), expected)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return Folder(tmp_path_factory.mktemp("study"))


@contextlib.contextmanager
def silent_streams(address, own, count):
    """Streams of one certificate on which nothing is said, each on a connection of its own."""
    secret = grpc.ssl_channel_credentials(own.authority, own.key, own.certificate)
    options = [("grpc.ssl_target_name_override", "coordinator"), ("grpc.use_local_subchannel_pool", 1)]
    silence, calls = queue.SimpleQueue(), []
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            channel = stack.enter_context(grpc.secure_channel(address, secret, options))
            calls.append(channel.stream_stream(f"/{SERVICE}/{JOIN}")(iter(silence.get, None), timeout=60))
        yield calls
        for call in calls:
            call.cancel()
            silence.put(None)


@pytest.mark.parametrize("revoked", [True, False])
def test_one_certificate_does_not_lock_other_sites_out(folder, tmp_path, revoked):
    """A revoked one, or a good one in wrong hands: as many silent streams as there were ever slots."""
    shutil.copytree(folder.path / "keys", tmp_path / "keys")
    south = read_credentials(folder.keys("south"))
    with folder.listening(keys=tmp_path / "keys" / "coordinator") as connection:
        if revoked:
            revoke(tmp_path / "keys" / "coordinator", [fingerprint(south.certificate)])
        with silent_streams(connection.address, south, 16) as calls:
            if revoked:
                for call in calls:
                    with contextlib.suppress(grpc.RpcError):
                        assert messages.decode(next(call)).code == "REVOKED"
            else:
                assert wait_until(lambda: sum(call.is_active() for call in calls) <= 1)
            assert isinstance(
                says(connection.address, read_credentials(folder.keys("north")), hello(folder)), messages.Welcome
            )
            if revoked:
                assert says(connection.address, south, hello(folder, "south")).code == "REVOKED"


def test_connections_that_say_nothing_are_few_and_end(folder, monkeypatch, caplog):
    caplog.set_level(logging.WARNING, "fedpdmc")
    with folder.listening() as connection:
        limits = server.ConnectionLimits.of(len(folder.study.sites))
        with idle_connections(connection.address, 60, "127.0.0.3") as held:
            assert wait_until(lambda: still_open(held) <= limits.each)
            # Another address is not concerned.
            with dial(connection.address, "127.0.0.4") as other:
                time.sleep(0.2)
                assert still_open([other]) == 1
            monkeypatch.setattr(server, "TIMEOUT", 0.5)
            assert wait_until(lambda: still_open(held) == 0)
    lines = [record.message for record in caplog.records if "127.0.0.3 was shut down" in record.message]
    assert 0 < len(lines) <= server.LINES


def test_a_site_that_is_admitted_stays_however_long_it_is_silent(folder, monkeypatch):
    monkeypatch.setattr(server, "TIMEOUT", 0.3)
    own, silence = read_credentials(folder.keys("north")), queue.SimpleQueue()
    secret = grpc.ssl_channel_credentials(own.authority, own.key, own.certificate)
    with folder.listening() as connection:
        options = [("grpc.ssl_target_name_override", "coordinator")]
        with grpc.secure_channel(connection.address, secret, options) as channel:
            call = channel.stream_stream(f"/{SERVICE}/{JOIN}")(
                itertools.chain([hello(folder)], iter(silence.get, None)), timeout=30
            )
            assert isinstance(messages.decode(next(call)), messages.Welcome)
            time.sleep(2.0)
            assert call.is_active()
            call.cancel()
            silence.put(None)


def test_lines_about_one_address_are_counted_not_written(caplog, monkeypatch):
    monkeypatch.setattr(server, "SECONDS_A_LINE", 0.2)
    lines = server.RateLimitedLog()
    for k in range(1000):
        lines.warn("192.0.2.1", "line %d", k)
    lines.warn("192.0.2.2", "of another")
    assert len(caplog.records) <= server.LINES + 2
    time.sleep(0.25)
    lines.warn("192.0.2.1", "the last")
    assert "that were not logged" in caplog.records[-1].message


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:192.0.2.7:4433", ("192.0.2.7", 4433)),
        ("ipv6:%5B2001:db8::1%5D:99", ("2001:db8::1", 99)),
        ("ipv6:%5B::ffff:192.0.2.7%5D:4433", ("192.0.2.7", 4433)),
        ("unix:whatever", ("unix:whatever", 0)),
    ],
)
def test_a_peer_is_an_address_and_a_port(peer, address):
    assert server.split_peer(peer) == address


def test_of_an_ipv6_address_the_network_counts():
    assert (
        server.source_network("2001:db8::1")
        == server.source_network("2001:db8::ffff")
        != server.source_network("2001:db9::1")
    )
    assert server.source_network("192.0.2.1") != server.source_network("192.0.2.2")
