"""Effects of groups whose records are a program: against the same model with bounds of its own, and enclosed rates."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedpdmc as fp
from fedpdmc._jax.precision import double_precision
from fedpdmc.errors import InputError
from fedpdmc.models import effects_prior, random_effects, with_effects
from fedpdmc.potentials import Quadratic
from fedpdmc.potentials.chebyshev import interpolant
from fedpdmc.potentials.latent_program import GroupedRemainder

GROUPS = np.repeat(["a", "b", "c"], [3, 1, 5])


def counts() -> fp.Model:
    """Poisson records as a model file."""
    return fp.Model(
        lambda x, row: jnp.exp(x["eta"]) - row["y"] * x["eta"], predictors=["eta"], columns={"y": "count"}
    )  # fmt: skip


def data(seed=0):
    rng = np.random.default_rng(seed)
    X = np.c_[np.ones(9), rng.normal(size=9)]
    return X, rng.poisson(np.exp(X @ [0.4, -0.6])).astype(float), rng.exponential(2.0, 9) + 0.1


def both(effects):
    """The same records twice: by the loss that is built in, and by a model file."""
    X, y, _ = data()
    varying = X[:, :effects]
    return (
        random_effects(X, y, GROUPS, family="poisson", effects=varying),
        with_effects(counts().of({"y": y}, X), GROUPS, effects=varying),
    )


def opened(model, spread=0.3):
    """In coordinates with correlations, less a quadratic."""
    rng = np.random.default_rng(1)
    x = jnp.concatenate([jnp.array([0.3, -0.5]), jnp.linspace(-0.4, 0.2, model.dim - 2)])
    rows = jnp.asarray(spread * (np.eye(model.dim) + 0.3 * np.tril(rng.normal(size=(model.dim, model.dim)), -1)))
    precision = 3 * np.eye(model.dim) + 0.5
    return model.opened(x, rows, Quadratic(jnp.asarray(precision), jnp.linspace(-1.0, 1.0, model.dim))), x


def states(part, chains=64, seed=2):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=(chains, k))) for k in (part.dim, part.dim, part.latents)]


@pytest.mark.parametrize("effects", [1, pytest.param(2, marks=pytest.mark.long)])
@double_precision
def test_a_model_file_is_the_loss_that_is_built_in(effects):
    """Marginal, contributions, map, gradients and kernel agree, which have no line in common but the map's constants."""
    one, two = both(effects)
    (known, x), (found, _) = opened(one), opened(two)
    assert isinstance(found, GroupedRemainder)
    value, share = jax.jit(lambda m, x: m.value(x)), jax.jit(lambda m, x: m.contributions(x))
    np.testing.assert_allclose(value(two, x), value(one, x), rtol=1e-10)
    np.testing.assert_allclose(share(two, x), share(one, x), rtol=1e-8, atol=1e-10)
    a, _, zeta = states(known)
    u = jnp.asarray(np.random.default_rng(3).random((known.chances, len(a))))
    assert found.chances == known.chances
    for call, given in (("to_z", (a, zeta)), ("gradients", (a, zeta)), ("kernel", (a, zeta, u))):
        exact, own = (eqx.filter_jit(getattr(part, call))(*given) for part in (known, found))
        np.testing.assert_allclose(own, exact, rtol=1e-8, atol=1e-8, err_msg=call)


def weibull(effects=2):
    X, y, time = data()
    return with_effects(fp.models.weibull(X, time, (y > 0).astype(float)), GROUPS, effects=X[:, :effects])


@double_precision
def test_rates_are_within_the_error_of_their_polynomial():
    """On the whole cell; a hundredth of the error would not do."""
    part, _ = opened(weibull())
    a, v, zeta = states(part)
    cell = eqx.filter_jit(part.cell)(a, v, zeta, jnp.full(64, 0.8))
    assert np.all((np.asarray(cell.length) > 0) & (np.asarray(cell.length) <= 0.8))
    assert np.median(cell.length) > 0.1
    gradients, tight = eqx.filter_jit(part.gradients), 0.0
    for share in (0.0, 0.3, 0.7, 1.0):
        s = (share * cell.length)[:, None]
        rate = jnp.sum(gradients(a * jnp.cos(s) + v * jnp.sin(s), zeta) * (v * jnp.cos(s) - a * jnp.sin(s)), -1)
        off = np.abs(np.asarray(rate - interpolant(cell.values, share)) / np.asarray(cell.error))
        assert np.all(off <= 1)
        tight = max(tight, off.max())
    assert tight > 0.01


@double_precision
def test_the_kernel_leaves_the_effects_in_place():
    """Moments of the effects of Weibull records given θ, from starts drawn by quadrature; a kernel of another θ fails."""
    part, _ = opened(weibull(1))
    rng, chains = np.random.default_rng(5), 4096
    a = jnp.zeros((1, part.dim))
    grid = jnp.linspace(-8, 8, 801)
    energy = jax.jit(jax.vmap(lambda z: part.energy(a[0], jnp.zeros(part.latents).at[0].set(z))))(grid)
    p = np.exp(-np.asarray(energy - energy.min()))
    p /= p.sum()
    exact = np.array([(p * np.asarray(grid) ** k).sum() for k in (1, 2)])
    start = np.zeros((chains, part.latents))
    start[:, 0] = rng.choice(np.asarray(grid), chains, p=p) + rng.uniform(-0.01, 0.01, chains)

    def deviations(place):
        u = jnp.asarray(rng.random((part.chances, chains)))
        moved = np.asarray(eqx.filter_jit(part.kernel)(jnp.broadcast_to(place, (chains, part.dim)), start, u))[:, 0]
        assert np.mean(moved != start[:, 0]) > 0.3
        powers = np.stack([moved, moved**2])
        return np.abs(powers.mean(1) - exact) / (powers.std(1) / np.sqrt(chains))

    assert deviations(a[0]).max() < 4
    assert deviations(a[0] + 1.5).max() > 6


def test_results_show_variables_and_spreads():
    model: Any = weibull()
    assert model.names == ("beta[0]", "beta[1]", "log_shape", "log_sd[0]", "log_sd[1]", "atanh_correlation")
    found = model.constrain(jnp.array([1.0, 2.0, 0.5, -1.0, 0.0, 0.3]))
    assert list(found) == ["beta[0]", "beta[1]", "shape", "sd[0]", "sd[1]", "correlation"]
    np.testing.assert_allclose([found["shape"], found["sd[0]"]], np.exp([0.5, -1.0]), rtol=1e-6)
    prior = effects_prior(model, scale=2.0)
    np.testing.assert_allclose(np.diag(prior.normal.precision), [0.25] * 3 + [0, 0, 4])


def _ordinal(levels=3):
    X, y, _ = data()
    return fp.models.multinomial_logit(X, np.minimum(y, levels - 1), levels)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: with_effects(_ordinal(), GROUPS), "eta of shape"),
        (lambda: with_effects(weibull(), GROUPS), "RandomEffects"),
        (lambda: with_effects(fp.models.gamma(data()[0], data()[2]), GROUPS[:4]), "one group for each"),
        (lambda: with_effects(fp.models.gamma(data()[0], data()[2]), GROUPS, effects=np.ones((9, 3))), "one or two"),
        (
            lambda: with_effects(
                fp.Model(lambda x, row: (row["y"] - x["m"]) ** 2, parameters=["m"], columns={"y": "real"}).of(
                    {"y": np.ones(9)}
                )
            ),
            "linear predictors: none",
        ),
    ],
)
def test_what_has_no_effects_is_told(call, told):
    with pytest.raises(InputError, match=told):
        call()
