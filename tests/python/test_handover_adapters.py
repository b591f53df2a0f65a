"""Adapters whose files take long to read: requests wait for them, and not for ever."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvik.handover import streaming
from kvik.handover.adapters import PATIENCE_S, Adapters
from kvik.handover.content import Digests, files_digest
from kvik.handover.protocol import RefusedError
from tests.python.fake_engine import FakeNative
from tests.python.handover_harness import Side, Status, prompt, request, shape_of
from tests.python.stream_harness import SEED, Prefill, decode_params
from tests.python.vllm_store_harness import lora, weights

LENGTH = 20
BLOCKS = [9, 4, 13]


class Slow(Digests):
    """Digests that are made when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.held = True
        self.asked: set[Hashable] = set()

    def get(self, key: Hashable, make: Callable[[], bytes]) -> bytes | None:
        self.asked.add(key)
        return None if self.held else make()


@pytest.fixture
def native() -> FakeNative:
    return FakeNative()


@pytest.fixture
def servers(
    tmp_path: Path, native: FakeNative, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Prefill, Side, Slow]]:
    monkeypatch.setattr(streaming, "SEGMENT_TOKENS", 16)
    slow = Slow()
    made = [
        Side(native, role, shape_of(1, 4, 8), tmp_path, clock=lambda: native.now)
        for role in ("prefill", "decode")
    ]
    for side in made:
        side.scheduler._contents.adapters = Adapters(slow, lambda: native.now)
    yield Prefill(made[0]), made[1], slow
    for side in made:
        side.close()


def test_a_stream_begins_when_its_adapter_is_read(
    servers: tuple[Prefill, Side, Slow], tmp_path: Path
) -> None:
    p, d, slow = servers
    adapter = lora(weights(tmp_path / "lora"))
    template = p.template(prompt(5), [23])
    params = {"do_remote_decode": True, "kvik": {"stream": {"seed": SEED, "of": template}}}
    sent = request("p-1", prompt(LENGTH), params, lora_request=adapter)
    wanted = request("d-1", prompt(LENGTH), decode_params(template), lora_request=adapter)
    for side, one in ((p.side, sent), (d, wanted)):
        side.scheduler.on_new_request(one)
        assert one.request_id in slow.asked, "it is read from its arrival on"
        assert side.scheduler.get_num_new_matched_tokens(one, 0) == (None, False)
    slow.held = False
    assert p.side.scheduler.get_num_new_matched_tokens(sent, 0) == (0, False)
    assert p.side.scheduler.is_sending("p-1")
    assert d.scheduler.get_num_new_matched_tokens(wanted, 0) == (LENGTH, True)


def test_nobody_waits_for_ever(
    servers: tuple[Prefill, Side, Slow], native: FakeNative, tmp_path: Path
) -> None:
    p, d, _ = servers
    adapter = lora(weights(tmp_path / "lora"))
    template = p.template(prompt(5), [23])
    params = {"do_remote_decode": True, "kvik": {"stream": {"seed": SEED, "of": template}}}
    sent = request("p-1", prompt(LENGTH), params, lora_request=adapter)
    wanted = request("d-1", prompt(LENGTH), decode_params(template), lora_request=adapter)
    for side, one in ((p.side, sent), (d, wanted)):
        side.scheduler.on_new_request(one)
        assert side.scheduler.get_num_new_matched_tokens(one, 0) == (None, False)
    native.now += PATIENCE_S
    for side, one in ((p.side, sent), (d, wanted)):
        assert side.scheduler.get_num_new_matched_tokens(one, 0) == (0, False)
    assert p.side.scheduler.counters["not_streamed_adapter_uncertain"] == 1
    assert d.scheduler.counters["recomputed_adapter_uncertain"] == 1
    sent.num_computed_tokens, sent.status = LENGTH, Status.FINISHED_LENGTH_CAPPED
    assert p.side.scheduler.request_finished(sent, (BLOCKS,)) == (False, None)


def test_an_adapter_that_lies_nowhere_is_not_known() -> None:
    """A name of a hub that nothing was downloaded of, and a path that is not there."""
    for path in (Path("nobody/nothing"), Path("/nowhere")):
        adapters, one = Adapters(clock=lambda: 0.0), request("r-1", prompt(4), lora_request=lora(path))
        until = time.monotonic() + 60.0
        while not adapters.settled(one):
            assert time.monotonic() < until
            time.sleep(0.001)
        with pytest.raises(RefusedError, match=r"not found|cannot be read"):
            adapters.told(one)


def test_each_of_many_requests_has_its_digest_when_its_turn_comes(tmp_path: Path) -> None:
    """However many are in the queue, and long after they have arrived; those that have left are forgotten."""
    now, adapter = [0.0], lora(weights(tmp_path / "lora"))
    digests = Digests()
    adapters = Adapters(digests, lambda: now[0])
    many = [request(f"r-{number}", prompt(4), lora_request=adapter) for number in range(6000)]
    for one in many:
        adapters.settled(one)
    until = time.monotonic() + 60.0
    while adapters.content(many[-1]) is None:
        assert time.monotonic() < until
        time.sleep(0.001)
    now[0] += 2 * PATIENCE_S
    assert len({adapters.told(one) for one in many}) == 1
    for one in many:
        adapters.forget(one)
    assert not digests._made
    assert not adapters._arrivals


def test_what_a_name_stood_for_is_known_of_a_request_that_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended while another adapter was read, and the engine's cache keeps its KV under the name: another
    one of the name may be given that."""
    go, large = threading.Event(), weights(tmp_path / "large")

    def held(folder: str) -> bytes:
        assert go.wait(60.0) or folder != str(large)
        return files_digest(folder)

    monkeypatch.setattr("kvik.handover.adapters.files_digest", held)
    digests = Digests()
    adapters, path = Adapters(digests, lambda: 0.0), weights(tmp_path / "sql", b"one")
    first = request("r-1", prompt(4), lora_request=lora(large, 1, "large"))
    ended = request("r-2", prompt(4), lora_request=lora(path, 2, "sql"))
    assert not adapters.settled(first)
    assert not adapters.settled(ended)
    adapters.forget(ended)
    go.set()
    read(adapters, first)
    # Behind the ended one's, on the one thread.
    read(adapters, request("r-3", prompt(4), lora_request=lora(large, 1, "large")))
    weights(path, b"two")
    again = request("r-4", prompt(4), lora_request=lora(path, 3, "sql"))
    read(adapters, again)
    with pytest.raises(RefusedError, match="adapter 'sql'"):
        adapters.check(again)
    assert set(digests._made) == {"r-1", "r-3", "r-4"}


def read(adapters: Adapters, one: Any) -> None:
    """Until the adapter of a request is read."""
    until = time.monotonic() + 60.0
    while adapters.content(one) is None:
        assert time.monotonic() < until
        time.sleep(0.001)
