"""The method of a run: the user's settings, with defaults chosen for everything left open."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from fedpdmc._jax.compilation import on_device
from fedpdmc._jax.precision import double_precision
from fedpdmc.console.warnings import warn
from fedpdmc.dynamics import DRAW, QUARTER, REFLECT, Boomerang, Dynamics, Walls, ZigZag
from fedpdmc.errors import (
    ImproperPosterior,
    InputError,
    ModeNotFound,
    NoEnclosure,
    NoMode,
    NotFinite,
    PointDeclined,
)
from fedpdmc.members.private_site import check_dynamics
from fedpdmc.members.site import Member, Site
from fedpdmc.models.mixture_prior import MixturePrior
from fedpdmc.models.user_function import Variables, check_start, check_unchanged, coordinate_names, variables
from fedpdmc.potentials import ControlVariate, LatentProgram, Potential, Program, Quadratic, RandomEffects, StudentT
from fedpdmc.potentials.base import NEEDS_ROTATION
from fedpdmc.results.verdict import NARROW, NARROW_BURN_IN
from fedpdmc.sampling.arguments import (
    PRIOR_SITE,
    PriorSite,
    Redistributed,
    Settings,
    check_init,
    check_names,
    check_reference,
    public_potential,
    resolve_members,
)
from fedpdmc.sampling.bent_spreads import check_bend
from fedpdmc.sampling.laplace_reference import Search, begin_search, laplace, linear_control, prior_mean
from fedpdmc.sampling.mode_search import Mode, check_rays, find_mode, positive_definite
from fedpdmc.sampling.vb_reference import vb
from fedpdmc.whitening import LAPLACE, VB, Reference, steepness

# The few-rounds method takes as many chains as reach the effective samples asked for in about twenty units of time: rounds
# are those of the slowest chain. Where a budget pays for the burn-in of every chain, there are half as many.
CHAINS, LEAST_CHAINS, MOST_CHAINS = 64, 16, 2048
SAMPLES_PER_CHAIN = 8
# Segments of a plan: enough refreshments to last until a site's event where those are rare, else few. Their rate falls like
# one over the root of the records; with many chains blocks are short, and plans reach to their end anyway.
SEGMENTS_FEW_EVENTS, SEGMENTS_MANY_EVENTS = 64, 1
SEGMENTS_PER_ROOT_RECORD, MOST_SEGMENTS, MOST_PLANNED = 1.5, 512, 4096
REDISTRIBUTED = "redistributed"
# Number of the first plan of a run after a burn-in that was given up: beyond any that it may have used.
SECOND_RUN = 2**30
# The usual burn-in on a whitened reference, and of a run to an effective sample size on any other. Two turns are enough from
# the reference: on the skewed posterior of the trial no mean is off by 0.015 standard deviations after them.
WHITENED_BURN_IN, TURNING_BURN_IN, BURN_IN = 5.0, 2 * QUARTER, 10.0
# On a reference that was widened where the posterior's tails are: chains overshoot into the tails and come back.
WIDE_BURN_IN, LINES_BURN_IN = 4 * QUARTER, 20.0
# Scales of a prior begin at one point, and move with refreshments. Posteriors whose Gaussian averages do not settle have
# long tails, slow to reach on lines: after 25, 60 and 120 units a Weibull with 3 events of 30 had sds 12, 4 and 1 % too low.
SLOW_BURN_IN, SLOW_LINES_BURN_IN = NARROW_BURN_IN, 100.0
FAR_START = 5.0  # standard deviations of the reference, in any coordinate, up to which `init=` has the usual burn-in
# With private latents, by the largest standard deviation of a log spread: one that is hardly known has a long tail too. With
# 0.27, the 15 herds of `cbpp`, chains have the standard deviation and the tail probabilities of the log spread after six
# turns; up to 0.19, with 40 groups and more, they have them from the start, and their latents after one turn.
LATENT_BURN_IN = ((0.2, 3 * QUARTER), (0.4, 6 * QUARTER), (np.inf, SLOW_BURN_IN))


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Method:
    """All choices of a run, as data. `fedpdmc.sampling.factory` makes the parts of the run from it."""

    sites: tuple[Member, ...]
    dim: int
    prior: Quadratic | None  # the Gaussian prior, if there is one
    prior_at: str  # who walks with it
    dynamics: Dynamics
    reference: Reference
    reference_name: str
    control: dict[str, ControlVariate]  # by site
    control_name: str
    chains: int
    names: list[str]
    seed: int
    public: Potential | None  # what the coordinator walks with, in whitened coordinates
    segments: int  # of a plan, at most
    init: np.ndarray | None = None
    redistribution: float = 0.0  # the rate at which the prior's shares are renewed; zero if they are not
    bounds: str = "certified"
    variables: Variables | None = None
    open_dynamics: bool = False  # the user left the dynamics open
    open_chains: bool = False  # the user left their number and their starts open
    chosen: str = ""  # in place of the usual dynamics, and why
    first_plan: int = 0  # number of the first plan
    site_event_rate: float | None = None  # per unit of process time and chain in the long run, where known beforehand
    constraints: tuple[np.ndarray, np.ndarray] | None = None  # (A, b): parameters are limited to A x ≤ b
    mixture: MixturePrior | None = None  # the prior itself, if it is a scale mixture and `prior` its Gaussian stand-in
    wide_starts: bool = False  # a part of the chains starts farther out than the others

    @property
    def whitened(self) -> bool:
        """Whether the reference was computed from the sites' derivatives."""
        return self.reference.control is not None

    @property
    def few_rounds(self) -> bool:
        """Whether this is the few-rounds method: rotations about a reference that has the sites' control variates."""
        return self.whitened and self.control_name == "quadratic" and self.dynamics.flow.rotating

    @property
    def unsettled(self) -> bool:
        """Whether averages over the reference did not settle, so that it is that of the mode."""
        return self.reference.name == LAPLACE and bool(self.reference.why)

    @property
    def elsewhere(self) -> bool:
        """Whether the sites are on a network."""
        return self.sites[0].federation is not None

    @property
    def own_sites(self) -> tuple[Site, ...]:
        """The sites in this process."""
        return tuple(site for site in self.sites if isinstance(site, Site))

    @property
    def spread_width(self) -> float:
        """The largest standard deviation of a log spread in the reference; infinite where it is not known."""
        index, reference = list(next((site.spreads for site in self.sites if site.spreads), ())), self.reference
        if not index or reference.control is None:
            return np.inf
        width = np.linalg.norm(np.asarray(reference.matrix)[index], axis=1)
        if reference.bend is not None:
            width = width * steepness(np.asarray(reference.center)[index], np.asarray(reference.bend.numbers))
        return float(width.max())

    @property
    def certified(self) -> bool:
        """Whether every event time is drawn under a proved bound, of a function that is shown to be continuous.

        Adaptive bounds and assertions of continuity serve the user's own functions only.
        """
        programs = _user_programs(self.sites)
        return not programs or (self.bounds == "certified" and not any(program.assertions for program in programs))

    def replace(self, **changes: Any) -> Method:
        """The same with some choices changed."""
        return dataclasses.replace(self, **changes)

    def burn_in(self, wanted: float | None, duration: float | None) -> float:
        """The burn-in that was asked for, or what the method usually needs."""
        if wanted is not None:
            return float(wanted)
        slow = self.unsettled
        if self.reference.narrow is not None:
            slow = slow or self.reference.narrow[1] > NARROW
        if self.init is not None and self.whitened:
            slow = slow or np.abs(self.reference.to_a(np.asarray(self.init, float))).max() > FAR_START
        if slow or (self.mixture is not None and (self.mixture.law.members or not self.few_rounds)):
            return SLOW_BURN_IN if self.dynamics.flow.rotating or not self.unsettled else SLOW_LINES_BURN_IN
        wide = 0.0
        if self.chosen or self.reference.starts is not None or self.mixture is not None:
            wide = WIDE_BURN_IN if self.dynamics.turns else LINES_BURN_IN
        if any(site.latents for site in self.sites):
            return max(wide, next(time for widest, time in LATENT_BURN_IN if self.spread_width <= widest))
        if wide:
            return wide
        if self.whitened:
            return TURNING_BURN_IN if self.dynamics.turns and not self.elsewhere else WHITENED_BURN_IN
        return BURN_IN if duration is None else 0.1 * float(duration)


def choose(settings: Settings) -> Method:
    """Check that the settings are consistent and choose defaults, before anything runs."""
    wanted, redistribution = settings, 0.0
    mixture = wanted.prior if isinstance(wanted.prior, MixturePrior) else None
    prior_at = wanted.prior_at
    if isinstance(wanted.prior, Redistributed):
        redistribution, prior_at = wanted.prior.rate, REDISTRIBUTED
    members, prior, dim = resolve_members(wanted.sites, wanted.prior, wanted.init, wanted.names)
    open_dynamics = wanted.dynamics is None
    dynamics = _with_bounce(Boomerang() if wanted.dynamics is None else wanted.dynamics, wanted.bounce, members)
    _check_members(members, prior, prior_at, wanted)
    _check_latents(members, prior, dynamics)
    private = any(site.budget is not None for site in members)
    if private:
        _check_private(dynamics, open_dynamics, prior_at if prior is not None else "coordinator", mixture)
    latents = any(site.latents for site in members)
    usual = usual_chains(open_dynamics, wanted.ess, private, latents or mixture is not None)
    chains = usual if wanted.chains is None else int(wanted.chains)
    own = coordinate_names(members, dim)
    labels = own if wanted.names is None else wanted.names
    names = check_names(labels, dim, own)
    named = None if labels is None else names
    init = check_init(wanted.init, chains, dim)
    constraints = check_constraints(wanted.constraints, dim)
    start = _check_functions(members, prior, init, dim)
    found, reference_name, control, control_name = _choose_reference(
        wanted, members, prior, dynamics, dim, start, named, constraints
    )
    check_centre(walls_of(constraints, found), found)
    if prior is not None and prior_at == "extra":
        members = (*members, PriorSite(prior))
    walked = prior if prior_at == "coordinator" else None
    public = public_potential(members, walked, control, found, dynamics, mixture)
    silent = public is None and dynamics.refresh == 0.0 and dynamics.excess == 0
    few_events = found.control is not None and control_name == "quadratic" and not silent
    return Method(
        sites=members,
        dim=dim,
        prior=prior,
        prior_at=prior_at,
        dynamics=dynamics,
        reference=found,
        reference_name=reference_name,
        control=control,
        control_name=control_name,
        chains=chains,
        names=names,
        seed=secrets.randbits(31) if wanted.seed is None else int(wanted.seed),
        public=public,
        segments=usual_segments(members, chains) if few_events or mixture is not None else SEGMENTS_MANY_EVENTS,
        init=init,
        redistribution=redistribution,
        bounds=wanted.bounds,
        variables=variables(members, names),
        # Private latents move with rotations alone, and a prior with scales has many events that cost no round.
        open_dynamics=open_dynamics and mixture is None and not latents,
        constraints=constraints,
        mixture=mixture,
        wide_starts=found.control is not None and init is None and constraints is None,
        open_chains=wanted.chains is None and wanted.ess is not None and (init is None or init.ndim == 1),
    )


def _with_bounce(dynamics: Dynamics, bounce: str | None, members: Sequence[Member]) -> Dynamics:
    """The dynamics with the bounce that was asked for; by default a draw over a network, else that of the dynamics."""
    elsewhere = any(not isinstance(site, Site) for site in members)
    if dynamics.flips:
        if bounce is not None:
            found = f"{bounce!r} with {type(dynamics).__name__}"
            raise InputError("bounce", found, "Leave it out: these dynamics flip single coordinates.")
        return dynamics
    if elsewhere and bounce == REFLECT:
        remedy = "Leave it out: the normal of a reflection is a function of a site's records, and gives them away."
        raise InputError("bounce", "'reflect' with sites on a network", remedy)
    return dataclasses.replace(dynamics, bounce=bounce or (DRAW if elsewhere else dynamics.bounce))


def _choose_reference(
    wanted: Settings,
    members: Sequence[Member],
    prior: Quadratic | None,
    dynamics: Dynamics,
    dim: int,
    start: Any,
    names: Any,
    constraints: tuple[np.ndarray, np.ndarray] | None,
) -> tuple[Reference, str, dict[str, ControlVariate], str]:
    found, name = _make_reference(wanted, members, prior, dynamics, dim, start, names, constraints)
    if start is not None and not found.name:
        check_rays(members, start, np.asarray(found.matrix))
    control_name = wanted.control
    if control_name is None:
        # On rotations the quadratics cancel the −½|a|² that the coordinator would otherwise have to simulate. On lines
        # quadratics save most near a Gaussian, but in heavier tails a site's rate grows with |∇q_m|, where its own gradient
        # stays bounded: 6 times fewer rounds than linear ones in a logistic regression of four sites, 15 times more with
        # separable data. Linear ones add a constant to a site's gradient and nothing to its growth, and reduce the rate of
        # many sites to that of one.
        usual = "quadratic" if dynamics.flow.rotating else "linear"
        control_name = "none" if found.control is None else usual
    if control_name == "none":
        return found, name, {}, control_name
    made = found
    if found.control is None:
        made = laplace(members, prior, start=start, names=names)
        found = dataclasses.replace(found, rounds=made.rounds, bytes=made.bytes)
    control = dict(made.control or {}) if control_name == "quadratic" else linear_control(made)
    return found, name, control, control_name


def _check_members(members: Sequence[Member], prior: Quadratic | None, prior_at: str, wanted: Settings) -> None:
    remote = any(not isinstance(site, Site) or site.budget is not None for site in members)
    if wanted.bounds == "adaptive" and (
        remote or any(isinstance(site, Site) and site.log is not None for site in members)
    ):
        found = "'adaptive' with sites elsewhere, under a privacy budget or with a log"
        raise InputError("bounds", found, "Use bounds='certified'.")
    if wanted.constraints is not None and remote:
        remedy = "Leave them out: they are for sites in this process without a privacy budget."
        raise InputError("constraints", "sites elsewhere or with a privacy budget", remedy)
    if prior is None:
        return
    if prior_at in ("sites", REDISTRIBUTED) and any(site.coordinates is not None for site in members):
        raise InputError(
            "prior_at" if prior_at == "sites" else "prior",
            f"{prior_at!r} with a site that sees only some coordinates",
            "Use a plain prior with prior_at='coordinator' or 'extra'.",
        )
    if prior_at == "extra" and any(site.name == PRIOR_SITE for site in members):
        raise InputError("sites", f"a site named {PRIOR_SITE!r}", "Rename it: prior_at='extra' needs that name.")


def on_lines(method: Method, reason: str, when: str) -> Method | None:
    """The method to use instead if the few-rounds method has turned out unsuitable: Zig-Zag on the same reference.

    None if there are no certified bounds for it. The decision is made before anything is drawn, or from a discarded
    burn-in. The run that is kept is drawn independently: its plans have their own numbers, so that it shares no
    random number with what the decision saw. Given the decision it is a run of Zig-Zag as any other, and exact as such.
    """
    dynamics = ZigZag()
    try:
        if method.bounds == "certified":
            _check_enclosures(method.sites, dynamics)
    except NoEnclosure:
        return None
    controls = linear_control(method.reference)
    more = method.open_chains and 2 * method.chains <= MOST_CHAINS
    prior = method.prior if method.prior_at == "coordinator" else None
    public = public_potential(method.sites, prior, controls, method.reference, dynamics, method.mixture)
    return method.replace(
        dynamics=dynamics, control=controls, control_name="linear", segments=SEGMENTS_MANY_EVENTS, open_dynamics=False,
        public=public, first_plan=SECOND_RUN, site_event_rate=None, chains=method.chains * (1 + more),
        chosen=f"Zig-Zag was chosen {when}, in place of the Boomerang: {reason}",
    )  # fmt: skip


def _check_private(dynamics: Dynamics, unsaid: bool, prior_at: str, mixture: MixturePrior | None) -> None:
    if unsaid:
        raise InputError(
            "dynamics",
            "None with a site that has a privacy budget",
            "Say which: fedpdmc.ZigZag() or fedpdmc.FactorisedBoomerang(); reflections cannot be private.",
        )
    check_dynamics(dynamics)
    if prior_at not in ("coordinator", "extra"):
        raise InputError(
            "prior_at",
            f"{prior_at!r} with a site that has a privacy budget",
            "A site's share of the prior could reveal its records: use prior_at='coordinator' or 'extra'.",
        )
    if mixture is not None:
        raise InputError("prior", "one with scales, and a site that has a privacy budget", "Give a normal prior.")


def usual_segments(sites: Sequence[Member], chains: int) -> int:
    """A power of two that lets most plans of few chains end in a site's event; the maximum if record counts are unknown."""
    most = max(SEGMENTS_FEW_EVENTS, min(MOST_SEGMENTS, MOST_PLANNED // chains))
    records = sum(site.records for site in sites if site.budget is None)
    wanted = SEGMENTS_PER_ROOT_RECORD * np.sqrt(records) if records else most
    return int(np.clip(2 ** np.ceil(np.log2(wanted)), SEGMENTS_FEW_EVENTS, most))


def usual_chains(few_rounds: bool, ess: float | None, private: bool = False, slower: bool = False) -> int:
    """Sixty-four, or as many as an effective sample size calls for in the few-rounds method.

    Twice as many where chains are ``slower``, with private latents or scales of a prior: rounds grow with a chain's time.
    """
    if not few_rounds or ess is None:
        return CHAINS
    wanted = 2 ** np.ceil(np.log2(ess / SAMPLES_PER_CHAIN)) * (2 if slower else 1) / (2 if private else 1)
    return int(np.clip(wanted, LEAST_CHAINS, MOST_CHAINS))


def _check_functions(
    sites: Sequence[Member], prior: Quadratic | None, init: np.ndarray | None, dim: int
) -> np.ndarray | None:
    """The start of the search for the mode, at which all users' functions are finite; None if all models are built in."""
    written = [site for site in sites if isinstance(site, Site) and site.model is not None]
    if not written:
        return None
    if init is not None:
        start = init if init.ndim == 1 else init[0]
    else:
        start = np.zeros(dim) if prior is None else prior_mean(prior)
    for site in written:
        check_unchanged(site.model, site.dim, site.name)
    for site in written:
        check_start(site.potential, start if site.coordinates is None else start[site.coordinates], site.name)
    return start


@double_precision
def _user_programs(sites: Sequence[Member]) -> list[Program]:
    own = [site.potential for site in sites if isinstance(site, Site) and site.model is not None]
    found = [potential.joint if isinstance(potential, LatentProgram) else potential for potential in own]
    return [potential for potential in found if isinstance(potential, Program)]


@double_precision
def _check_enclosures(sites: Sequence[Member], dynamics: Dynamics) -> None:
    for site in sites:
        if isinstance(site, Site) and isinstance(site.potential, RandomEffects):
            site.potential.check_continuity()
    programs = _user_programs(sites)
    for program in {program.function: program for program in programs}.values():
        program.check(dynamics.flow.rotating, dynamics.flips)
    for program in programs:
        program.check_continuity()


def _check_latents(members: Sequence[Member], prior: Quadratic | None, dynamics: Dynamics) -> None:
    if not any(site.latents for site in members):
        return
    if dynamics.flips or not dynamics.flow.rotating:
        raise InputError("dynamics", repr(dynamics), NEEDS_ROTATION)
    for site in members:
        if site.budget is not None or site.log is not None:
            raise InputError(
                f"sites ({site.name!r})",
                "a budget or a log together with a site with private latents",
                "Such sites are asked one message at a time, which private latents are not ready for: leave it out.",
            )
    owner: dict[str, str] = {}
    models = {site.name: site.potential for site in members if isinstance(site, Site)}
    models = {name: model for name, model in models.items() if isinstance(model, RandomEffects)}
    for name, model in models.items():
        for label in filter(None, model.labels):
            if label in owner:
                # One effect, which neither site can keep to itself.
                raise InputError(
                    f"sites ({name!r}) groups",
                    f"group {label!r}, which site {owner[label]!r} has too",
                    "A group at two sites has no private effect: put its records together, or, if these are two groups, "
                    "give them names of their own.",
                )
            owner[label] = name
    if models and not any(site.name == PRIOR_SITE for site in members):
        model = next(iter(models.values()))
        start = model.dim - model.effects.shape[1] - model.correlated
        held = np.zeros(model.dim) if prior is None else np.diag(np.asarray(prior.precision))
        if not np.all(held[start:] > 0):
            # As a spread goes to zero the likelihood tends to a positive number.
            raise InputError(
                "prior",
                "a flat prior of the log spread of effects, under which the posterior is improper",
                "Give prior=fedpdmc.models.effects_prior(model), or a normal prior of all parameters.",
            )


def check_constraints(constraints: Any, dim: int) -> tuple[np.ndarray, np.ndarray] | None:
    """A matrix with a row for each limit, and the limits."""
    if constraints is None:
        return None
    remedy = f"Give a pair (A, b) of shapes (m, {dim}) and (m,): parameters x are allowed where A @ x <= b."
    try:
        rows, limits = (np.asarray(part, np.float64) for part in constraints)
    except (TypeError, ValueError) as error:
        raise InputError("constraints", repr(constraints)[:80], remedy) from error
    if rows.ndim != 2 or rows.shape[1] != dim or limits.shape != rows.shape[:1] or not len(limits):
        raise InputError("constraints", f"shapes {rows.shape} and {limits.shape}", remedy)
    if not (np.all(np.isfinite(rows)) and np.all(np.isfinite(limits))):
        raise InputError("constraints", "values that are not finite", "Leave out limits that are infinite.")
    if not np.all(np.any(rows != 0, 1)):
        raise InputError("constraints", "a row of zeros", "Give each limit the coefficients of its parameters.")
    return rows, limits


def walls_of(constraints: tuple[np.ndarray, np.ndarray] | None, reference: Reference) -> Walls | None:
    """``A (c + S a) ≤ b`` with normals of unit length."""
    if constraints is None:
        return None
    rows, limits = constraints
    if reference.bend is not None and np.any(rows[:, list(reference.bend.index)]):
        raise InputError("reference", "one with bent log spreads, which are constrained", "Leave the reference out.")
    normal = rows @ np.asarray(reference.matrix)
    length = np.linalg.norm(normal, axis=1)
    limit = (limits - rows @ np.asarray(reference.center)) / length
    return Walls(jnp.asarray(normal / length[:, None]), jnp.asarray(limit))


def check_centre(walls: Walls | None, reference: Reference) -> None:
    """Refuse a reference about a mode outside: paths about it would meet the walls all the time."""
    if walls is None or reference.control is None:
        return
    if not bool(walls.inside(jnp.zeros((1, walls.dim)))[0]):
        raise InputError(
            "reference",
            "that of a mode outside the constraints",
            "Give a fedpdmc.Reference with its centre inside and the scale of the posterior, or reference='identity'.",
        )


def start_inside(walls: Walls | None, a, step, given: bool):
    """Starts of chains inside the walls: a step from an interior point, shortened before a wall; given points are kept.

    Raises
    ------
    InputError
        A point is outside.
    """
    if walls is None:
        return a if given else np.asarray(a) + np.asarray(step)
    if not bool(jnp.all(walls.inside(a))):
        found = "a starting point" if given else "the usual starting point"
        raise InputError("init", f"{found} outside the constraints", "Give init= inside all of them.")
    return a if given else walls.reachable(a, step)


def usual_reference(sites: Sequence[Member], dynamics: Dynamics) -> str:
    """Whitened coordinates, unless a site with a privacy budget would have to release derivatives for them.

    On rotations with quadratic control variates sites have events where the posterior differs from the reference: "vb" has
    the fewest. On lines they have events anyway, and the mode suffices. Flips in a diagonal reference stay local: sites
    that see some coordinates are sent those alone, and keep their arrivals while others' coordinates move. So with such
    sites only the scales are taken from the Laplace reference.
    """
    if any(site.budget is not None for site in sites):
        return "identity"
    if dynamics.flips and any(site.coordinates is not None for site in sites):
        return "diagonal"
    return VB if dynamics.flow.rotating else LAPLACE


def _make_reference(
    wanted: Settings,
    sites: Sequence[Member],
    prior: Quadratic | None,
    dynamics: Dynamics,
    dim: int,
    start: np.ndarray | None,
    names: list[str] | None,
    constraints: tuple[np.ndarray, np.ndarray] | None,
) -> tuple[Reference, str]:
    reference = usual_reference(sites, dynamics) if wanted.reference is None else wanted.reference
    if wanted.bounds == "certified" and isinstance(reference, str) and reference != "identity":
        _check_enclosures(sites, dynamics)
    unsearched = None if any(_may_have_several(site) for site in sites) else ()
    if isinstance(reference, Reference):
        found = check_reference(reference, dim)
        found = dataclasses.replace(found, modes=unsearched) if found.modes is None else found
        check_bend(sites, prior, found.bend)
        plain = found.diagonal and not np.any(found.center) and bool(np.all(np.asarray(found.scale_tril) == 1))
        return found, found.name or LAPLACE if found.control is not None else "identity" if plain else "given"
    identity = Reference(on_device(np.zeros(dim)), on_device(np.ones(dim)), modes=unsearched)
    if reference == "identity":
        return identity, reference
    try:
        if reference == VB:
            # Log spreads are not bent with constraints.
            found = vb(sites, prior, start=start, names=names, bend=constraints is None)
        else:
            found = laplace(sites, prior, start=start, names=names)
    except (ImproperPosterior, NoMode, ModeNotFound, NotFinite) as error:
        # If a reference from the sites' derivatives was not asked for and none exists, the identity is used.
        optional = wanted.reference is None and wanted.dynamics is not None
        if not optional or (prior is None and isinstance(error, (ImproperPosterior, NotFinite))):
            raise
        warn(
            "No reference could be computed from the sites' derivatives, so chains move in the parameters' own coordinates: "
            f"{error} To choose: reference=fedpdmc.Reference(center, scales) or reference='identity'.",
        )
        return identity, "identity"
    modes, rounds = other_modes(sites, prior, found, constraints)
    found = dataclasses.replace(found, modes=modes, rounds=found.rounds + rounds)
    if reference == "diagonal":
        scale = found.scale_tril
        # Standard deviations of the Laplace approximation, one for each parameter.
        sds = scale if found.diagonal else jnp.sqrt(jnp.sum(scale**2, 1))
        return dataclasses.replace(found, scale_tril=sds), reference
    return found, found.name


REMOTE_SEARCHES = 4  # over a network, where every point costs bits: the first of the starts
LEAST_SEARCHES = 3  # after which modes count as searched for, where sites may decline points or allow few
MOST_STEPS = 8  # of each search; searches share their rounds
NEAR_BY = 6.0  # distance of the nearer starts from the centre, in standard deviations
FARTHEST = 20.0  # distance of the farther ones, at most
ASIDE = 0.3  # distance of the first start from the centre, in standard deviations
TOLERANCE = 0.1  # standard deviations to a mode
SAME = 2.0  # standard deviations within which two modes count as one
LEAST_SHARE = 1e-3  # of the posterior's mass, below which a mode is left out


@double_precision
def other_modes(
    sites: Sequence[Member],
    prior: Any,
    reference: Reference,
    constraints: tuple[np.ndarray, np.ndarray] | None = None,
    points: int | None = None,
) -> tuple[tuple[dict[str, Any], ...] | None, int]:
    """Modes within the constraints that are apart from the centre of the reference, and the rounds of looking for them.

    Sites whose potentials may have several modes are asked: users' own functions, model files and Student-t regressions.
    Regressions of the other families have one. The share of a mode in the mass is Laplace's approximation; None for sites on
    a network, which release no values: between modes far apart, heights do not follow from derivatives. None in place
    of the modes: there may be several, and they cannot be searched for. ``points``: at how many points sites on a network
    may still be asked, one after the other; None if at none.
    """
    if not any(_may_have_several(site) for site in sites):
        return (), 0
    remote = any(not isinstance(site, Site) for site in sites)
    if reference.bend is not None or any(site.noisy or site.latents for site in sites):
        return None, 0
    if remote and (points is None or points < LEAST_SEARCHES * MOST_STEPS):
        return None, 0
    search = begin_search(sites, prior, None, None)
    scale, center = np.asarray(reference.matrix), np.asarray(reference.center)
    modes, rounds, searches, asked = [], 0, 0, 0
    # The first from near the centre, and not from it: between two modes there may be a saddle.
    starts = [center + ASIDE * np.sqrt(np.sum(scale**2, 1)), *_starts(center, scale, search.prior)]
    for start in starts[:REMOTE_SEARCHES] if remote else starts:
        if remote and points is not None and points - asked < MOST_STEPS:
            break
        found, steps, declined = _descend(search, start)
        # Over a network nobody but the sites knows why a search ended elsewhere.
        searches += found is not None if remote else not declined
        rounds, asked = max(rounds, steps), asked + steps
        if found is None or (constraints is not None and np.any(constraints[0] @ found.point.x > constraints[1])):
            continue
        if all(_distance(found, mode) > SAME for mode in modes):
            modes.append(found)
    rounds = asked if remote else rounds
    if len(modes) < 2:
        return () if searches >= LEAST_SEARCHES else None, rounds
    modes.sort(key=lambda mode: float(np.linalg.norm(np.linalg.solve(scale, mode.point.x - center))))
    known, shares = modes[0], [None] * len(modes)
    if not remote:
        logs = np.array([-mode.point.value - 0.5 * np.linalg.slogdet(mode.point.hessian)[1] for mode in modes])
        weights = np.exp(logs - logs.max())
        shares = (weights / weights.sum()).tolist()
    return tuple(
        {"at": mode.point.x.tolist(), "center": known.point.x.tolist(), "scale": scale.tolist(), "share": share}
        for mode, share in zip(modes[1:], shares[1:], strict=True)
        if share is None or share >= LEAST_SHARE
    ), rounds


def _may_have_several(site: Member) -> bool:
    if not isinstance(site, Site):
        return site.several_modes
    return site.model is not None or isinstance(getattr(site.potential, "loss", None), StudentT)


def _starts(center: np.ndarray, scale: np.ndarray, prior: Quadratic | None) -> list[np.ndarray]:
    """Points in opposite directions: one standard deviation of the prior from its mean, two distances from the centre.

    The first is the centre's mirror image at the prior's mean, where many models have their other mode.
    """
    signs = np.sign(np.random.default_rng(0).standard_normal((3, len(center))))
    widths = np.sqrt(np.sum(scale**2, 1))
    pairs, starts = [(center, NEAR_BY * widths), (center, FARTHEST * widths)], []
    if prior is not None:
        held = np.diag(np.asarray(prior.precision))
        wide = np.where(held > 0, 1 / np.sqrt(np.where(held > 0, held, 1.0)), FARTHEST * widths)
        mean = prior_mean(prior)
        pairs = [(mean, wide), pairs[0], (center, np.minimum(wide, FARTHEST * widths))]
        starts = [2 * mean - center] if np.any(np.abs(mean - center) > NEAR_BY * widths) else []
    return starts + [
        middle + side * away * sign for (middle, away), sign in zip(pairs, signs, strict=False) for side in (-1.0, 1.0)
    ]


def _descend(search: Search, start: np.ndarray) -> tuple[Mode | None, int, bool]:
    """The mode that a search from a point ends in, or None; its steps; whether a site declined to answer at a point."""
    steps = 0

    def ask(x: np.ndarray):
        nonlocal steps
        steps += 1
        return search.ask(x)

    try:
        first = ask(start)
        if not (np.isfinite(first.value) and np.all(np.isfinite(first.hessian))):
            return None, steps, False
        found = find_mode(ask, first, TOLERANCE, False, most=MOST_STEPS)
    except (NoMode, ImproperPosterior, ModeNotFound, NotFinite, NoEnclosure, np.linalg.LinAlgError):
        return None, steps, False
    except PointDeclined:
        return None, steps, True
    proper = np.linalg.eigvalsh(found.point.hessian)[0] > 0
    return (found if proper else None), steps, False


def _distance(one: Mode, other: Mode) -> float:
    """In standard deviations of the wider of the two."""
    away = one.point.x - other.point.x
    return min(float(np.sqrt(away @ positive_definite(mode.point.hessian) @ away)) for mode in (one, other))
