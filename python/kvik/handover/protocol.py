"""What travels: `kv_transfer_params` between servers, and step plans from a server's scheduler process to its
workers.

`kv_transfer_params` have the field names of vLLM's pull protocol whatever the serving engine, because
existing proxies read or forward them, plus a `kvik` sub-dict that only this package reads. They come back
through clients and proxies, so every field is checked and bounded here before anything else sees it. And none
of them says which KV a request gets: what is read is named by the request's own content (`digest.py`), and
the owner of the pages compares it with the content that the grant was issued for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

PROTOCOL_VERSION = 3
MAX_RANKS = 4096
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
    """A model's KV, and how one rank holds its part of it. Never strides or block counts: nobody else needs
    those.

    The model's: `kind` ("gqa": K and V of each head, "mla": one latent that all heads share), `layers`,
    `kv_heads` (1 for mla), `content` (elements a token a head: K and V packed, or the latent), `dtype`, `pp`.
    The server's: `tp` ranks, KV blocks of `block_tokens`. A rank's: `heads` of the model's, `block_bytes` of
    one KV block in one layer. `order` names the dimensions in such a block from outer to inner: H heads,
    N tokens, C content; brackets are around what only a named kernel can read, as in "H[cpu vec]".

    Two servers need the same model's KV; how the rest may differ is in `mapping.py`.
    """

    kind: str
    layers: int
    kv_heads: int
    content: int
    dtype: str
    tp: int
    pp: int
    heads: int
    block_tokens: int
    order: str
    block_bytes: int

    def __str__(self) -> str:
        return " ".join(f"{f.name}={getattr(self, f.name)}" for f in fields(self))

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
        names = ("kind", "layers", "kv_heads", "content", "dtype", "token_bytes")
        return {name: getattr(self, name) for name in names}

    @classmethod
    def from_dict(cls, raw: Any) -> KvShape:
        """Read a peer's shape; `RefusedError` when a field is missing or of another type."""
        if not isinstance(raw, Mapping):
            raise RefusedError("params_invalid", "kv_transfer_params.kvik.shape is not an object")
        values: dict[str, Any] = {}
        for f in fields(cls):
            value = raw.get(f.name)
            if f.type == "str":
                fits = type(value) is str and len(value) <= 32
            else:
                fits = type(value) is int and 0 < value <= (MAX_RANKS if f.name in ("tp", "pp") else MAX_SIZE)
            if not fits:
                raise RefusedError(
                    "params_invalid", f"kv_transfer_params.kvik.shape.{f.name} is {str(value)[:80]!r}"
                )
            values[f.name] = value
        return cls(**values)


@dataclass(frozen=True)
class RankTicket:
    """One prefill rank's ticket; `tp`, `pp`, `dp` are its tensor-, pipeline- and data-parallel index."""

    tp: int
    pp: int
    dp: int
    ticket: str


@dataclass(frozen=True)
class Handover:
    """One request's KV as the prefill side offers it. `address` (HOST:PORT, first rank) is for proxies."""

    remote_request_id: str
    remote_engine_id: str
    address: str
    num_tokens: int
    tickets: tuple[RankTicket, ...]
    digest: str
    namespace: str
    model: str
    shape: KvShape
    expires_in: float

    def check_ranks(self) -> None:
        """`RefusedError` unless there is exactly one ticket of each rank that the shape speaks of."""
        ranks = sorted(ticket.tp for ticket in self.tickets)
        if ranks != list(range(self.shape.tp)):
            raise RefusedError(
                "params_invalid", f"tickets of ranks {ranks[:16]}, the shape says tp={self.shape.tp}"
            )

    def encode(self, blocks: list[int]) -> dict[str, Any]:
        """The dict that the serving engine returns to its client as `kv_transfer_params`.

        The `blocks` are in it for proxies that look whether there are any; `decode` does not read them.
        """
        host, _, port = self.address.rpartition(":")
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [blocks],
            "remote_engine_id": self.remote_engine_id,
            "remote_request_id": self.remote_request_id,
            "remote_host": host,
            "remote_port": int(port) if port.isdigit() else 0,
            "tp_size": self.shape.tp,
            "pp_size": self.shape.pp,
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
                "shape": asdict(self.shape),
                "expires_in": self.expires_in,
            },
        }


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
    return Handover(
        remote_request_id=_text(params, "remote_request_id", 1024),
        remote_engine_id=_text(params, "remote_engine_id", 1024),
        address=f"{params.get('remote_host')}:{params.get('remote_port')}"[:300],
        num_tokens=_integer(params, "remote_num_tokens", 1, MAX_TOKENS),
        tickets=_tickets(ours.get("tickets")),
        digest=_text(ours, "digest", 128),
        namespace=_text(ours, "namespace", 128),
        model=_text(ours, "model", 1024),
        shape=KvShape.from_dict(ours.get("shape")),
        expires_in=float(_integer(ours, "expires_in", 0, 10**9)),
    )


def _tickets(raw: Any) -> tuple[RankTicket, ...]:
    if not isinstance(raw, list) or not 0 < len(raw) <= MAX_RANKS:
        raise RefusedError("params_invalid", "kv_transfer_params.kvik.tickets is not one entry a rank")
    tickets = []
    for entry in raw:
        if not isinstance(entry, Mapping):
            raise RefusedError(
                "params_invalid", "kv_transfer_params.kvik.tickets has an entry that is not an object"
            )
        tp, pp, dp = (_integer(entry, key, 0, MAX_RANKS) for key in ("tp", "pp", "dp"))
        tickets.append(RankTicket(tp, pp, dp, _text(entry, "ticket", MAX_TICKET_TEXT)))
    return tuple(tickets)


def _integer(raw: Mapping[str, Any], key: str, low: int, high: int) -> int:
    value = raw.get(key)
    number = int(value) if isinstance(value, float) and value == value and abs(value) < 2**53 else value
    if type(number) is not int or not low <= number <= high:
        raise RefusedError("params_invalid", f"kv_transfer_params field {key!r} is {str(value)[:80]!r}")
    return number


def _text(raw: Mapping[str, Any], key: str, longest: int) -> str:
    value = raw.get(key)
    if not isinstance(value, str) or not 0 < len(value) <= longest:
        raise RefusedError("params_invalid", f"kv_transfer_params field {key!r} is {str(value)[:80]!r}")
    return value


# Plans of one engine step, scheduler process to workers; ranks are tensor-parallel ones.


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
    """What one decode rank reads from one prefill rank, in every layer.

    rank: the prefill rank. remote_heads, local_heads: from, to (exclusive), counted from the first head of
    the rank that holds them; equally many.
    """

    rank: int
    remote_heads: tuple[int, int]
    local_heads: tuple[int, int]


@dataclass
class Send:
    """Prefill: expose these KV blocks of a finished request; `grants` by prefill rank. `chain`: the content
    of the blocks, one link each."""

    request_id: str
    blocks: list[int]
    grants: dict[int, str]
    chain: bytes


@dataclass(frozen=True)
class Own:
    """The content that a decode request has a right to, by its own prompt: the `chain` over the prefill
    side's KV blocks, and of each prefill rank which part of the model's KV its pages are."""

    chain: bytes
    parts: dict[int, bytes]


@dataclass
class Load:
    """Decode: read the `remote` pages into the `local` ones, which fill `local_blocks`.

    reads: by decode rank. tickets, readers: by prefill rank, `readers` being how many decode ranks confirm.
    own: stated with every read and release; the owner refuses where its grant has other content.
    """

    request_id: str
    remote_request_id: str
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
class Release:
    """Decode: tell these prefill ranks that nobody will read, so that they get their blocks back now. `own`
    is what the request has a right to: who has not the offer's prompt ends nobody's offer."""

    request_id: str
    tickets: list[RankTicket]
    own: Own


@dataclass
class StepPlan:
    """Everything the workers shall start with one engine step; `parks` and `cancels` are request ids.

    parks: report these sends to the serving engine as finished although their grants live on, and say later
    when those have ended (`holding.py`).
    """

    sends: list[Send] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    parks: list[str] = field(default_factory=list)
    releases: list[Release] = field(default_factory=list)
    cancels: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class RankHello:
    """What a worker rank tells its scheduler once, after its KV tensors are registered."""

    tp: int
    dp: int
    ticket_template: str
    address: str
    kvik_engine_id: str
    shape: KvShape


def wait_note(waited_s: float) -> dict[str, Any]:
    """What the decode side's own answer says of the handover: the router shows it as `kv_wait`."""
    return {"kv_wait_ms": round(waited_s * 1e3, 3)}
