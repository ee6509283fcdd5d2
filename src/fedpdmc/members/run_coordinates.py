"""A site's opening: the public facts of a run, and the site's potential and clock in the run's coordinates."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple, TypeVar

import jax.numpy as jnp
import numpy as np

from fedpdmc._jax.by_numpy import once
from fedpdmc.clocks import AdaptiveClock, Choice, Clock, LatentClock
from fedpdmc.clocks.choose import choose
from fedpdmc.clocks.constant_thinning import FEW_RECORDS, ConstantClock, suits
from fedpdmc.clocks.discontinuous_potentials import with_jumps
from fedpdmc.console.warnings import warn
from fedpdmc.dynamics import Dynamics
from fedpdmc.enclosures.continuity.jump_surfaces import JumpSurfaces
from fedpdmc.errors import Discontinuous, InputError
from fedpdmc.members.member import Member
from fedpdmc.members.model_file_arrivals import clipped_records
from fedpdmc.members.site import Site
from fedpdmc.models.model_file.records import RecordModel
from fedpdmc.potentials import (
    BentSpreadPrior,
    ControlVariate,
    LatentPotential,
    LinearPredictor,
    LinearUnknownScale,
    Potential,
    Program,
    Quadratic,
    RandomEffects,
    Shared,
    Sum,
    bare,
    local_quadratic,
)
from fedpdmc.potentials.latent import NEEDS_ROTATION
from fedpdmc.potentials.padding import bucket
from fedpdmc.whitening import Reference

# Process time of all chains up to 1,000 effective samples: the default if it is not known.
USUAL_CHAIN_TIME = 4000.0
# Gradients of a user's function per unit of process time: usual, costly, too costly, and the largest that is reported.
USUAL_COST, COSTLY, HOPELESS, MOST_SAID = "5 to 50", 300.0, 1e4, 1e9
LOOSE_REMEDY = (
    "Bounds widen where a value is used many times: in long recursions, factors of nearly singular matrices, quotients of "
    "differences. Use fewer steps or places, more noise on the diagonal of a kernel, or parameters on a scale on which "
    "the posterior is nearly Gaussian. bounds='adaptive' needs no proved bounds and is not certified."
)
# Relative difference of two quadratics that are equal up to rounding.
SAME = 1e-12

P = TypeVar("P", bound=Potential)


class Opening(NamedTuple):
    """The public facts that a site needs to take part in a run.

    Attributes
    ----------
    reference : Reference
        Over all parameters.
    dynamics : Dynamics
    control : ControlVariate or None
        The public quadratic that is moved from the site to the coordinator.
    prior_share : Quadratic or None
        The part of the prior that this site walks with.
    redistributed : bool
        Whether ``prior_share`` is the whole prior, and every plan gives the part of it to use.
    adaptive : bool
        Whether a model that is a user's own function walks under bounds guessed on a grid.
    private_sites : int
        Sites of the run that have a privacy budget; zero if that is not known.
    chain_time : float
        Approximate process time of all chains together.
    """

    reference: Reference
    dynamics: Dynamics
    control: ControlVariate | None = None
    prior_share: Quadratic | None = None
    redistributed: bool = False
    adaptive: bool = False
    private_sites: int = 0
    chain_time: float = USUAL_CHAIN_TIME


def local_columns(site: Member, opening: Opening) -> np.ndarray | None:
    """The whitened coordinates that a site is sent: its own if flips move only them, else all (None)."""
    own = opening.dynamics.flips and opening.reference.diagonal
    return site.coordinates if own else None


def open_site(site: Site, opening: Opening) -> Clock:
    """The clock of a site on a network.

    Its model must not jump: an event at a jump reveals where the jump is, and jumps are at values of the records.

    Raises
    ------
    NoEnclosure
        If the site's model is a function that jumps, or that has no certified bounds.
    """
    if isinstance(site.potential, Program):
        site.potential.check_continuity(lenient=opening.adaptive)
    if isinstance(site.potential, RandomEffects):
        site.potential.check_continuity()
    return choose_clock(site, opening).clock


def choose_clock(site: Site, opening: Opening) -> Choice:
    """The site's clock for this run, for its records in whitened coordinates less the control variate, and its cost.

    Raises
    ------
    NoEnclosure
        If the site's model is a function that jumps other than at hyperplanes, or that has no certified bounds.
    """
    site = site.bent(opening.reference.bend)
    if isinstance(site.potential, LatentPotential):
        return Choice(_latent_clock(site, site.potential, opening), "private latents", {})
    surfaces = None
    if isinstance(site.potential, Program):
        surfaces = _jump_surfaces(site.potential, site.name, opening.adaptive)
    share = None if opening.redistributed else opening.prior_share
    potential = _remainder(_padded(site.potential), opening.control, share)
    whitened = in_coordinates(potential, site, opening)
    if opening.redistributed and opening.prior_share is not None:
        if surfaces is not None:
            raise InputError("redistribution", "a rate, with a model that jumps", "Use redistribution=0.")
        whitened = Shared(whitened, whiten(opening.prior_share, opening.reference, None))
    if opening.adaptive and site.model is not None:
        choice = Choice(AdaptiveClock(whitened, opening.dynamics), "bounds='adaptive'", {})
        return choice if surfaces is None else _with_jumps(choice, surfaces, whitened, site.name)
    if suits(whitened, site.records, opening.dynamics):
        return Choice(ConstantClock(whitened, opening.dynamics), "few records", {})
    choice = choose(
        whitened, opening.dynamics, _center(site, opening), site.name, opening.chain_time, surfaces is not None
    )  # fmt: skip
    if surfaces is not None:
        choice = _with_jumps(choice, surfaces, whitened, site.name)
    # A unit of process time is about one standard deviation only for a reference computed from the sites' derivatives.
    if isinstance(site.potential, Program) and opening.control is not None:
        _check_cost(choice, site.name)
    return choice


def _check_cost(choice: Choice, name: str) -> None:
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


def _jump_surfaces(program: Program, name: str, adaptive: bool) -> JumpSurfaces | None:
    """The hyperplanes at which a function jumps; refuse one that may jump elsewhere, or warn if bounds are adaptive."""
    try:
        return program.jump_surfaces(lenient=adaptive)
    except Discontinuous as error:
        if not adaptive:
            raise
        warn(f"site {name!r}, bounds='adaptive': {error}")
    return None


def _with_jumps(choice: Choice, surfaces: JumpSurfaces, whitened: Potential, name: str) -> Choice:
    """The clock with the jumps of a function of ``x = c + S a``."""
    assert isinstance(whitened, Program)
    if not surfaces.level.size:
        # What is compared is always in one order.
        return choice
    center = np.zeros(whitened.dim) if whitened.center is None else whitened.center
    scale = np.ones(whitened.dim) if whitened.scale is None else whitened.scale
    return choice._replace(clock=with_jumps(choice.clock, surfaces, center, scale, name))


def _latent_clock(site: Site, potential: LatentPotential, opening: Opening) -> LatentClock:
    """The clock of a site with private latents."""
    dynamics, reference = opening.dynamics, opening.reference
    if dynamics.flips or not dynamics.flow.rotating:
        raise InputError("dynamics", repr(dynamics), NEEDS_ROTATION)
    rows, center = reference.matrix, reference.center
    if site.coordinates is not None:
        rows, center = rows[site.coordinates], center[site.coordinates]
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
        raise InputError(
            "control", type(potential).__name__, "Control variates need a built-in model: use control='none'."
        )
    expanded, difference, same = _expanded(potential, control)
    if share is not None:
        return Sum((expanded, share if bool(same) else share.plus(difference)))
    return expanded if bool(same) else Sum((expanded, difference))


@once
def _minus(quadratic: Quadratic) -> Quadratic:
    return quadratic.scaled(-1.0)


@once
def _expanded(potential: LinearPredictor, control: ControlVariate):
    """The records minus their own quadratic, its difference from the control variate, and whether it is rounding.

    The curvature of a control variate may be a part κ of the records' own (`fedpdmc.sampling.vb_reference`). Each record is
    then stored minus κ of its own, and no quadratic is left beside the records.
    """
    own = local_quadratic(potential, control.point, control.order, control.spread)
    expanded = potential.expanded_at(control.point, control.order, control.spread)
    if control.order == 2:
        assert expanded.control is not None
        kept = _kept(own.precision, control.quadratic.precision)
        own = Quadratic(kept * own.precision, own.linear + (1 - kept) * (own.precision @ control.point))
        expanded = dataclasses.replace(expanded, control=expanded.control * jnp.stack([1.0, 1.0, kept])[:, None])
    difference = own.plus(control.quadratic, -1.0)
    size = jnp.max(jnp.abs(own.precision))
    same = jnp.max(jnp.abs(difference.precision)) <= SAME * size
    reach = jnp.max(jnp.abs(own.linear)) + size * jnp.max(jnp.abs(control.point))
    same &= jnp.max(jnp.abs(difference.linear)) <= SAME * reach
    return expanded, difference, same


def _kept(own, public):
    """The part of its own matrix that a public one is, up to rounding; one if it is none."""
    square = jnp.vdot(own, own)
    part = jnp.vdot(own, public) / jnp.where(square > 0, square, 1.0)
    is_part = jnp.max(jnp.abs(public - part * own)) <= SAME * jnp.max(jnp.abs(own))
    return jnp.where(is_part & (jnp.abs(part - 1) > SAME) & (part > 0), part, 1.0)


def less_public(site: Site, opening: Opening) -> Potential:
    """The records and the public control variate in whitened coordinates; no branch depends on the records."""
    own = _padded(site.potential)
    if isinstance(site.model, RecordModel) and site.budget is not None:
        own = clipped_records(site.model, site.budget)
    records, control = in_coordinates(own, site, opening), whitened_control(site, opening)
    return records if control is None else Sum((records, control.scaled(-1.0)))


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


def _padded(potential: Potential) -> Potential:
    """Records padded to a shape that other sites share."""
    return potential.padded(bucket(potential.design.shape[0])) if isinstance(potential, LinearPredictor) else potential
