"""The programs of `bench/`: what they measure beside something stops where that something has failed."""

from __future__ import annotations

import threading
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
