"""How the process moves: a flow, a kind of jump, a velocity law, and the coordinator's own jumps."""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from fedpdmc._jax.random_streams import ChainKeys, normals, portable_normals, secret_uniforms, threefry, unit_interval
from fedpdmc.errors import InputError
from fedpdmc.validation import non_negative, one_of

# The value of ``refresh`` that selects turns instead of a rate.
QUARTER_TURNS = "quarter-turns"
QUARTER = math.pi / 2
# The shortest wait: a jump less than this before a turn counts as one at the turn.
LEAST_WAIT = 2.0**-40
GOLDEN = (math.sqrt(5) - 1) / 2


class Turn(eqx.Module):
    """The next turn of every chain: in how much time it comes, which is positive, and its number."""

    wait: Float[Array, " C"]
    number: Int[Array, " C"]


def first_waits(chains: int) -> np.ndarray:
    """When each chain turns first: spread evenly over a quarter period, for any number of chains.

    The phases are multiples of the golden ratio, so that any number of first ones is spread evenly, and a chain's phase
    does not depend on how many chains there are.
    """
    return QUARTER * ((np.arange(chains) + 0.5) * GOLDEN % 1.0)


def turn_velocities(keys: ChainKeys, first: Int[Array, " C"], count: int, dim: int) -> Float[Array, "n C d"]:
    """Standard normal velocities at ``count`` turns of each chain from its turn ``first`` on."""
    turn = (first[None] + jnp.arange(count)[:, None]).astype(jnp.uint32)
    entry = jnp.arange(dim, dtype=jnp.uint32)
    shape = (count, dim, first.shape[0])
    counter = jnp.broadcast_to(turn[:, None, :], shape), jnp.broadcast_to(entry[None, :, None], shape)
    u = unit_interval(*threefry((keys[None, None, :, 0], keys[None, None, :, 1]), counter))
    return jnp.swapaxes(portable_normals(u, first), 1, 2)


def turn_durations(wait: np.ndarray, horizon: np.ndarray, count: int) -> np.ndarray:
    """Lengths (C, count) of the segments between turns up to a horizon: subtractions alone, so the same bits everywhere."""
    duration, left, wait = np.zeros((len(wait), count)), np.array(horizon), np.array(wait)
    for k in range(count):
        duration[:, k] = np.minimum(wait, left)
        left = np.where(wait <= left, left - wait, 0.0)
        wait = np.full_like(wait, QUARTER)
    return duration


# Arrays of shapes (…,) and (…, d), of JAX or of NumPy.
Times = Any
States = Any


def _numpy_or_jax(t: Times) -> Any:
    """NumPy for NumPy arrays: paths that are evaluated after a run need no compilation."""
    return np if isinstance(t, np.ndarray) else jnp


class SegmentIntegrals(NamedTuple):
    """``∫p, ∫q, ∫p², ∫pq, ∫q²`` over ``[0, t]``."""

    p: Times
    q: Times
    pp: Times
    pq: Times
    qq: Times


class Flow(eqx.Module):
    """A deterministic motion of position and velocity."""

    rotating: ClassVar[bool]

    @abc.abstractmethod
    def weights(self, t: Times) -> tuple[Times, Times]:
        """``p(t), q(t)``."""

    @abc.abstractmethod
    def move(self, a: States, v: States, t: Times) -> tuple[States, States]:
        """State after time ``t``."""

    @abc.abstractmethod
    def integrals(self, t: Times) -> SegmentIntegrals:
        """Integrals of the weights and of their products over ``[0, t]``."""


class Line(Flow):
    """``a(s) = a + v s``."""

    rotating = False

    def weights(self, t):
        return _numpy_or_jax(t).ones_like(t), t

    def move(self, a, v, t):
        return a + v * t[..., None], v

    def integrals(self, t):
        return SegmentIntegrals(t, t**2 / 2, t, t**2 / 2, t**3 / 3)


class Rotation(Flow):
    """``a(s) = a cos s + v sin s``, ``v(s) = −a sin s + v cos s``."""

    rotating = True

    def weights(self, t):
        xp = _numpy_or_jax(t)
        return xp.cos(t), xp.sin(t)

    def move(self, a, v, t):
        xp = _numpy_or_jax(t)
        c, s = xp.cos(t)[..., None], xp.sin(t)[..., None]
        return a * c + v * s, v * c - a * s

    def integrals(self, t):
        xp = _numpy_or_jax(t)
        double = xp.sin(2 * t) / 4
        return SegmentIntegrals(xp.sin(t), 2 * xp.sin(t / 2) ** 2, t / 2 + double, xp.sin(t) ** 2 / 2, t / 2 - double)


REFLECT, DRAW = "reflect", "draw"
BOUNCES = (REFLECT, DRAW)
# Proposals that are made at a time. One is accepted with probability √(2/(πd)), about.
PROPOSALS = 4


def flipped(v: Float[Array, "C d"], mark: Int[Array, " C"]) -> Float[Array, "C d"]:
    """The other sign of one coordinate of each chain; none where the mark is no coordinate."""
    return jnp.where(jnp.arange(v.shape[-1]) == mark[:, None], -v, v)


def reflected(v: Float[Array, "C d"], normal: Float[Array, "C d"]) -> Float[Array, "C d"]:
    """``v − 2 ⟨v, n⟩ n`` with unit normals n; the same velocity where n is zero."""
    return v - 2 * jnp.sum(v * normal, -1, keepdims=True) * normal


def draw_bounce(
    keys: ChainKeys, number: Int[Array, " C"], normal: Float[Array, "C d"], which: Bool[Array, " C"]
) -> Float[Array, "C d"]:
    """Velocities after an event with these unit normals, on some chains; zeros on the others.

    Parameters
    ----------
    keys : (C, 10)
        The site's keys, with those of its secret stream.
    number : (C,)
        The number of the plan: a plan has one event of a site at most.
    """
    chains, dim = normal.shape
    which = which & jnp.any(normal != 0, -1)

    def attempt(carry):
        velocity, left, batch = carry
        u = secret_uniforms(keys, number, batch, PROPOSALS * (dim + 2)).reshape(PROPOSALS, dim + 2, chains)
        z, y = normals(u[:, :dim]), normals(u[:, dim])
        size = jnp.sqrt(jnp.sum(z**2, 1))
        cosine = jnp.einsum("pdc,cd->pc", z, normal) / size
        accepted = u[:, -1] < jnp.abs(cosine)
        stretch = jnp.sqrt(1 + (y / size) ** 2) * jnp.where(cosine > 0, -1.0, 1.0)
        first = jnp.argmax(accepted, 0)[None, None]
        proposed = jnp.take_along_axis(z * stretch[:, None], first, 0)[0].T
        taken = left & jnp.any(accepted, 0)
        return jnp.where(taken[:, None], proposed, velocity), left & ~taken, batch + 1

    start = (jnp.zeros((chains, dim)), which, jnp.zeros((), jnp.uint32))
    return jax.lax.while_loop(lambda carry: jnp.any(carry[1]), attempt, start)[0]


class Dynamics(eqx.Module):
    """A piecewise deterministic process in whitened coordinates; concrete ones are data and a docstring.

    With ``flips`` a jump changes the sign of one velocity coordinate and its mark is the index. Otherwise the velocity is
    reflected in a unit normal, which is the mark; or, with ``bounce="draw"``, drawn, and the new velocity is the mark.
    """

    refresh: ClassVar[float | str]
    excess: ClassVar[float]
    flow: ClassVar[Flow]
    flips: ClassVar[bool]
    unit_speed: ClassVar[bool]
    bounce: ClassVar[str] = REFLECT

    @property
    def rates(self) -> dict[str, float | str]:
        """What its constructor takes, by name, as far as it is not the usual ``bounce``."""
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in given.items() if name != "bounce" or value != REFLECT}

    @property
    def draws(self) -> bool:
        """Whether the velocity after an event of a site is a draw."""
        return self.bounce == DRAW

    @property
    def turns(self) -> bool:
        """Whether the velocity is refreshed at fixed times, a quarter period apart."""
        return self.refresh == QUARTER_TURNS

    @property
    def refresh_rate(self) -> float:
        """Rate of refreshments at random times."""
        return 0.0 if isinstance(self.refresh, str) else self.refresh

    def __repr__(self) -> str:
        rates = (f"{k}={x!r}" if isinstance(x, str) else f"{k}={x:g}" for k, x in self.rates.items())
        return f"{type(self).__name__}({', '.join(rates)})"

    def velocity(self, u: Float[Array, "*C d"]) -> Float[Array, "*C d"]:
        """A draw of the velocity's stationary law from uniforms."""
        return jnp.where(u < 0.5, -1.0, 1.0) if self.unit_speed else normals(u)

    def jump(self, v: Float[Array, "C d"], mark: Int[Array, " C"] | Float[Array, "C d"]) -> Float[Array, "C d"]:
        """The velocity after a flip, or a reflection in a normal: an involution that keeps the velocity's law."""
        return flipped(v, mark) if self.flips else reflected(v, mark)


def rate(name: str, value: Any) -> float:
    """A rate given by the user, checked."""
    return non_negative(name, value, "Give a finite rate that is zero or positive.")


def rate_or_turns(name: str, value: Any) -> float | str:
    """A rate of refreshment given by the user, or `QUARTER_TURNS`, checked."""
    if not isinstance(value, str):
        return rate(name, value)
    if value != QUARTER_TURNS:
        raise InputError(name, repr(value), f"Give {QUARTER_TURNS!r}, or a finite rate that is zero or positive.")
    return value


def check_bounce(name: str, value: Any) -> str:
    """A way to bounce given by the user, checked."""
    return one_of(name, value, BOUNCES)


def _given(name: str, check: Any, default: float | str) -> Any:
    """A field that a user gives, called so in errors."""
    return eqx.field(default=default, static=True, converter=functools.partial(check, name))


class ZigZag(Dynamics):
    """``a(t) = a + v t`` with ``v ∈ {−1, 1}^d``; coordinate i flips at rate ``(v_i ∂_i U)_+ + excess``.

    The excess is even under the flip, so it cancels in ``λ_i(a, v) − λ_i(a, F_i v) = v_i ∂_i U``, the condition for
    invariance.

    Parameters
    ----------
    excess : float
        Rate of additional flips of every coordinate, made by the coordinator.
    """

    excess: float = _given("ZigZag(excess)", rate, 0.0)
    refresh = 0.0
    flow = Line()
    flips = True
    unit_speed = True


class BouncyParticle(Dynamics):
    """``a(t) = a + v t`` with ``v ~ N(0, I)``; reflection ``v − 2⟨v,g⟩/|g|² g`` at rate ``⟨v, g⟩_+``, ``g = ∇U``.

    Parameters
    ----------
    refresh : float
        Rate at which the coordinator refreshes the velocity; without it the process need not be ergodic.
    bounce : "reflect" or "draw"
        As for `Boomerang`.
    """

    refresh: float = _given("BouncyParticle(refresh)", rate, 1.0)
    bounce: str = _given("BouncyParticle(bounce)", check_bounce, REFLECT)
    excess = 0.0
    flow = Line()
    flips = False
    unit_speed = False


class Boomerang(Dynamics):
    """``a(t) = a cos t + v sin t``; reflection at rate ``⟨v, g⟩_+`` with ``g`` the gradient of ``U − ½|a|²``.

    The rotation keeps ``N(0, I)`` invariant, so a Gaussian target equal to the reference costs no event at all. The term
    ``−½|a|²`` is the coordinator's.

    *Quarter turns.* The velocity is refreshed at fixed times π/2 apart. On a Gaussian the position after a quarter turn is
    the velocity at its start, so the positions at the turns are independent draws: 2/π = 0.64 effective samples per unit
    of time. Refreshment at the best rate gives 0.35, limited by the energy.

    They leave the target invariant. Let ``P_s`` be the kernel of flow and reflections for the fixed time s, and R the kernel
    that replaces v by a draw of N(0, I). The generator of the process without refreshment leaves ``μ = π ⊗ N(0, I)``
    invariant, so ``μ P_s = μ`` for every s, and ``μ R = μ`` since v is independent of a under μ. With turns at times
    ``t_1 < t_2 < …`` that are constants the law at time t is ``μ P_{t_1} R P_{t_2 − t_1} R … P_{t − t_k} = μ``. So a chain
    that starts in μ has the law μ at every fixed time, at the turns too. The times must be constants: at a time that
    depends on the state the law is not μ. Each chain has its own phase, a constant too.

    Parameters
    ----------
    refresh : "quarter-turns" or float
        How the coordinator refreshes the velocity, since ``|a|² + |v|²`` is conserved between reflections: at fixed times,
        or at random ones with this rate.
    bounce : "reflect" or "draw"
        How an event of a site changes the velocity (`fedpdmc.dynamics`).
    """

    refresh: float | str = _given("Boomerang(refresh)", rate_or_turns, QUARTER_TURNS)
    bounce: str = _given("Boomerang(bounce)", check_bounce, REFLECT)
    excess = 0.0
    flow = Rotation()
    flips = False
    unit_speed = False


class FactorisedBoomerang(Dynamics):
    """The rotation of `Boomerang` with coordinate flips at rate ``(v_i ∂_i(U − ½|a|²))_+ + excess |v_i|``.

    Flow and flips conserve every ``a_i² + v_i²``: only refreshment changes them. The excess rate is even under the flip.

    Parameters
    ----------
    refresh : float or "quarter-turns"
        Rate at which the coordinator refreshes the velocity; or at fixed times, as in `Boomerang`, with the same proof.
    excess : float
        Rate, per unit of path length of a coordinate, of additional flips made by the coordinator.
    """

    refresh: float | str = _given("FactorisedBoomerang(refresh)", rate_or_turns, 1.0)
    excess: float = _given("FactorisedBoomerang(excess)", rate, 0.0)
    flow = Rotation()
    flips = True
    unit_speed = False


class Walls(eqx.Module):
    """The half spaces ``⟨n_k, a⟩ ≤ c_k`` in whitened coordinates; the density is zero beyond.

    At a wall the process must come back. It keeps its law π(a) ψ(v) if the velocity is mapped by an involution that keeps ψ
    and changes the sign of ``⟨n, v⟩``: what flows in is then what flows out, ``|⟨n, v⟩| ψ(v)``. For ψ = N(0, I) that is the
    reflection ``v − 2⟨n, v⟩n``; for flips, where ``v_i`` is symmetric whatever the others are, all coordinates with
    ``n_i ≠ 0`` change sign.

    Attributes
    ----------
    normal : (m, d)
        Of unit length, pointing out.
    limit : (m,)
    """

    normal: Float[Array, "m d"]
    limit: Float[Array, " m"]

    @property
    def dim(self) -> int:
        """Number of parameters."""
        return self.normal.shape[1]

    def first(self, dynamics: Dynamics, a: Float[Array, "C d"], v: Float[Array, "C d"]):
        """When the path meets a wall, from inside and moving out; infinite if never. And which.

        On a line ``p + q s = c``. On a rotation ``p cos s + q sin s = r cos(s − φ)`` with ``r = |(p, q)|``; it grows where
        ``s = φ − arccos(c/r)``, up to whole turns.
        """
        p, q = a @ self.normal.T, v @ self.normal.T
        outward = q > 0
        if dynamics.flow.rotating:
            radius = jnp.hypot(p, q)
            meets = radius > self.limit
            angle = jnp.arctan2(q, p) - jnp.arccos(jnp.clip(self.limit / jnp.where(meets, radius, 1.0), -1.0, 1.0))
            wait = jnp.where(meets, jnp.mod(angle, 2 * np.pi), jnp.inf)
        else:
            wait = jnp.where(outward, (self.limit - p) / jnp.where(outward, q, 1.0), jnp.inf)
        # Rounding may have put a chain on the wall or a hair beyond it.
        wait = jnp.where(outward & (p >= self.limit), 0.0, jnp.maximum(wait, 0.0))
        return jnp.min(wait, -1), jnp.argmin(wait, -1)

    def bounced(self, dynamics: Dynamics, v: Float[Array, "C d"], wall: Int[Array, " C"]) -> Float[Array, "C d"]:
        """The velocity after a wall; one that leads inwards already stays."""
        normal = self.normal[wall]
        speed = jnp.sum(v * normal, -1, keepdims=True)
        back = jnp.where(normal != 0, -v, v) if dynamics.flips else v - 2 * speed * normal
        return jnp.where(speed > 0, back, v)

    def inside(self, a: Float[Array | np.ndarray, "C d"]) -> Bool[Array, " C"]:
        """Which points are within all limits."""
        return jnp.all(a @ self.normal.T <= self.limit, -1)

    def reachable(
        self, a: Float[Array | np.ndarray, "C d"], step: Float[Array | np.ndarray, "C d"]
    ) -> Float[Array, "C d"]:
        """Points reached by a step from inside, cut at nine tenths of the way to a wall."""
        p, q = a @ self.normal.T, step @ self.normal.T
        most = jnp.min(jnp.where(q > 0, (self.limit - p) / jnp.where(q > 0, q, 1.0), jnp.inf), -1)
        return jnp.asarray(a) + jnp.minimum(1.0, 0.9 * most)[:, None] * step
