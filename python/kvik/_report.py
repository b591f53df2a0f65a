"""The report of a transfer."""

from dataclasses import dataclass


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
    """`"tcp"`, `"local"`, or `"self"` for a ticket of the engine itself."""
    way: str
    """How the transport moved the bytes: `"tcp x4"`, `"memfd"`, `"process_vm_readv"`, `"copy"`."""
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
    passed_over: tuple[str, ...]
    """Transports that `"auto"` did not take, each as `"transport: reason"`."""
