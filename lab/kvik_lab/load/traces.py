"""Replay of a recorded trace: its arrivals, its lengths, and which beginnings its prompts have in common.

The format is that of the traces published with Mooncake (Qin et al., FAST 2025; FAST25-release/traces in its
repository): a line of JSON a request with `timestamp` in ms, `input_length`, `output_length`, and `hash_ids`,
one for each 512 tokens of the prompt. Equal ids stand for equal tokens at that place, with all before them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvik_lab.errors import LabError
from kvik_lab.load.prompts import Made
from kvik_lab.load.spec import Trace
from kvik_lab.load.tokens import Content, Tokenizer

_KEPT_BLOCKS = 4096


class _Line(BaseModel):
    """One request of a trace; further keys are let be."""

    model_config = ConfigDict(strict=True, frozen=True)

    timestamp: float = Field(ge=0, allow_inf_nan=False)
    input_length: int = Field(ge=1)
    output_length: int = Field(ge=0)
    hash_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Recorded:
    """A request of a trace: when it is due (seconds from the first), its prompt, and its answer's tokens."""

    due: float
    prompt: Made
    output: int


@lru_cache(maxsize=8)
def longest(spec: Trace, count: int) -> int:
    """Tokens of the longest prompt with its answer, of the first `count` requests. Raises `LabError`."""
    return max(sum(_lengths(spec, line)) for _, line in _lines(spec, count))


class Replay:
    """The requests of a trace as prompts: each hash id is `block_tokens` tokens, drawn from the id."""

    def __init__(self, spec: Trace, tokenizer: Tokenizer, seed: int) -> None:
        self._spec = spec
        self._tokenizer = tokenizer
        self._seed = seed
        self._blocks: dict[int, Content] = {}
        self._seen: set[tuple[int, ...]] = set()

    def requests(self, count: int) -> Iterator[Recorded]:
        """The first `count` of it. Raises `LabError` with the line that is none, or is behind a later one: it
        would be sent after that one, and what it waited be taken for the server's."""
        zero: float | None = None
        last: float | None = None
        for number, line in _lines(self._spec, count):
            zero = line.timestamp if zero is None else zero
            if last is not None and line.timestamp < last:
                raise LabError(
                    f"{self._spec.file}, line {number}: timestamp is {line.timestamp:g}, and the line before "
                    f"has {last:g}; sort the lines by it"
                )
            last = line.timestamp
            due = (line.timestamp - zero) / 1000.0 / self._spec.speed
            tokens, output = _lengths(self._spec, line)
            yield Recorded(due, self._prompt(line, number, tokens), output)

    def _prompt(self, line: _Line, number: int, tokens: int) -> Made:
        block = max(1, round(self._spec.block_tokens * self._spec.scale_tokens))
        ids = line.hash_ids or (-number,)
        if line.hash_ids and len(ids) * block < tokens - block:
            raise LabError(
                f"{self._spec.file}, line {number}: {len(ids)} hash ids of {self._spec.block_tokens} tokens "
                f"for "
                f"{line.input_length} tokens; state the trace's block_tokens"
            )
        if not line.hash_ids:
            return Made(self._block(-number, tokens), tokens)
        content = self._tokenizer.empty
        for at, one in enumerate(ids):
            last = at == len(ids) - 1
            count = tokens - at * block if last else min(block, tokens - at * block)
            if count <= 0:
                break
            content = _joined(content, self._block(one, count))
        return Made(content, tokens, self._repeated(ids, block, tokens))

    def _repeated(self, ids: tuple[int, ...], block: int, tokens: int) -> int:
        """Tokens of whole blocks that an earlier prompt began with, too; and remember this one."""
        known = 0
        for length in range(1, len(ids) + 1):
            if ids[:length] in self._seen:
                known = length
            else:
                self._seen.add(ids[:length])
        return min(known * block, tokens)

    def _block(self, number: int, count: int) -> Content:
        """The first `count` tokens that an id stands for: always the same."""
        kept = self._blocks.get(number)
        if kept is None or self._tokenizer.count(kept) < count:
            draw = np.random.default_rng([self._seed, 3, number & 0xFFFFFFFFFFFFFFFF])
            most = max(count, round(self._spec.block_tokens * self._spec.scale_tokens))
            kept = self._tokenizer.extend(self._tokenizer.empty, most, draw)
            if len(self._blocks) >= _KEPT_BLOCKS:
                self._blocks.clear()
            self._blocks[number] = kept
        return kept[:count]


def _lines(spec: Trace, count: int) -> Iterator[tuple[int, _Line]]:
    path = Path(spec.file)
    found = 0
    try:
        with path.open(encoding="utf-8") as file:
            for number, text in enumerate(file, 1):
                if number <= spec.first or not text.strip():
                    continue
                if found == count:
                    return
                found += 1
                yield number, _parsed(text, f"{path}, line {number}")
    except (OSError, UnicodeDecodeError) as error:
        raise LabError(f"{path}: cannot be read: {error}; give a trace, a line of JSON a request") from error
    if found < count:
        raise LabError(f"{path}: has {found} requests behind the first {spec.first}, not {count}")


def _parsed(text: str, where: str) -> _Line:
    try:
        return _Line.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise LabError(f"{where}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error


def _lengths(spec: Trace, line: _Line) -> tuple[int, int]:
    """Tokens of its prompt and of its answer."""
    prompt, answer = (
        max(1, round(one * spec.scale_tokens)) for one in (line.input_length, line.output_length)
    )
    return prompt, answer


def _joined(before: Content, behind: Content) -> Content:
    if isinstance(before, str):
        return f"{before}{behind}"
    return (*before, *(behind if not isinstance(behind, str) else ()))
