"""What every federation must do, whatever carries the messages."""

import contextlib
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.federation.studies import SEED, SITE_SEED, ZIGZAG, Folder, same_bits
from tests.study.contracts import POLICY

import fedpdmc as fp
from fedpdmc._jax.precision import double_precision
from fedpdmc.certificates import read_credentials
from fedpdmc.clocks.base import TIME_GRID
from fedpdmc.errors import NotFinite
from fedpdmc.federation.dry_run import _of_site
from fedpdmc.federation.joint_plans import OwnPlans
from fedpdmc.federation.session import join
from fedpdmc.plan import Plan
from fedpdmc.sampling import factory
from fedpdmc.sampling.arguments import Settings
from fedpdmc.sampling.defaults import choose
from fedpdmc.sampling.engines.compiled_loop import LocalFederation
from fedpdmc.sampling.engines.rounds import RoundsEngine
from fedpdmc.study import read_records


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return Folder(tmp_path_factory.mktemp("study"))


@double_precision
def method(folder):
    """The study's run with its sites in this process."""
    study = folder.study
    sites = [
        fp.Site(study.potential(read_records(study, folder.data[name])), name=name, seed=SITE_SEED)
        for name in study.sites
    ]
    return choose(
        Settings(
            sites=sites, prior=study.prior(), dynamics=study.dynamics(), reference="identity", control="none",
            chains=study.chains, seed=SEED, names=study.names,
        )
    )  # fmt: skip


@double_precision
def in_this_process(folder):
    return factory.federation(method(folder))


def opened(connection, chosen):
    connection.federation.open(chosen.reference, [None] * 2, chosen.chains, chosen.segments)
    return connection.federation


@contextlib.contextmanager
def local(folder, tmp_path):
    yield in_this_process(folder)


@contextlib.contextmanager
def direct(folder, tmp_path):
    seeds = dict.fromkeys(folder.study.sites, SITE_SEED)
    with fp.connect(folder.study, data=folder.data, seed=SEED, site_seeds=seeds) as connection:
        yield opened(connection, method(folder))


@contextlib.contextmanager
def streams(folder, tmp_path):
    agents = {name: folder.agent(name, tmp_path / name) for name in folder.study.sites}
    with folder.listening() as connection, folder.sites(connection, agents):
        yield opened(connection, method(folder))


@contextlib.contextmanager
def flower(folder, tmp_path):
    """Through Flower's messages; a SuperLink and SuperNodes carry them in `test_flower`."""
    pytest.importorskip("flwr")
    from tests.federation.grids import GridHere

    from fedpdmc.federation.flower import GridTransport

    nodes = {
        index: {
            "name": name, "study": str(folder.path / "study.toml"), "data": str(folder.data[name]), "seed": SITE_SEED,
            "policy": str(folder.path / "policy.toml"), "keys": str(folder.keys(name)), "store": str(tmp_path / name),
        }
        for index, name in enumerate(folder.study.sites, 1)
    }  # fmt: skip
    own = read_credentials(folder.keys("coordinator"))

    def transport(study, run, seed):
        return GridTransport(GridHere(nodes), study, run, own)

    # The plans of these tests are not those of a run.
    never = property(lambda self: False, lambda self, value: None)
    with mock.patch.object(OwnPlans, "enforced", never, create=True):
        with join(folder.study, transport, store=None, seed=SEED) as connection:
            yield opened(connection, method(folder))


KINDS = [local, direct, streams, flower]


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__)
def federation(request, folder, tmp_path):
    with request.param(folder, tmp_path) as federation:
        yield federation


@double_precision
def plan(number=0, seed=0, dim=3, scale=1.0):
    rng = np.random.default_rng(seed)
    velocity = np.where(rng.random((4, 1, dim)) < 0.5, -1.0, 1.0)
    duration = np.array([[5.0], [0.5], [0.0], [2.0]])
    start = scale * rng.normal(size=(4, dim))
    return Plan(jnp.full(4, number), jnp.asarray(start), jnp.asarray(duration), jnp.asarray(velocity))


def test_sites_answer_in_the_order_of_their_names(federation, folder):
    assert federation.names == folder.study.sites
    with jax.enable_x64(True):
        found = federation.exchange(plan())
        expected = in_this_process(folder).exchange(plan())
    assert len(found) == len(expected) == 2
    for one, other in zip(found, expected, strict=True):
        # What leaves a site is on the grid of times.
        np.testing.assert_allclose(one.time, other.time, rtol=0, atol=TIME_GRID)
        if not isinstance(federation, LocalFederation):
            assert np.all(np.asarray(one.time)[one.rang] % TIME_GRID == 0)
        np.testing.assert_array_equal(one.rang, other.rang)
        np.testing.assert_array_equal(np.asarray(one.mark)[one.rang], np.asarray(other.mark)[other.rang])


def test_arrivals_stay_within_the_plan(federation):
    for number in range(3):
        with jax.enable_x64(True):
            horizon = np.asarray(plan().horizon)
            for arrival in federation.exchange(plan(number, seed=number)):
                assert np.all(np.asarray(arrival.time) <= horizon)
                assert not np.any(np.asarray(arrival.rang) & (horizon == 0))


COUNTS = (
    ZIGZAG.replace('"logistic"', '"poisson"')
    .replace("ill ~ drug + age", "falls ~ age")
    .replace("[prior]", 'falls = { type = "count", bounds = [0, 50] }\n[prior]')
)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_fault_names_the_site_and_the_chain(kind, tmp_path):
    folder = Folder(tmp_path / "study", COUNTS)
    for path in folder.data.values():
        path.write_text("falls,age\n" + "".join(f"{k % 3},{30 + 5 * k}\n" for k in range(8)))
    (folder.path / "policy.toml").write_text("farthest = 1e6" + POLICY.replace('"logistic"', '"poisson"'))
    with kind(folder, tmp_path) as federation, jax.enable_x64(True), pytest.raises(NotFinite) as error:
        federation.exchange(plan(dim=2, scale=1e4))
    assert error.value.site in federation.names and 0 <= error.value.chain < 4


def test_an_interrupted_run_goes_on_as_one_here_up_to_the_grid_of_times(federation, folder):
    chosen = method(folder)
    reference = _run(in_this_process(folder), chosen, None)
    found = _run(federation, chosen, interrupt_at=7)
    for one, other in zip(reference, found, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)


@double_precision
def _run(federation, chosen, interrupt_at):
    parts = factory.coordinator(chosen), factory.start_state(chosen), factory.coordinator_key(chosen)
    rounds, blocks, ticks = RoundsEngine(federation, *parts), [], []

    def tick(tick):
        ticks.append(tick)
        if len(ticks) == interrupt_at:
            raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        rounds.advance(3.0, blocks.append, tick)
    rounds.advance(3.0, blocks.append, tick)
    skeleton = blocks[-1].skeleton()
    return skeleton.t, skeleton.a, skeleton.v


WARDS = (
    ZIGZAG.replace("ill ~ drug + age", "ill ~ 0 + ward + age")
    .replace("[prior]", 'ward = { type = "level", levels = ["A", "B"] }\n[prior]')
    .replace("[limits]", '[coordinates]\nnorth = ["ward[A]", "age"]\nsouth = ["ward[B]", "age"]\n[limits]')
)


@pytest.fixture(scope="module")
def wards(tmp_path_factory):
    """Each hospital has a ward of its own: the other's flips do not concern it."""
    folder = Folder(tmp_path_factory.mktemp("wards"), WARDS)
    for name, ward in (("north", "A"), ("south", "B")):
        folder.data[name].write_text(folder.data[name].read_text().replace(",A\n", f",{ward}\n"))
    return folder


@pytest.mark.long
def test_only_the_sites_that_must_be_asked_get_a_message(wards, tmp_path):
    """The same bits and the same messages in the compiled loop, by messages in this process, and over streams."""
    study = wards.study
    assert study.coordinates("south") == [1, 2]
    sites = [
        fp.Site(
            study.potential(read_records(study, wards.data[name]), name), name=name, coordinates=study.coordinates(name),
            seed=SITE_SEED,
        )
        for name in study.sites
    ]  # fmt: skip
    post = fp.sample(
        sites, study.prior(), dynamics=study.dynamics(), chains=4, duration=6.0, burn_in=1.0, seed=SEED, progress=False,
        reference="identity",
    )  # fmt: skip
    direct = wards.in_process()
    agents = {name: wards.agent(name, tmp_path / name) for name in study.sites}
    with wards.listening() as connection, wards.sites(connection, agents):
        streamed = fp.sample(connection, progress=False)
        last = [agent.log.answers for agent in agents.values()]
    assert same_bits(post, direct) and same_bits(direct, streamed)
    for found in (direct, streamed):
        np.testing.assert_array_equal(found.messages, post.messages)
        assert found.rounds == post.rounds
    assert np.all(post.messages < 2 * post.rounds)
    # Two messages for each answer that a site has logged, but for the opening.
    np.testing.assert_array_equal(streamed.messages, 2 * (np.asarray(last) - 1))
    np.testing.assert_array_equal(streamed.bytes, direct.bytes)


def test_a_run_that_asks_only_some_goes_on_after_a_crash_to_the_same_bits(wards, tmp_path):
    whole = wards.in_process(duration=8.0)
    resumed, sequence = wards.crashed_and_resumed(tmp_path / "store", 30, duration=8.0)
    assert len(set(sequence)) > 1
    assert same_bits(whole, resumed) and whole.rounds == resumed.rounds
    np.testing.assert_array_equal(whole.messages, resumed.messages)
    np.testing.assert_array_equal(whole.bytes, resumed.bytes)


def test_a_dry_run_makes_records_of_the_sites_own_parameters(wards):
    made = [_of_site(wards.study, name, 20, seed) for seed, name in enumerate(wards.study.sites)]
    assert [set(frame["ward"]) for frame in made] == [{"A"}, {"B"}] and len(made[0]) == 20


def test_records_that_the_contract_says_are_not_there_are_refused(wards):
    records = read_records(wards.study, wards.data["north"])
    with pytest.raises(fp.errors.InputError) as error:
        wards.study.potential(records, "south")
    lines = str(error.value).splitlines()
    assert f"found {len(records)} faults in {len(records)} of {len(records)} records" in lines[0]
    assert lines[1].startswith("  line 2: a record that depends on 'ward[A]'. By the contract")


def test_the_compiled_loop_makes_the_same_draws_up_to_the_grid_of_times(folder):
    """What ``sample`` does with sites in this process, against single rounds over messages."""
    chosen = method(folder)
    assert isinstance(in_this_process(folder), LocalFederation)
    post = fp.sample(
        list(chosen.sites), folder.study.prior(), dynamics=folder.study.dynamics(), chains=4, duration=6.0, burn_in=1.0,
        seed=folder.joint_seed, progress=False, reference="identity",
    )  # fmt: skip
    rounds = folder.in_process()
    for name in ("offsets", "t", "a", "v"):
        one, other = (getattr(run.skeleton, name) for run in (post, rounds))
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)
    # On its own a site walks every plan to its end; in the loop it stops where another one has had an event.
    assert np.all(rounds.gradient_evaluations >= post.gradient_evaluations) and np.all(post.gradient_evaluations > 50)
