"""The study contract: one TOML file with the model, the method, and what may be requested of a site."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fedpdmc.dynamics.jumps import DRAW
from fedpdmc.errors import InputError
from fedpdmc.potentials.random_effects import NaturalScale
from fedpdmc.privacy.schedule import PRIVATE_LAPLACE
from fedpdmc.study import contract_keys as tables
from fedpdmc.study.column import Column
from fedpdmc.study.consistency import check_together
from fedpdmc.study.contract_model import BoundModel
from fedpdmc.study.formula import Design
from fedpdmc.study.mixed_formula import Effects
from fedpdmc.study.strict_toml import Table, naming_file, read_bytes
from fedpdmc.study.units import Named, OriginalUnits, original_units
from fedpdmc.validation import check_name

FORMAT = 1
LOG_SIGMA = "log_sigma"


@dataclass(frozen=True)
class Study:
    """A parsed and checked contract.

    Attributes
    ----------
    text : bytes
        The file's bytes. Their SHA-256 is the study's ``digest``, which coordinator and sites compare.
    derivatives : {"none", "noisy", "noisy-summed", "summed", "own"}
        Whether sites release gradient and Hessian at points of the coordinator's choice: not at all, with noise and charged
        to the privacy budget, only their sum with noise that the sites share, only their sum, or each site's own.
    colluding : int or None
        How many sites may collude with the coordinator if noise is shared.
    passes : bool
        Whether sites release their number of passes over the records.
    rounds : int
        The largest number of requests that a site answers.
    most_derivatives : int
        The largest number of points at which derivatives are released.
    most_records : int
        The largest number of records of a site. Derivatives that this many records cannot have are refused, and under a
        privacy budget it bounds the rounding of sums.
    method : {"exact", "private-laplace"}
        Draws of the exact posterior from arrivals, or of an approximate one from a few noisy derivatives.
    observed_time : float
        The largest process time, summed over chains, that may be observed of a site.
    missing : {"refuse", "drop"}
        How to treat a record with a missing value in a used column.
    units : {"declared", "original"}
        Whether results are per unit of the columns as declared, or with centring and scaling undone.
    assessment : tuple of str
        Which summaries of fit sites may release after the run, of `ASSESSMENTS`.
    parameters : dict
        For sites whose records depend on some parameters only: the names of these parameters.
    model : BoundModel or None
        The model of one record, from a model file (``family`` is then "file") or of the standard library.
    effects : Effects or None
        The effects of groups that stay at their sites.
    prior_df : dict
        Degrees of freedom by name, for parameters with a Student-t prior of the given location and scale.
    prior_horseshoe, prior_global_scale
        The parameters of a horseshoe, whose slab is the given normal prior, and its global scale.
    """

    text: bytes
    name: str
    sites: tuple[str, ...]
    family: str
    formula: str
    options: dict[str, Any]
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
    parameters: dict[str, tuple[str, ...]] = field(default_factory=dict)
    units: str = "declared"
    assessment: tuple[str, ...] = ()
    model: BoundModel | None = None
    effects: Effects | None = None
    prior_df: dict[str, int] = field(default_factory=dict)
    prior_horseshoe: tuple[str, ...] = ()
    prior_global_scale: float = 1.0

    @property
    def digest(self) -> bytes:
        """SHA-256 of the file."""
        return hashlib.sha256(self.text).digest()

    def _repr_html_(self) -> str:
        from fedpdmc.study.description import as_html

        return as_html(self)

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

    @cached_property
    def design(self) -> Design:
        """The formula over the declared columns."""
        if self.model is not None:
            if self.model.design is None:
                raise InputError("study.toml: model: formula", "none", "This model has no linear predictor.")
            return self.model.design
        return Design(self.formula if self.effects is None else self.effects.formula.fixed, self.columns)

    @property
    def model_file(self) -> str | None:
        """The name of the model file, if the contract has one."""
        return None if self.model is None else self.model.file or None

    @property
    def model_digest(self) -> str | None:
        """SHA-256 of the model file, if the contract has one."""
        return None if self.model is None or not self.model.file else self.model.model.digest

    @property
    def used(self) -> set[str]:
        """The declared columns that the model needs."""
        own = set() if self.effects is None else self.effects.columns(self.columns)
        if self.model is not None:
            return self.model.used | own
        return self.design.used | own | {self.options[key] for key in ("offset",) if key in self.options}

    def count(self, records) -> int:
        """Number of records; a group of rows is one."""
        return len(records) if self.model is None else self.model.count(records)

    @property
    def unknown_scale(self) -> bool:
        """Whether the scale of a linear regression is a parameter, as its logarithm: after the coefficients."""
        return self.family == "linear" and "scale" not in self.options

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters' names."""
        spreads = () if self.effects is None else self.effects.names
        return (*self.normal_names, *((LOG_SIGMA,) if self.effects and self.unknown_scale else ()), *spreads)

    @property
    def normal_names(self) -> tuple[str, ...]:
        """The parameters to which the table [prior] gives mean and scale: with effects, spreads have priors of their own."""
        if self.model is not None:
            return self.model.names
        return (*self.design.names, *((LOG_SIGMA,) if self.unknown_scale and self.effects is None else ()))

    @cached_property
    def naming(self) -> OriginalUnits | Named | None:
        """The reported variables, with units = "original" or a model's own; None if they are the parameters."""
        if self.model is not None:
            shown, own = self.model.variables, len(self.model.names)
            return Named(self.names, NaturalScale(self.effects.names, shown, own) if self.effects else shown)
        if self.effects is not None and self.units == "declared":
            return Named(self.names, NaturalScale(self.names))
        return original_units(self) if self.units == "original" else None

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
            middle = [0.5 * (low + high) if name == "Intercept" else 0.0 for name in self.design.names]
            start[: len(middle) + 1] = [*middle, np.log((high - low) / 8)]
        return start

    @property
    def reach(self) -> np.ndarray | None:
        """How much a unit of each parameter can change the logarithm of a mean or of σ; None if there is no logarithm."""
        if self.model is not None:
            return np.append(self.model.reach, np.ones(len(self.names) - len(self.model.names)))
        counts = self.family in ("poisson", "negative_binomial")
        if not counts and not self.unknown_scale and self.effects is None:
            return None
        largest = self.design.largest
        return np.append(largest if counts else 0.0 * largest, np.ones(len(self.names) - len(largest)))

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
        from fedpdmc.models.mixture_prior import mixture_prior

        if self.prior_scale is None:
            return None
        if self.effects is not None:
            return models.spread_prior(
                len(self.normal_names),
                scaled=self.unknown_scale,
                effects=1 if self.effects.formula.slope is None else 2,
                mean=np.asarray(self.prior_mean),
                scale=np.asarray(self.prior_scale),
                spread=self.effects.spread,
                spread_scale=self.effects.spread_scale,
                correlation_scale=self.effects.correlation_scale,
            )
        mean, scale = (np.broadcast_to(x, len(self.names)) for x in (self.prior_mean, self.prior_scale))
        if not self.scaled_prior:
            return models.normal_prior(len(self.names), mean=mean, scale=scale)
        heavy = {self.names.index(name): df for name, df in self.prior_df.items()}
        shrunk = [self.names.index(name) for name in self.prior_horseshoe]
        return mixture_prior(mean, scale, heavy, shrunk, self.prior_global_scale)

    @property
    def scaled_prior(self) -> bool:
        """Whether some parameters have a scale-mixture prior: Student-t or a horseshoe."""
        return bool(self.prior_df or self.prior_horseshoe)

    @property
    def sites_plan(self) -> bool:
        """Whether sites make the plans: not under a budget, which covers any, nor if they do not know all public events."""
        unknown = self.effects is not None or self.scaled_prior or self.parameters or self.control == "linear"
        return self.epsilon is None and not unknown

    def coordinates(self, site: str) -> list[int] | None:
        """The indices of the parameters that a site's records depend on; None for all."""
        own = self.parameters.get(site)
        return None if own is None else [self.names.index(name) for name in own]

    def budget(self, ledger: str | Path | None = None, site: str | None = None, **terms: Any):
        """A site's privacy budget for this study, with bounds from the declared columns; None without a privacy table.

        ``terms`` are the site's own arguments of `Budget`: the data set, and its budget for all studies together.
        """
        from fedpdmc.privacy.budget import Budget
        from fedpdmc.privacy.declared_bounds import Bounds

        if self.epsilon is None:
            return None
        own = None if site is None else self.coordinates(site)
        own = slice(None) if own is None else own
        region = tuple(np.asarray(self.region)[own]) if isinstance(self.region, tuple) else self.region
        if self.model is not None:
            bounds = Bounds(region=region, most_records=self.most_records, **self.model.declared(self.columns))
        else:
            response, offset = self.columns[self.design.response_name], self.options.get("offset")
            bounds = Bounds(
                box=self.design.largest[own],
                outcome=None if response.type == "level" else response.range,
                offset=None if offset is None else self.columns[offset].range,
                region=region,
                most_records=self.most_records,
            )
        agreed = {"epsilon": self.epsilon, "delta": self.delta, "neighbours": self.neighbours, "study": self.name}
        agreed |= {"bounds": bounds, "excess": self.excess, "release": self.release, "ledger": ledger}
        agreed["colluding"] = self.colluding
        return Budget(**agreed | terms)

    def declared_model(self, site: str):
        """What the sensitivity of a site's records depends on, all of it public."""
        from fedpdmc.privacy.sensitivity import Model

        own = self.coordinates(site)
        dim, scale = len(self.names) if own is None else len(own), float(self.options.get("scale", 1.0))
        return Model(self.family, dim, weight=scale**-2.0, df=float(self.options.get("df", 1.0)), scale=scale)

    def dynamics(self):
        """The dynamics with their rates. What leaves a site is a draw, never the normal of a reflection."""
        import fedpdmc.dynamics

        kind = getattr(fedpdmc.dynamics, self.kind)
        return kind(**self.rates) if kind.flips else kind(**self.rates, bounce=DRAW)

    def matrix(self, records, site: str | None = None) -> np.ndarray:
        """The design matrix in the site's own parameters."""
        own = None if site is None else self.coordinates(site)
        matrix = self.design.matrix(records)
        return matrix if own is None else self._own_columns(matrix, own, records)

    def potential(self, records, site: str | None = None):
        """The minus log likelihood of records that `read_records` has checked, in the site's own parameters."""
        from fedpdmc import models

        if self.model is not None:
            model = self.model.potential(records, self.sites[0] if site is None else site)
            return model if self.effects is None else models.with_effects(model, **self._groups(records))
        X, y = self.matrix(records, site), self.design.response(records)
        name = self.options.get("offset")
        offset = None if name is None else np.asarray(records[name], float)
        if self.effects is not None:
            return self._grouped(X, y, offset, records)
        if self.family == "poisson":
            return models.poisson(X, y, offset=offset)
        return getattr(models, self.family)(X, y, **self.options)

    def _grouped(self, X: np.ndarray, y: np.ndarray, offset: np.ndarray | None, records):
        """Records with effects of their groups."""
        from fedpdmc import models

        return models.random_effects(
            X, y, family=self.family, offset=offset, names=self.design.names, **self._groups(records),
            **{key: value for key, value in self.options.items() if key != "offset"},
        )  # fmt: skip

    def _groups(self, records) -> dict[str, Any]:
        """Groups and covariates of their effects, as `fedpdmc.models.random_effects` takes them."""
        assert self.effects is not None
        groups, slope = self.effects.formula.groups, self.effects.formula.slope
        varying = None if slope is None else np.c_[np.ones(len(records)), records[slope].to_numpy(float)]
        labels = records[groups].astype(str).to_numpy() if groups in self.columns else None
        return {"groups": labels, "effects": varying}

    def _own_columns(self, X: np.ndarray, own: list[int], records) -> np.ndarray:
        from fedpdmc.study.value_checks import Fault, refuse_records

        others, names = np.setdiff1d(np.arange(X.shape[1]), own), self.names
        remedy = "By the contract this site's records do not: correct the records or [coordinates]."
        faults = [
            Fault(int(row), "", f"a record that depends on {names[others[column]]!r}", remedy)
            for row, column in np.argwhere(X[:, others] != 0)
        ]
        if faults:
            raise refuse_records(records, faults)
        return np.ascontiguousarray(X[:, own])


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
    top = Table.parse(text, "study.toml")
    if top.whole("format") != FORMAT:
        raise InputError("study.toml: format", str(top.values["format"]), f"This version of fedpdmc reads {FORMAT}.")
    sites = tuple(check_name(site) for site in top.texts("sites"))
    fields: dict[str, Any] = {"text": text, "name": top.text("name"), "sites": sites}
    fields["missing"] = top.text("missing", "refuse", among=("refuse", "drop"))
    fields["columns"] = tables.read_columns(top.table("columns"))
    fields |= tables.read_likelihood(top.table("model"), fields["columns"], sites, file)
    fields |= tables.read_prior(top.table("prior"), fields.get("effects"))
    fields |= tables.read_dynamics(top.table("dynamics", None))
    fields |= tables.read_run(top.table("run", None))
    fields |= tables.read_releases(top.table("releases"), top.table("limits"), fields["method"] == PRIVATE_LAPLACE)
    fields |= tables.read_privacy(top)
    fields["parameters"] = tables.read_parameters(top, sites)
    top.done()
    study = Study(**fields)
    check_together(study)
    return study
