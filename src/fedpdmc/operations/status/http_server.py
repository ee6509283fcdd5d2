"""The status over HTTP: read-only, and safe to leave open in a browser.

Attackers: a web site that the operator visits and that points its own name at this address (the Host header must be an
address, ``localhost`` or the given name); a local user who holds connections open (their number and time are limited); a
contract with HTML in its names (all text is escaped, and the page may not load or run anything).
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import logging
import socket
import threading
import urllib.parse
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from fedpdmc.errors import InputError
from fedpdmc.federation.grpc.tls import split_address
from fedpdmc.operations.status.board import finite
from fedpdmc.operations.status.metrics import metrics
from fedpdmc.operations.status.status_page import page

logger = logging.getLogger("fedpdmc.operations.status")
# Connections at a time, and the total seconds for each.
MOST_CONNECTIONS, MOST_SECONDS = 16, 10.0
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
    "Connection": "close",
}


def _json(facts: dict[str, Any]) -> str:
    return json.dumps(facts, allow_nan=False) + "\n"


def _health(facts: dict[str, Any]) -> str:
    return "".join(["ok\n", *(f"stalled: {stall['for']}, {stall['seconds']:.0f} s\n" for stall in facts["stalls"])])


PAGES: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "/": ("text/html; charset=utf-8", page),
    "/status.json": ("application/json", _json),
    "/metrics": ("text/plain; version=0.0.4; charset=utf-8", metrics),
    "/healthz": ("text/plain; charset=utf-8", _health),
}


class _Handler(BaseHTTPRequestHandler):
    server_version, sys_version = "fedpdmc", ""
    timeout = MOST_SECONDS
    server: _Server

    def do_GET(self) -> None:
        """One of the pages."""
        if not self.server.known(self.headers.get("Host", "")):
            self._say(421, "text/plain", "This name is not served here.\n")
            return
        found = PAGES.get(self.path.partition("?")[0])
        if found is None:
            self._say(404, "text/plain", "There are /, /status.json, /metrics and /healthz.\n")
            return
        kind, make = found
        self._say(200, kind, make(finite(self.server.facts())))

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer any other request in one line that repeats nothing of it."""
        self._say(
            405 if code == 501 else code, "text/plain", "Only GET is supported.\n" if code == 501 else "bad request\n"
        )

    def _say(self, code: int, kind: str, text: str) -> None:
        data = text.encode("utf-8", "replace")
        self.send_response(code)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        if code == 405:
            self.send_header("Allow", "GET")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: a browser that refreshes would fill the log."""


class _Server(HTTPServer):
    # The port is free again right after a restart.
    allow_reuse_address = True
    request_queue_size = MOST_CONNECTIONS

    def __init__(self, host: str, port: int, facts: Callable[[], dict[str, Any]]):
        self.facts, self._name = facts, host
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._places = threading.BoundedSemaphore(MOST_CONNECTIONS)
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        """Bind without the library's look-up of this host's name."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = self._name, self.server_address[1]

    def known(self, host: str) -> bool:
        """Whether a Host header is an address or our own name, and not a name that others control."""
        try:
            bare = urllib.parse.urlsplit(f"//{host}").hostname or ""
            return bare in ("localhost", self._name.lower()) or bool(ipaddress.ip_address(bare))
        except ValueError:
            return False

    def process_request(self, request: Any, client_address: Any) -> None:
        """Handle a request in its own thread, if there are not too many."""
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        threading.Thread(
            target=self._handle, args=(request, client_address), name="fedpdmc-status", daemon=True
        ).start()

    def _handle(self, request: Any, client_address: Any) -> None:
        timeout = threading.Timer(MOST_SECONDS, _shut_down, (request,))
        timeout.daemon = True
        timeout.start()
        try:
            self.finish_request(request, client_address)
        except OSError as error:
            logger.debug("a reader of the status has disconnected: %s", error)
        except Exception:  # noqa: BLE001
            logger.exception("the status could not be shown")
        finally:
            timeout.cancel()
            self.shutdown_request(request)
            self._places.release()


def _shut_down(request: socket.socket) -> None:
    with contextlib.suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)


class StatusServer:
    """The status of a party on one address.

    Parameters
    ----------
    address : str
        ``host:port``; port 0 takes a free one.
    facts : callable
        What `fedpdmc.operations.status.watch.Watch.facts` returns.
    """

    def __init__(self, address: str, facts: Callable[[], dict[str, Any]]):
        host, port = split_address(address, "status")
        bare = host.strip("[]")
        try:
            self._server = _Server(bare, port, facts)
        except OSError as error:
            found = f"{address}, which cannot be bound: {error}"
            raise InputError("status", found, "Give a free address of this host, such as 127.0.0.1:8080.") from error
        shown = f"[{bare}]" if ":" in bare else bare
        self.address = f"http://{shown}:{self._server.server_port}/"
        local = bare == "localhost" or _is_loopback(bare)
        if not local:
            logger.warning(
                "the status page at %s has no TLS and no password: anyone who reaches it can read it", self.address
            )
        logger.info("the status page is at %s", self.address)
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.2}, name="fedpdmc-status", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
