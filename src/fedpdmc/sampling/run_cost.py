"""The cost of a run: foreseen before anything is drawn, estimated on the way, and counted.

Events of sites that the few-rounds method meets in the long run are integrated along rays before anything is drawn. Where
they are many, or a tail is flat, another method is chosen; a run that turns out to be costly is warned about.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedpdmc._jax.by_numpy import once
from fedpdmc._jax.compilation import mapped
from fedpdmc._jax.precision import double_precision
from fedpdmc.console.progress import Tick, clock, report
from fedpdmc.console.warnings import warn
from fedpdmc.members.run_coordinates import local_columns
from fedpdmc.members.site import Member, Site
from fedpdmc.potentials import ControlVariate, Quadratic, bare
from fedpdmc.results.verdict import NARROW
from fedpdmc.sampling.arguments import PRIOR_SITE
from fedpdmc.sampling.defaults import MOST_CHAINS, Method, on_lines, usual_segments
from fedpdmc.sampling.engines.base import Engine
from fedpdmc.sampling.factory import opening
from fedpdmc.whitening import Reference

PAIRS = 32  # of opposite rays
NEAR = 48  # distances on each, evenly where a Gaussian has its mass
FAR = 24  # distances beyond, which grow
FARTHEST = 1e4  # standard deviations
TAIL = (3.0, 6.0)  # standard deviations between which the slope of a tail is measured
LEAST_SLOPE = 1.7  # of a tail, with which rotations mix
# The least slope on a reference that was made as wide as the tails, up to a thousandth of the mass. Effects of eight groups
# have 1.5 in the tail of their log scale: 103 rounds, with the right standard deviation, where Zig-Zag takes 1,700.
LEAST_COVERED = 1.0
FREQUENT_EVENTS = 0.1  # of sites in a unit of process time, from which more chains take fewer rounds
MOST_VALUES = 3e7  # of single records, that are evaluated
USUAL_VALUES = 3e6  # of single records, above which only as many rays are taken as a judgement needs
LEAST_PAIRS = 4  # of rays that a judgement needs
USUAL_PAIRS = 10  # with which it nearly always can be made: the effective number of rays is less
LEAST_RAYS = 8.0  # the same of the effective number of rays
# Effective samples of a chain per unit of process time: with a good reference, and too few.
USUAL_YIELD = 0.2
POOR_YIELD = 0.02
MANY_EVENTS = 2.0  # of sites per unit of time, of all chains on average, above which a rotation does not pay
# Rounds of the slowest chain per unit of time that are too many: far out in a heavy tail it meets ``|a||v|`` events.
ROUNDS_FAR_OUT = 10.0


def replace_if_unsuited(method: Method) -> Method:
    """The method; or Zig-Zag where the user left the dynamics open and it will take fewer rounds.

    That is seen before anything is drawn, and from nothing that is drawn.
    """
    if not method.open_dynamics or not method.few_rounds or method.constraints is not None:
        return method
    report("checking the tails")
    prior = None if any(site.name == PRIOR_SITE for site in method.sites) else method.prior
    rate = site_event_rate(method.own_sites, prior, method.control, method.reference)
    if rate is not None and rate > LINES_EVENTS * method.dim:
        reason = f"the sites would have {rate:.2g} events per unit of process time in the long run"
        if better := on_lines(method, reason, "before the burn-in"):
            return better
    name, slope = flattest_tail(method.own_sites, prior, method.control, method.reference, method.names)
    narrow = method.reference.narrow
    covered = method.reference.wide is not None and (narrow is None or narrow[1] <= NARROW or method.reference.ridged)
    if slope < (LEAST_COVERED if covered else LEAST_SLOPE):
        reason = f"the density of {name} falls by only e^-{max(slope, 0.0):.2g} {FLAT_TAIL}"
        if better := on_lines(method, reason, "before the burn-in"):
            return better
    # Twice as many chains where sites have many events and the user left their number open: rounds are those of the chain
    # with the most events, and they grow with the time that each chain is run.
    chains = 2 * method.chains
    if method.open_chains and rate is not None and rate >= FREQUENT_EVENTS and chains <= MOST_CHAINS:
        method = method.replace(chains=chains, segments=usual_segments(method.sites, chains))
    return method.replace(site_event_rate=rate)


@double_precision
def flattest_tail(
    sites: tuple[Site, ...],
    prior: Quadratic | None,
    control: dict[str, ControlVariate],
    reference: Reference,
    names: Sequence[str],
) -> tuple[str, float]:
    """The coordinate along which the density falls most slowly far out, and the slope of ``U`` there per standard deviation.

    In a tail ``U ≈ s|a|`` a rotation about the centre meets events at the rate ``|a||v|``: it diffuses with a constant of
    about ``1/|a|`` and drifts home by ``s/|a|``, so that the way back from ``|a|`` takes a time of about ``a²/(2s)``; lines
    take ``|a|``.
    """
    dim, scale = reference.dim, np.asarray(reference.matrix)
    spread = np.sqrt(np.sum(scale**2, 1))
    # Along the coordinates, and along the directions in which the others follow as the reference has them.
    ways = np.concatenate([np.diag(spread), scale.T])
    ways = np.concatenate([ways, -ways])
    points = np.asarray(reference.center) + np.asarray(TAIL)[:, None, None] * ways
    # In the shape of all rays, of which only the first are filled, so that nothing is compiled again.
    count = -(-points[..., 0].size // (NEAR + FAR))
    rays = np.zeros((max(2 * _pairs(sites, dim), count), NEAR + FAR, dim))
    rays.reshape(-1, dim)[: points[..., 0].size] = points.reshape(-1, dim)
    with np.errstate(invalid="ignore"):
        energy = _along_rays(sites, prior, control, reference, rays, count)[0]
        energy = energy.ravel()[: points[..., 0].size].reshape(points.shape[:2])
        slope = np.diff(energy, axis=0)[0] / (TAIL[1] - TAIL[0])
    slope = np.where(np.isnan(slope), np.inf, slope)
    least = int(np.argmin(slope))
    return names[least % dim], float(slope[least])


@double_precision
def site_event_rate(
    sites: tuple[Site, ...], prior: Quadratic | None, control: dict[str, ControlVariate], reference: Reference
) -> float | None:
    """Events of sites per unit of process time on rotations about the reference in the long run, or None if unknown.

    A site with ``W_m = U_m − q_m``, in whitened coordinates, has events at the rate ``(v·∇W_m)₊``, and ``v`` is Gaussian and
    independent of ``a`` in the long run: ``Σ_m E|∇W_m(a)| / √(2π)`` with ``a`` from the posterior. In polar coordinates
    ``E f = ∫∫ f(ru) r^{d−1} e^{−U(ru)} dr du`` up to a constant: a quadrature in ``r``, and a mean over random rays ``u``.
    Its nodes reach far into heavy tails, which chains that start near the mode do not see in a burn-in.

    Nothing is drawn from the run's randomness, and the sites are functions in this process: none elsewhere is asked.
    """
    dim = reference.dim
    pairs = _pairs(sites, dim)
    if dim > 1 and pairs < LEAST_PAIRS:
        return None
    # Distances from the mode, even where a Gaussian has its mass and growing beyond, and the weights of a midpoint rule.
    near = 2 * np.sqrt(dim) + 6.0
    edges = np.concatenate([np.linspace(0.0, near, NEAR + 1), np.geomspace(near, FARTHEST, FAR + 1)[1:]])
    radii, steps = (edges[1:] + edges[:-1]) / 2, np.diff(edges)
    rays = np.random.default_rng(0).standard_normal((pairs, dim))
    rays = np.concatenate([rays, -rays]) / np.linalg.norm(np.concatenate([rays, rays]), axis=1, keepdims=True)
    points = reference.to_x(rays[:, None, :] * radii[:, None])
    with np.errstate(invalid="ignore", over="ignore"):
        energy, rate = _along_rays(sites, prior, control, reference, points, len(points))
        log_weight = np.log(steps) + (dim - 1) * np.log(radii) - np.where(np.isnan(energy), np.inf, energy)
        weight = np.exp(log_weight - log_weight.max())
    if not np.all(np.isfinite(weight)):
        return None
    mass = weight.sum(1)
    if dim > 1 and mass.sum() ** 2 / np.sum(mass**2) < LEAST_RAYS:
        return None
    known = (weight > 0) & np.isfinite(rate)
    return float(np.sum(weight * np.where(known, rate, 0.0)) / weight.sum() / np.sqrt(2 * np.pi))


def _pairs(sites: tuple[Site, ...], dim: int) -> int:
    """Pairs of rays that are not too much work."""
    work = 2 * (NEAR + FAR) * max(sum(site.records for site in sites), 1)
    return 1 if dim == 1 else min(PAIRS, int(MOST_VALUES / work), max(int(USUAL_VALUES / work), USUAL_PAIRS))


def _along_rays(sites, prior, control, reference, points: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """U at points, and the sum over sites of norms of whitened gradients less the control variates', on the first rays."""
    energy = rate = np.zeros(points.shape[:2])
    if prior is not None:
        energy = np.sum(points * (0.5 * points @ np.asarray(prior.precision) + np.asarray(prior.linear)), -1)
    for site in sites:
        own = slice(None) if site.coordinates is None else np.asarray(site.coordinates)
        quadratic = control[site.name].quadratic if site.name in control else None
        rows = np.asarray(reference.matrix)[own]
        value, slope = _along(bare(site.potential), quadratic, points[..., own], rows, np.int64(count))
        energy, rate = energy + np.asarray(value), rate + np.asarray(slope)
    return energy, rate


@once
def _along(potential, quadratic, points, rows, count):
    """Ray by ray; how many is a number, so that one compiled program serves all."""

    def at(x):
        gradient = potential.gradient(x) - (0.0 if quadratic is None else quadratic.gradient(x))
        return potential.value(x), jnp.linalg.norm(rows.T @ gradient)

    def ray(i, found):
        put = jax.lax.dynamic_update_index_in_dim
        return jax.tree.map(lambda old, new: put(old, new, i, 0), found, mapped(at)(points[i]))

    return jax.lax.fori_loop(0, count, ray, (jnp.zeros(points.shape[:2]),) * 2)


# Events of sites per unit of time and parameter above which Zig-Zag on the same reference takes fewer rounds. With linear
# control variates its sites flip at the rate ``E(v_i ∂_i U)₊ = 1/√(2π) = 0.4`` for each whitened coordinate, and a chain
# makes 0.44 effective samples per unit of time: 0.9 events for each parameter and effective sample, after a burn-in three
# times as long as on a reference that is as wide as the tails. With 0.45 events for each parameter (log-normal, most
# censored) quarter turns about such a reference took 100 rounds and Zig-Zag 210.
LINES_EVENTS = 0.6  # events per unit of process time and parameter
FEW_ROUNDS = 200  # of a block: fewer are no reason for a warning
LEAST_EVENTS = 20  # of all chains, below which a burn-in has shown nothing
REMEDY = (
    "The draws are exact, but with heavy tails, separable data or very few records dynamics=fedpdmc.ZigZag() with "
    "reference='laplace' needs fewer rounds and less time."
)
LATENT_REMEDY = (
    "The draws are exact, but take many rounds. Private effects move with rotations only. A narrower prior of the spread "
    "(spread_scale=), fewer small groups, or more chains take fewer rounds."
)


class Unsuitable(Exception):
    """The burn-in has shown that the few-rounds method does not suit this posterior; the message gives the reason."""


class Distance:
    """Monitors a run of the few-rounds method and warns once, as soon as it is seen, that its reference is far off.

    ``remedy`` is what the warning advises. While ``deciding``, another method can still be chosen: then `Unsuitable` is
    raised instead of a warning. One that is not ``active`` says nothing.
    """

    def __init__(self, chains: int, dim: int = 1, remedy: str = REMEDY, active: bool = True):
        self.chains, self.dim, self.remedy, self.active = chains, dim, remedy, active
        self.warned = self.deciding = False
        self._began: tuple[float, int, int] | None = None

    def tick(self, tick: Tick) -> None:
        """Check an unfinished block: its cost so far is a lower bound of its cost."""
        if self._began is None or self._began[0] != tick.began:
            self._began = (tick.began, tick.events, tick.rounds)
            return
        length = tick.until - tick.began
        rate = (tick.events - self._began[1]) / self.chains / length
        rounds = tick.rounds - self._began[2]
        if rounds < FEW_ROUNDS:
            return
        if self.deciding and tick.until > 0:
            # A block that is kept in part: only what happens in its burn-in may decide.
            if tick.time < 0:
                self._tell(f"a chain that is far out took {rounds} rounds of the burn-in")
            return
        if rate > self._many:
            self._tell(f"the sites have {rate:.2g} events per unit of process time")
        elif rounds > max(ROUNDS_FAR_OUT, self._many) * length:
            self._tell(f"a chain that is far out took {rounds} rounds for at most {length:.3g} units of process time")

    def judge(self, events: float, ess: float | None, span: float) -> None:
        """Check the kept blocks: mean events of a chain and the worst ESS, if it is known, in a process time."""
        if span <= 0:
            return
        if events > self._many * span:
            self._tell(f"the sites have {events / span:.2g} events per unit of process time")
        elif ess is not None and ess < POOR_YIELD * self.chains * span:
            found = ess / self.chains / span
            self._tell(
                f"a chain makes {found:.1g} effective samples per unit of process time, where {USUAL_YIELD} are usual"
            )

    def judge_burn_in(self, events: float, span: float) -> None:
        """Check a burn-in. More events than Zig-Zag would have are too many, whether or not another method can be chosen.

        If none can, a few events of a short burn-in are no reason for a warning.
        """
        if not self.deciding and events * self.chains < LEAST_EVENTS:
            return
        if events > LINES_EVENTS * self.dim * span:
            self._tell(f"the sites have {events / span:.2g} events per unit of process time")

    @property
    def _many(self) -> float:
        """Site events per unit of process time above which a run is warned about, or another method is chosen."""
        return LINES_EVENTS * self.dim if self.deciding else MANY_EVENTS

    def _tell(self, reason: str) -> None:
        if self.deciding:
            raise Unsuitable(reason)
        if self.active and not self.warned:
            self.warned = True
            warn(f"The posterior is far from its reference: {reason}. {self.remedy}")


MANY_ROUNDS = 500.0  # above which a warning is given
MANY_WITH_USUAL_CHAINS = 60.0  # the same where the package chose the number of chains so that rounds are few
GROWN = 4.0  # the factor by which an estimate must have grown for another warning
# In the reason for which Zig-Zag is chosen where a density has a flat tail.
FLAT_TAIL = "per standard deviation in its tail"
HORSESHOE = (
    "; where scales have half-Cauchy priors, as those of a horseshoe have, prior=fedpdmc.models.horseshoe_prior(dim, scale) "
    "with a likelihood of the coefficients themselves"
)


def rounds_ahead(plans: np.ndarray, time: float, length: float, least: float = 0.0) -> float:
    """Rounds that the next ``length`` units of process time take.

    A round lets every chain send one plan, so the slowest chain counts. With mean ``m`` and variance ``s²`` of the plans
    that a chain has made per unit of time, the maximum over ``C`` chains in time ``T`` is about ``mT + √(2 log(C) s² T)``.
    The variance is at least that of a Poisson process: ``s² ≥ m``.

    Parameters
    ----------
    plans : array of shape (C,)
        What each chain has made in ``time``, its first plan left out.
    time, length : float
    least : float
        Plans per unit of time that a chain is known to make in the long run.
    """
    mean = max(float(np.mean(plans)) / time, least) if time > 0 else least
    variance = max(float(np.var(plans)) / time if time > 0 else 0.0, mean)
    return 1.0 + mean * length + float(np.sqrt(2 * np.log(len(plans)) * variance * length))


def remedies(method: Method) -> str | None:
    """Remedies for many rounds; None if rounds cost little and the user has chosen the dynamics."""
    if not (method.elsewhere or method.open_dynamics or method.chosen):
        return None
    where = " in the contract" if method.elsewhere else ""
    lines = 'kind = "ZigZag" in the contract; ' if method.elsewhere else "dynamics=fedpdmc.ZigZag(); "
    latents = any(site.latents for site in method.sites)
    lines = lines if method.dynamics.flow.rotating and not latents else ""
    shrunk = HORSESHOE if FLAT_TAIL in method.chosen else ""
    return (
        f"What may help: {lines}more chains{where}, which share every round (there are {method.chains}); a smaller "
        "ess or duration; parameters in which the posterior is nearer to a Gaussian (logarithms of scales, effects that "
        "are standardised, columns that are centred); effects of groups that only one site sees as its own latents "
        f"(fedpdmc.Site(f, latent=...), or a formula with (1 | group)){shrunk}."
    )


class CostEstimate:
    """A text about the expected cost of a run; warns if it is high, and again when the estimate has grown.

    ``remedies`` are for many rounds; None: no warning. ``usual_chains``: the package chose their number. ``burn_in`` are the
    rounds of the burn-in, which count as cost too.
    """

    def __init__(self, remedies: str | None, usual_chains: bool = False):
        self.remedies, self._told, self.burn_in = remedies, 0.0, 0
        self._many = MANY_WITH_USUAL_CHAINS if usual_chains else MANY_ROUNDS

    def tell(self, rounds: float, seconds: float | None, goal: str, far: bool = False) -> str:
        """The text for the progress display; gives a warning first if the cost is high.

        ``far``: the posterior is known to be far from its reference, so that the warning comes at fewer rounds.
        """
        takes = f"about {rounds:,.0f} rounds" + ("" if seconds is None else f" and {clock(seconds)}")
        if far:
            takes = f"at least {takes}"
        whole = rounds + self.burn_in
        if self.remedies is not None and whole > GROWN * self._told and (far or whole > self._many):
            self._told = whole
            after = f", after {self.burn_in} for the burn-in" if self.burn_in > rounds else ""
            warn(f"This will take {takes} more, to {goal}{after}. Its draws are exact all the same. {self.remedies}")
        return f"{takes} to {goal}"


class GivenUp(NamedTuple):
    """The cost of an abandoned burn-in: rounds, plans and segments of all chains, passes of each site."""

    rounds: int = 0
    plans: int = 0
    segments: int = 0
    passes: np.ndarray | int = 0


def message_bytes(plans: int, segments: int, sent: int, flips: bool, share: bool = False) -> tuple[int, int]:
    """Size of plans and of their arrivals as raw buffers, for a site that is sent ``sent`` coordinates.

    Of each of ``plans`` plans of single chains: the chain, the plan's number, how many segments it has, the start, and
    the site's ``share`` of a prior that is redistributed; of each of their ``segments`` segments in all, a duration and a
    velocity. An arrival has a time, a flag, and a coordinate or a normal.
    """
    plan = 8 * (plans * (3 + sent + share) + segments * (1 + sent))
    return plan, plans * (8 + 1 + (4 if flips else 8 * sent))


def counts(method: Method, engine: Engine, given_up: GivenUp) -> dict[str, Any]:
    """Rounds in all; messages, bytes and passes over the records of each site, in the order of the method's sites."""
    made = method.reference.bytes or {}
    messages = [
        2 * (int(exchanges) + given_up.rounds + (method.reference.rounds if site.name in made else 0))
        for site, exchanges in zip(method.sites, engine.asked[0], strict=True)
    ]
    plans = zip(method.sites, engine.asked[1], strict=True)
    return {
        "rounds": engine.rounds + given_up.rounds + method.reference.rounds,
        "messages": messages,
        "bytes": [_bytes(method, engine, given_up, site, int(count)) for site, count in plans],
        "gradient_evaluations": engine.passes + given_up.passes,
    }


def _bytes(method: Method, engine: Engine, given_up: GivenUp, site: Member, plans: int) -> int:
    federation, share = engine.federation, method.redistribution > 0
    if federation.bytes is not None:
        return int(federation.bytes[federation.names.index(site.name)])
    columns = local_columns(site, opening(method, site))
    sent = method.dim if columns is None else len(columns)
    made = (method.reference.bytes or {}).get(site.name, 0)
    if given_up.plans:
        made += sum(message_bytes(given_up.plans, given_up.segments, sent, False, share))
    if engine.coordinator.schedule(engine.state, engine.state.t) is not None and columns is None:
        # Of each plan: the chain, its number and that of the next turn, four bytes each; start and velocity, the time to
        # the turn and to the horizon. Of an arrival a time, a flag, and a coordinate or a velocity.
        mark = 1 if method.dynamics.flips else sent
        return made + plans * (12 + 8 * (2 * sent + 2)) + plans * (8 + 1 + 8 * mark)
    # A site that is not asked in every round is also sent the last velocity, for the time after the plan.
    segments = plans * (method.segments + 1) if engine.selective else int(engine.state.planned.sum())
    return made + sum(message_bytes(plans, segments, sent, method.dynamics.flips, share))
