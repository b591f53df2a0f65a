"""What travels: `kv_transfer_params` between servers, and step plans from a server's scheduler process to its
workers.

`kv_transfer_params` have the field names of vLLM's pull protocol whatever the serving engine, because
existing proxies read or forward them, plus a `kvik` sub-dict that only this package reads. They come back
through clients and proxies, so every field is checked and bounded here before anything else sees it. And none
of them says which KV a request gets: what is read is named by the request's own content (`digest.py`), and
the owner of the pages compares it with the content that the grant was issued for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

PROTOCOL_VERSION = 5
MAX_RANKS = 4096
MAX_GROUPS = 64
MAX_SIZE = 2**40
MAX_TICKET_TEXT = 256
MAX_TOKENS = 2**31
LINK_BYTES = 32  # of a content chain, for each KV block


class RefusedError(Exception):
    """The offered KV cannot be used; `code` is the stable reason that is counted, the text is for people."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


@dataclass(frozen=True)
class KvShape:
    """The KV of one group of a model's layers, and how one rank holds its part of it. Never strides or block
    counts: nobody else needs those.

    Most models have one group. Those that mix kinds of attention have several, such as layers that look at
    all tokens and layers that look at the last ones only: each group has KV blocks of its own for a request.

    The model's: `kind` ("gqa": K and V of each head, "mla": one latent that all heads share), `layers`,
    `kv_heads` (1 for mla), `content` (elements a token a head: K and V packed, or the latent), `dtype`,
    `window` (how many tokens a token sees, itself among them; 0: all before it), `members` (of several
    groups, which layers this one has: a digest of their names in order; of one, nothing).
    The server's: `tp` tensor-parallel ranks in each pipeline stage, `stages` (how many layers each pipeline
    stage has, in order), KV blocks of `block_tokens`. A rank's: `heads` of the model's, `block_bytes` of one
    KV block in one layer. `order` names the dimensions in such a block from outer to inner: H heads,
    N tokens, C content; brackets are around what only a named kernel can read, as in "H[cpu vec]".

    Two servers need the same model's KV; how the rest may differ is in `mapping.py`.
    """

    kind: str
    layers: int
    kv_heads: int
    content: int
    dtype: str
    tp: int
    stages: tuple[int, ...]
    heads: int
    block_tokens: int
    order: str
    block_bytes: int
    window: int = 0
    members: str = ""

    def __str__(self) -> str:
        values = vars(self) | {"stages": "+".join(map(str, self.stages))}
        said = (f.name for f in fields(self) if f.name not in ("window", "members") or values[f.name])
        return " ".join(f"{name}={values[name]}" for name in said)

    @property
    def ranks(self) -> int:
        """Worker ranks of the server: those of all its pipeline stages. Rank r is the tensor-parallel rank
        `r % tp` of stage `r // tp`."""
        return self.tp * len(self.stages)

    def layers_of(self, stage: int) -> tuple[int, int]:
        """The model's layers (from, to) that a pipeline stage has."""
        first = sum(self.stages[:stage])
        return first, first + self.stages[stage]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token of one head in one layer."""
        return self.block_bytes // (self.heads * self.block_tokens)

    @property
    def heads_outermost(self) -> bool:
        """Whether each head of a block is one contiguous run."""
        return self.order.startswith("H")

    def model_kv(self) -> dict[str, str | int]:
        """What does not depend on how a server divides it: the same for all servers of a model."""
        names = ("kind", "layers", "kv_heads", "content", "dtype", "token_bytes", "window", "members")
        return {name: getattr(self, name) for name in names}

    @classmethod
    def from_dict(cls, raw: Any) -> KvShape:
        """Read a peer's shape; `RefusedError` when a field is missing or of another type."""
        if not isinstance(raw, Mapping):
            raise RefusedError("params_invalid", "kv_transfer_params.kvik.shapes has what is not an object")
        values: dict[str, Any] = {}
        for f in fields(cls):
            value: Any = raw.get(f.name)
            if f.type == "str":
                fits = type(value) is str and len(value) <= 32
            elif f.name == "stages":
                value = tuple(value) if isinstance(value, list | tuple) else ()
                fits = 0 < len(value) <= MAX_RANKS and all(_is_size(layers) for layers in value)
            elif f.name == "window":
                fits = type(value) is int and 0 <= value <= MAX_TOKENS
            else:
                fits = _is_size(value, MAX_RANKS if f.name == "tp" else MAX_SIZE)
            if not fits:
                found = str(raw.get(f.name))[:80]
                raise RefusedError("params_invalid", f"kv_transfer_params.kvik.shapes: {f.name} is {found!r}")
            values[f.name] = value
        return cls(**values)


@dataclass(frozen=True)
class RankTicket:
    """One prefill rank's ticket for its pages of one group; `tp`, `pp`, `dp` are its tensor-, pipeline- and
    data-parallel index."""

    group: int
    tp: int
    pp: int
    dp: int
    ticket: str


@dataclass(frozen=True)
class Handover:
    """One request's KV as the prefill side offers it. `address` (HOST:PORT, first rank) is for proxies.

    shapes: of each group of layers; they differ in anything but the division into ranks. firsts: of each
    group, the first of the prompt's KV blocks that is offered; one with a window has only the last ones left.
    """

    remote_request_id: str
    remote_engine_id: str
    address: str
    num_tokens: int
    tickets: tuple[RankTicket, ...]
    digest: str
    namespace: str
    model: str
    shapes: tuple[KvShape, ...]
    firsts: tuple[int, ...]
    expires_in: float

    @property
    def shape(self) -> KvShape:
        """Of the first group, for what is the same in all."""
        return self.shapes[0]

    def by_rank(self, group: int) -> dict[int, str]:
        """The ticket of each prefill rank for a group; those of ranks that no shape has are left out."""
        tp, pp = self.shape.tp, len(self.shape.stages)
        return {
            one.pp * tp + one.tp: one.ticket
            for one in self.tickets
            if one.group == group and one.tp < tp and one.pp < pp
        }

    def check_ranks(self) -> None:
        """`RefusedError` unless the groups are divided alike, and there is exactly one ticket of each rank
        for each group."""
        divisions = {(shape.tp, len(shape.stages)) for shape in self.shapes}
        found = [len(self.by_rank(group)) for group in range(len(self.shapes))]
        ranks = self.shape.ranks
        if len(divisions) > 1 or len(self.tickets) != ranks * len(found) or set(found) != {ranks}:
            told = sorted((one.group, one.pp, one.tp) for one in self.tickets)
            raise RefusedError(
                "params_invalid",
                f"tickets of (group, pp, tp) {told[:16]}, the shapes say (tp, pp) {sorted(divisions)} in "
                f"{len(found)} group(s)",
            )

    def encode(self, blocks: list[list[int]]) -> dict[str, Any]:
        """The dict that the serving engine returns to its client as `kv_transfer_params`.

        The `blocks` of each group are in it for proxies that look whether there are any; `decode` does not
        read them.
        """
        host, _, port = self.address.rpartition(":")
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": blocks,
            "remote_engine_id": self.remote_engine_id,
            "remote_request_id": self.remote_request_id,
            "remote_host": host,
            "remote_port": int(port) if port.isdigit() else 0,
            "tp_size": self.shape.tp,
            "pp_size": len(self.shape.stages),
            "dcp_size": 1,
            "remote_num_tokens": self.num_tokens,
            "remote_blocks_expiry_time": None,
            "transfer_mode": "pull",
            "kvik": {
                "version": PROTOCOL_VERSION,
                "tickets": [asdict(ticket) for ticket in self.tickets],
                "digest": self.digest,
                "namespace": self.namespace,
                "model": self.model,
                "shapes": [asdict(shape) for shape in self.shapes],
                "firsts": list(self.firsts),
                "expires_in": self.expires_in,
            },
        }


def params_of(request: Any) -> Mapping[str, Any]:
    """A request's `kv_transfer_params`; empty where it has none, or what is no object: where vLLM merges what
    clients say for connectors (`vllm_xargs`), that can be any text or number."""
    params = request.kv_transfer_params
    return params if isinstance(params, Mapping) else {}


def decode(params: Mapping[str, Any]) -> Handover:
    """Read what a prefill server offered; `RefusedError` says what cannot be read."""
    ours = params.get("kvik")
    if not isinstance(ours, Mapping):
        raise RefusedError(
            "params_not_kvik", "no 'kvik' in kv_transfer_params: the prefill server runs without kvik"
        )
    if ours.get("version") != PROTOCOL_VERSION:
        raise RefusedError(
            "params_version",
            f"kvik params version {str(ours.get('version'))[:20]}, this server speaks {PROTOCOL_VERSION}",
        )
    num_tokens = integer(params, "remote_num_tokens", 1, MAX_TOKENS)
    shapes, firsts = _groups(ours, num_tokens)
    return Handover(
        remote_request_id=_text(params, "remote_request_id", 1024),
        remote_engine_id=_text(params, "remote_engine_id", 1024),
        address=f"{params.get('remote_host')}:{params.get('remote_port')}"[:300],
        num_tokens=num_tokens,
        tickets=_tickets(ours.get("tickets")),
        digest=_text(ours, "digest", 128),
        namespace=_text(ours, "namespace", 128),
        model=_text(ours, "model", 1024),
        shapes=shapes,
        firsts=firsts,
        expires_in=float(integer(ours, "expires_in", 0, 10**9)),
    )


def _groups(ours: Mapping[str, Any], num_tokens: int) -> tuple[tuple[KvShape, ...], tuple[int, ...]]:
    """The groups' shapes, and the first offered block of each."""
    raw, firsts = ours.get("shapes"), ours.get("firsts")
    if not isinstance(raw, list) or not 0 < len(raw) <= MAX_GROUPS:
        raise RefusedError("params_invalid", "kv_transfer_params.kvik.shapes is not one entry a group")
    shapes = tuple(KvShape.from_dict(shape) for shape in raw)
    numbers = firsts if isinstance(firsts, list) and len(firsts) == len(shapes) else ()
    fit = [
        first
        for first, shape in zip(numbers, shapes, strict=False)
        if type(first) is int and 0 <= first * shape.block_tokens < num_tokens
    ]
    if len(fit) != len(shapes):
        raise RefusedError(
            "params_invalid",
            f"kv_transfer_params.kvik.firsts is not one KV block of {num_tokens} tokens a group: "
            f"{str(firsts)[:80]}",
        )
    return shapes, tuple(fit)


def _tickets(raw: Any) -> tuple[RankTicket, ...]:
    if not isinstance(raw, list) or not 0 < len(raw) <= MAX_RANKS:
        raise RefusedError(
            "params_invalid", "kv_transfer_params.kvik.tickets is not one entry a rank and group"
        )
    tickets = []
    for entry in raw:
        if not isinstance(entry, Mapping):
            raise RefusedError(
                "params_invalid", "kv_transfer_params.kvik.tickets has an entry that is not an object"
            )
        group, tp, pp, dp = (integer(entry, key, 0, MAX_RANKS) for key in ("group", "tp", "pp", "dp"))
        tickets.append(RankTicket(group, tp, pp, dp, _text(entry, "ticket", MAX_TICKET_TEXT)))
    return tuple(tickets)


def _is_size(value: object, largest: int = MAX_SIZE) -> bool:
    return type(value) is int and 0 < value <= largest


def integer(raw: Mapping[str, Any], key: str, low: int, high: int) -> int:
    """A bounded whole number of a peer's parameters."""
    value = raw.get(key)
    number = int(value) if isinstance(value, float) and value == value and abs(value) < 2**53 else value
    if type(number) is not int or not low <= number <= high:
        raise RefusedError("params_invalid", f"kv_transfer_params field {key!r} is {str(value)[:80]!r}")
    return number


def _text(raw: Mapping[str, Any], key: str, longest: int) -> str:
    value = raw.get(key)
    text = value if isinstance(value, str) else ""
    # JSON can have half a character, and UTF-8, in which an engine reads a ticket, cannot.
    if not 0 < len(text) <= longest or text.encode(errors="ignore").decode() != text:
        raise RefusedError("params_invalid", f"kv_transfer_params field {key!r} is {str(value)[:80]!r}")
    return text


# Plans of one engine step, scheduler process to workers. Ranks are counted as in `KvShape.ranks`.


@dataclass(frozen=True)
class Pages:
    """KV blocks in parts: number p * parts + j is the j-th of `parts` equal runs of tokens of block p."""

    ids: list[int]
    parts: int


@dataclass(frozen=True)
class Positions:
    """Granted pages by their place in the grant's order, from `first` to `end` (exclusive), in parts:
    position p * parts + j is the j-th of `parts` equal runs of tokens of the p-th page."""

    first: int
    end: int
    parts: int


@dataclass(frozen=True)
class Read:
    """What one decode rank reads from one prefill rank: these heads in these layers.

    rank: the prefill rank. remote_*, local_*: from, to (exclusive), counted from the first head and layer of
    the rank that holds them; equally many.
    """

    rank: int
    remote_heads: tuple[int, int]
    local_heads: tuple[int, int]
    remote_layers: tuple[int, int]
    local_layers: tuple[int, int]


@dataclass
class GroupSend:
    """A finished request's KV blocks of one group; `grants` by prefill rank. `chain`: the content of the
    blocks, one link each; `parts`: which part of the model's KV each rank has of them."""

    blocks: list[int]
    grants: dict[int, str]
    chain: bytes
    parts: dict[int, bytes]


@dataclass
class Send:
    """Prefill: expose a finished request's KV blocks, by group."""

    request_id: str
    groups: list[GroupSend]


@dataclass
class SegmentSend:
    """Prefill: expose the KV blocks of one segment of a request's prompt, each range of the layers as soon as
    this step has written it. segments: how many the prompt has. grants, parts: of each rank, one for each
    range of its layers: the grant's id, and which part of the model's KV it is. chain: as of `GroupSend`.
    key: what its blocks are held under, as no request is called."""

    key: str
    request_id: str
    stream_id: str
    segments: int
    blocks: list[int]
    chain: bytes
    grants: dict[int, tuple[str, ...]]
    parts: dict[int, tuple[bytes, ...]]


@dataclass(frozen=True)
class Own:
    """The content of one group that a decode request has a right to, by its own prompt: the `chain` over
    those of the prefill side's KV blocks that are offered, and of each prefill rank which part of the model's
    KV its pages are."""

    chain: bytes
    parts: dict[int, bytes]


@dataclass
class GroupLoad:
    """Decode: read the `remote` pages of a group into the `local` ones, which fill `local_blocks`.

    reads: by decode rank. tickets, readers: by prefill rank, `readers` being how many decode ranks confirm.
    own: stated with every read and release; the owner refuses where its grant has other content.
    """

    group: int
    local_blocks: list[int]
    local: Pages
    remote: Positions
    reads: dict[int, tuple[Read, ...]]
    tickets: dict[int, str]
    readers: dict[int, int]
    own: Own

    @property
    def to_the_end(self) -> bool:
        """Whether the last of the offer's pages is among the remote ones. Only such a read uses the grant up:
        it states the whole content, and not that of a beginning, which other prompts may share."""
        return -(-self.remote.end // self.remote.parts) * LINK_BYTES == len(self.own.chain)


@dataclass
class Load:
    """Decode: read what is missing of a request, by group; of a stream by part, each as an entry of its own,
    and within `deadline` seconds. unread: parts of a stream that are given back when the load has ended,
    since prefill has granted them by then."""

    request_id: str
    remote_request_id: str
    groups: list[GroupLoad]
    deadline: float | None = None
    unread: list[Unwanted] = field(default_factory=list)

    @property
    def blocks(self) -> int:
        """How many local KV blocks it fills."""
        return len({(group.group, block) for group in self.groups for block in group.local_blocks})

    @property
    def several_groups(self) -> bool:
        """Whether it is of a model with several groups of layers."""
        return len({group.group for group in self.groups}) > 1


@dataclass
class Unwanted:
    """What nobody will read, of one group or of one part of a stream: tickets by prefill rank. `own` is what
    the request has a right to: who has not the offer's prompt ends nobody's offer."""

    tickets: dict[int, str]
    own: Own


@dataclass
class Release:
    """Decode: tell prefill ranks that nobody will read, so that they get their blocks back now; of a stream
    by part, in the order in which they are granted. `deadline`: seconds; None for the connector's
    `release_deadline`."""

    request_id: str
    parts: list[Unwanted]
    deadline: float | None = None


@dataclass
class StepPlan:
    """Everything the workers shall start with one engine step; `parks`, `revokes` and `cancels` are request
    ids. revokes: take back what was granted of these in parts.

    parks: report these sends to the serving engine as finished although their grants live on, and say later
    when those have ended (`holding.py`).
    """

    sends: list[Send] = field(default_factory=list)
    segments: list[SegmentSend] = field(default_factory=list)
    revokes: list[str] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    parks: list[str] = field(default_factory=list)
    releases: list[Release] = field(default_factory=list)
    cancels: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class RankPlace:
    """Which worker rank of a server this is: its tensor-, pipeline- and data-parallel index, and how many of
    the first two there are."""

    tp: int = 0
    tp_size: int = 1
    pp: int = 0
    pp_size: int = 1
    dp: int = 0

    @property
    def rank(self) -> int:
        """Its number among the ranks of one data-parallel replica."""
        return self.pp * self.tp_size + self.tp

    @property
    def ranks(self) -> int:
        """How many ranks a data-parallel replica has."""
        return self.pp_size * self.tp_size

    @property
    def number(self) -> int:
        """Its number on the whole server: the replicas' ranks are counted one after the other."""
        return self.dp * self.ranks + self.rank


@dataclass(frozen=True)
class RankHello:
    """What a worker rank tells its scheduler once, after its KV tensors are registered: for each group a
    ticket template, the names of its layers in order, and its shape. A shape here has one stage, the rank's
    own layers, and no `members`: only the scheduler hears of all."""

    place: RankPlace
    address: str
    kvik_engine_id: str
    ticket_templates: tuple[str, ...]
    layers: tuple[tuple[str, ...], ...]
    shapes: tuple[KvShape, ...]


def server_shapes(hellos: Mapping[int, RankHello], ranks: int) -> tuple[KvShape, ...]:
    """The shapes of a whole server, by group. `ValueError` names what is missing or unlike: its ranks must
    lie alike, but for the layers of a pipeline stage."""
    said = "; ".join(
        f"rank {rank} {[str(shape) for shape in hello.shapes]}" for rank, hello in sorted(hellos.items())
    )
    if sorted(hellos) != list(range(ranks)):
        raise ValueError(f"kvik: expected hellos of {ranks} rank(s), got: {said}")
    groups = len(hellos[0].shapes)
    if not groups or {len(hello.shapes) for hello in hellos.values()} != {groups}:
        raise ValueError(f"kvik: the ranks of one server have unlike groups of layers: {said}")
    return tuple(_whole(hellos, ranks, group, said) for group in range(groups))


def _whole(hellos: Mapping[int, RankHello], ranks: int, group: int, said: str) -> KvShape:
    """The shape of one group over all ranks."""
    tp = hellos[0].place.tp_size
    names = [hellos[rank].layers[group] for rank in range(ranks)]
    counts = [hellos[rank].shapes[group].layers for rank in range(ranks)]
    stages = tuple(counts[::tp])
    several = len(hellos[0].shapes) > 1
    whole = replace(
        hellos[0].shapes[group],
        layers=sum(stages),
        stages=stages,
        members=_digest_of([name for stage in names[::tp] for name in stage]) if several else "",
    )
    alike = all(
        replace(hello.shapes[group], layers=whole.layers, stages=stages, members=whole.members) == whole
        for hello in hellos.values()
    )
    if not alike or any(
        (counts[rank], names[rank]) != (stages[rank // tp], names[rank // tp * tp]) for rank in range(ranks)
    ):
        raise ValueError(f"kvik: the ranks of one server have unlike KV: {said}")
    return whole


def _digest_of(names: list[str]) -> str:
    """So short that it fits into a shape, so long that no two groups have the same."""
    return hashlib.sha256("\n".join(names).encode()).hexdigest()[:32]


def decode_note(outcome: str, reason: str | None, waited_s: float | None) -> dict[str, Any]:
    """What the decode side's own answer says of the handover, as `kvik` of its parameters. The router shows
    the wait as `kv_wait`, and learns from the outcome ("loaded", "not_needed", "recomputed") whether a stream
    has come."""
    note: dict[str, Any] = {"outcome": outcome}
    if reason is not None:
        note["reason"] = reason
    if waited_s is not None:
        note["kv_wait_ms"] = round(waited_s * 1e3, 3)
    return note
