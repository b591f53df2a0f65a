"""A report as JSON and back. The schema is versioned by the field `schema`."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter, ValidationError

from kvik_lab.errors import LabError
from kvik_lab.report.model import Report

_ADAPTER: TypeAdapter[Report] = TypeAdapter(Report)


def to_json(report: Report) -> str:
    """The report as JSON text."""
    return _ADAPTER.dump_json(report, indent=1).decode() + "\n"


def from_json(text: str) -> Report:
    """The report that `to_json` wrote; LabError says where the text is something else."""
    try:
        return _ADAPTER.validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the whole"
        raise LabError(f"this is no report: {where}: {first['msg']}") from error


def json_schema() -> dict[str, Any]:
    """The JSON schema of reports."""
    return _ADAPTER.json_schema()
