"""The gates on real runs: right ones pass, and each kind of wrong one is found for its own reason."""

from __future__ import annotations

import contextlib
import http.server
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from kvik_lab.gates import judge, judge_study
from kvik_lab.records import RunRecord
from tests.lab.gates.scene import BLOCK, TINY, TOKENS, Scene, finding, neighbours, pair

pytestmark = pytest.mark.timeout(300)  # most start programs, which takes a busy machine tens of seconds
# What the machine does beside is not these tests' subject: on a busy one every run is suspect for it.
RUNS_OWN = ("V1", "V2", "V3", "V4", "V5", "V6", "V7", "V8")


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """One pair for all runs that need no other."""
    with pair(tmp_path_factory.mktemp("plain"), ("--transport", "tcp"), ("--transport", "tcp")) as scene:
        yield scene


@pytest.fixture(scope="module")
def right(scene: Scene) -> RunRecord:
    """A run as it is to be."""
    return scene.run()


def test_right_runs_pass_every_gate(scene: Scene, right: RunRecord) -> None:
    runs = [
        right,
        scene.run(arrival={"kind": "poisson", "rate": 40.0}),
        scene.run(arrival={"kind": "rounds", "concurrency": 4}),
    ]
    for record in judge_study(runs):
        assert record.verdict != "invalid", record.findings
        for gate in RUNS_OWN:
            if gate != "V5":
                assert finding(record, gate).status == "passed", finding(record, gate)
        assert "none failed" in finding(record, "V9").what or finding(record, "V9").status == "suspect"


def test_a_floor_that_holds_and_one_that_cannot(right: RunRecord) -> None:
    held = right.model_copy(update={"stated": right.stated.model_copy(update={"ttft_floor": 1e-6})})
    assert finding(judge(held), "V5").status == "passed"
    broken = right.model_copy(update={"stated": right.stated.model_copy(update={"ttft_floor": 3600.0})})
    assert judge(broken).verdict == "invalid"
    assert "below the floor" in finding(judge(broken), "V5").what


def test_a_prefix_cache_that_was_left_on(tmp_path: Path) -> None:
    """The article's own mistake: one prompt, sent again and again, to engines that remember it."""
    with pair(tmp_path, cache=True) as scene:
        record = judge(scene.run(prompt={"tokens": TOKENS, "output": 4, "unique": "none"}))
    assert record.verdict == "invalid"
    assert finding(record, "V1").status == "invalid"
    assert "came from its prefix cache" in finding(record, "V1").what
    assert "was sent 10 times" in finding(record, "V6").what


def test_hits_that_are_designed_pass(tmp_path: Path) -> None:
    shared = {"tokens": TOKENS, "output": 4, "shared": {"share": 2 / 3, "groups": 1}}
    with pair(tmp_path, cache=True) as scene:
        record = scene.run(prompt=shared, requests=28, stated={"prefix_hit_share": 2 / 3})
    assert finding(judge(record), "V1").status == "passed", finding(judge(record), "V1")
    other = record.model_copy(update={"stated": record.stated.model_copy(update={"prefix_hit_share": 0.1})})
    assert finding(judge(other), "V1").status == "invalid"


def test_a_client_that_talks_to_the_prefill_engine(scene: Scene) -> None:
    record = judge(scene.run(to=scene.url("prefill")))
    assert record.verdict == "invalid"
    said = finding(record, "V4")
    assert "which is prefill (prefill), and not to router" in said.what
    assert "decode answered none of 10 requests" in said.what
    assert finding(record, "V2").status == "invalid"


def test_another_transport_than_stated(scene: Scene, right: RunRecord) -> None:
    record = judge(scene.run(stated={"transport": "local"}))
    assert record.verdict == "invalid"
    assert "bytes by tcp, and local is stated" in finding(record, "V7").what
    uncounted = [
        role.model_copy(
            update={"before": {}, "after": {k: v for k, v in role.after.items() if "kvik_transfer" not in k}}
        )
        for role in right.roles
    ]
    blind = judge(right.model_copy(update={"roles": tuple(uncounted)}))
    assert finding(blind, "V7").status == "suspect"
    assert "is not shown" in finding(blind, "V7").what


def test_prompts_that_the_tokenizer_compresses(scene: Scene) -> None:
    """The study says 96 tokens; what is sent has, by the server's own count, an eighth of that."""
    record = judge(scene.run(prompt={"tokens": TOKENS // 8, "output": 4}, stated={"prompt_tokens": TOKENS}))
    assert record.verdict == "invalid"
    assert f"one has {TOKENS // 8} tokens and is to have {TOKENS}" in finding(record, "V6").what


def test_a_decode_engine_that_computed_everything(tmp_path: Path) -> None:
    """What stands as prefill engine offers nothing, so that the router lets decode compute each prompt."""
    with pair(tmp_path, prefill_role="decode") as scene:
        record = judge(scene.run())
    assert record.verdict == "invalid"
    assert "decode computed 960 of 960 prompt tokens" in finding(record, "V3").what
    assert (finding(record, "V2").status, finding(record, "V3").status) == ("invalid", "invalid")
    assert "prompts that the router let decode compute" in finding(record, "V9").what


class _Again(http.server.BaseHTTPRequestHandler):
    """A proxy that answers from its second attempt, as one that hides errors would."""

    target: ClassVar[str]
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(urllib.request.Request(self.target + self.path))  # noqa: S310  (this machine's)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        asked = urllib.request.Request(self.target + self.path, body, {"Content-Type": "application/json"})  # noqa: S310
        urllib.request.urlopen(asked, timeout=60).read()  # noqa: S310  (the attempt that "failed")
        self._answer(asked)

    def _answer(self, asked: urllib.request.Request) -> None:
        with urllib.request.urlopen(asked, timeout=60) as answer:  # noqa: S310
            data = answer.read()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Say nothing."""


@contextlib.contextmanager
def retrying(target: str) -> Iterator[str]:
    handler = type("Again", (_Again,), {"target": target})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_errors_that_somebody_retried(scene: Scene, right: RunRecord) -> None:
    with retrying(scene.url("router")) as url:
        record = judge(scene.run(to=url, stated={"entry": None}))
    assert record.verdict == "invalid"
    said = finding(record, "V9").what
    assert "prefill answered 20 requests, and 10 were sent: 10 more" in said
    again = right.requests[0].model_copy(update={"attempts": 2})
    told = judge(right.model_copy(update={"requests": (again, *right.requests[1:])}))
    assert "1 requests were sent more than once, up to 2 times" in finding(told, "V9").what


def test_errors(scene: Scene) -> None:
    """A prompt that is longer than the engine's context is refused."""
    record = judge(scene.run(prompt={"tokens": TINY.max_context + 1, "output": 4}))
    assert record.verdict == "invalid"
    assert "10 of 10 requests failed, the first with: HTTP 400" in finding(record, "V9").what


def test_arms_of_unlike_context_length(tmp_path: Path, right: RunRecord) -> None:
    shape = "layers=4,kv_heads=4,head_size=32,dtype=float32,vocab_size=512,max_context=8192"
    with pair(tmp_path, ("--model-shape", shape), ("--model-shape", shape)) as scene:
        other = scene.run()
    judged = judge_study([right, other])
    for record in judged:
        assert record.verdict == "invalid"
        assert "max_model_len is " in finding(record, "V8").what
    varied = [
        record.model_copy(update={"stated": record.stated.model_copy(update={"varied": ("max_model_len",)})})
        for record in (right, other)
    ]
    assert all(finding(record, "V8").status == "passed" for record in judge_study(varied))


def test_arms_of_unlike_prompts(scene: Scene, right: RunRecord) -> None:
    """Both are said to have the same load, and one tokenizer counts otherwise."""
    other = scene.run(prompt={"tokens": TOKENS + 16, "output": 4}, stated={"prompt_tokens": None})
    mine = right.model_copy(update={"stated": right.stated.model_copy(update={"prompt_tokens": None})})
    same = other.model_copy(update={"client": mine.client})
    for record in judge_study([mine, same]):
        assert finding(record, "V6").status == "invalid"
        assert "of the same load" in finding(record, "V6").what


def test_kv_that_is_smaller_than_stated(scene: Scene) -> None:
    """The engines have a model of half the KV heads."""
    record = judge(scene.run(stated={"kv_bytes_per_token": 2 * TINY.kv_bytes_per_token()}))
    assert record.verdict == "invalid"
    moved, wanted = finding(record, "V2").measured, finding(record, "V2").expected
    assert moved is not None
    assert wanted is not None
    assert moved == 10 * TOKENS // BLOCK * BLOCK * TINY.kv_bytes_per_token()
    assert wanted > 1.8 * moved


def test_hits_of_a_store_that_were_not_designed(tmp_path: Path) -> None:
    """No prefix cache; but the second run's prompts are those of the first, and a store has kept them."""
    with pair(tmp_path, ("--store", "embedded:64MiB")) as scene:
        first, second = (scene.run(seed=99) for _ in range(2))
    assert finding(judge(first), "V1").status == "passed", finding(judge(first), "V1")
    record = judge(second)
    assert record.verdict == "invalid"
    assert "prompt tokens came from a store" in finding(record, "V1").what


def test_a_busy_neighbour(scene: Scene) -> None:
    record = judge(scene.run(beside=neighbours(2), requests=24))
    said = finding(record, "V9")
    assert record.verdict == "suspect", record.findings
    assert "others than the run's processes used" in said.what


def test_a_clock_that_jumps(scene: Scene, tmp_path: Path) -> None:
    library = tmp_path / "jumping_clock.so"
    source = Path(__file__).with_name("jumping_clock.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"], check=True)
    record = judge(scene.run(environment={"LD_PRELOAD": str(library)}))
    assert record.verdict == "suspect", record.findings
    assert "the wall clock was set by 1000." in finding(record, "V9").what
