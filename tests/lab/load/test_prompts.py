"""Prompts: exact in tokens, different where they are to be, and a trace's own beginnings."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from kvik_lab.errors import LabError
from kvik_lab.load.arrivals import due_times
from kvik_lab.load.prompts import TAG_TOKENS, Maker
from kvik_lab.load.spec import ByteTokens, Constant, Gamma, Ids, Poisson, Prompt, Trace
from kvik_lab.load.tokens import IdTokens, WordText, open_tokenizer
from kvik_lab.load.traces import Replay


class Words:
    """Stands for a library's tokenizer: words are one token, and `in` before `to` merges with it."""

    def __init__(self) -> None:
        self.words = [f"{a}{b}{c}" for a in "bcdfg" for b in "aeiou" for c in "lmnrst"] + ["into"]

    def get_vocab(self) -> dict[str, int]:
        return {f"Ġ{word}": at for at, word in enumerate(self.words)}

    def encode(self, text: str, *, add_special_tokens: bool) -> object:
        assert not add_special_tokens
        count = len(text.split())
        merged = sum(a[0] == b[0] for a, b in zip(text.split(), text.split()[1:], strict=False))
        return type("Encoding", (), {"ids": [0] * (count - merged)})()


@pytest.mark.parametrize("by", [Ids(kind="ids"), ByteTokens(kind="bytes")])
@pytest.mark.parametrize("unique", ["prefix", "suffix", "none"])
@pytest.mark.parametrize("tokens", [1, 8, 9, 500])
def test_exact_and_unique_where_stated(by: Ids | ByteTokens, unique: str, tokens: int) -> None:
    tokenizer = open_tokenizer(by)
    maker = Maker(Prompt.model_validate({"tokens": tokens, "by": by, "unique": unique}), tokenizer, 3)
    made = [maker.make() for _ in range(6)]
    assert {one.tokens for one in made} == {tokens}
    assert {tokenizer.count(one.content) for one in made} == {tokens}
    assert len({one.digest() for one in made}) == (1 if unique == "none" else 6)
    if unique == "suffix" and tokens > TAG_TOKENS:
        assert len({one.content[:-TAG_TOKENS] for one in made}) == 1
        assert [one.repeated for one in made] == [0, *[tokens - TAG_TOKENS] * 5]


def test_words_are_corrected_until_they_are_exact() -> None:
    tokenizer = WordText(Words(), "words")
    draw = np.random.default_rng(0)
    for count in (1, 7, 300):
        text = tokenizer.extend("", count, draw)
        assert tokenizer.count(text) == count
        longer = tokenizer.extend(text, 50, draw)
        assert str(longer).startswith(str(text))
        assert tokenizer.count(longer) == count + 50


def test_too_few_words_are_refused_by_name() -> None:
    few = Words()
    few.words = few.words[:20]
    with pytest.raises(LabError, match="has 20 words of one token"):
        WordText(few, "tokenizer.json")


def test_prompts_that_cannot_differ_are_refused() -> None:
    spec = Prompt(tokens=1, by=Ids(kind="ids", low=0, high=4))
    maker = Maker(spec, IdTokens(Ids(kind="ids", low=0, high=4)), 0)
    assert len({maker.make().digest() for _ in range(4)}) == 4
    with pytest.raises(LabError, match="that all differ cannot be drawn"):
        maker.make()


def _trace(folder: Path, *lines: dict[str, object]) -> str:
    path = folder / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_a_trace_has_its_times_lengths_and_shared_beginnings(tmp_path: Path) -> None:
    file = _trace(
        tmp_path,
        {"timestamp": 1000, "input_length": 1100, "output_length": 5, "hash_ids": [7, 8, 9]},
        {"timestamp": 1500, "input_length": 1030, "output_length": 0, "hash_ids": [7, 8, 3]},
        {"timestamp": 4000, "input_length": 600, "output_length": 9, "hash_ids": [4, 5]},
    )
    replay = Replay(Trace(kind="trace", file=file, speed=2.0), IdTokens(Ids(kind="ids")), 1)
    found = list(replay.requests(3))
    assert [one.due for one in found] == [0.0, 0.25, 1.5]
    assert (
        [one.prompt.tokens for one in found]
        == [len(one.prompt.content) for one in found]
        == [1100, 1030, 600]
    )
    assert [one.output for one in found] == [5, 1, 9]
    first, second, third = (one.prompt for one in found)
    assert first.content[:1024] == second.content[:1024]
    assert first.content[:512] != third.content[:512]
    assert [one.prompt.repeated for one in found] == [0, 1024, 0]


def test_a_trace_is_scaled(tmp_path: Path) -> None:
    file = _trace(tmp_path, {"timestamp": 0, "input_length": 1000, "output_length": 100, "hash_ids": [1, 2]})
    replay = Replay(Trace(kind="trace", file=file, scale_tokens=0.1), IdTokens(Ids(kind="ids")), 1)
    (only,) = replay.requests(1)
    assert (only.prompt.tokens, only.output) == (100, 10)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"timestamp": 0}', "line 1: input_length: Field required"),
        ("no json", "line 1: .*JSON"),
        (
            '{"timestamp": 0, "input_length": 5000, "output_length": 1, "hash_ids": [1]}',
            "state the trace's block_tokens",
        ),
    ],
)
def test_a_trace_with_a_mistake_names_its_line(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(line + "\n")
    replay = Replay(Trace(kind="trace", file=str(path)), IdTokens(Ids(kind="ids")), 1)
    with pytest.raises(LabError, match=said):
        list(replay.requests(1))


def test_a_trace_whose_times_go_back_is_refused(tmp_path: Path) -> None:
    """The second one would be sent at 900 ms, and 400 ms of the client's would be in its latency."""
    lines: list[dict[str, object]] = [
        {"timestamp": at, "input_length": 10, "output_length": 1} for at in (0, 900, 500)
    ]
    replay = Replay(Trace(kind="trace", file=_trace(tmp_path, *lines)), IdTokens(Ids(kind="ids")), 1)
    with pytest.raises(LabError, match="line 3: timestamp is 500, and the line before has 900; sort"):
        list(replay.requests(3))


def test_a_trace_that_is_too_short_is_refused(tmp_path: Path) -> None:
    file = _trace(tmp_path, {"timestamp": 0, "input_length": 10, "output_length": 1, "hash_ids": [1]})
    replay = Replay(Trace(kind="trace", file=file), IdTokens(Ids(kind="ids")), 1)
    with pytest.raises(LabError, match="has 1 requests behind the first 0, not 2"):
        list(replay.requests(2))


def test_arrivals_have_their_distribution() -> None:
    """The coefficient of variation of the intervals: 0, 1, and shape ** -0.5."""
    for arrival, expected in (
        (Constant(kind="constant", rate=20.0), 0.0),
        (Poisson(kind="poisson", rate=20.0), 1.0),
        (Gamma(kind="gamma", rate=20.0, shape=0.25), 2.0),
    ):
        times = due_times(arrival, 20_000, np.random.default_rng(5))
        gaps = np.diff(times, prepend=0.0)
        assert (gaps >= 0).all()
        assert gaps.mean() == pytest.approx(1 / 20, rel=0.06)
        assert gaps.std() / gaps.mean() == pytest.approx(expected, abs=0.06 * max(expected, 1))
