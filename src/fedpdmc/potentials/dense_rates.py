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
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Float32, Int

from fedpdmc._jax.by_numpy import once
from fedpdmc._jax.compilation import on_device
from fedpdmc.potentials.chebyshev import RateCurve, chebyshev_nodes
from fedpdmc.potentials.linear_predictor import LinearPredictor
from fedpdmc.potentials.losses import Loss

# Records that one turn of the loop takes on a processor, and those summed in 32 bits.
UNROLLED, BLOCK = 8, 256
# Records that the kernel takes at a time and chains of a program, where it makes the predictors and where it does not.
TILE, TILE_OF_PRODUCTS = (4, 128), (4, 64)
# On a GPU: records of a block, at least and at most, and programs that keep it busy.
LEAST_WIDE, MOST_WIDE, PROGRAMS = 64, 4096, 2048


def count_records(potential: LinearPredictor) -> int:
    """Records that see a parameter: the others add nothing."""
    return int(np.count_nonzero(np.any(np.asarray(potential.design), axis=1)))


def blocking(count: int, wide: bool = False, chains: int = 1024) -> tuple[int, int]:
    """How many blocks of how many records."""
    most = BLOCK
    if wide:
        most = min(max(count * -(-chains // TILE[1]) // PROGRAMS, LEAST_WIDE), MOST_WIDE)
    step = max(UNROLLED, 2 ** (max(count, 1).bit_length() - 1) // 32)
    padded = -(-max(count, 1) // step) * step
    blocks = -(-padded // most)
    return blocks, -(-padded // (blocks * UNROLLED)) * UNROLLED


def packed(x: np.ndarray, shape: tuple[int, int]) -> Float32[Array, "B b m"]:
    """Rows in blocks, padded with zeros: a record of zeros adds nothing to rate and error."""
    padded = np.zeros((math.prod(shape), x.shape[1]), np.float32)
    padded[: x.shape[0]] = x
    return on_device(padded.reshape(*shape, -1))


def filled_blocks(x: np.ndarray, shape: tuple[int, int]) -> Int[Array, ""]:
    """How many blocks `packed` rows fill."""
    return on_device(np.asarray(-(-x.shape[0] // shape[1])))


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
    passes : int
        Passes over the records on a piece.
    """

    name: ClassVar[str] = "DenseClock"
    domain: ClassVar[str] = "a polynomial of time through all records with a proved error, then the records"
    passes: ClassVar[int] = 1

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

    def along(
        self, potential: Any, dynamics: Any, a: Float[Array, "d C"], v: Float[Array, "d C"], length: Float[Array, " C"]
    ) -> RateCurve:
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
        error = ROOM * error + self.exact[:, None] * size * (1 + size) + 1e-12 * largest + 1e-300
        return RateCurve(values, error, length)

    def _by_kernel(self, both, cos, sin, slip):
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
    filled = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % parts)])
    return jnp.moveaxis(filled.reshape(*x.shape[:-1], parts, -1), -2, 0)


def _product(rows: Float32[Array, "b d"], both: Float32[Array, "d n"]) -> Float32[Array, "b n"]:
    return functools.reduce(jnp.add, _products(rows, both))


def _products(rows: Float32[Array, "b d"], both: Float32[Array, "d n"]) -> list[Float32[Array, "b n"]]:
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


class RecordPolynomials(NamedTuple):
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
) -> RecordPolynomials:
    """The polynomials and the coefficients of their errors; of ``some`` records, or of all that see a parameter."""
    design = np.asarray(potential.design)
    size = np.linalg.norm(design, axis=1)
    own = np.flatnonzero(np.any(design, 1)) if some is None else some
    design, reach = design[own], SPREAD * size[own]
    offset, response = np.asarray(potential.offset)[own], np.asarray(potential.response)[own]
    y = chebyshev_nodes(degree)
    weight = np.ones(len(own)) if potential.weight is None else np.asarray(potential.weight)[own]
    first = weight[:, None] * slopes(potential.loss, offset[:, None] + reach[:, None] * y, response[:, None])[0]
    if potential.control is not None:
        point, slope, curvature = (x[own, None] for x in np.asarray(potential.control))
        first = first - slope - curvature * (offset[:, None] + reach[:, None] * y - point)
    to_monomials, tau = _powers(degree, nodes)
    c = (first * reach[:, None]) @ to_monomials.T
    growth = potential.loss.growth
    (order,) = by_record(lambda z, y: (potential.loss.beyond(degree + 1, z, y),), offset, response)
    space = (
        reach * np.exp(growth * reach) * weight * order / math.factorial(degree) * reach**degree * 2.0 ** (1 - degree)
    )
    # The coefficients' own rounding, in 64 bits.
    space += ULPS * 2.0**degree * np.abs(first).max(1, initial=0.0) * reach
    mass, powers = np.abs(c), np.arange(1, degree + 1)
    rounding = _grouped(LEBESGUE * (block + 2 * degree + 8) * ROUNDOFF * ROOM * mass, 1) + _grouped(space[:, None], 1)
    time, slips = _grouped(mass / powers * tau, 1), _grouped(LEBESGUE * mass * powers, 0)
    grows = growth * reach[:, None] if growth > 0 else np.zeros((len(reach), 0))
    return RecordPolynomials(design / reach[:, None], c, ROOM * rounding, ROOM * time, ROOM * slips, grows)


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
    weight = 1.0 if potential.weight is None else np.asarray(potential.weight)
    first, second = map(np.abs, slopes(potential.loss, offset, response))
    terms = weight * (1 + np.abs(response) + first + second * (np.abs(offset) + size))
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


# On a GPU --------------------------------------------------------------------------------------------------------------


# Threads of a program, in units of 32.
WARPS = 4
# Numbers of the products that are in memory at a time.
MOST_NUMBERS = 2**27

Sums = tuple[Float32[Array, "B K C"], Float32[Array, "B C"]]


def summed(
    value: Callable,
    error: Callable,
    rows: Float32[Array, "B b d"],
    terms: Float32[Array, "B b m"],
    both: Float32[Array, "d two_C"],
    of_chains: tuple[Float32[Array, "K C"], Float32[Array, "K C"], Float32[Array, " C"]],
    tile: tuple[int, int],
    products: Callable[..., Sequence[Float32[Array, "n two_C"]]] | None = None,
    interpret: bool = False,
) -> Sums:
    """Sums of ``value(α, β, cos, sin, c)`` and ``error(α, β, slip, c)`` over the records of every block.

    ``of_chains`` are the cosines, sines and slip. A ``tile`` is the records that are taken at a time, of which a
    block has a multiple, and the chains of a program. ``products(rows, both)`` are the parts whose sum is ``(α, β)``; where
    there is none the kernel multiplies.
    """
    chains, blocks, dim = both.shape[1] // 2, rows.shape[0], rows.shape[2]
    beyond = -chains % tile[1]

    def padded(x):
        return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, beyond)]) if beyond else x

    halves = padded(both[:, :chains]), padded(both[:, chains:])
    sums = functools.partial(_sums, value, error, tile, interpret, [padded(x) for x in of_chains])
    if products is None:
        found = sums(_by_column, terms, *halves, rows)
    else:
        joined = jnp.concatenate(halves, 1) if beyond else both
        at_a_time = _at_a_time(blocks, MOST_NUMBERS // (rows.shape[1] * joined.shape[1]))

        def some(args):
            rows, terms = args
            parts = products(rows.reshape(-1, dim), joined)
            return sums(_by_part, terms, *(x.reshape(*rows.shape[:2], -1) for x in parts))

        turns = [x.reshape(blocks // at_a_time, at_a_time, *x.shape[1:]) for x in (rows, terms)]
        found = jax.lax.map(some, tuple(turns)) if at_a_time < blocks else some((rows, terms))
        found = [x.reshape(blocks, *x.shape[x.ndim - k :]) for x, k in zip(found, (2, 1), strict=True)]
    values, errors = found
    return values[..., :chains], errors[..., :chains]


def _at_a_time(blocks: int, most: int) -> int:
    """The largest divisor of the number of blocks that is not above ``most``, or one."""
    return max(k for k in range(1, blocks + 1) if blocks % k == 0 and k <= max(most, 1))


def _by_column(arrays, block, here, first, own_chains):
    """Predictors from positions, velocities and the design."""
    *halves, rows = arrays
    x = [rows[block, here, j][:, None] for j in range(rows.shape[2])]
    own = pl.ds(first, own_chains)
    return (functools.reduce(jnp.add, [x[j] * y[j, own][None] for j in range(len(x))]) for y in halves)


def _by_part(parts, block, here, first, own_chains):
    """Predictors from the parts of the products: of positions, then of velocities."""
    places = pl.ds(first, own_chains), pl.ds(first + parts[0].shape[2] // 2, own_chains)
    return (functools.reduce(jnp.add, [x[block, here, own] for x in parts]) for own in places)


def _sums(value, error, tile, interpret, of_chains, predictors, terms, *arrays) -> Sums:
    """The kernel; ``predictors`` makes (α, β) of a tile from the arrays."""
    (blocks, records, count), (nodes, width), (at_a_time, own_chains) = terms.shape, of_chains[0].shape, tile

    def kernel(cos, sin, slip, terms, *rest):
        *arrays, values, errors = rest
        first, block = pl.program_id(0) * own_chains, pl.program_id(1)
        own = pl.ds(first, own_chains)
        angles = [(cos[k, own][None], sin[k, own][None]) for k in range(nodes)]
        size = slip[own][None]

        def some(i, totals):
            here = pl.ds(i * at_a_time, at_a_time)
            c = [terms[block, here, k][:, None] for k in range(count)]
            alpha, beta = predictors(arrays, block, here, first, own_chains)
            new = [value(alpha, beta, *angle, c) for angle in angles]
            return tuple(x + y for x, y in zip(totals, (*new, error(alpha, beta, size, c)), strict=True))

        zero = jnp.zeros(tile, jnp.float32)
        totals = jax.lax.fori_loop(jnp.int32(0), jnp.int32(records // at_a_time), some, (zero,) * (nodes + 1))
        for k in range(nodes):
            values[block, k, own] = jnp.sum(totals[k], 0)
        errors[block, own] = jnp.sum(totals[nodes], 0)

    values, errors = pl.pallas_call(
        kernel,
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((blocks, nodes, width), (blocks, width))],
        grid=(width // own_chains, blocks),
        interpret=interpret,
        compiler_params=triton.CompilerParams(num_warps=WARPS, num_stages=1),
    )(*of_chains, terms, *arrays)
    return values, errors


# Of the logistic loss --------------------------------------------------------------------------------------------------


KAPPA = 1 / (6 * math.sqrt(3))
# The exponential of 32 bits: the largest argument, log 2 in two parts of which the first has few digits, and its error.
LARGEST, LN2_HIGH, LN2_LOW = 87.0, 0.693359375, -2.12194440e-4
EXPONENTIAL_ULPS = 10.0
# The majorant of G: number of coefficients, largest r and number of points of the comparison, and the range of r in which
# it should be close.
POWERS, FITTED, POINTS, LEAST_USUAL, MOST_USUAL = 8, 16.0, 4000, 0.1, 4.0
# Strips |Im δ| ≤ S that are tried, as shares of π.
STRIPS = (0.5, 0.6, 0.7, 0.76, 0.82, 0.87, 0.91, 0.95)


class LogisticCurves(RecordCurves):
    """Logistic records evaluated at the nodes: ``rows`` are ``ξ_i``.

    ``terms`` are ``ẑ, e, s``, then for the error ``|ξ|²``, three coefficients of r² and two of the product's rounding;
    ``higher`` are the coefficients that all records share.
    """

    higher: tuple[float, ...] = eqx.field(static=True)

    def _value(self, alpha, beta, cos, sin, c):
        """``(σ(ẑ + δ) − e − s δ) δ'``."""
        delta = alpha * cos + beta * sin
        rest = 1 / (1 + exponential(-(c[0] + delta))) - c[1] - c[2] * delta
        return rest * (beta * cos - alpha * sin)

    def _error(self, alpha, beta, slip, c):
        """A polynomial of r², with room for what is true and what is computed."""
        q = jnp.float32(1.001) * (alpha * alpha + beta * beta) + jnp.float32(9100.0) * (slip * slip) * c[3]
        total = jnp.float32(self.higher[-1])
        for coefficient in self.higher[-2::-1]:
            total = total * q + jnp.float32(coefficient)
        return c[4] + q * (c[5] + q * (c[6] + q * total)) + slip * (c[7] + c[8] * q)


def exponential(x: Float32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """``e^x`` of ``|x| ≤ 87``, larger ones cut, in 32 bits with a relative error of at most ten units of roundoff.

    ``x = n log 2 + f`` with ``|f| < 0.35``: n times the first part of log 2 is exact, what is left has an error below u, and
    Taylor's polynomial of degree 6 leaves ``0.35⁷/7! e^{0.35} < 3u``; Horner's rule adds less than 3u, and ``2^n`` is exact.
    """
    x = jnp.clip(x, -LARGEST, LARGEST)
    n = jnp.floor(x * jnp.float32(1 / math.log(2)) + jnp.float32(0.5))
    f = (x - n * jnp.float32(LN2_HIGH)) - n * jnp.float32(LN2_LOW)
    total = jnp.float32(1 / 720)
    for k in (120, 24, 6, 2, 1, 1):
        total = total * f + jnp.float32(1 / k)
    scale = jax.lax.bitcast_convert_type((n.astype(jnp.int32) + 127) << 23, jnp.float32)
    return total * scale


def ellipses(r: np.ndarray, nodes: int, length: float) -> np.ndarray:
    """``G(r)``: the error of the interpolant of ``(σ(ẑ + δ) − ½) δ'`` on a piece, for every ẑ."""
    best = 0.5 * (1 + LEBESGUE) * r
    for share in STRIPS:
        strip = math.pi * share
        x = 2 / length * np.arcsinh(strip / np.maximum(r, 1e-300))
        theta = x + np.sqrt(1 + x * x)
        most = 0.5 * max(1.0, math.tan(strip / 2)) * np.hypot(r, strip)
        best = np.minimum(best, 4 * most * theta ** (1.0 - nodes) / (theta - 1))
    return best


@functools.cache
def majorant(nodes: int, length: float) -> tuple[float, ...]:
    """Coefficients, none negative, of a polynomial of r² that is at least G for every r.

    G and the polynomial p grow with r, so ``p(r_k) ≥ G(r_{k+1})`` on a grid is enough up to its end R. From there on
    ``G ≤ ½(1 + Λ) r``, and p is made to exceed that at R: where ``p(0) ≤ ½ p(R)``,
    ``p(r) ≥ p(0) + (p(R) − p(0)) (r/R)² ≥ p(R) r/R``.
    """
    # Slow to import.
    from scipy.optimize import linprog

    r = np.linspace(0.0, FITTED, POINTS + 1)
    bound = ROOM * np.append(ellipses(r, nodes, length)[1:-1], 0.5 * (1 + LEBESGUE) * FITTED)
    shares = r[:-1, None] ** (2.0 * np.arange(POWERS)) / bound[:, None]
    # In units in which every power alone touches G from below.
    units = 1 / shares.max(0)
    shares = shares * units
    usual = (shares / np.maximum(r[:-1, None], LEAST_USUAL))[r[:-1] <= MOST_USUAL].sum(0)
    found = linprog(usual, A_ub=-shares, b_ub=-np.ones(POINTS), bounds=(0, None))
    coefficients = np.maximum(found.x, 0.0)
    # Whatever the program found: scaled until it holds.
    coefficients *= ROOM * max(1.0, float(np.max(1 / (shares @ coefficients))))
    assert shares[0, 0] * coefficients[0] * bound[0] <= 0.5 * bound[-1]
    return tuple((coefficients * units).tolist())


def logistic_terms(
    potential: LinearPredictor,
    nodes: int,
    length: float,
    block: int,
    low=(0.0, 0.0, 0.0),
    some: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """The design and the terms of all records that see a parameter, or of some; ``low``: of 1, r², r⁴ in the majorant."""
    assert potential.weight is None
    design, (offset, response) = np.asarray(potential.design), np.asarray([potential.offset, potential.response])
    size = np.linalg.norm(design, axis=1)
    own = np.flatnonzero(np.any(design, 1)) if some is None else some
    design, size, offset, response = design[own], size[own], offset[own], response[own]
    e, s = response, np.zeros_like(size)
    if potential.control is not None:
        point, slope, s = np.asarray(potential.control)[:, own]
        e = response + slope + s * (offset - point)
    sigma = 0.5 + 0.5 * np.tanh(0.5 * offset)
    first, second = np.abs(sigma - e) + 1e-15, np.abs(sigma * (1 - sigma) - s) + 1e-15
    # σ' of the rounding of z = ẑ + δ, the exponential, quotient and sum of σ; e and s δ rounded, and two differences.
    still = 0.25 * (2 * np.abs(offset) + EXPONENTIAL_ULPS) + 8 + 4 * np.abs(e)
    moving = 1.0 + 8 * np.abs(s)
    unit, sums = LEBESGUE * ROUNDOFF * ROOM, LEBESGUE * ROUNDOFF * ROOM * (block + 8)
    shrink = 2 / math.factorial(nodes) * (length / 4) ** nodes
    # Of r, r² and r³.
    one = shrink * np.abs(0.5 - e) + unit * still + sums * first
    two = shrink * 2.0 ** (nodes - 1) * np.abs(s) + unit * moving + sums * second
    three = np.full_like(size, sums * 0.5 * KAPPA)
    usual = math.sqrt(2) * size
    by_power = [
        low[0] + 0.5 * one * usual,
        low[1] + 0.5 * (one / usual + three * usual) + two,
        low[2] + 0.5 * three / usual,
    ]
    slips = [LEBESGUE * size * (first + second * usual), LEBESGUE * size * (second / usual + 1.5 * KAPPA)]
    return design, np.stack([offset, e, s, *(ROOM * x for x in (size**2, *by_power, *slips))], 1)


def logistic_curves(
    potential: LinearPredictor, nodes: int, length: float, shape: tuple[int, int], wide: bool = False
) -> LogisticCurves:
    """The curves of whitened logistic records on pieces up to a length; ``shape`` as `blocking` has it."""
    common = majorant(nodes, length)
    design, terms = logistic_terms(potential, nodes, length, shape[1], common[:3])
    higher = tuple(ROOM * x for x in np.trim_zeros(common[3:], "b")) or (0.0,)
    return LogisticCurves(
        packed(design, shape), packed(terms, shape), exact_rounding(potential),
        filled_blocks(design, shape), nodes, wide, higher,
    )  # fmt: skip
