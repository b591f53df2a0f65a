"""What blocks are called: by all that their KV depends on.

The root of a prompt's links covers the model by name, type and the bytes of its weights, how its KV is made,
the adapter by its bytes, and the request's salt; a link covers the tokens up to its end, and the images that
begin before it, by their bytes. So what differs in any of these is a miss. Where the bytes of one cannot be
had, nothing is kept of what depends on it, which is counted and logged by name.

A rank's part of the KV, and how its bytes lie, are in the namespace of the rank.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvik.handover import digest
from kvik.handover.adapters import Adapters
from kvik.handover.content import Digests
from kvik.handover.items import Items, NoContentError
from kvik.handover.mapping import heads_of
from kvik.handover.native import Native
from kvik.handover.protocol import KvShape
from kvik.store.names import Namespace

SCHEMA = 1
_WEIGHTS = "weights"


@dataclass(frozen=True)
class ModelContent:
    """What a serving engine's KV depends on besides tokens. identity: names and types, as of a handover;
    weights: makes 32 bytes that stand for the weights, or raises NoContentError; kv_dtype, quantisation: for
    people, of `kvik.Namespace`."""

    identity: Mapping[str, str]
    weights: Callable[[], bytes]
    quantisation: str


class Naming:
    """Links of requests, and namespaces of ranks. `items` and `adapters` are those of all requests that have
    arrived."""

    def __init__(self, native: Native, model: ModelContent, items: Items, adapters: Adapters) -> None:
        self._native = native
        self._model = model
        self._digests = Digests()  # its own: no adapter waits for gigabytes of weights
        self._adapters = adapters
        self._apart = ""
        self._namespace: bytes | None = None
        self._weights: bytes | None = None
        self._shape: KvShape | None = None
        self._items = items
        self._keys: dict[str, bytes] = {}

    def set_shape(self, shape: KvShape) -> None:
        """How the model's KV lies on this server."""
        self._shape, self._namespace = shape, None

    def part(self) -> None:
        """From now on this server's blocks are found by nobody else, and it finds none of before."""
        self._apart, self._namespace = secrets.token_hex(16), None

    @property
    def knows_weights(self) -> bool:
        """Whether the digest of the weights has been made."""
        return self._weights is not None

    def namespace(self) -> bytes | None:
        """What all of the server's KV depends on; None while it is not known. Raises NoContentError."""
        if self._namespace is None and self._shape is not None:
            self._weights = self._weights or self._digests.get(_WEIGHTS, self._model.weights)
            if self._weights is not None:
                self._namespace = digest.canonical(
                    {
                        "schema": SCHEMA,
                        "identity": dict(self._model.identity),
                        "weights": self._weights.hex(),
                        "kv": self._shape.model_kv(),
                        "apart": self._apart,
                    }
                )
        return self._namespace

    def of_rank(self, rank: int) -> Namespace | None:
        """The store's namespace of one rank's part; None, and raises, as `namespace`. Ranks that have the
        same heads have the same one."""
        namespace, shape = self.namespace(), self._shape
        if namespace is None or shape is None:
            return None
        stage, tp = divmod(rank, shape.tp)
        return Namespace(
            model=self._model.identity["model"].encode(errors="replace")[-512:].decode(errors="ignore"),
            # For people, and for `clear`: the links have it, too.
            revision=hashlib.sha256(namespace).hexdigest(),
            kv_dtype=shape.dtype,
            quantisation=self._model.quantisation,
            layers=shape.layers_of(stage),
            model_layers=shape.layers,
            heads=heads_of(tp, shape.tp, shape.kv_heads),
            model_heads=shape.kv_heads,
            block_tokens=shape.block_tokens,
            layout=f"{shape.kind} {shape.order} content {shape.content} bytes {shape.block_bytes}",
        )

    def links(self, request: Any, num_tokens: int, computed: bool = False) -> bytes | None:
        """Of the whole blocks of a request's first tokens, its answer among them; None while what it depends
        on is not known. `computed`: of KV that this server has, which must be of that content and not of
        another of the same name. Raises NoContentError where nothing can stand for it."""
        namespace, shape = self.namespace(), self._shape
        if namespace is None or shape is None:
            return None
        keys, items = self._key(request), self._placed(request)
        if keys is None or items is None or (computed and not self._certain(request)):
            return None
        whole = num_tokens // shape.block_tokens * shape.block_tokens
        if whole <= 0:
            return b""
        tokens = np.asarray(request.all_token_ids[:whole], dtype=np.uint32)
        within = [(at, item) for at, item in items if at < whole]
        return self._native.content_chain(namespace, keys, tokens, shape.block_tokens, within)

    def forget(self, request: Any) -> None:
        """A request has ended."""
        self._keys.pop(request.request_id, None)

    def _certain(self, request: Any) -> bool:
        """Whether KV that this server has computed is of that content, as of `Items.certain`: engines' own
        caches go by the names of adapters and images."""
        self._adapters.certain(request)
        return self._items.certain(request)

    def _placed(self, request: Any) -> list[tuple[int, bytes]] | None:
        """What KV depends on from a position of its tokens on: the images, by bytes and length."""
        contents = self._items.contents(request)
        if not contents:
            return None if contents is None else []
        return [
            (int(feature.mm_position.offset), content + int(feature.mm_position.length).to_bytes(8, "little"))
            for feature, content in zip(request.mm_features, contents, strict=True)
        ]

    def _key(self, request: Any) -> bytes | None:
        """What all of a request's KV depends on besides tokens, found out when it is first asked for."""
        if request.request_id not in self._keys:
            made = self._key_of(request)
            if made is None:
                return None
            self._keys[request.request_id] = made
        return self._keys[request.request_id]

    def _key_of(self, request: Any) -> bytes | None:
        if request.prompt_token_ids is None or getattr(request, "prompt_embeds", None) is not None:
            raise NoContentError("prompt embeddings: a prompt without token ids has nothing to be found by")
        if getattr(request, "resumable", False):
            raise NoContentError("streamed input: its tokens may be taken back")
        adapter = self._adapters.content(request)
        if adapter is None:
            return None
        return digest.canonical({"lora": adapter.hex(), "salt": getattr(request, "cache_salt", None)})
