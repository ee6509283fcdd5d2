"""The sites' assessments together: predictive accuracy, checks, sensitivity and heterogeneity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    PublicDraws,
    SiteAssessment,
    assess_site,
    public_draws,
    same_draws,
)
from fedpdmc.assessment.influence import pull
from fedpdmc.assessment.loo import HIGH_K, joined, pointwise, standard_error
from fedpdmc.assessment.study_response import Outcome
from fedpdmc.errors import InputError
from fedpdmc.models.mixture_prior import MixturePrior

if TYPE_CHECKING:
    from fedpdmc.results.posterior import Posterior
    from fedpdmc.study.sites_from_table import Sites

# A pull of the prior of this many posterior sd means that doubling its weight moves the mean by 0.2 sd or more.
NOTABLE = 0.3
# Columns that are counts.
COUNTS = ("records", "high_k", "df")
# In place of a number that is not known, and why a mean without a site is not.
NOTHING, TOO_FAR = "–", "too far from the posterior of all sites: fit without it"


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
    """

    def __init__(
        self,
        sites: Sequence[SiteAssessment],
        prior_pull: Mapping[str, float] | None = None,
        scores: pd.DataFrame | None = None,
        scores_unknown: str = "",
    ):
        same_draws(sites)
        self.sites, self.prior_pull, self.scores = tuple(sites), prior_pull, scores
        self.scores_unknown = scores_unknown

    @property
    def loo(self) -> pd.DataFrame:
        """Predictive accuracy by site and in all: elpd, its standard error, effective parameters, WAIC, Pareto k."""
        told = {one.site: one.loo for one in self.sites if one.loo is not None}
        if not told:
            raise InputError("loo", "no site that reported it", "Agree on it: [releases] assessment = ['loo'].")
        rows = {site: _accuracy(one) for site, one in told.items()}
        sums = {key: sum(one[key] for one in told.values()) for key in next(iter(told.values()))}
        rows["all"] = _accuracy(sums | {"worst_k": max(one["worst_k"] for one in told.values())})
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
        """The pull of the prior and of each site on each parameter, in posterior sd (`influence.pull`)."""
        rows = {} if self.prior_pull is None else {"prior": self.prior_pull}
        rows |= {one.site: one.pull for one in self.sites if one.pull is not None}
        return pd.DataFrame(rows).T

    @property
    def sensitivity(self) -> pd.DataFrame:
        """How each mean responds when prior or likelihood is raised to a power, in posterior sd, and what that means.

        The likelihood's response is the sum of the sites' pulls (`influence.pull`). If both are large with opposite signs,
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
        rows = {
            one.site: one.without["mean"] | {"pareto_k": one.without["k"]}
            for one in self.sites
            if one.without is not None
        }
        return pd.DataFrame(rows).T

    def _without_shown(self) -> pd.DataFrame:
        """`without` with a note on sites whose means are not known."""
        told = {one.site: one.without for one in self.sites if one.without is not None}
        notes = {site: _far(one["k"]) for site, one in told.items() if any(map(np.isnan, one["mean"].values()))}
        shown = _formatted(self.without)
        return shown.assign(note=[notes.get(site, "") for site in told]) if notes else shown

    @property
    def unlike(self) -> list[str]:
        """Sites that do not share the parameters of the others, by the score test."""
        if self.scores is None:
            return []
        return [site for site, p in self.scores["p"].to_dict().items() if p < 0.01 / len(self.scores)]

    def misfit(self) -> list[str]:
        """What the model does not fit, in a few words; empty if nothing was found."""
        found = [f"{', '.join(self.unlike)} do not share the parameters of the other sites"] if self.unlike else []
        failed = {one.site: [k for k, v in (one.checks or {}).items() if v["p"] < 0.01] for one in self.sites}
        words = [f"{site}: {', '.join(names)}" for site, names in failed.items() if names]
        if words:
            count = sum(map(len, failed.values()))
            found.append(f"{count} predictive checks have p < 0.01 ({'; '.join(words)})")
        return found

    def warnings(self) -> list[str]:
        """Remarkable findings, as sentences."""
        found = []
        for one in self.sites:
            if one.loo is not None and one.loo["worst_k"] > HIGH_K:
                found.append(
                    f"{one.site}: {one.loo['high_k']:.0f} records have Pareto k above {HIGH_K} (worst "
                    f"{one.loo['worst_k']:.2f}): the estimate of their left-out density is not to be trusted."
                )
            for name, numbers in (one.checks or {}).items():
                if numbers["p"] < 0.01:
                    found.append(
                        f"{one.site}: the {name} of the response is not one that the model makes (p = {numbers['p']:.2g})."
                    )
        if self.prior_pull is not None:
            strong = [name for name, x in self.prior_pull.items() if abs(x) > NOTABLE]
            if strong:
                found.append(f"the prior matters for {', '.join(strong)}: see .sensitivity.")
        if self.unlike:
            found.append(f"{', '.join(self.unlike)}: does not share the parameters of the other sites: see .scores.")
        return found

    def __repr__(self) -> str:
        parts = [f"Assessment of {len(self.sites)} sites"]
        if any(one.loo is not None for one in self.sites):
            parts += ["", "predictive accuracy (elpd: larger is better)", self.loo.round(2).to_string()]
        if len(self.checks):
            parts += ["", "posterior predictive checks", _formatted(self.checks).to_string()]
        if len(self.pull):
            parts += ["", "pull on each parameter, in posterior sd", self.pull.round(2).to_string()]
        if len(self.sensitivity):
            parts += ["", "sensitivity to the power of prior and likelihood", self.sensitivity.round(2).to_string()]
        if len(self.without):
            parts += ["", "posterior mean without each site", self._without_shown().to_string()]
        if self.scores is not None:
            parts += ["", "heterogeneity: score test of each site", _formatted(self.scores).to_string()]
        elif self.scores_unknown:
            parts += ["", f"heterogeneity: {self.scores_unknown}"]
        return "\n".join([*parts, "", *(self.warnings() or ["nothing unusual was found"])])

    def _repr_html_(self) -> str:
        tables = [("predictive accuracy", self.loo)] if any(one.loo is not None for one in self.sites) else []
        tables += [("posterior predictive checks", self.checks), ("pull, in posterior sd", self.pull)]
        tables += [("sensitivity to the power of prior and likelihood, in posterior sd", self.sensitivity)]
        tables += [("share of all pulls", self.shares), ("posterior mean without each site", self.without)]
        if self.scores is not None:
            tables.append(("heterogeneity", self.scores))
        shown = "".join(f"<h4>{title}</h4>{_html(table)}" for title, table in tables if len(table))
        if self.without.isna().any(axis=None):
            shown += f"<p>{NOTHING}: {TOO_FAR}.</p>"
        unknown = [f"heterogeneity: {self.scores_unknown}"] if self.scores is None and self.scores_unknown else []
        return shown + "".join(f"<p>{escape(line)}</p>" for line in unknown + self.warnings())


def _html(table: pd.DataFrame) -> str:
    """A table as it is read."""
    if table.index.nlevels > 1:
        table = table.reset_index().set_index("site")
    shown = _formatted(table).rename_axis(index=None)
    return f'<div style="overflow-x: auto">{shown.to_html(border=0)}</div>'


def _far(k: float) -> str:
    return f"Pareto k {k:.3g}: too far from the posterior of all, fit without this site to know"


def _formatted(table: pd.DataFrame) -> pd.DataFrame:
    """Counts as they are, p-values to a thousandth, other numbers with four significant digits."""
    return pd.DataFrame({name: [_cell(name, x) for x in table[name]] for name in table.columns}, index=table.index)


def _cell(column: str, x: Any) -> str:
    if isinstance(x, str):
        return x
    if pd.isna(x):
        return NOTHING
    if column in COUNTS and np.isfinite(x):
        return f"{int(x):,}"
    if column == "p":
        return f"{x:.3f}" if x >= 0.001 else "<0.001"
    return f"{x:,.1f}" if 1e3 <= abs(x) < 1e9 else f"{x:.4g}"


def _accuracy(told: Mapping[str, float]) -> dict[str, float]:
    return {
        "records": told["records"],
        "elpd": told["elpd"],
        "se": standard_error(told["elpd"], told["squares"], told["records"]),
        "parameters": told["parameters"],
        "waic": told["waic"],
        "worst_k": told["worst_k"],
        "high_k": told["high_k"],
    }


def assess(
    post: Posterior,
    sites: Sites,
    *,
    checks: Sequence[str] | None = None,
    draws: int = DRAWS,
    seed: int = 0,
) -> Assessment:
    """How well a model fits and predicts, computed by each site from its own records.

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

    Returns
    -------
    Assessment
    """
    public = public_draws(post, draws)
    found = [
        assess_site(sites.study, name, records, public, checks=checks, seed=seed + i)
        for i, (name, records) in enumerate(sites.tables.items())
    ]
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
            "worst_k": max(one.k.max() for one in found[name].values()),
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
        parts = [pointwise(outcome.log_density(block), public.efficiency) for block in outcome.blocks(records)]
        whole = joined(parts)
        found[name] = whole._replace(loo=whole.loo - units, waic=whole.waic - units, within=whole.within - units)
    return found
