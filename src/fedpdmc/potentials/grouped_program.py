"""The private map of grouped effects whose records have any loss, with enclosed rates.

The map, ``z = σ(u) m(θ) + √(σ(u)/h) ζ``, and the kernel are those of `fedpdmc.potentials.random_effects_rates`. Nothing is
known of the loss but its program: the rate of arrivals along a path is enclosed (`fedpdmc.potentials.latent_program_rates`).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fedpdmc._jax.mapped import calls_library, mapped
from fedpdmc._jax.random_streams import logarithm, normals
from fedpdmc.enclosures import smoothed
from fedpdmc.potentials.grouped_families import gaussian_energy
from fedpdmc.potentials.informed_effects import FROM_PRIOR, Conditional, informed
from fedpdmc.potentials.latent import PrivateRemainder
from fedpdmc.potentials.latent_program_rates import rate_cell
from fedpdmc.potentials.quadratic import Quadratic

if TYPE_CHECKING:
    from fedpdmc.potentials.random_effects import RandomEffects


class GroupedRemainder(PrivateRemainder):
    """``R(a, ζ)`` of grouped records of any loss under the informed map.

    Attributes
    ----------
    model : RandomEffects
    at, rows : (d,), (d, e)
        ``θ = at + rows a``.
    slope, center, information : (G, r, e), (G, r), (G, r)
        ``m = center + slope a`` and h.
    control : Quadratic
        Of a.
    """

    model: RandomEffects
    at: Float[Array, " d"]
    rows: Float[Array, "d e"]
    slope: Float[Array, "G r e"]
    center: Float[Array, "G r"]
    information: Float[Array, "G r"]
    control: Quadratic

    @classmethod
    def of(
        cls, model: RandomEffects, at: Float[Array, " d"], rows: Float[Array, "d e"], control, known: Conditional
    ) -> GroupedRemainder:
        """The remainder in coordinates ``θ = at + rows a``."""
        information, center, slope = informed(
            known, model.split(at)[2], model.steep(at), model.design.shape[1] + model.family.scaled
        )  # fmt: skip
        dim = at.shape[0]
        control = Quadratic(jnp.zeros((dim, dim)), jnp.zeros(dim)) if control is None else control
        whole = Quadratic(rows.T @ control.precision @ rows, rows.T @ (control.precision @ at + control.linear))
        return cls(model, at, rows, jnp.einsum("grd,de->gre", slope, rows), center, information, whole)

    @property
    def dim(self) -> int:
        """Number of whitened coordinates."""
        return self.rows.shape[1]

    @property
    def latents(self) -> int:
        """Private numbers, padding included."""
        return self.center.size

    def _mapped(self, a, zeta):
        """Parameters, effects, ``e = z/τ`` and u, of one chain: ``e = √σ(−u) (√(hσ(u)) m + ζ)``."""
        own = self.model.split(self.at + self.rows @ a)
        h, m = self.information, self.center + self.slope @ a
        u = 2 * own[2] + jnp.log(h)
        # √σ(±u), with a derivative where σ is rounded to zero too: far down a bent log spread.
        up, down = (jnp.exp(-0.5 * jax.nn.softplus(-side * u)) for side in (1.0, -1.0))
        zeta = zeta.reshape(h.shape)
        return own, up * (up * m + zeta / jnp.sqrt(h)), down * (jnp.sqrt(h) * up * m + zeta), u

    def _losses(self, own, z) -> Float[Array, " N"]:
        model, (beta, s, _, _) = self.model, own
        eta = model.offset + model.design @ beta + jnp.sum(model.effects * z[model.index], -1)
        return model.weight * model.family.value(eta, model.response, s)

    def _own(self, a, zeta):
        """The energy without the quadratic."""
        own, z, e, u = self._mapped(a, zeta)
        law = gaussian_energy(e[..., None], own[2][:, None], own[3])[:, 0]
        # −log|∂z/∂ζ| = −½ log σ(u) up to a constant.
        law = law + 0.5 * jnp.sum(jax.nn.softplus(-u), -1)
        return jnp.sum(self._losses(own, z)) + jnp.sum(self.model.present * law)

    def energy(self, a: Float[Array, " e"], zeta: Float[Array, " k"]) -> Float[Array, ""]:
        """``R(a, ζ)`` of one chain."""
        return smoothed(self._own)(a, zeta) - self.control.value(a)

    def _calls_library(self, a, zeta) -> bool:
        return calls_library(self._own, a[0], zeta[0])

    def gradients(self, a, zeta):  # type: ignore[override]
        """``∇_a R``, backward."""
        return mapped(jax.grad(self.energy), self._calls_library(a, zeta))(a, zeta)

    def cell(self, a, v, zeta, room):
        """The rate on a cell, from enclosures of the losses."""
        return rate_cell(self.energy, a, v, zeta, room)

    @property
    def chances(self) -> int:
        """For each group a choice, a decision and its effects."""
        return self.center.shape[0] * (2 + self.center.shape[1])

    def kernel(self, a, zeta, u):
        """Independence Metropolis, group by group: as `InformedRemainder.kernel`, of one chain at a time."""
        groups, r = self.center.shape

        def one(a, zeta, u):
            chosen, decided, standard = u[:groups], u[groups : 2 * groups], normals(u[2 * groups :]).reshape(groups, r)
            own, _, at_zero, _ = self._mapped(a, jnp.zeros_like(zeta))
            # ``z = τ ε`` in ζ: ``ζ = ε/√σ(−u) − √(hσ(u)) m``.
            wide = jnp.sqrt(1 + self.information * jnp.exp(2 * own[2]))
            shift, old = at_zero * wide, zeta.reshape(groups, r)
            new = jnp.where((chosen < FROM_PRIOR)[:, None], wide * standard - shift, standard)
            change = self._weights(a, new, shift, wide) - self._weights(a, old, shift, wide)
            return jnp.where((logarithm(1 - decided) < change)[:, None], new, old).reshape(-1)

        return mapped(one, self._calls_library(a, zeta))(a, zeta, u.T)

    def _weights(self, a, zeta, shift, wide) -> Float[Array, " G"]:
        """Log of target over proposal, by group."""
        own, z, e, _ = self._mapped(a, zeta)
        energy = gaussian_energy(e[..., None], 0.0 * own[2][:, None], own[3])[:, 0] + self.model.summed(
            self._losses(own, z)
        )
        near = math.log(1 - FROM_PRIOR) - 0.5 * jnp.sum(zeta**2, 1)
        far = math.log(FROM_PRIOR) - jnp.sum(0.5 * ((zeta + shift) / wide) ** 2 + jnp.log(wide), 1)
        return -energy - jnp.logaddexp(near, far)

    def to_z(self, a, zeta):
        """The effects."""
        return jax.vmap(lambda a, zeta: self._mapped(a, zeta)[1].reshape(-1))(a, zeta)
