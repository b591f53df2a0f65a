"""A page of metrics over HTTP, for scrapers: ``GET /metrics``, and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator, Sequence

_MOST = 16
"""Connections at once; more are closed without an answer."""
_SECONDS = 5.0
"""That a connection may take in all."""
_HEAD = 8192
"""Bytes of a request's head, at most."""
_PATH = "/metrics"
_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@contextlib.contextmanager
def serving(addresses: Sequence[str], page: Callable[[], str]) -> Iterator[tuple[str, ...]]:
    """Serve what ``page`` gives at these addresses, from a thread of its own, until the end of the block.

    addresses: HOST:PORT or [IPV6]:PORT. Gives the addresses with the ports that were taken. Raises OSError
    where one of them cannot be listened on.
    """
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(_listener(address)) for address in addresses]
        exporter = _Exporter(sockets, page)
        thread = threading.Thread(target=exporter.run, name="kvik-metrics", daemon=True)
        thread.start()
        exporter.ready.wait()
        try:
            yield tuple(_shown(listener) for listener in sockets)
        finally:
            exporter.stop()
            thread.join()


def _listener(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    try:
        family, *_, where = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
        return socket.create_server((where[0], int(port)), family=family)
    except (OSError, UnicodeError) as error:  # Such as a name with two dots in a row.
        raise OSError(f"metrics cannot be served at {address}: {error}") from error


def _shown(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class _Exporter:
    def __init__(self, sockets: Sequence[socket.socket], page: Callable[[], str]) -> None:
        self._sockets = sockets
        self._page = page
        self._open = 0
        self._stopping: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.ready = threading.Event()

    def run(self) -> None:
        try:
            asyncio.run(self._run())
        finally:
            self.ready.set()

    def stop(self) -> None:
        """End it, with the connections that are open. It may have ended by itself."""
        if self._loop is not None and self._stopping is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._stopping.set)

    async def _run(self) -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        servers = [
            await asyncio.start_server(self._serve, sock=listener, limit=_HEAD) for listener in self._sockets
        ]
        self.ready.set()
        await self._stopping.wait()
        for server in servers:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open += 1
        try:
            if self._open <= _MOST:
                async with asyncio.timeout(_SECONDS):
                    head = await reader.readuntil(b"\r\n\r\n")
                    writer.write(self._answer(head))
                    writer.close()
                    await writer.wait_closed()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # Whoever asked has gone, took too long, or does not speak HTTP.
        except asyncio.CancelledError:
            pass  # The server ends. Python 3.11 would print it as an error of this connection.
        finally:
            self._open -= 1
            # What was closed above is closed; of anything else, what is still to be sent is not.
            writer.transport.abort()

    def _answer(self, head: bytes) -> bytes:
        method, _, rest = head.split(b"\r\n", 1)[0].decode("latin-1").partition(" ")
        path = rest.partition(" ")[0].partition("?")[0]
        if path != _PATH:
            return _response("404 Not Found", f"the metrics are at {_PATH}\n", "text/plain", method)
        if method not in ("GET", "HEAD"):
            return _response("405 Method Not Allowed", "use GET\n", "text/plain", method)
        return _response("200 OK", self._page(), _TYPE, method)


def _response(status: str, body: str, kind: str, method: str) -> bytes:
    data = body.encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(data)}\r\n"
    head += "Connection: close\r\n\r\n"
    return head.encode() + (b"" if method == "HEAD" else data)
