"""The programs of `bench/`: what they measure beside something stops where that something has failed."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.python.benches import bench
from tests.python.peers import LIMIT


def test_a_handover_beside_bulk_that_failed_is_no_measure() -> None:
    fairness = bench("fairness")
    side = object.__new__(fairness.Side)
    side.moved, side.threads, side.failed, side.stop = {}, [], [], threading.Event()

    def refuse(*_: object) -> None:
        raise OSError("the peer has gone")

    side.begin = refuse
    side.keep("bulk", "read", "same", "bulk", fairness.BULK)
    with pytest.raises(OSError, match="the peer has gone"):
        side.quiet()


def test_a_load_with_a_client_less_is_none() -> None:
    stages = bench("store_stages")
    broken = threading.Event()

    class Answer:
        tokens = (1,)

    class Engine:
        """It answers each prompt once."""

        def __init__(self) -> None:
            self.server: Any = self
            self.asked = 0

        def ask(self, _: object) -> Answer:
            self.asked += 1
            if self.asked > 2:
                broken.set()
                raise OSError("no answer")
            return Answer()

        def wait_put(self) -> None:
            """Nothing waits."""

        def tail(self) -> str:
            return "its log"

    with pytest.raises(SystemExit, match="no answer"), stages.loaded(Engine(), [[1], [2]]):
        assert broken.wait(LIMIT)


def test_a_run_goes_on_with_what_it_began_with() -> None:
    kept = bench("kept")
    raw: dict[str, Any] = {"cells": []}
    found = {"cpu_model": "one", "kvik": "0.1.0", "vllm": "0.32.0", "load_1min": 0.5}
    kept.note_facts(raw, found)
    kept.note_facts(raw, found | {"load_1min": 9.0})
    assert raw["facts"] == found, "the load when it began"
    with pytest.raises(SystemExit, match=r"vllm 0\.32\.0, not 0\.33\.0: begin another file"):
        kept.note_facts(raw, found | {"vllm": "0.33.0"})


def test_what_a_driver_can_send_is_not_how_fast_it_makes_prompts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of ours and of vLLM's alike: from the first request to the last token."""
    driver, second = bench("load_driver"), 10**9
    text = " ".join(str(number) for number in range(driver.TOKENS + 1))
    sent = [7 * second, 8 * second]
    told = [
        {"sent": at, "tokens": [at + second, at + 2 * second], "text": text, "error": None} for at in sent
    ]
    lists = {
        "start_times": [at / second for at in sent], "ttfts": [1.0] * 2, "latencies": [2.0] * 2,
        "generated_texts": [text] * 2, "errors": [""] * 2, "completed": 2, "duration": 100.0,
    }  # fmt: skip

    def run(*_: object) -> None:
        (tmp_path / "out.json").write_text(json.dumps(told))
        (tmp_path / "vllm.json").write_text(json.dumps(lists))

    (tmp_path / "model").mkdir()
    monkeypatch.setattr(driver, "pinned", run)
    for one in (driver.ours, driver.vllm("python")):
        assert one("http://h", tmp_path, 2, 1, 1).rate == pytest.approx(2 / 3)
