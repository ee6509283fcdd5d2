"""Model files: what is built is what is read back, and nothing else is read."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.scipy.special import betaln, gammaln, log_ndtr, logsumexp, xlogy
from scipy import stats

import fedpdmc as fp
from fedpdmc._jax.precision import double_precision
from fedpdmc.errors import InputError
from fedpdmc.models.model_file.model import MOST_BYTES, parse, parsed, render
from fedpdmc.models.model_file.review import usual_point, usual_row

COLUMNS = {"t": "positive", "k": 3, "y": "count"}


def model(function, **more):
    given = {"parameters": {"a": (), "b": 3, "c": (2, 2)}, "columns": COLUMNS, "title": "a test", **more}
    return fp.Model(function, **given)


def loop(x, row):
    def step(carry, b):
        return 0.5 * carry + jnp.tanh(b * row["t"]), carry

    last, all_of_them = lax.scan(step, x["a"], x["b"])
    return last + jnp.sum(all_of_them**2)


CASES = {
    "arithmetic": lambda x, row: jnp.sum(x["b"] ** 2 / row["t"] - x["a"] ** 3) + x["c"][0, 1] * x["c"][1, 0],
    "index": lambda x, row: x["b"][row["k"]] ** 2 + x["c"][1, row["k"] // 2] * x["a"],
    "softplus": lambda x, row: jax.nn.softplus(x["a"]) - xlogy(row["y"], jax.nn.sigmoid(x["a"])),
    "special": lambda x, row: gammaln(jnp.exp(x["a"]) + row["y"]) - log_ndtr(x["b"][0]) + betaln(jnp.exp(x["a"]), 2.5),
    "logsumexp": lambda x, row: logsumexp(x["b"] * row["t"]) - jax.nn.log_softmax(x["b"])[row["k"]],
    "matrices": lambda x, row: x["b"][:2] @ x["c"] @ x["c"].T @ x["b"][1:] + jnp.trace(x["c"]),
    "choice": lambda x, row: jnp.where(row["k"] == 1, jnp.exp(x["a"]), jnp.sum(x["b"])) * row["t"],
    "cumulative": lambda x, row: jnp.cumsum(jnp.exp(x["b"]))[row["k"]] + jnp.max(x["b"] ** 2),
    "constants": lambda x, row: (
        jnp.array([1.5, -2.0, 0.25]) @ x["b"] + jnp.linspace(0, 1, 4).reshape(2, 2)[1] @ x["c"][0]
    ),
    "loop": loop,
}


@pytest.mark.parametrize("function", CASES.values(), ids=CASES)
@double_precision
def test_a_file_computes_what_the_function_computes(function):
    built = model(function)
    read = fp.Model.parse(built.text.encode())
    assert read == built and read.text == built.text and render(read.source) == built.text
    for at in (0.3, -0.7):
        for level in (0, 2):
            x, row = usual_point(built, at), {**usual_row(built), "k": np.asarray(level)}
            found = jax.value_and_grad(lambda x, row=row: read.minus_log_likelihood(x, row))(x)
            right = jax.value_and_grad(lambda x, row=row: jnp.asarray(function(x, row)))(x)
            for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-14)


def drawn(x, row):
    return x["a"] * jax.random.normal(jax.random.key(0))


def called_back(x, row):
    return jax.pure_callback(np.sin, jax.ShapeDtypeStruct((), jnp.float64), x["a"])


def written(x, row):
    jax.debug.print("{}", row["t"])
    return x["a"]


def endless(x, row):
    return lax.while_loop(lambda a: a < 10, lambda a: 2 * a, x["a"])


@jax.custom_jvp
def own_derivative(a):
    return a


own_derivative.defjvp(lambda primals, tangents: (primals[0], 2 * tangents[0]))


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (drawn, "random"),
        (called_back, "pure_callback"),
        (written, "debug"),
        (endless, "while"),
        (lambda x, row: own_derivative(x["a"]), "derivative of its own"),
        (lambda x, row: x["a"].astype(jnp.float32), "float32"),
        (lambda x, row: x["nothing"], "KeyError"),
        (lambda x, row: x["b"], "not a number"),
    ],
    ids=["random", "callback", "print", "while", "custom", "32 bits", "name", "vector"],
)
def test_what_a_file_cannot_hold_is_refused_where_it_is_built(function, words):
    with pytest.raises(InputError, match=words):
        model(function)


GOOD = """fedpdmc model 1
title a test
parameter a f64[]
column t f64[] positive
minus_log_likelihood
%1 = log t : f64[]
%2 = mul a %1 : f64[]
return %2
end
"""


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("model 1", "model 2", "first line"),
        ("%1 = log t", "%1 = __import__ t", "unknown operation"),
        ("%1 = log t", "%1 = log os", "unknown name"),
        ("%1 = log t", "%1 = log %2", "not made yet"),
        ("%1 = log t", "%1 = log  t", "where a name belongs|usual form"),
        ("%1 = log t", "%1 = log t t", "other operands"),
        ("%1 = log t", "%1 = log t axes=[0]", "other operands or parameters"),
        ("%1 = log t : f64[]", "%1 = log t : f64[2]", "the file says"),
        ("%1 = log t : f64[]", "%1 = broadcast t axes=[] : f64[999999]", "at most"),
        ("%1 = log t : f64[]", "%1 = broadcast t axes=[0] : f64[7]", "JAX refuses"),
        ("f64[] positive", "f32[] positive", "where a type belongs"),
        ("f64[] positive", "f64[] secret", "where one of"),
        ("return %2", "return %2 %2", "names of their own"),
        ("return %2", "return a=%2", "not a number"),
        ("column t f64[] positive\n", "column t f64[] positive\ncolumn t f64[] positive\n", "twice"),
        ("end\n", "", "where a program begins|no line `end`"),
        ("end\n", "end\nend\n", "usual form"),
        ("title a test", "title a\x07test", "printable"),
        ("title a test", "title ä test", "ASCII"),
        ("title a test", "title a \u202etset", r"line 2: found a character that is not ASCII \('\\u202e'\)"),
        ("end\n", "\u200bend\n", r"line \d+: found a character that is not ASCII \('\\u200b'\)"),
        ("mul a %1", "mul a 1.50", "usual form"),
        ("mul a %1", "mul a 1e999", "where a name belongs"),
        ("minus_log_likelihood", "variables", "no minus_log_likelihood"),
    ],
)
def test_anything_but_what_the_builder_writes_is_refused(old, new, words):
    parsed(GOOD.encode())
    with pytest.raises(InputError, match=words):
        fp.Model.parse(GOOD.replace(old, new, 1).encode())


def test_long_files_and_much_work_are_refused():
    with pytest.raises(InputError, match="bytes"):
        fp.Model.parse(b" " * (MOST_BYTES + 1))
    lines = ["%1 = broadcast a axes=[] : f64[128,128]"]
    lines += [f"%{i} = exp %{i - 1} : f64[128,128]" for i in range(2, 300)]
    text = GOOD.replace("%1 = log t : f64[]\n%2 = mul a %1 : f64[]\nreturn %2", "\n".join([*lines, "return a"]))
    with pytest.raises(InputError, match="operations for a record"):
        fp.Model.parse(text.encode())
    dots = GOOD.replace("%1 = log t : f64[]\n", "%1 = broadcast a axes=[] : f64[128,128]\n").replace(
        "%2 = mul a %1 : f64[]\nreturn %2",
        "%2 = dot %1 %1 left=[1] right=[0] left_batch=[] right_batch=[] : f64[128,128]\nreturn a",
    )
    with pytest.raises(InputError, match="operations for a record"):
        fp.Model.parse(dots.encode())


FILES = [model(function).text for function in CASES.values()]


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_changed_file_is_refused_or_says_what_it_is(data):
    """What is accepted is its own usual text, whatever was changed."""
    lines = data.draw(st.sampled_from(FILES)).split("\n")
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(lines) - 1))
        words = lines[at].split(" ")
        place = data.draw(st.integers(0, len(words) - 1))
        other = data.draw(st.sampled_from(lines)).split(" ")
        kind = data.draw(st.sampled_from(["swap", "text", "drop", "line"]))
        if kind == "swap":
            words[place] = data.draw(st.sampled_from(other))
        elif kind == "text":
            words[place] = data.draw(st.text(max_size=12))
        elif kind == "drop":
            words.pop(place)
        lines[at] = " ".join(words if kind != "line" else other)
    text = "\n".join(lines).encode()
    try:
        found = fp.Model.parse(text)
    except InputError:
        return
    assert found.text.encode() == text


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=400))
def test_bytes_are_refused(data):
    for text in (data, GOOD.encode()[:40] + data, GOOD.encode()[:-4] + data):
        try:
            source = parse(text)
        except InputError:
            continue
        assert render(source).encode() == text


def test_records_are_checked(tmp_path):
    built = fp.Model.load(model(CASES["index"]).save(tmp_path / "m.fpm"))
    good = {"t": [1.0, 2.0], "k": [0, 2], "y": [3, 4]}
    assert built.of(good).records == 2
    for name, values, words in (("t", [1.0, 0.0], "positive"), ("k", [0, 3], "0 to 2"), ("y", [0.5, 1], "whole")):
        with pytest.raises(InputError, match=words):
            built.of({**good, name: values})
    with pytest.raises(InputError, match="numbers of records"):
        built.of({**good, "t": [1.0]})
    with pytest.raises(InputError, match="Give t, k, y"):
        built.of({"t": [1.0]})
    with pytest.raises(InputError, match="no linear predictor"):
        built.of(good, X=np.ones((2, 1)))


@double_precision
def test_a_group_of_rows_is_one_record():
    """An autoregression of one series, given with a mask: the sum over the series is that of each by itself."""

    def function(x, row):
        rest = row["y"][1:] - x["a"] * row["y"][:-1]
        return 0.5 * jnp.sum(row["there"][1:] * rest**2)

    built = fp.Model(function, parameters=["a"], columns={"y": "real"}, group=(4, "there"))
    y = np.array([[1.0, 2.0, 1.5, 0.5], [3.0, 1.0, 3.0, 3.0]])
    there = np.array([[1.0, 1, 1, 1], [1, 1, 0, 0]])
    records = built.of({"y": y, "there": there})
    own = [np.sum((np.array(s[1:]) - 0.3 * np.array(s[:-1])) ** 2) / 2 for s in ([1.0, 2.0, 1.5, 0.5], [3.0, 1.0])]
    np.testing.assert_allclose(records.function(jnp.array([0.3]), records.data), sum(own))
    padded = records.padded(1, "north", 16)
    np.testing.assert_allclose(padded.value(jnp.array([0.3])), sum(own), rtol=1e-14)


def test_a_reviewer_reads_formulas_columns_and_values():
    def function(x, row):
        u = jnp.exp(x["log_shape"]) * (jnp.log(row["time"]) - x["eta"])
        return jnp.exp(u) - row["died"] * (x["log_shape"] + u)

    weibull = fp.Model(
        function, parameters=["log_shape"], predictors=["eta"], columns={"time": "positive", "died": "binary"},
        variables=lambda x: {"shape": jnp.exp(x["log_shape"])}, title="Weibull",
    )  # fmt: skip
    text = weibull.review()
    for line in (
        "t1 = exp(log_shape) * (log(time) - eta)",
        "-log p(record) = exp(t1) - died * (log_shape + t1)",
        "shape = exp(log_shape)",
        "time (): column, positive",
        weibull.digest,
        "every operation has a proved enclosure",
    ):
        assert line in text
    # By hand: at eta = log_shape = 0 and time 1.5, died 1: t - log t.
    assert f"{1.5 - np.log(1.5):.6g}" in text
    jumps = fp.Model(lambda x, row: jnp.floor(x["a"]), parameters=["a"], columns={"t": "real"})
    assert "refuses this model" in jumps.review()


def robust(X, y):
    """Regression with Student-t noise of unknown scale."""
    beta = numpyro.sample("beta", dist.Normal(0, 2).expand([2]).to_event(1))
    scale = numpyro.sample("scale", dist.HalfNormal(2.0))
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("obs", dist.StudentT(4.0, X @ beta, scale), obs=y)


@double_precision
def test_a_numpyro_model_is_its_density_with_names_prior_and_constraints():
    built = fp.Model.from_numpyro(robust, {"X": {"one": "real", "age": "real"}, "y": "real"})
    rng = np.random.default_rng(1)
    X, y = np.c_[np.ones(7), rng.normal(size=7)], rng.normal(size=7)
    records = built.of({"one": X[:, 0], "age": X[:, 1], "y": y})
    assert records.names == ("beta[0]", "beta[1]", "scale_unconstrained")
    x = jnp.array([0.3, -0.4, 0.2])
    scale = np.exp(0.2)
    right = -stats.t.logpdf(y, 4, X @ [0.3, -0.4], scale).sum()
    np.testing.assert_allclose(records.function(x, records.data), right, rtol=1e-12)
    prior = -stats.norm.logpdf([0.3, -0.4], 0, 2).sum() - stats.halfnorm.logpdf(scale, 0, 2) - 0.2
    np.testing.assert_allclose(built.prior()(x), prior, rtol=1e-12)
    found = records.constrain(x)
    np.testing.assert_allclose(found["scale"], scale)
    np.testing.assert_allclose(found["beta"], [0.3, -0.4])


def one_for_each(y):
    with numpyro.plate("records", y.shape[0]):
        own = numpyro.sample("own", dist.Normal())
        numpyro.sample("obs", dist.Normal(own, 1.0), obs=y)


def together(y):
    mean = numpyro.sample("mean", dist.Normal())
    numpyro.sample("obs", dist.MultivariateNormal(jnp.full(y.shape, mean), 0.5 + 0.5 * jnp.eye(y.shape[0])), obs=y)


@pytest.mark.parametrize(("function", "words"), [(one_for_each, "for each record"), (together, "not the sum of both")])
def test_a_numpyro_model_whose_records_are_not_independent_is_refused(function, words):
    with pytest.raises(InputError, match=words):
        fp.Model.from_numpyro(function, {"y": "real"})


@pytest.mark.parametrize("side", ["lower", "transposed", "upper"])
def test_small_matrices_are_factored(side):
    """A bivariate response: the file has the value of the function that was traced."""

    def function(x, row):
        off = jnp.tanh(x["r"])
        root = jnp.linalg.cholesky(jnp.array([[2.0, off], [off, 1.0 + jnp.exp(x["s"])]]))
        y = jnp.stack([row["a"] - x["s"], row["b"]])
        options = {"lower": {"lower": True}, "transposed": {"lower": True, "trans": 1}, "upper": {"lower": False}}[side]
        z = jax.scipy.linalg.solve_triangular(root.T if side == "upper" else root, y, **options)
        return 0.5 * z @ z + jnp.log(root[0, 0]) + jnp.log(root[1, 1])

    model = fp.Model(function, parameters=["r", "s"], columns={"a": "real", "b": "real"})
    with jax.enable_x64(True):
        x, row = {"r": jnp.array(0.4), "s": jnp.array(-0.3)}, {"a": jnp.array(1.2), "b": jnp.array(-0.7)}
        exact, found = function(x, row), model.minus_log_likelihood(x, row)
    np.testing.assert_allclose(found, exact, rtol=1e-6)


def test_cases_and_large_matrices_are_refused_with_a_remedy():
    with pytest.raises(InputError, match="jnp.where"):
        fp.Model(
            lambda x, row: jax.lax.cond(row["y"] > 0, jnp.sin, jnp.cos, x["a"]), parameters=["a"], columns={"y": "real"}
        )
    with pytest.raises(InputError, match="at most 6 rows"):
        fp.Model(
            lambda x, row: jnp.sum(jnp.linalg.cholesky(jnp.exp(x["a"]) * jnp.eye(7))) * row["y"],
            parameters=["a"], columns={"y": "real"},
        )  # fmt: skip


def test_a_number_is_not_the_result_of_an_equation_of_that_number():
    """The second equation's result, doubled, beside ``2 * 2``: two values, though 2 == 2.0."""

    def function(x, row):
        second = jnp.exp(jnp.sin(x["a"]))
        return (
            jnp.sum(jnp.stack([jnp.full(2, 2.0) * row["y"], jnp.full(2, second)]) ** 2) + jnp.cos(second) - jnp.cos(2.0)
        )

    model = fp.Model(function, parameters=["a"], columns={"y": "real"})
    with jax.enable_x64(True):
        x, row = {"a": jnp.array(0.4)}, {"y": jnp.array(1.5)}
        np.testing.assert_allclose(model.minus_log_likelihood(x, row), function(x, row), rtol=1e-12)
