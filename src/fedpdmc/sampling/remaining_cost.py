"""Estimates of the remaining cost of a run: rounds and seconds to its goal, from the cost so far."""

from __future__ import annotations

import numpy as np

from fedpdmc.console.screens import clock
from fedpdmc.console.warnings import warn
from fedpdmc.sampling.defaults import Method

# Rounds above which a warning is given, those where the package chose the number of chains so that rounds are few, and the
# factor by which an estimate must have grown for another warning.
MANY_ROUNDS, MANY_WITH_USUAL_CHAINS, GROWN = 500.0, 60.0, 4.0
# In the reason for which Zig-Zag is chosen where a density has a flat tail.
FLAT_TAIL = "per standard deviation in its tail"
HORSESHOE = (
    "; where scales have half-Cauchy priors, as those of a horseshoe have, prior=fedpdmc.models.horseshoe_prior(dim, scale) "
    "with a likelihood of the coefficients themselves"
)


def rounds_ahead(plans: np.ndarray, time: float, length: float, least: float = 0.0) -> float:
    """Rounds that the next ``length`` units of process time take.

    A round lets every chain send one plan, so the slowest chain counts. With mean ``m`` and variance ``s²`` of the plans
    that a chain has made per unit of time, the maximum over ``C`` chains in time ``T`` is about ``mT + √(2 log(C) s² T)``.
    The variance is at least that of a Poisson process: ``s² ≥ m``.

    Parameters
    ----------
    plans : array of shape (C,)
        What each chain has made in ``time``, its first plan left out.
    time, length : float
    least : float
        Plans per unit of time that a chain is known to make in the long run.
    """
    mean = max(float(np.mean(plans)) / time, least) if time > 0 else least
    variance = max(float(np.var(plans)) / time if time > 0 else 0.0, mean)
    return 1.0 + mean * length + float(np.sqrt(2 * np.log(len(plans)) * variance * length))


def remedies(method: Method) -> str | None:
    """Remedies for many rounds; None if rounds cost little and the user has chosen the dynamics."""
    if not (method.elsewhere or method.open_dynamics or method.chosen):
        return None
    where = " in the contract" if method.elsewhere else ""
    lines = 'kind = "ZigZag" in the contract; ' if method.elsewhere else "dynamics=fedpdmc.ZigZag(); "
    latents = any(site.latents for site in method.sites)
    lines = lines if method.dynamics.flow.rotating and not latents else ""
    shrunk = HORSESHOE if FLAT_TAIL in method.chosen else ""
    return (
        f"What may help: {lines}more chains{where}, which share every round (there are {method.chains}); a smaller "
        "ess or duration; parameters in which the posterior is nearer to a Gaussian (logarithms of scales, effects that "
        "are standardised, columns that are centred); effects of groups that only one site sees as its own latents "
        f"(fedpdmc.Site(f, latent=...), or a formula with (1 | group)){shrunk}."
    )


class CostEstimate:
    """A text about the expected cost of a run; warns if it is high, and again when the estimate has grown.

    Parameters
    ----------
    remedies : str or None
        What to do about many rounds; None: no warning.
    usual_chains : bool
        Whether the package chose the number of chains.

    Attributes
    ----------
    burn_in : int
        Rounds of the burn-in, which count as cost too.
    """

    def __init__(self, remedies: str | None, usual_chains: bool = False):
        self.remedies, self._told = remedies, 0.0
        self.burn_in = 0
        self._many = MANY_WITH_USUAL_CHAINS if usual_chains else MANY_ROUNDS

    def tell(self, rounds: float, seconds: float | None, goal: str, far: bool = False) -> str:
        """The text for the progress display; gives a warning first if the cost is high.

        ``far``: the posterior is known to be far from its reference, so that the warning comes at fewer rounds.
        """
        takes = f"about {rounds:,.0f} rounds" + ("" if seconds is None else f" and {clock(seconds)}")
        if far:
            takes = f"at least {takes}"
        whole = rounds + self.burn_in
        if self.remedies is not None and whole > GROWN * self._told and (far or whole > self._many):
            self._told = whole
            after = f", after {self.burn_in} for the burn-in" if self.burn_in > rounds else ""
            warn(f"This will take {takes} more, to {goal}{after}. Its draws are exact all the same. {self.remedies}")
        return f"{takes} to {goal}"
