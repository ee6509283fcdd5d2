"""Released derivatives with shared noise: a site's part of a sum in which the noise of all sites protects each of them."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from fedpdmc._jax.precision import double_precision
from fedpdmc.errors import InputError
from fedpdmc.members.clipping import fingerprint
from fedpdmc.members.noisy_derivatives import (
    Noisy,
    checked_content,
    prepared,
    release_key,
    release_limit,
    release_spent,
    true_derivatives,
)
from fedpdmc.members.site import Site
from fedpdmc.privacy.accountant import up
from fedpdmc.privacy.gaussian_epsilon_delta import gaussian_limit
from fedpdmc.privacy.ledger_entries import FAULT, Reply, Request
from fedpdmc.privacy.noise_shares import MODULUS, ShareTerms, check_honest, from_sum, noisy_share, share
from fedpdmc.privacy.schedule import ONE_SHOT

logger = logging.getLogger("fedpdmc.site")
# Bytes of a number modulo 2¹²⁸.
WIDTH = 16
Seal = Callable[[Sequence[int]], bytes]


class Group(NamedTuple):
    """The sites whose noise is shared, in one run.

    Attributes
    ----------
    run : str
        Its name, the same at all sites and new for every run: noise must never be used in two sums, because another site's
        part may have changed in between.
    parties : int
        Their number.
    """

    run: str
    parties: int


def share_terms(site: Site, x: np.ndarray, step: int, parties: int) -> ShareTerms:
    """The terms of a release at x, from the (ε, δ) that the study was granted and other public facts.

    Raises
    ------
    BudgetSpent
        All steps were made.
    """
    budget = site.budget
    if budget is None or budget.colluding is None:
        raise InputError("sites", f"site {site.name!r} without shared noise", "Give it a Budget(colluding=...).")
    check_honest("Budget(colluding)", parties, budget.colluding)
    if site.coordinates is not None:
        raise InputError(
            "Site(coordinates)",
            f"{site.name!r} with shared noise",
            "All sites of a sum need the same parameters: omit coordinates, or Budget(colluding=...).",
        )
    if step >= len(ONE_SHOT.steps):
        raise release_spent(site)
    sigmas = prepared(site, x, ONE_SHOT).noise(ONE_SHOT, 2.0, _squared_mu(site, step))
    first, second = (share(sigma, parties, budget.colluding) for sigma in sigmas)
    return ShareTerms(parties, budget.colluding, step, first, second)


def _squared_mu(site: Site, step: int) -> float:
    """``μ² = Δ²/σ²`` of a step, its cost at order 2."""
    budget = site.budget
    assert budget is not None
    epsilon, delta = budget.granted or (budget.epsilon, budget.delta)
    total = (budget.release or ONE_SHOT.usual) * gaussian_limit(2.0, epsilon, delta)
    return total * ONE_SHOT.steps[step] / sum(ONE_SHOT.steps)


@double_precision
def shared_derivatives(site: Site, x: np.ndarray, group: Group, terms: ShareTerms, seal: Seal) -> bytes:
    """The site's part of the sum of all gradients and Hessians at x, charged before it returns.

    The charge is that of the full noise, to which the shares of the honest sites add up. Noise is new in every run.

    Parameters
    ----------
    site : Site
        With ``Budget(colluding=...)``.
    x : array of shape (d,)
    group : Group
    terms : ShareTerms
        The result of `share_terms`.
    seal : callable
        Encodes the integers, under masks if they leave the process.
    """
    ready, budget = prepared(site, x, ONE_SHOT), site.budget
    assert budget is not None
    own, dataset, study = ready.point, budget.account_name, budget.study
    ledger, account = budget.open(releases_only=True)
    limit = release_limit(site, not budget.release)
    cost = up(account.alpha / 2 * _squared_mu(site, terms.step))
    run = f"{group.run}/{site.name}"
    ledger.begin(dataset, study, run, bytes.fromhex(fingerprint(site.raw)), "{}")
    public = (group.run, terms, ready.model, ready.sensitivity, own.tolist())
    asked = hashlib.sha256(repr((fingerprint(site.potential), *public)).encode()).digest()
    request = Request(dataset, study, run, "release", terms.step, asked)
    # All steps or none: an incomplete answer would be charged without use.
    rest = cost * sum(ONE_SHOT.steps[terms.step :]) / ONE_SHOT.steps[terms.step]
    left = (budget.release or ONE_SHOT.usual) * limit * (1 + 1e-9) - ledger.released(dataset, study, asked)
    if rest > min(left, ledger.remaining(dataset)) and not ledger.answered(request):
        raise release_spent(site)

    def work(key: bytes) -> Reply:
        try:
            gradient, hessian = true_derivatives(site, own)
            numbers = noisy_share(gradient, hessian, terms, release_key(site, key + group.run.encode(), ready))
        except Exception:
            # The failure may depend on the records: it is charged, and reported by its code alone.
            logger.exception("site %r: a release has failed", site.name)
            return Reply(FAULT, 0.0, cost)
        return Reply(seal(numbers), 0.0, cost)

    detail = json.dumps({"noise": "shared", "sites": terms.parties, "colluding": terms.colluding})
    return checked_content(site, ledger.answer(request, cost, work, detail, granted=limit))


def summed_derivatives(sites: Sequence[Site], x: np.ndarray, step: int, question: bytes) -> Noisy:
    """The sum over sites of this process that share their noise, as a coordinator would get it, charged at each.

    ``question`` identifies the run: with other records, ledgers or questions the noise is new.
    """
    terms = {site.name: share_terms(site, x, step, len(sites)) for site in sites}
    first = terms[sites[0].name]
    if other := next((name for name, own in terms.items() if own != first), None):
        raise InputError(
            f"sites ({sites[0].name!r}, {other!r})",
            "noise shares of different sizes",
            "Give all sites that share noise the same epsilon, delta, neighbours, bounds, release and colluding.",
        )
    group = Group(run_name(sites, question), len(sites))
    parts = [shared_derivatives(site, x, group, first, plain_words) for site in sites]
    columns = zip(*(_numbers(part) for part in parts), strict=True)
    gradient, hessian = from_sum([sum(column) for column in columns], first, len(x))
    return Noisy(gradient, hessian, x, *first.total_sd)


def _numbers(words: bytes) -> list[int]:
    """The inverse of `plain_words`."""
    return [int.from_bytes(words[at : at + WIDTH], "little") for at in range(0, len(words), WIDTH)]


def plain_words(numbers: Sequence[int]) -> bytes:
    """Numbers modulo 2¹²⁸ as bytes, without masks: for sites of one process."""
    return b"".join((number % MODULUS).to_bytes(WIDTH, "little") for number in numbers)


def run_name(sites: Sequence[Site], question: bytes) -> str:
    """The name of a run of sites in one process: the same only for the same question, records and ledgers."""
    digest = hashlib.sha256(question)
    for site in sites:
        assert site.budget is not None
        ledger = site.budget.find()
        records = bytes.fromhex(fingerprint(site.potential))
        digest.update(ledger.key(Request(site.budget.account_name, site.budget.study, site.name, "sum", 0, records)))
    return f"sum {digest.hexdigest()[:32]}"
