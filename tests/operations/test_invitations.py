"""A site invited by a token and a code: with real processes, and against somebody who sits between them."""

import base64
import contextlib
import re
import secrets
import socket
import ssl
import subprocess
import sys
import threading

import pytest
from tests.federation.studies import ZIGZAG
from tests.study.contracts import rows, write_csv
from typer.testing import CliRunner

from fedpdmc.certificates import fingerprint, make_keys, read_credentials, request_certificate
from fedpdmc.cli import app
from fedpdmc.errors import InputError
from fedpdmc.operations import invitations
from fedpdmc.operations.invitations import Invitation, Reception, accept_invitation, read_token


@pytest.fixture
def study(tmp_path):
    (tmp_path / "study.toml").write_text(ZIGZAG)
    write_csv(tmp_path / "north.csv", rows("north", n=200))
    return tmp_path


@pytest.fixture
def reception(study):
    with Reception(study / "study.toml", study / "keys", "127.0.0.1:0") as found:
        yield found


def token(reception, site="north"):
    """The site's token, with the port that the system chose."""
    return read_token(reception.tokens[site])._replace(coordinator=reception.address)


def join(reception, invitation, folder, type_code=lambda code: code):
    """A site and an organiser at the telephone; what the site raised, and whether it was admitted."""
    codes, raised = [], []

    def site():
        try:
            accept_invitation(invitation, folder, lambda code: codes.append(code) or True)
        except InputError as error:
            raised.append(error)

    thread = threading.Thread(target=site)
    thread.start()
    applicant = reception.applicants.get(timeout=20)
    while not codes:
        thread.join(0.01)
    admitted = reception.admit(applicant, type_code(codes[0]))
    thread.join(20)
    return raised, admitted


def test_a_site_and_its_organiser_need_one_command_each(study):
    """With real processes, what is typed and what is printed; then the folder runs without further options."""
    words = [sys.executable, "-m", "fedpdmc"]
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    pipes = {
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
        "text": True,
        "cwd": study,
    }
    with contextlib.ExitStack() as processes:

        def start(*rest):
            process = processes.enter_context(subprocess.Popen([*words, *rest], **pipes))
            processes.callback(process.kill)
            return process

        organiser, out = start("invite", "study.toml", "--coordinator", address), ""
        while "Waiting for" not in out:
            out += organiser.stdout.readline()
        found = re.search(r"join (\S+) --data", out)[1]
        site, text = start("join", found, "--data", "north.csv", "--folder", "here"), ""
        while not (code := re.search(r"Code: (\d{4} \d{4})", text)):
            text += site.stdout.readline()
        organiser.stdin.write(code[1] + "\n")
        organiser.stdin.flush()
        while "which has joined" not in out:
            out += organiser.stdout.readline()
        text = site.communicate("yes\n", timeout=60)[0]
        assert "Ready. Read here/policy.toml, then run: fedpdmc site --folder here" in " ".join(text.split()), text
    assert (
        read_credentials(study / "here" / "keys").certificate
        == (study / "keys/sites/north/certificate.pem").read_bytes()
    )
    result = CliRunner().invoke(app, ["site", "--folder", str(study / "here"), "--check"])
    assert result.exit_code == 1 and "ok   data: 200 records" in result.output and "ok   policy" in result.output
    assert "--folder" in CliRunner().invoke(app, ["site", "--name", "north"]).output


def test_a_token_serves_once_and_is_kept_over_restarts(study, reception):
    invitation = token(reception)
    assert join(reception, invitation, study / "a") == ([], True)
    with pytest.raises(InputError, match="new one"):
        accept_invitation(invitation, study / "b", lambda code: True)
    # The site runs its command again: nothing is dialled.
    assert accept_invitation(invitation._replace(coordinator="127.0.0.1:1"), study / "a", None).study.name
    with Reception(study / "study.toml", study / "keys", "127.0.0.1:0") as later:
        assert later.missing == ["south"] and token(later, "south").secret == token(reception, "south").secret
    with Reception(study / "study.toml", study / "keys", "127.0.0.1:0", again=["north"]) as later:
        assert token(later).secret != invitation.secret
        assert join(later, token(later), study / "c") == ([], True)


def test_a_wrong_code_signs_nothing_and_leaves_nothing(study, reception):
    raised, admitted = join(reception, token(reception), study / "a", lambda code: "0000 0000")
    assert not admitted and "code differs" in str(raised[0])
    assert not (study / "keys/sites/north/certificate.pem").exists() and not (study / "a/keys/certificate.pem").exists()
    with pytest.raises(InputError, match="no confirmation"):
        accept_invitation(token(reception), study / "a", lambda code: False)
    assert sorted(path.name for path in (study / "a").rglob("*.*")) == ["key.pem", "request.pem"]


def test_strangers_are_refused_and_do_not_stop_the_door(study, reception):
    host, port = reception.address.split(":")
    for data in (b"", b"GET / HTTP/1.1\r\n\r\n", secrets.token_bytes(3000)):
        with socket.create_connection((host, int(port))) as line:
            line.sendall(data)
    for changed in (
        token(reception)._replace(secret="00" * 16),
        token(reception)._replace(site="west"),
        token(reception)._replace(site="south"),
    ):
        with pytest.raises(InputError, match="not valid"):
            accept_invitation(changed, study / "x", lambda code: True)
    # Lists of lists, which a parser of JSON gives up with another error; nobody's thread ends with it.
    raised, hook = [], threading.excepthook
    threading.excepthook = raised.append
    with socket.create_connection((host, int(port)), 5.0) as plain, anybody().wrap_socket(plain) as line:
        line.sendall((10**5).to_bytes(4, "big") + b"[" * 10**5)
        assert line.recv(1) == b""
    threading.excepthook = hook
    assert not raised
    # A certificate that the token does not name: nothing is sent.
    with pytest.raises(InputError, match="another certificate"):
        accept_invitation(token(reception)._replace(certificate="00" * 32), study / "y", lambda code: True)
    assert join(reception, token(reception), study / "a") == ([], True)


def anybody():
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def test_the_words_of_a_refusal_are_one_line_that_does_nothing(study, reception):
    """Who has changed a token is dialled, and his words are shown: they could pass for lines of this program."""
    reception._open = lambda *_: "\x1b[2J\nReady. Now run: id\u202e"
    with pytest.raises(InputError, match="a refusal") as error:
        accept_invitation(token(reception), study / "x", lambda code: True)
    assert str(error.value).isprintable() and "Ready. Now run: id" in str(error.value)


class Between:
    """An attacker who has changed the token on its way: his own certificate and address, the true secret."""

    def __init__(self, folder, true: Invitation):
        make_keys(folder, [])
        self.folder, self.true, self.own = folder / "coordinator", true, folder
        self.request = request_certificate(folder / "mine", true.site)[0].read_bytes()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.folder / "certificate.pem", self.folder / "key.pem")
        self.door = socket.create_server(("127.0.0.1", 0))
        self.context, self.tries, self.hit = context, 0, False
        shown = fingerprint((self.folder / "certificate.pem").read_bytes())
        self.changed = true._replace(coordinator=f"127.0.0.1:{self.door.getsockname()[1]}", certificate=shown)

    def _towards_coordinator(self, wanted):
        """Open conversations until the code is the one that the site shows; only then go on."""
        for self.tries in range(1, 400):
            with invitations._dial(self.true) as line:
                nonce = secrets.token_bytes(32)
                commitment = invitations._commit(nonce, self.request)
                line.send(site=self.true.site, secret=self.true.secret, commitment=commitment)
                packed, theirs = line.receive("bundle", "nonce")
                nonces = nonce, bytes.fromhex(theirs)
                code = invitations.compute_code(
                    self.true.site, self.true.certificate, base64.b64decode(packed), self.request, nonces
                )
                if code == wanted:
                    self.hit = True
                    line.send(nonce=nonce.hex(), request=self.request.decode())
                    line.receive("certificate")
                    return

    def run(self):
        plain, _ = self.door.accept()
        with contextlib.suppress(InputError, OSError), self.context.wrap_socket(plain, server_side=True) as connection:
            line = invitations._Line(connection)
            line.receive("site")
            bundle, nonce = b"the attacker's own bundle", secrets.token_bytes(32)
            line.send(bundle=base64.b64encode(bundle).decode(), nonce=nonce.hex())
            theirs, request = line.receive("nonce", "request")
            nonces = bytes.fromhex(theirs), nonce
            self._towards_coordinator(
                invitations.compute_code(self.true.site, self.changed.certificate, bundle, request.encode(), nonces)
            )
            line.send(refused="")


@pytest.mark.parametrize("limited", [True, False])
def test_somebody_between_them_cannot_make_the_codes_agree(study, reception, monkeypatch, request, limited):
    """He tries until a code fits. With codes of two digits and no limit of openings he would be admitted."""
    if not limited:
        monkeypatch.setattr(invitations, "OPENINGS", 10**6)
    full = invitations.compute_code
    monkeypatch.setattr(invitations, "compute_code", lambda *words: full(*words) if limited else full(*words)[:2])
    attacker, codes = Between(study / "attacker", token(reception)), []
    request.addfinalizer(attacker.door.close)
    thread = threading.Thread(target=attacker.run, daemon=True)
    thread.start()
    site = threading.Thread(
        target=lambda: pytest.raises(
            InputError, accept_invitation, attacker.changed, study / "a", lambda code: codes.append(code) or True
        ),
        daemon=True,
    )
    site.start()
    if limited:
        thread.join(30)
        assert attacker.tries == invitations.OPENINGS + 1 and not attacker.hit and reception.applicants.empty()
    else:
        applicant = reception.applicants.get(timeout=60)
        assert attacker.hit and reception.admit(applicant, codes[0])
    site.join(20)
    assert not (study / "a" / "keys" / "certificate.pem").exists()


NESTED = "fedpdmc1-" + base64.urlsafe_b64encode(b"[" * 10**5).decode()


@pytest.mark.parametrize("text", ["fedpdmc1-", "fedpdmc1-bm90", "fedpdmc1-W10", "fedpdmc1-WyJhIl0", NESTED])
def test_a_damaged_token_is_named(text):
    with pytest.raises(InputError, match="token"):
        read_token(text)


def test_an_address_in_a_token_is_that_of_a_host():
    for word in ("`id`:1", "a b:1", "host"):
        with pytest.raises(InputError):
            read_token(Invitation("north", word, "00" * 32, "00").token())
    with pytest.raises(InputError, match="site name"):
        read_token(Invitation("-x", "a:1", "00" * 32, "00").token())
