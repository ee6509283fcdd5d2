"""The trial of a model file at a site, in a process of its own that does not have the site's records.

The attacker is the author of the file. Whether a site takes part must not depend on its records: the answer would be a
release that nothing controls. So the file is judged by the contract's declared ranges: it must be continuous whatever the
records are, and a narrow part of a column's range must not carry what releases and events reveal about a parameter.
Tracing and proving may take any time: the process has limits of time and memory.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedpdmc.enclosures import Interval, enclose
from fedpdmc.enclosures.continuity import proof
from fedpdmc.errors import FedPDMCError, InputError
from fedpdmc.federation.dry_run import records_of
from fedpdmc.federation.site_agent.record_contributions import ModelDisclosure
from fedpdmc.models.model_file.records import DESIGN
from fedpdmc.study import Policy, Study, parse_study

# Seconds of work and bytes of address space that a trial may take.
MOST_SECONDS, MOST_BYTES = 60, 16 * 2**30
# Parts into which a column's range is cut, the largest share of one of them, and public points of the parameters.
PARTS, MOST_SHARE, POINTS = 64, 0.5, 4
# Public records for each of a policy's least_records, as many as a site should have.
TIMES = 5
# How far the points are from the prior's mean, in the effect of a column on a predictor.
EFFECT = 2.0


def try_model_file(study: Study, site: str, policy: Policy) -> None:
    """Refuse a contract's model file that takes too long to read, may jump, or could single out a record."""
    if study.model is None or not study.model.file:
        return
    given = pickle.dumps((study.text, study.model.model.text, site, policy, MOST_SECONDS, MOST_BYTES))
    words, found = [sys.executable, "-W", "ignore", "-m", __name__], None
    # A driver of a GPU reserves more address space than the limit.
    options: Any = {"env": os.environ | {"JAX_PLATFORMS": "cpu"}, "timeout": 4 * MOST_SECONDS, "check": False}
    try:
        done = subprocess.run(words, input=given, capture_output=True, **options)
        found = done.stdout.decode(errors="replace").strip() if done.returncode == 0 else None
        why = (done.stderr.decode(errors="replace").strip().splitlines() or [f"status {done.returncode}"])[-1][:200]
    except subprocess.TimeoutExpired:
        why = "it was ended"
    if found is None:
        limits = (
            f"what takes more than {MOST_SECONDS} s of work or {MOST_BYTES >> 30} GiB to be traced and proved ({why})"
        )
        raise InputError("model file", limits, "Give a smaller model: fewer operations, less deeply nested.")
    if found:
        raise InputError("model file", found, "Read it (fedpdmc model show), and ask its author.")


def judge(study: Study, site: str, policy: Policy) -> str:
    """What is wrong with a contract's model file, by public facts alone; empty if nothing is."""
    with tempfile.TemporaryDirectory(prefix="fedpdmc-trial-") as folder:
        records = records_of(study, site, max(PARTS, TIMES * policy.least_records), Path(folder))
    dim = len(study.names)
    mean, scale = study.prior_place or (np.zeros(dim), np.ones(dim))
    reach = np.minimum(scale, EFFECT / np.maximum(np.ones(dim) if study.reach is None else study.reach, 1e-300))
    try:
        model: Any = study.potential(records, site)
        potential: Any = model.sized(dim, site) if study.effects is None else model
        potential.check_continuity()
        if study.epsilon is not None or study.effects is not None:
            return ""
        ModelDisclosure(study, model, policy).check_start()
        few = study.potential(records.iloc[:PARTS], site)
        points = mean + reach * np.random.default_rng(1).uniform(-1, 1, (POINTS, dim))
        return next(filter(None, (_find_narrow_part(study, few, x) for x in points)), "")
    except FedPDMCError as error:
        return str(error)


def _find_narrow_part(study: Study, model: Any, x: np.ndarray) -> str:
    """A part of a column's range in which some value may have too large a share of the gradient; empty if there is none.

    Part k is ``[e_k, e_{k+1}]``. An enclosure of the gradient over it, of a record whose other columns are those of public
    record k, bounds what any value there contributes. It is compared with the sum over the middles of all parts.
    """
    assert study.model is not None
    ranges, design = study.model.declared(study.columns), study.model.design
    terms = () if design is None else design.names
    parts: list[Any] = [] if study.model.group else [(name, None, *ends) for name, ends in ranges["columns"].items()]
    parts += [(DESIGN, j, -ranges["box"][j], ranges["box"][j]) for j in range(len(terms))]
    for name, j, low, high in parts:
        edges = jnp.linspace(low, high, PARTS + 1)

        def slopes(column, name=name, j=j):
            value = column if j is None else model.data[name].at[:, j].set(column)
            return jax.jacfwd(lambda y: model.function.terms(y, model.data | {name: value}))(jnp.asarray(x))

        total = np.abs(np.asarray(slopes((edges[1:] + edges[:-1]) / 2))).sum(0)
        found = enclose(slopes)(Interval(edges[:-1], edges[1:]))
        largest = np.asarray(found.magnitude if isinstance(found, Interval) else abs(found)).max(0)
        share = largest / np.maximum(largest + total, 1e-300)
        if not share.max(initial=0.0) <= MOST_SHARE:
            part = f"one part in {PARTS} of the range of {name if j is None else terms[j]!r} may have a share of"
            return (
                f"{part} {share.max():.3g} of the gradient by {study.names[int(share.argmax())]!r}: it may be a person"
            )
    return ""


if __name__ == "__main__":
    import resource

    text, file, name, terms, seconds, size = pickle.loads(sys.stdin.buffer.read())
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    # Continuous for the public records is not enough: they are not the site's.
    proof.KNOWN_SIZES = (1,)
    with jax.enable_x64(True):
        print(judge(parse_study(text, lambda _: file.encode()), name, terms))
