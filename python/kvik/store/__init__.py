"""A KV-cache that outlives the engines which fill it.

store = kvik.Store.embedded(engine, namespace, layout)      a store within this process
store = kvik.Store.connect(engine, address, namespace, layout)   one that `kvik store serve` serves
keys = store.keys(tokens)                                   32 bytes for each whole block of a prompt
store.put(keys, pages).wait()                               page n of the page set is the block of key n
for there in store.get(keys, pages): ...                    how many blocks are there, from the first one on

A block is found again by whoever has the same namespace and the same tokens up to its end, and by nobody
else. What is read was compared with the checksum of what was put: `get` raises rather than count a block that
is another.
"""

from kvik._native import block_keys, block_keys_of, namespace_id
from kvik.store.client import Get, Put, Store
from kvik.store.names import AckName, Choice, Member, Namespace, PolicyName, ReasonName, Stored
from kvik.store.tenants import Tenant

__all__ = [
    "AckName",
    "Choice",
    "Get",
    "Member",
    "Namespace",
    "PolicyName",
    "Put",
    "ReasonName",
    "Store",
    "Stored",
    "Tenant",
    "block_keys",
    "block_keys_of",
    "namespace_id",
]
