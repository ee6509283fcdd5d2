"""Requests in bent coordinates: the maps, openings and plans that a site refuses, and how releases are compared."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from tests.federation.test_derivative_disclosure import RUN, Guarded, code
from tests.federation.test_private_effects import BENT
from tests.study.contracts import EFFECTS, POLICY

from fedpdmc._jax.precision import double_precision
from fedpdmc.errors import RequestRefused, WireError
from fedpdmc.federation import messages
from fedpdmc.federation.derivative_rounding import digits_of
from fedpdmc.federation.site_agent.derivative_disclosure import ReleasePlace
from fedpdmc.federation.site_agent.trust_region import _curvature, _widest
from fedpdmc.members.site import derivatives
from fedpdmc.whitening import Bend, steepness

# Before the bend: three coefficients and a log spread ``T(u)``.
U, SPREAD = np.array([0.1, -0.2, 0.3, -0.4]), 0.3 * np.eye(4)
NUMBERS = np.array([[-0.6], [0.3], [0.02], [0.05], [0.02], [0.0]])


class Wards(Guarded):
    """Hospitals with three wards and a policy."""

    def __init__(self, path, contract=BENT):
        super().__init__(path, contract, f"{POLICY}coordinator_may_choose = true\n", 60)
        for place in self.data.values():
            lines = place.read_text().splitlines()
            wards = [line.rsplit(",", 1)[0] + f",{'ABC'[k % 3]}" for k, line in enumerate(lines[1:])]
            place.write_text("\n".join([lines[0], *wards]) + "\n")


@pytest.fixture(scope="module")
def wards(tmp_path_factory):
    return Wards(tmp_path_factory.mktemp("bends"))


@pytest.fixture
def agent(wards, tmp_path):
    agent = wards.agent("north", tmp_path / "store")
    yield agent
    agent.log.close()


def ask(agent, message):
    return messages.decode(agent.answer(messages.encode(message)))


def derive(agent, bend, spread=SPREAD):
    return ask(agent, messages.Derive(RUN, agent.log.answers + 1, U, spread, np.asarray(bend, float)))


def changed(**entries):
    """The numbers with some replaced: b, c, and the first of α and of β."""
    numbers = np.array(NUMBERS)
    for name, value in entries.items():
        numbers["bcα_β".index(name), 0] = value
    return numbers


@pytest.mark.parametrize(
    ("bend", "told"),
    [
        (changed(c=-0.3), "UNUSUAL_BEND"),
        (changed(c=0.0), "UNUSUAL_BEND"),
        (changed(α=-0.01), "UNUSUAL_BEND"),
        (changed(β=-0.01), "UNUSUAL_BEND"),
        (changed(c=1e-3), "UNUSUAL_BEND"),
        (changed(c=5.0), "UNUSUAL_BEND"),
        (changed(α=6.0, c=1.0), "UNUSUAL_BEND"),
        (changed(c=1e300), "UNUSUAL_BEND"),
        (np.hstack([NUMBERS, NUMBERS]), "WRONG_SHAPE"),
        (changed(b=40.0), "TOO_FAR"),
        (changed(b=-40.0), "TOO_FAR"),
    ],
)
def test_bends_that_a_site_refuses(agent, bend, told):
    assert code(derive(agent, bend)) == told
    # What follows is as if nothing had been asked, but for points that disclosure control has declined.
    assert agent.computation.progress.points == (told == "TOO_FAR")


@pytest.mark.parametrize("bend", [np.full((6, 1), np.nan), changed(b=np.inf), NUMBERS[:5], np.zeros((6, 0))])
def test_numbers_that_are_no_bend_are_no_message(bend):
    empty = np.zeros((0, 0)), np.zeros(0), np.zeros(0)
    opening = messages.Open(RUN, 1, 4, 1, U, np.eye(4), 0, *empty, bend=bend)
    for message in (messages.Derive(RUN, 1, U, SPREAD, bend), opening):
        with pytest.raises(WireError, match="bend"):
            messages.decode(messages.encode(message))


def test_a_contract_without_averages_has_no_bends(tmp_path):
    agent = Wards(tmp_path, EFFECTS).agent("north", tmp_path / "store")
    assert code(derive(agent, NUMBERS, np.zeros((0, 0)))) == "NOT_IN_CONTRACT"
    agent.log.close()


@double_precision
def own(agent, bend):
    return derivatives(agent.site.bent(Bend((3,), jnp.asarray(bend))), U, SPREAD)


def test_a_run_opens_in_the_coordinates_of_the_last_release(agent):
    """A bend belongs to a release like its point; plans are limited in the log spread itself, upwards."""
    derive(agent, changed(b=-0.5))
    released, again = derive(agent, NUMBERS), derive(agent, NUMBERS)
    _, exact_gradient, exact = own(agent, NUMBERS)
    gradient, hessian = released.gradient, released.hessian
    # On the first grid: the release in other coordinates predicts nothing in these.
    size = 2.0 ** np.round(np.log2(np.abs(np.diag(exact))) / 2)
    off = np.abs(hessian - exact) / np.outer(size, size)
    assert 0 < off.max() < 2.0 ** -digits_of(4, True)
    np.testing.assert_array_equal(again.hessian, hessian)
    scale = np.diag([0.2, 0.2, 0.2, 1.0])
    parts = (U, scale, 2, hessian, gradient - hessian @ U, U)
    good = messages.Open(RUN, 4, 4, 2, *parts, bend=NUMBERS)
    # Exact derivatives are not what was released.
    other = dataclasses.replace(good, precision=exact, linear=exact_gradient - exact @ U)
    assert code(ask(agent, other)) == "NOT_TOLD"
    for bend in (np.zeros((0, 0)), changed(b=-0.5), changed(c=0.3 + 1e-12)):
        assert code(ask(agent, dataclasses.replace(good, bend=bend))) == "NOT_TOLD"
    # Wide in a coefficient, hidden behind the log spread, whose curvature the bend has made negative.
    hidden = scale + np.outer([30.0, 0.0, 0.0, 0.0], np.eye(4)[3])
    assert _curvature(hidden[:, 3:], np.diag([hessian[0, 0], 0.0, 0.0, -1e6])) < 100
    assert code(ask(agent, dataclasses.replace(good, scale=hidden))) == "TOO_WIDE"
    assert _widest(hidden, np.diag([hessian[0, 0], 0.0, 0.0, -1e6]), Bend((3,), jnp.asarray(NUMBERS))) > 100
    assert isinstance(ask(agent, good), messages.Opened)
    reference = agent.computation.reference
    np.testing.assert_allclose(reference.to_x(np.zeros(4))[3], float(Bend((3,), jnp.asarray(NUMBERS))(U)[3]))
    for log_spread, refused in ((2.0, False), (-60.0, False), (25.0, True)):
        start = reference.to_a(np.append(U[:3], log_spread))[None]
        at = np.zeros(1, int), start, np.full((1, 1), 0.1), np.zeros((1, 1, 4)), np.zeros(1, int), np.zeros(1)
        plans = messages.Plans(RUN, 5, *at)
        # The same place, reached from the middle a quarter turn later.
        later = dataclasses.replace(plans, start=0 * start, velocity=start[:, None], duration=np.full((1, 1), 1.6))
        assert [too_far(agent, plans), too_far(agent, later)] == [refused, refused]


def too_far(agent, plans):
    try:
        agent.computation.region.check_plans(plans)
    except RequestRefused as refused:
        assert refused.code == "TOO_FAR"
        return True
    return False


@double_precision
def test_releases_are_compared_in_units_of_the_log_spread(agent):
    """At a point the gradient of u is T' times that of s: a record has the same part of both."""
    control, bend = agent.computation.control, Bend((3,), jnp.asarray(NUMBERS))
    one, other = control._at(ReleasePlace(bend(U))), control._at(ReleasePlace(U, None, bend))
    np.testing.assert_allclose(one.gradient, other.gradient, rtol=1e-6, atol=1e-10)
    slope = float(steepness(U[3:], NUMBERS)[0])
    assert abs(slope - 1) > 0.3
