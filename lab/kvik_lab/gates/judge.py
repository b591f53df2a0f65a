"""All gates over a run, and the verdict that follows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from kvik_lab.gates import files, transfers
from kvik_lab.gates.caches import v1, v3
from kvik_lab.gates.case import Case
from kvik_lab.gates.health import v9
from kvik_lab.gates.moved import v2, v7
from kvik_lab.gates.parity import v8
from kvik_lab.gates.path import v4
from kvik_lab.gates.plausible import v5, v6
from kvik_lab.records import Finding, Gate, RunRecord, Verdict

GATES: Mapping[Gate, Callable[[Case], Finding]] = {
    "V1": v1,
    "V2": v2,
    "V3": v3,
    "V4": v4,
    "V5": v5,
    "V6": v6,
    "V7": v7,
    "V8": v8,
    "V9": v9,
}
OF_FILES = {**GATES, "V1": files.v1, "V2": files.v2, "V6": files.v6, "V7": files.v7}
"""Of runs that load a file."""
OF_TRANSFERS = {**GATES, "V2": transfers.v2, "V7": transfers.v7}
"""Of runs that move pages without a serving system."""

_OF = {"storage": OF_FILES, "transfer": OF_TRANSFERS}


def judge(
    record: RunRecord, beside: Sequence[RunRecord] = (), gates: Collection[Gate] = tuple(GATES)
) -> RunRecord:
    """The record with the findings of these gates and its verdict; nothing else of it changes.

    beside: other runs of the study, which V6 and V8 compare with. The same record with the same runs beside
    it has the same verdict, whenever it is asked for.
    """
    case = Case(record, [one for one in beside if one.id != record.id and one.study == record.study])
    rules = _OF.get(record.stated.mode, GATES)
    findings = tuple(rules[gate](case) for gate in rules if gate in gates)
    return record.model_copy(update={"findings": findings, "verdict": verdict(findings)})


def verdict(findings: Sequence[Finding]) -> Verdict:
    """Invalid where one is, else suspect where one is, else valid."""
    found = {finding.status for finding in findings}
    return "invalid" if "invalid" in found else "suspect" if "suspect" in found else "valid"


def judge_study(
    records: Sequence[RunRecord], gates: Collection[Gate] = tuple(GATES)
) -> tuple[RunRecord, ...]:
    """Every completed run, each beside all others; what did not complete is given back as it is."""
    completed = [record for record in records if record.outcome == "completed"]
    return tuple(
        judge(record, completed, gates) if record.outcome == "completed" else record for record in records
    )
