"""Whether a run counts: the gates, as far as one run can be judged alone."""

from __future__ import annotations

from kvik_lab.records import RunRecord


def judge(record: RunRecord) -> RunRecord:
    """The record with its verdict."""
    return record
