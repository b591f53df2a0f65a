"""What the KV of requests is of, on this server: chains over their tokens, images and adapters, in the
server's namespace.

Who resets a server may have changed its weights in place, so with each reset the namespace is another one.
Their number is what two servers compare: those that are updated alike agree again, and others do not."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from kvik.handover import digest
from kvik.handover.adapters import Adapters
from kvik.handover.items import Items
from kvik.handover.native import Native
from kvik.handover.protocol import KvShape, RefusedError


class Contents:
    """Contents of all requests that have arrived. model: what KV depends on besides tokens and shape;
    namespace_hex: short form of the namespace."""

    def __init__(self, native: Native, model: Mapping[str, str], items: Items, adapters: Adapters) -> None:
        self._native = native
        self._model = model
        self._shapes: tuple[KvShape, ...] = ()
        self._resets = 0
        self._arrived: dict[str, int] = {}  # how many resets there had been
        self._missing: dict[str, set[int]] = {}  # KV blocks that were not filled while the request was there
        self.items = items
        self.adapters = adapters
        self.namespace = b""
        self.namespace_hex = ""

    def set_shapes(self, shapes: tuple[KvShape, ...]) -> None:
        """How the KV of the model's groups lies on this server."""
        self._shapes = shapes
        model = {**self._model, "resets": str(self._resets)} if self._resets else self._model
        self.namespace = digest.namespace_bytes(model, shapes)
        self.namespace_hex = digest.namespace_digest(self._native, self.namespace)

    def reset(self) -> None:
        """From now on the model may be another one."""
        self._resets += 1
        if self._shapes:
            self.set_shapes(self._shapes)

    def arrived(self, request: Any) -> None:
        """A request has arrived: what is computed of it from now on is of the model as it is."""
        self._arrived.setdefault(request.request_id, self._resets)

    def forget(self, request: Any) -> None:
        """It has ended."""
        self._arrived.pop(request.request_id, None)
        self._missing.pop(request.request_id, None)

    def not_filled(self, blocks: Collection[int]) -> None:
        """Another connector has not loaded these KV blocks, which requests that are there may have been given
        by the engine's prefix cache, and may have computed upon."""
        for request_id in self._arrived if blocks else ():
            self._missing.setdefault(request_id, set()).update(blocks)

    def settled(self, request: Any) -> bool:
        """Whether all that can be read of a request's images and adapter was."""
        return self.adapters.settled(request) and self.items.are_read(request)

    def chains(self, request: Any, num_tokens: int, shapes: Sequence[KvShape]) -> list[bytes]:
        """The content of so many tokens by group: a link of it is one KV block of these shapes.
        `RefusedError` where it cannot be told."""
        adapter, told = self.adapters.told(request), self.items.told(request)
        made = {
            tokens: digest.request_chain(
                self._native, self.namespace, request, num_tokens, tokens, told, adapter
            )
            for tokens in {shape.block_tokens for shape in shapes}
        }
        return [made[shape.block_tokens] for shape in shapes]

    def check(self, request: Any, blocks: Collection[int] = ()) -> None:
        """Whether KV that this server has of a request, in these blocks, is of its content: `RefusedError`
        where it may be of another image or adapter of the same name, of the model as it was before a reset,
        or computed upon what was not loaded."""
        if not self._missing.get(request.request_id, set()).isdisjoint(blocks):
            raise RefusedError("not_filled", "another connector has not loaded KV that it was computed upon")
        if self._arrived.get(request.request_id, self._resets) != self._resets:
            raise RefusedError("namespace_mismatch", "this server was reset while the request was there")
        self.items.check(request)
        self.adapters.check(request)
