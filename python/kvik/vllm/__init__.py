"""kvik as a vLLM KV connector: prefill/decode handover by pull.

Load it by module path, on the prefill and on the decode server::

    --kv-transfer-config '{"kv_connector": "KvikConnector", "kv_connector_module_path": "kvik.vllm",
                           "kv_role": "kv_producer", "kv_load_failure_policy": "recompute",
                           "kv_connector_extra_config": {"listen": "127.0.0.1:0"}}'

The way of one request, in the order of the modules:

1. prefill, `scheduler.py`: a finished request keeps its KV blocks and returns `kv_transfer_params`
   (`protocol.py`) with one ticket a rank and the content digest of the prompt (`digest.py`);
2. prefill, `worker.py`: each rank issues the grant over those blocks (`layout.py` says where they lie);
3. decode, `scheduler.py`: the digest and the shape are compared with the request's own, blocks are allocated;
4. decode, `worker.py`: each rank reads the blocks that are missing, and says so when they are there;
5. prefill, `worker.py`: the grant has ended, the blocks go back to vLLM.

Anything that does not fit is recomputed by the decode server, never used.
"""

from kvik.vllm.versions import SUPPORTED, check_installed

check_installed()

from kvik.vllm.connector import KvikConnector  # noqa: E402  (an unsupported vLLM must be named before its API is used)

__all__ = ["SUPPORTED", "KvikConnector"]
