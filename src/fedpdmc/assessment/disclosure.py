"""Disclosure control of assessments.

The attacker is a coordinator that sends a made-up posterior: draws far out, where the likelihood is that of one
record. Everything that an assessment releases depends on the changes ``ℓ_i(s) − mean_s ℓ_i`` of the log likelihoods from
draw to draw, and of sums over records. So at every draw the changes, and for every parameter the covariances with it, must
be carried by a number of effective records, ``(Σ w)²/Σ w²``; the same holds for sums of left-out densities. Sums that
outliers dominate in honest posteriors too (squares, the effective number of parameters) have a limit on one record's share.
"""

from __future__ import annotations

from typing import NoReturn

import numpy as np

from fedpdmc.assessment.loo import Pointwise
from fedpdmc.errors import InputError
from fedpdmc.study.record_shares import effective_number, largest_leverage, share_of_leverage

# The largest share of one record, as in a policy.
LARGEST_SHARE = 0.75


class ReleaseControl:
    """Collects what single records contribute to an assessment, and refuses what few of them carry.

    Parameters
    ----------
    site : str
        For errors.
    draws : array of shape (S, d)
        Of the parameters.
    least_records : int
        The least effective number.
    """

    def __init__(self, site: str, draws: np.ndarray, least_records: int):
        self._site, self._least = site, least_records
        self._centred = draws - draws.mean(0)
        self._sum, self._squares = np.zeros(len(draws)), np.zeros(len(draws))
        self._pulls: list[np.ndarray] = []

    def add(self, log_density: np.ndarray) -> None:
        """The log densities of some records at each draw, of shape (n, S)."""
        with np.errstate(invalid="ignore", over="ignore"):
            change = log_density - log_density.mean(1, keepdims=True)
            self._sum += np.abs(change).sum(0)
            self._squares += np.sum(change**2, 0)
            self._pulls.append(change @ self._centred / len(self._centred))

    def check(self, loo: Pointwise | None) -> None:
        """Refuse a release that too few records carry.

        Parameters
        ----------
        loo : Pointwise or None
            Of all records, if sums of it are released.

        Raises
        ------
        InputError
        """
        with np.errstate(invalid="ignore", divide="ignore"):
            least = np.min(np.where(self._squares == 0, np.inf, self._sum**2 / self._squares))
        self._number("the change of the likelihood from draw to draw", least)
        pulls = np.concatenate(self._pulls)
        self._number("the covariance with a parameter", np.min(effective_number(np.abs(pulls))))
        if np.isfinite(pulls).all():
            self._share("covariances with the parameters", share_of_leverage(largest_leverage(pulls)))
        if loo is None:
            return
        for what, one in (("elpd", loo.loo), ("waic", loo.waic)):
            self._number(what, float(effective_number(np.abs(one))))
        for what, one in (("squares", loo.loo**2), ("parameters", np.abs(loo.within - loo.loo))):
            total = one.sum()
            self._share(what, 0.0 if total == 0 else float(one.max() / total))

    def _number(self, what: str, found: float) -> None:
        if not found >= self._least:
            self._refuse(f"{what}: {found:.3g} effective records contribute, where {self._least} are asked for")

    def _share(self, what: str, found: float) -> None:
        if not found <= LARGEST_SHARE:
            self._refuse(f"{what}: one record has a share of {found:.3g}, above {LARGEST_SHARE:g}")

    def _refuse(self, found: str) -> NoReturn:
        raise InputError(
            f"records of {self._site!r}",
            found,
            "Nothing is released. Is the posterior that of this study? With few records, assess with fewer --least-records.",
        )
