"""Fuzzing by mutation of valid samples, guided by the lines of the package that an input reaches for the first time."""

import contextlib
import hashlib
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import fedpdmc
from fedpdmc.errors import FedPDMCError

PACKAGE = str(Path(fedpdmc.__file__).parent)
# No input may take longer, in seconds.
PATIENCE = 20.0
# Inputs that are tried, however long they take.
LEAST = 20
MOST_CORPUS, MOST_BYTES = 4000, 1 << 17
NUMBERS = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 2**63 - 1, 2**64 - 1)
TEXTS = (
    b"\0", b"\xff", b"\n", b"\r\n", b'"', b"'''", b"[", b"]]", b"{", b"}", b"=", b",", b"#", b"\\u0000", b"-1", b"1e999",
    b"nan", b"inf", b"-inf", b"true", b"null", b"None", b"9" * 400, b"1e-320", b"0x7f", "²".encode(), "ß".encode(),
    "а".encode(), b"\xed\xa0\x80", b"\xf0\x9f\x92\xa9", b"\xe2\x80\xae", b"..", b"/", b"%s", b"{0}", b"a" * 300,
    b"[" * 200,    b"{}", b"[]", b"1979-05-27",
)  # fmt: skip


class TooSlow(Exception):
    """An input took longer than `PATIENCE`."""


@dataclass
class Target:
    """Something that reads bytes which others have written.

    Attributes
    ----------
    name : str
    samples : list of bytes
        Valid inputs.
    read : callable
        Reads an input. It may raise errors of the package and nothing else.
    words : tuple of bytes
        What inputs are made of.
    """

    name: str
    samples: list[bytes]
    read: Callable[[bytes], object]
    words: tuple[bytes, ...] = ()


@dataclass
class Violation:
    """An input that raised something else."""

    target: str
    data: bytes
    text: str


@dataclass
class Findings:
    """What the fuzzing of one target has shown."""

    target: str
    executions: int = 0
    refused: int = 0
    lines: int = 0
    corpus: int = 0
    seconds: float = 0.0
    violations: dict[str, Violation] = field(default_factory=dict)


class Lines:
    """The lines of the package that have been reached, and how many of them since last asked."""

    def __init__(self):
        self.seen: set[tuple[str, int]] = set()
        self._fresh = 0

    def __enter__(self):
        if sys.version_info >= (3, 12):
            self._monitor = sys.monitoring
            self._monitor.use_tool_id(self._monitor.COVERAGE_ID, "fuzz")
            self._monitor.register_callback(self._monitor.COVERAGE_ID, self._monitor.events.LINE, self._line)
            self._monitor.set_events(self._monitor.COVERAGE_ID, self._monitor.events.LINE)
        else:
            sys.settrace(self._call)
        return self

    def __exit__(self, *_):
        if sys.version_info >= (3, 12):
            self._monitor.set_events(self._monitor.COVERAGE_ID, 0)
            self._monitor.free_tool_id(self._monitor.COVERAGE_ID)
        else:
            sys.settrace(None)

    def _add(self, file: str, line: int) -> None:
        if (file, line) not in self.seen:
            self.seen.add((file, line))
            self._fresh += 1

    def _line(self, code, line):
        if code.co_filename.startswith(PACKAGE):
            self._add(code.co_filename, line)
        # Every line tells once, so that later inputs run at full speed.
        return self._monitor.DISABLE

    def _call(self, frame, event, argument):
        return self._trace if frame.f_code.co_filename.startswith(PACKAGE) else None

    def _trace(self, frame, event, argument):
        if event == "line":
            self._add(frame.f_code.co_filename, frame.f_lineno)
        return self._trace

    def fresh(self) -> int:
        """Lines reached for the first time since the last call."""
        found, self._fresh = self._fresh, 0
        return found


def mutated(rng: random.Random, corpus: Sequence[bytes], words: Sequence[bytes]) -> bytes:
    """An input with a few random changes."""
    data = bytearray(rng.choice(corpus))
    for _ in range(1 + int(rng.expovariate(0.6))):
        place, size = rng.randrange(len(data) + 1), 1 + int(rng.expovariate(0.2))
        kind = rng.randrange(10)
        if kind == 0 and data:
            data[place % len(data)] ^= 1 << rng.randrange(8)
        elif kind == 1 and data:
            data[place % len(data)] = rng.randrange(256)
        elif kind == 2:
            del data[place : place + size]
        elif kind == 3:
            data[place:place] = rng.randbytes(size)
        elif kind == 4:
            wide = rng.choice((1, 2, 4, 8))
            number = (rng.choice(NUMBERS) + rng.choice((0, 0, 0, -1, 1))) % 256**wide
            data[place : place + wide] = number.to_bytes(wide, "little")
        elif kind in (5, 6):
            word = rng.choice(words if words and rng.random() < 0.6 else TEXTS)
            data[place : place + rng.choice((0, len(word), size))] = word
        elif kind == 7:
            other = rng.choice(corpus)
            start = rng.randrange(len(other) + 1)
            data[place : place + rng.choice((0, size))] = other[start : start + rng.choice((size, 10 * size))]
        elif kind == 8:
            data[place:place] = data[place : place + 5 * size] * rng.choice((1, 2, 20))
        else:
            # A line, or a part of one, elsewhere.
            pieces = bytes(data).split(rng.choice((b"\n", b",", b" ")))
            if len(pieces) > 1:
                one, two = rng.randrange(len(pieces)), rng.randrange(len(pieces))
                pieces[one], pieces[two] = pieces[two], pieces[one]
                data = bytearray(rng.choice((b"\n", b",", b" ")).join(pieces))
    return bytes(data[:MOST_BYTES])


def _late(*_):
    raise TooSlow


def tried(target: Target, data: bytes) -> BaseException | None:
    """What an input raised; None if it was read."""
    signal.setitimer(signal.ITIMER_REAL, PATIENCE)
    try:
        target.read(data)
        return None
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return error
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)


def fuzz(target: Target, seconds: float, seed: int) -> Findings:
    """Mutate the samples of a target for a time; inputs that reach new lines are mutated again."""
    rng, corpus, found = random.Random(f"{target.name} {seed}"), list(target.samples), Findings(target.name)
    before = signal.signal(signal.SIGALRM, _late)
    try:
        for sample in target.samples:
            if (error := tried(target, sample)) is not None and not isinstance(error, FedPDMCError):
                raise AssertionError(f"{target.name}: a sample is not read: {sample[:200]!r}") from error
        begin = time.monotonic()
        with Lines() as lines:
            while found.executions < LEAST or time.monotonic() < begin + seconds:
                data = mutated(rng, corpus, target.words)
                error = tried(target, data)
                found.executions += 1
                if lines.fresh() and len(corpus) < MOST_CORPUS:
                    corpus.append(data)
                if isinstance(error, FedPDMCError):
                    found.refused += 1
                elif error is not None:
                    _note(found, target, data, error)
            found.lines = len(lines.seen)
    finally:
        signal.signal(signal.SIGALRM, before)
    found.corpus, found.seconds = len(corpus), time.monotonic() - begin
    return found


def _note(found: Findings, target: Target, data: bytes, error: BaseException) -> None:
    """Keep the shortest input for each place from which an error comes."""
    frames = [one for one in traceback.extract_tb(error.__traceback__) if one.filename.startswith(PACKAGE)]
    where = f"{frames[-1].filename.removeprefix(PACKAGE)}:{frames[-1].lineno}" if frames else "outside the package"
    key = f"{type(error).__name__} at {where}"
    if key not in found.violations or len(found.violations[key].data) > len(data):
        found.violations[key] = Violation(target.name, data, "".join(traceback.format_exception(error)))


def keep(found: Findings, folder: Path) -> None:
    """Write the inputs of violations, and what they raised, to a folder."""
    for violation in found.violations.values():
        name = f"{found.target}-{hashlib.sha256(violation.data).hexdigest()[:12]}".replace(" ", "-")
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(violation.data)
            (folder / f"{name}.txt").write_text(violation.text)
