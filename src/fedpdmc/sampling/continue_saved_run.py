"""Continuing a saved run: its state from an archive, its sites and prior from the user."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from fedpdmc._jax.precision import double_precision
from fedpdmc.console.progress import showing
from fedpdmc.errors import InputError
from fedpdmc.members.latent_handover import latents_at
from fedpdmc.members.member import DescribedSites
from fedpdmc.models.mixture_prior import MixturePrior
from fedpdmc.models.variables import variables
from fedpdmc.results.archive import read
from fedpdmc.results.posterior import Posterior
from fedpdmc.results.run_state import RunState
from fedpdmc.sampling.arguments import check_length
from fedpdmc.sampling.communication_cost import GivenUp
from fedpdmc.sampling.defaults import Method
from fedpdmc.sampling.driver import Sampler
from fedpdmc.sampling.public_potential import public_potential
from fedpdmc.sampling.run_state_arrays import unpack_choices, unpack_position, unpack_reference
from fedpdmc.sampling.same_sites import check_ledger, members_of


@double_precision
def load(path: str | Path) -> Posterior:
    """Read a posterior that `Posterior.save` wrote.

    It holds no records. With the state of its run it has the sites' derivatives, which `fedpdmc.assessment` needs for
    heterogeneity. To continue, give it the sites and the prior again: ``post.extend(ess=..., sites=sites, prior=prior)``.
    """
    post, state = read(path)
    if state is not None:
        post.attach(SavedRun(post, state))
        try:
            made = unpack_reference(state.facts["reference"], state.arrays)
            post.reference = dataclasses.replace(post.reference, control=made.control, name=made.name)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            found = f"{path}, whose run has a state that cannot be read ({type(error).__name__})"
            raise InputError("load(path)", found, "Give a folder that Posterior.save wrote, whole.") from error
    return post


class SavedRun:
    """The run of a posterior that was read from an archive.

    Parameters
    ----------
    post : Posterior
    state : RunState
        Where its run was.
    """

    def __init__(self, post: Posterior, state: RunState):
        self.post, self._state = post, state

    def state(self) -> RunState:
        """Where the run is."""
        return self._state

    def extend(
        self,
        *,
        duration: float | None = None,
        ess: float | None = None,
        sites: Any = None,
        prior: Any = None,
        progress: bool = True,
    ) -> Posterior:
        """Open the sites again, and continue by ``duration`` or to ``ess``."""
        check_length(duration, ess)
        if sites is None:
            raise InputError(
                "sites",
                "None, of a posterior that was read from disk without its records",
                "Give the sites and the prior that sample() was given: post.extend(..., sites=sites, prior=prior).",
            )
        if prior is None and isinstance(sites, DescribedSites):
            prior = sites.prior
        with showing(progress):
            return self._sampler(sites, prior).extend(duration=duration, ess=ess, progress=progress)

    @double_precision
    def _sampler(self, sites: Any, prior: Any) -> Sampler:
        """A sampler that is where the saved one was.

        A site with a budget begins a new run in its ledger, with new random numbers; the observed time before is added to
        its report.
        """
        facts, arrays, post = self._state.facts, self._state.arrays, self.post
        method = self._method(sites, prior)
        before = post.privacy or {}
        for site in method.own_sites:
            if site.budget is not None:
                check_ledger(site, before[site.name]["run"])
        sampler = Sampler(method, facts["burn_in"], facts["keep"])
        sampler.restore(unpack_position(arrays))
        sampler.engine.set_latents(latents_at(method.own_sites, sampler.engine.time, method.chains))
        rounds, plans, segments = facts["given_up"]
        sampler.given_up = GivenUp(rounds, plans, segments, arrays["given_up_passes"])
        sampler.prior_lines = post.settings.get("prior", [])
        sampler.store, sampler.origin = post.store.copy(), post.origin
        sampler.engine.federation.continue_accounts(before)
        return sampler

    def _method(self, sites: Any, prior: Any) -> Method:
        """All choices of the saved run, with the sites that were given."""
        state, names = self._state, self.post.names
        facts, dynamics = state.facts, self.post.dynamics
        mixture = prior if isinstance(prior, MixturePrior) else None
        members, prior, rate = members_of(state, names, sites, prior)
        choices, reference, control = unpack_choices(facts, state.arrays)
        walked = prior if facts["prior_at"] == "coordinator" else None
        return Method(
            sites=members,
            dim=len(names),
            prior=prior,
            dynamics=dynamics,
            reference=reference,
            control=control,
            chains=self.post.chains,
            names=names,
            public=public_potential(members, walked, control, reference, dynamics, mixture),
            mixture=mixture,
            redistribution=rate,
            variables=variables(members, names),
            **choices,
        )
