"""The status of a run, over real sockets, while it goes on: right, read-only, and closed to those it is not for."""

import contextlib
import http.server
import json
import logging
import math
import queue
import re
import socket
import sys
import threading
import time
import urllib.error
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.federation.processes import Parties, free_port
from tests.federation.studies import Folder

import fedpdmc as fp
from fedpdmc.errors import InputError
from fedpdmc.operations import status
from fedpdmc.operations import status_page as status_server
from fedpdmc.operations.status import MOST_POINTS, CoordinatorBoard, History, Silence, SiteBoard, Watching, watched
from fedpdmc.operations.status_page import StatusServer, TimeSeries, metrics, page, plot, ticks

HOSTILE = '</title><script>alert(1)</script>"&\n'


def get(address, path="", host=None, method="GET"):
    request = urllib.request.Request(address + path, method=method, headers={} if host is None else {"Host": host})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, dict(answer.headers), answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, dict(error.headers), error.read().decode()


def until(ready, seconds=60):
    end = time.monotonic() + seconds
    while not (found := ready()):
        assert time.monotonic() < end
        time.sleep(0.05)
    return found


def facts(**changes):
    site = {
        "name": HOSTILE, "connected": True, "since_seconds": 3.0, "round_trip_seconds": 0.012, "waited_seconds": 2.0,
        "privacy_spent": 0.25,
    }  # fmt: skip
    points = [
        {"seconds": float(t), "rounds": 3 * t, "process_time": 0.5 * t, "worst_ess": None if t < 4 else 10.0 * t,
         "worst_rhat": None, "round_trip_seconds": {HOSTILE: 0.01}}
        for t in range(10)
    ]  # fmt: skip
    return {
        "party": "coordinator", "name": "coordinator", "study": HOSTILE, "contract": "ab", "run": "cd",
        "software": "fedpdmc",
        "time": "2026-01-01", "uptime_seconds": 9.0, "phase": "sampling", "share": 0.5, "seconds_left": 9.0, "rounds": 27,
        "process_time": 4.5, "until": 9.0, "worst_ess": 90.0, "ess_wanted": 400.0, "worst_rhat": None, "joined": 1,
        "sites": [site], "waiting": [{"for": HOSTILE, "seconds": 2.0, "connected": True}],
        "stalls": [{"for": HOSTILE, "seconds": 400.0, "connected": False}],
        "history": points,
    } | changes  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return Folder(tmp_path_factory.mktemp("study"))


def test_a_run_is_seen_from_both_sides_while_it_goes_on(folder, tmp_path, caplog, monkeypatch):
    """A coordinator waits for a site: the page says so, then the log and a command; when it comes the run goes on."""
    caplog.set_level(logging.INFO, "fedpdmc")
    monkeypatch.setattr(status, "SECONDS", 0.05)
    monkeypatch.setattr(status, "LINE_SECONDS", 0.2)
    told = tmp_path / "told"
    script = (
        "import os, sys; e = os.environ; print(e['FEDPDMC_STATE'], e['FEDPDMC_STALL'], file=open(sys.argv[1], 'a'))"
    )
    command = f'{sys.executable} -c "{script}" {told}'
    agents = {name: folder.agent(name, store=tmp_path / name) for name in folder.study.sites}
    with folder.listening() as connection:
        board = CoordinatorBoard(connection)
        with watched(board, Watching("127.0.0.1:0", command, 0.5)) as address:
            found = []
            sampling = threading.Thread(target=lambda: found.append(fp.sample(connection, progress=False)))
            sampling.start()
            until(lambda: told.exists() and "stalled nothing from site south" in told.read_text())
            seen = json.loads(get(address, "status.json")[2])
            assert seen["joined"] == 0 and {stall["for"] for stall in seen["stalls"]} == {"site north", "site south"}
            assert not any(stall["connected"] for stall in seen["stalls"])
            assert "Stalled: nothing from site north" in get(address)[2] and "stall: nothing from site" in caplog.text
            assert (
                "fedpdmc_stalls 2" in get(address, "metrics")[2] and "stalled: site south" in get(address, "healthz")[2]
            )
            own = SiteBoard(agents["north"], connection.address)
            with watched(own, Watching("127.0.0.1:0")) as other, folder.sites(connection, agents):
                sampling.join(120)
                assert found
                until(lambda: "over no longer stalled: site south" in told.read_text())
                seen = json.loads(get(address, "status.json")[2])
                theirs = json.loads(get(other, "status.json")[2])
                pages = get(address)[2], get(other)[2]
                values = dict(re.findall(r"^(fedpdmc_\w+(?:{[^}]*})?) (\S+)$", get(address, "metrics")[2], re.M))
    post = found[0]
    lines = [
        json.loads(one.message.removeprefix("facts ")) for one in caplog.records if one.message.startswith("facts ")
    ]
    assert {line["name"] for line in lines} == {"coordinator", "north"} and lines[0]["stalls"] is not None
    assert seen["joined"] == 2 and not seen["stalls"] and seen["rounds"] == post.rounds and seen["share"] == 1.0
    assert seen["worst_ess"] == pytest.approx(min(post.ess().values()))
    assert seen["worst_rhat"] == pytest.approx(max(post.rhat().values()))
    assert [site["name"] for site in seen["sites"]] == ["north", "south"]
    assert all(0 < site["round_trip_seconds"] < 60 for site in seen["sites"])
    assert (
        float(values["fedpdmc_rounds_total"]) == post.rounds and values['fedpdmc_site_connected{site="south"}'] == "1.0"
    )
    assert theirs["connected"] and theirs["answers"] == agents["north"].log.answers > 0 and theirs["run"] == seen["run"]
    assert theirs["process_time"] == pytest.approx(agents["north"].observed_time)
    assert len(seen["history"]) > 2 and seen["history"][-1]["rounds"] is not None
    for text in pages:
        assert "<svg" in text and "<script" not in text and "http://" not in text and "https://" not in text


def test_nothing_of_what_a_contract_says_becomes_html():
    text = page(facts())
    assert "<script" not in text and "&lt;script&gt;" in text and text.count("</title>") == 1
    lines = metrics(facts()).splitlines()
    assert all(re.fullmatch(r'(# .*|fedpdmc_\w+({(\w+="([^"\\]|\\.)*",?)*})? \S+)', line) for line in lines)
    own = {
        "party": "site", "name": HOSTILE, "connected": False, "coordinator": HOSTILE, "heard_seconds_ago": 4.0, "answers": 3,
        "most_answers": 9, "process_time": 2.0, "most_process_time": 8.0, "refusals": 0, "answer_seconds": None,
        "privacy_spent": 0.5, "history": [{"seconds": 1.0, "answers": 3}],
    }  # fmt: skip
    text = page(facts(**own))
    assert "<script" not in text and "50 %" in text


# Names and types as in earlier versions: dashboards and alerts refer to them.
COUNTERS = {"answers_total", "rounds_total"}
GAUGES = set(
    "answer_seconds answers_limit connected ess_goal heard_seconds info privacy_spent_ratio process_time process_time_goal "
    "process_time_limit refusals site_connected site_privacy_spent_ratio site_round_trip_seconds site_waited_seconds "
    "sites_joined stall_seconds stalls uptime_seconds worst_ess worst_rhat".split()
)


def test_metrics_keep_their_names_types_and_labels():
    own = {"connected": False, "heard_seconds_ago": 4.0, "answers": 3, "most_answers": 9, "most_process_time": 8.0}
    own |= {"refusals": 0, "answer_seconds": 0.5, "privacy_spent": 0.5}
    text = metrics(facts(worst_rhat=1.01, **own))
    types = dict(re.findall(r"^# TYPE fedpdmc_(\w+) (\w+)$", text, re.M))
    assert types == dict.fromkeys(COUNTERS, "counter") | dict.fromkeys(GAUGES, "gauge")
    families = {sample.name: sample for family in text_string_to_metric_families(text) for sample in family.samples}
    assert len(families) == len(COUNTERS | GAUGES)
    assert set(families["fedpdmc_info"].labels) == {"party", "name", "study", "software"}
    assert (
        families["fedpdmc_site_connected"].labels == {"site": HOSTILE} and families["fedpdmc_rounds_total"].value == 27
    )
    # A number that is not known has no metric; a site that is not waited for has waited for no time.
    silent = facts()["sites"][0] | {"waited_seconds": None, "privacy_spent": None}
    text = metrics(facts(sites=[silent], stalls=[]))
    assert "worst_rhat" not in text and "site_privacy" not in text and "stall_seconds" not in text
    assert re.search(r"^fedpdmc_site_waited_seconds{.*} 0.0$", text, re.M)


def test_only_reading_and_only_by_an_address_of_this_host(monkeypatch):
    server = StatusServer("127.0.0.1:0", facts)
    try:
        code, headers, text = get(server.address)
        assert code == 200 and "Stalled" in text
        assert (
            headers["Content-Security-Policy"].startswith("default-src 'none'")
            and headers["Cache-Control"] == "no-store"
        )
        # A name that someone else owns may point here: it gets nothing.
        for host in ("evil.example", "evil.example:8080", "127.0.0.1.evil.example", "[", ""):
            code, _, text = get(server.address, host=host)
            assert code in (400, 421) and "Stalled" not in text
        for host in ("localhost:9999", "127.0.0.1", "[::1]:8080", "192.0.2.7"):
            assert get(server.address, host=host)[0] == 200
        for method in ("POST", "PUT", "DELETE", "HEAD", "OPTIONS", "TRACE"):
            code, headers, text = get(server.address, method=method)
            assert code == 405 and headers["Allow"] == "GET" and "Stalled" not in text
        for path in ("../../etc/passwd", "/[", "?x", "healthz?<script>"):
            assert get(server.address, path)[0] in (200, 404)
        # Numbers that JSON does not have.
        monkeypatch.setattr(server._server, "facts", lambda: facts(worst_ess=math.inf, worst_rhat=math.nan))
        assert json.loads(get(server.address, "status.json")[2])["worst_rhat"] is None
        assert get(server.address)[0] == 200
    finally:
        server.close()


def test_connections_that_say_nothing_are_few_and_are_ended(monkeypatch):
    monkeypatch.setattr(status_server, "MOST_SECONDS", 0.5)
    server = StatusServer("127.0.0.1:0", facts)
    where = ("127.0.0.1", int(server.address.rsplit(":", 1)[1].strip("/")))
    try:
        idle = [socket.create_connection(where, 30) for _ in range(3 * status_server.MOST_CONNECTIONS)]
        for one in idle:
            # A byte now and then does not prolong it.
            with one:
                one.settimeout(30)
                try:
                    one.sendall(b"G")
                    while one.recv(1024):
                        pass
                except ConnectionError:
                    pass
        assert get(server.address)[0] == 200
    finally:
        server.close()


def test_an_address_that_is_taken_or_is_none_and_a_command_that_is_none():
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(InputError, match="cannot be bound"):
        StatusServer(f"127.0.0.1:{taken.getsockname()[1]}", facts)
    with pytest.raises(InputError, match="host:port"):
        StatusServer("8080", facts)
    for wrong in ('mail "', " "):
        with pytest.raises(InputError, match="on-stall"):
            status.alerts(wrong, None)


NEWS = status.StallNews(
    "stalled", "nothing from site south for 300 s", "site south", 300, "coordinator", "two hospitals"
)


@contextlib.contextmanager
def webhook(answer):
    """A server that does what ``answer`` does with each request; yields its address and what was posted."""
    posted = queue.Queue()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            posted.put((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
            answer(self)

        def do_GET(self):
            posted.put(("GET", self.path))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/hook?token=hunter2", posted
        finally:
            server.shutdown()
            thread.join()


def status_code(code, **headers):
    def answer(handler):
        handler.send_response(code)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    return answer


def test_a_webhook_is_posted_the_stall_and_its_end(folder, caplog, monkeypatch):
    """Of a coordinator that waits for its sites, over HTTP; the sentence and the facts, and nothing of the contract."""
    monkeypatch.setattr(status, "SECONDS", 0.05)
    with webhook(status_code(204)) as (url, posted), folder.listening() as connection:
        board = CoordinatorBoard(connection)
        monkeypatch.setattr(board, "silent", lambda: {"site south": Silence(9.0, False)} if not over.is_set() else {})
        over = threading.Event()
        with watched(board, Watching(stall_after=0.5, stall_webhook=url)):
            path, begun = posted.get(timeout=60)
            over.set()
            _, ended = posted.get(timeout=60)
    assert path == "/hook?token=hunter2" and set(begun) == {"text", *status.StallNews._fields}
    assert begun["state"] == "stalled" and begun["waiting_for"] == "site south" and begun["seconds"] == 9
    assert begun["text"] == "two hospitals, coordinator: nothing from site south for 9 s; it is not connected"
    assert ended["state"] == "over" and "hunter2" not in caplog.text


def test_a_webhook_that_fails_or_hangs_is_logged_without_its_secret_and_delays_nothing(caplog, monkeypatch):
    monkeypatch.setattr(status, "MOST_STEP", 1.0)
    hang = threading.Event()
    answers = {
        "status 500": status_code(500),
        "status 302": status_code(302, Location="/elsewhere"),
        "could not be reached (TimeoutError)": lambda handler: hang.wait(30),
    }
    for said, answer in answers.items():
        caplog.clear()
        with webhook(answer) as (url, posted):
            one = status.WebhookAlert(url)
            one(NEWS)
            posted.get(timeout=60)
            until(lambda said=said: said in caplog.text)
            until(lambda one=one: one._places._value == status.MOST_POSTS)
            # A redirection is not followed.
            assert all(path != "GET" for path, _ in iter_queue(posted))
        assert "hunter2" not in caplog.text
    hang.set()
    caplog.clear()
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    status.WebhookAlert(f"http://127.0.0.1:{port}/hunter2")(NEWS)
    until(lambda: f"the webhook at 127.0.0.1:{port} could not be reached" in caplog.text)
    assert "hunter2" not in caplog.text


def test_posts_to_a_webhook_that_hangs_are_few(caplog, monkeypatch):
    hang = threading.Event()
    with webhook(lambda handler: hang.wait(30)) as (url, posted):
        one = status.WebhookAlert(url)
        # The calls return while the server hangs.
        for _ in range(3 * status.MOST_POSTS):
            one(NEWS)
        assert caplog.text.count("still busy") == 2 * status.MOST_POSTS
        hang.set()
        until(lambda: one._places._value == status.MOST_POSTS)


def iter_queue(items):
    with contextlib.suppress(queue.Empty):
        while True:
            yield items.get_nowait()


@pytest.mark.parametrize(
    "url",
    ["", "ftp://host/", "https://", "https://user:hunter2@host/", "file:///etc/passwd", "http://[::1", "https://host:99999/",
     "https://a b/hunter2", "https://host/\r\nX: hunter2", "hunter2"],
)  # fmt: skip
def test_an_address_that_is_no_webhook_is_refused_without_being_shown(url):
    with pytest.raises(InputError, match="stall-webhook") as error:
        status.alerts(None, url)
    assert "hunter2" not in str(error.value)


def test_a_history_does_not_grow():
    history = History()
    for number in range(10 * MOST_POINTS):
        history.add({"seconds": float(number)})
    times = [point["seconds"] for point in history.points()]
    assert len(times) <= MOST_POINTS and times == sorted(times) and times[-1] > 9 * MOST_POINTS
    assert len({b - a for a, b in zip(times, times[1:], strict=False)}) == 1


@pytest.mark.parametrize("values", [(0.0, 0.0), (1.0, 1.0), (1.003, 1.0031), (-5.0, 3.0), (1e-9, 2e-9), (7.0, 9e12)])
def test_ticks_are_round_and_enclose(values):
    found = ticks(*values)
    assert 2 <= len(found) <= 8 and found[0] <= values[0] + 1e-12 and found[-1] >= values[1] * (1 - 1e-9)


def test_a_plot_stays_within_its_frame_and_breaks_where_nothing_is_known():
    drawn = plot("t", [TimeSeries("a", [(0.0, 1.0), (1.0, None), (2.0, 5.0), (3.0, 4.0)])])
    path = re.search(r' d="([^"]*)"', drawn).group(1)
    assert path.count("M") == 2
    places = [tuple(map(float, one)) for one in re.findall(r"[ML]([\d.]+) ([\d.]+)", path)]
    assert all(0 <= x <= 360 and 0 <= y <= 190 for x, y in places)
    assert "No data yet" in plot("t", [TimeSeries("a", [(0.0, None)])])


@pytest.mark.long
def test_processes_show_themselves(tmp_path):
    """The command line's own pages, of a coordinator and a site that are processes."""
    folder, ports = Folder(tmp_path / "study"), {name: free_port() for name in ("coordinator", "north", "south")}
    parties = Parties(
        folder,
        (3, 5),
        wrap=lambda name, command: [*command, "--status", f"127.0.0.1:{ports[name]}", "--stall-after", "2"],
    )

    def seen(name):
        try:
            return json.loads(get(f"http://127.0.0.1:{ports[name]}/", "status.json")[2])
        except OSError:
            return None

    try:
        parties.start("coordinator")
        parties.start("north")
        until(lambda: (seen("north") or {}).get("connected"), 120)
        found = until(lambda: [one for one in [seen("coordinator")] if one and one["stalls"]], 60)[0]
        assert found["joined"] == 1 and any(
            stall["for"] == "site south" and not stall["connected"] for stall in found["stalls"]
        )
        assert "stall: nothing from site south" in (folder.path / "coordinator.log").read_text()
        parties.start("south")
        parties.finish()
    finally:
        parties.stop()
