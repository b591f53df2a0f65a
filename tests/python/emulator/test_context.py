"""`kvik bench context`: a context in pieces between two processes, and its digest as one piece has it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvik.bench import context
from kvik.bench.context import Outcome, _one
from kvik.bench.context_side import PROMPT_SEED, Order
from kvik.emulator.content import KvFunction, chain_of, root_of
from tests.python.emulator.servers import LIMIT, TINY

TOKENS, PAGE_TOKENS = 1000, 16


def _run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvik.cli", "bench", "context", "--shape", "tiny", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)


@pytest.mark.parametrize("transport", ["local", "tcp"])
def test_a_context_in_pieces(tmp_path: Path, transport: str) -> None:
    """Its pages' bytes over the transport asked for, and the digest of the same tokens in one piece."""
    file = tmp_path / "out.json"
    done = _run("--tokens", str(TOKENS), "--memory", "1MiB", "--transport", transport, "--json", str(file))
    assert done.returncode == 0, done.stderr
    told = json.loads(file.read_text())["outcome"]
    pages = -(-TOKENS // PAGE_TOKENS)
    assert told["bytes"] == pages * TINY.page_bytes(PAGE_TOKENS)
    assert told["transport"] == transport
    assert told["pieces"] == -(-pages // ((1 << 19) // TINY.page_bytes(PAGE_TOKENS))) > 1
    tokens = np.random.default_rng(PROMPT_SEED).integers(3, TINY.vocab_size, size=TOKENS, dtype=np.uint32)
    chain, _ = chain_of(root_of(TINY.name, None), tokens, 0, 0)
    words = TINY.content * TINY.element_bytes // 8
    memory = np.zeros((TINY.layers, pages, TINY.kv_heads, PAGE_TOKENS, words), dtype=np.uint64)
    function = KvFunction(TINY.layers, range(TINY.kv_heads), words)
    numbers = np.arange(pages, dtype=np.uint32)
    function.fill(memory, numbers, 0, chain)
    assert told["digest"] == function.read(memory, numbers, 0, TOKENS)


def test_what_one_piece_took_is_not_said_of_all() -> None:
    """Under `auto` a later piece may go another way than the first; the medians are of both."""
    order, way = Order(TINY, 64, 16, 2, "auto"), list[tuple[str, str, tuple[str, ...]]]()

    class Reader:
        bytes = extents = 1
        total_s = 1.0

        def read_from(self, *_: object) -> Any:
            self.transport, self.mechanism, self.checks = way[-1]
            return self

        def digest(self, *_: int) -> int:
            return 7

    reader: Any = Reader()
    outcome = Outcome("tiny", 64, 3, 32)
    for one in (
        ("tcp", "4 channels", ("sum",)),
        ("local", "memfd", ("generation",)),
        ("tcp", "4 channels", ("sum",)),
    ):
        way.append(one)
        _one(order, reader, {"ticket": "", "digest": 7, "fill": 1.0}, 0, outcome)
    assert outcome.transport == "tcp; local"
    assert outcome.mechanism == "4 channels; memfd"
    assert outcome.checks == "sum; generation"


def test_memcpy_pays_for_no_first_touch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else kvik would be compared with the kernel's making of pages, where a context is one piece."""
    touched = list[bool]()

    def copied(_: Any, scratch: Any) -> float:
        touched.append(bool(scratch.all()))
        return 1.0

    monkeypatch.setattr(context, "_memcpy", copied)
    context.execute(Order(TINY, 64, 16, 4, "auto"), lambda _: None)
    assert touched == [True]


def test_ctrl_c_ends_it_without_a_traceback_of_the_other_process() -> None:
    command = [sys.executable, "-m", "kvik.cli", "bench", "context", "--shape", "tiny"]
    with subprocess.Popen(
        [*command, "--tokens", str(1 << 24), "--memory", "1MiB"],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as bench:
        assert bench.stderr is not None
        assert "piece 1/" in bench.stderr.readline()
        os.killpg(bench.pid, signal.SIGINT)  # as a terminal does
        said = bench.stderr.read()
    assert bench.returncode == 130
    assert "Traceback" not in said


def test_memory_that_holds_no_page_is_refused() -> None:
    done = _run("--memory", "8KiB")
    assert done.returncode == 1
    assert "hold none" in done.stderr


@pytest.mark.parametrize(
    ("shape", "said"), [("head_size=1", "4 bytes; made up"), ("head_size=4,vocab_size=3", "has 3 tokens")]
)
def test_a_model_whose_kv_cannot_be_made_up_is_refused(shape: str, said: str) -> None:
    """By name, before a process is started: not by a traceback of one side or the other."""
    done = _run("--shape", f"layers=1,kv_heads=1,{shape}")
    assert done.returncode == 1
    assert said in done.stderr
    assert "Traceback" not in done.stderr
