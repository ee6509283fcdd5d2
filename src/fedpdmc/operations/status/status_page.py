"""The status of a run as one HTML page with inline plots. It loads and executes nothing."""

from __future__ import annotations

from html import escape
from statistics import median
from typing import Any

from fedpdmc.console.screens import clock
from fedpdmc.operations.status.plots import Series, plot

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
    said = (
        f"Stalled: nothing from {one['for']} for {clock(one['seconds'])}.{away[one['connected']]}"
        for one in facts["stalls"]
    )
    return "".join(f'<div class="stall" role="alert">{escape(text)}</div>' for text in said)


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
    plots = [
        plot("Worst effective sample size", _series(points, "worst_ess", "ESS")),
        plot("Worst R-hat", _series(points, "worst_rhat", "R-hat")),
        plot("Process time", _series(points, "process_time", "process time")),
        plot("Rounds", _series(points, "rounds", "rounds")),
        plot("Round trips, in milliseconds", _trips(points, [site["name"] for site in sites])),
    ]
    table = f"<h2>Sites</h2>{_table(sites, bool(spent))}"
    return f'{_tiles(tiles)}{table}<h2>Over time</h2><div class="grid plots">{"".join(plots)}</div>'


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
    answer = [(x, None if y is None else 1e3 * y) for x, y in _series(points, "answer_seconds", "")[0].points]
    plots = [
        plot("Requests answered", _series(points, "answers", "answers")),
        plot("Observed process time", _series(points, "process_time", "process time")),
        plot("Time for one answer, in milliseconds", [Series("answer", answer)]),
    ]
    if facts["privacy_spent"] is not None:
        plots.append(plot("Privacy spent, share of the account", _series(points, "privacy_spent", "spent")))
    return f'{_tiles(tiles)}<h2>Over time</h2><div class="grid plots">{"".join(plots)}</div>'


def _series(points: list[dict[str, Any]], key: str, name: str) -> list[Series]:
    return [Series(name, [(point["seconds"], point.get(key)) for point in points])]


def _trips(points: list[dict[str, Any]], names: list[str]) -> list[Series]:
    """The round trips of each site, or the median and maximum of many."""

    def line(name: str, pick: Any) -> Series:
        return Series(name, [(one["seconds"], pick(one["round_trip_seconds"])) for one in points])

    def scaled(value: float | None) -> float | None:
        return None if value is None else 1e3 * value

    if len(names) <= MOST_LINES:
        return [line(name, lambda trips, name=name: scaled(trips.get(name))) for name in names]
    summary = {"median of the sites": median, "slowest site": max}

    def over(trips: dict[str, float | None], how: Any) -> float | None:
        known = [value for value in trips.values() if value is not None]
        return scaled(how(known)) if known else None

    return [line(name, lambda trips, how=how: over(trips, how)) for name, how in summary.items()]


def _footer(facts: dict[str, Any]) -> str:
    run = facts["run"] or "not joined yet"
    return (
        f"<footer>{escape(facts['time'])} · {escape(facts['software'])} · run {escape(run)} · contract "
        f"{escape(facts['contract'])}<br>Also as <a href='/status.json'>JSON</a> and as "
        "<a href='/metrics'>metrics</a>. This page contains nothing about records.</footer>"
    )
