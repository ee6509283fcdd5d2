"""Requests of a coordinator to one agent, made by hand."""

import dataclasses

import numpy as np

from fedpdmc.federation import messages

RUN = b"r" * 16
CHAINS, DIM = 4, 3


def joined(folder, store, name="north"):
    agent = folder.agent(name, store)
    agent.join(messages.encode(messages.Welcome(RUN, folder.study.digest)))
    return agent


def opening(sequence=1, **changes):
    empty = (np.zeros((0, 0)), np.zeros(0), np.zeros(0))
    message = messages.Open(RUN, sequence, CHAINS, 1, np.zeros(DIM), np.ones(DIM), 0, *empty)
    return messages.encode(dataclasses.replace(message, **changes))


def plans(sequence=2, number=0, seed=0, **changes):
    rng = np.random.default_rng(seed)
    velocity = np.where(rng.random((CHAINS, 1, DIM)) < 0.5, -1.0, 1.0)
    message = messages.Plans(
        RUN, sequence, np.full(CHAINS, number), rng.normal(size=(CHAINS, DIM)), np.full((CHAINS, 1), 0.5), velocity,
        np.arange(CHAINS),
    )  # fmt: skip
    return messages.encode(dataclasses.replace(message, **changes))


def ask(agent, data):
    return messages.decode(agent.answer(data))
