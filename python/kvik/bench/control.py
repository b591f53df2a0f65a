"""The connection over which the initiator directs the target: one JSON object a line, request and answer.

It is the benchmark's own, beside the connections of the two engines: over it travel tickets, orders to poison
or check pages, and readings of CPU time. It is versioned, a line is bounded, every answer has a deadline, and
where a secret is set each side proves that it knows it before any other order is read.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import secrets
import socket
import time
from typing import Any, Protocol

from kvik.bench.errors import BenchError, NoAnswerError

VERSION = 2
"""2: the target says which NICs it was told of."""
LINE_LIMIT = 64 * 1024
ANSWER_SECONDS = 60.0
HANDSHAKE_SECONDS = 10.0
IDLE_SECONDS = 300.0

WILDCARDS = ("0.0.0.0", "::")  # noqa: S104 - told apart here, not bound
"""Addresses to listen on that are none to reach a host by."""

Message = dict[str, Any]


class Handler(Protocol):
    """What answers requests: gives the fields of the answer, or raises."""

    def __call__(self, request: Message) -> Message: ...


def split_address(text: str) -> tuple[str, int]:
    """``HOST:PORT`` or ``[V6]:PORT`` as a pair."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise BenchError(f"{text!r} is not HOST:PORT (IPv6 as [::1]:PORT)")
    return host.removeprefix("[").removesuffix("]"), int(port)


def join_address(host: str, port: int) -> str:
    """The inverse of ``split_address``."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether nothing outside this host can reach an address; a name other than localhost is not trusted."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Connection:
    """Lines of JSON over a connected stream socket."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._pending = bytearray()
        self._last_request = 0

    def send(self, message: Message) -> None:
        """Send one line; refuses to send what the other side would refuse to read."""
        line = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        if len(line) > LINE_LIMIT:
            raise BenchError(f"a control line of {len(line)} bytes; the limit is {LINE_LIMIT}")
        self.sock.settimeout(ANSWER_SECONDS)
        self.sock.sendall(line)

    def receive(self, seconds: float) -> Message | None:
        """The next line, or ``None`` when the other side has closed."""
        deadline = time.monotonic() + seconds
        while (end := self._pending.find(b"\n")) < 0:
            if len(self._pending) >= LINE_LIMIT:
                raise BenchError(f"a control line longer than {LINE_LIMIT} bytes")
            self.sock.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                data = self.sock.recv(LINE_LIMIT - len(self._pending))
            except TimeoutError:
                raise NoAnswerError(
                    f"the other side of the benchmark gave no answer in {seconds:g} s"
                ) from None
            if not data:
                return None
            self._pending += data
        line = bytes(self._pending[:end])
        del self._pending[: end + 1]
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            raise BenchError("a control line that is not JSON: is the other side kvik bench?") from None
        if not isinstance(message, dict):
            raise BenchError("a control line that is not a JSON object")
        return message

    def request(self, op: str, **fields: Any) -> Message:
        """Send a request and wait for its answer."""
        self._last_request += 1
        try:
            self.send({"id": self._last_request, "op": op, **fields})
            answer = self.receive(ANSWER_SECONDS)
        except ConnectionError as error:
            raise BenchError(f"the target ended before it answered {op!r}: {error.strerror}") from error
        if answer is None:
            raise BenchError(f"the target ended before it answered {op!r}")
        if answer.get("id") != self._last_request:
            raise BenchError(f"the target answered another request than {op!r}")
        if "error" in answer:
            raise BenchError(f"target: {answer['error']}")
        return answer

    def serve(self, handler: Handler) -> None:
        """Answer requests until the other side closes, whether or not it waits for its last answer."""
        try:
            while (request := self.receive(IDLE_SECONDS)) is not None:
                self.send({"id": request.get("id"), **handler(request)})
        except ConnectionError:
            return

    def close(self) -> None:
        """Close the socket."""
        self.sock.close()


def _proof(secret: str, role: str, listener_nonce: str, opener_nonce: str) -> bytes:
    text = f"kvik-bench/{VERSION} {role} {listener_nonce} {opener_nonce}"
    # A nonce may be any text of JSON, also one that UTF-8 has no bytes for.
    return hmac.new(secret.encode(), text.encode(errors="replace"), "sha256").hexdigest().encode()


def _proves(message: Message, proof: bytes) -> bool:
    return hmac.compare_digest(str(message.get("proof")).encode(errors="replace"), proof)


def _hello(connection: Connection) -> Message:
    hello = connection.receive(HANDSHAKE_SECONDS)
    if hello is None:
        raise BenchError("the other side closed the connection during the handshake")
    if hello.get("kvik_bench") != VERSION:
        raise BenchError(f"this side speaks kvik-bench {VERSION}, the other {hello.get('kvik_bench')!r}")
    return hello


def accept(sock: socket.socket, secret: str | None) -> Connection:
    """The listening side of the handshake."""
    connection = Connection(sock)
    nonce = secrets.token_hex(16)
    connection.send({"kvik_bench": VERSION, "nonce": nonce, "secret": secret is not None})
    hello = _hello(connection)
    other = str(hello.get("nonce"))
    if secret is not None and not _proves(hello, _proof(secret, "initiator", nonce, other)):
        raise BenchError("an initiator that does not know the secret was refused")
    proof = _proof(secret, "target", nonce, other).decode() if secret is not None else None
    connection.send({"kvik_bench": VERSION, "proof": proof})
    return connection


def connect(address: str, secret: str | None) -> Connection:
    """The opening side of the handshake."""
    try:
        sock = socket.create_connection(split_address(address), timeout=HANDSHAKE_SECONDS)
    except (OSError, UnicodeError) as error:  # such as a name with two dots in a row
        raise BenchError(f"peer_unreachable: no bench target at {address}: {error}") from error
    connection = Connection(sock)
    try:
        hello = _hello(connection)
    except NoAnswerError as error:
        raise BenchError(
            f"{address} took the connection and said nothing in {HANDSHAKE_SECONDS:g} s: it serves another "
            "initiator, or is no bench target"
        ) from error
    if bool(hello.get("secret")) != (secret is not None):
        if secret is None:
            has = "has a secret: set KVIK_SECRET here to the same"
        else:
            has = "has no secret: set KVIK_SECRET there, or unset it here"
        raise BenchError(f"secret_required: the target at {address} {has}")
    nonce, other = secrets.token_hex(16), str(hello.get("nonce"))
    proof = _proof(secret, "initiator", other, nonce).decode() if secret is not None else None
    connection.send({"kvik_bench": VERSION, "nonce": nonce, "proof": proof})
    answer = connection.receive(HANDSHAKE_SECONDS)
    if answer is None:
        raise BenchError(f"secret_mismatch: the target at {address} refused the secret")
    if secret is not None and not _proves(answer, _proof(secret, "target", other, nonce)):
        raise BenchError(f"secret_mismatch: the target at {address} does not know the secret")
    return connection
