"""The raw data of a run of many parts: written after each part, so that a run that was cut off goes on."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

SAME = ("cpu_model", "cores_usable", "kernel", "autogroups", "kvik", "vllm", "nixl")
"""Facts that all parts of a run have in common."""


def begun(settings: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """Raw data without a part, with these settings."""
    return {"settings": {name: getattr(settings, name) for name in names}, "cells": []}


def read(path: Path, settings: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """The raw data of a run to go on with; its settings replace those that were given."""
    raw: dict[str, Any] = json.loads(path.read_text())
    for name in names:
        setattr(settings, name, raw["settings"][name])
    return raw


def note_facts(raw: dict[str, Any], found: dict[str, Any]) -> None:
    """Keep what is measured, and on what. SystemExit where the parts that are there were of something else:
    together they would be told as of one."""
    before = raw.setdefault("facts", found)
    other = [
        f"{name} {before.get(name)}, not {found.get(name)}"
        for name in SAME
        if before.get(name) != found.get(name)
    ]
    if other:
        raise SystemExit(f"what is in the file was measured with {'; '.join(other)}: begin another file")


def write(path: Path | None, raw: dict[str, Any]) -> None:
    """Write all there is, at once; nothing where there is no path."""
    if path is not None:
        new = path.with_suffix(".new")
        new.write_text(json.dumps(raw))
        new.replace(path)
