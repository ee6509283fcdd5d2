"""The two interfaces that the driver uses: a federation carries plans to sites, and an engine moves the chains."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key

from fedpdmc._jax.precision import double_precision
from fedpdmc.clocks import VIOLATED, Clock
from fedpdmc.console.progress import Tick
from fedpdmc.errors import BoundViolation, NotFinite
from fedpdmc.plan import Arrival, Plan
from fedpdmc.privacy.accountant import AccountStatus
from fedpdmc.results.skeleton import Block
from fedpdmc.sampling.coordinator import Coordinator, PublicKeys, State
from fedpdmc.sampling.run_state_arrays import Position

Log = Callable[[Plan, Arrival], None]


class Federation(abc.ABC):
    """A way to bring plans to sites and arrivals back from them."""

    names: tuple[str, ...]  # of the sites, in the order of the arrivals
    columns: list[np.ndarray | None]  # the coordinates that each site is sent; None for all
    clocks: Mapping[str, Clock] = MappingProxyType({})  # of the sites in this process
    choices: Mapping[str, dict[str, Any]] = MappingProxyType(
        {}
    )  # why they have these clocks, as far as it is known here
    bytes: np.ndarray | None = None  # messages and bytes between the coordinator and each site so far, if counted
    needs_time: bool = False  # sites must know when a plan begins: those with private latents on a network
    until: float = 0.0  # the end of the block under way
    parts: Sequence[Federation] = ()  # of several that are joined

    @abc.abstractmethod
    def ask(self, plans: Sequence[Plan | None]) -> list[Arrival | None]:
        """One round: to each site its own plan, and its arrival, with marks among its own coordinates.

        A site whose plan is None is not asked. Of the others, chains whose plan has no length are not.
        """

    def exchange(self, plan: Plan) -> list[Arrival]:
        """One round with every site: their arrivals along the plan, in the order of `names`."""
        plans: list[Plan | None] = []
        for place, own in enumerate(self.columns):
            share = None if plan.share is None else plan.share[:, place]
            index = slice(None) if own is None else own
            part = Plan(plan.number, plan.start[:, index], plan.duration, plan.velocity[..., index], share)
            plans.append(plan if own is None and share is None else part)
        answers = self.ask(plans)
        return [with_all_marks(a, own) for a, own in zip(answers, self.columns, strict=True) if a is not None]

    @property
    def evaluations(self) -> np.ndarray:
        """Passes over each site's records so far; zero for a site that does not report them."""
        return np.zeros(len(self.names), dtype=np.int64)

    @property
    def accounts(self) -> list[AccountStatus]:
        """The account of each site that has one."""
        return [account for part in self.parts for account in part.accounts]

    @property
    def privacy(self) -> dict[str, Any]:
        """What each site with an account in this process has granted and revealed."""
        return {name: report for part in self.parts for name, report in part.privacy.items()}

    def continue_accounts(self, privacy: dict[str, Any]) -> None:
        """Add what sites with accounts had revealed before this process continued the run, as `privacy` reported it."""
        for part in self.parts:
            part.continue_accounts(privacy)


class JoinedFederation(Federation):
    """Several federations as one.

    Parameters
    ----------
    parts : sequence of Federation
    names : sequence of str, optional
        The order of all sites; by default part after part.
    logs : mapping of callables, optional
        By name, for sites that have one: called with every plan that the site receives, and its arrival.
    """

    def __init__(
        self, parts: Sequence[Federation], names: Sequence[str] | None = None, logs: Mapping[str, Log] | None = None
    ):
        self.parts, self.logs = tuple(parts), dict(logs or {})
        self.names = tuple(names or (name for part in self.parts for name in part.names))
        self.columns = self._in_order(part.columns for part in self.parts)
        self.clocks = {name: clock for part in self.parts for name, clock in part.clocks.items()}
        self.choices = {name: choice for part in self.parts for name, choice in part.choices.items()}
        self.needs_time = any(part.needs_time for part in self.parts)

    def _in_order(self, values: Iterable[Iterable[Any]]) -> list[Any]:
        found = {}
        for part, own in zip(self.parts, values, strict=True):
            found |= dict(zip(part.names, own, strict=True))
        return [found[name] for name in self.names]

    @property
    def bytes(self) -> np.ndarray | None:  # type: ignore[override]
        """Messages and bytes between the coordinator and each site so far, if counted in any part."""
        counts = [part.bytes for part in self.parts]
        if all(count is None for count in counts):
            return None
        # Sites of this process cost none.
        pairs = zip(self.parts, counts, strict=True)
        return np.array(self._in_order([0] * len(part.names) if own is None else own for part, own in pairs))

    def ask(self, plans: Sequence[Plan | None]) -> list[Arrival | None]:
        """One round, part after part."""
        sent, found = dict(zip(self.names, plans, strict=True)), []
        for part in self.parts:
            part.until = self.until
            found.append(part.ask([sent[name] for name in part.names]))
        arrivals = self._in_order(found)
        for name, arrival in zip(self.names, arrivals, strict=True):
            if name in self.logs and arrival is not None:
                # Chains without an event have mark −1.
                rang = arrival.rang.reshape(arrival.rang.shape + (1,) * (arrival.mark.ndim - 1))
                marked = Arrival(arrival.time, arrival.rang, jnp.where(rang, arrival.mark, -1))
                self.logs[name](*jax.tree.map(np.asarray, (sent[name], marked)))
        return arrivals

    @property
    def evaluations(self) -> np.ndarray:
        """Passes over each site's records so far; zero for a site that does not report them."""
        return np.array(self._in_order(part.evaluations for part in self.parts), np.int64)


class BlockMemory(NamedTuple):
    """How the blocks of a run are divided so that their knots fit into memory (``keep="draws"``)."""

    most: int  # bytes of a block
    per_round: int = 0  # bytes of a round apart from its numbers
    first: float = float("inf")  # largest process time of the first block: the memory for an event is known after it


class Engine(abc.ABC):
    """The chains of a run, moved on in whole blocks of process time.

    All engines compute the same bits from the same state and keys. A copy (`copy.copy`) is an independent run from there on.

    Parameters
    ----------
    federation : Federation
    coordinator : Coordinator
    state : State
        Where the chains start; their process time is minus the burn-in.
    key : key
        The coordinator's randomness.

    Attributes
    ----------
    progress
        Where the chains are between two blocks, and what is known of the sites.
    rounds : int
        Serial exchanges so far: in one every chain that has not reached the end of its block sends one plan.
    asked : (2, sites)
        Of each site: exchanges that it took part in, and plans of single chains that it was sent.
    selective : bool
        Whether only the sites whose last arrival is no longer valid are asked (`one_round`).
    latents : tuple
        For sites in this process with private latents, at the end of every block after the burn-in: the process time, the
        positions and each site's latents. They are handed to the sites only.
    continued : bool
        Whether latents were given back to the sites of a run that was saved.
    sites_remember : bool
        Whether sites keep what they have answered. Then a block that was interrupted is finished as it was planned before
        anything else, a run cannot start again, and only the last of several copies can continue.
    memory : BlockMemory
    """

    progress: Any
    selective: bool
    latents: tuple[tuple[float, np.ndarray, dict[str, np.ndarray]], ...] = ()
    continued: bool = False
    sites_remember: ClassVar[bool]
    memory: ClassVar[BlockMemory]

    @double_precision
    def __init__(self, federation: Federation, coordinator: Coordinator, state: State, key: Key[Array, ""]):
        self.federation: Any = federation
        self.coordinator, self.keys = coordinator, PublicKeys.of(key, state.a.shape[0])
        self.rounds, self.asked = 0, np.zeros((2, len(federation.names)), np.int64)
        # Passes and violations of each site before this process continued the run.
        self._before = np.zeros((2, len(federation.names)), np.int64)
        self._start(state)

    @abc.abstractmethod
    def _start(self, state: State) -> None:
        """Make ``progress`` and ``selective`` of a run that is between two blocks."""

    @double_precision
    def restore(self, position: Position) -> None:
        """Continue from where a run was between two blocks."""
        self._start(position.chains)
        self.rounds, self.asked = position.rounds, position.asked
        self._before = np.stack([position.passes, position.violations])

    @abc.abstractmethod
    def advance(self, until: float, keep: Callable[[Block], None], tick: Callable[[Tick], None]) -> None:
        """Run every chain to process time ``until``: one block, all of it or nothing.

        ``keep`` receives the block once it is complete. An interrupt or an error leaves the run where it was before.
        """

    @property
    def state(self) -> State:
        """Where every chain is."""
        return self.progress.state

    @property
    def settled(self) -> dict[str, np.ndarray]:
        """Where the latents of sites in this process are, in their private coordinates."""
        return {}

    def set_latents(self, settled: dict[str, np.ndarray]) -> None:
        """Put latents to where they were at the end of a run that was saved."""
        self.continued = bool(settled)

    @property
    def passes(self) -> np.ndarray:
        """Passes over each site's records so far, zero for sites that do not report them."""
        return self.federation.evaluations

    @property
    def violations(self) -> np.ndarray:
        """How often each site saw a rate above a bound that is not certified."""
        return np.zeros(len(self.federation.names), dtype=np.int64)

    @property
    def time(self) -> float:
        """Process time that all chains have reached."""
        return float(np.min(np.asarray(self.state.t)))

    @property
    def plans(self) -> np.ndarray:
        """Number of the next plan of each chain."""
        return np.asarray(self.state.number)

    @property
    def events(self) -> np.ndarray:
        """Jumps of each chain so far."""
        return np.asarray(self.state.events)


def with_all_marks(arrival: Arrival, columns: np.ndarray | None) -> Arrival:
    """An arrival with its marks among all coordinates."""
    return arrival if columns is None else Arrival(arrival.time, arrival.rang, jnp.asarray(columns)[arrival.mark])


# Faults ----------------------------------------------------------------------------------------------------------------


def raise_faults(names, faults: np.ndarray) -> None:
    """Raise for the first fault in an array of shape (sites, chains)."""
    bad = np.argwhere(faults != 0)
    if bad.size:
        site, chain = (int(i) for i in bad[0])
        raise (BoundViolation if faults[site, chain] == VIOLATED else NotFinite)(names[site], chain)
