"""One message of each kind."""

import numpy as np

from fedpdmc.federation import messages as wire

RUN, DIGEST = bytes(range(16)), bytes(range(32))


def arrays(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def messages(chains=3, segments=2, dim=4):
    """One of each kind."""
    c, s, d = chains, segments, dim
    return [
        wire.Hello("north", DIGEST, "fedpdmc 0.1.0"),
        wire.Welcome(RUN, DIGEST),
        wire.Derive(RUN, 1, arrays(d)),
        wire.Derivatives(RUN, 1, DIGEST, -3.25, arrays(d), arrays(d, d)),
        wire.Derivatives(RUN, 1, DIGEST, 0.0, arrays(d), arrays(d, d), np.arange(16.0)),
        wire.Open(RUN, 2, c, s, arrays(d), arrays(d, d), 2, arrays(d, d), arrays(d), arrays(d)),
        wire.Open(RUN, 2, c, s, arrays(d), arrays(d), 0, np.zeros((0, 0)), np.zeros(0), np.zeros(0)),
        wire.Open(RUN, 2, c, s, arrays(d), arrays(d), 0, np.zeros((0, 0)), np.zeros(0), np.zeros(0), np.arange(2)),
        wire.Opened(RUN, 2, DIGEST),
        wire.Plans(RUN, 3, np.arange(c), arrays(c, d), np.abs(arrays(c, s)), arrays(c, s, d), np.arange(c)),
        wire.Arrivals(RUN, 3, DIGEST, np.abs(arrays(c)), np.ones(c, bool), np.arange(c), np.zeros((0, d))),
        wire.Arrivals(RUN, 3, DIGEST, np.abs(arrays(c)), np.zeros(c, bool), np.zeros(0, int), arrays(c, d)),
        wire.Arrivals.of_chains(RUN, 3, DIGEST, np.abs(arrays(c)), np.arange(c) == 1, arrays(c, d), passes=3),
        wire.TurnPlans(
            RUN,
            3,
            np.arange(c),
            np.arange(c) + 7,
            np.arange(c),
            arrays(c, d),
            arrays(c, d),
            np.full(c, 0.5),
            np.abs(arrays(c)),
            DIGEST,
        ),
        wire.Refusal(RUN, 4, DIGEST, "TOO_MANY_ROUNDS", 2),
        wire.Farewell(RUN, 5),
        wire.Open(RUN, 2, c, s, arrays(d), arrays(d, d), 2, np.zeros((0, 0)), np.zeros(0), arrays(d)),
        wire.Open(RUN, 2, c, s, arrays(d), arrays(d, d), 2, arrays(d, d), arrays(d), arrays(d), wide=arrays(d, 1)),
        wire.Opened(RUN, 2, DIGEST, 3.5, np.arange(14.0)),
        wire.Offer(RUN, 1),
        wire.Offered(RUN, 1, DIGEST, DIGEST, b"certificate", b"signature"),
        wire.Agree(RUN, 2, (b"one", b"", b"three")),
        wire.Masked(RUN, 3, DIGEST, np.asarray([2**64 - 1, 0, 7], "<u8")),
        wire.Attest(RUN, 3, 7, DIGEST, b"certificate", b"signature"),
        wire.Attested(RUN, 3, DIGEST, 7, DIGEST, b"certificate", b"signature"),
        wire.Welcome(RUN, DIGEST, b"certificate", b"signature"),
    ]
