"""The rate of a sum over records along a piece of a rotation, as a polynomial of time with a proved error.

On a rotation ``δ_i(t) = ξ_i·a(t) = α_i cos t + β_i sin t``: one product with the design, ``(α, β) = Ξ (a, v)``, gives every
record at every time. The signed rate ``f(t) = d/dt R(a(t)) = Σ ρ_i'(δ_i) δ_i'`` is evaluated at the K Chebyshev nodes
of a piece [0, L], in 32 bits, for all chains at once; P is its interpolant, and E bounds ``|f − P|`` on the piece.
``ρ_i'`` is replaced by its interpolant ``q_i`` at n Chebyshev nodes of ``|δ| ≤ ϱ_i = 3 |ξ_i|``: no loss is evaluated.

**The error.** With ``w = r/ϱ``, ``r² = α² + β²``, ``y = δ/ϱ``, ``ϱ q(ϱ y) = Σ c_m y^m``, one record adds at most the sum of

- *space*, ``|ρ' − q| |δ'| ≤ r e^{g max(r, ϱ)} w_{n+1}/n! ϱ^n 2^{1−n} T_n(max(1, w))``: the remainder of interpolation at
  Chebyshev nodes, whose node polynomial is ``2^{1−n} T_n``; ``|ℓ^{(n+1)}(z + u)| ≤ w_{n+1} e^{g|u|}`` (`Loss.beyond`);
- *time*, ``2 (L/4)^K/K! Σ_m |c_m|/(m+1) τ_{m+1} w^{m+1}``: ``q(δ) δ'`` is the derivative of a polynomial of
  ``w cos(t − θ)``, and with ``cos^p = 2^{1−p} Σ_k C(p, (p−k)/2) cos k·``, ``|d^{K+1} y^p| ≤ τ_p w^p``,
  ``τ_p = 2^{1−p} Σ_k C(p, (p−k)/2) k^{K+1}``;
- *rounding*, Λ times ``γ_{b+2n+8} Σ_m |c_m| w^{m+1}`` (Horner's rule, coefficients, sums of at most b records in 32
  bits, 64 between them) and ``h Σ_m (m+1) |c_m| w^m`` (the nodes), where Λ is the Lebesgue constant of K Chebyshev nodes and
  ``h = γ_{c+6} |(a, v)| |ξ|/ϱ`` bounds the error of ``y`` and ``y'``: the product in any order of summation, the states, the
  design and the sines in 32 bits. Columns are taken some at a time, so that c, the summands that one goes through, is small.

All of it is at most ``T_n(max(1, w)) (k_0 + k_1 w² + k_2 w⁴)``, because ``w ≤ ½(1 + w²)``, ``w³ ≤ ½(w² + w⁴)`` and, for
``4 ≤ p ≤ n + 4``, ``w^p ≤ w⁴ T_n(max(1, w))``. These coefficients are kept for each record together with ``c``.
"""

from __future__ import annotations

import abc
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int

from fedpdmc._jax.by_numpy import once
from fedpdmc._jax.compilation import on_device
from fedpdmc.potentials.chebyshev import chebyshev_nodes
from fedpdmc.potentials.linear_predictor import LinearPredictor
from fedpdmc.potentials.losses import Loss
from fedpdmc.potentials.record_blocks import TILE, TILE_OF_PRODUCTS, UNROLLED, filled_blocks, packed

# Reach of a record's polynomial in units of |ξ|: ``r²/(2|ξ|²)`` is exponential in the reference, so e^{−4.5} of all r are
# beyond. The error is proportional to its n-th power, and beyond it grows like ``T_n(r/ϱ)``.
SPREAD = 3.0
# A bound of the Lebesgue constants of up to twelve Chebyshev nodes: 2/π log K + 1.
LEBESGUE = 2.6
# Unit roundoff of 32 bits, and room for what is of second order in it.
ROUNDOFF, ROOM = 2.0**-24, 1.01
# The error of sums over records in units in the last place of 64 bits, relative to their terms.
ULPS = 64 * 2.0**-52
# Chains of one pass on a processor: of more, sums and sines are beyond its first cache.
CHAINS = 512
# Columns of a design up to which the kernel of a GPU makes the predictors itself. With 20 it takes half the time that it
# takes with a matrix product, with 28 nearly the same, with 40 a little more; but compiling that takes twenty seconds.
FEW_COLUMNS = 20
# Columns whose products are added up at a time.
MOST_COLUMNS = 32
DEGREES = (4, 5, 6, 7, 8, 10, 12)
# Numbers of a loss that are computed at a time, before a run.
AT_A_TIME = 2**14


class Curves(NamedTuple):
    """The signed rates of every site and chain at the Chebyshev nodes of the piece, and the error of their interpolant."""

    values: Float[Array, "G K C"]
    error: Float[Array, "G C"]


class RecordCurves(eqx.Module):
    """The records of a site in blocks, and the pass over them. Subclasses define what a record adds.

    Attributes
    ----------
    rows : (B, b, d)
        The design in 32 bits, in the units of the subclass.
    terms : (B, b, m)
        The other numbers of a record.
    exact : ()
        A bound of the rounding of a rate in 64 bits, for states of unit size.
    filled : ()
        The number of blocks that have a record; they come first.
    nodes : int
        ``K``.
    wide : bool
        Whether the sums are made for a GPU, by one kernel (`dense_rates_kernel`).
    """

    rows: Float32[Array, "*G B b d"]
    terms: Float32[Array, "*G B b m"]
    exact: Float[Array, "*G"]
    filled: Int[Array, "*G"]
    nodes: int = eqx.field(static=True)
    wide: bool = eqx.field(static=True)

    @abc.abstractmethod
    def _value(self, alpha, beta, cos, sin, c) -> Array:
        """What a record adds to the rate at the nodes, given ``(α, β)`` and its terms."""

    @abc.abstractmethod
    def _error(self, alpha, beta, slip, c) -> Array:
        """What it adds to the error, for the longest piece and so for all; ``slip`` is ``γ_{c+6} |(a, v)|``."""

    def along(self, a: Float[Array, "d C"], v: Float[Array, "d C"], length: Float[Array, " C"]) -> Curves:
        """The curves from ``(a, v)`` on, of stacked sites: one pass over the records for all chains."""
        size = jnp.sqrt(jnp.sum(a * a, 0) + jnp.sum(v * v, 0))
        angle = 0.5 * length * (chebyshev_nodes(self.nodes)[:, None] + 1)
        cos, sin = cosine_and_sine(angle)
        slip = ROOM * summands(a.shape[0]) * ROUNDOFF * size
        narrow = functools.partial(jnp.asarray, dtype=jnp.float32)
        sums = self._by_kernel if self.wide else self._by_site
        values, error = sums(
            narrow(jnp.concatenate([a, v], 1)), narrow(cos), narrow(sin), narrow(slip)
        )  # fmt: skip
        largest = jnp.max(jnp.abs(values), 1)
        return Curves(values, ROOM * error + self.exact[:, None] * size * (1 + size) + 1e-12 * largest + 1e-300)

    def _by_kernel(self, both, cos, sin, slip):
        """One kernel for all blocks of all sites."""
        # Not needed on a processor, and slow to import.
        from fedpdmc.potentials.dense_rates_kernel import summed

        (sites, blocks), interpret = self.rows.shape[:2], jax.default_backend() == "cpu"
        rows, terms = (x.reshape(sites * blocks, *x.shape[2:]) for x in (self.rows, self.terms))
        tile, products = (TILE, None) if rows.shape[2] <= FEW_COLUMNS else (TILE_OF_PRODUCTS, _products)
        sums = summed(self._value, self._error, rows, terms, both, (cos, sin, slip), tile, products, interpret)
        return (jnp.sum(x.reshape(sites, blocks, *x.shape[1:]), 1, jnp.float64) for x in sums)

    def _by_site(self, both, cos, sin, slip):
        """Site by site in loops, for some chains at a time."""
        chains = slip.shape[0]
        parts = -(-chains // CHAINS)
        if parts == 1:
            return self._of_chains(both, cos, sin, slip)
        states = both.reshape(-1, 2, chains)
        a, v, cos, sin, slip = (_in_parts(x, parts) for x in (states[:, 0], states[:, 1], cos, sin, slip))
        found = jax.lax.map(lambda own: self._of_chains(*own), (jnp.concatenate([a, v], -1), cos, sin, slip))
        return tuple(jnp.moveaxis(x, 0, -2).reshape(*x.shape[1:-1], -1)[..., :chains] for x in found)

    def _of_chains(self, *args):
        """The sums of all sites for some chains."""
        one = functools.partial(self._site, *args)
        if self.rows.shape[0] == 1:
            return tuple(x[None] for x in one(self.rows[0], self.terms[0], self.filled[0]))
        return jax.lax.map(lambda site: one(*site), (self.rows, self.terms, self.filled))

    def _site(self, both, cos, sin, slip, rows, terms, filled):
        """Sums over the blocks of a site: in 32 bits within a block, in 64 between them."""
        chains = both.shape[1] // 2
        of_block = functools.partial(self._looped, both, cos, sin, slip)
        if rows.shape[0] == 1:
            return tuple(x.astype(jnp.float64) for x in of_block(rows[0], terms[0]))

        def add(k, total):
            return tuple(x + y.astype(jnp.float64) for x, y in zip(total, of_block(rows[k], terms[k]), strict=True))

        zero = jnp.zeros((self.nodes, chains), jnp.float64), jnp.zeros(chains, jnp.float64)
        return jax.lax.fori_loop(0, filled, add, zero)

    def _looped(self, both, cos, sin, slip, rows, terms):
        """Some records at a time, so that the compiler makes one loop over chains with everything in registers."""
        chains = both.shape[1] // 2
        product = _product(rows, both)

        def some(i, total):
            y = jax.lax.dynamic_slice_in_dim(product, i * UNROLLED, UNROLLED, 0)
            c = jax.lax.dynamic_slice_in_dim(terms, i * UNROLLED, UNROLLED, 0)
            value, error = total
            for k in range(UNROLLED):
                value = value + self._value(y[k, :chains], y[k, chains:], cos, sin, c[k])
            for k in range(UNROLLED):
                error = error + self._error(y[k, :chains], y[k, chains:], slip, c[k])
            return value, error

        zero = jnp.zeros((self.nodes, chains), jnp.float32), jnp.zeros(chains, jnp.float32)
        return jax.lax.fori_loop(0, rows.shape[0] // UNROLLED, some, zero)


class InterpolatedCurves(RecordCurves):
    """Records by polynomials of their predictors: ``rows`` are ``ξ_i/ϱ_i``.

    ``terms`` are ``c``, the coefficients ``k`` of space, rounding and time, and of the product's rounding; for losses that
    grow also ``g ϱ``.
    """

    degree: int = eqx.field(static=True)
    grows: bool = eqx.field(static=True)

    def _value(self, alpha, beta, cos, sin, c):
        """``Σ c_m y^m · y'`` at the nodes."""
        y = alpha * cos + beta * sin
        total = c[self.degree - 1]
        for m in range(self.degree - 2, -1, -1):
            total = total * y + c[m]
        return total * (beta * cos - alpha * sin)

    def _error(self, alpha, beta, slip, c):
        """``T_n (k_0 + k_1 w² + k_2 w⁴)``; ``(w + 3h)² ≤ 1.001 w² + 9009 h²`` holds what is true and what is computed."""
        slip = slip * jnp.float32(1 / SPREAD)
        x = jnp.float32(1.001) * (alpha * alpha + beta * beta) + jnp.float32(9100.0) * (slip * slip)
        # T_n of odd n is below T_{n+1} there.
        k, far = self.degree, _chebyshev(-(-self.degree // 2), jnp.maximum(2 * x - 1, 1))
        k0, k1, k2 = (c[k + j] + slip * c[k + 3 + j] for j in range(3))
        bound = far * (k0 + x * (k1 + x * k2))
        if self.grows:
            # e^{g (max(r, ϱ) − ϱ)}, and w − 1 ≤ ½(w² − 1).
            bound = bound * (jnp.float32(ROOM) * jnp.exp(c[k + 6] * jnp.maximum(x - 1, 0) * 0.5))
        return bound


def _in_parts(x: Float32[Array, "*n C"], parts: int) -> Float32[Array, "p *n c"]:
    """The chains in parts of one size, filled up with zeros."""
    filled = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % parts)])
    return jnp.moveaxis(filled.reshape(*x.shape[:-1], parts, -1), -2, 0)


def _product(rows: Float32[Array, "b d"], both: Float32[Array, "d n"]) -> Float32[Array, "b n"]:
    """Product with the design, some columns at a time."""
    return functools.reduce(jnp.add, _products(rows, both))


def _products(rows: Float32[Array, "b d"], both: Float32[Array, "d n"]) -> list[Float32[Array, "b n"]]:
    """Products of some columns each."""
    dim = rows.shape[1]
    width = -(-dim // -(-dim // MOST_COLUMNS))
    return [
        jnp.dot(rows[:, k : k + width], both[k : k + width], precision="highest") for k in range(0, dim, width)
    ]  # fmt: skip


def summands(dim: int) -> int:
    """Roundings of a predictor: of its sum, and six of state, design, sines and their products."""
    parts = -(-dim // MOST_COLUMNS)
    return -(-dim // parts) + parts - 1 + 6


def _chebyshev(n: int, x):
    """``T_n(x)``; with ``T_{2n}(w) = T_n(2w² − 1)`` no root is taken."""
    before, now = jnp.ones_like(x), x
    for _ in range(n - 1):
        before, now = now, 2 * x * now - before
    return now


def cosine_and_sine(angle: Float[Array, "*shape"]) -> tuple[Float[Array, "*shape"], Float[Array, "*shape"]]:
    """Cosine and sine of angles in [0, π/2], to the last places of 64 bits, as straight-line arithmetic.

    Taylor's series about π/4 with ``|s| ≤ π/4``; the terms left out are below ``(π/4)^{18}/18! < 3·10⁻¹⁸``. The processor's
    compiler vectorises this, but calls a library function for each 64-bit cosine.
    """
    s = angle - math.pi / 4
    x = s * s
    even = odd = jnp.zeros_like(s)
    for k in range(8, -1, -1):
        even = even * x + (-1) ** k / math.factorial(2 * k)
        odd = odd * x + (-1) ** k / math.factorial(2 * k + 1)
    odd = odd * s
    return math.sqrt(0.5) * (even - odd), math.sqrt(0.5) * (even + odd)


@functools.cache
def _powers(degree: int, nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Values at n Chebyshev nodes to monomial coefficients, and ``τ_p`` for p = 1 … n."""
    to_monomials = np.linalg.inv(np.vander(chebyshev_nodes(degree), degree, increasing=True))
    tau = [
        2.0 ** (1 - p) * sum(math.comb(p, (p - k) // 2) * float(k) ** (nodes + 1) for k in range(p % 2 or 2, p + 1, 2))
        for p in range(1, degree + 1)
    ]
    return to_monomials, np.asarray(tau)


def _grouped(coefficients: np.ndarray, lowest: int) -> np.ndarray:
    """``Σ_j A_j w^{lowest + j} ≤ T (k_0 + k_1 w² + k_2 w⁴)``: the coefficients k."""
    k = np.zeros((coefficients.shape[0], 3))
    for j in range(coefficients.shape[1]):
        power, own = lowest + j, coefficients[:, j]
        if power >= 4:
            k[:, 2] += own
        elif power % 2 == 0:
            k[:, power // 2] += own
        else:
            k[:, power // 2] += 0.5 * own
            k[:, power // 2 + 1] += 0.5 * own
    return k


class Local(NamedTuple):
    """Records without their padding, in 64 bits: their polynomials, and the coefficients of the parts of their errors."""

    design: np.ndarray
    polynomial: np.ndarray
    still: np.ndarray
    time: np.ndarray
    slips: np.ndarray
    growth: np.ndarray

    def terms(self, nodes: int, length: float) -> np.ndarray:
        """The terms of a record on pieces up to a length."""
        shrink = ROOM * 2 / math.factorial(nodes) * (length / 4) ** nodes
        return np.concatenate([self.polynomial, self.still + shrink * self.time, self.slips, self.growth], 1)


def local_terms(
    potential: LinearPredictor, degree: int, nodes: int, block: int, some: np.ndarray | None = None
) -> Local:
    """The polynomials and the coefficients of their errors; of ``some`` records, or of all that see a parameter."""
    design = np.asarray(potential.design)
    size = np.linalg.norm(design, axis=1)
    own = np.flatnonzero(np.any(design, 1)) if some is None else some
    design, reach = design[own], SPREAD * size[own]
    offset, response = np.asarray(potential.offset)[own], np.asarray(potential.response)[own]
    y = chebyshev_nodes(degree)
    first = slopes(potential.loss, offset[:, None] + reach[:, None] * y, response[:, None])[0]
    if potential.control is not None:
        point, slope, curvature = (x[own, None] for x in np.asarray(potential.control))
        first = first - slope - curvature * (offset[:, None] + reach[:, None] * y - point)
    to_monomials, tau = _powers(degree, nodes)
    c = (first * reach[:, None]) @ to_monomials.T
    growth = potential.loss.growth
    (order,) = by_record(lambda z, y: (potential.loss.beyond(degree + 1, z, y),), offset, response)
    space = reach * np.exp(growth * reach) * order / math.factorial(degree) * reach**degree * 2.0 ** (1 - degree)
    # The coefficients' own rounding, in 64 bits.
    space += ULPS * 2.0**degree * np.abs(first).max(1, initial=0.0) * reach
    mass, powers = np.abs(c), np.arange(1, degree + 1)
    rounding = _grouped(LEBESGUE * (block + 2 * degree + 8) * ROUNDOFF * ROOM * mass, 1) + _grouped(space[:, None], 1)
    time, slips = _grouped(mass / powers * tau, 1), _grouped(LEBESGUE * mass * powers, 0)
    grows = growth * reach[:, None] if growth > 0 else np.zeros((len(reach), 0))
    return Local(design / reach[:, None], c, ROOM * rounding, ROOM * time, ROOM * slips, grows)


def interpolated_curves(
    potential: LinearPredictor, degree: int, nodes: int, length: float, shape: tuple[int, int], wide: bool = False
) -> InterpolatedCurves:
    """The curves of a whitened potential by polynomials, on pieces up to a length; ``shape`` as `blocking` has it."""
    local = local_terms(potential, degree, nodes, shape[1])
    return InterpolatedCurves(
        packed(local.design, shape), packed(local.terms(nodes, length), shape), exact_rounding(potential),
        filled_blocks(local.design, shape), nodes, wide, degree, potential.loss.growth > 0,
    )  # fmt: skip


def exact_rounding(potential: LinearPredictor) -> Float[Array, ""]:
    """Some units in the last place of all terms of ``Σ ρ' ξ·v`` in 64 bits, before they cancel."""
    size = np.linalg.norm(np.asarray(potential.design), axis=1)
    offset, response = np.asarray(potential.offset), np.asarray(potential.response)
    first, second = map(np.abs, slopes(potential.loss, offset, response))
    terms = 1 + np.abs(response) + first + second * (np.abs(offset) + size)
    if potential.control is not None:
        point, slope, curvature = np.abs(np.asarray(potential.control))
        terms = terms + slope + curvature * (np.abs(offset) + point + size)
    return on_device(ULPS * float(np.sum(size * terms)))


def by_record(function: Callable, z: np.ndarray, y: np.ndarray) -> list[np.ndarray]:
    """The numbers ``function(z, y)`` of a loss, computed so many at a time: nothing is compiled for another shape."""
    places = np.broadcast_arrays(z, y)
    parts = []
    for start in range(0, max(places[0].size, 1), AT_A_TIME):
        some = [np.ravel(x)[start : start + AT_A_TIME] for x in places]
        count = len(some[0])
        found = function(*(on_device(np.pad(x, (0, AT_A_TIME - count))) for x in some))
        parts.append([np.asarray(x)[:count] for x in found])
    return [np.concatenate(x).reshape(places[0].shape) for x in zip(*parts, strict=True)]


def slopes(loss: Loss, z: np.ndarray, y: np.ndarray) -> list[np.ndarray]:
    """The first two derivatives of the loss of some predictors."""
    return by_record(functools.partial(_slopes, loss), z, y)


@once
def _slopes(loss: Loss, z, y):
    return loss.first(z, y), loss.second(z, y)
