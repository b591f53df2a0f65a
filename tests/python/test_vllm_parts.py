"""Parts of the vLLM adapter by themselves: options, KV tensor layouts, digests."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.python.fake_engine import FakeNative
from tests.python.vllm_harness import FakeTensor, dense, kv_tensors, scheduler_output, stand_in

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module", autouse=True)
def kvik_vllm() -> Iterator[ModuleType]:
    with stand_in("0.32.0") as module:
        yield module


def part(name: str) -> Any:
    return sys.modules.get(f"kvik.vllm.{name}") or sys.modules[f"kvik.handover.{name}"]


def test_options() -> None:
    config = part("config")
    make = config.ConnectorConfig.from_extra
    made = make({"expiry": 5, "cpus": [0, 1]}, env={"KVIK_SECRET": "a long secret"})
    assert (made.expiry, made.cpus, made.secret) == (5.0, (0, 1), "a long secret")
    assert make({"secret": "my own one"}, env={"KVIK_SECRET": "a long secret"}).secret == "my own one"  # noqa: S105
    assert make({"secret": None}, env={"KVIK_SECRET": "a long secret"}).secret == "a long secret"  # noqa: S105
    for extra, text in (
        ({"lissten": "x"}, "did you mean 'listen'"),
        ({"zzz": 1}, "known: listen"),
        ({"channels": "4"}, "channels is a whole number from 1 to 64, not '4'"),
        ({"channels": True}, "channels is a whole number"),
        ({"channels": 0}, "from 1 to 64"),
        ({"cpus": [0.5]}, "cpus is CPU numbers"),
        ({"deadline": 0}, "deadline is a number of seconds above 0"),
        ({"deadline": float("nan")}, "above 0"),
        ({"expiry": 700}, "max_expiry 600 is below expiry 700"),
    ):
        with pytest.raises(ValueError, match=text):
            make(extra, env={})


def test_fixed_ports_are_counted_by_rank() -> None:
    make = part("config").ConnectorConfig
    for listen, at_rank_3 in (
        ("127.0.0.1:0", "127.0.0.1:0"),
        ("10.0.0.1:7000", "10.0.0.1:7003"),
        ("[::1]:7000", "[::1]:7003"),
        ("::1", "::1"),
        ("host", "host"),
    ):
        assert make(listen=(listen,)).engine_options("n", 3)["listen"] == [at_rank_3]
        assert make(advertise=(listen,)).engine_options("n", 3)["advertise"] == [at_rank_3]


def test_nics_of_each_rank() -> None:
    make = part("config").ConnectorConfig.from_extra
    variable = {"KVIK_NICS": "efa"}
    for nics, of_ranks in (
        ("verbs:mlx5_0,mlx5_1@3", {0: "verbs:mlx5_0,mlx5_1@3", 7: "verbs:mlx5_0,mlx5_1@3"}),
        (None, {0: "efa", 1: "efa"}),
        (["verbs:mlx5_0", "verbs:mlx5_1"], {0: "verbs:mlx5_0", 1: "verbs:mlx5_1"}),
        # Ranks whose GPUs have one NIC in common.
        (["verbs:mlx5_0", "verbs:mlx5_0"], {0: "verbs:mlx5_0", 1: "verbs:mlx5_0"}),
        ({"1": "efa:b", "0": "efa:a", "10": "efa:c"}, {0: "efa:a", 1: "efa:b", 10: "efa:c"}),
    ):
        made = make({"nics": nics}, env=variable)
        for rank, wanted in of_ranks.items():
            assert made.engine_options("n", rank)["nics"] == wanted
    assert "nics" not in make({}, env={}).engine_options("n", 0)


@pytest.mark.parametrize(
    ("nics", "text"),
    [
        ([], "nics is the name of NICs of 1 to 256 bytes; or one for each rank of the server: a list"),
        ({}, "or an object from rank number to value, not {}"),
        (4, "or an object from rank number to value, not 4"),
        (["efa", 4], "nics of rank 1 is the name of NICs of 1 to 256 bytes, not 4"),
        (["efa", None], "nics of rank 1 is the name"),
        ({"0": "efa", "3": ""}, "nics of rank 3 is the name"),
        ({"0": ["efa"]}, "nics of rank 0 is the name"),
        ({"0": "efa", 0: "efa"}, "nics names rank 0 twice"),
        *(
            ({"0": "efa", key: "efa"}, f"nics names ranks by their numbers, from 0, not {key!r}")
            for key in ("", "a", "-1", "00", "01", " 1", "1.0", "+1", "²", "1" * 7, -1, True, None)
        ),
    ],
)
def test_nics_that_name_no_ranks_are_refused(nics: Any, text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)) as told:
        part("config").ConnectorConfig.from_extra({"nics": nics}, env={})
    assert str(told.value).startswith("kv_connector_extra_config: nics ")


@pytest.mark.parametrize(
    ("nics", "server", "text"),
    [
        ("efa", (2, 0, 1), None),
        (["a"], (1, 0, 1), None),
        (["a", "b"], (2, 0, 1), None),
        (["a", "b", "c", "d"], (2, 1, 2), None),
        (["a", "b", "c", "d"], (2, 1, 1), None),  # a second replica that vLLM says to be the only one
        ({"2": "c", "3": "d"}, (2, 1, 2), None),  # another machine has the first
        (["a"], (2, 0, 1), "nics names no NICs for rank 1 of this server, but for 0"),
        (["a", "b"], (1, 2, 1), "nics names no NICs for rank 2 of this server, but for 0, 1"),
        ({"1": "b"}, (2, 0, 1), "nics names no NICs for rank 0 of this server, but for 1"),
        (["a", "b", "c"], (2, 0, 1), "nics names rank 2, and not rank 3, which is of the same replica"),
        ({"0": "a", "1": "b", "7": "h"}, (2, 0, 1), "nics names rank 7, and not rank 6"),
        (["a", "b", "c"], (1, 0, 2), "nics names rank 2, and this server has ranks 0 to 1"),
    ],
)
def test_nics_fit_the_ranks_of_the_server(nics: Any, server: tuple[int, int, int], text: str | None) -> None:
    config = part("config").ConnectorConfig.from_extra({"nics": nics}, env={})
    if text is None:
        config.check_ranks(*server)
    else:
        with pytest.raises(ValueError, match=f"kv_connector_extra_config: {text}"):
            config.check_ranks(*server)


def test_ranks_on_this_host_are_those_that_vllm_says() -> None:
    on_host = sys.modules["kvik.vllm.connector"]._on_host

    def told(tp: int, pp: int, **more: int) -> int:
        parallel = SimpleNamespace(tensor_parallel_size=tp, pipeline_parallel_size=pp, **more)
        return int(on_host(parallel))

    assert told(2, 3) == 6
    assert told(2, 3, data_parallel_size_local=1, local_world_size=6) == 6
    assert told(8, 2, local_world_size=8) == 8
    assert told(2, 1, data_parallel_size_local=4, local_world_size=2) == 8
    assert told(2, 1, data_parallel_size_local=0) == 2


def test_layout_of_the_usual_tensors() -> None:
    memory = part("layout").inspect(kv_tensors(blocks=16, layers=11), gqa(4, tp=2))
    assert memory.nbytes == 11 * 16 * 128
    assert memory.num_blocks == 16
    assert memory.layer_offsets == [layer * 16 * 128 for layer in range(11)]  # layer 10 comes after layer 9
    assert memory.block_stride == memory.shape.block_bytes == 128
    assert str(memory.shape) == (
        "kind=gqa layers=11 kv_heads=4 content=8 dtype=bfloat16 tp=2 stages=11 heads=2 block_tokens=4 "
        f"order=H[cpu {platform.machine()}] block_bytes=128"
    )
    layout = memory.layout(FakeNative())
    assert (layout.run_bytes, layout.slices, layout.layers) == (64, 2, 11)  # a slice is one head


def gqa(kv_heads: int = 2, tp: int = 1, block_tokens: int = 4) -> Any:
    return part("layout").ModelKv("gqa", kv_heads, tp, block_tokens)


def test_layout_of_other_orders() -> None:
    inspect = part("layout").inspect
    tensors = kv_tensors(blocks=16)
    shape, storage = (16, 2, 4, 8), next(iter(tensors.values())).storage
    tokens_outside = FakeTensor(shape, (64, 8, 16, 1), storage)
    outside = inspect({"l.0": tokens_outside}, gqa())
    assert outside.shape.order == f"[NHC cpu {platform.machine()}]"
    assert outside.layout(FakeNative()).slices == 1  # heads cannot be told apart
    one_head = FakeTensor((16, 1, 4, 8), (32, 12345, 8, 1), storage)
    assert inspect({"l.0": one_head}, gqa(1)).shape.heads_outermost
    packed = {f"l.{layer}": FakeTensor(shape, (192, 32, 8, 1), storage, 64 * layer) for layer in range(3)}
    memory = inspect(packed, gqa())
    assert memory.block_stride == 384
    assert memory.layer_offsets == [0, 128, 256]
    shared = dict(tensors) | {"model.layers.9.attn": tensors["model.layers.0.attn"]}
    assert inspect(shared, gqa()).shape.layers == 3


def test_layouts_that_are_refused_by_name() -> None:
    layout = part("layout")
    tensors = kv_tensors(blocks=16)
    first = tensors["model.layers.0.attn"]
    other = next(iter(kv_tensors(blocks=16).values()))
    for changed, text in (
        (replace(first, device=SimpleNamespace(type="xpu")), "of the host and of CUDA devices"),
        (replace(first, shape=(2, 16, 2, 4, 8), strides=dense((2, 16, 2, 4, 8))), "expected .blocks, heads"),
        (replace(first, strides=(128, 64, 16, 2)), "is one contiguous run"),
        (replace(first, strides=(128, 64, 16, 1)), "is one contiguous run"),
        (replace(first, strides=(128, 24, 8, 1)), "overlap"),
        (replace(first, strides=(32, 32, 8, 1)), "overlap"),
        (replace(first, dtype="torch.float16"), "differ between layers"),
        (other, "different storages"),
    ):
        with pytest.raises(layout.LayoutError, match=text):
            layout.inspect({**tensors, "model.layers.0.attn": changed}, gqa())
    with pytest.raises(layout.LayoutError, match="no KV tensors"):
        layout.inspect({}, gqa())
    with pytest.raises(layout.LayoutError, match="has 2 KV heads; 6 of the model among 2 ranks are 3"):
        layout.inspect(tensors, gqa(6, tp=2))
    with pytest.raises(layout.LayoutError, match="blocks of 4 slots, vLLM's scheduler counts blocks of 16"):
        layout.inspect(tensors, gqa(block_tokens=16))
    with pytest.raises(layout.LayoutError, match="for MLA"):
        layout.inspect(kv_tensors(blocks=16, heads=None), gqa(1))


def test_layout_of_tensors_on_a_gpu() -> None:
    """Most backends pack nothing, and servers with two of them fit; of another one both need the same."""
    layout = part("layout")
    tensors = {
        name: replace(tensor, device=SimpleNamespace(type="cuda"))
        for name, tensor in kv_tensors(blocks=16).items()
    }
    for backends, order in (
        (("FLASH_ATTN",), "HNC"),
        (("FLASHINFER", "TRITON_ATTN"), "HNC"),
        (("NEW_ATTN",), "H[NEW_ATTN]"),
        (("FLASH_ATTN", "NEW_ATTN"), "H[FLASH_ATTN+NEW_ATTN]"),
    ):
        model = layout.ModelKv("gqa", 2, 1, 4, 0, backends)
        assert layout.inspect(tensors, model).shape.order == order
        # No driver is here to say which one.
        assert layout.inspect(tensors, model).gpu == ""
    assert layout.inspect(kv_tensors(blocks=16), gqa()).gpu is None
    with pytest.raises(layout.LayoutError, match="which attention backend"):
        layout.inspect(tensors, gqa())


def test_heads_may_lie_apart() -> None:
    """Around the layers of a block, and around all blocks."""
    inspect, storage = part("layout").inspect, next(iter(kv_tensors(blocks=16).values())).storage
    shape = (16, 2, 4, 8)
    around_layers = {f"l.{n}": FakeTensor(shape, (192, 96, 8, 1), storage, 32 * n) for n in range(3)}
    around_blocks = {f"l.{n}": FakeTensor(shape, (32, 512, 8, 1), storage, 1024 * n) for n in range(3)}
    for tensors, head_stride in ((around_layers, 192), (around_blocks, 1024)):
        memory = inspect(tensors, gqa())
        assert (memory.head_stride, memory.shape.block_bytes) == (head_stride, 128)
        assert memory.layout(FakeNative()).slices == 2


@pytest.mark.parametrize("name", ["README.md", "README.ja.md", "README.zh.md"])
def test_the_readme_says_whose_pages_may_lie_on_a_gpu(name: str) -> None:
    (row,) = [
        line for line in (ROOT / name).read_text().splitlines() if line.startswith("|") and "CUDA" in line
    ]
    _, there, missing, _ = row.split("|")
    assert "API" in there
    assert "vLLM connector" in there
    assert "GPU" in missing


@pytest.mark.parametrize("heads", [None, 1])
def test_layout_of_mla(heads: int | None) -> None:
    """One latent that every rank has, with or without a dimension for it."""
    inspect, model = part("layout").inspect, part("layout").ModelKv("mla", 1, 4, 4)
    memory = inspect(kv_tensors(blocks=16, heads=heads, content=24), model)
    assert (memory.shape.heads, memory.shape.kv_heads, memory.shape.order) == (1, 1, "HNC")
    assert memory.shape.block_bytes == memory.block_stride == 4 * 24 * 2


def test_steps_of_which_another_connector_loads_kv() -> None:
    """Until vLLM has looked at their outputs, which come in the steps' order."""
    flight = part("steps").Flight()
    for loads in (False, True, False):
        flight.began(scheduler_output([("r", [1, 2], 4, 3)], loads=loads))
    seen = [flight.loading]
    for _ in range(4):
        flight.ended()
        seen.append(flight.loading)
    assert seen == [True, True, False, False, False]


def test_vllm_before_0_30_does_not_say_what_is_loaded_during_a_step() -> None:
    for computed, resumed, loading in ((0, set(), False), (4, set(), True), (0, {"r"}, True)):
        output = scheduler_output([("r", [1, 2], computed, 3)])
        output.scheduled_cached_reqs.resumed_req_ids = resumed
        del output.has_sync_kv_loads
        flight = part("steps").Flight()
        flight.began(output)
        assert flight.loading == loading
