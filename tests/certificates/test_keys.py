import base64
import shutil
import stat

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from fedpdmc.certificates import (
    certificate_name,
    fingerprint,
    make_authority,
    make_keys,
    names,
    read_credentials,
    request_certificate,
    sign,
    sign_request,
    signer,
)
from fedpdmc.errors import InputError


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


@pytest.mark.parametrize(
    "name", ["", "coordinator", "a/b", " north", "..", "x" * 65, "a\nb", "a=b", "`id`", "$(id)", "-a", 'a"b']
)
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
    assert "readable by other users" in caplog.text and "chmod 600" in caplog.text


def test_a_party_makes_its_own_key_and_the_authority_signs(tmp_path):
    """The authority never has the key; both can compare its fingerprint. Signing does not make an authority."""
    with pytest.raises(InputError, match="keys authority"):
        sign_request(tmp_path / "ca", request_certificate(tmp_path / "x", "north")[0], "north", tmp_path / "signed")
    assert not (tmp_path / "ca").exists() and len(make_authority(tmp_path / "ca")) == 64
    with pytest.raises(InputError, match="which has one"):
        make_authority(tmp_path / "ca")
    for name in ("north", "coordinator"):
        request, fingerprint = request_certificate(tmp_path / name, name)
        assert (tmp_path / name / "key.pem").stat().st_mode & 0o077 == 0
        (tmp_path / "mail").mkdir(exist_ok=True)
        shutil.copy(request, tmp_path / "mail" / "request.pem")
        assert (
            sign_request(tmp_path / "ca", tmp_path / "mail" / "request.pem", name, tmp_path / "signed") == fingerprint
        )
        for file in ("certificate.pem", "authority.pem"):
            shutil.copy(tmp_path / "signed" / file, tmp_path / name)
        found = read_credentials(tmp_path / name)
        assert certificate_name(found.certificate) == name
        assert signer(found, found.certificate, sign(found, b"x"), b"x") == name
    assert "coordinator" in names(found.certificate)
    # Renewed: the same key, another certificate.
    assert request_certificate(tmp_path / name, name)[1] == fingerprint


def of_another_version(pem: bytes) -> bytes:
    """A certificate that says it is of version 2, which nobody writes."""
    found = x509.load_pem_x509_certificate(pem).public_bytes(Encoding.DER)
    changed = found.replace(bytes.fromhex("a003020102"), bytes.fromhex("a003020101"), 1)
    assert changed != found
    lines = base64.encodebytes(changed).decode()
    return f"-----BEGIN CERTIFICATE-----\n{lines}-----END CERTIFICATE-----\n".encode()


def test_a_certificate_of_another_version_is_refused_by_name(tmp_path):
    make_keys(tmp_path, ["north"])
    path = tmp_path / "sites" / "north" / "certificate.pem"
    path.write_bytes(of_another_version(path.read_bytes()))
    with pytest.raises(InputError, match="version"):
        read_credentials(path.parent)
    with pytest.raises(ValueError, match="version"):
        fingerprint(path.read_bytes())
    authority = tmp_path / "authority" / "certificate.pem"
    authority.write_bytes(of_another_version(authority.read_bytes()))
    with pytest.raises(InputError, match="version"):
        make_keys(tmp_path, ["north", "south"])


@pytest.mark.parametrize("how", ["other name", "rubbish", "altered", "missing"])
def test_a_request_that_is_not_the_partys_is_not_signed(tmp_path, how):
    request, _ = request_certificate(tmp_path / "north", "north")
    if how == "rubbish":
        request.write_text("rubbish")
    elif how == "altered":
        body = bytearray(base64.b64decode("".join(request.read_text().splitlines()[1:-1])))
        body[-1] ^= 1
        text = base64.b64encode(body).decode()
        request.write_text(f"-----BEGIN CERTIFICATE REQUEST-----\n{text}\n-----END CERTIFICATE REQUEST-----\n")
    elif how == "missing":
        request.unlink()
    with pytest.raises(InputError, match="request"):
        sign_request(tmp_path / "ca", request, "south" if how == "other name" else "north", tmp_path / "signed")
    assert not (tmp_path / "signed").exists()


def test_a_certificate_of_another_key_is_named(tmp_path):
    make_keys(tmp_path, ["north", "south"])
    shutil.copy(tmp_path / "sites" / "south" / "certificate.pem", tmp_path / "sites" / "north")
    with pytest.raises(InputError, match="certificate.pem of another key"):
        read_credentials(tmp_path / "sites" / "north")
    (tmp_path / "sites" / "north" / "key.pem").write_text("no key")
    with pytest.raises(InputError, match="as PEM"):
        read_credentials(tmp_path / "sites" / "north")
