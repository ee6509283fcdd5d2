"""Sentences for the methods section of a paper, from what a run recorded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedpdmc.results.posterior import Posterior

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
    told = f"The model was {about[0]}. " if about else ""
    told += f"The prior was {prior}. " if prior else ""
    if settings.get("method") == "private-laplace":
        return (
            f"{told}A differentially private approximation of the posterior of {len(post.names)} parameters was made from "
            f"noisy derivatives of {sites} sites with fedpdmc {version}; the noise is part of the reported uncertainty. "
            "Records did not leave the sites."
        )
    ess, rhat = min(post.ess().values()), max(post.rhat().values())
    exact = (
        "Event times were drawn under proved bounds, so that the process targets the exact posterior of the pooled records"
        if post.certified
        else "Event times were drawn under bounds that are not proved"
    )
    reference = settings.get("reference")
    whitened = f" on a {reference} reference with {settings.get('control')} control variates" if reference else ""
    return (
        f"{told}The posterior of {len(post.names)} parameters was sampled with fedpdmc {version}, a federated piecewise "
        f"deterministic Markov process ({settings['dynamics']}){whitened}, from records at {sites} "
        f"site{'s' if sites != 1 else ''} that were not pooled. {exact}. {post.chains} chains ran to process time "
        f"{post.duration:g} after a burn-in of {settings.get('burn_in', 0):g}, in {post.rounds} rounds of communication. "
        f"The smallest bulk effective sample size was {ess:,.0f}, the largest nested R-hat {rhat:.3f}, the energy included. "
        f"Intervals of the estimates have equal tails and hold 90 % of the posterior.{_dropped(about)}"
    )


def _dropped(about: Sequence[str]) -> str:
    found = [line for line in about if line.endswith(DROPPED)]
    return "".join(f" {line[:1].upper()}{line[1:]}." for line in found)
