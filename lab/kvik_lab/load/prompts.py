"""What requests ask: made before anything is sent, each different from all others where it is to be."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from kvik_lab.errors import LabError
from kvik_lab.load.spec import Prompt, Shared
from kvik_lab.load.tokens import Content, Tokenizer, as_bytes

TAG_TOKENS = 8
"""Tokens that make a prompt one of its own; behind them, prompts may be equal."""
_TRIES = 100


@dataclass(frozen=True)
class Made:
    """A prompt. `tokens` is None where only the server can count them; `repeated` is how many of them, from
    the beginning, a prompt before it had as well."""

    content: Content
    tokens: int | None
    repeated: int = 0

    def digest(self) -> str:
        """SHA-256 of what is sent: of text as UTF-8, of ids as little-endian 32-bit numbers."""
        return hashlib.sha256(as_bytes(self.content)).hexdigest()


class Maker:
    """Makes the prompts of one load, in their order."""

    def __init__(self, spec: Prompt, tokenizer: Tokenizer, seed: int) -> None:
        self._spec = spec
        self._tokenizer = tokenizer
        self._draw = np.random.default_rng([seed, 1])
        self._base_seed = [seed, 2]
        self._tags: set[Content] = set()
        self._shared: dict[tuple[int, int], Content] = {}
        self._made = 0
        self._bases: dict[int, Content] = {}

    def make(self, tokens: int | None = None) -> Made:
        """The next prompt, of `tokens` tokens or as many as the specification says."""
        tokens = self._spec.tokens if tokens is None else tokens
        number, self._made = self._made, self._made + 1
        if self._spec.shared is not None:
            return self._behind_shared(self._spec.shared, tokens, number)
        if self._spec.unique == "prefix":
            begun = self._tag(self._tokenizer.empty, min(TAG_TOKENS, tokens))
            return Made(self._fill(begun, tokens - min(TAG_TOKENS, tokens)), tokens)
        tail = 0 if self._spec.unique == "none" else min(TAG_TOKENS, tokens)
        repeated = tokens - tail if tokens - tail in self._bases else 0
        base = self._base(tokens - tail)
        return Made(self._tag(base, tail) if tail else base, tokens, repeated)

    def more(self, tokens: int) -> Content:
        """Something new to say, of `tokens` tokens."""
        return self._fill(self._tokenizer.empty, tokens)

    def _behind_shared(self, shared: Shared, tokens: int, number: int) -> Made:
        """One of the shared beginnings, and behind it what no other has."""
        length = round(shared.share * tokens)
        key = (number % shared.groups, length)
        repeated = length if key in self._shared else 0
        if key not in self._shared:
            self._shared[key] = self._tag(self._tokenizer.empty, length)
        tag = min(TAG_TOKENS, tokens - length)
        begun = self._tag(self._shared[key], tag)
        return Made(self._fill(begun, tokens - length - tag), tokens, repeated)

    def _base(self, tokens: int) -> Content:
        """The text that all prompts of this length have in common."""
        if tokens not in self._bases:
            draw = np.random.default_rng([*self._base_seed, tokens])
            self._bases[tokens] = self._tokenizer.extend(self._tokenizer.empty, tokens, draw)
        return self._bases[tokens]

    def _fill(self, before: Content, tokens: int) -> Content:
        return self._tokenizer.extend(before, tokens, self._draw) if tokens else before

    def _tag(self, before: Content, tokens: int) -> Content:
        """`before` and `tokens` more, so that no prompt before has begun so."""
        for _ in range(_TRIES):
            tagged = self._fill(before, tokens)
            if tagged not in self._tags:
                self._tags.add(tagged)
                return tagged
        raise LabError(
            f"{self._made} prompts of {self._spec.tokens} tokens that all differ cannot be drawn from so few "
            "ids; raise prompt.tokens, or the range of ids"
        )
