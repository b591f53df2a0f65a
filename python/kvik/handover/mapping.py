"""Which decode rank reads what from which prefill rank: arithmetic on two shapes, and nothing else.

A model has `kv_heads` KV heads in every layer. With `tp` ranks, a rank holds `kv_heads / tp` of them, in
order; with more ranks than heads, `tp / kv_heads` ranks in a row hold copies of one head. MLA is the second
case: its latent KV counts as one head, which every rank has. So each side's division is known from two
numbers, a decode rank's reads are where its heads meet those of the prefill ranks, and of several ranks that
hold copies one is asked. Pipeline stages divide the layers in the same way: a decode rank reads the layers
that it has in common with a prefill rank, and its heads of them.

KV blocks of unequal sizes meet in *parts*: equal runs of tokens, as long as the greatest common divisor of
the two block sizes. Part j of block p has the number `p * parts + j`, where p is a block's own
number on the decode side and its place in the prompt on the prefill side: the grant has them in that order.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from kvik.handover.protocol import KvShape, Pages, Positions, Read, RefusedError

MAX_PARTS = 256  # of one KV block: kvik's own bound on a page


@dataclass(frozen=True)
class RankMap:
    """How two servers' ranks and KV blocks meet.

    reads: of each decode rank, ordered by the prefill rank; no prefill rank twice.
    readers: of each prefill rank, how many decode ranks read from it; they confirm one after the other, and
        the last one frees its blocks. 0: a copy that nobody needs, which one decode rank gives back.
    part_tokens: tokens of a part. local_parts, remote_parts: parts of a decode and of a prefill KV block.
    """

    reads: tuple[tuple[Read, ...], ...]
    readers: tuple[int, ...]
    part_tokens: int
    local_parts: int
    remote_parts: int

    def local_pages(self, blocks: Sequence[int], first_token: int, end_token: int) -> Pages:
        """The parts of a request's decode KV blocks that hold these tokens; `first_token` begins a part."""
        return _parts(blocks, self.local_parts, *self._range(first_token, end_token))

    def remote_positions(self, first_token: int, end_token: int, first_block: int) -> Positions:
        """Where the same tokens lie in the grant, whose pages are the prompt's KV blocks from `first_block`
        on, in order. What lies before it has a negative position: it has not been granted."""
        first, end = (at - first_block * self.remote_parts for at in self._range(first_token, end_token))
        return Positions(first, end, self.remote_parts)

    def _range(self, first_token: int, end_token: int) -> tuple[int, int]:
        return first_token // self.part_tokens, -(-end_token // self.part_tokens)


def map_ranks(prefill: KvShape, decode: KvShape) -> RankMap:
    """How a decode server of shape `decode` reads what one of shape `prefill` offers.

    `RefusedError` (`shape_mismatch`) names both shapes and the reason where the two hold different KV, or the
    same in a way that does not meet.
    """
    _check_same_kv(prefill, decode)
    for side, shape in (("prefill", prefill), ("decode", decode)):
        _check_division(side, shape, prefill, decode)
    _check_order(prefill, decode)
    reads = tuple(_reads_of(rank, prefill, decode) for rank in range(decode.ranks))
    asked = Counter(read.rank for one in reads for read in one)
    part = math.gcd(prefill.block_tokens, decode.block_tokens)
    return RankMap(
        reads=reads,
        readers=tuple(asked[rank] for rank in range(prefill.ranks)),
        part_tokens=part,
        local_parts=decode.block_tokens // part,
        remote_parts=prefill.block_tokens // part,
    )


def releaser(prefill_rank: int, decode_ranks: int) -> int:
    """The decode rank that gives back a ticket of this prefill rank when none is going to read it."""
    return prefill_rank % decode_ranks


def heads_of(rank: int, tp: int, kv_heads: int) -> tuple[int, int]:
    """The model's KV heads (from, to) that one of `tp` tensor-parallel ranks holds. One of the two numbers
    divides the other."""
    if tp > kv_heads:
        head = rank // (tp // kv_heads)
        return head, head + 1
    each = kv_heads // tp
    return rank * each, (rank + 1) * each


def _reads_of(rank: int, prefill: KvShape, decode: KvShape) -> tuple[Read, ...]:
    """Go through the prefill stages that have some of the rank's layers, and in each through the rank's heads
    in order; each read takes as many as its prefill rank holds."""
    stage, tp = divmod(rank, decode.tp)
    begin, end = heads_of(tp, decode.tp, decode.kv_heads)
    mine = decode.layers_of(stage)
    reads = []
    for theirs in range(len(prefill.stages)):
        layers = prefill.layers_of(theirs)
        common = max(mine[0], layers[0]), min(mine[1], layers[1])
        if common[0] >= common[1]:
            continue
        head = begin
        while head < end:
            source = _holder(head, tp, prefill)
            first, last = heads_of(source, prefill.tp, prefill.kv_heads)
            until = min(last, end)
            reads.append(
                Read(
                    rank=theirs * prefill.tp + source,
                    remote_heads=(head - first, until - first),
                    local_heads=(head - begin, until - begin),
                    remote_layers=(common[0] - layers[0], common[1] - layers[0]),
                    local_layers=(common[0] - mine[0], common[1] - mine[0]),
                )
            )
            head = until
    return tuple(reads)


def _holder(head: int, reader: int, prefill: KvShape) -> int:
    """The tensor-parallel prefill rank that the decode one `reader` asks for a head. Readers take turns among
    the ranks with a copy, which with equally many ranks on both sides is each its own."""
    copies = max(1, prefill.tp // prefill.kv_heads)
    return head * copies + reader % copies if copies > 1 else head // prefill.heads


def _parts(blocks: Sequence[int], parts: int, first: int, end: int) -> Pages:
    return Pages([blocks[number // parts] * parts + number % parts for number in range(first, end)], parts)


def _refuse(reason: str, prefill: KvShape, decode: KvShape) -> RefusedError:
    return RefusedError("shape_mismatch", f"{reason}: prefill has [{prefill}], decode has [{decode}]")


def _check_same_kv(prefill: KvShape, decode: KvShape) -> None:
    theirs, ours = prefill.model_kv(), decode.model_kv()
    differ = [name for name in theirs if theirs[name] != ours[name]]
    if differ:
        raise _refuse(f"{', '.join(differ)} differ", prefill, decode)


def _check_division(side: str, shape: KvShape, prefill: KvShape, decode: KvShape) -> None:
    """A shape comes from a peer: what it says of a rank must follow from what it says of the model."""
    if shape.kv_heads % shape.tp and shape.tp % shape.kv_heads:
        raise _refuse(
            f"{shape.kv_heads} KV heads do not divide among the {shape.tp} {side} ranks "
            "(one number has to divide the other)",
            prefill,
            decode,
        )
    held = max(1, shape.kv_heads // shape.tp)
    if shape.heads != held:
        raise _refuse(
            f"a {side} rank says that it holds {shape.heads} KV heads, of {shape.kv_heads} among "
            f"{shape.tp} ranks it would be {held}",
            prefill,
            decode,
        )
    if sum(shape.stages) != shape.layers:
        raise _refuse(f"{side} stages have {sum(shape.stages)} of {shape.layers} layers", prefill, decode)
    if shape.block_bytes != shape.heads * shape.block_tokens * shape.token_bytes:
        raise _refuse(f"block_bytes of {side} do not divide by heads and tokens", prefill, decode)


def _check_order(prefill: KvShape, decode: KvShape) -> None:
    """Heads can be taken apart where they are outermost in a block, tokens where only heads are outside."""
    if prefill.order != decode.order:
        raise _refuse("order differs (it has to be the same on both sides)", prefill, decode)
    found = f"a KV block lies as {prefill.order}"
    if prefill.heads != decode.heads and not prefill.heads_outermost:
        raise _refuse(f"{found}: unequal heads a rank need the heads outermost (HNC)", prefill, decode)
    part = math.gcd(prefill.block_tokens, decode.block_tokens)
    if max(prefill.block_tokens, decode.block_tokens) > MAX_PARTS * part:
        raise _refuse(f"block_tokens differ by more than {MAX_PARTS} parts of {part} tokens", prefill, decode)
    if prefill.block_tokens != decode.block_tokens and prefill.order.lstrip("H")[:1] != "N":
        raise _refuse(
            f"{found}: unequal block_tokens need the tokens outside the content (HNC)", prefill, decode
        )
