"""A site that is killed at random instructions between plan and reply; run as a script, without JAX.

``python kills.py FOLDER KILLS SEED KIND``: forks one child after the other. Each opens the ledger, answers plans and writes
every reply to a pipe, until it is killed: at a random line or instruction of the ledger's code, or after a random time. The
parent then compares what came out of the pipes with what is on the ledger. KIND "early" replies before it commits.
"""

import os
import random
import signal
import sys
import time
from contextlib import contextmanager
from pathlib import Path

from fedpdmc.privacy import ledger as code
from fedpdmc.privacy.ledger import Account, Ledger, LedgerRequest, Reply, create_ledger, read

COST = 1e-5
ACCOUNT = Account("patients", 1.0, 1e-6, "replace", 20.0, 1.0)


def serve(path, out, first, early):
    """Answer plans for ever; ``early``: the reply leaves before its entry is on disk."""
    ledger = Ledger.open(path)
    ledger.account(ACCOUNT)
    for number in range(first, first + 10**6):

        def work(key, number=number):
            content = number.to_bytes(4, "little") + key[:12]
            if early:
                os.write(out, content)
            return Reply(content, 1.0, COST)

        content = ledger.answer(LedgerRequest("patients", "s", "r", "round", number, b"plan %d" % number), COST, work)
        if not early:
            os.write(out, content)


def kill_at(count):
    """Die at the ``count``-th instruction that the ledger's own code executes."""
    left = [count]

    def trace(frame, event, argument):
        if frame.f_code.co_filename != code.__file__:
            return None
        frame.f_trace_opcodes = True
        left[0] -= 1
        if left[0] <= 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)


@contextmanager
def child(path, first, early, instruction):
    """A serving process and the end of the pipe that its replies come out of."""
    inside, outside = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(inside)
        if instruction:
            kill_at(instruction)
        serve(path, outside, first, early)
    os.close(outside)
    try:
        yield pid, inside
    finally:
        os.close(inside)


def drain(inside):
    """All that came out before the process died."""
    parts = []
    while part := os.read(inside, 65536):
        parts.append(part)
    whole = b"".join(parts)
    return [whole[i : i + 16] for i in range(0, len(whole), 16)]


def main(folder, kills, seed, kind):
    rng, path = random.Random(seed), Path(folder) / "ledger.db"
    entries, died, sent, lost, other = {}, 0, 0, 0, 0
    create_ledger(path)
    for _ in range(kills):
        # Some rounds that were answered are asked again, so that stored replies are seen too.
        first = max(0, len(entries) - rng.randrange(3))
        instruction = rng.randrange(1, 12000) if rng.random() < 0.75 else 0
        with child(path, first, kind == "early", instruction) as (pid, inside):
            if not instruction:
                time.sleep(rng.uniform(0.0, 0.05))
                os.kill(pid, signal.SIGKILL)
            replies = drain(inside)
            died += os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
        # At once, before anyone makes good for it: every reply that left is on the ledger as it was sent.
        entries = {e.round: e for e in read(path) if e.kind == "round"} if path.exists() else {}
        stored = [entries.get(int.from_bytes(reply[:4], "little")) for reply in replies]
        lost += sum(entry is None for entry in stored)
        other += sum(e is not None and e.reply != reply for e, reply in zip(stored, replies, strict=True))
        sent += len(replies)
    total = max((e.spent for e in entries.values()), default=0.0)
    exact = abs(total - COST * len(entries)) < 1e-12
    print("died", died, "sent", sent, "charged", len(entries), "lost", lost, "other", other, "exact", exact)
    print("heavy", *sorted({"jax", "numpy"} & set(sys.modules)))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
