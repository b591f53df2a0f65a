"""Values from peers and files, changed at random: they are read or refused by name, and nothing else."""

import contextlib
import copy
import dataclasses
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from kvik.handover.protocol import MAX_RANKS, MAX_TOKENS, Handover, RefusedError, decode
from kvik.stat.engines import About, Question, StatError
from kvik.trace.file import MOST_PAGES, Trace, TraceError, read
from tests.python.peers import random_seed

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "0.1"
ROUNDS = 1500
DEEP: list[Any] = []
for _ in range(60):
    DEEP = [DEEP]
WORTHLESS: list[Any] = [
    None, True, False, 0, 1, -1, 2**31, 2**32, 2**63, 2**64, 10**400, -(2**63), 0.5, 1e308, math.nan,
    math.inf, "", "0", "x" * 2000, "\ud800", "kvik1.", [], [[]], [None], [[0, 2**32]], [[0, 2**20 + 1]],
    {}, {"a": 1}, DEEP,
]  # fmt: skip


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every place in a value of JSON: the container, and the key or index in it."""
    found: list[tuple[Any, Any]] = []
    items: Any = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        found.append((value, key))
        if isinstance(inner, dict | list):
            found += places(inner)
    return found


def spoil(value: Any, die: random.Random) -> Any:
    """The value with one to three places changed, removed or doubled."""
    value = copy.deepcopy(value)
    for _ in range(die.randint(1, 3)):
        chosen = places(value)
        if not chosen:
            break
        container, key = die.choice(chosen)
        kind = die.randrange(5)
        if kind == 0:
            del container[key]
        elif kind == 1 and isinstance(container, list):
            container.insert(key, container[key])
        elif kind == 2 and isinstance(container[key], int):
            container[key] += die.choice((-1, 1, 2**32))
        elif kind == 3:
            container[key] = copy.deepcopy(die.choice(chosen)[0])
        else:
            container[key] = copy.deepcopy(die.choice(WORTHLESS))
    return value


def offered() -> list[dict[str, Any]]:
    """Every offer of the golden file."""
    found: list[dict[str, Any]] = []

    def look(value: Any) -> None:
        if isinstance(value, dict) and isinstance(value.get("kvik"), dict):
            found.append(value)
        elif isinstance(value, dict | list):
            for inner in value.values() if isinstance(value, dict) else value:
                look(inner)

    look(json.loads((GOLDEN / "kv_transfer_params.json").read_text()))
    return found


def check_offer(handover: Handover) -> None:
    """What was read is within its bounds, and comes back as it is."""
    assert 0 < len(handover.tickets) <= MAX_RANKS
    assert 0 < handover.num_tokens <= MAX_TOKENS
    assert len(handover.shapes) == len(handover.firsts)
    for shape, first in zip(handover.shapes, handover.firsts, strict=True):
        assert 0 <= first * shape.block_tokens < handover.num_tokens
    assert math.isfinite(handover.expires_in)
    again = decode(json.loads(json.dumps(handover.encode([]))))
    assert dataclasses.replace(again, address=handover.address) == handover
    with contextlib.suppress(RefusedError):
        handover.check_ranks()


def test_offers_of_a_prefill_server_are_read_or_refused() -> None:
    die, whole = random.Random(random_seed()), offered()
    refused: list[RefusedError] = []
    assert whole
    for params in whole:
        check_offer(decode(params))
    for _ in range(ROUNDS):
        params = spoil(die.choice(whole), die)
        try:
            check_offer(decode(params))
        except RefusedError as error:
            refused.append(error)
    assert all(error.code.startswith("params_") for error in refused)
    assert max(len(str(error)) for error in refused) < 500
    assert ROUNDS // 4 < len(refused) < ROUNDS, f"{len(refused)} were refused: the changes test nothing"


def test_text_that_no_engine_can_read_is_refused() -> None:
    """Half of a character, which JSON can have and UTF-8 cannot."""
    for params in offered():
        params["kvik"]["tickets"][0]["ticket"] = "kvik1.\ud800"
        with pytest.raises(RefusedError, match="'ticket'"):
            decode(params)


def read_text(folder: Path, data: bytes) -> Trace:
    """A recording of these bytes."""
    path = folder / "trace.jsonl"
    path.write_bytes(data)
    return read(path)


@pytest.mark.parametrize("how", ["values", "bytes"])
def test_recordings_are_read_or_refused(tmp_path: Path, how: str) -> None:
    die, whole = random.Random(random_seed()), (GOLDEN / "trace.jsonl").read_bytes()
    refused: list[str] = []
    assert read_text(tmp_path, whole).complete
    lines = [json.loads(line) for line in whole.splitlines()]
    for _ in range(ROUNDS // 2):
        if how == "values":
            data = b"".join(json.dumps(line).encode() + b"\n" for line in spoil(lines, die))
        else:
            damaged = bytearray(whole)
            for _ in range(die.randint(1, 4)):
                damaged[die.randrange(len(damaged))] = die.randrange(256)
            data = bytes(damaged[: die.choice((len(damaged), die.randrange(len(damaged))))])
        try:
            trace = read_text(tmp_path, data)
        except TraceError as error:
            refused.append(str(error))
        else:
            assert all(0 < moved.pages.size <= MOST_PAGES for moved in trace.moved)
    assert ROUNDS // 20 < len(refused) < ROUNDS // 2, f"{len(refused)} were refused: the changes test nothing"
    assert max(len(error) - len(str(tmp_path)) for error in refused) < 500


def test_answers_of_an_engine_are_read_or_refused() -> None:
    die = random.Random(random_seed())
    said = {
        "protocol": "kvik-stat/1",
        "engine": "0" * 32,
        "name": "x",
        "pid": 7,
        "version": "0.1.0",
        "transport": "auto",
        "addresses": ["127.0.0.1:1"],
        "uptime_s": 1.5,
    }
    assert isinstance(Question._about(json.dumps(said).encode(), 7), About)
    with pytest.raises(StatError, match="no id"):
        Question._about(json.dumps(said | {"engine": "", "name": ""}).encode(), 7)
    for _ in range(ROUNDS):
        message = json.dumps(spoil(said, die)).encode()
        if die.random() < 0.3:
            damaged = bytearray(message)
            damaged[die.randrange(len(damaged))] = die.randrange(256)
            message = bytes(damaged)
        try:
            about = Question._about(message, 7)
        except StatError:
            continue
        assert about.title
        assert json.dumps(about.to_json())
