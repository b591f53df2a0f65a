"""How many parameters a decoder has, from the sizes in its configuration.

Counted are the matrices: embeddings, attention, and the feed-forward part or its experts. Norms, biases and
rotary tables are left out (under 0.1 %), and so are layers that only predict further tokens. The sizes of the
matrices are those of the models' published definitions: the feed-forward part has 3 * hidden * intermediate
where it is gated (Shazeer, "GLU Variants Improve Transformer", arXiv 2002.05202), 2 * hidden * intermediate
elsewhere; latent attention is that of DeepSeek-V2 (arXiv 2405.04434, section 2.1).
"""

from __future__ import annotations

from dataclasses import dataclass

from kvik.shapes.source import Section

_GATED = frozenset(
    {"llama", "mistral", "qwen2", "qwen3", "gemma", "mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3"}
    | {"kimi_k2"}
)
_PLAIN = frozenset({"phi"})


@dataclass(frozen=True)
class Parameters:
    """All parameters of a model, and those that one token is multiplied with.

    A token uses the experts that it is routed to, and a row of the table of embeddings: the table counts as
    active only where it is also the output matrix. Of the active ones, `output` are that matrix, which a
    prefill multiplies with its last token only.
    """

    total: int
    active: int
    output: int


def estimate(text: Section, layers: int, heads: int) -> Parameters | None:
    """The parameters of a kind of model that is known here; None for others, and where a size is missing."""
    kind = text.text("model_type")
    if kind not in _GATED | _PLAIN or not (text.has("hidden_size") and text.has("intermediate_size")):
        return None
    hidden, vocab = text.need("hidden_size"), text.need("vocab_size")
    table = vocab * hidden
    looked_up = 0 if text.values.get("tie_word_embeddings") else table
    attention = _latent_attention(text, heads) if text.has("kv_lora_rank") else _attention(text, heads)
    matrices = 3 if kind in _GATED else 2
    dense = matrices * hidden * text.need("intermediate_size")
    experts = text.find("n_routed_experts", "num_local_experts", "num_experts") or 0
    if not experts:
        used = table + layers * (attention + dense)
        return Parameters(looked_up + used, used, table)
    expert = matrices * hidden * (text.find("moe_intermediate_size") or text.need("intermediate_size"))
    dense_layers = text.find("first_k_dense_replace") or 0
    always = (text.find("n_shared_experts") or 0) * expert + hidden * experts
    expert_layers = layers - dense_layers
    shared = table + layers * attention + dense_layers * dense + expert_layers * always
    return Parameters(
        total=looked_up + shared + expert_layers * experts * expert,
        active=shared + expert_layers * text.need("num_experts_per_tok") * expert,
        output=table,
    )


def _attention(text: Section, heads: int) -> int:
    """Q and output a head, K and V a KV head."""
    hidden = text.need("hidden_size")
    size = text.find("head_dim") or hidden // max(heads, 1)
    kv_heads = text.find("num_key_value_heads")
    return 2 * hidden * size * (heads + (heads if kv_heads is None else kv_heads))


def _latent_attention(text: Section, heads: int) -> int:
    """Q (by a low rank where there is one), the latent with the rotary part, K and V from it, output."""
    hidden, latent, rotary = (text.need(key) for key in ("hidden_size", "kv_lora_rank", "qk_rope_head_dim"))
    plain, value = text.need("qk_nope_head_dim"), text.need("v_head_dim")
    rank = text.find("q_lora_rank")
    wide = heads * (plain + rotary)
    query = hidden * rank + rank * wide if rank else hidden * wide
    return query + hidden * (latent + rotary) + latent * heads * (plain + value) + heads * value * hidden
