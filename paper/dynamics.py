"""All four dynamics, federated (suggested in section 7 of the paper): effective samples per round and per gradient, by M."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.figure import Figure

import fedpdmc as fp
from paper.distances import Exact, bias, by, measure, range_of, ratio
from paper.logistic import Size, paper_problem, size
from paper.problems import Regression
from paper.result_folder import COLOURS, GREY, Study, Verdict, axes_of, log_sites, log_values

DYNAMICS = {
    "Zig-Zag": fp.ZigZag(),
    "Bouncy Particle": fp.BouncyParticle(),
    "Boomerang": fp.Boomerang(),
    "factorised Boomerang": fp.FactorisedBoomerang(),
}
CONTROLS = ("none", "quadratic")


def one_run(
    problem: Regression, exact: Exact, size: Size, name: str, control: str, sites: int
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A line of the table, and the distances."""
    post = fp.sample(
        problem.sites(sites), problem.prior, dynamics=DYNAMICS[name], reference="laplace", control=control,
        chains=size.runs, duration=size.duration, burn_in=0.0, init=exact.starts(size.runs), seed=sites, progress=False,
    )  # fmt: skip
    worst = min(post.ess().values())
    labels: dict[str, Any] = {"dynamics": name, "control": control, "sites": sites}
    distances = measure(post, exact, 1000 * sites, **labels)
    gradients = float(post.gradient_evaluations.sum()) / sites
    line = labels | {
        "events_per_time": float(post.events.mean() / post.duration),
        "rounds": post.rounds,
        "ess": worst,
        "ess_per_round": worst / post.rounds,
        "ess_per_full_gradient": worst / max(gradients, 1.0),
        "distance_over_floor": ratio(distances).value,
    }
    return line, distances


def markdown(table: list[dict[str, Any]]) -> str:
    """One table: dynamics and control by rows, M by columns, ESS per round and per full gradient."""
    sites = list(by(table, "sites"))
    lines = [
        "| dynamics | control | ESS per | " + " | ".join(f"M = {m}" for m in sites) + " |",
        "|---" * (3 + len(sites)) + "|",
    ]
    for name, own in by(table, "dynamics").items():
        for control, part in by(own, "control").items():
            for key, label in (("ess_per_round", "round"), ("ess_per_full_gradient", "gradient")):
                cells = " | ".join(f"{row[key]:.3g}" for row in part)
                lines.append(f"| {name} | {control} | {label} | {cells} |")
    return "\n".join(lines) + "\n"


def draw(table: list[dict[str, Any]]) -> Figure:
    """Both yields against M."""
    figure = Figure(figsize=(9.6, 4.6), layout="constrained")
    for place, (key, label) in enumerate((("ess_per_round", "round"), ("ess_per_full_gradient", "full gradient"))):
        axes = axes_of(
            figure, 1, 2, place + 1, title=f"Effective samples per {label}", x="sites M", y=f"ESS per {label}"
        )
        for colour, (name, own) in zip(COLOURS, by(table, "dynamics").items(), strict=False):
            for control, part in by(own, "control").items():
                style = "-" if control == "quadratic" else (0, (2, 2))
                shown = name if control == "quadratic" else None
                m = [row["sites"] for row in part]
                axes.plot(
                    m, [row[key] for row in part], color=colour, linestyle=style, marker="o", markersize=4, label=shown
                )
        log_values(axes)
        log_sites(axes, by(table, "sites"))
    for style, label in (("-", "quadratic control"), ((0, (2, 2)), "no control")):
        figure.axes[0].plot([], [], color=GREY, linestyle=style, label=label)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=6, frameon=False, fontsize=8)
    return figure


def run(study: Study) -> Verdict:
    """The table and its figure."""
    want = size(study)
    problem, exact = paper_problem(want)
    cases = [(name, control, m) for name in DYNAMICS for control in CONTROLS for m in want.sites]
    if study.quick:
        # Every dynamics and every control once.
        cases = [(name, "none" if name == "Zig-Zag" else "quadratic", want.sites[-1]) for name in DYNAMICS]
    table, rows, ratios = [], [], []
    for case in study.track(cases, "dynamics:"):
        line, distances = one_run(problem, exact, want, *case)
        table.append(line)
        rows += distances
        ratios.append(ratio(distances))
    study.table("dynamics", table)
    study.table("dynamics-distances", rows)
    (study.out / "dynamics.md").write_text(markdown(table), encoding="utf-8")
    study.figure("dynamics", draw(table))
    best = max(table, key=lambda row: row["ess_per_round"] * (row["sites"] == want.sites[-1]))
    plain = min(table, key=lambda row: row["ess_per_round"] if row["sites"] == want.sites[-1] else np.inf)
    off = bias(rows, "dynamics", "control", "sites")
    return Verdict(
        "dynamics",
        all(found.on_the_floor for found in ratios) and off.none_seen,
        f"{len(cases)} combinations of dynamics, control variates and M: distance to HMC over that of exact samples "
        f"{range_of(ratios)}, pooled means within {off}; at M = {want.sites[-1]} a round brings "
        f"{best['ess_per_round']:.3g} effective samples with "
        f"{best['dynamics']} (control: {best['control']}), {plain['ess_per_round']:.3g} with {plain['dynamics']} "
        f"(control: {plain['control']}).",
    )
