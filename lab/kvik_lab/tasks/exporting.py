"""Task files for the patterns of a layered study, from a template.

A template is a JSON object with `files`: for each pattern, each of them becomes a task file where its `when`
holds. Their variables take what varies: `"@tokens"` is the pattern's level of a factor or a constant of the
study, `"@id"`, `"@layer"`, `"@study"` and `"@model"` are its id, its layer, the study's name and the model's,
and `{"@backend": {"tcp": "UCX", "efa": "LIBFABRIC"}}` chooses by a level. The rest is as in task files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path as FilePath
from pathlib import PurePosixPath
from typing import Annotated, Any

import numpy as np
from pydantic import AfterValidator, Field

from kvik.shapes import PRESETS
from kvik_lab.design.factor import Level
from kvik_lab.errors import LabError
from kvik_lab.records.schema import Section, Text
from kvik_lab.study.draft import Draft
from kvik_lab.study.evaluate import violated
from kvik_lab.study.expressions import Expression, Scope, parse_condition
from kvik_lab.study.layers import Pattern
from kvik_lab.study.model import Study
from kvik_lab.study.problems import MistakeError, Path, StudyError, did_you_mean
from kvik_lab.study.schema import mistake
from kvik_lab.tasks.form import VARIABLE, TaskFile, TaskSpec, check_tasks, tasks_of, write_task_file
from kvik_lab.tasks.jsonmap import read_json

DEFAULT_TEMPLATE = FilePath(__file__).parent / "templates" / "prefill-decode.json"
_OWN = ("id", "layer", "study", "model")


def _relative(value: str) -> str:
    path = PurePosixPath(value)
    if path.is_absolute() or ".." in path.parts or not value.endswith(".json"):
        raise mistake(f"the path {value!r}", "write a path in the output folder, such as {{ID}}.json")
    return value


class TemplateFileSpec(Section):
    """One file that each pattern may have."""

    path: Annotated[str, AfterValidator(_relative)]
    when: Text | None = Field(None, description="A condition on the pattern; always, if there is none.")
    name: Text
    description: str | None = None
    variables: dict[str, Any] = Field({})
    tasks: Annotated[list[TaskSpec], Field(min_length=1)]


class TemplateSpec(Section):
    """A template of task files."""

    about: str | None = None
    files: Annotated[list[TemplateFileSpec], Field(min_length=1)]


@dataclass(frozen=True)
class _Part:
    spec: TemplateFileSpec
    when: Expression | None


def export_tasks(
    study: Study, folder: str | os.PathLike[str], template: str | os.PathLike[str] | None = None
) -> list[FilePath]:
    """Write the task files of every pattern into a folder; (their paths, in the order of the patterns).

    Without a template: one server, or a producer and a consumer, of vLLM with NIXL. Raises `StudyError` for a
    template with mistakes, `LabError` for a study without patterns and for files of one name.
    """
    if not study.design.patterns:
        raise LabError(
            f"{study.file}: a design of kind {study.design.kind} has no patterns with names; task files are "
            "made from `kind: layered`"
        )
    parts = _read_template(FilePath(template) if template else DEFAULT_TEMPLATE, study)
    made: dict[FilePath, TaskFile] = {}
    for pattern in study.design.patterns:
        for part in parts:
            if part.when is None or _holds(part.when, pattern, study):
                place, file = _fill(part.spec, pattern, study)
                if place in made:
                    raise LabError(f"two task files would be called {place}; put {{{{ID}}}} into their paths")
                made[place] = file
    root = FilePath(folder)
    for place, file in made.items():
        try:
            write_task_file(file, root / place)
        except OSError as error:
            raise LabError(f"{root / place}: cannot be written: {error.strerror or error}") from error
    return [root / place for place in made]


def _holds(when: Expression, pattern: Pattern, study: Study) -> bool:
    columns = {name: np.array([level], dtype=object) for name, level in pattern.levels.items()}
    return not violated(when, columns, 1, study.constants, study.unit)[0]


def _read_template(path: FilePath, study: Study) -> list[_Part]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LabError(f"{path}: cannot be read: {error}; give the path of a template") from error
    mapped = read_json(text)
    if mapped.data is None:
        raise StudyError(
            str(path), mapped.problems or [mapped.problem((), "the file is null", "begin with {")]
        )
    draft = Draft(mapped)
    spec: TemplateSpec | None = draft.form(TemplateSpec, mapped.data, ())
    parts = [] if spec is None else [_check_part(at, one, study, draft) for at, one in enumerate(spec.files)]
    problems = draft.unspoilt(mapped.problems)
    if problems:
        raise StudyError(str(path), problems)
    return parts


def _check_part(at: int, spec: TemplateFileSpec, study: Study, draft: Draft) -> _Part:
    path: Path = ("files", at)
    check_tasks({"variables": {**spec.variables, "ID": ""}, **_plain_tasks(spec)}, path, draft)
    for name, value in spec.variables.items():
        _check_variable(name, value, (*path, "variables", name), study, draft)
    for key, text in (("path", spec.path), ("name", spec.name), ("description", spec.description or "")):
        for name in VARIABLE.findall(text):
            if name != "ID" and name not in spec.variables:
                remedy = did_you_mean(name, [*spec.variables, "ID"], what="variables")
                draft.wrong((*path, key), f"{{{{{name}}}}} is no variable of the file", remedy)
    when = None
    if spec.when is not None:
        try:
            when = parse_condition(spec.when, _scope(study))
        except MistakeError as error:
            draft.wrong_inside((*path, "when"), error)
    return _Part(spec, when)


def _plain_tasks(spec: TemplateFileSpec) -> dict[str, Any]:
    return {"tasks": [task.model_dump(exclude_none=True) for task in spec.tasks]}


def _scope(study: Study) -> Scope:
    return Scope({factor.name: factor for factor in study.factors}, study.constants)


def _check_variable(name: str, value: Any, path: Path, study: Study, draft: Draft) -> None:
    known = [*(factor.name for factor in study.factors), *study.constants, *_OWN]
    if isinstance(value, str) and value.startswith("@"):
        asked: list[Any] = [value]
    elif isinstance(value, dict):
        asked = list(value)
        if len(asked) != 1 or not isinstance(value[asked[0]], dict):
            draft.wrong(path, f"{name!r} chooses by none or several", 'write {"@backend": {"tcp": "..."}}')
            return
    elif isinstance(value, str):
        return
    else:
        draft.wrong(path, f"{name!r} is no text", "write it in quotes")
        return
    factor = str(asked[0]).removeprefix("@")
    if factor not in known or not str(asked[0]).startswith("@"):
        text = f"{name!r} needs {factor!r}, which is no factor and no constant of {study.name!r}"
        remedy = did_you_mean(factor, known, what="known are")
        draft.wrong(path, text, f"{remedy} (or give a template of your own by --template)")
    elif isinstance(value, dict):
        levels = next((one.levels for one in study.factors if one.name == factor), ())
        lacking = [_text(level) for level in levels if _text(level) not in value[asked[0]]]
        if lacking:
            draft.wrong(path, f"{name!r} says nothing for {', '.join(lacking)}", f"add {lacking[0]!r}: ...")


def _fill(spec: TemplateFileSpec, pattern: Pattern, study: Study) -> tuple[FilePath, TaskFile]:
    known: dict[str, Level] = {**study.constants, **pattern.levels}
    known |= {"id": pattern.id, "layer": pattern.layer, "study": study.name}
    known.setdefault("model", study.unit.model or "")
    known["model"] = _card(str(known["model"]))
    variables = {name: _filled(value, known) for name, value in spec.variables.items()}
    inside = TaskFile("", "", {**variables, "ID": pattern.id}, ())
    tasks = tasks_of(spec.tasks)
    if any("{{ID}}" in text for one in tasks for text in (*one.commands, one.skip_if or "")):
        variables.setdefault("ID", pattern.id)
    file = TaskFile(inside.expand(spec.name), inside.expand(spec.description or ""), variables, tasks)
    return FilePath(inside.expand(spec.path)), file


def _filled(value: Any, known: Mapping[str, Level]) -> str:
    if isinstance(value, dict):
        ((name, choices),) = value.items()
        return str(choices.get(_text(known.get(name.removeprefix("@"), "")), ""))
    if value.startswith("@"):
        return _text(known.get(value.removeprefix("@"), ""))
    return str(value)


def _text(level: Level) -> str:
    return json.dumps(level) if isinstance(level, bool) else str(level)


def _card(model: str) -> str:
    """What a serving engine calls a preset."""
    preset = PRESETS.get(model)
    return preset.card if preset and preset.card else model
