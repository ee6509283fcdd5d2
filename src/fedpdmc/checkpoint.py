"""A run on disk as it grows: the paths appended block by block, and where the run stands, replaced in one move."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import zarr

from fedpdmc.coordinates import Reference
from fedpdmc.coordinator import State
from fedpdmc.errors import InputError
from fedpdmc.potentials import ControlVariate, Quadratic
from fedpdmc.skeleton import Block, Skeleton, in_two
from fedpdmc.store import Store

# In folders of format 1 a knot is a row of time, position and velocity. They are read, and go on as they are.
FORMAT = 2
FORMATS = (1, FORMAT)
# What is kept of every chain.
STATE = ("a", "v", "t", "number", "events", "objections", "planned")
# Knots in a chunk of the arrays on disk.
CHUNK = 2**14


class Saved(NamedTuple):
    """What was read back: facts as JSON, and arrays by name."""

    facts: dict[str, Any]
    arrays: dict[str, np.ndarray]


class Checkpoint:
    """The folder of one run at its coordinator.

    ``state.npz`` is replaced by renaming a complete file, so that it is always whole; it says how many blocks of
    ``skeleton.zarr`` belong to it, and what a crash left beyond them is cut off.

    Parameters
    ----------
    folder : path
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._state = self.folder / "state.npz"
        self.blocks, self.format = 0, FORMAT
        self._group: Any = None

    def read(self) -> Saved | None:
        """Where the run stood, or None for a new one."""
        if not self._state.exists():
            return None
        try:
            with np.load(self._state, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
            facts = json.loads(str(arrays.pop("facts")))
        except (OSError, ValueError, KeyError) as error:
            raise InputError("store", f"{self._state}, which cannot be read", "Restore it from a copy.") from error
        if facts["format"] not in FORMATS:
            raise InputError("store", f"format {facts['format']}", f"This version of fedpdmc reads formats {FORMATS}.")
        self.blocks, self.format = int(facts["blocks"]), facts["format"]
        return Saved(facts, arrays)

    def write(self, facts: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        """Replace the state: whole or not at all."""
        facts = {"format": self.format, "blocks": self.blocks, **facts}
        draft = self.folder / "state.new"
        with open(draft, "wb") as file:
            np.savez(file, facts=np.asarray(json.dumps(facts)), **arrays)  # type: ignore[arg-type]
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, self._state)

    def append(self, block: Block) -> None:
        """Put a block's knots behind those that are there; it counts once `write` has been called."""
        path = block.skeleton()
        columns = self._columns(path)
        group = self._open(path.chains, columns)
        knots = self._cut(group)
        for name, rows in columns.items():
            array = group[name]
            array.resize((knots + len(rows), array.shape[1]))
            array[knots:] = rows
        for name, row in (("offsets", path.offsets), ("span", np.asarray([path.begin, path.end]))):
            array = group[name]
            array.resize((self.blocks + 1, array.shape[1]))
            array[self.blocks] = row
        self.blocks += 1

    def _columns(self, path: Skeleton) -> dict[str, np.ndarray]:
        """The arrays with one row for each knot."""
        if self.format == 1:
            return {"knots": np.concatenate([path.numbers, path.v], 1)}
        return {"knots": path.numbers, "velocities": path.velocities}

    def fill(self, store: Store) -> None:
        """Give a store the blocks that belong to the state, one after the other."""
        if self.blocks:
            group: Any = zarr.open_group(str(self.folder / "skeleton.zarr"), mode="r")
            offsets, span = group["offsets"][: self.blocks], group["span"][: self.blocks]
            ends = np.cumsum(offsets[:, -1])
            for own, (begin, end), last in zip(offsets, span, ends, strict=True):
                rows = slice(int(last - own[-1]), int(last))
                knots = np.asarray(group["knots"][rows])
                velocities = np.asarray(group["velocities"][rows]) if self.format > 1 else None
                store.append(Skeleton(np.asarray(own), *in_two(knots, velocities), float(begin), float(end)))

    def _open(self, chains: int, columns: dict[str, np.ndarray]) -> Any:
        if self._group is None:
            path = self.folder / "skeleton.zarr"
            if self.blocks:
                self._group = zarr.open_group(str(path), mode="r+")
            else:
                group = zarr.open_group(str(path), mode="w")
                for name, rows in columns.items():
                    width = rows.shape[1]
                    group.create_array(name, shape=(0, width), chunks=(CHUNK, width), dtype=rows.dtype)
                group.create_array("offsets", shape=(0, chains + 1), chunks=(256, chains + 1), dtype="i8")
                group.create_array("span", shape=(0, 2), chunks=(256, 2), dtype="f8")
                self._group = group
        return self._group

    def _cut(self, group: Any) -> int:
        """How many knots belong to the blocks that count."""
        return int(group["offsets"][: self.blocks, -1].sum()) if self.blocks else 0


def pack_state(state: State) -> dict[str, np.ndarray]:
    """The chains' state as arrays."""
    return {f"state_{name}": np.asarray(getattr(state, name)) for name in STATE}


def unpack_state(arrays: dict[str, np.ndarray]) -> State:
    """The chains' state from arrays."""
    return State(*(jnp.asarray(arrays[f"state_{name}"]) for name in STATE))


def pack_reference(reference: Reference) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """A reference with its control variates, as facts and arrays."""
    arrays = {"center": np.asarray(reference.center), "scale_tril": np.asarray(reference.scale_tril)}
    control = reference.control or {}
    for k, (quadratic, point, _) in enumerate(control.values()):
        arrays[f"precision_{k}"], arrays[f"linear_{k}"] = np.asarray(quadratic.precision), np.asarray(quadratic.linear)
        arrays[f"point_{k}"] = np.asarray(point)
    facts = {
        "rounds": reference.rounds,
        "bytes": reference.bytes,
        "orders": None if reference.control is None else {name: own.order for name, own in control.items()},
    }
    return facts, arrays


def unpack_reference(facts: dict[str, Any], arrays: dict[str, np.ndarray]) -> Reference:
    """A reference from facts and arrays."""
    control = None
    if facts["orders"] is not None:
        control = {
            name: ControlVariate(
                Quadratic(jnp.asarray(arrays[f"precision_{k}"]), jnp.asarray(arrays[f"linear_{k}"])),
                jnp.asarray(arrays[f"point_{k}"]),
                order,
            )
            for k, (name, order) in enumerate(facts["orders"].items())
        }
    center, scale = jnp.asarray(arrays["center"]), jnp.asarray(arrays["scale_tril"])
    return Reference(center, scale, control, facts["rounds"], facts["bytes"])
