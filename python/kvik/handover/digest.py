"""The content of a handover: which tokens, under which model, the KV blocks were computed from.

kvik chains one link a KV block of the prefill side: its root covers the namespace and the extra keys, and
each link covers the one before it and the tokens of its block, the last of which may be partial. So two sides
that agree on a link agree on everything before it, and a prompt that begins with a shorter prefill's tokens
can be checked too. An image enters the chain in the block where it begins, by its bytes (`items.py`): a
prefix that ends before it does not depend on it.

A grant is bound to such a chain and to a *part*: which part of the model's KV a rank's pages are, and how
their bytes lie. Each reader computes both from its own request and states them; the owner compares.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvik.handover.mapping import heads_of
from kvik.handover.native import Native
from kvik.handover.protocol import LINK_BYTES, KvShape, RefusedError

NAMESPACE_SCHEMA = 4


def canonical(value: Any) -> bytes:
    """One byte string for one value: JSON with sorted keys and no spaces."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def links(chain: bytes) -> list[bytes]:
    """The links of a chain, the first block's first."""
    return [chain[at : at + LINK_BYTES] for at in range(0, len(chain), LINK_BYTES)]


def namespace_bytes(identity: Mapping[str, str], shapes: Sequence[KvShape]) -> bytes:
    """All that KV depends on besides tokens; one differing field is another namespace. `shapes` are those of
    the groups. How a server divides the model's KV among ranks and blocks is not in it."""
    kv = [shape.model_kv() for shape in shapes]
    return canonical({"schema": NAMESPACE_SCHEMA, "identity": dict(identity), "kv": kv})


def namespace_digest(native: Native, namespace: bytes) -> str:
    """Short form of a namespace, for comparing and for logs: a link that no request's chain has."""
    return native.content_chain(namespace, b"namespace", np.zeros(1, dtype=np.uint32), 1).hex()


def part_bytes(model: KvShape, division: KvShape, rank: int, layers: tuple[int, int] | None = None) -> bytes:
    """Which part of the model's KV the pages of one rank are, of one group, and how their bytes lie in a KV
    block. `layers`: of the model, where they are not all of the rank's.

    `model` says what the model's KV is, `division` how a server divides it among its ranks and blocks. The
    rank's number is not in it: ranks that hold copies of the same heads are interchangeable.
    """
    stage, tp = divmod(rank, division.tp)
    first, end = heads_of(tp, division.tp, model.kv_heads)
    return canonical(
        {
            "kind": model.kind,
            "dtype": model.dtype,
            "content": model.content,
            "token_bytes": model.token_bytes,
            "order": division.order,
            "block_tokens": division.block_tokens,
            "block_bytes": (end - first) * division.block_tokens * model.token_bytes,
            "layers": [*(layers or division.layers_of(stage)), model.layers],
            "heads": [first, end, model.kv_heads],
            "window": model.window,
            "members": model.members,
        }
    )


def request_chain(
    native: Native,
    namespace: bytes,
    request: Any,
    num_tokens: int,
    block_tokens: int,
    told: Sequence[str] | None = None,
    adapter: bytes = b"",
) -> bytes:
    """The chain over the first `num_tokens` prompt tokens of a request, with LoRA, cache salt and images.

    `request` has the attributes of vLLM's; `block_tokens` are the prefill side's, which both sides use;
    `told` stands for its images, in their order (left out: their names), `adapter` for its LoRA adapter.
    Raises `RefusedError` for a request without token ids (prompt embeddings): nothing names its content.
    """
    tokens: Sequence[int] | None = request.prompt_token_ids
    if tokens is None or getattr(request, "prompt_embeds", None) is not None:
        raise RefusedError("prompt_embeds", "the prompt is given as embeddings, which have no content digest")
    ids = np.asarray(tokens[:num_tokens], dtype=np.uint32)
    items = images(request, num_tokens, told)
    return native.content_chain(namespace, extra_keys(request, adapter), ids, block_tokens, items)


def extra_keys(request: Any, adapter: bytes = b"") -> bytes:
    """What changes all of a request's KV besides token ids: its LoRA adapter, by its digest, and the cache
    salt."""
    return canonical({"lora": adapter.hex() or None, "salt": getattr(request, "cache_salt", None)})


def images(request: Any, num_tokens: int, told: Sequence[str] | None = None) -> list[tuple[int, bytes]]:
    """The images (or other items) that begin within `num_tokens`: where, and which one."""
    features = getattr(request, "mm_features", None) or ()
    return [
        (int(feature.mm_position.offset), canonical([which, int(feature.mm_position.length)]))
        for feature, which in zip(
            features, told or [str(feature.identifier) for feature in features], strict=True
        )
        if feature.mm_position.offset < num_tokens
    ]
