"""The article on lanes and NFS mounts: changes by layout and model, elapsed times."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from kvik_lab.report.cells import Estimate, Missing, State
from kvik_lab.report.figures import Bars, HeatCell, HeatMap, Line, Lines
from kvik_lab.report.model import Cell, Claim, Report, Section, Table
from tests.lab.redrawn.pieces import Source, curve, grid, limits, numbers, open_claim, settled
from tests.lab.redrawn.printed import number

MODELS = {"Llama-3.2-1B": 1.24, "Llama-3.2-3B": 3.21, "Llama-2-7b": 6.74, "Llama-3-8B": 8.03}
GROUPS = ("others", "all")
FEW = "one change a model and layout, without repeats"
_RANGE = re.compile(r"([-+]?)(\d+)-(\d+)%")
_LAYOUT = re.compile(r"TP=(\d+)(?:, PP=(\d+))?")


@dataclass(frozen=True)
class Change:
    """A row: percent as printed, with both ends of a range."""

    layout: str
    model: str
    low: float
    high: float

    @property
    def exact(self) -> bool:
        """Whether one number is printed."""
        return self.low == self.high


def changes(source: Source, table: str) -> tuple[Change, ...]:
    """The rows of a table of changes."""
    found = []
    for layout, model, text, _ in source[table].rows:
        if text.startswith("within"):
            low, high = -1.0, 1.0
        elif ranged := _RANGE.fullmatch(text):
            sign = -1.0 if ranged.group(1) == "-" else 1.0
            low, high = sorted((sign * float(ranged.group(2)), sign * float(ranged.group(3))))
        else:
            low = high = number(text)
        found.append(Change(layout, model, low, high))
    return tuple(found)


def redraw() -> Report:
    """The report of the article."""
    source = Source("S3")
    sections = (
        lanes(source, "to-cpu"),
        lanes(source, "swapped"),
        effect(source),
        nfs(source),
        Section("claims", "Claims and what they rest on", (), (), (), claims(source)),
        limits(
            "Tokens a second: only changes are printed, not the two throughputs behind each.",
            "Whether a change of 1 or 2 % is one: no repeats are printed.",
            "Which models the groups hold, and how they lie within their ranges.",
            "Which models do not fit a layout: of seven, five run with one GPU and six with two.",
            "Whether throughput over NFS is equal within 1 %: the throughputs are not printed.",
        ),
    )
    return Report(f"Redrawn: {source.article.title}", sections)


def heat(source: Source, table: str) -> HeatMap:
    """Models by layout; a range stands at its middle, and a model without a row has that of its group."""
    found = changes(source, table)
    models = [*(m for m in MODELS if any(c.model == m for c in found)), "others"]
    by = {(c.model, c.layout): c for c in found}
    cells: dict[tuple[str, str], HeatCell] = {}
    for model in models:
        for layout in dict.fromkeys(c.layout for c in found):
            group = next(name for name in GROUPS if (name, layout) in by)
            one = by.get((model, layout), by[group, layout])
            ends = "" if one.exact else f"{one.low:g} to {one.high:g}"
            note = ends if one.model == model else f"{group}: {ends}"
            cells[model, layout] = HeatCell((one.low + one.high) / 2, None, note)
    return grid(f"{table}-heat", source[table].title, "change, %", cells, True)


def lanes(source: Source, table: str) -> Section:
    """One exchange of lanes."""
    text = (
        "A range is drawn at its middle. A model without a row of its own in a layout has what is printed of "
        "its group, and the cell says so.",
    )
    return source.section(f"{table}-section", source[table].title, (table,), text, (), (heat(source, table),))


def _parallel(layout: str) -> tuple[int, int]:
    found = _LAYOUT.match(layout)
    if found is None:
        raise ValueError(layout)
    return int(found.group(1)), int(found.group(2) or 1)


def effect(source: Source) -> Section:
    """Changes beside parallelism and size."""
    rows: list[tuple[Cell, ...]] = []
    curves = []
    for table in ("to-cpu", "swapped"):
        exact = [c for c in changes(source, table) if c.exact]
        for layout in dict.fromkeys(c.layout for c in exact):
            here = [c for c in exact if c.layout == layout]
            sizes = [MODELS[c.model] for c in here]
            slope: float | Missing = Missing(State.NOT_POSSIBLE, "one size")
            if len(here) > 1:
                slope = round(float(np.polyfit(np.log2(sizes), [c.low for c in here], 1)[0]), 9)
            tp, pp = _parallel(layout)
            rows.append(
                (source[table].title.partition(":")[0], float(tp), float(pp), float(len(here)), slope)
            )
            curves.append(
                curve(
                    f"{'to the CPU' if table == 'to-cpu' else 'swapped'}, {layout}",
                    sizes,
                    [c.low for c in here],
                )
            )
    columns = ("exchange", "TP", "PP", "models with a number", "slope, % a doubling of the model")
    slopes = Table(
        "effects",
        "Slope of the change over log2 of the model's size",
        columns,
        tuple(rows),
        "Models with a number of their own are those that stand out: the others were put into groups.",
    )
    figure = Lines(
        "effect-lines",
        "Change by model size, models with a number of their own",
        "billion parameters",
        "%",
        tuple(curves),
        (),
        True,
    )
    text = (
        "No interval of a slope is given: most layouts have two models with a number, through which any line "
        "passes, and those two were singled out because their changes are large.",
    )
    return Section("effect", "Parallelism, model size and the effect", text, (slopes,), (figure,))


def nfs(source: Source) -> Section:
    """Elapsed times of both mounts."""
    table = source["nfs"]
    tcp, rdma = numbers(table, "NFS/TCP"), numbers(table, "NFS/RDMA")
    count = np.array([number(text.partition("(")[2]) for text in table.column("Layout")])
    rows = tuple(
        (name, float(t), float(r), float(r - t), float(100 * (r - t) / t), float((t - r) / n))
        for name, t, r, n in zip(table.column("Layout"), tcp, rdma, count, strict=True)
    )
    columns = ("layout", "NFS/TCP, s", "NFS/RDMA, s", "difference, s", "change, %", "saved a model, s")
    times = Table("nfs-times", "Elapsed times in seconds", columns, rows)
    levels = tuple(name.partition(" (")[0] for name in table.column("Layout"))
    bars = Bars(
        "nfs-bars",
        "Elapsed time of the whole series",
        "layout",
        "s",
        levels,
        tuple(
            Line(name, tuple(Estimate(float(v)) for v in values))
            for name, values in (("NFS/TCP", tcp), ("NFS/RDMA", rdma))
        ),
    )
    return source.section("nfs-section", "NFS over TCP and over RDMA", ("nfs",), (), (times,), (bars,))


def claims_of_lanes(source: Source) -> tuple[Claim, ...]:
    """Claims of each exchange of lanes."""
    largest = max(c.high for c in changes(source, "to-cpu"))
    return (
        settled(
            "L1",
            "The largest improvement, 8.3 %, is at TP=4.",
            largest,
            "%",
            ("to-cpu",),
            False,
            "TP=2, PP=1 has 8.6 %",
        ),
        open_claim(
            "L2",
            "Moving the GPU to the CPU's lanes helps.",
            largest,
            "% at the most",
            ("to-cpu", "to-cpu-heat"),
            FEW,
        ),
        open_claim(
            "L3",
            "Exchanging the lanes of GPU and network card costs up to 19.7 %.",
            -19.7,
            "%",
            ("swapped", "swapped-heat"),
            FEW,
        ),
    )


def claims_of_effect() -> tuple[Claim, ...]:
    """Claims of parallelism and of size."""
    return (
        open_claim(
            "I1",
            "The effect grows with TP.",
            Missing(State.NOT_POSSIBLE),
            "",
            ("effects", "effect-lines"),
            "two to three layouts and no repeats; " + FEW,
        ),
        open_claim(
            "I2",
            "The effect shrinks with the model's size.",
            Missing(State.NOT_POSSIBLE),
            "",
            ("effects", "effect-lines"),
            "two sizes in most layouts; at TP=2, PP=2 swapped, and at TP=4 moved, it does not",
        ),
    )


def claims_of_nfs(source: Source) -> tuple[Claim, ...]:
    """Claims of both mounts."""
    table = source["nfs"]
    tcp, rdma = numbers(table, "NFS/TCP"), numbers(table, "NFS/RDMA")
    change = 100 * (rdma.sum() / tcp.sum() - 1)
    one = "one run of each layout and mount; all six differences have one sign, by chance in 1 of 32 cases"
    none = Missing(State.NOT_POSSIBLE)
    return (
        open_claim(
            "N1",
            "NFS over RDMA shortens the series.",
            float(change),
            "% of all six together",
            ("nfs-times", "nfs-bars"),
            one,
        ),
        open_claim(
            "N2",
            "Tokens a second are equal within 1 %.",
            none,
            "",
            ("nfs",),
            "a claim of equality takes two one-sided tests with a margin; no throughput is printed",
        ),
        open_claim(
            "N3", "NFS over TCP is enough.", none, "", ("nfs-bars",), "what is enough is not said in numbers"
        ),
    )


def claims(source: Source) -> tuple[Claim, ...]:
    """What somebody may act on."""
    return (
        *claims_of_lanes(source),
        *claims_of_effect(),
        *claims_of_nfs(source),
    )
