"""What must be right before a party takes part in a study, looked at one by one: nothing joins and nothing is released."""

from __future__ import annotations

import datetime
import http.client
import os
import shutil
import socket
import ssl
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.exceptions import InvalidSignature

from fedpdmc._jax.precision import double_precision
from fedpdmc.certificates.keys import COORDINATOR, Credentials, certificate_name, read_credentials
from fedpdmc.errors import FedPDMCError, InputError, Refused
from fedpdmc.federation import messages
from fedpdmc.federation.grpc.tls import check_loopback, check_party, split_address
from fedpdmc.federation.site_agent import versions
from fedpdmc.federation.site_agent.agent import SOFTWARE
from fedpdmc.federation.site_agent.audit_log import Kind, read_log
from fedpdmc.federation.site_agent.secrets import refuse_links
from fedpdmc.study import Study, read_policy, read_study
from fedpdmc.study.read_data import check_cells, site_records

# Seconds for one step on the network, and seconds by which two clocks may differ.
PATIENCE, MOST_SKEW = 15.0, 60.0
# A certificate that ends within so many days is spoken of.
SOON = 14
# What a store should have room for at the least.
LEAST_ROOM = 2**30
REFUSALS = {
    "OTHER_CONTRACT": "Compare `sha256sum study.toml` with the coordinator's: the files differ.",
    "UNKNOWN_SITE": "The coordinator's contract has no site of the name in this certificate.",
    "NAME_NOT_IN_CERTIFICATE": "Give --name as it is in the certificate.",
    "REVOKED": "The coordinator has shut this certificate out: ask for a new one.",
}


class Finding(NamedTuple):
    """One thing that was looked at: what, whether it is good (None: could not be looked at), and what was found."""

    what: str
    good: bool | None
    words: str

    def __str__(self) -> str:
        mark = {True: "ok", False: "FAIL", None: "--"}[self.good]
        return f"{mark:<5}{self.what}: {self.words}"


class Step(NamedTuple):
    """A look at one thing, which returns what it found or raises; ``needs`` are the steps that must have gone well."""

    what: str
    look: Callable[[], str]
    needs: tuple[str, ...] = ()


def look(steps: Sequence[Step]) -> list[Finding]:
    """Take the steps in order; what fails does not stop those that do not need it."""
    findings, good = [], set()
    for what, work, needs in steps:
        missing = [need for need in needs if need not in good]
        if missing:
            findings.append(Finding(what, None, f"not looked at, because of: {', '.join(missing)}"))
            continue
        try:
            findings.append(Finding(what, True, work()))
            good.add(what)
        except (FedPDMCError, OSError, ValueError) as error:
            findings.append(Finding(what, False, str(error)))
    return findings


class SiteCheck:
    """What a site needs. The parameters are those of `serve_site`, with paths of contract and policy."""

    def __init__(
        self,
        study: Path,
        name: str,
        source: str | Path,
        *,
        coordinator: str,
        keys: Path | None,
        store: Path,
        policy: Path,
        query: str | None = None,
        ledger: Path | None = None,
        server_name: str = COORDINATOR,
    ):
        self.path, self.name, self.source, self.query = study, name, source, query
        self.address, self.keys, self.server_name = coordinator, keys, server_name
        self.store, self.policy_path, self.ledger_path = store, policy, ledger
        self.study: Study
        self.credentials: Credentials | None = None
        self.shown, self.skew, self.doubt, self.other = b"", 0.0, 0.0, ""

    def findings(self) -> list[Finding]:
        """Everything, in the order in which it is best mended."""
        return look(
            [
                Step("contract", self._contract),
                Step("data", self._data, ("contract",)),
                Step("policy", self._policy, ("contract", "data")),
                Step("ledger", self._ledger, ("contract", "policy")),
                Step("certificate", self._certificate),
                Step("address", self._address),
                Step("TLS", self._tls, ("certificate", "address")),
                Step("coordinator's certificate", self._other_certificate, ("TLS",)),
                Step("coordinator", self._inquiry, ("contract", "TLS")),
                Step("clock", self._clock, ("coordinator",)),
                Step("versions", self._versions, ("coordinator",)),
                Step("store", self._store, ("contract",)),
                Step("disk", lambda: disk(self.store)),
            ]
        )

    def _contract(self) -> str:
        self.study = read_study(self.path)
        if self.name not in self.study.sites:
            raise InputError(
                "name", repr(self.name), f"Give one of the contract's sites: {', '.join(self.study.sites)}."
            )
        return f"{self.study.name!r}, SHA-256 {self.study.digest.hex()}"

    @double_precision
    def _data(self) -> str:
        self.records = site_records(self.study, self.name, self.source, self.query)
        self.study.potential(self.records, self.name)
        return f"{len(self.records):,} records with the columns that the contract declares"

    def _policy(self) -> str:
        self.policy = read_policy(self.policy_path)
        self.policy.check(self.name, self.study, len(self.records))
        if self.study.epsilon is None:
            check_cells(self.study, self.records, self.policy.least_cell)
        return "allows this contract with these records"

    def _ledger(self) -> str:
        terms = dict(self.policy.terms)
        if self.policy.total is not None:
            terms["granted"] = (self.study.epsilon, self.study.delta)
        budget = self.study.budget(self.ledger_path, self.name, **terms)
        if budget is None:
            return "not needed: the contract has no privacy budget"
        ledger, wanted = budget.find()
        try:
            if wanted.dataset not in ledger.datasets:
                return f"{ledger.path}: whole; the account {wanted.dataset!r} is opened when the site starts"
            account = ledger.account(wanted)
            limit, spent = budget.study_limit(account), ledger.spent(wanted.dataset, budget.study)
            return f"{ledger.path}: whole; this study has spent {100 * spent / limit:.3g} % of what it may"
        finally:
            ledger.close()

    def _certificate(self) -> str:
        if self.keys is None:
            check_loopback(split_address(self.address, "coordinator")[0], "coordinator")
            return "none: a plain connection on this machine"
        self.credentials = read_credentials(self.keys)
        check_party(self.credentials, self.name)
        return issued(self.credentials)

    def _address(self) -> str:
        with dialled(self.address):
            return f"{self.address} answers"

    def _tls(self) -> str:
        if self.credentials is None:
            return "none: a plain connection on this machine"
        self.shown, version = handshake(self.address, self.credentials, self.server_name)
        return f"{version}; both sides take each other's certificate"

    def _other_certificate(self) -> str:
        return dates(self.shown) if self.shown else "none: a plain connection on this machine"

    def _inquiry(self) -> str:
        from fedpdmc.federation.grpc.transport import inquire

        hello = messages.encode(messages.Hello(self.name, self.study.digest, SOFTWARE))
        began = time.time()
        told = inquire(self.address, self.credentials, hello, self.server_name, PATIENCE)
        ended = time.time()
        if isinstance(told, messages.Refusal):
            raise Refused(self.name, told.code, REFUSALS.get(told.code, "Ask whoever runs the coordinator."))
        if not isinstance(told, messages.Checked):
            raise InputError("coordinator", f"a {type(told).__name__}", "Ask whoever runs the coordinator.")
        self.skew, self.doubt, self.other = told.clock - (began + ended) / 2, (ended - began) / 2, told.software
        return "has the same contract and would let this site join"

    def _clock(self) -> str:
        if abs(self.skew) - self.doubt > MOST_SKEW:
            way = "ahead of" if self.skew > 0 else "behind"
            raise InputError(
                "clock",
                f"the coordinator's is {abs(self.skew):.0f} s {way} this one",
                "Have both set by a time server (timedatectl set-ntp true): certificates and seals depend on them.",
            )
        return f"within {abs(self.skew) + self.doubt:.1f} s of the coordinator's"

    def _versions(self) -> str:
        if self.other != SOFTWARE:
            found = f"{SOFTWARE} here, {self.other} at the coordinator"
            raise InputError("versions", found, "Install the same version everywhere (constraints.txt).")
        return installed()

    def _store(self) -> str:
        if not (refuse_links(self.store) / "audit.log").exists():
            return f"{self.store}: new"
        entries = list(read_log(self.store))
        for note in (entry.note for entry in entries if entry.kind is Kind.NOTE):
            if note["event"] == "joined" and (note["study"], note["site"]) != (self.study.digest.hex(), self.name):
                found = "the log of another contract or site"
                raise InputError("store", found, "Give every site and study a store of its own.")
        changed = versions.differences(entries)
        said = f"; it was written with {', '.join(changed)}: the last bits may differ" if changed else ""
        return f"{self.store}: a log of {len(entries):,} entries, whole{said}"


class CoordinatorCheck:
    """What a coordinator needs: contract, address to listen on, folder of keys (None: plain) and store."""

    def __init__(self, study: Path, *, listen: str, keys: Path | None, store: Path):
        self.path, self.listen, self.keys, self.store = study, listen, keys, store
        self.study: Study
        self.credentials: Credentials | None = None

    def findings(self) -> list[Finding]:
        """Everything, in the order in which it is best mended."""
        return look(
            [
                Step("contract", self._contract),
                Step("certificate", self._certificate),
                Step("address", self._address),
                Step("TLS", self._tls, ("certificate", "address")),
                Step("clock", self._clock, ("certificate",)),
                Step("versions", installed),
                Step("store", self._store, ("contract",)),
                Step("disk", lambda: disk(self.store)),
            ]
        )

    def _contract(self) -> str:
        self.study = read_study(self.path)
        sites = ", ".join(self.study.sites)
        return f"{self.study.name!r}, sites {sites}, SHA-256 {self.study.digest.hex()}"

    def _certificate(self) -> str:
        if self.keys is None:
            check_loopback(split_address(self.listen, "listen")[0], "listen")
            return "none: plain connections on this machine"
        self.credentials = read_credentials(self.keys)
        check_party(self.credentials, COORDINATOR)
        return issued(self.credentials)

    def _address(self) -> str:
        with listening(self.listen):
            return f"{self.listen} is free to listen on"

    def _tls(self) -> str:
        if self.credentials is None:
            return "none: plain connections on this machine"
        with listening(self.listen) as server:
            host, port = server.getsockname()[:2]
            thread = threading.Thread(target=_serve_once, args=(server, self.credentials), daemon=True)
            thread.start()
            own = certificate_name(self.credentials.certificate)
            host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
            _, version = handshake(f"{host}:{port}", self.credentials, own, mutual=False)
            thread.join(PATIENCE)
        return f"{version}; a site that has authority.pem takes the certificate for that of {own!r}"

    def _clock(self) -> str:
        now = datetime.datetime.now(datetime.UTC).isoformat(sep=" ", timespec="seconds")
        return f"{now}; a site that checks compares its own with it"

    def _store(self) -> str:
        from fedpdmc.federation.checkpoint import Checkpoint

        saved = Checkpoint(self.store).read() if self.store.exists() else None
        if saved is None:
            return f"{self.store}: new"
        if saved.facts["study"] != self.study.digest.hex():
            raise InputError("store", "the run of another contract", "Give every study a store of its own.")
        return f"{self.store}: a run, whole, which goes on from its last block"


def installed() -> str:
    """With what answers and paths are made here."""
    return ", ".join(f"{name} {value}" for name, value in versions.present().items())


def disk(store: Path) -> str:
    """Room where a store is, or is to be."""
    folder = next(path for path in (store.absolute(), *store.absolute().parents) if path.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise InputError("store", f"{folder}, which cannot be written", "Give a folder of the user that runs this.")
    free = shutil.disk_usage(folder).free
    if free < LEAST_ROOM:
        raise InputError("store", f"{free / 2**20:.0f} MiB free at {folder}", "Make room: at least 1 GiB.")
    return f"{free / 2**30:.1f} GiB free at {folder}"


def issued(credentials: Credentials) -> str:
    """Whose certificate it is and until when, if the authority beside it has made it."""
    own, root = (x509.load_pem_x509_certificate(pem) for pem in (credentials.certificate, credentials.authority))
    try:
        own.verify_directly_issued_by(root)
    except (ValueError, TypeError, InvalidSignature) as error:
        found = "a certificate that the authority.pem beside it has not signed"
        raise InputError("keys", found, "Put both files there as the study's authority sent them.") from error
    if credentials.revoked is not None and credentials.certificate in credentials.revoked:
        raise InputError("keys", "a certificate that this party's own revoked.txt names", "Ask for a new one.")
    authority = dates(credentials.authority)
    return f"{certificate_name(credentials.certificate)!r}, {dates(credentials.certificate)}; authority {authority}"


def dates(certificate: bytes) -> str:
    """From when to when a certificate is good, if it is now."""
    found, now = x509.load_pem_x509_certificate(certificate), datetime.datetime.now(datetime.UTC)
    first, last = found.not_valid_before_utc, found.not_valid_after_utc
    name = certificate_name(certificate)
    if now < first:
        raise InputError(
            f"certificate of {name!r}",
            f"good from {first:%Y-%m-%d %H:%M} UTC only",
            "Set this machine's clock, or wait.",
        )
    if now > last:
        raise InputError(
            f"certificate of {name!r}",
            f"expired at {last:%Y-%m-%d %H:%M} UTC",
            "Put a renewed one into its folder of keys.",
        )
    soon = f" ({(last - now).days} days: renew it soon)" if last - now < datetime.timedelta(days=SOON) else ""
    return f"good until {last:%Y-%m-%d %H:%M} UTC{soon}"


@contextmanager
def dialled(address: str) -> Iterator[socket.socket]:
    """A connection to an address, through the proxy that the environment names for it, as gRPC does it."""
    host, port = split_address(address, "coordinator")
    proxy = None if urllib.request.proxy_bypass(host) else urllib.request.getproxies().get("https")
    try:
        if proxy is None:
            own = socket.create_connection((host.strip("[]"), port), PATIENCE)
        else:
            own = _tunnelled(proxy, host, port)
    except OSError as error:
        way = "" if proxy is None else " through the proxy of https_proxy"
        remedy = "Look at address, firewall and whether the coordinator runs."
        raise InputError("coordinator", f"{address} cannot be reached{way}: {error}", remedy) from error
    with own:
        yield own


def _tunnelled(proxy: str, host: str, port: int) -> socket.socket:
    parts = urllib.parse.urlsplit(proxy)
    if parts.hostname is None:
        raise OSError("https_proxy is no http:// address")
    connection = http.client.HTTPConnection(parts.hostname, parts.port or 80, timeout=PATIENCE)
    headers = {}
    if parts.username is not None:
        import base64

        user = f"{urllib.parse.unquote(parts.username)}:{urllib.parse.unquote(parts.password or '')}"
        headers = {"Proxy-Authorization": "Basic " + base64.b64encode(user.encode()).decode()}
    connection.set_tunnel(host, port, headers)
    connection.connect()
    assert connection.sock is not None
    return connection.sock


def handshake(
    address: str, credentials: Credentials, server_name: str, mutual: bool = True
) -> tuple[bytes, str | None]:
    """The certificate that is shown at an address, in PEM, and the version of TLS, if both sides take each other's."""
    context = ssl.create_default_context(cadata=credentials.authority.decode())
    # As gRPC has it: an institution's authority need not have all that newer versions of Python ask for.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    context.set_alpn_protocols(["h2"])
    if mutual:
        _load(context, credentials)
    with dialled(address) as raw:
        try:
            with context.wrap_socket(raw, server_hostname=server_name) as tls:
                # Under TLS 1.3 the other side looks at our certificate after our side is done: its first byte tells.
                if not tls.recv(1):
                    raise ssl.SSLError("the connection was closed")
                return ssl.DER_cert_to_PEM_cert(tls.getpeercert(True) or b"").encode(), tls.version()
        except ssl.SSLCertVerificationError as error:
            remedy = (
                "Its certificate must be renewed there, and this machine's clock be right."
                if "expired" in error.verify_message or "not yet" in error.verify_message
                else f"It must be signed by this party's authority.pem and name {server_name!r} (--server-name)."
            )
            raise InputError("TLS", f"the coordinator's certificate: {error.verify_message}", remedy) from error
        except OSError as error:
            reason = getattr(error, "reason", None) or error
            remedy = (
                "The coordinator does not take this certificate, or is no coordinator: compare authority.pem, dates."
            )
            raise InputError("TLS", f"no handshake with {address}: {reason}", remedy) from error


def _load(context: ssl.SSLContext, credentials: Credentials) -> None:
    assert credentials.folder is not None
    context.load_cert_chain(credentials.folder / "certificate.pem", credentials.folder / "key.pem")


@contextmanager
def listening(address: str) -> Iterator[socket.socket]:
    """The address that a coordinator is to listen on, bound for a moment."""
    host, port = split_address(address, "listen")
    bare = host.strip("[]")
    try:
        family = socket.AF_INET6 if ":" in bare else socket.AF_INET
        server = socket.create_server((bare, port), family=family)
    except OSError as error:
        remedy = "Give a free address of this host; a coordinator that runs already has it: stop that one first."
        raise InputError("listen", f"{address} cannot be bound: {error}", remedy) from error
    with server:
        server.settimeout(PATIENCE)
        yield server


def _serve_once(server: socket.socket, credentials: Credentials) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        _load(context, credentials)
        raw, _ = server.accept()
        raw.settimeout(PATIENCE)
        with context.wrap_socket(raw, server_side=True) as tls:
            tls.sendall(b"\0")
            tls.recv(1)
    except OSError:
        # The other side says what went wrong.
        return
