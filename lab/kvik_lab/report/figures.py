"""The kinds of figures, as data. How each is drawn is in `draw`, what its table is in `tabulate`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from kvik_lab.errors import LabError
from kvik_lab.report.cells import Estimate, Number


@dataclass(frozen=True)
class Level:
    """A level that a series kept from iteration `first` to `last`, both of them in it."""

    first: int
    last: int
    level: Estimate


@dataclass(frozen=True)
class Ordered:
    """Values in the order in which they were measured, the first at iteration `first`, and their levels.
    Series of one group share a panel; each has its own colour in it. `odd` ones are marked as left out."""

    name: str
    first: int
    values: tuple[Number, ...]
    levels: tuple[Level, ...] = ()
    group: str = ""
    odd: bool = False


@dataclass(frozen=True)
class RunOrder:
    """Series in run order, with the segments that were found in them."""

    id: str
    title: str
    y: str
    series: tuple[Ordered, ...]
    kind: Literal["run-order"] = "run-order"


@dataclass(frozen=True)
class Quantile:
    """A quantile and its bounds: 0.5 is the median."""

    probability: float
    estimate: Estimate


@dataclass(frozen=True)
class Group:
    """The values of one group, and its quantiles."""

    name: str
    values: tuple[float, ...]
    quantiles: tuple[Quantile, ...]


@dataclass(frozen=True)
class Distributions:
    """Empirical distribution functions, with quantiles and their intervals."""

    id: str
    title: str
    x: str
    groups: tuple[Group, ...]
    kind: Literal["distributions"] = "distributions"


@dataclass(frozen=True)
class Named:
    """An estimate with what it is called."""

    name: str
    estimate: Estimate


@dataclass(frozen=True)
class Forest:
    """Effects with intervals, below each other; `reference` is no effect. The margin is a share of it, within
    which effects count as none."""

    id: str
    title: str
    x: str
    effects: tuple[Named, ...]
    reference: float = 1.0
    margin: float | None = None
    kind: Literal["forest"] = "forest"


@dataclass(frozen=True)
class Line:
    """One estimate for each level of a figure."""

    name: str
    cells: tuple[Estimate, ...]


@dataclass(frozen=True)
class Factor:
    """A response over the levels of a factor: one line for a main effect, several for an interaction."""

    id: str
    title: str
    x: str
    y: str
    levels: tuple[str, ...]
    lines: tuple[Line, ...]
    kind: Literal["factor"] = "factor"

    def __post_init__(self) -> None:
        _same_length(self.levels, self.lines, self.title)


@dataclass(frozen=True)
class Bars:
    """Groups of bars with intervals, such as of a table of ratios; `reference` is where a line is drawn."""

    id: str
    title: str
    x: str
    y: str
    levels: tuple[str, ...]
    lines: tuple[Line, ...]
    reference: float | None = None
    kind: Literal["bars"] = "bars"

    def __post_init__(self) -> None:
        _same_length(self.levels, self.lines, self.title)


@dataclass(frozen=True)
class Point:
    """An estimate at a place."""

    x: float
    y: Estimate


@dataclass(frozen=True)
class Arm:
    """One transport: what was measured by size, and the fitted model with the interval of its mean."""

    name: str
    measured: tuple[Point, ...]
    model: tuple[Point, ...] = ()
    formula: str = ""


@dataclass(frozen=True)
class Stretch:
    """A stretch of the x-axis; an end that is None is open."""

    low: float | None
    high: float | None


@dataclass(frozen=True)
class Crossing:
    """Where two arms cross: the estimates, the set of what the data allow, and the sentence that says so."""

    estimates: tuple[float, ...]
    stretches: tuple[Stretch, ...]
    statement: str


@dataclass(frozen=True)
class SizeTime:
    """Time against size, with fitted models and the crossover band."""

    id: str
    title: str
    x: str
    y: str
    arms: tuple[Arm, ...]
    crossings: tuple[Crossing, ...] = ()
    log: bool = False
    kind: Literal["size-time"] = "size-time"


@dataclass(frozen=True)
class Part:
    """One part of a time."""

    name: str
    value: Number


@dataclass(frozen=True)
class Stack:
    """The parts of a time in their order. A measured total shows what the parts leave out."""

    name: str
    parts: tuple[Part, ...]
    total: Number | None = None


@dataclass(frozen=True)
class Waterfall:
    """Where the time to first token goes: parts laid end to end."""

    id: str
    title: str
    x: str
    stacks: tuple[Stack, ...]
    kind: Literal["waterfall"] = "waterfall"


@dataclass(frozen=True)
class HeatCell:
    """A cell: `significant` is None where it was not tested."""

    value: Number
    significant: bool | None = None
    note: str = ""


@dataclass(frozen=True)
class HeatMap:
    """Values over rows and columns, such as model by TP and PP, with marks of what is significant.

    signed: values are changes about zero; otherwise amounts, from the least to the largest.
    """

    id: str
    title: str
    unit: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: tuple[tuple[HeatCell, ...], ...]
    signed: bool = True
    kind: Literal["heat-map"] = "heat-map"

    def __post_init__(self) -> None:
        if len(self.cells) != len(self.rows) or any(len(row) != len(self.columns) for row in self.cells):
            raise LabError(f"{self.title}: a cell is needed for each of the rows and columns")


@dataclass(frozen=True)
class Curve:
    """A line through points, such as a ceiling; `fitted` ones are drawn without markers, broken."""

    name: str
    points: tuple[Point, ...]
    fitted: bool = False


@dataclass(frozen=True)
class Mark:
    """A place on the x-axis, with the interval it may lie in, such as a knee or a ridge."""

    name: str
    x: float | None
    stretch: Stretch | None = None


@dataclass(frozen=True)
class Lines:
    """x against y: sweeps."""

    id: str
    title: str
    x: str
    y: str
    curves: tuple[Curve, ...]
    marks: tuple[Mark, ...] = ()
    log_x: bool = False
    log_y: bool = False
    kind: Literal["lines"] = "lines"


@dataclass(frozen=True)
class Roofline:
    """Rates under ceilings, on logarithmic axes, with the ridge or the knee marked."""

    id: str
    title: str
    x: str
    y: str
    ceilings: tuple[Curve, ...]
    measured: tuple[Curve, ...]
    marks: tuple[Mark, ...] = ()
    kind: Literal["roofline"] = "roofline"


Figure: TypeAlias = Annotated[
    RunOrder | Distributions | Forest | Factor | Bars | SizeTime | Waterfall | HeatMap | Lines | Roofline,
    Field(discriminator="kind"),
]


def _same_length(levels: tuple[str, ...], lines: tuple[Line, ...], title: str) -> None:
    for line in lines:
        if len(line.cells) != len(levels):
            raise LabError(f"{title}: {line.name} has {len(line.cells)} cells for {len(levels)} levels")
