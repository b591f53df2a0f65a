"""What a benchmark stands beside: the plain TCP stream, its host's memory, and a disk for its results."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvik.bench import facts, peer
from kvik.bench.cli import bench
from kvik.bench.control import Connection
from kvik.bench.errors import BenchError
from kvik.bench.limits import TcpStream
from kvik.bench.pages import Cell
from kvik.bench.stream import CHUNKS, StreamInitiator
from tests.python.peers import LIMIT


def test_a_turn_is_as_long_as_asked_after_one_to_warm_up() -> None:
    """One batch to warm up takes as long as its start does, and is no measure of how many fit into a turn."""
    moved, cell, rate, seconds = list[int](), Cell("read", 512, 20), 1e9, 0.05

    class Fake:
        def cpu_s(self) -> float:
            return 0.0

        def turn(self, _op: str, total: int, _chunk: int) -> None:
            moved.append(total)

    fake: Any = Fake()
    limit = TcpStream(cell, fake, fake, CHUNKS[0], rate)
    limit.turn(0.0)
    limit.turn(seconds)
    assert moved == [cell.batch_bytes, round(rate * seconds / cell.batch_bytes) * cell.batch_bytes]
    limit.turn(seconds)
    assert moved[2] != moved[1], "what a turn has taken is a measure"


def test_a_stream_that_does_not_come_through_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: nobody else gets the port
        port = taken.getsockname()[1]
        for host in ("127.0.0.1", "a..b"):
            with pytest.raises(BenchError, match=rf"no plain TCP stream to {host}:{port}: .*firewall"):
                StreamInitiator(host, port, "token", memoryview(b""))


def test_a_target_that_listens_everywhere_is_found_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    one = object.__new__(peer.Peer)
    monkeypatch.setattr(peer, "StreamInitiator", lambda host, port, *_: (host, port))
    with socket.create_server(("127.0.0.1", 0)) as server:
        one.connection = Connection(socket.create_connection(server.getsockname()))
        for told, used in (("0.0.0.0:7", "127.0.0.1"), ("[::]:7", "127.0.0.1"), ("192.0.2.1:7", "192.0.2.1")):
            answer = {"address": told, "token": "t"}
            monkeypatch.setattr(one.connection, "request", lambda _, answer=answer: answer)
            found: Any = one.stream(memoryview(b""))
            assert found == (used, 7)
        one.connection.close()


@pytest.mark.parametrize(
    "words", [("stat", "--json"), ("bench", "context", "--shape", "tiny", "--tokens", "16", "--json", "-")]
)
def test_results_that_fill_a_disk_are_said_to_be_lost(words: tuple[str, ...]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "kvik", *words], stdout=full, stderr=subprocess.PIPE, text=True,
            timeout=LIMIT, check=False,
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.endswith("Error: [Errno 28] No space left on device\n")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("more", "said"), [(["--listen", "nowhere"], "HOST:PORT"), ([], "3 buffers of 256MiB do not fit")]
)
def test_a_target_alone_has_one_buffer(monkeypatch: pytest.MonkeyPatch, more: list[str], said: str) -> None:
    monkeypatch.setattr(facts, "memory_available", lambda: 300 << 20)
    size = ("--page", "4KiB", "--pages", "1", "--buffer", "256MiB")
    ended = CliRunner().invoke(bench, ["transfer", *size, *more])
    assert (ended.exit_code, said in ended.output) == (2, True), ended.output


@pytest.mark.parametrize(
    "words",
    [
        (
            "transfer",
            "--page",
            "4KiB",
            "--pages",
            "1",
            "--duration",
            "0.02",
            "--buffer",
            "2MiB",
            "--op",
            "read",
        ),
        ("checks", "--page", "4KiB", "--pages", "1", "--rounds", "2", "--turn", "0.01"),
        ("context", "--shape", "tiny", "--tokens", "64", "--memory", "8MiB"),
    ],
    ids=lambda words: words[0],
)
def test_a_server_of_this_host_is_in_nobodys_way(
    monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    """As in its container, where its address is in the environment, and taken."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("KVIK_LISTEN", address)
        monkeypatch.setenv("KVIK_ADVERTISE", address)
        ended = CliRunner().invoke(bench, words)
    assert ended.exit_code == 0, ended.output
