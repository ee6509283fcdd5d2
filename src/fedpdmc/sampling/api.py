"""``sample``: from sites and a prior to a posterior."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any

from fedpdmc._jax.garbage_collection import Uncollected
from fedpdmc._jax.precision import double_precision
from fedpdmc.console.interrupts import deferred
from fedpdmc.console.progress import show_prior, showing
from fedpdmc.dynamics import Dynamics
from fedpdmc.errors import InputError
from fedpdmc.members.site import DescribedSites, Site
from fedpdmc.models.grouped import SpreadPrior
from fedpdmc.models.mixture_prior import MixturePrior
from fedpdmc.potentials import Quadratic
from fedpdmc.privacy.budget_planning import PRIVATE_LAPLACE
from fedpdmc.results.posterior import Posterior
from fedpdmc.sampling.arguments import Redistributed, Settings, check_length
from fedpdmc.sampling.defaults import choose
from fedpdmc.sampling.driver import DEFAULT_ESS, Sampler
from fedpdmc.sampling.one_shot import private_laplace
from fedpdmc.sampling.run_cost import replace_if_unsuited
from fedpdmc.whitening import Reference

ANEW = (
    "before the first block of samples was complete: nothing is kept. The same call starts again, and with the same seed it "
    "makes the same draws; what has been compiled is not compiled again."
)


class StudyConnection(abc.ABC):
    """A study whose contract says what is sampled and how; see `fedpdmc.connect`."""

    @abc.abstractmethod
    def sample(self, *, ess: float | None, duration: float | None, keep: str, progress: bool) -> Posterior:
        """Draw from the study's posterior, to an effective sample size, a process time, or as the contract says."""


@deferred(ANEW)
@double_precision
def sample(
    sites: Sequence[Site] | Site | StudyConnection,
    prior: Quadratic | SpreadPrior | MixturePrior | Redistributed | Callable | None = None,
    *,
    prior_at: str = "coordinator",
    dynamics: Dynamics | None = None,
    reference: Reference | str | None = None,
    control: str | None = None,
    chains: int | None = None,
    duration: float | None = None,
    ess: float | None = None,
    burn_in: float | None = None,
    init: Any = None,
    seed: int | None = None,
    bounds: str = "certified",
    keep: str = "skeleton",
    names: Sequence[str] | None = None,
    progress: bool = True,
    method: str | None = None,
    constraints: Any = None,
    bounce: str | None = None,
) -> Posterior:
    """Draw from the posterior ``π(x) ∝ exp(−U_0(x) − Σ_m U_m(x))``, exactly, without pooling the sites' records.

    Parameters
    ----------
    sites : sequence of Site, or Connection
        The owners of the data. With a study's `connect`, the contract sets everything but length, ``keep`` and ``progress``.
    prior : Quadratic, SpreadPrior, MixturePrior, Redistributed or callable, optional
        From `fedpdmc.models`; None: that of `fedpdmc.sites`, or flat. A JAX function of the parameters, minus the log
        density of any prior, is walked by a site of its own, ``"prior"``.
    prior_at : {"coordinator", "sites", "extra"}
        Who walks with the prior: the coordinator in its plans, the sites in proportion to their records, or an extra
        site. The posterior is the same. `Redistributed` has a place of its own.
    dynamics : Dynamics, optional
        None: the few-rounds method, `Boomerang` on the reference "vb" with quadratic control variates; or, if the
        posterior is too far from that, as its tails or the burn-in show, `ZigZag` on the same reference
        (``settings["chosen"]`` says why).
    reference : Reference, "vb", "laplace", "diagonal" or "identity", optional
        Whitened coordinates: of a Gaussian with nearly the posterior's mean and covariance, of the Laplace
        approximation, of its standard deviations alone, or none. None: "vb" with rotating dynamics, "laplace" with straight
        ones; with flips and sites that see some coordinates "diagonal", which keeps flips local; with a privacy budget
        "identity", since the others need the sites' derivatives. ``settings["reference"]`` and
        ``settings["reference_why"]`` say what was used.
    control : {"none", "linear", "quadratic"}, optional
        Public quadratics moved from the sites to the coordinator. None: if the reference was computed from the sites'
        derivatives, "quadratic" with rotating dynamics and "linear" with straight ones; else "none".
    chains : int, optional
        Number of chains, which share every message. None: as many as ``ess`` requires in the few-rounds method, else 64.
    duration : float, optional
        Process time of every chain after the burn-in.
    ess : float, optional
        Go on in whole blocks until the worst bulk ESS of coordinates and energy reaches this; 1000 if neither is given. At
        least 4 for each chain if their number is left open: fewer cannot tell whether the chains agree.
    burn_in : float, optional
        Process time at the start of every chain that is discarded.
    init : array of shape (d,) or (chains, d), optional
        Where the chains start.
    seed : int, optional
    bounds : {"certified", "adaptive"}
        Every event time is drawn under a proved bound; or, for models that are the user's own functions, under a bound
        that is guessed on a grid: ``certified`` is then False and ``violations`` counts where the guess was seen to fail.
    keep : {"skeleton", "draws"}
        All events, or exact moments and a bounded number of draws.
    names : sequence of str, optional
        The parameters' names.
    constraints : pair of arrays, optional
        ``(A, b)`` of shapes (m, d) and (m,): the posterior is limited to ``A x ≤ b``, and paths turn exactly at the limits.
        For boxes, truncated supports and orders of parameters, with sites in this process.
    bounce : {"draw", "reflect"}, optional
        The velocity after an event of a site: a fresh draw, which reveals less of the site's records, or a reflection.
        None: a draw over a network, where reflections are refused; in one process the reflection, which is never slower.
    progress : bool
        Show progress: a bar on a terminal, one output in a notebook, elsewhere an occasional line on standard error during
        a long run.

    Returns
    -------
    Posterior

    Raises
    ------
    InputError
        An argument cannot be used; nothing has run.
    BoundViolation
        A rate exceeded its certified bound: a bug.
    KeyboardInterrupt
        Ctrl-C before the first block of samples was complete. Later, Ctrl-C ends the run and keeps the complete blocks.

    Warns
    -----
    ConvergenceWarning
        The run has not converged: the message and `Posterior.verdict` say why and what to do.
    """
    given: dict[str, Any] = {name: value for name, value in locals().items() if name not in ("progress", "method")}
    described: dict[str, Any] = {"prior": []}
    if isinstance(sites, DescribedSites):
        described["effect_scale"] = sites.effect_scale
        if prior is None:
            prior, described["prior"] = sites.prior, list(sites.prior_lines)
            given["prior"] = prior
    if method not in (None, "exact", PRIVATE_LAPLACE):
        raise InputError("method", repr(method), f"Give None, 'exact' or {PRIVATE_LAPLACE!r}.")
    members = [sites] if isinstance(sites, Site) else sites if isinstance(sites, (list, tuple)) else []
    budgeted = any(getattr(site, "budget", None) is not None for site in members)
    if method == PRIVATE_LAPLACE or (method is None and dynamics is None and budgeted):
        remedy = "A private answer in one shot has no such setting: leave it out, or say method='exact'."
        _refuse(given, "dynamics reference control chains duration ess burn_in init", remedy)
        return private_laplace(sites, prior, names, seed)
    check_length(duration, ess)
    if isinstance(sites, StudyConnection):
        remedy = "For a study it is said {}: leave it out here.".format
        own = "prior dynamics reference control chains burn_in init names constraints bounce"
        _refuse(given, own, remedy("in the contract"))
        _refuse(given, "seed", remedy("to connect()"))
        return sites.sample(ess=ess, duration=duration, keep=keep, progress=progress)
    if duration is None and ess is None:
        ess = DEFAULT_ESS
    given["ess"] = ess
    settings = Settings(**given)
    show_prior(progress, described["prior"])
    with showing(progress):
        with Uncollected():
            chosen = replace_if_unsuited(choose(settings))
            sampler = Sampler(chosen, chosen.burn_in(burn_in, duration), keep)
            sampler.described = described
        sampler.check_budget(0.0 if duration is None else float(duration))
        if sampler.burn_in_time > 0:
            sampler = sampler.burn_in(progress, duration, ess)
        return sampler.to_length(duration, ess, progress)


def _refuse(given: dict[str, Any], names: str, remedy: str) -> None:
    for name in names.split():
        if given[name] is not None:
            raise InputError(name, repr(given[name]), remedy)
