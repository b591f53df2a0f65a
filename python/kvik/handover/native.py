"""What a handover uses of kvik's public face, as types, and the one place that imports it.

The two sides of a handover get the module handed in, so that tests can give them a stand-in that keeps the
same contract. Units: bytes, seconds.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence
from typing import Any, Protocol, cast

from kvik._native import KvikError, gpu_address

logger = logging.getLogger("kvik.handover")


class Ticket(Protocol):
    """The text of a permission on an owner's pages (`str(ticket)`, at most 256 bytes)."""

    @property
    def addresses(self) -> list[str]: ...
    @property
    def grant_id(self) -> str: ...
    def with_grant(self, grant_id: str, expiry: float) -> Ticket: ...


class Grant(Protocol):
    """The owner's handle. `state` leaves "live" only when the pages are the owner's again."""

    @property
    def state(self) -> str: ...
    def wait(self, timeout: float = ...) -> str | None: ...
    def revoke(self, timeout: float = ...) -> None: ...


class Content(Protocol):
    """What pages hold: a chain of links, one a page, and which part of the model's KV they are."""

    def __len__(self) -> int: ...


class Report(Protocol):
    """What a finished transfer did."""

    bytes: int
    extents: int
    pages: int
    transport: str
    mechanism: str
    plan_s: float
    post_s: float
    wire_s: float
    verify_s: float
    total_s: float


class Transfer(Protocol):
    """One release on its way."""

    @property
    def done(self) -> bool: ...
    def error(self) -> Exception | None: ...


class JointReport(Protocol):
    """What several reads did that all succeeded, in the order of the call."""

    reads: tuple[Report, ...]


class JointRead(Protocol):
    """Several reads on their way as one: the first that fails ends the others."""

    @property
    def done(self) -> bool: ...
    def wait(self, timeout: float | None = None) -> JointReport: ...
    def report(self) -> JointReport | None: ...
    def error(self) -> Exception | None: ...
    def outcomes(self) -> Sequence[Report | Exception] | None: ...
    def cancel(self) -> None: ...


class PartRead(Protocol):
    """One of the reads of `Engine.read_all`."""


class PageSet(Protocol):
    """Pages of a region by number; with `parts` p, number n is part n % p of page n // p."""

    @property
    def nbytes(self) -> int: ...


class Region(Protocol):
    """Memory that the engine may touch."""

    def pages(
        self,
        layout: Any,
        ids: Any,
        *,
        layers: tuple[int, int] | None = None,
        slices: tuple[int, int] | None = None,
        parts: int = 1,
    ) -> PageSet: ...
    def close(self, timeout: float = ...) -> None: ...


class Engine(Protocol):
    """One per worker rank."""

    @property
    def id(self) -> str: ...
    @property
    def addresses(self) -> list[str]: ...
    def register(self, obj: Any) -> Region: ...
    def ticket_template(self, layout: Any) -> Ticket: ...
    def grant(
        self,
        pages: PageSet,
        *,
        right: str,
        use: int,
        expiry: float,
        max_expiry: float,
        grant_id: str,
        after: Any,
        tag: str,
        content: Content,
    ) -> Grant: ...
    def read_all(self, reads: Sequence[PartRead], *, deadline: float, after: Any, tag: str) -> JointRead: ...
    def release(
        self, ticket: Ticket, *, deadline: float, readers: int, tag: str, content: Content
    ) -> Transfer: ...
    def close(self, timeout: float = ...) -> None: ...


class Native(Protocol):
    """The module `kvik`."""

    KvikError: type[Exception]
    SecretRequired: type[Exception]

    def Read(  # noqa: N802
        self,
        local: PageSet,
        ticket: Ticket,
        positions: range,
        *,
        confirm: bool,
        remote_layers: tuple[int, int],
        remote_slices: tuple[int, int] | None,
        remote_parts: int,
        readers: int,
        content: Content,
    ) -> PartRead: ...
    def Engine(self, **options: Any) -> Engine: ...  # noqa: N802  (a class seen as the function that makes one)
    def Layout(self, pages: int, run_bytes: int, **dims: Any) -> Any: ...  # noqa: N802
    def Ticket(self, text: str) -> Ticket: ...  # noqa: N802
    def Content(self, chain: bytes, part: bytes) -> Content: ...  # noqa: N802
    def content_chain(
        self,
        namespace: bytes,
        extra: bytes,
        tokens: Any,
        block_tokens: int,
        items: Sequence[tuple[int, bytes]] = ...,
    ) -> bytes: ...


def load() -> Native:
    """Import kvik's public face."""
    return cast(Native, importlib.import_module("kvik"))


def gpu_of(address: int) -> str:
    """The PCI address of the GPU that this memory lies on, which is one's; empty where CUDA does not tell."""
    try:
        return gpu_address(address) or ""
    except KvikError as error:
        logger.warning("kvik: CUDA does not say which GPU memory at %#x lies on: %s", address, error)
        return ""


def error_code(error: BaseException) -> str:
    """The stable name of an error: kvik's own `code`, or the class name of anything else."""
    return str(getattr(error, "code", type(error).__name__))
