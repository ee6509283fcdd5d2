"""The public potential: what the coordinator walks with in its plans."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from fedpdmc.dynamics import Dynamics
from fedpdmc.members.member import Member
from fedpdmc.models.mixture_prior import MixturePrior
from fedpdmc.potentials import ControlVariate, Potential, Quadratic
from fedpdmc.whitening import Reference

# The size of a sum relative to its largest term below which it is rounding only.
CANCELLED = 1e-10


def public_potential(
    sites: Sequence[Member],
    prior: Quadratic | None,
    controls: Mapping[str, ControlVariate],
    reference: Reference,
    dynamics: Dynamics,
    mixture: MixturePrior | None = None,
) -> Potential | None:
    """The coordinator's potential, whitened: prior and control variates, less ``½|a|²`` on rotations; None if zero.

    A ``mixture`` takes the place of the prior, which is then its stand-in.
    """
    dim = reference.dim
    if mixture is not None:
        base = public_potential(sites, mixture.normal, controls, reference, dynamics)
        base = Quadratic(jnp.zeros((dim, dim)), jnp.zeros(dim)) if base is None else base
        assert isinstance(base, Quadratic)
        return mixture.whitened(base, reference)
    terms = [] if prior is None else [prior]
    # A control variate that belongs to no one site is the sum of all.
    own = {site.name: site.coordinates for site in sites}
    terms += [control.quadratic.embedded(dim, own.get(name)) for name, control in controls.items()]
    # By NumPy, so that nothing is compiled for it.
    parts = [_whitened(term, reference) for term in terms]
    if dynamics.flow.rotating:
        parts.append((-np.eye(dim), np.zeros(dim)))
    if not parts:
        return None
    precision, linear = (functools.reduce(np.add, terms) for terms in zip(*parts, strict=True))
    # Nothing is left only if the terms cancel to rounding; a wide prior is small and counts.
    left = _largest(precision) > CANCELLED * max(_largest(part) for part, _ in parts)
    left |= _largest(linear) > CANCELLED * max(_largest(part) for _, part in parts)
    return Quadratic(jnp.asarray(precision), jnp.asarray(linear)).separated() if left else None


def _whitened(term: Quadratic, reference: Reference) -> tuple[np.ndarray, np.ndarray]:
    """The quadratic in whitened coordinates, as `Quadratic.whiten` computes it."""
    center, scale = np.asarray(reference.center), np.asarray(reference.scale_tril)
    rows = np.diag(scale) if reference.diagonal else scale
    precision, linear = np.asarray(term.precision), np.asarray(term.linear)
    return rows.T @ precision @ rows, rows.T @ (precision @ center + linear)


def _largest(array) -> float:
    return float(np.max(np.abs(array)))
