"""The target: a process with an engine, one region and a grant for each cell, directed by the initiator.

Started by the initiator as ``python -m kvik.bench.target OPTIONS`` with a socket as standard input, or by
hand with ``kvik bench transfer --listen HOST:PORT``. It ends when its control connection does, so it never
outlives a child's parent.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import click
import numpy as np

import kvik
from kvik.bench import facts, pattern
from kvik.bench.control import (
    WILDCARDS,
    Connection,
    Message,
    accept,
    is_loopback,
    join_address,
    split_address,
)
from kvik.bench.errors import BenchError
from kvik.bench.memory import Memory
from kvik.bench.pages import PagePlan
from kvik.bench.stream import StreamTarget
from kvik.config import engine_arguments, flags

SECRET_VARIABLE = "KVIK_SECRET"  # noqa: S105 - the name of a variable, not a secret
CLOSE_SECONDS = 5.0
COUNTED = (
    "kvik_transfers_total", "kvik_transfer_bytes_total", "kvik_reconnects_total", "kvik_nic_bytes_total",
    "kvik_nic_failed_operations_total",
)  # fmt: skip
_EXIT_SECONDS = 15.0


def engine_secret(_ctx: click.Context, _option: click.Parameter, given: str | None) -> str | None:
    """The secret that an engine with this argument would have: the control connection demands the same."""
    with flags.telling():
        secret: str | None = engine_arguments({"secret": given})["secret"]
    return secret


def engine_at(listen: str = "127.0.0.1:0", **options: Any) -> kvik.Engine:
    """An engine that is reached where it listens, if that is loopback: what KVIK_LISTEN and KVIK_ADVERTISE
    say there is of a server, in whose container this runs, and peers would come to that one.
    """
    host = listen.rpartition(":")[0].strip("[]")
    if is_loopback(host):
        options["advertise"] = host
    return kvik.Engine(listen=listen, **options)


@dataclass(frozen=True)
class TargetOptions:
    """What the target decides for itself; an initiator on another host adapts to it."""

    buffer: int
    memory: str
    transport: kvik.TransportName
    channels: int
    verify: kvik.VerifyName
    engine_listen: str
    nics: str | None = None

    @classmethod
    def from_json(cls, text: str) -> TargetOptions:
        """Options as the parent wrote them."""
        return cls(**json.loads(text))

    def to_json(self) -> str:
        """Options for a child."""
        return json.dumps(asdict(self))


def counted(engine: kvik.Engine) -> dict[str, float]:
    """What an engine counts of its transfers, by the names of its metrics."""
    rows = (line.rpartition(" ") for line in engine.metrics().split("\n") if line.startswith(COUNTED))
    return {name: float(value) for name, _, value in rows}


class Target:
    """The state behind one control connection, and an answer for every request."""

    def __init__(self, options: TargetOptions, secret: str | None) -> None:
        self.options = options
        self.engine = engine_at(
            options.engine_listen,
            secret=secret,
            transport=options.transport,
            verify=options.verify,
            channels=options.channels,
            nics=options.nics,
            name="bench-target",
        )
        self.memory = Memory(self.engine, options.memory, options.buffer)
        self._plan: PagePlan | None = None
        self._grant: kvik.Grant | None = None
        self._stream: StreamTarget | None = None
        self.orders: dict[str, Callable[[Message], Message]] = {
            "hello": self._hello,
            "fill": self._fill,
            "open": self._open,
            "close": self._close,
            "poison": self._poison,
            "check": self._check,
            "cpu": self._cpu,
            "counted": self._counted,
            "stream": self._open_stream,
        }

    def handle(self, request: Message) -> Message:
        """Answer one request; what goes wrong becomes the answer."""
        order = self.orders.get(str(request.get("op")))
        if order is None:
            return {"error": f"unknown request {request.get('op')!r}"}
        try:
            return order(request)
        except kvik.KvikError as error:
            return {"error": f"{error.code}: {error}"}
        except (BenchError, KeyError, TypeError, ValueError, OverflowError, OSError) as error:
            return {"error": f"{type(error).__name__}: {error}"}

    def close(self) -> None:
        """Give everything back, within a bound."""
        if self._stream is not None:
            self._stream.close()
        self.engine.close(timeout=CLOSE_SECONDS)

    def _hello(self, _: Message) -> Message:
        return {"options": asdict(self.options), "facts": facts.collect(), "engine_id": self.engine.id}

    def _fill(self, request: Message) -> Message:
        pattern.fill(self.memory.bytes, int(request["salt"]))
        return {}

    def _open(self, request: Message) -> Message:
        self._close(request)
        # Before the plan, which is as large as the buffer that it is of.
        if int(request["buffer"]) > self.options.buffer:
            raise BenchError(f"the initiator counts on more than this target's {self.options.buffer} bytes")
        plan = PagePlan(
            int(request["buffer"]),
            int(request["page_bytes"]),
            int(request["pages"]),
            request["layout"],
            int(request["seed"]),
        )
        layout = self.memory.layout(plan.page_bytes)
        all_pages = self.memory.pages(layout, np.arange(plan.buffer_pages, dtype=np.uint32))
        expiry = float(request["expiry"])
        right: kvik.RightName = "write" if request["right"] == "write" else "read"
        self._grant = self.engine.grant(all_pages, right=right, use="many", expiry=expiry, max_expiry=expiry)
        self._plan = plan
        return {"ticket": str(self._grant.ticket)}

    def _close(self, _: Message) -> Message:
        grant, self._grant, self._plan = self._grant, None, None
        if grant is not None:
            grant.revoke(timeout=CLOSE_SECONDS)
        return {}

    def _batches(self, request: Message) -> tuple[PagePlan, range]:
        if self._plan is None:
            raise BenchError("no cell is open")
        first, count = int(request["first"]), int(request["count"])
        if not 0 <= first <= first + count <= self._plan.batches:
            raise BenchError(f"batches {first} to {first + count} of a plan with {self._plan.batches}")
        return self._plan, range(first, first + count)

    def _poison(self, request: Message) -> Message:
        plan, batches = self._batches(request)
        for batch in batches:
            pattern.poison(self.memory.bytes, plan.page_bytes, plan.target_ids(batch))
        return {}

    def _check(self, request: Message) -> Message:
        plan, batches = self._batches(request)
        for batch in batches:
            target, initiator = plan.target_ids(batch), plan.initiator_ids(batch)
            salt = int(request["salt"])
            wrong = pattern.check(self.memory.bytes, plan.page_bytes, target, initiator, salt)
            if wrong is not None:
                return {"wrong": str(wrong)}
        return {"wrong": None}

    def _cpu(self, _: Message) -> Message:
        return {"cpu_s": time.process_time()}

    def _counted(self, _: Message) -> Message:
        return {"counted": counted(self.engine)}

    def _open_stream(self, _: Message) -> Message:
        if self._stream is not None:
            self._stream.close()
        host, _port = split_address(self.options.engine_listen)
        self._stream = StreamTarget(host, self.memory.bytes.data)
        return {"address": self._stream.address, "token": self._stream.token}


def serve(
    connection: Connection, options: TargetOptions, secret: str | None, kind: type[Target] = Target
) -> None:
    """Be the target of one initiator until it leaves; it is told why, where no engine starts."""
    try:
        target = kind(options, secret)
    except kvik.KvikError as error:
        said = f"its engine did not start: {error.code}: {error}"
        connection.serve(lambda _: {"error": said})
        raise
    try:
        connection.serve(target.handle)
    finally:
        target.close()


def listen(
    address: str,
    options: TargetOptions,
    secret: str | None,
    say: Callable[[str], None],
    kind: type[Target] = Target,
    title: str = "bench target",
) -> None:
    """Be the target of one initiator after the other, until interrupted."""
    host, port = split_address(address)
    if host in WILDCARDS:
        raise BenchError("--listen wants an address that the initiator can reach, not a wildcard")
    if not is_loopback(host) and secret is None:
        raise BenchError(f"{host} is not loopback: listening there wants a secret, in {SECRET_VARIABLE}")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family, backlog=1) as server:
        say(f"{title} on {join_address(host, server.getsockname()[1])}")
        while True:
            sock, peer = server.accept()
            with sock:
                try:
                    connection = accept(sock, secret)
                    say(f"initiator {peer[0]} came")
                    serve(connection, options, secret, kind)
                    say(f"initiator {peer[0]} left")
                except (BenchError, kvik.KvikError, OSError) as error:
                    say(f"initiator {peer[0]}: {error}")


def _leave_soon() -> None:
    """A child whose engine does not close must not stay behind: its parent may be dead."""
    watchdog = threading.Timer(_EXIT_SECONDS, os._exit, args=(1,))
    watchdog.daemon = True
    watchdog.start()


def main(kind: type[Target] = Target) -> int:
    """The child's entry: options in ``argv``, the secret in the environment, the control socket as stdin."""
    # Ctrl-C reaches the whole foreground group; the parent decides when its target ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = Connection(socket.socket(fileno=0))
    try:
        target = kind(TargetOptions.from_json(sys.argv[1]), os.environ.get(SECRET_VARIABLE) or None)
    except kvik.KvikError as error:
        sys.stderr.write(f"kvik bench target: {error.code}: {error}\n")
        return 1
    try:
        connection.serve(target.handle)
    except (BenchError, OSError) as error:
        sys.stderr.write(f"kvik bench target: {error}\n")
        return 1
    finally:
        _leave_soon()
        target.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
