"""The article on batched submission: latency and bandwidth by blocks, means, the bend, and end to end."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvik_lab.physics.data import Samples
from kvik_lab.physics.fit import Fit, fit
from kvik_lab.physics.knee import Knee, find_knee
from kvik_lab.physics.models import MODELS
from kvik_lab.report.cells import Estimate
from kvik_lab.report.figures import Bars, Curve, Line, Lines, Mark, Part, Roofline, Stack, Stretch, Waterfall
from kvik_lab.report.model import Cell, Claim, Report, Section, Table, Verdict
from tests.lab.redrawn.pieces import Source, curve, limits, numbers, open_claim, settled, with_interval
from tests.lab.redrawn.printed import number

PLACES = {"hosts": "across hosts", "rings": "within a host"}
COUNTS = (20, 200, 2000)


@dataclass(frozen=True)
class Pair:
    """One cell: latencies in ms and bandwidths in GB/s of Transfer Engine (te) and LLM DataDist (dd)."""

    kib: int
    blocks: int
    te_ms: float
    dd_ms: float
    te_gb: float
    dd_gb: float

    @property
    def size(self) -> float:
        """Bytes moved."""
        return self.kib * 1024.0 * self.blocks


def pairs(source: Source, table: str) -> tuple[Pair, ...]:
    """The cells of a table, with both metrics together."""
    rows = source[table].rows
    found = []
    for first, kib in ((0, 16), (2, 128)):
        for at, count in enumerate(COUNTS):
            texts = [rows[first + shift][2 + at] for shift in (0, 1, 4, 5)]
            te_ms, dd_ms, te_gb, dd_gb = (number(text.partition(":")[2]) for text in texts)
            found.append(Pair(kib, count, te_ms, dd_ms, te_gb, dd_gb))
    return tuple(found)


def redraw() -> Report:
    """The report of the article."""
    source = Source("S1")
    sections = (
        *(place(source, table) for table in PLACES),
        means(source),
        bend(source),
        end_to_end(source),
        dilution(),
        Section("claims", "Claims and what they rest on", (), (), (), claims(source)),
        limits(
            "The spread of any number: each cell is one latency, with no number of repeats named.",
            "Where between 200 and 2,000 blocks the rate falls: no level between them was measured.",
            "Whether the send queue's depth causes it: no other depth was tried.",
            "What the first transfer costs with connections made lazily: no cold time is printed.",
            "Which tests the headline gains of 70 % and of 30 to 100 % sum up.",
        ),
    )
    return Report(f"Redrawn: {source.article.title}", sections)


def place(source: Source, table: str) -> Section:
    """Latency, bandwidth, and the identity of both."""
    found = pairs(source, table)
    rows = tuple(
        (
            f"{p.kib} KiB x {p.blocks:,}",
            p.te_ms,
            p.dd_ms,
            100 * (p.te_ms / p.dd_ms - 1),
            p.te_gb,
            1e-6 * p.size / p.te_ms,
            p.dd_gb,
            1e-6 * p.size / p.dd_ms,
        )
        for p in found
    )
    columns = (
        "blocks",
        "TE, ms",
        "DD, ms",
        "TE beside DD, %",
        "TE printed, GB/s",
        "TE size / time, GB/s",
        "DD printed, GB/s",
        "DD size / time, GB/s",
    )
    check = Table(f"{table}-identity", "Size over time", columns, rows, "KiB of 1,024 bytes, GB of 10^9.")
    levels = tuple(f"{p.kib}K x {p.blocks}" for p in found)
    figures = (
        Bars(
            f"{table}-ratio",
            f"Latency of TE over DD, {PLACES[table]}",
            "blocks",
            "ratio",
            levels,
            (
                Line("latency", tuple(Estimate(p.te_ms / p.dd_ms) for p in found)),
                Line("bandwidth", tuple(Estimate(p.te_gb / p.dd_gb) for p in found)),
            ),
            1.0,
        ),
        Lines(
            f"{table}-rates",
            f"Bandwidth by blocks, {PLACES[table]}",
            "blocks",
            "GB/s",
            _rates(found),
            (),
            True,
            True,
        ),
    )
    return source.section(table + "-section", source[table].title, (table,), (), (check,), figures)


def _rates(found: tuple[Pair, ...]) -> tuple[Curve, ...]:
    out = []
    for kib in (16, 128):
        here = [p for p in found if p.kib == kib]
        out.append(curve(f"TE, {kib}K", COUNTS, [p.te_gb for p in here]))
        out.append(curve(f"DD, {kib}K", COUNTS, [p.dd_gb for p in here]))
    return tuple(out)


def means(source: Source) -> Section:
    """Three means of the same ratios, each named."""
    rows: list[tuple[Cell, ...]] = []
    for table, name in PLACES.items():
        found = pairs(source, table)
        for metric, ratios, total in (
            (
                "latency",
                [p.te_ms / p.dd_ms for p in found],
                sum(p.te_ms for p in found) / sum(p.dd_ms for p in found),
            ),
            (
                "bandwidth",
                [p.te_gb / p.dd_gb for p in found],
                sum(p.dd_ms for p in found) / sum(p.te_ms for p in found),
            ),
        ):
            changes = 100 * (np.array(ratios) - 1)
            most = changes[np.argmax(np.abs(changes))]
            geometric = 100 * (float(np.exp(np.mean(np.log(ratios)))) - 1)
            rows.append((name, metric, float(changes.mean()), geometric, 100 * (total - 1), float(most)))
    columns = (
        "where",
        "metric",
        "arithmetic mean of changes, %",
        "geometric mean of ratios, %",
        "ratio of total times, %",
        "largest, %",
    )
    table_of = Table("means", "Changes from DD to TE, averaged in three ways", columns, tuple(rows))
    text = (
        "The arithmetic mean of percentages is what the article averages. The geometric mean does not "
        "depend on "
        "which side is the base. The ratio of total times weighs each cell by the time it takes, so the "
        "cells "
        "of 2,000 blocks decide it.",
    )
    return Section("means-section", "Means", text, (table_of,))


def batch(source: Source, table: str, most: int = 10_000) -> Samples:
    """TE's batches of up to `most` blocks."""
    found = [p for p in pairs(source, table) if p.blocks <= most]
    return Samples(
        f"TE {PLACES[table]}",
        "bytes",
        np.array([p.size for p in found]),
        np.array([1e-3 * p.te_ms for p in found]),
        np.array([float(p.blocks) for p in found]),
    )


def batched(source: Source, table: str) -> Fit:
    """The batched model through the cells below the bend."""
    return fit(batch(source, table, 200), MODELS["batched"], score=False)


def knee(source: Source, kib: int) -> Knee:
    """The bend of TE's time over blocks, across hosts."""
    found = [p for p in pairs(source, "hosts") if p.kib == kib]
    return find_knee(np.array([float(p.blocks) for p in found]), np.array([1e-3 * p.te_ms for p in found]))


def bend(source: Source) -> Section:
    """Fits of the batched model, and the bracket of the bend."""
    rows: list[tuple[Cell, ...]] = []
    for table, name in PLACES.items():
        for one in batched(source, table).parameters:
            rows.append(
                (name, one.name, Estimate(one.value, one.lo, one.hi), "yes" if one.identified else "no")
            )
    fits = Table(
        "batched-fit",
        "t = a + max(n c, B g), up to 200 blocks",
        ("where", "parameter", "value", "identified"),
        tuple(rows),
        "95 % intervals of the profile likelihood; four cells each.",
    )
    bends: list[tuple[Cell, ...]] = []
    marks = []
    for kib in (16, 128):
        found = knee(source, kib)
        steeper = found.slopes[1] / max(found.slopes[0], 1e-12)
        bends.append(
            (
                f"{kib} KiB",
                found.x,
                found.lo,
                found.hi,
                steeper,
                ", ".join(map(str, found.next_levels)),
                found.note,
            )
        )
        marks.append(
            Mark(f"{kib}K: between {found.lo:.0f} and {found.hi:.0f}", None, Stretch(found.lo, found.hi))
        )
    columns = ("block", "bend at", "from", "to", "slope after / before", "measure next", "note")
    knees = Table("knees", "The bend of TE's time over blocks, across hosts", columns, tuple(bends))
    figure = Lines(
        "knee-lines",
        "Time by blocks, and where the bend may lie",
        "blocks",
        "ms",
        _times(source),
        tuple(marks[:1]),
        True,
        True,
    )
    text = (
        "Three levels show that the times are no line, and cannot show where they bend: anywhere between the "
        "measured levels. The levels named below place it.",
    )
    return Section(
        "bend",
        "The batched model, and the fall beyond 200 blocks",
        text,
        (fits, knees),
        (figure, roof(source)),
    )


def _times(source: Source) -> tuple[Curve, ...]:
    found = pairs(source, "hosts")
    return tuple(
        curve(f"{side.upper()}, {kib}K", COUNTS, [getattr(p, f"{side}_ms") for p in found if p.kib == kib])
        for kib in (16, 128)
        for side in ("te", "dd")
    )


def ridge(found: Fit) -> float:
    """The block size in KiB from which bytes take longer than operations; both at the fitted values."""
    per_block, per_byte = found.values[1], found.values[2]
    return float(per_block / per_byte / 1024)


def roof(source: Source) -> Roofline:
    """TE's rate by block size under the ceilings of the fit, across hosts."""
    found = batched(source, "hosts")
    sizes = np.geomspace(4, 1024, 40)
    rate = np.minimum(sizes * 1024 / found.values[1], 1 / found.values[2]) / 1e9
    measured = tuple(
        curve(f"{count:,} blocks", (16, 128), [p.te_gb for p in pairs(source, "hosts") if p.blocks == count])
        for count in COUNTS
    )
    mark = Mark(f"ridge at {ridge(found):.0f} KiB", ridge(found))
    ceiling = curve("ceiling of the fit, without startup", sizes, rate, True)
    return Roofline(
        "batch-roof", "TE by block size, across hosts", "KiB a block", "GB/s", (ceiling,), measured, (mark,)
    )


def end_to_end(source: Source) -> Section:
    """Unbatched and batched times."""
    table = source["e2e"]
    before, after = numbers(table, "Unbatched"), numbers(table, "Batched")
    bars = Bars(
        "e2e-bars",
        "End to end",
        "context",
        "ms",
        table.column("Context"),
        (Line("unbatched", table.estimates("Unbatched")), Line("batched", table.estimates("Batched"))),
    )
    rows = tuple(
        (name, float(b - a), 100 * float((b - a) / b), float(b / a))
        for name, b, a in zip(table.column("Context"), before, after, strict=True)
    )
    columns = ("context", "saved, ms", "saved, %", "times faster")
    saved = Table("e2e-saved", "What batching saves", columns, rows)
    return source.section("e2e-section", "End to end", ("e2e",), (), (saved,), (bars,))


def dilution() -> Section:
    """The same transfer time in time to first token and in time per output token."""
    transfer = 150.0
    outputs = (1, 10, 100, 500, 1000, 1500, 4000)
    rows = tuple((f"{count:,}", transfer, transfer / count) for count in outputs)
    table = Table(
        "dilution",
        "150 ms of transfer, seen in two ways",
        ("output tokens", "in the time to first token, ms", "in each token, ms"),
        rows,
    )
    figure = Lines(
        "dilution-lines",
        "150 ms of transfer, spread over the output",
        "output tokens",
        "ms",
        (
            curve("added to each output token", outputs, [transfer / c for c in outputs]),
            curve("waited before the first token", outputs, [transfer] * len(outputs), True),
        ),
        (),
        True,
        True,
    )
    stacks = (Stack("as waited for", (Part("transfer before the first token", transfer),)),)
    waited = Waterfall("dilution-wait", "What a user waits for", "ms", stacks)
    text = (
        "Over 1,500 output tokens 150 ms are 0.1 ms a token, as the article says. The user waits for all "
        "of it "
        "before decoding begins, whichever metric it is counted in.",
    )
    return Section(
        "dilution-section",
        "Time per output token hides what users wait for",
        text,
        (table,),
        (figure, waited),
    )


def lower(found: tuple[Pair, ...]) -> list[float]:
    """By how many percent TE's latency is below DD's, cell by cell."""
    return [100 * (1 - p.te_ms / p.dd_ms) for p in found]


def claims_of_means(source: Source) -> tuple[Claim, ...]:
    """Claims of means over the cells."""
    hosts, rings = (float(np.mean(lower(pairs(source, table)))) for table in PLACES)
    higher = float(np.mean([100 * (p.te_gb / p.dd_gb - 1) for p in pairs(source, "rings")]))
    return (
        settled(
            "L1",
            "Across hosts TE's latency is 36.7 % lower in the mean.",
            hosts,
            "%",
            ("hosts", "means"),
            False,
            "36.7 is the first cell",
        ),
        settled(
            "L2",
            "Within a host TE's latency is 30.2 % lower in the mean.",
            rings,
            "%",
            ("rings", "means"),
            True,
            "arithmetic mean of the cells",
        ),
        settled(
            "B1",
            "Within a host TE's bandwidth is 43.6 % higher in the mean.",
            higher,
            "%",
            ("rings", "means"),
            False,
            "the cells give more",
        ),
    )


def claims_of_cells(source: Source) -> tuple[Claim, ...]:
    """Claims of the latency of every cell."""
    least = min(lower((*pairs(source, "hosts"), *pairs(source, "rings"))))
    return (
        open_claim(
            "L3",
            "TE is faster than DD in every cell.",
            least,
            "% at the least",
            ("hosts-ratio", "rings-ratio"),
            "one latency a cell, without repeats; the arithmetic of each percentage holds",
        ),
        settled(
            "L4",
            "TE's latency is lower by 40 to 100 %.",
            least,
            "% at the least",
            ("means",),
            False,
            "the cells go from 12 to 53 %",
        ),
    )


def claims_of_end_to_end(source: Source) -> tuple[Claim, ...]:
    """Claims of times end to end."""
    after = numbers(source["e2e"], "Batched") / numbers(source["e2e"], "Unbatched")
    return (
        settled(
            "E1",
            "Batching shortens end to end by 70 % or more.",
            100 * float(1 - after.max()),
            "% at the least",
            ("e2e", "e2e-saved"),
            False,
            "the longer context has 65.7 %",
        ),
    )


def claims_of_bend(source: Source) -> tuple[Claim, ...]:
    """Claims of the number of blocks."""
    return (
        open_claim(
            "K1",
            "The rate falls beyond 200 blocks.",
            knee(source, 16).x,
            "blocks",
            ("knees", "knee-lines"),
            "the bend may lie anywhere between 20 and 2,000; one level was measured between",
        ),
        open_claim(
            "K2",
            "Keep transfers to 512 blocks.",
            512.0,
            "blocks",
            ("knees",),
            "the queue's depth is stated, its effect at 512 is not measured",
        ),
    )


def claims_of_fit(source: Source) -> tuple[Claim, ...]:
    """Claims of the rate that the fit finds."""
    found = batched(source, "hosts").parameters[2]
    lows = None if found.hi is None or found.hi == 0 else 1e-9 / found.hi
    highs = None if not found.lo else 1e-9 / found.lo
    return (
        with_interval(
            "R1",
            "Batched, TE reaches the 25 GB/s of a 200 Gb/s link.",
            Estimate(1e-9 / found.value, lows, highs),
            "GB/s",
            ("batched-fit", "batch-roof"),
            _line_verdict(lows),
            "the rate of the fit to four cells",
        ),
    )


def claims(source: Source) -> tuple[Claim, ...]:
    """What somebody may act on."""
    return (
        *claims_of_means(source),
        *claims_of_cells(source),
        *claims_of_end_to_end(source),
        *claims_of_bend(source),
        *claims_of_fit(source),
    )


def _line_verdict(lowest: float | None) -> Verdict:
    return Verdict.SUPPORTED if lowest is not None and lowest >= 25 else Verdict.INSUFFICIENT
