"""The same run twice: by the compiled loop, and by plain rounds of plan, exchange and settle."""

import inspect
import types

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from tests.support import ZIGZAG, hospitals, prior

import fedpdmc as fp
from fedpdmc.method import choose
from fedpdmc.precision import double_precision
from fedpdmc.run import Run


@double_precision
def method(dynamics=None, *, sites=None, chains=4, seed=3, **options):
    """What ``fp.sample`` would run: all that is not said here as it is there by default."""
    said = {"sites": sites or hospitals(), "prior": prior(), "dynamics": dynamics, "chains": chains, "seed": seed}
    defaults = {name: given.default for name, given in inspect.signature(fp.sample).parameters.items()}
    wanted = {name: (defaults | said | options)[name] for name in inspect.signature(choose).parameters}
    return choose(**wanted)


@double_precision
def start(chosen):
    """A run before its first block."""
    return Run(
        chosen.federation(), chosen.coordinator(), chosen.start(0.0), jax.random.fold_in(jax.random.key(chosen.seed), 1)
    )


def compiled(chosen, ends, limit=None):
    """The skeleton of blocks that end at ``ends``, by the compiled loop; ``limit``: iterations of a chunk."""
    run, blocks = start(chosen), []
    if limit is not None:
        run.limit = limit
        run._pace = types.MethodType(lambda self, seconds, used: None, run)
    for end in ends:
        run.advance(end, blocks.append, lambda tick: None)
    whole = blocks[0].skeleton()
    for block in blocks[1:]:
        whole = whole.then(block.skeleton())
    return whole, run


@eqx.filter_jit
def _intend(coordinator, state, keys, until):
    return coordinator.intend(state, keys, until)


@eqx.filter_jit
def _settle(coordinator, state, itinerary, arrivals, until):
    return coordinator.settle(state, itinerary, arrivals, until)


@double_precision
def plain(chosen, ends):
    """Knots (t, a, v) of every chain by rounds in Python, each block's beginning included; the last state; the rounds."""
    run, rounds = start(chosen), 0
    federation, coordinator, state = run.federation, run.coordinator, run.progress.state
    paths = [[] for _ in range(chosen.chains)]
    for end in ends:
        for chain, path in enumerate(paths):
            path.append((float(state.t[chain]), np.asarray(state.a[chain]), np.asarray(state.v[chain])))
        until = jnp.asarray(float(end))
        while bool(jnp.any(state.t < until)):
            state, knots, going = _round(federation, coordinator, run.keys, state, until)
            rounds += 1
            valid = np.asarray(knots.valid) & np.asarray(going)[:, None] & (np.asarray(knots.t) < end)
            for chain, path in enumerate(paths):
                for k in np.flatnonzero(valid[chain]):
                    path.append(tuple(np.asarray(x[chain, k]) for x in (knots.t, knots.a, knots.v)))
    return [tuple(np.stack(part) for part in zip(*path, strict=True)) for path in paths], state, rounds


def _round(federation, coordinator, keys, state, until):
    """One exchange; chains that are finished send a plan of no length and stay where they are."""
    going = state.t < until
    itinerary = _intend(coordinator, state, keys, until)
    assert not np.any(np.asarray(itinerary.plan.horizon)[~np.asarray(going)])
    arrivals = jax.tree.map(lambda *x: jnp.stack(x), *federation.exchange(itinerary.plan))
    settled, knots, _ = _settle(coordinator, state, itinerary, arrivals, until)

    def pick(new, old):
        return jnp.where(going.reshape(going.shape + (1,) * (new.ndim - 1)), new, old)

    return jax.tree.map(pick, settled, state), knots, going


def of_chain(skeleton, chain):
    """``t, a, v`` of one chain."""
    own = slice(skeleton.offsets[chain], skeleton.offsets[chain + 1])
    return skeleton.t[own], skeleton.a[own], skeleton.v[own]


def assert_same_path(one, other, first=50, atol=1e-9):
    """The first events have the same times, positions and velocities."""
    n = min(first, len(one[0]), len(other[0]))
    assert len(one[0]) == len(other[0]) or n == first
    for left, right in zip(one, other, strict=True):
        np.testing.assert_allclose(left[:n], right[:n], rtol=0, atol=atol)


KINDS = {
    "default": None,
    "zigzag": ZIGZAG,
    "bouncy": fp.BouncyParticle(),
    "boomerang": fp.Boomerang(),
    "factorised": fp.FactorisedBoomerang(excess=0.1),
}
