"""``sample``: from sites and a prior to a posterior."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import jax
import numpy as np

from fedpdmc.coordinates import Reference
from fedpdmc.dynamics import Dynamics
from fedpdmc.errors import InputError
from fedpdmc.federation.base import message_bytes
from fedpdmc.method import Method, choose
from fedpdmc.posterior import Posterior
from fedpdmc.potentials import Quadratic
from fedpdmc.precision import double_precision
from fedpdmc.progress import Display
from fedpdmc.redistribution import Redistributed
from fedpdmc.run import Run
from fedpdmc.site import Site, local_columns
from fedpdmc.store import LEAST_DRAWS, MOST_DRAWS, DrawStore, SkeletonStore, Store

DEFAULT_ESS = 1000.0
FIRST_BLOCK = 10.0
WHITENED_BURN_IN = 5.0
# Effective samples that a chain on a good reference makes per unit of process time, for the first guess of a block.
USUAL_YIELD = 0.2
MOST_GROWTH = 4.0
# Objections per unit of time above which a rotation about the reference is not worth its while.
MANY_OBJECTIONS = 2.0
MOST_BLOCKS = 40
# With keep="draws" a block is cut so that its knots stay within this many bytes.
BLOCK_BYTES = 2**26
PLANS_PER_BLOCK, MOST_PIECES = 5000, 20


@double_precision
def sample(
    sites: Sequence[Site] | Site,
    prior: Quadratic | Redistributed | None = None,
    *,
    prior_at: str = "coordinator",
    dynamics: Dynamics | None = None,
    reference: Reference | str | None = None,
    control: str | None = None,
    chains: int | None = None,
    duration: float | None = None,
    ess: float | None = None,
    burn_in: float | None = None,
    init: Any = None,
    seed: int | None = None,
    bounds: str = "certified",
    keep: str = "skeleton",
    names: Sequence[str] | None = None,
    progress: bool = True,
) -> Posterior:
    """Draw from the posterior ``π(x) ∝ exp(−U_0(x) − Σ_m U_m(x))``, exactly, without pooling the sites' records.

    Parameters
    ----------
    sites : sequence of Site
        The owners of the data.
    prior : Quadratic or Redistributed, optional
        From `fedpdmc.models`; flat if None.
    prior_at : {"coordinator", "sites", "extra"}
        Who walks with the prior: the coordinator in its plans, the sites in proportion to their records, or an extra
        site. The posterior is the same. `Redistributed` has a place of its own.
    dynamics : Dynamics, optional
        None: the few-rounds method, `Boomerang` on the Laplace reference with quadratic control variates.
    reference : Reference or "laplace", optional
        Whitened coordinates. None with explicit dynamics: the identity.
    control : {"none", "linear", "quadratic"}, optional
        Public quadratics moved from the sites to the coordinator. None with explicit dynamics: "none".
    chains : int, optional
        Chains that run side by side and share every message. None: 64, or as many as ``ess`` calls for in the few-rounds
        method.
    duration : float, optional
        Process time of every chain after the burn-in.
    ess : float, optional
        Go on in whole blocks until the worst bulk ESS of coordinates and energy reaches this; 1000 if neither is given.
    burn_in : float, optional
        Process time of every chain that is thrown away first.
    init : array of shape (d,) or (chains, d), optional
        Where the chains start.
    seed : int, optional
    bounds : {"certified"}
        Every event time is drawn under a proved bound.
    keep : {"skeleton", "draws"}
        All events, or exact moments and a bounded number of draws.
    names : sequence of str, optional
        The parameters' names.
    progress : bool
        Show a progress bar on a terminal.

    Returns
    -------
    Posterior

    Raises
    ------
    InputError
        An argument cannot be used; nothing has run.
    BoundViolation
        A rate exceeded its certified bound: a bug.
    """
    check_length(duration, ess)
    if burn_in is not None and not 0 <= _number(burn_in) < float("inf"):
        raise InputError("burn_in", repr(burn_in), "Give a finite process time that is zero or positive.")
    method = choose(sites, prior, prior_at, dynamics, reference, control, chains, init, seed, bounds, keep, names, ess)
    wanted = _burn_in(burn_in, duration, method)
    sampler = Sampler(method, wanted, keep)
    if wanted > 0:
        sampler.burn_in(progress)
    return sampler.extend(duration=duration, ess=ess, progress=progress)


def check_length(duration: float | None, ess: float | None) -> None:
    """At most one of them, and positive."""
    if duration is not None and ess is not None:
        raise InputError("duration, ess", "both", "Give one of them.")
    for name, value in (("duration", duration), ("ess", ess)):
        if value is not None and not 0 < _number(value) < float("inf"):
            raise InputError(name, repr(value), "Give a positive finite number.")


def _number(value: Any) -> float:
    """A real number, or nan for what is none."""
    return float(value) if isinstance(value, (int, float, np.integer, np.floating)) else float("nan")


def _burn_in(burn_in: float | None, duration: float | None, method: Method) -> float:
    if burn_in is not None:
        return float(burn_in)
    if method.whitened:
        return WHITENED_BURN_IN
    return FIRST_BLOCK if duration is None else 0.1 * float(duration)


class Sampler:
    """A run and what has been kept of it; `extend` leaves this one as it is and returns the next posterior."""

    def __init__(self, method: Method, burn_in: float, keep: str):
        self.method, self.keep = method, keep
        self.burn_in_time = burn_in
        self.run = Run(
            method.federation(),
            method.coordinator(),
            method.start(burn_in),
            jax.random.fold_in(jax.random.key(method.seed), 1),
        )
        self.burn_in_events = np.zeros(method.chains, dtype=np.int64)
        flow = method.dynamics.flow
        self.store: Store = SkeletonStore(flow) if keep == "skeleton" else DrawStore(flow)

    def burn_in(self, progress: bool) -> None:
        """Run to process time zero and keep nothing."""
        with Display(progress, "burn-in") as display:
            for until in self._blocks(0.0, pieces=1):
                self.run.advance(until, lambda block: None, display.tick)
        self.burn_in_events = self.run.events

    def extend(self, *, duration: float | None = None, ess: float | None = None, progress: bool = True) -> Posterior:
        """Go on by ``duration``, or until the worst ESS reaches ``ess``."""
        check_length(duration, ess)
        following = copy.copy(self)
        following.run, following.store = copy.copy(self.run), self.store.copy()
        with Display(progress, "sampling") as display:
            try:
                if duration is not None:
                    following._advance(following.run.time + float(duration), display)
                else:
                    following._until(DEFAULT_ESS if ess is None else float(ess), display)
            except KeyboardInterrupt:
                if following.run.time <= max(self.run.time, 0.0):
                    raise
                warnings.warn(
                    "Interrupted: the unfinished block is dropped, and the posterior ends at process time "
                    f"{following.run.time:g}.",
                    stacklevel=2,
                )
        following._warn_if_far()
        return following.posterior()

    def _warn_if_far(self) -> None:
        """Say so if the posterior is too far from its reference for the few-rounds method to be wise."""
        span = max(self.run.time, 0.0)
        if not (self.method.whitened and self.method.control_name == "quadratic" and span > 0):
            return
        rate = float(np.mean(self.run.events - self.burn_in_events)) / span
        if self.method.dynamics.flow.rotating and rate > MANY_OBJECTIONS:
            warnings.warn(
                f"The sites object {rate:.2g} times per unit of process time: the posterior is far from its Laplace "
                "reference (heavy tails, or few records). The draws are exact, but dynamics=fedpdmc.ZigZag() or "
                "BouncyParticle() may need less time.",
                stacklevel=4,
            )

    def _advance(self, until: float, display: Display) -> None:
        # Chains wait for each other at the end of a block: few blocks, of many plans each.
        plans = self.run.plans.mean() / max(self.burn_in_time + self.run.time, 1e-9) * (until - self.run.time)
        pieces = int(np.clip(plans / PLANS_PER_BLOCK, 1, MOST_PIECES))
        for stop in self._blocks(until, pieces):
            self.run.advance(stop, self.store.append, display.tick)
            if display.visible:
                so_far = self.posterior()
                display.quality(min(so_far.ess().values()), max(so_far.rhat().values()))

    def _blocks(self, until: float, pieces: int):
        """Process times at which all chains meet; with keep='draws' they follow the rate of events, to bound memory."""
        begin = self.run.time
        if self.keep == "skeleton":
            yield from (begin + (until - begin) * (k + 1) / pieces for k in range(pieces))
            return
        step, row = (until - begin) / 64, 8 * (2 * self.method.dim + 2)
        while (now := self.run.time) < until:
            knots = max(float(self.run.plans.sum()), 1.0)
            yield until if now + 1.5 * step >= until else now + step
            made = max(float(self.run.plans.sum()) - knots, 1.0) * row
            step *= float(np.clip(BLOCK_BYTES / made, 0.25, 4.0))

    def _until(self, target: float, display: Display) -> None:
        """Append whole blocks, each as long as the ESS so far suggests, and look at the ESS between them only."""
        if self.keep == "draws" and target > LEAST_DRAWS * self.method.chains:
            raise InputError(
                "ess",
                f"{target:g} with keep='draws', which keeps {LEAST_DRAWS} to {MOST_DRAWS} draws of each chain",
                "Ask for less, take more chains, or use keep='skeleton'.",
            )
        first = FIRST_BLOCK
        if self.method.whitened:
            first = float(np.clip(target / (USUAL_YIELD * self.method.chains), FIRST_BLOCK, 100 * FIRST_BLOCK))
        length = first
        for _ in range(MOST_BLOCKS):
            self._advance(max(self.run.time, 0.0) + length, display)
            found = self.posterior().ess()
            worst = min(found.values())
            if worst >= target:
                return
            span = self.run.time
            need = span * (1.05 * target / max(worst, 1.0) - 1.0)
            length = float(np.clip(need, 0.1 * span, (MOST_GROWTH - 1) * span))
        warnings.warn(
            f"The worst effective sample size is {worst:.0f} of the {target:.0f} asked for after {MOST_BLOCKS} blocks "
            f"({min(found, key=lambda name: found[name])}). Use extend(), more chains, or another dynamics.",
            stacklevel=3,
        )

    @double_precision
    def posterior(self) -> Posterior:
        """What has been drawn so far."""
        method, rounds = self.method, self.run.rounds
        counts = {
            "rounds": rounds + method.reference.rounds,
            "messages": [2 * (rounds + self._reference_rounds(site)) for site in method.sites],
            "bytes": [self._bytes(site, rounds) for site in method.sites],
            "events": self.run.events - self.burn_in_events,
            "gradient_evaluations": self.run.passes,
        }
        return Posterior(
            self.store, method.reference, method.dynamics, method.names, counts, self._settings(), self
        )  # fmt: skip

    def _reference_rounds(self, site: Site) -> int:
        reference = self.method.reference
        return reference.rounds if site.name in (reference.bytes or {}) else 0

    def _bytes(self, site: Site, rounds: int) -> int:
        method = self.method
        columns = local_columns(site, method.opening(site))
        sent = method.dim if columns is None else len(columns)
        made = (method.reference.bytes or {}).get(site.name, 0)
        share = method.redistribution > 0
        return made + rounds * sum(message_bytes(method.chains, method.segments, sent, method.dynamics.flips, share))

    def _settings(self) -> dict[str, Any]:
        method = self.method
        return {
            "dynamics": repr(method.dynamics),
            "reference": "laplace" if method.whitened else "diagonal" if method.reference.diagonal else "dense",
            "control": method.control_name,
            "prior_at": method.prior_at if method.prior is not None else "flat",
            "redistribution": method.redistribution,
            "chains": method.chains,
            "segments": method.segments,
            "burn_in": self.burn_in_time,
            "duration": max(self.run.time, 0.0),
            "seed": method.seed,
            "bounds": "certified",
            "keep": self.keep,
            "sites": [site.name for site in method.sites],
            "versions": {name: metadata.version(name) for name in ("fedpdmc", "jax", "jaxlib", "numpy", "equinox")},
        }
