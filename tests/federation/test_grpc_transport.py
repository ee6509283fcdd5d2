"""gRPC with real TLS: the same bits as in process, whatever the network does, and nobody in who should not be."""

import base64
import contextlib
import dataclasses
import datetime
import itertools
import logging
import queue
import shutil
import socket
import threading
import time

import grpc
import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from tests.federation.proxy import Proxy
from tests.federation.studies import FEW_ROUNDS, SEED, SITE_SEED, Folder, same_bits

import fedpdmc as fp
import fedpdmc.certificates.keys
from fedpdmc.certificates.keys import Credentials, fingerprint, make_keys, read_credentials, revoke
from fedpdmc.errors import BadAnswer, InputError, Refused
from fedpdmc.federation import messages as wire
from fedpdmc.federation.grpc import transport
from fedpdmc.federation.grpc.transport import METHOD, SERVICE, serve
from fedpdmc.federation.remote import Request
from fedpdmc.federation.site_agent.agent import MOST_REFUSALS


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return Folder(tmp_path_factory.mktemp("study"))


@pytest.fixture(scope="module")
def expected(folder):
    return folder.in_process()


@pytest.fixture
def fresh(folder, tmp_path):
    """Agents with new logs."""
    return lambda: {name: folder.agent(name, tmp_path / name) for name in folder.study.sites}


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
    assert np.all(post.gradient_evaluations > post.rounds)


def test_bits_do_not_depend_on_a_network_that_delays_and_cuts(folder, expected, fresh, caplog):
    with folder.listening() as connection, Proxy(connection.address, delay=0.002, cut_after=6000) as proxy:
        with folder.sites(connection, fresh(), proxy.address):
            post = fp.sample(connection, progress=False)
    assert proxy.cuts > 2
    assert same_bits(post, expected)
    assert any("is lost; the run waits for it" in record.message for record in caplog.records)


def test_a_site_that_stalls_is_named_in_a_line(folder, fresh, caplog, monkeypatch):
    monkeypatch.setattr(transport, "STALLED", 0.2)
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
    monkeypatch.setattr(transport, "PARTING", 30.0 if returns else 0.5)
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
    south.journal.close()
    silent = any("south has not said that it knows" in record.message for record in caplog.records)
    assert silent is not returns


class Connector(Proxy):
    """An HTTP proxy that knows one word, CONNECT."""

    def __init__(self):
        super().__init__("127.0.0.1:0")
        self.asked, self.credentials = [], []

    def _accept(self):
        while True:
            try:
                site, _ = self._server.accept()
            except OSError:
                return
            head = b""
            while b"\r\n\r\n" not in head:
                head += site.recv(4096)
            self.asked.append(head.split()[0].decode())
            self.credentials += [
                line for line in head.split(b"\r\n") if line.lower().startswith(b"proxy-authorization")
            ]
            host, port = head.split()[1].decode().rsplit(":", 1)
            coordinator = socket.create_connection((host, int(port)))
            site.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            self._open += [site, coordinator]
            for pair in ((site, coordinator), (coordinator, site)):
                threading.Thread(target=self._pass, args=(*pair, None, None), daemon=True).start()


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
        with pytest.raises(InputError, match="begun with keep='draws'"):
            fp.sample(connection, duration=5.0, progress=False)


# who may come in ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def door(folder):
    """A coordinator that waits."""
    with folder.listening() as connection:
        yield connection


def says(address, credentials, *messages, wait=5.0, compression=None):
    """Dial, say something, and return the first answer."""
    outgoing = queue.SimpleQueue()
    for message in messages:
        outgoing.put(message)
    options = [("grpc.ssl_target_name_override", "coordinator"), ("grpc.max_send_message_length", 2**30)]
    secret = grpc.ssl_channel_credentials(credentials.authority, credentials.key, credentials.certificate)
    with grpc.secure_channel(address, secret, options, compression) as channel:
        call = channel.stream_stream(f"/{SERVICE}/{METHOD}")(iter(outgoing.get, None), timeout=wait)
        try:
            return wire.decode(next(call))
        finally:
            outgoing.put(None)


def hello(folder, site="north", study=None):
    return wire.encode(wire.Hello(site, study or folder.study.digest, "test"))


def test_a_site_holds_one_stream_and_says_in_time_who_it_is(folder, door, monkeypatch):
    """However many it opens: the coordinator's threads are there for all sites."""
    monkeypatch.setattr(transport, "HELLO", 0.3)
    own, silence = read_credentials(folder.keys("north")), queue.SimpleQueue()
    secret = grpc.ssl_channel_credentials(own.authority, own.key, own.certificate)
    with grpc.secure_channel(door.address, secret, [("grpc.ssl_target_name_override", "coordinator")]) as channel:

        def opened(*messages):
            return channel.stream_stream(f"/{SERVICE}/{METHOD}")(
                itertools.chain(messages, iter(silence.get, None)), timeout=20
            )

        assert opened().code() is grpc.StatusCode.CANCELLED
        first = opened(hello(folder))
        assert isinstance(wire.decode(next(first)), wire.Welcome)
        second = opened(hello(folder))
        assert isinstance(wire.decode(next(second)), wire.Welcome)
        # It comes to its end by itself or is cut, whichever is first.
        assert first.code() in (grpc.StatusCode.OK, grpc.StatusCode.CANCELLED) and second.is_active()


def test_a_good_certificate_is_welcome(folder, door):
    assert isinstance(says(door.address, read_credentials(folder.keys("north")), hello(folder)), wire.Welcome)


def no_certificate(folder, tmp_path):
    return read_credentials(folder.keys("north"))._replace(key=None, certificate=None)


def foreign_authority(folder, tmp_path):
    make_keys(tmp_path, ["north"])
    own = read_credentials(tmp_path / "sites" / "north")
    return own._replace(authority=read_credentials(folder.keys("north")).authority)


def dated(authority, certificate, begin, end):
    """The same certificate with other dates, in seconds from now."""
    key = serialization.load_pem_private_key((authority / "key.pem").read_bytes(), None)
    old, now = x509.load_pem_x509_certificate(certificate), datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(old.issuer, old.subject, old.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now + datetime.timedelta(seconds=begin)).not_valid_after(
        now + datetime.timedelta(seconds=end)
    )
    for extension in old.extensions:
        builder = builder.add_extension(extension.value, extension.critical)
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


DAY = 86400


def expired(folder, tmp_path):
    own = read_credentials(folder.keys("north"))
    return own._replace(certificate=dated(folder.path / "keys" / "authority", own.certificate, -9 * DAY, -DAY))


@pytest.mark.parametrize("who", [no_certificate, foreign_authority, expired])
def test_without_a_good_certificate_there_is_no_connection(folder, door, tmp_path, who):
    with pytest.raises(grpc.RpcError) as error:
        says(door.address, who(folder, tmp_path), hello(folder), wait=3.0)
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
def test_a_site_speaks_as_itself_and_of_this_contract(folder, door, message, code, caplog):
    answer = says(door.address, read_credentials(folder.keys("north")), message(folder))
    assert isinstance(answer, wire.Refusal) and answer.code == code
    assert any(record.levelno == logging.WARNING for record in caplog.records)


def test_a_certificate_of_a_site_outside_the_study_is_not_enough(folder, door, tmp_path):
    make_keys(folder.path / "keys", ["west"])
    answer = says(door.address, read_credentials(folder.keys("west")), hello(folder, "west"))
    assert answer.code == "UNKNOWN_SITE"


def test_a_revoked_certificate_is_refused_and_its_open_stream_closed(folder, tmp_path, expected, caplog, monkeypatch):
    """Shut out in the middle of a run: the run waits, refuses the old certificate, and goes on with a new one."""
    monkeypatch.setattr(fedpdmc.certificates.keys, "SECONDS", 0.0)
    shutil.copytree(folder.path / "keys", tmp_path / "keys")
    place = tmp_path / "keys" / "coordinator"
    agents = {name: folder.agent(name, tmp_path / name) for name in folder.study.sites}
    south = agents.pop("south")
    answer, rounds = south.answer, []

    def shut_out(data):
        rounds.append(data)
        if len(rounds) == 9:
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
    south.journal.close()
    assert refused == ["REVOKED"] and len(rounds) > 20
    assert any("has been revoked" in record.message for record in caplog.records)
    assert any("site south runs test, and this is fedpdmc" in record.message for record in caplog.records)
    assert same_bits(post, expected)


@pytest.mark.parametrize("whose", ["south", pytest.param("coordinator", marks=pytest.mark.long)])
def test_a_certificate_that_expires_ends_the_stream_and_a_renewed_one_goes_on(
    folder, tmp_path, expected, caplog, monkeypatch, whose
):
    """In the middle of a run, over real handshakes: the run waits, and comes to the same bits."""
    caplog.set_level(logging.INFO, "fedpdmc")
    monkeypatch.setattr(transport, "LONGEST_WAIT", 0.25)
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
    end = fedpdmc.certificates.keys.expiry(written.read_bytes())
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
    south.journal.close()
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


def test_a_site_dials_anew_in_time_for_a_handshake_to_check_the_coordinator(folder, expected, fresh, monkeypatch):
    """What it cannot see on a stream that is open."""
    monkeypatch.setattr(transport, "MOST_AGE", 1.0)
    monkeypatch.setattr(transport, "LONGEST_WAIT", 0.0)
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


def test_a_message_that_would_unpack_to_more_is_not_taken(folder, door):
    """A small message could be a large one: nothing is unpacked, at either end."""
    own = read_credentials(folder.keys("north"))
    with pytest.raises(grpc.RpcError) as error:
        says(door.address, own, hello(folder), compression=grpc.Compression.Gzip)
    assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_a_message_above_the_limit_ends_the_stream(folder, door):
    with pytest.raises(grpc.RpcError) as error:
        says(door.address, read_credentials(folder.keys("north")), bytes(wire.MOST_BYTES + 1))
    assert error.value.code() in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.CANCELLED)


def test_a_site_does_not_talk_to_whoever_is_not_the_coordinator(folder, tmp_path, monkeypatch):
    """Another site's certificate, of the same authority, behind the coordinator's address."""
    from fedpdmc.federation.grpc import transport

    monkeypatch.setattr(transport, "check_party", lambda credentials, name: None)
    impostor = transport.StreamTransport(folder.study, bytes(16), "127.0.0.1:0", read_credentials(folder.keys("south")))
    tries = []
    agent = folder.agent("north", tmp_path)
    serve(
        agent,
        impostor.address,
        read_credentials(folder.keys("north")),
        lambda pause: bool(tries.append(pause)) or len(tries) > 1,
    )
    assert agent.run is None and len(tries) == 2
    agent.journal.close()
    impostor.close()


def test_plain_connections_stay_on_loopback(folder, tmp_path):
    for address in ("0.0.0.0:0", "192.0.2.1:0", "example.org:0"):
        with pytest.raises(InputError, match="Plain connections"):
            folder.listening(listen=address, keys=None, plain_on_loopback=True)
    agent = folder.agent("north", tmp_path)
    with pytest.raises(InputError, match="Plain connections"):
        serve(agent, "192.0.2.1:4433", None)
    agent.journal.close()
    with pytest.raises(InputError, match="keys"):
        folder.listening(keys=None)
    with pytest.raises(InputError, match="certificate of 'north'"):
        folder.listening(keys=folder.keys("north"))


def test_it_listens_on_the_address_it_is_given_and_no_other(door):
    host, port = door.address.rsplit(":", 1)
    with contextlib.closing(socket.create_connection((host, int(port)), 2)):
        pass
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.2", int(port)), 2)


# sites that answer what they should not -----------------------------------------------------------------------------


def altered(agent, change):
    """The agent with its answers to plans changed on their way out."""
    answer = agent.answer

    def changed(data):
        return change(answer(data), data)

    agent.answer = changed
    return agent


def rewrite(**fields):
    def change(data, request):
        message = wire.decode(data)
        if not isinstance(message, wire.Arrivals):
            return data
        values = {name: getattr(message, name) for name in message.__dataclass_fields__}
        return wire.encode(wire.Arrivals(**{**values, **{name: make(message) for name, make in fields.items()}}))

    return change


def opened(data, request):
    message = wire.decode(data)
    return wire.encode(wire.Opened(message.run, message.sequence, message.request))


def budgeted(data, request):
    """A privacy budget that nobody has asked for."""
    message = wire.decode(data)
    if not isinstance(message, wire.Opened):
        return data
    return wire.encode(dataclasses.replace(message, remaining=5.0, account=np.arange(13.0)))


BAD = {
    "budget": budgeted,
    "garbage": lambda data, request: b"\x00" * 40,
    "truncated": lambda data, request: data[:-3],
    "nan": rewrite(time=lambda m: np.full_like(m.time, np.nan)),
    "late": rewrite(time=lambda m: m.time + 1e3),
    "no coordinate": rewrite(coordinate=lambda m: m.coordinate + 7, rang=lambda m: np.ones(len(m.time))),
    "chains": rewrite(time=lambda m: m.time[:2], rang=lambda m: m.rang[:2], coordinate=lambda m: m.coordinate[:2]),
    "normals": rewrite(coordinate=lambda m: m.coordinate[:0], normal=lambda m: np.eye(3)[np.zeros(len(m.time), int)]),
    "at once": rewrite(time=lambda m: 0 * m.time, rang=lambda m: np.ones(len(m.time))),
    "other kind": lambda data, request: opened(data, request) if wire.decode(request).kind == 7 else data,
    "other round": rewrite(sequence=lambda m: m.sequence + 1),
}


@pytest.mark.parametrize("change", BAD.values(), ids=BAD)
def test_a_bad_answer_stops_the_run_and_names_the_site(folder, fresh, change):
    agents = fresh()
    altered(agents["south"], change)
    with folder.listening() as connection, folder.sites(connection, agents):
        with pytest.raises(BadAnswer) as error:
            fp.sample(connection, progress=False)
    assert error.value.site == "south"


@pytest.mark.parametrize("change", [lambda h: h * 1e200, lambda h: h + np.triu(np.ones_like(h), 1)])
def test_a_hessian_that_cannot_be_one_stops_the_run_and_names_the_site(tmp_path, change):
    few = Folder(tmp_path, FEW_ROUNDS)

    def changed(data, request):
        message = wire.decode(data)
        if not isinstance(message, wire.Derivatives):
            return data
        return wire.encode(dataclasses.replace(message, hessian=change(message.hessian)))

    with fp.connect(few.study, data=few.data, seed=SEED) as connection:
        altered(connection.transport.agents[1], changed)
        with pytest.raises(BadAnswer, match="'south': a Hessian"):
            fp.sample(connection, progress=False)


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
        south.journal.close()
    assert same_bits(post, expected)
    assert sum("answer to another request" in record.message for record in caplog.records) > 10


def _stutter(folder, address, agent):
    own = read_credentials(folder.keys("south"))
    secret = grpc.ssl_channel_credentials(own.authority, own.key, own.certificate)
    outgoing, last = queue.SimpleQueue(), None
    with grpc.secure_channel(address, secret, options=[("grpc.ssl_target_name_override", "coordinator")]) as channel:
        call = channel.stream_stream(f"/{SERVICE}/{METHOD}")(iter(outgoing.get, None))
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


def test_a_refusal_reaches_the_coordinator_with_its_code(folder, fresh):
    agents = fresh()
    object.__setattr__(agents["south"].study, "rounds", 5)
    try:
        with folder.listening() as connection, folder.sites(connection, agents):
            with pytest.raises(Refused, match="'south' refused .*TOO_MANY_ROUNDS|'north' refused .*TOO_MANY_ROUNDS"):
                fp.sample(connection, progress=False)
    finally:
        object.__setattr__(folder.study, "rounds", 2000)


def test_a_site_stops_a_coordinator_that_asks_nothing_but_what_it_may_not(folder, fresh):
    """It ends with a sentence that says what to do, and the coordinator waits for it as for any that is lost."""
    agents, ends = fresh(), []
    south = agents.pop("south")

    def run(address):
        try:
            serve(south, address, read_credentials(folder.keys("south")), stop.wait)
        except Refused as error:
            ends.append(str(error))

    stop = threading.Event()
    with folder.listening() as connection:
        worker = threading.Thread(target=run, args=(connection.address,), daemon=True)
        worker.start()
        for k in range(MOST_REFUSALS):
            _, data = connection.transport._exchange([None, Request(b"no request %d" % k)], 20.0)
            assert wire.decode(data).code == "MALFORMED"
        assert connection.transport._exchange([None, Request(b"once more")], 1.0) == [None, None]
        worker.join(20)
        assert not worker.is_alive() and "lost" in connection.transport.status()
        stop.set()
    for agent in (south, *agents.values()):
        agent.journal.close()
    assert len(ends) == 1 and "TOO_MANY_REFUSALS" in ends[0] and "audit show" in ends[0]


def test_a_study_is_told_by_its_contract(door):
    with pytest.raises(InputError, match="chains: found 8. For a study it is said in the contract"):
        fp.sample(door, chains=8)
    with pytest.raises(InputError, match="connect"):
        fp.connect(door.study)


def test_credentials_are_not_mixed_up(folder, tmp_path):
    agent = folder.agent("north", tmp_path)
    with pytest.raises(InputError, match="certificate of 'south'"):
        serve(agent, "127.0.0.1:1", read_credentials(folder.keys("south")))
    agent.journal.close()
    assert isinstance(read_credentials(folder.keys("north")), Credentials)


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
