"""Sentences for the methods section of a paper, from what a run recorded."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedpdmc.results.posterior import Posterior

PAPER = "Bierkens, J. and Duncan, A. Federated Bayesian Computation via Piecewise Deterministic Markov Processes."


def methods_text(post: Posterior, model: str | None) -> str:
    """A paragraph that can be pasted."""
    settings = post.settings
    # The member that walks the prior is the coordinator's own and has no records.
    sites = len(post.messages) - (settings.get("prior_site") is not None)
    version = settings.get("versions", {}).get("fedpdmc", "")
    about = f"The model was {model}. " if model else ""
    if settings.get("method") == "private-laplace":
        return (
            f"{about}A differentially private approximation of the posterior of {len(post.names)} parameters was made from "
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
        f"{about}The posterior of {len(post.names)} parameters was sampled with fedpdmc {version}, a federated piecewise "
        f"deterministic Markov process ({settings['dynamics']}){whitened}, from records at {sites} "
        f"site{'s' if sites != 1 else ''} that were not pooled. {exact}. {post.chains} chains ran to process time "
        f"{post.duration:g} after a burn-in of {settings.get('burn_in', 0):g}, in {post.rounds} rounds of communication. "
        f"The smallest bulk effective sample size was {ess:,.0f}, the largest nested R-hat {rhat:.3f}, the energy included."
    )
