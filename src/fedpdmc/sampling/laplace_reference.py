"""The federated mode, the Laplace reference and the sites' control variates; and the reference of private sites."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from fedpdmc._jax.precision import double_precision
from fedpdmc.console.progress import report
from fedpdmc.enclosures import not_finite_at
from fedpdmc.errors import GUARD, FedPDMCError, ImproperPosterior, InputError, NotFinite
from fedpdmc.members.private_site import noisy_derivatives, release_point
from fedpdmc.members.site import Member, Site, own_part
from fedpdmc.models.user_function import coordinate_names
from fedpdmc.potentials import ControlVariate, Quadratic
from fedpdmc.privacy.budget_planning import REFERENCE
from fedpdmc.sampling.arguments import PRIOR_SITE, resolve_members
from fedpdmc.sampling.mode_search import (
    IMPROPER,
    LEVELLED,
    Mode,
    Point,
    check_signs,
    find_mode,
    flattest,
    label_of,
    positive_definite,
    root_of_inverse,
    singular,
)
from fedpdmc.whitening import LAPLACE, VB, Bend, Reference

LEAST_RISE = 0.05  # of the potential one standard deviation from a mode, under a flat prior (½ for a Gaussian)


def laplace(
    sites: Sequence[Member],
    prior: Any = None,
    *,
    tolerance: float = 1e-3,
    start: Any = None,
    reach: np.ndarray | None = None,
    names: Sequence[str] | None = None,
) -> Reference:
    """Laplace reference at the federated mode, by damped Newton on summed gradients and Hessians.

    One round asks every site for ``U_m, ∇U_m, ∇²U_m`` at one point. With ``x*`` the last point and ``P`` the summed
    Hessian there, made positive definite, the reference has ``c = x* − P⁻¹∇U(x*)``, the stationary point of the summed
    quadratics, and ``S Sᵀ = P⁻¹``: it need not be exact for the sampler to be. Sites with a privacy budget release
    noisy derivatives in a few steps fixed beforehand, charged to the share of the budget that they grant.

    Parameters
    ----------
    sites : sequence of Site
    prior : Quadratic or callable, optional
    tolerance : float
        Stop when the next step is shorter than this many posterior standard deviations.
    start : array of shape (d,), optional
        Where the search begins. If None: the guess of linear models with an unknown scale, else the prior's mean, or zero.
    reach : array of shape (d,), optional
        The largest covariates, if the first steps should change predictors by little.
    names : sequence of str, optional
        The parameters' names, for errors. If None: those that the models have.

    Raises
    ------
    ImproperPosterior, NoMode, ModeNotFound
        If no mode was found, by its cause.
    InputError
        For a function that seems to be a log likelihood instead of minus one.
    """
    return search_laplace(sites, prior, tolerance, start, reach, names)[0]


@double_precision
def search_laplace(
    sites: Sequence[Member],
    prior: Any,
    tolerance: float,
    start: Any,
    reach: np.ndarray | None,
    names: Sequence[str] | None,
) -> tuple[Reference, np.ndarray, None]:
    """`laplace`, and the point of its derivatives, which are not averaged."""
    search = begin_search(sites, prior, start, names)
    if any(site.noisy for site in search.sites):
        return noisy_laplace(search.sites, search.prior, search.start), search.start, None
    here, step, rounds = search.mode(tolerance, reach)
    scale = root_of_inverse(positive_definite(here.hessian))
    return search.reference(here, here.x + step, scale, rounds, LAPLACE), here.x, None


def own_index(site: Any, dim: int) -> np.ndarray:
    """The parameters that a site's records depend on."""
    return np.arange(dim) if site.coordinates is None else site.coordinates


def add_part(gradient: np.ndarray, hessian: np.ndarray, site: Any, g: np.ndarray, h: np.ndarray) -> None:
    """Add a site's derivatives to sums over sites, in place."""
    index = own_index(site, len(gradient))
    gradient[index] += g
    hessian[np.ix_(index, index)] += h


class Search(NamedTuple):
    """A search for a reference: whom it asks, where it begins, and the bytes that it has exchanged with each site."""

    sites: tuple[Member, ...]
    prior: Quadratic | None
    start: np.ndarray
    names: Sequence[str] | None
    traffic: dict[str, int]

    def bent(self, bend: Bend | None) -> Search:
        """The same search in coordinates in which log spreads are bent."""
        return self._replace(sites=tuple(site.bent(bend) for site in self.sites))

    def ask(self, x: np.ndarray, spread: np.ndarray | None = None) -> Point:
        """One round: derivatives at a point, or their means over ``N(x, S Sᵀ)`` with ``S = spread``."""
        value, gradient, hessian, parts = 0.0, np.zeros(len(x)), np.zeros((len(x), len(x))), []
        for number, site in enumerate(self.sites, 1):
            doing = "finding the mode" if spread is None else "averaging over the reference"
            report(doing, number, len(self.sites))
            u, g, h = site.derivatives(x, spread)
            with np.errstate(invalid="ignore"):
                value += u
                add_part(gradient, hessian, site, g, h)
            parts.append((g, h))
            self.traffic[site.name] += 8 * (2 * g.size + (0 if spread is None else spread.size) + 1 + h.size)
        if self.prior is not None:
            precision, linear = np.asarray(self.prior.precision), np.asarray(self.prior.linear)
            value += 0.5 * x @ precision @ x + linear @ x
            value += 0.0 if spread is None else 0.5 * np.sum(spread * (precision @ spread))
            gradient = gradient + precision @ x + linear
            hessian = hessian + precision
        return Point(x, float(value), gradient, hessian, parts, spread)

    @property
    def flat(self) -> bool:
        """Whether there is no prior."""
        return self.prior is None and all(site.name != PRIOR_SITE for site in self.sites)

    def mode(self, tolerance: float, reach: np.ndarray | None) -> Mode:
        """The mode up to ``tolerance`` standard deviations, from derivatives that are checked on the way."""
        first = self.ask(self.start)
        if not (np.isfinite(first.value) and np.all(np.isfinite(first.hessian))):
            what = "second derivative" if np.isfinite(first.value) else "value"
            remedy = "Check offsets and covariates for values that overflow, or centre the prior where it is finite."
            for site in self.sites:
                own = self.start if site.coordinates is None else self.start[site.coordinates]
                if isinstance(site, Site) and site.model and (where := not_finite_at(site.bare_potential.value, own)):
                    what, remedy = f"{what} at site {site.name!r} ({where})", GUARD
                    break
            found = f"the {what} of the likelihood is not finite at the starting point {self.start[:4]}"
            raise NotFinite("laplace", 0, f"laplace: {found} (the prior's mean, or zero). {remedy}")
        try:
            here, step, rounds = find_mode(self.ask, first, tolerance, self.flat, reach, self.names)
        except FedPDMCError:
            check_signs(self.sites, first, None)
            raise
        check_signs(self.sites, first, here)
        if self.flat:
            rounds += _check_proper(self.ask, here, step, first.hessian, self.names)
        return Mode(here, step, rounds)

    def reference(
        self, at: Point, center: np.ndarray, scale: np.ndarray, rounds: int, name: str, why: str = "", kept: float = 1.0,
        wide: np.ndarray | None = None,
    ) -> Reference:  # fmt: skip
        """The reference with the control variates that the derivatives at a point make, ``kept`` of their curvature.

        ``wide`` has columns w: each site takes its share of ``w wᵀ``, about the centre, off its curvature: in proportion to
        its own in this process, and equal shares over a network, where sites check theirs.
        """
        control, wide = {}, np.zeros((len(center), 0)) if wide is None else wide
        for site, (g, h), share in zip(self.sites, at.parts, self._shares(at, wide), strict=True):
            x, spread = own_part(at.x, at.spread, site.coordinates)
            own, linear = kept * h, g - kept * (h @ x)
            if wide.size:
                less = (wide * share) @ wide.T
                own, linear = own - less, linear + less @ center
            quadratic = Quadratic(jnp.asarray(own), jnp.asarray(linear))
            about = None if spread is None else jnp.asarray(spread)
            slope = jnp.asarray(g) if wide.size else None
            control[site.name] = ControlVariate(quadratic, jnp.asarray(x), 2, about, kept, slope)
        return Reference(
            jnp.asarray(center), jnp.asarray(scale), control, rounds, self.traffic, name, why,
            wide=wide if wide.size else None,
        )  # fmt: skip

    def _shares(self, at: Point, wide: np.ndarray) -> np.ndarray:
        """Shares (sites, k) of each site in the curvature of k directions, which add up to one.

        Over a network they are equal. A prior that is walked with as a site has none.
        """
        remote = np.array([site.federation is not None for site in self.sites])
        among = remote if remote.any() else np.array([site.name != PRIOR_SITE for site in self.sites])
        equal = np.repeat((among / among.sum())[:, None], wide.shape[1], 1)
        if not wide.size or remote.any():
            return equal
        ways = np.linalg.solve(positive_definite(at.hessian), wide)
        own = np.array([np.maximum(np.sum(ways * (h @ ways), 0), 0.0) for _, h in at.parts]) * among[:, None]
        total = own.sum(0)
        return np.where(total > 0, own / np.where(total > 0, total, 1.0), equal)


def begin_search(sites: Sequence[Member], prior: Any, start: Any, names: Sequence[str] | None) -> Search:
    """Checked sites and prior, and where the search begins."""
    members, prior, dim = resolve_members(sites, prior, start, names)
    if start is None:
        # The mean of what sites guess, weighted by their records, else the prior's mean or zero.
        total, weight = np.zeros(dim), np.zeros(dim)
        for site in members:
            local = isinstance(site, Site)
            guess = getattr(site.potential if isinstance(site, Site) else site, "guess", None)
            if guess is not None and not (local and site.noisy):
                index, records = own_index(site, dim), float(site.records) if local else 1.0
                total[index] += records * guess
                weight[index] += records
        x = np.zeros(dim) if prior is None else prior_mean(prior)
        x = np.where(weight > 0, total / np.maximum(weight, 1e-300), x)
    else:
        x = np.asarray(start, float)
    names = coordinate_names(members, dim) if names is None else names
    if names is not None and len(names) != dim:
        raise InputError("names", f"{len(names)} names", f"Give one for each of {dim} parameters.")
    return Search(members, prior, x, names, {site.name: 0 for site in members})


def _check_proper(ask, here: Point, step: np.ndarray, first: np.ndarray, names: Sequence[str] | None) -> int:
    """Under a flat prior: refuse a posterior that is flat in some direction; returns the rounds this took.

    A potential that only levels off, as with separable data, seems to have a mode once its slope is small. Then its
    curvature has fallen far below where it started, and one standard deviation further out it has hardly risen. Data may be
    separable by several covariates together: the directions are eigenvectors of the Hessian relative to the first one, and
    the way that the search would have gone on.
    """
    if singular(here.hessian):
        raise ImproperPosterior(
            f"laplace: the likelihood is flat in {label_of(flattest(here.hessian), names)}{IMPROPER}"
        )
    root = root_of_inverse(positive_definite(first))
    curvature, vectors = np.linalg.eigh(root.T @ here.hessian @ root)
    lost = (root @ vectors)[:, curvature < LEVELLED].T
    ways = [step] * (len(lost) > 0 and bool(np.any(step))) + [sign * way for way in lost for sign in (-1.0, 1.0)]
    for way in ways:
        rise = ask(here.x + way / np.sqrt(way @ here.hessian @ way)).value - here.value
        if not rise > LEAST_RISE:
            mostly = label_of(way * np.sqrt(np.abs(np.diag(first))), names)
            raise ImproperPosterior(f"laplace: the likelihood levels off, mostly in {mostly}{IMPROPER}")
    return len(ways)


def linear_control(reference: Reference) -> dict[str, ControlVariate]:
    """The first-order part of a reference's control variates: ``∇U_m(x*)·x`` alone, or its mean about ``x*``."""
    control = {}
    for name, own in (reference.control or {}).items():
        flat = Quadratic(jnp.zeros_like(own.quadratic.precision), own.gradient)
        control[name] = ControlVariate(flat, own.point, 1, own.spread)
    return control


def prior_mean(prior: Quadratic) -> np.ndarray:
    """``−P⁻¹ h``; zero along directions that another part of the prior holds."""
    precision, linear = np.asarray(prior.precision), np.asarray(prior.linear)
    try:
        return -np.linalg.solve(precision, linear)
    except np.linalg.LinAlgError:
        return -np.linalg.lstsq(precision, linear, rcond=None)[0]


NOTHING_LEARNED = 0.99  # part of the prior's variance above which a site knows nothing about a parameter


@double_precision
def each_site(
    members: Sequence[Member], prior: Any, names: Sequence[str]
) -> dict[str, tuple[np.ndarray, np.ndarray] | None]:
    """Mean and covariance of the Laplace approximation by each site's own records and the prior; None if it has no mode.

    The mean is NaN for parameters whose variance is that of the prior: the site's records say nothing about them.
    """
    known = isinstance(prior, Quadratic) and np.linalg.matrix_rank(np.asarray(prior.precision)) == len(names)
    before = np.diag(np.linalg.inv(np.asarray(prior.precision))) if known else np.full(len(names), np.inf)
    walked = [member for member in members if member.name == PRIOR_SITE]
    found: dict[str, tuple[np.ndarray, np.ndarray] | None] = {}
    for member in (member for member in members if member.name != PRIOR_SITE):
        if member.noisy or member.latents or member.coordinates is not None:
            reasons = {"a privacy budget": member.noisy, "effects of groups": bool(member.latents)}
            why = next((words for words, true in reasons.items() if true), "some coordinates only")
            raise InputError(
                "by", f"'site' with {why} at {member.name!r}", "A site's own estimate needs all parameters."
            )
        try:
            made = laplace([member, *walked], prior, names=names)
            covariance = np.asarray(made.scale_tril @ made.scale_tril.T)
            silent = np.diag(covariance) > NOTHING_LEARNED * before
            found[member.name] = np.where(silent, np.nan, np.asarray(made.center)), covariance
        except FedPDMCError:
            found[member.name] = None
    return found


LEAST_CURVATURE = 1e-3  # least eigenvalue of the summed noisy Hessian over the largest, under a flat prior
REACH = 3.0  # prior standard deviations, times the root of the dimension, within which a noisy mode is searched for


def noisy_laplace(sites: tuple[Any, ...], prior: Quadratic | None, x: np.ndarray, averaged: bool = False) -> Reference:
    """The Laplace reference by a few Newton steps on noisy sums; all of it comes from charged releases.

    With ``averaged``, the last step uses averages over the reference found by the others.
    """
    traffic, start, last = {site.name: 0 for site in sites}, x, len(REFERENCE.steps) - 1
    spread, precision = None, np.zeros((0, 0))
    for step in range(len(REFERENCE.steps)):
        if averaged and step == last:
            spread = root_of_covariance(precision)
        hessian, gradient = np.zeros((len(x), len(x))), np.zeros(len(x))
        parts = {}
        for site in sites:
            if site.budget is not None:
                g, h, point, *_ = noisy_derivatives(site, x, step, spread=spread)
            else:
                (_, g, h), point = site.derivatives(x, spread), x[own_index(site, len(x))]
                # A remote site evaluates noisy derivatives within the region that the contract declares.
                point = release_point(point, site.bounds) if site.noisy else point
            add_part(gradient, hessian, site, g, h)
            about = own_part(x, spread, site.coordinates)[1]
            parts[site.name] = (g, h, point, None if about is None else jnp.asarray(about))
            traffic[site.name] += 8 * (2 * g.size + h.size + (0 if spread is None else spread.size))
        # Noise can make the Hessian indefinite: its positive part, and the prior's precision.
        values, vectors = np.linalg.eigh((hessian + hessian.T) / 2)
        floor = 0.0 if prior is not None else LEAST_CURVATURE * max(float(values.max()), 1e-300)
        precision = (vectors * np.maximum(values, floor)) @ vectors.T
        if prior is not None:
            own, linear = np.asarray(prior.precision), np.asarray(prior.linear)
            precision, gradient = precision + own, gradient + own @ x + linear
        x = x - np.linalg.solve(precision, gradient)
        if prior is not None:
            # A step due to noise cannot lead far away.
            off = x - start
            length = float(np.sqrt(off @ own @ off))
            x = start + off * min(1.0, REACH * np.sqrt(len(x)) / max(length, 1e-300))
    control = {
        name: ControlVariate(Quadratic(jnp.asarray(h), jnp.asarray(g - h @ point)), jnp.asarray(point), 2, about)
        for name, (g, h, point, about) in parts.items()
    }
    name, why = (VB, "its last step is an average") if averaged else (LAPLACE, "")
    return Reference(
        jnp.asarray(x), jnp.asarray(root_of_covariance(precision)), control, len(REFERENCE.steps), traffic, name, why
    )


def root_of_covariance(precision: np.ndarray) -> np.ndarray:
    """Lower triangular S with ``S Sᵀ = P⁻¹``."""
    covariance = np.linalg.inv(precision)
    return np.linalg.cholesky((covariance + covariance.T) / 2)
