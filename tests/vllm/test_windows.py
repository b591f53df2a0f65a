"""A model with two kinds of layers: those that see all tokens, and those with a window. vLLM keeps KV blocks
of their own for either, and of a window no more than it needs."""

import pytest

from kvik.demo import client
from kvik.demo.engines import BLOCK_TOKENS
from tests.vllm.conftest import WINDOW
from tests.vllm.pairs import BLOCK_BYTES, Pair, blocks_of, logged, prompt_of, used, wait_used

TOKENS = 16
SLACK = 20.0  # seconds for a busy machine
GROUP_BYTES = BLOCK_BYTES // 2  # a KV block of one group: half of the layers
windows = pytest.mark.parametrize("pair", ["windows"], indirect=True)


def alone(pair: Pair, prompt: list[int]) -> list[int]:
    """What the prefill server answers by itself; its salt keeps what it has cached out of the handover."""
    return client.complete(pair.prefill.url, prompt, TOKENS, cache_salt="alone").tokens


def kept_of(tokens: int) -> int:
    """KV blocks that the window behind so many tokens needs."""
    return blocks_of(tokens) - max(0, tokens - WINDOW + 1) // BLOCK_TOKENS


@windows
@pytest.mark.parametrize("length", [2, 129, 299, 300, 301, 426, 428, 1024, 2500])
def test_each_group_is_handed_over(pair: Pair, length: int) -> None:
    """Equal tokens; the whole prompt in one group, its window in the other, and nothing more."""
    prompt = prompt_of(length, seed=80)
    expected = alone(pair, prompt)
    before, computed = used(pair.prefill), pair.decode_computed()
    pair.reports.new()
    params = pair.prefill_by_hand(prompt)
    assert params is not None
    assert pair.decode_by_hand(prompt, params, TOKENS) == expected
    loads = pair.reports.wait(2)
    if failed := [load for load in loads if load.outcome != "loaded"]:
        print(*failed, *logged(pair.decode, "kvik: request"), sep="\n")
    assert not failed
    assert {load.group: load.bytes for load in loads} == {
        0: blocks_of(length) * GROUP_BYTES,
        1: kept_of(length) * GROUP_BYTES,
    }
    assert pair.decode_computed() == computed
    wait_used(pair.prefill, before, SLACK)


@windows
@pytest.mark.parametrize("length", [427, 1963])
def test_what_vllm_has_dropped_is_recomputed(pair: Pair, length: int) -> None:
    """The last token, which decode computes, sees into a block that the window behind all tokens does not
    need: so it is for one length in as many as a KV block has tokens."""
    assert (length - WINDOW + 1) % BLOCK_TOKENS == 0
    prompt = prompt_of(length, seed=81)
    expected = alone(pair, prompt)
    before = used(pair.prefill)
    pair.reports.new()
    assert pair.decode_by_hand(prompt, pair.prefill_by_hand(prompt), TOKENS) == expected
    (load,) = pair.reports.wait(1)
    assert (load.outcome, load.reason) == ("recomputed", "window_missing")
    wait_used(pair.prefill, before, SLACK)


@windows
def test_a_prefix_that_decode_has_is_not_moved_again(pair: Pair) -> None:
    """How much of it decode's cache finds is vLLM's business: no less than its blocks but for the last."""
    first, rest = prompt_of(1024, seed=81), prompt_of(600, seed=82)
    client.complete(pair.decode.url, first, TOKENS)
    prompt = first + rest
    expected = alone(pair, prompt)
    pair.reports.new()
    assert client.complete(pair.router.url, prompt, TOKENS).tokens == expected
    loads = {load.group: load for load in pair.reports.wait(2)}
    assert {load.outcome for load in loads.values()} == {"loaded"}
    missing = blocks_of(len(prompt)) - blocks_of(1024)
    assert missing * GROUP_BYTES <= loads[0].bytes <= (missing + 1) * GROUP_BYTES
    assert loads[1].bytes == kept_of(len(prompt)) * GROUP_BYTES


@windows
def test_a_load_that_fails_is_recomputed(pair: Pair) -> None:
    """Told by the request, since the blocks of one group do not tell what is missing in the other."""
    prompt = prompt_of(900, seed=83)
    expected = alone(pair, prompt)
    params = pair.prefill_by_hand(prompt)
    assert params is not None
    assert pair.decode_by_hand(prompt, params, TOKENS) == expected
    pair.reports.new()
    # The offer has been taken; another salt keeps decode from finding the first answer's blocks.
    other = prompt_of(901, seed=84)
    theirs = pair.prefill_by_hand(other)
    assert theirs is not None
    assert isinstance(params["kvik"], dict)
    assert isinstance(theirs["kvik"], dict)
    theirs["kvik"]["tickets"] = params["kvik"]["tickets"]
    assert pair.decode_by_hand(other, theirs, TOKENS) == alone(pair, other)
    (load,) = pair.reports.wait(1)
    assert (load.outcome, load.reason) == ("failed", "grant_consumed")
