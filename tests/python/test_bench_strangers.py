"""What a stranger or a broken initiator sends to a benchmark's target that listens."""

from __future__ import annotations

import json
import math
import socket
import threading
from typing import Any

import pytest

from kvik.bench import control, target
from kvik.bench.errors import BenchError
from kvik.bench.target import Target, TargetOptions
from tests.python.peers import LIMIT

SECRET = "a secret of this test"  # noqa: S105 - of this test
OPTIONS = TargetOptions(2 << 20, "host", "tcp", 1, "auto", "127.0.0.1:0")
HELLO = {"kvik_bench": control.VERSION, "nonce": "n", "proof": "p"}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"[" * 60_000, "not JSON"),
        (json.dumps({**HELLO, "proof": "\ud800"}).encode(), "does not know the secret"),
        (json.dumps({**HELLO, "nonce": "\ud800"}).encode(), "does not know the secret"),
    ],
    ids=["nested", "proof", "nonce"],
)
def test_a_stranger_is_sent_away_and_the_target_listens_on(
    line: bytes, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "HANDSHAKE_SECONDS", LIMIT)
    heard: list[str] = []
    listens, refused = threading.Event(), threading.Event()

    def say(text: str) -> None:
        heard.append(text)
        (listens if text.startswith("bench target on ") else refused).set()

    threading.Thread(target=target.listen, args=("127.0.0.1:0", OPTIONS, SECRET, say), daemon=True).start()
    assert listens.wait(LIMIT)
    address = heard[0].split()[-1]
    with socket.create_connection(control.split_address(address), timeout=LIMIT) as stranger:
        stranger.sendall(line + b"\n")
        assert refused.wait(LIMIT)
    assert said in heard[1]
    connection = control.connect(address, SECRET)
    assert connection.request("cpu")["cpu_s"] > 0
    connection.close()


@pytest.mark.parametrize(
    "request_",
    [
        {"op": "open", "page_bytes": 512, "pages": 1, "buffer": 1 << 60, "layout": "contiguous", "seed": 1},
        {"op": "fill", "salt": math.inf},
    ],
)
def test_orders_that_cannot_be_are_answered(request_: dict[str, Any]) -> None:
    one = Target(OPTIONS, None)
    try:
        assert "counts on more" in one.handle(request_)["error"] or request_["op"] == "fill"
        assert one.handle({"op": "cpu"})["cpu_s"] > 0
    finally:
        one.close()


def test_a_name_that_is_none_is_said() -> None:
    with pytest.raises(BenchError, match=r"no bench target at a\.\.b:1"):
        control.connect("a..b:1", None)


def test_a_target_that_is_busy_is_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "HANDSHAKE_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(BenchError, match=rf"{address} took the connection .*another initiator"):
            control.connect(address, None)
