"""Hyperplanes at which a program may jump: where it compares values that are affine in the parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from fedpdmc.enclosures.recognised_calls import INNER, line_of, within_known

# How a value depends on the parameters.
NOT, AFFINE, OTHERWISE = range(3)
COMPARISONS = {"lt", "le", "gt", "ge", "sign"}
# Affine in all operands together, in the first alone, and in either one.
LINEAR = {"add", "add_any", "sub", "neg", "concatenate", "reduce_sum", "cumsum", "broadcast_in_dim", "reshape", "squeeze",
          "transpose", "rev", "slice", "copy", "copy_p", "expand_dims", "pad"}  # fmt: skip
LINEAR_IN_FIRST = {"div", "gather", "dynamic_slice"}
BILINEAR = {"mul", "dot_general"}
# Normals and levels that agree to this are one surface.
SAME = 1e-10


class JumpSurfaces(NamedTuple):
    """The hyperplanes ``⟨n_k, x⟩ = c_k``.

    Attributes
    ----------
    normal : (K, d)
        Of unit length.
    level : (K,)
    lines : tuple of str
        Where the program compares.
    """

    normal: np.ndarray
    level: np.ndarray
    lines: tuple[str, ...]


class AffineComparisons:
    """One evaluation of a program that follows what is affine in the parameters.

    ``sides`` are the differences of the compared values by equation, the equations by identity.
    """

    def __init__(self) -> None:
        self.sides: dict[int, list[np.ndarray]] = {}
        self.others: set[int] = set()
        self.lines: dict[int, str] = {}

    @property
    def equations(self) -> frozenset[int]:
        """Comparisons of affine values, wherever they are called from."""
        return frozenset(self.sides.keys() - self.others)

    def differences(self) -> np.ndarray:
        """Of all of them, in the order of the program."""
        parts = [part.ravel() for key, found in self.sides.items() if key not in self.others for part in found]
        return np.concatenate(parts) if parts else np.zeros(0)

    def run(self, jaxpr, consts, args: list[tuple[int, Any]]) -> list[tuple[int, Any]]:
        """How each result depends on the parameters, and its value unless that is neither constant nor affine."""
        known: dict[Any, tuple[int, Any]] = {}

        def read(atom):
            return (NOT, atom.val) if isinstance(atom, core.Literal) else known[atom]

        known.update(zip(jaxpr.constvars, ((NOT, const) for const in consts), strict=True))
        known.update(zip(jaxpr.invars, args, strict=True))
        for equation in jaxpr.eqns:
            found = self._equation(equation, [read(atom) for atom in equation.invars])
            known.update(zip(equation.outvars, found, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _equation(self, equation, args: list[tuple[int, Any]]) -> list[tuple[int, Any]]:
        name, kinds = equation.primitive.name, [kind for kind, _ in args]
        if name in INNER and (not name.startswith("custom_") or all(kind == NOT for kind in kinds)):
            inner = equation.params[INNER[name]]
            jaxpr, consts = (inner.jaxpr, inner.consts) if hasattr(inner, "consts") else (inner, ())
            return self.run(jaxpr, consts, args)
        if name in COMPARISONS and AFFINE in kinds:
            self._compare(equation, args)
        kind = _kind(equation, kinds)
        if kind == OTHERWISE:
            # What is compared in a loop, or in a branch, is not followed: nor is it where it is called from elsewhere.
            self.others |= set(_comparisons_within(equation.params))
            return [(OTHERWISE, None)] * len(equation.outvars)
        found = equation.primitive.bind(*(jnp.asarray(value) for _, value in args), **equation.params)
        return [(kind, x) for x in (found if equation.primitive.multiple_results else [found])]

    def _compare(self, equation, args: list[tuple[int, Any]]) -> None:
        key = id(equation)
        if any(kind == OTHERWISE for kind, _ in args) or within_known(equation):
            self.others.add(key)
            return
        one, *other = (np.asarray(value, float) for _, value in args)
        self.sides.setdefault(key, []).append(one - other[0] if other else one)
        self.lines[key] = line_of(equation)


def _comparisons_within(params: dict[str, Any]) -> Iterator[int]:
    for inner in jax.tree.leaves(list(params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
        for equation in getattr(inner, "eqns", ()):
            if equation.primitive.name in COMPARISONS:
                yield id(equation)
            yield from _comparisons_within(equation.params)


def _kind(equation, kinds: list[int]) -> int:
    """How the result depends on the parameters, given how the operands do."""
    name = equation.primitive.name
    if all(kind == NOT for kind in kinds):
        return NOT
    if OTHERWISE in kinds:
        return OTHERWISE
    if name == "convert_element_type":
        return AFFINE if equation.params["new_dtype"] == jnp.float64 else OTHERWISE
    affine = (
        name in LINEAR
        or (name in LINEAR_IN_FIRST and all(kind == NOT for kind in kinds[1:]))
        or (name in BILINEAR and NOT in kinds)
        or (name == "select_n" and kinds[0] == NOT)
    )
    return AFFINE if affine else OTHERWISE


def affine_comparisons(closed: core.ClosedJaxpr, x: np.ndarray) -> AffineComparisons:
    """What the program compares at a point."""
    found = AffineComparisons()
    with jax.ensure_compile_time_eval():
        found.run(closed.jaxpr, closed.consts, [(AFFINE, jnp.asarray(x))])
    return found


def surfaces_of(at: Callable[[np.ndarray], AffineComparisons], dim: int) -> JumpSurfaces:
    """The hyperplanes on which compared values are equal: affine functions are known from ``dim + 1`` points."""
    origin = at(np.zeros(dim))
    start = origin.differences()
    slopes = np.stack([at(unit).differences() - start for unit in np.eye(dim)], 1)
    size = np.linalg.norm(slopes, axis=1)
    met = (size > 0) & np.isfinite(start) & np.isfinite(size)
    normal, level = slopes[met] / size[met, None], -start[met] / size[met]
    # One of the two descriptions of a hyperplane.
    first = normal[np.arange(len(normal)), np.argmax(np.abs(normal) > SAME, 1)] if len(normal) else np.zeros(0)
    normal, level = normal * np.sign(first)[:, None], level * np.sign(first)
    rounded = np.round(np.column_stack([normal, level / (1 + np.abs(level))]) / SAME)
    _, own = np.unique(rounded, axis=0, return_index=True)
    lines = tuple(dict.fromkeys(origin.lines[key] for key in origin.lines if key in origin.equations))
    return JumpSurfaces(normal[own], level[own], lines)
