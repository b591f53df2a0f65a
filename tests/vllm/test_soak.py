"""What `bench/vllm_soak.py` says of a run: it finds what does not hold. No server is needed to see that."""

import importlib.util
import random
import sys
import time
from types import ModuleType
from typing import Any

import pytest

from tests.vllm.held import Held
from tests.vllm.malformed import malformed
from tests.vllm.pairs import ROOT

SOAK = ROOT / "bench" / "vllm_soak.py"
HELD: dict[str, Any] = {
    "wrong": 0, "stuck": 0, "not_back": 0, "died": 0, "noted": 0, "compared": 9, "left": 9, "checks": 1,
    "errors": {"HTTP 502": 3}, "allowed": {"HTTP 502": 3}, "loads": {"loaded": 9},
    "kills": {"prefill": 1, "decode": 1}, "malformed": {"requests": 1, "params": 1},
}  # fmt: skip


@pytest.fixture(scope="module")
def soak() -> ModuleType:
    spec = importlib.util.spec_from_file_location("vllm_soak", SOAK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["vllm_soak"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"wrong": 1},
        {"stuck": 1},
        {"not_back": 1},
        {"died": 1},
        {"noted": 1},
        {"errors": {"HTTP 502": 4}},
        {"compared": 0},
        {"loads": {"failed cancelled": 3}},
        {"kills": {"prefill": 7}},
        {"malformed": {"requests": 7}},
    ],
)
def test_what_does_not_hold_is_said(soak: ModuleType, change: dict[str, Any]) -> None:
    assert len(soak.failures(HELD | change)) == len(change)


def test_only_a_server_that_was_away_excuses_an_error(soak: ModuleType) -> None:
    absence = soak.Absence()
    began = time.monotonic()
    assert not absence.excuses(soak.BOTH, began)
    absence.begins("prefill")
    assert absence.excuses(soak.BOTH, began)
    assert not absence.excuses(soak.DECODE, began)
    absence.ends("prefill")
    assert absence.excuses(soak.PREFILL, began), "it was away when the request was sent"
    assert not absence.excuses(soak.PREFILL, time.monotonic() + soak.GRACE + 1)


def test_held_is_compared_in_every_figure() -> None:
    rest = Held(0.1, 1, 1, 1, 1)
    assert rest.within(rest)
    assert Held(0.0, 0, 0, 0, 0).within(rest)
    more = (
        Held(0.2, 1, 1, 1, 1), Held(0.1, 2, 1, 1, 1), Held(0.1, 1, 2, 1, 1), Held(0.1, 1, 1, 2, 1),
        Held(0.1, 1, 1, 1, 2),
    )  # fmt: skip
    assert not any(one.within(rest) for one in more)


def test_prompts_and_malformed_requests_follow_from_the_seed(soak: ModuleType) -> None:
    one, other = (soak.Prompts(random.Random(7)) for _ in range(2))
    asked = [one.next() for _ in range(50)]
    assert asked == [other.next() for _ in range(50)]
    assert {len(prompt) <= soak.LONGEST for prompt in asked} == {True}
    kinds = [malformed(random.Random(number), [5, 6, 7]) for number in range(50)]
    assert kinds == [malformed(random.Random(number), [5, 6, 7]) for number in range(50)]
