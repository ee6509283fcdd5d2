"""The private map of grouped effects, and the rates of arrivals along a path with certified bounds.

Given θ, an effect whose records carry a Gaussian pseudo-likelihood of precision h and centre m(θ), and whose spread is τ, is
Gaussian with mean ``σ(u) m`` and variance ``σ(u)/h``, where ``u = 2 log τ + log h`` and ``σ`` is the logistic function. The
map ``z = σ(u) m(θ) + √(σ(u)/h) ζ`` makes it standard normal in ζ: centred for ``h → ∞``, non-centred for ``h → 0``. h, m and
``∂m/∂θ`` are chosen so that mean, variance and the slope of the mean are those of the true conditional at the reference.

Rates along a path are bounded through complex times (`fedpdmc.potentials.random_effects_strips`).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fedpdmc._jax.compilation import apart, computed_first
from fedpdmc._jax.random_streams import logarithm, normals
from fedpdmc.bent_coordinates import bent, steepness, straight
from fedpdmc.potentials.chebyshev import chebyshev_nodes
from fedpdmc.potentials.forms_on_rotations import Forms, Reach
from fedpdmc.potentials.grouped_families import AnalyticFamily, softplus
from fedpdmc.potentials.grouped_records import by_group, in_blocks, of_records
from fedpdmc.potentials.informed_effects import FROM_PRIOR, Conditional, informed
from fedpdmc.potentials.latent import PrivateRemainder, RateCell
from fedpdmc.potentials.quadratic import Quadratic
from fedpdmc.potentials.random_effects_strips import POINTS, longest_cell

if TYPE_CHECKING:
    from fedpdmc.potentials.random_effects import RandomEffects


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
        Of the bounds: records, `Family.largest`, and the largest ``|w_i|`` of a group.
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
        """Number of whitened coordinates."""
        return self.rows.shape[1]

    @property
    def latents(self) -> int:
        """Private numbers, padding included."""
        return self.present.shape[0] * self.effects.shape[1]

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
        return in_blocks(block, self.weight.shape[0], jnp.sum(self.counts), start)

    def rates(self, a, v, zeta):
        """``v·∇_a R`` of columns ``a``, ``v`` of shape (d, C) and ``zeta`` (G, r, C), complex ones too."""
        zero = jnp.zeros((1, a.shape[1]))
        return self._along(self.forms(a, v), zero + 1, zero, zeta)[0]

    def gradients(self, a, zeta):  # type: ignore[override]
        """``∇_a R``, backward."""
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
        return RateCell(length, self._along(forms, *turn, columns), error)

    def reach(self, forms: Forms) -> Reach:
        """Amplitudes along the rotation."""

        def amplitude(form):
            return jnp.sqrt(form[0] ** 2 + form[1] ** 2)

        p, q = jnp.split(forms.design, 2, 1)
        design = jnp.sqrt(jnp.max(self.weight[:, None] * (p**2 + q**2), 0))
        cross, half, la, lv = jnp.abs(forms.control)
        return Reach(
            design, amplitude(forms.spread), forms.spread[0], amplitude(forms.slope), amplitude(forms.scale),
            amplitude(forms.turn), jnp.stack([cross + half, la + lv]),
        )  # fmt: skip

    @property
    def chances(self) -> int:
        """For each group a choice, a decision and its effects."""
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

        loss = in_blocks(block, self.weight.shape[0], jnp.sum(self.counts), jnp.zeros_like(chosen))
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
        """The effects."""
        _, rho, m, _, _ = self._linear(a.T)
        z = self._mapped(rho, m, self._columns(zeta))[0]
        return z.reshape(-1, z.shape[-1]).T
