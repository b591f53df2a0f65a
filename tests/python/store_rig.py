"""A store served by a process, and clients of it: what tests of served stores share."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

import kvik
from kvik.roles.ports import LOOPBACK, free_ports
from tests.python.peers import stop

LAYERS, RUN, PAGES = 2, 8192, 64
BLOCK = LAYERS * RUN

NAMESPACE = kvik.Namespace(
    model="tiny",
    kv_dtype="float16",
    layers=(0, LAYERS),
    model_layers=LAYERS,
    heads=(0, 1),
    model_heads=1,
    block_tokens=4,
)

Bytes = npt.NDArray[np.uint8]


class Served:
    """A process of ``kvik store serve`` at one address, which can be killed and started again.

    ``ready`` is what it said when it was. In arguments ``{port}`` is the address' port.
    """

    def __init__(self, *arguments: str) -> None:
        (port,) = free_ports(1)
        self.address = f"{LOOPBACK}:{port}"
        self._arguments = [argument.replace("{port}", str(port)) for argument in arguments]
        self.process = self._start()

    def _start(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", "from kvik.cli import main; main()", "store", "serve",
             "--listen", self.address, *self._arguments],
            stdout=subprocess.PIPE,
            text=True,
            env={name: value for name, value in os.environ.items() if not name.startswith("KVIK_")},
        )  # fmt: skip
        assert process.stdout is not None
        self.ready = process.stdout.readline()
        assert self.ready.startswith("kvik store serves on "), self.ready
        return process

    @property
    def metrics(self) -> str:
        """HOST:PORT of its metrics, where it was started with ``--metrics``."""
        return self.ready.partition("http://")[2].partition("/")[0]

    def kill(self) -> None:
        self.process.kill()
        self._gone()

    def end(self) -> None:
        """Ask it to end, and wait until it has."""
        self.process.terminate()
        self.process.wait(timeout=60)
        self._gone()

    def _gone(self) -> None:
        self.process.wait(timeout=60)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def again(self) -> None:
        self.process = self._start()

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        stop(self.process.pid)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self._gone()


class Rig:
    """An engine with pages of two layers that are apart, and a store."""

    def __init__(
        self, engine: kvik.Engine, address: str | None, memory: str = "4MiB", log: Path | None = None
    ) -> None:
        self.engine = engine
        self.layout = kvik.Layout(PAGES, RUN, layers=LAYERS, layer_stride=PAGES * RUN)
        self.region = engine.allocate(self.layout.nbytes)
        self.bytes: Bytes = np.frombuffer(memoryview(self.region), dtype=np.uint8).reshape(LAYERS, PAGES, RUN)
        if address is None:
            self.store = kvik.Store.embedded(engine, NAMESPACE, self.layout, memory=memory, log=log)
        else:
            # A server that gets no processor has longer than the five seconds of users.
            self.store = kvik.Store.connect(engine, address, NAMESPACE, self.layout, deadline=60.0)

    def pages(self, ids: range) -> kvik.PageSet:
        return self.region.pages(self.layout, ids)

    def fill(self, keys: bytes) -> None:
        """Pages from 0 on get the bytes of the blocks of these keys."""
        for page, at in enumerate(range(0, len(keys), 32)):
            seed = int.from_bytes(keys[at : at + 8], "little")
            self.bytes[:, page] = np.random.default_rng(seed).integers(0, 256, (LAYERS, RUN), dtype=np.uint8)

    def put(self, keys: bytes, deadline: float | None = None) -> kvik.Stored:
        self.fill(keys)
        return self.store.put(keys, self.pages(range(len(keys) // 32)), deadline=deadline).wait()

    def got(self, keys: bytes, deadline: float | None = None) -> int:
        """How many blocks are read; each is compared."""
        count = len(keys) // 32
        self.fill(keys)
        expected = self.bytes[:, :count].copy()
        self.bytes[:, count : 2 * count] = 0xEE
        there = self.store.get(keys, self.pages(range(count, 2 * count)), deadline=deadline).wait()
        assert np.array_equal(self.bytes[:, count : count + there], expected[:, :there])
        assert (self.bytes[:, count + there : 2 * count] == 0xEE).all()
        return there


def puts(address: str) -> None:
    """Put without end; says so once it has begun."""
    with kvik.Engine() as engine:
        rig = Rig(engine, address)
        for first in itertools.count():
            rig.put(rig.store.keys(range(first, first + 64)))
            if first == 1:
                print("puts", flush=True)


if __name__ == "__main__":
    puts(sys.argv[1])
