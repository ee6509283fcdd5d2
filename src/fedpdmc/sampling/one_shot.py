"""A private answer in one shot: noisy derivatives at a noisy mode, and a posterior that allows for the noise."""

from __future__ import annotations

import warnings
from typing import Any

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
from fedpdmc.privacy import noise_aware
from fedpdmc.privacy.budget import Budget
from fedpdmc.privacy.budget_planning import ONE_SHOT, PRIVATE_LAPLACE, Question, exact_samples
from fedpdmc.privacy.gaussian_mechanism import shared_words
from fedpdmc.privacy.noise_aware import Gaussian, NoisyRelease
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
    the releases so far; `noise_aware.draws` uses their weighted mean. It is not exact: the log likelihood is
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
        x = noise_aware.pooled(releases, known)[1]
    released = noise_aware.pooled(releases, known)[0]
    rng = np.random.default_rng(seed)
    drawn = noise_aware.draws(released, known, CHAINS * DRAWS, rng).reshape(CHAINS, DRAWS, dim)
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
