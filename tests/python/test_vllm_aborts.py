"""Requests that are aborted, at each place in their lives in the connector."""

from __future__ import annotations

import pytest

from tests.python.fake_engine import FakeNative
from tests.python.vllm_harness import Server, Status, admit, offer, prompt, request


def test_abort_while_loading(pair: tuple[Server, Server], native: FakeNative) -> None:
    p, d = pair
    params = offer(p, prompt(8), [1, 2])
    p.step()
    wanted = request("d-1", prompt(8), params)
    assert admit(d, wanted, [5, 6]) == 8
    native.held = True
    d.step()
    wanted.status = Status.FINISHED_ABORTED
    assert d.scheduler.request_finished_all_groups(wanted, ([5, 6],)) == (False, None)
    assert not d.step().received  # cancelled, but not ended yet
    native.held = False
    result = d.step()
    assert result.received == {"d-1"}
    assert not result.invalid
    assert d.total("loads_cancelled") == 1
    assert d.total("loads") == 0
    assert not d.step().received
    assert p.step().sent == {"p-1"}


def test_abort_when_the_load_has_just_ended(pair: tuple[Server, Server]) -> None:
    p, d = pair
    params = offer(p, prompt(8), [1, 2])
    p.step()
    wanted = request("d-1", prompt(8), params)
    assert admit(d, wanted, [5, 6]) == 8
    assert d.step().received == {"d-1"}
    wanted.status = Status.FINISHED_ABORTED
    d.scheduler.request_finished_all_groups(wanted, ([5, 6],))
    assert not d.step().received
    assert p.step().sent == {"p-1"}


@pytest.mark.parametrize("seen", [False, True])
def test_abort_before_scheduling_gives_the_offer_back(pair: tuple[Server, Server], seen: bool) -> None:
    p, d = pair
    params = offer(p, prompt(8), [1, 2])
    p.step()
    wanted = request("d-1", prompt(8), params, status=Status.FINISHED_ABORTED)
    d.arrive(wanted)
    if seen:
        assert d.scheduler.get_num_new_matched_tokens(wanted, 0) == (8, True)
    d.scheduler.request_finished_all_groups(wanted, ([],))
    d.step()
    assert p.step().sent == {"p-1"}


def test_release_before_the_grant_is_kept_until_it_is_there(pair: tuple[Server, Server]) -> None:
    p, d = pair
    params = offer(p, prompt(8), [1, 2])
    wanted = request("d-1", prompt(8), params)
    d.arrive(wanted)
    d.scheduler.request_finished_all_groups(wanted, ([],))
    d.step()
    p.step()
    d.step()
    assert p.step().sent == {"p-1"}
