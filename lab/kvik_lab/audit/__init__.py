"""Recompute published tables and the numbers in the text beside them.

>>> from kvik_lab.audit import audit_text
>>> table = '''
... | run | before (ms) | after (ms) | change |
... |---|---|---|---|
... | a | 120.0 | 90.0 | -25.0% |
... | b | 200.0 | 170.0 | -15.0% |
... | c | 80.0 | 50.0 | -60.0% |
... '''
>>> [(check.printed, check.follows) for check in audit_text(table).findings]
[('-60.0%', '-37.5%')]
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from kvik_lab.audit.engine import audit_document
from kvik_lab.audit.model import Audit, Cell, Check, Document, Place, Prose, Table
from kvik_lab.audit.reader import Kind, read, read_file

__all__ = [
    "Audit",
    "Cell",
    "Check",
    "Document",
    "Place",
    "Prose",
    "Table",
    "audit_files",
    "audit_text",
]


def audit_text(text: str, name: str = "text", kind: Kind = "auto") -> Audit:
    """Audit a text with tables. Raises LabError when it is not text."""
    return audit_document(read(text, name, kind))


def audit_files(paths: Iterable[str | Path]) -> Audit:
    """Audit files, each by itself; the form of each is found from its name and content.

    Raises LabError when one cannot be read.
    """
    audits = [audit_document(read_file(Path(path))) for path in paths]
    return Audit(
        tuple(table for audit in audits for table in audit.tables),
        tuple(check for audit in audits for check in audit.checks),
    )
