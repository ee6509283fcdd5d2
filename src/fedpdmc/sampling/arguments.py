"""What a user asks for: the arguments of ``sample``, sites and prior that fit together, checked before anything happens."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from fedpdmc.dynamics import BOUNCES, Dynamics
from fedpdmc.errors import InputError
from fedpdmc.members.site import Member, NotBent, Site, no_size
from fedpdmc.models.grouped import SpreadPrior
from fedpdmc.models.mixture_prior import MixturePrior
from fedpdmc.models.user_function import UserModel
from fedpdmc.potentials import BentSpreadPrior, ControlVariate, LinearPredictor, Potential, Quadratic, RandomEffects
from fedpdmc.potentials.padding import bucket, whole_vectors
from fedpdmc.validation import integer, non_negative, one_of, optional_seed, positive
from fedpdmc.whitening import Bend, Reference

REFERENCES = ("vb", "laplace", "diagonal", "identity")
CONTROLS = ("none", "linear", "quadratic")
CHEAP = 256  # records that cost little compared with a compilation
BURDEN = 8  # the largest factor of padding beyond that
PADDING = 16384  # records that padding may add to smaller sites with effects, before they are compiled on their own
SMALLER = 4  # how many times smaller than the largest these sites are
PRIOR_SITE = "prior"  # the site that walks with a non-Gaussian prior
CANCELLED = 1e-10  # the size of a sum relative to its largest term below which it is rounding only


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Settings:
    """The arguments of `fedpdmc.sample`, with its defaults. None is what `fedpdmc.sampling.defaults` chooses.

    Raises
    ------
    InputError
        An argument that cannot be used whatever the others are.
    """

    sites: Sequence[Member] | Member
    prior: Quadratic | SpreadPrior | MixturePrior | Redistributed | Callable | None = None
    prior_at: str = "coordinator"
    dynamics: Dynamics | None = None
    reference: Reference | str | None = None
    control: str | None = None
    chains: int | None = None
    duration: float | None = None
    ess: float | None = None
    burn_in: float | None = None
    init: Any = None
    seed: int | None = None
    bounds: str = "certified"
    keep: str = "skeleton"
    names: Sequence[str] | None = None
    constraints: Any = None
    bounce: str | None = None

    def __post_init__(self):
        check_length(self.duration, self.ess)
        one_of("prior_at", self.prior_at, ("coordinator", "sites", "extra"))
        one_of("bounds", self.bounds, ("certified", "adaptive"))
        one_of("keep", self.keep, ("skeleton", "draws"))
        if self.bounce is not None:
            one_of("bounce", self.bounce, BOUNCES)
        optional_seed("seed", self.seed)
        if self.burn_in is not None:
            non_negative("burn_in", self.burn_in, "Give a finite process time that is zero or positive.")
        if self.chains is not None:
            integer("chains", self.chains, 1)
        if self.control is not None:
            one_of("control", self.control, CONTROLS)
        if self.dynamics is not None and not isinstance(self.dynamics, Dynamics):
            found = repr(self.dynamics)
            raise InputError("dynamics", found, "Give one such as fedpdmc.ZigZag() or fedpdmc.Boomerang().")
        if isinstance(self.reference, str):
            one_of("reference", self.reference, REFERENCES)
        elif self.reference is not None and not isinstance(self.reference, Reference):
            remedy = "Give None, 'vb', 'laplace', 'diagonal', 'identity' or a fedpdmc.Reference."
            raise InputError("reference", type(self.reference).__name__, remedy)
        if isinstance(self.prior, Redistributed) and self.prior_at != "coordinator":
            found = f"{self.prior_at!r} with a Redistributed prior"
            raise InputError("prior_at", found, "Leave it out: the sites hold the prior.")
        if isinstance(self.prior, MixturePrior) and self.prior_at != "coordinator":
            found = f"{self.prior_at!r} with a prior that has scales"
            raise InputError("prior_at", found, "Leave it out: the coordinator walks with it.")


def check_length(duration: float | None, ess: float | None) -> None:
    """At most one of them, and positive."""
    if duration is not None and ess is not None:
        raise InputError("duration, ess", "both", "Give one of them.")
    if duration is not None:
        positive("duration", duration)
    if ess is not None:
        positive("ess", ess)


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
    return dataclasses.replace(reference, center=jnp.asarray(center, float), scale_tril=jnp.asarray(scale, float))


class Redistributed:
    """A prior that the sites walk with in random shares, renewed at random times (paper, Algorithm 4).

    Site m walks with ``U_m + α_m U_0``: its rate is ``(v_i ∂_i(U_m + α_m U_0))_+`` for flips and ``⟨v, ∇(U_m + α_m U_0)⟩_+``
    for reflections. The weights α are uniform on the simplex (Dirichlet with all parameters one) and renewed by the
    coordinator at the times of a Poisson process. For each fixed α the process leaves the posterior invariant, and α is
    drawn independently of position, velocity and past, so the posterior times the law of α is invariant.

    Parameters
    ----------
    prior : Quadratic
        From `fedpdmc.models`.
    rate : float
        How often the weights are drawn, per unit of process time; positive. Each time ends a plan.
    """

    def __init__(self, prior: Quadratic, rate: float = 0.1):
        if not isinstance(prior, Quadratic) or prior.records:
            raise InputError(
                "Redistributed(prior)", type(prior).__name__, "Give a prior such as fedpdmc.models.normal_prior(dim)."
            )
        self.prior, self.rate = prior, positive("Redistributed(rate)", rate, "Give a positive finite rate.")

    def __repr__(self) -> str:
        return f"Redistributed(rate={self.rate:g})"


class PriorSite(Site):
    """The coordinator's own member, which walks with the prior: it is asked as a site is, but owns no records."""

    def __init__(self, prior: Any):
        super().__init__(prior, name=PRIOR_SITE)

    def bent(self, bend: Bend | None) -> Site:
        """The prior of spreads in bent coordinates."""
        if bend is None:
            return self
        if not isinstance(self.potential, LinearPredictor):
            raise NotBent
        return PriorSite(BentSpreadPrior.of(self.potential, bend))


def check_sites(sites: Any) -> tuple[Member, ...]:
    """At least one site, and no two of one name; some may be elsewhere."""
    if isinstance(sites, Site):
        sites = [sites]
    if hasattr(sites, "columns"):
        remedy = "Make sites of a table: fedpdmc.sites(table, by=..., formula=..., family=...)."
        raise InputError("sites", type(sites).__name__, remedy)
    try:
        members: tuple[Any, ...] = tuple(sites)
    except TypeError as error:
        raise InputError("sites", type(sites).__name__, "Give a list of fedpdmc.Site.") from error
    if not members:
        raise InputError("sites", "no sites", "Give at least one fedpdmc.Site.")
    for site in members:
        if not isinstance(site, Member):
            raise InputError("sites", f"a {type(site).__name__}", "Give fedpdmc.Site objects only.")
    names = [site.name for site in members]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InputError("sites", f"several sites named {twice[0]!r}", "Give every site its own name.")
    return members


def check_prior(prior: Any) -> Quadratic | None:
    """None, or a prior from `fedpdmc.models`, also where it is redistributed; of one with scales, the normal stand-in."""
    prior = prior.prior if isinstance(prior, Redistributed) else prior
    prior = prior.stand_in if isinstance(prior, MixturePrior) else prior
    if prior is None or (isinstance(prior, Quadratic) and not prior.records):
        return prior
    raise InputError(
        "prior",
        repr(prior) if isinstance(prior, str) else type(prior).__name__,
        "Give None for a flat prior, one of fedpdmc.models such as normal_prior(dim, ...), or a function of the parameters. "
        "A prior in words is an argument of fedpdmc.sites.",
    )


def resolve_members(
    sites: Any, prior: Any, init: Any = None, names: Any = None
) -> tuple[tuple[Member, ...], Quadratic | None, int]:
    """Sites that know their number of parameters, a Gaussian prior if there is one, and that number.

    A prior that is a function becomes a site of its own. The number comes from the prior, from a site that knows it, from
    ``init`` or from ``names``.
    """
    members = check_sites(sites)
    function = callable(prior) and not isinstance(prior, (Potential, Redistributed, MixturePrior))
    if function or isinstance(prior, (SpreadPrior, UserModel)):
        if any(site.name == PRIOR_SITE for site in members):
            raise InputError(
                "sites", f"a site named {PRIOR_SITE!r}", "Rename it: a prior that is a function is that site."
            )
        walked, prior = (prior.spreads, prior.normal) if isinstance(prior, SpreadPrior) else (prior, None)
        members = (*members, PriorSite(walked))
    prior = check_prior(prior)
    unknown = [site for site in members if isinstance(site, Site) and site.known_dim is None]
    if unknown:
        known = [site for site in members if site not in unknown]
        if prior is not None or any(site.coordinates is None for site in known):
            dim = problem_dim(known, prior)
        elif init is not None and np.ndim(init) in (1, 2):
            dim = int(np.shape(init)[-1])
        elif names is not None and not isinstance(names, str):
            dim = len(list(names))
        elif known:
            dim = problem_dim(known, None)
        else:
            raise no_size(unknown[0].name)
        members = tuple(site.sized(dim) if isinstance(site, Site) and site in unknown else site for site in members)
    dim = check_dimensions(members, prior)
    return _of_one_size(members), prior, dim


def _of_one_size(members: tuple[Member, ...]) -> tuple[Member, ...]:
    """Sites with the same function and unequal numbers of records padded alike, so that it is compiled once for all."""
    families: dict[Any, list[Site]] = {}
    for site in members:
        if isinstance(site, Site) and site.model is not None:
            families.setdefault((site.model.family, site.dim), []).append(site)
    padded = {}
    for family in families.values():
        most = max(site.records for site in family)
        size = bucket(most)
        if any(site.records != most for site in family):
            # To the size of the largest site, or where this would be a burden to that of the site itself.
            for site in family:
                fits = size <= CHEAP or site.records * BURDEN >= size
                padded[site.name] = site.padded(size if fits else bucket(site.records))
    padded.update(_alike_effects([site for site in members if isinstance(site, Site)]))
    return tuple(padded.get(site.name, site) for site in members)


def _alike_effects(sites: list[Site]) -> dict[str, Site]:
    """Sites with grouped effects padded to one size, or to few where that would add many records."""
    models = {site.name: site.potential for site in sites if isinstance(site.potential, RandomEffects)}
    found, left = {}, sorted(models, key=lambda name: models[name].records)
    while left:
        size = whole_vectors(models[left[-1]].records)
        small = [name for name in left if SMALLER * models[name].records <= size]
        added = sum(size - whole_vectors(models[name].records) for name in small)
        kept = left[len(small) :] if added > PADDING else left
        groups = max(models[name].groups for name in kept)
        found |= {name: models[name].padded(size, groups) for name in kept}
        left = left[: len(left) - len(kept)]
    return {site.name: site.holding(found[site.name]) for site in sites if site.name in found}


def check_dimensions(sites: Sequence[Member], prior: Quadratic | None) -> int:
    """The number of parameters, on which prior and sites must agree."""
    dim = problem_dim(sites, prior)
    covered = np.zeros(dim, bool)
    for site in sites:
        if site.coordinates is None and site.dim != dim:
            raise InputError(
                f"sites ({site.name!r})",
                f"a model of {site.dim} parameters where the federation has {dim}",
                "Give all sites models of the same parameters, or say with coordinates= which ones a site depends on.",
            )
        if site.coordinates is not None and site.coordinates.max(initial=-1) >= dim:
            raise InputError(
                f"sites ({site.name!r}) coordinates", str(int(site.coordinates.max())), f"Give indices below {dim}."
            )
        covered[slice(None) if site.coordinates is None else site.coordinates] = True
    if prior is None and not covered.all():
        raise InputError("prior", f"None, with no site that sees coordinate {int(np.argmin(covered))}", "Give a prior.")
    return dim


def problem_dim(sites: Sequence[Member], prior: Quadratic | None) -> int:
    """Number of parameters of the federation."""
    if prior is not None:
        return prior.dim
    whole = [site.dim for site in sites if site.coordinates is None]
    parts = [
        int(site.coordinates.max()) + 1 for site in sites if site.coordinates is not None and site.coordinates.size
    ]
    return max(whole + parts)


def public_potential(
    sites: Sequence[Member],
    prior: Quadratic | None,
    controls: Mapping[str, ControlVariate],
    reference: Reference,
    dynamics: Dynamics,
    mixture: MixturePrior | None = None,
) -> Potential | None:
    """The coordinator's potential, whitened: prior and control variates, less ``½|a|²`` on rotations; None if zero.

    A ``mixture`` takes the place of the prior, which is then its stand-in.
    """
    dim = reference.dim
    if mixture is not None:
        base = public_potential(sites, mixture.normal, controls, reference, dynamics)
        base = Quadratic(jnp.zeros((dim, dim)), jnp.zeros(dim)) if base is None else base
        assert isinstance(base, Quadratic)
        return mixture.whitened(base, reference, dynamics.flow.rotating)
    terms = [] if prior is None else [prior]
    # If the sites' control variates are known only as a sum, its name is that of no site.
    own = {site.name: site.coordinates for site in sites}
    terms += [control.quadratic.embedded(dim, own.get(name)) for name, control in controls.items()]
    # In whitened coordinates, as `Quadratic.whiten` computes it: by NumPy, so that nothing is compiled for it.
    center, scale, parts = np.asarray(reference.center), np.asarray(reference.scale_tril), []
    rows = np.diag(scale) if reference.diagonal else scale
    for precision, linear in ((np.asarray(term.precision), np.asarray(term.linear)) for term in terms):
        parts.append((rows.T @ precision @ rows, rows.T @ (precision @ center + linear)))
    if dynamics.flow.rotating:
        parts.append((-np.eye(dim), np.zeros(dim)))
    if not parts:
        return None
    precision, linear = (functools.reduce(np.add, terms) for terms in zip(*parts, strict=True))
    # Nothing is left only if the terms cancel to rounding; a wide prior is small and counts.
    pairs = zip((precision, linear), zip(*parts, strict=True), strict=True)
    left = any(np.abs(whole).max() > CANCELLED * max(np.abs(part).max() for part in each) for whole, each in pairs)
    return Quadratic(jnp.asarray(precision), jnp.asarray(linear)) if left else None
