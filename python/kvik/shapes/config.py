"""From a Hugging Face `config.json` to a shape.

The keys, and what stands for them where they are missing, are those that vLLM 0.32 reads
(`vllm/transformers_utils/model_arch_config_convertor.py`); tests compare the results with vLLM's own. What
vLLM would keep in several KV groups is refused by name and never described half.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvik.shapes.errors import ShapeError
from kvik.shapes.parameters import estimate
from kvik.shapes.source import Section, read, text_section

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
MOST_LAYERS = 65_536
HEADS = ("num_attention_heads", "n_head", "n_heads")
KV_HEADS = (
    "num_key_value_heads",
    "num_kv_heads",
    "n_head_kv",
    "multi_query_group_num",
    "num_attention_groups",
)
HIDDEN = ("hidden_size", "n_embd", "d_model")
HEAD_SIZE = ("head_dim", "hidden_size_per_head", "kv_channels")
VOCAB = ("vocab_size", "padded_vocab_size")
CONTEXT = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length")

# Models whose configuration has `kv_lora_rank` and whose serving engine keeps that latent. Others have the
# key and keep full heads (MiniCPM3), so it alone says nothing.
MLA_TYPES = ("deepseek_v2", "deepseek_v3", "kimi_k2")

_WHOLE = ("full_attention", "attention")
BOUNDED = ("sliding_attention", "chunked_attention")
# Keys that have a true value only where layers are not alike, and what that means.
_UNEVEN = {
    "index_topk": "a sparse-attention indexer keeps a cache of its own",
    "compress_ratios": "layers keep compressed KV",
    "num_kv_shared_layers": "layers share the KV of others",
    "cross_attention_layers": "some layers attend to an encoder",
    "is_encoder_decoder": "a decoder also keeps KV of its encoder's output",
    "block_configs": "each layer has numbers of its own",
    "hybrid_override_pattern": "some layers keep a state instead of KV",
    "layers_block_type": "some layers keep a state instead of KV",
    "attn_layer_period": "some layers keep a state instead of KV",
    "full_attention_interval": "some layers keep a state instead of KV",
    "linear_attn_config": "some layers keep a state instead of KV",
    "attn_type_list": "some layers keep a state instead of KV",
    "mamba_d_state": "some layers keep a state instead of KV",
    "ssm_cfg": "layers keep a state instead of KV",
    "state_size": "layers keep a state instead of KV",
}


def described(
    source: Mapping[str, Any] | str | os.PathLike[str],
    *,
    name: str | None = None,
    dtype: str | None = None,
    max_context: int | None = None,
    whole_context: bool = False,
) -> tuple[str, dict[str, Any]]:
    """Where a configuration comes from, and the fields of its `ModelShape`; see `ModelShape.from_config`."""
    root, text = text_sections(source)
    layers = layers_of(text)
    context = max_context if max_context is not None else context_of(text)
    check_alike(text, layers)
    if not whole_context:
        _check_whole_context(text, layers, context)
    heads = text.need(*HEADS)
    counted = estimate(text, layers, heads)
    latent = _is_latent(text)
    return root.origin, {
        "name": name or _name(source, root),
        "layers": layers,
        "kv_heads": 1 if latent else _kv_heads(text, heads),
        "head_size": _latent_size(text) if latent else _head_size(text, heads),
        "attention": "mla" if latent else "gqa",
        "dtype": dtype or _dtype(root, text),
        "query_heads": heads,
        "vocab_size": text.need(*VOCAB),
        "max_context": context,
        "parameters": counted.total if counted else None,
        "active_parameters": counted.active if counted else None,
        "output_parameters": counted.output if counted else 0,
    }


def text_sections(source: Mapping[str, Any] | str | os.PathLike[str]) -> tuple[Section, Section]:
    """The whole configuration, and the part of it that is about the language model."""
    root = read(source)
    return root, text_section(root)


def _name(source: Mapping[str, Any] | str | os.PathLike[str], root: Section) -> str:
    if isinstance(source, Mapping):
        return root.text("_name_or_path", "model_type") or "described"
    path = Path(source).resolve()
    return path.name if path.is_dir() else path.parent.name


def layers_of(text: Section) -> int:
    """How many layers a model has; `ShapeError` for a number that none has."""
    layers = text.need(*LAYERS)
    if not 1 <= layers <= MOST_LAYERS:
        key = next(key for key in LAYERS if text.has(key))
        raise text.wrong(key, f"is not from 1 to {MOST_LAYERS}")
    return layers


def context_of(text: Section) -> int:
    found = [length for key in CONTEXT if (length := text.find(key)) is not None]
    if not found:
        raise ShapeError(f"{text.origin}: no {text.path}{CONTEXT[0]}; give max_context")
    return min(found)


def _is_latent(text: Section) -> bool:
    if not text.has("kv_lora_rank"):
        if text.has("v_head_dim"):
            raise text.wrong("v_head_dim", "gives V a size of its own; describe the model by value_size")
        return False
    if text.text("model_type") in MLA_TYPES:
        return True
    raise ShapeError(
        f"{text.origin}: {text.path}kv_lora_rank is set, but model_type {text.text('model_type')!r} is not "
        f"known to keep the latent (as {', '.join(MLA_TYPES)} do); describe the model by its numbers"
    )


def _latent_size(text: Section) -> int:
    """Elements of the latent and of the rotary part of K, which lie side by side (vLLM: `get_head_size`)."""
    return text.need("kv_lora_rank") + text.need("qk_rope_head_dim")


def _kv_heads(text: Section, heads: int) -> int:
    if text.values.get("multi_query") and not text.values.get("new_decoder_architecture"):
        return text.find("multi_query_group_num") or 1  # ChatGLM sets both; Falcon and StarCoder the first
    nested = text.section("attn_config")  # DBRX, MPT
    if nested is not None and nested.has("kv_n_heads"):
        return nested.need("kv_n_heads")
    found = text.find(*KV_HEADS)
    return heads if found is None else found


def _head_size(text: Section, heads: int) -> int:
    explicit = text.find(*HEAD_SIZE)
    if explicit:  # some configurations say 0 for "not given"
        return explicit
    hidden = text.need(*HIDDEN)
    if heads < 1 or hidden % heads:
        raise ShapeError(
            f"{text.origin}: no {text.path}head_dim, and {hidden} hidden elements are no whole number a head "
            f"with {heads} attention heads"
        )
    return hidden // heads


def _dtype(root: Section, text: Section) -> str:
    for section in (root, text):
        quantised = section.section("quantization_config")
        for key in ("kv_cache_quant_algo", "kv_cache_scheme"):
            if quantised is not None and quantised.has(key):
                raise quantised.wrong(key, "says that KV is quantised; give dtype, for example 'fp8'")
    found = root.text("dtype", "torch_dtype") or text.text("dtype", "torch_dtype")
    if found is None:
        raise ShapeError(f"{root.origin}: no dtype (nor torch_dtype); give dtype, for example 'bfloat16'")
    return found


def check_alike(text: Section, layers: int) -> None:
    for key, meaning in _UNEVEN.items():
        if text.values.get(key):
            raise ShapeError(
                f"{text.origin}: {text.path}{key} is set: {meaning}. A shape describes models whose layers "
                "all keep KV alike"
            )
    kinds = text.values.get("layer_types")
    if kinds is None:
        return
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise text.wrong("layer_types", f"is not a list of one kind for each of {layers} layers")
    for kind, count in Counter(map(str, kinds)).items():
        if kind not in (*_WHOLE, *BOUNDED):
            raise ShapeError(
                f"{text.origin}: {count} of {layers} layers are {kind!r} ({text.path}layer_types), which is "
                "not known to keep KV a token. A shape describes models whose layers all do"
            )


def _check_whole_context(text: Section, layers: int, context: int) -> None:
    """Refuse layers that forget: vLLM keeps them in a KV group of their own, with pages of their own life."""
    kinds = text.values.get("layer_types")
    bounded = sum(kind in BOUNDED for kind in kinds) if kinds is not None else layers
    for key in ("sliding_window", "attention_chunk_size"):
        window = text.find(key)
        idle = key == "sliding_window" and text.values.get("use_sliding_window") is False
        if bounded and window and window < context and not idle:
            which = f"{bounded} of {layers} layers" if kinds is not None else "some or all layers"
            raise ShapeError(
                f"{text.origin}: {which} keep no more than {window} tokens ({text.path}{key}), so KV does "
                "not grow evenly with the context. With whole_context every token counts in every "
                "layer, as vLLM does with --disable-hybrid-kv-cache-manager"
            )
