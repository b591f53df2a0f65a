"""The same prompt alone, handed over and from the prefix cache: equal tokens, exactly its pages moved."""

from pathlib import Path

import pytest

from kvik.demo import client
from kvik.demo.reports import ReportReader
from kvik.roles.processes import HttpServer
from tests.python.emulator import servers
from tests.python.emulator.servers import TINY, Spec, prompt_of, tokens_of

TOKENS = 8
PAGE_TOKENS = 16
LENGTHS = [1, 2, 15, 16, 17, 31, 32, 33, 100, 500, 3000]


def pages_of(length: int) -> int:
    return -(-length // PAGE_TOKENS)


@pytest.mark.parametrize("tp", [1, 2])
def test_alone_handed_over_and_cached(tmp_path: Path, tp: int) -> None:
    report = tmp_path / "loads.jsonl"
    size = ("--tp", str(tp))
    specs = [
        Spec("alone"),
        Spec("prefill", "prefill", size),
        Spec("decode", "decode", size, report),
    ]
    with servers.servers(tmp_path, *specs) as (alone, prefill, decode):
        with servers.routed(tmp_path, [prefill], [decode]) as router:
            for length in LENGTHS:
                prompt = prompt_of(length, seed=length)
                _hand_over(alone, decode, router, ReportReader(report), prompt, tp)
        for server in (prefill, decode, alone):
            servers.wait_used(server, 0.0)


def test_what_decode_refuses_is_given_back(tmp_path: Path) -> None:
    """Prefill computes one token and sees no fault; its pages come back long before they expire."""
    specs = [Spec(role, role, expiry=4 * servers.LIMIT) for role in ("prefill", "decode")]
    faults: list[dict[str, object]] = [{"max_tokens": 1_000_000}, {"min_tokens": TOKENS + 1}]
    with (
        servers.servers(tmp_path, *specs) as (prefill, decode),
        servers.routed(tmp_path, [prefill], [decode]) as router,
    ):
        for seed, fault in enumerate(faults):
            wrong = {**client.body(prompt_of(500, seed), TOKENS), **fault}
            status, answer = servers.ask(router.url, "POST", "/v1/completions", wrong)
            assert status == 400, answer
            servers.wait_used(prefill, 0.0)
        assert servers.metric(decode, "vllm:kvik_tokens_recomputed_total") == 0


def _hand_over(
    alone: HttpServer,
    decode: HttpServer,
    router: HttpServer,
    reports: ReportReader,
    prompt: list[int],
    tp: int,
) -> None:
    computed = servers.metric(decode, servers.COMPUTED)
    truth = tokens_of(alone, prompt, TOKENS)
    streamed = client.complete(router.url, prompt, TOKENS)
    assert streamed.tokens == truth
    moved = 0 if len(prompt) == 1 else pages_of(len(prompt))
    loads = reports.wait(tp, servers.LIMIT) if moved else []
    assert [(load.outcome, load.blocks) for load in loads] == [("loaded", moved)] * len(loads)
    assert sum(load.bytes for load in loads) == moved * TINY.page_bytes(PAGE_TOKENS)
    assert servers.metric(decode, servers.COMPUTED) - computed <= 1, "decode computed what was handed over"
    # Again: from the prefix cache of either side, which has the full pages.
    assert tokens_of(alone, prompt, TOKENS) == truth
    assert client.complete(router.url, prompt, TOKENS).tokens == truth
