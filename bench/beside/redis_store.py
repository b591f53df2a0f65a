"""Redis, as Debian packages it, over a Unix socket: a block is a value. Nothing is written to disk."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import redis
import side

_PIPELINE = 64  # blocks of one request
_STARTS = 10.0  # seconds


class RedisStore:
    """A client of one server."""

    def __init__(self, socket: Path) -> None:
        self._redis = redis.Redis(
            unix_socket_path=str(socket), retry=redis.retry.Retry(redis.backoff.ConstantBackoff(0.05), 200)
        )
        self._redis.ping()

    def put(self, names: Sequence[str], blocks: np.ndarray, order: Sequence[int]) -> None:
        """A pipeline of sets for some blocks at a time; those of the last round go."""
        self._redis.flushdb()
        for first in range(0, len(names), _PIPELINE):
            pipeline = self._redis.pipeline(transaction=False)
            for name, at in zip(
                names[first : first + _PIPELINE], order[first : first + _PIPELINE], strict=True
            ):
                pipeline.set(name, memoryview(blocks[at]))
            pipeline.execute()

    def get(self, names: Sequence[str], blocks: np.ndarray, order: Sequence[int]) -> None:
        """Some blocks at a time."""
        for first in range(0, len(names), _PIPELINE):
            values = self._redis.mget(names[first : first + _PIPELINE])
            for at, value in zip(order[first : first + _PIPELINE], values, strict=True):
                blocks[at] = np.frombuffer(value, dtype=np.uint8)

    def stream(self, names: Sequence[str], blocks: np.ndarray, order: Sequence[int]) -> Iterator[int]:
        """A request a block."""
        for name, at in zip(names, order, strict=True):
            blocks[at] = np.frombuffer(self._redis.get(name), dtype=np.uint8)
            yield at


def main() -> None:
    """Run a server of our own in a directory of our own."""
    given = side.arguments()
    with tempfile.TemporaryDirectory() as directory:
        socket = Path(directory) / "redis.sock"
        command = [
            "redis-server",
            "--port",
            "0",
            "--unixsocket",
            str(socket),
            "--save",
            "",
            "--appendonly",
            "no",
        ]
        server = subprocess.Popen([*command, "--dir", directory], stdout=sys.stderr)
        try:
            side.serve("redis", side.Side(given.blocks, given.block_bytes, given.seed), RedisStore(socket))
        finally:
            server.terminate()
            server.wait(timeout=_STARTS)


if __name__ == "__main__":
    main()
