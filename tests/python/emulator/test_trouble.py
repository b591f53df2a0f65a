"""Requests and servers that go wrong: a right answer or a clear error, and every page comes back."""

import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from kvik.demo import client
from kvik.demo.reports import ReportReader
from kvik.roles.processes import HttpServer
from tests.python.emulator import servers
from tests.python.emulator.servers import Spec, ask, metric, prefill_by_hand, prompt_of, tokens_of
from tests.python.peers import stop

TOKENS = 8
RUNNING = "vllm:num_requests_running"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[HttpServer]]:
    """Prefill, decode, and one alone; decode has plain memory, prefill and alone have kvik's."""
    folder = tmp_path_factory.mktemp("trouble")
    specs = [
        Spec("prefill", "prefill", ("--allow-faults",)),
        Spec("decode", "decode", ("--plain-memory", "--allow-faults"), folder / "loads.jsonl"),
        Spec("alone"),
    ]
    with servers.servers(folder, *specs) as started:
        yield started
        for server in started:
            servers.wait_used(server, 0.0)


def _reports(pair: list[HttpServer]) -> ReportReader:
    return ReportReader(pair[1].log.parent / "loads.jsonl")


def test_plain_memory_and_prefix_cache(pair: list[HttpServer]) -> None:
    """Only what is missing moves: the second prompt shares 64 of its tokens with the first."""
    prefill, decode, alone = pair
    first = prompt_of(64, seed=1) + prompt_of(30, seed=2)
    second = first[:64] + prompt_of(50, seed=3)
    reports = _reports(pair)
    for prompt, blocks in ((first, 6), (second, 4)):
        params = prefill_by_hand(prefill, prompt)
        answer = tokens_of(decode, prompt, TOKENS, kv_transfer_params=params)
        assert answer == tokens_of(alone, prompt, TOKENS)
        loads = reports.wait(1, servers.LIMIT)
        assert [(load.outcome, load.blocks) for load in loads] == [("loaded", blocks)]


def test_ends_by_itself(pair: list[HttpServer]) -> None:
    """A token that ends the answer: named by the client, or the model's own."""
    _, _, alone = pair
    prompt = prompt_of(20, seed=4)
    tokens = tokens_of(alone, prompt, TOKENS)
    stopped = client.complete(alone.url, prompt, TOKENS, stop_token_ids=[tokens[2]])
    assert (stopped.tokens, stopped.finish_reason) == (tokens[:3], "stop")
    late = client.complete(alone.url, prompt, TOKENS, stop_token_ids=[tokens[2]], min_tokens=3)
    assert late.tokens[:4] == tokens[:4]
    long = client.complete(alone.url, prompt, 3000, ignore_eos=False)
    assert long.finish_reason == "stop"
    assert long.tokens[-1] == 1
    again = client.complete(alone.url, prompt, len(long.tokens) + 2)
    assert again.tokens[: len(long.tokens) - 1] == long.tokens[:-1]
    assert again.finish_reason == "length"


def test_wrong_page_shows(pair: list[HttpServer]) -> None:
    """One flipped bit of a page between prefill and decode: transferred faithfully, and other tokens."""
    prefill, decode, alone = pair
    prompt = prompt_of(200, seed=5)
    truth = tokens_of(alone, prompt, TOKENS)
    assert ask(prefill.url, "POST", "/fault", {"fault": "wrong-page"})[0] == 200
    params = prefill_by_hand(prefill, prompt)
    reports = _reports(pair)
    answer = tokens_of(decode, prompt, TOKENS, kv_transfer_params=params)
    assert [load.outcome for load in reports.wait(1, servers.LIMIT)] == ["loaded"]
    assert all(one != other for one, other in zip(answer[:1], truth[:1], strict=True))
    assert sum(one != other for one, other in zip(answer, truth, strict=True)) >= TOKENS - 1


def test_stale_and_foreign_offers(pair: list[HttpServer]) -> None:
    """Used twice, for another prompt, of another salt, of a server without kvik: recomputed, and by name."""
    prefill, decode, alone = pair
    prompt, other = prompt_of(100, seed=6), prompt_of(100, seed=7)
    reports = _reports(pair)
    params = prefill_by_hand(prefill, prompt)
    offers: list[tuple[list[int], dict[str, Any], dict[str, object]]] = [
        (prompt, params, {"cache_salt": "a"}),
        (other, prefill_by_hand(prefill, prompt_of(100, seed=8)), {}),
        (prompt, {**prefill_by_hand(prefill, prompt), "kvik": None}, {}),
    ]
    for asked, offer, more in offers:
        truth = tokens_of(alone, asked, TOKENS, **more)
        assert tokens_of(decode, asked, TOKENS, kv_transfer_params=offer, **more) == truth
    loads = reports.wait(3, servers.LIMIT)
    assert [load.reason for load in loads] == ["digest_mismatch", "digest_mismatch", "params_not_kvik"]
    fresh = prefill_by_hand(prefill, other)
    assert tokens_of(decode, other, TOKENS, kv_transfer_params=fresh, cache_salt="b") == tokens_of(
        alone, other, TOKENS, cache_salt="b"
    )


def test_used_twice_is_recomputed_and_counted(pair: list[HttpServer]) -> None:
    prefill, decode, alone = pair
    prompt = prompt_of(150, seed=9)
    before = metric(decode, "vllm:kvik_tokens_recomputed_total")
    params = prefill_by_hand(prefill, prompt)
    truth = tokens_of(alone, prompt, TOKENS)
    assert tokens_of(decode, prompt, TOKENS, kv_transfer_params=params) == truth
    # Another salt would be refused by digest; so the prefix cache is filled with other prompts instead.
    for seed in range(12):
        tokens_of(decode, prompt_of(3900, seed), 1)
    reports = _reports(pair)
    assert tokens_of(decode, prompt, TOKENS, kv_transfer_params=params) == truth
    (load,) = reports.wait(1, servers.LIMIT)
    assert load.outcome == "failed"
    assert metric(decode, "vllm:kvik_tokens_recomputed_total") - before == len(prompt)
    for seed in range(12):
        tokens_of(decode, prompt_of(3900, seed + 20), 1)
    whole = client.body(prompt, TOKENS, kv_transfer_params=params)
    said = [chunk.get("kv_transfer_params") for chunk in _stream(decode, "/v1/completions", whole)]
    assert said[:-1] == [None] * (len(said) - 1), "only the last event says how the KV came"
    assert said[-1] is not None
    assert said[-1]["kvik"]["outcome"] == "recomputed"
    assert said[-1]["kvik"]["reason"] == load.reason


def test_clients_leave(pair: list[HttpServer]) -> None:
    """While waiting for KV that never comes, amid a stream, and before anything: every page comes back."""
    prefill, decode, _ = pair
    prompt = prompt_of(500, seed=10)
    ranks = servers.ranks_of(prefill)
    params = prefill_by_hand(prefill, prompt)
    for pid in ranks:
        stop(pid)
    try:
        servers.ask_and_leave(
            decode, client.body(prompt, TOKENS, kv_transfer_params=params), lambda: _loading(decode)
        )
    finally:
        for pid in ranks:
            servers.kill(pid, signal.SIGCONT)
    servers.wait_used(decode, 0.0)
    assert ask(decode.url, "POST", "/fault", {"fault": "slow:ms=20"})[0] == 200
    servers.ask_and_leave(decode, client.body(prompt, 3000, stream=True), lambda: _running(decode))
    servers.wait_used(decode, 0.0)
    for server in (prefill, decode):
        servers.wait_used(server, 0.0)


def _loading(server: HttpServer) -> bool:
    return metric(server, "vllm:num_requests_waiting") == 1


def _running(server: HttpServer) -> bool:
    return metric(server, RUNNING) == 1


def test_bad_requests(pair: list[HttpServer]) -> None:
    """Each is refused with 400 or its own status, OpenAI's form, and the field's name."""
    alone = pair[2]
    bad: list[tuple[object, int, str]] = [
        (b"{", 400, "not JSON"),
        (b"[" * 100_000, 400, "not JSON"),
        ({"prompt": "\ud800"}, 400, "not JSON"),
        (b'{"prompt": "\xed\xa0\x80"}', 400, "not JSON"),
        ('{"prompt": "\ud800"}'.encode("utf-16", "surrogatepass"), 400, "not JSON"),
        ({"prompt": "a", "cache_salt": "\udfff"}, 400, "not JSON"),
        ({"prompt": "a", "n": "\ud800"}, 400, "not JSON"),
        ([1], 400, "not a JSON object"),
        ({}, 400, "prompt"),
        ({"prompt": []}, 400, "prompt"),
        ({"prompt": [3, "x"]}, 400, "prompt"),
        ({"prompt": [3, 512]}, 400, "0 to 511"),
        ({"prompt": [3, -1]}, 400, "0 to 511"),
        ({"prompt": ["a", "b"]}, 400, "batch"),
        ({"prompt": "a", "model": "other"}, 404, "other"),
        ({"prompt": "a", "n": 2}, 400, "`n`"),
        ({"prompt": "a", "logprobs": 1}, 400, "`logprobs`"),
        ({"prompt": "a", "logprobs": 0}, 400, "`logprobs`"),
        ({"prompt": "a", "stream_options": {"include_usage": True}}, 400, "`stream_options`"),
        ({"prompt": "a", "stream": True, "stream_options": "usage"}, 400, "`stream_options`"),
        ({"prompt": "a", "max_tokens": 0}, 400, "`max_tokens`"),
        ({"prompt": "a", "max_tokens": "9"}, 400, "`max_tokens`"),
        ({"prompt": "a", "min_tokens": 99}, 400, "`min_tokens`"),
        ({"prompt": "a", "stream": 1}, 400, "`stream`"),
        ({"prompt": "a", "stop": ["x"]}, 400, "`stop`"),
        ({"prompt": "a", "cache_salt": ""}, 400, "`cache_salt`"),
        ({"prompt": "a", "kv_transfer_params": 3}, 400, "`kv_transfer_params`"),
        ({"prompt": [3] * 5000}, 400, "context 4096"),
        ({"prompt": [3] * 4000, "max_tokens": 97}, 400, "together at most 4096"),
    ]
    for body, status, part in bad:
        found, answer = ask(alone.url, "POST", "/v1/completions", body)
        assert (found, answer["error"]["code"]) == (status, status), (body, answer)
        assert part in answer["error"]["message"], (body, answer)
    # Half a character is none, and both halves are one.
    assert (
        ask(alone.url, "POST", "/v1/completions", {"prompt": "\U0001f600 \ud55c", "max_tokens": 1})[0] == 200
    )
    with socket.create_connection((alone.host, alone.port), timeout=servers.LIMIT) as leaves:
        leaves.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n{")
        leaves.shutdown(socket.SHUT_WR)
        while leaves.recv(1024):
            pass
    assert ask(alone.url, "POST", "/v1/chat/completions", {"messages": [{}]})[0] == 400
    assert "Traceback" not in alone.log.read_text()
    assert ask(alone.url, "POST", "/v1/chat/completions", {})[0] == 400
    assert ask(alone.url, "POST", "/fault", {"fault": "slow"})[0] == 404
    assert ask(pair[0].url, "POST", "/fault", {"fault": "slwo"})[0] == 400


def test_chat_models_and_ids(pair: list[HttpServer]) -> None:
    """A chat is its text in bytes; whole and streamed say the same; the client's id is in the answer."""
    alone = pair[2]
    body: dict[str, object] = {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Füße"}]}],
        "max_tokens": 6,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    status, whole = ask(alone.url, "POST", "/v1/chat/completions", body, {"X-Request-Id": "mine"})
    assert (status, whole["id"], whole["object"]) == (200, "chatcmpl-mine", "chat.completion")
    choice = whole["choices"][0]
    assert bytes(token - 3 for token in whole["prompt_token_ids"]).decode() == "<user> Füße\n<assistant>"
    assert whole["usage"]["completion_tokens"] == len(choice["token_ids"]) == 6
    events = _stream(alone, "/v1/chat/completions", {**body, "stream_options": {"include_usage": True}})
    assert [token for event in events[:-1] for token in event["choices"][0]["token_ids"]] == choice[
        "token_ids"
    ]
    text = "".join(event["choices"][0]["delta"]["content"] for event in events[:-1])
    assert text == choice["message"]["content"]
    assert events[-1]["usage"] == whole["usage"] | {
        "prompt_tokens_details": events[-1]["usage"]["prompt_tokens_details"]
    }
    models = ask(alone.url, "GET", "/v1/models")[1]["data"]
    assert [(model["id"], model["max_model_len"]) for model in models] == [("tiny", 4096)]


def _stream(server: HttpServer, path: str, body: dict[str, object]) -> list[dict[str, Any]]:
    parts = urlsplit(server.url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=servers.LIMIT)
    try:
        connection.request("POST", path, json.dumps({**body, "stream": True}).encode())
        lines = connection.getresponse().read().decode().split("\n\n")
    finally:
        connection.close()
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def test_a_load_that_fails_may_end_the_request(tmp_path: Path, pair: list[HttpServer]) -> None:
    """--load-failure fail: HTTP 500 that says why, whole and streamed, and no page is lost."""
    prefill = pair[0]
    with servers.servers(
        tmp_path, Spec("strict", "decode", ("--load-failure", "fail", "--no-prefix-cache"))
    ) as (strict,):
        prompt = prompt_of(100, seed=11)
        params = prefill_by_hand(prefill, prompt)
        tokens_of(strict, prompt, TOKENS, kv_transfer_params=params)
        for stream in (False, True):
            body = client.body(prompt, TOKENS, kv_transfer_params=params, stream=stream)
            with pytest.raises(client.RequestError) as caught:
                client.post(strict.url, body, servers.LIMIT)
            assert caught.value.status == 500
            assert "could not be loaded" in caught.value.text
        servers.wait_used(strict, 0.0)


def test_more_requests_than_pages(tmp_path: Path) -> None:
    """They wait their turn: memory for two at a time, and all answers right."""
    prompts = [prompt_of(100, seed) for seed in range(12)]
    with servers.servers(tmp_path, Spec("narrow", options=("--kv-memory", "1MiB", "--no-prefix-cache"))) as (
        narrow,
    ):
        answers: dict[int, list[int]] = {}

        def one(number: int) -> None:
            answers[number] = tokens_of(narrow, prompts[number], TOKENS)

        threads = [threading.Thread(target=one, args=(number,)) for number in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(servers.LIMIT)
        servers.wait_used(narrow, 0.0)
        again = [tokens_of(narrow, prompt, TOKENS) for prompt in prompts]
        assert [answers[number] for number in range(len(prompts))] == again
        status, answer = ask(narrow.url, "POST", "/v1/completions", {"prompt": [3] * 600})
        assert (status, "KV memory" in answer["error"]["message"]) == (400, True)


def test_sigterm_drains_and_gives_up(tmp_path: Path) -> None:
    """Open requests finish within --drain; with 0 a server ends at once; either way with status 0."""
    slow = ("--compute", "decode_token=0.05", "--drain")
    specs = [Spec("patient", options=(*slow, "60")), Spec("hasty", options=(*slow, "0"))]
    with servers.servers(tmp_path, *specs) as started:
        # Long enough that both still run when they are seen to.
        results, tokens = dict[str, object](), {"patient": 100, "hasty": 2000}

        def one(server: HttpServer) -> None:
            try:
                results[server.name] = client.complete(
                    server.url, prompt_of(10, seed=1), tokens[server.name]
                ).tokens
            except (client.RequestError, OSError, http.client.HTTPException) as error:
                results[server.name] = error

        threads = [threading.Thread(target=one, args=(server,)) for server in started]
        for thread in threads:
            thread.start()
        for server in started:
            assert servers.wait_for(partial(metric, server, RUNNING), bool)
        began = time.monotonic()
        for server in started:
            servers.kill(server.pid, signal.SIGTERM)
        assert started[1].wait(servers.LIMIT) == 0, started[1].tail()
        print(f"ended {time.monotonic() - began:.2f} s after SIGTERM")
        assert started[0].wait(2 * servers.LIMIT) == 0, started[0].tail()
        for thread in threads:
            thread.join(servers.LIMIT)
        assert isinstance(results["patient"], list)
        assert len(results["patient"]) == 100
        assert isinstance(results["hasty"], Exception)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--model-shape", "llama-9"], "llama-9"),
        (["--kv-memory", "1KiB"], "holds not one page"),
        (["--kv-memory", "900TiB"], "this machine has"),
        (["--tp", "3"], "3 ranks"),
        (["--fault", "ded"], "did you mean 'dead'"),
        (["--fault", "slow:speed=3"], "factor, ms"),
        (["--compute", "h200"], "h100-70b-like"),
        (["--compute", "fixed=-1"], "out of range"),
        (["--drain", "-1"], "drain is a"),
        (["--store", "there"], "HOST:PORT"),
        (["--store", "embedded:little"], "at least 1MiB"),
        (["--store", "embedded:900TiB"], "this machine has"),
        (["--store", "127.0.0.1:1,deadline=0"], "seconds up to 3600"),
        (["--store", "127.0.0.1:1,patience=1"], "there is deadline"),
        (["--kv-memory", "much"], "kv_memory is a number of bytes"),
        (["--host", "192.0.2.1"], "assign requested address"),
        (["--host", "a..b"], "Error: a..b:0:"),
        (["--listen", "0.0.0.0:0"], "KVIK_SECRET"),
    ],
)
def test_options_that_cannot_be(options: list[str], said: str) -> None:
    """One line on standard error that says what is wrong; nothing is left running."""
    command = [sys.executable, "-m", "kvik.cli", "emulator", "serve", "--port", "0", *options]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=servers.LIMIT, check=False)
    assert ended.returncode in (1, 2)
    assert said in ended.stderr, ended.stderr
