"""The text of a model file: written, and read back strictly.

A text has one reading and a model one text: `parse` accepts nothing but what `render` writes. The grammar, line by line::

    fedpdmc model 1
    title TEXT
    group LENGTH MASK                                  (optional)
    parameter NAME TYPE                                (any number)
    predictor NAME TYPE | predictor NAME TYPE without intercept
    column NAME TYPE DOMAIN | column NAME TYPE index LEVELS
    constant NAME TYPE
    minus_log_likelihood                               (then programs; `variables`, `minus_log_prior` are optional)
    %1 = OPERATION OPERAND ... PARAMETER=VALUE ... : TYPE
    return OPERAND | return NAME=OPERAND ...
    end

The attacker is the author of a file: a reader accepts no file that is long, that holds large values or much work, or that
has a name or an operation that is not known. Types are checked by JAX on shapes alone, before anything is computed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any, NoReturn

from fedpdmc.errors import InputError
from fedpdmc.models.model_file.program import Equation, Literal, Name, Operand, Program, Type
from fedpdmc.models.model_file.source import DOMAINS, Column, Constant, Group, Parameter, Predictor, Source

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
        raise InputError(
            where, f"a byte that is not ASCII, at {error.start}", "Give a file from `fedpdmc model build`."
        ) from error
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
            name = one.mask if isinstance(one, Group) else one.name
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

    def _group(self, words: list[str]) -> Group:
        self.words(words, 3)
        length = self.whole(words[1])
        if not 1 <= length <= MOST_ENTRIES:
            self.fail(f"a group of {length} rows")
        return Group(length, self.name(words[2]))

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

    def _column(self, words: list[str]) -> Column:
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
        return Column(self.name(words[1]), type, words[3], levels)

    def _constant(self, words: list[str]) -> Constant:
        self.words(words, 3)
        type = self.type(words[2])
        if type.kind != "f64" or len(type.shape) > 2:
            self.fail(f"a constant of type {type}")
        return Constant(self.name(words[1]), type)

    # Programs

    def _program(self) -> Program:
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
        return Program(tuple(equations), tuple(results))

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
