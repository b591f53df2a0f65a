"""A stand-in for kvik's public face that keeps its contract, in one process and without threads.

Engines find each other in one `FakeNative`. Bytes are really moved. Nothing ends by itself: a transfer is
decided when somebody asks whether it is done, so a test can hold one open (`native.held`), break it
(`native.faults`), or let time pass (`native.now`).
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np


class KvikError(Exception):
    """Base of the errors; `code` is the stable name."""

    def __init__(self, code: str, text: str = "") -> None:
        super().__init__(text or code)
        self.code = code


@dataclass(frozen=True)
class FakeReport:
    bytes: int
    pages: int
    extents: int
    transport: str = "tcp"
    way: str = "tcp x4"
    checks: tuple[str, ...] = ("grant", "generation", "page_checksum")
    plan_s: float = 1e-5
    post_s: float = 1e-5
    wire_s: float = 1e-3
    verify_s: float = 1e-4
    total_s: float = 2e-3
    passed_over: tuple[str, ...] = ()


class FakeLayout:
    def __init__(
        self,
        pages: int,
        run_bytes: int,
        *,
        page_stride: int | None = None,
        layers: int = 1,
        layer_offsets: list[int] | None = None,
        offset: int = 0,
    ) -> None:
        self.pages, self.run_bytes, self.layers = pages, run_bytes, layers
        self.page_stride = page_stride or run_bytes
        self.offsets = [offset + base for base in layer_offsets or [0]]
        assert len(self.offsets) == layers

    @property
    def content(self) -> tuple[int, int]:
        """What two sides must agree on; strides, offsets and page counts may differ."""
        return self.run_bytes, self.layers


@dataclass(frozen=True)
class FakePageSet:
    region: FakeRegion
    layout: FakeLayout
    ids: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return len(self.ids) * self.layout.run_bytes * self.layout.layers

    def address(self, layer: int, page: int) -> int:
        return self.region.address + self.layout.offsets[layer] + page * self.layout.page_stride


class FakeRegion:
    def __init__(self, address: int, nbytes: int) -> None:
        self.address, self.nbytes = address, nbytes

    def pages(self, layout: FakeLayout, ids: Any) -> FakePageSet:
        numbers = tuple(int(i) for i in np.asarray(ids))
        if any(not 0 <= i < layout.pages for i in numbers):
            raise KvikError("page_out_of_range")
        if len(set(numbers)) != len(numbers):
            raise KvikError("duplicate_page")
        return FakePageSet(self, layout, numbers)

    def close(self, _timeout: float = 5.0) -> None:
        return None


class FakeTicket:
    def __init__(self, text: str) -> None:
        parts = text.split("|")
        if len(text) > 256 or len(parts) != 5 or parts[0] != "kvik1":
            raise KvikError("ticket_invalid", f"not a ticket: {text[:40]!r}")
        _, self.engine_id, address, self.grant_id, self._expiry = parts
        self.addresses = [address]

    def __str__(self) -> str:
        return "|".join(("kvik1", self.engine_id, self.addresses[0], self.grant_id, self._expiry))

    def with_grant(self, grant_id: str, expiry: float) -> FakeTicket:
        assert len(bytes.fromhex(grant_id)) == 16
        assert expiry > 0
        return FakeTicket(f"kvik1|{self.engine_id}|{self.addresses[0]}|{grant_id}|{expiry:g}")


class FakeGrant:
    def __init__(self, native: FakeNative, pages: FakePageSet, expiry: float, grant_id: str) -> None:
        self._native, self.pages, self.id = native, pages, grant_id
        self._ends = native.now + expiry
        self._state = "live"

    @property
    def state(self) -> str:
        if self._state == "live" and self._native.now >= self._ends:
            self._state = "expired"
        return self._state

    def consume(self) -> None:
        self._state = "consumed"

    def revoke(self, _timeout: float = 5.0) -> None:
        self._state = "revoked"


class FakeTransfer:
    """Decided when polled. `local` None is a release: it confirms the use and moves nothing."""

    def __init__(
        self, native: FakeNative, local: FakePageSet | None, ticket: FakeTicket, remote: Any, deadline: float
    ) -> None:
        self._native, self._local, self.ticket = native, local, ticket
        self._remote = None if remote is None else tuple(int(i) for i in np.asarray(remote))
        self._ends = native.now + deadline
        self._error: KvikError | None = None
        self._report: FakeReport | None = None
        self._cancelled = False

    @property
    def done(self) -> bool:
        if self._error is None and self._report is None and not self._native.held:
            try:
                self._report = self._try()
            except KvikError as error:
                self._error = error
        return self._error is not None or self._report is not None

    def report(self) -> FakeReport | None:
        return self._report

    def error(self) -> KvikError | None:
        return self._error

    def cancel(self) -> None:
        self._cancelled = True

    def _try(self) -> FakeReport | None:
        if self._cancelled:
            raise KvikError("cancelled")
        if self._native.now >= self._ends:
            raise KvikError("deadline_exceeded")
        if self._local is not None and self._native.faults:
            raise KvikError(self._native.faults.pop(0))
        engine = self._native.engines.get(self.ticket.engine_id)
        if engine is None or engine.closed:
            raise KvikError("peer_unreachable")
        grant = engine.grants.get(self.ticket.grant_id)
        if grant is None:
            return None  # not issued yet: the owner lets it wait within its deadline
        if grant.state != "live":
            raise KvikError(f"grant_{grant.state}")
        moved = 0 if self._local is None else self._move(self._local, grant.pages)
        grant.consume()
        return FakeReport(moved, len(self._local.ids) if self._local else 0, 1)

    def _move(self, local: FakePageSet, granted: FakePageSet) -> int:
        if local.layout.content != granted.layout.content:
            raise KvikError("layout_mismatch")
        remote = granted.ids if self._remote is None else self._remote
        if len(remote) != len(local.ids):
            raise KvikError("shape_mismatch")
        if not set(remote) <= set(granted.ids):
            raise KvikError("page_not_granted")
        for layer in range(local.layout.layers):
            for here, there in zip(local.ids, remote, strict=True):
                ctypes.memmove(
                    local.address(layer, here), granted.address(layer, there), local.layout.run_bytes
                )
        return local.nbytes


class FakeEngine:
    def __init__(self, native: FakeNative, number: int, options: dict[str, Any]) -> None:
        self._native, self.options = native, options
        self.id = f"{number:032x}"
        self.addresses = [f"127.0.0.1:{40000 + number}"]
        self.grants: dict[str, FakeGrant] = {}
        self.transfers: list[FakeTransfer] = []
        self.regions: list[FakeRegion] = []
        self.closed = False

    def register(self, obj: tuple[int, int]) -> FakeRegion:
        self.regions.append(FakeRegion(*obj))
        return self.regions[-1]

    def ticket_template(self, _layout: FakeLayout) -> FakeTicket:
        return FakeTicket(f"kvik1|{self.id}|{self.addresses[0]}||0")

    def grant(
        self,
        pages: FakePageSet,
        *,
        right: str,
        use: int,
        expiry: float,
        max_expiry: float = 600.0,
        grant_id: str | None = None,
    ) -> FakeGrant:
        assert (right, use) == ("read", 1)
        assert expiry <= max_expiry
        assert grant_id is not None
        if self._native.refuse_grants:
            raise KvikError("memory_cap_reached")
        assert grant_id not in self.grants, "a grant id was used twice"
        self.grants[grant_id] = FakeGrant(self._native, pages, expiry, grant_id)
        return self.grants[grant_id]

    def read(
        self,
        local: FakePageSet,
        ticket: FakeTicket,
        remote: Any = None,
        *,
        deadline: float,
        confirm: bool = True,
    ) -> FakeTransfer:
        assert confirm, "the connector reads in one part"
        return self._open(FakeTransfer(self._native, local, ticket, remote, deadline))

    def release(self, ticket: FakeTicket, *, deadline: float) -> FakeTransfer:
        return self._open(FakeTransfer(self._native, None, ticket, None, deadline))

    def close(self, _timeout: float = 5.0) -> None:
        self.closed = True

    def _open(self, transfer: FakeTransfer) -> FakeTransfer:
        assert not self.closed
        self.transfers.append(transfer)
        return transfer


@dataclass
class FakeNative:
    """The module `kvik`, as far as the connector uses it."""

    now: float = 0.0
    held: bool = False
    refuse_grants: bool = False
    faults: list[str] = field(default_factory=list)
    engines: dict[str, FakeEngine] = field(default_factory=dict)
    KvikError = KvikError
    Layout = FakeLayout
    Ticket = FakeTicket
    _numbers = itertools.count(1)

    def Engine(self, **options: Any) -> FakeEngine:  # noqa: N802
        engine = FakeEngine(self, next(self._numbers), options)
        self.engines[engine.id] = engine
        return engine

    @staticmethod
    def content_chain(namespace: bytes, extra: bytes, tokens: Any, block_tokens: int) -> list[bytes]:
        """One link a KV block, the last one perhaps partial; the root covers namespace and extra keys."""
        head = b"".join(len(part).to_bytes(8, "little") + part for part in (namespace, extra))
        parent, chain = hashlib.blake2b(head, digest_size=32).digest(), []
        ids = np.ascontiguousarray(tokens, dtype=np.uint32)
        for start in range(0, len(ids), block_tokens):
            block = ids[start : start + block_tokens].tobytes()
            parent = hashlib.blake2b(block, key=parent, digest_size=32).digest()
            chain.append(parent)
        return chain
