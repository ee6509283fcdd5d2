"""The privacy calculators and the ledger, as they are called from the command line."""

from __future__ import annotations

import datetime
import math
import sys
from collections.abc import Callable
from pathlib import Path

from fedpdmc.errors import FedPDMCError, InputError
from fedpdmc.privacy import comparison, planning
from fedpdmc.privacy.accountant import Sensitivity, run_cap, run_epsilon, running_epsilon
from fedpdmc.privacy.budget import default_path
from fedpdmc.privacy.ledger_entries import Entry, account_of, read
from fedpdmc.privacy.ledger_file import adopt_ledger, create_ledger
from fedpdmc.privacy.single_arrival import censored_excess, censored_horizon, one_arrival_delta, one_arrival_excess

REFUSED = 2


def printed(work: Callable[[], str]) -> int:
    """Print what a command finds; an error that has a remedy is a sentence, not a traceback."""
    try:
        print(work())
    except FedPDMCError as error:
        print(f"fedpdmc: {error}", file=sys.stderr)
        return REFUSED
    return 0


def arrival(epsilon: float, sensitivity: float, excess: float | None, delta: float | None) -> str:
    """Theorem 5.1 both ways."""
    if (excess is None) == (delta is None):
        raise InputError("--excess, --delta", "both or neither", "Give the one that you know.")
    if excess is not None:
        found = one_arrival_delta(epsilon, sensitivity, excess)
        return (
            f"delta = {found:.6g} for the time of ONE switch (paper, Theorem 5.1); neither its mark nor a second one."
        )
    assert delta is not None
    found = one_arrival_excess(epsilon, delta, sensitivity)
    return f"excess rate >= {found:.6g} for the time of ONE switch (paper, Theorem 5.1); neither its mark nor a second one."


def horizon(epsilon: float, k_inf: float, k_1: float, excess: float | None, length: float | None) -> str:
    """The censored arrival both ways."""
    if (excess is None) == (length is None):
        raise InputError("--excess, --horizon", "both or neither", "Give the one that you know.")
    if excess is not None:
        longest = censored_horizon(epsilon, k_inf, k_1, excess)
        if longest == 0:
            return f"None: with excess rate {excess:g} an arrival at once costs more than epsilon = {epsilon:g}."
        return f"horizon <= {longest:.6g}: one arrival, its mark, or silence, is {epsilon:g}-DP with delta = 0."
    assert length is not None
    least = censored_excess(epsilon, length, k_inf, k_1)
    if math.isinf(least):
        return f"None: K_1 times the horizon is {k_1 * length:g}, at least epsilon: no excess rate is enough."
    return f"excess rate >= {least:.6g}: one arrival, its mark, or silence, is {epsilon:g}-DP with delta = 0."


def run(k: Sensitivity, excess: float, delta: float, observed: float | None, epsilon: float | None) -> str:
    """The account of a whole run both ways."""
    if (observed is None) == (epsilon is None):
        raise InputError("--observed, --epsilon", "both or neither", "Give the one that you know.")
    if observed is not None:
        found = run_epsilon(k, excess, observed, delta)
        return (
            f"epsilon = {found:.6g} at delta = {delta:g} for the whole run, if observed time is capped at {observed:g}."
        )
    assert epsilon is not None
    cap = run_cap(k, excess, epsilon, delta)
    return (
        f"observed time <= {cap:.6g}, over all rounds and chains: epsilon = {epsilon:g} at delta = {delta:g} in total."
    )


def plan(question: planning.Question, picture: Path | None) -> str:
    """What a budget buys: the ways to an answer, the frontier of the exact chain at its best, and pictures of both."""
    chain = f"The exact chain at its best. {planning.advice(question)}"
    text = "\n\n".join([comparison.text(question), chain, planning.table(question)])
    if picture is None:
        return text
    others = [question._replace(epsilon=factor * question.epsilon) for factor in (1.0, 2.0, 4.0, 8.0)]
    planning.plot(others, picture)
    ways = picture.with_stem(f"{picture.stem}-ways")
    comparison.plot(question, ways)
    return f"{text}\n\nThe frontiers for epsilon up to {others[-1].epsilon:g}: {picture}; all ways: {ways}"


def create(path: Path | None) -> str:
    """An empty ledger."""
    made = create_ledger(default_path() if path is None else path)
    return f"{made}: an empty ledger. Keep it where the records are kept; it must be there from now on."


def adopt(path: Path) -> str:
    """A ledger at a new place."""
    adopt_ledger(path)
    return f"{path}: used from here. Remove every other copy."


def ledger(path: Path | None, dataset: str | None) -> str:
    """A ledger's entries and accounts, checked, with the running total of epsilon."""
    entries = read(default_path() if path is None else path)
    accounts = {entry.dataset: account_of(entry) for entry in entries if entry.kind == "account"}
    if dataset is not None and dataset not in accounts:
        raise InputError("--dataset", repr(dataset), f"The ledger has {', '.join(map(repr, accounts)) or 'none'}.")
    lines = [
        f"{'time':<20} {'data set':<16} {'study':<12} {'kind':<8} {'round':>6} {'observed':>10} {'running epsilon':>15}"
    ]
    for entry in entries:
        if dataset in (None, entry.dataset):
            lines.append(_line(entry, accounts))
    for name, account in accounts.items():
        if dataset not in (None, name):
            continue
        own = [entry for entry in entries if entry.dataset == name]
        limit = account.limit if any(entry.kind.startswith("round") for entry in own) else account.release_limit
        lines.append(
            f"{name}: {100 * own[-1].spent / limit:.4g} % spent of epsilon = {account.epsilon:g} at delta = "
            f"{account.delta:g} ({account.neighbours}), in total over all studies; alpha = {account.alpha:.4g} fixed; "
            f"{sum(e.kind == 'round' for e in own)} rounds, {sum(e.kind == 'release' for e in own)} releases."
        )
    lines.append(
        f"{len(entries)} entries, the chain of hashes is whole; last hash {entries[-1].hash.hex() if entries else '-'}"
    )
    return "\n".join(lines)


def _line(entry: Entry, accounts) -> str:
    account = accounts[entry.dataset]
    when = datetime.datetime.fromtimestamp(entry.time, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S")
    spent = running_epsilon(account.alpha, entry.spent, account.delta) if entry.spent > 0 else 0.0
    return (
        f"{when:<20} {entry.dataset:<16} {entry.study:<12} {entry.kind:<8} {entry.round:>6} {entry.exposure:>10.4g} "
        f"{spent:>15.4g}"
    )
