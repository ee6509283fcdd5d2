import base64
import stat

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from fedpdmc.errors import InputError
from fedpdmc.keys import certificate_name, make_keys, read_credentials, sign, signer


def test_each_party_gets_its_own_folder_and_the_secret_is_its_own(tmp_path):
    make_keys(tmp_path / "keys", ["north", "south"])
    for party in ("coordinator", "sites/north", "sites/south"):
        folder = tmp_path / "keys" / party
        assert stat.S_IMODE((folder / "key.pem").stat().st_mode) == 0o600
        found = read_credentials(folder)
        assert certificate_name(found.certificate) == party.removeprefix("sites/")
        authority = x509.load_pem_x509_certificate(found.authority)
        x509.load_pem_x509_certificate(found.certificate).verify_directly_issued_by(authority)


def test_a_site_is_added_later_and_the_others_keep_their_keys(tmp_path):
    make_keys(tmp_path, ["north"])
    before = read_credentials(tmp_path / "sites" / "north")
    make_keys(tmp_path, ["north", "south"])
    assert read_credentials(tmp_path / "sites" / "north") == before
    assert read_credentials(tmp_path / "sites" / "south").authority == before.authority


@pytest.mark.parametrize("name", ["", "coordinator", "a/b", " north", "..", "x" * 65, "a\nb", "a=b"])
def test_names_that_cannot_be_trusted_are_refused(tmp_path, name):
    with pytest.raises(InputError, match="site name"):
        make_keys(tmp_path, [name])


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(InputError, match="key.pem"):
        read_credentials(tmp_path)


def test_a_certificate_with_any_byte_altered_proves_nothing(tmp_path):
    """Whatever the library raises for it: a certificate of version 43, say."""
    make_keys(tmp_path, ["north", "south"])
    north, south = (read_credentials(tmp_path / "sites" / name) for name in ("north", "south"))
    signature = sign(north, b"said")
    assert signer(south, north.certificate, signature, b"said") == "north"
    whole = x509.load_pem_x509_certificate(north.certificate).public_bytes(Encoding.DER)
    for k in range(len(whole)):
        altered = whole[:k] + bytes([whole[k] ^ 40]) + whole[k + 1 :]
        lines = (b"-----BEGIN CERTIFICATE-----", base64.b64encode(altered), b"-----END CERTIFICATE-----", b"")
        assert signer(south, b"\n".join(lines), signature, b"said") is None


def test_a_key_that_others_can_read_is_warned_about(tmp_path, caplog):
    make_keys(tmp_path, ["north"])
    read_credentials(tmp_path / "sites" / "north")
    assert not caplog.records
    (tmp_path / "sites" / "north" / "key.pem").chmod(0o640)
    read_credentials(tmp_path / "sites" / "north")
    assert "can be read by others" in caplog.text and "chmod 600" in caplog.text
