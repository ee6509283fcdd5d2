"""The communication cost of a run: rounds, messages and bytes of each site."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fedpdmc.members.member import Member
from fedpdmc.members.run_coordinates import local_columns
from fedpdmc.sampling.defaults import Method
from fedpdmc.sampling.engines.base import Engine
from fedpdmc.sampling.factory import opening


class GivenUp(NamedTuple):
    """The cost of an abandoned burn-in: rounds, plans and segments of all chains, passes of each site."""

    rounds: int
    plans: int
    segments: int
    passes: np.ndarray

    @classmethod
    def nothing(cls, sites: int) -> GivenUp:
        """No burn-in was abandoned."""
        return cls(0, 0, 0, np.zeros(sites, np.int64))


def turn_bytes(plans: int, sent: int, flips: bool) -> tuple[int, int]:
    """Size of plans whose segments the site computes itself, and the largest size of their arrivals.

    Of each plan: the chain, its number and that of the next turn, four bytes each; the start, the velocity, the time to the
    turn and to the horizon.
    """
    return plans * (12 + 8 * (2 * sent + 2)), plans * (8 + 1 + 8 * (1 if flips else sent))


def message_bytes(plans: int, segments: int, sent: int, flips: bool, share: bool = False) -> tuple[int, int]:
    """Size of plans and of their arrivals as raw buffers, for a site that is sent ``sent`` coordinates.

    Of each of ``plans`` plans of single chains: the chain, the plan's number, how many segments it has, the start, and
    the site's ``share`` of a prior that is redistributed; of each of their ``segments`` segments in all, a duration and a
    velocity. An arrival has a time, a flag, and a coordinate or a normal.
    """
    plan = 8 * (plans * (3 + sent + share) + segments * (1 + sent))
    return plan, plans * (8 + 1 + (4 if flips else 8 * sent))


def counts(method: Method, engine: Engine, given_up: GivenUp) -> dict[str, Any]:
    """Rounds in all; messages, bytes and passes over the records of each site, in the order of the method's sites."""
    made = method.reference.bytes or {}
    messages = [
        2 * (int(exchanges) + given_up.rounds + (method.reference.rounds if site.name in made else 0))
        for site, exchanges in zip(method.sites, engine.asked[0], strict=True)
    ]
    plans = zip(method.sites, engine.asked[1], strict=True)
    return {
        "rounds": engine.rounds + given_up.rounds + method.reference.rounds,
        "messages": messages,
        "bytes": [_bytes(method, engine, given_up, site, int(count)) for site, count in plans],
        "gradient_evaluations": engine.passes + given_up.passes,
    }


def _bytes(method: Method, engine: Engine, given_up: GivenUp, site: Member, plans: int) -> int:
    federation, share = engine.federation, method.redistribution > 0
    if federation.bytes is not None:
        return int(federation.bytes[federation.names.index(site.name)])
    columns = local_columns(site, opening(method, site))
    sent = method.dim if columns is None else len(columns)
    made = (method.reference.bytes or {}).get(site.name, 0)
    if given_up.plans:
        made += sum(message_bytes(given_up.plans, given_up.segments, sent, False, share))
    if engine.coordinator.schedule(engine.state, engine.state.t) is not None and columns is None:
        return made + sum(turn_bytes(plans, sent, method.dynamics.flips))
    # A site that is not asked in every round is also sent the last velocity, for the time after the plan.
    segments = plans * (method.segments + 1) if engine.selective else int(engine.planned.sum())
    return made + sum(message_bytes(plans, segments, sent, method.dynamics.flips, share))
