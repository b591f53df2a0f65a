"""What `--measure` says where it cannot measure: it comes to an end, and says why."""

import os
import sys
import threading
from pathlib import Path

import pytest

from kvik.doctor import measure
from kvik.doctor.model import NumaNode


def node() -> NumaNode:
    """A node with the processors that this process may use."""
    return NumaNode(0, ",".join(map(str, sorted(os.sched_getaffinity(0)))), None, ())


def test_a_thread_that_cannot_copy_keeps_no_other_one_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    last = max(os.sched_getaffinity(0))
    bind = os.sched_setaffinity

    def refuse(thread: int, cpus: set[int]) -> None:
        if cpus == {last}:
            raise OSError(22, "Invalid argument")
        bind(thread, cpus)

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    monkeypatch.setattr(measure, "_BUFFER", 4096)
    found = measure._memory(node())
    assert found.gbs is None
    assert "Invalid argument" in found.note


def test_a_thread_that_cannot_be_started_leaves_none_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[threading.Thread] = []

    class Last(threading.Thread):
        def start(self) -> None:
            if begun:
                raise RuntimeError("can't start new thread")
            self.daemon = True  # so that this test fails where it waits for ever, and its process ends
            begun.append(self)
            super().start()

    monkeypatch.setattr(threading, "Thread", Last)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: None)
    monkeypatch.setattr(measure, "_BUFFER", 4096)
    found = measure._memory(NumaNode(0, "0-1", None, ()))
    assert (found.gbs, found.note) == (None, "a thread could not copy: can't start new thread")
    assert not begun[0].is_alive()


def test_memory_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_BUFFER", 1 << 20)
    found = measure._memory(node())
    assert found.gbs is not None
    assert found.gbs > 0
    assert measure._memory(NumaNode(1, "", None, ())).gbs is None


def test_a_benchmark_that_fails_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    failing = tmp_path / "python"
    failing.write_text("#!/bin/sh\necho there is no room >&2; exit 3\n")
    failing.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(failing))
    (found,) = measure._loopback()
    assert (found.gbs, found.note) == (None, "kvik bench transfer ended with status 3: there is no room")


def test_processors_are_those_of_the_kernels_list() -> None:
    assert NumaNode(0, "0-3,8", None, ()).processors == {0, 1, 2, 3, 8}
    assert NumaNode(0, "", None, ()).processors == set()
