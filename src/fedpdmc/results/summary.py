"""The summary of a posterior: the verdict on convergence, a table, and how the run went."""

from __future__ import annotations

import sys
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from fedpdmc.console.wrapping import terminal_width, wrapped
from fedpdmc.results.diagnostics import diagnose, energy
from fedpdmc.results.exactness_certificate import ASSERTED
from fedpdmc.results.verdict import TO_DO
from fedpdmc.validation import interval_ends, one_of

if TYPE_CHECKING:
    from fedpdmc.results.posterior import Posterior

INTERVAL_DRAWS = 1000  # of each chain, from which intervals are computed
# Columns that are left out, in this order, if the table is too wide for the terminal.
SPARED = ("median", "ess_tail", "mcse")
# What to do about a posterior that is far from any Gaussian.
NEARER = (
    "The posterior is far from a Gaussian: it takes fewer rounds in parameters in which it is nearer to one (logarithms of "
    "scales, standardised effects, centred columns), or with effects of groups as latents of their sites."
)


class Summary(pd.DataFrame):
    """A table with a row for each parameter; it prints with the verdict before it and how the run went after it.

    What is printed fits the width of the terminal, or 80 columns if there is none.
    The columns are mean, sd, mcse (Monte Carlo standard error of the mean), median, the ends of the interval, ess, ess_tail
    (of the tails) and rhat.
    Anything derived from it, such as a selection of rows, is a plain `pandas.DataFrame`.

    Attributes
    ----------
    verdict : str
        One line on convergence.
    notes : list of str
        The run's verdict, its kind of bounds, and its cost in privacy.
    """

    _metadata = ["verdict", "notes"]

    @property
    def _constructor(self):
        return pd.DataFrame

    def __repr__(self) -> str:
        """The same as ``str``."""
        return str(self)

    def __str__(self) -> str:
        width = terminal_width(sys.stdout)
        # The remedy begins a new line, so that a call in it can be copied whole.
        verdict = self.verdict.replace(TO_DO, f"\n{TO_DO.strip()} ")
        notes = [wrapped(note, width) for note in self.notes]
        return "\n".join([wrapped(verdict, width), "", self._table(width), "", *notes])

    def _repr_html_(self) -> str:
        lines = "<br>".join(escape(line, quote=False) for line in self.notes)
        return f"<p><b>{escape(self.verdict, quote=False)}</b></p>{self._formatted().to_html()}<p>{lines}</p>"

    def _table(self, width: int) -> str:
        """The table as printed; if it is too wide, the least important columns are left out."""
        shown = self._formatted().rename_axis(index=None)
        for column in SPARED:
            # pandas breaks lines that are nearly as wide.
            if max(map(len, shown.to_string().splitlines())) > width - 3:
                shown = shown.drop(columns=column)
        left_out = ", ".join(name for name in self.columns if name not in shown)
        words = f"\n(not shown, for width: {left_out})" if left_out else ""
        return shown.to_string(line_width=width) + words

    def _formatted(self) -> pd.DataFrame:
        """Numbers as shown: as many decimals as the sd has with three digits, ESS whole, R-hat to a thousandth."""
        how = {"ess": "{:,.0f}", "ess_tail": "{:,.0f}", "rhat": "{:.3f}", "mcse": "{:.2g}"}
        places = [_places(sd) for sd in self["sd"]]
        columns = {
            name: [how.get(name, place).format(x) for x, place in zip(self[name], places, strict=True)]
            for name in self.columns
        }
        return pd.DataFrame(columns, index=self.index)


def _places(sd: float) -> str:
    """A format for numbers that are known to within ``sd``; with an exponent if it is very small or large."""
    if not 1e-4 <= sd < 1e6:
        return "{:.3g}"
    return f"{{:.{max(2 - int(np.floor(np.log10(sd))), 0)}f}}"


def summary(post: Posterior, level: float, interval: str, exp: bool) -> Summary:
    """The table of `Posterior.summary`."""
    ends = interval_ends("summary(level)", level)
    one_of("summary(interval)", interval, ("quantile", "hdi"))
    if post.transformed:
        names, moments, draws, found = _variables(post)
    else:
        # Parameters that are the coordinates themselves: mean and sd are exact integrals along the paths.
        (found, _), names, moments = post.diagnosis(), list(post.names), (post.mean(), np.sqrt(np.diag(post.cov())))
        draws = post.draws(min(INTERVAL_DRAWS, post.most_draws))
    if exp:
        draws, moments = np.exp(draws), None
    flat = draws.reshape(-1, len(names))
    mean, sd = (flat.mean(0), flat.std(0)) if moments is None else moments
    low, high = _interval(flat, list(ends.values()), interval)
    below, above = (("hdi_" if interval == "hdi" else "") + name for name in ends)
    table = Summary(
        {
            "mean": mean,
            "sd": sd,
            "mcse": sd * found.error[:-1],
            "median": np.median(flat, 0),
            below: low,
            above: high,
            "ess": found.ess[:-1],
            "ess_tail": found.tail[:-1],
            "rhat": found.rhat[:-1],
        },
        index=pd.Index([f"exp({name})" for name in names] if exp else names, name="parameter"),
    )
    table.verdict, table.notes = str(post.verdict), _notes(post)
    return table


def _variables(post: Posterior):
    """Variables that are functions of the coordinates: all from draws."""
    from fedpdmc.models.user_function import scalars

    n = post.diagnostic_draws()
    values = scalars(post.variables(n))
    names, draws = list(values), np.stack(list(values.values()), -1)
    starts = np.stack(list(scalars(post.origin_variables()).values()), -1)[:, 0]
    x = post.draws(draws.shape[1])
    mean, cov = post.mean(), post.cov()
    whole = np.concatenate([draws, energy(x, mean, cov)[..., None]], -1)
    start = np.concatenate([starts, energy(post.origin, mean, cov)[:, None]], -1)
    found = diagnose(whole, [*names, "energy"], start)
    return names, None, draws, found


def _interval(flat: np.ndarray, ends: list[float], interval: str) -> np.ndarray:
    """Ends of shape (2, q): of equal tails, or of the shortest interval that holds enough of the draws."""
    if interval == "quantile":
        return np.quantile(flat, ends, axis=0)
    ordered = np.sort(flat, 0)
    inside = min(max(int(np.ceil((ends[1] - ends[0]) * len(ordered))), 1), len(ordered) - 1)
    widths = ordered[inside:] - ordered[: len(ordered) - inside]
    first, columns = np.argmin(widths, 0), np.arange(flat.shape[1])
    return np.stack([ordered[first, columns], ordered[first + inside, columns]])


def _notes(post: Posterior) -> list[str]:
    if post.settings.get("method") == "private-laplace":
        cost = f"one shot: {post.rounds} rounds, {int(post.messages.sum())} messages, {int(post.bytes.sum()):,} bytes."
        return [post.settings["chosen"], cost, *privacy_lines(post.privacy)]
    found, _ = post.diagnosis()
    own = " (the coordinator's own for the prior included)" if post.settings.get("prior_site") else ""
    lines = [
        f"energy: ESS {found.ess[-1]:,.0f}, R-hat {found.rhat[-1]:.3f}",
        f"{post.settings['dynamics']}, {post.chains} chains to process time {post.duration:g}; {post.rounds} rounds, "
        f"{int(post.messages.sum())} messages{own}, {int(post.bytes.sum()):,} bytes, {int(post.events.sum()):,} events, "
        f"{100 * post.settings['ended_by_arrival']:.3g} % of plans ended by an arrival.",
    ]
    if post.settings.get("chosen"):
        lines.append(post.settings["chosen"])
    if post.settings["reference"] == "laplace" and post.settings.get("reference_why"):
        lines.append(
            f"Laplace reference and a burn-in of {post.settings['burn_in']:.3g}: {post.settings['reference_why']}. {NEARER}"
        )
    prior = post.settings.get("prior")
    lines += [f"prior of the parameters that were sampled: {'; '.join(prior)}"] if prior else []
    lines += [bounds_line(post), *post.settings.get("doubts", ())]
    return [*lines, *information_lines(post), *privacy_lines(post.privacy)]


def bounds_line(post: Posterior) -> str:
    """What is proved about the event times, which is not convergence."""
    if post.certified:
        return "event bounds: certified (every event time is exact; this says nothing about convergence)"
    if post.certificate.asserted:
        return f"event bounds: NOT certified: {ASSERTED} (this is apart from convergence)"
    seen = f"{int(post.violations.sum()):,} violations seen"
    return f"event bounds: NOT certified: not exact; {seen} (this is apart from convergence)"


def information_lines(post: Posterior) -> list[str]:
    """How much the sites' answers carry about their records."""
    if not post.information:
        return []
    bits = ", ".join(f"{name} {bits:,.0f}" for name, bits in post.information.items())
    return [f"information that each site's answers carry about its records, in bits, on average at most: {bits}"]


def privacy_lines(privacy: dict[str, Any] | None) -> list[str]:
    """One line for each site with a budget, then what is covered and what is not."""
    if not privacy:
        return []
    lines = []
    for name, site in privacy.items():
        lines.append(
            f"privacy of {name}: epsilon = {site['epsilon']:g} at delta = {site['delta']:g} in total, if "
            f"{site['relation']}; {100 * site['spent']:.3g} % spent; running line epsilon = {site['running_epsilon']:.3g} "
            f"(alpha = {site['alpha']:.4g} fixed), which holds at every moment, in addition to the total; "
            f"observed {site['observed_unit']} {site['observed']:.4g} over all "
            f"chains, {site['releases']} releases; records {site['records']}."
        )
        if several := site.get("epsilon_of_several_records"):
            each = ", ".join(f"{epsilon:.2g} with {k}" for k, epsilon in several.items())
            lines.append(f"a person with several records at {name} has a larger epsilon: {each}.")
        if "NOT private" in site["randomness"]:
            lines.append(f"privacy of {name}: the site's randomness is {site['randomness']}.")
    first = next(iter(privacy.values()))
    return [*lines, f"covered: {first['covered']}.", f"not covered: {first['not_covered']}."]
