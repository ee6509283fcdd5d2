"""What a site works out of its own records and public draws, and what of it leaves the site."""

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
from fedpdmc.assessment.checks import check_statistics, predictive_checks
from fedpdmc.assessment.influence import pull, without
from fedpdmc.assessment.loo import pointwise, totals
from fedpdmc.assessment.outcome import Outcome
from fedpdmc.errors import InputError
from fedpdmc.study.contract_tables import ASSESSMENTS

if TYPE_CHECKING:
    import pandas as pd

    from fedpdmc.results.posterior import Posterior
    from fedpdmc.study.contract import Study

FORMAT = 1
# Draws of the posterior, over all chains, that records are assessed under.
DRAWS = 2000
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
        return {name: np.asarray(found[name]) for name in order}

    @property
    def digest(self) -> str:
        """A hash by which sites and coordinator know that they used the same draws."""
        return hashlib.sha256(np.ascontiguousarray(self.values).tobytes()).hexdigest()


def public_draws(post: Posterior, draws: int = DRAWS) -> PublicDraws:
    """Draws of a posterior in the coordinates that were sampled."""
    each = min(max(-(-draws // post.chains), 2), post.most_draws)
    values = post.draws(each).reshape(-1, len(post.names))
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
        p-values of posterior predictive checks by statistic, and what was observed if that was agreed.
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
        """Write it as JSON, which can be read before it is sent."""
        path = Path(path)
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")
        return path

    @classmethod
    def read(cls, path: str | Path) -> SiteAssessment:
        """Read what a site has written.

        Raises
        ------
        InputError
        """
        try:
            told = json.loads(Path(path).read_text())
            found = cls(**told)
        except (OSError, ValueError, TypeError) as error:
            raise InputError(
                "assessment", f"{path}: {error}", "Give a file that `fedpdmc assess` has written."
            ) from error
        if found.format != FORMAT:
            raise InputError("assessment", f"format {found.format}", f"This version of fedpdmc reads {FORMAT}.")
        return found


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
        Whether checks tell the observed summary beside its p-value.
    seed : int
        Of the replicated responses.
    least_records : int

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
    outcome = Outcome(study, draws.values)
    facts: dict[str, Any] = {}
    total, parts = np.zeros(len(draws.values)), []
    for block in outcome.blocks(records):
        density = outcome.log_density(block)
        total += density.sum(0)
        if "loo" in what:
            parts.append(pointwise(density, draws.efficiency))
    if "loo" in what:
        facts["loo"] = totals(parts)
    if "checks" in what:
        names, rng = check_statistics(checks, study.family), np.random.default_rng(seed)
        facts["checks"] = predictive_checks(outcome, records, names, rng, values=values)
    if "influence" in what:
        reported = draws.reported(study)
        facts["pull"] = pull(total, reported)
        facts["without"] = without(total, reported, draws.efficiency)
    return SiteAssessment(site, study.name, study.digest.hex(), draws.digest, len(records), **facts)


def same_draws(found: Sequence[SiteAssessment]) -> None:
    """That sites assessed the same study under the same draws, each once."""
    if len({(one.contract, one.draws) for one in found}) > 1:
        raise InputError("assessments", "different contracts or draws", "Give those of one study and one posterior.")
    sites = [one.site for one in found]
    if len(set(sites)) != len(sites):
        raise InputError("assessments", "a site twice", "Give one of each site.")
