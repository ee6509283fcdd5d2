"""`Model`: a model of one record, from a Python function or from a file, always by way of the file's text."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedpdmc._jax.precision import double_precision
from fedpdmc.errors import InputError
from fedpdmc.models.model_file.evaluation import check, evaluate
from fedpdmc.models.model_file.grammar import IDENTIFIER, MOST_BYTES, RESERVED, parse, render
from fedpdmc.models.model_file.program import Type
from fedpdmc.models.model_file.records import Layout, RecordModel, record_model
from fedpdmc.models.model_file.review import review
from fedpdmc.models.model_file.source import DOMAINS, Column, Constant, Group, Parameter, Predictor, Source
from fedpdmc.models.model_file.tracing import CALL, trace


class Model:
    """A model of one record: minus its log likelihood as a program that can be read, sent and checked.

    Parameters
    ----------
    function : callable
        ``f(x, row)``, minus the log likelihood of one record, in JAX. ``x`` holds parameters and linear predictors by name,
        ``row`` columns and constants.
    parameters : mapping or sequence
        Names of unconstrained coordinates, with shapes if they are arrays: ``{"beta": 3, "log_shape": ()}``.
    columns : mapping
        What the columns of a record can be: ``real``, ``positive``, ``nonnegative``, ``unit`` (between 0 and 1), ``binary``
        (0 or 1), ``count``, or a whole number K of levels, which enter as 0 to K − 1.
    predictors : mapping or sequence
        Names of linear predictors ``X·β``, whose coefficients are parameters too and come first. X comes from the formula of
        a contract, or from `of`.
    constants : mapping
        Names and shapes of numbers that are the same for all records of a site.
    variables : callable, optional
        From the parameters by name to named arrays that results show, such as ``{"shape": exp(x["log_shape"])}``.
    prior : callable, optional
        Minus the log prior density of the parameters.
    intercept : bool
        Whether the predictors' X has an intercept.
    group : (int, str), optional
        A record is a group of at most so many rows. Columns are then arrays of that length, and the named one is one for the
        group's rows and zero for what fills it up.
    title : str

    Attributes
    ----------
    text : str
        The model file.
    digest : str
        Its SHA-256, by which a contract names it.
    """

    @double_precision
    def __init__(
        self,
        function: Callable[[Mapping[str, Any], Mapping[str, Any]], Any],
        *,
        parameters: Mapping[str, Any] | Sequence[str] = (),
        columns: Mapping[str, str | int],
        predictors: Mapping[str, Any] | Sequence[str] = (),
        constants: Mapping[str, Any] | Sequence[str] = (),
        variables: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None,
        prior: Callable[[Mapping[str, Any]], Any] | None = None,
        intercept: bool = True,
        group: tuple[int, str] | None = None,
        title: str = "a model",
    ):
        shape: tuple[int, ...] = () if group is None else (int(group[0]),)
        inputs = Source(
            title=_title(title),
            parameters=tuple(Parameter(*one) for one in _shapes("parameters", parameters)),
            predictors=tuple(Predictor(*one, intercept) for one in _shapes("predictors", predictors)),
            columns=tuple(_column(name, kind, shape) for name, kind in columns.items()),
            constants=tuple(Constant(*one) for one in _shapes("constants", constants)),
            group=None if group is None else Group(int(group[0]), _name("group", group[1])),
            likelihood=None,  # type: ignore[arg-type]
        )
        own = [one.name for one in inputs.parameters]
        x = own + [one.name for one in inputs.predictors]
        rows = [name for name in inputs.inputs if name not in x]
        if len(inputs.inputs) != len(x) + len(rows) or len(set(x) | set(rows)) != _count(inputs):
            raise InputError(
                "Model", "two inputs of one name", "Give every parameter, predictor and column its own name."
            )
        likelihood = trace(function, inputs.inputs, {"x": x, "row": rows})
        parts = {
            part: None if given is None else trace(given, inputs.own, {"x": own})
            for part, given in (("variables", variables), ("prior", prior))
        }
        self._take(render(inputs._replace(likelihood=likelihood, **parts)).encode(), CALL)

    @classmethod
    @double_precision
    def from_numpyro(cls, model: Callable, columns: Mapping[str, Any], title: str = "a NumPyro model") -> Model:
        """A model file from a NumPyro model of independent records.

        The model is called as ``model(**arrays)`` with arrays of one record: its observed sites give minus the log
        likelihood, its latent variables the parameters with their prior (`prior`), and results show them constrained.

        Parameters
        ----------
        model : callable
            Takes arrays with the records along the first axis, by keyword, and has them in a plate of that length. Latent
            variables are outside the plate.
        columns : mapping
            What each array can be, as `Model` takes it; for a matrix a mapping from the names of its columns to that.
        title : str
        """
        from fedpdmc.models.model_file.from_numpyro import parts_of

        return cls(title=title, **parts_of(model, columns))

    @classmethod
    def load(cls, path: str | Path) -> Model:
        """Read a model file, such as ``fedpdmc model build`` writes it."""
        path = Path(path)
        try:
            with path.open("rb") as file:
                text = file.read(MOST_BYTES + 1)
        except OSError as error:
            raise InputError("model file", f"{error.strerror}: {path}", "Give a file that can be read.") from error
        return parsed(text, str(path))

    @classmethod
    def parse(cls, text: bytes, where: str = "model file") -> Model:
        """Read and check the text of a model file."""
        model = cls.__new__(cls)
        model._take(text, where)
        return model

    def _take(self, text: bytes, where: str) -> None:
        self.source = parse(text, where)
        self.work = check(self.source, where)
        self.text, self.digest = text.decode(), hashlib.sha256(text).hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Model) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"Model({self.source.title!r}, {self.operations} operations, sha256 {self.digest[:12]})"

    @property
    def operations(self) -> int:
        """Number of equations of all programs."""
        return sum(len(program.equations) for program, _ in self.source.programs.values())

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns of a record."""
        return tuple(column.name for column in self.source.columns)

    def save(self, path: str | Path) -> Path:
        """Write the model file."""
        path = Path(path)
        path.write_bytes(self.text.encode())
        return path

    def review(self) -> str:
        """What the model uses, its formulas, and its values at test points, for someone who decides about it."""
        return review(self)

    def minus_log_likelihood(self, x: Mapping[str, Any], row: Mapping[str, Any]) -> Any:
        """Minus the log likelihood of one record, from parameters, predictors, columns and constants by name."""
        return evaluate(self.source.likelihood, {**x, **row})[""]

    def of(
        self,
        columns: Mapping[str, Any],
        X: Any = None,
        constants: Mapping[str, Any] | None = None,
        names: Sequence[str] | None = None,
    ) -> RecordModel:
        """The model of a site's records, as `fedpdmc.Site` takes it.

        Parameters
        ----------
        columns : mapping
            An array of one entry (one row of entries, for groups) for each record, by the name of the column.
        X : array of shape (n, p), optional
            For models with linear predictors.
        constants : mapping, optional
        names : sequence of str, optional
            Of the columns of X.
        """
        return record_model(self, columns, X, constants or {}, names)

    def prior(self) -> Callable[[Any], Any]:
        """Minus the log prior that the file holds, a function of the coordinates, as `fedpdmc.sample` takes it."""
        if self.source.prior is None or self.source.predictors:
            raise InputError(
                "Model.prior", "a model without a prior of all its coordinates", "Give a prior to fp.sample."
            )
        return FilePrior(self)


@dataclasses.dataclass(frozen=True)
class FilePrior:
    """Minus the log prior density that a model file holds, as a function of the coordinates."""

    model: Model

    def __call__(self, x):
        """At coordinates x."""
        program = self.model.source.prior
        assert program is not None
        return evaluate(program, Layout(self.model.source, 0).split(x)[1])[""]


@functools.lru_cache(64)
def parsed(text: bytes, where: str = "model file") -> Model:
    """The model of a text, read once."""
    return Model.parse(text, where)


# Arguments ------------------------------------------------------------------------------------------------------------


def _count(source: Source) -> int:
    parts = (source.parameters, source.predictors, source.columns, source.constants)
    return sum(map(len, parts)) + (source.group is not None)


def _name(argument: str, name: Any) -> str:
    if not isinstance(name, str) or not IDENTIFIER.fullmatch(name) or name in RESERVED:
        raise InputError(f"Model({argument})", repr(name), "Give names of letters, digits and underscores, at most 40.")
    return name


def _title(title: Any) -> str:
    if not isinstance(title, str) or not title.strip() or not title.isascii() or not title.isprintable():
        raise InputError("Model(title)", repr(title), "Give one line of ASCII text.")
    return title.strip()[:120]


def _shapes(argument: str, given: Mapping[str, Any] | Sequence[str]) -> list[tuple[str, Type]]:
    """Names with types of real numbers; a sequence names scalars."""
    if isinstance(given, str):
        given = [given]
    items = given.items() if isinstance(given, Mapping) else [(name, ()) for name in given]
    out = []
    for name, shape in items:
        sizes = np.atleast_1d(np.asarray([] if shape is None or shape == () else shape))
        if sizes.size and (sizes.dtype.kind not in "iu" or sizes.min() < 1):
            raise InputError(
                f"Model({argument})", f"shape {shape!r} of {name!r}", "Give whole numbers of at least one."
            )
        out.append((_name(argument, name), Type("f64", tuple(int(n) for n in sizes))))
    return out


def _column(name: str, kind: Any, shape: tuple[int, ...]) -> Column:
    _name("columns", name)
    if isinstance(kind, (int, np.integer)) and not isinstance(kind, bool) and kind >= 2:
        return Column(name, Type("i64", shape), "index", int(kind))
    if not isinstance(kind, str) or kind not in DOMAINS or kind == "index":
        words = ", ".join(map(repr, DOMAINS[:-1]))
        raise InputError(f"Model(columns: {name})", repr(kind), f"Give one of {words}, or a number of levels.")
    return Column(name, Type("f64", shape), kind)
