"""What the store has, as vLLM's own KV events (`--kv-events-config`): by the hashes that vLLM's prefix cache
has for the same blocks, so that a router that follows these events finds them in either place.

vLLM's modules are imported only where it publishes events. Fields of an event that this release of vLLM does
not have are left out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvik.serving_cache.ledger import Event, RemovedBlocks


def of(vllm_config: Any, kv_cache_config: Any) -> KvEvents | None:
    """How this server's events are made; None where vLLM publishes none."""
    config = getattr(vllm_config, "kv_events_config", None)
    if config is None or not config.enable_kv_cache_events:
        return None
    (group,) = kv_cache_config.kv_cache_groups  # a model with several is not kept in a store
    return KvEvents(group.kv_cache_spec)


class KvEvents:
    """Makes vLLM's events of the store's. spec: how vLLM keeps KV of the model's one group of layers: each
    block of it has one hash."""

    def __init__(self, spec: Any) -> None:
        from vllm.distributed import kv_events
        from vllm.v1.core import kv_cache_utils

        self._kinds = kv_events
        self._utils = kv_cache_utils
        self._tokens = int(spec.block_size)
        self._media = {
            True: getattr(kv_events, "MEDIUM_CPU", "CPU"),
            False: getattr(kv_events, "MEDIUM_STORAGE", "STORAGE"),
        }
        self._fields = frozenset(kv_events.BlockStored.__struct_fields__)
        self._about_group = {"group_idx": 0, **_about(spec)}

    def names(self, request: Any, count: int) -> Sequence[bytes]:
        """vLLM's hashes of a request's first blocks."""
        return list(request.block_hashes[:count])

    def made(self, event: Event) -> Any:
        """vLLM's event."""
        medium = self._media[event.host]
        if isinstance(event, RemovedBlocks):
            given = {"block_hashes": [self._outside(name) for name in event.names], "medium": medium}
            if "group_idx" in self._kinds.BlockRemoved.__struct_fields__:
                given["group_idx"] = 0
            return self._kinds.BlockRemoved(**given)
        request, first, end = event.request, event.first, event.end
        names = self.names(request, end)
        lora = getattr(request, "lora_request", None)
        given = {
            "block_hashes": [self._outside(name) for name in names[first:]],
            "parent_block_hash": self._outside(names[first - 1]) if first else None,
            "token_ids": list(request.all_token_ids[first * self._tokens : end * self._tokens]),
            "block_size": self._tokens,
            "lora_id": lora.lora_int_id if lora else None,
            "lora_name": lora.lora_name if lora else None,
            "medium": medium,
            "extra_keys": self._extra_keys(request, first, end),
            "session_id": getattr(request, "session_id", None),
            **self._about_group,
        }
        return self._kinds.BlockStored(**{name: given[name] for name in given if name in self._fields})

    def _outside(self, name: bytes) -> Any:
        """A hash as vLLM's events have it: as bytes, or as a number."""
        return self._utils.maybe_convert_block_hash(name)

    def _extra_keys(self, request: Any, first: int, end: int) -> Any:
        """What each block's hash is over besides tokens, as vLLM's own events say it."""
        made, image = [], 0
        for place in range(first, end):
            start = place * self._tokens
            keys, image = self._utils.generate_block_hash_extra_keys(
                request, start, start + self._tokens, image
            )
            made.append(keys)
        said = getattr(self._utils, "to_event_extra_keys", None)
        return made if said is None else said(made)


def _about(spec: Any) -> dict[str, Any]:
    """What events say of a group of layers, in releases whose events do."""
    from vllm.v1 import kv_cache_interface

    made = {}
    if (kind := getattr(kv_cache_interface, "get_kv_cache_spec_kind", None)) is not None:
        made["kv_cache_spec_kind"] = kind(spec).value
    if (window := getattr(kv_cache_interface, "get_kv_cache_spec_sliding_window", None)) is not None:
        made["kv_cache_spec_sliding_window"] = window(spec)
    return made
