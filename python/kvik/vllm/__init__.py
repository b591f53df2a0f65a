"""kvik as a vLLM KV connector: prefill/decode handover by pull.

Load it by module path, on the prefill and on the decode server::

    --kv-transfer-config '{"kv_connector": "KvikConnector", "kv_connector_module_path": "kvik.vllm",
                           "kv_role": "kv_producer", "kv_load_failure_policy": "recompute",
                           "kv_connector_extra_config": {"listen": "127.0.0.1:0"}}'

`connector.py` is what vLLM talks to, and `kvik._vllm_plugin` makes its name known there. `layout.py` and
`packing.py` look at its KV tensors, `observe.py` feeds its metrics, `events.py` its KV events, and `log.py`
its log.
All else is `kvik.handover`, which knows no serving engine.

Anything that does not fit is recomputed by the decode server, never used.
"""

from kvik.vllm.versions import SUPPORTED, check_installed

check_installed()

from kvik._vllm_plugin import register  # noqa: E402  (an unsupported vLLM must be named before its API is used)
from kvik.vllm.connector import KvikConnector  # noqa: E402  (the same)

register()  # vLLM calls no plugin that VLLM_PLUGINS leaves out

__all__ = ["SUPPORTED", "KvikConnector"]
