"""A connector beside kvik's under `MultiConnector`, with a handshake of its own, which keeps blocks."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    SupportsHMA,
)


@dataclass
class BesideHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """vLLM gives it to all connectors of a `MultiConnector`, if it is that of the first."""


@dataclass
class BesideMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """Requests that have ended."""

    ended: list[str] = field(default_factory=list)


class BesideConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Holds the blocks of each request that was computed from its end until the next step, as one that
    stores them does.

    A request that is aborted while it waits for its KV has nothing to store. If its blocks were held, vLLM
    would free it when one of both connectors is done with it, and end with an error at the other one's word.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._computed: set[str] = set()
        self._ended: list[str] = []
        self._held: set[str] = set()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:  # noqa: ARG002
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None: ...

    def build_connector_meta(self, scheduler_output: Any) -> BesideMetadata:
        self._computed.update(scheduler_output.num_scheduled_tokens)
        ended, self._ended = self._ended, []
        return BesideMetadata(ended)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:  # noqa: ARG002
        if request.request_id not in self._computed:
            return False, None
        self._computed.remove(request.request_id)
        self._ended.append(request.request_id)
        return True, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, None]:
        return self.request_finished(request, block_ids[0])

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, KVConnectorHandshakeMetadata]) -> None:
        assert all(isinstance(entry, BesideHandshake) for entry in metadata.values())

    def get_handshake_metadata(self) -> BesideHandshake:
        return BesideHandshake()

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, BesideMetadata)
        self._held.update(connector_metadata.ended)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, None]:  # noqa: ARG002
        held, self._held = self._held, set()
        return held or None, None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...
