"""A TCP proxy that delays what passes and cuts connections, in the middle of a message if that is where it falls."""

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
    """

    def __init__(self, target, delay=0.0, cut_after=None):
        host, port = target.rsplit(":", 1)
        self.target, self.delay, self.cut_after = (host, int(port)), delay, cut_after
        self.cuts = 0
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        self._open, self._lock = [], threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._server.close()
        with self._lock:
            for one in self._open:
                one.close()

    def _accept(self):
        while True:
            try:
                site, _ = self._server.accept()
                coordinator = socket.create_connection(self.target)
            except OSError:
                return
            with self._lock:
                self._open += [site, coordinator]
            for pair, limit in (((site, coordinator), self.cut_after), ((coordinator, site), None)):
                threading.Thread(target=self._pass, args=(*pair, limit), daemon=True).start()

    def _pass(self, source, sink, limit):
        passed = 0
        with contextlib.suppress(OSError):
            while data := source.recv(4096):
                time.sleep(self.delay)
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
