"""The study contract: one TOML file with the model, the method, and what may be requested of a site."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fedpdmc.errors import InputError
from fedpdmc.privacy.schedule import PRIVATE_LAPLACE
from fedpdmc.study.consistency import check_together
from fedpdmc.study.formula import Design
from fedpdmc.study.strict_toml import Table, naming_file, read_bytes
from fedpdmc.study.units import Named, OriginalUnits, original_units
from fedpdmc.validation import check_name, one_script

FORMAT = 1
FAMILIES = ("linear", "logistic", "poisson", "student_t")
TYPES = ("number", "count", "level")
KINDS = {"ZigZag": ("excess",), "BouncyParticle": ("refresh",), "Boomerang": ("refresh",),
         "FactorisedBoomerang": ("refresh", "excess")}  # fmt: skip
# What sites may release of their derivatives, from least to most.
DERIVATIVES = ("none", "noisy", "noisy-summed", "summed", "own")
LOG_SIGMA = "log_sigma"
# What sites may tell of how their records fit, after the run: see fedpdmc.assessment.
ASSESSMENTS = ("loo", "checks", "influence")
DEFAULT_REFRESH = {"Boomerang": 1.2}


@dataclass(frozen=True)
class Column:
    """A declared column of the records.

    ``number`` and ``count`` have bounds; values outside are refused. The model uses ``(f(value) − center)/scale``, where f
    is the logarithm if ``log``. ``level`` has a list of levels, of which the first is the baseline.
    """

    name: str
    type: str
    levels: tuple[str, ...] = ()
    bounds: tuple[float, float] = (0.0, 0.0)
    center: float = 0.0
    scale: float = 1.0
    log: bool = False

    @property
    def range(self) -> tuple[float, float]:
        """The bounds after the transformation to model units."""
        low, high = (float(np.log(x)) if self.log else x for x in self.bounds)
        return (low - self.center) / self.scale, (high - self.center) / self.scale


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
        How many sites may collude with the coordinator where noise is shared.
    passes : bool
        Whether sites release their number of passes over the records.
    rounds : int
        The largest number of requests that a site answers.
    most_derivatives : int
        The largest number of points at which derivatives are released.
    most_records : int
        The largest number of records of a site. Derivatives that so many records could not have are refused, and under a
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
    rates: dict[str, float]
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

    @property
    def digest(self) -> bytes:
        """SHA-256 of the file."""
        return hashlib.sha256(self.text).digest()

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

    @cached_property
    def design(self) -> Design:
        """The formula over the declared columns."""
        return Design(self.formula, self.columns)

    @property
    def unknown_scale(self) -> bool:
        """Whether the scale of a linear regression is a parameter: the last one, as its logarithm."""
        return self.family == "linear" and "scale" not in self.options

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters' names."""
        return (*self.design.names, LOG_SIGMA) if self.unknown_scale else self.design.names

    @cached_property
    def naming(self) -> OriginalUnits | Named | None:
        """The variables that are reported, with units = "original"; None where they are the parameters."""
        return original_units(self) if self.units == "original" else None

    @property
    def guess(self) -> np.ndarray | None:
        """Start of the search for the mode, if not the prior's mean: σ is an eighth of the response's range."""
        if not self.unknown_scale:
            return None
        low, high = self.columns[self.design.response_name].range
        middle = [0.5 * (low + high) if name == "Intercept" else 0.0 for name in self.design.names]
        return np.array([*middle, np.log((high - low) / 8)])

    @property
    def reach(self) -> np.ndarray | None:
        """How much a unit of each parameter can change the logarithm of a mean or of σ; None if there is no logarithm."""
        if self.unknown_scale:
            return np.eye(len(self.names))[-1]
        return self.design.largest if self.family == "poisson" else None

    def prior(self):
        """The prior, or None for a flat one."""
        from fedpdmc.models import normal_prior

        if self.prior_scale is None:
            return None
        return normal_prior(len(self.names), mean=np.asarray(self.prior_mean), scale=np.asarray(self.prior_scale))

    def coordinates(self, site: str) -> list[int] | None:
        """The indices of the parameters that a site's records depend on; None for all."""
        own = self.parameters.get(site)
        return None if own is None else [self.names.index(name) for name in own]

    def budget(self, ledger: str | Path | None = None, site: str | None = None, **terms: Any):
        """A site's privacy budget for this study, with bounds from the declared columns; None without a privacy table.

        ``terms`` are the site's own arguments of `Budget`: the data set, and its budget for all studies together.
        """
        from fedpdmc.privacy.bounds import Bounds
        from fedpdmc.privacy.budget import Budget

        if self.epsilon is None:
            return None
        response, offset = self.columns[self.design.response_name], self.options.get("offset")
        own = None if site is None else self.coordinates(site)
        own = slice(None) if own is None else own
        bounds = Bounds(
            box=self.design.largest[own],
            outcome=None if response.type == "level" else response.range,
            offset=None if offset is None else self.columns[offset].range,
            region=tuple(np.asarray(self.region)[own]) if isinstance(self.region, tuple) else self.region,
            most_records=self.most_records,
        )
        agreed = {"epsilon": self.epsilon, "delta": self.delta, "neighbours": self.neighbours, "study": self.name}
        agreed |= {"bounds": bounds, "excess": self.excess, "release": self.release, "ledger": ledger}
        agreed["colluding"] = self.colluding
        return Budget(**agreed | terms)

    def dynamics(self):
        """The dynamics with their rates."""
        import fedpdmc.dynamics

        return getattr(fedpdmc.dynamics, self.kind)(**self.rates)

    def matrix(self, records, site: str | None = None) -> np.ndarray:
        """The design matrix in the site's own parameters."""
        own = None if site is None else self.coordinates(site)
        matrix = self.design.matrix(records)
        return matrix if own is None else self._own_columns(matrix, own, records)

    def potential(self, records, site: str | None = None):
        """The minus log likelihood of records that `read_records` has checked, in the site's own parameters."""
        from fedpdmc import models

        X, y = self.matrix(records, site), self.design.response(records)
        if self.family == "poisson":
            name = self.options.get("offset")
            return models.poisson(X, y, offset=None if name is None else np.asarray(records[name], float))
        return getattr(models, self.family)(X, y, **self.options)

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
    """Read a contract from a TOML file."""
    with naming_file("study.toml", path):
        return parse_study(read_bytes(path, "study"))


def parse_study(text: bytes) -> Study:
    """Parse and check a whole contract."""
    top = Table.parse(text, "study.toml")
    if top.whole("format") != FORMAT:
        raise InputError("study.toml: format", str(top.values["format"]), f"This version of fedpdmc reads {FORMAT}.")
    sites = tuple(check_name(site) for site in top.texts("sites"))
    fields: dict[str, Any] = {"text": text, "name": top.text("name"), "sites": sites}
    fields["missing"] = top.text("missing", "refuse", among=("refuse", "drop"))
    fields["columns"] = _columns(top.table("columns"))
    fields |= _model(top.table("model"), fields["columns"])
    fields |= _prior(top.table("prior"))
    fields |= _dynamics(top.table("dynamics", None))
    fields |= _run(top.table("run", None))
    fields |= _releases(top.table("releases"), top.table("limits"), fields["method"] == PRIVATE_LAPLACE)
    fields |= _privacy(top)
    fields["parameters"] = _parameters(top, sites)
    top.done()
    study = Study(**fields)
    check_together(study)
    return study


def _columns(table: Table) -> dict[str, Column]:
    columns = {}
    for name in table.keys():
        if not name.isidentifier() or not one_script(name):
            raise InputError(f"{table.where}: {name}", repr(name), "Use letters of one script, digits and underscores.")
        one = table.table(name)
        kind = one.text("type", among=TYPES)
        if kind == "level":
            columns[name] = Column(name, kind, levels=one.texts("levels", least=2))
        else:
            bounds = one.numbers("bounds")
            log = one.flag("log", False)
            if not isinstance(bounds, tuple) or len(bounds) != 2 or not bounds[0] < bounds[1]:
                raise InputError(f"{one.where}: bounds", repr(bounds), "Give [least, most].")
            if log and bounds[0] <= 0:
                raise InputError(f"{one.where}: bounds", repr(bounds), "A logarithm needs a positive least value.")
            if kind == "count" and bounds[0] < 0:
                raise InputError(f"{one.where}: bounds", repr(bounds), "Counts are zero or positive.")
            scale = one.number("scale", 1.0, least=1e-300)
            columns[name] = Column(name, kind, (), bounds, one.number("center", 0.0), scale, log)
        one.done()
    return columns


def _model(table: Table, columns: dict[str, Column]) -> dict[str, Any]:
    family, options = table.text("family", among=FAMILIES), {}
    if family == "student_t" or (family == "linear" and "scale" in table.values):
        options["scale"] = table.number("scale", least=1e-300)
    elif family == "linear":
        table.number("scale", None)
    if family == "student_t":
        options["df"] = table.number("df", least=1e-3)
    if family == "poisson" and (offset := table.text("offset", None)) is not None:
        if offset not in columns or columns[offset].type == "level":
            raise InputError(f"{table.where}: offset", repr(offset), "Name a declared column of numbers.")
        options["offset"] = offset
    formula, units = table.text("formula"), table.text("units", "declared", among=("declared", "original"))
    table.done()
    return {"family": family, "options": options, "formula": formula, "units": units}


def _prior(table: Table) -> dict[str, Any]:
    flat = table.flag("flat", False)
    mean, scale = table.numbers("mean", 0.0), None if flat else table.numbers("scale")
    if scale is not None and np.min(scale) <= 0:
        raise InputError(f"{table.where}: scale", repr(scale), "Give positive standard deviations.")
    table.done()
    return {"prior_mean": mean, "prior_scale": scale}


def _dynamics(table: Table) -> dict[str, Any]:
    few = "kind" not in table.values
    kind = table.text("kind", "Boomerang", among=tuple(KINDS))
    rates = {}
    for rate in KINDS[kind]:
        default = 0.0 if rate == "excess" else DEFAULT_REFRESH.get(kind, 1.0)
        rates[rate] = table.number(rate, default, least=0.0)
    reference = table.text("reference", "vb" if few else "none", among=("vb", "laplace", "none"))
    control = table.text("control", "quadratic" if few else "none", among=("none", "linear", "quadratic"))
    chains = table.whole("chains", 64, least=1, most=2**16)
    table.done()
    return {"kind": kind, "rates": rates, "reference": reference, "control": control, "chains": chains}


def _run(table: Table) -> dict[str, Any]:
    ess, duration = (table.number(key, None, least=1e-300) for key in ("ess", "duration"))
    if ess is not None and duration is not None:
        raise InputError(table.where, "ess and duration", "Give one of them.")
    burn_in = table.number("burn_in", None, least=0.0)
    method = table.text("method", "exact", among=("exact", PRIVATE_LAPLACE))
    table.done()
    ess = 1000.0 if ess is None and duration is None else ess
    return {"ess": ess, "duration": duration, "burn_in": burn_in, "method": method}


def _releases(releases: Table, limits: Table, one_shot: bool) -> dict[str, Any]:
    if releases.flag("arrivals", not one_shot) == one_shot:
        found, right = ("true", "false") if one_shot else ("false", "true")
        raise InputError(
            f"{releases.where}: arrivals", f"{found} with this [run] method", f"Set it to {right}, or remove it."
        )
    derivatives, passes = releases.text("derivatives", "none", among=DERIVATIVES), releases.flag("passes", False)
    assessment = releases.texts("assessment", ())
    if not set(assessment) <= set(ASSESSMENTS):
        raise releases.invalid("assessment", f"Give some of {', '.join(map(repr, ASSESSMENTS))}.")
    releases.done()
    found = {
        "derivatives": derivatives,
        "passes": passes,
        "assessment": assessment,
        "rounds": limits.whole("rounds", least=1, most=2**62),
        "most_derivatives": limits.whole("derivatives", 12, least=0),
        "most_records": limits.whole("records", 1_000_000, least=1),
        "observed_time": limits.number("observed_time", *((1.0,) if one_shot else ()), least=1e-300),
    }
    limits.done()
    return found


def _privacy(top: Table) -> dict[str, Any]:
    if "privacy" not in top.values:
        return {}
    table = top.table("privacy")
    found = {
        "epsilon": table.number("epsilon", least=1e-6),
        "delta": table.number("delta", least=1e-300, most=0.5),
        "neighbours": table.text("neighbours", "replace", among=("replace", "add-remove", "label")),
        "excess": table.number("excess", None, least=1e-300),
        "region": table.numbers("region", None) if "region" in table.values else None,
        "release": table.number("release", 0.0, least=0.0, most=0.99),
        "colluding": table.whole("colluding", None, least=0) if "colluding" in table.values else None,
    }
    table.done()
    return found


def _parameters(top: Table, sites: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """The table [coordinates]: parameters of sites whose records do not depend on all of them."""
    if "coordinates" not in top.values:
        return {}
    table = top.table("coordinates")
    found = {site: table.texts(site) for site in sites if site in table.values}
    table.done()
    return found
