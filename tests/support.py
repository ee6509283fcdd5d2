"""Small problems that many tests share: equal shapes, so that what one test compiled the next one reuses."""

import functools

import jax.numpy as jnp
import numpy as np

import fedpdmc as fp
from fedpdmc import dynamics
from fedpdmc.potentials import LinearPredictor, Logistic, Poisson, StudentT

DYNAMICS = {
    "zigzag": dynamics.ZigZag(),
    "bouncy": dynamics.BouncyParticle(),
    "boomerang": dynamics.Boomerang(),
    "factorised": dynamics.FactorisedBoomerang(),
}
LOSS_NAMES = ("logistic", "poisson", "student_t")


def loss(name):
    """A loss with parameters that are not 1."""
    return {
        "logistic": Logistic,
        "poisson": Poisson,
        "student_t": lambda: StudentT(jnp.asarray(3.5), jnp.asarray(0.6)),
    }[name]()


def responses(name, rng, n):
    """Responses that a loss can have."""
    return {
        "logistic": lambda: rng.integers(0, 2, n).astype(float),
        "poisson": lambda: rng.poisson(2.0, n).astype(float),
        "student_t": lambda: rng.standard_t(3, size=n),
    }[name]()


def predictor(name, seed=0, n=12, d=3, diagonal=False, scale=1.0):
    """A sum over n records with offsets, unequal weights (the first is zero), and no control variate."""
    rng = np.random.default_rng(seed)
    design = scale * (1.0 + rng.normal(size=d) if diagonal else rng.normal(size=(n, d)))
    n = d if diagonal else n
    offset = jnp.asarray(0.3 * rng.normal(size=n))
    response = jnp.asarray(responses(name, rng, n))
    weight = None if diagonal else jnp.asarray(np.append(0.0, np.random.default_rng(seed).exponential(size=n))[:n])
    return LinearPredictor.from_records(jnp.asarray(design), response, loss(name), offset, weight)


def states(seed, chains, dim, flow_of=None, spread=1.0):
    """Positions and velocities: of norm one by coordinate for the Zig-Zag process, else Gaussian."""
    rng = np.random.default_rng(seed)
    a, v = spread * rng.normal(size=(chains, dim)), rng.normal(size=(chains, dim))
    if flow_of is not None and flow_of.unit_speed:
        v = np.where(v < 0, -1.0, 1.0)
    return jnp.asarray(a), jnp.asarray(v)


def logistic_site(name, n=12, seed=0, **options):
    """A hospital with two covariates."""
    rng = np.random.default_rng([seed, *name.encode()])
    X = rng.normal(size=(n, 2))
    y = (rng.random(n) < 1 / (1 + np.exp(-X @ [-1.0, 1.5]))).astype(float)
    return fp.Site(fp.models.logistic(X, y), name=name, **options)


def hospitals():
    """Two unequal sites, of one padded size."""
    return [logistic_site("north", 12), logistic_site("south", 7)]


def prior():
    """A prior whose mean and scale are not trivial."""
    return fp.models.normal_prior(2, mean=[0.5, -0.3], scale=2.0)


# One Zig-Zag for all tests that need no other: with a public flip rate, so that its plans hold coordinator events.
ZIGZAG = fp.ZigZag(excess=0.1)
SHORT = {"chains": 4, "seed": 3, "progress": False}


def short_run(sites=None, prior_=None, **options):
    """A run of a few process times with four chains."""
    options = {"duration": 10.0, **SHORT, **options}
    if options.get("dynamics") is not None:
        options = {"reference": "identity", **options}
    if options.get("ess") is not None:
        options.pop("duration")
    return fp.sample(hospitals() if sites is None else sites, prior() if prior_ is None else prior_, **options)


@functools.cache
def default_run():
    """The few-rounds method: quarter turns about the vb reference, with quadratic control variates."""
    return short_run(names=["slope", "other"], duration=8.0)


@functools.cache
def zigzag_run(keep="skeleton"):
    """Zig-Zag in the parameters' own coordinates."""
    return short_run(dynamics=ZIGZAG, burn_in=1.0, keep=keep)


def on_grid(records, precision=1.0, mean=(0.0, 0.0), half=6.0, n=801):
    """Mean and standard deviations of a posterior of two parameters by brute force; ``records(x)``: minus log likelihood."""
    axis = np.linspace(-half, half, n)
    x = np.stack(np.meshgrid(axis, axis, indexing="ij"), -1).reshape(-1, 2)
    energy = records(x) + 0.5 * precision * np.sum((x - mean) ** 2, 1)
    weight = np.exp(energy.min() - energy)
    weight /= weight.sum()
    center = weight @ x
    return center, np.sqrt(weight @ (x - center) ** 2)
