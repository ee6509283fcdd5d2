"""Services of a site: its agent on the network, and an app for Flower."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path

from fedpdmc.certificates import COORDINATOR, read_credentials
from fedpdmc.errors import InputError
from fedpdmc.federation.site_agent.start import open_agent
from fedpdmc.operations.status import SiteBoard, Watching, watched
from fedpdmc.study import Policy, Study


def serve_site(
    study: Study,
    name: str,
    source: str | Path,
    *,
    coordinator: str,
    keys: str | Path | None,
    store: str | Path,
    policy: Policy,
    query: str | None = None,
    seed: int | None = None,
    ledger: str | Path | None = None,
    seeded_for_tests: bool = False,
    wait: Callable[[float], bool] | None = None,
    server_name: str = COORDINATOR,
    watching: Watching | None = None,
) -> None:
    """Take part in a study: read the records, dial the coordinator, and answer until the run has ended.

    Parameters other than these are those of `fedpdmc.federation.site_agent.start.open_agent`.

    Parameters
    ----------
    coordinator : str
        ``host:port``.
    keys : path or None
        The site's folder of keys; None for a plain connection on loopback.
    wait : callable, optional
        As for `fedpdmc.federation.grpc.client.serve`.
    server_name : str
        The name that the coordinator's certificate must have, if an institution's own authority has signed it.
    watching : Watching, optional
        A status page, and the reaction to a coordinator that stops responding.
    """
    from fedpdmc.federation.grpc.client import serve
    from fedpdmc.federation.grpc.tls import DialSettings

    own = None if keys is None else read_credentials(keys)
    if own is None and study.summed:
        raise InputError("keys", "none", "The contract requires secure sums: give the site's folder of keys.")
    agent = open_agent(
        study, name, source, query=query, policy=policy, store=store, seed=seed, ledger=ledger, credentials=own,
        seeded_for_tests=seeded_for_tests,
    )  # fmt: skip
    settings = DialSettings(policy.hours, server_name, policy.certificates.get(COORDINATOR))
    try:
        with contextlib.nullcontext() if watching is None else watched(SiteBoard(agent, coordinator), watching):
            serve(agent, coordinator, own, wait, settings)
        logging.getLogger("fedpdmc.site").info("%s", agent.progress())
    finally:
        agent.log.close()


FLOWER_PROJECT = """\
[project]
name = "fedpdmc-study"
version = "1.0.0"
description = "A fedpdmc study on Flower"
license = "Apache-2.0"
dependencies = []

[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[tool.hatch.build.targets.wheel]
packages = ["."]

[tool.flwr.app]
publisher = "fedpdmc"

[tool.flwr.app.components]
serverapp = "fedpdmc_study:server_app"
clientapp = "fedpdmc_study:client_app"

# Paths on the machine of the ServerApp. A site's own are in its SuperNode's --node-config.
[tool.flwr.app.config]
study = "study.toml"
keys = "keys/coordinator"
store = "run"
seed = -1
"""


def write_flower_app(folder: str | Path) -> None:
    """Write a Flower app that only imports the package's ServerApp and ClientApp."""
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()):
        raise InputError("folder", f"{folder}, which is not empty", "Give a new folder.")
    (folder / "fedpdmc_study").mkdir(parents=True)
    (folder / "pyproject.toml").write_text(FLOWER_PROJECT)
    text = '"""A fedpdmc study on Flower."""\n\nfrom fedpdmc.federation.flower import client_app, server_app\n'
    (folder / "fedpdmc_study" / "__init__.py").write_text(text + '\n__all__ = ["client_app", "server_app"]\n')
