"""The prior of log spreads in bent coordinates, with bounds of its own."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from fedpdmc._jax.compilation import on_device
from fedpdmc._jax.random_streams import exponentials, normals
from fedpdmc.errors import InputError
from fedpdmc.potentials.base import NEEDS_ROTATION, Field, Potential, Sum
from fedpdmc.potentials.linear_predictor import LinearPredictor
from fedpdmc.potentials.losses import Logistic, Loss
from fedpdmc.potentials.quadratic import Quadratic, quadratic_field
from fedpdmc.whitening import Bend, bent, curvatures, enclosed, log_volume, steepness, straight

# The longest piece of a path; the most that ``log T'`` and the predictors may change on it together, as far as their slopes
# at its start tell; and its length relative to the best cell, if the bound were that at its start.
LONGEST, MOST_CHANGE, ROOM = 1.5, 1.5, 1.5
# The largest third cumulant of a variable on [−1, 1] is below this: ``E|X − EX|³ ≤ 2 var X ≤ 2``.
THIRD_CUMULANT = 2.0
# Rounding error of a gradient, relative to its largest terms.
ROUNDING = 256 * float(np.finfo(np.float64).eps)


class BentSpreadPrior(Potential):
    """``U(a) = Σ_j G_j(u_j)`` with ``u = center + rows a`` and ``G(u) = ℓ(k T(u) + o; y) − log T'(u) − g u − ½ h u²``.

    Each record j is the prior of one log spread ``T_j(u_j)``, straight where T is the identity; g and h are those of a
    control variate. On a rotation ``u'' = −(u − center)``, ``u''' = −u'``, and with ``f(t) = U(a(t))``

    ``f'   = Σ G' u'``,
    ``f''  = Σ G'' u'² + G' u''``,
    ``f''' = Σ G''' u'³ + 3 G'' u' u'' − G' u'``.

    ``|u'| ≤ A`` with ``A² = (rows a)² + (rows v)²``, and ``|u' u''| ≤ ½A²``. For ``|u − u_0| ≤ Δ`` and ``M ≥ |G'''|`` there,
    ``|G''| ≤ |G''(u_0)| + ΔM`` and ``|G'| ≤ |G'(u_0)| + Δ|G''(u_0)| + ½Δ²M``. For M: every exponential of T has a rate κ of
    at most one, so that ``|T''|, |T'''| ≤ T' − c ≤ D − c``, D that of `fedpdmc.whitening.enclosed`; and ``log T'`` is
    the cumulant generating function of a variable on [−1, 1], whose third cumulant is at most two. So with ``k > 0``

    ``M = |ℓ'''| k³D³ + (3 ℓ'' kD + |ℓ'|) k (D − c) + 2``.

    Parameters
    ----------
    loss : Loss
        Logistic or Poisson.
    rows, center : arrays of shape (n, d) and (n,)
    numbers : array of shape (6, n)
        Of T.
    factor, offset, response : arrays of shape (n,)
        k, o and y.
    linear, curvature : arrays of shape (n,)
        g and h.
    """

    loss: Loss
    rows: Float[Array, "n d"]
    center: Float[Array, " n"]
    numbers: Float[Array, "6 n"]
    factor: Float[Array, " n"]
    offset: Float[Array, " n"]
    response: Float[Array, " n"]
    linear: Float[Array, " n"]
    curvature: Float[Array, " n"]

    @classmethod
    def of(cls, spreads: LinearPredictor, bend: Bend) -> BentSpreadPrior:
        """The records of a prior, each of one log spread; those that are not of the bend stay straight."""
        design = np.asarray(spreads.design)
        index = np.argmax(np.abs(design), 1)
        factor = design[np.arange(len(index)), index]
        numbers, bent_ones = straight(len(index)), list(bend.index)
        for j, coordinate in enumerate(index):
            if coordinate in bent_ones:
                numbers[:, j] = np.asarray(bend.numbers)[:, bent_ones.index(coordinate)]
        rows, zeros = np.eye(spreads.dim)[index], np.zeros(len(index))
        rows, zeros, numbers, factor = (on_device(x) for x in (rows, zeros, numbers, factor))
        return cls(spreads.loss, rows, zeros, numbers, factor, spreads.offset, spreads.response, zeros, zeros)

    @property
    def dim(self) -> int:
        return self.rows.shape[1]

    def less(self, quadratic: Quadratic) -> Potential:
        """The same less a quadratic, before whitening: what is of single log spreads is held with them."""
        rows, precision, linear = (np.asarray(x) for x in (self.rows, quadratic.precision, quadratic.linear))
        index = np.argmax(rows, 1)
        g, h = linear[index], np.diagonal(precision)[index]
        own = dataclasses.replace(
            self, linear=on_device(np.asarray(self.linear) + g), curvature=on_device(np.asarray(self.curvature) + h)
        )
        bend, slope = precision - (rows.T * h) @ rows, linear - g @ rows
        if not (np.any(bend) or np.any(slope)):
            return own
        return Sum((own, Quadratic(on_device(-bend), on_device(-slope))))

    def value(self, x):
        u = self.center + self.rows @ x
        own = self.loss.value(self.factor * bent(u, self.numbers) + self.offset, self.response)
        return jnp.sum(own - log_volume(u, self.numbers) - self.linear * u - 0.5 * self.curvature * u * u)

    def gradient(self, x):
        return self._at(self.center + self.rows @ x).first @ self.rows

    def gradients(self, a):
        return self._at(self.center + a @ self.rows.T).first @ self.rows

    def hessian(self, x):
        return (self.rows.T * self._at(self.center + self.rows @ x).second) @ self.rows

    def whiten(self, reference, columns):
        matrix, center = reference.rows_of(columns)
        return dataclasses.replace(self, rows=self.rows @ matrix, center=self.center + self.rows @ center)

    def _at(self, u: Float[Array, "*C n"]) -> RecordDerivatives:
        eta = self.factor * bent(u, self.numbers) + self.offset
        t1, (t2, t3) = steepness(u, self.numbers), curvatures(u, self.numbers)
        push = self.loss.first(eta, self.response) * self.factor
        lean = t2 / t1
        first = push * t1 - lean - self.linear - self.curvature * u
        second = self.loss.second(eta, self.response) * (self.factor * t1) ** 2 + push * t2
        second = second - (t3 / t1 - lean * lean) - self.curvature
        return RecordDerivatives(eta, t1, first, second)

    def field(self, rotating, flips, a, v):
        """Gradient and slope at the start, and the bound of the class's docstring."""
        if flips or not rotating:
            raise InputError("dynamics", "lines, or flips, with bent log spreads", NEEDS_ROTATION)
        position, speed = a @ self.rows.T, v @ self.rows.T
        u, amplitude = self.center + position, jnp.hypot(position, speed)
        here = self._at(u)
        slope = jnp.sum(here.second * speed**2 - here.first * position, -1, keepdims=True)
        pace = amplitude * (1 + jnp.abs(self.factor) * here.steepness)
        first = self._curve(here, u, speed, amplitude, jnp.zeros_like(u))
        reach = jnp.minimum(LONGEST, MOST_CHANGE / jnp.maximum(jnp.max(pace, -1), 1e-300))
        reach = jnp.minimum(reach, ROOM * jnp.cbrt(2 / jnp.maximum(jnp.sum(first, -1), 1e-300)))
        curve = jnp.sum(self._curve(here, u, speed, amplitude, reach[:, None]), -1, keepdims=True)
        return Field(here.first @ self.rows, slope, curve, reach, self._slack(here, u))

    def _curve(self, here: RecordDerivatives, u, speed, amplitude, h):
        """A bound of each term's share of ``|f'''|`` on ``[0, h]``."""
        fastest = jnp.minimum(amplitude, jnp.abs(speed) + h * amplitude)
        away = jnp.minimum(h * fastest, 2 * amplitude)
        third = self._third(u - away, u + away)
        second = jnp.abs(here.second) + away * third
        first = jnp.abs(here.first) + away * (jnp.abs(here.second) + 0.5 * away * third)
        return third * fastest**3 + 1.5 * second * amplitude**2 + first * fastest

    def _third(self, least, most):
        """M on ``[least, most]``."""
        steep, _, highest = enclosed(least, most, 0.0, self.numbers)
        bends = steep - self.numbers[1]
        if isinstance(self.loss, Logistic):
            third, second, first = self.loss.third(highest, self.response), 0.25, self.loss.steepest
        else:
            third = second = jnp.exp(self.factor * highest + self.offset)
            first = jnp.maximum(third, self.response)
        k = self.factor * steep
        whole = third * k**3 + self.factor * bends * (3 * second * k + first)
        return whole + jnp.where(bends > 0, THIRD_CUMULANT, 0.0)

    def _slack(self, here: RecordDerivatives, u):
        """Room for the rounding of ``rowsᵀ G'``, in units of velocity one."""
        return ROUNDING * jnp.sum(self._terms(here, u) * jnp.max(jnp.abs(self.rows), 1), -1)

    def _terms(self, here: RecordDerivatives, u):
        """The size of the largest terms of ``G'``."""
        k = jnp.abs(self.factor) * here.steepness
        push = jnp.abs(self.loss.first(here.eta, self.response)) + jnp.abs(self.response)
        far = 1 + jnp.abs(u)
        size = push * k * (1 + jnp.abs(here.eta) + k * far) + far * (1 + jnp.abs(self.curvature))
        return size + 1 + jnp.abs(self.linear)


class RecordDerivatives(NamedTuple):
    """Predictors, ``T'``, ``G'`` and ``G''`` of all records."""

    eta: Float[Array, "*C n"]
    steepness: Float[Array, "*C n"]
    first: Float[Array, "*C n"]
    second: Float[Array, "*C n"]


# Sweeps over the scales of a horseshoe at each renewal: they cost no round and help the global scale to move.
SWEEPS = 3
# Exponentials are not smaller than this: ``−log(1 − u)`` is zero with probability 2⁻⁵².
LEAST = 2.0**-54
# The half-Cauchy laws of a horseshoe end at this share of their scale. A coefficient held by a scale of nothing would have
# events without end; 0.6 % of the law is below.
FLOOR = 0.01
# The normal that stands in for a Student-t of ν degrees of freedom has ``1 + 16/ν`` times its squared scale.
WIDER = 16.0
LEAST_PACE = 1e-4  # of λ: a hundred times the usual speed


def halved_gamma(u: Float[Array, "n C"], twice: int) -> Float[Array, " C"]:
    """A gamma variable of rate one and shape ``twice/2``: a sum of exponentials, and half the square of a normal."""
    whole, odd = divmod(twice, 2)
    total = jnp.sum(exponentials(u[:whole]), 0)
    return jnp.maximum(total + 0.5 * normals(u[whole]) ** 2 if odd else total, LEAST)


def halved_draws(twice: int) -> int:
    """How many uniforms `halved_gamma` takes."""
    return -(-twice // 2)


class ScaleLaw(eqx.Module):
    """Scales of a prior, and their law given the coefficients.

    The first coefficients are Student-t: ``z ~ N(0, 1/w)`` with ``w s² ~ Gamma(ν/2, ν/2)``, so that given z
    ``w ~ Gamma((ν + 1)/2, (ν s² + z²)/2)``. The last are a horseshoe: ``z_j ~ N(0, τ²λ_j²)`` with λ_j and τ/τ₀ half-Cauchy
    above `FLOOR`. With ``λ² | n ~ IG(½, 1/n)`` and ``n ~ IG(½, 1)`` a half-Cauchy is a mixture of inverse gamma laws, so all
    conditional laws are of this kind:

    - ``λ_j² ~ IG(1, 1/n_j + z_j²/(2τ²))``, ``n_j ~ IG(1, 1 + 1/λ_j²)``
    - ``τ² ~ IG((p + 1)/2, 1/m + Σ z_j²/(2λ_j²))``, ``m ~ IG(1, 1/τ₀² + 1/τ²)``

    A draw below the floor is not taken: the scale stays, which is Metropolis' rule for the law above the floor.

    Parameters
    ----------
    df : tuple of int
        Degrees of freedom of the Student-t coefficients.
    scale : array of shape (len(df),)
    members : int
        Number of the horseshoe's coefficients.
    global_scale : array of shape ()
        ``τ₀``.
    """

    df: tuple[int, ...] = eqx.field(static=True)
    scale: Float[Array, " t"]
    members: int = eqx.field(static=True)
    global_scale: Float[Array, ""]

    @property
    def stand_in(self) -> Float[Array, " t"]:
        """Precisions of the normal laws that stand in for Student-t ones in a reference."""
        return self.scale**-2.0 / (1 + WIDER / jnp.asarray(self.df))

    @property
    def draws(self) -> int:
        """How many uniforms a renewal takes."""
        sweep = 2 * self.members + halved_draws(self.members + 1) + 1 if self.members else 0
        return sum(halved_draws(df + 1) for df in self.df) + SWEEPS * sweep

    def start(self, chains: int) -> Float[Array, "C m"]:
        """Where every chain begins: normal laws of the same scale."""
        t = jnp.broadcast_to(self.scale**-2.0, (chains, len(self.df)))
        if not self.members:
            return t
        square = jnp.full((chains, 1), self.global_scale**2)
        return jnp.concatenate([t, jnp.ones((chains, 2 * self.members)), square, square], 1)

    def weights(self, scales: Float[Array, "C m"]) -> Float[Array, "C k"]:
        """The precisions of all coefficients."""
        t, local, _, tau, _ = self._parts(scales)
        return jnp.concatenate([t, 1 / (local * tau)], 1) if self.members else t

    def renewed(self, scales: Float[Array, "C m"], z: Float[Array, "C k"], u: Float[Array, "n C"]):
        """New scales: draws from their law given ``z``, which leave their joint law with the coefficients as it is."""
        t, local, inner, tau, outer = self._parts(scales)
        fresh, used = [], 0
        for j, df in enumerate(self.df):
            count = halved_draws(df + 1)
            drawn = halved_gamma(u[used : used + count], df + 1)
            fresh.append(drawn / (0.5 * (df * self.scale[j] ** 2 + z[:, j] ** 2)))
            used += count
        t = jnp.stack(fresh, 1) if fresh else t
        if not self.members:
            return t
        square, p = 0.5 * z[:, len(self.df) :] ** 2, self.members
        for _ in range(SWEEPS):
            own, used = u[used:], used + 2 * p + halved_draws(p + 1) + 1
            unit = jnp.maximum(exponentials(own[: 2 * p + 1]), LEAST).T
            drawn = (1 / inner + square / tau) / unit[:, :p]
            local = jnp.where(drawn >= FLOOR**2, drawn, local)
            inner = (1 + 1 / local) / unit[:, p : 2 * p]
            whole = halved_gamma(own[2 * p + 1 :], p + 1)[:, None]
            drawn = (1 / outer + jnp.sum(square / local, 1, keepdims=True)) / whole
            tau = jnp.where(drawn >= (FLOOR * self.global_scale) ** 2, drawn, tau)
            outer = (self.global_scale**-2.0 + 1 / tau) / unit[:, 2 * p :]
        return jnp.concatenate([t, local, inner, tau, outer], 1)

    def _parts(self, scales):
        """The precisions of Student-t coefficients; ``λ²``, n, ``τ²`` and m of the horseshoe, empty if there is none."""
        k, p = len(self.df), self.members
        ends = [0, k, k + p, k + 2 * p, k + 2 * p + 1, k + 2 * p + 2]
        return [scales[:, a:b] for a, b in zip(ends[:-1], ends[1:], strict=True)]


class ScaleMixture(Potential):
    """``U(a) + ½ Σ_k w_k (r_k·a + s_k)²`` with weights ``w`` of its own for each chain, which change in time.

    Given the weights it is quadratic, and walked as such. They are renewed from their law given the position at times that
    do not depend on the state: the process of position, velocity and scales has the joint law of coefficients and scales
    as its invariant one, and the coefficients alone have the posterior under the mixture.

    *Pace.* Far out in a tail a weight is small, and a rotation that keeps ``N(0, I)`` is held there by one event after the
    other. So given the weights the velocity is ``v = z/√λ`` with z of law N(0, I) and a number ``λ(w) ≤ 1``: the least
    curvature along one of the ``r_k`` relative to that of the reference, ``1 + (w_k/p_k − 1) p_k |r_k|²`` with p the
    precisions of the stand-in. The rotation keeps ``N(0, I/λ)`` of position and velocity, and ``U − ½λ|a|²`` is left to
    events. The invariant law is ``π(a, w) N(v; 0, I/λ(w))``: a reflection keeps |v|, the draw of a site is one of z, since
    its law is that of any multiple of v, and a renewal keeps z.

    Parameters
    ----------
    base : Quadratic
        ``U``, in whitened coordinates; on rotations less ``½|a|²``.
    rows : array of shape (k, d)
    shift : array of shape (k,)
    law : ScaleLaw
    paced : bool
        Whether paths rotate, so that chains have a pace.
    weight : array of shape (C, k), optional
        None until the chains' weights are given.
    slack : array of shape (C,), optional
        ``1 − λ``.
    """

    base: Quadratic
    rows: Float[Array, "k d"]
    shift: Float[Array, " k"]
    law: ScaleLaw
    paced: bool = eqx.field(static=True)
    weight: Float[Array, "C k"] | None = None
    slack: Float[Array, " C"] | None = None

    @property
    def dim(self) -> int:
        return self.base.dim

    def holding(self, scales: Float[Array, "C m"]) -> ScaleMixture:
        """The same with these scales."""
        held = self.law.weights(scales), 1 - self.pace(scales)
        return eqx.tree_at(lambda s: (s.weight, s.slack), self, held, is_leaf=lambda x: x is None)

    def pace(self, scales: Float[Array, "C m"]) -> Float[Array, " C"]:
        """``λ`` of every chain."""
        if not (self.paced and self.law.df):
            return jnp.ones(scales.shape[0])
        wide = self.law.stand_in
        share = jnp.minimum(wide * jnp.sum(self.rows[: len(wide)] ** 2, 1), 1.0)
        return jnp.clip(1 + jnp.min(share * (scales[:, : len(wide)] / wide - 1), 1), LEAST_PACE, 1.0)

    def renewed(self, scales: Float[Array, "C m"], a: Float[Array, "C d"], u: Float[Array, "n C"]):
        """New scales at a position."""
        return self.law.renewed(scales, a @ self.rows.T + self.shift, u)

    def _weights(self) -> tuple[Float[Array, "C k"], Float[Array, "C 1"]]:
        if self.weight is None or self.slack is None:
            raise ValueError("a mixture walks with the scales of each chain")
        return self.weight, self.slack[:, None]

    def value(self, x):
        weight, slack = self._weights()
        return self.base.value(x) + 0.5 * weight @ (self.rows @ x + self.shift) ** 2 + 0.5 * slack[:, 0] * (x @ x)

    def gradients(self, a):
        weight, slack = self._weights()
        return self.base.gradients(a) + (weight * (a @ self.rows.T + self.shift)) @ self.rows + slack * a

    def field(self, rotating, flips, a, v):
        """As of `Quadratic`, with a precision for each chain: ``B + RᵀWR``, whose entries are at most ``|B| + |R|ᵀW|R|``."""
        (weight, slack), rows, base = self._weights(), self.rows, self.base

        def times(x, precision, rows):
            return x @ precision + (weight * (x @ rows.T)) @ rows + slack * x

        ba, bv = times(a, base.precision, rows), times(v, base.precision, rows)
        linear = base.linear + (weight * self.shift) @ rows
        largest = times(jnp.hypot(a, v), jnp.abs(base.precision), jnp.abs(rows)) if flips and rotating else None
        return quadratic_field(rotating, flips, a, v, ba, bv, linear, largest)

    def affine(self, rotating):
        return not rotating
