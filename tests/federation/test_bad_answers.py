"""Sites that send wrong answers, and coordinators that send wrong requests."""

import dataclasses
import re
import threading

import numpy as np
import pytest
from tests.federation.requests import CHAINS, DIM, opening, plans
from tests.federation.studies import FEW_ROUNDS, SEED, Folder

import fedpdmc as fp
import fedpdmc.certificates
from fedpdmc.certificates import read_credentials
from fedpdmc.errors import BadAnswer, Refused, RequestRefused
from fedpdmc.federation import messages as wire
from fedpdmc.federation import transport
from fedpdmc.federation.grpc.client import serve
from fedpdmc.federation.site_agent.agent import MOST_REFUSALS
from fedpdmc.federation.transport import Request


def altered(agent, change):
    """The agent with its answers to plans changed on their way out."""
    answer = agent.answer

    def changed(data):
        return change(answer(data), data)

    agent.answer = changed
    return agent


def rewrite(**fields):
    def change(data, request):
        message = wire.decode(data)
        if not isinstance(message, wire.Arrivals):
            return data
        values = {name: getattr(message, name) for name in message.__dataclass_fields__}
        return wire.encode(wire.Arrivals(**{**values, **{name: make(message) for name, make in fields.items()}}))

    return change


def everywhere(coordinate=0):
    """An arrival at once on every chain."""
    return rewrite(
        time=lambda m: np.zeros(len(m.rang)),
        rang=lambda m: np.ones(len(m.rang)),
        coordinate=lambda m: np.full(len(m.rang), coordinate),
        velocity=lambda m: np.zeros((0, 3)),
    )


def opened(data, request):
    message = wire.decode(data)
    return wire.encode(wire.Opened(message.run, message.sequence, message.request))


def budgeted(data, request):
    """A privacy budget that nobody has asked for."""
    message = wire.decode(data)
    if not isinstance(message, wire.Opened):
        return data
    return wire.encode(dataclasses.replace(message, remaining=5.0, account=np.arange(13.0)))


BAD = {
    "budget": budgeted,
    "garbage": lambda data, request: b"\x00" * 40,
    "truncated": lambda data, request: data[:-3],
    "nan": rewrite(time=lambda m: np.full_like(m.time, np.nan)),
    "late": rewrite(time=lambda m: m.time + 1e3),
    "no coordinate": everywhere(coordinate=7),
    "chains": rewrite(time=lambda m: m.time[:0], rang=lambda m: m.rang[:0], coordinate=lambda m: m.coordinate[:0]),
    "velocities": rewrite(
        coordinate=lambda m: m.coordinate[:0], velocity=lambda m: np.eye(3)[np.zeros(len(m.time), int)]
    ),
    "at once": everywhere(),
    "other kind": lambda data, request: opened(data, request) if wire.decode(request).kind == 7 else data,
    "other round": rewrite(sequence=lambda m: m.sequence + 1),
}


@pytest.mark.parametrize("change", BAD.values(), ids=BAD)
def test_a_bad_answer_stops_the_run_and_names_the_site(folder, fresh, change):
    agents = fresh()
    altered(agents["south"], change)
    with folder.listening() as connection, folder.sites(connection, agents):
        with pytest.raises(BadAnswer) as error:
            fp.sample(connection, progress=False)
    assert error.value.site == "south"


@pytest.mark.parametrize("change", [lambda h: h * 1e200, lambda h: h + np.triu(np.ones_like(h), 1)])
def test_a_hessian_that_cannot_be_one_stops_the_run_and_names_the_site(tmp_path, change):
    few = Folder(tmp_path, FEW_ROUNDS)

    def changed(data, request):
        message = wire.decode(data)
        if not isinstance(message, wire.Derivatives):
            return data
        return wire.encode(dataclasses.replace(message, hessian=change(message.hessian)))

    with fp.connect(few.study, data=few.data, seed=SEED) as connection:
        altered(connection.transport.agents[1], changed)
        with pytest.raises(BadAnswer, match="'south': a Hessian"):
            fp.sample(connection, progress=False)


def test_a_refusal_reaches_the_coordinator_with_its_code(folder, fresh):
    agents = fresh()
    object.__setattr__(agents["south"].study, "rounds", 5)
    try:
        with folder.listening() as connection, folder.sites(connection, agents):
            with pytest.raises(Refused, match="'south' refused .*TOO_MANY_ROUNDS|'north' refused .*TOO_MANY_ROUNDS"):
                fp.sample(connection, progress=False)
    finally:
        object.__setattr__(folder.study, "rounds", 2000)


@pytest.mark.parametrize("waits", [False, True])
def test_a_refusal_ends_the_run_at_once_though_another_site_is_away(folder, fresh, monkeypatch, waits):
    """North refuses and south never dials. The control: a coordinator that collects all answers first waits for ever."""
    agents = fresh()
    agents.pop("south").log.close()
    monkeypatch.setattr(agents["north"].computation, "check", refuse)
    if waits:
        monkeypatch.setattr(transport, "claimed_kind", lambda data: "none")
    ends = []

    def run(connection):
        with pytest.raises(Refused, match="'north' refused .code FEW_RECORDS.. Too few .* policy") as error:
            fp.sample(connection, progress=False)
        ends.append(error.value.code)

    with folder.listening() as connection, folder.sites(connection, agents):
        worker = threading.Thread(target=run, args=(connection,), daemon=True)
        worker.start()
        worker.join(3.0 if waits else 30.0)
        assert ends == ([] if waits else ["FEW_RECORDS"])


def refuse(message):
    raise RequestRefused("FEW_RECORDS")


def test_a_site_whose_store_is_of_another_run_is_named(folder, fresh):
    """It leaves after the welcome: the coordinator does not wait for it, but says what to do."""
    agents, ends = fresh(), []
    south = agents.pop("south")
    south.join(wire.encode(wire.Welcome(b"o" * 16, folder.study.digest)))

    def run(address):
        try:
            serve(south, address, read_credentials(folder.keys("south")))
        except Refused as error:
            ends.append(error.code)

    with folder.listening() as connection, folder.sites(connection, agents):
        worker = threading.Thread(target=run, args=(connection.address,), daemon=True)
        worker.start()
        with pytest.raises(
            Refused, match="'south' refused .code OTHER_RUN.. The site's store belongs to another run.*new"
        ):
            fp.sample(connection, progress=False)
        worker.join(20)
    south.log.close()
    assert ends == ["OTHER_RUN"]


def test_a_site_stops_a_coordinator_that_asks_nothing_but_what_it_may_not(folder, fresh):
    """It ends with a sentence that says what to do, and the coordinator is told why."""
    agents, ends = fresh(), []
    south = agents.pop("south")

    def run(address):
        try:
            serve(south, address, read_credentials(folder.keys("south")), stop.wait)
        except Refused as error:
            ends.append(str(error))

    stop = threading.Event()
    with folder.listening() as connection:
        assert re.fullmatch(r"north waiting for \d+ s, south waiting for \d+ s", connection.transport.status())
        worker = threading.Thread(target=run, args=(connection.address,), daemon=True)
        worker.start()
        for k in range(MOST_REFUSALS):
            _, data = connection.transport._exchange([None, Request(b"no request %d" % k)], 20.0)
            assert wire.decode(data).code == "MALFORMED"
        _, data = connection.transport._exchange([None, Request(b"once more")], 20.0)
        assert wire.decode(data).code == "TOO_MANY_REFUSALS"
        connection.close()
        worker.join(20)
        assert not worker.is_alive() and "north waiting for" in connection.transport.status()
        stop.set()
    for agent in (south, *agents.values()):
        agent.log.close()
    assert len(ends) == 1 and "TOO_MANY_REFUSALS" in ends[0] and "audit show" in ends[0]


def test_an_endless_plan_is_refused_over_the_network_and_the_site_goes_on(tmp_path):
    """A coordinator with a good key asks for a walk that would never end; then for one that does."""
    contract = FEW_ROUNDS.replace("[dynamics]", '[dynamics]\nkind = "FactorisedBoomerang"\ncontrol = "none"')
    folder = Folder(tmp_path, contract)
    agents = {name: folder.agent(name) for name in folder.study.sites}
    for agent in agents.values():
        agent.computation.most_seconds = 1.0
    far = {"start": np.full((CHAINS, DIM), 1e11), "duration": np.full((CHAINS, 1), 30.0)}
    with folder.listening() as connection, folder.sites(connection, agents):

        def asked(data):
            message = dataclasses.replace(wire.decode(data), run=connection.run)
            # The first refusal ends the round.
            answers = connection.transport.ask([Request.of(message)] * 2)
            return [wire.decode(answer) for answer in answers if answer is not None]

        assert {type(one) for one in asked(opening())} == {wire.Opened}
        assert {one.code for one in asked(plans(**far))} == {"TOO_MUCH_WORK"}
        assert {type(one) for one in asked(plans())} == {wire.Arrivals}
