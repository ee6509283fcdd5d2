"""The messages between coordinator and sites as bytes: typed, versioned, with raw float64 buffers.

A message consists of a header, whose size depends on the message's kind only, and bodies. The header has ``b"FPDM"``, a
version, the kind, and for each field the part of fixed size: numbers, hashes, shapes of arrays. The bodies are the arrays'
numbers, little-endian, and text. Nothing in a message names a type, a function or a file, so nothing can be executed.
Decoding allocates nothing: sizes are checked against the message's length, and arrays are read-only views of the message.
"""

from __future__ import annotations

import dataclasses
import hashlib
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeVar, dataclass_transform, get_type_hints

import numpy as np

from fedpdmc.errors import WireError
from fedpdmc.federation.codecs import (
    DIGEST_BYTES,
    INTEGRAL,
    MOST_BYTES,
    REALS,
    REST,
    RUN_BYTES,
    Blob,
    Blobs,
    Bodies,
    Codec,
    Digest,
    Flags,
    Integers,
    Key,
    Matrix,
    Reader,
    Real,
    RunId,
    Stack,
    Text,
    Vector,
    VectorOrMatrix,
    Whole,
    Words,
    finite,
)

MAGIC, VERSION = b"FPDM", 4
HEADER = struct.Struct("<4sBB")
NOTHING_ASKED = bytes(DIGEST_BYTES)
# ``remaining`` without a privacy budget, and the length of ``account`` with one.
NO_BUDGET, ACCOUNT = -1.0, 13
KINDS: dict[int, type[Message]] = {}


class Message:
    """A message of one kind. Its fields are encoded in the order of their declaration, each by the codec of its type."""

    kind: ClassVar[int]

    def check(self) -> None:
        """Raise `WireError` for fields that are not consistent with each other."""


Form = TypeVar("Form", bound=type[Message])


@dataclass_transform(frozen_default=True, eq_default=False)
def message(kind: int) -> Callable[[Form], Form]:
    """Make a class the message of this kind: a frozen dataclass that `encode` and `decode` know."""

    def register(form: Form) -> Form:
        KINDS[kind] = made = dataclass(frozen=True, eq=False)(form)
        made.kind = kind
        return made

    return register


@dataclass(frozen=True, eq=False)
class SiteRequest(Message):
    """Coordinator → site: a message that is answered."""

    run: RunId
    sequence: Whole


@dataclass(frozen=True, eq=False)
class SiteAnswer(Message):
    """Site → coordinator: the answer to the request whose hash is ``request``."""

    run: RunId
    sequence: Whole
    request: Digest


@message(1)
class Hello(Message):
    """Site → coordinator, first: the site's name, the hash of its approved contract, and a random nonce."""

    site: Text
    study: Digest
    software: Text
    nonce: Digest = bytes(DIGEST_BYTES)


@message(2)
class Welcome(Message):
    """Coordinator → site: the id of the run, and a signature of it and the site's nonce.

    With the certificate the site can check for itself whether it was revoked, which gRPC does not do.
    """

    run: RunId
    study: Digest
    certificate: Blob = b""
    signature: Blob = b""

    @staticmethod
    def proof(run: bytes, hello: Hello) -> bytes:
        """The bytes that are signed."""
        return b"fedpdmc welcome" + run + hello.study + hello.nonce + hello.site.encode()


@message(3)
class Derive(SiteRequest):
    """Coordinator → site: compute value, gradient and Hessian at a point, for the reference."""

    x: Vector


@message(4)
class Derivatives(SiteAnswer):
    """Site → coordinator: the answer to `Derive`."""

    value: Real
    gradient: Vector
    hessian: Matrix

    def check(self):
        """A square Hessian of the gradient's size."""
        if self.hessian.shape != 2 * self.gradient.shape:
            raise WireError("hessian", f"shape {self.hessian.shape} with a gradient of shape {self.gradient.shape}")


@message(5)
class Open(SiteRequest):
    """Coordinator → site: the whitened coordinates and the site's control variate for the rest of the run.

    Order 0: no control variate. A point without precision and linear part: the site's own Taylor polynomial at this point.
    """

    chains: Whole
    segments: Whole
    center: Vector
    scale: VectorOrMatrix
    order: Whole
    precision: Matrix
    linear: Vector
    point: Vector

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


@message(6)
class Opened(SiteAnswer):
    """Site → coordinator: done. With a privacy budget: the observed time that remains, and the account.

    ``account`` is empty without a budget, else the numbers of an `AccountStatus`.
    """

    remaining: Real = NO_BUDGET
    account: Vector = dataclasses.field(default_factory=lambda: np.zeros(0))

    def check(self):
        """With a budget, an account of numbers that are not negative."""
        if len(self.account) != (ACCOUNT if self.remaining >= 0 else 0) or (self.account < 0).any():
            raise WireError("account", f"{len(self.account)} numbers")


@message(7)
class Plans(SiteRequest):
    """Coordinator → site: the plans of one round, for those chains that the site is asked about.

    Row k is the plan of chain ``chain[k]``. All rows have as many segments as the longest plan needs.
    """

    number: Integers
    start: Matrix
    duration: Matrix
    velocity: Stack
    chain: Integers

    def check(self):
        """Shapes (C,), (C, d), (C, S), (C, S, d), (C,); chains in order; numbers and durations that are not negative."""
        (chains, dim), segments = self.start.shape, self.duration.shape[1]
        if not self.number.shape == self.chain.shape == self.duration.shape[:1] == (chains,):
            raise WireError("plan", "arrays with different numbers of chains")
        if chains and (self.chain[0] < 0 or np.count_nonzero(self.chain[1:] <= self.chain[:-1])):
            raise WireError("chain", "chains that are not in increasing order")
        if self.velocity.shape != (chains, segments, dim):
            raise WireError("velocity", f"shape {self.velocity.shape} for {(chains, segments, dim)}")
        if np.count_nonzero(self.number < 0):
            raise WireError("number", "a negative plan number")
        if np.count_nonzero(self.duration < 0):
            raise WireError("duration", "a negative duration")


@message(8)
class Arrivals(SiteAnswer):
    """Site → coordinator: for each chain the time, whether there was an arrival, and its coordinate or unit normal.

    ``remaining`` is the observed time that a privacy budget still covers, ``observed`` that of this run, and ``spent`` the
    share of the account that all studies have spent. ``passes`` counts the site's passes over its records in this run, if
    the contract allows it.
    """

    time: Vector
    rang: Flags
    coordinate: Integers
    normal: Matrix
    remaining: Real = NO_BUDGET
    observed: Real = 0.0
    spent: Real = 0.0
    passes: Whole = 0

    def check(self):
        """One coordinate or normal for every chain; no negative times and amounts."""
        chains = self.time.shape[0]
        if self.rang.shape != (chains,):
            raise WireError("rang", "a different number of chains")
        marks = (self.coordinate.shape[0], self.normal.shape[0])
        if marks not in ((chains, 0), (0, chains)):
            raise WireError("mark", f"{marks} coordinates and normals for {chains} chains")
        if np.count_nonzero(self.time < 0):
            raise WireError("time", "a negative time")
        if self.observed < 0 or self.spent < 0:
            raise WireError("account", "a negative amount")


@message(9)
class Refusal(SiteAnswer):
    """Either way: refused, with a code. ``chain`` counts from one; zero: no particular chain."""

    code: Text
    chain: Whole


@message(10)
class Farewell(SiteRequest):
    """Coordinator → site: the run has ended."""


@message(11)
class Offer(SiteRequest):
    """Coordinator → site: send a public key for secure sums."""


@message(12)
class Offered(SiteAnswer):
    """Site → coordinator: its X25519 key, signed with the key of its certificate."""

    public: Key
    certificate: Blob
    signature: Blob


@message(13)
class Agree(SiteRequest):
    """Coordinator → site: the `Offered` messages of all sites, unchanged, in the order of the contract."""

    offers: Blobs


@message(14)
class Masked(SiteAnswer):
    """Site → coordinator: the answer to `Derive`, under masks that cancel in the sum over all sites."""

    words: Words


@message(15)
class Attest(SiteRequest):
    """Coordinator → site: sign the current hash of your log. Carries the coordinator's signature of the previous seal.

    It is not part of the sequence. Zero entries: there is no previous seal.
    """

    entries: Whole
    seal: Digest
    certificate: Blob
    signature: Blob


@message(16)
class Attested(SiteAnswer):
    """Site → coordinator: the number of entries in its log and their hash, signed with the key of its certificate."""

    entries: Whole
    seal: Digest
    certificate: Blob
    signature: Blob


@message(17)
class Checked(Message):
    """Coordinator → site that runs ``--check``: it would be admitted. The clock, in seconds since 1970, and the software."""

    clock: Real
    software: Text


# Where every answer has the hash of its request.
ASKED = slice(HEADER.size + RUN_BYTES + 8, HEADER.size + RUN_BYTES + 8 + DIGEST_BYTES)


class _Field(NamedTuple):
    """A field: its place in the declaration, its name, its codec and its part of the header."""

    place: int
    name: str
    codec: Codec
    head: slice


class _Layout:
    """Header and fields of one kind of message. The header is padded so that the numbers after it are aligned."""

    def __init__(self, form: type[Message]):
        types = get_type_hints(form, include_extras=True)
        names = [field.name for field in dataclasses.fields(form)]  # type: ignore[arg-type]
        self.form, self.named = form, tuple((name, types[name].__metadata__[0]) for name in names)
        codes, fields, at = HEADER.format, [], 3
        for place, (name, codec) in enumerate(self.named):
            codes, size = codes + codec.head, len(struct.unpack(codec.head, bytes(struct.calcsize(codec.head))))
            fields.append(_Field(place, name, codec, slice(at, at + size)))
            at += size
        self.padding = bytes(-struct.calcsize(codes) % 8)
        self.head = struct.Struct(f"{codes}{len(self.padding)}s")
        # In the order of the bodies: real numbers, which must be finite, first.
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
    """Decode a message. Raises `WireError`, and nothing else, for bytes that are no message."""
    if not isinstance(data, bytes):
        raise WireError("message", type(data).__name__)
    if len(data) > most_bytes:
        raise WireError("message", f"{len(data)} bytes; the maximum is {most_bytes}")
    layout = _layout(data)
    if len(data) < layout.head.size:
        raise WireError("message", "a message that ends too early")
    heads, reader = layout.head.unpack_from(data), Reader(data, layout.head.size)
    if heads[-1] != layout.padding:
        raise WireError("message", "non-zero padding after the header")
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
    """The layout of a message, from its header."""
    if len(data) < HEADER.size:
        raise WireError("message", "a message that ends too early")
    magic, version, kind = HEADER.unpack_from(data)
    if magic != MAGIC:
        raise WireError("message", "bytes that are not a message")
    if version != VERSION:
        raise WireError("message", f"version {version}; this software uses version {VERSION}")
    if kind not in LAYOUTS:
        raise WireError("message", f"kind {kind}")
    return LAYOUTS[kind]


def may_answer(data: bytes, asked: bytes) -> bool:
    """Whether a message may be the answer to the request with this hash; true if it is not a well-formed answer at all.

    Reads the message's kind and the hash in it only.
    """
    found, kind = data[ASKED], KINDS.get(data[HEADER.size - 1]) if len(data) >= HEADER.size else None
    return found == asked or len(found) < DIGEST_BYTES or kind is None or not issubclass(kind, SiteAnswer)


def digest(data: bytes) -> bytes:
    """The hash under which a request's answer is stored."""
    return hashlib.sha256(data).digest()
