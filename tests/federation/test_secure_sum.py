"""Secure sums: the coordinator learns the sum of the sites' derivatives and nothing of any one of them."""

import dataclasses
from fractions import Fraction

import msgspec
import numpy as np
import pytest
from tests.federation.proxy import Proxy
from tests.federation.rounds import assert_same_path, of_chain
from tests.federation.studies import SUMMED, Folder, same_bits

import fedpdmc as fp
from fedpdmc._jax.precision import double_precision
from fedpdmc.certificates import make_keys, read_credentials, revoke, sign
from fedpdmc.errors import InputError, Refused, RequestRefused
from fedpdmc.federation import masking
from fedpdmc.federation import messages as wire
from fedpdmc.federation.site_agent.audit_replay import replay
from fedpdmc.operations.serve import serve_site
from fedpdmc.study import read_policy

RUN = b"r" * 16
NAMES = ("a", "b", "c", "d")


def parties(names=NAMES):
    """Keys of every pair."""
    secrets = {name: masking.new_secret() for name in names}
    publics = {name: masking.public_of(secret) for name, secret in secrets.items()}
    return {name: masking.pair_keys(secrets[name], name, RUN, publics) for name in names}


def test_the_sum_is_exact_to_the_rounding_of_its_terms():
    rng = np.random.default_rng(1)
    values = {name: rng.normal(size=12) * 10.0 ** np.arange(-9, 15, 2) for name in NAMES}
    masked = [masking.mask(values[name], name, keys, b"request") for name, keys in parties().items()]
    for k, found in enumerate(masking.total(masked)):
        exact = sum(Fraction(float(values[name][k])) for name in NAMES)
        rounded = sum(Fraction(masking.fixed(float(values[name][k]), 4), 2**64) for name in NAMES)
        assert found == float(rounded)
        assert abs(rounded - exact) <= Fraction(len(NAMES), 2**65)


def test_what_is_packed_comes_back():
    hessian = np.array([[1.0, 2.0], [2.0, 5.0]])
    gradient, back = masking.unpacked(masking.packed(np.array([4.0, 6.0]), hessian), 2)
    assert masking.size(2) == 5
    np.testing.assert_array_equal(gradient, [4.0, 6.0])
    np.testing.assert_array_equal(back, hessian)


def test_one_message_and_any_sum_short_of_one_look_uniform():
    """Bits of masked zeros: each is a fair coin, and two requests have nothing in common."""
    keys, zeros = parties(), np.zeros(2000)

    def bits(request, names):
        messages = [masking.numbers(masking.mask(zeros, name, keys[name], request).tobytes()) for name in names]
        return np.asarray([sum(column) % 2**128 for column in zip(*messages, strict=True)], dtype=object)

    def ones(numbers):
        return np.asarray([[int(n) >> k & 1 for k in range(128)] for n in numbers], dtype=float)

    for names in (("a",), ("a", "b", "c")):
        first, second = ones(bits(b"one", names)), ones(bits(b"two", names))
        deviation = 0.5 / np.sqrt(len(zeros))
        assert np.abs(first.mean(0) - 0.5).max() < 5 * deviation
        assert np.abs((first * second).mean(0) - 0.25).max() < 5 * deviation
    # The check can fail: with everyone's message nothing is left but zeros.
    assert not ones(bits(b"one", NAMES)).any()


def test_numbers_beyond_the_range_are_refused():
    keys = parties()["a"]
    assert masking.fixed(2.0**60, 4) == 2**124
    for value in (2.0**61, -(2.0**61), np.inf, np.nan):
        with pytest.raises(RequestRefused, match="not below"):
            masking.mask(np.asarray([value]), "a", keys, b"")


# sites -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return Folder(tmp_path_factory.mktemp("summed"), SUMMED)


@pytest.fixture
def agents(folder, tmp_path):
    agents = {name: folder.agent(name, tmp_path / name) for name in folder.study.sites}
    for agent in agents.values():
        agent.join(wire.encode(wire.Welcome(RUN, folder.study.digest)))
    yield agents
    for agent in agents.values():
        agent.log.close()


def ask(agent, message):
    return wire.decode(agent.answer(wire.encode(message)))


def offers(agents):
    return tuple(agent.answer(wire.encode(wire.Offer(RUN, 1))) for agent in agents.values())


@double_precision
def true_sum(agents, x):
    parts = [agent.site.derivatives(x) for agent in agents.values()]
    return [sum(part[k] for part in parts) for k in range(3)]


def test_only_the_sum_can_be_read(agents):
    x = np.array([0.1, -0.2, 0.3])
    assert ask(agents["north"], wire.Derive(RUN, 1, x)).code == "NOT_AGREED"
    agreement = wire.Agree(RUN, 2, offers(agents))
    assert all(isinstance(ask(agent, agreement), wire.Opened) for agent in agents.values())
    # Two sites asked at different points: what they say does not add up to anything.
    other = [ask(agent, wire.Derive(RUN, 3, x + 0.1 * (k + 1))) for k, agent in enumerate(agents.values())]
    assert abs(masking.total([message.words for message in other])[0]) > 1e9
    rounds = [[ask(agent, wire.Derive(RUN, n, x)) for agent in agents.values()] for n in (4, 5)]
    for messages in rounds:
        gradient, hessian = masking.unpacked(masking.total([message.words for message in messages]), 3)
        _, true_gradient, true_hessian = true_sum(agents, x)
        size = np.sqrt(np.diag(true_hessian))
        assert np.all(np.abs(hessian - true_hessian) < 0.1 * np.outer(size, size))
        assert np.all(np.abs(gradient - true_gradient) < 0.1 * len(agents) * size)
    # The same point asked again, under the same number or another: the same answer, so that nothing cancels.
    np.testing.assert_array_equal(rounds[0][0].words, rounds[1][0].words)
    again = ask(agents["north"], wire.Derive(RUN, 4, x))
    np.testing.assert_array_equal(again.words, rounds[0][0].words)
    assert ask(agents["north"], agreement.__class__(RUN, 6, agreement.offers)).code == "ALREADY_AGREED"
    control = {"order": 2, "precision": np.eye(3), "linear": np.ones(3), "point": x}
    opening = wire.Open(RUN, 6, 4, 1, x, np.eye(3), **control)
    assert ask(agents["north"], opening).code == "NOT_IN_CONTRACT"
    assert isinstance(
        ask(agents["north"], dataclasses.replace(opening, precision=np.zeros((0, 0)), linear=np.zeros(0))), wire.Opened
    )


def signed(credentials, digest, name, public):
    said = masking.statement(RUN, digest, name, public)
    return wire.encode(wire.Offered(RUN, 1, bytes(32), public, credentials.certificate, sign(credentials, said)))


def meddled(folder, tmp_path, honest, who):
    """What a coordinator in the middle might send north in place of south's offer."""
    south, public = wire.decode(honest[1]), masking.public_of(masking.new_secret())
    digest = folder.study.digest

    def own(name):
        return read_credentials(folder.keys(name))

    make_keys(tmp_path / "foreign", ["south"])
    return {
        "another key": lambda: wire.encode(dataclasses.replace(south, public=public)),
        "of low order": lambda: signed(own("south"), digest, "south", bytes(32)),
        "signed by the coordinator": lambda: signed(own("coordinator"), digest, "south", public),
        "signed by another site": lambda: signed(own("west"), digest, "south", public),
        "another authority": lambda: signed(
            read_credentials(tmp_path / "foreign" / "sites" / "south"), digest, "south", public
        ),
        "of another study": lambda: signed(own("south"), bytes(32), "south", public),
        "the site's own key": lambda: signed(
            own("south"), digest, "south", wire.decode(honest[0]).public
        ),
        "no offer": lambda: b"",
    }[who]()  # fmt: skip


@pytest.mark.parametrize(
    "who",
    [
        "another key", "of low order", "signed by the coordinator", "signed by another site", "another authority",
        "of another study", "the site's own key", "no offer",
    ],
)  # fmt: skip
def test_a_key_that_is_not_the_sites_own_is_refused(folder, agents, tmp_path, who, caplog):
    honest = offers(agents)
    bad = (honest[0], meddled(folder, tmp_path, honest, who), honest[2])
    assert ask(agents["north"], wire.Agree(RUN, 2, bad)).code == "KEY_NOT_PROVED"
    assert any("secure sums" in record.message for record in caplog.records)
    assert ask(agents["north"], wire.Derive(RUN, 2, np.zeros(3))).code == "NOT_AGREED"


def test_a_site_left_out_or_changed_about_is_refused(agents):
    honest = offers(agents)
    for some in (honest[:2], honest[::-1], (*honest, honest[2]), (honest[0], honest[1], honest[1])):
        assert ask(agents["north"], wire.Agree(RUN, 2, some)).code == "KEY_NOT_PROVED"
    assert isinstance(ask(agents["north"], wire.Agree(RUN, 2, honest)), wire.Opened)


def test_certificates_can_be_pinned_or_revoked_at_the_site(folder, agents, tmp_path):
    """Even an authority in the coordinator's hands cannot pass another certificate for south's then."""
    honest = offers(agents)
    agents["north"].computation.party.certificates["south"] = "0" * 64
    assert ask(agents["north"], wire.Agree(RUN, 2, honest)).code == "KEY_NOT_PROVED"
    agents["north"].computation.party.certificates.clear()
    make_keys(tmp_path / "keys", ["north"])
    own = read_credentials(folder.keys("north"))
    shut = read_credentials(tmp_path / "keys" / "sites" / "north").revoked
    agents["north"].computation.party.credentials = own._replace(revoked=shut)
    from fedpdmc.certificates import fingerprint

    revoke(tmp_path / "keys" / "sites" / "north", [fingerprint(read_credentials(folder.keys("south")).certificate)])
    assert ask(agents["north"], wire.Agree(RUN, 2, honest)).code == "KEY_NOT_PROVED"


# whole runs --------------------------------------------------------------------------------------------------------


def test_few_rounds_with_own_or_summed_derivatives_are_one_run_here_or_on_a_bad_network(folder, tmp_path, monkeypatch):
    # The digits of each site are not known of a sum, and the reference is widened by what rounding does not explain.
    monkeypatch.setattr("fedpdmc.sampling.vb_reference._rounding", lambda *of: 0.05)
    seeds = dict.fromkeys(folder.study.sites, 5)
    with fp.connect(folder.study, data=folder.data, seed=3, site_seeds=seeds, store=tmp_path / "run") as connection:
        post = fp.sample(connection, progress=False)
    others = Folder(tmp_path / "own", SUMMED.replace('"summed"', '"own"'))
    own = others.in_process()
    with others.listening() as connection, others.sites(connection):
        assert same_bits(fp.sample(connection, progress=False), own)
    assert own.rounds < 30
    np.testing.assert_allclose(post.reference.center, own.reference.center, rtol=0, atol=1e-13)
    np.testing.assert_allclose(post.reference.scale_tril, own.reference.scale_tril, rtol=0, atol=1e-13)
    for chain in range(post.chains):
        assert_same_path(of_chain(post.skeleton, chain), of_chain(own.skeleton, chain), atol=1e-8)
    assert post.rounds == own.rounds + 3
    np.testing.assert_array_equal(post.messages, 2 * post.rounds)
    agents = {name: folder.agent(name, tmp_path / name) for name in folder.study.sites}
    with folder.listening() as connection, Proxy(connection.address, cut_after=5000) as proxy:
        with folder.sites(connection, agents, proxy.address):
            networked = fp.sample(connection, progress=False)
    assert proxy.cuts > 0
    assert same_bits(networked, post)
    for name in folder.study.sites:
        found = replay(folder.study, name, folder.data[name], store=tmp_path / name)
        assert found.same > 5 and not found.different and sum(found.unchecked.values()) == 2
    assert replay(folder.study, "north", folder.data["south"], store=tmp_path / "north").different
    # Killed after the agreement, the site masks what comes next as it would have.
    with fp.connect(folder.study, data=folder.data, site_seeds=seeds, store=tmp_path / "run") as connection:
        longer = fp.sample(connection, duration=7.0, progress=False)
    assert longer.duration == 7.0


def test_sums_need_keys_and_the_sites_consent(folder, tmp_path):
    policy = read_policy(folder.path / "policy.toml")
    with pytest.raises(InputError, match="folder of keys"):
        serve_site(
            folder.study, "north", folder.data["north"], coordinator="127.0.0.1:1", keys=None, store=tmp_path,
            policy=policy,
        )  # fmt: skip
    with pytest.raises(Refused, match="POLICY_DERIVATIVES"):
        msgspec.structs.replace(policy, derivatives="none").check("north", folder.study, 12)
    msgspec.structs.replace(policy, derivatives="summed").check("north", folder.study, 12)
