"""Blocks between a GPU and a store."""

import numpy as np

import kvik
from tests.python.gpu import Cuda, alone
from tests.python.peers import Bytes, random_bytes, random_seed
from tests.python.store_rig import LAYERS, NAMESPACE, PAGES, RUN, Served

LAYOUT = kvik.Layout(PAGES, RUN, layers=LAYERS, layer_stride=PAGES * RUN)
DEADLINE = 60.0
BLOCKS = 16
WAYS: list[kvik.TransportName] = ["tcp", "local"]


def blocks_of(memory: Bytes, pages: list[int]) -> list[bytes]:
    layers = memory.reshape(LAYERS, PAGES, RUN)
    return [layers[:, page].tobytes() for page in pages]


def over(cuda: Cuda, transport: kvik.TransportName | None, address: str | None) -> None:
    """Put from a GPU, then read into other pages of it, and into memory of the host; without an address
    within the process."""
    seed = random_seed()
    source, target, host = [*range(BLOCKS)], [*range(40, 40 + BLOCKS)], [*range(BLOCKS, 0, -1)]
    with kvik.Engine(transport=transport or "auto") as engine:
        array = cuda.array(LAYOUT.nbytes)
        array.now = random_bytes(LAYOUT.nbytes, seed)
        here, there = engine.register(array), engine.allocate(LAYOUT.nbytes)
        if address is None:
            store = kvik.Store.embedded(engine, NAMESPACE, LAYOUT, memory="4MiB")
        else:
            store = kvik.Store.connect(engine, address, NAMESPACE, LAYOUT, deadline=DEADLINE)
        keys = store.keys(range(BLOCKS * NAMESPACE.block_tokens))
        stored = store.put(keys, here.pages(LAYOUT, source), deadline=DEADLINE).wait()
        assert stored == kvik.Stored(BLOCKS, 0, 0), (transport, stored)
        expected = blocks_of(array.now, source)
        for _ in range(2):  # the second get is read ahead of its answer
            assert store.get(keys, here.pages(LAYOUT, target), deadline=DEADLINE).wait() == BLOCKS
            assert blocks_of(array.now, target) == expected, transport
            array.now = cleared(array.now, target)
        assert store.get(keys, there.pages(LAYOUT, host), deadline=DEADLINE).wait() == BLOCKS
        view = np.frombuffer(memoryview(there), dtype=np.uint8)
        assert blocks_of(view, host) == expected, transport
        del view, store
        here.close()
        array.free()


def cleared(memory: Bytes, pages: list[int]) -> Bytes:
    memory.reshape(LAYERS, PAGES, RUN)[:, pages] = 0
    return memory


@alone
def test_blocks_go_from_a_gpu_into_a_store_and_back(cuda: Cuda) -> None:
    over(cuda, None, None)
    for way in WAYS:
        with Served("--memory", "4MiB") as served:
            over(cuda, way, served.address)
