"""A site's own effects during or after a run: computed from its log, its seed and its records, and written to files."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np

from fedpdmc._jax.precision import double_precision
from fedpdmc.errors import InputError
from fedpdmc.federation import messages
from fedpdmc.federation.site_agent.audit_log import Kind, read_log
from fedpdmc.federation.site_agent.audit_replay import agent_before_run
from fedpdmc.members.latent_handover import latent_names
from fedpdmc.members.latent_posterior import LatentPosterior
from fedpdmc.study import Study


@double_precision
def own_effects(
    study: Study, name: str, source: str | Path, *, store: str | Path, query: str | None = None
) -> LatentPosterior:
    """The effects of a site's groups, drawn together with the shared parameters.

    Parameters
    ----------
    study : Study
    name : str
    source, query
        The records, as `fedpdmc.study.read_records` takes them.
    store : path
        The site's store.

    Raises
    ------
    InputError
        A contract without effects, a store without its seed or without answered plans.
    """
    if study.effects is None:
        raise InputError(
            "study", "a contract without effects of groups", "Give a contract whose formula has effects of groups."
        )
    ended = False
    with tempfile.TemporaryDirectory(prefix="fedpdmc-effects-") as folder:
        agent, secret = agent_before_run(study, name, source, Path(store), query, None, Path(folder))
        agent.log.close()
    if not secret:
        raise InputError("store", "no seed of the site", "Give the store that the site ran with.")
    computation, request, reference = agent.computation, b"", None
    for entry in read_log(store):
        if entry.kind is Kind.REQUEST:
            request = entry.payload
        elif entry.kind is Kind.ANSWER:
            asked = messages.decode(request)
            computation.record(asked, messages.decode(entry.payload))
            ended = False
            if isinstance(asked, messages.Open) and computation.latents is not None:
                reference = computation.reference
                computation.latents.keep_draws()
        elif entry.kind is Kind.NOTE and entry.note["event"] == "farewell":
            ended = True
    if reference is None or computation.latents is None:
        raise InputError("store", "a log without an opened run", "Let the site take part in a run first.")
    if ended:
        computation.latents.finish()
    found = computation.latents.posterior(reference, latent_names(computation.site))
    if not len(found.times):
        raise InputError("store", "a run without draws yet", "Wait until the burn-in is over.")
    return found


def write_effects(found: LatentPosterior, names: tuple[str, ...], out: str | Path) -> tuple[Path, Path]:
    """Write the summary as CSV and the draws as NPZ, readable by their owner only; returns both paths.

    The arrays: ``effects`` (chains, n, k) and ``parameters`` (chains, n, d), draws that belong together; ``time`` (n,), the
    process times at which they were taken; ``effect_names`` and ``parameter_names``.
    """
    out = Path(out)
    if not out.parent.is_dir():
        raise InputError("out", str(out), "Make the folder first.")
    table, draws = out.with_suffix(".csv"), out.with_suffix(".npz")
    for path in (table, draws):
        path.unlink(missing_ok=True)
    with open(os.open(table, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        found.summary().to_csv(file)
    with open(os.open(draws, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        np.savez_compressed(
            file, time=found.times, effects=found.z, parameters=found.theta, effect_names=np.array(found.names),
            parameter_names=np.array(names),
        )  # fmt: skip
    return table, draws
