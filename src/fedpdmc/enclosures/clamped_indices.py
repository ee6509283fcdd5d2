"""Indices beyond the end of an array: a program whose gradient is that of the values that it computes.

``x[i]`` promises that i is in range. If it is not, the last entry is fetched, but reverse differentiation leaves that entry
out, so that the gradient is not that of the value. In the mode "clip" both use the last entry. Similarly, an update beyond
the end is dropped under such a promise; in the mode "drop" the derivative drops it too.
"""

from __future__ import annotations

from typing import Any

from jax import lax
from jax.extend import core

# The mode that describes what is computed when the promise is broken.
CLAMPED = {"gather": lax.GatherScatterMode.CLIP}
DROPPED = lax.GatherScatterMode.FILL_OR_DROP


def clamped(jaxpr: core.Jaxpr) -> core.Jaxpr:
    """The same program with promised indices clamped, or dropped where they are written to; itself if there are none."""
    equations = [_clamped_equation(equation) for equation in jaxpr.eqns]
    if all(new is old for new, old in zip(equations, jaxpr.eqns, strict=True)):
        return jaxpr
    return jaxpr.replace(eqns=equations)


def _clamped_equation(equation: Any) -> Any:
    name, changed = equation.primitive.name, {}
    if equation.params.get("mode") == lax.GatherScatterMode.PROMISE_IN_BOUNDS:
        changed["mode"] = CLAMPED.get(name, DROPPED)
    for key, value in equation.params.items():
        if name.startswith("custom_"):
            # A function with a derivative of its own, which is kept as it is.
            break
        new = _within(value)
        if new is not value:
            changed[key] = new
    return equation.replace(params={**equation.params, **changed}) if changed else equation


def _within(value: Any) -> Any:
    """A parameter of an equation, with the programs in it clamped."""
    if isinstance(value, core.ClosedJaxpr):
        inner = clamped(value.jaxpr)
        return value if inner is value.jaxpr else value.replace(jaxpr=inner)
    if isinstance(value, core.Jaxpr):
        return clamped(value)
    if isinstance(value, tuple) and any(isinstance(part, (core.ClosedJaxpr, core.Jaxpr)) for part in value):
        parts = tuple(map(_within, value))
        return value if all(new is old for new, old in zip(parts, value, strict=True)) else parts
    return value
