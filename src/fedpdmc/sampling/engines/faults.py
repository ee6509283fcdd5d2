"""Faults that end a run: a rate above its bound, or one that is not finite."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from fedpdmc.clocks import VIOLATED, Clock, Path, Walk
from fedpdmc.enclosures import not_finite_along
from fedpdmc.errors import BoundViolation, NotFinite
from fedpdmc.potentials import Program


def raise_faults(names, faults: np.ndarray) -> None:
    """Raise for the first fault in an array of shape (sites, chains)."""
    bad = np.argwhere(faults != 0)
    if bad.size:
        site, chain = (int(i) for i in bad[0])
        raise (BoundViolation if faults[site, chain] == VIOLATED else NotFinite)(names[site], chain)


def not_finite(clock: Clock, columns: Any, path: Path | None, walk: Walk, chain: int) -> str | None:
    """The operation of a user's function at which a site's walk ended on a chain; None where it is not known."""
    potential = getattr(clock, "potential", None)
    if path is None or not isinstance(potential, Program):
        return None
    path = path if columns is None else path.restricted(jnp.asarray(columns))
    a, v = path.state(clock.dynamics, jnp.asarray(walk.segment), jnp.asarray(walk.offset))
    program = potential._program(clock.dynamics.flips)
    return not_finite_along(potential.value, program, np.asarray(a)[chain], np.asarray(v)[chain])
