"""The plain TCP stream that kvik is compared with: one connection, ``sendall`` and ``recv_into``, no framing.

A turn is announced by one fixed header; then payload flows one way without a pause, walking through the
sender's and the receiver's buffer, and one byte at the end says that the last of it has arrived. There is no
answer per batch, so this is a higher bar than a request-and-answer protocol over the same stream.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import threading

from kvik.bench.control import join_address
from kvik.bench.errors import BenchError

CHUNKS = (256 << 10, 512 << 10, 1 << 20, 2 << 20, 4 << 20)
"""Sizes of one send that are tried; the fastest is used."""

TURN_LIMIT = 1 << 40
_HEADER = struct.Struct("<cxxxIQ")
_TO_INITIATOR, _TO_TARGET = b"r", b"w"
_STALL_SECONDS = 30.0
_DONE = b"."


class Cursor:
    """A walk round a buffer in steps of one chunk."""

    def __init__(self, buffer: memoryview) -> None:
        self.buffer = buffer
        self.position = 0

    def take(self, limit: int) -> memoryview:
        """The next contiguous part of at most ``limit`` bytes."""
        if self.position >= len(self.buffer):
            self.position = 0
        return self.buffer[self.position : self.position + limit]


def send_stream(sock: socket.socket, cursor: Cursor, total: int, chunk: int) -> None:
    """Send ``total`` bytes, ``chunk`` at a time."""
    while total:
        part = cursor.take(min(chunk, total))
        sock.sendall(part)
        cursor.position += len(part)
        total -= len(part)


def receive_stream(sock: socket.socket, cursor: Cursor, total: int, chunk: int) -> None:
    """Receive ``total`` bytes into place."""
    while total:
        got = sock.recv_into(cursor.take(min(chunk, total)))
        if not got:
            raise BenchError("the TCP stream of the comparison was closed in mid-turn")
        cursor.position += got
        total -= got


def _receive_exactly(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = sock.recv(count - len(data))
        if not part:
            return b""
        data += part
    return data


class StreamTarget:
    """The target's end: listens for one initiator that shows the token, then serves turns on a thread."""

    def __init__(self, host: str, buffer: memoryview) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=1)
        self.address = join_address(host, self._listener.getsockname()[1])
        self.token = secrets.token_hex(16)
        self._cursor = Cursor(buffer)
        self._sock: socket.socket | None = None
        self._thread = threading.Thread(target=self._run, name="bench-stream", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._listener.settimeout(_STALL_SECONDS)
            sock, _ = self._listener.accept()
            self._listener.close()  # One initiator is all there is; no port stays open for others.
            with sock:
                self._sock = sock
                sock.settimeout(_STALL_SECONDS)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if hmac.compare_digest(_receive_exactly(sock, len(self.token)), self.token.encode()):
                    self._serve(sock)
        except (OSError, BenchError):
            return  # The initiator sees its end of the stream fail and says so.
        finally:
            self._listener.close()

    def _serve(self, sock: socket.socket) -> None:
        while True:
            sock.settimeout(None)  # Between turns; `close` ends this wait.
            header = _receive_exactly(sock, _HEADER.size)
            if not header:
                return
            direction, chunk, total = _HEADER.unpack(header)
            if chunk not in CHUNKS or not 0 < total <= TURN_LIMIT:
                return
            sock.settimeout(_STALL_SECONDS)
            if direction == _TO_INITIATOR:
                send_stream(sock, self._cursor, total, chunk)
                _receive_exactly(sock, len(_DONE))
            else:
                receive_stream(sock, self._cursor, total, chunk)
                sock.sendall(_DONE)

    def close(self) -> None:
        """End the thread: cut the connection and wait for it."""
        for sock in (self._sock, self._listener):
            if sock is not None:
                try:
                    sock.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue  # Not connected, or closed by the thread already.
        self._thread.join(timeout=5.0)


class StreamInitiator:
    """The initiator's end."""

    def __init__(self, host: str, port: int, token: str, buffer: memoryview) -> None:
        try:
            self._sock = socket.create_connection((host, port), timeout=_STALL_SECONDS)
        except (OSError, UnicodeError) as error:
            raise BenchError(
                f"no plain TCP stream to {join_address(host, port)}: {error}. The comparison takes a free "
                "port of the target's host, which a firewall has to let through"
            ) from error
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock.sendall(token.encode())
        self._cursor = Cursor(buffer)

    def turn(self, op: str, total: int, chunk: int) -> None:
        """Move ``total`` bytes towards the initiator (``read``) or towards the target (``write``)."""
        if op == "read":
            self._sock.sendall(_HEADER.pack(_TO_INITIATOR, chunk, total))
            receive_stream(self._sock, self._cursor, total, chunk)
            self._sock.sendall(_DONE)
        else:
            self._sock.sendall(_HEADER.pack(_TO_TARGET, chunk, total))
            send_stream(self._sock, self._cursor, total, chunk)
            if _receive_exactly(self._sock, len(_DONE)) != _DONE:
                raise BenchError("the target closed the TCP stream of the comparison in mid-turn")

    def close(self) -> None:
        """Close the connection."""
        self._sock.close()
