"""Lives of requests of a vLLM server with a store: aborts, preemption, resets, bounds, and handovers."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.python.handover_harness import Status
from tests.python.vllm_harness import (
    V1,
    FullAttentionSpec,
    SlidingWindowSpec,
    allocated,
    kv_cache_config,
    scheduler_output,
    vllm_config,
)
from tests.python.vllm_store_harness import BLOCK, StoreServer, make, running, weights

PROMPT = list(range(200, 200 + 4 * BLOCK + 1))
WHOLE = 4 * BLOCK
HOST = {"host_cache": "1MiB", "deadline": 20.0}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return weights(tmp_path / "model", str(tmp_path).encode())


@pytest.fixture
def server(kvik_vllm: ModuleType, model: Path) -> Iterator[StoreServer]:
    with running(StoreServer(kvik_vllm, model, HOST, blocks=32).met()) as (one,):
        yield one


def hold_loads(server: StoreServer) -> threading.Event:
    """Loads begin only after this was set."""
    go, tiers = threading.Event(), server.server.workers[0]._cache_rank._tiers
    load = tiers.load

    def later(*given: Any) -> Any:
        assert go.wait(60.0)
        return load(*given)

    tiers.load = later
    return go


def test_aborted_while_it_is_loading(server: StoreServer) -> None:
    """It is reported exactly once, names no block as invalid, and saves nothing of what never came."""
    server.serve(PROMPT)
    stored = server.total("cache_host_stored_blocks")
    go = hold_loads(server)
    wanted, scheduler = make(PROMPT), server.server.scheduler
    server.server.arrive(wanted)
    assert server.ask(wanted)[0] == WHOLE
    blocks = server.allocate(5)
    scheduler.update_state_after_alloc(wanted, allocated(blocks), WHOLE)
    assert not server.server.step().received
    wanted.status, wanted.num_computed_tokens = Status.FINISHED_ABORTED, WHOLE
    assert scheduler.request_finished_all_groups(wanted, (blocks,)) == (False, None)
    server.server.step()  # carries the cancel
    go.set()
    result = server.step_until(lambda one: bool(one.received))
    assert result.received == {wanted.request_id}
    assert not result.invalid
    assert server.total("cache_loads_cancelled") == 1
    assert not scheduler.has_pending_push_work()
    assert server.total("cache_host_stored_blocks") == stored


def test_aborted_before_it_is_scheduled(server: StoreServer) -> None:
    wanted = make(PROMPT, status=Status.FINISHED_ABORTED)
    server.server.arrive(wanted)
    server.server.scheduler.request_finished_all_groups(wanted, ([],))
    for _ in range(3):
        assert not server.server.step().received
    assert server.serve(PROMPT).hit == 0


def test_a_prompt_is_kept_before_its_request_ends(server: StoreServer) -> None:
    """In chunks of any size, as soon as the last one is computed, and not before."""
    wanted, scheduler = make(PROMPT), server.server.scheduler
    server.server.arrive(wanted)
    assert server.ask(wanted)[0] == 0
    blocks = server.allocate(6)
    scheduler.update_state_after_alloc(wanted, allocated(blocks), 0)
    chunks = [(0, 7, blocks[:2]), (7, 6, blocks[2:4]), (13, 4, blocks[4:5])]
    for number, (computed, count, new) in enumerate(chunks):
        told = [(wanted.request_id, new, computed, count)]
        server.server.step(scheduler_output(told) if number == 0 else scheduler_output((), told))
        server.compute(wanted, blocks, range(computed, computed + count))
        assert scheduler.has_pending_push_work() == (number == 2)
    server.step_until(lambda _: not scheduler.has_pending_push_work())
    assert server.serve(PROMPT, request_id="another").hit == WHOLE
    server.finish(wanted, blocks, answer=4)
    # Only what is new was put when it ended: 17 tokens and an answer of 4 are 20 computed ones, 5 blocks.
    assert server.total("cache_host_stored_blocks") == 5


def test_a_request_that_began_before_the_ranks_were_known_is_not_kept(
    kvik_vllm: ModuleType, model: Path
) -> None:
    """As under `MultiConnector`, which carries the handshake of another connector: the first step asks for
    it. Which KV blocks the request had then is not known, and those that come are not its first ones."""
    stated = {**HOST, "weights": "known at once"}
    with running(StoreServer(kvik_vllm, model, stated, blocks=32, handshake=False)) as (server,):
        wanted = make(PROMPT)
        server.server.arrive(wanted)
        assert server.ask(wanted)[0] == 0
        blocks = server.allocate(6)
        server.server.scheduler.update_state_after_alloc(wanted, allocated(blocks), 0)
        server.compute(wanted, blocks, range(len(PROMPT)))
        first, *more = [(0, 7, blocks[:2]), (7, 6, blocks[2:4]), (13, 4, blocks[4:5])]
        server.server.step(scheduler_output([(wanted.request_id, first[2], *first[:2])]))
        server.named().met()
        for computed, count, new in more:
            server.server.step(scheduler_output((), [(wanted.request_id, new, computed, count)]))
        server.step_until(lambda _: not server.server.scheduler.has_pending_push_work())
        server.finish(wanted, blocks, answer=4)
        assert server.total("cache_host_stored_blocks") == 0
        assert server.total("cache_requests_not_kept") == 1
        assert server.serve(PROMPT).hit == 0
        assert server.serve(PROMPT).hit == WHOLE


def test_a_prompt_is_saved_when_the_output_of_the_step_that_writes_it_is_in(server: StoreServer) -> None:
    """A rank begins a step's saves before the step has computed anything; and with asynchronous scheduling
    the next step is planned before that output says what is there."""
    wanted = make(PROMPT)
    server.server.arrive(wanted)
    assert server.ask(wanted)[0] == 0
    blocks = server.allocate(5)
    told = scheduler_output([(wanted.request_id, blocks, 0, len(PROMPT))])
    assert server.server.plan(told).cache.saves == []
    assert server.server.plan().cache.saves == []
    server.server.scheduler.take_events()  # vLLM has looked at the output of the first step
    assert [save.blocks for save in server.server.plan().cache.saves] == [blocks[:4]]
    assert server.server.plan().cache.saves == []


def test_a_preempted_request_is_asked_for_again(server: StoreServer) -> None:
    server.serve(PROMPT)
    wanted, scheduler = make(PROMPT), server.server.scheduler
    server.server.arrive(wanted)
    for preemptions in range(3):
        wanted.num_preemptions = preemptions
        assert server.ask(wanted)[0] == WHOLE
        blocks = server.allocate(5)
        scheduler.update_state_after_alloc(wanted, allocated(blocks), WHOLE)
        server.server.reported.clear()
        server.step_until(lambda one: wanted.request_id in one.received)
        server.check(wanted, blocks, range(WHOLE))
        assert scheduler.get_num_new_matched_tokens(wanted, 0) == (0, False)  # until it is preempted
        server._free += blocks
    server.finish(wanted, server.allocate(5), 1, Status.FINISHED_ABORTED)


@pytest.mark.parametrize("why", ["preempted", "waited"])
def test_what_went_while_a_request_waited_is_put_again(
    server: StoreServer, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """The store has moved blocks out since it was asked for them."""
    server.serve(PROMPT)
    wanted = make(PROMPT)
    server.server.arrive(wanted)
    assert server.ask(wanted)[0] == WHOLE
    if why == "preempted":
        server.server.scheduler.update_state_after_alloc(wanted, allocated(server.allocate(5)), 0)
        wanted.num_preemptions = 1
    else:
        later = time.monotonic() + 3600.0
        monkeypatch.setattr(server.server.scheduler._cache, "_clock", lambda: later)
    assert server.server.workers[0]._cache_rank._tiers._host.clear() == WHOLE // BLOCK
    assert server.ask(wanted)[0] == 0
    blocks = server.allocate(5)
    server.server.scheduler.update_state_after_alloc(wanted, allocated(blocks), 0)
    server.compute(wanted, blocks, range(len(PROMPT)))
    server.server.step(scheduler_output([(wanted.request_id, blocks, 0, len(PROMPT))]))
    server.finish(wanted, blocks, answer=1)
    assert server.serve(PROMPT).hit == WHOLE


def test_nothing_is_found_after_a_reset(server: StoreServer) -> None:
    """Whoever resets may have changed the weights in place: no KV of before, and none for others."""
    server.serve(PROMPT)
    running_one = make(PROMPT)
    server.server.arrive(running_one)
    assert server.server.scheduler.reset_cache() is True
    server.finish(running_one, server.allocate(5), 1)  # part of it was computed before
    assert server.serve(PROMPT).hit == 0
    assert server.serve(PROMPT).hit == WHOLE


def test_a_reset_fails_while_a_load_is_on_its_way(server: StoreServer) -> None:
    server.serve(PROMPT)
    go = hold_loads(server)
    wanted, scheduler = make(PROMPT), server.server.scheduler
    server.server.arrive(wanted)
    server.ask(wanted)
    blocks = server.allocate(5)
    scheduler.update_state_after_alloc(wanted, allocated(blocks), WHOLE)
    server.server.step()
    assert scheduler.reset_cache() is False
    go.set()
    server.step_until(lambda one: bool(one.received))
    assert scheduler.reset_cache() is True


def test_what_does_not_fit_is_not_held(kvik_vllm: ModuleType, model: Path) -> None:
    """No more than a quarter of vLLM's KV blocks wait for saves; the rest is dropped, and counted."""
    with running(StoreServer(kvik_vllm, model, HOST, blocks=16).met()) as (server,):
        server.serve(PROMPT)
        assert server.total("cache_host_stored_blocks") == 4
        server.serve([*PROMPT[:-1], *range(900, 908)])
        assert server.total("cache_dropped_blocks") == 2
        assert server.total("cache_host_stored_blocks") == 4


def test_saves_that_wait_hold_their_blocks(kvik_vllm: ModuleType, model: Path) -> None:
    """vLLM gives them to nobody until they are written, and is asked to step for as long."""
    with running(StoreServer(kvik_vllm, model, HOST, blocks=32).met()) as (server,):
        server.serve(PROMPT[:2])
        go, tiers = threading.Event(), server.server.workers[0]._cache_rank._tiers
        save = tiers.save
        tiers.save = lambda *given: save(*given) if go.wait(60.0) else None
        wanted, scheduler = make(PROMPT), server.server.scheduler
        server.server.arrive(wanted)
        server.ask(wanted)
        blocks = server.allocate(5)
        server.compute(wanted, blocks, range(len(PROMPT)))
        wanted.num_computed_tokens, wanted.status = len(PROMPT), Status.FINISHED_LENGTH_CAPPED
        wanted.all_token_ids, wanted.num_tokens = [*PROMPT, 1], len(PROMPT) + 1
        assert scheduler.request_finished_all_groups(wanted, (blocks,)) == (False, None)
        for _ in range(3):
            server.server.step()
            assert server.server.pool.used() == set(blocks[:4])
            assert scheduler.has_pending_push_work()
        go.set()
        server.step_until(lambda _: not server.server.pool.used())
        assert not scheduler.has_pending_push_work()


def test_handover_and_store_in_one_connector(kvik_vllm: ModuleType, model: Path) -> None:
    """An offer comes first; without one the store is asked; both sides keep what they have."""
    with running(
        StoreServer(kvik_vllm, model, HOST, "kv_producer").met(),
        StoreServer(kvik_vllm, model, HOST, "kv_consumer").met(),
    ) as (p, d):
        params = hand_over(p, PROMPT)
        wanted = make(PROMPT, kv_transfer_params=params)
        load_handover(d, wanted)
        assert (d.total("loads"), d.total("cache_loads")) == (1, 0)
        p.step_until(lambda one: bool(one.sent))
        for side in (p, d):
            assert side.serve(PROMPT).hit == WHOLE
        # The store has what is offered: prefill itself is loaded from it.
        assert (p.total("cache_loads"), d.total("cache_loads")) == (1, 1)


def test_an_offer_that_is_not_taken_leaves_the_request_to_the_store(
    kvik_vllm: ModuleType, model: Path
) -> None:
    """vLLM has all that is offered, the store has more: the offer is given back, and the store is read."""
    with running(
        StoreServer(kvik_vllm, model, HOST, "kv_producer").met(),
        StoreServer(kvik_vllm, model, HOST, "kv_consumer").met(),
    ) as (p, d):
        params = hand_over(p, PROMPT[: 2 * BLOCK])
        d.serve(PROMPT)
        told = d.serve(PROMPT, local=2 * BLOCK, kv_transfer_params=params)
        assert (told.hit, told.computed) == (2 * BLOCK, 1)
        assert (d.total("loads"), d.total("cache_loads"), d.total("not_needed")) == (0, 1, 1)
        p.step_until(lambda one: bool(one.sent))


def hand_over(p: StoreServer, tokens: list[int]) -> dict[str, Any]:
    """Prefill a prompt for somebody else; its parameters."""
    wanted = make(tokens, kv_transfer_params={"do_remote_decode": True, "do_remote_prefill": False})
    scheduler = p.server.scheduler
    p.server.arrive(wanted)
    assert p.ask(wanted)[0] == 0
    blocks = p.allocate(-(-len(tokens) // BLOCK))
    scheduler.update_state_after_alloc(wanted, allocated(blocks), 0)
    p.compute(wanted, blocks, range(len(tokens)))
    p.server.step(scheduler_output([(wanted.request_id, blocks, 0, len(tokens))]))
    wanted.num_computed_tokens, wanted.status = len(tokens), Status.FINISHED_LENGTH_CAPPED
    wanted.all_token_ids, wanted.num_tokens = [*tokens, 1], len(tokens) + 1
    held, params = scheduler.request_finished_all_groups(wanted, (blocks,))
    assert held
    p.server.sending[wanted.request_id] = blocks
    p.server.pool.touch([p.server.pool.blocks[block] for block in blocks])
    p.step_until(lambda _: not scheduler.has_pending_push_work())
    return dict(params)


def load_handover(d: StoreServer, wanted: Any) -> None:
    """Load what was offered to a request, and end it."""
    scheduler = d.server.scheduler
    d.server.arrive(wanted)
    assert scheduler.get_num_new_matched_tokens(wanted, 0) == (len(PROMPT), True)
    blocks = d.allocate(6)
    scheduler.update_state_after_alloc(wanted, allocated(blocks), len(PROMPT))
    d.step_until(lambda one: wanted.request_id in one.received)
    d.check(wanted, blocks, range(len(PROMPT)))
    d.finish(wanted, blocks, 1)


@pytest.mark.parametrize(
    ("kinds", "more", "text"),
    [
        ((SlidingWindowSpec,), {}, r"windows of \[6\]"),
        ((FullAttentionSpec, SlidingWindowSpec), {}, r"2 group\(s\) of layers|with vLLM 0.30 or later"),
        ((FullAttentionSpec,), {"speculative_config": SimpleNamespace(method="eagle")}, "'eagle'"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(
    kvik_vllm: ModuleType, kinds: tuple[type, ...], more: dict[str, Any], text: str
) -> None:
    config = vllm_config("kv_both", extra={"store": HOST})
    vars(config).update(more)
    for role in sys.modules[f"{V1}.base"].KVConnectorRole:
        with pytest.raises(ValueError, match=text):
            kvik_vllm.KvikConnector(config, role, kv_cache_config(kinds))


def test_a_model_that_computes_each_prompt_whole_is_refused(kvik_vllm: ModuleType) -> None:
    """Such as pools all tokens of a prompt: vLLM ends where some of them were not computed. Not so without a
    store: nobody hands over what is pooled."""
    role = sys.modules[f"{V1}.base"].KVConnectorRole.SCHEDULER
    for extra in ({"store": HOST}, {}):
        config = vllm_config("kv_both", extra=extra)
        config.model_config.is_prefix_caching_supported = False
        with contextlib.nullcontext() if not extra else pytest.raises(ValueError, match="each prompt whole"):
            kvik_vllm.KvikConnector(config, role, kv_cache_config())


def test_scales_of_what_came_first_are_refused(kvik_vllm: ModuleType) -> None:
    config = vllm_config("kv_both", extra={"store": HOST})
    config.cache_config.calculate_kv_scales = True
    role = sys.modules[f"{V1}.base"].KVConnectorRole.SCHEDULER
    with pytest.raises(ValueError, match="calculate_kv_scales"):
        kvik_vllm.KvikConnector(config, role, kv_cache_config())


@pytest.mark.parametrize(
    ("store", "text"),
    [
        ({"adress": "x:1"}, "did you mean 'address'"),
        (7, "HOST:PORT of a `kvik store serve`"),
        ({"host_cache": "12"}, "host_cache"),
    ],
)
def test_options_that_are_wrong(kvik_vllm: ModuleType, store: Any, text: str) -> None:
    role = sys.modules[f"{V1}.base"].KVConnectorRole.SCHEDULER
    with pytest.raises(ValueError, match=text):
        kvik_vllm.KvikConnector(vllm_config("kv_both", extra={"store": store}), role, kv_cache_config())


def test_metrics_and_the_log_line(kvik_vllm: ModuleType, server: StoreServer) -> None:
    for _ in range(2):
        server.serve(PROMPT)
    stats = kvik_vllm.KvikConnector.build_kv_connector_stats()
    for data in server.server.stats:
        stats = stats.aggregate(kvik_vllm.KvikConnector.build_kv_connector_stats(data))
    summary = stats.reduce()
    assert (summary["store hits"], summary["store saved"]) == (WHOLE, 4)
