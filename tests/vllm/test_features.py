"""What vLLM does with requests: prefills in chunks, steps before outputs are known, samples, preemption."""

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import cast

import pytest

from kvik.demo import client
from kvik.demo.engines import MODEL
from kvik.roles.processes import HttpServer
from tests.vllm.adapter import ADAPTED
from tests.vllm.conftest import Reference, expected
from tests.vllm.pairs import BLOCK_BYTES, PREEMPTIONS, Pair, blocks_of, prompt_of, wait_used

TOKENS = 16
small_steps = pytest.mark.parametrize("pair", ["prefix-cache"], indirect=True)
small_cache = pytest.mark.parametrize("pair", ["wired"], indirect=True)


@small_steps
@pytest.mark.parametrize("length", [257, 1025, 2500])
def test_prefill_in_chunks(pair: Pair, reference: Reference, length: int) -> None:
    """A prompt is computed 256 tokens at a time, and handed over once."""
    prompt = prompt_of(length, seed=70)
    reference.soon(prompt, TOKENS)
    pair.reports.new()
    computed = pair.decode_computed()
    assert client.complete(pair.router.url, prompt, TOKENS).tokens == reference(prompt, TOKENS)
    (load,) = pair.reports.wait(1)
    assert (load.outcome, load.bytes) == ("loaded", blocks_of(length) * BLOCK_BYTES)
    assert pair.decode_computed() == computed


def _samples(url: str, prompt: Sequence[int], **more: object) -> list[list[int]]:
    # vLLM takes several samples only at random; of one candidate that is the best one.
    choices = client.post(url, client.body(prompt, TOKENS, n=3, temperature=1.0, top_k=1, **more))["choices"]
    assert isinstance(choices, list)
    return [choice["token_ids"] for choice in choices]


@small_steps
def test_several_samples(pair: Pair, reference: Reference) -> None:
    """The samples of one request share an offer, which one of them takes."""
    prompt, other = prompt_of(800, seed=71), prompt_of(700, seed=71)
    for one in (prompt, other):
        reference.soon(one, TOKENS)
    pair.reports.new()
    params = pair.prefill_by_hand(prompt)
    assert _samples(pair.decode.url, prompt, kv_transfer_params=params) == [reference(prompt, TOKENS)] * 3
    assert "loaded" in [load.outcome for load in pair.reports.wait(1)]
    # kvik's router has decode compute what is to be sampled several times.
    assert _samples(pair.router.url, other) == [reference(other, TOKENS)] * 3


@small_steps
def test_several_prompts(pair: Pair, reference: Reference) -> None:
    """kvik's router has decode compute a request of several prompts."""
    prompts = [prompt_of(length, seed=72) for length in (500, 300)]
    for prompt in prompts:
        reference.soon(prompt, TOKENS)
    answer = client.post(pair.router.url, client.body([], TOKENS) | {"prompt": prompts})
    choices = answer["choices"]
    assert isinstance(choices, list)
    assert [choice["token_ids"] for choice in choices] == [reference(prompt, TOKENS) for prompt in prompts]


@small_steps
def test_lora(pair: Pair, reference: Reference) -> None:
    """KV of an adapter goes to requests for this adapter, and to no other ones."""
    prompt = prompt_of(600, seed=74)
    reference.soon(prompt, TOKENS)
    adapted = client.body(prompt, TOKENS, model=ADAPTED)
    expected = client.tokens_of(client.post(pair.prefill.url, adapted))
    assert expected != reference(prompt, TOKENS), "the adapter changes nothing"
    for model, tokens in ((ADAPTED, expected), (MODEL, reference(prompt, TOKENS))):
        pair.reports.new()
        answer = client.post(pair.router.url, client.body(prompt, TOKENS, model=model))
        assert client.tokens_of(answer) == tokens
        (one,) = pair.reports.wait(1)
        assert (one.outcome, one.bytes) == ("loaded", blocks_of(600) * BLOCK_BYTES)
    # What the adapter's prefill offers is refused for the model without it.
    prompt = prompt_of(601, seed=74)
    reference.soon(prompt, TOKENS)
    params = pair.prefill_by_hand(prompt, model=ADAPTED)
    pair.reports.new()
    assert pair.decode_by_hand(prompt, params, TOKENS) == reference(prompt, TOKENS)
    assert [one.reason for one in pair.reports.wait(1)] == ["digest_mismatch"]


@small_steps
def test_structured_output(pair: Pair, alone: HttpServer) -> None:
    """Tokens that a grammar allows are the same with KV that was handed over."""
    prompt = prompt_of(500, seed=75)
    asked = client.body(prompt, 12, structured_outputs={"regex": "[a-f]{12}"})
    pair.reports.new()
    answers = [client.post(url, asked) for url in (alone.url, pair.router.url)]
    assert client.tokens_of(answers[0]) == client.tokens_of(answers[1])
    (choice,) = cast("list[dict[str, str]]", answers[1]["choices"])
    assert re.fullmatch("[a-f]{12}", choice["text"])
    assert [one.outcome for one in pair.reports.wait(1)] == ["loaded"]


@small_cache
def test_preempted(pair: Pair, reference: Reference) -> None:
    """Decode has not enough KV blocks for all sequences, and computes those again that lose theirs.

    All prompts are computed before decode is asked for one: those that wait there fill its KV blocks
    however fast it is, and each sequence needs three more blocks before it ends.
    """
    prompts = [prompt_of(600 + i, seed=73) for i in range(8)]
    before = client.metrics(pair.decode.url)[PREEMPTIONS]
    with ThreadPoolExecutor(len(prompts)) as pool, expected(reference, prompts, 300) as right:
        params = list(pool.map(pair.prefill_by_hand, prompts))
        answers = list(pool.map(partial(pair.decode_by_hand, tokens=300), prompts, params))
        assert client.metrics(pair.decode.url)[PREEMPTIONS] > before, "nothing was preempted"
        assert answers == [one.result() for one in right]
    for engine in pair.engines():
        wait_used(engine, 0.0, within=20.0)
