"""What models' KV comes to: arithmetic, ranks, configurations in all their spellings, and what is refused."""

import dataclasses
import json
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import kvik
from kvik.demo import checkpoint
from kvik.shapes import ModelShape, ShapeError, layer_windows, presets

# Bytes a token in all layers, worked out by hand: layers * KV heads * 2 * head size * bytes, or latents.
BYTES_A_TOKEN = {
    "tiny": 4 * 4 * 2 * 32 * 4,
    "llama-3.1-8b": 32 * 8 * 2 * 128 * 2,
    "llama-3.1-70b": 80 * 8 * 2 * 128 * 2,
    "mistral-7b": 32 * 8 * 2 * 128 * 2,
    "qwen2.5-7b": 28 * 4 * 2 * 128 * 2,
    "qwen3-32b": 64 * 8 * 2 * 128 * 2,
    "gemma-2b": 18 * 1 * 2 * 256 * 2,
    "gemma-7b": 28 * 16 * 2 * 256 * 2,
    "phi-2": 32 * 32 * 2 * 80 * 2,
    "deepseek-v2-lite": 27 * (512 + 64) * 2,
    "deepseek-v3": 61 * (512 + 64) * 2,
}
# What the model cards say, in thousand millions: all parameters, and those that a token uses.
CARDS = {
    "llama-3.1-8b": (8.03, None),
    "llama-3.1-70b": (70.6, None),
    "qwen2.5-7b": (7.61, None),
    "qwen3-32b": (32.8, None),
    "deepseek-v2-lite": (15.7, 2.4),
    "deepseek-v3": (671, 37),
}
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 256,
    "torch_dtype": "float16",
}


def with_keys(**changes: Any) -> dict[str, Any]:
    """The small configuration with other values; None takes a key away."""
    return {key: value for key, value in {**LLAMA, **changes}.items() if value is not None}


def test_presets() -> None:
    """Every preset has the bytes that were worked out by hand."""
    found = {preset.name: ModelShape.preset(preset.name).kv_bytes_per_token() for preset in presets()}
    assert found == BYTES_A_TOKEN


@pytest.mark.parametrize("name", CARDS)
def test_parameters(name: str) -> None:
    """The estimates are what the model cards say, as far as these round."""
    shape, (total, active) = ModelShape.preset(name), CARDS[name]
    assert shape.parameters == pytest.approx(total * 1e9, rel=0.01)
    if active is not None:
        assert shape.active_parameters == pytest.approx(active * 1e9, rel=0.03)
    assert shape.flops_per_token == 2 * (shape.active_parameters or 0)


def test_tiny_is_the_demo() -> None:
    """The preset and the checkpoint that the demo makes are the same model."""
    (tiny,) = (preset.config for preset in presets() if preset.name == "tiny")
    shared = tiny.keys() & checkpoint.SPEC.keys()
    assert {key: tiny[key] for key in shared} == {key: checkpoint.SPEC[key] for key in shared}
    assert tiny.keys() - shared == {"architectures", "model_type", "torch_dtype"}
    assert ModelShape.preset("tiny").kv_bytes_per_token() == checkpoint.KV_BYTES_PER_TOKEN


def test_ranks_hold_every_head() -> None:
    """For random models and sizes: each head is on equally many ranks, none is cut, and bytes add up."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(300):
        kv_heads = rng.choice([1, 2, 3, 4, 6, 8, 16])
        shape = ModelShape(
            name="random",
            layers=rng.randint(1, 90),
            kv_heads=kv_heads,
            head_size=rng.choice([64, 80, 128, 192]),
            value_size=rng.choice([None, 64, 128]),
            dtype=rng.choice(["bf16", "fp16", "fp32", "fp8"]),
        )
        tp = rng.choice([size for size in range(1, 33) if kv_heads % size == 0 or size % kv_heads == 0])
        ranks = [shape.of_rank(rng.randint(1, 256), tp, rank) for rank in range(tp)]
        held = Counter(head for rank in ranks for head in rank.heads)
        copies = max(1, tp // kv_heads)
        assert held == dict.fromkeys(range(kv_heads), copies), (shape, tp)
        assert sum(shape.kv_bytes_per_token(tp) for _ in ranks) == copies * shape.kv_bytes_per_token()
        for rank in ranks:
            assert rank.page_bytes == shape.page_bytes(rank.page_tokens, tp)
            assert rank.page_bytes == rank.page_tokens * shape.kv_bytes_per_token(tp)


def test_latents_are_on_every_rank() -> None:
    """A latent is not split: each rank keeps as much as one alone."""
    shape = ModelShape.preset("deepseek-v3")
    for tp in (1, 2, 4, 8, 16, 128):
        assert [shape.heads_of_rank(tp, rank) for rank in (0, tp - 1)] == [range(1), range(1)]
        assert shape.kv_bytes_per_token(tp) == 61 * 576 * 2


def test_layout() -> None:
    """The kvik layout of a region has one run a head, one after the other, layer after layer."""
    rank = ModelShape.preset("llama-3.1-8b").of_rank(page_tokens=16, tp=2, rank=1)
    layout = rank.layout(pages=10)
    assert rank.heads == range(4, 8)
    assert layout.run_bytes == rank.head_bytes == 16 * 256 * 2
    assert (layout.slices, layout.slice_stride) == (4, rank.head_bytes)
    assert layout.page_stride == rank.block_bytes == 4 * rank.head_bytes
    assert layout.layer_stride == rank.layer_stride(10) == 10 * rank.block_bytes
    assert (layout.layers, layout.nbytes) == (32, 10 * rank.page_bytes)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"kv_heads": 2, "head_size": 8, "dtype": "float16", "max_context": 256}),
        ({"num_key_value_heads": None}, {"kv_heads": 8}),
        ({"head_dim": 24}, {"head_size": 24}),
        ({"head_dim": 0}, {"head_size": 8}),
        ({"torch_dtype": None, "dtype": "bfloat16"}, {"dtype": "bfloat16"}),
        ({"torch_dtype": "torch.float32"}, {"dtype": "float32"}),
        ({"multi_query": True}, {"kv_heads": 1}),
        ({"multi_query": True, "new_decoder_architecture": True}, {"kv_heads": 2}),
        ({"num_key_value_heads": None, "attn_config": {"kv_n_heads": 4}}, {"kv_heads": 4}),
        ({"sliding_window": 128, "use_sliding_window": False}, {"layers": 3}),
        ({"sliding_window": 256}, {"layers": 3}),
        ({"sliding_window": 0}, {"layers": 3}),
        ({"sliding_window": 128, "layer_types": ["full_attention"] * 3}, {"layers": 3}),
        ({"is_encoder_decoder": False, "cross_attention_layers": []}, {"layers": 3}),
        ({"max_position_embeddings": 512, "max_seq_len": 128}, {"max_context": 128}),
    ],
)
def test_config_keys(changes: dict[str, Any], expected: dict[str, Any]) -> None:
    """The keys that models use for one and the same thing, and what stands for those that are not there."""
    shape = ModelShape.from_config(with_keys(**changes))
    assert {key: getattr(shape, key) for key in expected} == expected


def test_nested_config() -> None:
    """A multimodal model's language part counts; the element type may stand outside of it."""
    inner = with_keys(torch_dtype=None)
    for outer in (
        {"torch_dtype": "bfloat16", "text_config": inner, "vision_config": {"hidden_size": 9}},
        {"dtype": "bfloat16", "thinker_config": {"text_config": inner}},
        {"llm_config": with_keys(torch_dtype="bfloat16")},
    ):
        shape = ModelShape.from_config(outer)
        assert (shape.layers, shape.kv_heads, shape.dtype) == (3, 2, "bfloat16")
    with pytest.raises(ShapeError, match=r"no text_config\.num_hidden_layers"):
        ModelShape.from_config({"text_config": with_keys(num_hidden_layers=None)})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": None}, "no num_hidden_layers"),
        ({"num_attention_heads": None}, "no num_attention_heads"),
        ({"hidden_size": None}, "no hidden_size"),
        ({"vocab_size": None}, "no vocab_size"),
        ({"torch_dtype": None}, "no dtype"),
        ({"max_position_embeddings": None}, "no max_position_embeddings.*give max_context"),
        ({"num_hidden_layers": "3"}, "num_hidden_layers is not a whole number: '3'"),
        ({"num_hidden_layers": True}, "num_hidden_layers is not a whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is not from 1 to 65536: '0'"),
        ({"num_hidden_layers": -3}, "num_hidden_layers is not from 1 to 65536: '-3'"),
        ({"num_hidden_layers": 2**62}, "num_hidden_layers is not from 1 to 65536"),
        ({"vocab_size": 10**400}, r"vocab_size is larger than 2\^53; it is a whole number from 1"),
        ({"num_attention_heads": 0}, "no head_dim"),
        ({"num_attention_heads": 7}, "no whole number a head"),
        ({"num_key_value_heads": 3}, "8 attention heads cannot share 3 KV heads"),
        ({"num_key_value_heads": 0}, "kv_heads is 0"),
        ({"torch_dtype": "int4"}, "'int4' is not one of float32"),
        ({"torch_dtype": "bfloat61"}, "did you mean 'bfloat16'"),
        ({"torch_dtype": 16}, "torch_dtype is not text"),
        ({"text_config": 3}, "text_config is not an object"),
        ({"sliding_window": 128}, "some or all layers keep no more than 128 tokens.*whole_context"),
        (
            {
                "sliding_window": 128,
                "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            },
            "2 of 3 layers keep no more than 128 tokens",
        ),
        (
            {"attention_chunk_size": 64, "layer_types": ["chunked_attention", *["full_attention"] * 2]},
            "1 of 3 layers keep no more than 64 tokens",
        ),
        ({"layer_types": ["full_attention"]}, "not a list of one kind for each of 3 layers"),
        (
            {"layer_types": ["linear_attention", *["full_attention"] * 2]},
            "1 of 3 layers are 'linear_attention'",
        ),
        ({"index_topk": 2048}, "index_topk is set"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder is set"),
        ({"cross_attention_layers": [1]}, "cross_attention_layers is set"),
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64}, "model_type 'llama' is not known to keep the latent"),
        ({"model_type": "deepseek_v3", "kv_lora_rank": 512}, "no qk_rope_head_dim"),
        ({"v_head_dim": 16}, "gives V a size of its own"),
        ({"quantization_config": {"kv_cache_scheme": {"num_bits": 8}}}, "KV is quantised; give dtype"),
    ],
)
def test_refused_configs(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    """What is missing, wrong or not evenly kept is refused, with the key and the file."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(with_keys(**changes)))
    with pytest.raises(ShapeError, match=message) as caught:
        ModelShape.from_config(file)
    assert isinstance(caught.value, kvik.InvalidArgument)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize("layers", [-1, 0, 2**62])
def test_windows_of_a_number_of_layers_that_no_model_has(layers: int) -> None:
    with pytest.raises(ShapeError, match="num_hidden_layers is not from 1 to 65536"):
        layer_windows(with_keys(num_hidden_layers=layers))


def test_windows_kept_whole() -> None:
    """`whole_context` describes layers that forget as if they did not; a layer without KV stays refused."""
    mixed = with_keys(sliding_window=128, layer_types=["sliding_attention", *["full_attention"] * 2])
    assert ModelShape.from_config(mixed, whole_context=True).layers == 3
    with pytest.raises(ShapeError, match="mamba"):
        ModelShape.from_config(with_keys(layer_types=["mamba"] * 3), whole_context=True)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not JSON"),
        (b"[1]", "not a JSON object"),
        (b"\xff\xfe{", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b" " * (16 * 1024 * 1024 + 1), "larger than"),
    ],
)
def test_refused_files(content: bytes, message: str, tmp_path: Path) -> None:
    """A file that is no configuration is refused by its path."""
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ShapeError, match=message) as caught:
        ModelShape.from_config(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)


def test_sources(tmp_path: Path) -> None:
    """A folder, its file, a path as text and the content give the same shape; its name is the folder's."""
    folder = tmp_path / "my-model"
    folder.mkdir()
    with pytest.raises(ShapeError, match=r"config\.json: cannot be read: No such file"):
        ModelShape.from_config(folder)
    (folder / "config.json").write_text(json.dumps(LLAMA))
    shapes = [ModelShape.from_config(source) for source in (folder, folder / "config.json", str(folder))]
    assert {shape.name for shape in shapes} == {"my-model"}
    assert dataclasses.replace(shapes[0], name="llama") == ModelShape.from_config(LLAMA)
    assert ModelShape.from_config(LLAMA, name="x", dtype="fp8", max_context=9) == ModelShape(
        name="x", layers=3, kv_heads=2, head_size=8, dtype="fp8", query_heads=8, vocab_size=100, max_context=9
    )


def test_resolve(tmp_path: Path) -> None:
    """What an option may say: a preset, a path, or fields."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert ModelShape.resolve("phi-2") == ModelShape.preset("phi-2")
    assert ModelShape.resolve(str(tmp_path)) == ModelShape.from_config(tmp_path)
    assert ModelShape.resolve("phi-2", dtype="fp8").kv_bytes_per_token() == BYTES_A_TOKEN["phi-2"] // 2
    described = ModelShape.resolve(
        "layers=2, kv_heads=1, head_size=576, attention=mla, name=mine", dtype="fp16"
    )
    assert described == ModelShape(
        name="mine", layers=2, kv_heads=1, head_size=576, attention="mla", dtype="float16"
    )
    assert described.content == 576
    for text, message in (
        ("llama-3.1-8B", "did you mean 'llama-3.1-8b'"),
        ("/no/such/config.json", "no preset and no file"),
        ("layers=2,kv_heads=1", "lacks head_size"),
        ("layers=2,layers=3", "given twice"),
        ("layer=2", "did you mean 'layers'"),
        ("layers=two", "'two'; it is a whole number"),
        ("x" * 300, "no preset and no file"),
        (f"layers={'0' * 300}2", "lacks kv_heads, head_size"),
        ("layers=2,kv_heads=2,head_size=576,attention=mla", "with attention 'mla' it is 1"),
        ("layers=2,kv_heads=2,head_size=64,attention=mha", "it is 'gqa' or 'mla'"),
    ):
        with pytest.raises(ShapeError, match=message):
            ModelShape.resolve(text)
    with pytest.raises(ShapeError, match="did you mean 'gemma-2b'"):
        ModelShape.preset("gemma2b")
    with pytest.raises(ShapeError, match="cannot be read: File name too long"):
        ModelShape.from_config("x" * 300)


def test_impossible_splits() -> None:
    """Sizes that do not fit are refused with one that does."""
    llama = ModelShape.preset("llama-3.1-8b")
    with pytest.raises(ShapeError, match="32 attention heads cannot be split over 5 ranks"):
        llama.kv_bytes_per_token(tp=5)
    qwen = ModelShape.preset("qwen2.5-7b")
    with pytest.raises(ShapeError, match="4 KV heads can be neither split over 7 ranks nor copied"):
        qwen.page_bytes(16, tp=7)
    with pytest.raises(ShapeError, match="with 2 ranks it is 0 to 1"):
        llama.heads_of_rank(2, 2)
    for wrong in (0, -1, True, 1.0, "2"):
        with pytest.raises(ShapeError, match="tensor-parallel size is"):
            llama.check_tp(wrong)  # type: ignore[arg-type]
        with pytest.raises(ShapeError, match="page_tokens is"):
            llama.page_bytes(wrong if wrong != "2" else 1.5)  # type: ignore[arg-type]


def kvik_shapes(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """The command, with a narrow terminal."""
    argv = [sys.executable, "-m", "kvik.cli", "shapes", *arguments]
    return subprocess.run(
        argv, capture_output=True, text=True, timeout=30, check=False, env={"COLUMNS": "40"}
    )


def test_command(tmp_path: Path) -> None:
    """The table has every digit on a narrow terminal too; wrong models end with status 2."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    everything = kvik_shapes()
    assert everything.returncode == 0, everything.stderr
    for name, size in BYTES_A_TOKEN.items():
        assert any(name in line and f"{size:,}" in line for line in everything.stdout.splitlines())
    seven = kvik_shapes("--tp", "7").stdout
    assert "Left out: qwen2.5-7b" in seven
    without = kvik_shapes("--tp", "7", "--json")
    assert json.loads(without.stdout) == []
    assert "Left out: qwen2.5-7b" in without.stderr
    (row,) = json.loads(kvik_shapes(str(tmp_path), "--tp", "4", "--page-tokens", "32", "--json").stdout)
    assert (row["heads"], row["token_bytes"], row["page_bytes"]) == (1, 3 * 16 * 2, 32 * 3 * 16 * 2)
    wrong = kvik_shapes("llama")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "'llama' is no preset" in wrong.stderr


def test_the_page_has_these_numbers() -> None:
    """The table of docs/shapes.md says of each preset what the preset says."""
    page = Path(__file__).parents[2] / "docs" / "shapes.md"
    rows = [line.strip("|").split("|") for line in page.read_text().splitlines() if line.startswith("| `")]
    found = {name.strip(" `"): tuple(cell.strip() for cell in cells) for name, *cells in rows}
    for preset in presets():
        shape = ModelShape.preset(preset.name)
        heads = "latent" if shape.attention == "mla" else str(shape.kv_heads)
        card = preset.card or "what `kvik demo` serves"
        numbers = (
            str(shape.layers),
            heads,
            str(shape.content),
            shape.dtype,
            f"{shape.kv_bytes_per_token():,}",
        )
        assert found.pop(preset.name) == (card, *numbers)
    assert not found
