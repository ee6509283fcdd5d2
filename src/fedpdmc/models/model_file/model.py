"""`Model`: a model of one record, from a Python function or from a file, always by way of the file's text."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from fedpdmc._jax.precision import double_precision
from fedpdmc.errors import InputError
from fedpdmc.models.model_file.allowed_operations import (
    DOMAINS,
    Constant,
    Equation,
    FileColumn,
    FileProgram,
    Literal,
    Name,
    Operand,
    Parameter,
    Predictor,
    RowGroup,
    Source,
    Type,
    check,
    evaluate,
)
from fedpdmc.models.model_file.records import Layout, RecordModel, record_model
from fedpdmc.models.model_file.review import review
from fedpdmc.models.model_file.tracing import CALL, trace

FIRST = "fedpdmc model 1"
MOST_BYTES, MOST_LINE, MOST_TITLE = 2**18, 2**14, 120
MOST_EQUATIONS, MOST_INPUTS, MOST_RANK, MOST_ENTRIES = 4096, 64, 6, 2**14
IDENTIFIER = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,39}")
RESERVED = {"inf", "nan", "true", "false", "return", "end"}
TYPE = re.compile(r"(f64|i64|bool)\[((?:0|[1-9][0-9]{0,5})(?:,(?:0|[1-9][0-9]{0,5}))*)?\]")
WHOLE = re.compile(r"-?(?:0|[1-9][0-9]{0,17})")
REAL = re.compile(r"-?[0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]{1,3})?")
REFERENCE = re.compile(r"%([1-9][0-9]{0,4})")
LIST = re.compile(r"\[([^\[\]]*)\]")
HEADERS = ("group", "parameter", "predictor", "column", "constant")
PROGRAMS = ("minus_log_likelihood", "variables", "minus_log_prior")


# Written --------------------------------------------------------------------------------------------------------------


def render(source: Source) -> str:
    """The text of a model file."""
    lines = [FIRST, f"title {source.title}"]
    if source.group is not None:
        lines.append(f"group {source.group.length} {source.group.mask}")
    lines += [f"parameter {one.name} {one.type}" for one in source.parameters]
    for one in source.predictors:
        lines.append(f"predictor {one.name} {one.type}{'' if one.intercept else ' without intercept'}")
    for one in source.columns:
        levels = f" {one.levels}" if one.domain == "index" else ""
        lines.append(f"column {one.name} {one.type} {one.domain}{levels}")
    lines += [f"constant {one.name} {one.type}" for one in source.constants]
    for name, (program, _) in source.programs.items():
        lines += [name, *(f"%{i} = {_line(one)}" for i, one in enumerate(program.equations, 1))]
        lines.append(" ".join(["return", *(f"{name}={x}" if name else str(x) for name, x in program.results)]))
    return "\n".join([*lines, "end", ""])


def _line(equation: Equation) -> str:
    params = [f"{name}={_value(value)}" for name, value in equation.params]
    return " ".join([equation.operation, *map(str, equation.operands), *params, ":", str(equation.type)])


def _value(value: Any) -> str:
    return f"[{','.join(str(Literal(x)) for x in value)}]" if isinstance(value, tuple) else str(value)


# Read -----------------------------------------------------------------------------------------------------------------


def parse(text: bytes, where: str = "model file") -> Source:
    """Read a model file.

    Raises
    ------
    InputError
        Names the line.
    """
    if len(text) > MOST_BYTES:
        raise InputError(where, f"{len(text):,} bytes", f"Give at most {MOST_BYTES:,}.")
    try:
        decoded = text.decode("ascii")
    except UnicodeDecodeError as error:
        line, letter = text.count(b"\n", 0, error.start) + 1, text[error.start :].decode(errors="replace")[0]
        found = f"a character that is not ASCII ({ascii(letter)})"
        raise InputError(f"{where}, line {line}", found, "Give a file from `fedpdmc model build`.") from error
    source = _Reader(decoded, where).source()
    if render(source).encode() != text:
        raise InputError(
            where, "a text that is not in its usual form", "Give a file from `fedpdmc model build`, unchanged."
        )
    return source


class _Reader:
    """Reads a text line by line."""

    def __init__(self, text: str, where: str):
        self.lines, self.at, self.where = text.split("\n"), 0, where

    def fail(self, what: str) -> NoReturn:
        raise InputError(
            f"{self.where}, line {self.at}", what[:200], "Give a file from `fedpdmc model build`, unchanged."
        )

    def next(self) -> str:
        if self.at >= len(self.lines):
            self.fail("no line `end`")
        self.at += 1
        line = self.lines[self.at - 1]
        if len(line) > MOST_LINE or not line.isprintable():
            self.fail(
                f"a line of {len(line)} characters" if line.isprintable() else "a character that is not printable"
            )
        return line

    def source(self) -> Source:
        """The whole file."""
        if self.next() != FIRST:
            self.fail(f"another first line than {FIRST!r}")
        title = self.next().removeprefix("title ")
        if not title or len(title) > MOST_TITLE:
            self.fail("no title, or a long one")
        inputs: dict[str, list[Any]] = {name: [] for name in HEADERS}
        names: set[str] = set()
        while (words := self.next().split(" "))[0] in HEADERS:
            one = getattr(self, f"_{words[0]}")(words)
            inputs[words[0]].append(one)
            name = one.mask if isinstance(one, RowGroup) else one.name
            if name in names or len(names) >= MOST_INPUTS:
                self.fail(f"the name {name!r} twice" if name in names else f"more than {MOST_INPUTS} inputs")
            names.add(name)
        if len(inputs["group"]) > 1:
            self.fail("two groups")
        programs = {}
        while (name := " ".join(words)) != "end":
            if name not in PROGRAMS or name in programs:
                self.fail(f"{name!r} where a program begins")
            programs[name] = self._program()
            words = self.next().split(" ")
        if "minus_log_likelihood" not in programs:
            self.fail("no minus_log_likelihood")
        parts = [tuple(inputs[name]) for name in HEADERS[1:]]
        likelihood, variables, prior = (programs.get(name) for name in PROGRAMS)
        assert likelihood is not None
        group = inputs["group"][0] if inputs["group"] else None
        return Source(title, parts[0], parts[1], parts[2], parts[3], group, likelihood, variables, prior)

    # Inputs

    def name(self, word: str) -> str:
        if not IDENTIFIER.fullmatch(word) or word in RESERVED:
            self.fail(f"{word!r} where a name belongs")
        return word

    def type(self, word: str) -> Type:
        found = TYPE.fullmatch(word)
        if found is None:
            self.fail(f"{word!r} where a type belongs")
        type = Type(found[1], tuple(int(n) for n in found[2].split(",")) if found[2] else ())
        if len(type.shape) > MOST_RANK or type.size > MOST_ENTRIES:
            self.fail(f"a value of type {type}: at most {MOST_ENTRIES} entries and {MOST_RANK} axes")
        return type

    def words(self, words: list[str], count: int) -> None:
        if len(words) != count:
            self.fail(f"{' '.join(words)!r}")

    def _group(self, words: list[str]) -> RowGroup:
        self.words(words, 3)
        length = self.whole(words[1])
        if not 1 <= length <= MOST_ENTRIES:
            self.fail(f"a group of {length} rows")
        return RowGroup(length, self.name(words[2]))

    def _parameter(self, words: list[str]) -> Parameter:
        self.words(words, 3)
        type = self.type(words[2])
        if type.kind != "f64" or len(type.shape) > 2 or not type.size:
            self.fail(f"a parameter of type {type}")
        return Parameter(self.name(words[1]), type)

    def _predictor(self, words: list[str]) -> Predictor:
        without = words[3:] == ["without", "intercept"]
        self.words(words[: 3 if without else None], 3)
        type = self.type(words[2])
        if type.kind != "f64" or len(type.shape) > 1 or not type.size:
            self.fail(f"a predictor of type {type}")
        return Predictor(self.name(words[1]), type, not without)

    def _column(self, words: list[str]) -> FileColumn:
        index = words[3:4] == ["index"]
        self.words(words, 5 if index else 4)
        if words[3] not in DOMAINS:
            self.fail(f"{words[3]!r} where one of {', '.join(DOMAINS)} belongs")
        levels = self.whole(words[4]) if index else 0
        if index and not 2 <= levels <= MOST_ENTRIES:
            self.fail(f"{levels} levels")
        type = self.type(words[2])
        if type.kind != ("i64" if index else "f64"):
            self.fail(f"a column of type {type}")
        return FileColumn(self.name(words[1]), type, words[3], levels)

    def _constant(self, words: list[str]) -> Constant:
        self.words(words, 3)
        type = self.type(words[2])
        if type.kind != "f64" or len(type.shape) > 2:
            self.fail(f"a constant of type {type}")
        return Constant(self.name(words[1]), type)

    # Programs

    def _program(self) -> FileProgram:
        equations: list[Equation] = []
        while not (line := self.next()).startswith("return "):
            head = f"%{len(equations) + 1} = "
            if not line.startswith(head) or len(equations) >= MOST_EQUATIONS:
                self.fail(f"{line[:80]!r} where equation {len(equations) + 1} or 'return' belongs")
            equations.append(self._equation(line.removeprefix(head).split(" "), len(equations)))
        results = []
        for word in line.split(" ")[1:]:
            name, mark, operand = word.rpartition("=")
            results.append((self.name(name) if mark else "", self.operand(operand, len(equations))))
        labels = [name for name, _ in results]
        if len(set(labels)) != len(labels) or len(labels) > MOST_INPUTS or ("" in labels and len(labels) > 1):
            self.fail("results without names of their own")
        return FileProgram(tuple(equations), tuple(results))

    def _equation(self, words: list[str], before: int) -> Equation:
        if len(words) < 3 or words[-2] != ":":
            self.fail("an equation without a type")
        operation, type = words[0], self.type(words[-1])
        if operation == "constant":
            self.words(words, 4)
            key, _, text = words[1].partition("=")
            values = tuple(self._numbers(text, type))
            if key != "values" or len(values) != type.size or not type.shape:
                self.fail(f"a constant of type {type} with {len(values)} numbers")
            return Equation(operation, (), (("values", values),), type)
        operands, params = [], []
        for word in words[1:-2]:
            key, mark, value = word.partition("=")
            if mark:
                params.append((self.name(key), self._param(value)))
            elif params:
                self.fail("an operand after a parameter")
            else:
                operands.append(self.operand(word, before))
        return Equation(operation, tuple(operands), tuple(params), type)

    def whole(self, word: str) -> int:
        if not WHOLE.fullmatch(word):
            self.fail(f"{word[:40]!r} where a whole number belongs")
        return int(word)

    def _param(self, text: str) -> int | tuple[int, ...]:
        found = LIST.fullmatch(text)
        if found is None:
            return self.whole(text)
        return tuple(self.whole(word) for word in found[1].split(",")) if found[1] else ()

    def _numbers(self, text: str, type: Type) -> Iterator[float | int | bool]:
        found = LIST.fullmatch(text)
        if found is None:
            self.fail(f"{text[:40]!r} where a list belongs")
        for word in found[1].split(",") if found[1] else ():
            literal = self.literal(word)
            if literal is None or literal.type.kind != type.kind:
                self.fail(f"{word[:40]!r} in a list of {type.kind}")
            yield literal.value

    def operand(self, word: str, before: int) -> Operand:
        if (found := REFERENCE.fullmatch(word)) is not None:
            if int(found[1]) > before:
                self.fail(f"{word}, which is not made yet")
            return Name(int(found[1]))
        return self.literal(word) or Name(self.name(word))

    @staticmethod
    def literal(word: str) -> Literal | None:
        if word in ("true", "false"):
            return Literal(word == "true")
        if WHOLE.fullmatch(word):
            return Literal(int(word))
        if word in ("inf", "-inf", "nan"):
            return Literal(float(word))
        if REAL.fullmatch(word) and math.isfinite(float(word)):
            return Literal(float(word))
        return None


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
            group=None if group is None else RowGroup(int(group[0]), _name("group", group[1])),
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
        from fedpdmc.models.model_file.tracing import parts_of

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
        weights: Any = None,
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
        weights : array of shape (n,), optional
            By which minus the log likelihood of each record is multiplied.
        """
        return record_model(self, columns, X, constants or {}, names, weights)

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


def _column(name: str, kind: Any, shape: tuple[int, ...]) -> FileColumn:
    _name("columns", name)
    if isinstance(kind, (int, np.integer)) and not isinstance(kind, bool) and kind >= 2:
        return FileColumn(name, Type("i64", shape), "index", int(kind))
    if not isinstance(kind, str) or kind not in DOMAINS or kind == "index":
        words = ", ".join(map(repr, DOMAINS[:-1]))
        raise InputError(f"Model(columns: {name})", repr(kind), f"Give one of {words}, or a number of levels.")
    return FileColumn(name, Type("f64", shape), kind)
