"""Strict JAX for all tests: shapes are checked wherever the pure parts say them, and 64 bits are never the default."""

from pathlib import Path

import jax
import pytest
from hypothesis import HealthCheck, settings
from jaxtyping import install_import_hook

# Annotated shapes are checked at every call of these, also while JAX traces them. They take the place of JAX's errors of
# rank promotion: arrays of chains, (C, d), with one vector for all, (d,), are what most of these functions compute with.
CHECKED = [
    "fedpdmc._jax.random_streams",
    "fedpdmc.clocks",
    "fedpdmc.dynamics",
    "fedpdmc.potentials",
    "fedpdmc.sampling.coordinator",
    "fedpdmc.sampling.engines",
]

with install_import_hook(CHECKED, "beartype.beartype"):
    import fedpdmc.sampling.factory  # noqa: F401

settings.register_profile(
    "fixed",
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=50,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
settings.load_profile("fixed")


@pytest.fixture(autouse=True, scope="session")
def no_ledger_of_the_user(tmp_path_factory):
    """Nothing is written to the state folder of the user who runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDPDMC_LEDGER", str(tmp_path_factory.mktemp("state") / "ledger.db"))
        yield


@pytest.fixture(autouse=True)
def own_register(no_ledger_of_the_user, tmp_path_factory, monkeypatch):
    """Record sets of one test are not compared with those of another."""
    monkeypatch.setenv("FEDPDMC_LEDGER", str(tmp_path_factory.mktemp("state") / "ledger.db"))


@pytest.fixture(autouse=True)
def thirty_two_bits_outside():
    """No test and no call of the package may leave the caller in 64 bits."""
    assert not jax.config.jax_enable_x64
    yield
    assert not jax.config.jax_enable_x64


# Every compiled program is mapped into memory, and the kernel allows a process 65,530 mappings: then XLA crashes.
MOST_MAPPINGS = 30_000


@pytest.fixture(autouse=True, scope="module")
def room_for_programs():
    """Forget compiled programs before there are too many of them in one process."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_text().count("\n") > MOST_MAPPINGS:
        jax.clear_caches()


@pytest.fixture
def double(thirty_two_bits_outside):
    """For tests of the inner parts, which leave precision to their callers."""
    with jax.enable_x64(True):
        yield
