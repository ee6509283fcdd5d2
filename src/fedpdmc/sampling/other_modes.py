"""Other modes of the posterior: searches from dispersed starts, before anything is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedpdmc._jax.precision import double_precision
from fedpdmc.errors import FedPDMCError
from fedpdmc.members.member import Member
from fedpdmc.members.site import Site
from fedpdmc.models.model_file.records import RecordModel
from fedpdmc.potentials import Quadratic, StudentT
from fedpdmc.sampling.laplace_reference import Search, begin_search
from fedpdmc.sampling.mode_search import Mode, find_mode, positive_definite
from fedpdmc.whitening import Reference

SEARCHES = 6  # dispersed starts
MOST_STEPS = 8  # of each search; searches share their rounds
NEAR_BY = 6.0  # distance of the nearer starts from the centre, in standard deviations
FARTHEST = 20.0  # distance of the farther ones, at most
ASIDE = 0.3  # distance of the first start from the centre, in standard deviations
TOLERANCE = 0.1  # standard deviations to a mode
SAME = 2.0  # standard deviations within which two modes count as one
LEAST_SHARE = 1e-3  # of the posterior's mass, below which a mode is left out


class _Enough(Exception):
    """A search that has taken its steps."""


@double_precision
def other_modes(
    sites: Sequence[Member], prior: Quadratic | None, reference: Reference
) -> tuple[tuple[dict[str, Any], ...], int]:
    """Modes that are apart from the centre of the reference, and the rounds of looking for them.

    Sites in this process whose potentials may have several modes are asked: users' own functions and Student-t regressions.
    Regressions of the other families have one. The share of a mode in the mass is Laplace's approximation.
    """
    if reference.bend is not None or not any(_may_have_several(site) for site in sites):
        return (), 0
    if any(not isinstance(site, Site) or site.noisy or site.latents for site in sites):
        return (), 0
    search, scale, center = (
        begin_search(sites, prior, None, None),
        np.asarray(reference.matrix),
        np.asarray(reference.center),
    )
    modes, rounds = [], 0
    # The first from near the centre, and not from it: between two modes there may be a saddle.
    for start in [center + ASIDE * np.sqrt(np.sum(scale**2, 1)), *_starts(center, scale, prior)]:
        found, steps = _descend(search, start)
        rounds = max(rounds, steps)
        if found is not None and all(_distance(found, mode) > SAME for mode in modes):
            modes.append(found)
    if len(modes) < 2:
        return (), rounds
    modes.sort(key=lambda mode: float(np.linalg.norm(np.linalg.solve(scale, mode.point.x - center))))
    known = modes[0]
    logs = np.array([-mode.point.value - 0.5 * np.linalg.slogdet(mode.point.hessian)[1] for mode in modes])
    shares = np.exp(logs - logs.max())
    shares /= shares.sum()
    return tuple(
        {"at": mode.point.x.tolist(), "center": known.point.x.tolist(), "scale": scale.tolist(), "share": float(share)}
        for mode, share in zip(modes[1:], shares[1:], strict=True)
        if share >= LEAST_SHARE
    ), rounds


def _may_have_several(site: Member) -> bool:
    if not isinstance(site, Site):
        return False
    if site.model is not None:
        return not isinstance(site.model, RecordModel)
    return isinstance(getattr(site.potential, "loss", None), StudentT)


def _starts(center: np.ndarray, scale: np.ndarray, prior: Quadratic | None) -> list[np.ndarray]:
    """Points in opposite directions: at the prior's standard deviations where they are moderate, and nearer."""
    signs = np.sign(np.random.default_rng(0).standard_normal((SEARCHES // 2, len(center))))
    widths = np.sqrt(np.sum(scale**2, 1))
    wide = NEAR_BY * widths
    if prior is not None:
        precision = np.diag(np.asarray(prior.precision))
        wide = np.minimum(1 / np.sqrt(np.maximum(precision, 1e-300)), FARTHEST * widths)
    pairs = [(wide if k % 2 == 0 else NEAR_BY * widths) * sign for k, sign in enumerate(signs)]
    return [center + side * away for away in pairs for side in (-1.0, 1.0)]


def _descend(search: Search, start: np.ndarray) -> tuple[Mode | None, int]:
    """The mode that a search from a point ends in, or None; and its steps."""
    steps = 0

    def ask(x: np.ndarray):
        nonlocal steps
        if steps >= MOST_STEPS:
            raise _Enough
        steps += 1
        return search.ask(x)

    try:
        first = ask(start)
        if not (np.isfinite(first.value) and np.all(np.isfinite(first.hessian))):
            return None, steps
        found = find_mode(ask, first, TOLERANCE, False)
    except (FedPDMCError, _Enough):
        return None, steps
    proper = np.linalg.eigvalsh(found.point.hessian)[0] > 0
    return (found if proper else None), steps


def _distance(one: Mode, other: Mode) -> float:
    """In standard deviations of the wider of the two."""
    away = one.point.x - other.point.x
    return min(float(np.sqrt(away @ positive_definite(mode.point.hessian) @ away)) for mode in (one, other))
