"""Running one server: ranks first, then HTTP, until SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn

from kvik.emulator.faults import Faults
from kvik.emulator.front import Front
from kvik.emulator.options import Options
from kvik.emulator.web import Web
from kvik.signals import handling


class _Server(uvicorn.Server):
    """uvicorn's server, which says when it listens, and hears of signals before it does."""

    def __init__(self, config: uvicorn.Config, address: str, ready: Callable[[str], None]) -> None:
        super().__init__(config)
        self._address = address
        self._ready = ready
        self._loop = asyncio.get_running_loop()
        self.before: asyncio.Task[None] | None = asyncio.current_task()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal ends `before`, what is done before this serves; and the serving."""
        if self.before is not None and not self.should_exit:
            self._loop.call_soon_threadsafe(self.before.cancel)
        super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        except OSError as error:  # another server that was started as this one was, and was quicker
            raise OSError(error.errno, f"{self._address}: {error.strerror}") from error
        self._ready(self._address)


async def serve(options: Options, ready: Callable[[str], None]) -> None:
    """Serve until signalled; `ready` is called with the address once requests are taken.

    Errors: `kvik.InvalidArgument` for options that cannot be, `OSError` for an address, `ReplicaError`.
    """
    plan = options.plan()
    front = Front(plan, options.dp, Faults(options.faults()))
    web = Web(front, options.bounds(plan), allow_faults=options.allow_faults)
    config = uvicorn.Config(
        web.app(),
        lifespan="off",
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=options.drain,
    )
    with _bind(options.host, options.port) as listener:
        host, port = listener.getsockname()[:2]
        address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        server = _Server(config, address, ready)
        with handling(server.handle_exit):
            try:
                await front.start()
                server.before = None
                # While it serves, uvicorn handles signals by itself; then it raises them once more.
                await server.serve(sockets=[listener])
            finally:
                await front.close()


def _bind(host: str, port: int) -> socket.socket:
    """A socket at the address that nobody can connect to yet: taken early, answering only when all is up."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except UnicodeError as error:  # such as a name with two dots in a row
        raise OSError(f"{host}:{port}: {error}") from error
    except OSError as error:
        raise OSError(error.errno, f"{host}:{port}: {error.strerror}") from error
    return listener
