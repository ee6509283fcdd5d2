"""A model file as a reviewer reads it: what it uses, its formulas, its values at test points, and what it cannot do."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from fedpdmc._jax.precision import double_precision
from fedpdmc.errors import NoEnclosure
from fedpdmc.models.model_file.program import Type
from fedpdmc.models.model_file.readable_formulas import formulas

if TYPE_CHECKING:
    from fedpdmc.models.model_file.model import Model

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
