"""The status of a run in the text format of Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

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
    (
        "site_waited_seconds",
        "waited_seconds",
        "Age of the request that a site has not answered; 0: none.",
    ),
    ("site_privacy_spent_ratio", "privacy_spent", "Spent share of a site's privacy account."),
)


def metrics(facts: dict[str, Any]) -> str:
    """All known numbers of the status."""
    return "\n".join(_lines(facts)) + "\n"


def _lines(facts: dict[str, Any]) -> Iterator[str]:
    labels = {key: facts[key] for key in ("party", "name", "study", "software")}
    yield from _metric("info", "Party and study.", [(labels, 1)])
    for name, key, words in PARTY:
        if facts.get(key) is not None:
            yield from _metric(name, words, [({}, facts[key])])
    sites = facts.get("sites", [])
    for name, key, words in SITE:
        waited = key == "waited_seconds"
        found = [({"site": one["name"]}, one.get(key)) for one in sites]
        found = [(own, 0 if value is None and waited else value) for own, value in found]
        known = [(own, value) for own, value in found if value is not None]
        if known:
            yield from _metric(name, words, known)
    stalls = [({"for": one["for"]}, one["seconds"]) for one in facts["stalls"]]
    yield from _metric("stalls", "Number of parties that have stalled.", [({}, len(stalls))])
    if stalls:
        yield from _metric("stall_seconds", "Duration of the stall.", stalls)


def _metric(name: str, words: str, samples: list[tuple[dict[str, Any], Any]]) -> Iterator[str]:
    yield f"# HELP fedpdmc_{name} {words}"
    yield f"# TYPE fedpdmc_{name} {'counter' if name.endswith('_total') else 'gauge'}"
    for labels, value in samples:
        inside = ",".join(f'{key}="{_escaped(str(text))}"' for key, text in labels.items())
        yield f"fedpdmc_{name}{'{' + inside + '}' if inside else ''} {float(value):.10g}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
