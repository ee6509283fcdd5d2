"""The messages between coordinator and sites, one class for each kind, and their binary format.

A message consists of a header, whose size depends on the message's kind only, and bodies. The header has ``b"FPDM"``, a
version, the kind, and for each field the part of fixed size: numbers, hashes, shapes of arrays. The bodies are the arrays'
numbers, little-endian, and text. Nothing in a message names a type, a function or a file, so nothing can be executed.
Decoding allocates nothing: sizes are checked against the message's length, and arrays are read-only views of the message.

Messages of all `READABLE` versions are read and written. A field that a later version has added is declared with the version
``since`` which messages have it: earlier versions leave it out, and it has its default. So a run goes on, after all parties
were upgraded, in the version in which it began.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar, dataclass_transform, get_type_hints

import numpy as np

from fedpdmc.errors import WireError
from fedpdmc.validation import is_plain
from fedpdmc.version import __version__
from fedpdmc.whitening import NUMBERS

MAGIC, VERSION = b"FPDM", 10
READABLE = (9, 10)
MEANING = (
    10  # the last version that changed what a message means: a run that began before it cannot go on after an upgrade
)
VERSION_CODE = "VERSION_"  # a refusal because of the version: this and the version of the side that refuses
MOST_BYTES = 64 * 2**20  # of a message
MOST_TEXT = 256  # bytes
MOST_BLOB = 2**16  # bytes of a certificate
MOST_BLOBS = 2**12  # parts of one message
RUN_BYTES = 16
DIGEST_BYTES = 32
KEY_BYTES = 32
QUARTER = math.pi / 2
NO_BUDGET = -1.0  # ``remaining`` without a privacy budget
ACCOUNT = 14  # numbers of an account
NOTHING_ASKED = bytes(DIGEST_BYTES)
NOTHING = np.zeros(0)
NO_MATRIX = np.zeros((0, 0))

HEADER = struct.Struct("<4sBB")
# Where every answer has the hash of its request.
ASKED = slice(HEADER.size + RUN_BYTES + 8, HEADER.size + RUN_BYTES + 8 + DIGEST_BYTES)
KINDS: dict[int, type[Message]] = {}
# By version and kind.
LAYOUTS: dict[tuple[int, int], _Layout] = {}
# The order of bodies: real numbers together, so that one check covers all of them, then integers, then the rest.
REALS, INTEGRAL, REST = range(3)
Bodies = tuple[list, list, list]


class OtherVersion(WireError):
    """A message of a version that is not read here."""

    def __init__(self, version: int):
        super().__init__("message", f"wire version {version}; this software reads {', '.join(map(str, READABLE))}")


# Fields ----------------------------------------------------------------------------------------------------------------


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


class _Number(Codec):
    def __init__(self, head: str, good: Callable[[Any], bool], fault: str):
        self.head, self.good, self.fault = head, good, fault

    def read(self, heads, reader, name):
        if not self.good(heads[0]):
            raise WireError(name, self.fault)
        return heads[0]


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
        if not is_plain(text):
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
    """Numbers of one type, the shape in the header. Flags are 0 or 1. `_finite` checks real numbers.

    With two ranks the array is a vector, whose second size is given as 0, or a matrix that is not empty.
    """

    def __init__(self, dtype: str, *ranks: int):
        self.dtype, self.ranks, self.head = np.dtype(dtype), ranks, f"{ranks[-1]}I"
        self.place = REALS if self.dtype.kind == "f" else INTEGRAL if self.dtype.itemsize == 8 else REST

    def write(self, value, heads, bodies):
        array = np.ascontiguousarray(value, dtype=self.dtype)
        if array.ndim not in self.ranks or array.ndim == len(self.ranks) == 2 and not array.shape[1]:
            raise WireError("message", f"an array of shape {array.shape}")
        heads.extend((*array.shape, 0)[: self.ranks[-1]])
        # The array itself, so that its numbers are copied once, into the message.
        bodies[self.place].append(array)

    def read(self, heads, reader, name):
        shape = heads if len(self.ranks) == 1 or heads[1] else heads[:1]
        # If one size is zero, the product does not limit the others.
        if max(shape) > MOST_BYTES:
            raise WireError(name, f"an array of shape {shape}")
        begin = reader.take(math.prod(shape) * self.dtype.itemsize, name)
        array = np.ndarray(shape, self.dtype, reader.data, begin)
        if self.dtype.itemsize == 1 and array.size and array.max() > 1:
            raise WireError(name, "flags other than 0 and 1")
        return array


def _finite(data: bytes, begin: int, end: int) -> bool:
    """Whether all real numbers between two offsets of a message are finite."""
    count = (end - begin) // 8
    return np.count_nonzero(np.isfinite(np.frombuffer(data, "<f8", count, begin))) == count


# The types of fields, each with its codec.
Whole = Annotated[int, _Number("Q", lambda value: value < 2**63, "a number above 2**63 − 1")]
Real = Annotated[float, _Number("d", math.isfinite, "a number that is not finite")]
Text = Annotated[str, _Text()]
Blob = Annotated[bytes, _Blob()]
Blobs = Annotated[tuple[bytes, ...], _Blobs()]
RunId = Annotated[bytes, _Raw(RUN_BYTES)]
Digest = Annotated[bytes, _Raw(DIGEST_BYTES)]
Key = Annotated[bytes, _Raw(KEY_BYTES)]
Vector = Annotated[np.ndarray, _Array("<f8", 1)]
Matrix = Annotated[np.ndarray, _Array("<f8", 2)]
VectorOrMatrix = Annotated[np.ndarray, _Array("<f8", 1, 2)]
Stack = Annotated[np.ndarray, _Array("<f8", 3)]
Integers = Annotated[np.ndarray, _Array("<i8", 1)]
Flags = Annotated[np.ndarray, _Array("u1", 1)]
Counts = Annotated[np.ndarray, _Array("<u4", 1)]
Words = Annotated[np.ndarray, _Array("<u8", 1)]


# Encoding --------------------------------------------------------------------------------------------------------------


class Message:
    """A message of one kind. Its fields are encoded in the order of their declaration, each by the codec of its type."""

    kind: ClassVar[int]

    def _check(self) -> None:
        """Raise `WireError` for fields that are not consistent with each other."""


Form = TypeVar("Form", bound=type[Message])
One = TypeVar("One", bound=Message)


def optional(*, default: Any, since: int = 0) -> Any:
    """A field that messages have from this version on, with its default in earlier ones."""
    return dataclasses.field(default_factory=lambda: default, metadata={"since": since})


@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(dataclasses.field, optional))
def message(kind: int) -> Callable[[Form], Form]:
    """Make a class the message of this kind: a frozen dataclass that `encode` and `decode` know."""

    def register(form: Form) -> Form:
        KINDS[kind] = made = dataclass(frozen=True, eq=False)(form)
        LAYOUTS.update({(version, kind): _Layout(made, version) for version in READABLE})
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


class _Field(NamedTuple):
    """A field: its name, its codec and its part of the header."""

    name: str
    codec: Codec
    head: slice


class _Layout:
    """Header and fields of one kind and version. The header is padded so that the numbers after it are aligned."""

    def __init__(self, form: type[Message], version: int):
        types, declared = get_type_hints(form, include_extras=True), dataclasses.fields(form)  # type: ignore[arg-type]
        names = [field.name for field in declared if field.metadata.get("since", 0) <= version]
        self.later = tuple(field for field in declared if field.name not in names)
        self.form, self.named = form, tuple((name, types[name].__metadata__[0]) for name in names)
        codes, fields, at = HEADER.format, [], 3
        for name, codec in self.named:
            codes, size = codes + codec.head, len(struct.unpack(codec.head, bytes(struct.calcsize(codec.head))))
            fields.append(_Field(name, codec, slice(at, at + size)))
            at += size
        self.padding = bytes(-struct.calcsize(codes) % 8)
        self.head = struct.Struct(f"{codes}{len(self.padding)}s")
        # In the order of the bodies: real numbers, which must be finite, first.
        self.fields = tuple(sorted(fields, key=lambda field: field.codec.place))
        self.reals = sum(field.codec.place == REALS for field in fields)


def encode(message: Message, version: int | None = None) -> bytes:
    """A message as bytes, of the present version or of an earlier one that has all that it says."""
    version = VERSION if version is None else version
    layout = LAYOUTS[version, message.kind]
    for field in layout.later:
        if not np.array_equal(getattr(message, field.name), field.default_factory()):  # type: ignore[operator]
            raise WireError(field.name, f"a value that wire version {version} does not have")
    heads: list[Any] = [MAGIC, version, message.kind]
    bodies: Bodies = ([], [], [])
    for name, codec in layout.named:
        codec.write(getattr(message, name), heads, bodies)
    return b"".join([layout.head.pack(*heads, layout.padding), *bodies[REALS], *bodies[INTEGRAL], *bodies[REST]])


def decode(data: bytes, most_bytes: int = MOST_BYTES) -> Message:
    """Decode a message. Raises `WireError`, and nothing else, for bytes that are not a message."""
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
    values: dict[str, Any] = {}
    for name, codec, own in layout.fields[: layout.reals]:
        values[name] = codec.read(heads[own], reader, name)
    if not _finite(data, layout.head.size, reader.at):
        wrong = [name for name, numbers in values.items() if not np.isfinite(numbers).all()]
        raise WireError(wrong[0], "numbers that are not finite")
    for name, codec, own in layout.fields[layout.reals :]:
        values[name] = codec.read(heads[own], reader, name)
    if reader.at != len(data):
        raise WireError("message", f"{len(data) - reader.at} bytes after its end")
    message = layout.form(**values)
    message._check()
    return message


def decode_parts(parts: Sequence[bytes], kind: type[One]) -> list[One]:
    """Decode messages that another message carries, all of one kind."""
    found = [message for message in map(decode, parts) if isinstance(message, kind)]
    if len(found) != len(parts):
        raise WireError("message", f"a part that is not {kind.__name__}")
    return found


def _layout(data: bytes) -> _Layout:
    """The layout of a message, from its header."""
    if len(data) < HEADER.size:
        raise WireError("message", "a message that ends too early")
    magic, version, kind = HEADER.unpack_from(data)
    if magic != MAGIC:
        raise WireError("message", "bytes that are not a message")
    if version not in READABLE:
        raise OtherVersion(version)
    if kind not in KINDS:
        raise WireError("message", f"kind {kind}")
    return LAYOUTS[version, kind]


def version_of(data: bytes) -> int:
    """The version that a message's header claims; the present one if there is no header."""
    return data[len(MAGIC)] if data.startswith(MAGIC) and len(data) >= HEADER.size else VERSION


def refuse_version() -> str:
    """The code with which a message of another version is refused."""
    return f"{VERSION_CODE}{VERSION}"


def version_remedy(refusal: bytes, code: str) -> str | None:
    """What to do after a refusal because of the version; None for other refusals.

    Software before version 9 refuses every other version as MALFORMED: its refusal's own header has its version.
    """
    number = code.removeprefix(VERSION_CODE)
    other = int(number) if number != code and number.isdigit() else version_of(refusal)
    if other == VERSION or code not in ("MALFORMED", f"{VERSION_CODE}{number}"):
        return None
    which = " (for a run that has begun, that with which it began)" if min(other, VERSION) < MEANING else ""
    return (
        f"The other side uses wire version {other}, this one {VERSION} (fedpdmc {__version__}). Install the same version of "
        f"fedpdmc on both sides{which} and start them again with the same stores: the run goes on."
    )


def may_answer(data: bytes, asked: bytes) -> bool:
    """Whether a message may be the answer to the request with this hash; true if it is not a well-formed answer at all.

    Reads the message's kind and the hash in it only. A refusal to take part answers whatever is asked.
    """
    found, kind = data[ASKED], KINDS.get(data[HEADER.size - 1]) if len(data) >= HEADER.size else None
    if found == bytes(DIGEST_BYTES) and claimed_kind(data) == Refusal.__name__:
        return True
    return found == asked or len(found) < DIGEST_BYTES or kind is None or not issubclass(kind, SiteAnswer)


def claimed_kind(data: bytes) -> str:
    """The name of the kind that a message's header claims, for logs."""
    kind = KINDS.get(data[HEADER.size - 1]) if data.startswith(MAGIC) and len(data) >= HEADER.size else None
    return "unknown" if kind is None else kind.__name__


def digest(data: bytes) -> bytes:
    """The hash under which a request's answer is stored."""
    return hashlib.sha256(data).digest()


# Kinds ---------------------------------------------------------------------------------------------------------------


def _check_noise(noise: np.ndarray) -> None:
    """Check the report of noise: two standard deviations and an account, or nothing."""
    if len(noise) not in (0, 2 + ACCOUNT) or (noise < 0).any():
        raise WireError("noise", f"{len(noise)} numbers")


def _check_bend(bend: np.ndarray) -> None:
    """Check that there are six numbers for each bent coordinate, or none at all."""
    if bend.shape != (0, 0) and (bend.shape[0] != NUMBERS or not bend.shape[1]):
        raise WireError("bend", f"shape {bend.shape}")


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

    With the certificate the site itself can check whether it was revoked, which gRPC does not do.
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
    """Coordinator → site: compute value, gradient and Hessian at a point, for the reference.

    With a spread S that is not empty, their means over ``N(x, S Sᵀ)``. With a bend, numbers of shape (6, r), of the function
    of coordinates in which the log spreads of effects are bent (`fedpdmc.whitening`): x is a point before the bend.
    """

    x: Vector
    spread: Matrix = optional(default=NO_MATRIX)
    bend: Matrix = optional(default=NO_MATRIX)

    @property
    def about(self) -> np.ndarray | None:
        """The spread, None if it is empty."""
        return self.spread if self.spread.size else None

    def _check(self):
        _check_bend(self.bend)
        if self.spread.shape not in ((0, 0), 2 * self.x.shape):
            raise WireError("spread", f"shape {self.spread.shape} at a point of shape {self.x.shape}")


@message(4)
class Derivatives(SiteAnswer):
    """Site → coordinator: the answer to `Derive`.

    ``noise`` is empty without a budget, else the standard deviations of the noise of gradient and Hessian, and the numbers
    of an `AccountStatus`.
    """

    value: Real
    gradient: Vector
    hessian: Matrix
    noise: Vector = optional(default=NOTHING)

    def _check(self):
        if self.hessian.shape != 2 * self.gradient.shape:
            raise WireError("hessian", f"shape {self.hessian.shape} with a gradient of shape {self.gradient.shape}")
        _check_noise(self.noise)


@message(5)
class Open(SiteRequest):
    """Coordinator → site: the whitened coordinates and the site's control variate for the rest of the run.

    Order 0: no control variate. A point without precision and linear part: the site's own Taylor polynomial at this point.
    ``turns`` is the public key of the velocities at turns, two words; empty for dynamics without turns. ``kept`` is the part
    of the released curvature that a control variate of second order has, and ``bend`` that of the last `Derive`. ``wide``
    has columns w: every site takes an equal share of ``w wᵀ``, about the centre, off the curvature of its control variate.
    Where sites make the plans (`joint_plans`): the hash of the coordinator's seed, and the process time of the starts.
    """

    chains: Whole
    segments: Whole
    center: Vector
    scale: VectorOrMatrix
    order: Whole
    precision: Matrix
    linear: Vector
    point: Vector
    turns: Counts = optional(default=np.zeros(0, np.uint32))
    kept: Real = 1.0
    bend: Matrix = optional(default=NO_MATRIX)
    wide: Matrix = optional(default=NO_MATRIX, since=9)
    commitment: Digest = optional(default=NOTHING_ASKED, since=10)
    begin: Real = optional(default=0.0, since=10)

    def _check(self):
        _check_bend(self.bend)
        dim = self.center.shape[0]
        if len(self.turns) not in (0, 2):
            raise WireError("turns", f"a key of {len(self.turns)} words")
        if self.scale.shape not in ((dim,), (dim, dim)):
            raise WireError("scale", f"shape {self.scale.shape} for {dim} parameters")
        if self.order > 2:
            raise WireError("order", str(self.order))
        if self.wide.size and (self.order != 2 or self.wide.shape[0] != dim):
            raise WireError("wide", f"shape {self.wide.shape} for {dim} parameters and order {self.order}")
        if not 0 < self.kept <= 1:
            raise WireError("kept", f"{self.kept:g} of a curvature")
        size = self.linear.shape[0]
        known = size in ((0, dim) if self.order else (0,)) and self.precision.shape == (size, size)
        if not known or self.point.shape != (dim if self.order else 0,):
            raise WireError("control", f"shapes that do not fit {dim} parameters and order {self.order}")


@message(6)
class Opened(SiteAnswer):
    """Site → coordinator: done. With a privacy budget: the observed time that remains, and the account.

    ``account`` is empty without a budget, else the numbers of an `AccountStatus`. Where sites make the plans: the hash of
    the site's seed, and the key with which it signs arrivals; both signed with that of its certificate, if it has one.
    """

    remaining: Real = NO_BUDGET
    account: Vector = optional(default=NOTHING)
    commitment: Digest = optional(default=NOTHING_ASKED, since=10)
    public: Key = optional(default=NOTHING_ASKED, since=10)
    certificate: Blob = optional(default=b"", since=10)
    signature: Blob = optional(default=b"", since=10)

    def _check(self):
        if len(self.account) != (ACCOUNT if self.remaining >= 0 else 0) or (self.account < 0).any():
            raise WireError("account", f"{len(self.account)} numbers")


def _check_rows(chain: np.ndarray, time: np.ndarray) -> None:
    """Check that the chains of plans are in order, and that there is a time for each plan or for none."""
    if len(time) not in (0, len(chain)):
        raise WireError("time", f"{len(time)} times of {len(chain)} plans")
    if len(chain) and (chain[0] < 0 or np.count_nonzero(chain[1:] <= chain[:-1])):
        raise WireError("chain", "chains that are not in increasing order")


@message(7)
class Plans(SiteRequest):
    """Coordinator → site: the plans of one round, for those chains that the site is asked about.

    Row k is the plan of chain ``chain[k]``. All rows have as many segments as the longest plan needs. ``time`` is the
    process time at which each begins, for studies whose sites have private latents; empty in others. ``until`` is the end
    of the block. ``evidence`` is what plans follow from, where sites make them (`joint_plans`): the seeds of all parties in
    the first request, and then the signed arrivals of all sites along the last plans.
    """

    number: Integers
    start: Matrix
    duration: Matrix
    velocity: Stack
    chain: Integers
    time: Vector = optional(default=NOTHING)
    until: Real = optional(default=0.0, since=10)
    evidence: Blobs = optional(default=(), since=10)

    def _check(self):
        (chains, dim), segments = self.start.shape, self.duration.shape[1]
        if not self.number.shape == self.chain.shape == self.duration.shape[:1] == (chains,):
            raise WireError("plan", "arrays with different numbers of chains")
        _check_rows(self.chain, self.time)
        if self.velocity.shape != (chains, segments, dim):
            raise WireError("velocity", f"shape {self.velocity.shape} for {(chains, segments, dim)}")
        if np.count_nonzero(self.number < 0):
            raise WireError("number", "a negative plan number")
        if np.count_nonzero(self.duration < 0):
            raise WireError("duration", "a negative duration")


@message(18)
class TurnPlans(SiteRequest):
    """Coordinator → site: `Plans` whose segments end in turns, which the site computes itself (`joint_plans`).

    ``velocity`` is that of the first segment, ``wait`` the time to the first turn, ``turn`` its number, ``left`` the time to
    the horizon. ``derived`` is a hash of the plans as the coordinator has them, and the rest as in `Plans`.
    """

    number: Counts
    turn: Counts
    chain: Counts
    start: Matrix
    velocity: Matrix
    wait: Vector
    left: Vector
    derived: Digest
    time: Vector = optional(default=NOTHING)
    until: Real = optional(default=0.0, since=10)
    evidence: Blobs = optional(default=(), since=10)

    def _check(self):
        rows = self.start.shape[0]
        vectors = (self.number, self.turn, self.chain, self.wait, self.left)
        if any(len(vector) != rows for vector in vectors) or self.velocity.shape != self.start.shape:
            raise WireError("plan", "arrays with different numbers of chains")
        _check_rows(self.chain, self.time)
        if np.count_nonzero((self.wait <= 0) | (self.wait > QUARTER)):
            raise WireError("wait", "a turn that is not within a quarter period")
        if np.count_nonzero(self.left < 0):
            raise WireError("left", "a negative time")


@message(8)
class Arrivals(SiteAnswer):
    """Site → coordinator: for each chain whether there was an arrival; the time of each arrival and its mark.

    A mark is a coordinate, or the velocity after the event. A site with a privacy budget has a time and a mark for every
    chain, so that the size of its answer reveals nothing; other sites send them for arrivals only.

    ``remaining`` is the observed time that a privacy budget still covers, ``observed`` that of this run, and ``spent`` the
    share of the account that all studies have spent. ``passes`` counts the site's passes over its records in this run, if
    the contract allows it.
    """

    time: Vector
    rang: Flags
    coordinate: Integers
    velocity: Matrix
    remaining: Real = NO_BUDGET
    observed: Real = 0.0
    spent: Real = 0.0
    passes: Whole = 0
    signature: Blob = optional(default=b"", since=10)

    @classmethod
    def of_chains(cls, run, sequence, request, time, rang, mark, *account, **passes) -> Arrivals:
        """From times and marks of all chains, (C,) or (C, d): those without an arrival are left out."""
        came = np.asarray(rang, bool)
        coordinate, velocity = (mark[came], np.zeros((0, 0))) if mark.ndim == 1 else (np.zeros(0, int), mark[came])
        return cls(run, sequence, request, time[came], came, coordinate, velocity, *account, **passes)

    def observed_times(self, horizon: np.ndarray) -> np.ndarray:
        """How long each chain was observed: to its arrival, or to the horizon."""
        times = np.array(horizon)
        times[self.rang.astype(bool)] = np.minimum(self.arrivals()[0], times[self.rang.astype(bool)])
        return times

    def arrivals(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Times, coordinates and velocities of the arrivals alone; coordinates or velocities are empty."""
        rows = self.rang.astype(bool) if len(self.time) == len(self.rang) else slice(None)
        coordinate, velocity = (mark[rows] if len(mark) else mark for mark in (self.coordinate, self.velocity))
        return self.time[rows], coordinate, velocity

    def _check(self):
        count = len(self.time)
        if count not in (np.count_nonzero(self.rang), len(self.rang)):
            raise WireError("rang", "a different number of chains")
        marks = (self.coordinate.shape[0], self.velocity.shape[0])
        if marks not in ((count, 0), (0, count)):
            raise WireError("mark", f"{marks} coordinates and velocities for {count} times")
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
    """Site → coordinator: the answer to `Derive`, under masks that cancel in the sum over all sites.

    ``noise`` is empty without a budget, else the standard deviations of the site's shares of the noise of gradient and
    Hessian, and the numbers of an `AccountStatus`.
    """

    words: Words
    noise: Vector = optional(default=NOTHING)

    def _check(self):
        _check_noise(self.noise)


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


@message(19)
class Reveal(SiteRequest):
    """Coordinator → site: the `Opened` messages of all sites, unchanged, in the order of the contract."""

    openings: Blobs


@message(20)
class Revealed(SiteAnswer):
    """Site → coordinator: the seed whose hash it has sent before."""

    seed: Digest


@message(30)
class AskAccount(SiteRequest):
    """Coordinator → site: how much information have your answers in this study carried? Not part of the sequence."""


@message(31)
class Accounted(SiteAnswer):
    """Site → coordinator: bits, rounded up to a multiple that is public; zero under a privacy budget."""

    bits: Real

    def _check(self):
        if self.bits < 0:
            raise WireError("bits", "a negative amount")
