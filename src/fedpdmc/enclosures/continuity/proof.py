"""Continuity of a program in its parameters: a part of every certificate.

The processes follow gradients. A jump has none, so they would walk through it as if it were not there. A program is
therefore read once as formulas (`normal_form`) with choices where it compares (`decision_trees`), and refused unless its
value is shown to be continuous. Kinks are allowed: values must meet, slopes need not. What is not differentiated
(``stop_gradient``) must cancel. Derivatives given by hand are not trusted, because they need not be those of the value.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from fedpdmc.enclosures.continuity.jump_surfaces import JumpSurfaces, affine_comparisons, surfaces_of
from fedpdmc.enclosures.continuity.not_a_number import tame
from fedpdmc.enclosures.continuity.program_reader import Reader
from fedpdmc.enclosures.origins import derivatives_by_hand
from fedpdmc.errors import Discontinuous


def check_continuity(function: Callable, dim: int, lenient: bool = False) -> None:
    """Show that a function of ``dim`` parameters is continuous, and that its gradient is its own.

    Where ``lenient``, primitives without rules are taken for continuous.

    Raises
    ------
    Discontinuous
        Where that is not shown: it may jump there.
    """
    _show(_traced(function, dim), lenient)


def jump_surfaces(function: Callable, dim: int, lenient: bool = False) -> JumpSurfaces | None:
    """The hyperplanes at which a function may jump; None where it is shown to be continuous.

    It is shown to be continuous between them: with the results of its comparisons of affine values held fixed, whatever
    they are.

    Raises
    ------
    Discontinuous
        Where it may jump elsewhere.
    """
    closed = _traced(function, dim)
    try:
        _show(closed, lenient)
    except Discontinuous:
        found = affine_comparisons(closed, np.zeros(dim))
        if not found.equations:
            raise
        _show(closed, lenient, found.equations)
        return surfaces_of(lambda x: affine_comparisons(closed, x), dim)
    return None


def _traced(function: Callable, dim: int) -> core.ClosedJaxpr:
    return jax.make_jaxpr(lambda x: function(x))(jax.ShapeDtypeStruct((dim,), jnp.float64))


def _show(closed: core.ClosedJaxpr, lenient: bool, fixed: frozenset[int] = frozenset()) -> None:
    """Continuity with the results of some comparisons held fixed, for all data if that can be shown, else for these."""
    text = str(closed.jaxpr), derivatives_by_hand(closed.jaxpr)
    consts = [np.asarray(const) for const in closed.consts]
    # What is shown for all data is shown for those that are finite.
    for small in KNOWN_SIZES if all(map(tame, consts)) else KNOWN_SIZES[-1:]:
        known = [const.tobytes() if const.size <= small else b"" for const in consts]
        shapes = [(const.shape, str(const.dtype)) for const in consts]
        digest = hashlib.sha256(repr((text, shapes, known, lenient, bool(fixed))).encode()).hexdigest()
        if digest in _SHOWN:
            return
        try:
            _read(closed.jaxpr, consts, small, lenient, fixed)
        except Discontinuous:
            if small == KNOWN_SIZES[-1] or all(const.size <= small for const in consts):
                raise
        else:
            _SHOWN.add(digest)
            return


# Arrays of data of at most this size are known in a proof: none first, then all. `model_trial` leaves out the second.
KNOWN_SIZES: tuple[float, ...] = (1, math.inf)
# Programs, with the data they were examined with, that were shown to be continuous.
_SHOWN: set[str] = set()


def _read(jaxpr, consts: list[np.ndarray], small: float, lenient: bool, fixed: frozenset[int]) -> None:
    """Read a program, with arrays above this size as anything."""
    reader = Reader(lenient, fixed)
    reader.knows_less = any(const.size > small for const in consts)
    reader.knows_data = any(1 < const.size <= small for const in consts)
    values = [
        const
        if const.size <= small
        else reader.fresh("data" if const.dtype.kind == "f" else "whole", const.shape, False)
        for const in consts
    ]
    with jax.ensure_compile_time_eval():
        inputs = [reader.fresh("parameters", variable.aval.shape, polynomial=True) for variable in jaxpr.invars]
        for value in reader.run(jaxpr, values, inputs, "the function"):
            reader.finished(value, "the function's value")
