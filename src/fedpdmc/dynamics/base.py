"""How the process moves: a flow, a kind of jump, a velocity law, and the coordinator's own jumps."""

import dataclasses
from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fedpdmc._jax.random_streams import normals
from fedpdmc.dynamics.flows import Flow
from fedpdmc.dynamics.jumps import BOUNCES, DRAW, REFLECT, flipped, reflected
from fedpdmc.dynamics.quarter_turns import QUARTER_TURNS
from fedpdmc.errors import InputError
from fedpdmc.validation import non_negative, one_of


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
        told = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in told.items() if name != "bounce" or value != REFLECT}

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
        told = (
            f"{name}={value!r}" if isinstance(value, str) else f"{name}={value:g}" for name, value in self.rates.items()
        )
        return f"{type(self).__name__}({', '.join(told)})"

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
