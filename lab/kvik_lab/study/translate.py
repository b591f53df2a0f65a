"""pydantic's errors as problems: with a place, in plain words, with a remedy."""

from __future__ import annotations

import types
import typing
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from kvik_lab.study.problems import Path, Problem, did_you_mean
from kvik_lab.study.yamlmap import Mapped

_WANTED = {
    "string_type": ("text", "write a text, in quotes where it looks like a number"),
    "bool_type": ("true or false", "write true or false"),
    "int_type": ("a whole number", "write a whole number without quotes"),
    "float_type": ("a number", "write a number without quotes"),
    "list_type": ("a list", "write [a, b], or an item a line behind `- `"),
    "dict_type": ("a mapping", "write `key: value` pairs"),
    "model_type": ("a mapping", "write `key: value` pairs, indented"),
    "model_attributes_type": ("a mapping", "write `key: value` pairs, indented"),
}
_BOUNDS = {
    "greater_than": "above",
    "greater_than_equal": "from",
    "less_than": "below",
    "less_than_equal": "up to",
}


def check_form(annotation: Any, value: Any, path: Path, mapped: Mapped) -> tuple[Any, list[Problem]]:
    """Validate one value of the file; (the value, or None where it is wrong; what is wrong)."""
    try:
        return TypeAdapter(annotation).validate_python(value, by_alias=True), []
    except ValidationError as error:
        found = [_problem(one, annotation, path, mapped) for one in error.errors(include_url=False)]
        return None, found


def _problem(error: ErrorDetails, annotation: Any, path: Path, mapped: Mapped) -> Problem:
    loc = tuple(error["loc"])
    whole, on_key = _placed((*path, *loc), mapped)
    kind, value = error["type"], error["input"]
    if kind == "extra_forbidden":
        owner = _model_at(annotation, loc[:-1])
        known = _keys(owner) if owner else []
        remedy = did_you_mean(str(loc[-1]), known, what="keys here")
        return mapped.problem(whole, f"unknown key {str(loc[-1])!r}", remedy, key=True)
    if kind == "missing":
        owner = _model_at(annotation, loc[:-1])
        about = owner.model_fields[_field(owner, str(loc[-1]))].description if owner else None
        remedy = f"add `{loc[-1]}: ...`" + (f" ({about.rstrip('.')})" if about else "")
        name = f"{whole[-1]!r} has no {str(loc[-1])!r}" if whole else f"the study has no {str(loc[-1])!r}"
        return mapped.problem(whole, name, remedy, key=True)
    if kind == "study":
        context = error["ctx"]
        return mapped.problem(whole, str(context["text"]), str(context["remedy"]), key=on_key)
    text, remedy = _explained(kind, error, value)
    return mapped.problem(whole, f"{_named(whole)} {text}", remedy, key=on_key)


def _explained(kind: str, error: ErrorDetails, value: Any) -> tuple[str, str]:
    context = error.get("ctx", {})
    if kind in _WANTED:
        wanted, remedy = _WANTED[kind]
        return f"is {_shown(value)}, not {wanted}", remedy
    if kind == "literal_error":
        known = [one.strip(" '") for one in str(context["expected"]).replace(" or ", ", ").split(",")]
        return f"is {_shown(value)}", did_you_mean(str(value), known, what="one of")
    if kind in _BOUNDS:
        bound = next(iter(context.values()))
        return f"is {_shown(value)}", f"write a number {_BOUNDS[kind]} {bound:g}"
    if kind == "too_short":
        least = context["min_length"]
        return f"has {context['actual_length']} of at least {least} entries", f"give at least {least}"
    if kind == "string_too_short":
        return "is an empty text", "write something, or leave the key out"
    return f"is {_shown(value)}: {error['msg']}", "see `kvik lab schema` for what belongs there"


def _named(path: Path) -> str:
    names = [str(part) for part in path if isinstance(part, str)]
    return f"{names[-1]!r}" if names else "the file"


def _shown(value: Any) -> str:
    if value is None:
        return "empty"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f"the text {value[:40]!r}"
    if isinstance(value, int | float):
        return f"the number {value}"
    return "a list" if isinstance(value, list) else "a mapping"


def _placed(loc: tuple[Any, ...], mapped: Mapped) -> tuple[Path, bool]:
    """The path of an error in the file, without what pydantic puts between, and whether it is about a key."""
    found: Path = ()
    for part in loc:
        if (*found, part) in mapped.places:
            found = (*found, part)
    return found, bool(loc) and loc[-1] == "[key]"


def _model_at(annotation: Any, loc: tuple[Any, ...]) -> type[BaseModel] | None:
    """The section that a location is in."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _model_at(arguments[0], loc)
    if origin in (types.UnionType, typing.Union):
        found = (_model_at(one, loc) for one in arguments if one is not type(None))
        return next((one for one in found if one), None)
    if origin is dict and loc:
        return _model_at(arguments[1], loc[1:])
    if origin is list and loc:
        return _model_at(arguments[0], loc[1:])
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        if not loc:
            return annotation
        field = annotation.model_fields.get(_field(annotation, str(loc[0])))
        return _model_at(field.annotation, loc[1:]) if field else None
    return None


def _keys(owner: type[BaseModel]) -> list[str]:
    return [field.alias or name for name, field in owner.model_fields.items()]


def _field(owner: type[BaseModel], key: str) -> str:
    return next((name for name, field in owner.model_fields.items() if field.alias == key), key)
