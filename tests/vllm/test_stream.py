"""KV that crosses while prefill still computes: through kvik's router, with real servers."""

import json
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvik.demo import client
from kvik.demo.checkpoint import KV_BYTES_PER_TOKEN
from tests.vllm.conftest import Meanwhile, Reference, expected
from tests.vllm.leaving import ask_and_leave
from tests.vllm.pairs import (
    BLOCK_BYTES,
    Pair,
    blocks_of,
    freeze,
    kill,
    logged,
    prompt_of,
    used,
    wait_for,
    wait_used,
)

TOKENS = 16
SLACK = 20.0  # seconds for a busy machine
EXPIRY = 60.0  # as the pairs have it: decode waits so long for KV that a busy machine computes
LENGTHS = (2, 127, 128, 129, 300, 511, 513, 1000, 1025, 2048, 3000, 3500)
LAYERS = 4  # of the tiny model: as many parts has each segment of 512 tokens
PARTS = LAYERS * 7  # of a prompt of 3,500 tokens
streams = pytest.mark.parametrize("pair", ["stream", "stream-cached"], indirect=True)
wired = pytest.mark.parametrize("pair", ["stream"], indirect=True)
brief = pytest.mark.parametrize("pair", ["stream-brief"], indirect=True)


def learn(pair: Pair) -> None:
    """One request of 300 tokens, after which the router knows the prefill server; its loads are forgotten.

    Where it was streamed it is counted, too: prefill's answer may come after decode's.
    """
    client.complete(pair.router.url, prompt_of(300, random.randrange(2**30)), 1)
    assert wait_for(lambda: open_streams(pair), lambda number: number == 0, SLACK) == 0
    pair.reports.new()  # all of them: they are written before the request is computed


def open_streams(pair: Pair) -> float:
    return client.metrics(pair.router.url)["kvik_router_streams_open"]


def streamed(pair: Pair) -> float:
    return client.metrics(pair.router.url).get('kvik_router_streams_total{outcome="streamed"}', 0.0)


def check(pair: Pair, reference: Reference, seed: int, at_once: int) -> None:
    """Fresh prompts: equal tokens, each in its parts, all bytes moved, nothing recomputed."""
    print(f"seed {seed}")
    learn(pair)
    prompts = [prompt_of(length, seed) for length in LENGTHS]
    computed, before = pair.decode_computed(), streamed(pair)
    with ThreadPoolExecutor(at_once) as pool, expected(reference, prompts, TOKENS) as right:
        ask = lambda prompt: client.complete(pair.router.url, prompt, TOKENS).tokens  # noqa: E731
        answers = list(pool.map(ask, prompts))
        for length, answer, one in zip(LENGTHS, answers, right, strict=True):
            assert answer == one.result(), f"{length} tokens: other tokens"
    assert wait_for(lambda: open_streams(pair), lambda number: number == 0, SLACK) == 0
    assert streamed(pair) - before == len(LENGTHS)
    ranks = max(pair.spec.ranks)  # a read each of every prefill rank, or by every decode rank
    parts = sum(LAYERS * -(-length // 512) * ranks for length in LENGTHS)
    loads = pair.reports.wait(parts)
    assert {load.outcome for load in loads} == {"loaded"}, logged(pair.decode, "kvik: request")
    assert len(loads) == parts
    assert sum(load.bytes for load in loads) == sum(blocks_of(length) * BLOCK_BYTES for length in LENGTHS)
    assert pair.decode_computed() - computed <= len(LENGTHS)


@streams
def test_one_at_a_time(pair: Pair, reference: Reference) -> None:
    check(pair, reference, seed=101, at_once=1)


@streams
def test_six_at_once(pair: Pair, reference: Reference) -> None:
    check(pair, reference, seed=102, at_once=6)


def half_before_the_last_layer(pair: Pair, seed: int) -> bool:
    """Whether half of a prompt's parts were in decode before prefill had written the last layer."""
    told, before = len(logged(pair.prefill, "while they were computed")), len(sent_by(pair))
    client.complete(pair.router.url, prompt_of(3500, seed), 1)
    ended = sorted(load.ended_at or 0.0 for load in pair.reports.new())
    assert len(ended) == PARTS

    def noticed() -> bool:
        used(pair.prefill)  # a step, with which it notices the end
        return len(sent_by(pair)) > before

    pair.prefill.wait_until(noticed, time.monotonic() + SLACK)
    sent = sent_by(pair)[-1]
    exposed = ended[-1] - sent["computed_at"]
    print(f"first part {sent['computed_at'] - ended[0]:.3f} s before the last layer, exposed {exposed:.4f} s")
    assert sent["computed_at"] < ended[-1]
    assert (sent["outcome"], sent["reason"]) == ("sent", "consumed")
    assert len(logged(pair.prefill, "while they were computed")) == told + 1
    (loaded,) = logged(pair.decode, f"{sent['remote_request_id']} of prefill loaded: 28 KV blocks")
    assert "INFO " in loaded
    return bool(ended[PARTS // 2] < sent["computed_at"])


def sent_by(pair: Pair) -> list[dict[str, Any]]:
    """What prefill has reported of prompts as long as that."""
    whole, _, _ = pair.reverse.path.read_text().rpartition("\n")  # the last line may still be being written
    records = map(json.loads, whole.splitlines())
    return [record for record in records if record.get("parts") == PARTS]


@wired
def test_parts_arrive_before_prefill_is_done(pair: Pair) -> None:
    """One line on either side. A machine that has other work may keep one prompt's parts waiting."""
    learn(pair)
    assert any(half_before_the_last_layer(pair, seed) for seed in range(1030, 1035))


@pytest.mark.parametrize("pair", ["stream-cached"], indirect=True)
def test_prefixes_in_both_caches(pair: Pair, reference: Reference) -> None:
    """A longer prompt on a known one: decode reads what it has not, and gives back the rest."""
    learn(pair)
    level = used(pair.prefill)
    first = prompt_of(1100, seed=104)
    longer = first + prompt_of(900, seed=105)
    for prompt in (first, longer):
        reference.soon(prompt, TOKENS)
    for prompt in (first, longer):
        assert client.complete(pair.router.url, prompt, TOKENS).tokens == reference(prompt, TOKENS)
    ranks = max(pair.spec.ranks)  # a read each of every prefill rank, or by every decode rank
    loads = pair.reports.wait((3 + 2) * LAYERS * ranks)
    assert {load.outcome for load in loads} == {"loaded"}
    missing = blocks_of(2000) - 1100 // 128
    assert sum(load.bytes for load in loads) == (blocks_of(1100) + missing) * BLOCK_BYTES
    wait_used(pair.prefill, level, SLACK)


def until_done(act: Callable[[], object], done: object) -> int:
    """Do it until its answer says that it is done, in `SLACK`. Gives how often it was done in vain."""
    seen: list[object] = []

    def tried() -> float:
        try:
            seen.append(act())
        except client.RequestError as error:
            seen.append(error)
        return float(seen[-1] == done)

    assert wait_for(tried, lambda value: value == 1.0, SLACK) == 1.0, seen
    return len(seen) - 1


@pytest.mark.parametrize("pair", ["stream-cached"], indirect=True)
@pytest.mark.parametrize("way", ["/reset_prefix_cache?reset_external=true", "/pause"])
def test_weights_are_changed_in_place_after_a_stream(pair: Pair, reference: Reference, way: str) -> None:
    """Idle servers, of which prefill has not looked whether decode has confirmed: nothing but the resets
    wakes them, those that fail do not count, and the two agree again."""
    done: dict[str, object] = {"status": "paused"} if way == "/pause" else {"success": True}
    learn(pair)
    prompt = prompt_of(1100, seed=len(way))
    reference.soon(prompt, TOKENS)
    assert client.complete(pair.router.url, prompt, TOKENS).tokens == reference(prompt, TOKENS)
    for engine in pair.engines():
        ask = lambda url=engine.url: client.post(url, {}, path=way)  # noqa: E731
        print(f"{engine.name}: {way} in vain: {until_done(ask, done)} times")
        if way == "/pause":
            assert client.post(engine.url, {}, path="/resume") == {"status": "resumed"}
    before = streamed(pair)
    learn(pair)  # what the router has kept is of the namespace of before
    learn(pair)
    pair.reports.new()
    assert client.complete(pair.router.url, prompt, TOKENS).tokens == reference(prompt, TOKENS)
    assert {load.outcome for load in pair.reports.wait(3 * LAYERS * max(pair.spec.ranks))} == {"loaded"}
    assert wait_for(lambda: streamed(pair), lambda number: number > before, SLACK) > before


def ask_meanwhile(
    pair: Pair, reference: Reference, prompt: list[int], share: float, act: Callable[[], object]
) -> tuple[list[int], set[str | None]]:
    """The answer to a prompt, with something done when such a share of its KV has passed the wire, and before
    more of it does; and why what decode has loaded for it has failed. The engine alone is asked when it is
    done."""
    assert pair.wire is not None
    try:
        with ThreadPoolExecutor(1) as pool:
            carried = int(share * len(prompt) * KV_BYTES_PER_TOKEN)
            pair.wire.slow(2e6, most=carried)
            answer = pool.submit(client.complete, pair.router.url, prompt, TOKENS)
            assert pair.wire.wait_carried(carried, EXPIRY), "no KV passes"
            act()
            pair.wire.slow(None)
            reference.soon(prompt, TOKENS)
            return answer.result().tokens, {load.reason for load in pair.reports.new()}
    finally:
        pair.wire.slow(None)


@pytest.fixture(scope="module")
def comes_back(pair: Pair) -> Iterator[None]:
    """In the end prefill has all blocks back that it had before: one wait for all of its grants."""
    learn(pair)
    level = used(pair.prefill)
    yield
    wait_used(pair.prefill, level, SLACK + EXPIRY)


@brief
@pytest.mark.usefixtures("comes_back")
def test_the_link_is_cut_in_the_middle(pair: Pair, reference: Reference) -> None:
    """Whatever had come: the same tokens, before the load's time is over, and all blocks of prefill back."""
    assert pair.wire is not None
    for number, share in enumerate((0.0, 0.2, 0.4, 0.6)):
        learn(pair)
        prompt = prompt_of(3000, seed=110 + number)
        answer, reasons = ask_meanwhile(pair, reference, prompt, share, pair.wire.cut)
        assert answer == reference(prompt, TOKENS), f"cut at {share}: other tokens"
        assert "deadline_exceeded" not in reasons, f"cut at {share}"


@brief
@pytest.mark.usefixtures("comes_back")
def test_prefill_is_stopped_in_the_middle(pair: Pair, reference: Reference, meanwhile: Meanwhile) -> None:
    """It says nothing more, and its connections stay: decode takes it for lost, and computes the prompt."""
    learn(pair)
    prompt = prompt_of(3000, seed=120)
    thaw: list[Callable[[], None]] = []
    try:
        stopped = lambda: thaw.append(freeze(pair.prefill))  # noqa: E731
        answer, reasons = ask_meanwhile(pair, reference, prompt, 0.3, stopped)
        assert answer == reference(prompt, TOKENS)
        assert reasons == {"peer_lost"}
    finally:
        for let_go in thaw:
            let_go()
    meanwhile()


@wired
def test_clients_leave_at_any_time(pair: Pair, reference: Reference) -> None:
    seed = 130
    print(f"seed {seed}")
    rng = random.Random(seed)
    learn(pair)
    levels = used(pair.prefill), used(pair.decode)
    for number in range(8):
        ask_and_leave(pair.router.url, prompt_of(2500, seed + number), 64, after=rng.uniform(0.0, 1.0))
    prompt = prompt_of(700, seed)
    assert client.complete(pair.router.url, prompt, TOKENS).tokens == reference(prompt, TOKENS)
    for engine, level in zip(pair.engines(), levels, strict=True):
        wait_used(engine, level, SLACK + EXPIRY)


@wired
@pytest.mark.parametrize(("number", "share"), [(0, 0.1), (1, 0.5)])
def test_prefill_is_killed_in_the_middle(pair: Pair, reference: Reference, number: int, share: float) -> None:
    """The client gets its answer; a server that has started again is pulled from, and then streams."""
    learn(pair)
    prompt = prompt_of(3000, seed=140 + number)
    answer, reasons = ask_meanwhile(pair, reference, prompt, share, lambda: kill(pair.prefill))
    assert answer == reference(prompt, TOKENS)
    assert "deadline_exceeded" not in reasons
    pair.begin_again("prefill")
    # The router trusts the old template at most for the first of these, which decode may compute itself
    # before prefill offers its KV. It pulls the next, from which it has the new one.
    for again in range(3):
        prompt = prompt_of(600, seed=150 + 100 * number + again)
        reference.soon(prompt, 50)
        pair.reports.new()
        assert client.complete(pair.router.url, prompt, 50).tokens == reference(prompt, 50)
        loads = pair.reports.new()
        if len(loads) > 1 and {load.outcome for load in loads} == {"loaded"}:
            print(f"streamed again with request {again + 1}")
            return
    raise AssertionError("the server that has started again does not stream")
