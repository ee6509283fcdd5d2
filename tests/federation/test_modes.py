"""Other modes over a network: searched for where the contract allows the points, and said if not."""

import contextlib
import warnings

import jax.numpy as jnp
import msgspec
import numpy as np
import pandas as pd
import pytest
from tests.federation.studies import same_bits

import fedpdmc as fp
from fedpdmc.errors import Refused, RequestRefused
from fedpdmc.federation import remote
from fedpdmc.federation.messages import Refusal, Welcome, decode, encode
from fedpdmc.federation.session import join
from fedpdmc.federation.site_agent.start import open_agent
from fedpdmc.federation.transport import DirectTransport
from fedpdmc.operations.bundle import draft_policy
from fedpdmc.results.verdict import CONVERGED_TO_ONE, NOT_SEARCHED
from fedpdmc.sampling.defaults import LEAST_SEARCHES, MOST_STEPS
from fedpdmc.study import parse_study, read_policy

SIGNS = fp.Model(
    lambda x, row: (
        -jnp.logaddexp(-0.5 * (row["y"] - x["m"]) ** 2, -0.5 * (row["y"] + x["m"]) ** 2)
        + 0.5 * (row["z"] - x["b"]) ** 2
    ),
    title="A mean of unknown sign",
    parameters=["m", "b"],
    columns={"y": "real", "z": "real"},
)
SITES = ("north", "south")


def study_of(points, derivatives="own"):
    text = f"""
format = 1
name = "signs"
sites = ["north", "south"]
[model]
file = "signs.fpm"
sha256 = "{SIGNS.digest}"
[columns]
y = {{ type = "number", bounds = [-9, 9] }}
z = {{ type = "number", bounds = [-9, 9] }}
[prior]
scale = 2.5
mean = 0.4
[dynamics]
chains = 16
[run]
duration = 25.0
[releases]
derivatives = "{derivatives}"
[limits]
rounds = 2000
observed_time = 4000.0
derivatives = {points}
"""
    return parse_study(text.encode(), lambda name: SIGNS.text.encode())


def records(site):
    """Responses at 2.5 and −2.5, of one sign or the other."""
    rng = np.random.default_rng(SITES.index(site))
    n = 400 if site == "north" else 250
    return pd.DataFrame({"y": rng.choice([-2.5, 2.5], n) + rng.normal(size=n), "z": 1.0 + rng.normal(size=n)})


def agents_of(study, run, path):
    made = []
    path.mkdir(exist_ok=True)
    (path / "policy.toml").write_text(draft_policy(study))
    for site in study.sites:
        records(site).to_csv(path / f"{site}.csv", index=False)
        agent = open_agent(
            study, site, path / f"{site}.csv", store=path / site, policy=read_policy(path / "policy.toml"), seed=5,
            ledger=path / f"ledger {site}" / "ledger.db",
        )  # fmt: skip
        agent.join(encode(Welcome(run, study.digest)))
        made.append(agent)
    return made


def sample(study, path, transport=DirectTransport, store=None):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with join(study, lambda study, run, seed: transport(agents_of(study, run, path)), store=store, seed=3) as sites:
            return fp.sample(sites, progress=False)


@pytest.mark.parametrize("points", [12, 40])
def test_another_mode_is_named_if_the_contract_allows_the_points_and_else_the_verdict_says_so(tmp_path, points):
    post = sample(study_of(points), tmp_path)
    if points == 12:
        assert post.settings["modes_searched"] is False and post.verdict
        assert str(post.verdict).startswith(CONVERGED_TO_ONE) and NOT_SEARCHED in str(post.verdict)
        assert f"{LEAST_SEARCHES * MOST_STEPS} points left" in str(post.verdict)
        return
    (mode,) = post.settings["modes"]
    assert abs(mode["at"][0] + 2.5) < 0.2 and mode["share"] is None
    assert str(post.verdict).startswith("NOT converged: ") and "another mode at m = -2.5" in str(post.verdict)
    # Points are counted in rounds.
    assert post.rounds > 12


points = []  # how many each site has counted


class WokenByARefusal(DirectTransport):
    """As a server of streams: a refusal ends the wait for the other sites."""

    def ask(self, requests):
        answers = []
        for agent, request in zip(self.agents, requests, strict=True):
            refused = any(isinstance(decode(one), Refusal) for one in answers if one is not None)
            answers.append(None if request is None or refused else agent.answer(request.data))
        return answers


class Near(WokenByARefusal):
    """The first site releases nothing farther than this from the prior's mean."""

    def __init__(self, agents):
        super().__init__(agents)
        control = agents[0].computation.control
        control._policy = msgspec.structs.replace(control._policy, farthest=1.0)
        points.clear()
        points.append(lambda: [agent.computation.progress.points for agent in agents])


def test_a_site_that_declines_a_point_of_the_search_does_not_end_the_run(tmp_path, monkeypatch):
    post = sample(study_of(40), tmp_path / "one", Near)
    assert post.settings["modes_searched"] is False and str(post.verdict).startswith(CONVERGED_TO_ONE)
    # The control: elsewhere in an opening it does.
    monkeypatch.setattr(remote.RemoteFederation, "explore", contextlib.nullcontext)
    with pytest.raises(Refused, match="TOO_FAR"):
        sample(study_of(40), tmp_path / "other", Near)


@pytest.mark.parametrize("code", ["NARROW_PART", "TOO_MANY_DERIVATIVES", "NOT_FINITE"])
def test_a_site_may_decline_every_point_of_the_search(tmp_path, monkeypatch, code):
    """Control variates are made where sites were asked last: they are asked for the reference's point again."""
    explore = remote.RemoteFederation.explore

    @contextlib.contextmanager
    def refusing(self):
        computation = self.transport.agents[0].computation
        with explore(self), monkeypatch.context() as patch:
            patch.setattr(computation, "compute", lambda *_: (_ for _ in ()).throw(RequestRefused(code)))
            yield

    monkeypatch.setattr(remote.RemoteFederation, "explore", refusing)
    post = sample(study_of(40), tmp_path, WokenByARefusal)
    assert post.settings["modes_searched"] is False and NOT_SEARCHED in str(post.verdict)


def test_a_refusal_that_ends_the_run_is_not_waited_with(tmp_path, monkeypatch):
    """As long as another site is away its answer is none."""
    explore, waits = remote.RemoteFederation.explore, []

    class Away(WokenByARefusal):
        def ask(self, requests):
            waits.append(requests)
            return super().ask(requests) if waits[-1][0] is not None else [None, None]

    @contextlib.contextmanager
    def refusing(self):
        computation = self.transport.agents[0].computation
        with explore(self), monkeypatch.context() as patch:
            patch.setattr(computation, "compute", lambda *_: (_ for _ in ()).throw(RequestRefused("OTHER_RUN")))
            yield

    monkeypatch.setattr(remote.RemoteFederation, "explore", refusing)
    with pytest.raises(Refused, match="OTHER_RUN"):
        sample(study_of(40), tmp_path, Away)


def test_a_search_that_was_killed_goes_on_and_asks_for_no_point_twice(tmp_path):
    """Of both kinds of points: one that a site has declined, and one that all have answered."""
    expected, counted, asked = sample(study_of(40), tmp_path / "expected", Near), points[0](), []
    kills = [5, 9, 14]

    class Killed(Near):
        def ask(self, requests):
            asked.append(requests)
            if kills and len(asked) == kills[0]:
                kills.pop(0)
                raise KeyboardInterrupt
            return super().ask(requests)

    while kills:
        with pytest.raises(KeyboardInterrupt):
            sample(study_of(40), tmp_path / "killed", Killed, tmp_path / "store")
    assert same_bits(sample(study_of(40), tmp_path / "killed", Killed, tmp_path / "store"), expected)
    assert points[0]() == counted


def test_of_a_family_with_one_mode_nothing_is_said(few_rounds):
    post = few_rounds.in_process()
    assert post.settings["modes_searched"] is True and not post.verdict.note
