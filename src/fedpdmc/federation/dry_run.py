"""A dry run of a contract on synthetic records: does it work, and what will the whole run cost."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import polars as pl

from fedpdmc.errors import InputError
from fedpdmc.privacy.ledger import create_ledger
from fedpdmc.study.contract import Study
from fedpdmc.study.read_data import read_records

if TYPE_CHECKING:
    import pandas as pd

    from fedpdmc.results.posterior import Posterior

DURATION = 10.0
MOST_TRIED = 50  # synthetic records generated for each one kept, for a site that depends on some parameters only
GROUP = 5  # synthetic records of a group with an effect
MOST_COUNT = 50.0  # the largest mean of synthetic counts


class DryRun(NamedTuple):
    """The result of a dry run."""

    posterior: Posterior  # of the synthetic records; it has no meaning
    bytes_per_round: int  # sent to and received from a site
    # Upper estimate of the process time, summed over chains, that the whole run will observe of a site.
    observed_time: float
    rounds: int  # estimated requests of the whole run


def synthetic(study: Study, records: int, seed: int) -> pl.DataFrame:
    """Records that satisfy the contract: columns uniform over their bounds or levels, the response around its middle."""
    rng = np.random.default_rng(seed)
    frame: dict[str, list] = {}
    for name, column in study.columns.items():
        if column.type == "key":
            length = GROUP if study.effects else 1
            if study.model.model.source.group:
                length = study.model.model.source.group.length
            frame[name] = [f"group {i // length}" for i in range(records)]
        elif column.type == "level":
            frame[name] = rng.choice(np.asarray(column.levels), records).tolist()
        else:
            least, most = column.bounds
            if column.log:
                values = np.exp(rng.uniform(np.log(least), np.log(most), records))
            else:
                values = rng.uniform(least, most, records)
            frame[name] = (np.floor(values) if column.type == "count" else values).tolist()
    if study.model.design is None:
        return pl.DataFrame(frame)
    response = study.columns[study.design.response_name]
    mean = sum(response.bounds) / 2
    if response.type == "level":
        pass
    elif response.type == "count":
        counts = rng.poisson(min(mean, MOST_COUNT), records)
        if study.model.trials is not None:
            counts = np.minimum(counts, frame[study.model.trials])
        frame[response.name] = np.clip(counts, *response.bounds).astype(float).tolist()
    else:
        low, high = response.bounds
        frame[response.name] = np.clip(rng.normal(mean, (high - low) / 8, records), low, high).tolist()
    return pl.DataFrame(frame)


def _of_site(study: Study, site: str, records: int, seed: int) -> pl.DataFrame:
    """Synthetic records that depend on the site's own parameters only."""
    own = study.coordinates(site)
    if own is None:
        return synthetic(study, records, seed)
    drawn = synthetic(study, MOST_TRIED * records, seed)
    with tempfile.TemporaryDirectory(prefix="fedpdmc-trial-") as folder:
        path = Path(folder) / "records.parquet"
        drawn.write_parquet(path)
        others = np.delete(study.design.matrix(read_records(study, path)), own, axis=1)
    found = drawn.filter(pl.Series("own", np.asarray(~others.any(1)))).head(records)
    if not len(found):
        raise InputError(
            f"study.toml: coordinates: {site}",
            "parameters for which no synthetic records were found",
            "Distinguish sites by the levels of a column.",
        )
    return found


def records_of(study: Study, site: str, records: int, folder: Path) -> pd.DataFrame:
    """Synthetic records of a site, read from a file in a folder as any others."""
    _of_site(study, site, records, 1).write_parquet(folder / "public.parquet")
    return read_records(study, folder / "public.parquet")


def try_study(study: Study, *, records: int = 100, seed: int = 1) -> DryRun:
    """Run a contract in process on synthetic records, for a short time."""
    from fedpdmc.federation.session import connect
    from fedpdmc.results.verdict import ConvergenceWarning
    from fedpdmc.sampling.api import sample

    with tempfile.TemporaryDirectory(prefix="fedpdmc-trial-") as folder:
        data = {}
        for k, name in enumerate(study.sites):
            data[name] = Path(folder) / f"{k}.parquet"
            _of_site(study, name, records, seed + k).write_parquet(data[name])
        ledger = None if study.epsilon is None else create_ledger(Path(folder) / "ledger.db")
        with connect(study, data=data, seed=seed, ledger=ledger) as connection:
            with warnings.catch_warnings():
                # Long enough to estimate costs, not to converge.
                warnings.simplefilter("ignore", ConvergenceWarning)
                # A synthetic study may leave little but the prior.
                warnings.filterwarnings("ignore", message="The noise that the privacy budgets ask for")
                post = sample(connection, duration=None if study.one_shot else DURATION, progress=False)
    bytes_per_round = int(np.max(post.bytes / (post.messages / 2)))
    if study.one_shot:
        return DryRun(post, bytes_per_round, 0.0, post.rounds)
    burn_in = float(post.settings["burn_in"])
    length = study.duration
    if length is None:
        length = float(study.ess or 1000.0) / max(min(post.ess().values()) / post.duration, 1e-3)
    # Arrivals of other sites after the first one are observed too: with long plans this is a factor of the number of sites.
    observed_time = len(study.sites) * study.chains * (burn_in + length)
    rounds = int(np.ceil(post.rounds * (burn_in + length) / (burn_in + post.duration))) + 1
    return DryRun(post, bytes_per_round, observed_time, rounds)
