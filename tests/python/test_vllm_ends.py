"""How requests' lives end in the connector, for each supported vLLM: held, given back, parked, failed."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from tests.python.fake_engine import FakeNative
from tests.python.vllm_harness import (
    Server,
    Status,
    admit,
    allocated,
    grant_of,
    offer,
    prompt,
    request,
)


@pytest.mark.parametrize(
    ("status", "computed", "held"),
    [
        (Status.FINISHED_LENGTH_CAPPED, 8, True),
        (Status.FINISHED_STOPPED, 8, True),
        (Status.FINISHED_STOPPED, 11, True),  # decoded a few tokens: only the prompt is offered
        (Status.FINISHED_ABORTED, 8, False),
        (Status.FINISHED_STOPPED, 0, False),
    ],
)
def test_producer_finish(pair: tuple[Server, Server], status: Status, computed: int, held: bool) -> None:
    p, _ = pair
    done = request("p-1", prompt(8), {"do_remote_decode": True}, status=status, num_computed_tokens=computed)
    p.arrive(done)
    answer = p.scheduler.request_finished_all_groups(done, ([1, 2, 3],))
    assert answer[0] is held
    if held:
        assert answer[1]["remote_block_ids"] == [[1, 2]]
        assert answer[1]["remote_num_tokens"] == 8
        assert p.scheduler.request_finished(request("p-2", prompt(8), None), [1]) == (False, None)


def test_expiry_gives_blocks_back_and_fails_late_readers(kvik_vllm: ModuleType, native: FakeNative) -> None:
    p = Server(kvik_vllm, native, "kv_producer", extra={"park_after": 200})  # never parked
    d = Server(kvik_vllm, native, "kv_consumer")
    params = offer(p, prompt(8), [1, 2])
    assert p.step().sent == set()
    native.now += 119
    assert p.step().sent == set()
    native.now += 2
    assert p.step().sent == {"p-1"}
    assert admit(d, request("d-1", prompt(8), params), [5, 6]) == 8
    result = d.step()
    assert result.received == {"d-1"}
    assert result.invalid == {5, 6}
    assert p.total("sends_expired") == 1
    assert d.total("loads_failed_grant_expired") == 1


def test_a_grant_that_cannot_be_issued_gives_blocks_back(
    pair: tuple[Server, Server], native: FakeNative
) -> None:
    p, d = pair
    params = offer(p, prompt(8), [1, 2])
    native.refuse_grants = True
    assert p.step().sent == {"p-1"}
    assert admit(d, request("d-1", prompt(8), params), [5, 6]) == 8
    assert not d.step().received
    native.now += 31  # past the deadline
    result = d.step()
    assert result.received == {"d-1"}
    assert result.invalid == {5, 6}


@pytest.mark.parametrize("end", ["read", "expired", "released"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_parked_handovers_let_an_idle_engine_sleep(
    kvik_vllm: ModuleType, native: FakeNative, ranks: int, end: str
) -> None:
    p, d = (Server(kvik_vllm, native, role, tp=ranks) for role in ("kv_producer", "kv_consumer"))
    params = offer(p, prompt(8), [1, 2])
    assert p.step().sent == set()
    native.now += 2.5  # past park_after
    assert p.step().sent == {"p-1"}  # vLLM's request is over: nothing makes an idle engine step any more
    assert p.pool.used() == {1, 2}
    assert grant_of(native, params).state == "live"
    wanted = request("d-1", prompt(8), params)
    if end == "read":
        assert admit(d, wanted, [5, 6]) == 8
    elif end == "released":
        d.arrive(wanted)
        d.scheduler.request_finished_all_groups(wanted, ([],))
    else:
        native.now += 120
    d.step()
    d.step()
    assert p.pool.used() == {1, 2}  # no step yet
    assert not p.step().sent
    assert p.pool.used() == set()
    assert p.reported["sent", "p-1"] == ranks


def test_parking_meets_a_grant_that_just_ended(kvik_vllm: ModuleType, native: FakeNative) -> None:
    p, d = (Server(kvik_vllm, native, role, tp=2) for role in ("kv_producer", "kv_consumer"))
    params = offer(p, prompt(8), [1, 2])
    p.step()
    grant_of(native, params, rank=1).consume()
    assert p.step().sent == set()  # rank 1 has reported, rank 0 not
    native.now += 2.5
    assert p.step().sent == {"p-1"}
    assert p.pool.used() == {1, 2}
    grant_of(native, params, rank=0).consume()
    p.step()
    assert p.pool.used() == set()
    assert not d.known


def told_of(d: Server, wanted: Any, status: Status = Status.FINISHED_LENGTH_CAPPED) -> tuple[Any, Any] | None:
    """How its answer says that a request came by its KV, and why; it ends here."""
    wanted.status = status
    kept, params = d.scheduler.request_finished_all_groups(wanted, ([5, 6],))
    assert not kept
    return None if params is None else (params["kvik"]["outcome"], params["kvik"].get("reason"))


def test_a_load_that_fails_on_one_rank_is_told_with_its_reason(
    kvik_vllm: ModuleType, native: FakeNative
) -> None:
    """The other rank has its part, and may say so later."""
    p, d = (Server(kvik_vllm, native, role, tp=2) for role in ("kv_producer", "kv_consumer"))
    params = offer(p, prompt(8), [1, 2])
    p.step()
    wanted = request("d-1", prompt(8), params)
    assert admit(d, wanted, [5, 6]) == 8
    native.faults.append("peer_restarted")
    assert d.step().received == {"d-1"}
    assert told_of(d, wanted) == ("recomputed", "peer_restarted")


def test_an_aborted_load_is_told_to_nobody(pair: tuple[Server, Server], native: FakeNative) -> None:
    p, d = pair
    params = offer(p, prompt(8), [1, 2])
    p.step()
    native.held = True
    wanted = request("d-1", prompt(8), params)
    assert admit(d, wanted, [5, 6]) == 8
    d.step()
    assert told_of(d, wanted, Status.FINISHED_ABORTED) is None


@pytest.mark.parametrize("code", ["checksum_mismatch", "peer_lost"])
def test_failed_load(pair: tuple[Server, Server], native: FakeNative, code: str) -> None:
    p, d = pair
    params = offer(p, prompt(8), [1, 2])
    p.step()
    wanted = request("d-1", prompt(8), params)
    assert admit(d, wanted, [5, 6]) == 8
    native.faults.append(code)
    result = d.step()
    assert result.received == {"d-1"}
    assert result.invalid == {5, 6}
    assert d.scheduler.get_num_new_matched_tokens(wanted, 0) == (
        0,
        False,
    )  # rescheduled: computed, not loaded again
    d.scheduler.update_state_after_alloc(wanted, allocated([5, 6]), 0)
    assert not d.step().invalid
    assert told_of(d, wanted) == ("recomputed", code)
    # A living owner is told that its blocks are free; a lost one finds out by expiry.
    assert p.step().sent == ({"p-1"} if code == "checksum_mismatch" else set())
    native.now += 121
    p.step()
    assert p.reported["sent", "p-1"] == 1


def test_a_ticket_that_cannot_be_read_fails_the_load(pair: tuple[Server, Server]) -> None:
    p, d = pair
    params = offer(p, prompt(8), [1, 2])
    params["kvik"]["tickets"][0]["ticket"] = "nonsense"
    assert admit(d, request("d-1", prompt(8), params), [5, 6]) == 8
    result = d.step()
    assert result.received == {"d-1"}
    assert result.invalid == {5, 6}
