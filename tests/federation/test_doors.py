"""When a site answers, by the hours of its day."""

import datetime
import threading
import time

import pytest
from tests.federation.studies import Folder

from fedpdmc.federation import doors, streams
from fedpdmc.federation.doors import next_hour, opens
from fedpdmc.keys import read_credentials


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
    assert opens(hours, now) == (0.0 if expected is None else expected.timestamp())


def test_the_next_hour_is_ahead():
    assert next_hour(6, at(6)) == at(6, day=2).timestamp() and next_hour(24, at(6)) == at(0, day=2).timestamp()


def test_outside_its_hours_a_site_does_not_dial_and_a_stream_ends_with_them(tmp_path, caplog, monkeypatch):
    folder = Folder(tmp_path)
    agent, own, waits = folder.agent("north"), read_credentials(folder.keys("north")), []
    hour = datetime.datetime.now().hour
    closed = ((hour + 2) % 24, (hour + 3) % 24)
    with folder.listening() as connection:
        streams.serve(agent, connection.address, own, lambda pause: bool(waits.append(pause)) or len(waits) > 1, closed)
        assert agent.run is None and f"answers from {closed[0]} to {closed[1]} o'clock" in caplog.text
        # In the middle of a stream: the next request after the end is not answered.
        ends = time.time() + 1.0
        monkeypatch.setattr(doors, "opens", lambda hours, now: 0.0 if time.time() < ends else ends + 3600)
        monkeypatch.setattr(doors, "next_hour", lambda hour, now: ends)
        stop = threading.Event()
        worker = threading.Thread(target=streams.serve, args=(agent, connection.address, own, stop.wait, (8, 18)))
        worker.start()
        while agent.run is None:
            time.sleep(0.01)
        time.sleep(max(ends - time.time(), 0.0) + 0.1)
        request = streams.Request(b"too late")
        assert connection.transport._exchange([request, None], 2.0) == [None, None]
        stop.set()
        worker.join(30)
        assert not worker.is_alive()
    agent.journal.close()
    assert agent.journal.answers == 0
