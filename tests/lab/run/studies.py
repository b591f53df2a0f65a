"""Small studies, and commands of `kvik lab` as processes of their own."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from kvik_lab.records import RunRecord, read
from kvik_lab.run import machine
from kvik_lab.run.control import mark

LIMIT = 240.0  # seconds for what takes a few: a bound for what hangs, on the busiest machine
GONE = 60.0  # seconds until what has vanished is noticed, or has ended, everywhere: leases and grace are 10
SMALL = """
study: small
unit: {model: tiny}
factors:
  speed:
    levels: [slow, fast]
    restart: true
    sets:
      slow: {roles.prefill.options.compute: "prefill_token=0.0004"}
      fast: {roles.prefill.options.compute: "prefill_token=0.0001"}
  tokens: {levels: [64, 256], scale: log2}
model: log(ttft) ~ speed * tokens
design: {kind: full, starts: 2, blocks: 2, seed: 3}
warmup: {until: count, min: 1, max: 1}
run:
  driver: emulator
  transport: tcp
  load:
    requests: 4
    prompt: {tokens: "{tokens}", output: 3}
"""
PLAIN = """
study: plain
unit: {model: tiny}
factors:
  tokens: {levels: [64, 256], scale: log2}
model: log(ttft) ~ tokens
design: {kind: full, starts: 1, seed: 3}
warmup: {until: count, min: 1, max: 1}
run:
  driver: emulator
  load:
    requests: 4
    prompt: {tokens: "{tokens}", output: 3}
"""
"""Two runs of one start: for tests of what happens around them."""


def written(folder: Path, text: str = SMALL) -> Path:
    """A study as a file."""
    path = folder / "study.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def start(command: str, study: Path, out: Path) -> subprocess.Popen[str]:
    """`kvik lab COMMAND`, in a session of its own."""
    arguments = [sys.executable, "-m", "kvik.cli", "lab", command, str(study), "--out", str(out)]
    return subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


@contextlib.contextmanager
def started(command: str, study: Path, out: Path) -> Iterator[subprocess.Popen[str]]:
    """The same within a block; one that still runs at its end is killed."""
    controller = start(command, study, out)
    try:
        yield controller
    finally:
        controller.kill()
        finish(controller)


def finish(controller: subprocess.Popen[str]) -> tuple[int, str]:
    """Its exit status, and what it said."""
    said, _ = controller.communicate(timeout=LIMIT)
    return controller.returncode, said


def run(command: str, study: Path, out: Path) -> tuple[int, str]:
    """A whole command."""
    return finish(start(command, study, out))


def records(out: Path) -> dict[str, RunRecord]:
    """The runs of a journal, by id."""
    file = out / "runs.jsonl"
    return {one.id: one for one in read([file])} if file.exists() else {}


def lines(out: Path) -> list[RunRecord]:
    """All that the journal was told, in order."""
    file = out / "runs.jsonl"
    text = file.read_text() if file.exists() else ""
    return [
        RunRecord.model_validate_json(line) for line in text.splitlines(keepends=True) if line[-1:] == "\n"
    ]


def shape(record: RunRecord) -> Any:
    """What is the same wherever it ran: its id within the study, its levels, and the names of what it has."""
    whole = json.loads(record.model_dump_json())
    names = {key: sorted(value) if isinstance(value, dict) else None for key, value in whole.items()}
    (local,) = (sorted(node["facts"]) for node in whole["nodes"] if node["name"] == "local")
    return record.id.partition("-")[2], record.levels, record.place.order, names, local


def completed_on_two(found: Collection[RunRecord], said: str) -> None:
    """Both runs of `PLAIN` were completed, with prefill on node `one` and the rest on `two`."""
    assert len(found) == 2
    for one in found:
        assert (one.outcome, len(one.measured())) == ("completed", 4), said
        assert {role.kind: role.node for role in one.roles} == {
            "prefill": "one", "decode": "two", "router": "two",
        }  # fmt: skip


def processes(out: Path) -> list[int]:
    """Processes of a journal's study that are there now."""
    return [pid for pid in machine.own(mark(out)) if pid != os.getpid()]


def commands(out: Path) -> dict[int, bytes]:
    """Their command lines; one that ends meanwhile has none."""
    found = {}
    for pid in processes(out):
        with contextlib.suppress(OSError):
            found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes()
    return found


def wait_for(holds: Callable[[], bool], what: str, limit: float = LIMIT) -> None:
    """Until something holds that gives no event."""
    until = time.monotonic() + limit
    while not holds():
        assert time.monotonic() < until, f"in {limit:g} s not: {what}"
        time.sleep(0.05)
