"""How long a site was watched along a plan: what its account charges for. Public: plan and arrival say it all."""

from __future__ import annotations

import functools
import math

import numpy as np

from fedpdmc.dynamics import Dynamics

# On rotations max_i |v_i| is bounded on cells of at most this many radians.
CELL = 1 / 16


def exposure(
    dynamics: Dynamics,
    start: np.ndarray,
    duration: np.ndarray,
    velocity: np.ndarray,
    until: np.ndarray,
    unit: np.ndarray | float = 0.0,
) -> np.ndarray:
    """For each chain, ``until`` on lines of unit speed; on rotations an upper bound of ``∫ max_i |v_i| dt`` up to there.

    With a grid of times, rates are those at its points for a whole cell each: a segment of length t has at most ``t/h + 1``
    points, so one cell at its largest speed is added for every segment, however short.

    Parameters
    ----------
    dynamics : Dynamics
        With coordinate flips.
    start : (C, d)
    duration : (C, S)
    velocity : (C, S, d)
        The plan.
    until : (C,)
        Time since the plan's start.
    unit : (C,)
        The grid.
    """
    if dynamics.unit_speed:
        begun = np.cumsum(duration, 1) - duration < np.asarray(until)[:, None]
        return until + unit * np.count_nonzero(begun & (duration > 0), 1)
    total, a, begin = np.zeros(start.shape[0]), start, np.zeros(start.shape[0])
    for s in range(duration.shape[1]):
        seen = np.clip(until - begin, 0.0, duration[:, s])
        total += _path_length(a, velocity[:, s], seen)
        total += np.where(seen > 0, unit * np.hypot(a, velocity[:, s]).max(1), 0.0)
        turn = duration[:, s, None]
        a, begin = a * np.cos(turn) + velocity[:, s] * np.sin(turn), begin + duration[:, s]
    return total


def _path_length(a: np.ndarray, v: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """``Σ cell · max_i sup |v_i|`` over cells of ``[0, seen]``: v_i = A cos(t + φ), largest at an end or where it peaks."""
    cells = max(1, math.ceil(float(np.max(seen, initial=0.0)) / CELL))
    size, phase = np.hypot(a, v), np.arctan2(a, v)
    ends = phase[:, None, :] + (seen[:, None] * np.linspace(0.0, 1.0, cells + 1))[..., None]
    speed = np.abs(np.cos(ends))
    # A peak of |cos| lies between two ends if a multiple of π does.
    peak = np.floor(ends[:, 1:] / np.pi) > np.floor(ends[:, :-1] / np.pi)
    largest = size[:, None] * np.where(peak, 1.0, np.maximum(speed[:, 1:], speed[:, :-1]))
    return largest.max(-1).sum(1) * seen / cells * (1 + 1e-12)


@functools.cache
def usual_speed(dynamics: Dynamics, dim: int) -> float:
    """Expected exposure per unit of process time: one on lines, ``E max_i |v_i|`` with ``v ~ N(0, I)`` on rotations."""
    if dynamics.unit_speed:
        return 1.0
    z = np.linspace(0.0, 12.0, 4001)
    inside = np.array([math.erf(x / math.sqrt(2)) for x in z])
    return float(np.trapezoid(1 - inside**dim, z))
