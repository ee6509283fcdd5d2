"""Effects of wards that stay at their hospitals, over messages: restarts, audits, bends, what a site reads of its own."""

import csv
import dataclasses

import numpy as np
import pytest
from tests.federation.processes import Parties
from tests.federation.studies import SEED, SITE_SEED, Folder, same_bits
from tests.statistical.test_private_latents import moments, of_parameters, records
from tests.study.contracts import EFFECTS, with_model_file
from typer.testing import CliRunner

import fedpdmc as fp
from fedpdmc.cli import app
from fedpdmc.federation import messages
from fedpdmc.federation.site_agent.audit_log import Kind, read_log
from fedpdmc.federation.site_agent.audit_replay import own_effects, replay
from fedpdmc.study import parse_study
from fedpdmc.whitening import moderate

SUMMED = EFFECTS.replace('"south"]', '"south", "west"]').replace('derivatives = "own"', 'derivatives = "summed"')


class Wards(Folder):
    """A study whose hospitals have three wards each."""

    def __init__(self, path, contract=EFFECTS):
        super().__init__(path, contract)
        for place in self.data.values():
            lines = place.read_text().splitlines()
            wards = [line.rsplit(",", 1)[0] + f",{'ABC'[k % 3]}" for k, line in enumerate(lines[1:])]
            place.write_text("\n".join([lines[0], *wards]) + "\n")


# Few wards, so that the log spread has a long lower tail and is bent.
BENT = EFFECTS.replace('reference = "laplace"', 'reference = "vb"')
# A family with bounds of its own, a model file, and log spreads that are not bent.
CONTRACTS = {"family": BENT, "file": with_model_file(BENT), "straight": EFFECTS}
RARE = [pytest.param(kind, marks=pytest.mark.long) for kind in ("file", "straight")]


@pytest.fixture(scope="module", params=["family", *RARE])
def folder(request, tmp_path_factory):
    return Wards(tmp_path_factory.mktemp("effects"), CONTRACTS[request.param])


@pytest.fixture(scope="module")
def run(folder):
    """A finished run of agents in this process, with their stores."""
    seeds = dict.fromkeys(folder.study.sites, SITE_SEED)
    store = folder.path / "run"
    with fp.connect(folder.study, data=folder.data, seed=SEED, site_seeds=seeds, store=store) as connection:
        post = fp.sample(connection, progress=False)
        connection.finish()
    return post, store / "sites"


def pairs(store):
    """Answered requests of a log."""
    request = b""
    for entry in read_log(store):
        if entry.kind is Kind.REQUEST:
            request = entry.payload
        elif entry.kind is Kind.ANSWER:
            yield request, entry.payload


def test_the_coordinator_draws_the_shared_parameters_only(run):
    post, _ = run
    assert post.names == ["Intercept", "drug[T.verum]", "age", "log_sd"]
    assert "sd" in post.variables(2)
    assert post.certified and post.rounds > 5


def test_log_spreads_are_bent_from_the_averages_on(folder, run):
    """Every site gets the same map, which it knows from the release to which the reference belongs."""
    post, stores = run
    asked = [messages.decode(request) for request, _ in pairs(stores / "north")]
    derive, (opening,) = ([m for m in asked if isinstance(m, kind)] for kind in (messages.Derive, messages.Open))
    bends = [message.bend.size > 0 for message in derive]
    if folder.study.reference == "laplace":
        assert post.reference.bend is None and not any(bends) and not opening.bend.size
        return
    assert post.reference.bend.index == (3,) and moderate(np.asarray(post.reference.bend.numbers))
    assert bends == sorted(bends) and 2 <= sum(bends) < len(bends) <= 12
    for message in [*derive[bends.index(True) :], opening]:
        np.testing.assert_array_equal(message.bend, post.reference.bend.numbers)


def test_an_audit_recomputes_every_answer(folder, run):
    found = replay(folder.study, "north", folder.data["north"], store=run[1] / "north")
    assert found.different == [] and found.unchecked == {}
    assert found.same == len(list(pairs(run[1] / "north")))


def test_a_restarted_site_has_the_same_latents(folder, run, tmp_path):
    """From its log alone, after any plan: the next answer has the same bits."""
    both = list(pairs(run[1] / "north"))
    plans = [k for k, (asked, _) in enumerate(both) if isinstance(messages.decode(asked), messages.TurnPlans)]
    agent = folder.agent("north", tmp_path / "north")
    agent.join(messages.encode(messages.Welcome(messages.decode(both[0][0]).run, folder.study.digest)))
    for place, (request, answer) in enumerate(both):
        assert agent.answer(request) == answer
        if place in (plans[2], plans[-2]):
            before = np.asarray(agent.computation.latents.settled)
            agent.log.close()
            agent = folder.agent("north", tmp_path / "north")
            np.testing.assert_array_equal(agent.computation.latents.settled, before)
    agent.log.close()


def test_a_site_reads_its_effects_with_the_parameters_they_belong_to(folder, run):
    """The parameters are those of the coordinator's paths at the same process times."""
    post, stores = run
    found = own_effects(folder.study, "north", folder.data["north"], store=stores / "north")
    assert found.names == ("A", "B", "C")
    np.testing.assert_array_equal(found.times, np.arange(6.0))
    a = post.skeleton.at(folder.study.dynamics().flow, found.times)
    np.testing.assert_allclose(found.theta, post.reference.to_x(a), atol=1e-9)
    assert np.isfinite(found.z).all()
    assert list(found.summary().index) == ["A", "B", "C"]


def test_the_command_writes_files_for_the_owner(folder, run, tmp_path):
    out = tmp_path / "own"
    words = ["effects", folder.path / "study.toml", "--name", "south", "--data", folder.data["south"], "--out", out]
    done = CliRunner().invoke(app, [*map(str, words), "--store", str(run[1] / "south")])
    assert done.exit_code == 0, done.output
    assert "Nothing was sent" in " ".join(done.output.split())
    table = out.with_suffix(".csv").read_text().splitlines()
    assert [row["effect"] for row in csv.DictReader(table)] == ["A", "B", "C"]
    for suffix in (".csv", ".npz"):
        assert out.with_suffix(suffix).stat().st_mode & 0o777 == 0o600
    with np.load(out.with_suffix(".npz")) as arrays:
        assert arrays["effects"].shape == (4, 6, 3)
        assert arrays["parameters"].shape == (4, 6, 4)
        assert arrays["parameter_names"].tolist() == list(folder.study.names)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: {"time": np.zeros(0)},
        lambda m: {"time": m.time - 1.0},
        lambda m: {"time": m.time + 50.0},
        lambda m: {"start": m.start + 0.01},
    ],
    ids=["no time", "back", "beyond the arrival", "a jump"],
)
def test_plans_that_do_not_continue_are_refused(folder, run, tmp_path, change):
    both = list(pairs(run[1] / "north"))
    plans = [k for k, (asked, _) in enumerate(both) if isinstance(messages.decode(asked), messages.TurnPlans)]
    agent = folder.agent("north", tmp_path / "north")
    agent.join(messages.encode(messages.Welcome(messages.decode(both[0][0]).run, folder.study.digest)))
    for request, answer in both[: plans[3]]:
        agent.adopt(request, answer)
    asked = messages.decode(both[plans[3]][0])
    wrong = dataclasses.replace(asked, **change(asked))
    refused = messages.decode(agent.answer(messages.encode(wrong)))
    assert isinstance(refused, messages.Refusal)
    assert refused.code == "NOT_CONTINUED"
    assert agent.answer(both[plans[3]][0]) == both[plans[3]][1]
    agent.log.close()


@pytest.mark.long
@pytest.mark.parametrize("kind", CONTRACTS)
def test_parties_that_are_killed_resume_to_the_same_bits(tmp_path, kind):
    """Real processes over mutual TLS; afterwards each site's effects are those of an undisturbed run."""
    folder = Wards(tmp_path, CONTRACTS[kind].replace("duration = 6.0", "duration = 40.0"))
    seeds = dict.fromkeys(folder.study.sites, SITE_SEED)
    with fp.connect(folder.study, data=folder.data, seed=SEED, site_seeds=seeds, store=tmp_path / "calm") as connection:
        expected = fp.sample(connection, progress=False)
        connection.finish()
    parties = Parties(folder, (SEED, SITE_SEED))
    try:
        parties.start_all()
        for share, name in [(0.3, "north"), (0.5, "south"), (0.7, "coordinator")]:
            goal = share * sum(len(a) + len(b) for a, b in pairs(tmp_path / "calm" / "sites" / "north"))
            parties.wait_for(lambda goal=goal: parties.logged("north") > goal, seconds=500)
            parties.kill(name)
            parties.start(name)
        parties.finish(500)
    finally:
        parties.stop()
    assert same_bits(fp.load(parties.store("coordinator") / "posterior.zarr"), expected)
    for name in folder.study.sites:
        one = own_effects(folder.study, name, folder.data[name], store=parties.store(name))
        two = own_effects(folder.study, name, folder.data[name], store=tmp_path / "calm" / "sites" / name)
        np.testing.assert_array_equal(one.z, two.z)


@pytest.mark.long
def test_only_the_sum_of_marginal_derivatives_need_be_released(tmp_path):
    """Secure sums: the same posterior as with each site's own derivatives, within Monte Carlo error."""
    posts = []
    summed = SUMMED.replace('reference = "laplace"', 'reference = "vb"')
    for place, text in enumerate((summed, summed.replace('"summed"', '"own"'))):
        text = text.replace("duration = 6.0", "duration = 60.0").replace("chains = 4", "chains = 32")
        folder = Wards(tmp_path / str(place), text.replace("observed_time = 1000.0", "observed_time = 1e6"))
        posts.append(folder.in_process())
    assert all(post.reference.bend is not None for post in posts)
    sd = np.sqrt(np.diag(posts[0].cov()))
    error = sd * np.sqrt(sum(1 / np.array(list(post.ess().values()))[:4] for post in posts))
    assert np.all(np.abs(posts[0].mean() - posts[1].mean()) < 4 * error)


# Eight sites with a group of four counts each, as in the statistical tests of sites in one process.
COUNTS = """
format = 1
name = "counts"
sites = ["s0", "s1", "s2", "s3", "s4", "s5", "s6", "s7"]

[model]
family = "poisson"
formula = "y ~ 1 + (1 | site)"

[columns]
y = { type = "count", bounds = [0, 40] }

[prior]
scale = 1.0
spread = "half-normal"

[dynamics]
chains = 256

[run]
duration = 20.0
burn_in = 20.0

[releases]
derivatives = "own"

[limits]
rounds = 20000
observed_time = 1e7
derivatives = 20
"""


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The posterior is far from its reference")
def test_the_lower_tail_of_a_log_spread_is_reached_over_messages(tmp_path):
    """Moments and low probabilities against quadrature."""
    study, data = parse_study(COUNTS.encode()), {}
    for name, (_, y, _) in zip(study.sites, records(crowded=True), strict=True):
        data[name] = tmp_path / f"{name}.csv"
        data[name].write_text("\n".join(["y", *(f"{int(count)}" for count in y)]) + "\n")
    with fp.connect(study, data=data, seed=SEED, site_seeds=dict.fromkeys(study.sites, SITE_SEED)) as connection:
        post = fp.sample(connection, progress=False)
    assert post.reference.bend is not None
    exact, (mean, log_spread) = moments(crowded=True), np.moveaxis(post.draws(60), -1, 0)
    for name, values in of_parameters(mean, log_spread).items():
        means = values.mean(1)
        deviation = (means.mean() - exact[name]) / (means.std(ddof=1) / np.sqrt(len(means)))
        print(f"{name}: {means.mean():.4f}, quadrature {exact[name]:.4f}, {deviation:.1f} standard errors")
        assert abs(deviation) < 4
