"""Messages: decoded, read for the first time, and answered by an agent."""

import contextlib
import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
from tests.federation.kinds import DIGEST, messages
from tests.federation.requests import DIM, RUN, opening, plans
from tests.federation.studies import FEW_ROUNDS, SUMMED, ZIGZAG, Folder
from tests.fuzz.engine import Target
from tests.study.contracts import POLICY

from fedpdmc import certificates as keys
from fedpdmc.errors import BadAnswer, Refused, RequestRefused, WireError
from fedpdmc.federation import answer_checks, masking
from fedpdmc.federation import messages as wire
from fedpdmc.federation.site_agent.start import open_agent
from fedpdmc.plan import Plan
from fedpdmc.study import read_policy

WIDE = 4
PLAN = Plan(np.arange(3), np.zeros((3, WIDE)), np.ones((3, 2)), np.ones((3, 2, WIDE)))  # type: ignore[arg-type]
MOST_LOG = 16 << 20


def first_reader(message: wire.Message, own: keys.Credentials) -> None:
    """What is done with a message before any of it is trusted."""
    if isinstance(message, wire.Arrivals):
        answer_checks.read_arrival("north", message, PLAN)
    elif isinstance(message, wire.Opened) and message.remaining >= 0:
        answer_checks.read_account("north", 2, message.remaining, message.account.tolist())
    elif isinstance(message, wire.Derivatives):
        answer_checks.check_derivatives("north", message, WIDE)
    elif isinstance(message, wire.Offered):
        keys.signer(own, message.certificate, message.signature, message.public)
    elif isinstance(message, wire.Agree):
        masking._offers(message)
    elif isinstance(message, wire.Masked) and len(message.words) == 2 * masking.size(WIDE):
        masking.unpacked(masking.total([message.words]), WIDE)


def decoder(folder: Path) -> Target:
    """Any bytes decode to a message that encodes to the same bytes, or are refused; and a message is taken or faulted."""
    own = keys.read_credentials(keys.make_keys(folder / "wire", ["north"]) / "sites" / "north")

    def read(data: bytes):
        # Headers are hard to guess and easy to give: half of the inputs get one.
        if data[:1] and data[0] % 2:
            data = wire.HEADER.pack(wire.MAGIC, wire.VERSION, data[0] // 2 % 18) + data[1:]
        else:
            data = data[1:]
        message = wire.decode(data)
        assert wire.encode(message) == data, "decoded to something else than it was"
        with contextlib.suppress(RequestRefused):
            first_reader(message, own)
        for kind in (wire.Arrivals, wire.Derivatives, wire.Opened):
            with contextlib.suppress(BadAnswer, Refused):
                answer_checks.check_answer("north", data, kind, (RUN, 1, DIGEST))

    return Target("message", [b"\0" + wire.encode(one) for one in samples(own)], read)


def samples(own: keys.Credentials) -> list[wire.Message]:
    """One message of each kind and of what it may hold, those of secure sums with real keys."""
    secret = masking.new_secret()
    public = masking.public_of(secret)
    offered = wire.Offered(RUN, 1, DIGEST, public, own.certificate, keys.sign(own, public))
    packed = masking.words([masking.fixed(float(k), 3) for k in range(masking.size(WIDE))])
    silent = np.zeros(3)
    return [
        *messages(),
        offered,
        wire.Agree(RUN, 2, (wire.encode(offered),) * 2),
        wire.Masked(RUN, 3, DIGEST, packed),
        # Some chains only, as where others are spared; and a private site's account.
        wire.Plans(RUN, 3, np.arange(2), PLAN.start[:2], PLAN.duration[:2], PLAN.velocity[:2], np.asarray([0, 2])),
        wire.Arrivals(RUN, 3, DIGEST, silent, silent > 0, silent.astype(int), np.zeros((0, WIDE)), 5.0, 1.5, 0.25, 7),
        wire.Opened(RUN, 2, DIGEST, 3.5, np.asarray([1, 1e-5, 9, 0.5, 1e-6, 40, 0.2, 0.1, 0.4, 0.2, 3, 1, 0.5])),
    ]


def _agent(
    folder: Path,
    contract: str,
    name: str,
    requests: list[bytes],
    first: tuple[wire.Message, ...] = (),
    following: Callable[[wire.Message], list[bytes]] = lambda answer: [],
) -> Target:
    """An agent of a running study: it answers or refuses, whatever it is asked, and goes on to answer.

    An input that begins with 4 is asked after the requests ``first``, of whose last answer ``following`` makes samples.
    """
    made = Folder(folder / name.replace(" ", "-"), contract)
    (made.path / "policy.toml").write_text(POLICY + "most_seconds = 2.0\n")
    own, store = keys.read_credentials(made.keys("north")), made.path / "store"
    policy = read_policy(made.path / "policy.toml")
    agents = []

    def fresh():
        if agents:
            agents.pop().log.close()
            shutil.rmtree(store)
        agent = open_agent(made.study, "north", made.data["north"], store=store, policy=policy, seed=5, credentials=own)
        if agent.computation.own is not None:
            agent.computation.own.enforced = False
        agent.join(wire.encode(wire.Welcome(RUN, made.study.digest)))
        agents.append(agent)
        return agent

    def begun():
        agent = fresh()
        return agent, [wire.decode(agent.answer(wire.encode(one))) for one in first]

    samples = [b"\4" + one for one in following(begun()[1][-1])] if first else []
    fresh()

    def read(data: bytes):
        agent = begun()[0] if data[:1] == b"\4" else agents[0]
        if agent.log.path.stat().st_size > MOST_LOG or agent.log.answers > 500 or data[:1] == b"\0":
            agent = fresh()
        agent.refusals = 0
        with contextlib.suppress(WireError):
            message = wire.decode(data[1:])
            if data[:1] and (data[0] % 4 or data[0] == 4) and hasattr(message, "sequence"):
                # In order, and of this run: the checks that come after are reached.
                message = dataclasses.replace(message, run=RUN, sequence=agent.log.answers + 1)  # type: ignore[call-arg]
                data = data[:1] + wire.encode(message)
        answer = wire.decode(agent.answer(data[1:]))
        assert getattr(answer, "code", "") != "NOT_ANSWERED", "an error within"

    return Target(name, samples + [b"\1" + one for one in requests], read)


def agents(folder: Path) -> Target:
    """Plans in the parameters' own coordinates."""
    attest = wire.encode(wire.Attest(RUN, 3, 7, DIGEST, b"certificate", b"signature"))
    farewell = wire.encode(wire.Farewell(RUN, 5))
    flat = np.ones((2, 1, DIM))
    some = wire.encode(wire.Plans(RUN, 2, np.arange(2), np.zeros((2, DIM)), np.ones((2, 1)), flat, np.asarray([0, 2])))
    return _agent(folder, ZIGZAG, "agent", [opening(), plans(), plans(3, 1, 1), some, attest, farewell])


def agents_with_derivatives(folder: Path) -> Target:
    """Derivatives, and plans on a reference that the site has told."""
    derive = wire.encode(wire.Derive(RUN, 1, np.zeros(DIM)))
    control = {"order": 2, "precision": np.eye(DIM), "linear": np.zeros(DIM), "point": np.zeros(DIM)}
    open_ = opening(2, scale=0.1 * np.eye(DIM), **control)
    x, spread = np.full(DIM, 0.1), 0.2 * np.eye(DIM)
    twice = tuple(wire.Derive(RUN, k, x, spread) for k in (1, 2))

    def opened(told: wire.Message) -> list[bytes]:
        """A run on the control variate that the site has just told, exactly."""
        assert isinstance(told, wire.Derivatives), told
        own = {"order": 2, "precision": told.hessian, "linear": told.gradient - told.hessian @ x, "point": x}
        scale = np.linalg.cholesky(np.linalg.inv(told.hessian + np.eye(DIM)))
        return [opening(3, center=x, scale=scale, **own), wire.encode(twice[0])]

    return _agent(folder, FEW_ROUNDS, "agent with derivatives", [derive, open_, plans(3), opening()], twice, opened)


def agents_with_sums(folder: Path) -> Target:
    """Keys and parts of secure sums."""
    own = keys.read_credentials(keys.make_keys(folder / "sums", ["north", "south", "west"]) / "sites" / "south")
    public = masking.public_of(masking.new_secret())
    offered = wire.encode(wire.Offered(RUN, 1, DIGEST, public, own.certificate, keys.sign(own, public)))
    requests = [wire.Offer(RUN, 1), wire.Agree(RUN, 2, (offered,) * 3), wire.Derive(RUN, 1, np.zeros(DIM))]
    return _agent(folder, SUMMED, "agent with sums", [*map(wire.encode, requests), opening()])


TARGETS = (decoder, agents, agents_with_derivatives, agents_with_sums)
