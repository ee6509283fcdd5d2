"""Certificates of a study: one authority, one certificate for the coordinator and one for each site.

The common name of a certificate is the party's name: a site can only use the name in its certificate, and only the
certificate with the name ``coordinator`` is accepted as the coordinator's. The keys are on the curve P-256.
"""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import logging
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedpdmc.certificates.crl import CRL, RevocationList
from fedpdmc.certificates.pem import read_certificate
from fedpdmc.errors import InputError
from fedpdmc.validation import COORDINATOR, check_fingerprint, check_name

logger = logging.getLogger("fedpdmc.keys")
AUTHORITY_DAYS, DAYS = 3650, 365


# The files in a party's folder.
FILES = ("key.pem", "certificate.pem", "authority.pem")
REVOKED = "revoked.txt"
# Seconds between two checks of this file.
SECONDS = 1.0


@dataclass
class Revocations:
    """The certificates that a party or the authority has revoked, read again every second.

    Parameters
    ----------
    path : path
        The party's file of fingerprints. Need not exist. If it is deleted, its last content stays in force.
    issued : RevocationList, optional
        The authority's list.
    """

    path: Path
    issued: RevocationList | None = field(default=None, compare=False)
    _read: float = field(default=-math.inf, compare=False, repr=False)
    _known: frozenset[str] = field(default=frozenset(), compare=False, repr=False)

    def __contains__(self, certificate: bytes) -> bool:
        now = time.monotonic()
        if now - self._read > SECONDS:
            if self.path.exists():
                text = self.path.read_bytes().decode("utf-8", "replace")
                lines = (line.split("#")[0].strip() for line in text.splitlines())
                self._known = frozenset(check_fingerprint(line) for line in lines if line)
            if self.issued is not None:
                self.issued.refresh()
            self._read = now
        if self.issued is not None and certificate in self.issued:
            return True
        return bool(self._known) and fingerprint(certificate) in self._known


class Credentials(NamedTuple):
    """A party's private key, its certificate and the authority's certificate, as PEM; and its revocations.

    ``folder`` is where they were read, and where renewed ones are expected.
    """

    key: bytes
    certificate: bytes
    authority: bytes
    revoked: Revocations | None = None
    folder: Path | None = None


def fingerprint(certificate: bytes) -> str:
    """SHA-256 of a PEM certificate, as ``openssl x509 -noout -fingerprint -sha256`` shows it but without colons."""
    return read_certificate(certificate).fingerprint(hashes.SHA256()).hex()


def revoke(folder: str | Path, fingerprints: Sequence[str]) -> Path:
    """Add certificates to a party's revocations. A running coordinator notices."""
    path = Path(folder) / REVOKED
    if not (Path(folder) / "certificate.pem").exists():
        raise InputError(
            "keys", f"{folder} without certificate.pem", "Give a party's folder, such as keys/coordinator."
        )
    known = path.read_text() if path.exists() else ""
    draft = path.with_suffix(".new")
    draft.write_text(known + "".join(f"{check_fingerprint(one)}\n" for one in fingerprints))
    os.replace(draft, path)
    return path


def make_keys(folder: str | Path, sites: Sequence[str], *, days: int = DAYS, hosts: Sequence[str] = ()) -> Path:
    """Write an authority, a coordinator and site certificates into ``folder``, a folder for each party.

    ``folder/coordinator`` is for the coordinator, ``folder/sites/NAME`` for that site; ``folder/authority`` signs further
    certificates and should be stored elsewhere. An existing authority is used again, and existing certificates are kept.

    Parameters
    ----------
    folder : path
    sites : sequence of str
    days : int
        Days until the certificates expire.
    hosts : sequence of str
        Host names and addresses of a Flower SuperLink, which are added to the coordinator's certificate. Sites then also
        get a key pair for their SuperNode, ``node`` and ``node.pub``.
    """
    folder = Path(folder)
    for name in sites:
        check_name(name)
    if len(set(sites)) != len(sites):
        raise InputError("sites", "a name that occurs twice", "Give every site its own name.")
    key, authority = open_authority(folder / "authority")
    _party(folder / COORDINATOR, COORDINATOR, key, authority, days, hosts)
    for name in sites:
        _party(folder / "sites" / name, name, key, authority, days)
        if hosts:
            _node_key(folder / "sites" / name)
    return folder


def read_credentials(folder: str | Path) -> Credentials:
    """Read one party's folder of keys."""
    folder = Path(folder)
    try:
        key, certificate, authority = ((folder / name).read_bytes() for name in FILES)
        if not _belong(key, certificate):
            raise InputError(
                "keys",
                f"{folder}/certificate.pem of another key",
                "Use the certificate that was made for this key.",
            )
        if os.name == "posix" and (folder / "key.pem").stat().st_mode & 0o077:
            logger.warning("%s is readable by other users: run chmod 600 on it", folder / "key.pem")
        revoked = Revocations(folder / REVOKED, RevocationList(folder / CRL, authority))
        return Credentials(key, certificate, authority, revoked, folder)
    except OSError as error:
        raise InputError(
            "keys",
            f"{error.strerror}: {error.filename}",
            "Give a party's folder with key.pem, certificate.pem, authority.pem.",
        ) from error


def _belong(key: bytes, certificate: bytes) -> bool:
    """Whether a certificate belongs to this key."""
    try:
        public = serialization.load_pem_private_key(key, None).public_key()
        certificate_name(certificate)
        return public == read_certificate(certificate).public_key()
    except (ValueError, TypeError, IndexError, UnsupportedAlgorithm) as error:
        raise InputError(
            "keys", str(error), "Give key.pem and certificate.pem as PEM, the key without a password."
        ) from error


def stamp(credentials: Credentials) -> tuple:
    """A value that changes when a file in the folder of keys is written or replaced, without reading it."""
    if credentials.folder is None:
        return ()
    found = []
    for name in FILES:
        with contextlib.suppress(OSError):
            status = (credentials.folder / name).stat()
            found.append((name, status.st_ino, status.st_size, status.st_mtime_ns))
    return tuple(found)


def renewed(credentials: Credentials) -> Credentials:
    """The party's credentials as they are in its folder now, or unchanged if they cannot be read."""
    if credentials.folder is None:
        return credentials
    try:
        found = read_credentials(credentials.folder)
        same = certificate_name(found.certificate) == certificate_name(credentials.certificate)
    except (InputError, ValueError, IndexError, TypeError, UnsupportedAlgorithm):
        # Someone is replacing the files one by one and has not finished.
        return credentials
    return found._replace(revoked=credentials.revoked) if same else credentials


def expiry(certificate: bytes) -> float:
    """When a certificate expires, in seconds since 1970."""
    return read_certificate(certificate).not_valid_after_utc.timestamp()


def certificate_name(certificate: bytes) -> str:
    """The name in a certificate."""
    subject = read_certificate(certificate).subject
    return str(subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)


def names(certificate: bytes) -> set[str]:
    """All names in a certificate: its common name and host names."""
    found = read_certificate(certificate)
    try:
        hosts = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return {certificate_name(certificate)}
    except ValueError as error:
        raise InputError(
            "keys", f"certificate.pem with unreadable extensions: {error}", "Ask for a new one."
        ) from error
    return {certificate_name(certificate), *hosts.get_values_for_type(x509.DNSName)}


def sign(credentials: Credentials, data: bytes) -> bytes:
    """A party's signature of a message, for engines whose connections do not end at the other party."""
    key = serialization.load_pem_private_key(credentials.key, None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise InputError("keys", "a key that is not on an elliptic curve", "Signatures need one, for example P-256.")
    return key.sign(data, ec.ECDSA(hashes.SHA256()))


def signer(
    credentials: Credentials, certificate: bytes, signature: bytes, data: bytes, when: float | None = None
) -> str | None:
    """The name of the party that signed a message, or None if the signature is not valid for these credentials.

    ``when``, in seconds since 1970, is the time at which the certificate must have been valid; None: now.
    """
    try:
        root, own = read_certificate(credentials.authority), read_certificate(certificate)
        own.verify_directly_issued_by(root)
        if credentials.revoked is not None and certificate in credentials.revoked:
            return None
        now = datetime.datetime.fromtimestamp(time.time() if when is None else when, datetime.UTC)
        key = own.public_key()
        if not own.not_valid_before_utc <= now <= own.not_valid_after_utc or not isinstance(
            key, ec.EllipticCurvePublicKey
        ):
            return None
        key.verify(signature, data, ec.ECDSA(hashes.SHA256()))
        return certificate_name(certificate)
    except Exception:
        # The input is untrusted, and the library raises many kinds of errors. All of them mean that it is not valid.
        return None


def open_authority(folder: Path) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    """The key and certificate of the authority in a folder; created if there is none."""
    if (folder / "key.pem").exists():
        made = "Give a folder made by fedpdmc keys."
        try:
            key = serialization.load_pem_private_key((folder / "key.pem").read_bytes(), None)
            certificate = read_certificate((folder / "certificate.pem").read_bytes())
            certificate_name((folder / "certificate.pem").read_bytes())
        except (OSError, ValueError, TypeError, IndexError, UnsupportedAlgorithm) as error:
            raise InputError("keys", f"the authority in {folder}: {error}", made) from error
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise InputError("keys", f"{folder / 'key.pem'}, which is not a P-256 key", made)
        return key, certificate
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedpdmc study authority")])
    builder = (
        _dated(name, name, key.public_key(), AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
    )
    certificate = builder.sign(key, hashes.SHA256())
    _write(folder, key, certificate, certificate)
    return key, certificate


def _host(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def certify(
    authority_key: ec.EllipticCurvePrivateKey,
    authority: x509.Certificate,
    name: str,
    key,
    days: int,
    hosts: Sequence[str],
) -> tuple[x509.Certificate, x509.Certificate]:
    """A party's certificate for its public key, and the authority's."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    serves = name == COORDINATOR
    purpose = ExtendedKeyUsageOID.SERVER_AUTH if serves else ExtendedKeyUsageOID.CLIENT_AUTH
    builder = (
        _dated(subject, authority.subject, key, days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
    )
    if serves:
        names = [x509.DNSName(COORDINATOR), *map(_host, hosts)]
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return builder.sign(authority_key, hashes.SHA256()), authority


def _party(folder: Path, name: str, authority_key, authority, days: int, hosts: Sequence[str] = ()) -> None:
    if (folder / "certificate.pem").exists():
        return
    key = ec.generate_private_key(ec.SECP256R1())
    _write(folder, key, *certify(authority_key, authority, name, key.public_key(), days, hosts))


def _node_key(folder: Path) -> None:
    """A key for a SuperNode's authentication at its SuperLink, in Flower's format."""
    if (folder / "node").exists():
        return
    key, form = ec.generate_private_key(ec.SECP384R1()), serialization.Encoding.OpenSSH
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    write_secret(folder / "node", secret)
    (folder / "node.pub").write_bytes(key.public_key().public_bytes(form, serialization.PublicFormat.OpenSSH))


def _dated(subject, issuer, key, days: int) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        # Clocks of different institutions may differ by minutes.
        .not_valid_before(now - datetime.timedelta(minutes=10))
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _usage(signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs, content_commitment=False, key_encipherment=False, data_encipherment=False,
        key_agreement=False, key_cert_sign=signs, crl_sign=signs, encipher_only=False, decipher_only=False,
    )  # fmt: skip


def _write(folder: Path, key, certificate: x509.Certificate, authority: x509.Certificate) -> None:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    write_secret(folder / "key.pem", secret)
    (folder / "certificate.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    (folder / "authority.pem").write_bytes(authority.public_bytes(serialization.Encoding.PEM))


def write_secret(path: Path, secret: bytes) -> None:
    """Write a new file that only its owner can read."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(secret)
