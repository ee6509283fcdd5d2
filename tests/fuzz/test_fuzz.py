"""Every parser reads what others have written, or raises an error of the package, whatever the bytes."""

import subprocess
import sys

import pytest
from tests.fuzz import engine, soak
from tests.fuzz.engine import Target, fuzz

from fedpdmc.errors import InputError

# Files and keys only: nothing is compiled.
QUICK = ("addresses", "assessments", "bundles", "contracts", "credentials", "csv", "decoder", "formulas", "ledgers",
         "options", "policies", "queries", "seal_files", "site_secrets", "sqlite", "stall_options",
         "status_requests", "logs")  # fmt: skip


def read(data: bytes):
    """A parser with a fault that takes three right bytes to reach."""
    if not data.startswith(b"a"):
        raise InputError("data", "no a", "Begin with an a.")
    if data[1:2] == b"b":
        if data[2:3] == b"c":
            raise KeyError("a fault")
        raise InputError("data", "no c", "Go on.")


def test_the_engine_finds_a_fault_and_where_it_is():
    """A negative control: of what is refused nothing is reported, and a fault is."""
    found = fuzz(Target("faulty", [b"a--", b"--c", b"-b-"], read, (b"a", b"b", b"c")), 3.0, 0)
    assert found.refused
    assert [key.split(" at ")[0] for key in found.violations] == ["KeyError"]


def test_an_input_that_takes_too_long_is_reported(monkeypatch):
    monkeypatch.setattr(engine, "PATIENCE", 0.05)

    def slow(data: bytes):
        while data == b"" or data[:1] != b"s":
            pass

    assert "TooSlow" in next(iter(fuzz(Target("slow", [b"s"], slow), 0.5, 0).violations))


@pytest.mark.parametrize("name", QUICK)
def test_changed_inputs_are_read_or_refused(name, tmp_path):
    target = soak.make(name, tmp_path)
    found = fuzz(target, 0.4, 1)
    assert found.executions and not found.violations, [one.text for one in found.violations.values()]


# Inputs that once raised something else, or left it unsaid.
FOUND = [
    ("addresses", "[::1]:1²".encode()),
    ("options", "north=²".encode()),
    ("formulas", "ill ~ drug ^²".encode()),
    ("csv", b")l"),
    ("csv", b'ill,drug,age2"0\n'),
    ("csv", b"[X\xb5\xc0\xbe\xda\x9bi"),
    ("queries", b"SELECT il\x80\x00\xffents"),
    ("queries", b"SELECT ill, drug, 3+age FROM patients WHERE age > age"),
    ("site_secrets", b"\0"),
    ("site_secrets", b"\0\xa4"),
    ("site_secrets", b"\1short"),
    ("seal_files", b'{"site": "north", "entries": 2, "seal": "zz"}\n'),
    ("seal_files", b"\xeb\n"),
    ("seal_files", b"[]\n"),
    ("credentials", b"\x033f\xf7\n"),
    ("credentials", b"\x05-----BEGIN PRIVATE KEY-----\nMIGH\n-----END PRIVATE KEY-----\n"),
    ("credentials", b"\x06nothing"),
]


@pytest.mark.parametrize(("name", "data"), FOUND)
def test_what_was_found_is_refused_by_name(name, data, tmp_path):
    with pytest.raises(InputError):
        soak.make(name, tmp_path).read(data)


@pytest.mark.long
def test_ten_minutes_of_all_parsers_find_nothing(tmp_path):
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "tests.fuzz.soak",
        str(tmp_path),
        "--seconds",
        "300",
        "--workers",
        "2",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.long
def test_ten_minutes_of_guided_fuzzing_of_messages_find_nothing(tmp_path):
    command = [sys.executable, "-m", "tests.fuzz.guided", "decoder", str(tmp_path / "corpus")]
    limits = ["-max_total_time=600", "-max_len=4096", f"-artifact_prefix={tmp_path}/"]
    done = subprocess.run(command + limits, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
