"""The messages between coordinator and sites as bytes: typed, versioned, with raw float64 buffers.

A message is ``b"FPDM"``, a version, a kind, and the kind's fields in their fixed order; nothing in it names a type, a
function or a file, so nothing in it can be executed. Arrays are their rank, their shape and their numbers, little-endian.
Decoding allocates nothing: sizes are checked against what is there, and arrays are read-only views of the message.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import struct
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from fedpdmc.errors import WireError

MAGIC, VERSION = b"FPDM", 1
HEADER = struct.Struct("<4sBB")
# The largest message that either side takes in, unless told otherwise.
MOST_BYTES = 64 * 2**20
MOST_TEXT = 256
RUN_BYTES, DIGEST_BYTES = 16, 32
NOTHING_ASKED = bytes(DIGEST_BYTES)
# What is said to remain where there is no privacy budget.
NO_BUDGET = -1.0


class _Reader:
    """Takes fields off the front of a message, never beyond its end."""

    def __init__(self, data: bytes):
        self.data, self.at = data, HEADER.size

    def take(self, size: int, what: str) -> int:
        """Where the next ``size`` bytes begin."""
        if size > len(self.data) - self.at:
            raise WireError(what, "a message that ends too early")
        begin, self.at = self.at, self.at + size
        return begin


class _Whole:
    """An integer from 0 to 2**63 − 1."""

    form = struct.Struct("<Q")

    def write(self, value: int) -> list[bytes]:
        return [self.form.pack(value)]

    def read(self, reader: _Reader, name: str) -> int:
        (value,) = self.form.unpack_from(reader.data, reader.take(8, name))
        if value >= 2**63:
            raise WireError(name, "a number above 2**63 − 1")
        return value


class _Real:
    """A finite number."""

    form = struct.Struct("<d")

    def write(self, value: float) -> list[bytes]:
        return [self.form.pack(value)]

    def read(self, reader: _Reader, name: str) -> float:
        (value,) = self.form.unpack_from(reader.data, reader.take(8, name))
        if not np.isfinite(value):
            raise WireError(name, "a number that is not finite")
        return value


class _Raw:
    """A fixed number of bytes."""

    def __init__(self, size: int):
        self.size = size

    def write(self, value: bytes) -> list[bytes]:
        if len(value) != self.size:
            raise WireError("message", f"{len(value)} bytes where {self.size} belong")
        return [value]

    def read(self, reader: _Reader, name: str) -> bytes:
        begin = reader.take(self.size, name)
        return reader.data[begin : begin + self.size]


class _Text:
    """Printable text of at most `MOST_TEXT` bytes."""

    form = struct.Struct("<H")

    def write(self, value: str) -> list[bytes]:
        raw = value.encode()
        if len(raw) > MOST_TEXT:
            raise WireError("message", f"a text of {len(raw)} bytes")
        return [self.form.pack(len(raw)), raw]

    def read(self, reader: _Reader, name: str) -> str:
        (size,) = self.form.unpack_from(reader.data, reader.take(2, name))
        if size > MOST_TEXT:
            raise WireError(name, f"a text of {size} bytes")
        begin = reader.take(size, name)
        try:
            text = reader.data[begin : begin + size].decode()
        except UnicodeDecodeError as error:
            raise WireError(name, "bytes that are not UTF-8") from error
        if not text.isprintable():
            raise WireError(name, "text with control characters")
        return text


class _Array:
    """Numbers of one type, of one of the ranks allowed; floats must be finite and flags 0 or 1."""

    def __init__(self, dtype: str, *ranks: int):
        self.dtype, self.ranks = np.dtype(dtype), ranks

    def write(self, value: Any) -> list[bytes]:
        array = np.ascontiguousarray(value, dtype=self.dtype)
        if array.ndim not in self.ranks:
            raise WireError("message", f"an array of rank {array.ndim}")
        return [struct.pack(f"<B{array.ndim}I", array.ndim, *array.shape), array.tobytes()]

    def read(self, reader: _Reader, name: str) -> np.ndarray:
        rank = reader.data[reader.take(1, name)]
        if rank not in self.ranks:
            raise WireError(name, f"an array of rank {rank}")
        shape = struct.unpack_from(f"<{rank}I", reader.data, reader.take(4 * rank, name))
        # Beside a zero the other sizes are free: they are limited by themselves.
        if max(shape) > MOST_BYTES:
            raise WireError(name, f"an array of shape {shape}")
        count = math.prod(shape)
        begin = reader.take(count * self.dtype.itemsize, name)
        array = np.frombuffer(reader.data, self.dtype, count, begin).reshape(shape)
        if self.dtype.kind == "f" and not np.isfinite(array).all():
            raise WireError(name, "numbers that are not finite")
        if self.dtype.kind == "u" and count and array.max() > 1:
            raise WireError(name, "flags other than 0 and 1")
        return array


WHOLE, REAL, TEXT = _Whole(), _Real(), _Text()
RUN, DIGEST = _Raw(RUN_BYTES), _Raw(DIGEST_BYTES)
VECTOR, MATRIX, EITHER, STACK = _Array("<f8", 1), _Array("<f8", 2), _Array("<f8", 1, 2), _Array("<f8", 3)
INTEGERS, FLAGS = _Array("<i8", 1), _Array("u1", 1)


class Message:
    """A message of one kind; the fields are encoded in the order in which they are declared."""

    kind: ClassVar[int]
    codecs: ClassVar[tuple[Any, ...]]

    def check(self) -> None:
        """Raise `WireError` for fields that do not fit together."""


@dataclass(frozen=True, eq=False)
class Hello(Message):
    """Site → coordinator, first: who it is, and the hash of the contract it has approved."""

    site: str
    study: bytes
    software: str
    kind, codecs = 1, (TEXT, DIGEST, TEXT)


@dataclass(frozen=True, eq=False)
class Welcome(Message):
    """Coordinator → site: the run that the site is to take part in."""

    run: bytes
    study: bytes
    kind, codecs = 2, (RUN, DIGEST)


@dataclass(frozen=True, eq=False)
class Derive(Message):
    """Coordinator → site: the value, gradient and Hessian at a point, to make a reference."""

    run: bytes
    sequence: int
    x: np.ndarray
    kind, codecs = 3, (RUN, WHOLE, VECTOR)


@dataclass(frozen=True, eq=False)
class Derivatives(Message):
    """Site → coordinator: what `Derive` asked for."""

    run: bytes
    sequence: int
    request: bytes
    value: float
    gradient: np.ndarray
    hessian: np.ndarray
    kind, codecs = 4, (RUN, WHOLE, DIGEST, REAL, VECTOR, MATRIX)

    def check(self):
        """A square Hessian of the gradient's size."""
        if self.hessian.shape != 2 * self.gradient.shape:
            raise WireError("hessian", f"shape {self.hessian.shape} beside a gradient of {self.gradient.shape}")


@dataclass(frozen=True, eq=False)
class Open(Message):
    """Coordinator → site: the public coordinates and the site's control variate (order 0: none) for all that follows."""

    run: bytes
    sequence: int
    chains: int
    segments: int
    center: np.ndarray
    scale: np.ndarray
    order: int
    precision: np.ndarray
    linear: np.ndarray
    point: np.ndarray
    kind, codecs = 5, (RUN, WHOLE, WHOLE, WHOLE, VECTOR, EITHER, WHOLE, MATRIX, VECTOR, VECTOR)

    def check(self):
        """Shapes of one dimension; a control variate of that dimension or an empty one."""
        dim = self.center.shape[0]
        if self.scale.shape not in ((dim,), (dim, dim)):
            raise WireError("scale", f"shape {self.scale.shape} for {dim} parameters")
        if self.order > 2:
            raise WireError("order", str(self.order))
        size = dim if self.order else 0
        if self.precision.shape != (size, size) or self.linear.shape != (size,) or self.point.shape != (size,):
            raise WireError("control", f"shapes that do not fit {dim} parameters and order {self.order}")


@dataclass(frozen=True, eq=False)
class Opened(Message):
    """Site → coordinator: ready for plans; with a privacy budget, its excess rate and the observed time that is left."""

    run: bytes
    sequence: int
    request: bytes
    excess: float = 0.0
    remaining: float = NO_BUDGET
    kind, codecs = 6, (RUN, WHOLE, DIGEST, REAL, REAL)


@dataclass(frozen=True, eq=False)
class Plans(Message):
    """Coordinator → site: the plans of all chains of one round."""

    run: bytes
    sequence: int
    number: np.ndarray
    start: np.ndarray
    duration: np.ndarray
    velocity: np.ndarray
    kind, codecs = 7, (RUN, WHOLE, INTEGERS, MATRIX, MATRIX, STACK)

    def check(self):
        """Shapes (C,), (C, d), (C, S), (C, S, d); numbers and durations that are not negative."""
        (chains, dim), segments = self.start.shape, self.duration.shape[1]
        if self.number.shape != (chains,) or self.duration.shape[0] != chains:
            raise WireError("plan", "arrays of different numbers of chains")
        if self.velocity.shape != (chains, segments, dim):
            raise WireError("velocity", f"shape {self.velocity.shape} for {(chains, segments, dim)}")
        if (self.number < 0).any():
            raise WireError("number", "a negative plan number")
        if (self.duration < 0).any():
            raise WireError("duration", "a negative duration")


@dataclass(frozen=True, eq=False)
class Arrivals(Message):
    """Site → coordinator: for each chain the time, whether it rang, and a coordinate or a unit normal.

    ``remaining`` is the observed time that a privacy budget still covers.
    """

    run: bytes
    sequence: int
    request: bytes
    time: np.ndarray
    rang: np.ndarray
    coordinate: np.ndarray
    normal: np.ndarray
    remaining: float = NO_BUDGET
    kind, codecs = 8, (RUN, WHOLE, DIGEST, VECTOR, FLAGS, INTEGERS, MATRIX, REAL)

    def check(self):
        """One of coordinate and normal for every chain; times that are not negative."""
        chains = self.time.shape[0]
        if self.rang.shape != (chains,):
            raise WireError("rang", "another number of chains")
        marks = (self.coordinate.shape[0], self.normal.shape[0])
        if marks not in ((chains, 0), (0, chains)):
            raise WireError("mark", f"{marks} coordinates and normals for {chains} chains")
        if (self.time < 0).any():
            raise WireError("time", "a negative time")


@dataclass(frozen=True, eq=False)
class Refusal(Message):
    """Either way: no, with a code; ``chain`` counts from one, zero for none."""

    run: bytes
    sequence: int
    request: bytes
    code: str
    chain: int
    kind, codecs = 9, (RUN, WHOLE, DIGEST, TEXT, WHOLE)


@dataclass(frozen=True, eq=False)
class Farewell(Message):
    """Coordinator → site: the run is over."""

    run: bytes
    sequence: int
    kind, codecs = 10, (RUN, WHOLE)


KINDS: dict[int, type[Message]] = {
    message.kind: message
    for message in (Hello, Welcome, Derive, Derivatives, Open, Opened, Plans, Arrivals, Refusal, Farewell)
}


def encode(message: Message) -> bytes:
    """A message as bytes."""
    parts = [HEADER.pack(MAGIC, VERSION, message.kind)]
    for field, codec in zip(dataclasses.fields(message), message.codecs, strict=True):  # type: ignore[arg-type]
        parts += codec.write(getattr(message, field.name))
    return b"".join(parts)


def decode(data: bytes, most_bytes: int = MOST_BYTES) -> Message:
    """The message that the bytes are, or `WireError`; never anything else, whatever the bytes."""
    if not isinstance(data, bytes):
        raise WireError("message", type(data).__name__)
    if len(data) > most_bytes:
        raise WireError("message", f"{len(data)} bytes where at most {most_bytes} are taken")
    if len(data) < HEADER.size:
        raise WireError("message", "a message that ends too early")
    magic, version, kind = HEADER.unpack_from(data)
    if magic != MAGIC:
        raise WireError("message", "bytes that are no message")
    if version != VERSION:
        raise WireError("message", f"version {version} where {VERSION} is spoken")
    if kind not in KINDS:
        raise WireError("message", f"kind {kind}")
    form, reader = KINDS[kind], _Reader(data)
    fields = dataclasses.fields(form)  # type: ignore[arg-type]
    values = [codec.read(reader, field.name) for field, codec in zip(fields, form.codecs, strict=True)]
    if reader.at != len(data):
        raise WireError("message", f"{len(data) - reader.at} bytes after its end")
    message = form(*values)
    message.check()
    return message


def answered(data: bytes) -> bytes | None:
    """The hash of the request that a message answers, read without the rest; None if it cannot be an answer."""
    begin = HEADER.size + RUN_BYTES + 8
    kind = KINDS.get(data[HEADER.size - 1]) if len(data) >= begin + DIGEST_BYTES else None
    return data[begin : begin + DIGEST_BYTES] if kind in (Derivatives, Opened, Arrivals, Refusal) else None


def digest(data: bytes) -> bytes:
    """The hash under which a request's answer is stored."""
    return hashlib.sha256(data).digest()
