"""Whether a run has converged, what speaks against it, and what to do."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from fedpdmc.results.diagnostics import Diagnosis

# R-hat that is good enough; effective draws below which nothing can be said, in all and of each chain.
GOOD_RHAT, LEAST_ESS, LEAST_ESS_PER_CHAIN = 1.01, 100.0, 4.0
# Drift, and error of the mean due to the beginning, that are small enough: in standard deviations.
SMALL_DRIFT, SMALL_BIAS = 0.1, 0.01
# Between what speaks against a run and what to do about it.
TO_DO = " To do: "


class ConvergenceWarning(UserWarning):
    """The draws of a run should not be used as they are."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Whether a run has converged, as far as its draws can show. It is truthy if so.

    Attributes
    ----------
    converged : bool
    reasons : tuple of str
        What speaks against it; empty if converged.
    remedies : tuple of str
        What to do about it.
    ess, ess_per_chain : float
        The worst bulk effective sample size, in all and per chain.
    rhat, rhat_floor : float
        The worst nested R-hat, and the value that a stationary run with this ESS has on average.
    worst : str
        The quantity with the worst ESS.
    """

    converged: bool
    reasons: tuple[str, ...]
    remedies: tuple[str, ...]
    ess: float
    ess_per_chain: float
    rhat: float
    rhat_floor: float
    worst: str

    def __bool__(self) -> bool:
        return self.converged

    def __str__(self) -> str:
        if not self.converged:
            return f"NOT converged: {'; '.join(self.reasons)}.{TO_DO}{'; or '.join(self.remedies)}."
        return (
            f"converged: R-hat at most {self.rhat:.3f} (a perfect sampler: {self.rhat_floor:.3f}), ESS at least "
            f"{self.ess:,.0f} ({self.worst}), {self.ess_per_chain:.3g} for each chain; no drift from the start."
        )


def judge(found: Diagnosis, chains: int, settings: dict[str, Any], distance: float) -> Verdict:
    """A verdict from diagnostics.

    A statistic speaks against a run if it is both beyond chance and large enough to matter: R-hat above 1.01 and above
    its limit, a drift above a tenth of a standard deviation and above its limit, first draws beyond their limit that move
    the mean by more than its Monte Carlo error. Too few effective draws, in all or for each chain, leave the question open,
    and an open question is not convergence.

    Parameters
    ----------
    found : Diagnosis
    chains : int
    settings : dict
        Of the posterior.
    distance : float
        Largest distance, over coordinates, of the chains' starts from the mean of the kept draws, in standard deviations.
    """
    worst = int(np.argmin(found.ess))
    ess, each = float(found.ess[worst]), float(found.ess[worst]) / chains
    reasons, burn, more = [], False, False
    over = found.rhat > np.maximum(found.limit, GOOD_RHAT)
    if over.any():
        i = int(np.argmax(np.where(over, found.rhat, 0)))
        reasons.append(f"R-hat {found.rhat[i]:.3g} of {found.names[i]} (a perfect sampler: {found.floor[i]:.3g})")
        more = True
    drifting = np.abs(found.drift) > np.maximum(found.drift_limit, SMALL_DRIFT)
    if drifting.any():
        i = int(np.argmax(np.where(drifting, np.abs(found.drift), 0)))
        reasons.append(f"the chains drift: {found.names[i]} moves by {abs(found.drift[i]):.2g} sd from the first fifth to "
                       "the second half")  # fmt: skip
        burn = True
    # Chains that forget like exp(−t/τ) have T/(2τ) effective draws each: their beginning moves the mean by this much.
    bias = np.abs(found.begin) * chains / (2 * np.maximum(found.ess, 1e-300))
    small = np.maximum(1 / np.sqrt(np.maximum(found.ess, 1e-300)), SMALL_BIAS)
    away = (np.abs(found.begin) > found.begin_limit) & (bias > small)
    if away.any():
        i = int(np.argmax(np.where(away, np.abs(found.begin), 0)))
        reasons.append(f"the kept draws begin {abs(found.begin[i]):.2g} sd off in {found.names[i]}")
        burn = True
    if burn:
        reasons.append(f"the burn-in of {settings['burn_in']:.3g} was too short for a start {distance:.2g} sd away")
    if each < LEAST_ESS_PER_CHAIN:
        reasons.append(f"ESS {each:.2g} for each chain ({found.names[worst]}) is too few to tell")
        more = True
    elif ess < LEAST_ESS:
        reasons.append(f"ESS {ess:.0f} in all ({found.names[worst]}) is too few to tell")
        more = True
    remedies = _remedies(burn, more, ess, chains, settings) if reasons else ()
    return Verdict(
        not reasons, tuple(reasons), tuple(remedies), ess, each, float(found.rhat.max()), float(found.floor.max()),
        found.names[worst],
    )  # fmt: skip


def _remedies(burn: bool, more: bool, ess: float, chains: int, settings: dict[str, Any]) -> list[str]:
    """What to do, in terms of `sample` or of a study's contract."""
    remedies, duration, contract = [], float(settings["duration"]), "study" in settings
    if settings["reference"] == "identity":
        where = "with a contract that has reference = 'laplace'" if contract else "(reference='laplace')"
        remedies.append(f"sample in whitened coordinates {where}, or leave the dynamics open")
    if burn:
        length = _round(settings["burn_in"] + duration)
        remedies.append(f"begin again with burn_in = {length} or more" + (" in the contract" if contract else ""))
    elif more:
        factor = max(LEAST_ESS, LEAST_ESS_PER_CHAIN * chains) / max(ess, 1.0)
        length = _round(duration * float(np.clip(factor, 1.0, 100.0)))
        how = (
            f"continue to a duration of {length} or more"
            if contract
            else f"continue: post = post.extend(duration={length})"
        )
        remedies.append(how)
    return remedies


def _round(time: float) -> str:
    """Rounded up to two digits."""
    if time <= 0:
        return "1"
    size = 10.0 ** (np.floor(np.log10(time)) - 1)
    return f"{np.ceil(time / size) * size:.6g}"
