"""What a user asks for: the arguments of ``sample``, each checked by itself before anything else happens."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from fedpdmc.dynamics import Dynamics
from fedpdmc.dynamics.jumps import BOUNCES
from fedpdmc.errors import InputError
from fedpdmc.members.member import Member
from fedpdmc.models.grouped import SpreadPrior
from fedpdmc.models.mixture_prior import MixturePrior
from fedpdmc.potentials import Quadratic
from fedpdmc.sampling.prior_redistribution import Redistributed
from fedpdmc.validation import integer, non_negative, one_of, optional_seed, positive
from fedpdmc.whitening import Reference

REFERENCES, CONTROLS = ("vb", "laplace", "diagonal", "identity"), ("none", "linear", "quadratic")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Settings:
    """The arguments of `fedpdmc.sample`, with its defaults. None is what `fedpdmc.sampling.defaults` chooses.

    Raises
    ------
    InputError
        An argument that cannot be used whatever the others are.
    """

    sites: Sequence[Member] | Member
    prior: Quadratic | SpreadPrior | MixturePrior | Redistributed | Callable | None = None
    prior_at: str = "coordinator"
    dynamics: Dynamics | None = None
    reference: Reference | str | None = None
    control: str | None = None
    chains: int | None = None
    duration: float | None = None
    ess: float | None = None
    burn_in: float | None = None
    init: Any = None
    seed: int | None = None
    bounds: str = "certified"
    keep: str = "skeleton"
    names: Sequence[str] | None = None
    constraints: Any = None
    bounce: str | None = None

    def __post_init__(self):
        check_length(self.duration, self.ess)
        one_of("prior_at", self.prior_at, ("coordinator", "sites", "extra"))
        one_of("bounds", self.bounds, ("certified", "adaptive"))
        one_of("keep", self.keep, ("skeleton", "draws"))
        if self.bounce is not None:
            one_of("bounce", self.bounce, BOUNCES)
        optional_seed("seed", self.seed)
        if self.burn_in is not None:
            non_negative("burn_in", self.burn_in, "Give a finite process time that is zero or positive.")
        if self.chains is not None:
            integer("chains", self.chains, 1)
        if self.control is not None:
            one_of("control", self.control, CONTROLS)
        if self.dynamics is not None and not isinstance(self.dynamics, Dynamics):
            found = repr(self.dynamics)
            raise InputError("dynamics", found, "Give one such as fedpdmc.ZigZag() or fedpdmc.Boomerang().")
        if isinstance(self.reference, str):
            one_of("reference", self.reference, REFERENCES)
        elif self.reference is not None and not isinstance(self.reference, Reference):
            remedy = "Give None, 'vb', 'laplace', 'diagonal', 'identity' or a fedpdmc.Reference."
            raise InputError("reference", type(self.reference).__name__, remedy)
        if isinstance(self.prior, Redistributed) and self.prior_at != "coordinator":
            found = f"{self.prior_at!r} with a Redistributed prior"
            raise InputError("prior_at", found, "Leave it out: the sites hold the prior.")
        if isinstance(self.prior, MixturePrior) and self.prior_at != "coordinator":
            found = f"{self.prior_at!r} with a prior that has scales"
            raise InputError("prior_at", found, "Leave it out: the coordinator walks with it.")


def check_length(duration: float | None, ess: float | None) -> None:
    """At most one of them, and positive."""
    if duration is not None and ess is not None:
        raise InputError("duration, ess", "both", "Give one of them.")
    for name, value in (("duration", duration), ("ess", ess)):
        if value is not None:
            positive(name, value)


def check_names(names: Any, dim: int, usual: Any = None) -> list[str]:
    """One distinct name for each parameter; ``usual`` are the models' own, for an error to show."""
    if names is None:
        return [f"x{i}" for i in range(dim)]
    try:
        names = [str(name) for name in names]
    except TypeError as error:
        raise InputError("names", repr(names), f"Give {dim} names, one for each parameter.") from error
    if len(names) != dim:
        own = "" if usual is None else f" The models call them {', '.join(map(str, usual))}."
        raise InputError("names", f"{len(names)} names", f"Give {dim}, one for each parameter.{own}")
    if len(set(names)) != dim or "energy" in names:
        raise InputError("names", repr(names), "Give distinct names, none of them 'energy'.")
    return names


def check_init(init: Any, chains: int, dim: int) -> np.ndarray | None:
    """None, one starting point, or one for each chain."""
    if init is None:
        return None
    try:
        array = np.asarray(init, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise InputError("init", repr(init), f"Give an array of shape ({dim},) or ({chains}, {dim}).") from error
    if array.shape not in ((dim,), (chains, dim)):
        raise InputError("init", f"shape {array.shape}", f"Give an array of shape ({dim},) or ({chains}, {dim}).")
    if not np.all(np.isfinite(array)):
        raise InputError("init", "values that are not finite", "Give finite starting points.")
    return array


def check_reference(reference: Reference, dim: int) -> Reference:
    """A reference of the right size with a scale that can be inverted."""
    scale, center = np.asarray(reference.scale_tril), np.asarray(reference.center)
    if center.shape != (dim,) or scale.shape not in ((dim,), (dim, dim)):
        raise InputError(
            "reference",
            f"center of shape {center.shape}, scale of shape {scale.shape}",
            f"Give shapes ({dim},) and ({dim}, {dim}).",
        )
    if not (np.all(np.isfinite(scale)) and np.all(np.isfinite(center))):
        raise InputError("reference", "values that are not finite", "Give finite numbers.")
    singular = np.any(scale == 0) if scale.ndim == 1 else np.linalg.cond(scale) > 1e14
    if singular:
        raise InputError("reference", "a singular scale", "Give a scale matrix that can be inverted.")
    return dataclasses.replace(reference, center=jnp.asarray(center, float), scale_tril=jnp.asarray(scale, float))
