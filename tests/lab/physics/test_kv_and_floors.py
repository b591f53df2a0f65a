"""Bytes of KV, and times that no implementation goes below, against arithmetic by hand."""

from __future__ import annotations

from typing import Any

import pytest

from kvik_lab.errors import LabError
from kvik_lab.physics.floors import decode_floor, prefill_floor, prefill_flops, transfer_floor
from kvik_lab.physics.hardware import ACCELERATORS, accelerator
from kvik_lab.physics.kv import ModelKv, blocks_kept, kv_size, stage_layers
from kvik_lab.physics.units import Rate, parse_bytes, parse_seconds
from tests.lab.redrawn.bandwidth import implied_bandwidth

CONFIG: dict[str, Any] = {
    "model_type": "gemma2",
    "hidden_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 4096,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
    "sliding_window": 64,
}
LAYER_TOKEN = 2 * 4 * 64 * 2  # K and V, heads, head size, bytes of bfloat16


def test_the_published_size_of_a_token_is_both_k_and_v() -> None:
    """57,344 bytes for Qwen2.5-7B, which an article calls one direction: they are K and V together."""
    model = ModelKv.resolve("qwen2.5-7b")
    assert model.bytes_per_token() == 2 * 28 * 4 * 128 * 2 == 57_344
    assert kv_size(model, 1000, 1).total == 57_344_000  # 54.7 MiB, not the 109 MB that were printed


def test_layers_with_a_window_keep_the_blocks_that_the_next_token_sees() -> None:
    assert blocks_kept(100, 16) == 7
    assert blocks_kept(100, 16, window=64) == 7 - (100 - 63) // 16
    assert blocks_kept(10_000, 16, window=64) == 625 - (10_000 - 63) // 16
    assert blocks_kept(1, 16, window=64) == 1
    assert blocks_kept(0, 16) == 0


def test_a_model_with_windows_in_every_second_layer_adds_both_kinds() -> None:
    model = ModelKv.from_config(CONFIG)
    assert model.windows == (64, None, 64, None, 64, None)
    assert kv_size(model, 1600, 16).total == (3 * 100 + 3 * blocks_kept(1600, 16, 64)) * 16 * LAYER_TOKEN
    whole = ModelKv.from_config({**CONFIG, "sliding_window": None})
    assert kv_size(whole, 1600, 16).total == 600 * 16 * LAYER_TOKEN


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"model_type": "mistral"}, (64,) * 6),
        ({"model_type": "gemma3_text"}, (64,) * 5 + (None,)),
        ({"model_type": "cohere2"}, (65, 65, 65, None, 65, 65)),
        ({"layer_types": ["full_attention"] * 5 + ["sliding_attention"]}, (None,) * 5 + (64,)),
        ({"model_type": "qwen2", "use_sliding_window": False}, (None,) * 6),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 4},
            (None,) * 4 + (64,) * 2,
        ),
        ({"sliding_window": 8192}, (None,) * 6),
    ],
)
def test_which_layers_have_the_window(changes: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert ModelKv.from_config({**CONFIG, **changes}).windows == windows


def test_chunks_are_refused_and_not_taken_for_windows() -> None:
    with pytest.raises(LabError, match="chunks, which is no window"):
        ModelKv.from_config({**CONFIG, "attention_chunk_size": 64})


def test_ranks_and_stages_divide_a_request() -> None:
    model = ModelKv.resolve("llama-3.1-70b")
    size = kv_size(model, 4096, 16, tp=4, pp=3)
    assert [len(stage) for stage in stage_layers(80, 3)] == [27, 27, 26]
    assert 4 * sum(size.by_rank) == size.total == 4096 * 327_680
    assert size.blocks == 27 * 256
    copied = kv_size(model, 4096, 16, tp=16)  # each head on two ranks: held twice, moved once
    assert 16 * copied.by_rank[0] == 2 * copied.total
    with pytest.raises(LabError, match="KV heads"):
        kv_size(ModelKv.resolve("layers=2,kv_heads=3,head_size=8"), 1, 1, tp=2)
    with pytest.raises(LabError, match="pipeline stages"):
        stage_layers(4, 5)


def test_bits_and_bytes_are_never_taken_for_each_other() -> None:
    assert Rate.parse("200Gbit").bytes_per_second == 25e9
    assert Rate.parse("200Gb/s") == Rate.parse("200Gbps") == Rate.of_bits(200e9) == Rate.parse("25GB/s")
    assert Rate.parse("1GiB/s").bytes_per_second == 2**30
    assert Rate.parse("1KB/s").bytes_per_second == 1000
    assert Rate(25e9).bits_per_second == 200e9
    assert parse_seconds("200us") == pytest.approx(2e-4)
    assert parse_bytes("64MiB") == 64 * 2**20
    for text in ("25G", "25", "fast", "0Gbit", "-1GB/s"):
        with pytest.raises(LabError):
            Rate.parse(text)
    for text in ("5", "5 fortnights", ""):
        with pytest.raises(LabError):
            parse_seconds(text)


def test_floors_are_the_arithmetic_that_they_say() -> None:
    assert transfer_floor(57_344_000, Rate.of_bits(40e9)).seconds == pytest.approx(57_344_000 / 5e9)
    model = ModelKv.resolve("layers=2,kv_heads=2,head_size=8,query_heads=4,parameters=1000")
    # 2 * 1000 * 10 for the weights; 2 layers * 2 * 4 heads * (8 + 8) * 55 pairs for attention.
    assert prefill_flops(model, 10) == 20_000 + 2 * 2 * 4 * 16 * 55
    assert prefill_floor(model, 10, 1e6, 2).seconds == pytest.approx(prefill_flops(model, 10) / 2e6)
    step = decode_floor(model, 100, Rate(1e6), batch=3)
    assert step.seconds == pytest.approx((2 * 1000 + 3 * 100 * 2 * 2 * 16 * 2) / 1e6)
    with pytest.raises(LabError, match="how many parameters"):
        prefill_flops(ModelKv.resolve("layers=2,kv_heads=2,head_size=8"), 10)


def test_a_window_bounds_the_operations_of_attention() -> None:
    whole = ModelKv.resolve("layers=1,kv_heads=1,head_size=8,query_heads=1,parameters=1")
    bounded = ModelKv(whole.shape, (4,))
    # Tokens see 1, 2, 3, 4, 4, ... themselves included.
    assert prefill_flops(bounded, 6) - 12 == 2 * 16 * (1 + 2 + 3 + 4 + 4 + 4)
    assert prefill_flops(whole, 6) - 12 == 2 * 16 * 21


def test_a_prefill_that_was_served_from_a_cache_is_below_the_floor() -> None:
    """1.53 s for 32,599 tokens of a 32B model on two accelerators of 500 TFLOP/s; 2.1 s is the least."""
    model = ModelKv.resolve("qwen3-32b")
    floor = prefill_floor(model, 32_599, 500e12, 2)
    assert floor.seconds > 2.0 > 1.53
    own = ModelKv.resolve("layers=64,kv_heads=8,head_size=128,parameters=32800000000")
    assert prefill_flops(own, 32_599) == pytest.approx(2.14e15, rel=0.01)


def test_the_output_matrix_is_needed_for_one_token_of_a_prefill() -> None:
    shape = ModelKv.resolve("qwen2.5-7b").shape
    assert shape.output_parameters == 152_064 * 3584
    one, two = (prefill_flops(ModelKv.resolve("qwen2.5-7b"), tokens) for tokens in (1, 2))
    assert two - one < shape.flops_per_token  # type: ignore[operator]


def test_every_accelerator_names_its_source() -> None:
    assert all(item.source for item in ACCELERATORS.values())
    assert accelerator("H100").dense_flops == pytest.approx(989.5e12)
    with pytest.raises(LabError, match="did you mean 'h100'"):
        accelerator("h10")


def test_the_bandwidth_that_a_difference_implies() -> None:
    """Qwen2.5-7B, 12K and 32K tokens over TCP: 3.029 s and 9.676 s beyond the prefill, 40 Gbit/s line."""
    line = Rate.of_bits(40e9)
    model = ModelKv.resolve("qwen2.5-7b")
    found = implied_bandwidth(
        kv_size(model, 3800, 1).total, 3.16141, 0.86836, error=0.05, freedom=58, line=line
    )
    assert found.bytes_per_second == pytest.approx(3800 * 57_344 / 2.29305)
    assert found.of_line is not None
    assert found.of_line < 0.02
    assert "not what takes the time" in found.sentence
    assert found.lo is not None
    assert found.hi is not None
    assert found.bytes_per_second is not None
    assert found.lo < found.bytes_per_second < found.hi
    vague = implied_bandwidth(1e9, 1.0, 0.9, error=0.2, line=line)
    assert vague.hi is None
    assert "cannot have moved" in implied_bandwidth(1e9, 1.0, 0.99, error=1e-4, line=line).sentence
    assert implied_bandwidth(1e9, 1.0, 1.1).bytes_per_second is None
