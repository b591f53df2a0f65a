"""Bytes that know where they belong, so that a check can name the page and the offset that are wrong.

The 64-bit word number ``i`` of a source buffer is ``(i + 1) * MULTIPLIER + salt`` modulo 2**64. The
multiplier is odd, so every position has another value, and a value found in the wrong place tells where it
came from.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint64]

MULTIPLIER = 0x9E3779B97F4A7C15
_MODULUS = 1 << 64
_INVERSE = pow(MULTIPLIER, -1, _MODULUS)
_FILL_WORDS = 1 << 17
POISON = 0xA5


@dataclass(frozen=True)
class Mismatch:
    """The first wrong byte of a check."""

    page: int
    source_page: int
    offset: int
    found: int
    expected: int
    holds: tuple[int, int] | None
    """(page, offset) of the source whose word lies here, if it is a word of the source at all."""

    def __str__(self) -> str:
        text = (
            f"page {self.page} at byte {self.offset}: found {self.found:#04x}, "
            f"expected {self.expected:#04x} of source page {self.source_page}"
        )
        if self.holds is not None:
            text += f"; the bytes there are those of source page {self.holds[0]} at byte {self.holds[1]}"
        return text


def _ramp(words: int) -> Words:
    return np.arange(1, words + 1, dtype=np.uint64) * np.uint64(MULTIPLIER)


def _base(first_word: int, salt: int) -> np.uint64:
    return np.uint64((first_word * MULTIPLIER + salt) % _MODULUS)


def fill(buffer: Bytes, salt: int) -> None:
    """Write the pattern over all whole words of ``buffer``."""
    words = buffer[: buffer.size - buffer.size % 8].view(np.uint64)
    ramp = _ramp(min(_FILL_WORDS, words.size))
    for first in range(0, words.size, _FILL_WORDS):
        part = words[first : first + _FILL_WORDS]
        np.add(ramp[: part.size], _base(first, salt), out=part)


def poison(buffer: Bytes, page_bytes: int, ids: Iterable[int]) -> None:
    """Overwrite pages with one byte all over, so that what lay there before cannot pass for new."""
    for page in ids:
        start = int(page) * page_bytes
        buffer[start : start + page_bytes] = POISON


def check(
    buffer: Bytes, page_bytes: int, ids: Iterable[int], source_ids: Iterable[int], salt: int
) -> Mismatch | None:
    """Compare pages ``ids`` of ``buffer`` with pages ``source_ids`` of a source filled with ``salt``."""
    page_words = page_bytes // 8
    ramp = _ramp(page_words)
    expected = np.empty(page_words, dtype=np.uint64)
    for page, source_page in zip(ids, source_ids, strict=True):
        start = int(page) * page_bytes
        found = buffer[start : start + page_bytes].view(np.uint64)
        np.add(ramp, _base(int(source_page) * page_words, salt), out=expected)
        if not np.array_equal(found, expected):
            return _first_wrong(found, expected, int(page), int(source_page), buffer.size, salt)
    return None


def _first_wrong(
    found: Words, expected: Words, page: int, source_page: int, buffer_bytes: int, salt: int
) -> Mismatch:
    found_bytes, expected_bytes = found.view(np.uint8), expected.view(np.uint8)
    offset = int(np.flatnonzero(found_bytes != expected_bytes)[0])
    word = (int(found[offset // 8]) - salt) * _INVERSE % _MODULUS - 1
    holds = None
    if 0 <= word < buffer_bytes // 8:
        holds = divmod(word * 8, found_bytes.size)
    return Mismatch(page, source_page, offset, int(found_bytes[offset]), int(expected_bytes[offset]), holds)
