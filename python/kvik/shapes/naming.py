"""What a person may write where a model is asked for, besides a preset's name and a path."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

from kvik.shapes.errors import ShapeError
from kvik.shapes.presets import PRESETS

_TEXTS = ("name", "attention", "dtype")


def no_model(text: str) -> ShapeError:
    """The error for a text that is neither a preset nor a path nor fields."""
    near = difflib.get_close_matches(text, PRESETS, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return ShapeError(
        f"{text!r} is no preset and no file or folder here{hint}. Presets: {', '.join(PRESETS)}. Else give "
        "the path of a config.json, or layers=N,kv_heads=N,head_size=N"
    )


def named_fields(text: str, known: Sequence[str]) -> dict[str, Any]:
    """The values in `layers=4,kv_heads=2,...`, of fields that are `known`. Raises `ShapeError`."""
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
    return given


def _number(key: str, value: str) -> int:
    try:
        return int(value)
    except ValueError as error:
        raise ShapeError(f"{key} is {value!r}; it is a whole number") from error
