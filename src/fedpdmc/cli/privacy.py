"""``fedpdmc privacy`` and ``fedpdmc ledger``: calculators for privacy budgets, and a site's privacy ledger."""

import datetime
import math
from pathlib import Path
from textwrap import fill
from typing import Annotated

import typer

from fedpdmc.cli.runner import command
from fedpdmc.errors import InputError

privacy_app = typer.Typer(help="Compute what a privacy budget costs and buys.", no_args_is_help=True)
ledger_app = typer.Typer(help="Create and inspect a site's privacy ledger.", no_args_is_help=True)

Epsilon = Annotated[float, typer.Option(help="The total epsilon.")]
Delta = Annotated[float, typer.Option(help="The delta.")]
Excess = Annotated[float | None, typer.Option(help="The excess rate. Leave it out to compute the smallest one.")]


def _check_one(names: str, first: object, second: object) -> None:
    if (first is None) == (second is None):
        raise InputError(names, "both or neither", "Give exactly one; the other is computed.")


@command(privacy_app, "arrival")
def _arrival(
    epsilon: Epsilon,
    sensitivity: Annotated[float, typer.Option(help="K: the largest change of the rate by one record.")],
    excess: Excess = None,
    delta: Annotated[float | None, typer.Option(help="The delta, to compute the smallest excess rate.")] = None,
) -> None:
    """Privacy of the time of one switch, by the paper's Theorem 5.1."""
    from fedpdmc.privacy.accountant import one_arrival_delta, one_arrival_excess

    _check_one("--excess, --delta", excess, delta)
    if excess is not None:
        found = f"delta = {one_arrival_delta(epsilon, sensitivity, excess):.6g}"
    else:
        assert delta is not None
        found = f"excess rate >= {one_arrival_excess(epsilon, delta, sensitivity):.6g}"
    print(f"{found} for the time of ONE switch (paper, Theorem 5.1); neither its mark nor a second one.")


@command(privacy_app, "horizon")
def _horizon(
    epsilon: Epsilon,
    k_inf: Annotated[float, typer.Option(help="Largest change of one coordinate's rate by one record.")],
    k_1: Annotated[float, typer.Option(help="Largest change of the sum of all rates by one record.")],
    excess: Excess = None,
    horizon: Annotated[float | None, typer.Option(help="The horizon, to compute the smallest excess rate.")] = None,
) -> None:
    """Privacy of one arrival with delta = 0: the longest plan, or the smallest excess rate."""
    from fedpdmc.privacy.accountant import censored_excess, censored_horizon

    _check_one("--excess, --horizon", excess, horizon)
    if excess is not None:
        longest = censored_horizon(epsilon, k_inf, k_1, excess)
        impossible = f"with excess rate {excess:g} an immediate arrival costs more than epsilon = {epsilon:g}"
        found = f"horizon <= {longest:.6g}" if longest else None
    else:
        assert horizon is not None
        least = censored_excess(epsilon, horizon, k_inf, k_1)
        impossible = f"K_1 times the horizon is {k_1 * horizon:g}, at least epsilon. No excess rate is enough"
        found = None if math.isinf(least) else f"excess rate >= {least:.6g}"
    if found is None:
        print(f"None: {impossible}.")
    else:
        print(f"{found}: one arrival with its mark, or no arrival, is {epsilon:g}-DP with delta = 0.")


@command(privacy_app, "run")
def _run(
    k_2: Annotated[float, typer.Option(help="Largest change of all rates by one record, in Euclidean norm.")],
    excess: Annotated[float, typer.Option(help="The excess rate.")],
    delta: Delta,
    observed: Annotated[float | None, typer.Option(help="Limit of observed time, over all rounds and chains.")] = None,
    epsilon: Annotated[float | None, typer.Option(help="The total epsilon, to compute the limit.")] = None,
    dim: Annotated[int, typer.Option(min=1, help="Number of coordinates.")] = 1,
) -> None:
    """Privacy of a whole run: epsilon from a limit of observed time, or the limit from epsilon."""
    from fedpdmc.privacy.accountant import Sensitivity, run_cap, run_epsilon

    _check_one("--observed, --epsilon", observed, epsilon)
    k = Sensitivity(k_2, k_2 * dim**0.5, k_2)
    if observed is not None:
        found = f"epsilon = {run_epsilon(k, excess, observed, delta):.6g} at delta = {delta:g}"
        print(f"{found} for the whole run, if observed time is at most {observed:g}.")
    else:
        assert epsilon is not None
        cap = f"observed time <= {run_cap(k, excess, epsilon, delta):.6g} over all rounds and chains"
        print(f"{cap}: epsilon = {epsilon:g} at delta = {delta:g} in total.")


@command(privacy_app, "plan")
def _plan(
    records: Annotated[int, typer.Option(min=1, help="Records of the smallest site.")],
    sites: Annotated[int, typer.Option(min=1, help="Number of sites.")],
    dim: Annotated[int, typer.Option(min=1, help="Number of parameters.")],
    epsilon: Epsilon,
    delta: Delta,
    ess: Annotated[float, typer.Option(help="Effective sample size wanted.")] = 100.0,
    sensitivity: Annotated[
        float | None, typer.Option(help="K_2 in posterior standard deviations. Default: estimated from the records.")
    ] = None,
    neighbours: Annotated[str, typer.Option(help="replace, add-remove or label.")] = "replace",
    colluding: Annotated[
        int, typer.Option(min=0, help="Sites that may collude with the coordinator, if sites share noise.")
    ] = 1,
    plot: Annotated[
        Path | None, typer.Option(help="Where to save a plot of the frontier; one of all ways is saved next to it.")
    ] = None,
) -> None:
    """What a budget buys: one shot, one shot on a secure sum and the exact chain, compared, with a recommendation."""
    from fedpdmc.privacy import budget_planning

    usual = budget_planning.usual_sensitivity(records, sites, dim, neighbours)
    known = usual if sensitivity is None else sensitivity
    question = budget_planning.Question(records, sites, dim, epsilon, delta, known, ess)
    print(budget_planning.text(question, neighbours, colluding))
    print(fill(f"The exact chain, in other shapes. {budget_planning.advice(question)}", 79, initial_indent="\n"))
    print(f"\n{budget_planning.table(question)}")
    if plot is None:
        return
    others = [question._replace(epsilon=factor * epsilon) for factor in (1.0, 2.0, 4.0, 8.0)]
    budget_planning.plot(others, plot)
    methods = plot.with_stem(f"{plot.stem}-ways")
    budget_planning.plot_comparison(question, methods, colluding)
    print(f"\nFrontiers for epsilon up to {others[-1].epsilon:g}: {plot}; all methods: {methods}")


@command(ledger_app, "create")
def _create(
    path: Annotated[Path | None, typer.Argument(help="The new file. Default: the usual place.")] = None,
) -> None:
    """Create an empty ledger, once for each data set. A site with a privacy budget does not start without one."""
    from fedpdmc.privacy.budget import default_path
    from fedpdmc.privacy.ledger import create_ledger

    made = create_ledger(default_path() if path is None else path)
    print(f"{made}: an empty ledger. Keep it with the records: from now on the site needs it.")


@command(ledger_app, "adopt")
def _adopt(path: Annotated[Path, typer.Argument(help="The ledger, at its new place.")]) -> None:
    """Use a ledger that was moved to another disk. Never use a second copy: it would be a second budget."""
    from fedpdmc.privacy.ledger import adopt_ledger

    adopt_ledger(path)
    print(f"{path}: in use from now on. Delete all other copies.")


@command(ledger_app, "show")
def _show(
    path: Annotated[Path | None, typer.Argument(help="The ledger. Default: the usual one.")] = None,
    dataset: Annotated[str | None, typer.Option(help="Show one data set only.")] = None,
) -> None:
    """Print a ledger's entries with the running total of epsilon, after checking its hash chain."""
    from fedpdmc.privacy.accountant import spent_epsilon
    from fedpdmc.privacy.budget import default_path
    from fedpdmc.privacy.ledger import account_of, read

    entries = read(default_path() if path is None else path)
    accounts = {entry.dataset: account_of(entry) for entry in entries if entry.kind == "account"}
    if dataset is not None and dataset not in accounts:
        raise InputError("--dataset", repr(dataset), f"The ledger has {', '.join(map(repr, accounts)) or 'none'}.")
    line = "{:<20} {:<16} {:<12} {:<8} {:>6} {:>10} {:>15}".format
    print(line("time", "data set", "study", "kind", "round", "observed", "running epsilon"))
    for e in (entry for entry in entries if dataset in (None, entry.dataset)):
        account, spent = accounts[e.dataset], 0.0
        if e.spent > 0:
            spent = spent_epsilon(account.bound, account.alpha, e.spent, account.delta)
        print(line(_when(e.time), e.dataset, e.study, e.kind, e.round, f"{e.exposure:.4g}", f"{spent:.4g}"))
    for name, account in accounts.items():
        if dataset not in (None, name):
            continue
        own = [entry for entry in entries if entry.dataset == name]
        print(
            f"{name}: {100 * own[-1].spent / account.limit:.4g} % spent of epsilon = {account.epsilon:g} at delta = "
            f"{account.delta:g} ({account.neighbours}), in total over all studies; alpha = {account.alpha:.4g}, "
            f"{account.bound} bound; "
            f"{sum(e.kind == 'round' for e in own)} rounds, {sum(e.kind == 'release' for e in own)} releases."
        )
    print(f"{len(entries)} entries, hash chain intact; last hash {entries[-1].hash.hex() if entries else '-'}")


@command(ledger_app, "data-sets")
def _data_sets(
    path: Annotated[Path | None, typer.Argument(help="The ledger in the same folder. Default: the usual one.")] = None,
) -> None:
    """Print which record sets this site's studies have used, with and without budgets. Equal hashes are equal records."""
    from fedpdmc.privacy.budget import default_path
    from fedpdmc.privacy.data_sets import PARTS, PERSON, DataSets

    register = DataSets((default_path() if path is None else path).parent)
    if not register.path.is_file():
        raise InputError("path", f"no register at {register.path}", "A site makes it when it first answers a request.")
    line = "{:<20} {:<16} {:<20} {:>9} {:<12} {:<5} {:>9} {}".format
    print(line("first release", "data set", "study", "records", "hash", "noise", "bits", "columns"))
    shown = {PERSON: "(person)"} | {name: f"({name[1:]})" for name in PARTS}
    for use in register.uses():
        noise, columns = "no" if use.exact else "yes", ", ".join(shown.get(name, name) for name in use.columns)
        words = (_when(use.time), use.dataset, use.study, use.count, use.digest[:12], noise, f"{use.bits:.4g}", columns)
        print(line(*words))


def _when(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S")
