"""KV events of a store behind vLLM, by vLLM's own event classes of each release: whoever follows them knows
what a later request finds. And whether what a server has is fetched or computed."""

from __future__ import annotations

import ast
import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.python.handover_harness import Status
from tests.python.store_rig import Served
from tests.python.vllm_harness import base_tool
from tests.python.vllm_store_harness import BLOCK, StoreServer, block_hashes, lora, make, running, weights

PROMPT = list(range(200, 200 + 4 * BLOCK + 1))
WHOLE = 4 * BLOCK
HOST = {"host_cache": "1MiB", "deadline": 20.0}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served("--memory", "16MiB") as store:
        yield store


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model of this test alone, so that the store has nothing of it."""
    return weights(tmp_path / "model", str(tmp_path).encode())


@pytest.fixture
def start(kvik_vllm: ModuleType, model: Path) -> Callable[..., StoreServer]:
    """Starts a server that publishes events."""

    def begin(store: dict[str, Any], **more: Any) -> StoreServer:
        return StoreServer(kvik_vllm, model, store, kv_events=True, **more).met()

    return begin


class Follower:
    """What a router knows of a server by its events: the blocks in each medium."""

    def __init__(self, server: StoreServer) -> None:
        self._server = server
        self.blocks: dict[str, set[bytes]] = {"CPU": set(), "STORAGE": set()}
        self.stored: list[Any] = []
        self.removed = 0

    def follow(self) -> Follower:
        """Take up what has happened since; each event must make sense behind those before it."""
        events, self._server.server.events = self._server.server.events, []
        for event in events:
            known = self.blocks[event.medium]
            if type(event).__name__ == "BlockRemoved":
                assert known.issuperset(event.block_hashes)
                known.difference_update(event.block_hashes)
                self.removed += len(event.block_hashes)
                continue
            assert known.isdisjoint(event.block_hashes)
            anywhere = set().union(*self.blocks.values())
            assert event.parent_block_hash is None or event.parent_block_hash in anywhere
            assert len(event.token_ids) == BLOCK * len(event.block_hashes)
            assert event.block_size == BLOCK
            known.update(event.block_hashes)
            self.stored.append(event)
        return self

    def knows(self, wanted: Any, medium: str) -> int:
        """How many tokens of a request it would find there."""
        hashes = block_hashes(wanted)
        missing = (place for place, name in enumerate(hashes) if name not in self.blocks[medium])
        return BLOCK * next(missing, len(hashes))


@pytest.mark.usefixtures("kvik_vllm")
def test_vllm_has_what_events_are_made_with() -> None:
    """What stands in for it here is called as vLLM's own is; and vLLM asks for events once a step."""
    folder = base_tool().fetch(sys.modules["vllm"].__version__) / "vllm/v1/core"
    found = {
        node.name: node
        for name in ("kv_cache_utils.py", "sched/scheduler.py")
        for node in ast.walk(ast.parse((folder / name).read_text()))
        if isinstance(node, ast.FunctionDef)
    }
    given = {
        "maybe_convert_block_hash": ["hash_bytes"],
        "generate_block_hash_extra_keys": ["request", "start_token_idx", "end_token_idx", "start_mm_idx"],
    }
    assert {name: [one.arg for one in found[name].args.args] for name in given} == given
    calls = [
        ast.unparse(node) for node in ast.walk(found["update_from_output"]) if isinstance(node, ast.Call)
    ]
    assert calls.count("self.connector.take_events()") == 1


def test_events_are_vllms_own(start: Callable[..., StoreServer]) -> None:
    with running(start(HOST, blocks=32)) as (server,):
        follower = Follower(server)
        server.serve(PROMPT)
        longer = [*PROMPT[:WHOLE], *range(900, 900 + BLOCK)]
        server.serve([*longer, 1])
        first, second = follower.follow().stored
        hashes = block_hashes(make(longer))
        assert first.block_hashes == hashes[:4]
        assert (first.parent_block_hash, first.token_ids, first.medium) == (None, PROMPT[:WHOLE], "CPU")
        assert (first.lora_id, first.lora_name) == (None, None)
        assert (second.block_hashes, second.parent_block_hash) == (hashes[4:], hashes[3])
        assert second.token_ids == longer[WHOLE:]
        assert getattr(first, "group_idx", 0) == 0
        assert first.extra_keys == [None] * 4
        server.serve(PROMPT, cache_salt="one")
        (salted,) = follower.follow().stored[2:]
        assert salted.extra_keys == [("one",), None, None, None]


def test_an_adapter_is_told_as_vllm_tells_it(start: Callable[..., StoreServer], tmp_path: Path) -> None:
    """Its two names are two to a router, and one block to the store."""
    path = weights(tmp_path / "lora", b"one")
    with running(start(HOST)) as (server,):
        follower = Follower(server)
        server.serve(PROMPT, lora_request=lora(path, 3, "first"))
        assert server.serve(PROMPT, lora_request=lora(path, 4, "second")).hit == WHOLE
        told = follower.follow().stored
        assert [(one.lora_id, one.lora_name) for one in told] == [(3, "first"), (4, "second")]
        assert follower.knows(make(PROMPT), "CPU") == 0


def test_a_full_memory_is_followed(start: Callable[..., StoreServer]) -> None:
    """Whatever goes for others is told as removed: what is known is what is found, for every prompt."""
    rng = random.Random(3)
    prompts = [[*range(first, first + BLOCK), *range(10 * first, 10 * first + 9)] for first in range(1, 9)]
    # Five blocks fit.
    with running(start(HOST, dims={"content": 4096}, blocks=24)) as (server,):
        follower = Follower(server)
        for prompt in rng.choices(prompts, k=24):
            server.serve(prompt)
            follower.follow()
            for other in prompts:
                assert follower.knows(make(other), "CPU") == server.asked([*other, 0])
        assert follower.removed > 0


@pytest.mark.parametrize("fails", [False, True])
def test_a_block_is_told_when_every_rank_has_it(start: Callable[..., StoreServer], fails: bool) -> None:
    with running(start(HOST, tp=2)) as (server,):
        follower = Follower(server)
        go, tiers = threading.Event(), server.server.workers[1]._cache_rank._tiers
        save = tiers.save

        def later(*given: Any) -> Any:
            assert go.wait(60.0)
            if fails:
                raise RuntimeError("a rank that cannot save")
            return save(*given)

        tiers.save = later
        wanted, scheduler = make(PROMPT), server.server.scheduler
        server.server.arrive(wanted)
        server.ask(wanted)
        blocks = server.allocate(5)
        server.compute(wanted, blocks, range(len(PROMPT)))
        wanted.num_computed_tokens, wanted.status = len(PROMPT), Status.FINISHED_LENGTH_CAPPED
        wanted.all_token_ids, wanted.num_tokens = [*PROMPT, 1], len(PROMPT) + 1
        assert scheduler.request_finished_all_groups(wanted, (blocks,)) == (False, None)
        server.server.step()
        first = server.server.workers[0]._cache_rank
        first._saves.submit(lambda: None).result(60.0)  # behind the save
        server.server.step()
        assert not follower.follow().stored
        go.set()
        server.step_until(lambda _: not scheduler.has_pending_push_work())
        assert follower.follow().knows(make(PROMPT), "CPU") == (0 if fails else WHOLE)
        assert server.asked(PROMPT) == (0 if fails else WHOLE)


def test_a_server_is_told_as_storage(start: Callable[..., StoreServer], served: Served) -> None:
    """By who puts, and by who finds: an engine that was started again knows with its first request."""
    store = {"address": served.address, "deadline": 20.0}
    with running(start(store, tp=2)) as (first,):
        first.serve(PROMPT)
        assert Follower(first).follow().knows(make(PROMPT), "STORAGE") == WHOLE
    with running(start(store, tp=2)) as (second,):
        follower = Follower(second)
        assert follower.follow().knows(make(PROMPT), "STORAGE") == 0
        assert second.serve(PROMPT).hit == WHOLE
        assert follower.follow().knows(make(PROMPT), "STORAGE") == WHOLE
        assert not follower.blocks["CPU"]
        # Somebody else takes the last two blocks of one rank out: that is seen when they are asked for.
        tiers = second.server.workers[1]._cache_rank._tiers
        links = second.server.scheduler._cache._naming.links(make(PROMPT), WHOLE)
        tiers._remote.remove(tiers._keys(tiers._remote, links[2 * 32 : 3 * 32]))
        assert follower.follow().knows(make(PROMPT), "STORAGE") == WHOLE
        assert second.asked(PROMPT) == 2 * BLOCK
        assert follower.follow().knows(make(PROMPT), "STORAGE") == 2 * BLOCK


def test_a_server_that_is_away_is_not_told_as_empty(start: Callable[..., StoreServer]) -> None:
    with (
        Served("--memory", "16MiB") as store,
        running(start({"address": store.address, "deadline": 2.0})) as (server,),
    ):
        server.serve(PROMPT)
        follower = Follower(server).follow()
        store.kill()
        assert server.asked(PROMPT) == 0
        assert follower.follow().knows(make(PROMPT), "STORAGE") == WHOLE


def test_a_reset_removes_everything(start: Callable[..., StoreServer], served: Served) -> None:
    with running(start({**HOST, "address": served.address})) as (server,):
        follower = Follower(server)
        server.serve(PROMPT)
        assert follower.follow().knows(make(PROMPT), "CPU") == WHOLE
        assert follower.knows(make(PROMPT), "STORAGE") == WHOLE
        assert server.server.scheduler.reset_cache() is True
        server.server.step()
        assert follower.follow().blocks == {"CPU": set(), "STORAGE": set()}
        server.serve(PROMPT)
        assert follower.follow().knows(make(PROMPT), "CPU") == server.asked(PROMPT) == WHOLE


def test_nothing_is_followed_where_vllm_publishes_nothing(kvik_vllm: ModuleType, model: Path) -> None:
    with running(StoreServer(kvik_vllm, model, HOST).met()) as (server,):
        server.serve(PROMPT)
        assert server.server.events == []
        assert server.server.scheduler._cache._ledger is None
        (worker,) = server.server.workers
        assert worker._cache_rank._tiers._residents is None
        assert worker._cache_rank.take_kept() == []


def told(server: StoreServer, reason: str) -> float:
    return server.total(f"cache_choices_{reason}")


RATES: Sequence[tuple[float | str, str]] = [(1e12, "slower"), (1e-3, "faster"), ("off", "")]


@pytest.mark.parametrize(("rate", "reason"), RATES)
def test_fetched_or_computed(
    kvik_vllm: ModuleType, served: Served, model: Path, rate: float | str, reason: str
) -> None:
    """What is unknown is fetched; then it goes by the server's rate. What is slower is tried the second time.
    Nothing is put again."""
    store = {"address": served.address, "deadline": 20.0, "prefill_rate": rate}
    with running(StoreServer(kvik_vllm, model, store).met()) as (server,):
        server.serve(PROMPT)
        assert server.serve(PROMPT).hit == WHOLE
        stored = server.total("cache_remote_stored_blocks")
        for asked in range(1, 4):
            tried = int(reason == "slower" and asked > 1)
            computed = reason == "slower" and asked != 2
            assert server.serve(PROMPT).hit == (0 if computed else WHOLE)
            if reason:
                assert (told(server, "unknown"), told(server, reason)) == (1, asked - tried)
                assert told(server, "refresh") == tried
        assert server.total("cache_remote_stored_blocks") == stored
        names = [name for stats in server.server.stats for name in stats if name.startswith("cache_choices")]
        assert bool(names) == bool(reason)


def test_the_own_memory_is_not_weighed(kvik_vllm: ModuleType, served: Served, model: Path) -> None:
    store = {**HOST, "address": served.address, "prefill_rate": 1e12}
    with running(StoreServer(kvik_vllm, model, store).met()) as (server,):
        for hit in (0, WHOLE, WHOLE, WHOLE):
            assert server.serve(PROMPT).hit == hit
        assert told(server, "unknown") == told(server, "slower") == 0


def test_a_rate_that_is_measured(kvik_vllm: ModuleType, served: Served, model: Path) -> None:
    """By the steps of prompts; without any nothing is weighed."""
    store = {"address": served.address, "deadline": 20.0}
    with running(StoreServer(kvik_vllm, model, store, blocks=128).met()) as (server,):
        server.serve(PROMPT)
        side = server.server.scheduler._cache
        assert side._rate() is None
        server.serve(list(range(1000, 1000 + 50 * BLOCK)))
        rate = side._steps.rate
        assert rate is not None
        assert rate > 0
        assert side._rate() == rate / 2
        assert server.serve(PROMPT).hit == WHOLE
        assert told(server, "unknown") == 1
