"""Handing one request's KV from a prefill server to a decode server, whatever the serving engine.

An adapter (`kvik.vllm`, `kvik.emulator`) translates its engine's objects and calls these, in this order:

1. prefill, `scheduler.py`: a finished request keeps its KV blocks and returns `kv_transfer_params`
   (`protocol.py`) with one ticket a rank and the content digest of the prompt (`digest.py`), which has its
   images by their bytes (`items.py`);
2. prefill, `worker.py`: each rank issues the grant over those blocks (`memory.py` says where they lie);
3. decode, `scheduler.py`: the digest and the shape are compared with the request's own, blocks are allocated;
4. decode, `worker.py`: each rank reads the blocks that are missing, and says so when they are there;
5. prefill, `worker.py`: the grant has ended, the blocks go back to the serving engine.

Or both servers have the request from the beginning, and its KV goes over in parts (`streaming.py`):
prefill's scheduler side says which segments of the prompt a step completes (`sending.py`), its ranks grant
each range of layers when it is written (`issuing.py`), and decode's load is of all parts.

Anything that does not fit is recomputed by the decode server, never used.
"""
