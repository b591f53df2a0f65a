"""Servers of `handover_harness.py` whose KV lies on a GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from kvik.handover import native
from kvik.handover.config import ConnectorConfig
from kvik.handover.holding import HeldBlocks
from kvik.handover.mapping import heads_of
from kvik.handover.memory import KvMemory
from kvik.handover.protocol import KvShape, RankPlace
from kvik.handover.report import ReportFile
from kvik.handover.scheduler import Identity, SchedulerSide
from kvik.handover.worker import WorkerSide
from tests.python.gpu import Array, Cuda
from tests.python.handover_harness import ITEM, Kv, Rank, Side, prompt, request, shape_of
from tests.python.peers import Bytes, until

KERNEL_MICROS = 100_000  # a kernel of this length is seen by whoever does not wait for it
ONES = 0x01010101


class GpuRank(Rank):
    """A rank whose KV lies on a GPU. `host` is a copy of it, and `kv` a view of that.

    `make` says how the KV lies in an array of `nbytes`.
    """

    def __init__(
        self, cuda: Cuda, role: str, nbytes: int, make: Callable[[Array], KvMemory], transport: str
    ) -> None:
        self.array, self.stream = cuda.array(nbytes), cuda.stream()
        memory = make(self.array)
        self.shape = memory.shape
        self.block_tokens, self.layers = memory.shape.block_tokens, (0, memory.shape.layers)
        self.heads = heads_of(0, 1, memory.shape.kv_heads)
        self.host: Bytes = np.zeros(nbytes, np.uint8)
        self.kv = view_of(self.host, memory)
        config = ConnectorConfig(transport=transport)
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
    """A server of one rank on a GPU."""

    def __init__(
        self,
        cuda: Cuda,
        role: str,
        nbytes: int,
        make: Callable[[Array], KvMemory],
        transport: str = "tcp",
    ) -> None:
        self.rank = rank = GpuRank(cuda, role, nbytes, make, transport)
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

    def give(self, number: int, blocks: list[int], then: tuple[int, int] | None = None) -> dict[str, Any]:
        """Offer the KV of a prompt; the parameters. `then`: what a kernel, launched behind the prompt's own,
        sets all bytes to, and after how many microseconds."""
        params = self.offer(a_prompt(self, number), blocks, f"p-{number}")
        if then is not None:
            self.rank.array.fill(self.rank.stream, *then)
        self.step()
        return params


class Prefill(Protocol):
    """A `GpuSide` as decode needs it, in this process or in another one."""

    shape: KvShape

    def give(self, number: int, blocks: list[int], then: tuple[int, int] | None = None) -> dict[str, Any]: ...
    def step(self) -> object: ...


def small(cuda: Cuda, role: str, transport: str = "tcp") -> GpuSide:
    """A server of a small model, whose layers lie one behind the other."""
    shape, blocks = shape_of(), 12
    layer = blocks * shape.block_bytes
    nbytes, offsets = layer * shape.layers, [layer * number for number in range(shape.layers)]
    head = shape.block_bytes // shape.heads

    def make(array: Array) -> KvMemory:
        return KvMemory(
            array.at, nbytes, blocks, shape.block_bytes, ("0", "1"), offsets, head, shape, owner=None
        )

    return GpuSide(cuda, role, nbytes, make, transport)


def a_prompt(server: Prefill | Side, number: int) -> list[int]:
    """Two KV blocks and a part of one; another prompt for each number."""
    return prompt(2 * server.shape.block_tokens + 1, 1000 * number)


def load(prefill: Prefill, decode: GpuSide) -> None:
    """Step both servers until decode's load has ended well."""
    received: set[str] = set()

    def ended() -> bool:
        received.update(decode.step().received)
        prefill.step()
        return bool(received)

    assert until(ended), "the load has not ended"
    assert not decode.ranks[0].worker.take_invalid_blocks(), "the load has failed"


def hand_over(prefill: Prefill, decode: GpuSide, number: int) -> None:
    """One prompt from server to server: every byte of it arrives, and no other byte changes."""
    tokens, there, here = a_prompt(prefill, number), [7, 2, 9], [4, 1, 3]
    params = prefill.give(number, there)
    decode.rank.host[:] = 0
    decode.rank.put()
    wanted: Any = request(f"d-{number}", tokens, params)
    assert decode.admit(wanted, here) == len(tokens)
    load(prefill, decode)
    assert decode.holds(here, range(len(tokens))), "the KV is not that of the prompt"
    everything = decode.rank.host.copy()
    decode.rank.kv[:, here] = 0
    assert everything.any()
    assert not decode.rank.host.any(), "bytes outside the KV blocks have changed"


def check_order(cuda: Cuda, prefill: Prefill, decode: GpuSide) -> None:
    """What was launched on the engines' streams and has not run yet: prefill's writes are waited for, and
    decode's use of the blocks; a load is not reported before its bytes are there."""
    there, here = [7, 2, 9], [4, 1, 3]
    cuda.say("delay micros=2000")  # each copy begins so late that whoever does not wait for it is seen to
    for number in range(4):
        tokens, written, used = a_prompt(prefill, number), 16 + number, 99
        # One of the two is late, which the other must not hide.
        late = (KERNEL_MICROS, 0) if number % 2 else (0, KERNEL_MICROS)
        params = prefill.give(number, there, (written, late[0]))
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
