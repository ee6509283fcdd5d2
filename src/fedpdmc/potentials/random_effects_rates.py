"""The private map of grouped effects, and the rates of arrivals along a path with certified bounds.

Given θ, an effect whose records carry a Gaussian pseudo-likelihood of precision h and centre m(θ), and whose spread is τ, is
Gaussian with mean ``σ(u) m`` and variance ``σ(u)/h``, where ``u = 2 log τ + log h`` and ``σ`` is the logistic function. The
map ``z = σ(u) m(θ) + √(σ(u)/h) ζ`` makes it standard normal in ζ: centred for ``h → ∞``, non-centred for ``h → 0``. h, m and
``∂m/∂θ`` are chosen so that mean, variance and the slope of the mean are those of the true conditional at the reference.

**Bounds.** Let ``f(t) = R(a(t), ζ)`` with ζ at rest on a rotation, ``a(t) = a cos t + v sin t``. For
``t = x + iy`` any linear form is ``l·a(t) = A cos(t − t₀)`` with ``A² = (l·a)² + (l·v)²``, so that for ``|y| ≤ b``

    |l·a(t)|, |l·a'(t)| ≤ A cosh b,        |Im l·a(t)| ≤ A sinh b.

Predictors, ``log τ`` and m are linear forms. On ``|Im u| ≤ y < π``: ``|σ(u)| ≤ min(1, e^{Re u})``, over ``sin y`` where
``y > π/2``, and ``σ' = σ(u)σ(−u)``. This bounds ``|z|, |z'|, |Im z|``, with them ``|Im η|`` (which must stay in the family's
strip) and ``|f'(t)| ≤ B`` in the strip ``|Im t| ≤ b``, all by sums over groups. On a cell of half-length L the interpolant p
of ``f'`` at n Chebyshev points then has (Trefethen, *Approximation Theory and Practice*, theorem 8.2)

    |f' − p| ≤ 4 B ϱ^{1−n}/(ϱ − 1),        b = L (ϱ − 1/ϱ)/2.

B enters by its n-th root only: crude sums over groups cost little.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fedpdmc._jax.random_streams import logarithm, normals
from fedpdmc.potentials.chebyshev import chebyshev_nodes
from fedpdmc.potentials.grouped_families import STRIP, AnalyticFamily
from fedpdmc.potentials.informed_effects import FROM_PRIOR, Conditional, informed
from fedpdmc.potentials.latent import PrivateRemainder, RateCell
from fedpdmc.potentials.quadratic import Quadratic

if TYPE_CHECKING:
    from fedpdmc.potentials.random_effects import RandomEffects

# Points of a cell, the error of its polynomial, strips that are tried as shares of the widest, and the widest.
POINTS, ERROR, SHARES, WIDEST = 8, 0.05, (1.1, 0.9, 0.7, 0.3, 0.01), 2.5
# Relative room for rounding in B.
ROUNDING = 1e-11


class Forms(NamedTuple):
    """Linear forms along a rotation, each as its values at position and velocity: ``p cos t + q sin t``.

    Chains are the last axis. ``control`` has ``aᵀPv``, ``½(vᵀPv − aᵀPa)``, ``l·a`` and ``l·v`` of the control variate, whose
    rate is ``cos 2t`` times the first, plus ``sin 2t`` times the second, plus ``l·v(t)``.
    """

    design: tuple[Float[Array, "N C"], Float[Array, "N C"]]
    spread: tuple[Float[Array, "r C"], Float[Array, "r C"]]
    slope: tuple[Float[Array, "G r C"], Float[Array, "G r C"]]
    scale: tuple[Float[Array, " C"], Float[Array, " C"]]
    turn: tuple[Float[Array, " C"], Float[Array, " C"]]
    control: Float[Array, "4 C"]


class Reach(NamedTuple):
    """Amplitudes of the forms along a rotation, of the design a group's largest; and sums of those of the control."""

    design: Float[Array, "G C"]
    spread: Float[Array, "r C"]
    slope: Float[Array, "G r C"]
    scale: Float[Array, " C"]
    turn: Float[Array, " C"]
    control: Float[Array, "2 C"]


class InformedRemainder(PrivateRemainder):
    """``R(a, ζ)`` of grouped records under the informed map.

    Attributes
    ----------
    design, offset : (N, d), (N,)
        The predictor without the effects is ``offset + design a``.
    spread, log_spread : (r, d), (r,)
        ``log τ = log_spread + spread a``; likewise ``scale`` and ``turn`` for ``log σ`` and ``φ``, each (d,) with its value.
    slope, center, information : (G, r, d), (G, r), (G, r)
        ``m = center + slope a`` and h.
    counts, stats, most : (G,), (3, G), (G, r)
        Of the bounds: records, `Family.largest`, and the largest ``|w_i|`` of a group.
    """

    design: Float[Array, "N d"]
    offset: Float[Array, " N"]
    effects: Float[Array, "N r"]
    response: Float[Array, " N"]
    weight: Float[Array, " N"]
    index: Int[Array, " N"]
    present: Float[Array, " G"]
    spread: Float[Array, "r d"]
    log_spread: Float[Array, " r"]
    scale: tuple[Float[Array, " d"], Float[Array, ""]]
    turn: tuple[Float[Array, " d"], Float[Array, ""]]
    slope: Float[Array, "G r d"]
    center: Float[Array, "G r"]
    information: Float[Array, "G r"]
    control: Quadratic
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
        information, center, slope = informed(known, rho, first)
        design, offset = model.design @ rows[:p], model.offset + model.design @ beta
        control = Quadratic(jnp.zeros((dim, dim)), jnp.zeros(dim)) if control is None else control
        precision = rows.T @ control.precision @ rows
        whole = Quadratic(precision, rows.T @ (control.precision @ at + control.linear))

        def largest(values):
            held = jnp.where(model.weight.reshape(-1, *[1] * (values.ndim - 1)) > 0, values, 0.0)
            return jnp.maximum(jax.ops.segment_max(held, model.index, model.present.shape[0]), 0.0)

        tops = jnp.where(model.weight > 0, offset, -jnp.inf)
        top = jax.ops.segment_max(tops, model.index, model.present.shape[0])
        top = jnp.where(jnp.isfinite(top), top, 0.0)
        stats = jnp.stack([largest(jnp.abs(model.response - offset)), top, largest(jnp.abs(model.response))])
        none = jnp.zeros(rows.shape[1])
        return cls(
            design, offset, model.effects, model.response, model.weight, model.index, model.present,
            rows[first : first + r], rho, (rows[p] if scaled else none, s), (rows[-1] if model.correlated else none, phi),
            jnp.einsum("grd,de->gre", slope, rows), center, information, whole,
            model.summed(model.weight), stats, largest(jnp.abs(model.effects)), model.family,
        )  # fmt: skip

    @property
    def dim(self) -> int:
        """Number of whitened coordinates."""
        return self.design.shape[1]

    @property
    def latents(self) -> int:
        """Private numbers, padding included."""
        return self.present.shape[0] * self.effects.shape[1]

    def _columns(self, zeta):
        return zeta.T.reshape(*self.center.shape, zeta.shape[0])

    def _linear(self, a):
        """Log spreads, m and φ."""
        m = self.center[..., None] + jnp.einsum("grd,dc->grc", self.slope, a)
        return self.log_spread[:, None] + self.spread @ a, m, self.turn[1] + self.turn[0] @ a

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

    def _of_records(self, z):
        """``w_i·z_g(i)``."""
        return jnp.sum(self.effects[..., None] * z[self.index], 1)

    def _predictor(self, a, z):
        return self.offset[:, None] + self.design @ a + self._of_records(z)

    def _log_scale(self, a):
        return self.scale[1] + self.scale[0] @ a

    def forms(self, a, v) -> Forms:
        """The linear forms of columns ``a``, ``v`` of shape (d, C)."""
        precision, linear = self.control.precision, self.control.linear
        own = precision @ v
        control = jnp.stack([
            jnp.sum(a * own, 0), 0.5 * (jnp.sum(v * own, 0) - jnp.sum(a * (precision @ a), 0)), linear @ a, linear @ v,
        ])  # fmt: skip
        slope = tuple(jnp.einsum("grd,dc->grc", self.slope, x) for x in (a, v))
        forms = (self.design, self.spread, self.scale[0], self.turn[0])
        design, spread, scale, turn = ((form @ a, form @ v) for form in forms)
        return Forms(design, spread, (slope[0], slope[1]), scale, turn, control)

    def _along(self, forms: Forms, t, zeta):
        """``v·∇_a R`` at the angle ``t`` (C,) of the rotation."""
        c, s = jnp.cos(t), jnp.sin(t)

        def of(form):
            return form[0] * c + form[1] * s, form[1] * c - form[0] * s

        (eta, speed), (rho, drho), (m, dm) = of(forms.design), of(forms.spread), of(forms.slope)
        (scale, dscale), (phi, dphi) = of(forms.scale), of(forms.turn)
        at = self.log_spread[:, None] + rho, self.center[..., None] + m, self.turn[1] + phi
        (z, _), (dz, energy) = jax.jvp(lambda rho, m, phi: self._effects(rho, m, phi, zeta), at, (drho, dm, dphi))
        log_scale, y = self.scale[1] + scale, self.response[:, None]
        eta = self.offset[:, None] + eta + self._of_records(z)
        total = self.weight @ (self.family.slope(eta, y, log_scale) * (speed + self._of_records(dz)))
        if self.family.scaled:
            total = total + (self.weight @ self.family.scale_slope(eta, y, log_scale)) * dscale
        cross, half, la, lv = forms.control
        return total + energy - ((c * c - s * s) * cross + 2 * c * s * half + lv * c - la * s)

    def rates(self, a, v, zeta):
        """``v·∇_a R`` of columns ``a``, ``v`` of shape (d, C) and ``zeta`` (G, r, C), complex ones too."""
        return self._along(self.forms(a, v), jnp.zeros(a.shape[1]), zeta)

    def gradients(self, a, zeta):  # type: ignore[override]
        """``∇_a R``, backward."""
        columns, a = self._columns(zeta), a.T
        (z, _), back = jax.vjp(lambda x: self._effects(*self._linear(x), columns), a)
        s, y = self._log_scale(a), self.response[:, None]
        eta = self._predictor(a, z)
        slope = self.weight[:, None] * self.family.slope(eta, y, s)
        groups = self.present.shape[0]
        own = slope[:, None] * self.effects[..., None]
        dz = jax.ops.segment_sum(own, self.index, groups, indices_are_sorted=True)
        (through,) = back((dz, jnp.ones(a.shape[1])))
        total = self.design.T @ slope + through - self.control.precision @ a - self.control.linear[:, None]
        if self.family.scaled:
            total = total + self.scale[0][:, None] * (self.weight @ self.family.scale_slope(eta, y, s))
        return total.T

    def cell(self, a, v, zeta, room):
        """The rate by interpolation, on a cell as long as the error allows."""
        forms, columns = self.forms(a.T, v.T), self._columns(zeta)
        length, error = self._longest(self.reach(forms), jnp.abs(columns), room)
        half = 0.5 * length

        def at(point):
            return self._along(forms, half * (1 + point), columns)

        return RateCell(length, jax.lax.map(at, jnp.asarray(chebyshev_nodes(POINTS))), error)

    def reach(self, forms: Forms) -> Reach:
        """Amplitudes along the rotation."""

        def amplitude(form):
            return jnp.sqrt(form[0] ** 2 + form[1] ** 2)

        held = jnp.where(self.weight[:, None] > 0, amplitude(forms.design), 0.0)
        groups = self.present.shape[0]
        design = jnp.maximum(jax.ops.segment_max(held, self.index, groups, indices_are_sorted=True), 0.0)
        cross, half, la, lv = jnp.abs(forms.control)
        return Reach(
            design, amplitude(forms.spread), amplitude(forms.slope), amplitude(forms.scale), amplitude(forms.turn),
            jnp.stack([cross + half, la + lv]),
        )  # fmt: skip

    def _longest(self, reach: Reach, size, room):
        """The longest cell, and the certified error of its polynomial."""
        tilt = 2 * jnp.maximum(jnp.max(reach.spread, 0), reach.turn * (2 * STRIP / math.pi))
        # Where the strip would end if what grows with it grew like ``sinh b`` from one on.
        _, leaning = self._strip(reach, size, jnp.ones_like(tilt))
        least = jnp.sinh(1.0) * self.family.strip / jnp.maximum(leaning, 1e-12)
        widest = jnp.minimum(WIDEST, jnp.arcsinh(jnp.minimum(least, STRIP / jnp.maximum(tilt, 1e-12))))

        def attempt(share):
            b = jnp.minimum(share * widest, WIDEST)
            most, fits = self.largest(reach, size, b)
            needed = 1 + (4 * most / ERROR) ** (1 / POINTS)
            return jnp.where(fits, 4 * b / (needed - 1 / needed), 0.0), most

        lengths, largest = jax.lax.map(attempt, jnp.asarray(SHARES))
        best = jnp.argmax(lengths, 0)
        length, most = (jnp.take_along_axis(x, best[None], 0)[0] for x in (lengths, largest))
        return jnp.minimum(length, room), ERROR + ROUNDING * most

    def largest(self, reach: Reach, size, b):
        """A bound of ``|f'|`` in the strip ``|Im t| ≤ b``, and whether the strip is free of poles; by chain."""
        grow, tilt = jnp.cosh(b), jnp.sinh(b)
        (fast, up, down, m, ms), leaning = self._strip(reach, size, b)
        h = self.information[..., None]
        root = jnp.sqrt(up / h)
        z = up * m + root * size
        dz = up * down * fast * m + up * ms + 0.5 * root * down * fast * size
        e = jnp.sqrt(down) * (jnp.sqrt(h * up) * m + size)
        de = 0.5 * up * fast * e + jnp.sqrt(down * h * up) * (0.5 * down * fast * m + ms)
        prior = jnp.sum(e * de + 0.5 * fast * up, 1)
        if e.shape[1] == 2:
            prior = prior + self._correlation(e, de, reach.turn * grow)
        most, wide = self.most[..., None], reach.design * grow
        eta, speed = wide + jnp.sum(most * z, 1), wide + jnp.sum(most * dz, 1)
        steep = reach.scale * grow
        first, second = self.family.largest(self.stats, eta, self.scale[1] - steep)
        total = self.counts[:, None] * (first * speed + second * steep) + self.present[:, None] * prior
        # |cos 2t|, |sin 2t| ≤ cosh 2b.
        quadratic = reach.control[0] * (grow**2 + tilt**2) + reach.control[1] * grow
        fits = (leaning <= self.family.strip) & (2 * jnp.max(reach.spread, 0) * tilt <= STRIP)
        fits &= reach.turn * tilt <= math.pi / 4
        bound = jnp.sum(total, 0) + quadratic
        return bound, fits & jnp.isfinite(bound)

    def _strip(self, reach: Reach, size, b):
        """Bounds of ``|u'|, |σ(u)|, |σ(−u)|, |m|, |m'|`` in the strip ``|Im t| ≤ b``, and of ``|Im η|`` over all records."""
        grow, tilt = jnp.cosh(b), jnp.sinh(b)
        h = self.information[..., None]
        fast, leaning = 2 * reach.spread * grow, 2 * reach.spread * tilt
        middle = 2 * self.log_spread[:, None] + jnp.log(h)
        pole = 1 / jnp.sin(jnp.clip(leaning, math.pi / 2, STRIP))
        up = pole * jnp.exp(jnp.minimum(middle + fast, 0.0))
        down = pole * jnp.exp(jnp.minimum(fast - middle, 0.0))
        # The argument of ``1 + e^{−u}`` grows with ``e^{−Re u}``.
        far = jnp.exp(jnp.minimum(fast - middle, 50.0))
        turned = jnp.arctan2(far * jnp.sin(leaning), 1 + far * jnp.cos(leaning))
        m = jnp.abs(self.center)[..., None] + reach.slope * grow
        # |Im σ(x + iy)| = e^{−x} sin y/(1 + 2 e^{−x} cos y + e^{−2x}) is largest at x = 0.
        aside = jnp.minimum(
            0.5 * jnp.tan(jnp.minimum(leaning, STRIP) / 2), up * jnp.sin(jnp.minimum(turned, math.pi / 2))
        )
        off = aside * m + up * reach.slope * tilt
        off = off + jnp.sqrt(up / h) * jnp.sin(jnp.minimum(turned / 2, math.pi / 2)) * size
        eta = reach.design * tilt + jnp.sum(self.most[..., None] * off, 1)
        return (fast, up, down, m, reach.slope * grow), jnp.max(eta, 0)

    def _correlation(self, e, de, turning):
        """``|d/dt|`` of ``½ sinh²φ |e|² − sinh φ cosh φ e₁e₂ − log cosh φ``, with ``|tanh φ| ≤ 1`` for ``|Im φ| ≤ π/4``."""
        top = jnp.cosh(jnp.abs(self.turn[1]) + turning) ** 2
        one, other, d1, d2 = e[:, 0], e[:, 1], de[:, 0], de[:, 1]
        square = one**2 + other**2
        own = top * (turning * square + one * d1 + other * d2)
        return own + top * (2 * turning * one * other + d1 * other + one * d2) + turning

    @property
    def chances(self) -> int:
        """For each group a choice, a decision and its effects."""
        return self.present.shape[0] * (2 + self.effects.shape[1])

    def kernel(self, a, zeta, u):
        """Independence Metropolis, group by group.

        A group's proposal is a mixture of the standard normal in ζ and the effects' prior without correlation; for a bounded
        likelihood the second keeps the weight of independent effects bounded, so that no group is stuck for long.
        """
        groups, r = self.center.shape
        chosen, decided, drawn = u[:groups], u[groups : 2 * groups], u[2 * groups :]
        old, a = self._columns(zeta), a.T
        standard = normals(drawn).reshape(groups, r, -1)
        shift, wide = self._prior_in_zeta(a)
        new = jnp.where((chosen < FROM_PRIOR)[:, None], wide * standard - shift, standard)
        change = self._weights(a, new, shift, wide) - self._weights(a, old, shift, wide)
        accepted = logarithm(1 - decided) < change
        return jnp.where(accepted[:, None], new, old).reshape(groups * r, -1).T

    def _prior_in_zeta(self, a):
        """``z = τ ε`` in ζ: ``ζ = √(h/σ(u)) (τ ε − σ(u) m) = ε/√σ(−u) − √(hσ(u)) m``."""
        rho, m, _ = self._linear(a)
        at_zero = self._mapped(rho, m, 0.0)[1]
        wide = jnp.sqrt(1 + self.information[..., None] * jnp.exp(2 * rho))
        return at_zero * wide, wide

    def _weights(self, a, zeta, shift, wide):
        """Log of target over proposal, by group."""
        rho, m, phi = self._linear(a)
        z, e, _ = self._mapped(rho, m, zeta)
        energy = 0.5 * jnp.sum(e * e, 1)
        if e.shape[1] == 2:
            c, s = jnp.cosh(phi), jnp.sinh(phi)
            energy = energy + 0.5 * s * s * jnp.sum(e * e, 1) - s * c * e[:, 0] * e[:, 1]
        loss = self.weight[:, None] * self.family.value(
            self._predictor(a, z), self.response[:, None], self._log_scale(a)
        )
        energy = energy + jax.ops.segment_sum(loss, self.index, self.present.shape[0], indices_are_sorted=True)
        near = math.log(1 - FROM_PRIOR) - 0.5 * jnp.sum(zeta**2, 1)
        far = math.log(FROM_PRIOR) - jnp.sum(0.5 * ((zeta + shift) / wide) ** 2 + jnp.log(wide), 1)
        return -energy - jnp.logaddexp(near, far)

    def to_z(self, a, zeta):
        """The effects."""
        rho, m, _ = self._linear(a.T)
        z = self._mapped(rho, m, self._columns(zeta))[0]
        return z.reshape(-1, z.shape[-1]).T
