"""Whether runs count: the gates over each run when it has ended, and over all of them together at the end."""

from __future__ import annotations

from collections.abc import Sequence

from kvik_lab.gates.judge import judge as judge_one
from kvik_lab.gates.judge import judge_study
from kvik_lab.records import Finding, Gate, RunRecord
from kvik_lab.run.journal import Journal


def judged(record: RunRecord, journal: Journal, gates: Sequence[Gate]) -> RunRecord:
    """The record with its verdict, beside the runs before it; one that was not completed as it is."""
    if record.outcome != "completed":
        return record
    return judge_one(record, completed(journal), gates)


def judge_again(journal: Journal, gates: Sequence[Gate]) -> list[RunRecord]:
    """Judge every run beside all others, and write down what is judged otherwise now: what compares arms
    could not be said of the first runs. Returns the records whose verdict has changed."""
    found = []
    for record in judge_study(completed(journal), gates):
        before = journal.records[record.id]
        changed = record.verdict != before.verdict
        if changed or _said(record.findings) != _said(before.findings):
            journal.add(record)
        if changed:
            found.append(record)
    return found


def _said(findings: Sequence[Finding]) -> list[tuple[object, ...]]:
    """What each gate says. Where one passed, its words count for nothing: those of V8 have the number of runs
    beside it, so that each run would be written again."""
    return [(one.gate, one.status, one.status != "passed" and one.what) for one in findings]


def completed(journal: Journal) -> list[RunRecord]:
    """The runs that were completed."""
    return [record for record in journal.records.values() if record.outcome == "completed"]
