"""A store as a tier of a serving engine: behind its own prefix cache, before recomputing.

`scheduler.py` is the half in the engine's scheduler process: it names blocks by what their KV depends on,
asks, and decides. `worker.py` is the half in each worker process, which reads into the engine's KV blocks and
writes from them, on threads; `tiers.py` has the two tiers there: a store in the process' own memory before
one that is served. `plan.py` is what passes between the halves. `naming.py` says what blocks are called:
weights, adapters and images by their bytes and not by their names. `unsure.py` keeps saves back until it is
known that their KV is there. `ledger.py` has what was told to whoever follows the store, and `residents.py`
what a process' memory has of it; `rate.py` measures what computing takes, which fetching is weighed against.

No serving engine is known here: its adapter hands in plain objects, as to `kvik.handover`, whose memory,
places and holding of KV blocks are used."""
