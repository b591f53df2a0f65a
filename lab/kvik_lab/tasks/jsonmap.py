"""JSON read so that every value keeps its place, and no key is there twice."""

from __future__ import annotations

import bisect
import json
import math
import re
from typing import Any

from kvik_lab.study.problems import Path, Problem, dotted
from kvik_lab.study.yamlmap import LARGEST_TEXT, Mapped, Place, has_half_character

_BLANK = re.compile(r"[ \t\r\n]*")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_WORDS = {"true": True, "false": False, "null": None}
_DECODER = json.JSONDecoder()
_DEEPEST = 60


def read_json(text: str) -> Mapped:
    """Read one JSON text. What is wrong with it as JSON is in `problems`, and `data` is then None."""
    mapped = Mapped()
    reader = _Reader(text, mapped)
    if len(text) > LARGEST_TEXT:
        mapped.problems.append(Problem(1, 1, "", "larger than 1 MiB, which no task file is", "split it"))
        return mapped
    try:
        value, end = reader.value(reader.blank(0), (), None)
        end = reader.blank(end)
        if end < len(text):
            raise _NotJsonError(end, "something behind the end of the object", "take it away")
    except _NotJsonError as error:
        line, column = reader.where(error.at)
        mapped.problems.append(Problem(line, column, "", f"not JSON: {error.what}", error.remedy))
        return mapped
    mapped.data = value
    return mapped


class _NotJsonError(Exception):
    def __init__(self, at: int, what: str, remedy: str = "check quotes, commas and brackets here") -> None:
        super().__init__(what)
        self.at, self.what, self.remedy = at, what, remedy


class _Reader:
    def __init__(self, text: str, mapped: Mapped) -> None:
        self.text, self.mapped = text, mapped
        self.starts = [0, *(match.end() for match in re.finditer("\n", text))]

    def where(self, at: int) -> tuple[int, int]:
        line = bisect.bisect_right(self.starts, at)
        return line, at - self.starts[line - 1] + 1

    def blank(self, at: int) -> int:
        match = _BLANK.match(self.text, at)
        return match.end() if match else at

    def value(self, at: int, path: Path, key: int | None) -> tuple[Any, int]:
        line, column = self.where(at)
        key_line, key_column = (line, column) if key is None else self.where(key)
        first = self.text[at : at + 1]
        self.mapped.places[path] = Place(line, column, key_line, key_column, 1 if first == '"' else None)
        if len(path) > _DEEPEST:
            raise _NotJsonError(at, "nested too deeply", "a task file is a few levels deep")
        if first == "{":
            return self.object(at, path)
        if first == "[":
            return self.array(at, path)
        if first == '"':
            return self.string(at)
        for word, meaning in _WORDS.items():
            if self.text.startswith(word, at):
                return meaning, at + len(word)
        match = _NUMBER.match(self.text, at)
        if match is None:
            what = "the text ends here" if not first else f"{first!r} begins no value"
            raise _NotJsonError(at, what)
        try:
            number = json.loads(match[0])
            finite = math.isfinite(number)
        except (ValueError, OverflowError):
            finite = False
        if not finite:
            raise _NotJsonError(at, "a number too large", "write a smaller one, or a text in quotes")
        return number, match.end()

    def string(self, at: int) -> tuple[str, int]:
        try:
            value, end = _DECODER.raw_decode(self.text, at)
        except json.JSONDecodeError as error:
            remedy = "write a line break as \\n" if "control" in error.msg else "close the quotation"
            raise _NotJsonError(error.pos, error.msg.lower(), remedy) from None
        if has_half_character(value) or "\0" in value:
            remedy = "write the whole character, as it is, and no \\u0000"
            raise _NotJsonError(at, "a text with half a character (a lone surrogate) or none", remedy)
        return str(value), end

    def object(self, at: int, path: Path) -> tuple[dict[str, Any], int]:
        found: dict[str, Any] = {}
        at = self.blank(at + 1)
        if self.text[at : at + 1] == "}":
            return found, at + 1
        while True:
            if self.text[at : at + 1] != '"':
                raise _NotJsonError(at, "a key in double quotes belongs here", "a comma before } is not JSON")
            start = at
            name, at = self.string(at)
            at = self.blank(at)
            if self.text[at : at + 1] != ":":
                raise _NotJsonError(at, f"no colon behind the key {name!r}")
            if name in found:
                line, column = self.where(start)
                text = f"{name!r} is given twice, first in line {self.mapped.places[(*path, name)].key_line}"
                problem = Problem(line, column, dotted((*path, name)), text, "keep one of the two")
                self.mapped.problems.append(problem)
            found[name], at = self.value(self.blank(at + 1), (*path, name), start)
            at, done = self.next(at, "}")
            if done:
                return found, at

    def array(self, at: int, path: Path) -> tuple[list[Any], int]:
        found: list[Any] = []
        at = self.blank(at + 1)
        if self.text[at : at + 1] == "]":
            return found, at + 1
        while True:
            one, at = self.value(at, (*path, len(found)), None)
            found.append(one)
            at, done = self.next(at, "]")
            if done:
                return found, at

    def next(self, at: int, closing: str) -> tuple[int, bool]:
        at = self.blank(at)
        mark = self.text[at : at + 1]
        if mark == closing:
            return at + 1, True
        if mark != ",":
            raise _NotJsonError(at, f"neither a comma nor {closing}")
        return self.blank(at + 1), False
