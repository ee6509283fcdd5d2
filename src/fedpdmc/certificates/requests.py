"""Certificate requests: every party makes its own private key, which the authority never sees."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from fedpdmc.certificates.keys import DAYS, certify, open_authority, write_secret
from fedpdmc.certificates.pem import read_request
from fedpdmc.errors import InputError
from fedpdmc.validation import COORDINATOR, check_name

REQUEST = "request.pem"


def request_certificate(folder: str | Path, name: str) -> tuple[Path, str]:
    """Make a party's key and a certificate request; returns the request's path and the key's fingerprint.

    An existing key is kept, so that its certificate can be renewed.

    Parameters
    ----------
    folder : path
        The party's folder of keys: ``key.pem`` stays there, ``request.pem`` is sent to the authority.
    name : str
        The site's name in the contract, or ``coordinator``.
    """
    folder = Path(folder)
    if name != COORDINATOR:
        check_name(name)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not (folder / "key.pem").exists():
        form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        write_secret(folder / "key.pem", ec.generate_private_key(ec.SECP256R1()).private_bytes(*form))
    key = _key(folder / "key.pem")
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    made = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, hashes.SHA256())
    (folder / REQUEST).write_bytes(made.public_bytes(serialization.Encoding.PEM))
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
        The authority's folder; an authority is created there if there is none.
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
    key = _requested(Path(request), name)
    made, root = certify(*open_authority(Path(authority)), name, key, days, hosts)
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for file, certificate in (("certificate.pem", made), ("authority.pem", root)):
        (folder / file).write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    return key_fingerprint(key)


def key_fingerprint(key: ec.EllipticCurvePublicKey) -> str:
    """SHA-256 of a public key, as ``openssl pkey -pubin -outform DER | sha256sum`` shows it."""
    form = serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    return hashlib.sha256(key.public_bytes(*form)).hexdigest()


def _requested(path: Path, name: str) -> ec.EllipticCurvePublicKey:
    """The public key of a request that has a valid signature and this name."""
    try:
        found = read_request(path.read_bytes())
        names = [str(one.value) for one in found.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
        key, good = found.public_key(), found.is_signature_valid
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise InputError("request", f"{path}: {error}", "Give the request.pem from `fedpdmc keys request`.") from error
    if not good or not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise InputError(
            "request", f"{path}, which is not signed with its own P-256 key", "Ask the party for a new request."
        )
    if names != [name]:
        raise InputError("request", f"one in the name of {names}", f"Give the request of {name!r}, or its name.")
    return key


def _key(path: Path) -> ec.EllipticCurvePrivateKey:
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise InputError(
            "keys", f"{path}: {error}", "Give a folder with a key that can be read, or a new one."
        ) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise InputError("keys", f"{path}, which is not a P-256 key", "Give a new folder.")
    return key
