"""Hyperplanes at which a program may jump: where it compares values that are affine in the parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from fedpdmc._jax.by_numpy import INNER
from fedpdmc.enclosures.continuity.normal_form import NOISE, SAME
from fedpdmc.enclosures.origins import line_of, within_known
from fedpdmc.errors import Discontinuous

# How a value depends on the parameters.
NOT, AFFINE, OTHERWISE = range(3)
COMPARISONS = {"lt", "le", "gt", "ge", "sign"}
# Primitives that are affine in all operands together, in the first alone, or in either one.
LINEAR = {"add", "add_any", "sub", "neg", "concatenate", "reduce_sum", "cumsum", "broadcast_in_dim", "reshape", "squeeze",
          "transpose", "rev", "slice", "copy", "copy_p", "expand_dims", "pad"}  # fmt: skip
LINEAR_IN_FIRST = {"div", "gather", "dynamic_slice"}
BILINEAR = {"mul", "dot_general"}
# Distance along each axis at which slopes are measured. A slope is inaccurate only if it is smaller than the value at the
# origin by this factor.
FAR = 2.0**60
# Sizes of the parameters at which values are computed that are equal but for rounding.
USUAL = (1e-3, 0.3, 1.0, 3.0, 30.0, 1e3)
CANCELLED = "the sign of a value in which all that depends on the parameters cancels"
NOT_FINITE = "a comparison of numbers that are not finite"
# The operation on absolute values that bounds the size of a result.
OF_SIZES = {"sub": "add", "neg": "copy"}


class JumpSurfaces(NamedTuple):
    """The hyperplanes ``⟨n_k, x⟩ = c_k`` at which compared values are equal.

    Attributes
    ----------
    normal : (K, d)
        Of any length.
    level : (K,)
    size, sizes : (K,), (K, d)
        What is added up in a comparison has absolute values of at most ``size + sizes @ |x|``: its rounding is relative to
        that.
    lines : tuple of str
        Where the program compares.
    """

    normal: np.ndarray
    level: np.ndarray
    size: np.ndarray
    sizes: np.ndarray
    lines: tuple[str, ...]


class AffineComparisons:
    """One evaluation of a program that follows what is affine in the parameters.

    ``sides`` are the differences of the compared values by equation, the equations by identity, with the sizes of what
    was added up in them.
    """

    def __init__(self) -> None:
        self.sides: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}
        self.others: set[int] = set()
        self.lines: dict[int, str] = {}

    @property
    def equations(self) -> frozenset[int]:
        """Comparisons of affine values, wherever they are called from."""
        return frozenset(self.sides.keys() - self.others)

    def differences(self) -> np.ndarray:
        """Differences of the compared values, in the order of the program, and their sizes: (2, K)."""
        found = [pair for key, pairs in self.sides.items() if key not in self.others for pair in pairs]
        return np.concatenate([np.stack([one.ravel(), size.ravel()]) for one, size in found], 1)

    def run(self, jaxpr, consts, args: list[Followed]) -> list[Followed]:
        """How each result depends on the parameters, its value and its size unless it is neither constant nor affine."""
        known: dict[Any, Followed] = {}

        def read(atom):
            return _constant(atom.val) if isinstance(atom, core.Literal) else known[atom]

        known.update(zip(jaxpr.constvars, map(_constant, consts), strict=True))
        known.update(zip(jaxpr.invars, args, strict=True))
        for equation in jaxpr.eqns:
            found = self._equation(equation, [read(atom) for atom in equation.invars])
            known.update(zip(equation.outvars, found, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _equation(self, equation, args: list[Followed]) -> list[Followed]:
        name, kinds = equation.primitive.name, [arg.kind for arg in args]
        if name in INNER and (not name.startswith("custom_") or all(kind == NOT for kind in kinds)):
            inner = equation.params[INNER[name]]
            jaxpr, consts = (inner.jaxpr, inner.consts) if hasattr(inner, "consts") else (inner, ())
            return self.run(jaxpr, consts, args)
        if name in COMPARISONS and any(kind != NOT for kind in kinds):
            self._compare(equation, args)
        kind = _kind(equation, kinds)
        if kind == OTHERWISE:
            # What is compared in a loop, or in a branch, is not followed: nor is it where it is called from elsewhere.
            self.others |= set(_comparisons_within(equation.params))
            return [Followed(OTHERWISE, None, None)] * len(equation.outvars)
        values = _bound(equation.primitive, equation.params, [arg.value for arg in args])
        if kind == NOT:
            return [_constant(x) for x in values]
        chosen = name == "select_n"
        sizes = [arg.value if chosen and i == 0 else arg.size for i, arg in enumerate(args)]
        if name == "div":
            sizes[1] = jnp.abs(args[1].value)
        elif name in LINEAR_IN_FIRST:
            sizes[1:] = [arg.value for arg in args[1:]]
        primitive = OF_SIZES.get(name, equation.primitive)
        if primitive == "copy":
            return [Followed(kind, values[0], sizes[0])]
        if primitive == "add":
            return [Followed(kind, values[0], sizes[0] + sizes[1])]
        return list(map(Followed, [kind] * len(values), values, _bound(equation.primitive, equation.params, sizes)))

    def _compare(self, equation, args: list[Followed]) -> None:
        key = id(equation)
        if any(arg.kind == OTHERWISE for arg in args) or within_known(equation):
            self.others.add(key)
            return
        one, *other = (np.asarray(arg.value, float) for arg in args)
        size = sum(np.asarray(arg.size, float) for arg in args)
        with np.errstate(invalid="ignore"):
            difference = one - other[0] if other else one
        self.sides.setdefault(key, []).append((difference, np.asarray(size)))
        self.lines[key] = line_of(equation)


class Followed(NamedTuple):
    """A value, how it depends on the parameters, and the sum of the sizes of what was added up in it."""

    kind: int
    value: Any
    size: Any


def _constant(value: Any) -> Followed:
    value = jnp.asarray(value)
    return Followed(NOT, value, jnp.abs(value) if value.dtype.kind == "f" else value)


def _bound(primitive, params: dict[str, Any], values: list[Any]) -> list[Any]:
    found = primitive.bind(*map(jnp.asarray, values), **params)
    return list(found) if primitive.multiple_results else [found]


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
    if any(variable.aval.dtype != jnp.float64 for variable in equation.outvars):
        return OTHERWISE
    if name == "convert_element_type":
        return AFFINE
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
        found.run(closed.jaxpr, closed.consts, [Followed(AFFINE, jnp.asarray(x), jnp.abs(jnp.asarray(x)))])
    return found


def surfaces_of(at: Callable[[np.ndarray], AffineComparisons], dim: int) -> JumpSurfaces:
    """The hyperplanes on which compared values are equal: affine functions are known from ``dim + 1`` points.

    The other points are far from the origin, so that slopes are found to their last digits beside large values there.
    """
    origin = at(np.zeros(dim))
    start, size = origin.differences()
    far = np.stack([at(FAR * unit).differences() for unit in np.eye(dim)], -1)
    lines = tuple(dict.fromkeys(origin.lines[key] for key in origin.lines if key in origin.equations))
    finite = np.isfinite(start) & np.all(np.isfinite(far[0]), 1)
    if not np.all(finite):
        # A comparison with a number that is not finite has one result only; a multiple of such a number has several.
        back = np.stack([at(-FAR * unit).differences()[0] for unit in np.eye(dim)], -1)
        wild = np.concatenate([start[:, None], far[0], back], 1)[~finite]
        if not np.array_equal(wild, np.broadcast_to(wild[:, :1], wild.shape), equal_nan=True):
            raise Discontinuous("gt", ", ".join(lines), NOT_FINITE)
    start, size, far = start[finite], size[finite], far[:, finite]
    slopes, sizes = (far[0] - start[:, None]) / FAR, (far[1] - size[:, None]) / FAR
    # Where all slopes have cancelled, nothing but rounding is left of what is compared with a number that is zero too.
    met = np.any(np.abs(slopes) > SAME * sizes, 1)
    hidden = ~met & np.any(sizes > 0, 1) & (np.abs(start) < NOISE)
    if np.any(hidden):
        # Two values that are computed in the same way are equal everywhere.
        places = np.random.default_rng(0).standard_normal((len(USUAL), dim)) * np.asarray(USUAL)[:, None]
        if any(np.any(at(place).differences()[0][finite][hidden] != 0) for place in places):
            raise Discontinuous("gt", ", ".join(lines), CANCELLED)
    return JumpSurfaces(slopes[met], -start[met], size[met], np.maximum(sizes[met], 0.0), lines)
