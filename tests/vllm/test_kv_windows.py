"""Bytes of KV of a request beside vLLM's own, for models whose layers keep different numbers of tokens.

What is vLLM's own: its model classes read the `config.json` and build their layers, each of which says its
KV-cache specification (kind, window, bytes of a block); its managers for such layers say which tokens of a
request are passed. `test_kv_specs` has the models whose layers are alike, with tensor parallelism.
"""

import json
from typing import Any

import pytest

from kvik.shapes import presets
from kvik_lab.physics.kv import ModelKv, kv_size, stage_layers
from tests.vllm.forked import ForkedProgram, ForkParent

LIMIT = 600.0  # seconds; 20 where nothing else runs
TOKENS = (1, 31, 32, 33, 500, 1024, 1055, 1500)
pytestmark = pytest.mark.timeout(LIMIT + 60)

_COMMON = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 4096,
    "max_position_embeddings": 2048,
    "torch_dtype": "bfloat16",
}


def _config(model_type: str, architecture: str, **keys: Any) -> dict[str, Any]:
    return {"architectures": [architecture], "model_type": model_type, **_COMMON, **keys}


_PRESETS = {preset.name: {**preset.config, "max_position_embeddings": 2048} for preset in presets()}
_LISTED = [kind for _ in range(4) for kind in ("sliding_attention", "sliding_attention", "full_attention")]
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str | None]] = {
    "multi-head": (_config("llama", "LlamaForCausalLM", num_key_value_heads=8), {}, None),
    "grouped-query": (_PRESETS["qwen2.5-7b"], {}, None),
    "multi-query": (_PRESETS["gemma-2b"], {}, None),
    "multi-head latent": (_PRESETS["deepseek-v2-lite"], {}, None),
    "quantised KV": (_PRESETS["llama-3.1-8b"], {"kv_cache_dtype": "fp8"}, "fp8"),
    "window in every layer": (_config("mistral", "MistralForCausalLM", sliding_window=512), {}, None),
    "window longer than the context": (
        _config("mistral", "MistralForCausalLM", sliding_window=4096),
        {},
        None,
    ),
    "window in every second layer": (_config("gemma2", "Gemma2ForCausalLM", sliding_window=512), {}, None),
    "window in five of six layers": (
        _config("gemma3_text", "Gemma3ForCausalLM", sliding_window=512),
        {},
        None,
    ),
    "window in three of four layers": (
        _config("cohere2", "Cohere2ForCausalLM", sliding_window=512, logit_scale=0.25),
        {},
        None,
    ),
    "windows listed": (
        _config("gemma2", "Gemma2ForCausalLM", sliding_window=96, layer_types=_LISTED),
        {},
        None,
    ),
    "windows and quantised KV": (
        _config("gemma2", "Gemma2ForCausalLM", sliding_window=512),
        {"kv_cache_dtype": "fp8"},
        "fp8",
    ),
}


@pytest.fixture(scope="module")
def answers(fork_parent: ForkParent, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What vLLM says of every case."""
    folder = tmp_path_factory.mktemp("kv-windows")
    asked = "\n".join(
        json.dumps({"config": config, "engine": engine, "tokens": TOKENS})
        for config, engine, _ in CASES.values()
    )
    meet, questions, said, log = (folder / name for name in ("meet", "ask", "said", "log"))
    questions.write_text(asked + "\n")
    arguments = [str(meet), str(questions), str(said)]
    process = ForkedProgram(fork_parent, "kv-windows", "tests.vllm.kv_windows", arguments, log)
    try:
        status = process.wait(LIMIT)
        assert status == 0, f"vLLM could not answer (status {status}):\n{process.tail()}"
    finally:
        process.stop()
    found = [json.loads(line) for line in said.read_text().splitlines()]
    return dict(zip(CASES, found, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_bytes_of_a_request_are_vllms(answers: dict[str, dict[str, Any]], name: str) -> None:
    """Which layers have which window, and bytes kept of requests of several lengths."""
    config, _, dtype = CASES[name]
    model = ModelKv.from_config(config, dtype=dtype)
    layers = answers[name]["layers"]
    # A window that no request fills passes no token: vLLM keeps its number, we say that there is none.
    longest = config["max_position_embeddings"]
    said = [window if (window := layer["window"] or longest) < longest else None for layer in layers]
    assert said == list(model.windows)
    (block,) = {layer["block_tokens"] for layer in layers}
    for index, tokens in enumerate(TOKENS):
        vllm = sum(layer["kept"][index] * layer["page_size_bytes"] for layer in layers)
        assert kv_size(model, tokens, block).total == vllm


def test_layers_of_pipeline_stages_are_vllms() -> None:
    """For every number of layers up to 61 and of stages up to 8."""
    from vllm.distributed.utils import get_pp_indices

    for layers in range(8, 62):
        for pp in range(1, 9):
            ours = [(stage.start, stage.stop) for stage in stage_layers(layers, pp)]
            assert ours == [get_pp_indices(layers, rank, pp) for rank in range(pp)]
