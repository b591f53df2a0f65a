"""The element types that KV is kept in, by the names that models' configurations and people use."""

from __future__ import annotations

import difflib

from kvik.shapes.errors import ShapeError

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}

_ALIASES = {
    "fp32": "float32",
    "float": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp8_e4m3": "fp8",
    "fp8_e5m2": "fp8",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
}


def canonical_dtype(text: str) -> str:
    """The one name of an element type: a key of `ELEMENT_BYTES`. `ShapeError` for one that is not known."""
    name = text.removeprefix("torch.").lower()
    name = _ALIASES.get(name, name)
    if name not in ELEMENT_BYTES:
        near = difflib.get_close_matches(name, [*ELEMENT_BYTES, *_ALIASES], n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ShapeError(f"KV element type {text!r} is not one of {', '.join(ELEMENT_BYTES)}{hint}")
    return name
