"""Prefill and decode on two hosts (network namespaces): a shared secret, one socket, or no KV at all."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from kvik.demo import client
from tests.netns.hosts import Host
from tests.vllm.conftest import Meanwhile, Reference, expected
from tests.vllm.pairs import BLOCK_BYTES, EXPIRY, Pair, blocks_of, prompt_of, used, wait_used

TOKENS = 16
LENGTHS = (2, 127, 128, 129, 300, 1000, 2000)
SLACK = 20.0  # seconds for a busy machine


def ask(pair: Pair, prompts: list[list[int]]) -> list[list[int]]:
    """The answers through the router, two requests at once."""
    with pair.near(), ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda prompt: client.complete(pair.router.url, prompt, TOKENS).tokens, prompts))


@pytest.mark.parametrize("pair", ["two-hosts"], indirect=True)
def test_handover_over_one_socket(pair: Pair, reference: Reference) -> None:
    """Equal tokens, all KV blocks moved over tcp, and all of them through prefill's one listening port."""
    prompts = [prompt_of(length, seed=50) for length in LENGTHS]
    with pair.near():
        computed = pair.decode_computed()
    with expected(reference, prompts, TOKENS) as truth:
        for length, one, answer in zip(LENGTHS, truth, ask(pair, prompts), strict=True):
            assert answer == one.result(), f"{length} tokens: other tokens"
    loads = pair.reports.wait(len(LENGTHS))
    print(*loads, sep="\n")
    assert {(load.outcome, load.transport) for load in loads} == {("loaded", "tcp")}
    assert sorted(load.bytes for load in loads) == [blocks_of(length) * BLOCK_BYTES for length in LENGTHS]
    with pair.near():
        assert pair.decode_computed() - computed <= len(LENGTHS)
    left, right = hosts_of(pair)
    served = {f"{left.v4}:{pair.prefill.port}", f"{right.v4}:{pair.decode.port}"}
    between = [
        connection
        for connection in left.connections()
        if connection.peer.startswith(f"{right.v4}:") and not {connection.local, connection.peer} & served
    ]
    print(*between, sep="\n")
    (address,) = {connection.local for connection in between}
    assert address in left.listening()
    assert sum(connection.acknowledged for connection in between) >= sum(load.bytes for load in loads)


@pytest.mark.parametrize("pair", ["two-secrets"], indirect=True)
def test_another_secret_moves_nothing(pair: Pair, reference: Reference, meanwhile: Meanwhile) -> None:
    """Decode does not know prefill's secret: it computes every prompt itself, and says why."""
    lengths = (129, 300, 1000)
    prompts = [prompt_of(length, seed=51) for length in lengths]
    with pair.near():
        before = used(pair.prefill)
        computed = pair.decode_computed()
    with expected(reference, prompts, TOKENS) as right:
        for length, one, answer in zip(lengths, right, ask(pair, prompts), strict=True):
            assert answer == one.result(), f"{length} tokens: other tokens"
    loads = pair.reports.wait(len(lengths))
    print(*loads, sep="\n")
    assert [(load.outcome, load.reason, load.bytes) for load in loads] == [
        ("failed", "secret_mismatch", 0)
    ] * 3
    assert "the two engines have different secrets" in pair.decode.log.read_text()
    meanwhile()
    with pair.near():
        assert pair.decode_computed() - computed >= sum(lengths)
        wait_used(pair.prefill, before, EXPIRY + SLACK)


def hosts_of(pair: Pair) -> tuple[Host, Host]:
    """Both hosts of a pair that has two."""
    left, right = pair.hosts
    assert left is not None
    assert right is not None
    return left, right
