"""YAML read so that every value keeps its place, and none means something other than it says.

Scalars are read as YAML 1.2's core schema says. One that YAML 1.1 (and so PyYAML's `safe_load`) reads in
another way is refused with both meanings: `on`, `off`, `yes` and `no`, `1_000`, `017`, `0o17`, `1:30`, `1e3`,
dates. Source: YAML 1.2.2, chapter 10.3; YAML 1.1, "Language-Independent Types".
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

import yaml

from kvik_lab.study.problems import Path, Problem, dotted

LARGEST_TEXT = 1024 * 1024

_NULL = re.compile(r"null|Null|NULL|~|")
_BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
_INT = re.compile(r"[-+]?[0-9]+")
_OCTAL = re.compile(r"0o[0-7]+")
_HEX = re.compile(r"0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_ENDLESS = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_MOST_DIGITS = 400  # more than a float has; Python refuses to read some thousands
_STR, _MAP, _SEQ = (f"tag:yaml.org,2002:{kind}" for kind in ("str", "map", "seq"))


@dataclass(frozen=True)
class Place:
    """Where a value stands, and its key where it has one; counted from 1.

    `inside` is how far the text of a scalar begins behind its first character: 1 for one in quotes, and None
    where a column inside of it cannot be told (it has several lines, or escapes).
    """

    line: int
    column: int
    key_line: int
    key_column: int
    inside: int | None = None


@dataclass
class Mapped:
    """A text as plain data, the place of every path in it, and what was wrong with it as YAML."""

    data: Any = None
    places: dict[Path, Place] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def place(self, path: Path) -> Place:
        """The place of a path, or of the nearest thing around it that is in the text."""
        while path and path not in self.places:
            path = path[:-1]
        return self.places.get(path, Place(1, 1, 1, 1))

    def problem(
        self, path: Path, text: str, remedy: str, *, key: bool = False, offset: int | None = None
    ) -> Problem:
        """A mistake at a value, at its key, or `offset` characters into its text."""
        place = self.place(path)
        if key:
            return Problem(place.key_line, place.key_column, dotted(path), text, remedy)
        column = place.column
        if offset is not None and place.inside is not None:
            column += place.inside + offset
        return Problem(place.line, column, dotted(path), text, remedy)


def read_yaml(text: str) -> Mapped:
    """Read one YAML document. What is wrong is in `problems`; a guess, or None, stands for it in `data`."""
    mapped = Mapped()
    if len(text) > LARGEST_TEXT:
        mapped.problems.append(Problem(1, 1, "", "larger than 1 MiB, which no study is", "shorten it"))
        return mapped
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mapped.problems.append(_syntax(error))
        return mapped
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        problem = f"a character that YAML does not allow ({error.reason})"
        mapped.problems.append(Problem(line, 1, "", problem, "take it out"))
        return mapped
    except RecursionError:
        mapped.problems.append(Problem(1, 1, "", "nested too deeply", "a study is a few levels deep"))
        return mapped
    if node is None:
        mapped.problems.append(Problem(1, 1, "", "the file is empty", "begin with `study: NAME`"))
        return mapped
    mapped.data = _Reader(mapped, text).value(node, (), node.start_mark)
    return mapped


def has_half_character(text: str) -> bool:
    """Whether an escape made half of a character, which no file can hold."""
    return any("\ud800" <= one <= "\udfff" for one in text)


def _syntax(error: yaml.MarkedYAMLError) -> Problem:
    mark = error.problem_mark or error.context_mark
    line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
    what = " ".join(filter(None, (error.context, error.problem)))
    remedy = "check indentation, brackets, colons and quotes here and on the line before"
    if "\\t" in what:
        remedy = "indent by spaces: YAML allows no tabs"
    elif "single document" in what:
        remedy = "keep one study a file, without a second `---`"
    elif "alias" in what:
        remedy = "quote a text that begins with `*`"
    elif "mapping values are not allowed" in what:
        remedy = "quote a text that has `: ` in it"
    return Problem(line, column, "", f"not YAML: {what}", remedy)


class _Reader:
    """Turns nodes into data, once each."""

    def __init__(self, mapped: Mapped, text: str) -> None:
        self.mapped = mapped
        # The node of an alias is the anchor's, with the anchor's place.
        events = yaml.parse(text, Loader=yaml.SafeLoader) if "*" in text else ()
        self.aliases = (
            event.start_mark for event in events if isinstance(event, yaml.AliasEvent) and event.start_mark
        )
        self.seen: set[int] = set()

    def wrong(
        self, mark: yaml.error.Mark | yaml._yaml.Mark, path: Path, text: str, remedy: str, guess: Any = None
    ) -> Any:
        self.mapped.problems.append(Problem(mark.line + 1, mark.column + 1, dotted(path), text, remedy))
        return guess

    def value(self, node: yaml.Node, path: Path, key: yaml.Mark) -> Any:
        """A node's data; the best guess, or None, where it cannot be said."""
        mark = node.start_mark
        if id(node) in self.seen:
            mark = next(self.aliases, key)
            self.mapped.places[path] = Place(mark.line + 1, mark.column + 1, key.line + 1, key.column + 1)
            return self.wrong(mark, path, "an alias (`*name`) repeats another value", "write the value out")
        self.seen.add(id(node))
        place = Place(mark.line + 1, mark.column + 1, key.line + 1, key.column + 1, _inside(node))
        self.mapped.places[path] = place
        if isinstance(node, yaml.ScalarNode):
            return self.scalar(node, path)
        tag = _MAP if isinstance(node, yaml.MappingNode) else _SEQ
        if node.tag != tag:
            return self.wrong(mark, path, f"the tag {_short(node.tag)} has no meaning here", "leave it out")
        if isinstance(node, yaml.MappingNode):
            return self.mapping(node, path)
        return [self.value(one, (*path, at), one.start_mark) for at, one in enumerate(node.value)]

    def mapping(self, node: yaml.MappingNode, path: Path) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for key_node, value_node in node.value:
            mark = key_node.start_mark
            if not isinstance(key_node, yaml.ScalarNode):
                self.wrong(mark, path, "a key that is a list or a mapping", "a key is a name or a level")
                continue
            if key_node.value == "<<" and key_node.style is None:
                self.wrong(mark, path, "a merge (`<<`) hides where values come from", "write the keys out")
                continue
            sound = len(self.mapped.problems)
            key = self.scalar(key_node, (*path, key_node.value))
            if len(self.mapped.problems) > sound:
                key = str(key_node.value)
            if key is None:
                self.wrong(mark, path, "a key that is empty", "give it a name")
                continue
            if key in found:
                first = self.mapped.place((*path, key)).key_line
                text = f"{key!r} is given twice, first in line {first}"
                self.wrong(mark, (*path, key), text, "keep one of the two")
                continue
            found[key] = self.value(value_node, (*path, key), mark)
        return found

    def scalar(self, node: yaml.ScalarNode, path: Path) -> Any:
        mark, text = node.start_mark, str(node.value)
        plain = node.style is None
        implied = _implied(text) if plain else _STR
        if node.tag != implied:
            remedy = "leave it out; quote what is text"
            return self.wrong(mark, path, f"the tag {_short(node.tag)} has no meaning here", remedy, text)
        if has_half_character(text):
            remedy = "write the whole character, as it is"
            return self.wrong(mark, path, "a text with half a character (a lone surrogate)", remedy, "")
        if not plain:
            return text
        value, old = _core(text), _old(text, node.tag)
        if isinstance(value, float) and not math.isfinite(value):
            return self.wrong(mark, path, f"{text} is no finite number", "write a finite one")
        if type(value) is not type(old) or value != old:
            said = f"`{text}` means {_meaning(old)} in YAML 1.1 and {_meaning(value)} in YAML 1.2"
            guess = value if isinstance(old, str) or not isinstance(value, str) else old
            return self.wrong(mark, path, said, _instead(text, value, old), guess)
        return value


_RESOLVER = yaml.SafeLoader("")
_CONSTRUCTOR = yaml.SafeLoader("")


def _implied(text: str) -> str:
    """The tag that YAML 1.1 gives to a plain scalar."""
    tag = _RESOLVER.resolve(yaml.ScalarNode, text, (True, False))  # type: ignore[no-untyped-call]
    return str(tag)


def _core(text: str) -> str | int | float | bool | None:
    """A plain scalar as YAML 1.2's core schema reads it."""
    if _NULL.fullmatch(text):
        return None
    if _BOOL.fullmatch(text):
        return text.lower() == "true"
    if _INT.fullmatch(text):
        return int(text) if len(text) < _MOST_DIGITS else float(text)
    if _OCTAL.fullmatch(text):
        return int(text[2:], 8)
    if _HEX.fullmatch(text):
        return int(text[2:], 16)
    if _FLOAT.fullmatch(text):
        return float(text)
    if _ENDLESS.fullmatch(text):
        return math.inf
    return text


def _old(text: str, tag: str) -> Any:
    """The same as YAML 1.1 reads it, by PyYAML."""
    try:
        return _CONSTRUCTOR.construct_object(yaml.ScalarNode(tag, text))
    except (yaml.YAMLError, ValueError):
        return text


def _meaning(value: Any) -> str:
    if isinstance(value, str):
        return "a text"
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"the number {value}" if isinstance(value, int | float) else f"the date {value}"


def _instead(text: str, value: Any, old: Any) -> str:
    quoted = f'"{text}"'
    if isinstance(old, bool):
        return f"write {'true' if old else 'false'}, or {quoted} for the text"
    digits = text.replace("_", "")
    if isinstance(value, float):
        return f"write {value:.0f}" if value.is_integer() and abs(value) < 1e15 else f"write {value!r}"
    if isinstance(value, int):
        return f"write {value}" if text[:2] == "0o" else f"write {value} or {old}, whichever is meant"
    if isinstance(old, int | float) and _FLOAT.fullmatch(digits):
        return f"write {digits}"
    return f"write {quoted} for the text" + (f", or {old}" if isinstance(old, int | float) else "")


def _inside(node: yaml.Node) -> int | None:
    if not isinstance(node, yaml.ScalarNode) or node.start_mark.line != node.end_mark.line:
        return None
    width = node.end_mark.column - node.start_mark.column - len(node.value)
    if node.style is None:
        return 0 if width == 0 else None
    return 1 if width == 2 else None


def _short(tag: str) -> str:
    return tag.replace("tag:yaml.org,2002:", "!!")
