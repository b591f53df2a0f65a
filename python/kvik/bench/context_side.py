"""Either side of `kvik bench context`: an engine, memory for one piece, and the KV in it."""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

import kvik
from kvik.bench.errors import BenchError
from kvik.bench.facts import cores_usable
from kvik.bench.target import engine_at
from kvik.emulator import wire
from kvik.emulator.content import WORD, KvFunction, chain_of, root_of
from kvik.emulator.tokens import FIRST_BYTE_TOKEN
from kvik.emulator.wire import Message
from kvik.shapes import ModelShape

PROMPT_SEED = 11
DEADLINE_S = 300.0
_GB = 1e9
_MOST_TOKENS = 1 << 32


@dataclass(frozen=True)
class Order:
    """What is moved: `tokens` tokens, in pieces of `pages` pages of `page_tokens` tokens."""

    shape: ModelShape
    tokens: int
    page_tokens: int
    pages: int
    transport: str

    @property
    def piece_tokens(self) -> int:
        """Tokens of a piece."""
        return self.pages * self.page_tokens

    @property
    def pieces(self) -> int:
        """How many pieces there are."""
        return -(-self.tokens // self.piece_tokens)

    @property
    def nbytes(self) -> int:
        """Bytes of a piece."""
        return self.pages * self.shape.page_bytes(self.page_tokens)

    def bounds(self, piece: int) -> tuple[int, int]:
        """Its first token, and the one after its last."""
        first = piece * self.piece_tokens
        return first, min(first + self.piece_tokens, self.tokens)


def pages_for(shape: ModelShape, page_tokens: int, tokens: int, nbytes: int) -> int:
    """Pages of a piece that fits into `nbytes`; `BenchError` when none does, or KV cannot be made up."""
    row = shape.content * shape.element_bytes
    if row % WORD:
        raise BenchError(
            f"the KV of one token and head of {shape.name} is {row} bytes; made up it is a multiple of {WORD}"
        )
    if not FIRST_BYTE_TOKEN < shape.vocab_size <= _MOST_TOKENS:
        raise BenchError(
            f"{shape.name} has {shape.vocab_size} tokens; a context is made of {FIRST_BYTE_TOKEN + 1} to "
            f"{_MOST_TOKENS}"
        )
    page = shape.page_bytes(page_tokens)
    if page > nbytes:
        raise BenchError(f"a page of {shape.name} is {page} bytes; {nbytes} bytes on either side hold none")
    return min(nbytes // page, -(-tokens // page_tokens))


class Side:
    """One process's engine and memory. The pages of a piece lie in the order of `numbers`."""

    def __init__(self, order: Order, name: str, numbers: Any) -> None:
        self._order = order
        layout = order.shape.of_rank(order.page_tokens)
        self._engine = engine_at(name=name, transport=order.transport, deadline=DEADLINE_S)
        self._region = self._engine.allocate(order.nbytes)
        self._layout = layout.layout(order.pages)
        self._numbers = np.asarray(numbers, dtype=np.uint32)
        self.bytes = np.frombuffer(memoryview(self._region), dtype=np.uint8)
        self._words = self.bytes.view(np.uint64).reshape(
            layout.layers, order.pages, len(layout.heads), order.page_tokens, -1
        )
        self._kv = KvFunction(layout.layers, list(layout.heads), self._words.shape[4], cores_usable())

    def _pages(self, first: int, last: int) -> Any:
        return self._numbers[: -(-(last - first) // self._order.page_tokens)]

    def fill(self, first: int, chain: Any) -> None:
        """Write the KV of the tokens from `first` on."""
        self._kv.fill(self._words, self._pages(first, first + chain.size), first, chain)

    def digest(self, first: int, last: int) -> int:
        """Read every byte of the tokens `first` to `last`."""
        return self._kv.read(self._words, self._pages(first, last), first, last)

    def grant(self, first: int, last: int) -> kvik.Grant:
        """Let one reader have them."""
        return self._engine.grant(
            self._region.pages(self._layout, self._pages(first, last)), expiry=DEADLINE_S
        )

    def read_from(self, ticket: str, first: int, last: int) -> kvik.Report:
        """Read them from their owner, page by page into this side's own places."""
        target = self._region.pages(self._layout, self._pages(first, last))
        return self._engine.read(target, kvik.Ticket(ticket)).wait(DEADLINE_S)

    def close(self) -> None:
        """End the engine."""
        self._engine.close()


def main() -> None:
    """`python -m kvik.bench.context_side FD`: be the owner, for whoever holds the socket's other end."""
    front = socket.socket(fileno=int(sys.argv[1]))
    message = wire.receive(front)
    if message is None:
        return
    order: Order = wire.build(Order, message.fields["order"])
    rng = np.random.default_rng(PROMPT_SEED)
    tokens = rng.integers(FIRST_BYTE_TOKEN, order.shape.vocab_size, size=order.tokens, dtype=np.uint32)
    chain, _ = chain_of(root_of(order.shape.name, None), tokens, 0, 0)
    side = Side(order, "owner", np.arange(order.pages))
    side.bytes[:] = 0
    grant: kvik.Grant | None = None
    while (message := wire.receive(front)) is not None:
        if grant is not None and grant.wait(DEADLINE_S) != "consumed":
            raise BenchError(f"the piece before was not read: its grant is {grant.state}")
        first, last = order.bounds(int(message.fields["piece"]))
        start = time.perf_counter()
        side.fill(first, chain[first:last])
        seconds = time.perf_counter() - start
        size = (last - first) * order.shape.kv_bytes_per_token()
        digest = side.digest(first, last)
        grant = side.grant(first, last)
        answer = {"ticket": str(grant.ticket), "digest": digest, "fill": size / seconds / _GB}
        wire.send(front, Message("made", answer))
    side.close()


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        try:
            main()
        except (kvik.KvikError, BenchError) as error:
            sys.exit(f"kvik bench context, the owner's process: {error}")
