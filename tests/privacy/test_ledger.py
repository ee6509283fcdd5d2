import subprocess
import sys
import threading

import pytest
from tests.privacy.ledgers import ACCOUNT, reopened, reply, request

from fedpdmc.errors import BudgetSpent, InputError, LedgerError, PlanRefused
from fedpdmc.privacy.ledger import Ledger, Reply, read


def test_a_reply_is_charged_and_stored(ledger):
    content = ledger.answer(request(0), 0.1, reply())
    assert ledger.spent("patients") == pytest.approx(0.1)
    assert ledger.observed("patients", "s", "r") == 2.0
    again = reopened(ledger)
    assert again.spent("patients") == pytest.approx(0.1)
    # The same plan again: the same arrival, made by nobody, and no charge.
    assert again.answer(request(0), 0.1, None) == content
    assert again.spent("patients") == pytest.approx(0.1)
    assert [e.kind for e in read(ledger.path)] == ["account", "round reserved", "round"]


def test_the_same_round_with_another_plan_is_refused(ledger):
    ledger.answer(request(0), 0.1, reply())
    with pytest.raises(PlanRefused, match="OTHER_PLAN"):
        ledger.answer(request(0, b"q" * 32), 0.1, reply())
    assert ledger.spent("patients") == pytest.approx(0.1)
    # Another run, or another study, has rounds of its own.
    ledger.answer(request(0, b"q" * 32, run="other"), 0.1, reply())
    ledger.answer(request(0, b"q" * 32, study="other"), 0.1, reply())
    assert ledger.spent("patients") == pytest.approx(0.3)


def test_what_is_made_again_after_a_crash_is_the_same(ledger):
    seen = []

    def crash(key):
        seen.append(key)
        raise RuntimeError("power cut")

    with pytest.raises(RuntimeError):
        ledger.answer(request(0), 0.1, crash)
    # What was begun is charged, until the same is asked again.
    assert ledger.spent("patients") == pytest.approx(0.1)
    again = reopened(ledger)
    assert again.spent("patients") == pytest.approx(0.1)
    again.answer(request(0), 0.1, lambda key: seen.append(key) or Reply(b"", 0.0, 0.1))
    assert again.spent("patients") == pytest.approx(0.1)
    again.answer(request(1), 0.1, lambda key: seen.append(key) or Reply(b"", 0.0, 0.1))
    assert seen[0] == seen[1] != seen[2] and len(seen[0]) == 32


def test_an_interrupt_leaves_it_usable(ledger):
    def interrupted(key):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ledger.answer(request(0), 0.1, interrupted)
    ledger.answer(request(0), 0.1, reply())
    assert ledger.spent("patients") == pytest.approx(0.1)


def test_a_spent_budget_refuses_across_restarts_and_studies(ledger):
    for number in range(9):
        ledger.answer(request(number), 0.11, reply(0.11))
    with pytest.raises(BudgetSpent, match="all studies"):
        ledger.answer(request(99), 0.11, reply())
    again = reopened(ledger)
    with pytest.raises(BudgetSpent, match="all studies"):
        again.answer(request(99, study="new"), 0.11, reply())
    # Something smaller still fits; what was answered is still told.
    again.answer(request(99), 0.005, reply(0.005))
    assert again.answer(request(0), 0.11, None).startswith(b"arrival")
    assert again.spent("patients") <= ACCOUNT.limit


def test_a_reply_may_cost_less_than_its_plan_but_not_more(ledger):
    ledger.answer(request(0), 0.5, reply(0.2))
    assert ledger.remaining("patients") == pytest.approx(0.8)
    with pytest.raises(LedgerError, match="more than its reservation"):
        ledger.answer(request(1), 0.1, reply(0.2))


def test_the_terms_of_an_account_stay(ledger):
    assert ledger.account(ACCOUNT) == ACCOUNT
    with pytest.raises(InputError, match="terms cannot be changed"):
        ledger.account(ACCOUNT._replace(epsilon=2.0))
    # The order was fixed when it was opened, whatever another version would choose.
    assert ledger.account(ACCOUNT._replace(alpha=3.0, limit=9.0)) == ACCOUNT
    ledger.account(ACCOUNT._replace(dataset="others", epsilon=2.0))
    assert ledger.remaining("others") == 1.0


def test_the_same_records_under_another_name_are_refused(ledger):
    ledger.account(ACCOUNT._replace(dataset="copy"))
    ledger.begin("patients", "s", "r", b"records", "{}")
    ledger.begin("patients", "s", "r", b"records", "{}")
    with pytest.raises(LedgerError, match="one data set has one"):
        ledger.begin("copy", "s", "r", b"records", "{}")


def test_one_process_has_one_ledger(ledger):
    assert Ledger.open(str(ledger.path)) is ledger
    failed = []

    def many(start):
        for number in range(start, start + 5):
            try:
                ledger.answer(request(number), 0.01, reply(0.01))
            except Exception as error:
                failed.append(error)

    threads = [threading.Thread(target=many, args=(10 * k,)) for k in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed and ledger.spent("patients") == pytest.approx(0.15)


SECOND = """
import sys
from fedpdmc.errors import LedgerError
from fedpdmc.privacy.ledger import read
from fedpdmc.privacy.ledger import Ledger
try:
    Ledger.open(sys.argv[1])
except LedgerError as error:
    print("refused:", error)
print("entries", len(read(sys.argv[1])), "jax" in sys.modules, "numpy" in sys.modules)
"""


def in_process(script, *arguments, **options):
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)], capture_output=True, text=True, **options
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_second_process_is_refused_and_may_read(ledger):
    ledger.answer(request(0), 0.1, reply())
    said = in_process(SECOND, ledger.path)
    assert "refused:" in said and "in use by another process" in said
    assert "entries 3 False False" in said
    ledger.close()
    assert "refused" not in in_process(SECOND, ledger.path)


def test_a_forked_process_does_not_write(ledger):
    ledger._pid += 1
    with pytest.raises(LedgerError, match="another process"):
        ledger.answer(request(0), 0.1, reply())
    ledger._pid -= 1


FULL = """
import resource, signal, sys
from fedpdmc.errors import LedgerError
from fedpdmc.privacy.ledger import *
from fedpdmc.privacy.ledger import create_ledger
ledger = Ledger.open(create_ledger(sys.argv[1]))
ledger.account(Account("patients", 1.0, 1e-6, "replace", 20.0, 1.0))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
size = ledger.path.stat().st_size
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20000, size + 20000))
told = 0
try:
    for number in range(1000):
        request = LedgerRequest("patients", "s", "r", "round", number, b"p")
        ledger.answer(request, 0.0005, lambda key: Reply(b"x" * 900, 1.0, 0.0005))
        told += 1
except LedgerError as error:
    print(error)
try:
    ledger.answer(LedgerRequest("patients", "s", "r", "round", 5000, b"p"), 0.0005, lambda key: Reply(b"", 1.0, 0.0005))
    print("ANSWERED")
except LedgerError as error:
    print(error)
print("told", told)
"""


def test_a_full_disk_is_refused_and_nothing_is_lost(tmp_path):
    said = in_process(FULL, tmp_path / "ledger.db")
    told = int(said.split()[-1])
    assert "Free disk space" in said and "is closed" in said and "ANSWERED" not in said
    assert 0 < told < 1000
    entries = [entry for entry in read(tmp_path / "ledger.db") if entry.kind == "round"]
    reserved = [entry for entry in read(tmp_path / "ledger.db") if entry.kind == "round reserved"]
    assert len(reserved) >= len(entries) >= told
    assert read(tmp_path / "ledger.db")[-1].spent == pytest.approx(0.0005 * len(reserved))


def test_what_is_reserved_counts_and_gives_way_to_the_cost(ledger):
    inside = []

    def work(key):
        inside.append((ledger.spent("patients"), ledger.remaining("patients")))
        # Another request, from another thread, is neither kept waiting nor given what is reserved.
        other = threading.Thread(target=lambda: ledger.answer(request(1), 0.1, reply()))
        other.start()
        other.join(60)
        assert not other.is_alive()
        with pytest.raises(BudgetSpent):
            ledger.answer(request(2), 0.5, reply())
        return Reply(b"x", 1.0, 0.05)

    ledger.answer(request(0), 0.6, work)
    assert inside == [(pytest.approx(0.6), pytest.approx(0.4))]
    assert ledger.spent("patients") == ledger.spent("patients", "s") == pytest.approx(0.15)
    again = reopened(ledger)
    assert again.spent("patients") == again.spent("patients", "s") == pytest.approx(0.15)
    # The plan of a round that was begun stays its plan.
    with pytest.raises(PlanRefused, match="OTHER_PLAN"):
        again.answer(request(0, b"q" * 32), 0.1, reply())


def test_what_was_cut_short_is_not_made_for_more_than_was_reserved(ledger):
    def cut(key):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ledger.answer(request(0), 0.1, cut)
    ledger.answer(request(1), 0.85, reply(0.85))
    with pytest.raises(PlanRefused, match="reservation"):
        ledger.answer(request(0), 0.5, reply(0.5))
    ledger.answer(request(0), 0.1, reply(0.1))
    assert ledger.spent("patients") == pytest.approx(0.95)
