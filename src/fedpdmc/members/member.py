"""What a coordinator knows about a member of a federation, in this process or remote."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedpdmc.bent_coordinates import Bend


class Member(abc.ABC):
    """A site as `fedpdmc.sample` and `fedpdmc.laplace` see it.

    Attributes
    ----------
    name : str
    dim : int
        Number of parameters that it depends on.
    coordinates : array or None
        The entries of the parameter vector that it depends on; all if None.
    records : int
        Zero if not disclosed.
    budget : Budget or None
        Its privacy budget, if the site is in this process.
    model : UserModel or None
        The user's own function, if its model is one and is in this process.
    log : callable or None
        Called with every plan and arrival of a site in this process.
    bounds : Bounds or None
        The declared bounds of the records of a remote site whose derivatives are noisy.
    naming : object or None
        Names of its parameters (``names``) and the function from them to the variables that are reported (``constrain``), in
        place of those of its model.
    latents : int
        Number of private latents of a site in this process; for a remote site 1 if it has any, else 0.
    spreads : tuple of int
        Which of its parameters are log spreads of grouped effects.
    federation : Federation or None
        The federation through which a remote site is reached; None for a site in this process.
    grid : float
        Relative spacing of the derivatives that a remote site releases; zero if they are exact or noisy.
    """

    name: str
    dim: int
    coordinates: np.ndarray | None
    records: int
    budget: Any = None
    model: Any = None
    log: Any = None
    bounds: Any = None
    naming: Any = None
    latents: int = 0
    spreads: tuple[int, ...] = ()
    federation: Any = None
    grid: float = 0.0

    @property
    @abc.abstractmethod
    def noisy(self) -> bool:
        """Whether its derivatives are noisy and charged."""

    @abc.abstractmethod
    def derivatives(self, x: np.ndarray, spread: np.ndarray | None = None) -> tuple[float, np.ndarray, np.ndarray]:
        """``U_m``, ``∇U_m`` and ``∇²U_m`` at a point, or their means over ``N(x, S Sᵀ)`` with ``S = spread``."""

    def bent(self, bend: Bend | None) -> Member:
        """The same member as a function of coordinates before a bend; itself if it is None."""
        if bend is None:
            return self
        raise NotBent


class NotBent(Exception):
    """A member that is no function of bent coordinates."""


class DescribedSites(Sequence):
    """Sites that come with a prior: `fedpdmc.sites` makes them from a table and a formula.

    Attributes
    ----------
    prior
        The prior that `fedpdmc.sample` uses if it is given no other.
    prior_lines : sequence of str
        The same in words, for every parameter.
    """

    prior: Any = None
    prior_lines: Sequence[str] = ()
