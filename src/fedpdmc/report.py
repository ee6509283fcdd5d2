"""The summary of a posterior, in words and a table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedpdmc.diagnostics import by_quantity

if TYPE_CHECKING:
    from fedpdmc.posterior import Posterior


class Table(NamedTuple):
    """What is said of each parameter."""

    names: list[str]
    mean: np.ndarray
    sd: np.ndarray
    quantiles: np.ndarray
    ess: list[float]
    rhat: list[float]


def summary(post: Posterior) -> str:
    """Mean, standard deviation, 5 % and 95 % quantiles, ESS and R-hat of each parameter; then how the run went."""
    ess, rhat = post.ess(), post.rhat()
    table = _parameters(post, ess, rhat) if not post.transformed else _variables(post)
    width = max(len(name) for name in [*table.names, "parameter"])
    lines = [f"{'parameter':<{width}} {'mean':>10} {'sd':>10} {'5%':>10} {'95%':>10} {'ess':>8} {'rhat':>6}"]
    for i, name in enumerate(table.names):
        low, high = table.quantiles[:, i]
        lines.append(
            f"{name:<{width}} {table.mean[i]:>10.4g} {table.sd[i]:>10.4g} {low:>10.4g} {high:>10.4g} "
            f"{table.ess[i]:>8.0f} {table.rhat[i]:>6.3f}"
        )
    lines.append(f"{'energy':<{width}} {'':>43} {ess['energy']:>8.0f} {rhat['energy']:>6.3f}")
    seen = f"bounds NOT certified: not exact; {int(post.violations.sum()):,} violations seen"
    kind = "certified bounds: exact" if post.certified else seen
    lines.append(
        f"{post.settings['dynamics']}, {post.chains} chains to process time {post.duration:g}; {post.rounds} rounds, "
        f"{int(post.messages.sum())} messages, {int(post.bytes.sum()):,} bytes, {int(post.events.sum()):,} events, "
        f"{100 * post.settings['objected']:.3g} % of plans ended by an objection; {kind}."
    )
    return "\n".join(lines + privacy_lines(post.privacy))


def _parameters(post: Posterior, ess: dict[str, float], rhat: dict[str, float]) -> Table:
    """Parameters that are the coordinates themselves: moments are exact integrals along the paths."""
    draws = post.draws(min(1000, post.most_draws)).reshape(-1, len(post.names))
    return Table(
        post.names, post.mean(), np.sqrt(np.diag(post.cov())), np.quantile(draws, [0.05, 0.95], axis=0),
        [ess[name] for name in post.names], [rhat[name] for name in post.names],
    )  # fmt: skip


def _variables(post: Posterior) -> Table:
    """Variables that are functions of the coordinates: all from draws."""
    from fedpdmc.variables import scalars

    values = scalars(post.variables(post.diagnostic_draws()))
    names, draws = list(values), np.stack(list(values.values()), -1)
    flat = draws.reshape(-1, len(names))
    ess, rhat = (by_quantity(what, draws, names) for what in ("ess", "rhat"))
    return Table(
        names, flat.mean(0), flat.std(0), np.quantile(flat, [0.05, 0.95], axis=0),
        [ess[name] for name in names], [rhat[name] for name in names],
    )  # fmt: skip


def privacy_lines(privacy: dict[str, Any] | None) -> list[str]:
    """One line for each site with a budget, then in words what is covered and what is not."""
    if not privacy:
        return []
    lines = []
    for name, site in privacy.items():
        lines.append(
            f"privacy of {name}: epsilon = {site['epsilon']:g} at delta = {site['delta']:g} in total, if "
            f"{site['relation']}; {100 * site['spent']:.3g} % spent; running line epsilon = {site['running_epsilon']:.3g} "
            f"(alpha = {site['alpha']:.4g} fixed), which holds at every moment beside the total; "
            f"observed {site['observed_unit']} {site['observed']:.4g} over all "
            f"chains, {site['releases']} releases; records {site['records']}."
        )
        if "NOT private" in site["randomness"]:
            lines.append(f"privacy of {name}: the site's randomness is {site['randomness']}.")
    first = next(iter(privacy.values()))
    return [*lines, f"covered: {first['covered']}.", f"not covered: {first['not_covered']}."]
