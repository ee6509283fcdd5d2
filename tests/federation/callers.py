"""Callers of a coordinator: what they send, and the certificates that they show."""

import datetime
import queue

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization

from fedpdmc.federation import messages as wire
from fedpdmc.federation.grpc.tls import JOIN, SERVICE


def says(address, credentials, *messages, wait=5.0, compression=None):
    """Dial, say something, and return the first answer."""
    outgoing = queue.SimpleQueue()
    for message in messages:
        outgoing.put(message)
    options = [("grpc.ssl_target_name_override", "coordinator"), ("grpc.max_send_message_length", 2**30)]
    secret = grpc.ssl_channel_credentials(credentials.authority, credentials.key, credentials.certificate)
    with grpc.secure_channel(address, secret, options, compression) as channel:
        call = channel.stream_stream(f"/{SERVICE}/{JOIN}")(iter(outgoing.get, None), timeout=wait)
        try:
            return wire.decode(next(call))
        finally:
            outgoing.put(None)


def hello(folder, site="north", study=None):
    return wire.encode(wire.Hello(site, study or folder.study.digest, "test"))


def dated(authority, certificate, begin, end):
    """The same certificate with other dates, in seconds from now."""
    key = serialization.load_pem_private_key((authority / "key.pem").read_bytes(), None)
    old, now = x509.load_pem_x509_certificate(certificate), datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(old.issuer, old.subject, old.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now + datetime.timedelta(seconds=begin)).not_valid_after(
        now + datetime.timedelta(seconds=end)
    )
    for extension in old.extensions:
        builder = builder.add_extension(extension.value, extension.critical)
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
