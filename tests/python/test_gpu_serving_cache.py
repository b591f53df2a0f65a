"""A serving engine's store where its KV lies on a GPU."""

import numpy as np
import pytest

import kvik
from kvik.serving_cache.config import CacheConfig
from kvik.serving_cache.plan import LINK_BYTES, CacheLoad, CachePlan, Save
from kvik.serving_cache.tiers import Tiers
from kvik.serving_cache.worker import CacheRank
from tests.python.gpu import Array, Cuda, alone
from tests.python.peers import random_bytes, random_seed, until
from tests.python.store_rig import LAYERS, NAMESPACE, PAGES, RUN, Served

LAYOUT = kvik.Layout(PAGES, RUN, layers=LAYERS, layer_stride=PAGES * RUN)
BLOCKS = 8
DEADLINE = 60.0
KERNEL_MICROS = 100_000  # a kernel of this length is seen by whoever does not wait for it
WRITTEN, USED = 7, 9


class GpuRank:
    """A rank whose KV is on a GPU, and the stream that its kernels are launched on."""

    def __init__(self, cuda: Cuda, engine: kvik.Engine, config: CacheConfig) -> None:
        self.array, self.stream = Array(cuda, LAYOUT.nbytes, {}), cuda.stream()
        self.region = engine.register(self.array)
        tiers = Tiers(kvik, config, engine, self.region, LAYOUT, lambda: self.stream)
        self._rank = CacheRank(tiers, config, 0)
        self._rank.begin_step(CachePlan(namespaces=[NAMESPACE]))
        self.counts: dict[str, float] = {}

    def save(self, links: bytes, blocks: list[int]) -> None:
        """Until it has ended."""
        self._rank.begin_step(CachePlan(saves=[Save("s", links, blocks)]))
        assert until(lambda: self._collected().take_saved() == ["s"])

    def load(self, links: bytes, blocks: list[int], deadline: float = DEADLINE) -> set[int]:
        """Until it has ended: the KV blocks that were not read."""
        self._rank.begin_step(CachePlan(loads=[CacheLoad("r", links, blocks, deadline)]))
        assert until(lambda: self._collected().take_received() == {"r"})
        return self._rank.take_invalid_blocks()

    def _collected(self) -> CacheRank:
        self._rank.collect()
        for name, count in self._rank.take_stats().items():
            self.counts[name] = self.counts.get(name, 0) + count
        return self._rank

    def close(self) -> None:
        """Nothing is on its way."""
        self._rank.close()
        self.region.close()
        self.array.free()

    def values(self, blocks: list[int]) -> set[int]:
        """What the bytes of these KV blocks are."""
        return set(np.unique(self.array.now.reshape(LAYERS, PAGES, RUN)[:, blocks]).tolist())


def ordered(cuda: Cuda, config: CacheConfig, tier: str) -> None:
    """KV is saved behind the kernel that writes it, and loaded behind the one that still uses its blocks."""
    there, here, links = (
        [*range(BLOCKS)],
        [*range(40, 40 + BLOCKS)],
        random_bytes(BLOCKS * LINK_BYTES, random_seed()),
    )
    with kvik.Engine(transport="tcp") as engine:
        rank = GpuRank(cuda, engine, config)
        rank.array.fill(rank.stream, WRITTEN, KERNEL_MICROS)
        rank.save(links.tobytes(), there)
        assert rank.counts[f"cache_{tier}_stored_blocks"] == BLOCKS, rank.counts
        rank.array.fill(rank.stream, USED, KERNEL_MICROS)
        assert rank.load(links.tobytes(), here) == set()
        assert rank.counts[f"cache_{tier}_blocks"] == BLOCKS, rank.counts
        assert rank.values(here) == {WRITTEN}
        assert rank.values([page for page in range(PAGES) if page not in here]) == {USED}
        rank.close()


@alone
def test_kv_of_a_gpu_is_saved_and_loaded_behind_what_its_stream_was_given(cuda: Cuda) -> None:
    cuda.say("delay micros=2000")  # each copy begins so late that whoever does not wait for it is seen to
    ordered(cuda, CacheConfig(host_cache=4 << 20, deadline=DEADLINE), "host")
    with Served("--memory", "4MiB") as served:
        ordered(cuda, CacheConfig(address=served.address, deadline=DEADLINE), "remote")


@alone
def test_a_stream_that_stands_still_costs_a_load_its_deadline(cuda: Cuda) -> None:
    """The KV blocks are computed, and nothing lands in them afterwards."""
    links, blocks = random_bytes(BLOCKS * LINK_BYTES, random_seed()).tobytes(), [*range(BLOCKS)]
    config = CacheConfig(host_cache=4 << 20, deadline=DEADLINE)
    with kvik.Engine(transport="tcp") as engine:
        rank = GpuRank(cuda, engine, config)
        rank.array.fill(rank.stream, WRITTEN, 0)
        rank.save(links, blocks)
        cuda.say("stall")
        rank.array.fill(rank.stream, USED, 0)
        assert rank.load(links, blocks, 0.2) == set(blocks)
        assert rank.counts["cache_loads_failed_load_deadline_exceeded"] == 1
        cuda.say("release")
        mark = rank.region.mark(rank.stream)
        mark.wait(DEADLINE)
        assert rank.values(blocks) == {USED}
        rank.close()


@alone
def test_marks_in_a_stream(cuda: Cuda) -> None:
    with kvik.Engine() as engine:
        array, stream = Array(cuda, 1 << 20, {}), cuda.stream()
        region = engine.register(array)
        cuda.say("stall")
        array.fill(stream, WRITTEN, 0)
        mark = region.mark(stream)
        with pytest.raises(kvik.WaitTimeout, match="wait again"):
            mark.wait(0.05)
        cuda.say("release")
        mark.wait(DEADLINE)
        mark.wait(0)
        assert set(array.now.tolist()) == {WRITTEN}
        with pytest.raises(kvik.InvalidArgument, match="no stream orders"):
            engine.allocate(4096).mark(stream)
        with pytest.raises(TypeError, match="stream of a GPU"):
            region.mark("a stream")  # type: ignore[arg-type]
        cuda.say("stall")
        array.fill(stream, USED, 0)
        left = region.mark(stream)
        engine.close()
        with pytest.raises(kvik.EngineClosed):
            left.wait(DEADLINE)
        with pytest.raises(kvik.EngineClosed):
            region.mark(stream)
        cuda.say("release")
