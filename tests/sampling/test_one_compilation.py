"""Sites of one function and unequal sizes are read and compiled once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedpdmc as fp
from fedpdmc._jax import by_numpy
from fedpdmc.members.run_coordinates import Opening, open_site
from fedpdmc.potentials import Program
from fedpdmc.potentials.padding import Padded, bucket
from fedpdmc.sampling.arguments import resolve_members

COMPILED = []


def _count(event: str, duration_secs: float, **kwargs) -> None:
    if event.endswith("/backend_compile_duration"):
        COMPILED.append(event)


jax.monitoring.register_event_duration_secs_listener(_count)

DIM = 4


def poisson(x, d):
    return jnp.sum(jnp.exp(d["X"] @ x) - d["y"] * (d["X"] @ x)) + 0.1 * d["y"].shape[0] * x[0] ** 2


def ordered(x, d):
    return poisson(x, d) + 0.01 * jnp.sum(jnp.cumsum(d["y"])) * x[1] ** 2


def _sites(function, sizes):
    rng = np.random.default_rng(2)
    data = [{"X": rng.normal(size=(n, DIM)), "y": rng.poisson(1.0, n)} for n in sizes]
    return [fp.Site(function, data=own, name=f"h{k}") for k, own in enumerate(data)]


def _compilations(sites, monkeypatch) -> list[int]:
    """How many programs are read or compiled for each site: to find the mode, and to open it."""
    read = by_numpy._read

    def counted(*args):
        COMPILED.append("read")
        return read(*args)

    monkeypatch.setattr(by_numpy, "_read", counted)
    sites, _, _ = resolve_members(sites, fp.models.normal_prior(DIM))
    opening = Opening(fp.Reference(jnp.zeros(DIM), jnp.ones(DIM)), fp.Boomerang())
    counts = []
    for site in sites:
        before = len(COMPILED)
        site.derivatives(np.full(DIM, 0.1))
        open_site(site, opening)
        counts.append(len(COMPILED) - before)
    return counts


@pytest.mark.usefixtures("double")
def test_one_compilation_for_sites_of_unequal_sizes(monkeypatch):
    first, *others = _compilations(_sites(poisson, (23, 5, 17, 31)), monkeypatch)
    assert first > 0 and not any(others)


@pytest.mark.usefixtures("double")
def test_padded_sites_form_one_group():
    sites, _, _ = resolve_members(_sites(poisson, (23, 5, 17)), fp.models.normal_prior(DIM))
    assert [site.records for site in sites] == [23, 5, 17]
    structures = {jax.tree.structure(site.potential) for site in sites}
    shapes = {tuple(x.shape for x in jax.tree.leaves(site.potential)) for site in sites}
    assert len(structures) == len(shapes) == 1
    # Settled again, as `laplace` does, they stay.
    again, _, _ = resolve_members(sites, fp.models.normal_prior(DIM))
    assert again == sites


@pytest.mark.usefixtures("double")
def test_who_is_padded(caplog):
    def padded(sites):
        found = []
        for site in resolve_members(sites, fp.models.normal_prior(DIM))[0]:
            assert isinstance(site.potential, Program)
            function = site.potential.function
            found.append(function.records if isinstance(function, Padded) else None)
        return found

    assert padded(_sites(poisson, (7,))) == [None]
    assert padded(_sites(poisson, (7, 7))) == [None, None]
    assert padded(_sites(poisson, (7, 40))) == [64, 64]
    # A small site does not carry the records of a very large one.
    assert padded(_sites(poisson, (7, 3000))) == [bucket(7), bucket(3000)]
    with caplog.at_level("INFO", "fedpdmc.site"):
        assert padded(_sites(ordered, (7, 9))) == [None, None]
    assert "site 'h0' is compiled for its own number of records: its records are ordered" in caplog.text
