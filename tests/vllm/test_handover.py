"""Tokens through the router equal one engine's own, and the KV really moved."""

import re
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvik.demo import client
from kvik.demo.engines import BLOCK_TOKENS
from kvik.roles.processes import HttpServer
from tests.vllm.conftest import Reference, expected
from tests.vllm.pairs import BLOCK_BYTES, POLICY_WARNING, Pair, blocks_of, logged, prompt_of, used, wait_used

TOKENS = 16
SLACK = 20.0  # seconds for a busy machine
# From one token to 3,000, most of them around whole KV blocks.
LENGTHS = (
    1, 2, 3, 17, 64, 100, 126, 127, 128, 129, 130, 200, 254, 255, 256, 257, 258, 300, 383, 384, 385, 511, 512,
    513, 600, 640, 641, 768, 769, 896, 897, 1000, 1023, 1024, 1025, 1280, 1500, 1536, 2000, 2048, 2049, 2500,
    2944, 3000,
)  # fmt: skip
SMALL = (1, 2, 127, 128, 129, 256, 257, 640, 1025, 2000)
both = pytest.mark.parametrize("pair", ["no-prefix-cache", "prefix-cache"], indirect=True)


def expected_loads(lengths: tuple[int, ...]) -> list[int]:
    """Bytes of each load: all KV blocks of a prompt. Of one token nothing moves, for decode computes the last
    one."""
    return sorted(blocks_of(length) * BLOCK_BYTES for length in lengths if length > 1)


def ask(pair: Pair, prompts: list[list[int]], at_once: int) -> list[list[int]]:
    """The answers through the router, with so many requests at once."""
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda prompt: client.complete(pair.router.url, prompt, TOKENS).tokens, prompts))


def said_of_sessions(engine: HttpServer) -> list[str]:
    """What an engine's log says of loads that failed, and of its peers."""
    telling = re.compile(
        r"kvik: request .* failed|session \d+ (begun|ended)|the peer is silent|a channel did not"
    )
    lines = engine.log.read_text(errors="replace").splitlines()
    return [f"{engine.name}: {line}" for line in lines if telling.search(line)]


def check(pair: Pair, reference: Reference, lengths: tuple[int, ...], seed: int, at_once: int) -> None:
    """Fresh prompts of these lengths: equal tokens, exactly their KV blocks moved, nothing recomputed."""
    print(f"seed {seed}")
    prompts = [prompt_of(length, seed) for length in lengths]
    pair.reports.new()
    computed = pair.decode_computed()
    with expected(reference, prompts, TOKENS) as right:
        answers = ask(pair, prompts, at_once)
        for length, answer, one in zip(lengths, answers, right, strict=True):
            assert answer == one.result(), f"{length} tokens, {at_once} at once: other tokens"
    sizes = expected_loads(lengths)
    ranks = pair.spec.ranks[1]
    loads = pair.reports.wait(len(sizes) * ranks)
    if failed := [load for load in loads if load.outcome != "loaded"]:
        print(*failed, *(line for engine in pair.engines() for line in said_of_sessions(engine)), sep="\n")
    assert not failed
    for rank in range(ranks):
        moved = sorted(load.bytes * ranks for load in loads if load.rank == rank)
        assert moved == sizes, f"rank {rank} moved other bytes"
    assert pair.decode_computed() - computed <= len(lengths), (
        "decode computed more than one prompt token a request"
    )


@both
def test_one_at_a_time(pair: Pair, reference: Reference) -> None:
    """Every length, one after the other."""
    check(pair, reference, LENGTHS, seed=1, at_once=1)


@both
def test_eight_at_once(pair: Pair, reference: Reference) -> None:
    """Every length, eight at once."""
    check(pair, reference, LENGTHS, seed=2, at_once=8)


@pytest.mark.parametrize("pair", ["tp2"], indirect=True)
def test_two_ranks(pair: Pair, reference: Reference) -> None:
    """Tensor parallelism 2 on both sides: each rank moves its half."""
    check(pair, reference, SMALL, seed=3, at_once=1)


@pytest.mark.parametrize("pair", ["tp1-tp2", "pp1-pp2"], indirect=True)
@pytest.mark.parametrize("turned", [False, True], ids=["1-to-2", "2-to-1"])
def test_unequal_ranks(pair: Pair, reference: Reference, turned: bool) -> None:
    """One rank hands over to two, and two to one: each moves its half of the heads, or of the layers."""
    running = pair.turned() if turned else pair
    before, computed = used(running.prefill), running.decode_computed()
    prompts = [prompt_of(length, seed=7 + turned) for length in SMALL]
    with expected(reference, prompts, TOKENS) as right:
        for prompt, one in zip(prompts, right, strict=True):
            params = running.prefill_by_hand(prompt)
            answer = running.decode_by_hand(prompt, params, TOKENS)
            assert answer == one.result(), f"{len(prompt)} tokens"
    lengths = [length for length in SMALL if length > 1]
    loads = running.reports.wait(2 * len(lengths))
    print(*loads, sep="\n")
    assert {load.outcome for load in loads} == {"loaded"}
    halves = [blocks_of(length) * BLOCK_BYTES // 2 for length in lengths]
    assert sorted(load.bytes for load in loads) == sorted(2 * halves)
    assert {load.rank for load in loads} == set(range(running.spec.ranks[1] * running.spec.stages[1]))
    assert running.decode_computed() - computed <= len(SMALL), "decode computed more than one token a prompt"
    wait_used(running.prefill, before, SLACK)


def answered_by(engine: HttpServer) -> dict[str, float]:
    """Requests that each data-parallel rank of a server has answered, by rank."""
    with urllib.request.urlopen(f"{engine.url}/metrics", timeout=60) as response:  # noqa: S310 - this test's own
        text = response.read().decode()
    samples = re.findall(r'^vllm:request_success_total\{engine="(\d+)".*"length".*\} (\S+)$', text, re.M)
    return {rank: float(value) for rank, value in samples}


@pytest.mark.parametrize("pair", ["dp2"], indirect=True)
def test_data_parallel(pair: Pair, reference: Reference) -> None:
    """Two data-parallel ranks on either side: each prompt comes from the one that has computed it."""
    check(pair, reference, SMALL, seed=16, at_once=8)
    for engine in pair.engines():
        answered = answered_by(engine)
        assert len(answered) == 2, answered
        assert min(answered.values()) > 0, f"a rank of {engine.name} had nothing to do: {answered}"


@pytest.mark.parametrize("pair", ["dp2"], indirect=True)
def test_the_policy_that_ends_requests_is_warned_of(pair: Pair) -> None:
    """It is vLLM's default, and matters to who loads: a line from each data-parallel rank of decode."""
    assert logged(pair.prefill, POLICY_WARNING) == []
    assert len(logged(pair.decode, POLICY_WARNING)) == 2


@pytest.mark.parametrize("pair", ["dp2", "tp2"], indirect=True)
def test_each_rank_of_a_server_has_its_number(pair: Pair) -> None:
    """Ports and NICs are given by it."""
    for engine, role in zip(pair.engines(), ("producer", "consumer"), strict=True):
        found = [
            re.findall(rf"kvik: vllm-{role}-rank(\d+): engine ", line) for line in logged(engine, ": engine ")
        ]
        assert sorted(found) == [["0"], ["1"]]


@pytest.mark.parametrize("pair", ["no-prefix-cache", "tp2"], indirect=True)
def test_both_logs_tell_of_a_handover_by_one_id(pair: Pair) -> None:
    """At vLLM's usual level: one line on either side, however many ranks, with the blocks and the bytes."""
    prompt = prompt_of(300, seed=17)
    params = pair.prefill_by_hand(prompt)
    assert params is not None
    request_id = str(params["remote_request_id"])
    pair.reports.new()
    pair.decode_by_hand(prompt, params, TOKENS)
    ranks = pair.spec.ranks[1]
    (load,) = (load for load in pair.reports.wait(ranks) if load.rank == 0)
    blocks, size = blocks_of(300), blocks_of(300) * BLOCK_BYTES // ranks
    (loaded,) = logged(pair.decode, request_id)
    assert f"of prefill's request {request_id} loaded: {blocks} KV blocks, {size} bytes on rank 0" in loaded
    assert f"over {load.transport} ({load.mechanism}) in " in loaded

    def noticed() -> bool:
        # A step: an idle engine notices nothing where decode took longer than `park_after`.
        used(pair.prefill)
        return len(logged(pair.prefill, request_id)) > 1

    pair.prefill.wait_until(noticed, time.monotonic() + SLACK)
    offered, taken = logged(pair.prefill, request_id)
    assert f"300 tokens in {blocks} KV blocks offered" in offered
    assert f"{request_id}: every reader has confirmed, {blocks} KV blocks ({size} bytes on rank 0" in taken
    assert all("INFO " in line for line in (offered, taken, loaded))


@pytest.mark.parametrize("pair", ["prefix-cache"], indirect=True)
@pytest.mark.parametrize(("common", "length"), [(256, 300), (640, 1000), (384, 385), (1000, 1300)])
def test_only_missing_blocks_move(pair: Pair, reference: Reference, common: int, length: int) -> None:
    """What decode's prefix cache already holds is not moved again."""
    first = prompt_of(common, seed=4)
    second = first + prompt_of(length - common, seed=5)
    for prompt in (first, second):
        reference.soon(prompt, TOKENS)
    assert ask(pair, [first], 1)[0] == reference(first, TOKENS)
    pair.reports.wait(1)
    assert ask(pair, [second], 1)[0] == reference(second, TOKENS)
    missing = blocks_of(length) - common // BLOCK_TOKENS
    # One token past the cached blocks is the last prompt token, which decode computes anyway.
    expected = [] if length - common // BLOCK_TOKENS * BLOCK_TOKENS == 1 else [missing * BLOCK_BYTES]
    loads = pair.reports.wait(1, timeout=5.0 if expected else 1.0)
    assert [load.bytes for load in loads] == expected


@pytest.mark.parametrize("pair", ["prefix-cache"], indirect=True)
def test_known_prompt_moves_nothing(pair: Pair, reference: Reference) -> None:
    """The same prompt again, where all KV blocks but the last token's are cached at decode."""
    prompt = prompt_of(4 * BLOCK_TOKENS + 1, seed=6)
    reference.soon(prompt, TOKENS)
    assert ask(pair, [prompt], 1)[0] == reference(prompt, TOKENS)
    assert len(pair.reports.wait(1)) == 1
    assert ask(pair, [prompt], 1)[0] == reference(prompt, TOKENS)
    assert pair.reports.wait(1, timeout=1.0) == []
