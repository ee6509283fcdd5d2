"""What the user gets: moments, draws, diagnostics, ArviZ, provenance."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from fedpdmc.coordinates import Reference
from fedpdmc.diagnostics import by_quantity, energy
from fedpdmc.dynamics import Dynamics
from fedpdmc.errors import InputError
from fedpdmc.interrupts import deferred
from fedpdmc.precision import double_precision
from fedpdmc.quiet import import_arviz
from fedpdmc.skeleton import Skeleton
from fedpdmc.store import SkeletonStore, Store

if TYPE_CHECKING:
    from fedpdmc.sampler import Sampler
    from fedpdmc.variables import StoredVariables, Variables

# Gauss–Legendre nodes on each piece of path, and the longest piece of a rotation that they cover.
NODES = 4
LONGEST_PIECE = 0.5
# Draws per unit of process time for the diagnostics of rotating paths, while there are not too many.
DRAWS_PER_TURN = 8
# Draws of all chains that diagnostics look at, or a thousand of each chain if that is more.
MOST_DIAGNOSED = 2**16


class Posterior:
    """Draws and exact path integrals of a posterior, with how they were made.

    Attributes
    ----------
    names : list of str
        The parameters' names.
    rounds : int
        Serial exchanges with the sites, the making of the reference included.
    messages, bytes : arrays of shape (sites,)
        Messages and bytes exchanged with each site, both directions.
    events : array of shape (chains,)
        Accepted jumps of sites and coordinator; refreshments are not counted.
    gradient_evaluations : array of shape (sites,)
        Passes over each site's records, for one chain each; zero for sites that do not tell: private ones, those beside one
        with a budget or a log, and those of a study whose contract does not have it told.
    certified : bool
        Whether every event time was drawn under a proved bound.
    violations : array of shape (sites,)
        How often a rate was seen above a bound that was not certified; what went unseen is not counted.
    privacy : dict or None
        What each site with a budget has spent.
    settings : dict
        Settings, versions and seed.
    """

    def __init__(
        self,
        store: Store,
        reference: Reference,
        dynamics: Dynamics,
        names: list[str],
        counts: dict[str, Any],
        settings: dict[str, Any],
        sampler: Sampler | None = None,
        variables: Variables | StoredVariables | None = None,
    ):
        self.store, self.reference, self.dynamics, self._sampler = store, reference, dynamics, sampler
        self.names, self.settings, self._variables = names, settings, variables
        self.rounds: int = int(counts["rounds"])
        self.messages: np.ndarray = np.asarray(counts["messages"])
        self.bytes: np.ndarray = np.asarray(counts["bytes"])
        self.events: np.ndarray = np.asarray(counts["events"])
        self.gradient_evaluations: np.ndarray = np.asarray(counts["gradient_evaluations"])
        self.certified: bool = bool(counts.get("certified", True))
        self.violations: np.ndarray = np.asarray(counts.get("violations", np.zeros(len(self.messages), np.int64)))
        self.privacy: dict[str, Any] | None = counts.get("privacy")

    def __repr__(self) -> str:
        begin, end = self.store.span
        size = f"{len(self.names)} parameters, {self.chains} chains, process time {end - begin:g}"
        return f"Posterior({size}, {self.rounds} rounds)"

    @property
    def chains(self) -> int:
        """Number of chains."""
        return len(self.events)

    @property
    def duration(self) -> float:
        """Process time of each chain, without the burn-in."""
        begin, end = self.store.span
        return end - begin

    @property
    def most_draws(self) -> int:
        """How many draws of each chain can be asked for."""
        return self.store.most_draws

    @property
    def skeleton(self) -> Skeleton:
        """Events of all chains in whitened coordinates (not with keep='draws')."""
        if not isinstance(self.store, SkeletonStore):
            raise InputError("skeleton", "keep='draws'", "Run with keep='skeleton' to have the events.")
        return self.store.skeleton

    @double_precision
    def mean(self) -> np.ndarray:
        """Exact time average of x along the paths."""
        return np.asarray(self.reference.to_x(jnp.asarray(self.store.moments().mean())))

    @double_precision
    def cov(self) -> np.ndarray:
        """Exact time average of ``(x − mean)(x − mean)ᵀ`` along the paths."""
        scale = np.asarray(self.reference.matrix)
        cov = scale @ self.store.moments().cov() @ scale.T
        return (cov + cov.T) / 2

    @double_precision
    def draws(self, n: int) -> np.ndarray:
        """Positions equally spaced in process time over the common span of all chains, of shape (chains, n, d)."""
        if not isinstance(n, (int, np.integer)) or n < 1:
            raise InputError("draws(n)", repr(n), "Ask for at least one draw of each chain.")
        return np.asarray(self.reference.to_x(jnp.asarray(self.store.draws(int(n)))))

    @double_precision
    def expectation(self, f: Callable[[Any], Any]) -> np.ndarray:
        """Time average of ``f(x)`` along the paths by Gauss–Legendre quadrature on every segment.

        Parameters
        ----------
        f : callable
            A JAX function of one parameter vector of shape (d,), of a number or an array.
        """
        skeleton, flow = self.skeleton, self.dynamics.flow
        nodes, weights = np.polynomial.legendre.leggauss(NODES)
        average = jax.jit(lambda x, w: jnp.tensordot(w, jax.vmap(f)(self.reference.to_x(x)), 1))
        total, durations = None, skeleton.durations
        pieces = (
            np.maximum(np.ceil(durations / LONGEST_PIECE), 1).astype(int)
            if flow.rotating
            else np.ones(len(durations), int)
        )
        knot = np.repeat(np.arange(len(durations)), pieces)
        piece = np.arange(len(knot)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        length = durations[knot] / pieces[knot]
        for rows in np.array_split(np.arange(len(knot)), max(1, len(knot) // 2**14)):
            times = (piece[rows, None] + (nodes + 1) / 2) * length[rows, None]
            p, q = (np.asarray(w)[..., None] for w in flow.weights(jnp.asarray(times)))
            a = p * skeleton.a[knot[rows], None] + q * skeleton.v[knot[rows], None]
            w = length[rows, None] * weights / 2
            part = np.asarray(average(jnp.asarray(a.reshape(-1, a.shape[-1])), jnp.asarray(w.ravel())))
            total = part if total is None else total + part
        return np.asarray(total) / durations.sum()

    @property
    def transformed(self) -> bool:
        """Whether the model's variables are others than the coordinates that were sampled."""
        return self._variables is not None

    def diagnostic_draws(self) -> int:
        """Draws of each chain for ESS: not to miss what the paths know, at most one unit apart on rotations."""
        jumps = float(np.mean(self.events)) / max(len(self.names), 1)
        most = max(1000, MOST_DIAGNOSED // self.chains)
        n = int(np.clip(2 * jumps, 100, most))
        if self.dynamics.flow.rotating:
            n = int(np.clip(np.ceil(DRAWS_PER_TURN * self.duration), 32, max(most, np.ceil(self.duration))))
        return min(max(n, 8), self.store.most_draws)

    def _diagnose(self, function: str) -> dict[str, float]:
        draws = self.draws(self.diagnostic_draws())
        return by_quantity(function, draws, self.names, energy(draws, self.mean(), self.cov()))

    def ess(self) -> dict[str, float]:
        """Bulk effective sample size of every parameter and of the energy, over all chains."""
        found = self._diagnose("ess")
        if self._sampler is not None:
            self._sampler.judge(min(found.values()))
        return found

    def rhat(self) -> dict[str, float]:
        """Split, rank-normalised R-hat of every parameter and of the energy."""
        return self._diagnose("rhat")

    @deferred()
    def extend(self, *, duration: float | None = None, ess: float | None = None, progress: bool = True) -> Posterior:
        """Go on from where the run stopped, by a process time or up to an effective sample size."""
        if self._sampler is None:
            raise InputError(
                "extend",
                "a posterior loaded from disk",
                "Its sites are not there: extend the posterior that sample() returned.",
            )
        return self._sampler.extend(duration=duration, ess=ess, progress=progress)

    def summary(self) -> str:
        """A table of the parameters, and a line on how the run went."""
        from fedpdmc.report import summary

        return summary(self)

    def variables(self, n: int) -> dict[str, np.ndarray]:
        """Draws of the model's variables by name, each of shape (chains, n, …).

        The variables of a NumPyro model have their constrained values and their own shapes; a parameter of any other model
        is a variable itself.
        """
        x = self.draws(n)
        if self._variables is not None:
            return self._variables.of(x)
        return {name: x[..., i] for i, name in enumerate(self.names)}

    def to_arviz(self, draws: int = 1000):
        """The draws as an ArviZ ``InferenceData``, with the settings as attributes.

        The group ``posterior`` holds the model's variables. Where they are not the coordinates that were sampled, those are
        in ``unconstrained_posterior``.
        """
        az = import_arviz()

        data = az.from_dict(posterior=self.variables(draws), attrs={"fedpdmc": json.dumps(self.settings, default=str)})
        if self._variables is not None:
            x = self.draws(draws)
            data.add_groups({"unconstrained_posterior": {name: x[..., i] for i, name in enumerate(self.names)}})
        return data

    def save(self, path: str | Path) -> None:
        """Write everything to a zarr folder (an existing one is replaced)."""
        from fedpdmc.archive import save

        save(self, Path(path))
