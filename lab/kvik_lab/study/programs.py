"""The checks of `run`, and its values for one row: levels put in, then read strictly.

In `run` any value may be a text with names of factors and constants in brackets. `"{tokens}"` alone is
the level itself; where that factor does not exist in a row, the key is as if it were not there.
`"ctx={tokens}"` is a text with the level in it. What `sets` of a level says comes last, read likewise.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from kvik_lab.design.factor import Level
from kvik_lab.errors import LabError
from kvik_lab.load.spec import parse_spec
from kvik_lab.load.tools import INSTEAD, TOOLS, refused
from kvik_lab.run.spec import RunSpec
from kvik_lab.study.draft import Draft, has_level
from kvik_lab.study.model import Program
from kvik_lab.study.problems import Path, did_you_mean, dotted

_FIELD = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")
_WHOLE = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}\Z")
_ABSENT = object()
_OF_PYDANTIC = ("list[", "str", "int", "bool", "float")  # parts of a place that are no keys


class PutError(LabError):
    """A value of `run` cannot be had for a row. `path` leads to it."""

    def __init__(self, path: Path, text: str, remedy: str) -> None:
        super().__init__(f"{dotted(('run', *path))}: {text}; {remedy}")
        self.path, self.text, self.remedy = path, text, remedy


def put_levels(program: Program, levels: Mapping[str, Level | None], constants: Mapping[str, Any]) -> RunSpec:
    """`run` for one row. Raises `PutError`, which has the path of what is wrong."""
    present = {name: level for name, level in levels.items() if level is not None}
    known, names = {**constants, **present}, frozenset(levels)
    raw = _put(copy.deepcopy(dict(program.raw)), known, names, ())
    for name, level in present.items():
        for path, value in _set_by(program, name, level).items():
            put = _put(value, known, names, tuple(path.split(".")))
            if put is not _ABSENT:
                _set(raw, path, put, name)
    try:
        return RunSpec.model_validate(raw)
    except ValidationError as error:
        raise _put_error(error) from error


def _put_error(error: ValidationError) -> PutError:
    """The first mistake; an unknown key before what is missing for the lack of it."""
    found = sorted(error.errors(include_url=False), key=lambda one: one["type"] != "extra_forbidden")
    path: Path = tuple(one for one in found[0]["loc"] if not str(one).startswith(_OF_PYDANTIC))
    what, remedy = str(found[0]["msg"]).lower(), "see `kvik lab schema` for what belongs there"
    if found[0]["type"] == "extra_forbidden":
        what = "unknown key"
    if "remedy" in found[0].get("ctx", {}):
        what, remedy = found[0]["msg"], found[0]["ctx"]["remedy"]
    return PutError(path, f"{dotted(('run', *path))}: {what}", remedy)


def _set_by(program: Program, name: str, level: Level) -> Mapping[str, Any]:
    for one, values in program.sets.get(name, {}).items():
        if one == level and isinstance(one, bool) == isinstance(level, bool):
            return values
    return {}


def check_program(
    raw: Any, sets: Mapping[str, Mapping[Level, Mapping[str, Any]]], draft: Draft
) -> Program | None:
    """Read `run`, and try every level of every factor, each once. None where it is wrong, which is then
    noted."""
    if not isinstance(raw, dict):
        draft.wrong(("run",), "'run' is no mapping", "write `driver: emulator`, indented")
        return None
    for name, by_level in sets.items():
        for level in by_level:
            factor = draft.factors.get(name)
            if factor is not None and not has_level(factor, level):
                remedy = did_you_mean(str(level), [str(one) for one in factor.levels], what="its levels")
                where: Path = ("factors", name, "sets", level)
                draft.wrong(where, f"{name!r} has no level {level!r}", remedy, key=True)
    if draft.problems:
        return None  # each level is tried below, and would be found wrong again
    program = Program(raw, sets)
    first = {name: factor.levels[0] for name, factor in draft.factors.items()}
    rows = [{**first, name: level} for name, factor in draft.factors.items() for level in factor.levels]
    seen: set[Path] = set()
    for row in rows:
        try:
            spec = put_levels(program, row, draft.constants)
            _check_flags(spec)
            _check_tool(spec)
        except PutError as error:
            if error.path not in seen:
                seen.add(error.path)
                draft.wrong(("run", *error.path), error.text, error.remedy)
    return None if seen else program


def _check_flags(spec: RunSpec) -> None:
    """Raises `PutError` for flags of a load that no command takes."""
    if spec.role("load").options and spec.driver != "transfers" and spec.load.get("tool") not in TOOLS:
        raise PutError(
            ("roles", "load", "options"),
            "run.roles.load.options: the lab's own load takes no flags",
            "write what it is to do in run.load; flags are of another tool (run.load.tool), or of transfers",
        )


def _check_tool(spec: RunSpec) -> None:
    """Raises `PutError` for what the tool that sends a load cannot express."""
    try:
        load = parse_spec(
            {"arrival": {"kind": "closed", "concurrency": 1}, **spec.load, "url": "http://none"}
        )
    except LabError:
        return  # is said when the study is resolved, or is no load of requests
    for key, why in refused(load):
        raise PutError(("load", *key.split(".")), f"{dotted(('run', 'load', key))}: {why}", INSTEAD)


def _put(value: Any, values: Mapping[str, Any], names: frozenset[str], path: Path) -> Any:
    """The value with levels put in; `_ABSENT` where it is a factor that does not exist in the row."""
    if isinstance(value, dict):
        put = {key: _put(one, values, names, (*path, key)) for key, one in value.items()}
        return {key: one for key, one in put.items() if one is not _ABSENT}
    if isinstance(value, list):
        several = [_put(one, values, names, (*path, at)) for at, one in enumerate(value)]
        return [one for one in several if one is not _ABSENT]
    if not isinstance(value, str):
        return value
    for name in _FIELD.findall(value):
        if name not in values and name not in names:
            raise PutError(
                path, f"{name!r} is no factor and no constant", "name one, or take the brackets away"
            )
    whole = _WHOLE.match(value)
    if whole is not None:
        return values.get(whole[1], _ABSENT)
    missing = [name for name in _FIELD.findall(value) if name not in values]
    if missing:
        raise PutError(
            path, f"{missing[0]!r} does not exist in a row", "let the factor that has it set this value"
        )
    return _FIELD.sub(lambda found: str(values[found[1]]), value)


def _set(raw: dict[str, Any], dotted: str, value: Any, name: str) -> None:
    """Put a value at a path, through mappings that are there or are made."""
    *above, last = dotted.split(".")
    at = raw
    for key in above:
        at = at.setdefault(key, {})
        if not isinstance(at, dict):
            raise PutError(tuple(above), f"{name!r} sets {dotted}, and {key} is no mapping", "mend the path")
    at[last] = value
