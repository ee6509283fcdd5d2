import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.federation.rounds import KINDS, assert_same_path, compiled, method, of_chain, plain, start
from tests.support import hospitals, logistic_site

import fedpdmc as fp
from fedpdmc._jax.precision import double_precision
from fedpdmc.errors import BoundViolation, NotFinite
from fedpdmc.sampling.engines import compiled_loop
from fedpdmc.sampling.engines.base import raise_faults
from fedpdmc.sampling.engines.compiled_loop import run_chunk
from fedpdmc.sampling.run_cost import message_bytes

ENDS = (3.0, 8.0)


# The default is a Boomerang too; lines and reflections are each in one of the others.
LONG = pytest.param("boomerang", marks=pytest.mark.long)


@pytest.mark.parametrize(
    "kind", ["default", "zigzag", *(pytest.param(k, marks=pytest.mark.long) for k in ("factorised", "bouncy")), LONG]
)
def test_the_compiled_loop_does_what_plain_rounds_do(kind, monkeypatch):
    chosen, passes = method(KINDS[kind]), []

    def answer(*args):
        arrival, walk = local_answer(*args)
        passes.append(int(walk.passes.sum()))
        return arrival, walk

    local_answer = compiled_loop._answer
    monkeypatch.setattr(compiled_loop, "_answer", answer)
    skeleton, run = compiled(chosen, ENDS)
    other, rounds = plain(chosen, ENDS)
    # A site stops once it is past another's arrival: less work, and no other bit.
    assert run.passes.sum() < sum(passes) + (kind == "default")
    # Whole reflections on lines are rounded differently by the compiler in different programs.
    error = {"rtol": 1e-13, "atol": 1e-13} if kind == "bouncy" else {"rtol": 0, "atol": 0}
    for one, two in zip(skeleton, other, strict=True):
        np.testing.assert_allclose(one, two, **error)
    np.testing.assert_array_equal(run.events, rounds.events)
    np.testing.assert_array_equal(run.plans, rounds.plans)
    assert run.rounds == rounds.rounds


@pytest.mark.parametrize(("prior_at", "dense"), [("coordinator", False), ("sites", False), ("sites", True)])
@double_precision
def test_clocks_in_closed_form_do_what_plain_rounds_do(prior_at, dense):
    rng = np.random.default_rng(2)

    def model(n):
        X, y = rng.normal(size=(n, 2)), rng.normal(1.0, 1.5, (n, 2))
        return fp.models.linear(X, y[:, 0], scale=1.5) if dense else fp.models.gaussian_mean(y, scale=1.5)

    sites = [fp.Site(model(n), name=str(n)) for n in (9, 4, 1)]
    chosen = method(fp.ZigZag(), sites=sites, prior_at=prior_at, chains=8)
    skeleton, run = compiled(chosen, ENDS)
    other, rounds = plain(chosen, ENDS)
    assert skeleton.packed and other.packed
    for one, two in zip(skeleton, other, strict=True):
        np.testing.assert_array_equal(one, two)
    np.testing.assert_array_equal(run.events, rounds.events)
    np.testing.assert_array_equal(run.plans, rounds.plans)
    np.testing.assert_array_equal(run.passes, np.full(3, run.plans.sum()))
    assert run.rounds == rounds.rounds


def assert_same_bits(chosen):
    """The compiled loop and plain rounds, in some of which the records are asked."""
    skeleton, run = compiled(chosen, ENDS)
    other, rounds = plain(chosen, ENDS)
    for one, two in zip(skeleton, other, strict=True):
        np.testing.assert_array_equal(one, two)
    assert 0 < run.passes.sum() and run.rounds == rounds.rounds


def kinked(x, data):
    return jnp.sum(jnp.abs(data - x[0] - 0.5 * x[1])) + 0.2 * jnp.sum(jnp.exp(0.3 * x) + jnp.exp(-0.4 * x))


@pytest.mark.long
@pytest.mark.parametrize("kind", ["zigzag", "boomerang"])
def test_curves_of_programs_do_what_plain_rounds_do(kind):
    """Intervals are cut, and the program is asked, in the same places whoever walks."""
    sites = [fp.Site(kinked, data=np.linspace(-1.5, 0.8, n), name=str(n)) for n in (8, 5)]
    chosen = method(KINDS[kind], sites=sites, chains=16, init=np.random.default_rng(0).normal(size=(16, 2)))
    assert all(group.clock.name == "TimePolynomial" for group in start(chosen).federation.groups)
    assert_same_bits(chosen)


def cells(*owned):
    """Sites of a log-Gaussian Cox grid of two cells, each with the cells it owns."""
    return [fp.Site(fp.models.log_gaussian_cox([3 * k for k in own]), name=str(own), coordinates=own) for own in owned]


@pytest.mark.parametrize("kind", ["zigzag", LONG])
def test_sites_of_some_coordinates_do_what_they_do_alone(kind):
    """Where flips are local both ways ask only the sites that must be asked, and the same ones."""
    chosen = method(KINDS[kind], sites=cells([1], [0], [1, 0]))
    columns = [None if c is None else list(c) for c in start(chosen).federation.columns]
    assert columns == ([[1], [0], [1, 0]] if kind == "zigzag" else [None] * 3)
    skeleton, run = compiled(chosen, ENDS)
    other, rounds = plain(chosen, ENDS)
    for chain in range(chosen.chains):
        assert_same_path(of_chain(skeleton, chain), of_chain(other, chain), first=10**6)
    assert run.rounds == rounds.rounds and run.selective is rounds.selective is (kind == "zigzag")
    np.testing.assert_array_equal(run.asked, rounds.asked)
    if kind == "zigzag":
        np.testing.assert_array_equal(skeleton.t, other.t)
        assert np.all(run.asked[1] < 0.9 * run.plans.sum())


@pytest.mark.long
def test_other_sizes_do_the_same_to_the_last_bits():
    # 32 padded records: the compiler sums them in another order within the loop than for a site alone.
    chosen = method(KINDS["bouncy"], sites=[logistic_site("large", 30)], chains=8)
    skeleton, _ = compiled(chosen, ENDS)
    other, _ = plain(chosen, ENDS)
    for chain in range(chosen.chains):
        assert_same_path(of_chain(skeleton, chain), of_chain(other, chain))


@pytest.mark.parametrize("kind", ["default", "zigzag"])
def test_the_size_of_a_chunk_changes_no_bit(kind):
    chosen = method(KINDS[kind])
    whole, _ = compiled(chosen, ENDS)
    for limit in (1, 7):
        pieces, _ = compiled(chosen, ENDS, limit)
        for one, other in zip(whole, pieces, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("ends", [ENDS[-1:], ENDS], ids=["one block", "two blocks"])
@pytest.mark.parametrize("kind", ["zigzag", LONG])
def test_a_chain_runs_the_same_beside_more_chains(kind, ends):
    few, many = (compiled(method(KINDS[kind], chains=chains), ends)[0] for chains in (4, 8))
    for chain in range(4):
        assert_same_path(of_chain(few, chain), of_chain(many, chain))


def test_the_same_seed_gives_the_same_bits_and_another_does_not():
    one, other, different = (compiled(method(KINDS["zigzag"], seed=seed), ENDS)[0] for seed in (3, 3, 4))
    np.testing.assert_array_equal(one.t, other.t)
    np.testing.assert_array_equal(one.a, other.a)
    assert not np.array_equal(one.t, different.t)


def test_a_sites_own_seed_is_its_randomness():
    runs = {}
    for seeds in ((1, 2), (1, 3), (None, None)):
        sites = [
            fp.Site(site.potential, name=site.name, seed=seed) for site, seed in zip(hospitals(), seeds, strict=True)
        ]
        for run_seed in (3, 4):
            runs[seeds, run_seed] = compiled(method(KINDS["zigzag"], sites=sites, seed=run_seed), (4.0,))[0].t
    distinct = {tuple(t) for t in runs.values()}
    assert len(distinct) == len(runs)


def test_sites_of_one_seed_are_independent():
    one, other = (logistic_site(name, 12) for name in ("north", "south"))
    keys = [np.asarray(fp.Site(s.potential, name=s.name, seed=5).keys(0, 1, True)) for s in (one, other)]
    assert not np.array_equal(keys[0][:, :2], keys[1][:, :2]) and not np.array_equal(keys[0][:, 2:], keys[1][:, 2:])


def test_sites_without_a_seed_are_keyed_by_run_and_name():
    north, south = logistic_site("north"), logistic_site("south")
    keys = [np.asarray(site.keys(seed, 1, True))[0] for site in (north, south) for seed in (0, 1)]
    assert len({tuple(key[:2]) for key in keys}) == len({tuple(key[2:]) for key in keys}) == 4
    np.testing.assert_array_equal(keys[0], logistic_site("north", 5).keys(0, 1, True)[0])


def test_a_long_seed_is_used_whole():
    """Seeds of the operating system have 256 bits: two that agree in the last 64 give other keys."""
    model = logistic_site("north").potential
    keys = [
        np.asarray(fp.Site(model, name="north", seed=seed).keys(0, 1, True))[0] for seed in (2**200 + 5, 2**201 + 5)
    ]
    assert not np.array_equal(keys[0][:2], keys[1][:2]) and not np.array_equal(keys[0][2:], keys[1][2:])


def equations(jaxpr):
    """Equations of a jaxpr, those of its loops and branches included."""
    total = 0
    for equation in jaxpr.eqns:
        inner = [value for value in jax.tree.leaves(equation.params, is_leaf=is_jaxpr) if is_jaxpr(value)]
        total += 1 + sum(equations(getattr(value, "jaxpr", value)) for value in inner)
    return total


def is_jaxpr(value):
    return hasattr(value, "eqns") or hasattr(value, "jaxpr")


@double_precision
def size_of_program(sites):
    run = start(method(KINDS["zigzag"], sites=sites))
    assert len(run.federation.groups) == 1 and run.federation.groups[0].size == len(sites)
    arguments = (run.federation.groups, run.coordinator, run.keys, run.progress, jnp.asarray(1.0), jnp.asarray(1))
    closed, _, _ = eqx.filter_make_jaxpr(lambda *args: run_chunk(*args, 4))(*arguments)
    return equations(closed.jaxpr)


def test_fifty_sites_of_one_family_are_as_large_a_program_as_two():
    two, fifty = (size_of_program([logistic_site(f"site {i}", 3 + i % 13) for i in range(n)]) for n in (2, 50))
    assert two == fifty > 100


def test_sites_are_grouped_by_family_and_padded_size():
    X = np.ones((3, 2))
    sites = [
        logistic_site("small", 12),
        fp.Site(fp.models.poisson(X, [0, 1, 2]), name="counts"),
        logistic_site("large", 40),
        fp.Site(fp.models.gaussian_mean(X), name="means"),
        logistic_site("other small", 3),
        fp.Site(fp.models.linear(X, [0.0, 1.0, 2.0], scale=1.0), name="line"),
        fp.Site(fp.models.linear(X[:2], [0.0, 1.0], scale=1.0), name="other line"),
    ]
    federation = start(method(KINDS["zigzag"], sites=sites)).federation
    # Means and lines are quadratics alike.
    assert sorted(group.size for group in federation.groups) == [1, 1, 2, 3]
    np.testing.assert_array_equal(sorted(federation.order), range(7))


def test_faults_name_the_site_and_the_chain_and_tell_nothing_else():
    faults = np.zeros((2, 3), int)
    raise_faults(["a", "b"], faults)
    faults[1, 2] = 1
    with pytest.raises(BoundViolation, match=r"site 'b', chain 2: .*BOUND_VIOLATED"):
        raise_faults(["a", "b"], faults)
    faults[0, 1] = 2
    with pytest.raises(NotFinite, match=r"site 'a', chain 1: .*NOT_FINITE"):
        raise_faults(["a", "b"], faults)


def test_messages_have_the_size_of_their_buffers():
    # Plan: chain, number, segments, start, and (duration, velocity) of each segment. Arrival: time, whether it rang, mark.
    assert message_bytes(4, 12, sent=2, flips=False) == (4 * 8 * (3 + 2 + 3 * 3), 4 * (8 + 1 + 16))
    assert message_bytes(1, 1, sent=5, flips=True) == (8 * (3 + 5 + 6), 8 + 1 + 4)
