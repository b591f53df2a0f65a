"""What vLLM calls when it starts, in each of its processes: the entry point `kvik` of `vllm.general_plugins`.

vLLM's `MultiConnector` looks its connectors up by name, in processes that have no path to their modules.
"""

from __future__ import annotations

import contextlib


def register() -> None:
    """Make `KvikConnector` known to vLLM by its name; nothing of it is imported before it is asked for."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    # It says so where the name is known already, which is as good.
    with contextlib.suppress(ValueError):
        KVConnectorFactory.register_connector("KvikConnector", "kvik.vllm", "KvikConnector")
