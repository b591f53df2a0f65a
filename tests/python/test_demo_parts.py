"""The demo's parts that need no serving engine."""

import http.client
import io
import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from kvik.cli import SUBCOMMANDS, main
from kvik.demo import client, restart, show, table, telling
from kvik.demo.checkpoint import KV_BYTES_PER_TOKEN, MAKING, MAKING_LIMIT, made_once
from kvik.demo.client import Completion
from kvik.demo.engines import Connector, EngineSpec
from kvik.demo.measure import TOKENS, Row
from kvik.demo.reports import Load, ReportReader
from kvik.demo.restart import Restarted
from kvik.demo.scene import KvFacts
from kvik.demo.timeline import Compute
from kvik.roles.hosts import Rate
from kvik.roles.processes import ProcessError

ROOT = Path(__file__).parents[2]
RECORD: dict[str, object] = {
    "request_id": "a", "remote_request_id": "b", "outcome": "loaded", "reason": None, "rank": 0, "blocks": 1,
    "bytes": 128 * KV_BYTES_PER_TOKEN, "pages": 1, "extents": 4, "transport": "local", "mechanism": "memfd",
    "plan_s": 0.0, "post_s": 0.0, "wire_s": 0.001, "verify_s": 0.0, "total_s": 0.002,
    "group": 0,
}  # fmt: skip
KV = KvFacts(128, 128 * KV_BYTES_PER_TOKEN, range(3, 259))
NOTHING = Compute(None, None)


def load(**more: object) -> Load:
    """A load that went well, but for `more`."""
    return Load(**{**RECORD, **more})  # type: ignore[arg-type]


def row(length: int, found: Load | None, handed: int = 5) -> Row:
    """A row whose handed-over answer is `handed`, where 5 is right."""
    loads = () if found is None else (found,)
    answers = Completion([5] * TOKENS), Completion([handed] * TOKENS)
    return Row(length, KV, *answers, loads, NOTHING, NOTHING)


def test_report_reader_waits_for_whole_lines(tmp_path: Path) -> None:
    """A line that is still being written is left for the next look."""
    file = tmp_path / "loads"
    reader = ReportReader(file)
    assert reader.new() == []
    text = json.dumps(RECORD)
    file.write_text(text[:20])
    assert reader.new() == []
    file.write_text(f"{text}\n{text}\n")
    assert reader.wait(2, timeout=60.0) == [load(), load()]
    assert reader.wait(1, timeout=0.05) == []


def test_row_is_good_only_with_equal_tokens_and_all_bytes() -> None:
    """What the demo's exit status hangs on."""
    assert row(100, load()).moved
    assert row(100, load()).equal
    assert not row(100, load(), handed=6).equal
    assert not row(129, load()).moved
    assert not row(100, None).moved
    assert not row(100, load(outcome="failed", reason="peer_lost")).moved
    assert row(1, None).moved


def test_engine_command() -> None:
    """The options that an engine is started with."""
    spec = EngineSpec(
        "decode", Connector("kv_consumer", Path("/reports")), prefix_caching=False, tensor_parallel=2
    )
    command = spec.command(Path("/model"), 1234)
    assert "--no-enable-prefix-caching" in command
    assert command[command.index("--tensor-parallel-size") + 1] == "2"
    config = json.loads(command[command.index("--kv-transfer-config") + 1])
    assert config["kv_connector"] == "KvikConnector"
    assert config["kv_connector_module_path"] == "kvik.vllm"
    assert config["kv_load_failure_policy"] == "recompute"
    assert config["kv_connector_extra_config"] == {"listen": "127.0.0.1:0", "report_file": "/reports"}


def test_help_imports_no_subcommand() -> None:
    """`kvik --help` lists every subcommand."""
    said = CliRunner().invoke(main, ["--help"])
    assert said.exit_code == 0
    for name in SUBCOMMANDS:
        assert name in said.output


def test_a_restart_is_good_only_with_equal_tokens_and_all_blocks() -> None:
    """What the exit status hangs on in the second act."""

    def restarted(hit: int, warm: int) -> Restarted:
        answers = Completion([5] * TOKENS), Completion([warm] * TOKENS)
        return Restarted(100, 6, *answers, hit, hit * 1024, 0.1)

    assert restarted(6, 5).good
    assert not restarted(6, 4).good
    assert not restarted(5, 5).good


def _cut_stream(server: socket.socket, missing: int) -> None:
    """Answer one request with a stream that is cut, as by an engine that was killed: so many bytes before the
    end of a chunk."""
    connection, _ = server.accept()
    with connection, connection.makefile("rb") as asked:
        length = 0
        while (line := asked.readline()) != b"\r\n":
            if line.lower().startswith(b"content-length:"):
                length = int(line.split(b":")[1])
        asked.read(length)
        event = b'data: {"choices": [{"token_ids": [5]}]}\n\n'
        connection.sendall(
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n"
            % (len(event) + missing, event)
        )


@pytest.mark.parametrize("missing", [0, 9])
def test_an_answer_that_is_cut_is_said(missing: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        answering = threading.Thread(target=_cut_stream, args=(server, missing))
        answering.start()
        with pytest.raises(client.RequestError, match=r"the stream ended without \[DONE\]"):
            client.complete(f"http://127.0.0.1:{server.getsockname()[1]}", [3], 2)
        answering.join()


def test_metrics_of_a_model_of_any_name() -> None:
    """The name of a folder, as of `--model-shape a,b/config.json`."""
    labels = r'engine="%d",model_name="a,\\"b}",'
    text = "".join(f'blocks_total{{{labels % engine}result="hit"}} 2.0\n' for engine in range(2))
    text += "# HELP up\n" + f"up{{{labels % 0}}} 1\n"
    assert client.samples(text) == {'blocks_total{result="hit"}': 4.0, "up": 1.0}


def test_a_hint_is_given_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where few are left, as most options were used."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    console = Console(file=io.StringIO(), width=200)
    telling.hints(["--tp", "--fault", "--svg"], console)
    assert console.file.getvalue().count("bench transfer") == 1  # type: ignore[attr-defined]


def test_an_engine_that_ends_amid_an_answer_ends_the_demo_by_name(tmp_path: Path) -> None:
    def start(*_: object) -> None:
        raise http.client.IncompleteRead(b"", 5)

    cast: Any = SimpleNamespace(STARTING="starting", start=start)
    settings: Any = SimpleNamespace(fault=None)
    console = Console(file=io.StringIO())
    assert show._run(cast, settings, None, None, tmp_path, console) is False
    assert "The demo failed: IncompleteRead" in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_terminal_that_knows_only_ascii_shows_it_all() -> None:
    """But for the bars of the picture, which have a form for it."""
    raw = io.BytesIO()
    console = Console(file=io.TextIOWrapper(raw, encoding="ascii", write_through=True), width=80)
    rate = Rate.parse("10gbit")
    shown = table.empty(rate)
    shown.add_row(*table.cells(row(100, load()), rate))
    console.print(shown)
    console.print(table.legend(rate), markup=False)
    answers = Completion([5] * TOKENS), Completion([5] * TOKENS)
    restart.tell(Restarted(100, 6, *answers, 6, 6144, 0.1), "at 127.0.0.1:1", console)
    telling.hints([], console)
    assert "10^9 bytes" in raw.getvalue().decode()


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of models, and a maker `maker` that writes into one, or fails."""
    (tmp_path / "maker.py").write_text(
        "import pathlib, sys\n"
        "pathlib.Path(sys.argv[1], 'weights').write_text('w')\n"
        "sys.exit('no room' if len(sys.argv) > 2 else 0)\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "kvik" / "models"


def _path(handle: int) -> Path:
    return Path(f"/proc/self/fd/{handle}").readlink()


def test_a_model_is_whole_or_not_there(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files are on the disk before its name is."""
    kept: list[Path] = []
    monkeypatch.setattr(os, "fsync", lambda handle: kept.append(_path(handle)))
    folder = made_once("m", 1, "maker")
    assert (folder / "weights").read_text() == "w"
    assert [path.name for path in kept if path.parent.name.startswith(MAKING)] == ["weights"]
    assert made_once("m", 1, "maker", "fails") == folder, "it is not made again"
    with pytest.raises(ProcessError, match=r"other was not made in .*exit status 1"):
        made_once("other", 2, "maker", "fails")
    assert list(models.iterdir()) == [folder]


def test_what_a_killed_run_left_of_a_model_goes(models: Path) -> None:
    """What another run is making stays."""
    left, made_now = (models / f"{MAKING}{name}" for name in ("left", "now"))
    for folder in (left, made_now):
        folder.mkdir(parents=True)
        (folder / "weights").write_text("w")
    long_ago = time.time() - 3 * MAKING_LIMIT
    os.utime(left, (long_ago, long_ago))
    folder = made_once("m", 1, "maker")
    assert sorted(models.iterdir()) == sorted([made_now, folder])


def test_the_example_hears_of_the_end_of_its_owner(tmp_path: Path) -> None:
    """Whatever ended it before it granted anything."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\nif '--multiprocessing-fork' in sys.orig_argv: os._exit(3)\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    example = [sys.executable, str(ROOT / "examples" / "transfer.py")]
    done = subprocess.run(example, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (1, "the owner has ended, and granted nothing\n")
