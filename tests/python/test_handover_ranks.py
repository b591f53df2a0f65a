"""Handovers between servers with unequal ranks and KV blocks: every element of the KV in its place."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest

from kvik.handover.mapping import heads_of
from kvik.handover.protocol import KvShape
from tests.python.fake_engine import FakeNative
from tests.python.handover_harness import ITEM, Side, Status, prompt, request, shape_of

FREE = [9, 4, 13, 2, 7, 11, 5, 14, 3, 12, 21, 0, 18, 6, 23]  # KV blocks in no order
RANKS = [(theirs, ours) for theirs, ours in itertools.product((1, 2, 4, 8), repeat=2)]


@pytest.fixture
def native() -> FakeNative:
    return FakeNative()


def pair(native: FakeNative, folder: Path, prefill: KvShape, decode: KvShape) -> tuple[Side, Side]:
    clock = lambda: native.now  # noqa: E731
    return (
        Side(native, "prefill", prefill, folder, clock=clock),
        Side(native, "decode", decode, folder, clock=clock),
    )


def blocks_of(shape: KvShape, tokens: int, first: int = 0) -> list[int]:
    return FREE[first : first + -(-tokens // shape.block_tokens)]


def grants(p: Side, params: dict[str, Any]) -> list[Any]:
    tickets = [p.native.Ticket(entry["ticket"]) for entry in params["kvik"]["tickets"]]
    return [p.native.engines[ticket.engine_id].grants[ticket.grant_id] for ticket in tickets]


def hand_over(p: Side, d: Side, length: int, local_tokens: int = 0) -> dict[str, Any]:
    """One request from its prefill to the end of its load; every check that does not depend on the shapes."""
    params = p.offer(prompt(length), blocks_of(p.shape, length))
    p.step()
    ours = blocks_of(d.shape, length, first=1)
    d.write(ours, range(local_tokens))  # a local prefix hit
    assert d.admit(request("d-1", prompt(length), params), ours, local_tokens) == length - local_tokens
    result = d.step()
    assert result.received == {"d-1"}
    assert not result.invalid
    assert d.holds(ours, range(length))
    d.step()
    assert p.step().sent == {"p-1"}
    assert [grant.state for grant in grants(p, params)] == ["consumed"] * p.shape.ranks
    for grant in grants(p, params):  # each engine says it once, and nobody says it too much
        assert len(grant.confirmed) == len(set(grant.confirmed)) == grant.declared
    for server in (p, d):
        idle = server.step()
        assert not (idle.sent | idle.received | idle.invalid)
    return params


def moved_bytes(p: Side, d: Side, first: int, end: int) -> dict[int, int]:
    """By arithmetic, of each decode rank: whole parts of the tokens, of all its heads, in every layer."""
    part = math.gcd(p.shape.block_tokens, d.shape.block_tokens)
    parts = -(-end // part) - first // part
    one_layer = d.shape.heads * parts * part * d.shape.content * ITEM
    return {rank: d.shape.stages[rank // d.shape.tp] * one_layer for rank in range(d.shape.ranks)}


def reported_bytes(d: Side) -> dict[int, int]:
    sums: dict[int, int] = {}
    for line in d.records():
        assert (line["outcome"], line["request_id"]) == ("loaded", "d-1")
        sums[line["rank"]] = sums.get(line["rank"], 0) + line["bytes"]
    return sums


@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
@pytest.mark.parametrize(("theirs", "ours"), RANKS)
def test_unequal_ranks(native: FakeNative, tmp_path: Path, theirs: int, ours: int, kv_heads: int) -> None:
    p, d = pair(native, tmp_path, shape_of(theirs, kv_heads), shape_of(ours, kv_heads))
    hand_over(p, d, length=10)
    assert reported_bytes(d) == moved_bytes(p, d, 0, 10)
    for line in d.records():  # a line is about one rank of each side, which share a head
        remote, local = (
            set(range(*heads_of(line[name], tp, kv_heads)))
            for name, tp in (("remote_rank", theirs), ("rank", ours))
        )
        assert remote & local


@pytest.mark.parametrize(("theirs", "ours"), [(3, 6), (6, 3), (2, 3), (3, 2), (6, 4), (1, 6)])
def test_unequal_ranks_that_do_not_divide_each_other(
    native: FakeNative, tmp_path: Path, theirs: int, ours: int
) -> None:
    p, d = pair(native, tmp_path, shape_of(theirs, 12), shape_of(ours, 12))
    hand_over(p, d, length=7)
    assert reported_bytes(d) == moved_bytes(p, d, 0, 7)


@pytest.mark.parametrize(
    ("theirs", "ours"), list(itertools.product(((4,), (2, 2), (3, 1), (1, 2, 1)), repeat=2))
)
@pytest.mark.parametrize("tp", [(1, 1), (2, 1), (1, 2), (4, 2)])
def test_pipeline_stages(
    native: FakeNative, tmp_path: Path, theirs: tuple[int, ...], ours: tuple[int, ...], tp: tuple[int, int]
) -> None:
    """Any division of the layers meets any other, also with unequal tensor-parallel ranks."""
    p, d = pair(native, tmp_path, shape_of(tp[0], 4, stages=theirs), shape_of(tp[1], 4, stages=ours))
    hand_over(p, d, length=10, local_tokens=4)
    assert reported_bytes(d) == moved_bytes(p, d, 4, 10)


def test_copies_of_a_stage_that_nobody_reads_come_back(native: FakeNative, tmp_path: Path) -> None:
    """Eight ranks with copies of two heads, in two stages; the one reader wants a copy of each a stage."""
    p, d = pair(native, tmp_path, shape_of(4, 2, stages=(1, 1)), shape_of(1, 2, stages=(2,)))
    hand_over(p, d, length=9)
    assert len(d.records()) == 4


@pytest.mark.parametrize(("theirs", "ours"), RANKS)
def test_mla(native: FakeNative, tmp_path: Path, theirs: int, ours: int) -> None:
    """Each decode rank reads the whole latent once; copies that nobody reads are given back."""
    p, d = pair(native, tmp_path, *(shape_of(tp, 1, kind="mla") for tp in (theirs, ours)))
    hand_over(p, d, length=9)
    assert reported_bytes(d) == moved_bytes(p, d, 0, 9)
    assert [(line["rank"], line["remote_rank"]) for line in d.records()] == [
        (rank, rank % theirs) for rank in range(ours)
    ]


@pytest.mark.parametrize("length", [2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 23])
@pytest.mark.parametrize(("theirs", "ours"), [(4, 8), (8, 4), (2, 8), (8, 2), (4, 6)])
@pytest.mark.parametrize("ranks", [(1, 1), (2, 1), (1, 2)])
def test_unequal_blocks(
    native: FakeNative, tmp_path: Path, theirs: int, ours: int, length: int, ranks: tuple[int, int]
) -> None:
    """Several heads a rank, so that a block's tokens are not one run; partial last blocks on either side."""
    p, d = pair(native, tmp_path, shape_of(ranks[0], 4, theirs), shape_of(ranks[1], 4, ours))
    hand_over(p, d, length)
    assert reported_bytes(d) == moved_bytes(p, d, 0, length)


@pytest.mark.parametrize("local_blocks", [1, 2, 3])
def test_a_local_prefix_may_end_inside_a_remote_block(
    native: FakeNative, tmp_path: Path, local_blocks: int
) -> None:
    p, d = pair(native, tmp_path, shape_of(1, 2, 8), shape_of(2, 2, 2))
    hand_over(p, d, length=15, local_tokens=2 * local_blocks)
    assert reported_bytes(d) == moved_bytes(p, d, 2 * local_blocks, 15)


def test_a_local_prefix_before_remote_blocks(native: FakeNative, tmp_path: Path) -> None:
    p, d = pair(native, tmp_path, shape_of(2, 4, 4), shape_of(1, 4, 8))
    hand_over(p, d, length=21, local_tokens=8)
    assert reported_bytes(d) == moved_bytes(p, d, 8, 21)


def test_a_longer_prompt_takes_whole_local_blocks(native: FakeNative, tmp_path: Path) -> None:
    """Of 15 offered tokens 12 fill blocks of 6; the rest is computed with the tokens that follow."""
    p, d = pair(native, tmp_path, shape_of(1, 2, 4), shape_of(2, 2, 6))
    params = p.offer(prompt(15), [1, 2, 3, 4])
    p.step()
    assert d.admit(request("d-1", prompt(30), params), [5, 6, 7, 8, 9]) == 12
    assert d.step().received == {"d-1"}
    assert d.holds([5, 6, 7, 8, 9], range(12))


@pytest.mark.parametrize(("theirs", "ours"), [(8, 4), (4, 8)])
def test_heads_inside_the_tokens_go_as_a_whole(
    native: FakeNative, tmp_path: Path, theirs: int, ours: int
) -> None:
    shapes = (shape_of(2, 4, tokens, order="NHC") for tokens in (theirs, ours))
    p, d = pair(native, tmp_path, *shapes)
    hand_over(p, d, length=13)
    assert reported_bytes(d) == moved_bytes(p, d, 0, 13)


def test_what_cannot_be_read_is_refused_and_given_back(native: FakeNative, tmp_path: Path) -> None:
    p, d = pair(native, tmp_path, shape_of(4, 8, order="H[cpu a]"), shape_of(2, 8, order="H[cpu b]"))
    params = p.offer(prompt(8), [1, 2])
    p.step()
    assert d.admit(request("d-1", prompt(8), params), [5, 6]) == 0
    d.step()
    assert [line["reason"] for line in d.records()] == ["shape_mismatch"]
    assert p.step().sent == {"p-1"}
    assert [len(grant.confirmed) for grant in grants(p, params)] == [1] * 4


@pytest.mark.parametrize("spoil", ["missing", "twice", "foreign"])
def test_tickets_that_are_not_one_a_rank(native: FakeNative, tmp_path: Path, spoil: str) -> None:
    p, d = pair(native, tmp_path, shape_of(2, 4), shape_of(1, 4))
    params = p.offer(prompt(8), [1, 2])
    tickets = params["kvik"]["tickets"]
    if spoil == "missing":
        tickets.pop()
    else:
        tickets[1]["tp"] = 0 if spoil == "twice" else 7
    assert d.admit(request("d-1", prompt(8), params), [5, 6]) == 0
    d.step()
    assert [line["reason"] for line in d.records()] == ["params_invalid"]


@pytest.mark.parametrize("ids", [[[2**31]], [[1, 1]], [], None, "x", [[9, 9, 9, 9]]])
def test_block_ids_are_not_read(native: FakeNative, tmp_path: Path, ids: Any) -> None:
    """They are for foreign proxies; pages are named by their places in the grant."""
    p, d = pair(native, tmp_path, shape_of(1, 2, 8), shape_of(1, 2, 4))
    params = p.offer(prompt(8), [1])
    p.step()
    params["remote_block_ids"] = ids
    assert d.admit(request("d-1", prompt(8), params), [5, 6]) == 8
    assert d.step().received == {"d-1"}
    assert d.holds([5, 6], range(8))


# Ends.


@pytest.mark.parametrize("release", ["never asked", "needs nothing"])
def test_an_offer_that_is_not_taken_ends_on_all_ranks(
    native: FakeNative, tmp_path: Path, release: str
) -> None:
    p, d = pair(native, tmp_path, shape_of(4, 4), shape_of(2, 4))
    params = p.offer(prompt(8), [1, 2])
    p.step()
    wanted = request("d-1", prompt(8), params, status=Status.FINISHED_ABORTED)
    d.scheduler.on_new_request(wanted)
    if release == "needs nothing":
        assert d.scheduler.get_num_new_matched_tokens(wanted, 8) == (0, False)
        d.scheduler.update_state_after_alloc(wanted, ([5, 6],), 0)
    else:
        d.scheduler.request_finished(wanted, ([],))
    d.step()
    assert p.step().sent == {"p-1"}
    assert [len(grant.confirmed) for grant in grants(p, params)] == [1] * 4


def test_one_failed_transfer_fails_the_load_of_its_rank(native: FakeNative, tmp_path: Path) -> None:
    """One rank reads from four: the second fails, the others are cancelled, all four are released."""
    p, d = pair(native, tmp_path, shape_of(4, 4), shape_of(1, 4))
    params = p.offer(prompt(8), [1, 2])
    p.step()
    assert d.admit(request("d-1", prompt(8), params), [5, 6]) == 8
    native.faults = ["", "checksum_mismatch"]  # the first read is fine
    result = d.step()
    result.received |= d.step().received
    assert result.received == {"d-1"}
    assert result.invalid == {5, 6}
    (line,) = d.records()
    assert (line["outcome"], line["reason"], line["remote_rank"], line["bytes"]) == (
        "failed", "checksum_mismatch", 1, 0,
    )  # fmt: skip
    d.step()
    assert p.step().sent == {"p-1"}
    assert [len(grant.confirmed) for grant in grants(p, params)] == [1] * 4
    assert d.reported["received", "d-1"] == 1


def test_a_failed_transfer_does_not_wait_for_the_others(native: FakeNative, tmp_path: Path) -> None:
    """Three of four prefill ranks have not issued their grants yet, the fourth read fails: the load ends now,
    and they get their blocks back when they have."""
    p, d = pair(native, tmp_path, shape_of(4, 4), shape_of(1, 4))
    params = p.offer(prompt(8), [1, 2])
    plan = p.scheduler.take_plan()
    p.ranks[0].worker.begin_step(plan)
    assert d.admit(request("d-1", prompt(8), params), [5, 6]) == 8
    native.faults = ["checksum_mismatch"]
    received = d.step().received | d.step().received
    assert received == {"d-1"}
    for rank in p.ranks[1:]:
        rank.worker.begin_step(plan)
    d.step()
    assert p.step().sent == {"p-1"}


def test_a_rank_that_fails_does_not_end_the_others_grant(native: FakeNative, tmp_path: Path) -> None:
    """Two ranks read from one: the first fails and gives its share back, the second still finds its pages."""
    p, d = pair(native, tmp_path, shape_of(1, 4), shape_of(2, 4))
    params = p.offer(prompt(8), [1, 2])
    p.step()
    native.faults = ["checksum_mismatch"]
    assert d.admit(request("d-1", prompt(8), params), [5, 6]) == 8
    plan = d.scheduler.take_plan()
    failing, other = (rank.worker for rank in d.ranks)
    failing.begin_step(plan)
    assert failing.collect() == (set(), {"d-1"})
    failing.collect()  # its release has ended
    assert [grant.state for grant in grants(p, params)] == ["live"]
    other.begin_step(plan)
    assert other.collect() == (set(), {"d-1"})
    assert not other.take_invalid_blocks()
    assert p.step().sent == {"p-1"}
    assert [line["outcome"] for line in d.records()] == ["failed", "loaded"]


def test_a_ticket_that_cannot_be_read_fails_the_load(native: FakeNative, tmp_path: Path) -> None:
    p, d = pair(native, tmp_path, shape_of(2, 4), shape_of(1, 4))
    params = p.offer(prompt(8), [1, 2])
    p.step()
    params["kvik"]["tickets"][1]["ticket"] = "nonsense"
    assert d.admit(request("d-1", prompt(8), params), [5, 6]) == 8
    result = d.step()
    assert result.received == {"d-1"}
    assert result.invalid == {5, 6}
    assert [line["remote_rank"] for line in d.records()] == [1]


def test_abort_while_loading_from_several_ranks(native: FakeNative, tmp_path: Path) -> None:
    p, d = pair(native, tmp_path, shape_of(4, 4), shape_of(2, 4))
    params = p.offer(prompt(8), [1, 2])
    p.step()
    wanted = request("d-1", prompt(8), params)
    assert d.admit(wanted, [5, 6]) == 8
    native.held = True
    d.step()
    wanted.status = Status.FINISHED_ABORTED
    d.scheduler.request_finished(wanted, ([5, 6],))
    assert not d.step().received  # cancelled, but not ended yet
    native.held = False
    result = d.step()
    assert result.received == {"d-1"}
    assert not result.invalid
    assert not d.step().received
    assert p.step().sent == {"p-1"}
    assert {line["outcome"] for line in d.records()} == {"failed"}
