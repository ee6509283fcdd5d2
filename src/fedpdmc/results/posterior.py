"""What the user gets: moments, draws, diagnostics, ArviZ, provenance."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from fedpdmc._jax.compilation import mapped
from fedpdmc._jax.precision import double_precision
from fedpdmc.console.interrupts import deferred
from fedpdmc.dynamics import Dynamics
from fedpdmc.errors import InputError
from fedpdmc.models.user_function import StoredVariables, Variables, variables
from fedpdmc.results.diagnostics import Diagnosis, diagnose, energy, quantile_errors
from fedpdmc.results.exactness_certificate import Certificate
from fedpdmc.results.path_store import SkeletonStore, Store, cannot_go_on
from fedpdmc.results.skeleton import Skeleton
from fedpdmc.results.verdict import Verdict, judge, other_modes_crossed
from fedpdmc.validation import LEVEL, integer, probability
from fedpdmc.whitening import Reference

if TYPE_CHECKING:
    import pandas as pd

    from fedpdmc.results.summary import Summary

DRAWS_PER_TURN = 16  # per unit of process time, for the diagnostics of rotating paths
MOST_DIAGNOSED = 2**16  # draws of all chains that diagnostics use, or a thousand of each chain if that is more
MOST_NUMBERS = 2**23  # in all of them
NODES = 4  # of a Gauss–Legendre rule on each piece of path
LONGEST_PIECE = 0.5  # process time of a piece of a rotation
BATCH = 2**14  # pieces, or draws, at a time
UNCHANGED = "before another block of samples was complete. The posterior is as it was: call extend() again."


class Posterior:
    """Draws and exact path integrals of a posterior, with their provenance.

    Attributes
    ----------
    names : list of str
        The parameters' names.
    rounds : int
        Serial exchanges with the sites, including those for the reference.
    messages, bytes : arrays of shape (sites,)
        Messages and bytes exchanged with each site, both directions.
    events : array of shape (chains,)
        Accepted jumps of sites and coordinator; refreshments are not counted.
    gradient_evaluations : array of shape (sites,)
        Passes over each site's records, for one chain each; zero for sites that do not report them: private ones, those
        in a run with a site that has a budget or a log, and those of a study whose contract does not ask for it.
    certified : bool
        Whether every event time was drawn under a proved bound.
    violations : array of shape (sites,)
        How often a rate was seen above a bound that was not certified; violations that went unseen are not counted.
    privacy : dict or None
        What each site with a budget has spent.
    settings : dict
        Settings, versions and seed.
    run : Sampler, SavedRun or None
        What `extend` continues (`fedpdmc.sampling.driver`).
    """

    def __init__(
        self,
        store: Store,
        reference: Reference,
        dynamics: Dynamics,
        names: list[str],
        counts: dict[str, Any],
        settings: dict[str, Any],
        run: Any = None,
        variables: Variables | StoredVariables | None = None,
        origin: np.ndarray | None = None,
    ):
        self.store, self.reference, self.dynamics, self.run = store, reference, dynamics, run
        self.names, self.settings, self._variables, self._origin = names, settings, variables, origin
        self._found: tuple[Diagnosis, Verdict] | None = None
        self.rounds: int = int(counts["rounds"])
        self.messages: np.ndarray = np.asarray(counts["messages"])
        self.bytes: np.ndarray = np.asarray(counts["bytes"])
        self.events: np.ndarray = np.asarray(counts["events"])
        self.gradient_evaluations: np.ndarray = np.asarray(counts["gradient_evaluations"])
        self.certified: bool = bool(counts.get("certified", True))
        self.violations: np.ndarray = np.asarray(counts.get("violations", np.zeros(len(self.messages), np.int64)))
        self.privacy: dict[str, Any] | None = counts.get("privacy")

    def __repr__(self) -> str:
        begin, end = self.store.span
        size = f"{len(self.names)} parameters, {self.chains} chains, process time {end - begin:g}"
        return f"Posterior({size}, {self.rounds} rounds)"

    @property
    def information(self) -> dict[str, float] | None:
        """Bits that the answers of each site on a network carry about its records, on average at most, as it reports."""
        return self.settings.get("information") or None

    @property
    def certificate(self) -> Certificate:
        """The basis of ``certified`` for each site: a list of dicts that prints as text. Says nothing about convergence."""
        entries, prior = self.settings.get("certificate", []), self.settings.get("prior_site")
        walls = int(self.settings.get("constraints") or 0)
        return Certificate(entries, self.gradient_evaluations, self.certified, prior, walls)

    @property
    def chains(self) -> int:
        """Number of chains."""
        return len(self.events)

    @property
    def duration(self) -> float:
        """Process time of each chain, without the burn-in."""
        begin, end = self.store.span
        return end - begin

    @property
    def most_draws(self) -> int:
        """Maximum number of draws of each chain that can be requested."""
        return self.store.most_draws

    @property
    def skeleton(self) -> Skeleton:
        """Events of all chains in whitened coordinates (not with keep='draws')."""
        if not isinstance(self.store, SkeletonStore):
            raise InputError("skeleton", "keep='draws'", "Run with keep='skeleton' to have the events.")
        return self.store.skeleton

    @double_precision
    def mean(self) -> np.ndarray:
        """The average of x: exact along the paths, or over the turns of `fedpdmc.Boomerang`, which is more precise there."""
        return self._moments()[0]

    @double_precision
    def cov(self) -> np.ndarray:
        """The average of ``(x − mean)(x − mean)ᵀ``, computed as `mean` is."""
        return self._moments()[1]

    def _moments(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean and covariance of x: of the whitened ones, or over draws where coordinates are bent."""
        reference, dim = self.reference, len(self.names)
        if reference.bend is not None:
            x = reference.to_x(self.store.draws(self.store.turns or self.diagnostic_draws())).reshape(-1, dim)
            return x.mean(0), np.cov(x.T, bias=True).reshape(dim, dim)
        moments, scale = self.store.moments(), np.asarray(reference.matrix)
        cov = scale @ moments.cov() @ scale.T
        return reference.to_x(moments.mean()), (cov + cov.T) / 2

    @double_precision
    def draws(self, n: int) -> np.ndarray:
        """Positions equally spaced in process time over the common span of all chains, of shape (chains, n, d).

        On quarter turns they are positions at the turns of each chain, if it has enough of them. Those between turns add
        little: they lie on the arc from one turn to the next.
        """
        n = integer("draws(n)", n, 1, remedy="Ask for at least one draw of each chain.")
        return self.reference.to_x(self.store.draws(n))

    @double_precision
    def expectation(self, f: Callable[[Any], Any], *, named: bool = False) -> np.ndarray:
        """The average of ``f(x)``: by Gauss–Legendre quadrature on every segment of the paths, or over the turns.

        Parameters
        ----------
        f : callable
            A JAX function of one parameter vector of shape (d,) that returns a number or an array.
        named : bool
            Whether it takes a dict of the variables that `summary` shows, by name, instead.
        """
        if named:
            f = self.named.before(f)
        if self.store.turns:
            draws = self.draws(self.store.turns).reshape(-1, len(self.names))
            total = jax.jit(lambda x: jnp.sum(mapped(f)(x), 0))
            parts = np.array_split(draws, max(1, len(draws) // BATCH))
            return np.asarray(sum(np.asarray(total(jnp.asarray(part))) for part in parts)) / len(draws)
        path, flow = self.skeleton, self.dynamics.flow
        nodes, weights = np.polynomial.legendre.leggauss(NODES)
        average = jax.jit(lambda x, w: jnp.tensordot(w, mapped(f)(self.reference.to_x(x)), 1))
        total, durations = None, path.durations
        pieces = np.ones(len(durations), int)
        if flow.rotating:
            pieces = np.maximum(np.ceil(durations / LONGEST_PIECE), 1).astype(int)
        knot = np.repeat(np.arange(len(durations)), pieces)
        piece = np.arange(len(knot)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        length = durations[knot] / pieces[knot]
        for rows in np.array_split(np.arange(len(knot)), max(1, len(knot) // BATCH)):
            times = (piece[rows, None] + (nodes + 1) / 2) * length[rows, None]
            p, q = (np.asarray(w)[..., None] for w in flow.weights(jnp.asarray(times)))
            a = p * path.a[knot[rows], None] + q * path.v[knot[rows], None]
            w = length[rows, None] * weights / 2
            part = np.asarray(average(jnp.asarray(a.reshape(-1, a.shape[-1])), jnp.asarray(w.ravel())))
            total = part if total is None else total + part
        return np.asarray(total) / durations.sum()

    @property
    def transformed(self) -> bool:
        """Whether the model's variables differ from the sampled coordinates."""
        return self._variables is not None

    def diagnostic_draws(self) -> int:
        """Draws of each chain for ESS: at the turns, or at most one unit apart on other rotations."""
        jumps = float(np.mean(self.events)) / max(len(self.names), 1)
        most = max(1000, MOST_DIAGNOSED // self.chains)
        most = min(most, max(100, MOST_NUMBERS // (self.chains * len(self.names))))
        n = int(np.clip(2 * jumps, 100, most))
        if self.store.turns:
            return min(self.store.turns, most)
        if self.dynamics.flow.rotating:
            n = int(np.clip(np.ceil(DRAWS_PER_TURN * self.duration), 32, max(most, np.ceil(self.duration))))
        return min(max(n, 8), self.store.most_draws)

    @property
    def origin(self) -> np.ndarray:
        """Starts of the chains before the burn-in, (chains, d); the first draws if the starts are not known."""
        return self.draws(self.diagnostic_draws())[:, 0] if self._origin is None else self._origin

    def diagnosis(self) -> tuple[Diagnosis, Verdict]:
        """Diagnostics of all coordinates and the energy, and the verdict on them; computed once."""
        if self._found is None:
            draws, mean, cov = self.draws(self.diagnostic_draws()), self.mean(), self.cov()
            values = np.concatenate([draws, energy(draws, mean, cov)[..., None]], -1)
            origin = self.origin
            starts = np.concatenate([origin, energy(origin, mean, cov)[:, None]], -1)
            found = diagnose(values, [*self.names, "energy"], starts, bool(self.settings.get("wide_starts")))
            away = np.abs(origin.mean(0) - mean) / np.sqrt(np.maximum(np.diag(cov), 1e-300))
            crossed = other_modes_crossed(self.settings.get("modes", []), draws)
            spent = max((one["spent"] for one in (self.privacy or {}).values()), default=0.0)
            known = self.settings | {"modes": crossed, "spent": spent}
            self._found = found, judge(found, self.chains, known, float(away.max()))
        return self._found

    @property
    def verdict(self) -> Verdict:
        """Whether the run has converged, as far as its draws show: ``.converged``, ``.reasons``, ``.remedies``."""
        return self.diagnosis()[1]

    def ess(self) -> dict[str, float]:
        """Bulk effective sample size of every parameter and of the energy, over all chains."""
        found = self.diagnosis()[0]
        return dict(zip(found.names, found.ess.tolist(), strict=True))

    def ess_tail(self) -> dict[str, float]:
        """Tail effective sample size: of the probabilities below the 5 % and above the 95 % quantile, the smaller."""
        found = self.diagnosis()[0]
        return dict(zip(found.names, found.tail.tolist(), strict=True))

    def mcse(self, quantile: float | None = None) -> dict[str, float]:
        """Monte Carlo standard error of every parameter's mean, or of a quantile.

        That of the mean comes from the scatter of the chains' means, which are independent. That of a quantile is half the
        distance between the quantiles at the ends of the interval in which its probability is known.

        Parameters
        ----------
        quantile : float, optional
            Its probability; None: the mean.
        """
        found, sd = self.diagnosis()[0], np.sqrt(np.diag(self.cov()))
        if quantile is None:
            return dict(zip(self.names, (found.error[:-1] * sd).tolist(), strict=True))
        draws = self.draws(self.diagnostic_draws())
        errors = quantile_errors(draws, probability("mcse(quantile)", quantile))
        return dict(zip(self.names, errors.tolist(), strict=True))

    def rhat(self) -> dict[str, float]:
        """Nested, rank-normalised R-hat of every parameter and of the energy.

        Chains with similar starts are merged into four superchains, whose means are compared
        (`fedpdmc.results.diagnostics.nested_rhat`). A stationary run has about ``√(1 + 4/ESS)``: ``verdict.rhat_floor``.
        """
        found = self.diagnosis()[0]
        return dict(zip(found.names, found.rhat.tolist(), strict=True))

    def named_by(self, sites: Any = None) -> Variables | StoredVariables:
        """`named`, from the given sites if only draws of the variables are on disk."""
        if sites is None or not isinstance(self._variables, StoredVariables):
            return self.named
        return variables(list(sites), self.names) or self.named

    @deferred(UNCHANGED)
    def extend(
        self,
        *,
        duration: float | None = None,
        ess: float | None = None,
        sites: Any = None,
        prior: Any = None,
        progress: bool = True,
    ) -> Posterior:
        """Continue the run by a process time, or up to an effective sample size.

        Returns a new posterior, which holds the draws of this one and those that follow. This one does not change:
        ``post = post.extend(...)``.

        Parameters
        ----------
        duration : float, optional
            Process time to add.
        ess : float, optional
            Effective sample size to reach, over the whole run; 1000 if neither is given.
        sites, prior : optional
            What `sample` was given. A posterior from `load` needs them, since it holds no records; any other has them.
            They are compared with those of the run. With the same seeds of the sites and the same versions, the draws
            are bit for bit those that the posterior would have made before it was saved; for a site with a privacy
            budget they are new ones, charged as always.
        progress : bool

        Returns
        -------
        Posterior

        Raises
        ------
        InputError
            Other sites or another prior than those of the run, or a run that cannot be continued here: a posterior of a
            network study continues from its store, with `connect` and `sample`.
        """
        if self.run is None:
            raise cannot_go_on(self.settings)
        if prior is not None and sites is None:
            raise InputError("sites", "None with a prior", "Give both, as they were given to sample(), or neither.")
        return self.run.extend(duration=duration, ess=ess, sites=sites, prior=prior, progress=progress)

    def summary(self, level: float = LEVEL, *, interval: str = "quantile", exp: bool = False) -> Summary:
        """A table of the parameters, which prints with the verdict on convergence first and how the run went last.

        Parameters
        ----------
        level : float
            Probability of the interval.
        interval : {"quantile", "hdi"}
            Between quantiles with equal tails, or the shortest one: the highest density interval.
        exp : bool
            Summarise ``exp`` of every parameter: odds ratios, rate ratios, hazard ratios.

        Returns
        -------
        Summary
            A `pandas.DataFrame` with a row for each parameter.
        """
        from fedpdmc.results.summary import summary

        return summary(self, level, interval, exp)

    def ratios(
        self, increments: Mapping[str, float] | None = None, *, level: float = LEVEL, kind: str | None = None
    ) -> pd.DataFrame:
        """Odds, rate, hazard or time ratios of all terms but the intercept, as the family has them: medians and intervals.

        Parameters
        ----------
        increments : mapping, optional
            By how much a column increases, in its own units, ``{"age": 10}``; of one that enters by its logarithm a factor.
            A column left out: a round number near one standard deviation of its values, which the label says; one unit of
            zeros and ones.
        level : float
        kind : str, optional
            Of a Weibull model "time ratio" (if None) or "hazard ratio".
        """
        from fedpdmc.results.forest_plot import EffectScale, ratios

        return ratios(self, EffectScale.of(self), increments, level, kind)

    def variables(self, n: int) -> dict[str, np.ndarray]:
        """Draws of the model's variables by name, each of shape (chains, n, …).

        The variables of a NumPyro model have their constrained values and their own shapes; a parameter of any other model
        is a variable itself.
        """
        return self.named.of(self.draws(n))

    def origin_variables(self) -> dict[str, np.ndarray]:
        """The model's variables at the starts of the chains, each of shape (chains, 1, …)."""
        return self.named.at_origin(self.origin[:, None])

    @property
    def named(self) -> Variables | StoredVariables:
        """The model's variables as functions of the coordinates, or their draws from disk."""
        return self._variables or Variables([], {name: i for i, name in enumerate(self.names)})

    def to_arviz(
        self,
        draws: int = 1000,
        chains: int | None = None,
        *,
        log_likelihood: bool = False,
        posterior_predictive: bool = False,
        sites: Any = None,
        seed: int | None = None,
    ):
        """The draws as an ArviZ ``InferenceData`` (from ArviZ 1 on an xarray ``DataTree``), with the settings as attributes.

        The group ``posterior`` holds the model's variables in the model's order, ``sample_stats`` the energy. If the
        variables are not the coordinates that were sampled, the latter are in ``unconstrained_posterior``.

        Many chains are merged into few, since ArviZ draws a line for each: they are joined end to end and cut into
        pieces of the same length. That is correct for plots and averages. For ESS and R-hat use `ess`, `rhat` and
        `verdict`: they know where every chain begins.

        Parameters
        ----------
        draws : int
            Draws in each chain that ArviZ sees, rounded up to what the chains can share.
        chains : int, optional
            How many chains ArviZ sees; 4 by default, or as many as there are if that is fewer.
        log_likelihood, posterior_predictive : bool
            Add the log density of every record's response, or a new response, at each draw, and ``observed_data``: for sites
            from a table in this process. Over a network records stay at their sites: `fedpdmc.assessment.assess`. Times
            until an event are not censored in new responses.
        sites : Sites, optional
            For a posterior from `fedpdmc.load`, which has no records.
        seed : int, optional
            Of the new responses.
        """
        from fedpdmc.results.arviz_export import to_arviz

        return to_arviz(self, draws, chains, log_likelihood, posterior_predictive, sites, seed)

    def report(
        self,
        path: str | Path,
        *,
        sites: Any = None,
        assessment: Any = None,
        title: str | None = None,
        question: str | None = None,
    ) -> Path:
        """Write a report of the run, one HTML file that needs no network: estimates, sites, convergence, privacy, exactness.

        Parameters
        ----------
        path : path
            Such as ``"study.html"``.
        sites : Sites, optional
            From `fedpdmc.sites`: the report then describes the model.
        assessment : Assessment, optional
            From `fedpdmc.assessment.assess`.
        title, question : str, optional
            The heading, and what the study asks.

        Returns
        -------
        Path
        """
        from fedpdmc.results.report import write_report

        model: dict[str, Any] = {}
        if sites is not None:
            model = {"about": sites.lines(), "released": sites.released(), "effect_scale": sites.effect_scale}
            model |= {"dropped": sites.dropped(), "sites": sites}
        return write_report(self, path, title=title, question=question, assessment=assessment, **model)

    def plot_forest(
        self,
        names: Sequence[str] | None = None,
        *,
        by: str | None = None,
        increments: Mapping[str, float] | None = None,
        level: float = LEVEL,
        kind: str | None = None,
        exp: bool | None = None,
        sites: Any = None,
    ):
        """Medians and intervals on the scale of the family: ratios on a log axis with a line at 1, or differences.

        Parameters
        ----------
        names : sequence of str, optional
            Coefficients, as `summary` names them; all but the intercept if None.
        by : {None, "site"}
            "site": for each coefficient the estimates by each site's own records, with squares of an area in proportion to
            their weight, and below them the posterior of all as a diamond.
        increments, level, kind
            As `ratios` takes them.
        exp : bool, optional
            Whether to draw exponentials, of a model whose family is not known.
        sites : Sites, optional
            For ``by="site"`` of a posterior from `fedpdmc.load`, which has no records.

        Returns
        -------
        array of matplotlib axes
        """
        from fedpdmc.results.forest_plot import plot_forest

        return plot_forest(self, names, by, increments, level, kind, exp, sites)

    def plot_trace(self, **options: Any):
        """Densities and traces: `arviz.plot_trace` with its options."""
        from fedpdmc.results.arviz_export import plot

        return plot(self, "plot_trace", options)

    def plot_pairs(self, **options: Any):
        """Scatter plots of pairs of parameters: `arviz.plot_pair` with its options."""
        from fedpdmc.results.arviz_export import plot

        return plot(self, "plot_pair", options)

    def _repr_html_(self) -> str:
        return self.summary()._repr_html_()

    def save(self, path: str | Path, *, state: bool = True) -> None:
        """Write everything to a zarr folder (an existing one is replaced).

        Parameters
        ----------
        path : path
        state : bool
            Whether the run can be continued from the folder (`extend`). Only then does it have a hash of each site's
            records and, with control variates, each site's gradient and Hessian at the centre of the reference.
        """
        from fedpdmc.results.archive import save

        save(self, Path(path), state)
