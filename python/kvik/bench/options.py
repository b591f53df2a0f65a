"""The plan of a run: what is measured for how long, and every size that had to be changed, in words."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvik import TrafficClassName, TransportName, VerifyName
from kvik.bench.errors import BenchError
from kvik.bench.pages import MIN_PAGE, Cell, Op, Spread

TRANSPORTS: tuple[TransportName, ...] = ("tcp", "local", "nics", "auto")
OPS: tuple[Op, ...] = ("read", "write")
UNITS = {"GB/s": 1e9, "GiB/s": float(1 << 30), "Gb/s": 1e9 / 8}

LIMITS = 2
MIN_ROUNDS = 4
SLICE_SECONDS = 1.0
TOTAL_LIMIT_SECONDS = 4 * 3600.0
CELL_SPARE_SECONDS = 300.0
LONGEST_GRANT_SECONDS = 7 * 86400.0
"""The longest life of a grant that an engine gives; one of a target ends with its initiator, too."""

SPREAD_OVER = 4
BUFFER_FLOOR = 256 << 20
BUFFER_STEP = 2 << 20
BUFFERS_HELD = 3
"""The target's region, the initiator's region, and the other side of the memcpy."""


@dataclass(frozen=True)
class Options:
    """What was asked for, after the changes that the notices name."""

    transports: tuple[TransportName, ...]
    ops: tuple[Op, ...]
    page_bytes: tuple[int, ...]
    pages: tuple[int, ...]
    inflight: int
    channels: int
    layout: Spread
    memory: str
    buffer: int
    duration: float
    unit: str
    verify: VerifyName
    seed: int
    repetitions: int = 0
    """Batches of each cell that are timed one by one, in place of rounds beside limits; 0: rounds."""
    warmup: int = 0
    """Batches before them, timed apart."""
    traffic_class: TrafficClassName = "handover"

    def cells(self) -> list[Cell]:
        """All cells; one direction after the other, since each needs its source filled."""
        return [Cell(op, *size) for op, *size in itertools.product(self.ops, self.page_bytes, self.pages)]

    @property
    def rounds(self) -> int:
        """Turns that each contender gets in a cell."""
        return max(MIN_ROUNDS, round(self.duration / SLICE_SECONDS))

    @property
    def measured_s(self) -> float:
        """Seconds of all slices, if batches are short beside a slice; of repetitions nobody can say."""
        if self.repetitions:
            return 0.0
        return len(self.cells()) * (len(self.transports) + LIMITS) * self.duration

    @property
    def cell_s(self) -> float:
        """A bound for the life of a cell's grant."""
        if self.repetitions:
            return LONGEST_GRANT_SECONDS
        return (len(self.transports) + LIMITS) * self.duration * 4 + CELL_SPARE_SECONDS


def size_text(nbytes: int) -> str:
    """Bytes in the largest binary unit that gives a whole number."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if nbytes >= 1 << power and nbytes % (1 << power) == 0:
            return f"{nbytes >> power}{unit}"
    return f"{nbytes}B"


def split_list(values: Sequence[str]) -> list[str]:
    """Options that may be repeated, or hold a comma list, or both; order kept, repetitions dropped."""
    parts = [part.strip() for value in values for part in value.split(",")]
    return list(dict.fromkeys(part for part in parts if part))


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def settle_pages(page_bytes: Sequence[int], say: Callable[[str], None]) -> tuple[int, ...]:
    """Page sizes that the check of the bytes can work with: whole 64-bit words, not tiny."""
    settled = []
    for asked in page_bytes:
        page = max(_round_up(asked, 8), MIN_PAGE)
        if page != asked:
            say(f"page changed from {asked} B to {size_text(page)}: multiples of 8 B, at least {MIN_PAGE}")
        settled.append(page)
    return tuple(dict.fromkeys(settled))


def settle_buffer(
    asked: int | None,
    page_bytes: Sequence[int],
    pages: Sequence[int],
    inflight: int,
    available: int | None,
    say: Callable[[str], None],
    held: int = BUFFERS_HELD,
) -> int:
    """The bytes of each side's buffer: it holds the batches in flight, and by default spreads them widely.

    This host has `held` of them.
    """
    batch = max(page_bytes) * max(pages)
    needed = _round_up(batch * inflight, BUFFER_STEP)
    wanted = max(_round_up(batch * max(inflight, SPREAD_OVER), BUFFER_STEP), BUFFER_FLOOR)
    if asked is None:
        room = wanted if available is None else available // 2 // held // BUFFER_STEP * BUFFER_STEP
        buffer = max(min(wanted, room), needed)
        if buffer < wanted:
            say(f"buffer of {size_text(buffer)} in place of {size_text(wanted)}: memory is short")
    else:
        buffer = _round_up(asked, BUFFER_STEP)
        if buffer < needed:
            buffer = needed
            say(
                f"buffer rounded up from {size_text(asked)} to {size_text(buffer)}: "
                f"{inflight} x {max(pages)} pages of {size_text(max(page_bytes))} must fit"
            )
        elif buffer != asked:
            say(f"buffer rounded up from {size_text(asked)} to {size_text(buffer)}: a multiple of 2MiB")
    if available is not None and buffer * held > available:
        raise BenchError(
            f"{held} buffers of {size_text(buffer)} do not fit in {available >> 20} MiB "
            "of free memory; use smaller --page, --pages, --inflight or --buffer"
        )
    if buffer < batch * SPREAD_OVER:
        say(f"the largest batch spreads over {buffer / batch:.1f} times its size, less than {SPREAD_OVER}")
    return buffer


def fit_target(options: Options, offered: int, say: Callable[[str], None]) -> Options:
    """Make do with the buffer that a listening target offers."""
    if offered >= options.buffer:
        return options
    needed = max(options.page_bytes) * max(options.pages) * options.inflight
    if offered < needed:
        raise BenchError(
            f"the target offers {size_text(offered)}, the batches in flight need {size_text(needed)}: "
            "start it with a larger --buffer"
        )
    say(f"buffer reduced from {size_text(options.buffer)} to the {size_text(offered)} that the target offers")
    return replace(options, buffer=offered)


def demand_bounded(options: Options) -> None:
    """Refuse a run that nobody would wait for."""
    if options.measured_s > TOTAL_LIMIT_SECONDS:
        raise BenchError(
            f"{len(options.cells())} cells for {options.duration:g} s each would measure for "
            f"{options.measured_s / 3600:.1f} h; the limit is {TOTAL_LIMIT_SECONDS / 3600:g} h"
        )
