"""A report with every kind of figure, of numbers that the tests know. Those of articles are named there."""

from __future__ import annotations

from kvik_lab.report.cells import Estimate, Missing, State
from kvik_lab.report.figures import (
    Arm,
    Bars,
    Crossing,
    Curve,
    Distributions,
    Factor,
    Figure,
    Forest,
    Group,
    HeatCell,
    HeatMap,
    Level,
    Line,
    Lines,
    Mark,
    Named,
    Ordered,
    Part,
    Point,
    Quantile,
    Roofline,
    RunOrder,
    SizeTime,
    Stack,
    Stretch,
    Waterfall,
)
from kvik_lab.report.model import Claim, Interval, NoInterval, Report, Section, Table, Verdict

HOSTILE = "<img src=x onerror=alert(1)></script><script>alert(2)</script>|`[a](http://evil.example)"

GONE = Estimate(Missing(State.IN_PROGRESS))
FAILED = Estimate(Missing(State.FAILED, "ran out of memory"))
HOLE = HeatCell(Missing(State.NOT_POSSIBLE, "the model does not fit"))


def points(*pairs: tuple[float, float]) -> tuple[Point, ...]:
    return tuple(Point(x, Estimate(y)) for x, y in pairs)


def figures() -> tuple[Figure, ...]:
    """One of each kind."""
    level = Level(0, 1, Estimate(2.5, 2.0, 3.0))
    series = Ordered("start 1", 0, (2.0, 3.0, Missing(State.FAILED), 9.0), (level,), "TCP")
    group = Group("TCP", (3.0, 1.0, 2.0), (Quantile(0.5, Estimate(2.0, 1.0, 3.0)), Quantile(0.99, GONE)))
    serial = (("TCP", (668.33, 1717.07, 3161.41)), ("EFA", (679.33, 1646.16, 3058.02)))
    arms = tuple(Arm(n, points(*zip((1000.0, 2048.0, 3800.0), y, strict=True))) for n, y in serial)
    fitted = Arm(
        "Unified", (Point(12000.0, GONE),), tuple(Point(x, Estimate(x, x - 9, x + 9)) for x in (1e3, 4e3))
    )
    crossing = Crossing((1150.0,), (Stretch(1000.0, None),), "The arms cross at 1150 tokens.")
    parts = (
        Part("prefill", 231.69),
        Part("transfer", Missing(State.NOT_MEASURED)),
        Part("first token", 20.0),
    )
    heat = ((HeatCell(-7.0, True), HeatCell(0.5, False)), (HeatCell(-1.5, None, "-1 to -2"), HOLE))
    line = Line("EFA", (Estimate(1.5, 1.25, 1.75), FAILED))
    return (
        RunOrder("run-order", "Run order", "ms", (series,)),
        Distributions("distributions", "Distributions", "ms", (group,)),
        Forest(
            "forest",
            "Effects",
            "ratio",
            (Named("EFA", Estimate(0.9, 0.8, 1.1)), Named("TCP", FAILED)),
            1.0,
            0.05,
        ),
        Factor("factor", "Factor", "tokens", "ms", ("1000", "2000"), (line,)),
        Bars("bars", "Bars", "tokens", "ratio", ("1000", "2000"), (line,), 1.0),
        SizeTime("size-time", "Size and time", "tokens", "ms", (*arms, fitted), (crossing,)),
        Waterfall("waterfall", "Where the time goes", "ms", (Stack("TCP", parts, 668.33),)),
        HeatMap("heat", "Lanes swapped", "change, %", ("1B", "7B"), ("TP2", "TP4"), heat),
        Lines(
            "lines",
            "Hits",
            "hit rate",
            "QPS",
            (Curve("off", (*points((0.0, 20.0)), Point(0.5, GONE))),),
            (Mark("knee", 0.4, Stretch(0.2, None)),),
        ),
        Roofline(
            "roofline",
            "Roofline",
            "KiB",
            "GB/s",
            (Curve("roof", points((64, 97.0), (2048, 367.0)), True),),
            (Curve("write", points((64, 97.2), (1024, 365.0))),),
            (Mark("ridge", 240.0),),
        ),
    )


def gallery(name: str = "TCP") -> Report:
    """All kinds, with `name` in the places that files fill."""
    table = Table(
        "t",
        name,
        (name, "ms"),
        ((name, 1.5), ("EFA", Missing(State.FAILED)), ("x", Estimate(2.0, 1.0, 3.0)), ("none", None)),
    )
    hostile = Forest("hostile", name, name, (Named(name, Estimate(1.0)),))
    rests = ("t", "forest")
    made = (
        Claim(
            "C1",
            f"{name} is faster.",
            0.9,
            "times",
            Interval(0.8, 1.1, 0.95),
            rests,
            Verdict.INSUFFICIENT,
            name,
        ),
        Claim(
            "C2",
            "It holds.",
            Missing(State.NOT_POSSIBLE),
            "ms",
            NoInterval("one start"),
            rests,
            Verdict.NOT_SUPPORTED,
        ),
    )
    first = Section("s", name, (name,), (table,), (*figures(), hostile))
    return Report(name, (first, Section("claims", "Claims", (), (), (), made)))
