"""Faults on order, one server at a time: what a client sees, and what becomes of the server."""

import http.client
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvik.demo import client
from kvik.roles.processes import HttpServer
from tests.python.emulator import servers
from tests.python.emulator.servers import Spec, ask, metric, prompt_of, tokens_of

TOKENS = 20
STEPS = "kvik_emulator_steps_total"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    """One replica of two ranks, whose steps can be told to take long."""
    with servers.servers(
        tmp_path_factory.mktemp("faults"), Spec("one", options=("--tp", "2", "--allow-faults"))
    ) as (one,):
        yield one
        servers.wait_used(one, 0.0)


def _order(server: HttpServer, *faults: str) -> None:
    for fault in faults:
        assert ask(server.url, "POST", "/fault", {"fault": fault})[0] == 200


def test_a_stalled_engine_goes_on(server: HttpServer) -> None:
    prompt = prompt_of(50, seed=1)
    truth = tokens_of(server, prompt, TOKENS)
    _order(server, "stalled:after=3,ms=400")
    began = time.monotonic()
    assert tokens_of(server, prompt, TOKENS) == truth
    assert time.monotonic() - began >= 0.4


def test_a_stopped_rank_holds_its_replica_until_it_goes_on(server: HttpServer) -> None:
    prompt = prompt_of(50, seed=2)
    truth = tokens_of(server, prompt, TOKENS)
    ranks = servers.ranks_of(server)
    _order(server, "stalled:what=rank,rank=1,after=4")
    answers: list[list[int]] = []
    asking = threading.Thread(target=lambda: answers.append(tokens_of(server, prompt, TOKENS)))
    asking.start()
    stopped = servers.wait_for(
        lambda: sum(servers.is_stopped(pid) for pid in ranks), lambda count: count == 1
    )
    assert stopped == 1
    assert answers == []
    for pid in ranks:
        servers.kill(pid, signal.SIGCONT)
    asking.join(servers.LIMIT)
    assert answers == [truth]


def test_the_only_replica_dies_once(server: HttpServer) -> None:
    """The answer goes on where it was, on the replica's successor, streamed without a gap."""
    prompt = prompt_of(80, seed=3)
    truth = tokens_of(server, prompt, TOKENS)
    before = servers.ranks_of(server)
    once = ("vllm:prompt_tokens_total", "vllm:prefix_cache_queries_total")
    counted = {name: metric(server, name) for name in (*once, servers.COMPUTED)}
    _order(server, "dead:what=rank,rank=1,after=10")
    assert client.complete(server.url, prompt, TOKENS).tokens == truth
    grown = {name: metric(server, name) - counted[name] for name in counted}
    assert [grown[name] for name in once] == [80, 80], "what was asked for, though it was begun anew"
    assert grown[servers.COMPUTED] > 80, "what was computed for it"
    assert not set(servers.ranks_of(server)) & set(before)
    assert ask(server.url, "GET", "/health")[0] == 200


def test_the_only_replica_dies_twice(server: HttpServer) -> None:
    """Then the request fails by name: HTTP 500 before its first token, an error event in its stream after."""
    _order(server, "dead:what=rank,after=3", "dead:what=rank,rank=1,after=6")
    failed = 'vllm:request_success_total{finished_reason="error"}'
    before = metric(server, failed)
    with pytest.raises(client.RequestError, match="second replica that died"):
        client.complete(server.url, prompt_of(80, seed=4), TOKENS)
    assert metric(server, failed) - before == 1
    assert servers.wait_for(lambda: ask(server.url, "GET", "/health")[0], lambda status: status == 200) == 200
    assert len(tokens_of(server, prompt_of(80, seed=4), TOKENS)) == TOKENS


def test_a_replica_that_dies_all_the_time_is_given_up(tmp_path: Path) -> None:
    """Four deaths in a minute: /health says what happened, requests are refused, the server stays."""
    with servers.servers(tmp_path, Spec("doomed", options=("--allow-faults",))) as (doomed,):
        for _ in range(4):
            _order(doomed, "dead:what=rank")
            with_answer = ask(doomed.url, "POST", "/v1/completions", {"prompt": "a", "max_tokens": 2})
        status, health = ask(doomed.url, "GET", "/health")
        assert status == 503
        assert "signal 9" in health["replicas"]["dp0"]
        assert with_answer[0] == 500, with_answer
        assert ask(doomed.url, "POST", "/v1/completions", {"prompt": "a"})[0] == 503


def test_a_dead_server_and_a_stalled_one(tmp_path: Path) -> None:
    """Killed at its third step; stalled for good and still ended by SIGTERM: no rank outlives either."""
    specs = [
        Spec("dead", options=("--tp", "2", "--fault", "dead:after=3")),
        Spec("stalled", options=("--tp", "2", "--fault", "stalled", "--drain", "0")),
    ]
    with servers.servers(tmp_path, *specs) as (dead, stalled):
        ranks = [*servers.ranks_of(dead), *servers.ranks_of(stalled)]
        with pytest.raises((client.RequestError, OSError)):
            client.complete(dead.url, prompt_of(10, seed=1), TOKENS)
        assert dead.wait(servers.LIMIT) == 128 + signal.SIGKILL
        asking = threading.Thread(target=lambda: _ignore_error(stalled))
        asking.start()
        assert servers.wait_for(lambda: metric(stalled, "vllm:num_requests_running"), bool)
        servers.kill(stalled.pid, signal.SIGTERM)
        assert stalled.wait(servers.LIMIT) == 0, stalled.tail()
        asking.join(servers.LIMIT)
        assert (
            servers.wait_for(
                lambda: sum(Path(f"/proc/{pid}").exists() for pid in ranks), lambda left: left == 0
            )
            == 0
        )


def _ignore_error(server: HttpServer) -> None:
    with pytest.raises((client.RequestError, OSError, http.client.HTTPException)):
        client.complete(server.url, prompt_of(10, seed=1), TOKENS)


def test_steps_take_as_long_as_the_model_says(tmp_path: Path) -> None:
    """Never less: so many steps, each with its time; reading only each fourth time changes no token."""
    options = ("--compute", "fixed=0.005,decode_token=0.002,step_tokens=64", "--reread", "4")
    with servers.servers(tmp_path, Spec("timed", options=options), Spec("plain")) as (timed, plain):
        prompt = prompt_of(300, seed=5)
        began = time.monotonic()
        answer = tokens_of(timed, prompt, TOKENS)
        took = time.monotonic() - began
        steps = metric(timed, STEPS)
        assert steps == -(-300 // 64) + TOKENS - 1
        modelled = steps * 0.005 + (TOKENS - 1) * 0.002
        assert metric(timed, "kvik_emulator_modelled_seconds_total") == pytest.approx(modelled)
        assert took >= modelled
        assert answer == tokens_of(plain, prompt, TOKENS)
