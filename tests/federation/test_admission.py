"""Whom a coordinator admits and whom a site accepts as coordinator, over real TLS."""

import contextlib
import itertools
import logging
import queue
import shutil
import socket
import threading
import time

import grpc
import pytest
from tests.certificates.lists import write_list
from tests.federation.callers import dated, hello, says
from tests.federation.studies import same_bits

import fedpdmc as fp
import fedpdmc.certificates
from fedpdmc.certificates import Credentials, fingerprint, make_keys, read_credentials, revoke
from fedpdmc.errors import InputError, Refused
from fedpdmc.federation import messages as wire
from fedpdmc.federation.grpc import client, server
from fedpdmc.federation.grpc.client import serve
from fedpdmc.federation.grpc.tls import JOIN, SERVICE
from fedpdmc.federation.messages import MOST_BYTES


@pytest.fixture(scope="module")
def waiting(folder):
    """A coordinator that waits."""
    with folder.listening() as connection:
        yield connection


def test_a_site_holds_one_stream_and_says_in_time_who_it_is(folder, waiting, monkeypatch):
    """However many it opens: the coordinator's threads are there for all sites."""
    monkeypatch.setattr(server, "HELLO", 0.3)
    own, silence = read_credentials(folder.keys("north")), queue.SimpleQueue()
    secret = grpc.ssl_channel_credentials(own.authority, own.key, own.certificate)
    with grpc.secure_channel(waiting.address, secret, [("grpc.ssl_target_name_override", "coordinator")]) as channel:

        def opened(*messages):
            return channel.stream_stream(f"/{SERVICE}/{JOIN}")(
                itertools.chain(messages, iter(silence.get, None)), timeout=20
            )

        assert opened().code() is grpc.StatusCode.CANCELLED
        first = opened(hello(folder))
        assert isinstance(wire.decode(next(first)), wire.Welcome)
        second = opened(hello(folder))
        assert isinstance(wire.decode(next(second)), wire.Welcome)
        # It comes to its end by itself or is cut, whichever is first.
        assert first.code() in (grpc.StatusCode.OK, grpc.StatusCode.CANCELLED) and second.is_active()


def test_a_good_certificate_is_welcome(folder, waiting):
    assert isinstance(says(waiting.address, read_credentials(folder.keys("north")), hello(folder)), wire.Welcome)


def no_certificate(folder, tmp_path):
    return read_credentials(folder.keys("north"))._replace(key=None, certificate=None)


def foreign_authority(folder, tmp_path):
    make_keys(tmp_path, ["north"])
    own = read_credentials(tmp_path / "sites" / "north")
    return own._replace(authority=read_credentials(folder.keys("north")).authority)


DAY = 86400


def expired(folder, tmp_path):
    own = read_credentials(folder.keys("north"))
    return own._replace(certificate=dated(folder.path / "keys" / "authority", own.certificate, -9 * DAY, -DAY))


@pytest.mark.parametrize("who", [no_certificate, foreign_authority, expired])
def test_without_a_good_certificate_there_is_no_connection(folder, waiting, tmp_path, who):
    with pytest.raises(grpc.RpcError) as error:
        says(waiting.address, who(folder, tmp_path), hello(folder), wait=3.0)
    assert error.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (lambda folder: hello(folder, "south"), "NAME_NOT_IN_CERTIFICATE"),
        (lambda folder: hello(folder, study=bytes(32)), "OTHER_CONTRACT"),
        (lambda folder: b"GET / HTTP/1.1", "MALFORMED"),
        (lambda folder: wire.encode(wire.Welcome(bytes(16), folder.study.digest)), "MALFORMED"),
    ],
)
def test_a_site_speaks_as_itself_and_of_this_contract(folder, waiting, message, code, caplog):
    answer = says(waiting.address, read_credentials(folder.keys("north")), message(folder))
    assert isinstance(answer, wire.Refusal) and answer.code == code
    assert any(record.levelno == logging.WARNING for record in caplog.records)


def test_a_certificate_of_a_site_outside_the_study_is_not_enough(folder, waiting, tmp_path):
    make_keys(folder.path / "keys", ["west"])
    answer = says(waiting.address, read_credentials(folder.keys("west")), hello(folder, "west"))
    assert answer.code == "UNKNOWN_SITE"


@pytest.mark.parametrize("way", ["fingerprint", "list"])
def test_a_revoked_certificate_is_refused_and_its_open_stream_closed(
    folder, tmp_path, expected, caplog, monkeypatch, way
):
    """Shut out in the middle of a run: the run waits, refuses the old certificate, and goes on with a new one."""
    monkeypatch.setattr(fedpdmc.certificates, "SECONDS", 0.0)
    shutil.copytree(folder.path / "keys", tmp_path / "keys")
    place = tmp_path / "keys" / "coordinator"
    agents = {name: folder.agent(name, tmp_path / name) for name in folder.study.sites}
    south = agents.pop("south")
    answer, rounds = south.answer, []

    def shut_out(data):
        rounds.append(data)
        if len(rounds) == 9:
            if way == "list":
                write_list(place, tmp_path / "keys" / "authority", [old.certificate])
            else:
                revoke(place, [fingerprint(old.certificate)])
        return answer(data)

    south.answer = shut_out
    old = read_credentials(folder.keys("south"))
    make_keys(tmp_path / "keys", ["west"])
    shutil.rmtree(tmp_path / "keys" / "sites" / "south")
    make_keys(tmp_path / "keys", ["south"])
    new, refused = read_credentials(tmp_path / "keys" / "sites" / "south"), []

    def serve_south(address):
        try:
            serve(south, address, old, stop.wait)
        except Refused as error:
            refused.append(error.code)
            serve(south, address, new, stop.wait)

    stop = threading.Event()
    with folder.listening(keys=place) as connection, folder.sites(connection, agents):
        assert not isinstance(says(connection.address, old, hello(folder, "south")), wire.Refusal)
        worker = threading.Thread(target=serve_south, args=(connection.address,), daemon=True)
        worker.start()
        post = fp.sample(connection, progress=False)
        assert says(connection.address, old, hello(folder, "south")).code == "REVOKED"
        connection.finish()
        connection.close()
        stop.set()
        worker.join(20)
    south.log.close()
    assert refused == ["REVOKED"] and len(rounds) > 20
    assert any("has been revoked" in record.message for record in caplog.records)
    assert any("site south runs test, the coordinator fedpdmc" in record.message for record in caplog.records)
    assert same_bits(post, expected)


@pytest.mark.parametrize("whose", ["south", pytest.param("coordinator", marks=pytest.mark.long)])
def test_a_certificate_that_expires_ends_the_stream_and_a_renewed_one_goes_on(
    folder, tmp_path, expected, caplog, monkeypatch, whose
):
    """In the middle of a run, over real handshakes: the run waits, and comes to the same bits."""
    caplog.set_level(logging.INFO, "fedpdmc")
    monkeypatch.setattr(client, "LONGEST_WAIT", 0.25)
    shutil.copytree(folder.path / "keys", tmp_path / "keys")
    place = tmp_path / "keys" / ("coordinator" if whose == "coordinator" else "sites/south")
    written, good = place / "certificate.pem", (place / "certificate.pem").read_bytes()
    agents = {name: folder.agent(name, tmp_path / name) for name in folder.study.sites}
    south = agents.pop("south")
    answer, rounds, waits = south.answer, [], []

    def outlive(data):
        rounds.append(data)
        if len(rounds) == 9:
            time.sleep(max(end - time.time() + 0.05, 0.0))
        return answer(data)

    def wait(pause):
        # The third time that there is no connection, someone renews the certificate.
        waits.append(pause)
        if time.time() > end and len(waits) >= 3:
            written.write_bytes(good)
        return stop.wait(pause)

    south.answer, stop = outlive, threading.Event()
    written.write_bytes(dated(tmp_path / "keys" / "authority", good, -600, 3))
    end = fedpdmc.certificates.expiry(written.read_bytes())
    with folder.listening(keys=tmp_path / "keys" / "coordinator") as connection, folder.sites(connection, agents):
        own = read_credentials(tmp_path / "keys" / "sites" / "south")
        worker = threading.Thread(target=serve, args=(south, connection.address, own, wait), daemon=True)
        worker.start()
        post = fp.sample(connection, progress=False)
        connection.finish()
        connection.close()
        stop.set()
        worker.join(20)
        assert not worker.is_alive()
    south.log.close()
    assert len(rounds) > 20 and len(waits) >= 3
    said = [record.message for record in caplog.records]
    party = "the coordinator" if whose == "coordinator" else "site south"
    assert any(
        f"the certificate of {party} expired at" in line and "stream of site south is closed" in line for line in said
    )
    assert any(
        line.startswith("no connection") and ("this site expired" if whose == "south" else "UNAVAILABLE") in line
        for line in said
    )
    assert same_bits(post, expected)


def test_a_site_dials_again_in_time_for_a_handshake_to_check_the_coordinator(folder, expected, fresh, monkeypatch):
    """What it cannot see on a stream that is open."""
    monkeypatch.setattr(client, "MOST_AGE", 1.0)
    monkeypatch.setattr(client, "LONGEST_WAIT", 0.0)
    agents, joined, rounds = fresh(), [], []
    south = agents["south"]
    join, answer = south.join, south.answer

    def slow(data):
        rounds.append(data)
        if len(rounds) == 9:
            time.sleep(1.1)
        return answer(data)

    south.join, south.answer = lambda data: joined.append(data) or join(data), slow
    with folder.listening() as connection, folder.sites(connection, agents):
        post = fp.sample(connection, progress=False)
    assert len(joined) > 1
    assert same_bits(post, expected)


def test_a_message_that_would_unpack_to_more_is_not_taken(folder, waiting):
    """A small message could be a large one: nothing is unpacked, at either end."""
    own = read_credentials(folder.keys("north"))
    with pytest.raises(grpc.RpcError) as error:
        says(waiting.address, own, hello(folder), compression=grpc.Compression.Gzip)
    assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_a_message_above_the_limit_ends_the_stream(folder, waiting):
    with pytest.raises(grpc.RpcError) as error:
        says(waiting.address, read_credentials(folder.keys("north")), bytes(MOST_BYTES + 1))
    assert error.value.code() in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.CANCELLED)


def test_a_site_does_not_talk_to_whoever_is_not_the_coordinator(folder, tmp_path, monkeypatch):
    """Another site's certificate, of the same authority, behind the coordinator's address."""
    monkeypatch.setattr(server, "check_party", lambda credentials, name: None)
    impostor = server.StreamTransport(folder.study, bytes(16), "127.0.0.1:0", read_credentials(folder.keys("south")))
    tries = []
    agent = folder.agent("north", tmp_path)
    serve(
        agent,
        impostor.address,
        read_credentials(folder.keys("north")),
        lambda pause: bool(tries.append(pause)) or len(tries) > 1,
    )
    assert agent.run is None and len(tries) == 2
    agent.log.close()
    impostor.close()


def test_plain_connections_stay_on_loopback(folder, tmp_path):
    for address in ("0.0.0.0:0", "192.0.2.1:0", "example.org:0"):
        with pytest.raises(InputError, match="Plain connections"):
            folder.listening(listen=address, keys=None, plain_on_loopback=True)
    agent = folder.agent("north", tmp_path)
    with pytest.raises(InputError, match="Plain connections"):
        serve(agent, "192.0.2.1:4433", None)
    agent.log.close()
    with pytest.raises(InputError, match="keys"):
        folder.listening(keys=None)
    with pytest.raises(InputError, match="certificate of 'north'"):
        folder.listening(keys=folder.keys("north"))


def test_it_listens_on_the_address_it_is_given_and_no_other(waiting):
    host, port = waiting.address.rsplit(":", 1)
    with contextlib.closing(socket.create_connection((host, int(port)), 2)):
        pass
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.2", int(port)), 2)


def test_a_study_is_told_by_its_contract(waiting):
    with pytest.raises(InputError, match="chains: found 8. For a study it is said in the contract"):
        fp.sample(waiting, chains=8)
    with pytest.raises(InputError, match="connect"):
        fp.connect(waiting.study)


def test_credentials_are_not_mixed_up(folder, tmp_path):
    agent = folder.agent("north", tmp_path)
    with pytest.raises(InputError, match="certificate of 'south'"):
        serve(agent, "127.0.0.1:1", read_credentials(folder.keys("south")))
    agent.log.close()
    assert isinstance(read_credentials(folder.keys("north")), Credentials)
