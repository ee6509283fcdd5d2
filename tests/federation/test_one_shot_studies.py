"""A private answer from noisy derivatives alone, over a network."""

import numpy as np
import pytest
from tests.federation.studies import SEED, SITE_SEED, Folder
from tests.privacy.support import a_ledger
from tests.study.contracts import CONTRACT

import fedpdmc as fp
from fedpdmc.errors import BadAnswer, InputError
from fedpdmc.federation import messages
from fedpdmc.federation.dry_run import try_study
from fedpdmc.federation.site_agent.audit_log import Kind, read_log
from fedpdmc.federation.site_agent.audit_replay import replay
from fedpdmc.federation.site_agent.start import open_agent
from fedpdmc.privacy.ledger import read
from fedpdmc.study import parse_study, read_records

ONE_SHOT = (
    CONTRACT.replace("[run]\nduration = 6.0\nburn_in = 1.0", '[run]\nmethod = "private-laplace"')
    .replace('derivatives = "own"\npasses = true', 'arrivals = false\nderivatives = "noisy"')
    .replace("observed_time = 1000.0\n", "")
    + "\n[privacy]\nepsilon = 200.0\ndelta = 1e-6\n"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return Folder(tmp_path_factory.mktemp("one shot"), ONE_SHOT)


def agents(folder, path):
    return {
        name: open_agent(
            folder.study, name, folder.data[name], store=path / name, seed=SITE_SEED, seeded_for_tests=True,
            ledger=a_ledger(path / f"{name}.db"),
        )
        for name in folder.study.sites
    }  # fmt: skip


def sites(folder, path):
    """The same sites in this process."""
    made = []
    for name in folder.study.sites:
        records = read_records(folder.study, folder.data[name])
        budget = folder.study.budget(a_ledger(path / f"{name}.db"), name, seeded_for_tests=True)
        made.append(fp.Site(folder.study.potential(records), name=name, seed=SITE_SEED, budget=budget))
    return made


@pytest.mark.filterwarnings("ignore:The noise that the privacy budgets ask for")
def test_over_tls_as_in_process_and_charged_at_the_site(folder, tmp_path):
    study, asked = folder.study, agents(folder, tmp_path / "net")
    with folder.listening() as connection, folder.sites(connection, asked):
        with pytest.raises(InputError, match="private-laplace"):
            fp.sample(connection, duration=3.0, progress=False)
        post = fp.sample(connection, progress=False)
        # Asked again, the sites say the same and charge nothing.
        again = fp.sample(connection, progress=False)
    np.testing.assert_array_equal(post.draws(50), again.draws(50))
    local = sites(folder, tmp_path / "here")
    expected = fp.sample(
        local, study.prior(), method="private-laplace", seed=SEED, names=list(study.names), progress=False
    )
    np.testing.assert_array_equal(post.draws(50), expected.draws(50))
    assert post.settings["exact"] is False and post.rounds == 4 and post.settings["study"] == study.name
    # What it would cost to be exact, from the contract alone as from the sites.
    assert "effective samples of the exact" in post.settings["chosen"] == expected.settings["chosen"]
    for name, agent in asked.items():
        told, known = post.privacy[name], expected.privacy[name]
        assert {k: v for k, v in told.items() if k not in ("dataset", "run")} == {
            k: v for k, v in known.items() if k != "dataset"
        }
        assert told["spent"] == pytest.approx(1.0, abs=1e-6) and told["releases"] == 4
        # By the exact account, all of the budget and no more.
        assert told["running_epsilon"] == pytest.approx(200.0, rel=1e-4) and told["running_epsilon"] <= 200.0
        ledger = agent.site.budget.open()[0]
        assert [e.kind for e in read(ledger.path) if e.kind in ("release", "round")] == ["release"] * 4
        ledger.close()
        answers = [messages.decode(e.payload) for e in read_log(tmp_path / "net" / name) if e.kind is Kind.ANSWER]
        assert {type(answer) for answer in answers} <= {messages.Derivatives, messages.Opened}


def test_sites_of_such_a_study_tell_no_arrivals(folder, tmp_path):
    agent = agents(folder, tmp_path)["north"]
    agent.join(messages.encode(messages.Welcome(bytes(16), folder.study.digest)))
    dim, none = len(folder.study.names), np.zeros(0)
    opening = messages.Open(bytes(16), 1, 4, 1, np.zeros(dim), np.ones(dim), 0, np.zeros((0, 0)), none, none)
    assert messages.decode(agent.answer(messages.encode(opening))).code == "NOT_IN_CONTRACT"
    assert not [e for e in read(agent.site.budget.open()[0].path) if e.cost > 0]


def test_noise_must_be_told_with_its_size(folder):
    """A site that hides its noise, or an account that cannot be, is refused."""
    fields = (bytes(16), 1, bytes(32), 0.0, np.zeros(3), np.eye(3))
    for noise in (np.ones(1), -np.ones(16)):
        with pytest.raises(messages.WireError, match="noise"):
            messages.decode(messages.encode(messages.Derivatives(*fields, noise)))
    from fedpdmc.federation.remote import RemoteFederation, RemoteSite

    class Told(RemoteFederation):
        names = ("north",)

        def __init__(self, noise):
            self.noise, self.account = [noise], {}

        def derivatives(self, x, spread=None, bend=None):
            return [(0.0, np.zeros(3), np.eye(3))]

    for noise in (np.zeros(0), np.ones(16)):
        with pytest.raises(BadAnswer):
            RemoteSite(Told(noise), 0, 3, folder.study.budget().bounds).released(np.zeros(3))


@pytest.mark.parametrize(("old", "new", "match"), [
    ("\n[privacy]\nepsilon = 200.0\ndelta = 1e-6\n", "", "privacy"),
    ('derivatives = "noisy"', 'derivatives = "none"', "derivatives"),
    ("arrivals = false", "arrivals = true", "arrivals"),
    ("mean = 0.1\nscale = 1.5", "flat = true", "prior"),
    ("rounds = 2000", "rounds = 2000\nderivatives = 2", "limits: derivatives"),
    ('method = "private-laplace"', "", "arrivals"),
])  # fmt: skip
def test_contracts_that_do_not_fit_the_method_are_refused(old, new, match):
    assert old in ONE_SHOT
    with pytest.raises(InputError, match=match):
        parse_study(ONE_SHOT.replace(old, new).encode())


WARDS = (
    ONE_SHOT.replace('formula = "ill ~ drug + age"', 'formula = "ill ~ 0 + ward + age"')
    .replace("[prior]", 'ward = { type = "level", levels = ["A", "B"] }\n[prior]')
    .replace("[limits]", '[coordinates]\nnorth = ["ward[A]", "age"]\nsouth = ["ward[B]", "age"]\n[limits]')
)


@pytest.mark.filterwarnings("ignore:The noise that the privacy budgets ask for")
def test_sites_whose_records_depend_on_some_parameters_release_in_these_alone(tmp_path):
    wards = Folder(tmp_path, WARDS)
    for name, ward in (("north", "A"), ("south", "B")):
        text = wards.data[name].read_text()
        wards.data[name].write_text(text.replace(",A\n", f",{ward}\n"))
    asked = agents(wards, tmp_path / "net")
    with wards.listening() as connection, wards.sites(connection, asked):
        post = fp.sample(connection, progress=False)
    local = []
    for name in wards.study.sites:
        records = read_records(wards.study, wards.data[name])
        budget = wards.study.budget(a_ledger(tmp_path / f"{name}.db"), name, seeded_for_tests=True)
        potential, own = wards.study.potential(records, name), wards.study.coordinates(name)
        local.append(fp.Site(potential, name=name, coordinates=own, seed=SITE_SEED, budget=budget))
    expected = fp.sample(
        local, wards.study.prior(), method="private-laplace", seed=SEED, names=list(wards.study.names), progress=False
    )
    np.testing.assert_array_equal(post.draws(50), expected.draws(50))
    answers = [messages.decode(e.payload) for e in read_log(tmp_path / "net" / "south") if e.kind is Kind.ANSWER]
    assert {a.gradient.shape for a in answers if isinstance(a, messages.Derivatives)} == {(2,)}
    summed = WARDS.replace('"noisy"', '"noisy-summed"').replace('"south"]', '"south", "west"]') + "colluding = 1\n"
    with pytest.raises(InputError, match="coordinates: found a table with derivatives = 'noisy-summed'"):
        parse_study(summed.encode())


@pytest.mark.filterwarnings("ignore:The noise that the privacy budgets ask for")
def test_such_a_study_is_tried_out_and_its_log_recomputed(folder, tmp_path):
    trial = try_study(folder.study, records=20)
    assert trial.rounds == 4 and trial.observed_time == 0.0
    made = {}
    for name in folder.study.sites:
        ledger = a_ledger(tmp_path / f"{name}.db")
        made[name] = open_agent(folder.study, name, folder.data[name], store=tmp_path / name, ledger=ledger)
    with folder.listening() as connection, folder.sites(connection, made):
        fp.sample(connection, progress=False)
    made["north"].site.budget.open()[0].close()
    found = replay(folder.study, "north", folder.data["north"], store=tmp_path / "north", ledger=tmp_path / "north.db")
    assert found.same == 4 and not found.different
