"""A TCP proxy that delays what passes, swaps pieces of it, and cuts connections, in the middle of a message if need be."""

import contextlib
import socket
import threading
import time


class Proxy:
    """Listens on loopback and passes bytes on to ``target``.

    Parameters
    ----------
    target : str
        ``host:port``.
    delay : float
        Seconds by which every piece is late.
    cut_after : int or None
        Bytes from the site after which its connection is cut: what was under way arrives truncated.
    swap_after : int or None
        Bytes from the site after which two pieces arrive in the wrong order: TLS ends the connection.
    host : str
        Where to listen.
    """

    def __init__(self, target, delay=0.0, cut_after=None, swap_after=None, host="127.0.0.1"):
        there, port = target.rsplit(":", 1)
        self.target, self.delay, self.cut_after = (there, int(port)), delay, cut_after
        self.cuts = self.swaps = 0
        self.swap_after, self._accepted = swap_after, 0
        self._server = socket.create_server((host, 0))
        self.address = f"{host}:{self._server.getsockname()[1]}"
        self._open, self._lock = [], threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._server.close()
        with self._lock:
            for one in self._open:
                one.close()

    def cut(self):
        """Cut every connection now."""
        with self._lock:
            for one in self._open:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)

    def _accept(self):
        while True:
            try:
                site, _ = self._server.accept()
            except OSError:
                return
            self._connected(site)

    def _connected(self, site):
        try:
            coordinator = socket.create_connection(self.target, 5)
            coordinator.settimeout(None)
        except OSError:
            site.close()
            return
        # Connections fare badly in turn: cut, swapped, cut, ...
        self._accepted += 1
        cut, swap = self.cut_after, None
        if self.swap_after is not None and self._accepted % 2 == 0:
            cut, swap = None, self.swap_after
        self._join(site, coordinator, cut, swap)

    def _join(self, site, coordinator, cut=None, swap=None):
        with self._lock:
            self._open += [site, coordinator]
        for pair, limits in (((site, coordinator), (cut, swap)), ((coordinator, site), (None, None))):
            threading.Thread(target=self._pass, args=(*pair, *limits), daemon=True).start()

    def _pass(self, source, sink, limit, swap):
        passed = 0
        with contextlib.suppress(OSError):
            while data := source.recv(4096):
                time.sleep(self.delay)
                if swap is not None and passed + len(data) > swap and len(data) > 8:
                    middle = len(data) // 2
                    data, swap = data[middle:] + data[:middle], None
                    self.swaps += 1
                if limit is not None and passed + len(data) > limit:
                    sink.sendall(data[: limit - passed])
                    self.cuts += 1
                    break
                sink.sendall(data)
                passed += len(data)
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
