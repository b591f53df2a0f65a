"""Task files that exist, as the plan that they are: what varies between them, and what does not."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvik_lab.errors import LabError
from kvik_lab.study.problems import StudyError
from kvik_lab.tasks.form import TaskFile, read_task_file

CONSUMER = "-consumer"
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?")


@dataclass(frozen=True)
class ImportedFile:
    """One task file: the pattern that it is a part of, its part ("main" or "consumer"), and its levels."""

    path: Path
    pattern: str
    part: str
    levels: Mapping[str, str]


@dataclass(frozen=True)
class ImportedPlan:
    """What task files vary. `constants` have one value in all files that have them; `by_part` has those with
    one value a part, `labels` those that name the pattern in each file, `factors` all others.

    `alone` are consumers whose pattern has no other file; `alike` are patterns whose levels are those of an
    earlier one, which is named.
    """

    files: tuple[ImportedFile, ...]
    constants: Mapping[str, str]
    by_part: Mapping[str, Mapping[str, str]]
    labels: tuple[str, ...]
    factors: Mapping[str, tuple[str, ...]]
    alone: tuple[str, ...]
    alike: Mapping[str, str]

    @property
    def patterns(self) -> tuple[str, ...]:
        """The patterns, each once."""
        return tuple(dict.fromkeys(one.pattern for one in self.files))


def import_plan(places: Iterable[str | os.PathLike[str]]) -> ImportedPlan:
    """Read task files, and all `*.json` in and below folders.

    Raises `StudyError` with the mistakes of all files that have some, `LabError` where there is no file.
    """
    paths = _paths(places)
    read: list[tuple[Path, TaskFile]] = []
    wrong: list[StudyError] = []
    for path in paths:
        try:
            read.append((path, read_task_file(path)))
        except StudyError as error:
            wrong.append(error)
    if wrong:
        if len(wrong) == 1:
            raise wrong[0]
        raise LabError("\n".join(map(str, wrong)))
    return _sorted_out([(path, _part(path), file) for path, file in read])


def _sorted_out(read: list[tuple[Path, str, TaskFile]]) -> ImportedPlan:
    values: dict[str, dict[str, list[str]]] = {}
    measured: set[str] = set()  # what has a value that does not name its pattern
    for path, part, file in read:
        for name, value in file.variables.items():
            values.setdefault(name, {}).setdefault(part, []).append(value)
            if _pattern(path) not in value or _NUMBER.fullmatch(value):
                measured.add(name)
    constants: dict[str, str] = {}
    by_part: dict[str, dict[str, str]] = {}
    labels: list[str] = []
    factors: dict[str, tuple[str, ...]] = {}
    for name, parts in values.items():
        different = {value for many in parts.values() for value in many}
        if len(different) == 1:
            constants[name] = different.pop()
        elif all(len(set(many)) == 1 for many in parts.values()):
            by_part[name] = {part: many[0] for part, many in parts.items()}
        elif name not in measured and all(len(set(many)) == len(many) for many in parts.values()):
            labels.append(name)
        else:
            factors[name] = tuple(sorted(different, key=_rank))
    kept = {*factors, *labels}
    files = tuple(
        ImportedFile(path, _pattern(path), part, _only(file.variables, kept)) for path, part, file in read
    )
    main = {one.pattern for one in files if one.part == "main"}
    alone = tuple(one.pattern for one in files if one.part == "consumer" and one.pattern not in main)
    return ImportedPlan(files, constants, by_part, tuple(labels), factors, alone, _alike(files, factors))


def _pattern(path: Path) -> str:
    return path.stem.removesuffix(CONSUMER)


def _part(path: Path) -> str:
    return "consumer" if path.stem.endswith(CONSUMER) else "main"


def _only(variables: Mapping[str, str], names: set[str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name in names}


def _paths(places: Iterable[str | os.PathLike[str]]) -> list[Path]:
    found: list[Path] = []
    for place in map(Path, places):
        if place.is_dir():
            inside = sorted(place.rglob("*.json"))
            if not inside:
                raise LabError(f"{place}: no *.json in or below it; give a folder of task files")
            found += inside
        else:
            found.append(place)
    if not found:
        raise LabError("no task file given; give files or folders")
    return list(dict.fromkeys(found))


def _alike(files: tuple[ImportedFile, ...], factors: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    """Patterns whose factors have the levels of an earlier one."""
    first: dict[tuple[tuple[str, str], ...], str] = {}
    alike: dict[str, str] = {}
    for one in files:
        if one.part == "main":
            key = tuple(sorted((name, value) for name, value in one.levels.items() if name in factors))
            earlier = first.setdefault(key, one.pattern)
            if earlier != one.pattern:
                alike[one.pattern] = earlier
    return alike


def _rank(value: str) -> tuple[int, float, str]:
    """Numbers by their size, before texts."""
    return (0, float(value), "") if _NUMBER.fullmatch(value) else (1, 0.0, value)
