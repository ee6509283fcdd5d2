"""Revocation lists as an authority makes them."""

import datetime
import os

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization

NOW = datetime.datetime.now(datetime.UTC).replace(microsecond=0)


def write_list(folder, authority, certificates, when=NOW, days=7):
    """A list of revoked certificates, signed by the authority in its folder, put into a party's folder at once."""
    key = serialization.load_pem_private_key((authority / "key.pem").read_bytes(), None)
    root = x509.load_pem_x509_certificate((authority / "certificate.pem").read_bytes())
    builder = x509.CertificateRevocationListBuilder().issuer_name(root.subject).last_update(when)
    builder = builder.next_update(when + datetime.timedelta(days=days))
    for one in certificates:
        serial = x509.load_pem_x509_certificate(one).serial_number
        entry = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(when).build()
        builder = builder.add_revoked_certificate(entry)
    draft = folder / "crl.new"
    draft.write_bytes(builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    os.replace(draft, folder / "crl.pem")
