"""Certificates of a study: one authority, one certificate for the coordinator and one for each site.

The common name of a certificate is the party's name: a site can only use the name in its certificate, and only the
certificate with the name ``coordinator`` is accepted as the coordinator's. The keys are on the curve P-256.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import ipaddress
import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedpdmc.errors import InputError
from fedpdmc.validation import COORDINATOR, check_fingerprint, check_name

logger = logging.getLogger("fedpdmc.keys")
AUTHORITY_DAYS = 3650  # until an authority's certificate expires
DAYS = 365  # until any other expires
FILES = ("key.pem", "certificate.pem", "authority.pem")  # in a party's folder
REVOKED = "revoked.txt"  # there: fingerprints of certificates that this party does not accept
CRL = "crl.pem"  # there: the authority's list
REQUEST = "request.pem"
SECONDS = 1.0  # between two checks of the lists of revoked certificates
PEM = serialization.Encoding.PEM
T = TypeVar("T")


def _read(load: Callable[[bytes], T], pem: bytes) -> T:
    """Read with the library, whose errors are of several kinds: here all of them are `ValueError`."""
    try:
        return load(pem)
    except (x509.InvalidVersion, UnsupportedAlgorithm, TypeError) as error:
        raise ValueError(str(error)) from error


def read_certificate(pem: bytes) -> x509.Certificate:
    """A certificate, or `ValueError`."""
    return _read(x509.load_pem_x509_certificate, pem)


def read_request(pem: bytes) -> x509.CertificateSigningRequest:
    """A request for a certificate, or `ValueError`."""
    return _read(x509.load_pem_x509_csr, pem)


def _curve_key(argument: str, path: Path, remedy: str) -> ec.EllipticCurvePrivateKey:
    """The private key in a file."""
    try:
        key = _read(partial(serialization.load_pem_private_key, password=None), path.read_bytes())
    except (OSError, ValueError) as error:
        raise InputError(argument, f"{path}: {error}", remedy) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise InputError(argument, f"{path}, which is not a P-256 key", remedy)
    return key


@dataclass
class Revocations:
    """The certificates that a party or the authority has revoked; both lists are read again every second.

    A list need not exist. If one is deleted, its last content stays in force, and so does the authority's if it is replaced
    by an older or unreadable one.

    ``folder``: the party's. ``authority``: the authority's certificate, whose key must have signed its list.
    """

    folder: Path
    authority: bytes

    def __post_init__(self):
        self._when, self._own = -math.inf, frozenset[str]()
        self._stamp: tuple | None = None
        self._list: x509.CertificateRevocationList | None = None

    def __contains__(self, certificate: bytes) -> bool:
        now = time.monotonic()
        if now - self._when > SECONDS:
            own = self.folder / REVOKED
            if own.exists():
                lines = own.read_bytes().decode("utf-8", "replace").splitlines()
                words = filter(None, (line.split("#")[0].strip() for line in lines))
                self._own = frozenset(map(check_fingerprint, words))
            self._refresh()
            self._when = now
        if self._list is not None:
            serial = read_certificate(certificate).serial_number
            if self._list.get_revoked_certificate_by_serial_number(serial) is not None:
                return True
        return bool(self._own) and fingerprint(certificate) in self._own

    def _refresh(self) -> None:
        """Read the authority's list if it has changed. Raises `InputError` if it cannot be read, and none is in force."""
        path = self.folder / CRL
        stamp = _stamps(path)
        if not stamp or stamp == self._stamp:
            return
        try:
            found = self._read_list(path)
            if self._list is not None and found.last_update_utc < self._list.last_update_utc:
                raise _no_list(path, " of an earlier time than the list in force")
        except InputError as error:
            if self._list is None:
                raise
            logger.error("%s The last list stays in force.", error)
        else:
            self._list, until = found, found.next_update_utc
            if until is not None and until < datetime.datetime.now(datetime.UTC):
                logger.warning("%s has expired at %s: ask the authority for a newer one", path, until)
        self._stamp = stamp

    def _read_list(self, path: Path) -> x509.CertificateRevocationList:
        try:
            found = x509.load_pem_x509_crl(path.read_bytes())
            root = read_certificate(self.authority)
            good = found.issuer == root.subject and found.is_signature_valid(root.public_key())  # type: ignore[arg-type]
            # The entries are parsed when they are asked for.
            list(found)
        except Exception as error:
            # The library raises many kinds of errors for files that are not lists.
            raise _no_list(path, f", which cannot be read ({type(error).__name__})") from error
        if not good:
            raise _no_list(path, ", which the study's authority has not signed")
        return found


def _no_list(path: Path, fault: str) -> InputError:
    return InputError(
        "keys", f"{path}{fault}", "Give the authority's revocation list, as `openssl ca -gencrl` writes it."
    )


def _stamps(*paths: Path) -> tuple:
    """A value that changes when a file is written or replaced, without reading it."""
    found = []
    for path in paths:
        with contextlib.suppress(OSError):
            status = path.stat()
            found.append((path.name, status.st_ino, status.st_size, status.st_mtime_ns))
    return tuple(found)


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
        remedy = "Give a party's folder, such as keys/coordinator."
        raise InputError("keys", f"{folder} without certificate.pem", remedy)
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
    if not (folder / "authority" / "key.pem").exists():
        make_authority(folder / "authority")
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
        try:
            public = serialization.load_pem_private_key(key, None).public_key()
            certificate_name(certificate)
            same = public == read_certificate(certificate).public_key()
        except (ValueError, TypeError, IndexError, UnsupportedAlgorithm) as error:
            remedy = "Give key.pem and certificate.pem as PEM, the key without a password."
            raise InputError("keys", str(error), remedy) from error
        if not same:
            remedy = "Use the certificate that was made for this key."
            raise InputError("keys", f"{folder}/certificate.pem of another key", remedy)
        if os.name == "posix" and (folder / "key.pem").stat().st_mode & 0o077:
            logger.warning("%s is readable by other users: run chmod 600 on it", folder / "key.pem")
        return Credentials(key, certificate, authority, Revocations(folder, authority), folder)
    except OSError as error:
        remedy = "Give a party's folder with key.pem, certificate.pem, authority.pem."
        raise InputError("keys", f"{error.strerror}: {error.filename}", remedy) from error


def stamp(credentials: Credentials) -> tuple:
    """A value that changes when a file in the folder of keys is written or replaced."""
    return () if credentials.folder is None else _stamps(*(credentials.folder / name for name in FILES))


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
        remedy = "Ask for a new one."
        raise InputError("keys", f"certificate.pem with unreadable extensions: {error}", remedy) from error
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


def signature_fault(
    credentials: Credentials, name: str, certificate: bytes, signature: bytes, data: bytes, pinned: Mapping[str, str]
) -> str:
    """Why a message is not signed by this party; empty if it is.

    ``pinned`` has the fingerprints of the only certificates that are accepted for the named parties.
    """
    if signer(credentials, certificate, signature, data) != name:
        return f"the key of {name} is not signed by that site"
    if name in pinned and fingerprint(certificate) != pinned[name]:
        return f"the certificate of {name} is not the one in the policy"
    return ""


def open_authority(folder: Path) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    """The key and certificate of the authority in a folder."""
    remedy = "Give the folder of an authority, from `fedpdmc keys authority` or `fedpdmc keys make`."
    key = _curve_key("authority", folder / "key.pem", remedy)
    try:
        pem = (folder / "certificate.pem").read_bytes()
        certificate_name(pem)
        return key, read_certificate(pem)
    except (OSError, ValueError, IndexError) as error:
        raise InputError("authority", f"{folder}: {error}", remedy) from error


def make_authority(folder: str | Path) -> str:
    """Make an authority in a folder that has none; returns the SHA-256 of its certificate."""
    folder = Path(folder)
    if (folder / "key.pem").exists():
        raise InputError("authority", f"{folder}, which has one", "Use it, or give a new folder.")
    key = ec.generate_private_key(ec.SECP256R1())
    name = _common_name("fedpdmc study authority")
    builder = (
        _start_certificate(name, name, key.public_key(), AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
    )
    certificate = builder.sign(key, hashes.SHA256())
    _write(folder, key, certificate, certificate)
    return certificate.fingerprint(hashes.SHA256()).hex()


def _common_name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


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
    serves = name == COORDINATOR
    purpose = ExtendedKeyUsageOID.SERVER_AUTH if serves else ExtendedKeyUsageOID.CLIENT_AUTH
    builder = (
        _start_certificate(_common_name(name), authority.subject, key, days)
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
    key = ec.generate_private_key(ec.SECP384R1())
    write_secret(folder / "node", _private(key, serialization.PrivateFormat.OpenSSH))
    form = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    (folder / "node.pub").write_bytes(key.public_key().public_bytes(*form))


def _start_certificate(subject, issuer, key, days: int) -> x509.CertificateBuilder:
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
    write_secret(folder / "key.pem", _private(key))
    _write_certificates(folder, certificate, authority)


def _write_certificates(folder: Path, certificate: x509.Certificate, authority: x509.Certificate) -> None:
    for name, one in zip(FILES[1:], (certificate, authority), strict=True):
        (folder / name).write_bytes(one.public_bytes(PEM))


def _private(key: ec.EllipticCurvePrivateKey, form=serialization.PrivateFormat.PKCS8) -> bytes:
    return key.private_bytes(PEM, form, serialization.NoEncryption())


def write_secret(path: Path, secret: bytes) -> None:
    """Write a new file that only its owner can read."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(secret)


# Requests --------------------------------------------------------------------------------------------------------------


MADE_BY = "Give the request.pem from `fedpdmc keys request`."


def request_certificate(folder: str | Path, name: str) -> tuple[Path, str]:
    """Make a party's key and a certificate request; returns the request's path and the key's fingerprint.

    An existing key is kept, so that its certificate can be renewed.

    ``folder``: the party's folder of keys: ``key.pem`` stays there, ``request.pem`` is sent to the authority. ``name``:
    the site's name in the contract, or ``coordinator``.
    """
    folder = Path(folder)
    if name != COORDINATOR:
        check_name(name)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not (folder / "key.pem").exists():
        write_secret(folder / "key.pem", _private(ec.generate_private_key(ec.SECP256R1())))
    key = _curve_key("keys", folder / "key.pem", "Give a folder with a P-256 key that can be read, or a new one.")
    made = x509.CertificateSigningRequestBuilder().subject_name(_common_name(name)).sign(key, hashes.SHA256())
    (folder / REQUEST).write_bytes(made.public_bytes(PEM))
    return folder / REQUEST, key_fingerprint(key.public_key())


def sign_request(
    authority: str | Path,
    request: str | Path,
    name: str,
    out: str | Path,
    *,
    days: int = DAYS,
    hosts: Sequence[str] = (),
) -> str:
    """Sign a party's request; returns the fingerprint of its key, to compare with the party's.

    Parameters
    ----------
    authority : path
        The authority's folder, from `fedpdmc keys authority` or `fedpdmc keys make`.
    request : path
        The party's ``request.pem``.
    name : str
        The name of the party that sent the request.
    out : path
        Folder for ``certificate.pem`` and ``authority.pem``, which the party puts next to its key.
    days : int
        Days until the certificate expires.
    hosts : sequence of str
        Host names and addresses to add to the coordinator's certificate.
    """
    if name != COORDINATOR:
        check_name(name)
    try:
        key = requested_key(Path(request).read_bytes(), name)
    except OSError as error:
        raise InputError("request", f"{request}: {error.strerror}", MADE_BY) from error
    made, root = certify(*open_authority(Path(authority)), name, key, days, hosts)
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    _write_certificates(folder, made, root)
    return key_fingerprint(key)


def key_fingerprint(key: ec.EllipticCurvePublicKey) -> str:
    """SHA-256 of a public key, as ``openssl pkey -pubin -outform DER | sha256sum`` shows it."""
    form = serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    return hashlib.sha256(key.public_bytes(*form)).hexdigest()


def requested_key(request: bytes, name: str) -> ec.EllipticCurvePublicKey:
    """The public key of a request that has a valid signature and this name."""
    try:
        found = read_request(request)
        names = [str(one.value) for one in found.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
        key, good = found.public_key(), found.is_signature_valid
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise InputError("request", str(error), MADE_BY) from error
    if not good or not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise InputError("request", "one that is not signed with its own P-256 key", "Ask the party for a new request.")
    if names != [name]:
        raise InputError("request", f"one in the name of {names}", f"Give the request of {name!r}, or its name.")
    return key
