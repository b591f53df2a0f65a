"""The arithmetic of unequal ranks and KV blocks, for all pairs of sizes."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import replace

import pytest

from kvik.handover.mapping import RankMap, heads_of, map_ranks, releaser
from kvik.handover.protocol import KvShape, RefusedError
from tests.python.handover_harness import shape_of

RANKS = (1, 2, 3, 4, 6, 8)
HEADS = (1, 2, 3, 4, 5, 6, 8, 12, 24)


def divides(tp: int, kv_heads: int) -> bool:
    return kv_heads % tp == 0 or tp % kv_heads == 0


@pytest.mark.parametrize("kv_heads", HEADS)
@pytest.mark.parametrize(("theirs", "ours"), list(itertools.product(RANKS, RANKS)))
def test_every_head_is_read_once_from_a_rank_that_has_it(theirs: int, ours: int, kv_heads: int) -> None:
    prefill, decode = shape_of(theirs, kv_heads), shape_of(ours, kv_heads)
    if not (divides(theirs, kv_heads) and divides(ours, kv_heads)):
        side, tp = ("decode", ours) if divides(theirs, kv_heads) else ("prefill", theirs)
        with pytest.raises(RefusedError) as refused:
            map_ranks(prefill, decode)
        assert refused.value.code == "shape_mismatch"
        assert f"{kv_heads} KV heads do not divide among the {tp} {side} ranks" in str(refused.value)
        assert f"prefill has [{prefill}], decode has [{decode}]" in str(refused.value)
        return
    found = map_ranks(prefill, decode)
    assert len(found.reads) == ours
    assert len(found.readers) == theirs
    confirming = Counter[int]()
    for rank, reads in enumerate(found.reads):
        begin, end = heads_of(rank, ours, kv_heads)
        got = []
        for read in reads:
            first, last = heads_of(read.rank, theirs, kv_heads)
            remote = range(*(first + head for head in read.remote_heads))
            local = range(*(begin + head for head in read.local_heads))
            assert remote == local
            assert set(remote) <= set(range(first, last))
            got += list(local)
        assert got == list(range(begin, end))
        confirming.update(read.rank for read in reads)
        assert len({read.rank for read in reads}) == len(reads), "one ticket is read in one transfer"
    assert [confirming[rank] for rank in range(theirs)] == list(found.readers)


STAGES = ((12,), (6, 6), (5, 7), (4, 4, 4), (1, 10, 1), (3, 3, 3, 3))


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(("theirs", "ours"), list(itertools.product(STAGES, STAGES)))
@pytest.mark.parametrize("tp", list(itertools.product((1, 2, 4), repeat=2)))
def test_every_layer_and_head_is_read_once_from_a_rank_that_has_it(
    tp: tuple[int, int], theirs: tuple[int, ...], ours: tuple[int, ...], kv_heads: int
) -> None:
    prefill, decode = (
        shape_of(size, kv_heads, stages=stages) for size, stages in zip(tp, (theirs, ours), strict=True)
    )
    found = map_ranks(prefill, decode)
    assert (len(found.reads), len(found.readers)) == (decode.ranks, prefill.ranks)

    def named(
        shape: KvShape, rank: int, layers: tuple[int, int], heads: tuple[int, int]
    ) -> set[tuple[int, int]]:
        """The model's layers and heads that a rank counts so."""
        stage, place = divmod(rank, shape.tp)
        layer, head = shape.layers_of(stage)[0], heads_of(place, shape.tp, kv_heads)[0]
        return {(layer + at, head + of) for at in range(*layers) for of in range(*heads)}

    def whole(shape: KvShape, rank: int) -> set[tuple[int, int]]:
        return named(shape, rank, (0, shape.stages[rank // shape.tp]), (0, shape.heads))

    confirming = Counter[int]()
    for rank, reads in enumerate(found.reads):
        got = Counter[tuple[int, int]]()
        for read in reads:
            remote = named(prefill, read.rank, read.remote_layers, read.remote_heads)
            assert remote == named(decode, rank, read.local_layers, read.local_heads)
            assert remote <= whole(prefill, read.rank)
            got.update(remote)
        assert got == dict.fromkeys(whole(decode, rank), 1)
        confirming.update(read.rank for read in reads)
        assert len({read.rank for read in reads}) == len(reads), "one ticket is read in one transfer"
    assert [confirming[rank] for rank in range(prefill.ranks)] == list(found.readers)


@pytest.mark.parametrize(("theirs", "ours"), list(itertools.product(RANKS, RANKS)))
def test_every_unread_ticket_has_one_releaser(theirs: int, ours: int) -> None:
    assert all(sum(releaser(rank, ours) == one for one in range(ours)) == 1 for rank in range(theirs))


@pytest.mark.parametrize("tp", RANKS)
@pytest.mark.parametrize("kv_heads", HEADS)
def test_equal_ranks_read_each_its_own(tp: int, kv_heads: int) -> None:
    if not divides(tp, kv_heads):
        return
    shape = shape_of(tp, kv_heads)
    found = map_ranks(shape, shape)
    whole = (0, shape.heads)
    assert [
        [(read.rank, read.remote_heads, read.local_heads) for read in reads] for reads in found.reads
    ] == [[(rank, whole, whole)] for rank in range(tp)]
    assert set(found.readers) == {1}
    assert (found.local_parts, found.remote_parts) == (1, 1)


@pytest.mark.parametrize(("theirs", "ours"), list(itertools.product(RANKS, RANKS)))
def test_mla_is_spread_over_the_copies(theirs: int, ours: int) -> None:
    latent = [shape_of(tp, 1, kind="mla") for tp in (theirs, ours)]
    found = map_ranks(*latent)
    assert [reads[0].rank for reads in found.reads] == [rank % theirs for rank in range(ours)]
    assert max(found.readers) - min(found.readers) <= 1
    assert sum(found.readers) == ours


def tokens_of(found: RankMap, parts: int, blocks: list[int], ids: list[int]) -> list[int]:
    """The tokens of a prompt that parts of its blocks hold, in order."""
    size = found.part_tokens
    return [
        blocks.index(number // parts) * parts * size + number % parts * size + token
        for number in ids
        for token in range(size)
    ]


@pytest.mark.parametrize(("theirs", "ours"), list(itertools.product((1, 2, 3, 4, 8, 16), repeat=2)))
def test_parts_of_unequal_blocks_meet(theirs: int, ours: int) -> None:
    """For each prompt length and each local prefix: the same tokens on both sides, whole parts, no more."""
    found = map_ranks(shape_of(block_tokens=theirs), shape_of(block_tokens=ours))
    assert found.part_tokens == math.gcd(theirs, ours)
    for length in range(1, 36):
        remote_blocks, local_blocks = (
            [7 * number % 101 for number in range(1, -(-length // size) + 1)] for size in (theirs, ours)
        )
        for start in range(0, length, ours):
            local = found.local_pages(local_blocks, start, length)
            remote = found.remote_positions(start, length, 0)
            tokens = tokens_of(found, local.parts, local_blocks, local.ids)
            assert 0 <= remote.first < remote.end <= len(remote_blocks) * remote.parts
            ids = [
                remote_blocks[at // remote.parts] * remote.parts + at % remote.parts
                for at in range(remote.first, remote.end)
            ]
            assert tokens == tokens_of(found, remote.parts, remote_blocks, ids)
            assert tokens == list(range(start, -(-length // found.part_tokens) * found.part_tokens))


def different(shape: KvShape) -> list[tuple[KvShape, str]]:
    """Shapes that cannot be read by `shape` (or could not be real), and what is said of them."""
    return [
        (replace(shape, layers=9, stages=(9,)), "layers differ"),
        (replace(shape, kind="mla"), "kind differ"),
        (replace(shape, dtype="bfloat16"), "dtype differ"),
        (replace(shape, dtype="bfloat16", block_bytes=shape.block_bytes // 2), "dtype, token_bytes differ"),
        (replace(shape, stages=(1, 2)), "prefill stages have 3 of 2 layers"),
        (shape_of(2, 8), "kv_heads differ"),
        (shape_of(2, 4, content=5), "content, token_bytes differ"),
        (replace(shape, heads=4, block_bytes=2 * shape.block_bytes), "says that it holds 4 KV heads"),
        (replace(shape, block_bytes=shape.block_bytes + 1), "block_bytes of prefill do not divide"),
        (replace(shape, order="NHC"), "order differs"),
        (shape_of(2, 4, 1028), "block_tokens differ by more than 256 parts of 4 tokens"),
    ]


@pytest.mark.parametrize("number", range(11))
def test_other_kv_is_refused_naming_both(number: int) -> None:
    ours = shape_of(2, 4)
    theirs, text = different(ours)[number]
    with pytest.raises(RefusedError) as refused:
        map_ranks(theirs, ours)
    assert refused.value.code == "shape_mismatch"
    assert text in str(refused.value)
    assert f"prefill has [{theirs}], decode has [{ours}]" in str(refused.value)


@pytest.mark.parametrize("order", ["NHC", "CHN", "H[cpu vec]", "HCN"])
def test_other_orders_are_read_as_far_as_they_can_be_taken_apart(order: str) -> None:
    """Heads only where they are outermost, tokens only where the content is inside them."""
    shape = shape_of(2, 4, order=order)
    assert map_ranks(shape, shape).part_tokens == 4
    fewer, longer = shape_of(1, 4, order=order), shape_of(2, 4, 8, order=order)
    if order.startswith("H"):
        assert map_ranks(fewer, shape).readers == (2,)
    else:
        with pytest.raises(RefusedError, match=r"lies as \w+: unequal heads a rank need the heads outermost"):
            map_ranks(fewer, shape)
    if order == "NHC":
        assert map_ranks(longer, shape).remote_parts == 2
    else:
        with pytest.raises(RefusedError, match="unequal block_tokens need the tokens outside the content"):
            map_ranks(longer, shape)
