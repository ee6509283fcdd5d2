"""Certificates and requests for them as PEM, read with one kind of error."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm

T = TypeVar("T")


def _read(load: Callable[[bytes], T], pem: bytes) -> T:
    """Read with the library, whose errors are of several kinds: here all of them are `ValueError`."""
    try:
        return load(pem)
    except (x509.InvalidVersion, UnsupportedAlgorithm, TypeError) as error:
        raise ValueError(str(error)) from error


def read_certificate(pem: bytes) -> x509.Certificate:
    """A certificate.

    Raises
    ------
    ValueError
    """
    return _read(x509.load_pem_x509_certificate, pem)


def read_request(pem: bytes) -> x509.CertificateSigningRequest:
    """A request for a certificate.

    Raises
    ------
    ValueError
    """
    return _read(x509.load_pem_x509_csr, pem)
