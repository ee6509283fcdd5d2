"""Coverage-guided fuzzing of the decoder: ``python -m tests.federation.fuzz_messages CORPUS -max_total_time=600``.

Whatever the bytes, the decoder returns a message that encodes to the same bytes, or raises `WireError`; and whatever the
message, those who read it first take it or name what is wrong with it.
"""

import contextlib
import sys
import tempfile
from pathlib import Path

import atheris

PACKAGE = "fedpdmc.federation"
with atheris.instrument_imports(
    include=[f"{PACKAGE}.{name}" for name in ("messages", "message_format", "codecs", "answer_checks", "masking")]
):
    import numpy as np

    from fedpdmc.certificates import keys
    from fedpdmc.errors import BadAnswer, WireError
    from fedpdmc.federation import answer_checks, masking, message_format
    from fedpdmc.federation import messages as wire
    from fedpdmc.federation.site_agent import secure_sum
    from fedpdmc.plan import Plan

DIM = 4
PLAN = Plan(np.arange(3), np.zeros((3, DIM)), np.ones((3, 2)), np.ones((3, 2, DIM)))  # type: ignore[arg-type]


def first_reader(message: wire.Message, own: keys.Credentials) -> None:
    """What is done with a message before any of it is trusted."""
    if isinstance(message, wire.Arrivals):
        answer_checks.read_arrival("north", message, PLAN)
    elif isinstance(message, wire.Opened) and message.remaining >= 0:
        answer_checks.read_account("north", 2, message.remaining, message.account.tolist())
    elif isinstance(message, wire.Offered):
        keys.signer(own, message.certificate, message.signature, message.public)
    elif isinstance(message, wire.Agree):
        secure_sum._offers(message)
    elif isinstance(message, wire.Masked) and len(message.words) == 2 * masking.size(DIM):
        masking.unpacked(masking.total([message.words]), DIM)


def one(data: bytes, own: keys.Credentials) -> None:
    """Decode, encode what was decoded, and read it."""
    # Headers are hard to guess and easy to give: half of the inputs get one.
    if data[:1] and data[0] % 2:
        data = message_format.HEADER.pack(message_format.MAGIC, message_format.VERSION, data[0] // 2 % 18) + data[1:]
    else:
        data = data[1:]
    try:
        message = wire.decode(data)
    except WireError:
        return
    if wire.encode(message) != data:
        raise AssertionError("decoded to something else than it was")
    with contextlib.suppress(BadAnswer, secure_sum.Unproved):
        first_reader(message, own)


def seeds(own: keys.Credentials) -> list[wire.Message]:
    """One message of each kind and of what it may hold, those of secure sums with real keys."""
    from tests.federation.test_messages import DIGEST, RUN, messages

    secret = masking.new_secret()
    public = masking.public_of(secret)
    offered = wire.Offered(RUN, 1, DIGEST, public, own.certificate, keys.sign(own, public))
    packed = masking.words([masking.fixed(float(k), 3) for k in range(masking.size(DIM))])
    silent = np.zeros(3)
    return [
        *messages(),
        offered,
        wire.Agree(RUN, 2, (wire.encode(offered),) * 2),
        wire.Masked(RUN, 3, DIGEST, packed),
        # Some chains only, as where others are spared; and a private site's account.
        wire.Plans(RUN, 3, np.arange(2), PLAN.start[:2], PLAN.duration[:2], PLAN.velocity[:2], np.asarray([0, 2])),
        wire.Arrivals(RUN, 3, DIGEST, silent, silent > 0, silent.astype(int), np.zeros((0, DIM)), 5.0, 1.5, 0.25, 7),
        wire.Opened(RUN, 2, DIGEST, 3.5, np.asarray([1, 1e-5, 9, 0.5, 1e-6, 40, 0.2, 0.1, 0.4, 0.2, 3, 1, 0.5])),
    ]


def main() -> None:
    """Begin with one message of each kind."""
    corpus = Path(sys.argv[1])
    corpus.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        own = keys.read_credentials(keys.make_keys(folder, ["north"]) / "sites" / "north")
    for k, message in enumerate(seeds(own)):
        (corpus / f"seed{k}").write_bytes(b"\0" + wire.encode(message))
    atheris.Setup(sys.argv, lambda data: one(data, own))
    atheris.Fuzz()


if __name__ == "__main__":
    main()
