"""Events of sites that the few-rounds method meets in the long run, integrated along rays before anything is drawn."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from fedpdmc._jax.by_numpy import once
from fedpdmc._jax.mapped import mapped
from fedpdmc._jax.precision import double_precision
from fedpdmc.console.progress import report
from fedpdmc.members.site import Site
from fedpdmc.potentials import ControlVariate, Quadratic, bare
from fedpdmc.results.verdict import NARROW
from fedpdmc.sampling.defaults import MOST_CHAINS, Method, on_lines, usual_segments
from fedpdmc.sampling.reference_warning import LINES_EVENTS
from fedpdmc.sampling.remaining_cost import FLAT_TAIL
from fedpdmc.sampling.sites_and_prior import PRIOR_SITE
from fedpdmc.whitening import Reference

# Pairs of opposite rays, distances on each, and the farthest in standard deviations.
PAIRS, NEAR, FAR, FARTHEST = 32, 48, 24, 1e4
# Distances, in standard deviations, between which the slope of a tail is measured, and the least with which rotations mix.
TAIL, LEAST_SLOPE = (3.0, 6.0), 1.7
# The least slope on a reference that was made as wide as the tails, up to a thousandth of the mass. Effects of eight groups
# have 1.5 in the tail of their log scale: 103 rounds, with the right standard deviation, where Zig-Zag takes 1,700.
LEAST_COVERED = 1.0
# Events of sites in a unit of process time from which more chains take fewer rounds.
MANY_EVENTS = 0.1
# Limit on the evaluated values of single records, and the least effective number of rays for a judgement.
MOST_VALUES, LEAST_PAIRS, LEAST_RAYS = 3e7, 4, 8.0


def suited(method: Method) -> Method:
    """The method; or Zig-Zag where the user left the dynamics open and it will take fewer rounds.

    That is seen before anything is drawn, and from nothing that is drawn.
    """
    if not method.open_dynamics or not method.few_rounds or method.constraints is not None:
        return method
    report("checking the tails")
    walked = any(site.name == PRIOR_SITE for site in method.sites)
    rate = site_event_rate(method.own_sites, None if walked else method.prior, method.control, method.reference)
    if rate is not None and rate > LINES_EVENTS * method.dim:
        reason = f"the sites would have {rate:.2g} events per unit of process time in the long run"
        better = on_lines(method, reason, "before the burn-in")
        if better is not None:
            return better
    prior = None if walked else method.prior
    name, slope = flattest_tail(method.own_sites, prior, method.control, method.reference, method.names)
    narrow = method.reference.narrow
    covered = method.reference.wide is not None and (narrow is None or narrow[1] <= NARROW)
    if slope < (LEAST_COVERED if covered else LEAST_SLOPE):
        reason = f"the density of {name} falls by only e^-{max(slope, 0.0):.2g} {FLAT_TAIL}"
        better = on_lines(method, reason, "before the burn-in")
        if better is not None:
            return better
    return with_enough_chains(method.replace(site_event_rate=rate))


def with_enough_chains(method: Method) -> Method:
    """Twice as many chains where sites have many events and the user left their number open.

    Rounds are those of the chain with the most events, and they grow with the time that each chain is run.
    """
    rate, chains = method.site_event_rate, 2 * method.chains
    if not method.open_chains or rate is None or rate < MANY_EVENTS or chains > MOST_CHAINS:
        return method
    return method.replace(chains=chains, segments=usual_segments(method.sites, chains))


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
    energy = np.zeros(points.shape[:2]) if prior is None else _quadratic(prior, points)
    # In the shape of all rays, of which only the first are filled, so that nothing is compiled again.
    count = -(-points[..., 0].size // (NEAR + FAR))
    rays = np.zeros((max(2 * _pairs(sites, dim), count), NEAR + FAR, dim))
    rays.reshape(-1, dim)[: points[..., 0].size] = points.reshape(-1, dim)
    for site in sites:
        value = _along_site(site, control, reference, rays, count)[0]
        energy = energy + value.ravel()[: points[..., 0].size].reshape(points.shape[:2])
    with np.errstate(invalid="ignore"):
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
    radii, steps = _distances(dim)
    rays = np.random.default_rng(0).standard_normal((pairs, dim))
    rays = np.concatenate([rays, -rays]) / np.linalg.norm(np.concatenate([rays, rays]), axis=1, keepdims=True)
    points = reference.to_x(rays[:, None, :] * radii[:, None])
    energy = np.zeros(points.shape[:2]) if prior is None else _quadratic(prior, points)
    rate = np.zeros(points.shape[:2])
    with np.errstate(invalid="ignore", over="ignore"):
        for site in sites:
            value, slope = _along_site(site, control, reference, points, len(points))
            energy, rate = energy + value, rate + slope
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
    return 1 if dim == 1 else min(PAIRS, int(MOST_VALUES / work))


def _along_site(site: Site, control: dict[str, ControlVariate], reference: Reference, points: np.ndarray, count: int):
    """Values of a site's potential, and norms of its whitened gradient minus the control variate's, on the first rays."""
    own = slice(None) if site.coordinates is None else np.asarray(site.coordinates)
    quadratic = control[site.name].quadratic if site.name in control else None
    rows = np.asarray(reference.matrix)[own]
    found = _along(bare(site.potential), quadratic, points[..., own], rows, np.int64(count))
    return tuple(np.asarray(x) for x in found)


def _quadratic(prior: Quadratic, x: np.ndarray) -> np.ndarray:
    """The prior's values."""
    return np.sum(x * (0.5 * x @ np.asarray(prior.precision) + np.asarray(prior.linear)), -1)


def _distances(dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Distances from the mode, even where a Gaussian has its mass and growing beyond, and the weights of a midpoint rule."""
    near = 2 * np.sqrt(dim) + 6.0
    edges = np.concatenate([np.linspace(0.0, near, NEAR + 1), np.geomspace(near, FARTHEST, FAR + 1)[1:]])
    return (edges[1:] + edges[:-1]) / 2, np.diff(edges)


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
