"""The initiator's handle on its target: a child of its own, or one that listens elsewhere."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from typing import Any, Self

from kvik.bench.control import WILDCARDS, Connection, connect, split_address
from kvik.bench.errors import BenchError, CheckError
from kvik.bench.pages import Cell
from kvik.bench.stream import StreamInitiator
from kvik.bench.target import SECRET_VARIABLE, TargetOptions

_END_SECONDS = 10.0


class Peer:
    """Requests to the target as methods."""

    def __init__(self, connection: Connection, child: subprocess.Popen[bytes] | None) -> None:
        self.connection = connection
        self._child = child
        hello = connection.request("hello")
        self.facts: dict[str, Any] = hello["facts"]
        self.options = TargetOptions(**hello["options"])

    @classmethod
    def start(cls, options: TargetOptions, secret: str | None, module: str = "kvik.bench.target") -> Self:
        """Start a child. The socket is its standard input: when this process dies, the child reads EOF."""
        ours, theirs = socket.socketpair()
        environment = {name: value for name, value in os.environ.items() if name != SECRET_VARIABLE}
        if secret is not None:
            environment[SECRET_VARIABLE] = secret
        with theirs:
            child = subprocess.Popen(
                [sys.executable, "-m", module, options.to_json()],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                env=environment,
            )
        try:
            return cls(Connection(ours), child)
        except BaseException:
            ours.close()
            _end(child)
            raise

    @classmethod
    def join(cls, address: str, secret: str | None) -> Self:
        """Use a target that was started with ``--listen``."""
        connection = connect(address, secret)
        try:
            return cls(connection, None)
        except BaseException:
            connection.close()
            raise

    def fill(self, salt: int) -> None:
        """Fill the target's buffer with the pattern."""
        self.connection.request("fill", salt=salt)

    def open(self, cell: Cell, *, buffer: int, layout: str, seed: int, expiry: float) -> str:
        """Grant the pages of a cell; gives the ticket's text."""
        answer = self.connection.request(
            "open",
            right=cell.op,
            page_bytes=cell.page_bytes,
            pages=cell.pages,
            buffer=buffer,
            layout=layout,
            seed=seed,
            expiry=expiry,
        )
        return str(answer["ticket"])

    def close_cell(self) -> None:
        """Revoke the grant of the open cell."""
        self.connection.request("close")

    def poison(self, first: int, count: int) -> None:
        """Overwrite the target's pages of some batches."""
        self.connection.request("poison", first=first, count=count)

    def check(self, first: int, count: int, salt: int) -> None:
        """Have the target compare what was written into some batches."""
        wrong = self.connection.request("check", first=first, count=count, salt=salt)["wrong"]
        if wrong is not None:
            raise CheckError(str(wrong))

    def cpu_s(self) -> float:
        """CPU seconds that the target's process has used, all threads."""
        return float(self.connection.request("cpu")["cpu_s"])

    def counted(self) -> dict[str, float]:
        """What the target's engine counts of its transfers."""
        found = self.connection.request("counted")["counted"]
        return {str(name): float(value) for name, value in found.items()}

    def stream(self, buffer: memoryview) -> StreamInitiator:
        """Open the plain TCP stream of the comparison."""
        answer = self.connection.request("stream")
        host, port = split_address(str(answer["address"]))
        if host in WILDCARDS:  # its engine listens everywhere; this connection has found the host
            host = self.connection.sock.getpeername()[0]
        return StreamInitiator(host, port, str(answer["token"]), buffer)

    def close(self) -> None:
        """Let the target go; a child that does not end is ended."""
        self.connection.close()
        if self._child is not None:
            _end(self._child)


def _end(child: subprocess.Popen[bytes]) -> None:
    try:
        child.wait(timeout=_END_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait(timeout=_END_SECONDS)
        raise BenchError(f"the target did not end within {_END_SECONDS:g} s and was killed") from None
