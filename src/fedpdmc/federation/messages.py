"""The messages between coordinator and sites as bytes: typed, versioned, with raw float64 buffers.

A message is a head of a size that its kind fixes, and bodies. The head has ``b"FPDM"``, a version, the kind, and of the
kind's fields in their order what has a fixed size: numbers, hashes, the shapes of arrays. The bodies are the numbers of the
arrays, little-endian, and text. Nothing names a type, a function or a file, so nothing can be executed. Decoding allocates
nothing: sizes are checked against what is there, and arrays are read-only views of the message.
"""

from __future__ import annotations

import dataclasses
import hashlib
import struct
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from fedpdmc.errors import WireError
from fedpdmc.federation.codecs import (
    BLOB,
    BLOBS,
    DIGEST,
    DIGEST_BYTES,
    EITHER,
    FLAGS,
    INTEGERS,
    INTEGRAL,
    KEY,
    MATRIX,
    MOST_BYTES,
    REAL,
    REALS,
    REST,
    RUN,
    RUN_BYTES,
    STACK,
    TEXT,
    VECTOR,
    WHOLE,
    WORDS,
    Bodies,
    Codec,
    Reader,
    finite,
)

MAGIC, VERSION = b"FPDM", 4
HEADER = struct.Struct("<4sBB")
NOTHING_ASKED = bytes(DIGEST_BYTES)
# What is said to remain where there is no privacy budget, and the numbers of an account where there is one.
NO_BUDGET, ACCOUNT = -1.0, 13


class Message:
    """A message of one kind; the fields are encoded in the order in which they are declared."""

    kind: ClassVar[int]
    codecs: ClassVar[tuple[Any, ...]]

    def check(self) -> None:
        """Raise `WireError` for fields that do not fit together."""


@dataclass(frozen=True, eq=False)
class Hello(Message):
    """Site → coordinator, first: who it is, the hash of the contract it has approved, and bytes that nobody can foresee."""

    site: str
    study: bytes
    software: str
    nonce: bytes = bytes(DIGEST_BYTES)
    kind, codecs = 1, (TEXT, DIGEST, TEXT, DIGEST)


@dataclass(frozen=True, eq=False)
class Welcome(Message):
    """Coordinator → site: the run that the site is to take part in, and a signature on it and the site's bytes.

    The certificate lets the site look for itself whether it has been revoked, which gRPC does not.
    """

    run: bytes
    study: bytes
    certificate: bytes = b""
    signature: bytes = b""
    kind, codecs = 2, (RUN, DIGEST, BLOB, BLOB)

    @staticmethod
    def proof(run: bytes, hello: Hello) -> bytes:
        """What is signed."""
        return b"fedpdmc welcome" + run + hello.study + hello.nonce + hello.site.encode()


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
    """Coordinator → site: the public coordinates and the site's control variate for all that follows.

    Order 0: no control variate. A point without precision and linear part: the site's own Taylor polynomial there.
    """

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
        size = self.linear.shape[0]
        known = size in ((0, dim) if self.order else (0,)) and self.precision.shape == (size, size)
        if not known or self.point.shape != (dim if self.order else 0,):
            raise WireError("control", f"shapes that do not fit {dim} parameters and order {self.order}")


@dataclass(frozen=True, eq=False)
class Opened(Message):
    """Site → coordinator: done, ready for more; with a privacy budget, the observed time that is left of its account.

    ``account`` is empty without a budget, else the numbers of an `AccountStatus`.
    """

    run: bytes
    sequence: int
    request: bytes
    remaining: float = NO_BUDGET
    account: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0))
    kind, codecs = 6, (RUN, WHOLE, DIGEST, REAL, VECTOR)

    def check(self):
        """Where there is a budget, an account of numbers that are not negative."""
        if len(self.account) != (ACCOUNT if self.remaining >= 0 else 0) or (self.account < 0).any():
            raise WireError("account", f"{len(self.account)} numbers")


@dataclass(frozen=True, eq=False)
class Plans(Message):
    """Coordinator → site: the plans of one round, of the chains that the site is asked about and no others.

    Rows are of the chains in ``chain``, and have as many segments as the longest of them needs.
    """

    run: bytes
    sequence: int
    number: np.ndarray
    start: np.ndarray
    duration: np.ndarray
    velocity: np.ndarray
    chain: np.ndarray
    kind, codecs = 7, (RUN, WHOLE, INTEGERS, MATRIX, MATRIX, STACK, INTEGERS)

    def check(self):
        """Shapes (C,), (C, d), (C, S), (C, S, d), (C,); chains in order; numbers and durations that are not negative."""
        (chains, dim), segments = self.start.shape, self.duration.shape[1]
        if not self.number.shape == self.chain.shape == self.duration.shape[:1] == (chains,):
            raise WireError("plan", "arrays of different numbers of chains")
        if chains and (self.chain[0] < 0 or np.count_nonzero(self.chain[1:] <= self.chain[:-1])):
            raise WireError("chain", "chains that are not in rising order")
        if self.velocity.shape != (chains, segments, dim):
            raise WireError("velocity", f"shape {self.velocity.shape} for {(chains, segments, dim)}")
        if np.count_nonzero(self.number < 0):
            raise WireError("number", "a negative plan number")
        if np.count_nonzero(self.duration < 0):
            raise WireError("duration", "a negative duration")


@dataclass(frozen=True, eq=False)
class Arrivals(Message):
    """Site → coordinator: for each chain the time, whether it rang, and a coordinate or a unit normal.

    ``remaining`` is the observed time that a privacy budget still covers, ``observed`` that of this run, and ``spent`` the
    share of the account that all studies have spent; ``passes`` is how often the site has passed over its records in this
    run, if the contract has it told.
    """

    run: bytes
    sequence: int
    request: bytes
    time: np.ndarray
    rang: np.ndarray
    coordinate: np.ndarray
    normal: np.ndarray
    remaining: float = NO_BUDGET
    observed: float = 0.0
    spent: float = 0.0
    passes: int = 0
    kind, codecs = 8, (RUN, WHOLE, DIGEST, VECTOR, FLAGS, INTEGERS, MATRIX, REAL, REAL, REAL, WHOLE)

    def check(self):
        """One of coordinate and normal for every chain; times and what is spent of an account are not negative."""
        chains = self.time.shape[0]
        if self.rang.shape != (chains,):
            raise WireError("rang", "another number of chains")
        marks = (self.coordinate.shape[0], self.normal.shape[0])
        if marks not in ((chains, 0), (0, chains)):
            raise WireError("mark", f"{marks} coordinates and normals for {chains} chains")
        if np.count_nonzero(self.time < 0):
            raise WireError("time", "a negative time")
        if self.observed < 0 or self.spent < 0:
            raise WireError("account", "a negative amount")


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


@dataclass(frozen=True, eq=False)
class Offer(Message):
    """Coordinator → site: show a public key for secure sums."""

    run: bytes
    sequence: int
    kind, codecs = 11, (RUN, WHOLE)


@dataclass(frozen=True, eq=False)
class Offered(Message):
    """Site → coordinator: its X25519 key, signed with the key of its certificate."""

    run: bytes
    sequence: int
    request: bytes
    public: bytes
    certificate: bytes
    signature: bytes
    kind, codecs = 12, (RUN, WHOLE, DIGEST, KEY, BLOB, BLOB)


@dataclass(frozen=True, eq=False)
class Agree(Message):
    """Coordinator → site: what all sites offered, each an `Offered` as it came, in the order of the contract."""

    run: bytes
    sequence: int
    offers: tuple[bytes, ...]
    kind, codecs = 13, (RUN, WHOLE, BLOBS)


@dataclass(frozen=True, eq=False)
class Masked(Message):
    """Site → coordinator: what `Derive` asked for, under masks that cancel in the sum over all sites."""

    run: bytes
    sequence: int
    request: bytes
    words: np.ndarray
    kind, codecs = 14, (RUN, WHOLE, DIGEST, WORDS)


@dataclass(frozen=True, eq=False)
class Attest(Message):
    """Coordinator → site: sign what your log has come to; and the coordinator's signature for what you signed last.

    It has no place in the sequence. Without entries there was no such thing yet.
    """

    run: bytes
    sequence: int
    entries: int
    seal: bytes
    certificate: bytes
    signature: bytes
    kind, codecs = 15, (RUN, WHOLE, WHOLE, DIGEST, BLOB, BLOB)


@dataclass(frozen=True, eq=False)
class Attested(Message):
    """Site → coordinator: how many entries its log has and the hash of them all, signed with the key of its certificate."""

    run: bytes
    sequence: int
    request: bytes
    entries: int
    seal: bytes
    certificate: bytes
    signature: bytes
    kind, codecs = 16, (RUN, WHOLE, DIGEST, WHOLE, DIGEST, BLOB, BLOB)


@dataclass(frozen=True, eq=False)
class Checked(Message):
    """Coordinator → site that only checks: it would be let in; the clock, in seconds since 1970, and software."""

    clock: float
    software: str
    kind, codecs = 17, (REAL, TEXT)


KINDS: dict[int, type[Message]] = {
    message.kind: message
    for message in (
        Hello, Welcome, Derive, Derivatives, Open, Opened, Plans, Arrivals, Refusal, Farewell, Offer, Offered, Agree, Masked,
        Attest, Attested, Checked,
    )
}  # fmt: skip
ANSWERS = (Derivatives, Opened, Arrivals, Refusal, Offered, Masked, Attested)
# Where all of them say which request they answer.
ASKED = slice(HEADER.size + RUN_BYTES + 8, HEADER.size + RUN_BYTES + 8 + DIGEST_BYTES)


class _Field(NamedTuple):
    """A field: its place in the declaration, its name, its codec and its part of the head."""

    place: int
    name: str
    codec: Codec
    head: slice


class _Layout:
    """The head of one kind of message, padded so that the numbers behind it are aligned; and its fields."""

    def __init__(self, form: type[Message]):
        self.form, names = form, [field.name for field in dataclasses.fields(form)]  # type: ignore[arg-type]
        self.named = tuple(zip(names, form.codecs, strict=True))
        codes, fields, at = HEADER.format, [], 3
        for place, (name, codec) in enumerate(self.named):
            codes, size = codes + codec.head, len(struct.unpack(codec.head, bytes(struct.calcsize(codec.head))))
            fields.append(_Field(place, name, codec, slice(at, at + size)))
            at += size
        self.padding = bytes(-struct.calcsize(codes) % 8)
        self.head = struct.Struct(f"{codes}{len(self.padding)}s")
        # In the order of the bodies: what must be finite first.
        self.fields = tuple(sorted(fields, key=lambda field: field.codec.place))
        self.reals = sum(field.codec.place == REALS for field in fields)


LAYOUTS = {kind: _Layout(form) for kind, form in KINDS.items()}


def encode(message: Message) -> bytes:
    """A message as bytes."""
    layout = LAYOUTS[message.kind]
    heads: list[Any] = [MAGIC, VERSION, message.kind]
    bodies: Bodies = ([], [], [])
    for name, codec in layout.named:
        codec.write(getattr(message, name), heads, bodies)
    return b"".join([layout.head.pack(*heads, layout.padding), *bodies[REALS], *bodies[INTEGRAL], *bodies[REST]])


def decode(data: bytes, most_bytes: int = MOST_BYTES) -> Message:
    """The message that the bytes are, or `WireError`; never anything else, whatever the bytes."""
    if not isinstance(data, bytes):
        raise WireError("message", type(data).__name__)
    if len(data) > most_bytes:
        raise WireError("message", f"{len(data)} bytes where at most {most_bytes} are taken")
    layout = _layout(data)
    if len(data) < layout.head.size:
        raise WireError("message", "a message that ends too early")
    heads, reader = layout.head.unpack_from(data), Reader(data, layout.head.size)
    if heads[-1] != layout.padding:
        raise WireError("message", "bytes between its head and its numbers")
    values: list[Any] = [None] * len(layout.fields)
    for place, name, codec, own in layout.fields[: layout.reals]:
        values[place] = codec.read(heads[own], reader, name)
    if not finite(data, layout.head.size, reader.at):
        wrong = [name for place, name, _, _ in layout.fields[: layout.reals] if not np.isfinite(values[place]).all()]
        raise WireError(wrong[0], "numbers that are not finite")
    for place, name, codec, own in layout.fields[layout.reals :]:
        values[place] = codec.read(heads[own], reader, name)
    if reader.at != len(data):
        raise WireError("message", f"{len(data) - reader.at} bytes after its end")
    message = layout.form(*values)
    message.check()
    return message


def _layout(data: bytes) -> _Layout:
    """That of a message that begins as one."""
    if len(data) < HEADER.size:
        raise WireError("message", "a message that ends too early")
    magic, version, kind = HEADER.unpack_from(data)
    if magic != MAGIC:
        raise WireError("message", "bytes that are no message")
    if version != VERSION:
        raise WireError("message", f"version {version} where {VERSION} is spoken")
    if kind not in LAYOUTS:
        raise WireError("message", f"kind {kind}")
    return LAYOUTS[kind]


def answered(data: bytes, asked: bytes) -> bool:
    """Whether a message may answer the request with this hash, read without the rest; it may if it is no known answer."""
    found = data[ASKED]
    return found == asked or len(found) < DIGEST_BYTES or KINDS.get(data[HEADER.size - 1]) not in ANSWERS


def digest(data: bytes) -> bytes:
    """The hash under which a request's answer is stored."""
    return hashlib.sha256(data).digest()
