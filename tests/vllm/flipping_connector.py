"""The connector, but its prefill side spoils one byte of each request's KV before it is handed over.

The acceptance tests claim that wrong KV gives wrong tokens; this is how they prove that they would notice.
"""

import struct
from typing import Any

from kvik.vllm import KvikConnector


class FlippingConnector(KvikConnector):
    """Flips exponent bits of one number in the first layer of the first KV block of each offered request."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Keep the tensors at hand."""
        super().register_kv_caches(kv_caches)
        self._spoilt = next(iter(kv_caches.values()))

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Spoil what this step offers, before its grant is issued."""
        for send in connector_metadata.plan.sends:
            # The dimension of KV blocks is by far the largest.
            axis = max(range(self._spoilt.dim()), key=lambda dim: int(self._spoilt.shape[dim]))
            numbers = self._spoilt.select(axis, send.groups[0].blocks[0])
            first = (0,) * numbers.dim()
            numbers[first] = _flip(float(numbers[first]))
        super().bind_connector_metadata(connector_metadata)


def _flip(value: float) -> float:
    """A float32 with the low seven bits of its highest byte inverted."""
    data = bytearray(struct.pack("<f", value))
    data[3] ^= 0x7F
    return float(struct.unpack("<f", data)[0])
