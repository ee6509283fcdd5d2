"""How the fields of a message become bytes and come back: every size is checked before anything is read."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedpdmc.errors import WireError

# The largest message that either side takes in, unless told otherwise.
MOST_BYTES = 64 * 2**20
MOST_TEXT = 256
# The longest certificate, the most of them in one message.
MOST_BLOB, MOST_BLOBS = 2**16, 2**12
RUN_BYTES, DIGEST_BYTES, KEY_BYTES = 16, 32, 32


class Reader:
    """Takes fields off the front of a message, never beyond its end."""

    def __init__(self, data: bytes, at: int):
        self.data, self.at = data, at

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

    def read(self, reader: Reader, name: str) -> int:
        (value,) = self.form.unpack_from(reader.data, reader.take(8, name))
        if value >= 2**63:
            raise WireError(name, "a number above 2**63 − 1")
        return value


class _Real:
    """A finite number."""

    form = struct.Struct("<d")

    def write(self, value: float) -> list[bytes]:
        return [self.form.pack(value)]

    def read(self, reader: Reader, name: str) -> float:
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

    def read(self, reader: Reader, name: str) -> bytes:
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

    def read(self, reader: Reader, name: str) -> str:
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


class _Blob:
    """At most `MOST_BLOB` bytes."""

    form = struct.Struct("<I")

    def write(self, value: bytes) -> list[bytes]:
        if len(value) > MOST_BLOB:
            raise WireError("message", f"{len(value)} bytes where at most {MOST_BLOB} belong")
        return [self.form.pack(len(value)), value]

    def read(self, reader: Reader, name: str) -> bytes:
        (size,) = self.form.unpack_from(reader.data, reader.take(4, name))
        if size > MOST_BLOB:
            raise WireError(name, f"{size} bytes where at most {MOST_BLOB} belong")
        begin = reader.take(size, name)
        return reader.data[begin : begin + size]


class _Blobs:
    """Several blobs."""

    form = struct.Struct("<H")

    def write(self, value: Sequence[bytes]) -> list[bytes]:
        if len(value) > MOST_BLOBS:
            raise WireError("message", f"{len(value)} parts")
        return [self.form.pack(len(value)), *(part for blob in value for part in BLOB.write(blob))]

    def read(self, reader: Reader, name: str) -> tuple[bytes, ...]:
        (count,) = self.form.unpack_from(reader.data, reader.take(2, name))
        if count > MOST_BLOBS:
            raise WireError(name, f"{count} parts")
        return tuple(BLOB.read(reader, name) for _ in range(count))


class _Array:
    """Numbers of one type, of one of the ranks allowed; floats must be finite and flags 0 or 1."""

    def __init__(self, dtype: str, *ranks: int):
        self.dtype, self.ranks = np.dtype(dtype), ranks

    def write(self, value: Any) -> list[bytes | memoryview]:
        array = np.ascontiguousarray(value, dtype=self.dtype)
        if array.ndim not in self.ranks:
            raise WireError("message", f"an array of rank {array.ndim}")
        # Its bytes where they are: they are copied once, into the message.
        return [struct.pack(f"<B{array.ndim}I", array.ndim, *array.shape), array.reshape(-1).view("u1").data]

    def read(self, reader: Reader, name: str) -> np.ndarray:
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
        if self.dtype.itemsize == 1 and count and array.max() > 1:
            raise WireError(name, "flags other than 0 and 1")
        return array


WHOLE, REAL, TEXT, BLOB = _Whole(), _Real(), _Text(), _Blob()
BLOBS = _Blobs()
RUN, DIGEST, KEY = _Raw(RUN_BYTES), _Raw(DIGEST_BYTES), _Raw(KEY_BYTES)
VECTOR, MATRIX, EITHER, STACK = _Array("<f8", 1), _Array("<f8", 2), _Array("<f8", 1, 2), _Array("<f8", 3)
INTEGERS, FLAGS, WORDS = _Array("<i8", 1), _Array("u1", 1), _Array("<u8", 1)
