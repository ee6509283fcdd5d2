"""A model file as a reviewer reads it: what it uses, its formulas, its values at test points, and what it cannot do."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedpdmc._jax.precision import double_precision
from fedpdmc.errors import NoEnclosure
from fedpdmc.models.model_file.allowed_operations import Equation, FileProgram, Literal, Name, Operand, Type

if TYPE_CHECKING:
    from fedpdmc.models.model_file.model import Model


# A value that is used more than once, or whose formula would be longer than this, is a step of its own.
LONGEST = 60
# Precedence, from sums to values.
SUM, PRODUCT, POWER, VALUE = range(4)
INFIX = {
    "add": (" + ", SUM), "sub": (" - ", SUM), "mul": (" * ", PRODUCT), "div": (" / ", PRODUCT), "pow": ("^", POWER),
    "eq": (" == ", -1), "ne": (" != ", -1), "lt": (" < ", -1), "le": (" <= ", -1), "gt": (" > ", -1), "ge": (" >= ", -1),
    "and": (" and ", -1), "or": (" or ", -1),
}  # fmt: skip
CALLED = {
    "logistic": "sigmoid", "lgamma": "log_gamma", "integer_pow": "", "reduce_sum": "sum", "reduce_max": "max",
    "reduce_min": "min", "reduce_prod": "product", "reduce_and": "all", "reduce_or": "any", "dot": "dot",
    "concatenate": "join", "ndtr": "Phi", "log_ndtr": "log_Phi", "convert": "", "broadcast": "", "reshape": "",
    "squeeze": "", "stop_gradient": "without_derivative", "iota": "index",
}  # fmt: skip


class ShownFormula(NamedTuple):
    """A text and how tightly it binds."""

    text: str
    binds: int

    def within(self, least: int) -> str:
        """The text, in parentheses unless it binds at least this tightly."""
        return self.text if self.binds >= least else f"({self.text})"


def formulas(program: FileProgram, left: str) -> list[str]:
    """The program as lines such as ``u = a * (b - c)``; ``left`` stands for the result without a name."""
    uses: dict[int | str, int] = {}
    for operand in [x for equation in program.equations for x in equation.operands] + [x for _, x in program.results]:
        if isinstance(operand, Name):
            uses[operand.label] = uses.get(operand.label, 0) + 1
    known: dict[int | str, ShownFormula] = {}
    lines: list[str] = []

    def read(operand: Operand) -> ShownFormula:
        if isinstance(operand, Literal):
            text = f"{operand.value:g}" if isinstance(operand.value, float) else str(operand).lower()
            return ShownFormula(text, VALUE if not text.startswith("-") else SUM)
        return known.get(operand.label, ShownFormula(str(operand.label), VALUE))

    for i, equation in enumerate(program.equations, 1):
        made = _formula(equation, [read(x) for x in equation.operands])
        simple = made.binds == VALUE and "(" not in made.text and len(made.text) < 24
        if not simple and (uses.get(i, 0) > 1 or len(made.text) > LONGEST):
            lines.append(f"t{len(lines) + 1} = {made.text}")
            made = ShownFormula(f"t{len(lines)}", VALUE)
        known[i] = made
    if len(program.results) == 1 and lines and read(program.results[0][1]).text == f"t{len(lines)}":
        # The last step is the result.
        return [*lines[:-1], f"{program.results[0][0] or left} = {lines[-1].partition(' = ')[2]}"]
    return lines + [f"{name or left} = {read(operand).text}" for name, operand in program.results]


def _formula(equation: Equation, parts: list[ShownFormula]) -> ShownFormula:
    name, params = equation.operation, dict(equation.params)
    if name in INFIX and len(parts) == 2:
        sign, binds = INFIX[name]
        right = binds + (name in ("sub", "div", "pow") or binds < 0)
        return ShownFormula(f"{parts[0].within(max(binds, 0))}{sign}{parts[1].within(max(right, 0))}", binds)
    if name == "neg":
        return ShownFormula(f"-{parts[0].within(PRODUCT)}", SUM)
    if name in ("square", "integer_pow"):
        return ShownFormula(f"{parts[0].within(VALUE)}^{params.get('power', 2)}", POWER)
    if name == "not":
        return ShownFormula(f"not {parts[0].within(VALUE)}", VALUE)
    if name == "select_n" and len(parts) == 3:
        which, no, yes = parts
        return ShownFormula(f"(if {which.text} then {yes.text} else {no.text})", VALUE)
    if name == "constant":
        return ShownFormula(_shown_numbers(params["values"]), VALUE)
    if name == "slice":
        return ShownFormula(f"{parts[0].within(VALUE)}{_range(params)}", VALUE)
    if CALLED.get(name) == "" and len(parts) == 1:
        return parts[0]
    if name == "iota":
        return ShownFormula(f"(0 .. {equation.type.shape[params['axis']] - 1})", VALUE)
    return ShownFormula(f"{CALLED.get(name, name)}({', '.join(part.text for part in parts)})", VALUE)


def _range(params: dict[str, Any]) -> str:
    parts = [
        str(start) if stop == start + 1 else f"{start}:{stop}"
        for start, stop in zip(params["start"], params["stop"], strict=True)
    ]
    return f"[{', '.join(parts)}]"


def _shown_numbers(values: tuple[Any, ...]) -> str:
    shown = [f"{value:g}" if isinstance(value, float) else str(value).lower() for value in values[:6]]
    return f"[{', '.join(shown)}{', ...' if len(values) > 6 else ''}]"


POINTS = (0.0, 0.25, -0.5)
USUAL = {"real": 0.5, "positive": 1.5, "nonnegative": 1.5, "unit": 0.3, "binary": 1.0, "count": 2.0, "index": 1}
CANNOT = (
    "It reads the columns listed above and no others, one record at a time; it cannot read a file, open a connection, run "
    "Python, draw random numbers, or remember a record. Its only result is one number for each record. A site checks all "
    "types, limits its work, and derives the bounds that make sampling exact by itself."
)


@double_precision
def review(model: Model) -> str:
    """The report, as ``fedpdmc model show`` prints it."""
    source = model.source
    lines = [
        source.title,
        f"sha256 {model.digest}",
        f"{model.operations} operations, {model.work:,} numbers for a record",
        "",
    ]
    for one in source.predictors:
        what = "linear predictor of the formula's terms" + ("" if one.intercept else ", without an intercept")
        lines.append(f"  {one.name} {_shape(one.type)}: {what}")
    lines += [f"  {one.name} {_shape(one.type)}: parameter" for one in source.parameters]
    for column in source.columns:
        levels = f" with {column.levels} levels" if column.levels else ""
        lines.append(f"  {column.name} {_shape(column.type)}: column, {column.domain}{levels}")
    lines += [f"  {one.name} {_shape(one.type)}: constant of the contract" for one in source.constants]
    if source.group is not None:
        lines.append(
            f"  A record is a group of up to {source.group.length} rows; {source.group.mask} says which are there."
        )
    unused = sorted(set(source.inputs) - source.likelihood.used())
    lines += [f"  Not used by the likelihood: {', '.join(unused)}"] if unused else []
    left = {"minus_log_likelihood": "-log p(record)", "minus_log_prior": "-log p(parameters)"}
    for name, (program, _) in source.programs.items():
        lines += ["", f"{name}:", *(f"  {line}" for line in formulas(program, left.get(name, name)))]
    lines += [
        "",
        "Values at test points:",
        *_points(model),
        "",
        f"Bounds: {certified(model)}",
        f"Operations: {_used(model)}",
        "",
        CANNOT,
    ]
    return "\n".join(lines)


def _shape(type: Type) -> str:
    return f"({', '.join(map(str, type.shape))})" if type.shape else "()"


def _used(model: Model) -> str:
    names = Counter(
        equation.operation for program, _ in model.source.programs.values() for equation in program.equations
    )
    return ", ".join(f"{name} {count}" for name, count in sorted(names.items()))


def usual_row(model: Model) -> dict[str, np.ndarray]:
    """A record and constants within their domains."""
    source = model.source
    row = {one.name: np.full(one.type.shape, USUAL[one.domain], one.type.dtype) for one in source.columns}
    row |= {one.name: np.linspace(0.5, 2.0, one.type.size).reshape(one.type.shape) for one in source.constants}
    return row if source.group is None else {**row, source.group.mask: np.ones(source.group.length)}


def usual_point(model: Model, value: float) -> dict[str, np.ndarray]:
    """Parameters and predictors near a value."""
    inputs = (*model.source.predictors, *model.source.parameters)
    return {
        one.name: np.full(one.type.shape, value) + 0.1 * np.arange(one.type.size).reshape(one.type.shape)
        for one in inputs
    }


def _points(model: Model) -> list[str]:
    row, lines = usual_row(model), []
    shown = ", ".join(f"{name} = {_numbers(value)}" for name, value in row.items())
    lines.append(f"  at {shown}")
    derive = jax.jit(jax.value_and_grad(lambda x: model.minus_log_likelihood(x, row)))
    for at in POINTS:
        x = usual_point(model, at)
        value, gradient = derive({name: jnp.asarray(part) for name, part in x.items()})
        named = ", ".join(f"{name} = {_numbers(part)}" for name, part in x.items())
        slopes = ", ".join(f"d/d {name} = {_numbers(np.asarray(gradient[name]))}" for name in x)
        lines.append(f"  {named}: {float(value):.6g}; {slopes}")
    return lines


def _numbers(value: np.ndarray) -> str:
    flat = [f"{number:.5g}" for number in np.ravel(value)[:6]]
    dots = ", ..." if np.size(value) > 6 else ""
    return flat[0] if np.ndim(value) == 0 else f"[{', '.join(flat)}{dots}]"


@double_precision
def certified(model: Model) -> str:
    """Whether the site will be able to prove its bounds, in words."""
    from fedpdmc.potentials import Program

    x, row = usual_point(model, 0.1), usual_row(model)
    flat, structure = jax.tree.flatten({name: jnp.asarray(part) for name, part in x.items()})
    sizes = np.cumsum([0, *(part.size for part in flat)])

    def function(a, data):
        parts = [jnp.reshape(a[i:j], part.shape) for i, j, part in zip(sizes[:-1], sizes[1:], flat, strict=True)]
        return model.minus_log_likelihood(jax.tree.unflatten(structure, parts), data)

    program = Program(function, {name: jnp.asarray(part) for name, part in row.items()}, int(sizes[-1]))
    try:
        program.check(True, False)
        program.check(False, True)
        program.check_continuity()
    except (NoEnclosure, ValueError) as error:
        return f"none are known, so that exact sampling refuses this model: {error}"
    return "every operation has a proved enclosure, and the function has no jumps at the test record"
