"""Records in groups with effects of a learned spread, and priors of their spreads."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedpdmc._jax.compilation import on_device
from fedpdmc._jax.precision import double_precision
from fedpdmc.errors import InputError
from fedpdmc.models.model_file.allowed_operations import Source, evaluate
from fedpdmc.models.model_file.model import Model
from fedpdmc.models.model_file.records import CONSTANTS, DESIGN, WEIGHTS, Layout, RecordModel
from fedpdmc.potentials import LinearPredictor, Logistic, Poisson, Quadratic, RandomEffects
from fedpdmc.potentials.padding import whole_vectors
from fedpdmc.potentials.random_effects_rates import (
    EffectsFamily,
    GaussianFamily,
    LogisticFamily,
    NegativeBinomialFamily,
    PoissonFamily,
    ProgramFamily,
    StudentTFamily,
)
from fedpdmc.validation import finite_array, one_of, positive, record_weights

FAMILIES = ("logistic", "poisson", "linear", "negative_binomial", "student_t")
SPREADS = ("half-normal", "exponential", "half-Cauchy")
CALL = "random_effects"


@double_precision
def random_effects(
    X: Any,
    y: Any,
    groups: Any = None,
    *,
    family: str = "logistic",
    effects: Any = None,
    offset: Any = None,
    trials: Any = None,
    weights: Any = None,
    size: float | None = None,
    df: float | None = None,
    scale: float | None = None,
    names: Any = None,
) -> RandomEffects:
    """A regression with effects of groups that stay at the site: ``η_i = ξ_i·β + w_i·z_g(i)``, ``z_g ~ N(0, Σ)``.

    The shared parameters are β, ``log σ`` (linear), the log spreads of the effects and, for two effects, ``atanh`` of their
    correlation. The effects z are private latents: the coordinator never sees them, and they cost no message.

    Parameters
    ----------
    X : array of shape (n, p)
        Fixed effects; give a column of ones for the mean of the effects.
    y : array of shape (n,)
    groups : array of shape (n,), optional
        The group of each record, of any type; None: the whole site is one group.
    family : {"logistic", "poisson", "linear", "negative_binomial", "student_t"}
    effects : array of shape (n, 1) or (n, 2), optional
        Covariates of the effects; None: an intercept. A column of ones and a dose give ``(1 + dose | group)``.
    offset : array of shape (n,), optional
        Added to the predictor.
    trials : array of shape (n,), optional
        With family="logistic": y are the events among so many trials.
    weights : array of shape (n,), optional
        By which the loss of each record is multiplied.
    size, df, scale : float
        Known: the size of a negative binomial, degrees of freedom and scale of Student-t.
    names : sequence of str, optional
        Of the columns of X.

    Raises
    ------
    InputError
        At missing values, an empty group, or records that cannot tell effects from noise.
    """
    one_of(f"{CALL}(family)", family, FAMILIES)
    design = finite_array(f"{CALL}(X)", X, 2, "(n, p)")
    response = finite_array(f"{CALL}(y)", y, 1, "(n,)")
    n, p = design.shape
    if not n or len(response) != n:
        raise InputError(f"{CALL}(y)", f"{len(response)} responses for {n} rows of X", "Give one for each row of X.")
    share = np.ones(n) if weights is None else record_weights(f"{CALL}(weights)", weights, n)
    if trials is not None:
        if family != "logistic":
            raise InputError(f"{CALL}(trials)", f"trials with family={family!r}", "Leave them out.")
        response, number = events_of(CALL, response, trials)
        share = share * number
    elif family == "logistic":
        check_labels(CALL, response)
    elif family in ("poisson", "negative_binomial"):
        check_counts(f"{CALL}(y)", response)
    shift = np.zeros(n) if offset is None else finite_array(f"{CALL}(offset)", offset, 1, "(n,)")
    if shift.shape != (n,):
        raise InputError(f"{CALL}(offset)", f"shape {shift.shape}", f"Give an offset of {n} records.")
    slopes = _slopes(effects, n, CALL)
    labels, index = _groups(groups, n)
    _check_groups(family, np.bincount(index, minlength=len(labels)))
    order = np.argsort(index, kind="stable")
    columns = [f"x{i}" for i in range(p)] if names is None else [str(name) for name in names]
    if len(columns) != p:
        raise InputError(f"{CALL}(names)", f"{len(columns)} names", f"Give one for each of {p} columns of X.")
    own = _family(family, size, df, scale)
    return _padded(
        design[order], slopes[order], response[order], shift[order], share[order], index[order], labels, own,
        (*columns, *(("log_sigma",) if own.scaled else ()), *_spread_names(slopes.shape[1])),
    )  # fmt: skip


def _spread_names(r: int) -> tuple[str, ...]:
    return ("log_sd",) if r == 1 else ("log_sd[0]", "log_sd[1]", "atanh_correlation")


def _padded(design, slopes, response, shift, weight, index, labels, family, names, variables=None) -> RandomEffects:
    """Records padded to whole vectors."""
    n, groups = len(index), len(labels)
    design, slopes, response, shift, weight, index, present = jax.tree.map(
        on_device, (design, slopes, response, shift, weight, index, np.ones(groups))
    )
    whole = RandomEffects(
        design, slopes, response, shift, weight, index, present, family, slopes.shape[1] == 2, n, groups, names, labels,
        variables,
    )  # fmt: skip
    return whole.padded(whole_vectors(n), groups)


@double_precision
def with_effects(model: RecordModel, groups: Any = None, *, effects: Any = None) -> RandomEffects:
    """A model of one record with effects of groups that stay at the site, added to its linear predictor.

    ``η_i = ξ_i·β + w_i·z_g(i)`` with ``z_g ~ N(0, Σ)``, for families of the standard library and model files:
    ``with_effects(fp.models.weibull(X, time, died), ward)``. The shared parameters are those of the model, the log spreads
    of the effects and, for two effects, ``atanh`` of their correlation. `effects_prior` gives a prior.

    Parameters
    ----------
    model : RecordModel
        Such as `weibull`, or `fedpdmc.Model.of`, with one linear predictor that is a number.
    groups, effects
        As of `random_effects`.

    Raises
    ------
    InputError
        At a model whose predictor is no single number, a missing group, or one without records.
    """
    call = "with_effects"
    if not isinstance(model, RecordModel):
        raise InputError(
            f"{call}(model)", type(model).__name__, "Give a family of the standard library, or Model.of(...)."
        )
    source = model.function.model.source
    check_one_predictor(source, f"{call}(model)")
    n = model.records
    slopes = _slopes(effects, n, call)
    labels, index = _groups(groups, n, call)
    order = np.argsort(index, kind="stable")
    rows = {name: np.asarray(x)[order] for name, x in model.data.items() if name not in (DESIGN, WEIGHTS, CONSTANTS)}
    loss = RecordLoss(model.function.model)
    own = ProgramFamily(loss, model.data[CONSTANTS], sum(one.type.size for one in source.parameters))
    design = np.asarray(model.data[DESIGN])[order]
    assert model.names is not None
    names = (*model.names, *_spread_names(slopes.shape[1]))
    weight = np.asarray(model.data[WEIGHTS])[order]
    return _padded(design, slopes[order], rows, np.zeros(n), weight, index[order], labels, own, names, model.constrain)


def check_one_predictor(source: Source, where: str) -> None:
    """Refuse a model to whose predictor an effect cannot be added."""
    if source.group is not None:
        raise InputError(where, "records that are groups of rows", "Effects of groups need one row for each record.")
    found = [f"{one.name} of shape {one.type.shape}" if one.type.shape else one.name for one in source.predictors]
    if len(found) != 1 or source.predictors[0].type.shape:
        raise InputError(
            where,
            f"linear predictors: {', '.join(found) or 'none'}",
            "An effect is added to one linear predictor that is a number: use a model that has it.",
        )


@dataclasses.dataclass(frozen=True)
class RecordLoss:
    """Minus the log likelihood of one record of a model, by its linear predictor."""

    model: Model

    def __call__(self, eta, row, parameters, constants):
        """At a predictor, a row by column, the parameters as a vector, and constants by name."""
        source = self.model.source
        _, named = Layout(source, 0).split(parameters)
        return evaluate(source.likelihood, {**named, **constants, **row, source.predictors[0].name: eta})[""]


def _slopes(effects: Any, n: int, call: str) -> np.ndarray:
    """The covariates of the effects; an intercept if None."""
    slopes = np.ones((n, 1)) if effects is None else finite_array(f"{call}(effects)", effects, 2, "(n, r)")
    if slopes.shape[0] != n or slopes.shape[1] not in (1, 2):
        raise InputError(f"{call}(effects)", f"shape {slopes.shape}", f"Give one or two columns of {n} rows.")
    return slopes


def _groups(groups: Any, n: int, call: str = CALL) -> tuple[tuple[str, ...], np.ndarray]:
    """The groups' names and each record's group."""
    if groups is None:
        return ("",), np.zeros(n, int)
    unused = [str(c) for c in getattr(getattr(groups, "cat", None), "categories", []) if c not in set(groups)]
    if unused:
        raise InputError(
            f"{call}(groups)", f"a group {unused[0]!r} without records", "Drop unused categories: nothing tells of it."
        )
    values = np.asarray(groups)
    if values.shape != (n,):
        raise InputError(f"{call}(groups)", f"shape {values.shape}", f"Give one group for each of {n} records.")
    if any(value is None or value != value for value in values.tolist()):
        raise InputError(f"{call}(groups)", "a missing group", "Drop the record, or give it a group of its own.")
    found, index = np.unique(values.astype(str), return_inverse=True)
    return tuple(found.tolist()), index.reshape(-1)


def _check_groups(family: str, sizes: np.ndarray) -> None:
    if family == "linear" and sizes.max() == 1 and len(sizes) > 1:
        raise InputError(
            f"{CALL}(groups)",
            "one record in every group",
            "Effects cannot be told from noise then: leave them out, or use groups of several records.",
        )


def events_of(call: str, events: np.ndarray, trials: Any) -> tuple[np.ndarray, np.ndarray]:
    """The share of events among trials, zero where there is none, and the trials."""
    number = record_weights(f"{call}(trials)", trials, len(events))
    for name, values, good, remedy in (
        ("trials", number, number == np.round(number), "Give whole numbers of at least zero."),
        ("y", events, (events >= 0) & (events == np.round(events)), "Give numbers of events: whole, at least zero."),
        ("y", events, events <= number, "There are at most as many events as trials."),
    ):
        if not good.all():
            where = int(np.argmin(good))
            raise InputError(
                f"{call}({name})", f"{values[where]:g} of {number[where]:g} trials at index {where}", remedy
            )
    return events / np.maximum(number, 1.0), number


def check_labels(call: str, response: np.ndarray) -> None:
    """Refuse responses that are not zeros and ones."""
    _check_each(f"{call}(y)", response, (response == 0) | (response == 1), "Give labels 0 and 1.")


def check_counts(name: str, values: np.ndarray) -> None:
    """Refuse numbers that are not counts."""
    remedy = "Give counts: integers that are zero or positive."
    _check_each(name, values, (values >= 0) & (values == np.round(values)), remedy)


def _check_each(name: str, values: np.ndarray, good: np.ndarray, remedy: str) -> None:
    if not good.all():
        where = int(np.argmin(good))
        raise InputError(name, f"{values[where]} at index {where}", remedy)


def _family(family: str, size, df, scale) -> EffectsFamily:
    known = {"negative_binomial": ("size",), "student_t": ("df", "scale")}.get(family, ())
    for name, value in (("size", size), ("df", df), ("scale", scale)):
        if (value is not None) != (name in known):
            verb = "Give it" if name in known else "Leave it out"
            raise InputError(f"{CALL}({name})", repr(value), f"{verb} with family={family!r}.")
    if family == "negative_binomial":
        return NegativeBinomialFamily(jnp.asarray(positive(f"{CALL}(size)", size)))
    if family == "student_t":
        return StudentTFamily(positive(f"{CALL}(df)", df), positive(f"{CALL}(scale)", scale))
    return {"logistic": LogisticFamily, "poisson": PoissonFamily, "linear": GaussianFamily}[family]()


@dataclasses.dataclass(frozen=True, eq=False)
class SpreadPrior:
    """A Gaussian prior of some coordinates, and of log spreads a prior that the site ``"prior"`` walks with."""

    normal: Quadratic
    spreads: LinearPredictor


@double_precision
def effects_prior(
    model: RandomEffects,
    *,
    scale: Any = 10.0,
    spread: str = "half-normal",
    spread_scale: float = 1.0,
    correlation_scale: float = 0.5,
) -> SpreadPrior:
    """A prior for `random_effects` and `with_effects`: normal coefficients, and a proper prior of every spread (and of σ).

    The other parameters of a model of one record are normal too, as its coefficients are.

    With ``ρ = log τ`` and the Jacobian, minus the log density of the spread is

    - half-normal(s): ``½e^{2ρ − 2 log s} − ρ``, a Poisson record ``e^η − ½η`` of ``η = 2ρ − 2 log s − log 2``;
    - exponential of mean s: ``e^{ρ − log s} − ρ``, a Poisson record ``e^η − η``;
    - half-Cauchy(s): ``log(1 + e^{2ρ − 2 log s}) − ρ``, a logistic record ``log(1 + e^η) − ½η``.

    Parameters
    ----------
    model : RandomEffects
        Of any site: it says which parameters there are.
    scale : float or array of shape (p,)
        Standard deviations of the coefficients (and of the other parameters of a model of one record).
    spread : {"half-normal", "exponential", "half-Cauchy"}
    spread_scale : float
        s above.
    correlation_scale : float
        ``atanh`` of the correlation is normal with this standard deviation.
    """
    p, q = model.design.shape[1], model.family.scaled
    normal = isinstance(model.family, ProgramFamily)
    return spread_prior(
        p + q if normal else p, scaled=bool(q) and not normal, effects=model.effects.shape[1], scale=scale, spread=spread,
        spread_scale=spread_scale, correlation_scale=correlation_scale,
    )  # fmt: skip


@double_precision
def spread_prior(
    coefficients: int,
    *,
    scaled: bool = False,
    effects: int = 1,
    mean: Any = 0.0,
    scale: Any = 10.0,
    spread: str = "half-normal",
    spread_scale: float = 1.0,
    correlation_scale: float = 0.5,
) -> SpreadPrior:
    """`effects_prior` without a model: of so many coefficients, a log σ where ``scaled``, and one or two effects."""
    one_of("effects_prior(spread)", spread, SPREADS)
    s = positive("effects_prior(spread_scale)", spread_scale)
    p, dim = coefficients, coefficients + scaled + effects + (effects == 2)
    widths, center = (
        finite_array(f"effects_prior({name})", np.broadcast_to(np.asarray(x, float), (p,)), 1, "(p,)")
        for name, x in (("scale", scale), ("mean", mean))
    )
    if np.any(widths <= 0):
        raise InputError("effects_prior(scale)", repr(scale), "Give positive standard deviations.")
    precision = np.zeros(dim)
    precision[:p] = widths**-2.0
    if effects == 2:
        precision[-1] = positive("effects_prior(correlation_scale)", correlation_scale) ** -2.0
    spreads = np.arange(p, p + scaled + effects)
    factor = 1.0 if spread == "exponential" else 2.0
    design = np.zeros((len(spreads), dim))
    design[np.arange(len(spreads)), spreads] = factor
    shift = -factor * math.log(s) - (math.log(2.0) if spread == "half-normal" else 0.0)
    loss = Logistic() if spread == "half-Cauchy" else Poisson()
    records = LinearPredictor.from_records(
        jnp.asarray(design), jnp.full(len(spreads), 1 / factor), loss, jnp.full(len(spreads), shift)
    )
    linear = -precision * np.append(center, np.zeros(dim - p))
    return SpreadPrior(Quadratic(jnp.asarray(np.diag(precision)), jnp.asarray(linear)), records)
