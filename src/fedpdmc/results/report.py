"""A report of a run: one HTML file that needs nothing else, with its figures and sentences for a paper's methods section."""

from __future__ import annotations

import datetime
import io
import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedpdmc.errors import InputError
from fedpdmc.results.exactness_certificate import ASSERTED
from fedpdmc.results.forest_plot import (
    ACCENT,
    INK,
    MOST_ROWS,
    EffectScale,
    draws_of,
    forest,
    numbers,
    row_of,
    shorten,
    site_panels,
)
from fedpdmc.results.summary import bounds_line, information_lines, privacy_lines
from fedpdmc.validation import LEVEL

if TYPE_CHECKING:
    from fedpdmc.results.posterior import Posterior

MOST_BY_SITE = 6  # coefficients whose estimates are drawn by site
MOST_COLUMNS = 10  # of a table that is not wrapped
WIDTH = 5.4  # inches of a figure
MOST_UNEVEN = 50.0  # ratio of the widest to the narrowest posterior on one axis
INCREMENTS = (
    "Per increment in brackets, in the column's own units; a level against the first one, a column of zeros and ones from 0 "
    "to 1."
)
WORDS = f"{100 * LEVEL:g} % interval"
WEIGHTS = (
    "Squares have an area in proportion to the weight (inverse variance); the diamond is the posterior of all records."
)
# On a narrow screen, or with many columns, each row of a table wraps: its name, then each number after its column's name.
WRAPPED = """
{0} thead {{ display: none; }} {0} tr {{ display: flex; flex-wrap: wrap; gap: 0 1rem; padding: .3rem 0; }}
{0} tr {{ border-bottom: 1px solid var(--line); }} {0} tbody th {{ flex-basis: 100%; }}
{0} th, {0} td {{ border: 0; padding: .05rem 0; text-align: left; }}
{0} td::before {{ content: attr(data-column) " "; opacity: .7; font-size: .85em; }}
"""
STYLE = (
    """
:root { color-scheme: light dark; --line: #8885; --soft: #8881; --good: #1a7f37; --bad: #c4320a; }
@media (prefers-color-scheme: dark) { :root { --good: #4ac26b; --bad: #ff7b54; } }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { line-height: 1.2; } h2 { margin-top: 2.2rem; border-bottom: 1px solid var(--line); }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .92rem; }
th, td { padding: .25rem .7rem; text-align: right; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; }
h1, p, li, pre { overflow-wrap: anywhere; } pre { white-space: pre-wrap; }
th { overflow-wrap: break-word; } thead th { vertical-align: bottom; max-width: 10rem; }
.wide { overflow-x: auto; } svg { display: block; max-width: 100%; height: auto; fill: currentColor; }
svg.figure { width: 46rem; }
.small { display: grid; grid-template-columns: repeat(auto-fill, minmax(10rem, 1fr)); gap: .5rem; }
.verdict { padding: .7rem 1rem; border-left: .35rem solid var(--good); background: var(--soft); }
.verdict.bad { border-color: var(--bad); } .verdict.open { border-color: var(--line); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1.2rem; } dt { font-weight: 600; }
dd { margin: 0; overflow-wrap: anywhere; } blockquote { margin: 0; padding: .7rem 1rem; background: var(--soft); }
footer { margin-top: 3rem; font-size: .85rem; opacity: .75; }
@media (max-width: 40rem) { dl { grid-template-columns: 1fr; } }
@media print {
  :root { color-scheme: light; }
  body { max-width: none; margin: 0; font-size: 10pt; }
  h2, h3, h4 { break-after: avoid; } svg, tr { break-inside: avoid; }
  .wide { overflow-x: visible; } table { font-size: 8pt; } th, td { padding: .15rem .35rem; }
  svg.figure { max-width: 30rem; }
}
"""
    + WRAPPED.format("table.many")
    + "@media (max-width: 44rem) {"
    + WRAPPED.format("table")
    + "}\n"
)

NOT_PRIVATE = "<p>No site had a privacy budget: what is released is not differentially private.</p>"
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
    effect_scale: Mapping[str, Any] | None = None,
    dropped: Mapping[str, tuple[int, int]] | None = None,
    sites: Any = None,
    naming: Any = None,
) -> Path:
    """Write the report of a posterior; see `Posterior.report`.

    ``logs`` are hashes of the sites' logs by name. ``effect_scale`` says how coefficients are read, where the posterior does
    not. ``dropped`` are records that were left out for a missing value and all records, by site. With ``sites``, or the
    ``naming`` of a contract, a posterior from disk has estimates by site.
    """
    path = Path(path)
    if effect_scale is not None:
        post.settings.setdefault("effect_scale", dict(effect_scale))
    logs, dropped = logs or {}, dropped or {}
    one_shot, chosen = post.settings.get("exact") is False, str(post.settings.get("chosen"))
    exactness = "" if one_shot else f"<p>{escape(bounds_line(post))}</p><pre>{escape(str(post.certificate))}</pre>"
    verdict = f'<p class="verdict">{escape(chosen)}</p>'
    if not one_shot:
        kind = "verdict" if post.verdict.converged else "verdict bad"
        verdict = f'<p class="{kind}"><b>Sampling</b>: {escape(str(post.verdict))}</p>'
    shown = list(draws_of(post).items())
    densities = "".join(as_svg(density(name, x), escape(f"density of {name}")) for name, x in shown[:MOST_DENSITIES])
    densities = f'<h3>Densities</h3><div class="small">{densities}</div>'
    if len(shown) > MOST_DENSITIES:
        densities += f"<p>The first {MOST_DENSITIES} of {len(shown)} parameters are drawn.</p>"
    head = title or post.settings.get("study") or "A federated posterior"
    sections = [
        verdict,
        _fit(assessment),
        _dropped(dropped),
        _section("Question", f"<p>{escape(question)}</p>") if question else "",
        _section("Model", _list(about)) if about else "",
        _section("Estimates", _table(post.summary()._formatted()) + _effects(post, sites, naming) + densities),
        _section("Sites", _sites(post, released)),
        _section(
            "Convergence", "<p>Independent draws: there is nothing to converge.</p>" if one_shot else _convergence(post)
        ),
        _fit_at_sites(assessment),
        _section("Privacy", _list(lines) if (lines := privacy_lines(post.privacy)) else NOT_PRIVATE),
        _section("Exactness", f"<p>{escape(chosen)}</p>" if one_shot else exactness),
        _section("Methods", f"<blockquote>{escape(methods_text(post, about))}</blockquote>"),
        _section("Citation", f"<p>{escape(PAPER)}</p>"),
        _section("Record of the run", _facts(post, logs)),
        _section("Words", f"<p>{escape(GLOSSARY)}</p>"),
    ]
    made = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    path.write_text(
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(head)}</title><style>{STYLE}</style></head><body><h1>{escape(head)}</h1>\n"
        + "\n".join(part for part in sections if part)
        + f"\n<footer>Made {made} with fedpdmc. This file needs no network.</footer></body></html>\n",
        encoding="utf-8",
    )
    return path


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>"


def _list(lines: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"


def _table(table: pd.DataFrame) -> str:
    return f'<div class="wide">{html_table(table)}</div>'


def html_table(table: pd.DataFrame) -> str:
    """A table of texts; every cell knows its column, so that rows can wrap (`WRAPPED`)."""
    names = [escape(str(name)) for name in table.columns]
    head = "".join(_name(name) for name in table.columns)
    rows = "".join(
        f"<tr>{_name(label)}"
        + "".join(f'<td data-column="{name}">{escape(str(x))}</td>' for name, x in zip(names, row, strict=True))
        + "</tr>"
        for label, row in zip(table.index, table.itertuples(index=False), strict=True)
    )
    kind = ' class="many"' if len(names) > MOST_COLUMNS else ""
    return f"<table{kind}><thead><tr><th></th>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _name(text: Any) -> str:
    """A name, which breaks before a level and after an underscore only."""
    return "<th>" + re.sub(r"(?=\[)|(?<=[_:])", "<wbr>", escape(str(text))) + "</th>"


def _fit(assessment: Any) -> str:
    """Whether the model fits is another question than whether the run has converged."""
    if assessment is None:
        return f'<p class="verdict open"><b>Fit</b>: {escape(NOT_ASSESSED)}</p>'
    misfit = assessment.misfit()
    kind, words = ("verdict bad", misfit) if misfit else ("verdict", ["no misfit was found at the sites"])
    return f'<p class="{kind}"><b>Fit</b>: {escape("; ".join(words))}.</p>'


def _dropped(dropped: Mapping[str, tuple[int, int]]) -> str:
    if not dropped:
        return ""
    shares = [f"{site} {gone:,} of {read:,} ({100 * gone / read:.0f} %)" for site, (gone, read) in dropped.items()]
    kind = "verdict bad" if max(gone / read for gone, read in dropped.values()) > MANY_DROPPED else "verdict open"
    return f'<p class="{kind}"><b>Records</b> dropped for a missing value: {escape(", ".join(shares))}.</p>'


def _effects(post: Posterior, sites: Any, naming: Any) -> str:
    scale = EffectScale.of(post)
    known, values, parts = post.settings.get("effect_scale") is not None, draws_of(post), []
    for kind in scale.kinds:
        effects = scale.effects(values, None, kind)
        rows = [row_of(one.label, one.draws, LEVEL) for one in effects]
        if not rows:
            continue
        words = re.sub("ratio|difference|parameter", lambda found: f"{found[0]}s", kind, count=1)
        parts.append(f"<h3>{escape(words[:1].upper() + words[1:])}</h3>")
        if known:
            texts = [numbers(row.low, row.middle, row.high, scale.ratio) for row in rows]
            shown = {
                f"{kind} (median)": [row[0] for row in texts],
                WORDS: [f"{low} to {high}" for _, low, high in texts],
            }
            parts.append(_table(pd.DataFrame(shown, index=pd.Index([row.label for row in rows]))))
            parts.append(f"<p>{INCREMENTS}</p>" if kind == next(iter(scale.kinds)) else "")
        spread = [float(np.std(one.draws)) for one in effects]
        if not scale.ratio and max(spread) > MOST_UNEVEN * min(spread):
            parts.append("<p>The scales of these parameters differ too widely for one figure.</p>")
            continue
        figure = forest(Figure(layout="constrained"), [(None, rows)], scale, kind, LEVEL, width=WIDTH)
        parts.append(_svg(figure[0].figure, f"forest plot of {words}"))
        if len(effects) > MOST_ROWS:
            parts.append(f"<p>The first {MOST_ROWS} of {len(effects)} are drawn.</p>")
    return "".join(parts) + (_by_site(post, scale, sites, naming) if known else "")


def _by_site(post: Posterior, scale: EffectScale, sites: Any, naming: Any) -> str:
    """Estimates by each site's own records, where they are known."""
    effects = scale.effects(draws_of(post))
    try:
        panels, how = site_panels(post, scale, effects[:MOST_BY_SITE], None, None, LEVEL, sites, naming)
    except InputError:
        return ""
    if not panels or not 3 <= len(panels[0][1]) <= MOST_ROWS:
        return ""
    drawn = [forest(Figure(layout="constrained"), [one], scale, None, LEVEL, width=WIDTH)[0].figure for one in panels]
    some = f" The first {MOST_BY_SITE} of {len(effects)} coefficients are drawn." if len(effects) > MOST_BY_SITE else ""
    words = f"{how[:1].upper()}{how[1:]}. {WEIGHTS}{some}"
    return f"<h3>By site</h3><p>{escape(words)}</p>" + "".join(_svg(one, "forest plot by site") for one in drawn)


def _fit_at_sites(assessment: Any) -> str:
    if assessment is None:
        return ""
    body = assessment._repr_html_()
    if len(assessment.survival):
        figure = assessment.plot_survival(Figure(layout="constrained"))
        body += f"<h4>survival at each site</h4>{_svg(figure, 'Kaplan-Meier estimates over the survival of the model')}"
    return _section("Fit at the sites", body)


def _svg(figure: Figure, title: str) -> str:
    return as_svg(figure, title).replace("<svg", '<svg class="figure"', 1)


def _sites(post: Posterior, released: Sequence[str]) -> str:
    names = post.settings.get("sites") or [f"site {i}" for i in range(len(post.messages))]
    counts = (post.messages, post.bytes, post.gradient_evaluations)
    if any(len(count) != len(names) for count in counts):
        names = [f"site {i}" for i in range(len(post.messages))]
    columns = ("messages", "bytes", "passes over its records")
    cells = {name: [f"{x:,}" for x in count] for name, count in zip(columns, counts, strict=True)}
    table = pd.DataFrame(cells, index=pd.Index(names))
    # The member that walks the prior is the coordinator's own: it has no records and no line to it.
    site = np.asarray([name != post.settings.get("prior_site") for name in names])
    cost = f"<p>{post.rounds} rounds of communication, {int(post.bytes[site].sum()):,} bytes in all.</p>"
    weights = post.settings.get("influence") or {}
    lines = [f"{name}: {100 * own['share']:.3g} % of the information" for name, own in weights.items()]
    lines += [*post.settings.get("doubts", []), *information_lines(post)]
    words = f"<p>Sites released: {escape('; '.join(released))}.</p>" if released else ""
    # Over a network sites may keep their passes to themselves.
    table = table.loc[site, list(columns) if post.gradient_evaluations[site].any() else list(columns[:2])]
    return cost + _table(table) + (_list(lines) if lines else "") + words


def _convergence(post: Posterior) -> str:
    both = zip(post.ess().items(), post.rhat().values(), strict=True)
    shown = pd.DataFrame({name: {"ESS": f"{x:,.0f}", "R-hat": f"{r:.3f}"} for (name, x), r in both}).T
    words = "The energy is a quadratic form of all parameters. R-hat is nested: chains are compared in four groups."
    return _table(shown) + f"<p>{words}</p>" + _svg(paths(post), "paths of one chain")


def _facts(post: Posterior, logs: Mapping[str, str]) -> str:
    keys = "dynamics reference control chosen chains duration burn_in seed study contract run versions".split()
    facts = {key: post.settings[key] for key in keys if post.settings.get(key) not in (None, "")}
    facts |= {f"log of {site}, SHA-256": seal for site, seal in logs.items()}
    for key, value in facts.items():
        if isinstance(value, dict):
            facts[key] = ", ".join(f"{name} {one}" for name, one in value.items())
        elif isinstance(value, float):
            facts[key] = f"{value:.6g}"
    rows = "".join(f"<dt>{escape(key)}</dt><dd>{escape(str(value))}</dd>" for key, value in facts.items())
    return f"<dl>{rows}</dl>"


PAPER = "Bierkens, J. and Duncan, A. Federated Bayesian Computation via Piecewise Deterministic Markov Processes."

# The end of a line about dropped records.
DROPPED = "dropped for a missing value"
MANY_DROPPED = 0.1  # share of a site's records that are left out, above which it is warned of


def methods_text(post: Posterior, about: Sequence[str]) -> str:
    """A paragraph that can be pasted; ``about`` are lines on the model, and the first one names it."""
    settings = post.settings
    # The member that walks the prior is the coordinator's own and has no records.
    sites = len(post.messages) - (settings.get("prior_site") is not None)
    version = settings.get("versions", {}).get("fedpdmc", "")
    prior = next((line.removeprefix("prior: ") for line in about if line.startswith("prior: ")), None)
    left_out = "".join(f" {line[:1].upper()}{line[1:]}." for line in about if line.endswith(DROPPED))
    model = f"Model: {about[0]}. " if about else ""
    model += f"The prior was {prior}. " if prior else ""
    if settings.get("method") == "private-laplace":
        return (
            f"{model}A differentially private approximation of the posterior of {len(post.names)} parameters was made from "
            f"noisy derivatives of {sites} sites with fedpdmc {version}; the noise is part of the reported uncertainty. "
            "Records did not leave the sites."
        )
    ess, rhat = min(post.ess().values()), max(post.rhat().values())
    exact = (
        "Event times were drawn under proved bounds, so that the process targets the exact posterior of the pooled records"
        if post.certified
        else "Event times were drawn under bounds that are not proved"
        if not post.certificate.asserted
        else f"Event times were drawn under proved bounds; {ASSERTED}"
    )
    reference = settings.get("reference")
    whitened = f" on a {reference} reference with {settings.get('control')} control variates" if reference else ""
    return (
        f"{model}The posterior of {len(post.names)} parameters was sampled with fedpdmc {version}, a federated piecewise "
        f"deterministic Markov process ({settings['dynamics']}){whitened}, from records at {sites} "
        f"site{'s' if sites != 1 else ''} that were not pooled. {exact}. {post.chains} chains ran to process time "
        f"{post.duration:g} after a burn-in of {settings.get('burn_in', 0):g}, in {post.rounds} rounds of communication. "
        f"The smallest bulk effective sample size was {ess:,.0f}, the largest nested R-hat {rhat:.3f}, the energy included. "
        f"Intervals of the estimates have equal tails and hold {100 * LEVEL:g} % of the posterior.{left_out}"
    )


MOST_DENSITIES = 12  # that are drawn
MOST_PATHS = 3  # coordinates whose paths are drawn
PATH_TIME = 30.0  # process time of a path
BINS = 60  # of a density
LONGEST_NAME = 24  # characters of a name that are drawn


def as_svg(figure: Figure, title: str) -> str:
    """A figure as an inline element with a title for screen readers."""
    with io.StringIO() as file:
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
        text = file.getvalue()
    text = re.sub(r' (width|height)="[\d.]+pt"', "", text[text.index("<svg") :], count=2)
    return text.replace(INK, "currentColor").replace("<svg", f'<svg role="img" aria-label="{title}"', 1)


def axes_of(figure: Figure, *place: int):
    """Axes without a frame."""
    axes = figure.add_subplot(*place)
    axes.spines[["top", "right"]].set_visible(False)
    return axes


def density(name: str, values: np.ndarray) -> Figure:
    """A marginal density; values of shape (n,)."""
    figure = Figure(figsize=(2.2, 1.6), layout="constrained")
    axes = axes_of(figure)
    inside = values[(values >= np.quantile(values, 0.001)) & (values <= np.quantile(values, 0.999))]
    axes.hist(inside, bins=BINS, density=True, color=ACCENT, alpha=0.75)
    axes.spines["left"].set_visible(False)
    axes.set_yticks([])
    axes.set_title(shorten(name, LONGEST_NAME), fontsize=9)
    axes.tick_params(labelsize=8)
    axes.xaxis.set_major_locator(MaxNLocator(3))
    axes.ticklabel_format(axis="x", style="sci", scilimits=(-3, 4))
    axes.xaxis.get_offset_text().set_fontsize(8)
    return figure


def paths(post: Posterior) -> Figure:
    """The beginning of one chain's path: it is continuous, and events change its direction."""
    count = min(len(post.names), MOST_PATHS)
    shown = min(post.duration, PATH_TIME)
    whole = min(post.most_draws, int(np.ceil(20 * post.duration)) + 1)
    draws = post.draws(whole)[0]
    times = np.linspace(0.0, post.duration, whole)
    kept = times <= shown
    figure = Figure(figsize=(5.4, 1.2 * count), layout="constrained")
    for i in range(count):
        axes = axes_of(figure, count, 1, i + 1)
        axes.plot(times[kept], draws[kept, i], color=ACCENT, linewidth=1.0)
        axes.set_title(shorten(post.names[i]), fontsize=9, loc="left")
        axes.tick_params(labelsize=8)
    axes.set_xlabel("process time of one chain (in the coordinates that were sampled)", fontsize=9)
    return figure
