"""The opening of a run under kills at any moment, and runs that outlive an upgrade: nothing is released or counted twice."""

import contextlib
import itertools

import numpy as np
import pytest
from tests.federation.processes import Parties
from tests.federation.requests import RUN, ask, joined
from tests.federation.studies import FEW_ROUNDS, SEED, SITE_SEED, SUMMED, Folder, same_bits
from tests.study.contracts import POLICY

import fedpdmc as fp
from fedpdmc.certificates import read_credentials
from fedpdmc.errors import InputError, Refused
from fedpdmc.federation import messages
from fedpdmc.federation.answer_checks import check_answer
from fedpdmc.federation.coordinator_store import OpeningJournal
from fedpdmc.federation.grpc import tls
from fedpdmc.federation.grpc.client import inquire
from fedpdmc.federation.remote import RemoteFederation
from fedpdmc.federation.site_agent.audit_log import Kind, read_log
from fedpdmc.federation.site_agent.derivative_disclosure import ReleasePlace
from fedpdmc.federation.site_agent.start import open_agent
from fedpdmc.study import read_policy


class Killed(BaseException):
    """The plug was pulled."""


@pytest.fixture(scope="module", params=[FEW_ROUNDS, SUMMED], ids=["own", "summed"])
def study(tmp_path_factory, request):
    folder = Folder(tmp_path_factory.mktemp("study"), request.param)
    with folder.connected(folder.path / "uninterrupted") as connection:
        post = fp.sample(connection, progress=False)
        counts = [(agent.log.answers, agent.computation.progress.points) for agent in connection.transport.agents]
    return folder, post, counts


def killed(connection, moment):
    """Pull the plug at a moment of the process: before, in the middle of, or after a round, or as the store is written."""
    left, transport, write = iter(range(moment)), connection.transport, connection.checkpoint.write

    def step():
        if next(left, None) is None:
            raise Killed

    def asked(requests):
        step()
        answers = []
        for agent, request in zip(transport.agents, requests, strict=True):
            answers.append(None if request is None else agent.answer(request.data))
            step()
        return answers

    def written(*state):
        step()
        write(*state)

    transport.ask, connection.checkpoint.write = asked, written
    with pytest.raises(Killed):
        fp.sample(connection, progress=False)


def test_twenty_kills_in_the_opening_cost_nothing(study, tmp_path):
    """Coordinator and sites together, each time a little later than the last. Every process opens all stores anew."""
    folder, post, counts = study
    store = tmp_path / "run"
    for kill in range(20):
        with folder.connected(store) as connection:
            killed(connection, kill % 7)
            progress = [agent.computation.progress for agent in connection.transport.agents]
            assert all(one.points <= points for one, (_, points) in zip(progress, counts, strict=True))
    with folder.connected(store) as connection:
        again = fp.sample(connection, progress=False)
        told = [(agent.log.answers, agent.computation.progress.points) for agent in connection.transport.agents]
    assert same_bits(again, post) and told == counts
    for name in folder.study.sites:
        assert not any(entry.kind is Kind.REFUSAL for entry in read_log(store / "sites" / name))


def forget(self):
    """A coordinator that begins the search anew after a kill, with new numbers of requests."""
    self._point, self._agreed, self.journal = None, False, OpeningJournal()


@pytest.mark.parametrize("idempotent", [True, False])
def test_a_search_that_begins_anew_uses_up_no_limit(tmp_path, monkeypatch, idempotent):
    """The control: sites that count every request refuse after the third kill, for ever."""
    folder = Folder(tmp_path / "study", FEW_ROUNDS)
    monkeypatch.setattr(RemoteFederation, "rewind", forget)
    if not idempotent:
        monkeypatch.setattr(ReleasePlace, "same", lambda self, other: False)
    with folder.connected(tmp_path / "run") as connection:
        agents, whole = connection.transport.agents, connection.transport.ask
        for kill in range(20 if idempotent else 4):
            left = iter(range(4))

            def ask(requests, left=left):
                if next(left, None) is None:
                    raise Killed
                return whole(requests)

            connection.transport.ask = ask
            end = pytest.raises(Killed) if idempotent or kill < 3 else contextlib.nullcontext()
            with end:
                if idempotent or kill < 3:
                    fp.sample(connection, progress=False)
        connection.transport.ask = whole
        if idempotent:
            fp.sample(connection, progress=False)
            assert agents[0].computation.progress.points == 4
        else:
            with pytest.raises(Refused, match="TOO_MANY_DERIVATIVES"):
                fp.sample(connection, progress=False)


def test_a_call_that_was_interrupted_goes_on_in_the_same_connection(study, tmp_path):
    folder, post, _ = study
    for store, rounds in itertools.product((None, tmp_path / "run"), (2, 9)):
        with folder.connected(store and store / str(rounds)) as connection:
            ask, left = connection.transport.ask, iter(range(rounds))

            def interrupted(requests, ask=ask, left=left):
                if next(left, None) is None:
                    raise Killed
                return ask(requests)

            connection.transport.ask = interrupted
            with pytest.raises(Killed):
                fp.sample(connection, progress=False)
            connection.transport.ask = ask
            assert same_bits(fp.sample(connection, progress=False), post)


def derive(sequence, x, **more):
    return messages.encode(messages.Derive(RUN, sequence, np.asarray(x), **more))


def test_the_same_point_gets_the_stored_release_under_any_number(few_rounds, tmp_path):
    agent = joined(few_rounds, tmp_path)
    points = ([0.1, -0.2, 0.3], [0.2, 0.1, 0.0])
    first, _ = (ask(agent, derive(number, x)) for number, x in enumerate(points, 1))
    agent.log.close()
    # The agent was killed and started again: the release is in its log.
    agent = joined(few_rounds, tmp_path)
    agent.site = agent.computation.site = None
    again = ask(agent, derive(3, points[0]))
    assert (again.sequence, again.request) == (3, messages.digest(derive(3, points[0])))
    assert again.value == first.value and agent.computation.progress.points == 2
    np.testing.assert_array_equal(again.hessian, first.hessian)
    agent.log.close()
    agent = joined(few_rounds, tmp_path)
    assert agent.computation.progress.points == 2 and agent.log.answers == 3
    agent.log.close()


def test_a_declined_point_counts_once(tmp_path):
    folder = Folder(tmp_path / "study", FEW_ROUNDS)
    (tmp_path / "policy.toml").write_text(POLICY.replace("least_records = 2", "least_records = 11"))
    policy = read_policy(tmp_path / "policy.toml")

    def opened():
        agent = open_agent(
            folder.study, "north", folder.data["north"], store=tmp_path / "store", seed=1, policy=policy,
            credentials=read_credentials(folder.keys("north")),
        )  # fmt: skip
        agent.join(messages.encode(messages.Welcome(RUN, folder.study.digest)))
        return agent

    for _ in range(3):
        agent = opened()
        for _ in range(3):
            assert ask(agent, derive(1, [0.1, 0.1, 0.1])).code == "FEW_RECORDS"
        assert agent.computation.progress.points == 1
        agent.log.close()
    agent = opened()
    assert ask(agent, derive(1, [0.2, 0.1, 0.1])).code == "FEW_RECORDS" and agent.computation.progress.points == 2
    agent.log.close()


def test_an_opening_that_is_computed_otherwise_is_named_before_a_site_is_asked(study, tmp_path, monkeypatch):
    """As on a machine that rounds otherwise: sites would refuse a round that they have answered."""
    folder, off = study[0], 1e-13
    with folder.connected(tmp_path / "run") as connection:
        killed(connection, 25)
    name = "derivatives" if folder.contract == FEW_ROUNDS else "sums"
    exact = getattr(RemoteFederation, name)
    monkeypatch.setattr(RemoteFederation, name, lambda self, x, *more: exact(self, x * (1 + off), *more))
    with folder.connected(tmp_path / "run") as connection:
        connection.transport.ask = None
        with pytest.raises(InputError, match="request . this software computes otherwise.*version"):
            fp.sample(connection, progress=False)


def test_a_run_of_a_version_with_another_meaning_is_named_before_any_site_is_called(zigzag, tmp_path):
    before = messages.VERSION - 1
    assert before in messages.READABLE and before < messages.MEANING
    with zigzag.connected(tmp_path / "plans") as connection:
        connection.identity["wire"] = before
        killed(connection, 100)
    with pytest.raises(InputError, match=f"wire version {before}.*Finish it with the version of fedpdmc that began it"):
        fp.connect(zigzag.study, listen="nowhere:0", keys=zigzag.keys("coordinator"), store=tmp_path / "plans")


def test_other_versions_are_named_on_both_sides_with_the_remedy(zigzag, tmp_path, monkeypatch):
    here = messages.VERSION
    own = read_credentials(zigzag.keys("north"))
    hello = messages.Hello("north", zigzag.study.digest, "fedpdmc 0.0.1")
    newer = bytearray(messages.encode(hello))
    newer[4] = here + 3
    with zigzag.listening() as connection:
        for data in (messages.encode(hello, here - 1), bytes(newer)):
            assert inquire(connection.address, own, data, "coordinator", 20.0).code == f"VERSION_{here}"
        # The same at a coordinator of a later version, as this site sees it.
        monkeypatch.setattr(tls, "refuse_version", lambda: f"VERSION_{here + 2}")
        with pytest.raises(InputError, match=f"VERSION.*wire version {here + 2}, this one {here} .*Install the same"):
            inquire(connection.address, own, bytes(newer), "coordinator", 20.0)
    agent = joined(zigzag, tmp_path / "agent")
    # A coordinator of the last version, which refused every other one as malformed; one of the next; its requests.
    refusal = messages.Refusal(bytes(16), 0, messages.NOTHING_ASKED, "MALFORMED", 0)
    with pytest.raises(Refused, match=rf"code VERSION\).*wire version {here - 1}, this one {here} .*began"):
        agent.join(messages.encode(refusal, here - 1))
    refusal = messages.Refusal(bytes(16), 0, messages.NOTHING_ASKED, f"VERSION_{here + 1}", 0)
    with pytest.raises(Refused, match=rf"code VERSION\).*wire version {here + 1}, this one {here} .*both sides and"):
        agent.join(messages.encode(refusal))
    with pytest.raises(Refused, match="MALFORMED"):
        agent.join(messages.encode(messages.Refusal(bytes(16), 0, messages.NOTHING_ASKED, "MALFORMED", 0)))
    with pytest.raises(Refused, match=rf"code VERSION\).*wire version {here + 3}, this one {here} "):
        agent.join(bytes(newer))
    assert ask(agent, bytes(newer)).code == f"VERSION_{here}"
    agent.log.close()
    # What the coordinator makes of a site's refusal, and of an answer that it cannot read.
    refusal = messages.encode(messages.Refusal(RUN, 1, messages.NOTHING_ASKED, f"VERSION_{here + 1}", 0))
    for data in (refusal, refusal[:4] + bytes([here + 1]) + refusal[5:]):
        with pytest.raises(
            Refused, match=rf"'north' refused \(code VERSION\).*wire version {here + 1}, this one {here} "
        ):
            check_answer("north", data, messages.Opened, (RUN, 1, messages.NOTHING_ASKED))


@pytest.mark.long
def test_twenty_kills_of_processes_in_the_opening(tmp_path):
    """SIGKILL as soon as the first site has answered one more request; every other time the site as well."""
    folder = Folder(tmp_path / "study", FEW_ROUNDS)
    parties = Parties(folder, (SEED, SITE_SEED))
    parties.start_all()

    def requests():
        path = parties.store("north") / "audit.log"
        # The site may be about to write its first bytes.
        return sum(entry.kind is Kind.REQUEST for entry in read_log(path.parent)) if begun(path) else 0

    def begun(path):
        return path.exists() and path.stat().st_size > 0

    try:
        for kill in range(20):
            parties.wait_for(lambda kill=kill: requests() > min(kill // 4, 4))
            for name in ("coordinator", "north")[: 1 + kill % 2]:
                parties.kill(name)
                parties.start(name)
        parties.finish()
    finally:
        parties.stop()
    post = fp.load(parties.store("coordinator") / "posterior.zarr")
    with folder.connected() as connection:
        assert same_bits(post, fp.sample(connection, progress=False))
        points = connection.transport.agents[0].computation.progress.points
    answers = [
        messages.decode(entry.payload) for entry in read_log(parties.store("north")) if entry.kind is Kind.ANSWER
    ]
    assert sum(isinstance(one, messages.Derivatives) for one in answers) == points
