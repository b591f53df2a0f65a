"""The report's two files: JSON with everything that was measured, and a summary in Markdown beside it."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvik.bench.errors import BenchError
from kvik.selftest import summary
from kvik.selftest.run import Results

FORMAT = "kvik-selftest/1"
"""The schema and its version; docs/selftest.md describes it."""


def new_file(now: datetime) -> Path:
    """In the current folder, with the time in it and, of several in one second, a number: it is made, so that
    no report takes the place of another."""
    name, number = f"kvik-selftest-{now:%Y%m%dT%H%M%SZ}", 1
    while True:
        file = Path(f"{name}.json" if number == 1 else f"{name}-{number}.json")
        try:
            file.open("x").close()
        except FileExistsError:
            number += 1
        else:
            return file


def files(given: str | None) -> tuple[Path, Path]:
    """Where the JSON and the Markdown go; `BenchError` where they cannot."""
    file = Path(given) if given is not None else new_file(datetime.now(UTC))
    if file.suffix != ".json":
        raise BenchError(f"--report {file}: the name of a report ends with .json; its summary ends with .md")
    if not file.absolute().parent.is_dir():
        raise BenchError(f"--report: no folder for {file}")
    both = file, file.with_suffix(".md")
    for one in both:
        try:
            one.open("a").close()
        except OSError as error:
            raise BenchError(f"--report {one} cannot be written: {error.strerror}") from error
    return both


def to_json(results: Results, now: datetime) -> dict[str, Any]:
    """The document."""
    return {
        "format": FORMAT,
        "made": f"{now:%Y-%m-%dT%H:%M:%SZ}",
        "state": "passed" if results.passed else "failed",
        "interrupted": results.interrupted,
        "plan": results.plan.to_json(),
        "log": list(results.log),
        "parts": [part.to_json() for part in results.parts],
    }


def write(results: Results, paths: tuple[Path, Path]) -> None:
    """Write both files."""
    document = to_json(results, datetime.now(UTC))
    paths[0].write_text(json.dumps(document, separators=(",", ":")) + "\n", encoding="utf-8")
    paths[1].write_text(summary.render(document), encoding="utf-8")
