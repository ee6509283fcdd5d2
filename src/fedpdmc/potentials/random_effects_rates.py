"""The private map of grouped effects, and the rates of arrivals along a path with certified bounds.

Given θ, an effect whose records carry a Gaussian pseudo-likelihood of precision h and centre m(θ), and whose spread is τ, is
Gaussian with mean ``σ(u) m`` and variance ``σ(u)/h``, where ``u = 2 log τ + log h`` and ``σ`` is the logistic function. The
map ``z = σ(u) m(θ) + √(σ(u)/h) ζ`` makes it standard normal in ζ: centred for ``h → ∞``, non-centred for ``h → 0``. h, m and
``∂m/∂θ`` are chosen so that mean, variance and the slope of the mean are those of the true conditional at the reference.

Rates along a path are bounded through complex times (`fedpdmc.potentials.random_effects_rates`).
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from fedpdmc._jax.compilation import apart, computed_first
from fedpdmc._jax.random_streams import logarithm, normals
from fedpdmc.potentials.base import PrivateRemainder
from fedpdmc.potentials.chebyshev import RateCurve, chebyshev_nodes
from fedpdmc.potentials.quadratic import Quadratic
from fedpdmc.whitening import bent, enclosed, steepness, straight

if TYPE_CHECKING:
    from fedpdmc.potentials.random_effects import RandomEffects


# For ``|Im η| ≤ STRIP < π``: ``|1 + e^{−x−iy}|``, the distance of a point at the angle ``π − y`` from 1, is at least
# ``sin STRIP``, and so is ``|e^{x} + e^{−iy}|``. So ``|σ(η)| ≤ SIGMOID min(1, e^{Re η})``.
STRIP = 2.6
SIGMOID = 1 / math.sin(STRIP)

Records = Float[Array, "*batch"]


class EffectsFamily(eqx.Module):
    """The loss ``ℓ(η; y, s)`` of one record; ``s`` are the parameters of the family beside the predictor."""

    @property
    def scaled(self) -> int:
        """How many of these parameters there are."""
        return 0

    def scales(self, x: Float[Array, " q"]) -> Array:
        """The parameters as `value` takes them: one of them, or zero, as a number."""
        return x[0] if self.scaled else jnp.zeros(())

    @property
    def stride(self) -> float:
        """The longest step towards a mode."""
        return 1.5

    @abc.abstractmethod
    def value(self, eta: Records, y: Any, s: Records) -> Records:
        """``ℓ``."""

    @abc.abstractmethod
    def slope(self, eta: Records, y: Any, s: Records) -> Records:
        """``∂ℓ/∂η``."""


class ProgramFamily(EffectsFamily):
    """Any loss of one record, such as that of a model file: ``ℓ = function(η, row, s, constants)``.

    Parameters
    ----------
    function : callable
    constants : pytree of arrays
        The same for all records of a site.
    count : int
        Number of parameters s.
    """

    function: Callable[..., Any] = eqx.field(static=True)
    constants: Any
    count: int = eqx.field(static=True)

    @property
    def scaled(self) -> int:
        return self.count

    def scales(self, x):
        return x

    def value(self, eta, y, s):
        return jax.vmap(lambda e, row: self.function(e, row, s, self.constants))(eta, y)

    def slope(self, eta, y, s):
        return jax.vmap(jax.grad(lambda e, row: self.function(e, row, s, self.constants)))(eta, y)


class AnalyticFamily(EffectsFamily):
    """A loss that is analytic in a strip about the real line; s is a log scale, if there is one."""

    @property
    def strip(self) -> float:
        """The loss is analytic, and the bounds hold, for ``|Im η|`` up to this."""
        return math.inf

    def scale_slope(self, eta: Records, y: Records, s: Records) -> Records:
        """``∂ℓ/∂s``."""
        return jnp.zeros_like(eta)

    def change(self, eta: Records, before: Records, y: Any, s: Any) -> Records:
        """``ℓ(eta) − ℓ(before)``; not to be differentiated."""
        return self.value(eta, y, s) - self.value(before, y, s)

    @abc.abstractmethod
    def largest(
        self, stats: Float[Array, "3 G"], reach: Float[Array, "G C"], low: Float[Array, " C"]
    ) -> tuple[Float[Array, "G C"], Float[Array, "G C"]]:
        """Bounds of ``|∂ℓ/∂η|`` and ``|∂ℓ/∂s|`` over the records of a group.

        Parameters
        ----------
        stats : (3, G)
            Of each group the largest ``|y − o|``, ``o`` and ``|y|``, with ``o`` the predictor at the reference.
        reach : (G, C)
            A bound of ``|η − o|``.
        low : (C,)
            A lower bound of ``Re s``.
        """


def softplus(x: Records) -> Records:
    """``log(1 + e^x)`` as straight-line arithmetic, to be fast and not to be differentiated."""
    return jnp.maximum(x, 0.0) + logarithm(1 + jnp.exp(-jnp.abs(x)))


def _softplus_change(x: Records, before: Records) -> Records:
    """``log(1 + e^x) − log(1 + e^before)`` by one logarithm."""
    ratio = (1 + jnp.exp(-jnp.abs(x))) / (1 + jnp.exp(-jnp.abs(before)))
    return jnp.maximum(x, 0.0) - jnp.maximum(before, 0.0) + logarithm(ratio)


def _flat(reach, value):
    return jnp.broadcast_to(jnp.asarray(value), reach.shape)


class LogisticFamily(AnalyticFamily):
    """``log(1 + e^η) − yη``; ``|σ(η)|`` and ``|σ(−η)|`` are at most `SIGMOID` for ``|Im η| ≤ STRIP``."""

    @property
    def strip(self) -> float:
        """Somewhat less than the distance π of the nearest pole."""
        return STRIP

    def value(self, eta, y, s):
        return jax.nn.softplus(eta) - y * eta

    def change(self, eta, before, y, s):
        return _softplus_change(eta, before) - y * (eta - before)

    def slope(self, eta, y, s):
        return 1 / (1 + jnp.exp(-eta)) - y

    def largest(self, stats, reach, low):
        """``|σ(η) − y| = |(1 − y) σ(η) − y σ(−η)|``: y is between 0 and 1."""
        return _flat(reach, SIGMOID), _flat(reach, 0.0)


class PoissonFamily(AnalyticFamily):
    """``e^η − yη``, entire: ``|e^η − y| ≤ e^{Re η} + y``."""

    def value(self, eta, y, s):
        return jnp.exp(eta) - y * eta

    def slope(self, eta, y, s):
        return jnp.exp(eta) - y

    def largest(self, stats, reach, low):
        """``e^{o + reach} + y``."""
        return jnp.exp(stats[1][:, None] + reach) + stats[2][:, None], _flat(reach, 0.0)


class NegativeBinomialFamily(AnalyticFamily):
    """Counts of mean ``μ = e^η`` and variance ``μ + μ²/size``: ``(y + size) log(1 + e^{η − log size}) − yη``."""

    size: Float[Array, ""]

    @property
    def strip(self) -> float:
        """As for the logistic loss."""
        return STRIP

    def value(self, eta, y, s):
        return (y + self.size) * jax.nn.softplus(eta - jnp.log(self.size)) - y * eta

    def change(self, eta, before, y, s):
        shift = jnp.log(self.size)
        return (y + self.size) * _softplus_change(eta - shift, before - shift) - y * (eta - before)

    def slope(self, eta, y, s):
        return (y + self.size) / (1 + self.size * jnp.exp(-eta)) - y

    def largest(self, stats, reach, low):
        """``(y + size) |σ| + y``."""
        most = SIGMOID * (stats[2] + self.size) + stats[2]
        return jnp.broadcast_to(most[:, None], reach.shape), _flat(reach, 0.0)


class GaussianFamily(AnalyticFamily):
    """``½ e^{−2s}(η − y)² + s``, entire."""

    @property
    def scaled(self) -> int:
        return 1

    @property
    def stride(self) -> float:
        """Newton needs one step."""
        return math.inf

    def value(self, eta, y, s):
        return 0.5 * jnp.exp(-2 * s) * (eta - y) ** 2 + s

    def slope(self, eta, y, s):
        return jnp.exp(-2 * s) * (eta - y)

    def scale_slope(self, eta, y, s):
        return 1 - jnp.exp(-2 * s) * (eta - y) ** 2

    def largest(self, stats, reach, low):
        """``|η − y| ≤ |y − o| + reach``."""
        far, weight = stats[0][:, None] + reach, jnp.exp(-2 * low)
        return weight * far, 1 + weight * far**2


class StudentTFamily(AnalyticFamily):
    """``½(ν + 1) log(1 + ((y − η)/scale)²/ν)`` with both known.

    With ``q = √ν scale`` and ``w = η − y``, ``|Im w| ≤ q/2``: ``|q² + w²| ≥ ¾q² + (Re w)²`` and ``|w| ≤ |Re w| + q/2``, so
    ``|w/(q² + w²)| ≤ 1/(√3 q) + 2/(3q)``.
    """

    df: float = eqx.field(static=True)
    scale: float = eqx.field(static=True)

    @property
    def strip(self) -> float:
        """Half way to the poles at ``y ± i√ν scale``."""
        return 0.5 * math.sqrt(self.df) * self.scale

    @property
    def stride(self) -> float:
        """About where the loss turns concave."""
        return self.scale

    def value(self, eta, y, s):
        return 0.5 * (self.df + 1) * jnp.log1p(((eta - y) / self.scale) ** 2 / self.df)

    def change(self, eta, before, y, s):
        far, near = (1 + ((x - y) / self.scale) ** 2 / self.df for x in (eta, before))
        return 0.5 * (self.df + 1) * logarithm(far / near)

    def slope(self, eta, y, s):
        w = eta - y
        return (self.df + 1) * w / (self.df * self.scale**2 + w * w)

    def largest(self, stats, reach, low):
        q = math.sqrt(self.df) * self.scale
        return _flat(reach, (self.df + 1) * (1 / (math.sqrt(3) * q) + 2 / (3 * q))), _flat(reach, 0.0)


def gaussian_energy(e: Float[Array, "*G r J"], rho: Float[Array, "r 1"], phi) -> Float[Array, "*G J"]:
    """``−log N(z; 0, Σ)`` of effects up to a constant, of ``e = z/τ``, ``ρ = log τ`` and ``φ = atanh(correlation)``."""
    energy = 0.5 * jnp.sum(e * e, -2) + jnp.sum(rho, 0)
    if e.shape[-2] != 2:
        return energy
    # With exponentials, of which there are curves: cosh²φ − 1 = ½(cosh 2φ − 1), sinh φ cosh φ = ½ sinh 2φ.
    one, other = jnp.exp(2 * phi), jnp.exp(-2 * phi)
    square, product, volume = 0.25 * (one + other) - 0.5, 0.25 * (one - other), jax.nn.softplus(2 * phi) - phi
    return energy + 0.5 * square * jnp.sum(e * e, -2) - product * e[..., 0, :] * e[..., 1, :] - volume


# The least information of records on an effect, relative to its prior's.
LEAST_INFORMATION = 1e-6
# The kernel proposes from the prior with this probability, else from a standard normal.
FROM_PRIOR = 0.1


class Conditional(NamedTuple):
    """Mean, its slope in θ, and variance of each effect given θ."""

    mean: Float[Array, "G r"]
    slope: Float[Array, "G r d"]
    variance: Float[Array, "G r"]


def informed(known: Conditional, rho: Float[Array, " r"], steep: Float[Array, " r"], first: int):
    """h, m and ``∂m/∂θ`` of every effect, whose log spreads ρ have the slopes ``steep`` in θ's entries from ``first`` on."""
    r, dim = rho.shape[0], known.slope.shape[-1]
    information = jnp.maximum(1 / known.variance - jnp.exp(-2 * rho), LEAST_INFORMATION * jnp.exp(-2 * rho))
    share = jax.nn.sigmoid(2 * rho + jnp.log(information))
    center = known.mean / share
    # ∂(σ(u) m)/∂θ is the slope of the mean; σ(u) itself has slope 2 σ(u)σ(−u) in its own log τ.
    own = jnp.zeros((r, dim)).at[jnp.arange(r), first + jnp.arange(r)].set(steep)
    return information, center, known.slope / share[..., None] - (2 * (1 - share) * center)[..., None] * own


S = TypeVar("S")

# Most records of a block.
MOST_IN_BLOCK = 32


def of_records(z: Num[Array, "G r ..."], effects: Float[Array, "n r"], index: Int[Array, " n"]) -> Num[Array, "n ..."]:
    """``w_i·z_g(i)``."""
    own = z if z.shape[0] == 1 else z[index]
    return jnp.sum(effects.reshape(*effects.shape, *(1,) * (z.ndim - 2)) * own, 1)


def by_group(values: Num[Array, "n ..."], index: Int[Array, " n"], groups: int) -> Num[Array, "G ..."]:
    """Sums over the records of each group, which are together."""
    if groups == 1:
        return jnp.sum(values, 0, keepdims=True)
    return jax.ops.segment_sum(values, index, groups, indices_are_sorted=True)


def block_size(records: int) -> int:
    """Records of a block: whole vectors, and few, so that small sites that are padded skip most of their padding."""
    return next((size for size in range(MOST_IN_BLOCK, 7, -8) if records % size == 0), records)


def in_blocks(
    block: Callable[[Callable[[Array], Array], S], S], size: int, records: Num[Array, ""], start: S
) -> S:  # fmt: skip
    """``sums = block(cut, sums)`` for one block of records after the other; blocks of padding alone are left out.

    Parameters
    ----------
    block : callable
        ``cut`` takes the block's records of an array.
    size : int
        The length of these arrays.
    records : array of shape ()
        How many of them are not padding, which is at the end.
    start : pytree of arrays
        The sums before the first block.
    """
    step = block_size(size)

    def one(k, sums):
        return block(lambda x: jax.lax.dynamic_slice_in_dim(x, k * step, step), sums)

    return jax.lax.fori_loop(0, jnp.ceil(records / step).astype(int), one, start)


class InformedRemainder(PrivateRemainder):
    """``R(a, ζ)`` of grouped records under the informed map.

    Attributes
    ----------
    rows : (N + r + G r + 3 + d, d)
        Linear forms of a, in one matrix, so that they are one product: of the predictors without the effects,
        ``T⁻¹(log τ)``, m, ``log σ``, ``φ``, and of the control variate ``½aᵀPa + l·a`` the form l and the rows of P.
    offset, spread, center, log_scale, turn : (N,), (r,), (G, r), (), ()
        Their values at ``a = 0``.
    bend : (6, r)
        The numbers of T.
    information : (G, r)
        h.
    counts, stats, most : (G,), (3, G), (G, r)
        Of the bounds: sums of weights, `EffectsFamily.largest`, and the largest ``|e_i|`` of a group.
    """

    rows: Float[Array, "K d"]
    offset: Float[Array, " N"]
    spread: Float[Array, " r"]
    bend: Float[Array, "6 r"]
    center: Float[Array, "G r"]
    log_scale: Float[Array, ""]
    turn: Float[Array, ""]
    information: Float[Array, "G r"]
    effects: Float[Array, "N r"]
    response: Float[Array, " N"]
    weight: Float[Array, " N"]
    index: Int[Array, " N"]
    present: Float[Array, " G"]
    counts: Float[Array, " G"]
    stats: Float[Array, "3 G"]
    most: Float[Array, "G r"]
    family: AnalyticFamily

    @classmethod
    def of(
        cls, model: RandomEffects, at: Float[Array, " d"], rows: Float[Array, "d e"], control, known: Conditional
    ) -> InformedRemainder:
        """The remainder in coordinates ``θ = at + rows a``."""
        p, r, dim = model.design.shape[1], model.effects.shape[1], at.shape[0]
        assert isinstance(model.family, AnalyticFamily)
        scaled = model.family.scaled
        beta, s, rho, phi = model.split(at)
        first = p + scaled
        information, center, slope = informed(known, rho, model.steep(at), first)
        offset, none = model.offset + model.design @ beta, jnp.zeros_like(rows[:1])
        own = (rows[p:first] if scaled else none, rows[-1:] if model.correlated else none)
        m = slope.reshape(-1, dim) @ rows
        control = Quadratic(jnp.zeros((dim, dim)), jnp.zeros(dim)) if control is None else control
        linear = (control.precision @ at + control.linear) @ rows
        forms = jnp.concatenate([
            model.design @ rows[:p], rows[first : first + r], m, *own, linear[None], rows.T @ control.precision @ rows
        ])  # fmt: skip

        def largest(values):
            held = jnp.where(model.weight.reshape(-1, *[1] * (values.ndim - 1)) > 0, values, 0.0)
            return jnp.maximum(jax.ops.segment_max(held, model.index, model.present.shape[0]), 0.0)

        tops = jnp.where(model.weight > 0, offset, -jnp.inf)
        top = jax.ops.segment_max(tops, model.index, model.present.shape[0])
        top = jnp.where(jnp.isfinite(top), top, 0.0)
        stats = jnp.stack([largest(jnp.abs(model.response - offset)), top, largest(jnp.abs(model.response))])
        bend = jnp.asarray(straight(r)) if model.bend is None else model.bend
        return cls(
            forms, offset, at[first : first + r], bend, center, s, phi, information, model.effects, model.response,
            model.weight, model.index, model.present, model.summed(model.weight), stats,
            largest(jnp.abs(model.effects)), model.family,
        )  # fmt: skip

    @property
    def dim(self) -> int:
        return self.rows.shape[1]

    @property
    def latents(self) -> int:
        return self.present.shape[0] * self.effects.shape[1]

    @property
    def _last(self) -> Float[Array, ""]:
        """How many records there are up to the last one with a weight."""
        places = jnp.arange(1.0, self.weight.shape[0] + 1)
        return jnp.max(jnp.where(self.weight > 0, places, 0.0), initial=0.0)

    def _columns(self, zeta):
        return zeta.T.reshape(*self.center.shape, zeta.shape[0])

    def _forms(self, a):
        """The linear forms: of the predictors, ``T⁻¹(log τ)``, m, ``log σ``, ``φ``, l and P."""
        (n,), (groups, r) = self.offset.shape, self.center.shape
        design, spread, slope, rest = jnp.split(self.rows @ a, (n, n + r, n + r + groups * r))
        return design, spread, slope.reshape(groups, r, -1), rest[0], rest[1], rest[2], rest[3:]

    def _linear(self, a):
        """Predictors without the effects, ``log τ``, m, ``log σ`` and ``φ``."""
        design, spread, slope, scale, turn, *_ = self._forms(a)
        rho = bent(self.spread[:, None] + spread, self.bend[..., None])
        at = self.offset[:, None] + design, rho, self.center[..., None] + slope
        return (*at, self.log_scale + scale, self.turn + turn)

    def _mapped(self, rho, m, zeta):
        """Effects, ``e = z/τ`` and σ(u): ``e = √σ(−u) (√(hσ(u)) m + ζ)``, since ``σ(u)e^{−u} = σ(−u)``."""
        h = self.information[..., None]
        u = 2 * rho + jnp.log(h)
        up, down = 1 / (1 + jnp.exp(-u)), 1 / (1 + jnp.exp(u))
        return up * m + jnp.sqrt(up / h) * zeta, jnp.sqrt(down) * (jnp.sqrt(h * up) * m + zeta), up

    def _effects(self, rho, m, phi, zeta):
        """Effects, and the energy of their prior less the map's log determinant, summed over groups."""
        z, e, up = self._mapped(rho, m, zeta)
        energy = 0.5 * jnp.sum(e * e, 1) + jnp.sum(rho - 0.5 * jnp.log(up), 1)
        if e.shape[1] == 2:
            c, s = jnp.cosh(phi), jnp.sinh(phi)
            energy = energy + 0.5 * s * s * jnp.sum(e * e, 1) - s * c * e[:, 0] * e[:, 1] - jnp.log(c)
        return z, jnp.sum(self.present[:, None] * energy, 0)

    def forms(self, a, v) -> Forms:
        """The linear forms of columns ``a``, ``v`` of shape (d, C)."""
        both, chains = jnp.concatenate([a, v], 1), a.shape[1]
        whole, *others, linear, own = self._forms(both)
        bend = jnp.sum(both * own, 0)
        control = jnp.stack([
            jnp.sum(a * own[:, chains:], 0), 0.5 * (bend[chains:] - bend[:chains]), linear[:chains], linear[chains:],
        ])  # fmt: skip
        return Forms._make([whole, *((form[..., :chains], form[..., chains:]) for form in others), control])

    def _along(self, forms: Forms, c, s, zeta):
        """``v·∇_a R`` at the angles of the rotation with these cosines and sines, of shape (P, C)."""
        points, cosine, sine = c.shape[0], c.reshape(-1), s.reshape(-1)

        def of(form):
            one, other = (jnp.tile(part, points) for part in form)
            return one * cosine + other * sine, other * cosine - one * sine

        (spread, moving), (m, dm) = of(forms.spread), of(forms.slope)
        (scale, dscale), (phi, dphi) = of(forms.scale), of(forms.turn)
        spread, bend = self.spread[:, None] + spread, self.bend[..., None]
        at = bent(spread, bend), self.center[..., None] + m, self.turn + phi
        drho, zeta = steepness(spread, bend) * moving, jnp.tile(zeta, points)
        (z, _), (dz, energy) = jax.jvp(lambda rho, m, phi: self._effects(rho, m, phi, zeta), at, (drho, dm, dphi))
        z, dz = (x.reshape(*x.shape[:2], *c.shape) for x in computed_first((z, dz), self.index))
        slopes = self._of_blocks(forms.design, (c, s), (z, dz), (self.log_scale + scale).reshape(c.shape))
        total = slopes[0] + energy.reshape(c.shape)
        if self.family.scaled:
            total = total + slopes[1] * dscale.reshape(c.shape)
        cross, half, la, lv = forms.control
        return total - ((c * c - s * s) * cross + 2 * c * s * half + lv * c - la * s)

    def _of_blocks(self, design, turn, effects, log_scale):
        """``Σ_i ∂ℓ/∂η_i η_i'``, and ``Σ_i ∂ℓ_i/∂log σ`` where the family has a scale."""

        def block(cut, sums):
            index, weights = cut(self.index), cut(self.effects)
            offset, weight, y = (cut(x)[:, None, None] for x in (self.offset, self.weight, self.response))

            def parts(p, q, c, s, z, dz, log_scale):
                eta = offset + p * c + q * s + of_records(z, weights, index)
                first = self.family.slope(eta, y, log_scale) * (q * c - p * s + of_records(dz, weights, index))
                second = (self.family.scale_slope(eta, y, log_scale),) if self.family.scaled else ()
                return tuple(weight * part for part in (first, *second))

            form = jnp.split(cut(design)[:, None], 2, -1)
            made = apart(parts, *form, *turn, *effects, log_scale, number=self.index)
            return tuple(total + jnp.sum(part, 0) for total, part in zip(sums, made, strict=True))

        start = (jnp.zeros_like(log_scale),) * (1 + self.family.scaled)
        return in_blocks(block, self.weight.shape[0], self._last, start)

    def rates(self, a, v, zeta):
        """``v·∇_a R`` of columns ``a``, ``v`` of shape (d, C) and ``zeta`` (G, r, C), complex ones too."""
        zero = jnp.zeros((1, a.shape[1]))
        return self._along(self.forms(a, v), zero + 1, zero, zeta)[0]

    def gradients(self, a, zeta):  # type: ignore[override]
        columns, a = self._columns(zeta), a.T
        fixed, rho, m, s, phi = self._linear(a)
        steep = steepness(self.spread[:, None] + self._forms(a)[1], self.bend[..., None])
        (z, _), back = jax.vjp(lambda rho, m, phi: self._effects(rho, m, phi, columns), rho, m, phi)
        eta, y = fixed + of_records(z, self.effects, self.index), self.response[:, None]
        slope = self.weight[:, None] * self.family.slope(eta, y, s)
        by_effect = by_group(slope[:, None] * self.effects[..., None], self.index, self.present.shape[0])
        drho, dm, dphi = back((by_effect, jnp.ones(a.shape[1])))
        scale = self.weight[:, None] * self.family.scale_slope(eta, y, s) if self.family.scaled else jnp.zeros_like(eta)
        every = jnp.concatenate([
            slope, steep * drho, dm.reshape(-1, dm.shape[-1]), jnp.sum(scale, 0)[None], dphi[None],
            -jnp.ones_like(a[:1]), -a,
        ])  # fmt: skip
        return (self.rows.T @ every).T

    def cell(self, a, v, zeta, room):
        """The rate by interpolation, on a cell as long as the error allows."""
        forms, columns = self.forms(a.T, v.T), self._columns(zeta)
        length, error = longest_cell(self, self.reach(forms), jnp.abs(columns), room)
        angle = 0.5 * length * (1 + jnp.asarray(chebyshev_nodes(POINTS))[:, None])

        # The compiler would repeat a cosine that is not computed first for every record.
        turn = computed_first((jnp.cos(angle), jnp.sin(angle)), self.index)
        return RateCurve(self._along(forms, *turn, columns), error, length)

    def reach(self, forms: Forms) -> Reach:
        """Amplitudes along the rotation."""

        def amplitude(form):
            return jnp.sqrt(form[0] ** 2 + form[1] ** 2)

        p, q = jnp.split(forms.design, 2, 1)
        design = jnp.sqrt(jnp.max((self.weight[:, None] > 0) * (p**2 + q**2), 0))
        cross, half, la, lv = jnp.abs(forms.control)
        return Reach(
            design, amplitude(forms.spread), forms.spread[0], amplitude(forms.slope), amplitude(forms.scale),
            amplitude(forms.turn), jnp.stack([cross + half, la + lv]),
        )  # fmt: skip

    @property
    def chances(self) -> int:
        return self.present.shape[0] * (2 + self.effects.shape[1])

    def kernel(self, a, zeta, u):
        """Independence Metropolis, group by group.

        A group's proposal is a mixture of the standard normal in ζ and the effects' prior without correlation; for a bounded
        likelihood the second keeps the weight of independent effects bounded, so that no group is stuck for long. In ζ the
        prior, ``z = τ ε``, is ``ζ = √(h/σ(u)) (τ ε − σ(u) m) = ε/√σ(−u) − √(hσ(u)) m``.
        """
        groups, r = self.center.shape
        chosen, decided, drawn = u[:groups], u[groups : 2 * groups], u[2 * groups :]
        fixed, rho, m, s, phi = self._linear(a.T)
        old, standard = self._columns(zeta), normals(drawn).reshape(groups, r, -1)
        h = self.information[..., None]
        wide = jnp.sqrt(1 + h * jnp.exp(2 * rho))
        shift = h * jnp.exp(rho) * m / wide
        new = jnp.where((chosen < FROM_PRIOR)[:, None], wide * standard - shift, standard)
        # One program for both.
        z, own = jax.vmap(lambda zeta: self._proposed(rho, m, phi, zeta, shift, wide))(jnp.stack([new, old]))

        def block(cut, loss):
            index, weights = cut(self.index), cut(self.effects)
            eta, before = (cut(fixed) + of_records(one, weights, index) for one in z)
            change = self.family.change(eta, before, cut(self.response)[:, None], s)
            return loss + by_group(cut(self.weight)[:, None] * change, index, groups)

        loss = in_blocks(block, self.weight.shape[0], self._last, jnp.zeros_like(chosen))
        accepted = logarithm(1 - decided) < own[1] - own[0] - loss
        return jnp.where(accepted[:, None], new, old).reshape(groups * r, -1).T

    def _proposed(self, rho, m, phi, zeta, shift, wide):
        """Effects, and the energy of their prior plus the log density of their proposal, by group."""
        z, e, _ = self._mapped(rho, m, zeta)
        energy = 0.5 * jnp.sum(e * e, 1)
        if e.shape[1] == 2:
            c, s = jnp.cosh(phi), jnp.sinh(phi)
            energy = energy + 0.5 * s * s * jnp.sum(e * e, 1) - s * c * e[:, 0] * e[:, 1]
        near = math.log(1 - FROM_PRIOR) - 0.5 * jnp.sum(zeta**2, 1)
        far = math.log(FROM_PRIOR) - jnp.sum(0.5 * ((zeta + shift) / wide) ** 2 + logarithm(wide), 1)
        return z, energy + near + softplus(far - near)

    def to_z(self, a, zeta):
        _, rho, m, _, _ = self._linear(a.T)
        z = self._mapped(rho, m, self._columns(zeta))[0]
        return z.reshape(-1, z.shape[-1]).T


# Strips of complex times -----------------------------------------------------------------------------------------------


# Bounds of the rates of grouped effects in strips of complex times, and how long a cell they allow.
#
# Let ``f(t) = R(a(t), ζ)`` with ζ at rest on a rotation, ``a(t) = a cos t + v sin t``. For
# ``t = x + iy`` any linear form is ``l·a(t) = A cos(t − t₀)`` with ``A² = (l·a)² + (l·v)²``, so that for ``|y| ≤ b``
#
#     |l·a(t)|, |l·a'(t)| ≤ A cosh b,        |Im l·a(t)| ≤ A sinh b.
#
# Predictors, ``log τ`` and m are linear forms. On ``|Im u| ≤ y < π``: ``|σ(u)| ≤ min(1, e^{Re u})``, over ``sin y`` where
# ``y > π/2``, and ``σ' = σ(u)σ(−u)``. This bounds ``|z|, |z'|, |Im z|``, with them ``|Im η|`` (which must stay in the
# family's strip) and ``|f'(t)| ≤ B`` in the strip ``|Im t| ≤ b``, all by sums over groups. On a cell of half-length L the
# interpolant p of ``f'`` at n Chebyshev points then has (Trefethen, *Approximation Theory and Practice*, theorem 8.2)
#
#     |f' − p| ≤ 4 B ϱ^{1−n}/(ϱ − 1),        b = L (ϱ − 1/ϱ)/2.
#
# B enters by its n-th root only: crude sums over groups cost little.
#
# **Bent spreads.** Where ``log τ = T(l)`` of a linear form l, bounds follow by `fedpdmc.whitening.enclosed`. The cell
# begins at ``t = 0``, and for ϱ ≥ 2 the ellipse about it has ``Re t ≤ b(ϱ + 1)/(ϱ − 1) ≤ 3b``, so that ``|t| ≤ √10 b`` and
# ``|l(t) − l(0)| ≤ A cosh b √10 b``; besides ``Re l(t)`` lies within ``A cosh b`` of its value at the reference.


class Forms(NamedTuple):
    """Linear forms along a rotation, each as its values at position and velocity: ``p cos t + q sin t``.

    Chains are the last axis. Of the design, of which parts are cut, both values are in one array. ``control`` has ``aᵀPv``,
    ``½(vᵀPv − aᵀPa)``, ``l·a`` and ``l·v`` of the control variate, whose rate is ``cos 2t`` times the first, plus ``sin 2t``
    times the second, plus ``l·v(t)``.
    """

    design: Float[Array, "N 2C"]
    spread: tuple[Float[Array, "r C"], Float[Array, "r C"]]
    slope: tuple[Float[Array, "G r C"], Float[Array, "G r C"]]
    scale: tuple[Float[Array, " C"], Float[Array, " C"]]
    turn: tuple[Float[Array, " C"], Float[Array, " C"]]
    control: Float[Array, "4 C"]


class Reach(NamedTuple):
    """Amplitudes of the forms along a rotation, of the design the largest; and sums of those of the control.

    ``now`` is the value of the form of the spread at the beginning.
    """

    design: Float[Array, " C"]
    spread: Float[Array, "r C"]
    now: Float[Array, "r C"]
    slope: Float[Array, "G r C"]
    scale: Float[Array, " C"]
    turn: Float[Array, " C"]
    control: Float[Array, "2 C"]


# Points of a cell, the error of its polynomial, strips that are tried as shares of the widest, and the widest.
POINTS, ERROR, SHARES, WIDEST = 8, 0.05, (0.9, 1.1, 0.7, 0.3, 0.01), 2.5
# Groups up to which all of these strips are tried at once.
FEW_GROUPS = 4
# Relative room for rounding in B, and in hyperbolic functions.
ROUNDING, SLACK = 1e-11, 1e-15
# The least ϱ; the farthest that its ellipse reaches from the cell's beginning, in units of b; and that of a first guess.
LEAST_ELLIPSE, FARTHEST, GUESSED = 2.0, math.sqrt(10.0), 0.3


def longest_cell(part: InformedRemainder, reach: Reach, size, room):
    """The longest cell, and the certified error of its polynomial."""
    steep = steepness(part.spread[:, None] + reach.now, part.bend[..., None])
    tilt = 2 * jnp.maximum(jnp.max(steep * reach.spread, 0), reach.turn * (2 * STRIP / math.pi))
    # Where the strip would end if what grows with it grew like ``sinh b`` from one on, and the spread bent by little.
    _, leaning, _ = _strip(part, reach, size, jnp.ones_like(tilt), jnp.full_like(tilt, GUESSED))
    least = jnp.sinh(1.0) * part.family.strip / jnp.maximum(leaning, 1e-12)
    height = jnp.minimum(least, STRIP / jnp.maximum(tilt, 1e-12))
    widest = jnp.minimum(WIDEST, logarithm(height + jnp.sqrt(1 + height * height)))

    def attempt(state):
        turn, length, error = state
        b = jnp.minimum(shares[turn][:, None] * widest, WIDEST)
        most, fits = jax.vmap(lambda b: largest_slope(part, reach, size, b))(b)
        needed = jnp.maximum(1 + _root(4 * most / ERROR), LEAST_ELLIPSE)
        found = jnp.where(fits, 4 * b / (needed - 1 / needed), 0.0)
        longest = jnp.argmax(found, 0)[None]
        new, most = (jnp.take_along_axis(x, longest, 0)[0] for x in (found, most))
        better = (new > length) & (length < room)
        return turn + 1, jnp.where(better, new, length), jnp.where(better, ERROR + ROUNDING * most, error)

    # Of few groups all shares at once: a loop over them would be many small kernels. Else until the room is filled; what a
    # chain gets does not depend on the others.
    shares = jnp.asarray(SHARES).reshape(1 if size.shape[0] <= FEW_GROUPS else len(SHARES), -1)
    start = (0, jnp.zeros_like(room), jnp.full_like(room, ERROR))
    if len(shares) == 1:
        _, length, error = attempt(start)
    else:
        _, length, error = jax.lax.while_loop(
            lambda s: (s[0] < len(shares)) & jnp.any(s[1] < room), attempt, start
        )  # fmt: skip
    return jnp.minimum(length, room), error


def largest_slope(part: InformedRemainder, reach: Reach, size, b):
    """A bound of ``|f'|`` in the strip ``|Im t| ≤ b``, and whether the strip is free of poles; by chain."""
    grow, tilt = _hyperbolic(b)
    (fast, up, down, m, ms), leaning, aside = _strip(part, reach, size, b, FARTHEST * b)
    h = part.information[..., None]
    root = jnp.sqrt(up / h)
    z = up * m + root * size
    dz = up * down * fast * m + up * ms + 0.5 * root * down * fast * size
    e = jnp.sqrt(down) * (jnp.sqrt(h * up) * m + size)
    de = 0.5 * up * fast * e + jnp.sqrt(down * h * up) * (0.5 * down * fast * m + ms)
    prior = jnp.sum(e * de + 0.5 * fast * up, 1)
    if e.shape[1] == 2:
        prior = prior + _correlation(part, e, de, reach.turn * grow)
    most, wide = part.most[..., None], reach.design * grow
    eta, speed = wide + jnp.sum(most * z, 1), wide + jnp.sum(most * dz, 1)
    steep = reach.scale * grow
    first, second = part.family.largest(part.stats, eta, part.log_scale - steep)
    total = part.counts[:, None] * (first * speed + second * steep) + part.present[:, None] * prior
    # |cos 2t|, |sin 2t| ≤ cosh 2b.
    quadratic = reach.control[0] * (grow**2 + tilt**2) + reach.control[1] * grow
    fits = (leaning <= part.family.strip) & (aside <= STRIP)
    fits &= reach.turn * tilt <= math.pi / 4
    bound = jnp.sum(total, 0) + quadratic
    return bound, fits & jnp.isfinite(bound)


def _strip(part: InformedRemainder, reach: Reach, size, b, far):
    """Bounds of ``|u'|, |σ(u)|, |σ(−u)|, |m|, |m'|`` for ``|Im t| ≤ b``, ``|t| ≤ far``; of ``|Im η|``; of ``|Im u|``."""
    grow, tilt = _hyperbolic(b)
    h = part.information[..., None]
    middle, way, wide = part.spread[:, None], reach.spread * grow * far, reach.spread * grow
    now = middle + reach.now
    ends = jnp.maximum(now - way, middle - wide), jnp.minimum(now + way, middle + wide)
    steep, least, most = enclosed(*ends, reach.spread * tilt, part.bend[..., None])
    fast, leaning = 2 * steep * reach.spread * grow, 2 * steep * reach.spread * tilt
    # Beyond STRIP the strip is not used.
    lean = jnp.minimum(leaning, STRIP)
    sine, cosine = jnp.sin(lean), jnp.cos(lean)
    pole = jnp.where(cosine > 0, 1.0, 1 / sine)
    # ``|1 + e^{−u}|`` and its argument, which grows with ``e^{−Re u}``; the sines of the argument and of half of it.
    inverse = jnp.exp(jnp.minimum(-2 * least - jnp.log(h), 50.0))
    x, y = 1 + inverse * cosine, inverse * sine
    modulus = jnp.sqrt(x * x + y * y)
    turned = jnp.where(x > 0, y / modulus, 1.0)
    half = jnp.where(x > 0, y / jnp.sqrt(2 * modulus * (modulus + x)), jnp.sqrt(0.5 - 0.5 * x / modulus))
    up = pole * jnp.exp(jnp.minimum(2 * most + jnp.log(h), 0.0))
    down = pole * jnp.minimum(inverse, 1.0)
    m = jnp.abs(part.center)[..., None] + reach.slope * grow
    # |Im σ(x + iy)| = e^{−x} sin y/(1 + 2 e^{−x} cos y + e^{−2x}) is largest at x = 0: half the tangent of y/2.
    aside = jnp.minimum(0.5 * sine / (1 + cosine), up * turned)
    off = aside * m + up * reach.slope * tilt + jnp.sqrt(up / h) * half * size
    eta = reach.design * tilt + jnp.sum(part.most[..., None] * off, 1)
    return (fast, up, down, m, reach.slope * grow), jnp.max(eta, 0), jnp.max(leaning, 0)


def _correlation(part: InformedRemainder, e, de, turning):
    """``|d/dt|`` of ``½ sinh²φ |e|² − sinh φ cosh φ e₁e₂ − log cosh φ``, with ``|tanh φ| ≤ 1`` for ``|Im φ| ≤ π/4``."""
    top = jnp.cosh(jnp.abs(part.turn) + turning) ** 2
    one, other, d1, d2 = e[:, 0], e[:, 1], de[:, 0], de[:, 1]
    square = one**2 + other**2
    own = top * (turning * square + one * d1 + other * d2)
    return own + top * (2 * turning * one * other + d1 * other + one * d2) + turning


def _hyperbolic(b):
    """``cosh b`` and ``sinh b``, from above, by one exponential."""
    up = jnp.exp(b)
    return (0.5 + SLACK) * (up + 1 / up), 0.5 * (up - 1 / up) + SLACK * up


def _root(x):
    """The root of order `POINTS`, a power of two."""
    for _ in range(POINTS.bit_length() - 1):
        x = jnp.sqrt(x)
    return x
