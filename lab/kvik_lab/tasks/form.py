"""A task file: variables, and tasks with shell commands. Read strictly, written canonically.

The form is `{name, description, variables{}, tasks[{id, name, description?, skip_if?, commands[]}]}`, and
`{{NAME}}` in a command, in `skip_if` or in a variable stands for a variable's value.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Annotated, Any

from pydantic import AfterValidator, Field, PlainValidator

from kvik_lab.errors import LabError
from kvik_lab.records import write_whole
from kvik_lab.records.schema import Section, Text
from kvik_lab.study.draft import Draft
from kvik_lab.study.problems import Path, StudyError, did_you_mean
from kvik_lab.study.schema import mistake
from kvik_lab.study.yamlmap import LARGEST_TEXT
from kvik_lab.tasks.jsonmap import read_json

VARIABLE = re.compile(r"\{\{([A-Za-z_][A-Za-z0-9_]*)\}\}")
_SPACED = re.compile(r"\{\{ *([A-Za-z_][A-Za-z0-9_]*) *\}\}")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str | int | float):
        return str(value)
    raise mistake("a variable that is no text", "a variable is a text, a number, true or false")


def _name(value: str) -> str:
    if not _NAME.fullmatch(value):
        raise mistake(f"{value!r} cannot be the name of a variable", "use letters, digits and _")
    return value


Variables = dict[Annotated[str, AfterValidator(_name)], Annotated[Any, PlainValidator(_value)]]


class TaskSpec(Section):
    """One task of a file."""

    id: Text
    name: Text
    description: str | None = None
    skip_if: Text | None = Field(
        None, description="A shell command; the task is done already if it succeeds."
    )
    commands: Annotated[list[str], Field(min_length=1)]


class TaskFileSpec(Section):
    """A task file."""

    name: Text
    description: str | None = None
    variables: Variables = Field({})
    tasks: Annotated[list[TaskSpec], Field(min_length=1)]


@dataclass(frozen=True)
class Task:
    """Commands that belong together: a run resumes at the first task that has not succeeded."""

    id: str
    name: str
    commands: tuple[str, ...]
    description: str = ""
    skip_if: str | None = None


@dataclass(frozen=True)
class TaskFile:
    """A task file that has passed its checks: each variable that a command names is defined."""

    name: str
    description: str
    variables: Mapping[str, str]
    tasks: tuple[Task, ...]

    def expand(self, text: str) -> str:
        """The text with the variables' values in place of `{{NAME}}`, as they are: nothing is quoted."""
        for _ in range(len(self.variables) + 1):  # a variable may name others; circles are refused on reading
            text = VARIABLE.sub(lambda match: self.variables.get(match[1], match[0]), text)
        return text

    @property
    def digest(self) -> str:
        """The SHA-256 of what the file says, however it is laid out."""
        return hashlib.sha256(json.dumps(_plain(self), sort_keys=True).encode()).hexdigest()


def read_task_file(path: str | os.PathLike[str]) -> TaskFile:
    """Read a task file. Raises `StudyError` with every mistake; `LabError` where it cannot be read."""
    place = FilePath(path)
    try:
        with place.open("rb") as file:
            text = file.read(4 * LARGEST_TEXT).decode("utf-8-sig")
    except OSError as error:
        reason = error.strerror or error
        raise LabError(f"{place}: cannot be read: {reason}; give the path of a task file") from error
    except UnicodeDecodeError as error:
        raise LabError(f"{place}: not UTF-8; save the file in UTF-8") from error
    return parse_task_file(text, file=str(place))


def parse_task_file(text: str, *, file: str = "tasks") -> TaskFile:
    """Read a task file from its text. Raises `StudyError` with every mistake."""
    mapped = read_json(text)
    if mapped.data is None:
        raise StudyError(file, mapped.problems or [mapped.problem((), "the file is null", "begin with {")])
    draft = Draft(mapped)
    spec: TaskFileSpec | None = draft.form(TaskFileSpec, mapped.data, ())
    if isinstance(mapped.data, dict):
        check_tasks(mapped.data, (), draft)
    problems = draft.unspoilt(mapped.problems)
    if problems or spec is None:
        raise StudyError(file, problems)
    return TaskFile(spec.name, spec.description or "", dict(spec.variables), tasks_of(spec.tasks))


def tasks_of(specs: Sequence[TaskSpec]) -> tuple[Task, ...]:
    """The tasks that a form describes."""
    return tuple(
        Task(one.id, one.name, tuple(one.commands), one.description or "", one.skip_if) for one in specs
    )


def write_task_file(file: TaskFile, path: str | os.PathLike[str]) -> None:
    """Write a task file as JSON, in one step: a reader sees the old one or the new one."""
    place = FilePath(path)
    place.parent.mkdir(parents=True, exist_ok=True)
    write_whole(place, json.dumps(_plain(file), indent=2, ensure_ascii=False) + "\n")


def _plain(file: TaskFile) -> dict[str, Any]:
    tasks = []
    for task in file.tasks:
        plain: dict[str, Any] = {"id": task.id, "name": task.name}
        if task.description:
            plain["description"] = task.description
        if task.skip_if is not None:
            plain["skip_if"] = task.skip_if
        tasks.append({**plain, "commands": list(task.commands)})
    description = {"description": file.description} if file.description else {}
    return {"name": file.name, **description, "variables": dict(file.variables), "tasks": tasks}


def check_tasks(data: Mapping[str, Any], path: Path, draft: Draft) -> None:
    """What the form cannot say: ids that are there twice, variables that are not defined."""
    variables = data.get("variables", {})
    known = list(variables) if isinstance(variables, dict) else []
    seen: dict[str, int] = {}
    tasks = data.get("tasks")
    for at, task in enumerate(tasks if isinstance(tasks, list) else ()):
        if not isinstance(task, dict):
            continue
        name, where = task.get("id"), (*path, "tasks", at, "id")
        if isinstance(name, str):
            if name in seen:
                text = f"the id {name!r} is there twice, first in line {seen[name]}"
                draft.wrong(where, text, "give each task its own")
            seen.setdefault(name, draft.mapped.place(where).line)
        for text, place in _texts(task, (*path, "tasks", at)):
            _check_names(text, known, place, draft)
    if isinstance(variables, dict):
        for name, value in variables.items():
            if isinstance(value, str):
                _check_names(value, known, (*path, "variables", name), draft)
        _check_circles(variables, path, draft)


def _texts(task: dict[str, Any], path: Path) -> Iterator[tuple[str, Path]]:
    if isinstance(task.get("skip_if"), str):
        yield task["skip_if"], (*path, "skip_if")
    commands = task.get("commands")
    for at, command in enumerate(commands if isinstance(commands, list) else ()):
        if isinstance(command, str):
            yield command, (*path, "commands", at)


def _check_names(text: str, known: list[str], path: Path, draft: Draft) -> None:
    for match in _SPACED.finditer(text):
        exact = match[0] == f"{{{{{match[1]}}}}}"
        if match[1] in known and not exact:
            draft.wrong(path, f"{match[0]!r} has blanks inside", f"write {{{{{match[1]}}}}}")
        if match[1] not in known and exact:
            remedy = did_you_mean(match[1], known, what="variables")
            draft.wrong(path, f"{match[0]} is no variable of the file", remedy)


def _check_circles(variables: dict[str, Any], path: Path, draft: Draft) -> None:
    for name in variables:
        names, reached = {name}, False
        for _ in variables:
            texts = (str(variables[one]) for one in names if one in variables)
            names = {match for text in texts for match in VARIABLE.findall(text)}
            reached = reached or name in names
        if reached:
            draft.wrong(
                (*path, "variables", name), f"{name!r} contains itself", "write a value that does not"
            )
