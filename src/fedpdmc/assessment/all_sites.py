"""The sites' assessments together: predictive accuracy, checks, sensitivity and heterogeneity."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from scipy import stats

from fedpdmc._jax.precision import double_precision
from fedpdmc.assessment.at_site import (
    DRAWS,
    MODEL,
    PublicDraws,
    SiteAssessment,
    assess_site,
    observed_times,
    pooled,
    public_draws,
    pull,
    time_grid,
)
from fedpdmc.assessment.loo import HIGH_K, pass_over, standard_error
from fedpdmc.console.interrupts import check, deferred
from fedpdmc.console.progress import report, showing
from fedpdmc.errors import InputError
from fedpdmc.models.mixture_prior import MixturePrior
from fedpdmc.results.report import html_table
from fedpdmc.study.study_response import Outcome

if TYPE_CHECKING:
    from fedpdmc.results.posterior import Posterior
    from fedpdmc.study.sites_from_table import Sites

# A pull of the prior of this many posterior sd means that doubling its weight moves the mean by 0.2 sd or more.
NOTABLE = 0.3
MOST_PRINTED = 5  # sites whose survival is printed, with all together as one
# Columns that are counts.
COUNTS = ("records", "high_k", "df", "at_risk", "events", "censored")
# In place of a number that is not known, and why a mean without a site is not.
NOTHING, TOO_FAR = "–", "too far from the posterior of all sites: fit without it"


@dataclass(eq=False, repr=False)
class Assessment:
    """The sites' reports on their records under a posterior.

    Attributes
    ----------
    sites : tuple of SiteAssessment
    prior_pull : dict or None
        The prior's pull on each parameter, in posterior sd.
    scores : DataFrame or None
        Heterogeneity: the score test of each site against the common parameters.
    scores_unknown : str
        The reason why there are no scores; empty if there are.
    silent : sequence of str
        Sites of the run that released nothing.
    """

    sites: Sequence[SiteAssessment]
    prior_pull: Mapping[str, float] | None = None
    scores: pd.DataFrame | None = None
    scores_unknown: str = ""
    silent: Sequence[str] = ()

    def __post_init__(self) -> None:
        if len({(one.contract, one.draws) for one in self.sites}) > 1:
            raise InputError(
                "assessments", "different contracts or draws", "Give those of one study and one posterior."
            )
        if len({one.site for one in self.sites}) < len(self.sites):
            raise InputError("assessments", "a site twice", "Give one of each site.")
        self.sites, self.silent = tuple(self.sites), tuple(self.silent)

    @property
    def loo(self) -> pd.DataFrame:
        """Predictive accuracy by site and in all: elpd, its standard error, effective parameters, WAIC, Pareto k."""
        sums = {one.site: one.loo for one in self.sites if one.loo is not None}
        if not sums:
            raise InputError("loo", "no site that reported it", "Agree on it: [releases] assessment = ['loo'].")
        total = {key: sum(one[key] for one in sums.values()) for key in next(iter(sums.values()))}
        sums["all"] = total | {"worst_k": max(one["worst_k"] for one in sums.values())}
        keys = ("records", "elpd", "se", "parameters", "waic", "worst_k", "high_k")
        rows = {}
        for site, one in sums.items():
            known = one | {"se": standard_error(one["elpd"], one["squares"], one["records"])}
            rows[site] = {key: known[key] for key in keys}
        return pd.DataFrame(rows).T

    @property
    def checks(self) -> pd.DataFrame:
        """p-values of the posterior predictive checks, by site and statistic, with the observed values if reported."""
        rows = [
            {"site": one.site, "statistic": name, **numbers}
            for one in self.sites
            for name, numbers in (one.checks or {}).items()
        ]
        return pd.DataFrame(rows).set_index(["site", "statistic"]) if rows else pd.DataFrame()

    @property
    def pull(self) -> pd.DataFrame:
        """The pull of the prior and of each site on each parameter, in posterior sd (`at_site.pull`)."""
        rows = {} if self.prior_pull is None else {"prior": self.prior_pull}
        rows |= {one.site: one.pull for one in self.sites if one.pull is not None}
        return pd.DataFrame(rows).T

    @property
    def sensitivity(self) -> pd.DataFrame:
        """How each mean responds when prior or likelihood is raised to a power, in posterior sd, and what that means.

        The likelihood's response is the sum of the sites' pulls (`at_site.pull`). If both are large with opposite signs,
        prior and records disagree. If only the prior's is large, the prior is more informative than the records.
        """
        sites = [one.pull for one in self.sites if one.pull is not None]
        if len(sites) < len(self.sites) or not sites or self.prior_pull is None:
            return pd.DataFrame()
        likelihood = {name: sum(one[name] for one in sites) for name in sites[0]}
        rows = {}
        for name, prior in self.prior_pull.items():
            words = "the prior is strong" if abs(prior) > NOTABLE else "-"
            if abs(prior) > NOTABLE and abs(likelihood[name]) > NOTABLE and prior * likelihood[name] < 0:
                words = "prior and records disagree"
            rows[name] = {"prior": prior, "likelihood": likelihood[name], "diagnosis": words}
        return pd.DataFrame(rows).T.astype({"prior": float, "likelihood": float})

    @property
    def shares(self) -> pd.DataFrame:
        """The share of the prior and of each site in all pulls on each parameter, regardless of their signs."""
        size = self.pull.abs()
        return size / np.maximum(size.sum(), 1e-300)

    @property
    def without(self) -> pd.DataFrame:
        """Posterior mean without each site, and Pareto k of the weights: above 0.7 the means are NaN.

        Such a site moves the posterior too far for weights on the draws. Sample again without it to know.
        """
        known = {one.site: one.without for one in self.sites if one.without is not None}
        return pd.DataFrame({site: one["mean"] | {"pareto_k": one["k"]} for site, one in known.items()}).T

    @property
    def survival(self) -> pd.DataFrame:
        """Kaplan-Meier estimates by site and time, with the model's average survival over the same records.

        "all" pools the sites' estimates (`at_site.pooled`).
        """
        found = {one.site: one.survival for one in self.sites if one.survival is not None and one.survival["time"]}
        if len(found) > 1:
            found["all"] = pooled(list(found.values()))
        if not found:
            return pd.DataFrame()
        return pd.concat({site: pd.DataFrame(one).set_index("time") for site, one in found.items()}, names=["site"])

    def plot_survival(self, figure: Any = None):
        """For each site Kaplan-Meier estimates over the model's average survival with its band: a Matplotlib figure."""
        from fedpdmc.assessment.predict import draw_panels

        if not len(table := self.survival):
            raise InputError("survival", "no site that reported it", "Agree on it: assessment = ['survival'], times.")
        table = table.drop("all", level="site", errors="ignore")
        parts = {str(site): part.droplevel("site") for site, part in table.groupby(level="site", sort=False)}
        models = {
            site: part[list(MODEL)].set_axis(["mean", "low %", "high %"], axis=1)
            for site, part in parts.items()
            if "model" in part and not np.isnan(part["model"].to_numpy(float)).any()
        }
        steps = {site: (part.index.to_numpy(), part["survival"].to_numpy()) for site, part in parts.items()}
        return draw_panels(models, steps, "time", figure, "points")[0, 0].figure

    @property
    def unlike(self) -> list[str]:
        """Sites that do not share the parameters of the others, by the score test."""
        if self.scores is None:
            return []
        return [site for site, p in self.scores["p"].to_dict().items() if p < 0.01 / len(self.scores)]

    def misfit(self) -> list[str]:
        """What the model does not fit, in a few words; empty if nothing was found."""
        do = "do" if self.unlike[1:] else "does"
        found = [f"{', '.join(self.unlike)} {do} not share the parameters of the other sites"] if self.unlike else []
        failed = {one.site: [k for k, v in (one.checks or {}).items() if v["p"] < 0.01] for one in self.sites}
        words = [f"{site}: {', '.join(names)}" for site, names in failed.items() if names]
        if words:
            count = sum(map(len, failed.values()))
            found.append(f"{count} predictive check{'s have' if count > 1 else ' has'} p < 0.01 ({'; '.join(words)})")
        return found

    def warnings(self) -> list[str]:
        """Remarkable findings, as sentences."""
        found = [f"{site}: released nothing, and is not in these figures." for site in self.silent]
        for one in self.sites:
            if one.loo is not None and one.loo["worst_k"] > HIGH_K:
                high = f"{one.loo['high_k']:.0f} of {one.loo['records']:,.0f} records (worst {one.loo['worst_k']:.2f})"
                words = f"Pareto k above {HIGH_K} in {high}: their left-out density is not to be trusted."
                found.append(f"{one.site}: {words}")
            for name, numbers in (one.checks or {}).items():
                if numbers["p"] < 0.01:
                    p = f"= {numbers['p']:.3f}" if numbers["p"] >= 0.001 else "< 0.001"
                    found.append(f"{one.site}: the model does not make the {name} of the response (p {p}).")
        if self.prior_pull is not None:
            strong = [name for name, x in self.prior_pull.items() if abs(x) > NOTABLE]
            if strong:
                found.append(f"the prior matters for {', '.join(strong)}: see .sensitivity.")
        if self.unlike:
            found.append(f"{self.misfit()[0]}: see .scores.")
        return found

    def _tables(self) -> list[tuple[str, pd.DataFrame]]:
        known, title = any(x.loo for x in self.sites), "predictive accuracy (elpd: larger is better)"
        found = [(title, self.loo, 2)] if known else []
        curves = self.survival
        title = "survival: Kaplan-Meier and the model's average"
        if not curves.empty and len(set(curves.index.get_level_values("site"))) > MOST_PRINTED:
            title, curves = "survival: Kaplan-Meier, all sites", curves.loc[["all"], ["survival"]]
        found += [
            ("posterior predictive checks", self.checks, None),
            (title, curves, None),
            ("pull on each parameter, in posterior sd", self.pull, 2),
            ("sensitivity to the power of prior and likelihood, in posterior sd", self.sensitivity, 2),
            ("share of all pulls", self.shares, 2),
            ("posterior mean without each site", self.without, None),
        ]
        found += [] if self.scores is None else [("heterogeneity: score test of each site", self.scores, None)]
        return [(title, _formatted(table, places)) for title, table, places in found if len(table)]

    def _notes(self) -> list[str]:
        far = {one.site: one.without for one in self.sites if one.without is not None}
        far = [f"{s} (Pareto k {x['k']:.3g})" for s, x in far.items() if any(map(np.isnan, x["mean"].values()))]
        found = [f"without {', '.join(far)}: {NOTHING}, {TOO_FAR}."] if far else []
        if self.scores is None and self.scores_unknown:
            found.append(f"heterogeneity: {self.scores_unknown}")
        return [*found, *(self.warnings() or ["nothing unusual was found"])]

    def __repr__(self) -> str:
        parts = [f"{title}\n{table.to_string()}" for title, table in self._tables()]
        return "\n\n".join([f"Assessment of {len(self.sites)} sites", *parts, "\n".join(self._notes())])

    def _repr_html_(self) -> str:
        shown = ""
        for title, table in self._tables():
            flat = table.reset_index().set_index("site") if table.index.nlevels > 1 else table
            shown += f'<h4>{title}</h4><div class="wide" style="overflow-x: auto">{html_table(flat)}</div>'
        return shown + "".join(f"<p>{escape(line)}</p>" for line in self._notes())


def _formatted(table: pd.DataFrame, places: int | None) -> pd.DataFrame:
    cells = {name: [_cell(name, x, places) for x in table[name]] for name in table.columns}
    return pd.DataFrame(cells, index=table.index)


def _cell(column: str, x: Any, places: int | None) -> str:
    """Counts as they are, p-values to a thousandth, other numbers with four significant digits or some decimal places."""
    if isinstance(x, str):
        return x
    if pd.isna(x):
        return NOTHING
    if column in COUNTS and np.isfinite(x):
        return f"{int(x):,}"
    if column == "p":
        return f"{x:.3f}" if x >= 0.001 else "<0.001"
    if places is not None:
        return f"{x:,.{places}f}"
    return f"{x:,.1f}" if 1e3 <= abs(x) < 1e9 else f"{x:.4g}"


@deferred("Nothing is kept: call assess() again.")
def assess(
    post: Posterior,
    sites: Sites,
    *,
    checks: Sequence[str] | None = None,
    draws: int = DRAWS,
    seed: int = 0,
    progress: bool = True,
) -> Assessment:
    """How well a model fits and predicts, computed by each site from its own records.

    In one process nothing is withheld, however few records a site has.

    Parameters
    ----------
    post : Posterior
    sites : Sites
        From `fedpdmc.sites`, which ``post`` was sampled from.
    checks : sequence of str, optional
        Statistics of the response for posterior predictive checks: mean, sd, zeros, skewness, largest, smallest.
    draws : int
        Draws of the posterior, over all chains.
    seed : int
        Of the replicated responses.
    progress : bool

    Returns
    -------
    Assessment
    """
    public = public_draws(post, draws)
    found, times = [], sites.study.survival_times
    if sites.study.survival and not times:
        times = time_grid(*observed_times(sites.study, sites.tables))
    with showing(progress):
        for i, (name, records) in enumerate(sites.tables.items()):
            step = functools.partial(report, "fit of the records", i + 1, len(sites))
            options = {"checks": checks, "seed": seed + i, "times": times, "step": step}
            found.append(assess_site(sites.study, name, records, public, **options))
    return Assessment(found, prior_pull(sites, public), heterogeneity(post), scores_unknown(post))


@double_precision
def prior_pull(sites: Sites, draws: PublicDraws) -> dict[str, float] | None:
    """The pull of the prior; None for a flat prior."""
    if sites.prior is None:
        return None
    if isinstance(sites.prior, MixturePrior):
        density = -sites.prior.minus_log_density(draws.values)
    else:
        density = -np.asarray(jax.vmap(sites.prior.value)(jnp.asarray(draws.values)))
    return pull(density, draws.reported(sites.study))


@double_precision
def heterogeneity(post: Posterior) -> pd.DataFrame | None:
    """The score test of each site, from what the sites released for the reference; None where that was only a sum.

    At the centre c of the reference a site with gradient g and Hessian H of its own minus log likelihood has under common
    parameters a gradient with covariance ``V = H − H P⁻¹ H``, P the posterior's precision: ``gᵀ V⁺ g`` is about χ² with as
    many degrees of freedom as V has rank.
    """
    names = set(post.settings["sites"]) - {post.settings.get("prior_site")}
    control = {name: part for name, part in (post.reference.control or {}).items() if name in names}
    if len(control) < 2 or any(len(part.point) != len(post.names) or part.order != 2 for part in control.values()):
        return None
    precision = np.linalg.inv(np.asarray(post.cov()))
    rows = {}
    for name, part in control.items():
        hessian = np.asarray(part.quadratic.precision)
        gradient = np.asarray(part.quadratic.gradient(part.point))
        spread = hessian - hessian @ np.linalg.solve(precision, hessian)
        size, axes = np.linalg.eigh((spread + spread.T) / 2)
        kept = size > 1e-8 * max(float(np.abs(hessian).max()), 1e-300)
        score = float(np.sum((axes[:, kept].T @ gradient) ** 2 / size[kept]))
        rows[name] = {"score": score, "df": float(kept.sum()), "p": float(stats.chi2.sf(score, max(kept.sum(), 1)))}
    return pd.DataFrame(rows).T


def scores_unknown(post: Posterior) -> str:
    """Why a run with each site's derivatives has no score test; empty where it has one, or never had the derivatives."""
    made = post.settings.get("reference") in ("laplace", "vb") and post.settings.get("control") == "quadratic"
    if made and not post.reference.name:
        return "not known for a posterior that was read from disk without the state of its run"
    return ""


def compare(models: Mapping[str, tuple[Posterior, Sites]], *, draws: int = DRAWS) -> pd.DataFrame:
    """Models of the same records, by leave-one-out predictive accuracy.

    Each site computes the difference of its own records' log predictive densities. Sums of the differences and of their
    squares leave it, which give the difference and its standard error over all sites.

    Parameters
    ----------
    models : mapping
        From a name to a posterior and the sites that it was sampled from.
    draws : int

    Returns
    -------
    DataFrame
        A row for each model, the best first: elpd, its difference to the best, the standard error of that difference, the
        effective number of parameters, and the worst Pareto k.
    """
    if len(models) < 2:
        raise InputError("models", f"{len(models)} model", "Give at least two, by name.")
    found = {name: _by_record(post, sites, draws) for name, (post, sites) in models.items()}
    sizes = {name: {site: len(one.loo) for site, one in sites.items()} for name, sites in found.items()}
    first = next(iter(sizes.values()))
    for name, size in sizes.items():
        if size != first:
            raise InputError("models", f"{name!r} with other sites or records", "Compare models of the same records.")
    total = {name: sum(one.loo.sum() for one in sites.values()) for name, sites in found.items()}
    best = max(total, key=lambda name: total[name])
    rows = {}
    for name in sorted(total, key=lambda name: -total[name]):
        gaps = [found[name][site].loo - found[best][site].loo for site in first]
        gap, squares = sum(x.sum() for x in gaps), sum(np.sum(x**2) for x in gaps)
        rows[name] = {
            "elpd": total[name],
            "difference": gap,
            "se": 0.0 if name == best else standard_error(gap, squares, sum(first.values())),
            "parameters": sum(np.sum(one.within - one.loo) for one in found[name].values()),
            "worst_k": max(np.nanmax(one.k) for one in found[name].values()),
        }
    return pd.DataFrame(rows).T


def _by_record(post: Posterior, sites: Sites, draws: int):
    """Pointwise accuracy of every site's records: what stays at the sites."""
    public = public_draws(post, draws)
    found = {}
    # A response in other units has a density in other units.
    response = sites.study.columns[sites.study.design.response_name]
    units = np.log(response.scale) if response.type == "number" else 0.0
    for name, records in sites.tables.items():
        outcome = Outcome(sites.study, public.values, name)
        whole = pass_over(outcome, records, public.efficiency, step=lambda share: check()).records
        assert whole is not None
        found[name] = whole._replace(loo=whole.loo - units, waic=whole.waic - units, within=whole.within - units)
    return found
