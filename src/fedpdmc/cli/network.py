"""A study on a network: ``fedpdmc coordinator`` and ``site``, and the files from which sites are set up."""

import contextlib
import hashlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedpdmc.cli.runner import (
    CHECK_FAILED,
    Contract,
    Data,
    Ledger,
    LogFile,
    Query,
    ServerName,
    SiteName,
    Store,
    log_to,
    print_findings,
)
from fedpdmc.cli.study import verdict_in_summary
from fedpdmc.console.interrupts import INTERRUPTED, happened, remains
from fedpdmc.console.wrapping import say

if TYPE_CHECKING:
    from fedpdmc.operations.preflight import Check as Preflight
    from fedpdmc.operations.status import Watching

Keys = Annotated[Path | None, typer.Option(help="This party's folder of keys.")]
Plain = Annotated[bool, typer.Option("--plain-on-loopback", help="Connect without TLS, on this machine only.")]
Check = Annotated[bool, typer.Option("--check", help="Check the whole set-up and exit. Nothing is sent or started.")]
Status = Annotated[
    str | None, typer.Option(help="Serve a status page on this address, such as 127.0.0.1:8080. Default: none.")
]
OnStall = Annotated[
    str | None, typer.Option(help="Command to run when the other side stops responding, and when it is back.")
]
StallWebhook = Annotated[str | None, typer.Option(help="Address (https://...) to which the same is posted as JSON.")]
StallAfter = Annotated[float, typer.Option(min=1.0, help="Seconds without a response that count as a stall.")]


def coordinator(
    study: Contract,
    listen: Annotated[str, typer.Option(help="The address to listen on, host:port.")],
    store: Store,
    keys: Keys = None,
    plain_on_loopback: Plain = False,
    seed: Annotated[int | None, typer.Option(help="The coordinator's seed, for a new run.")] = None,
    ess: Annotated[float | None, typer.Option(help="Effective sample size; replaces the contract's.")] = None,
    duration: Annotated[float | None, typer.Option(help="Process time; replaces the contract's.")] = None,
    keep: Annotated[
        str, typer.Option(help="What to hold in memory: skeleton, or draws for long runs. The store has everything.")
    ] = "skeleton",
    out: Annotated[Path | None, typer.Option(help="Where to save the posterior. Default: in the store.")] = None,
    check: Check = False,
    status: Status = None,
    on_stall: OnStall = None,
    stall_webhook: StallWebhook = None,
    stall_after: StallAfter = 300.0,
    log_file: LogFile = None,
) -> int:
    """Run a study with sites that connect over the network. Restarted with the same store, it resumes."""
    _require_keys(keys, plain_on_loopback)
    log_to(log_file)
    if check:
        from fedpdmc.operations.preflight import CoordinatorCheck

        return _report(CoordinatorCheck(study, listen=listen, keys=keys, store=store))
    remains(
        f"Interrupted. The samples so far are in {store}, and the sites wait. Run the same command to resume.",
        finishes=True,
    )
    import fedpdmc as fp
    from fedpdmc.operations.status import CoordinatorBoard, watched

    watching = _watching(status, on_stall, stall_after, stall_webhook)
    with fp.connect(
        study, listen=listen, keys=keys, store=store, seed=seed, plain_on_loopback=plain_on_loopback
    ) as connection:
        if not sys.stderr.isatty():
            # On a terminal the log shows the address.
            say(f"listening on {connection.address}")
        page = contextlib.nullcontext() if watching is None else watched(CoordinatorBoard(connection), watching)
        with page, verdict_in_summary():
            post = fp.sample(connection, ess=ess, duration=duration, keep=keep)
        if happened():
            return INTERRUPTED
        target = store / "posterior.zarr" if out is None else out
        post.save(target)
        connection.finish()
    print(post.summary())
    say(f"Saved: {target} (read it with fedpdmc.load).")
    return 0


def site(
    study: Contract,
    name: SiteName,
    data: Data,
    policy: Annotated[Path, typer.Option(help="The site's rules for taking part, policy.toml.")],
    coordinator: Annotated[str, typer.Option(help="The coordinator's address, host:port.")],
    store: Store,
    query: Query = None,
    keys: Keys = None,
    plain_on_loopback: Plain = False,
    seed: Annotated[int | None, typer.Option(help="The site's seed, to make a trial repeatable.")] = None,
    ledger: Ledger = None,
    seeded_for_tests: Annotated[
        bool,
        typer.Option("--seeded-for-tests", help="Accept a seed despite a privacy budget: nothing is private then."),
    ] = False,
    server_name: ServerName = "coordinator",
    check: Check = False,
    status: Status = None,
    on_stall: OnStall = None,
    stall_webhook: StallWebhook = None,
    stall_after: StallAfter = 300.0,
    log_file: LogFile = None,
) -> int:
    """Take part in a study as one of its sites. Restarted with the same store, it resumes."""
    _require_keys(keys, plain_on_loopback)
    log_to(log_file)
    where = {"coordinator": coordinator, "keys": keys, "store": store}
    options = {"query": query, "ledger": ledger, "server_name": server_name}
    if check:
        from fedpdmc.operations.preflight import SiteCheck

        return _report(SiteCheck(study, name, data, policy=policy, **where, **options))
    remains(
        f"Interrupted. The site's log is in {store}, and the run waits. Run the same command to take part again.",
        finishes=True,
    )
    from fedpdmc.operations.serve import serve_site
    from fedpdmc.study import read_policy, read_study

    watching = _watching(status, on_stall, stall_after, stall_webhook)
    serve_site(
        read_study(study), name, data, policy=read_policy(policy), seed=seed, seeded_for_tests=seeded_for_tests,
        watching=watching, **where, **options,
    )  # fmt: skip
    say(f"The run has ended. To see all requests and answers: fedpdmc audit show {store}")
    return 0


def bundle(
    study: Contract,
    authority: Annotated[Path, typer.Option(help="The certificate of the study's authority, authority.pem.")],
    coordinator: Annotated[str, typer.Option(help="The coordinator's address as seen by the sites, host:port.")],
    out: Annotated[Path, typer.Option(help="The file to write, a zip archive.")],
    server_name: ServerName = "coordinator",
) -> None:
    """Write one file with everything that a site needs to join a study."""
    from fedpdmc.operations.bundle import make_bundle

    path = make_bundle(study, authority, coordinator, out, server_name)
    say(f"Send {path} to every site. It contains no secrets.")
    say(f"SHA-256 of the bundle: {hashlib.sha256(path.read_bytes()).hexdigest()}")
    say("Tell it to every site by telephone: it covers everything in the file, which is not signed.")


def join(
    bundle: Annotated[Path, typer.Argument(help="The file that the study's organiser sent.")],
    name: SiteName,
    data: Data,
    query: Query = None,
    folder: Annotated[Path, typer.Option(help="Folder for the study's files at this site.")] = Path("study"),
    ledger: Ledger = None,
    sha256: Annotated[
        str | None, typer.Option(help="The bundle's SHA-256, as its sender told you; another file is refused.")
    ] = None,
) -> int:
    """Set up a site from a bundle: key, certificate request, policy and systemd unit; then check it. Nothing is started."""
    from fedpdmc.operations.bundle import UNIT, Joining, read_bundle

    found = read_bundle(bundle, sha256)
    joining = Joining(found, name, data, folder, query, ledger)
    for path in joining.write():
        say(f"written: {path}")
    failed = print_findings(joining.findings())
    if joining.key:
        say(f"SHA-256 of the bundle: {found.digest}")
        say(f"SHA-256 of this site's key: {joining.key}")
        say(f"Compare both hashes by telephone with the sender of the bundle, and send {folder}/keys/request.pem.")
        say(f"Put the certificate.pem that you receive into {folder}/keys, and run this command again.")
    elif not failed:
        say(f"Ready. Read {folder}/policy.toml, then run {folder}/{UNIT} or the command in it.")
    if failed:
        say(f"Not ready. Fix: {', '.join(failed)}.")
    return CHECK_FAILED if failed else 0


def flower_app(folder: Annotated[Path, typer.Argument(help="Folder for the app.")]) -> None:
    """Write a Flower app that runs a study on a SuperLink and its SuperNodes."""
    from fedpdmc.operations.serve import write_flower_app

    write_flower_app(folder)
    say(f"{folder}: set the paths in pyproject.toml, then `flwr run {folder}`. See docs/deploy.md.")


def _require_keys(keys: Path | None, plain: bool) -> None:
    if (keys is None) != plain:
        raise typer.BadParameter("Give either --keys or --plain-on-loopback.")


def _watching(
    status: str | None, on_stall: str | None, stall_after: float, stall_webhook: str | None
) -> "Watching | None":
    """How to monitor the run; None if no option asks for it. A malformed command or address is refused here."""
    from fedpdmc.operations.status import Watching
    from fedpdmc.operations.status.stall_alerts import alerts

    if status is None and on_stall is None and stall_webhook is None:
        return None
    alerts(on_stall, stall_webhook)
    return Watching(status, on_stall, stall_after, stall_webhook)


def _report(check: "Preflight") -> int:
    failed = print_findings(check.findings())
    say(f"Not ready. Fix: {', '.join(failed)}." if failed else "Ready. Nothing was started or sent.")
    return CHECK_FAILED if failed else 0
