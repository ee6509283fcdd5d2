"""Invitations: a site joins a study by one token, and two people compare one short code by telephone.

The token has the coordinator's address, the SHA-256 of its certificate, the site's name and a secret. The attacker can read
and change the token on its way, and sits on the line between the two programs. The site dials and

1. sends the token's secret and the SHA-256 of (its nonce, its certificate request): a commitment,
2. receives the study's bundle and the coordinator's nonce,
3. sends its own nonce and the request.

Both sides show eight digits of a hash of site, certificate, bundle, request and both nonces. The organiser types the code
that the site reads aloud, and the site goes on only after its reader has heard that it is right. An attacker between them
has two conversations. Towards the site he fixes bundle and nonce before he sees the site's nonce. Towards the coordinator
he may try until a code fits, but each try is an opening, counted before the coordinator's nonce is sent, and a token has
five: he succeeds with a probability of 5·10⁻⁸. Before that nothing of the study is written at the site, and nothing is
signed.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import json
import queue
import secrets
import socket
import ssl
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from fedpdmc import certificates as keys
from fedpdmc.errors import InputError
from fedpdmc.federation.grpc.tls import split_address
from fedpdmc.operations.bundle import Bundle, make_bundle, read_bundle
from fedpdmc.results import manifest
from fedpdmc.study import read_study
from fedpdmc.validation import check_fingerprint, check_name, is_plain, require_posix

PREFIX = "fedpdmc1-"
OPENINGS = 5  # conversations that one token may begin
MOST_MESSAGE = 8 * 2**20  # bytes of a message: a bundle, in base64
# Connections at a time.
MOST_CALLERS = 32
PATIENCE = 60.0  # seconds for a program to answer
TELEPHONE = 3600.0  # seconds for people at the telephone
SAME_VERSION = "Install the same version of fedpdmc on both sides."
STATE = "invitations.json"  # in the folder of keys: the tokens' secrets, and how often each was used
BUNDLE = "bundle.zip"  # in a site's folder: the file from which it was set up


class Invitation(NamedTuple):
    """What a token says: whom to dial, which certificate to expect there, and as whom."""

    site: str
    coordinator: str
    certificate: str
    secret: str

    def token(self) -> str:
        """The token, one word."""
        return PREFIX + base64.urlsafe_b64encode(json.dumps(self).encode()).decode().rstrip("=")


def read_token(token: str) -> Invitation:
    """What a token says."""
    remedy = "Copy the whole token from the organiser's message, in one line."
    text = token.strip().removeprefix(PREFIX)
    try:
        fields = json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
        if not isinstance(fields, list) or not all(isinstance(field, str) for field in fields):
            raise ValueError("other fields")
        invitation = Invitation(*fields)
        bytes.fromhex(invitation.secret)
    except (ValueError, TypeError, RecursionError) as error:
        raise InputError("token", f"one that cannot be read ({error})", remedy) from error
    split_address(invitation.coordinator, "token: coordinator")
    check_fingerprint(invitation.certificate)
    check_name(invitation.site)
    return invitation


def compute_code(site: str, certificate: str, bundle: bytes, request: bytes, nonces: tuple[bytes, bytes]) -> str:
    """The eight digits that both sides compare."""
    parts = [site.encode(), bytes.fromhex(certificate), hashlib.sha256(bundle).digest(), request, *nonces]
    joined = b"fedpdmc invitation" + b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    digits = f"{int.from_bytes(hashlib.sha256(joined).digest()[:16], 'big') % 10**8:08d}"
    return f"{digits[:4]} {digits[4:]}"


def _commit(nonce: bytes, request: bytes) -> str:
    return hashlib.sha256(b"fedpdmc commitment" + nonce + request).hexdigest()


class _Line:
    """Messages over one TLS connection: four bytes of length, then JSON with texts only."""

    def __init__(self, connection: socket.socket):
        self.connection = connection

    def send(self, **fields: str) -> None:
        data = json.dumps(fields).encode()
        self.connection.sendall(len(data).to_bytes(4, "big") + data)

    def receive(self, *names: str, patience: float = PATIENCE) -> list[str]:
        """The fields with these names; raises if the other side refuses, hangs up or sends something else."""
        self.connection.settimeout(patience)
        try:
            size = int.from_bytes(self._read(4), "big")
            message = json.loads(self._read(size)) if size <= MOST_MESSAGE else None
        except (OSError, ValueError, RecursionError) as error:
            raise InputError("invitation", f"a connection that ended ({error})", "Run the command again.") from error
        if isinstance(message, dict) and isinstance(message.get("refused"), str):
            # Whoever answers may be anybody: his words stay in one line, and cannot move the cursor.
            words = "".join(c if is_plain(c) else "?" for c in message["refused"][:300])
            raise InputError("invitation", "a refusal", words)
        if not isinstance(message, dict) or not all(isinstance(message.get(name), str) for name in names):
            raise InputError("invitation", "an unknown message", SAME_VERSION)
        return [message[name] for name in names]

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = self.connection.recv(min(size - len(data), 2**16))
            if not part:
                raise OSError("the other side hung up")
            data += part
        return data


class Applicant(NamedTuple):
    """A site at the coordinator's door, whose code is to be compared."""

    site: str
    code: str
    request: bytes
    line: _Line


class Reception:
    """The coordinator's side: tokens for all sites of a study, and a door at which they appear. A context manager.

    Parameters
    ----------
    study : path
        The contract.
    folder : path
        The folder of keys, with ``authority`` and ``coordinator``; made if it does not exist.
    coordinator : str
        ``host:port``, as seen by the sites.
    listen : str, optional
        The address to listen on, if another one.
    again : sequence of str
        Sites that have joined and get a new token, because they lost their keys or their answer.
    """

    def __init__(self, study: str | Path, folder: str | Path, coordinator: str, listen: str | None = None, again=()):
        require_posix("an invitation")
        self.folder, self.study = Path(folder), read_study(study)
        self.host, self.port = split_address(listen or coordinator, "listen" if listen else "coordinator")
        split_address(coordinator, "coordinator")
        if self.folder.exists() and not (self.folder / "authority" / "key.pem").exists():
            remedy = "Give the folder of the study's authority, or a new one."
            raise InputError("keys", f"{self.folder} without an authority", remedy)
        self.made_authority = not self.folder.exists()
        keys.make_keys(self.folder, [])
        with tempfile.TemporaryDirectory() as place:
            authority = self.folder / keys.COORDINATOR / "authority.pem"
            self.bundle = make_bundle(study, authority, coordinator, Path(place) / BUNDLE).read_bytes()
        self._shown = keys.fingerprint((self.folder / keys.COORDINATOR / "certificate.pem").read_bytes())
        self._lock, self.applicants = threading.Lock(), queue.Queue[Applicant]()
        self._closed = False
        self._seats = threading.BoundedSemaphore(MOST_CALLERS)
        for site in again:
            if site not in self.study.sites:
                remedy = f"Give one of the contract's sites: {', '.join(self.study.sites)}."
                raise InputError("again", repr(site), remedy)
            (self.folder / "sites" / site / "certificate.pem").unlink(missing_ok=True)
        self._state = self._read_state(again)
        self.tokens = {
            site: Invitation(site, coordinator, self._shown, state["secret"]).token()
            for site, state in self._state.items()
        }

    def _read_state(self, again) -> dict[str, dict]:
        """Secret and number of openings of each site that has not joined; kept over restarts."""
        try:
            state = json.loads((self.folder / STATE).read_text())
        except FileNotFoundError:
            state = {}
        kept = {}
        for site in self.study.sites:
            if (self.folder / "sites" / site / "certificate.pem").exists():
                continue
            fresh = site not in state or site in again or state[site]["openings"] >= OPENINGS
            kept[site] = {"secret": secrets.token_hex(16), "openings": 0} if fresh else state[site]
        self._write_state(kept)
        return kept

    def _write_state(self, state: dict) -> None:
        manifest.replace(self.folder / STATE, json.dumps(state).encode(), 0o600)

    def __enter__(self) -> Reception:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        own = self.folder / keys.COORDINATOR
        context.load_cert_chain(own / "certificate.pem", own / "key.pem")
        try:
            family = socket.getaddrinfo(self.host.strip("[]"), self.port, type=socket.SOCK_STREAM)[0][0]
            self._door = socket.create_server((self.host.strip("[]"), self.port), family=family)
        except OSError as error:
            address = f"{self.host}:{self.port}"
            raise InputError("listen", f"{address}: {error}", "Give an address of this machine, --listen.") from error
        self.address = f"{self.host}:{self._door.getsockname()[1]}"
        threading.Thread(target=self._listen, args=(context,), daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        # Closing alone would leave the thread in `accept`.
        with contextlib.suppress(OSError):
            self._door.shutdown(socket.SHUT_RDWR)
        self._door.close()
        with self._lock:
            self._closed = True
        while not self.applicants.empty():
            self.dismiss(self.applicants.get(), "The organiser has stopped. Run the command again later.")

    def _listen(self, context: ssl.SSLContext) -> None:
        while True:
            try:
                connection, _ = self._door.accept()
            except OSError:
                return
            if self._seats.acquire(blocking=False):
                threading.Thread(target=self._greet, args=(context, connection), daemon=True).start()
            else:
                connection.close()

    def _greet(self, context: ssl.SSLContext, connection: socket.socket) -> None:
        """Hold the conversation up to the code. Whatever a stranger sends ends it, and nothing else."""
        applicant = None
        try:
            connection.settimeout(PATIENCE)
            connection = context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
            connection.do_handshake()
            applicant = self._converse(_Line(connection))
        except (OSError, ValueError, InputError):
            pass
        finally:
            self._seats.release()
        with self._lock:
            if applicant is None or self._closed:
                connection.close()
            else:
                self.applicants.put(applicant)

    def _converse(self, line: _Line) -> Applicant | None:
        site, secret, commitment = line.receive("site", "secret", "commitment")
        if refusal := self._open(site, secret):
            line.send(refused=refusal)
            return None
        nonce = secrets.token_bytes(32)
        line.send(bundle=base64.b64encode(self.bundle).decode(), nonce=nonce.hex())
        theirs, text = line.receive("nonce", "request")
        nonces, request = (bytes.fromhex(theirs), nonce), text.encode()
        if not hmac.compare_digest(_commit(nonces[0], request).encode(), commitment.encode()):
            line.send(refused="The certificate request is another than the one committed to.")
            return None
        keys.requested_key(request, site)
        return Applicant(site, compute_code(site, self._shown, self.bundle, request, nonces), request, line)

    def _open(self, site: str, secret: str) -> str:
        """Why a conversation may not begin, or nothing. It is counted before anything is answered."""
        with self._lock:
            state = self._state.get(site)
            if state is None or not hmac.compare_digest(state["secret"].encode(), secret.encode()):
                return "This token is not valid, or its site has joined. Ask the organiser for a new one."
            if state["openings"] >= OPENINGS:
                return "This token was used too often. Ask the organiser for a new one."
            state["openings"] += 1
            self._write_state(self._state)
            return ""

    def admit(self, applicant: Applicant, code: str) -> bool:
        """Sign a site's request if the code that its reader told is right; returns whether it was."""
        same = hmac.compare_digest("".join(code.split()).encode(), applicant.code.replace(" ", "").encode())
        if not same or applicant.site not in self._state:
            self.dismiss(applicant, "The code differs, so somebody may be between you. Nothing was signed.")
            return False
        place = self.folder / "sites" / applicant.site
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        (place / keys.REQUEST).write_bytes(applicant.request)
        keys.sign_request(self.folder / "authority", place / keys.REQUEST, applicant.site, place)
        with self._lock:
            del self._state[applicant.site]
            self._write_state(self._state)
        self._tell(applicant, certificate=(place / "certificate.pem").read_text())
        return True

    def dismiss(self, applicant: Applicant, reason: str) -> None:
        """Tell a site that it was not admitted."""
        self._tell(applicant, refused=reason)

    def _tell(self, applicant: Applicant, **fields: str) -> None:
        with contextlib.closing(applicant.line.connection), contextlib.suppress(OSError):
            applicant.line.send(**fields)

    @property
    def missing(self) -> list[str]:
        """Sites that have not joined."""
        return list(self._state)


@contextlib.contextmanager
def _dial(invitation: Invitation) -> Iterator[_Line]:
    """A connection to the certificate that the token names; nothing is sent to another one."""
    host, port = split_address(invitation.coordinator, "token: coordinator")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        plain = socket.create_connection((host.strip("[]"), port), PATIENCE)
    except OSError as error:
        remedy = "Ask the organiser whether `fedpdmc invite` runs, and your network whether this address is allowed."
        raise InputError("token", f"{invitation.coordinator}: {error}", remedy) from error
    with plain, context.wrap_socket(plain) as connection:
        shown = hashlib.sha256(connection.getpeercert(True) or b"").hexdigest()
        if shown != invitation.certificate:
            found = f"another certificate than the token's at {invitation.coordinator}"
            raise InputError("token", found, "Ask the organiser by telephone. Nothing was sent.")
        yield _Line(connection)


def accept_invitation(invitation: Invitation, folder: str | Path, confirm: Callable[[str], bool]) -> Bundle:
    """The site's side: get the study's bundle and this site's certificate.

    ``folder``: the study's folder at this site. Once it has a certificate, nothing is dialled. ``confirm``: shows the
    code, and returns whether the organiser said on the telephone that it is right.
    """
    folder = Path(folder)
    if (folder / "keys" / "certificate.pem").exists() and (folder / BUNDLE).exists():
        return read_bundle(folder / BUNDLE)
    path, _ = keys.request_certificate(folder / "keys", invitation.site)
    request, nonce = path.read_bytes(), secrets.token_bytes(32)
    with _dial(invitation) as line:
        line.send(site=invitation.site, secret=invitation.secret, commitment=_commit(nonce, request))
        packed, theirs = line.receive("bundle", "nonce")
        try:
            data, nonces = base64.b64decode(packed), (nonce, bytes.fromhex(theirs))
        except ValueError as error:
            raise InputError("invitation", "an unknown message", SAME_VERSION) from error
        line.send(nonce=nonce.hex(), request=request.decode())
        if not confirm(compute_code(invitation.site, invitation.certificate, data, request, nonces)):
            raise InputError("code", "no confirmation", "Nothing was set up. Run the command again.")
        (certificate,) = line.receive("certificate", patience=TELEPHONE)
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / BUNDLE).write_bytes(data)
        bundle = read_bundle(Path(place) / BUNDLE)
    for name, content in (("certificate.pem", certificate.encode()), ("authority.pem", bundle.authority)):
        (folder / "keys" / name).write_bytes(content)
    try:
        own = keys.read_credentials(folder / "keys")
        proof = keys.signer(own, own.certificate, keys.sign(own, nonce), nonce)
        if proof != invitation.site:
            raise InputError("certificate", f"one for {proof!r}", "Ask the organiser to invite this site again.")
    except InputError:
        (folder / "keys" / "certificate.pem").unlink()
        raise
    (folder / BUNDLE).write_bytes(data)
    return bundle
