"""Whom a site takes for its coordinator, and when it answers."""

import dataclasses
import datetime
import threading
import time
import types

import pytest
from tests.federation.studies import Folder

from fedpdmc.certificates import fingerprint, make_keys, read_credentials, revoke
from fedpdmc.federation import messages
from fedpdmc.federation.grpc import client, tls
from fedpdmc.federation.grpc.tls import next_hour, next_opening
from fedpdmc.federation.transport import Request


def at(hour, minute=0, day=1):
    return datetime.datetime(2026, 3, day, hour, minute)


@pytest.mark.parametrize(
    ("hours", "now", "expected"),
    [
        ((8, 18), at(12), None),
        ((8, 18), at(7, 59), at(8)),
        ((8, 18), at(18), at(8, day=2)),
        ((8, 18), at(8), None),
        ((20, 6), at(23), None),
        ((20, 6), at(3), None),
        ((20, 6), at(6), at(20)),
        ((0, 24), at(23, 59), None),
        ((22, 24), at(0), at(22)),
    ],
)
def test_hours_of_the_day(hours, now, expected):
    assert next_opening(hours, now) == (0.0 if expected is None else expected.timestamp())


def test_the_next_hour_is_ahead():
    assert next_hour(6, at(6)) == at(6, day=2).timestamp() and next_hour(24, at(6)) == at(0, day=2).timestamp()


def test_outside_its_hours_a_site_does_not_dial_and_a_stream_ends_with_them(tmp_path, caplog, monkeypatch):
    folder = Folder(tmp_path)
    agent, own, waits = folder.agent("north"), read_credentials(folder.keys("north")), []
    hour = datetime.datetime.now().hour
    closed = ((hour + 2) % 24, (hour + 3) % 24)
    with folder.listening() as connection:
        client.serve(
            agent,
            connection.address,
            own,
            lambda pause: bool(waits.append(pause)) or len(waits) > 1,
            tls.DialSettings(closed),
        )
        assert agent.run is None and f"answers from {closed[0]} to {closed[1]} o'clock" in caplog.text
        # In the middle of a stream: the next request after the end is not answered.
        later, ends, stop = [], time.time() + 3600, threading.Event()
        clock = types.SimpleNamespace(time=lambda: time.time() + 7200 * len(later), monotonic=time.monotonic)
        monkeypatch.setattr(client, "time", clock)
        monkeypatch.setattr(tls, "next_opening", lambda hours, now: float(len(later)))
        monkeypatch.setattr(tls, "next_hour", lambda hour, now: ends)
        words = (agent, connection.address, own, stop.wait, tls.DialSettings((8, 18)))
        worker = threading.Thread(target=client.serve, args=words)
        worker.start()
        while agent.run is None and worker.is_alive():
            time.sleep(0.01)
        later.append("it is")
        request = Request(b"too late")
        assert connection.transport._exchange([request, None], 2.0) == [None, None]
        stop.set()
        worker.join(30)
        assert not worker.is_alive()
    agent.log.close()
    assert agent.log.answers == 0


# whom a site takes for the coordinator ------------------------------------------------------------------------------


@pytest.fixture
def dials(tmp_path):
    """A study whose site north dials until it has joined, or so many times in vain."""
    folder = Folder(tmp_path)

    def dial(address, tries=3, settings=None, keys=None):
        agent, waits = folder.agent("north"), []
        own = read_credentials(keys or folder.keys("north"))

        def wait(_):
            waits.append(agent.run)
            time.sleep(0.02)
            return len(waits) >= tries

        worker = threading.Thread(target=client.serve, args=(agent, address, own, wait, settings), daemon=True)
        worker.start()
        while agent.run is None and worker.is_alive():
            time.sleep(0.01)
        return agent, worker

    dial.folder = folder
    return dial


def ended(connection, agent, worker):
    """The coordinator goes, and the site with it."""
    connection.close()
    worker.join(30)
    assert not worker.is_alive()
    agent.log.close()


def test_a_site_does_not_join_a_coordinator_that_it_has_revoked_and_joins_a_renewed_one(dials, caplog):
    folder = dials.folder
    old = read_credentials(folder.keys("coordinator"))
    revoke(folder.keys("north"), [fingerprint(old.certificate)])
    with folder.listening() as connection:
        agent, worker = dials(connection.address)
        worker.join(30)
        assert agent.run is None and not worker.is_alive()
        agent.log.close()
        assert "this site has revoked the coordinator's certificate" in caplog.text
        for file in ("key.pem", "certificate.pem"):
            (folder.keys("coordinator") / file).unlink()
        make_keys(folder.path / "keys", folder.study.sites)
        agent, worker = dials(connection.address)
        assert agent.run is not None
        ended(connection, agent, worker)


def test_revoked_in_the_middle_of_a_stream_the_coordinator_is_answered_no_more(dials, caplog, monkeypatch):
    monkeypatch.setattr("fedpdmc.certificates.SECONDS", 0.0)
    folder = dials.folder
    with folder.listening() as connection:
        agent, worker = dials(connection.address, tries=2)
        request = Request(b"what is this?")
        assert messages.decode(connection.transport._exchange([request, None], 20.0)[0]).code == "MALFORMED"
        revoke(folder.keys("north"), [fingerprint(read_credentials(folder.keys("coordinator")).certificate)])
        assert connection.transport._exchange([Request(b"and this?"), None], 1.0) == [None, None]
        ended(connection, agent, worker)
    assert "the certificate of the coordinator has been revoked" in caplog.text


def test_a_site_takes_the_certificate_that_its_policy_names_and_no_other(dials, caplog):
    folder = dials.folder
    own = fingerprint(read_credentials(folder.keys("coordinator")).certificate)
    with folder.listening() as connection:
        agent, worker = dials(connection.address, settings=tls.DialSettings(pinned=64 * "0"))
        assert agent.run is None and "not the one in the policy" in caplog.text
        agent.log.close()
        agent, worker = dials(connection.address, settings=tls.DialSettings(pinned=own))
        assert agent.run is not None
        ended(connection, agent, worker)


def test_the_coordinator_may_have_the_name_of_its_host(dials):
    folder = dials.folder
    for file in ("key.pem", "certificate.pem"):
        (folder.keys("coordinator") / file).unlink()
    make_keys(folder.path / "keys", folder.study.sites, hosts=["trial.example.org"])
    with folder.listening() as connection:
        agent, worker = dials(connection.address, settings=tls.DialSettings(server_name="other.example.org"))
        assert agent.run is None
        agent.log.close()
        agent, worker = dials(connection.address, settings=tls.DialSettings(server_name="trial.example.org"))
        assert agent.run is not None
        ended(connection, agent, worker)


def welcomed(folder, run=bytes(16), site="north", nonce=bytes(32), signs="coordinator", **changes):
    """A welcome that was signed for some site and nonce, by whoever."""
    own = read_credentials(folder.keys(signs))
    hello = messages.Hello(site, folder.study.digest, "test", nonce)
    told = messages.decode(tls.Admission(folder.study, own).welcome(run, hello))
    return messages.encode(dataclasses.replace(told, **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"site": "south"},
        {"nonce": bytes(31) + b"x"},
        {"signs": "south"},
        {"signature": b""},
        {"certificate": b""},
        {"certificate": b"-----BEGIN CERTIFICATE-----"},
        {"run": bytes(15) + b"x", "other_run": True},
    ],
    ids=str,
)
def test_a_welcome_that_was_signed_for_another_or_by_another_is_not_taken(dials, changes):
    """Who holds a revoked key and passes on what the coordinator says to others cannot speak for it."""
    folder = dials.folder
    own = read_credentials(folder.keys("north"))
    hello = messages.encode(messages.Hello("north", folder.study.digest, "test"))
    assert tls.DialSettings().check(own, hello, welcomed(folder)).certificates
    other = changes.pop("other_run", False)
    welcome = welcomed(folder, **changes)
    if other:
        welcome = messages.encode(dataclasses.replace(messages.decode(welcome), run=bytes(16)))
    with pytest.raises(tls.StreamExpired, match="has not proved"):
        tls.DialSettings().check(own, hello, welcome)
