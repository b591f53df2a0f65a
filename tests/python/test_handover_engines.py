"""The same handovers through real engines: unequal ranks and KV blocks, over each transport."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import kvik
from kvik.handover.protocol import KvShape
from tests.python.handover_harness import ITEM, Side, StepResult, prompt, request, shape_of

LIMIT = 60.0  # seconds for a busy machine
FREE = [9, 4, 13, 2, 7, 11, 5, 14, 3, 12, 21, 0, 18, 6, 23]  # KV blocks in no order
LENGTH, LOCAL = 45, 16  # tokens of the prompt, and of the prefix that decode has already
SHAPES = {
    "1 to 2": (shape_of(1, 8, 8), shape_of(2, 8, 8)),
    "4 to 2": (shape_of(4, 8, 8), shape_of(2, 8, 8)),
    "3 to 2": (shape_of(3, 6, 8), shape_of(2, 6, 8)),
    "8 with copies to 2": (shape_of(8, 4, 8), shape_of(2, 4, 8)),
    "stages 1 to 2": (shape_of(1, 4, 8, stages=(5,)), shape_of(1, 4, 8, stages=(2, 3))),
    "stages 2 to 1, ranks 1 to 2": (shape_of(1, 4, 8, stages=(2, 3)), shape_of(2, 4, 8, stages=(5,))),
    "stages 3 to 2, blocks 4 to 8": (shape_of(1, 4, 4, stages=(1, 3, 1)), shape_of(1, 4, 8, stages=(2, 3))),
    "MLA 4 to 2": (shape_of(4, 1, 8, kind="mla"), shape_of(2, 1, 8, kind="mla")),
    "MLA 2 to 4": (shape_of(2, 1, 8, kind="mla"), shape_of(4, 1, 8, kind="mla")),
    "blocks 4 to 8": (shape_of(1, 4, 4), shape_of(1, 4, 8)),
    "blocks 8 to 4": (shape_of(1, 4, 8), shape_of(1, 4, 4)),
    "blocks 8 to 4, ranks 2 to 4": (shape_of(2, 4, 8), shape_of(4, 4, 4)),
    "blocks 4 to 16, ranks 2 to 1": (shape_of(2, 4, 4), shape_of(1, 4, 16)),
    "heads inside, blocks 8 to 4": (shape_of(2, 4, 8, order="NHC"), shape_of(2, 4, 4, order="NHC")),
}


@contextlib.contextmanager
def servers(shapes: tuple[KvShape, KvShape], folder: Path, transport: str) -> Iterator[tuple[Side, Side]]:
    with contextlib.ExitStack() as stack:
        pair = []
        for role, shape in zip(("prefill", "decode"), shapes, strict=True):
            side = Side(kvik, role, shape, folder, transport=transport)
            stack.callback(side.close)
            pair.append(side)
        yield pair[0], pair[1]


def until(server: Side, found: Callable[[StepResult], bool]) -> StepResult:
    """Step as a serving engine does until a step's result is as wanted; fails at the time limit."""
    end = time.monotonic() + LIMIT
    while not found(result := server.step()):
        assert time.monotonic() < end, f"not within {LIMIT} s"
        time.sleep(0.001)  # the pause of an engine that has only this to wait for
    return result


@pytest.mark.parametrize("transport", ["tcp", "local"])
@pytest.mark.parametrize("name", SHAPES)
def test_handover(tmp_path: Path, name: str, transport: str) -> None:
    with servers(SHAPES[name], tmp_path, transport) as (p, d):
        theirs = FREE[: -(-LENGTH // p.shape.block_tokens)]
        ours = FREE[1 : 1 + -(-LENGTH // d.shape.block_tokens)]
        params = p.offer(prompt(LENGTH), theirs)
        p.step()
        d.write(ours, range(LOCAL))
        assert d.admit(request("d-1", prompt(LENGTH), params), ours, LOCAL) == LENGTH - LOCAL
        result = until(d, lambda step: step.received == {"d-1"})
        assert not result.invalid
        assert d.holds(ours, range(LENGTH))
        until(p, lambda step: step.sent == {"p-1"})
        lines = d.records()
        assert {(line["outcome"], line["transport"]) for line in lines} == {("loaded", transport)}
        part = min(p.shape.block_tokens, d.shape.block_tokens)
        tokens = -(-LENGTH // part) * part - LOCAL
        whole = d.shape.tp * d.shape.layers * d.shape.heads * tokens * d.shape.content * ITEM
        assert sum(line["bytes"] for line in lines) == whole


@pytest.mark.parametrize("transport", ["tcp", "local"])
def test_an_idle_step_waits_for_a_load_and_no_longer(tmp_path: Path, transport: str) -> None:
    """For its end, good or bad, or for the time that it was given."""
    with servers(SHAPES["blocks 4 to 8"], tmp_path, transport) as (p, d):
        ours, worker = FREE[1:7], d.ranks[0].worker
        params = [
            p.offer(prompt(LENGTH, first=first), FREE[:12], name)
            for name, first in (("p-1", 100), ("p-2", 300))
        ]
        other = {**params[0], "kvik": {**params[0]["kvik"], "tickets": params[1]["kvik"]["tickets"]}}
        d.admit(request("d-1", prompt(LENGTH), params[0]), ours)
        worker.begin_step(d.scheduler.take_plan())
        began = time.monotonic()
        assert worker.collect(0.05) == (set(), set())  # prefill has not granted it yet
        assert 0.05 <= time.monotonic() - began < LIMIT
        p.step()
        assert worker.collect(LIMIT) == (set(), {"d-1"})
        d.admit(request("d-2", prompt(LENGTH), other), ours)
        worker.begin_step(d.scheduler.take_plan())
        assert worker.collect(LIMIT) == (set(), {"d-2"})
        assert worker.take_invalid_blocks() == set(ours)
        assert time.monotonic() - began < LIMIT


def test_an_idle_step_waits_for_a_send_and_no_longer(tmp_path: Path) -> None:
    """For its end, or for the time that it was given; not where it is told not to."""
    with servers(SHAPES["blocks 4 to 8"], tmp_path, "tcp") as (p, d):
        worker, began = p.ranks[0].worker, time.monotonic()
        assert worker.collect(LIMIT) == (set(), set())  # nothing is sent
        params = p.offer(prompt(LENGTH), FREE[:12])
        worker.begin_step(p.scheduler.take_plan())
        assert worker.collect(LIMIT, for_sends=False) == (set(), set())
        assert time.monotonic() - began < LIMIT
        began = time.monotonic()
        assert worker.collect(0.05) == (set(), set())  # nobody has read it
        assert 0.05 <= time.monotonic() - began < LIMIT
        d.admit(request("d-1", prompt(LENGTH), params), FREE[1:7])
        d.ranks[0].worker.begin_step(d.scheduler.take_plan())
        assert worker.collect(LIMIT) == ({"p-1"}, set())
        assert time.monotonic() - began < LIMIT


@pytest.mark.parametrize("transport", ["tcp", "local"])
@pytest.mark.parametrize(
    "name", ["4 to 2", "1 to 2", "stages 3 to 2, blocks 4 to 8", "MLA 2 to 4", "blocks 8 to 4, ranks 2 to 4"]
)
def test_tickets_of_another_prompt_lead_to_nothing(tmp_path: Path, name: str, transport: str) -> None:
    """The owner refuses by name, nothing is written, and both prompts still find their KV."""
    with servers(SHAPES[name], tmp_path, transport) as (p, d):
        count = -(-LENGTH // p.shape.block_tokens)
        ours = FREE[1 : 1 + -(-LENGTH // d.shape.block_tokens)]
        own = p.offer(prompt(LENGTH), FREE[:count])
        other = p.offer(
            prompt(LENGTH, first=200),
            [block for block in range(24) if block not in FREE[:count]][:count],
            "p-2",
        )
        p.step()
        swapped = {**own, "kvik": {**own["kvik"], "tickets": other["kvik"]["tickets"]}}
        assert d.admit(request("d-1", prompt(LENGTH), swapped), ours) == LENGTH
        results = [until(d, lambda step: "d-1" in step.received)]
        assert set().union(*(result.invalid for result in results)) == set(ours)
        assert {(line["outcome"], line["reason"]) for line in d.records()} == {("failed", "content_mismatch")}
        assert not any(rank.memory.any() for rank in d.ranks)
        for number, (tokens, params) in enumerate(
            ((prompt(LENGTH, first=200), other), (prompt(LENGTH), own))
        ):
            d.admit(request(f"d-{number + 2}", tokens, params), ours)
            ended = f"d-{number + 2}"
            assert not until(d, lambda step, ended=ended: ended in step.received).invalid  # type: ignore[misc]
        assert d.holds(ours, range(LENGTH))


@pytest.mark.parametrize("name", ["4 to 2", "1 to 2", "8 with copies to 2", "MLA 2 to 4"])
def test_an_offer_that_is_not_taken_comes_back(tmp_path: Path, name: str) -> None:
    with servers(SHAPES[name], tmp_path, "tcp") as (p, d):
        params = p.offer(prompt(LENGTH), FREE[:6])
        p.step()
        wanted = request("d-1", prompt(LENGTH), params)
        d.scheduler.on_new_request(wanted)
        d.scheduler.request_finished(wanted, ([],))
        d.step()
        until(p, lambda step: step.sent == {"p-1"})
