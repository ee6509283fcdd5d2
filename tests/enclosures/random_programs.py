"""Random programs of statistical flavour: trees of operations on vectors of four records and three parameters.

A program is a tuple of a name and its arguments, ``("softplus", ("eta",))``. Every one of them is finite unless numbers
overflow, and continuous unless it has one of the operations in ``JUMPING``.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy import special

from fedpdmc.potentials import Program

DIM, RECORDS = 3, 4
DISTANCE = np.abs(np.arange(4.0)[:, None] - np.arange(4.0))


def by_scan(z, d):
    return lax.scan(lambda carry, t: (0.5 * carry + jnp.tanh(t), carry * t), 0.3, z)[1]


def by_loop(z, d):
    return lax.fori_loop(0, 3, lambda k, c: c - 0.1 * c * jax.nn.sigmoid(z[k] + c), z)


def log_sum_exp(z, d):
    top = lax.stop_gradient(jnp.max(z))
    return z - (top + jnp.log(jnp.sum(jnp.exp(z - top))))


def gaussian_process(z, d):
    """Three values of z whitened by a covariance matrix whose scale is the fourth."""
    matrix = jnp.exp(-DISTANCE[:3, :3] * jax.nn.sigmoid(z[3])) + 0.3 * jnp.eye(3)
    factor = jnp.linalg.cholesky(matrix)
    white = jax.scipy.linalg.solve_triangular(factor, z[:3], lower=True)
    return jnp.append(white, jnp.sum(jnp.log(jnp.diagonal(factor))))


def cubic_step(z):
    return jnp.where(z**3 > 0.2, 1.0, 0.0)


def counted(z, d):
    """A level for each number of values that are below 0.2."""
    return jnp.where(jnp.arange(4) < jnp.sum(z < 0.2), z, 0.5 * z + 1.0)


UNARY = {
    # elementwise
    "exp": lambda z, d: jnp.exp(0.5 * z), "softplus": lambda z, d: jnp.logaddexp(z, 0.0), "tanh": lambda z, d: jnp.tanh(z),
    "log1p": lambda z, d: jnp.log1p(z * z), "sigmoid": lambda z, d: jax.nn.sigmoid(z), "sin": lambda z, d: jnp.sin(z),
    "root": lambda z, d: jnp.sqrt(1 + z * z), "inverse": lambda z, d: 1 / (2 + jnp.sin(z)), "square": lambda z, d: z * z,
    "cube": lambda z, d: z**3, "expm1": lambda z, d: jnp.expm1(0.3 * z), "erf": lambda z, d: lax.erf(z),
    "erfc": lambda z, d: lax.erfc(0.5 * z), "log ndtr": lambda z, d: special.log_ndtr(z), "atan": lambda z, d: jnp.arctan(z),
    "log sigmoid": lambda z, d: jax.nn.log_sigmoid(z), "lgamma": lambda z, d: lax.lgamma(0.2 + jnp.exp(0.3 * z)),
    "digamma": lambda z, d: lax.digamma(0.5 + z * z), "rsqrt": lambda z, d: lax.rsqrt(0.1 + z * z),
    "power": lambda z, d: (1 + z * z) ** 0.7, "base": lambda z, d: 1.5**z, "cosh": lambda z, d: jnp.cosh(0.3 * z),
    "inverse square": lambda z, d: (2 + jnp.tanh(z)) ** -2, "asinh": lambda z, d: jnp.arcsinh(z),
    "bell": lambda z, d: jnp.exp(-z * z),
    # kinks and guards
    "abs": lambda z, d: jnp.abs(z), "relu": lambda z, d: jnp.maximum(z, 0.3), "clip": lambda z, d: jnp.clip(z, -1.0, 2.0),
    "huber": lambda z, d: jnp.where(jnp.abs(z) < 1.0, 0.5 * z * z, jnp.abs(z) - 0.5),
    "cap": lambda z, d: jnp.minimum(z, 1.0),
    "three kinks": lambda z, d: lax.select_n(d["g"] % 3, z, jnp.maximum(z - 0.4, 0.0), jnp.abs(z)),
    "guard": lambda z, d: jnp.log(jnp.where(z > 0, 1 + z, 1.0)), "mask": lambda z, d: jnp.where(d["y"] > 0, z, 1.0),
    "leaky": lambda z, d: jax.nn.leaky_relu(z), "elu": lambda z, d: jax.nn.elu(z),
    "hinge": lambda z, d: jax.nn.relu(1 - z) ** 2,
    "level": lambda z, d: jnp.where(z > jnp.log(1 + jnp.abs(d["y"])), z, jnp.log(1 + jnp.abs(d["y"]))),
    "sinc": lambda z, d: jnp.where(z == 0, 1.0, jnp.sin(z) / jnp.where(z == 0, 1.0, z)),
    # rounding
    "offset": lambda z, d: (1e3 + z) - 1e3, "phase": lambda z, d: jnp.cos(1e5 + z),
    "32 bits": lambda z, d: z.astype(jnp.float32).astype(float),
    "32-bit sum": lambda z, d: jnp.tanh(z.astype(jnp.float32) + d["y"].astype(jnp.float32)).astype(float),
    "large": lambda z, d: 1e6 * jnp.sin(1e-3 * z) - 1e3 * z, "small": lambda z, d: jnp.log1p(1e-8 * z * z) * 1e8,
    # several entries together
    "cumsum": lambda z, d: jnp.cumsum(z), "backwards": lambda z, d: lax.cumsum(jnp.tanh(z), reverse=True),
    "times y": lambda z, d: z * d["y"], "softmax": lambda z, d: jax.nn.softmax(z), "log sum exp": log_sum_exp,
    "reversed": lambda z, d: z[::-1] - z, "product": lambda z, d: jnp.prod(jnp.tanh(z)) + z,
    "largest": lambda z, d: z - jnp.max(z),
    "mixed": lambda z, d: d["M"] @ z, "quadratic": lambda z, d: z * (z @ d["M"] @ z),
    "pairs": lambda z, d: jnp.outer(z, z)[:, 1],
    "sum": lambda z, d: jnp.sum(z) * jnp.ones(4), "joined": lambda z, d: jnp.concatenate([z[2:], jnp.roll(z, 1)[:2] ** 2]),
    # indices
    "fill": lambda z, d: z.at[d["g"] + 1].get(mode="fill", fill_value=0.5),
    "clipped": lambda z, d: z.at[d["g"] + 2].get(mode="clip"), "wrapped": lambda z, d: z[d["g"] - 3],
    "added": lambda z, d: jnp.zeros(4).at[d["g"] % 2].add(z),
    "dropped": lambda z, d: z.at[d["g"] + 2].set(z[0], mode="drop"),
    "by segment": lambda z, d: jax.ops.segment_sum(z, d["g"] % 3, 4),
    # control
    "scan": by_scan, "loop": by_loop, "branch": lambda z, d: lax.cond(d["y"][0] > 0, jnp.sin, jnp.cos, z),
    "branch with a kink": lambda z, d: lax.cond(d["y"][1] > 0, lambda t: jnp.abs(t - 0.2), jnp.sin, z),
    "cholesky": gaussian_process, "map": lambda z, d: lax.map(lambda t: jnp.tanh(t) * t, z),
    # jumps
    "step": lambda z, d: jnp.where(z > 0.3, z + 1, 0.5 * z), "sign": lambda z, d: jnp.sign(z - 0.1), "counted": counted,
    "ordered": lambda z, d: jnp.where(jnp.all(z[:-1] < z[1:]), z, 0.3), "floor": lambda z, d: jnp.floor(z),
    "three cases": lambda z, d: lax.select_n(d["g"] % 3, z, jnp.where(z > 0.4, 1.0, 0.0), jnp.abs(z)),
    "no number": lambda z, d: jnp.where(jnp.isnan(jnp.sqrt(z)), 1.0, 0.5 * z),
    "no root": lambda z, d: jnp.where(jnp.sqrt(z + 0.5) >= 0, 0.3, 1.0),
    "both": lambda z, d: jnp.where((z > 0.3) & (z < 1.5), z, 0.2),
    "either": lambda z, d: jnp.where((z < -0.4) | (jnp.abs(z) > 1), 0.1 * z, z), "indicator": lambda z, d: (z > 0.2) * z,
    "select": lambda z, d: jnp.select([z < -0.5, z < 0.7], [z, z * z], 1.0),
    "where y is zero": lambda z, d: jnp.where(d["y"] == 0, jnp.where(z > 0.2, 1.0, 0.0), z),
    "one group": lambda z, d: jnp.where(d["g"] == 1, jnp.where(z**3 > 0.2, 1.0, 0.0), z),
    "signed root": lambda z, d: jnp.sign(z) * jnp.sqrt(jnp.abs(z) + 0.01),
    "upper end": lambda z, d: jnp.where(jnp.clip(z, -1.0, 1.0) == 1, z, 0.3),
    "running": lambda z, d: jnp.where(jnp.cumsum(z) > 0.4, z, 0.0),
    "saturated": lambda z, d: jnp.where(jnp.tanh(3 * z) < 1, 0.3, z), "first": lambda z, d: 1.0 * (z >= jnp.max(z)),
    "gap": lambda z, d: jnp.where(jnp.diff(jnp.sort(z), prepend=0.0) > 0.3, z, 0.0),
    "heaviside": lambda z, d: jnp.heaviside(z - 0.1, 0.5),
    "no logarithm": lambda z, d: jnp.where(jnp.isnan(jnp.log(d["y"])), cubic_step(z), z),
    "no entry": lambda z, d: jnp.where(jnp.isnan(z.at[d["g"] + 2].get(mode="fill")), cubic_step(z), z),
    "wrapped number": lambda z, d: jnp.where(z**3 > 0.2, z + (d["g"].astype(jnp.uint8) - jnp.uint8(1)), z + d["g"] - 1.0),
    "another order": lambda z, d: jnp.where((z + 0.1) + d["y"] == z + (0.1 + d["y"]), 1.0, z),
    "missing": lambda z, d: jnp.where(d["y"] / d["y"] == 1, z, cubic_step(z)),
}  # fmt: skip
BINARY = {
    "add": lambda z, w: z + w, "sub": lambda z, w: z - w, "mul": lambda z, w: z * w, "max": jnp.maximum, "min": jnp.minimum,
    "over": lambda z, w: z / (1 + w * w), "logaddexp": jnp.logaddexp, "mix": lambda z, w: z * jax.nn.sigmoid(w),
    "scaled": lambda z, w: z * jnp.exp(-0.5 * w) + 0.5 * w, "hypot": lambda z, w: jnp.sqrt(z * z + w * w + 0.01),
    "joint": lambda z, w: special.logsumexp(jnp.stack([z, w, z - w]), axis=0),
}  # fmt: skip
LEAVES = {
    "eta": lambda x, d: d["X"] @ x, "effect": lambda x, d: x[d["g"] % 3], "scale": lambda x, d: x[0] + 0.0 * d["y"],
    "residual": lambda x, d: d["y"] - x[1], "reference": lambda x, d: x.at[d["g"]].get(mode="fill", fill_value=0.0),
    "change point": lambda x, d: jnp.where(d["y"] < x[2], x[0], x[1]),
    "threshold": lambda x, d: jnp.where(d["X"] @ x > 0.2, d["y"], x[0]),
    "order": lambda x, d: jnp.where((x[0] < x[1]) & (x[1] < 0.5 * x[2] + 0.3), x[2], 0.4) * d["y"],
}  # fmt: skip

# Operations that may jump.
JUMPING = {"step", "sign", "counted", "ordered", "floor", "change point", "threshold", "order", "three cases", "no number",
           "no root", "both", "either", "indicator", "select", "where y is zero", "one group", "signed root", "upper end",
           "running", "saturated", "first", "gap", "heaviside", "no logarithm", "no entry", "wrapped number",
           "another order", "missing"}  # fmt: skip


def records(seed: int) -> dict[str, np.ndarray]:
    """Data: usual, large, or with zeros and ties; groups in any order."""
    rng = np.random.default_rng(seed)
    kind = seed % 4
    X, y = rng.normal(size=(4, 3)), rng.normal(size=4) * (30.0 if kind == 1 else 1.0)
    if kind == 2:
        X, y = np.round(X), np.round(y)
    return {"X": X, "y": y, "g": rng.permutation(4), "M": rng.normal(size=(4, 4))}


def built(tree, x, d):
    """The vector of four that a tree computes."""
    name, *rest = tree
    if name in LEAVES:
        return LEAVES[name](x, d)
    if name in UNARY:
        return UNARY[name](built(rest[0], x, d), d)
    return BINARY[name](*(built(part, x, d) for part in rest))


def program_of(tree, data: dict[str, np.ndarray]) -> Program:
    """A potential: the sum of the vector, and a Gaussian prior."""
    return Program(lambda x, d: jnp.sum(built(tree, x, d)) + 0.1 * jnp.sum(x * x), jax.tree.map(jnp.asarray, data), DIM)


def names(tree) -> set[str]:
    """Of all operations of a tree."""
    return {tree[0]}.union(*(names(part) for part in tree[1:]))


def random_tree(rng: np.random.Generator, size: int):
    """Of about so many operations; one in eight may jump."""

    def one_of(operations: dict) -> str:
        jumps = rng.random() < 0.125
        return str(rng.choice(sorted(name for name in operations if (name in JUMPING) == jumps)))

    if size <= 0:
        return (one_of(LEAVES),)
    if size > 1 and rng.random() < 0.4:
        left = int(rng.integers(0, size))
        return (str(rng.choice(sorted(BINARY))), random_tree(rng, left), random_tree(rng, size - 1 - left))
    return (one_of(UNARY), random_tree(rng, size - 1))


def smaller(tree):
    """Trees with one operation less."""
    yield from tree[1:]
    for k, part in enumerate(tree[1:], 1):
        for other in smaller(part):
            yield (*tree[:k], other, *tree[k + 1 :])
