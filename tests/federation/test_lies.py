"""Parties that lie at random in any field of their messages: the other goes on or ends in a sentence, never a traceback."""

import contextlib
import dataclasses
import random
import warnings

import numpy as np
import pytest
from tests.federation.processes import Parties
from tests.federation.requests import opening, plans
from tests.federation.studies import FEW_ROUNDS, MODEL_ZIGZAG, SEED, SITE_SEED, SUMMED, ZIGZAG, Folder

import fedpdmc as fp
from fedpdmc.errors import FedPDMCError
from fedpdmc.federation import messages
from fedpdmc.federation.transport import Request


def _array(value, rng):
    number = np.asarray(value, float)
    one = number.copy()
    if one.size:
        one.flat[rng.randrange(one.size)] = rng.choice([0, 1, 7, 1e9])
    turned = number.T if number.ndim == 2 else number[::-1]
    with np.errstate(over="ignore"):
        scaled = number * rng.choice([0.0, 1e-300, 1e300, 1e10, -1.0])
    found = rng.choice([one, turned, scaled, number[:-1], number[:0], np.concatenate([number, number]), number + 1])
    return found if value.dtype.kind == "f" else np.clip(found, 0, 2**31).astype(value.dtype)


def lied(value, rng):
    """Something else of the same type."""
    if isinstance(value, np.ndarray):
        return _array(value, rng)
    choices = {
        int: [0, 1, 2**62],
        float: [0.0, -1.0, 1e300, -1e300, 1e-300],
        bytes: [bytes(len(value))] if isinstance(value, bytes) else [],
        tuple: [(), (b"",), (bytes(32), bytes(32))],
        str: ["X", "NOT_FINITE", "BOUND_VIOLATED", "BUDGET_SPENT", "TOO_MANY_ROUNDS"],
    }
    return rng.choice(choices[type(value)])


def liar(agent, rng, after):
    """The agent with its answers changed from one of them on."""
    answer, said = agent.answer, []

    def lie(data):
        out = answer(data)
        said.append(out)
        if len(said) < after:
            return out
        message = messages.decode(out)
        name = rng.choice([field.name for field in dataclasses.fields(message)])
        return messages.encode(dataclasses.replace(message, **{name: lied(getattr(message, name), rng)}))

    agent.answer = lie


@pytest.mark.parametrize(
    ("contract", "lies"),
    [
        pytest.param(ZIGZAG, 6, id="a few"),
        pytest.param(ZIGZAG, 200, marks=pytest.mark.long, id="zigzag"),
        pytest.param(FEW_ROUNDS, 200, marks=pytest.mark.long, id="few rounds"),
        pytest.param(SUMMED, 200, marks=pytest.mark.long, id="summed"),
    ],
)
def test_whatever_a_site_answers_the_run_goes_on_or_ends_in_a_sentence(tmp_path, contract, lies):
    folder = Folder(tmp_path, contract.replace("duration = 6.0", "duration = 0.5"))
    rng, ends = random.Random(lies), []
    for _ in range(lies):
        with fp.connect(folder.study, data=folder.data, seed=SEED) as connection, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            liar(connection.transport.agents[1], rng, rng.choice([1, 2, 3, 4, 6, 20]))
            try:
                fp.sample(connection, progress=False)
            except FedPDMCError as error:
                ends.append(str(error))
    assert len(ends) > lies / 4


@pytest.mark.parametrize(
    ("contract", "lies"),
    [
        pytest.param(ZIGZAG, 30, id="a few"),
        pytest.param(ZIGZAG, 1000, marks=pytest.mark.long, id="zigzag"),
        pytest.param(MODEL_ZIGZAG, 1000, marks=pytest.mark.long, id="file"),
    ],
)
def test_a_site_outlives_whatever_a_coordinator_asks(tmp_path, contract, lies):
    """Live: the site is a process with a policy, the coordinator has a good key and lies in any field of its requests.

    With a Student-t prior the site does not make the plans itself: it answers any that its policy allows.
    """
    chosen = contract.replace("scale = 1.5", "scale = 1.5\nstudent_t = { Intercept = 4 }")
    folder, rng, codes = Folder(tmp_path, chosen), random.Random(1), set()
    with (folder.path / "policy.toml").open("a") as policy:
        policy.write("\ncoordinator_may_choose = true\n")
    parties, sequence, number = Parties(folder, (SEED, SITE_SEED)), 2, 0
    with folder.listening(listen=parties.address) as connection:
        parties.start("north")

        def asked(message):
            """The answer of north alone."""
            return messages.decode(connection.transport.ask([Request(messages.encode(message)), None])[0])

        def of_this_run(data):
            return dataclasses.replace(messages.decode(data), run=connection.run)

        try:
            start = of_this_run(opening())
            assert isinstance(asked(start), messages.Opened)
            for k in range(lies):
                message = plan = of_this_run(plans(sequence, number=number, seed=k))
                if k % 10:
                    message = rng.choice([plan, plan, start])
                    name = rng.choice([field.name for field in dataclasses.fields(message) if field.name != "run"])
                    message = dataclasses.replace(message, **{name: lied(getattr(message, name), rng)})
                answer = None
                with contextlib.suppress(FedPDMCError):
                    answer = asked(message)
                    codes.add(getattr(answer, "code", type(answer).__name__))
                # Something new is answered now and then, or the site would stop after so many refusals.
                assert k % 10 or isinstance(answer, messages.Arrivals)
                if isinstance(answer, messages.Arrivals) and message.sequence == sequence:
                    sequence, number = sequence + 1, int(max(message.number, default=number)) + 1
            assert parties.running["north"].poll() is None
        finally:
            parties.stop()
    said = (folder.path / "north.log").read_text()
    assert "Traceback" not in said and "NOT_ANSWERED" not in codes, said[-3000:]
    assert len(codes) > 3, codes
