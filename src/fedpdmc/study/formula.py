"""R-style formulas over declared columns: the same columns of the design matrix at every site.

Functions are of a closed list, read from a syntax tree; nothing of a formula is run as code. A function stands for columns
of numbers that are computed at the site, such as ``bs(age)[1]``. What it needs to know (knots, ends, centres, scales) is
written in the formula, so that a basis is the same at every site and for new records; `freeze` does so from a table.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import itertools
import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from formulaic import Formula
from formulaic.parser import DefaultFormulaParser
from formulaic.parser.types import ASTNode, Factor, Token
from formulaic.transforms import basis_spline, natural_cubic_spline, poly

from fedpdmc.errors import InputError
from fedpdmc.models.families import FAMILIES
from fedpdmc.validation import suggest

if TYPE_CHECKING:
    from fedpdmc.study.schema import Column

Interval = tuple[float, float]
# The settings of each function, in their order after the first argument.
SPLINE = ("df", "knots", "lower", "upper")
SETTINGS = {
    "I": (), "log": (), "offset": (), "center": ("center",), "scale": ("center", "scale"), "bs": (*SPLINE, "degree"),
    "cr": SPLINE, "ns": SPLINE, "poly": ("degree", "raw", "alpha", "norms"), "C": ("coding", "levels"),
}  # fmt: skip
# A power or a product of one column, which is the column itself in a formula.
POWER = re.compile(r"(?<![\w.)])([\w.]+)\s*(?:(?:\*\*|\^)\s*\d|[*:]\s*\1(?![\w.(]))")
SPLINES = ("bs", "cr", "ns")
CALLS = ("log", "center", "scale")
# Functions with several columns, which together are one curve.
CURVES = (*SPLINES, "poly")
ELEMENTWISE = (*CALLS, "I", "offset")
MOST_KNOTS = 50
# What to write in place of functions of other programs.
ELSEWHERE = {
    "ln": "log(...)", "np.log": "log(...)", "log2": "I(log(...) / 0.693147)", "log10": "I(log(...) / 2.302585)",
    "log1p": "log(1 + ...)", "sqrt": "I(... ** 0.5)", "np.sqrt": "I(... ** 0.5)", "factor": "C(...)", "as.factor": "C(...)",
    "standardize": "scale(...)", "rcs": "ns(..., df=4)", "s": "ns(..., df=4)", "spline": "bs(..., df=5)",
    "strata": "the column itself, whose levels shift the hazard", "cbind": "the column of events, and trials='n'",
}  # fmt: skip
KNOWN = (
    "The functions are bs, cr, ns, poly, log, I (with + - * / **), center, scale, C, offset; nothing else is evaluated."
)
WRITES = "In a contract nothing is computed from records; fedpdmc.sites(table, ...).write takes them from a table."
CALL = re.compile(r"`[^`]*`|([^\W\d][\w.]*)\s*\(")
CLOSING = re.compile(r"`[^`]*`|\"[^\"]*\"|'[^']*'|([()])")
# Names of columns, which need not be names of Python.
NAME = re.compile(r"\"[^\"]*\"|'[^']*'|`[^`]+`|\^|(?<![\w.])(?!(?:True|False)\b)[^\W\d][\w.]*(?![\w.]|\s*[(=])")
PLAIN = re.compile(r"[^\W\d][\w.]*")
OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
              ast.Pow: operator.pow, ast.USub: operator.neg}  # fmt: skip
# Values may be beyond a spline's ends by this share of its range.
ROUNDING = 1e-9
# Points for each degree at which the size of a polynomial is measured.
NODES = 16


# Expressions of columns ---------------------------------------------------------------------------------------------------


def value(
    node: ast.expr, columns: Mapping[str, Any], apply: Callable[..., Any] = lambda operation, *x: operation(*x)
) -> Any:
    """The value of an expression; ``apply`` carries out one operation."""
    if isinstance(node, ast.Constant):
        return (node.value, node.value) if apply is on_intervals else np.float64(node.value)  # type: ignore[arg-type]
    if isinstance(node, ast.Name):
        return columns[node.id]
    if isinstance(node, ast.Call):
        found, *constants = (value(part, columns, apply) for part in node.args)
        operations = (operator.sub, operator.truediv) if constants else (np.log,)
        for operation, *constant in zip(operations, *[constants] * bool(constants), strict=False):
            found = apply(operation, found, *constant)
        return found
    parts = [node.left, node.right] if isinstance(node, ast.BinOp) else [node.operand]  # type: ignore[attr-defined]
    return apply(OPERATIONS[type(node.op)], *(value(part, columns, apply) for part in parts))  # type: ignore[attr-defined]


def on_intervals(operation: Callable[..., float], *x: Interval) -> Interval:
    """All values of an operation on intervals: it is monotone in each argument, but for powers about 0."""
    (low, high), last = x[0], x[-1]
    if operation is np.log and low <= 0:
        raise ValueError("Logarithms need values above 0")
    if operation is operator.truediv and last[0] <= 0 <= last[1]:
        raise ValueError("Divisors cannot be 0")
    power = last[0] if operation is operator.pow else 1.0
    if (power % 1 and low < 0) or (power < 0 and low <= 0 <= high):
        raise ValueError("Powers that are not whole need values of 0 or more, and negative ones no 0")
    corners = [float(operation(*corner)) for corner in itertools.product(*x)]
    corners += [0.0] if operation is operator.pow and low < 0 < high else []
    return min(corners), max(corners)


def columns_in(node: ast.expr) -> set[str]:
    """The columns of an expression."""
    functions = {id(one.func) for one in ast.walk(node) if isinstance(one, ast.Call)}
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and id(one) not in functions}


def _text(node: ast.expr, constants: bool = True) -> str:
    """As in a formula; without the constants of center and scale it is a name."""
    node = copy.deepcopy(node)
    for one in ast.walk(node):
        if isinstance(one, ast.Call):
            arguments = one.args if constants else one.args[:1]
            one.args = [part for part in arguments if not (isinstance(part, ast.Constant) and part.value is None)]
        elif isinstance(one, ast.Name) and constants and not PLAIN.fullmatch(one.id):
            one.id = f"`{one.id}`"
    return ast.unparse(node)


def _freeze_node(node: ast.expr, columns: Mapping[str, np.ndarray]) -> ast.expr:
    """With centres and scales of these values, rounded."""
    node = copy.deepcopy(node)
    for one in reversed(list(ast.walk(node))):
        if isinstance(one, ast.Call) and len(one.args) > 1:
            x = np.atleast_1d(value(one.args[0], columns))
            x = x[np.isfinite(x)] if np.isfinite(x).any() else np.zeros(1)
            spread = float(x.std(ddof=1)) if len(x) > 1 else 0.0
            known = round_to(x.mean(), spread / 100), round_to(spread, spread / 100) or 1.0
            for i, part in enumerate(one.args[1:]):
                if isinstance(part, ast.Constant) and part.value is None:
                    one.args[i + 1] = ast.Constant(known[i])
    return node


def round_to(x: float, size: float, how: Callable[[float], float] = np.round) -> float:
    """Rounded to the power of ten below a size."""
    unit = 10.0 ** np.floor(np.log10(size or 1.0))
    return float(f"{how(float(x) / unit) * unit:.12g}")


def _show(x: Any) -> str:
    if isinstance(x, list):
        return f"[{', '.join(map(_show, x))}]"
    return repr(int(x) if type(x) is float and x == int(x) else x)


# Functions ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class FormulaFunction:
    """A call of a function in a formula."""

    kind: str  # one of `SETTINGS`
    node: ast.expr  # the first argument; of log, center and scale the whole call
    settings: dict[str, Any]  # all other arguments, by name
    label: str = ""  # what its columns are called

    @property
    def short(self) -> str:
        """Without settings, such as ``bs(age)``."""
        inner = _text(self.node, constants=False)
        return inner if self.kind in CALLS else f"{self.kind}({inner})"

    @property
    def text(self) -> str:
        """As in a formula."""
        if self.kind in CALLS:
            return _text(self.node)
        own = [(key, self.settings[key]) for key in SETTINGS[self.kind] if key in self.settings]
        arguments = [f"Treatment({x!r})" if key == "coding" else f"{key}={_show(x)}" for key, x in own]
        return f"{self.kind}({', '.join([_text(self.node), *arguments])})"

    @property
    def columns(self) -> list[str]:
        """The columns of its argument."""
        return sorted(columns_in(self.node))

    @property
    def width(self) -> int:
        """Number of columns."""
        own = self.settings
        return own.get("df") or len(own.get("knots", ())) + own.get("degree", 1)

    @property
    def names(self) -> list[str]:
        """Of its columns."""
        return [f"{self.label}[{i + 1}]" for i in range(self.width)] if self.kind in CURVES else [self.label]

    def argument(self, columns: Mapping[str, np.ndarray]) -> np.ndarray:
        """The values of its argument, at columns as they were recorded."""
        with np.errstate(all="ignore"):
            return np.asarray(value(self.node, columns), float)

    def basis(self, u: np.ndarray) -> np.ndarray:
        """Its columns at values of the argument, of shape (n, width).

        ``bs``: the B-splines but the first. ``cr`` and ``ns``: the natural cubic splines that are 1 at one knot and 0 at
        the others, but the first, so that a coefficient is the curve at a knot minus the curve at the lower end. What is
        left out is what the intercept stands for, since all columns add up to one.
        """
        own = self.settings
        if self.kind in ELEMENTWISE:
            return u[:, None]
        if self.kind == "poly":
            state = dict(enumerate(own.get("alpha", ()))), dict(enumerate((1.0, *own.get("norms", ()))))
            return np.asarray(poly(u, self.width, own.get("raw", False), _state=dict(alpha=state[0], norms2=state[1])))
        low, high = own["lower"], own["upper"]
        ends = {"knots": own["knots"], "lower_bound": low, "upper_bound": high, "_state": {}}
        if self.kind != "bs":
            made = natural_cubic_spline(u, **ends)
            return np.stack([made[i + 2] for i in range(self.width)], 1)
        if (far := u[np.abs(u - (low + high) / 2) > (0.5 + ROUNDING) * (high - low)]).size:
            remedy = (
                f"Write {self.short[:-1]}, ..., lower=..., upper=...) with other ends; or ns(), straight beyond them."
            )
            known = f"out of {self.short}, which is known from {low:g} to {high:g}"
            raise InputError(f"column {', '.join(map(repr, self.columns))}", f"{far[0]:g}, {known}", remedy)
        made = basis_spline(u, degree=own["degree"], extrapolation="clip", **ends)
        return np.stack([made[i + 1] for i in range(self.width)], 1)

    def range(self, ranges: Mapping[str, Interval]) -> Interval:
        """The values of the argument that these ranges of columns allow."""
        try:
            found, reason = value(self.node, ranges, on_intervals), "Its values are too large"
        except (ValueError, ArithmeticError) as error:
            found, reason = (np.inf, np.inf), str(error)
        if not np.all(np.isfinite(found)):
            bounds = ", ".join(f"{name} from {ranges[name][0]:g} to {ranges[name][1]:g}" for name in self.columns)
            remedy = f"{reason}: declare other bounds, or add a number first."
            raise InputError(WHERE, f"{self.text} of {bounds}", remedy)
        return found

    def largest(self, ranges: Mapping[str, Interval]) -> np.ndarray:
        """The largest absolute value of each column, for all values of the columns within ``ranges``.

        B-splines are positive and add up to one. Other bases are polynomials p of degree d between the knots and beyond
        them. With the N > d zeros x of a Chebyshev polynomial on such a piece, ``max |p| ≤ max_x |p(x)| / cos(π d/2N)``
        (Ehlich and Zeller 1964).
        """
        low, high = self.range(ranges)
        if self.kind in (*ELEMENTWISE, "bs"):
            return np.full(self.width, (1.0 if self.kind == "bs" else max(abs(low), abs(high))) * (1 + ROUNDING))
        degree, own = (
            self.width if self.kind == "poly" else 3,
            {"lower": low, "upper": high, "knots": ()} | self.settings,
        )
        knots = [x for x in (own["lower"], *own["knots"], own["upper"]) if low < x < high]
        ends, count = np.asarray([low, *knots, high]), NODES * degree
        nodes = 0.5 - 0.5 * np.cos(np.pi * (np.arange(count) + 0.5) / count)
        u = (ends[:-1, None] + np.diff(ends)[:, None] * nodes).ravel()
        return np.abs(self.basis(u)).max(0) / np.cos(np.pi * degree / (2 * count)) * (1 + ROUNDING)

    def freeze(self, columns: Mapping[str, np.ndarray], ranges: Mapping[str, Interval]) -> FormulaFunction:
        """With everything that follows from the values of all records, as they were recorded, and their ``ranges``."""
        if self.kind == "C":
            return replace(self, settings={key: x for key, x in self.settings.items() if key != "levels"})
        with np.errstate(all="ignore"):
            found, settings = replace(self, node=_freeze_node(self.node, columns)), dict(self.settings)
        u = found.argument(columns)
        bad = np.flatnonzero(~np.isfinite(u))
        if bad.size:
            seen = " and ".join(f"{columns[name][bad[0]]:g}" for name in self.columns)
            remedy = "Logarithms need values above 0, and divisors are not 0: add a number first, as log(1 + dose)."
            raise InputError(f"column {', '.join(map(repr, self.columns))}", f"{seen} in {self.short}", remedy)
        distinct = len(np.unique(u))
        if self.kind not in ELEMENTWISE and self.width >= distinct:
            few = f"{self.width} columns of {distinct} different values"
            raise InputError(f"formula: {self.short}", few, "Give fewer knots, or a smaller df or degree.")
        if self.kind in SPLINES:
            for key, end in zip(("lower", "upper"), found.range(ranges), strict=True):
                settings.setdefault(key, end)
            if df := settings.pop("df", None):
                inside = u[(u >= settings["lower"]) & (u <= settings["upper"])]
                shares = np.linspace(0, 1, df - settings.get("degree", 1) + 2)[1:-1]
                unit, knots = float(np.ptp(u)) / 200, np.quantile(inside, shares) if inside.size else []
                settings["knots"] = [round_to(x, unit) for x in knots]
        elif self.kind == "poly" and not {"raw", "alpha"} & set(settings):
            state: dict[str, Any] = {}
            poly(u, self.width, _state=state)
            settings["alpha"] = [round_to(state["alpha"][k], float(u.std()) / 1e5) for k in range(self.width)]
            # Of mean square one, where R has a sum of squares of one: the basis does not depend on the number of records.
            settings["norms"] = [float(f"{state['norms2'][k + 1] / len(u):.6g}") for k in range(self.width)]
        return replace(found, settings=settings)

    def complete(self, ranges: Mapping[str, Interval]) -> FormulaFunction:
        """With the declared range as the ends of a spline that states none; refused if anything else is missing."""
        missing, own = "", dict(self.settings)
        if any(isinstance(one, ast.Constant) and one.value is None for one in ast.walk(self.node)):
            missing = "its numbers, as in center(age, 50) and scale(age, 50, 10)"
        elif "df" in own:
            missing = f"knots in place of df, as in {self.kind}(age, knots=[40, 60], lower=18, upper=95)"
        elif self.kind == "poly" and not {"raw", "alpha"} & set(own):
            missing = "raw=True, or alpha=[...] and norms=[...]"
        if missing:
            raise InputError(WHERE, self.text, f"Write {missing}. {WRITES}")
        low, high = self.range(ranges)
        own: dict[str, Any] = ({"lower": low, "upper": high} if self.kind in SPLINES else {}) | own
        if self.kind in SPLINES and np.any(np.diff([own["lower"], *own["knots"], own["upper"]]) <= 0):
            remedy = f"Knots rise, above lower = {own['lower']:g} and below upper = {own['upper']:g}."
            raise InputError(WHERE, self.text, remedy)
        if "alpha" in own and (len(own["alpha"]), len(own.get("norms", ()))) != (self.width, self.width):
            raise InputError(WHERE, self.text, f"Give {self.width} numbers each of alpha and norms.")
        slack = ROUNDING * (high - low)
        if self.kind == "bs" and (low < own["lower"] - slack or high > own["upper"] + slack):
            reach = f"{self.short} from {own['lower']:g} to {own['upper']:g}, of {', '.join(self.columns)}"
            wider = f"lower={min(low, own['lower']):g}, upper={max(high, own['upper']):g}"
            remedy = f"Write wider ends, {wider}, or declare narrower bounds."
            raise InputError(WHERE, f"{reach} whose bounds allow {low:g} to {high:g}", remedy)
        return replace(self, settings=own)


# Reading ------------------------------------------------------------------------------------------------------------------


def split(formula: str) -> list[str | FormulaFunction]:
    """A formula as texts and calls of functions, in their order; functions that differ in settings only get long names."""
    if len(formula) > MOST_CHARACTERS:
        raise InputError(WHERE, f"{len(formula)} characters", f"Give at most {MOST_CHARACTERS}.")
    pieces: list[str | FormulaFunction] = []
    texts: dict[str, str] = {}
    at = 0
    while match := CALL.search(formula, at):
        end = match.end() if match[1] is None else _closing(formula, match.end())
        one = formula[match.start() : end] if match[1] is None else _read(formula[match.start() : end])
        if isinstance(one, FormulaFunction):
            alone = texts.setdefault(one.short, one.text) == one.text
            one = replace(one, label=one.short if alone else one.text.replace("`", ""))
            if "~" not in formula[: match.start()]:
                remedy = (
                    'The response is a column. For its log: columns={"y": {"log": True}}, in a contract log = true.'
                )
                raise InputError(WHERE, repr(formula[:80]), remedy)
        pieces += [formula[at : match.start()], one]
        at = end
    return [*pieces, formula[at:]]


def outward(values: np.ndarray) -> Interval:
    """The range of values, wider by at most a twentieth on each side: to round numbers."""
    size = float(np.ptp(values)) / 20
    return round_to(values.min(), size, np.floor), round_to(values.max(), size, np.ceil)


def freeze(formula: str, columns: Mapping[str, np.ndarray], ranges: Mapping[str, Interval]) -> str:
    """The formula with all knots, ends, centres and scales, from the values of all records and their ranges."""
    return "".join(one if isinstance(one, str) else one.freeze(columns, ranges).text for one in split(formula))


def as_names(pieces: list[str | FormulaFunction]) -> str:
    """A formula in which each function is the sum of its columns."""
    return "".join(x if isinstance(x, str) else f"({' + '.join(f'`{name}`' for name in x.names)})" for x in pieces)


def _closing(formula: str, at: int) -> int:
    """Behind the parenthesis that closes the one before ``at``."""
    depth = 1
    for match in CLOSING.finditer(formula, at):
        depth += {"(": 1, ")": -1}.get(match[1], 0)
        if not depth:
            return match.end()
    raise InputError(WHERE, repr(formula[:80]), "Close the parentheses.")


def _read(text: str) -> FormulaFunction:
    names: list[str] = []

    def number_name(match: re.Match[str]) -> str:
        if match[0][0] in "\"'^":
            return match[0].replace("^", "**") if match[0] == "^" else match[0]
        names.append(match[0].strip("`"))
        return f"_{len(names) - 1}_"

    try:
        call: Any = ast.parse(NAME.sub(number_name, text), mode="eval").body
        for one in ast.walk(call):
            if isinstance(one, ast.Name) and re.fullmatch(r"_\d+_", one.id):
                one.id = names[int(one.id[1:-1])]
        kind = ast.unparse(call.func)
        if kind not in SETTINGS:
            other = f"Write {ELSEWHERE[kind]}. " if kind in ELSEWHERE else suggest(kind, list(SETTINGS))
            raise ValueError(f"{other}{KNOWN}")
        node = call.args[0] if kind == "C" else _expression(call if kind in CALLS else call.args[0])
        settings = {} if kind in (*CALLS, "I") else _settings(kind, call)
        if kind == "C" and not isinstance(node, ast.Name) or not columns_in(node):
            raise ValueError('Give a column, as in log(dose) and C(arm, Treatment("placebo")).')
    except (SyntaxError, ValueError, ArithmeticError, AttributeError, IndexError, RecursionError, MemoryError) as error:
        unknown = "It is not valid: arguments are numbers, texts, lists and columns."
        reason = str(error) if type(error) is ValueError else unknown
        raise InputError(WHERE, repr(text[:80]), reason) from None
    return FormulaFunction(kind, node, settings)


def _settings(kind: str, call: ast.Call) -> dict[str, Any]:
    known = SETTINGS[kind]
    arguments = [*zip(known, call.args[1:], strict=False), *((str(one.arg), one.value) for one in call.keywords)]
    count = len(call.args) - 1 + len(call.keywords)
    if not {key for key, _ in arguments} <= set(known) or len(dict(arguments)) < count:
        raise ValueError(f"{kind} takes {', '.join(('one column or expression', *known))}, each once.")
    found = {key: _setting(key, one) for key, one in arguments}
    usual = {"bs": {"degree": 3} | ({} if "df" in found else {"knots": []}), "poly": {"degree": 1}}
    found = usual.get(kind, {}) | found
    small = found.get("df", 99) < found.get("degree", 1) or kind == "poly" and not found["degree"]
    if {"df", "knots"} <= set(found) or small:
        raise ValueError("Give df, which is at least the degree, or knots; the degree of poly is at least 1.")
    if kind in SPLINES and not {"df", "knots"} & set(found):
        raise ValueError(f"Give df, the number of columns, or knots: {kind}(age, df=4).")
    return found


def _setting(key: str, node: ast.expr) -> Any:
    """One setting: a number, a list of numbers or texts, True or False, or Treatment of a level."""
    call = ast.unparse(node.func).lower() if isinstance(node, ast.Call) else ""
    inner = [*node.args, *(one.value for one in node.keywords)] if isinstance(node, ast.Call) else []
    coding = call.endswith("treatment") and len(inner) == 1
    found: Any = None
    try:
        found = [ast.literal_eval(one) for one in inner] if call == "c" or coding else ast.literal_eval(node)
    except ValueError:
        pass
    several: list[Any] = list(found) if isinstance(found, (list, tuple)) else [found]
    numbers = all(type(one) in (int, float) and abs(one) < 1e300 for one in several) and len(several) <= MOST_KNOTS
    number = float(found) if type(found) in (int, float) and numbers else np.nan  # type: ignore[arg-type]
    good, need = {
        "df": (1 <= number <= MOST_KNOTS and number % 1 == 0, f"a whole number from 1 to {MOST_KNOTS}"),
        "degree": (0 <= number <= MOST_POWER and number % 1 == 0, f"a whole number of at most {MOST_POWER}"),
        "raw": (isinstance(found, bool), "True or False"),
        "levels": (len(several) > 1, "a list of levels, such as ['placebo', 'verum']"),
        "coding": (coding, "Treatment('level'), the only one there is"),
        "scale": (number > 0, "a number above 0"),
        "norms": (numbers and min(several, default=0) > 0, "a list of numbers above 0"),
        "knots": (numbers, "a list of numbers"),
        "alpha": (numbers, "a list of numbers"),
    }.get(key, (np.isfinite(number), "a number"))
    if not good:
        raise ValueError(f"{key} is {need}.")
    if key in ("levels", "coding"):
        return [str(one) for one in several] if key == "levels" else str(several[0])
    return several if key in ("knots", "alpha", "norms") else found


def _expression(node: ast.expr) -> ast.expr:
    """Arithmetic of columns and numbers, with log, center and scale."""
    if isinstance(node, ast.Call) and (kind := ast.unparse(node.func)) in (*CALLS, "I"):
        inner, settings = _expression(node.args[0]), _settings(kind, node)
        constants: list[ast.expr] = [ast.Constant(settings.get(key)) for key in SETTINGS[kind]]
        return inner if kind == "I" else ast.Call(ast.Name(kind), [inner, *constants], [])
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        left, right = _expression(node.left), _expression(node.right)
        power = right.operand if isinstance(right, ast.UnaryOp) else right
        small = isinstance(power, ast.Constant) and 0 < value(power, {}) <= MOST_POWER
        if isinstance(node.op, ast.Pow) and not small:
            raise ValueError(f"Powers are numbers of at most {MOST_POWER}, such as 2 and 0.5.")
        return ast.BinOp(left, node.op, right)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return ast.UnaryOp(node.op, _expression(node.operand))
    if isinstance(node, ast.Name) or isinstance(node, ast.Constant) and type(node.value) in (int, float):
        if isinstance(node, ast.Name) or abs(float(node.value)) < 1e300:  # type: ignore[arg-type]
            return node
    known = "Functions are of columns, numbers, + - * / ** and log, center, scale of them"
    raise ValueError(f"{known}; not of {ast.unparse(node)[:40]}.")


INTERCEPT = "Intercept"
WHERE = "study.toml: model: formula"
SUCH_AS = "Give a formula such as 'outcome ~ treatment + age', with names that have spaces in backticks."
MOST_CHARACTERS = 2000  # of a formula
MOST_COLUMNS = 2048  # of a design
MOST_POWER = 8
PLAIN_NUMBER = re.compile(r"[\d.]+")


def check_size(formula: str, widths: Mapping[str, int]) -> None:
    """Refuse a formula whose design would be too large, or that is not valid.

    Each column counts as many columns of the design as it has levels; sums add, interactions multiply. This is an upper
    bound, because contrasts and repeated terms only remove columns. The parser's syntax tree is as long as the formula;
    its terms, which could be far more, are made after this check only. ``widths`` has the largest number of design columns
    of each declared column.
    """
    if not formula.rpartition("~")[2].strip():
        raise InputError(WHERE, repr(formula[:80]), SUCH_AS)
    try:
        tree = DefaultFormulaParser().get_ast(formula)
    except Exception as error:
        # The parser was not made for untrusted input: whatever it raises, the formula is not valid.
        raise InputError(WHERE, repr(formula[:80]), SUCH_AS) from error
    sizes: list[int] = []
    # Operands before their operator, without recursion: a sum of a thousand terms is a thousand nodes deep.
    open_nodes: list[tuple[Any, bool]] = [(tree, False)]
    while open_nodes:
        node, ready = open_nodes.pop()
        if not isinstance(node, ASTNode):
            kind = getattr(node, "kind", None)
            if kind is not Token.Kind.NAME and not (kind is Token.Kind.VALUE and PLAIN_NUMBER.fullmatch(str(node))):
                remedy = (
                    "Name columns, in backticks if they have spaces or signs, joined by + - * : / ** and parentheses."
                )
                raise InputError(WHERE, repr(str(node)[:60]), remedy)
            sizes.append(widths.get(str(node), 1))
        elif not ready:
            open_nodes += [(node, True), *((one, False) for one in reversed(list(node.args)))]
        else:
            operands = [sizes.pop() for _ in node.args][::-1]
            sizes.append(_count_columns(node, operands, formula))


def _count_columns(node: ASTNode, operands: list[int], formula: str) -> int:
    """The largest number of columns of one operation."""
    operator = node.operator.symbol
    if operator in ("**", "^"):
        last = str(list(node.args)[-1])
        if not (last.isascii() and last.isdigit()) or not 1 <= int(last[:4]) <= MOST_POWER:
            raise InputError(WHERE, repr(formula[:80]), f"Give powers from 1 to {MOST_POWER}.")
        size = (1 + operands[0]) ** int(last) - 1
    elif operator in ("+", "-", "~", "*", "/", ":", "in", "%in%"):
        product = math.prod(operands) if operator not in ("+", "-", "~") else 0
        size = product if operator in (":", "in", "%in%") else sum(operands) + product
    else:
        # Such as a wildcard, or several formulas in one.
        raise InputError(WHERE, repr(formula[:80]), SUCH_AS)
    if size > MOST_COLUMNS:
        found = f"a design of more than {MOST_COLUMNS} columns"
        raise InputError(WHERE, found, "Use fewer interactions, levels or powers.")
    return size


class Design:
    """A formula of declared columns, their interactions and functions of a closed list.

    Nothing of a formula runs as code at a site, and nothing depends on a site's records: parameters would have different
    meanings at different sites. Each column of a function, such as ``bs(age)[1]``, is a column of numbers for the parser.

    Without ``intercept`` it is no column of the design, but levels are still coded against a baseline. ``functions`` are
    those among the terms, ``offsets`` those that are added to the linear predictor, and ``used`` the columns that it needs.
    """

    def __init__(self, formula: str, columns: dict[str, Column], intercept: bool = True):
        self.columns = columns
        self._ranges = {name: one.bounds for name, one in columns.items() if one.type in ("number", "count")}
        pieces = [one if isinstance(one, str) else _complete(one, columns, self._ranges) for one in split(formula)]
        every = {one.label: one for one in pieces if isinstance(one, FormulaFunction)}
        owner = {name: one for one in every.values() for name in one.names}
        widths = {name: max(len(column.levels), 1) for name, column in columns.items()}
        check_size(as_names(pieces), widths | {x.label: widths[x.columns[0]] for x in every.values() if x.kind == "C"})
        left, right = _parse(as_names(pieces))
        every_factor = [factor for term in [*left, *right] for factor in term.factors]
        factors = [factor.expr for factor in every_factor if _is_column(factor, columns, owner)]
        if len(left) != 1 or len(left[0].factors) != 1 or str(left[0]) not in columns:
            raise InputError(WHERE, repr(formula), "Give one declared column, the response, left of '~'.")
        self.response_name = str(left[0])
        self.used = {name for name in factors if name in columns}.union(*(one.columns for one in every.values()))
        if factors.count(self.response_name) > 1 or any(self.response_name in one.columns for one in every.values()):
            raise InputError(WHERE, repr(formula), "The response cannot be on both sides.")
        self.functions = [one for one in every.values() if one.kind != "offset"]
        self.offsets = [one for one in every.values() if one.kind == "offset"]
        kept = [term for term in right if _is_term(term, owner)]
        self._largest: dict[str, float] = {}
        for one in (one for one in self.functions if one.kind != "C"):
            self._largest |= dict(zip(one.names, one.largest(self._ranges), strict=True))
        # The template has every level, so that the design's columns depend on the contract only.
        try:
            spec: Any = Formula(kept)  # pyright: ignore[reportAbstractUsage]
            self._spec = spec.get_model_matrix(self._template(), na_action="raise").model_spec
        except Exception as error:
            raise InputError(WHERE, repr(formula), str(error)[:200]) from error
        whole = list(self._spec.column_names)
        self._kept = [i for i, name in enumerate(whole) if intercept or name != INTERCEPT]
        self.names: tuple[str, ...] = tuple(whole[i] for i in self._kept)
        if not self.names:
            raise InputError(WHERE, repr(formula), "Give at least one term.")

    @property
    def largest(self) -> np.ndarray:
        """The largest absolute value of each column of the design that the declared bounds allow."""
        numbers = {name: one for name, one in self.columns.items() if one.type != "level"}
        return self.products(self._largest | {name: max(abs(x) for x in one.range) for name, one in numbers.items()})

    def products(self, values: Mapping[str, float]) -> np.ndarray:
        """For each column of the design, the product of the values of its factors; 1 for the intercept."""
        out = np.ones(len(self._spec.column_names))
        for term, index in self._spec.term_indices.items():
            for factor in term.factors:
                out[list(index)] *= values.get(factor.expr, 1.0)
        return out[self._kept]

    @property
    def factors(self) -> tuple[tuple[str, ...], ...]:
        """For each column of the design, the factors of its term."""
        out: list[tuple[str, ...]] = [()] * len(self._spec.column_names)
        for term, index in self._spec.term_indices.items():
            for i in index:
                out[i] = tuple(factor.expr for factor in term.factors)
        return tuple(out[i] for i in self._kept)

    def _template(self) -> pd.DataFrame:
        most = max([len(column.levels) for column in self.columns.values()] + [2])
        frame = {}
        for name, column in self.columns.items():
            if column.type == "level":
                levels = list(column.levels)
                frame[name] = pd.Categorical([levels[i % len(levels)] for i in range(most)], categories=levels)
            else:
                frame[name] = np.linspace(0.25, 0.75, most)
        for one in self.functions:
            if one.kind == "C":
                frame[one.label] = self._code_levels(one, frame)
            else:
                frame |= dict.fromkeys(one.names, np.linspace(0.25, 0.75, most))
        return pd.DataFrame(frame)

    def _code_levels(self, function: FormulaFunction, records: Any) -> pd.Categorical:
        """The levels of a column, with the baseline first."""
        name, base = function.columns[0], function.settings["coding"]
        return pd.Categorical(records[name], sorted(self.columns[name].levels, key=lambda level: level != base))

    def recorded(self, records: pd.DataFrame) -> dict[str, np.ndarray]:
        """The columns of numbers as they were recorded, from those in the units of the model."""
        found = {}
        for name in self._ranges.keys() & self.used & set(records):
            values = records[name].to_numpy(float) * self.columns[name].scale + self.columns[name].center
            found[name] = np.exp(values) if self.columns[name].log else values
        return found

    def offset(self, records: pd.DataFrame) -> np.ndarray | None:
        """What the offsets in the formula add to the linear predictor."""
        recorded = self.recorded(records)
        return np.sum([one.argument(recorded) for one in self.offsets], 0) if self.offsets else None

    @property
    def offset_range(self) -> Interval | None:
        """What they can add within the declared bounds."""
        low, high = np.sum([(0.0, 0.0), *(one.range(self._ranges) for one in self.offsets)], 0)
        return (float(low), float(high)) if self.offsets else None

    def matrix(self, records: pd.DataFrame) -> np.ndarray:
        """The design matrix, of shape (n, d)."""
        if not len(records):
            return np.zeros((0, len(self.names)))
        recorded, made = self.recorded(records) if self.functions else {}, {}
        for one in self.functions:
            own = [self._code_levels(one, records)] if one.kind == "C" else one.basis(one.argument(recorded)).T
            made |= dict(zip(one.names, own, strict=True))
        found = self._spec.get_model_matrix(records.assign(**made) if made else records, na_action="raise")
        if tuple(found.columns) != tuple(self._spec.column_names):
            raise InputError(WHERE, "columns that depend on the records", "Please report this formula.")
        return np.ascontiguousarray(found.to_numpy()[:, self._kept], dtype=np.float64)

    def response(self, records: pd.DataFrame) -> np.ndarray:
        """The response as numbers; 0 and 1 for the first and second level."""
        column = records[self.response_name]
        if self.columns[self.response_name].type == "level":
            return column.cat.codes.to_numpy(dtype=np.float64)
        return column.to_numpy(dtype=np.float64)

    def check_response(self, family: str, trials: str | None = None) -> None:
        """Refuse a response that does not fit the family."""
        column = self.columns[self.response_name]
        binary = column.type == "level" and len(column.levels) == 2
        response = "count" if trials is not None else FAMILIES[family].response
        good, need = {
            "level": (binary, "a level of two, or a count of events if trials are given"),
            "count": (column.type == "count" and column.plain, "a count, neither centred nor scaled"),
            "number": (column.type == "number", "a number"),
        }[response]
        if not good:
            found = f"{len(column.levels)} levels" if column.type == "level" else column.type
            raise InputError(f"study.toml: columns: {column.name}", found, f"The response of {family} is {need}.")


def is_free(function: FormulaFunction) -> bool:
    """Whether a function of columns can have any shape: not levels, and not the usual curves of one column."""
    return function.kind != "C" and not isinstance(function.node, ast.Name)


@dataclass(frozen=True)
class FreeTerm:
    """The product of a term's functions that can have any shape, and of its columns of numbers; or an offset's factor."""

    label: str
    functions: tuple[tuple[FormulaFunction, int], ...]  # each with the number of its column of the basis
    numbers: tuple[Column, ...] = ()

    @property
    def columns(self) -> list[str]:
        """The columns that it depends on."""
        return sorted({name for one, _ in self.functions for name in one.columns} | {one.name for one in self.numbers})

    def values(self, columns: Mapping[str, np.ndarray]) -> np.ndarray:
        """Its values, at columns as they were recorded."""
        found = np.ones(len(next(iter(columns.values()))))
        for one in self.numbers:
            found = found * ((np.log(columns[one.name]) if one.log else columns[one.name]) - one.center) / one.scale
        for one, k in self.functions:
            value = one.basis(one.argument(columns))[:, k]
            found = found * (np.exp(value) if one.kind == "offset" else value)
        return found

    def largest(self, ranges: Mapping[str, Interval]) -> float:
        """A bound of its absolute value, for all values of the columns within ``ranges``."""
        numbers = [dataclasses.replace(one, bounds=ranges[one.name]).range for one in self.numbers]
        sizes = [max(map(abs, ends)) for ends in numbers]
        for one, k in self.functions:
            sizes.append(math.exp(one.range(ranges)[1]) if one.kind == "offset" else float(one.largest(ranges)[k]))
        return math.prod(sizes)


def free_terms(design: Design) -> list[FreeTerm]:
    """All terms that have a function of any shape, and all offsets."""
    owner = {name: (one, k) for one in design.functions for k, name in enumerate(one.names) if is_free(one)}
    found = []
    for label, factors in zip(design.names, design.factors, strict=True):
        functions = tuple(owner[name] for name in factors if name in owner)
        numbers = [design.columns[name] for name in factors if name in design.columns]
        if functions:
            found.append(FreeTerm(label, functions, tuple(one for one in numbers if one.type in ("number", "count"))))
    return found + [FreeTerm(one.text, ((one, 0),)) for one in design.offsets if is_free(one)]


def columns_of(formula: str) -> tuple[str, list[str]]:
    """The response and the other columns of a formula, before anything is declared."""
    pieces = split(formula)
    check_size(as_names(pieces), {})
    left, right = _parse(as_names(pieces))
    owner = {name: one.columns for one in pieces if isinstance(one, FormulaFunction) for name in one.names}
    lookup = Factor.EvalMethod.LOOKUP
    factors = [factor.expr for term in right for factor in term.factors if factor.eval_method is lookup]
    if len(left) != 1 or len(left[0].factors) != 1:
        raise InputError("formula", repr(formula), "Give one column, the response, left of '~'.")
    return str(left[0]), list(dict.fromkeys(name for factor in factors for name in owner.get(factor, [factor])))


def _parse(text: str) -> tuple[list[Any], list[Any]]:
    """The terms left and right of '~'."""
    if power := POWER.search(re.sub(r"`([^`]*)`", lambda quoted: f"_{quoted[1].encode().hex()}", text)):
        remedy = "As a term it would be the column itself: write I(x ** 2), or poly(x, 2)."
        raise InputError(WHERE, repr(power[0] if "`" not in text else text[:80]), remedy)
    try:
        parsed: Any = Formula(text)  # pyright: ignore[reportAbstractUsage]
        return list(parsed.lhs), list(parsed.rhs)
    except Exception as error:
        # The parser was not made for untrusted input: whatever it raises, the formula is not valid.
        raise InputError(WHERE, repr(text[:200]), SUCH_AS) from error


def _complete(function: FormulaFunction, columns: dict[str, Column], ranges: Mapping[str, Interval]) -> FormulaFunction:
    """A function that says everything, of declared columns."""
    for name in function.columns:
        if name not in columns:
            raise InputError(WHERE, repr(name), "Declare this column under [columns].")
        if (function.kind == "C") != (columns[name].type == "level") or columns[name].type == "key":
            need = "C(...) is of levels, all other functions are of numbers."
            raise InputError(WHERE, f"{function.text} of a {columns[name].type}", need)
    if function.short in columns:
        raise InputError(WHERE, function.short, "A column has this name too: rename it.")
    if function.kind != "C":
        return function.complete(ranges)
    levels = columns[function.columns[0]].levels
    given = function.settings.get("levels", levels)
    base = function.settings.get("coding", given[0])
    if base not in levels or set(given) != set(levels):
        raise InputError(WHERE, function.text, f"The declared levels are {', '.join(map(repr, levels))}.")
    return dataclasses.replace(function, settings={"coding": base})


def _is_term(term: Any, owner: Mapping[str, FormulaFunction]) -> bool:
    """Whether a term has a coefficient: an offset has none, nor has a product of a function's columns, of ``bs(x)**2``."""
    functions = [owner[factor.expr] for factor in term.factors if factor.expr in owner]
    offsets = [one for one in functions if one.kind == "offset"]
    if offsets and len(term.factors) > 1:
        raise InputError(WHERE, offsets[0].text, "An offset is a term of its own, without a coefficient.")
    return not offsets and len({one.label for one in functions}) == len(functions)


def _is_column(factor: Factor, columns: Mapping[str, Column], owner: Mapping[str, FormulaFunction]) -> bool:
    """Whether a factor is a declared column or one of a function. Constants are not; anything else is refused."""
    if factor.eval_method is Factor.EvalMethod.LITERAL:
        return False
    if factor.eval_method is not Factor.EvalMethod.LOOKUP:
        raise InputError(WHERE, repr(factor.expr), KNOWN)
    if factor.expr not in columns and factor.expr not in owner:
        raise InputError(WHERE, repr(factor.expr), "Declare this column under [columns].")
    return True


# Parentheses in a term are those of functions.
INNER = r"`[^`]+`|[^()|`]|\((?:[^()|]|\([^()|]*\))*\)"
TERM = re.compile(rf"\(\s*((?:{INNER})*?)\s*\|\s*(`[^`]+`|[\w.]+)\s*\)")
PLUS = re.compile(rf"((?:(?!\+)(?:{INNER}))+)")
TERMS_SUCH_AS = "Give one term such as (1 | ward) or (1 + dose | ward)."
# In place of a column: the site itself is the group.
SITE = "site"
# Approximate standard deviation of the log of a spread under each of its priors.
LOG_SPREAD_SD = 1.5


@dataclass(frozen=True)
class MixedFormula:
    """The parts of a formula: ``fixed`` is without the term of the effects, ``groups`` is a column or `SITE`.

    ``slope`` is the column, or the function, whose coefficient varies in addition to the intercept, if there is one.
    """

    fixed: str
    slope: str | None
    groups: str


@dataclass(frozen=True)
class Effects:
    """The effects of groups in a contract: the formula, and the prior of their spreads."""

    formula: MixedFormula
    spread: str = "half-normal"  # one of half-normal, exponential, half-Cauchy
    spread_scale: float = 1.0  # as `fedpdmc.models.effects_prior` takes it
    correlation_scale: float = 0.5

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters of the effects' law."""
        return ("log_sd",) if self.formula.slope is None else ("log_sd[0]", "log_sd[1]", "atanh_correlation")

    def spreads(self, dim: int) -> tuple[int, ...]:
        """The places of the log spreads among ``dim`` parameters, of which those of the effects are the last."""
        first = dim - len(self.names)
        return (first,) if self.formula.slope is None else (first, first + 1)

    def prior_place(self, scaled: bool) -> tuple[np.ndarray, np.ndarray]:
        """Approximate mean and standard deviation, under the prior, of the parameters other than the coefficients."""
        spreads = scaled + (1 if self.formula.slope is None else 2)
        mean, sd = np.full(spreads, math.log(self.spread_scale)), np.full(spreads, LOG_SPREAD_SD)
        if self.formula.slope is None:
            return mean, sd
        return np.append(mean, 0.0), np.append(sd, self.correlation_scale)


def is_mixed(formula: object) -> bool:
    """Whether a formula has a term of effects."""
    return isinstance(formula, str) and "|" in formula


def parse_mixed(formula: str, where: str = "formula") -> MixedFormula:
    """Split a formula with one term of effects into its parts."""
    found = TERM.findall(formula)
    if len(found) != 1 or formula.count("|") != 1 or "~" not in formula:
        raise InputError(where, repr(formula), TERMS_SUCH_AS)
    varying, groups = found[0]
    parts = [part.strip() for part in PLUS.findall(varying)]
    slopes = [part for part in parts if part != "1"]
    if "1" not in parts or len(parts) > 2 or len(slopes) > 1:
        raise InputError(where, f"({varying} | {groups})", TERMS_SUCH_AS)
    left, right = formula.split("~", 1)
    terms = [term.strip() for term in TERM.sub("", right).split("+")]
    right = " + ".join(term for term in terms if term) or "1"
    return MixedFormula(f"{left.strip()} ~ {right}", slopes[0] if slopes else None, groups.strip("`"))


def by_site(formula: str) -> str:
    """The formula with the site itself as the group."""
    return TERM.sub(lambda term: f"({term[1]} | {SITE})", formula)
