"""``kvik router``: one address for clients, before engines that prefill and engines that decode.

The router itself is native and runs on threads of its own. This module turns options into its configuration
and signals into its end.
"""

from __future__ import annotations

import contextlib
import importlib
import resource
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Protocol, cast

import click

from kvik import logs, signals
from kvik.config import ROUTER, flags

_ENDED = b"\0"
_AN_HOUR = 3600.0


class RunningRouter(Protocol):
    """A router that listens: what the native ``serve_router`` returns."""

    @property
    def address(self) -> str:
        """``HOST:PORT`` with the port that was taken; an IPv6 host is in brackets."""

    def stop(self) -> None:
        """Tell it to finish what it has, within its drain timeout, and to end. Returns at once."""

    def stop_now(self) -> None:
        """Tell it to end without finishing anything. Returns at once."""

    def wait(self, timeout: float) -> int | None:
        """Wait at most ``timeout`` seconds for its end: how many requests it has cut off; None while it runs.

        Raises ``OSError`` when it ended although nobody stopped it.
        """


class Native(Protocol):
    """The part of the native module that this module uses."""

    def serve_router(
        self,
        *,
        host: str,
        port: int,
        prefill: tuple[str, ...],
        decode: tuple[str, ...],
        connect_timeout: float,
        prefill_timeout: float,
        decode_timeout: float,
        client_timeout: float,
        release_timeout: float,
        drain_timeout: float,
        max_body: int,
        max_body_memory: int,
        max_inflight: int,
        transfer_mode: str,
    ) -> RunningRouter:
        """Start a router, listening when this returns.

        Raises ``kvik.InvalidArgument`` for a setting or URL that cannot work, and ``OSError`` when the
        address cannot be listened on or threads cannot be had.
        """


@dataclass(frozen=True, kw_only=True)
class RouterOptions:
    """The configuration of a router. Times are in seconds, sizes in bytes."""

    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    host: str
    port: int
    connect_timeout: float
    prefill_timeout: float
    decode_timeout: float
    client_timeout: float
    release_timeout: float
    drain_timeout: float
    max_body: int
    max_body_memory: int
    max_inflight: int
    transfer_mode: str
    log_level: logs.Level
    log_format: logs.Format


def start(options: RouterOptions) -> RunningRouter:
    """Start the native router; errors as in :meth:`Native.serve_router`."""
    native = cast("Native", importlib.import_module("kvik._native"))
    given = asdict(options)
    logs.to_stderr(given.pop("log_level"), given.pop("log_format"))
    return native.serve_router(**given)


def take_descriptors() -> None:
    """Let this process have as many descriptors as it may: each request takes two or three of them."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # more than the kernel gives: then as many as before
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def run_until_signalled(running: RunningRouter, ready: Callable[[], None]) -> int:
    """Wait for the end of a router, which SIGINT or SIGTERM brings about; must run in the main thread.

    ``ready`` is called once signals are handled: whoever waits for it may send one at once. The first
    signal lets the router drain, the second cuts it off. Returns how many requests were cut off, by that or
    by the drain timeout.
    """
    received = 0

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        nonlocal received
        received += 1
        if received == 1:
            running.stop()
        else:
            running.stop_now()

    with signals.wakeup() as (reader, writer), signals.handling(on_signal):

        def tell_end() -> None:
            with contextlib.suppress(OSError):  # the main thread asks again and gets the error itself
                while running.wait(_AN_HOUR) is None:
                    pass
            writer.send(_ENDED)

        teller = threading.Thread(target=tell_end, name="kvik-router-end", daemon=True)
        teller.start()
        ready()
        # Both a signal (its number, written by the interpreter) and the end of the router make `reader`
        # readable, so nothing has to be asked in intervals.
        while _ENDED not in reader.recv(64):
            pass
        teller.join()
    return running.wait(0.0) or 0


@click.group()
def router() -> None:
    """Route requests to prefill and decode engines."""


@router.command()
@flags.options(ROUTER)
def serve(**given: object) -> None:
    """Serve the OpenAI completions API from prefill and decode engines."""
    options = RouterOptions(**flags.chosen(ROUTER, given))
    take_descriptors()
    with flags.telling(OSError):
        running = start(options)
        cut = run_until_signalled(running, lambda: click.echo(f"listening on http://{running.address}"))
    if cut:
        raise click.ClickException(f"{cut} request(s) were cut off before they were finished")
