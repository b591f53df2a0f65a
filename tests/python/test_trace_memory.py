"""The memory of a replay: it fits, and all that is moved was written before it is timed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import kvik
from kvik.bench import facts
from kvik.bench.errors import BenchError
from kvik.bench.pattern import Bytes
from kvik.trace import replay
from kvik.trace.file import PageIds
from kvik.trace.memory import Sparse
from kvik.trace.pattern import Elements
from kvik.trace.replay import Replay, Results, Step, execute
from kvik.trace.target import ReplayPeer
from tests.python.peers import engines
from tests.python.test_trace import PAGES, dims_of, options, record_some


def test_all_that_is_moved_was_written_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what is not compared: zeros that nobody wrote come from the processor's cache."""
    trace, done = record_some(tmp_path / "some")
    written: dict[str, set[tuple[str, int]]] = {"read": set(), "write": set()}
    paint_there, paint_here = ReplayPeer.paint, Elements.paint

    def note(op: str, elements: Elements, ids: PageIds) -> None:
        written[op] |= {(elements.dims.digest, number) for number in ids.tolist()}

    def there(self: ReplayPeer, name: str, elements: Elements, ids: PageIds, salt: int) -> None:
        note("read", elements, ids)
        paint_there(self, name, elements, ids, salt)

    def here(self: Elements, memory: Bytes, ids: PageIds, salt: int) -> None:
        note("write", self, ids)
        paint_here(self, memory, ids, salt)

    monkeypatch.setattr(ReplayPeer, "paint", there)
    monkeypatch.setattr(Elements, "paint", here)
    gather, touched = Replay._gather, list[bool]()

    def gathering(self: Replay, step: Step, scratch: Bytes) -> None:
        touched.append(bool(scratch.all()))
        gather(self, step, scratch)

    monkeypatch.setattr(Replay, "_gather", gathering)
    monkeypatch.setattr(replay, "CHECKED_BYTES", 1)
    results = Results(options(), trace)
    execute(results, None, None, lambda _: None)
    assert results.compared == 1
    assert touched[0]
    for op, side in (("write", 0), ("read", 1)):
        moved: list[dict[str, Any]] = [one for one in done if one["op"] == op]
        assert written[op] == {(one["layout"], pair[side]) for one in moved for pair in one["pairs"]}


def test_all_regions_of_a_recording_have_to_fit_together(monkeypatch: pytest.MonkeyPatch) -> None:
    dims = dims_of(kvik.Layout(PAGES, 4096))
    monkeypatch.setattr(facts, "memory_available", lambda: 4 * PAGES * 4096 - 1)
    with engines() as start:
        engine = start()
        first = Sparse(engine, dims, "host", PAGES)
        with pytest.raises(BenchError, match="more than half of the 0 MiB"):
            Sparse(engine, dims, "host", PAGES, [first])
