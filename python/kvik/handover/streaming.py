"""How one request's KV is divided where it crosses while prefill still computes, and what both sides know.

A *part* is a segment of the prompt's KV blocks, in a range of one prefill rank's layers. Each part has a
grant of its own, whose id both sides derive from a random seed of the request: so decode asks for all parts
at once, and each is served when prefill has issued its grant. The id opens nothing by itself: a grant is
bound to the content of its own blocks and to its own layers, and the reader states both from its own prompt,
as in a pull.

What decode must know of the prefill server besides the seed, its *template*, that server says in the answer
to whoever asks for it (`kvik.stream` in the request's `kv_transfer_params`)::

    {"stream": {}}                          asks for the template
    {"stream": {"seed": ..., "of": ...}}    the same on both sides: hand over in parts, by this template
    {"stream": {"version": 1, ...}}         the template, in an answer of prefill

An answer of prefill without `do_remote_prefill` says that the KV has been handed over so; one with it is an
offer to pull, whatever was asked for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from kvik.handover import digest, protocol
from kvik.handover.mapping import RankMap
from kvik.handover.native import Native
from kvik.handover.protocol import (
    LINK_BYTES,
    GroupLoad,
    Handover,
    KvShape,
    Own,
    RankHello,
    RankTicket,
    Read,
    RefusedError,
)

STREAM_VERSION = 1
SEED_BYTES = 32
SEGMENT_TOKENS = 512  # of prompts up to MAX_SEGMENTS as long; a longer one has longer segments
MAX_SEGMENTS = 16
LAYER_PARTS = 8  # ranges of one rank's layers; fewer where it has fewer layers
MAX_LAYER_PARTS = 64
MAX_GRANTS = 1 << 14  # of one prompt, over all ranks
MAX_OPEN_PARTS = 2048  # half of the transfers that an engine keeps open with one peer


@dataclass(frozen=True)
class Division:
    """Into which parts a prefill server divides a prompt's KV. segment_tokens: whole KV blocks of it."""

    segment_tokens: int
    layer_parts: int

    @classmethod
    def of(cls, shape: KvShape) -> Division:
        """The division that a server of this shape uses."""
        blocks = max(1, SEGMENT_TOKENS // shape.block_tokens)
        return cls(blocks * shape.block_tokens, LAYER_PARTS)

    def segments(self, num_tokens: int) -> list[tuple[int, int]]:
        """The segments of a prompt: their tokens (from, to)."""
        size = self.segment_tokens * -(-num_tokens // (self.segment_tokens * MAX_SEGMENTS))
        return [(first, min(first + size, num_tokens)) for first in range(0, num_tokens, size)]

    def layers(self, count: int) -> list[tuple[int, int]]:
        """The ranges (from, to) of a rank's layers."""
        parts = min(self.layer_parts, count)
        return [(part * count // parts, (part + 1) * count // parts) for part in range(parts)]


def grant_id(seed: bytes, rank: int, segment: int, part: int) -> str:
    """The id of one part's grant: 32 hexadecimal digits."""
    text = f"kvik stream {STREAM_VERSION} {rank} {segment} {part}".encode()
    return hashlib.sha256(seed + text).hexdigest()[:32]


def stream_id(seed: bytes) -> str:
    """What both sides' logs call a request's stream; the seed is not in it."""
    return "stream-" + hashlib.sha256(b"kvik stream id" + seed).hexdigest()[:12]


def part_bytes(model: KvShape, division: KvShape, rank: int, layers: tuple[int, int]) -> bytes:
    """Which part of the model's KV a range of a rank's layers is (`digest.part_bytes`)."""
    begin, _ = division.layers_of(rank // division.tp)
    return digest.part_bytes(model, division, rank, (begin + layers[0], begin + layers[1]))


@dataclass(frozen=True)
class Asked:
    """What a request says of streaming. Without a seed it only asks for the template."""

    seed: bytes | None = None
    template: Mapping[str, Any] | None = None


def asked(params: Mapping[str, Any]) -> Asked | None:
    """What the parameters of a request ask for; None where they say nothing of streaming. `RefusedError`
    where it cannot be read."""
    ours = params.get("kvik")
    stream = ours.get("stream") if isinstance(ours, Mapping) else None
    if stream is None:
        return None
    if isinstance(stream, Mapping) and "seed" not in stream:
        return Asked()
    template = stream.get("of") if isinstance(stream, Mapping) else None
    seed = stream.get("seed") if isinstance(stream, Mapping) else None
    try:
        read = bytes.fromhex(seed) if isinstance(seed, str) and len(seed) == 2 * SEED_BYTES else b""
    except ValueError:
        read = b""
    if len(read) != SEED_BYTES or not isinstance(template, Mapping):
        raise RefusedError("params_invalid", "kv_transfer_params.kvik.stream is not a seed and a template")
    return Asked(read, template)


def asks(params: Mapping[str, Any]) -> bool:
    """Whether a request wants to be told the template."""
    ours = params.get("kvik")
    return isinstance(ours, Mapping) and ours.get("stream") is not None


def template_of(
    engine_id: str, ranks: Mapping[int, RankHello], shape: KvShape, namespace: str, model: str
) -> dict[str, Any]:
    """What a prefill server says of itself, so that decode can ask for parts of a request to come."""
    host, _, port = ranks[0].address.rpartition(":")
    tickets = [
        RankTicket(0, one.place.tp, one.place.pp, one.place.dp, one.ticket_templates[0])
        for one in ranks.values()
    ]
    return {
        "version": STREAM_VERSION,
        **asdict(Division.of(shape)),
        "remote_engine_id": engine_id,
        "remote_host": host,
        "remote_port": int(port) if port.isdigit() else 0,
        "tickets": [asdict(ticket) for ticket in tickets],
        "namespace": namespace,
        "model": model,
        "shapes": [asdict(shape)],
    }


@dataclass(frozen=True)
class Stream:
    """A handover in parts as decode was told of it: `seed`, and how prefill divides the prompt."""

    seed: bytes
    division: Division

    def most_parts(self, offer: Handover) -> int:
        """How many parts the prompt has: as decode asks any one rank for."""
        segments = len(self.division.segments(offer.num_tokens))
        return segments * max(len(self.division.layers(count)) for count in offer.shape.stages)


def offered(native: Native, asked: Asked, num_tokens: int, expiry: float) -> tuple[Handover, Stream]:
    """A stream in the words of an offer: its tickets are templates, one a rank. `RefusedError` says what
    cannot be read."""
    seed, template = asked.seed, asked.template
    if seed is None or template is None:
        raise RefusedError("params_invalid", "kv_transfer_params.kvik.stream has no seed")
    if template.get("version") != STREAM_VERSION:
        raise RefusedError(
            "params_version",
            f"streams of version {str(template.get('version'))[:20]}, this server reads {STREAM_VERSION}",
        )
    named = {key: template.get(key) for key in ("remote_engine_id", "remote_host", "remote_port")}
    ours = {key: template.get(key) for key in ("tickets", "namespace", "model", "shapes")}
    offer = protocol.decode({
        **named,
        "remote_request_id": stream_id(seed),
        "remote_num_tokens": num_tokens,
        "kvik": {
            **ours, "version": protocol.PROTOCOL_VERSION, "firsts": [0], "digest": "by parts",
            "expires_in": expiry,
        },
    })  # fmt: skip
    tokens = protocol.integer(template, "segment_tokens", 1, protocol.MAX_TOKENS)
    parts = protocol.integer(template, "layer_parts", 1, MAX_LAYER_PARTS)
    if len(offer.shapes) != 1 or offer.shape.window or tokens % offer.shape.block_tokens:
        raise RefusedError("params_invalid", "a stream of KV that is not one group of whole blocks")
    stream = Stream(seed, Division(tokens, parts))
    if stream.most_parts(offer) * len(offer.tickets) > MAX_GRANTS:
        raise RefusedError("params_invalid", f"a stream of more than {MAX_GRANTS} grants")
    for one in offer.tickets:
        try:
            native.Ticket(one.ticket)
        except native.KvikError as error:
            raise RefusedError("params_invalid", f"a stream's ticket cannot be read: {error}") from error
    return offer, stream


def part_loads(
    native: Native,
    offer: Handover,
    stream: Stream,
    ranks: RankMap,
    own: Own,
    model: KvShape,
    *,
    blocks: Sequence[int],
    block_tokens: int,
    tokens: tuple[int, int],
) -> Iterator[tuple[GroupLoad, bool]]:
    """The parts of a stream as loads of their own, and whether each is wanted: one that has none of the
    `tokens` (from, to) is not. `blocks`: the request's KV blocks of `block_tokens` on this side, for these.

    Each reaches to the end of its segment, so that a read uses its grant up; unless the tokens end before.
    """
    shape = offer.shape
    tickets = {rank: native.Ticket(text) for rank, text in offer.by_rank(0).items()}

    def ticket(rank: int, segment: int, part: int) -> str:
        return str(tickets[rank].with_grant(grant_id(stream.seed, rank, segment, part), offer.expires_in))

    layers = {rank: stream.division.layers(shape.stages[rank // shape.tp]) for rank in tickets}
    for segment, (first, end) in enumerate(stream.division.segments(offer.num_tokens)):
        begin, until = max(first, tokens[0]), min(end, tokens[1])
        wanted = begin < until
        links = slice(first // shape.block_tokens * LINK_BYTES, -(-end // shape.block_tokens) * LINK_BYTES)
        for part in range(max(map(len, layers.values()))):
            mine = {rank: ranges[part] for rank, ranges in layers.items() if part < len(ranges)}
            reads = {number: tuple(_cut(reads, mine)) for number, reads in enumerate(ranks.reads)}
            readers = {
                rank: sum(any(read.rank == rank for read in some) for some in reads.values()) for rank in mine
            }
            local = slice(begin // block_tokens, -(-until // block_tokens))
            yield (
                GroupLoad(
                    group=0,
                    local_blocks=list(blocks[local]) if wanted else [],
                    local=ranks.local_pages(blocks, begin, until)
                    if wanted
                    else protocol.Pages([], ranks.local_parts),
                    remote=ranks.remote_positions(begin, until, first // shape.block_tokens),
                    reads=reads,
                    tickets={rank: ticket(rank, segment, part) for rank in mine},
                    readers=readers,
                    own=Own(
                        own.chain[links], {rank: part_bytes(model, shape, rank, mine[rank]) for rank in mine}
                    ),
                ),
                wanted,
            )


def _cut(reads: Sequence[Read], layers: Mapping[int, tuple[int, int]]) -> Iterator[Read]:
    """Reads, cut to these ranges of the prefill ranks' layers."""
    for read in reads:
        low, high = layers.get(read.rank, (0, 0))
        first, end = max(low, read.remote_layers[0]), min(high, read.remote_layers[1])
        if first < end:
            shift = read.local_layers[0] - read.remote_layers[0]
            yield replace(read, remote_layers=(first, end), local_layers=(first + shift, end + shift))
