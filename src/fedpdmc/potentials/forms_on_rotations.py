"""Linear forms of grouped effects along a rotation, and how far they swing."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Array, Float


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
