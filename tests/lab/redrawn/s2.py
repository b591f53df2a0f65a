"""The article on EFA in Mooncake: throughput by threads and batch, sweeps, first requests, loopback."""

from __future__ import annotations

import re

import numpy as np

from kvik_lab.physics.data import Samples
from kvik_lab.physics.fit import Fit, fit
from kvik_lab.physics.models import MODELS
from kvik_lab.physics.units import Rate
from kvik_lab.report.cells import Estimate, Missing, State
from kvik_lab.report.figures import Bars, Curve, HeatCell, HeatMap, Line, Mark, Roofline
from kvik_lab.report.model import Cell, Claim, Report, Section, Table
from tests.lab.redrawn.pieces import Source, cell, curve, grid, limits, numbers, open_claim, points, settled
from tests.lab.redrawn.printed import Printed, gap, number

NICS = {"b300": (16, 400), "b200": (8, 400), "p5en": (16, 200), "p5": (32, 100)}
QUEUE = 256
ONE_RUN = "one run a cell; a repeat of the same cell is not printed"
_SETTING = re.compile(r"threads=(\d+), batch=(\d+)")


def redraw() -> Report:
    """The report of the article."""
    source = Source("S2")
    sections = (
        *(host(source, name) for name in NICS),
        line_rates(source),
        requests(),
        blocks(source),
        buffers(source),
        first_requests(source),
        loopback(source),
        Section("claims", "Claims and what they rest on", (), (), (), claims(source)),
        limits(
            "The spread of any throughput: each cell is one run of 10 seconds; one cell names 6 runs.",
            "Whether neighbouring cells differ: a repeat of one of them is not printed.",
            "How reads and writes share a link: they were measured apart.",
            "Where on p6-b200 the present code stands: its numbers are of an earlier version.",
            "The spread of first requests: of 3 repetitions the median is printed.",
        ),
    )
    return Report(f"Redrawn: {source.article.title}", sections)


def settings(table: Printed) -> tuple[tuple[int, int], ...]:
    """Threads and batch of each row."""
    found = (_SETTING.search(text) for text in table.column("Configuration"))
    return tuple((int(one.group(1)), int(one.group(2))) for one in found if one is not None)


def heat(source: Source, table: str) -> HeatMap:
    """Writes and reads by threads and batch; what exceeds the queue and is said to fail is failed."""
    printed = source[table]
    cells: dict[tuple[str, str], HeatCell] = {}
    for what in ("Write", "Read"):
        for (threads, batch), text in zip(settings(printed), printed.column(what), strict=True):
            shown = cell(text)
            if "-" in text[1:]:
                low, high = (float(part) for part in re.findall(r"\d+", text)[:2])
                shown = HeatCell((low + high) / 2, None, "middle of a range")
            cells[f"{what.lower()}, {threads} threads", f"batch {batch}"] = shown
    if table == "p5-gpu":
        failed = HeatCell(Missing(State.FAILED, "threads x batch exceeds the queues"))
        cells["write, 32 threads", "batch 256"] = failed
        cells["write, 64 threads", "batch 128"] = failed
    ordered = dict(
        sorted(cells.items(), key=lambda item: (item[0][0][0] != "w", _of(item[0][1]), _of(item[0][0])))
    )
    rows = sorted({row for row, _ in ordered}, key=lambda row: (row[0] != "w", _of(row)))
    by_row = {key: ordered[key] for row in rows for key in ordered if key[0] == row}
    columns = sorted({column for _, column in ordered}, key=_of)
    first = {
        (rows[0], column): by_row.get((rows[0], column), HeatCell(Missing(State.NOT_MEASURED)))
        for column in columns
    }
    return grid(f"{table}-heat", f"{printed.title}: threads and batch", "GB/s", {**first, **by_row}, False)


def _of(text: str) -> float:
    return abs(number(text))


def host(source: Source, name: str) -> Section:
    """GPU and CPU tables of one kind of host."""
    tables = (f"{name}-gpu", f"{name}-cpu")
    text = ["A cell of one number is one run."]
    if name == "b200":
        text.append(
            "These numbers are of an earlier version of the transport: the article calls them a lower bound."
        )
    return source.section(
        f"host-{name}", f"Throughput on {name}", tables, text, (), [heat(source, t) for t in tables]
    )


def rate(name: str) -> float:
    """Line rate of a host in GB/s."""
    count, gigabits = NICS[name]
    return count * Rate.of_bits(gigabits * 1e9).bytes_per_second / 1e9


def peak(source: Source, table: str, what: str) -> tuple[float, str]:
    """The largest value of a column, with its setting."""
    printed = source[table]
    there = [
        (max(float(n) for n in re.findall(r"\d+(?:\.\d+)?", text.partition("(")[0])), f"{threads} x {batch}")
        for (threads, batch), text in zip(settings(printed), printed.column(what), strict=True)
        if gap(text) is None
    ]
    return max(there)


def line_rates(source: Source) -> Section:
    """Peaks beside line rates."""
    rows: list[tuple[Cell, ...]] = []
    for name, (count, gigabits) in NICS.items():
        for memory in ("gpu", "cpu"):
            for what in ("Write", "Read"):
                value, where = peak(source, f"{name}-{memory}", what)
                link = f"{count} x {gigabits} Gb/s"
                rows.append(
                    (name, memory, what.lower(), link, rate(name), value, where, 100 * value / rate(name))
                )
    columns = (
        "host",
        "memory",
        "direction",
        "links",
        "line rate, GB/s",
        "peak, GB/s",
        "threads x batch",
        "% of line rate",
    )
    table = Table(
        "line-shares",
        "Peaks beside the line rate",
        columns,
        tuple(rows),
        "A peak is the largest of few cells.",
    )
    shares = tuple(
        Line(
            f"{memory}, {what}",
            tuple(Estimate(float(str(r[7]))) for r in rows if r[1] == memory and r[2] == what),
        )
        for memory in ("gpu", "cpu")
        for what in ("write", "read")
    )
    bars = Bars("line-bars", "Peaks in percent of the line rate", "host", "%", tuple(NICS), shares, 100.0)
    return Section("line-rates", "Line rates", (), (table,), (bars,))


def requests() -> Section:
    """Slots of the send queues beside threads times batch."""
    rows: list[tuple[Cell, ...]] = []
    for name, (count, _) in NICS.items():
        slots = count * QUEUE
        for threads, batch in ((16, 128), (32, 128), (32, 256), (64, 128)):
            inside = "within" if threads * batch <= slots else "beyond"
            if threads * batch == slots:
                inside = "full"
            rows.append(
                (name, float(count), float(slots), f"{threads} x {batch}", float(threads * batch), inside)
            )
    columns = ("host", "NICs", f"slots of {QUEUE} a NIC", "threads x batch", "requests", "the queues")
    table = Table("requests", "Requests in flight and slots of the queues", columns, tuple(rows))
    text = (
        "The article's rule is that threads x batch stay below the slots. On p5 32 x 256 and 64 x 128 fail: "
        "8,192 requests fill 8,192 slots exactly. On p5en 32 x 128 fills 4,096 exactly, and ran.",
        "p6-b200 has 8 NICs by the article's own list, so 2,048 slots, not the 4,096 that a tip gives it.",
    )
    return Section("work-requests", "Limit of work requests", text, (table,))


def sweep(source: Source, what: str) -> Samples:
    """Each block as one transfer, at the printed throughput."""
    table = source["blocks"]
    size = np.array([_bytes(text) for text in table.column("Block")])
    return Samples(
        f"p5en {what.lower()}", "bytes", size, size / (1e9 * numbers(table, what)), np.ones_like(size)
    )


def _bytes(text: str) -> float:
    return number(text) * (2.0**20 if "MB" in text else 2.0**10)


def ceilings(source: Source, what: str) -> Fit:
    """Operations and bytes a second that explain the block sweep."""
    return fit(sweep(source, what), MODELS["op-rate"], score=False)


def blocks(source: Source) -> Section:
    """The block sweep under its fitted ceilings."""
    rows: list[tuple[Cell, ...]] = []
    roofs: list[Curve] = []
    marks: list[Mark] = []
    measured: list[Curve] = []
    table = source["blocks"]
    kib = np.array([_bytes(text) / 1024 for text in table.column("Block")])
    dense = np.geomspace(kib.min(), kib.max(), 60)
    for what in ("Write", "Read"):
        found = ceilings(source, what)
        per_op, per_byte = found.parameters
        ops = Estimate(1e-6 / per_op.value, *_inverse(per_op.lo, per_op.hi, 1e-6))
        speed = Estimate(1e-9 / per_byte.value, *_inverse(per_byte.lo, per_byte.hi, 1e-9))
        ridge = per_op.value / per_byte.value / 1024
        rows.append((what.lower(), ops, speed, ridge, 100 * found.scatter))
        roof = np.minimum(dense * 1024 / per_op.value, 1 / per_byte.value) / 1e9
        roofs.append(curve(f"{what.lower()}, ceiling", dense, roof, True))
        measured.append(Curve(what.lower(), points(kib, table.estimates(what))))
        marks.append(Mark(f"{what.lower()}: ridge {ridge:.0f} KiB", ridge))
    columns = ("direction", "operations, million/s", "bandwidth, GB/s", "ridge, KiB", "scatter, %")
    fits = Table(
        "block-fit",
        "rate = min(R x block, bandwidth)",
        columns,
        tuple(rows),
        "95 % intervals of the profile likelihood; six cells each.",
    )
    figure = Roofline(
        "block-roof",
        "Throughput by block size, p5en",
        "KiB a block",
        "GB/s",
        tuple(roofs),
        tuple(measured),
        tuple(marks),
    )
    text = (
        "Small blocks are limited by operations a second, large ones by bandwidth; the ridge divides them.",
    )
    return source.section("block-sweep", "Block sizes", ("blocks",), text, (fits,), (figure,))


def _inverse(low: float | None, high: float | None, scale: float) -> tuple[float | None, float | None]:
    return (None if not high else scale / high), (None if not low else scale / low)


def buffers(source: Source) -> Section:
    """The buffer sweep, and the least buffer."""
    table = source["buffers"]
    lines = tuple(Line(what.lower(), table.estimates(what)) for what in ("Write", "Read"))
    bars = Bars("buffer-bars", "Throughput by buffer", "buffer", "GB/s", ("2 GB", "4 GB"), lines)
    rows = tuple(
        (f"{t} x {b} x 1 MiB", float(t * b) / 1024) for t, b in ((8, 128), (16, 128), (32, 128), (12, 128))
    )
    least = Table("least-buffer", "The least buffer: block x batch x threads", ("setting", "GiB"), rows)
    return source.section("buffer-sweep", "Buffer sizes", ("buffers",), (), (least,), (bars,))


def first_requests(source: Source) -> Section:
    """Cold calls and warm-up."""
    table = source["first"]
    cold, warm = (table.column(name)[:2] for name in ("cold submit", "warm-up of 256 pairs"))
    lines = (
        Line("cold call, ms", tuple(Estimate(number(text)) for text in cold)),
        Line("warm-up of a pair, ms", tuple(Estimate(1e3 * number(text) / 256) for text in warm)),
    )
    bars = Bars(
        "first-bars", "First requests, medians of 3", "endpoint", "ms", table.column("Endpoint")[:2], lines
    )
    text = ("Three repetitions bound a median at no level above 75 %, so no interval is drawn.",)
    return source.section("first-request", "First requests", ("first",), text, (), (bars,))


def loopback(source: Source) -> Section:
    """Loopback times as rates."""
    size = 1.2 * 2**30
    times = [
        *zip(
            source["loopback"].column("Path"),
            (number(t) for t in source["loopback"].column("Time")),
            strict=True,
        ),
    ]
    rows = tuple((name, value, size / value / 1e6, 100 * size / value / 1e6 / 12.5) for name, value in times)
    columns = ("path", "ms", "GB/s", "% of one 100 Gb/s NIC")
    table = Table("loopback-rates", "About 1.2 GiB in these times", columns, rows, "The size is approximate.")
    bars = Bars(
        "loopback-bars",
        "Rates of one NIC and of shared memory",
        "path",
        "GB/s",
        tuple(r[0] for r in rows),
        (Line("rate", tuple(Estimate(r[2]) for r in rows)),),
        12.5,
    )
    text = (
        "Within one host shared memory is the faster of the two; for GPU buffers of another process "
        "it crashes.",
    )
    return source.section("loopback-section", "Within one host", ("loopback",), text, (table,), (bars,))


def largest_write(source: Source) -> float:
    """The largest write of p5en, in GB/s."""
    return max(number(text) for text in source["p5en-gpu"].column("Write"))


def claims_of_peaks(source: Source) -> tuple[Claim, ...]:
    """Claims of the largest writes."""
    b300, p5 = (peak(source, f"{name}-gpu", "Write")[0] for name in ("b300", "p5"))
    return (
        settled(
            "P1",
            "p6-b300 writes at 97.5 % of the line rate.",
            100 * b300 / rate("b300"),
            "%",
            ("b300-gpu", "line-shares"),
            True,
            "780.33 of 800 GB/s",
        ),
        settled(
            "P2",
            "p5 writes at 97 % of the line rate.",
            100 * p5 / rate("p5"),
            "%",
            ("p5-gpu", "line-shares"),
            True,
            "388.90 of 400 GB/s",
        ),
        settled(
            "P3",
            "p5en's largest write is 365 GB/s.",
            largest_write(source),
            "GB/s",
            ("p5en-gpu",),
            False,
            "365.66 rounds to 366",
        ),
    )


def claims_of_setup(source: Source) -> tuple[Claim, ...]:
    """Claims of buffers, of requests in flight and of first calls."""
    table = source["buffers"]
    write, read = numbers(table, "Write"), numbers(table, "Read")
    first = source["first"]
    cold, warm = (
        np.array([number(t) for t in first.column(name)[:2]])
        for name in ("cold submit", "warm-up of 256 pairs")
    )
    return (
        open_claim(
            "B1",
            "A buffer of 4 GB writes about 3 % faster than one of 2 GB; reads are equal.",
            float(100 * (write[1] / write[0] - 1)),
            "% of writes",
            ("buffers", "buffer-bars"),
            f"reads differ by {100 * (read[1] / read[0] - 1):.1f} %; " + ONE_RUN,
        ),
        settled(
            "W1",
            "On 16 NICs 4,096 requests fit, on 32 NICs 8,192.",
            float(16 * QUEUE),
            "requests",
            ("requests",),
            True,
            "256 a NIC",
        ),
        settled(
            "F1",
            "Shared endpoints make the cold call 4 times and warm-up 15 times faster.",
            float(cold[1] / cold[0]),
            "times, cold",
            ("first", "first-bars"),
            True,
            f"99 / 26 and 17 / 1.1 = {warm[1] / warm[0]:.1f}; medians of 3",
        ),
    )


def claims_of_tips(source: Source) -> tuple[Claim, ...]:
    """Claims of blocks, batches and the number of GPUs."""
    sweep_of = numbers(source["blocks"], "Write")
    return (
        settled(
            "T1",
            "Blocks of 64 KB reach 26 % of the peak.",
            float(100 * sweep_of[0] / sweep_of.max()),
            "%",
            ("blocks", "block-roof"),
            True,
            "97.11 of 366.87 GB/s",
        ),
        open_claim(
            "T2",
            "Write with batches of 128.",
            largest_write(source),
            "GB/s",
            ("p5en-gpu-heat",),
            "another pair of threads and batch comes within 2 GB/s; " + ONE_RUN,
        ),
        open_claim(
            "T3",
            "On 16 NICs read with batches of 32.",
            peak(source, "p5en-gpu", "Read")[0],
            "GB/s",
            ("p5en-gpu-heat",),
            "one cell has that batch; " + ONE_RUN,
        ),
        open_claim(
            "T4",
            "One GPU halves the throughput.",
            Missing(State.NOT_MEASURED),
            "",
            ("p5en-gpu-heat",),
            "no number for one GPU is printed",
        ),
    )


def claims(source: Source) -> tuple[Claim, ...]:
    """What somebody may act on."""
    return (
        *claims_of_peaks(source),
        *claims_of_setup(source),
        *claims_of_tips(source),
    )
