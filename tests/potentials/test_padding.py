"""Padded functions are the functions that users wrote; what is no function of sums over records is left alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.scipy.special import gammaln, logsumexp, xlogy

from fedpdmc.models.user_function import user_model
from fedpdmc.potentials import Program
from fedpdmc.potentials.padding import Unpaddable, pad

pytestmark = pytest.mark.usefixtures("double")

DIM = 3


def _records(n, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, DIM))
    count, label = rng.integers(0, 5, n), rng.integers(0, DIM, n)
    return {"X": X, "t": rng.random(n) + 0.1, "count": count, "group": label, "cube": rng.normal(size=(n, 2, DIM))}


# Functions of sums over records ---------------------------------------------------------------------------------------


def weibull(x, d):
    z = jnp.exp(x[0]) * (jnp.log(d["t"]) - d["X"] @ x)
    return -jnp.sum(x[0] + z - jnp.exp(z))


def negative_binomial(x, d):
    size, mean, y = jnp.exp(x[0]), jnp.exp(d["X"] @ x), 1.0 * d["count"]
    terms = gammaln(y + size) + xlogy(y, mean) - (y + size) * jnp.log(size + mean)
    return -jnp.sum(terms) - y.shape[0] * (size * x[0] - gammaln(size))


def count_in_literals(x, d):
    """The number of records as a number, in a mean, a variance and a program within."""
    n = d["t"].shape[0]
    inner = jax.jit(lambda v: jnp.sum(v) / n + jnp.float64(n) * v[0])
    return jnp.mean(d["t"] * x[0]) * n**2 + jnp.var(jnp.exp(d["X"] @ x)) + inner(x) * jnp.asarray(1.0 / n)


def square_of_a_sum(x, d):
    return jnp.sum(d["X"] @ x) ** 2 + jnp.exp(-jnp.sum(d["t"]) / 100) * x[1]


def shares_of_a_sum(x, d):
    weight = jnp.exp(d["X"] @ x)
    return jnp.sum(d["t"] * (weight / jnp.sum(weight)) ** 2)


def contractions(x, d):
    """Sums over records as products of matrices, with data and with values."""
    fit = d["X"] @ x
    return (
        fit @ fit
        + d["t"] @ jnp.tanh(fit)
        + jnp.sum((d["X"].T @ fit) ** 2)
        + jnp.einsum("nij,nj->", d["cube"], d["X"]) * x[0]
    )


def records_last(x, d):
    return jnp.sum(jnp.log1p(jnp.exp(x @ d["X"].T))) + jnp.einsum("ijn,j->", jnp.transpose(d["cube"], (1, 2, 0)), x)


def random_intercepts(x, d):
    fit = x[d["group"]] + d["X"][:, 0] * x[1] + d["X"][:, [0, 2]] @ x[:2]
    return jnp.sum((d["t"] - fit) ** 2) + jnp.sum(jax.ops.segment_sum(fit, d["group"], DIM) ** 2)


def categorical(x, d):
    logits = jnp.concatenate([d["X"][:, :2] * x[0], d["X"][:, 2:] @ x[None, :1]], axis=1)
    own = jnp.take_along_axis(logits, d["group"][:, None], axis=1)[:, 0]
    return jnp.sum(logsumexp(logits, axis=1) - own) - jnp.sum(
        jax.nn.log_softmax(logits) * jax.nn.one_hot(d["group"], DIM)
    )


def within_records(x, d):
    """Order and extremes within a record are no matter between records."""
    rows = d["X"] * x
    return (
        jnp.sum(jnp.cumsum(jnp.sort(rows, axis=1), axis=1) ** 2)
        + jnp.sum(jnp.max(rows, axis=1))
        + jnp.sum(rows[:, ::-1] @ x)
    )


def shapes(x, d):
    rows = d["cube"].reshape(d["cube"].shape[0], 2 * DIM)[:, :, None] + jnp.ones((d["t"].shape[0], 1, 2)) * x[:2]
    return jnp.sum(jnp.squeeze(rows[:, :1], 1) ** 2) + jnp.sum(jnp.where(d["t"][:, None] > 0.5, rows[:, 0], 0.0))


def by_record(x, d):
    return jnp.sum(jax.vmap(lambda row, t: jnp.logaddexp(row @ x, t) + jax.nn.softplus(row[0] * x[1]))(d["X"], d["t"]))


def number_of_events(x, d):
    return jnp.sum(d["t"] > 0.5) * x[0] ** 2 + jnp.sum(d["count"]) * jnp.sum(x)


def triangles(x, d):
    matrices = d["cube"] @ jnp.swapaxes(d["cube"], 1, 2) + jnp.exp(x[0]) * jnp.eye(2)
    lower = jnp.linalg.cholesky(matrices)
    return jnp.sum(jnp.log(jnp.diagonal(lower, axis1=1, axis2=2)))


SUMS = [
    weibull, negative_binomial, count_in_literals, square_of_a_sum, shares_of_a_sum, contractions, records_last,
    random_intercepts, categorical, within_records, shapes, by_record, number_of_events, triangles,
]  # fmt: skip


def _derivatives(function, x, data):
    def both(x, data):
        gradient = jax.grad(function)
        return function(x, data), gradient(x, data), jax.jacfwd(gradient)(x, data)

    return jax.jit(both)(x, data)


@pytest.mark.parametrize("function", SUMS, ids=lambda f: f.__name__)
def test_padded_function_is_the_function(function):
    """Value, gradient and Hessian, with fewer records than parameters and with more; the program is always the same."""
    rng = np.random.default_rng(1)
    programs = set()
    for n in (2, DIM, 23, 64):
        data = jax.tree.map(jnp.asarray, _records(n, n))
        padded, longer = pad(function, data, DIM, 64)
        programs.add(padded)
        assert padded.records == 64 and float(longer.weights.sum()) == n
        if n in (2, 23):
            x = jnp.asarray(0.5 * rng.normal(size=DIM))
            for own, its in zip(_derivatives(function, x, data), _derivatives(padded, x, longer), strict=True):
                np.testing.assert_allclose(its, own, rtol=1e-11, atol=1e-11)
    # Equal, so that one compilation serves all of them.
    assert len(programs) == 1


def test_copies_count_nothing_whatever_they_are():
    """The negative control: weights of one for the copies, or the padded number in place of the true one, are seen."""
    data = jax.tree.map(jnp.asarray, _records(23))
    x = jnp.array([0.2, -0.3, 0.4])
    padded, longer = pad(negative_binomial, data, DIM, 64)
    right = negative_binomial(x, data)
    assert abs(padded(x, longer) - right) < 1e-10
    assert abs(padded(x, longer._replace(weights=jnp.ones(64))) - right) > 1
    assert abs(padded(x, longer._replace(numbers=jnp.full(1, 64.0))) - right) > 1


# Functions that are none ----------------------------------------------------------------------------------------------

CLOSED_OVER = np.linspace(0.0, 1.0, 23)


def _autoregression(x, d):
    def step(level, y):
        return x[0] * level + y, (y - x[1] * level) ** 2

    return jnp.sum(jax.lax.scan(step, 0.0, d["t"])[1])


@jax.custom_jvp
def _strange(v):
    return v


@_strange.defjvp
def _(primals, tangents):
    return primals[0], tangents[0] / jnp.sum(jnp.ones_like(primals[0]))


NO_SUMS = {
    "max": lambda x, d: jnp.max(d["X"] @ x),
    "median": lambda x, d: jnp.median(d["X"] @ x),
    "sorted": lambda x, d: jnp.sort(d["X"] @ x)[0],
    "log-sum-exp": lambda x, d: logsumexp(d["X"] @ x),
    "softmax": lambda x, d: jnp.sum(jax.nn.softmax(d["X"] @ x) * d["t"]),
    "product": lambda x, d: jnp.prod(1 + 0.01 * (d["X"] @ x)),
    "cumulative": lambda x, d: jnp.sum(jnp.log(jnp.cumsum(jnp.exp(d["X"] @ x)))),
    "differences": lambda x, d: jnp.sum((jnp.diff(d["t"]) - x[0]) ** 2),
    "first record": lambda x, d: jnp.sum(d["t"][1:] * x[0] - d["t"][:-1] * x[1]),
    "last record": lambda x, d: jnp.sum(d["X"] @ x) * d["t"][-1],
    "reversed": lambda x, d: jnp.sum(d["t"][::-1] * (d["X"] @ x)),
    "every other": lambda x, d: jnp.sum((d["X"] @ x)[::2]),
    "autoregression": _autoregression,
    "pairs": lambda x, d: jnp.sum((d["t"][:, None] - x[0] * d["t"][None]) ** 2),
    "gram": lambda x, d: jnp.sum((d["X"] @ d["X"].T) * x[0]),
    "covariance": lambda x, d: jnp.linalg.slogdet(jnp.exp(x[0]) * jnp.eye(d["t"].shape[0]) + d["X"] @ d["X"].T)[1],
    "row numbers": lambda x, d: jnp.sum(jnp.arange(d["t"].shape[0]) * (d["X"] @ x)),
    "closed over": lambda x, d: jnp.sum(CLOSED_OVER * (d["X"] @ x)),
    "flattened": lambda x, d: jnp.sum(jnp.ravel(d["X"]) ** 2) * x[0],
    "joined": lambda x, d: jnp.sum(jnp.concatenate([d["t"], d["t"] * x[0]])),
    "branch": lambda x, d: jnp.sum(d["t"] * x[0]) if d["t"].shape[0] < 50 else x[1] + jnp.sum(d["t"]),
    "power": lambda x, d: jnp.sum(d["t"]) * x[0] ** d["t"].shape[0],
    "chosen by another": lambda x, d: jnp.sum((d["X"] @ x)[d["group"]]),
    "its own derivative": lambda x, d: jnp.sum(_strange(d["X"] @ x)),
    "quarter": lambda x, d: jnp.sum(d["t"][: d["t"].shape[0] // 4] * x[0]),
    "rolled": lambda x, d: jnp.sum(jnp.roll(d["t"], 1) * (d["X"] @ x)),
    "convolved": lambda x, d: jnp.sum(jnp.convolve(d["t"], x) ** 2),
}


@pytest.mark.parametrize("name", NO_SUMS)
def test_other_functions_are_refused(name):
    data = jax.tree.map(jnp.asarray, _records(23))
    with pytest.raises(Unpaddable):
        pad(NO_SUMS[name], data, DIM, 64)


def test_axes_are_told_apart_though_their_lengths_agree():
    """As many records as parameters: a matrix that is no record is not taken for records."""
    rng = np.random.default_rng(3)
    data = {"X": jnp.asarray(rng.normal(size=(DIM, DIM))), "P": jnp.asarray(rng.normal(size=(DIM, DIM)))}

    def function(x, d):
        return jnp.sum((d["X"] @ x) ** 2) + x @ d["P"] @ x

    with pytest.raises(Unpaddable):
        pad(function, data, DIM, 64)
    # A table of another length stays as it is, and so do records that are not the first axis.
    data = {"Z": jnp.asarray(rng.normal(size=(DIM, 9))), "t": jnp.ones(9), "u": jnp.ones(9), "P": data["P"]}

    def other(x, d):
        return jnp.sum((x @ d["Z"] - d["t"]) ** 2 * d["u"]) + x @ d["P"] @ x

    padded, longer = pad(other, data, DIM, 64)
    assert [shape.axis for shape in padded.shapes] == [None, 1, 0, 0]
    x = jnp.array([0.3, -0.1, 0.7])
    np.testing.assert_allclose(padded(x, longer), other(x, data), rtol=1e-12)


def test_two_tables_of_records():
    """Where one of two lengths can be padded and the other not, it is."""
    data = {"t": jnp.linspace(0, 1, 9), "u": jnp.linspace(1, 2, 9), "series": jnp.linspace(0, 2, 12)}

    def function(x, d):
        return jnp.sum((d["t"] - x[0]) ** 2 * d["u"]) + jnp.sum(jnp.cumsum(d["series"]) * x[1])

    padded, longer = pad(function, data, DIM, 64)
    x = jnp.array([0.3, -0.1, 0.7])
    np.testing.assert_allclose(padded(x, longer), function(x, data), rtol=1e-12)
    assert longer.leaves[0].shape == (12,) and longer.leaves[1].shape == (64,)


def test_sizes_among_the_data():
    """A Python number that says how many records there are follows them, and sites still share their program."""

    def function(x, d):
        return jnp.sum((d["y"] - x[0] * jnp.ones(d["n"])) ** 2) * d["scale"] - d["n"] * x[1]

    sites = []
    for n in (5, 23):
        y = np.linspace(0.0, 1.0, n)
        program = user_model(function, {"y": y, "n": n, "scale": 3}).padded(DIM, "a", 64)
        x = jnp.array([0.3, -0.1, 0.7])
        assert isinstance(program, Program)
        np.testing.assert_allclose(program.value(x), np.sum((y - 0.3) ** 2) * 3 + 0.1 * n, rtol=1e-12)
        sites.append(program)
    assert jax.tree.structure(sites[0]) == jax.tree.structure(sites[1])
