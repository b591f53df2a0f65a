"""What the KV of requests is of, on this server: chains over their tokens, images and adapters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvik.handover import digest
from kvik.handover.adapters import Adapters
from kvik.handover.items import Items
from kvik.handover.native import Native
from kvik.handover.protocol import KvShape


class Contents:
    """Contents of all requests that have arrived."""

    def __init__(self, native: Native, items: Items, adapters: Adapters) -> None:
        self._native = native
        self.items = items
        self.adapters = adapters
        self.namespace = b""

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

    def check(self, request: Any) -> None:
        """Whether KV that this server has of a request is of its content: `RefusedError` where it may be of
        another image or adapter of the same name."""
        self.items.check(request)
        self.adapters.check(request)
