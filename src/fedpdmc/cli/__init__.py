"""The command line. Importing it, or asking it for help, does not import JAX."""

from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import click
import typer
from typer.core import TyperGroup

from fedpdmc.console.interrupts import remains
from fedpdmc.experiments import NAMES

# Locals in a traceback could show a site's records, so they are never printed.
app = typer.Typer(
    name="fedpdmc",
    help="Exact federated Bayesian sampling: the coordinator plans, the sites object, no record leaves its site.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fedpdmc {version('fedpdmc')}")
        raise typer.Exit


@app.callback()
def _root(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    pass


@app.command("demo")
def _demo(
    out: Annotated[Path, typer.Option(help="Folder for the forest plot and the posterior.")] = Path("fedpdmc-demo"),
    seed: Annotated[int, typer.Option(help="Seed of the run.")] = 2012,
    check: Annotated[bool, typer.Option(help="Compare with pooled NUTS, if BlackJAX is installed.")] = True,
) -> None:
    """Fit a real trial in four hospitals without pooling their records."""
    remains("Interrupted: nothing was kept. `fedpdmc demo` starts anew.")
    from fedpdmc.cli.demo import run

    raise typer.Exit(0 if run(out, seed=seed, check=check) else 1)


@app.command("reproduce")
def _reproduce(
    name: Annotated[str, typer.Argument(help="Which figure or claim.", click_type=click.Choice([*NAMES, "all"]))],
    quick: Annotated[bool, typer.Option("--quick", help="A toy size, to see that it works.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for figures (PNG, SVG) and numbers (CSV).")] = Path("fedpdmc-paper"),
) -> None:
    """Make the paper's figures anew and say how each comparison came out."""
    from importlib.util import find_spec

    missing = [package for package in ("blackjax", "scipy") if find_spec(package) is None]
    if missing:
        typer.echo(
            f"{' and '.join(missing)} not found: install the extra 'experiments' (fedpdmc[experiments]).", err=True
        )
        raise typer.Exit(2)
    remains(f"Interrupted: the figures that were finished are in {out}.")
    from fedpdmc.experiments import reproduce

    good = True
    for verdict in reproduce(name, out, quick):
        typer.echo(str(verdict))
        good &= verdict.holds
    typer.echo(f"Figures and numbers are in {out}.")
    raise typer.Exit(0 if good else 1)


study_app = typer.Typer(help="A study's contract.", no_args_is_help=True)
audit_app = typer.Typer(help="A site's audit log.", no_args_is_help=True)
app.add_typer(study_app, name="study")
app.add_typer(audit_app, name="audit")

Contract = Annotated[Path, typer.Argument(help="The contract, study.toml.")]
Store = Annotated[Path, typer.Option(help="Folder in which this party keeps the run.")]
Keys = Annotated[Path | None, typer.Option(help="This party's folder of keys.")]
Plain = Annotated[bool, typer.Option("--plain-on-loopback", help="No TLS, on this machine's own address only.")]
Data = Annotated[str, typer.Option(help="Records: a .csv or .parquet file, sqlite:PATH or postgresql://...")]
Query = Annotated[str | None, typer.Option(help="The query that gives the records, for a database.")]
Check = Annotated[bool, typer.Option("--check", help="Look at everything that is needed, and stop: nothing joins.")]
Status = Annotated[
    str | None, typer.Option(help="Show how the run stands on this address, such as 127.0.0.1:8080; off by default.")
]
OnStall = Annotated[
    str | None, typer.Option(help="A command that is run when nothing comes from someone, and when that is over.")
]
StallAfter = Annotated[float, typer.Option(min=1.0, help="Seconds after which it is a stall.")]
Name = Annotated[str, typer.Option(help="The site's name in the contract.")]


def _secured(keys: Path | None, plain: bool) -> None:
    if (keys is None) != plain:
        raise typer.BadParameter("give --keys, or --plain-on-loopback to do without")


class _Keys(TyperGroup):
    """`fedpdmc keys FOLDER` makes all keys of a study; `request` and `sign` are for parties that make their own."""

    def parse_args(self, ctx, args):
        return super().parse_args(ctx, self._with_command(args))

    def resolve_command(self, ctx, args):
        return super().resolve_command(ctx, self._with_command(args))

    def _with_command(self, args):
        named = not args or args[0] in self.commands or args[0] == "--help"
        return list(args) if named else ["make", *args]


keys_app = typer.Typer(help="A study's certificates.", no_args_is_help=True, cls=_Keys)
app.add_typer(keys_app, name="keys")


@keys_app.command("request")
def _request(
    folder: Annotated[Path, typer.Argument(help="This party's folder of keys.")],
    name: Annotated[str, typer.Option(help="The site's name in the contract, or coordinator.")],
) -> None:
    """Make this party's own key, and a request for the authority to sign."""
    from fedpdmc.cli import studies

    raise typer.Exit(studies.guarded(lambda: studies.keys_request(folder, name)))


@keys_app.command("sign")
def _sign(
    authority: Annotated[Path, typer.Argument(help="The authority's folder; made if it is not there.")],
    request: Annotated[Path, typer.Argument(help="A party's request.pem.")],
    name: Annotated[str, typer.Option(help="Whose request it is.")],
    out: Annotated[Path, typer.Option(help="Where the certificates for that party go.")],
    days: Annotated[int, typer.Option(min=1, help="How long the certificate is good for.")] = 365,
    host: Annotated[list[str] | None, typer.Option(help="A host name or address of the coordinator.")] = None,
) -> None:
    """Sign a party's request as the study's authority."""
    from fedpdmc.cli import studies

    raise typer.Exit(studies.guarded(lambda: studies.keys_sign(authority, request, name, out, days, host or [])))


@keys_app.command("make")
def _keys(
    folder: Annotated[Path, typer.Argument(help="Where the keys go.")],
    study: Annotated[Path | None, typer.Option(help="A contract whose sites get certificates.")] = None,
    site: Annotated[list[str] | None, typer.Option(help="A site that gets a certificate.")] = None,
    days: Annotated[int, typer.Option(min=1, help="How long they are good for.")] = 365,
    host: Annotated[list[str] | None, typer.Option(help="A host name or address of a Flower SuperLink.")] = None,
) -> None:
    """Make a certificate authority, and certificates for the coordinator and the sites of a study."""
    from fedpdmc.cli import studies

    raise typer.Exit(studies.guarded(lambda: studies.keys(folder, study, site or [], days, host or [])))


@app.command("revoke")
def _revoke(
    folder: Annotated[Path, typer.Argument(help="Keys of the party that is to refuse, such as keys/coordinator.")],
    certificate: Annotated[list[Path] | None, typer.Option(help="A certificate.pem to shut out.")] = None,
    fingerprint: Annotated[list[str] | None, typer.Option(help="The SHA-256 of one, in hexadecimal digits.")] = None,
) -> None:
    """Shut a certificate out: a coordinator refuses it from now on, also on connections that are open."""
    from fedpdmc.cli import studies

    raise typer.Exit(studies.guarded(lambda: studies.revoke_certificates(folder, certificate or [], fingerprint or [])))


@app.command("bundle")
def _bundle(
    study: Contract,
    authority: Annotated[Path, typer.Option(help="The certificate of the study's authority, authority.pem.")],
    coordinator: Annotated[str, typer.Option(help="The coordinator's address as sites reach it, host:port.")],
    out: Annotated[Path, typer.Option(help="The file for the sites, a zip archive.")],
    server_name: Annotated[
        str, typer.Option(help="The name that the coordinator's certificate must have.")
    ] = "coordinator",
) -> None:
    """Put all that a site needs of others into one file."""
    from fedpdmc.cli import bundles, studies

    raise typer.Exit(studies.guarded(lambda: bundles.bundle(study, authority, coordinator, out, server_name)))


@app.command("join")
def _join(
    bundle: Annotated[Path, typer.Argument(help="The file that this site was sent.")],
    name: Name,
    data: Data,
    query: Query = None,
    folder: Annotated[Path, typer.Option(help="Where the study's files go at this site.")] = Path("study"),
    ledger: Annotated[Path | None, typer.Option(help="The site's privacy ledger; the user's own by default.")] = None,
) -> None:
    """Make a site ready from a bundle: key and request, policy, unit file, and a look at everything. Nothing joins."""
    from fedpdmc.cli import bundles, studies

    raise typer.Exit(studies.guarded(lambda: bundles.join(bundle, name, data, query, folder, ledger)))


@study_app.command("check")
def _check(
    study: Contract,
    records: Annotated[int, typer.Option(min=1, help="Made-up records of each site.")] = 100,
) -> None:
    """Read a contract, try it on made-up records, and say what it will cost."""
    from fedpdmc.cli import studies

    raise typer.Exit(studies.guarded(lambda: studies.check(study, records)))


@app.command("coordinator")
def _coordinator(
    study: Contract,
    listen: Annotated[str, typer.Option(help="The one address to listen on, host:port.")],
    store: Store,
    keys: Keys = None,
    plain_on_loopback: Plain = False,
    seed: Annotated[int | None, typer.Option(help="The coordinator's seed; of a new run only.")] = None,
    ess: Annotated[float | None, typer.Option(help="Effective samples, instead of what the contract asks for.")] = None,
    duration: Annotated[float | None, typer.Option(help="Process time, instead of what the contract asks for.")] = None,
    keep: Annotated[
        str, typer.Option(help="In memory: skeleton, or draws for long runs. The store has all.")
    ] = "skeleton",
    out: Annotated[Path | None, typer.Option(help="Where the posterior goes; into the store by default.")] = None,
    check: Check = False,
    status: Status = None,
    on_stall: OnStall = None,
    stall_after: StallAfter = 300.0,
) -> None:
    """Run a study with sites that dial in. Started again with the same store, it goes on."""
    _secured(keys, plain_on_loopback)
    if check:
        from fedpdmc.cli import preflight

        raise typer.Exit(preflight.coordinator(study, listen, keys, store))
    remains(
        f"Interrupted. What was drawn is in {store}, and the sites wait: the same command goes on from there.",
        finishes=True,
    )
    from fedpdmc.cli import studies

    raise typer.Exit(
        studies.guarded(
            lambda: studies.coordinator(
                study,
                listen,
                keys,
                store,
                seed,
                ess,
                duration,
                keep,
                out,
                studies.watching(status, on_stall, stall_after),
            )
        )
    )


@app.command("site")
def _site(
    study: Contract,
    name: Name,
    data: Data,
    policy: Annotated[Path, typer.Option(help="What this site allows, policy.toml.")],
    coordinator: Annotated[str, typer.Option(help="The coordinator's address, host:port.")],
    store: Store,
    query: Query = None,
    keys: Keys = None,
    plain_on_loopback: Plain = False,
    seed: Annotated[int | None, typer.Option(help="Only to make a trial repeatable.")] = None,
    ledger: Annotated[Path | None, typer.Option(help="The site's privacy ledger; the user's own by default.")] = None,
    seeded_for_tests: Annotated[
        bool, typer.Option("--seeded-for-tests", help="Take a seed in spite of a privacy budget: nothing is private.")
    ] = False,
    server_name: Annotated[
        str, typer.Option(help="The name that the coordinator's certificate must have.")
    ] = "coordinator",
    check: Check = False,
    status: Status = None,
    on_stall: OnStall = None,
    stall_after: StallAfter = 300.0,
) -> None:
    """Take part in a study. Started again with the same store, it goes on."""
    _secured(keys, plain_on_loopback)
    if check:
        from fedpdmc.cli import preflight

        raise typer.Exit(
            preflight.site(study, name, data, query, policy, coordinator, keys, store, ledger, server_name)
        )
    remains(
        f"Interrupted. The site's log is in {store}, and the run waits: the same command takes part again.",
        finishes=True,
    )
    from fedpdmc.cli import studies

    raise typer.Exit(
        studies.guarded(
            lambda: studies.site(
                study,
                name,
                data,
                query,
                policy,
                coordinator,
                keys,
                store,
                seed,
                ledger,
                seeded_for_tests,
                server_name,
                studies.watching(status, on_stall, stall_after),
            )  # fmt: skip
        )
    )


@app.command("run")
def _run(
    study: Contract,
    data: Annotated[list[str], typer.Option(help="NAME=RECORDS, for each site.")],
    query: Annotated[
        list[str] | None, typer.Option(help="NAME=QUERY, for sites whose records are in a database.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the run.")] = None,
    site_seed: Annotated[list[str] | None, typer.Option(help="NAME=SEED, for sites with a seed of their own.")] = None,
    store: Annotated[Path | None, typer.Option(help="Folder in which the run is kept as it grows.")] = None,
    out: Annotated[Path | None, typer.Option(help="Where the posterior goes.")] = None,
) -> None:
    """Run a study with all its sites in this process, to try it out."""
    if store is None:
        remains("Interrupted: nothing was kept. With --store FOLDER an interrupted run can go on.", finishes=True)
    else:
        remains(f"Interrupted. What was drawn is in {store}: the same command goes on from there.", finishes=True)
    from fedpdmc.cli import studies

    raise typer.Exit(studies.guarded(lambda: studies.run(study, data, query or [], seed, site_seed or [], store, out)))


@app.command("flower-app")
def _flower_app(folder: Annotated[Path, typer.Argument(help="Where the app goes.")]) -> None:
    """Write a Flower app that runs a study on a SuperLink and its SuperNodes."""
    from fedpdmc.cli import studies

    raise typer.Exit(studies.guarded(lambda: studies.flower_app(folder)))


@audit_app.command("show")
def _show(store: Annotated[Path, typer.Argument(help="The site's store.")]) -> None:
    """Print every request and answer of a site's log, its seals checked."""
    from fedpdmc.cli import studies

    raise typer.Exit(studies.guarded(lambda: studies.audit_show(store)))


@audit_app.command("compare")
def _compare(
    store: Annotated[Path, typer.Argument(help="The site's store.")],
    seals: Annotated[Path, typer.Option(help="The coordinator's seals.jsonl.")],
    authority: Annotated[Path, typer.Option(help="The study's authority.pem.")],
) -> None:
    """Compare a site's log with the seals that the coordinator has kept of it."""
    from fedpdmc.cli import studies

    raise typer.Exit(studies.guarded(lambda: studies.audit_compare(store, seals, authority)))


@audit_app.command("replay")
def _replay(
    study: Contract,
    name: Name,
    data: Data,
    store: Store,
    query: Query = None,
    ledger: Annotated[Path | None, typer.Option(help="The site's privacy ledger; the user's own by default.")] = None,
) -> None:
    """Answer every request of a site's log again, from its records, compare, and say what could not be compared."""
    from fedpdmc.cli import studies

    raise typer.Exit(studies.guarded(lambda: studies.audit_replay(study, name, data, query, store, ledger)))


privacy_app = typer.Typer(help="What a site gives away, and what that costs.", no_args_is_help=True)
ledger_app = typer.Typer(help="A site's privacy ledger.", no_args_is_help=True)
app.add_typer(privacy_app, name="privacy")
app.add_typer(ledger_app, name="ledger")

Epsilon = Annotated[float, typer.Option(help="The total epsilon.")]
SomeEpsilon = Annotated[float | None, typer.Option(help="The total epsilon; leave out to have it worked out.")]
Delta = Annotated[float, typer.Option(help="The delta.")]
Excess = Annotated[float | None, typer.Option(help="The excess rate; leave out to have the least one worked out.")]


@privacy_app.command("arrival")
def _arrival(
    epsilon: Epsilon,
    sensitivity: Annotated[float, typer.Option(help="K: how much one record can change the rate.")],
    excess: Excess = None,
    delta: Annotated[float | None, typer.Option(help="The delta, to have the least excess rate worked out.")] = None,
) -> None:
    """The time of one switch: the paper's Theorem 5.1 both ways."""
    from fedpdmc.cli import privacy

    raise typer.Exit(privacy.printed(lambda: privacy.arrival(epsilon, sensitivity, excess, delta)))


@privacy_app.command("horizon")
def _horizon(
    epsilon: Epsilon,
    k_inf: Annotated[float, typer.Option(help="Largest change of one coordinate's rate.")],
    k_1: Annotated[float, typer.Option(help="Largest change of all rates together, in sum.")],
    excess: Excess = None,
    horizon: Annotated[
        float | None, typer.Option(help="The horizon, to have the least excess rate worked out.")
    ] = None,
) -> None:
    """One censored arrival without delta: the longest plan, or the least excess rate."""
    from fedpdmc.cli import privacy

    raise typer.Exit(privacy.printed(lambda: privacy.horizon(epsilon, k_inf, k_1, excess, horizon)))


@privacy_app.command("run")
def _privacy_run(
    k_2: Annotated[float, typer.Option(help="Largest change of all rates together, in Euclidean norm.")],
    excess: Annotated[float, typer.Option(help="The excess rate.")],
    delta: Delta,
    observed: Annotated[float | None, typer.Option(help="Cap of observed time, over rounds and chains.")] = None,
    epsilon: SomeEpsilon = None,
    dim: Annotated[int, typer.Option(min=1, help="Number of coordinates.")] = 1,
) -> None:
    """A whole run: epsilon from a cap of observed time, or the cap from epsilon."""
    from fedpdmc.cli import privacy

    k = privacy.Sensitivity(k_2, k_2 * dim**0.5, k_2)
    raise typer.Exit(privacy.printed(lambda: privacy.run(k, excess, delta, observed, epsilon)))


@privacy_app.command("plan")
def _plan(
    records: Annotated[int, typer.Option(min=1, help="Records of the smallest site.")],
    sites: Annotated[int, typer.Option(min=1, help="Number of sites.")],
    dim: Annotated[int, typer.Option(min=1, help="Number of parameters.")],
    epsilon: Epsilon,
    delta: Delta,
    ess: Annotated[float, typer.Option(help="Effective samples wanted.")] = 100.0,
    sensitivity: Annotated[
        float | None, typer.Option(help="K_2 in posterior standard deviations; estimated from the records if left out.")
    ] = None,
    neighbours: Annotated[str, typer.Option(help="replace, add-remove or label.")] = "replace",
    plot: Annotated[Path | None, typer.Option(help="Where a picture of the frontier goes.")] = None,
) -> None:
    """What a budget buys: excess rate, observed time, horizon, rounds and effective samples."""
    from fedpdmc.cli import privacy

    def work() -> str:
        usual = privacy.planning.usual_sensitivity(records, sites, dim, neighbours)
        known = usual if sensitivity is None else sensitivity
        return privacy.plan(privacy.planning.Question(records, sites, dim, epsilon, delta, known, ess), plot)

    raise typer.Exit(privacy.printed(work))


@ledger_app.command("create")
def _ledger_create(
    path: Annotated[Path | None, typer.Argument(help="Where; the usual place if left out.")] = None,
) -> None:
    """Create an empty ledger, once for a data set: a site with a privacy budget does not start without one."""
    from fedpdmc.cli import privacy

    raise typer.Exit(privacy.printed(lambda: privacy.create(path)))


@ledger_app.command("adopt")
def _ledger_adopt(path: Annotated[Path, typer.Argument(help="The ledger, at its new place.")]) -> None:
    """Use a ledger that was moved to another disk. Never a copy beside the one in use: that would be a second budget."""
    from fedpdmc.cli import privacy

    raise typer.Exit(privacy.printed(lambda: privacy.adopt(path)))


@ledger_app.command("show")
def _ledger_show(
    path: Annotated[Path | None, typer.Argument(help="The ledger; the usual one if left out.")] = None,
    dataset: Annotated[str | None, typer.Option(help="One data set only.")] = None,
) -> None:
    """Print a ledger's entries, checked, with the running total of epsilon."""
    from fedpdmc.cli import privacy

    raise typer.Exit(privacy.printed(lambda: privacy.ledger(path, dataset)))
