"""``fedpdmc keys`` and ``fedpdmc revoke``: the certificates of a study."""

from pathlib import Path
from typing import Annotated

import typer
from typer.core import TyperGroup

from fedpdmc.cli.runner import command
from fedpdmc.console.wrapping import say
from fedpdmc.errors import InputError

Days = Annotated[int, typer.Option(min=1, help="Days until the certificates expire.")]


class _KeysGroup(TyperGroup):
    """`fedpdmc keys FOLDER` is short for `fedpdmc keys make FOLDER`."""

    def parse_args(self, ctx, args):
        return super().parse_args(ctx, self._with_command(args))

    def resolve_command(self, ctx, args):
        return super().resolve_command(ctx, self._with_command(args))

    def _with_command(self, args):
        named = not args or args[0] in self.commands or args[0] == "--help"
        return list(args) if named else ["make", *args]


app = typer.Typer(help="Make, request and sign the certificates of a study.", no_args_is_help=True, cls=_KeysGroup)


@command(app, "request")
def _request(
    folder: Annotated[Path, typer.Argument(help="This party's folder of keys.")],
    name: Annotated[str, typer.Option(help="The site's name in the contract, or coordinator.")],
) -> None:
    """Make this party's private key, and a request for the study's authority to sign."""
    from fedpdmc.certificates.requests import request_certificate

    path, fingerprint = request_certificate(folder, name)
    say(f"Send {path} to the study's authority. Keep {folder}/key.pem here.")
    say(f"SHA-256 of the key; compare it with what the authority reads: {fingerprint}")


@command(app, "sign")
def _sign(
    authority: Annotated[Path, typer.Argument(help="The authority's folder. It is created if it does not exist.")],
    request: Annotated[Path, typer.Argument(help="A party's request.pem.")],
    name: Annotated[str, typer.Option(help="The name of the party that sent the request.")],
    out: Annotated[Path, typer.Option(help="Folder for the signed certificate and authority.pem.")],
    days: Days = 365,
    host: Annotated[list[str] | None, typer.Option(help="A host name or address of the coordinator.")] = None,
) -> None:
    """Sign a party's request, as the study's authority."""
    from fedpdmc.certificates.requests import sign_request

    fingerprint = sign_request(authority, request, name, out, days=days, hosts=host or [])
    say(f"SHA-256 of the key: {fingerprint}")
    say(f"If {name} reads the same hash from its own request, send it {out}. Both files go next to its key.pem.")


@command(app, "make")
def _make(
    folder: Annotated[Path, typer.Argument(help="Folder for the keys of all parties.")],
    study: Annotated[Path | None, typer.Option(help="A contract: make a certificate for each of its sites.")] = None,
    site: Annotated[list[str] | None, typer.Option(help="A site that gets a certificate.")] = None,
    days: Days = 365,
    host: Annotated[list[str] | None, typer.Option(help="A host name or address of a Flower SuperLink.")] = None,
) -> None:
    """Make a certificate authority, and certificates for the coordinator and the sites of a study."""
    from fedpdmc.certificates.keys import make_keys
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
    from fedpdmc.certificates import keys

    try:
        found = [keys.fingerprint(path.read_bytes()) for path in certificate or []] + (fingerprint or [])
    except (OSError, ValueError) as error:
        raise InputError("certificate", str(error), "Give a certificate.pem, or --fingerprint.") from error
    if not found:
        raise InputError("revoke", "nothing", "Give --certificate or --fingerprint.")
    path = keys.revoke(folder, found)
    say(f"{path}: {len(path.read_text().splitlines())} certificates revoked in total.")
