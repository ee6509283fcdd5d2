"""Codecs of message fields. Every size is checked before anything is read.

A field has a part of fixed size in the header of its message, and a body after the header if its size varies.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np

from fedpdmc.errors import WireError

# The largest message that either side accepts.
MOST_BYTES = 64 * 2**20
MOST_TEXT = 256
# The longest certificate, and the largest number of them in one message.
MOST_BLOB, MOST_BLOBS = 2**16, 2**12
RUN_BYTES, DIGEST_BYTES, KEY_BYTES = 16, 32, 32
# The order of bodies: real numbers together, so that one check covers all of them, then integers, then the rest.
REALS, INTEGRAL, REST = range(3)
Bodies = tuple[list, list, list]


class Reader:
    """Reads bodies from a message one after the other, never beyond its end."""

    def __init__(self, data: bytes, at: int):
        self.data, self.at = data, at

    def take(self, size: int, what: str) -> int:
        """Where the next ``size`` bytes begin."""
        begin, self.at = self.at, self.at + size
        if self.at > len(self.data):
            raise WireError(what, "a message that ends too early")
        return begin


class Codec:
    """Encoding of one field: ``head`` is the `struct` format of its part of the header, ``place`` the group of its body."""

    head: str
    place = REST

    def write(self, value: Any, heads: list, bodies: Bodies) -> None:
        """Append the field's part of the header and its body."""
        heads.append(value)

    def read(self, heads: tuple, reader: Reader, name: str) -> Any:
        """The field, from its part of the header and its body."""
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
            raise WireError("message", f"{len(value)} bytes instead of {self.size}")
        heads.append(value)


class _Blob(Codec):
    """A limited number of bytes."""

    head, most = "I", MOST_BLOB

    def write(self, value, heads, bodies):
        self._check(len(value), "message")
        heads.append(len(value))
        bodies[REST].append(value)

    def read(self, heads, reader, name):
        (size,) = heads
        self._check(size, name)
        begin = reader.take(size, name)
        return reader.data[begin : begin + size]

    def _check(self, size: int, name: str) -> None:
        if size > self.most:
            raise WireError(name, f"{size} bytes; the maximum is {self.most}")


class _Text(_Blob):
    """Printable text."""

    head, most = "H", MOST_TEXT

    def write(self, value, heads, bodies):
        super().write(value.encode(), heads, bodies)

    def read(self, heads, reader, name):
        try:
            text = super().read(heads, reader, name).decode()
        except UnicodeDecodeError as error:
            raise WireError(name, "bytes that are not UTF-8") from error
        if not text.isprintable():
            raise WireError(name, "text with control characters")
        return text


class _Blobs(Codec):
    """Several blobs of any size: their number in the header, each with its size in the body."""

    head = "H"
    size = struct.Struct("<I")

    def write(self, value: Sequence[bytes], heads, bodies):
        if len(value) > MOST_BLOBS:
            raise WireError("message", f"{len(value)} parts")
        heads.append(len(value))
        for blob in value:
            bodies[REST].extend([self.size.pack(len(blob)), blob])

    def read(self, heads, reader, name):
        (count,) = heads
        if count > MOST_BLOBS:
            raise WireError(name, f"{count} parts")
        sizes = (self.size.unpack_from(reader.data, reader.take(4, name))[0] for _ in range(count))
        begins = ((reader.take(size, name), size) for size in sizes)
        return tuple(reader.data[begin : begin + size] for begin, size in begins)


class _Array(Codec):
    """Numbers of one type and rank, the shape in the header. Flags are 0 or 1. `finite` checks real numbers."""

    def __init__(self, dtype: str, rank: int):
        self.dtype, self.rank, self.head = np.dtype(dtype), rank, f"{rank}I"
        self.place = REALS if self.dtype.kind == "f" else INTEGRAL if self.dtype.itemsize == 8 else REST

    def write(self, value, heads, bodies):
        array = np.ascontiguousarray(value, dtype=self.dtype)
        if array.ndim != self.rank:
            raise WireError("message", f"an array of rank {array.ndim}")
        heads.extend(array.shape)
        # The array itself, so that its numbers are copied once, into the message.
        bodies[self.place].append(array)

    def read(self, heads, reader, name):
        # If one size is zero, the product does not limit the others.
        if max(heads) > MOST_BYTES:
            raise WireError(name, f"an array of shape {heads}")
        begin = reader.take(math.prod(heads) * self.dtype.itemsize, name)
        array = np.ndarray(heads, self.dtype, reader.data, begin)
        if self.dtype.itemsize == 1 and array.size and array.max() > 1:
            raise WireError(name, "flags other than 0 and 1")
        return array


class _VectorOrMatrix(_Array):
    """Real numbers in a vector, whose second size is given as 0, or in a matrix that is not empty."""

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
    """Whether all real numbers between two offsets of a message are finite."""
    count = (end - begin) // 8
    return np.count_nonzero(np.isfinite(np.frombuffer(data, VECTOR.dtype, count, begin))) == count


BLOB, VECTOR = _Blob(), _Array("<f8", 1)
# The types of fields, each with its codec.
Whole = Annotated[int, _Whole()]
Real = Annotated[float, _Real()]
Text = Annotated[str, _Text()]
Blob = Annotated[bytes, BLOB]
Blobs = Annotated[tuple[bytes, ...], _Blobs()]
RunId = Annotated[bytes, _Raw(RUN_BYTES)]
Digest = Annotated[bytes, _Raw(DIGEST_BYTES)]
Key = Annotated[bytes, _Raw(KEY_BYTES)]
Vector = Annotated[np.ndarray, VECTOR]
Matrix = Annotated[np.ndarray, _Array("<f8", 2)]
VectorOrMatrix = Annotated[np.ndarray, _VectorOrMatrix("<f8")]
Stack = Annotated[np.ndarray, _Array("<f8", 3)]
Integers = Annotated[np.ndarray, _Array("<i8", 1)]
Flags = Annotated[np.ndarray, _Array("u1", 1)]
Counts = Annotated[np.ndarray, _Array("<u4", 1)]
Words = Annotated[np.ndarray, _Array("<u8", 1)]
