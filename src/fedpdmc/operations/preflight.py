"""``--check``: everything that a party needs for a study, checked step by step. Nothing joins and nothing is released."""

from __future__ import annotations

import abc
import base64
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

from cryptography.exceptions import InvalidSignature

from fedpdmc._jax.precision import double_precision
from fedpdmc.certificates import COORDINATOR, Credentials, certificate_name, read_certificate, read_credentials
from fedpdmc.errors import FedPDMCError, InputError, Refused
from fedpdmc.federation import messages
from fedpdmc.federation.grpc.tls import check_loopback, check_party, split_address
from fedpdmc.federation.site_agent import audit_log
from fedpdmc.federation.site_agent.agent import SOFTWARE
from fedpdmc.federation.site_agent.audit_log import Kind, read_log, refuse_links
from fedpdmc.federation.site_agent.start import admit
from fedpdmc.study import Study, read_policy, read_study
from fedpdmc.study.description import choice
from fedpdmc.study.read_data import site_records

MOST_SKEW = 60.0  # seconds by which the clocks of two machines may differ
EXPIRES_SOON = 14  # a certificate that expires within this number of days gets a remark
# Free bytes that a store should have.
LEAST_ROOM = 2**30
PLAIN = "none: plain connection on this machine"
REFUSALS = {
    "OTHER_CONTRACT": "Compare `sha256sum study.toml` with the coordinator's: the files differ.",
    "UNKNOWN_SITE": "The coordinator's contract has no site with the name in this certificate.",
    "NAME_NOT_IN_CERTIFICATE": "Give --name as it is in the certificate.",
    "REVOKED": "The coordinator has revoked this certificate. Ask for a new one.",
}


class Finding(NamedTuple):
    """The result of one check. ``good`` is None if it could not be made."""

    what: str
    good: bool | None
    words: str

    def __str__(self) -> str:
        mark = {True: "ok", False: "FAIL", None: "--"}[self.good]
        return f"{mark:<5}{self.what}: {self.words}"


class PreflightStep(NamedTuple):
    """One check: ``check()`` returns what it found, or raises. ``needs`` names the steps that must have succeeded."""

    what: str
    check: Callable[[], str]
    needs: tuple[str, ...] = ()


def run_steps(steps: Sequence[PreflightStep]) -> list[Finding]:
    """Run the steps in order. A failure does not stop steps that do not depend on it."""
    findings, good = [], set()
    for what, check, needs in steps:
        missing = [need for need in needs if need not in good]
        if missing:
            findings.append(Finding(what, None, f"not checked, because of: {', '.join(missing)}"))
            continue
        try:
            findings.append(Finding(what, True, check()))
            good.add(what)
        except (FedPDMCError, OSError, ValueError) as error:
            findings.append(Finding(what, False, str(error)))
    return findings


class Check(abc.ABC):
    """The checks of one party of a study.

    Parameters
    ----------
    study : Path
        The contract.
    name : str
        The party: a site's name, or ``coordinator``.
    address : str
        ``host:port``: where the party dials or listens.
    argument : str
        What the user calls this address.
    keys : Path or None
        The party's folder of keys; None for plain connections on this machine.
    """

    def __init__(self, study: Path, name: str, address: str, argument: str, keys: Path | None, store: Path):
        self.path, self.name, self.address, self.keys, self.store = study, name, address, keys, store
        self._argument = argument
        self.study: Study
        self.credentials: Credentials | None = None

    @abc.abstractmethod
    def steps(self) -> list[PreflightStep]:
        """The checks, in the order in which problems are best fixed."""

    def findings(self) -> list[Finding]:
        """The results of all checks."""
        return run_steps(self.steps())

    def _certificate(self) -> str:
        if self.keys is None:
            check_loopback(split_address(self.address, self._argument)[0], self._argument)
            return PLAIN
        self.credentials = read_credentials(self.keys)
        check_party(self.credentials, self.name)
        return describe_certificate(self.credentials)

    def _disk(self) -> str:
        store = self.store.absolute()
        folder = next(path for path in (store, *store.parents) if path.exists())
        if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
            raise InputError("store", f"{folder}, which is not writable", "Give a folder that this user can write to.")
        free = shutil.disk_usage(folder).free
        if free < LEAST_ROOM:
            raise InputError("store", f"{free / 2**20:.0f} MiB free at {folder}", "Free at least 1 GiB.")
        return f"{free / 2**30:.1f} GiB free at {folder}"


class SiteCheck(Check):
    """The checks of a site. The parameters are those of `serve_site`, with the paths of contract and policy."""

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
        super().__init__(study, name, coordinator, "coordinator", keys, store)
        self.source, self.query, self.server_name = source, query, server_name
        self.policy_path, self.ledger_path = policy, ledger
        # Filled by the step "coordinator": its certificate, clock difference with its error, and software.
        self.shown, self.skew, self.skew_error, self.other = b"", 0.0, 0.0, ""

    def steps(self) -> list[PreflightStep]:
        """Local files first, then the network."""
        return [
            PreflightStep("contract", self._contract),
            PreflightStep("data", self._data, ("contract",)),
            PreflightStep("policy", self._policy, ("contract", "data")),
            PreflightStep("ledger", self._ledger, ("contract", "policy")),
            PreflightStep("certificate", self._certificate),
            PreflightStep("address", self._address),
            PreflightStep("TLS", self._tls, ("certificate", "address")),
            PreflightStep("coordinator's certificate", lambda: validity(self.shown) if self.shown else PLAIN, ("TLS",)),
            PreflightStep("coordinator", self._coordinator, ("contract", "TLS")),
            PreflightStep("clock", self._clock, ("coordinator",)),
            PreflightStep("versions", self._versions, ("coordinator",)),
            PreflightStep("store", self._store, ("contract",)),
            PreflightStep("disk", self._disk),
        ]

    def _contract(self) -> str:
        self.study = read_study(self.path)
        if self.name not in self.study.sites:
            remedy = f"Give one of the contract's sites: {', '.join(self.study.sites)}."
            raise InputError("name", repr(self.name), remedy)
        return f"{self.study.name!r}, SHA-256 {self.study.digest.hex()}"

    @double_precision
    def _data(self) -> str:
        self.records = site_records(self.study, self.name, self.source, self.query)
        self.study.potential(self.records, self.name)
        return f"{len(self.records):,} records with the columns that the contract declares"

    def _policy(self) -> str:
        self.policy = read_policy(self.policy_path)
        records = site_records(self.study, self.name, self.source, self.query, self.policy.record_id)
        information = admit(self.study, self.name, records, self.policy, self.ledger_path)[1]
        outlook = information.outlook(len(self.study.names))
        return "; ".join(["allows this contract with these records"] + [outlook] * bool(outlook))

    def _ledger(self) -> str:
        budget = self.study.budget(self.ledger_path, self.name, **self.policy.budget_terms(self.study))
        if budget is None:
            return "not needed: the contract has no privacy budget"
        ledger, dataset = budget.find(), budget.account_name
        try:
            if dataset not in ledger.datasets:
                return f"{ledger.path}: intact; account {dataset!r} will be opened when the site starts"
            account = budget.open()[1]
            limit = budget.study_limit(account, self.study.one_shot and not self.study.release)
            spent = ledger.spent(dataset, budget.study)
            return f"{ledger.path}: intact; this study has spent {100 * spent / limit:.3g} % of its budget"
        finally:
            ledger.close()

    def _address(self) -> str:
        with dial(self.address):
            return f"{self.address} answers"

    def _tls(self) -> str:
        if self.credentials is None:
            return PLAIN
        self.shown, version = handshake(self.address, self.credentials, self.server_name)
        return f"{version}; both sides accept each other's certificate"

    def _coordinator(self) -> str:
        from fedpdmc.federation.grpc.client import inquire

        hello = messages.encode(messages.Hello(self.name, self.study.digest, SOFTWARE))
        began = time.time()
        answer = inquire(self.address, self.credentials, hello, self.server_name, TIMEOUT)
        ended = time.time()
        ask = "Ask the operator of the coordinator."
        if isinstance(answer, messages.Refusal):
            raise Refused(self.name, answer.code, REFUSALS.get(answer.code, ask))
        if not isinstance(answer, messages.Checked):
            raise InputError("coordinator", f"a {type(answer).__name__} message", ask)
        self.skew, self.skew_error = answer.clock - (began + ended) / 2, (ended - began) / 2
        self.other = answer.software
        return "has the same contract and would admit this site"

    def _clock(self) -> str:
        if abs(self.skew) - self.skew_error > MOST_SKEW:
            way = "ahead of" if self.skew > 0 else "behind"
            raise InputError(
                "clock",
                f"the coordinator's is {abs(self.skew):.0f} s {way} this one",
                "Set both clocks from a time server (timedatectl set-ntp true): certificates and seals depend on them.",
            )
        return f"within {abs(self.skew) + self.skew_error:.1f} s of the coordinator's"

    def _versions(self) -> str:
        if self.other != SOFTWARE:
            found = f"{SOFTWARE} here, {self.other} at the coordinator"
            raise InputError("versions", found, "Install the same version everywhere (constraints.txt).")
        return installed_versions()

    def _store(self) -> str:
        if not (refuse_links(self.store) / "audit.log").exists():
            return f"{self.store}: new"
        entries = list(read_log(self.store))
        for note in (entry.note for entry in entries if entry.kind is Kind.NOTE):
            if note["event"] == "joined" and (note["study"], note["site"]) != (self.study.digest.hex(), self.name):
                found = "the log of another contract or site"
                raise InputError("store", found, "Give every site and study its own store.")
        changed = audit_log.software_differences(entries)
        note = f"; written with {', '.join(changed)}: the last bits may differ" if changed else ""
        return f"{self.store}: a log of {len(entries):,} entries, intact{note}"


class CoordinatorCheck(Check):
    """The checks of a coordinator: contract, address to listen on, folder of keys (None: plain) and store."""

    def __init__(self, study: Path, *, listen: str, keys: Path | None, store: Path):
        super().__init__(study, COORDINATOR, listen, "listen", keys, store)

    def steps(self) -> list[PreflightStep]:
        """Local files first, then the network."""
        return [
            PreflightStep("contract", self._contract),
            PreflightStep("certificate", self._certificate),
            PreflightStep("address", self._address),
            PreflightStep("TLS", self._tls, ("certificate", "address")),
            PreflightStep("clock", self._clock, ("certificate",)),
            PreflightStep("versions", installed_versions),
            PreflightStep("store", self._store, ("contract",)),
            PreflightStep("disk", self._disk),
        ]

    def _contract(self) -> str:
        self.study = read_study(self.path)
        sites = ", ".join(self.study.sites)
        words = f"{self.study.name!r}, sites {sites}, SHA-256 {self.study.digest.hex()}"
        return "; ".join([words, *choice(self.study)])

    def _address(self) -> str:
        with bind(self.address):
            return f"{self.address} is free to listen on"

    def _tls(self) -> str:
        if self.credentials is None:
            return PLAIN
        version = handshake_with_self(self.address, self.credentials)
        own = certificate_name(self.credentials.certificate)
        return f"{version}; a site with authority.pem accepts this certificate as {own!r}"

    def _clock(self) -> str:
        now = datetime.datetime.now(datetime.UTC).isoformat(sep=" ", timespec="seconds")
        return f"{now}; `fedpdmc site --check` compares a site's clock with it"

    def _store(self) -> str:
        from fedpdmc.federation.coordinator_store import Checkpoint

        saved = Checkpoint(self.store).read() if self.store.exists() else None
        if saved is None:
            return f"{self.store}: new"
        if saved.facts["study"] != self.study.digest.hex():
            raise InputError("store", "the run of another contract", "Give every study its own store.")
        return f"{self.store}: an intact run, which resumes from its last block"


def installed_versions() -> str:
    """The software and machine that compute answers here."""
    return ", ".join(f"{name} {value}" for name, value in audit_log.software_here().items())


def describe_certificate(credentials: Credentials) -> str:
    """Name and validity of a party's certificate, if the authority in the same folder has signed it."""
    own, root = (read_certificate(pem) for pem in (credentials.certificate, credentials.authority))
    try:
        own.verify_directly_issued_by(root)
    except (ValueError, TypeError, InvalidSignature) as error:
        found = "a certificate that is not signed by the authority.pem in the same folder"
        raise InputError("keys", found, "Use both files as the study's authority sent them.") from error
    if credentials.revoked is not None and credentials.certificate in credentials.revoked:
        raise InputError("keys", "a certificate that is in this party's own revoked.txt", "Ask for a new one.")
    authority = validity(credentials.authority)
    return f"{certificate_name(credentials.certificate)!r}, {validity(credentials.certificate)}; authority {authority}"


def validity(certificate: bytes) -> str:
    """Until when a certificate is valid, if it is valid now."""
    found, now = read_certificate(certificate), datetime.datetime.now(datetime.UTC)
    first, last = found.not_valid_before_utc, found.not_valid_after_utc
    which = f"certificate of {certificate_name(certificate)!r}"
    if now < first:
        remedy = "Set this machine's clock, or wait."
        raise InputError(which, f"not valid before {first:%Y-%m-%d %H:%M} UTC", remedy)
    if now > last:
        remedy = "Put a renewed one into the folder of keys."
        raise InputError(which, f"expired at {last:%Y-%m-%d %H:%M} UTC", remedy)
    soon = f" ({(last - now).days} days: renew it soon)" if last - now < datetime.timedelta(days=EXPIRES_SOON) else ""
    return f"valid until {last:%Y-%m-%d %H:%M} UTC{soon}"


TIMEOUT = 15.0  # seconds allowed for one step on the network


@contextmanager
def dial(address: str) -> Iterator[socket.socket]:
    """A connection to an address, through the proxy that the environment names for it, as gRPC does."""
    host, port = split_address(address, "coordinator")
    proxy = None if urllib.request.proxy_bypass(host) else urllib.request.getproxies().get("https")
    try:
        if proxy is None:
            connection = socket.create_connection((host.strip("[]"), port), TIMEOUT)
        else:
            connection = _dial_through_proxy(proxy, host, port)
    except OSError as error:
        way = "" if proxy is None else " through the proxy in https_proxy"
        remedy = "Check the address, the firewall, and that the coordinator is running."
        raise InputError("coordinator", f"{address} cannot be reached{way}: {error}", remedy) from error
    with connection:
        yield connection


def _dial_through_proxy(proxy: str, host: str, port: int) -> socket.socket:
    parts = urllib.parse.urlsplit(proxy)
    if parts.hostname is None:
        raise OSError("https_proxy is not an http:// address")
    connection = http.client.HTTPConnection(parts.hostname, parts.port or 80, timeout=TIMEOUT)
    headers = {}
    if parts.username is not None:
        user = f"{urllib.parse.unquote(parts.username)}:{urllib.parse.unquote(parts.password or '')}"
        headers = {"Proxy-Authorization": "Basic " + base64.b64encode(user.encode()).decode()}
    connection.set_tunnel(host, port, headers)
    connection.connect()
    assert connection.sock is not None
    return connection.sock


def handshake(
    address: str, credentials: Credentials, server_name: str, mutual: bool = True
) -> tuple[bytes, str | None]:
    """The server's certificate in PEM and the TLS version, if both sides accept each other's certificate."""
    context = ssl.create_default_context(cadata=credentials.authority.decode())
    # As gRPC does: an institution's authority need not have all extensions that newer versions of Python require.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    context.set_alpn_protocols(["h2"])
    if mutual:
        _load_certificate(context, credentials)
    with dial(address) as raw:
        try:
            with context.wrap_socket(raw, server_hostname=server_name) as tls:
                # Under TLS 1.3 the server checks our certificate after our side has finished. Its first byte shows the
                # result.
                if not tls.recv(1):
                    raise ssl.SSLError("the connection was closed")
                return ssl.DER_cert_to_PEM_cert(tls.getpeercert(True) or b"").encode(), tls.version()
        except ssl.SSLCertVerificationError as error:
            remedy = (
                "The coordinator must renew its certificate. Also check this machine's clock."
                if "expired" in error.verify_message or "not yet" in error.verify_message
                else f"It must be signed by this party's authority.pem and name {server_name!r} (--server-name)."
            )
            raise InputError("TLS", f"the coordinator's certificate: {error.verify_message}", remedy) from error
        except OSError as error:
            reason = getattr(error, "reason", None) or error
            remedy = (
                "The coordinator does not accept this certificate, or this is not a coordinator. Compare authority.pem "
                "and the certificates' dates on both sides."
            )
            raise InputError("TLS", f"no handshake with {address}: {reason}", remedy) from error


def handshake_with_self(address: str, credentials: Credentials) -> str | None:
    """The TLS version of a handshake with ourselves, on the address that a coordinator is about to listen on."""
    with bind(address) as server:
        host, port = server.getsockname()[:2]
        thread = threading.Thread(target=_serve_one_connection, args=(server, credentials), daemon=True)
        thread.start()
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        own = certificate_name(credentials.certificate)
        _, version = handshake(f"{host}:{port}", credentials, own, mutual=False)
        thread.join(TIMEOUT)
    return version


@contextmanager
def bind(address: str) -> Iterator[socket.socket]:
    """A socket that listens on an address for a moment."""
    host, port = split_address(address, "listen")
    bare = host.strip("[]")
    try:
        family = socket.AF_INET6 if ":" in bare else socket.AF_INET
        server = socket.create_server((bare, port), family=family)
    except OSError as error:
        remedy = "Give a free address of this host. If a coordinator is already running there, stop it first."
        raise InputError("listen", f"{address} cannot be bound: {error}", remedy) from error
    with server:
        server.settimeout(TIMEOUT)
        yield server


def _serve_one_connection(server: socket.socket, credentials: Credentials) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        _load_certificate(context, credentials)
        raw, _ = server.accept()
        raw.settimeout(TIMEOUT)
        with context.wrap_socket(raw, server_side=True) as tls:
            tls.sendall(b"\0")
            tls.recv(1)
    except OSError:
        # The client reports what went wrong.
        return


def _load_certificate(context: ssl.SSLContext, credentials: Credentials) -> None:
    assert credentials.folder is not None
    context.load_cert_chain(credentials.folder / "certificate.pem", credentials.folder / "key.pem")
