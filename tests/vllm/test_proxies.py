"""The handover needs no router of ours, and the comparison of tokens would notice wrong KV."""

import json
import time
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest

from kvik.demo import client
from kvik.demo.engines import BLOCK_TOKENS, Connector, EngineSpec
from kvik.roles.ports import free_ports
from kvik.roles.processes import Fleet
from tests.vllm.conftest import Reference
from tests.vllm.copying_proxy import CopyingProxy
from tests.vllm.forked import ForkParent
from tests.vllm.pairs import BLOCK_BYTES, EXPIRY, START_LIMIT, Pair, blocks_of, prompt_of, start_engine

TOKENS = 16
ROOT = Path(__file__).parents[2]
plain = pytest.mark.parametrize("pair", ["no-prefix-cache"], indirect=True)


@plain
@pytest.mark.parametrize("length", [2, BLOCK_TOKENS, 300, 1025, 2500])
def test_copying_proxy(pair: Pair, reference: Reference, length: int) -> None:
    """A proxy that forwards one dict untouched is enough."""
    prompt = prompt_of(length, seed=20)
    reference.soon(prompt, TOKENS)
    pair.reports.new()
    with CopyingProxy(pair.prefill.url, pair.decode.url) as proxy:
        answer = client.complete(proxy.url, prompt, TOKENS)
    assert answer.tokens == reference(prompt, TOKENS)
    assert [load.bytes for load in pair.reports.wait(1)] == [blocks_of(length) * BLOCK_BYTES]


@plain
def test_one_flipped_byte_is_seen(
    pair: Pair, reference: Reference, model: Path, fork_parent: ForkParent, tmp_path: Path
) -> None:
    """Negative control: one byte of the source spoilt, page checks off, and the tokens are others."""
    connector = Connector(
        "kv_producer", module="tests.vllm.flipping_connector", cls="FlippingConnector",
        extra={"expiry": EXPIRY, "verify": "off"},
    )  # fmt: skip
    spec = EngineSpec("flipping", connector, prefix_caching=False, env={"PYTHONPATH": str(ROOT)})
    prompts = [prompt_of(length, seed=21) for length in (2, 40, 127, 128, 300)]
    for prompt in prompts:
        reference.soon(prompt, TOKENS)
    with Fleet() as fleet:
        flipping = fleet.add(start_engine(fork_parent, model, spec, free_ports(1)[0], tmp_path))
        flipping.wait_ready(time.monotonic() + START_LIMIT)
        spoilt = replace(pair, prefill=flipping)
        different = 0
        for prompt in prompts:
            params = spoilt.prefill_by_hand(prompt)
            assert params is not None
            pair.reports.new()
            different += spoilt.decode_by_hand(prompt, params, TOKENS) != reference(prompt, TOKENS)
            assert [load.outcome for load in pair.reports.wait(1)] == ["loaded"], "the spoilt KV was not used"
    assert different > 0, "one wrong byte of KV changed no token: equal tokens would prove nothing"


@plain
def test_the_router_says_where_the_time_went(pair: Pair, reference: Reference) -> None:
    """A whole answer carries route, prefill, KV wait and decode in its Server-Timing, and one request id."""
    prompt = prompt_of(300, seed=22)
    reference.soon(prompt, TOKENS)
    request = urllib.request.Request(  # noqa: S310 - a URL of this test's own server
        f"{pair.router.url}/v1/completions",
        data=json.dumps(client.body(prompt, TOKENS)).encode(),
        headers={"Content-Type": "application/json", "X-Request-Id": "timed-request"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:  # noqa: S310
        answer = json.load(response)
        timing = response.headers["Server-Timing"]
        assert response.headers["X-Request-Id"] == "timed-request"
    assert client.tokens_of(answer) == reference(prompt, TOKENS)
    phases = {entry.split(";")[0].strip() for entry in timing.split(",")}
    assert phases >= {"route", "prefill", "kv_wait", "decode"}, timing
