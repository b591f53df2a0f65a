"""Handovers in parts: each is read as soon as it is written, none before, and none of another prompt."""

from __future__ import annotations

import contextlib
import itertools
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kvik
from kvik.handover import streaming
from kvik.handover.items import Items
from kvik.handover.protocol import KvShape
from tests.busy import Watch
from tests.python.fake_engine import FakeNative
from tests.python.handover_harness import Rank, Side, Status, StepResult, prompt, request, shape_of
from tests.python.stream_harness import SEED, Prefill, decode_params

LIMIT = 60.0  # seconds for a busy machine
LENGTH = 45  # tokens: three segments of 16, the last of them partial
FREE = [9, 4, 13, 2, 7, 11, 5, 14, 3, 12, 21, 0, 18, 6, 23]  # KV blocks in no order
OURS = FREE[1:] + FREE[:1]
SHAPES = {
    "equal": (shape_of(1, 4, 8, layers=5), shape_of(1, 4, 8, layers=5)),
    "1 to 2": (shape_of(1, 8, 8, layers=3), shape_of(2, 8, 8, layers=3)),
    "4 to 2": (shape_of(4, 8, 8), shape_of(2, 8, 8)),
    "8 with copies to 2": (shape_of(8, 4, 8), shape_of(2, 4, 8)),
    "stages 1 to 2": (shape_of(1, 4, 8, stages=(5,)), shape_of(1, 4, 8, stages=(2, 3))),
    "stages 3 to 2, blocks 4 to 8": (shape_of(1, 4, 4, stages=(1, 3, 1)), shape_of(1, 4, 8, stages=(2, 3))),
    "MLA 2 to 4": (shape_of(2, 1, 8, kind="mla"), shape_of(4, 1, 8, kind="mla")),
    "blocks 8 to 4, ranks 2 to 4": (shape_of(2, 4, 8, layers=4), shape_of(4, 4, 4, layers=4)),
    "blocks 4 to 16, ranks 2 to 1": (shape_of(2, 4, 4, layers=9), shape_of(1, 4, 16, layers=9)),
}


@pytest.fixture(autouse=True)
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "SEGMENT_TOKENS", 16)


@contextlib.contextmanager
def servers(
    shapes: tuple[KvShape, KvShape], folder: Path, native: Any = kvik, transport: str = "tcp"
) -> Iterator[tuple[Prefill, Side]]:
    clock = time.monotonic if native is kvik else lambda: native.now
    with contextlib.ExitStack() as stack:
        pair = []
        for role, shape in zip(("prefill", "decode"), shapes, strict=True):
            side = Side(native, role, shape, folder, transport=transport, clock=clock)
            stack.callback(side.close)
            pair.append(side)
        yield Prefill(pair[0]), pair[1]


def until(step: Callable[[], StepResult], found: Callable[[StepResult], bool]) -> StepResult:
    """Step as a serving engine does until a step's result is as wanted; fails at the time limit."""
    end = time.monotonic() + LIMIT
    while not found(result := step()):
        assert time.monotonic() < end, f"not within {LIMIT} s"
        time.sleep(0.001)  # the pause of an engine that has only this to wait for
    return result


def template_of(p: Prefill) -> dict[str, Any]:
    """The template, from an answer before; its offer's blocks are given back."""
    template = p.template(prompt(5, first=9000), [23])
    p.side.step()
    return template


def blocks_of(shape: KvShape, blocks: list[int]) -> list[int]:
    return blocks[: -(-LENGTH // shape.block_tokens)]


def all_back(p: Prefill) -> None:
    """Every block that was held for a stream is free; the offer of the template is vLLM's own affair."""
    until(p.side.step, lambda _: not p.streams())


def clear(side: Side, blocks: list[int]) -> None:
    """These KV blocks hold nothing of an earlier request."""
    for rank in side.ranks:
        rank.kv[:, blocks] = 0


def parts_of(p: Prefill) -> int:
    """Parts of the prompt that a decode server of one rank reads."""
    return 3 * sum(min(8, stage) for stage in p.side.shape.stages)


@pytest.mark.parametrize("transport", ["tcp", "local"])
@pytest.mark.parametrize("name", SHAPES)
def test_handover_in_parts(tmp_path: Path, name: str, transport: str) -> None:
    """Decode asks before anything is computed; three chunks, each layer said, and all is there."""
    with servers(SHAPES[name], tmp_path, transport=transport) as (p, d):
        template, theirs, ours = template_of(p), blocks_of(p.side.shape, FREE), blocks_of(d.shape, OURS)
        p.begin(prompt(LENGTH), theirs, template)
        assert d.admit(request("d-1", prompt(LENGTH), decode_params(template)), ours) == LENGTH
        assert not d.step().received
        for end in (10, 32, LENGTH):
            p.chunk(end)
        params = p.finish()
        assert "do_remote_prefill" not in params
        assert params["kvik"]["stream"]["version"] == streaming.STREAM_VERSION
        result = until(d.step, lambda step: step.received == {"d-1"})
        assert not result.invalid
        assert d.holds(ours, range(LENGTH))
        all_back(p)
        lines = [line for line in d.records() if line["outcome"] == "loaded"]
        assert {line["transport"] for line in lines} == {transport}
        assert len(lines) >= parts_of(p)
        sent = [line for line in p.side.records() if line["outcome"] == "sent"]
        assert [line["reason"] for line in sent] == ["consumed"] * len(p.side.ranks)


def test_a_part_leaves_while_the_next_layer_is_computed(tmp_path: Path) -> None:
    """Before each layer but the first, decode has the ones before it already, and only these."""
    with servers(SHAPES["equal"], tmp_path) as (p, d):
        template, theirs, ours = template_of(p), blocks_of(p.side.shape, FREE), blocks_of(d.shape, OURS)
        p.begin(prompt(LENGTH), theirs, template)
        d.admit(request("d-1", prompt(LENGTH), decode_params(template)), ours)

        def looked(_: Rank, layer: int) -> None:
            there = lambda _: all(d.ranks[0].kv[before, ours[:-1]].all() for before in range(layer))  # noqa: E731
            until(d.step, there)
            assert not d.ranks[0].kv[layer:, ours].any(), "a layer has come before it was written"

        d.step()
        result = p.chunk(LENGTH, between=looked)
        assert not result.sent
        p.finish()
        until(d.step, lambda step: step.received == {"d-1"})
        assert d.holds(ours, range(LENGTH))


def test_a_range_of_layers_waits_for_its_last(tmp_path: Path) -> None:
    """Nine layers in eight ranges: the range of two is granted after its second."""
    native = FakeNative()
    with servers((shape_of(1, 4, 8, layers=9),) * 2, tmp_path, native) as (p, d):
        template, theirs, ours = template_of(p), blocks_of(p.side.shape, FREE), blocks_of(d.shape, OURS)
        p.begin(prompt(LENGTH), theirs, template)
        d.admit(request("d-1", prompt(LENGTH), decode_params(template)), ours)
        seen: list[int] = []

        def looked(_: Rank, layer: int) -> None:
            d.step()
            seen.append(sum(bool(one.any()) for one in d.ranks[0].kv))
            assert seen[-1] <= layer

        d.step()
        p.chunk(LENGTH, between=looked)
        assert seen == [0, 1, 2, 3, 4, 5, 6, 7, 7]


@pytest.mark.parametrize("says", [True, False])
def test_engines_that_do_not_say_their_layers_hand_over_by_chunks(tmp_path: Path, says: bool) -> None:
    with servers(SHAPES["equal"], tmp_path) as (p, d):
        template, theirs, ours = template_of(p), blocks_of(p.side.shape, FREE), blocks_of(d.shape, OURS)
        p.begin(prompt(LENGTH), theirs, template)
        d.admit(request("d-1", prompt(LENGTH), decode_params(template)), ours)
        d.step()
        p.chunk(16, says=says)
        p.chunk(LENGTH, says=says)
        p.finish()
        p.side.step()
        assert not until(d.step, lambda step: step.received == {"d-1"}).invalid
        assert d.holds(ours, range(LENGTH))


@pytest.mark.parametrize(
    ("theirs_local", "ours_local"), list(itertools.product((0, 8, 16, 40), (0, 8, 16, 24, 40)))
)
def test_cached_prefixes(tmp_path: Path, theirs_local: int, ours_local: int) -> None:
    """Either side may have a prefix already; parts that decode has wholly are given back."""
    native = FakeNative()
    with servers(SHAPES["equal"], tmp_path, native) as (p, d):
        template, theirs, ours = template_of(p), blocks_of(p.side.shape, FREE), blocks_of(d.shape, OURS)
        p.side.write(theirs, range(theirs_local))
        d.write(ours, range(ours_local))
        p.begin(prompt(LENGTH), theirs, template, local=theirs_local)
        wanted = request("d-1", prompt(LENGTH), decode_params(template))
        assert d.admit(wanted, ours, ours_local) == LENGTH - ours_local
        d.step()
        p.chunk(LENGTH)
        p.finish()
        assert until(d.step, lambda step: step.received == {"d-1"}).invalid == set()
        assert d.holds(ours, range(LENGTH))
        all_back(p)


def test_every_order_of_grants_and_reads(tmp_path: Path) -> None:
    """Decode may begin at any step of prefill, also after its end."""
    for number, begins in enumerate(range(5)):
        with servers(SHAPES["4 to 2"], tmp_path) as (p, d):
            template, theirs, ours = template_of(p), blocks_of(p.side.shape, FREE), blocks_of(d.shape, OURS)
            p.begin(prompt(LENGTH), theirs, template)
            acts: list[Callable[[], Any]] = [lambda p=p, end=end: p.chunk(end) for end in (16, 32, LENGTH)]  # type: ignore[misc]
            acts.append(p.finish)
            wanted = request(f"d-{number}", prompt(LENGTH), decode_params(template))
            acts.insert(begins, lambda d=d, wanted=wanted, ours=ours: d.admit(wanted, ours))  # type: ignore[misc]
            begun: list[
                StepResult
            ] = []  # where all is granted, the step that begins the load may see its end
            acts.insert(begins + 1, lambda d=d, begun=begun: begun.append(d.step()))  # type: ignore[misc]
            for act in acts:
                act()
            ended = begun[0] if begun[0].received else until(d.step, lambda step: bool(step.received))
            assert not ended.invalid
            assert d.holds(ours, range(LENGTH))
            all_back(p)


def test_a_preempted_request_goes_on_elsewhere(tmp_path: Path) -> None:
    """What was granted before stays where it is, also when the engine writes the same blocks' neighbours."""
    with servers(SHAPES["equal"], tmp_path) as (p, d):
        template, theirs, ours = template_of(p), blocks_of(p.side.shape, FREE), blocks_of(d.shape, OURS)
        others = [block for block in range(24) if block not in [*theirs, 23]][: len(theirs)]
        p.begin(prompt(LENGTH), theirs, template)
        p.chunk(20)
        p.preempt(others)
        assert p.pool.used() >= set(theirs[:2]), "the blocks of a granted segment are free"
        for block in set(theirs[2:]):
            p.side.ranks[0].kv[:, block] = 7  # somebody else's
        p.chunk(33)
        p.chunk(LENGTH)
        p.finish()
        d.admit(request("d-1", prompt(LENGTH), decode_params(template)), ours)
        assert not until(d.step, lambda step: step.received == {"d-1"}).invalid
        assert d.holds(ours, range(LENGTH))
        all_back(p)


@pytest.mark.parametrize("at", range(8))
def test_aborted_at_any_part(tmp_path: Path, at: int) -> None:
    """Prefill's client leaves: what was granted ends, blocks come back, and decode computes the prompt."""
    with servers(SHAPES["equal"], tmp_path) as (p, d):
        template, theirs, ours = template_of(p), blocks_of(p.side.shape, FREE), blocks_of(d.shape, OURS)
        p.begin(prompt(LENGTH), theirs, template)
        wanted = request("d-1", prompt(LENGTH), decode_params(template))
        d.admit(wanted, ours)
        d.step()
        for end in (10, 16, 20, 30, 32, 40, LENGTH)[:at]:
            p.chunk(end)
        assert p.finish(status=Status.FINISHED_ABORTED) is None
        p.side.step()
        all_back(p)
        wanted.status = Status.FINISHED_ABORTED
        d.scheduler.request_finished(wanted, (ours,))
        until(d.step, lambda step: step.received == {"d-1"})


def test_decode_leaves_in_the_middle(tmp_path: Path) -> None:
    """Its reads are cancelled, and what it was granted comes back when it says so, not at the expiry."""
    with servers(SHAPES["1 to 2"], tmp_path) as (p, d):
        template, theirs, ours = template_of(p), blocks_of(p.side.shape, FREE), blocks_of(d.shape, OURS)
        p.begin(prompt(LENGTH), theirs, template)
        wanted = request("d-1", prompt(LENGTH), decode_params(template))
        d.admit(wanted, ours)
        d.step()
        p.chunk(16)
        d.scheduler.request_finished(wanted, (ours,))
        until(d.step, lambda step: step.received == {"d-1"})
        before = d.ranks[0].memory.copy()
        p.chunk(LENGTH)
        p.finish()
        end = time.monotonic() + LIMIT
        while p.streams():
            assert time.monotonic() < end
            d.step()
            p.side.step()
        assert (d.ranks[0].memory == before).all(), "KV has come after its end"


def told_of(d: Side, wanted: Any) -> tuple[str, str | None]:
    """How its answer says that a request came by its KV, and why; it ends here."""
    wanted.status = Status.FINISHED_LENGTH_CAPPED
    _, params = d.scheduler.request_finished(wanted, (OURS,))
    assert params is not None
    return params["kvik"]["outcome"], params["kvik"].get("reason")


def test_the_answer_to_a_streamed_request_says_that_it_was_loaded(tmp_path: Path) -> None:
    with servers(SHAPES["equal"], tmp_path, FakeNative()) as (p, d):
        template, theirs, ours = template_of(p), blocks_of(p.side.shape, FREE), blocks_of(d.shape, OURS)
        p.begin(prompt(LENGTH), theirs, template)
        wanted = request("d-1", prompt(LENGTH), decode_params(template))
        d.admit(wanted, ours)
        p.chunk(LENGTH)
        until(d.step, lambda step: step.received == {"d-1"})
        assert told_of(d, wanted) == ("loaded", None)


@pytest.mark.parametrize("after", range(4))
def test_a_prefill_engine_that_dies_ends_the_load_within_seconds(tmp_path: Path, after: int) -> None:
    """Its engine goes at any chunk: the load fails by name, all of its blocks are computed here."""
    with servers(SHAPES["4 to 2"], tmp_path) as (p, d):
        template, theirs, ours = template_of(p), blocks_of(p.side.shape, FREE), blocks_of(d.shape, OURS)
        p.begin(prompt(LENGTH), theirs, template)
        wanted = request("d-1", prompt(LENGTH), decode_params(template))
        d.admit(wanted, ours)
        d.step()
        for end in (16, 32, 40)[:after]:
            p.chunk(end)
        watch = Watch()
        p.side.close()
        result = until(d.step, lambda step: step.received == {"d-1"})
        assert watch.seconds() < 10.0
        assert result.invalid == set(ours)
        outcome, reason = told_of(d, wanted)
        assert outcome == "recomputed"
        assert reason in {line["reason"] for line in d.records()}


def test_a_step_that_fails_grants_nothing_more(tmp_path: Path) -> None:
    """Two layers are written, then the step fails: decode has these, and waits for the others."""
    native = FakeNative()
    with servers(SHAPES["equal"], tmp_path, native) as (p, d):
        template, theirs, ours = template_of(p), blocks_of(p.side.shape, FREE), blocks_of(d.shape, OURS)
        p.begin(prompt(LENGTH), theirs, template)
        d.admit(request("d-1", prompt(LENGTH), decode_params(template)), ours)
        p.chunk(LENGTH, layers=2)
        for _ in range(3):
            assert not d.step().received
        assert d.ranks[0].kv[:2, ours[:-1]].all()
        assert not d.ranks[0].kv[2:].any()
        native.now += 121
        assert d.step().invalid == set(ours)


@pytest.mark.parametrize("transport", ["tcp", "local"])
def test_another_prompts_seed_leads_to_nothing(tmp_path: Path, transport: str) -> None:
    """Both sides have the same seed, and not the same prompt: refused by name, nothing is written."""
    with servers(SHAPES["equal"], tmp_path, transport=transport) as (p, d):
        template, theirs, ours = template_of(p), blocks_of(p.side.shape, FREE), blocks_of(d.shape, OURS)
        p.begin(prompt(LENGTH), theirs, template)
        other = [*prompt(LENGTH)[:-1], 1]
        d.admit(request("d-1", [2, *other[1:]], decode_params(template)), ours)
        p.chunk(LENGTH)
        p.finish()
        assert until(d.step, lambda step: step.received == {"d-1"}).invalid == set(ours)
        assert {line["reason"] for line in d.records()} == {"content_mismatch"}
        assert not d.ranks[0].memory.any()


def test_the_common_segments_of_two_prompts_do_not_make_a_load(tmp_path: Path) -> None:
    """The last token differs: the segments before it are the same KV, and the load fails as one."""
    with servers(SHAPES["equal"], tmp_path) as (p, d):
        template, theirs, ours = template_of(p), blocks_of(p.side.shape, FREE), blocks_of(d.shape, OURS)
        p.begin(prompt(LENGTH), theirs, template)
        d.admit(request("d-1", [*prompt(LENGTH)[:-1], 1], decode_params(template)), ours)
        p.chunk(LENGTH)
        p.finish()
        assert until(d.step, lambda step: step.received == {"d-1"}).invalid == set(ours)
        assert "content_mismatch" in {line["reason"] for line in d.records()}


def test_what_is_not_this_servers_template_is_offered_instead(tmp_path: Path) -> None:
    """A template of an engine before its restart: prefill offers, and says its own template."""
    native = FakeNative()
    with servers(SHAPES["equal"], tmp_path, native) as (p, d):
        template, theirs, ours = template_of(p), blocks_of(p.side.shape, FREE), blocks_of(d.shape, OURS)
        p.begin(prompt(LENGTH), theirs, template | {"remote_engine_id": "before"})
        p.chunk(LENGTH)
        params = p.finish()
        assert params["do_remote_prefill"]
        assert params["kvik"]["stream"] == template | {"shapes": params["kvik"]["stream"]["shapes"]}
        p.side.step()
        assert d.admit(request("d-1", prompt(LENGTH), params), ours) == LENGTH
        until(d.step, lambda step: step.received == {"d-1"})
        assert d.holds(ours, range(LENGTH))
        assert p.side.scheduler.counters["not_streamed_stream_template"] == 1


def test_without_a_pool_nothing_is_handed_over_in_parts(tmp_path: Path) -> None:
    native = FakeNative()
    with servers(SHAPES["equal"], tmp_path, native) as (p, _):
        template = template_of(p)
        p.side.scheduler.held._pool = None
        p.begin(prompt(LENGTH), blocks_of(p.side.shape, FREE), template)
        p.chunk(LENGTH)
        assert p.finish()["do_remote_prefill"]
        assert p.side.scheduler.counters["not_streamed_stream_pool"] == 1


def test_kv_from_elsewhere_is_not_granted_before_it_is_there(tmp_path: Path) -> None:
    """The step begins with more tokens than the engine's own cache had: another connector brings them."""
    native = FakeNative()
    with servers(SHAPES["equal"], tmp_path, native) as (p, _):
        template = template_of(p)
        p.begin(prompt(LENGTH), blocks_of(p.side.shape, FREE), template, local=8)
        p.running["p-1"].computed = 16
        p.chunk(LENGTH)
        assert p.finish()["do_remote_prefill"]


@pytest.mark.parametrize(
    ("local", "loading", "streamed"), [(16, True, False), (16, False, True), (0, True, True)]
)
def test_what_another_request_waits_for_is_not_granted(
    tmp_path: Path, local: int, loading: bool, streamed: bool
) -> None:
    """The engine's cache may have given it blocks that another connector loads for another request of the
    step. One that has no block of the cache, or has begun before, has none of these."""
    with servers(SHAPES["equal"], tmp_path, FakeNative()) as (p, _):
        template = template_of(p)
        p.begin(prompt(LENGTH), blocks_of(p.side.shape, FREE), template, local=local)
        p.chunk(20, loading=loading)
        p.chunk(LENGTH, loading=True)
        assert p.finish().get("do_remote_prefill", False) != streamed


def test_what_is_not_certain_any_more_is_granted_no_further(tmp_path: Path) -> None:
    """Another image of the same name has arrived, with which the rest of the prompt may be computed."""

    def of(name: str) -> Any:
        place = SimpleNamespace(offset=20, length=2)
        return SimpleNamespace(identifier="same", modality="image", data=name.encode(), mm_position=place)

    native, items = FakeNative(), Items(lambda feature: bytes(feature.data))
    with servers(SHAPES["equal"], tmp_path, native) as (p, _):
        template = template_of(p)

        def granted() -> int:
            return sum(len(engine.grants) for engine in native.engines.values())

        before = granted()
        p.side.scheduler._contents.items = items
        p.begin(prompt(LENGTH), blocks_of(p.side.shape, FREE), template, mm_features=[of("one")])
        p.chunk(16)
        assert granted() - before == parts_of(p) // 3
        items.told(request("other", prompt(LENGTH), mm_features=[of("two")]))
        p.chunk(LENGTH)
        assert granted() - before == parts_of(p) // 3
        assert p.finish() is None
        all_back(p)


@pytest.mark.parametrize(
    "change",
    [
        {"seed": "5a"}, {"seed": "zz" * 32}, {"seed": 5}, {"of": None}, {"of": {}}, {"of": {"version": 2}},
        {"segment_tokens": 0}, {"segment_tokens": 12}, {"segment_tokens": "16"}, {"layer_parts": 65},
        {"layer_parts": 0}, {"tickets": []}, {"shapes": []}, {"namespace": "00" * 32},
        {"tickets": [{"group": 0, "tp": 0, "pp": 0, "dp": 0, "ticket": "no ticket"}]},
    ],
)  # fmt: skip
def test_parameters_that_cannot_be_used_are_recomputed(tmp_path: Path, change: dict[str, Any]) -> None:
    native = FakeNative()
    with servers(SHAPES["equal"], tmp_path, native) as (p, d):
        template = template_of(p)
        params = decode_params(template)
        stream = params["kvik"]["stream"]
        for key, value in change.items():
            (stream if key in stream else stream["of"])[key] = value
        wanted = request("d-1", prompt(LENGTH), params)
        assert d.admit(wanted, blocks_of(d.shape, OURS)) == 0
        (line,) = d.records()
        assert line["outcome"] == "recomputed"
        assert told_of(d, wanted) == ("recomputed", line["reason"])


def test_more_streams_than_a_peer_lets_wait_are_asked_for_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    native = FakeNative()
    with servers(SHAPES["equal"], tmp_path, native) as (p, d):
        template = template_of(p)
        monkeypatch.setattr("kvik.handover.scheduler.MAX_OPEN_PARTS", 40)
        first = [request(f"d-{n}", prompt(LENGTH), decode_params(template, f"{n:064x}")) for n in range(3)]
        for one in first[:2]:
            assert d.admit(one, OURS[:6]) == LENGTH
            d.step()
        d.scheduler.on_new_request(first[2])
        assert d.scheduler.get_num_new_matched_tokens(first[2], 0) == (None, False)
        native.now += 121
        assert d.step().received
        assert d.scheduler.get_num_new_matched_tokens(first[2], 0) == (LENGTH, True)


@dataclass
class Life:
    """One request on both servers, whose events come at random steps of prefill."""

    p: Prefill
    d: Side
    rng: random.Random
    number: int
    template: dict[str, Any]
    computed: int = 0
    admitted: bool = False
    gone: bool = False
    done: bool = False
    invalid: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.theirs, self.ours = (
            blocks_of(side.shape, self.rng.sample(range(23), 23)) for side in (self.p.side, self.d)
        )
        for side, blocks in ((self.p.side, self.theirs), (self.d, self.ours)):
            clear(side, blocks)
        self.tokens, self.name = prompt(LENGTH, 100 + self.number), f"p-{self.number}"
        seed = f"{self.rng.getrandbits(256):064x}"
        self.wanted = request(f"d-{self.number}", self.tokens, decode_params(self.template, seed))
        self.p.begin(self.tokens, self.theirs, self.template, seed=seed, request_id=self.name)

    def admit(self) -> None:
        self.d.admit(self.wanted, self.ours)
        self.admitted = True

    def leave(self) -> None:
        self.d.scheduler.request_finished(self.wanted, (self.ours,))
        self.gone = True

    def step_decode(self) -> None:
        result = self.d.step()
        self.done |= self.wanted.request_id in result.received
        self.invalid |= result.invalid

    def chunk(self) -> None:
        """Prefill goes on, perhaps in other blocks from the beginning."""
        if self.rng.random() < 0.15 and self.computed:
            rest = [block for block in range(23) if block not in self.p.pool.used()]
            if len(rest) >= len(self.theirs):
                clear(self.p.side, rest)
                self.p.preempt(rest[: len(self.theirs)], self.name)
                self.computed = 0
        self.computed = min(LENGTH, self.computed + self.rng.randrange(1, 20))
        self.p.chunk(self.computed, self.name)

    def run(self) -> None:
        begins, aborts, leaves = (self.rng.randrange(8) for _ in range(3))
        for step in itertools.count():
            if step == begins:
                self.admit()
            if step == leaves and self.admitted:
                self.leave()
            self.step_decode()
            if self.computed == LENGTH or step == aborts:
                break
            self.chunk()
        whole = self.computed == LENGTH
        self.p.finish(self.name, Status.FINISHED_LENGTH_CAPPED if whole else Status.FINISHED_ABORTED)
        self.p.side.step()
        if not self.admitted:
            self.admit()
        if not whole and not self.gone:
            self.leave()

    def check(self) -> None:
        """The load ends; right KV where there should be, and every block back."""
        end = time.monotonic() + LIMIT
        while not self.done or self.p.streams():
            assert time.monotonic() < end, f"life {self.number}: {self}"
            self.step_decode()
            self.p.side.step()
        assert self.gone or (not self.invalid and self.d.holds(self.ours, range(LENGTH))), self


def test_random_lives(tmp_path: Path) -> None:
    """Chunks, preemptions, aborts and leaving clients in any order: never wrong KV, and all blocks back."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    names = ["equal", "4 to 2", "stages 1 to 2", "blocks 8 to 4, ranks 2 to 4"]
    with servers(SHAPES[rng.choice(names)], tmp_path) as (p, d):
        template = template_of(p)
        for number in range(12):
            life = Life(p, d, rng, number, template)
            life.run()
            life.check()


def test_the_seed_is_in_no_name() -> None:
    seed = bytes.fromhex(SEED)
    ids = {streaming.grant_id(seed, *place) for place in itertools.product(range(3), repeat=3)}
    assert len(ids) == 27
    assert all(len(bytes.fromhex(one)) == 16 for one in ids)
    assert SEED[:8] not in streaming.stream_id(seed)
