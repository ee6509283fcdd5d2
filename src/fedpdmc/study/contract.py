"""The study contract: one TOML file with the model, the method, and what may be requested of a site."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pandas as pd
from msgspec.structs import asdict

from fedpdmc.dynamics import DRAW
from fedpdmc.errors import InputError
from fedpdmc.members.site import NO_LATENT_BUDGET
from fedpdmc.models.families import FAMILIES
from fedpdmc.potentials.random_effects import NaturalScale
from fedpdmc.privacy.budget_planning import ONE_SHOT, PRIVATE_LAPLACE
from fedpdmc.privacy.gaussian_mechanism import check_honest
from fedpdmc.study.contract_model import BoundModel, read_likelihood
from fedpdmc.study.formula import INTERCEPT, Design, Effects
from fedpdmc.study.schema import FORMAT, Column, ContractKeys, naming_file, parse_toml, read, read_bytes, read_columns
from fedpdmc.validation import suggest

# Keys of [prior] that belong to effects of groups, and keys of [dynamics] that are arguments of a dynamics.
SPREADS = ("spread", "spread_scale", "correlation_scale")
RATES = ("refresh", "excess")


# Relative error above which one design is not a linear image of the other.
EXACT_MAP = 1e-9


class Named(NamedTuple):
    """Names of parameters, and the function to the reported variables; None: the parameters themselves."""

    names: tuple[str, ...]
    constrain: Callable[[Any], dict[str, Any]] | None = None


@dataclass(frozen=True)
class OriginalUnits:
    """The function from a study's parameters to variables in the columns' own units.

    With ``X_s`` the design of the centred and scaled columns and ``X`` that of the columns themselves there is a matrix A
    with ``X_s = X A``, the same for all records. So ``X_s b = X (A b)``, and ``A b`` are the coefficients in the original
    units. A response ``(y − c)/s`` multiplies them by s and adds c to the intercept; σ is multiplied by s.

    ``matrix`` is s A, and ``response_scale`` s, by which σ and the spreads of effects are multiplied too: the parameters
    after the coefficients.
    """

    names: tuple[str, ...]
    matrix: np.ndarray
    shift: np.ndarray
    response_scale: float = 1.0

    def constrain(self, x):
        """Variables by name."""
        d = len(self.shift)
        values = jnp.asarray(self.matrix) @ x[:d] + jnp.asarray(self.shift)
        found = {name: values[i] for i, name in enumerate(self.names[:d])}
        for name, value in NaturalScale(self.names[d:])(x[d:]).items():
            found[name] = value if name == "correlation" else self.response_scale * value
        return found


def original_units(study: Study) -> OriginalUnits | Named | None:
    """How to undo centring and scaling; None if no linear map does, as for an interaction without its main effects."""
    formula = study.formula if study.effects is None else study.effects.formula.fixed
    matrix = design_map(formula, {name: one for name, one in study.columns.items() if one.type != "key"})
    if matrix is None:
        return None
    names, response = study.design.names, study.columns[study.design.response_name]
    shift = np.zeros(len(names))
    if response.center:
        if INTERCEPT not in names:
            return None
        shift[names.index(INTERCEPT)] = response.center
    if study.names == names and response.scale == 1 and not shift.any() and np.array_equal(matrix, np.eye(len(names))):
        return Named(study.names)
    return OriginalUnits(study.names, response.scale * matrix, shift, response.scale)


def design_map(formula: str, columns: dict[str, Column]) -> np.ndarray | None:
    """A with ``X_s = X A`` for all records, or None if there is none."""
    if all(column.center == 0 and column.scale == 1 for column in columns.values()):
        return np.eye(len(Design(formula, columns).names))
    unscaled = {name: replace(one, center=0.0, scale=1.0) for name, one in columns.items()}
    scaled, raw = Design(formula, columns), Design(formula, unscaled)
    records = _points(unscaled, 4 * len(raw.names) + 50)
    numbers = {name: one for name, one in columns.items() if one.type != "level"}
    target = scaled.matrix(records.assign(**{x: (records[x] - one.center) / one.scale for x, one in numbers.items()}))
    design = raw.matrix(records)
    size = np.linalg.norm(design, axis=0)
    if np.any(size == 0):
        return None
    found = np.linalg.lstsq(design / size, target, rcond=None)[0]
    error = np.abs(design / size @ found - target)
    if np.any(error > EXACT_MAP * np.maximum(np.abs(target).max(0), 1.0)):
        return None
    found = found / size[:, None]
    small = np.abs(found) * size[:, None] < EXACT_MAP * np.linalg.norm(target, axis=0)
    same = np.linalg.norm(target - design, axis=0) < EXACT_MAP**1.5 * size
    return np.where(same, np.eye(len(size)), np.where(small, 0.0, found))


def _points(columns: dict[str, Column], n: int) -> pd.DataFrame:
    """Records that span what the bounds allow."""
    rng = np.random.default_rng(0)
    frame = {}
    for name, column in columns.items():
        if column.type == "level":
            codes = np.arange(n) % len(column.levels)
            frame[name] = pd.Categorical.from_codes(rng.permutation(codes), categories=list(column.levels))
        else:
            frame[name] = rng.uniform(*column.range, n)
    return pd.DataFrame(frame)


@dataclass(frozen=True)
class Study:
    """A parsed and checked contract: the fields are the keys of its tables, which `fedpdmc.study.schema` describes."""

    text: bytes  # the file; coordinator and sites compare its SHA-256, ``digest``
    name: str
    sites: tuple[str, ...]
    family: str
    formula: str
    model: BoundModel
    columns: dict[str, Column]
    prior_mean: float | tuple[float, ...]
    prior_scale: float | tuple[float, ...] | None
    kind: str
    rates: dict[str, float | str]
    reference: str
    control: str
    chains: int
    ess: float | None
    duration: float | None
    burn_in: float | None
    derivatives: str
    passes: bool
    rounds: int
    most_derivatives: int
    observed_time: float
    method: str = "exact"
    epsilon: float | None = None
    delta: float = 0.0
    neighbours: str = "replace"
    excess: float | None = None
    region: float | tuple[float, ...] | None = None
    release: float = 0.0
    colluding: int | None = None
    missing: str = "refuse"
    most_records: int = 1_000_000
    parameters: dict[str, tuple[str, ...]] = field(default_factory=dict)  # the table [coordinates]
    units: str = "declared"
    assessment: tuple[str, ...] = ()
    survival_times: tuple[float, ...] = ()
    effects: Effects | None = None  # the effects of groups that stay at their sites
    prior_df: dict[str, int] = field(default_factory=dict)
    prior_horseshoe: tuple[str, ...] = ()
    prior_global_scale: float = 1.0
    weights: str | None = None

    @property
    def digest(self) -> bytes:
        """SHA-256 of the file."""
        return hashlib.sha256(self.text).digest()

    def _repr_html_(self) -> str:
        from fedpdmc.study.description import as_html

        return as_html(self)

    @property
    def survival(self) -> bool:
        """Whether the response is a time until an event, by a family of the standard library."""
        return self.family in FAMILIES and FAMILIES[self.family].survival

    @property
    def one_shot(self) -> bool:
        """Whether sites release noisy derivatives at a few points, and no arrivals."""
        return self.method == PRIVATE_LAPLACE

    @property
    def summed(self) -> bool:
        """Whether derivatives are released under masks, as sums over all sites only."""
        return self.derivatives in ("summed", "noisy-summed")

    @property
    def noisy(self) -> bool:
        """Whether derivatives are released with noise."""
        return self.derivatives in ("noisy", "noisy-summed")

    @property
    def label(self) -> bool:
        """Whether a privacy budget protects outcomes only."""
        return self.epsilon is not None and self.neighbours == "label"

    @property
    def design(self) -> Design:
        """The formula over the declared columns."""
        if self.model.design is None:
            raise InputError("study.toml: model: formula", "none", "This model has no linear predictor.")
        return self.model.design

    @property
    def options(self) -> dict[str, Any]:
        """The known numbers of a family with a built-in loss: scale, df and size."""
        return self.model.numbers

    @cached_property
    def varying(self) -> Design | None:
        """The design of the one column whose coefficient varies between groups in addition to the intercept."""
        if self.effects is None or self.effects.formula.slope is None:
            return None
        response, slope = self.effects.formula.fixed.partition("~")[0], self.effects.formula.slope
        found = Design(f"{response} ~ 0 + {slope}", self.columns)
        if len(found.names) != 1:
            several = f"{slope}, which is {len(found.names)} columns of the design"
            raise InputError("study.toml: model: formula", several, "Between groups one column of numbers can vary.")
        return found

    def offset(self, records: pd.DataFrame) -> np.ndarray | None:
        """What is added to the linear predictor."""
        return self.model.offset(records)

    @property
    def model_file(self) -> str | None:
        """The name of the model file, if the contract has one."""
        return self.model.file or None

    @property
    def model_digest(self) -> str | None:
        """SHA-256 of the model file, if the contract has one."""
        return self.model.model.digest if self.model.file else None

    @property
    def used(self) -> set[str]:
        """The declared columns that the model needs."""
        own = set() if self.weights is None else {self.weights}
        if self.effects is not None:
            own |= {self.effects.formula.groups} & set(self.columns)
            own |= set() if self.varying is None else self.varying.used
        return own | self.model.used

    @property
    def largest_weight(self) -> float:
        """By how much the loss of a record is multiplied at most: its declared weight, times its trials."""
        known = (name for name in (self.weights, self.model.trials) if name is not None)
        return float(np.prod([self.columns[name].range[1] for name in known]))

    def record_weights(self, records) -> np.ndarray:
        """The records' weights; ones without a column of weights."""
        return np.ones(len(records)) if self.weights is None else np.asarray(records[self.weights], float)

    def count(self, records) -> int:
        """Number of records; a group of rows is one."""
        return self.model.count(records)

    @property
    def unknown_scale(self) -> bool:
        """Whether the scale of a linear regression is a parameter."""
        return self.model.unknown_scale

    @property
    def convex(self) -> bool:
        """Whether the records' losses are convex, and their curvature changes at most as fast as it is large."""
        return self.model.convex and self.effects is None

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters' names."""
        return (*self.model.names, *(() if self.effects is None else self.effects.names))

    @property
    def normal_names(self) -> tuple[str, ...]:
        """The parameters to which the table [prior] gives mean and scale: with effects, spreads have priors of their own."""
        names = self.model.names
        return names[:-1] if self.unknown_scale and self.effects is not None else names

    @cached_property
    def naming(self) -> OriginalUnits | Named | None:
        """The reported variables, with units = "original" or a model's own; None if they are the parameters."""
        if self.units == "original":
            return original_units(self)
        if self.effects is None:
            return None if self.model.variables is None else Named(self.names, self.model.variables)
        if self.model.variables is None:
            return Named(self.names, NaturalScale(self.names))
        return Named(self.names, NaturalScale(self.effects.names, self.model.variables, len(self.model.names)))

    @property
    def guess(self) -> np.ndarray | None:
        """Start of the search for the mode, if not the prior's mean: σ is an eighth of the response's range."""
        if not self.unknown_scale and self.effects is None:
            return None
        start = np.zeros(len(self.names))
        if self.effects is not None:
            start[len(self.normal_names) :] = self.effects.prior_place(self.unknown_scale)[0]
        if self.unknown_scale:
            low, high = self.columns[self.design.response_name].range
            middle = [0.5 * (low + high) if name == INTERCEPT else 0.0 for name in self.design.names]
            start[: len(middle) + 1] = [*middle, np.log((high - low) / 8)]
        return start

    @property
    def reach(self) -> np.ndarray | None:
        """How much a unit of each parameter can change the logarithm of a mean or of σ; None if there is no logarithm."""
        found = np.append(self.model.reach, np.ones(len(self.names) - len(self.model.names)))
        return found if found.any() else None

    @property
    def prior_place(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Approximate prior mean and standard deviation of every parameter; None for a flat prior."""
        if self.prior_scale is None:
            return None
        own = len(self.normal_names)
        place = [np.broadcast_to(np.asarray(x, float), (own,)) for x in (self.prior_mean, self.prior_scale)]
        if self.effects is not None:
            rest = self.effects.prior_place(self.unknown_scale)
            place = [np.concatenate(pair) for pair in zip(place, rest, strict=True)]
        return place[0], place[1]

    def prior(self):
        """The prior, or None for a flat one."""
        from fedpdmc import models
        from fedpdmc.study.prior_names import Prior

        if self.prior_scale is None:
            return None
        if (effects := self.effects) is not None:
            place = {"mean": np.asarray(self.prior_mean), "scale": np.asarray(self.prior_scale)}
            own = {"scaled": self.unknown_scale, "effects": 1 if effects.formula.slope is None else 2}
            spreads = {key: getattr(effects, key) for key in SPREADS}
            return models.spread_prior(len(self.normal_names), **own, **place, **spreads)
        return Prior.of(self).potential()

    @property
    def scaled_prior(self) -> bool:
        """Whether some parameters have a scale-mixture prior: Student-t or a horseshoe."""
        return bool(self.prior_df or self.prior_horseshoe)

    @property
    def coordinator_chooses(self) -> str:
        """Why sites do not know all public events, so that the coordinator chooses the plans; empty under a budget."""
        reasons = {"effects of groups": self.effects is not None, "a Student-t or horseshoe prior": self.scaled_prior}
        reasons |= {"[coordinates]": bool(self.parameters), 'control = "linear"': self.control == "linear"}
        return ", ".join(reason for reason, holds in reasons.items() if holds and self.epsilon is None)

    @property
    def sites_plan(self) -> bool:
        """Whether sites make the plans: not under a budget, which covers plans of any choice."""
        return self.epsilon is None and not self.coordinator_chooses

    def coordinates(self, site: str) -> list[int] | None:
        """The indices of the parameters that a site's records depend on; None for all."""
        own = self.parameters.get(site)
        return None if own is None else [self.names.index(name) for name in own]

    def budget(self, ledger: str | Path | None = None, site: str | None = None, **terms: Any):
        """A site's privacy budget for this study, with bounds from the declared columns; None without a privacy table.

        ``terms`` are the site's own arguments of `Budget`: the data set, and its budget for all studies together.
        """
        from fedpdmc.privacy.budget import Budget
        from fedpdmc.privacy.sensitivity import Bounds

        if self.epsilon is None:
            return None
        region, declared = self.region, self.model.declared(self.columns)
        if site is not None and (own := self.coordinates(site)) is not None:
            declared["box"] = declared["box"][own]
            region = tuple(np.asarray(region)[own]) if isinstance(region, tuple) else region
        bounds = Bounds(region=region, most_records=self.most_records, weight=self.largest_weight, **declared)
        agreed = {"epsilon": self.epsilon, "delta": self.delta, "neighbours": self.neighbours, "study": self.name}
        agreed |= {"bounds": bounds, "excess": self.excess, "release": self.release, "ledger": ledger}
        agreed["colluding"] = self.colluding
        return Budget(**agreed | terms)

    def dynamics(self):
        """The dynamics with their rates. What leaves a site is a draw, never the normal of a reflection."""
        import fedpdmc.dynamics

        kind = getattr(fedpdmc.dynamics, self.kind)
        return kind(**self.rates) if kind.flips else kind(**self.rates, bounce=DRAW)

    def matrix(self, records, site: str | None = None) -> np.ndarray:
        """The design matrix in the site's own parameters."""
        from fedpdmc.study.read_data import Fault, refuse_records

        X, own = self.design.matrix(records), None if site is None else self.coordinates(site)
        if own is None:
            return X
        others = np.setdiff1d(np.arange(X.shape[1]), own)
        remedy = "By the contract this site's records do not: correct the records or [coordinates]."
        faults = [
            Fault(int(row), "", f"a record that depends on {self.names[others[column]]!r}", remedy)
            for row, column in np.argwhere(X[:, others] != 0)
        ]
        if faults:
            raise refuse_records(records, faults)
        return np.ascontiguousarray(X[:, own])

    def potential(self, records, site: str | None = None):
        """The minus log likelihood of records that `read_records` has checked, in the site's own parameters."""
        from fedpdmc.study.read_data import Fault, refuse_records

        if self.model.trials is not None:
            y, trials = self.design.response(records), np.asarray(records[self.model.trials], float)
            name, remedy = self.design.response_name, f"At most {self.model.trials!r} happen."
            faults = [
                Fault(int(row), name, f"{y[row]:g} events in {trials[row]:g} trials", remedy)
                for row in np.flatnonzero(y > trials)
            ]
            if faults:
                raise refuse_records(records, faults)
        weights = None if self.weights is None else self.record_weights(records)
        X = None if self.model.design is None else self.matrix(records, site)
        return self.model.potential(records, site or self.sites[0], X, weights, self._groups(records))

    def _groups(self, records) -> dict[str, Any] | None:
        """Groups and covariates of their effects, as `fedpdmc.models.random_effects` takes them."""
        if self.effects is None:
            return None
        groups, slope = self.effects.formula.groups, self.varying
        varying = None if slope is None else np.c_[np.ones(len(records)), slope.matrix(records)]
        labels = records[groups].astype(str).to_numpy() if groups in self.columns else None
        return {"groups": labels, "effects": varying}


def read_study(path: str | Path) -> Study:
    """Read a contract from a TOML file; a model file that it names is in the same folder."""
    with naming_file("study.toml", path):
        text = read_bytes(path, "study")
        folder, remedy = Path(path).parent, "Put the model file that the contract names into the contract's folder."
        return parse_study(text, lambda name: read_bytes(folder / name, "study.toml: model: file", remedy))


def _no_file(name: str) -> bytes:
    raise InputError("study.toml: model: file", repr(name), "Read the contract from the folder that has this file.")


def parse_study(text: bytes, file: Callable[[str], bytes] = _no_file) -> Study:
    """Parse and check a whole contract; ``file`` returns the model file of a given name."""
    where = "study.toml"
    values = parse_toml(text, where)
    if (found := values.get("format", FORMAT)) != FORMAT:
        raise InputError(f"{where}: format", repr(found)[:200], f"This version of fedpdmc reads {FORMAT}.")
    given = values.get("dynamics", {})
    if isinstance(given, dict):
        values = values | {"dynamics": {"kind": "Boomerang"} | given}
    keys = read(ContractKeys, values, where)
    columns = read_columns(keys.columns, f"{where}: columns")
    fields = read_likelihood(keys.model, columns, keys.sites, file)
    prior, dynamics, run, releases, limits = keys.prior, keys.dynamics, keys.run, keys.releases, keys.limits
    spreads = {key: value for key in SPREADS if (value := getattr(prior, key)) is not None}
    if spreads and "effects" not in fields:
        remedy = "It is of the spreads of effects: add a term such as (1 | ward) to the formula, or leave it out."
        raise InputError(f"{where}: prior: {min(spreads)}", repr(spreads[min(spreads)]), remedy)
    if "effects" in fields:
        fields["effects"] = replace(fields["effects"], **spreads)
    one_shot = run.method == PRIVATE_LAPLACE
    if releases.arrivals is one_shot:
        found, right = ("true", "false") if one_shot else ("false", "true")
        remedy = f"Set it to {right}, or remove it."
        raise InputError(f"{where}: releases: arrivals", f"{found} with this [run] method", remedy)
    if limits.observed_time is None and not one_shot:
        raise InputError(f"{where}: limits: observed_time", "no value", "This key is required: give a positive number.")
    for site in keys.coordinates:
        if site not in keys.sites:
            remedy = f"{suggest(site, keys.sites)}Give one of the sites: {', '.join(keys.sites)}."
            raise InputError(f"{where}: coordinates: {site}", "an unknown site", remedy)
    usual = ("none", "none") if "kind" in given else ("vb", "quadratic")
    for table in (run, releases, limits, *([keys.privacy] if keys.privacy else [])):
        fields |= asdict(table)
    del fields["arrivals"]
    fields |= {"text": text, "name": keys.name, "sites": keys.sites, "columns": columns, "missing": keys.missing}
    fields |= {"prior_mean": prior.mean, "prior_scale": prior.scale, "prior_df": prior.student_t}
    if prior.horseshoe is not None:
        fields |= {"prior_horseshoe": prior.horseshoe.on, "prior_global_scale": prior.horseshoe.scale}
    fields |= {
        "kind": str(dynamics.__struct_config__.tag),
        "rates": {key: getattr(dynamics, key) for key in RATES if hasattr(dynamics, key)},
        "reference": dynamics.reference or usual[0],
        "control": dynamics.control or usual[1],
        "chains": dynamics.chains,
        "ess": 1000.0 if run.ess is None and run.duration is None else run.ess,
        "observed_time": limits.observed_time or 1.0,
        "parameters": {site: keys.coordinates[site] for site in keys.sites if site in keys.coordinates},
    }
    study = Study(**fields)
    check_together(study)
    return study


# Consistency of the tables with each other ----------------------------------------------------------------------------

# Releases of derivatives without noise.
EXACT = ("summed", "own")
# In a sum of two, each site knows the other's part.
LEAST_SUMMED = 3
# Number of points at which a private answer in one shot evaluates derivatives.
POINTS = len(ONE_SHOT.steps)


def _require(condition: Any, key: str, found: str, remedy: str) -> None:
    if not condition:
        raise InputError(f"study.toml: {key}", found, remedy)


def check_together(study: Study) -> None:
    """Raise `InputError` for tables that contradict each other."""
    if study.effects is not None:
        _check_effects(study)
    _check_response(study)
    if study.parameters:
        _check_parameters(study)
    remedy = "Add the main effects of every interaction and an intercept, or remove center from the columns."
    found = "'original' with centred columns whose centring cannot be undone"
    _require(study.units != "original" or study.naming is not None, "model: units", found, remedy)
    for key, value in (("mean", study.prior_mean), ("scale", study.prior_scale)):
        count = len(value) if isinstance(value, tuple) else len(study.normal_names)
        remedy = f"Give one for each of {', '.join(study.normal_names)}."
        _require(count == len(study.normal_names), f"prior: {key}", f"{count} numbers", remedy)
    if study.scaled_prior:
        _check_scales(study)
    wanted = f"'none' with reference = {study.reference!r} and control = {study.control!r}"
    remedy = "Allow derivatives = 'summed', 'own' or, under a budget, 'noisy'; or set reference and control to 'none'."
    released = study.derivatives != "none" or (study.reference == "none" and study.control == "none")
    _require(released, "releases: derivatives", wanted, remedy)
    few = study.derivatives == "summed" and len(study.sites) < LEAST_SUMMED
    remedy = f"Use at least {LEAST_SUMMED} sites: in a sum of two, each knows the other's part."
    _require(not few, "releases: derivatives", f"'summed' over {len(study.sites)} sites", remedy)
    _check_private(study)
    remedy = "It needs reference = 'vb' or 'laplace'."
    alone = study.control != "none" and study.reference == "none"
    _require(not alone, "dynamics: control", repr(study.control), remedy)


def _check_effects(study: Study) -> None:
    def require(condition: Any, key: str, found: str, remedy: str) -> None:
        _require(condition, key, f"{found} with effects of groups", remedy)

    slope = None if study.varying is None else study.varying.names[0]
    moved = slope in study.columns and (study.columns[slope].center or study.columns[slope].scale != 1)
    require(study.epsilon is None, "privacy", "a budget", NO_LATENT_BUDGET)
    remedy = "Private effects rotate: use kind = 'Boomerang'."
    require(study.kind == "Boomerang", "dynamics: kind", study.kind, remedy)
    good, remedy = study.reference != "none", "Use reference = 'vb' or 'laplace' with control = 'quadratic'."
    require(good and study.control == "quadratic", "dynamics: reference", repr(study.reference), remedy)
    remedy = "All sites share all parameters: leave the table out."
    require(not study.parameters, "coordinates", "a table", remedy)
    require(not study.assessment, "releases: assessment", "some", "It is not known with effects: leave it out.")
    require(study.prior_scale is not None, "prior", "flat", "Give a scale of the coefficients.")
    found = f"'original' with a varying coefficient of {slope!r}, which is centred or scaled"
    remedy = "Declare the column without center and scale, or use units = 'declared'."
    require(study.units != "original" or not moved, "model: units", found, remedy)


def _check_response(study: Study) -> None:
    if study.model.design is not None and study.model.design.offsets:
        found = f"offset() with family {study.family!r}"
        need = "Offsets are for family 'poisson', and for 'negative_binomial' of known size with effects of groups."
        _require(study.model.takes_offset, "model: formula", found, need)
        found, remedy = "offset() and an offset or exposure too", "Give one of them: both would be added."
        _require("offset" not in study.model.columns, "model: formula", found, remedy)
    if study.model.loss:
        study.design.check_response(study.family, study.model.trials)
    found = f"{', '.join(study.assessment)}, with a model file"
    remedy = "It needs the law of the response, which a model file does not say: use a family, or leave it out."
    _require(not study.assessment or study.model_file is None, "releases: assessment", found, remedy)
    found, remedy = f"'survival' of the family {study.family!r}", "Leave it out: the response is no survival time."
    _require(study.survival or not study.survival_times, "releases: assessment", found, remedy)


def _check_parameters(study: Study) -> None:
    found = f"a table, with family {study.family!r}"
    _require(study.model.loss, "coordinates", found, "Leave the table out.")
    _require(not study.unknown_scale, "model: scale", "no value, with a table [coordinates]", "Give a known scale.")
    for site, names in study.parameters.items():
        remedy = f"Name each once, among {', '.join(study.names)}."
        _require(set(names) <= set(study.names), f"coordinates: {site}", repr(list(names)), remedy)
    local = study.one_shot or (study.kind in ("ZigZag", "FactorisedBoomerang") and study.reference == "none")
    flips = "Only flips in the parameters' own coordinates are local"
    remedy = f"{flips}: use kind = 'ZigZag' with reference = 'none', or remove the table."
    _require(local, "coordinates", f"{study.kind} with reference = {study.reference!r}", remedy)


def _check_scales(study: Study) -> None:
    names = [*study.prior_df, *study.prior_horseshoe]
    good, remedy = set(names) <= set(study.names), f"Name each once, among {', '.join(study.names)}."
    _require(good and len(set(names)) == len(names), "prior", f"student_t or horseshoe of {', '.join(names)}", remedy)
    _require(study.prior_scale is not None, "prior", "flat, with student_t or horseshoe", "Give mean and scale.")
    others = {"a privacy budget": study.epsilon is not None, "a table [coordinates]": study.parameters}
    for what, given in (others | {"effects of groups": study.effects is not None}).items():
        _require(not given, "prior", f"student_t or horseshoe with {what}", "Give a normal prior.")
    mean = np.broadcast_to(study.prior_mean, len(study.names))
    centred = all(mean[study.names.index(name)] == 0 for name in study.prior_horseshoe)
    _require(centred, "prior: mean", "not zero of a parameter of the horseshoe", "Set it to 0.")


def _check_private(study: Study) -> None:
    count = "nothing" if study.colluding is None else study.colluding
    remedy = "Say how many sites may collude with the coordinator if, and only if, derivatives = 'noisy-summed'."
    good = (study.derivatives == "noisy-summed") == (study.colluding is not None)
    _require(good, "privacy: colluding", f"{count} with derivatives = {study.derivatives!r}", remedy)
    if study.colluding is not None:
        check_honest("study.toml: privacy: colluding", len(study.sites), study.colluding)
        remedy = f"It is for [run] method = {PRIVATE_LAPLACE!r}: with arrivals use 'noisy'."
        _require(study.one_shot, "releases: derivatives", "'noisy-summed' with arrivals", remedy)
    if study.one_shot:
        _check_one_shot(study)
    else:
        found = f"{study.derivatives!r} with release = {study.release:g}"
        cost = "Noisy derivatives cost a share of a privacy budget"
        remedy = f"{cost}: set derivatives = 'noisy', and privacy: release = 0.1."
        _require((study.derivatives == "noisy") == (study.release > 0), "releases: derivatives", found, remedy)
    if study.epsilon is None:
        return
    if not study.model.loss:
        _check_private_model(study)
    remedy = "The gradient of a linear regression with an unknown scale has no bound: give a known one."
    _require(not study.unknown_scale, "model: scale", "no value, with a privacy budget", remedy)
    flips = study.one_shot or study.kind in ("ZigZag", "FactorisedBoomerang")
    found = f"a budget with {study.kind} and derivatives = {study.derivatives!r}"
    remedy = "Only coordinate flips can be private, and derivatives without noise cannot: use kind = 'ZigZag' or "
    remedy += "'FactorisedBoomerang' with derivatives = 'none' or 'noisy'."
    _require(flips and study.derivatives not in EXACT, "privacy", found, remedy)
    remedy = "Which records are complete would depend on outcomes, and covariates are public there: set missing = "
    remedy += "'refuse', or neighbours = 'replace'."
    _require(not study.label or study.missing != "drop", "missing", "'drop' with neighbours = 'label'", remedy)
    remedy = "No budget covers them: remove it from the contract."
    _require(not study.assessment, "releases: assessment", "some, with a budget", remedy)
    remedy = "No budget covers them: set passes = false."
    _require(not study.passes, "releases: passes", "true with a budget", remedy)


def _check_one_shot(study: Study) -> None:

    def require(condition: Any, key: str, found: str, remedy: str) -> None:
        _require(condition, key, f"{found} with [run] method = {study.method!r}", remedy)

    require(study.epsilon is not None, "privacy", "nothing", "Give epsilon and delta.")
    remedy = "Set derivatives = 'noisy' or, on a secure sum, 'noisy-summed'."
    require(study.noisy, "releases: derivatives", repr(study.derivatives), remedy)
    found = "a table with derivatives = 'noisy-summed'"
    remedy = "A sum needs all sites in all parameters: leave it out, or set derivatives = 'noisy'."
    require(not study.parameters or not study.summed, "coordinates", found, remedy)
    remedy = "Give a scale: noise can leave a direction unknown."
    require(study.prior_scale is not None, "prior", "flat", remedy)
    count = study.most_derivatives
    require(count >= POINTS, "limits: derivatives", str(count), f"Allow {POINTS}.")


def _check_private_model(study: Study) -> None:
    """Check the requirements of a budget for a model of one record: bounded derivatives on all that is declared."""

    def require(condition: Any, key: str, found: str, remedy: str) -> None:
        _require(condition, key, f"{found} with a budget and family {study.family!r}", remedy)

    remedy = "Use 'replace' or 'add-remove': a model does not say which columns are outcomes."
    require(not study.label, "privacy: neighbours", repr(study.neighbours), remedy)
    remedy = "Say where the parameters stay: region = 3.0."
    require(study.region is not None, "privacy: region", "nothing", remedy)
    require(not study.model.group, "model: group", "groups of rows", "Budgets need one row for each record.")
