"""A site's assessment of its own records under public draws, and the part of it that leaves the site."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from scipy.special import logsumexp

from fedpdmc._jax.precision import double_precision
from fedpdmc.assessment.loo import HIGH_K, LOO, Pass, pareto_smoothed, pass_over, totals
from fedpdmc.console.interrupts import check
from fedpdmc.errors import InputError
from fedpdmc.models.families import EVENTS, FAMILIES, LEVELS
from fedpdmc.models.user_function import scalars
from fedpdmc.study.record_shares import effective_number, largest_leverage, share_of_leverage
from fedpdmc.study.schema import ASSESSMENTS
from fedpdmc.study.study_response import Outcome
from fedpdmc.validation import LEVEL, is_plain

if TYPE_CHECKING:
    import pandas as pd

    from fedpdmc.results.posterior import Posterior
    from fedpdmc.study.contract import Study

FORMAT = 1
# What a step of a survival curve is: its end, numbers at risk at its start, of events and of censored records, and survival
# at its end.
STEP = ("time", "at_risk", "events", "censored", "survival")
# The model's average survival at the end of each step, and its interval.
MODEL = ("model", "low", "high")
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
    """Draws (S, d) of the parameters that everybody has, and the share of them that is effective."""

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


def draws_of_each(post: Posterior, draws: int) -> int:
    """Draws of each chain for so many of all."""
    return min(max(-(-draws // post.chains), 2), post.most_draws)


def public_draws(post: Posterior, draws: int = DRAWS) -> PublicDraws:
    """Draws of a posterior in the coordinates that were sampled.

    Raises
    ------
    InputError
        They are not finite: the posterior is not a genuine one.
    """
    values = post.draws(draws_of_each(post, draws)).reshape(-1, len(post.names))
    if not np.isfinite(values).all() or not np.isfinite(post.cov()).all():
        raise InputError("posterior", "draws that are not finite", "Give the posterior as the coordinator saved it.")
    efficiency = min(post.ess().values()) / len(values)
    return PublicDraws(values, tuple(post.names), float(np.clip(efficiency, 1e-3, 1.0)))


class Without(TypedDict):
    """Means and sds of the parameters without a site's records, NaN where they are not known, and Pareto k."""

    mean: dict[str, float]
    sd: dict[str, float]
    k: float


class SiteAssessment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All that leaves a site; ``contract`` and ``draws`` are hashes."""

    site: str
    study: str
    contract: str
    draws: str
    records: int
    loo: dict[str, float] | None = None  # sums over the records (`fedpdmc.assessment.loo.totals`)
    # The p-values of posterior predictive checks by statistic, with the observed values if that was agreed.
    checks: dict[str, dict[str, float]] | None = None
    # The site's influence on each reported parameter: see the functions `pull` and `without`.
    pull: dict[str, float] | None = None
    without: Without | None = None
    survival: dict[str, list[float]] | None = None  # the Kaplan-Meier estimate and the model's average survival
    format: int = FORMAT

    def __post_init__(self) -> None:
        good = self.format == FORMAT and _printable(msgspec.structs.asdict(self))
        good = good and (self.loo is None or set(self.loo) == LOO)
        good = good and all("p" in one for one in (self.checks or {}).values())
        if not good or (self.survival is not None and not _curves(self.survival)):
            raise ValueError(f"a value of another kind than in format {FORMAT}")

    def write(self, path: str | Path) -> Path:
        """Write it as JSON, which can be read before it is sent, with few digits."""
        path, found = Path(path), _rounded(msgspec.structs.asdict(self))
        path.write_text(json.dumps(found | {"without": _with_unknown(found["without"], None)}, indent=2) + "\n")
        return path

    @classmethod
    def read(cls, path: str | Path) -> SiteAssessment:
        """Read what a site has written.

        Raises
        ------
        InputError
        """
        try:
            found = json.loads(Path(path).read_text())
            return msgspec.convert(found | {"without": _with_unknown(found.get("without"), np.nan)}, cls)
        except (
            OSError,
            ValueError,
            TypeError,
            AttributeError,
            KeyError,
            RecursionError,
            msgspec.MsgspecError,
        ) as error:
            remedy = "Give a file that `fedpdmc assess` has written, of this version of fedpdmc."
            raise InputError("assessment", f"{path}: {str(error)[:200]}", remedy) from error


def _printable(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_printable(one) for item in value.items() for one in item)
    return not isinstance(value, str) or is_plain(value)


def _curves(found: dict[str, list[float]]) -> bool:
    """Whether these are steps of a survival curve: increasing times, and survival between 0 and 1."""
    if set(found) not in ({*STEP}, {*STEP, *MODEL}) or not len({len(one) for one in found.values()}) == 1:
        return False
    numbers = np.array(list(found.values()), float)
    good = numbers.shape[1] < MOST_STEPS and np.all((numbers >= 0) & (numbers < np.inf))
    shares = [x for key in ("survival", *MODEL) for x in found.get(key, [])]
    return bool(good) and bool(np.all(np.diff([0.0, *found["time"]]) > 0)) and max(shares, default=0.0) <= 1


def _with_unknown(without: Any, shown: Any) -> Any:
    """With means and sds that are not known, NaN here and null in a file, as ``shown``."""
    if without is None:
        return None
    parts = {part: without[part].items() for part in ("mean", "sd")}
    return without | {part: {k: shown if x is None or x != x else x for k, x in parts[part]} for part in parts}


def _rounded(value: Any, digits: int = DIGITS) -> Any:
    """Numbers with the digits that are released; Pareto k is that of one record and has one."""
    if isinstance(value, dict):
        return {key: _rounded(one, 1 if key in ("k", "worst_k") else digits) for key, one in value.items()}
    return round(value, digits) if isinstance(value, float) else value


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
    """Assess a site's records, as `fedpdmc.study.read_records` gives them, under draws of the posterior.

    Parameters
    ----------
    what : sequence of {"loo", "checks", "influence", "survival"}
    checks : sequence of str, optional
        Statistics of posterior predictive checks; the usual ones of the family if None.
    values : bool
        Whether checks include the observed summary with its p-value.
    seed : int
        Of the replicated responses.
    controlled : bool
        Whether the draws come from someone who is not to learn of single records: then ``least_records`` is the least
        number of records, and the least effective number in whatever is released (`fedpdmc.assessment.at_site`).
    times : sequence of float
        Of survival curves; if empty those of the contract.
    step : callable
        Called between two blocks of records with the share of the work that is done.
    """
    if draws.names != study.names:
        found = f"parameters {', '.join(draws.names)}"
        raise InputError("posterior", found, f"The study has {', '.join(study.names)}.")
    if study.coordinates(site) is not None:
        raise InputError("study", "a table [coordinates]", "Assessments need records that depend on all parameters.")
    if controlled and len(records) < least_records:
        remedy = f"At least {least_records} are needed: nothing is released."
        raise InputError(f"records of {site!r}", f"{len(records)} records", remedy)
    digest = draws.digest
    every = max(min(len(records) * len(draws.values) // MOST_NUMBERS, len(draws.values) // LEAST_DRAWS), 1)
    draws = draws._replace(values=draws.values[::every], efficiency=min(every * draws.efficiency, 1.0))
    outcome = Outcome(study, draws.values, site)
    facts: dict[str, Any] = {}
    seen = pass_over(outcome, records, draws.efficiency, smooth="loo" in what, step=lambda x: step(x / 2))
    if controlled:
        if what_few_carry := _carried_by_few(seen, least_records):
            remedy = "Nothing is released. Is the posterior that of this study? With few records, assess with fewer "
            raise InputError(f"records of {site!r}", what_few_carry, f"{remedy}--least-records.")
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


Draws = Mapping[str, np.ndarray]


def pull(log_likelihood: np.ndarray, draws: Draws) -> dict[str, float]:
    """Derivative of each posterior mean with respect to log α, in posterior sd, for the likelihood raised to the power α.

    ``d E_α[x] / d log α = Cov(x, log L)`` at α = 1. Of independent parts of the likelihood the derivatives add up: the sum
    over the sites is that of the whole likelihood, and with that of the prior nearly zero, since together they temper the
    posterior, which moves its mean by minus half its skewness.
    """
    centred = log_likelihood - log_likelihood.mean()
    return {name: float(np.mean((x - x.mean()) * centred) / x.std()) for name, x in draws.items()}


def without(log_likelihood: np.ndarray, draws: Draws, efficiency: float) -> Without:
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


def _carried_by_few(seen: Pass, least: int) -> str:
    """What fewer than ``least`` effective records carry, or one of them alone; empty if there is nothing."""
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        changed = np.min(np.where(seen.squares == 0, np.inf, seen.size**2 / seen.squares))
    numbers = {"the change of the likelihood from draw to draw": changed}
    numbers["the covariance with a parameter"] = np.min(effective_number(np.abs(seen.pulls)))
    shares = {}
    if np.isfinite(seen.pulls).all():
        shares["covariances with the parameters"] = share_of_leverage(largest_leverage(seen.pulls))
    if (loo := seen.records) is not None:
        numbers |= {what: effective_number(np.abs(one)) for what, one in (("elpd", loo.loo), ("waic", loo.waic))}
        for what, one in (("squares", loo.loo**2), ("parameters", np.abs(loo.within - loo.loo))):
            total = one.sum()
            shares[what] = 0.0 if total == 0 else one.max() / total
    for what, number in numbers.items():
        if not number >= least:
            return f"{what}: {float(number):.3g} effective records contribute, where {least} are asked for"
    for what, largest in shares.items():
        if not largest <= LARGEST_SHARE:
            return f"{what}: one record has a share of {float(largest):.3g}, above {LARGEST_SHARE:g}"
    return ""


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
    spread = np.maximum(_variance(n, c, total, squares), 1e-300) ** 1.5
    return (cubes / n - 3 * shift * squares / n + 2 * shift**3) / spread


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
        found[name] = {"p": float(min(1.0, 2 * min(tails)))}
        if values and name not in OF_ONE_RECORD:
            found[name] |= {"observed": float(one[0]), "replicated": float(many.mean()), "sd": float(many.std())}
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
    order, left = kaplan_meier(time, died == 0)
    found, some = np.repeat(time[:, None].astype(float), sets, 1), np.flatnonzero(died > 0)
    later = np.searchsorted(order, time[some], side="left")[:, None]
    level = np.append(1.0, left)[later] * rng.random((len(some), sets))
    # The first of the falling values that is not above the level.
    reached = np.maximum(np.searchsorted(-left, -level, side="left"), later)
    found[some] = np.append(order, np.inf)[reached]
    return found


# Kaplan-Meier estimates and average survival curves.
#
# A site on a network releases an estimate at the contract's times, in steps. A time is left out, and its step becomes one
# with the next, until the numbers of events and of censored records in the step, and the number still at risk after it, are
# each zero or at least ``least``. Released are these numbers, the estimate at the end of each step with three decimals, and
# the model's average survival over the site's records there. So no number is that of fewer than ``least`` records; that a
# time is left out tells that one would have been. Posteriors that a coordinator makes up decide on the averages alone:
# `Carried` controls them.

# Decimal places of a released survival.
DECIMALS = 3
# Draws that average curves are made of, and times of a grid that nobody declared.
CURVE_DRAWS, GRID = 500, 12


class KaplanMeier(NamedTuple):
    """The product-limit estimate ``Π (1 − d_i/n_i)`` over the times of events up to t."""

    time: np.ndarray
    survival: np.ndarray

    def at(self, t: Any) -> np.ndarray:
        """The estimate at times t."""
        return np.append(1.0, self.survival)[np.searchsorted(self.time, t, side="right")]


def kaplan_meier(time: np.ndarray, died: np.ndarray | None = None) -> KaplanMeier:
    """The estimate from times and zeros where they are censored: after events of the same time. None: none is."""
    time = np.asarray(time, float)
    seen = time if died is None else time[np.asarray(died) > 0]
    events, count = np.unique(seen, return_counts=True)
    at_risk = len(time) - np.searchsorted(np.sort(time), events, side="left")
    return KaplanMeier(events, np.cumprod(1 - count / np.maximum(at_risk, 1)))


def times_and_events(outcome: Outcome, records: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """The records' times in the units of the table, and ones where they are those of events."""
    response = outcome.response
    died = outcome.own(records).get("died")
    time = outcome.observed(records)[:, 0] * response.scale + response.center
    return time, np.ones(len(time)) if died is None else died[:, 0]


def observed_times(study: Study, tables: Mapping[str, pd.DataFrame]) -> tuple[np.ndarray, np.ndarray]:
    """Times and events of the records of all sites."""
    nowhere = np.zeros((1, len(study.names)))
    pairs = [times_and_events(Outcome(study, nowhere, site), records) for site, records in tables.items()]
    time, died = (np.concatenate(one) for one in zip(*pairs, strict=True))
    return time, died


def time_grid(time: np.ndarray, died: np.ndarray, size: int = GRID) -> tuple[float, ...]:
    """Times of three digits, equally spaced up to the last event, or up to the last time if there is none."""
    last = time[died > 0].max(initial=0.0) or time.max()
    return tuple(sorted({float(f"{t:.3g}") for t in np.linspace(0, last, size + 1)[1:]}))


def steps_of(time: np.ndarray, died: np.ndarray, grid: Sequence[float], least: int) -> dict[str, list[float]]:
    """The steps of a Kaplan-Meier estimate whose numbers are zero or at least ``least``, by the names of `STEP`."""
    curve, start, rows = kaplan_meier(time, died), 0.0, []
    for end in grid:
        inside = (time > start) & (time <= end)
        counts = [float(np.sum(part)) for part in (time > start, inside & (died > 0), inside & (died == 0), time > end)]
        if counts[0] and all(count == 0 or count >= least for count in counts[1:]):
            rows.append([float(end), *counts[:3], round(float(curve.at(end)), DECIMALS)])
            start = end
    return dict(zip(STEP, np.asarray(rows).reshape(-1, len(STEP)).T.tolist(), strict=True))


class Carried:
    """Whether released averages are carried by enough records, at each of S draws and T times.

    With draws far out an average survival is the share of the records on one side of a plane, and its change from time to
    time, or from draw to draw, that of single records. So the effective number in both must be at least ``least``; a change
    is let through that the released decimals do not show.
    """

    def __init__(self, least: int):
        self.least = least
        self._sums: np.ndarray | None = None

    def add(self, place: int, of: int, change: np.ndarray) -> None:
        """Changes of some records, (n, S), at a place among the ``of`` kinds and times."""
        if self._sums is None:
            self._sums = np.zeros((2, of, change.shape[1]))
        self._sums[:, place] += [np.abs(change).sum(0), np.sum(change**2, 0)]

    def enough(self, records: int) -> bool:
        """Whether all changes are carried by enough of so many records."""
        assert self._sums is not None
        size, squares = self._sums
        seen = ~(size / records < 10.0**-DECIMALS)
        return bool(np.all(size[seen] ** 2 >= self.least * squares[seen]))


def average_survival(
    outcome: Outcome,
    records: pd.DataFrame,
    times: Sequence[float],
    step: Callable[[float], None],
    carried: Carried | None = None,
) -> np.ndarray:
    """Survival at each draw and time, averaged over the records: of shape (S, T)."""
    total, done = np.zeros((len(outcome.draws), len(times))), 0
    for block in outcome.blocks(records):
        step(done / len(records))
        done += len(block)
        before: Any = 1.0
        for j, time in enumerate(times):
            now = outcome.expected(block, "survival", time)
            total[:, j] += now.sum(0)
            if carried is not None:
                carried.add(2 * j, 2 * len(times), before - now)
                carried.add(2 * j + 1, 2 * len(times), now - now.mean(1, keepdims=True))
            before = now
    return total / len(records)


def site_survival(
    outcome: Outcome,
    records: pd.DataFrame,
    times: Sequence[float],
    level: float,
    least: int | None,
    step: Callable[[float], None],
) -> dict[str, list[float]] | None:
    """The steps of a site with the model's average survival, by the names of `STEP` and `MODEL`.

    With ``least`` None nothing is withheld. Without `MODEL` if too few records carry the averages.
    """
    found = steps_of(*times_and_events(outcome, records), times, least or 0)
    every = max(len(outcome.draws) // CURVE_DRAWS, 1)
    outcome = Outcome(outcome.study, outcome.draws[::every], outcome.site)
    carried = None if least is None else Carried(least)
    if not found["time"]:
        return found
    curves = average_survival(outcome, records, found["time"], step, carried)
    if carried is None or carried.enough(len(records)):
        ends = np.quantile(curves, [(1 - level) / 2, (1 + level) / 2], axis=0)
        found |= dict(zip(MODEL, np.round([curves.mean(0), *ends], DECIMALS).tolist(), strict=True))
    return found


def pooled(sites: Sequence[dict[str, list[float]]]) -> dict[str, list[float]]:
    """The estimate of all sites from their steps: conditional survival from time to time, weighted by those at risk.

    Exact where all sites have the same steps and nobody is censored within one. Between a site's own steps its hazard is
    taken as constant, and a site whose steps have ended no longer counts.
    """
    sites = [one for one in sites if one["time"]]
    time, survival, before, value = sorted({t for one in sites for t in one["time"]}), [], 0.0, 1.0
    for t in time:
        kept = []
        for one in (one for one in sites if one["time"][-1] >= t):
            ends = [0.0, *one["time"]]
            left = one["at_risk"][-1] - one["events"][-1] - one["censored"][-1]
            log = np.log(np.maximum([1.0, *one["survival"]], 1e-12))
            ratio = np.exp(np.interp(t, ends, log) - np.interp(before, ends, log))
            kept.append((float(np.interp(before, ends, [*one["at_risk"], left])), float(ratio)))
        at_risk = sum(n for n, _ in kept)
        value, before = value * (sum(n * q for n, q in kept) / at_risk if at_risk else 1.0), t
        survival.append(value)
    return {"time": time, "survival": survival}
