"""The content digest of a handover: which tokens, under which model, the KV blocks were computed from.

kvik chains one link a KV block of the prefill side: its root covers the namespace and the extra keys, and
each link covers the one before it and the tokens of its block, the last of which may be partial. So two sides
that agree on a link agree on everything before it, and a prompt that begins with a shorter prefill's tokens
can be checked too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvik.handover.native import Native
from kvik.handover.protocol import KvShape, RefusedError

NAMESPACE_SCHEMA = 2


def canonical(value: Any) -> bytes:
    """One byte string for one value: JSON with sorted keys and no spaces."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def namespace_bytes(identity: Mapping[str, str], shape: KvShape) -> bytes:
    """All that KV depends on besides tokens; one differing field is another namespace. How a server divides
    the model's KV among ranks and blocks is not in it."""
    return canonical({"schema": NAMESPACE_SCHEMA, "identity": dict(identity), "kv": shape.model_kv()})


def namespace_digest(native: Native, namespace: bytes) -> str:
    """Short form of a namespace, for comparing and for logs: a link that no request's chain has."""
    return native.content_chain(namespace, b"namespace", np.zeros(1, dtype=np.uint32), 1)[-1].hex()


def request_digest(native: Native, namespace: bytes, request: Any, num_tokens: int, block_tokens: int) -> str:
    """Digest of the first `num_tokens` prompt tokens of a request, with LoRA, cache salt and images.

    `request` has the attributes of vLLM's; `block_tokens` are the prefill side's, which both sides use.
    Raises `RefusedError` for a request without token ids (prompt embeddings): nothing names its content.
    """
    tokens: Sequence[int] | None = request.prompt_token_ids
    if tokens is None or getattr(request, "prompt_embeds", None) is not None:
        raise RefusedError("prompt_embeds", "the prompt is given as embeddings, which have no content digest")
    ids = np.asarray(tokens[:num_tokens], dtype=np.uint32)
    return native.content_chain(namespace, extra_keys(request, num_tokens), ids, block_tokens)[-1].hex()


def extra_keys(request: Any, num_tokens: int) -> bytes:
    """What changes KV besides token ids: LoRA, cache salt, images that begin within `num_tokens`."""
    lora = getattr(request, "lora_request", None)
    images = [
        [str(feature.identifier), int(feature.mm_position.offset), int(feature.mm_position.length)]
        for feature in getattr(request, "mm_features", None) or ()
        if feature.mm_position.offset < num_tokens
    ]
    keys = {
        "lora": lora.lora_name if lora else None,
        "salt": getattr(request, "cache_salt", None),
        "images": images,
    }
    return canonical(keys)
