"""The page of a report."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from fedpdmc.models.variables import scalars
from fedpdmc.results.report import figures
from fedpdmc.results.report.methods_text import MANY_DROPPED, PAPER, methods_text
from fedpdmc.results.summary import bounds_line, information_lines, privacy_lines

if TYPE_CHECKING:
    from fedpdmc.results.posterior import Posterior

# Number of draws in figures, over all chains.
DRAWS = 8000
STYLE = """
:root { color-scheme: light dark; --line: #8885; --soft: #8881; --good: #1a7f37; --bad: #c4320a; }
@media (prefers-color-scheme: dark) { :root { --good: #4ac26b; --bad: #ff7b54; } }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { line-height: 1.2; } h2 { margin-top: 2.2rem; border-bottom: 1px solid var(--line); }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .92rem; }
th, td { padding: .25rem .7rem; text-align: right; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; }
h1, p, li, pre { overflow-wrap: anywhere; } pre { white-space: pre-wrap; }
.wide { overflow-x: auto; } svg { max-width: 100%; height: auto; fill: currentColor; }
.verdict { padding: .7rem 1rem; border-left: .35rem solid var(--good); background: var(--soft); }
.verdict.bad { border-color: var(--bad); } .verdict.open { border-color: var(--line); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1.2rem; } dt { font-weight: 600; }
dd { margin: 0; overflow-wrap: anywhere; } blockquote { margin: 0; padding: .7rem 1rem; background: var(--soft); }
footer { margin-top: 3rem; font-size: .85rem; opacity: .75; }
@media (max-width: 40rem) { dl { grid-template-columns: 1fr; } }
@media print {
  :root { color-scheme: light; }
  body { max-width: none; margin: 0; font-size: 11pt; } h2 { break-after: avoid; } svg, table { break-inside: avoid; }
}
"""

NOT_ASSESSED = "not assessed: see fp.assessment.assess(post, sites), or `fedpdmc assess` at each site."
GLOSSARY = (
    "Pull: the change of a posterior mean, in posterior sd, per unit of power on a site's likelihood or on the prior. "
    "Arrivals: the times of events that sites send. Worst k: the largest Pareto k of importance weights; above 0.7 they are "
    "not to be trusted. Dense clock: proposes event times from a polynomial of time with a proved error and accepts them by "
    "the records. vb reference: the Gaussian variational approximation that coordinates are scaled by; it does not change "
    "the target."
)


def write_report(
    post: Posterior,
    path: str | Path,
    *,
    title: str | None = None,
    question: str | None = None,
    about: Sequence[str] = (),
    released: Sequence[str] = (),
    assessment: Any = None,
    logs: Mapping[str, str] | None = None,
    ratios: Mapping[str, Sequence[str]] | None = None,
    dropped: Mapping[str, tuple[int, int]] | None = None,
) -> Path:
    """Write the report of a posterior; see `Posterior.report`.

    ``logs`` are hashes of the sites' logs by name. ``ratios`` has the coefficients on a log scale, by what they are the
    logarithms of: "odds" or "rates" (`fedpdmc.study.description.ratios`). ``dropped`` are records that were left out for a
    missing value and all records, by site.
    """
    path = Path(path)
    text = page(post, title, question, about, released, assessment, logs or {}, ratios or {}, dropped or {})
    path.write_text(text, encoding="utf-8")
    return path


def page(
    post: Posterior,
    title: str | None,
    question: str | None,
    about: Sequence[str],
    released: Sequence[str],
    assessment: Any,
    logs: Mapping[str, str],
    ratios: Mapping[str, Sequence[str]],
    dropped: Mapping[str, tuple[int, int]],
) -> str:
    """The whole page."""
    head = title or post.settings.get("study") or "A federated posterior"
    sections = [
        _verdict(post),
        _fit(assessment),
        _dropped(dropped),
        _section("Question", f"<p>{escape(question)}</p>") if question else "",
        _section("Model", _list(about)) if about else "",
        _section("Estimates", _table(post.summary()._formatted()) + _ratios(post, ratios) + _figures(post)),
        _section(
            "Sites", _sites(post) + (f"<p>Sites released: {escape('; '.join(released))}.</p>" if released else "")
        ),
        _section("Convergence", _convergence(post)),
        _section("Fit at the sites", assessment._repr_html_()) if assessment is not None else "",
        _section("Privacy", _privacy(post)),
        _section("Exactness", _exactness(post)),
        _section("Methods", f"<blockquote>{escape(methods_text(post, about))}</blockquote>"),
        _section("Citation", f"<p>{escape(PAPER)}</p>"),
        _section("Record of the run", _facts(post, logs)),
        _section("Words", f"<p>{escape(GLOSSARY)}</p>"),
    ]
    made = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(head)}</title><style>{STYLE}</style></head><body><h1>{escape(head)}</h1>\n"
        + "\n".join(part for part in sections if part)
        + f"\n<footer>Made {made} with fedpdmc. This file needs no network.</footer></body></html>\n"
    )


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>"


def _list(lines: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"


def _table(table: pd.DataFrame) -> str:
    shown = table.rename_axis(index=None) if table.index.nlevels == 1 else table
    return f'<div class="wide">{shown.to_html(border=0)}</div>'


def _verdict(post: Posterior) -> str:
    if post.settings.get("exact") is False:
        return f'<p class="verdict">{escape(post.settings["chosen"])}</p>'
    kind = "verdict" if post.verdict.converged else "verdict bad"
    return f'<p class="{kind}"><b>Sampling</b>: {escape(str(post.verdict))}</p>'


def _fit(assessment: Any) -> str:
    """Whether the model fits is another question than whether the run has converged."""
    if assessment is None:
        return f'<p class="verdict open"><b>Fit</b>: {escape(NOT_ASSESSED)}</p>'
    misfit = assessment.misfit()
    kind, words = ("verdict bad", misfit) if misfit else ("verdict", ["no misfit was found at the sites"])
    return f'<p class="{kind}"><b>Fit</b>: {escape("; ".join(words))}.</p>'


def _dropped(dropped: Mapping[str, tuple[int, int]]) -> str:
    """Records that were left out, by site."""
    if not dropped:
        return ""
    shares = [
        f"{site} {left_out:,} of {read:,} ({100 * left_out / read:.0f} %)" for site, (left_out, read) in dropped.items()
    ]
    kind = (
        "verdict bad" if max(left_out / read for left_out, read in dropped.values()) > MANY_DROPPED else "verdict open"
    )
    return f'<p class="{kind}"><b>Records</b> dropped for a missing value: {escape(", ".join(shares))}.</p>'


def _each(post: Posterior) -> int:
    """Draws of each chain for the figures."""
    return min(max(-(-DRAWS // post.chains), 1), post.most_draws)


def _ratios(post: Posterior, ratios: Mapping[str, Sequence[str]]) -> str:
    """Ratios of odds or rates with 95 % intervals, of coefficients on a log scale."""
    parts, values = [], scalars(post.variables(_each(post))) if ratios else {}
    for what, names in ratios.items():
        found, one = [name for name in names if name in values], "odds" if what == "odds" else "rate"
        if not found:
            continue
        low, middle, high = np.exp([np.quantile(values[name], [0.025, 0.5, 0.975]) for name in found]).T
        shown = pd.DataFrame(
            {
                f"{one} ratio (median)": [f"{x:.3g}" for x in middle],
                "95 % interval": [f"{a:.3g} to {b:.3g}" for a, b in zip(low, high, strict=True)],
            },
            index=pd.Index(found),
        )
        parts.append(
            f"<p>Estimates of coefficients are on the scale of log {what}. Exponentiated, they are {one} ratios for one "
            f"unit more of a covariate, or for a level against the first:</p>{_table(shown)}"
        )
    return "".join(parts)


def _figures(post: Posterior) -> str:
    values = scalars(post.variables(_each(post)))
    names, draws = list(values), np.stack([value.reshape(-1) for value in values.values()], -1)
    # Parameters in very different units are read from the densities; the forest has them in posterior sd.
    spread = draws.std(0)
    even = spread.max() < 20 * max(spread.min(), 1e-300)
    shown = draws if even else draws / np.maximum(spread, 1e-300)
    words = "" if even else " (each in units of its posterior sd, since their scales differ widely)"
    parts = [
        f"<h3>Intervals{words}</h3>" + figures.as_svg(figures.forest(names, shown), "forest plot"),
        "<h3>Densities</h3>" + figures.as_svg(figures.densities(names, draws), "posterior densities"),
    ]
    if len(names) > figures.MOST_ROWS:
        parts.append(f"<p>The first {figures.MOST_ROWS} of {len(names)} parameters are drawn.</p>")
    return "".join(parts)


def _sites(post: Posterior) -> str:
    names = post.settings.get("sites") or [f"site {i}" for i in range(len(post.messages))]
    counts = (post.messages, post.bytes, post.gradient_evaluations)
    if any(len(count) != len(names) for count in counts):
        names = [f"site {i}" for i in range(len(post.messages))]
    table = pd.DataFrame(
        {
            "messages": [f"{x:,}" for x in post.messages],
            "bytes": [f"{x:,}" for x in post.bytes],
            "passes over its records": [f"{x:,}" for x in post.gradient_evaluations],
        },
        index=pd.Index(names),
    )
    # The member that walks the prior is the coordinator's own: it has no records and no line to it.
    site = np.asarray([name != post.settings.get("prior_site") for name in names])
    cost = f"<p>{post.rounds} rounds of communication, {int(post.bytes[site].sum()):,} bytes in all.</p>"
    weights = post.settings.get("influence") or {}
    lines = [f"{name}: {100 * own['share']:.3g} % of the information" for name, own in weights.items()]
    lines += [*post.settings.get("doubts", []), *information_lines(post)]
    return cost + _table(table.loc[site]) + (_list(lines) if lines else "")


def _convergence(post: Posterior) -> str:
    if post.settings.get("exact") is False:
        return "<p>Independent draws: there is nothing to converge.</p>"
    table = pd.DataFrame({"ess": post.ess(), "rhat": post.rhat()})
    shown = pd.DataFrame(
        {"ESS": [f"{x:,.0f}" for x in table["ess"]], "R-hat": [f"{x:.3f}" for x in table["rhat"]]}, table.index
    )
    words = "The energy is a quadratic form of all parameters. R-hat is nested: chains are compared in four groups."
    return _table(shown) + f"<p>{words}</p>" + figures.as_svg(figures.paths(post), "paths of one chain")


def _privacy(post: Posterior) -> str:
    lines = privacy_lines(post.privacy)
    return (
        _list(lines)
        if lines
        else "<p>No site had a privacy budget: what is released is not differentially private.</p>"
    )


def _exactness(post: Posterior) -> str:
    if post.settings.get("exact") is False:
        return f"<p>{escape(str(post.settings['chosen']))}</p>"
    return f"<p>{escape(bounds_line(post))}</p><pre>{escape(str(post.certificate))}</pre>"


def _facts(post: Posterior, logs: Mapping[str, str]) -> str:
    keys = (
        "dynamics",
        "reference",
        "control",
        "chosen",
        "chains",
        "duration",
        "burn_in",
        "seed",
        "study",
        "contract",
        "run",
        "versions",
    )
    told = {key: post.settings[key] for key in keys if post.settings.get(key) not in (None, "")}
    told |= {f"log of {site}, SHA-256": seal for site, seal in logs.items()}
    rows = "".join(f"<dt>{escape(key)}</dt><dd>{escape(_words(value))}</dd>" for key, value in told.items())
    return f"<dl>{rows}</dl>"


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {one}" for key, one in value.items())
    return f"{value:.6g}" if isinstance(value, float) else str(value)
