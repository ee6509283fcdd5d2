"""The summary of a posterior, in words and a table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from fedpdmc.posterior import Posterior


def summary(post: Posterior) -> str:
    """Mean, standard deviation, 5 % and 95 % quantiles, ESS and R-hat of each parameter; then how the run went."""
    mean, sd = post.mean(), np.sqrt(np.diag(post.cov()))
    draws = post.draws(min(1000, post.most_draws)).reshape(-1, len(post.names))
    low, high = np.quantile(draws, [0.05, 0.95], axis=0)
    ess, rhat = post.ess(), post.rhat()
    width = max(len(name) for name in [*post.names, "parameter"])
    lines = [f"{'parameter':<{width}} {'mean':>10} {'sd':>10} {'5%':>10} {'95%':>10} {'ess':>8} {'rhat':>6}"]
    for i, name in enumerate(post.names):
        lines.append(
            f"{name:<{width}} {mean[i]:>10.4g} {sd[i]:>10.4g} {low[i]:>10.4g} {high[i]:>10.4g} "
            f"{ess[name]:>8.0f} {rhat[name]:>6.3f}"
        )
    lines.append(f"{'energy':<{width}} {'':>43} {ess['energy']:>8.0f} {rhat['energy']:>6.3f}")
    kind = "certified bounds: exact" if post.certified else "bounds NOT certified: not exact"
    lines.append(
        f"{post.settings['dynamics']}, {post.chains} chains to process time {post.duration:g}; {post.rounds} rounds, "
        f"{int(post.messages.sum())} messages, {int(post.bytes.sum()):,} bytes, {int(post.events.sum()):,} events; "
        f"{kind}."
    )
    return "\n".join(lines + privacy_lines(post.privacy))


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
