"""The content of a model file: its inputs and its programs."""

from __future__ import annotations

from typing import NamedTuple

from fedpdmc.models.model_file.program import Program, Type

# What the values of a column can be. ``index`` is a whole number from zero, with its number of levels.
DOMAINS = ("real", "positive", "nonnegative", "unit", "binary", "count", "index")


class Parameter(NamedTuple):
    """Unconstrained coordinates by one name."""

    name: str
    type: Type


class Predictor(NamedTuple):
    """Linear predictors ``X·β``, one for each entry; the contract's formula gives X. Without intercept, X has none."""

    name: str
    type: Type
    intercept: bool = True


class Column(NamedTuple):
    """A value of each record, or of each row of a group of rows."""

    name: str
    type: Type
    domain: str
    levels: int = 0


class Constant(NamedTuple):
    """Numbers that the contract gives, the same for all records of a site."""

    name: str
    type: Type


class Group(NamedTuple):
    """A record is a group of at most ``length`` rows; ``mask`` is one for its rows and zero for what fills it up."""

    length: int
    mask: str


class Source(NamedTuple):
    """A model file.

    Attributes
    ----------
    title : str
    parameters, predictors, columns, constants : tuples
        The inputs. Together with the names of the group's mask no two have the same name.
    group : Group or None
    likelihood : Program
        Minus the log likelihood of one record, a number.
    variables : Program or None
        Named functions of the parameters, for results.
    prior : Program or None
        Minus the log prior density of the parameters, a number.
    """

    title: str
    parameters: tuple[Parameter, ...]
    predictors: tuple[Predictor, ...]
    columns: tuple[Column, ...]
    constants: tuple[Constant, ...]
    group: Group | None
    likelihood: Program
    variables: Program | None = None
    prior: Program | None = None

    @property
    def inputs(self) -> dict[str, Type]:
        """All inputs of the likelihood."""
        inputs: dict[str, Type] = {}
        for part in (self.parameters, self.predictors, self.columns, self.constants):
            inputs |= {one.name: one.type for one in part}
        return inputs if self.group is None else {**inputs, self.group.mask: Type("f64", (self.group.length,))}

    @property
    def own(self) -> dict[str, Type]:
        """The inputs of variables and prior: the parameters alone."""
        return {one.name: one.type for one in self.parameters}

    @property
    def programs(self) -> dict[str, tuple[Program, dict[str, Type]]]:
        """The programs with their inputs, by their names in the file."""
        found = {"minus_log_likelihood": (self.likelihood, self.inputs)}
        if self.variables is not None:
            found["variables"] = (self.variables, self.own)
        if self.prior is not None:
            found["minus_log_prior"] = (self.prior, self.own)
        return found
