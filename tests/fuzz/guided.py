"""Fuzz one target with libFuzzer: ``python -m tests.fuzz.guided decoder CORPUS -max_total_time=600``.

libFuzzer keeps inputs by the branches that they take. `tests.fuzz.soak` needs no compiled library and fuzzes every target.
"""

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["fedpdmc"]):
    from tests.fuzz import stores, texts, wire

    from fedpdmc.errors import FedPDMCError

TARGETS = {make.__name__: make for module in (stores, texts, wire) for make in module.TARGETS}


def main() -> None:
    """Begin with the samples of the target."""
    name, corpus = sys.argv[1], Path(sys.argv[2])
    corpus.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        target = TARGETS[name](Path(folder))
        for place, sample in enumerate(target.samples):
            (corpus / f"sample{place}").write_bytes(sample)

        def one(data: bytes) -> None:
            try:
                target.read(data)
            except FedPDMCError:
                pass

        atheris.Setup([sys.argv[0], *sys.argv[2:]], one)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
