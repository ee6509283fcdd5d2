"""What a call of ``sample`` means: its arguments checked, its defaults chosen, the federation opened."""

from __future__ import annotations

import functools
import secrets
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from fedpdmc._jax.compilation import compiled
from fedpdmc._jax.precision import double_precision
from fedpdmc._jax.random_streams import ChainKeys, chain_keys, normals, uniforms
from fedpdmc.console.progress import report
from fedpdmc.console.warnings import warn
from fedpdmc.dynamics import Boomerang, Dynamics, ZigZag
from fedpdmc.errors import ImproperPosterior, InputError, ModeNotFound, NoEnclosure, NoMode, NotFinite
from fedpdmc.models.captured_values import check_unchanged
from fedpdmc.models.user_function import check_start
from fedpdmc.models.variables import Variables, coordinate_names, variables
from fedpdmc.potentials import ControlVariate, Program, Quadratic
from fedpdmc.sampling.coordinator import Coordinator, State
from fedpdmc.sampling.engines.base import Federation
from fedpdmc.sampling.engines.compiled_rounds import LocalFederation
from fedpdmc.sampling.engines.in_process_private import GuardedFederation
from fedpdmc.sampling.laplace_reference import laplace, linear_control, prior_mean
from fedpdmc.sampling.members import PRIOR_SITE, settle
from fedpdmc.sampling.prior_shares import Redistributed, shares
from fedpdmc.sampling.sign_check import check_rays
from fedpdmc.sites.private_site import PrivateSite, check_dynamics
from fedpdmc.sites.site import Opening, Site, local_columns, open_site, whiten
from fedpdmc.validation import integer, one_of, optional_seed
from fedpdmc.whitening import Reference

# The few-rounds method takes as many chains as reach the effective samples asked for in about fifty units of time.
CHAINS, LEAST_CHAINS, MOST_CHAINS = 64, 16, 1024
SAMPLES_PER_CHAIN = 16
# Refreshment that balances the mixing of coordinates and energy on the Laplace reference.
REFRESH = 1.2
# Segments of a plan: enough refreshments to last until an objection where objections are rare, else few. Objections fall
# like one over the root of the records; with many chains blocks are short, and plans reach to their end anyway.
SEGMENTS_FEW_OBJECTIONS, SEGMENTS_MANY_OBJECTIONS = 64, 1
SEGMENTS_PER_ROOT_RECORD, MOST_SEGMENTS, MOST_PLANNED = 1.5, 512, 4096
REDISTRIBUTED = "redistributed"
# How much wider than the reference chains set out where sites are elsewhere.
WIDE = 2.0
REFERENCES, CONTROLS = ("laplace", "diagonal", "identity"), ("none", "linear", "quadratic")
# Number of the first plan of a run after a burn-in that was given up: beyond any that it may have used.
SECOND_RUN = 2**30
# What is left of a sum relative to its largest term when it is rounding only.
CANCELLED = 1e-10


class Method(NamedTuple):
    """All choices of a run.

    ``public`` is what the coordinator walks with, in whitened coordinates, ``segments`` the most segments of a plan, and
    ``redistribution`` the rate at which the prior is dealt anew to the sites, zero if it is not. ``open_dynamics``: nobody
    said which; ``chosen`` says what was chosen in its place and why. Plans are numbered from ``first_plan`` on.
    ``objections`` are those that a chain meets in the long run per unit of process time, where that is known beforehand.
    """

    sites: tuple[Site, ...]
    dim: int
    prior: Quadratic | None
    prior_at: str
    dynamics: Dynamics
    reference: Reference
    control: dict[str, ControlVariate]
    control_name: str
    chains: int
    names: list[str]
    init: np.ndarray | None
    seed: int
    whitened: bool
    public: Quadratic | None
    segments: int
    redistribution: float = 0.0
    bounds: str = "certified"
    variables: Variables | None = None
    reference_name: str = "given"
    open_dynamics: bool = False
    chosen: str = ""
    first_plan: int = 0
    objections: float | None = None

    @property
    def certified(self) -> bool:
        """Whether every event time is drawn under a proved bound: adaptive bounds serve the user's own functions only."""
        return self.bounds == "certified" or all(site.model is None for site in self.sites)

    def coordinator(self, burn_in: float = 0.0) -> Coordinator:
        """The coordinator of this run."""
        return Coordinator.of(self.dynamics, self.public, self.segments, self.redistribution, -burn_in)

    def federation(self) -> Federation:
        """The sites: opened for this run in this process, those with a budget under it; or where they are.

        Sites with a budget or a log are asked one message at a time.
        """
        if self.sites[0].federation is not None:
            return self.sites[0].federation
        run = secrets.token_hex(16)
        guards = {
            site.name: PrivateSite(site, self.opening(site), run) for site in self.sites if site.budget is not None
        }
        plain = [site for site in self.sites if site.budget is None]
        logs = {site.name: site.log for site in self.sites if site.log is not None}
        if not guards and not logs:
            return self._local(plain)
        names = [site.name for site in self.sites]
        return GuardedFederation(names, guards, self._local(plain) if plain else None, logs)

    def _local(self, sites: list[Site]) -> LocalFederation:
        openings, clocks = [self.opening(site) for site in sites], []
        for number, (site, opening) in enumerate(zip(sites, openings, strict=True), 1):
            report("compiling", number, len(sites))
            clocks.append(open_site(site, opening))
        return LocalFederation(
            [site.name for site in sites],
            clocks,
            [local_columns(site, opening) for site, opening in zip(sites, openings, strict=True)],
            [site.key(self.seed) for site in sites],
            self.chains,
        )

    def opening(self, site: Site) -> Opening:
        """What a site is told at the start of this run."""
        share = self.prior if self.redistribution > 0 else None
        if self.prior is not None and self.prior_at == "sites":
            records = sum(s.records for s in self.sites)
            share = self.prior.scaled(site.records / records if records else 1 / len(self.sites))
        return Opening(
            self.reference, self.dynamics, self.control.get(site.name), share, self.redistribution > 0,
            self.bounds == "adaptive",
        )  # fmt: skip

    def start(self, burn_in: float) -> State:
        """Where the chains set out: at ``init``, or spread about the reference's centre or the prior's mean.

        Of sites elsewhere the reference is not taken on trust: chains set out wider than it, so that they disagree for long
        if it is too narrow for what the sites then object to.
        """
        keys = chain_keys(jax.random.fold_in(jax.random.key(self.seed), 2), self.chains)
        count = jnp.zeros(self.chains, int)
        number = count + self.first_plan
        spread, v = _spread(self.dynamics, keys, number, self.dim)
        if self.init is not None:
            a = jnp.broadcast_to(self.reference.to_a(jnp.asarray(self.init)), (self.chains, self.dim))
        elif self.whitened:
            a = (WIDE if self.sites[0].federation is not None else 1.0) * spread
        else:
            center = jnp.zeros(self.dim) if self.prior is None else jnp.asarray(prior_mean(self.prior))
            a = self.reference.to_a(center) + 0.1 * spread
        share = None
        if self.redistribution > 0:
            keys = chain_keys(jax.random.fold_in(jax.random.key(self.seed), 3), self.chains)
            share = shares(uniforms(keys, count, count, len(self.sites)))
        return State(a, v, jnp.full(self.chains, -burn_in), number, count, count, count, share)


@compiled
def _spread(dynamics: Dynamics, keys: ChainKeys, count: Int[Array, " C"], dim: int):
    """Standard normal positions, and velocities of the dynamics."""
    u = uniforms(keys, count, count, 2 * dim)
    return normals(u[:dim]).T, dynamics.velocity(u[dim:].T)


def choose(
    sites, prior, prior_at, dynamics, reference, control, chains, init, seed, bounds, keep, names, ess=None
) -> Method:  # fmt: skip
    """Check every argument of ``sample`` and choose what was left open, before anything runs."""
    redistribution, prior_at = _redistribution(prior, prior_at)
    members, prior, dim = settle(sites, prior, init, names)
    one_of("bounds", bounds, ("certified", "adaptive"))
    one_of("keep", keep, ("skeleton", "draws"))
    few_rounds = dynamics is None
    dynamics = Boomerang(refresh=REFRESH) if dynamics is None else dynamics
    if not isinstance(dynamics, Dynamics):
        raise InputError("dynamics", repr(dynamics), "Give one such as fedpdmc.ZigZag() or fedpdmc.Boomerang().")
    if bounds == "adaptive" and any(
        not isinstance(site, Site) or site.budget is not None or site.log is not None for site in members
    ):
        raise InputError(
            "bounds", "'adaptive' with sites elsewhere, under a privacy budget or with a log", "Use bounds='certified'."
        )
    if any(site.budget is not None for site in members):
        check_private(dynamics, few_rounds, prior_at if prior is not None else "coordinator")
    if control is not None:
        one_of("control", control, CONTROLS)
    unsaid = reference is None
    reference = _usual_reference(members, dynamics) if unsaid else reference
    seed = secrets.randbits(31) if optional_seed("seed", seed) is None else int(seed)
    chains = _usual_chains(few_rounds, ess) if chains is None else integer("chains", chains, 1)
    own = coordinate_names(members, dim)
    told = own if names is None else names
    names = check_names(told, dim, own)
    named = None if told is None else names
    init = check_init(init, chains, dim)
    start = _check_functions(members, prior, init, dim)
    if bounds == "certified" and isinstance(reference, str) and reference != "identity":
        _check_enclosures(members, dynamics)
    if prior is not None and prior_at in ("sites", REDISTRIBUTED) and any(s.coordinates is not None for s in members):
        raise InputError(
            "prior_at" if prior_at == "sites" else "prior",
            f"{prior_at!r} with a site that sees only some coordinates",
            "Use a plain prior with prior_at='coordinator' or 'extra'.",
        )
    extra = prior is not None and prior_at == "extra"
    if extra and any(site.name == PRIOR_SITE for site in members):
        raise InputError("sites", f"a site named {PRIOR_SITE!r}", "Rename it: prior_at='extra' needs that name.")
    found, name = _reference(members, prior, reference, start, unsaid and not few_rounds, dim, named)
    if start is not None and name != "laplace":
        check_rays(members, start, np.asarray(found.matrix))
    control = _usual_control(found, dynamics) if control is None else control
    found, controls = _controls(members, prior, found, control, start, named)
    if prior is not None and extra:
        members = (*members, Site(prior, name=PRIOR_SITE))
    whitened = found.control is not None
    public = public_potential(members, prior if prior_at == "coordinator" else None, controls, found, dynamics)
    silent = public is None and dynamics.refresh == 0 and dynamics.excess == 0
    few_objections = whitened and control == "quadratic" and not silent
    segments = _usual_segments(members, chains) if few_objections else SEGMENTS_MANY_OBJECTIONS
    return Method(
        members, dim, prior, prior_at, dynamics, found, controls, control, chains, names, init, seed, whitened, public,
        segments, redistribution, bounds, variables(members, names), name, few_rounds,
    )  # fmt: skip


def on_lines(method: Method, reason: str, when: str) -> Method | None:
    """What is better where the few-rounds method has turned out unsuitable: Zig-Zag on the same reference.

    None where there are no certified bounds for it. The decision is made before anything is drawn, or from a burn-in of
    which nothing is kept. The run that is kept is drawn afresh: its plans have numbers of their own, so that it shares no
    random number with what the decision saw. Given the decision it is a run of Zig-Zag as any other, and exact as such.
    """
    dynamics = ZigZag()
    try:
        if method.bounds == "certified":
            _check_enclosures(method.sites, dynamics)
    except NoEnclosure:
        return None
    controls = linear_control(method.reference)
    prior = method.prior if method.prior_at == "coordinator" else None
    return method._replace(
        dynamics=dynamics, control=controls, control_name="linear", segments=SEGMENTS_MANY_OBJECTIONS, open_dynamics=False,
        public=public_potential(method.sites, prior, controls, method.reference, dynamics), first_plan=SECOND_RUN,
        objections=None, chosen=f"Zig-Zag was chosen {when}, in place of the Boomerang: {reason}",
    )  # fmt: skip


def _redistribution(prior: Any, prior_at: str) -> tuple[float, str]:
    """The rate at which the prior is dealt anew, and where the prior sits."""
    one_of("prior_at", prior_at, ("coordinator", "sites", "extra"))
    if not isinstance(prior, Redistributed):
        return 0.0, prior_at
    if prior_at != "coordinator":
        raise InputError(
            "prior_at", f"{prior_at!r} with a Redistributed prior", "Leave it out: the sites hold the prior."
        )
    return prior.rate, REDISTRIBUTED


def check_private(dynamics: Dynamics, unsaid: bool, prior_at: str) -> None:
    """What a federation with privacy budgets cannot do, before anything is charged."""
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
            "A site's share of the prior could tell of its records: use prior_at='coordinator' or 'extra'.",
        )


def _usual_segments(sites, chains: int) -> int:
    """A power of two that lets most plans of few chains end in an objection; the most where nobody tells his records."""
    most = max(SEGMENTS_FEW_OBJECTIONS, min(MOST_SEGMENTS, MOST_PLANNED // chains))
    told = sum(site.records for site in sites if site.budget is None)
    wanted = SEGMENTS_PER_ROOT_RECORD * np.sqrt(told) if told else most
    return int(np.clip(2 ** np.ceil(np.log2(wanted)), SEGMENTS_FEW_OBJECTIONS, most))


def _usual_chains(few_rounds: bool, ess: float | None) -> int:
    if not few_rounds or ess is None:
        return CHAINS
    return int(np.clip(2 ** np.ceil(np.log2(ess / SAMPLES_PER_CHAIN)), LEAST_CHAINS, MOST_CHAINS))


def public_potential(sites, prior, controls, reference: Reference, dynamics: Dynamics) -> Quadratic | None:
    """What the coordinator walks with, whitened: prior and control variates, less ``½|a|²`` on rotations; None if zero."""
    dim = reference.dim
    terms = [] if prior is None else [prior]
    # A control variate that belongs to no one site is the sum of all.
    own = {site.name: site.coordinates for site in sites}
    terms += [control.quadratic.embedded(dim, own.get(name)) for name, control in controls.items()]
    whitened = [whiten(term, reference, None) for term in terms]
    if dynamics.flow.rotating:
        whitened.append(Quadratic(-jnp.eye(dim), jnp.zeros(dim)))
    if not whitened:
        return None
    total = functools.reduce(Quadratic.plus, whitened)
    # Nothing is left only if the terms cancel to rounding; a wide prior is small and counts.
    left = _largest(total.precision) > CANCELLED * max(_largest(term.precision) for term in whitened)
    left |= _largest(total.linear) > CANCELLED * max(_largest(term.linear) for term in whitened)
    return total.separated() if left else None


def _largest(array) -> float:
    return float(jnp.max(jnp.abs(array)))


def _check_functions(sites, prior, init: np.ndarray | None, dim: int) -> np.ndarray | None:
    """Where a search for the mode of users' own functions begins, all finite there; None if all models are built in."""
    written = [site for site in sites if isinstance(site, Site) and site.model is not None]
    if not written:
        return None
    if init is not None:
        start = init if init.ndim == 1 else init[0]
    else:
        start = np.zeros(dim) if prior is None else prior_mean(prior)
    for site in written:
        assert site.model is not None
        check_unchanged(site.model, site.dim, site.name)
        check_start(site.potential, start if site.coordinates is None else start[site.coordinates], site.name)
    return start


@double_precision
def _check_enclosures(sites, dynamics: Dynamics) -> None:
    """Refuse a function that jumps or has no certified bounds before the sites are asked for anything."""
    potentials = [site.potential for site in sites if isinstance(site, Site) and site.model is not None]
    programs = [potential for potential in potentials if isinstance(potential, Program)]
    for program in {program.function: program for program in programs}.values():
        program.check(dynamics.flow.rotating, dynamics.flips)
    for program in programs:
        program.check_continuity()


def _usual_reference(sites, dynamics: Dynamics) -> str:
    """Whitened coordinates, unless a site with a privacy budget would have to release derivatives for them.

    Flips in a diagonal reference stay local: sites that see some coordinates are sent those alone, and keep their arrivals
    while others' coordinates move. So with such sites only the scales are taken from the Laplace reference.
    """
    if any(site.budget is not None for site in sites):
        return "identity"
    return "diagonal" if dynamics.flips and any(site.coordinates is not None for site in sites) else "laplace"


def _reference(sites, prior, reference, start, unsaid: bool, dim: int, names) -> tuple[Reference, str]:
    """The reference and its name; the identity where nobody asked for another and the Laplace reference does not exist."""
    if isinstance(reference, Reference):
        found = check_reference(reference, dim)
        return found, "laplace" if found.control is not None else "identity" if _is_identity(found) else "given"
    if not isinstance(reference, str):
        raise InputError(
            "reference",
            type(reference).__name__,
            "Give None, 'laplace', 'diagonal', 'identity' or a fedpdmc.Reference.",
        )
    one_of("reference", reference, REFERENCES)
    identity = Reference(jnp.zeros(dim), jnp.ones(dim))
    if reference == "identity":
        return identity, reference
    try:
        found = laplace(sites, prior, start=start, names=names)
    except (ImproperPosterior, NoMode, ModeNotFound, NotFinite) as error:
        if not unsaid or (prior is None and isinstance(error, (ImproperPosterior, NotFinite))):
            raise
        warn(
            f"No Laplace reference could be made, so the chains move in the parameters' own coordinates: {error} To choose: "
            "reference=fedpdmc.Reference(center, scales) or reference='identity'.",
        )
        return identity, "identity"
    if reference == "diagonal":
        scale = found.scale_tril
        # Standard deviations of the Laplace approximation, one for each parameter.
        sds = scale if found.diagonal else jnp.sqrt(jnp.sum(scale**2, 1))
        found = Reference(found.center, sds, found.control, found.rounds, found.bytes)
    return found, reference


def _is_identity(reference: Reference) -> bool:
    return reference.diagonal and not np.any(reference.center) and bool(np.all(np.asarray(reference.scale_tril) == 1))


def _usual_control(found: Reference, dynamics: Dynamics) -> str:
    """Of what the reference already knows, what saves rounds and cannot cost many.

    On rotations the quadratics cancel the ``−½|a|²`` that the coordinator has to simulate else. On lines quadratics save
    most near a Gaussian, but in heavier tails a site's rate grows with ``|∇q_m|``, where its own gradient stays bounded:
    6 times fewer rounds than linear ones in a logistic regression of four sites, 15 times more with separable data. Linear
    ones add a constant to a site's gradient and nothing to its growth, and bring the rate of many sites down to that of one.
    """
    if found.control is None:
        return "none"
    return "quadratic" if dynamics.flow.rotating else "linear"


def _controls(
    sites, prior, found: Reference, control: str, start, names
) -> tuple[Reference, dict[str, ControlVariate]]:
    """The control variates, and the reference with the rounds that they took where it had none."""
    if control == "none":
        return found, {}
    made = found if found.control is not None else laplace(sites, prior, start=start, names=names)
    controls = dict(made.control or {}) if control == "quadratic" else linear_control(made)
    if made is not found:
        found = Reference(found.center, found.scale_tril, None, made.rounds, made.bytes)
    return found, controls


def check_names(names: Any, dim: int, usual: Any = None) -> list[str]:
    """One distinct name for each parameter; ``usual`` are the models' own, for an error to show."""
    if names is None:
        return [f"x{i}" for i in range(dim)]
    try:
        names = [str(name) for name in names]
    except TypeError as error:
        raise InputError("names", repr(names), f"Give {dim} names, one for each parameter.") from error
    if len(names) != dim:
        own = "" if usual is None else f" The models call them {', '.join(map(str, usual))}."
        raise InputError("names", f"{len(names)} names", f"Give {dim}, one for each parameter.{own}")
    if len(set(names)) != dim or "energy" in names:
        raise InputError("names", repr(names), "Give distinct names, none of them 'energy'.")
    return names


def check_init(init: Any, chains: int, dim: int) -> np.ndarray | None:
    """None, one starting point, or one for each chain."""
    if init is None:
        return None
    try:
        array = np.asarray(init, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise InputError("init", repr(init), f"Give an array of shape ({dim},) or ({chains}, {dim}).") from error
    if array.shape not in ((dim,), (chains, dim)):
        raise InputError("init", f"shape {array.shape}", f"Give an array of shape ({dim},) or ({chains}, {dim}).")
    if not np.all(np.isfinite(array)):
        raise InputError("init", "values that are not finite", "Give finite starting points.")
    return array


def check_reference(reference: Reference, dim: int) -> Reference:
    """A reference of the right size with a scale that can be inverted."""
    scale, center = np.asarray(reference.scale_tril), np.asarray(reference.center)
    if center.shape != (dim,) or scale.shape not in ((dim,), (dim, dim)):
        raise InputError(
            "reference",
            f"center of shape {center.shape}, scale of shape {scale.shape}",
            f"Give shapes ({dim},) and ({dim}, {dim}).",
        )
    if not (np.all(np.isfinite(scale)) and np.all(np.isfinite(center))):
        raise InputError("reference", "values that are not finite", "Give finite numbers.")
    singular = np.any(scale == 0) if scale.ndim == 1 else np.linalg.cond(scale) > 1e14
    if singular:
        raise InputError("reference", "a singular scale", "Give a scale matrix that can be inverted.")
    return Reference(
        jnp.asarray(center, float), jnp.asarray(scale, float), reference.control, reference.rounds, reference.bytes
    )
