"""The binary format of messages: typed, versioned, with raw float64 buffers.

A message consists of a header, whose size depends on the message's kind only, and bodies. The header has ``b"FPDM"``, a
version, the kind, and for each field the part of fixed size: numbers, hashes, shapes of arrays. The bodies are the arrays'
numbers, little-endian, and text. Nothing in a message names a type, a function or a file, so nothing can be executed.
Decoding allocates nothing: sizes are checked against the message's length, and arrays are read-only views of the message.

Messages of all `READABLE` versions are read and written. A field that a later version has added is declared with `since`:
earlier versions leave it out, and it has its default. So a run goes on, after all parties were upgraded, in the version in
which it began.
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
    Bodies,
    Codec,
    Digest,
    Reader,
    RunId,
    Whole,
    finite,
)
from fedpdmc.version import __version__

MAGIC, VERSION = b"FPDM", 10
READABLE = (9, 10)
# The last version that changed what a message means: a run that began before it cannot go on after an upgrade.
MEANING = 10
# A refusal because of the version: this and the version of the side that refuses.
VERSION_CODE = "VERSION_"
# The kind of message that ends a run.
REFUSAL = "Refusal"
HEADER = struct.Struct("<4sBB")
# Where every answer has the hash of its request.
ASKED = slice(HEADER.size + RUN_BYTES + 8, HEADER.size + RUN_BYTES + 8 + DIGEST_BYTES)
KINDS: dict[int, type[Message]] = {}
# By version and kind.
LAYOUTS: dict[tuple[int, int], _Layout] = {}


class OtherVersion(WireError):
    """A message of a version that is not read here."""

    def __init__(self, version: int):
        super().__init__("message", f"wire version {version}; this software reads {', '.join(map(str, READABLE))}")


class Message:
    """A message of one kind. Its fields are encoded in the order of their declaration, each by the codec of its type."""

    kind: ClassVar[int]

    def check(self) -> None:
        """Raise `WireError` for fields that are not consistent with each other."""


Form = TypeVar("Form", bound=type[Message])


def since(version: int, default_factory: Callable[[], Any]) -> Any:
    """A field that messages have from this version on; in earlier ones it has its default."""
    return dataclasses.field(default_factory=default_factory, metadata={"since": version})


@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(dataclasses.field, since))
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
    if not finite(data, layout.head.size, reader.at):
        wrong = [name for name, numbers in values.items() if not np.isfinite(numbers).all()]
        raise WireError(wrong[0], "numbers that are not finite")
    for name, codec, own in layout.fields[layout.reals :]:
        values[name] = codec.read(heads[own], reader, name)
    if reader.at != len(data):
        raise WireError("message", f"{len(data) - reader.at} bytes after its end")
    message = layout.form(**values)
    message.check()
    return message


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
    told = code.removeprefix(VERSION_CODE)
    other = int(told) if told != code and told.isdigit() else version_of(refusal)
    if other == VERSION or code not in ("MALFORMED", f"{VERSION_CODE}{told}"):
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
    if found == bytes(DIGEST_BYTES) and claimed_kind(data) == REFUSAL:
        return True
    return found == asked or len(found) < DIGEST_BYTES or kind is None or not issubclass(kind, SiteAnswer)


def claimed_kind(data: bytes) -> str:
    """The name of the kind that a message's header claims, for logs."""
    kind = KINDS.get(data[HEADER.size - 1]) if data.startswith(MAGIC) and len(data) >= HEADER.size else None
    return "unknown" if kind is None else kind.__name__


def digest(data: bytes) -> bytes:
    """The hash under which a request's answer is stored."""
    return hashlib.sha256(data).digest()
