"""The gradient of a program on balls: its Taylor polynomial at a point, with a proved bound of the error."""

from __future__ import annotations

import functools
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from fedpdmc.enclosures import enclose
from fedpdmc.enclosures.jets.jet import Balls, Jet, identity
from fedpdmc.enclosures.multi_index import Monomials, factorials, monomials, powers, products
from fedpdmc.errors import NoEnclosure
from fedpdmc.potentials.jax_function import Program

# The orders that are tried, by the number of parameters.
ORDERS = {1: (4, 8), 2: (4, 8), 3: (4, 6, 8)}
# On lines the polynomial is worth its cost for more parameters.
ORDERS_ON_LINES = ORDERS | dict.fromkeys(range(4, 11), (4,))
# Number of balls apart from the point, nodes of the tables, and the radius of the last ball, which few states exceed.
RADII, NODES, BEYOND = 12, 256, 3.5
# The largest product of jets of all records, in numbers; smaller for many parameters, where balls seldom help.
LARGEST, LARGEST_OF_MANY, MANY = 2**25, 2**22, 4
# A lattice of points of expansion: their number on a side, their distance, and the order, balls and reach of each. It is
# made for few parameters and records, if the error about one point is above this (as in `usual_error`).
SIDE, STRIDE, COVER_ORDER, COVER_RADII, COVER_REACH = 5, 1.7, 5, 7, 3.2
MOST_COVERED, MOST_RECORDS, UNSURE = 3, 1000, 0.05
# How often the last ball is doubled while the error is below this even at its boundary.
DOUBLINGS, TELLING = 5, 1e-6
# Relative room for the rounding of norms and integrals.
ROOM = 1 + 1e-9


class Local(eqx.Module):
    """What is known of the gradient about a point of each chain.

    Attributes
    ----------
    center : (C, d) or (d,)
    coefficients : (K, d, C) or (K, d)
    errors : (nodes,) or (nodes, M)
    index : (C,) or None
        Which of the M tables is the chain's.
    sizes : (n, d, C) or (n, d)
    """

    center: Float[Array, "*C d"]
    coefficients: Float[Array, "K d *C"]
    order: int = eqx.field(static=True)
    spacing: Float[Array, ""]
    errors: Float[Array, "nodes ..."]
    index: Int[Array, " C"] | None
    sizes: Float[Array, "n d *C"]
    rounding: Float[Array, ""]

    def gradients(self, a: Float[Array, "m C d"]) -> Float[Array, "m C d"]:
        """``∇P`` at some positions of every chain."""
        b = a - self.center
        if self.coefficients.ndim == 2:
            found = powers(b.reshape(-1, b.shape[-1]).T, self.order - 1)
            return (self.coefficients.T @ found).T.reshape(b.shape)
        # Term by term: one loop over positions and chains.
        terms = zip(self.coefficients, products(b, self.order - 1), strict=True)
        return jnp.moveaxis(functools.reduce(jnp.add, (c[:, None] * power for c, power in terms)), 0, -1)

    def error(self, a: Float[Array, "C d"]) -> Float[Array, " C"]:
        """``E``, infinite beyond the last ball."""
        return interpolated(jnp.linalg.norm(a - self.center, axis=-1) / self.spacing, self.errors, self.index)

    def slip(self, a: Float[Array, "C d"]) -> Float[Array, "C d"]:
        """A bound of the rounding of ``∇P`` and of the program's gradient."""
        size = jnp.max(jnp.abs(a - self.center), -1)
        terms = jnp.stack([size**k for k in range(self.order)])
        if self.sizes.ndim == 2:
            rounding = terms.T @ self.sizes
        else:
            rounding = jnp.sum(terms[:, None] * self.sizes, 0).T
        return rounding + (self.rounding * (1 + jnp.linalg.norm(a, axis=-1)))[:, None]


def interpolated(place: Float[Array, "*C"], nodes: Float[Array, "nodes ..."], index=None) -> Float[Array, "*C"]:
    """Between nodes of a table, of several one for each chain; infinite beyond the last."""
    below = jnp.minimum(jnp.floor(place), nodes.shape[0] - 2).astype(int)
    one, other = (nodes[at] if index is None else nodes[at, index] for at in (below, below + 1))
    known = (place <= nodes.shape[0] - 1) & jnp.isfinite(other)
    return jnp.where(known, one + (place - below) * (other - one), jnp.inf)


class PolynomialCover(eqx.Module):
    """`PolynomialRemainder` about every point of a lattice; the nearest one is used.

    Attributes
    ----------
    origin : (d,)
        The middle of the lattice, in whitened coordinates; its side has `SIDE` points that are `STRIDE` apart.
    coefficients, errors, sizes
        As in `PolynomialRemainder`, points of the lattice first, last for the errors.
    """

    origin: Float[Array, " d"]
    coefficients: Float[Array, "M K d"]
    order: int = eqx.field(static=True)
    spacing: Float[Array, ""]
    errors: Float[Array, "nodes M"]
    sizes: Float[Array, "M n d"]
    rounding: Float[Array, ""]

    def about(self, a: Float[Array, "C d"]) -> Local:
        """The point of the lattice that is nearest to each chain."""
        half = SIDE // 2
        steps = jnp.clip(jnp.round((a - self.origin) / STRIDE), -half, half)
        index = (steps.astype(int) + half) @ (SIDE ** np.arange(a.shape[-1]))
        coefficients, sizes = (jnp.moveaxis(x[index], 0, -1) for x in (self.coefficients, self.sizes))
        center = self.origin + STRIDE * steps
        return Local(center, coefficients, self.order, self.spacing, self.errors, index, sizes, self.rounding)


class PolynomialRemainder(eqx.Module):
    """``∇R(center + b)`` as a polynomial of b with an error that is bounded on balls.

    With ``P`` the Taylor polynomial of degree n of R at the centre, Taylor's formula along the ray to b gives for every e
    ``e·(∇R − ∇P)(b) = ∫_0^1 (1−θ)^{n−2}/(n−2)! (D^n R(θb) − D^n R(0))[b, …, b, e] dθ``. A symmetric form on a Euclidean
    space is largest on the diagonal (Banach), so this is at most ``|e| E(|b|)`` with
    ``E(r) = ∫_0^r (r−t)^{n−2}/(n−2)! ω(t) dt`` and ``ω(t)`` a bound of ``|(D^n R(y) − D^n R(0))[u, …, u]|`` for ``|y| ≤ t``
    and unit vectors u.

    Attributes
    ----------
    center : (d,)
        The point of expansion in whitened coordinates.
    coefficients : (K, d)
        Of ``∇P``, by monomials of b.
    order : int
        The degree of P.
    spacing, errors : (), (NODES,)
        ``E`` at multiples of the spacing; it is convex, so its chords lie above it. Infinite where nothing is known.
    hazards : (NODES,)
        At the same places bounds of ``sup |v| (|∇P(b)| + E(|b|))`` over ``|b|² + |v|² ≤ ρ²``.
    rounding : ()
        Bound of the rounding error of the program's rate, per unit of velocity and of ``1 + |b|``.
    sizes : (n, d)
        Bounds of the rounding of ``∇P`` by degree, for ``|b|_∞ = 1``.
    """

    center: Float[Array, " d"]
    coefficients: Float[Array, "K d"]
    order: int = eqx.field(static=True)
    spacing: Float[Array, ""]
    errors: Float[Array, " nodes"]
    hazards: Float[Array, " nodes"]
    rounding: Float[Array, ""]
    sizes: Float[Array, "n d"]

    def gradient(self, b: Float[Array, "C d"]) -> Float[Array, "C d"]:
        """``∇P(b)``."""
        return (self.coefficients.T @ powers(b.T, self.order - 1)).T

    def about(self, a: Float[Array, "C d"]) -> Local:
        """The same for all chains."""
        return Local(
            self.center, self.coefficients, self.order, self.spacing, self.errors, None, self.sizes, self.rounding
        )  # fmt: skip

    def error(self, size: Float[Array, "*C"]) -> Float[Array, "*C"]:
        """``E(|b|)``, infinite beyond the last ball."""
        return interpolated(size / self.spacing, self.errors)

    def hazard(self, reach: Float[Array, "*C"]) -> Float[Array, "*C"]:
        """A bound of the rate on a rotation with ``|b|² + |v|² ≤ reach²``; infinite beyond the last ball."""
        above = jnp.ceil(reach / self.spacing).astype(int)
        known = above < self.hazards.shape[0]
        return jnp.where(known, self.hazards[jnp.where(known, above, 0)], jnp.inf)


def known_orders(dim: int, rotating: bool) -> tuple[int, ...]:
    """The orders that are tried for so many parameters."""
    return (ORDERS if rotating else ORDERS_ON_LINES).get(dim, ())


def polynomial_remainder(
    program: Program, center: np.ndarray, rounding: float, rotating: bool = True
) -> PolynomialRemainder | None:
    """The lowest order with a small error, or the best one; None if the program's derivatives cannot be enclosed."""
    best, least = None, np.inf
    for order in known_orders(program.dim, rotating):
        found = _of_order(program, np.asarray(center), order, rounding)
        if found is None:
            break
        work = usual_error(found)
        if work < least:
            best, least = found, work
        if least < (ENOUGH if rotating else ENOUGH_ON_LINES):
            break
    return best


# Error of the rate at a usual state, in events per unit of time, below which a higher order is not tried. On lines the
# polynomial is evaluated at several points for each cell.
ENOUGH, ENOUGH_ON_LINES = 0.1, 0.5


def usual_error(remainder: PolynomialRemainder) -> float:
    """The mean of ``|v| E(|b|)``, at most one each, where the posterior is like the reference."""
    a, v = np.random.default_rng(0).standard_normal((2, 256, len(remainder.center)))
    size = np.linalg.norm(a - np.asarray(remainder.center), axis=1)
    found = np.linalg.norm(v, axis=1) * np.asarray(remainder.error(jnp.asarray(size)))
    return float(np.mean(np.minimum(np.nan_to_num(found, nan=np.inf), 10.0)))


def polynomial_on_lines(program: Program, center: np.ndarray, rounding: float):
    """The polynomials of a program for flips on lines: about one point, or about many if one is not enough."""
    found = polynomial_remainder(program, center, rounding, False)
    if program.dim > MOST_COVERED or program.records > MOST_RECORDS:
        return found
    if found is not None and usual_error(found) < UNSURE:
        return found
    return _cover(program, np.asarray(center), rounding) or found


def _cover(program: Program, center: np.ndarray, rounding: float) -> PolynomialCover | None:
    dim, steps = program.dim, np.arange(SIDE) - SIDE // 2
    places = np.stack(np.meshgrid(*[steps] * dim, indexing="ij"), -1).reshape(-1, dim)[:, ::-1]
    radii = COVER_REACH * np.linspace(0.0, 1.0, COVER_RADII) ** 1.5
    parts = [_of_order(program, center + STRIDE * place, COVER_ORDER, rounding, radii) for place in places]
    made = [part for part in parts if part is not None]
    if not made:
        return None
    blank = jax.tree.map(jnp.zeros_like, made[0])
    unknown = eqx.tree_at(lambda p: p.errors, blank, jnp.full_like(blank.errors, jnp.inf))
    parts = [unknown if part is None else part for part in parts]
    coefficients, sizes = (jnp.stack([getattr(part, name) for part in parts]) for name in ("coefficients", "sizes"))
    errors = jnp.stack([part.errors for part in parts], -1)
    return PolynomialCover(
        jnp.asarray(center), coefficients, COVER_ORDER, made[0].spacing, errors, sizes, jnp.asarray(rounding)
    )  # fmt: skip


def _of_order(
    program: Program, center: np.ndarray, order: int, rounding: float, radii: np.ndarray | None = None
) -> PolynomialRemainder | None:
    """The remainder on balls of these radii; by default as far as the process goes, or further if the error stays small."""
    dim = program.dim
    table = monomials(dim, order)
    if (RADII + 1) * math.comb(2 * dim + order, order) * max(program.records, 1) > (
        LARGEST if dim < MANY else LARGEST_OF_MANY
    ):
        return None
    usual = (math.sqrt(2 * dim) + BEYOND + float(np.linalg.norm(center))) * np.linspace(0.0, 1.0, RADII + 1) ** 1.5
    best = None
    for doubling in range(1 if radii is not None else DOUBLINGS + 1):
        balls = Balls(2.0**doubling * (usual if radii is None else radii), table)
        try:
            jet = enclose(program._likelihood, balls)(identity(balls, center))
        except NoEnclosure:
            # Balls only save work: a program without enclosures on balls gets another clock.
            return best
        found = None if not isinstance(jet, Jet) else _assembled(program, center, balls, jet, rounding)
        best = best if found is None else found
        if found is None or not float(found.errors[-1]) < TELLING:
            return best
    return best


def _assembled(program: Program, center, balls: Balls, jet: Jet, rounding: float) -> PolynomialRemainder | None:
    table, order = balls.table, balls.table.order
    with np.errstate(invalid="ignore"):
        middle = 0.5 * (jet.lo[0] + jet.hi[0])
    if not np.all(np.isfinite(middle)):
        return None
    off = np.maximum(jet.hi[0] - middle, middle - jet.lo[0])
    with np.errstate(invalid="ignore"):
        width = np.maximum(np.abs(jet.hi - middle), np.abs(jet.lo - middle))
    # The highest derivative may be finite although the value or a lower one is NaN, as for 0 log 0.
    lost = np.isnan(width).any(1)
    omega = np.where(lost, np.inf, ROOM * np.asarray([form_norm(table, column, order) for column in width]))
    coefficients = _gradient_of(program, center, table, middle)
    control = np.zeros_like(middle) if program.control is None else _quadratic(program.control, center, table)
    rest = middle - control
    norms = {k: form_norm(table, rest, k) + form_norm(table, off, k) for k in range(1, order + 1)}
    r = np.linspace(0.0, balls.radii[-1], NODES)
    errors = _integrated(balls.radii, omega, r, order)
    for k in range(1, order + 1):
        errors = errors + form_norm(table, off, k) * r ** (k - 1) / math.factorial(k - 1)
    size = errors + sum(norms[k] * r ** (k - 1) / math.factorial(k - 1) for k in norms)
    return PolynomialRemainder(
        jnp.asarray(center),
        jnp.asarray(coefficients),
        order,
        jnp.asarray(r[1]),
        jnp.asarray(ROOM * errors),
        jnp.asarray(ROOM * _hazards(r, size)),
        jnp.asarray(rounding),
        jnp.asarray(_sizes(table, coefficients)),
    )


def _sizes(table: Monomials, coefficients: np.ndarray) -> np.ndarray:
    """Rounding errors of sums of so many terms, by degree."""
    degree, unit = table.degree[: len(coefficients)], (64 + len(coefficients)) * np.finfo(float).eps
    return unit * np.stack([np.abs(coefficients[degree == k]).sum(0) for k in range(table.order)])


def _integrated(radii: np.ndarray, omega: np.ndarray, r: np.ndarray, order: int) -> np.ndarray:
    """``E(r)`` for an ω that is constant between radii: the integral of ``(r−t)^{n−2}/(n−2)!`` over each step."""

    def tail(t):
        return np.maximum(r - t, 0.0) ** (order - 1) / math.factorial(order - 1)

    total = np.zeros_like(r)
    for start, end, height in zip(radii[:-1], radii[1:], np.maximum.accumulate(omega)[1:], strict=True):
        share = tail(start) - tail(end)
        total += np.where(share > 0, share * height if np.isfinite(height) else np.inf, 0.0)
    return total


def _hazards(r: np.ndarray, size: np.ndarray) -> np.ndarray:
    """``max_s √(ρ² − s²) g(s)`` at every ρ of the grid, each piece of it by its larger end; g rises."""
    found = np.zeros_like(r)
    for k in range(1, len(r)):
        speed = np.sqrt(np.maximum(r[k] ** 2 - r[:k] ** 2, 0.0))
        with np.errstate(invalid="ignore"):
            found[k] = np.max(speed * size[1 : k + 1])
    return np.where(np.isnan(found), np.inf, found)


def form_norm(table: Monomials, coefficients: np.ndarray, degree: int) -> float:
    """A bound of ``|D^k[u, …, u]|`` over unit vectors, for a form with Taylor coefficients ``c_α``.

    With ``k = p + q`` it is ``xᵀ A y`` for ``x_β = √(p!/β!) u^β``, a unit vector by the multinomial theorem, and y alike:
    at most the largest singular value of ``A_{βγ} = √(p!/β! q!/γ!) (β+γ)! c_{β+γ}``.
    """
    if degree == 0 or not np.all(np.isfinite(coefficients[table.degree == degree])):
        return 0.0 if degree == 0 else np.inf
    place = {tuple(alpha): k for k, alpha in enumerate(table.exponents)}
    sides = [table.exponents[table.degree == part] for part in ((degree + 1) // 2, degree // 2)]
    weights = [np.sqrt(math.factorial(side[0].sum()) / factorials(side)) for side in sides]
    index = np.asarray([[place[tuple(one + other)] for other in sides[1]] for one in sides[0]])
    entries = (coefficients * factorials(table.exponents))[index]
    return float(np.linalg.norm(weights[0][:, None] * weights[1] * entries, 2))


def _gradient_of(program: Program, center: np.ndarray, table: Monomials, middle: np.ndarray) -> np.ndarray:
    """The coefficients of ``∇P``: ``(β_i + 1) c_{β+e_i}``, less the control variate's gradient."""
    low = table.degree < table.order
    found = table.factor[low] * middle[table.following[low]]
    if program.control is not None:
        dim = program.dim
        precision = np.asarray(program.control.precision)
        found[0] -= precision @ center + np.asarray(program.control.linear)
        found[1 : dim + 1] -= precision
    return found


def _quadratic(control, center: np.ndarray, table: Monomials) -> np.ndarray:
    """Taylor coefficients of a quadratic about the centre, the constant left out."""
    found, precision = np.zeros(len(table.degree)), np.asarray(control.precision)
    dim = len(center)
    found[1 : dim + 1] = precision @ center + np.asarray(control.linear)
    for k, alpha in enumerate(table.exponents):
        if table.degree[k] == 2:
            i, j = np.repeat(np.arange(dim), alpha)
            found[k] = precision[i, j] if i != j else 0.5 * precision[i, i]
    return found
