"""The article on EFA and TCP: its plan, sizes, times to first token, and guidelines."""

from __future__ import annotations

import math
import re

import numpy as np

from kvik_lab.physics.crossover import Bracket, Crossover, crossover
from kvik_lab.physics.data import Summary
from kvik_lab.physics.kv import ModelKv
from kvik_lab.physics.units import Rate
from kvik_lab.report.cells import Estimate, Missing, State
from kvik_lab.report.figures import (
    Arm,
    Bars,
    Crossing,
    Curve,
    Factor,
    Line,
    Lines,
    Mark,
    Part,
    SizeTime,
    Stack,
    Stretch,
    Waterfall,
)
from kvik_lab.report.model import Cell, Claim, Report, Section, Table
from tests.lab.redrawn import s0_plan
from tests.lab.redrawn.bandwidth import implied_bandwidth
from tests.lab.redrawn.pieces import Source, curve, limits, numbers, open_claim, points, settled
from tests.lab.redrawn.printed import estimate

MIB = 2.0**20
LINE = Rate.of_bits(40e9)
ONE_START = "one start of each backend, and no spread: two starts may differ by as much"


def redraw() -> Report:
    """The report of the article."""
    source = Source("S0")
    crossing = crossing_of(source)
    sections = (
        s0_plan.section(source),
        source.section(
            "setting",
            "Setting, and what went wrong before",
            ("hardware", "software", "causes", "phases"),
            ("The hit rate of 19 in 20 is the article's; the lab would measure it with a gate.",),
        ),
        sizes(source),
        first_token(source),
        by_size(source, crossing),
        concurrency(source),
        proxy(source),
        transition(source),
        source.section(
            "guidelines",
            "Guidelines",
            ("guideline", "uses"),
            ("Each row of these tables is a claim below, with what the numbers say of it.",),
        ),
        Section("claims", "Claims and what they rest on", (), (), (), claims(source, crossing)),
        limits(
            "The spread of any number: every cell is one mean of 30 iterations of one server start.",
            "How starts differ: each backend has one, so a difference between backends is one of two starts.",
            "What TTFT is after the change at iteration 18 where means cover iterations of both levels.",
            "Where the crossover is: two means change order between 1,000 and 2,048 tokens, and no more.",
            "Anything of 8,000 tokens and of TCP at 12,000: those cells were still in progress.",
        ),
    )
    return Report(f"Redrawn: {source.article.title}", sections)


def sizes(source: Source) -> Section:
    """KV sizes by formula, and the rates behind the theoretical times."""
    theory = source["theory"]
    token = ModelKv.resolve("qwen2.5-7b").bytes_per_token()
    tokens = numbers(theory, "Tokens")
    printed = numbers(theory, "KV size")
    rows: list[tuple[Cell, ...]] = []
    for at, count in enumerate(tokens):
        size = token * count
        rates = [printed[at] * MIB / (1e-3 * numbers(theory, arm)[at]) / 1e9 for arm in ("EFA", "TCP")]
        rows.append(
            (
                f"{count:,.0f}",
                printed[at],
                size / MIB,
                printed[at] * MIB / size,
                *rates,
                1e3 * size / LINE.bytes_per_second,
            )
        )
    for more in (2048, 3800, 8000, 20000):
        size = token * more
        none = Missing(State.NOT_MEASURED)
        rows.append((f"{more:,}", none, size / MIB, none, none, none, 1e3 * size / LINE.bytes_per_second))
    columns = (
        "tokens",
        "printed, MB",
        "by formula, MiB",
        "printed / formula",
        "rate assumed for EFA, GB/s",
        "rate assumed for TCP, GB/s",
        "formula's size at 40 Gb/s, ms",
    )
    table = Table("kv-sizes", "KV sizes by formula", columns, tuple(rows), f"{token:,} bytes a token.")
    levels = tuple(f"{count:,.0f}" for count in tokens)
    bars = Bars(
        "kv-times",
        "Transfer times: as printed, and of the formula's size at the rates behind them",
        "tokens",
        "ms",
        levels,
        tuple(
            Line(f"{arm}, {what}", tuple(Estimate(float(v)) for v in scale * numbers(theory, arm)))
            for arm in ("EFA", "TCP")
            for what, scale in (("printed", 1.0), ("by formula", token * 1000 / (109.4 * MIB)))
        ),
    )
    text = (
        "The formula counts K and V; the step from bytes to MB doubles it once more, so all sizes and all "
        "times in theory are twice what the model needs.",
        "The article names no rates; those behind its times, for its own sizes, stand in the table.",
    )
    return source.section(
        "sizes", "KV sizes and transfer times in theory", ("theory",), text, (table,), (bars,)
    )


def first_token(source: Source) -> Section:
    """TTFT by prompt length, with the cells that were in progress."""
    table = source["ttft"]
    tokens = numbers(table, "Tokens")
    curves = tuple(
        Curve(arm, points(tokens, table.estimates(f"{arm} (ms)"))) for arm in ("Unified", "TCP", "EFA")
    )
    figure = Lines("ttft-lines", "Time to first token by prompt", "tokens", "ms", curves, (), True, True)
    text = (
        "Rows of 2,000 and 4,000 tokens repeat values that the serial table has at 2,048 and 3,800, so those "
        "rows compare prompts of different lengths.",
    )
    return source.section("first-token", "Time to first token", ("ttft", "serial"), text, (), (figure,))


def crossing_of(source: Source) -> Crossover:
    """Where the means of TCP and EFA change order in the serial table."""
    table = source["serial"]
    tokens = numbers(table, "Tokens")
    tcp, efa = (
        Summary(arm, "tokens", tokens, 1e-3 * numbers(table, f"{arm} (ms)")) for arm in ("TCP", "EFA")
    )
    return crossover(tcp, efa, method="interpolate")


def bracket(found: Crossover) -> Bracket:
    """The neighbouring lengths between which the means change order."""
    if not isinstance(found.region, tuple):
        raise TypeError("means without errors give brackets")
    return found.region[0]


def by_size(source: Source, found: Crossover) -> Section:
    """The difference of EFA and TCP by size, with the bracket of the crossover."""
    table = source["serial"]
    tokens = numbers(table, "Tokens")
    between = bracket(found)
    at = found.estimates[0]
    words = (
        f"The means change order between {between.lo:,.0f} and {between.hi:,.0f} tokens; straight lines "
        "between "
        f"them cross at {at:,.0f}. No interval is possible: no errors are printed."
    )
    arms = tuple(
        Arm(arm, points(tokens, table.estimates(f"{arm} (ms)"))) for arm in ("Unified", "TCP", "EFA")
    )
    crossing = Crossing((at,), (Stretch(between.lo, between.hi),), words)
    times = SizeTime(
        "serial-times", "Serial requests, and where EFA and TCP cross", "tokens", "ms", arms, (crossing,)
    )
    token = ModelKv.resolve("qwen2.5-7b").bytes_per_token()
    gap = numbers(table, "EFA (ms)") - numbers(table, "TCP (ms)")
    sizes_mib = token * tokens / MIB
    difference = Lines(
        "difference",
        "EFA - TCP by the KV size of the formula",
        "MiB",
        "ms",
        (curve("EFA - TCP", sizes_mib, gap), curve("no difference", sizes_mib, np.zeros(3), True)),
        (Mark("means change order", None, Stretch(token * between.lo / MIB, token * between.hi / MIB)),),
    )
    printed = tuple(float(size) for size in re.findall(r"(\d+) MB", table.said[0]))
    rows = tuple(
        (f"{t:,.0f}", p, m, float(g)) for t, p, m, g in zip(tokens, printed, sizes_mib, gap, strict=True)
    )
    points_of = Table(
        "trend", "Points of the trend", ("tokens", "printed, MB", "by formula, MiB", "EFA - TCP, ms"), rows
    )
    return Section(
        "by-size", "Size and the difference of EFA and TCP", (words,), (points_of,), (times, difference)
    )


def concurrency(source: Source) -> Section:
    """Concurrent requests beside the theory's difference."""
    table = source["concurrent"]
    bars = Bars(
        "concurrent-bars",
        "Time to first token of concurrent requests",
        "concurrency",
        "ms",
        table.column("Concurrency"),
        tuple(Line(arm, table.estimates(f"{arm} (ms)")) for arm in ("TCP", "EFA")),
    )
    return source.section("concurrency", "Concurrent requests", ("concurrent",), (), (), (bars,))


def proxy(source: Source) -> Section:
    """What the route through the proxy adds, and the bandwidth that this would imply."""
    table = source["proxy"]
    unified = numbers(source["serial"], "Unified (ms)")[0]
    size = 1000 * ModelKv.resolve("qwen2.5-7b").bytes_per_token()
    stacks: list[Stack] = []
    words: list[str] = [
        "The added time covers routing, transfer, the start of decoding and the network; prefill is in both "
        "routes. How it divides is not measured, so it stands as one part.",
    ]
    for arm, direct, whole in zip(
        table.column("Backend"), numbers(table, "Direct (ms)"), numbers(table, "Proxy (ms)"), strict=True
    ):
        parts = (Part("direct: prefill", float(direct)), Part("added by the route", float(whole - direct)))
        stacks.append(Stack(arm, parts, float(whole)))
        implied = implied_bandwidth(size, 1e-3 * whole, 1e-3 * unified, line=LINE)
        words.append(f"{arm}, beside one server that does both: {implied.sentence}")
    figure = Waterfall(
        "proxy-parts", "Time to first token, direct and through the proxy", "ms", tuple(stacks)
    )
    return source.section("proxy-overhead", "What the proxy adds", ("proxy",), words, (), (figure,))


def transition(source: Source) -> Section:
    """The levels before and after the change, and the sequence of levels at 3,800 tokens."""
    before = source["transition"]
    columns = before.header[1:3]
    steps = Factor(
        "transition-levels",
        "Levels before and after iteration 18, 2,048 tokens",
        "iterations",
        "ms",
        ("1-17", "18-30"),
        tuple(
            Line(row[0], tuple(estimate(row[before.header.index(c)]) for c in columns)) for row in before.rows
        ),
    )
    many = source["levels"]
    sequence = Factor(
        "sequence-levels",
        "Levels one after the other, 3,800 tokens (where they change is not printed)",
        "level",
        "ms",
        tuple(name.removeprefix("Level ") for name in many.header[1:]),
        tuple(Line(row[0], tuple(_level(text) for text in row[1:])) for row in many.rows),
    )
    text = (
        "Both arms change at the same iteration. What both share (the proxy, the prefill, the client, the "
        "prompts) explains that as well as a library does; only EFA's path differs.",
        "At 1,000 tokens no change is reported (variation below 1.5 %).",
    )
    return source.section(
        "transition-section", "Changes of level", ("transition", "levels"), text, (), (steps, sequence)
    )


def _level(text: str) -> Estimate:
    if not text:
        return Estimate(Missing(State.NOT_POSSIBLE, "no fifth level"))
    return estimate(text)


def share(source: Source) -> float:
    """What EFA saves at the longest prompt, in percent of TCP."""
    serial = source["serial"]
    tcp, efa = numbers(serial, "TCP (ms)"), numbers(serial, "EFA (ms)")
    return float(100 * (tcp - efa)[2] / tcp[2])


def claims_of_plan(source: Source) -> tuple[Claim, ...]:
    """Claims of the number of patterns."""
    levels = math.prod(numbers(source["factors"], "Levels"))
    return (
        settled(
            "P1",
            "The full factorial of the levels has 14,580 patterns.",
            float(levels),
            "patterns",
            ("factors", "plan-sizes"),
            False,
            "the levels multiply to a third of that",
        ),
        settled(
            "P2",
            "59 patterns are a reduction by 99.6 %.",
            float(100 * (1 - numbers(source["layers"], "Patterns")[-1] / levels)),
            "%",
            ("layers",),
            False,
            "of 4,860 patterns they are a reduction by 98.8 %",
        ),
    )


def claims_of_lengths(source: Source) -> tuple[Claim, ...]:
    """Claims of which backend is faster at a length."""
    serial = source["serial"]
    tcp, efa = numbers(serial, "TCP (ms)"), numbers(serial, "EFA (ms)")
    rests = ("serial", "serial-times")
    return (
        open_claim(
            "E1",
            "EFA is faster than TCP at 3,800 tokens, by 103 ms.",
            share(source),
            "% of TCP",
            rests,
            ONE_START,
        ),
        open_claim(
            "E2",
            "TCP is faster than EFA at 1,000 tokens, by 11 ms.",
            float(100 * (efa - tcp)[0] / tcp[0]),
            "% of TCP",
            rests,
            ONE_START,
        ),
        open_claim(
            "E3",
            "The advantage of EFA grows with the prompt.",
            Missing(State.NOT_POSSIBLE),
            "",
            ("difference",),
            "three differences, two of them of one sign, without errors",
        ),
    )


def claims_of_sizes(source: Source, found: Crossover) -> tuple[Claim, ...]:
    """Guidelines by the size of the KV."""
    between = bracket(found)
    ends = f"{between.lo:,.0f} and {between.hi:,.0f} tokens"
    order = f"the means change order between {ends}; no errors are printed"
    return (
        open_claim(
            "G1",
            "Below 200 MB choose TCP, above it EFA.",
            found.estimates[0],
            "tokens",
            ("guideline", "serial-times"),
            order + "; the sizes in MB are twice those of the model",
        ),
        open_claim(
            "G2",
            "Above 400 MB EFA is clearly ahead.",
            share(source),
            "% of TCP",
            ("guideline", "difference"),
            "one length lies there, and its difference is 3.3 % of TCP without a spread",
        ),
    )


def claims_of_loads(source: Source) -> tuple[Claim, ...]:
    """Guidelines by the kind of load."""
    table = source["concurrent"]
    tcp, efa = numbers(table, "TCP (ms)"), numbers(table, "EFA (ms)")
    return (
        open_claim(
            "G3",
            "With concurrent short prompts choose TCP.",
            float(100 * (efa[0] / tcp[0] - 1)),
            "% at c4",
            ("concurrent", "concurrent-bars"),
            ONE_START,
        ),
        open_claim(
            "G4",
            "For summaries, code and retrieval choose EFA; for short chat TCP.",
            Missing(State.NOT_MEASURED),
            "",
            ("uses",),
            "no such load was measured; it follows from G1 only",
        ),
        open_claim(
            "G5",
            "For batches of c16 and more the choice is open.",
            Missing(State.NOT_MEASURED),
            "",
            ("uses",),
            "the article says so itself",
        ),
    )


def claims_of_transition() -> tuple[Claim, ...]:
    """Claims of the change of level."""
    return (
        open_claim(
            "T1",
            "The value after iteration 18 is the true performance.",
            Missing(State.NOT_POSSIBLE),
            "",
            ("transition-levels", "sequence-levels"),
            "at 3,800 tokens levels go down and up again, so that a later change is not ruled out",
        ),
        open_claim(
            "T2",
            "The transfer library causes the change.",
            Missing(State.NOT_POSSIBLE),
            "",
            ("transition-levels",),
            "both arms share more than the library, and change together",
        ),
    )


def claims(source: Source, found: Crossover) -> tuple[Claim, ...]:
    """What somebody may act on."""
    return (
        *claims_of_plan(source),
        *claims_of_lengths(source),
        *claims_of_sizes(source, found),
        *claims_of_loads(source),
        *claims_of_transition(),
    )
