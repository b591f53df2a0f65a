"""kvik's connector beside another one, under vLLM's `MultiConnector`; decode also guesses tokens ahead."""

import pytest

from kvik.demo import client
from kvik.demo.engines import BLOCK_TOKENS
from tests.vllm.conftest import Meanwhile, Reference
from tests.vllm.leaving import ask_and_leave
from tests.vllm.pairs import (
    BLOCK_BYTES,
    EXPIRY,
    POLICY_WARNING,
    Pair,
    blocks_of,
    freeze,
    logged,
    prompt_of,
    wait_used,
)

TOKENS = 16
SLACK = 20.0  # seconds for a busy machine
LENGTHS = (300, BLOCK_TOKENS, 1025)
several = pytest.mark.parametrize("pair", ["several"], indirect=True)


@several
def test_handover_beside_another_connector(pair: Pair, reference: Reference) -> None:
    """Right tokens, no recomputing, kvik's counts in the front end, which lives on, and no block kept."""
    first = prompt_of(40, seed=60)
    # The handshake is the other connector's, so each side hears of kvik's ranks with its first step.
    assert client.complete(pair.router.url, first, TOKENS).tokens == reference(first, TOKENS)
    before = client.metrics(pair.decode.url)
    for length in LENGTHS:
        prompt = prompt_of(length, seed=61)
        reference.soon(prompt, TOKENS)
        pair.reports.new()
        assert client.complete(pair.router.url, prompt, TOKENS).tokens == reference(prompt, TOKENS)
        (load,) = pair.reports.wait(1)
        assert (load.outcome, load.bytes) == ("loaded", blocks_of(length) * BLOCK_BYTES)
    for engine in pair.engines():
        wait_used(engine, 0.0, SLACK)
        assert engine.alive, engine.tail()
    after = client.metrics(pair.decode.url)
    loaded = "vllm:kvik_loaded_bytes_total"
    assert after[loaded] - before[loaded] == sum(map(blocks_of, LENGTHS)) * BLOCK_BYTES
    assert after["vllm:spec_decode_num_draft_tokens_total"] > 0


def left_in_time(pair: Pair, seed: int) -> bool:
    """Have a client leave while prefill stands still: whether it did before decode had taken prefill for lost
    and computed the answer, for which it has a second or two."""
    prompt = prompt_of(1500, seed)
    params = pair.prefill_by_hand(prompt)
    thaw = freeze(pair.prefill)
    try:
        _, left = ask_and_leave(pair.decode.url, prompt, TOKENS, after=0.7, kv_transfer_params=params)
        print(f"seed {seed}: {'left' if left else 'too late, there was an answer'}")
        wait_used(pair.decode, 0.0, SLACK)
    finally:
        thaw()
    return left


@several
def test_aborted_while_waiting_for_kv(pair: Pair, reference: Reference, meanwhile: Meanwhile) -> None:
    """A client leaves while decode waits for its KV: kvik alone has something to end, and both servers go
    on."""
    again = prompt_of(400, seed=63)
    reference.soon(again, TOKENS)
    assert any(left_in_time(pair, seed) for seed in (62, 64, 65)), "decode never waited for its KV"
    assert client.complete(pair.router.url, again, TOKENS).tokens == reference(again, TOKENS)
    meanwhile()
    for engine in pair.engines():
        wait_used(engine, 0.0, EXPIRY + SLACK)


@several
def test_the_policy_outside_is_the_one_that_counts(pair: Pair) -> None:
    """vLLM recomputes, as the whole config says; kvik's own part of it says nothing, and no warning comes."""
    for engine in pair.engines():
        assert logged(engine, "kvik: vllm-"), "kvik has not spoken at all"
        assert not logged(engine, POLICY_WARNING)
