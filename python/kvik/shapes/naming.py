"""What a person may write where a model is asked for."""

from __future__ import annotations

import difflib
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from kvik.shapes.config import shape_from_config
from kvik.shapes.errors import ShapeError
from kvik.shapes.model import ModelShape
from kvik.shapes.presets import PRESETS, preset_shape

_TEXTS = ("name", "attention", "dtype")


def resolve_shape(text: str, *, dtype: str | None = None) -> ModelShape:
    """A preset's name, a path to a `config.json` or its folder, or fields: `layers=4,kv_heads=2,...`."""
    if text in PRESETS:
        return preset_shape(text, dtype=dtype)
    if "=" in text and not Path(text).exists():
        shape = _from_fields(text)
        return replace(shape, dtype=dtype) if dtype else shape
    if Path(text).exists():
        return shape_from_config(text, dtype=dtype)
    near = difflib.get_close_matches(text, PRESETS, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise ShapeError(
        f"{text!r} is no preset and no file or folder here{hint}. Presets: {', '.join(PRESETS)}. Else give "
        "the path of a config.json, or layers=N,kv_heads=N,head_size=N"
    )


def _from_fields(text: str) -> ModelShape:
    known = [field.name for field in fields(ModelShape)]
    given: dict[str, Any] = {"name": "described"}
    for part in text.split(","):
        key, _, value = (piece.strip() for piece in part.partition("="))
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ShapeError(f"{key!r} in {text!r} is no field of a model's shape{hint}")
        if key in given and key != "name":
            raise ShapeError(f"{key!r} is given twice in {text!r}")
        given[key] = value if key in _TEXTS else _number(key, value)
    missing = [key for key in ("layers", "kv_heads", "head_size") if key not in given]
    if missing:
        raise ShapeError(f"{text!r} lacks {', '.join(missing)}")
    return ModelShape(**given)


def _number(key: str, value: str) -> int:
    try:
        return int(value)
    except ValueError as error:
        raise ShapeError(f"{key} is {value!r}; it is a whole number") from error
