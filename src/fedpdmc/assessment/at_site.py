"""A site's assessment of its own records under public draws, and the part of it that leaves the site."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import logsumexp

from fedpdmc._jax.precision import double_precision
from fedpdmc.assessment.loo import HIGH_K, LOO, Pass, pareto_smoothed, pass_over, totals
from fedpdmc.assessment.site_survival import MODEL, STEP, site_survival
from fedpdmc.console.interrupts import check
from fedpdmc.errors import InputError
from fedpdmc.models.families import EVENTS, FAMILIES, LEVELS
from fedpdmc.models.user_function import scalars
from fedpdmc.study.record_shares import effective_number, largest_leverage, share_of_leverage
from fedpdmc.study.schema import ASSESSMENTS
from fedpdmc.study.study_response import Outcome
from fedpdmc.validation import LEVEL

if TYPE_CHECKING:
    import pandas as pd

    from fedpdmc.results.posterior import Posterior
    from fedpdmc.study.contract import Study

FORMAT = 1
# Draws of the posterior, over all chains, that records are assessed under.
DRAWS = 2000
# Records by draws above which a site takes every second draw, or every third and so on, but at least so many draws.
# With 1000 the Monte Carlo sd of a p-value of 0.01 is 0.0045, and that of elpd √(d/2)/√1000 at most.
MOST_NUMBERS, LEAST_DRAWS = 50_000_000, 1000
# Decimal places of released numbers.
DIGITS = 4
MOST_STEPS = 10_000  # of a survival curve in a file
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
        The site's influence on each reported parameter (`fedpdmc.assessment.at_site`).
    survival : dict or None
        The Kaplan-Meier estimate and the model's average survival (`fedpdmc.assessment.site_survival`).
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
    survival: dict[str, list[float]] | None = None
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
        and (told.survival is None or _curves(told.survival))
    )


def _curves(told: Any) -> bool:
    """Whether these are steps of a survival curve: increasing times, and survival between 0 and 1."""
    if not isinstance(told, dict) or set(told) not in ({*STEP}, {*STEP, *MODEL}):
        return False
    lists = [value for value in told.values() if isinstance(value, list) and len(value) < MOST_STEPS]
    if len({len(value) for value in lists}) != 1 or len(lists) < len(told):
        return False
    if not all(isinstance(x, float) and 0 <= x < np.inf for value in lists for x in value):
        return False
    shares = [x for key in ("survival", *MODEL) for x in told.get(key, [])]
    return all(a < b for a, b in itertools.pairwise([0.0, *told["time"]])) and max(shares, default=0.0) <= 1


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
    times: Sequence[float] = (),
    step: Callable[[float], None] = lambda share: check(),
) -> SiteAssessment:
    """Assess a site's records under draws of the posterior.

    Parameters
    ----------
    study : Study
    site : str
    records : DataFrame
        As `fedpdmc.study.read_records` gives them.
    draws : PublicDraws
    what : sequence of {"loo", "checks", "influence", "survival"}
    checks : sequence of str, optional
        Statistics of posterior predictive checks; the usual ones of the family if None.
    values : bool
        Whether checks include the observed summary with its p-value.
    seed : int
        Of the replicated responses.
    least_records : int
    controlled : bool
        Whether the draws come from someone who is not to learn of single records: then ``least_records`` is the least
        number of records, and the least effective number in whatever is released (`fedpdmc.assessment.at_site`).
    times : sequence of float
        Of survival curves; if empty those of the contract.
    step : callable
        Called between two blocks of records with the share of the work that is done.

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
    if controlled and len(records) < least_records:
        raise InputError(
            f"records of {site!r}",
            f"{len(records)} records",
            f"At least {least_records} are needed: nothing is released.",
        )
    digest = draws.digest
    every = max(min(len(records) * len(draws.values) // MOST_NUMBERS, len(draws.values) // LEAST_DRAWS), 1)
    draws = draws._replace(values=draws.values[::every], efficiency=min(every * draws.efficiency, 1.0))
    outcome = Outcome(study, draws.values, site)
    facts: dict[str, Any] = {}
    seen = pass_over(outcome, records, draws.efficiency, smooth="loo" in what, step=lambda x: step(x / 2))
    if controlled:
        ReleaseControl(site, least_records).check(seen)
    if seen.records is not None:
        facts["loo"] = totals(seen.records)
    if "checks" in what:
        names, rng = check_statistics(checks, study.family), np.random.default_rng(seed)
        facts["checks"] = predictive_checks(
            outcome, records, names, rng, values=values, step=lambda x: step((1 + x) / 2)
        )
    if "influence" in what:
        reported = draws.reported(study)
        facts["pull"] = pull(seen.total, reported)
        facts["without"] = without(seen.total, reported, draws.efficiency)
    if "survival" in what and study.survival and (times := times or study.survival_times):
        facts["survival"] = site_survival(outcome, records, times, LEVEL, least_records if controlled else None, step)
    return SiteAssessment(site, study.name, study.digest.hex(), digest, len(records), **facts)


def same_draws(found: Sequence[SiteAssessment]) -> None:
    """Check that all sites assessed the same study under the same draws, each once."""
    if len({(one.contract, one.draws) for one in found}) > 1:
        raise InputError("assessments", "different contracts or draws", "Give those of one study and one posterior.")
    sites = [one.site for one in found]
    if len(set(sites)) != len(sites):
        raise InputError("assessments", "a site twice", "Give one of each site.")


Draws = Mapping[str, np.ndarray]


def pull(log_likelihood: np.ndarray, draws: Draws) -> dict[str, float]:
    """Derivative of each posterior mean with respect to log α, in posterior sd, for the likelihood raised to the power α.

    ``d E_α[x] / d log α = Cov(x, log L)`` at α = 1. Of independent parts of the likelihood the derivatives add up: the sum
    over the sites is that of the whole likelihood, and with that of the prior nearly zero, since together they temper the
    posterior, which moves its mean by minus half its skewness.
    """
    centred = log_likelihood - log_likelihood.mean()
    return {name: float(np.mean((x - x.mean()) * centred) / x.std()) for name, x in draws.items()}


def without(log_likelihood: np.ndarray, draws: Draws, efficiency: float) -> dict[str, Any]:
    """Mean and sd of the posterior without these records, by importance weights ``1/L``, and Pareto k of the weights.

    Above a k of `HIGH_K` an average with these weights is not near its expectation for any practical number of draws:
    mean and sd are NaN.
    """
    weights, shape = pareto_smoothed(-log_likelihood[None], efficiency)
    k = float(np.nan_to_num(shape[0], nan=np.inf, posinf=np.inf))
    if k > HIGH_K:
        unknown = dict.fromkeys(draws, np.nan)
        return {"mean": unknown, "sd": dict(unknown), "k": k}
    share = np.exp(weights[0] - logsumexp(weights[0]))
    mean = {name: float(share @ x) for name, x in draws.items()}
    sd = {name: float(np.sqrt(share @ (x - mean[name]) ** 2)) for name, x in draws.items()}
    return {"mean": mean, "sd": sd, "k": k}


# Disclosure control of assessments.
#
# The attacker is a coordinator that sends a made-up posterior: draws far out, where the likelihood is that of one
# record. Everything that an assessment releases depends on the changes ``ℓ_i(s) − mean_s ℓ_i`` of the log likelihoods from
# draw to draw, and of sums over records. So at every draw the changes, and for every parameter the covariances with it, must
# be carried by a number of effective records, ``(Σ w)²/Σ w²``; the same holds for sums of left-out densities. Sums that
# outliers dominate in honest posteriors too (squares, the effective number of parameters) have a limit on one record's
# share.

# The largest share of one record, as in a policy.
LARGEST_SHARE = 0.75


class ReleaseControl:
    """Refuses what few records carry.

    Parameters
    ----------
    site : str
        For errors.
    least_records : int
        The least effective number.
    """

    def __init__(self, site: str, least_records: int):
        self._site, self._least = site, least_records

    def check(self, seen: Pass) -> None:
        """Refuse a release that too few records carry.

        Raises
        ------
        InputError
        """
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            least = np.min(np.where(seen.squares == 0, np.inf, seen.size**2 / seen.squares))
        self._number("the change of the likelihood from draw to draw", least)
        self._number("the covariance with a parameter", np.min(effective_number(np.abs(seen.pulls))))
        if np.isfinite(seen.pulls).all():
            self._share("covariances with the parameters", share_of_leverage(largest_leverage(seen.pulls)))
        loo = seen.records
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


# What statistics are made of, added up over records with weights w; c is the observed mean.
PARTS: dict[str, Callable[[np.ndarray, float, np.ndarray], np.ndarray]] = {
    "sum": lambda y, c, w: (w * y).sum(0),
    "squares": lambda y, c, w: (w * (y - c) ** 2).sum(0),
    "cubes": lambda y, c, w: (w * (y - c) ** 3).sum(0),
    "zeros": lambda y, c, w: (w * (y == 0)).sum(0),
    "largest": lambda y, c, w: y.max(0),
    "smallest": lambda y, c, w: y.min(0),
}


def _variance(n, c, total, squares):
    return np.maximum(squares / n - (total / n - c) ** 2, 0.0)


def _skewness(n, c, total, squares, cubes):
    shift = total / n - c
    return (cubes / n - 3 * shift * squares / n + 2 * shift**3) / np.maximum(
        _variance(n, c, total, squares), 1e-300
    ) ** 1.5


def _share(n, c, count):
    return count / n


# The parts of each statistic, and how it is made of the sum of weights, c and the parts.
STATISTICS: dict[str, tuple[tuple[str, ...], Callable[..., np.ndarray]]] = {
    "mean": (("sum",), lambda n, c, total: total / n),
    "sd": (("sum", "squares"), lambda *of: np.sqrt(_variance(*of))),
    "zeros": (("zeros",), _share),
    "largest": (("largest",), lambda n, c, largest: largest),
    "smallest": (("smallest",), lambda n, c, smallest: smallest),
    "skewness": (("sum", "squares", "cubes"), _skewness),
}
# Sets of censoring times, which replicates take in turn.
CENSORINGS = 50
# Extreme values are those of single records: they stay at the site.
OF_ONE_RECORD = ("largest", "smallest")


def check_statistics(wanted: Sequence[str] | None, family: str) -> tuple[str, ...]:
    """The names of the statistics, or the usual ones."""
    usual = FAMILIES[family].checks
    names = usual if wanted is None else tuple(wanted)
    known = (LEVELS,) if LEVELS in usual else (*STATISTICS, *((EVENTS,) if EVENTS in usual else ()))
    for name in names:
        if name not in known:
            raise InputError("checks", repr(name), f"For {family} give some of {', '.join(known)}.")
    return names


def predictive_checks(
    outcome: Outcome,
    records: pd.DataFrame,
    names: Sequence[str],
    rng: np.random.Generator,
    *,
    values: bool,
    step: Callable[[float], None],
) -> Mapping[str, Mapping[str, float]]:
    """The two-sided p-value of each statistic, and with ``values`` the observed and the replicated one.

    p is twice the smaller of the shares of replicates that are at most, and at least, the observed value.
    """
    n, observed = len(records), outcome.observed(records)
    weights = outcome.study.record_weights(records)[:, None]
    weights = weights if weights.any() else np.ones_like(weights)
    centre, died = float(observed.mean()), outcome.own(records).get("died")
    limit = None if died is None else censoring_times(observed[:, 0], died[:, 0], rng, CENSORINGS)
    names = [name for name in names if name != EVENTS or died is not None]
    turn = np.arange(len(outcome.draws)) % CENSORINGS
    seen = _sums(outcome, names, observed, centre, died, weights)
    expected, start = {}, 0
    for block in outcome.blocks(records):
        step(start / n)
        replicated, events = outcome.draw(block, rng), None
        here, start = slice(start, start + len(block)), start + len(block)
        if limit is not None:
            until = limit[here][:, turn]
            events, replicated = replicated <= until, np.minimum(replicated, until)
        for part, value in _sums(outcome, names, replicated, centre, events, weights[here]).items():
            add = {"largest": np.maximum, "smallest": np.minimum}.get(part, np.add)
            expected[part] = add(expected[part], value) if part in expected else value
    found = {}
    for name, (parts, of) in _statistics(outcome, names).items():
        one, many = (of(weights.sum(), centre, *(sums[part] for part in parts)) for sums in (seen, expected))
        tails = np.mean(many <= one[0]), np.mean(many >= one[0])
        told = {"p": float(min(1.0, 2 * min(tails)))}
        if values and name not in OF_ONE_RECORD:
            told |= {"observed": float(one[0]), "replicated": float(many.mean()), "sd": float(many.std())}
        found[name] = told
    return found


def _statistics(outcome: Outcome, names: Sequence[str]) -> dict[str, tuple[tuple[str, ...], Callable[..., np.ndarray]]]:
    """The statistics by the names that are shown: of levels, the share of each."""
    levels = {f"share of {level}": ((str(code),), _share) for code, level in enumerate(outcome.response.levels)}
    found = {}
    for name in names:
        found |= levels if name == LEVELS else {name: STATISTICS.get(name, ((EVENTS,), _share))}
    return found


def _sums(
    outcome: Outcome, names: Sequence[str], y: np.ndarray, centre: float, events: np.ndarray | None, w: np.ndarray
) -> dict[str, np.ndarray]:
    """The parts of the statistics, of records (n, S)."""
    found = {}
    for part in {part for parts, _ in _statistics(outcome, names).values() for part in parts}:
        if part in PARTS:
            found[part] = PARTS[part](y, centre, w)
        else:
            found[part] = (w * (np.asarray(events) > 0 if part == EVENTS else y == int(part))).sum(0)
    return found


def censoring_times(time: np.ndarray, died: np.ndarray, rng: np.random.Generator, sets: int) -> np.ndarray:
    """When each record would have been censored: known where it was, else drawn from the law of censoring after its event.

    So many sets of them, of shape (n, sets).

    That law is the Kaplan-Meier estimate in which censoring is the event; beyond the last time at which somebody was
    censored, no response is.
    """
    order, gone = np.unique(time[died == 0], return_counts=True)
    at_risk = len(time) - np.searchsorted(np.sort(time), order, side="left")
    left = np.cumprod(1 - gone / np.maximum(at_risk, 1))
    found, some = np.repeat(time[:, None].astype(float), sets, 1), np.flatnonzero(died > 0)
    later = np.searchsorted(order, time[some], side="left")[:, None]
    level = np.append(1.0, left)[later] * rng.random((len(some), sets))
    # The first of the falling values that is not above the level.
    reached = np.maximum(np.searchsorted(-left, -level, side="left"), later)
    found[some] = np.append(order, np.inf)[reached]
    return found
