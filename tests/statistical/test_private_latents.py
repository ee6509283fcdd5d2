"""Runs with private latents: joint moments against quadrature, a wrong way to go back, bits, and bad input."""

import dataclasses
import functools

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from scipy import stats

import fedpdmc as fp
from fedpdmc._jax.random_streams import uniforms
from fedpdmc.clocks import LatentClock
from fedpdmc.errors import InputError
from fedpdmc.members import run_coordinates
from fedpdmc.potentials import BentSpreadPrior, RandomEffects
from fedpdmc.potentials.random_effects_rates import Conditional
from fedpdmc.sampling import arguments
from fedpdmc.whitening import curvatures, log_volume, steepness

CHAINS, LENGTH = 512, 30.0
# Below the least of these, halfway between nodes of the quadrature, crowded sites have 0.3 % of the log spread.
LOW = (-1.025, -1.775, -2.525)
CROWDED_LENGTH, CROWDED_BURN_IN = 20.0, 50.0
# Of the runs with faults: the rate of silent events, beside which those of other sites are frequent, so that a fault shows;
# another for kernels at the ends of plans, which show where silent events are rare; how often a right way would be refused.
SILENT, RARE, KERNELS, FALSE_ALARM = 1.5, 0.6, 3, 1e-6
FAULTY_CHAINS, FAULTY_LENGTH, FAULTY_BURN_IN = 1536, 60.0, 120.0
# Not going back is the smallest fault: 1,536 chains had T² = 94 (38 without a fault), where the limit is 99.
MANY_CHAINS = 4608


@functools.cache
def records(crowded=False):
    """Counts of six small groups at three sites: few records, and a posterior that is skewed in the log spread.

    Or ``crowded``: of eight sites with a group each, whose plans are cut by each other most of the time.
    """
    rng, out = np.random.default_rng(3), []
    for site in range(8 if crowded else 0):
        y = rng.poisson(np.exp(0.3 + 0.8 * rng.normal() * np.ones(4))).astype(float)
        out.append((np.ones((4, 1)), y, np.array([f"{site}"] * 4)))
    if crowded:
        return out
    for site in range(3):
        group = np.repeat([0, 1], [2, 3])
        y = rng.poisson(np.exp(0.3 + 0.8 * rng.normal(size=2)[group])).astype(float)
        out.append((np.ones((5, 1)), y, np.array([f"{site}{g}" for g in group])))
    return out


class NonCentred(RandomEffects):
    """With a poor private map, ``z = τ ζ``: parameters and latents depend on each other, and arrivals are frequent."""

    def conditional(self, x):
        """As if the records told nothing of the effects."""
        found = super().conditional(x)
        return Conditional(0.0 * found.mean, 0.0 * found.slope, 1e6 + 0.0 * found.variance)


def sites(kind: type[RandomEffects] = RandomEffects, crowded=False):
    models = [fp.models.random_effects(X, y, g, family="poisson") for X, y, g in records(crowded)]
    fields = [{field.name: getattr(model, field.name) for field in dataclasses.fields(model)} for model in models]
    return [fp.Site(kind(**own), name=f"s{m}") for m, own in enumerate(fields)]


def minus_log_joint(x, z, data):
    """The same model as a function of parameters, effects and records."""
    mean, log_spread = x
    eta = mean + z[data["group"]]
    return jnp.sum(jnp.exp(eta) - data["y"] * eta) + jnp.sum(0.5 * jnp.exp(-2 * log_spread) * z**2 + log_spread)


def function_sites():
    """Sites of that function."""
    found = []
    for m, (_, y, group) in enumerate(records()):
        names, index = np.unique(group, return_inverse=True)
        found.append(fp.Site(minus_log_joint, data={"group": index, "y": y}, latent=list(names), name=f"s{m}"))
    return found


def prior(spread="half-normal"):
    return fp.models.effects_prior(sites()[0].potential, scale=1.0, spread=spread)  # type: ignore[arg-type]


def of_parameters(m, s):
    """What is compared of mean and log spread: moments, and probabilities of its exponential lower tail."""
    found = {"m": m, "s": s, "mm": m**2, "ss": s**2, "ms": m * s, "sss": s**3}
    return found | {f"s<{low}": 1.0 * (s < low) for low in LOW}


@functools.cache
def moments(crowded=False):
    """By quadrature: of mean and log spread, of each effect, and of their products."""
    mean, spread = np.meshgrid(np.linspace(-3, 4, 141), np.linspace(-8, 2.5, 211), indexing="ij")
    log_density = -0.5 * mean**2 - (0.5 * np.exp(2 * spread) - spread)
    unit = np.linspace(-8, 8, 321)
    weight, given = np.exp(-0.5 * unit**2), {}
    effect = np.exp(spread)[..., None] * unit
    for _, y, group in records(crowded):
        for label in np.unique(group):
            own, eta = y[group == label], mean[..., None] + effect
            log_like = own.sum() * eta - len(own) * np.exp(eta)
            top = log_like.max(-1, keepdims=True)
            like = np.exp(log_like - top) * weight
            log_density = log_density + np.log(like.sum(-1)) + top[..., 0]
            given[label] = [(like * effect**k).sum(-1) / like.sum(-1) for k in (1, 2)]
    p = np.exp(log_density - log_density.max())
    p /= p.sum()
    out = of_parameters(mean, spread)
    for label, (one, two) in given.items():
        out |= {f"z{label}": one, f"zz{label}": two, f"zm{label}": one * mean, f"zs{label}": one * spread}
    return {name: float((p * value).sum()) for name, value in out.items()}


def deviations(seed, owners, crowded, chains, duration, burn_in):
    """By name, the average of each moment along each chain, less what quadrature gives."""
    post = fp.sample(owners, prior(), chains=chains, duration=duration, burn_in=burn_in, seed=seed, progress=False)
    m, s = np.moveaxis(post.draws(60), -1, 0)
    found = of_parameters(m, s)
    for site in owners:
        own = site.latent_posterior()
        for k, label in enumerate(own.names):
            z, (m, s) = own.z[..., k], np.moveaxis(own.theta, -1, 0)
            found |= {f"z{label}": z, f"zz{label}": z * z, f"zm{label}": z * m, f"zs{label}": z * s}
    exact = moments(crowded)
    return {name: values.reshape(chains, -1).mean(1) - exact[name] for name, values in found.items()}


def worst_deviation(seed, owners, crowded=False, tail=False):
    """The largest deviation of any moment from quadrature, in standard errors over chains; with those of the tail."""
    length, burn_in = (CROWDED_LENGTH, CROWDED_BURN_IN) if crowded else (LENGTH, 8.0)
    found = deviations(seed, owners, crowded, CHAINS, length, burn_in)
    told = [x for name, x in found.items() if tail or "<" not in name]
    return max(abs(x.mean()) / (x.std(ddof=1) / np.sqrt(len(x))) for x in told)


@pytest.mark.long
def test_joint_moments_of_parameters_and_effects():
    assert worst_deviation(5, sites()) < 4


@pytest.mark.long
def test_joint_moments_of_any_function_with_latents():
    assert worst_deviation(6, function_sites()) < 4


class NoVolume(BentSpreadPrior):
    """Wrong: the density of the bent log spread without the slope of the bend."""

    def value(self, x):
        """The prior alone."""
        u = self.center + self.rows @ x
        return super().value(x) + jnp.sum(log_volume(u, self.numbers))

    def _at(self, u):
        t1, (t2, t3) = steepness(u, self.numbers), curvatures(u, self.numbers)
        found = super()._at(u)
        return found._replace(first=found.first + t2 / t1, second=found.second + t3 / t1 - (t2 / t1) ** 2)


@pytest.mark.long
@pytest.mark.parametrize(("law", "least", "most"), [(BentSpreadPrior, 0, 4), (NoVolume, 8, np.inf)])
def test_the_exponential_lower_tail_of_the_log_spread(monkeypatch, law, least, most):
    """Its third moment and low probabilities, which rotations about a Gaussian of the log spread itself do not reach."""
    monkeypatch.setattr(arguments, "BentSpreadPrior", law)
    assert least <= worst_deviation(3, sites(crowded=True), crowded=True, tail=True) < most


class RightWay(LatentClock):
    """With another rate of silent events, which are repeated, as on a network."""

    silent_rate: float = eqx.field(default=SILENT, static=True)
    history = 0


class BackToTheStart(RightWay):
    """Wrong: what happened before the cut is lost."""

    def settle(self, state, path, elapsed, which, keys):
        """The latents at the plan's start."""
        return state


class NotBack(RightWay):
    """Wrong: what was walked beyond the cut counts."""

    def settle(self, state, path, elapsed, which, keys):
        """The latents at the end of the walk."""
        return eqx.tree_at(lambda s: s.settled, state, jnp.where(which[:, None], state.zeta, state.settled))


class Rarely(LatentClock):
    """Right, with few silent events."""

    silent_rate: float = eqx.field(default=RARE, static=True)
    history = 0


class KernelAtEveryPlan(Rarely):
    """Wrong: kernels are applied when a plan ends, which depends on the state."""

    def settle(self, state, path, elapsed, which, keys):
        """The right latents, moved some more."""
        state = super().settle(state, path, elapsed, which, keys)
        place, moved = self.position(path, elapsed), state.settled
        for k in range(KERNELS):
            key = keys ^ np.uint32(0x51ED270B + k)
            u = uniforms(key, path.number, jnp.zeros_like(path.number), self.potential.chances)
            moved = self.potential.kernel(place, moved, u)
        return eqx.tree_at(lambda s: s.settled, state, jnp.where(which[:, None], moved, state.settled))


def hotelling(found):
    """T² of the means of n independent rows of size p, and the value that it exceeds with `FALSE_ALARM` if they are zero.

    ``T² = n x̄ᵀ S⁻¹ x̄``, and ``(n − p) / (p (n − 1)) T²`` has the law F of p and n − p degrees of freedom.
    """
    n, p = found.shape
    mean, covariance = found.mean(0), np.cov(found.T)
    limit = p * (n - 1) / (n - p) * stats.f.isf(FALSE_ALARM, p, n - p)
    return n * mean @ np.linalg.solve(covariance, mean), limit


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The posterior is far from its reference")
@pytest.mark.parametrize(
    ("clock", "wrong", "chains", "seed"),
    [
        (RightWay, False, MANY_CHAINS, 90127), (NotBack, True, MANY_CHAINS, 90127),
        (BackToTheStart, True, FAULTY_CHAINS, 70411),
        (Rarely, False, FAULTY_CHAINS, 70411), (KernelAtEveryPlan, True, FAULTY_CHAINS, 70411),
    ],
)  # fmt: skip
def test_each_wrong_way_to_go_on_is_caught(monkeypatch, clock, wrong, chains, seed):
    """All moments at once, on the same study, with a private map that is poor: the right ways are below the limit."""
    monkeypatch.setattr(run_coordinates, "LatentClock", clock)
    owners = sites(NonCentred, crowded=True)
    found = deviations(seed, owners, True, chains, FAULTY_LENGTH, FAULTY_BURN_IN)
    told, limit = hotelling(np.stack([own for name, own in found.items() if "<" not in name], 1))
    print(f"{clock.__name__}: T² = {told:.1f}, limit {limit:.1f}")
    assert (told > limit) == wrong


def test_the_limit_of_all_moments_at_once_has_the_law_of_its_statistic():
    """With zero means one in twenty is above a limit of one in twenty."""
    rng, mix = np.random.default_rng(8), np.random.default_rng(9).normal(size=(12, 12))
    levels = [hotelling(rng.normal(size=(40, 12)) @ mix) for _ in range(400)]
    law = stats.f(12, 28)
    told = [law.sf(statistic * 28 / (12 * 39)) for statistic, _ in levels]
    assert stats.kstest(told, "uniform").pvalue > 1e-3
    assert levels[0][1] * 28 / (12 * 39) == pytest.approx(law.isf(FALSE_ALARM))


def test_a_run_repeats_itself_and_leaves_effects_with_their_sites():
    owners = sites()
    one = fp.sample(owners, prior(), chains=16, duration=3.0, burn_in=1.0, seed=2, progress=False)
    own = owners[0].latent_posterior()
    assert own.names == ("00", "01")
    draws = own.z.shape[1]
    assert own.z.shape == (16, draws, 2)
    assert draws >= 3
    assert own.theta.shape == (16, draws, 2)
    assert list(own.summary().index) == ["00", "01"]
    two = fp.sample(sites(), prior(), chains=16, duration=3.0, burn_in=1.0, seed=2, progress=False)
    np.testing.assert_array_equal(one.draws(5), two.draws(5))
    assert one.certified
    assert one.names == ["x0", "log_sd"]
    assert "sd" in one.variables(2)
    longer = one.extend(duration=1.0, progress=False)
    assert longer.draws(2).shape == (16, 2, 2)
    assert owners[0].latent_posterior().z.shape == (16, draws + 1, 2)


X, Y, G = np.ones((4, 1)), np.array([0.0, 1.0, 1.0, 0.0]), np.array(["a", "a", "b", "b"])


def _model(**options):
    return fp.models.random_effects(X, Y, G, **options)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: fp.models.random_effects(X, Y, ["a", "a", None, "b"]), "a missing group"),
        (lambda: fp.models.random_effects(X, Y, pd.Series(pd.Categorical(G, ["a", "b", "c"]))), "'c' without records"),
        (lambda: fp.models.random_effects(X, Y, range(4), family="linear"), "one record in every group"),
        (lambda: fp.models.random_effects(X, 2 * Y, G), "Give labels 0 and 1"),
        (lambda: fp.models.random_effects(X, Y - 2, G, family="poisson"), "Give counts"),
        (lambda: _model(size=2.0), "size"),
        (lambda: _model(family="student_t"), "df"),
        (lambda: _model(effects=np.ones((4, 3))), "one or two columns"),
        (lambda: fp.models.effects_prior(_model(), spread="flat"), "half-normal"),
        (lambda: fp.models.effects_prior(_model(), spread_scale=np.inf), "spread_scale"),
        (lambda: fp.Site(_model(), name="s", budget=_budget()), "private history"),
        (lambda: fp.Site(_model(), name="s").latent_posterior(), "fedpdmc.sample first"),
        (lambda: fp.sample([fp.Site(_model(), name=n) for n in "st"], fp.models.normal_prior(2)), "which site 's' has too"),
        (lambda: fp.sample([fp.Site(_model(), name="s")]), "improper"),
        (lambda: fp.Site(_model(), name="s", latent=2), "given as a function"),
        (lambda: fp.Site(minus_log_joint, data={}, name="s", latent=0), "how many numbers"),
        (lambda: fp.Site(minus_log_joint, data={}, name="s", latent=["a", "a"]), "occurs twice"),
        (lambda: fp.Site(minus_log_joint, data={}, name="s", latent=2, budget=_budget()), "private history"),
        (lambda: fp.sample([fp.Site(_model(), name="s")], fp.models.normal_prior(2), dynamics=fp.ZigZag()), "Boomerang"),
    ],
)  # fmt: skip
def test_bad_input_is_told(call, told):
    with pytest.raises(InputError, match=told):
        call()


def _budget():
    return fp.Budget(epsilon=1.0, delta=1e-5, bounds=fp.Bounds(norm=1.0))


def test_a_saved_run_goes_on_with_what_its_sites_have_kept(tmp_path):
    """To the bits of one that stayed in memory; the archive has no effects, and without them it is refused."""
    owners = sites()
    post = fp.sample(owners, prior(), chains=16, duration=3.0, burn_in=1.0, seed=2, progress=False)
    post.save(tmp_path / "post.zarr")
    for site in owners:
        site.latent_posterior().save(tmp_path / f"{site.name}.npz")
    assert (tmp_path / "s0.npz").stat().st_mode & 0o777 == 0o600
    whole = post.extend(duration=1.0, progress=False)
    kept = owners[1].latent_posterior()
    again = sites()
    with pytest.raises(InputError, match="restore_latents"):
        fp.load(tmp_path / "post.zarr").extend(duration=1.0, sites=again, prior=prior(), progress=False)
    for site in again:
        site.restore_latents(tmp_path / f"{site.name}.npz")
    longer = fp.load(tmp_path / "post.zarr").extend(duration=1.0, sites=again, prior=prior(), progress=False)
    np.testing.assert_array_equal(longer.draws(5), whole.draws(5))
    np.testing.assert_array_equal(again[1].latent_posterior().z, kept.z)
    np.testing.assert_array_equal(again[1].latent_posterior().times, kept.times)
    (tmp_path / "bad.npz").write_bytes(b"PK nonsense")
    with pytest.raises(InputError, match="LatentPosterior.save"):
        again[0].restore_latents(tmp_path / "bad.npz")
