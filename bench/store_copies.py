"""Put, get and the first block of a get of 512 random blocks, beside memcpy of the same blocks in the same
run.

    python bench/store_copies.py [--rounds 5] [--transports local,tcp] [--shapes 3B,7B,...] [--blocks 512]

Five model shapes (layers, KV heads, head size; 16 tokens a block, 2 bytes an element), those of the article
on a remote KV-cache. Each figure is the median of the rounds, in GiB/s, and its ratio to memcpy: numpy
copying the same blocks from one mapping to another in one thread. The store is a process of its own; every
block is verified. `raw` is a kvik transfer of the same pages between two engines, without a store: what its
transport does.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

import kvik

GIB = 1 << 30
SHAPES = {
    "3B": (36, 2, 128),
    "7B": (28, 4, 128),
    "glm-4-9b": (40, 4, 128),
    "Llama-3.1-8B": (32, 8, 128),
    "32B": (64, 8, 128),
}
TOKENS, ELEMENT = 16, 2


@dataclass
class Shape:
    """Of one block."""

    layers: int
    run: int

    @property
    def block(self) -> int:
        """Bytes."""
        return self.layers * 2 * self.run

    def layout(self, pages: int) -> kvik.Layout:
        """Pages one after the other, each with all its layers."""
        return kvik.Layout(
            pages,
            self.run,
            page_stride=self.block,
            layers=self.layers,
            layer_stride=2 * self.run,
            slices=2,
            slice_stride=self.run,
        )


def _timed(f: Callable[[], object]) -> float:
    began = time.perf_counter()
    f()
    return time.perf_counter() - began


class Client:
    """An engine with as many pages to put as to get."""

    def __init__(self, engine: kvik.Engine, address: str, shape: Shape, blocks: int) -> None:
        self.engine, self.shape, self.blocks = engine, shape, blocks
        self.layout = shape.layout(blocks)
        self.regions = [engine.allocate(self.layout.nbytes) for _ in range(2)]
        self.arrays = [
            np.frombuffer(region, dtype=np.uint8).reshape(blocks, shape.block) for region in self.regions
        ]
        self.arrays[0][:] = np.random.default_rng(1).integers(0, 256, shape.block, dtype=np.uint8)
        self.arrays[0][:, 0] = np.arange(blocks)
        self.arrays[1][:] = 0
        namespace = kvik.Namespace(
            model=f"bench {shape}",
            kv_dtype="bfloat16",
            layers=(0, shape.layers),
            model_layers=shape.layers,
            heads=(0, 1),
            model_heads=1,
            block_tokens=TOKENS,
        )
        self.store = kvik.Store.connect(engine, address, namespace, self.layout)
        self.order = np.random.default_rng(2).permutation(blocks).astype(np.uint32)
        self.keys = self.store.keys(range(blocks * TOKENS))

    def memcpy(self) -> float:
        source, destination = self.arrays
        return _timed(lambda: np.take(source, self.order, axis=0, out=destination, mode="clip"))

    def put(self) -> float:
        self.store.clear()
        pages = self.regions[0].pages(self.layout, self.order)
        return _timed(lambda: self.store.put(self.keys, pages, deadline=60).wait())

    def get(self) -> tuple[float, float]:
        pages = self.regions[1].pages(self.layout, self.order)
        began = time.perf_counter()
        get = self.store.get(self.keys, pages, deadline=60)
        get.next()
        first = time.perf_counter() - began
        if (there := get.wait()) != self.blocks:
            raise RuntimeError(f"{there} of {self.blocks} blocks came back")
        return time.perf_counter() - began, first

    def check(self) -> None:
        if not np.array_equal(self.arrays[0][self.order], self.arrays[1][self.order]):
            raise RuntimeError("what came back is not what was put")


def _served(transport: str, memory: int) -> tuple[subprocess.Popen[str], str]:
    command = ["kvik", "store", "serve", "--listen", "127.0.0.1:0", "--memory", str(memory)]
    process = subprocess.Popen(
        [*command, "--transport", transport, "--log-level", "warning"],
        stdout=subprocess.PIPE,
        text=True,
    )
    ready = process.stdout.readline() if process.stdout is not None else ""
    return process, ready.split()[-1]


def _raw(client: Client, transport: kvik.TransportName) -> float:
    """A transfer of the same pages between two engines of this process."""
    with kvik.Engine(transport=transport) as other:
        region = other.allocate(client.layout.nbytes)
        np.frombuffer(region, dtype=np.uint8)[:] = 1
        grant = client.engine.grant(client.regions[0].pages(client.layout, client.order), use="many")
        pages = region.pages(client.layout, client.order)
        times = [_timed(lambda: other.read(pages, grant.ticket).wait()) for _ in range(3)]
        grant.revoke()
    return min(times)


def measure(name: str, transport: kvik.TransportName, blocks: int, rounds: int) -> str:
    """One line of the table."""
    layers, heads, size = SHAPES[name]
    shape = Shape(layers, TOKENS * heads * size * ELEMENT)
    process, address = _served(transport, (blocks + 64) * shape.block + (1 << 30))
    try:
        with kvik.Engine(transport=transport) as engine:
            client = Client(engine, address, shape, blocks)
            client.put(), client.get(), client.memcpy()  # Memory that nobody has touched is another figure.
            copies, puts, gets, firsts = [], [], [], []
            for _ in range(rounds):
                copies.append(client.memcpy())
                puts.append(client.put())
                got, first = client.get()
                gets.append(got)
                firsts.append(first)
            client.check()
            raw = _raw(client, transport)
            del client.arrays
    finally:
        process.terminate()
        process.wait(timeout=20)
    gib = blocks * shape.block / GIB
    copy, put, get, first = (statistics.median(times) for times in (copies, puts, gets, firsts))
    limit = 2 * copy / blocks + 0.0003
    return (
        f"| {name} | {transport} | {gib / copy:.2f} | {gib / put:.2f} | {put / copy:.2f} | "
        f"{gib / get:.2f} | "
        f"{get / copy:.2f} | {gib / raw:.2f} | {raw / get:.2f} | {first * 1e3:.2f} | {limit * 1e3:.2f} |"
    )


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--blocks", type=int, default=512)
    parser.add_argument("--transports", default="local,tcp")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    given = parser.parse_args()
    names = "shape, transport, memcpy, put, ratio, get, ratio, raw, get to raw, first ms, bound ms"
    print(f"| {names.replace(', ', ' | ')} |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for transport in given.transports.split(","):
        for name in given.shapes.split(","):
            print(measure(name, transport, given.blocks, given.rounds), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
