"""How the fields of a message become bytes and come back: every size is checked before anything is read.

A field has a part of fixed size in the head of its message, and a body behind the head if its size varies.
"""

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
# The order of bodies: real numbers together, so that they are looked at in one go, then integers, then the rest.
REALS, INTEGRAL, REST = range(3)
Bodies = tuple[list, list, list]


class Reader:
    """Takes bodies off the front of what is left of a message, never beyond its end."""

    def __init__(self, data: bytes, at: int):
        self.data, self.at = data, at

    def take(self, size: int, what: str) -> int:
        """Where the next ``size`` bytes begin."""
        begin, self.at = self.at, self.at + size
        if self.at > len(self.data):
            raise WireError(what, "a message that ends too early")
        return begin


class Codec:
    """How one field is written: ``head`` is its part of the head as `struct` puts it, ``place`` where its body lies."""

    head: str
    place = REST

    def write(self, value: Any, heads: list, bodies: Bodies) -> None:
        """Add the field's part of the head and its body."""
        heads.append(value)

    def read(self, heads: tuple, reader: Reader, name: str) -> Any:
        """The field, from its part of the head and its body."""
        return heads[0]


class _Whole(Codec):
    """An integer from 0 to 2**63 − 1."""

    head = "Q"

    def read(self, heads, reader, name):
        (value,) = heads
        if value >= 2**63:
            raise WireError(name, "a number above 2**63 − 1")
        return value


class _Real(Codec):
    """A finite number."""

    head = "d"

    def read(self, heads, reader, name):
        (value,) = heads
        if not math.isfinite(value):
            raise WireError(name, "a number that is not finite")
        return value


class _Raw(Codec):
    """A fixed number of bytes."""

    def __init__(self, size: int):
        self.size, self.head = size, f"{size}s"

    def write(self, value, heads, bodies):
        if len(value) != self.size:
            raise WireError("message", f"{len(value)} bytes where {self.size} belong")
        heads.append(value)


class _Text(Codec):
    """Printable text of at most `MOST_TEXT` bytes."""

    head = "H"

    def write(self, value, heads, bodies):
        raw = value.encode()
        if len(raw) > MOST_TEXT:
            raise WireError("message", f"a text of {len(raw)} bytes")
        heads.append(len(raw))
        bodies[REST].append(raw)

    def read(self, heads, reader, name):
        (size,) = heads
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


class _Blob(Codec):
    """At most `MOST_BLOB` bytes."""

    head = "I"

    def write(self, value, heads, bodies):
        if len(value) > MOST_BLOB:
            raise WireError("message", f"{len(value)} bytes where at most {MOST_BLOB} belong")
        heads.append(len(value))
        bodies[REST].append(value)

    def read(self, heads, reader, name):
        (size,) = heads
        if size > MOST_BLOB:
            raise WireError(name, f"{size} bytes where at most {MOST_BLOB} belong")
        begin = reader.take(size, name)
        return reader.data[begin : begin + size]


class _Blobs(Codec):
    """Several blobs: their number in the head, each with its size in the body."""

    head = "H"
    size = struct.Struct("<I")

    def write(self, value: Sequence[bytes], heads, bodies):
        if len(value) > MOST_BLOBS:
            raise WireError("message", f"{len(value)} parts")
        heads.append(len(value))
        for blob in value:
            sizes: list[int] = []
            body: Bodies = ([], [], [])
            BLOB.write(blob, sizes, body)
            bodies[REST].extend([self.size.pack(*sizes), *body[REST]])

    def read(self, heads, reader, name):
        (count,) = heads
        if count > MOST_BLOBS:
            raise WireError(name, f"{count} parts")
        sizes = (self.size.unpack_from(reader.data, reader.take(4, name)) for _ in range(count))
        return tuple(BLOB.read(size, reader, name) for size in sizes)


class _Array(Codec):
    """Numbers of one type and rank, the shape in the head; flags are 0 or 1, and that reals are finite is for `finite`."""

    def __init__(self, dtype: str, rank: int):
        self.dtype, self.rank, self.head = np.dtype(dtype), rank, f"{rank}I"
        self.place = REALS if self.dtype.kind == "f" else INTEGRAL if self.dtype.itemsize == 8 else REST

    def write(self, value, heads, bodies):
        array = np.ascontiguousarray(value, dtype=self.dtype)
        if array.ndim != self.rank:
            raise WireError("message", f"an array of rank {array.ndim}")
        heads.extend(array.shape)
        # The array itself: its numbers are copied once, into the message.
        bodies[self.place].append(array)

    def read(self, heads, reader, name):
        # Beside a zero the other sizes are free: they are limited by themselves.
        if max(heads) > MOST_BYTES:
            raise WireError(name, f"an array of shape {heads}")
        begin = reader.take(math.prod(heads) * self.dtype.itemsize, name)
        array = np.ndarray(heads, self.dtype, reader.data, begin)
        if self.place == REST and array.size and array.max() > 1:
            raise WireError(name, "flags other than 0 and 1")
        return array


class _Either(_Array):
    """Real numbers in a vector, whose second size is said to be 0, or in a matrix that is not empty."""

    def __init__(self, dtype: str):
        super().__init__(dtype, 2)

    def write(self, value, heads, bodies):
        array = np.ascontiguousarray(value, dtype=self.dtype)
        if array.ndim not in (1, 2) or array.ndim == 2 and not array.shape[1]:
            raise WireError("message", f"an array of shape {array.shape}")
        heads.extend((*array.shape, 0)[:2])
        bodies[self.place].append(array)

    def read(self, heads, reader, name):
        return super().read(heads if heads[1] else heads[:1], reader, name)


def finite(data: bytes, begin: int, end: int) -> bool:
    """Whether all real numbers between two places of a message are finite."""
    count = (end - begin) // 8
    return np.count_nonzero(np.isfinite(np.frombuffer(data, VECTOR.dtype, count, begin))) == count


WHOLE, REAL, TEXT, BLOB = _Whole(), _Real(), _Text(), _Blob()
BLOBS = _Blobs()
RUN, DIGEST, KEY = _Raw(RUN_BYTES), _Raw(DIGEST_BYTES), _Raw(KEY_BYTES)
VECTOR, MATRIX, EITHER, STACK = _Array("<f8", 1), _Array("<f8", 2), _Either("<f8"), _Array("<f8", 3)
INTEGERS, FLAGS, WORDS = _Array("<i8", 1), _Array("u1", 1), _Array("<u8", 1)
