"""Which reader a text needs."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Literal

from kvik_lab.audit.model import Document
from kvik_lab.audit.read_csv import delimiter, read_csv
from kvik_lab.audit.read_html import read_html
from kvik_lab.audit.read_markdown import is_rule, read_markdown
from kvik_lab.errors import LabError

Kind = Literal["auto", "markdown", "html", "csv"]


def read(text: str, name: str, kind: Kind = "auto") -> Document:
    """A text as a document; with kind "auto" its form is found from its content."""
    if "\0" in text:
        raise LabError(f"{name}: this is not text: save the table as Markdown, HTML or CSV")
    try:
        known = _guess(text) if kind == "auto" else kind
        if known == "html":
            return read_html(text, name)
        return read_csv(text, name) if known == "csv" else read_markdown(text, name)
    except csv.Error as error:  # such as a cell of more than 128 KiB
        raise LabError(f"{name}: this is no table: {error}") from error


def _guess(text: str) -> Kind:
    lines = text.splitlines()
    if any(is_rule(line) for line in lines):
        return "markdown"
    start = text.lstrip()[:200].lower()
    if start.startswith(("<!doctype", "<html", "<table", "<?xml")) or "<body" in text.lower():
        return "html"
    if "<table" not in text.lower() and len(lines) > 1 and delimiter(lines) is not None:
        return "csv"
    return "markdown"


def read_file(path: Path) -> Document:
    """A file as a document. Raises LabError when it cannot be read as text."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise LabError(f"{path}: not UTF-8 at byte {error.start}: convert the file to UTF-8") from error
    except OSError as error:
        raise LabError(f"{path}: {error.strerror or error}: give the path of a file with tables") from error
    kinds: dict[str, Kind] = {".html": "html", ".htm": "html", ".csv": "csv", ".tsv": "csv"}
    return read(text, str(path), kinds.get(path.suffix.lower(), "auto"))
