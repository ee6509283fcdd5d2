"""A site's opening: the public facts of a run, and the site's potential and clock in the run's coordinates."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import jax.numpy as jnp
import numpy as np

from fedpdmc._jax.by_numpy import once
from fedpdmc.clocks import AdaptiveClock, Clock, ClockChoice, LatentClock
from fedpdmc.clocks.choose import choose
from fedpdmc.console.warnings import warn
from fedpdmc.dynamics import Dynamics
from fedpdmc.errors import Discontinuous, InputError
from fedpdmc.members.bounded_records import padded_potential
from fedpdmc.members.site import Member, Site
from fedpdmc.potentials import (
    BentSpreadPrior,
    ControlVariate,
    LatentPotential,
    LinearPredictor,
    LinearUnknownScale,
    Potential,
    PriorShare,
    Program,
    Quadratic,
    RandomEffects,
    Sum,
    bare,
    local_quadratic,
)
from fedpdmc.potentials.base import NEEDS_ROTATION
from fedpdmc.whitening import Reference

# Gradients of a user's function per unit of process time.
USUAL_COST = "5 to 50"
COSTLY = 300.0  # a run is warned about
HOPELESS = 1e4  # a model is refused
MOST_SAID = 1e9  # the largest that is reported
LOOSE_REMEDY = (
    "Bounds widen where a value is used many times: in long recursions, factors of nearly singular matrices, quotients of "
    "differences. Use fewer steps or places, more noise on the diagonal of a kernel, or parameters on a scale on which "
    "the posterior is nearly Gaussian. bounds='adaptive' needs no proved bounds and is not certified."
)
FEW_RECORDS = 3  # that are not expanded: second-order bounds of so few cost less than tensors take to make
SAME = 1e-12  # relative difference of two quadratics that are equal up to rounding

P = TypeVar("P", bound=Potential)


class Opening(NamedTuple):
    """The public facts that a site needs to take part in a run."""

    reference: Reference  # over all parameters
    dynamics: Dynamics
    control: ControlVariate | None = None  # the public quadratic that is moved from the site to the coordinator
    prior_share: Quadratic | None = None  # the part of the prior that this site walks with
    # Whether ``prior_share`` is the whole prior, and every plan gives the part of it to use.
    redistributed: bool = False
    adaptive: bool = False  # whether a model that is a user's own function walks under bounds guessed on a grid
    private_sites: int = 0  # sites of the run that have a privacy budget; zero if that is not known


def local_columns(site: Member, opening: Opening) -> np.ndarray | None:
    """The whitened coordinates that a site is sent: its own if flips move only them, else all (None)."""
    own = opening.dynamics.flips and opening.reference.diagonal
    return site.coordinates if own else None


def open_site(site: Site, opening: Opening) -> Clock:
    """The clock of a site on a network.

    Raises
    ------
    NoEnclosure
        If the site's model is a function that is not shown to be continuous, or that has no certified bounds.
    """
    if isinstance(site.potential, Program):
        if lines := site.potential.assertions:
            raise InputError(
                f"sites ({site.name!r})",
                f"a model whose continuity is asserted and not shown, at {', '.join(lines)}",
                "Sites on a network take no assertions: write it so that its continuity is shown.",
            )
        site.potential.check_continuity(lenient=opening.adaptive)
    if isinstance(site.potential, RandomEffects):
        site.potential.check_continuity()
    return choose_clock(site, opening).clock


def choose_clock(site: Site, opening: Opening, whitened: Potential | None = None) -> ClockChoice:
    """The site's clock for this run and its cost, for what it walks with: `walked_potential`, made here if it is not given.

    Raises
    ------
    NoEnclosure
        If the site's model is a function that is not shown to be continuous, or that has no certified bounds.
    """
    site = site.bent(opening.reference.bend)
    if isinstance(site.potential, LatentPotential):
        return ClockChoice(_latent_clock(site, site.potential, opening), "private latents", {})
    if isinstance(site.potential, Program):
        try:
            site.potential.check_continuity(lenient=opening.adaptive)
        except Discontinuous as error:
            if not opening.adaptive:
                raise
            warn(f"site {site.name!r}, bounds='adaptive': {error}")
    whitened = walked_potential(site, opening) if whitened is None else whitened
    if opening.adaptive and site.model is not None:
        return ClockChoice(AdaptiveClock(whitened, opening.dynamics), "bounds='adaptive'", {})
    choice = choose(whitened, opening.dynamics, _center(site, opening), site.name)
    # A unit of process time is about one standard deviation only for a reference computed from the sites' derivatives.
    if isinstance(site.potential, Program) and opening.control is not None:
        _check_cost(choice, site.name)
    return choice


def walked_potential(site: Site, opening: Opening) -> Potential:
    """What a site without private latents walks with: its records less the control variate, in whitened coordinates."""
    share = None if opening.redistributed else opening.prior_share
    whitened = in_coordinates(_remainder(padded_potential(site.potential), opening.control, share), site, opening)
    if not opening.redistributed or opening.prior_share is None:
        return whitened
    return Sum((whitened, PriorShare(whiten(opening.prior_share, opening.reference, None))))


def sums_over_records(sites: Sequence[Site], openings: Sequence[Opening]) -> list[LinearPredictor]:
    """What sites walk with if each of them has nothing but a sum over records; else none."""
    if not all(isinstance(site.potential, LinearPredictor) for site in sites):
        return []
    whole = [walked_potential(site, opening) for site, opening in zip(sites, openings, strict=True)]
    sums = [potential for potential in whole if isinstance(potential, LinearPredictor)]
    return sums if len(sums) == len(whole) else []


def _check_cost(choice: ClockChoice, name: str) -> None:
    """Refuse a function whose bounds are too loose for a run to finish, and warn if the run will be long."""
    cost = choice.costs.get(choice.clock.name, 0.0)
    if not cost <= HOPELESS:
        found = f"at least {HOPELESS:,.0f}" if cost > MOST_SAID or math.isnan(cost) else f"about {cost:,.0f}"
        raise InputError(
            f"sites ({name!r})",
            f"a model whose event rates cannot be bounded well: {found} evaluations of its gradient for each unit of "
            f"process time, where {USUAL_COST} are usual",
            LOOSE_REMEDY,
        )
    if cost > COSTLY:
        warn(
            f"site {name!r}: the bounds of its event rates are loose. A chain takes about {cost:,.0f} evaluations of its "
            f"gradient for each unit of process time, where {USUAL_COST} are usual, and needs about ten units for an "
            f"effective sample. {LOOSE_REMEDY}"
        )


def _latent_clock(site: Site, potential: LatentPotential, opening: Opening) -> LatentClock:
    dynamics, reference = opening.dynamics, opening.reference
    if dynamics.flips or not dynamics.flow.rotating:
        raise InputError("dynamics", repr(dynamics), NEEDS_ROTATION)
    rows, center = reference.rows_of(site.coordinates)
    control = None if opening.control is None else opening.control.quadratic
    if opening.prior_share is not None:
        raise InputError("prior_at", "'sites' with private latents", "Use prior_at='coordinator' or 'extra'.")
    return LatentClock(potential.opened(center, rows, control), dynamics)


def _center(site: Site, opening: Opening):
    """The point of expansion of the site's potential, if it has all coordinates; built-in models only to second order."""
    control, program = opening.control, isinstance(site.potential, Program)
    if control is None or site.coordinates is not None:
        return None
    if not program and (control.order != 2 or site.records <= FEW_RECORDS):
        return None
    return jnp.asarray(opening.reference.whiten(np.asarray(control.point)))


def _remainder(potential: Potential, control: ControlVariate | None, share: Quadratic | None) -> Potential:
    """``U − q`` plus the site's share of the prior, in one potential if the model can hold both quadratics exactly.

    Records are stored minus the quadratic of their own derivatives, with the difference of that quadratic from q.
    """
    rest = share
    if control is not None:
        rest = _minus(control.quadratic) if share is None else share.plus(control.quadratic, -1.0)
    if rest is None:
        return potential
    if isinstance(potential, Quadratic):
        return potential.plus(rest)
    if isinstance(potential, (Program, BentSpreadPrior)):
        return potential.less(_minus(rest))
    if control is None or isinstance(potential, LinearUnknownScale):
        return Sum((potential, rest))
    if not isinstance(potential, LinearPredictor):
        remedy = "Control variates need a built-in model: use control='none'."
        raise InputError("control", type(potential).__name__, remedy)
    expanded, difference, same = _expand(potential, control)
    if share is not None:
        return Sum((expanded, share if bool(same) else share.plus(difference)))
    return expanded if bool(same) else Sum((expanded, difference))


@once
def _minus(quadratic: Quadratic) -> Quadratic:
    return quadratic.scaled(-1.0)


@once
def _expand(potential: LinearPredictor, control: ControlVariate):
    """The records minus their own quadratic, its difference from the control variate, and whether it is rounding.

    The curvature of a control variate may be a part κ of the records' own (`fedpdmc.sampling.vb_reference`). Each record is
    then stored minus κ of its own, and no quadratic is left beside the records.
    """
    own = local_quadratic(potential, control.point, control.order, control.spread)
    expanded = potential.expanded_at(control.point, control.order, control.spread)
    if control.order == 2:
        assert expanded.control is not None
        kept = _common_part(own.precision, control.quadratic.precision)
        own = Quadratic(kept * own.precision, own.linear + (1 - kept) * (own.precision @ control.point))
        expanded = dataclasses.replace(expanded, control=expanded.control * jnp.stack([1.0, 1.0, kept])[:, None])
    difference = own.plus(control.quadratic, -1.0)
    size = jnp.max(jnp.abs(own.precision))
    same = jnp.max(jnp.abs(difference.precision)) <= SAME * size
    reach = jnp.max(jnp.abs(own.linear)) + size * jnp.max(jnp.abs(control.point))
    same &= jnp.max(jnp.abs(difference.linear)) <= SAME * reach
    return expanded, difference, same


def _common_part(own, public):
    """The part of its own matrix that a public one is, up to rounding; one if it is none."""
    square = jnp.vdot(own, own)
    part = jnp.vdot(own, public) / jnp.where(square > 0, square, 1.0)
    is_part = jnp.max(jnp.abs(public - part * own)) <= SAME * jnp.max(jnp.abs(own))
    return jnp.where(is_part & (jnp.abs(part - 1) > SAME) & (part > 0), part, 1.0)


def whitened_control(site: Site, opening: Opening) -> Quadratic | None:
    """The control variate in the run's coordinates."""
    return None if opening.control is None else in_coordinates(opening.control.quadratic, site, opening)


def in_coordinates(potential: P, site: Site, opening: Opening) -> P:
    """A function of the site's own parameters, in the whitened coordinates that it is sent."""
    sent = local_columns(site, opening)
    if sent is not None:
        return whiten(potential, opening.reference.restricted(jnp.asarray(sent)), None)
    columns = None if site.coordinates is None else jnp.asarray(site.coordinates)
    return whiten(potential, opening.reference, columns)


def whiten(potential: P, reference: Reference, columns) -> P:
    """The potential in whitened coordinates, compiled once for each shape."""
    return _whiten(bare(potential), Reference(reference.center, reference.scale_tril), columns)


@once
def _whiten(potential: P, reference: Reference, columns) -> P:
    return potential.whiten(reference, columns)  # type: ignore[return-value]
