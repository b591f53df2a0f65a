"""The raw data of a run of many parts: written after each part, so that a run that was cut off goes on."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def begun(settings: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """Raw data without a part, with these settings."""
    return {"settings": {name: getattr(settings, name) for name in names}, "cells": []}


def read(path: Path, settings: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """The raw data of a run to go on with; its settings replace those that were given."""
    raw: dict[str, Any] = json.loads(path.read_text())
    for name in names:
        setattr(settings, name, raw["settings"][name])
    return raw


def write(path: Path | None, raw: dict[str, Any]) -> None:
    """Write all there is, at once; nothing where there is no path."""
    if path is not None:
        new = path.with_suffix(".new")
        new.write_text(json.dumps(raw))
        new.replace(path)
