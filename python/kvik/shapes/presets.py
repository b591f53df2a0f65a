"""Well-known models as data: the keys of their published `config.json` that say how KV lies and how large the
model is. The file is published beside the model card that is named with it, on the Hugging Face hub.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from kvik.shapes.errors import ShapeError


@dataclass(frozen=True)
class Preset:
    """A well-known model.

    name: what it is called here. card: its model card's id on the Hugging Face hub, None for our own.
    config: the keys of its `config.json` that matter here.
    """

    name: str
    card: str | None
    config: Mapping[str, Any]


def _llama(layers: int, hidden: int, heads: int, intermediate: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def _gemma(layers: int, hidden: int, heads: int, kv_heads: int, intermediate: int) -> dict[str, Any]:
    return {
        "architectures": ["GemmaForCausalLM"],
        "model_type": "gemma",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 256,
        "vocab_size": 256000,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,  # the default of the model's type; the file does not say it
        "torch_dtype": "bfloat16",
    }


_TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}

_QWEN25_7B = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "sliding_window": 131072,
    "use_sliding_window": False,
    "max_window_layers": 28,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}

_QWEN3_32B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "sliding_window": None,
    "use_sliding_window": False,
    "max_window_layers": 64,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}

_MISTRAL_7B = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32768,
    "max_position_embeddings": 32768,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}

_DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}

_DEEPSEEK_V2_LITE = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "vocab_size": 102400,
    "max_position_embeddings": 163840,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}

_PHI_2 = {
    "architectures": ["PhiForCausalLM"],
    "model_type": "phi",
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "partial_rotary_factor": 0.4,
    "vocab_size": 51200,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
}

PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        preset.name: preset
        for preset in (
            Preset("tiny", None, _TINY),  # what `kvik demo` serves
            Preset("llama-3.1-8b", "meta-llama/Llama-3.1-8B", _llama(32, 4096, 32, 14336)),
            Preset("llama-3.1-70b", "meta-llama/Llama-3.1-70B", _llama(80, 8192, 64, 28672)),
            Preset("mistral-7b", "mistralai/Mistral-7B-v0.3", _MISTRAL_7B),
            Preset("qwen2.5-7b", "Qwen/Qwen2.5-7B-Instruct", _QWEN25_7B),
            Preset("qwen3-32b", "Qwen/Qwen3-32B", _QWEN3_32B),
            Preset("gemma-2b", "google/gemma-2b", _gemma(18, 2048, 8, 1, 16384)),
            Preset("gemma-7b", "google/gemma-7b", _gemma(28, 3072, 16, 16, 24576)),
            Preset("phi-2", "microsoft/phi-2", _PHI_2),
            Preset("deepseek-v2-lite", "deepseek-ai/DeepSeek-V2-Lite", _DEEPSEEK_V2_LITE),
            Preset("deepseek-v3", "deepseek-ai/DeepSeek-V3", _DEEPSEEK_V3),
        )
    }
)


def presets() -> tuple[Preset, ...]:
    """All presets."""
    return tuple(PRESETS.values())


def preset_config(name: str) -> Mapping[str, Any]:
    """The configuration of a preset. Raises `ShapeError` for a name that is none."""
    preset = PRESETS.get(name)
    if preset is None:
        near = difflib.get_close_matches(name, PRESETS, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ShapeError(f"no preset {name!r}{hint}. There are: {', '.join(PRESETS)}")
    return preset.config
