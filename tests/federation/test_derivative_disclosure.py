"""A coordinator with a good key tries to read records from what the sites tell of their derivatives."""

import contextlib
import re
import threading
from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import nnls
from tests.federation.studies import SITE_SEED, SUMMED, Folder
from tests.privacy.support import a_ledger
from tests.study.contracts import CONTRACT, POLICY, rows, write_csv

import fedpdmc as fp
from fedpdmc._jax.precision import double_precision
from fedpdmc.certificates import read_credentials
from fedpdmc.errors import InputError, Refused
from fedpdmc.federation import messages
from fedpdmc.federation.derivative_plausibility import Plausible
from fedpdmc.federation.derivative_rounding import FINE
from fedpdmc.federation.grpc.client import serve
from fedpdmc.federation.remote import RemoteFederation, RemoteSite
from fedpdmc.federation.session import _mode
from fedpdmc.federation.site_agent import start
from fedpdmc.federation.site_agent.audit_replay import replay
from fedpdmc.federation.site_agent.request_checks import SPARE
from fedpdmc.federation.site_agent.start import open_agent
from fedpdmc.federation.site_agent.trust_region import WIDEST
from fedpdmc.federation.transport import DirectTransport, Request
from fedpdmc.privacy.gaussian_mechanism import FINEST, from_triangle
from fedpdmc.study import parse_study, read_data, read_policy, read_records
from fedpdmc.study.record_shares import largest_leverage

RUN, RECORDS = b"r" * 16, 100
OWN = CONTRACT.replace("mean = 0.1\nscale = 1.5", "mean = 0.0\nscale = 2.5")
CAREFUL = POLICY.replace("largest_share = 1.0\nleast_cell = 1\n", "").replace("least_records = 2", "least_records = 20")


class Guarded(Folder):
    """A study whose sites have a policy with the defaults, and many records."""

    def __init__(self, path, contract=OWN, policy=CAREFUL, records=RECORDS):
        super().__init__(path, contract)
        (path / "policy.toml").write_text(policy)
        for name in self.study.sites:
            write_csv(path / f"{name}.csv", rows(name, records))

    def agent(self, name, store=None, seed=SITE_SEED):
        agent = open_agent(
            self.study, name, self.data[name], store=store or self.path / "sites" / name, seed=seed,
            policy=read_policy(self.path / "policy.toml"), credentials=read_credentials(self.keys(name)),
        )  # fmt: skip
        # The tests choose openings and plans of their own: what else limits them is tested.
        if agent.computation.own is not None:
            agent.computation.own.enforced = False
        if agent.run is None:
            agent.join(messages.encode(messages.Welcome(RUN, self.study.digest)))
        return agent


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    return Guarded(tmp_path_factory.mktemp("guarded"))


@pytest.fixture
def agent(guarded, tmp_path):
    agent = guarded.agent("north", tmp_path / "store")
    yield agent
    agent.log.close()


def derive(agent, x):
    return messages.decode(
        agent.answer(messages.encode(messages.Derive(RUN, agent.log.answers + 1, np.asarray(x, float))))
    )


def code(answer):
    return getattr(answer, "code", None)


def selecting(age, drug, steep=400.0):
    """A point far out at which only records of about this age and with this drug have curvature."""
    far, center = 20 * steep, -steep * (age - 50) / 10
    return np.array([center - far * drug, far * drug if drug else far, steep])


def rank_one(hessian):
    """Drug and age of the only record with curvature, as the grid of releases has them; None if there are several."""
    size = np.sqrt(np.maximum(np.diag(hessian), 1e-300))
    values = np.linalg.eigvalsh(hessian / np.outer(size, size))
    if hessian[0, 0] < 1e-3 or values[-2] > 0.1 * values[-1]:
        return None
    return hessian[0, 1] / hessian[0, 0], 10 * hessian[0, 2] / hessian[0, 0] + 50


def reads(hessian, drug, age, real):
    """Whether a Hessian has this patient alone: the drug, and the age to two years."""
    row = rank_one(hessian)
    return (drug, age) in real and row is not None and round(row[0]) == drug and abs(row[1] - age) <= 2


LABEL = (
    OWN.replace("[run]\nduration = 6.0\nburn_in = 1.0", '[run]\nmethod = "private-laplace"')
    .replace('derivatives = "own"\npasses = true', 'arrivals = false\nderivatives = "noisy"')
    .replace("observed_time = 1000.0\n", "")
    + '\n[privacy]\nepsilon = 4.0\ndelta = 1e-6\nneighbours = "label"\n'
)
ALLOWED = CAREFUL.replace('"own"', '"noisy"') + 'neighbours = ["label"]\n'


def read_covariates(agent, records):
    """How many patients' drug and age the Hessians at four points have, and the refusals."""
    real, found, codes = {(drug == "verum", age) for _, drug, age in records}, 0, []
    for age in (31, 37, 40, 41):
        answer = derive(agent, selecting(age, age % 2))
        codes.append(code(answer))
        found += not codes[-1] and reads(answer.hessian, age % 2, age, real)
    return found, codes


def label_agent(folder, path, policy):
    ledger = a_ledger(path / "ledger.db")
    agent = open_agent(
        folder.study, "north", folder.data["north"], store=path / "store", policy=policy, ledger=ledger
    )  # fmt: skip
    agent.join(messages.encode(messages.Welcome(RUN, folder.study.digest)))
    return agent


def test_hessians_without_noise_are_controlled_where_a_budget_protects_outcomes_only(tmp_path):
    """Under the relation "label" no outcome changes a Hessian, so it has no noise, and its covariates are anybody's."""
    folder, people = Guarded(tmp_path / "study", LABEL, ALLOWED), rows("north", RECORDS)
    policy = read_policy(folder.path / "policy.toml")
    bare = label_agent(folder, tmp_path / "bare", None)
    assert read_covariates(bare, people)[0] >= 2
    agent = label_agent(folder, tmp_path / "guarded", policy)
    assert read_covariates(agent, people) == (0, ["TOO_FAR"] * 4)
    near = [-1.0, 0.9, -0.8]
    honest = label_agent(folder, tmp_path / "honest", policy)
    answer = derive(honest, near)
    design = folder.study.design.matrix(read_records(folder.study, folder.data["north"]))
    chance = 1 / (1 + np.exp(-design @ near))
    exact = design.T @ ((chance * (1 - chance))[:, None] * design)
    # On the grid, and not exact.
    size = 2.0 ** np.round(np.log2(np.diag(exact)) / 2)
    steps = answer.hessian / np.outer(size, size) * 2.0**FINE
    np.testing.assert_array_equal(steps, np.round(steps))
    assert np.abs(steps - exact / np.outer(size, size) * 2.0**FINE).max() < 1
    assert not np.isclose(answer.hessian, exact, rtol=1e-6).any()
    for each in (bare, agent, honest):
        each.log.close()


LABEL_SUMMED = LABEL.replace('"south"]', '"south", "west"]').replace('"noisy"', '"noisy-summed"') + "colluding = 1\n"


@pytest.mark.parametrize("coarse", [True, False], ids=["on the grid", "as before"])
def test_a_part_of_a_sum_whose_covariates_have_no_noise_is_on_the_grid(tmp_path, monkeypatch, coarse):
    """What is left of a sum if all other sites subtract theirs: as before, the site's exact Hessian."""
    folder = Guarded(tmp_path / "study", LABEL_SUMMED, ALLOWED.replace('"noisy"', '"noisy-summed"'))
    agent, parts = label_agent(folder, tmp_path / "site", read_policy(folder.path / "policy.toml")), []
    monkeypatch.setattr(agent.computation.party, "seal", lambda numbers, **_: parts.append(numbers) or bytes(16))
    if not coarse:
        monkeypatch.setattr(type(agent.computation), "_rounding", None)
    x = np.array([-1.0, 0.9, -0.8])
    double_precision(agent.computation._derive)(messages.Derive(RUN, 1, x), bytes(32))
    agent.log.close()
    design = folder.study.design.matrix(read_records(folder.study, folder.data["north"]))
    chance = 1 / (1 + np.exp(-design @ x))
    exact = design.T @ ((chance * (1 - chance))[:, None] * design)
    told, upper = from_triangle(np.array([float(k) for k in parts[0][3:]]) * FINEST, 3), np.triu_indices(3)
    size = 2.0 ** np.round(np.log2(np.diag(exact)) / 2)
    steps = told / np.outer(size, size) * 2.0**FINE
    off = (steps - (np.round(steps) if coarse else exact / np.outer(size, size) * 2.0**FINE))[upper]
    assert np.abs(off).max() < 1e-9
    assert np.isclose(told, exact, rtol=1e-6).any() != coarse


@pytest.mark.filterwarnings("ignore:The noise that the privacy budgets ask for")
@pytest.mark.parametrize("kind", ["noisy", "noisy-summed"])
def test_an_honest_study_that_protects_outcomes_only_is_not_refused(tmp_path, kind):
    contract = LABEL if kind == "noisy" else LABEL_SUMMED
    folder = Guarded(tmp_path / "study", contract, ALLOWED.replace('"noisy"', f'"{kind}"'))
    policy = read_policy(folder.path / "policy.toml")
    agents = {
        name: open_agent(
            folder.study, name, folder.data[name], store=tmp_path / name, policy=policy,
            ledger=a_ledger(tmp_path / f"{name} ledger" / "ledger.db"), credentials=read_credentials(folder.keys(name)),
        )
        for name in folder.study.sites
    }  # fmt: skip
    with folder.listening() as connection, folder.sites(connection, agents):
        post = fp.sample(connection, progress=False)
    assert post.rounds == (4 if kind == "noisy" else 6) and all(agent.refusals == 0 for agent in agents.values())


def test_outcomes_do_not_decide_what_is_refused_where_a_budget_protects_them(tmp_path):
    """The same covariates with other outcomes are refused, and answered, at the same points."""
    folder = Guarded(tmp_path / "study", LABEL, ALLOWED)
    policy = read_policy(folder.path / "policy.toml")
    points = [[0.0, 0.0, 0.0], [2.0, 1.0, 6.0], [0.0, -9.0, 9.0], [6.0, 0.0, 0.0]]
    told = []
    for place, ill in enumerate(("no", "yes")):
        write_csv(folder.data["north"], [(ill, *row[1:]) for row in rows("north", RECORDS)])
        agent = label_agent(folder, tmp_path / str(place), policy)
        told.append([code(derive(agent, x)) for x in points])
        agent.log.close()
    assert told[0] == told[1] and {None, "FEW_RECORDS"} <= set(told[0])


def test_a_coordinator_with_a_good_key_reads_no_rows_over_the_network(guarded, tmp_path):
    """Live: the points of the attack, over TLS, with the coordinator's own key."""
    agents = {name: open_fresh(guarded, name, tmp_path) for name in guarded.study.sites}
    stop = threading.Event()
    with guarded.listening() as connection:
        threads = [
            threading.Thread(
                target=serve, args=(agent, connection.address, read_credentials(guarded.keys(name)), stop.wait)
            )
            for name, agent in agents.items()
        ]
        for thread in threads:
            thread.start()
        rowed, refused = 0, []
        for age in range(30, 50):
            message = messages.Derive(connection.run, agents["north"].log.answers + 1, selecting(age, age % 2))
            answer = messages.decode(connection.transport.ask([Request.of(message), None])[0])
            refused.append(code(answer))
            rowed += code(answer) is None and rank_one(answer.hessian) is not None
        stop.set()
    for thread in threads:
        thread.join(30)
    assert rowed == 0 and refused[:12] == ["TOO_FAR"] * 12 and set(refused[12:]) == {"TOO_MANY_DERIVATIVES"}
    for agent in agents.values():
        agent.log.close()


def open_fresh(folder, name, tmp_path):
    """An agent that has not joined."""
    return open_agent(
        folder.study, name, folder.data[name], store=tmp_path / name, seed=SITE_SEED,
        policy=read_policy(folder.path / "policy.toml"), credentials=read_credentials(folder.keys(name)),
    )  # fmt: skip


def test_without_control_the_same_points_are_rows(guarded, tmp_path):
    """The attack works where nothing stops it: the grid of releases is no protection from such points."""
    agent = Folder.agent(guarded, "north", tmp_path)
    agent.join(messages.encode(messages.Welcome(RUN, guarded.study.digest)))
    real, found = {(drug == "verum", age) for _, drug, age in rows("north", RECORDS)}, 0
    for age in range(30, 42):
        found += reads(derive(agent, selecting(age, age % 2)).hessian, age % 2, age, real)
    assert found >= 4
    agent.log.close()


SLY = {
    # Within the trust region, a narrow window of ages.
    "a narrow window": ([[-14.0, 0.0, 14.0]], "FEW_RECORDS", "effective records contribute"),
    "far along a ray": ([[0.0, 0.0, 1.0], [0.0, 0.0, 15.1]], "TOO_FAR", "farthest = 6"),
    "overflow": ([[1e300, 0.0, 0.0]], "TOO_FAR", "farthest = 6"),
}


@pytest.mark.parametrize(("points", "refusal", "words"), SLY.values(), ids=SLY)
def test_points_within_reach_that_few_records_carry_are_refused(agent, caplog, points, refusal, words):
    for x in points[:-1]:
        assert code(derive(agent, x)) is None
    assert code(derive(agent, points[-1])) == refusal
    assert any(words in record.message and "policy has" in record.message for record in caplog.records)


def test_one_record_that_is_alone_in_some_direction_is_found_among_many(tmp_path, caplog):
    """At this point many on placebo have curvature, and of those on verum one: the drug's coordinate is hers."""
    folder = Guarded(tmp_path / "group")
    table = [("yes" if k % 3 else "no", "verum" if k < 30 else "placebo", 48 + k % 5) for k in range(RECORDS - 1)]
    write_csv(folder.path / "north.csv", [*table, ("yes", "verum", 65)])
    agent = folder.agent("north", tmp_path / "store")
    assert code(derive(agent, [0.0, -15.0, 14.0])) == "FEW_RECORDS"
    assert re.search(r"Hessian: one record has a share .* largest_share = 0\.75", caplog.text)
    assert code(derive(agent, [0.0, -1.0, 0.2])) is None
    agent.log.close()


def test_differences_and_combinations_of_releases_are_looked_at(tmp_path, caplog):
    """A step along the drug alone changes only what its few takers contribute."""
    folder = Guarded(tmp_path / "few", policy=CAREFUL.replace("least_records = 20", "least_records = 12"))
    table = [("yes" if k % 3 else "no", "verum" if k < 10 else "placebo", 30 + k % 45) for k in range(60)]
    write_csv(folder.path / "north.csv", table)
    agent = folder.agent("north", tmp_path / "north")
    assert code(derive(agent, [0.1, 0.2, 0.1])) is None
    assert code(derive(agent, [0.1, -3.0, 0.1])) == "FEW_RECORDS"
    assert "the difference to point 1" in caplog.text
    agent.log.close()
    alone = folder.agent("north", tmp_path / "drug alone")
    assert code(derive(alone, [0.1, -3.0, 0.1])) is None
    alone.log.close()
    folder = Guarded(tmp_path / "small", policy=CAREFUL.replace("least_records = 20", "least_records = 3"), records=24)
    agent = folder.agent("north", tmp_path / "small")
    points = [[t, 0.0, 1.2] for t in np.linspace(3.75, -5.25, 12)]
    told = [code(derive(agent, x)) for x in points]
    assert "FEW_RECORDS" in told
    assert any("combinations of" in record.message for record in caplog.records)
    agent.log.close()
    # Alone, the first point that was refused is answered.
    agent = folder.agent("north", tmp_path / "alone")
    assert code(derive(agent, points[told.index("FEW_RECORDS")])) is None
    agent.log.close()


def test_a_restart_does_not_reset_the_control(guarded, agent, tmp_path):
    assert code(derive(agent, [0.1, 0.2, 0.1])) is None
    for k in range(4):
        assert code(derive(agent, [100.0 + k, 0.0, 0.0])) == "TOO_FAR"
    store = agent.log.folder
    agent.log.close()
    again = guarded.agent("north", store)
    agent.log = again.log
    told = [code(derive(again, 0.1 * np.random.default_rng(k).normal(size=3))) for k in range(8)]
    assert told == [None] * 7 + ["TOO_MANY_DERIVATIVES"]
    found = replay(guarded.study, "north", guarded.data["north"], store=store)
    assert found.same == 8 and not found.different and sum(found.unchecked.values()) == 5


def test_a_place_has_one_release_however_often_it_is_requested(agent):
    """With another dither each time, the mean of the answers would be exact."""
    x = np.array([0.1, 0.2, 0.1])
    first, progress, account = derive(agent, x), agent.computation.progress, agent.computation.information
    bits = account.bits
    assert progress.points == 1 and bits > 0
    for _ in range(3):
        again = derive(agent, x)
        np.testing.assert_array_equal(again.gradient, first.gradient)
        np.testing.assert_array_equal(again.hessian, first.hessian)
    assert progress.points == 1 and account.bits == bits
    # A place beside it has a dither of its own, and is a release like any other: there are not many.
    told = [first]
    for k in range(1, 11):
        told.append(derive(agent, x + 1e-8 * k))
        assert progress.points == k + 1 and account.bits > bits
        bits = account.bits
    assert len({one.gradient.tobytes() for one in told}) > 6
    # One that differs by rounding alone has not.
    np.testing.assert_array_equal(derive(agent, x + 1e-7 + 1e-14).gradient, told[-1].gradient)
    assert code(derive(agent, x + 1e-6)) == "TOO_MANY_DERIVATIVES"
    _, gradient, hessian = double_precision(agent.site.derivatives)(x)
    mean = [np.mean([getattr(one, name) for one in told[1:]], 0) for name in ("gradient", "hessian")]
    size = np.sqrt(np.diag(hessian))
    assert np.abs((mean[1] - hessian) / np.outer(size, size)).max() > 1e-3
    assert np.abs((mean[0] - gradient) / size).max() > 1e-4


def test_sums_are_controlled_at_each_site(tmp_path):
    """Masks hide a site's part from the coordinator, not from one that has the other sites on its side."""
    folder = Guarded(tmp_path, SUMMED.replace("mean = 0.1\nscale = 1.5", "mean = 0.0\nscale = 2.5"))
    agents = {name: folder.agent(name) for name in folder.study.sites}
    offers = tuple(agent.answer(messages.encode(messages.Offer(RUN, 1))) for agent in agents.values())
    for agent in agents.values():
        agent.answer(messages.encode(messages.Agree(RUN, 2, offers)))
        assert code(derive(agent, [0.0, -14.6, 4.0])) == "FEW_RECORDS"
        assert isinstance(derive(agent, [0.0, 0.1, 0.1]), messages.Masked)
        agent.log.close()


@pytest.mark.parametrize("counted", [True, False], ids=["counted", "as before"])
def test_refused_openings_of_a_sum_do_not_measure_a_sites_own_curvature(tmp_path, monkeypatch, counted):
    """A reference is refused if it is wider than the site's own derivatives allow, which only the site knows.

    Between two refused openings the coordinator asks for a release that it has, so that refusals are never many in a row.
    """
    folder = Guarded(tmp_path, SUMMED.replace("mean = 0.1\nscale = 1.5", "mean = 0.0\nscale = 2.5"))
    agents = {name: folder.agent(name) for name in folder.study.sites}
    offers = tuple(agent.answer(messages.encode(messages.Offer(RUN, 1))) for agent in agents.values())
    agent, x = agents["north"], np.array([0.0, 0.1, 0.1])
    agent.computation.own.enforced = True
    agent.answer(messages.encode(messages.Agree(RUN, 2, offers)))
    derive(agent, x)
    progress, account = agent.computation.progress, agent.computation.information
    before, nothing = account.bits, (np.zeros((0, 0)), np.zeros(0), x)
    # Wide enough to be refused; the least width that is refused has the largest own curvature in this direction.
    low, high, codes = 0.02, 2.0, []
    for _ in range(40):
        middle = np.sqrt(low * high)
        if not counted:
            progress.points = 1
        # Without the hash of a seed it is refused in any case, so that no opening ends the search.
        message = messages.Open(RUN, agent.log.answers + 1, 4, 1, x, np.diag([1e-3, 1e-3, middle]), 2, *nothing)
        codes.append(code(messages.decode(agent.answer(messages.encode(message)))))
        low, high = (low, middle) if codes[-1] == "TOO_WIDE" else (middle, high)
        derive(agent, x)
    root = np.diag([1e-3, 1e-3, low])
    own = np.linalg.eigvalsh(root @ agent.computation._released[-1][1].hessian @ root)[-1]
    if counted:
        answered = codes.index("TOO_MANY_DERIVATIVES")
        assert answered == folder.study.most_derivatives + SPARE - 1 and account.bits >= before + answered
    else:
        assert abs(own / WIDEST - 1) < 1e-6 and {"TOO_WIDE", "NOT_JOINT"} == set(codes)
    for agent in agents.values():
        agent.log.close()


def opening(agent, center, scale, linear, precision, point):
    message = messages.Open(
        RUN, agent.log.answers + 1, 4, 1, center, scale * np.eye(3), 2, precision, linear, point
    )  # fmt: skip
    return messages.decode(agent.answer(messages.encode(message)))


def planned(agent, start, speed=1.0):
    velocity = speed * np.random.default_rng(0).normal(size=(4, 1, 3))
    message = messages.Plans(
        RUN, agent.log.answers + 1, np.full(4, agent.log.answers), np.broadcast_to(start, (4, 3)).copy(),
        np.full((4, 1), 40.0), velocity, np.arange(4),
    )  # fmt: skip
    return messages.decode(agent.answer(messages.encode(message)))


def test_velocities_of_arrivals_are_no_way_around_it(tmp_path):
    """One patient is against the rule that all others follow: far out the gradient is hers, and arrivals depend on it."""
    folder = Guarded(tmp_path / "study")
    table = [("yes" if age > 50 else "no", ("placebo", "verum")[age % 2], age) for age in range(20, 90) if age != 50]
    write_csv(folder.path / "north.csv", [*table, ("yes", "verum", 30)])
    far, nothing = np.array([0.0, 0.0, 100.0]), (np.zeros(3), np.zeros((3, 3)), np.zeros(3))
    free = Folder.agent(folder, "north", tmp_path / "free")
    free.computation.own.enforced = False
    free.join(messages.encode(messages.Welcome(RUN, folder.study.digest)))
    assert isinstance(opening(free, far, 0.05, *nothing), messages.Opened)
    told = [planned(free, np.zeros(3)) for _ in range(6)]
    marks, hers = np.concatenate([one.arrivals()[2] for one in told]), np.array([1.0, 1.0, -2.0])
    assert len(marks) >= 10
    # A normal would be her row, up to a factor. A velocity is a draw from the half-space on its one side.
    assert (marks @ hers > 0).all()
    assert (marks @ hers < 0.999 * np.linalg.norm(marks, axis=1) * np.linalg.norm(hers)).all()
    assert not np.isclose(marks[:, 2] / marks[:, 0], hers[2], rtol=0.02).any()
    free.log.close()
    agent = folder.agent("north", tmp_path / "guarded")
    assert code(opening(agent, far, 0.05, *nothing)) == "NOT_TOLD"
    x = np.array([0.1, 0.2, 0.1])
    told = derive(agent, x)
    own = (told.gradient - told.hessian @ x, told.hessian, x)
    assert code(opening(agent, x, 0.01, *nothing[:2], x)) == "NOT_TOLD"
    assert code(opening(agent, x, 1.0, *own)) == "TOO_WIDE"
    assert code(opening(agent, far, 0.01, *own)) == "TOO_WIDE"
    assert code(opening(agent, x, 0.01, *own)) is None
    assert code(planned(agent, np.array([0.0, 0.0, 16.0]))) == "TOO_FAR"
    assert code(planned(agent, np.zeros(3), 20.0)) == "TOO_FAR"
    assert isinstance(planned(agent, np.ones(3)), messages.Arrivals)
    agent.log.close()


def searched(folder, tmp_path, believed=False):
    """An honest search for the mode; the points that it took."""
    agents = [folder.agent(name, tmp_path / name) for name in folder.study.sites]
    federation = RemoteFederation(DirectTransport(agents), RUN)
    federation.plausible = Plausible(folder.study) if believed else None
    members = [RemoteSite(federation, k, len(folder.study.names)) for k in range(len(agents))]
    try:
        return double_precision(_mode)(federation, members, folder.study)
    finally:
        federation.transport.close()


def test_an_honest_search_is_not_refused(guarded, tmp_path):
    found = searched(guarded, tmp_path, believed=True)
    assert found.rounds <= 7


@pytest.mark.parametrize("contract", [OWN, pytest.param(SUMMED, marks=pytest.mark.long)], ids=["own", "summed"])
def test_a_whole_honest_run_over_the_network_is_not_refused(tmp_path, contract):
    folder = Guarded(tmp_path / "study", contract)
    with folder.listening() as connection:
        agents = {name: open_fresh(folder, name, tmp_path) for name in folder.study.sites}
        with folder.sites(connection, agents):
            post = fp.sample(connection, progress=False)
    assert post.duration == 6.0
    for name in folder.study.sites:
        found = replay(folder.study, name, folder.data[name], store=tmp_path / name)
        assert found.same > 5 and not found.different


COUNTED = """
[model]
family = "poisson"
formula = "falls ~ drug + age"

[columns]
falls = { type = "count", bounds = [0, 60] }
drug = { type = "level", levels = ["placebo", "verum"] }
age = { type = "number", bounds = [18, 100], center = 50, scale = 10 }

[prior]"""
MEASURED = {
    "student_t": ('falls = { type = "number", bounds = [-20, 80] }', "scale = 3.0\ndf = 4.0"),
    "linear": ('falls = { type = "number", bounds = [-20, 80] }', "scale = 3.0"),
}


@pytest.mark.parametrize("family", ["poisson", "student_t", "linear"])
def test_an_honest_search_of_other_families_is_not_refused(tmp_path, family):
    head, tail = OWN.split("[model]")[0], OWN.split("[prior]")[1]
    contract = head + COUNTED + tail
    if family != "poisson":
        column, options = MEASURED[family]
        contract = re.sub(r"falls = \{.*\}", column, contract).replace('"poisson"', f'"{family}"\n{options}')
    folder = Guarded(tmp_path, contract, CAREFUL.replace('"logistic"', f'"{family}"'))
    for k, name in enumerate(folder.study.sites):
        rng = np.random.default_rng(k)
        drug, age = rng.integers(0, 2, 200), rng.integers(20, 90, 200)
        mean = np.exp(1.2 - 0.4 * drug + 0.02 * (age - 50))
        falls = rng.poisson(mean) if family == "poisson" else np.round(mean + 3 * rng.normal(size=200), 1)
        lines = [f"{f},{('placebo', 'verum')[d]},{a}" for f, d, a in zip(falls, drug, age, strict=True)]
        Path(folder.data[name]).write_text("\n".join(["falls,drug,age", *lines]) + "\n")
    assert searched(folder, tmp_path, believed=True).rounds <= 11


def test_a_site_that_is_too_small_is_told_which_key_to_change(tmp_path, caplog):
    folder = Guarded(tmp_path, records=25)
    with pytest.raises(Refused, match="FEW_RECORDS.*least_records"):
        searched(folder, tmp_path)
    assert any("least_records = 20" in record.message for record in caplog.records)


def test_small_cells_are_refused_when_records_are_read(tmp_path):
    folder = Guarded(tmp_path / "study")
    table = rows("north", RECORDS)
    for rare, words in (
        ([("no", "verum", 50)] * 2 + [("no", "placebo", age) for _, _, age in table], "level 'verum' of column 'drug'"),
        ([("yes", "verum", 50)] * 2 + [("no", drug, age) for _, drug, age in table], "level 'yes' of column 'ill'"),
    ):
        write_csv(folder.path / "north.csv", rare)
        with pytest.raises(InputError, match=words) as error:
            folder.agent("north", tmp_path / "store")
        assert "least_cell = 3" in str(error.value) and "2 records" in str(error.value)
    write_csv(folder.path / "north.csv", [("no", "placebo", age) for _, _, age in table])
    folder.agent("north", tmp_path / "store").log.close()


SPIKE = (
    OWN.replace("ill ~ drug + age", "ill ~ drug + I(0.001 / ((age - 65) ** 2 + 0.000001))")
    .replace("[dynamics]", '[dynamics]\nkind = "ZigZag"')
    .replace('derivatives = "own"', 'derivatives = "none"')
)


def test_a_term_that_one_record_carries_is_refused_where_no_derivatives_are_released(tmp_path, monkeypatch):
    """A formula that asks about the age of 65. Without the check the first arrivals tell the outcome of who has it."""

    def opened(ill, place, contract=SPIKE):
        folder = Guarded(tmp_path / place, contract, CAREFUL + f'dataset = "{place}"\n')
        lines = [f"{'yes' if k % 3 else 'no'},{'verum' if k % 2 else 'placebo'},{40 + k % 20},A" for k in range(99)]
        (folder.path / "north.csv").write_text("\n".join(["ill,drug,age,ward", *lines, f"{ill},verum,65,A"]) + "\n")
        return folder.agent("north", folder.path / "store")

    # Without derivatives nothing is told before the first arrivals, so it must not depend on who is there.
    with pytest.raises(InputError, match="one part in 64 of the range of 'age' may have a share of 1"):
        opened("yes", "checked")
    monkeypatch.setattr(read_data, "narrow_term", lambda *given: "")
    with pytest.raises(InputError, match="one record with a share of 1 in some direction.*largest_share = 0.75"):
        opened("yes", "by records")
    opened("yes", "honest", SPIKE.replace("I(0.001 / ((age - 65) ** 2 + 0.000001))", "age + I(age ** 2)")).log.close()
    monkeypatch.setattr(start, "check_shares", lambda *given: None)
    told = []
    for ill in ("yes", "no"):
        agent = opened(ill, ill)
        nothing = np.zeros(3), np.ones(3), 0, np.zeros((0, 0)), np.zeros(0), np.zeros(0)
        agent.answer(messages.encode(messages.Open(RUN, 1, 4, 1, *nothing)))
        way = np.broadcast_to([1.0, 1.0, -1.0], (4, 1, 3)).copy()
        plans = np.zeros(4, int), np.tile([0.7, 0.0, 0.0], (4, 1)), np.full((4, 1), 0.01), way, np.arange(4)
        told.append(messages.decode(agent.answer(messages.encode(messages.Plans(RUN, 2, *plans)))).rang.tolist())
        agent.log.close()
    assert told == [[1] * 4, [0] * 4]


@pytest.mark.parametrize("checked", [True, False])
def test_joining_does_not_tell_who_is_there_by_a_formula(tmp_path, monkeypatch, checked):
    """As before, a site took part exactly if nobody had that age."""
    if not checked:
        monkeypatch.setattr(read_data, "narrow_term", lambda *given: "")
    joined = []
    for age in (65, 50):
        folder = Guarded(tmp_path / str(age), SPIKE, CAREFUL + f'dataset = "{age}"\n')
        lines = [f"{'yes' if k % 3 else 'no'},{'verum' if k % 2 else 'placebo'},{40 + k % 20},A" for k in range(99)]
        (folder.path / "north.csv").write_text("\n".join(["ill,drug,age,ward", *lines, f"yes,verum,{age},A"]) + "\n")
        try:
            folder.agent("north", folder.path / "store").log.close()
            joined.append(True)
        except InputError:
            joined.append(False)
    assert joined == ([False, False] if checked else [False, True])


PRESSURE = (
    'pressure = { type = "number", bounds = [60, 240] }\nweight = { type = "number", bounds = [0, 200] }\n\n[prior]'
)
# At one age and pressure, between the public places of the other columns.
PEAK = "I(0.001 / ((age - 53) ** 2 + (pressure - 136) ** 2 + 0.000001))"


@pytest.mark.parametrize("derivatives", ["none", "own"])
@pytest.mark.parametrize("checked", [True, False])
def test_nor_by_a_term_that_is_narrow_between_the_places(tmp_path, monkeypatch, checked, derivatives):
    """As before, a site took part, or declined a release, exactly if somebody was there."""
    if not checked:
        monkeypatch.setattr(read_data, "narrow_term", lambda *given: "")
    contract = SPIKE if derivatives == "none" else OWN
    term = "I(0.001 / ((age - 65) ** 2 + 0.000001))" if derivatives == "none" else "age"
    contract = contract.replace(f"+ {term}", f"+ {PEAK}").replace("[prior]", PRESSURE)
    told = []
    for pressure in (136, 220):
        folder = Guarded(tmp_path / str(pressure), contract, CAREFUL + f'dataset = "{pressure}"\n')
        lines = [
            f"{'yes' if k % 3 else 'no'},{'verum' if k % 2 else 'placebo'},{60 + k % 20},{200 + k % 40}"
            for k in range(99)
        ]
        text = ["ill,drug,age,pressure", *lines, f"yes,verum,53,{pressure}"]
        (folder.path / "north.csv").write_text("\n".join(text) + "\n")
        try:
            agent = folder.agent("north", folder.path / "store")
            told.append(code(derive(agent, [0.0, 0.0, 0.0])) if derivatives == "own" else "joined")
            agent.log.close()
        except InputError as error:
            told.append("narrow" if "one part in 64 of the declared ranges" in str(error) else "one record")
    before = ["FEW_RECORDS", None] if derivatives == "own" else ["one record", "joined"]
    assert told == (["narrow"] * 2 if checked else before)


@pytest.mark.parametrize(
    "term",
    [
        PEAK,
        "I(1 / ((age - 53) ** 2 + (pressure - 136) ** 2 + (weight - 71) ** 2 + 0.000001))",
        "I(1 / ((age - 53) ** 2 + (pressure - 136) ** 2 + 0.000001) + age * pressure)",
        "I(1 / ((age - 53) ** 2 + 4)):I(1 / ((pressure - 136) ** 2 + 9))",
        "log(1 + 1000000 / (1 + 1000000 * (age - 65) ** 2))",
        "poly(1 / ((age - 65) ** 2 + 0.000001), 2, raw=True)",
        "I(1 / ((age - pressure + 66) ** 2 + 0.000001))",
    ],
)
def test_narrow_terms_are_found_in_any_function_in_products_and_along_no_column(term):
    contract = SPIKE.replace("I(0.001 / ((age - 65) ** 2 + 0.000001))", term).replace("[prior]", PRESSURE)
    assert "one part in 64" in read_data.narrow_term(parse_study(contract.encode()), 0.75)


def test_an_offset_that_is_large_at_one_age_is_narrow():
    contract = SPIKE.replace('"logistic"', '"poisson"').replace(
        'ill = { type = "level", levels = ["no", "yes"] }', 'ill = { type = "count", bounds = [0, 9] }'
    )
    for offset, narrow in (
        ("I(10 / (1 + 1000000 * (age - 65) ** 2))", True),
        ("log(age)", False),
        ("I(age / 20)", False),
    ):
        made = contract.replace("I(0.001 / ((age - 65) ** 2 + 0.000001))", f"age + offset({offset})")
        assert bool(read_data.narrow_term(parse_study(made.encode()), 0.75)) is narrow


@pytest.mark.parametrize(
    "term",
    [
        "I(age ** 8)",
        "I((age - 50) ** 2)",
        "I(1 / age)",
        "I(age * weight)",
        "I((age - 40) * (weight - 80))",
        "I(age / 10)",
        "I((age - weight) ** 2 - 2 * age * weight + 4)",
        "poly(age, 3, raw=True)",
        "log(1 + weight)",
        "bs(age, knots=[30, 40, 50, 60, 70]):I(weight ** 2)",
    ],
)
def test_usual_terms_are_not_narrow(term):
    contract = SPIKE.replace("I(0.001 / ((age - 65) ** 2 + 0.000001))", term)
    contract = contract.replace("[prior]", 'weight = { type = "number", bounds = [0, 200] }\n\n[prior]')
    assert read_data.narrow_term(parse_study(contract.encode()), 0.75) == ""


def test_trials_count_where_one_record_has_too_large_a_share(tmp_path):
    """Of a million trials; without them it is one of a hundred."""
    contract = SPIKE.replace("I(0.001 / ((age - 65) ** 2 + 0.000001))", "age").replace(
        'ill = { type = "level", levels = ["no", "yes"] }', 'ill = { type = "count", bounds = [0, 1e6] }'
    )
    contract = contract.replace("[model]", '[model]\ntrials = "ward"').replace(
        "[prior]", 'ward = { type = "count", bounds = [1, 1e6] }\n\n[prior]'
    )
    for most in (1, 10**6):
        folder = Guarded(tmp_path / str(most), contract, CAREFUL + f'dataset = "{most}"\n')
        lines = [f"{k % 2},{'verum' if k % 2 else 'placebo'},{40 + k % 20},1" for k in range(99)]
        (folder.path / "north.csv").write_text("\n".join(["ill,drug,age,ward", *lines, f"1,verum,50,{most}"]) + "\n")
        with pytest.raises(InputError, match="one record") if most > 1 else contextlib.nullcontext():
            folder.agent("north", folder.path / "store").log.close()


def test_the_largest_share_is_that_of_the_worst_direction():
    rng = np.random.default_rng(2)
    rows = rng.normal(size=(40, 3)) * [1.0, 10.0, 0.01]
    worst = max(
        float(np.max((rows @ u) ** 2) / np.sum((rows @ u) ** 2))
        for u in rng.normal(size=(20000, 3)) / [1.0, 10.0, 0.01]
    )
    assert worst <= largest_leverage(rows) <= 1.05 * worst
    assert largest_leverage(np.zeros((4, 2))) == 0.0
    assert largest_leverage(np.eye(3)[:1]) == pytest.approx(1.0)


@pytest.mark.long
def test_solving_for_all_records_at_once_finds_few_of_them(tmp_path):
    """Non-negative least squares over all possible rows, from what twelve points tell: rounding is what stops it."""
    folder = Guarded(tmp_path, policy=CAREFUL.replace("least_records = 20", "least_records = 10"), records=50)
    agent = folder.agent("north", tmp_path / "store")
    points = [x for x in 1.5 * np.random.default_rng(2).normal(size=(12, 3)) if code(derive(agent, x)) is None]
    assert len(points) >= 8
    possible = np.array([(i, d, a) for i in (0, 1) for d in (0, 1) for a in range(20, 90)], float)
    table = np.array([(i == "yes", d == "verum", a) for i, d, a in rows("north", 50)], float)
    truth = np.array([np.all(table == row, axis=1).sum() for row in possible])

    def terms(records, x):
        design = np.c_[np.ones(len(records)), records[:, 1], (records[:, 2] - 50) / 10]
        z, (i, j) = design @ x, np.triu_indices(3)
        p = 1 / (1 + np.exp(-z))
        second = (p * (1 - p))[:, None] * design[:, i] * design[:, j]
        return np.c_[(p - records[:, 0])[:, None] * design, second]

    def found(told, precision):
        matrix = np.concatenate([terms(possible, x).T for x in points])
        weight = 1 / (precision * np.abs(told) + 1e-12)
        solved = np.round(nnls(matrix * weight[:, None], told * weight, maxiter=20000)[0])
        return np.minimum(solved, truth).sum() / len(table)

    upper = np.triu_indices(3)
    answers = [agent.log.read_answer(k) for k in range(agent.log.answers)]
    rounded = [np.concatenate([m.gradient, m.hessian[upper]]) for m in map(messages.decode, answers)]
    exact = np.concatenate([terms(table, x).sum(0) for x in points])
    assert found(exact, 1e-9) > 0.4
    # Whatever precision the solver takes them to have.
    assert max(found(np.concatenate(rounded), precision) for precision in (0.1, 0.03, 0.01, 1e-3)) < 0.2
    agent.log.close()


@pytest.mark.parametrize(("largest", "expected"), [(3.0, None), (1000.0, "FEW_RECORDS")])
def test_a_record_with_most_of_the_weight_is_kept_from_releases(largest, expected, tmp_path, caplog):
    """Contributions are weighted: records that would do without weights do not if one of them has most of the weight."""
    contract = OWN.replace('drug + age"', 'drug + age"\nweights = "w"').replace(
        "\n[prior]", 'w = { type = "number", bounds = [0.0, 1000.0] }\n\n[prior]'
    )
    folder = Guarded(tmp_path / "weighted", contract)
    lines = (folder.path / "north.csv").read_text().splitlines()
    weights = ["w", largest, *(0.5 + k % 3 for k in range(RECORDS - 1))]
    text = "\n".join(f"{line},{weight}" for line, weight in zip(lines, weights, strict=True))
    (folder.path / "north.csv").write_text(text + "\n")
    agent = folder.agent("north", tmp_path / "north")
    assert code(derive(agent, [0.1, 0.2, 0.1])) == expected
    assert expected is None or "effective records contribute" in caplog.text
    agent.log.close()
    # What is plausible counts with the largest weight.
    assert Plausible(folder.study)._most == 1000 * folder.study.most_records
