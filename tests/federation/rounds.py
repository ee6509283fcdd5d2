"""The same run twice: by the compiled loop, and by plain rounds of plan, exchange and move."""

import types

import numpy as np
from tests.support import ZIGZAG, hospitals, prior

import fedpdmc as fp
from fedpdmc._jax.precision import double_precision
from fedpdmc.results.skeleton import join
from fedpdmc.sampling.arguments import Settings
from fedpdmc.sampling.defaults import choose
from fedpdmc.sampling.engines.compiled_loop import CompiledEngine
from fedpdmc.sampling.engines.rounds import RoundsEngine
from fedpdmc.sampling.factory import coordinator, coordinator_key, federation, start_state


@double_precision
def method(dynamics=None, *, sites=None, chains=4, seed=3, **options):
    """What ``fp.sample`` would run: all that is not said here as it is there by default.

    But explicit dynamics move in the parameters' own coordinates unless a reference is given.
    """
    said = {
        "sites": sites or hospitals(),
        "prior": prior(),
        "dynamics": dynamics,
        "chains": chains,
        "seed": seed,
    } | options
    if dynamics is not None and said.get("reference") is None:
        said["reference"] = "identity"
    return choose(Settings(**said))


@double_precision
def start(chosen, kind=CompiledEngine, **options):
    """A run before its first block."""
    parts = federation(chosen), coordinator(chosen), start_state(chosen), coordinator_key(chosen)
    return kind(*parts, **options)


def compiled(chosen, ends, limit=None):
    """The skeleton of blocks that end at ``ends``, by the compiled loop; ``limit``: iterations of a chunk."""
    run, blocks = start(chosen), []
    if limit is not None:
        run.limit = limit
        run._pace = types.MethodType(lambda self, seconds, used: None, run)
    for end in ends:
        run.advance(end, blocks.append, lambda tick: None)
    return join(blocks), run


@double_precision
def plain(chosen, ends, **options):
    """The skeleton of the same blocks by rounds in Python, and the run."""
    run, blocks = start(chosen, RoundsEngine, **options), []
    for end in ends:
        run.advance(end, blocks.append, lambda tick: None)
    return join(blocks), run


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
