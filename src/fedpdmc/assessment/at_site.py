"""A site's assessment of its own records under public draws, and the part of it that leaves the site."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedpdmc._jax.precision import double_precision
from fedpdmc.assessment.disclosure import ReleaseControl
from fedpdmc.assessment.influence import pull, without
from fedpdmc.assessment.loo import LOO, joined, pointwise, totals
from fedpdmc.assessment.predictive_checks import check_statistics, predictive_checks
from fedpdmc.assessment.study_response import Outcome
from fedpdmc.errors import InputError
from fedpdmc.models.variables import scalars
from fedpdmc.study.contract_keys import ASSESSMENTS

if TYPE_CHECKING:
    import pandas as pd

    from fedpdmc.results.posterior import Posterior
    from fedpdmc.study.contract import Study

FORMAT = 1
# Draws of the posterior, over all chains, that records are assessed under.
DRAWS = 2000
# Decimal places of released numbers.
DIGITS = 4
# Fewer records than this and a sum over them is close to the value of one.
LEAST_RECORDS = 10


class PublicDraws(NamedTuple):
    """Draws that everybody has.

    Attributes
    ----------
    values : array of shape (S, d)
    names : tuple of str
        The parameters' names.
    efficiency : float
        Effective draws as a share of S.
    """

    values: np.ndarray
    names: tuple[str, ...]
    efficiency: float

    @double_precision
    def reported(self, study: Study) -> dict[str, np.ndarray]:
        """The variables that are reported, each of shape (S,): with centring and scaling undone if the study says so."""
        if study.naming is None or study.naming.constrain is None:
            return dict(zip(self.names, self.values.T, strict=True))
        found = jax.vmap(study.naming.constrain)(jnp.asarray(self.values))
        # JAX sorts a dict.
        order = [*(name for name in self.names if name in found), *(name for name in found if name not in self.names)]
        values = scalars({name: np.asarray(found[name])[None] for name in order})
        return {name: value[0] for name, value in values.items()}

    @property
    def digest(self) -> str:
        """A hash by which sites and coordinator know that they used the same draws."""
        return hashlib.sha256(np.ascontiguousarray(self.values).tobytes()).hexdigest()


def public_draws(post: Posterior, draws: int = DRAWS) -> PublicDraws:
    """Draws of a posterior in the coordinates that were sampled.

    Raises
    ------
    InputError
        They are not finite: the posterior is not a genuine one.
    """
    each = min(max(-(-draws // post.chains), 2), post.most_draws)
    values = post.draws(each).reshape(-1, len(post.names))
    if not np.isfinite(values).all() or not np.isfinite(post.cov()).all():
        raise InputError("posterior", "draws that are not finite", "Give the posterior as the coordinator saved it.")
    efficiency = min(post.ess().values()) / len(values)
    return PublicDraws(values, tuple(post.names), float(np.clip(efficiency, 1e-3, 1.0)))


@dataclass(frozen=True)
class SiteAssessment:
    """All that leaves a site.

    Attributes
    ----------
    site, study, contract, draws : str
        Names, and hashes of the contract and of the draws.
    records : int
    loo : dict or None
        Sums over the records (`fedpdmc.assessment.loo.totals`).
    checks : dict or None
        p-values of posterior predictive checks by statistic, with the observed values if that was agreed.
    pull, without : dict or None
        The site's influence on each reported parameter (`fedpdmc.assessment.influence`).
    """

    site: str
    study: str
    contract: str
    draws: str
    records: int
    loo: dict[str, float] | None = None
    checks: dict[str, dict[str, float]] | None = None
    pull: dict[str, float] | None = None
    without: dict[str, Any] | None = None
    format: int = field(default=FORMAT)

    def write(self, path: str | Path) -> Path:
        """Write it as JSON, which can be read before it is sent, with few digits."""
        path, told = Path(path), _rounded(asdict(self))
        if told["without"] is not None:
            told["without"] = _nan_as_null(told["without"])
        path.write_text(json.dumps(told, indent=2) + "\n")
        return path

    @classmethod
    def read(cls, path: str | Path) -> SiteAssessment:
        """Read what a site has written.

        Raises
        ------
        InputError
        """
        remedy = "Give a file that `fedpdmc assess` has written."
        try:
            told = json.loads(Path(path).read_text())
            found = cls(**told | {"without": _null_as_nan(told.get("without"))})
        except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
            raise InputError("assessment", f"{path}: {str(error)[:200]}", remedy) from error
        if found.format != FORMAT:
            raise InputError("assessment", f"format {found.format!r}"[:80], f"This version of fedpdmc reads {FORMAT}.")
        texts = (found.site, found.study, found.contract, found.draws)
        good = all(isinstance(text, str) and text.isprintable() for text in texts) and type(found.records) is int
        if not good or not _is_assessment(found):
            raise InputError("assessment", f"{path}: a value of another kind than it should be", remedy)
        return found


def _is_assessment(told: SiteAssessment) -> bool:
    """Whether the parts of a file from someone else are what their names say."""
    without = told.without
    return (
        (told.loo is None or _numbers(told.loo) and set(told.loo) == LOO)
        and (
            told.checks is None
            or isinstance(told.checks, dict)
            and all(_numbers(one) and "p" in one for one in told.checks.values())
        )
        and (told.pull is None or _numbers(told.pull))
        and (
            without is None
            or isinstance(without, dict)
            and set(without) == {"mean", "sd", "k"}
            and _numbers(without["mean"])
            and _numbers(without["sd"])
            and isinstance(without["k"], float)
        )
    )


def _nan_as_null(without: dict[str, Any]) -> dict[str, Any]:
    """Means and sds that are not known, as JSON has them."""
    known = {part: {name: None if np.isnan(x) else x for name, x in without[part].items()} for part in ("mean", "sd")}
    return without | known


def _null_as_nan(without: Any) -> Any:
    """The means and sds of a file, NaN where it has null."""
    if not isinstance(without, dict):
        return without
    known = {
        part: {name: np.nan if x is None else x for name, x in without[part].items()}
        for part in ("mean", "sd")
        if isinstance(without.get(part), dict)
    }
    return without | known


def _numbers(told: Any) -> bool:
    """Whether this is a dict of numbers by name."""
    return isinstance(told, dict) and all(
        isinstance(value, float) and isinstance(key, str) and key.isprintable() for key, value in told.items()
    )


def _rounded(told: Any, digits: int = DIGITS) -> Any:
    """Numbers with the digits that are released; Pareto k is that of one record and has one."""
    if isinstance(told, dict):
        return {key: _rounded(value, 1 if key in ("k", "worst_k") else digits) for key, value in told.items()}
    return round(told, digits) if isinstance(told, float) else told


def assess_site(
    study: Study,
    site: str,
    records: pd.DataFrame,
    draws: PublicDraws,
    *,
    what: Sequence[str] = ASSESSMENTS,
    checks: Sequence[str] | None = None,
    values: bool = True,
    seed: int = 0,
    least_records: int = LEAST_RECORDS,
    controlled: bool = False,
) -> SiteAssessment:
    """Assess a site's records under draws of the posterior.

    Parameters
    ----------
    study : Study
    site : str
    records : DataFrame
        As `fedpdmc.study.read_records` gives them.
    draws : PublicDraws
    what : sequence of {"loo", "checks", "influence"}
    checks : sequence of str, optional
        Statistics of posterior predictive checks; the usual ones of the family if None.
    values : bool
        Whether checks include the observed summary with its p-value.
    seed : int
        Of the replicated responses.
    least_records : int
    controlled : bool
        Whether the draws come from someone who is not to learn of single records: then ``least_records`` is also the least
        effective number of records in whatever is released (`fedpdmc.assessment.disclosure`).

    Raises
    ------
    InputError
        Other parameters than the study's, or too few records.
    """
    if draws.names != study.names:
        raise InputError(
            "posterior", f"parameters {', '.join(draws.names)}", f"The study has {', '.join(study.names)}."
        )
    if study.coordinates(site) is not None:
        raise InputError("study", "a table [coordinates]", "Assessments need records that depend on all parameters.")
    if len(records) < least_records:
        raise InputError(
            f"records of {site!r}",
            f"{len(records)} records",
            f"At least {least_records} are needed: nothing is released.",
        )
    outcome = Outcome(study, draws.values, site)
    facts: dict[str, Any] = {}
    total, parts = np.zeros(len(draws.values)), []
    control = ReleaseControl(site, draws.values, least_records) if controlled else None
    for block in outcome.blocks(records):
        density = outcome.log_density(block)
        total += density.sum(0)
        if control is not None:
            control.add(density)
        if "loo" in what:
            parts.append(pointwise(density, draws.efficiency))
    loo = joined(parts) if parts else None
    if control is not None:
        control.check(loo)
    if loo is not None:
        facts["loo"] = totals(loo)
    if "checks" in what:
        names, rng = check_statistics(checks, study.family), np.random.default_rng(seed)
        facts["checks"] = predictive_checks(outcome, records, names, rng, values=values)
    if "influence" in what:
        reported = draws.reported(study)
        facts["pull"] = pull(total, reported)
        facts["without"] = without(total, reported, draws.efficiency)
    return SiteAssessment(site, study.name, study.digest.hex(), draws.digest, len(records), **facts)


def same_draws(found: Sequence[SiteAssessment]) -> None:
    """Check that all sites assessed the same study under the same draws, each once."""
    if len({(one.contract, one.draws) for one in found}) > 1:
        raise InputError("assessments", "different contracts or draws", "Give those of one study and one posterior.")
    sites = [one.site for one in found]
    if len(set(sites)) != len(sites):
        raise InputError("assessments", "a site twice", "Give one of each site.")
