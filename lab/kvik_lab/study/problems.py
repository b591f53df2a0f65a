"""What is wrong with a study file: every mistake with its place, and what to write instead."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvik_lab.errors import LabError

Path = tuple[str | int | float | bool, ...]
"""The keys and indices that lead to a value."""

_SHOWN = 12  # names that a remedy lists before it stops


@dataclass(frozen=True, order=True)
class Problem:
    """One mistake. Lines and columns count from 1; `path` is dotted, such as `factors.tokens.levels[2]`."""

    line: int
    column: int
    path: str
    text: str
    remedy: str

    def at(self, file: str) -> str:
        """One line for people and editors: `file:line:column: text; remedy`."""
        return f"{file}:{self.line}:{self.column}: {self.text}; {self.remedy}"


class StudyError(LabError):
    """A study file has mistakes: all of them, in `problems`, in the order of the file. Each has its line, its
    column, what is wrong, and what to write instead."""

    def __init__(self, file: str, problems: Iterable[Problem]) -> None:
        self.file = file
        self.problems: tuple[Problem, ...] = tuple(sorted(set(problems)))
        super().__init__("\n".join(problem.at(file) for problem in self.problems))


class MistakeError(LabError):
    """One part of a study cannot be used: a condition, a formula, a pattern. `column` counts the characters
    of its text from 0. In a file it becomes a `Problem` of a `StudyError`."""

    def __init__(self, column: int, text: str, remedy: str) -> None:
        super().__init__(f"{text}; {remedy}")
        self.column, self.text, self.remedy = column, text, remedy


def _is_number(text: str) -> bool:
    """A number's nearest neighbour by letters says nothing."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def dotted(path: Path) -> str:
    """A path as people write it."""
    text = ""
    for part in path:
        if isinstance(part, int) and not isinstance(part, bool):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else str(part)
    return text


def did_you_mean(name: str, known: Sequence[str], *, what: str) -> str:
    """A remedy for a name that is none of `known`: the nearest, else what there is."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if not near:
        lower = {one.lower(): one for one in known}
        near = [lower[name.lower()]] if name.lower() in lower else []
    if near and not _is_number(name):
        return f"did you mean {near[0]!r}?"
    if not known:
        return f"there is no {what}"
    shown = ", ".join(known[:_SHOWN]) + (", ..." if len(known) > _SHOWN else "")
    return f"{what}: {shown}"
