"""Averaged derivatives over a network: who may ask for which, and what a coordinator or a site cannot do with them."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from tests.federation.studies import SUMMED, Folder
from tests.federation.test_derivative_disclosure import OWN, RUN, Guarded, code

from fedpdmc._jax.precision import double_precision
from fedpdmc.errors import BadAnswer
from fedpdmc.federation import masking, messages
from fedpdmc.federation.derivative_plausibility import Plausible
from fedpdmc.federation.derivative_rounding import COARSE
from fedpdmc.federation.remote import RemoteFederation, RemoteSite
from fedpdmc.federation.session import _mode
from fedpdmc.federation.site_agent.audit_replay import replay
from fedpdmc.federation.site_agent.derivative_disclosure import ReleasePlace
from fedpdmc.federation.transport import DirectTransport
from fedpdmc.members.site import derivatives
from fedpdmc.potentials import Logistic, Poisson
from fedpdmc.privacy.sensitivity import Bounds, ModelFacts, averaged_sensitivity, derivative_sensitivity
from fedpdmc.sampling import vb_reference

X, SPREAD = np.array([0.1, -0.2, 0.3]), 0.2 * np.array([[1.0, 0.0, 0.0], [-0.5, 1.0, 0.0], [0.1, 0.2, 0.7]])


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    return Guarded(tmp_path_factory.mktemp("averages"))


@pytest.fixture
def agent(guarded, tmp_path):
    agent = guarded.agent("north", tmp_path / "store")
    yield agent
    agent.log.close()


def derive(agent, x, spread=None):
    about = np.zeros((0, 0)) if spread is None else np.asarray(spread, float)
    message = messages.Derive(RUN, agent.log.answers + 1, np.asarray(x, float), about)
    return messages.decode(agent.answer(messages.encode(message)))


def opening(agent, center, scale, precision, linear, point, kept=1.0, **more):
    chains = agent.computation.study.chains
    parts = (RUN, agent.log.answers + 1, chains, 4, center, scale, 2, precision, linear, point)
    return messages.decode(agent.answer(messages.encode(messages.Open(*parts, kept=kept, **more))))


@double_precision
def own(agent, x, spread):
    return derivatives(agent.site, x, spread)


def quadratic_at(agent, x, spread, kept=1.0):
    """Reference and control variate of averaged derivatives at a point, of this site alone and a standard normal prior.

    As the site releases them; a place that was asked before is no further release.
    """
    told = derive(agent, x, spread)
    return quadratic(x, told.gradient, told.hessian, kept)


def quadratic(x, gradient, hessian, kept=1.0):
    hessian = kept * hessian
    scale = np.linalg.cholesky(np.linalg.inv(hessian + np.eye(3)))
    return np.array(x), scale, hessian, gradient - hessian @ x


def test_averages_are_on_the_grid_and_the_same_when_asked_again(agent):
    _, gradient, hessian = own(agent, X, SPREAD)
    first, second = derive(agent, X, SPREAD), derive(agent, X, SPREAD)
    size = 2.0 ** np.round(np.log2(np.diag(hessian)) / 2)
    off = np.abs(first.hessian - hessian) / np.outer(size, size)
    assert 0 < off.max() < 2.0**-COARSE
    assert not np.isclose(first.gradient, gradient, rtol=1e-6).any()
    np.testing.assert_array_equal(second.hessian, first.hessian)
    np.testing.assert_array_equal(second.gradient, first.gradient)
    assert first.value == second.value == 0
    # Asking again teaches nothing, and is not counted; another spread is.
    assert agent.computation.progress.points == 1
    assert code(derive(agent, X, 0.9 * SPREAD)) is None
    assert agent.computation.progress.points == 2


def test_the_same_point_with_another_spread_is_another_point(agent):
    derive(agent, X)
    for count, spread in ((2, SPREAD), (3, 1.1 * SPREAD), (3, None)):
        told, exact = derive(agent, X, spread), own(agent, X, spread)[2]
        assert agent.computation.progress.points == count
        # Every place has a dither of its own: no average of answers is exact.
        assert not np.isclose(told.hessian, exact, rtol=1e-6).any()
    # As it was told at first, on the coarse grid.
    size = 2.0 ** np.round(np.log2(np.diag(exact)) / 2)
    steps = told.hessian / np.outer(size, size) * 2.0**COARSE
    np.testing.assert_array_equal(steps, np.round(steps))


def test_a_contract_without_averages_refuses_them(tmp_path):
    plain = Guarded(
        tmp_path / "plain", OWN.replace("[dynamics]", '[dynamics]\nreference = "laplace"\ncontrol = "quadratic"')
    )
    agent = plain.agent("north", tmp_path / "store")
    assert code(derive(agent, X, SPREAD)) == "NOT_IN_CONTRACT"
    assert code(derive(agent, X)) is None
    agent.log.close()


def test_averages_of_few_records_are_refused(guarded, agent, tmp_path):
    """Far out, with a narrow Gaussian, as few records contribute to a mean as to a value; a wide one is too far."""
    far = np.array([-8.0, 8.0, -8.0])
    assert code(derive(agent, far, 1e-3 * np.eye(3))) in ("FEW_RECORDS", "TOO_FAR")
    assert code(derive(agent, X, 1e3 * np.eye(3))) == "TOO_FAR"
    # A Gaussian that is wide in one direction alone.
    assert code(derive(agent, X, np.diag([1e-3, 40.0, 1e-3]))) == "TOO_FAR"


def test_a_spread_is_no_wider_than_the_sites_own_posterior(agent):
    """A wide Gaussian has a small mean Hessian, and would open a run whose plans go far out."""
    width = np.linalg.cholesky(np.linalg.inv(own(agent, X, None)[2]))
    assert code(derive(agent, X, width)) is None
    assert code(derive(agent, X, 5 * width)) == "TOO_WIDE"
    # In one direction alone.
    assert code(derive(agent, X, width * [0.1, 6.0, 0.1])) == "TOO_WIDE"
    # Refusals count as points.
    assert agent.computation.progress.points == 3


def test_the_contributions_that_are_checked_are_those_of_the_release(guarded, tmp_path):
    agent = guarded.agent("north", tmp_path / "store")
    control = agent.computation.control
    terms = double_precision(control._at)(ReleasePlace(X, SPREAD))
    value, gradient, hessian = own(agent, X, SPREAD)
    assert terms.value.sum() == pytest.approx(value, rel=1e-10)
    np.testing.assert_allclose(terms.slope @ control._design, gradient, rtol=1e-10)
    np.testing.assert_allclose((control._design * terms.curvature[:, None]).T @ control._design, hessian, rtol=1e-10)
    agent.log.close()


def test_only_the_control_variate_of_the_last_average_opens_a_run(guarded, tmp_path):
    for name, found in (
        ("as released", None), ("exact", "NOT_TOLD"), ("of the release before", "NOT_TOLD"),
        ("of the next spread", "NOT_TOLD"), ("at the point", "NOT_TOLD"), ("a little off", "NOT_TOLD"),
    ):  # fmt: skip
        agent = guarded.agent("north", tmp_path / name)
        before = quadratic_at(agent, X, 0.9 * SPREAD)
        center, scale, precision, linear = quadratic_at(agent, X, SPREAD)
        parts = {
            "as released": (precision, linear),
            "exact": quadratic(X, *own(agent, X, SPREAD)[1:])[2:],
            "of the release before": before[2:],
            "of the next spread": quadratic(X, *own(agent, X, 1.3 * SPREAD)[1:])[2:],
            "at the point": quadratic(X, *own(agent, X, None)[1:])[2:],
            "a little off": (precision, linear * (1 + 1e-6)),
        }[name]
        assert code(opening(agent, center, scale, *parts, X)) == found, name
        agent.log.close()


def test_a_run_may_be_opened_with_most_of_the_released_curvature_and_a_reference_that_is_as_much_wider(
    guarded, tmp_path
):
    for name, part, said, wider, found in (
        ("as said", 0.95, 0.95, 1.0, None), ("another part", 0.95, 1.0, 1.0, "NOT_TOLD"),
        ("too small", 0.9, 0.9, 1.0, "NOT_TOLD"), ("too wide", 0.95, 0.95, 1.2, "TOO_WIDE"),
        ("wider than released", 1.0, 1.0, 1.2, "TOO_WIDE"),
    ):  # fmt: skip
        agent = guarded.agent("north", tmp_path / name)
        center, scale, precision, linear = quadratic_at(agent, X, SPREAD, part)
        assert code(opening(agent, center, wider * scale, precision, linear, X, said)) == found, name
        agent.log.close()


@pytest.mark.parametrize("size", [1e160, 1e300])
def test_a_reference_so_wide_that_numbers_overflow_is_refused(agent, size):
    center, _, precision, linear = quadratic_at(agent, X, SPREAD)
    for scale in (size * np.eye(3), np.full(3, size)):
        assert code(opening(agent, center, scale, precision, linear, X)) == "TOO_WIDE"


def test_a_restarted_site_and_a_replay_remember_the_spread(guarded, tmp_path):
    agent = guarded.agent("north", tmp_path / "store")
    first = derive(agent, X, SPREAD)
    agent.log.close()
    again = guarded.agent("north", tmp_path / "store")
    center, scale, precision, linear = quadratic_at(again, X, SPREAD)
    np.testing.assert_array_equal(precision, first.hessian)
    assert again.computation.progress.points == 1
    assert code(opening(again, center, scale, precision, linear, X)) is None
    message = messages.Open(RUN, 3, again.computation.study.chains, 4, X, scale, 2, precision, linear, X)
    expected = double_precision(again.computation._opening)(message).control
    np.testing.assert_array_equal(expected.spread, SPREAD)
    again.log.close()
    found = replay(guarded.study, "north", guarded.data["north"], store=tmp_path / "store")
    assert found.same == 3 and not found.different


def test_secure_sums_of_averages_give_each_site_the_part_that_the_sum_has(tmp_path):
    folder = Folder(tmp_path / "study", SUMMED)
    agents = {name: folder.agent(name, tmp_path / name) for name in folder.study.sites}
    for agent in agents.values():
        agent.join(messages.encode(messages.Welcome(RUN, folder.study.digest)))
    offered = tuple(agent.answer(messages.encode(messages.Offer(RUN, 1))) for agent in agents.values())
    for agent in agents.values():
        agent.answer(messages.encode(messages.Agree(RUN, 2, offered)))
    answers = [agent.answer(messages.encode(messages.Derive(RUN, 3, X, SPREAD))) for agent in agents.values()]
    gradient, hessian = masking.unpacked(masking.total([messages.decode(data).words for data in answers]), 3)
    empty, kept = (np.zeros((0, 0)), np.zeros(0)), 0.95
    message = messages.Open(RUN, 4, folder.study.chains, 4, X, SPREAD, 2, *empty, X, kept=kept)
    parts = [double_precision(agent.computation._opening)(message).control for agent in agents.values()]
    total, linear = (
        sum(np.asarray(getattr(part.quadratic, name)) for part in parts) for name in ("precision", "linear")
    )
    np.testing.assert_allclose(total, kept * hessian, rtol=1e-12)
    np.testing.assert_allclose(linear, gradient - kept * hessian @ X, rtol=1e-12)
    # Nor does the sum have what no site has released.
    exact = sum(own(agent, X, SPREAD)[2] for agent in agents.values())
    size = np.sqrt(np.diag(exact))
    assert 1e-3 < np.max(np.abs(hessian - exact) / np.outer(size, size)) < 2 * 2.0**-COARSE
    for agent in agents.values():
        agent.log.close()


def test_means_that_contradict_derivatives_at_points_are_named(guarded, agent):
    checks = Plausible(guarded.study)
    for x, spread in ((X, None), (X, SPREAD), (X + 0.1, SPREAD)):
        told = derive(agent, x, spread)
        checks.check("north", x, told.gradient, told.hessian, spread=spread)
    _, gradient, hessian = own(agent, X, 0.8 * SPREAD)
    with pytest.raises(BadAnswer, match="contradict each other"):
        checks.check("north", X, gradient, 200 * hessian, spread=0.8 * SPREAD)
    _, gradient, hessian = own(agent, X + 0.2, SPREAD)
    for lie in (60, -60):
        with pytest.raises(BadAnswer, match="contradict each other"):
            checks.check("north", X + 0.2, gradient + lie, hessian, spread=SPREAD)
    checks.check("north", X + 0.2, gradient, hessian, spread=SPREAD)


@double_precision
def test_one_record_changes_a_mean_by_no_more_than_its_bound():
    """The sensitivity of averaged derivatives, attacked with corners of the domain; for Poisson it grows with the spread."""
    box, region = [1.0, 0.7, 1.3], [0.5, 0.5, 0.5]
    bounds = Bounds(box=box, outcome=(0, 4), region=region, most_records=10)
    rng, rows = np.random.default_rng(0), np.array(np.meshgrid(*([-b, b] for b in box))).reshape(3, -1).T
    for name, loss in (("poisson", Poisson()), ("logistic", Logistic())):
        model = ModelFacts(name, 3)
        factor = averaged_sensitivity(model, bounds, SPREAD)
        limits = [factor * k for k in derivative_sensitivity(model, bounds, "add-remove")]
        worst = np.zeros(2)
        for x in [np.asarray(region) * s for s in np.sign(rng.normal(size=(16, 3)))]:
            for y in (0.0, 4.0 if name == "poisson" else 1.0):
                deviation = np.linalg.norm(rows @ SPREAD, axis=1)
                z = jnp.asarray(rows @ x)
                _, first, second = loss.averaged(z, jnp.asarray(deviation), jnp.full(8, y))
                size = np.linalg.norm(rows, axis=1)
                worst = np.maximum(worst, [np.max(np.abs(first) * size), np.max(np.abs(second) * size**2)])
        assert np.all(worst <= np.asarray(limits) * (1 + 1e-9)), name
        if name == "poisson":
            assert factor > 1.01 and worst[1] > derivative_sensitivity(model, bounds, "add-remove")[1]


def test_a_message_with_a_spread_of_another_size_is_refused():
    with pytest.raises(Exception, match="spread"):
        messages.decode(messages.encode(messages.Derive(RUN, 1, X, np.eye(2))))
    found = messages.decode(messages.encode(messages.Derive(RUN, 1, X, SPREAD)))
    np.testing.assert_array_equal(found.about, SPREAD)
    assert dataclasses.replace(found, spread=np.zeros((0, 0))).about is None


def test_a_run_opens_where_averages_could_not_be_used(tmp_path, monkeypatch):
    """A control variate is that of the last release: the mode, where sites are asked after the averages."""

    def useless(search, mode, most):
        search.ask(mode.point.x, SPREAD)
        return None, 1

    monkeypatch.setattr(vb_reference, "_average", useless)
    folder = Guarded(tmp_path / "study")
    agents = [folder.agent(name, tmp_path / name) for name in folder.study.sites]
    federation = RemoteFederation(DirectTransport(agents), RUN)
    members = [RemoteSite(federation, k, 3) for k in range(len(agents))]
    found = double_precision(_mode)(federation, members, folder.study)
    assert found.name == "laplace" and found.control is not None
    # The second search begins where the first ended, and the mode is requested again after the averages: rounds, not points.
    assert found.rounds == agents[0].log.answers == agents[0].computation.progress.points + 2
    double_precision(federation.open)(found, [found.control[name] for name in federation.names], 4, 4)
    federation.transport.close()


def widened(agent, ratio, columns=1, share=None):
    """Reference and control variate that are wider in the first directions, and W."""
    x, scale, hessian, linear = quadratic_at(agent, X, SPREAD)
    wide = np.sqrt(1 - 1 / ratio) * np.linalg.inv(scale).T[:, np.arange(columns) % 3] / np.sqrt(max(columns // 3, 1))
    whole = wide @ wide.T
    less = whole / len(agent.computation.study.sites) if share is None else share * whole
    root = np.linalg.cholesky(np.linalg.inv(hessian + np.eye(3) - whole))
    return (x, root, hessian - less, linear + less @ x, x), wide


def test_a_reference_as_wide_as_the_tails_is_accepted_and_no_wider(agent):
    # Sites take an equal share; any other control variate, or one that is not told, is refused.
    parts, wide = widened(agent, 4.0, share=1.0)
    assert code(opening(agent, *parts, wide=wide)) == "NOT_TOLD"
    parts, wide = widened(agent, 4.0)
    assert code(opening(agent, *parts)) == "NOT_TOLD"
    parts, wide = widened(agent, 12.0)
    assert code(opening(agent, *parts, wide=wide)) == "TOO_WIDE"
    parts, wide = widened(agent, 4.0, columns=9)
    assert code(opening(agent, *parts, wide=wide)) == "TOO_WIDE"
    parts, wide = widened(agent, 4.0)
    # A reference that is wider than it says.
    assert code(opening(agent, parts[0], 1.5 * parts[1], *parts[2:], wide=wide)) == "TOO_WIDE"
    assert code(opening(agent, *parts, wide=wide)) is None
