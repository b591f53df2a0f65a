"""One `config.json`, read so that every error names the key and the file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvik.shapes.errors import ShapeError

LARGEST_FILE = 16 * 1024 * 1024
# Where multimodal models keep the part that has the KV; `thinker_config` holds a `text_config` itself.
_NESTED = ("text_config", "llm_config", "language_config", "thinker_config")


@dataclass(frozen=True)
class Section:
    """An object of a configuration: its values, where it is from, and the path of keys that leads to it."""

    values: Mapping[str, Any]
    origin: str
    path: str = ""

    def has(self, *keys: str) -> bool:
        """Whether one of the keys has a value other than null."""
        return any(self.values.get(key) is not None for key in keys)

    def find(self, *keys: str) -> int | None:
        """The first of the keys that has a value; it must be a whole number."""
        for key in keys:
            value = self.values.get(key)
            if value is not None:
                if isinstance(value, bool) or not isinstance(value, int):
                    raise self.wrong(key, "is not a whole number")
                return value
        return None

    def need(self, *keys: str) -> int:
        """As `find`, but it is an error when there is none."""
        value = self.find(*keys)
        if value is None:
            others = f" (nor {', '.join(keys[1:])})" if len(keys) > 1 else ""
            raise ShapeError(f"{self.origin}: no {self.path}{keys[0]}{others}")
        return value

    def text(self, *keys: str) -> str | None:
        """The first of the keys that has a value; it must be text."""
        for key in keys:
            value = self.values.get(key)
            if value is not None:
                if not isinstance(value, str):
                    raise self.wrong(key, "is not text")
                return value
        return None

    def section(self, key: str) -> Section | None:
        """The object at a key, or None when there is none."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.wrong(key, "is not an object")
        return Section(value, self.origin, f"{self.path}{key}.")

    def wrong(self, key: str, why: str) -> ShapeError:
        """An error about the value at a key."""
        return ShapeError(f"{self.origin}: {self.path}{key} {why}: {str(self.values.get(key))[:80]!r}")


def read(source: Mapping[str, Any] | str | os.PathLike[str]) -> Section:
    """The whole configuration, from its content, its file, or the folder of the file."""
    if isinstance(source, Mapping):
        return Section(source, "the given configuration")
    path = Path(source)
    try:
        if path.is_dir():
            path /= "config.json"
        with path.open("rb") as file:
            raw = file.read(LARGEST_FILE + 1)
    except OSError as error:
        raise ShapeError(f"{path}: cannot be read: {error.strerror or error}") from error
    if len(raw) > LARGEST_FILE:
        raise ShapeError(f"{path}: larger than {LARGEST_FILE} bytes, which no config.json is")
    try:
        values = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ShapeError(f"{path}: not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ShapeError(f"{path}: not a JSON object")
    return Section(values, str(path))


def there(text: str) -> bool:
    """Whether a text is the path of something, also of what this user may not look at."""
    try:
        return Path(text).exists()
    except PermissionError:
        return True  # and what reads it says so
    except OSError:  # longer than a path can be
        return False


def text_section(root: Section) -> Section:
    """The part of a multimodal model's configuration that is about the language model; else the whole."""
    for key in _NESTED:
        inner = root.section(key)
        if inner is not None:
            return text_section(inner)
    return root
