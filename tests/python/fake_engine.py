"""A stand-in for kvik's public face that keeps its contract, in one process and without threads.

Engines find each other in one `FakeNative`. Bytes are really moved. Nothing ends by itself: a transfer is
decided when somebody asks whether it is done, so a test can hold one open (`native.held`), break it
(`native.faults`: a code for each read to come, "" for none), or let time pass (`native.now`).
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


class KvikError(Exception):
    """Base of the errors; `code` is the stable name, `read` the place of a read among those of one call."""

    def __init__(self, code: str, text: str = "", read: int | None = None) -> None:
        super().__init__(text or code)
        self.code, self.read = code, read


class SecretRequired(KvikError):  # noqa: N818  (it is called so)
    def __init__(self, text: str) -> None:
        super().__init__("secret_required", text)


@dataclass(frozen=True)
class FakeReport:
    bytes: int
    pages: int
    extents: int
    transport: str = "tcp"
    mechanism: str = "4 channels"
    checks: tuple[str, ...] = ("grant", "generation", "page_checksum")
    plan_s: float = 1e-5
    post_s: float = 1e-5
    wire_s: float = 1e-3
    verify_s: float = 1e-4
    total_s: float = 2e-3
    rejected_transports: tuple[str, ...] = ()


@dataclass(frozen=True)
class FakeJointReport:
    reads: tuple[FakeReport, ...]


class FakeLayout:
    def __init__(
        self,
        pages: int,
        run_bytes: int,
        *,
        page_stride: int | None = None,
        layers: int = 1,
        layer_offsets: list[int] | None = None,
        slices: int = 1,
        slice_stride: int | None = None,
        offset: int = 0,
    ) -> None:
        self.pages, self.run_bytes, self.layers, self.slices = pages, run_bytes, layers, slices
        self.slice_stride = slice_stride or run_bytes
        self.page_stride = page_stride or run_bytes * slices
        self.offsets = [offset + base for base in layer_offsets or [0]]
        assert len(self.offsets) == layers


Piece = tuple[int, int]  # address, bytes


@dataclass(frozen=True)
class FakePageSet:
    """Pages by number: number n is part n % parts of page n // parts, as long as a run divided by parts."""

    region: FakeRegion
    layout: FakeLayout
    ids: tuple[int, ...]
    layers: tuple[int, int]
    slices: tuple[int, int]
    parts: int

    @property
    def nbytes(self) -> int:
        return (self.layers[1] - self.layers[0]) * sum(size for _, size in self.stream(0))

    def stream(self, layer: int) -> list[Piece]:
        """The bytes of one of its layers in the order of the stream: number by number, and in each slice by
        slice."""
        size = self.layout.run_bytes // self.parts
        base = self.region.address + self.layout.offsets[self.layers[0] + layer]
        return [
            (
                base
                + number // self.parts * self.layout.page_stride
                + slice_ * self.layout.slice_stride
                + number % self.parts * size,
                size,
            )
            for number in self.ids
            for slice_ in range(*self.slices)
        ]


class FakeRegion:
    def __init__(self, address: int, nbytes: int) -> None:
        self.address, self.nbytes = address, nbytes

    def pages(
        self,
        layout: FakeLayout,
        ids: Any,
        *,
        layers: tuple[int, int] | None = None,
        slices: tuple[int, int] | None = None,
        parts: int = 1,
    ) -> FakePageSet:
        numbers = tuple(int(i) for i in np.asarray(ids))
        first, end = slices or (0, layout.slices)
        begin, until = layers or (0, layout.layers)
        if layout.run_bytes % parts or not 0 <= begin < until <= layout.layers:
            raise KvikError("invalid_argument")
        if not 0 <= first < end <= layout.slices or any(not 0 <= i < layout.pages * parts for i in numbers):
            raise KvikError("page_out_of_range")
        if len(set(numbers)) != len(numbers):
            raise KvikError("duplicate_page")
        return FakePageSet(self, layout, numbers, (begin, until), (first, end), parts)

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


@dataclass(frozen=True)
class FakeContent:
    chain: bytes
    part: bytes

    def __post_init__(self) -> None:
        if not self.chain or len(self.chain) % 32 or not self.part:
            raise KvikError("invalid_argument", f"a chain of {len(self.chain)} bytes")

    def __len__(self) -> int:
        return len(self.chain) // 32

    def claim(self, link: int) -> bytes:
        """What is stated of the pages up to this one; -1: of all."""
        key = self.chain[-32:] if link == -1 else self.chain[32 * link : 32 * link + 32]
        return hashlib.blake2b(self.part, key=key, digest_size=32, person=b"claim").digest()


class FakeGrant:
    def __init__(
        self, native: FakeNative, pages: FakePageSet, expiry: float, grant_id: str, content: FakeContent
    ) -> None:
        if len(content) != len(pages.ids):
            raise KvikError("invalid_argument", f"{len(pages.ids)} pages, {len(content)} links")
        self._native, self.pages, self.id, self.content = native, pages, grant_id, content
        self._ends = native.now + expiry
        self._state = "live"
        self.confirmed: list[str] = []  # engine ids, in the order of their confirmations
        self.declared = 1  # readers, the most that a confirmation has spoken of

    @property
    def state(self) -> str:
        if self._state == "live" and self._native.now >= self._ends:
            self._state = "expired"
        return self._state

    def confirm(self, engine_id: str, readers: int) -> None:
        """Consumed when so many different engines have confirmed."""
        self.confirmed.append(engine_id)
        self.declared = max(self.declared, readers)
        if len(set(self.confirmed)) >= self.declared:
            self.consume()

    def consume(self) -> None:
        self._state = "consumed"

    def wait(self, timeout: float = 0.0) -> str | None:
        """Nothing ends while it is waited for."""
        self._native.waits.append(timeout)
        return None if self.state == "live" else self.state

    def revoke(self, _timeout: float = 5.0) -> None:
        self._state = "revoked"


@dataclass
class Remote:
    """Which of the granted pages a read is about, by their places in the grant."""

    positions: range
    layers: tuple[int, int] | None
    slices: tuple[int, int] | None
    parts: int

    @property
    def last(self) -> int:
        """The link of the page that holds the last position; -1, the grant's last, for none."""
        return (self.positions.stop - 1) // self.parts if self.positions else -1


class FakeTransfer:
    """Decided when polled. `local` None is a release: it confirms the use and moves nothing."""

    def __init__(
        self,
        reader: FakeEngine,
        local: FakePageSet | None,
        ticket: FakeTicket,
        remote: Remote,
        deadline: float,
        readers: int,
        content: FakeContent,
        confirm: bool,
    ) -> None:
        self.confirm = confirm
        if remote.last >= len(content):
            raise KvikError("invalid_argument", "the content does not reach to the last position")
        self.content = content
        self._native, self._reader, self._local, self.ticket = reader.native, reader, local, ticket
        self._remote, self.readers = remote, readers
        self._ends = self._native.now + deadline
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
        if self._local is not None and self._native.faults and (code := self._native.faults.pop(0)):
            raise KvikError(code)
        engine = self._native.engines.get(self.ticket.engine_id)
        if engine is None or engine.closed:
            raise KvikError("peer_unreachable")
        grant = engine.grants.get(self.ticket.grant_id)
        if grant is None:
            return None  # not issued yet: the owner lets it wait within its deadline
        if grant.state != "live":
            raise KvikError(f"grant_{grant.state}")
        self._check_content(grant.content)
        moved = 0 if self._local is None else self._move(self._local, grant.pages)
        if self.confirm:
            grant.confirm(self._reader.id, self.readers)
        return FakeReport(moved, len(self._local.ids) if self._local else 0, 1)

    def _check_content(self, granted: FakeContent) -> None:
        last = self._remote.last
        if last >= len(granted):
            raise KvikError("page_not_granted")
        if self.content.claim(last) != granted.claim(last):
            raise KvikError("content_mismatch")
        if self.confirm and last not in (-1, len(granted) - 1):
            raise KvikError("content_mismatch", "only who states the whole content may use it up")

    def _move(self, local: FakePageSet, granted: FakePageSet) -> int:
        """Copy the remote stream into the local one; only the numbers of bytes and layers must agree."""
        parts = self._remote.parts
        ids = [granted.ids[at // parts] * parts + at % parts for at in self._remote.positions]
        asked = self._remote.layers or granted.layers
        if not granted.layers[0] <= asked[0] <= asked[1] <= granted.layers[1]:
            raise KvikError("page_not_granted", f"layers {asked}, granted are {granted.layers}")
        remote = granted.region.pages(
            granted.layout, ids, layers=asked, slices=self._remote.slices, parts=parts
        )
        layers = local.layers[1] - local.layers[0]
        if layers != remote.layers[1] - remote.layers[0]:
            raise KvikError("shape_mismatch")
        for layer in range(layers):
            here, there = local.stream(layer), remote.stream(layer)
            sizes = {size for _, size in here} | {size for _, size in there}
            if len(here) != len(there) or len(sizes) != 1:
                raise KvikError("shape_mismatch")
            for (to, size), (source, _) in zip(here, there, strict=True):
                ctypes.memmove(to, source, size)
        return local.nbytes


@dataclass(frozen=True)
class FakeRead:
    """One of the reads of a call."""

    local: FakePageSet
    ticket: FakeTicket
    positions: range
    confirm: bool = True
    remote_layers: tuple[int, int] | None = None
    remote_slices: tuple[int, int] | None = None
    remote_parts: int = 1
    readers: int = 1
    content: FakeContent | None = None


class FakeJointRead:
    """Reads that end as one: the first that is found to have failed cancels the others."""

    def __init__(self, native: FakeNative, transfers: list[FakeTransfer]) -> None:
        self.native, self.transfers = native, transfers
        self._cause: KvikError | None = None

    @property
    def done(self) -> bool:
        for place, transfer in enumerate(self.transfers):
            error = transfer.error() if transfer.done else None
            if error is not None and self._cause is None:
                self._cause = KvikError(error.code, f"reads[{place}]: {error}", place)
                self.cancel()
        return all(transfer.done for transfer in self.transfers)

    def wait(self, timeout: float | None = None) -> FakeJointReport:
        self.native.waits.append(timeout)
        if not self.done:
            raise KvikError("wait_timeout")
        if (report := self.report()) is None:
            raise self._cause or KvikError("cancelled")
        return report

    def report(self) -> FakeJointReport | None:
        reports = [transfer.report() for transfer in self.transfers]
        ended = tuple(report for report in reports if report is not None)
        return FakeJointReport(ended) if len(ended) == len(reports) else None

    def error(self) -> KvikError | None:
        return self._cause if self.done and self.report() is None else None

    def outcomes(self) -> list[FakeReport | KvikError | None] | None:
        return [one.report() or one.error() for one in self.transfers] if self.done else None

    def cancel(self) -> None:
        self._cause = self._cause or KvikError("cancelled")
        for transfer in self.transfers:
            transfer.cancel()


class FakeEngine:
    def __init__(self, native: FakeNative, number: int, options: dict[str, Any]) -> None:
        self.native, self.options = native, options
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
        after: object = None,
        tag: str = "",
        content: FakeContent,
    ) -> FakeGrant:
        assert tag
        assert after is None
        assert (right, use) == ("read", 1)
        assert expiry <= max_expiry
        assert grant_id is not None
        if self.native.refuse_grants:
            raise KvikError("memory_cap_reached")
        assert grant_id not in self.grants, "a grant id was used twice"
        self.grants[grant_id] = FakeGrant(self.native, pages, expiry, grant_id, content)
        return self.grants[grant_id]

    def read_all(
        self, reads: Sequence[FakeRead], *, deadline: float, after: object = None, tag: str = ""
    ) -> FakeJointRead:
        assert tag
        assert after is None
        transfers = []
        for place, read in enumerate(reads):
            try:
                transfers.append(self._transfer(read, deadline))
            except KvikError as error:
                raise KvikError(error.code, str(error), place) from error
        return FakeJointRead(self.native, [self._open(transfer) for transfer in transfers])

    def _transfer(self, read: FakeRead, deadline: float) -> FakeTransfer:
        assert read.content is not None
        remote = Remote(read.positions, read.remote_layers, read.remote_slices, read.remote_parts)
        return FakeTransfer(
            self, read.local, read.ticket, remote, deadline, read.readers, read.content, read.confirm
        )

    def release(
        self, ticket: FakeTicket, *, deadline: float, readers: int = 1, tag: str = "", content: FakeContent
    ) -> FakeTransfer:
        assert tag
        remote = Remote(range(0), None, None, 1)
        return self._open(FakeTransfer(self, None, ticket, remote, deadline, readers, content, True))

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
    waits: list[float | None] = field(default_factory=list)  # the timeouts of what was waited for
    engines: dict[str, FakeEngine] = field(default_factory=dict)
    KvikError = KvikError
    SecretRequired = SecretRequired
    Layout = FakeLayout
    Ticket = FakeTicket
    Read = FakeRead
    Content = FakeContent
    _numbers = itertools.count(1)

    def Engine(self, **options: Any) -> FakeEngine:  # noqa: N802
        engine = FakeEngine(self, next(self._numbers), options)
        self.engines[engine.id] = engine
        return engine

    @staticmethod
    def content_chain(
        namespace: bytes,
        extra: bytes,
        tokens: Any,
        block_tokens: int,
        items: Sequence[tuple[int, bytes]] = (),
    ) -> bytes:
        """One link a KV block, the last one perhaps partial; the root covers namespace and extra keys, a link
        also the items that begin in its block."""
        parent, chain = hashlib.blake2b(_framed(namespace, extra), digest_size=32).digest(), b""
        ids = np.ascontiguousarray(tokens, dtype=np.uint32)
        for start in range(0, len(ids), block_tokens):
            block = ids[start : start + block_tokens].tobytes()
            here = [(at, key) for at, key in sorted(items) if start <= at < start + block_tokens]
            told = _framed(block, *(part for at, key in here for part in (at.to_bytes(8, "little"), key)))
            parent = hashlib.blake2b(told, key=parent, digest_size=32).digest()
            chain += parent
        return chain


def _framed(*parts: bytes) -> bytes:
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)
