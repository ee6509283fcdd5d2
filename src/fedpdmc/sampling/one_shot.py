"""A private answer in one shot: noisy derivatives at a noisy mode, and a posterior that allows for the noise.

Near a public point x a likelihood of many records is ``exp(−g·δ − ½ δᵀHδ)`` in ``δ = θ − x``, so the gradient g informs
about θ like an observation from ``N(−Hδ, H)`` (the score is centred at the truth, with the information as its variance).
The observations are ``ĝ = g + N(0, Σ)`` and ``Ĥ = H + E`` with Gaussian E, so that

    p(θ, H | ĝ, Ĥ) ∝ p(θ) N(ĝ; −H(θ − x), H + Σ) N(Ĥ; H) 1[H positive definite].

Given H this is Gaussian in θ, with precision ``P_0 + H (H + Σ)⁻¹ H``. Without noise this is the Laplace approximation; as
noise grows, it tends to the prior. H is integrated out by elliptical slice sampling (Murray, Adams and MacKay, 2010).

Releases at several points ``x_k`` are averaged first. If the likelihood is quadratic, ``ĝ_k = −H(θ − x_k) + s + n_k``
with the same score s of the records, so for any weights w_k that sum to one

    Σ w_k ĝ_k = −H(θ − Σ w_k x_k) + s + Σ w_k n_k

is again such a release, at the mean of the points. Otherwise the curvature between x_k and θ differs from that at x_k, and
``ĝ_k`` has an error proportional to ``H(θ − x_k)``. The factor is modelled as Gaussian with standard deviation
`CURVATURE_CHANGE`, and the weights are inversely proportional to the variance of the noise plus that of this error.
With little noise the points near θ dominate; with much noise all points count.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from fedpdmc.dynamics import Boomerang
from fedpdmc.errors import InputError
from fedpdmc.members.bounded_records import model_of
from fedpdmc.members.private_site import (
    Noisy,
    account_report,
    gradient_change,
    noisy_derivatives,
    release_point,
    release_status,
    summed_derivatives,
)
from fedpdmc.members.site import Site
from fedpdmc.models.model_file.records import RecordModel
from fedpdmc.models.user_function import coordinate_names, variables
from fedpdmc.potentials import Quadratic
from fedpdmc.privacy.budget import Budget
from fedpdmc.privacy.budget_planning import ONE_SHOT, PRIVATE_LAPLACE, Question, exact_samples
from fedpdmc.privacy.gaussian_mechanism import shared_words
from fedpdmc.privacy.sensitivity import ModelFacts, sensitivity
from fedpdmc.results.path_store import DrawStore
from fedpdmc.results.posterior import Posterior
from fedpdmc.results.skeleton import Moments
from fedpdmc.sampling.arguments import check_names, resolve_members
from fedpdmc.sampling.laplace_reference import own_index, prior_mean
from fedpdmc.sampling.run_state_arrays import versions
from fedpdmc.whitening import Reference

CHAINS = 4
DRAWS = 2500  # of each chain
LITTLE_LEARNT = 0.8  # a posterior standard deviation over the prior's, above which records have contributed little


def private_laplace(sites: Any, prior: Any, names: Any, seed: int | None) -> Posterior:
    """The posterior of θ given the derivatives that private sites release with noise, all of it charged.

    Each of four rounds asks every site for a noisy gradient and Hessian at one public point, the mean of the posterior given
    the releases so far; `posterior_draws` uses their weighted mean. It is not exact: the log likelihood is
    taken as quadratic over the width of the posterior, which for many records it nearly is. Sites without a budget take
    part without noise.

    Parameters
    ----------
    sites : sequence of Site or RemoteSite
        In this process, or those of a study whose contract has this method.
    prior : Quadratic
        Gaussian.
    names : sequence of str, optional
    seed : int, optional
        Of the draws; the noise is the sites' own.
    """
    members, prior, dim = resolve_members(sites, prior, None, names)
    known = _check(members, prior)
    x, releases, traffic = known.mean, [], np.zeros((2, len(members)), np.int64)
    sharing = [site for site in members if isinstance(site, Site) and site.shares_noise]
    question = known.mean.tobytes() + known.precision.tobytes()
    for step in range(len(ONE_SHOT.steps)):
        # A point that every site's declared region allows.
        x = x.copy()
        for site in members:
            index = own_index(site, dim)
            bounds = site.bounds if site.budget is None else site.budget.bounds
            if bounds is not None:
                x[index] = release_point(x[index], bounds)
        # The sum first: what all sites must agree on is checked before anything is charged.
        shared = summed_derivatives(sharing, x, step, question) if sharing else None
        releases.append(_ask(members, x, step, traffic, shared))
        x = pooled(releases, known)[1]
    released = pooled(releases, known)[0]
    rng = np.random.default_rng(seed)
    drawn = posterior_draws(released, known, CHAINS * DRAWS, rng).reshape(CHAINS, DRAWS, dim)
    cov = np.cov(drawn.reshape(-1, dim).T).reshape(dim, dim)
    ratio = float(np.sqrt(np.max(np.diag(cov) / np.diag(np.linalg.inv(known.precision)))))
    if ratio > LITTLE_LEARNT:
        warnings.warn(
            f"The noise that the privacy budgets ask for leaves little of the records: a parameter's standard deviation is "
            f"{ratio:.2f} of the prior's. It takes more records, or a larger epsilon (see `fedpdmc privacy plan`).",
            stacklevel=3,
        )
    settings = _settings(members, cov, seed)
    own = coordinate_names(members, dim)
    labels = check_names(own if names is None else names, dim, own)
    return _posterior(members, drawn, labels, settings, traffic)


def _check(members: tuple[Any, ...], prior: Any) -> Gaussian:
    """Refuse what cannot be answered in this way, before anything is charged; returns the prior as numbers."""
    for site in members:
        if not isinstance(site, Site):
            # Of a study whose contract was checked.
            continue
        if site.model is not None and not isinstance(site.model, RecordModel):
            raise InputError(
                f"sites ({site.name!r})",
                f"a function with method={PRIVATE_LAPLACE!r}",
                "Noisy derivatives need a model of records from fedpdmc.models, or a model file.",
            )
        if site.budget is not None:
            gradient_change(site)
    if not isinstance(prior, Quadratic):
        raise InputError(
            "prior",
            f"{'a flat prior' if prior is None else type(prior).__name__} with method={PRIVATE_LAPLACE!r}",
            "Give a proper Gaussian one, fedpdmc.models.normal_prior(dim, scale=...): noise can leave a direction unknown.",
        )
    return Gaussian(np.asarray(prior_mean(prior)), np.asarray(prior.precision))


def _ask(members: tuple[Any, ...], x: np.ndarray, step: int, traffic: np.ndarray, shared: Noisy | None) -> NoisyRelease:
    """One round: the sums of what the sites release, and the variances of their noise.

    ``shared`` is the sum over the sites that share their noise.
    """
    dim = len(x)
    gradient, hessian = np.zeros(dim), np.zeros((dim, dim))
    first, second = np.zeros(dim), np.zeros((dim, dim))

    def add(noisy: Noisy, index: np.ndarray) -> None:
        block = np.ix_(index, index)
        gradient[index] += noisy.gradient
        hessian[block] += noisy.hessian
        first[index] += noisy.gradient_sd**2
        second[block] += noisy.hessian_sd**2 * (1 + np.eye(len(index))) / 2

    if shared is not None:
        add(shared, np.arange(dim))
    for number, site in enumerate(members):
        index = own_index(site, dim)
        size = len(index)
        traffic[:, number] += 2, 8 * (2 * size + size**2 + 2)
        if isinstance(site, Site) and site.shares_noise:
            continue
        if not site.noisy:
            _, g, h = site.derivatives(x)
            add(Noisy(g, h, x[index], 0.0, 0.0), index)
        elif isinstance(site, Site):
            add(noisy_derivatives(site, x, step, ONE_SHOT), index)
        else:
            add(site.released(x), index)
    return NoisyRelease(x, gradient, hessian, np.sqrt(first), np.sqrt(second))


def _settings(members: tuple[Any, ...], cov: np.ndarray, seed: int | None) -> dict[str, Any]:
    scale = np.linalg.cholesky(cov)
    known = [site for site in members if isinstance(site, Site) and site.budget is not None]
    what = (
        "NOT exact: the log likelihood is taken as quadratic about a public point, and the noise of the released "
        "derivatives is integrated over."
    )
    # What an exact chain would cost is worked out for built-in models.
    if known and all(site.model is None for site in known):
        rows = [scale[own_index(site, len(cov))] for site in known]
        pairs = zip(known, rows, strict=True)
        what += exact_words(min(exact_cost(model_of(s.potential), s.budget, r, len(members)) for s, r in pairs))
    if sharing := [site for site in known if site.shares_noise]:
        assert sharing[0].budget is not None
        what += f" {shared_words(len(sharing), sharing[0].budget.colluding or 0)}"
    return {
        "method": PRIVATE_LAPLACE,
        "exact": False,
        "chosen": what,
        "dynamics": "one shot",
        "reference": "none",
        "control": "none",
        "prior_at": "coordinator",
        "chains": CHAINS,
        "ended_by_arrival": 0.0,
        "burn_in": 0.0,
        "duration": float(DRAWS),
        "seed": seed,
        "sites": [site.name for site in members],
        "versions": versions(),
    }


def exact_cost(model: ModelFacts, budget: Any, rows: np.ndarray, sites: int) -> float:
    """Effective samples of the exact chain that a site's budget would buy, in the coordinates of a posterior.

    ``rows`` are those of the posterior's scale matrix for the parameters that the site's records depend on.
    """
    known = sensitivity(model, budget.bounds, budget.neighbours, rows)
    granted = budget.granted or (budget.epsilon, budget.delta)
    return exact_samples(Question(0, sites, rows.shape[1], granted[0], granted[1], known.k_2, 1.0))


def exact_words(samples: float) -> str:
    """The cost of an exact answer, as a sentence."""
    return (
        f" The same budgets would buy about {samples:.2g} effective samples of the exact posterior "
        "(dynamics=fedpdmc.FactorisedBoomerang())."
    )


def _posterior(
    members: tuple[Any, ...], drawn: np.ndarray, names: list[str], settings: dict[str, Any], traffic: np.ndarray
) -> Posterior:
    """Independent draws, stored as those of a run are."""
    dim, accounts = drawn.shape[-1], {}
    pivot, flat = drawn[0, 0], drawn.reshape(-1, dim)
    off = flat - pivot
    dynamics = Boomerang()
    moments = Moments(float(len(flat)), off.sum(0), off.T @ off, pivot)
    store = DrawStore(dynamics.flow, moments, drawn, 0.0, float(DRAWS), 1.0)
    for site in members:
        if isinstance(site, Site) and isinstance(budget := site.budget, Budget):
            where = {"dataset": budget.account_name, "study": budget.study}
            accounts[site.name] = account_report(release_status(site), budget, dynamics) | where
    counts = {
        "rounds": len(ONE_SHOT.steps),
        "messages": traffic[0],
        "bytes": traffic[1],
        "events": np.zeros(CHAINS, np.int64),
        "gradient_evaluations": np.zeros(len(members), np.int64),
        "certified": False,
        "privacy": accounts,
    }
    reference = Reference(jnp.zeros(dim), jnp.ones(dim))
    return Posterior(store, reference, dynamics, names, counts, settings, variables=variables(members, names))


# The posterior given noisy derivatives ------------------------------------------------------------------------------------

# Parallel draws of the Hessian, and sweeps of the slice sampler for each.
HESSIANS, SWEEPS = 256, 25
# A slice shrinks geometrically: after this many steps it is the current point, up to rounding.
MOST_SHRINKS = 60
# Standard deviation of the relative change of the curvature between the point of a release and the parameters.
CURVATURE_CHANGE = 0.2
# Fixed-point iterations between the weights of releases and the mean that they depend on.
TURNS = 2
# Smallest eigenvalue of a start, as a share of the noise.
LEAST_EIGENVALUE = 1e-2


class NoisyRelease(NamedTuple):
    """Noisy derivatives of the log likelihood of all sites together, at one point."""

    x: np.ndarray  # (d,)
    gradient: np.ndarray  # (d,)
    hessian: np.ndarray  # (d, d)
    gradient_sd: np.ndarray  # (d,): standard deviations of the noise, by coordinate
    hessian_sd: np.ndarray  # (d, d): the same by entry; entries (i, j) and (j, i) have the same noise


class Gaussian(NamedTuple):
    """A Gaussian prior."""

    mean: np.ndarray
    precision: np.ndarray


def given_hessian(release: NoisyRelease, hessian: np.ndarray, prior: Gaussian) -> tuple[np.ndarray, np.ndarray]:
    """Mean and covariance of θ given H, for any number of H along leading axes.

    ``−½ (ĝ + Hδ)ᵀ V⁻¹ (ĝ + Hδ)`` with ``V = H + Σ`` has precision ``H V⁻¹ H`` and linear term ``−H V⁻¹ ĝ``.
    """
    spread = hessian + np.diag(release.gradient_sd**2)
    weighted = np.linalg.solve(spread, hessian)
    precision = prior.precision + np.swapaxes(weighted, -1, -2) @ hessian
    precision = (precision + np.swapaxes(precision, -1, -2)) / 2
    linear = prior.precision @ (prior.mean - release.x) - np.swapaxes(weighted, -1, -2) @ release.gradient
    covariance = np.linalg.inv(precision)
    return release.x + (covariance @ linear[..., None])[..., 0], covariance


def pooled(releases: Sequence[NoisyRelease], prior: Gaussian) -> tuple[NoisyRelease, np.ndarray]:
    """The weighted mean of releases, and the mean of θ given it.

    The first of several is left out: it was made at the prior's mean, which does not depend on the records.
    """
    last, used = releases[-1], releases[1:] or releases
    curvature = believable(last.hessian, last.hessian_sd)
    one, mean = last, given_hessian(last, curvature, prior)[0]
    for _ in range(TURNS):
        one = _weighted(used, curvature, mean)
        mean = given_hessian(one, believable(one.hessian, one.hessian_sd), prior)[0]
    return one, mean


def _weighted(releases: Sequence[NoisyRelease], curvature: np.ndarray, mean: np.ndarray) -> NoisyRelease:
    """The weighted mean of releases; weights are inverse to the total variance of noise and change of curvature."""
    noise = np.array([np.mean(one.gradient_sd**2) for one in releases])
    change = np.array([CURVATURE_CHANGE**2 * np.mean((curvature @ (mean - one.x)) ** 2) for one in releases])
    weights = 1 / np.maximum(noise + change, 1e-300)
    weights /= weights.sum()
    x, gradient, hessian, first, second = (np.stack(parts) for parts in zip(*releases, strict=True))
    return NoisyRelease(
        weights @ x,
        weights @ gradient,
        np.tensordot(weights, hessian, 1),
        np.sqrt(weights**2 @ (first**2 + change[:, None])),
        np.sqrt(np.tensordot(weights**2, second**2, 1)),
    )


def believable(hessian: np.ndarray, sd: np.ndarray) -> np.ndarray:
    """The nearest positive definite matrix: eigenvalues of at least a small share of the noise."""
    values, vectors = np.linalg.eigh((hessian + hessian.T) / 2)
    least = max(LEAST_EIGENVALUE * float(np.max(sd)), 1e-12 * float(np.abs(values).max()), 1e-300)
    return (vectors * np.maximum(values, least)) @ vectors.T


def posterior_draws(release: NoisyRelease, prior: Gaussian, n: int, rng: np.random.Generator) -> np.ndarray:
    """``n`` draws of θ, of shape (n, d), with the noise of gradient and Hessian integrated out."""
    hessians = _hessians(release, prior, rng)
    means, covariances = given_hessian(release, hessians, prior)
    factors = np.linalg.cholesky((covariances + np.swapaxes(covariances, -1, -2)) / 2)
    which = rng.permutation(np.arange(n) % len(means))
    return means[which] + np.einsum("nij,nj->ni", factors[which], rng.standard_normal((n, means.shape[1])))


def _hessians(release: NoisyRelease, prior: Gaussian, rng: np.random.Generator) -> np.ndarray:
    """Draws of H from its posterior by slice sampling: the error E has a Gaussian prior, the rest is the likelihood."""
    center, sd, prior_cov = release.hessian, release.hessian_sd, np.linalg.inv(prior.precision)
    start = believable(center, sd)
    if not np.any(sd > 0):
        return start[None]

    def log_density(error: np.ndarray) -> np.ndarray:
        hessian = center + error
        inside = np.linalg.eigvalsh(hessian)[:, 0] > 0
        hessian = np.where(inside[:, None, None], hessian, start)
        return np.where(inside, _evidence(release, hessian, prior.mean, prior_cov), -np.inf)

    error = np.broadcast_to(start - center, (HESSIANS, *start.shape))
    now = log_density(error)
    for _ in range(SWEEPS):
        upper = np.triu(rng.standard_normal(error.shape) * sd)
        error, now = _slice(error, now, log_density, upper + np.swapaxes(np.triu(upper, 1), -1, -2), rng)
    return center + error


def _evidence(release: NoisyRelease, hessian: np.ndarray, mean: np.ndarray, cov: np.ndarray) -> np.ndarray:
    """``log N(ĝ; −H(μ_0 − x), H + Σ + H C_0 H)`` for each H: θ is integrated out."""
    spread = hessian + np.diag(release.gradient_sd**2) + hessian @ cov @ hessian
    off = release.gradient + hessian @ (mean - release.x)
    return -0.5 * (np.linalg.slogdet(spread)[1] + np.sum(off * np.linalg.solve(spread, off[..., None])[..., 0], -1))


def _slice(error, now, log_density, other, rng: np.random.Generator):
    """One elliptical slice update of every matrix: a point on the ellipse through it and a new draw, by shrinking."""
    level = now + np.log(rng.random(len(now)))
    angle = rng.random(len(now)) * 2 * np.pi
    low, high = angle - 2 * np.pi, angle.copy()
    error, now, open_ = error.copy(), now.copy(), np.arange(len(now))
    for _ in range(MOST_SHRINKS):
        turn = angle[open_][:, None, None]
        proposal = error[open_] * np.cos(turn) + other[open_] * np.sin(turn)
        found = log_density(proposal)
        taken = found > level[open_]
        error[open_[taken]], now[open_[taken]] = proposal[taken], found[taken]
        open_ = open_[~taken]
        if not len(open_):
            break
        below = angle[open_] < 0
        low[open_] = np.where(below, angle[open_], low[open_])
        high[open_] = np.where(below, high[open_], angle[open_])
        angle[open_] = low[open_] + rng.random(len(open_)) * (high[open_] - low[open_])
    return error, now
