"""What the programs of this folder share: buffers of blocks, and answers to the words of
`kvik.store.bench.beside`. Needs numpy alone, so that it runs in another system's environment."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np


class Store(Protocol):
    """A store of blocks that are called by text."""

    def put(self, names: Sequence[str], blocks: np.ndarray, order: Sequence[int]) -> None:
        """Store the blocks ``blocks[order[i]]`` under ``names[i]``; they are stored when it returns."""

    def get(self, names: Sequence[str], blocks: np.ndarray, order: Sequence[int]) -> None:
        """Read all of them into ``blocks[order[i]]``."""

    def stream(self, names: Sequence[str], blocks: np.ndarray, order: Sequence[int]) -> Iterator[int]:
        """The same, one after the other."""


class Side:
    """Two buffers of ``blocks`` blocks, and a store between them."""

    def __init__(self, blocks: int, block_bytes: int, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.source = np.empty((blocks, block_bytes), dtype=np.uint8)
        self.source[:] = random.integers(0, 256, block_bytes, dtype=np.uint8)
        self.source[:, :4] = np.arange(blocks, dtype=np.uint32).view(np.uint8).reshape(blocks, 4)
        self.target = np.zeros_like(self.source)
        self.order = [int(one) for one in random.permutation(blocks)]
        self._round = 0

    def _names(self) -> list[str]:
        return [f"{self._round}/{one}" for one in self.order]

    def answer(self, store: Store, word: str) -> dict[str, Any]:
        """Do what a word says."""
        if word == "put":
            self._round += 1
        names = self._names()
        began = time.perf_counter()
        if word == "put":
            store.put(names, self.source, self.order)
        elif word == "get":
            store.get(names, self.target, self.order)
        elif word == "stream":
            if (stream := getattr(store, "stream", None)) is None:
                return {"seconds": None}
            for _ in stream(names, self.target, self.order):
                pass
        elif word == "check":
            self.target[:] = 0
            store.get(names, self.target, self.order)
            if not np.array_equal(self.source, self.target):
                return {"error": "what came back is not what was put"}
        else:
            return {"error": f"{word!r} is no word of this"}
        return {"seconds": time.perf_counter() - began}


def arguments() -> argparse.Namespace:
    """Those of `kvik.store.bench.beside`."""
    parser = argparse.ArgumentParser()
    for name in ("--blocks", "--block-bytes", "--seed"):
        parser.add_argument(name, type=int, required=True)
    return parser.parse_args()


def serve(name: str, side: Side, store: Store) -> None:
    """Answer until the input ends."""
    _say({"ready": name})
    for line in sys.stdin:
        try:
            answer = side.answer(store, line.strip())
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        _say(answer)


def _say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)
