"""What someone on the network can do to a coordinator without a certificate, with real sockets."""

import contextlib
import socket
import ssl
import threading
import time


def _context():
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    return context


def dial(address, source="127.0.0.1", seconds=5.0):
    """A TCP connection from an address of this machine."""
    host, port = address.rsplit(":", 1)
    return socket.create_connection((host, int(port)), seconds, (source, 0))


def handshake(address, source="127.0.0.1"):
    """One TLS handshake without a certificate; whether the server answered it."""
    try:
        with dial(address, source) as plain, _context().wrap_socket(plain) as secure:
            secure.settimeout(5.0)
            secure.recv(1)
        return True
    except ssl.SSLError:
        # The server asked for a certificate and has hung up: it lives.
        return True
    except OSError:
        return False


class Flood:
    """Handshakes without a certificate, one after the other in several threads, until the block ends."""

    def __init__(self, address, threads=2, source="127.0.0.2"):
        self.address, self.source, self.tried, self.answered = address, source, 0, 0
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._go, daemon=True) for _ in range(threads)]

    def _go(self):
        while not self._stop.is_set():
            self.answered += handshake(self.address, self.source)
            self.tried += 1

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        for thread in self._threads:
            thread.join(20)


@contextlib.contextmanager
def idle_connections(address, count, source="127.0.0.2"):
    """Connections on which nothing is ever said; those that the other side has closed stay in the list."""
    held = []
    try:
        for _ in range(count):
            with contextlib.suppress(OSError):
                held.append(dial(address, source, 1.0))
        yield held
    finally:
        for one in held:
            one.close()


def still_open(connections):
    """How many of them the other side has not closed."""
    count = 0
    for one in connections:
        one.setblocking(False)
        try:
            count += one.recv(1, socket.MSG_PEEK) != b""
        except BlockingIOError:
            count += 1
        except OSError:
            pass
    return count


def wait_until(ready, seconds=60.0):
    """Wait until something is so; returns whether it came to be."""
    end = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True
