"""What decode gives back of streams: as many as there are, few of them wait at prefill at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvik.handover import releasing, streaming
from tests.python.fake_engine import FakeNative
from tests.python.handover_harness import Side, Status, prompt, request, shape_of
from tests.python.stream_harness import Prefill, decode_params

LENGTH = 41  # tokens: three segments, of which the last begins at 32
PARTS = 5  # of a segment: the model's layers
ALL = 3 * PARTS
BLOCKS = [9, 4, 13, 2, 7, 11]


@pytest.fixture
def native() -> FakeNative:
    return FakeNative()


@pytest.fixture
def servers(
    tmp_path: Path, native: FakeNative, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Prefill, Side]]:
    monkeypatch.setattr(streaming, "SEGMENT_TOKENS", 16)
    monkeypatch.setattr(releasing, "MAX_AT_ONCE", ALL)
    shape = shape_of(1, 4, 8, layers=PARTS)
    made = [Side(native, role, shape, tmp_path, clock=lambda: native.now) for role in ("prefill", "decode")]
    yield Prefill(made[0]), made[1]
    for side in made:
        side.close()


def template_of(p: Prefill) -> dict[str, Any]:
    template = p.template(prompt(5, first=9000), [23])
    p.side.step()
    return template


def waiting(native: FakeNative) -> int:
    """Transfers that are open at prefill."""
    return sum(not one.done for engine in native.engines.values() for one in engine.transfers)


def arrive(d: Side, number: int, template: dict[str, Any], local: int) -> Any:
    """A request of which decode has so many tokens; what it gives back is begun."""
    wanted = request(f"d-{number}", prompt(LENGTH), decode_params(template, f"{number:064x}"))
    d.admit(wanted, BLOCKS, local)
    d.step()
    return wanted


def computed(p: Prefill, template: dict[str, Any], number: int) -> None:
    """Prefill has computed the prompt of that request."""
    blocks = [block + number % 2 * 14 for block in range(6)]
    p.begin(prompt(LENGTH), blocks, template, seed=f"{number:064x}", request_id=f"p-{number}")
    p.chunk(LENGTH, f"p-{number}")
    assert "do_remote_prefill" not in p.finish(f"p-{number}")


def test_parts_that_a_load_does_not_need_wait_for_no_grant(
    servers: tuple[Prefill, Side], native: FakeNative
) -> None:
    """Decode has all but the last segment of many prompts that prefill has not begun."""
    p, d = servers
    template = template_of(p)
    for number in range(6):
        arrive(d, number, template, local=32)
        assert waiting(native) == (number + 1) * PARTS
    computed(p, template, 0)
    assert p.pool.used()
    assert d.step().received == {"d-0"}
    d.step()
    p.side.step()
    assert not p.pool.used(), "what it had is given back"
    assert waiting(native) == 5 * PARTS


def test_what_an_engine_does_not_take_is_given_back(servers: tuple[Prefill, Side]) -> None:
    """It loads fewer tokens than it was offered, and has KV blocks for these alone: of three segments the
    first one, and half of the second."""
    p, d = servers
    template = template_of(p)
    wanted = request("d-0", prompt(LENGTH), decode_params(template, f"{0:064x}"))
    d.scheduler.on_new_request(wanted)
    assert d.scheduler.get_num_new_matched_tokens(wanted, 0) == (LENGTH, True)
    d.scheduler.update_state_after_alloc(wanted, (BLOCKS[:3],), 24)
    d.step()
    computed(p, template, 0)
    assert p.pool.used()
    result = d.step()
    assert result.received == {"d-0"}
    assert not result.invalid
    assert d.holds(BLOCKS[:3], range(24))
    d.step()
    p.side.step()
    assert not p.pool.used()


def test_what_is_not_needed_waits_for_its_last_grant(
    servers: tuple[Prefill, Side], native: FakeNative
) -> None:
    p, d = servers
    template = template_of(p)
    for number in range(6):
        arrive(d, number, template, local=40)
        assert waiting(native) == ALL + number  # all of one, and the last part of each other
    for number in reversed(range(6)):
        computed(p, template, number)
        d.step()
        d.step()
        p.side.step()
        assert not p.pool.used()
    assert waiting(native) == 0
    assert d.ranks[0].worker.take_stats().total("releases_failed") == 0


@pytest.mark.parametrize("own", [True, False])
def test_a_stream_that_decode_has_never_asked_for_is_given_back(
    servers: tuple[Prefill, Side], own: bool
) -> None:
    """Its client leaves while decode has no place for it; prefill has computed it. What is not its prompt is
    not its to give back."""
    p, d = servers
    template = template_of(p)
    tokens = prompt(LENGTH) if own else prompt(LENGTH, first=500)
    wanted = request("d-0", tokens, decode_params(template, f"{0:064x}"), status=Status.FINISHED_ABORTED)
    d.scheduler.on_new_request(wanted)
    computed(p, template, 0)
    assert p.pool.used()
    d.scheduler.request_finished(wanted, ([],))
    d.step()
    d.step()
    p.side.step()
    assert bool(p.pool.used()) != own


@pytest.mark.parametrize("ends", ["fails", "is cancelled"])
def test_a_load_that_ends_early_waits_for_its_last_grant(
    servers: tuple[Prefill, Side], native: FakeNative, ends: str
) -> None:
    p, d = servers
    template = template_of(p)
    for number in range(6):
        wanted = arrive(d, number, template, local=32)
        if ends == "fails":
            native.faults = ["checksum_mismatch"]
        else:
            d.scheduler.request_finished(wanted, (BLOCKS,))
        assert d.step().received == {wanted.request_id}
        assert waiting(native) == ALL + number
    for number in range(6):
        computed(p, template, number)
        d.step()
        d.step()
        p.side.step()
        assert not p.pool.used()


def test_no_more_are_open_than_may_be(
    servers: tuple[Prefill, Side], native: FakeNative, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(releasing, "MAX_OPEN_RELEASES", ALL + 2)
    p, d = servers
    template = template_of(p)
    for number in range(6):
        arrive(d, number, template, local=40)
        assert waiting(native) == ALL + min(number, 2)
    native.now += 121  # nobody has computed them
    d.step()
    assert waiting(native) == 3
    native.now += 121
    d.step()
    assert waiting(native) == 0
    assert d.ranks[0].worker.take_stats().total("releases_failed") == 6 * ALL
