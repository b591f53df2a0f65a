"""kvik's connector beside another one, under vLLM's `MultiConnector`; decode also guesses tokens ahead."""

import pytest

from kvik.demo import client
from kvik.demo.engines import BLOCK_TOKENS
from tests.vllm.conftest import Reference
from tests.vllm.pairs import BLOCK_BYTES, Pair, blocks_of, prompt_of, wait_used

TOKENS = 16
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
        pair.reports.new()
        assert client.complete(pair.router.url, prompt, TOKENS).tokens == reference(prompt, TOKENS)
        (load,) = pair.reports.wait(1)
        assert (load.outcome, load.bytes) == ("loaded", blocks_of(length) * BLOCK_BYTES)
    for engine in pair.engines():
        wait_used(engine, 0.0, within=20.0)
        assert engine.alive, engine.tail()
    after = client.metrics(pair.decode.url)
    loaded = "vllm:kvik_loaded_bytes_total"
    assert after[loaded] - before[loaded] == sum(map(blocks_of, LENGTHS)) * BLOCK_BYTES
    assert after["vllm:spec_decode_num_draft_tokens_total"] > 0
