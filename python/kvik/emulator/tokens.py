"""From the digest of a request's KV to its next token, and between text and tokens.

Text is bytes: token 3 + b stands for byte b, as in the tokenizer of `kvik.demo.checkpoint`, so the same
prompt text has the same token ids here and there. Tokens beyond the bytes are shown as made-up words.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from kvik.emulator.content import MASK, mix64_int

BOS, EOS, PAD = 0, 1, 2
FIRST_BYTE_TOKEN = 3
FIRST_WORD_TOKEN = FIRST_BYTE_TOKEN + 256
# One answer in so many ends at any given token, unless `ignore_eos` is given: some do end by themselves.
EOS_ONE_IN = 256
_CONSONANTS, _VOWELS = "bdfghjklmnprstvz", "aeiou"
_SYLLABLES = [consonant + vowel for consonant in _CONSONANTS for vowel in _VOWELS]


def next_token(digest: int, tokens: int, vocab_size: int, *, may_end: bool) -> int:
    """The token after `tokens` tokens whose KV has this digest.

    Wrong KV has another digest, for certain (`kvik.emulator.content`), and so another token but for one
    chance in about `vocab_size`; over several tokens that chance vanishes.
    """
    drawn = mix64_int((digest + tokens * 0x9E3779B97F4A7C15) & MASK)
    if may_end and (drawn >> 40) % EOS_ONE_IN == 0:
        return EOS
    return FIRST_BYTE_TOKEN + mix64_int(drawn) % (vocab_size - FIRST_BYTE_TOKEN)


def encode(text: str) -> npt.NDArray[np.uint32]:
    """The tokens of a text: its UTF-8 bytes."""
    tokens = np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint32)
    tokens += FIRST_BYTE_TOKEN
    return tokens


class Detokenizer:
    """Tokens as text, piece by piece: bytes where they are bytes, else words; special tokens left out."""

    def __init__(self) -> None:
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, tokens: Iterable[int], *, last: bool = False) -> str:
        """The text of some more tokens; a character that is not complete yet waits for the rest of it."""
        out = bytearray()
        for token in tokens:
            if token >= FIRST_WORD_TOKEN:
                out += f" {_word(token - FIRST_WORD_TOKEN)}".encode()
            elif token >= FIRST_BYTE_TOKEN:
                out.append(token - FIRST_BYTE_TOKEN)
        return self._bytes.decode(bytes(out), last)


def _word(number: int) -> str:
    """At least two syllables, another word for every number."""
    syllables = [_SYLLABLES[number % len(_SYLLABLES)]]
    number //= len(_SYLLABLES)
    while number or len(syllables) < 2:
        syllables.append(_SYLLABLES[number % len(_SYLLABLES)])
        number //= len(_SYLLABLES)
    return "".join(syllables)
