"""Every way of fetching, placing and moving entries, in every domain, against values and derivatives.

The argument is a vector of three numbers. Indices are in range, negative, beyond the end, repeated or none at all.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fedpdmc._jax.by_numpy import mapped_by_numpy
from fedpdmc.enclosures import Interval, TimeInterval, enclose, smoothed
from fedpdmc.errors import NoEnclosure
from fedpdmc.potentials.jax_function import curved_path

pytestmark = pytest.mark.usefixtures("double")

INDICES = {
    "in range": [2, 0, 1],
    "repeated": [1, 1, 0, 1],
    "negative": [-1, -3, 0],
    "beyond": [0, 3, 7, -4, -9],
    "none": [],
    "scalar": 1,
    "scalar beyond": 5,
}
READS = {
    "default": {}, "clip": {"mode": "clip"}, "zero": {"mode": "fill", "fill_value": 0.0},
    "number": {"mode": "fill", "fill_value": -2.5}, "promise": {"mode": "promise_in_bounds"},
    "raw": {"mode": "fill", "fill_value": 1.5, "wrap_negative_indices": False}, "nan": {"mode": "fill"},
}  # fmt: skip
WRITES = {"default": {}, "drop": {"mode": "drop"}, "clip": {"mode": "clip"}}
X = np.array([0.3, -0.7, 1.1])


def cases():
    table = {}
    for name, index in INDICES.items():
        at = np.asarray(index, int)
        for mode, options in READS.items():
            table[f"read {name}, {mode}"] = lambda x, at=at, options=options: x.at[at].get(**options)
        for mode in ("wrap", "clip", "fill"):
            table[f"take {name}, {mode}"] = lambda x, at=at, mode=mode: jnp.take(x, at, mode=mode)
        for mode, options in WRITES.items():
            table[f"add {name}, {mode}"] = lambda x, at=at, options=options: (
                jnp.ones(3).at[at].add(jnp.broadcast_to(jnp.sum(x), at.shape), **options)
            )
            table[f"add to {name}, {mode}"] = lambda x, at=at, options=options: x.at[at].add(2.0, **options)
            table[f"set {name}, {mode}"] = lambda x, at=at, options=options: x.at[at].set(x[0] * 2, **options)
    both = np.array([[0, 1], [1, 5], [-1, 0]])
    for mode, options in READS.items():
        table[f"read a matrix, {mode}"] = lambda x, options=options: (
            jnp.outer(x, x + 1).at[both[:, 0], both[:, 1]].get(**options)
        )
        table[f"read rows, {mode}"] = lambda x, options=options: jnp.outer(x, x + 1).at[np.array([2, 9])].get(**options)
    return table | {
        "take_along_axis": lambda x: jnp.take_along_axis(jnp.outer(x, x), np.array([[0], [2], [1]]), 1),
        "dynamic_slice beyond": lambda x: lax.dynamic_slice(x, (5,), (2,)),
        "dynamic_slice before": lambda x: lax.dynamic_slice(x, (-5,), (2,)),
        "dynamic_update_slice": lambda x: lax.dynamic_update_slice(jnp.ones(4), x, (3,)),
        "pad": lambda x: lax.pad(x, 0.5, [(2, 1, 1)]),
        "pad by what varies": lambda x: lax.pad(x, x[0], [(1, 0, 0)]),
        "crop": lambda x: lax.pad(x, 0.5, [(-1, 2, 0)]),
        "crop all": lambda x: lax.pad(x, 0.5, [(-3, 1, 0)]),
        "no columns": lambda x: jnp.outer(x, jnp.ones(0)),
        "sum of nothing": lambda x: jnp.sum(jnp.outer(x, jnp.ones(0)), 1) + x,
        "concatenate with nothing": lambda x: jnp.concatenate([x[:0], x, np.ones(1)]),
        "strides": lambda x: lax.slice(x, (0,), (3,), (2,)),
        "turned": lambda x: jnp.outer(x, x * 2).T[::-1, ::2],
        "broadcast": lambda x: jnp.broadcast_to(x[1], (2, 0, 2)),
        "one of one": lambda x: x[1:2].at[np.array([0, 0, 1])].get(mode="fill", fill_value=4.0),
    }


CASES = cases()
SOME = {name: f for name, f in CASES.items() if name.startswith("read beyond") or name in (
    "take beyond, wrap", "add beyond, drop", "set repeated, default", "read none, number", "read scalar beyond, number",
    "crop", "read a matrix, number", "dynamic_slice beyond", "sum of nothing",
)}  # fmt: skip
TABLES = [pytest.param(SOME, id="some"), pytest.param(CASES, id="all", marks=pytest.mark.long)]


def held(name, lo, value, hi, widest=300.0):
    """NaN is held by what is not finite alone."""
    lo, value, hi = (np.asarray(x) for x in (lo, value, hi))
    finite = np.isfinite(value)
    assert lo.shape == value.shape, name
    assert np.all(lo[finite] <= value[finite] + 1e-12) and np.all(value[finite] <= hi[finite] + 1e-12), name
    assert not np.any(np.isfinite(lo[~finite]) & np.isfinite(hi[~finite])), name
    # Nothing here is so wide that it would hold anything.
    assert np.all(hi[finite] - lo[finite] < widest), name


def on_interval(f):
    found = enclose(f)(Interval(jnp.asarray(X - 0.1), jnp.asarray(X + 0.1)))
    found = found if isinstance(found, Interval) else Interval(found, found)
    at = X + np.random.default_rng(0).uniform(-0.1, 0.1, (5, 3))
    return found.lo, [f(jnp.asarray(a)) for a in (*at, X - 0.1, X + 0.1)], found.hi


def on_line(f):
    return on_curve(f, 1, True)


def on_curve(f, order=3, rotating=False):
    v = np.array([0.5, 1.0, -2.0])
    path = curved_path(rotating, jnp.asarray(X)[:, None], jnp.asarray(v)[:, None], jnp.asarray([0.2]), order)[0]
    found = enclose(f, TimeInterval(order))(path)
    values = [f(jnp.asarray(X * np.cos(s) + v * np.sin(s) if rotating else X + v * s)) for s in (0.0, 0.07, 0.2)]
    if not hasattr(found, "range"):
        return found, values, found
    shape = (*found.shape, 1)
    return (jnp.broadcast_to(end, shape)[..., 0] for end in (found.range.lo, found.range.hi)), values, None


def pairs(everyday):
    """Domains and tables; every day some of the table in these domains."""
    return [
        pytest.param(
            domain, table, id=f"{domain.__name__}-{name}",
            marks=() if table is SOME and domain in everyday else pytest.mark.long,
        )
        for domain in (on_interval, on_line, on_curve)
        for name, table in (("some", SOME), ("all", CASES))
    ]  # fmt: skip


# Along paths the gradients, below, are checked every day.
@pytest.mark.parametrize(("domain", "table"), pairs([on_interval]))
def test_values_are_held(domain, table):
    refused = []
    for name, f in table.items():
        try:
            lo, values, hi = domain(f)
        except NoEnclosure:
            refused.append(name)
            continue
        if hi is None:
            lo, hi = lo
        for value in values:
            held(name, lo, value, hi)
    assert not refused


def squared(f):
    """A number in which each entry has a derivative of its own, as a site's potential computes it."""
    weights = 1.0 + np.arange(100.0)

    def program(x):
        y = jnp.ravel(f(x))
        return jnp.sum(weights[: y.size] * (y * y + x[0] * y))

    return smoothed(program)


@pytest.mark.parametrize("table", TABLES)
def test_gradients_are_those_of_the_values(table):
    """Beyond the end too, where JAX leaves out of the gradient what it fetches for the value."""
    rng, size = np.random.default_rng(2), 1e-5
    at = X + rng.uniform(-0.1, 0.1, (2, 3))
    steps = size * np.concatenate([np.eye(3), -np.eye(3)])
    for name, f in table.items():
        program = squared(f)
        values = mapped_by_numpy(program, (at[:, None] + steps).reshape(-1, 3)).reshape(2, 2, 3)
        if not np.all(np.isfinite(values)):
            continue
        slopes = (values[:, 0] - values[:, 1]) / (2 * size)
        for gradient in (jax.grad(program), jax.jacfwd(program)):
            np.testing.assert_allclose(mapped_by_numpy(gradient, at), slopes, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(("domain", "table"), pairs([on_line, on_curve]))
def test_gradients_are_held(domain, table):
    for name, f in table.items():
        lo, values, hi = domain(jax.grad(squared(f)))
        if hi is None:
            lo, hi = lo
        for value in values:
            # A potential that is not finite is refused at the start.
            if np.all(np.isfinite(value)):
                held(name, lo, value, hi, widest=3e4)
