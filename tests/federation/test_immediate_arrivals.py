"""Who ends the plans."""

import numpy as np
import pytest

from fedpdmc.errors import BadAnswer, LimitReached
from fedpdmc.federation.answer_checks import MOST_IMMEDIATE, ImmediateArrivals
from fedpdmc.plan import Arrival


def arrival(time, rang):
    return Arrival(np.asarray(time), np.asarray(rang), np.zeros(len(time), int))


def test_a_site_that_always_rings_at_once_is_named():
    early, horizon = ImmediateArrivals(["north", "south"]), np.array([5.0, 5.0])
    late, hasty = arrival([1.0, 2.0], [True, False]), arrival([3.0, 1e-300], [True, True])
    with pytest.raises(BadAnswer, match="'south': 32 immediate arrivals in a row on chain 1"):
        for _ in range(MOST_IMMEDIATE):
            early.add([late, hasty], horizon)
    assert early.words().endswith("north 32, south 32.")


def test_a_few_are_an_accident_and_others_in_between_too():
    early, horizon = ImmediateArrivals(["north", "south"]), np.array([5.0])
    for k in range(10 * MOST_IMMEDIATE):
        time = 0.0 if k % 8 else 1.0
        early.add([arrival([time], [True]), None], horizon)
    assert early.ended.tolist() == [10 * MOST_IMMEDIATE, 0]


def test_who_has_used_the_rounds_up_is_said():
    assert ImmediateArrivals(["north"]).words() == ""
    early = ImmediateArrivals(["north", "south"])
    early.add([arrival([1.0], [False]), arrival([1e-6], [True])], np.array([5.0]))
    error = LimitReached("north", "TOO_MANY_ROUNDS", early.words())
    assert "Plans ended by each site, counted by chain: north 0, south 1." in str(error)
