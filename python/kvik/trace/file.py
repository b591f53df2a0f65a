"""A recording as a file: lines of JSON, first the format, then layouts and transfers, last the totals.

Every line is complete in itself, so a file that was cut off can be read up to there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import kvik
from kvik.config.words import shown

FORMAT = "kvik-trace/2"
LAST_LINE = b'\n{"end":'
"""How the last line begins, with the end of the one before it."""
PageIds = npt.NDArray[np.uint32]

MOST_PAGES = 1 << 20
"""Pages of a transfer, as the engine has it."""

MOST_IDS = 1 << 28
"""Page ids of a whole recording that are held in memory: 1 GiB."""


class TraceError(Exception):
    """A recording that cannot be read, made or moved; the text says why."""


@dataclass(frozen=True)
class Dims:
    """A layout of the recorded engine, with the digest that its lines name it by."""

    digest: str
    pages: int
    run_bytes: int
    page_stride: int
    layers: int
    layer_stride: int | None
    layer_offsets: tuple[int, ...] | None
    slices: int
    slice_stride: int
    offset: int

    def layout(self) -> kvik.Layout:
        """The layout itself."""
        given: dict[str, Any] = {"layer_stride": self.layer_stride}
        if self.layer_offsets is not None:
            given = {"layer_offsets": list(self.layer_offsets)}
        return kvik.Layout(
            self.pages,
            self.run_bytes,
            page_stride=self.page_stride,
            layers=self.layers,
            slices=self.slices,
            slice_stride=self.slice_stride,
            offset=self.offset,
            **given,
        )

    @property
    def page_bytes(self) -> int:
        """Bytes of a page in all its layers."""
        return self.run_bytes * self.slices * self.layers


@dataclass(frozen=True)
class Moved:
    """One transfer. Ids count parts of pages where `parts` is more than 1, as in `Region.pages`."""

    t: float
    """Seconds from the start of the recording to the call."""
    op: str
    traffic_class: kvik.TrafficClassName
    peer: int
    layout: str
    memory: str
    """"shared" if kvik allocated the engine's region, else "host"."""
    pages: PageIds
    layers: tuple[int, int]
    slices: tuple[int, int]
    parts: int
    positions: PageIds | None
    """Positions in the owner's grant; None where all of it was meant."""
    transport: str
    checksums: bool
    bytes: int
    outcome: str
    extents: int | None
    times: dict[str, float]
    """Seconds by part of the report, such as `total_s`; empty unless the outcome is "ok"."""


@dataclass
class Trace:
    """All of a recording."""

    kvik: str = ""
    layouts: dict[str, Dims] = field(default_factory=dict)
    moved: list[Moved] = field(default_factory=list)
    dropped: int = 0
    """Transfers that are missing because they came faster than they were written."""
    lost: int = 0
    """By how many transfers the lines differ from what the last line says."""
    seconds: float | None = None
    """How long was recorded; None when the end is missing."""
    notices: list[str] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether the recording has its end, and lacks nothing before it."""
        return self.seconds is not None and self.dropped == 0 and self.lost == 0


def read(path: Path) -> Trace:
    """Read a recording. One that was cut off is read up to there, and `notices` says so.

    Raises TraceError, with the line's number, for what is not a recording or of another version.
    """
    trace, ids = Trace(), 0
    for number, line, cut in _lines(path):
        said = _said(path, number, line, cut)
        if said is None:
            trace.notices.append(f"line {number} was cut off and is left out")
        elif number == 1:
            trace.kvik = _check_format(path, said)
        else:
            ids += _take(path, number, trace, said)
        if ids > MOST_IDS:
            raise TraceError(f"{path} names more than {MOST_IDS} page ids: record in shorter parts")
    if not trace.kvik:
        raise TraceError(f"{path} is empty: it is no recording")
    if trace.seconds is None:
        trace.notices.append("the recording has no end: it was cut off, and later transfers are missing")
    if trace.dropped:
        trace.notices.append(
            f"{trace.dropped} transfers are missing: they came faster than they were written"
        )
    if trace.lost:
        have, counted = len(trace.moved), len(trace.moved) + trace.lost
        trace.notices.append(
            f"{have} transfers have a line, and the last line counts {counted}: lines are missing"
        )
    return trace


def _said(path: Path, number: int, line: bytes, cut: bool) -> dict[str, Any] | None:
    """What a line says; None for a last one that was cut off."""
    try:
        said = json.loads(line)
    except (ValueError, RecursionError) as error:
        if cut and number > 1:
            return None
        raise _wrong(path, number, error) from error
    if not isinstance(said, dict):
        raise _wrong(path, number, TypeError("it is not an object"))
    return said


def _wrong(path: Path, number: int, error: Exception) -> TraceError:
    return TraceError(f"{path} line {number} is not a line of a recording: {shown(repr(error), 300)}")


def _lines(path: Path) -> Iterator[tuple[int, bytes, bool]]:
    """Each line with its number, and whether it is the last one and has no end."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                yield number, line, not line.endswith(b"\n")
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror}") from error


def _check_format(path: Path, said: dict[str, Any]) -> str:
    found = said.get("format")
    if found != FORMAT:
        raise TraceError(f"{path} has the format {shown(repr(found))}; this version of kvik reads {FORMAT!r}")
    return shown(str(said.get("kvik") or "unknown"))


def _take(path: Path, number: int, trace: Trace, said: dict[str, Any]) -> int:
    """Add a line to what was read: how many page ids it has."""
    try:
        return _add(trace, said)
    except (KeyError, IndexError, TypeError, ValueError, OverflowError) as error:
        raise _wrong(path, number, error) from error


def _add(trace: Trace, said: dict[str, Any]) -> int:
    if "dims" in said:
        dims = _dims(shown(str(said["layout"])), said["dims"])
        trace.layouts[dims.digest] = dims
        return 0
    if "op" in said:
        moved = _moved(said)
        if moved.layout not in trace.layouts:
            raise ValueError(f"layout {moved.layout!r} was not described before")
        trace.moved.append(moved)
        return moved.pages.size + (0 if moved.positions is None else moved.positions.size)
    if "dropped" in said:
        trace.dropped += int(said["dropped"])
    if "end" in said:
        end = said["end"]
        trace.seconds = _seconds(end["seconds"])
        trace.dropped = max(trace.dropped, int(end["dropped"]))
        trace.lost = int(end["transfers"]) - len(trace.moved)
    return 0


def _dims(digest: str, said: dict[str, Any]) -> Dims:
    offsets, stride = said["layer_offsets"], said["layer_stride"]
    sizes = ("pages", "run_bytes", "page_stride", "layers", "slices", "slice_stride", "offset")
    dims = Dims(
        digest=digest,
        layer_stride=None if stride is None else int(stride),
        layer_offsets=None if offsets is None else tuple(int(offset) for offset in offsets),
        **{name: int(said[name]) for name in sizes},
    )
    try:
        dims.layout()
    except kvik.KvikError as error:
        raise ValueError(str(error)) from error
    return dims


def _moved(said: dict[str, Any]) -> Moved:
    if said["op"] not in ("read", "write"):
        raise ValueError(f"the operation {said['op']!r} is unknown")
    if said["class"] not in ("handover", "bulk"):
        raise ValueError(f"the class {said['class']!r} is unknown")
    if said["memory"] not in ("host", "shared"):
        raise ValueError(f"the memory {said['memory']!r} is unknown")
    positions = said["remote"]["positions"]
    return Moved(
        t=_seconds(said["t"]),
        op=said["op"],
        traffic_class=said["class"],
        peer=int(said["peer"]),
        layout=shown(str(said["layout"])),
        memory=said["memory"],
        pages=_ids(said["pages"]),
        layers=_range(said["layers"]),
        slices=_range(said["slices"]),
        parts=int(said.get("parts", 1)),
        positions=None if positions is None else _ids(positions),
        transport=shown(str(said["transport"])),
        checksums=bool(said["checksums"]),
        bytes=int(said["bytes"]),
        outcome=shown(str(said["outcome"])),
        extents=None if said.get("extents") is None else int(said["extents"]),
        times={name: _seconds(value) for name, value in said.items() if name.endswith("_s")},
    )


def _seconds(said: Any) -> float:
    """A time: Python's JSON has numbers that are none."""
    value = float(said)
    if not math.isfinite(value):
        raise ValueError(f"{value} is no time")
    return value


def _ids(runs: list[Any]) -> PageIds:
    """The ids of a list of numbers and of `[first, count]` pairs."""
    pairs = [(run, 1) if isinstance(run, int) else (int(run[0]), int(run[1])) for run in runs]
    if not pairs or any(first < 0 or count < 1 or first + count > 1 << 32 for first, count in pairs):
        raise ValueError("a list of page ids that is empty or out of range")
    if sum(count for _, count in pairs) > MOST_PAGES:
        raise ValueError(f"more than {MOST_PAGES} pages in one transfer")
    return expanded(pairs)


def expanded(pairs: list[tuple[int, int]]) -> PageIds:
    """The ids of pairs of a first one and the count of those that follow each other."""
    firsts, counts = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    before = np.cumsum(counts) - counts
    return np.asarray(np.repeat(firsts - before, counts) + np.arange(counts.sum()), dtype=np.uint32)


def _range(pair: list[Any]) -> tuple[int, int]:
    start, end = int(pair[0]), int(pair[1])
    if not 0 <= start < end:
        raise ValueError(f"{pair} is not a range")
    return start, end
