"""Noise in shares under a secure sum: what a coordinator and colluding sites see of the bytes of real agents."""

import numpy as np
import pytest
from scipy import stats
from tests.federation.studies import SEED, Folder
from tests.privacy.support import a_ledger
from tests.study.contracts import CONTRACT, POLICY

import fedpdmc as fp
from fedpdmc._jax.precision import double_precision
from fedpdmc.certificates import read_credentials
from fedpdmc.errors import BudgetSpent, InputError, Refused
from fedpdmc.federation import masking
from fedpdmc.federation import messages as wire
from fedpdmc.federation.site_agent.audit_replay import KEYS, replay
from fedpdmc.federation.site_agent.start import open_agent
from fedpdmc.members.private_site import run_name
from fedpdmc.members.site import derivatives
from fedpdmc.privacy.accountant import gaussian_delta, gaussian_epsilon
from fedpdmc.privacy.budget_planning import ONE_SHOT
from fedpdmc.privacy.gaussian_mechanism import MODULUS, ShareTerms, from_sum, noisy_share, share, shared_words, triangle
from fedpdmc.privacy.ledger import read
from fedpdmc.privacy.sensitivity import ModelFacts, derivative_sensitivity
from fedpdmc.study import parse_study, read_policy

EPSILON, DELTA, COLLUDING = 2.0, 1e-6, 1
SHARED = (
    CONTRACT.replace("[run]\nduration = 6.0\nburn_in = 1.0", '[run]\nmethod = "private-laplace"')
    .replace('"south"]', '"south", "west", "east"]')
    .replace('derivatives = "own"\npasses = true', 'arrivals = false\nderivatives = "noisy-summed"')
    .replace("observed_time = 1000.0\n", "")
    + f"\n[privacy]\nepsilon = {EPSILON}\ndelta = {DELTA}\ncolluding = {COLLUDING}\n"
)
X = np.array([0.1, -0.2, 0.3])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return Folder(tmp_path_factory.mktemp("shared"), SHARED)


def agents(folder, path, run=None):
    made = {
        name: open_agent(
            folder.study, name, folder.data[name], store=path / name, ledger=a_ledger(path / f"{name}.db"),
            credentials=read_credentials(folder.keys(name)),
        )
        for name in folder.study.sites
    }  # fmt: skip
    if run is not None:
        for agent in made.values():
            agent.join(wire.encode(wire.Welcome(run, folder.study.digest)))
        offers = tuple(agent.answer(wire.encode(wire.Offer(run, 1))) for agent in made.values())
        for agent in made.values():
            assert isinstance(ask(agent, wire.Agree(run, 2, offers)), wire.Opened)
    return made


def ask(agent, message):
    return wire.decode(agent.answer(wire.encode(message)))


def numbers(message):
    return masking.numbers(np.asarray(message.words, "<u8").tobytes())


def added(*columns):
    return [sum(column) % MODULUS for column in zip(*columns, strict=True)]


def without(total, *parts):
    return [(n - sum(part)) % MODULUS for n, *part in zip(total, *parts, strict=True)]


@double_precision
def true_values(agent):
    _, gradient, hessian = derivatives(agent.site, X)
    return np.concatenate([gradient, triangle(hessian)])


def own_share(agent, message, run, terms):
    """What a colluding site knows of its own message: it takes its masks off."""
    digest = wire.digest(wire.encode(wire.Derive(run, 3, X)))
    party = agent.computation.party
    zeros = masking.mask_integers([0] * 9, agent.site.name, party._keys, digest + terms.digest)
    return without(numbers(message), masking.numbers(zeros.tobytes()))


def needed(step):
    """Standard deviations of noise that alone would make a step private, from the issue's formulas and no code of shares."""
    mu = stats.norm  # Balle and Wang: δ(ε) = Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2 − ε/μ), solved for μ.
    low, high = 1e-3, 10.0
    for _ in range(100):
        m = (low + high) / 2
        delta = mu.cdf(m / 2 - EPSILON / m) - np.exp(EPSILON) * mu.cdf(-m / 2 - EPSILON / m)
        low, high = (m, high) if delta <= DELTA else (low, m)
    part = low**2 * ONE_SHOT.steps[step] / sum(ONE_SHOT.steps)
    return [1 / np.sqrt(part * share) for share in (ONE_SHOT.gradient, 1 - ONE_SHOT.gradient)]


@pytest.mark.long
def test_a_coordinator_with_colluding_sites_sees_the_noise_that_was_paid_for(folder, tmp_path):
    """Many runs of four agents: of the honest sites' sum the attacker gets noise of full size; of one more, less."""
    bounds, sites = folder.study.budget().bounds, list(folder.study.sites)
    changes = derivative_sensitivity(ModelFacts("logistic", 3), bounds, "replace")
    sigma = np.repeat([m * change for m, change in zip(needed(0), changes, strict=True)], [3, 6])
    seen, more = [], []
    for k in range(24):
        run = bytes([k]) * 16
        made = agents(folder, tmp_path / str(k), run)
        answers = {name: ask(agent, wire.Derive(run, 3, X)) for name, agent in made.items()}
        told = answers["north"].noise
        terms = ShareTerms(4, COLLUDING, 0, *told[:2].tolist())
        shares = {name: own_share(made[name], answers[name], run, terms) for name in ("west", "east")}
        total = added(*(numbers(answer) for answer in answers.values()))
        for colluders, found in ((["east"], seen), (["west", "east"], more)):
            rest = without(total, *(shares[name] for name in colluders))
            gradient, hessian = from_sum(rest, terms, 3)
            honest = [made[name] for name in sites if name not in colluders]
            truth = sum(true_values(agent) for agent in honest)
            found.append((np.concatenate([gradient, triangle(hessian)]) - truth) / sigma)
        for agent in made.values():
            agent.log.close()
            agent.site.budget.open()[0].close()
    seen, more = np.ravel(seen), np.ravel(more)
    assert stats.kstest(seen, "norm").pvalue > 1e-3
    error = np.sqrt(2 / seen.size)
    assert abs(np.mean(seen**2) - 1) < 4 * error
    # One colluding site more than was said is not covered: a third of the noise is gone.
    assert np.mean(more**2) < 0.9 and abs(np.mean(more**2) - 2 / 3) < 4 * error


def test_no_message_and_no_sum_short_of_one_tells_anything(folder, tmp_path):
    run = b"u" * 16
    made = agents(folder, tmp_path, run)
    answers = {name: ask(agent, wire.Derive(run, 3, X)) for name, agent in made.items()}
    terms = ShareTerms(4, COLLUDING, 0, *answers["north"].noise[:2].tolist())
    total = added(*(numbers(answer) for answer in answers.values()))
    truth = sum(true_values(agent) for agent in made.values())
    gradient, _ = from_sum(total, terms, 3)
    assert np.all(np.abs(gradient - truth[:3]) < 6 * terms.total_sd[0])
    # One message, and the sum of three: numbers of full width, far beyond anything with noise.
    for names in (["north"], ["north", "south", "west"]):
        part = [min(n, MODULUS - n) for n in added(*(numbers(answers[name]) for name in names))]
        assert np.median([float(n) for n in part]) > 2.0**120
    # Asked again the same request gets the same bytes, and nothing more is charged.
    again = ask(made["north"], wire.Derive(run, 3, X))
    np.testing.assert_array_equal(again.words, answers["north"].words)
    entries = [e for e in read(tmp_path / "north.db") if e.kind == "release"]
    assert len(entries) == 1 and '"colluding": 1' in entries[0].detail
    # The ledger keeps the masked words, not the site's own numbers.
    assert entries[0].reply == answers["north"].words.tobytes()
    assert ask(made["north"], wire.Derive(run, 4, X, np.eye(3))).code == "NOT_IN_CONTRACT"
    # Sites asked at different points: charged, and void.
    other = [ask(agent, wire.Derive(run, 4, X + 0.1 * k)) for k, agent in enumerate(made.values())]
    void = [min(n, MODULUS - n) for n in added(*(numbers(answer) for answer in other))]
    assert np.median([float(n) for n in void]) > 2.0**120
    # A fifth release is not in the budget.
    assert all(isinstance(ask(made["north"], wire.Derive(run, k, X + 0.1 * k)), wire.Masked) for k in (5, 6, 7))
    assert ask(made["north"], wire.Derive(run, 8, X - 0.1)).code == "BUDGET_SPENT"
    for agent in made.values():
        agent.log.close()


@pytest.mark.filterwarnings("ignore:The noise that the privacy budgets ask for")
def test_over_tls_the_answer_is_that_of_the_sum_and_every_site_is_charged(folder, tmp_path):
    asked = agents(folder, tmp_path)
    with folder.listening() as connection, folder.sites(connection, asked):
        post = fp.sample(connection, progress=False)
        again = fp.sample(connection, progress=False)
    np.testing.assert_array_equal(post.draws(50), again.draws(50))
    assert post.rounds == 6 and post.settings["sites"] == list(folder.study.sites)
    assert shared_words(4, 1) in post.settings["chosen"] and len(post.bytes) == len(post.messages) == 4
    for name, agent in asked.items():
        told = post.privacy[name]
        assert told["spent"] == pytest.approx(1.0, abs=1e-6) and told["spent"] <= 1.0 and told["colluding"] == 1
        assert told["running_epsilon"] == pytest.approx(EPSILON, rel=1e-4) and told["running_epsilon"] <= EPSILON
        ledger = agent.site.budget.open()[0]
        assert [e.kind for e in read(ledger.path) if e.kind in ("release", "round")] == ["release"] * 4
        ledger.close()
    assert post.settings["seed"] == SEED
    again = replay(folder.study, "north", folder.data["north"], store=tmp_path / "north", ledger=tmp_path / "north.db")
    assert again.same == 4 and not again.different and again.unchecked == {KEYS: 2}


@pytest.mark.parametrize(("old", "new", "match"), [
    ("colluding = 1\n", "", "privacy: colluding"),
    ("colluding = 1\n", "colluding = 3\n", "At least 2 must be honest"),
    ("colluding = 1\n", "colluding = -1\n", "colluding"),
    ('derivatives = "noisy-summed"', 'derivatives = "noisy"', "privacy: colluding"),
    ('[run]\nmethod = "private-laplace"', "", "arrivals"),
])  # fmt: skip
def test_contracts_that_do_not_fit_are_refused(old, new, match):
    assert old in SHARED
    with pytest.raises(InputError, match=match):
        parse_study(SHARED.replace(old, new).encode())


def test_a_policy_decides_whom_the_site_trusts(tmp_path):
    (tmp_path / "policy.toml").write_text(POLICY.replace('derivatives = "own"', 'derivatives = "noisy-summed"'))
    policy = read_policy(tmp_path / "policy.toml")
    policy.check("north", parse_study(SHARED.encode()), 12)
    with pytest.raises(Refused, match="POLICY_COLLUDING"):
        policy.check("north", parse_study(SHARED.replace("colluding = 1", "colluding = 0").encode()), 12)
    (tmp_path / "policy.toml").write_text(POLICY.replace('derivatives = "own"', 'derivatives = "noisy"'))
    with pytest.raises(Refused, match="POLICY_DERIVATIVES"):
        read_policy(tmp_path / "policy.toml").check("north", parse_study(SHARED.encode()), 12)


def test_a_site_that_is_started_again_goes_on_with_the_same_masks_and_noise(folder, tmp_path):
    run = b"s" * 16
    made = agents(folder, tmp_path, run)
    first = {name: ask(agent, wire.Derive(run, 3, X)) for name, agent in made.items()}
    north = made["north"]
    north.log.close()
    north.site.budget.open()[0].close()
    made["north"] = open_agent(
        folder.study, "north", folder.data["north"], store=tmp_path / "north", ledger=tmp_path / "north.db",
        credentials=read_credentials(folder.keys("north")),
    )  # fmt: skip
    np.testing.assert_array_equal(ask(made["north"], wire.Derive(run, 3, X)).words, first["north"].words)
    second = [ask(agent, wire.Derive(run, 4, X)) for agent in made.values()]
    terms = ShareTerms(4, COLLUDING, 1, *second[0].noise[:2].tolist())
    gradient, _ = from_sum(added(*map(numbers, second)), terms, 3)
    truth = sum(true_values(agent) for agent in made.values())
    assert np.all(np.abs(gradient - truth[:3]) < 6 * terms.total_sd[0])
    for agent in made.values():
        agent.log.close()


# in one process ----------------------------------------------------------------------------------------------------


def hospitals(path, sites=4, records=2000, **terms):
    rng, found = np.random.default_rng(3), []
    for m in range(sites):
        covariates = rng.normal(size=(records, 2))
        covariates /= np.maximum(1.0, np.linalg.norm(covariates, axis=1, keepdims=True))
        y = rng.random(records) < 1 / (1 + np.exp(-covariates @ [0.8, -0.5]))
        own = {"epsilon": 4.0, "delta": 1e-5, "bounds": fp.Bounds(norm=1.0), "colluding": 1} | terms
        budget = fp.Budget(ledger=a_ledger(path / f"{m}.db"), **own)
        found.append(fp.Site(fp.models.logistic(covariates, y), name=f"site {m}", budget=budget))
    return found


def spent(site):
    return site.budget.open()[0].spent(site.budget.account_name)


def test_in_one_process_the_noise_of_the_sum_is_smaller(tmp_path):
    sites = hospitals(tmp_path)
    post = fp.sample(sites, fp.models.normal_prior(2), seed=1, progress=False)
    assert "shared by 4 sites" in post.settings["chosen"]
    assert all(report["spent"] == pytest.approx(1.0, abs=1e-6) for report in post.privacy.values())
    again = fp.sample(sites, fp.models.normal_prior(2), seed=1, progress=False)
    np.testing.assert_array_equal(post.draws(20), again.draws(20))
    with pytest.raises(BudgetSpent):
        fp.sample(sites, fp.models.normal_prior(2, mean=0.1), seed=1, progress=False)


def test_sites_of_different_totals_share_the_noise_of_what_the_study_was_granted(tmp_path):
    sites = hospitals(tmp_path, sites=3, granted=(2.0, 1e-5))
    (tmp_path / "b").mkdir()
    wide = hospitals(tmp_path / "b", sites=4, epsilon=9.0, granted=(2.0, 1e-5))[3]
    post = fp.sample([*sites, wide], fp.models.normal_prior(2), seed=1, progress=False)
    for site in (*sites, wide):
        limit = site.budget.study_limit(site.budget.open()[1], releases_only=True)
        assert spent(site) == pytest.approx(limit, rel=1e-6) and spent(site) <= limit
    shares = {name: report["spent"] for name, report in post.privacy.items()}
    assert 0 < shares["site 3"] < shares["site 0"] < 1


def test_noise_is_never_used_in_two_sums(tmp_path):
    """If another site's records change between two sums, the same noise twice would cancel in their difference."""
    before = hospitals(tmp_path, release=0.3)
    name = run_name(before, b"question")
    changed = hospitals(tmp_path, release=0.3)
    changed[3] = fp.Site(fp.models.logistic(*_other(2000)), name="site 3", budget=changed[3].budget)
    assert run_name(before, b"question") == name != run_name(changed, b"question")
    assert run_name(before, b"another") != name


def _other(records):
    rng = np.random.default_rng(9)
    covariates = rng.uniform(-0.5, 0.5, size=(records, 2))
    return covariates, rng.random(records) < 0.5


def test_bad_input_is_refused_and_charges_nothing(tmp_path):
    prior = fp.models.normal_prior(2)
    with pytest.raises(InputError, match="colluding"):
        fp.Budget(1.0, 1e-5, colluding=-1)
    sites = hospitals(tmp_path, sites=2)
    with pytest.raises(InputError, match="At least 2 must be honest"):
        fp.sample(sites, prior, progress=False)
    three = hospitals(tmp_path, sites=4)
    (tmp_path / "b").mkdir()
    other = hospitals(tmp_path / "b", sites=4, epsilon=3.0)
    with pytest.raises(InputError, match="different sizes"):
        fp.sample([*three[:3], other[3]], prior, progress=False)
    local = fp.Site(three[3].potential, name="local", budget=three[3].budget, coordinates=[1, 0])
    with pytest.raises(InputError, match="coordinates"):
        fp.sample([*three[:3], local], prior, progress=False)
    assert all(spent(site) == 0.0 for site in [*three, *other])


def test_shares_make_up_the_noise_of_the_honest_sites_and_sum_as_gaussians():
    """Integers of many shares: the honest sum has the law of one discrete Gaussian of full width."""
    parties, colluding, sigma = 5, 2, 1.5
    sd = share(sigma, parties, colluding)
    terms = ShareTerms(parties, colluding, 0, sd, 0.0)
    values, zero = np.linspace(-1, 1, 500), np.zeros((1, 1))
    parts = [noisy_share(values, zero, terms, b"%d" % k) for k in range(parties)]
    honest = [sum(column) for column in zip(*parts[colluding:], strict=True)]
    noise = np.array([k * terms.grids[0] for k in honest[:-1]]) - (parties - colluding) * values
    assert stats.kstest(noise / sigma, "norm").pvalue > 1e-3
    assert abs(np.var(noise) / sigma**2 - 1) < 4 * np.sqrt(2 / len(noise))
    two = np.array([sum(column) * terms.grids[0] for column in zip(*parts[3:], strict=True)][:-1]) - 2 * values
    assert np.var(two) / sigma**2 < 1 - 4 / 3 * np.sqrt(2 / len(noise))
    gradient, _ = from_sum([sum(column) for column in zip(*parts, strict=True)], terms, 500)
    assert np.std(gradient - parties * values) == pytest.approx(terms.total_sd[0], rel=0.15)
    with pytest.raises(ValueError, match="finite"):
        noisy_share(np.array([np.nan]), zero, terms, b"")


def test_the_charge_is_that_of_noise_in_full():
    """δ(ε) of all steps with the noise of the honest sites is what was granted, and of fewer it is more."""
    mu = sum(1 / n**2 for step in range(4) for n in needed(step)) ** 0.5
    assert gaussian_epsilon(mu, DELTA) == pytest.approx(EPSILON, rel=1e-6)
    assert gaussian_delta(EPSILON, mu * np.sqrt(3 / 2)) > 20 * DELTA
