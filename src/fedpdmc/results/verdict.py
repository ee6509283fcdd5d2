"""Whether a run has converged, what speaks against it, and what to do."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from fedpdmc.dynamics import QUARTER
from fedpdmc.results.diagnostics import Diagnosis

GOOD_RHAT = 1.01
LEAST_ESS = 100.0  # effective draws below which nothing can be said
LEAST_TAIL = 50.0  # the same of the tails
LEAST_ESS_PER_CHAIN = 2.0  # of the scatter of chains' means; runs go on until the bulk ESS has `STOP_ESS_PER_CHAIN`
STOP_ESS_PER_CHAIN = 4.0
SMALL_APART = 0.05  # difference between chains with far and near starts that does not matter, in standard deviations
NARROW = 1.5  # variance of a tail over that of the reference, above which a short burn-in does not forget the start
NARROW_BURN_IN = 16 * QUARTER  # process time that forgets the start on a reference that is narrower than a tail
# Drift, and error of the mean due to the beginning, that are small enough: in standard deviations.
SMALL_DRIFT, SMALL_BIAS = 0.1, 0.01
# Error of a mean due to starts that are one standard deviation off, over its Monte Carlo error, that is small enough.
# Without any burn-in 64 chains have 1 at an ESS of 1,000.
SMALL_TRACE = 1.0
LEAST_POINTS = 40  # points of a contract that are enough for a search for modes, after the one for the reference
NOT_SEARCHED = "Other modes were not searched for: "
NOT_ON_A_NETWORK = (
    "over a network that takes derivatives = 'own' in the contract, without [privacy] and without effects of groups, 24 "
    f"points left after the search for the reference ([limits] derivatives = {LEAST_POINTS}), and sites that answer there"
)
NOT_ASKED = "the reference was given or is the identity, or sites have private latents or a privacy budget"
CONVERGED_TO_ONE = "converged, if there is one mode"
ONE_SHOT = "NOT exact, in one shot: independent draws of an approximation, whose error they do not show."
MOSTLY_SPENT = 0.95  # part of a privacy budget after which a run cannot go on for long
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
    ess_tail : float
        The worst tail effective sample size.
    note : str
        What was not looked at, although it could speak against it.
    """

    converged: bool
    reasons: tuple[str, ...]
    remedies: tuple[str, ...]
    ess: float
    ess_per_chain: float
    rhat: float
    rhat_floor: float
    worst: str
    ess_tail: float = float("inf")
    note: str = ""
    one_shot: bool = False  # draws of an approximation, with nothing to converge

    def __bool__(self) -> bool:
        return self.converged

    def __str__(self) -> str:
        if not self.converged:
            return f"NOT converged: {'; '.join(self.reasons)}.{TO_DO}{'; or '.join(self.remedies)}."
        if self.one_shot:
            return ONE_SHOT
        converged = CONVERGED_TO_ONE if self.note else "converged"
        return (
            f"{converged}: R-hat at most {self.rhat:.3f} (a perfect sampler: {self.rhat_floor:.3f}), ESS at least "
            f"{self.ess:,.0f} ({self.worst}; tails {self.ess_tail:,.0f}), {self.ess_per_chain:.3g} for each chain; no drift "
            f"from the start.{f' {self.note}.' if self.note else ''}"
        )


def judge(found: Diagnosis, chains: int, settings: dict[str, Any], distance: float) -> Verdict:
    """A verdict from diagnostics.

    A statistic speaks against a run if it is both beyond chance and large enough to matter: R-hat above 1.01 and above
    its limit, a drift above a tenth of a standard deviation and above its limit, first draws beyond their limit that move
    the mean by more than its Monte Carlo error, chains that started far out and differ from the others, a burn-in that is
    short against the time in which chains forget. A reference that is
    known to be narrower than a tail needs a long burn-in. Too few effective draws, in all, of the tails or for each chain,
    leave the question open, and an open question is not convergence.

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
    # Chains that forget like exp(−t/τ) have T/(2τ) effective draws each: their beginning moves the mean by this much.
    bias = np.abs(found.begin) * chains / (2 * np.maximum(found.ess, 1e-300))
    small = np.maximum(1 / np.sqrt(np.maximum(found.ess, 1e-300)), SMALL_BIAS)
    drift, begin = np.abs(found.drift), np.abs(found.begin)
    over = found.rhat > np.maximum(found.limit, GOOD_RHAT)
    drifting = drift > np.maximum(found.drift_limit, SMALL_DRIFT)
    away = (begin > found.begin_limit) & (bias > small)
    apart = (found.apart > found.apart_limit) & (found.apart > SMALL_APART)
    reasons, more, burn = [], bool(over.any()), bool((drifting | away | apart).any())
    for against, value, words in (
        (over, found.rhat, "R-hat {value:.3g} of {name} (a perfect sampler: {floor:.3g})"),
        (drifting, drift, "the chains drift: {name} moves by {value:.2g} sd from the first fifth to the second half"),
        (away, begin, "the kept draws begin {value:.2g} sd off in {name}"),
        (apart, found.apart, "chains that started far out differ from the others by {value:.2g} sd in {name}"),
    ):
        if against.any():
            i = int(np.argmax(np.where(against, value, 0)))
            reasons.append(words.format(value=value[i], name=found.names[i], floor=found.floor[i]))
    # What is left of the starts when the draws begin, of chains that forget like exp(−t/τ), whatever the draws show of it.
    fewest = np.maximum(np.minimum(np.minimum(found.ess, found.tail), found.scatter), 1e-300)
    memory = chains * float(settings["duration"]) / (2 * fewest)
    trace = np.exp(-settings["burn_in"] / np.maximum(memory, 1e-300)) * chains / (2 * np.sqrt(fewest))
    if (trace > SMALL_TRACE).any():
        i = int(np.argmax(trace))
        reasons.append(f"chains take about {memory[i]:.2g} units of time to forget {found.names[i]}")
        burn = True
    narrow = settings.get("narrow") or {}
    if narrow.get("ratio", 1.0) > NARROW and settings["burn_in"] < NARROW_BURN_IN:
        reasons.append(f"the tail of {narrow['name']} is {np.sqrt(narrow['ratio']):.2g} times as wide as the reference")
        burn = True
    if burn:
        reasons.append(f"the burn-in of {settings['burn_in']:.3g} was too short for a start {distance:.2g} sd away")
    # Of the scatter of chains' means, which no stopping rule looks at.
    scatter = found.scatter
    slowest, tail = int(np.argmin(scatter)), int(np.argmin(found.tail))
    if scatter[slowest] < LEAST_ESS_PER_CHAIN * chains:
        own = scatter[slowest] / chains
        reasons.append(f"ESS {own:.2g} for each chain ({found.names[slowest]}) is too few to tell")
        more = True
    elif ess < LEAST_ESS:
        reasons.append(f"ESS {ess:.0f} in all ({found.names[worst]}) is too few to tell")
        more = True
    elif found.tail[tail] < LEAST_TAIL:
        reasons.append(f"ESS {found.tail[tail]:.0f} of the tails of {found.names[tail]} is too few to tell")
        more = True
    other = [
        f"the posterior has another mode at {mode['place']} with {_share(mode)} of its mass, and chains rarely cross to it"
        for mode in settings.get("modes", ())
        if mode.get("crossed") is False
    ]
    reasons += other
    least = NARROW_BURN_IN if narrow.get("ratio", 1.0) > NARROW else 0.0
    remedies = _remedies(burn, more, ess, chains, settings, least) if reasons else []
    if other:
        how = "" if "study" in settings else " (constraints=)"
        remedies.append(f"write the model so that it has one mode, such as an order of the components{how}")
    unsearched = "" if settings.get("modes_searched", True) else NOT_SEARCHED
    if unsearched:
        unsearched += NOT_ON_A_NETWORK if "study" in settings else NOT_ASKED
    return Verdict(
        not reasons, tuple(reasons), tuple(remedies), ess, each, float(found.rhat.max()), float(found.floor.max()),
        found.names[worst], float(found.tail[tail]), unsearched, settings.get("exact") is False,
    )  # fmt: skip


def _share(mode: dict[str, Any]) -> str:
    # Over a network no values of the potential are known.
    return "an unknown part" if mode["share"] is None else f"about {100 * mode['share']:.2g} %"


def other_modes_crossed(modes: list[dict[str, Any]], draws: np.ndarray) -> list[dict[str, Any]]:
    """Modes, each with whether chains cross to it often enough, given draws (C, n, d).

    A draw belongs to the nearer of a mode and the one of the reference, in units of the reference.
    """
    judged = []
    for mode in modes:
        here, there, scale = (np.asarray(mode[key]) for key in ("center", "at", "scale"))
        nearer = [np.sum(np.linalg.solve(scale, (draws - x).reshape(-1, len(x)).T) ** 2, 0) for x in (there, here)]
        inside = (nearer[0] < nearer[1]).reshape(draws.shape[:2]).astype(float)
        scatter, share = inside.mean(1).var(ddof=1) if len(inside) > 1 else np.inf, inside.mean()
        enough = share > 0 and share * (1 - share) * len(inside) / max(scatter, 1e-300) > LEAST_ESS
        judged.append(mode | {"crossed": bool(enough)})
    return judged


def _remedies(
    burn: bool, more: bool, ess: float, chains: int, settings: dict[str, Any], least: float = 0.0
) -> list[str]:
    """What to do, in terms of `sample` or of a study's contract; ``least`` is the shortest burn-in that helps."""
    if settings.get("spent", 0.0) > MOSTLY_SPENT:
        # Nothing else can be bought.
        return [
            "ask for a larger privacy budget, or for an answer in one shot, which needs less (method='private-laplace')"
        ]
    remedies, duration, contract = [], float(settings["duration"]), "study" in settings
    if settings["reference"] == "identity":
        where = "with a contract that has reference = 'laplace'" if contract else "(reference='laplace')"
        remedies.append(f"sample in whitened coordinates {where}, or leave the dynamics open")
    if burn:
        length = _round(max(settings["burn_in"] + duration, least))
        remedies.append(f"begin again with burn_in = {length} or more" + (" in the contract" if contract else ""))
    elif more:
        factor = max(LEAST_ESS, STOP_ESS_PER_CHAIN * chains) / max(ess, 1.0)
        length = _round(duration * float(np.clip(factor, 1.0, 100.0)))
        here = f"continue: post = post.extend(duration={length})"
        remedies.append(f"continue to a duration of {length} or more" if contract else here)
    return remedies


def _round(time: float) -> str:
    """Rounded up to two digits."""
    if time <= 0:
        return "1"
    size = 10.0 ** (np.floor(np.log10(time)) - 1)
    return f"{np.ceil(time / size) * size:.6g}"
