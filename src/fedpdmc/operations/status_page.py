"""The status over HTTP: read-only, and safe to leave open in a browser.

Attackers: a web site that the operator visits and that points its own name at this address (the Host header must be an
address, ``localhost`` or the given name); a local user who holds connections open (their number and time are limited); a
contract with HTML in its names (all text is escaped, and the page may not load or run anything).
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import logging
import math
import socket
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from html import escape
from http.server import BaseHTTPRequestHandler, HTTPServer
from statistics import median
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fedpdmc.console.progress import clock
from fedpdmc.errors import InputError
from fedpdmc.federation.grpc.tls import is_loopback, split_address
from fedpdmc.operations.status import finite

# With more sites than this, plot the median and maximum of their round trips.
MOST_LINES = 6
REFRESH = 5
STYLE = """
:root { color-scheme: light dark; --page: #f9f9f7; --card: #fcfcfb; --ink: #0b0b0b; --soft: #52514e; --faint: #898781;
  --line: #e1e0d9; --edge: rgba(11,11,11,.10); --good: #006300; --bad: #b3261e; --badly: #fbe9e7;
  --s0: #2a78d6; --s1: #eb6834; --s2: #1baf7a; --s3: #eda100; --s4: #e87ba4; --s5: #008300; }
@media (prefers-color-scheme: dark) { :root { --page: #0d0d0d; --card: #1a1a19; --ink: #fff; --soft: #c3c2b7;
  --line: #2c2c2a; --edge: rgba(255,255,255,.10); --good: #0ca30c; --bad: #ff8a80; --badly: #3a1614;
  --s0: #3987e5; --s1: #d95926; --s2: #199e70; --s3: #c98500; --s4: #d55181; --s5: #008300; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1100px; padding: 20px 16px 48px; background: var(--page); color: var(--ink);
  font: 15px/1.45 system-ui, sans-serif; }
h1 { font-size: 1.35rem; margin: 0; overflow-wrap: anywhere; } h2 { font-size: 1rem; margin: 28px 0 8px; }
p { margin: 4px 0; color: var(--soft); }
.stall { background: var(--badly); color: var(--bad); border-left: 4px solid var(--bad); padding: 8px 12px;
  margin: 12px 0 0; }
.track { height: 8px; border-radius: 4px; background: var(--line); margin: 12px 0 4px; overflow: hidden; }
.track i { display: block; height: 100%; background: var(--s0); }
.grid { display: grid; gap: 12px; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); margin-top: 16px; }
.plots { grid-template-columns: repeat(auto-fit, minmax(320px, 1fr)); }
.card { background: var(--card); border: 1px solid var(--edge); border-radius: 8px; padding: 12px 14px; min-width: 0; }
.card b { display: block; font-size: 1.4rem; font-weight: 600; } .card span { color: var(--soft); font-size: .85rem; }
.card h3 { font-size: .9rem; margin: 0 0 4px; font-weight: 600; }
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; background: var(--card);
  font-variant-numeric: tabular-nums; } th, td { text-align: left; padding: 6px 10px; border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 600; font-size: .85rem; } td.n, th.n { text-align: right; }
.yes { color: var(--good); } .no { color: var(--bad); }
svg { display: block; width: 100%; height: auto; } svg text { fill: var(--soft); font-size: 11px; }
svg .rule { stroke: var(--line); } svg .path { fill: none; stroke-width: 2; stroke-linejoin: round; }
.key { display: flex; flex-wrap: wrap; gap: 2px 14px; font-size: .8rem; color: var(--soft); }
.key i { display: inline-block; width: 14px; height: 3px; margin-right: 5px; vertical-align: middle; }
footer { margin-top: 28px; color: var(--soft); font-size: .8rem; overflow-wrap: anywhere; } a { color: inherit; }
"""


def page(facts: dict[str, Any]) -> str:
    """The page of a coordinator or of a site."""
    own = _coordinator if facts["party"] == "coordinator" else _site
    name = "Coordinator" if facts["party"] == "coordinator" else f"Site {facts['name']}"
    title = f"{name} · {facts['study']}"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="refresh" content="{REFRESH}"><style>{STYLE}</style></head><body>'
        f"<h1>{escape(title)}</h1>{_phase(facts)}{_stalls(facts)}{own(facts)}{_footer(facts)}</body></html>"
    )


def _phase(facts: dict[str, Any]) -> str:
    share = facts.get("share")
    track = "" if share is None else f'<div class="track"><i style="width:{100 * share:.1f}%"></i></div>'
    done = "" if share is None else f", {100 * share:.0f} % done"
    left = "" if facts.get("seconds_left") is None else f", about {clock(facts['seconds_left'])} left"
    waiting = ", ".join(f"{one['for']} for {clock(one['seconds'])}" for one in facts["waiting"] if one["seconds"] >= 1)
    words = f"<p>Waiting for {escape(waiting)}.</p>" if waiting else ""
    return f"<p>{escape(facts['phase'])}{done}{left}; running for {clock(facts['uptime_seconds'])}.</p>{track}{words}"


def _stalls(facts: dict[str, Any]) -> str:
    away = {True: "", False: " It is not connected."}
    sentences = (
        f"Stalled: nothing from {one['for']} for {clock(one['seconds'])}.{away[one['connected']]}"
        for one in facts["stalls"]
    )
    return "".join(f'<div class="stall" role="alert">{escape(text)}</div>' for text in sentences)


def _tiles(tiles: list[tuple[str, str, str]]) -> str:
    made = (
        f'<div class="card"><span>{escape(a)}</span><b>{escape(b)}</b><span>{escape(c)}</span></div>'
        for a, b, c in tiles
    )
    return f'<div class="grid">{"".join(made)}</div>'


def _number(value: Any, form: str = ",.4g") -> str:
    return "–" if value is None else format(value, form)


def _of(value: Any, form: str = ",.4g") -> str:
    return "" if value is None else f"of {value:{form}}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.3g} %"


def _coordinator(facts: dict[str, Any]) -> str:
    sites, points = facts["sites"], facts["history"]
    tiles = [
        ("Sites joined", str(facts["joined"]), f"of {len(sites)}"),
        ("Rounds", _number(facts.get("rounds"), ",d"), ""),
        ("Process time", _number(facts.get("process_time")), _of(facts.get("until"))),
        ("Worst ESS", _number(facts.get("worst_ess"), ",.0f"), _of(facts.get("ess_wanted"), ",.0f")),
        ("Worst R-hat", _number(facts.get("worst_rhat"), ".3f"), "good below 1.01"),
    ]
    spent = [site["privacy_spent"] for site in sites if site["privacy_spent"] is not None]
    if spent:
        tiles.append(("Privacy spent", _percent(max(spent)), "of the fullest account"))
    plots = {
        "Worst effective sample size": _series(points, "worst_ess", "ESS"),
        "Worst R-hat": _series(points, "worst_rhat", "R-hat"),
        "Process time": _series(points, "process_time", "process time"),
        "Rounds": _series(points, "rounds", "rounds"),
        "Round trips, in milliseconds": _trips(points, [site["name"] for site in sites]),
    }
    return _body(tiles, plots, f"<h2>Sites</h2>{_table(sites, bool(spent))}")


def _body(tiles: list[tuple[str, str, str]], plots: dict[str, list[TimeSeries]], table: str = "") -> str:
    drawn = "".join(plot(title, series) for title, series in plots.items())
    return f'{_tiles(tiles)}{table}<h2>Over time</h2><div class="grid plots">{drawn}</div>'


def _table(sites: list[dict[str, Any]], private: bool) -> str:
    heads = ["Site", "State", "For", "Last round trip", "Waited for", *(["Privacy spent"] if private else [])]
    top = "".join(f'<th class="{"n" if place > 1 else ""}">{head}</th>' for place, head in enumerate(heads))
    rows = []
    for site in sites:
        state = (
            '<span class="yes">● connected</span>'
            if site.get("connected")
            else '<span class="no">○ not connected</span>'
        )
        trip, waited = site.get("round_trip_seconds"), site.get("waited_seconds")
        cells = [
            "" if site.get("since_seconds") is None else clock(site["since_seconds"]),
            f"{1e3 * trip:,.1f} ms" if trip else "–",
            "–" if waited is None else clock(waited),
            *([_percent(site["privacy_spent"])] if private else []),
        ]
        rows.append(
            f"<tr><td>{escape(site['name'])}</td><td>{state}</td>" + "".join(f'<td class="n">{c}</td>' for c in cells)
        )
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _site(facts: dict[str, Any]) -> str:
    points = facts["history"]
    tiles = [
        ("Coordinator", "connected" if facts["connected"] else "not connected", facts["coordinator"]),
        ("Last heard", f"{clock(facts['heard_seconds_ago'])} ago", ""),
        ("Requests answered", f"{facts['answers']:,}", f"of at most {facts['most_answers']:,}"),
        ("Observed process time", _number(facts["process_time"]), f"of at most {facts['most_process_time']:,.4g}"),
        ("Refusals", str(facts["refusals"]), "since the last answer"),
    ]
    if facts["privacy_spent"] is not None:
        tiles.append(("Privacy spent", _percent(facts["privacy_spent"]), "of the account"))
    if facts.get("bits") is not None:
        bits, most = facts["bits"]
        tiles.append(("Bits for each record", _number(bits, ".2g"), _of(most, ".2g")))
    plots = {
        "Requests answered": _series(points, "answers", "answers"),
        "Observed process time": _series(points, "process_time", "process time"),
        "Time for one answer, in milliseconds": _series(points, "answer_seconds", "answer", 1e3),
    }
    if facts["privacy_spent"] is not None:
        plots["Privacy spent, share of the account"] = _series(points, "privacy_spent", "spent")
    return _body(tiles, plots)


def _series(points: list[dict[str, Any]], key: str, name: str, unit: float = 1) -> list[TimeSeries]:
    values = ((point["seconds"], point.get(key)) for point in points)
    return [TimeSeries(name, [(seconds, None if value is None else unit * value) for seconds, value in values])]


def _trips(points: list[dict[str, Any]], names: list[str]) -> list[TimeSeries]:
    """The round trips of each site, or the median and maximum of many."""
    known = [{name: 1e3 * x for name, x in one["round_trip_seconds"].items() if x is not None} for one in points]
    picks: dict[str, Callable[[dict[str, float]], float | None]] = {
        "median of the sites": lambda trips: median(trips.values()) if trips else None,
        "slowest site": lambda trips: max(trips.values(), default=None),
    }
    if len(names) <= MOST_LINES:
        picks = {name: lambda trips, name=name: trips.get(name) for name in names}
    return [
        TimeSeries(label, [(one["seconds"], pick(trips)) for one, trips in zip(points, known, strict=True)])
        for label, pick in picks.items()
    ]


def _footer(facts: dict[str, Any]) -> str:
    run = facts["run"] or "not joined yet"
    return (
        f"<footer>{escape(facts['time'])} · {escape(facts['software'])} · run {escape(run)} · contract "
        f"{escape(facts['contract'])}<br>Also as <a href='/status.json'>JSON</a> and as "
        "<a href='/metrics'>metrics</a>. This page contains nothing about records.</footer>"
    )


# A plot's size and margins, in units of the SVG's view box.
WIDTH = 360
HEIGHT = 190
LEFT = 52
RIGHT = 10
TOP = 10
BOTTOM = 22
TICKS = 4


class TimeSeries(NamedTuple):
    """A name, and values by seconds; None where there is none yet."""

    name: str
    points: list[tuple[float, float | None]]


def ticks(low: float, high: float) -> list[float]:
    """Round numbers from at most ``low`` to at least ``high``, about `TICKS` of them."""
    if not high > low:
        high = low + (abs(low) or 1.0) * 0.1
    raw = (high - low) / TICKS
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= raw * (1 - 1e-9))
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, last + 1)]


def _short(value: float) -> str:
    if value and abs(value) >= 1e6:
        return f"{value:.3g}"
    return f"{round(value, 9):,.6g}"


def plot(title: str, series: list[TimeSeries]) -> str:
    """A card with a plot, or a note if there is no data yet."""
    known = [(x, y) for one in series for x, y in one.points if y is not None]
    if not known:
        return f'<div class="card"><h3>{escape(title)}</h3><p>No data yet.</p></div>'
    last_x, values = max(x for x, _ in known), [y for _, y in known]
    first_x = min(x for x, _ in known)
    low, high = min(values), max(values)
    marks = ticks(0.0 if 0 <= low <= 0.5 * high or high == low == 0 else low, high)
    span = max(last_x - first_x, 1e-9)

    def place(x: float, y: float) -> tuple[float, float]:
        across, up = (x - first_x) / span, (y - marks[0]) / (marks[-1] - marks[0])
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(_words(title, series))}">']
    for mark in marks:
        _, y = place(first_x, mark)
        parts.append(f'<line class="rule" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_short(mark)}</text>')
    parts.append(f'<text x="{LEFT}" y="{HEIGHT - 4}">{clock(first_x)}</text>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 4}" text-anchor="end">{clock(last_x)}</text>')
    for number, one in enumerate(series):
        parts += [_line(one, number, place)]
    parts.append("</svg>")
    return f'<div class="card"><h3>{escape(title)}</h3>{"".join(parts)}{_key(series)}</div>'


def _line(one: TimeSeries, number: int, place) -> str:
    """A path with gaps where there are no values, and a dot at its end."""
    path, pen, end = [], "M", None
    for x, y in one.points:
        if y is None:
            pen = "M"
            continue
        end = place(x, y)
        path.append(f"{pen}{end[0]:.1f} {end[1]:.1f}")
        pen = "L"
    if end is None:
        return ""
    colour = f"var(--s{number % 6})"
    return (
        f'<path class="path" style="stroke:{colour}" d="{" ".join(path)}"/>'
        f'<circle cx="{end[0]:.1f}" cy="{end[1]:.1f}" r="3.5" style="fill:{colour}"/>'
    )


def _last(one: TimeSeries) -> str:
    found = [y for _, y in one.points if y is not None]
    return _short(float(f"{found[-1]:.4g}")) if found else "–"


def _words(title: str, series: list[TimeSeries]) -> str:
    return f"{title}: " + ", ".join(f"{one.name} {_last(one)}" for one in series)


def _key(series: list[TimeSeries]) -> str:
    if len(series) < 2:
        return ""
    keys = (
        f'<span><i style="background:var(--s{number % 6})"></i>{escape(one.name)} {_last(one)}</span>'
        for number, one in enumerate(series)
    )
    return f'<div class="key">{"".join(keys)}</div>'


# Name of the metric, key of the status, description.
PARTY = (
    ("uptime_seconds", "uptime_seconds", "Time since this process was started."),
    ("rounds_total", "rounds", "Rounds of the run so far."),
    (
        "process_time",
        "process_time",
        "Process time that all chains have reached; at a site, its observed process time.",
    ),
    ("process_time_goal", "until", "Process time at which the current phase ends."),
    ("worst_ess", "worst_ess", "The worst effective sample size."),
    ("ess_goal", "ess_wanted", "The requested effective sample size."),
    ("worst_rhat", "worst_rhat", "The worst R-hat."),
    ("sites_joined", "joined", "Connected sites."),
    ("connected", "connected", "Whether the coordinator is connected."),
    ("heard_seconds", "heard_seconds_ago", "Seconds since the last message of the coordinator."),
    ("answers_total", "answers", "Requests answered."),
    ("answers_limit", "most_answers", "Requests that the contract allows."),
    ("process_time_limit", "most_process_time", "Observed process time that the contract allows."),
    ("refusals", "refusals", "Requests refused since the last answer."),
    ("answer_seconds", "answer_seconds", "Time for the last answer."),
    ("privacy_spent_ratio", "privacy_spent", "Spent share of the privacy account."),
)
SITE = (
    ("site_connected", "connected", "Whether a site has a stream open."),
    ("site_round_trip_seconds", "round_trip_seconds", "The last round trip of a site."),
    ("site_waited_seconds", "waited_seconds", "Age of the request that a site has not answered; 0: none."),
    ("site_privacy_spent_ratio", "privacy_spent", "Spent share of a site's privacy account."),
)


class _Numbers(Collector):
    """The known numbers of a status, as Prometheus collects them."""

    def __init__(self, facts: dict[str, Any]):
        self.facts = facts

    def collect(self) -> Iterator[Metric]:
        facts = self.facts
        labels = {key: facts[key] for key in ("party", "name", "study", "software")}
        yield _gauge("info", "Party and study.", [(labels, 1.0)])
        for name, key, words in PARTY:
            if facts.get(key) is not None:
                kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
                yield kind(f"fedpdmc_{name}", words, float(facts[key]))
        for name, key, words in SITE:
            # A site that is not waited for has waited for no time.
            usual = 0.0 if key == "waited_seconds" else None
            values = [
                ({"site": site["name"]}, usual if site.get(key) is None else site[key])
                for site in facts.get("sites", [])
            ]
            if known := [(site, float(value)) for site, value in values if value is not None]:
                yield _gauge(name, words, known)
        stalls = [({"for": stall["for"]}, float(stall["seconds"])) for stall in facts["stalls"]]
        yield GaugeMetricFamily("fedpdmc_stalls", "Number of parties that have stalled.", float(len(stalls)))
        if stalls:
            yield _gauge("stall_seconds", "Duration of the stall.", stalls)


def _gauge(name: str, words: str, samples: list[tuple[dict[str, str], float]]) -> Metric:
    family = GaugeMetricFamily(f"fedpdmc_{name}", words, labels=list(samples[0][0]))
    for labels, value in samples:
        family.add_metric(list(labels.values()), value)
    return family


def metrics(facts: dict[str, Any]) -> str:
    """All known numbers of the status, in Prometheus's text format."""
    registry = CollectorRegistry()
    registry.register(_Numbers(facts))
    return generate_latest(registry).decode()


logger = logging.getLogger("fedpdmc.operations.status")
MOST_CONNECTIONS = 16  # at a time
MOST_SECONDS = 10.0  # for a connection in total
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
    "Connection": "close",
}


def _json(facts: dict[str, Any]) -> str:
    return json.dumps(facts, allow_nan=False) + "\n"


def _health(facts: dict[str, Any]) -> str:
    return "".join(["ok\n", *(f"stalled: {stall['for']}, {stall['seconds']:.0f} s\n" for stall in facts["stalls"])])


PAGES: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "/": ("text/html; charset=utf-8", page),
    "/status.json": ("application/json", _json),
    "/metrics": ("text/plain; version=0.0.4; charset=utf-8", metrics),
    "/healthz": ("text/plain; charset=utf-8", _health),
}


class _Handler(BaseHTTPRequestHandler):
    server_version, sys_version = "fedpdmc", ""
    timeout = MOST_SECONDS
    server: _Server

    def do_GET(self) -> None:
        """One of the pages."""
        if not self.server.known(self.headers.get("Host", "")):
            self._say(421, "This name is not served here.\n")
        elif (found := PAGES.get(self.path.partition("?")[0])) is None:
            self._say(404, "There are /, /status.json, /metrics and /healthz.\n")
        else:
            kind, make = found
            self._say(200, make(finite(self.server.facts())), kind)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer any other request in one line that repeats nothing of it."""
        # 501: the library's for any other method.
        self._say(*((405, "Only GET is supported.\n") if code == 501 else (code, "bad request\n")))

    def _say(self, code: int, text: str, kind: str = "text/plain") -> None:
        data = text.encode("utf-8", "replace")
        self.send_response(code)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        if code == 405:
            self.send_header("Allow", "GET")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: a browser that refreshes would fill the log."""


class _Server(HTTPServer):
    # The port is free again right after a restart.
    allow_reuse_address = True
    request_queue_size = MOST_CONNECTIONS

    def __init__(self, host: str, port: int, facts: Callable[[], dict[str, Any]]):
        self.facts, self._name = facts, host
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._places = threading.BoundedSemaphore(MOST_CONNECTIONS)
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        """Bind without the library's look-up of this host's name."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = self._name, self.server_address[1]

    def known(self, host: str) -> bool:
        """Whether a Host header is an address or our own name, and not a name that others control."""
        try:
            bare = urllib.parse.urlsplit(f"//{host}").hostname or ""
            return bare in ("localhost", self._name.lower()) or bool(ipaddress.ip_address(bare))
        except ValueError:
            return False

    def process_request(self, request: Any, client_address: Any) -> None:
        """Handle a request in its own thread, if there are not too many."""
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        threading.Thread(
            target=self._handle, args=(request, client_address), name="fedpdmc-status", daemon=True
        ).start()

    def _handle(self, request: Any, client_address: Any) -> None:
        timeout = threading.Timer(MOST_SECONDS, _shut_down, (request,))
        timeout.daemon = True
        timeout.start()
        try:
            self.finish_request(request, client_address)
        except OSError as error:
            logger.debug("a reader of the status has disconnected: %s", error)
        except Exception:  # noqa: BLE001
            logger.exception("the status could not be shown")
        finally:
            timeout.cancel()
            self.shutdown_request(request)
            self._places.release()


def _shut_down(request: socket.socket) -> None:
    """End a connection in which another thread waits: that thread closes it."""
    with contextlib.suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)


class StatusServer:
    """The status of a party on one address.

    ``address``: ``host:port``; port 0 takes a free one. ``facts``: what `fedpdmc.operations.status.StatusWatch.facts`
    returns.
    """

    def __init__(self, address: str, facts: Callable[[], dict[str, Any]]):
        host, port = split_address(address, "status")
        bare = host.strip("[]")
        try:
            self._server = _Server(bare, port, facts)
        except OSError as error:
            found = f"{address}, which cannot be bound: {error}"
            raise InputError("status", found, "Give a free address of this host, such as 127.0.0.1:8080.") from error
        shown = f"[{bare}]" if ":" in bare else bare
        self.address = f"http://{shown}:{self._server.server_port}/"
        if not is_loopback(bare):
            logger.warning(
                "the status page at %s has no TLS and no password: anyone who reaches it can read it", self.address
            )
        logger.info("the status page is at %s", self.address)
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.2}, name="fedpdmc-status", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
