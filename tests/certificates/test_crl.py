"""The authority's revocation list: whose word it is, and what stays in force when it is replaced."""

import datetime
import logging

import pytest
from tests.certificates.lists import NOW, write_list

from fedpdmc import certificates as keys
from fedpdmc.errors import InputError


@pytest.fixture
def party(tmp_path, monkeypatch):
    monkeypatch.setattr(keys, "SECONDS", 0.0)
    made = keys.make_keys(tmp_path / "keys", ["north", "south"])
    return made / "coordinator", made / "authority", (made / "sites" / "south" / "certificate.pem").read_bytes()


def test_a_list_counts_from_when_it_is_there_and_until_a_newer_one(party, caplog):
    folder, authority, south = party
    own = keys.read_credentials(folder)
    assert south not in own.revoked and own.certificate not in own.revoked
    write_list(folder, authority, [south])
    assert south in own.revoked and own.certificate not in own.revoked
    signature = keys.sign(keys.read_credentials(authority.parent / "sites" / "south"), b"data")
    assert keys.signer(own, south, signature, b"data") is None
    # Deleted, unreadable, signed by another, or older: the last one stays in force.
    (folder / "crl.pem").unlink()
    assert south in own.revoked
    (folder / "crl.pem").write_text("nothing")
    assert south in own.revoked and "cannot be read" in caplog.text
    other = keys.make_keys(folder.parent.parent / "others", ["north"]) / "authority"
    write_list(folder, other, [])
    assert south in own.revoked and "has not signed" in caplog.text
    write_list(folder, authority, [], NOW - datetime.timedelta(days=1))
    assert south in own.revoked and "earlier time" in caplog.text
    write_list(folder, authority, [], NOW + datetime.timedelta(seconds=1))
    assert south not in own.revoked


@pytest.mark.parametrize("content", [b"", b"-----BEGIN X509 CRL-----\nAAAA\n-----END X509 CRL-----\n", None])
def test_a_first_list_that_is_none_lets_nobody_in(party, content):
    folder, _, south = party
    if content is None:
        write_list(folder, keys.make_keys(folder.parent.parent / "others", ["north"]) / "authority", [])
    else:
        (folder / "crl.pem").write_bytes(content)
    with pytest.raises(InputError, match="crl.pem"):
        south in keys.read_credentials(folder).revoked  # noqa: B015


def test_an_expired_list_is_in_force_and_is_warned_about(party, caplog):
    folder, authority, south = party
    caplog.set_level(logging.WARNING)
    write_list(folder, authority, [south], NOW - datetime.timedelta(days=9))
    assert south in keys.read_credentials(folder).revoked and "has expired" in caplog.text
