"""A store beside a connector that loads KV during the step that computes upon it, and does not fill it all.

vLLM hears of that with the step's output. Until then it takes the blocks for what they were to be: it gives
them to other requests, and begins the next step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.python.handover_harness import Status
from tests.python.vllm_harness import scheduler_output
from tests.python.vllm_store_harness import BLOCK, StoreServer, make, running, weights

PROMPT = list(range(200, 200 + 4 * BLOCK + 1))
WHOLE = 4 * BLOCK
LOADED = 2 * BLOCK  # by the other connector


@pytest.fixture
def server(kvik_vllm: ModuleType, tmp_path: Path) -> Iterator[StoreServer]:
    model = weights(tmp_path / "model", str(tmp_path).encode())
    with running(StoreServer(kvik_vllm, model, {"host_cache": "1MiB"}, blocks=64).met()) as (one,):
        yield one


def arrived(server: StoreServer, tokens: list[int] = PROMPT) -> tuple[Any, list[int]]:
    """A request that the store has nothing of, and KV blocks for it, which hold what somebody has left."""
    wanted = make(tokens)
    server.server.arrive(wanted)
    assert server.ask(wanted)[0] == 0
    return wanted, server.allocate(6)


def begins(wanted: Any, blocks: list[int], until: int = len(PROMPT)) -> tuple[str, list[int], int, int]:
    """It begins with what is loaded during this step, and computes the rest."""
    return wanted.request_id, blocks, LOADED, until - LOADED


def output_of(server: StoreServer, not_filled: set[int] | None = None) -> None:
    """The output of the oldest step comes."""
    nothing = SimpleNamespace(
        finished_sending=None, finished_recving=None, invalid_block_ids=not_filled or set(),
        kv_connector_worker_meta=None,
    )  # fmt: skip
    server.server.scheduler.update_connector_output(nothing)
    server.server.scheduler.take_events()


def nothing_is_kept(server: StoreServer) -> bool:
    """Whether no block was saved, and none is held for that."""
    for _ in range(3):
        server.server.step()
    kept = server.total("cache_host_stored_blocks")
    return not kept and not server.server.pool.used() and not server.server.scheduler.has_pending_push_work()


def test_it_is_not_saved(server: StoreServer) -> None:
    """Not with the next step, and not when the request ends."""
    wanted, blocks = arrived(server)
    server.server.step(scheduler_output([begins(wanted, blocks)]), not_filled={blocks[1]})
    assert nothing_is_kept(server)
    server.finish(wanted, blocks, 1)
    assert nothing_is_kept(server)
    assert server.total("cache_requests_not_kept") == 1
    assert server.serve(PROMPT).hit == 0
    assert server.serve(PROMPT).hit == WHOLE


def test_who_shares_it_is_not_saved_either(server: StoreServer) -> None:
    """vLLM's prefix cache gives the blocks to another request of the step at once; a third one is saved."""
    first, blocks = arrived(server)
    second, own = arrived(server, [*PROMPT[:LOADED], *range(900, 909)])
    third, others = arrived(server, list(range(700, 700 + len(PROMPT))))
    server.compute(third, others, range(len(PROMPT)))
    new = [begins(first, blocks), begins(second, [*blocks[:2], *own[2:]])]
    output = scheduler_output([*new, (third.request_id, others, 0, len(PROMPT))])
    server.server.step(output, not_filled={blocks[0]})
    server.step_until(lambda _: not server.server.scheduler.has_pending_push_work())
    assert server.total("cache_host_stored_blocks") == 4
    assert server.asked(third.all_token_ids) == WHOLE
    assert server.asked(first.all_token_ids) == server.asked(second.all_token_ids) == 0


def given(server: StoreServer, wanted: Any, blocks: list[int]) -> None:
    """vLLM's prefix cache gives a request its whole blocks, of which the first two are not filled; it answers
    with one block more."""
    told = scheduler_output([(wanted.request_id, blocks, WHOLE, 1)])
    server.server.step(told, not_filled=set(blocks[:2]))
    server.finish(wanted, blocks, BLOCK + 1)


def test_who_is_given_it_when_all_of_its_prompt_is_saved(server: StoreServer) -> None:
    """Nothing of the prompt is new, and its answer is computed upon what is not there."""
    server.serve(PROMPT)
    wanted = make(PROMPT)
    server.server.arrive(wanted)
    assert server.ask(wanted, WHOLE)[0] == 0
    given(server, wanted, server.allocate(6))
    assert server.total("cache_host_stored_blocks") == 4
    assert server.total("cache_requests_not_kept") == 1


def test_who_is_given_it_after_it_was_preempted(server: StoreServer) -> None:
    """Its prompt was saved, and its answer is computed anew, upon what is not there."""
    wanted, blocks = arrived(server)
    server.compute(wanted, blocks, range(len(PROMPT)))
    server.server.step(scheduler_output([(wanted.request_id, blocks, 0, len(PROMPT))]))
    server.step_until(lambda _: not server.server.scheduler.has_pending_push_work())
    assert server.total("cache_host_stored_blocks") == 4
    wanted.num_preemptions = 1
    assert server.ask(wanted, WHOLE)[0] == 0
    given(server, wanted, server.allocate(6))
    assert server.total("cache_host_stored_blocks") == 4
    assert server.total("cache_requests_not_kept") == 1


def test_it_is_said_after_the_next_step_has_begun(server: StoreServer) -> None:
    """With asynchronous scheduling: one prompt ends with the step that loads, and another with the next."""
    first, blocks = arrived(server)
    second, own = arrived(server)
    shared = [*blocks[:4], own[4]]
    assert server.server.plan(scheduler_output([begins(first, blocks)])).cache.saves == []
    assert server.server.plan(scheduler_output([(second.request_id, shared, WHOLE, 1)])).cache.saves == []
    output_of(server, {blocks[0], blocks[1]})
    assert server.server.plan().cache.saves == []
    output_of(server)
    assert server.server.plan().cache.saves == []
    assert not server.server.pool.used()


def test_it_is_said_before_the_prompt_is_computed(server: StoreServer) -> None:
    wanted, blocks = arrived(server)
    server.server.step(scheduler_output([begins(wanted, blocks[:3], 11)]), not_filled={blocks[1]})
    server.server.step(scheduler_output((), [(wanted.request_id, blocks[3:5], 4, len(PROMPT) - 4)]))
    assert nothing_is_kept(server)


def test_a_load_of_another_connector_that_is_whole_is_saved(server: StoreServer) -> None:
    wanted, blocks = arrived(server)
    server.compute(wanted, blocks, range(len(PROMPT)))
    server.server.step(scheduler_output([begins(wanted, blocks)]), not_filled={60})
    server.step_until(lambda _: not server.server.scheduler.has_pending_push_work())
    assert server.total("cache_host_stored_blocks") == 4


def test_a_reset_forgets_what_waits_for_its_output(server: StoreServer) -> None:
    wanted, blocks = arrived(server)
    server.server.plan(scheduler_output([(wanted.request_id, blocks, 0, len(PROMPT))]))
    assert server.server.pool.used()
    assert server.server.scheduler.reset_cache() is False, "vLLM's own has failed, too"
    assert server.server.scheduler._cache.reset() is True
    output_of(server)
    assert nothing_is_kept(server)


@pytest.mark.parametrize("shared", [False, True])
def test_it_is_not_offered_to_decode(server: StoreServer, shared: bool) -> None:
    """A prefill of the next step was given the blocks, and ends. Not so with blocks of its own."""
    first, blocks = arrived(server)
    sent = make(PROMPT, kv_transfer_params={"do_remote_decode": True})
    server.server.arrive(sent)
    assert server.ask(sent, LOADED)[0] == 0
    own = server.allocate(5)
    given = [*(blocks if shared else own)[:2], *own[2:]]
    server.server.plan(scheduler_output([begins(first, blocks)], loads=True))
    server.server.plan(scheduler_output([begins(sent, given)]))
    output_of(server, {blocks[1]})
    sent.status, sent.num_computed_tokens = Status.FINISHED_LENGTH_CAPPED, len(PROMPT)
    sent.all_token_ids, sent.num_tokens = [*PROMPT, 1], len(PROMPT) + 1
    held, params = server.server.scheduler.request_finished_all_groups(sent, (given,))
    assert held == (params is not None) == (not shared)


@pytest.mark.parametrize("loads", [False, True])
def test_a_stream_that_begins_meanwhile_is_pulled(server: StoreServer, loads: bool) -> None:
    """What vLLM's prefix cache has given it may be what another connector loads for another request."""
    first, blocks = arrived(server)
    template = server.server.scheduler._scheduler._sendings.answer()["stream"]
    stream = {"seed": "5a" * 32, "of": template}
    sent = make(PROMPT, kv_transfer_params={"do_remote_decode": True, "kvik": {"stream": stream}})
    server.server.arrive(sent)
    own = server.allocate(6)
    server.server.plan(scheduler_output([begins(first, blocks)], loads=loads))
    assert server.server.scheduler.get_num_new_matched_tokens(sent, LOADED) == (0, False)
    plan = server.server.plan(scheduler_output([begins(sent, [*blocks[:2], *own[2:]])])).plan
    assert bool(plan.segments) != loads
    output_of(server)
    assert not server.server.scheduler._flight.loading
