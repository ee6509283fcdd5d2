"""A study on a network: its coordinator and sites, the files from which sites are set up, and certificates."""

import contextlib
import hashlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer.core import TyperGroup

from fedpdmc.cli.runner import (
    CHECK_FAILED,
    DATA_HELP,
    SERVER_NAME_HELP,
    STORE_HELP,
    Contract,
    Data,
    Ledger,
    LogFile,
    Query,
    ServerName,
    Store,
    command,
    log_to,
    print_findings,
)
from fedpdmc.cli.study import verdict_in_summary
from fedpdmc.console.interrupts import INTERRUPTED, happened, remains
from fedpdmc.console.wrapping import say
from fedpdmc.errors import InputError

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
    study: Annotated[Path | None, typer.Argument(help="The study's contract, study.toml.")] = None,
    folder: Annotated[
        Path | None,
        typer.Option(help="The site's folder from `fedpdmc join`, instead of the contract and options below."),
    ] = None,
    name: Annotated[str | None, typer.Option(help="The site's name in the contract.")] = None,
    data: Annotated[str | None, typer.Option(help=DATA_HELP)] = None,
    policy: Annotated[Path | None, typer.Option(help="The site's rules for taking part, policy.toml.")] = None,
    coordinator: Annotated[str | None, typer.Option(help="The coordinator's address, host:port.")] = None,
    store: Annotated[Path | None, typer.Option(help=STORE_HELP)] = None,
    query: Query = None,
    keys: Keys = None,
    plain_on_loopback: Plain = False,
    seed: Annotated[int | None, typer.Option(help="The site's seed, to make a trial repeatable.")] = None,
    ledger: Ledger = None,
    seeded_for_tests: Annotated[
        bool,
        typer.Option("--seeded-for-tests", help="Accept a seed despite a privacy budget: nothing is private then."),
    ] = False,
    server_name: Annotated[str | None, typer.Option(help=SERVER_NAME_HELP)] = None,
    check: Check = False,
    status: Status = None,
    on_stall: OnStall = None,
    stall_webhook: StallWebhook = None,
    stall_after: StallAfter = 300.0,
    log_file: LogFile = None,
) -> int:
    """Take part in a study as one of its sites. Restarted with the same folder or store, it resumes."""
    if folder is not None:
        from fedpdmc.operations.bundle import read_settings

        given = read_settings(folder)
        name, data, query = name or given.name, data or given.data, query or given.query
        coordinator, server_name = coordinator or given.coordinator, server_name or given.server_name
        ledger = ledger or (None if given.ledger is None else Path(given.ledger))
        study, policy = study or folder / "study.toml", policy or folder / "policy.toml"
        store, keys = store or folder / "store", keys or (None if plain_on_loopback else folder / "keys")
    if study is None or name is None or data is None or policy is None or coordinator is None or store is None:
        raise typer.BadParameter(
            "Give --folder, or the contract and --name, --data, --policy, --coordinator, --store and --keys."
        )
    server_name = server_name or "coordinator"
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


def invite(
    study: Contract,
    coordinator: Annotated[str, typer.Option(help="The coordinator's address as seen by the sites, host:port.")],
    keys: Annotated[Path, typer.Option(help="The study's folder of keys; made if it does not exist.")] = Path("keys"),
    listen: Annotated[str | None, typer.Option(help="The address to listen on, if another one.")] = None,
    again: Annotated[list[str] | None, typer.Option(help="A site that has joined and gets a new token.")] = None,
) -> None:
    """Invite the sites of a study: print a token for each, and admit those whose code is right."""
    remains("Interrupted. Tokens of sites that have not joined stay valid: run the same command again.")
    from fedpdmc.operations.invitations import Reception

    with Reception(study, keys, coordinator, listen, again or ()) as reception:
        if reception.made_authority:
            say(f"made: {keys}/authority, which signs certificates. Store it offline when all sites have joined.")
        for name, token in reception.tokens.items():
            say(f"Send this to {name}:")
            # Not wrapped: it is copied.
            print(f"\nfedpdmc join {token} --data RECORDS.csv\n")
        while reception.missing:
            say(f"Waiting for {', '.join(reception.missing)} at {reception.address}.")
            applicant = reception.applicants.get()
            say(f"{applicant.site} is on the line. Call them, at a number that you knew before.")
            if reception.admit(applicant, typer.prompt(f"The code that {applicant.site} reads to you")):
                say(f"The code is right: say so to {applicant.site}, which has joined.")
            else:
                say(f"The code differs. Nothing was signed for {applicant.site}. Hang up, and ask them to try again.")
    say("All sites have joined. Run the study:")
    print(f"\nfedpdmc coordinator {study} --listen {listen or coordinator} --keys {keys}/coordinator --store run")


def join(
    bundle: Annotated[str, typer.Argument(help="The token, or the bundle, that the study's organiser sent.")],
    data: Data,
    name: Annotated[str | None, typer.Option(help="The site's name in the contract; a token knows it.")] = None,
    query: Query = None,
    folder: Annotated[Path, typer.Option(help="Folder for the study's files at this site.")] = Path("study"),
    ledger: Ledger = None,
    sha256: Annotated[
        str | None, typer.Option(help="The bundle's SHA-256, as its sender told you; another file is refused.")
    ] = None,
) -> int:
    """Set up a site from a token or a bundle: keys, policy and systemd unit; then check it. The run is not started."""
    from fedpdmc.operations.bundle import UNIT, Joining, read_bundle
    from fedpdmc.operations.invitations import PREFIX, accept_invitation, read_token

    if invited := bundle.startswith(PREFIX):
        invitation = read_token(bundle)
        if name not in (None, invitation.site):
            raise typer.BadParameter(f"The token is for {invitation.site!r}, not {name!r}.")
        name, found = invitation.site, accept_invitation(invitation, folder, _confirm_code)
    elif name is None:
        raise typer.BadParameter("Give --name, the site's name in the contract.")
    else:
        found = read_bundle(bundle, sha256)
    joining = Joining(found, name, data, folder, query, ledger)
    for path in joining.write():
        say(f"written: {path}")
    failed = print_findings(joining.findings(alone=invited))
    if joining.key:
        say(f"SHA-256 of the bundle: {found.digest}")
        say(f"SHA-256 of this site's key: {joining.key}")
        say(f"Compare both hashes by telephone with the sender of the bundle, and send {folder}/keys/request.pem.")
        say(f"Put the certificate.pem that you receive into {folder}/keys, and run this command again.")
    elif not failed:
        say(f"Ready. Read {folder}/policy.toml, then run: fedpdmc site --folder {folder} (or install {folder}/{UNIT}).")
    if failed:
        say(f"Not ready. Fix: {', '.join(failed)}.")
    return CHECK_FAILED if failed else 0


def _confirm_code(code: str) -> bool:
    say(f"Code: {code}")
    say("Read it to the study's organiser by telephone. The number must not come from the message with the token.")
    return typer.prompt("When they say that the code is right, type yes").strip().lower() == "yes"


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
    from fedpdmc.operations.status import Watching, alerts

    if status is None and on_stall is None and stall_webhook is None:
        return None
    alerts(on_stall, stall_webhook)
    return Watching(status, on_stall, stall_after, stall_webhook)


def _report(check: "Preflight") -> int:
    failed = print_findings(check.findings())
    say(f"Not ready. Fix: {', '.join(failed)}." if failed else "Ready. Nothing was started or sent.")
    return CHECK_FAILED if failed else 0


# Certificates --------------------------------------------------------------------------------------------------------


Days = Annotated[int, typer.Option(min=1, help="Days until the certificates expire.")]


class _KeysGroup(TyperGroup):
    """`fedpdmc keys FOLDER` is short for `fedpdmc keys make FOLDER`."""

    def parse_args(self, ctx, args):
        named = not args or args[0] in self.commands or args[0] == "--help"
        return super().parse_args(ctx, args if named else ["make", *args])


keys_app = typer.Typer(help="Make, request and sign the certificates of a study.", no_args_is_help=True, cls=_KeysGroup)


@command(keys_app, "request")
def _request(
    folder: Annotated[Path, typer.Argument(help="This party's folder of keys.")],
    name: Annotated[str, typer.Option(help="The site's name in the contract, or coordinator.")],
) -> None:
    """Make this party's private key, and a request for the study's authority to sign."""
    from fedpdmc.certificates import request_certificate

    path, fingerprint = request_certificate(folder, name)
    say(f"Send {path} to the study's authority. Keep {folder}/key.pem here.")
    say(f"SHA-256 of the key; compare it with what the authority reads: {fingerprint}")


@command(keys_app, "authority")
def _authority(folder: Annotated[Path, typer.Argument(help="A new folder. Store it separately and securely.")]) -> None:
    """Make the authority of a study, which signs the parties' certificates."""
    from fedpdmc.certificates import make_authority

    say(f"SHA-256 of the authority's certificate: {make_authority(folder)}")
    say(f"{folder}/key.pem signs certificates: keep it offline. {folder}/certificate.pem is public.")


@command(keys_app, "sign")
def _sign(
    authority: Annotated[Path, typer.Argument(help="The authority's folder, from `fedpdmc keys authority`.")],
    request: Annotated[Path, typer.Argument(help="A party's request.pem.")],
    name: Annotated[str, typer.Option(help="The name of the party that sent the request.")],
    out: Annotated[Path, typer.Option(help="Folder for the signed certificate and authority.pem.")],
    days: Days = 365,
    host: Annotated[list[str] | None, typer.Option(help="A host name or address of the coordinator.")] = None,
) -> None:
    """Sign a party's request, as the study's authority."""
    from fedpdmc.certificates import sign_request

    fingerprint = sign_request(authority, request, name, out, days=days, hosts=host or [])
    say(f"SHA-256 of the key: {fingerprint}")
    say(f"If {name} reads the same hash from its own request, send it {out}. Both files go next to its key.pem.")


@command(keys_app, "make")
def _make(
    folder: Annotated[Path, typer.Argument(help="Folder for the keys of all parties.")],
    study: Annotated[Path | None, typer.Option(help="A contract: make a certificate for each of its sites.")] = None,
    site: Annotated[list[str] | None, typer.Option(help="A site that gets a certificate.")] = None,
    days: Days = 365,
    host: Annotated[list[str] | None, typer.Option(help="A host name or address of a Flower SuperLink.")] = None,
) -> None:
    """Make a certificate authority, and certificates for the coordinator and the sites of a study."""
    from fedpdmc.certificates import make_keys
    from fedpdmc.study import read_study

    names = [*(site or []), *(read_study(study).sites if study is not None else [])]
    if not names:
        raise InputError("keys", "no sites", "Give --study, or --site for each of them.")
    make_keys(folder, list(dict.fromkeys(names)), days=days, hosts=host or [])
    say(f"{folder}/coordinator is for the coordinator, {folder}/sites/NAME for each site.")
    say(f"{folder}/authority signs further certificates. Store it separately and securely.")


def revoke(
    folder: Annotated[Path, typer.Argument(help="Keys of the party that will refuse it, such as keys/coordinator.")],
    certificate: Annotated[list[Path] | None, typer.Option(help="A certificate.pem to revoke.")] = None,
    fingerprint: Annotated[
        list[str] | None, typer.Option(help="The SHA-256 of a certificate, in hexadecimal digits.")
    ] = None,
) -> None:
    """Revoke a certificate. A running coordinator refuses it immediately, also on open connections."""
    from fedpdmc import certificates as keys

    try:
        found = [keys.fingerprint(path.read_bytes()) for path in certificate or []] + (fingerprint or [])
    except (OSError, ValueError) as error:
        raise InputError("certificate", str(error), "Give a certificate.pem, or --fingerprint.") from error
    if not found:
        raise InputError("revoke", "nothing", "Give --certificate or --fingerprint.")
    path = keys.revoke(folder, found)
    say(f"{path}: {len(path.read_text().splitlines())} certificates revoked in total.")
