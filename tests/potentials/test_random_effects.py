"""Grouped effects: the marginal, the private map, the kernel, and bounds through complex times."""

import dataclasses
import itertools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedpdmc._jax.precision import double_precision
from fedpdmc.models import random_effects
from fedpdmc.potentials import Quadratic
from fedpdmc.potentials.chebyshev import interpolant
from fedpdmc.potentials.random_effects_rates import largest_slope

FAMILIES = {
    "logistic": ({}, lambda rng, eta: (rng.random(len(eta)) < 1 / (1 + np.exp(-eta))).astype(float)),
    "poisson": ({}, lambda rng, eta: rng.poisson(np.exp(eta)).astype(float)),
    "linear": ({}, lambda rng, eta: eta + 0.7 * rng.normal(size=len(eta))),
    "negative_binomial": ({"size": 2.5}, lambda rng, eta: rng.poisson(np.exp(eta)).astype(float)),
    "student_t": ({"df": 3.5, "scale": 0.6}, lambda rng, eta: eta + 0.6 * rng.standard_t(3.5, size=len(eta))),
}

# One family with a strip and one effect, whose log spread is bent, one with a scale and two; the others in long runs.
DAILY = [("logistic", 1, True), ("linear", 2, False)]
CASES = DAILY + [
    pytest.param(*case, marks=pytest.mark.long)
    for case in itertools.product(FAMILIES, (1, 2), (False, True))
    if case not in DAILY
]
# The first alone every day.
FEWER = [*DAILY[:1], pytest.param(*DAILY[1], marks=pytest.mark.long), *CASES[len(DAILY) :]]
# Numbers of a bend for each of two spreads.
BEND = np.array([[-0.3, 0.1], [0.4, 0.2], [0.1, 0.3], [0.3, 0.0], [0.05, 0.2], [0.0, 0.1]])


def grouped(family="logistic", effects=1, bend=False, seed=0, sizes=(3, 1, 5)):
    """A model of small groups, perhaps with bent log spreads, and a point for it."""
    rng = np.random.default_rng(seed)
    index = np.repeat(np.arange(len(sizes)), sizes)
    X = np.c_[np.ones(len(index)), rng.normal(size=len(index))]
    W = X[:, :effects]
    eta = X @ [0.4, -0.6] + np.sum(W * 0.8 * rng.normal(size=(len(sizes), effects))[index], 1)
    options, draw = FAMILIES[family]
    y = draw(rng, eta)
    weights = np.append(0.0, np.random.default_rng(seed).exponential(size=len(y) - 1))
    model = random_effects(X, y, index, family=family, effects=W, weights=weights, **options)
    x = jnp.concatenate([jnp.array([0.3, -0.5]), jnp.linspace(-0.4, 0.2, model.dim - 2)])
    return dataclasses.replace(model, bend=jnp.asarray(BEND[:, :effects])) if bend else model, x


def remainder(model, x, spread=0.3, seed=1) -> tuple[Any, jax.Array, Quadratic]:
    """In coordinates with correlations, less a quadratic."""
    rng = np.random.default_rng(seed)
    rows = jnp.asarray(spread * (np.eye(model.dim) + 0.3 * np.tril(rng.normal(size=(model.dim, model.dim)), -1)))
    gradient, hessian = jax.jit(lambda x: (jax.grad(model.value)(x), jax.hessian(model.value)(x)))(x)
    control = Quadratic(hessian, gradient - hessian @ x)
    return model.opened(x, rows, control), rows, control


def states(part, chains=64, seed=2):
    """Positions, velocities and latents."""
    rng = np.random.default_rng(seed)
    return (jnp.asarray(rng.normal(size=(chains, k))) for k in (part.dim, part.dim, part.latents))


@pytest.mark.parametrize("family", ["logistic", "linear"])
@double_precision
def test_the_marginal_is_the_integral_over_the_effects(family):
    model, x = grouped(family)
    z = jnp.linspace(-12, 12, 4001)
    found = model.energies(x, jnp.broadcast_to(z, (model.present.shape[0], 1, z.size)))
    exact = -np.log(np.exp(-np.asarray(found)).sum(1) * float(z[1] - z[0]))
    np.testing.assert_allclose(model.value(x), exact[: model.groups].sum(), rtol=1e-7)


@pytest.mark.parametrize(("family", "effects", "bend"), CASES)
@double_precision
def test_remainder_is_the_joint_potential_through_the_map(family, effects, bend):
    model, x = grouped(family, effects, bend)
    part, rows, control = remainder(model, x)
    a, v, zeta = states(part, 4)

    def joint(a, zeta):
        z = part.to_z(a[None], zeta[None])[0]
        theta = x + rows @ a
        jacobian = jax.jacfwd(lambda one: part.to_z(a[None], one[None])[0])(zeta)
        energy = model.energies(theta, z.reshape(-1, effects, 1))[: model.groups].sum()
        padded = model.groups * effects
        volume = jnp.linalg.slogdet(jacobian[:padded, :padded])[1]
        return energy - volume - control.value(theta)

    wanted = jax.jit(jax.vmap(jax.grad(joint)))(a, zeta)
    np.testing.assert_allclose(part.gradients(a, zeta), wanted, rtol=1e-8, atol=1e-8)
    rates = part.rates(a.T, v.T, part._columns(zeta))
    np.testing.assert_allclose(rates, jnp.sum(wanted * v, 1), rtol=1e-8, atol=1e-8)


# The polynomials of cells, below, have this bound for their error: every day also with two effects and a scale.
@pytest.mark.parametrize(("family", "effects", "bend"), FEWER)
@double_precision
def test_rates_stay_below_their_bound_at_complex_times(family, effects, bend):
    model, x = grouped(family, effects, bend)
    part, _, _ = remainder(model, x)
    a, v, zeta = states(part)
    columns, reach = part._columns(zeta), part.reach(part.forms(a.T, v.T))
    seen = 0
    # With poles of the loss and steep bends only narrow strips have a bound.
    for b in (0.05, 0.1, 0.5, 1.0):
        bound, fits = largest_slope(part, reach, jnp.abs(columns), jnp.full(len(a), b))
        seen += int(fits.sum())
        # Where the bound is used: in ellipses about cells that begin at zero.
        for real in np.linspace(-b, 3 * b, 7):
            for t in (real + 1j * b, real - 1j * b, real + 0.5j * b):
                at, velocity = a.T * np.cos(t) + v.T * np.sin(t), v.T * np.cos(t) - a.T * np.sin(t)
                rate = jnp.abs(part.rates(at, velocity, columns.astype(complex)))
                assert jnp.all(jnp.where(fits, rate <= bound, True))
    assert seen > len(a)


@pytest.mark.parametrize(("family", "effects", "bend"), FEWER)
@double_precision
def test_polynomials_of_cells_hold_the_rate(family, effects, bend):
    model, x = grouped(family, effects, bend)
    part, _, _ = remainder(model, x)
    a, v, zeta = states(part)
    cell = part.cell(a, v, zeta, jnp.full(len(a), 5.0))
    assert float(jnp.min(cell.length)) > 0.02
    for share in np.linspace(0, 1, 11):
        s = share * cell.length
        at, velocity = a.T * jnp.cos(s) + v.T * jnp.sin(s), v.T * jnp.cos(s) - a.T * jnp.sin(s)
        rate = part.rates(at, velocity, part._columns(zeta))
        assert float(jnp.max(jnp.abs(rate - interpolant(cell.values, share)) - cell.error)) <= 0


@pytest.mark.parametrize(("family", "effects", "bend"), FEWER)
@double_precision
def test_a_site_padded_to_the_size_of_another_has_its_own_rates_and_moves(family, effects, bend):
    """Records that fill several blocks, some of them padding alone, and groups that are padding."""
    model, x = grouped(family, effects, bend, sizes=(20, 1, 16))
    wider = model.padded(128, 5)
    (part, *_), (other, *_) = remainder(model, x), remainder(wider, x)
    a, v, zeta = states(part, chains=16)
    own, more, used = model.present.shape[0], wider.present.shape[0], model.groups
    assert more > own

    def placed(values, width, fill):
        """Of some groups, groups first."""
        grown = jnp.full((more * width, *values.shape[1:]), fill)
        return grown.at[: used * width].set(values[: used * width])

    latents = placed(zeta.T, effects, 0.3).T
    compiled = eqx.filter_jit(lambda one, at, u: (one.cell(a, v, at, room), one.gradients(a, at), one.kernel(a, at, u)))
    room, u = jnp.full(16, 0.5), jnp.asarray(np.random.default_rng(4).random((part.chances, 16)))
    chosen, decided, drawn = u[:own], u[own : 2 * own], u[2 * own :]
    again = jnp.concatenate([placed(chosen, 1, 0.5), placed(decided, 1, 0.5), placed(drawn, effects, 0.5)])
    (cell, gradients, moved), (wide, others, grown) = compiled(part, zeta, u), compiled(other, latents, again)
    np.testing.assert_allclose(cell.length, wide.length, rtol=1e-9)
    np.testing.assert_allclose(cell.values, wide.values, atol=1e-9)
    np.testing.assert_allclose(gradients, others, atol=1e-9)
    assert np.any(np.asarray(moved != zeta)[:, : used * effects])
    np.testing.assert_allclose(moved[:, : used * effects], grown[:, : used * effects], atol=1e-9)


@pytest.mark.parametrize("effects", [1, pytest.param(2, marks=pytest.mark.long)])
@double_precision
def test_the_kernel_leaves_the_conditional_invariant(effects):
    """Independent draws by rejection, moved once: the same moments; accepting everything gives others."""
    model, x = grouped("poisson", effects, sizes=(2, 1))
    part, rows, _ = remainder(model, x)
    rng, chains = np.random.default_rng(5), 20000
    a = jnp.broadcast_to(jnp.asarray([0.5, -1.0, *[0.8] * (part.dim - 2)]), (chains, part.dim))
    wide = 2.0 * rng.normal(size=(40 * chains, part.latents))
    z = part.to_z(jnp.tile(a[:1], (len(wide), 1)), jnp.asarray(wide))
    theta = x + rows @ a[0]
    target = -np.asarray(model.energies(theta, jnp.moveaxis(z.reshape(len(wide), -1, effects), 0, -1)))
    target = target[: model.groups]
    unused = wide[:, model.groups * effects :]
    log_ratio = target.sum(0) + 0.125 * np.sum(wide**2, 1) - 0.5 * np.sum(unused**2, 1)
    kept = wide[np.log(rng.random(len(wide))) < log_ratio - log_ratio.max()][:chains]
    zeta, u = jnp.asarray(kept), jnp.asarray(rng.random((part.chances, len(kept))))
    moved = np.asarray(part.kernel(a[: len(kept)], zeta, u))
    eager = u.at[model.present.shape[0] : 2 * model.present.shape[0]].set(1 - 1e-12)
    wrong = np.asarray(part.kernel(a[: len(kept)], zeta, eager))
    used = model.groups * effects

    def worst(draws):
        worst = 0.0
        for power in (1, 2, 3):
            one, other = draws[:, :used] ** power, kept[:, :used] ** power
            error = np.sqrt((one.var(0) + other.var(0)) / len(kept))
            worst = max(worst, float(np.max(np.abs(one.mean(0) - other.mean(0)) / error)))
        return worst

    assert len(kept) > 2000
    assert np.mean(np.any(moved != kept, 1)) > 0.5
    assert worst(moved) < 4
    assert worst(wrong) > 6
