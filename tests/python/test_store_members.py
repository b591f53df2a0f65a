"""`bench/store_members.py`: which window a call counts in, and a short run with real servers and etcd."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from kvik.stat.snapshot import Samples
from tests.python.benches import bench
from tests.python.peers import ROOT
from tests.python.store_load import Call

PROGRAM = ROOT / "bench" / "store_members.py"


@pytest.fixture(scope="module")
def members() -> ModuleType:
    return bench("store_members")


def test_a_call_counts_where_most_of_it_lay(members: ModuleType) -> None:
    windows = [
        members.Window("killed", when, began, began + 10.0, 3, 2)
        for when, began in (("before", 0.0), ("during", 10.0), ("after", 30.0))
    ]
    calls = [
        Call("get", 1.0, 2.0, 10, 10),
        Call("get", 9.0, 14.0, 10, 0),  # under way when it happened
        Call("get", 21.0, 29.0, 10, 5),  # between windows
        Call("put", 35.0, 36.5, 10, 10),
    ]
    before, during, after = members.by_window(windows, calls)
    assert (before.calls, before.hit_rate, before.longest_s) == (1, 1.0, 1.0)
    assert (during.calls, during.hit_rate, during.longest_s) == (1, 0.0, 5.0)
    assert (after.calls, after.hit_rate, after.longest_s) == (1, None, 1.5)
    assert (before.calls_per_second, before.blocks_per_second) == (0.1, 1.0)
    assert (during.listed, during.up) == (3, 2)


def _look(blocks: dict[str, int], requests: dict[str, int]) -> Samples:
    lines = [
        f'kvik_store_lookups_total{{tenant="default",tier="memory",member="{name}"}} {count}'
        for name, count in blocks.items()
    ]
    lines += [
        f'kvik_store_operation_seconds_count{{op="get",tier="memory",member="{name}"}} {count}'
        for name, count in requests.items()
    ]
    return Samples("\n".join([*lines, ""]))


def test_shares_are_of_what_was_asked_between_two_looks(members: ModuleType) -> None:
    before = _look({"a": 100, "b": 100}, {"a": 5, "b": 5})
    after = _look({"a": 400, "b": 200}, {"a": 6, "b": 8})
    assert members.shares(before, after, {"a": "server 1", "b": "server 2"}) == {
        "server 1": {"blocks": 0.75, "requests": 0.25},
        "server 2": {"blocks": 0.25, "requests": 0.75},
    }


def test_prompts_have_just_their_first_segment_in_common(members: ModuleType) -> None:
    one, other = members.common(0), members.common(1)
    alike = sum(first == second for first, second in zip(one, other, strict=True))
    assert len(one) == 3 * alike
    assert alike == members.SEGMENT * members.NAMESPACE.block_tokens


@pytest.mark.timeout(240)
def test_a_short_run_has_figures_of_all_windows(tmp_path: Path) -> None:
    if shutil.which("etcd") is None:
        pytest.skip("there is no etcd")
    out = tmp_path / "members.json"
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "--copies", "2", "--window", "0.5", "--stopped", "3", "--clients", "1",
         "--events", "stopped,etcd,hot", "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )  # fmt: skip
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    (run,) = json.loads(out.read_text())["runs"]
    windows = {(one["event"], one["when"]): one for one in run["windows"]}
    assert len(windows) == 6
    assert run["wrong"] == 0
    for event in ("stopped", "etcd"):
        assert windows[event, "before"]["hit_rate"] > 0.9
        assert windows[event, "before"]["up"] == 3
    # With two copies a server that has stopped costs time, and no block; etcd costs neither.
    assert windows["stopped", "during"]["hit_rate"] > 0.9
    assert windows["stopped", "during"]["longest_s"] > 0.5
    assert windows["etcd", "during"]["hit_rate"] > 0.9
    apart, common = run["hot"]
    for found in (apart, common):
        assert sum(part["blocks"] for part in found["servers"].values()) == pytest.approx(1.0)
    # One server has the segment that is in all prompts, a third of each.
    assert max(part["blocks"] for part in common["servers"].values()) > 1 / 3
