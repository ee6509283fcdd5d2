"""The revocation list of an authority: an X.509 CRL, ``crl.pem`` in a party's folder of keys."""

from __future__ import annotations

import datetime
import logging
from pathlib import Path

from cryptography import x509

from fedpdmc.certificates.pem import read_certificate
from fedpdmc.errors import InputError

logger = logging.getLogger("fedpdmc.keys")
CRL = "crl.pem"
REMEDY = "Give the authority's revocation list, as `openssl ca -gencrl` writes it."


class RevocationList:
    """The certificates that the authority has revoked, by serial number.

    Parameters
    ----------
    path : path
        Need not exist. If it is deleted, or replaced by an older or unreadable one, the last list stays in force.
    authority : bytes
        The authority's certificate, whose key must have signed the list.
    """

    def __init__(self, path: Path, authority: bytes):
        self.path, self.authority = path, authority
        self._stamp: tuple | None = None
        self._list: x509.CertificateRevocationList | None = None

    def refresh(self) -> None:
        """Read the file if it has changed.

        Raises
        ------
        InputError
            It cannot be read, and no list is in force.
        """
        try:
            status = self.path.stat()
        except FileNotFoundError:
            return
        stamp = (status.st_ino, status.st_size, status.st_mtime_ns)
        if stamp == self._stamp:
            return
        try:
            found = self._read()
            if self._list is not None and found.last_update_utc < self._list.last_update_utc:
                raise InputError("keys", f"{self.path} of an earlier time than the list in force", REMEDY)
        except InputError as error:
            if self._list is None:
                raise
            logger.error("%s The last list stays in force.", error)
        else:
            self._list = found
            until = found.next_update_utc
            if until is not None and until < datetime.datetime.now(datetime.UTC):
                logger.warning("%s has expired at %s: ask the authority for a newer one", self.path, until)
        self._stamp = stamp

    def _read(self) -> x509.CertificateRevocationList:
        try:
            found = x509.load_pem_x509_crl(self.path.read_bytes())
            root = read_certificate(self.authority)
            good = found.issuer == root.subject and found.is_signature_valid(root.public_key())  # type: ignore[arg-type]
            # The entries are parsed when they are asked for.
            list(found)
        except Exception as error:
            # The library raises many kinds of errors for files that are not lists.
            raise InputError("keys", f"{self.path}, which cannot be read ({type(error).__name__})", REMEDY) from error
        if not good:
            raise InputError("keys", f"{self.path}, which the study's authority has not signed", REMEDY)
        return found

    def __contains__(self, certificate: bytes) -> bool:
        if self._list is None:
            return False
        serial = read_certificate(certificate).serial_number
        return self._list.get_revoked_certificate_by_serial_number(serial) is not None
