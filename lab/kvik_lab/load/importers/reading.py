"""Parts of foreign files, looked at without trust."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from kvik_lab.errors import LabError
from kvik_lab.records import Client, Figure, LoadResult, Request

MOST_TOKENS = 1 << 24
_SHOWN = 12


@dataclass(frozen=True)
class Place:
    """A value of a file, with where it stands."""

    value: Any
    where: str

    def get(self, key: str) -> Place:
        """The value of a key. Raises `LabError` where there is none."""
        found = self.find(key)
        if found is None:
            known = list(self.value)[:_SHOWN] if isinstance(self.value, dict) else []
            raise LabError(
                f"{self.where}: there is no {key!r}; there are: {', '.join(map(str, known)) or 'no keys'}"
            )
        return found

    def find(self, *keys: str) -> Place | None:
        """The value of the first of these keys that is there and not null."""
        for key in keys:
            if isinstance(self.value, dict) and self.value.get(key) is not None:
                return Place(self.value[key], f"{self.where}, {key}")
        return None

    def items(self) -> list[Place]:
        """The entries of a list. Raises `LabError` where it is none."""
        if not isinstance(self.value, list):
            raise LabError(f"{self.where}: is no list")
        return [Place(one, f"{self.where}[{at}]") for at, one in enumerate(self.value)]

    def entries(self) -> list[tuple[str, Place]]:
        """The values of a mapping, by their keys. Raises `LabError` where it is none."""
        if not isinstance(self.value, dict):
            raise LabError(f"{self.where}: is no mapping")
        return [(key, Place(one, f"{self.where}, {key}")) for key, one in self.value.items()]

    def number(self) -> float:
        """A finite number. Raises `LabError` where it is none."""
        value = self.value
        if isinstance(value, int | float) and not isinstance(value, bool):
            with contextlib.suppress(OverflowError):
                if math.isfinite(value):
                    return float(value)
        raise LabError(f"{self.where}: is {str(value)[:60]!r}, not a number")

    def whole(self) -> int:
        """A whole number from 0. Raises `LabError` where it is none."""
        value = self.number()
        if value < 0 or value != int(value):
            raise LabError(f"{self.where}: is {value:g}, not a whole number from 0")
        return int(self.value)  # times in ns have more digits than a float

    def text(self) -> str:
        """A text. Raises `LabError` where it is none."""
        if not isinstance(self.value, str):
            raise LabError(f"{self.where}: is {str(self.value)[:60]!r}, not a text")
        return self.value


def parse_json(text: str, where: str) -> Place:
    """A file of one JSON value. Raises `LabError`."""
    try:
        return Place(json.loads(text), where)
    except (ValueError, RecursionError) as error:
        raise LabError(f"{where}: is not JSON: {error}") from error


def parse_lines(text: str, where: str) -> list[Place]:
    """A file of one JSON value a line. Raises `LabError`."""
    found = []
    for number, line in enumerate(text.split("\n"), 1):  # JSON has other ends of lines within its texts
        if line.strip():
            found.append(parse_json(line, f"{where}, line {number}"))
    if not found:
        raise LabError(f"{where}: is empty")
    return found


def output_tokens(place: Place | None) -> int | None:
    """The tokens of an answer, or None where there is nothing. Raises `LabError` for more than any has: where
    times of tokens are made of it, they would not fit into memory."""
    count = maybe_whole(place)
    if place is not None and count is not None and count > MOST_TOKENS:
        raise LabError(f"{place.where}: is {count:g} tokens, and no answer has more than {MOST_TOKENS}")
    return count


def maybe_number(place: Place | None) -> float | None:
    """A number, or None where there is nothing."""
    return None if place is None else place.number()


def maybe_whole(place: Place | None) -> int | None:
    """A whole number, or None where there is nothing."""
    return None if place is None else place.whole()


def cell(text: str, where: str) -> float:
    """A number in a table. Raises `LabError` where it is none."""
    try:
        value = float(text)
    except ValueError as error:
        raise LabError(f"{where}: {text!r} is no number") from error
    return Place(value, where).number()


def figure(
    metric: str,
    unit: str,
    value: float,
    statistic: str = "value",
    levels: Mapping[str, object] | None = None,
    iteration: int | None = None,
) -> Figure:
    """A figure whose unit is known by a table of such."""
    given = {"metric": metric, "unit": unit, "value": value, "statistic": statistic}
    return Figure.model_validate({**given, "levels": levels or {}, "iteration": iteration})


Columns: TypeAlias = Mapping[str, tuple[str, str, str, float]]
"""Headings of a table, each with the metric, its unit, its statistic, and the unit's factor."""


def row(
    known: Columns, names: Sequence[str], cells: Sequence[str], levels: Mapping[str, object], where: str
) -> list[Figure]:
    """The figures of a table's row. Raises `LabError` for a cell that is no number."""
    found = []
    for name, text in zip(names, cells, strict=True):
        if name in known:
            metric, unit, statistic, factor = known[name]
            found.append(figure(metric, unit, cell(text, f"{where}, {name}") * factor, statistic, levels))
    return found


def result(
    driver: str,
    *,
    requests: Sequence[Request] = (),
    figures: Sequence[Figure] = (),
    began: float = 0.0,
    seconds: float = 0.0,
    version: str | None = None,
    load: dict[str, Any] | None = None,
) -> LoadResult:
    """A result. began: s since the epoch, 0 where the file does not say it."""
    begin = max(0, int(began * 1e9))
    return LoadResult(
        began=begin,
        ended=begin + max(0, int(seconds * 1e9)),
        client=Client(driver=driver, version=version or None, load=load or {}),
        requests=tuple(requests),
        figures=tuple(figures),
    )
