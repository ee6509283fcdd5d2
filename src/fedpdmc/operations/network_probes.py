"""Probes of the network before a run: dial an address, bind one, and make a TLS handshake as gRPC would."""

from __future__ import annotations

import base64
import http.client
import socket
import ssl
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

from fedpdmc.certificates.keys import Credentials, certificate_name
from fedpdmc.errors import InputError
from fedpdmc.federation.grpc.tls import split_address

# Seconds allowed for one step on the network.
TIMEOUT = 15.0


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
