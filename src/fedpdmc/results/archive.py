"""Posteriors on disk: one zarr folder with the paths, the counts and the provenance."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import zarr

from fedpdmc import dynamics as all_dynamics
from fedpdmc._jax.precision import double_precision
from fedpdmc.dynamics import Dynamics
from fedpdmc.errors import InputError
from fedpdmc.models.user_function import StoredVariables
from fedpdmc.results import manifest
from fedpdmc.results.path_store import DrawStore, RunState, SkeletonStore, Store
from fedpdmc.results.posterior import Posterior
from fedpdmc.results.skeleton import Moments, Skeleton
from fedpdmc.validation import is_plain
from fedpdmc.whitening import Bend, Reference

FORMAT = 4
VARIABLES = "variable-"  # draws of a model's variables: the functions that compute them are not stored
MOST_VARIABLES = 1000  # of each chain
ORIGINS = "origin-of-"  # the variables where the chains started
RUN = "run-"  # arrays of the state of the run, from which it can continue
COUNTS = ("messages", "bytes", "events", "gradient_evaluations", "violations")


def save(post: Posterior, path: Path, state: bool = True) -> None:
    """Write a posterior, replacing one that is there and nothing else."""
    path = Path(os.path.abspath(path))
    if path.is_file() or (path.is_dir() and any(path.iterdir()) and not _is_ours(path)):
        found = f"{path}, which is not a saved posterior"
        raise InputError("save(path)", found, "Give a new path, or one of a posterior.")
    # Written next to its place and then renamed: a process that is killed while saving leaves the previous folder.
    draft, before = (path.with_name(f".{path.name}.{word}") for word in ("new", "old"))
    _write(post, draft, post.run.state() if state and post.run is not None else None)
    manifest.write(draft)
    shutil.rmtree(before, ignore_errors=True)
    if path.exists():
        os.replace(path, before)
    os.replace(draft, path)
    shutil.rmtree(before, ignore_errors=True)


def _write(post: Posterior, path: Path, state: RunState | None) -> None:
    group = zarr.open_group(str(path), mode="w", zarr_format=3)
    group.attrs.update(
        {
            "format": FORMAT,
            "names": list(post.names),
            "rounds": post.rounds,
            "certified": post.certified,
            "privacy": post.privacy,
            "settings": json.loads(json.dumps(post.settings, default=str)),
            "dynamics": {"kind": type(post.dynamics).__name__, "rates": post.dynamics.rates},
            "span": list(post.store.span),
            "keep": "skeleton" if isinstance(post.store, SkeletonStore) else "draws",
        }
    )
    arrays: dict[str, Any] = {name: getattr(post, name) for name in COUNTS}
    arrays |= {"center": post.reference.center, "scale_tril": post.reference.scale_tril}
    arrays |= {} if post.reference.bend is None else post.reference.bend.packed()
    arrays |= {"origin": post.origin} | _store_arrays(post.store)
    if post.transformed:
        # At the turns, if there are any, so that the summary is that of the posterior in memory.
        n = post.diagnostic_draws() if post.store.turns else min(MOST_VARIABLES, post.most_draws)
        variables = post.variables(n)
        group.attrs["variables"] = list(variables)
        arrays |= {VARIABLES + name: value for name, value in variables.items()}
        arrays |= {ORIGINS + name: value for name, value in post.origin_variables().items()}
    if state is not None:
        group.attrs["run"] = {"facts": state.facts, "arrays": sorted(state.arrays)}
        arrays |= {RUN + name: value for name, value in state.arrays.items()}
    for name, value in arrays.items():
        group.create_array(name, data=np.ascontiguousarray(np.asarray(value)))


def _is_ours(path: Path) -> bool:
    try:
        return "format" in zarr.open_group(str(path), mode="r", zarr_format=3).attrs
    except (FileNotFoundError, KeyError, ValueError):
        return False


@double_precision
def read(path: str | Path) -> tuple[Posterior, RunState | None]:
    """A posterior that was saved, and the state of its run; None if that was not saved."""
    try:
        sealed = (Path(path) / manifest.NAME).exists()
        if sealed:
            manifest.check(Path(path), "load(path)")
        group = zarr.open_group(str(path), mode="r", zarr_format=3)
        version = group.attrs["format"]
        if version != FORMAT:
            raise InputError("load(path)", f"format {version}", f"This version of fedpdmc reads format {FORMAT}.")
        if not sealed:
            raise InputError("load(path)", f"{Path(path) / manifest.NAME} missing", manifest.RESTORE)
        return _read(group, sorted(one.name for one in Path(path).iterdir() if one.is_dir()))
    except InputError:
        raise
    except Exception as error:
        # zarr and its codecs raise many kinds of errors for files that are not theirs.
        found = f"{path}, which cannot be read ({type(error).__name__})"
        raise InputError("load(path)", found, "Give a folder that Posterior.save wrote, whole.") from error


def _read(group, stored: list[str]) -> tuple[Posterior, RunState | None]:
    attrs: dict[str, Any] = dict(group.attrs)
    arrays: dict[str, np.ndarray] = {name: np.asarray(group[name][...]) for name in stored}
    kind = getattr(all_dynamics, attrs["dynamics"]["kind"])
    if not issubclass(kind, Dynamics):
        # The file names a class; only known ones are constructed.
        raise TypeError(f"{kind} is not a kind of dynamics")
    dynamics = kind(**attrs["dynamics"]["rates"])
    center, scale = jnp.asarray(arrays["center"]), jnp.asarray(arrays["scale_tril"])
    reference = Reference(center, scale, bend=Bend.unpacked(arrays))
    counts = {name: arrays[name] for name in COUNTS if name in arrays}
    counts |= {name: attrs[name] for name in ("rounds", "certified", "privacy")}
    (begin, end), flow = (float(x) for x in attrs["span"]), dynamics.flow
    if attrs["keep"] == "skeleton":
        begun = -float(attrs["settings"]["burn_in"]) if dynamics.turns else None
        skeleton = Skeleton.read(arrays["offsets"], arrays["knots"], arrays["velocities"], begin, end)
        store: Store = SkeletonStore(flow, skeleton, begun)
    else:
        moments = Moments(float(arrays["time"][0]), arrays["first"], arrays["second"], arrays["pivot"])
        store = DrawStore(flow, moments, arrays["draws"], begin, end, float(arrays["spacing"][0]))
    variables, kept = None, attrs.get("variables", [])
    if kept:
        origins = {name: arrays[ORIGINS + name] for name in kept if ORIGINS + name in arrays}
        variables = StoredVariables({name: arrays[VARIABLES + name] for name in kept}, origins or None)
    names, settings, origin = list(attrs["names"]), attrs["settings"], arrays["origin"]
    if len(names) != len(arrays["center"]) or len(set(names)) != len(names) or not all(map(is_plain, names)):
        raise ValueError("names that are not those of the parameters")
    if not np.isfinite([float(settings["duration"]), float(settings["burn_in"])]).all() or "reference" not in settings:
        raise ValueError("settings that are not those of a run")
    post = Posterior(store, reference, dynamics, names, counts, settings, None, variables, origin)
    # The state of the run, whole or not at all.
    run = attrs.get("run", {"arrays": [""]})
    if any(RUN + name not in arrays for name in run["arrays"]):
        return post, None
    return post, RunState(run["facts"], {name: arrays[RUN + name] for name in run["arrays"]})


def _store_arrays(store: Store) -> dict[str, np.ndarray]:
    if isinstance(store, SkeletonStore):
        skeleton = store.skeleton
        return {"offsets": skeleton.offsets, "knots": skeleton.numbers, "velocities": skeleton.velocities}
    assert isinstance(store, DrawStore)
    moments = store.moments()
    return {
        "draws": store.draws(store.most_draws),
        "time": np.asarray([moments.time]),
        "first": moments.first,
        "second": moments.second,
        "pivot": moments.pivot,
        "spacing": np.asarray([store.spacing]),
    }
