"""The reports of a transfer, of several reads and of a warm-up, and how long a transfer would take."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Estimate:
    """How long a transfer with a peer would take, or was expected to.

    By what this engine's own transfers have measured on the present connection, over the same transport: a
    line through bytes and seconds, found by least squares, in which older transfers count less.
    """

    seconds: float
    """All of it: `start_s + (queued_bytes + bytes) / bytes_per_second`."""
    start_s: float
    """Seconds before the first byte; 0 as long as all transfers had about one size, since then nothing tells
    it from the rest."""
    bytes_per_second: float
    """From then on."""
    queued_bytes: int
    """Bytes that open transfers with the peer, of either side, have still to move, as if they all went first.
    Only `Engine.estimate` looks at this: it is 0 in a report and in `Engine.explain`."""
    samples: int
    """Transfers that were measured."""


@dataclass(frozen=True, slots=True)
class Report:
    """How a transfer went. Made by the native module when the transfer has succeeded."""

    bytes: int
    """Bytes moved."""
    extents: int
    """Contiguous runs of memory, merged: on both sides where this engine copied, else on this side."""
    pages: int
    """Pages of the local page set, or parts of pages."""
    transport: str
    """`"tcp"`, `"local"`, what the NICs are reached by (`"verbs"`, `"libfabric"`, which `"efa"` is too, or
    `"plugin"`), or `"self"` for a ticket of the engine itself."""
    mechanism: str
    """How the transport moved the bytes: `"4 channels"`, `"memfd"`, `"process_vm_readv"`, `"cuda_ipc"`,
    `"copy"`."""
    checks: tuple[str, ...]
    """The checks that ran, such as `("grant", "generation", "page_checksum")`; `"page_sample"` where
    only some pages were compared."""
    plan_s: float
    """Seconds to turn the page sets into extents."""
    post_s: float
    """Seconds to hand them to the transport."""
    wire_s: float
    """Seconds until the last byte was there."""
    verify_s: float
    """Seconds of the checks that ran after that."""
    total_s: float
    """Seconds from the call to the end."""
    rejected_transports: tuple[str, ...]
    """The other transports of the engine, each as `"transport: reason"` why it was not taken."""
    estimate: Estimate | None
    """How long it was expected to take, when it began; None where nothing was measured with the peer
    before."""


@dataclass(frozen=True, slots=True)
class JointReport:
    """How several reads went as one. Made by the native module when all have succeeded."""

    bytes: int
    """Bytes that all of them moved."""
    total_s: float
    """Seconds from the call to the end of the last."""
    reads: tuple[Report, ...]
    """Of each, in the order of the call. Their times count from the call, and planning one takes until those
    before it are planned."""


@dataclass(frozen=True, slots=True)
class NicPair:
    """A NIC of this engine, and the one of the peer that it reads from and writes to."""

    nic: str
    """The device here."""
    peer_nic: int
    """The number of the peer's NIC, from 0."""
    state: str
    """`"opened"` now, `"already_open"`, or `"failed"`."""
    reason: str
    """Why it failed; empty when it did not."""


@dataclass(frozen=True, slots=True)
class WarmUpReport:
    """What a warm-up found and made. Made by the native module when it has ended."""

    connected: bool
    """Whether there was no connection to the peer before."""
    transports: tuple[str, ...]
    """What transfers can go over at once: `"local"`, `"tcp"`, what the NICs are called, or `"self"`."""
    opened: tuple[str, ...]
    """Those of them for which something was opened now."""
    channels: int
    """Data channels that have joined."""
    pairs: tuple[NicPair, ...]
    """One for each NIC here, where the peer has NICs of the same provider."""
    rejected_transports: tuple[str, ...]
    """Transports that do not reach the peer, each as `"transport: reason"`."""
    took_s: float
    """Seconds from the call to the end."""

    @property
    def failed(self) -> tuple[NicPair, ...]:
        """The pairs that could not be opened."""
        return tuple(pair for pair in self.pairs if pair.state == "failed")

    @property
    def did_nothing(self) -> bool:
        """Whether everything was there already."""
        return not (self.connected or self.opened or self.failed)
