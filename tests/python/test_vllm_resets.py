"""Weights that are changed in place: whoever does that resets the connector, and handovers are with servers
that were reset as often."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.python.fake_engine import FakeNative
from tests.python.handover_harness import Status
from tests.python.stream_harness import SEED
from tests.python.vllm_harness import Server, admit, allocated, offer, prompt, request, scheduler_output

Pair = tuple[Server, Server]


def loaded(p: Server, d: Server, number: int) -> int:
    """The tokens that decode loads of 8."""
    params = offer(p, prompt(8), [1, 2], f"p-{number}")
    p.step()
    tokens = admit(d, request(f"d-{number}", prompt(8), params), [5, 6])
    d.step()
    p.step()
    return tokens


def test_servers_that_were_reset_alike_agree(pair: Pair) -> None:
    p, d = pair
    assert loaded(p, d, 1) == 8
    assert p.scheduler.reset_cache() is True
    assert loaded(p, d, 2) == 0
    assert d.total("recomputed_namespace_mismatch") == 1
    assert d.scheduler.reset_cache() is True
    assert loaded(p, d, 3) == 8
    assert d.scheduler.reset_cache() is True
    assert loaded(p, d, 4) == 0


def test_kv_of_before_a_reset_is_not_offered_after_it(pair: Pair) -> None:
    """Part of it was computed with the weights of before."""
    p, _ = pair
    done = request("p-1", prompt(8), {"do_remote_decode": True}, num_computed_tokens=8)
    p.arrive(done)
    p.scheduler.reset_cache()
    done.status = Status.FINISHED_LENGTH_CAPPED
    assert p.scheduler.request_finished_all_groups(done, ([1, 2],)) == (False, None)
    p.arrive(done)  # another one of the same id
    assert p.scheduler.request_finished_all_groups(done, ([1, 2],))[0]


def test_an_offer_is_compared_anew_after_a_reset(pair: Pair) -> None:
    """It waits for its turn with KV of the weights of before."""
    p, d = pair
    wanted = request("d-1", prompt(8), offer(p, prompt(8), [1, 2]))
    d.arrive(wanted)
    assert d.scheduler.get_num_new_matched_tokens(wanted, 0) == (8, True)
    d.scheduler.reset_cache()
    assert d.scheduler.get_num_new_matched_tokens(wanted, 0) == (0, False)


def test_a_reset_fails_while_a_handover_is_loaded(pair: Pair) -> None:
    p, d = pair
    params = offer(p, prompt(8), [1, 2])
    p.step()
    assert admit(d, request("d-1", prompt(8), params), [5, 6]) == 8
    assert d.scheduler.reset_cache() is False
    assert d.step().received == {"d-1"}
    assert d.scheduler.reset_cache() is True


def test_a_reset_that_vllm_could_not_make_is_not_counted(pair: Pair) -> None:
    """Its own fails while any KV block is held; it asks the connector all the same, and whoever has asked is
    to try again. If a try counted, the servers would be apart until they restart."""
    p, d = pair
    held = [p.pool.blocks[3]]
    p.pool.touch(held)
    for _ in range(2):
        assert p.scheduler.reset_cache() is False
    assert loaded(p, d, 1) == 8, "it is as it was: vLLM's prefix cache was not emptied"
    p.pool.free_blocks(held)
    assert p.scheduler.reset_cache() is True
    assert d.scheduler.reset_cache() is True
    assert loaded(p, d, 2) == 8


def streamed(p: Server, name: str, template: dict[str, Any]) -> Any:
    """A request that prefill is to hand over in parts arrives."""
    stream = {"seed": SEED, "of": template}
    sent = request(name, prompt(8), {"do_remote_decode": True, "kvik": {"stream": stream}})
    p.arrive(sent)
    assert p.scheduler.get_num_new_matched_tokens(sent, 0) == (0, False)
    return sent


def test_a_stream_of_before_a_reset_is_granted_no_further(pair: Pair) -> None:
    p, _ = pair
    asks = request("p-1", prompt(8), {"do_remote_decode": True, "kvik": {"stream": {}}})
    asks.num_computed_tokens, asks.status = 8, Status.FINISHED_LENGTH_CAPPED

    def template() -> dict[str, Any]:
        _, params = p.scheduler.request_finished_all_groups(asks, ([1, 2],))
        return dict(json.loads(json.dumps(params))["kvik"]["stream"])

    before = template()
    sent = streamed(p, "p-2", before)
    p.scheduler.update_state_after_alloc(sent, allocated([3, 4]), 0)
    p.scheduler.reset_cache()
    assert p.plan(scheduler_output([("p-2", [3, 4], 0, 8)])).plan.segments == []
    streamed(p, "p-3", before)
    assert p.plan(scheduler_output([("p-3", [5, 6], 0, 8)])).plan.segments == []
    after = template()
    assert after["namespace"] != before["namespace"]
    streamed(p, "p-4", after)
    assert p.plan(scheduler_output([("p-4", [7, 8], 0, 8)])).plan.segments


def last_of_a_stream(p: Server) -> None:
    """A request was handed over in parts and has ended. Of a step that runs as one graph, the grants are
    issued when the next one begins."""
    sent = streamed(p, "p-1", p.scheduler._scheduler._sendings.answer()["stream"])
    p.scheduler.update_state_after_alloc(sent, allocated([3, 4]), 0)
    p.step(scheduler_output([("p-1", [3, 4], 0, 8)]))
    sent.num_computed_tokens, sent.status = 8, Status.FINISHED_LENGTH_CAPPED
    assert not p.scheduler.request_finished_all_groups(sent, ([3, 4],))[0]
    p.step()


def parked(p: Server, native: FakeNative) -> None:
    """A request was offered, and nobody has come for it for a while."""
    offer(p, prompt(8), [3, 4])
    p.step()
    native.now += 2.5
    assert p.step().sent == {"p-1"}


@pytest.mark.parametrize("kind", ["stream", "parked"])
def test_an_idle_server_that_is_woken_sees_what_readers_have_confirmed(
    pair: Pair, native: FakeNative, kind: str
) -> None:
    """vLLM has nothing to do, and so makes no step. Who pauses it, or resets it once more, makes it look."""
    p, _ = pair
    last_of_a_stream(p) if kind == "stream" else parked(p, native)
    assert p.pool.used() == {3, 4}
    assert not p.scheduler.has_pending_push_work(), "it would step for as long as a reader does not come"
    native.now += 1.0
    assert p.scheduler.has_pending_push_work()
    p.step()
    assert p.pool.used() == {3, 4}
    assert not p.scheduler.has_pending_push_work()
    for engine in native.engines.values():
        for grant in engine.grants.values():
            grant.consume()
    assert p.scheduler.reset_cache() is False
    native.now += 1.0
    assert p.scheduler.has_pending_push_work()
    p.step()
    assert p.pool.used() == set()
    assert p.scheduler.reset_cache() is True
    native.now += 1.0
    assert not p.scheduler.has_pending_push_work(), "nothing is held"
