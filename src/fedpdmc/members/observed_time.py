"""Exposure: the time for which a site is observed along a plan, which its account charges. Plan and arrival determine it."""

from __future__ import annotations

import functools
import math

import numpy as np

from fedpdmc.dynamics import Dynamics

# On rotations max_i |v_i| is bounded on cells: their longest length in radians, and their maximum number per segment.
CELL, MOST_CELLS = 1 / 16, 4096


class Exposure:
    """The observed time of a plan as a function of time, computed once per plan.

    On lines of unit speed the time itself; on rotations an upper bound on ``∫ max_i |v_i| dt``. With a grid of times,
    the rates at a grid point count for a whole cell: a segment of length t has at most ``t/h + 1`` points, so one cell
    at its largest speed is added for every segment, however short.

    Parameters
    ----------
    dynamics : Dynamics
        With coordinate flips.
    start : (C, d)
    duration : (C, S)
    velocity : (C, S, d)
        The plan.
    unit : (C,)
        The cell length h of the grid.

    Attributes
    ----------
    starts : (C, S, d)
        Where each segment starts.
    horizon : (C,)
    """

    def __init__(
        self,
        dynamics: Dynamics,
        start: np.ndarray,
        duration: np.ndarray,
        velocity: np.ndarray,
        unit: np.ndarray | float = 0.0,
    ):
        self.duration, self.unit, self.horizon = duration, unit, duration.sum(1)
        self._begin = np.cumsum(duration, 1) - duration
        self.starts, a = np.empty_like(velocity), start
        rotating = dynamics.flow.rotating
        for s in range(duration.shape[1]):
            self.starts[:, s], t, v = a, duration[:, s, None], velocity[:, s]
            a = a * np.cos(t) + v * np.sin(t) if rotating else a + v * t
        # The largest speed by segment, chain and cell; None if it is one.
        self._speeds: list[np.ndarray] | None = None
        if not dynamics.unit_speed:
            segments = range(duration.shape[1])
            self._speeds = [_largest_speeds(self.starts[:, s], velocity[:, s], duration[:, s]) for s in segments]
            self._peak = np.hypot(self.starts, velocity).max(-1)

    def until(self, time: np.ndarray | float) -> np.ndarray:
        """The exposure of each chain up to this time since the plan's start; it never decreases with time."""
        time = np.where(time >= self.horizon, np.inf, time)
        if self._speeds is None:
            begun = (self._begin < time[:, None]) & (self.duration > 0)
            return np.minimum(time, self.horizon) + self.unit * np.count_nonzero(begun, 1)
        total = np.zeros(len(time))
        for s, speeds in enumerate(self._speeds):
            seen = np.clip(time - self._begin[:, s], 0.0, self.duration[:, s])
            width = self.duration[:, s, None] / speeds.shape[1]
            inside = np.clip(seen[:, None] - width * np.arange(speeds.shape[1]), 0.0, width)
            total += (speeds * inside).sum(1) * (1 + 1e-12)
            total += np.where(seen > 0, self.unit * self._peak[:, s], 0.0)
        return total


def _largest_speeds(a: np.ndarray, v: np.ndarray, duration: np.ndarray) -> np.ndarray:
    """``max_i sup |v_i|`` on equal cells of a segment: v_i = A cos(t + φ) is largest at an end or at its peak."""
    cells = min(max(1, math.ceil(float(np.max(duration, initial=0.0)) / CELL)), MOST_CELLS)
    size, phase = np.hypot(a, v), np.arctan2(a, v)
    ends = phase[:, None, :] + (duration[:, None] * np.linspace(0.0, 1.0, cells + 1))[..., None]
    speed = np.abs(np.cos(ends))
    # A peak of |cos| lies between two ends if a multiple of π does.
    peak = np.floor(ends[:, 1:] / np.pi) > np.floor(ends[:, :-1] / np.pi)
    return (size[:, None] * np.where(peak, 1.0, np.maximum(speed[:, 1:], speed[:, :-1]))).max(-1)


@functools.cache
def usual_speed(dynamics: Dynamics, dim: int) -> float:
    """Expected exposure per unit of process time: one on lines, ``E max_i |v_i|`` with ``v ~ N(0, I)`` on rotations."""
    if dynamics.unit_speed:
        return 1.0
    z = np.linspace(0.0, 12.0, 4001)
    inside = np.array([math.erf(x / math.sqrt(2)) for x in z])
    return float(np.trapezoid(1 - inside**dim, z))
