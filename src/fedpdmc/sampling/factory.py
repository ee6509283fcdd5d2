"""The parts of a run, made from its method: federation, coordinator, start state and engine."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Int

from fedpdmc._jax.by_numpy import once
from fedpdmc._jax.compilation import on_device
from fedpdmc._jax.random_streams import ChainKeys, chain_keys, normals, uniforms
from fedpdmc.clocks import ClockChoice
from fedpdmc.clocks.choose import LEAST_CHAINS, choices_in_one_process
from fedpdmc.console.progress import report
from fedpdmc.dynamics import Dynamics, Turn, first_waits
from fedpdmc.members.private_site import PrivateSite
from fedpdmc.members.run_coordinates import Opening, choose_clock, local_columns, sums_over_records
from fedpdmc.members.site import Member, Site
from fedpdmc.results.diagnostics import wide_chains
from fedpdmc.sampling.coordinator import Coordinator, State, shares
from fedpdmc.sampling.defaults import Method, start_inside, walls_of
from fedpdmc.sampling.engines import lockstep
from fedpdmc.sampling.engines.base import Engine, Federation, JoinedFederation
from fedpdmc.sampling.engines.compiled_loop import CompiledEngine, LocalFederation
from fedpdmc.sampling.engines.lockstep import LockstepEngine
from fedpdmc.sampling.engines.rounds import BudgetHorizon, PrivateSites, RoundsEngine
from fedpdmc.sampling.laplace_reference import prior_mean
from fedpdmc.sampling.mode_search import potential_values

# A part of the chains (`fedpdmc.results.diagnostics.wide_chains`) starts twice as far out as the others usually are, and no
# more than so many standard deviations farther: with tens of parameters, twice is where no chain ever is. Starts at four
# standard deviations would show a reference that is too narrow in two runs of three, but a burn-in leaves traces of them.
FARTHER = 2.0
HALVINGS = 10  # of starts, at most, where averages over the reference did not settle
HIGHEST_START = 30.0  # rise of U from the centre, besides the dimension, at which a start is not halved


def open_engine(method: Method, burn_in: float) -> tuple[Engine, BudgetHorizon | None]:
    """The engine of a run, its sites opened, and how far ahead it plans where sites have a privacy budget."""
    parts = coordinator(method, burn_in), start_state(method, burn_in), coordinator_key(method)
    if not method.elsewhere and not any(site.budget is not None or site.log is not None for site in method.sites):
        # In lockstep all sites draw from one stream, so a site with its own seed is not run in lockstep.
        together = method.chains >= LEAST_CHAINS and all(site.seed is None for site in method.own_sites)
        together = together and lockstep.suits(parts[0])
        members = local_federation(method, dense=together)
        engine = LockstepEngine if together and lockstep.applies(members.groups) else CompiledEngine
        return engine(members, *parts), None
    members, horizon = federation(method), None
    if members.accounts:
        horizon = BudgetHorizon(method.dynamics, method.dim, lambda: members.accounts, -burn_in)
    return RoundsEngine(members, *parts, reach=horizon), horizon


def coordinator_key(method: Method):
    """The coordinator's randomness."""
    return jax.random.fold_in(jax.random.key(method.seed), 1)


def coordinator(method: Method, burn_in: float = 0.0) -> Coordinator:
    """The coordinator of a run."""
    walls = walls_of(method.constraints, method.reference)
    return Coordinator.of(method.dynamics, method.public, method.segments, method.redistribution, -burn_in, walls)


def federation(method: Method) -> Federation:
    """The sites: opened for a run in this process, those with a budget under it; or where they are.

    Sites with a budget or a log are asked one message at a time.
    """
    own = method.own_sites
    if method.elsewhere:
        elsewhere: Any = method.sites[0].federation
        return JoinedFederation([elsewhere, local_federation(method)]) if own else elsewhere
    run = secrets.token_hex(16)
    private = {site.name: PrivateSite(site, opening(method, site), run) for site in own if site.budget is not None}
    plain = [site for site in own if site.budget is None]
    logs = {site.name: site.log for site in own if site.log is not None}
    parts = [local_federation(method, plain)] if plain else []
    if not private and not logs:
        return parts[0]
    parts += [PrivateSites(private)] if private else []
    return JoinedFederation(parts, [site.name for site in own], logs)


def local_federation(method: Method, sites: Sequence[Site] | None = None, dense: bool = False) -> LocalFederation:
    """All sites, or some of them, opened in this process; with dense clocks where they may have them and it pays."""
    members = method.own_sites if sites is None else sites
    openings = [opening(method, site) for site in members]
    potentials = sums_over_records(members, openings) if dense else []

    def choose_each() -> list[ClockChoice]:
        choices = []
        for number, (site, facts) in enumerate(zip(members, openings, strict=True)):
            report("compiling", number + 1, len(members))
            choices.append(choose_clock(site, facts, potentials[number] if potentials else None))
        return choices

    choices = choices_in_one_process(potentials, choose_each, method.dynamics, method.chains)
    return LocalFederation(
        [site.name for site in members],
        [choice.clock for choice in choices],
        [local_columns(site, facts) for site, facts in zip(members, openings, strict=True)],
        [site.keys(method.seed, method.chains, method.dynamics.draws) for site in members],
        method.chains,
        [choice.report for choice in choices],
    )


def opening(method: Method, site: Member) -> Opening:
    """The public facts that a site gets at the start of a run."""
    share = method.prior if method.redistribution > 0 else None
    if method.prior is not None and method.prior_at == "sites":
        records = sum(s.records for s in method.sites)
        share = method.prior.scaled(site.records / records if records else 1 / len(method.sites))
    control, redistributed = method.control.get(site.name), method.redistribution > 0
    private, adaptive = sum(site.budget is not None for site in method.sites), method.bounds == "adaptive"
    return Opening(method.reference, method.dynamics, control, share, redistributed, adaptive, private)


def start_state(method: Method, burn_in: float = 0.0) -> State:
    """Starts of the chains: at ``init``, or spread around the reference's centre or the prior's mean.

    A reference from the sites' derivatives is not trusted: a part of the chains starts farther out, so that
    chains disagree for long if it is too narrow. These start at one distance from its centre: otherwise the farthest of
    many could have so many events that all others wait for it.
    """
    chains, dim = method.chains, method.dim
    keys = chain_keys(jax.random.fold_in(jax.random.key(method.seed), 2), chains)
    count, number = on_device(np.zeros(chains, int)), on_device(np.full(chains, method.first_plan))
    spread, v = _spread(method.dynamics, keys, number, dim)
    given = method.init is not None
    if given:
        center = method.reference.to_a(np.asarray(method.init))
    elif method.whitened:
        center = np.zeros(dim)
        if method.wide_starts:
            # In the same directions at twice the usual distance, or `FARTHER` more if that is less.
            distance = np.sqrt(dim) + min(np.sqrt(dim), FARTHER)
            usual = np.asarray(spread)
            sphere = distance * usual / np.linalg.norm(usual, axis=1, keepdims=True)
            spread = np.where(wide_chains(chains)[:, None], sphere, usual)
        if method.reference.starts is not None:
            at = np.asarray(method.reference.center)
            spread = method.reference.whiten(method.reference.starts.about(at, np.asarray(spread)))
        elif method.unsettled and not method.elsewhere:
            # About a mode to which the posterior is unlike: halfway back where U is too high, where rates may overflow.
            spread = np.asarray(spread)
            known = [s for s in method.own_sites if s.coordinates is None and s.budget is None and not s.latents]
            for _ in range(HALVINGS if len(known) == len(method.sites) else 0):
                points = method.reference.to_x(np.concatenate([np.zeros((1, dim)), spread]))
                heights = np.sum([potential_values(site.potential, points) for site in known], axis=0)
                fine = heights[1:] - heights[0] <= HIGHEST_START + dim
                spread = np.where(fine[:, None], spread, spread / 2)
    else:
        center = np.zeros(dim) if method.prior is None else np.asarray(prior_mean(method.prior))
        center, spread = method.reference.to_a(center), 0.1 * spread
    center = np.broadcast_to(center, (chains, dim))
    a = on_device(start_inside(walls_of(method.constraints, method.reference), center, spread, given))
    share = None
    if method.redistribution > 0:
        keys = chain_keys(jax.random.fold_in(jax.random.key(method.seed), 3), chains)
        share = shares(uniforms(keys, count, count, len(method.sites)))
    scales = None if method.mixture is None else method.mixture.law.start(chains)
    turn = Turn(on_device(first_waits(chains)), count) if method.dynamics.turns else None
    return State(a, v, on_device(np.full(chains, -burn_in)), number, count, count, count, share, turn, scales)


@once
def _spread(dynamics: Dynamics, keys: ChainKeys, count: Int[Array, " C"], dim: int):
    """Standard normal positions, and velocities of the dynamics."""
    u = uniforms(keys, count, count, 2 * dim)
    return normals(u[:dim]).T, dynamics.velocity(u[dim:].T)
