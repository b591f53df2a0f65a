"""Links as a person gives them: files of measured transfers, or a rate and a latency as stated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvik_lab.errors import LabError
from kvik_lab.physics.crossover import MISFIT
from kvik_lab.physics.curve import Curve, curve, stated_line
from kvik_lab.physics.data import read_measured, summarise
from kvik_lab.physics.units import Rate, parse_seconds


@dataclass(frozen=True)
class Link:
    """A transport: the time of a transfer by its bytes, and what it costs.

    measured: False for a rate that is only stated. price: an hour, in any one currency. line: the rate of
    its hardware, if known.
    """

    name: str
    curve: Curve
    measured: bool
    price: float | None = None
    line: Rate | None = None


def parse_links(texts: Sequence[str]) -> tuple[Link, ...]:
    """Read `tcp=tcp.csv,price=1.2`, `efa.csv`, `rdma=100Gbit@15us,price=3,line=100Gbit`.

    Raises `LabError` for a link that cannot be read, two of one name, or fewer than two.
    """
    links: list[Link] = []
    for part in (piece.strip() for text in texts for piece in text.split(",") if piece.strip()):
        key, given, value = part.partition("=")
        if key in ("price", "line") and given:
            if not links:
                raise LabError(f"{part!r} comes before the link that it is about")
            links[-1] = _with(links[-1], key, value)
        else:
            links.append(_link(key if given else Path(part).stem, value if given else part))
    names = [link.name for link in links]
    if len(links) < 2:
        raise LabError("two links at least; for example tcp=tcp.csv,efa=efa.csv or tcp=25Gbit@200us,...")
    if len(set(names)) < len(names):
        raise LabError(f"links have names of their own, not {', '.join(names)}; write name=file.csv")
    return tuple(links)


def _with(link: Link, key: str, value: str) -> Link:
    if key == "line":
        return replace(link, line=Rate.parse(value))
    try:
        price = float(value)
    except ValueError as error:
        raise LabError(f"price={value!r}: not a number") from error
    if not (math.isfinite(price) and price >= 0):
        raise LabError(f"price={value!r}: a price an hour is a number from 0")
    return replace(link, price=price)


def _link(name: str, value: str) -> Link:
    if "@" in value and not Path(value).exists():
        rate_text, _, latency = value.partition("@")
        rate = Rate.parse(rate_text)
        stated = stated_line(name, parse_seconds(latency), rate.bytes_per_second)
        return Link(name, stated, measured=False, line=rate)
    if not Path(value).exists():
        raise LabError(
            f"link {name}: {value!r} is no file here and no rate with a latency; write name=FILE.csv, or for "
            f"example {name}=25Gbit@200us"
        )
    data = read_measured(value, name)
    if data.unit != "bytes":
        raise LabError(f"link {name}: {value} has sizes in {data.unit}; a link's times are by bytes")
    if summarise(data).size.size < 2:
        raise LabError(
            f"link {name}: {value} has one size; two at least, from the smallest prompt to the largest"
        )
    line = curve(data, "line")
    fits = summarise(data).size.size >= 3 and (line.misfit is None or line.misfit >= MISFIT)
    return Link(name, line if fits else curve(data, "interpolate"), measured=True)
