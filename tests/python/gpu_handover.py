"""Servers of `handover_harness.py` whose KV lies on a GPU: that of the stand-in for the CUDA driver."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from kvik.handover import native
from kvik.handover.config import ConnectorConfig
from kvik.handover.holding import HeldBlocks
from kvik.handover.mapping import heads_of
from kvik.handover.memory import KvMemory
from kvik.handover.protocol import RankPlace
from kvik.handover.report import ReportFile
from kvik.handover.scheduler import Identity, SchedulerSide
from kvik.handover.worker import WorkerSide
from tests.python.gpu import Array, Cuda
from tests.python.handover_harness import ITEM, Kv, Rank, Side, prompt, request
from tests.python.peers import Bytes, until

KERNEL_MICROS = 100_000  # a kernel of this length is seen by whoever does not wait for it
ONES = 0x01010101


class GpuRank(Rank):
    """A rank whose KV lies on the stand-in's GPU. `host` is a copy of it, and `kv` a view of that.

    `make` says how the KV lies in `nbytes` of memory that begin at an address.
    """

    def __init__(self, cuda: Cuda, role: str, nbytes: int, make: Callable[[int], KvMemory]) -> None:
        self.array, self.stream = Array(cuda, nbytes, {}), cuda.stream()
        memory = make(self.array.at)
        self.shape = memory.shape
        self.block_tokens, self.layers = memory.shape.block_tokens, (0, memory.shape.layers)
        self.heads = heads_of(0, 1, memory.shape.kv_heads)
        self.host: Bytes = np.zeros(nbytes, np.uint8)
        self.kv = view_of(self.host, memory)
        config = ConnectorConfig(transport="tcp")
        self.worker = WorkerSide(native.load(), config, role, RankPlace(), ReportFile(None))
        self.worker.register([memory], lambda: self.stream)

    def put(self) -> None:
        """What the copy has is on the GPU now."""
        self.array.now = self.host

    def get(self) -> None:
        """The copy has what is on the GPU now."""
        self.host[:] = self.array.now


def view_of(host: Bytes, memory: KvMemory) -> Kv:
    """Memory as [layers, blocks, heads, tokens, content], where layers lie at equal distances."""
    shape, offsets = memory.shape, memory.layer_offsets
    between = offsets[1] - offsets[0]
    assert offsets == [offsets[0] + between * layer for layer in range(len(offsets))]
    row = shape.content * ITEM
    token, head = (row, memory.head_stride) if shape.heads_outermost else (row * shape.heads, row)
    sizes = (len(offsets), memory.num_blocks, shape.heads, shape.block_tokens, shape.content)
    strides = (between, memory.block_stride, head, token, ITEM)
    return np.lib.stride_tricks.as_strided(host[offsets[0] :].view(np.uint32), sizes, strides)


class GpuSide(Side):
    """A server of one rank on the stand-in's GPU."""

    def __init__(self, cuda: Cuda, role: str, nbytes: int, make: Callable[[int], KvMemory]) -> None:
        self.rank = rank = GpuRank(cuda, role, nbytes, make)
        self.native, self.shape, self.ranks = native.load(), rank.shape, [rank]
        identity = Identity(role, {"model": "tiny"}, 1, role == "prefill", role == "decode")
        self.scheduler = SchedulerSide(native.load(), identity, 120.0, HeldBlocks(2.0, 1), ReportFile(None))
        self.scheduler.set_ranks({0: rank.worker.hello()})
        self.reported = Counter()

    def write(self, blocks: list[int], tokens: range) -> None:
        """As of `Side`, on the GPU."""
        super().write(blocks, tokens)
        self.rank.put()

    def holds(self, blocks: list[int], tokens: range) -> bool:
        """As of `Side`, on the GPU."""
        self.rank.get()
        return super().holds(blocks, tokens)


def a_prompt(server: Side, number: int) -> list[int]:
    """Two KV blocks and a part of one; another prompt for each number."""
    return prompt(2 * server.shape.block_tokens + 1, 1000 * number)


def load(prefill: Side, decode: Side) -> None:
    """Step both servers until decode's load has ended well."""
    received: set[str] = set()

    def ended() -> bool:
        received.update(decode.step().received)
        prefill.step()
        return bool(received)

    assert until(ended), "the load has not ended"
    assert not decode.ranks[0].worker.take_invalid_blocks(), "the load has failed"


def check_order(cuda: Cuda, prefill: GpuSide, decode: GpuSide) -> None:
    """What was launched on the engines' streams and has not run yet: prefill's writes are waited for, and
    decode's use of the blocks; a load is not reported before its bytes are there."""
    there, here = [7, 2, 9], [4, 1, 3]
    cuda.say("delay micros=2000")  # each copy begins so late that whoever does not wait for it is seen to
    for number in range(4):
        tokens, written, used = a_prompt(prefill, number), 16 + number, 99
        # One of the two is late, which the other must not hide.
        late = (KERNEL_MICROS, 0) if number % 2 else (0, KERNEL_MICROS)
        params = prefill.offer(tokens, there, f"p-{number}")
        prefill.rank.array.fill(prefill.rank.stream, written, late[0])
        prefill.step()
        wanted: Any = request(f"d-{number}", tokens, params)
        assert decode.admit(wanted, here) == len(tokens)
        decode.rank.array.fill(decode.rank.stream, used, late[1])
        load(prefill, decode)
        decode.rank.get()
        slots = np.arange(len(tokens))
        blocks, slots = np.array(here)[slots // decode.shape.block_tokens], slots % decode.shape.block_tokens
        found = set(decode.rank.kv[:, blocks, :, slots].flatten().tolist())
        assert found == {written * ONES}, f"{found}: KV of an earlier or a later time"
        decode.rank.kv[:, here] = used * ONES
        assert (decode.rank.host == used).all(), "bytes of other blocks have changed"
