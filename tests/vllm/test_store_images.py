"""A real model that sees images, in real vLLM servers with one store: KV of an image is found by who asks
with that image, in that place and prepared in that way, and by nobody else; whatever its client calls it.

Two servers share the store, and have no prefix cache of their own: what one has computed, the other finds."""

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvik.demo import client
from kvik.demo.engines import BLOCK_TOKENS, MODEL, Connector, EngineSpec
from kvik.demo.reports import ReportReader
from kvik.roles.ports import free_ports
from kvik.roles.processes import Fleet, HttpServer
from tests.python.store_rig import Served
from tests.vllm.forked import ForkParent
from tests.vllm.pairs import (
    ASK_PREFILL,
    COMPUTED,
    START_LIMIT,
    logged,
    start_engine,
    used,
    wait_for,
    wait_used,
)
from tests.vllm.pictures import Picture, ensure_seeing, message, text_of, tokens_in

TOKENS = 12
SLACK = 20.0  # seconds for a busy machine
BEFORE = BLOCK_TOKENS + 20  # tokens in front of the first image
LOADED = "vllm:kvik_store_blocks_loaded_remote_total"
SAVED = "vllm:kvik_store_blocks_saved_remote_total"
NOT_KEPT = "vllm:kvik_store_requests_not_kept_total"
Parts = tuple[str | Picture, ...]
pytestmark = pytest.mark.timeout(2 * START_LIMIT)


@dataclass
class Engine:
    """One server; `loads`: what its handovers have brought."""

    server: HttpServer
    loads: ReportReader
    more: dict[str, float] = field(default_factory=dict)
    params: dict[str, object] | None = None

    def ask(self, parts: Parts, **more: Any) -> list[int]:
        """The tokens of the answer. By how much each metric has grown is in `more` then, and what prefill
        offers in `params`."""
        before = client.metrics(self.server.url)
        asked = {"model": MODEL, "messages": message(*parts), "max_tokens": TOKENS, "temperature": 0}
        asked |= {"ignore_eos": True, "return_token_ids": True, **more}
        answer = client.post(self.server.url, asked, path="/v1/chat/completions")
        after = client.metrics(self.server.url)
        self.more = {name: amount - before.get(name, 0.0) for name, amount in after.items()}
        params = answer.get("kv_transfer_params")
        self.params = params if isinstance(params, dict) else None
        return client.tokens_of(answer)

    def kept(self, blocks: int, since: float) -> None:
        """Wait until so many blocks more are in the store than were."""
        wait_used(self.server, 0.0, SLACK)

        def look() -> float:
            used(self.server)  # counts come with steps
            return self.count(SAVED) - since

        assert wait_for(look, lambda value: value >= blocks, SLACK) == blocks, self.server.tail()

    def count(self, name: str) -> float:
        return client.metrics(self.server.url).get(name, 0.0)


@dataclass
class Seeing:
    """first, second: with the store; the second one has room for the data of two images, and for what the
    model makes of many. alone: without, what every answer is compared with."""

    first: Engine
    second: Engine
    alone: Engine

    def computes(self, engine: Engine, parts: Parts, blocks: int, **more: Any) -> list[int]:
        """Have a server answer, which finds so many blocks of the prompt in the store and computes the rest,
        as the server without one answers."""
        answer = engine.ask(parts, **more)
        found = int(engine.more[LOADED])
        assert found == blocks, f"{found} blocks of the store, {blocks} expected\n{engine.server.tail()}"
        assert engine.more[COMPUTED] == tokens_in(*parts) - found * BLOCK_TOKENS
        assert answer == self.alone.ask(parts, **more), "other tokens than without a store"
        return answer

    def keeps(self, parts: Parts, blocks: int = 0, **more: Any) -> list[int]:
        """The first server computes a prompt of which so many blocks are there, and all of it is kept."""
        since = self.first.count(SAVED)
        answer = self.computes(self.first, parts, blocks, **more)
        self.first.kept(tokens_in(*parts) // BLOCK_TOKENS - blocks, since)
        return answer


@pytest.fixture(scope="module")
def seeing(fork_parent: ForkParent, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seeing]:
    """The three servers; they start side by side."""
    model, folder = ensure_seeing(), tmp_path_factory.mktemp("seeing")
    with Fleet() as fleet, contextlib.ExitStack() as stack:
        store = Served("--memory", "256MiB")
        stack.callback(store.__exit__)
        made = []
        for name in ("first", "second", "alone"):
            report = folder / f"{name}-loads.jsonl"
            extra = {"store": {"address": store.address, "deadline": 10.0, "prefill_rate": "off"}}
            spec = EngineSpec(
                name,
                None if name == "alone" else Connector("kv_both", report, extra=extra),
                prefix_caching=False,
                arguments=[
                    "--limit-mm-per-prompt", json.dumps({"image": 4}), "--trust-request-mm-kwargs",
                    *(["--mm-processor-cache-gb", "0.0001"] if name == "second" else []),
                ],
            )  # fmt: skip
            server = fleet.add(start_engine(fork_parent, model, spec, free_ports(1)[0], folder))
            made.append(Engine(server, ReportReader(report)))
        for engine in made:
            engine.server.wait_ready(time.monotonic() + START_LIMIT)
        yield Seeing(*made)


def around(seed: int, *pictures: Picture, before: int = BEFORE) -> Parts:
    """A prompt of more than three KV blocks with these images in it: text, an image, text, an image, text."""
    parts: list[str | Picture] = [text_of(before, seed)]
    for number, picture in enumerate(pictures):
        parts += [picture, text_of(150, seed + 1000 + number)]
    return (*parts, text_of(50, seed + 2000))


def test_an_image_is_found_again_and_no_other(seeing: Seeing) -> None:
    """By who sends the same bytes, under any name. Of a prompt with another image, what lies before it."""
    parts = around(1, Picture(1))
    whole = tokens_in(*parts) // BLOCK_TOKENS
    answer = seeing.keeps(parts)
    assert seeing.computes(seeing.second, parts, whole) == answer
    other = seeing.computes(seeing.second, around(1, Picture(2)), 1)
    assert other != answer, "the image changes nothing"
    named = around(1, Picture(1, "a name of its client's"))
    assert seeing.computes(seeing.second, named, whole) == answer


def test_an_image_over_the_end_of_a_block(seeing: Seeing) -> None:
    """It counts from the block on where it begins."""
    before = BLOCK_TOKENS - 20
    seeing.keeps(around(2, Picture(3), before=before))
    seeing.computes(seeing.second, around(2, Picture(4), before=before), 0)
    parts = around(2, Picture(3), before=before)
    seeing.computes(seeing.second, parts, tokens_in(*parts) // BLOCK_TOKENS)


def test_two_images_and_their_order(seeing: Seeing) -> None:
    one, two, three = Picture(5), Picture(6), Picture(7)
    answer = seeing.keeps(around(3, one, two))
    assert seeing.computes(seeing.second, around(3, two, one), 1) != answer
    # The first is the same: found up to the block in which the second begins.
    begins = BEFORE + tokens_in(one) + 150
    seeing.computes(seeing.second, around(3, one, three), begins // BLOCK_TOKENS)
    parts = around(3, one, two)
    seeing.computes(seeing.second, parts, tokens_in(*parts) // BLOCK_TOKENS)


def test_an_image_in_another_place(seeing: Seeing) -> None:
    """Within the same block, of the same tokens: letters in front of it instead of behind it."""
    text, image = text_of(BEFORE, 4), Picture(8)
    seeing.keeps((text, image, "aaaa", text_of(200, 5)))
    seeing.computes(seeing.second, (text, "aaaa", image, text_of(200, 5)), 1)


def test_an_image_that_is_prepared_otherwise(seeing: Seeing) -> None:
    """The same bytes of a client, and other numbers for the model."""
    parts, otherwise = around(6, Picture(9)), {"mm_processor_kwargs": {"do_normalize": False}}
    whole = tokens_in(*parts) // BLOCK_TOKENS
    answer = seeing.keeps(parts)
    changed = seeing.computes(seeing.second, parts, 1, **otherwise)
    assert changed != answer, "the option changes nothing"
    assert seeing.computes(seeing.second, parts, whole) == answer


def test_one_name_for_two_images(seeing: Seeing) -> None:
    """vLLM takes a client's word: with the name of an image it has seen, it computes with what its encoder
    made of that one. That KV is kept for nobody, though the bytes of another image came with it."""
    one, two = around(7, Picture(10, "one name")), around(7, Picture(11, "one name"))
    since, not_kept = seeing.second.count(SAVED), seeing.second.count(NOT_KEPT)
    answer = seeing.computes(seeing.second, one, 0)
    seeing.second.kept(tokens_in(*one) // BLOCK_TOKENS, since)
    for seed in range(100, 103):  # vLLM forgets the data of the first one
        seeing.second.ask((Picture(seed), text_of(30, seed)))
    assert seeing.second.ask(two) == answer, "vLLM did not go by the name: see whether this is needed"
    wait_used(seeing.second.server, 0.0, SLACK)
    assert seeing.second.count(NOT_KEPT) == not_kept + 1
    assert len(logged(seeing.second.server, "'one name' was not always the same here")) == 1
    # Nothing of it lies under the bytes of the second image, and all of the first is found.
    assert seeing.computes(seeing.first, around(7, Picture(11)), 1) != answer
    whole = tokens_in(*one) // BLOCK_TOKENS
    assert seeing.computes(seeing.first, around(7, Picture(10)), whole) == answer


def test_a_handover_of_an_image(seeing: Seeing) -> None:
    """Decode loads the KV of its own image, whatever either server's client called it, and of no other."""
    loaded, other = ("loaded", None), ("recomputed", "digest_mismatch")
    cases = (
        (Picture(12), Picture(12), loaded),
        (Picture(12), Picture(12, "a name"), loaded),
        (Picture(12), Picture(13), other),
        (Picture(14, "both"), Picture(15, "both"), other),
    )
    seeing.second.loads.new()
    for prefilled, asked, told in cases:
        seeing.first.ask(around(8, prefilled), kv_transfer_params=ASK_PREFILL, max_tokens=1)
        parts = around(8, asked)
        answer = seeing.second.ask(parts, kv_transfer_params=seeing.first.params)
        (load,) = seeing.second.loads.wait(1)
        assert (load.outcome, load.reason) == told
        assert answer == seeing.alone.ask(around(8, Picture(asked.seed)))
