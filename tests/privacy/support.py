"""Private sites that several tests share."""

import jax.numpy as jnp
import numpy as np

import fedpdmc as fp
from fedpdmc._jax.precision import double_precision
from fedpdmc.members.private_site import PrivateSite
from fedpdmc.members.run_coordinates import Opening
from fedpdmc.plan import Plan


def records(name="north", n=40, d=2):
    """Covariates in the unit ball and labels that depend on them."""
    rng = np.random.default_rng([7, *name.encode()])
    X = rng.uniform(-1, 1, (n, d)) / np.sqrt(d)
    y = (rng.random(n) < 1 / (1 + np.exp(-X @ np.linspace(-1, 2, d)))).astype(float)
    return X, y


def a_ledger(path):
    """The path of a ledger, created if it is not there."""
    return path if path.exists() else fp.create_ledger(path)


def private_site(path, name="north", n=40, d=2, seed=5, data=None, **options):
    """A logistic site under a budget that is wide enough for a test."""
    X, y = records(name, n, d) if data is None else data
    terms = {"epsilon": 200.0, "delta": 1e-3, "bounds": fp.Bounds(norm=1.0), "ledger": path, "dataset": name}
    terms |= {"seeded_for_tests": True} | options
    a_ledger(terms["ledger"])
    return fp.Site(fp.models.logistic(X, y), name=name, seed=seed, budget=fp.Budget(**terms))


@double_precision
def opened(site, dynamics=None, dim=2, scale=1.0, run="run"):
    """The site opened for a run in coordinates of one scale."""
    reference = fp.Reference(jnp.zeros(dim), jnp.full(dim, float(scale)))
    return PrivateSite(site, Opening(reference, fp.ZigZag() if dynamics is None else dynamics), run)


@double_precision
def a_plan(start, velocity, horizon, number=0):
    """One segment on every chain."""
    start = np.atleast_2d(np.asarray(start, float))
    velocity = np.broadcast_to(np.asarray(velocity, float), start.shape)
    horizon = np.broadcast_to(np.asarray(horizon, float), start.shape[:1])
    number = np.broadcast_to(np.asarray(number), start.shape[:1])
    return Plan(jnp.asarray(number), jnp.asarray(start), jnp.asarray(horizon)[:, None], jnp.asarray(velocity)[:, None])
