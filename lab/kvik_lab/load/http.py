"""HTTP/1.1 for a client that measures: every piece of an answer has the time at which it was read.

The time is taken where the bytes come in, before anything else runs; what they say is looked at when the
answer has ended. So neither parsing nor other requests' work is between a token and its time, beyond one
pass of the loop. Connections are kept and used again, the last used first. Nothing is ever sent twice: an
answer that does not come is an error, and the caller's to count.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httptools

FRESH_SECONDS = 2.0
"""A connection that was idle for longer is not used again: servers close idle ones (uvicorn, and so vLLM,
after 5 seconds), and a request that crosses the closing would be lost."""
LONGEST_ANSWER = 256 << 20
_CONNECT_SECONDS = 30.0


@dataclass
class Exchange:
    """A request and what came back. Times are nanoseconds of `time.monotonic_ns`."""

    sent: int | None = None
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    pieces: list[tuple[int, bytes]] = field(default_factory=list)
    ended: int | None = None
    error: str | None = None

    def fail(self, why: str) -> None:
        """End it, unless it has ended."""
        if self.ended is None:
            self.ended, self.error = time.monotonic_ns(), why


class Connection(asyncio.Protocol):
    """One connection; one exchange at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._exchange: Exchange | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._now = 0
        self._size = 0
        self.idle_since = 0
        self.open = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio: it stands."""
        assert isinstance(transport, asyncio.Transport)  # noqa: S101  (the type's narrowing)
        self._transport = transport
        self.open = True

    def connection_lost(self, error: Exception | None) -> None:
        """asyncio: it has ended. A body without a length is whole then."""
        self.open = False
        exchange = self._exchange
        if exchange is None:
            return
        headers = exchange.headers
        framed = "content-length" in headers or "chunked" in headers.get("transfer-encoding", "")
        if error is None and exchange.status is not None and not framed:
            exchange.ended = time.monotonic_ns()
        else:
            what = f": {error}" if error else ""
            exchange.fail(f"the connection ended before the answer did{what}")
        self._finish()

    def send(self, exchange: Exchange, request: bytes) -> asyncio.Future[None]:
        """Send a request, and return what is done when the exchange has ended, well or not."""
        transport = self._transport
        if transport is None or self._exchange is not None:
            raise AssertionError("a connection that is not free was used")
        self._exchange, self._size = exchange, 0
        self._waiter = asyncio.get_running_loop().create_future()
        exchange.sent = time.monotonic_ns()
        transport.write(request)
        return self._waiter

    def cut(self, why: str) -> None:
        """End it at once."""
        if self._exchange is not None:
            self._exchange.fail(why)
            self._finish()
        self.open = False
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """asyncio: bytes have come."""
        self._now = time.monotonic_ns()
        if self._exchange is None:
            self.cut("")  # nothing was asked
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.cut(f"the answer is not HTTP/1.1: {error}")

    # The parser's callbacks, within `data_received`.

    def on_header(self, name: bytes, value: bytes) -> None:
        """Of the head, or a trailer; one that came more than once is one list (RFC 9110, section 5.2)."""
        if self._exchange is None:
            return
        key, text = name.decode("latin-1").lower(), value.decode("latin-1")
        headers = self._exchange.headers
        headers[key] = f"{headers[key]}, {text}" if key in headers else text

    def on_headers_complete(self) -> None:
        """The head has been read."""
        if self._exchange is not None:
            self._exchange.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        if self._exchange is None:
            return
        self._size += len(body)
        if self._size > LONGEST_ANSWER:
            self.cut(f"the answer is longer than {LONGEST_ANSWER} bytes")
            return
        self._exchange.pieces.append((self._now, body))

    def on_message_complete(self) -> None:
        """The answer is whole."""
        if self._exchange is None or self._exchange.ended is not None:
            return
        if self._exchange.status is not None and 100 <= self._exchange.status < 200:
            self._exchange.headers.clear()  # an interim answer: the real one follows
            return
        self._exchange.ended = self._now
        if not self._parser.should_keep_alive():
            self.open = False
        self._finish()
        if not self.open and self._transport is not None:
            self._transport.close()

    def _finish(self) -> None:
        self._exchange = None
        self.idle_since = time.monotonic_ns()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Pool:
    """Connections to one server."""

    def __init__(self, url: str, headers: dict[str, str]) -> None:
        parts = urlsplit(url)
        self._host = parts.hostname or ""
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        self._path = parts.path
        self._idle: list[Connection] = []
        lines = {"Host": parts.netloc, "Content-Type": "application/json", "TE": "trailers", **headers}
        self._head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())

    async def exchange(
        self, method: str, path: str, body: bytes, request_id: str, timeout: float
    ) -> Exchange:
        """Send one request and wait for the end of its answer. What goes wrong is in `error`; never
        raised."""
        result = Exchange()
        try:
            connection = self._free()
            if connection is None:
                connection = await asyncio.wait_for(self._connect(), _CONNECT_SECONDS)
        except TimeoutError:
            result.fail(f"no connection to {self._host}:{self._port} within {_CONNECT_SECONDS:g} s")
            return result
        except (OSError, UnicodeError) as error:  # the latter of a name that no host can have
            result.fail(f"no connection to {self._host}:{self._port}: {error}")
            return result
        head = (
            f"{method} {self._path}{path} HTTP/1.1\r\n{self._head}X-Request-Id: {request_id}\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        waiter = connection.send(result, head.encode("latin-1") + body)
        alarm = asyncio.get_running_loop().call_later(timeout, connection.cut, f"no end within {timeout:g} s")
        try:
            await waiter
        except asyncio.CancelledError:
            connection.cut("cancelled")
            raise
        finally:
            alarm.cancel()
        if connection.open:
            self._idle.append(connection)
        return result

    def _free(self) -> Connection | None:
        """A connection that can be used at once."""
        oldest = time.monotonic_ns() - int(FRESH_SECONDS * 1e9)
        while self._idle:
            connection = self._idle.pop()
            if connection.open and connection.idle_since >= oldest:
                return connection
            connection.cut("")
        return None

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        transport, connection = await loop.create_connection(
            Connection, self._host, self._port, ssl=self._tls
        )
        found = transport.get_extra_info("socket")
        if found is not None and found.family in (socket.AF_INET, socket.AF_INET6):
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def close(self) -> None:
        """End all idle connections."""
        for connection in self._idle:
            connection.cut("")
        self._idle.clear()
