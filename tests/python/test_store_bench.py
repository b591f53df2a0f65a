"""`kvik store bench`: that it moves what it says, compares it, and refuses what it cannot measure."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

import kvik
from kvik.bench.errors import CheckError
from kvik.store.bench import beside as others
from kvik.store.bench import live, models
from kvik.store.bench.cli import bench
from kvik.store.bench.figures import Rounds
from kvik.store.bench.pages import Pages

BESIDE = Path(__file__).parents[2] / "bench" / "beside"

SMALL = ("copies", "--models", "qwen2.5-3b", "--blocks", "2", "--rounds", "1", "--transports", "local")

DICT = f"""
import sys
sys.path.insert(0, {str(BESIDE)!r})
import side

class Dict:
    def put(self, names, blocks, order):
        self.kept = {{name: blocks[at].copy() for name, at in zip(names, order)}}
    def get(self, names, blocks, order):
        for name, at in zip(names, order):
            blocks[at] = self.kept[name]
        SPOIL

given = side.arguments()
side.serve("dict", side.Side(given.blocks, given.block_bytes, given.seed), Dict())
"""


def run(*arguments: str) -> Result:
    return CliRunner().invoke(bench, arguments)


def beside(directory: Path, spoil: str = "pass") -> str:
    program = directory / "dict_store.py"
    program.write_text(DICT.replace("SPOIL", spoil))
    return f"{sys.executable} {program}"


@pytest.mark.parametrize("lies", [(), ("--by-layer",)])
def test_copies_are_told_beside_memcpy_and_another_store(lies: tuple[str, ...], tmp_path: Path) -> None:
    done = run(
        "copies", "--models", "qwen2.5-3b", "--blocks", "6", "--rounds", "2", "--json", "--seed", "1",
        "--beside", beside(tmp_path), *lies,
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert [cell["transport"] for cell in told["store"]] == ["local", "tcp"]
    for cell in told["store"]:
        assert cell["block_bytes"] == 36 * 2 * 16 * 2 * 128 * 2
        times = cell["seconds"]
        assert set(times) == {
            "memcpy", "put accepted", "put stored", "get", "first block", "raw", "dict put", "dict get",
        }  # fmt: skip
        assert all(len(rounds) == 2 for rounds in times.values())
        assert all(first <= whole for first, whole in zip(times["first block"], times["get"], strict=True))
    (within,) = told["copies"]
    assert {"memcpy", "layer by layer", "block by block", "fancy index"} <= set(within["seconds"])
    # Each way to copy was measured, or it is said why not.
    named = {"layer by layer", "block by block", "fancy index", "index_copy_", "swap in", "swap out"}
    assert set(within["missing"]) | set(within["seconds"]) == named | {"memcpy"}


def test_the_table_is_one_for_a_document() -> None:
    done = run(*SMALL)
    assert done.exit_code == 0, done.output
    assert "| qwen2.5-3b | local | 1 |" in done.stdout


def test_another_store_that_gives_other_bytes_is_refused(tmp_path: Path) -> None:
    done = run(
        *SMALL, "--beside", beside(tmp_path, "blocks[0, 5] ^= 1"),
    )  # fmt: skip
    assert done.exit_code == 1
    assert "what came back is not what was put" in done.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("copies", "--models", "gpt-9"), "'gpt-9' is none of"),
        (("copies", "--transports", "carrier"), "'carrier' is none of local, tcp"),
        (("misses", "--model", "qwen2.5-3b,qwen2.5-7b"), "'qwen2.5-3b,qwen2.5-7b' is not one of"),
        ((*SMALL, "--beside", "/nonexistent"), "/nonexistent"),
        ((*SMALL, "--beside", f"{sys.executable} -c 1"), "it ended"),
        ((*SMALL, "--beside", f"{sys.executable} 'x"), "No closing quotation"),
        (("misses", "--rate", "nan"), "'nan' is not a number"),
    ],
)  # fmt: skip
def test_what_cannot_be_measured_is_refused_by_name(arguments: tuple[str, ...], said: str) -> None:
    done = run(*arguments)
    assert done.exit_code in (1, 2)
    assert isinstance(done.exception, SystemExit), done.exception
    assert said in done.output


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ('{"ready', "is no answer"),
        ("[1]", "is no answer"),
        ('{"ready": "x"}\n{"seconds": NaN}', "nan seconds, which is no time"),
    ],
)
def test_a_program_that_answers_anything_else_is_refused_and_ended(
    lines: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(others, "_ENDS", 0.1)
    program, pid = tmp_path / "other.py", tmp_path / "pid"
    program.write_text(
        f"import os, signal\nopen({str(pid)!r}, 'w').write(str(os.getpid()))\n"
        f"print({lines!r}, flush=True)\nwhile True:\n    signal.pause()\n"
    )
    done = run(*SMALL, "--beside", f"{sys.executable} {program}")
    assert done.exit_code == 1
    assert said in done.output
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_the_users_own_store_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, file = tmp_path / "log", tmp_path / "kvik" / "config.toml"
    file.parent.mkdir()
    file.write_text(f'[store]\nlog = "{log}"\nlog_size = "8MiB"\n')
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("KVIK_CONFIG")
    monkeypatch.setenv("KVIK_SECRET", secret := "of stores that are not to be measured")
    done = run(*SMALL)
    assert done.exit_code == 0, done.output
    assert not log.exists()
    assert (os.environ["KVIK_SECRET"], "KVIK_CONFIG" in os.environ) == (secret, False)


def test_a_flipped_bit_fails_the_comparison() -> None:
    shape = models.chosen("qwen2.5-3b")[0]
    with kvik.Engine() as engine:
        pages = Pages.make(engine, shape, 2, by_layer=False, seed=1)
        np.copyto(pages.target, pages.source)
        pages.check()
        pages.target[-1] ^= 1
        with pytest.raises(CheckError):
            pages.check()


def test_ratios_are_of_times_of_the_same_round() -> None:
    rounds = Rounds()
    for one, other in [(2.0, 1.0), (30.0, 10.0), (4.0, 1.0)]:
        rounds.add("one", one)
        rounds.add("other", other)
    assert rounds.ratio("one", "other") == 3.0
    assert rounds.median("one") == 4.0
    assert rounds.ratio("one", "none") is None


def test_misses_cost_a_time_for_each_size_of_steps() -> None:
    done = run(
        "misses",
        "--model",
        "qwen2.5-3b",
        "--prompts",
        "1",
        "--prompt-tokens",
        "1024",
        "--json",
        "--seed",
        "1",
    )
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)["seconds"]
    assert list(told) == ["1024", "768", "512", "384", "256", "128", "64", "32"]
    assert all(set(times) == {"synchronous", "asynchronous"} for times in told.values())


def test_a_trace_goes_through_a_server_with_the_hits_that_its_policy_has(tmp_path: Path) -> None:
    """All of it fits: what was asked for before is a hit, with all that comes before it."""
    trace = tmp_path / "trace.jsonl"
    requests = [[1, 2, 3], [1, 2, 4], [], [5], [1, 2, 3], [7, 2]]
    trace.write_text("".join(json.dumps({"hash_ids": ids}) + "\n" for ids in requests))
    outcome = live.replayed(trace, 1000)
    assert (outcome.requests, outcome.references, outcome.hits, outcome.refused) == (5, 12, 5, 0)


@pytest.mark.parametrize("wrong", ['{"ids": [1]}', '{"hash_ids": [-1]}', "[]", "\xff"])
def test_a_trace_without_blocks_is_refused_by_its_line(wrong: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(f'{{"hash_ids": [1]}}\n\n{{"hash_ids": [{2**64 - 1}]}}\n{wrong}\n', encoding="latin-1")
    requests = live.requests(trace)
    assert [len(next(requests)), next(requests)] == [1, [b"\xff" * 8 + b"\xff" * 8]]
    with pytest.raises(kvik.InvalidArgument, match="line 4"):
        next(requests)


def test_a_store_is_not_asked_for_fewer_blocks_than_it_has_room_for(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    line = {"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]}
    trace.write_text(f"{json.dumps(line)}\n" * 2)
    asked = ("replay", str(trace), "--live", "--capacities", "10,1000")
    done = run(*asked, "--json")
    assert json.loads(done.stdout)["live"] == {"1000": 0.5}
    assert "live: not measured below 256 blocks" in run(*asked).stdout
