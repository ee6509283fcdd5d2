"""Coverage-guided fuzzing of the decoder: ``python -m tests.federation.fuzz_wire CORPUS -max_total_time=600``.

Whatever the bytes, the decoder returns a message that encodes to the same bytes, or raises `WireError`.
"""

import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["fedpdmc.federation.wire"]):
    from fedpdmc.errors import WireError
    from fedpdmc.federation import wire


def one(data: bytes) -> None:
    """Decode, and encode what was decoded."""
    # Headers are hard to guess and easy to give: half of the inputs get one.
    if data[:1] and data[0] % 2:
        data = wire.HEADER.pack(wire.MAGIC, wire.VERSION, data[0] // 2 % 16) + data[1:]
    else:
        data = data[1:]
    try:
        message = wire.decode(data)
    except WireError:
        return
    if wire.encode(message) != data:
        raise AssertionError("decoded to something else than it was")


def main() -> None:
    """Begin with one message of each kind."""
    corpus = Path(sys.argv[1])
    corpus.mkdir(parents=True, exist_ok=True)
    from tests.federation.test_wire import messages

    for k, message in enumerate(messages()):
        (corpus / f"seed{k}").write_bytes(b"\0" + wire.encode(message))
    atheris.Setup(sys.argv, one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
