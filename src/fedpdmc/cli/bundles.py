"""`fedpdmc bundle` and `fedpdmc join`: a site invited with one file, and made ready from it."""

from __future__ import annotations

import hashlib
from pathlib import Path

from fedpdmc.certificates.keys import fingerprint
from fedpdmc.console.wrapping import say
from fedpdmc.operations.bundle import UNIT, Joining, make_bundle, read_bundle

FAULTS = 1


def bundle(study: Path, authority: Path, coordinator: str, out: Path, server_name: str) -> int:
    """Write the file for the sites."""
    path = make_bundle(study, authority, coordinator, out, server_name)
    say(f"{path} goes to every site; it holds no secret.")
    _hashes(study.read_bytes(), authority.read_bytes())
    return 0


def join(path: Path, name: str, data: str, query: str | None, folder: Path, ledger: Path | None) -> int:
    """Make a site ready, as far as that can be done now."""
    found = read_bundle(path)
    joining = Joining(found, name, data if ":" in data else Path(data), folder, query, ledger)
    for made in joining.write():
        say(f"written: {made}")
    findings = joining.findings()
    for finding in findings:
        say(finding, whole=True)
    faults = [finding.what for finding in findings if finding.good is False]
    if joining.key:
        _hashes(found.contract, found.authority)
        say(f"SHA-256 of this site's key: {joining.key}")
        say(f"Compare all three with whoever sent the bundle, by telephone, and send them {folder}/keys/request.pem.")
        say(f"Put the certificate.pem that comes back into {folder}/keys, and give this command again.")
    elif not faults:
        say(f"Ready. Read {folder}/policy.toml, then run {folder}/{UNIT} or the command in it.")
    if faults:
        say(f"To be mended: {', '.join(faults)}.")
    return FAULTS if faults else 0


def _hashes(contract: bytes, authority: bytes) -> None:
    say(f"SHA-256 of the contract: {hashlib.sha256(contract).hexdigest()}")
    say(f"SHA-256 of the authority's certificate: {fingerprint(authority)}")
