"""What a store's blocks are called, and what became of them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from kvik.store.tenants import Tenant

AckName: TypeAlias = Literal["accepted", "stored", "durable"]
PolicyName: TypeAlias = Literal["selector", "lru", "s3-fifo", "s3-fifo-half", "s3-fifo-admit"]
ReasonName: TypeAlias = Literal["faster", "unknown", "refresh", "slower", "unavailable"]


@dataclass(frozen=True, kw_only=True)
class StoreOptions:
    """What a store is made with; see ``Store.embedded``."""

    memory: int | str = "1GiB"
    log: str | os.PathLike[str] | None = None
    log_size: int | str = "16GiB"
    object: str | None = None
    object_size: int | str = "1TiB"
    object_batch: int | str = "32MiB"
    policy: PolicyName = "selector"
    tenants: Sequence[Tenant] = ()


@dataclass(frozen=True, kw_only=True)
class Namespace:
    """All that KV depends on besides tokens, and how its bytes lie.

    Blocks are shared by those whose namespaces are equal in every field: one that differs is a miss, never
    other bytes. Texts and salt have at most 1,024 bytes.
    """

    model: str
    """The model's name."""
    revision: str = ""
    """Its weights: a revision, or a fingerprint of them."""
    kv_dtype: str
    """The type of an element of KV, such as "bfloat16"."""
    quantisation: str = ""
    """How KV is quantised; empty where it is not."""
    layers: tuple[int, int]
    """The layers that the pages hold: the first, and the one behind the last."""
    model_layers: int
    """The layers that the model has."""
    heads: tuple[int, int]
    """The KV heads that the pages hold: the first, and the one behind the last."""
    model_heads: int
    """The KV heads that the model has."""
    block_tokens: int
    """Tokens of a block."""
    layout: str = ""
    """How the bytes of a block lie: kind and order of its dimensions, in the words of who writes them."""
    salt: bytes = b""
    """Sets tenants apart. Empty: shared by all who have it empty."""
    lora: str = ""
    """The adapter; empty for none."""


@dataclass(frozen=True)
class Stored:
    """What became of the blocks of a put."""

    stored: int
    """Blocks that are in the store by this put."""
    known: int
    """Blocks that were there, or that another put was bringing."""
    refused: int
    """Blocks that the store did not take: there was no room, or the block before the first one is not
    there."""


@dataclass(frozen=True)
class Member:
    """A server of a store, as this client sees it."""

    name: str
    """What it is called, which is its address."""
    up: bool
    """Whether it answers."""
    unanswered: int
    """Parts of calls that it did not answer; 0 of a store of one server."""


@dataclass(frozen=True)
class Choice:
    """Whether blocks are better fetched than computed, and by which figures."""

    fetch: bool
    """What is better."""
    reason: ReasonName
    """Why. Fetched: "faster"; "unknown", since nothing was measured on the present connection; "refresh", to
    see whether fetching still takes longer. Computed: "slower"; "unavailable", since the store does not
    answer."""
    nbytes: int
    """Bytes of the blocks."""
    estimated: float | None
    """Seconds that fetching them would take, with what is queued before them; None where that is unknown."""
    queued_bytes: int
    """Bytes that open transfers with the store have still to move first."""
    recompute: float
    """Seconds that computing takes, as the caller has said."""
