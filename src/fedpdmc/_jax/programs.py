"""Walks programs (jaxprs): their values in order, their equations at any depth, and the programs that they call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend import core
from jax.interpreters import partial_eval

# Primitives that call a program of their own, and the parameter that holds it.
INNER = {
    "jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr", "checkpoint": "jaxpr",
    "remat": "jaxpr", "remat2": "jaxpr", "custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
}  # fmt: skip


class Frame:
    """The values of a program's variables so far, and the equations that made them."""

    def __init__(self) -> None:
        self.values: dict[Any, Any] = {}
        self.makers: dict[Any, Any] = {}

    def read(self, atom: Any) -> Any:
        """The value of a variable or a literal."""
        return atom.val if isinstance(atom, core.Literal) else self.values[atom]


def evaluate(
    jaxpr: Any, consts: Any, args: Any, step: Callable[[Any, list[Any]], Any], frame: Frame | None = None
) -> list[Any]:
    """The results of a program, equation by equation.

    Parameters
    ----------
    jaxpr, consts, args
        The program, its constants and its arguments.
    step : callable
        ``step(equation, values)`` returns the results of one equation.
    frame : Frame, optional
        To fill, for a step that looks at what came before.
    """
    frame = Frame() if frame is None else frame
    frame.values.update(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
    for equation in jaxpr.eqns:
        results = step(equation, [frame.read(atom) for atom in equation.invars])
        frame.values.update(zip(equation.outvars, results, strict=True))
        frame.makers.update((variable, equation) for variable in equation.outvars)
    return [frame.read(atom) for atom in jaxpr.outvars]


def called(equation: Any) -> tuple[Any, Any]:
    """The program that an equation calls (`INNER`), and its constants."""
    inner = equation.params[INNER[equation.primitive.name]]
    return (inner.jaxpr, inner.consts) if hasattr(inner, "consts") else (inner, ())


def scan_lengths(params: dict[str, Any]) -> tuple[int, int]:
    """Number of constants and of carried values of a scan; since JAX 0.11 in a tree (constants, carried, scanned)."""
    if "ft_in" in params:
        consts, carry, _ = params["ft_in"].unpack()
        return len(consts), len(carry)
    return params["num_consts"], params["num_carry"]


def prune(closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """The program without equations that nothing depends on; constants and inputs stay."""
    jaxpr, *_ = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars), instantiate=True)
    return core.ClosedJaxpr(jaxpr, closed.consts)


def is_program(value: Any) -> bool:
    """Whether a parameter of an equation is a program."""
    return isinstance(value, (core.Jaxpr, core.ClosedJaxpr))


def programs_of(equation: Any) -> list[Any]:
    """All programs that an equation has as parameters: calls, bodies of loops, branches."""
    values = jax.tree.leaves(list(equation.params.values()), is_leaf=is_program)
    return [getattr(value, "jaxpr", value) for value in values if is_program(value)]


def equations(jaxpr: Any, enter: Callable[[Any], bool] = lambda equation: True) -> Iterator[Any]:
    """All equations of a program and of the programs within it, as far as ``enter`` allows."""
    for equation in jaxpr.eqns:
        yield equation
        if enter(equation):
            for inner in programs_of(equation):
                yield from equations(inner, enter)
