"""Prompts that are exact in tokens: as ids, as bytes, or as words of a model's own tokenizer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np

from kvik_lab.errors import LabError
from kvik_lab.load.spec import ByteTokens, HuggingFace, Ids

Content: TypeAlias = str | tuple[int, ...]
"""A prompt, or a part of one: text, or token ids."""

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_WORD = re.compile(r"[Ġ▁]([a-z]{3,12})")
_ENOUGH_WORDS = 100
_MOST_WORDS = 5000
_CORRECTIONS = 50


class Tokenizer(Protocol):
    """Makes content, and counts it as the server will."""

    def extend(self, before: Content, count: int, draw: np.random.Generator) -> Content:
        """`before`, and `count` more tokens behind it. Raises `LabError` where that cannot be met."""

    def count(self, content: Content) -> int:
        """Its tokens, without those that the server adds to every prompt."""

    @property
    def empty(self) -> Content:
        """Nothing."""


class IdTokens:
    """Token ids, drawn evenly."""

    empty: Content = ()

    def __init__(self, spec: Ids) -> None:
        self._low, self._high = spec.low, spec.high

    def extend(self, before: Content, count: int, draw: np.random.Generator) -> Content:
        """See `Tokenizer`."""
        return (*before, *draw.integers(self._low, self._high, count).tolist())

    def count(self, content: Content) -> int:
        """One each."""
        return len(content)


class ByteText:
    """Text of small letters and spaces, of which each byte is a token."""

    empty: Content = ""

    def extend(self, before: Content, count: int, draw: np.random.Generator) -> Content:
        """See `Tokenizer`."""
        drawn = draw.choice(list(_LETTERS + " "), count)
        return f"{before}{''.join(drawn)}"

    def count(self, content: Content) -> int:
        """Its bytes in UTF-8."""
        return len(str(content).encode())


class WordText:
    """Text of words that are one token each, by a tokenizer of the library `tokenizers`."""

    empty: Content = ""

    def __init__(self, tokenizer: Any, source: str) -> None:
        self._tokenizer = tokenizer
        self._source = source
        found = (_WORD.fullmatch(token) for token in sorted(tokenizer.get_vocab()))
        words = [match.group(1) for match in found if match]
        self._words = [word for word in words[: 4 * _MOST_WORDS] if self.count(f" {word}") == 1][:_MOST_WORDS]
        if len(self._words) < _ENOUGH_WORDS:
            raise LabError(
                f"{source}: has {len(self._words)} words of one token, too few to make text of; state "
                f"prompt.by with "
                "kind ids, or bytes where each byte is a token"
            )

    def extend(self, before: Content, count: int, draw: np.random.Generator) -> Content:
        """See `Tokenizer`. Words, then as many more or fewer as the count is off: joined, they may merge."""
        wanted = self.count(before) + count
        words = [self._words[at] for at in draw.integers(0, len(self._words), count)]
        for _ in range(_CORRECTIONS):
            text = f"{before}{''.join(f' {word}' for word in words)}"
            off = wanted - self.count(text)
            if off == 0:
                return text
            if off > 0:
                words += [self._words[at] for at in draw.integers(0, len(self._words), off)]
            else:
                del words[off:]
        raise LabError(
            f"{self._source}: no text of exactly {count} tokens was found in {_CORRECTIONS} tries; state "
            f"prompt.by with "
            "kind ids"
        )

    def count(self, content: Content) -> int:
        """As the tokenizer counts."""
        return len(self._tokenizer.encode(str(content), add_special_tokens=False).ids)


def open_tokenizer(spec: Ids | ByteTokens | HuggingFace) -> Tokenizer:
    """The tokenizer that a specification names. Raises `LabError` where it is not there."""
    if spec.kind == "ids":
        return IdTokens(spec)
    if spec.kind == "bytes":
        return ByteText()
    try:
        import tokenizers
    except ModuleNotFoundError as error:
        raise LabError(
            "prompts of a model's words need the library that has its tokenizer: pip install tokenizers; or "
            "state prompt.by with kind ids"
        ) from error
    file = spec.file()
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises Exception itself
        raise LabError(f"{file}: cannot be read as a tokenizer: {error}") from error
    return WordText(tokenizer, str(file))


def as_bytes(content: Content) -> bytes:
    """What a digest is taken of: text as UTF-8, ids as little-endian 32-bit numbers."""
    if isinstance(content, str):
        return content.encode()
    return ids_as_bytes(content)


def ids_as_bytes(ids: Sequence[int]) -> bytes:
    """Ids as little-endian 32-bit numbers."""
    return np.asarray(ids, dtype="<u4").tobytes()
