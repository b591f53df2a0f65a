"""Running one server: ranks first, then HTTP, until SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable

import uvicorn

from kvik.emulator.faults import Faults
from kvik.emulator.front import Front
from kvik.emulator.options import Options
from kvik.emulator.web import Web

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class _Server(uvicorn.Server):
    """uvicorn's server, which says when it listens."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()


async def serve(options: Options, ready: Callable[[str], None]) -> None:
    """Serve until signalled; `ready` is called with the address once requests are taken.

    Errors: `kvik.InvalidArgument` for options that cannot be, `OSError` for an address, `ReplicaError`.
    """
    plan = options.plan()
    front = Front(plan, options.dp, Faults(options.faults()))
    loop = asyncio.get_running_loop()
    with _bind(options.host, options.port) as listener:
        task = asyncio.current_task()
        for number in _SIGNALS:
            loop.add_signal_handler(number, lambda: task is not None and task.cancel())
        try:
            await front.start()
            for number in _SIGNALS:
                loop.remove_signal_handler(number)
                # uvicorn handles them while it serves, and then raises them again for who was here before.
                signal.signal(number, lambda _number, _frame: None)
            web = Web(front, options.bounds(plan), allow_faults=options.allow_faults)
            config = uvicorn.Config(
                web.app(),
                lifespan="off",
                log_level="warning",
                access_log=False,
                timeout_graceful_shutdown=options.drain,
            )
            host, port = listener.getsockname()[:2]
            address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
            await _Server(config, lambda: ready(address)).serve(sockets=[listener])
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
