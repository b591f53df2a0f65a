"""Requests that go wrong half-way: a correct answer or a clear error, and every KV block comes back."""

import random

import pytest

from kvik.demo import client
from tests.vllm.conftest import Meanwhile, Reference
from tests.vllm.leaving import ask_and_leave
from tests.vllm.pairs import EXPIRY, Pair, freeze, prompt_of, used, wait_used

TOKENS = 16
EOS = 1
SLACK = 20.0  # seconds for a busy machine, on top of what the design promises
plain = pytest.mark.parametrize("pair", ["no-prefix-cache"], indirect=True)
cached = pytest.mark.parametrize("pair", ["prefix-cache"], indirect=True)


def levels(pair: Pair) -> tuple[float, float]:
    """The share of KV blocks in use on both engines."""
    return used(pair.prefill), used(pair.decode)


def wait_back(pair: Pair, before: tuple[float, float], within: float = SLACK) -> None:
    """Both engines use no more KV blocks than before."""
    for engine, level in zip(pair.engines(), before, strict=True):
        wait_used(engine, level, within)


def reasons(pair: Pair) -> list[tuple[str, str | None]]:
    """Outcome and reason of what was reported since the last look."""
    return [(load.outcome, load.reason) for load in pair.reports.wait(1)]


@plain
def test_one_token_prompt(pair: Pair, reference: Reference) -> None:
    """A prompt of one token: nothing worth moving, and still the right answer."""
    before = levels(pair)
    for seed in range(30, 33):
        prompt = prompt_of(1, seed)
        assert client.complete(pair.router.url, prompt, TOKENS).tokens == reference(prompt, TOKENS)
    wait_back(pair, before)


@plain
def test_ends_with_the_first_token(pair: Pair) -> None:
    """The prefill engine's one token is already the end of the answer."""
    before = levels(pair)
    answer = client.complete(
        pair.router.url, prompt_of(300, seed=31), TOKENS, ignore_eos=False, logit_bias={str(EOS): 100}
    )
    assert answer.finish_reason == "stop"
    assert answer.tokens in ([EOS], [])
    wait_back(pair, before)


@plain
def test_offer_nobody_takes(pair: Pair, reference: Reference, meanwhile: Meanwhile) -> None:
    """A client that leaves after prefill, behind a proxy that says nothing: the offer ends with its expiry.
    Who comes for it then reads nothing, though its KV may still lie there."""
    prompt = prompt_of(1000, seed=32)
    before = levels(pair)
    reference.soon(prompt, TOKENS)
    params = pair.prefill_by_hand(prompt)
    assert params is not None
    assert used(pair.prefill) > before[0], "the offered KV blocks are not held"
    meanwhile()
    wait_back(pair, before, EXPIRY + SLACK)
    pair.reports.new()
    assert pair.decode_by_hand(prompt, params, TOKENS) == reference(prompt, TOKENS)
    assert [outcome for outcome, _ in reasons(pair)] == ["failed"]


@plain
def test_client_leaves_at_any_time(pair: Pair, reference: Reference) -> None:
    """Clients of the router hang up at random moments of a request."""
    seed = 33
    print(f"seed {seed}")
    rng = random.Random(seed)
    before = levels(pair)
    for number in range(8):
        ask_and_leave(pair.router.url, prompt_of(2000, seed + number), 64, after=rng.uniform(0.0, 1.5))
    prompt = prompt_of(700, seed)
    assert client.complete(pair.router.url, prompt, TOKENS).tokens == reference(prompt, TOKENS)
    wait_back(pair, before, EXPIRY + SLACK)


@plain
def test_aborted_while_waiting_for_kv(pair: Pair, reference: Reference) -> None:
    """The prefill engine hangs, the decode engine waits for its KV, the client gives up."""
    before = levels(pair)
    prompt = prompt_of(1500, seed=34)
    params = pair.prefill_by_hand(prompt)
    thaw = freeze(pair.prefill)
    try:
        ask_and_leave(pair.decode.url, prompt, 64, after=0.7, kv_transfer_params=params)
        wait_used(pair.decode, before[1], SLACK)
    finally:
        thaw()
    wait_back(pair, before, EXPIRY + SLACK)
    again = prompt_of(400, seed=35)
    assert client.complete(pair.router.url, again, TOKENS).tokens == reference(again, TOKENS)


@plain
def test_prefill_hangs_and_decode_recomputes(pair: Pair, reference: Reference) -> None:
    """The KV does not come: decode takes prefill for lost, and computes the prompt itself."""
    before = levels(pair)
    prompt = prompt_of(900, seed=36)
    reference.soon(prompt, TOKENS)
    params = pair.prefill_by_hand(prompt)
    pair.reports.new()
    thaw = freeze(pair.prefill)
    try:
        assert pair.decode_by_hand(prompt, params, TOKENS) == reference(prompt, TOKENS)
    finally:
        thaw()
    ((outcome, reason),) = reasons(pair)
    assert outcome == "failed"
    assert reason != "deadline_exceeded"
    wait_back(pair, before, EXPIRY + SLACK)


@plain
def test_parameters_used_twice(pair: Pair, reference: Reference) -> None:
    """Parameters that were used up, with their own prompt and with another: never somebody else's KV."""
    first, other = prompt_of(900, seed=37), prompt_of(900, seed=38)
    for prompt in (first, other):
        reference.soon(prompt, TOKENS)
    before = levels(pair)
    params = pair.prefill_by_hand(first)
    for prompt, expected in ((first, "loaded"), (first, "failed"), (other, "recomputed")):
        pair.reports.new()
        assert pair.decode_by_hand(prompt, params, TOKENS) == reference(prompt, TOKENS)
        assert [outcome for outcome, _ in reasons(pair)] == [expected]
    wait_back(pair, before)


@cached
def test_other_cache_salt(pair: Pair, reference: Reference) -> None:
    """The same tokens under another cache salt are another tenant's: their KV is not used, and waits for whom
    it was computed for."""
    prompt = prompt_of(700, seed=40)
    reference.soon(prompt, TOKENS)
    before = levels(pair)
    params = pair.prefill_by_hand(prompt, cache_salt="one")
    for salt, expected in (("two", ("recomputed", "digest_mismatch")), ("one", ("loaded", None))):
        pair.reports.new()
        answer = pair.decode_by_hand(prompt, params, TOKENS, cache_salt=salt)
        assert answer == reference(prompt, TOKENS)
        assert reasons(pair) == [expected]
    wait_back(pair, before)
