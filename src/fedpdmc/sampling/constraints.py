"""Linear limits of the parameters, ``A x ≤ b``: checked, and as walls in a run's coordinates."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from fedpdmc.dynamics.walls import Walls
from fedpdmc.errors import InputError
from fedpdmc.whitening import Reference


def check_constraints(constraints: Any, dim: int) -> tuple[np.ndarray, np.ndarray] | None:
    """A matrix with a row for each limit, and the limits."""
    if constraints is None:
        return None
    remedy = f"Give a pair (A, b) of shapes (m, {dim}) and (m,): parameters x are allowed where A @ x <= b."
    try:
        rows, limits = (np.asarray(part, np.float64) for part in constraints)
    except (TypeError, ValueError) as error:
        raise InputError("constraints", repr(constraints)[:80], remedy) from error
    if rows.ndim != 2 or rows.shape[1] != dim or limits.shape != rows.shape[:1] or not len(limits):
        raise InputError("constraints", f"shapes {rows.shape} and {limits.shape}", remedy)
    if not (np.all(np.isfinite(rows)) and np.all(np.isfinite(limits))):
        raise InputError("constraints", "values that are not finite", "Leave out limits that are infinite.")
    if not np.all(np.any(rows != 0, 1)):
        raise InputError("constraints", "a row of zeros", "Give each limit the coefficients of its parameters.")
    return rows, limits


def walls_of(constraints: tuple[np.ndarray, np.ndarray] | None, reference: Reference) -> Walls | None:
    """``A (c + S a) ≤ b`` with normals of unit length."""
    if constraints is None:
        return None
    rows, limits = constraints
    if reference.bend is not None and np.any(rows[:, list(reference.bend.index)]):
        raise InputError("reference", "one with bent log spreads, which are constrained", "Leave the reference out.")
    normal = rows @ np.asarray(reference.matrix)
    length = np.linalg.norm(normal, axis=1)
    limit = (limits - rows @ np.asarray(reference.center)) / length
    return Walls(jnp.asarray(normal / length[:, None]), jnp.asarray(limit))


def check_centre(walls: Walls | None, reference: Reference) -> None:
    """Refuse a reference about a mode outside: paths about it would meet the walls all the time."""
    if walls is None or reference.control is None:
        return
    if not bool(walls.inside(jnp.zeros((1, walls.dim)))[0]):
        raise InputError(
            "reference",
            "that of a mode outside the constraints",
            "Give a fedpdmc.Reference with its centre inside and the scale of the posterior, or reference='identity'.",
        )


def start_inside(walls: Walls | None, a, step, told: bool):
    """Starts of chains inside the walls: a step from an interior point, shortened before a wall; given points are kept.

    Raises
    ------
    InputError
        A point is outside.
    """
    if walls is None:
        return a if told else np.asarray(a) + np.asarray(step)
    if not bool(jnp.all(walls.inside(a))):
        found = "a starting point" if told else "the usual starting point"
        raise InputError("init", f"{found} outside the constraints", "Give init= inside all of them.")
    return a if told else walls.reachable(a, step)
