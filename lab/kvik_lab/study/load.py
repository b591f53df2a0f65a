"""From a study file to a `Study`: every mistake found in one go, or none."""

from __future__ import annotations

import ast
import hashlib
import os
from pathlib import Path as FilePath
from typing import Annotated, Any

from kvik_lab.errors import LabError
from kvik_lab.study.draft import Draft, empties
from kvik_lab.study.expressions import Expression, parse_condition
from kvik_lab.study.factors import check_constants, check_factors, check_unit
from kvik_lab.study.formula import parse_formula
from kvik_lab.study.model import Cost, Program, Study
from kvik_lab.study.plan import check_design, check_warmup
from kvik_lab.study.problems import MistakeError, StudyError, did_you_mean
from kvik_lab.study.programs import check_program
from kvik_lab.study.schema import GATES, StudyFile
from kvik_lab.study.unit import Unit
from kvik_lab.study.yamlmap import LARGEST_TEXT, read_yaml


def load_study(source: str | os.PathLike[str]) -> Study:
    """Read a study from a file, or from its text (a `str` that has a line break in it).

    Raises `StudyError`, which has every mistake with its line, column and remedy; `LabError` for a file that
    cannot be read.
    """
    if isinstance(source, str) and "\n" in source:
        return parse_study(source)
    path = FilePath(source)
    try:
        with path.open("rb") as file:
            raw = file.read(4 * LARGEST_TEXT)
        text = raw.decode("utf-8-sig")
    except OSError as error:
        reason = error.strerror or error
        raise LabError(f"{path}: cannot be read: {reason}; give the path of a study file") from error
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise LabError(f"{path}:{line}: not UTF-8; save the file in UTF-8") from error
    return parse_study(text, file=str(path), folder=path.parent)


def parse_study(text: str, *, file: str = "study", folder: FilePath | None = None) -> Study:
    """Read a study from its text. `file` is its name in messages; paths in it count from `folder`."""
    mapped = read_yaml(text)
    if mapped.data is None:
        raise StudyError(file, mapped.problems)
    draft = Draft(mapped, folder or FilePath())
    data = mapped.data
    if not isinstance(data, dict):
        draft.wrong((), "the file is no mapping", "begin with `study: NAME`")
        raise StudyError(file, draft.unspoilt(mapped.problems))
    empties(data, (), draft)
    _check_keys(data, draft)
    digest = hashlib.sha256(text.encode()).hexdigest()
    study = _checked(data, draft, file, digest)
    problems = draft.unspoilt(mapped.problems)
    if problems or study is None:
        raise StudyError(file, problems)
    return study


def _check_keys(data: dict[Any, Any], draft: Draft) -> None:
    known = list(StudyFile.model_fields)
    for key in data:
        if key not in known:
            draft.wrong(
                (key,), f"unknown key {str(key)!r}", did_you_mean(str(key), known, what="keys"), key=True
            )
    for name, field in StudyFile.model_fields.items():
        if name not in data and field.is_required():
            draft.wrong((), f"the study has no {name!r}", f"add `{name}: ...`")


def _checked(data: dict[Any, Any], draft: Draft, file: str, digest: str) -> Study | None:
    """Everything checked; None where something is wrong, which is then in the draft."""
    parts = {name: _part(name, data, draft) for name in StudyFile.model_fields if name not in _READ_BY_ENTRY}
    if "factors" in data:
        check_factors(data["factors"], draft)
    if "constants" in data:
        check_constants(data["constants"], draft)
    unit = check_unit(parts["unit"], draft) if parts["unit"] is not None else None
    _name_model(unit, draft)
    constraints = _constraints(data.get("constraints", []), unit, draft)
    measured = None
    if parts["model"] is not None:
        try:
            formula = parse_formula(parts["model"], draft.declared)
            measured = formula.measured
            if formula.response is None:
                remedy = "write what is measured ~ terms, such as ttft ~ tokens"
                draft.wrong(("model",), "a formula without `~`", remedy)
        except MistakeError as error:
            draft.wrong_inside(("model",), error)
    design = check_design(data["design"], draft) if "design" in data else None
    warmup = parts["warmup"]
    if warmup is not None:
        warmup = check_warmup(warmup, draft, measured, runs="run" in data)
    program = _program(data, draft)
    cost = parts["cost"]
    if draft.problems or unit is None or design is None or warmup is None or cost is None:
        return None
    return Study(
        name=parts["study"],
        about=parts["about"] or "",
        unit=unit,
        constants=draft.constants,
        cost=Cost(**cost.model_dump()),
        factors=tuple(draft.factors.values()),
        constraints=constraints,
        model=parts["model"],
        design=design,
        warmup=warmup,
        gates=tuple(parts["gates"] or ()),
        file=file,
        digest=digest,
        program=program,
    )


def _program(data: dict[Any, Any], draft: Draft) -> Program | None:
    """What is run, with every level tried out. What factors set without it has nowhere to go."""
    factors = data.get("factors")
    sets = {
        str(name): one["sets"]
        for name, one in (factors.items() if isinstance(factors, dict) else ())
        if isinstance(one, dict) and isinstance(one.get("sets"), dict)
    }
    if "run" in data:
        return check_program(data["run"], sets, draft)
    for name in sets:
        path = ("factors", name, "sets")
        draft.wrong(path, f"{name!r} sets something, and the study has no run", "add `run: ...`", key=True)
    return None


def _name_model(unit: Unit | None, draft: Draft) -> None:
    """In expressions, `model` is the study's model where no factor and no constant has that name."""
    if "model" not in (*draft.declared, *draft.declared_constants):
        draft.declared_constants.append("model")
        if unit is not None and unit.model is not None:
            draft.constants["model"] = unit.model


_READ_BY_ENTRY = ("factors", "constants", "constraints", "design", "run")


def _part(name: str, data: dict[Any, Any], draft: Draft) -> Any:
    """A part of the file by its form; its default where it is not there."""
    field = StudyFile.model_fields[name]
    if name not in data:
        return None if field.is_required() else field.get_default(call_default_factory=True)
    if name == "gates" and isinstance(data[name], list):
        _check_once(data[name], name, draft)
    return draft.form(_annotation(name), data[name], (name,))


def _annotation(name: str) -> Any:
    """A field's type with its bounds."""
    field = StudyFile.model_fields[name]
    return Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation


def _check_once(values: list[Any], name: str, draft: Draft) -> None:
    for at, value in enumerate(values):
        if value in values[:at] and value in GATES:
            draft.wrong((name, at), f"{value!r} is there twice", "take one of the two away")


def _constraints(raw: Any, unit: Unit | None, draft: Draft) -> tuple[Expression, ...]:
    if not isinstance(raw, list):
        draft.form(list[str], raw, ("constraints",))
        return ()
    found = []
    scope = draft.scope()
    for at, text in enumerate(raw):
        path = ("constraints", at)
        if not isinstance(text, str):
            remedy = 'write it in quotes, such as "tokens + max_tokens <= max_model_len"'
            draft.wrong(path, "a constraint that is no text", remedy)
            continue
        try:
            expression = parse_condition(text, scope)
        except MistakeError as error:
            draft.wrong_inside(path, error)
            continue
        if unit is not None:
            _check_sizes(expression, unit, path, draft)
        found.append(expression)
    return tuple(found)


def _check_sizes(expression: Expression, unit: Unit, path: tuple[str, int], draft: Draft) -> None:
    """Refuse sizes that are not known before anything is evaluated."""
    calls = (node for node in ast.walk(expression.tree) if isinstance(node, ast.Call))
    if any(ast.unparse(call.func) == "weights_bytes" for call in calls):
        for name in unit.models:
            try:
                unit.weights_bytes(name)
            except LabError as error:
                text, _, remedy = str(error).partition("; ")
                draft.wrong(path, text, remedy)
