"""kvik's peer protocol as an attacker speaks it: as much as passes the handshake, and no more."""

from __future__ import annotations

import os
import socket
import struct
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest as xxh3_64

from tests.hostile import blake3

HELLO, WELCOME, PROVE, READY, REFUSE, JOIN = range(1, 7)
BEAT, BEGIN, ACCEPT, END, ENDED, OPEN_CHANNELS, GOODBYE = range(1, 8)
WHOLE = struct.pack("<Q", 0x656C_6F68_7776_696B)  # the trailer of a chunk that was sent whole
PATIENCE = 5.0


def address(text: str) -> tuple[str, int]:
    """HOST:PORT as a socket takes it."""
    host, _, port = text.rpartition(":")
    return host, int(port)


def greeting(kind: int, body: bytes) -> bytes:
    """A message of a handshake."""
    return struct.pack("<4sBBH", b"kvik", kind, 0, len(body)) + body


def hello() -> bytes:
    """The first message of an engine without a secret, under a name of its own."""
    return greeting(HELLO, struct.pack("<HHB", 3, 3, 0) + os.urandom(24) + os.urandom(32) + b"\0")


def frame(kind: int, body: bytes = b"") -> bytes:
    """A frame of the control connection, with checksums that fit."""
    return frame_header(len(body), kind) + struct.pack("<Q", xxh3_64(body)) + body


def frame_header(length: int, kind: int) -> bytes:
    """The header of a frame up to the checksum of its body."""
    head = struct.pack("<IHH", length, kind, 0)
    return head + struct.pack("<I", xxh3_64(head) & 0xFFFFFFFF)


def chunk(session: int, transfer: int, position: int, length: int, sums: int = 0) -> bytes:
    """The header of a chunk, with a checksum that fits."""
    head = struct.pack("<4sIQQQI", b"kvD1", length, session, transfer, position, sums)
    return head + struct.pack("<I", xxh3_64(head) & 0xFFFFFFFF)


def begin(transfer: int, grant: bytes, time_ms: int = 20_000) -> bytes:
    """Asks to read 16 pages of 4 KiB."""
    body = struct.pack("<Q16s8sB", transfer, grant, b"", 0) + struct.pack("<BBBBBH", 0, 0, 0, 0, 0, 1)
    body += struct.pack("<III", time_ms, 4096, 4096) + struct.pack("<BIIQQB", 1, 1, 16, 4096, 4096, 0)
    return frame(BEGIN, body + bytes(5))


@dataclass
class Session:
    """An admitted connection: what the engine believes to be a peer."""

    conn: socket.socket
    number: int
    key: bytes
    local_name: str

    def send(self, data: bytes) -> bool:
        """Send all of it; False when the engine has cut the connection."""
        try:
            self.conn.sendall(data)
        except OSError:
            return False
        return True

    def drain(self) -> int:
        """Read what is there, without waiting; the bytes, or -1 when the connection is over."""
        total = 0
        while True:
            try:
                read = self.conn.recv(1 << 20, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return total
            except OSError:
                return -1
            if not read:
                return -1
            total += len(read)

    def over(self, seconds: float = PATIENCE) -> bool:
        """Whether the engine ends the connection within that time."""
        self.conn.settimeout(seconds)
        try:
            while self.conn.recv(1 << 20):
                pass
        except TimeoutError:
            return False
        except OSError:
            pass
        return True

    def join(self, index: int) -> socket.socket | None:
        """A data channel of the session; None when it is refused."""
        nonce = os.urandom(32)
        said = struct.pack("<QH", self.number, index) + b"\0" + nonce
        proof = blake3.keyed(self.key, b"join" + said)
        conn = socket.create_connection(self.conn.getpeername()[:2], PATIENCE)
        conn.sendall(greeting(JOIN, said + proof))
        try:
            if _message(conn)[0] == READY:
                return conn
        except OSError:
            pass
        conn.close()
        return None


def connect(to: tuple[str, int]) -> Session:
    """Shake hands as a new engine without a secret. OSError when the engine does not let it in."""
    conn = socket.create_connection(to, PATIENCE)
    first = hello()
    conn.sendall(first)
    kind, welcome = _message(conn)
    if kind != WELCOME:
        conn.close()
        raise ConnectionRefusedError(f"greeting {kind}: {welcome[2:]!r}")
    parts = b"".join(struct.pack("<Q", len(part)) + part for part in (first[8:], welcome[:-32]))
    transcript, none = blake3.derived("kvik v1 transcript", parts), bytes(32)
    # Names and a NIC provider that are empty, and no NICs.
    facts = os.urandom(16) + bytes(24) + struct.pack("<IIHHHB", os.getuid(), os.getpid(), 0, 0, 0, 0)
    conn.sendall(greeting(PROVE, blake3.keyed(none, b"opener" + transcript) + facts))
    kind, ready = _message(conn)
    if kind != READY:
        conn.close()
        raise ConnectionRefusedError(f"greeting {kind}: {ready[2:]!r}")
    (length,) = struct.unpack_from("<H", ready, 48)
    # Sending is bounded, and `drain` asks without waiting.
    conn.settimeout(None)
    conn.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(PATIENCE), 0))
    number = struct.unpack("<Q", blake3.keyed(none, b"session number" + transcript)[:8])[0]
    key = blake3.keyed(none, b"session key" + transcript)
    return Session(conn, number, key, ready[50 : 50 + length].decode())


def _message(conn: socket.socket) -> tuple[int, bytes]:
    header = _exactly(conn, 8)
    return header[4], _exactly(conn, struct.unpack_from("<H", header, 6)[0])


def _exactly(conn: socket.socket, count: int) -> bytes:
    got = b""
    while len(got) < count:
        read = conn.recv(count - len(got))
        if not read:
            raise ConnectionResetError("the engine closed the connection")
        got += read
    return got
