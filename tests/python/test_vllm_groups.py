"""Models whose layers form several groups, such as layers with a window beside layers that see all tokens.

The window is of 6 tokens, a KV block of 4. Block 0 stands for one that vLLM has dropped.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from tests.python.fake_engine import FakeEngine, FakeGrant, FakeNative, KvikError
from tests.python.vllm_harness import (
    VERSIONS,
    FullAttentionSpec,
    Server,
    SlidingWindowSpec,
    Status,
    admit,
    grant_of,
    offer,
    prompt,
    request,
)

MIXED = (FullAttentionSpec, SlidingWindowSpec)
# Which can be told of a failed load of several groups.
SERVED = [version for version in VERSIONS if version >= "0.30"]

pytestmark = pytest.mark.parametrize("kvik_vllm", SERVED, indirect=True)


@pytest.fixture
def mixed(kvik_vllm: ModuleType, native: FakeNative) -> tuple[Server, Server]:
    p, d = (Server(kvik_vllm, native, role, kinds=MIXED) for role in ("kv_producer", "kv_consumer"))
    return p, d


@pytest.mark.parametrize("kept", [[0, 0, 11, 12], [0, 10, 11, 12], [9, 10, 11, 12]])
def test_each_group_has_its_own_blocks(mixed: tuple[Server, Server], kept: list[int]) -> None:
    """Of 14 tokens the window of the last one begins in the third block: decode loads two of its blocks."""
    p, d = mixed
    params = offer(p, prompt(14), ([1, 2, 3, 4], kept))
    assert params["kvik"]["firsts"] == [0, kept.count(0)]
    assert params["remote_block_ids"] == [[1, 2, 3, 4], [block for block in kept if block]]
    p.step()
    for block in range(1, 16):
        d.fill(block, 255)
    assert admit(d, request("d-1", prompt(14), params), ([5, 6, 7, 8], [0, 0, 13, 14])) == 14
    result = d.step()
    assert (result.received, result.failed, result.invalid) == ({"d-1"}, set(), set())
    assert [d.values(block) for block in (5, 6, 7, 8, 13, 14)] == [{1}, {2}, {3}, {4}, {11}, {12}]
    assert [d.values(block) for block in (1, 2, 3, 4, 9, 10, 11, 12, 15)] == [{255}] * 9
    assert p.step().sent == {"p-1"}
    assert not p.pool.used()
    assert d.total("loads") == 1


def test_the_window_of_the_last_token_is_there(mixed: tuple[Server, Server]) -> None:
    """Of 13 tokens vLLM drops two blocks of the window, and computes the last token, which sees into the
    second of them. So only twelve are loaded, of which it drops one block."""
    p, d = mixed
    params = offer(p, prompt(13), ([1, 2, 3, 4], [9, 10, 11, 12]))
    p.step()
    wanted = request("d-1", prompt(13), params)
    assert admit(d, wanted, ([5, 6, 7], [0, 13, 14])) == 12
    assert d.step().received == {"d-1"}
    assert [d.values(block) for block in (5, 6, 7, 13, 14)] == [{1}, {2}, {3}, {10}, {11}]
    d.step()
    assert p.step().sent == {"p-1"}


def test_a_window_that_prefill_has_not_kept_is_recomputed(mixed: tuple[Server, Server]) -> None:
    p, d = mixed
    params = offer(p, prompt(13), ([1, 2, 3, 4], [0, 0, 11, 12]))
    p.step()
    assert admit(d, request("d-1", prompt(13), params), ([5, 6, 7, 8], [0, 0, 13, 14])) == 0
    d.step()
    assert d.total("recomputed_window_missing") == 1
    assert p.step().sent == {"p-1"}


def test_a_window_that_vllm_keeps_for_longer_than_prefill_fails(mixed: tuple[Server, Server]) -> None:
    """Nothing of what lies before the offer is ever asked for."""
    p, d = mixed
    params = offer(p, prompt(14), ([1, 2, 3, 4], [0, 0, 11, 12]))
    p.step()
    assert admit(d, request("d-1", prompt(14), params), ([5, 6, 7, 8], [0, 10, 13, 14])) == 14
    result = d.step()
    assert (result.received, result.failed, result.invalid) == ({"d-1"}, {"d-1"}, set())


@pytest.mark.parametrize("local", [4, 8])
def test_a_prefix_hit_loads_what_is_missing_in_each_group(mixed: tuple[Server, Server], local: int) -> None:
    p, d = mixed
    params = offer(p, prompt(14), ([1, 2, 3, 4], [9, 10, 11, 12]))
    p.step()
    wanted = request("d-1", prompt(14), params)
    assert admit(d, wanted, ([5, 6, 7, 8], [0, 0, 13, 14]), local) == 14 - local
    assert d.step().received == {"d-1"}
    assert [d.values(block) for block in (7, 8, 13, 14)] == [{3}, {4}, {11}, {12}]
    assert p.step().sent == {"p-1"}


@pytest.mark.parametrize("faults", [["peer_lost"], [None, "peer_lost"]], ids=["first", "second"])
def test_a_failure_in_one_group_fails_the_request(
    mixed: tuple[Server, Server], native: FakeNative, faults: list[Any]
) -> None:
    """Told by the request, since a block of one group does not tell which tokens are missing in the other."""
    p, d = mixed
    params = offer(p, prompt(14), ([1, 2, 3, 4], [0, 0, 11, 12]))
    p.step()
    native.faults = list(faults)
    assert admit(d, request("d-1", prompt(14), params), ([5, 6, 7, 8], [0, 0, 13, 14])) == 14
    result = d.step()
    assert (result.received, result.failed, result.invalid) == ({"d-1"}, {"d-1"}, set())
    assert d.step().failed == set()
    assert d.total("loads_failed_peer_lost") == 1


def test_a_group_that_cannot_be_granted_takes_back_what_the_others_were(
    mixed: tuple[Server, Server], native: FakeNative, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without waiting for who reads it: the request's blocks are held until that one has let go."""
    p, _ = mixed
    waited: list[float] = []
    grant = FakeEngine.grant

    def only_one(engine: FakeEngine, *given: Any, **more: Any) -> FakeGrant:
        native.refuse_grants = bool(engine.grants)
        return grant(engine, *given, **more)

    def revoke(_grant: FakeGrant, timeout: float = 5.0) -> None:
        waited.append(timeout)
        raise KvikError("pages_quarantined")

    monkeypatch.setattr(FakeEngine, "grant", only_one)
    monkeypatch.setattr(FakeGrant, "revoke", revoke)
    params = offer(p, prompt(14), ([1, 2, 3, 4], [9, 10, 11, 12]))
    assert p.step().sent == set()
    assert waited == [0.0]
    grant_of(native, params).consume()
    assert p.step().sent == {"p-1"}


def test_tickets_of_the_other_group_lead_to_nothing(mixed: tuple[Server, Server]) -> None:
    """The owner knows which layers its pages are of."""
    p, d = mixed
    params = offer(p, prompt(14), ([1, 2, 3, 4], [9, 10, 11, 12]))
    p.step()
    for ticket in params["kvik"]["tickets"]:
        ticket["group"] = 1 - ticket["group"]
    assert admit(d, request("d-1", prompt(14), params), ([5, 6, 7, 8], [0, 0, 13, 14])) == 14
    assert d.step().failed == {"d-1"}
    assert d.total("loads_failed_content_mismatch") == 1


def test_tickets_of_like_groups_lead_to_nothing(kvik_vllm: ModuleType, native: FakeNative) -> None:
    """Groups whose KV is of one form: only the layers' names tell them apart."""
    like = (FullAttentionSpec, FullAttentionSpec)
    p, d = (Server(kvik_vllm, native, role, kinds=like) for role in ("kv_producer", "kv_consumer"))
    params = offer(p, prompt(14), ([1, 2, 3, 4], [9, 10, 11, 12]))
    p.step()
    for ticket in params["kvik"]["tickets"]:
        ticket["group"] = 1 - ticket["group"]
    assert admit(d, request("d-1", prompt(14), params), ([5, 6, 7, 8], [13, 14, 15, 3])) == 14
    assert d.step().failed == {"d-1"}
    assert d.total("loads_failed_content_mismatch") == 1


@pytest.mark.parametrize("firsts", [[0, 1], [1, 2], [0, 0]])
def test_another_first_block_leads_to_nothing(mixed: tuple[Server, Server], firsts: list[int]) -> None:
    p, d = mixed
    params = offer(p, prompt(14), ([1, 2, 3, 4], [0, 0, 11, 12]))
    p.step()
    params["kvik"]["firsts"] = firsts
    for block in (13, 14):
        d.fill(block, 255)
    admit(d, request("d-1", prompt(14), params), ([5, 6, 7, 8], [0, 0, 13, 14]))
    result = d.step()
    assert result.failed == result.received
    assert [d.values(block) for block in (13, 14)] == [{255}, {255}]


@pytest.mark.parametrize("asked", [True, False])
def test_groups_that_are_not_divided_alike_lead_to_nothing(mixed: tuple[Server, Server], asked: bool) -> None:
    """Of ranks that a group has not, nothing is asked, and nothing is given back: not even where the request
    ends before anybody has compared the two."""
    p, d = mixed
    params = offer(p, prompt(14), ([1, 2, 3, 4], [9, 10, 11, 12]))
    p.step()
    params["kvik"]["shapes"][0]["stages"] = [1, 2]
    params["kvik"]["tickets"].append(params["kvik"]["tickets"][1] | {"pp": 1})
    wanted = request("d-1", prompt(14), params)
    if asked:
        assert admit(d, wanted, ([5, 6, 7, 8], [0, 0, 13, 14])) == 0
    else:
        d.arrive(wanted)
    wanted.status = Status.FINISHED_ABORTED
    d.scheduler.request_finished_all_groups(wanted, ([], []))
    d.step()
    assert d.total("recomputed_params_invalid") == asked
    assert d.total("releases") == d.total("releases_failed") == 0
    assert p.step().sent == set()


def test_layers_in_other_groups_lead_to_nothing(kvik_vllm: ModuleType, native: FakeNative) -> None:
    p = Server(kvik_vllm, native, "kv_producer", kinds=MIXED)
    d = Server(kvik_vllm, native, "kv_consumer", kinds=MIXED[::-1])
    params = offer(p, prompt(14), ([1, 2, 3, 4], [9, 10, 11, 12]))
    p.step()
    assert admit(d, request("d-1", prompt(14), params), ([5, 6, 7, 8], [0, 0, 13, 14])) == 0
    d.step()
    assert d.total("recomputed_shape_mismatch") == 1


def test_all_layers_may_have_a_window(kvik_vllm: ModuleType, native: FakeNative) -> None:
    """One group: failures are told by blocks, as ever."""
    p, d = (
        Server(kvik_vllm, native, role, kind=SlidingWindowSpec) for role in ("kv_producer", "kv_consumer")
    )
    params = offer(p, prompt(14), [0, 0, 3, 4])
    p.step()
    assert admit(d, request("d-1", prompt(14), params), [0, 0, 7, 8]) == 14
    assert d.step().received == {"d-1"}
    assert [d.values(block) for block in (7, 8)] == [{3}, {4}]
    assert p.step().sent == {"p-1"}
    params = offer(p, prompt(14), [0, 0, 3, 4], request_id="p-2")
    p.step()
    native.faults = ["peer_lost"]
    assert admit(d, request("d-2", prompt(14), params), [0, 0, 7, 8]) == 14
    assert d.step().invalid == {7, 8}
