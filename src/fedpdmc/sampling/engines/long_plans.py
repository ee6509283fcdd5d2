"""Rounds of long plans, one after the other: the coordinator's part and each group's walk are programs of their own.

A round of long plans takes so long that its few calls cost nothing. The programs are compiled side by side, which is sooner
than one loop that holds all of them, and the next one is traced meanwhile. Their results do not depend on the order.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from fedpdmc._jax.by_numpy import once
from fedpdmc._jax.compilation import compiled, on_device
from fedpdmc.clocks import LatentClock, Path
from fedpdmc.sampling.coordinator import Coordinator, PublicKeys
from fedpdmc.sampling.engines import compiled_gaussian, in_process_latents
from fedpdmc.sampling.engines.compiled_loop import Group, Progress, arrivals_of, earliest, is_faulty, move_on, steps
from fedpdmc.sampling.engines.event_buffer import Record

# Programs that are compiled at a time.
COMPILED_AT_A_TIME = 2


def applies(groups, coordinator: Coordinator, progress: Progress) -> bool:
    """Whether plans are long, and every site is asked about each of them."""
    return coordinator.segments > 1 and progress.requests is None and not compiled_gaussian.applies(groups, coordinator)


@compiled
def _plan(coordinator: Coordinator, keys: PublicKeys, now: Progress, answers, until, signs: bool):
    """The coordinator's part: apply the arrivals, and plan. Also returns what latents need to go back, and the knots."""
    moved = move_on(coordinator, keys, now, answers, until)
    still_open = moved.new | (now.open & ~moved.ready)
    planned = Progress(moved.state, moved.itinerary, (), still_open, moved.unplanned)
    back = now.itinerary.path, moved.state.t - now.state.t, moved.ready
    return _strong((planned, moved.new, back, Record.of_round(moved.knots, signs)))


@compiled
def _walk(group: Group, walks, back, path: Path, new: Bool[Array, " C"], cap: Float[Array, " C"] | None):
    """One group to the end of the plans; ``cap``: the earliest arrival of the groups that have walked before."""
    if back is not None:
        (walks,) = in_process_latents.gone_back((group,), (walks,), *back)

    def unfinished(carry):
        walks, new = carry
        return jnp.any(new) | ~jnp.all(jax.vmap(lambda clock, walk: clock.walk(walk).done)(group.clock, walks))

    # The first step is part of the loop, so that a step is compiled once.
    def step(carry):
        walks, new = carry
        return steps((group,), (walks,), path, new, cap)[0], jnp.zeros_like(new)

    walks, _ = jax.lax.while_loop(unfinished, step, (walks, new))
    first = None if cap is None else jnp.minimum(cap, earliest((group,), (walks,), True))
    return _strong((walks, arrivals_of(group, walks), first, is_faulty(group, walks)))


def _strong(tree):
    """Types as arguments have them: a program is then compiled once."""
    return jax.tree.map(lambda x: jax.lax.convert_element_type(x, x.dtype), tree)


@once
def _answers(groups: tuple[Group, ...], walks):
    return _strong([arrivals_of(group, walk) for group, walk in zip(groups, walks, strict=True)])


class LongPlans:
    """The rounds of a run.

    Parameters
    ----------
    groups : tuple of Group
    coordinator : Coordinator
    keys : PublicKeys
    progress : Progress
        Where the run is: what is compiled depends on its shapes.
    """

    def __init__(self, groups: tuple[Group, ...], coordinator: Coordinator, keys: PublicKeys, progress: Progress):
        self.groups, self.coordinator, self.keys = groups, coordinator, keys
        chains, several = progress.open.shape, sum(group.size for group in groups) > 1
        self._no_cap = on_device(np.full(chains, np.inf)) if several else None
        self._compile(progress)

    def _compile(self, progress: Progress) -> None:
        """All programs, the largest first."""
        path, new = progress.itinerary.path, progress.open
        back = path, progress.state.t, new
        with ThreadPoolExecutor(COMPILED_AT_A_TIME) as pool:
            waiting = []
            for place, group in enumerate(self.groups):
                args = group, progress.walks[place], self._back(group, back), path, new, self._no_cap
                waiting.append(pool.submit(_walk.lower(*args).compile))  # type: ignore[attr-defined]
            args = self._planned(_without_walks(progress), _answers(self.groups, progress.walks), jnp.asarray(0.0))
            waiting.append(pool.submit(_plan.lower(*args).compile))  # type: ignore[attr-defined]
            for program in waiting:
                program.result()

    def _planned(self, now: Progress, answers, until) -> tuple:
        return self.coordinator, self.keys, now, answers, until, self.coordinator.dynamics.unit_speed

    def _back(self, group: Group, back):
        return back if isinstance(group.clock, LatentClock) else None

    def run(self, progress: Progress, until: Float[Array, ""], limit: int) -> tuple[Progress, Record, int]:
        """Up to ``limit`` rounds; returns the progress, the knots and the number of rounds."""
        walks, answers = list(progress.walks), _answers(self.groups, progress.walks)
        now, records, broken, end = _without_walks(progress), [], bool(progress.broken), float(until)
        while len(records) < limit and not broken and np.any(np.asarray(now.open) | (np.asarray(now.state.t) < end)):
            now, new, back, record = _plan(*self._planned(now, answers, until))
            records.append(record)
            broken, cap = bool(now.broken), self._no_cap
            # The group of the prior, where there is one, is the last and costs least.
            for place in reversed(range(len(self.groups)) if np.any(new) else ()):
                group, path = self.groups[place], now.itinerary.path
                walks[place], answers[place], cap, faulty = _walk(
                    group, walks[place], self._back(group, back), path, new, cap
                )
                broken = broken or bool(faulty)
        run_so_far = Progress(now.state, now.itinerary, tuple(walks), now.open, jnp.asarray(broken))
        return run_so_far, Record.of_rounds(records), len(records)


def _without_walks(progress: Progress) -> Progress:
    return Progress(progress.state, progress.itinerary, (), progress.open, jnp.asarray(False))
