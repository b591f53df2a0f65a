"""A trace of requests through a server and a client, as an engine would have sent them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import kvik
from kvik.store.bench.served import served

BLOCK = 4096
"""Bytes of a block: what is measured is which blocks stay, not how fast they move."""
LEAST = (1 << 20) // BLOCK
"""Blocks that the smallest memory of a store has room for."""
_CALL = 1024  # blocks of one call
_NAMESPACE = kvik.Namespace(
    model="bench replay",
    kv_dtype="bfloat16",
    layers=(0, 1),
    model_layers=1,
    heads=(0, 1),
    model_heads=1,
    block_tokens=512,
)


@dataclass
class Outcome:
    """Blocks that were asked for, and those of them that came; and how long all of it took."""

    requests: int = 0
    references: int = 0
    hits: int = 0
    refused: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        """Hits a reference, 0 to 1."""
        return self.hits / max(self.references, 1)


def requests(trace: Path) -> Iterator[list[bytes]]:
    """What the blocks of each request are called, by their ids. Empty lines are passed over. Raises
    InvalidArgument for a line that has none."""
    with trace.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                names = [int(one).to_bytes(8, "little") * 2 for one in json.loads(line)["hash_ids"]]
            except (ValueError, KeyError, TypeError, OverflowError):
                raise kvik.InvalidArgument(f"{trace}, line {number}: no `hash_ids`") from None
            yield names


class _Client:
    def __init__(self, engine: kvik.Engine, address: str) -> None:
        layout = kvik.Layout(_CALL, BLOCK)
        self._layout = layout
        self._region = engine.allocate(layout.nbytes)
        self._store = kvik.Store.connect(engine, address, _NAMESPACE, layout)

    def request(self, blocks: list[bytes], outcome: Outcome) -> None:
        """Get the leading blocks that are there, then put the others."""
        keys = [self._store.keys_of([block]) for block in blocks]
        there = 0
        while there < len(keys):
            some, before = keys[there : there + _CALL], b"".join(keys[:there])
            more = self._store.get(b"".join(some), self._pages(len(some)), before=before).wait()
            there += more
            if more < len(some):
                break
        outcome.requests += 1
        outcome.references += len(keys)
        outcome.hits += there
        for at in range(there, len(keys), _CALL):
            some, before = keys[at : at + _CALL], b"".join(keys[:at])
            put = self._store.put(b"".join(some), self._pages(len(some)), before=before)
            outcome.refused += put.wait().refused

    def _pages(self, count: int) -> kvik.PageSet:
        return self._region.pages(self._layout, range(count))


def replayed(trace: Path, capacity: int) -> Outcome:
    """All requests, one after the other, through a store of so many blocks, at least `LEAST`. Raises
    `KvikError`."""
    outcome = Outcome()
    arguments = ["--memory", str(capacity * BLOCK)]
    with served(arguments) as address, kvik.Engine() as engine:
        client = _Client(engine, address)
        began = time.perf_counter()
        for blocks in requests(trace):
            if blocks:
                client.request(blocks, outcome)
        outcome.seconds = time.perf_counter() - began
    return outcome
