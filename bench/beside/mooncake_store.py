"""Mooncake's store: a master, a process that lends its memory, and a client, over TCP on loopback.

Blocks go from and to the client's registered buffers; the wheel that `tools/contenders.py mooncake` installs
has the master too.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import side
from mooncake.store import MooncakeDistributedStore

_BUFFER = 64 << 20  # bytes of a client's own, for what is not registered
_ENDS = 10.0  # seconds


def _port() -> int:
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _setup(master: str, lent: int) -> MooncakeDistributedStore:
    store = MooncakeDistributedStore()
    if code := store.setup(f"127.0.0.1:{_port()}", "P2PHANDSHAKE", lent, _BUFFER, "tcp", "", master):
        raise RuntimeError(f"Mooncake's client did not start: {code}")
    return store


def _lend(master: str, lent: int, ready: Connection) -> None:
    store = _setup(master, lent)
    ready.send(True)
    with contextlib.suppress(EOFError):
        ready.recv()
    store.close()


class MooncakeStore:
    """The client."""

    def __init__(self, master: str, buffers: Sequence[np.ndarray]) -> None:
        self._store = _setup(master, 0)
        for buffer in buffers:
            self._store.register_buffer(buffer.ctypes.data, buffer.nbytes)

    def put(self, names: Sequence[str], blocks: np.ndarray, order: Sequence[int]) -> None:
        """One batch; those of the last round go."""
        self._store.remove_all(True)
        self._check(self._store.batch_put_from(list(names), *_places(blocks, order)), 0)

    def get(self, names: Sequence[str], blocks: np.ndarray, order: Sequence[int]) -> None:
        """One batch."""
        self._check(self._store.batch_get_into(list(names), *_places(blocks, order)), blocks[0].nbytes)

    @staticmethod
    def _check(results: Sequence[int], good: int) -> None:
        for result in results:
            if result != good:
                raise RuntimeError(f"Mooncake says {result}")


def _places(blocks: np.ndarray, order: Sequence[int]) -> tuple[list[int], list[int]]:
    start, size = blocks.ctypes.data, blocks[0].nbytes
    return [start + at * size for at in order], [size] * len(order)


@contextlib.contextmanager
def _running(lent: int) -> Iterator[str]:
    port = _port()
    program = shutil.which("mooncake_master", path=str(Path(sys.executable).parent)) or "mooncake_master"
    command = [
        program,
        f"--rpc_port={port}",
        f"--metrics_port={_port()}",
        "--enable_http_metadata_server=false",
    ]
    with tempfile.TemporaryDirectory() as directory:
        master = subprocess.Popen(command, cwd=directory, stdout=sys.stderr)
        here, there = multiprocessing.Pipe()
        lender = multiprocessing.Process(target=_lend, args=(f"127.0.0.1:{port}", lent, there), daemon=True)
        try:
            _reached(port)
            lender.start()
            here.recv()
            yield f"127.0.0.1:{port}"
        finally:
            if lender.pid is not None:
                lender.kill()
            master.terminate()
            master.wait(timeout=_ENDS)


def _reached(port: int) -> None:
    """The master says nothing when it is up: connect until it answers."""
    until = time.monotonic() + _ENDS
    while time.monotonic() < until:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.05)
    raise RuntimeError("Mooncake's master did not start")


def main() -> None:
    """Run all of it."""
    given = side.arguments()
    ours = side.Side(given.blocks, given.block_bytes, given.seed)
    with _running(2 * ours.source.nbytes + (512 << 20)) as master:
        side.serve("mooncake", ours, MooncakeStore(master, [ours.source, ours.target]))


if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    main()
