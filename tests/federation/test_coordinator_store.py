"""A run's paths on disk, block by block."""

import contextlib
import os
import resource
import threading

import numpy as np
import pytest
from tests.paths import block, skeleton, zigzag

from fedpdmc.dynamics import Line
from fedpdmc.errors import InputError
from fedpdmc.federation.coordinator_store import Checkpoint
from fedpdmc.results.path_store import SkeletonStore
from fedpdmc.results.skeleton import join


def filled(checkpoint):
    store = SkeletonStore(Line())
    checkpoint.fill(store)
    return store.skeleton


@pytest.mark.parametrize("make", [skeleton, zigzag])
def test_blocks_come_back_and_go_on(make, tmp_path):
    parts = [make(0), make(1, begin=10.0, end=12.0)]
    first = Checkpoint(tmp_path)
    first.append(block(parts[0]))
    first.write({"n": 1}, {"x": np.arange(3)})
    again = Checkpoint(tmp_path)
    saved = again.read()
    assert saved is not None and saved.facts["n"] == 1 and again.blocks == 1
    np.testing.assert_array_equal(saved.arrays["x"], np.arange(3))
    again.append(block(parts[1]))
    found = filled(again)
    assert found.packed is (make is zigzag)
    for one, other in zip(found, join(parts), strict=True):
        np.testing.assert_array_equal(one, other)


def test_blocks_that_do_not_count_are_cut_off(tmp_path):
    first = Checkpoint(tmp_path)
    first.append(block(zigzag(0)))
    first.write({}, {})
    first.append(block(zigzag(1, begin=10.0, end=11.0)))
    again, last = Checkpoint(tmp_path), zigzag(2, begin=10.0, end=12.0)
    again.read()
    again.append(block(last))
    again.write({}, {})
    for one, other in zip(filled(again), join([zigzag(0), last]), strict=True):
        np.testing.assert_array_equal(one, other)


def kept(folder, blocks=3):
    """A run of some blocks, and its files."""
    checkpoint = Checkpoint(folder)
    for k in range(blocks):
        checkpoint.write({"k": k}, {})
        checkpoint.append(block(zigzag(k, begin=10.0 * k, end=10.0 * (k + 1))))
    checkpoint.write({"k": blocks}, {})
    return sorted(path for path in folder.rglob("*.npz"))


@pytest.mark.parametrize("which", [0, 1, -1])
@pytest.mark.parametrize("how", ["missing", "changed", "symbolic link"])
def test_what_is_missing_or_changed_is_named(which, how, tmp_path):
    path = kept(tmp_path / "run")[which]
    if how == "missing":
        path.unlink()
    elif how == "changed":
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    else:
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError) as error:
        Checkpoint(tmp_path / "run").read()
    assert path.name in error.value.found and how in error.value.found


@pytest.mark.parametrize("name", ["blocks/00000009.npz", "blocks/notes.txt", "state-00000009.npz", "state.npz"])
def test_what_is_too_much_is_named(name, tmp_path):
    kept(tmp_path)
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(InputError, match="does not have|earlier version") as error:
        Checkpoint(tmp_path).read()
    assert name in error.value.found or name == "state.npz"


def test_what_crashes_left_over_is_taken_away(tmp_path):
    """A state that was replaced but not removed, more than once; a block and a state that do not count yet."""
    kept(tmp_path)
    state = next(tmp_path.glob("state-*"))
    number, blocks = int(state.stem.split("-")[1]), len(list((tmp_path / "blocks").glob("*")))
    left = [f"state-{k:08d}.npz" for k in range(number + 2) if k != number] + [f"blocks/{blocks:08d}.npz"]
    for name in left:
        (tmp_path / name).write_bytes(b"cut short")
    found = Checkpoint(tmp_path).read()
    assert found is not None and not any((tmp_path / name).exists() for name in left)


def test_without_its_manifest_nothing_is_read(tmp_path):
    kept(tmp_path)
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(InputError, match="manifest.json missing"):
        Checkpoint(tmp_path).read()


@pytest.mark.parametrize("step", range(8))
def test_killed_between_any_two_writes_it_is_as_it_was_or_as_it_is_to_be(step, tmp_path, monkeypatch):
    """Each file gets its name by one call: the process ends before the n-th of them."""
    checkpoint, calls, replace = Checkpoint(tmp_path), [], os.replace

    def until(*words):
        calls.append(words)
        if len(calls) > step:
            raise KeyboardInterrupt
        replace(*words)

    monkeypatch.setattr(os, "replace", until)
    written = 0
    with contextlib.suppress(KeyboardInterrupt):
        for k in range(3):
            checkpoint.write({"k": k}, {})
            written = k + 1
            checkpoint.append(block(zigzag(k, begin=10.0 * k, end=10.0 * (k + 1))))
    monkeypatch.undo()
    again = Checkpoint(tmp_path)
    saved = again.read()
    assert (0 if saved is None else saved.facts["k"] + 1) == written
    assert again.blocks == max(written - 1, 0)
    again.append(block(zigzag(7, begin=10.0 * again.blocks, end=10.0 * again.blocks + 5)))
    again.write({"k": 9}, {})
    last = Checkpoint(tmp_path)
    assert last.read().facts["k"] == 9 and filled(last).end == 10.0 * (last.blocks - 1) + 5


def test_without_a_descriptor_it_waits_for_one(tmp_path, monkeypatch, caplog):
    """Real ones: the process has used up what it may have, and gets some back while it waits."""
    monkeypatch.setattr("fedpdmc.federation.coordinator_store.PAUSE", 0.05)
    checkpoint, before = Checkpoint(tmp_path), resource.getrlimit(resource.RLIMIT_NOFILE)
    held, most = [], max(int(name) for name in os.listdir("/dev/fd")) + 64
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, before[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        timer = threading.Timer(0.3, lambda: [os.close(held.pop()) for _ in range(20)])
        timer.start()
        checkpoint.write({"k": 1}, {})
        timer.join()
    finally:
        for one in held:
            os.close(one)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert Checkpoint(tmp_path).read().facts["k"] == 1
    assert "waits for a file descriptor" in caplog.text


def test_an_unknown_format_is_refused(tmp_path):
    Checkpoint(tmp_path).write({"format": 9}, {})
    with pytest.raises(InputError, match="format 9"):
        Checkpoint(tmp_path).read()
