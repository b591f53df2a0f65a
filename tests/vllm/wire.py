"""A TCP relay in front of a prefill engine's kvik port, which slows, holds or spoils what it carries to
decode.

Only connections that carry pages are treated so: those that have carried more than `FREE` bytes. The
control connection stays below, so its heartbeats go on.
"""

import contextlib
import socket
import threading
import time
from typing import Self

FREE = 128 << 10  # bytes of a connection before it counts as one that carries pages
PIECE = 16 << 10
PAGES = 4 << 10  # bytes of a piece whose middle is pages: a smaller one may be a header or a trailer alone
BUFFER = 64 << 10  # bytes of each socket buffer, so that little is under way


class Wire:
    """Relays connections to a loopback port from `begin` to `end`."""

    def __init__(self, target: int) -> None:
        """Towards this port; `port` is where to connect instead."""
        self.target = target
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen(64)
        self.port = int(self._listener.getsockname()[1])
        self._rate: float | None = None  # bytes a second for each connection that carries pages
        self._most: int | None = None  # bytes of pages that pass before they stand still
        self._flip = False
        self._carried = 0
        self._changed = threading.Condition()
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []

    def slow(self, rate: float | None, most: int | None = None) -> None:
        """Pages go at so many bytes a second and connection from now on; None for as fast as they come, where
        this process has little time left for heartbeats. Once `most` bytes of them have passed they stand
        still, until this is called again."""
        with self._changed:
            self._rate, self._most, self._carried = rate, most, 0
            self._changed.notify_all()

    def flip_one_bit(self) -> None:
        """Spoil one bit of the pages that pass next."""
        with self._changed:
            self._flip = True

    @property
    def flipped(self) -> bool:
        """Whether the bit that was asked for has been spoilt."""
        return not self._flip

    def wait_carried(self, count: int, within: float) -> bool:
        """Wait until connections that carry pages have carried so many bytes since `slow`."""
        with self._changed:
            return self._changed.wait_for(lambda: self._carried >= count, within)

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return  # the listener was shut down
            far = socket.socket()
            far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)
            near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
            self._sockets += [near, far]
            try:
                far.connect(("127.0.0.1", self.target))
            except OSError:
                near.close()  # as refused as the port behind
                continue
            for work in ((near, far, False), (far, near, True)):
                thread = threading.Thread(target=self._relay, args=work, daemon=True)
                thread.start()
                self._threads.append(thread)

    def _relay(self, source: socket.socket, sink: socket.socket, pages: bool) -> None:
        total = 0
        with contextlib.suppress(OSError):
            while piece := source.recv(PIECE):
                total += len(piece)
                if pages and total > FREE:
                    piece = self._treat(piece)
                sink.sendall(piece)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _treat(self, piece: bytes) -> bytes:
        with self._changed:
            if self._flip and len(piece) >= PAGES:
                self._flip = False
                middle = len(piece) // 2
                piece = piece[:middle] + bytes([piece[middle] ^ 1]) + piece[middle + 1 :]
            end = time.monotonic()
            # A rate that changes meanwhile holds at once.
            start = end
            while self._rate is not None and (left := start + len(piece) / self._rate - end) > 0:
                self._changed.wait(left)
                end = time.monotonic()
            while self._most is not None and self._carried >= self._most:
                self._changed.wait()
            self._carried += len(piece)
            self._changed.notify_all()
        return piece

    def cut(self) -> None:
        """End the connections that there are; new ones are relayed."""
        for end in self._sockets:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def begin(self) -> Self:
        """Relay from now on."""
        thread = threading.Thread(target=self._accept, daemon=True)
        thread.start()
        self._threads.append(thread)
        return self

    def end(self) -> None:
        """Cut all connections, and relay no more."""
        self.slow(None)
        for end in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        for thread in self._threads:
            thread.join(timeout=10)
