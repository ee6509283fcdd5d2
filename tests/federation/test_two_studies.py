"""Two coordinators, each with its own authority and TLS, and a site in both studies: they subtract what it told them."""

import numpy as np
import pytest
from tests.federation.studies import SITE_SEED
from tests.federation.test_derivative_disclosure import CAREFUL, OWN, Guarded
from tests.study.contracts import rows, write_csv

from fedpdmc.certificates import read_credentials
from fedpdmc.errors import Refused
from fedpdmc.federation import messages
from fedpdmc.federation.site_agent.start import open_agent
from fedpdmc.federation.transport import Request
from fedpdmc.study import read_policy

PATIENTS, ADDED = rows("north", 150), ("yes", "verum", 83)


def opened(folder, policy):
    """The agents of both sites, as `fedpdmc site` makes them before it dials."""
    (folder.path / "policy.toml").write_text(policy)
    agents = {}
    try:
        for name in folder.study.sites:
            own = policy + f'dataset = "{name}"\n'
            (folder.path / f"{name}.toml").write_text(own)
            agents[name] = open_agent(
                folder.study, name, folder.data[name], store=folder.path / "stores" / name, seed=SITE_SEED,
                policy=read_policy(folder.path / f"{name}.toml"), credentials=read_credentials(folder.keys(name)),
            )  # fmt: skip
    except BaseException:
        for agent in agents.values():
            agent.log.close()
        raise
    return agents


def told(folder, agents):
    """The mean of the gradients of north at six places next to each other, over the network."""
    found = []
    with folder.listening() as connection, folder.sites(connection, agents):
        for k in range(7):
            message = messages.Derive(connection.run, k + 1, np.full(3, 1e-7 * k))
            found.append(messages.decode(connection.transport.ask([Request.of(message), None])[0]).gradient)
    return np.mean(found[1:], 0)


@pytest.mark.parametrize("compared", [True, False], ids=["compared", "as before"])
def test_two_coordinators_over_the_network_read_nobody_whom_one_study_has_and_the_other_has_not(tmp_path, compared):
    """Without the register they have the outcome, the treatment and, to two years, the age of the patient."""
    first, second = Guarded(tmp_path / "first"), Guarded(tmp_path / "second", OWN.replace("two hospitals", "another"))
    for folder, patients in ((first, PATIENTS), (second, [*PATIENTS, ADDED])):
        write_csv(folder.data["north"], patients)
    before = told(first, opened(first, CAREFUL))
    if compared:
        with pytest.raises(Refused, match="SIMILAR_RECORDS"):
            opened(second, CAREFUL)
        write_csv(second.data["north"], PATIENTS)
        np.testing.assert_allclose(told(second, opened(second, CAREFUL)), before, atol=0.5)
    else:
        change = told(second, opened(second, CAREFUL + "least_difference = 1\n")) - before
        ill = change[0] < 0
        row = change / (0.5 - ill)
        found = ("no", "yes")[int(ill)], ("placebo", "verum")[round(row[1])]
        assert found == ADDED[:2] and abs(10 * row[2] + 50 - ADDED[2]) <= 2
