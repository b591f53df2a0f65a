"""What KV bytes are here, and how they are read.

**Writing.** A token's *chain value* covers all tokens up to it: ``chain[t] = mix(root + sum of
mix(position_i, token_i) for i <= t)``, mod 2^64. The sum is a prefix sum, so numpy makes a prompt's values in
one pass; ``root`` covers the model's shape and the request's cache salt. One (layer, head, token) row of
``words`` 64-bit words is ``w_j = mix(chain[t] ^ C[layer, head]) ^ D_j``.

**Reading.** The digest of some rows is ``sum of mix(sum_j w_j * B_j + C2[layer, head] + P[t])``, mod 2^64.
All ``B_j`` are odd, so a row with one changed word has another inner sum, for certain; ``mix`` is a
bijection, so one changed row changes the digest, for certain; rows that trade places change it but for a
chance of about 2^-64. A sum over rows can be taken in any order and in any parts, so it does not depend on
ranks or on page size, and grows token by token.

``mix`` is the finaliser of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators,
OOPSLA 2014). Nothing here resists somebody who wants to fool it; it finds faults.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]
PageNumbers = npt.NDArray[np.uint32]

MASK = (1 << 64) - 1
WORD = 8
# Rows are worked on in pieces of this many bytes, which stay in a core's own cache.
CHUNK = 256 << 10
# Below this, handing parts to threads costs more than it saves.
THREADED_FROM = 8 << 20
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31 = np.uint64(30), np.uint64(27), np.uint64(31)


def mix64(values: Words) -> Words:
    """Mix an array in place, and return it."""
    values ^= values >> _S30
    values *= _FIRST
    values ^= values >> _S27
    values *= _SECOND
    values ^= values >> _S31
    return values


def mix64_int(value: int) -> int:
    """The same for one number below 2^64."""
    value = ((value ^ (value >> 30)) * int(_FIRST)) & MASK
    value = ((value ^ (value >> 27)) * int(_SECOND)) & MASK
    return value ^ (value >> 31)


def _constants(tag: int, count: int) -> Words:
    """`count` numbers that look random and are the same everywhere."""
    return mix64(np.arange(count, dtype=np.uint64) + np.uint64((tag * _GOLDEN) & MASK))


_ROW, _WORD_XOR, _WORD_TIMES, _READ_ROW, _POSITION = range(1, 6)


def root_of(shape_name: str, cache_salt: str | None) -> int:
    """Where the chain of a request begins: other shapes and other salts have other KV."""
    text = f"{len(shape_name)}:{shape_name}:{cache_salt or ''}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=WORD).digest(), "little")


def chain_of(root: int, tokens: npt.NDArray[np.uint32], start: int, before: int) -> tuple[Words, int]:
    """Chain values of `tokens` at positions from `start` on, and the running sum after them.

    `before` is the running sum after position ``start - 1``; 0 at the beginning.
    """
    positions = np.arange(start, start + tokens.size, dtype=np.uint64)
    sums = mix64((positions << np.uint64(32)) | tokens.astype(np.uint64))
    np.cumsum(sums, out=sums)
    sums += np.uint64(before)
    after = int(sums[-1]) if sums.size else before
    sums += np.uint64(root)
    return mix64(sums), after


@dataclass(frozen=True)
class Span:
    """Pages of which the slots `begin` to `end` are meant; the first holds the `token`th token asked for."""

    pages: PageNumbers
    begin: int
    end: int
    token: int

    @property
    def tokens(self) -> int:
        """How many tokens lie there."""
        return self.pages.size * (self.end - self.begin)


def spans(pages: PageNumbers, first: int, last: int, page_tokens: int) -> Iterator[Span]:
    """Cut the tokens `first` to `last` (exclusive) into a part of a page, whole pages, and a part of a page.

    `pages` are the pages that hold them, beginning with that of `first`. `Span.token` counts from `first`.
    """
    at, page = first, 0
    if at % page_tokens and at < last:
        end = min(last, at - at % page_tokens + page_tokens)
        yield Span(pages[:1], at % page_tokens, at % page_tokens + end - at, 0)
        at, page = end, 1
    whole = (last - at) // page_tokens
    if whole:
        yield Span(pages[page : page + whole], 0, page_tokens, at - first)
        at, page = at + whole * page_tokens, page + whole
    if at < last:
        yield Span(pages[page : page + 1], 0, last - at, at - first)


class KvFunction:
    """Writes and reads the KV of some heads of a model, in ``[layers, pages, heads, tokens, words]``.

    heads: their numbers in the whole model, so that ranks agree on what is whose.
    """

    def __init__(self, layers: int, heads: Sequence[int], words: int, threads: int = 1) -> None:
        self.layers = layers
        self.words = words
        self._heads = len(heads)
        rows = np.arange(layers, dtype=np.uint64)[:, None] << np.uint64(32)
        rows = rows | np.asarray(heads, dtype=np.uint64)[None, :]
        self._row = mix64(rows + np.uint64((_ROW * _GOLDEN) & MASK))
        self._read_row = mix64(rows + np.uint64((_READ_ROW * _GOLDEN) & MASK))
        self._xor = _constants(_WORD_XOR, words)
        self._times = _constants(_WORD_TIMES, words) | np.uint64(1)
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, "kvik-emulator-kv") if threads > 1 else None

    def fill(self, memory: Words, pages: PageNumbers, first: int, chain: Words) -> None:
        """Write the KV of the tokens from `first` on, which have these chain values, into `pages`."""
        for span in spans(pages, first, first + chain.size, memory.shape[3]):
            values = chain[span.token : span.token + span.tokens]
            self._by_layers(span, partial(self._fill, memory, span, values))

    def read(self, memory: Words, pages: PageNumbers, first: int, last: int) -> int:
        """The digest of the tokens `first` to `last` (exclusive) that lie in `pages`: every byte of them."""
        total = 0
        for span in spans(pages, first, last, memory.shape[3]):
            at = np.arange(first + span.token, first + span.token + span.tokens, dtype=np.uint64)
            places = mix64(at + np.uint64((_POSITION * _GOLDEN) & MASK))
            total += self._by_layers(span, partial(self._read, memory, span, places))
        return total & MASK

    def _by_layers(self, span: Span, work: Callable[[int, int], int]) -> int:
        """Do all layers of a span, on several threads where that pays; numpy lets them run side by side."""
        size = self.layers * self._heads * span.tokens * self.words * WORD
        if self._pool is None or size < THREADED_FROM:
            return work(0, self.layers)
        cuts = [self.layers * part // self._threads for part in range(self._threads + 1)]
        return sum(self._pool.map(work, cuts[:-1], cuts[1:]))

    def _blocks(self, span: Span, low: int, high: int) -> Iterator[tuple[slice, slice]]:
        """Pieces of about `CHUNK` bytes: some pages of one layer, or all pages of some layers."""
        page = self._heads * (span.end - span.begin) * self.words * WORD
        pages = max(1, min(span.pages.size, CHUNK // page))
        layers = max(1, CHUNK // (page * span.pages.size)) if pages == span.pages.size else 1
        for layer in range(low, high, layers):
            for first in range(0, span.pages.size, pages):
                yield slice(layer, min(layer + layers, high)), slice(first, first + pages)

    def _fill(self, memory: Words, span: Span, chain: Words, low: int, high: int) -> int:
        # [pages, tokens of a page], to be mixed with each (layer, head).
        chain = chain.reshape(span.pages.size, 1, -1)
        for layers, pages in self._blocks(span, low, high):
            rows = mix64(chain[pages] ^ self._row[layers, None, :, None])[..., None]
            where = _view(memory, span, layers, pages)
            if where is not None:
                np.bitwise_xor(rows, self._xor, out=where)
            else:
                memory[layers, span.pages[pages], :, span.begin : span.end] = rows ^ self._xor
        return 0

    def _read(self, memory: Words, span: Span, places: Words, low: int, high: int) -> int:
        places = places.reshape(span.pages.size, 1, -1)
        total = 0
        for layers, pages in self._blocks(span, low, high):
            where = _view(memory, span, layers, pages)
            if where is None:
                where = memory[layers, span.pages[pages], :, span.begin : span.end]
            rows = np.einsum("lphtw,w->lpht", where, self._times)
            rows += self._read_row[layers, None, :, None]
            rows += places[pages]
            total += int(mix64(rows).sum(dtype=np.uint64))
        return total


def _view(memory: Words, span: Span, layers: slice, pages: slice) -> Words | None:
    """The pages themselves where they lie side by side in this order; None where they have to be gathered."""
    numbers = span.pages[pages]
    first, last = int(numbers[0]), int(numbers[-1])
    if last - first != numbers.size - 1 or (np.diff(numbers.astype(np.int64)) != 1).any():
        return None
    return memory[layers, first : last + 1, :, span.begin : span.end]
